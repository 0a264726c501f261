/* router/core: every request ends exactly once, the ledger returns to zero, stale events change
 * nothing, and a recorded log replays to the same actions (I5). The random test plays workers
 * and clients against the core and checks the invariants after every event. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/core.h"
#include "router/core/policy.h"
#include "sim/baselines.h"
#include "tests/unit/core_leg.h"

#define MS 1000000ull
static struct td_core_action actions[TD_CORE_MAX_ACTIONS_PER_EVENT];

static struct td_core *core_of(enum td_core_mode mode, const char *policy)
{
    struct td_core_config c = {.mode = mode,
                               .policy = policy,
                               .policies = td_sim_policies,
                               .max_requests = 64,
                               .max_queued = 32,
                               .hybrid_local_tokens = 10,
                               .worker_timeout_ms = 1000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 3};
    struct td_core *core = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&c, &core, &err), TD_OK);
    return core;
}

static size_t step(struct td_core *c, struct td_core_event e)
{
    return td_core_step(c, &e, actions);
}
static size_t join(struct td_core *c, uint64_t now, uint32_t worker, enum td_core_role role)
{
    return step(c,
                (struct td_core_event){
                    .kind = TD_EV_WORKER_JOIN,
                    .now_ns = now,
                    .join = {.worker = worker, .role = role, .kv_tokens = 10000, .max_seqs = 8}});
}
static size_t arrive(struct td_core *c, uint64_t now, uint32_t request_at, uint64_t id, uint64_t n)
{
    return step(
        c, (struct td_core_event){
               .kind = TD_EV_REQUEST,
               .now_ns = now,
               .request = {.request_at = request_at, .id = id, .n_prompt = n, .max_tokens = 16}});
}
static size_t leg(struct td_core *c, enum td_core_event_kind kind, uint64_t now,
                  uint32_t request_at, uint64_t id, uint32_t attempt, uint64_t a)
{
    return step(
        c, leg_event(kind, now,
                     (struct td_attempt){.request_at = request_at, .id = id, .attempt = attempt}, a,
                     0));
}

static void test_life_pd(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    assert_int_equal(join(c, 1, 0, TD_ROLE_PREFILL), 0);
    assert_int_equal(arrive(c, 2, 5, 100, 40), 0); /* nobody to decode: queued */
    assert_int_equal(join(c, 3, 1, TD_ROLE_DECODE), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    assert_int_equal(actions[0].start.worker, 1);
    assert_false(actions[0].start.local);
    assert_int_equal(leg(c, TD_EV_TICKET, 4, 5, 100, 0, 16), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_PREFILL);
    assert_int_equal(actions[0].start.worker, 0);
    assert_int_equal(leg(c, TD_EV_FIRST_TOKEN, 5, 5, 100, 0, 0), 0);
    assert_int_equal(leg(c, TD_EV_TOKEN, 6, 5, 100, 0, 41), 0);
    assert_int_equal(leg(c, TD_EV_PREFILL_END, 7, 5, 100, 0, 0), 0);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 8, 5, 100, 0, 0), 1);
    assert_int_equal(actions[0].kind, TD_ACT_COMPLETE);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 9, 5, 100, 0, 0), 0); /* it is gone */
    struct td_core_worker_view v;
    for (uint32_t w = 0; w < 2; w++) {
        td_core_worker_view(c, w, &v);
        assert_int_equal(v.assigned, 0);
        assert_int_equal(v.assigned_tokens, 0);
    }
    td_core_destroy(c);
}

/* A worker of 8 seats, of which other routers' requests have n_seqs. */
static void tell_foreign(struct td_core *c, uint64_t now, uint32_t worker, uint64_t seq,
                         uint64_t n_routers, uint64_t n_seqs)
{
    step(c, (struct td_core_event){
                .kind = TD_EV_FOREIGN,
                .now_ns = now,
                .foreign = {.worker = worker, .n_routers = n_routers, .n_seqs = n_seqs}});
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = now,
                                   .snapshot = {.worker = worker, .seq = seq}});
}

static uint32_t assigned_of(const struct td_core *c, uint32_t worker)
{
    struct td_core_worker_view v;
    td_core_worker_view(c, worker, &v);
    return v.assigned;
}

/* Between two snapshots a router takes its share of what is free, 1 of N, rounded up; with the next
 * snapshot it has another share; alone again, all of it. What it may not take waits. */
static void test_share_of_what_is_free(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "goodput");
    join(c, 1, 0, TD_ROLE_DECODE);
    tell_foreign(c, 2, 0, 1, 3, 1); /* 7 free: 3 are ours */
    for (uint32_t i = 0; i < 7; i++) arrive(c, 3 + i, i, 100 + i, 40);
    assert_int_equal(assigned_of(c, 0), 3);
    tell_foreign(c, 20, 0, 2, 3, 3); /* 2 free: 1 is ours */
    assert_int_equal(assigned_of(c, 0), 4);
    tell_foreign(c, 30, 0, 3, 3, 4); /* full */
    assert_int_equal(assigned_of(c, 0), 4);
    tell_foreign(c, 40, 0, 4, 1, 0);
    assert_int_equal(assigned_of(c, 0), 7);
    td_core_destroy(c);
}

/* KV that others' requests have is not free. One request may take all that is: less than a request
 * needs is no use to any router, and the worker refuses who comes second. */
static void test_share_of_kv(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "goodput");
    join(c, 1, 0, TD_ROLE_DECODE); /* 10000 tokens, of which 9500 may be promised */
    struct td_core_event e = {
        .kind = TD_EV_FOREIGN,
        .now_ns = 2,
        .foreign = {.worker = 0, .n_routers = 4, .n_seqs = 1, .tokens = 6000}};
    step(c, e);
    arrive(c, 3, 0, 100, 2900);
    arrive(c, 4, 1, 101, 40); /* a quarter of what was free, and more, is taken */
    assert_int_equal(assigned_of(c, 0), 1);
    e.foreign.tokens = 0;
    e.now_ns = 5;
    step(c, e);
    assert_int_equal(assigned_of(c, 0), 2);
    td_core_destroy(c);
}

/* One prefill worker, 0, and one decode worker, 1: a prompt of n tokens takes 1 + n/10 ms. */
static struct td_core *core_of_pair(uint32_t ttft_ms, bool best_effort)
{
    struct td_core_config g = {.mode = TD_MODE_PD,
                               .policy = "goodput",
                               .max_requests = 64,
                               .max_queued = 32,
                               .worker_timeout_ms = 100000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 3,
                               .classes = {{"default", ttft_ms, 0, 1, best_effort}},
                               .n_classes = 1,
                               .n_thetas = 1};
    g.thetas[0] = (struct td_lat_theta){
        .prefill = {1e-3, 1e-4, 0}, .decode = {1e-3, 0, 0, 0, 0}, .known = true};
    struct td_core *c = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&g, &c, &err), TD_OK);
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    return c;
}

/* What a worker of two routers says: of the other's requests, and its queue. */
static void tell_two(struct td_core *c, uint64_t now, uint64_t seq, struct td_ev_foreign f)
{
    if (!f.n_routers) f.n_routers = 2;
    step(c, (struct td_core_event){.kind = TD_EV_FOREIGN, .now_ns = now, .foreign = f});
    step(c, (struct td_core_event){
                .kind = TD_EV_WORKER_SNAPSHOT,
                .now_ns = now,
                .snapshot = {.worker = f.worker, .seq = seq, .queued_tokens = f.queued_tokens}});
}

/* The TTFT that a prompt of 1000 tokens would be promised now, in ms. */
static uint64_t promised_ms(struct td_core *c, uint64_t now, uint64_t id)
{
    assert_int_equal(arrive(c, now, 0, id, 1000), 1);
    uint64_t ms = actions[0].start.ttft_us / 1000;
    assert_int_equal(leg(c, TD_EV_CANCEL, now, 0, id, 0, 0), 1);
    return ms;
}

/* With several routers the prefill worker's queue may have grown while the decode worker reserved.
 * A request that would surely be late is given back before its prefill is spent, unless it may not
 * be refused; one router knew what it sent. */
static void test_late_at_the_ticket(void **state)
{
    (void)state;
    static const struct {
        uint64_t n_routers, queued;
        bool best_effort, is_refused;
    } cases[] = {{2, 5000, false, true},
                 {2, 2000, false, false},
                 {2, 5000, true, false},
                 {1, 5000, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_core *c = core_of_pair(400, cases[i].best_effort);
        uint64_t n_routers = cases[i].n_routers;
        tell_two(c, 2, 1, (struct td_ev_foreign){.worker = 0, .n_routers = n_routers});
        tell_two(c, 2, 1, (struct td_ev_foreign){.worker = 1, .n_routers = n_routers});
        assert_int_equal(arrive(c, 100 * MS, 0, 7, 1000), 1);
        tell_two(c, 140 * MS, 2,
                 (struct td_ev_foreign){.worker = 0,
                                        .n_routers = n_routers,
                                        .n_seqs = 5,
                                        .queued_tokens = cases[i].queued});
        size_t n = leg(c, TD_EV_TICKET, 150 * MS, 0, 7, 0, 0);
        assert_int_equal(n, cases[i].is_refused ? 2 : 1);
        if (cases[i].is_refused) {
            assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
            assert_int_equal(actions[1].kind, TD_ACT_FAIL);
            assert_int_equal(actions[1].fail.code, TD_CODE_RESOURCE_EXHAUSTED);
        } else {
            assert_int_equal(actions[0].kind, TD_ACT_START_PREFILL);
        }
        assert_int_equal(assigned_of(c, 0), !cases[i].is_refused);
        assert_int_equal(assigned_of(c, 1), !cases[i].is_refused);
        td_core_destroy(c);
    }
}

/* A prefill worker of several routers is told in what time it should compute a prompt, and one that
 * it gives back is refused: no failover, and nothing is left. What may not be refused is computed
 * however late, as all is where there is one router. */
static void test_given_back(void **state)
{
    (void)state;
    static const struct {
        uint64_t n_routers;
        bool best_effort, is_bound;
        enum td_code code;
        bool is_refused;
    } cases[] = {
        {2, false, true, TD_CODE_OUT_OF_RANGE, true},
        {2, true, false, TD_CODE_OUT_OF_RANGE, false},
        {1, false, false, TD_CODE_OUT_OF_RANGE, false},
        {2, false, true, TD_CODE_ABORTED, false}, /* its decode worker has started anew */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_core *c = core_of_pair(400, cases[i].best_effort);
        char line[TD_CORE_LINE_MAX];
        for (uint32_t w = 0; w < 2; w++)
            tell_two(c, 2, 1, (struct td_ev_foreign){.worker = w, .n_routers = cases[i].n_routers});
        assert_int_equal(arrive(c, 100 * MS, 0, 7, 1000), 1);
        assert_int_equal(leg(c, TD_EV_TICKET, 150 * MS, 0, 7, 0, 0), 1);
        assert_int_equal(actions[0].kind, TD_ACT_START_PREFILL);
        const struct td_act_start *start = &actions[0].start;
        td_core_action_format(&actions[0], line, sizeof line);
        assert_int_equal(strstr(line, " work_us=101000 finish_within_us=") != NULL,
                         cases[i].is_bound);
        if (cases[i].is_bound) {
            assert_int_equal(start->work_us, 101000);
            assert_in_range(start->finish_within_us, 350000, 390000); /* 350 ms are left */
        } else {
            assert_true(start->work_us == 0 && start->finish_within_us == 0);
        }
        size_t n = leg(c, TD_EV_PREFILL_END, 200 * MS, 0, 7, 0, cases[i].code);
        assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
        if (cases[i].is_refused) {
            assert_int_equal(n, 2);
            assert_int_equal(actions[1].kind, TD_ACT_FAIL);
            assert_int_equal(actions[1].fail.code, TD_CODE_RESOURCE_EXHAUSTED);
        }
        assert_int_equal(td_core_failovers(c, 0), !cases[i].is_refused); /* it was not to do that */
        assert_int_equal(assigned_of(c, 0), 0);
        td_core_destroy(c);
    }
}

/* Others' requests that a decode worker has reserved for, and that no prefill worker tells of yet,
 * come before this one: until the decode worker has gone, or says otherwise. */
static void test_foreign_prompts_on_their_way(void **state)
{
    (void)state;
    struct td_core *c = core_of_pair(0, false);
    tell_two(c, 2, 1, (struct td_ev_foreign){.worker = 0});
    tell_two(c, 2, 1, (struct td_ev_foreign){.worker = 1});
    promised_ms(c, 3, 1); /* shows how long a prompt takes */
    assert_int_equal(promised_ms(c, 4, 2), 101);
    tell_two(c, 5, 2, (struct td_ev_foreign){.worker = 1, .n_seqs = 6, .n_running = 1});
    assert_int_equal(promised_ms(c, 6, 3), 606); /* 5 of them */
    tell_two(c, 7, 2, (struct td_ev_foreign){.worker = 0, .n_seqs = 2});
    assert_int_equal(promised_ms(c, 8, 4), 404); /* 2 have come, and are computed */
    tell_two(c, 9, 3, (struct td_ev_foreign){.worker = 1, .n_seqs = 6, .n_running = 6});
    assert_int_equal(promised_ms(c, 10, 5), 101);
    tell_two(c, 11, 4, (struct td_ev_foreign){.worker = 1, .n_seqs = 6});
    assert_int_equal(promised_ms(c, 12, 6), 505);
    join(c, 13, 1, TD_ROLE_DECODE); /* a new one at its place */
    tell_two(c, 14, 1, (struct td_ev_foreign){.worker = 1});
    tell_two(c, 14, 3, (struct td_ev_foreign){.worker = 0});
    assert_int_equal(promised_ms(c, 15, 7), 101);
    td_core_destroy(c);
}

/* A step's prompts are in the queue until it ends: what was computed of them counts all the same.
 * With the step's end the next one begins. */
static void test_queue_of_a_running_step(void **state)
{
    (void)state;
    struct td_core *c = core_of_pair(0, false);
    struct td_ev_foreign f = {.worker = 0};
    tell_two(c, 2, 1, f);
    tell_two(c, 2, 1, (struct td_ev_foreign){.worker = 1});
    promised_ms(c, 3, 1);
    f.n_seqs = 4;
    f.queued_tokens = 4000;
    tell_two(c, 100 * MS, 2, f);
    assert_in_range(promised_ms(c, 100 * MS, 2), 504, 510);
    tell_two(c, 300 * MS, 3, f); /* nothing has ended since */
    assert_in_range(promised_ms(c, 300 * MS, 3), 304, 310);
    step(c,
         (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                .now_ns = 310 * MS,
                                .step = {.worker = 0, .prefill_tokens = 2000, .wall_us = 201000}});
    f.queued_tokens = 2000;
    tell_two(c, 310 * MS, 4, f);
    assert_in_range(promised_ms(c, 310 * MS, 4), 302, 308);
    td_core_destroy(c);
}

/* On a small model the ticket and the calls take longer than the prefill: 30 and 5 ms beside 1 ms.
 * Predicted TTFT was 1 ms, and its coverage 0 %. local: one decode worker that prefills, 36 ms
 * until its first token. */
static void ttft_holds_the_calls(enum td_core_mode mode)
{
    struct td_core_config g = {.mode = mode,
                               .policy = "goodput",
                               .max_requests = 64,
                               .max_queued = 32,
                               .worker_timeout_ms = 100000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 3,
                               .n_thetas = 1};
    g.thetas[0] =
        (struct td_lat_theta){.prefill = {1e-3, 0, 0}, .decode = {1e-3, 0, 0, 0, 0}, .known = true};
    struct td_core *c = NULL;
    struct td_err err;
    struct td_lat_quality q;
    uint64_t predicted_us = 0;
    assert_int_equal(td_core_create(&g, &c, &err), TD_OK);
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    for (uint64_t i = 0; i < 100; i++) {
        uint64_t at = (1 + i) * 100 * MS, id = 100 + i;
        assert_int_equal(arrive(c, at, 0, id, 40), 1);
        predicted_us = actions[0].start.ttft_us;
        if (mode == TD_MODE_PD) {
            assert_int_equal(leg(c, TD_EV_TICKET, at + 30 * MS, 0, id, 0, 0), 1);
            assert_int_equal(leg(c, TD_EV_FIRST_TOKEN, at + 36 * MS, 0, id, 0, 0), 0);
        }
        assert_int_equal(leg(c, TD_EV_TOKEN, at + 36 * MS, 0, id, 0, 41), 0);
        if (mode == TD_MODE_PD) leg(c, TD_EV_PREFILL_END, at + 37 * MS, 0, id, 0, 0);
        assert_int_equal(leg(c, TD_EV_DECODE_END, at + 38 * MS, 0, id, 0, 0), 1);
    }
    assert_in_range(predicted_us, 35900, 36100);
    td_latency_quality(td_core_latency(c), TD_LAT_TTFT, &q);
    if (q.coverage < 0.8)
        fail_msg("mode %d: coverage %.2f of %llu", mode, q.coverage, (unsigned long long)q.n);
    td_core_destroy(c);
}

static void test_ttft_holds_the_calls(void **state)
{
    (void)state;
    ttft_holds_the_calls(TD_MODE_PD);
    ttft_holds_the_calls(TD_MODE_COLOCATED);
}

/* The first call to a worker is a cold one: here its first token takes 100 ms more than the
 * prefill. That says nothing of the next one, which would save half of its 5 ms there: it goes
 * where its prefix is. */
static void test_a_cold_first_call_does_not_turn_a_prompt_away(void **state)
{
    (void)state;
    struct td_core_config g = {.mode = TD_MODE_PD,
                               .policy = "goodput",
                               .max_requests = 64,
                               .max_queued = 32,
                               .worker_timeout_ms = 100000,
                               .queue_timeout_ms = 5000,
                               .stall_ms = 20000,
                               .max_failovers = 3,
                               .max_prefix_entries = 256,
                               .n_thetas = 1};
    g.thetas[0] = (struct td_lat_theta){
        .prefill = {1e-3, 1e-4, 0}, .decode = {1e-3, 0, 0, 0, 0}, .known = true};
    const uint64_t hashes[2] = {71, 72};
    struct td_core *c = NULL;
    struct td_err err;
    uint32_t warm = 0;
    assert_int_equal(td_core_create(&g, &c, &err), TD_OK);
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_PREFILL);
    join(c, 1, 2, TD_ROLE_DECODE);
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t at = (1 + i) * 200 * MS, id = 100 + i;
        struct td_core_event e = {.kind = TD_EV_REQUEST,
                                  .now_ns = at,
                                  .request = {.id = id, .n_prompt = 40, .max_tokens = 16}};
        e.request.hashes = hashes;
        e.request.n_hashes = 2;
        e.request.hash_tokens = 16;
        assert_int_equal(step(c, e), 1);
        assert_int_equal(leg(c, TD_EV_TICKET, at + MS, 0, id, 0, 0), 1);
        assert_int_equal(actions[0].kind, TD_ACT_START_PREFILL);
        uint32_t worker = actions[0].start.worker, hit = i ? 32 : 0;
        if (i == 0) warm = worker;
        assert_int_equal(worker, warm);
        step(c, (struct td_core_event){.kind = TD_EV_FIRST_TOKEN,
                                       .now_ns = at + (i ? 5 : 106) * MS,
                                       .first_token = {.of = {.id = id}, .cached_tokens = hit}});
        for (int b = 0; i == 0 && b < 2; b++)
            step(c, (struct td_core_event){.kind = TD_EV_BLOCK_ADD,
                                           .now_ns = at,
                                           .block_add = {.worker = warm, .hash = hashes[b]}});
        leg(c, TD_EV_TOKEN, at + 110 * MS, 0, id, 0, 41);
        leg(c, TD_EV_PREFILL_END, at + 111 * MS, 0, id, 0, 0);
        assert_int_equal(leg(c, TD_EV_DECODE_END, at + 112 * MS, 0, id, 0, 0), 1);
    }
    td_core_destroy(c);
}

static void test_failover_keeps_place_and_ignores_the_past(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "round_robin");
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    assert_int_equal(arrive(c, 2, 0, 1, 40), 1);
    leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
    leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 0, 0);
    /* the decode worker dies: the prefill leg is cancelled and attempt 1 waits */
    assert_int_equal(
        step(c,
             (struct td_core_event){.kind = TD_EV_WORKER_GONE, .now_ns = 5, .gone = {.worker = 1}}),
        2);
    assert_int_equal(actions[0].kind, TD_ACT_CANCEL_PREFILL);
    assert_int_equal(actions[1].kind, TD_ACT_CANCEL_DECODE);
    assert_int_equal(leg(c, TD_EV_TOKEN, 6, 0, 1, 0, 42), 0); /* attempt 0 speaks of the past */
    assert_int_equal(leg(c, TD_EV_DECODE_END, 6, 0, 1, 0, 14), 0);
    assert_int_equal(arrive(c, 7, 1, 2, 10), 0);
    assert_int_equal(join(c, 8, 2, TD_ROLE_DECODE), 2); /* both placed, in arrival order */
    assert_int_equal(actions[0].request_at, 0);
    assert_int_equal(actions[0].attempt, 1);
    assert_int_equal(actions[1].request_at, 1);
    assert_int_equal(td_core_failovers(c, 0), 1);
    td_core_destroy(c);
}

static void test_prefill_death_after_handover_is_harmless(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    arrive(c, 2, 0, 1, 40);
    leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
    leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 0, 0);
    leg(c, TD_EV_TOKEN, 5, 0, 1, 0, 42);
    assert_int_equal(
        step(c,
             (struct td_core_event){.kind = TD_EV_WORKER_GONE, .now_ns = 6, .gone = {.worker = 0}}),
        1);
    assert_int_equal(actions[0].kind, TD_ACT_CANCEL_PREFILL);
    assert_int_equal(leg(c, TD_EV_PREFILL_END, 6, 0, 1, 0, 14), 0);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 7, 0, 1, 0, 0), 1);
    assert_int_equal(actions[0].kind, TD_ACT_COMPLETE);
    td_core_destroy(c);
}

static uint32_t calls_unseen(const struct td_core *c, uint32_t worker)
{
    struct td_core_worker_view v;
    td_core_worker_view(c, worker, &v);
    return v.calls_unseen;
}

static void snapshot(struct td_core *c, uint32_t worker, uint64_t seq, uint64_t calls_taken)
{
    step(c, (struct td_core_event){
                .kind = TD_EV_WORKER_SNAPSHOT,
                .now_ns = 10,
                .snapshot = {.worker = worker, .seq = seq, .calls_taken = calls_taken}});
}

/* What a worker's snapshot says is of the time before a call that it has not taken, also when
 * the request has ended. */
static void test_calls_that_no_snapshot_has_seen(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    snapshot(c, 0, 1, 0);
    snapshot(c, 1, 1, 0);
    arrive(c, 2, 0, 1, 40);
    assert_int_equal(calls_unseen(c, 0), 0); /* prefill is not asked before decode has room */
    assert_int_equal(calls_unseen(c, 1), 1);
    leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
    assert_int_equal(calls_unseen(c, 0), 1);
    snapshot(c, 0, 2, 0); /* it was made before the call came */
    assert_int_equal(calls_unseen(c, 0), 1);
    snapshot(c, 0, 3, 1);
    assert_int_equal(calls_unseen(c, 0), 0);
    leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 0, 0);
    leg(c, TD_EV_PREFILL_END, 5, 0, 1, 0, 0);
    leg(c, TD_EV_TOKEN, 5, 0, 1, 0, 42);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 6, 0, 1, 0, 0), 1);
    assert_int_equal(actions[0].kind, TD_ACT_COMPLETE);
    assert_int_equal(calls_unseen(c, 1), 1); /* over, and its worker has told nothing since it
                                                began */
    snapshot(c, 1, 2, 1);
    assert_int_equal(calls_unseen(c, 1), 0);
    td_core_destroy(c);
}

static void test_statuses(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    /* a request that a worker refuses gets one second opinion, then the client is told */
    arrive(c, 2, 0, 1, 40);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 3, 0, 1, 0, 3), 0);
    assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                                    .now_ns = 3,
                                                    .snapshot = {.worker = 1, .seq = 1}}),
                     1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 3, 0, 1, 1, 3), 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL);
    assert_int_equal(actions[0].fail.code, 3);
    /* a full worker is not asked again before its next snapshot, and nobody's failovers are used
       up */
    arrive(c, 4, 0, 2, 40);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 5, 0, 2, 0, 8), 0);
    assert_int_equal(td_core_failovers(c, 0), 0);
    assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                                    .now_ns = 6,
                                                    .snapshot = {.worker = 1, .seq = 2}}),
                     1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    assert_int_equal(actions[0].attempt, 1);
    /* failovers are bounded */
    for (uint32_t i = 0; i < 3; i++) {
        /* the failed worker is shunned ... */
        assert_int_equal(leg(c, TD_EV_DECODE_END, 7 + i, 0, 2, 1 + i, 14), 0);
        /* ... until it speaks */
        assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                                        .now_ns = 7 + i,
                                                        .snapshot = {.worker = 1, .seq = 3 + i}}),
                         1);
        assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    }
    assert_int_equal(leg(c, TD_EV_DECODE_END, 20, 0, 2, 4, 14), 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL);
    assert_int_equal(actions[0].fail.code, 14);
    td_core_destroy(c);
}

static void test_silence_and_time(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join(c, 0, 0, TD_ROLE_PREFILL);
    join(c, 0, 1, TD_ROLE_DECODE);
    join(c, 0, 2, TD_ROLE_DECODE);
    arrive(c, 1, 0, 1, 40);
    uint32_t first = actions[0].start.worker, other = 3 - first;
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = 900 * MS,
                                   .snapshot = {.worker = 0, .seq = 1}});
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = 900 * MS,
                                   .snapshot = {.worker = other, .seq = 1}});
    /* `first` has been silent for 1001 ms */
    assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 1001 * MS}), 2);
    assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
    assert_int_equal(actions[1].kind, TD_ACT_START_DECODE);
    assert_int_equal(actions[1].start.worker, other);
    struct td_core_worker_view v;
    td_core_worker_view(c, first, &v);
    assert_int_equal(v.state, TD_WORKER_SUSPECT);
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = 1100 * MS,
                                   .snapshot = {.worker = first, .seq = 1}});
    td_core_worker_view(c, first, &v);
    assert_int_equal(v.state, TD_WORKER_READY);
    td_core_destroy(c);

    /* nobody ever comes: UNAVAILABLE after the queue time, not before */
    c = core_of(TD_MODE_PD, "least_token");
    arrive(c, 0, 0, 1, 40);
    assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 5000 * MS}), 0);
    assert_int_equal(step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 5001 * MS}), 1);
    assert_int_equal(actions[0].fail.code, 14);
    /* the queue is bounded */
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(arrive(c, 6000 * MS, i, 10 + i, 1), 0);
    assert_int_equal(arrive(c, 6000 * MS, 40, 50, 1), 1);
    assert_int_equal(actions[0].fail.code, 8);
    assert_int_equal(actions[0].fail.retry_ms, 1000);
    td_core_destroy(c);
}

/* The router itself did not run: nobody's silence of that time counts, but a client's wait does;
 * and who stays silent after it is lost as ever. */
static void test_a_pause_of_the_router_blames_nobody(void **state)
{
    (void)state;
    for (int paused = 0; paused < 2; paused++) {
        struct td_core *c = core_of(TD_MODE_PD, "least_token");
        join(c, 1, 0, TD_ROLE_PREFILL);
        join(c, 2, 1, TD_ROLE_DECODE);
        arrive(c, 3, 0, 1, 10);
        leg(c, TD_EV_TICKET, 4, 0, 1, 0, 0);
        uint64_t back = 60000 * MS;
        size_t n = step(c, (struct td_core_event){.kind = TD_EV_TICK,
                                                  .now_ns = back,
                                                  .tick = {.late_ms = paused ? 60000 : 0}});
        if (paused)
            assert_int_equal(n, 0);
        else
            assert_true(n > 0); /* the same without a word on it: everybody is lost */
        struct td_core_worker_view v;
        for (uint32_t w = 0; w < 2; w++) {
            td_core_worker_view(c, w, &v);
            assert_int_equal(v.state, paused ? TD_WORKER_READY : TD_WORKER_SUSPECT);
        }
        /* more than there is time: as much as there is */
        step(c, (struct td_core_event){.kind = TD_EV_TICK,
                                       .now_ns = back + 999 * MS,
                                       .tick = {.late_ms = UINT64_MAX}});
        td_core_worker_view(c, 0, &v);
        assert_int_equal(v.state, paused ? TD_WORKER_READY : TD_WORKER_SUSPECT);
        step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = back + 2000 * MS});
        td_core_worker_view(c, 0, &v);
        assert_int_equal(v.state, TD_WORKER_SUSPECT);
        td_core_destroy(c);
    }
}

static void test_modes(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "round_robin");
    join(c, 0, 0, TD_ROLE_DECODE);
    join(c, 0, 1, TD_ROLE_DECODE);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(arrive(c, 1, i, i + 1, 50), 1);
        assert_true(actions[0].start.local);
        assert_int_equal(actions[0].start.worker, i % 2);
    }
    td_core_destroy(c);
    c = core_of(TD_MODE_HYBRID, "least_token");
    join(c, 0, 0, TD_ROLE_DECODE);
    join(c, 0, 1, TD_ROLE_PREFILL);
    arrive(c, 1, 0, 1, 9);
    assert_true(actions[0].start.local);
    arrive(c, 1, 1, 2, 10);
    assert_false(actions[0].start.local);
    td_core_destroy(c);
    struct td_core_config bad = {.policy = "best", .max_requests = 1};
    struct td_err err;
    assert_int_equal(td_core_create(&bad, &c, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "policy is \"best\", must be one of " TD_CORE_POLICIES);
    bad.policies = td_sim_policies;
    assert_int_equal(td_core_create(&bad, &c, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "policy is \"best\", must be one of "
                                 "goodput|round_robin|least_request|least_token|power_of_two|cache_"
                                 "aware|lmetric|kv_cost|conductor");
}

/* The client has its last token; the worker dies before it could say OK. A new attempt would
 * have nothing to compute: the request is complete. */
static void test_loss_after_the_last_token(void **state)
{
    (void)state;
    enum { GONE, CODE, SILENT, STALL, N };
    for (int how = 0; how < N; how++) {
        struct td_core *c = core_of(TD_MODE_PD, "least_token");
        join(c, 1, 0, TD_ROLE_PREFILL);
        join(c, 1, 1, TD_ROLE_DECODE);
        join(c, 1, 2, TD_ROLE_DECODE);
        arrive(c, 2, 0, 1, 40);
        uint32_t worker = actions[0].start.worker;
        leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
        leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 0, 0);
        step(c, (struct td_core_event){
                    .kind = TD_EV_TOKEN,
                    .now_ns = 5,
                    .token = {.of = {.request_at = 0, .id = 1}, .n_tokens = 56, .last = 1}});
        size_t n = 0;
        if (how == GONE)
            n = step(c, (struct td_core_event){
                            .kind = TD_EV_WORKER_GONE, .now_ns = 6, .gone = {.worker = worker}});
        if (how == CODE) n = leg(c, TD_EV_DECODE_END, 6, 0, 1, 0, 14);
        if (how == SILENT)
            n = step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 1500 * MS});
        if (how == STALL) {
            for (uint32_t w = 0; w < 3; w++)
                step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                               .now_ns = 20500 * MS,
                                               .snapshot = {.worker = w, .seq = 1}});
            n = step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 20500 * MS});
        }
        assert_true(n >= 1);
        assert_int_equal(actions[n - 1].kind, TD_ACT_COMPLETE);
        for (size_t i = 0; i < n; i++) assert_int_not_equal(actions[i].kind, TD_ACT_START_DECODE);
        struct td_core_stats st;
        td_core_stats(c, &st);
        assert_int_equal(st.live, 0);
        assert_int_equal(st.failovers, 0);
        td_core_destroy(c);
    }
}

/* ---- one token ------------------------------------------------------------------------------- */

static size_t join_new(struct td_core *c, uint64_t now, uint32_t worker, enum td_core_role role)
{
    bool one_token = role == TD_ROLE_PREFILL;
    struct td_core_event e = {.kind = TD_EV_WORKER_JOIN,
                              .now_ns = now,
                              .join = {.worker = worker,
                                       .role = role,
                                       .kv_tokens = 10000,
                                       .max_seqs = 8,
                                       .one_token = one_token}};
    return step(c, e);
}
static size_t ask(struct td_core *c, uint64_t now, uint32_t request_at, uint64_t id,
                  uint64_t max_tokens)
{
    return step(c, (struct td_core_event){.kind = TD_EV_REQUEST,
                                          .now_ns = now,
                                          .request = {.request_at = request_at,
                                                      .id = id,
                                                      .n_prompt = 40,
                                                      .max_tokens = max_tokens}});
}

static void expect_account(const struct td_core *c, uint32_t worker, uint32_t n)
{
    struct td_core_worker_view v;
    td_core_worker_view(c, worker, &v);
    assert_int_equal(v.assigned, n);
    if (n == 0) assert_int_equal(v.assigned_tokens, 0);
}

/* One token and no more: a prefill worker alone makes it, with every policy, whether or not
 * there is a decode worker, or room on one. */
static void test_one_token_needs_no_decode_worker(void **state)
{
    (void)state;
    char names[] = TD_SIM_POLICIES, *rest = names;
    for (char *policy; (policy = strsep(&rest, "|"));) {
        for (int n_decode = 0; n_decode < 2; n_decode++) {
            struct td_core *c = core_of(TD_MODE_PD, policy);
            join_new(c, 1, 0, TD_ROLE_PREFILL);
            if (n_decode) join_new(c, 1, 1, TD_ROLE_DECODE);
            for (uint32_t i = 0; n_decode && i < 8; i++) { /* it is full now */
                assert_int_equal(ask(c, 2, 10 + i, 100 + i, 16), 1);
                leg(c, TD_EV_TICKET, 2, 10 + i, 100 + i, 0, 0);
                leg(c, TD_EV_FIRST_TOKEN, 2, 10 + i, 100 + i, 0, 0);
                leg(c, TD_EV_PREFILL_END, 2, 10 + i, 100 + i, 0, 0);
            }
            assert_int_equal(ask(c, 3, 0, 1, 1), 1);
            assert_int_equal(actions[0].kind, TD_ACT_START_PREFILL);
            assert_int_equal(actions[0].start.worker, 0);
            assert_true(actions[0].start.local);
            expect_account(c, 0, 1);
            if (n_decode) expect_account(c, 1, 8);
            /* nobody's: nothing comes of it */
            assert_int_equal(leg(c, TD_EV_TICKET, 4, 0, 1, 0, 0), 0);
            assert_int_equal(leg(c, TD_EV_FIRST_TOKEN, 5, 0, 1, 0, 1), 1);
            assert_int_equal(actions[0].kind, TD_ACT_COMPLETE);
            expect_account(c, 0, 0);
            td_core_destroy(c);
        }
    }
}

/* The prefill worker dies, or says nothing of use: the request goes to another, still without a
 * decode leg. */
static void test_one_token_fails_over(void **state)
{
    (void)state;
    enum { GONE, CODE, NO_TOKEN, NOT_THE_LAST, N };
    for (int how = 0; how < N; how++) {
        struct td_core *c = core_of(TD_MODE_PD, "round_robin");
        join_new(c, 1, 0, TD_ROLE_PREFILL);
        join_new(c, 1, 1, TD_ROLE_PREFILL);
        assert_int_equal(ask(c, 2, 0, 1, 1), 1);
        assert_int_equal(actions[0].start.worker, 0);
        size_t n = 0;
        if (how == GONE)
            n = step(c, (struct td_core_event){
                            .kind = TD_EV_WORKER_GONE, .now_ns = 3, .gone = {.worker = 0}});
        if (how == CODE) n = leg(c, TD_EV_PREFILL_END, 3, 0, 1, 0, 14);
        /* a worker that is mistaken */
        if (how == NOT_THE_LAST) assert_int_equal(leg(c, TD_EV_FIRST_TOKEN, 3, 0, 1, 0, 0), 0);
        if (how == NO_TOKEN || how == NOT_THE_LAST) n = leg(c, TD_EV_PREFILL_END, 3, 0, 1, 0, 0);
        assert_true(n >= 1);
        assert_int_equal(actions[n - 1].kind, TD_ACT_START_PREFILL);
        assert_int_equal(actions[n - 1].start.worker, 1);
        assert_int_equal(actions[n - 1].attempt, 1);
        assert_true(actions[n - 1].start.local);
        assert_int_equal(td_core_failovers(c, 0), 1);
        assert_int_equal(leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 1, 1), 1);
        assert_int_equal(actions[0].kind, TD_ACT_COMPLETE);
        expect_account(c, 1, 0);
        td_core_destroy(c);
    }
}

/* The last token but one is known and the pair is lost: what is left is one token, too. A fleet
 * with an older prefill worker goes the long way. */
static void test_one_token_left_and_older_workers(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join_new(c, 1, 0, TD_ROLE_PREFILL);
    join_new(c, 1, 1, TD_ROLE_DECODE);
    assert_int_equal(ask(c, 2, 0, 1, 2), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
    step(c,
         (struct td_core_event){.kind = TD_EV_FIRST_TOKEN,
                                .now_ns = 4,
                                .first_token = {.of = {.request_at = 0, .id = 1}, .n_tokens = 41}});
    size_t n = step(
        c, (struct td_core_event){.kind = TD_EV_WORKER_GONE, .now_ns = 5, .gone = {.worker = 1}});
    assert_int_equal(n, 3);
    assert_int_equal(actions[2].kind, TD_ACT_START_PREFILL);
    assert_true(actions[2].start.local);
    td_core_destroy(c);

    c = core_of(TD_MODE_PD, "least_token");
    join_new(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 2, TD_ROLE_PREFILL); /* does not know how */
    join_new(c, 1, 1, TD_ROLE_DECODE);
    assert_int_equal(ask(c, 2, 0, 1, 1), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    td_core_destroy(c);

    c = core_of(TD_MODE_COLOCATED, "least_token"); /* no prefill worker is asked there */
    join_new(c, 1, 1, TD_ROLE_DECODE);
    assert_int_equal(ask(c, 2, 0, 1, 1), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    assert_true(actions[0].start.local);
    td_core_destroy(c);
}

static size_t sender_finished(struct td_core *c, uint64_t now)
{
    return step(
        c, (struct td_core_event){
               .kind = TD_EV_DECODE_END,
               .now_ns = now,
               .decode_end = {.of = {.request_at = 0, .id = 1}, .code = 14, .sender_finished = 1}});
}

/* "The sender has finished the request" comes before its first token: that is waited for, and no
 * worker is blamed. The wait ends with the token, with the prefill leg's end, with the death of
 * its worker, or after 5 s. */
static void test_sender_finished_overtakes_the_token(void **state)
{
    (void)state;
    enum { TOKEN, TOKEN_FIRST, END, GONE, NEVER, CANCEL, N };
    for (int how = 0; how < N; how++) {
        struct td_core *c = core_of(TD_MODE_PD, "least_token");
        join_new(c, 0, 0, TD_ROLE_PREFILL);
        join_new(c, 0, 1, TD_ROLE_DECODE);
        ask(c, 1, 0, 1, 16);
        leg(c, TD_EV_TICKET, 2, 0, 1, 0, 0);
        size_t n = 0;
        if (how == TOKEN_FIRST) {
            n = leg(c, TD_EV_FIRST_TOKEN, 3, 0, 1, 0, 1);
            assert_int_equal(sender_finished(c, 4), 0);
            actions[0] = (struct td_core_action){.kind = TD_ACT_COMPLETE};
            n = 1;
        } else {
            assert_int_equal(sender_finished(c, 3), 0);
            expect_account(c, 0, 1);
            expect_account(c, 1, 0); /* its place is free at once */
            assert_int_equal(leg(c, TD_EV_TOKEN, 3, 0, 1, 0, 42), 0); /* of a leg that has ended */
        }
        if (how == TOKEN) n = leg(c, TD_EV_FIRST_TOKEN, 4, 0, 1, 0, 1);
        if (how == END) n = leg(c, TD_EV_PREFILL_END, 4, 0, 1, 0, 13);
        if (how == GONE)
            n = step(c, (struct td_core_event){
                            .kind = TD_EV_WORKER_GONE, .now_ns = 4, .gone = {.worker = 0}});
        if (how == NEVER)
            for (uint64_t ms = 500; n == 0 && ms <= 6000; ms += 500) {
                for (uint32_t w = 0; w < 2; w++)
                    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                                   .now_ns = ms * MS,
                                                   .snapshot = {.worker = w, .seq = ms}});
                n = step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = ms * MS});
                if (n == 0) assert_true(ms <= 5000);
            }
        if (how == CANCEL)
            n = step(c, (struct td_core_event){.kind = TD_EV_CANCEL,
                                               .now_ns = 4,
                                               .cancel = {.request_at = 0, .id = 1}});
        if (how == END)
            assert_int_equal(n, 0); /* its worker is shunned: the new attempt waits
                                       for the next snapshot */
        else
            assert_true(n >= 1);
        struct td_core_stats st;
        td_core_stats(c, &st);
        bool fails_over = how == END || how == GONE || how == NEVER;
        assert_int_equal(st.failovers, fails_over);
        if (how == TOKEN || how == TOKEN_FIRST)
            assert_int_equal(actions[n - 1].kind, TD_ACT_COMPLETE);
        /* a new attempt, with both legs */
        if (how == NEVER) assert_int_equal(actions[n - 1].kind, TD_ACT_START_DECODE);
        if (how == GONE || how == NEVER || how == CANCEL)
            assert_int_equal(actions[0].kind, TD_ACT_CANCEL_PREFILL);
        assert_int_equal(st.live, fails_over);
        expect_account(c, 1, how == NEVER);
        td_core_destroy(c);
    }
}

/* Said when it cannot be so (a token was seen, the leg had no sender, it ended well), it is a
 * failure like any other. */
static void test_sender_finished_is_not_believed_blindly(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join_new(c, 0, 0, TD_ROLE_PREFILL);
    join_new(c, 0, 1, TD_ROLE_DECODE);
    ask(c, 1, 0, 1, 16);
    leg(c, TD_EV_TICKET, 2, 0, 1, 0, 0);
    leg(c, TD_EV_FIRST_TOKEN, 3, 0, 1, 0, 0);
    sender_finished(c, 4);
    assert_int_equal(td_core_failovers(c, 0), 1);
    td_core_destroy(c);
    c = core_of(TD_MODE_PD, "least_token"); /* before the prefill worker was told anything */
    join_new(c, 0, 0, TD_ROLE_PREFILL);
    join_new(c, 0, 1, TD_ROLE_DECODE);
    ask(c, 1, 0, 1, 16);
    sender_finished(c, 4);
    assert_int_equal(td_core_failovers(c, 0), 1);
    expect_account(c, 0, 0);
    td_core_destroy(c);
}

/* A log from before workers said that they answer alone (f of their join): the same actions
 * come, to the character. */
static void test_older_log_replays(void **state)
{
    (void)state;
    static const char *const log[] = {
        ("c version=3 mode=0 policy=least_token max_requests=64 max_queued=32 "
         "hybrid_local_tokens=10 "
         "worker_timeout_ms=1000 queue_timeout_ms=5000 stall_ms=20000 max_failovers=3 "
         "max_prefix_entries=0 "
         "attainment=0x0p+0 seed=0 classes=0 thetas=0\n"),
        "e kind=2 now=1 worker=0 slot=0 attempt=0 role=0 priority=0 id=0 a=10000 b=8 c=0 d=0 e=0 "
        "f=0 weight=1 hashes=0 hash_tokens=0\n",
        "e kind=2 now=1 worker=1 slot=0 attempt=0 role=1 priority=0 id=0 a=10000 b=8 c=0 d=0 e=0 "
        "f=0 weight=1 hashes=0 hash_tokens=0\n",
        "e kind=10 now=2 worker=0 slot=0 attempt=0 role=0 priority=0 id=1 a=40 b=1 c=0 d=0 e=0 f=0 "
        "weight=1 hashes=0 hash_tokens=0\n",
        "a kind=1 slot=0 id=1 attempt=0 worker=1 local=0 code=0 retry_ms=0 ",
        "e kind=11 now=3 worker=0 slot=0 attempt=0 role=0 priority=0 id=1 a=0 b=0 c=0 d=0 e=0 f=0 "
        "weight=1 hashes=0 hash_tokens=0\n",
        "a kind=2 slot=0 id=1 attempt=0 worker=0 local=0 code=0 retry_ms=0 ",
        "e kind=15 now=4 worker=0 slot=0 attempt=0 role=0 priority=0 id=1 a=14 b=0 c=0 d=0 e=0 f=0 "
        "weight=1 hashes=0 hash_tokens=0\n",
        "a kind=4 slot=0 id=1 attempt=0 worker=0 local=0 code=0 retry_ms=0 "};
    struct td_core_reader reader = {0};
    struct td_core *c = NULL;
    struct td_err err;
    size_t n = 0, at = 0;
    for (size_t i = 0; i < sizeof log / sizeof *log; i++) {
        enum td_core_read what;
        char ours[TD_CORE_LINE_MAX];
        assert_int_equal(td_core_read_line(&reader, log[i], &what, &err), TD_OK);
        if (what == TD_READ_CONFIG)
            assert_int_equal(td_core_create(&reader.config, &c, &err), TD_OK);
        if (what == TD_READ_EVENT) {
            assert_int_equal(at, n);
            n = td_core_step(c, &reader.event, actions);
            at = 0;
        }
        if (what != TD_READ_ACTION) continue;
        assert_true(at < n);
        td_core_action_format(&actions[at++], ours, sizeof ours);
        assert_memory_equal(ours, log[i], strlen(log[i]));
    }
    assert_int_equal(at, n);
    td_core_destroy(c);
}

/* The client's own deadline ended the leg: the worker is not shunned for it, nothing is tried
 * again. */
static void test_deadline_blames_nobody(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "least_token");
    join(c, 1, 0, TD_ROLE_DECODE);
    arrive(c, 2, 0, 1, 40);
    assert_int_equal(leg(c, TD_EV_DECODE_END, 3, 0, 1, 0, 4), 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL);
    assert_int_equal(actions[0].fail.code, 4);
    assert_int_equal(arrive(c, 4, 0, 2, 40), 1); /* placed at once */
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    td_core_destroy(c);
}

static void test_prefill_that_says_nothing(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_PD, "least_token");
    join(c, 1, 0, TD_ROLE_PREFILL);
    join(c, 1, 1, TD_ROLE_DECODE);
    arrive(c, 2, 0, 1, 40);
    leg(c, TD_EV_TICKET, 3, 0, 1, 0, 0);
    /* OK, but no first token: a failed attempt, not a delivery */
    assert_int_equal(leg(c, TD_EV_PREFILL_END, 4, 0, 1, 0, 0), 1);
    assert_int_equal(actions[0].kind, TD_ACT_CANCEL_DECODE);
    assert_int_equal(td_core_failovers(c, 0), 1);
    td_core_destroy(c);
}

static void test_draining_survives_suspicion(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "least_token");
    join(c, 0, 0, TD_ROLE_DECODE);
    step(c,
         (struct td_core_event){.kind = TD_EV_WORKER_DRAIN, .now_ns = 1, .drain = {.worker = 0}});
    step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 1500 * MS});
    step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = 1600 * MS,
                                   .snapshot = {.worker = 0, .seq = 1}});
    struct td_core_worker_view v;
    td_core_worker_view(c, 0, &v);
    assert_int_equal(v.state, TD_WORKER_DRAINING);
    assert_int_equal(arrive(c, 1601 * MS, 0, 1, 5), 0);
    td_core_destroy(c);
}

/* Waiting is bounded for everybody: for one that workers send back again and again, and for one
 * behind a newcomer at the queue's head. */
static void test_every_wait_ends(void **state)
{
    (void)state;
    struct td_core *c = core_of(TD_MODE_COLOCATED, "least_token");
    join(c, 0, 0, TD_ROLE_DECODE);
    assert_int_equal(arrive(c, 0, 0, 1, 40), 1);
    size_t n = 0;
    uint64_t now = 0;
    for (uint32_t i = 0; i < 40 && n == 0; i++) { /* full, 200 ms later again, ... */
        assert_int_equal(leg(c, TD_EV_DECODE_END, now, 0, 1, i, 8), 0);
        now += 200 * MS;
        n = step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = now});
        if (n == 0)
            assert_int_equal(
                step(c, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                               .now_ns = now,
                                               .snapshot = {.worker = 0, .seq = i + 1}}),
                1);
    }
    assert_int_equal(n, 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL);
    assert_int_equal(actions[0].fail.code, 8);
    assert_true(now <= 5400 * MS);
    td_core_destroy(c);

    c = core_of(TD_MODE_COLOCATED, "least_token");
    join(c, 0, 0, TD_ROLE_DECODE);
    assert_int_equal(arrive(c, 0, 0, 1, 40), 1);
    step(c,
         (struct td_core_event){.kind = TD_EV_WORKER_DRAIN, .now_ns = 1, .drain = {.worker = 0}});
    assert_int_equal(arrive(c, 2, 1, 2, 40), 0);
    /* 1 goes to the head, and its clock starts anew */
    step(c, (struct td_core_event){
                .kind = TD_EV_WORKER_GONE, .now_ns = 4000 * MS, .gone = {.worker = 0}});
    n = step(c, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = 5100 * MS});
    assert_int_equal(n, 1);
    assert_int_equal(actions[0].id, 2);
    td_core_destroy(c);
}

static void test_no_queue_still_serves(void **state)
{
    (void)state;
    struct td_core_config cfg = {.mode = TD_MODE_COLOCATED,
                                 .policy = "least_token",
                                 .max_requests = 4,
                                 .max_queued = 0,
                                 .worker_timeout_ms = 1000,
                                 .queue_timeout_ms = 5000,
                                 .stall_ms = 20000,
                                 .max_failovers = 3};
    struct td_core *c = NULL;
    struct td_err err;
    assert_int_equal(td_core_create(&cfg, &c, &err), TD_OK);
    assert_int_equal(arrive(c, 0, 0, 1, 40), 1);
    assert_int_equal(actions[0].kind, TD_ACT_FAIL); /* nobody there, and nobody may wait */
    join(c, 0, 0, TD_ROLE_DECODE);
    assert_int_equal(arrive(c, 1, 0, 2, 40), 1);
    assert_int_equal(actions[0].kind, TD_ACT_START_DECODE);
    td_core_destroy(c);
}

/* ---- random play ----------------------------------------------------------------------------- */

enum { SLOTS = 64, WORKERS = 6, EVENTS = 30000 };
struct model_request {
    bool live;
    uint64_t id;
    uint32_t attempt, stage;
    bool decode_open, prefill_open;
    uint64_t tokens;
};

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

static void apply(struct model_request *q, const struct td_core_action *a)
{
    assert_true(q->live && q->id == a->id);
    switch (a->kind) {
    case TD_ACT_START_DECODE:
        assert_false(q->decode_open || q->prefill_open); /* (3) */
        q->decode_open = true;
        q->attempt = a->attempt;
        q->stage = a->start.local ? 3 : 1;
        break;
    case TD_ACT_START_PREFILL:
        assert_false(q->prefill_open);
        if (a->start.local)
            assert_false(q->decode_open);
        else
            assert_true(q->decode_open && q->stage == 1 && q->attempt == a->attempt);
        q->attempt = a->attempt;
        q->prefill_open = true;
        q->stage = 2;
        break;
    case TD_ACT_CANCEL_DECODE:
        assert_true(q->decode_open);
        q->decode_open = false;
        break;
    case TD_ACT_CANCEL_PREFILL:
        assert_true(q->prefill_open);
        q->prefill_open = false;
        break;
    case TD_ACT_COMPLETE:
    case TD_ACT_FAIL:
        q->live = false;
        break; /* a second end would find it dead (1) */
    }
}

static uint32_t n_policies(const struct td_policy *table)
{
    uint32_t n = 0;
    while (table[n].name) n++;
    return n;
}

/* With no request live every number of every account is back where it began, whatever came
 * before. */
static void expect_empty_accounts(const struct td_core *c)
{
    for (uint32_t w = 0; w < WORKERS; w++) {
        struct td_core_account a;
        td_core_account(c, w, &a);
        if (a.assigned || a.n_pending || a.n_active || a.n_min_tpot || a.assigned_tokens ||
            a.promised_tokens || a.pending_tokens || a.active_tokens || a.reserved_tokens ||
            a.local_tokens || a.kept || a.pending_s > 0 || a.pending_s < 0 ||
            (a.min_tpot_s > 0 && a.min_tpot_s < 1e300))
            fail_msg("worker %u: %u assigned, %u pending, %u active, %u with the tightest "
                     "objective; tokens %llu assigned, %llu promised, %llu "
                     "pending, %llu active, "
                     "%llu reserved, %llu local; %g s pending",
                     w, a.assigned, a.n_pending, a.n_active, a.n_min_tpot,
                     (unsigned long long)a.assigned_tokens, (unsigned long long)a.promised_tokens,
                     (unsigned long long)a.pending_tokens, (unsigned long long)a.active_tokens,
                     (unsigned long long)a.reserved_tokens, (unsigned long long)a.local_tokens,
                     a.pending_s);
    }
}

enum { SWEEP = 1500 }; /* every so many events all clients leave */

/* One random play: the core, what the test knows of its requests and workers, and the log of all
 * that was said. */
struct play {
    struct td_core *core;
    struct model_request q[SLOTS];
    bool joined[WORKERS];
    uint64_t seed, now, next_id, snap_seq, ended, started;
    char *log;
    size_t log_bytes, log_room;
};

static struct td_core_config play_config(uint64_t seed, enum td_core_mode mode, const char *policy)
{
    return (struct td_core_config){.mode = mode,
                                   .policy = policy,
                                   .policies = td_sim_policies,
                                   .max_requests = SLOTS,
                                   .max_queued = 40,
                                   .hybrid_local_tokens = 50,
                                   .worker_timeout_ms = 300,
                                   .queue_timeout_ms = 2000,
                                   .stall_ms = 1500,
                                   .max_failovers = 4,
                                   .max_prefix_entries = 256,
                                   .attainment = 0.9,
                                   .seed = seed,
                                   .classes = {{"default", 0, 0, 1, false},
                                               {"gold", 40, 5, 4, false},
                                               {"bulk", 400, 50, 0.5, true}},
                                   .n_classes = 3,
                                   .thetas = {{.prefill = {1e-3, 1e-4, 1e-9},
                                               .decode = {1e-3, 1e-4, 1e-7, 1e-4, 0},
                                               .link_tau = 1e-4,
                                               .link_bytes_per_s = 1e9,
                                               .known = true}},
                                   .n_thetas = (uint32_t)(seed % 2)};
}

static char *log_end(struct play *p) { return p->log + p->log_bytes; }

static void logged(struct play *p, int n_bytes)
{
    assert_true(n_bytes > 0 && n_bytes < TD_CORE_LINE_MAX);
    p->log_bytes += (size_t)n_bytes;
}

/* What workers report of a step: true or absurd. */
static struct td_core_event random_step(uint64_t now)
{
    return (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                  .now_ns = now,
                                  .step = {.worker = rnd(WORKERS + 1),
                                           .prefill_tokens = rnd(500),
                                           .attention_work = rnd(5000),
                                           .decode_seqs = rnd(20),
                                           .context_tokens = rnd(5000),
                                           .wall_us = rnd(20) ? rnd(20000) : UINT64_MAX}};
}

static struct td_core_event random_block(uint64_t now)
{
    struct td_core_event e = {.now_ns = now};
    e.kind = rnd(30) ? (rnd(3) ? TD_EV_BLOCK_ADD : TD_EV_BLOCK_EVICT) : TD_EV_BLOCKS_RESET;
    struct td_ev_block block = {.worker = rnd(WORKERS + 1), .hash = rnd(200)};
    if (e.kind == TD_EV_BLOCK_ADD)
        e.block_add = block;
    else if (e.kind == TD_EV_BLOCK_EVICT)
        e.block_evict = block;
    else
        e.blocks_reset.worker = block.worker;
    return e;
}

/* A worker joins, speaks, drains or goes. */
static struct td_core_event random_life(struct play *p, uint32_t w)
{
    struct td_core_event e = {.now_ns = p->now};
    e.kind = p->joined[w] ? (rnd(20)  ? (rnd(4) ? TD_EV_WORKER_SNAPSHOT : TD_EV_FOREIGN)
                             : rnd(2) ? TD_EV_WORKER_DRAIN
                                      : TD_EV_WORKER_GONE)
                          : TD_EV_WORKER_JOIN;
    if (e.kind == TD_EV_WORKER_JOIN)
        e.join = (struct td_ev_join){.worker = w,
                                     .role = w % 2 ? TD_ROLE_DECODE : TD_ROLE_PREFILL,
                                     .kv_tokens = 5000,
                                     .max_seqs = 6,
                                     /* of four fleets one has older workers */
                                     .one_token = p->seed % 4 ? true : w == 0};
    else if (e.kind == TD_EV_WORKER_SNAPSHOT)
        e.snapshot = (struct td_ev_snapshot){.worker = w, .seq = ++p->snap_seq, .held_tokens = 6};
    else if (e.kind == TD_EV_FOREIGN)
        e.foreign = (struct td_ev_foreign){.worker = w,
                                           .n_routers = rnd(30) ? rnd(4) : UINT64_MAX,
                                           .n_seqs = rnd(30) ? rnd(8) : UINT64_MAX,
                                           .n_running = rnd(30) ? rnd(8) : UINT64_MAX,
                                           .tokens = rnd(30) ? rnd(1000) : UINT64_MAX,
                                           .queued_tokens = rnd(30) ? rnd(500) : UINT64_MAX};
    else if (e.kind == TD_EV_WORKER_DRAIN)
        e.drain.worker = w;
    else
        e.gone.worker = w;
    p->joined[w] = e.kind != TD_EV_WORKER_GONE && (p->joined[w] || e.kind == TD_EV_WORKER_JOIN);
    return e;
}

static struct td_core_event random_request(struct play *p, uint32_t s)
{
    static uint64_t hashes[TD_CORE_MAX_HASHES];
    p->q[s] = (struct model_request){.live = true, .id = ++p->next_id, .tokens = 1 + rnd(100)};
    p->started++;
    struct td_core_event e = {.kind = TD_EV_REQUEST,
                              .now_ns = p->now,
                              .request = {.request_at = s,
                                          .id = p->next_id,
                                          .n_prompt = p->q[s].tokens,
                                          .max_tokens = rnd(4) ? 50 : 1,
                                          .slo_class = rnd(4),
                                          .tenant = rnd(5),
                                          .ttft_us = rnd(3) ? 0 : rnd(100000),
                                          .tpot_us = rnd(3) ? 0 : rnd(10000),
                                          .priority = (int32_t)rnd(5) - 2,
                                          .hashes = hashes,
                                          .n_hashes = rnd(60),
                                          .hash_tokens = 1 + rnd(2)}};
    for (uint32_t k = 0; k < e.request.n_hashes; k++) hashes[k] = k < 3 ? k : rnd(200);
    return e;
}

/* A real leg does not speak after its end, nor out of order. */
static bool can_speak(const struct model_request *q, enum td_core_event_kind kind)
{
    if (kind == TD_EV_TICKET && (!q->decode_open || q->stage != 1)) return false;
    if ((kind == TD_EV_TOKEN || kind == TD_EV_DECODE_END) && !q->decode_open) return false;
    if ((kind == TD_EV_FIRST_TOKEN || kind == TD_EV_PREFILL_END) && !q->prefill_open) return false;
    return !(kind == TD_EV_TOKEN && q->stage == 1);
}

/* A leg speaks: usually the current attempt, sometimes an old one. */
static bool random_leg(struct play *p, uint32_t s, struct td_core_event *ret_e)
{
    struct model_request *q = &p->q[s];
    struct td_attempt of = {.request_at = s};
    of.id = q->id - (rnd(30) == 0);
    of.attempt = q->attempt - (rnd(20) == 0);
    enum td_core_event_kind kind = (enum td_core_event_kind)(TD_EV_TICKET + rnd(5));
    bool current = q->live && of.id == q->id && of.attempt == q->attempt;
    if (current && !can_speak(q, kind)) return false;
    static const uint64_t codes[] = {0, 0, 14, 8, 13, 3, 1};
    uint64_t a = kind == TD_EV_PREFILL_END || kind == TD_EV_DECODE_END ? codes[rnd(7)]
                 : kind == TD_EV_FIRST_TOKEN                           ? rnd(8) == 0
                                                                       : q->tokens + rnd(3);
    uint64_t b = kind == TD_EV_TOKEN        ? rnd(10) == 0
                 : kind == TD_EV_DECODE_END ? rnd(3) == 0
                                            : q->tokens + 1;
    *ret_e = leg_event(kind, p->now, of, a, b);
    if (current && kind == TD_EV_DECODE_END) q->decode_open = false;
    if (current && kind == TD_EV_PREFILL_END) q->prefill_open = false;
    return true;
}

/* The play's event i; false when nothing happens. Every SWEEP events all clients leave. */
static bool random_event(struct play *p, int i, struct td_core_event *ret_e)
{
    uint32_t s = rnd(SLOTS), w = rnd(WORKERS), sort = rnd(18);
    if (i % SWEEP == 0 && i > 0) {
        assert_int_equal(p->started, p->ended);
        expect_empty_accounts(p->core);
    }
    if (i % SWEEP >= SWEEP - SLOTS) {
        s = (uint32_t)(i % SWEEP) - (SWEEP - SLOTS);
        *ret_e = (struct td_core_event){
            .kind = TD_EV_CANCEL, .now_ns = p->now, .cancel = {.request_at = s, .id = p->q[s].id}};
        return p->q[s].live;
    }
    switch (sort) {
    case 0:
        *ret_e = (struct td_core_event){.kind = TD_EV_TICK, .now_ns = p->now};
        return true;
    case 1:
        *ret_e = random_life(p, w);
        return true;
    case 2:
    case 3:
    case 4:
        if (p->q[s].live) return false;
        *ret_e = random_request(p, s);
        return true;
    case 5:
        if (!p->q[s].live || rnd(4)) return false;
        *ret_e = leg_event(rnd(2) ? TD_EV_CANCEL : TD_EV_STOP, p->now,
                           (struct td_attempt){.request_at = s, .id = p->q[s].id}, 0, 0);
        return true;
    case 16:
        *ret_e = random_step(p->now);
        return true;
    case 17:
        *ret_e = random_block(p->now);
        return true;
    default:
        return random_leg(p, s, ret_e);
    }
}

/* One step of the core, which goes into the log with what it decides. */
static void play_step(struct play *p, const struct td_core_event *e)
{
    size_t n = td_core_step(p->core, e, actions);
    assert_true(p->log_bytes + (n + 4) * TD_CORE_LINE_MAX < p->log_room);
    logged(p, td_core_event_format(e, log_end(p), TD_CORE_LINE_MAX));
    int bytes;
    for (uint32_t k = 0; (bytes = td_core_hashes_format(e, k, log_end(p), TD_CORE_LINE_MAX)) > 0;
         k++)
        logged(p, bytes);
    for (size_t k = 0; k < n; k++) {
        logged(p, td_core_action_format(&actions[k], log_end(p), TD_CORE_LINE_MAX));
        if (e->kind == TD_EV_CANCEL && e->cancel.request_at == actions[k].request_at &&
            actions[k].kind >= TD_ACT_COMPLETE)
            fail_msg("a cancelled request was answered");
        apply(&p->q[actions[k].request_at], &actions[k]);
        p->ended += actions[k].kind >= TD_ACT_COMPLETE;
    }
    if (e->kind == TD_EV_CANCEL && p->q[e->cancel.request_at].live) {
        p->q[e->cancel.request_at].live = false;
        p->ended++;
    }
}

static void check_play(const struct play *p, int i, const struct td_core_event *e)
{
    struct td_core_stats st;
    td_core_stats(p->core, &st);
    assert_int_equal(st.live, p->started - p->ended);
    for (uint32_t w = 0; w < WORKERS; w++) {
        struct td_core_account a;
        td_core_account(p->core, w, &a);
        if (a.stale)
            fail_msg("event %d of kind %d: what scans read of worker %u is not its account", i,
                     (int)e->kind, w);
    }
}

/* Time passes, nobody speaks: everything ends. */
static void play_out(struct play *p)
{
    for (int i = 0; i < 200; i++) {
        p->now += 100 * MS;
        struct td_core_event e = {.kind = TD_EV_TICK, .now_ns = p->now};
        size_t n = td_core_step(p->core, &e, actions);
        for (size_t k = 0; k < n; k++) {
            apply(&p->q[actions[k].request_at], &actions[k]);
            p->ended += actions[k].kind >= TD_ACT_COMPLETE;
        }
    }
    assert_int_equal(p->ended, p->started);
    assert_true(p->started > 1000);
    expect_empty_accounts(p->core); /* (2) */
}

/* The same events give the same actions, to the character. */
static void replay_log(const char *log, const char *end)
{
    static uint64_t read_hashes[TD_CORE_MAX_HASHES];
    struct td_core_reader reader = {.hashes = read_hashes};
    struct td_core *replay = NULL;
    struct td_err err;
    for (const char *p = log; p < end;) {
        enum td_core_read what;
        /* One line as a string of its own: sscanf first takes the length of all that follows. */
        char one[TD_CORE_LINE_MAX];
        size_t n_bytes = (size_t)(strchr(p, '\n') + 1 - p);
        assert_true(n_bytes < sizeof one);
        memcpy(one, p, n_bytes);
        one[n_bytes] = 0;
        assert_int_equal(td_core_read_line(&reader, one, &what, &err), TD_OK);
        if (*p == 'e') { /* what was read writes the same line */
            char line[TD_CORE_LINE_MAX];
            assert_memory_equal(p, line,
                                (size_t)td_core_event_format(&reader.event, line, sizeof line));
        }
        p += n_bytes;
        if (what == TD_READ_CONFIG) {
            reader.config.policies = td_sim_policies;
            assert_int_equal(td_core_create(&reader.config, &replay, &err), TD_OK);
        }
        if (what != TD_READ_EVENT) continue;
        size_t n = td_core_step(replay, &reader.event, actions);
        for (size_t k = 0; k < n; k++) {
            char line[TD_CORE_LINE_MAX];
            int bytes = td_core_action_format(&actions[k], line, sizeof line);
            assert_memory_equal(p, line, (size_t)bytes);
            p += bytes;
        }
        assert_true(p == end || *p == 'e');
    }
    td_core_destroy(replay);
}

static void random_play(uint64_t seed, enum td_core_mode mode, const char *policy)
{
    rng_state = seed;
    print_message("seed %llu mode %d policy %s\n", (unsigned long long)seed, (int)mode, policy);
    struct td_core_config cfg = play_config(seed, mode, policy);
    struct play *p = calloc(1, sizeof *p);
    struct td_err err;
    assert_non_null(p);
    p->seed = seed;
    assert_int_equal(td_core_create(&cfg, &p->core, &err), TD_OK);
    p->log_room = (size_t)EVENTS * 8 * TD_CORE_LINE_MAX / 4;
    p->log = malloc(p->log_room);
    assert_non_null(p->log);
    for (uint32_t i = 0; i < 1 + cfg.n_classes + cfg.n_thetas; i++)
        logged(p, td_core_config_format(&cfg, i, log_end(p), TD_CORE_LINE_MAX));
    for (int i = 0; i < EVENTS; i++) {
        struct td_core_event e;
        p->now += rnd(4) * MS;
        if (!random_event(p, i, &e)) continue;
        play_step(p, &e);
        check_play(p, i, &e);
    }
    play_out(p);
    replay_log(p->log, log_end(p));
    free(p->log);
    td_core_destroy(p->core);
    free(p);
}

static void test_random_play(void **state)
{
    (void)state;
    const char *env = getenv("SEED");
    uint64_t seed = env ? strtoull(env, NULL, 10) : 1;
    for (uint64_t i = 0; i < (getenv("TANDEM_TEST_SHORT") ? 1 : 2) * n_policies(td_sim_policies);
         i++)
        random_play(seed + i, (enum td_core_mode)(i % 3),
                    td_sim_policies[i % n_policies(td_sim_policies)].name);
}

/* The names that the options offer are the tables', and the simulator has all of the daemon's. */
static void test_policy_names(void **state)
{
    (void)state;
    char names[] = TD_CORE_POLICIES, all[] = TD_SIM_POLICIES, gone[] = TD_CORE_POLICIES_ELSEWHERE;
    char *rest = names;
    uint32_t n = 0;
    for (char *name; (name = strsep(&rest, "|")); n++) {
        assert_string_equal(name, td_policies[n].name);
        assert_ptr_equal(td_policy_find(td_sim_policies, name, NULL), td_policies[n].place);
    }
    assert_int_equal(n, n_policies(td_policies));
    rest = gone;
    for (char *name; (name = strsep(&rest, "|")); n++) {
        assert_null(td_policy_find(td_policies, name, NULL));
        assert_non_null(td_policy_find(td_sim_policies, name, NULL));
    }
    assert_int_equal(n, n_policies(td_sim_policies));
    rest = all;
    for (n = 0; rest; n++) assert_string_equal(strsep(&rest, "|"), td_sim_policies[n].name);
    assert_int_equal(n, n_policies(td_sim_policies));
}

#define REST " weight=0 hashes=0 hash_tokens=0\n"
static const char *const old_lines[TD_EV_N_KINDS] = {
    [TD_EV_TICK] = "e kind=1 now=24081260079883 worker=0 slot=0 attempt=0 role=0 priority=0 "
                   "id=0 a=10 b=350 c=0 d=0 e=0 f=0" REST,
    [TD_EV_WORKER_JOIN] = "e kind=2 now=5 worker=7 slot=0 attempt=0 role=1 priority=0 id=0 "
                          "a=846000 b=512 c=1 d=2048 e=131072 f=1" REST,
    [TD_EV_WORKER_SNAPSHOT] = "e kind=3 now=24372500000 worker=4 slot=0 attempt=0 role=0 "
                              "priority=0 id=0 a=1036 b=35664 c=9 d=1 e=18 f=0" REST,
    [TD_EV_WORKER_DRAIN] = "e kind=4 now=24082166184697 worker=3 slot=0 attempt=0 role=0 "
                           "priority=0 id=0 a=0 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_WORKER_GONE] = "e kind=5 now=24082166533955 worker=3 slot=0 attempt=0 role=0 "
                          "priority=0 id=0 a=0 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_WORKER_STEP] = "e kind=6 now=24372500000 worker=4 slot=0 attempt=0 role=0 "
                          "priority=0 id=0 a=11 b=66 c=1 d=35662 e=6028 f=0" REST,
    [TD_EV_BLOCK_ADD] = "e kind=7 now=24082126330907 worker=2 slot=0 attempt=0 role=0 "
                        "priority=0 id=0 a=12138145474076844387 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_BLOCK_EVICT] = "e kind=8 now=24082126330907 worker=2 slot=0 attempt=0 role=0 "
                          "priority=0 id=0 a=18446744073709551615 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_BLOCKS_RESET] = "e kind=9 now=24081719855672 worker=2 slot=0 attempt=0 role=0 "
                           "priority=0 id=0 a=0 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_REQUEST] = "e kind=10 now=19889202892 worker=0 slot=2 attempt=0 role=0 priority=-7 "
                      "id=80 a=954 b=48 c=1 d=77 e=400000 f=50000 weight=1500 hashes=2 "
                      "hash_tokens=16\n",
    [TD_EV_TICKET] = "e kind=11 now=24082121987092 worker=0 slot=6 attempt=2 role=0 priority=0 "
                     "id=12 a=208 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_FIRST_TOKEN] = "e kind=12 now=21122003370 worker=0 slot=1 attempt=1 role=0 "
                          "priority=0 id=79 a=1 b=35127 c=512 d=0 e=0 f=0" REST,
    [TD_EV_TOKEN] = "e kind=13 now=24373781653 worker=0 slot=1 attempt=1 role=0 priority=0 "
                    "id=79 a=35664 b=1 c=0 d=0 e=0 f=0" REST,
    [TD_EV_PREFILL_END] = "e kind=14 now=21141484941 worker=0 slot=1 attempt=3 role=0 "
                          "priority=0 id=79 a=14 b=4538236928 c=1329061 d=0 e=0 f=0" REST,
    [TD_EV_FOREIGN] = "e kind=18 now=24372500000 worker=4 slot=0 attempt=0 role=0 priority=0 "
                      "id=0 a=2 b=9 c=7 d=3100 e=512 f=0" REST,
    [TD_EV_DECODE_END] = "e kind=15 now=21141484941 worker=0 slot=1 attempt=3 role=0 "
                         "priority=0 id=79 a=13 b=1 c=0 d=0 e=0 f=0" REST,
    [TD_EV_STOP] = "e kind=16 now=21141484941 worker=0 slot=9 attempt=0 role=0 priority=0 "
                   "id=79 a=0 b=0 c=0 d=0 e=0 f=0" REST,
    [TD_EV_CANCEL] = "e kind=17 now=24080317771695 worker=0 slot=9 attempt=0 role=0 "
                     "priority=0 id=79 a=0 b=0 c=0 d=0 e=0 f=0" REST};

static void old_worker_events(const struct td_core_event e[TD_EV_N_KINDS])
{
    const struct td_ev_join *join = &e[TD_EV_WORKER_JOIN].join;
    assert_true(join->worker == 7 && join->role == TD_ROLE_DECODE && join->one_token);
    assert_true(join->kv_tokens == 846000 && join->max_seqs == 512 && join->node_class == 1);
    assert_true(join->max_step_tokens == 2048 && join->kv_bytes_per_token == 131072);
    const struct td_ev_tick *tick = &e[TD_EV_TICK].tick;
    assert_true(tick->busy_permille == 10 && tick->late_ms == 350);
    const struct td_ev_snapshot *snapshot = &e[TD_EV_WORKER_SNAPSHOT].snapshot;
    assert_true(snapshot->worker == 4 && snapshot->seq == 1036 && snapshot->held_tokens == 35664);
    assert_true(snapshot->queued_tokens == 9 && snapshot->n_seqs == 1);
    assert_int_equal(snapshot->calls_taken, 18);
    const struct td_ev_step *step_of = &e[TD_EV_WORKER_STEP].step;
    assert_true(step_of->worker == 4 && step_of->prefill_tokens == 11);
    assert_true(step_of->attention_work == 66 && step_of->decode_seqs == 1);
    assert_true(step_of->context_tokens == 35662 && step_of->wall_us == 6028);
    const struct td_ev_foreign *foreign = &e[TD_EV_FOREIGN].foreign;
    assert_true(foreign->worker == 4 && foreign->n_routers == 2 && foreign->n_seqs == 9);
    assert_true(foreign->n_running == 7 && foreign->tokens == 3100);
    assert_int_equal(foreign->queued_tokens, 512);
    assert_int_equal(e[TD_EV_WORKER_DRAIN].drain.worker, 3);
    assert_int_equal(e[TD_EV_WORKER_GONE].gone.worker, 3);
    assert_int_equal(e[TD_EV_BLOCKS_RESET].blocks_reset.worker, 2);
    assert_true(e[TD_EV_BLOCK_ADD].block_add.hash == 12138145474076844387ull);
    assert_true(e[TD_EV_BLOCK_EVICT].block_evict.hash == UINT64_MAX);
}

static void old_request_events(const struct td_core_event e[TD_EV_N_KINDS])
{
    const struct td_ev_request *request = &e[TD_EV_REQUEST].request;
    assert_true(request->request_at == 2 && request->id == 80 && request->priority == -7);
    assert_true(request->n_prompt == 954 && request->max_tokens == 48 && request->tenant == 77);
    assert_true(request->ttft_us == 400000 && request->tpot_us == 50000);
    assert_true(request->tenant_weight == 1500 && request->n_hashes == 2);
    assert_true(request->hashes[1] == 0xb7d74be74cf4d017);
    const struct td_ev_prefill_end *end = &e[TD_EV_PREFILL_END].prefill_end;
    assert_true(end->of.request_at == 1 && end->of.attempt == 3 && end->of.id == 79);
    assert_true(end->code == TD_CODE_UNAVAILABLE && end->sent_bytes == 4538236928);
    assert_int_equal(end->sent_us, 1329061);
    const struct td_ev_ticket *ticket = &e[TD_EV_TICKET].ticket;
    assert_true(ticket->of.request_at == 6 && ticket->of.attempt == 2 &&
                ticket->cached_tokens == 208);
    const struct td_ev_first_token *first = &e[TD_EV_FIRST_TOKEN].first_token;
    assert_true(first->last && first->n_tokens == 35127 && first->cached_tokens == 512);
    const struct td_ev_token *token = &e[TD_EV_TOKEN].token;
    assert_true(token->last && token->n_tokens == 35664);
    const struct td_ev_decode_end *decode_end = &e[TD_EV_DECODE_END].decode_end;
    assert_true(decode_end->code == TD_CODE_INTERNAL && decode_end->sender_finished);
    assert_true(e[TD_EV_CANCEL].cancel.request_at == 9 && e[TD_EV_CANCEL].cancel.id == 79);
}

/* Lines of version 3 as routers wrote them when an event was six numbers a..f: they are read into
 * the fields of their kind and written again to the character. */
static void test_log_reads_old_lines(void **state)
{
    (void)state;
    static const char hashes_line[] = "h daf0d9024467e525 b7d74be74cf4d017\n";
    struct td_core_config cfg = {.policy = "goodput", .max_requests = 4};
    struct td_core_event e[TD_EV_N_KINDS];
    static uint64_t hashes[TD_CORE_MAX_HASHES];
    char line[TD_CORE_LINE_MAX];
    enum td_core_read what;
    struct td_err err;
    struct td_core_reader reader = {.hashes = hashes};
    td_core_config_format(&cfg, 0, line, sizeof line);
    assert_int_equal(td_core_read_line(&reader, line, &what, &err), TD_OK);
    for (int kind = TD_EV_TICK; kind < TD_EV_N_KINDS; kind++) {
        assert_int_equal(td_core_read_line(&reader, old_lines[kind], &what, &err), TD_OK);
        if (kind == TD_EV_REQUEST) {
            assert_int_equal(what, TD_READ_MORE);
            assert_int_equal(td_core_read_line(&reader, hashes_line, &what, &err), TD_OK);
        }
        assert_int_equal(what, TD_READ_EVENT);
        e[kind] = reader.event;
        assert_int_equal(td_core_event_format(&e[kind], line, sizeof line),
                         strlen(old_lines[kind]));
        assert_string_equal(line, old_lines[kind]);
    }
    assert_int_equal(td_core_hashes_format(&e[TD_EV_REQUEST], 0, line, sizeof line),
                     strlen(hashes_line));
    assert_string_equal(line, hashes_line);
    old_worker_events(e);
    old_request_events(e);
    /* A stop that stood for an ended leg was written with that leg's attempt and code. */
    assert_int_equal(
        td_core_read_line(&reader,
                          "e kind=16 now=7 worker=0 slot=9 attempt=1 role=0 priority=0 id=79 a=14 "
                          "b=1 c=0 d=0 e=0 f=0" REST,
                          &what, &err),
        TD_OK);
    assert_true(reader.event.stop.request_at == 9 && reader.event.stop.id == 79);
}
#undef REST

static void test_log_refuses_nonsense(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "e",
        "e kind=99 now=1",
        "x",
        "e kind=1 now=x",
        "h 0000000000000001",
        "c version=3 mode=0",
        "k name=a",
        "t known=1",
        ("e kind=9 now=1 worker=0 slot=0 attempt=0 role=0 priority=0 id=1 a=1 b=1 c=0 d=0 e=0 f=0 "
         "weight=0 hashes=513 hash_tokens=16")};
    uint64_t hashes[TD_CORE_MAX_HASHES];
    enum td_core_read what;
    struct td_err err;
    struct td_core_reader r = {.hashes = hashes};
    /* before the configuration */
    assert_int_equal(td_core_read_line(&r, "e kind=1 now=1 worker=0", &what, &err), TD_ERR_CORRUPT);
    assert_int_equal(td_core_read_line(&r, "c version=1 mode=0", &what, &err), TD_ERR_UNSUPPORTED);
    struct td_core_config cfg = {
        .policy = "goodput", .max_requests = 4, .classes = {{"a", 1, 2, 3, true}}, .n_classes = 1};
    char line[TD_CORE_LINE_MAX];
    td_core_config_format(&cfg, 0, line, sizeof line);
    assert_int_equal(td_core_read_line(&r, line, &what, &err), TD_OK);
    assert_int_equal(what, TD_READ_MORE);
    /* a class is missing */
    assert_int_equal(td_core_read_line(&r, "e kind=1 now=1 worker=0", &what, &err), TD_ERR_CORRUPT);
    td_core_config_format(&cfg, 1, line, sizeof line);
    assert_int_equal(td_core_read_line(&r, line, &what, &err), TD_OK);
    assert_int_equal(what, TD_READ_CONFIG);
    assert_string_equal(r.config.classes[0].name, "a");
    assert_true(r.config.classes[0].best_effort);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(td_core_read_line(&r, bad[i], &what, &err), TD_ERR_CORRUPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_life_pd),
        cmocka_unit_test(test_failover_keeps_place_and_ignores_the_past),
        cmocka_unit_test(test_prefill_death_after_handover_is_harmless),
        cmocka_unit_test(test_loss_after_the_last_token),
        cmocka_unit_test(test_one_token_needs_no_decode_worker),
        cmocka_unit_test(test_one_token_fails_over),
        cmocka_unit_test(test_one_token_left_and_older_workers),
        cmocka_unit_test(test_sender_finished_overtakes_the_token),
        cmocka_unit_test(test_sender_finished_is_not_believed_blindly),
        cmocka_unit_test(test_older_log_replays),
        cmocka_unit_test(test_deadline_blames_nobody),
        cmocka_unit_test(test_prefill_that_says_nothing),
        cmocka_unit_test(test_draining_survives_suspicion),
        cmocka_unit_test(test_every_wait_ends),
        cmocka_unit_test(test_no_queue_still_serves),
        cmocka_unit_test(test_calls_that_no_snapshot_has_seen),
        cmocka_unit_test(test_statuses),
        cmocka_unit_test(test_silence_and_time),
        cmocka_unit_test(test_a_pause_of_the_router_blames_nobody),
        cmocka_unit_test(test_modes),
        cmocka_unit_test(test_late_at_the_ticket),
        cmocka_unit_test(test_given_back),
        cmocka_unit_test(test_foreign_prompts_on_their_way),
        cmocka_unit_test(test_queue_of_a_running_step),
        cmocka_unit_test(test_ttft_holds_the_calls),
        cmocka_unit_test(test_a_cold_first_call_does_not_turn_a_prompt_away),
        cmocka_unit_test(test_random_play),
        cmocka_unit_test(test_policy_names),
        cmocka_unit_test(test_log_reads_old_lines),
        cmocka_unit_test(test_share_of_what_is_free),
        cmocka_unit_test(test_share_of_kv),
        cmocka_unit_test(test_log_refuses_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
