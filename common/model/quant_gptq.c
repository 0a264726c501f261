/* quant_gptq.c - GPTQ: Frantar et al. 2022, in the layout that AutoGPTQ and GPTQModel write.
 *
 *   qweight  I32 [n_in * bits / 32, n_out]      code k of output n: word k / (32 / bits)
 *   qzeros   I32 [groups, n_out * bits / 32]    zero of output n, less one in "gptq" (v1)
 *   scales   F16 [groups, n_out]
 *   g_idx    I32 [n_in]                         the group of each column; absent: in order */
#include <inttypes.h>
#include <string.h>

#include "common/model/quant_internal.h"
#include "kernels/scaled.h"

/* 8 nibbles of a word to 8 bytes. */
static void spread_nibbles(uint32_t word, uint8_t *ret)
{
    uint64_t v = word;
    v = (v | v << 16) & 0x0000ffff0000ffffu;
    v = (v | v << 8) & 0x00ff00ff00ff00ffu;
    v = (v | v << 4) & 0x0f0f0f0f0f0f0f0fu;
    for (int i = 0; i < 8; i++) ret[i] = (uint8_t)(v >> 8 * i);
}

static void read_codes(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                       int32_t row0, int32_t n_rows, uint8_t *rows)
{
    int32_t per = 32 / t->bits, end = col0 + cut->block;
    size_t row_bytes = (size_t)cut->block_bytes;
    for (int32_t w = col0 / per; w * per < end; w++) {
        const uint8_t *words = t->codes + 4 * ((int64_t)w * t->n_out + row0);
        int32_t from = w * per < col0 ? col0 - w * per : 0,
                to = (w + 1) * per > end ? end - w * per : per;
        for (int32_t i = 0; i < n_rows; i++) {
            uint32_t word = td_quant_word(words, i);
            uint8_t codes[8];
            if (t->bits == 4)
                spread_nibbles(word, codes);
            else
                memcpy(codes,
                       &(const uint8_t[4]){(uint8_t)word, (uint8_t)(word >> 8),
                                           (uint8_t)(word >> 16), (uint8_t)(word >> 24)},
                       4);
            memcpy(rows + (size_t)i * row_bytes + (w * per + from - col0), codes + from,
                   (size_t)(to - from));
        }
    }
}

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t per = 32 / t->bits, g0 = td_quant_first_group(t, col0);
    uint32_t mask = t->bits == 4 ? 15 : 255;
    memset(ret_rows, 0, (size_t)n_rows * (size_t)cut->block_bytes);
    read_codes(t, cut, col0, row0, n_rows, ret_rows);
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r =
            td_scaled_row_at(cut, ret_rows + (size_t)i * (size_t)cut->block_bytes);
        int32_t n = row0 + i;
        for (int32_t g = 0; g < cut->scaled.n_groups; g++) {
            uint32_t word = td_quant_word(t->zeros, (int64_t)(g0 + g) * (t->n_out / per) + n / per);
            r.scales[g] = td_quant_scale(t, (int64_t)(g0 + g) * t->n_out + n);
            r.zeros[g] = (uint8_t)((word >> n % per * t->bits & mask) + (uint32_t)t->zero_add);
        }
    }
}

/* Version 1 writes each zero less one: a field of ones may be a zero of 0 that wrapped round, or
 * one of 16, and programs that read such files disagree. */
static td_status check_zeros(const struct td_quant_open *o, const struct td_tensor *zeros,
                             const struct td_quant_tensor *t)
{
    uint32_t mask = t->bits == 4 ? 15 : 255;
    char name[TD_TENSOR_FILE_NAME_BYTES];
    int64_t n_words = (int64_t)(zeros->n_bytes / 4);
    for (int64_t i = 0; i < n_words && o->config->zeros_minus_1; i++)
        for (int32_t at = 0; at < 32; at += t->bits)
            if ((td_quant_word(zeros->data, i) >> at & mask) == mask)
                return td_fail(o->err, TD_ERR_UNSUPPORTED,
                               "%s: tensor %s: word %" PRId64
                               " holds a zero of %u in checkpoint_format gptq, which may mean 0 or "
                               "%u: not supported; write the file as gptq_v2",
                               o->what, td_quant_name_of(o, zeros, name), i, mask, mask + 1);
    return TD_OK;
}

td_status td_quant_open_gptq(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_tensor *codes = td_quant_part(o, "qweight"), *zeros, *scales;
    char name[TD_TENSOR_FILE_NAME_BYTES];
    int64_t per = 32 / o->config->bits, n_words = codes->shape[0], n_out = codes->shape[1];
    if (strcmp(codes->dtype_name, "I32") != 0 || codes->n_dims != 2 || n_words < 1 || n_out < 1 ||
        n_words > INT32_MAX / per / 2 || n_out > INT32_MAX / 2 || n_out % per)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s must be I32 [columns / %d, rows], with rows a multiple of %d",
                       o->what, td_quant_name_of(o, codes, name), (int)per, (int)per);
    *t = (struct td_quant_tensor){.n_out = (int32_t)n_out,
                                  .n_in = (int32_t)(n_words * per),
                                  .bits = o->config->bits,
                                  .codes = codes->data,
                                  .zero_add = o->config->zeros_minus_1,
                                  .read_rows = read_rows};
    t->format.scaled.kind = TD_SCALED_INT;
    t->format.scaled.has_zeros = true;
    td_status s = td_quant_set_groups(o, t, o->config->group);
    if (s) return s;
    int32_t n_groups = t->format.scaled.n_groups;
    if ((s = td_quant_need(o, "qzeros", "I32", n_groups, n_out / per, &zeros)) ||
        (s = td_quant_need(o, "scales", NULL, n_groups, n_out, &scales)) ||
        (s = check_zeros(o, zeros, t)))
        return s;
    t->zeros = zeros->data;
    t->scales = scales->data;
    t->scales_type = scales->format->dtype;
    return td_quant_order(o, "g_idx", t);
}
