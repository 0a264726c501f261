/* quant_pack.c - the packed form of quant.h from rows as files have them, on the host. */
#include "kernels/cuda/quant.h"

#include "common/base/status.h"
#include "kernels/formats/formats.h"
#include "kernels/formats/write.h"
#include "kernels/scaled.h"

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Bytes beside the codes, of 16 outputs: of a block, and of a chunk. */
static int32_t d_bytes(enum td_scales s)
{
    bool has_m = s == TD_SCALES_F16_MIN || s == TD_SCALES_U8_MIN || s == TD_SCALES_U4_MIN_HALVES;
    return TD_QUANT_PANEL * (s == TD_SCALES_E8M0 ? 1 : has_m ? 4 : 2);
}

static int32_t sub_bytes(enum td_scales s)
{
    if (s == TD_SCALES_I8) return TD_QUANT_PANEL;
    return s == TD_SCALES_I8_HALVES || s == TD_SCALES_U8_MIN || s == TD_SCALES_U4_MIN_HALVES
               ? 2 * TD_QUANT_PANEL
               : 0;
}

static void of_blocks(const struct td_format *f, struct td_quant_form *form)
{
    form->sub_at = form->chunk_bytes;
    form->chunk_bytes += sub_bytes(f->scales);
    while (TD_QUANT_CHUNK << form->block_shift < f->block) form->block_shift++;
    form->d_at = form->chunk_bytes << form->block_shift;
    form->block_bytes = form->d_at + d_bytes(f->scales);
    form->offset = (float)(f->bits == 8 ? 128 : f->offset);
    for (int i = 0; i < 16 && f->values; i++) form->table[i] = (float)f->values[i];
    form->panel_bytes = (int64_t)(form->n_chunks >> form->block_shift) * form->block_bytes;
}

static void of_groups(const struct td_format *f, struct td_quant_form *form)
{
    const struct td_scaled *s = &f->scaled;
    form->block_bytes = form->chunk_bytes;
    form->group8 = (s->group + 7) / 8, form->n_groups = s->n_groups;
    form->has_order = s->group_of != NULL;
    form->scale_is_f32 = s->scale_type == TD_F32, form->scale_is_bf16 = s->scale_type == TD_BF16;
    form->offset = (float)(s->kind == TD_SCALED_I8 ? 128 : s->has_zeros ? 0 : f->offset);
    memcpy(form->table, s->table, sizeof form->table);
    int64_t at = (int64_t)form->n_chunks * form->chunk_bytes;
    TD_ASSERT(at < INT32_MAX / 2);
    form->scales_at = (int32_t)at;
    at += (int64_t)s->n_groups * TD_QUANT_PANEL * (form->scale_is_f32 ? 4 : 2);
    if (s->has_zeros) {
        form->zeros_at = (int32_t)at;
        at += (int64_t)s->n_groups * TD_QUANT_PANEL;
    }
    form->panel_bytes = at;
}

struct td_quant_form td_quant_form_of(const struct td_format *f, int32_t n_in)
{
    struct td_quant_form form = {0};
    int32_t low = TD_QUANT_LOW(f->bits), high = TD_QUANT_HIGH(f->bits);
    form.n_in = n_in, form.n_chunks = (n_in + TD_QUANT_CHUNK - 1) / TD_QUANT_CHUNK;
    form.high_at = low * TD_QUANT_PANEL * TD_QUANT_CHUNK / 8;
    form.chunk_bytes = form.high_at + high * TD_QUANT_PANEL * TD_QUANT_CHUNK / 8;
    if (f->scaled.kind)
        of_groups(f, &form);
    else
        of_blocks(f, &form);
    if (td_quant_is_rows(f)) form.panel_bytes = TD_QUANT_PANEL * td_quant_row_bytes(n_in);
    form.set_bytes = 4 * form.panel_bytes;
    if (form.has_order) form.set_bytes += (2 * (int64_t)n_in + 63) / 64 * 64;
    return form;
}

size_t td_cuda_quant_packed_bytes(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    if (td_quant_is_rows(format))
        return ((size_t)n_out + 15) / 16 * 16 * (size_t)td_quant_row_bytes(n_in);
    struct td_quant_form form = td_quant_form_of(format, n_in);
    int64_t n = (n_out + TD_QUANT_PANEL - 1) / TD_QUANT_PANEL, n_sets = (n + 3) / 4;
    int64_t bytes = form.has_order ? n_sets * form.set_bytes : n * form.panel_bytes;
    return (size_t)(bytes + 63) / 64 * 64;
}

/* ---- a row ----------------------------------------------------------------------------------- */

/* Where 8 codes of `bits` bits of output r and quarter t of a chunk begin in a plane. */
static uint8_t *plane_at(uint8_t *plane, int bits, int r, int t)
{
    return plane + ((r % 8 * 4 + t) * 2 + r / 8) * bits;
}

/* The 32 codes of output r of a panel. */
static void put_codes(const struct td_format *f, const struct td_quant_form *form, uint8_t *chunk,
                      int r, const uint8_t *codes)
{
    const int low = TD_QUANT_LOW(f->bits), high = TD_QUANT_HIGH(f->bits);
    for (int t = 0; t < 4; t++) {
        uint64_t l = 0, h = 0;
        for (int i = 0; i < 8; i++) {
            uint64_t c = codes[8 * t + i];
            l |= (c & ((1u << low) - 1)) << (low * i);
            if (high) h |= (c >> low) << (high * i);
        }
        memcpy(plane_at(chunk, low, r, t), &l, (size_t)low);
        if (high) memcpy(plane_at(chunk + form->high_at, high, r, t), &h, (size_t)high);
    }
}

static void put_u16(uint8_t *p, int i, uint16_t v) { memcpy(p + 2 * i, &v, sizeof v); }

/* What a block's groups share. */
static void put_d(enum td_scales s, uint8_t *d, int r, const struct td_group *g)
{
    int hi = r / 8, at = r % 8;
    if (s == TD_SCALES_E8M0)
        d[2 * at + hi] = (uint8_t)g->d;
    else if (d_bytes(s) == 4 * TD_QUANT_PANEL)
        put_u16(d, 4 * at + hi, g->d), put_u16(d, 4 * at + 2 + hi, g->m);
    else
        put_u16(d, 2 * at + hi, g->d);
}

static void put_sub(enum td_scales s, uint8_t *sub, int r, const struct td_group *g)
{
    int hi = r / 8, at = r % 8;
    if (s == TD_SCALES_I8)
        sub[2 * at + hi] = g->scale[0];
    else if (s == TD_SCALES_I8_HALVES)
        sub[4 * at + hi] = g->scale[0], sub[4 * at + 2 + hi] = g->scale[1];
    else if (s == TD_SCALES_U8_MIN)
        sub[4 * at + hi] = g->scale[0], sub[4 * at + 2 + hi] = g->min[0];
    else if (s == TD_SCALES_U4_MIN_HALVES)
        for (int h = 0; h < 2; h++)
            sub[4 * at + 2 * h + hi] = (uint8_t)(g->scale[h] | g->min[h] << 4);
}

/* A row of blocks into output r of a panel; whether its scales are numbers. */
static bool put_blocks(const struct td_format *f, const struct td_quant_form *form, uint8_t *panel,
                       int r, const uint8_t *row)
{
    bool is_finite = true;
    int32_t per_block = 1 << form->block_shift;
    for (int32_t c = 0; c < form->n_chunks; c++) {
        int32_t b = c >> form->block_shift, i = c & (per_block - 1);
        uint8_t *block = panel + (int64_t)b * form->block_bytes,
                *chunk = block + i * form->chunk_bytes;
        struct td_group g = {0};
        f->split(row + (size_t)b * (size_t)f->block_bytes, i, &g);
        for (int j = 0; j < TD_GROUP && f->bits == 8; j++) g.codes[j] ^= 0x80; /* as of 0 .. 255 */
        put_codes(f, form, chunk, r, g.codes);
        put_sub(f->scales, chunk + form->sub_at, r, &g);
        if (i) continue;
        put_d(f->scales, block + form->d_at, r, &g);
        is_finite &= td_group_is_finite(f, &g);
    }
    return is_finite;
}

static void put_scale(const struct td_quant_form *form, uint8_t *scales, int64_t i, float s)
{
    if (form->scale_is_f32)
        memcpy(scales + 4 * i, &s, sizeof s);
    else
        put_u16(scales, (int)i, form->scale_is_bf16 ? td_f32_to_bf16(s) : td_f32_to_f16(s));
}

/* The same of a scaled format. Columns beyond the last get codes whose value is 0, or any number in
 * formats that have no zero: x is 0 there. */
static bool put_groups(const struct td_format *f, const struct td_quant_form *form, uint8_t *panel,
                       int r, const uint8_t *row)
{
    const struct td_scaled_row from = td_scaled_row_at(f, row);
    const struct td_scaled *s = &f->scaled;
    int hi = r / 8, at = r % 8;
    for (int32_t c = 0; c < form->n_chunks; c++) {
        uint8_t codes[TD_QUANT_CHUNK] = {0};
        for (int32_t i = 0; i < TD_QUANT_CHUNK && c * TD_QUANT_CHUNK + i < form->n_in; i++) {
            uint8_t code = from.codes[c * TD_QUANT_CHUNK + i];
            codes[i] = s->kind == TD_SCALED_I8 ? code ^ 0x80 : code;
        }
        put_codes(f, form, panel + (int64_t)c * form->chunk_bytes, r, codes);
    }
    for (int32_t g = 0; g < s->n_groups; g++) {
        int64_t i = (int64_t)g * TD_QUANT_PANEL + 2 * at + hi;
        put_scale(form, panel + form->scales_at, i, from.scales[g]);
        if (s->has_zeros) panel[form->zeros_at + i] = from.zeros[g];
    }
    return td_scaled_is_finite(f, row);
}

static bool pack_rows(uint8_t *to, int32_t n_in, const struct td_format *format, const uint8_t *src,
                      int32_t n_rows)
{
    bool is_finite = true;
    for (int32_t i = 0; i < n_rows; i++, to += td_quant_row_bytes(n_in)) {
        const uint8_t *row = src + (size_t)i * (size_t)format->block_bytes;
        const struct td_scaled_row from = td_scaled_row_at(format, row);
        memcpy(to, from.codes, (size_t)n_in);
        memcpy(to + td_quant_row_scale_at(n_in), from.scales, sizeof(float));
        is_finite &= td_scaled_is_finite(format, row);
    }
    return is_finite;
}

bool td_cuda_quant_pack(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows)
{
    struct td_quant_form form = td_quant_form_of(format, n_in);
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    size_t row_bytes = td_format_bytes(format, n_in), set = (size_t)form.set_bytes,
           from = (size_t)(row0 / 64) * set,
           end = row0 + n_rows == n_out ? td_cuda_quant_packed_bytes(n_out, n_in, format)
                                        : (size_t)((row0 + n_rows) / 64) * set;
    uint8_t *to = (uint8_t *)packed + from;
    bool is_finite = true;
    memset(to, 0, end - from);
    if (td_quant_is_rows(format)) return pack_rows(to, n_in, format, (const uint8_t *)src, n_rows);
    for (int32_t i = 0; i < n_rows; i++) {
        uint8_t *panel = to + (size_t)(i / 64) * set +
                         (size_t)(i % 64 / TD_QUANT_PANEL) * (size_t)form.panel_bytes;
        const uint8_t *row = (const uint8_t *)src + (size_t)i * row_bytes;
        int r = i % TD_QUANT_PANEL;
        is_finite &= format->scaled.kind ? put_groups(format, &form, panel, r, row)
                                         : put_blocks(format, &form, panel, r, row);
        if (form.has_order && i % 64 == 0)
            memcpy(panel + 4 * form.panel_bytes, format->scaled.group_of, 2 * (size_t)n_in);
    }
    return is_finite;
}
