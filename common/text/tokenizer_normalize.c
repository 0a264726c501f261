/* tokenizer_normalize.c - the normalizers: each reads one buffer and writes the other.
 *
 * Unicode forms: utf8proc decomposes characters and composes sequences. The canonical ordering
 * between the two is our own, because utf8proc sorts runs of combining marks by insertion, and a
 * megabyte of marks would take hours. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "common/text/tokenizer_internal.h"

#define CCC_MAX 256

struct code_points {
    int32_t *v;
    size_t n, capacity;
    struct td_tok_budget *budget;
};

static td_status grow(struct code_points *c, size_t room)
{
    if (c->capacity - c->n >= room) return TD_OK;
    if (c->budget && c->n > c->budget->max_text_bytes) {
        /* composing would leave fewer characters, but never so few */
        c->budget->text_over = true;
        return TD_ERR_LIMIT;
    }
    size_t capacity = c->capacity ? c->capacity * 2 : 256;
    while (capacity < c->n + room) capacity *= 2;
    td_status s;
    int32_t *grown =
        td_tok_grow(c->budget, c->v, c->capacity * sizeof *grown, capacity * sizeof *grown, &s);
    if (!grown) return s;
    c->v = grown;
    c->capacity = capacity;
    return TD_OK;
}

static unsigned ccc(int32_t cp)
{
    return (unsigned)utf8proc_get_property(cp)->combining_class & (CCC_MAX - 1);
}

/* Stable sort by combining class of a run of marks (class > 0): counting sort, linear. */
static td_status sort_marks(struct td_tok_budget *budget, int32_t *run, size_t n)
{
    bool sorted = true;
    for (size_t i = 1; i < n && sorted; i++) sorted = ccc(run[i - 1]) <= ccc(run[i]);
    if (sorted) return TD_OK;
    td_status s;
    int32_t *copy = td_tok_grow(budget, NULL, 0, n * sizeof *copy, &s);
    if (!copy) return s;
    size_t at[CCC_MAX + 1] = {0};
    for (size_t i = 0; i < n; i++) at[ccc(run[i]) + 1]++;
    for (size_t c = 1; c < CCC_MAX; c++) at[c] += at[c - 1];
    memcpy(copy, run, n * sizeof *copy);
    for (size_t i = 0; i < n; i++) run[at[ccc(copy[i])]++] = copy[i];
    td_tok_release(budget, copy, n * sizeof *copy);
    return TD_OK;
}

static td_status unicode_form(const struct td_tok_norm_op *op, const char *text, size_t n,
                              struct td_tok_buf *out)
{
    bool ascii = true;
    for (size_t i = 0; i < n && ascii; i++) ascii = (uint8_t)text[i] < 0x80;
    if (ascii) return td_tok_buf_append(out, text, n);
    struct code_points c = {.budget = out->budget};
    td_status s = TD_OK;
    size_t run = 0; /* start of the marks at the end of c */
    for (size_t i = 0; i < n && !s;) {
        uint32_t cp;
        int len = td_utf8_next(text + i, n - i, &cp);
        if (len <= 0) len = 1, cp = 0xFFFD; /* not reached: text is valid */
        i += (size_t)len;
        s = grow(&c, 32); /* the longest decomposition has 18 characters */
        if (s) break;
        utf8proc_ssize_t more = utf8proc_decompose_char(
            (int32_t)cp, c.v + c.n, (utf8proc_ssize_t)(c.capacity - c.n),
            (utf8proc_option_t)(UTF8PROC_DECOMPOSE | (op->compat ? UTF8PROC_COMPAT : 0)), NULL);
        if (more < 0 || (size_t)more > c.capacity - c.n) s = TD_ERR_INTERNAL;
        for (utf8proc_ssize_t k = 0; k < more && !s; k++) {
            if (!ccc(c.v[c.n])) {
                s = sort_marks(c.budget, c.v + run, c.n - run);
                run = c.n + 1;
            }
            c.n++;
        }
    }
    if (!s) s = sort_marks(c.budget, c.v + run, c.n - run);
    if (!s && op->compose) {
        utf8proc_ssize_t n_composed = utf8proc_normalize_utf32(
            c.v, (utf8proc_ssize_t)c.n, (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
        if (n_composed < 0)
            s = TD_ERR_INTERNAL;
        else
            c.n = (size_t)n_composed;
    }
    for (size_t i = 0; i < c.n && !s; i++) s = td_tok_buf_append_cp(out, (uint32_t)c.v[i]);
    td_tok_release(c.budget, c.v, c.capacity * sizeof *c.v);
    return s;
}

static td_status replace(const struct td_tok_norm_op *op, struct td_tok_matcher *m,
                         const char *text, size_t n, struct td_tok_buf *out, bool *front_lost)
{
    struct td_tok_ranges ranges = {.budget = out->budget};
    td_status s = td_tok_pattern_ranges(&op->pattern, m, text, n, &ranges);
    for (size_t i = 0; i < ranges.n && !s; i++) {
        if (ranges.v[i].is_match)
            s = td_tok_buf_append(out, op->content, op->n_content);
        else
            s = td_tok_buf_append(out, text + ranges.v[i].start,
                                  ranges.v[i].end - ranges.v[i].start);
    }
    if (ranges.n && ranges.v[0].is_match && !op->n_content) *front_lost = true;
    td_tok_ranges_free(&ranges);
    return s;
}

static td_status strip(const struct td_tok_norm_op *op, const char *text, size_t n,
                       struct td_tok_buf *out, bool *front_lost)
{
    size_t start = 0;
    uint32_t cp;
    while (op->left && start < n) {
        int len = td_utf8_next(text + start, n - start, &cp);
        if (len <= 0 || !td_cp_is_space(cp)) break;
        start += (size_t)len;
    }
    if (start) *front_lost = true;
    while (op->right && n > start) {
        size_t before = td_utf8_before(text, n, &cp);
        if (!td_cp_is_space(cp)) break;
        n = before;
    }
    return td_tok_buf_append(out, text + start, n - start);
}

/* As Rust's char::to_lowercase: the simple mapping, except for the one character whose full mapping
 * is longer. */
static td_status lowercase(const char *text, size_t n, struct td_tok_buf *out)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s;) {
        uint32_t cp;
        int len = td_utf8_next(text + i, n - i, &cp);
        if (len <= 0) len = 1, cp = 0xFFFD;
        if (cp == 0x130)
            s = td_tok_buf_append(out, "i\xCC\x87", 3);
        else
            s = td_tok_buf_append_cp(out, (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp));
        i += (size_t)len;
    }
    return s;
}

static td_status apply(const struct td_tok_norm_op *op, struct td_tok_matcher *m, const char *text,
                       size_t n, bool first, struct td_tok_buf *out, bool *front_lost)
{
    td_status s = TD_OK;
    switch (op->kind) {
    case TD_NORM_SENTENCEPIECE:
        return td_sp_normalize(op->rules, text, n, first, out);
    case TD_NORM_PREPEND:
        if (n) s = td_tok_buf_append(out, op->content, op->n_content);
        return s ? s : td_tok_buf_append(out, text, n);
    case TD_NORM_REPLACE:
        return replace(op, m, text, n, out, front_lost);
    case TD_NORM_UNICODE:
        return unicode_form(op, text, n, out);
    case TD_NORM_STRIP:
        return strip(op, text, n, out, front_lost);
    case TD_NORM_LOWERCASE:
        return lowercase(text, n, out);
    case TD_NORM_BYTE_LEVEL:
        for (size_t i = 0; i < n && !s; i++)
            s = td_tok_buf_append_cp(out, td_byte_to_cp((uint8_t)text[i]));
        return s;
    }
    return TD_ERR_INTERNAL;
}

td_status td_tok_normalize(const struct td_tokenizer *t, struct td_tok_matcher *m, const char *text,
                           size_t n, bool first, struct td_tok_buf *out, struct td_tok_buf *tmp,
                           bool *ret_front_lost, size_t *ret_at)
{
    *ret_at = 0;
    *ret_front_lost = false;
    out->n = tmp->n = 0;
    if (!t->n_norm) return td_tok_buf_append(out, text, n);
    /* chosen so that the last operation writes `out` */
    struct td_tok_buf *to = t->n_norm % 2 ? out : tmp, *other = t->n_norm % 2 ? tmp : out;
    td_status s = TD_OK;
    for (size_t i = 0; i < t->n_norm && !s; i++) {
        to->n = 0;
        *ret_at = i;
        s = apply(&t->norm[i], m, text, n, first, to, ret_front_lost);
        text = to->bytes;
        n = to->n;
        struct td_tok_buf *swap = to;
        to = other;
        other = swap;
    }
    return s;
}

const char *td_tok_normalizer_name(const struct td_tokenizer *t, size_t at)
{
    static const char *const names[] = {
        [TD_NORM_PREPEND] = "Prepend",      [TD_NORM_REPLACE] = "Replace",
        [TD_NORM_STRIP] = "Strip",          [TD_NORM_LOWERCASE] = "Lowercase",
        [TD_NORM_BYTE_LEVEL] = "ByteLevel", [TD_NORM_SENTENCEPIECE] = "SentencePiece"};
    if (at >= t->n_norm) return "none";
    const struct td_tok_norm_op *op = &t->norm[at];
    if (op->kind == TD_NORM_UNICODE)
        return op->compat ? op->compose ? "NFKC" : "NFKD" : op->compose ? "NFC" : "NFD";
    return names[op->kind];
}
