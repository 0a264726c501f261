/* one_process - the oracle of the invariance test: the engine alone, no daemons. Reads a JSON array
 * of requests on stdin, runs them with the given batching, chunking and order, prints a JSON array
 * of {"tokens": [...], "logprobs": [...]} in the order of the input.
 *
 * one_process MODEL DTYPE CONCURRENCY CHUNK ORDER_SEED PREFIX_CACHE(0|1) KV_MEMORY
 *     [TP [cpu|cuda [KV_DTYPE]]]
 *
 * MODEL that is a file and no GGUF is a config: random weights. TP: ranks, which are processes of
 * this program. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/gguf.h"
#include "common/base/json.h"
#include "common/base/random.h"
#include "common/engine/engine.h"
#include "common/engine/ranks.h"
#include "common/worker/guided.h"

#define MAX_REQUESTS 1024

struct run {
    struct td_seq *seq;
    struct td_guided_seq guided;
    json_t *tokens, *logprobs;
    bool started, done;
};

static struct run runs[MAX_REQUESTS];
static struct td_guided *guided; /* NULL: none was asked for */

static void die(const char *what, const struct td_err *err)
{
    fprintf(stderr, "one_process: %s: %s\n", what, err->msg);
    exit(1);
}

static double num(const json_t *o, const char *key, double def)
{
    const json_t *v = json_object_get(o, key);
    return v ? json_number_value(v) : def;
}

/* {"kind": number of td_grammar_kind, "texts": [...]}; such a sequence ends by the model's
 * end-of-sequence tokens. */
static void guide(struct run *r, const json_t *o)
{
    static struct td_grammar_text texts[MAX_REQUESTS];
    struct td_err err = {0};
    size_t i, n = 0;
    const json_t *v;
    json_array_foreach(json_object_get(o, "texts"), i, v) texts[n++] =
        (struct td_grammar_text){json_string_value(v), json_string_length(v)};
    enum td_grammar_kind kind =
        (enum td_grammar_kind)json_integer_value(json_object_get(o, "kind"));
    if (td_guided_begin(guided, kind, texts, n, r->seq, &r->guided, &err)) die("guided", &err);
}

static void fill(struct td_engine *e, struct run *r, const json_t *o, size_t i)
{
    static int32_t tokens[1 << 16];
    struct td_err err = {0};
    const json_t *ids = json_object_get(o, "ids"), *v;
    int32_t n = 0;
    size_t at;
    json_array_foreach(ids, at, v) tokens[n++] = (int32_t)json_integer_value(v);
    struct td_sampling s = {.temperature = (float)num(o, "temperature", 1),
                            .top_k = (int32_t)num(o, "top_k", 0),
                            .top_p = (float)num(o, "top_p", 1),
                            .min_p = (float)num(o, "min_p", 0),
                            .repetition_penalty = (float)num(o, "repetition_penalty", 1),
                            .presence_penalty = (float)num(o, "presence_penalty", 0),
                            .frequency_penalty = (float)num(o, "frequency_penalty", 0),
                            .seed = (uint64_t)num(o, "seed", 0),
                            .n_logprobs = (int32_t)num(o, "logprobs", -1)};
    r->seq = td_engine_seq_get(e);
    if (!r->seq) die("no sequence", &err);
    r->seq->sched.priority = i;
    const struct td_model_config *mc = td_model_config(td_engine_model(e));
    const json_t *g = json_object_get(o, "guided");
    const int32_t *stop = g ? mc->eos_ids : NULL;
    int32_t n_stop = g ? mc->n_eos : 0;
    if (td_engine_seq_set(e, r->seq, tokens, n, n, &s, stop, n_stop,
                          (int64_t)num(o, "max_tokens", 16), &err))
        die("request", &err);
    if (g) guide(r, g);
    r->seq->owner = r;
    r->started = true;
}

static void finish(struct td_engine *e, struct run *r)
{
    td_engine_release(e, r->seq);
    td_guided_end(&r->guided);
    td_engine_seq_put(e, r->seq);
    r->seq = NULL;
    r->done = true;
}

static void remove_seq(struct td_seq **running, int32_t *n, const struct td_seq *seq)
{
    int32_t i = 0;
    while (running[i] != seq) i++;
    memmove(running + i, running + i + 1, (size_t)(*n - i - 1) * sizeof *running);
    --*n;
}

/* The requests that wait for a place, run, and lost theirs, in their order. */
struct queues {
    struct td_seq *running[MAX_REQUESTS], *waiting[MAX_REQUESTS], *preempted[MAX_REQUESTS];
    int32_t n_running, n_waiting;
    size_t preemptions;
};

static void shuffle(size_t *order, size_t n, unsigned long seed) /* Fisher-Yates; 0: as they came */
{
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t i = n; seed && i > 1; i--) {
        size_t j = td_random_index(&seed, i), t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
}

static void admit(struct td_engine *e, struct queues *q)
{
    while (q->n_waiting > 0 && td_engine_admit(e, q->waiting[0], false, q->n_running) == TD_OK) {
        int32_t at = q->n_running++;
        for (; at > 0 && q->waiting[0]->sched.priority < q->running[at - 1]->sched.priority; at--)
            q->running[at] = q->running[at - 1];
        q->running[at] = q->waiting[0];
        memmove(q->waiting, q->waiting + 1, (size_t)--q->n_waiting * sizeof *q->waiting);
    }
}

/* One step of the engine; how many requests it ended. */
static size_t step(struct td_engine *e, struct queues *q, struct td_step_item *items)
{
    struct td_err err = {0};
    int32_t n_preempted = 0;
    size_t n_done = 0;
    int32_t k = td_engine_plan(e, q->running, q->n_running, items, q->preempted, &n_preempted);
    q->n_running -= n_preempted;
    q->preemptions += (size_t)n_preempted;
    for (int32_t i = 0; i < n_preempted; i++) {
        memmove(q->waiting + 1, q->waiting, (size_t)q->n_waiting++ * sizeof *q->waiting);
        q->waiting[0] = q->preempted[i];
    }
    if (k && td_engine_step(e, items, k, &err)) die("step", &err);
    for (int32_t i = 0; i < k; i++) {
        if (!items[i].sampled) continue;
        struct run *r = items[i].seq->owner;
        json_array_append_new(r->tokens, json_integer(items[i].out.token));
        if (items[i].seq->sampling.n_logprobs >= 0)
            json_array_append_new(r->logprobs, json_real((double)items[i].out.logprob));
        if (!items[i].seq->finish) continue;
        remove_seq(q->running, &q->n_running, items[i].seq);
        finish(e, r);
        n_done++;
    }
    return n_done;
}

/* All requests to their ends, `concurrency` of them at a time; how often one was preempted. */
static size_t run_all(struct td_engine *e, const json_t *root, const size_t *order, size_t n,
                      int concurrency)
{
    static struct queues q;
    struct td_step_item *items = calloc((size_t)concurrency, sizeof *items);
    size_t next = 0, done = 0;
    struct td_err err = {0};
    if (!items) die("memory", &err);
    while (done < n) {
        while (next < n && q.n_running + q.n_waiting < concurrency) {
            fill(e, &runs[order[next]], json_array_get(root, order[next]), next);
            q.waiting[q.n_waiting++] = runs[order[next]].seq;
            next++;
        }
        admit(e, &q);
        done += step(e, &q, items);
    }
    free(items);
    return q.preemptions;
}

/* A token's grammar, where a request asks for one. */
static void open_guided(const struct td_engine_config *c, struct td_engine *e, const json_t *root)
{
    struct td_err err = {0};
    const struct td_model_config *mc = td_model_config(td_engine_model(e));
    for (size_t i = 0; i < json_array_size(root) && !guided; i++)
        if (json_object_get(json_array_get(root, i), "guided") &&
            td_guided_open(c->model_dir, mc->vocab, mc->eos_ids, mc->n_eos, &guided, &err))
            die("guided", &err);
}

static json_t *read_requests(void)
{
    static char text[1 << 24];
    struct td_err err = {0};
    json_t *root = NULL;
    size_t n_text = fread(text, 1, sizeof text - 1, stdin);
    if (td_json_load_text(text, n_text, "stdin", &root, &err)) die("input", &err);
    return root;
}

static void write_results(size_t n, size_t preemptions)
{
    json_t *out = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(
            out, json_pack("{s:o, s:o}", "tokens", runs[i].tokens, "logprobs", runs[i].logprobs));
    json_t *result =
        json_pack("{s:o, s:I}", "results", out, "preemptions", (json_int_t)preemptions);
    json_dumpf(result, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17));
    putchar('\n');
    json_decref(result);
}

/* What the first rank does, which is the only one without tensor parallelism. */
static int serve(const struct td_engine_config *c, int concurrency, unsigned long order_seed)
{
    struct td_err err = {0};
    struct td_engine *e = NULL;
    size_t order[MAX_REQUESTS];
    json_t *root = read_requests();
    size_t n = json_array_size(root);
    if (n > MAX_REQUESTS || concurrency < 1) die("limits", &err);
    if (td_engine_open(c, &e, &err)) die("engine", &err);
    open_guided(c, e, root);
    for (size_t i = 0; i < n; i++) {
        runs[i].tokens = json_array();
        runs[i].logprobs = json_array();
    }
    shuffle(order, n, order_seed);
    write_results(n, run_all(e, root, order, n, concurrency));
    json_decref(root);
    td_guided_close(guided);
    td_engine_close(e);
    return 0;
}

int main(int argc, char **argv)
{
    struct td_err err = {0};
    struct td_ranks_place place;
    if (td_ranks_take(&argc, argv, &place, &err)) die("rank", &err);
    if (argc < 8 || argc > 11) {
        fprintf(stderr, "usage: one_process MODEL DTYPE CONCURRENCY CHUNK ORDER_SEED PREFIX_CACHE "
                        "KV_MEMORY [TP [DEVICE [KV_DTYPE]]]\n");
        return 2;
    }
    int concurrency = (int)strtol(argv[3], NULL, 10), chunk = (int)strtol(argv[4], NULL, 10);
    unsigned long order_seed = strtoul(argv[5], NULL, 10);
    int32_t tp = argc >= 9 ? (int32_t)strtol(argv[8], NULL, 10) : 1;
    struct stat st;
    bool is_config = stat(argv[1], &st) == 0 && S_ISREG(st.st_mode) && !td_gguf_is_file(argv[1]);
    struct td_engine_config c = {.model_dir = is_config ? NULL : argv[1],
                                 .random_config = is_config ? argv[1] : NULL,
                                 .dtype = argv[2],
                                 .n_threads = tp * (1 + (int)(order_seed % 2)),
                                 .kv_memory = argv[7],
                                 .block_size = 16,
                                 .max_seqs = concurrency,
                                 .max_batch = concurrency,
                                 .max_step_tokens = chunk,
                                 .prefix_cache = argv[6][0] == '1',
                                 .quiet = true,
                                 .device = argc >= 10 ? argv[9] : "cpu",
                                 .kv_dtype = argc >= 11 ? argv[10] : "auto",
                                 .device_index = place.rank,
                                 .deterministic = true};
    static struct td_ranks ranks;
    if (place.rank > 0 || tp > 1) {
        if (place.rank > 0 ? td_ranks_join(&place, &ranks, &err)
                           : td_ranks_start(tp, c.n_threads, &ranks, &err))
            die("ranks", &err);
        c.comm = ranks.comm;
    }
    if (place.rank > 0) return td_engine_follow(&c, &err) ? 1 : 0;
    return serve(&c, concurrency, order_seed);
}
