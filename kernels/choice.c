/* choice.c - times tables on a product that is small enough for the L2 of one core, so that what is
 * compared is arithmetic, not memory. */
#include "kernels/choice.h"

#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/random.h"
#include "kernels/ref/amx_chain.h"

/* Two tiles of rows and two panels of AVX-512, a few microseconds. */
enum { ROWS = 24, N_OUT = 64, N_IN = 256 };

struct probe {
    alignas(64) uint16_t weights[N_OUT * N_IN];
    alignas(64) uint8_t packed[TD_OPS_TIMED_MAX][N_OUT * N_IN * 2];
    alignas(64) float x[ROWS * N_IN];
    alignas(64) uint8_t scratch[2 * ROWS * N_IN * sizeof(float)]; /* tables fill up tiles of rows */
    alignas(64) float y[ROWS * N_OUT];
};
_Static_assert(sizeof(struct probe) < 256 << 10, "on the stack of td_ops_choose");

/* Values below 2 of either sign, none of them zero or subnormal. */
static float probe_value(uint64_t *state)
{
    int32_t drawn = (int32_t)(td_random_step(state) >> 40) - (1 << 23);
    return (float)drawn * 0x1p-22f + 0x1p-30f;
}

static void probe_fill(struct probe *p)
{
    uint64_t state = 1;
    for (int i = 0; i < N_OUT * N_IN; i++) p->weights[i] = td_f32_to_bf16(probe_value(&state));
    for (int i = 0; i < ROWS * N_IN; i++) p->x[i] = probe_value(&state);
}

static void probe_pack(struct probe *p, const struct td_ops *ops, int place)
{
    TD_ASSERT(ops->packed_bytes(N_OUT, N_IN, TD_BF16) <= sizeof p->packed[place] &&
              ops->gemm_scratch_bytes(ROWS, N_IN) <= sizeof p->scratch);
    ops->pack(p->packed[place], N_OUT, N_IN, TD_BF16, p->weights, TD_BF16, 0, N_OUT);
}

static void probe_run(struct probe *p, const struct td_ops *ops, int place)
{
    struct td_weight w = {.data = p->packed[place],
                          .n_out = N_OUT,
                          .n_in = N_IN,
                          .format = td_format_of_dtype(TD_BF16)};
    struct td_gemm_args a = {.w = &w,
                             .x = p->x,
                             .y = p->y,
                             .scratch = p->scratch,
                             .n_rows = ROWS,
                             .x_stride = N_IN,
                             .y_stride = N_OUT};
    ops->gemm_prepare(&a, 0, 1);
    ops->gemm(&a, 0, 1);
}

bool td_ops_same_bits(const struct td_ops *a, const struct td_ops *b)
{
    struct probe p;
    float first[ROWS * N_OUT];
    probe_fill(&p);
    probe_pack(&p, a, 0);
    probe_pack(&p, b, 1);
    probe_run(&p, a, 0);
    memcpy(first, p.y, sizeof first);
    probe_run(&p, b, 1);
    return memcmp(first, p.y, sizeof first) == 0;
}

bool td_ops_is_amx_chain(const struct td_ops *ops)
{
    enum { SOME_ROWS = 2 }; /* the plain chain is slow: a few are 0.1 ms */
    struct probe p;
    probe_fill(&p);
    probe_pack(&p, ops, 0);
    probe_run(&p, ops, 0);
    for (int m = 0; m < SOME_ROWS; m++)
        for (int n = m; n < N_OUT; n += 9) {
            uint16_t x[N_IN];
            for (int k = 0; k < N_IN; k++) x[k] = td_f32_to_bf16(p.x[m * N_IN + k]);
            float y = td_amx_chain(x, p.weights + n * N_IN, N_IN);
            if (memcmp(&y, &p.y[m * N_OUT + n], sizeof y) != 0) return false;
        }
    return true;
}

void td_ops_time(const struct td_ops *const *tables, int n, uint64_t (*now_ns)(void),
                 struct td_ops_choice *ret_choice)
{
    /* 100 rounds are about 1 ms. On a machine that is busy with other work the rounds end after
     * 4 ms; the first 10 are run in any case. */
    enum { MAX_ROUNDS = 100, MIN_ROUNDS = 10, MAX_NS = 4000000 };
    struct probe p;
    uint64_t best_ns[TD_OPS_TIMED_MAX], start = now_ns();
    TD_ASSERT(n >= 1 && n <= TD_OPS_TIMED_MAX);
    probe_fill(&p);
    for (int i = 0; i < n; i++) {
        probe_pack(&p, tables[i], i);
        best_ns[i] = UINT64_MAX;
    }
    for (int round = 0; round < MAX_ROUNDS; round++) {
        if (round >= MIN_ROUNDS && now_ns() - start > MAX_NS) break;
        for (int i = 0; i < n; i++) {
            uint64_t t0 = now_ns();
            probe_run(&p, tables[i], i);
            uint64_t ns = now_ns() - t0;
            if (ns < best_ns[i]) best_ns[i] = ns;
        }
    }
    int best = 0;
    ret_choice->n_timed = n;
    for (int i = 0; i < n; i++) {
        if (best_ns[i] < best_ns[best]) best = i;
        ret_choice->timed[i].name = tables[i]->name;
        ret_choice->timed[i].gflop_s =
            2.0 * ROWS * N_OUT * N_IN / (double)(best_ns[i] ? best_ns[i] : 1);
    }
    ret_choice->ops = tables[best];
}

static uint64_t monotonic_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void td_ops_choose(struct td_ops_choice *ret_choice)
{
    const struct td_ops *tables[TD_OPS_TIMED_MAX] = {NULL};
    int n = 0;
    const char *forced = getenv("TANDEM_OPS");
    *ret_choice = (struct td_ops_choice){0};
    if (forced && *forced) {
        ret_choice->ops = td_ops_by_name(forced);
        return;
    }
    /* Wider vectors are always the faster ones, and their norms and sums have other bits. The dot
     * of pairs and tiles may be slower than the table before them. */
    for (int i = TD_N_OPS; !tables[0]; i--)
        if (strcmp(td_ops_names[i - 1], "avx512bf16") != 0 &&
            strcmp(td_ops_names[i - 1], "amx") != 0)
            tables[0] = td_ops_by_name(td_ops_names[i - 1]);
    if ((tables[n + 1] = td_ops_by_name("amx"))) n++;
    for (int i = 0; i < TD_N_OPS && n + 1 < TD_OPS_TIMED_MAX; i++) {
        const struct td_ops *ops = td_ops_by_name(td_ops_names[i]);
        /* not one with the same product, which the first has for being better at others */
        if (ops && ops->gemm != tables[0]->gemm &&
            strcmp(td_ops_numerics(ops), td_ops_numerics(tables[0])) == 0)
            tables[++n] = ops;
    }
    ret_choice->ops = tables[0];
    if (n) td_ops_time(tables, n + 1, monotonic_ns, ret_choice);
}

void td_ops_choice_text(const struct td_ops_choice *choice, char *ret_text, size_t text_bytes)
{
    int at = snprintf(ret_text, text_bytes, "%s", choice->ops->name);
    for (int i = 0; i < choice->n_timed && at >= 0 && (size_t)at < text_bytes; i++)
        at += snprintf(ret_text + at, text_bytes - (size_t)at, "%s%s %.0f%s",
                       i ? ", " : " (measured, GFLOP/s a thread: ", choice->timed[i].name,
                       choice->timed[i].gflop_s, i + 1 < choice->n_timed ? "" : ")");
}
