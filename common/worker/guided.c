/* guided.c - see guided.h. */
#include "common/worker/guided.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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
    pthread_mutex_t lock; /* guards the list and n_seqs; never held while anything is compiled */
    struct td_guided_entry *entries;
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
static struct td_guided_entry *find(struct td_guided *g, const struct td_guided_entry *like)
{
    for (struct td_guided_entry **at = &g->entries; *at; at = &(*at)->next) {
        struct td_guided_entry *e = *at;
        if (e->n_key != like->n_key || memcmp(e->key, like->key, e->n_key)) continue;
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

td_status td_guided_begin(struct td_guided *g, enum td_grammar_kind kind,
                          const struct td_grammar_text *texts, size_t n_texts, struct td_seq *seq,
                          struct td_guided_seq *ret_seq, struct td_err *err)
{
    struct td_guided_entry *e = calloc(1, sizeof *e);
    if (!e) return td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    td_status s = td_grammar_key(kind, texts, n_texts, &e->key, &e->n_key, err);
    pthread_mutex_lock(&g->lock);
    struct td_guided_entry *known = s ? NULL : find(g, e);
    if (known) known->n_seqs++;
    pthread_mutex_unlock(&g->lock);
    if (!known && !s) s = td_grammar_compile(kind, texts, n_texts, &e->grammar, err);
    if (!known && !s)
        s = td_matcher_create(e->grammar, g->trie, g->eos, g->n_eos, &e->matcher, err);
    if (!known && !s) { /* had another thread compiled it meanwhile, both would stay: no harm */
        pthread_mutex_lock(&g->lock);
        e->n_seqs = 1;
        e->next = g->entries;
        g->entries = known = e;
        e = NULL;
        pthread_mutex_unlock(&g->lock);
    }
    entry_free(e);
    if (s) return s;
    *ret_seq = (struct td_guided_seq){.guided = g, .entry = known};
    ret_seq->n_read = INT32_MAX; /* from the first output token on */
    seq->guide = (struct td_seq_guide){.allowed = allowed, .ctx = ret_seq};
    return TD_OK;
}

void td_guided_end(struct td_guided_seq *seq)
{
    struct td_guided *g = seq->guided;
    if (!g) return;
    pthread_mutex_lock(&g->lock);
    seq->entry->n_seqs--;
    struct td_guided_entry *excess = take_excess(g);
    pthread_mutex_unlock(&g->lock);
    while (excess) {
        struct td_guided_entry *next = excess->next;
        entry_free(excess);
        excess = next;
    }
    *seq = (struct td_guided_seq){0};
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
