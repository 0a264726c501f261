/* tokenizer_bpe.c - the merge loop: a linked list of symbols and a heap of candidate pairs.
 *
 * Every adjacent pair that has a merge is a candidate (rank, position). The smallest is popped; if
 * the pair at that position still makes that token, the two symbols become one in the list, and the
 * pairs with the two new neighbours are pushed. A word of n symbols pushes at most n + 2(n - 1)
 * candidates, so the cost is O(n log n) whatever the text (a word may be a megabyte of one letter).
 *
 * A word is first cut where no merge can ever join. A merge of L and R across the cut would need a
 * token L that ends, and a token R that begins, with the two initial symbols beside the cut. The
 * pairs (last of L, first of R) of all merges are known at load. So a SentencePiece text, which is
 * one word however long, is cut into words again, and the heap stays small.
 *
 * Invariants:
 *   (1) symbols[i].id == DEAD when i was merged into its left neighbour;
 *   (2) prev and next of live symbols name live symbols or -1;
 *   (3) a stale candidate is recognised by the token that it would make: the texts of two pairs at
 *       one position differ in length. */
#include "common/text/tokenizer_bpe.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/entropy.h"
#include "common/base/hash.h"

#define DEAD INT32_MIN

void td_vocab_init(struct td_vocab *v) { *v = (struct td_vocab){.seed = td_random_u64()}; }

void td_vocab_free(struct td_vocab *v)
{
    td_tok_buf_free(&v->arena);
    free(v->tokens);
    free(v->model.cells);
    free(v->added.cells);
    *v = (struct td_vocab){0};
}

const char *td_vocab_text(const struct td_vocab *v, int32_t id, size_t *ret_n)
{
    if (id < 0 || id >= v->n_ids || v->tokens[id].n < 0) return NULL;
    if (ret_n) *ret_n = (size_t)v->tokens[id].n;
    return v->arena.bytes + v->tokens[id].start;
}

/* The cell of this text, or the empty cell where it belongs. */
static uint32_t *slot_of(const struct td_vocab *v, const struct td_vocab_index *index,
                         const char *text, size_t n)
{
    for (size_t i = td_hash64(text, n, v->seed) & index->mask;; i = (i + 1) & index->mask) {
        uint32_t *cell = &index->cells[i];
        if (!*cell) return cell;
        const struct td_vocab_token *token = &v->tokens[*cell - 1];
        if ((size_t)token->n == n && !memcmp(v->arena.bytes + token->start, text, n)) return cell;
    }
}

int32_t td_vocab_find(const struct td_vocab *v, const struct td_vocab_index *index,
                      const char *text, size_t n)
{
    if (!index->n) return -1;
    return (int32_t)*slot_of(v, index, text, n) - 1;
}

static td_status index_grow(const struct td_vocab *v, struct td_vocab_index *index)
{
    if (index->cells && index->n * 2 <= index->mask) return TD_OK;
    struct td_vocab_index bigger = {.mask = index->cells ? index->mask * 2 + 1 : 1023,
                                    .n = index->n};
    bigger.cells = calloc(bigger.mask + 1, sizeof *bigger.cells);
    if (!bigger.cells) return TD_ERR_NOMEM;
    for (size_t i = 0; index->cells && i <= index->mask; i++) {
        if (!index->cells[i]) continue;
        const struct td_vocab_token *token = &v->tokens[index->cells[i] - 1];
        *slot_of(v, &bigger, v->arena.bytes + token->start, (size_t)token->n) = index->cells[i];
    }
    free(index->cells);
    *index = bigger;
    return TD_OK;
}

td_status td_vocab_add(struct td_vocab *v, struct td_vocab_index *index, const char *text, size_t n,
                       int32_t id, const char *what, struct td_err *err)
{
    int shown = n < 60 ? (int)n : 60; /* no NUL need be behind the text */
    if (id < 0 || id >= TD_VOCAB_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s: id %d of \"%.*s\" is not in 0..%d", what, id, shown,
                       text, TD_VOCAB_MAX - 1);
    if (id >= v->ids_capacity) {
        int32_t capacity = v->ids_capacity ? v->ids_capacity * 2 : 1024;
        while (capacity <= id) capacity *= 2;
        struct td_vocab_token *grown = realloc(v->tokens, (size_t)capacity * sizeof *grown);
        if (!grown) return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %d ids", what, capacity);
        for (int32_t i = v->ids_capacity; i < capacity; i++)
            grown[i] = (struct td_vocab_token){.n = -1};
        v->tokens = grown;
        v->ids_capacity = capacity;
    }
    struct td_vocab_token *token = &v->tokens[id];
    if (token->n >= 0 &&
        ((size_t)token->n != n || memcmp(v->arena.bytes + token->start, text, n))) {
        return td_fail(err, TD_ERR_CORRUPT, "%s: id %d belongs to both \"%.60s\" and \"%.*s\"",
                       what, id, v->arena.bytes + token->start, shown, text);
    }
    td_status s = index_grow(v, index);
    if (!s && token->n < 0) {
        size_t start = v->arena.n;
        s = td_tok_buf_append(&v->arena, text, n);
        if (!s) s = td_tok_buf_append(&v->arena, "", 1);
        if (!s) *token = (struct td_vocab_token){(uint32_t)start, (int32_t)n, false};
    }
    if (s) return td_fail(err, s, "%s: no room for token %d of %zu bytes", what, id, n);
    if (id >= v->n_ids) v->n_ids = id + 1;
    uint32_t *cell = slot_of(v, index, text, n);
    if (*cell && *cell != (uint32_t)id + 1) {
        return td_fail(err, TD_ERR_CORRUPT, "%s: \"%.*s\" has two ids, %u and %d", what, shown,
                       text, *cell - 1, id);
    }
    if (!*cell) index->n++;
    *cell = (uint32_t)id + 1;
    return TD_OK;
}

static size_t merge_hash(uint64_t key, uint64_t seed)
{
    uint64_t x = (key ^ seed) * 0x9E3779B97F4A7C15u; /* Fibonacci hashing, twice with a fold: ids
                                                        are small and regular */
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    return (size_t)(x ^ x >> 32);
}

td_status td_bpe_reserve_merges(struct td_bpe *b, size_t n_merges)
{
    size_t n_cells = 16;
    while (n_cells < n_merges * 2) n_cells *= 2;
    b->merges = malloc(n_cells * sizeof *b->merges);
    if (!b->merges) return TD_ERR_NOMEM;
    for (size_t i = 0; i < n_cells; i++) b->merges[i].new_id = -1;
    b->merges_mask = n_cells - 1;
    return TD_OK;
}

static struct td_bpe_merge *merge_slot(const struct td_bpe *b, uint64_t key)
{
    size_t i = merge_hash(key, b->vocab.seed) & b->merges_mask;
    while (b->merges[i].new_id >= 0 && b->merges[i].key != key) i = (i + 1) & b->merges_mask;
    return &b->merges[i];
}

void td_bpe_add_merge(struct td_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t new_id)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    struct td_bpe_merge *cell = merge_slot(b, key);
    if (cell->new_id < 0) {
        b->n_merges++;
        TD_ASSERT(b->n_merges * 2 <= b->merges_mask + 1); /* td_bpe_reserve_merges was told fewer */
    }
    *cell = (struct td_bpe_merge){key, rank, new_id};
}

const struct td_bpe_merge *td_bpe_find_merge(const struct td_bpe *b, int32_t left, int32_t right)
{
    const struct td_bpe_merge *cell =
        merge_slot(b, (uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    return cell->new_id < 0 ? NULL : cell;
}

static size_t joint_bit(const struct td_bpe *b, int32_t left, int32_t right)
{
    return merge_hash((uint64_t)(uint32_t)left << 32 | (uint32_t)right, b->vocab.seed) &
           (TD_BPE_JOINT_BITS - 1);
}

static int32_t char_id(const struct td_bpe *b, const char *text, size_t n)
{
    return td_vocab_find(&b->vocab, &b->vocab.model, text, n);
}

/* Marks, for each merge, the initial symbols that would meet. They are characters. A byte token or
 * unk is an initial symbol with a longer text, and a merge of one would meet as itself: no real
 * file has such a merge, and when one does, every pair counts as a joint. */
static void index_joints(struct td_bpe *b)
{
    bool *odd = calloc((size_t)b->vocab.n_ids, sizeof *odd);
    bool any_odd = !odd;
    if (odd && b->unk_id >= 0) odd[b->unk_id] = true;
    for (int i = 0; odd && i < 256; i++) {
        if (b->byte_ids[i] >= 0) odd[b->byte_ids[i]] = true;
    }
    for (size_t i = 0; i <= b->merges_mask && !any_odd; i++) {
        const struct td_bpe_merge *m = &b->merges[i];
        if (m->new_id < 0) continue;
        size_t n_left = 0, n_right = 0;
        uint32_t cp;
        int32_t left = (int32_t)(m->key >> 32), right = (int32_t)(m->key & UINT32_MAX);
        const char *l = td_vocab_text(&b->vocab, left, &n_left),
                   *r = td_vocab_text(&b->vocab, right, &n_right);
        any_odd = odd[left] || odd[right] || !n_left || !n_right;
        if (any_odd) break;
        size_t last = td_utf8_before(l, n_left, &cp);
        int n_first = td_utf8_next(r, n_right, &cp);
        int32_t left_char = char_id(b, l + last, n_left - last),
                right_char = char_id(b, r, n_first > 0 ? (size_t)n_first : 1);
        if (left_char < 0 || right_char < 0) continue; /* such tokens cannot be made */
        size_t bit = joint_bit(b, left_char, right_char);
        b->joints[bit / 64] |= (uint64_t)1 << bit % 64;
    }
    if (any_odd) memset(b->joints, 0xFF, sizeof b->joints);
    free(odd);
}

void td_bpe_index(struct td_bpe *b)
{
    for (uint32_t cp = 0; cp < 0x180; cp++) {
        char utf8[4];
        b->cp_ids[cp] = char_id(b, utf8, (size_t)td_utf8_put(cp, utf8));
    }
    for (int i = 0; i < 256; i++) {
        static const char hex[] = "0123456789ABCDEF";
        char name[6] = {'<', '0', 'x', hex[i >> 4], hex[i & 15], '>'};
        b->byte_ids[i] = char_id(b, name, sizeof name);
    }
    index_joints(b);
}

void td_bpe_free(struct td_bpe *b)
{
    td_vocab_free(&b->vocab);
    free(b->merges);
    *b = (struct td_bpe){0};
}

void td_bpe_scratch_free(struct td_bpe_scratch *s)
{
    td_tok_release(s->budget, s->symbols, s->symbols_capacity * sizeof *s->symbols);
    td_tok_release(s->budget, s->heap, s->heap_capacity * sizeof *s->heap);
    *s = (struct td_bpe_scratch){0};
}

td_status td_token_list_add(struct td_token_list *list, int32_t id)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 64;
        int32_t *grown = realloc(list->ids, capacity * sizeof *grown);
        if (!grown) return TD_ERR_NOMEM;
        list->ids = grown;
        list->capacity = capacity;
    }
    list->ids[list->n++] = id;
    return TD_OK;
}

td_status td_token_list_add_all(struct td_token_list *list, const int32_t *ids, size_t n,
                                size_t max_tokens)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < n && !s; i++)
        s = list->n < max_tokens ? td_token_list_add(list, ids[i]) : TD_ERR_LIMIT;
    return s;
}

/* Makes room for one symbol per byte and for the pushes before the first pop, so that the loops
 * below need no checks. */
static td_status reserve(struct td_bpe_scratch *s, size_t n_bytes)
{
    size_t n_symbols = n_bytes + 1, n_heap = 3 * n_symbols;
    td_status status;
    if (n_symbols > s->symbols_capacity) {
        struct td_bpe_symbol *grown =
            td_tok_grow(s->budget, s->symbols, s->symbols_capacity * sizeof *grown,
                        n_symbols * sizeof *grown, &status);
        if (!grown) return status;
        s->symbols = grown;
        s->symbols_capacity = n_symbols;
    }
    if (n_heap > s->heap_capacity) {
        struct td_bpe_candidate *grown = td_tok_grow(
            s->budget, s->heap, s->heap_capacity * sizeof *grown, n_heap * sizeof *grown, &status);
        if (!grown) return status;
        s->heap = grown;
        s->heap_capacity = n_heap;
    }
    return TD_OK;
}

static void push(const struct td_bpe *b, struct td_bpe_scratch *s, int32_t position, int32_t left,
                 int32_t right)
{
    const struct td_bpe_merge *merge = td_bpe_find_merge(b, left, right);
    if (!merge) return;
    struct td_bpe_candidate c = {(uint64_t)merge->rank << 32 | (uint32_t)position, merge->new_id};
    TD_ASSERT(s->n_heap < s->heap_capacity);
    size_t i = s->n_heap++;
    for (; i > 0 && s->heap[(i - 1) / 2].order > c.order; i = (i - 1) / 2, s->n_steps++)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = c;
    s->n_steps++;
}

static struct td_bpe_candidate pop(struct td_bpe_scratch *s)
{
    struct td_bpe_candidate top = s->heap[0], last = s->heap[--s->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < s->n_heap; i = child, s->n_steps++) {
        if (child + 1 < s->n_heap && s->heap[child + 1].order < s->heap[child].order) child++;
        if (s->heap[child].order >= last.order) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = last;
    s->n_steps++;
    return top;
}

static void add_symbol(struct td_bpe_scratch *s, int32_t id)
{
    int32_t at = (int32_t)s->n_symbols++;
    s->symbols[at] = (struct td_bpe_symbol){id, at - 1, at + 1};
    s->n_steps++;
}

/* Turns characters into symbols: from the vocabulary, else bytes, else unk. A pending unk is
 * written before the next known character, but not before bytes: Hugging Face does that, order
 * included. Without an unk token an unknown character leaves nothing. */
static void symbols_of(const struct td_bpe *b, struct td_bpe_scratch *s, const char *word, size_t n)
{
    bool unk_pending = false;
    s->n_symbols = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = td_utf8_next(word + i, n - i, &cp);
        if (len <= 0) len = 1, cp = 0xFFFD; /* not reached: words are valid */
        int32_t id = cp < 0x180 ? b->cp_ids[cp]
                                : td_vocab_find(&b->vocab, &b->vocab.model, word + i, (size_t)len);
        bool bytes = id < 0 && b->byte_fallback;
        for (int k = 0; bytes && k < len; k++)
            bytes = b->byte_ids[(uint8_t)word[i + (size_t)k]] >= 0;
        if (id >= 0) {
            if (unk_pending) add_symbol(s, b->unk_id);
            unk_pending = false;
            add_symbol(s, id);
        } else if (bytes) {
            for (int k = 0; k < len; k++) add_symbol(s, b->byte_ids[(uint8_t)word[i + (size_t)k]]);
        } else if (b->unk_id >= 0) {
            if (unk_pending && !b->fuse_unk) add_symbol(s, b->unk_id);
            unk_pending = true;
        }
        i += (size_t)len;
    }
    if (unk_pending) add_symbol(s, b->unk_id);
}

/* Merges the symbols [from, to), which no merge can join with others. */
static void merge_all(const struct td_bpe *b, struct td_bpe_scratch *s, size_t from, size_t to)
{
    struct td_bpe_symbol *symbols = s->symbols;
    symbols[from].prev = symbols[to - 1].next = -1;
    s->n_heap = 0;
    for (size_t i = from; i + 1 < to; i++) push(b, s, (int32_t)i, symbols[i].id, symbols[i + 1].id);
    while (s->n_heap) {
        struct td_bpe_candidate c = pop(s);
        int32_t at = (int32_t)(c.order & UINT32_MAX), right = symbols[at].next;
        if (symbols[at].id == DEAD || right < 0) continue;
        const struct td_bpe_merge *merge = td_bpe_find_merge(b, symbols[at].id, symbols[right].id);
        if (!merge || merge->new_id != c.new_id) continue;
        symbols[at].id = c.new_id;
        symbols[at].next = symbols[right].next;
        symbols[right].id = DEAD;
        if (symbols[at].next >= 0) symbols[symbols[at].next].prev = at;
        if (symbols[at].prev >= 0)
            push(b, s, symbols[at].prev, symbols[symbols[at].prev].id, symbols[at].id);
        if (symbols[at].next >= 0) push(b, s, at, symbols[at].id, symbols[symbols[at].next].id);
    }
}

td_status td_bpe_encode_word(const struct td_bpe *b, struct td_bpe_scratch *s, const char *word,
                             size_t n, size_t max_tokens, struct td_token_list *list)
{
    if (b->ignore_merges) {
        int32_t id = td_vocab_find(&b->vocab, &b->vocab.model, word, n);
        if (id >= 0) return list->n < max_tokens ? td_token_list_add(list, id) : TD_ERR_LIMIT;
    }
    td_status status = reserve(s, n);
    if (status) return status;
    symbols_of(b, s, word, n);
    for (size_t from = 0, to; from < s->n_symbols && !status; from = to) {
        for (to = from + 1; to < s->n_symbols; to++) {
            size_t bit = joint_bit(b, s->symbols[to - 1].id, s->symbols[to].id);
            if (!(b->joints[bit / 64] >> bit % 64 & 1)) break;
        }
        merge_all(b, s, from, to);
        for (int32_t i = (int32_t)from; i >= 0 && !status; i = s->symbols[i].next) {
            status =
                list->n < max_tokens ? td_token_list_add(list, s->symbols[i].id) : TD_ERR_LIMIT;
        }
    }
    return status;
}
