/* attn.cu - attention of the device table: chooses the kernel that serves a call, makes the plan of
 * a step, and launches. */
#include <stdlib.h>

#include "kernels/cuda/attn_tile.h"

struct attn_params td_cuda_attn_params(const struct td_attn_args *a)
{
    struct attn_params p;
    memset(&p, 0, sizeof p);
    p.kv = a->kv.base;
    p.block_bytes = a->kv.block_bytes;
    p.v_offset = a->kv.n_kv_heads * td_kv_view_head_bytes(&a->kv);
    p.q = a->q, p.out = a->out;
    p.q_stride = a->q_stride, p.out_stride = a->out_stride;
    p.positions = a->positions, p.row_seq = a->row_seq, p.block_tables = a->block_tables;
    p.n_rows = a->n_rows, p.n_heads = a->n_heads, p.n_kv_heads = a->kv.n_kv_heads,
    p.group = a->n_heads / a->kv.n_kv_heads;
    p.head_dim = a->kv.head_dim,
    p.row_bytes = (int32_t)(p.head_dim * (int64_t)td_dtype_bytes(a->kv.dtype)),
    p.block_size = a->kv.block_size;
    p.block_shift = -1;
    for (int32_t s = 0; s < 31; s++)
        if (a->kv.block_size == (int32_t)1 << s) p.block_shift = s;
    p.sliding_window = a->sliding_window;
    p.c = a->scale * 1.44269504088896340736f;
    return p;
}

/* ---- the plan */

size_t td_cuda_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                  int32_t block_size)
{
    (void)n_kv_heads, (void)block_size;
    return (size_t)ATTN_SLOTS * (size_t)n_heads * (size_t)(head_dim + 2) * sizeof(float);
}

size_t td_cuda_attn_plan_bytes(int32_t max_rows, int32_t n_kv_heads)
{
    return sizeof(struct attn_plan) + ATTN_PIECES * (size_t)n_kv_heads * 4 +
           ((size_t)max_rows + ATTN_PIECES + ATTN_PIECES_MANY) * sizeof(struct attn_item);
}

/* The next item of the step from row *r on, not yet cut into pieces. A run of rows fills items of
 * `rows_many` packed rows; a rest that fits goes to attn_few. */
static bool next_item(const struct td_attn_plan_args *a, int32_t rows_many, int32_t *r,
                      struct attn_item *ret_item, bool *ret_is_many)
{
    if (*r >= a->n_rows) return false;
    int32_t group = a->n_heads / a->n_kv_heads, few = ATTN_ROWS_FEW / group,
            many = group < rows_many ? rows_many / group : 1, p = a->positions[*r], n = 1;
    while (n < many && *r + n < a->n_rows &&
           (p < 0 ? a->positions[*r + n] < 0
                  : a->row_seq[*r + n] == a->row_seq[*r] && a->positions[*r + n] == p + n))
        n++;
    memset(ret_item, 0, sizeof *ret_item);
    ret_item->row0 = *r, ret_item->n_tokens = n;
    ret_item->split_end = p < 0 ? 0 : (p + n - 1) / ATTN_SPLIT + 1;
    ret_item->n_pieces = 1, ret_item->unit = ATTN_STRETCH;
    *ret_is_many = n > few;
    *r += n;
    return true;
}

/* Sorts longest first, because the card starts blocks in this order. Shell's sort, in place: there
 * are a few hundred items. */
static void sort_items(struct attn_item *items, int32_t n)
{
    for (int32_t gap = n / 2; gap > 0; gap /= 2)
        for (int32_t i = gap; i < n; i++) {
            struct attn_item item = items[i];
            int32_t j = i, length = item.split_end - item.split_begin;
            for (; j >= gap && items[j - gap].split_end - items[j - gap].split_begin < length;
                 j -= gap)
                items[j] = items[j - gap];
            items[j] = item;
        }
}

/* Rounds n up to 2^k or 3 * 2^k, so that few different grids are ever needed; blocks beyond n
 * return at once. *ret_code: the number of the grid, in 8 bits. */
static int32_t round_grid(int32_t n, uint64_t *ret_code)
{
    int32_t size = 1;
    *ret_code = 0;
    if (n == 0) return 0;
    for (*ret_code = 1; size < n; (*ret_code)++)
        size = size & (size - 1) ? size / 3 * 4 : size == 1 ? 2 : size / 2 * 3;
    return size;
}

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* The number of pieces of an item of n_splits. `length` is a power of two, so either no piece ends
 * inside a stretch, or all units are splits. */
static int32_t pieces_of(int32_t n_splits, int32_t length)
{
    return n_splits > length ? (n_splits + length - 1) / length : 1;
}
static int32_t unit_of(int32_t length) { return length < ATTN_STRETCH ? 1 : ATTN_STRETCH; }
static int32_t units_of(int32_t n_splits, int32_t length)
{
    return (n_splits + unit_of(length) - 1) / unit_of(length);
}

/* Writes the item's pieces to `to`; its states start at *slot. */
static int32_t cut(struct attn_item item, int32_t length, int32_t counter, int32_t *slot,
                   struct attn_item *to)
{
    int32_t n_splits = item.split_end;
    item.n_pieces = pieces_of(n_splits, length);
    if (item.n_pieces > 1) {
        item.unit = unit_of(length), item.counter = counter, item.slot0 = *slot;
        *slot += item.n_tokens * units_of(n_splits, length);
    }
    for (int32_t piece = 0; piece < item.n_pieces; piece++) {
        to[piece] = item;
        to[piece].split_begin = piece * length,
        to[piece].split_end = min_i32(n_splits, (piece + 1) * length);
    }
    return item.n_pieces;
}

/* The number of packed rows of an item for attn_many: the most that it can take, unless the chunk
 * is so small, and has so few keys before it, that multiprocessors would be idle however it were
 * cut. */
static int32_t choose_rows_many(const struct td_attn_plan_args *a)
{
    for (int32_t rows_many = ATTN_ROWS_MANY;; rows_many /= 2) {
        struct attn_item item;
        bool is_many;
        int64_t n_splits = 0;
        for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);)
            n_splits += is_many ? item.split_end : 0;
        if (n_splits * a->n_kv_heads >= td_cuda.n_sms || rows_many == 2 * ATTN_ROWS_FEW)
            return rows_many;
    }
}

/* Decode rows are cut into pieces of `length` splits, a power of two. This returns the shortest
 * length for which there is scratch and for which cutting adds at most 12 blocks per
 * multiprocessor: several times the few that run at once, so that the last ones do not leave it
 * half empty. Only the blocks that cutting adds are counted: among many short rows a long row would
 * otherwise be one block that all others wait for. */
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
            n_more += pieces_of(item.split_end, length) - 1;
            n_slots += (int64_t)item.n_tokens * units_of(item.split_end, length);
        }
        if (!is_cut || (n_more <= target && n_more <= ATTN_PIECES && n_slots <= ATTN_SLOTS))
            return length;
    }
}

/* Items of chunks are cut when an estimate says that the step then ends earlier. The unit of the
 * estimate is one block's time for a split. A multiprocessor runs one such block at a time, so the
 * step takes at least its equal share of all splits, at least the longest piece, and at least the
 * rounds that the longest pieces take. A state is written and read again, which costs about two
 * fifths of a split, and merging is one more kernel. Of equal estimates the longest pieces win.
 * *items: [n], not cut. */
static int32_t piece_length_many(const struct td_attn_plan_args *a, const struct attn_item *items,
                                 int32_t n)
{
    int32_t longest = 1, best_length;
    double per_sm = (double)a->n_kv_heads / td_cuda.n_sms, best = INFINITY;
    for (int32_t i = 0; i < n; i++)
        while (longest < items[i].split_end) longest *= 2;
    best_length = longest;
    for (int32_t length = longest; length > 0; length /= 2) {
        int64_t n_splits = 0, n_more = 0, n_cut = 0, n_slots = 0, n_states = 0, n_largest = 0;
        int32_t largest = 1;
        for (int32_t i = 0; i < n; i++) {
            int32_t splits = items[i].split_end, n_pieces = pieces_of(splits, length),
                    size = min_i32(splits, length);
            n_splits += splits;
            if (n_pieces > 1)
                n_cut++, n_more += n_pieces - 1, n_states += units_of(splits, length),
                    n_slots += (int64_t)items[i].n_tokens * units_of(splits, length);
            if (size > largest) largest = size, n_largest = 0;
            if (size == largest) n_largest += splits / size;
        }
        /* shorter pieces need more of both */
        if (n_more + n_cut > ATTN_PIECES_MANY || n_slots > ATTN_SLOTS) break;
        double rounds = ceil((double)n_largest * per_sm) * largest,
               share = (double)n_splits * per_sm, estimate = rounds > share ? rounds : share;
        if (n_cut > 0) estimate += 1 + 0.4 * (double)n_states * per_sm;
        if (estimate < best) best = estimate, best_length = length;
    }
    return best_length;
}

/* items: [n] uncut on entry; on return their pieces, and behind those the cut items once more. The
 * states lie in the same scratch as those of attn_few, which runs later. */
static void cut_many(struct attn_plan *plan, struct attn_item *items, int32_t n, int32_t length)
{
    int32_t n_slots = 0;
    for (int32_t i = 0; i < n; i++)
        plan->n_many += pieces_of(items[i].split_end, length),
            plan->n_merged += items[i].split_end > length;
    struct attn_item *piece = items + plan->n_many, *merged = piece + plan->n_merged;
    for (int32_t i = n - 1; i >= 0; i--) { /* from the end: no piece overwrites an item that is
                                              still to be cut */
        struct attn_item item = items[i];
        piece -= pieces_of(item.split_end, length);
        cut(item, length, 0, &n_slots, piece);
        if (item.split_end > length) *--merged = *piece;
    }
}

void td_cuda_attn_plan(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape)
{
    struct attn_plan *plan = (struct attn_plan *)ret_plan;
    size_t counters = ATTN_PIECES * (size_t)a->n_kv_heads * 4;
    memset(ret_plan, 0, sizeof *plan + counters);
    plan->counters_at = (int32_t)sizeof *plan;
    plan->few_at = plan->counters_at + (int32_t)counters;
    struct attn_item *few = (struct attn_item *)(void *)((uint8_t *)ret_plan + plan->few_at), *many,
                     *merged, item;
    int32_t rows_many = choose_rows_many(a), length = piece_length(a, rows_many), n_counters = 0,
            n_slots = 0;
    bool is_many;
    for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);)
        if (!is_many) {
            plan->n_few += cut(item, length, n_counters, &n_slots, few + plan->n_few);
            n_counters += item.split_end > length;
        }
    many = merged = few + plan->n_few;
    for (int32_t r = 0; next_item(a, rows_many, &r, &item, &is_many);)
        if (is_many) *merged++ = item;
    cut_many(plan, many, (int32_t)(merged - many),
             piece_length_many(a, many, (int32_t)(merged - many)));
    plan->many_at = plan->few_at + plan->n_few * (int32_t)sizeof item,
    plan->merged_at = plan->many_at + plan->n_many * (int32_t)sizeof item;
    sort_items(few, plan->n_few), sort_items(many, plan->n_many);
    uint64_t few_code, many_code, merged_code;
    plan->n_few_grid = round_grid(plan->n_few, &few_code),
    plan->n_many_grid = round_grid(plan->n_many, &many_code);
    plan->n_merged_grid = round_grid(plan->n_merged, &merged_code);
    *ret_shape = merged_code << 16 | many_code << 8 | few_code;
}

/* ---- launchers */

/* Decided by what never changes while a process runs, so that a row always meets the same family of
 * kernels (I1). */
static bool is_for_wgmma(int32_t head_dim, int32_t group)
{
    const char *asked = getenv("TANDEM_CUDA_ATTN");
    return asked && strcmp(asked, "wgmma") == 0 && td_cuda_attn_wgmma_has(head_dim, group);
}

void td_cuda_attn(const struct td_attn_args *a, int part, int n_parts)
{
    int32_t head_dim = a->kv.head_dim, group = a->n_heads / a->kv.n_kv_heads;
    TD_ASSERT(n_parts == 1 && part == 0 && head_dim <= TD_ATTN_HEAD_DIM_MAX &&
              a->n_heads % a->kv.n_kv_heads == 0 && a->scale > 0);
    if (a->n_rows == 0) return;
    struct attn_params p = td_cuda_attn_params(a);
    const struct attn_plan *plan = (const struct attn_plan *)a->plan;
    if (a->kv.dtype != TD_BF16 || !td_cuda_attn_mma_has(head_dim, group)) {
        td_cuda_attn_plain(&p, &a->kv);
        return;
    }
    TD_ASSERT(((uintptr_t)a->kv.base | (uintptr_t)a->kv.block_bytes) % 16 == 0 && a->plan &&
              a->device_plan);
    if (is_for_wgmma(head_dim, group))
        td_cuda_attn_wgmma(&p, plan, a->device_plan, (float *)a->scratch);
    else
        td_cuda_attn_mma(&p, plan, a->device_plan, (float *)a->scratch);
}
