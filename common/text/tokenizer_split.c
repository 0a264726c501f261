/* tokenizer_split.c - the pre-tokenizers: each reads one cut text and writes another. Pieces
 * that are tokens pass unchanged. */
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_internal.h"

/* Applies the behaviour to a text's ranges, in place: afterwards each range is a piece, and
 * is_match means "drop it". */
static void behave(struct td_tok_ranges *ranges, enum td_tok_behavior behavior)
{
    struct td_tok_range *v = ranges->v;
    size_t n = 0;
    bool previous = false;
    switch (behavior) {
    case TD_SPLIT_REMOVED:
        return;
    case TD_SPLIT_ISOLATED:
        for (size_t i = 0; i < ranges->n; i++) v[i].is_match = false;
        return;
    case TD_SPLIT_CONTIGUOUS:
    case TD_SPLIT_PREVIOUS:
        for (size_t i = 0; i < ranges->n; i++) {
            bool match = v[i].is_match,
                 joins = behavior == TD_SPLIT_CONTIGUOUS ? match == previous : match && !previous;
            if (joins && n)
                v[n - 1].end = v[i].end;
            else
                v[n++] = (struct td_tok_range){v[i].start, v[i].end, false};
            previous = match;
        }
        ranges->n = n;
        return;
    /* the same from the right: the kept ranges gather at the end of v, then move to its front */
    case TD_SPLIT_NEXT:
        n = ranges->n;
        for (size_t i = ranges->n; i-- > 0;) {
            bool match = v[i].is_match;
            if (match && !previous && n < ranges->n)
                v[n].start = v[i].start;
            else
                v[--n] = (struct td_tok_range){v[i].start, v[i].end, false};
            previous = match;
        }
        memmove(v, v + n, (ranges->n - n) * sizeof *v);
        ranges->n -= n;
        return;
    }
}

/* Writes one piece's new text to out->buf from `start` on. */
static td_status rewrite(const struct td_tok_pre_op *op, const char *text, size_t n, bool first,
                         struct td_tok_buf *out)
{
    td_status s = TD_OK;
    if (op->kind == TD_PRE_BYTE_LEVEL && op->add_prefix_space && text[0] != ' ')
        s = td_tok_buf_append(out, " ", 1);
    if (op->kind != TD_PRE_METASPACE) return s ? s : td_tok_buf_append(out, text, n);
    size_t n_mark = (size_t)op->n_replacement;
    bool marked = text[0] == ' ' || (n >= n_mark && !memcmp(text, op->replacement, n_mark));
    if (!marked &&
        (op->prepend == TD_PREPEND_ALWAYS || (op->prepend == TD_PREPEND_FIRST && first))) {
        s = td_tok_buf_append(out, op->replacement, n_mark);
    }
    for (size_t i = 0; i < n && !s;) {
        const char *space = memchr(text + i, ' ', n - i);
        size_t n_plain = space ? (size_t)(space - text) - i : n - i;
        s = td_tok_buf_append(out, text + i, n_plain);
        if (!s && space) s = td_tok_buf_append(out, op->replacement, n_mark);
        i += n_plain + (space ? 1 : 0);
    }
    return s;
}

/* What Python's str.isspace() takes beside the characters of Unicode's property White_Space: the
 * separators of files, groups, records and units. */
static bool is_space_of_python(uint32_t cp)
{
    return td_cp_is_space(cp) || (cp >= 0x1C && cp <= 0x1F);
}

/* TD_PRE_RUNS: out->buf[start..). */
static td_status cut_runs(size_t start, bool first, struct td_tok_text *out)
{
    size_t end = out->buf.n, piece = start;
    int32_t n_slice = 0, n_run = 0;
    bool in_space = false;
    td_status s = TD_OK;
    for (size_t at = start; at < end && !s;) {
        uint32_t cp;
        int n = td_utf8_next(out->buf.bytes + at, end - at, &cp);
        TD_ASSERT(n > 0); /* texts were checked */
        bool is_space = is_space_of_python(cp), new_slice = n_slice == TD_TOK_SLICE_CHARS;
        if (new_slice) n_slice = 0;
        n_run = n_slice && is_space == in_space ? n_run + 1 : 1;
        if (new_slice || n_run > TD_TOK_RUN_CHARS) {
            s = td_tok_text_add_piece(out, piece, at - piece, -1, first && piece == start);
            piece = at;
            n_run = 1;
        }
        in_space = is_space;
        n_slice++;
        at += (size_t)n;
    }
    if (s || piece == end) return s;
    return td_tok_text_add_piece(out, piece, end - piece, -1, first && piece == start);
}

/* Cuts out->buf[start..) by the operation's pattern and adds the pieces. */
static td_status cut(const struct td_tok_pre_op *op, struct td_tok_matcher *m,
                     struct td_tok_ranges *ranges, size_t start, bool first,
                     struct td_tok_text *out)
{
    size_t n = out->buf.n - start;
    if (op->kind == TD_PRE_RUNS) return cut_runs(start, first, out);
    if (op->kind != TD_PRE_SPLIT && !op->split)
        return td_tok_text_add_piece(out, start, n, -1, first);
    ranges->n = 0;
    td_status s = td_tok_pattern_ranges(&op->pattern, m, out->buf.bytes + start, n, ranges);
    for (size_t i = 0; i < ranges->n && op->invert; i++)
        ranges->v[i].is_match = !ranges->v[i].is_match;
    if (!s) behave(ranges, op->behavior);
    for (size_t i = 0; i < ranges->n && !s; i++) {
        const struct td_tok_range *range = &ranges->v[i];
        if (!range->is_match)
            s = td_tok_text_add_piece(out, start + range->start, range->end - range->start, -1,
                                      first && !range->start);
    }
    return s;
}

/* Replaces bytes by their printable characters: the pieces from `from` on, whose text is raw in
 * out->buf[start..), move to `mapped`. */
static td_status map_bytes(const struct td_tok_text *in, struct td_tok_text *out)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < in->n && !s; i++) {
        struct td_tok_piece piece = in->pieces[i];
        size_t start = out->buf.n;
        for (uint32_t k = 0; k < piece.n && piece.id < 0 && !s; k++) {
            s = td_tok_buf_append_cp(&out->buf,
                                     td_byte_to_cp((uint8_t)in->buf.bytes[piece.start + k]));
        }
        if (!s) s = td_tok_text_add_piece(out, start, out->buf.n - start, piece.id, piece.first);
    }
    return s;
}

td_status td_tok_pre_tokenize(const struct td_tok_pre_op *op, struct td_tok_matcher *m,
                              const struct td_tok_text *in, struct td_tok_text *out)
{
    struct td_tok_text raw = {.buf.budget = out->buf.budget},
                       *to = op->kind == TD_PRE_BYTE_LEVEL ? &raw : out;
    struct td_tok_ranges ranges = {.budget = out->buf.budget};
    td_status s = TD_OK;
    td_tok_text_clear(out);
    for (size_t i = 0; i < in->n && !s; i++) {
        const struct td_tok_piece *piece = &in->pieces[i];
        if (piece->id >= 0) {
            s = td_tok_text_add_piece(to, to->buf.n, 0, piece->id, false);
            continue;
        }
        size_t start = to->buf.n;
        s = rewrite(op, in->buf.bytes + piece->start, piece->n, piece->first, &to->buf);
        if (!s) s = cut(op, m, &ranges, start, piece->first, to);
    }
    if (!s && op->kind == TD_PRE_BYTE_LEVEL) s = map_bytes(&raw, out);
    td_tok_text_free(&raw);
    td_tok_ranges_free(&ranges);
    return s;
}
