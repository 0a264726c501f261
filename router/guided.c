/* guided.c - structured output as a client asks for it: every text is compiled here once, so that
 * what cannot be kept is refused before a worker sees it. Workers compile for themselves.
 *
 * What was accepted lately is remembered, whole: a schema that comes with every request of a
 * client costs a comparison. Loop thread. */
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/rpc/scan.h"
#include "common/text/grammar.h"
#include "router/router.h"

#define MAX_SEEN 32 /* with TD_GRAMMAR_MAX_TEXT_BYTES each, about 10 MiB in all */

struct router_guided {
    struct seen {
        char *key;
        size_t n_key;
        uint64_t used; /* larger: later */
    } seen[MAX_SEEN];
    uint64_t n_used;
};

void router_guided_free(struct router *r)
{
    for (int i = 0; r->guided && i < MAX_SEEN; i++) free(r->guided->seen[i].key);
    free(r->guided);
    r->guided = NULL;
}

/* *ret_texts: *ret_n texts of `in`. */
static td_status read_guide(const Tandem__V1__GuidedOutput *in, enum td_grammar_kind *ret_kind,
                            const ProtobufCBinaryData **ret_texts, size_t *ret_n,
                            struct td_err *err)
{
    *ret_n = 1;
    switch (in->guide_case) {
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_OBJECT:
        if (!in->json_object)
            return td_fail(err, TD_ERR_INVALID,
                           "guided.json_object is false, must be true: for any text leave guided "
                           "out");
        *ret_kind = TD_GRAMMAR_JSON_OBJECT;
        *ret_n = 0;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_SCHEMA:
        *ret_kind = TD_GRAMMAR_JSON_SCHEMA;
        *ret_texts = &in->json_schema;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_REGEX:
        *ret_kind = TD_GRAMMAR_REGEX;
        *ret_texts = &in->regex;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_CHOICE:
        *ret_kind = TD_GRAMMAR_CHOICE;
        *ret_texts = in->choice->texts;
        *ret_n = in->choice->n_texts;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_GRAMMAR:
        *ret_kind = TD_GRAMMAR_EBNF;
        *ret_texts = &in->grammar;
        return TD_OK;
    default:
        return td_fail(err, TD_ERR_INVALID,
                       "guided is empty: set json_object, json_schema, regex, choice or grammar");
    }
}

static td_status compile(enum td_grammar_kind kind, const struct td_grammar_text *texts, size_t n,
                         struct td_err *err)
{
    struct td_grammar *g = NULL;
    struct td_matcher *m = NULL;
    td_status s = td_grammar_compile(kind, texts, n, &g, err);
    if (!s) s = td_matcher_create(g, NULL, NULL, 0, &m, err);
    td_matcher_free(m);
    td_grammar_free(g);
    if (!s) return TD_OK;
    td_err_prefix(err, "guided");
    return s == TD_ERR_NOMEM ? TD_ERR_AGAIN : TD_ERR_INVALID; /* what to do, not why: both limits
                                                                 and what is not there are the
                                                                 client's to change */
}

/* Compiles what was not accepted lately. */
static td_status check(struct router *r, enum td_grammar_kind kind,
                       const struct td_grammar_text *texts, size_t n, struct td_err *err)
{
    char *key = NULL;
    size_t n_key = 0;
    if (!r->guided && !(r->guided = calloc(1, sizeof *r->guided)))
        return td_fail(err, TD_ERR_AGAIN, "no memory for guided");
    td_status s = td_grammar_key(kind, texts, n, &key, &n_key, err);
    if (s) return s;
    struct seen *oldest = r->guided->seen;
    for (struct seen *v = r->guided->seen; v < r->guided->seen + MAX_SEEN; v++) {
        if (v->key && v->n_key == n_key && !memcmp(v->key, key, n_key)) {
            v->used = ++r->guided->n_used;
            free(key);
            return TD_OK;
        }
        if (v->used < oldest->used) oldest = v;
    }
    s = compile(kind, texts, n, err);
    if (s) {
        free(key);
        return s;
    }
    free(oldest->key);
    *oldest = (struct seen){.key = key, .n_key = n_key, .used = ++r->guided->n_used};
    return TD_OK;
}

td_status router_guided_fill(const struct served_model *m, struct request_ask *ask,
                             const Tandem__V1__GenerateRequest *in, struct td_err *err)
{
    enum td_grammar_kind kind = TD_GRAMMAR_NONE;
    const ProtobufCBinaryData *from = NULL;
    size_t n = 0, n_bytes = 0;
    if (!in->guided) return TD_OK;
    td_status s = read_guide(in->guided, &kind, &from, &n, err);
    if (s) return s;
    if (in->stop && in->stop->ignore_eos)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.ignore_eos is true beside guided: a guided output ends by an "
                       "end-of-sequence token");
    if (in->stop && in->stop->min_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.min_tokens is %lld beside guided: a guided output ends where its "
                       "grammar does",
                       (long long)in->stop->min_tokens);
    if (!m->config.n_eos)
        return td_fail(err, TD_ERR_INVALID,
                       "guided: the model has no end-of-sequence token, by which a guided output "
                       "ends");
    if (n > TD_GRAMMAR_MAX_CHOICES)
        return td_fail(err, TD_ERR_INVALID, "guided.choice has %zu texts, limit %d", n,
                       TD_GRAMMAR_MAX_CHOICES);
    for (size_t i = 0; i < n; i++) {
        if (!td_rpc_utf8_valid(from[i].data, from[i].len))
            return td_fail(err, TD_ERR_INVALID, "guided: text %zu is not valid UTF-8", i);
        n_bytes += from[i].len;
    }
    if (n_bytes > TD_GRAMMAR_MAX_TEXT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "guided has %zu bytes, limit %d", n_bytes,
                       TD_GRAMMAR_MAX_TEXT_BYTES);
    struct td_grammar_text *texts = calloc(n + 1, sizeof *texts);
    Tandem__V1__SamplingSpec *spec = &ask->spec;
    spec->guided_texts = calloc(n + 1, sizeof *spec->guided_texts); /* request_free frees both */
    ask->guided_bytes = malloc(n_bytes + 1);
    if (!texts || !spec->guided_texts || !ask->guided_bytes)
        s = td_fail(err, TD_ERR_AGAIN, "no memory for %zu bytes of guided", n_bytes);
    n_bytes = 0;
    for (size_t i = 0; i < n && !s; i++) {
        uint8_t *to = ask->guided_bytes + n_bytes;
        if (from[i].len) memcpy(to, from[i].data, from[i].len);
        spec->guided_texts[i] = (ProtobufCBinaryData){from[i].len, to};
        texts[i] = (struct td_grammar_text){(const char *)to, from[i].len};
        n_bytes += from[i].len;
    }
    if (!s) s = check(m->router, kind, texts, n, err);
    free(texts);
    if (s) return s;
    spec->n_guided_texts = n;
    spec->guided_kind = kind;
    return TD_OK;
}
