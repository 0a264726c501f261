/* grammar_mask.c - a grammar over a vocabulary: states, and the tokens that may come next.
 *
 * A state is a set of readings of the bytes so far. A reading is (node, stack): the node reads the
 * next byte, the stack holds the nodes to go on at when rules end. Stacks and sets are interned:
 * equal ones have one number, so the step from a set by a byte is computed once.
 *
 * A mask asks for every token whether its bytes lead anywhere. A walk over the trie of tokens
 * leaves out what begins badly. Most of that walk depends on the readings' nodes alone and not on
 * what is under them on the stack, so it is done once for each set of nodes ("local"), as if they
 * were in a grammar of their own. Where that grammar would end in the middle of a token (a "pop"),
 * the rest of the token belongs to the node on top of the stack: the walk goes on from there, for
 * those few places of the trie. In a JSON string, say, 128,000 tokens are decided once, and the
 * tokens with a quote in the middle for each place that the string may stand in. Source of that
 * idea: Dong et al. 2024 (XGrammar); here both parts are found by the same walk.
 *
 * Bounded, each bound a function of grammar, vocabulary and bytes alone, so that no worker refuses
 * what another would do (I1): readings looked at for one set, units of work of one walk. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/text/grammar_internal.h"
#include "common/text/tokenizer_internal.h"

#define MAX_VISITED 4096      /* readings looked at for one set, calls and splits included */
#define N_VISITED_SLOTS 16384 /* a power of two well above it */
/* Readings looked at in one walk, for each node of the trie. A place that takes any character has
 * ten readings, one for each kind of first byte in UTF-8; a pattern that may begin anywhere has
 * three times as many. What needs more would hold up the step of all requests. */
#define MAX_UNITS_PER_NODE 48
#define MAX_POP_DEPTH 256 /* rules that end one after the other within a token */
#define TRIM_BYTES ((size_t)48 << 20)
#define ROWS_BYTES_MAX ((size_t)16 << 20) /* steps kept for sets; beyond it they are made again */
#define ROOT 0                            /* the stack under which nothing is */
#define OVERFLOW_SET 1 /* after TD_MATCHER_DEAD: a set that would have been too large */

/* ---- the vocabulary -------------------------------------------------------------------------- */

struct td_token_trie {
    int32_t vocab, n_nodes, longest;
    uint8_t *byte;                 /* [n_nodes], in preorder; 0 is the root */
    uint16_t *depth;               /* of the root 0 */
    int32_t *end;                  /* the first node that is not below this one */
    int32_t *token;                /* a token that ends here, -1 none */
    int32_t *next;                 /* [vocab]: another token with the same bytes, -1 none */
    struct td_grammar_text *texts; /* [vocab], into arena */
    char *arena;
};

struct by_text {
    const struct td_grammar_text *texts;
    int32_t token;
};

static int compare_tokens(const void *x, const void *y)
{
    const struct by_text *p = x, *q = y;
    const struct td_grammar_text *a = &p->texts[p->token], *b = &q->texts[q->token];
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int c = memcmp(a->bytes, b->bytes, n);
    if (c) return c;
    if (a->n_bytes != b->n_bytes) return a->n_bytes < b->n_bytes ? -1 : 1;
    return (p->token > q->token) - (p->token < q->token);
}

static void trie_fill(struct td_token_trie *t, const struct by_text *order, int32_t n,
                      int32_t *path)
{
    const struct td_grammar_text *last = NULL;
    int32_t n_path = 0; /* path[d]: the open node of depth d + 1 */
    t->n_nodes = 1;
    t->token[0] = -1;
    for (int32_t i = 0; i < n; i++) {
        const struct td_grammar_text *text = &t->texts[order[i].token];
        int32_t same = 0;
        while (last && same < n_path && same < (int32_t)text->n_bytes &&
               last->bytes[same] == text->bytes[same])
            same++;
        while (n_path > same) t->end[path[--n_path]] = t->n_nodes;
        for (; n_path < (int32_t)text->n_bytes; n_path++) {
            int32_t node = t->n_nodes++;
            path[n_path] = node;
            t->byte[node] = (uint8_t)text->bytes[n_path];
            t->depth[node] = (uint16_t)(n_path + 1);
            t->token[node] = -1;
        }
        t->next[order[i].token] = t->token[path[n_path - 1]];
        t->token[path[n_path - 1]] = order[i].token;
        last = text;
    }
    while (n_path > 0) t->end[path[--n_path]] = t->n_nodes;
    t->end[0] = t->n_nodes;
}

td_status td_token_trie_build(const struct td_grammar_text *texts, int32_t vocab,
                              struct td_token_trie **ret_trie, struct td_err *err)
{
    size_t n_bytes = 0, longest = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < vocab; i++) {
        n_bytes += texts[i].n_bytes;
        if (texts[i].n_bytes > longest) longest = texts[i].n_bytes;
    }
    if (longest > UINT16_MAX || n_bytes > INT32_MAX / 2)
        return td_fail(err, TD_ERR_LIMIT,
                       "guided output: a token of %zu bytes, all of %zu; limits %d and %d", longest,
                       n_bytes, UINT16_MAX, INT32_MAX / 2);
    struct td_token_trie *t = calloc(1, sizeof *t);
    struct by_text *order = calloc((size_t)vocab + 1, sizeof *order);
    int32_t *path = calloc(longest + 1, sizeof *path);
    if (t) {
        t->vocab = vocab;
        t->longest = (int32_t)longest;
        t->byte = calloc(n_bytes + 1, sizeof *t->byte);
        t->depth = calloc(n_bytes + 1, sizeof *t->depth);
        t->end = calloc(n_bytes + 1, sizeof *t->end);
        t->token = calloc(n_bytes + 1, sizeof *t->token);
        t->next = calloc((size_t)vocab + 1, sizeof *t->next);
        t->texts = calloc((size_t)vocab + 1, sizeof *t->texts);
        t->arena = malloc(n_bytes + 1);
    }
    if (!t || !order || !path || !t->byte || !t->depth || !t->end || !t->token || !t->next ||
        !t->texts || !t->arena) {
        free(order);
        free(path);
        td_token_trie_free(t);
        return td_fail(err, TD_ERR_NOMEM, "guided output: no memory for %d tokens", vocab);
    }
    size_t at = 0;
    for (int32_t i = 0; i < vocab; i++) {
        if (!texts[i].n_bytes) continue;
        memcpy(t->arena + at, texts[i].bytes, texts[i].n_bytes);
        t->texts[i] = (struct td_grammar_text){t->arena + at, texts[i].n_bytes};
        at += texts[i].n_bytes;
        order[n++] = (struct by_text){t->texts, i};
    }
    qsort(order, (size_t)n, sizeof *order, compare_tokens);
    trie_fill(t, order, n, path);
    free(order);
    free(path);
    *ret_trie = t;
    return TD_OK;
}

void td_token_trie_free(struct td_token_trie *t)
{
    if (!t) return;
    free(t->byte);
    free(t->depth);
    free(t->end);
    free(t->token);
    free(t->next);
    free(t->texts);
    free(t->arena);
    free(t);
}

int32_t td_token_trie_vocab(const struct td_token_trie *t) { return t->vocab; }

const char *td_token_trie_bytes(const struct td_token_trie *t, int32_t token, size_t *ret_n)
{
    if (token < 0 || token >= t->vocab || !t->texts[token].n_bytes) return NULL;
    *ret_n = t->texts[token].n_bytes;
    return t->texts[token].bytes;
}

/* How the decoder turns a token into bytes, read off its operations. */
struct spelling {
    bool byte_level, byte_fallback;
    char space[4]; /* what stands for a space, 0 bytes: nothing does */
    size_t n_space;
};

static td_status read_spelling(const struct td_tokenizer *t, struct spelling *sp,
                               struct td_err *err)
{
    for (size_t i = 0; i < t->n_dec; i++) {
        const struct td_tok_dec_op *op = &t->dec[i];
        if (op->kind == TD_DEC_BYTE_LEVEL) {
            sp->byte_level = true;
        } else if (op->kind == TD_DEC_BYTE_FALLBACK) {
            sp->byte_fallback = true;
        } else if (op->kind == TD_DEC_METASPACE) {
            sp->n_space = (size_t)td_utf8_put(op->cp, sp->space);
        } else if (op->kind == TD_DEC_REPLACE && op->pattern.literal &&
                   op->pattern.n_literal <= 4 && op->n_content == 1 && op->content[0] == ' ') {
            sp->n_space = op->pattern.n_literal;
            memcpy(sp->space, op->pattern.literal, sp->n_space);
        } else if (op->kind == TD_DEC_REPLACE || op->kind == TD_DEC_JOIN) {
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "guided output: the tokenizer's decoder %s, and what a token stands for "
                           "depends on its neighbours",
                           op->kind == TD_DEC_JOIN ? "joins tokens by spaces" : "replaces texts");
        } /* Fuse changes nothing, Strip the first characters of a text at most */
    }
    return TD_OK;
}

/* The bytes of one token into out, which has room for n of its text. */
static size_t spell(const struct spelling *sp, const char *text, size_t n, char *out)
{
    size_t n_out = 0;
    unsigned byte;
    char tail;
    if (sp->byte_level) {
        for (size_t i = 0; i < n;) {
            uint32_t cp;
            int len = td_utf8_next(text + i, n - i, &cp), b = len > 0 ? td_cp_to_byte(cp) : -1;
            if (b < 0) { /* an added token: its text is its bytes */
                memcpy(out, text, n);
                return n;
            }
            out[n_out++] = (char)b;
            i += (size_t)len;
        }
        return n_out;
    }
    if (sp->byte_fallback && n == 6 && sscanf(text, "<0x%2x%c", &byte, &tail) == 2 && tail == '>') {
        out[0] = (char)byte;
        return 1;
    }
    for (size_t i = 0; i < n;) {
        if (sp->n_space && n - i >= sp->n_space && !memcmp(text + i, sp->space, sp->n_space)) {
            out[n_out++] = ' ';
            i += sp->n_space;
        } else {
            out[n_out++] = text[i++];
        }
    }
    return n_out;
}

td_status td_token_trie_create(const struct td_tokenizer *tokenizer, int32_t vocab,
                               struct td_token_trie **ret_trie, struct td_err *err)
{
    struct spelling sp = {0};
    size_t n_bytes = 0, at = 0;
    td_status s = read_spelling(tokenizer, &sp, err);
    if (s) return s;
    for (int32_t i = 0; i < vocab; i++) {
        size_t n = 0;
        if (td_tokenizer_token_text(tokenizer, i, &n)) n_bytes += n + 1;
    }
    struct td_grammar_text *texts = calloc((size_t)vocab + 1, sizeof *texts);
    char *arena = malloc(n_bytes + 1);
    if (!texts || !arena)
        s = td_fail(err, TD_ERR_NOMEM, "guided output: no memory for %d tokens", vocab);
    for (int32_t i = 0; i < vocab && !s; i++) {
        size_t n = 0;
        const char *text = td_tokenizer_token_text(tokenizer, i, &n);
        char *to = arena + at;
        if (!text) continue;
        if (td_tokenizer_is_special(tokenizer, i)) {
            to[0] = TD_TOKEN_SPECIAL;
            memcpy(to + 1, text, n);
            n++;
        } else {
            n = spell(&sp, text, n, to);
            if (n && memchr(to, TD_TOKEN_SPECIAL, n)) continue;
        }
        texts[i] = (struct td_grammar_text){to, n};
        at += n;
    }
    if (!s) s = td_token_trie_build(texts, vocab, ret_trie, err);
    free(texts);
    free(arena);
    return s;
}

/* ---- interned stacks and sets ---------------------------------------------------------------- */

struct frame {
    int32_t node, under; /* go on at node, with the stack `under` */
};

/* What is known of a set of nodes whatever is under them. */
struct local {
    uint64_t *allowed; /* [n_words] */
    int32_t *pops;     /* nodes of the trie where the rules end and tokens go on */
    int32_t n_pops;
    bool over; /* more than max_units */
};

struct set {
    uint32_t first, n; /* readings[first .. first + n), sorted: stack << 32 | node */
    bool accepts;      /* the bytes so far may be all */
    int32_t *row;      /* [n_columns] the set after a byte, -1: not known; NULL: none is */
    struct local *local;
    uint64_t *mask;
};

struct visited {
    uint64_t reading;
    uint32_t stamp;
};

/* Numbers by hash, open addressing: slot = number + 1, 0 empty. */
struct index {
    int32_t *slots;
    uint32_t mask;
};

struct td_matcher {
    const struct td_grammar *g;
    const struct td_token_trie *trie;
    int32_t *eos, n_eos;
    size_t n_words, n_bytes, rows_bytes; /* of a mask; allocated; of that rows */
    uint32_t generation;
    td_status status; /* TD_ERR_NOMEM until the next trim */
    struct frame *frames;
    int32_t n_frames, frames_capacity;
    struct set *sets;
    int32_t n_sets, sets_capacity, start;
    uint64_t *readings;
    uint32_t n_readings, readings_capacity;
    struct index frame_index, set_index;
    int32_t *entries; /* [n_nodes] the set of that node alone, on ROOT; -1: not made */
    /* one set being made */
    struct visited *visited; /* [N_VISITED_SLOTS] */
    uint32_t stamp;
    int32_t n_visited, n_work, n_made;
    uint64_t work[MAX_VISITED], made[MAX_VISITED];
    bool accepts;
    /* one walk */
    int32_t *path; /* [longest + 1] */
    int32_t *pops, n_pops, pops_capacity;
    int64_t units;
};

static bool more_room(struct td_matcher *m, void **p, size_t item_bytes, int64_t n,
                      int64_t *capacity)
{
    if (n < *capacity) return true;
    int64_t want = *capacity ? 2 * *capacity : 256;
    void *q = want <= INT32_MAX ? realloc(*p, (size_t)want * item_bytes) : NULL;
    if (!q) {
        m->status = TD_ERR_NOMEM;
        return false;
    }
    m->n_bytes += (size_t)(want - *capacity) * item_bytes;
    *p = q;
    *capacity = want;
    return true;
}

#define ROOM(m, array, n, capacity)                                                                \
    room_of((m), (void **)&(array), sizeof *(array), (int64_t)(n), &(capacity))
static bool room_of(struct td_matcher *m, void **p, size_t item_bytes, int64_t n, int32_t *capacity)
{
    int64_t c = *capacity;
    bool ok = more_room(m, p, item_bytes, n, &c);
    *capacity = (int32_t)c;
    return ok;
}

/* The slots of an index for n numbers and one more; hash(i) is that of number i. */
static bool index_room(struct td_matcher *m, struct index *x, int32_t n,
                       uint64_t (*hash)(const struct td_matcher *m, int32_t i))
{
    if (x->slots && (uint32_t)n * 2 < x->mask) return true;
    uint32_t n_slots = x->slots ? (x->mask + 1) * 2 : 1024;
    int32_t *slots = calloc(n_slots, sizeof *slots);
    if (!slots) {
        m->status = TD_ERR_NOMEM;
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        uint32_t at = (uint32_t)hash(m, i) & (n_slots - 1);
        while (slots[at]) at = (at + 1) & (n_slots - 1);
        slots[at] = i + 1;
    }
    m->n_bytes += (size_t)n_slots * sizeof *slots - (x->slots ? (x->mask + 1) * sizeof *slots : 0);
    free(x->slots);
    x->slots = slots;
    x->mask = n_slots - 1;
    return true;
}

static uint64_t frame_hash(const struct td_matcher *m, int32_t i)
{
    return td_hash64(&m->frames[i], sizeof m->frames[i], 1);
}

static int32_t stack_push(struct td_matcher *m, int32_t node, int32_t under)
{
    struct frame f = {node, under};
    if (!index_room(m, &m->frame_index, m->n_frames, frame_hash)) return ROOT;
    for (uint32_t at = (uint32_t)td_hash64(&f, sizeof f, 1);; at++) {
        int32_t *slot = &m->frame_index.slots[at & m->frame_index.mask];
        if (!*slot) {
            if (!ROOM(m, m->frames, m->n_frames, m->frames_capacity)) return ROOT;
            m->frames[m->n_frames] = f;
            *slot = ++m->n_frames;
            return m->n_frames - 1;
        }
        if (!memcmp(&m->frames[*slot - 1], &f, sizeof f)) return *slot - 1;
    }
}

static uint64_t readings_hash(const uint64_t *v, uint32_t n, bool accepts)
{
    return td_hash64(v, n * sizeof *v, 2 + accepts);
}

static uint64_t set_hash(const struct td_matcher *m, int32_t i)
{
    const struct set *s = &m->sets[i];
    return readings_hash(m->readings + s->first, s->n, s->accepts);
}

static int32_t set_append(struct td_matcher *m, const uint64_t *v, uint32_t n, bool accepts)
{
    int64_t capacity = m->readings_capacity;
    while (m->n_readings + n > capacity)
        if (!more_room(m, (void **)&m->readings, sizeof *m->readings, capacity, &capacity))
            return TD_MATCHER_DEAD;
        else
            m->readings_capacity = (uint32_t)capacity;
    if (!ROOM(m, m->sets, m->n_sets, m->sets_capacity)) return TD_MATCHER_DEAD;
    if (n) memcpy(m->readings + m->n_readings, v, n * sizeof *v);
    m->sets[m->n_sets] = (struct set){.first = m->n_readings, .n = n, .accepts = accepts};
    m->n_readings += n;
    return m->n_sets++;
}

/* v is sorted. */
static int32_t set_intern(struct td_matcher *m, const uint64_t *v, uint32_t n, bool accepts)
{
    if (n == 0 && !accepts) return TD_MATCHER_DEAD;
    if (!index_room(m, &m->set_index, m->n_sets, set_hash)) return TD_MATCHER_DEAD;
    for (uint32_t at = (uint32_t)readings_hash(v, n, accepts);; at++) {
        int32_t *slot = &m->set_index.slots[at & m->set_index.mask];
        if (!*slot) {
            int32_t id = set_append(m, v, n, accepts);
            if (id != TD_MATCHER_DEAD) *slot = id + 1;
            return id;
        }
        const struct set *s = &m->sets[*slot - 1];
        if (*slot - 1 != OVERFLOW_SET && s->n == n && s->accepts == accepts &&
            (!n || !memcmp(m->readings + s->first, v, n * sizeof *v)))
            return *slot - 1;
    }
}

/* ---- from one set to the next ---------------------------------------------------------------- */

static uint64_t reading_of(int32_t node, int32_t stack)
{
    return (uint64_t)(uint32_t)stack << 32 | (uint32_t)node;
}

static void set_begin(struct td_matcher *m)
{
    if (++m->stamp == 0) { /* all stamps have been used: forget the old ones */
        memset(m->visited, 0, N_VISITED_SLOTS * sizeof *m->visited);
        m->stamp = 1;
    }
    m->n_visited = m->n_work = m->n_made = 0;
    m->accepts = false;
}

static void visit(struct td_matcher *m, int32_t node, int32_t stack)
{
    uint64_t r = reading_of(node, stack);
    uint64_t hash = r * 0x9E3779B97F4A7C15u;
    if (m->n_visited == MAX_VISITED) return; /* and set_end sees it */
    for (uint32_t at = (uint32_t)(hash >> 40);; at++) {
        struct visited *v = &m->visited[at % N_VISITED_SLOTS];
        if (v->stamp == m->stamp && v->reading == r) return;
        if (v->stamp == m->stamp) continue;
        *v = (struct visited){r, m->stamp};
        m->n_visited++;
        m->work[m->n_work++] = r;
        return;
    }
}

static int compare_readings(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return (a > b) - (a < b);
}

/* Follows what reads no byte from the nodes visited so far. */
static int32_t set_end(struct td_matcher *m)
{
    while (m->n_work > 0) {
        uint64_t r = m->work[--m->n_work];
        int32_t stack = (int32_t)(r >> 32), node = (int32_t)(uint32_t)r;
        const struct td_node *n = &m->g->nodes[node];
        switch ((enum td_node_kind)n->kind) {
        case TD_NODE_BYTES:
            m->made[m->n_made++] = r;
            break;
        case TD_NODE_SPLIT:
            visit(m, n->a, stack);
            visit(m, n->b, stack);
            break;
        case TD_NODE_CALL: /* nothing to come back for: the caller's caller is gone on with */
            if (m->g->nodes[n->b].kind != TD_NODE_END) stack = stack_push(m, n->b, stack);
            visit(m, m->g->rule_starts[n->a], stack);
            break;
        case TD_NODE_END:
            if (stack == ROOT)
                m->accepts = true;
            else
                visit(m, m->frames[stack].node, m->frames[stack].under);
            break;
        }
    }
    if (m->n_visited == MAX_VISITED) return OVERFLOW_SET;
    if (m->n_made > 1) qsort(m->made, (size_t)m->n_made, sizeof *m->made, compare_readings);
    return set_intern(m, m->made, (uint32_t)m->n_made, m->accepts);
}

static int32_t set_of_node(struct td_matcher *m, int32_t node)
{
    set_begin(m);
    visit(m, node, ROOT);
    return set_end(m);
}

static int32_t set_step(struct td_matcher *m, int32_t set, int32_t column)
{
    int32_t *row = m->sets[set].row;
    if (row && row[column] >= 0) return row[column];
    set_begin(m);
    const struct set *s = &m->sets[set];
    for (uint32_t i = 0; i < s->n; i++) {
        uint64_t r = m->readings[s->first + i];
        const struct td_node *n = &m->g->nodes[(uint32_t)r];
        if (m->g->class_columns[n->a][column / 64] >> column % 64 & 1)
            visit(m, n->b, (int32_t)(r >> 32));
    }
    int32_t next = set == OVERFLOW_SET ? OVERFLOW_SET : set_end(m);
    if (m->status) return TD_MATCHER_DEAD;
    size_t row_bytes = (size_t)m->g->n_columns * sizeof *row;
    if (!row && m->rows_bytes + row_bytes <= ROWS_BYTES_MAX && (row = malloc(row_bytes))) {
        memset(row, -1, row_bytes);
        m->rows_bytes += row_bytes;
        m->n_bytes += row_bytes;
        m->sets[set].row = row;
    }
    if (row) row[column] = next;
    return next;
}

/* ---- masks ----------------------------------------------------------------------------------- */

static void mask_add(uint64_t *mask, int32_t token)
{
    mask[token / 64] |= (uint64_t)1 << token % 64;
}

/* The tokens below `from` of the trie that `set` reads on to its end, into mask; and the nodes,
 * `from` included, where the set may end and tokens go on, onto m->pops. False: too much work. */
static bool walk(struct td_matcher *m, int32_t set, int32_t from, uint64_t *mask)
{
    const struct td_token_trie *t = m->trie;
    int32_t base = t->depth[from], end = t->end[from];
    if (m->sets[set].accepts && end > from + 1) {
        if (!ROOM(m, m->pops, m->n_pops, m->pops_capacity)) return false;
        m->pops[m->n_pops++] = from;
    }
    m->path[0] = set;
    for (int32_t i = from + 1; i < end;) {
        int32_t next = set_step(m, m->path[t->depth[i] - base - 1], m->g->column_of[t->byte[i]]);
        const struct set *s = &m->sets[next];
        m->units -= 1 + s->n;
        if (m->units < 0 || m->status) return false;
        if (next <= OVERFLOW_SET) {
            i = t->end[i];
            continue;
        }
        for (int32_t k = t->token[i]; k >= 0; k = t->next[k]) mask_add(mask, k);
        if (t->end[i] > i + 1) {
            m->path[t->depth[i] - base] = next;
            if (s->accepts) {
                if (!ROOM(m, m->pops, m->n_pops, m->pops_capacity)) return false;
                m->pops[m->n_pops++] = i;
            }
        }
        i = s->n ? i + 1 : t->end[i];
    }
    return true;
}

static int64_t max_units(const struct td_matcher *m)
{
    return (int64_t)m->trie->n_nodes * MAX_UNITS_PER_NODE;
}

static td_status walk_status(const struct td_matcher *m)
{
    return m->status ? m->status : TD_ERR_LIMIT;
}

static td_status local_of(struct td_matcher *m, int32_t set, struct local **ret_local)
{
    struct local *l = m->sets[set].local;
    if (!l) {
        int32_t base = m->n_pops;
        l = calloc(1, sizeof *l);
        if (l) l->allowed = calloc(m->n_words, sizeof *l->allowed);
        if (!l || !l->allowed) {
            free(l);
            return m->status = TD_ERR_NOMEM;
        }
        m->sets[set].local = l;
        m->units = max_units(m);
        l->over = !walk(m, set, 0, l->allowed);
        if (m->status) return m->status;
        l->n_pops = m->n_pops - base;
        l->pops = malloc(((size_t)l->n_pops + 1) * sizeof *l->pops);
        if (!l->pops) return m->status = TD_ERR_NOMEM;
        if (l->n_pops) memcpy(l->pops, m->pops + base, (size_t)l->n_pops * sizeof *l->pops);
        m->n_pops = base;
        m->n_bytes += m->n_words * 8 + (size_t)l->n_pops * sizeof *l->pops;
    }
    if (l->over) return TD_ERR_LIMIT;
    *ret_local = l;
    return TD_OK;
}

/* The rules up to `stack` have ended at node `at` of the trie: tokens below it go on there. */
static td_status go_on(struct td_matcher *m, int32_t stack, int32_t at, uint64_t *mask, int depth)
{
    struct frame f = m->frames[stack];
    int32_t base = m->n_pops;
    td_status s = TD_OK;
    if (depth > MAX_POP_DEPTH) return TD_ERR_LIMIT;
    if (m->entries[f.node] < 0) {
        int32_t entry = set_of_node(m, f.node);
        if (m->status) return m->status;
        m->entries[f.node] = entry;
    }
    if (!walk(m, m->entries[f.node], at, mask)) return walk_status(m);
    for (int32_t i = base; i < m->n_pops && !s && f.under != ROOT; i++)
        s = go_on(m, f.under, m->pops[i], mask, depth + 1);
    m->n_pops = base;
    return s;
}

static td_status make_mask(struct td_matcher *m, int32_t set, uint64_t *mask)
{
    uint64_t nodes[MAX_VISITED];
    int64_t units = max_units(m);
    for (uint32_t i = 0, k; i < m->sets[set].n; i = k) { /* readings with one stack are together */
        const uint64_t *r = m->readings + m->sets[set].first;
        int32_t stack = (int32_t)(r[i] >> 32);
        struct local *l = NULL;
        for (k = i; k < m->sets[set].n && (int32_t)(r[k] >> 32) == stack; k++)
            nodes[k - i] = reading_of((int32_t)(uint32_t)r[k], ROOT);
        int32_t local_set = set_intern(m, nodes, k - i, false);
        if (m->status) return m->status;
        td_status s = local_of(m, local_set, &l);
        if (s) return s;
        for (size_t w = 0; w < m->n_words; w++) mask[w] |= l->allowed[w];
        m->units = units;
        for (int32_t p = 0; p < l->n_pops && !s && stack != ROOT; p++)
            s = go_on(m, stack, l->pops[p], mask, 0);
        units = m->units;
        if (s) return s;
    }
    for (int32_t i = 0; i < m->n_eos && m->sets[set].accepts; i++) mask_add(mask, m->eos[i]);
    return TD_OK;
}

td_status td_matcher_mask(struct td_matcher *m, int32_t state, const uint64_t **ret_mask)
{
    TD_ASSERT(m->trie && state >= 0 && state < m->n_sets);
    if (m->status) return m->status;
    if (!m->sets[state].mask) {
        uint64_t *mask = calloc(m->n_words, sizeof *mask);
        if (!mask) return TD_ERR_NOMEM;
        m->n_pops = 0;
        td_status s = make_mask(m, state, mask);
        size_t w = 0;
        while (w < m->n_words && !mask[w]) w++;
        if (!s && w == m->n_words) s = TD_ERR_NOT_FOUND;
        if (s) {
            free(mask);
            return s;
        }
        m->sets[state].mask = mask;
        m->n_bytes += m->n_words * sizeof *mask;
    }
    *ret_mask = m->sets[state].mask;
    return TD_OK;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void forget(struct td_matcher *m)
{
    for (int32_t i = 0; i < m->n_sets; i++) {
        struct set *s = &m->sets[i];
        if (s->local) {
            free(s->local->allowed);
            free(s->local->pops);
            free(s->local);
        }
        free(s->row);
        free(s->mask);
    }
    free(m->sets);
    free(m->frames);
    free(m->readings);
    free(m->frame_index.slots);
    free(m->set_index.slots);
    m->sets = NULL, m->frames = NULL, m->readings = NULL;
    m->frame_index = m->set_index = (struct index){0};
    m->n_sets = m->sets_capacity = m->n_frames = m->frames_capacity = 0;
    m->n_readings = m->readings_capacity = 0;
    m->n_bytes = m->rows_bytes = 0;
    m->status = TD_OK;
}

static void begin(struct td_matcher *m)
{
    int64_t capacity = 0;
    m->generation++;
    if (more_room(m, (void **)&m->readings, sizeof *m->readings, 0, &capacity))
        m->readings_capacity = (uint32_t)capacity;
    for (int32_t i = 0; i < m->g->n_nodes; i++) m->entries[i] = -1;
    stack_push(m, -1, -1);                         /* ROOT */
    set_append(m, NULL, 0, false);                 /* TD_MATCHER_DEAD */
    if (!m->status) set_append(m, NULL, 0, false); /* OVERFLOW_SET */
    m->start = m->status ? TD_MATCHER_DEAD : set_of_node(m, m->g->rule_starts[0]);
}

td_status td_matcher_create(const struct td_grammar *grammar, const struct td_token_trie *trie,
                            const int32_t *eos, int32_t n_eos, struct td_matcher **ret_matcher,
                            struct td_err *err)
{
    struct td_matcher *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    m->g = grammar;
    m->trie = trie;
    m->n_words = trie ? ((size_t)trie->vocab + 63) / 64 : 0;
    m->entries = calloc((size_t)grammar->n_nodes, sizeof *m->entries);
    m->visited = calloc(N_VISITED_SLOTS, sizeof *m->visited);
    m->path = calloc((size_t)(trie ? trie->longest : 0) + 1, sizeof *m->path);
    m->eos = calloc((size_t)n_eos + 1, sizeof *m->eos);
    if (m->entries && m->visited && m->path && m->eos) {
        for (int32_t i = 0; i < n_eos; i++)
            if (trie && eos[i] >= 0 && eos[i] < trie->vocab) m->eos[m->n_eos++] = eos[i];
        begin(m);
        if (m->start == OVERFLOW_SET) {
            td_matcher_free(m);
            return td_fail(err, TD_ERR_LIMIT,
                           "guided output: more than %d ways to begin, the limit", MAX_VISITED);
        }
        if (!m->status) {
            *ret_matcher = m;
            return TD_OK;
        }
    }
    td_matcher_free(m);
    return td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
}

void td_matcher_free(struct td_matcher *m)
{
    if (!m) return;
    forget(m);
    free(m->eos);
    free(m->entries);
    free(m->visited);
    free(m->path);
    free(m->pops);
    free(m);
}

int32_t td_matcher_start(struct td_matcher *m) { return m->start; }
uint32_t td_matcher_generation(const struct td_matcher *m) { return m->generation; }
bool td_matcher_accepts(const struct td_matcher *m, int32_t state)
{
    return m->sets[state].accepts;
}

td_status td_matcher_advance(struct td_matcher *m, int32_t state, const char *bytes, size_t n,
                             int32_t *ret_state)
{
    TD_ASSERT(state >= 0 && state < m->n_sets);
    for (size_t i = 0; i < n && state != TD_MATCHER_DEAD && !m->status; i++)
        if (state != OVERFLOW_SET) state = set_step(m, state, m->g->column_of[(uint8_t)bytes[i]]);
    if (m->status) return m->status;
    if (state == OVERFLOW_SET) return TD_ERR_LIMIT;
    *ret_state = state;
    return TD_OK;
}

void td_matcher_trim(struct td_matcher *m)
{
    if (m->n_bytes <= TRIM_BYTES && !m->status) return;
    forget(m);
    begin(m);
}
