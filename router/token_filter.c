/* token_filter.c - tokens that an answer may not have, as a client names them: ids that are
 * allowed, and words that are not. Loop thread. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/scan.h"
#include "router/router.h"

enum { MAX_WORD_BYTES = 256 };

static td_status copy_allowed(const struct served_model *m, Tandem__V1__SamplingSpec *spec,
                              const Tandem__V1__Sampling *in, struct td_err *err)
{
    size_t n = in->n_allowed_token_ids;
    if (n > TD_MAX_ALLOWED_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "sampling.allowed_token_ids has %zu ids, limit %d", n,
                       TD_MAX_ALLOWED_TOKENS);
    spec->allowed_token_ids = calloc(n, sizeof *spec->allowed_token_ids);
    if (!spec->allowed_token_ids)
        return td_fail(err, TD_ERR_AGAIN, "no memory for allowed_token_ids");
    spec->n_allowed_token_ids = n;
    for (size_t i = 0; i < n; i++) {
        int32_t id = spec->allowed_token_ids[i] = in->allowed_token_ids[i];
        if (id < 0 || id >= m->config.vocab)
            return td_fail(err, TD_ERR_INVALID,
                           "sampling.allowed_token_ids[%zu] is %d, must be 0..%d", i, id,
                           m->config.vocab - 1);
    }
    return TD_OK;
}

static td_status encode(const struct served_model *m, const char *text, size_t n, size_t at,
                        struct td_token_list *ret, struct td_err *err)
{
    td_status s =
        td_tokenizer_encode(m->tokenizer, text, n, false, TD_MAX_BAD_WORD_TOKENS, ret, err);
    if (s == TD_ERR_LIMIT || (!s && !ret->n))
        return td_fail(err, TD_ERR_INVALID, "sampling.bad_words[%zu] has %s, must have 1..%d", at,
                       s ? "more tokens" : "no token", TD_MAX_BAD_WORD_TOKENS);
    return s;
}

/* Takes the ids over into the next of spec->bad_words. */
static void add_word(Tandem__V1__SamplingSpec *spec, struct td_token_list *list)
{
    Tandem__V1__TokenIds *word = spec->bad_words[spec->n_bad_words++];
    word->n_ids = list->n;
    word->ids = list->ids;
    *list = (struct td_token_list){0};
}

/* The tokens of a word at a text's beginning, and inside a text, where a space is before it: often
 * one token that has the space in it. Where they are a space and the first ones, those suffice. */
static td_status add_words(const struct served_model *m, Tandem__V1__SamplingSpec *spec,
                           const ProtobufCBinaryData *in, size_t at, struct td_err *err)
{
    char text[MAX_WORD_BYTES + 1] = " ";
    if (in->len < 1 || in->len > MAX_WORD_BYTES)
        return td_fail(err, TD_ERR_INVALID,
                       "sampling.bad_words[%zu] has %zu bytes, must have 1..%d", at, in->len,
                       MAX_WORD_BYTES);
    if (!td_rpc_utf8_valid(in->data, in->len))
        return td_fail(err, TD_ERR_INVALID, "sampling.bad_words[%zu] is not valid UTF-8", at);
    size_t skip = 0;
    while (skip < in->len && in->data[skip] == ' ') skip++;
    size_t n = in->len - skip;
    memcpy(text + 1, in->data + skip, n);
    struct td_token_list alone = {0}, inside = {0};
    td_status s = encode(m, text + 1, n, at, &alone, err);
    if (!s) s = encode(m, text, n + 1, at, &inside, err);
    if (!s) {
        bool ends_so = inside.n >= alone.n && !memcmp(inside.ids + inside.n - alone.n, alone.ids,
                                                      alone.n * sizeof *alone.ids);
        add_word(spec, &alone);
        if (!ends_so) add_word(spec, &inside);
    }
    td_token_list_free(&alone);
    td_token_list_free(&inside);
    return s;
}

static td_status copy_bad_words(const struct served_model *m, struct request_ask *ask,
                                const Tandem__V1__Sampling *in, struct td_err *err)
{
    Tandem__V1__SamplingSpec *spec = &ask->spec;
    size_t n = 2 * in->n_bad_words;
    if (n > TD_MAX_BAD_WORDS)
        return td_fail(err, TD_ERR_INVALID, "sampling.bad_words has %zu words, limit %d",
                       in->n_bad_words, TD_MAX_BAD_WORDS / 2);
    ask->word_store = calloc(n, sizeof *ask->word_store);
    spec->bad_words = calloc(n, sizeof *spec->bad_words);
    if (!ask->word_store || !spec->bad_words)
        return td_fail(err, TD_ERR_AGAIN, "no memory for bad_words");
    for (size_t i = 0; i < n; i++) {
        tandem__v1__token_ids__init(&ask->word_store[i]);
        spec->bad_words[i] = &ask->word_store[i];
    }
    td_status s = TD_OK;
    for (size_t i = 0; !s && i < in->n_bad_words; i++)
        s = add_words(m, spec, &in->bad_words[i], i, err);
    return s;
}

td_status router_token_filter_fill(const struct served_model *m, struct request_ask *ask,
                                   const Tandem__V1__GenerateRequest *in, struct td_err *err)
{
    const Tandem__V1__Sampling *s = in->sampling;
    if (!s || (!s->n_allowed_token_ids && !s->n_bad_words)) return TD_OK;
    if (in->guided || router_must_call(in))
        return td_fail(err, TD_ERR_INVALID,
                       "sampling.%s is set beside %s: a grammar says which tokens may come",
                       s->n_bad_words ? "bad_words" : "allowed_token_ids",
                       in->guided ? "guided" : "a tool that must be called");
    td_status st = s->n_allowed_token_ids ? copy_allowed(m, &ask->spec, s, err) : TD_OK;
    return st || !s->n_bad_words ? st : copy_bad_words(m, ask, s, err);
}

void router_token_filter_free(struct request_ask *ask)
{
    for (size_t i = 0; i < ask->spec.n_bad_words; i++) free(ask->spec.bad_words[i]->ids);
    free(ask->spec.bad_words);
    free(ask->spec.allowed_token_ids);
    free(ask->word_store);
}
