/* tokenizer_sp_normalize.c - the step of a SentencePiece model before its merges, as that library
 * does it.
 *
 * From the front on, the longest text that has a replacement is replaced; else one character stays.
 * Texts of user-defined pieces are kept as they are. With remove_extra, spaces at both ends go, and
 * of several in a row one stays; what counts as a space is what the replacements leave of the text.
 * The replacements come as a double array (Aoe 1989, in the form of Darts-clone) and a string.
 * Nothing says how long a key may be, and an array may be made to run in circles, so looking for
 * one ends at KEY_MAX_BYTES, far above the longest of the library's own tables. */
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_internal.h"

#define KEY_MAX_BYTES 1024
#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

/* A unit of the double array: the byte that leads to it, whether a key ends here, and where its
 * children begin, relative to it; or the value of a key. */
static uint32_t label_of(uint32_t unit) { return unit & (UINT32_C(1) << 31 | 0xFF); }
static bool ends_key(uint32_t unit) { return unit >> 8 & 1; }
static size_t children_of(uint32_t unit) { return (size_t)(unit >> 10) << (unit >> 6 & 8); }
static uint32_t value_of(uint32_t unit) { return unit & ~(UINT32_C(1) << 31); }

/* The longest key that text begins with. *ret_n 0: none. TD_ERR_LIMIT: see above. */
static td_status replacement(const struct td_sp_rules *r, const char *text, size_t n,
                             const char **ret_text, size_t *ret_n)
{
    size_t at = r->n_units ? children_of(r->units[0]) : 0;
    *ret_n = 0;
    for (size_t i = 0; i < n && r->n_units; i++) {
        at ^= (uint8_t)text[i];
        if (at >= r->n_units || label_of(r->units[at]) != (uint8_t)text[i]) return TD_OK;
        if (i == KEY_MAX_BYTES) return TD_ERR_LIMIT;
        uint32_t unit = r->units[at];
        at ^= children_of(unit);
        if (!ends_key(unit)) continue;
        *ret_text = r->texts + value_of(r->units[at]); /* as td_sp_rules_set checked */
        *ret_n = i + 1;
    }
    return TD_OK;
}

/* What the beginning of a text becomes, and how many of its bytes that is. */
static td_status normalize_front(const struct td_sp_rules *r, const char *text, size_t n,
                                 const char **ret_text, size_t *ret_n_text, size_t *ret_n)
{
    uint32_t cp;
    if (r->kept.n && td_tok_trie_longest(&r->kept, text, n, ret_n) >= 0) {
        *ret_text = text;
        *ret_n_text = *ret_n;
        return TD_OK;
    }
    td_status s = replacement(r, text, n, ret_text, ret_n);
    if (s || *ret_n) {
        *ret_n_text = s ? 0 : strlen(*ret_text);
        return s;
    }
    int len = td_utf8_next(text, n, &cp);
    *ret_n = len > 0 ? (size_t)len : 1; /* a key ended within a character */
    *ret_text = len > 0 ? text : "\xEF\xBF\xBD";
    *ret_n_text = len > 0 ? (size_t)len : 3;
    return TD_OK;
}

static td_status append(const struct td_sp_rules *r, const char *text, size_t n,
                        struct td_tok_buf *out)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s;) {
        const char *space = r->escape ? memchr(text + i, ' ', n - i) : NULL;
        size_t n_plain = space ? (size_t)(space - text) - i : n - i;
        s = td_tok_buf_append(out, text + i, n_plain);
        if (!s && space) s = td_tok_buf_append(out, SPACE_MARK, 3);
        i += n_plain + (space ? 1 : 0);
    }
    return s;
}

td_status td_sp_normalize(const struct td_sp_rules *r, const char *text, size_t n, bool first,
                          struct td_tok_buf *out)
{
    const char *space = r->escape ? SPACE_MARK : " ", *part;
    size_t n_space = strlen(space), n_part, n_taken, i = 0;
    td_status s = TD_OK;
    for (; r->remove_extra && i < n; i += n_taken) {
        s = normalize_front(r, text + i, n - i, &part, &n_part, &n_taken);
        if (s || n_part != 1 || part[0] != ' ') break;
    }
    if (s || i == n) return s;
    if (r->mark == TD_PREPEND_ALWAYS || (r->mark == TD_PREPEND_FIRST && first))
        s = td_tok_buf_append(out, space, n_space);
    bool after_space = r->remove_extra;
    for (; i < n && !s; i += n_taken) {
        if ((s = normalize_front(r, text + i, n - i, &part, &n_part, &n_taken))) break;
        for (; after_space && n_part && *part == ' '; part++) n_part--;
        if (!n_part) continue;
        s = append(r, part, n_part, out);
        after_space = r->remove_extra && part[n_part - 1] == ' ';
    }
    while (!s && r->remove_extra && out->n >= n_space &&
           !memcmp(out->bytes + out->n - n_space, space, n_space))
        out->n -= n_space;
    return s;
}

/* Each unit at which a key may end has a value, and that is where a character begins. */
static td_status check_values(const struct td_sp_rules *r, const char *what, struct td_err *err)
{
    for (size_t i = 0; i < r->n_units; i++) {
        uint32_t unit = r->units[i];
        if (unit >> 31 || !ends_key(unit)) continue;
        size_t at = i ^ children_of(unit),
               value = at < r->n_units ? value_of(r->units[at]) : r->n_texts;
        if (value >= r->n_texts || ((uint8_t)r->texts[value] & 0xC0) == 0x80)
            return td_fail(err, TD_ERR_CORRUPT, "%s: unit %zu has no text", what, i);
    }
    return TD_OK;
}

td_status td_sp_rules_set(struct td_sp_rules *r, const uint8_t *charsmap, size_t n_bytes,
                          struct td_err *err)
{
    const char *what = "normalizer_spec: precompiled_charsmap";
    size_t n_trie, bad;
    if (!charsmap) return TD_OK;
    if (n_bytes < 4) return td_fail(err, TD_ERR_CORRUPT, "%s has %zu bytes", what, n_bytes);
    n_trie = (size_t)charsmap[0] | (size_t)charsmap[1] << 8 | (size_t)charsmap[2] << 16 |
             (size_t)charsmap[3] << 24;
    if (n_trie >= n_bytes - 4 || n_trie < 4 || n_trie % 4)
        return td_fail(
            err, TD_ERR_CORRUPT,
            "%s has %zu bytes, its table by its own number %zu: must be fewer, and whole "
            "units of 4",
            what, n_bytes, n_trie);
    const uint8_t *texts = charsmap + 4 + n_trie;
    size_t n_texts = n_bytes - 4 - n_trie;
    if (!td_utf8_valid((const char *)texts, n_texts, &bad))
        return td_fail(err, TD_ERR_CORRUPT, "%s: its texts are not valid UTF-8 at byte %zu", what,
                       bad);
    r->units = malloc(n_trie);
    r->texts = malloc(n_texts + 1);
    if (!r->units || !r->texts) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    r->n_units = n_trie / 4;
    for (size_t i = 0; i < r->n_units; i++) {
        const uint8_t *u = charsmap + 4 + 4 * i;
        r->units[i] =
            (uint32_t)u[0] | (uint32_t)u[1] << 8 | (uint32_t)u[2] << 16 | (uint32_t)u[3] << 24;
    }
    memcpy(r->texts, texts, n_texts);
    r->texts[n_texts] = '\0';
    r->n_texts = n_texts + 1;
    return check_values(r, what, err);
}

void td_sp_rules_free(struct td_sp_rules *r)
{
    if (!r) return;
    free(r->units);
    free(r->texts);
    td_tok_trie_free(&r->kept);
    free(r);
}
