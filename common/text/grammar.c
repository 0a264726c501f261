/* grammar.c - expressions, and their automaton.
 *
 * An expression becomes nodes from its end to its beginning: compile(expr, next) answers the node
 * at which to start so that what follows is `next`. Equal nodes are made once, so that the many
 * byte sequences of UTF-8 share their ends. A bounded repetition is written out.
 *
 * Checked before anything runs: every rule can end (else a mask could lead where no output ends),
 * and no rule can call itself before a byte is read (else a state would be without end). */
#include "common/text/grammar_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"

#define MAX_EXPRS (1 << 18)
#define MAX_CLASSES (1 << 14)
/* Steps of compiling and of the checks: repetitions of repetitions that make no new node are work
 * too. 2^22 of them take less than 0.1 s. */
#define MAX_STEPS (1 << 22)

td_status td_builder_fail(struct td_builder *b, td_status code, const char *fmt, ...)
{
    char text[TD_ERR_MSG_MAX];
    va_list args;
    if (b->status) return b->status;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    b->status = code;
    return td_fail(b->err, code, "%s: %s", b->what, text);
}

/* Room for one more of n; NULL after a failure. */
static void *grow(struct td_builder *b, void *p, int32_t n, int32_t *capacity, size_t item_bytes,
                  int32_t max, const char *name)
{
    if (b->status) return NULL;
    if (n >= max) {
        td_builder_fail(b, TD_ERR_LIMIT, "it needs more than %d %s, the limit", max, name);
        return NULL;
    }
    if (n < *capacity) return p;
    int32_t more = *capacity ? 2 * *capacity : 64;
    void *q = realloc(p, (size_t)more * item_bytes);
    if (!q) {
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for %d %s", more, name);
        return NULL;
    }
    *capacity = more;
    return q;
}

int32_t td_expr_new(struct td_builder *b, enum td_expr_kind kind, int32_t min, int32_t max)
{
    struct td_expr *p =
        grow(b, b->exprs, b->n_exprs, &b->exprs_capacity, sizeof *p, MAX_EXPRS, "expressions");
    if (!p) return 0;
    b->exprs = p;
    p[b->n_exprs] =
        (struct td_expr){.kind = (uint8_t)kind, .last = -1, .prev = -1, .min = min, .max = max};
    return b->n_exprs++;
}

void td_expr_add(struct td_builder *b, int32_t parent, int32_t child)
{
    if (b->status) return;
    TD_ASSERT(b->exprs[child].prev == -1 && parent != child);
    b->exprs[child].prev = b->exprs[parent].last;
    b->exprs[parent].last = child;
}

int32_t td_expr_literal(struct td_builder *b, const char *bytes, size_t n)
{
    int32_t cat = td_expr_new(b, TD_EXPR_CAT, 0, 0);
    for (size_t i = 0; i < n && !b->status; i++)
        td_expr_add(b, cat, td_expr_new(b, TD_EXPR_BYTES, (uint8_t)bytes[i], 0));
    return cat;
}

int32_t td_expr_text(struct td_builder *b, const char *text)
{
    return td_expr_literal(b, text, strlen(text));
}

int32_t td_expr_class(struct td_builder *b, const struct td_byte_class *c)
{
    for (int32_t i = 0; i < b->n_classes; i++)
        if (!memcmp(&b->classes[i], c, sizeof *c)) return td_expr_new(b, TD_EXPR_BYTES, i, 0);
    struct td_byte_class *p = grow(b, b->classes, b->n_classes, &b->classes_capacity, sizeof *p,
                                   MAX_CLASSES, "classes of bytes");
    if (!p) return 0;
    b->classes = p;
    p[b->n_classes++] = *c;
    return td_expr_new(b, TD_EXPR_BYTES, b->n_classes - 1, 0);
}

int32_t td_expr_rep(struct td_builder *b, int32_t child, int32_t min, int32_t max)
{
    int32_t rep = td_expr_new(b, TD_EXPR_REP, min, max);
    td_expr_add(b, rep, child);
    return rep;
}

static int32_t pair(struct td_builder *b, enum td_expr_kind kind, int32_t first, int32_t second)
{
    int32_t e = td_expr_new(b, kind, 0, 0);
    td_expr_add(b, e, first);
    td_expr_add(b, e, second);
    return e;
}

int32_t td_expr_cat(struct td_builder *b, int32_t first, int32_t second)
{
    return pair(b, TD_EXPR_CAT, first, second);
}

int32_t td_expr_alt(struct td_builder *b, int32_t first, int32_t second)
{
    return pair(b, TD_EXPR_ALT, first, second);
}

int32_t td_expr_call(struct td_builder *b, int32_t rule)
{
    return td_expr_new(b, TD_EXPR_CALL, rule, 0);
}

int32_t td_rule_new(struct td_builder *b)
{
    struct td_rule *p =
        grow(b, b->rules, b->n_rules, &b->rules_capacity, sizeof *p, TD_GRAMMAR_MAX_RULES, "rules");
    if (!p) return 0;
    b->rules = p;
    p[b->n_rules] = (struct td_rule){.expr = -1};
    return b->n_rules++;
}

/* ---- texts of which one is chosen ------------------------------------------------------------ */

static int compare_texts(const void *x, const void *y)
{
    const struct td_grammar_text *a = x, *b = y;
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int c = n ? memcmp(a->bytes, b->bytes, n) : 0;
    return c ? c : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

/* texts[0..n) are sorted and equal in their first `at` bytes. */
static int32_t choose(struct td_builder *b, const struct td_grammar_text *texts, size_t n,
                      size_t at)
{
    size_t from = at;
    while (n > 1 && texts[0].n_bytes > at && texts[0].bytes[at] == texts[n - 1].bytes[at]) at++;
    if (n == 1) at = texts[0].n_bytes;
    int32_t head = td_expr_literal(b, texts[0].bytes + from, at - from);
    if (n == 1 || b->status) return head;
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    for (size_t i = 0, k; i < n && !b->status; i = k) {
        k = i + 1;
        if (texts[i].n_bytes == at) {
            while (k < n && texts[k].n_bytes == at) k++;
            td_expr_add(b, alt, td_expr_new(b, TD_EXPR_CAT, 0, 0));
            continue;
        }
        while (k < n && texts[k].bytes[at] == texts[i].bytes[at]) k++;
        td_expr_add(b, alt, choose(b, texts + i, k - i, at));
    }
    return td_expr_cat(b, head, alt);
}

int32_t td_expr_choice(struct td_builder *b, struct td_grammar_text *texts, size_t n)
{
    if (n == 0 || n > TD_GRAMMAR_MAX_CHOICES) {
        td_builder_fail(b, TD_ERR_LIMIT, "%zu alternatives, must be 1..%d", n,
                        TD_GRAMMAR_MAX_CHOICES);
        return 0;
    }
    qsort(texts, n, sizeof *texts, compare_texts);
    size_t n_distinct = 1;
    for (size_t i = 1; i < n; i++)
        if (compare_texts(&texts[n_distinct - 1], &texts[i])) texts[n_distinct++] = texts[i];
    return choose(b, texts, n_distinct, 0);
}

/* ---- code points ----------------------------------------------------------------------------- */

void td_cps_add(struct td_builder *b, struct td_cps *c, uint32_t lo, uint32_t hi)
{
    uint32_t(*p)[2] = grow(b, c->v, c->n, &c->capacity, sizeof *p, 65536, "ranges of characters");
    if (!p) return;
    c->v = p;
    p[c->n][0] = lo;
    p[c->n++][1] = hi < TD_CP_MAX ? hi : TD_CP_MAX;
}

static int compare_ranges(const void *x, const void *y)
{
    const uint32_t *a = x, *b = y;
    return (a[0] > b[0]) - (a[0] < b[0]);
}

void td_cps_normalize(struct td_cps *c)
{
    int32_t n = 0;
    if (c->n) qsort(c->v, (size_t)c->n, sizeof *c->v, compare_ranges);
    for (int32_t i = 0; i < c->n; i++) {
        if (n && c->v[i][0] <= c->v[n - 1][1] + 1) {
            if (c->v[i][1] > c->v[n - 1][1]) c->v[n - 1][1] = c->v[i][1];
        } else {
            c->v[n][0] = c->v[i][0];
            c->v[n++][1] = c->v[i][1];
        }
    }
    c->n = n;
}

void td_cps_invert(struct td_builder *b, struct td_cps *c)
{
    struct td_cps out = {0};
    uint32_t from = 0;
    td_cps_normalize(c);
    for (int32_t i = 0; i < c->n; i++) {
        if (c->v[i][0] > from) td_cps_add(b, &out, from, c->v[i][0] - 1);
        from = c->v[i][1] + 1;
    }
    if (from <= TD_CP_MAX) td_cps_add(b, &out, from, TD_CP_MAX);
    td_cps_free(c);
    *c = out;
}

bool td_cps_has(const struct td_cps *c, uint32_t cp)
{
    for (int32_t i = 0; i < c->n; i++)
        if (cp >= c->v[i][0] && cp <= c->v[i][1]) return true;
    return false;
}

void td_cps_free(struct td_cps *c)
{
    free(c->v);
    *c = (struct td_cps){0};
}

static void class_add(struct td_byte_class *c, uint32_t lo, uint32_t hi)
{
    for (uint32_t i = lo; i <= hi; i++) c->bits[i / 64] |= (uint64_t)1 << i % 64;
}

static int utf8_encode(uint32_t cp, uint8_t out[4])
{
    if (cp < 0x80) return out[0] = (uint8_t)cp, 1;
    int n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, cp >>= 6) out[i] = (uint8_t)(0x80 | (cp & 0x3F));
    out[0] = (uint8_t)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | cp);
    return n;
}

/* [lo, hi], all of one length in UTF-8: a byte sequence of ranges where the bytes after the first
 * that differs run over all their values, else two or three parts of it. */
static void add_utf8_range(struct td_builder *b, int32_t alt, uint32_t lo, uint32_t hi)
{
    uint8_t x[4], y[4];
    int n = utf8_encode(lo, x);
    utf8_encode(hi, y);
    for (int i = 1; i < n; i++) {
        uint32_t low_bits = ((uint32_t)1 << 6 * i) - 1;
        if ((lo & ~low_bits) == (hi & ~low_bits)) continue;
        if (lo & low_bits) {
            add_utf8_range(b, alt, lo, lo | low_bits);
            add_utf8_range(b, alt, (lo | low_bits) + 1, hi);
            return;
        }
        if ((hi & low_bits) != low_bits) {
            add_utf8_range(b, alt, lo, (hi & ~low_bits) - 1);
            add_utf8_range(b, alt, hi & ~low_bits, hi);
            return;
        }
    }
    int32_t cat = td_expr_new(b, TD_EXPR_CAT, 0, 0);
    for (int i = 0; i < n; i++) {
        struct td_byte_class c = {{0}};
        class_add(&c, x[i], y[i]);
        td_expr_add(b, cat, td_expr_class(b, &c));
    }
    td_expr_add(b, alt, cat);
}

int32_t td_expr_cps(struct td_builder *b, struct td_cps *c)
{
    static const uint32_t lengths[][2] = {
        {0x80, 0x7FF}, {0x800, 0xD7FF}, {0xE000, 0xFFFF}, {0x10000, TD_CP_MAX}};
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    struct td_byte_class ascii = {{0}};
    td_cps_normalize(c);
    for (int32_t i = 0; i < c->n && !b->status; i++) {
        uint32_t lo = c->v[i][0], hi = c->v[i][1];
        if (lo < 0x80) class_add(&ascii, lo, hi < 0x7F ? hi : 0x7F);
        for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
            uint32_t from = lo > lengths[k][0] ? lo : lengths[k][0];
            uint32_t to = hi < lengths[k][1] ? hi : lengths[k][1];
            if (from <= to) add_utf8_range(b, alt, from, to);
        }
    }
    if (ascii.bits[0] | ascii.bits[1]) td_expr_add(b, alt, td_expr_class(b, &ascii));
    if (!b->status && b->exprs[alt].last < 0)
        td_builder_fail(b, TD_ERR_INVALID, "a class of characters is empty");
    return alt;
}

/* ---- to nodes -------------------------------------------------------------------------------- */

struct compiler {
    struct td_builder *b;
    struct td_grammar *g;
    int32_t *slots; /* of equal nodes: node + 1, 0 empty */
    uint32_t mask;
    int32_t n_steps;
    int32_t *stack, *stamps; /* [n_nodes] while rules are checked */
};

static bool step(struct compiler *c)
{
    if (c->b->status) return false;
    if (++c->n_steps <= MAX_STEPS) return true;
    td_builder_fail(
        c->b, TD_ERR_LIMIT,
        "compiling takes more than %d steps, the limit: repeat less, or use fewer rules",
        MAX_STEPS);
    return false;
}

static int32_t node_new(struct compiler *c, enum td_node_kind kind, int32_t a, int32_t b)
{
    struct td_grammar *g = c->g;
    struct td_node *p = grow(c->b, g->nodes, g->n_nodes, &g->nodes_capacity, sizeof *p,
                             TD_GRAMMAR_MAX_NODES, "nodes");
    if (!p) return 0;
    g->nodes = p;
    p[g->n_nodes] = (struct td_node){.kind = (uint8_t)kind, .a = a, .b = b};
    return g->n_nodes++;
}

/* For nodes that are never changed later. */
static int32_t node_of(struct compiler *c, enum td_node_kind kind, int32_t a, int32_t b)
{
    int32_t key[3] = {(int32_t)kind, a, b};
    if (kind == TD_NODE_SPLIT && a == b) return a;
    for (uint32_t i = (uint32_t)td_hash64(key, sizeof key, 0) & c->mask;; i = (i + 1) & c->mask) {
        if (!c->slots[i]) {
            int32_t node = node_new(c, kind, a, b);
            if (!c->b->status) c->slots[i] = node + 1;
            return node;
        }
        const struct td_node *n = &c->g->nodes[c->slots[i] - 1];
        if (n->kind == kind && n->a == a && n->b == b) return c->slots[i] - 1;
    }
}

static int32_t compile(struct compiler *c, int32_t expr, int32_t next)
{
    if (!step(c)) return 0;
    const struct td_expr e = c->b->exprs[expr];
    int32_t at = next;
    switch ((enum td_expr_kind)e.kind) {
    case TD_EXPR_CAT:
        for (int32_t i = e.last; i >= 0; i = c->b->exprs[i].prev) at = compile(c, i, at);
        return at;
    case TD_EXPR_ALT:
        TD_ASSERT(e.last >= 0);
        at = compile(c, e.last, next);
        for (int32_t i = c->b->exprs[e.last].prev; i >= 0; i = c->b->exprs[i].prev)
            at = node_of(c, TD_NODE_SPLIT, compile(c, i, next), at);
        return at;
    case TD_EXPR_BYTES:
        return node_of(c, TD_NODE_BYTES, e.min, next);
    case TD_EXPR_REP:
        if (e.max < 0) {
            at = node_new(c, TD_NODE_SPLIT, 0, next);
            int32_t body = compile(c, e.last, at);
            if (!c->b->status) c->g->nodes[at].a = body;
        }
        for (int32_t i = e.min; i < e.max && step(c); i++)
            at = node_of(c, TD_NODE_SPLIT, compile(c, e.last, at), next);
        for (int32_t i = 0; i < e.min && step(c); i++) {
            int32_t before = at;
            at = compile(c, e.last, at);
            if (at == before) break; /* the empty text: once is as good as often */
        }
        return at;
    case TD_EXPR_CALL:
        c->b->rules[e.min].called = true;
        return node_of(c, TD_NODE_CALL, e.min, next);
    }
    return 0;
}

/* From the rule's start, without reading a byte: does it reach its end? Rules that it calls on the
 * way are visited by `seen`, which may be NULL. over_bytes: bytes may be read, and called rules
 * that end are passed. */
static bool reaches_end(struct compiler *c, int32_t rule, bool over_bytes, int32_t stamp,
                        void (*seen)(struct compiler *c, int32_t called, void *ctx), void *ctx)
{
    const struct td_grammar *g = c->g;
    int32_t n = 0;
    bool end = false;
    c->stack[n++] = c->b->rules[rule].start;
    c->stamps[c->b->rules[rule].start] = stamp;
    while (n > 0 && step(c)) {
        const struct td_node *node = &g->nodes[c->stack[--n]];
        int32_t to[2], n_to = 0;
        if (node->kind == TD_NODE_END) end = true;
        if (node->kind == TD_NODE_SPLIT) to[n_to++] = node->a, to[n_to++] = node->b;
        if (node->kind == TD_NODE_BYTES && over_bytes) to[n_to++] = node->b;
        if (node->kind == TD_NODE_CALL) {
            const struct td_rule *r = &c->b->rules[node->a];
            if (seen) seen(c, node->a, ctx);
            if (over_bytes ? r->ends : r->nullable) to[n_to++] = node->b;
        }
        for (int32_t i = 0; i < n_to; i++) {
            if (c->stamps[to[i]] == stamp) continue;
            c->stamps[to[i]] = stamp;
            c->stack[n++] = to[i];
        }
    }
    return end;
}

struct left_calls {
    int32_t *from; /* [n_rules + 1]: into `to` */
    int32_t *to, n, capacity;
};

static void left_call_seen(struct compiler *c, int32_t called, void *ctx)
{
    struct left_calls *l = ctx;
    int32_t *p = grow(c->b, l->to, l->n, &l->capacity, sizeof *p, 1 << 20, "calls");
    if (!p) return;
    l->to = p;
    p[l->n++] = called;
}

/* A cycle among calls that come before any byte. */
static void check_left_recursion(struct compiler *c, int32_t *stamp)
{
    int32_t n_rules = c->b->n_rules, n = 0;
    struct left_calls l = {.from = calloc((size_t)n_rules + 1, sizeof *l.from)};
    int32_t *path = calloc((size_t)n_rules, sizeof *path),
            *at = calloc((size_t)n_rules, sizeof *at);
    uint8_t *color = calloc((size_t)n_rules, 1); /* 1: on the path, 2: done */
    if (!l.from || !path || !at || !color) {
        td_builder_fail(c->b, TD_ERR_NOMEM, "no memory to check %d rules", n_rules);
        n_rules = 0;
    }
    for (int32_t i = 0; i < n_rules; i++) {
        l.from[i] = l.n;
        reaches_end(c, i, false, ++*stamp, left_call_seen, &l);
        l.from[i + 1] = l.n;
    }
    for (int32_t i = 0; i < n_rules && !c->b->status; i++) {
        if (color[i]) continue;
        path[n++] = i, color[i] = 1, at[i] = l.from[i];
        while (n > 0) {
            int32_t r = path[n - 1];
            if (at[r] == l.from[r + 1]) {
                color[r] = 2, n--;
                continue;
            }
            int32_t to = l.to[at[r]++];
            if (color[to] == 1) {
                td_builder_fail(c->b, TD_ERR_UNSUPPORTED,
                                "a rule begins with itself (left recursion): write the repetition "
                                "with *, or put what is repeated first");
                break;
            }
            if (!color[to]) path[n++] = to, color[to] = 1, at[to] = l.from[to];
        }
    }
    free(l.from);
    free(l.to);
    free(path);
    free(at);
    free(color);
}

static void check_rules(struct compiler *c)
{
    int32_t stamp = 0;
    c->stack = calloc((size_t)c->g->n_nodes, sizeof *c->stack);
    c->stamps = calloc((size_t)c->g->n_nodes, sizeof *c->stamps);
    if (!c->stack || !c->stamps) {
        td_builder_fail(c->b, TD_ERR_NOMEM, "no memory to check the rules");
        return;
    }
    for (int pass = 0; pass < 2; pass++) { /* 0: can end at all; 1: can be empty */
        bool up = false; /* rules of long chains call those before them, or behind */
        for (bool changed = true; changed && !c->b->status; up = !up) {
            changed = false;
            for (int32_t k = 0; k < c->b->n_rules; k++) {
                int32_t i = up ? k : c->b->n_rules - 1 - k;
                struct td_rule *r = &c->b->rules[i];
                bool *known = pass ? &r->nullable : &r->ends;
                if (!*known && reaches_end(c, i, !pass, ++stamp, NULL, NULL))
                    *known = changed = true;
            }
        }
    }
    for (int32_t i = 0; i < c->b->n_rules && !c->b->status; i++)
        if (!c->b->rules[i].ends && (i == 0 || c->b->rules[i].called))
            td_builder_fail(c->b, TD_ERR_INVALID,
                            "a rule can never end: each of its alternatives calls it again");
    if (!c->b->status) check_left_recursion(c, &stamp);
}

/* Bytes that all classes treat alike become one column. */
static void make_columns(struct td_builder *b, struct td_grammar *g)
{
    bool *used = calloc((size_t)b->n_classes, sizeof *used);
    g->class_columns = calloc((size_t)b->n_classes, sizeof *g->class_columns);
    if (!used || !g->class_columns) {
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for classes of bytes");
        free(used);
        return;
    }
    for (int32_t i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].kind == TD_NODE_BYTES) used[g->nodes[i].a] = true;
    g->n_columns = 1;
    for (int32_t i = 0; i < b->n_classes; i++) {
        /* old column, twice: bytes outside the class, bytes in it -> new column */
        int32_t number[512], n = 0;
        if (!used[i]) continue;
        memset(number, -1, sizeof number);
        for (int byte = 0; byte < 256; byte++) {
            int key =
                2 * g->column_of[byte] + (int)(b->classes[i].bits[byte / 64] >> byte % 64 & 1);
            if (number[key] < 0) number[key] = n++;
            g->column_of[byte] = (uint8_t)number[key];
        }
        g->n_columns = n;
    }
    for (int32_t i = 0; i < b->n_classes; i++)
        for (int byte = 0; byte < 256 && used[i]; byte++)
            if (b->classes[i].bits[byte / 64] >> byte % 64 & 1)
                g->class_columns[i][g->column_of[byte] / 64] |= (uint64_t)1
                                                                << g->column_of[byte] % 64;
    g->n_classes = b->n_classes;
    free(used);
}

static void compile_rules(struct td_builder *b, struct td_grammar *g)
{
    struct compiler c = {.b = b, .g = g, .mask = 4 * TD_GRAMMAR_MAX_NODES - 1};
    c.slots = calloc((size_t)c.mask + 1, sizeof *c.slots);
    g->rule_starts = calloc((size_t)b->n_rules, sizeof *g->rule_starts);
    if (!c.slots || !g->rule_starts) td_builder_fail(b, TD_ERR_NOMEM, "no memory for nodes");
    if (!b->status) node_new(&c, TD_NODE_END, 0, 0);
    for (int32_t i = 0; i < b->n_rules && !b->status; i++) {
        TD_ASSERT(b->rules[i].expr >= 0);
        if (b->rules[i].nothing) continue; /* its start is the end, and it is never called */
        b->rules[i].start = g->rule_starts[i] = compile(&c, b->rules[i].expr, 0);
    }
    g->n_rules = b->n_rules;
    if (!b->status) check_rules(&c);
    if (!b->status) make_columns(b, g);
    free(c.slots);
    free(c.stack);
    free(c.stamps);
}

static const char *kind_name(enum td_grammar_kind kind)
{
    static const char *const names[] = {"",       "json_object", "json_schema", "regex",
                                        "choice", "grammar",     "tool_calls"};
    return names[kind];
}

static void read_texts(struct td_builder *b, enum td_grammar_kind kind,
                       const struct td_grammar_text *texts, size_t n_texts)
{
    if (kind == TD_GRAMMAR_JSON_OBJECT) {
        td_grammar_read_json_object(b);
    } else if (kind == TD_GRAMMAR_CHOICE) {
        struct td_grammar_text *copy = n_texts ? calloc(n_texts, sizeof *copy) : NULL;
        if (n_texts && !copy) td_builder_fail(b, TD_ERR_NOMEM, "no memory");
        for (size_t i = 0; i < n_texts && !b->status; i++)
            if (!(copy[i] = texts[i]).n_bytes)
                td_builder_fail(b, TD_ERR_INVALID, "alternative %zu is empty", i);
        int32_t e = b->status ? 0 : td_expr_choice(b, copy, n_texts);
        if (!b->status) b->rules[0].expr = e;
        free(copy);
    } else if (kind == TD_GRAMMAR_REGEX) {
        int32_t e = td_expr_regex(b, texts[0].bytes, texts[0].n_bytes, TD_REGEX_OUTPUT);
        if (!b->status) b->rules[0].expr = e;
    } else if (kind == TD_GRAMMAR_EBNF) {
        td_grammar_read_ebnf(b, texts[0].bytes, texts[0].n_bytes);
    } else if (kind == TD_GRAMMAR_TOOL_CALLS) {
        td_grammar_read_calls(b, texts[0].bytes, texts[0].n_bytes);
    } else {
        td_grammar_read_schema(b, texts[0].bytes, texts[0].n_bytes);
    }
}

td_status td_grammar_compile(enum td_grammar_kind kind, const struct td_grammar_text *texts,
                             size_t n_texts, struct td_grammar **ret_grammar, struct td_err *err)
{
    if ((int)kind <= TD_GRAMMAR_NONE || kind > TD_GRAMMAR_LAST)
        return td_fail(err, TD_ERR_INVALID, "guided output of kind %d, must be 1..%d", (int)kind,
                       TD_GRAMMAR_LAST);
    struct td_builder b = {.what = kind_name(kind), .err = err};
    size_t n_bytes = 0, want = kind == TD_GRAMMAR_JSON_OBJECT ? 0 : 1;
    if (kind != TD_GRAMMAR_CHOICE && n_texts != want)
        return td_builder_fail(&b, TD_ERR_INVALID, "%zu texts, must be %zu", n_texts, want);
    if (n_texts > TD_GRAMMAR_MAX_CHOICES)
        return td_builder_fail(&b, TD_ERR_LIMIT, "%zu alternatives, limit %d", n_texts,
                               TD_GRAMMAR_MAX_CHOICES);
    for (size_t i = 0; i < n_texts && n_bytes <= TD_GRAMMAR_MAX_TEXT_BYTES; i++)
        n_bytes += texts[i].n_bytes;
    if (n_bytes > TD_GRAMMAR_MAX_TEXT_BYTES)
        return td_builder_fail(&b, TD_ERR_LIMIT, "%zu bytes or more, limit %d", n_bytes,
                               TD_GRAMMAR_MAX_TEXT_BYTES);
    struct td_grammar *g = calloc(1, sizeof *g);
    if (!g) return td_builder_fail(&b, TD_ERR_NOMEM, "no memory");
    for (int i = 0; i < 256 && !b.status; i++) {
        struct td_byte_class *p = grow(&b, b.classes, b.n_classes, &b.classes_capacity, sizeof *p,
                                       MAX_CLASSES, "classes of bytes");
        if (!p) break;
        b.classes = p;
        p[b.n_classes] = (struct td_byte_class){{0}};
        class_add(&p[b.n_classes++], (uint32_t)i, (uint32_t)i);
    }
    td_rule_new(&b);
    if (!b.status) read_texts(&b, kind, texts, n_texts);
    if (!b.status) compile_rules(&b, g);
    free(b.exprs);
    free(b.classes);
    free(b.rules);
    td_builder_free_reasons(&b);
    if (b.status) {
        td_grammar_free(g);
        return b.status;
    }
    *ret_grammar = g;
    return TD_OK;
}

void td_grammar_free(struct td_grammar *g)
{
    if (!g) return;
    free(g->nodes);
    free(g->rule_starts);
    free(g->class_columns);
    free(g);
}

td_status td_grammar_key(enum td_grammar_kind kind, const struct td_grammar_text *texts,
                         size_t n_texts, char **ret_key, size_t *ret_n, struct td_err *err)
{
    size_t n = sizeof kind, at = sizeof kind;
    for (size_t i = 0; i < n_texts; i++) n += sizeof texts->n_bytes + texts[i].n_bytes;
    char *key = malloc(n);
    if (!key) return td_fail(err, TD_ERR_NOMEM, "guided output: no memory for %zu bytes", n);
    memcpy(key, &kind, sizeof kind);
    for (size_t i = 0; i < n_texts; i++) { /* a length before each: "ab", "c" is not "a", "bc" */
        memcpy(key + at, &texts[i].n_bytes, sizeof texts->n_bytes);
        at += sizeof texts->n_bytes;
        if (texts[i].n_bytes) memcpy(key + at, texts[i].bytes, texts[i].n_bytes);
        at += texts[i].n_bytes;
    }
    *ret_key = key;
    *ret_n = n;
    return TD_OK;
}

td_status td_grammar_key_read(const char *key, size_t n_key, enum td_grammar_kind *ret_kind,
                              struct td_grammar_text **ret_texts, size_t *ret_n, struct td_err *err)
{
    struct td_grammar_text text = {0}, *texts = NULL;
    size_t n = 0, capacity = 0;
    td_status s = n_key < sizeof *ret_kind ? TD_ERR_INVALID : TD_OK;
    for (size_t at = sizeof *ret_kind; at < n_key && !s; at += text.n_bytes) {
        if (n_key - at < sizeof text.n_bytes) s = TD_ERR_INVALID;
        if (!s) memcpy(&text.n_bytes, key + at, sizeof text.n_bytes);
        at += sizeof text.n_bytes;
        if (!s && text.n_bytes > n_key - at) s = TD_ERR_INVALID;
        if (!s && n == capacity) {
            capacity = capacity ? 2 * capacity : 4;
            struct td_grammar_text *more = realloc(texts, capacity * sizeof *texts);
            if (!more) s = TD_ERR_NOMEM;
            if (more) texts = more;
        }
        if (s) break;
        text.bytes = key + at;
        texts[n++] = text;
    }
    if (s) {
        free(texts);
        return td_fail(err, s, "guided output: %s",
                       s == TD_ERR_NOMEM ? "no memory for its texts" : "its key is cut");
    }
    memcpy(ret_kind, key, sizeof *ret_kind);
    *ret_texts = texts;
    *ret_n = n;
    return TD_OK;
}
