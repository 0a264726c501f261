/* router/core/load: running sums against a plain scan of all workers after each of many random
 * changes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/load.h"

#define MS 1000000ull

static uint64_t rng_state = 1;
static uint64_t rnd(uint64_t n) { return td_random_index(&rng_state, n); }

static struct td_load f;
static struct td_load_part parts[TD_LOAD_MAX_WORKERS];

static void start(double guarded_ttft_s)
{
    memset(&f, 0, sizeof f);
    memset(parts, 0, sizeof parts);
    td_load_init(&f, guarded_ttft_s);
}

static void put(uint32_t worker, struct td_load_part p)
{
    parts[worker] = p;
    td_load_put(&f, worker, &p);
}

/* The reference: what fullness is, by its definition. */
static double scan(uint64_t guarded_ns, uint64_t now_ns)
{
    uint64_t seqs = 0, max_seqs = 0, kv = 0, max_kv = 0, steps = 0, backlog = 0;
    uint32_t n = 0, n_prefill = 0;
    for (uint32_t i = 0; i < TD_LOAD_MAX_WORKERS; i++) {
        const struct td_load_part *p = &parts[i];
        if (p->kind == TD_LOAD_DECODE) {
            n++;
            seqs += p->assigned;
            max_seqs += p->max_seqs;
            kv += p->promised_tokens;
            max_kv += p->kv_tokens;
            steps += p->step_share;
        } else if (p->kind == TD_LOAD_PREFILL) {
            uint64_t left = p->free_ns > now_ns ? p->free_ns - now_ns : 0;
            n_prefill++;
            backlog += left < guarded_ns ? left : guarded_ns;
        }
    }
    if (max_seqs == 0) return 1;
    double full = fmax(fmax((double)seqs / (double)max_seqs, (double)kv / (double)max_kv),
                       (double)steps / (double)TD_LOAD_SHARE_ONE / n);
    if (guarded_ns && n_prefill)
        full = fmax(full, (double)backlog / (double)guarded_ns / n_prefill);
    return fmin(1, full);
}

static void expect(double got, double want, const char *what)
{
    if (!(got <= want && got >= want)) fail_msg("%s: %.17g, must be %.17g", what, got, want);
}

static struct td_load_part decode(uint32_t assigned, uint32_t max_seqs, uint64_t promised,
                                  uint64_t kv, double share)
{
    return (struct td_load_part){.kind = TD_LOAD_DECODE,
                                 .assigned = assigned,
                                 .max_seqs = max_seqs,
                                 .promised_tokens = promised,
                                 .kv_tokens = kv,
                                 .step_share = (uint64_t)(share * (double)TD_LOAD_SHARE_ONE)};
}
static struct td_load_part prefill(uint64_t free_ns)
{
    return (struct td_load_part){.kind = TD_LOAD_PREFILL, .free_ns = free_ns};
}
static const struct td_load_part nobody;

static void test_each_term(void **state)
{
    (void)state;
    start(0.1);
    expect(td_load_value(&f, 5), 1, "nobody is there");
    put(3, prefill(0));
    expect(td_load_value(&f, 5), 1, "no decode worker");
    put(1, decode(0, 8, 0, 1000, 0));
    expect(td_load_value(&f, 6), 0, "idle");
    put(1, decode(2, 8, 100, 1000, 0.125));
    expect(td_load_value(&f, 7), 0.25, "sequences");
    put(2, decode(0, 8, 1100, 1000, 0));
    expect(td_load_value(&f, 8), 0.6, "KV of both");
    put(2, decode(0, 8, 0, 1000, 1));
    expect(td_load_value(&f, 9), 0.5625, "the mean share of a step");
    put(3, prefill(100 * MS + 10));
    expect(td_load_value(&f, 10), 1, "a whole objective of backlog");
    expect(td_load_value(&f, 10 + 25 * MS), 0.75, "a quarter of it later");
    put(4, prefill(10 * 1000 * MS));
    expect(td_load_value(&f, 10 + 50 * MS), 0.75,
           "one half, and one that counts as whole for long");
    expect(td_load_value(&f, 10 + 100 * MS), 0.5625,
           "the long one alone is a half: steps are more");
    put(4, nobody);
    put(2, nobody);
    expect(td_load_value(&f, 10 + 101 * MS), 0.25, "they went");
    put(1, decode(9, 8, 0, 1000, 0)); /* a worker that lied about its capacity */
    expect(td_load_value(&f, 10 + 102 * MS), 1, "never above 1");
}

static void test_no_ttft_is_guarded(void **state)
{
    (void)state;
    start(INFINITY);
    put(0, decode(1, 4, 0, 100, 0));
    put(1, prefill(1000 * 1000 * MS));
    expect(td_load_value(&f, 1), 0.25, "backlogs do not count");
}

static void test_random_changes_against_a_scan(void **state)
{
    (void)state;
    static const double guarded_s[] = {1e-12, 0.04, 2, 1e6, INFINITY};
    static const uint32_t fleets[] = {1, 3, 17, TD_LOAD_MAX_WORKERS};
    for (uint32_t run = 0; run < 40; run++) {
        rng_state = run + 1;
        double guarded = guarded_s[run % 5];
        uint32_t n = fleets[run % 4];
        uint64_t now = run % 3 ? 1 + rnd(1000) : UINT64_MAX - 4000000 * MS,
                 horizon = (uint64_t)(fmin(guarded, 3) * 2e9) + 2;
        start(guarded);
        bool running = false; /* some backlog was between nothing and the objective: else the
                                 heaps would have had nothing to do */
        for (uint32_t i = 0; i < 3000; i++) {
            uint32_t w = (uint32_t)rnd(n);
            switch (rnd(8)) {
            case 0:
                put(w, nobody);
                break;
            case 1:
            case 2:
            case 3: {
                uint32_t max_seqs = 1 + (uint32_t)rnd(300);
                uint64_t kv = 1 + rnd(1u << 20);
                put(w, decode((uint32_t)rnd(max_seqs + 1), max_seqs, rnd(kv), kv,
                              (double)rnd(1001) / 1000));
                break;
            }
            case 4:
                put(w, prefill(rnd(4) ? 0 : UINT64_C(9000000000) * 1000 * MS));
                break;
            default:
                put(w, prefill(now - rnd(now < 100 ? now : 100) + rnd(horizon)));
                break;
            }
            if (rnd(3) == 0) now += rnd(4) ? rnd(horizon / 20 + 2) : 0;
            uint64_t left = parts[w].free_ns > now ? parts[w].free_ns - now : 0;
            running =
                running || (parts[w].kind == TD_LOAD_PREFILL && left > 0 && left < f.guarded_ns);
            if (rnd(4)) continue; /* many changes between two looks, too */
            double want = scan(f.guarded_ns, now), got = td_load_value(&f, now);
            if (!(got <= want && got >= want))
                fail_msg("run %u change %u: %.17g, a scan says %.17g", run, i, got, want);
        }
        assert_true(running || !(guarded < INFINITY) || guarded < 1e-9);
        for (uint32_t w = 0; w < n; w++) put(w, nobody);
        assert_true(f.assigned + f.max_seqs + f.promised_tokens + f.kv_tokens + f.step_share +
                        f.now.n + f.now.sum + f.later.n + f.later.sum ==
                    0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_term),
                                       cmocka_unit_test(test_no_ttft_is_guarded),
                                       cmocka_unit_test(test_random_changes_against_a_scan)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
