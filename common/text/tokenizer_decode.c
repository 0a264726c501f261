/* tokenizer_decode.c - turns ids into text, as a pipeline of stages that hold back no more than
 * they must.
 *
 * Each decoder of the file is a stage that receives three events: bytes of the current token (whole
 * characters), the token's end, and the end of all. It sends the same events to the next stage; the
 * output of the last stage is the text. The whole decode uses the same pipeline, so a stream of
 * pushes cannot differ from it. What each stage holds back:
 *   ByteLevel     the token until its end (its mapping depends on all of it), then only an
 *                 unfinished UTF-8 character
 *   ByteFallback  the token until its end; a run of byte tokens until it ends, because one bad byte
 *                 turns the whole run into U+FFFD
 *   Fuse, Join    nothing: they only remove or replace the ends of tokens
 *   Replace       a literal: a suffix that may begin a match; a regex: the token until its end
 *   Strip         as many trailing characters as `stop` may still remove
 *   Metaspace     nothing
 *
 * A detokenizer with a prefix first runs the prefix. Text that the prefix alone would give at its
 * end but that is still held back (a last "<0x0A>", say) belongs to the prefix. It is kept as
 * `owed` and removed from the front of the following text, as long as the two agree. */
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_internal.h"

struct stage {
    struct td_tok_buf held; /* see above */
    struct td_tok_buf run;  /* BYTE_FALLBACK: bytes of the run; BYTE_LEVEL: the unfinished
                               character */
    uint64_t n_seen;        /* JOIN, METASPACE: tokens begun; STRIP: leading characters looked at */
    uint32_t n_trailing;    /* STRIP: characters held back */
    bool in_token;          /* JOIN, METASPACE */
    bool leading;           /* STRIP: still at the front */
};

struct td_detokenizer {
    const struct td_tokenizer *t;
    size_t n_pushed; /* bytes of all tokens so far: the budget grows with them */
    struct td_tok_budget budget;
    bool skip_special;
    struct td_tok_matcher matcher;
    struct td_tok_buf out;   /* new text since the last call */
    struct td_tok_buf owed;  /* the text to come that belongs to the prefix */
    size_t n_paid;           /* bytes of owed that have come */
    struct td_tok_buf shown; /* the text that the last call returned */
    struct stage stages[];   /* [t->n_dec] */
};

static td_status data(struct td_detokenizer *d, size_t at, const char *bytes, size_t n);
static td_status end(struct td_detokenizer *d, size_t at);
static td_status finish(struct td_detokenizer *d, size_t at);

static td_status data_cp(struct td_detokenizer *d, size_t at, uint32_t cp)
{
    char utf8[4];
    return data(d, at, utf8, (size_t)td_utf8_put(cp, utf8));
}

/* Sends on the part of st->run that is decided: characters, and U+FFFD for bytes that cannot become
 * one. At the end of all, the rest is U+FFFD too. */
static td_status flush_utf8(struct td_detokenizer *d, size_t at, bool is_end)
{
    struct td_tok_buf *run = &d->stages[at].run;
    size_t i = 0;
    td_status s = TD_OK;
    while (i < run->n && !s) {
        size_t n_valid = 0;
        uint32_t cp;
        int len = 1;
        while (i + n_valid < run->n &&
               (len = td_utf8_next(run->bytes + i + n_valid, run->n - i - n_valid, &cp)) > 0)
            n_valid += (size_t)len;
        if (n_valid) s = data(d, at + 1, run->bytes + i, n_valid);
        i += n_valid;
        if (i == run->n || (len == 0 && !is_end)) break;
        if (!s) s = data_cp(d, at + 1, 0xFFFD);
        i += len == 0 ? run->n - i : (size_t)-len;
    }
    if (run->n > i) memmove(run->bytes, run->bytes + i, run->n - i);
    run->n -= i;
    return s;
}

static td_status byte_level_end(struct td_detokenizer *d, size_t at)
{
    struct stage *st = &d->stages[at];
    size_t n_before = st->run.n, n = 0;
    char bytes[64]; /* most tokens have no more: one append */
    bool mapped = true;
    td_status s = TD_OK;
    for (size_t i = 0; i < st->held.n && mapped && !s;) {
        uint32_t cp;
        int len = td_utf8_next(st->held.bytes + i, st->held.n - i, &cp);
        int byte = len > 0 ? td_cp_to_byte(cp) : -1;
        mapped = byte >= 0;
        if (mapped) bytes[n++] = (char)byte;
        if (n == sizeof bytes) {
            s = td_tok_buf_append(&st->run, bytes, n);
            n = 0;
        }
        i += len > 0 ? (size_t)len : 1;
    }
    if (mapped && !s) s = td_tok_buf_append(&st->run, bytes, n);
    if (!mapped && !s) { /* an added token: its text is its bytes */
        st->run.n = n_before;
        s = td_tok_buf_append(&st->run, st->held.bytes, st->held.n);
    }
    st->held.n = 0;
    return s ? s : flush_utf8(d, at, false);
}

/* The value of "<0xHH>", or -1. Rust reads a number with a plus sign too. */
static int byte_of(const char *text, size_t n)
{
    if (n != 6 || memcmp(text, "<0x", 3) || text[5] != '>') return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (i == 3 && c == '+') digit = 0;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

static td_status byte_run_end(struct td_detokenizer *d, size_t at)
{
    struct td_tok_buf *run = &d->stages[at].run;
    size_t n = run->n, bad;
    td_status s = TD_OK;
    if (!n) return TD_OK;
    run->n = 0;
    if (td_utf8_valid(run->bytes, n, &bad)) {
        s = data(d, at + 1, run->bytes, n);
        return s ? s : end(d, at + 1);
    }
    for (size_t i = 0; i < n && !s; i++) {
        s = data_cp(d, at + 1, 0xFFFD);
        if (!s) s = end(d, at + 1);
    }
    return s;
}

static td_status byte_fallback_end(struct td_detokenizer *d, size_t at)
{
    struct stage *st = &d->stages[at];
    size_t n = st->held.n;
    int byte = byte_of(st->held.bytes, n);
    char c = (char)byte;
    st->held.n = 0;
    if (byte >= 0) return td_tok_buf_append(&st->run, &c, 1);
    td_status s = byte_run_end(d, at);
    if (!s) s = data(d, at + 1, st->held.bytes, n);
    return s ? s : end(d, at + 1);
}

static td_status replace_literal(struct td_detokenizer *d, size_t at, bool is_end)
{
    const struct td_tok_dec_op *op = &d->t->dec[at];
    const char *literal = op->pattern.literal;
    struct td_tok_buf *held = &d->stages[at].held;
    size_t n_literal = op->pattern.n_literal, i = 0;
    td_status s = TD_OK;
    const char *hit;
    while (!s && i < held->n && (hit = memmem(held->bytes + i, held->n - i, literal, n_literal))) {
        size_t n = (size_t)(hit - held->bytes) - i;
        s = data(d, at + 1, held->bytes + i, n);
        if (!s) s = data(d, at + 1, op->content, op->n_content);
        i += n + n_literal;
    }
    size_t keep = is_end ? 0 : n_literal - 1 < held->n - i ? n_literal - 1 : held->n - i;
    while (keep && memcmp(held->bytes + held->n - keep, literal, keep)) keep--;
    if (!s) s = data(d, at + 1, held->bytes + i, held->n - i - keep);
    if (keep) memmove(held->bytes, held->bytes + held->n - keep, keep);
    held->n = keep;
    return s;
}

static td_status replace_regex_end(struct td_detokenizer *d, size_t at)
{
    const struct td_tok_dec_op *op = &d->t->dec[at];
    struct td_tok_buf *held = &d->stages[at].held;
    struct td_tok_ranges ranges = {.budget = &d->budget};
    td_status s = td_tok_pattern_ranges(&op->pattern, &d->matcher, held->n ? held->bytes : "",
                                        held->n, &ranges);
    for (size_t i = 0; i < ranges.n && !s; i++) {
        if (ranges.v[i].is_match)
            s = data(d, at + 1, op->content, op->n_content);
        else
            s = data(d, at + 1, held->bytes + ranges.v[i].start,
                     ranges.v[i].end - ranges.v[i].start);
    }
    td_tok_ranges_free(&ranges);
    held->n = 0;
    return s;
}

static td_status strip(struct td_detokenizer *d, size_t at, const char *bytes, size_t n)
{
    const struct td_tok_dec_op *op = &d->t->dec[at];
    struct stage *st = &d->stages[at];
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s;) {
        uint32_t cp;
        int len = td_utf8_next(bytes + i, n - i, &cp);
        if (len <= 0) len = 1, cp = 0xFFFD; /* not reached: stages send whole characters */
        i += (size_t)len;
        st->leading = st->leading && cp == op->cp && st->n_seen < op->start;
        st->n_seen++;
        if (st->leading) continue;
        if (cp == op->cp && st->n_trailing < op->stop) {
            st->n_trailing++;
            continue;
        }
        if (cp == op->cp) { /* one more than may be removed: the first of them certainly stays */
            s = data_cp(d, at + 1, cp);
            continue;
        }
        for (; st->n_trailing && !s; st->n_trailing--) s = data_cp(d, at + 1, op->cp);
        if (!s) s = data_cp(d, at + 1, cp);
    }
    return s;
}

static td_status metaspace(struct td_detokenizer *d, size_t at, const char *bytes, size_t n)
{
    const struct td_tok_dec_op *op = &d->t->dec[at];
    struct stage *st = &d->stages[at];
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s;) {
        uint32_t cp;
        int len = td_utf8_next(bytes + i, n - i, &cp);
        if (len <= 0) len = 1, cp = 0xFFFD;
        i += (size_t)len;
        if (cp != op->cp)
            s = data_cp(d, at + 1, cp);
        else if (st->n_seen || !op->drop_first)
            s = data(d, at + 1, " ", 1);
    }
    return s;
}

/* Bytes of the current token reach stage `at`. */
static td_status data(struct td_detokenizer *d, size_t at, const char *bytes, size_t n)
{
    if (!n) return TD_OK;
    if (at == d->t->n_dec) return td_tok_buf_append(&d->out, bytes, n);
    struct stage *st = &d->stages[at];
    td_status s;
    switch (d->t->dec[at].kind) {
    case TD_DEC_BYTE_LEVEL:
    case TD_DEC_BYTE_FALLBACK:
        return td_tok_buf_append(&st->held, bytes, n);
    case TD_DEC_FUSE:
        return data(d, at + 1, bytes, n);
    case TD_DEC_REPLACE:
        s = td_tok_buf_append(&st->held, bytes, n);
        return s || !d->t->dec[at].pattern.literal ? s : replace_literal(d, at, false);
    case TD_DEC_STRIP:
        return strip(d, at, bytes, n);
    case TD_DEC_METASPACE:
        return metaspace(d, at, bytes, n);
    case TD_DEC_JOIN:
        s = st->n_seen && !st->in_token ? data(d, at + 1, " ", 1) : TD_OK;
        st->in_token = true;
        return s ? s : data(d, at + 1, bytes, n);
    }
    return TD_ERR_INTERNAL;
}

/* The current token ends at stage `at`. */
static td_status end(struct td_detokenizer *d, size_t at)
{
    if (at == d->t->n_dec) return TD_OK;
    struct stage *st = &d->stages[at];
    td_status s;
    switch (d->t->dec[at].kind) {
    case TD_DEC_BYTE_LEVEL:
        return byte_level_end(d, at);
    case TD_DEC_BYTE_FALLBACK:
        return byte_fallback_end(d, at);
    case TD_DEC_FUSE:
        return TD_OK;
    case TD_DEC_REPLACE:
        s = d->t->dec[at].pattern.literal ? replace_literal(d, at, true) : replace_regex_end(d, at);
        return s ? s : end(d, at + 1);
    case TD_DEC_STRIP:
        st->n_seen = st->n_trailing = 0;
        st->leading = true;
        return end(d, at + 1);
    case TD_DEC_METASPACE:
        st->n_seen++;
        return end(d, at + 1);
    case TD_DEC_JOIN: /* an empty token is joined too */
        s = st->n_seen && !st->in_token ? data(d, at + 1, " ", 1) : TD_OK;
        st->n_seen++;
        st->in_token = false;
        return s;
    }
    return TD_ERR_INTERNAL;
}

/* No more tokens come to stage `at`: stages that fuse all tokens into one end it. */
static td_status finish(struct td_detokenizer *d, size_t at)
{
    if (at == d->t->n_dec) return TD_OK;
    td_status s = TD_OK;
    switch (d->t->dec[at].kind) {
    case TD_DEC_BYTE_LEVEL:
        s = flush_utf8(d, at, true);
        if (!s) s = end(d, at + 1);
        break;
    case TD_DEC_BYTE_FALLBACK:
        s = byte_run_end(d, at);
        break;
    case TD_DEC_FUSE:
    case TD_DEC_JOIN:
        s = end(d, at + 1);
        break;
    default:
        break;
    }
    return s ? s : finish(d, at + 1);
}

static td_status push(struct td_detokenizer *d, int32_t id)
{
    size_t n;
    const char *text = td_vocab_text(&d->t->bpe.vocab, id, &n);
    if (!text) return TD_ERR_INVALID;
    if (d->skip_special && td_tokenizer_is_special(d->t, id)) return TD_OK;
    d->n_pushed += n;
    struct td_tok_budget more = td_tok_budget_of(d->n_pushed);
    d->budget.max_text_bytes = more.max_text_bytes;
    d->budget.max_heap_bytes = more.max_heap_bytes;
    td_status s = data(d, 0, text, n);
    return s ? s : end(d, 0);
}

static td_status create(const struct td_tokenizer *t, bool skip_special,
                        struct td_detokenizer **ret_d)
{
    struct td_detokenizer *d = calloc(1, sizeof *d + t->n_dec * sizeof *d->stages);
    if (!d) return TD_ERR_NOMEM;
    d->t = t;
    d->skip_special = skip_special;
    d->budget = td_tok_budget_of(0);
    d->out.budget = d->owed.budget = d->shown.budget = &d->budget;
    for (size_t i = 0; i < t->n_dec; i++) {
        d->stages[i].leading = true;
        d->stages[i].held.budget = d->stages[i].run.budget = &d->budget;
    }
    *ret_d = d;
    return TD_OK;
}

/* A model's vocabulary may be padded beyond its tokenizer's: in a stream such an id has no text. */
static td_status push_known(struct td_detokenizer *d, int32_t id)
{
    td_status s = push(d, id);
    return s == TD_ERR_INVALID ? TD_OK : s;
}

static td_status push_all(struct td_detokenizer *d, const int32_t *ids, size_t n, bool is_stream,
                          size_t *ret_at)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s; i++) {
        *ret_at = i;
        s = is_stream ? push_known(d, ids[i]) : push(d, ids[i]);
    }
    return s;
}

td_status td_tokenizer_decode(const struct td_tokenizer *t, const int32_t *ids, size_t n,
                              bool skip_special, char **ret_text, size_t *ret_bytes,
                              struct td_err *err)
{
    struct td_detokenizer *d;
    size_t at = 0;
    td_status s = create(t, skip_special, &d);
    if (s) return td_fail(err, s, "no memory to decode %zu tokens", n);
    s = push_all(d, ids, n, false, &at);
    if (!s) s = finish(d, 0);
    if (!s) s = td_tok_buf_append(&d->out, "", 1);
    if (s == TD_ERR_INVALID)
        td_fail(err, s, "token %zu has id %d, which the vocabulary (0..%d) does not have", at,
                ids[at], t->bpe.vocab.n_ids - 1);
    else if (s == TD_ERR_LIMIT)
        td_fail(
            err, s,
            "token %zu of %zu: %s's decoder makes more than %zu bytes of text, or its regex too "
            "many steps",
            at, n, t->file, d->budget.max_text_bytes);
    else if (s)
        td_fail(err, s, "token %zu of %zu cannot be decoded (%s)", at, n, td_status_name(s));
    if (!s) {
        *ret_text = d->out.bytes;
        *ret_bytes = d->out.n - 1;
        d->out = (struct td_tok_buf){0}; /* the caller's now */
    }
    td_detokenizer_free(d);
    return s;
}

/* Whether the end of all can make text now: only of bytes that a stage holds back. (No regex is
 * asked of an empty text, Strip drops what it holds, and Join, which is alone, has no end.) */
static bool may_owe(const struct td_detokenizer *d)
{
    for (size_t i = 0; i < d->t->n_dec; i++) {
        const struct stage *st = &d->stages[i];
        if (st->held.n || st->run.n) return true;
    }
    return false;
}

/* The text that the prefix alone would give at its end: by another pipeline, which is ended. */
static td_status find_owed(struct td_detokenizer *d, const int32_t *prefix, size_t n_prefix)
{
    struct td_detokenizer *alone;
    size_t at;
    td_status s = create(d->t, d->skip_special, &alone);
    if (s) return s;
    s = push_all(alone, prefix, n_prefix, true, &at);
    if (!s) s = finish(alone, 0);
    TD_ASSERT(s ||
              d->out.n <= alone->out.n); /* without the end it is a prefix of it with the end */
    if (!s && alone->out.n > d->out.n)
        s = td_tok_buf_append(&d->owed, alone->out.bytes + d->out.n, alone->out.n - d->out.n);
    td_detokenizer_free(alone);
    return s;
}

td_status td_detokenizer_create(const struct td_tokenizer *t, const int32_t *prefix,
                                size_t n_prefix, bool skip_special,
                                struct td_detokenizer **ret_detokenizer)
{
    struct td_detokenizer *d;
    size_t at;
    td_status s = create(t, skip_special, &d);
    if (s) return s;
    if (!prefix) n_prefix = 0;
    s = push_all(d, prefix, n_prefix, true, &at);
    if (!s && n_prefix && may_owe(d)) s = find_owed(d, prefix, n_prefix);
    d->out.n = 0;
    if (s)
        td_detokenizer_free(d);
    else
        *ret_detokenizer = d;
    return s;
}

void td_detokenizer_free(struct td_detokenizer *d)
{
    if (!d) return;
    for (size_t i = 0; i < d->t->n_dec; i++) {
        td_tok_buf_free(&d->stages[i].held);
        td_tok_buf_free(&d->stages[i].run);
    }
    td_tok_matcher_free(&d->matcher);
    td_tok_buf_free(&d->out);
    td_tok_buf_free(&d->owed);
    td_tok_buf_free(&d->shown);
    free(d);
}

/* Moves the new text to `shown`, without the prefix's part. When the two disagree, the prefix's end
 * was undecided, and all of the text is new. */
static td_status show(struct td_detokenizer *d, const char **ret_text, size_t *ret_bytes)
{
    size_t i = 0;
    td_status s = TD_OK;
    d->shown.n = 0;
    while (i < d->out.n && d->n_paid < d->owed.n && d->out.bytes[i] == d->owed.bytes[d->n_paid])
        i++, d->n_paid++;
    if (i < d->out.n && d->n_paid < d->owed.n) {
        s = td_tok_buf_append(&d->shown, d->owed.bytes, d->n_paid);
        d->owed.n = 0;
    }
    if (!s && i < d->out.n) s = td_tok_buf_append(&d->shown, d->out.bytes + i, d->out.n - i);
    d->out.n = 0;
    if (s) return s;
    *ret_text = d->shown.n ? d->shown.bytes : "";
    *ret_bytes = d->shown.n;
    return TD_OK;
}

td_status td_detokenizer_push(struct td_detokenizer *d, int32_t id, const char **ret_text,
                              size_t *ret_bytes)
{
    td_status s = push_known(d, id);
    return s ? s : show(d, ret_text, ret_bytes);
}

td_status td_detokenizer_finish(struct td_detokenizer *d, const char **ret_text, size_t *ret_bytes)
{
    td_status s = finish(d, 0);
    return s ? s : show(d, ret_text, ret_bytes);
}
