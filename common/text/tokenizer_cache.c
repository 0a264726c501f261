/* tokenizer_cache.c - see tokenizer_cache.h.
 *
 * Cuts. (1) Added tokens of the raw text: what is between two of them passes all stages alone
 * (tokenizer_encode.c). The templates of chats put them between messages, so a message is a part.
 * (2) Long text between them, where the pre-tokenizer is one of the patterns that are known to end
 * a word at the space in "a b" (tokenizer_regex.c): before such a space, the first one PART_BYTES
 * or more behind the last cut. Nothing before the space is looked at behind it and the reverse, and
 * NFC does not compose with a space; other normalizers, and added tokens that are looked for in
 * normalized text, could cross it, so such tokenizers have the first kind of cut alone.
 *
 * The cuts of (2) depend on what is before them only, so texts with a common beginning have its
 * parts in common, but for the last, in which they differ. */
#include "common/text/tokenizer_cache.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/text/tokenizer_internal.h"

enum {
    PART_BYTES = 512,
    LEAST_BYTES = 16, /* less is encoded as quickly as it is found */
    LARGEST_SHARE = 4 /* a part above this share of the bound is not kept */
};

struct part {
    struct part *next; /* of its bucket */
    struct part *newer, *older;
    uint64_t hash, salt;
    uint32_t n_bytes, n_ids;
    bool first;    /* of its text: tokenizers that mark the beginning of a text have other ids */
    int32_t ids[]; /* then the text */
};

struct td_token_cache {
    const struct td_tokenizer *t;
    bool cuts_at_spaces;
    uint64_t seed, salt; /* of the call */
    size_t max_bytes, n_buckets;
    struct part **buckets;
    struct part *newest, *oldest;
    struct td_token_cache_stats stats;
};

static const char *text_of(const struct part *p) { return (const char *)(p->ids + p->n_ids); }

static size_t bytes_of(const struct part *p)
{
    return sizeof *p + p->n_ids * sizeof *p->ids + p->n_bytes;
}

/* Whether (2) above holds. */
static bool cuts_at_spaces(const struct td_tokenizer *t)
{
    for (size_t i = 0; i < t->n_norm; i++)
        if (t->norm[i].kind != TD_NORM_UNICODE || !t->norm[i].compose || t->norm[i].compat)
            return false;
    if (t->normalized_trie.n) return false;
    const struct td_tok_pre_op *op = t->pre;
    if (t->n_pre == 1)
        return op[0].kind == TD_PRE_BYTE_LEVEL && op[0].split && op[0].pattern.parts_at_spaces;
    return t->n_pre == 2 && op[0].kind == TD_PRE_SPLIT && op[0].behavior == TD_SPLIT_ISOLATED &&
           !op[0].invert && op[0].pattern.parts_at_spaces && op[1].kind == TD_PRE_BYTE_LEVEL &&
           !op[1].split && !op[1].add_prefix_space;
}

td_status td_token_cache_create(const struct td_tokenizer *t, size_t max_bytes,
                                struct td_token_cache **ret_cache)
{
    struct td_token_cache *c = calloc(1, sizeof *c);
    if (!c) return TD_ERR_NOMEM;
    for (c->n_buckets = 64; c->n_buckets < max_bytes / (4 * PART_BYTES);) c->n_buckets *= 2;
    c->buckets = calloc(c->n_buckets, sizeof(struct part *));
    if (!c->buckets) {
        free(c);
        return TD_ERR_NOMEM;
    }
    c->t = t;
    c->cuts_at_spaces = cuts_at_spaces(t);
    c->seed = td_random_u64();
    c->max_bytes = max_bytes;
    *ret_cache = c;
    return TD_OK;
}

static void unlink_age(struct td_token_cache *c, struct part *p)
{
    *(p->newer ? &p->newer->older : &c->newest) = p->older;
    *(p->older ? &p->older->newer : &c->oldest) = p->newer;
}

static void make_newest(struct td_token_cache *c, struct part *p)
{
    p->newer = NULL;
    p->older = c->newest;
    *(c->newest ? &c->newest->newer : &c->oldest) = p;
    c->newest = p;
}

static struct part **bucket_of(struct td_token_cache *c, uint64_t hash)
{
    return &c->buckets[hash & (c->n_buckets - 1)];
}

static void drop(struct td_token_cache *c, struct part *p)
{
    struct part **at = bucket_of(c, p->hash);
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    unlink_age(c, p);
    c->stats.n_parts--;
    c->stats.used_bytes -= bytes_of(p);
    free(p);
}

void td_token_cache_free(struct td_token_cache *c)
{
    if (!c) return;
    while (c->oldest) drop(c, c->oldest);
    free(c->buckets);
    free(c);
}

static const struct part *find(struct td_token_cache *c, uint64_t hash, const char *text, size_t n,
                               bool first)
{
    for (struct part *p = *bucket_of(c, hash); p; p = p->next) {
        if (p->hash != hash || p->salt != c->salt || p->n_bytes != n || p->first != first ||
            memcmp(text_of(p), text, n))
            continue;
        unlink_age(c, p);
        make_newest(c, p);
        return p;
    }
    return NULL;
}

/* Without memory for it, or when it is too long, nothing is remembered. */
static void remember(struct td_token_cache *c, uint64_t hash, const char *text, size_t n,
                     bool first, const int32_t *ids, size_t n_ids)
{
    struct part *p;
    size_t bytes = sizeof *p + n_ids * sizeof *p->ids + n;
    if (bytes > c->max_bytes / LARGEST_SHARE || n_ids > UINT32_MAX || n > UINT32_MAX) return;
    while (c->stats.used_bytes + bytes > c->max_bytes) drop(c, c->oldest);
    if (!(p = malloc(bytes))) return;
    struct part **bucket = bucket_of(c, hash);
    *p = (struct part){.next = *bucket,
                       .hash = hash,
                       .salt = c->salt,
                       .n_bytes = (uint32_t)n,
                       .n_ids = (uint32_t)n_ids,
                       .first = first};
    if (n_ids) memcpy(p->ids, ids, n_ids * sizeof *ids);
    memcpy(p->ids + n_ids, text, n);
    *bucket = p;
    make_newest(c, p);
    c->stats.n_parts++;
    c->stats.used_bytes += bytes;
}

static td_status add_part(struct td_token_cache *c, const char *text, size_t n, bool first,
                          size_t max_tokens, struct td_token_list *list)
{
    size_t before = list->n;
    struct td_err err;
    if (n < LEAST_BYTES) {
        c->stats.encoded_bytes += n;
        return td_tok_encode_piece(c->t, text, n, first, max_tokens, list, &err);
    }
    uint64_t hash = td_hash64(text, n, c->seed ^ c->salt);
    const struct part *p = find(c, hash, text, n, first);
    td_status s = TD_OK;
    for (size_t i = 0; p && i < p->n_ids && !s; i++)
        s = list->n < max_tokens ? td_token_list_add(list, p->ids[i]) : TD_ERR_LIMIT;
    if (p) {
        c->stats.hit_bytes += n;
        return s;
    }
    c->stats.encoded_bytes += n;
    s = td_tok_encode_piece(c->t, text, n, first, max_tokens, list, &err);
    if (!s) remember(c, hash, text, n, first, list->ids + before, list->n - before);
    return s;
}

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* Bytes of the first part of a text between added tokens. */
static size_t part_bytes(const struct td_token_cache *c, const char *text, size_t n)
{
    if (!c->cuts_at_spaces) return n;
    for (size_t at = PART_BYTES; at + 1 < n; at++)
        if (text[at] == ' ' && is_letter(text[at - 1]) && is_letter(text[at + 1])) return at;
    return n;
}

static td_status encode_parts(struct td_token_cache *c, const char *text, size_t n_bytes,
                              bool add_special, size_t max_tokens, struct td_token_list *list)
{
    const struct td_tokenizer *t = c->t;
    struct td_tok_budget budget = td_tok_budget_of(n_bytes);
    struct td_tok_text cut = {.buf.budget = &budget};
    td_status s = td_tok_buf_append(&cut.buf, text, n_bytes);
    if (!s) s = td_tok_split_added(t, &t->raw_trie, &cut, 0, n_bytes, true);
    if (!s && add_special) s = td_token_list_add_all(list, t->before, t->n_before, max_tokens);
    size_t start = list->n;
    for (size_t i = 0; i < cut.n && !s; i++) {
        const struct td_tok_piece *piece = &cut.pieces[i];
        if (piece->id >= 0) s = td_tok_add_added(t, piece->id, start, max_tokens, list);
        for (size_t at = 0; at < piece->n && piece->id < 0 && !s;) {
            const char *from = cut.buf.bytes + piece->start + at;
            size_t n = part_bytes(c, from, piece->n - at);
            s = add_part(c, from, n, piece->first && at == 0, max_tokens, list);
            at += n;
        }
    }
    if (!s && add_special) s = td_token_list_add_all(list, t->after, t->n_after, max_tokens);
    td_tok_text_free(&cut);
    return s;
}

td_status td_token_cache_encode(struct td_token_cache *c, uint64_t salt, const char *text,
                                size_t n_bytes, bool add_special, size_t max_tokens,
                                struct td_token_list *list, struct td_err *err)
{
    size_t at, before = list->n;
    c->salt = salt;
    if (n_bytes <= TD_TOK_TEXT_MAX_BYTES && td_utf8_valid(text, n_bytes, &at) &&
        !encode_parts(c, text, n_bytes, add_special, max_tokens, list))
        return TD_OK;
    list->n = before; /* once more as a whole: it knows how to say what is wrong */
    return td_tokenizer_encode(c->t, text, n_bytes, add_special, max_tokens, list, err);
}

void td_token_cache_stats(const struct td_token_cache *c, struct td_token_cache_stats *ret_stats)
{
    *ret_stats = c->stats;
}
