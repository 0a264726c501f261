/* ptx.c - the host's versions of the instructions in kernels/cuda/ptx.h.
 *
 * Copies are kept in a list from their issue to their landing, and during that time their
 * destination holds NaN. A cp.async lands at its thread's wait, a bulk copy when a thread waits for
 * its mbarrier: the latest moments that the hardware allows.
 *
 * The 64 bits of an mbarrier here (a program may not look at them): arrivals still awaited,
 * arrivals of a phase, bytes still awaited, parity of the phase. */
#include "tests/fake/cuda_emu/ptx.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fake/cuda_emu/block.h"

enum { LANES = TD_EMU_LANES, COPY_BYTES = 16, MAX_GROUPS = 64 };

static void check_aligned(const void *p, size_t bytes, const char *what)
{
    if ((uintptr_t)p % bytes) td_emu_die("%s: %p is not aligned to %zu bytes", what, p, bytes);
}

/* ---- tensor cores */

static uint16_t half_at(const uint8_t *row, unsigned column)
{
    uint16_t h;
    memcpy(&h, row + 2 * column, sizeof h);
    return h;
}

static void ldmatrix_collect(uint8_t (*operands)[TD_EMU_OPERAND_BYTES],
                             uint8_t (*ret_results)[TD_EMU_OPERAND_BYTES], unsigned n,
                             bool is_trans)
{
    const uint8_t *rows[LANES];
    for (unsigned l = 0; l < 8 * n; l++) memcpy(&rows[l], operands[l], sizeof *rows);
    for (unsigned l = 0; l < LANES; l++) {
        unsigned g = l / 4, t = l % 4;
        uint32_t r[4];
        for (unsigned i = 0; i < n; i++) {
            if (is_trans)
                r[i] = half_at(rows[8 * i + 2 * t], g) |
                       (uint32_t)half_at(rows[8 * i + 2 * t + 1], g) << 16;
            else
                memcpy(&r[i], rows[8 * i + g] + 4 * t, sizeof *r);
        }
        memcpy(ret_results[l], r, n * sizeof *r);
    }
}

#define LDMATRIX(name, n, is_trans, word)                                                          \
    static void collect_##name(uint8_t(*operands)[TD_EMU_OPERAND_BYTES],                           \
                               uint8_t(*ret_results)[TD_EMU_OPERAND_BYTES])                        \
    {                                                                                              \
        ldmatrix_collect(operands, ret_results, n, is_trans);                                      \
    }                                                                                              \
    void td_ldmatrix_##name(uint32_t r[n], const void *row)                                        \
    {                                                                                              \
        if (td_emu_self->lane < 8 * n) check_aligned(row, 16, "ldmatrix");                         \
        memcpy(r, td_emu_warp_collect(word, 0xffffffffu, &row, sizeof row, collect_##name),        \
               n * sizeof *r);                                                                     \
    }
LDMATRIX(x4, 4, false, TD_EMU_LDMATRIX)
LDMATRIX(x4_trans, 4, true, TD_EMU_LDMATRIX_TRANS)
LDMATRIX(x2, 2, false, TD_EMU_LDMATRIX_X2)
LDMATRIX(x2_trans, 2, true, TD_EMU_LDMATRIX_X2_TRANS)

struct mma {
    uint32_t a[4], b[2];
    float c[4];
};
_Static_assert(sizeof(struct mma) <= TD_EMU_OPERAND_BYTES, "a lane's operands of an mma");

TD_EMU_UNCHECKED static inline float widen(uint32_t half)
{
    uint32_t bits = half << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

typedef float row8 __attribute__((vector_size(32)));

/* c[16][n] += a[16][16] b[16][n] */
TD_EMU_UNCHECKED static void multiply(float *c, const float *a, const float *b, unsigned n)
{
    for (unsigned m = 0; m < 16; m++)
        for (unsigned at = 0; at < n; at += 8) {
            row8 sum, k_row;
            __builtin_memcpy(&sum, c + m * n + at, sizeof sum);
            for (unsigned k = 0; k < 16; k++) {
                __builtin_memcpy(&k_row, b + k * n + at, sizeof k_row);
                sum += a[m * 16 + k] * k_row;
            }
            __builtin_memcpy(c + m * n + at, &sum, sizeof sum);
        }
}

void td_emu_wgmma_multiply(float *c, const float *a, const float *b) { multiply(c, a, b, 64); }

TD_EMU_UNCHECKED static void collect_mma(uint8_t (*operands)[TD_EMU_OPERAND_BYTES],
                                         uint8_t (*ret_results)[TD_EMU_OPERAND_BYTES])
{
    float a[16][16], b[16][8], c[16][8];
    for (unsigned l = 0; l < LANES; l++) {
        unsigned g = l / 4, t = l % 4;
        struct mma m;
        __builtin_memcpy(&m, operands[l], sizeof m);
        for (unsigned i = 0; i < 4; i++) {
            unsigned row = g + 8 * (i & 1), column = 2 * t + 8 * (i >> 1);
            a[row][column] = widen(m.a[i] & 0xffff);
            a[row][column + 1] = widen(m.a[i] >> 16);
            c[g + 8 * (i >> 1)][2 * t + (i & 1)] = m.c[i];
        }
        for (unsigned i = 0; i < 2; i++) {
            b[2 * t + 8 * i][g] = widen(m.b[i] & 0xffff);
            b[2 * t + 8 * i + 1][g] = widen(m.b[i] >> 16);
        }
    }
    multiply(&c[0][0], &a[0][0], &b[0][0], 8);
    for (unsigned l = 0; l < LANES; l++) {
        unsigned g = l / 4, t = l % 4;
        __builtin_memcpy(ret_results[l], &c[g][2 * t], 2 * sizeof(float));
        __builtin_memcpy(ret_results[l] + 8, &c[g + 8][2 * t], 2 * sizeof(float));
    }
}

void td_mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4])
{
    struct mma m;
    memcpy(m.a, a, sizeof m.a);
    memcpy(m.b, b, sizeof m.b);
    memcpy(m.c, c, sizeof m.c);
    memcpy(d, td_emu_warp_collect(TD_EMU_MMA, 0xffffffffu, &m, sizeof m, collect_mma),
           4 * sizeof *d);
}

static uint32_t round_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu; /* the machine's one NaN */
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

uint32_t td_pack_bf16x2(float lo, float hi) { return round_bf16(lo) | round_bf16(hi) << 16; }

float td_exp2(float x)
{
    float r = exp2f(fpclassify(x) == FP_SUBNORMAL ? 0 : x);
    return fpclassify(r) == FP_SUBNORMAL ? 0 : r;
}

/* ---- cp.async: a thread's own list */

struct copy {
    uint8_t *to;
    const uint8_t *from; /* NULL: zeros */
};

struct async {
    struct copy *copies;
    /* closed groups that have not landed, oldest first */
    uint32_t n_copies, n_room, n_groups, group_end[MAX_GROUPS];
};

void td_cp_async_16(void *smem, const void *gmem, bool is_valid)
{
    struct td_emu_lane *me = td_emu_self;
    struct async *a = me->async;
    if (!a && !(a = me->async = calloc(1, sizeof *a))) td_emu_die("no memory for cp.async");
    check_aligned(smem, COPY_BYTES, "cp.async, shared address");
    if (is_valid) check_aligned(gmem, COPY_BYTES, "cp.async, global address");
    if (a->n_copies == a->n_room) {
        uint32_t n = a->n_room ? 2 * a->n_room : 16;
        struct copy *copies = realloc(a->copies, n * sizeof *copies);
        if (!copies) td_emu_die("no memory for cp.async");
        a->copies = copies;
        a->n_room = n;
    }
    a->copies[a->n_copies++] = (struct copy){smem, is_valid ? gmem : NULL};
    memset(smem, 0xff, COPY_BYTES);
}

static struct async *async_of(struct td_emu_lane *lane)
{
    static struct async none; /* never written: it has no copies and gets no group */
    return lane->async ? lane->async : &none;
}

void td_cp_async_commit(void)
{
    struct async *a = async_of(td_emu_self);
    if (!td_emu_self->async)
        return; /* no copy yet: an empty group before the first one is over
                   already */
    if (a->n_groups == MAX_GROUPS)
        td_emu_die("cp.async: more than %d groups on their way", MAX_GROUPS);
    a->group_end[a->n_groups++] = a->n_copies;
}

void td_emu_cp_async_wait(uint32_t n_groups)
{
    struct async *a = async_of(td_emu_self);
    if (a->n_groups <= n_groups) return;
    uint32_t landing = a->n_groups - n_groups, n = a->group_end[landing - 1];
    for (uint32_t i = 0; i < n; i++) {
        if (a->copies[i].from)
            memcpy(a->copies[i].to, a->copies[i].from, COPY_BYTES);
        else
            memset(a->copies[i].to, 0, COPY_BYTES);
    }
    a->n_copies -= n;
    memmove(a->copies, a->copies + n, a->n_copies * sizeof *a->copies);
    a->n_groups = n_groups;
    for (uint32_t i = 0; i < n_groups; i++) a->group_end[i] = a->group_end[i + landing] - n;
}

void td_emu_async_lane_end(struct td_emu_lane *lane)
{
    struct async *a = lane->async;
    if (a) a->n_copies = a->n_groups = 0;
}

void td_emu_async_lane_free(struct td_emu_lane *lane)
{
    struct async *a = lane->async;
    if (a) free(a->copies);
    free(a);
    lane->async = NULL;
}

/* ---- mbarrier and bulk copies: the block's list */

struct bar {
    uint64_t awaited : 20, count : 20, is_odd : 1, magic : 1;
    int64_t bytes : 22;
};
_Static_assert(sizeof(struct bar) == sizeof(uint64_t), "an mbarrier is 8 bytes");

struct bulk {
    uint8_t *to;
    const uint8_t *from;
    uint32_t bytes;
    uint64_t *bar;
};

struct bulks {
    struct bulk *of;
    uint32_t n, n_room;
};

static struct bar bar_load(const uint64_t *p)
{
    struct bar b;
    check_aligned(p, sizeof *p, "mbarrier");
    memcpy(&b, p, sizeof b);
    if (!b.magic || !b.count) td_emu_die("mbarrier %p was not initialised", (const void *)p);
    return b;
}

static void bar_store(uint64_t *p, struct bar b)
{
    if (!b.awaited && !b.bytes) {
        b.awaited = b.count;
        b.is_odd = !b.is_odd;
    }
    memcpy(p, &b, sizeof b);
    td_emu_happened();
}

void td_mbarrier_init(uint64_t *bar, uint32_t count)
{
    check_aligned(bar, sizeof *bar, "mbarrier");
    if (!count || count >= 1u << 20)
        td_emu_die("mbarrier of %u arrivals, must be 1 to %u", count, (1u << 20) - 1);
    struct bar b = {.awaited = count, .count = count, .magic = 1};
    memcpy(bar, &b, sizeof b);
}

void td_mbarrier_init_fence(void) {}
void td_fence_proxy_async(void) {}

static void arrive(uint64_t *bar, uint32_t bytes)
{
    struct bar b = bar_load(bar);
    if (!b.awaited) td_emu_die("mbarrier %p: an arrival too many", (void *)bar);
    b.awaited--;
    b.bytes += (int32_t)bytes;
    bar_store(bar, b);
}

void td_mbarrier_arrive(uint64_t *bar) { arrive(bar, 0); }

void td_mbarrier_arrive_expect_tx(uint64_t *bar, uint32_t bytes)
{
    if (bytes >= 1u << 20)
        td_emu_die("mbarrier: %u bytes expected, must be below %u", bytes, 1u << 20);
    arrive(bar, bytes);
}

void td_bulk_copy_g2s(void *smem, const void *gmem, uint32_t bytes, uint64_t *bar)
{
    struct td_emu_block *block = td_emu_self->block;
    struct bulks *list = block->bulks;
    check_aligned(smem, 16, "bulk copy, shared address");
    check_aligned(gmem, 16, "bulk copy, global address");
    if (!bytes || bytes % 16 || bytes >= 1u << 20)
        td_emu_die("bulk copy of %u bytes, must be a multiple of 16 below %u", bytes, 1u << 20);
    (void)bar_load(bar);
    if (!list && !(list = block->bulks = calloc(1, sizeof *list)))
        td_emu_die("no memory for bulk copies");
    if (list->n == list->n_room) {
        uint32_t n = list->n_room ? 2 * list->n_room : 16;
        struct bulk *of = realloc(list->of, n * sizeof *of);
        if (!of) td_emu_die("no memory for bulk copies");
        list->of = of;
        list->n_room = n;
    }
    list->of[list->n++] = (struct bulk){smem, gmem, bytes, bar};
    memset(smem, 0xff, bytes);
    td_emu_happened();
}

bool td_mbarrier_try_wait_parity(uint64_t *bar, uint32_t parity)
{
    struct bulks *list = td_emu_self->block->bulks;
    if (bar_load(bar).is_odd != (parity & 1)) return true;
    uint32_t n_kept = 0;
    for (uint32_t i = 0; list && i < list->n; i++) {
        struct bulk copy = list->of[i];
        if (copy.bar != bar) {
            list->of[n_kept++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, copy.bytes);
        struct bar b = bar_load(bar);
        b.bytes -= (int32_t)copy.bytes;
        bar_store(bar, b);
    }
    if (list) list->n = n_kept;
    if (bar_load(bar).is_odd != (parity & 1)) return true;
    td_emu_yield();
    return bar_load(bar).is_odd != (parity & 1);
}

void td_emu_async_block_end(struct td_emu_block *block)
{
    struct bulks *list = block->bulks;
    if (list) list->n = 0;
}

void td_emu_async_block_free(struct td_emu_block *block)
{
    struct bulks *list = block->bulks;
    if (list) free(list->of);
    free(list);
    block->bulks = NULL;
}
