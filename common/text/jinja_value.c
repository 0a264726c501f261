/* jinja_value.c - the arena, values and scopes of one rendering.
 *
 * Values are small structs passed by value. Strings are (pointer, length) into the source, the
 * input or the rendering's arena, and never change; only namespaces change. Each rendering has an
 * arena that is freed with it, so nothing is freed earlier.
 *
 * Scopes. A loop iteration and a macro call open a scope; `if` and `set` do not. A name is looked
 * up from the innermost scope outwards, so a `set` inside a loop ends with the iteration, as in
 * Jinja. */
#include "common/text/jinja_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- arena ----------------------------------------------------------------------------------- */

void *jinja_arena_alloc(struct arena *a, size_t bytes)
{
    if (bytes > a->limit) return NULL;
    bytes = (bytes + 15) & ~(size_t)15;
    if (a->head == NULL || a->head->bytes - a->head->used < bytes) {
        size_t room = bytes > 16384 ? bytes : 16384;
        if (sizeof(struct chunk) + room > a->limit - a->total) return NULL;
        struct chunk *c = malloc(sizeof *c + room);
        if (c == NULL) return NULL;
        *c = (struct chunk){.next = a->head, .bytes = room};
        a->head = c;
        a->total += sizeof *c + room;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += bytes;
    return memset(p, 0, bytes);
}

void jinja_arena_free(struct arena *a)
{
    while (a->head != NULL) {
        struct chunk *next = a->head->next;
        free(a->head);
        a->head = next;
    }
}

/* ---- context --------------------------------------------------------------------------------- */

bool jinja_fails(struct ctx *c, td_status code, const char *fmt, ...)
{
    char what[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    c->status = td_fail(c->err, code, "chat template, line %d: %s", c->line, what);
    return false;
}

bool jinja_step(struct ctx *c)
{
    if (c->steps_left == 0) return jinja_fails(c, TD_ERR_LIMIT, "too many steps");
    c->steps_left--;
    return true;
}

/* Takes steps for reading a long value. The arena bounds what allocates; this bounds what only
 * reads. */
void jinja_charge(struct ctx *c, struct value v)
{
    uint64_t cost = v.kind == STR                       ? v.u.s.n / 64
                    : v.kind == LIST                    ? v.u.list->n / 8
                    : v.kind == DICT || v.kind == SPACE ? v.u.dict->n / 8
                                                        : 0;
    c->steps_left -= cost < c->steps_left ? cost : c->steps_left;
}

void *jinja_ctx_alloc(struct ctx *c, size_t bytes)
{
    void *p = jinja_arena_alloc(&c->arena, bytes);
    if (p == NULL)
        jinja_fails(c, TD_ERR_LIMIT, "more than %zu bytes of text and values", c->arena.limit);
    return p;
}

bool jinja_append(struct ctx *c, struct text *t, struct str s)
{
    size_t max = c->input->max_text_bytes;
    if (t == c->final && max > 0 && s.n > max - t->n)
        return jinja_fails(
            c, TD_ERR_LIMIT,
            "the prompt would have more than %zu bytes, the most that this model's context holds",
            max);
    if (s.n > t->room - t->n) {
        size_t room = 2 * t->room + s.n + 64;
        char *p = jinja_ctx_alloc(c, room);
        if (p == NULL) return false;
        if (t->n > 0) memcpy(p, t->p, t->n);
        t->p = p;
        t->room = room;
    }
    if (s.n > 0) memcpy(t->p + t->n, s.p, s.n);
    t->n += s.n;
    return true;
}

struct value jinja_none_value(void) { return (struct value){.kind = NONE}; }

struct value jinja_bool_value(bool b) { return (struct value){.kind = BOOL, .u.i = b}; }

struct value jinja_int_value(int64_t i) { return (struct value){.kind = INT, .u.i = i}; }

struct value jinja_str_value(const char *p, size_t n)
{
    /* an empty text has no memory */
    return (struct value){.kind = STR, .u.s = {p != NULL ? p : "", n}};
}

struct value jinja_word_value(const char *word) { return jinja_str_value(word, strlen(word)); }

bool jinja_new_list(struct ctx *c, size_t n, struct value *ret)
{
    struct list *l = jinja_ctx_alloc(c, sizeof *l);
    if (l == NULL) return false;
    l->n = n;
    l->v = n > 0 ? jinja_ctx_alloc(c, n * sizeof *l->v) : NULL;
    *ret = (struct value){.kind = LIST, .u.list = l};
    return n == 0 || l->v != NULL;
}

bool jinja_new_dict(struct ctx *c, enum kind kind, struct value *ret)
{
    struct dict *d = jinja_ctx_alloc(c, sizeof *d);
    *ret = (struct value){.kind = kind, .u.dict = d};
    return d != NULL;
}

/* A mapping's keys are kept as text; an integer as NUL, "i" and its digits. */
bool jinja_to_key(struct ctx *c, struct value v, struct str *ret)
{
    if (v.kind == STR && (v.u.s.n == 0 || v.u.s.p[0] != 0)) {
        *ret = v.u.s;
        return true;
    }
    if (v.kind != INT && v.kind != BOOL)
        return jinja_fails(c, TD_ERR_UNSUPPORTED,
                           "a mapping with a key that is neither text nor an integer");
    char *p = jinja_ctx_alloc(c, 24);
    if (p == NULL) return false;
    *ret = (struct str){p, 2 + (size_t)snprintf(p + 2, 22, "%lld", (long long)v.u.i)};
    p[1] = 'i';
    return true;
}

struct value jinja_from_key(struct str key)
{
    return key.n > 2 && key.p[0] == 0 ? jinja_int_value(strtoll(key.p + 2, NULL, 10))
                                      : jinja_str_value(key.p, key.n);
}

struct value *jinja_dict_find(const struct dict *d, struct str key)
{
    for (size_t i = 0; i < d->n; i++)
        if (str_same(d->pair[i].key, key)) return &d->pair[i].value;
    return NULL;
}

bool jinja_dict_put(struct ctx *c, struct dict *d, struct str key, struct value v)
{
    jinja_charge(c, (struct value){.kind = DICT, .u.dict = d});
    struct value *old = jinja_dict_find(d, key);
    if (old != NULL) {
        *old = v;
        return true;
    }
    if (d->n == d->room) {
        size_t room = 2 * d->room + 4;
        struct pair *pair = jinja_ctx_alloc(c, room * sizeof *pair);
        if (pair == NULL) return false;
        if (d->n > 0) memcpy(pair, d->pair, d->n * sizeof *pair);
        d->pair = pair;
        d->room = room;
    }
    d->pair[d->n++] = (struct pair){key, v};
    return true;
}

/* Takes steps for the names that were passed by in the search of one. */
static void charge_names(struct ctx *c, uint64_t n_seen)
{
    n_seen /= 32;
    c->steps_left -= n_seen < c->steps_left ? n_seen : c->steps_left;
}

struct value *jinja_find_name(struct ctx *c, struct str name)
{
    uint64_t n_seen = 0;
    struct value *found = NULL;
    for (const struct scope *s = c->scope; s != NULL && found == NULL; s = s->parent)
        for (struct var *v = s->vars; v != NULL && found == NULL; v = v->next, n_seen++)
            found = str_same(v->name, name) ? &v->value : NULL;
    charge_names(c, n_seen);
    return found;
}

bool jinja_bind(struct ctx *c, struct scope *s, struct str name, struct value value)
{
    uint64_t n_seen = 0;
    struct var *v = s->vars;
    for (; v != NULL && !str_same(v->name, name); v = v->next) n_seen++;
    charge_names(c, n_seen);
    if (v != NULL) {
        v->value = value;
        return true;
    }
    v = jinja_ctx_alloc(c, sizeof *v);
    if (v == NULL) return false;
    *v = (struct var){s->vars, name, value};
    s->vars = v;
    return true;
}

/* ---- text as Python sees it ------------------------------------------------------------------ */

/* The bytes of the character at s.p[at]; a byte that begins no valid character counts alone. */
size_t jinja_char_bytes(struct str s, size_t at)
{
    unsigned char c = (unsigned char)s.p[at];
    size_t n = c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
    if (c >= 0xf8 || n > s.n - at) return 1;
    for (size_t i = 1; i < n; i++)
        if (((unsigned char)s.p[at + i] & 0xc0) != 0x80) return 1;
    return n;
}

size_t jinja_char_count(struct str s)
{
    size_t n = 0;
    for (size_t at = 0; at < s.n; at += jinja_char_bytes(s, at)) n++;
    return n;
}

/* The bytes of the character that ends before s.p[end]. */
static size_t char_bytes_before(struct str s, size_t end)
{
    for (size_t n = 2; n <= 4 && n <= end; n++)
        if (((unsigned char)s.p[end - n] & 0xc0) == 0xc0)
            return jinja_char_bytes((struct str){s.p, end}, end - n) == n ? n : 1;
    return 1;
}

/* str.isspace() */
bool jinja_space_char(struct str s)
{
    static const char *const wide[] = {"\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80",
                                       "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf",
                                       "\xe2\x81\x9f", "\xe3\x80\x80"};
    if (s.n == 1) return jinja_is_space(s.p[0]);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (str_is(s, wide[i])) return true;
    return s.n == 3 && memcmp(s.p, "\xe2\x80", 2) == 0 && (unsigned char)s.p[2] >= 0x80 &&
           (unsigned char)s.p[2] <= 0x8a;
}

static bool contains(struct str s, struct str part)
{
    return part.n == 0 || memmem(s.p, s.n, part.p, part.n) != NULL;
}

/* jinja_strip(): white space, or the characters of *chars */
struct str jinja_strip(struct str s, const struct str *chars, bool left, bool right)
{
    while (left && s.n > 0) {
        struct str ch = {s.p, jinja_char_bytes(s, 0)};
        if (!(chars != NULL ? contains(*chars, ch) : jinja_space_char(ch))) break;
        s.p += ch.n;
        s.n -= ch.n;
    }
    while (right && s.n > 0) {
        size_t n = char_bytes_before(s, s.n);
        struct str ch = {s.p + s.n - n, n};
        if (!(chars != NULL ? contains(*chars, ch) : jinja_space_char(ch))) break;
        s.n -= n;
    }
    return s;
}

void td_jinja_strip(const char **text, size_t *n_bytes)
{
    struct str s = jinja_strip((struct str){*text, *n_bytes}, NULL, true, true);
    *text = s.p;
    *n_bytes = s.n;
}

bool jinja_truth(struct value v)
{
    switch (v.kind) {
    case UNDEFINED:
    case NONE:
        return false;
    case BOOL:
    case INT:
        return v.u.i != 0;
    case REAL:
        return v.u.real != 0;
    case STR:
        return v.u.s.n > 0;
    case LIST:
        return v.lazy || v.u.list->n > 0;
    case DICT:
        return v.u.dict->n > 0;
    default:
        return true;
    }
}

/* str(v) */
bool jinja_to_text(struct ctx *c, struct value v, struct str *ret)
{
    switch (v.kind) {
    case UNDEFINED:
        *ret = (struct str){"", 0};
        return true;
    case NONE:
        *ret = (struct str){"None", 4};
        return true;
    case BOOL:
        *ret = v.u.i ? (struct str){"True", 4} : (struct str){"False", 5};
        return true;
    case STR:
        *ret = v.u.s;
        return true;
    case INT: {
        char *p = jinja_ctx_alloc(c, 24);
        if (p == NULL) return false;
        *ret = (struct str){p, (size_t)snprintf(p, 24, "%lld", (long long)v.u.i)};
        return true;
    }
    case REAL:
        return jinja_real_text(c, v.u.real, ret);
    default:
        return jinja_fails(c, TD_ERR_UNSUPPORTED,
                           "it writes a list, a mapping or an object as text");
    }
}

/* Whether a == b. If the values are too deep or too long, c->status says so: check it. */
bool jinja_same(struct ctx *c, struct value a, struct value b, int depth)
{
    if (!jinja_step(c)) return false;
    if (depth > JINJA_MAX_DEPTH)
        return jinja_fails(c, TD_ERR_LIMIT, "it compares values that nest too deep");
    if ((a.kind == BOOL || a.kind == INT) && (b.kind == BOOL || b.kind == INT))
        return a.u.i == b.u.i;
    if (a.kind == REAL || b.kind == REAL) {
        bool numbers = (a.kind == REAL || a.kind == INT || a.kind == BOOL) &&
                       (b.kind == REAL || b.kind == INT || b.kind == BOOL);
        return numbers && (a.kind == REAL ? a.u.real : (double)a.u.i) ==
                              (b.kind == REAL ? b.u.real : (double)b.u.i);
    }
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case UNDEFINED:
    case NONE:
        return true;
    case STR:
        return str_same(a.u.s, b.u.s);
    case LIST:
        if (a.u.list == b.u.list) return true;
        if (a.lazy || b.lazy || a.u.list->n != b.u.list->n) return false;
        for (size_t i = 0; i < a.u.list->n; i++)
            if (!jinja_same(c, a.u.list->v[i], b.u.list->v[i], depth + 1)) return false;
        return true;
    case DICT:
        if (a.u.dict->n != b.u.dict->n) return false;
        for (size_t i = 0; i < a.u.dict->n; i++) {
            jinja_charge(c, b);
            const struct value *other = jinja_dict_find(b.u.dict, a.u.dict->pair[i].key);
            if (other == NULL || !jinja_same(c, a.u.dict->pair[i].value, *other, depth + 1))
                return false;
        }
        return true;
    default:
        return a.u.dict == b.u.dict;
    }
}

const char *jinja_kind_name(enum kind k)
{
    static const char *const names[] = {"undefined",   "none",     "a boolean", "an integer",
                                        "a real",      "a string", "a list",    "a mapping",
                                        "a namespace", "a loop",   "a macro",   "a function"};
    return names[k];
}

bool jinja_is_in(struct ctx *c, struct value item, struct value in, bool *ret)
{
    *ret = false;
    if (in.kind == STR) {
        if (item.kind != STR)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "it looks for %s in a string",
                               jinja_kind_name(item.kind));
        *ret = contains(in.u.s, item.u.s);
    } else if (in.kind == LIST) {
        for (size_t i = 0; i < in.u.list->n && !*ret && c->status == TD_OK; i++)
            *ret = jinja_same(c, in.u.list->v[i], item, 0);
    } else if (in.kind == DICT) {
        struct str key;
        if (!jinja_to_key(c, item, &key)) return false;
        *ret = jinja_dict_find(in.u.dict, key) != NULL;
    } else if (in.kind != UNDEFINED) {
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it looks for something in %s",
                           jinja_kind_name(in.kind));
    }
    return c->status == TD_OK;
}
