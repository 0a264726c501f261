/* common/engine/schedule and scheduler: order, admission and preemption, from tables of counts.
 * (Batches: engine_test.c, beside the engine that runs them.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "common/engine/scheduler.h"

static void test_order(void **state)
{
    (void)state;
    assert_true(td_schedule_before(1, 9, 2, 1));
    assert_false(td_schedule_before(2, 1, 1, 9));
    assert_true(td_schedule_before(5, 1, 5, 2)); /* the same key: the older request */
    assert_false(td_schedule_before(5, 2, 5, 1));
    assert_false(td_schedule_before(5, 2, 5, 2));
}

static void test_blocks(void **state)
{
    (void)state;
    assert_int_equal(td_schedule_blocks(1, 16), 1);
    assert_int_equal(td_schedule_blocks(16, 16), 1);
    assert_int_equal(td_schedule_blocks(17, 16), 2);
    assert_int_equal(td_schedule_max_hit(16, 16), 0); /* the last token is computed */
    assert_int_equal(td_schedule_max_hit(17, 16), 1);
}

static void test_admit(void **state)
{
    (void)state;
    static const struct {
        struct td_schedule_room room;
        int32_t need, hit, headroom;
        td_status want;
    } cases[] = {
        {{10, 0, 10}, 10, 0, 0, TD_OK},         {{10, 0, 10}, 11, 0, 0, TD_ERR_LIMIT},
        {{10, 0, 10}, 11, 11, 0, TD_ERR_LIMIT}, /* what can never be held is refused though all
                                                   of it is cached now */
        {{10, 0, 10}, 10, 0, 3, TD_OK},         /* alone: no headroom */
        {{10, 4, 6}, 6, 0, 0, TD_OK},           {{10, 4, 6}, 7, 0, 0, TD_ERR_AGAIN},
        {{10, 4, 6}, 6, 0, 1, TD_ERR_AGAIN}, /* others run: one block is theirs */
        {{10, 4, 4}, 6, 2, 0, TD_OK},        /* hits need no block, and are no longer
                                                available to anybody */
        {{10, 4, 3}, 6, 2, 0, TD_ERR_AGAIN},    {{10, 4, 5}, 6, 2, 1, TD_OK},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_status got =
            td_schedule_admit(&cases[i].room, cases[i].need, cases[i].hit, cases[i].headroom);
        if (got != cases[i].want) printf("case %zu: got %d\n", i, got);
        assert_int_equal(got, cases[i].want);
    }
}

/* ---- the scheduler, over a pool of counts: one token a block, no prefix cache but what `hit`
 * says --- */

#define N_SEQS 8

struct pool {
    int32_t n_blocks, n_free, hit;
    int32_t n_lookups, n_released;
    const struct td_sched_seq *released[N_SEQS];
};

static void pool_room(void *ctx, struct td_schedule_room *ret_room)
{
    const struct pool *p = ctx;
    *ret_room = (struct td_schedule_room){
        .n_blocks = p->n_blocks, .n_held = p->n_blocks - p->n_free, .n_available = p->n_free};
}

static int32_t pool_lookup(void *ctx, struct td_sched_seq *seq, int32_t max_blocks)
{
    (void)seq;
    struct pool *p = ctx;
    p->n_lookups++;
    return p->hit < max_blocks ? p->hit : max_blocks;
}

static bool pool_alloc(void *ctx, struct td_sched_seq *seq, int32_t n)
{
    (void)seq;
    struct pool *p = ctx;
    if (p->n_free < n) return false;
    p->n_free -= n;
    return true;
}

static void pool_publish(void *ctx, struct td_sched_seq *seq, int32_t n_full)
{
    (void)ctx;
    assert_in_range(n_full, seq->n_published + 1, seq->n_blocks);
}

static void pool_release(void *ctx, struct td_sched_seq *seq)
{
    struct pool *p = ctx;
    p->n_free += seq->n_blocks;
    if (p->n_released < N_SEQS) p->released[p->n_released] = seq;
    p->n_released++;
}

static const struct td_sched_blocks pool_blocks = {.room = pool_room,
                                                   .lookup = pool_lookup,
                                                   .alloc = pool_alloc,
                                                   .publish = pool_publish,
                                                   .release = pool_release};

static void open_scheduler(struct td_scheduler *s, struct pool *p)
{
    const struct td_scheduler_config c = {.blocks = &pool_blocks,
                                          .ctx = p,
                                          .block_size = 1,
                                          .max_seqs = N_SEQS,
                                          .max_batch = N_SEQS,
                                          .max_step_tokens = 64};
    struct td_err err;
    *s = (struct td_scheduler){0};
    assert_int_equal(td_scheduler_init(s, &c, &err), TD_OK);
}

/* Prompts of 10, 10 and 20 tokens, a nanosecond each, in a worker's order; the first has
 * n_computed. -1: nobody is late. */
static void test_late(void **state)
{
    (void)state;
    static const struct {
        uint64_t by[3];
        int32_t n_computed, want;
    } cases[] = {
        {{110, 120, 140}, 0, -1}, /* each just in time */
        {{0, 0, 0}, 0, -1},       /* however late */
        {{110, 119, 140}, 0, 1},  {{110, 120, 139}, 0, 2},
        {{109, 119, 139}, 0, 0}, /* the first of them: behind it the others may be in time */
        {{50, 120, 140}, 5, -1}, /* begun: what was computed is not thrown away */
        {{50, 114, 140}, 5, 1},   {{50, 115, 135}, 5, -1}, /* half of it is done */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct pool p = {.n_free = 0};
        struct td_scheduler s;
        struct td_sched_seq seqs[3] = {{0}};
        static const int32_t n_tokens[3] = {10, 10, 20};
        open_scheduler(&s, &p);
        for (int32_t k = 0; k < 3; k++) {
            seqs[k] = (struct td_sched_seq){.order = (uint64_t)k,
                                            .n_tokens = n_tokens[k],
                                            .phase = TD_SEQ_PREFILL,
                                            .work_ns = (uint64_t)n_tokens[k],
                                            .finish_by_ns = cases[i].by[k],
                                            .n_computed = k ? 0 : cases[i].n_computed};
            td_scheduler_run(&s, &seqs[k]);
        }
        const struct td_sched_seq *late = td_scheduler_late(&s, 100);
        int32_t got = late ? (int32_t)(late - seqs) : -1;
        if (got != cases[i].want) printf("case %zu: %d is late\n", i, got);
        assert_int_equal(got, cases[i].want);
        td_scheduler_free(&s);
    }
}

/* held[i] blocks of want[i], n_free in the pool; decode[i] says whether i grows. */
static void test_grow(void **state)
{
    (void)state;
    static const struct {
        int32_t held[N_SEQS], want[N_SEQS];
        bool decode[N_SEQS];
        int32_t n_free, n, want_left, want_free;
        int32_t want_held[N_SEQS];
    } cases[] = {
        {{2, 2}, {2, 2}, {1, 1}, 0, 2, 2, 0, {2, 2}}, /* nobody lacks */
        {{2, 2}, {3, 3}, {1, 1}, 2, 2, 2, 0, {3, 3}},
        {{2, 2, 5}, {3, 3, 6}, {1, 1, 1}, 0, 3, 2, 3, {3, 3, 0}}, /* the last makes room for both */
        /* the middle one is the next to go: its own turn */
        {{2, 1, 1}, {3, 2, 2}, {1, 1, 1}, 0, 3, 1, 1, {3, 0, 0}},
        /* a prefill at the back goes as well */
        {{2, 2, 4}, {3, 2, 9}, {1, 1, 0}, 0, 3, 2, 3, {3, 2, 0}},
        {{3}, {4}, {1}, 0, 1, 0, 3, {0}},             /* alone and too big: it waits */
        {{3, 4}, {9, 9}, {0, 0}, 0, 2, 2, 0, {3, 4}}, /* prefills hold all they need */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct pool p = {.n_free = cases[i].n_free};
        struct td_scheduler s;
        struct td_sched_seq seqs[N_SEQS] = {0}, *running[N_SEQS];
        struct td_sched_item items[N_SEQS];
        int32_t n = cases[i].n, left = -1;
        open_scheduler(&s, &p);
        for (int32_t k = 0; k < n; k++) {
            seqs[k] =
                (struct td_sched_seq){.phase = cases[i].decode[k] ? TD_SEQ_DECODE : TD_SEQ_PREFILL,
                                      .n_tokens = cases[i].want[k],
                                      .n_computed = cases[i].want[k] - 1,
                                      .n_blocks = cases[i].held[k]};
            running[k] = &seqs[k];
        }
        td_scheduler_plan(&s, running, n, items, &left);
        if (left != cases[i].want_left || p.n_free != cases[i].want_free)
            printf("case %zu: left %d free %d\n", i, left, p.n_free);
        assert_int_equal(left, cases[i].want_left);
        assert_int_equal(p.n_free, cases[i].want_free);
        assert_int_equal(p.n_released, n - left);
        for (int32_t k = 0; k < p.n_released; k++) {
            assert_ptr_equal(p.released[k], &seqs[n - 1 - k]); /* from the back */
            assert_int_equal(seqs[n - 1 - k].n_preemptions, 1);
            assert_int_equal(seqs[n - 1 - k].phase, TD_SEQ_IDLE);
        }
        for (int32_t k = 0; k < n; k++) assert_int_equal(seqs[k].n_blocks, cases[i].want_held[k]);
        td_scheduler_free(&s);
    }
}

struct admission {
    struct td_scheduler *s;
    int32_t n_asked;
};

static td_status admit(void *ctx, struct td_sched_seq *seq)
{
    struct admission *a = ctx;
    a->n_asked++;
    assert_int_equal(seq->list, TD_SCHED_NO_LIST);
    td_status status = td_scheduler_admit(a->s, seq, false, td_scheduler_headroom(a->s));
    if (!status) td_scheduler_run(a->s, seq);
    return status;
}

static int32_t ask(struct td_scheduler *s, uint64_t now_ns)
{
    struct admission a = {.s = s};
    td_scheduler_admit_waiting(s, now_ns, admit, &a);
    return a.n_asked;
}

/* The head goes first or nobody; who found no room is asked again when there is more, or after a
 * while; and who stands in the place of one that was cancelled is somebody else. */
static void test_waiting(void **state)
{
    (void)state;
    struct pool p = {.n_blocks = 10, .n_free = 10};
    struct td_scheduler s;
    struct td_sched_seq seqs[4] = {{.priority = 2, .order = 1, .n_tokens = 6},
                                   {.priority = 5, .order = 9, .n_tokens = 6},
                                   {.priority = 5, .order = 2, .n_tokens = 8},
                                   {.priority = 7, .order = 1, .n_tokens = 1}};
    open_scheduler(&s, &p);
    for (int i = 3; i >= 0; i--) td_scheduler_wait(&s, &seqs[i]);
    assert_int_equal(s.n_waiting, 4);
    assert_int_equal(td_scheduler_queued_tokens(&s), 21);
    assert_int_equal(ask(&s, 1), 2); /* the first has its blocks; the second, which is the older
                                        one of two, has not */
    assert_int_equal(s.n_running, 1);
    assert_ptr_equal(s.running[0], &seqs[0]);
    assert_ptr_equal(s.waiting_head, &seqs[2]);
    assert_ptr_equal(s.waiting_tail, &seqs[3]); /* there is room for it, and it waits */
    assert_int_equal(ask(&s, 2), 0);            /* nothing has changed */
    p.n_free++;
    assert_int_equal(ask(&s, 3), 1); /* a block more: asked, in vain */
    assert_int_equal(ask(&s, 4), 0);
    p.n_free--;
    assert_int_equal(ask(&s, 3 + TD_SCHEDULER_AGAIN_MS * 1000000ull), 1); /* a while later */

    td_scheduler_detach(&s, &seqs[2]); /* cancelled; another request gets its memory, and would
                                          fit */
    seqs[2] = (struct td_sched_seq){.priority = 1, .order = 20, .n_tokens = 3};
    td_scheduler_wait(&s, &seqs[2]);
    int32_t n_lookups = p.n_lookups;
    assert_int_equal(ask(&s, 4 + TD_SCHEDULER_AGAIN_MS * 1000000ull), 2);
    assert_int_equal(p.n_lookups, n_lookups + 2);
    assert_int_equal(seqs[2].list, TD_SCHED_RUNNING);
    assert_ptr_equal(s.running[0], &seqs[2]);
    assert_ptr_equal(s.waiting_head, &seqs[1]);

    td_scheduler_detach(&s, &seqs[0]); /* finished */
    td_scheduler_release(&s, &seqs[0]);
    s.grows = true;
    /* 7 free: 6 and one to stay; then none */
    assert_int_equal(ask(&s, 5 + TD_SCHEDULER_AGAIN_MS * 1000000ull), 2);
    assert_int_equal(s.n_running, 2);
    assert_int_equal(p.n_free, 1);
    assert_ptr_equal(s.waiting_head, &seqs[3]);
    for (int i = 1; i < 3; i++) {
        td_scheduler_detach(&s, &seqs[i]);
        td_scheduler_release(&s, &seqs[i]);
    }
    assert_int_equal(p.n_free, 10);
    td_scheduler_free(&s);
}

/* A prompt in chunks, its first token, decode steps, and preemption back to the queue; what each
 * batch costs. */
static void test_life(void **state)
{
    (void)state;
    struct pool p = {.n_blocks = 9, .n_free = 9, .hit = 2};
    struct td_scheduler s;
    struct td_sched_seq a = {.priority = 1, .n_tokens = 5}, b = {.priority = 2, .n_tokens = 3};
    struct td_sched_item items[N_SEQS];
    struct td_sched_load load;
    open_scheduler(&s, &p);
    s.cfg.max_step_tokens = 2;
    td_scheduler_wait(&s, &a);
    assert_int_equal(ask(&s, 1), 1);
    assert_int_equal(a.phase, TD_SEQ_PREFILL);
    assert_int_equal(a.n_cached, 2);
    assert_int_equal(td_scheduler_queued_tokens(&s), 3);
    assert_int_equal(td_scheduler_batch(&s, items, &load), 1);
    assert_int_equal(items[0].n_new, 2);
    assert_int_equal(load.prefill_rows, 2);
    assert_int_equal(load.attention_work_x2, 2 * (2 * 2 + 2));
    assert_false(td_scheduler_computed(&s, &a, 2));
    assert_int_equal(a.n_published, 4);
    assert_int_equal(td_scheduler_batch(&s, items, &load), 1);
    assert_true(td_scheduler_computed(&s, &a, 1));
    td_scheduler_sampled(&a);
    assert_int_equal(a.phase, TD_SEQ_DECODE);
    assert_int_equal(a.n_tokens, 6);

    p.hit = 0;
    assert_int_equal(td_scheduler_admit(&s, &b, true, 0), TD_OK); /* its KV comes from elsewhere */
    assert_int_equal(b.phase, TD_SEQ_IMPORT);
    td_scheduler_imported(&s, &b);
    td_scheduler_run(&s, &b);
    assert_int_equal(b.n_tokens, 4);
    assert_int_equal(b.n_computed, 3);
    p.n_free = 1; /* a gets it; b goes, and waits */
    assert_int_equal(td_scheduler_batch(&s, items, &load), 1);
    assert_ptr_equal(items[0].seq, &a);
    assert_int_equal(load.decode_rows, 1);
    assert_int_equal(load.context_tokens, 6);
    assert_int_equal(s.n_preemptions, 1);
    assert_int_equal(b.n_preemptions, 1);
    assert_int_equal(b.list, TD_SCHED_WAITING);
    assert_int_equal(b.n_tokens, 4);
    assert_int_equal(b.n_computed, 0);
    td_scheduler_detach(&s, &a);
    td_scheduler_detach(&s, &b);
    assert_int_equal(s.n_waiting + s.n_running, 0);
    td_scheduler_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order), cmocka_unit_test(test_blocks),  cmocka_unit_test(test_admit),
        cmocka_unit_test(test_grow),  cmocka_unit_test(test_waiting), cmocka_unit_test(test_life),
        cmocka_unit_test(test_late)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
