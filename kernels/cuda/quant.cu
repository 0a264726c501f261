/* quant.cu - products with weights in block and scaled formats, in the packed form of quant.h.
 *
 * A weight is widened to the number that the format says (td_format_read, exact), rounded to bf16,
 * and multiplied by x in bf16, as a weight of a BF16 file is. So one definition of the product
 * serves every format and every M, and rounding to bf16 (2^-9 of a weight) is well below what the
 * formats themselves have lost (from 0.5 % on, Q8_0).
 *
 *   few    up to 16 rows (decode): a warp reads codes, one load of each lane for a chunk, widens
 *          them in its registers and multiplies: gemm_mma.cu's skinny kernel with less to read
 *   widen  more rows: some rows of the weight, at most WIDE_BYTES, are widened to bf16 in scratch
 *          and multiplied as any bf16 weight is (gemm.cu), then the next
 *
 * Batch invariance (I1): both widen to the same bf16 numbers, and `few` has the order of sums of
 * gemm_mma.cu, so in the way `own` (deterministic) an output has the same bits whatever M is.
 *
 * Estimate, to be measured on a card (engine-bench of q8_0 and q4_0, docs/gpu-lease.md): a code
 * costs 4 to 5 instructions of a lane, of which an H100 has 29e12 a second: 6e12 codes, while its
 * memory brings 6e12 of 4.5 bits. So formats of 4 bits may be bound by either; those of 8 bits by
 * memory alone. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm_order.h"
#include "kernels/cuda/quant.h"
#include "kernels/cuda/quant_codes.h"

extern "C" {
#include "kernels/formats/formats.h"
}

#define FEW_ROWS 8 /* of a block of threads */
#define FEW_ROWS_MAX 16
#define WIDE_BYTES ((size_t)64 << 20)
#define WIDE_ROWS_MAX 4096

/* How scales are found: enum td_scales of block formats, then those of scaled ones, in groups in
 * order or with the group of each column; or, of rows (quant.h), by the end of the product. */
enum { SCALES_OF_GROUPS = 7, SCALES_IN_ORDER = 8, SCALES_OF_ROWS = 9 };
enum values { VALUES_NUMBERS, VALUES_TABLE, VALUES_E4M3 };
enum job { JOB_FEW, JOB_WIDEN, JOB_ROWS };

struct quant_params {
    struct td_quant_form form;
    const uint8_t *w;
    struct td_gemm_params g; /* few, widen: its w is not used */
    /* widen: panels [panel0, + n_panels) to rows of g.k_stride */
    uint16_t *wide;
    int32_t panel0, n_panels;
    /* embed: rows `ids` to out [n_rows, n_in] */
    const int32_t *ids;
    float *out;
    int32_t n_rows;
};

/* ---- a lane's share of a chunk: 8 codes of each of two outputs ------------------------------- */

struct panel_place {
    const uint8_t *panel;
    const uint16_t *order; /* the groups of its columns */
};

__device__ static inline panel_place place_of(const struct quant_params *p, int32_t panel)
{
    const uint8_t *set = p->w + panel / 4 * p->form.set_bytes;
    panel_place at;
    at.panel = set + panel % 4 * p->form.panel_bytes;
    at.order = (const uint16_t *)(const void *)(set + 4 * p->form.panel_bytes);
    return at;
}

template <int LOW> struct lane_codes {
    uint32_t low[LOW / 2], high, sub;
    uint2 d; /* blocks: d and m of both outputs; groups: the scales of both */
};

__device__ static inline float f16_to_f32(uint32_t h)
{
#ifdef TD_CUDA_EMULATE
    return td_cuda_f16_to_f32((uint16_t)h);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(f) : "h"((uint16_t)h));
    return f;
#endif
}

/* The scales of group `group` for outputs g and g + 8, as bits of f32. */
__device__ static inline uint2 group_scales(const struct td_quant_form *f, const uint8_t *panel,
                                            int32_t group, int g)
{
    const uint8_t *at = panel + f->scales_at;
    int64_t i = (int64_t)group * 8 + g;
    if (f->scale_is_f32) return *(const uint2 *)(at + 8 * i);
    uint32_t both = *(const uint32_t *)(at + 4 * i);
    return f->scale_is_bf16 ? make_uint2(both << 16, both & 0xffff0000u)
                            : make_uint2(__float_as_uint(f16_to_f32(both & 0xffffu)),
                                         __float_as_uint(f16_to_f32(both >> 16)));
}

/* The zeros likewise: two bytes. */
__device__ static inline uint32_t group_zeros(const struct td_quant_form *f, const uint8_t *panel,
                                              int32_t group, int g)
{
    return f->zeros_at ? *(const uint16_t *)(panel + f->zeros_at + ((int64_t)group * 8 + g) * 2)
                       : 0;
}

/* The loads of what stands beside the codes. */
template <int LOW, int SCALES>
__device__ static inline void load_scales(const struct td_quant_form *f, const uint8_t *panel,
                                          const uint8_t *sub, const uint8_t *d, int32_t c, int lane,
                                          lane_codes<LOW> *ret)
{
    int g = lane / 4, t = lane % 4;
    if (SCALES == TD_SCALES_I8) ret->sub = *(const uint16_t *)(sub + 2 * g);
    if (SCALES == TD_SCALES_I8_HALVES || SCALES == TD_SCALES_U4_MIN_HALVES)
        ret->sub = *(const uint16_t *)(sub + 4 * g + t / 2 * 2);
    if (SCALES == TD_SCALES_U8_MIN) ret->sub = *(const uint32_t *)(sub + 4 * g);
    if (SCALES == TD_SCALES_E8M0)
        ret->d.x = *(const uint16_t *)(d + 2 * g);
    else if (SCALES == TD_SCALES_F16 || SCALES == TD_SCALES_I8 || SCALES == TD_SCALES_I8_HALVES)
        ret->d.x = *(const uint32_t *)(d + 4 * g);
    else if (SCALES < SCALES_OF_GROUPS)
        ret->d = *(const uint2 *)(d + 8 * g);
    else if (SCALES == SCALES_OF_GROUPS) {
        int32_t group = f->n_groups == 1 ? 0 : (c * 4 + t) / f->group8;
        group = group < f->n_groups ? group : f->n_groups - 1; /* columns beyond the last */
        ret->d = group_scales(f, panel, group, g);
        ret->sub = group_zeros(f, panel, group, g);
    }
}

template <int LOW, int HIGH, int SCALES>
__device__ static inline lane_codes<LOW> load_codes(const struct td_quant_form *f,
                                                    const uint8_t *panel, int32_t c, int lane)
{
    const uint8_t *block = panel + (int64_t)(c >> f->block_shift) * f->block_bytes,
                  *chunk = block + (c & ((1 << f->block_shift) - 1)) * f->chunk_bytes;
    lane_codes<LOW> l = {};
    if (SCALES == SCALES_OF_ROWS) {
        int64_t row_bytes = f->panel_bytes / TD_QUANT_PANEL;
        int32_t k = c * TD_QUANT_CHUNK + lane % 4 * 8;
        const uint8_t *row = panel + lane / 4 * row_bytes + k;
        if (k >= f->n_in) return l; /* where the scale lies, not codes */
        uint2 lo = __ldcs((const uint2 *)row), hi = __ldcs((const uint2 *)(row + 8 * row_bytes));
        l.low[0] = lo.x, l.low[1 % (LOW / 2)] = lo.y, l.low[2 % (LOW / 2)] = hi.x,
        l.low[3 % (LOW / 2)] = hi.y;
        return l;
    }
    if (LOW == 8) {
        uint4 v = __ldcs((const uint4 *)(chunk + 16 * lane));
        l.low[0] = v.x, l.low[1 % (LOW / 2)] = v.y, l.low[2 % (LOW / 2)] = v.z,
        l.low[3 % (LOW / 2)] = v.w;
    } else if (LOW == 4) {
        uint2 v = __ldcs((const uint2 *)(chunk + 8 * lane));
        l.low[0] = v.x, l.low[1 % (LOW / 2)] = v.y;
    } else {
        l.low[0] = __ldcs((const uint32_t *)(chunk + 4 * lane));
    }
    if (HIGH == 1) l.high = __ldcs((const uint16_t *)(chunk + f->high_at + 2 * lane));
    if (HIGH == 2) l.high = __ldcs((const uint32_t *)(chunk + f->high_at + 4 * lane));
    load_scales<LOW, SCALES>(f, panel, chunk + f->sub_at, block + f->d_at, c, lane, &l);
    return l;
}

/* The scale of output g + 8 * hi, and the minimum, negated; -0, where there is none, changes no
 * number. */
template <int LOW, int SCALES>
__device__ static inline void scale_of(const lane_codes<LOW> &l, int hi, float *ret_scale,
                                       float *ret_less)
{
    float d = f16_to_f32(l.d.x >> (16 * hi) & 0xffffu),
          m = f16_to_f32(l.d.y >> (16 * hi) & 0xffffu), s = d, less = -0.0f;
    uint32_t sub = l.sub >> (8 * hi);
    if (SCALES == TD_SCALES_F16_MIN) less = m;
    if (SCALES == TD_SCALES_E8M0) {
        uint32_t e = l.d.x >> (8 * hi) & 255u;
        s = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    if (SCALES == TD_SCALES_I8 || SCALES == TD_SCALES_I8_HALVES) s = d * (float)(int8_t)sub;
    if (SCALES == TD_SCALES_U8_MIN)
        s = d * (float)(sub & 255u), less = -(m * (float)(sub >> 16 & 255u));
    if (SCALES == TD_SCALES_U4_MIN_HALVES)
        s = d * (float)(sub & 15u), less = -(m * (float)(sub >> 4 & 15u));
    if (SCALES == SCALES_OF_GROUPS) s = __uint_as_float(hi ? l.d.y : l.d.x);
    if (SCALES == SCALES_OF_ROWS) s = 1.0f;
    *ret_scale = s, *ret_less = less;
}

template <int LOW, int HIGH>
__device__ static inline uint32_t code_of(const lane_codes<LOW> &l, int hi, int i)
{
    uint32_t c;
    if (LOW == 8)
        c = l.low[(2 * hi + i / 4) % (LOW / 2)] >> (8 * (i % 4)) & 255u;
    else if (LOW == 4)
        c = l.low[hi % (LOW / 2)] >> (4 * i) & 15u;
    else
        c = l.low[0] >> (16 * hi + 2 * i) & 3u;
    if (HIGH) c |= (l.high >> (8 * HIGH * hi + HIGH * i) & ((1u << HIGH) - 1)) << LOW;
    return c;
}

/* What a code stands for without its scale. */
template <int VALUES>
__device__ static inline float value_of(uint32_t code, float zero, const float *table)
{
    if (VALUES == VALUES_TABLE) return table[code];
    if (VALUES == VALUES_E4M3)
        return __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
    return __uint_as_float(0x4b000000u | code) - (8388608.0f + zero); /* 2^23 + code: exact */
}

/* The 8 values of output g + 8 * hi: exact, because the product of a scale and a code's value has
 * at most 24 bits; of scaled formats rounded once, as scaled.h has it. */
template <int LOW, int HIGH, int SCALES, int VALUES>
__device__ static inline void values_of(const struct td_quant_form *f, const panel_place &at,
                                        const float *table, int32_t c, int lane,
                                        const lane_codes<LOW> &l, int hi, float *ret)
{
    float scale, less, zero = f->offset;
    scale_of<LOW, SCALES>(l, hi, &scale, &less);
    if (SCALES == SCALES_OF_GROUPS) zero += (float)(l.sub >> (8 * hi) & 255u);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (SCALES == SCALES_IN_ORDER) {
            int32_t k = c * TD_QUANT_CHUNK + lane % 4 * 8 + i,
                    group = k < f->n_in ? at.order[k] : 0;
            uint2 both = group_scales(f, at.panel, group, lane / 4);
            scale = __uint_as_float(hi ? both.y : both.x);
            zero =
                f->offset + (float)(group_zeros(f, at.panel, group, lane / 4) >> (8 * hi) & 255u);
        }
        ret[i] = fmaf(scale, value_of<VALUES>(code_of<LOW, HIGH>(l, hi, i), zero, table), less);
    }
}

/* The same rounded to bf16: 16 bytes of a row of a BF16 weight. */
template <int LOW, int HIGH, int SCALES, int VALUES>
__device__ static inline uint4 widen(const struct td_quant_form *f, const panel_place &at,
                                     const float *table, int32_t c, int lane,
                                     const lane_codes<LOW> &l, int hi)
{
    float v[8];
    values_of<LOW, HIGH, SCALES, VALUES>(f, at, table, c, lane, l, hi, v);
    return make_uint4(td_pack_bf16x2(v[0], v[1]), td_pack_bf16x2(v[2], v[3]),
                      td_pack_bf16x2(v[4], v[5]), td_pack_bf16x2(v[6], v[7]));
}

/* By all threads of a block, where codes stand for entries. */
template <int VALUES>
__device__ static inline void table_fill(const struct td_quant_form *f, float *ret_table)
{
    if (VALUES != VALUES_TABLE) return;
    if (threadIdx.x < 16) ret_table[threadIdx.x] = f->table[threadIdx.x];
    __syncthreads();
}

/* ---- few rows -------------------------------------------------------------------------------- */

/* The warps' sums of their slices, added in ascending order, to y. */
template <int MT>
__device__ static inline void end_slices(const struct td_gemm_params &q, int32_t m0, int32_t n0,
                                         const float acc[MT][4],
                                         float (*sums)[FEW_ROWS][16 * MT + 4])
{
    int lane = (int)threadIdx.x % WARP, slice = (int)threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int32_t per_slice = slice_chunks(q.k_stride);
    int n_slices = (chunks_of(q.k_stride) + per_slice - 1) / per_slice;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[slice][2 * t + e % 2][16 * i + g + e / 2 * 8] = acc[i][e];
    __syncthreads();
    for (int i = (int)threadIdx.x; i < 16 * MT * FEW_ROWS; i += THREADS) {
        int n = i % (16 * MT), m = i / (16 * MT);
        float dot = 0;
        for (int s = 0; s < n_slices; s++) dot = dot + sums[s][m][n];
        td_cuda_gemm_store(&q, m0 + m, n0 + n, dot);
    }
}

/* gemm_skinny_kernel of gemm_mma.cu, with codes in place of bf16: GROUP chunks are in flight. When
 * one is multiplied, the chunk GROUP further on takes its registers. */
template <int LOW, int HIGH, int SCALES, int VALUES, int MT, int GROUP>
static __global__ void __launch_bounds__(THREADS, 2)
    few_kernel(const __grid_constant__ struct quant_params p)
{
    __shared__ float sums[SLICES][FEW_ROWS][16 * MT + 4];
    __shared__ float table[16];
    const struct td_gemm_params &q = p.g;
    int lane = (int)threadIdx.x % WARP, slice = (int)threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int32_t panel0 = (int32_t)blockIdx.x * MT, n_panels = (q.n_out + 15) / 16,
            m0 = (int32_t)blockIdx.y * FEW_ROWS;
    int32_t per_slice = slice_chunks(q.k_stride), n_chunks = chunks_of(q.k_stride),
            first = slice * per_slice, end = first + per_slice;
    end = end < n_chunks ? end : n_chunks;
    const uint16_t *x = (const uint16_t *)q.x + (m0 + g) * q.k_stride + 8 * t;
    panel_place at[MT];
    float acc[MT][4] = {};
    lane_codes<LOW> codes[GROUP][MT];
    uint4 rows[GROUP];
    table_fill<VALUES>(&p.form, table);
#pragma unroll
    for (int i = 0; i < MT; i++)
        at[i] = place_of(&p, panel0 + i < n_panels ? panel0 + i : n_panels - 1);
    auto load_weight = [&](int u, int32_t chunk) {
#pragma unroll
        for (int i = 0; i < MT; i++)
            if (chunk < end)
                codes[u][i] = load_codes<LOW, HIGH, SCALES>(&p.form, at[i].panel, chunk, lane);
    };
    auto load_rows = [&](int u, int32_t chunk) {
        rows[u] = chunk < end && m0 + g < q.n_rows
                      ? *(const uint4 *)(const void *)(x + (int64_t)chunk * CHUNK)
                      : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int u = 0; u < GROUP; u++) load_weight(u, first + u);
    td_wait_for_previous(); /* for the kernel that makes the rows */
#pragma unroll
    for (int u = 0; u < GROUP; u++) load_rows(u, first + u);
    for (int32_t c = first; c < end; c += GROUP) {
#pragma unroll
        for (int u = 0; u < GROUP; u++) {
            if (c + u < end) {
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    uint4 lo = widen<LOW, HIGH, SCALES, VALUES>(&p.form, at[i], table, c + u, lane,
                                                                codes[u][i], 0),
                          hi = widen<LOW, HIGH, SCALES, VALUES>(&p.form, at[i], table, c + u, lane,
                                                                codes[u][i], 1);
                    mma_chunk(acc[i], lo, hi, rows[u]);
                }
            }
            load_weight(u, c + GROUP + u), load_rows(u, c + GROUP + u);
        }
    }
    end_slices<MT>(q, m0, panel0 * 16, acc, sums);
}

/* ---- many rows, and single rows of the weight ------------------------------------------------ */

/* A warp widens a chunk of a panel. */
template <int LOW, int HIGH, int SCALES, int VALUES>
static __global__ void __launch_bounds__(THREADS)
    widen_kernel(const __grid_constant__ struct quant_params p)
{
    __shared__ float table[16];
    td_wait_for_previous();
    table_fill<VALUES>(&p.form, table);
    int lane = (int)threadIdx.x % WARP;
    int64_t job = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    int32_t panel = (int32_t)(job / p.form.n_chunks), c = (int32_t)(job % p.form.n_chunks);
    if (panel >= p.n_panels) return;
    panel_place at = place_of(&p, p.panel0 + panel);
    lane_codes<LOW> l = load_codes<LOW, HIGH, SCALES>(&p.form, at.panel, c, lane);
    uint16_t *to = p.wide + (panel * TD_QUANT_PANEL + lane / 4) * p.g.k_stride +
                   c * TD_QUANT_CHUNK + lane % 4 * 8;
#pragma unroll
    for (int hi = 0; hi < 2; hi++)
        *(uint4 *)(void *)(to + 8 * hi * p.g.k_stride) =
            widen<LOW, HIGH, SCALES, VALUES>(&p.form, at, table, c, lane, l, hi);
}

/* A thread reads 8 values of a row. Rows below 0 are padding: zeros. */
template <int LOW, int HIGH, int SCALES, int VALUES>
static __global__ void __launch_bounds__(THREADS)
    rows_kernel(const __grid_constant__ struct quant_params p)
{
    __shared__ float table[16];
    td_wait_for_previous();
    table_fill<VALUES>(&p.form, table);
    int64_t at8 = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int32_t per_row = p.form.n_chunks * 4, row = (int32_t)(at8 / per_row),
            c = (int32_t)(at8 % per_row) / 4, t = (int32_t)(at8 % 4);
    if (row >= p.n_rows) return;
    int32_t id = p.ids[row], r = id % TD_QUANT_PANEL;
    float v[8] = {};
    if (id >= 0) {
        int lane = r % 8 * 4 + t;
        panel_place at = place_of(&p, id / TD_QUANT_PANEL);
        lane_codes<LOW> l = load_codes<LOW, HIGH, SCALES>(&p.form, at.panel, c, lane);
        if (r < 8) /* indices of registers must be constants */
            values_of<LOW, HIGH, SCALES, VALUES>(&p.form, at, table, c, lane, l, 0, v);
        else
            values_of<LOW, HIGH, SCALES, VALUES>(&p.form, at, table, c, lane, l, 1, v);
    }
    int32_t k = c * TD_QUANT_CHUNK + 8 * t;
    for (int i = 0; i < 8; i++)
        if (k + i < p.form.n_in) p.out[(int64_t)row * p.form.n_in + k + i] = v[i];
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int LOW, int HIGH, int SCALES, int VALUES, int MT, int GROUP>
static void few_launch(const struct quant_params *p)
{
    dim3 grid((unsigned)((p->g.n_out + 16 * MT - 1) / (16 * MT)),
              (unsigned)((p->g.n_rows + FEW_ROWS - 1) / FEW_ROWS));
    TD_LAUNCH_EARLY(td_cuda_is_early(), (few_kernel<LOW, HIGH, SCALES, VALUES, MT, GROUP>), grid,
                    dim3(THREADS), 0, td_cuda.compute, *p);
    TD_LAUNCHED("gemm (few rows of a quantised weight)");
}

template <int LOW, int HIGH, int SCALES, int VALUES>
static void widen_launch(const struct quant_params *p)
{
    int64_t n = (int64_t)p->n_panels * p->form.n_chunks * WARP;
    TD_LAUNCH_EARLY(td_cuda_is_early(), (widen_kernel<LOW, HIGH, SCALES, VALUES>),
                    dim3((unsigned)((n + THREADS - 1) / THREADS)), dim3(THREADS), 0,
                    td_cuda.compute, *p);
    TD_LAUNCHED("gemm (widening a quantised weight)");
}

template <int LOW, int HIGH, int SCALES, int VALUES>
static void rows_launch(const struct quant_params *p)
{
    int64_t n = (int64_t)p->n_rows * p->form.n_chunks * 4;
    TD_LAUNCH_EARLY(td_cuda_is_early(), (rows_kernel<LOW, HIGH, SCALES, VALUES>),
                    dim3((unsigned)((n + THREADS - 1) / THREADS)), dim3(THREADS), 0,
                    td_cuda.compute, *p);
    TD_LAUNCHED("embed (rows of a quantised weight)");
}

/* blocks of 32 outputs still fill the device twice */
static bool is_wide(const struct quant_params *p)
{
    return (p->g.n_out + 31) / 32 >= 2 * td_cuda.n_sms;
}

template <int LOW, int HIGH, int SCALES, int VALUES>
static void launch(enum job job, const struct quant_params *p)
{
    if (job == JOB_WIDEN)
        widen_launch<LOW, HIGH, SCALES, VALUES>(p);
    else if (is_wide(p))
        few_launch<LOW, HIGH, SCALES, VALUES, 2, 3>(p);
    else
        few_launch<LOW, HIGH, SCALES, VALUES, 1, 6>(p);
}

template <int LOW, int VALUES> static void launch_groups(enum job job, const struct quant_params *p)
{
    if (!p->form.has_order)
        launch<LOW, 0, SCALES_OF_GROUPS, VALUES>(job, p);
    else if (job == JOB_WIDEN)
        widen_launch<LOW, 0, SCALES_IN_ORDER, VALUES>(p);
    else
        few_launch<LOW, 0, SCALES_IN_ORDER, VALUES, 1, 3>(p);
}

/* Of a row of the table of formats: what its codes stand for is an array of 16, or NULL. */
#define VALUES_OF(stand_for) (sizeof(stand_for) == 16 ? VALUES_TABLE : VALUES_NUMBERS)

/* The kernels of a format: one row of the table of formats, one case here. */
static void launch_format(const struct td_format *f, enum job job, const struct quant_params *p)
{
    if (f->scaled.kind) TD_ASSERT(job != JOB_ROWS); /* no checkpoint has embeddings in groups */
    if (f->scaled.kind == TD_SCALED_TABLE) {
        launch_groups<4, VALUES_TABLE>(job, p);
    } else if (f->scaled.kind == TD_SCALED_E4M3) {
        TD_ASSERT(!p->form.has_order); /* the loader cuts them between groups alone */
        if (td_quant_is_rows(f))
            launch<8, 0, SCALES_OF_ROWS, VALUES_E4M3>(job, p);
        else
            launch<8, 0, SCALES_OF_GROUPS, VALUES_E4M3>(job, p);
    } else if (f->scaled.kind) {
        f->bits == 4 ? launch_groups<4, VALUES_NUMBERS>(job, p)
                     : launch_groups<8, VALUES_NUMBERS>(job, p);
    } else {
        switch (f->index) {
#define FORMAT(fn, label, number, n_values, n_bytes, n_bits, zero, stand_for, kind)                \
    case TD_INDEX_##fn:                                                                            \
        if (job == JOB_ROWS)                                                                       \
            rows_launch<TD_QUANT_LOW(n_bits), TD_QUANT_HIGH(n_bits), kind, VALUES_OF(stand_for)>(  \
                p);                                                                                \
        else                                                                                       \
            launch<TD_QUANT_LOW(n_bits), TD_QUANT_HIGH(n_bits), kind, VALUES_OF(stand_for)>(job,   \
                                                                                            p);    \
        return;
            TD_EACH_BLOCK_FORMAT(FORMAT)
#undef FORMAT
        }
    }
}

/* ---- entries --------------------------------------------------------------------------------- */

/* Rows of a weight that are widened at a time: whole panels. */
static int32_t wide_rows(int64_t k_stride)
{
    int64_t n = (int64_t)(WIDE_BYTES / 2) / k_stride / TD_QUANT_PANEL * TD_QUANT_PANEL;
    return (int32_t)(n > WIDE_ROWS_MAX ? WIDE_ROWS_MAX : n < TD_QUANT_PANEL ? TD_QUANT_PANEL : n);
}

static size_t wide_bytes(int32_t n_in)
{
    int64_t k_stride = td_cuda_quant_k_stride(n_in);
    return (size_t)wide_rows(k_stride) * (size_t)k_stride * 2;
}

size_t td_cuda_quant_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    return td_cuda_quant_x_at(NULL, n_rows, n_in).bytes + wide_bytes(n_in);
}

void td_cuda_quant_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    if (a->n_rows <= 0) return;
    const struct td_weight *w = a->w;
    struct quant_params p = {};
    p.form = td_quant_form_of(w->format, w->n_in);
    p.w = (const uint8_t *)w->data;
    p.g = td_cuda_gemm_params_of(a);
    int32_t done =
        td_quant_is_rows(w->format) ? td_cuda_quant_codes(a, &p.g, wide_bytes(w->n_in)) : 0;
    if (done == w->n_out) return;
    if (!done && a->n_rows <= FEW_ROWS_MAX && td_cuda_gemm_is_own(&p.g)) {
        launch_format(w->format, JOB_FEW, &p);
        return;
    }
    p.wide = (uint16_t *)(void *)td_cuda_quant_x_at(a->scratch, a->n_rows, w->n_in).rest;
    int32_t at_once = wide_rows(p.g.k_stride);
    for (int32_t n = done; n < w->n_out; n += at_once) {
        struct td_gemm_params piece = td_cuda_gemm_outputs_from(&p.g, n);
        piece.w = p.wide;
        if (piece.n_out > at_once) piece.n_out = at_once;
        p.panel0 = n / TD_QUANT_PANEL;
        p.n_panels = (piece.n_out + TD_QUANT_PANEL - 1) / TD_QUANT_PANEL;
        launch_format(w->format, JOB_WIDEN, &p);
        /* products read a weight before they wait for earlier kernels, but this one is new */
        td_cuda.behind_kernel = false;
        td_cuda_gemm_run(&piece);
    }
}

void td_cuda_quant_embed(const struct td_weight *w, const int32_t *ids, int32_t n_rows, float *out)
{
    struct quant_params p = {};
    p.form = td_quant_form_of(w->format, w->n_in);
    p.w = (const uint8_t *)w->data, p.ids = ids, p.out = out, p.n_rows = n_rows;
    if (n_rows > 0) launch_format(w->format, JOB_ROWS, &p);
}
