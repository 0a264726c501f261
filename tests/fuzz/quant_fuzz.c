/* quant_fuzz.c - a safetensors file of a quantised model, as safetensors_fuzz has it, behind a byte
 * that chooses the scheme. Every matrix that is accepted gives all its rows, whole and cut. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/quant_tensors.h"
#include "common/model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const struct td_quant_config configs[] = {
    {.scheme = TD_QUANT_GPTQ, .name = "gptq", .bits = 4, .group = 16, .act_order = true},
    {.scheme = TD_QUANT_GPTQ, .name = "gptq", .bits = 8, .zeros_minus_1 = true},
    {.scheme = TD_QUANT_AWQ, .name = "awq", .bits = 4, .group = 16},
    {.scheme = TD_QUANT_PACKED, .name = "packed", .bits = 4, .group = 16, .act_order = true},
    {.scheme = TD_QUANT_PACKED, .name = "packed", .bits = 8, .symmetric = true},
    {.scheme = TD_QUANT_INT8, .name = "int8", .bits = 8, .x = TD_QUANT_X_ROW},
    {.scheme = TD_QUANT_FP8, .name = "fp8", .bits = 8, .x = TD_QUANT_X_STATIC},
    {.scheme = TD_QUANT_FP8,
     .name = "fp8",
     .bits = 8,
     .x = TD_QUANT_X_GROUP,
     .group = 32,
     .block_rows = 32},
    {.scheme = TD_QUANT_BNB8, .name = "bitsandbytes", .bits = 8, .x = TD_QUANT_X_OUTLIER},
    {.scheme = TD_QUANT_BNB4, .name = "nf4", .bits = 4},
};

/* Groups of compressed-tensors: two that their tensors' shapes tell apart, and one of another
 * format. */
static const struct td_quant_config three[TD_QUANT_SCHEMES_MAX] = {
    {.scheme = TD_QUANT_PACKED, .name = "packed", .bits = 4, .group = 16, .symmetric = true},
    {.scheme = TD_QUANT_PACKED, .name = "packed", .bits = 8},
    {.scheme = TD_QUANT_INT8, .name = "int8", .bits = 8, .x = TD_QUANT_X_ROW},
};

/* GPTQ with other parameters for some modules. */
static const struct td_quant_config dynamic[TD_QUANT_SCHEMES_MAX] = {
    {.scheme = TD_QUANT_GPTQ, .name = "gptq", .bits = 4, .group = 16, .zeros_minus_1 = true},
    {.scheme = TD_QUANT_GPTQ, .name = "gptq", .bits = 8, .zeros_minus_1 = true},
    {.scheme = TD_QUANT_GPTQ, .name = "gptq", .bits = 4, .act_order = true, .zeros_minus_1 = true},
};

/* Columns [col0, col0 + n) of all rows. */
static void read_all(const struct td_quant_tensor *q, int32_t col0, int32_t n)
{
    struct td_format f;
    uint16_t *group_of = malloc((size_t)n * sizeof *group_of);
    volatile uint8_t sink = 0;
    td_quant_cut(q, col0, n, true, group_of, &f);
    uint8_t *row = malloc((size_t)f.block_bytes);
    for (int32_t i = 0; i < q->n_out; i++) {
        q->read_rows(q, &f, col0, i, 1, row);
        for (int32_t k = 0; k < f.block_bytes; k++) sink = (uint8_t)(sink + row[k]);
    }
    for (int32_t k = 0; k < n && f.scaled.group_of; k++)
        TD_ASSERT(f.scaled.group_of[k] < f.scaled.n_groups);
    free(row), free(group_of);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 3) return 0;
    enum { N = sizeof configs / sizeof *configs };
    struct td_quant_config config[TD_QUANT_SCHEMES_MAX] = {configs[data[0] % N]};
    if (data[0] == 255) memcpy(config, three, sizeof config);
    if (data[0] == 254) memcpy(config, dynamic, sizeof config);
    size_t tail = (size_t)data[1]; /* bytes of tensor data at the end */
    data += 2, n_bytes -= 2;
    uint8_t *file = malloc(8 + n_bytes);
    if (!file) return 0;
    uint64_t header = n_bytes > tail ? n_bytes - tail : 0;
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(header >> (8 * i));
    memcpy(file + 8, data, n_bytes);
    struct td_checkpoint c = {0};
    struct td_err err = {0};
    td_status s = td_safetensors_parse(file, 8 + n_bytes, "fuzz", &c, &err);
    if (!s && (s = td_quant_tensors(config, "fuzz", &c, &err)))
        TD_ASSERT(err.code == s && err.msg[0]);
    for (int32_t i = 0; i < c.n_tensors && !s; i++) {
        const struct td_quant_tensor *q = c.tensors[i].quant;
        if (!q) continue;
        int32_t third = q->n_in / 3;
        read_all(q, 0, q->n_in);
        if (third) read_all(q, third, q->n_in - third);
    }
    td_checkpoint_close(&c);
    free(file);
    return 0;
}
