/* common/engine/engine: whatever happens to a sequence - batch, chunks, prefix hits, preemption,
 * import, a neighbour's cancel, a failover - its tokens and logprobs are those of a run alone
 * (I1), and every block and sequence comes back. A small random model: two layers, block size
 * 16. So with an engine of several ranks (processes here), whose KV other engines take over
 * whatever their number of ranks. With TANDEM_ENGINE_TEST_DEVICE=cuda the engine runs on the
 * device of TANDEM_CUDA_LIBRARY: one engine at a time. With TANDEM_ENGINE_TEST_KV_DTYPE its KV is
 * of that type. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/device_memory.h"
#include "common/base/random.h"
#include "common/base/sanitizers.h"
#include "common/model/comm.h"
#include "common/engine/engine.h"
#include "common/engine/ranks.h"

enum { BS = 16, VOCAB = 128, MAX_LEN = 256, N = 24, MAX_OUT = 64 };

static char config_path[64], config4_path[64]; /* 2 and 4 KV heads */

static int write_one(char *path, size_t path_bytes, int n_kv_heads)
{
    char text[1024];
    int n = snprintf(text, sizeof text,
                     "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_"
                     "size\":64,\"intermediate_size\":128,"
                     "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":%d,"
                     "\"head_dim\":16,\"vocab_size\":128,"
                     "\"max_position_embeddings\":256,\"rms_norm_eps\":1e-05,\"rope_theta\":10000."
                     "0,\"tie_word_embeddings\":false,"
                     "\"hidden_act\":\"silu\",\"torch_dtype\":\"float32\"}",
                     n_kv_heads);
    snprintf(path, path_bytes, "/tmp/engine_test_XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0) return -1;
    ssize_t written = write(fd, text, (size_t)n);
    close(fd);
    return written == n ? 0 : -1;
}

static int write_config(void **state)
{
    (void)state;
    return write_one(config_path, sizeof config_path, 2) ||
           write_one(config4_path, sizeof config4_path, 4);
}

static int remove_config(void **state)
{
    (void)state;
    return unlink(config_path) | unlink(config4_path);
}

struct shape {
    int32_t n_blocks, max_seqs, max_batch, chunk, n_threads;
    bool prefix, no_graphs, host_sampling;
    int32_t n_ranks, n_kv_heads; /* 0: 1, 2 */
};

static const char *device(void) { return getenv("TANDEM_ENGINE_TEST_DEVICE"); }

static enum td_dtype kv_dtype(void)
{
    const char *name = getenv("TANDEM_ENGINE_TEST_KV_DTYPE");
    return !name ? TD_F32 : strcmp(name, "int8") == 0 ? TD_INT8 : TD_FP8;
}

/* A device that has no others: only the emulated one does. */
static bool has_no_ranks(void) { return device() && !strstr(getenv("TANDEM_CUDA_LIBRARY"), "emu"); }

/* The other ranks of an engine are children of this process. */
struct group {
    struct td_engine *e;
    struct td_comm_segment segment;
    struct td_comm *comm;
    pid_t pids[TD_COMM_MAX_RANKS];
    struct td_ranks started; /* on a device: this program again, since a copy of a process that
                                has used a device is of no use */
};

static struct group groups[4];

static struct group *group_of(const struct td_engine *e)
{
    int i = 0;
    while (groups[i].e != e) i++;
    return &groups[i];
}

static void start_ranks(struct td_engine_config *c, int32_t n_ranks, struct group *g)
{
    struct td_err err = {0};
    if (device()) {
        char text[256];
        snprintf(text, sizeof text, "%s %d %d %d %s", c->random_config, c->max_seqs, c->max_batch,
                 c->max_step_tokens, c->kv_memory);
        setenv("TD_ENGINE_TEST_RANK", text, 1);
        if (td_ranks_start(n_ranks, 1, &g->started, &err)) fail_msg("%s", err.msg);
        for (int32_t r = 1; r < n_ranks; r++) g->pids[r] = g->started.pids[r];
        c->comm = g->started.comm;
        return;
    }
    struct td_comm_config cfg = {.timeout_ms = 30000};
    if (td_comm_segment_create(n_ranks, 4096, &g->segment, &err)) fail_msg("%s", err.msg);
    for (int32_t r = 1; r < n_ranks; r++) {
        g->pids[r] = fork();
        if (g->pids[r] == 0) {
            td_status s = td_comm_open(&g->segment, r, &cfg, &c->comm, &err);
            if (!s) s = td_engine_follow(c, &err);
            _exit(s == TD_OK ? 0 : s == TD_ERR_PEER ? 7 : 1);
        }
        td_comm_segment_expect(&g->segment, r, g->pids[r]);
    }
    if (td_comm_open(&g->segment, 0, &cfg, &g->comm, &err)) fail_msg("%s", err.msg);
    c->comm = g->comm;
}

/* How a rank ended; one that does not within 5 s is killed. */
static int wait_rank(pid_t pid)
{
    int status = 0;
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), 5000);
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (td_now_ns() > deadline) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        struct timespec tick = {.tv_nsec = 1000000};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, NULL);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void end_ranks(struct group *g)
{
    if (g->started.comm) {
        memset(g->started.pids, 0, sizeof g->started.pids); /* waited for */
        td_ranks_stop(&g->started);
        memset(g, 0, sizeof *g);
        return;
    }
    td_comm_close(g->comm);
    td_comm_segment_close(&g->segment);
    memset(g, 0, sizeof *g);
}

static void close_engine(struct td_engine *e)
{
    td_engine_check(e, NULL);
    struct group *g = td_engine_n_ranks(e) > 1 ? group_of(e) : NULL;
    int32_t n_ranks = td_engine_n_ranks(e);
    td_engine_close(e);
    for (int32_t r = 1; r < n_ranks; r++) assert_int_equal(wait_rank(g->pids[r]), 0);
    if (g) end_ranks(g);
}

static struct td_engine *open_engine(struct shape s)
{
    char kv[32];
    int32_t n_kv = s.n_kv_heads ? s.n_kv_heads : 2,
            copies = s.n_ranks > n_kv ? s.n_ranks / n_kv : 1;
    /* each device's own; or all ranks' together */
    int32_t heads =
        device() && s.n_ranks > 1 ? n_kv / (s.n_ranks < n_kv ? s.n_ranks : n_kv) : n_kv * copies;
    /* layers x K,V x kv heads x a head's rows of 16 in a block */
    snprintf(kv, sizeof kv, "%d",
             s.n_blocks * 2 * 2 * heads * (int)td_kv_head_bytes(kv_dtype(), BS, 16));
    struct td_engine_config c = {.random_config = n_kv == 4 ? config4_path : config_path,
                                 .dtype = "f32",
                                 .kv_dtype = td_dtype_name(kv_dtype()),
                                 .n_threads = s.n_threads ? s.n_threads : 1,
                                 .kv_memory = kv,
                                 .block_size = BS,
                                 .max_seqs = s.max_seqs,
                                 .max_batch = s.max_batch,
                                 .max_step_tokens = s.chunk,
                                 .prefix_cache = s.prefix,
                                 .quiet = true,
                                 .device = device(),
                                 .deterministic = true,
                                 .no_graphs = s.no_graphs,
                                 .host_sampling = s.host_sampling};
    struct td_engine *e = NULL;
    struct td_err err = {0};
    struct group *g = group_of(NULL);
    if (s.n_ranks > 1) start_ranks(&c, s.n_ranks, g);
    if (td_engine_open(&c, &e, &err)) fail_msg("%s", err.msg);
    if (s.n_ranks > 1) g->e = e;
    struct td_kv_pool_stats st;
    td_kv_pool_stats(td_engine_kv(e), &st);
    assert_int_equal(st.n_blocks, s.n_blocks);
    return e;
}

static void assert_empty(struct td_engine *e)
{
    struct td_kv_pool_stats st;
    td_kv_pool_stats(td_engine_kv(e), &st);
    assert_int_equal(st.n_held, 0);
    assert_int_equal(st.n_free + st.n_cached, st.n_blocks);
    assert_int_equal(td_engine_seqs_live(e), 0);
}

static int32_t n_held(struct td_engine *e)
{
    struct td_kv_pool_stats st;
    td_kv_pool_stats(td_engine_kv(e), &st);
    return st.n_held;
}

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

/* ---- requests, and a driver that does what a worker does ------------------------------------- */

struct request {
    int32_t prompt[MAX_LEN], n_prompt, max_tokens, stop_token;
    uint64_t seed;
    float temperature;
    bool is_scored; /* the log-probabilities of its prompt are wanted */
    /* results */
    int32_t out[MAX_OUT], n_out;
    float logprobs[MAX_OUT];
    enum td_finish finish;
};

/* ThreadSanitizer's short form: one thread races with nobody, and ranks are processes, which it
 * does not see beside each other; ranks_test has them as threads. */
static bool only_threads(void)
{
#ifdef TD_WITH_TSAN
    return getenv("TANDEM_TEST_SHORT") != NULL;
#else
    return false;
#endif
}

static struct request requests[N], oracle[N];

/* Lengths on both sides of every block boundary; a third share a prefix of several blocks. */
static void make_requests(void)
{
    static const int32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100};
    static const int32_t outs[] = {1, 2, 15, 16, 17, 33};
    rng_state = 11;
    int32_t shared[MAX_LEN];
    for (int i = 0; i < MAX_LEN; i++) shared[i] = (int32_t)rnd(VOCAB);
    memset(requests, 0, sizeof requests);
    for (int i = 0; i < N; i++) {
        struct request *q = &requests[i];
        q->n_prompt = lengths[i % 12];
        for (int32_t k = 0; k < q->n_prompt; k++)
            q->prompt[k] = i % 3 == 0 ? shared[k] : (int32_t)rnd(VOCAB);
        q->max_tokens = outs[(i + i / 12) % 6];
        q->seed = 1000 + (uint64_t)i;
        q->temperature = i % 2 ? 1.0f : 0.0f;
        q->stop_token = -1;
    }
}

static struct td_seq *start(struct td_engine *e, struct request *q, uint64_t priority)
{
    struct td_seq *seq = td_engine_seq_get(e);
    assert_non_null(seq);
    int32_t tokens[MAX_LEN];
    memcpy(tokens, q->prompt, (size_t)q->n_prompt * sizeof *tokens);
    /* n_out > 0: a failover goes on */
    memcpy(tokens + q->n_prompt, q->out, (size_t)q->n_out * sizeof *tokens);
    struct td_sampling s = {.temperature = q->temperature,
                            .top_p = 1,
                            .repetition_penalty = 1.1f,
                            .frequency_penalty = 0.2f,
                            .seed = q->seed,
                            .n_logprobs = 0};
    struct td_err err = {0};
    if (td_engine_seq_set(e, seq, tokens, q->n_prompt + q->n_out, q->n_prompt, &s, &q->stop_token,
                          q->stop_token >= 0, q->max_tokens, &err))
        fail_msg("%s", err.msg);
    if (q->is_scored && q->n_out == 0)
        assert_int_equal(td_engine_seq_set_prompt_logprobs(seq, 0, &err), TD_OK);
    seq->sched.priority = priority;
    seq->owner = q;
    return seq;
}

static void stop(struct td_engine *e, struct td_seq *seq)
{
    td_engine_release(e, seq);
    td_engine_seq_put(e, seq);
}

struct driver {
    struct td_engine *e;
    struct td_seq *running[N], *waiting[N], *preempted[N];
    struct td_step_item items[N];
    int32_t n_running, n_waiting;
    uint64_t n_preemptions, n_steps;
    int32_t cancel_permille; /* of sequences, each turn */
    bool greedy_admission;   /* no headroom for those that run: preemptions for sure */
};

static void insert(struct td_seq **list, int32_t *n, struct td_seq *seq)
{
    int32_t i = (*n)++;
    for (; i > 0 && seq->sched.priority < list[i - 1]->sched.priority; i--) list[i] = list[i - 1];
    list[i] = seq;
}

static void take_out(struct td_seq **list, int32_t *n, const struct td_seq *seq)
{
    int32_t i = 0;
    while (list[i] != seq) {
        i++;
        assert_true(i < *n);
    }
    memmove(list + i, list + i + 1, (size_t)(*n - i - 1) * sizeof *list);
    --*n;
}

static void take_token(const struct td_step_item *it)
{
    struct request *q = it->seq->owner;
    assert_true(q->n_out < MAX_OUT);
    q->out[q->n_out] = it->out.token;
    q->logprobs[q->n_out++] = it->out.logprob;
    q->finish = it->seq->finish;
    assert_int_equal(it->seq->sched.n_tokens, q->n_prompt + q->n_out);
}

static void turn(struct driver *d)
{
    while (d->n_waiting > 0 && td_engine_admit(d->e, d->waiting[0], false,
                                               d->greedy_admission ? 0 : d->n_running) == TD_OK) {
        struct td_seq *seq = d->waiting[0];
        take_out(d->waiting, &d->n_waiting, seq);
        insert(d->running, &d->n_running, seq);
    }
    int32_t n_preempted = 0;
    int32_t n =
        td_engine_plan(d->e, d->running, d->n_running, d->items, d->preempted, &n_preempted);
    assert_in_range(n, 0, td_engine_max_batch(d->e));
    d->n_running -= n_preempted;
    d->n_preemptions += (uint64_t)n_preempted;
    for (int32_t i = 0; i < n_preempted; i++) {
        assert_int_equal(d->preempted[i]->sched.n_blocks, 0);
        assert_int_equal(d->preempted[i]->sched.phase, TD_SEQ_IDLE);
        insert(d->waiting, &d->n_waiting, d->preempted[i]);
    }
    struct td_err err = {0};
    if (n && td_engine_step(d->e, d->items, n, &err)) fail_msg("%s", err.msg);
    d->n_steps++;
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(d->items[i].status, TD_OK);
        if (!d->items[i].sampled) continue;
        take_token(&d->items[i]);
        if (!d->items[i].seq->finish) continue;
        take_out(d->running, &d->n_running, d->items[i].seq);
        stop(d->e, d->items[i].seq);
    }
}

/* Runs all; at most `concurrency` at once. A request that is cancelled starts again from what it
 * has (a failover), so all finish. */
static void run_all(struct driver *d, int32_t concurrency)
{
    int32_t next = 0;
    while (next < N || d->n_running + d->n_waiting > 0) {
        while (next < N && d->n_running + d->n_waiting < concurrency) {
            insert(d->waiting, &d->n_waiting, start(d->e, &requests[next], (uint64_t)next));
            next++;
        }
        turn(d);
        assert_true(d->n_steps < 20000); /* else: a livelock */
        if (d->n_running > 0 && rnd(1000) < (uint32_t)d->cancel_permille) {
            struct td_seq *victim = d->running[rnd((uint32_t)d->n_running)];
            struct request *q = victim->owner;
            uint64_t priority = victim->sched.priority;
            take_out(d->running, &d->n_running, victim);
            stop(d->e, victim);
            insert(d->waiting, &d->n_waiting, start(d->e, q, priority));
        }
    }
}

static void assert_as_alone(void)
{
    for (int i = 0; i < N; i++) {
        assert_int_equal(requests[i].n_out, oracle[i].n_out);
        assert_memory_equal(requests[i].out, oracle[i].out,
                            (size_t)oracle[i].n_out * sizeof *oracle[i].out);
        assert_memory_equal(requests[i].logprobs, oracle[i].logprobs,
                            (size_t)oracle[i].n_out * sizeof *oracle[i].logprobs);
        assert_int_equal(requests[i].finish, oracle[i].finish);
    }
}

static void make_oracle_of(int32_t n_ranks, int32_t n_kv_heads)
{
    make_requests();
    struct driver d = {.e = open_engine((struct shape){.n_blocks = 64,
                                                       .max_seqs = 1,
                                                       .max_batch = 1,
                                                       .chunk = 256,
                                                       .n_ranks = n_ranks,
                                                       .n_kv_heads = n_kv_heads})};
    run_all(&d, 1);
    assert_int_equal(d.n_preemptions, 0);
    assert_empty(d.e);
    close_engine(d.e);
    for (int i = 0; i < N; i++) {
        assert_int_equal(requests[i].n_out, requests[i].max_tokens);
        assert_int_equal(requests[i].finish, TD_FINISH_LENGTH);
    }
    memcpy(oracle, requests, sizeof oracle);
    make_requests();
}

static void make_oracle(void) { make_oracle_of(1, 2); }

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_batch_choose(void **state)
{
    (void)state;
    static const struct {
        int32_t remaining[5];
        bool decode[5];
        int32_t n, max_items, max_tokens, want[5], want_items;
    } cases[] = {
        {{1, 1, 1}, {true, true, true}, 3, 8, 8, {1, 1, 1}, 3},
        {{1, 1, 1}, {true, true, true}, 3, 2, 8, {1, 1, 0}, 2},
        /* decodes first, then the oldest prefill takes the rest */
        {{100, 1, 50}, {false, true, false}, 3, 8, 64, {63, 1, 0}, 2},
        {{10, 1, 50}, {false, true, false}, 3, 8, 64, {10, 1, 50}, 3},
        {{10, 1, 50}, {false, true, false}, 3, 2, 64, {10, 1, 0}, 2},
        /* decodes fill the budget */
        {{10, 1, 1, 1}, {false, true, true, true}, 4, 8, 3, {0, 1, 1, 1}, 3},
        {{7}, {false}, 1, 1, 1, {1}, 1},
        {{0}, {false}, 0, 4, 4, {0}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t got[5] = {-1, -1, -1, -1, -1};
        assert_int_equal(td_batch_choose(cases[i].remaining, cases[i].decode, cases[i].n,
                                         cases[i].max_items, cases[i].max_tokens, got),
                         cases[i].want_items);
        for (int32_t k = 0; k < cases[i].n; k++) assert_int_equal(got[k], cases[i].want[k]);
    }
}

static void test_as_alone(void **state)
{
    (void)state;
    static const struct {
        struct shape shape;
        int32_t concurrency, cancel_permille;
        bool must_preempt;
    } cases[] = {
        {{.n_blocks = 400, .max_seqs = N, .max_batch = N, .chunk = 256}, N, 0, false},
        /* far more running than a batch holds */
        {{.n_blocks = 400, .max_seqs = N, .max_batch = 3, .chunk = 7}, N, 0, false},
        /* chunks that end on block boundaries */
        {{.n_blocks = 400, .max_seqs = N, .max_batch = 8, .chunk = 16, .prefix = true},
         8,
         0,
         false},
        {{.n_blocks = 30, .max_seqs = N, .max_batch = N, .chunk = 33}, N, 0, true},
        {{.n_blocks = 30, .max_seqs = N, .max_batch = N, .chunk = 64, .prefix = true}, N, 0, true},
        /* hardly more than the longest alone */
        {{.n_blocks = 9, .max_seqs = N, .max_batch = 4, .chunk = 20, .prefix = true}, N, 0, true},
        {{.n_blocks = 30, .max_seqs = N, .max_batch = 5, .chunk = 19, .prefix = true}, N, 60, true},
        {{.n_blocks = 400,
          .max_seqs = N,
          .max_batch = 16,
          .chunk = 64,
          .n_threads = 2,
          .prefix = true},
         16,
         30,
         false},
    };
    make_oracle();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* the others have each of their sizes and switches, too */
        if (getenv("TANDEM_TEST_SHORT") && (i == 0 || i == 4 || i == 5)) continue;
        if (only_threads() && cases[i].shape.n_threads < 2) continue;
        make_requests();
        struct shape shape = cases[i].shape;
        shape.no_graphs = i % 3 == 1; /* of a device: neither matters */
        shape.host_sampling = i % 4 == 2;
        struct driver d = {.e = open_engine(shape),
                           .cancel_permille = cases[i].cancel_permille,
                           .greedy_admission = cases[i].must_preempt};
        run_all(&d, cases[i].concurrency);
        assert_as_alone();
        assert_empty(d.e);
        if (cases[i].must_preempt) assert_true(d.n_preemptions > 0);
        struct td_kv_pool_stats st;
        td_kv_pool_stats(td_engine_kv(d.e), &st);
        if (cases[i].shape.prefix)
            assert_true(st.n_prefix_hit_tokens > 0);
        else
            assert_int_equal(st.n_cached, 0);
        close_engine(d.e);
    }
}

/* A sequence that fills the context to its last position, in a pool that holds exactly that. */
/* A chunk whose prompt is scored is computed before its step, which has no row of it then: rows of
 * decodes behind it, which sequences with more urgent requests have, are a step of decodes all the
 * same. */
static void test_a_scored_prompt_before_decodes(void **state)
{
    (void)state;
    struct driver d = {.e = open_engine((struct shape){
                           .n_blocks = 64, .max_seqs = 4, .max_batch = 4, .chunk = 16})};
    struct request alone[4];
    make_requests();
    for (int i = 0; i < 4; i++) {
        struct request *q = &requests[i];
        q->n_prompt = i ? 5 : 100;
        for (int32_t k = 0; k < q->n_prompt; k++) q->prompt[k] = (int32_t)rnd(VOCAB);
        q->max_tokens = 33;
        insert(d.waiting, &d.n_waiting, start(d.e, q, 0));
        while (d.n_waiting + d.n_running) turn(&d);
        alone[i] = *q;
        q->n_out = 0;
        q->is_scored = i == 0;
    }
    for (int i = 1; i < 4; i++) insert(d.waiting, &d.n_waiting, start(d.e, &requests[i], 1));
    while (!requests[1].n_out || !requests[2].n_out || !requests[3].n_out) turn(&d);
    insert(d.waiting, &d.n_waiting, start(d.e, &requests[0], 0));
    while (d.n_waiting + d.n_running) turn(&d);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(requests[i].n_out, 33);
        assert_memory_equal(requests[i].out, alone[i].out, sizeof alone[i].out);
    }
    assert_empty(d.e);
    close_engine(d.e);
}

static void test_to_the_last_position(void **state)
{
    (void)state;
    struct driver d = {.e = open_engine((struct shape){
                           .n_blocks = 4, .max_seqs = 2, .max_batch = 2, .chunk = 64})};
    assert_int_equal(td_engine_max_len(d.e), 4 * BS); /* the pool bounds it, not the model's 256 */
    make_requests();
    struct request *q = &requests[9];
    for (int32_t n_prompt = 1; n_prompt < 4 * BS; n_prompt += 21) {
        q->n_prompt = n_prompt;
        q->n_out = 0;
        q->max_tokens = 4 * BS - n_prompt;
        insert(d.waiting, &d.n_waiting, start(d.e, q, 0));
        while (d.n_running + d.n_waiting > 0) turn(&d);
        assert_int_equal(q->n_out, 4 * BS - n_prompt);
        assert_int_equal(q->finish, TD_FINISH_LENGTH);
        assert_empty(d.e);
    }
    assert_int_equal(d.n_preemptions, 0);
    close_engine(d.e);
}

static void test_stop_token_is_the_last(void **state)
{
    (void)state;
    make_oracle();
    struct driver d = {.e = open_engine((struct shape){
                           .n_blocks = 64, .max_seqs = 2, .max_batch = 2, .chunk = 256})};
    struct request *q = &requests[5];
    assert_true(oracle[5].n_out > 2);
    for (int32_t at = 0; at < 3; at++) { /* at 0: the first token is the last */
        q->n_out = 0;
        q->stop_token = oracle[5].out[at];
        int32_t want = 0;
        while (oracle[5].out[want] != q->stop_token) want++;
        insert(d.waiting, &d.n_waiting, start(d.e, q, 0));
        while (d.n_running + d.n_waiting > 0) turn(&d);
        assert_int_equal(q->n_out, want + 1);
        assert_int_equal(q->finish, TD_FINISH_STOP);
    }
    assert_empty(d.e);
    close_engine(d.e);
}

static void test_admission(void **state)
{
    (void)state;
    struct td_engine *e = open_engine(
        (struct shape){.n_blocks = 6, .max_seqs = 4, .max_batch = 4, .chunk = 64, .prefix = true});
    make_requests();
    requests[1].n_prompt = 2 * BS;     /* 2 blocks */
    requests[2].n_prompt = 2 * BS + 1; /* 3 */
    requests[1].max_tokens = requests[2].max_tokens = requests[4].max_tokens = 2;
    requests[4].n_prompt = 5 * BS + 1; /* 6: all */
    struct td_seq *a = start(e, &requests[1], 1), *b = start(e, &requests[2], 2),
                  *all = start(e, &requests[4], 3);
    /* alone, headroom does not matter */
    assert_int_equal(td_engine_admit(e, all, false, 100), TD_OK);
    assert_int_equal(n_held(e), 6);
    assert_int_equal(td_engine_admit(e, a, false, 0), TD_ERR_AGAIN);
    assert_int_equal(a->sched.n_blocks, 0);
    td_engine_release(e, all);
    assert_int_equal(n_held(e), 0);
    /* beside another it does */
    assert_int_equal(td_engine_admit(e, a, false, 1), TD_OK);
    /* 4 free, 3 wanted, 2 to stay */
    assert_int_equal(td_engine_admit(e, b, false, 2), TD_ERR_AGAIN);
    assert_int_equal(n_held(e), 2);
    assert_int_equal(td_engine_admit(e, b, false, 1), TD_OK);
    assert_int_equal(n_held(e), 5);
    td_engine_release(e, a);
    td_engine_release(e, b);
    td_engine_seq_put(e, a);
    td_engine_seq_put(e, b);
    td_engine_seq_put(e, all);
    /* every sequence handed out, then none */
    struct td_seq *s[4];
    for (int i = 0; i < 4; i++) assert_non_null(s[i] = td_engine_seq_get(e));
    assert_null(td_engine_seq_get(e));
    for (int i = 0; i < 4; i++) td_engine_seq_put(e, s[i]);
    assert_empty(e);
    close_engine(e);
}

/* A refused admission gives back the prefix hits it had taken; a hit never covers the last
 * token; hits are of full blocks. */
static void test_prefix_hits(void **state)
{
    (void)state;
    make_oracle();
    struct driver d = {
        .e = open_engine((struct shape){
            .n_blocks = 8, .max_seqs = 4, .max_batch = 4, .chunk = 256, .prefix = true})};
    struct request *q = &requests[9]; /* i % 3 == 0: the shared prefix; 64 tokens = exactly 4
                                         blocks */
    q->n_prompt = 4 * BS;
    q->max_tokens = 2;
    insert(d.waiting, &d.n_waiting, start(d.e, q, 0));
    while (d.n_running + d.n_waiting > 0) turn(&d);
    int32_t first[2] = {q->out[0], q->out[1]};
    q->n_out = 0;
    struct td_seq *again = start(d.e, q, 0);
    assert_int_equal(td_engine_admit(d.e, again, false, 0), TD_OK);
    assert_int_equal(again->sched.n_cached, 3 * BS); /* the fourth block holds the last token: it
                                                        is computed */
    struct td_seq *third = start(d.e, &requests[9], 1);
    /* 1 wanted beside 3 hits, 4 free, 4 to stay */
    assert_int_equal(td_engine_admit(d.e, third, true, 4), TD_ERR_AGAIN);
    assert_int_equal(n_held(d.e), 4);
    assert_int_equal(td_engine_admit(d.e, third, true, 3), TD_OK);
    assert_int_equal(n_held(d.e), 5); /* three are shared */
    for (int i = 0; i < 3; i++) assert_int_equal(third->blocks[i], again->blocks[i]);
    assert_int_not_equal(third->blocks[3], again->blocks[3]);
    stop(d.e, third); /* an import that never came: the shared ones stay, its own is published by
                         nobody */
    d.running[d.n_running++] = again;
    while (d.n_running + d.n_waiting > 0) turn(&d);
    assert_memory_equal(q->out, first, sizeof first);
    assert_empty(d.e);
    close_engine(d.e);
}

/* One head in a block of `parts`: the plain formula of engine_ranks.h. */
static const uint8_t *kv_head(const uint8_t *block, int32_t parts, int32_t n_kv_heads,
                              int32_t layer, int32_t kv, int32_t head)
{
    int32_t heads = n_kv_heads / parts;
    return block +
           ((((size_t)(head / heads) * 2 + (size_t)layer) * 2 + (size_t)kv) * (size_t)heads +
            (size_t)(head % heads)) *
               td_kv_head_bytes(kv_dtype(), BS, 16);
}

/* The row of a token, and its scale, are the same in both. */
static bool same_row(const uint8_t *from, const uint8_t *to, int32_t token)
{
    size_t row = 16 * td_dtype_bytes(kv_dtype()), at = (size_t)token * row,
           scale = td_kv_scales_at(kv_dtype(), BS, 16) + (size_t)token * sizeof(float);
    return memcmp(from + at, to + at, row) == 0 &&
           (!td_dtype_is_coded(kv_dtype()) || memcmp(from + scale, to + scale, 4) == 0);
}

/* The blocks of src, at p, are those of dst, at d: every byte of every head, in each copy. */
static void assert_same_kv(struct td_engine *p, const struct td_seq *src, struct td_engine *d,
                           const struct td_seq *dst, int32_t first, int32_t n_kv_heads)
{
    size_t bytes = td_kv_pool_layout(td_engine_kv(p))->block_bytes;
    struct td_kv_pool_stats st;
    td_kv_pool_stats(td_engine_kv(d), &st);
    int32_t copies = td_engine_n_ranks(d) / td_engine_kv_parts(d);
    for (int32_t b = first; b < dst->sched.n_blocks; b++)
        for (int32_t copy = 0; copy < copies; copy++) {
            const uint8_t *from = td_kv_pool_block(td_engine_kv(p), src->blocks[b]);
            const uint8_t *to = td_kv_pool_block(td_engine_kv(d), dst->blocks[b]) +
                                (size_t)copy * (size_t)st.n_blocks * bytes;
            for (int32_t i = 0; i < 2 * 2 * n_kv_heads * BS; i++) {
                int32_t layer = i & 1, kv = i >> 1 & 1, head = (i >> 2) % n_kv_heads,
                        token = (i >> 2) / n_kv_heads;
                if (!same_row(kv_head(from, td_engine_kv_parts(p), n_kv_heads, layer, kv, head),
                              kv_head(to, td_engine_kv_parts(d), n_kv_heads, layer, kv, head),
                              token))
                    fail_msg(
                        "%d to %d ranks: block %d copy %d layer %d %c head %d token %d differs",
                        td_engine_n_ranks(p), td_engine_n_ranks(d), b, copy, layer, "KV"[kv], head,
                        token);
            }
        }
}

/* What a hand-over does, with memcpy for a transfer: prefill on one engine, decode on the other;
 * then a preemption there. */
static void import_all(struct shape of_p, struct shape of_d, int32_t max_running, bool preempt)
{
    struct td_engine *p = open_engine(of_p);
    struct driver d = {.e = open_engine(of_d)};
    int32_t n_kv_heads = of_p.n_kv_heads ? of_p.n_kv_heads : 2;
    assert_true(td_engine_layout_hash(p) == td_engine_layout_hash(d.e));
    size_t block_bytes = td_kv_pool_layout(td_engine_kv(p))->block_bytes;
    for (int i = 0; i < N; i++) {
        struct request *q = &requests[i];
        struct td_seq *dst = start(d.e, q, (uint64_t)i), *src = start(p, q, 0);
        assert_int_equal(td_engine_admit(d.e, dst, true, 0), TD_OK);
        assert_int_equal(dst->sched.phase, TD_SEQ_IMPORT);
        assert_int_equal(td_engine_admit(p, src, false, 0), TD_OK);
        assert_int_equal(src->sched.n_blocks, dst->sched.n_blocks);
        struct td_step_item item;
        do {
            struct td_seq *none[1];
            int32_t n_none = 0;
            struct td_err err = {0};
            assert_int_equal(td_engine_plan(p, &src, 1, &item, none, &n_none), 1);
            if (td_engine_step(p, &item, 1, &err)) fail_msg("%s", err.msg);
        } while (!item.sampled);
        take_token(&item);
        for (int32_t b = dst->sched.n_cached / BS; b < dst->sched.n_blocks; b++)
            memcpy(td_kv_pool_block(td_engine_kv(d.e), dst->blocks[b]),
                   td_kv_pool_block(td_engine_kv(p), src->blocks[b]), block_bytes);
        struct td_err err = {0};
        int32_t hit = dst->sched.n_cached / BS;
        if (td_engine_kv_arrange(d.e, dst->blocks + hit, dst->sched.n_blocks - hit,
                                 td_engine_kv_parts(p), &err))
            fail_msg("%s", err.msg);
        if (td_engine_kv_check(d.e, dst->blocks + hit, dst->sched.n_blocks - hit,
                               q->n_prompt - hit * BS, &err))
            fail_msg("%s", err.msg);
        assert_same_kv(p, src, d.e, dst, hit, n_kv_heads);
        stop(p, src);
        td_engine_imported(d.e, dst, item.out.token);
        assert_int_equal(dst->finish, q->max_tokens == 1 ? TD_FINISH_LENGTH : TD_FINISH_NONE);
        if (dst->finish) {
            stop(d.e, dst);
            continue;
        }
        if (preempt && i % 5 == 4) { /* preempted right after: it is computed again here, the
                                        first token stays */
            td_engine_release(d.e, dst);
            insert(d.waiting, &d.n_waiting, dst);
        } else {
            insert(d.running, &d.n_running, dst);
        }
        while (d.n_running + d.n_waiting > max_running) turn(&d);
    }
    while (d.n_running + d.n_waiting > 0) turn(&d);
    assert_empty(p);
    assert_empty(d.e);
    close_engine(p);
    close_engine(d.e);
}

static void test_import(void **state)
{
    (void)state;
    if (device()) skip(); /* it takes two engines */
    make_oracle();
    import_all(
        (struct shape){.n_blocks = 64, .max_seqs = 4, .max_batch = 4, .chunk = 24, .prefix = true},
        (struct shape){.n_blocks = 64, .max_seqs = N, .max_batch = 8, .chunk = 64, .prefix = true},
        3, true);
    assert_as_alone();
}

/* An engine of several ranks keeps the same promise, against itself alone. KV heads split (2 of
 * 2 or 4, 4 of 4) and shared (4 of 2). */
static void test_ranks_as_alone(void **state)
{
    (void)state;
    if (has_no_ranks()) skip();
    static const struct {
        struct shape shape;
        int32_t concurrency, cancel_permille;
        bool must_preempt;
    } cases[] = {
        {{.n_blocks = 30, .max_seqs = N, .max_batch = 5, .chunk = 19, .prefix = true, .n_ranks = 2},
         N,
         60,
         true},
        {{.n_blocks = 400, .max_seqs = N, .max_batch = N, .chunk = 33, .n_ranks = 4}, N, 0, false},
        {{.n_blocks = 400,
          .max_seqs = N,
          .max_batch = 16,
          .chunk = 64,
          .prefix = true,
          .n_ranks = 4,
          .n_kv_heads = 4},
         16,
         30,
         false},
    };
    for (size_t i = 0; i < (device() ? 1 : sizeof cases / sizeof *cases); i++) {
        /* emulated ranks are slow */
        make_oracle_of(cases[i].shape.n_ranks, cases[i].shape.n_kv_heads);
        struct driver d = {.e = open_engine(cases[i].shape),
                           .cancel_permille = cases[i].cancel_permille,
                           .greedy_admission = cases[i].must_preempt};
        assert_int_equal(td_engine_n_ranks(d.e), cases[i].shape.n_ranks);
        run_all(&d, cases[i].concurrency);
        assert_as_alone();
        assert_empty(d.e);
        if (cases[i].must_preempt) assert_true(d.n_preemptions > 0);
        close_engine(d.e);
    }
}

/* Every pair of degrees: the KV is the sender's to the byte. Equal ones: the tokens are those of
 * one engine of that degree, whatever happens to a request. Unequal ones: they are the same from
 * run to run, in any batch (a preemption computes the prompt anew, at the receiver's degree, and
 * may change them). */
static void test_every_pair_of_degrees(void **state)
{
    (void)state;
    if (device() || only_threads()) skip();
    static const int32_t degrees[] = {1, 2, 4};
    for (int k = 0; k < 9; k++) {
        struct shape p = {.n_blocks = 64,
                          .max_seqs = 4,
                          .max_batch = 4,
                          .chunk = 24,
                          .n_ranks = degrees[k / 3],
                          .n_kv_heads = 4};
        struct shape d = {.n_blocks = 64,
                          .max_seqs = N,
                          .max_batch = 8,
                          .chunk = 64,
                          .n_ranks = degrees[k % 3],
                          .n_kv_heads = 4};
        bool equal = p.n_ranks == d.n_ranks;
        if (equal) {
            make_oracle_of(p.n_ranks, 4);
        } else {
            make_requests();
            import_all(p, d, 0, false); /* each alone */
            memcpy(oracle, requests, sizeof oracle);
            make_requests();
            p.chunk = 100;
            p.prefix = d.prefix = true;
        }
        import_all(p, d, 5, equal);
        assert_as_alone();
    }
    /* a receiver whose ranks share heads; a sender whose ranks do */
    for (int k = 0; k < 2; k++) {
        make_requests();
        import_all(
            (struct shape){
                .n_blocks = 64, .max_seqs = 4, .max_batch = 4, .chunk = 24, .n_ranks = k ? 4 : 1},
            (struct shape){
                .n_blocks = 64, .max_seqs = N, .max_batch = 8, .chunk = 64, .n_ranks = k ? 1 : 4},
            3, false);
    }
    struct td_err err = {0};
    int32_t block = 0;
    struct td_engine *e =
        open_engine((struct shape){.n_blocks = 4, .max_seqs = 2, .max_batch = 2, .chunk = 64});
    assert_int_equal(td_engine_kv_arrange(e, &block, 1, 4, &err), TD_ERR_INVALID);
    assert_string_equal(
        err.msg, "KV in 4 parts: a model of 2 KV heads is in 1, 2, 4, 8 or 16 that divide them");
    assert_int_equal(td_engine_kv_arrange(e, &block, 1, 0, &err), TD_ERR_INVALID);
    close_engine(e);
}

/* A block of the pool, wherever that is, as a transfer reads and writes it. */
static void copy_block(struct td_engine *e, int32_t block_id, uint8_t *host, size_t bytes, bool get)
{
    const struct td_device_memory *m = td_engine_device_memory(e);
    uint8_t *block = td_kv_pool_block(td_engine_kv(e), block_id);
    struct td_err err = {0};
    void *p = NULL;
    uint64_t ticket;
    if (!m) {
        memcpy(get ? host : block, get ? block : host, bytes);
        return;
    }
    if (m->alloc_pinned(m->ctx, bytes, &p, &err)) fail_msg("%s", err.msg);
    uint8_t *pinned = p;
    if (!get) memcpy(pinned, host, bytes);
    struct td_device_run run = {
        .to = get ? pinned : block, .from = get ? block : pinned, .bytes = bytes};
    if (m->copy(m->ctx, get ? TD_COPY_TO_HOST : TD_COPY_TO_DEVICE, &run, 1, &ticket, &err) ||
        m->wait(m->ctx, ticket, &err))
        fail_msg("%s", err.msg);
    if (get) memcpy(host, pinned, bytes);
    m->release_pinned(m->ctx, pinned);
}

/* When a step is over, the KV of every rank is there: a transfer may send it at once. */
static void test_kv_is_there_after_a_step(void **state)
{
    (void)state;
    if (has_no_ranks()) skip();
    struct td_engine *e = open_engine((struct shape){
        .n_blocks = 64, .max_seqs = 1, .max_batch = 1, .chunk = BS, .n_ranks = 4, .n_kv_heads = 4});
    size_t bytes = td_kv_pool_layout(td_engine_kv(e))->block_bytes;
    uint8_t *seen = malloc(6 * bytes), *one = malloc(bytes);
    assert_true(seen && one);
    make_requests();
    for (int k = 0; k < (device() ? 4 : 40); k++) {
        struct td_seq *seq = start(e, &requests[11], 0); /* 100 tokens: six full blocks */
        assert_int_equal(td_engine_admit(e, seq, false, 0), TD_OK);
        memset(one, 0xff, bytes);
        for (int i = 0; i < seq->sched.n_blocks; i++)
            copy_block(e, seq->blocks[i], one, bytes, false);
        for (size_t i = 0; i < 6; i++) {
            struct td_step_item item = {.seq = seq, .n_new = BS};
            struct td_err err = {0};
            if (td_engine_step(e, &item, 1, &err)) fail_msg("%s", err.msg);
            copy_block(e, seq->blocks[i], seen + i * bytes, bytes, true);
        }
        struct td_step_item item = {.seq = seq, .n_new = 100 - 6 * BS};
        struct td_err err = {0};
        if (td_engine_step(e, &item, 1, &err)) fail_msg("%s", err.msg);
        for (size_t i = 0; i < 6; i++) {
            copy_block(e, seq->blocks[i], one, bytes, true);
            if (memcmp(seen + i * bytes, one, bytes))
                fail_msg("try %d: block %zu was not complete after its step", k, i);
        }
        stop(e, seq);
    }
    free(seen);
    free(one);
    close_engine(e);
}

/* A rank that is killed takes the engine along, and the other ranks. */
static void test_rank_dies(void **state)
{
    (void)state;
    if (has_no_ranks()) skip();
    for (int how = 0; how < 2; how++) {
        struct td_engine *e = open_engine((struct shape){
            .n_blocks = 64, .max_seqs = 4, .max_batch = 4, .chunk = 16, .n_ranks = 4});
        struct group *g = group_of(e);
        struct td_err err = {0};
        make_requests();
        struct td_seq *seq = start(e, &requests[11], 0);
        assert_int_equal(td_engine_admit(e, seq, false, 0), TD_OK);
        assert_int_equal(td_engine_check(e, &err), TD_OK);
        struct td_step_item item = {.seq = seq, .n_new = 16};
        assert_int_equal(td_engine_step(e, &item, 1, &err), TD_OK);
        kill(g->pids[2], SIGKILL);
        uint64_t start_ns = td_now_ns();
        td_status s;
        if (how == 0) { /* in a step */
            item = (struct td_step_item){.seq = seq, .n_new = 16};
            s = td_engine_step(e, &item, 1, &err);
        } else { /* idle: seen by a look */
            while (!(s = td_engine_check(e, &err)) &&
                   td_now_ns() - start_ns < 2000 * TD_NS_PER_MS) {
            }
        }
        assert_int_equal(s, TD_ERR_PEER);
        assert_true(td_now_ns() - start_ns < 2000 * TD_NS_PER_MS);
        char want[64];
        snprintf(want, sizeof want, "rank 2 (pid %d) is dead", (int)g->pids[2]);
        assert_string_equal(err.msg, want);
        assert_int_equal(wait_rank(g->pids[1]), 7);
        assert_int_equal(wait_rank(g->pids[3]), 7);
        assert_int_equal(wait_rank(g->pids[2]), -1);
        stop(e, seq);
        td_engine_close(e);
        end_ranks(g);
    }
}

/* What one rank cannot do, all refuse, in its words. */
static void test_rank_cannot_open(void **state)
{
    (void)state;
    if (device()) skip();
    struct td_engine_config c = {.random_config = config_path,
                                 .dtype = "f32",
                                 .n_threads = 1,
                                 .kv_memory = "1MiB",
                                 .block_size = BS,
                                 .max_seqs = 2,
                                 .max_batch = 2,
                                 .max_step_tokens = 16,
                                 .quiet = true};
    struct group *g = group_of(NULL);
    struct td_engine *e = NULL;
    struct td_err err = {0};
    struct td_engine_config theirs = c;
    theirs.dtype = "f33";
    start_ranks(&theirs, 2, g);
    c.comm = g->comm;
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_PEER);
    assert_non_null(strstr(err.msg, "rank 1: dtype is f33, must be auto, f32, bf16 or one of "));
    assert_int_equal(wait_rank(g->pids[1]), 1);
    end_ranks(g);
    /* and the other way round */
    theirs = c;
    theirs.comm = NULL;
    start_ranks(&theirs, 2, g);
    c.comm = g->comm;
    c.kv_memory = "1";
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_INVALID);
    assert_int_equal(wait_rank(g->pids[1]), 7);
    end_ranks(g);
}

static void test_refusals(void **state)
{
    (void)state;
    /* longest: 64 */
    struct td_engine *e =
        open_engine((struct shape){.n_blocks = 4, .max_seqs = 2, .max_batch = 2, .chunk = 64});
    int32_t tokens[MAX_LEN] = {1, 2, 3}, stops[TD_MAX_STOP_TOKENS + 1] = {0};
    struct td_sampling ok = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}, hot = ok;
    hot.temperature = -1;
    static const int32_t out_of_range[] = {1, VOCAB, 3}, negative[] = {1, -5, 3};
    const struct {
        const int32_t *tokens;
        int32_t n_tokens, n_prompt;
        const struct td_sampling *sampling;
        int32_t n_stops;
        int64_t max_tokens;
        const char *want;
    } cases[] = {
        {tokens, 0, 1, &ok, 0, 1, "tokens is empty"},
        {tokens, 64, 64, &ok, 0, 1,
         "tokens has 64 ids, must be below the longest sequence this worker can hold, 64"},
        {tokens, 3, 0, &ok, 0, 1, "n_prompt is 0, must be 1..3"},
        {tokens, 3, 4, &ok, 0, 1, "n_prompt is 4, must be 1..3"},
        {tokens, 3, -1, &ok, 0, 1, "n_prompt is -1"},
        {tokens, 3, 3, &ok, 0, 0, "max_tokens is 0, must be 1..61"},
        {tokens, 3, 3, &ok, 0, 62, "max_tokens is 62, must be 1..61"},
        {tokens, 3, 3, &ok, 0, INT64_MAX, "max_tokens is 9223372036854775807"},
        {tokens, 3, 1, &ok, 0, 2, "nothing is left to do"},
        {out_of_range, 3, 3, &ok, 0, 1, "tokens[1] is 128, must be 0..127"},
        {negative, 3, 3, &ok, 0, 1, "tokens[1] is -5"},
        {tokens, 3, 3, &hot, 0, 1, "temperature"},
        {tokens, 3, 3, &ok, TD_MAX_STOP_TOKENS + 1, 1, "stop_token_ids has 129 ids, limit 128"},
    };
    struct td_seq *seq = td_engine_seq_get(e);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_err err = {0};
        td_status s = td_engine_seq_set(e, seq, cases[i].tokens, cases[i].n_tokens,
                                        cases[i].n_prompt, cases[i].sampling, stops,
                                        cases[i].n_stops, cases[i].max_tokens, &err);
        assert_int_equal(s, TD_ERR_INVALID);
        if (!strstr(err.msg, cases[i].want))
            fail_msg("case %zu says \"%s\", not \"%s\"", i, err.msg, cases[i].want);
    }
    struct td_err err = {0};
    static const int32_t no_stops[] = {VOCAB, -1, 1 << 30}; /* min_tokens keeps them from winning */
    for (size_t i = 0; i < sizeof no_stops / sizeof *no_stops; i++) {
        stops[1] = no_stops[i];
        assert_int_equal(td_engine_seq_set(e, seq, tokens, 3, 3, &ok, stops, 2, 1, &err),
                         TD_ERR_INVALID);
        assert_non_null(strstr(err.msg, "stop_token_ids[1] is "));
    }
    stops[1] = 0;
    assert_int_equal(
        td_engine_seq_set(e, seq, tokens, 63, 63, &ok, stops, TD_MAX_STOP_TOKENS, 1, &err), TD_OK);
    td_engine_seq_put(e, seq);
    assert_empty(e);
    close_engine(e);
}

/* A device that is lost in a step: that step and all later ones say so in the device's words;
 * sequences and blocks still come back. */
static void test_device_lost(void **state)
{
    (void)state;
    if (!device() || !strstr(getenv("TANDEM_CUDA_LIBRARY"), "deferred")) skip();
    make_requests();
    setenv("TD_DEFERRED_FAIL_AT", "3", 1);
    struct driver d = {.e = open_engine((struct shape){
                           .n_blocks = 64, .max_seqs = 2, .max_batch = 2, .chunk = 256})};
    unsetenv("TD_DEFERRED_FAIL_AT");
    requests[4].max_tokens = 10;
    struct td_seq *seq = start(d.e, &requests[4], 0);
    insert(d.waiting, &d.n_waiting, seq);
    turn(&d);
    turn(&d);
    assert_int_equal(seq->sched.n_tokens, requests[4].n_prompt + 2);
    for (int i = 0; i < 2; i++) {
        struct td_err err = {0};
        int32_t n_preempted = 0;
        assert_int_equal(
            td_engine_plan(d.e, d.running, d.n_running, d.items, d.preempted, &n_preempted), 1);
        assert_int_equal(td_engine_step(d.e, d.items, 1, &err), TD_ERR_DEVICE);
        if (!strstr(err.msg, "lost for this process")) fail_msg("says \"%s\"", err.msg);
        assert_int_equal(seq->sched.n_tokens, requests[4].n_prompt + 2);
        assert_int_equal(seq->sched.n_computed, seq->sched.n_tokens - 1);
    }
    stop(d.e, seq);
    assert_empty(d.e);
    close_engine(d.e);
}

/* A share of the memory is at most what the sequences can use; a size is what was said. */
static void test_pool_of_a_share(void **state)
{
    (void)state;
    /* tokens x layers x K,V x kv heads x head_dim x f32 */
    enum { PER_SEQ = MAX_LEN / BS + 2, BLOCK_BYTES = BS * 2 * 2 * 2 * 16 * 4 };
    static const struct {
        const char *kv_memory;
        int32_t max_seqs, max_model_len, least, most;
    } cases[] = {
        {"25%", 4, 0, 4 * PER_SEQ, 4 * PER_SEQ},
        {"25%", 4, 64, 4 * (64 / BS + 2), 4 * (64 / BS + 2)},
        {"0.01%", 1024, 0, 2, 1024 * PER_SEQ - 1}, /* the share is less: it counts */
        {"8MiB", 4, 0, (8 << 20) / BLOCK_BYTES, (8 << 20) / BLOCK_BYTES},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_engine_config c = {.random_config = config_path,
                                     .dtype = "f32",
                                     .n_threads = 1,
                                     .kv_memory = cases[i].kv_memory,
                                     .block_size = BS,
                                     .max_seqs = cases[i].max_seqs,
                                     .max_model_len = cases[i].max_model_len,
                                     .max_batch = 1,
                                     .max_step_tokens = 16,
                                     .quiet = true,
                                     .device = device()};
        struct td_engine *e = NULL;
        struct td_err err = {0};
        struct td_kv_pool_stats st;
        if (td_engine_open(&c, &e, &err)) fail_msg("%s", err.msg);
        td_kv_pool_stats(td_engine_kv(e), &st);
        if (st.n_blocks < cases[i].least || st.n_blocks > cases[i].most)
            fail_msg("case %zu: %d blocks, must be %d..%d", i, st.n_blocks, cases[i].least,
                     cases[i].most);
        close_engine(e);
    }
}

static void test_device_refusals(void **state)
{
    (void)state;
    struct td_engine_config c = {.random_config = config_path,
                                 .dtype = "f32",
                                 .n_threads = 1,
                                 .kv_memory = "1MiB",
                                 .block_size = BS,
                                 .max_seqs = 1,
                                 .max_batch = 1,
                                 .max_step_tokens = 16,
                                 .quiet = true,
                                 .device = "rocm"};
    struct td_engine *e = NULL;
    struct td_err err = {0};
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "device is \"rocm\", must be cpu or cuda"));
    c.device = "cuda";
    c.ops = "ref";
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "ops is \"ref\""));
    c.ops = "";
    if (!device()) {
        setenv("TANDEM_CUDA_LIBRARY", "/absent/libtandem_cuda.so", 1);
        assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.msg, "/absent/libtandem_cuda.so"));
        unsetenv("TANDEM_CUDA_LIBRARY");
        return;
    }
    c.device_index = 7;
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "device index 7"));
    c.device_index = 0;
    c.kv_memory = "1000GiB";
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_NOMEM);
    if (!strstr(err.msg, "kv_memory asks for 1024000 MiB") || !strstr(err.msg, "are free"))
        fail_msg("says \"%s\"", err.msg);
    c.kv_memory = "100%";
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_INVALID);
    c.kv_memory = "1MiB";
    c.max_step_tokens = 1 << 20;
    assert_int_equal(td_engine_open(&c, &e, &err), TD_ERR_NOMEM);
    assert_non_null(strstr(err.msg, "max_step_tokens"));
    c.max_step_tokens = 16;
    c.kv_memory = "10%";
    if (td_engine_open(&c, &e, &err)) fail_msg("%s", err.msg);
    assert_non_null(td_engine_device_info(e));
    close_engine(e);
}

/* What start_ranks has started on a device. */
static int be_a_rank(const struct td_ranks_place *place)
{
    char path[64], kv[32];
    static struct td_ranks ranks;
    struct td_err err = {0};
    struct td_engine_config c = {.random_config = path,
                                 .dtype = "f32",
                                 .kv_dtype = td_dtype_name(kv_dtype()),
                                 .n_threads = 1,
                                 .kv_memory = kv,
                                 .block_size = BS,
                                 .quiet = true,
                                 .device = device(),
                                 .device_index = place->rank,
                                 .deterministic = true};
    const char *text = getenv("TD_ENGINE_TEST_RANK");
    if (!text || sscanf(text, "%63s %d %d %d %31s", path, &c.max_seqs, &c.max_batch,
                        &c.max_step_tokens, kv) != 5)
        return 1;
    td_status s = td_ranks_join(place, &ranks, &err);
    c.comm = ranks.comm;
    if (!s) s = td_engine_follow(&c, &err);
    return s == TD_OK ? 0 : s == TD_ERR_PEER ? 7 : 1;
}

int main(int argc, char **argv)
{
    struct td_ranks_place place;
    if (td_ranks_take(&argc, argv, &place, NULL)) return 1;
    if (place.rank > 0) return be_a_rank(&place);
    setenv("TD_CUDA_EMU_DEVICES", "4", 1); /* a device for each rank */
    /* what goes over NCCL: the rest has no ranks */
    if (getenv("TD_CUDA_EMU_NCCL")) cmocka_set_test_filter("test_rank*");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch_choose),
        cmocka_unit_test(test_as_alone),
        cmocka_unit_test(test_a_scored_prompt_before_decodes),
        cmocka_unit_test(test_to_the_last_position),
        cmocka_unit_test(test_stop_token_is_the_last),
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_prefix_hits),
        cmocka_unit_test(test_import),
        cmocka_unit_test(test_ranks_as_alone),
        cmocka_unit_test(test_every_pair_of_degrees),
        cmocka_unit_test(test_kv_is_there_after_a_step),
        cmocka_unit_test(test_rank_dies),
        cmocka_unit_test(test_rank_cannot_open),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_device_lost),
        cmocka_unit_test(test_pool_of_a_share),
        cmocka_unit_test(test_device_refusals),
    };
    const struct CMUnitTest of_kv[] = {
        cmocka_unit_test(test_as_alone),
        cmocka_unit_test(test_prefix_hits),
        cmocka_unit_test(test_import),
        cmocka_unit_test(test_ranks_as_alone),
        cmocka_unit_test(test_every_pair_of_degrees),
    };
    if (kv_dtype() != TD_F32) return cmocka_run_group_tests(of_kv, write_config, remove_config);
    return cmocka_run_group_tests(tests, write_config, remove_config);
}
