/* router/core/queue: who is next among those that wait. Cases for each rule, then random play
 * against a reference that computes every choice from all of its items. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/queue.h"

#define SEC 1000000000ull
enum { SLOTS = 4096 };

static struct td_queue *order_of(uint32_t n_classes)
{
    static const uint32_t ranks[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    struct td_queue *o = NULL;
    struct td_err err;
    assert_int_equal(td_queue_create(SLOTS, n_classes, ranks, &o, &err), TD_OK);
    return o;
}

static void put(struct td_queue *o, uint32_t request_at, uint32_t slo_class, uint64_t tenant,
                int32_t priority, uint64_t deadline_ns, uint64_t now_ns)
{
    struct td_queue_key k = {.slo_class = slo_class,
                             .tenant = tenant,
                             .priority = priority,
                             .deadline_ns = deadline_ns,
                             .id = request_at,
                             .bound = true,
                             .hopeless = now_ns > deadline_ns};
    td_queue_insert(o, request_at, &k, 1, now_ns);
}

/* A whole walk; the requests it gave. */
static void expect_walk(struct td_queue *o, double fullness, uint64_t now_ns, const uint32_t *want,
                        uint32_t n)
{
    td_queue_walk(o, fullness, now_ns);
    for (uint32_t i = 0; i < n; i++) assert_int_equal(td_queue_next(o), want[i]);
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
}
#define EXPECT_WALK(o, fullness, now, ...)                                                         \
    do {                                                                                           \
        const uint32_t want_[] = {__VA_ARGS__};                                                    \
        expect_walk(o, fullness, now, want_, sizeof want_ / sizeof *want_);                        \
    } while (0)

static void test_classes_and_ceilings(void **state)
{
    (void)state;
    const uint32_t ranks[] = {2, 0, 1};
    struct td_queue *o = NULL;
    struct td_err err;
    assert_int_equal(td_queue_create(SLOTS, 3, ranks, &o, &err), TD_OK);
    expect_walk(o, 0, 1, NULL, 0);
    put(o, 0, 0, 0, 100, 1 * SEC, 1); /* the least class, with the greatest priority and the
                                         earliest deadline */
    put(o, 1, 1, 0, 0, 9 * SEC, 1);
    put(o, 2, 2, 0, 0, 5 * SEC, 1);
    EXPECT_WALK(o, 0, 2, 1, 2, 0);
    EXPECT_WALK(o, 0.599, 2, 1, 2, 0);
    EXPECT_WALK(o, 0.6, 2, 1, 2); /* ceilings 1, 0.8, 0.6 */
    EXPECT_WALK(o, 0.799, 2, 1, 2);
    EXPECT_WALK(o, 0.8, 2, 1);
    EXPECT_WALK(o, 1, 2, 1); /* the first class is never held back by fullness */
    td_queue_walk(o, 0, 2);  /* what was placed counts during the walk, too */
    assert_int_equal(td_queue_next(o), 1);
    td_queue_fill(o, 0.7);
    assert_int_equal(td_queue_next(o), 2);
    td_queue_fill(o, 0.8);
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    td_queue_walk(o, 0, 2);
    assert_int_equal(td_queue_next(o), 1);
    td_queue_fill(o, 0.65);
    assert_int_equal(td_queue_next(o), 2);
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    td_queue_remove(o, 1);
    EXPECT_WALK(o, 0.6, 2, 2);
    expect_walk(o, 0.8, 2, NULL, 0);
    assert_true(fabs(td_queue_work_s(o, 1) - 0) < 1e-12); /* before a newcomer of class 1 nobody */
    assert_true(fabs(td_queue_work_s(o, 2) - 1) < 1e-12);
    assert_true(fabs(td_queue_work_s(o, 0) - 2) < 1e-12);
    td_queue_destroy(o);
}

static void test_within_a_tenant(void **state)
{
    (void)state;
    struct td_queue *o = order_of(1);
    put(o, 0, 0, 7, 0, 5 * SEC, 1 * SEC);
    put(o, 1, 0, 7, 0, 3 * SEC, 1 * SEC);
    put(o, 2, 0, 7, 9, 8 * SEC, 1 * SEC); /* priority before deadline */
    put(o, 3, 0, 7, 0, 3 * SEC, 1 * SEC); /* equal deadlines: number of arrival */
    put(o, 4, 0, 7, 0, SEC / 2, 1 * SEC); /* its deadline has passed: behind the hopeful */
    put(o, 5, 0, 7, -1, 1 * SEC + 1, 1 * SEC);
    EXPECT_WALK(o, 0, 1 * SEC, 2, 1, 3, 0, 4, 5);
    td_queue_destroy(o);
}

/* No domino: deadlines that pass while requests wait put them behind those that can still be
 * met; among themselves earliest first; a priority is not lost, and who has no deadline never
 * becomes hopeless. */
static void test_hopeless_while_waiting(void **state)
{
    (void)state;
    struct td_queue *o = order_of(1);
    put(o, 0, 0, 0, 0, 2 * SEC, 1 * SEC);
    put(o, 1, 0, 0, 0, 3 * SEC, 1 * SEC);
    put(o, 2, 0, 0, 0, 4 * SEC, 1 * SEC);
    put(o, 3, 0, 0, 0, 9 * SEC, 1 * SEC);
    put(o, 4, 0, 0, 5, 2 * SEC, 1 * SEC);
    struct td_queue_key free_one = {.deadline_ns = 2 * SEC + 1, .id = 5};
    td_queue_insert(o, 5, &free_one, 1, 1 * SEC);
    EXPECT_WALK(o, 0, 2 * SEC, 4, 0, 5, 1, 2, 3); /* at its deadline a request still has hope */
    EXPECT_WALK(o, 0, 3 * SEC, 4, 5, 1, 2, 3, 0);
    EXPECT_WALK(o, 0, 5 * SEC, 4, 5, 3, 0, 1, 2);
    EXPECT_WALK(o, 0, 99 * SEC, 4, 5, 0, 1, 2, 3);
    td_queue_walk(o, 0, 99 * SEC); /* the only one of its list, demoted on the way */
    td_queue_destroy(o);
    o = order_of(1);
    put(o, 0, 0, 0, 0, 2 * SEC, 1 * SEC);
    put(o, 1, 0, 3, 0, 2 * SEC, 1 * SEC);
    td_queue_walk(o, 0, 3 * SEC);
    uint32_t first = td_queue_next(o), second = td_queue_next(o);
    assert_true(first + second == 1 && first != second);
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    td_queue_destroy(o);
}

static void test_tenants_share(void **state)
{
    (void)state;
    struct td_queue *o = order_of(1);
    td_queue_charge(o, 1, 1000, 0);
    td_queue_charge(o, 2, 900, 0);
    for (uint32_t i = 0; i < 3; i++) put(o, i, 0, 1, 0, 100 * SEC, 0);
    put(o, 3, 0, 2, 0, 100 * SEC, 0);
    put(o, 4, 0, 3, 0, 100 * SEC, 0); /* nothing served yet */
    EXPECT_WALK(o, 0, SEC, 4, 3, 0, 1, 2);
    /* Half of a service is forgotten in 60 s: 1000 of a minute ago are less than 600 of now. */
    td_queue_remove(o, 4);
    td_queue_charge(o, 2, 600 - 450, 60 * SEC);
    EXPECT_WALK(o, 0, 60 * SEC, 0, 3, 1, 2);
    /* One that is served goes behind: its next comes when the others had more. */
    td_queue_walk(o, 0, 60 * SEC);
    uint32_t request_at = td_queue_next(o);
    assert_int_equal(request_at, 0);
    td_queue_remove(o, request_at);
    td_queue_charge(o, 1, 5000, 60 * SEC);
    assert_int_equal(td_queue_next(o), 3);
    td_queue_destroy(o);

    /* The fifth that is not service: of two equals in service the one that waits longer is next. */
    o = order_of(1);
    put(o, 0, 0, 1, 0, 100 * SEC, 5 * SEC);
    put(o, 1, 0, 2, 0, 100 * SEC, 1 * SEC);
    EXPECT_WALK(o, 0, 6 * SEC, 1, 0);
    td_queue_destroy(o);
}

/* Least attained service over time: tenants that always have something waiting and send requests
 * of sizes 1:4 get the same tokens, up to what the fifth of the score that is waiting can shift
 * (0.2 / 0.8 of the greater service). */
/* Who has attained more than its share of what all active tenants attained is above it, by
 * weights; who is alone never is; who has not asked for a minute shares no more. */
static void test_shares(void **state)
{
    (void)state;
    static const uint32_t rank = 0;
    struct td_queue *o = NULL;
    struct td_err err;
    uint64_t now = SEC;
    assert_int_equal(td_queue_create(SLOTS, 1, &rank, &o, &err), TD_OK);
    td_queue_ask(o, 7, 1, now);
    td_queue_charge(o, 7, 1000, now);
    assert_false(td_queue_above_share(o, 7, now) || td_queue_below_share(o, 7, now)); /* alone */
    td_queue_ask(o, 8, 1, now);
    assert_true(td_queue_above_share(o, 7, now) && td_queue_below_share(o, 8, now));
    td_queue_charge(o, 8, 960, now); /* equal but for a little: neither */
    assert_false(td_queue_above_share(o, 7, now) || td_queue_below_share(o, 8, now));
    td_queue_ask(o, 7, 4, now); /* entitled to four fifths, it has had half */
    assert_true(td_queue_below_share(o, 7, now) && td_queue_above_share(o, 8, now));
    td_queue_ask(o, 7, 4, now += 61 * SEC);
    assert_false(td_queue_below_share(o, 7, now)); /* the other has not asked for a minute */
    /* never asked */
    assert_false(td_queue_above_share(o, 0, now) || td_queue_below_share(o, 99, now));
    td_queue_destroy(o);
}

static void test_fairness_in_the_long_run(void **state)
{
    (void)state;
    struct td_queue *o = order_of(1);
    double got[2] = {0, 0};
    uint32_t turns[2] = {0, 0};
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t i = 0; i < 8; i++) put(o, t * 8 + i, 0, 1 + t, 0, 1000 * SEC, 0);
    for (uint32_t i = 0; i < 4000; i++) {
        uint64_t now = i * (SEC / 20);
        td_queue_walk(o, 0, now);
        uint32_t request_at = td_queue_next(o), t = request_at / 8;
        double cost = t ? 400 : 100;
        td_queue_remove(o, request_at);
        td_queue_charge(o, 1 + t, cost, now);
        got[t] += cost;
        turns[t]++;
        put(o, request_at, 0, 1 + t, 0, 1000 * SEC + now, now);
    }
    if (got[0] < 0.75 * got[1] || got[1] < 0.75 * got[0])
        fail_msg("tokens %g and %g", got[0], got[1]);
    assert_true(turns[0] > 2 * turns[1]); /* by turns they would be even */
    td_queue_destroy(o);
}

/* Who was held lets the other tenants try before its second; the walk survives the removal of
 * what it gave. */
static void test_walk_under_removal(void **state)
{
    (void)state;
    struct td_queue *o = order_of(2);
    for (uint32_t i = 0; i < 6; i++) put(o, i, 0, 1 + i % 2, 0, SEC + i, 0);
    put(o, 6, 1, 1, 0, SEC, 0);
    bool seen[7] = {false};
    td_queue_walk(o, 0, 0);
    uint32_t before = TD_QUEUE_NONE;
    for (uint32_t n = 0; n < 7; n++) {
        uint32_t request_at = td_queue_next(o);
        assert_true(request_at < 7 && !seen[request_at]);
        seen[request_at] = true;
        if (n == 1) assert_int_not_equal(request_at % 2, before % 2);
        before = request_at;
        if (n % 2) td_queue_remove(o, request_at);
        if (n == 6) assert_int_equal(request_at, 6);
    }
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    assert_int_equal(td_queue_n(o), 4);
    td_queue_destroy(o);
}

/* More tenants than accounts: everybody is served, once; accounts of those who have gone are
 * used again; an evicted one starts anew. */
static void test_many_tenants(void **state)
{
    (void)state;
    struct td_queue *o = order_of(1);
    static bool seen[SLOTS];
    memset(seen, 0, sizeof seen);
    for (uint32_t i = 0; i < 3000; i++) put(o, i, 0, 1 + i, 0, SEC, 0);
    /* second ones of some */
    for (uint32_t i = 3000; i < 3500; i++) put(o, i, 0, 1 + i - 1000, 0, SEC, 0);
    td_queue_walk(o, 0, 1);
    for (uint32_t n = 0; n < 3500; n++) {
        uint32_t request_at = td_queue_next(o);
        assert_true(request_at < 3500 && !seen[request_at]);
        seen[request_at] = true;
        if (n % 3 == 0) td_queue_remove(o, request_at);
        if (n % 3 == 0) td_queue_charge(o, 1 + request_at, 100, 1);
    }
    assert_int_equal(td_queue_next(o), TD_QUEUE_NONE);
    for (uint32_t i = 0; i < 3500; i++)
        if (td_queue_has(o, i)) td_queue_remove(o, i);
    assert_int_equal(td_queue_n(o), 0);
    assert_true(td_queue_work_s(o, 0) <= 0);
    /* Long after, all accounts are idle and worth nothing: new tenants get their own, so least
       service holds among them. */
    td_queue_charge(o, 100001, 500, 3600 * SEC);
    put(o, 0, 0, 100001, 0, 9000 * SEC, 3600 * SEC);
    put(o, 1, 0, 100002, 0, 9000 * SEC, 3600 * SEC);
    EXPECT_WALK(o, 0, 3600 * SEC, 1, 0);
    td_queue_destroy(o);
}

/* At the limit: a flood of tenants that come once finds few accounts to look at, shares one
 * while nobody may be forgotten, and the one that may be is found by one of the next 64. */
static void test_tenants_at_the_limit(void **state)
{
    (void)state;
    enum { OWN = TD_QUEUE_MAX_TENANTS - 1, FLOOD = 20000 };
    struct td_queue *o = order_of(1);
    for (uint32_t i = 0; i < OWN; i++) td_queue_charge(o, 1 + i, 1000, 0);
    assert_true(td_queue_looks(o) == 0); /* there is an account for each */
    for (uint32_t i = 0; i < FLOOD; i++) td_queue_charge(o, 100000 + i, 1, 0);
    assert_true(td_queue_looks(o) <= 16ull * FLOOD);
    /* nobody was forgotten: who had an account has its service, and goes after one who has none;
       the flood shares what it was given */
    put(o, 0, 0, 1 + OWN / 2, 0, 9 * SEC, 1);
    put(o, 1, 0, 0, 0, 9 * SEC, 1);
    put(o, 2, 0, 100000 + FLOOD, 0, 9 * SEC, 1);
    EXPECT_WALK(o, 0, 2, 1, 0, 2);
    for (uint32_t i = 0; i < 3; i++) td_queue_remove(o, i);
    /* 600 s later all are worth a token but one tenant of the flood's account, which is charged
       on; each new one has its own at once */
    uint64_t before = td_queue_looks(o), now = 700 * SEC;
    for (uint32_t i = 0; i < OWN; i++) td_queue_charge(o, 300000 + i, 1000, now);
    assert_true(td_queue_looks(o) - before == OWN);
    /* one alone may be forgotten: 64 new ones find it */
    now += 700 * SEC;
    for (uint32_t i = 0; i < OWN; i++)
        if (i != 500) td_queue_charge(o, 300000 + i, 1000, now);
    for (uint32_t i = 0; i < 64; i++) td_queue_charge(o, 400000 + i, 7, now);
    before = td_queue_looks(o); /* whoever has it looks no more */
    for (uint32_t i = 0; i < 64; i++) td_queue_charge(o, 400000 + i, 7, now);
    assert_true(td_queue_looks(o) - before == 63 * 16);
    td_queue_destroy(o);
}

/* The key for workers' queues says the same as the order within a tenant. */
static void test_wire_key(void **state)
{
    (void)state;
    struct td_queue *o = order_of(16);
    const struct td_queue_key chain[] = {
        {.slo_class = 0, .priority = 100, .deadline_ns = 5 * SEC},
        {.slo_class = 0, .priority = 0, .deadline_ns = 4 * SEC},
        {.slo_class = 0, .deadline_ns = 5 * SEC},
        {.slo_class = 0, .deadline_ns = UINT64_MAX},
        {.slo_class = 0, .deadline_ns = 0, .hopeless = true},
        {.slo_class = 0, .priority = -100, .deadline_ns = 0},
        {.slo_class = 1, .priority = 100, .deadline_ns = 0},
        {.slo_class = 15, .priority = 100, .deadline_ns = 0},
        {.slo_class = 15, .priority = -100, .deadline_ns = UINT64_MAX, .hopeless = true},
    };
    for (size_t i = 1; i < sizeof chain / sizeof *chain; i++)
        assert_true(td_queue_wire_key(o, &chain[i - 1]) < td_queue_wire_key(o, &chain[i]));
    td_queue_destroy(o);
}

/* ---- random play ----------------------------------------------------------------------------- */

enum { PLAY_SLOTS = 200, TENANTS = 6, CLASSES = 3 };
static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

struct ref_item {
    bool in, given;
    struct td_queue_key key;
    uint64_t since_ns;
    double work_s;
};
static struct ref_item ref[PLAY_SLOTS];
static double ref_service[TENANTS + 1];
static uint64_t ref_service_ns[TENANTS + 1];

static double ref_service_at(uint32_t t, uint64_t now)
{
    return ref_service[t] * exp2(-(double)(now - ref_service_ns[t]) * 1e-9 / 60);
}

static bool ref_before(const struct ref_item *a, const struct ref_item *b, uint64_t now)
{
    bool ha = a->key.hopeless || (a->key.bound && now > a->key.deadline_ns),
         hb = b->key.hopeless || (b->key.bound && now > b->key.deadline_ns);
    if (a->key.priority != b->key.priority) return a->key.priority > b->key.priority;
    if (ha != hb) return hb;
    if (a->key.deadline_ns != b->key.deadline_ns) return a->key.deadline_ns < b->key.deadline_ns;
    return a->key.id < b->key.id;
}

/* The first of (class, tenant) in order, all or only those that this walk has not given; NONE =
 * none. */
static uint32_t ref_first(uint32_t c, uint32_t t, bool only_new, uint64_t now)
{
    uint32_t best = TD_QUEUE_NONE;
    for (uint32_t i = 0; i < PLAY_SLOTS; i++)
        if (ref[i].in && ref[i].key.slo_class == c && ref[i].key.tenant == t &&
            !(only_new && ref[i].given) &&
            (best == TD_QUEUE_NONE || ref_before(&ref[i], &ref[best], now)))
            best = i;
    return best;
}

/* Is `request_at` (or NONE) what the rules give next? Equal scores may go either way. */
static void ref_check(uint32_t request_at, double fullness, uint64_t now)
{
    for (uint32_t c = 0; c < CLASSES; c++) { /* ranks are the classes' numbers */
        if (c > 0 && fullness >= 1 - 0.4 * c / (CLASSES - 1)) continue;
        double most = 1e-9, longest = 1e-9, least = INFINITY, score[TENANTS + 1];
        uint32_t next[TENANTS + 1];
        for (uint32_t t = 0; t <= TENANTS; t++) {
            uint32_t head = ref_first(c, t, false, now);
            if (head == TD_QUEUE_NONE) continue;
            most = fmax(most, ref_service_at(t, now));
            longest = fmax(longest, (double)(now - ref[head].since_ns));
        }
        for (uint32_t t = 0; t <= TENANTS; t++) {
            uint32_t head = ref_first(c, t, false, now);
            next[t] = ref_first(c, t, true, now);
            score[t] = INFINITY;
            if (next[t] == TD_QUEUE_NONE) continue;
            score[t] = 0.8 * ref_service_at(t, now) / most -
                       0.2 * (double)(now - ref[head].since_ns) / longest +
                       (next[t] == head ? 0 : 2);
            least = fmin(least, score[t]);
        }
        if (least >= INFINITY) continue;
        if (request_at == TD_QUEUE_NONE) fail_msg("the walk ended with class %u unserved", c);
        uint32_t t = (uint32_t)ref[request_at].key.tenant;
        assert_int_equal(ref[request_at].key.slo_class, c);
        assert_int_equal(request_at, next[t]);
        if (score[t] > least + 1e-9)
            fail_msg("tenant %u has %g, the least is %g", t, score[t], least);
        return;
    }
    assert_int_equal(request_at, TD_QUEUE_NONE);
}

static struct ref_item random_item(uint32_t tenant, uint64_t id, uint64_t now)
{
    struct ref_item r =
        (struct ref_item){.in = true,
                          .since_ns = now,
                          .work_s = 1 + rnd(9),
                          .key = {.slo_class = rnd(CLASSES),
                                  .tenant = tenant,
                                  .priority = (int32_t)rnd(3) - 1,
                                  .bound = rnd(3) > 0,
                                  .id = id,
                                  .deadline_ns = now + rnd(5000) * (SEC / 1000) - SEC / 2}};
    r.key.hopeless = r.key.bound && now > r.key.deadline_ns;
    return r;
}

/* One walk at a random fullness; returns how many of those that it gave were taken out. */
static uint32_t walk_and_take(struct td_queue *o, uint64_t now)
{
    uint32_t n_taken = 0;
    double fullness = rnd(11) / 10.0;
    td_queue_walk(o, fullness, now);
    for (uint32_t k = 0; k < PLAY_SLOTS; k++) ref[k].given = false;
    for (uint32_t left = rnd(40); left > 0; left--) {
        uint32_t request_at = td_queue_next(o);
        ref_check(request_at, fullness, now);
        if (request_at == TD_QUEUE_NONE) break;
        ref[request_at].given = true;
        if (rnd(2)) continue;
        td_queue_remove(o, request_at);
        ref[request_at].in = false;
        n_taken++;
    }
    return n_taken;
}

static void check_all(struct td_queue *o)
{
    double work = 0;
    for (uint32_t k = 0; k < PLAY_SLOTS; k++) {
        assert_true(td_queue_has(o, k) == ref[k].in);
        if (ref[k].in && ref[k].key.slo_class <= 1) work += ref[k].work_s;
    }
    assert_true(fabs(td_queue_work_s(o, 1) - work) < 1e-6);
}

static void play(uint64_t seed)
{
    rng_state = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    struct td_queue *o = order_of(CLASSES);
    memset(ref, 0, sizeof ref);
    memset(ref_service, 0, sizeof ref_service);
    memset(ref_service_ns, 0, sizeof ref_service_ns);
    uint64_t now = SEC, next_id = 0;
    uint32_t n = 0;
    for (int i = 0; i < 3000; i++) {
        now += rnd(3) ? rnd(SEC / 100) : rnd(3000) * (SEC / 1000);
        uint32_t s = rnd(PLAY_SLOTS), t = rnd(TENANTS + 1);
        switch (rnd(6)) {
        case 0:
        case 1:
        case 2:
            if (ref[s].in) break;
            ref[s] = random_item(t, ++next_id, now);
            td_queue_insert(o, s, &ref[s].key, ref[s].work_s, now);
            n++;
            break;
        case 3:
            if (!ref[s].in) break;
            td_queue_remove(o, s);
            ref[s].in = false;
            n--;
            break;
        case 4: {
            double tokens = 1 + rnd(1000);
            td_queue_charge(o, t, tokens, now);
            ref_service[t] = ref_service_at(t, now) + tokens;
            ref_service_ns[t] = now;
            break;
        }
        default:
            n -= walk_and_take(o, now);
        }
        assert_int_equal(td_queue_n(o), n);
        check_all(o);
    }
    td_queue_destroy(o);
}

static void test_random_play(void **state)
{
    (void)state;
    const char *env = getenv("SEED");
    uint64_t seed = env ? strtoull(env, NULL, 10) : 1;
    for (uint64_t i = 0; i < 4; i++) play(seed + i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes_and_ceilings),
        cmocka_unit_test(test_within_a_tenant),
        cmocka_unit_test(test_hopeless_while_waiting),
        cmocka_unit_test(test_tenants_share),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_fairness_in_the_long_run),
        cmocka_unit_test(test_walk_under_removal),
        cmocka_unit_test(test_tenants_at_the_limit),
        cmocka_unit_test(test_many_tenants),
        cmocka_unit_test(test_wire_key),
        cmocka_unit_test(test_random_play),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
