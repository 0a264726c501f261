/* grammar_regex.c - regular expressions: the part that ECMAScript, Python and PCRE agree about and
 * that an automaton can run.
 *
 * Has: literals, ".", classes with ranges and \d \w \s \D \W \S (of ASCII), groups, (?:...), "|",
 * * + ? {m} {m,} {m,n}, \n \r \t \f \v \0 \xHH \uHHHH \u{H...}, and ^ and $ at the ends of an
 * alternative outside groups. Lazy quantifiers match the same texts and are read as the others.
 * Back-references, look-around, \b, \p, flags and named groups are refused by name.
 *
 * Inside a JSON string (pattern) each character stands for itself, or for its two-character escape
 * where JSON wants one. What \S, [^\s] and "." leave out there is what ECMAScript, which JSON
 * schemas name, or Python leaves out, so that validators of either kind take the text. */
#include <string.h>

#include "common/text/grammar_internal.h"
#include "common/text/tokenizer_text.h"

struct regex {
    struct td_builder *b;
    const char *text;
    size_t n, at;
    enum td_regex_use use;
    int depth;
    bool inverted;          /* inside [^...] */
    char spaces_seen;       /* of the class that is read: 1: \s, 2: \S, 3: both */
    struct td_lengths last; /* of the expression that was read last */
};

#define MANY_CHARACTERS 1000000

static int32_t length(int64_t n, int32_t beyond)
{
    return n > MANY_CHARACTERS ? beyond : (int32_t)n;
}

static struct td_lengths lengths_behind(struct td_lengths a, struct td_lengths b)
{
    bool open = a.max < 0 || b.max < 0;
    return (struct td_lengths){length((int64_t)a.min + b.min, MANY_CHARACTERS),
                               open ? -1 : length((int64_t)a.max + b.max, -1)};
}

static struct td_lengths lengths_of_either(struct td_lengths a, struct td_lengths b)
{
    bool open = a.max < 0 || b.max < 0;
    return (struct td_lengths){a.min < b.min ? a.min : b.min, open            ? -1
                                                              : a.max > b.max ? a.max
                                                                              : b.max};
}

static struct td_lengths lengths_repeated(struct td_lengths a, int32_t min, int32_t max)
{
    bool none = max == 0 || a.max == 0, open = max < 0 || a.max < 0;
    return (struct td_lengths){length((int64_t)a.min * min, MANY_CHARACTERS),
                               none   ? 0
                               : open ? -1
                                      : length((int64_t)a.max * max, -1)};
}

static bool more(const struct regex *r) { return r->at < r->n && !r->b->status; }
static bool is_next(const struct regex *r, char c) { return more(r) && r->text[r->at] == c; }

static int32_t fail(struct regex *r, td_status code, const char *why)
{
    td_builder_fail(r->b, code, "at byte %zu of the expression: %s", r->at, why);
    return 0;
}

static uint32_t next_cp(struct regex *r)
{
    uint32_t cp = 0;
    int len = td_utf8_next(r->text + r->at, r->n - r->at, &cp);
    if (len <= 0) {
        fail(r, TD_ERR_INVALID, "not valid UTF-8");
        return 0;
    }
    r->at += (size_t)len;
    return cp;
}

/* One character of the set, as this use writes it. Frees *set. */
static int32_t one_of(struct regex *r, struct td_cps *set)
{
    static const struct {
        uint32_t cp;
        const char *text;
    } escapes[] = {{'"', "\\\""}, {'\\', "\\\\"}, {'\b', "\\b"}, {'\f', "\\f"},
                   {'\n', "\\n"}, {'\r', "\\r"},  {'\t', "\\t"}};
    struct td_builder *b = r->b;
    int32_t e;
    r->last = (struct td_lengths){1, 1};
    td_cps_normalize(set);
    if (r->use == TD_REGEX_OUTPUT) {
        e = td_expr_cps(b, set);
    } else {
        struct td_cps plain = {0};
        e = td_expr_new(b, TD_EXPR_ALT, 0, 0);
        for (size_t i = 0; i < sizeof escapes / sizeof *escapes; i++)
            if (td_cps_has(set, escapes[i].cp)) td_expr_add(b, e, td_expr_text(b, escapes[i].text));
        td_cps_invert(b, set); /* plain: in the set, and written as it is */
        td_cps_add(b, set, 0, 0x1F);
        td_cps_add(b, set, '"', '"');
        td_cps_add(b, set, '\\', '\\');
        td_cps_add(b, set, 0xD800, 0xDFFF);
        td_cps_invert(b, set);
        plain = *set;
        *set = (struct td_cps){0};
        if (plain.n) td_expr_add(b, e, td_expr_cps(b, &plain));
        td_cps_free(&plain);
        if (!b->status && b->exprs[e].last < 0)
            fail(r, TD_ERR_INVALID, "no character that a JSON string can write is allowed here");
    }
    td_cps_free(set);
    return e;
}

/* White space: of ASCII, or all that ECMAScript or Python takes for it. */
static void add_spaces(struct td_builder *b, struct td_cps *set, bool all)
{
    static const uint32_t others[][2] = {
        {0x1C, 0x1F},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
        {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    td_cps_add(b, set, '\t', '\r');
    td_cps_add(b, set, ' ', ' ');
    for (size_t i = 0; all && i < sizeof others / sizeof *others; i++)
        td_cps_add(b, set, others[i][0], others[i][1]);
}

static void add_class(struct regex *r, struct td_cps *set, char which)
{
    struct td_builder *b = r->b;
    struct td_cps c = {0};
    char lower = (char)(which | 0x20);
    if (lower == 'd') td_cps_add(b, &c, '0', '9');
    if (lower == 'w') {
        td_cps_add(b, &c, '0', '9');
        td_cps_add(b, &c, 'A', 'Z');
        td_cps_add(b, &c, '_', '_');
        td_cps_add(b, &c, 'a', 'z');
    }
    if (lower == 's') {
        bool left_out = (which == 'S') != r->inverted;
        add_spaces(b, &c, left_out && r->use != TD_REGEX_OUTPUT);
        r->spaces_seen |= which == 's' ? 1 : 2;
    }
    if (which != lower) td_cps_invert(b, &c);
    for (int32_t i = 0; i < c.n; i++) td_cps_add(b, set, c.v[i][0], c.v[i][1]);
    td_cps_free(&c);
}

static uint32_t hex(struct regex *r, int n_digits)
{
    uint32_t v = 0;
    for (int i = 0; i < n_digits; i++, r->at++) {
        char c = more(r) ? r->text[r->at] : 0;
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) {
            fail(r, TD_ERR_INVALID, "a hexadecimal digit is missing");
            return 0;
        }
        v = v * 16 + (uint32_t)d;
    }
    return v;
}

/* After a backslash: a class is added to *set and answers true; else *ret_cp is a character. */
static bool escape(struct regex *r, bool in_class, struct td_cps *set, uint32_t *ret_cp)
{
    if (!more(r)) return fail(r, TD_ERR_INVALID, "it ends with a backslash"), false;
    char c = r->text[r->at];
    if (strchr("dwsDWS", c)) {
        r->at++;
        add_class(r, set, c);
        return true;
    }
    static const char from[] = "nrtfv", to[] = "\n\r\t\f\v";
    const char *known = strchr(from, c);
    if (known) {
        r->at++;
        *ret_cp = (uint32_t)to[known - from];
    } else if (c == 'x') {
        r->at++;
        *ret_cp = hex(r, 2);
    } else if (c == 'u' && r->at + 1 < r->n && r->text[r->at + 1] == '{') {
        int n = 0;
        r->at += 2;
        while (r->at + (size_t)n < r->n && r->text[r->at + (size_t)n] != '}' && n <= 6) n++;
        if (n < 1 || n > 6) return fail(r, TD_ERR_INVALID, "\\u{...} has 1..6 digits"), false;
        *ret_cp = hex(r, n);
        r->at++;
        if (*ret_cp > TD_CP_MAX) fail(r, TD_ERR_INVALID, "a character above U+10FFFF");
    } else if (c == 'u') {
        r->at++;
        *ret_cp = hex(r, 4);
        if (*ret_cp >= 0xD800 && *ret_cp < 0xDC00 && r->at + 6 <= r->n && r->text[r->at] == '\\' &&
            r->text[r->at + 1] == 'u') { /* a pair is one character */
            r->at += 2;
            uint32_t low = hex(r, 4);
            if (low >= 0xDC00 && low <= 0xDFFF)
                *ret_cp = 0x10000 + ((*ret_cp - 0xD800) << 10) + (low - 0xDC00);
        }
        if (*ret_cp >= 0xD800 && *ret_cp <= 0xDFFF)
            fail(r, TD_ERR_INVALID, "half of a surrogate pair is no character");
    } else if (c == '0' && !(r->at + 1 < r->n && strchr("01234567", r->text[r->at + 1]))) {
        r->at++;
        *ret_cp = 0;
    } else if (c == 'b' && in_class) {
        r->at++;
        *ret_cp = '\b';
    } else if ((c >= '0' && c <= '9') || c == 'k') {
        fail(r, TD_ERR_UNSUPPORTED, "back-references and octal escapes are not supported");
    } else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
        char why[64] = "the escape \\?  is not supported";
        why[12] = c;
        fail(r, TD_ERR_UNSUPPORTED, why);
    } else {
        *ret_cp = next_cp(r);
    }
    return false;
}

static int32_t bracket(struct regex *r)
{
    struct td_cps set = {0};
    bool inverted = is_next(r, '^'), closed = false;
    if (inverted) r->at++;
    r->inverted = inverted;
    r->spaces_seen = 0;
    for (bool first = true; more(r); first = false) {
        uint32_t lo = 0, hi = 0;
        if (is_next(r, ']') && !first) {
            closed = true;
            r->at++;
            break;
        }
        if (is_next(r, ']')) { /* PCRE and ECMAScript disagree */
            fail(r, TD_ERR_INVALID, "write \\] for a bracket at the front of a class");
            break;
        }
        if (is_next(r, '[') && r->at + 1 < r->n && strchr(":.=", r->text[r->at + 1])) {
            fail(r, TD_ERR_UNSUPPORTED, "[:names:] in classes are not supported");
            break;
        }
        if (is_next(r, '\\')) {
            r->at++;
            if (escape(r, true, &set, &lo)) {
                if (is_next(r, '-') && r->at + 1 < r->n && r->text[r->at + 1] != ']')
                    fail(r, TD_ERR_INVALID, "a range cannot begin with a class");
                continue;
            }
        } else {
            lo = next_cp(r);
        }
        hi = lo;
        if (is_next(r, '-') && r->at + 1 < r->n && r->text[r->at + 1] != ']') {
            r->at++;
            if (is_next(r, '\\')) {
                r->at++;
                if (escape(r, true, &set, &hi))
                    fail(r, TD_ERR_INVALID, "a range cannot end with a class");
            } else {
                hi = next_cp(r);
            }
            if (hi < lo) fail(r, TD_ERR_INVALID, "a range ends before it begins");
        }
        td_cps_add(r->b, &set, lo, hi);
    }
    if (!closed) fail(r, TD_ERR_INVALID, "a class has no closing bracket");
    if (r->spaces_seen == 3) td_cps_add(r->b, &set, 0, TD_CP_MAX); /* whatever white space is */
    if (inverted) td_cps_invert(r->b, &set);
    r->inverted = false;
    return one_of(r, &set);
}

static int32_t number(struct regex *r)
{
    int32_t v = -1;
    for (; more(r) && r->text[r->at] >= '0' && r->text[r->at] <= '9'; r->at++) {
        v = (v < 0 ? 0 : v) * 10 + (r->text[r->at] - '0');
        if (v > TD_GRAMMAR_MAX_REPEAT) {
            td_builder_fail(r->b, TD_ERR_LIMIT,
                            "at byte %zu of the expression: a repetition of %d or more, limit %d",
                            r->at, v, TD_GRAMMAR_MAX_REPEAT);
            return -1;
        }
    }
    return v;
}

/* *, +, ?, {m,n} behind an atom. */
static int32_t quantify(struct regex *r, int32_t atom)
{
    int32_t min = 1, max = 1;
    if (!more(r)) return atom;
    char c = r->text[r->at];
    if (c == '*' || c == '+' || c == '?') {
        r->at++;
        min = c == '+';
        max = c == '?' ? 1 : -1;
    } else if (c == '{') {
        r->at++;
        min = max = number(r);
        if (is_next(r, ',')) {
            r->at++;
            max = number(r);
        }
        if (min < 0 || !is_next(r, '}') || (max >= 0 && max < min))
            return fail(r, TD_ERR_INVALID,
                        "a repetition must be {m}, {m,} or {m,n} with m <= n; "
                        "write \\{ for the character");
        r->at++;
    } else {
        return atom;
    }
    if (is_next(r, '?')) r->at++;
    if (more(r) && strchr("*+?{", r->text[r->at]))
        return fail(r, TD_ERR_UNSUPPORTED, "a repetition directly after a repetition");
    r->last = lengths_repeated(r->last, min, max);
    return td_expr_rep(r->b, atom, min, max);
}

static int32_t alternatives(struct regex *r);

static int32_t atom(struct regex *r)
{
    struct td_cps set = {0};
    uint32_t cp = 0;
    if (is_next(r, '(')) {
        r->at++;
        if (is_next(r, '?')) {
            if (r->at + 1 >= r->n || r->text[r->at + 1] != ':')
                return fail(r, TD_ERR_UNSUPPORTED,
                            "of groups that begin with (? only (?: is supported");
            r->at += 2;
        }
        if (++r->depth > TD_GRAMMAR_MAX_DEPTH) {
            td_builder_fail(r->b, TD_ERR_LIMIT, "groups are nested more than %d deep, the limit",
                            TD_GRAMMAR_MAX_DEPTH);
            return 0;
        }
        int32_t e = alternatives(r);
        r->depth--;
        if (!is_next(r, ')')) return fail(r, TD_ERR_INVALID, "a group has no closing parenthesis");
        r->at++;
        return e;
    }
    if (is_next(r, '[')) {
        r->at++;
        return bracket(r);
    }
    if (is_next(r, '.')) {
        r->at++;
        td_cps_add(r->b, &set, '\n', '\n');
        if (r->use != TD_REGEX_OUTPUT) {
            td_cps_add(r->b, &set, '\r', '\r');
            td_cps_add(r->b, &set, 0x2028, 0x2029);
        }
        td_cps_invert(r->b, &set);
        return one_of(r, &set);
    }
    if (is_next(r, '\\')) {
        r->at++;
        if (escape(r, false, &set, &cp)) return one_of(r, &set);
    } else if (strchr("*+?{", r->text[r->at])) {
        return fail(r, TD_ERR_INVALID, "nothing stands before this repetition");
    } else if (strchr("^$", r->text[r->at])) {
        return fail(r, TD_ERR_UNSUPPORTED,
                    "^ and $ are supported only at the ends, outside groups");
    } else {
        cp = next_cp(r);
    }
    td_cps_add(r->b, &set, cp, cp);
    return one_of(r, &set);
}

static int32_t anything(struct regex *r)
{
    struct td_cps all = {0};
    td_cps_add(r->b, &all, 0, TD_CP_MAX);
    return td_expr_rep(r->b, one_of(r, &all), 0, -1);
}

static int32_t alternatives(struct regex *r)
{
    int32_t alt = td_expr_new(r->b, TD_EXPR_ALT, 0, 0);
    bool open = r->use == TD_REGEX_JSON_SEARCH && r->depth == 0;
    struct td_lengths all = {MANY_CHARACTERS, 0};
    for (;;) {
        struct td_lengths here = {0, 0};
        int32_t cat = td_expr_new(r->b, TD_EXPR_CAT, 0, 0);
        bool from_start = false, to_end = false;
        while (r->depth == 0 && is_next(r, '^')) r->at++, from_start = true;
        if (open && !from_start) td_expr_add(r->b, cat, anything(r));
        while (more(r) && r->text[r->at] != '|' && r->text[r->at] != ')') {
            if (r->depth == 0 && is_next(r, '$') &&
                (r->at + 1 == r->n || r->text[r->at + 1] == '|')) {
                r->at++, to_end = true;
                break;
            }
            int32_t e = atom(r);
            td_expr_add(r->b, cat, quantify(r, e));
            here = lengths_behind(here, r->last);
        }
        if (open && !to_end) td_expr_add(r->b, cat, anything(r));
        if (open && !(from_start && to_end)) here.max = -1;
        td_expr_add(r->b, alt, cat);
        r->last = all = lengths_of_either(all, here);
        if (!is_next(r, '|')) return alt;
        r->at++;
    }
}

int32_t td_expr_regex(struct td_builder *b, const char *text, size_t n, enum td_regex_use use)
{
    struct td_lengths unused;
    return td_expr_regex_lengths(b, text, n, use, &unused);
}

int32_t td_expr_regex_lengths(struct td_builder *b, const char *text, size_t n,
                              enum td_regex_use use, struct td_lengths *ret_lengths)
{
    struct regex r = {.b = b, .text = text, .n = n, .use = use};
    *ret_lengths = r.last;
    if (memchr(text, 0, n)) return fail(&r, TD_ERR_INVALID, "it has a NUL byte: write \\0");
    int32_t e = alternatives(&r);
    if (r.at < r.n && !b->status) fail(&r, TD_ERR_INVALID, "a closing parenthesis without a group");
    *ret_lengths = r.last;
    return e;
}
