/* quant_config.h - the object "quantization_config" of a config.json: which scheme the checkpoint's
 * matrices are stored in, and its parameters.
 *
 * Every field is honoured, checked, or on the list of those that cannot change a number; others are
 * refused by name, and so is every variant of a scheme that this version does not compute with. */
#ifndef TD_MODEL_QUANT_CONFIG_H
#define TD_MODEL_QUANT_CONFIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

enum td_quant_scheme {
    TD_QUANT_NONE,
    TD_QUANT_GPTQ,
    TD_QUANT_AWQ,
    TD_QUANT_PACKED, /* compressed-tensors, integers in words */
    TD_QUANT_INT8,   /* compressed-tensors, signed bytes */
    TD_QUANT_FP8,    /* E4M3: of compressed-tensors, of DeepSeek's kind, modelopt's */
    TD_QUANT_BNB8,   /* bitsandbytes: LLM.int8() */
    TD_QUANT_BNB4,   /* bitsandbytes: NF4, FP4 */
    TD_QUANT_MXFP4,  /* experts of gpt-oss, in stacks (expert_stacks.c) */
};

/* How activations are rounded before a product. */
enum td_quant_x {
    TD_QUANT_X_NONE,
    TD_QUANT_X_ROW,     /* each row by its largest */
    TD_QUANT_X_STATIC,  /* by a number of the checkpoint */
    TD_QUANT_X_GROUP,   /* each group of a row by its largest */
    TD_QUANT_X_OUTLIER, /* each row by its largest below 6.0; the others not at all */
};

struct td_quant_config {
    enum td_quant_scheme scheme;
    const char *name;   /* for messages: "gptq"; static */
    int32_t bits;       /* of a code */
    int32_t group;      /* values of a row that share a scale; 0: all of them */
    int32_t block_rows; /* FP8: rows that share them, too; 0: not */
    enum td_quant_x x;
    bool symmetric;     /* PACKED: no zeros are stored */
    bool act_order;     /* GPTQ, PACKED: columns belong to groups in any order */
    bool zeros_minus_1; /* GPTQ v1: the file has each zero less one */
    bool x_powers;      /* FP8: scales of activations are powers of two */
};

/* The configs of a checkpoint; places that are not used have the scheme TD_QUANT_NONE, and so has
 * [0] where its matrices are plain. Only compressed-tensors (groups) and GPTQ (settings of some
 * modules) have several. Two of one scheme differ in bits or group sizes, so that the shapes of a
 * matrix' tensors show which of them it follows. */
enum { TD_QUANT_SCHEMES_MAX = 3 };

/* Reads the value of "quantization_config" (NULL, null and {} mean none); `what` names the file in
 * errors. */
td_status td_quant_config_read(const json_t *value, const char *what,
                               struct td_quant_config ret_configs[TD_QUANT_SCHEMES_MAX],
                               struct td_err *err);

/* Older directories have it in a file of its own: quantize_config.json (AutoGPTQ),
 * hf_quant_config.json (modelopt) or quant_config.json (AutoAWQ). `configs` are what config.json
 * says. Where that is nothing, they become what such a file says; else a file that can be read must
 * say the same, or the directory is refused (TD_ERR_CORRUPT). */
td_status td_quant_config_beside(const char *dir,
                                 struct td_quant_config configs[TD_QUANT_SCHEMES_MAX],
                                 struct td_err *err);

#endif
