/* guided.c - see guided.h.
 *
 * A job: asked --> submitted --(thread)--> compiling --> done --> taken. Dropped before it is
 * compiled, it is freed. `lock` guards the entries and the count of jobs; it is not held while
 * anything is compiled. */
#include "common/worker/guided.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/job_thread.h"

struct td_guided_entry {
    struct td_guided_entry *next; /* the latest used first */
    char *key;                    /* td_grammar_key */
    size_t n_key;
    struct td_grammar *grammar;
    struct td_matcher *matcher; /* the engine thread's, once the first sequence is there */
    uint32_t n_seqs;
};

struct td_guided {
    struct td_token_trie *trie;
    int32_t *eos, n_eos;
    uint64_t vocab_digest;
    pthread_mutex_t lock;
    struct td_guided_entry *entries;

    struct td_job_thread *thread; /* NULL until td_guided_start */
    uint32_t n_jobs;              /* asked for and not freed */
    void (*done)(void *ctx, void *user);
    void *done_ctx;
};

struct td_guided_job {
    struct td_job job; /* first */
    struct td_guided *guided;
    char *key; /* td_grammar_key: kind and texts */
    size_t n_key;
    void *user;
    bool is_submitted;
    td_status status; /* once it is done */
    struct td_err err;
    struct td_guided_entry *entry; /* TD_OK: held for the sequence that takes it */
};

static void entry_free(struct td_guided_entry *e)
{
    if (!e) return;
    td_matcher_free(e->matcher);
    td_grammar_free(e->grammar);
    free(e->key);
    free(e);
}

td_status td_guided_open(const char *model_dir, int32_t vocab, const int32_t *eos, int32_t n_eos,
                         struct td_guided **ret_guided, struct td_err *err)
{
    struct td_tokenizer *tokenizer = NULL;
    if (n_eos < 1)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "guided output: the model has no end-of-sequence token");
    struct td_guided *g = calloc(1, sizeof *g);
    if (!g) return td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    pthread_mutex_init(&g->lock, NULL);
    g->eos = malloc((size_t)n_eos * sizeof *g->eos);
    td_status s = td_tokenizer_load(model_dir, &tokenizer, err);
    if (!s) s = td_token_trie_create(tokenizer, vocab, &g->trie, err);
    if (!s) g->vocab_digest = td_tokenizer_digest(tokenizer);
    td_tokenizer_free(tokenizer);
    if (!s && !g->eos) s = td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    if (s) {
        td_guided_close(g);
        return s;
    }
    memcpy(g->eos, eos, (size_t)n_eos * sizeof *eos);
    g->n_eos = n_eos;
    *ret_guided = g;
    return TD_OK;
}

uint64_t td_guided_vocab_digest(const struct td_guided *g) { return g->vocab_digest; }

void td_guided_close(struct td_guided *g)
{
    if (!g) return;
    TD_ASSERT(g->n_jobs == 0);
    td_job_thread_destroy(g->thread);
    while (g->entries) {
        struct td_guided_entry *e = g->entries;
        TD_ASSERT(e->n_seqs == 0);
        g->entries = e->next;
        entry_free(e);
    }
    td_token_trie_free(g->trie);
    free(g->eos);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* With the lock: the entry with that key, moved to the front; NULL when there is none. */
static struct td_guided_entry *find(struct td_guided *g, const char *key, size_t n_key)
{
    for (struct td_guided_entry **at = &g->entries; *at; at = &(*at)->next) {
        struct td_guided_entry *e = *at;
        if (e->n_key != n_key || memcmp(e->key, key, n_key)) continue;
        *at = e->next;
        e->next = g->entries;
        g->entries = e;
        return e;
    }
    return NULL;
}

/* With the lock: takes idle entries beyond the bound off the list, the least recently used ones. */
static struct td_guided_entry *take_excess(struct td_guided *g)
{
    struct td_guided_entry *excess = NULL;
    int n_idle = 0;
    for (struct td_guided_entry **at = &g->entries; *at;) {
        struct td_guided_entry *e = *at;
        if (e->n_seqs == 0 && ++n_idle > TD_GUIDED_MAX_IDLE) {
            *at = e->next;
            e->next = excess;
            excess = e;
        } else {
            at = &e->next;
        }
    }
    return excess;
}

/* What comes next after the output so far: the engine asks this on its thread. */
static td_status allowed(void *ctx, const struct td_seq *seq, const uint64_t **ret_words)
{
    struct td_guided_seq *q = ctx;
    struct td_matcher *m = q->entry->matcher;
    int32_t n_output = seq->sched.n_tokens - seq->n_prompt;
    if (q->generation != td_matcher_generation(m) || q->n_read > n_output) {
        q->generation = td_matcher_generation(m);
        q->state = td_matcher_start(m);
        q->n_read = 0;
    }
    for (; q->n_read < n_output; q->n_read++) {
        size_t n = 0;
        const char *bytes =
            td_token_trie_bytes(q->guided->trie, seq->tokens[seq->n_prompt + q->n_read], &n);
        td_status s = bytes ? td_matcher_advance(m, q->state, bytes, n, &q->state) : TD_OK;
        if (s) return s;
        if (!bytes || q->state == TD_MATCHER_DEAD) return TD_ERR_INVALID;
    }
    return td_matcher_mask(m, q->state, ret_words);
}

/* ---- grammars -------------------------------------------------------------------------------- */

/* The entry of that key with one sequence more, or NULL. */
static struct td_guided_entry *hold_known(struct td_guided *g, const char *key, size_t n_key)
{
    pthread_mutex_lock(&g->lock);
    struct td_guided_entry *known = find(g, key, n_key);
    if (known) known->n_seqs++;
    pthread_mutex_unlock(&g->lock);
    return known;
}

/* The same, and compiles it if it is not there. */
static td_status hold(struct td_guided *g, const char *key, size_t n_key,
                      struct td_guided_entry **ret_entry, struct td_err *err)
{
    enum td_grammar_kind kind;
    struct td_grammar_text *texts = NULL;
    size_t n_texts = 0;
    if ((*ret_entry = hold_known(g, key, n_key))) return TD_OK;
    struct td_guided_entry *e = calloc(1, sizeof *e);
    if (e) e->key = malloc(n_key + 1);
    td_status s = e && e->key ? td_grammar_key_read(key, n_key, &kind, &texts, &n_texts, err)
                              : td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    if (!s) s = td_grammar_compile(kind, texts, n_texts, &e->grammar, err);
    if (!s) s = td_matcher_create(e->grammar, g->trie, g->eos, g->n_eos, &e->matcher, err);
    free(texts);
    if (s) {
        entry_free(e);
        return s;
    }
    memcpy(e->key, key, n_key);
    e->n_key = n_key;
    e->n_seqs = 1;
    pthread_mutex_lock(&g->lock); /* had another thread compiled it meanwhile, both stay: no harm */
    e->next = g->entries;
    g->entries = *ret_entry = e;
    pthread_mutex_unlock(&g->lock);
    return TD_OK;
}

static void release(struct td_guided *g, struct td_guided_entry *e)
{
    pthread_mutex_lock(&g->lock);
    e->n_seqs--;
    struct td_guided_entry *excess = take_excess(g);
    pthread_mutex_unlock(&g->lock);
    while (excess) {
        struct td_guided_entry *next = excess->next;
        entry_free(excess);
        excess = next;
    }
}

/* From the first output token on. */
static void set_guide(struct td_guided *g, struct td_guided_entry *e, struct td_seq *seq,
                      struct td_guided_seq *ret_seq)
{
    *ret_seq = (struct td_guided_seq){.guided = g, .entry = e, .n_read = INT32_MAX};
    seq->guide = (struct td_seq_guide){.allowed = allowed, .ctx = ret_seq};
}

td_status td_guided_begin(struct td_guided *g, enum td_grammar_kind kind,
                          const struct td_grammar_text *texts, size_t n_texts, struct td_seq *seq,
                          struct td_guided_seq *ret_seq, struct td_err *err)
{
    char *key = NULL;
    size_t n_key = 0;
    struct td_guided_entry *e;
    td_status s = td_grammar_key(kind, texts, n_texts, &key, &n_key, err);
    if (!s) s = hold(g, key, n_key, &e, err);
    free(key);
    if (!s) set_guide(g, e, seq, ret_seq);
    return s;
}

void td_guided_end(struct td_guided_seq *seq)
{
    if (!seq->guided) return;
    release(seq->guided, seq->entry);
    *seq = (struct td_guided_seq){0};
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* The job may be freed by then. */
static void end_job(struct td_guided_job *job, td_status s)
{
    struct td_guided *g = job->guided;
    job->status = s;
    g->done(g->done_ctx, job->user);
}

static void run_job(void *ctx, struct td_job *base, bool stopping)
{
    struct td_guided *g = ctx;
    struct td_guided_job *job = (struct td_guided_job *)base;
    end_job(job, stopping ? td_fail(&job->err, TD_ERR_CANCELLED, "this worker is stopping")
                          : hold(g, job->key, job->n_key, &job->entry, &job->err));
}

td_status td_guided_start(struct td_guided *g, void (*done)(void *ctx, void *user), void *ctx,
                          const char *gate, struct td_err *err)
{
    g->done = done;
    g->done_ctx = ctx;
    return td_job_thread_create("guides", run_job, g, gate, &g->thread, err);
}

void td_guided_stop(struct td_guided *g)
{
    if (g) td_job_thread_stop(g->thread);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static void job_free(struct td_guided_job *job)
{
    struct td_guided *g = job->guided;
    free(job->key);
    free(job);
    pthread_mutex_lock(&g->lock);
    g->n_jobs--;
    pthread_mutex_unlock(&g->lock);
}

/* Takes the key. */
static td_status job_new(struct td_guided *g, char *key, size_t n_key, void *user,
                         struct td_guided_job **ret_job, struct td_err *err)
{
    struct td_guided_job *job = calloc(1, sizeof *job);
    pthread_mutex_lock(&g->lock);
    bool fits = g->n_jobs < TD_GUIDED_MAX_JOBS;
    if (job && fits) g->n_jobs++;
    pthread_mutex_unlock(&g->lock);
    if (!job || !fits) {
        free(key);
        free(job);
        return fits ? td_fail(err, TD_ERR_AGAIN, "guided output: no memory")
                    : td_fail(err, TD_ERR_AGAIN,
                              "guided: %d grammars wait to be compiled on this worker, the limit",
                              TD_GUIDED_MAX_JOBS);
    }
    *job = (struct td_guided_job){.guided = g, .key = key, .n_key = n_key, .user = user};
    *ret_job = job;
    return TD_INPROGRESS;
}

td_status td_guided_ask(struct td_guided *g, enum td_grammar_kind kind,
                        const struct td_grammar_text *texts, size_t n_texts, void *user,
                        struct td_seq *seq, struct td_guided_seq *ret_seq,
                        struct td_guided_job **ret_job, struct td_err *err)
{
    char *key = NULL;
    size_t n_key = 0;
    td_status s = td_grammar_key(kind, texts, n_texts, &key, &n_key, err);
    if (s) return s;
    struct td_guided_entry *known = hold_known(g, key, n_key);
    if (!known) return job_new(g, key, n_key, user, ret_job, err);
    free(key);
    set_guide(g, known, seq, ret_seq);
    return TD_OK;
}

void td_guided_submit(struct td_guided_job *job)
{
    job->is_submitted = true;
    if (!td_job_thread_put(job->guided->thread, &job->job)) run_job(job->guided, &job->job, true);
}

bool td_guided_drop(struct td_guided_job *job)
{
    if (job->is_submitted && !td_job_thread_drop(job->guided->thread, &job->job)) return false;
    job_free(job);
    return true;
}

td_status td_guided_take(struct td_guided_job *job, struct td_seq *seq,
                         struct td_guided_seq *ret_seq, struct td_err *err)
{
    td_status s = job->status;
    if (s)
        *err = job->err;
    else
        set_guide(job->guided, job->entry, seq, ret_seq);
    job_free(job);
    return s;
}

void td_guided_trim(struct td_guided_seq *seq)
{
    if (seq->entry) td_matcher_trim(seq->entry->matcher);
}

const char *td_guided_reason(td_status status)
{
    switch (status) {
    case TD_ERR_LIMIT:
        return "guided: the grammar is too ambiguous: too many readings of the output so far, or "
               "too much work to find what may come next";
    case TD_ERR_NOT_FOUND:
        return "guided: no token of the model's vocabulary continues the output";
    case TD_ERR_INVALID:
        return "guided: the output so far is none of the grammar's";
    case TD_ERR_NOMEM:
        return "guided: no memory to find what may come next";
    default:
        return NULL;
    }
}
