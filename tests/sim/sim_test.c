/* The simulator itself: the same seed gives the same run, its decision log replays, faults leave
 * nothing behind, checkers catch what is planted, bad input is named, loads are what they say.
 *
 * The fault schedules are seeded; TANDEM_SIM_SEEDS says how many (default 100, 15 in the short
 * form, 150 in the long one), TANDEM_SIM_SEED which to begin with. A failing seed is printed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/random.h"
#include "sim/cache.h"
#include "sim/mix.h"
#include "sim/plan.h"
#include "sim/sim.h"

static struct td_perf perf_of(const char *spec)
{
    struct td_perf p;
    struct td_err err = {0};
    if (td_perf_load(spec, &p, &err)) print_message("%s\n", err.msg);
    assert_int_equal(err.code, TD_OK);
    return p;
}

static void fleet_of(struct td_sim_config *c, uint32_t n_prefill, uint32_t n_decode,
                     uint64_t kv_tokens)
{
    td_sim_config_init(c);
    struct td_sim_group g = {.count = n_prefill,
                             .perf = perf_of("opt-13b"),
                             .kv_tokens = kv_tokens,
                             .max_batch = 64,
                             .max_step_tokens = 512,
                             .max_seqs = 64,
                             .nic_bytes_per_s = 12.5e9};
    if (n_prefill) c->groups[c->n_groups++] = g;
    g.count = n_decode;
    g.decode = true;
    c->groups[c->n_groups++] = g;
    c->router.max_requests = 512;
    c->router.stall_ms = 5000;
}

static struct td_sim_trace load_of(double rate, uint32_t n, uint64_t seed)
{
    struct td_sim_load l = {.arrival = TD_ARRIVAL_POISSON,
                            .rate = rate,
                            .n_requests = n,
                            .isl = {TD_LENGTH_LOGNORMAL, 300, 0.8},
                            .osl = {TD_LENGTH_LOGNORMAL, 40, 0.7},
                            .seed = seed};
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    return t;
}

static struct td_sim_result run(const struct td_sim_config *c, const struct td_sim_trace *t)
{
    struct td_sim_result r;
    struct td_err err = {0};
    if (td_sim_run(c, t, NULL, NULL, &r, &err)) print_message("%s\n", err.msg);
    assert_int_equal(err.code, TD_OK);
    return r;
}

static void temp_file(const char *text, char *path, size_t bytes, const char *suffix)
{
    snprintf(path, bytes, "/tmp/tandem-sim-XXXXXX%s", suffix);
    int fd = mkstemps(path, (int)strlen(suffix));
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static void note_line(void *ctx, uint64_t line, const char *logged, const char *ours)
{
    (void)logged;
    (void)ours;
    *(uint64_t *)ctx = line;
}

/* ---- several routers ------------------------------------------------------------------------- */

/* Three routers, slow and lossy ways to the workers, a crash: each request ends once, nothing is
 * left anywhere, and each router's log replays by itself (I5). */
static void test_several_routers(void **state)
{
    (void)state;
    char paths[3][64];
    struct td_sim_config c;
    struct td_sim_fault crash = {.kind = TD_FAULT_CRASH, .worker = 3, .at_s = 4, .until_s = 8};
    fleet_of(&c, 2, 2, 3000); /* little KV: they place too much now and then */
    c.router.policy = "goodput";
    c.n_routers = 3;
    c.router_delay_ns = 20000000;
    c.router_loss = 0.02;
    c.lose = c.duplicate = 0.01;
    c.check = true;
    c.faults = &crash;
    c.n_faults = 1;
    for (int i = 0; i < 3; i++) temp_file("", paths[i], sizeof paths[i], ".log");
    c.router.decision_log = fopen(paths[0], "w");
    for (int i = 1; i < 3; i++) c.decision_logs[i] = fopen(paths[i], "w");
    struct td_sim_trace t = load_of(12, 250, 8);
    struct td_sim_result r = run(&c, &t);
    if (r.n_violations) fail_msg("%u violations: %s", r.n_violations, r.violation);
    fclose(c.router.decision_log);
    for (int i = 1; i < 3; i++) fclose(c.decision_logs[i]);
    uint64_t n_all = 0, n_ok = 0;
    for (int i = 0; i < 3; i++) {
        uint64_t n_events, n_actions, line = 0;
        struct td_err err = {0};
        if (td_port_replay(paths[i], note_line, &line, &n_events, &n_actions, &err))
            fail_msg("router %d: line %llu: %s", i, (unsigned long long)line, err.msg);
        assert_true(n_actions > 100);
        n_all += n_events;
        unlink(paths[i]);
    }
    for (uint32_t i = 0; i < r.n; i++) n_ok += r.outcomes[i].status == TD_SIM_OK;
    assert_int_equal(n_all, r.core_steps);
    assert_int_equal(n_ok, r.n);
    print_message("refused at the ticket: %llu\n", (unsigned long long)r.refused_full);
    assert_true(r.refused_full > 0);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* Four routers, 20 ms from all workers, against one router as far away. Goodput: 97 % of its. Herd:
 * routers that all saw the same workers idle would fill those, whose steps would be longer than
 * others'; p90 of TPOT says so (1.1 times, when each router looks at all workers). */
static void test_routers_herd(void **state)
{
    (void)state;
    struct td_sim_config c;
    struct td_sim_summary s[2];
    struct td_sim_load l = {.arrival = TD_ARRIVAL_POISSON,
                            .rate = 250,
                            .n_requests = 2000,
                            .isl = {TD_LENGTH_FIXED, 512, 0},
                            .osl = {TD_LENGTH_FIXED, 64, 0},
                            .seed = 3};
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    fleet_of(&c, 20, 40, 0);
    c.router.policy = "goodput";
    c.router.max_requests = 4096;
    c.router.n_classes = 1;
    c.router.classes[0] =
        (struct td_core_class){.name = "default", .ttft_ms = 400, .tpot_ms = 50, .weight = 1};
    c.router_delay_ns = 20000000;
    c.router.n_priors = c.n_groups;
    for (uint32_t i = 0; i < c.n_groups; i++) c.router.priors[i] = &c.groups[i].perf;
    for (int i = 0; i < 2; i++) {
        c.n_routers = i ? 4 : 1;
        struct td_sim_result r = run(&c, &t);
        td_sim_summarise(&c, &r, &s[i]);
        td_sim_result_free(&r);
        print_message("%u routers: attainment %.3f, TPOT p90 %.1f ms\n", c.n_routers,
                      s[i].attainment, s[i].tpot_ms.p90);
    }
    assert_true(s[0].attainment > 0.95);
    assert_true(s[1].attainment >= 0.97 * s[0].attainment);
    assert_true(s[1].tpot_ms.p90 < 1.06 * s[0].tpot_ms.p90);
    td_sim_trace_free(&t);
}

/* Two prefill and four decode workers near the rate at which one router's attainment is 90 %, 31/s:
 * four routers knew less of each other's prompts, and served 93.5 % of its good requests. */
static void test_routers_near_saturation(void **state)
{
    (void)state;
    double n_good[2] = {0, 0};
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct td_sim_config c;
        struct td_sim_load l = {.arrival = TD_ARRIVAL_POISSON,
                                .rate = 28,
                                .n_requests = 2400,
                                .isl = {TD_LENGTH_FIXED, 512, 0},
                                .osl = {TD_LENGTH_FIXED, 128, 0},
                                .seed = seed};
        struct td_sim_trace t;
        struct td_err err = {0};
        assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
        fleet_of(&c, 2, 4, 0);
        c.router.policy = "goodput";
        c.router.max_requests = 4096;
        c.router.seed = c.seed = seed;
        c.router.attainment = 0.9;
        c.router.n_classes = 1;
        c.router.classes[0] =
            (struct td_core_class){.name = "default", .ttft_ms = 400, .tpot_ms = 50, .weight = 1};
        c.router_delay_ns = 20000000;
        c.warmup_s = 20;
        c.router.n_priors = c.n_groups;
        for (uint32_t i = 0; i < c.n_groups; i++) {
            c.groups[i].max_step_tokens = 2048;
            c.groups[i].max_seqs = 1024;
            c.router.priors[i] = &c.groups[i].perf;
        }
        for (int i = 0; i < 2; i++) {
            struct td_sim_summary s;
            c.n_routers = i ? 4 : 1;
            struct td_sim_result r = run(&c, &t);
            td_sim_summarise(&c, &r, &s);
            td_sim_result_free(&r);
            n_good[i] += s.attainment;
        }
        td_sim_trace_free(&t);
    }
    print_message("good, of three runs: %.3f, four routers %.3f\n", n_good[0], n_good[1]);
    assert_true(n_good[0] > 0.92 * 3);
    /* 0.990 of them; 0.972 before prefill workers gave late prompts back */
    assert_true(n_good[1] >= 0.98 * n_good[0]);
}

/* ---- determinism, replay --------------------------------------------------------------------- */

static void test_same_seed_same_run(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 2, 2, 20000);
    c.step_noise = 0.3;
    c.lose = c.duplicate = 0.01;
    struct td_sim_trace t = load_of(8, 300, 5);
    struct td_sim_result a = run(&c, &t), b = run(&c, &t);
    assert_int_equal(a.n_events, b.n_events);
    assert_memory_equal(a.outcomes, b.outcomes, a.n * sizeof *a.outcomes);
    c.seed = 2; /* other noise, same arrivals */
    struct td_sim_result other = run(&c, &t);
    assert_memory_not_equal(a.outcomes, other.outcomes, a.n * sizeof *a.outcomes);
    td_sim_result_free(&a);
    td_sim_result_free(&b);
    td_sim_result_free(&other);
    td_sim_trace_free(&t);
}

static void test_replay(void **state)
{
    (void)state;
    char path[64], spoilt[64];
    temp_file("", path, sizeof path, ".log");
    struct td_sim_config c;
    fleet_of(&c, 2, 2, 20000);
    c.lose = 0.02;
    c.router.decision_log = fopen(path, "w");
    assert_non_null(c.router.decision_log);
    struct td_sim_trace t = load_of(8, 100, 6);
    struct td_sim_result r = run(&c, &t);
    fclose(c.router.decision_log);
    assert_true(r.failovers > 0); /* the log has something to say */
    uint64_t n_events, n_actions, line = 0;
    struct td_err err = {0};
    assert_int_equal(td_port_replay(path, note_line, &line, &n_events, &n_actions, &err), TD_OK);
    assert_int_equal(n_events, r.core_steps);
    assert_true(n_actions > 300);
    /* Another worker in one action: found, at its line. */
    FILE *in = fopen(path, "r");
    temp_file("", spoilt, sizeof spoilt, ".log");
    FILE *out = fopen(spoilt, "w");
    assert_true(in && out);
    char text[TD_CORE_LINE_MAX];
    uint64_t n = 0, changed = 0;
    while (fgets(text, sizeof text, in)) {
        n++;
        char *w = text[0] == 'a' && n > 500 && !changed ? strstr(text, "worker=") : NULL;
        if (w) {
            w[7] = w[7] == '9' ? '8' : '9';
            changed = n;
        }
        fputs(text, out);
    }
    fclose(in);
    fclose(out);
    assert_true(changed > 0);
    assert_int_equal(td_port_replay(spoilt, note_line, &line, &n_events, &n_actions, &err),
                     TD_ERR_CORRUPT);
    assert_int_equal(line, changed);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
    unlink(path);
    unlink(spoilt);
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* One random schedule; what it does is a function of the seed. */
static void schedule(uint64_t seed, struct td_sim_config *c, struct td_sim_fault *faults)
{
    struct td_random random = td_random_stream(seed, 77);
    static const char *const modes[] = {"pd", "colocated", "hybrid"};
    uint32_t n_prefill = 1 + (uint32_t)td_random_below(&random, 3),
             n_decode = 1 + (uint32_t)td_random_below(&random, 3);
    fleet_of(c, n_prefill, n_decode, 1600 + td_random_below(&random, 6000));
    char names[256], *at = names;
    snprintf(names, sizeof names, "%s", td_port_policies());
    uint32_t n_names = 1;
    for (char *p = names; *p; p++) n_names += *p == '|';
    for (uint32_t k = (uint32_t)td_random_below(&random, n_names); k > 0; k--)
        at = strchr(at, '|') + 1;
    at[strcspn(at, "|")] = 0;
    static char policy[64];
    snprintf(policy, sizeof policy, "%s", at);
    c->router.policy = policy;
    c->router.mode = modes[td_random_below(&random, 3)];
    c->router.hybrid_local_tokens = 200;
    c->router.worker_timeout_ms = 500;
    c->router.stall_ms = 2000;
    c->router.max_failovers = 50;
    c->router.seed = seed;
    c->seed = seed;
    c->rpc_ns = 1000 + td_random_below(&random, 3000000);
    c->step_noise = 0.5 * td_random_uniform(&random);
    c->lose = td_random_uniform(&random) < 0.5 ? 0.02 * td_random_uniform(&random) : 0;
    c->duplicate = td_random_uniform(&random) < 0.5 ? 0.05 * td_random_uniform(&random) : 0;
    c->cancel = td_random_uniform(&random) < 0.5 ? 0.2 * td_random_uniform(&random) : 0;
    c->overlap = td_random_uniform(&random) < 0.7;
    c->admit_at_once = td_random_uniform(&random) < 0.3;
    c->check = true;
    c->n_faults = (uint32_t)td_random_below(&random, 5);
    for (uint32_t i = 0; i < c->n_faults; i++) {
        faults[i] = (struct td_sim_fault){
            .kind = (enum td_sim_fault_kind)td_random_below(&random, 6),
            .worker = (uint32_t)td_random_below(&random, n_prefill + n_decode),
            .at_s = 8 * td_random_uniform(&random),
            .factor = 0.2 + 3 * td_random_uniform(&random)};
        /* all come back: every request can end */
        faults[i].until_s = faults[i].at_s + 0.2 + 3 * td_random_uniform(&random);
    }
    c->rpc_jitter_ns = td_random_uniform(&random) < 0.5 ? td_random_below(&random, 3000000) : 0;
    c->told_max_tokens = td_random_uniform(&random) < 0.5 ? 200 : 0;
    c->faults = faults;
}

static void test_schedules(void **state)
{
    (void)state;
    const char *seeds = getenv("TANDEM_SIM_SEEDS"), *first = getenv("TANDEM_SIM_SEED");
    uint64_t n = seeds                         ? strtoull(seeds, NULL, 10)
                 : getenv("TANDEM_TEST_SHORT") ? 15
                 : getenv("TANDEM_TEST_LONG")  ? 150
                                               : 100,
             from = first ? strtoull(first, NULL, 10) : 1;
    uint64_t n_ok = 0, n_failovers = 0, n_preempted = 0, n_cancelled = 0, n_refused = 0;
    for (uint64_t seed = from; seed < from + n; seed++) {
        struct td_sim_config c;
        struct td_sim_fault faults[8];
        schedule(seed, &c, faults);
        struct td_sim_trace t = load_of(10, 60, seed);
        for (uint32_t i = 0; i < t.n; i++) { /* as long as the smallest pool allows */
            if (t.requests[i].n_prompt > 1200) t.requests[i].n_prompt = 1200;
            if (t.requests[i].n_output > 200) t.requests[i].n_output = 200;
            if (i % 4 == 0) t.requests[i].n_output = 1;
        }
        const char *log = getenv("TANDEM_SIM_LOG");
        if (log) c.router.decision_log = fopen(log, "w");
        struct td_sim_result r = run(&c, &t);
        if (c.router.decision_log) fclose(c.router.decision_log);
        if (r.n_violations)
            print_message("TANDEM_SIM_SEED=%llu (%s, %s): %u violations, the first %s\n",
                          (unsigned long long)seed, c.router.mode, c.router.policy, r.n_violations,
                          r.violation);
        assert_int_equal(r.n_violations, 0);
        for (uint32_t i = 0; i < r.n; i++) {
            if (r.outcomes[i].status == TD_SIM_FAILED)
                print_message("TANDEM_SIM_SEED=%llu: request %u failed: code %u, %s\n",
                              (unsigned long long)seed, i, r.outcomes[i].code,
                              r.outcomes[i].reason);
            assert_int_not_equal(r.outcomes[i].status, TD_SIM_FAILED);
            n_ok += r.outcomes[i].status == TD_SIM_OK;
            n_cancelled += r.outcomes[i].status == TD_SIM_CANCELLED;
            n_refused += r.outcomes[i].status == TD_SIM_REJECTED;
        }
        n_failovers += r.failovers;
        n_preempted += r.preemptions;
        td_sim_result_free(&r);
        td_sim_trace_free(&t);
    }
    print_message("%llu schedules: %llu requests ended well, %llu cancelled, %llu refused, %llu "
                  "failovers, %llu preemptions\n",
                  (unsigned long long)n, (unsigned long long)n_ok, (unsigned long long)n_cancelled,
                  (unsigned long long)n_refused, (unsigned long long)n_failovers,
                  (unsigned long long)n_preempted);
    /* the schedules do what they are for */
    if (n >= 100) assert_true(n_failovers > 0 && n_preempted > 0 && n_cancelled > 0);
}

/* Each checker sees what it is for. */
static void test_planted_mistakes(void **state)
{
    (void)state;
    static const char *const words[TD_SIM_N_MISTAKES] = {
        [TD_SIM_LEAKED_LEG] = "KV blocks are held for nobody",
        [TD_SIM_ENDED_TWICE] = "ended a second time",
        [TD_SIM_SKIPPED_TOKEN] = "a token was skipped",
        [TD_SIM_DEAF_ROUTER] = "placed on a worker that is gone"};
    for (int mistake = TD_SIM_NO_MISTAKE; mistake < TD_SIM_N_MISTAKES; mistake++) {
        struct td_sim_config c;
        struct td_sim_fault crash = {.kind = TD_FAULT_CRASH, .worker = 1, .at_s = 1, .until_s = 3};
        fleet_of(&c, 1, 2, 20000);
        c.check = true;
        c.faults = &crash;
        c.n_faults = mistake == TD_SIM_DEAF_ROUTER; /* a crash would take a leak with it */
        c.mistake = (enum td_sim_mistake)mistake;
        struct td_sim_trace t = load_of(5, 30, 1);
        struct td_sim_result r = run(&c, &t);
        if (!mistake)
            assert_int_equal(r.n_violations, 0);
        else if (!strstr(r.violation, words[mistake]))
            fail_msg("mistake %d: %u violations, the first \"%s\"", mistake, r.n_violations,
                     r.violation);
        td_sim_result_free(&r);
        td_sim_trace_free(&t);
    }
}

/* Half of the requests end with their first token, by a stop token, and messages of different
 * streams overtake one another: decode's word that the sender has finished then comes before the
 * token itself. Nothing is computed twice. */
static void test_first_token_is_the_last(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 2, 2, 50000);
    c.check = true;
    c.told_max_tokens = 64;
    c.rpc_jitter_ns = 2000000;
    struct td_sim_trace t = load_of(8, 400, 3);
    for (uint32_t i = 0; i < t.n; i += 2) t.requests[i].n_output = 1;
    struct td_sim_result r = run(&c, &t);
    if (r.n_violations) print_message("%s\n", r.violation);
    assert_int_equal(r.n_violations, 0);
    for (uint32_t i = 0; i < r.n; i++) assert_int_equal(r.outcomes[i].status, TD_SIM_OK);
    print_message("%llu of 200 words overtook their token\n", (unsigned long long)r.overtaken);
    assert_true(r.overtaken >= 20); /* the race is there */
    assert_int_equal(r.failovers, 0);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* Told that one token is all they want, requests need no decode worker and no link: a fleet
 * whose decode workers are all gone serves them. */
static void test_one_token(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 2, 1, 50000);
    c.check = true;
    struct td_sim_fault f = {.kind = TD_FAULT_CRASH, .worker = 2, .at_s = 1};
    c.faults = &f;
    c.n_faults = 1;
    struct td_sim_trace t = load_of(8, 100, 3);
    for (uint32_t i = 0; i < t.n; i++) t.requests[i].n_output = 1;
    struct td_sim_result r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    for (uint32_t i = 0; i < r.n; i++) {
        assert_int_equal(r.outcomes[i].status, TD_SIM_OK);
        assert_int_equal(r.outcomes[i].decode, TD_SIM_NONE);
    }
    assert_int_equal(r.transfer_bytes, 0);
    assert_int_equal(r.failovers, 0);
    assert_int_equal(r.decode_tokens, 0);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* A node that is gone for good is not used again, and the others carry the load. */
static void test_crash(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 2, 2, 50000);
    c.check = true;
    struct td_sim_fault f[2] = {{.kind = TD_FAULT_CRASH, .worker = 3, .at_s = 5},
                                {.kind = TD_FAULT_SILENT, .worker = 0, .at_s = 10}};
    c.faults = f;
    c.n_faults = 2;
    struct td_sim_trace t = load_of(6, 150, 2);
    struct td_sim_result r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    uint32_t late = 0;
    for (uint32_t i = 0; i < r.n; i++) {
        assert_int_equal(r.outcomes[i].status, TD_SIM_OK);
        if (r.outcomes[i].at_ns < 5100000000ull) continue;
        late++;
        assert_int_equal(r.outcomes[i].decode, 2);
        if (r.outcomes[i].at_ns > 13000000000ull) assert_int_equal(r.outcomes[i].prefill, 1);
    }
    assert_true(late > 50 && r.failovers > 0);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* ---- KV blocks ------------------------------------------------------------------------------- */

/* A pool too small for all preempts, and all still end with every token. */
static void test_preemption(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 0, 1, 2048);
    c.router.mode = "colocated";
    c.check = true;
    struct td_sim_load l = {.arrival = TD_ARRIVAL_CONSTANT,
                            .rate = 100,
                            .n_requests = 12,
                            .isl = {TD_LENGTH_FIXED, 100, 0},
                            .osl = {TD_LENGTH_FIXED, 300, 0},
                            .seed = 1};
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    struct td_sim_result r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    assert_true(r.preemptions > 0);
    for (uint32_t i = 0; i < r.n; i++) assert_int_equal(r.outcomes[i].status, TD_SIM_OK);
    assert_true(r.outcomes[0].end_ns < r.outcomes[11].end_ns); /* the oldest is never the victim */
    /* what was thrown out was computed again */
    assert_true(r.prefill_tokens > 1200);
    td_sim_result_free(&r);
    /* And one that no pool can hold is refused, not waited for. */
    t.n = 1;
    t.requests[0].n_prompt = 3000;
    r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    assert_true(r.outcomes[0].status == TD_SIM_REJECTED || r.outcomes[0].status == TD_SIM_FAILED);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* Two prompts that share 10 of 12 blocks: the second computes the rest, and only the rest is
 * sent; a pool without room for both forgets the first. */
static void test_prefix_cache(void **state)
{
    (void)state;
    struct td_sim_config c;
    fleet_of(&c, 1, 1, 100000);
    uint64_t hashes[24];
    for (uint64_t i = 0; i < 24; i++) hashes[i] = i < 12 || i >= 22 ? i + 1 : i - 11;
    struct td_sim_request q[3] = {
        {.at_ns = 0, .n_prompt = 192, .n_output = 4, .hash_at = 0, .n_hashes = 12},
        {.at_ns = 2000000000, .n_prompt = 192, .n_output = 4, .hash_at = 12, .n_hashes = 12},
        {.at_ns = 4000000000, .n_prompt = 192, .n_output = 4, .hash_at = 0, .n_hashes = 12}};
    struct td_sim_trace t = {
        .requests = q, .n = 3, .hashes = hashes, .n_hashes = 24, .hash_tokens = 16};
    c.check = true;
    struct td_sim_result r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    assert_int_equal(r.outcomes[0].cached_tokens, 0);
    assert_int_equal(r.outcomes[1].cached_tokens, 160);
    assert_int_equal(r.outcomes[2].cached_tokens, 176); /* all but its last block: one token at
                                                           least is computed */
    assert_int_equal(r.prefill_tokens, 192 + 32 + 16);
    assert_int_equal(r.transfer_bytes, (12 + 2 + 1) * 16 * 819200ull);
    td_sim_result_free(&r);
    c.groups[0].kv_tokens = 224; /* 14 blocks: the second prompt, made longer, needs 4 beside its
                                    hits and finds 2 free */
    q[1].n_prompt = 223;
    r = run(&c, &t);
    assert_int_equal(r.outcomes[1].cached_tokens, 160); /* leaves were evicted first */
    assert_int_equal(r.outcomes[2].cached_tokens, 160);
    td_sim_result_free(&r);
    c.groups[0].kv_tokens = 100000; /* the second one's owner is another: it finds nothing, and
                                       takes nothing away */
    q[1].tenant = 1;
    q[0].tenant = q[2].tenant = 2;
    r = run(&c, &t);
    assert_int_equal(r.n_violations, 0);
    assert_int_equal(r.outcomes[1].cached_tokens, 0);
    assert_int_equal(r.outcomes[2].cached_tokens, 176);
    td_sim_result_free(&r);
    c.prefix_cache = false;
    r = run(&c, &t);
    assert_int_equal(r.prefill_tokens, 192 + 223 + 192);
    td_sim_result_free(&r);
}

/* ---- loads ----------------------------------------------------------------------------------- */

static void test_arrivals(void **state)
{
    (void)state;
    struct td_err err = {0};
    static const struct {
        enum td_sim_arrival kind;
        double cv;
    } cases[] = {{TD_ARRIVAL_POISSON, 1},
                 {TD_ARRIVAL_GAMMA, 2},
                 {TD_ARRIVAL_GAMMA, 0.5},
                 {TD_ARRIVAL_CONSTANT, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_sim_load l = {.arrival = cases[i].kind,
                                .rate = 20,
                                .cv = cases[i].cv,
                                .n_requests = 50000,
                                .isl = {TD_LENGTH_LOGNORMAL, 400, 1.5},
                                .osl = {TD_LENGTH_UNIFORM, 10, 30},
                                .seed = 3};
        struct td_sim_trace t;
        assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
        assert_int_equal(t.requests[0].at_ns, 0);
        double sum = 0, square = 0, in = 0;
        for (uint32_t k = 1; k < t.n; k++) {
            double gap = (double)(t.requests[k].at_ns - t.requests[k - 1].at_ns) / 1e9;
            sum += gap;
            square += gap * gap;
            in += t.requests[k].n_prompt;
            assert_in_range(t.requests[k].n_output, 10, 30);
        }
        double mean = sum / (t.n - 1), cv = sqrt(fmax(0, square / (t.n - 1) - mean * mean)) / mean;
        if (fabs(mean * 20 - 1) > 0.03 || fabs(cv - cases[i].cv) > 0.05 * (cases[i].cv + 0.1))
            print_message("kind %d: mean gap %.6f, cv %.4f\n", cases[i].kind, mean, cv);
        assert_true(fabs(mean * 20 - 1) < 0.03);
        assert_true(fabs(cv - cases[i].cv) < 0.05 * (cases[i].cv + 0.1));
        assert_true(fabs(in / t.n / 400 - 1) < 0.05);
        td_sim_trace_free(&t);
    }
    /* A ramp from 10 to 30/s over 100 s: 2,000 requests, three quarters of the rate's mean in
       each half as it should be. */
    struct td_sim_load l = {.arrival = TD_ARRIVAL_CONSTANT,
                            .rate = 10,
                            .ramp_to = 30,
                            .duration_s = 100,
                            .isl = {TD_LENGTH_FIXED, 8, 0},
                            .osl = {TD_LENGTH_FIXED, 8, 0},
                            .seed = 1};
    struct td_sim_trace t;
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    uint32_t half = 0;
    while (half < t.n && t.requests[half].at_ns < 50000000000ull) half++;
    assert_in_range(t.n, 1985, 2005);
    assert_in_range(half, 745, 755);
    td_sim_trace_free(&t);
}

static const struct {
    const char *suffix, *text, *want;
} trace_files[] = {
    {".csv", "", "empty"},
    {".csv", "a,b\n1,2\n", "no column \"ContextTokens\""},
    {".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.5,10\n",
     "line 2 has 2 fields"},
    {".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.5,ten,1\n",
     "line 2: ContextTokens is \"ten\""},
    {".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.5,-3,1\n",
     "ContextTokens is \"-3\""},
    {".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,10,1\n",
     "line 2: TIMESTAMP is \"yesterday\""},
    {".csv",
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,10,1\n2023-11-16 "
     "18:00:00,10,1\n",
     "line 3: TIMESTAMP goes backwards"},
    {".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"},
    {".jsonl", "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 2}\n",
     "line 1: hash_ids is missing"},
    {".jsonl",
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": "
     "[1]}\n{\"timestamp\": ",
     "line 2"},
    {".jsonl",
     "{\"timestamp\": -1, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": [1]}\n",
     "timestamp is -1"},
    {".jsonl",
     "{\"timestamp\": 0, \"input_length\": \"5\", \"output_length\": 2, \"hash_ids\": [1]}\n",
     "line 1: input_length"},
    {".jsonl",
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": [1, -7]}\n",
     "hash_ids[1]"},
    {".jsonl",
     "{\"timestamp\": 9, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": "
     "[]}\n{\"timestamp\": 3, \"input_length\": 5, "
     "\"output_length\": 2, \"hash_ids\": []}\n",
     "line 2: timestamp 3 goes backwards"},
};

static void test_trace_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof trace_files / sizeof *trace_files; i++) {
        char path[64];
        temp_file(trace_files[i].text, path, sizeof path, trace_files[i].suffix);
        struct td_sim_trace t = {0};
        struct td_err err = {0};
        td_status s = td_sim_trace_read(path, true, &t, &err);
        unlink(path);
        if (!s || !strstr(err.msg, trace_files[i].want))
            print_message("case %zu: \"%s\" lacks \"%s\"\n", i, err.msg, trace_files[i].want);
        assert_int_not_equal(s, TD_OK);
        assert_non_null(strstr(err.msg, trace_files[i].want));
    }
    char path[64];
    temp_file(
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": "
        "[1]}\n{\"timestamp\": 0, \"input_length\": 6, "
        "\"output_length\": 2, \"hash_ids\": [1, 2]}\n"
        "{\"timestamp\": 3000, \"input_length\": 7, \"output_length\": 0, \"hash_ids\": []}\n",
        path, sizeof path, ".jsonl");
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_read(path, true, &t, &err), TD_OK);
    unlink(path);
    assert_int_equal(t.n, 3);
    assert_int_equal(t.requests[1].at_ns, 1500000000); /* spread until the next time stamp */
    assert_int_equal(t.requests[1].hash_at, 1);
    assert_int_equal(t.requests[2].n_output, 1);
    td_sim_trace_free(&t);
}

static const struct {
    const char *text, *want;
} latency_files[] = {
    {"a0=1\n", "line 1: node_class is missing"},
    {"node_class=a a0=fast\n", "line 1: a0 is \"fast\""},
    {"node_class=a a0=-1\n", "a0 is \"-1\""},
    {"# nothing\n\nnode_class=a speed=1\n", "line 3: \"speed\" is unknown"},
    {"node_class=a gpus=0.5\n", "gpus is 0.5"},
    {"node_class=a kv_tokens=1e14\n", "kv_tokens is 1e+14"},
    {"# nothing\n", "has no node_class"},
};

static void test_latency_files(void **state)
{
    (void)state;
    struct td_perf p = perf_of("opt-13b:tp2"), q;
    char path[64], spec[100];
    for (size_t i = 0; i < sizeof latency_files / sizeof *latency_files; i++) {
        temp_file(latency_files[i].text, path, sizeof path, ".table");
        struct td_err err = {0};
        td_status s = td_perf_load(path, &q, &err);
        unlink(path);
        if (!s || !strstr(err.msg, latency_files[i].want))
            print_message("case %zu: \"%s\" lacks \"%s\"\n", i, err.msg, latency_files[i].want);
        assert_int_not_equal(s, TD_OK);
        assert_non_null(strstr(err.msg, latency_files[i].want));
    }
    /* The router's own table: the same coefficients give the same steps, and a class is found by
       name. */
    char text[800];
    snprintf(text, sizeof text,
             "node_class=other a0=1\nnode_class=mine a0=%.17g a1=%.17g a2=%.17g b0=%.17g b1=%.17g "
             "b2=%.17g gpus=2 kv_tokens=163008 kv_bytes=819200\n",
             p.a[0], p.a[1], p.a[2], p.b[0], p.b[1], p.b[2]);
    temp_file(text, path, sizeof path, ".table");
    snprintf(spec, sizeof spec, "%s:mine", path);
    q = perf_of(spec);
    struct td_perf_batch b = {
        .prefill_rows = 300, .attention_work = 45000, .decode_rows = 90, .context_tokens = 40000};
    assert_true(fabs(td_perf_step_s(&p, &b) / td_perf_step_s(&q, &b) - 1) < 1e-12);
    assert_true(q.gpus == 2 && q.kv_tokens == 163008 && q.kv_bytes_per_token == 819200);
    q = perf_of(path);
    assert_true(q.a[0] == 1 && q.gpus == 1);
    struct td_err err = {0};
    snprintf(spec, sizeof spec, "%s:nobody", path);
    assert_int_equal(td_perf_load(spec, &q, &err), TD_ERR_NOT_FOUND);
    assert_non_null(strstr(err.msg, "nobody"));
    unlink(path);
    /* Measured mixed steps: what prefill rows cost beside decode rows is their own coefficient. */
    temp_file("node_class=m a0=0.5 a1=0.25 b0=1 b1=2 b2=4 b3=8 b4=16\n", path, sizeof path,
              ".table");
    q = perf_of(path);
    unlink(path);
    struct td_perf_batch mixed = {.prefill_rows = 2,
                                  .attention_work = 3,
                                  .decode_rows = 1,
                                  .context_tokens = 5},
                         alone = {.prefill_rows = 2, .attention_work = 3};
    assert_true(td_perf_step_s(&q, &mixed) == 1 + 2 + 20 + 16 + 48 &&
                td_perf_step_s(&q, &alone) == 1);
    assert_int_not_equal(td_perf_load("gpt-9", &q, &err), TD_OK);
    assert_non_null(strstr(err.msg, "opt-13b"));
}

/* A sweep's own record of what it sent, with arrivals in seconds. */
static void test_sweep_trace(void **state)
{
    (void)state;
    static const struct {
        const char *text, *want;
    } bad[] = {
        {"arrived_s,num_prefill_tokens,num_decode_tokens\n1.5,10,2\n1.25,10,2\n",
         "line 3: arrived_s goes backwards"},
        {"arrived_s,num_prefill_tokens,num_decode_tokens\nsoon,10,2\n", "line 2: arrived_s"},
        {"arrived_s,num_prefill_tokens,num_decode_tokens\n-1,10,2\n", "line 2: arrived_s"},
    };
    char path[64];
    struct td_err err = {0};
    struct td_sim_trace file, t;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        temp_file(bad[i].text, path, sizeof path, ".csv");
        assert_int_not_equal(td_sim_trace_read(path, false, &file, &err), TD_OK);
        unlink(path);
        if (!strstr(err.msg, bad[i].want)) fail_msg("%s", err.msg);
    }
    temp_file("arrived_s,num_prefill_tokens,num_decode_tokens,outcome,ttft_ms,tpot_ms\n0.250000001,"
              "10,2,completed,1.5,0.2\n1.5,20,1,rejected,-1,-1\n",
              path, sizeof path, ".csv");
    assert_int_equal(td_sim_trace_read(path, false, &file, &err), TD_OK);
    unlink(path);
    struct td_sim_load l = {.arrival = TD_ARRIVAL_TRACE, .seed = 9};
    assert_int_equal(td_sim_trace_make(&l, &file, &t, &err), TD_OK);
    assert_int_equal(t.n, 2);
    assert_true(t.requests[0].at_ns == 250000001 && t.requests[1].at_ns == 1500000000 &&
                t.requests[1].n_prompt == 20 && t.requests[0].n_output == 2);
    td_sim_trace_free(&file);
    td_sim_trace_free(&t);
}

static void test_small_languages(void **state)
{
    (void)state;
    struct td_err err = {0};
    double v[8];
    uint32_t n;
    assert_int_equal(td_sim_list_parse("1,2.5,4", "rate", v, 8, &n, &err), TD_OK);
    assert_true(n == 3 && v[1] == 2.5);
    assert_int_equal(td_sim_list_parse("1:3:1", "rate", v, 8, &n, &err), TD_OK);
    assert_true(n == 3 && v[2] == 3);
    assert_int_not_equal(td_sim_list_parse("1;2", "rate", v, 8, &n, &err), TD_OK);
    struct td_sim_config c = {0};
    struct td_sim_group d = {.max_batch = 8, .max_step_tokens = 8, .max_seqs = 8};
    assert_int_equal(
        td_sim_fleet_parse("prefill:2:opt-13b:tp2, decode:3:opt-13b:slow=2:kv_tokens=9000", &d, &c,
                           &err),
        TD_OK);
    assert_int_equal(c.n_groups, 2);
    assert_int_equal(c.groups[0].perf.gpus, 2);
    assert_true(c.groups[1].decode && c.groups[1].slow == 2 && c.groups[1].kv_tokens == 9000);
    static const char *const bad_fleets[] = {"",
                                             "prefil:2:opt-13b",
                                             "decode:0:opt-13b",
                                             "decode:2",
                                             "decode:2:gpt-9",
                                             "decode:2:opt-13b:slow=-1",
                                             "decode:2:opt-13b:fast=2"};
    for (size_t i = 0; i < sizeof bad_fleets / sizeof *bad_fleets; i++) {
        if (td_sim_fleet_parse(bad_fleets[i], &d, &c, &err) == TD_OK)
            print_message("\"%s\" was taken\n", bad_fleets[i]);
        assert_int_not_equal(td_sim_fleet_parse(bad_fleets[i], &d, &c, &err), TD_OK);
    }
    struct td_sim_fault *f;
    assert_int_equal(
        td_sim_faults_parse("crash:3@10-20, slow:1@5*2.5,link:0@1-2*0.1", &f, &n, &err), TD_OK);
    assert_true(n == 3 && f[0].until_s == 20 && f[1].until_s == 0 && f[1].factor == 2.5 &&
                f[2].kind == TD_FAULT_LINK && f[2].factor == 0.1);
    free(f);
    static const char *const bad_faults[] = {"crash",      "crash:1",   "melt:1@5",  "crash:1@5-4",
                                             "slow:1@5*0", "slow:1@-5", "crash:1@5x"};
    for (size_t i = 0; i < sizeof bad_faults / sizeof *bad_faults; i++)
        assert_int_not_equal(td_sim_faults_parse(bad_faults[i], &f, &n, &err), TD_OK);
    struct td_sim_length l;
    static const char *const bad_lengths[] = {"",    "0", "-5", "nan", "lognormal:5", "uniform:9,3",
                                              "1e12"};
    for (size_t i = 0; i < sizeof bad_lengths / sizeof *bad_lengths; i++)
        assert_int_not_equal(td_sim_length_parse(bad_lengths[i], "isl", &l, &err), TD_OK);
    assert_non_null(strstr(err.msg, "isl is \"1e12\""));
}

static const char *const bad_mixes[][4] = {
    {"gold:ttft=-1", "", "", "ttft"},
    {"a b", "c=1", "", "c"},
    {"a b", "a=0", "", "share of a"},
    {"a b", "a=1 a=2", "", "a is given twice"},
    {"a b", "a", "", "\"a\" is not NAME=SHARE"},
    {"a", "", "t=x", "share of t"},
    {"a", "", "t:b=1", "slo_class is \"b\""},
    {"a", "", "t=1 t=2", "t is given twice"},
    {"a", "", "t*=1", "name \"t*\""},
    {"a b", "a:b=1", "", "a:b"},
    {"a", "", "=1", "name \"\""},
};

/* Classes and tenants: shares are kept, a seed's arrivals and lengths do not depend on the mix,
 * and the parts of a run add up to it. */
static struct td_sim_load mixed_load(void)
{
    return (struct td_sim_load){.arrival = TD_ARRIVAL_POISSON,
                                .rate = 14,
                                .n_requests = 3000,
                                .isl = {TD_LENGTH_LOGNORMAL, 300, 0.8},
                                .osl = {TD_LENGTH_LOGNORMAL, 40, 0.7},
                                .seed = 5};
}

static void test_bad_mixes(void **state)
{
    (void)state;
    struct td_sim_load l = mixed_load();
    struct td_sim_mix m;
    struct td_err err;
    for (size_t i = 0; i < sizeof bad_mixes / sizeof *bad_mixes; i++) {
        err = (struct td_err){0};
        if (td_sim_mix_parse(bad_mixes[i][0], bad_mixes[i][1], "", bad_mixes[i][2], 0, 0, &m, &l,
                             &err) == TD_OK)
            fail_msg("bad mix %zu was taken", i);
        if (!strstr(err.msg, bad_mixes[i][3])) fail_msg("bad mix %zu: %s", i, err.msg);
    }
}

/* Classes and tenants are dealt by their shares, and change neither arrivals nor lengths. */
static void check_owners(const struct td_sim_trace *t, const struct td_sim_trace *plain)
{
    uint32_t by_class[3] = {0}, by_tenant[4] = {0};
    for (uint32_t i = 0; i < t->n; i++) {
        assert_true(t->requests[i].at_ns == plain->requests[i].at_ns &&
                    t->requests[i].n_prompt == plain->requests[i].n_prompt &&
                    plain->requests[i].tenant == 0);
        by_class[t->requests[i].slo_class]++;
        by_tenant[t->requests[i].tenant]++;
        if (t->requests[i].tenant > 1)
            assert_int_equal(t->requests[i].slo_class, t->requests[i].tenant == 2);
    }
    assert_int_equal(by_tenant[0] + by_class[2], 0); /* every tenant has a share and one class
                                                        has none */
    assert_in_range(by_tenant[1], 840, 960);
    assert_in_range(by_tenant[2], 1720, 1880);
    assert_in_range(by_class[0], 460, 590); /* a quarter of acme's, and small's */
}

/* The parts add up. */
static void check_parts(const struct td_sim_config *c, const struct td_sim_result *r)
{
    struct td_sim_summary all, part;
    td_sim_summarise(c, r, &all);
    uint32_t n = 0, good = 0, rejected = 0;
    for (int32_t k = 0; k < 3; k++, n += part.n, good += part.n_good, rejected += part.n_rejected) {
        td_sim_summarise_part(c, r, k, -1, &part);
        if (k == 2) assert_int_equal(part.n, 0);
    }
    assert_true(n == all.n && good == all.n_good && rejected == all.n_rejected && good > 0);
    n = good = 0;
    for (int32_t k = 1; k <= 3; k++, n += part.n, good += part.n_good)
        td_sim_summarise_part(c, r, -1, k, &part);
    assert_true(n == all.n && good == all.n_good);
}

/* Each request is judged by its own class. */
static void check_judged(const struct td_sim_config *c, const struct td_sim_result *r)
{
    struct td_sim_summary part;
    uint32_t met[2] = {0};
    for (uint32_t i = 0; i < r->n; i++) {
        const struct td_sim_outcome *o = &r->outcomes[i];
        if (o->status != TD_SIM_OK) continue;
        double ttft = (double)(o->first_ns - o->at_ns) / 1e6,
               tpot = o->n_output > 1 ? (double)(o->end_ns - o->first_ns) / 1e6 / (o->n_output - 1)
                                      : 0;
        met[o->slo_class] += o->slo_class ? ttft <= 4000 : ttft <= 400 && tpot <= 40;
    }
    for (int32_t k = 0; k < 2; k++) {
        td_sim_summarise_part(c, r, k, -1, &part);
        if (part.n_good > met[k] || part.n_good + 5 < met[k])
            fail_msg("class %d: %u good, its own objectives say %u", k, part.n_good, met[k]);
    }
}

static void test_mix(void **state)
{
    (void)state;
    struct td_sim_load l = mixed_load();
    struct td_sim_mix m;
    struct td_err err;
    struct td_sim_trace plain, t;
    l.n_classes = l.n_tenants = 0;
    assert_int_equal(td_sim_trace_make(&l, NULL, &plain, &err), TD_OK);
    if (td_sim_mix_parse("gold:ttft=400,tpot=40,weight=4 bulk:ttft=4000 none", "gold=1, bulk=3", "",
                         "acme=3 flood:bulk=6 small:gold=1", 0, 0, &m, &l, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    assert_int_equal(t.n, plain.n);
    check_owners(&t, &plain);
    struct td_sim_config c;
    fleet_of(&c, 2, 2, 0);
    c.router.max_requests = 4096;
    memcpy(c.router.classes, m.classes, sizeof m.classes);
    c.router.n_classes = m.n_classes;
    c.ttft_s = 1e-9; /* of no consequence then */
    struct td_sim_result r = run(&c, &t);
    check_parts(&c, &r);
    check_judged(&c, &r);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
    td_sim_trace_free(&plain);
}

/* Configurations that cannot be are refused with their field. */
static void test_bad_configs(void **state)
{
    (void)state;
    struct td_sim_trace t = load_of(5, 5, 1);
    struct td_sim_result r;
    struct td_err err = {0};
    struct td_sim_config c;
    fleet_of(&c, 1, 1, 0);
    c.router.policy = "luck";
    assert_int_not_equal(td_sim_run(&c, &t, NULL, NULL, &r, &err), TD_OK);
    assert_non_null(strstr(err.msg, "luck"));
    fleet_of(&c, 1, 1, 0);
    c.router.mode = "both";
    assert_int_not_equal(td_sim_run(&c, &t, NULL, NULL, &r, &err), TD_OK);
    assert_non_null(strstr(err.msg, "mode is \"both\""));
    fleet_of(&c, 1, 1, 0);
    c.n_groups = 0;
    assert_int_not_equal(td_sim_run(&c, &t, NULL, NULL, &r, &err), TD_OK);
    fleet_of(&c, 1, 1, 0);
    c.groups[0].perf.kv_tokens = 0;
    assert_int_not_equal(td_sim_run(&c, &t, NULL, NULL, &r, &err), TD_OK);
    assert_non_null(strstr(err.msg, "kv_tokens"));
    td_sim_trace_free(&t);
}

/* ---- policies -------------------------------------------------------------------------------- */

static struct td_sim_summary policy_point(const char *policy, double rate, double cv)
{
    struct td_sim_config c;
    td_sim_config_init(&c);
    struct td_sim_group g = {.count = 2,
                             .perf = perf_of("opt-13b"),
                             .max_batch = 256,
                             .max_step_tokens = 2048,
                             .max_seqs = 1024,
                             .nic_bytes_per_s = 12.5e9};
    c.groups[0] = c.groups[1] = g;
    c.groups[1].count = 4;
    c.groups[1].decode = true;
    c.n_groups = 2;
    c.router.policy = policy;
    c.router.classes[0] =
        (struct td_core_class){.name = "default", .ttft_ms = 400, .tpot_ms = 50, .weight = 1};
    c.router.n_classes = 1;
    c.router.priors[0] = c.router.priors[1] = &g.perf;
    c.router.n_priors = 2;
    c.router.link_bytes_per_s = 12.5e9;
    c.router.link_tau_s = 2e-5;
    c.warmup_s = 20;
    c.grace_s = 20;
    struct td_sim_summary runs[3], s;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct td_sim_load l = {.arrival = TD_ARRIVAL_GAMMA,
                                .rate = rate,
                                .cv = cv,
                                .duration_s = 70,
                                .isl = {TD_LENGTH_LOGNORMAL, 750, 0.7},
                                .osl = {TD_LENGTH_LOGNORMAL, 210, 0.8},
                                .seed = seed};
        struct td_sim_trace t;
        struct td_err err = {0};
        assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
        c.seed = c.router.seed = seed;
        struct td_sim_result r = run(&c, &t);
        td_sim_summarise(&c, &r, &runs[seed - 1]);
        td_sim_result_free(&r);
        td_sim_trace_free(&t);
    }
    td_sim_pool(runs, 3, &s);
    return s;
}

/* What the router is for: at a load that the fleet carries, in bursts, and at 1.6 times the
 * first load, no policy gives more goodput than the default one (but for what the same seeds
 * leave to chance); under overload four of five requests are still good, where policies that
 * refuse nobody lose most. */
static void test_policies(void **state)
{
    (void)state;
    static const struct {
        double rate, cv, least, slack;
    } loads[] = {{12, 1, 0.95, 0.02}, {10, 2, 0.85, 0.03}, {20, 1, 0.80, 0.02}};
    bool brief = getenv("TANDEM_TEST_SHORT");
    for (size_t i = brief ? 2 : 0; i < sizeof loads / sizeof *loads; i++) {
        struct td_sim_summary ours = policy_point("goodput", loads[i].rate, loads[i].cv);
        if (!(ours.attainment >= loads[i].least))
            print_message("goodput at %g/s, CV %g: %.4f\n", loads[i].rate, loads[i].cv,
                          ours.attainment);
        assert_true(ours.attainment >= loads[i].least);
        char names[256], *save = NULL;
        snprintf(names, sizeof names, "%s", td_port_policies());
        for (char *name = strtok_r(names, "|", &save); name; name = strtok_r(NULL, "|", &save)) {
            if (!strcmp(name, "goodput") ||
                (brief && strcmp(name, "least_token") && strcmp(name, "conductor")))
                continue;
            struct td_sim_summary other = policy_point(name, loads[i].rate, loads[i].cv);
            if (!(ours.goodput >= other.goodput * (1 - loads[i].slack)))
                print_message("at %g/s, CV %g: goodput %.3f, %s %.3f requests/s\n", loads[i].rate,
                              loads[i].cv, ours.goodput, name, other.goodput);
            assert_true(ours.goodput >= other.goodput * (1 - loads[i].slack));
            if (loads[i].rate > 15 && strcmp(name, "conductor"))
                assert_true(other.attainment < ours.attainment - 0.2);
        }
    }
    if (brief) return;
    double peak = 0, last = 0; /* and more load does not make it worse: at twice what is served
                                  well, within a tenth of the best */
    for (double rate = 12; rate <= 24; rate += 4) {
        last = policy_point("goodput", rate, 1).goodput;
        peak = fmax(peak, last);
    }
    print_message("goodput at 24/s %.2f, at its best %.2f requests/s\n", last, peak);
    assert_true(last >= 0.9 * peak);
}

/* ---- the planner ----------------------------------------------------------------------------- */

static double correlation(const double *x, const double *y, int n)
{
    double mx = 0, my = 0, xx = 0, yy = 0, xy = 0;
    for (int i = 0; i < n; i++) mx += x[i] / n, my += y[i] / n;
    for (int i = 0; i < n; i++)
        xx += (x[i] - mx) * (x[i] - mx), yy += (y[i] - my) * (y[i] - my),
            xy += (x[i] - mx) * (y[i] - my);
    return xy / sqrt(xx * yy);
}

/* Prefills (arrival to first token) and decodes (first token to end) under way at each second,
 * of the requests that were served. The load steps from a quarter of what the fleet carries to
 * twice as much. */
enum { CALM_S = 40, SETTLE_S = 10, STEP_END_S = 140 };
static void step_load(const char *policy, uint64_t seed, double *p, double *d)
{
    struct td_sim_config c;
    fleet_of(&c, 2, 4, 0);
    c.router.policy = policy;
    c.router.max_requests = 4096;
    for (uint32_t i = 0; i < c.n_groups; i++)
        c.groups[i].max_batch = 256, c.groups[i].max_seqs = 1024,
        c.groups[i].max_step_tokens = 2048;
    c.router.classes[0] =
        (struct td_core_class){.name = "default", .ttft_ms = 400, .tpot_ms = 50, .weight = 1};
    c.router.n_classes = 1;
    c.seed = c.router.seed = seed;
    struct td_sim_load l = {.arrival = TD_ARRIVAL_POISSON,
                            .rate = 24,
                            .duration_s = STEP_END_S,
                            .isl = {TD_LENGTH_LOGNORMAL, 750, 0.7},
                            .osl = {TD_LENGTH_LOGNORMAL, 210, 0.8},
                            .seed = seed};
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    uint32_t n = 0;
    for (uint32_t i = 0; i < t.n; i++)
        if (t.requests[i].at_ns >= CALM_S * 1000000000ull || i % 8 == 0)
            t.requests[n++] = t.requests[i];
    t.n = n;
    struct td_sim_result r = run(&c, &t);
    for (int s = 0; s < STEP_END_S; s++) {
        uint64_t at = (uint64_t)s * 1000000000ull;
        p[s] = d[s] = 0;
        for (uint32_t i = 0; i < r.n; i++) {
            const struct td_sim_outcome *o = &r.outcomes[i];
            if (o->status != TD_SIM_OK) continue;
            p[s] += o->at_ns <= at && at < o->first_ns;
            d[s] += o->first_ns <= at && at < o->end_ns;
        }
    }
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
}

/* Overload makes prefill and decode swing against each other where requests are refused by what
 * is running now (Mooncake, FAST'25, section 7). Over the step their loads must go together;
 * after it they may part a little: a request stays some 10 s, so 90 s are some nine samples.
 * Over 45 seeds a run has -0.25 with a deviation of 0.12, so that the mean of five falls below
 * the bound of -0.3 one time in six by chance alone, and that of thirty, with a deviation of
 * 0.02, does not. */
enum { OSCILLATION_RUNS = 30 };
static void test_no_oscillation(void **state)
{
    (void)state;
    double p[STEP_END_S], d[STEP_END_S], after = 0;
    for (int s = 0; s < STEP_END_S; s++)
        p[s] = 30 + 20 * sin(s * 0.6), d[s] = 200 - 100 * sin(s * 0.6 + 0.3);
    assert_true(correlation(p, d, STEP_END_S) < -0.9); /* what it would look like */
    bool brief = getenv("TANDEM_TEST_SHORT");
    for (uint64_t seed = 1; seed <= (brief ? 1 : OSCILLATION_RUNS); seed++) {
        step_load("goodput", seed, p, d);
        double whole = correlation(p, d, STEP_END_S);
        after += correlation(p + CALM_S + SETTLE_S, d + CALM_S + SETTLE_S,
                             STEP_END_S - CALM_S - SETTLE_S) /
                 OSCILLATION_RUNS;
        if (!(whole >= 0))
            print_message("seed %llu: correlation of prefill and decode load %.3f\n",
                          (unsigned long long)seed, whole);
        assert_true(whole >= 0);
    }
    print_message("after the step: correlation %.3f\n", after);
    assert_true(brief || after > -0.3);
}

static struct td_plan_query flip_query(double ttft, double tpot)
{
    return (struct td_plan_query){.tables = {"opt-13b", "opt-13b:tp2"},
                                  .n_tables = 2,
                                  .isl = {TD_LENGTH_FIXED, 512, 0},
                                  .osl = {TD_LENGTH_FIXED, 65, 0},
                                  .ttft_ms = ttft,
                                  .tpot_ms = tpot,
                                  .attainment = 0.9,
                                  .gpus = 3,
                                  .policy = "least_token",
                                  .max_batch = 256,
                                  .max_step_tokens = 2048,
                                  .top = 16,
                                  .seeds = 3,
                                  .cv = 1,
                                  .tolerance = 0.03,
                                  .pd = true,
                                  .colocated = true};
}

static double per_gpu(const struct td_plan_row *rows, uint32_t n, const char *prefill,
                      const char *decode, uint32_t n_prefill, uint32_t n_decode)
{
    for (uint32_t i = 0; i < n; i++)
        if (!strcmp(rows[i].prefill, prefill) && !strcmp(rows[i].decode, decode) &&
            rows[i].n_prefill == n_prefill && rows[i].n_decode == n_decode && rows[i].simulated)
            return rows[i].at.rate / rows[i].gpus;
    fail_msg("%uP %s + %uD %s was not simulated", n_prefill, prefill, n_decode, decode);
    return 0;
}

/* The two pairs of objectives for which DistServe's model turns the best layout round: relaxed
 * TTFT and tight TPOT want one GPU each, tight TTFT and relaxed TPOT want two for prefill.
 * Disaggregation is ahead of the same GPUs colocated under both. */
static void test_plan_flip(void **state)
{
    (void)state;
    if (!getenv("TANDEM_TEST_LONG"))
        skip(); /* four searches for a figure, half of this program's time: make check-long has it,
                   and test_plan_target has the search too */
    static const double slo[2][2] = {{400, 40}, {200, 100}};
    double one[2], two[2], colocated[2];
    for (int i = 0; i < 2; i++) {
        struct td_err err = {0};
        struct td_plan_row *rows;
        uint32_t n;
        struct td_plan_query q = flip_query(slo[i][0], slo[i][1]);
        assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_OK);
        two[i] = per_gpu(rows, n, "opt-13b:tp2", "opt-13b", 1, 1);
        for (uint32_t k = 1; k < n; k++) /* best first */
            if (rows[k].simulated)
                assert_true(rows[k - 1].at.rate / rows[k - 1].cost >=
                            rows[k].at.rate / rows[k].cost);
        assert_true(rows[0].pareto);
        colocated[i] = per_gpu(rows, n, "opt-13b", "opt-13b", 0, 3);
        free(rows);
        q.gpus = 2;
        assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_OK);
        one[i] = per_gpu(rows, n, "opt-13b", "opt-13b", 1, 1);
        free(rows);
    }
    if (!(one[0] > two[0] && two[1] > one[1]))
        print_message("400/40: %.3f and %.3f; 200/100: %.3f and %.3f per GPU\n", one[0], two[0],
                      one[1], two[1]);
    assert_true(one[0] > two[0]);
    assert_true(two[1] > one[1]);
    for (int i = 0; i < 2; i++) {
        if (!(fmax(one[i], two[i]) > colocated[i]))
            print_message("%g/%g: colocated %.3f per GPU\n", slo[i][0], slo[i][1], colocated[i]);
        assert_true(fmax(one[i], two[i]) > colocated[i]);
    }
}

static void test_plan_target(void **state)
{
    (void)state;
    struct td_plan_query q = flip_query(200, 100);
    q.gpus = 16;
    q.top = 4;
    q.target_rate = 30;
    struct td_plan_row *rows;
    uint32_t n;
    struct td_err err = {0};
    assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_OK);
    assert_true(n > 0 && rows[0].simulated && rows[0].at.ci_low >= 0.9);
    assert_in_range(rows[0].gpus, 4, 8); /* 3.7 to 7.2 requests/s for each GPU */
    /* nothing smaller would do */
    for (uint32_t i = 1; i < n; i++)
        assert_true(rows[i].gpus <= rows[0].gpus && rows[i].at.ci_low < 0.9);
    free(rows);
    q.gpus = 3;
    assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_ERR_NOT_FOUND);
    q.target_rate = 0;
    q.ttft_ms = 20; /* less than a prefill alone */
    assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_ERR_NOT_FOUND);
    q.ttft_ms = 200;
    q.prefix = 512;
    assert_int_equal(td_plan_search(&q, NULL, NULL, &rows, &n, &err), TD_ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_seed_same_run),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_several_routers),
        cmocka_unit_test(test_routers_herd),
        cmocka_unit_test(test_routers_near_saturation),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_first_token_is_the_last),
        cmocka_unit_test(test_one_token),
        cmocka_unit_test(test_planted_mistakes),
        cmocka_unit_test(test_crash),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_prefix_cache),
        cmocka_unit_test(test_arrivals),
        cmocka_unit_test(test_trace_files),
        cmocka_unit_test(test_sweep_trace),
        cmocka_unit_test(test_latency_files),
        cmocka_unit_test(test_small_languages),
        cmocka_unit_test(test_bad_configs),
        cmocka_unit_test(test_bad_mixes),
        cmocka_unit_test(test_mix),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_no_oscillation),
        cmocka_unit_test(test_plan_flip),
        cmocka_unit_test(test_plan_target),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
