/* tokenizer_added.c - finds added tokens in text: a trie is walked from each position, the longest
 * match wins, and the search continues behind it.
 *
 * The rules around a match are Hugging Face's, oddities included. A token that must stand as a
 * single word and does not is passed over whole. lstrip and rstrip take the white space beside the
 * match into the token, but the search continues behind the match itself; so a token made of white
 * space may be found once more in the white space that was taken, and is dropped when lstrip leaves
 * nothing of it. Cost: text length times the longest token, at worst. */
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_internal.h"

static td_status node_add(struct td_tok_trie *trie, uint8_t byte, int32_t sibling,
                          int32_t *ret_node)
{
    if (trie->n == trie->capacity) {
        size_t capacity = trie->capacity ? trie->capacity * 2 : 64;
        struct td_tok_trie_node *grown = realloc(trie->nodes, capacity * sizeof *grown);
        if (!grown) return TD_ERR_NOMEM;
        trie->nodes = grown;
        trie->capacity = capacity;
    }
    trie->nodes[trie->n] =
        (struct td_tok_trie_node){.child = -1, .sibling = sibling, .added = -1, .byte = byte};
    *ret_node = (int32_t)trie->n++;
    return TD_OK;
}

int32_t td_tok_trie_child(const struct td_tok_trie *trie, int32_t node, uint8_t byte)
{
    if (node == 0) return trie->first[byte] ? trie->first[byte] : -1;
    int32_t child = trie->nodes[node].child;
    while (child >= 0 && trie->nodes[child].byte != byte) child = trie->nodes[child].sibling;
    return child;
}

td_status td_tok_trie_add(struct td_tok_trie *trie, const char *text, size_t n, int32_t added)
{
    int32_t node = 0, next;
    td_status s = trie->n ? TD_OK : node_add(trie, 0, -1, &node);
    for (size_t i = 0; i < n && !s; i++, node = next) {
        uint8_t byte = (uint8_t)text[i];
        next = td_tok_trie_child(trie, node, byte);
        if (next >= 0) continue;
        s = node_add(trie, byte, node ? trie->nodes[node].child : -1, &next);
        if (s) return s;
        if (node)
            trie->nodes[node].child = next;
        else
            trie->first[byte] = next;
    }
    /* of equal patterns the first one counts */
    if (!s && trie->nodes[node].added < 0) trie->nodes[node].added = added;
    return s;
}

void td_tok_trie_free(struct td_tok_trie *trie)
{
    free(trie->nodes);
    *trie = (struct td_tok_trie){0};
}

int32_t td_tok_trie_longest(const struct td_tok_trie *trie, const char *text, size_t n,
                            size_t *ret_n)
{
    int32_t node = 0, found = -1;
    for (size_t i = 0; i < n; i++) {
        node = td_tok_trie_child(trie, node, (uint8_t)text[i]);
        if (node < 0) break;
        if (trie->nodes[node].added >= 0) {
            found = trie->nodes[node].added;
            *ret_n = i + 1;
        }
    }
    return found;
}

static bool stands_alone(const char *text, size_t n, size_t start, size_t end)
{
    uint32_t cp;
    if (start > 0) {
        td_utf8_before(text, start, &cp);
        if (td_cp_is_word(cp)) return false;
    }
    return end == n || td_utf8_next(text + end, n - end, &cp) <= 0 || !td_cp_is_word(cp);
}

td_status td_tok_split_added(const struct td_tokenizer *t, const struct td_tok_trie *trie,
                             struct td_tok_text *out, size_t base, size_t n, bool first)
{
    size_t done = 0;
    td_status s = TD_OK;
    for (size_t at = 0, n_match; trie->n && at < n && !s;) {
        const char *text = out->buf.bytes + base;
        if (!trie->first[(uint8_t)text[at]]) {
            at++;
            continue;
        }
        int32_t found = td_tok_trie_longest(trie, text + at, n - at, &n_match);
        if (found < 0) {
            at++;
            continue;
        }
        const struct td_tok_added *added = &t->added[found];
        size_t start = at, end = at + n_match;
        at = end;
        if (added->single_word && !stands_alone(text, n, start, end)) continue;
        if (added->behind &&
            (start > done || !out->n || out->pieces[out->n - 1].id != added->behind - 1))
            continue;
        uint32_t cp;
        while (added->lstrip && start > done) {
            size_t before = td_utf8_before(text, start, &cp);
            if (!td_cp_is_space(cp)) break;
            start = before;
        }
        if (added->lstrip && start < done) start = done;
        while (added->rstrip && end < n) {
            int len = td_utf8_next(text + end, n - end, &cp);
            if (len <= 0 || !td_cp_is_space(cp)) break;
            end += (size_t)len;
        }
        if (done < start)
            s = td_tok_text_add_piece(out, base + done, start - done, -1, first && !done);
        if (!s && start < end)
            s = td_tok_text_add_piece(out, base + start, end - start, added->id, false);
        done = end;
    }
    if (!s && done != n) s = td_tok_text_add_piece(out, base + done, n - done, -1, first && !done);
    return s;
}

static bool is_named(const struct td_tokenizer *t, int32_t id)
{
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].id == id) return t->added[i].named;
    return false;
}

td_status td_tok_add_added(const struct td_tokenizer *t, int32_t id, size_t start,
                           size_t max_tokens, struct td_token_list *list)
{
    bool mark_alone = list->n == start + 1 && list->ids[start] == t->lone_mark;
    if (mark_alone && is_named(t, id)) list->n = start;
    return td_token_list_add_all(list, &id, 1, max_tokens);
}
