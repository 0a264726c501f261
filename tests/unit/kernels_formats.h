/* kernels_formats.h - random weights in every block format and in scaled ones, as files have them:
 * what the tests of their products share. */
#ifndef TD_TESTS_KERNELS_FORMATS_H
#define TD_TESTS_KERNELS_FORMATS_H

#include "tests/unit/kernels_test.h"

#include "kernels/format.h"
#include "kernels/scaled.h"

/* Formats by GGUF's number; td_format_of_gguf says which there are. */
enum { N_TYPES = 64 };

/* Where the f16 factors of a block stand; -1: none. */
static inline void factors_of(const struct td_format *f, int ret_at[2])
{
    static const struct {
        const char *name;
        int at[2];
    } rows[] = {{"Q2_K", {80, 82}}, {"Q3_K", {108, -1}}, {"Q6_K", {208, -1}}, {"MXFP4", {-1, -1}}};
    bool has_m = f->scales == TD_SCALES_F16_MIN || f->scales == TD_SCALES_U8_MIN;
    ret_at[0] = 0, ret_at[1] = has_m ? 2 : -1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, f->name) == 0) memcpy(ret_at, rows[i].at, sizeof rows[i].at);
}

/* Random blocks with scales that are finite: every f16 is drawn apart. */
static inline uint8_t *random_blocks(const struct td_format *f, int32_t n, int32_t k)
{
    size_t bytes = (size_t)n * td_format_bytes(f, k);
    uint8_t *rows = alloc_poisoned(bytes);
    int at[2];
    factors_of(f, at);
    for (size_t i = 0; i < bytes; i++) rows[i] = (uint8_t)rng_u64();
    for (uint8_t *b = rows; b < rows + bytes; b += f->block_bytes) {
        for (int i = 0; i < 2; i++) {
            uint16_t d;
            put(&d, TD_F16, 0, 0.01f * rng_normal());
            if (at[i] >= 0) memcpy(b + at[i], &d, 2);
        }
        if (at[0] < 0) b[0] = (uint8_t)(rng_int(0, 9) ? rng_int(100, 140) : rng_int(0, 2));
    }
    return rows;
}

/* The formats of the checkpoints that are read, and odd ones beside them. */
static const struct scaled_kind {
    const char *name;
    enum td_scaled_kind kind;
    enum td_scaled_x x;
    enum td_dtype scale_type;
    int32_t bits, group; /* 0: a whole row */
    bool has_zeros, act_order, x_powers;
} kinds[] = {
    {"int4 zeros", TD_SCALED_INT, TD_SCALED_X_F32, TD_F16, 4, 32, true, false, false},
    {"int4 act order", TD_SCALED_INT, TD_SCALED_X_F32, TD_F16, 4, 16, true, true, false},
    {"int4 symmetric", TD_SCALED_INT, TD_SCALED_X_F32, TD_BF16, 4, 128, false, false, false},
    {"int8 rows", TD_SCALED_INT, TD_SCALED_X_F32, TD_F32, 8, 0, true, false, false},
    {"int8 act order", TD_SCALED_INT, TD_SCALED_X_F32, TD_F16, 8, 24, true, true, false},
    {"table", TD_SCALED_TABLE, TD_SCALED_X_F32, TD_F32, 4, 64, false, false, false},
    {"e4m3 rows", TD_SCALED_E4M3, TD_SCALED_X_ROW, TD_F32, 8, 0, false, false, false},
    {"e4m3 static", TD_SCALED_E4M3, TD_SCALED_X_STATIC, TD_F32, 8, 0, false, false, false},
    {"e4m3 blocks", TD_SCALED_E4M3, TD_SCALED_X_GROUP, TD_F32, 8, 128, false, false, false},
    {"e4m3 weights", TD_SCALED_E4M3, TD_SCALED_X_F32, TD_BF16, 8, 48, false, false, false},
    {"int4 zeros bf16", TD_SCALED_INT, TD_SCALED_X_BF16, TD_F16, 4, 32, true, false, false},
    {"int4 symmetric bf16", TD_SCALED_INT, TD_SCALED_X_BF16, TD_BF16, 4, 128, false, false, false},
    {"int8 rows bf16", TD_SCALED_INT, TD_SCALED_X_BF16, TD_F32, 8, 0, true, false, false},
    {"int8 groups bf16", TD_SCALED_INT, TD_SCALED_X_BF16, TD_F16, 8, 24, false, false, false},
    {"table bf16", TD_SCALED_TABLE, TD_SCALED_X_BF16, TD_F32, 4, 64, false, false, false},
    {"e4m3 weights bf16", TD_SCALED_E4M3, TD_SCALED_X_BF16, TD_BF16, 8, 48, false, false, false},
    {"i8", TD_SCALED_I8, TD_SCALED_X_ROW, TD_F32, 8, 0, false, false, false},
    {"i8 outliers", TD_SCALED_I8, TD_SCALED_X_OUTLIER, TD_F32, 8, 0, false, false, false},
    {"e4m3 blocks powers", TD_SCALED_E4M3, TD_SCALED_X_GROUP, TD_BF16, 8, 128, false, false, true},
    {"e4m3 rows powers", TD_SCALED_E4M3, TD_SCALED_X_ROW, TD_F32, 8, 0, false, false, true},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

static inline struct td_format random_scaled_format(const struct scaled_kind *t, int32_t k,
                                                    uint16_t *group_of)
{
    struct td_format f = {.name = t->name, .block = k, .bits = t->bits, .offset = 8};
    struct td_scaled *s = &f.scaled;
    *s = (struct td_scaled){.kind = t->kind,
                            .x = t->x == TD_SCALED_X_BF16 ? TD_SCALED_X_F32 : t->x,
                            .scale_type = t->scale_type,
                            .group = t->group && t->group < k ? t->group : k,
                            .has_zeros = t->has_zeros,
                            .group_of = t->act_order ? group_of : NULL,
                            .x_scale = 0.01f,
                            .x_powers = t->x_powers};
    s->n_groups = (k + s->group - 1) / s->group;
    for (int i = 0; i < 16; i++) s->table[i] = rng_normal();
    for (int32_t i = 0; i < k; i++) group_of[i] = (uint16_t)rng_int(0, s->n_groups - 1);
    f.block_bytes = (int32_t)td_scaled_row_bytes(s, k);
    if (t->x == TD_SCALED_X_BF16 && !td_scaled_use_bf16(&f)) fail_msg("%s: not in bf16", t->name);
    return f;
}

/* Random codes and scales, with the extremes of both; rows as pack takes them. */
static inline uint8_t *random_scaled(const struct td_format *f, int32_t n)
{
    size_t row_bytes = (size_t)f->block_bytes;
    uint8_t *rows = alloc_poisoned((size_t)n * row_bytes);
    memset(rows, 0, (size_t)n * row_bytes);
    for (int32_t i = 0; i < n; i++) {
        struct td_scaled_row r = td_scaled_row_at(f, rows + (size_t)i * row_bytes);
        for (int32_t k = 0; k < f->block; k++) {
            r.codes[k] = (uint8_t)(rng_u64() & (f->bits == 4 ? 15 : 255));
            if (rng_int(0, 9) == 0) r.codes[k] = f->bits == 4 ? 15 : 0x80;
            if (f->scaled.kind == TD_SCALED_E4M3 && (r.codes[k] & 0x7f) == 0x7f) r.codes[k]--;
        }
        for (int32_t g = 0; g < f->scaled.n_groups; g++) {
            uint32_t bits[1] = {0};
            put(bits, f->scaled.scale_type, 0, 0.02f * rng_normal());
            r.scales[g] = td_widen(bits, f->scaled.scale_type, 0);
            if (f->scaled.has_zeros) r.zeros[g] = (uint8_t)rng_int(0, f->bits == 4 ? 16 : 255);
        }
    }
    return rows;
}

#endif
