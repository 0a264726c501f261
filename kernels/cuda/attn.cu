/* attn.cu - attention of the device table: which kernel serves a call, the plan of a step, the launch. */
#include <stdlib.h>

#include "kernels/cuda/attn_tile.h"

struct attn_params td_cuda_attn_params(const struct td_attn_args *a)
{
    struct attn_params p;
    memset(&p, 0, sizeof p);
    p.kv = a->kv.base;
    p.block_bytes = a->kv.block_bytes;
    p.v_offset = (int64_t)a->kv.n_kv_heads * a->kv.block_size * a->kv.head_dim * (int64_t)td_dtype_bytes(a->kv.dtype);
    p.q = a->q, p.out = a->out;
    p.q_stride = a->q_stride, p.out_stride = a->out_stride;
    p.positions = a->positions, p.row_seq = a->row_seq, p.block_tables = a->block_tables;
    p.n_rows = a->n_rows, p.n_heads = a->n_heads, p.n_kv_heads = a->kv.n_kv_heads, p.group = a->n_heads / a->kv.n_kv_heads;
    p.head_dim = a->kv.head_dim, p.row_bytes = (int32_t)(p.head_dim * (int64_t)td_dtype_bytes(a->kv.dtype)), p.block_size = a->kv.block_size;
    p.block_shift = -1;
    for (int32_t s = 0; s < 31; s++)
        if (a->kv.block_size == (int32_t)1 << s) p.block_shift = s;
    p.window = a->window;
    p.c = a->scale * 1.44269504088896340736f;
    return p;
}

/* ---- the plan */

size_t td_cuda_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, int32_t block_size)
{
    (void)n_kv_heads, (void)block_size;
    return (size_t)ATTN_SLOTS * (size_t)n_heads * (size_t)(head_dim + 2) * sizeof(float);
}

size_t td_cuda_attn_plan_bytes(int32_t max_rows, int32_t n_kv_heads)
{
    return sizeof(struct attn_plan) + ATTN_PIECES * (size_t)n_kv_heads * 4 + ((size_t)max_rows + ATTN_PIECES) * sizeof(struct attn_item);
}

/* The next item of the step from row *r on, not yet cut into pieces. A run of rows fills items of `rows_many` packed rows; what is left and fits goes to attn_few. */
static bool next_item(const struct td_attn_plan_args *a, int32_t rows_many, int32_t *r, struct attn_item *ret_item, bool *ret_is_many)
{
    if (*r >= a->n_rows) return false;
    int32_t group = a->n_heads / a->n_kv_heads, few = ATTN_ROWS_FEW / group, many = group < rows_many ? rows_many / group : 1, p = a->positions[*r], n = 1;
    while (n < many && *r + n < a->n_rows &&
           (p < 0 ? a->positions[*r + n] < 0 : a->row_seq[*r + n] == a->row_seq[*r] && a->positions[*r + n] == p + n))
        n++;
    memset(ret_item, 0, sizeof *ret_item);
    ret_item->row0 = *r, ret_item->n_tokens = n;
    ret_item->split_end = p < 0 ? 0 : (p + n - 1) / ATTN_SPLIT + 1;
    ret_item->n_pieces = 1, ret_item->n_first = ret_item->split_end;
    *ret_is_many = n > few;
    *r += n;
    return true;
}

/* Longest first: the card's blocks are started in this order. Shell's sort: in place, a few hundred items. */
static void sort_items(struct attn_item *items, int32_t n)
{
    for (int32_t gap = n / 2; gap > 0; gap /= 2)
        for (int32_t i = gap; i < n; i++) {
            struct attn_item item = items[i];
            int32_t j = i, length = item.split_end - item.split_begin;
            for (; j >= gap && items[j - gap].split_end - items[j - gap].split_begin < length; j -= gap) items[j] = items[j - gap];
            items[j] = item;
        }
}

/* n rounded up to 2^k or 3 * 2^k, so that few grids are ever needed; blocks beyond n find nothing to do. *ret_code: its number, 8 bits. */
static int32_t round_grid(int32_t n, uint64_t *ret_code)
{
    int32_t size = 1;
    *ret_code = 0;
    if (n == 0) return 0;
    for (*ret_code = 1; size < n; (*ret_code)++) size = size & (size - 1) ? size / 3 * 4 : size == 1 ? 2 : size / 2 * 3;
    return size;
}

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* Packed rows of an item for attn_many: as many as it takes, unless the chunk is so small that multiprocessors would stay idle. */
static int32_t choose_rows_many(const struct td_attn_plan_args *a)
{
    for (int32_t rows_many = ATTN_ROWS_MANY;; rows_many /= 2) {
        struct attn_item item;
        bool is_many;
        int32_t n_items = 0;
        for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);) n_items += is_many;
        if (n_items * a->n_kv_heads >= td_cuda.n_sms || rows_many == 2 * ATTN_ROWS_FEW) return rows_many;
    }
}

/* Decode rows are cut into pieces of `length` splits, a power of two: the shortest for which cutting adds no more than a dozen blocks per multiprocessor (its
 * few resident ones several times over, so that the last of them do not leave it half empty), and for which there is scratch. What cutting adds counts, not what
 * is there anyway: among many short rows a long one would be a single block that all others wait for. */
static int32_t piece_length(const struct td_attn_plan_args *a, int32_t rows_many)
{
    int32_t target = 12 * td_cuda.n_sms / a->n_kv_heads;
    for (int32_t length = 1;; length *= 2) {
        struct attn_item item;
        bool is_many, is_cut = false;
        int64_t n_more = 0, n_slots = 0;
        for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);) {
            if (is_many || item.split_end <= length) continue;
            is_cut = true;
            n_more += (item.split_end + length - 1) / length - 1;
            n_slots += (int64_t)item.n_tokens * (1 + item.split_end - length);
        }
        if (!is_cut || (n_more <= target && n_more <= ATTN_PIECES && n_slots <= ATTN_SLOTS)) return length;
    }
}

void td_cuda_attn_plan(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape)
{
    struct attn_plan *plan = (struct attn_plan *)ret_plan;
    size_t counters = ATTN_PIECES * (size_t)a->n_kv_heads * 4;
    memset(ret_plan, 0, sizeof *plan + counters);
    plan->counters_at = (int32_t)sizeof *plan;
    plan->few_at = plan->counters_at + (int32_t)counters;
    struct attn_item *few = (struct attn_item *)(void *)((uint8_t *)ret_plan + plan->few_at), item;
    int32_t rows_many = choose_rows_many(a), length = piece_length(a, rows_many), n_counters = 0, n_slots = 0;
    bool is_many;
    for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);) {
        int32_t n_splits = item.split_end;
        if (is_many) continue;
        if (n_splits > length) {
            item.n_pieces = (n_splits + length - 1) / length, item.n_first = length;
            item.counter = n_counters++, item.slot0 = n_slots;
            n_slots += item.n_tokens * (1 + n_splits - length);
        }
        for (int32_t piece = 0; piece < item.n_pieces; piece++) {
            item.split_begin = piece * length, item.split_end = min_i32(n_splits, (piece + 1) * length);
            few[plan->n_few++] = item;
        }
    }
    plan->many_at = plan->few_at + plan->n_few * (int32_t)sizeof item;
    for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);)
        if (is_many) few[plan->n_few + plan->n_many++] = item;
    sort_items(few, plan->n_few), sort_items(few + plan->n_few, plan->n_many);
    uint64_t few_code, many_code;
    plan->n_few_grid = round_grid(plan->n_few, &few_code), plan->n_many_grid = round_grid(plan->n_many, &many_code);
    *ret_shape = many_code << 8 | few_code;
}

/* ---- launchers */

/* By what never changes while a process runs, so that a row meets one family of kernels only. */
static bool is_for_wgmma(int32_t head_dim, int32_t group)
{
    const char *asked = getenv("TANDEM_CUDA_ATTN");
    return asked && strcmp(asked, "wgmma") == 0 && td_cuda_attn_wgmma_has(head_dim, group);
}

void td_cuda_attn(const struct td_attn_args *a, int part, int n_parts)
{
    int32_t head_dim = a->kv.head_dim, group = a->n_heads / a->kv.n_kv_heads;
    TD_ASSERT(n_parts == 1 && part == 0 && head_dim <= TD_ATTN_HEAD_DIM_MAX && a->n_heads % a->kv.n_kv_heads == 0 && a->scale > 0);
    if (a->n_rows == 0) return;
    struct attn_params p = td_cuda_attn_params(a);
    const struct attn_plan *plan = (const struct attn_plan *)a->plan;
    if (a->kv.dtype != TD_BF16 || !td_cuda_attn_mma_has(head_dim, group)) {
        td_cuda_attn_plain(&p, a->kv.dtype == TD_BF16);
        return;
    }
    TD_ASSERT(((uintptr_t)a->kv.base | (uintptr_t)a->kv.block_bytes) % 16 == 0 && a->plan && a->device_plan);
    if (is_for_wgmma(head_dim, group))
        td_cuda_attn_wgmma(&p, plan, a->device_plan, (float *)a->scratch);
    else
        td_cuda_attn_mma(&p, plan, a->device_plan, (float *)a->scratch);
}
