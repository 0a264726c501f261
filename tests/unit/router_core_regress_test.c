/* router/core: a test for each defect that a review found; what stands over a test is what went
 * wrong before. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/core.h"
#include "router/core/policy.h"
#include "router/core/queue.h"
#include "tests/unit/core_leg.h"

#define MS 1000000ull
#define N_SLOTS 1024
static struct td_core_action actions[TD_CORE_MAX_ACTIONS_PER_EVENT];

static struct td_core *core_of(enum td_core_mode mode, const char *policy, double ttft_ms)
{
    struct td_core_config c = {.mode = mode,
                               .policy = policy,
                               .max_requests = N_SLOTS,
                               .max_queued = N_SLOTS,
                               .worker_timeout_ms = 100000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 1,
                               .n_classes = 1,
                               .n_thetas = 1};
    c.classes[0] = (struct td_core_class){.name = "default", .ttft_ms = ttft_ms, .weight = 1};
    c.thetas[0] = (struct td_lat_theta){.prefill = {0, 1e-3, 0},
                                        .decode = {10e-3, 1e-4, 0, 0, 0},
                                        .link_bytes_per_s = 1e9,
                                        .known = true};
    struct td_core *core = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&c, &core, &err), TD_OK);
    return core;
}

static size_t step(struct td_core *c, struct td_core_event e)
{
    return td_core_step(c, &e, actions);
}

static size_t join(struct td_core *c, uint64_t now, uint32_t worker, enum td_core_role role,
                   uint64_t max_seqs)
{
    return step(
        c,
        (struct td_core_event){
            .kind = TD_EV_WORKER_JOIN,
            .now_ns = now,
            .join = {.worker = worker, .role = role, .kv_tokens = 100000, .max_seqs = max_seqs}});
}

static size_t arrive(struct td_core *c, uint64_t now, uint32_t request_at, uint64_t n_prompt)
{
    return step(c, (struct td_core_event){.kind = TD_EV_REQUEST,
                                          .now_ns = now,
                                          .request = {.request_at = request_at,
                                                      .id = request_at + 1,
                                                      .n_prompt = n_prompt,
                                                      .max_tokens = 16}});
}

static size_t leg(struct td_core *c, enum td_core_event_kind kind, uint64_t now,
                  uint32_t request_at, uint32_t attempt, uint64_t a, uint64_t b)
{
    return step(c,
                leg_event(kind, now,
                          (struct td_attempt){
                              .request_at = request_at, .id = request_at + 1, .attempt = attempt},
                          a, b));
}

static size_t tick(struct td_core *c, uint64_t now)
{
    return step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = now});
}

static void assert_at_rest(const struct td_core *c)
{
    struct td_core_stats st;
    td_core_stats(c, &st);
    assert_int_equal(st.live, 0);
    for (uint32_t w = 0; w < 4; w++) {
        struct td_core_account a;
        td_core_account(c, w, &a);
        assert_int_equal(a.assigned + a.n_pending + a.n_active + a.assigned_tokens +
                             a.promised_tokens + a.pending_tokens + a.planned_tokens,
                         0);
    }
}

/* Decode's last token overtook the prefill worker's first-token event: the request was complete,
 * and its cached tokens and prefill time read 0. */
static void test_last_message_waits_for_the_prefill_figures(void **state)
{
    (void)state;
    enum end { FIRST_TOKEN, PREFILL_ENDS, PREFILL_FAILS, PREFILL_GONE, TIME, STOPPED, N_ENDS };
    for (enum end how = FIRST_TOKEN; how < N_ENDS; how++) {
        struct td_core *c = core_of(TD_MODE_PD, "least_token", 0);
        join(c, 1, 0, TD_ROLE_PREFILL, 8);
        join(c, 1, 1, TD_ROLE_DECODE, 8);
        assert_int_equal(arrive(c, 2, 0, 40), 1);
        assert_int_equal(leg(c, TD_EV_TICKET, 3, 0, 0, 0, 0), 1);
        assert_int_equal(leg(c, TD_EV_TOKEN, 4 * MS, 0, 0, 42, how != STOPPED), 0);
        if (how == STOPPED) {
            assert_int_equal(leg(c, TD_EV_STOP, 5 * MS, 0, 0, 0, 0), 1);
            /* it computes no more, but the prefill worker may speak */
            assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
        } else {
            assert_int_equal(leg(c, TD_EV_DECODE_END, 5 * MS, 0, 0, 0, 0), 0);
        }
        assert_int_equal(tick(c, 300 * MS), 0);
        struct td_core_account a;
        td_core_account(c, 1, &a);
        assert_int_equal(a.assigned, 0); /* decode's room is free at once */
        size_t n = 0, before = how == PREFILL_GONE;
        switch (how) {
        case FIRST_TOKEN:
        case STOPPED:
            n = leg(c, TD_EV_FIRST_TOKEN, 301 * MS, 0, 0, 0, 41);
            break;
        case PREFILL_ENDS:
            n = leg(c, TD_EV_PREFILL_END, 301 * MS, 0, 0, 0, 0);
            break;
        case PREFILL_FAILS:
            n = leg(c, TD_EV_PREFILL_END, 301 * MS, 0, 0, 14, 0);
            break;
        case PREFILL_GONE:
            n = step(c, (struct td_core_event){
                            .kind = TD_EV_WORKER_GONE, .now_ns = 301 * MS, .gone = {.worker = 0}});
            break;
        default:
            assert_int_equal(tick(c, 504 * MS), 0);
            n = tick(c, 506 * MS);
        }
        print_message("end %d: %zu actions\n", (int)how, n);
        assert_int_equal(n, before + 1);
        assert_int_equal(actions[before].kind, TD_ACT_COMPLETE);
        assert_at_rest(c);
        td_core_destroy(c);
    }
    /* the client leaves meanwhile */
    struct td_core *c = core_of(TD_MODE_PD, "least_token", 0);
    join(c, 1, 0, TD_ROLE_PREFILL, 8);
    join(c, 1, 1, TD_ROLE_DECODE, 8);
    arrive(c, 2, 0, 40);
    leg(c, TD_EV_TICKET, 3, 0, 0, 0, 0);
    leg(c, TD_EV_TOKEN, 4, 0, 0, 42, 1);
    leg(c, TD_EV_DECODE_END, 5, 0, 0, 0, 0);
    assert_int_equal(leg(c, TD_EV_CANCEL, 6, 0, 0, 0, 0), 1);
    assert_int_equal(actions[0].kind, TD_ACT_CANCEL_PREFILL);
    assert_at_rest(c);
    td_core_destroy(c);
}

/* A job whose reservation is under way is in no worker's queue yet: a snapshot took it for done,
 * and the next request went where that one was going. */
static void test_snapshot_leaves_planned_work(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "goodput", 0);
    struct td_core_worker_view v;
    join(c, 1, 0, TD_ROLE_PREFILL, 8);
    join(c, 1, 1, TD_ROLE_DECODE, 8);
    assert_int_equal(arrive(c, 2, 0, 1000), 1);
    assert_int_equal(arrive(c, 2, 1, 1000), 1);
    td_core_worker_view(c, 0, &v);
    assert_true(fabs(v.backlog_s - 2) < 0.01);
    step(c, (struct td_core_event){
                .kind = TD_EV_WORKER_SNAPSHOT, .now_ns = 3, .snapshot = {.worker = 0, .seq = 1}});
    td_core_worker_view(c, 0, &v);
    assert_true(fabs(v.backlog_s - 2) < 0.01);
    leg(c, TD_EV_TICKET, 4, 0, 0, 0, 0); /* told of the first one, half of which is computed now */
    step(c, (struct td_core_event){
                .kind = TD_EV_WORKER_SNAPSHOT,
                .now_ns = 5,
                .snapshot = {.worker = 0, .seq = 2, .queued_tokens = 500, .calls_taken = 1}});
    td_core_worker_view(c, 0, &v);
    assert_true(fabs(v.backlog_s - 1.5) < 0.01);
    leg(c, TD_EV_CANCEL, 6, 0, 0, 0, 0);
    leg(c, TD_EV_CANCEL, 6, 1, 0, 0, 0);
    assert_at_rest(c);
    td_core_destroy(c);
}

/* A queue full of requests whose deadlines had passed was refused within one event. */
static void test_refusals_of_one_event_are_bounded(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "goodput", 1000);
    join(c, 1, 0, TD_ROLE_PREFILL, 1);
    join(c, 1, 1, TD_ROLE_DECODE, 1);
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        size_t n = arrive(c, 2 + i, i, 1);
        for (size_t k = 0; k < n; k++) n_failed += actions[k].kind == TD_ACT_FAIL;
    }
    struct td_core_stats st;
    td_core_stats(c, &st);
    assert_in_range(st.queued, 600, N_SLOTS - 1);
    uint32_t n_events = 0;
    for (; n_failed < N_SLOTS - 1 && n_events < 8; n_events++) {
        size_t n = tick(c, 2000 * MS + n_events * MS);
        assert_in_range(n, 1, 256);
        for (size_t k = 0; k < n; k++) assert_int_equal(actions[k].kind, TD_ACT_FAIL);
        n_failed += (uint32_t)n;
    }
    assert_int_equal(n_failed, N_SLOTS - 1);
    assert_in_range(n_events, 3, 4);
    td_core_destroy(c);
}

/* Each time a planned prefill worker had left before the ticket came, the clock of
 * queue_timeout_ms began anew. */
static void test_lost_plans_count_as_waiting(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token", 0);
    join(c, 1, 1, TD_ROLE_DECODE, 8);
    assert_int_equal(arrive(c, 2, 0, 40), 0);
    uint32_t attempt = 0;
    for (uint64_t ms = 1000; ms <= 4000; ms += 1000, attempt++) {
        assert_int_equal(join(c, ms * MS, 0, TD_ROLE_PREFILL, 8), 1);
        assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
        assert_int_equal(actions[0].attempt, attempt);
        assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_WORKER_GONE,
                                                        .now_ns = (ms + 1) * MS,
                                                        .gone = {.worker = 0}}),
                         0);
        assert_int_equal(leg(c, TD_EV_TICKET, (ms + 2) * MS, 0, attempt, 0, 0), 1);
        assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
    }
    assert_int_equal(tick(c, 4999 * MS), 0);
    assert_int_equal(tick(c, 5001 * MS), 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL);
    assert_int_equal(actions[0].fail.code, 14);
    assert_at_rest(c);
    td_core_destroy(c);
}

/* What the last attempt of a request had computed was not counted as wasted; a first token said
 * twice was counted as two prefix hits. */
static void test_tokens_are_counted_once(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token", 0);
    struct td_core_stats st;
    join(c, 1, 0, TD_ROLE_PREFILL, 8);
    arrive(c, 2, 0, 40);
    for (uint32_t attempt = 0; attempt < 2; attempt++) {
        join(c, 3 + attempt, 1, TD_ROLE_DECODE, 8);
        assert_int_equal(actions[0].attempt, attempt);
        leg(c, TD_EV_TICKET, 4, 0, attempt, 0, 0);
        for (int again = 0; again < 2; again++)
            step(c, (struct td_core_event){
                        .kind = TD_EV_FIRST_TOKEN,
                        .now_ns = 5,
                        .first_token = {.of = {.request_at = 0, .id = 1, .attempt = attempt},
                                        .n_tokens = 41,
                                        .cached_tokens = 16}});
        assert_true(step(c, (struct td_core_event){.kind = TD_EV_WORKER_GONE,
                                                   .now_ns = 6,
                                                   .gone = {.worker = 1}}) > 0);
    }
    assert_int_equal(actions[2].kind, TD_ACT_FAIL); /* max_failovers is 1 */
    td_core_stats(c, &st);
    assert_int_equal(st.real_hit_tokens, 2 * 16);
    assert_int_equal(st.wasted_prefill_tokens, 40 + 41);
    assert_at_rest(c);
    td_core_destroy(c);
}

/* Where decode workers prefill for themselves, prefill workers were recommended, and named as
 * what bounds goodput. */
static void test_colocated_needs_no_prefill_workers(void **state)
{
    (void)state;
    double need[2] = {0};
    for (int colocated = 0; colocated < 2; colocated++) {
        struct td_core *c = core_of(colocated ? TD_MODE_COLOCATED : TD_MODE_PD, "goodput", 300);
        if (!colocated) join(c, 1, 0, TD_ROLE_PREFILL, 64);
        join(c, 1, 1, TD_ROLE_DECODE, 64);
        for (uint32_t i = 0; i < N_SLOTS; i++) { /* 20 requests/s of 200 ms */
            arrive(c, i * 50 * MS + 2, i, 200);
            tick(c, i * 50 * MS + 3);
            leg(c, TD_EV_CANCEL, i * 50 * MS + 4, i, 0, 0, 0);
        }
        struct td_core_advice a;
        td_core_advice(c, &a);
        print_message("colocated %d: want %u + %u, need %.2f + %.2f\n", colocated, a.want[0],
                      a.want[1], a.need[0], a.need[1]);
        if (colocated) {
            assert_int_equal(a.want[TD_ROLE_PREFILL], 0);
            assert_true(a.need[TD_ROLE_PREFILL] <= 0);
            assert_true(fabs(a.need[TD_ROLE_DECODE] - need[0] - need[1]) < 0.05 * need[0]);
            assert_in_range(a.want[TD_ROLE_DECODE], 4, 7);
            assert_int_not_equal(a.bound, TD_BOUND_PREFILL);
        } else {
            assert_in_range(a.want[TD_ROLE_PREFILL], 4, 6);
            need[0] = a.need[0];
            need[1] = a.need[1];
        }
        td_core_destroy(c);
    }
}

/* Which side had no worker with room was not asked: prefill workers that took no more counted as
 * decode pressure for a request without a TTFT objective, and decode workers that took no more did
 * not for one that has it. */
static void test_the_side_without_room_is_what_bounds(void **state)
{
    (void)state;
    enum td_core_role full[] = {TD_ROLE_PREFILL, TD_ROLE_DECODE};
    for (int i = 0; i < 4; i++) {
        enum td_core_role role = full[i / 2];
        struct td_core *c = core_of(TD_MODE_PD, "goodput", i % 2 ? 1e6 : 0);
        struct td_core_advice a;
        join(c, 1, 0, TD_ROLE_PREFILL, role == TD_ROLE_PREFILL ? 1 : 64);
        join(c, 1, 1, TD_ROLE_DECODE, role == TD_ROLE_DECODE ? 1 : 64);
        assert_int_equal(arrive(c, 2, 0, 40), 1);
        for (uint32_t n = 1; n < 200; n++) assert_int_equal(arrive(c, 2, n, 40), 0);
        tick(c, MS);
        td_core_advice(c, &a);
        assert_int_equal(a.bound == TD_BOUND_DECODE, role == TD_ROLE_DECODE);
        td_core_destroy(c);
    }
}

/* A decode worker that was silent, and lost its batch, went on being chosen by the step of that
 * batch when it was heard of again. */
static void test_a_worker_that_is_back_has_no_batch(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "goodput", 0);
    struct td_core_worker_view idle, v;
    join(c, 1, 0, TD_ROLE_DECODE, 64);
    td_core_worker_view(c, 0, &idle);
    for (uint32_t n = 0; n < 32; n++) assert_int_equal(arrive(c, 2, n, 40), 1);
    td_core_worker_view(c, 0, &v);
    assert_true(v.step_s > 1.2 * idle.step_s);
    tick(c, 101000 * MS);
    td_core_worker_view(c, 0, &v);
    assert_int_equal(v.state, TD_WORKER_SUSPECT);
    assert_int_equal(v.assigned, 0);
    for (uint32_t n = 0; n < 32; n++) leg(c, TD_EV_CANCEL, 101001 * MS, n, 1, 0, 0);
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = 101002 * MS,
                                   .snapshot = {.worker = 0, .seq = 1}});
    td_core_worker_view(c, 0, &v);
    assert_int_equal(v.state, TD_WORKER_READY);
    assert_true(fabs(v.step_s - idle.step_s) < 1e-9);
    td_core_destroy(c);
}

/* A long prefill with nobody decoding beside it counted as rows mixed into every later decode
 * step: on an idle colocated worker the next request with a TPOT objective was held until its
 * TTFT slack was gone, then refused. Only steps that had both disturb decoding. */
static void test_lone_prefills_disturb_nobody(void **state)
{
    (void)state;
    for (int mixed = 0; mixed < 2; mixed++) {
        struct td_core *c = core_of(TD_MODE_COLOCATED, "goodput", 250);
        join(c, MS, 0, TD_ROLE_DECODE, 16);
        uint64_t now = 2 * MS;
        /* what a worker of such a model says: 512 rows in 138 ms, then 47 steps of 0.13 ms;
           `mixed`: rows in most of them, too */
        for (int i = 0; i < 40; i++) {
            step(c, (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                           .now_ns = now += 140 * MS,
                                           .step = {.worker = 0,
                                                    .prefill_tokens = 512,
                                                    .attention_work = 131072,
                                                    .wall_us = 138000}});
            for (uint64_t k = 0; k < 47; k++)
                step(c, (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                               .now_ns = now += MS / 5,
                                               .step = {.worker = 0,
                                                        .prefill_tokens = mixed ? 500 : 0,
                                                        .attention_work = mixed ? 125000 : 0,
                                                        .decode_seqs = 1,
                                                        .context_tokens = 512 + k,
                                                        .wall_us = mixed ? 135000 : 130}});
        }
        size_t n = step(c, (struct td_core_event){.kind = TD_EV_REQUEST,
                                                  .now_ns = now,
                                                  .request = {.request_at = 0,
                                                              .id = 1,
                                                              .n_prompt = 512,
                                                              .max_tokens = 48,
                                                              .ttft_us = 250000,
                                                              .tpot_us = 6000}});
        /* An empty worker is given it in the first case; where every step carries a chunk, 6 ms
           a token cannot be had. */
        assert_true(mixed ? n == 0 || actions[0].kind == TD_ACT_FAIL
                          : n == 1 && actions[0].kind == TD_ACT_START_DECODE);
        td_core_destroy(c);
    }
}

/* One snapshot with an absurd number shut out all later ones, so that a living worker was lost. */
static void test_a_snapshot_from_the_future(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "goodput", 0);
    join(c, 1, 0, TD_ROLE_PREFILL, 8);
    struct td_core_worker_view v;
    static const uint64_t seqs[] = {5, UINT64_MAX, 1ull << 40, 6, 1000000};
    static const bool taken[] = {true, false, false, true, true};
    uint64_t last = 0;
    for (size_t i = 0; i < sizeof seqs / sizeof *seqs; i++) {
        uint64_t now = (10 + i) * MS;
        step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                       .now_ns = now,
                                       .snapshot = {.worker = 0, .seq = seqs[i]}});
        if (taken[i]) last = now;
        td_core_worker_view(c, 0, &v);
        assert_int_equal(v.snapshot_ns, last);
    }
    td_core_destroy(c);
}

/* A worker whose numbers had grown beyond the greatest jump was shut out for good when it joined
 * again, as after a lost stream: its first snapshot after a join is where they begin. */
static void test_snapshots_go_on_after_another_join(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "goodput", 0);
    struct td_core_worker_view v;
    uint64_t seq = 5ull << 20;
    for (uint64_t i = 0; i < 3; i++) {
        join(c, (1 + 100 * i) * MS, 0, TD_ROLE_PREFILL, 8);
        for (uint64_t k = 2; k < 5; k++) {
            uint64_t now = (k + 100 * i) * MS;
            step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                           .now_ns = now,
                                           .snapshot = {.worker = 0, .seq = ++seq}});
            td_core_worker_view(c, 0, &v);
            assert_int_equal(v.snapshot_ns, now);
        }
        if (i == 1) seq = 0; /* a worker that begins anew */
    }
    td_core_destroy(c);
}

/* Deflections are those by choice: what hybrid mode has no prefill worker for was counted, too. */
static void test_deflected_by_choice(void **state)
{
    (void)state;
    struct td_core_stats st;
    struct td_core *c = core_of(TD_MODE_HYBRID, "goodput", 0);
    join(c, 1, 0, TD_ROLE_DECODE, 8);
    assert_int_equal(arrive(c, 2, 0, 100), 1);
    assert_true(actions[0].start.local);
    td_core_stats(c, &st);
    assert_int_equal(st.deflected, 0);
    join(c, 3, 1, TD_ROLE_PREFILL, 8);
    /* the prefill worker has a row of them: some are deflected */
    for (uint32_t request_at = 1; request_at < 9; request_at++)
        arrive(c, 3 + request_at, request_at, 100);
    td_core_stats(c, &st);
    assert_true(st.deflected > 0 && st.deflected < 8);
    td_core_destroy(c);
}

/* One prefill and one decode worker, and between them 1 ms of link for each token. */
static struct td_core *slow_link(uint64_t max_prefix_entries)
{
    struct td_core_config g = {.mode = TD_MODE_PD,
                               .policy = "goodput",
                               .max_requests = 8,
                               .max_queued = 8,
                               .worker_timeout_ms = 100000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 1,
                               .max_prefix_entries = max_prefix_entries,
                               .n_thetas = 1};
    g.thetas[0] = (struct td_lat_theta){.prefill = {0, 1e-6, 0},
                                        .decode = {1e-3, 0, 0, 0, 0},
                                        .link_bytes_per_s = 1e6,
                                        .known = true};
    struct td_core *c = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&g, &c, &err), TD_OK);
    for (uint32_t w = 0; w < 2; w++)
        step(c, (struct td_core_event){.kind = TD_EV_WORKER_JOIN,
                                       .now_ns = 1,
                                       .join = {.worker = w,
                                                .role = w ? TD_ROLE_DECODE : TD_ROLE_PREFILL,
                                                .kv_tokens = 100000,
                                                .max_seqs = 8,
                                                .kv_bytes_per_token = 1000}});
    return c;
}

/* A prompt of which the decode worker has nine tenths was charged to the link as a whole: the
 * next one seemed to wait for it. */
static void test_the_link_is_charged_for_what_is_sent(void **state)
{
    (void)state;
    uint64_t hashes[10], tpot_us[2];
    for (uint64_t i = 0; i < 10; i++) hashes[i] = 77 + i;
    for (int held = 0; held < 2; held++) {
        struct td_core *c = slow_link(1000);
        for (int i = 0; held && i < 9; i++)
            step(c, (struct td_core_event){.kind = TD_EV_BLOCK_ADD,
                                           .now_ns = 2,
                                           .block_add = {.worker = 1, .hash = hashes[i]}});
        struct td_core_event r = {.kind = TD_EV_REQUEST,
                                  .now_ns = 3,
                                  .request = {.request_at = 0,
                                              .id = 1,
                                              .n_prompt = 161,
                                              .max_tokens = 16,
                                              .hashes = hashes,
                                              .n_hashes = 10,
                                              .hash_tokens = 16}};
        assert_int_equal(step(c, r), 1);          /* 1 ms of link time a token: 161 or 17 ms */
        assert_int_equal(arrive(c, 4, 1, 10), 1); /* another, behind it on the same link */
        tpot_us[held] = actions[0].start.tpot_us;
        td_core_destroy(c);
    }
    if (!(tpot_us[0] > tpot_us[1] + 5000))
        fail_msg("predicted TPOT behind a whole prompt %llu us, behind a tenth of it %llu us",
                 (unsigned long long)tpot_us[0], (unsigned long long)tpot_us[1]);
}

/* Transfers that were predicted too long added up: the link seemed seconds behind with nothing
 * on it, and requests with a TPOT objective were refused. Nor does a transfer that shared the
 * link say how fast the link is. */
static void test_long_predictions_of_the_link_do_not_add_up(void **state)
{
    (void)state;
    struct td_core *c = slow_link(0);
    uint64_t now = 1, first_us = 0;
    for (uint64_t i = 0; i < 50; i++) { /* never idle: the next is placed before the last one's
                                           transfer has ended, 1 ms later each */
        uint32_t request_at = (uint32_t)(i % 8), last = (uint32_t)((i + 7) % 8);
        step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                       .now_ns = now += MS,
                                       .snapshot = {.worker = 0, .seq = i + 1}});
        assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_REQUEST,
                                                        .now_ns = now,
                                                        .request = {.request_at = request_at,
                                                                    .id = i + 1,
                                                                    .n_prompt = 160,
                                                                    .max_tokens = 16}}),
                         1);
        if (i == 1) first_us = actions[0].start.tpot_us;
        if (i > 1 && actions[0].start.tpot_us > first_us + 100) {
            fail_msg("request %llu: TPOT is predicted as %llu us, of the second it was %llu",
                     (unsigned long long)i, (unsigned long long)actions[0].start.tpot_us,
                     (unsigned long long)first_us);
        }
        step(c, (struct td_core_event){.kind = TD_EV_TICKET,
                                       .now_ns = now,
                                       .ticket = {.of = {.request_at = request_at, .id = i + 1}}});
        step(c,
             (struct td_core_event){
                 .kind = TD_EV_FIRST_TOKEN,
                 .now_ns = now,
                 .first_token = {.of = {.request_at = request_at, .id = i + 1}, .n_tokens = 161}});
        if (i == 0) continue;
        /* both were on the link: that 160,000 bytes took 1.6 s says nothing of it */
        step(c, (struct td_core_event){.kind = TD_EV_PREFILL_END,
                                       .now_ns = now,
                                       .prefill_end = {.of = {.request_at = last, .id = i},
                                                       .sent_bytes = 160000,
                                                       .sent_us = 1600000}});
        step(c, (struct td_core_event){
                    .kind = TD_EV_TOKEN,
                    .now_ns = now,
                    .token = {.of = {.request_at = last, .id = i}, .n_tokens = 176, .last = 1}});
        step(c, (struct td_core_event){.kind = TD_EV_DECODE_END,
                                       .now_ns = now,
                                       .decode_end = {.of = {.request_at = last, .id = i}}});
    }
    td_core_destroy(c);
}

static double link_bytes_per_s(const struct td_core *c)
{
    struct td_lat_theta t;
    td_latency_theta(td_core_latency(c), 0, &t);
    return t.link_bytes_per_s;
}

/* Chunks of a long prompt that was still computing were on the link beside short prompts' KV,
 * and only transfers whose computing was over counted as crowding: the learned speed fell to a
 * ninth, and requests were refused for their TPOT. What shared the link teaches only that it is
 * no slower. */
static void test_chunks_of_prompts_still_computing_crowd_the_link(void **state)
{
    (void)state;
    struct td_core *c = slow_link(0);
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_JOIN,
                                   .now_ns = 2,
                                   .join = {.worker = 0,
                                            .role = TD_ROLE_PREFILL,
                                            .kv_tokens = 100000,
                                            .max_seqs = 8,
                                            .max_step_tokens = 512,
                                            .kv_bytes_per_token = 1000}});
    double before = link_bytes_per_s(c);
    arrive(c, 3, 7, 20000); /* its 40 chunks are computed all the time */
    leg(c, TD_EV_TICKET, 3, 7, 0, 0, 0);
    uint64_t now = 3;
    for (uint64_t i = 0; i < 101; i++) {
        uint64_t id = 100 + i, us = i == 100 ? 80000 : 1440000;
        step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                       .now_ns = now += MS,
                                       .snapshot = {.worker = 0, .seq = i + 1}});
        assert_int_equal(
            step(c,
                 (struct td_core_event){
                     .kind = TD_EV_REQUEST,
                     .now_ns = now,
                     .request = {.request_at = 0, .id = id, .n_prompt = 160, .max_tokens = 16}}),
            1);
        step(c, (struct td_core_event){.kind = TD_EV_TICKET,
                                       .now_ns = now,
                                       .ticket = {.of = {.request_at = 0, .id = id}}});
        step(c, (struct td_core_event){
                    .kind = TD_EV_FIRST_TOKEN,
                    .now_ns = now,
                    .first_token = {.of = {.request_at = 0, .id = id}, .n_tokens = 161}});
        /* 160,000 bytes beside the other's: in nine times what they need; the last one in half
           of it */
        step(c, (struct td_core_event){.kind = TD_EV_PREFILL_END,
                                       .now_ns = now,
                                       .prefill_end = {.of = {.request_at = 0, .id = id},
                                                       .sent_bytes = 160000,
                                                       .sent_us = us}});
        step(c, (struct td_core_event){
                    .kind = TD_EV_TOKEN,
                    .now_ns = now,
                    .token = {.of = {.request_at = 0, .id = id}, .n_tokens = 176, .last = 1}});
        step(c, (struct td_core_event){.kind = TD_EV_DECODE_END,
                                       .now_ns = now,
                                       .decode_end = {.of = {.request_at = 0, .id = id}}});
        double learned = link_bytes_per_s(c);
        if (i < 100 && !(fabs(learned - before) < 1e-6 * before))
            fail_msg("after %llu crowded transfers the link has %.0f bytes/s, before %.0f",
                     (unsigned long long)i + 1, learned, before);
    }
    if (!(link_bytes_per_s(c) > 1.02 * before))
        fail_msg("a transfer faster than the link was thought to be taught nothing");
    td_core_destroy(c);
}

/* All requests of a dead worker come back at once, in any order, and belong before those that
 * wait: a search for the place of each took time squared. The bound is on the growth: four times
 * as many may take 12 times as long at most, where squared is 16 and the queue's own is 5. */
static double time_of_failovers(uint32_t n, bool in_order, uint64_t seed)
{
    static struct td_queue_key keys[16384];
    static const uint32_t rank = 0;
    struct td_queue *o = NULL;
    struct td_err err;
    struct timespec a, b;
    assert_int_equal(td_queue_create(16384, 1, &rank, &o, &err), TD_OK);
    for (uint32_t i = 0; i < n; i++) {
        td_random_step(&seed);
        keys[i] = (struct td_queue_key){.id = i, .deadline_ns = in_order ? n - i : seed >> 20};
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    for (uint32_t i = 0; i < n; i++) td_queue_insert(o, i, &keys[i], 1, 1);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    td_queue_walk(o, 0, 2);
    uint64_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t request_at = td_queue_next(o);
        assert_true(keys[request_at].deadline_ns >= last);
        last = keys[request_at].deadline_ns;
        if (i % 2) td_queue_remove(o, request_at);
    }
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    td_queue_destroy(o);
    return (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
}

static void test_many_come_back_at_once(void **state)
{
    (void)state;
    for (int in_order = 0; in_order < 2; in_order++) { /* each before all others, or anywhere */
        double least = INFINITY;
        for (uint64_t i = 0; i < 5; i++)
            least = fmin(least, time_of_failovers(16384, in_order, i) /
                                    fmax(1e-5, time_of_failovers(4096, in_order, i)));
        if (!(least < 12))
            fail_msg("16,384 insertions take %.1f times as long as 4,096 (in order: %d)", least,
                     in_order);
    }
}

/* At a cold start nothing is known of prefill times, so all of a first burst's waiting counted as
 * the worker's own delay. A worker with more of the burst got no request after it, whatever the
 * other's queue: of 60 live requests all went to one of two colocated workers. */
static void test_a_slow_first_burst_is_forgotten(void **state)
{
    (void)state;
    enum { N_BURST = 8, N_AFTER = 40, PREFILL_MS = 150 };
    struct td_core_config cfg = {.mode = TD_MODE_COLOCATED,
                                 .policy = "goodput",
                                 .max_requests = N_SLOTS,
                                 .max_queued = N_SLOTS,
                                 .worker_timeout_ms = 100000,
                                 .queue_timeout_ms = 5000,
                                 .stall_ms = 20000,
                                 .n_classes = 1};
    cfg.classes[0] = (struct td_core_class){.name = "default", .weight = 1};
    struct td_core *c = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&cfg, &c, &err), TD_OK);
    join(c, 1, 0, TD_ROLE_DECODE, 64);
    join(c, 1, 1, TD_ROLE_DECODE, 64);
    uint64_t now = 2, free_at[2] = {0};
    uint32_t n_placed[2] = {0};
    for (uint32_t i = 0; i < N_BURST + N_AFTER; i++) {
        size_t n = arrive(c, now, i, 200);
        assert_true(n > 0 && actions[n - 1].kind == TD_ACT_START_DECODE);
        uint32_t w = actions[n - 1].start.worker;
        assert_in_range(w, 0, 1);
        if (i >= N_BURST) n_placed[w]++;
        free_at[w] = (free_at[w] > now ? free_at[w] : now) + PREFILL_MS * MS;
        /* one after the other; in the burst five at one worker, as it may fall by chance */
        uint64_t first = i < N_BURST ? 2 + (uint64_t)(i + 1) * PREFILL_MS * MS : free_at[w];
        step(c, (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                       .now_ns = first,
                                       .step = {.worker = w,
                                                .prefill_tokens = 200,
                                                .attention_work = 20000,
                                                .wall_us = PREFILL_MS * 1000}});
        leg(c, TD_EV_TOKEN, first, i, 0, 201, 0);
        leg(c, TD_EV_DECODE_END, first + 20 * MS, i, 0, 0, 0);
        if (i >= N_BURST - 1) now = first + 40 * MS;
    }
    print_message("placed: %u and %u\n", n_placed[0], n_placed[1]);
    assert_true(n_placed[0] >= N_AFTER / 5 && n_placed[1] >= N_AFTER / 5);
    td_core_destroy(c);
}

/* A worker that was slow once gets no request that could show that it no longer is. */
static void test_an_old_stage_counts_less(void **state)
{
    (void)state;
    struct td_stage own = {0}, all = {0};
    assert_true(td_stage_s(&own, &all, 5) == 0);
    for (int i = 0; i < 20; i++) td_stage_learn(&all, 10, 0.010);
    assert_true(td_stage_s(&own, &all, 10) == 0); /* a worker that has just come is tried */
    for (int i = 0; i < 20; i++) td_stage_learn(&own, 10, 0.500);
    double last_s = td_stage_s(&own, &all, 10);
    assert_true(fabs(last_s - 0.5) < 1e-9);
    for (double now_s = 11; now_s < 120; now_s++) {
        double s = td_stage_s(&own, &all, now_s);
        assert_true(s < last_s && s > 0.010);
        last_s = s;
    }
    assert_true(last_s < 0.060);
    td_stage_learn(&own, 120, 0.500);
    assert_true(fabs(td_stage_s(&own, &all, 120) - 0.5) < 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_last_message_waits_for_the_prefill_figures),
        cmocka_unit_test(test_snapshot_leaves_planned_work),
        cmocka_unit_test(test_refusals_of_one_event_are_bounded),
        cmocka_unit_test(test_lost_plans_count_as_waiting),
        cmocka_unit_test(test_tokens_are_counted_once),
        cmocka_unit_test(test_colocated_needs_no_prefill_workers),
        cmocka_unit_test(test_the_side_without_room_is_what_bounds),
        cmocka_unit_test(test_a_worker_that_is_back_has_no_batch),
        cmocka_unit_test(test_lone_prefills_disturb_nobody),
        cmocka_unit_test(test_a_snapshot_from_the_future),
        cmocka_unit_test(test_snapshots_go_on_after_another_join),
        cmocka_unit_test(test_deflected_by_choice),
        cmocka_unit_test(test_the_link_is_charged_for_what_is_sent),
        cmocka_unit_test(test_long_predictions_of_the_link_do_not_add_up),
        cmocka_unit_test(test_chunks_of_prompts_still_computing_crowd_the_link),
        cmocka_unit_test(test_many_come_back_at_once),
        cmocka_unit_test(test_a_slow_first_burst_is_forgotten),
        cmocka_unit_test(test_an_old_stage_counts_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
