/* mix.h - which format each tensor of a quantised model gets: the mixes that users know by the
 * names of llama.cpp's files ("q4_k_m"), for files that are written and for models that are rounded
 * while they are loaded.
 *
 * A mix is a format for most matrices, and others for those that cost most accuracy: the output
 * matrix, and in some layers the projection of v and the last one of the MLP. Vectors stay F32. */
#ifndef TD_MODEL_MIX_H
#define TD_MODEL_MIX_H

#include <stdint.h>

#include "common/model/config.h"
#include "kernels/format.h"

/* for tables of options */
#define TD_MIX_NAMES "q8_0|q6_k|q5_k_m|q5_k_s|q5_1|q5_0|q4_k_m|q4_k_s|q4_1|q4_0|iq4_nl|mxfp4"

struct td_mix;

/* One of TD_MIX_NAMES, or "f32", "f16" or "bf16" (no blocks); NULL: another name. */
const struct td_mix *td_mix_by_name(const char *name);
/* What general.file_type of a GGUF file says. */
uint32_t td_mix_file_type(const struct td_mix *mix);
bool td_mix_has_blocks(const struct td_mix *mix); /* one of TD_MIX_NAMES */

/* The format of a matrix with rows of n_cols values, by Hugging Face's name of it. `own` is its
 * present format: kept when no block fits the rows. */
const struct td_format *td_mix_format(const struct td_mix *mix, const struct td_model_config *c,
                                      const char *name, int64_t n_cols,
                                      const struct td_format *own);

#endif
