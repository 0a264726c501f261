/* router/core/account: the account of one worker against a reference that adds up the open legs
 * anew after every call, in any order of calls. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/account.h"

enum { LEGS = 40 };

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

static struct td_core_worker worker_of(enum td_core_role role)
{
    struct td_core_worker w = {0};
    td_account_join(&w,
                    &(struct td_ev_join){
                        .role = role, .kv_tokens = 100000, .max_seqs = 64, .max_step_tokens = 2048},
                    0);
    return w;
}

static void snapshot(struct td_core_worker *w, uint64_t seq, uint64_t queued, uint64_t calls_seen,
                     double now_s)
{
    td_account_snapshot(w,
                        &(struct td_ev_snapshot){.seq = seq,
                                                 .held_tokens = 7,
                                                 .queued_tokens = queued,
                                                 .n_seqs = 3,
                                                 .calls_taken = calls_seen},
                        now_s);
}

/* What the open legs of a worker add up to. */
struct sums {
    uint32_t assigned, n_pending, n_active, n_tightest;
    uint64_t assigned_tokens, promised, pending_tokens, active, reserved, local;
    double pending_s, link_s, tightest, s_by_rank[TD_CORE_MAX_CLASSES],
        link_by_rank_s[TD_CORE_MAX_CLASSES];
    uint32_t n_sending, n_told, n_chunked, n_by_rank[TD_CORE_MAX_CLASSES];
};

static void add_prefill_leg(struct sums *t, const struct td_leg *l)
{
    assert_true(l->pending || l->tokens == 0);
    if (l->pending) t->pending_tokens += l->tokens;
    if (l->pending) t->pending_s += l->work_s;
    if (l->pending) t->s_by_rank[l->turn] += l->work_s;
    t->n_by_rank[l->turn] += l->pending;
    t->link_s += l->link_s;
    t->link_by_rank_s[l->turn] += l->link_s;
    t->n_told += l->pending && !l->planned;
    t->n_chunked += l->pending && !l->planned && l->tokens > 2048;
    t->n_sending += !l->pending;
}

static void add_decode_leg(struct sums *t, const struct td_leg *l)
{
    assert_true(l->promised >= l->tokens);
    t->n_active += !l->pending;
    t->active += l->pending ? 0 : l->tokens;
    t->reserved += l->pending ? l->tokens : 0;
    t->local += l->local_tokens;
    if (l->tpot_s < t->tightest) {
        t->tightest = l->tpot_s;
        t->n_tightest = 0;
    }
    t->n_tightest += l->tpot_s <= t->tightest;
}

static struct sums sums_of(const struct td_core_worker *w, const struct td_leg *legs)
{
    struct sums t = {.tightest = INFINITY};
    for (int i = 0; i < LEGS; i++) {
        const struct td_leg *l = &legs[i];
        if (l->worker == TD_NO_WORKER) continue;
        t.assigned++;
        t.assigned_tokens += l->tokens;
        t.promised += l->promised;
        t.n_pending += l->pending;
        if (w->role == TD_ROLE_PREFILL)
            add_prefill_leg(&t, l);
        else
            add_decode_leg(&t, l);
    }
    return t;
}

static void check_decode(const struct td_core_worker *w, const struct sums *t)
{
    assert_true(w->decode.min_tpot_s <= t->tightest);
    if (t->assigned == 0)
        assert_true(w->decode.min_tpot_s >= INFINITY && w->decode.n_min_tpot == 0);
    else if (w->decode.n_min_tpot > 0)
        assert_true(w->decode.min_tpot_s >= t->tightest && w->decode.n_min_tpot == t->n_tightest);
}

static void check_prefill(const struct td_core_worker *w, const struct sums *t, double now_s)
{
    assert_int_equal(w->prefill.n_sending, t->n_sending);
    assert_int_equal(w->prefill.n_told, t->n_told);
    assert_int_equal(w->prefill.n_chunked, t->n_chunked);
    for (uint32_t rank = 0; rank < TD_CORE_MAX_CLASSES; rank++) {
        assert_true(fabs(w->prefill.link_by_turn_s[rank] - t->link_by_rank_s[rank]) <
                    1e-9 * (1 + t->link_s));
        if (t->assigned == 0) assert_true(w->prefill.link_by_turn_s[rank] <= 0);
    }
    assert_true(t->n_sending < 2 || w->prefill.crowded);
    assert_true(fabs(w->prefill.link_s - t->link_s) < 1e-9 * (1 + t->link_s));
    if (t->assigned == 0) assert_true(w->prefill.link_s <= 0 && !w->prefill.crowded);
    /* never more than all of what is open: at once when nothing is */
    assert_true(w->prefill.free_at_s <= now_s + w->prefill.pending_s + 1e-9);
}

/* What must hold of a worker with these open legs. n_min_tpot may be 0 while some are open:
 * lifecycle.c looks for the next one then. */
static void check(const struct td_core_worker *w, const struct td_leg *legs, double now_s)
{
    struct sums t = sums_of(w, legs);
    assert_int_equal(w->assigned, t.assigned);
    assert_int_equal(w->assigned_tokens, t.assigned_tokens);
    assert_int_equal(w->decode.promised_tokens, t.promised);
    assert_int_equal(w->n_pending, t.n_pending);
    assert_int_equal(w->decode.n_active, t.n_active);
    assert_int_equal(w->prefill.pending_tokens, t.pending_tokens);
    assert_int_equal(w->decode.active_tokens, t.active);
    assert_int_equal(w->decode.reserved_tokens, t.reserved);
    assert_int_equal(w->decode.local_tokens, t.local);
    assert_true(fabs(w->prefill.pending_s - t.pending_s) < 1e-9 * (1 + t.pending_s));
    for (uint32_t rank = 0; rank < TD_CORE_MAX_CLASSES; rank++) {
        assert_int_equal(w->prefill.pending_by_turn[rank].n, t.n_by_rank[rank]);
        assert_true(fabs(w->prefill.pending_by_turn[rank].s - t.s_by_rank[rank]) <
                    1e-9 * (1 + t.pending_s));
        if (t.n_by_rank[rank] == 0) assert_true(w->prefill.pending_by_turn[rank].s <= 0);
    }
    if (t.n_pending == 0)
        assert_true(w->prefill.pending_s <= 0); /* exactly: nothing is carried on */
    if (w->role == TD_ROLE_DECODE)
        check_decode(w, &t);
    else
        check_prefill(w, &t, now_s);
}

static void open_leg(struct td_core_worker *w, struct td_leg *l, uint64_t n, double now_s)
{
    static const double objectives[] = {0.01, 0.02, 0.02, 0.05, INFINITY};
    if (w->role == TD_ROLE_PREFILL)
        td_account_prefill_open(w, l, 3, (uint32_t)rnd(TD_CORE_MAX_CLASSES), n, (double)n * 1e-4,
                                now_s);
    else
        td_account_decode_open(w, l, 3, rnd(2), n, n + rnd(300), rnd(2) ? n : 0,
                               objectives[rnd(5)]);
    assert_int_equal(l->worker, 3);
    if (w->role == TD_ROLE_DECODE)
        w->calls_sent++;
    else if (rnd(2))
        td_account_prefill_tell(w, l);
    if (w->role == TD_ROLE_PREFILL && rnd(4))
        td_account_link_open(w, l, (double)n * 1e-4 * (double)rnd(3), now_s + (double)rnd(3) * 0.1);
}

static void play(uint64_t seed, enum td_core_role role)
{
    rng_state = seed;
    print_message("seed %llu role %d\n", (unsigned long long)seed, (int)role);
    struct td_core_worker w = worker_of(role);
    struct td_leg legs[LEGS];
    for (int i = 0; i < LEGS; i++) legs[i] = (struct td_leg){.worker = TD_NO_WORKER};
    double now_s = 0;
    uint64_t seq = 0;
    for (int i = 0; i < 20000; i++) {
        now_s += rnd(50) * 1e-3;
        struct td_leg *l = &legs[rnd(LEGS)];
        bool was_open;
        uint64_t n = 1 + rnd(5000);
        switch (rnd(6)) {
        case 0:
        case 1:
            if (l->worker == TD_NO_WORKER) open_leg(&w, l, n, now_s);
            break;
        case 2: /* again and again: once counts */
            if (role == TD_ROLE_PREFILL)
                td_account_prefill_done(&w, l, now_s);
            else
                td_account_decode_active(&w, l);
            break;
        case 3:
            if (role == TD_ROLE_DECODE) td_account_decode_grow(&w, l, rnd(400));
            break;
        case 4: /* true or absurd */
            snapshot(&w, ++seq, rnd(3) ? rnd(20000) : UINT64_MAX,
                     rnd(2) ? w.calls_sent : w.calls_sent - rnd(2), now_s);
            break;
        default:
            was_open = l->worker != TD_NO_WORKER;
            td_account_close(&w, l, now_s);
            assert_int_equal(l->worker, TD_NO_WORKER);
            /* what all who are there have to send is all that the link is behind the computing */
            if (role == TD_ROLE_PREFILL && was_open)
                assert_true(w.prefill.link_free_at_s <=
                            fmax(now_s, w.prefill.free_at_s) + w.prefill.link_s + 1e-9);
            if (w.role == TD_ROLE_DECODE && w.assigned && w.decode.n_min_tpot == 0) {
                /* lifecycle.c's part: the next tightest */
                w.decode.min_tpot_s = INFINITY;
                for (int k = 0; k < LEGS; k++) {
                    if (legs[k].worker == TD_NO_WORKER || legs[k].tpot_s > w.decode.min_tpot_s)
                        continue;
                    w.decode.n_min_tpot =
                        legs[k].tpot_s < w.decode.min_tpot_s ? 1 : w.decode.n_min_tpot + 1;
                    w.decode.min_tpot_s = legs[k].tpot_s;
                }
            }
        }
        check(&w, legs, now_s);
    }
    for (int i = 0; i < LEGS; i++) td_account_close(&w, &legs[i], now_s);
    check(&w, legs, now_s);
}

static void test_random_play(void **state)
{
    (void)state;
    const char *env = getenv("SEED");
    uint64_t seed = env ? strtoull(env, NULL, 10) : 1;
    for (uint64_t i = 0; i < 4; i++) play(seed + i, (enum td_core_role)(i % 2));
}

#define NEAR(x, y) assert_true(fabs((x) - (y)) < 1e-9)

/* When a prefill worker would begin a new prompt: assignments move it at once, first tokens and
 * true snapshots set it anew. */
static void test_free_at(void **state)
{
    (void)state;
    struct td_core_worker w = worker_of(TD_ROLE_PREFILL);
    struct td_leg a, b, c;
    td_account_prefill_open(&w, &a, 0, 0, 100, 1, 10);
    NEAR(w.prefill.free_at_s, 11);
    td_account_prefill_open(&w, &b, 0, 0, 300, 3, 10.5); /* behind it */
    NEAR(w.prefill.free_at_s, 14);
    td_account_prefill_tell(&w, &a);
    td_account_prefill_tell(&w, &b);
    td_account_prefill_done(&w, &a, 12); /* it took two seconds, not one */
    NEAR(w.prefill.free_at_s, 15);
    td_account_prefill_done(&w, &a, 13); /* said twice: no effect */
    NEAR(w.prefill.free_at_s, 15);
    snapshot(&w, 1, 0, 1, 12.5); /* has not seen b's call: says nothing of it */
    NEAR(w.prefill.free_at_s, 15);
    snapshot(&w, 2, 100, 2, 13); /* a third of b is left */
    NEAR(w.prefill.free_at_s, 14);
    snapshot(&w, 3, 300, 2, 14); /* all of it: nothing was computed, the plan slips */
    NEAR(w.prefill.free_at_s, 17);
    snapshot(&w, 4, 1u << 30, 2, 14); /* more than we gave it is not ours */
    NEAR(w.prefill.free_at_s, 17);
    td_account_prefill_open(&w, &c, 0, 0, 100, 1, 15);
    NEAR(w.prefill.free_at_s, 18);
    td_account_close(&w, &b, 15); /* its client has gone: those behind move up */
    NEAR(w.prefill.free_at_s, 15);
    td_account_prefill_open(&w, &b, 0, 0, 100, 1, 15.25);
    NEAR(w.prefill.free_at_s, 16.25);
    td_account_close(&w, &c, 16);
    td_account_close(&w, &b, 16); /* never before now */
    NEAR(w.prefill.free_at_s, 16);
    td_account_close(&w, &a, 17); /* it was done: its time was given back then */
    NEAR(w.prefill.free_at_s, 16);
    assert_int_equal(w.assigned, 0);
    td_account_prefill_open(&w, &a, 0, 0, 100, 1, 20); /* idle meanwhile: from now on, not from
                                                          then */
    NEAR(w.prefill.free_at_s, 21);
}

static void test_decode_promises(void **state)
{
    (void)state;
    struct td_core_worker w = worker_of(TD_ROLE_DECODE);
    struct td_leg a, b;
    td_account_decode_open(&w, &a, 0, false, 100, 150, 0, 0.05);
    td_account_decode_open(&w, &b, 0, true, 10, 20, 8, INFINITY);
    assert_int_equal(w.decode.promised_tokens, 170);
    assert_int_equal(w.decode.reserved_tokens, 110);
    assert_int_equal(w.decode.local_tokens, 8);
    td_account_decode_active(&w, &b);
    assert_int_equal(w.decode.local_tokens, 0);
    assert_int_equal(w.decode.active_tokens, 10);
    td_account_decode_grow(&w, &b, 10); /* as promised */
    assert_int_equal(w.decode.promised_tokens, 170);
    td_account_decode_grow(&w, &b, 5); /* longer than expected: what it holds is promised */
    assert_int_equal(w.decode.promised_tokens, 175);
    td_account_decode_grow(&w, &a, 60); /* before its first decode token: the prefill's token may
                                           be counted already */
    assert_int_equal(w.decode.reserved_tokens, 160);
    td_account_close(&w, &a, 1);
    assert_int_equal(w.decode.promised_tokens, 25);
    td_account_close(&w, &b, 1);
    td_account_close(&w, &b, 1);
    assert_int_equal(w.assigned + w.decode.promised_tokens + w.decode.reserved_tokens +
                         w.decode.active_tokens + w.assigned_tokens + w.decode.n_min_tpot,
                     0);
}

/* A call that never reached its worker is in no snapshot's count. Before: after it no snapshot
 * was ever again taken to have seen all calls, and the ledger was corrected by none. */
static void test_a_call_that_never_arrived(void **state)
{
    (void)state;
    struct td_core_worker w = {0};
    struct td_ev_join e = {.role = TD_ROLE_PREFILL, .kv_tokens = 100000, .max_seqs = 8};
    struct td_leg lost, told;
    td_account_join(&w, &e, 0);
    td_account_prefill_open(&w, &lost, 0, 0, 1000, 1.0, 10);
    td_account_call_failed(&w, &lost); /* only planned: no call was made */
    assert_int_equal(w.calls_sent, 0);
    td_account_prefill_tell(&w, &lost);
    td_account_prefill_open(&w, &told, 0, 0, 1000, 1.0, 10);
    td_account_prefill_tell(&w, &told);
    assert_int_equal(w.calls_sent, 2);
    td_account_call_failed(&w, &lost);
    td_account_close(&w, &lost, 10);
    snapshot(&w, 1, 100, 1, 10.5); /* it has taken the other one, and computed nine tenths of it */
    assert_true(fabs(w.prefill.free_at_s - 10.6) < 1e-9);
    td_account_prefill_done(&w, &told, 11);
    td_account_call_failed(&w, &told); /* it was answered: it did arrive */
    assert_int_equal(w.calls_sent, 1);
    td_account_close(&w, &told, 11);
    w.calls_sent += 3; /* whatever else was counted wrongly: at rest nothing is on its way */
    snapshot(&w, 2, 0, 2, 11);
    assert_int_equal(w.calls_sent, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_call_that_never_arrived),
        cmocka_unit_test(test_free_at),
        cmocka_unit_test(test_decode_promises),
        cmocka_unit_test(test_random_play),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
