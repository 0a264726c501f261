/* tokenizer_regex.c - rewrites Oniguruma's dialect for PCRE2, and walks over all matches.
 *
 * Hugging Face compiles patterns with Oniguruma's own syntax over Unicode. PCRE2 reads most of it
 * alike under UTF|UCP. The differences that matter are rewritten, and a construct that is neither
 * known to be the same nor rewritten is refused by name:
 *   \s \S     PCRE2 counts U+180E as space, Unicode since 6.3 does not
 *             -> an explicit class
 *   \w \W \b  PCRE2's words have no marks and no connectors but "_"
 *             -> explicit classes, look-arounds
 *   \v        one character in Oniguruma, a class in PCRE2
 *             -> \x0B
 *   \p{Han}   a script, not PCRE2's script extensions; long names of general categories
 *             -> \p{sc:Han}, \p{L}
 *   (?m)      Oniguruma's name for "dot matches newline"; its ^ and $ always mean lines
 *             -> (?s), PCRE2_MULTILINE
 *   {,n}      -> {0,n}
 *   [a[bc]]   a nested set is a union
 *             -> [abc]
 *
 * After each match the search continues at its end; an empty match right there is skipped by one
 * character. That is the rule of the onig crate's find_iter; it matters only for patterns that can
 * match nothing. */
#include "common/text/tokenizer_regex.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATTERN_MAX_BYTES 16384
#define NEST_MAX 100
#define MATCH_STEPS_PER_BYTE 64 /* real patterns need 1 to 3 */
#define MATCH_STEPS_MIN 20000
#define JIT_STACK_MAX_BYTES (8u << 20)

#define SPACE_SET "\\x09-\\x0d\\x{85}\\p{Z}"
#define WORD_SET                                                                                   \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{"     \
    "1f169}\\x{1f170}-\\x{1f189}"
/* outside sets Oniguruma asks a Latin-1 table that has these */
#define LONE_WORD_SET WORD_SET "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}"
#define WORD "[" LONE_WORD_SET "]"

struct translation {
    const char *in;
    size_t n, at;
    struct td_tok_buf *out;
    const char *what;
    struct td_err *err;
};

static td_status refuse(const struct translation *t, const char *construct)
{
    return td_fail(t->err, TD_ERR_UNSUPPORTED,
                   "%s: regex construct %s at byte %zu is not supported", t->what, construct,
                   t->at);
}

static td_status put(struct translation *t, const char *text)
{
    return td_tok_buf_append(t->out, text, strlen(text));
}

static td_status copy(struct translation *t, size_t n)
{
    td_status s = td_tok_buf_append(t->out, t->in + t->at, n);
    t->at += n;
    return s;
}

static bool next_is(const struct translation *t, const char *text)
{
    size_t n = strlen(text);
    return t->n - t->at >= n && !memcmp(t->in + t->at, text, n);
}

/* Translates \p{Name}, \P{Name}, \p{^Name}; t->at is at the backslash. */
static td_status property(struct translation *t)
{
    static const char *const long_names[][2] = {
        {"letter", "L"},
        {"uppercaseletter", "Lu"},
        {"lowercaseletter", "Ll"},
        {"titlecaseletter", "Lt"},
        {"modifierletter", "Lm"},
        {"otherletter", "Lo"},
        {"mark", "M"},
        {"nonspacingmark", "Mn"},
        {"spacingmark", "Mc"},
        {"enclosingmark", "Me"},
        {"number", "N"},
        {"decimalnumber", "Nd"},
        {"letternumber", "Nl"},
        {"othernumber", "No"},
        {"punctuation", "P"},
        {"symbol", "S"},
        {"mathsymbol", "Sm"},
        {"currencysymbol", "Sc"},
        {"modifiersymbol", "Sk"},
        {"othersymbol", "So"},
        {"separator", "Z"},
        {"spaceseparator", "Zs"},
        {"other", "C"},
        {"control", "Cc"},
        {"format", "Cf"},
        {"any", "Any"},
        {"alphabetic", "Alphabetic"},
        {"uppercase", "Uppercase"},
        {"lowercase", "Lowercase"},
        {"whitespace", "White_Space"},
        {"emoji", "Emoji"},
    };
    bool negated = t->in[t->at + 1] == 'P';
    size_t i = t->at + 2;
    if (i >= t->n || t->in[i] != '{') return refuse(t, "\\p without {}");
    i++;
    if (i < t->n && t->in[i] == '^') negated = !negated, i++;
    char name[40], plain[40];
    size_t n = 0, n_plain = 0;
    for (; i < t->n && t->in[i] != '}'; i++) {
        if (n + 1 >= sizeof name || !(isalnum((unsigned char)t->in[i]) || t->in[i] == '_'))
            return refuse(t, "\\p{} of this form");
        name[n++] = t->in[i];
        if (t->in[i] != '_') plain[n_plain++] = (char)tolower((unsigned char)t->in[i]);
    }
    if (i == t->n || !n) return refuse(t, "\\p{ without end");
    name[n] = plain[n_plain] = '\0';
    const char *found = n <= 2 ? name : NULL;
    for (size_t k = 0; k < sizeof long_names / sizeof *long_names && !found; k++) {
        if (!strcmp(plain, long_names[k][0])) found = long_names[k][1];
    }
    t->at = i + 1;
    td_status s = put(t, negated ? "\\P{" : "\\p{");
    if (!s && !found) s = put(t, "sc:"); /* a script; PCRE2 refuses unknown names */
    if (!s) s = put(t, found ? found : name);
    return s ? s : put(t, "}");
}

/* \xHH, \x{H...}, \uHHHH */
static td_status code_point(struct translation *t)
{
    size_t i = t->at + 2, n = 0;
    bool braces = t->in[t->at + 1] == 'x' && i < t->n && t->in[i] == '{';
    size_t max = braces ? 6 : t->in[t->at + 1] == 'x' ? 2 : 4;
    char hex[8];
    for (i += braces; i < t->n && n < max && isxdigit((unsigned char)t->in[i]); i++)
        hex[n++] = t->in[i];
    hex[n] = '\0';
    if (braces ? i == t->n || t->in[i] != '}' || !n : n != max)
        return refuse(t, "\\x or \\u of this form");
    if (!braces && max == 2 && hex[0] > '7')
        return refuse(t, "\\xHH that is half a UTF-8 character");
    t->at = i + braces;
    td_status s = put(t, "\\x{");
    if (!s) s = put(t, hex);
    return s ? s : put(t, "}");
}

static td_status escape(struct translation *t, bool in_set)
{
    if (t->at + 1 >= t->n) return refuse(t, "\\ at the end");
    char c = t->in[t->at + 1];
    /* an escaped character is itself */
    if (!isalnum((unsigned char)c)) return copy(t, (uint8_t)c < 0x80 ? 2 : 1);
    const char *now = NULL;
    switch (c) {
    case 's':
        now = in_set ? SPACE_SET : "[" SPACE_SET "]";
        break;
    case 'S':
        now = in_set ? "\\S\\x{180e}" : "[^" SPACE_SET "]";
        break;
    case 'w':
        now = in_set ? WORD_SET : WORD;
        break;
    case 'W':
        now = in_set ? NULL : "[^" LONE_WORD_SET "]";
        break;
    case 'b':
        now = in_set ? "\\x08" : "(?:(?<=" WORD ")(?!" WORD ")|(?<!" WORD ")(?=" WORD "))";
        break;
    case 'B':
        now = in_set ? NULL : "(?:(?<=" WORD ")(?=" WORD ")|(?<!" WORD ")(?!" WORD "))";
        break;
    case 'v':
        now = "\\x0b";
        break;
    case 'd':
    case 'D':
    case 'r':
    case 'n':
    case 't':
    case 'f':
    case 'a':
    case 'e':
        return copy(t, 2);
    case 'A':
    case 'z':
    case 'Z':
        if (!in_set) return copy(t, 2);
        break;
    case 'p':
    case 'P':
        return property(t);
    case 'x':
    case 'u':
        return code_point(t);
    default:
        break;
    }
    if (!now) {
        char construct[16];
        snprintf(construct, sizeof construct, "\\%c%s", c, in_set ? " in a set" : "");
        return refuse(t, construct);
    }
    t->at += 2;
    return put(t, now);
}

static td_status set(struct translation *t)
{
    int depth = 1;
    td_status s = copy(t, 1);
    if (!s && next_is(t, "^")) s = copy(t, 1);
    if (!s && next_is(t, "]")) s = put(t, "\\"), s = s ? s : copy(t, 1);
    while (!s && t->at < t->n) {
        char c = t->in[t->at];
        if (c == ']') {
            if (--depth == 0) return copy(t, 1);
            t->at++;
        } else if (c == '[') {
            if (next_is(t, "[:")) return refuse(t, "[:posix:]");
            if (next_is(t, "[^")) return refuse(t, "[^] inside a set");
            if (++depth > NEST_MAX) return refuse(t, "[ nested this deep");
            t->at++;
        } else if (next_is(t, "&&")) {
            return refuse(t, "&& in a set");
        } else if (c == '\\') {
            s = escape(t, true);
        } else {
            s = copy(t, 1);
        }
    }
    return s ? s : refuse(t, "[ without ]");
}

/* Translates "(" and what may follow it; the main loop translates the group's own text. */
static td_status group(struct translation *t)
{
    static const char *const same[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        if (next_is(t, same[i])) return copy(t, strlen(same[i]));
    }
    if (next_is(t, "(*")) return refuse(t, "(*");
    if (!next_is(t, "(?")) return copy(t, 1);
    size_t i = t->at + 2;
    td_status s = put(t, "(?");
    for (; i < t->n && !s; i++) {
        if (t->in[i] == ')' && t->at != 0)
            return refuse(t, "(?i) in the middle (its reach differs)");
        if (t->in[i] == ':' || t->in[i] == ')') {
            t->at = i;
            return copy(t, 1);
        }
        if (!strchr("im-", t->in[i])) return refuse(t, "(? of this form");
        s = put(t, t->in[i] == 'm' ? "s" : t->in[i] == 'i' ? "i" : "-");
    }
    return s ? s : refuse(t, "(? without end");
}

/* {n}, {n,}, {,n}, {n,m}: true with the length of the interval; else the brace is a character. */
static bool interval(const struct translation *t, size_t *ret_n, bool *ret_no_low)
{
    size_t i = t->at + 1, n_low = 0, n_high = 0;
    for (; i < t->n && isdigit((unsigned char)t->in[i]); i++) n_low++;
    bool comma = i < t->n && t->in[i] == ',';
    for (i += comma; comma && i < t->n && isdigit((unsigned char)t->in[i]); i++) n_high++;
    if (i == t->n || t->in[i] != '}' || !(n_low || n_high)) return false;
    *ret_n = i + 1 - t->at;
    *ret_no_low = !n_low;
    return true;
}

td_status td_tok_regex_translate(const char *onig, size_t n, struct td_tok_buf *out,
                                 const char *what, struct td_err *err)
{
    struct translation t = {.in = onig, .n = n, .out = out, .what = what, .err = err};
    td_status s = TD_OK;
    while (t.at < n && !s) {
        size_t n_interval;
        bool no_low;
        char c = onig[t.at];
        if (c == '\\') {
            s = escape(&t, false);
        } else if (c == '[') {
            s = set(&t);
        } else if (c == '(') {
            s = group(&t);
        } else if (c == '{' && interval(&t, &n_interval, &no_low)) {
            if (no_low) {
                s = put(&t, "{0");
                t.at++, n_interval--;
            }
            if (!s) s = copy(&t, n_interval);
            if (!s && next_is(&t, "+"))
                return refuse(&t, "{}+ (possessive in PCRE2, a repeat in Oniguruma)");
        } else {
            s = c == '{' || c == '}' ? put(&t, "\\") : TD_OK;
            if (!s) s = copy(&t, 1);
        }
    }
    return s;
}

/* In each of these a run of letters takes one character before it, there is no look-behind, and
 * what looks ahead is a run of white space, for its own end. */
static bool parts_at_spaces(const char *onig, size_t n)
{
#define LIKE_GPT4(digits)                                                                          \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits                           \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    static const char *const known[] = {TD_TOK_REGEX_GPT2, LIKE_GPT4("\\p{N}{1,3}"),
                                        LIKE_GPT4("\\p{N}")}; /* Llama 3; Qwen 2 */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strlen(known[i]) == n && !memcmp(known[i], onig, n)) return true;
    return false;
}

td_status td_tok_pattern_regex(const char *onig, size_t n, const char *what,
                               struct td_tok_pattern *ret_pattern, struct td_err *err)
{
    if (n > PATTERN_MAX_BYTES)
        return td_fail(err, TD_ERR_LIMIT, "%s: regex has %zu bytes, at most %d", what, n,
                       PATTERN_MAX_BYTES);
    struct td_tok_buf pcre = {0};
    td_status s = td_tok_regex_translate(onig, n, &pcre, what, err);
    if (s) {
        td_tok_buf_free(&pcre);
        return s == TD_ERR_NOMEM ? td_fail(err, s, "%s: no memory", what) : s;
    }
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context) {
        pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        pcre2_set_parens_nest_limit(context, NEST_MAX);
    }
    pcre2_code *compiled = pcre2_compile(
        (PCRE2_SPTR)(pcre.n ? pcre.bytes : ""), pcre.n,
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at, context);
    pcre2_compile_context_free(context);
    if (!compiled) {
        char message[160] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
        s = td_fail(err, TD_ERR_INVALID, "%s: invalid regex: %s (at byte %zu of \"%.*s\")", what,
                    message, at, (int)(pcre.n > 200 ? 200 : pcre.n), pcre.n ? pcre.bytes : "");
    } else {
        /* without JIT code pcre2_match interprets: slower, the same answers */
        pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
        *ret_pattern =
            (struct td_tok_pattern){.code = compiled, .parts_at_spaces = parts_at_spaces(onig, n)};
    }
    td_tok_buf_free(&pcre);
    return s;
}

td_status td_tok_pattern_literal(const char *text, size_t n, const char *what,
                                 struct td_tok_pattern *ret_pattern, struct td_err *err)
{
    if (!n) return td_fail(err, TD_ERR_INVALID, "%s: the pattern string is empty", what);
    if (n > PATTERN_MAX_BYTES)
        return td_fail(err, TD_ERR_LIMIT, "%s: the pattern string has %zu bytes, at most %d", what,
                       n, PATTERN_MAX_BYTES);
    char *literal = malloc(n);
    if (!literal) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    memcpy(literal, text, n);
    *ret_pattern = (struct td_tok_pattern){.literal = literal, .n_literal = n};
    return TD_OK;
}

void td_tok_pattern_free(struct td_tok_pattern *p)
{
    pcre2_code_free(p->code);
    free(p->literal);
    *p = (struct td_tok_pattern){0};
}

void td_tok_matcher_free(struct td_tok_matcher *m)
{
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    *m = (struct td_tok_matcher){0};
}

td_status td_tok_ranges_add(struct td_tok_ranges *ranges, size_t start, size_t end, bool is_match)
{
    if (ranges->n == ranges->capacity) {
        size_t capacity = ranges->capacity ? ranges->capacity * 2 : 64;
        td_status s;
        struct td_tok_range *grown =
            td_tok_grow(ranges->budget, ranges->v, ranges->capacity * sizeof *grown,
                        capacity * sizeof *grown, &s);
        if (!grown) return s;
        ranges->v = grown;
        ranges->capacity = capacity;
    }
    ranges->v[ranges->n++] = (struct td_tok_range){(uint32_t)start, (uint32_t)end, is_match};
    return TD_OK;
}

void td_tok_ranges_free(struct td_tok_ranges *ranges)
{
    td_tok_release(ranges->budget, ranges->v, ranges->capacity * sizeof *ranges->v);
    *ranges = (struct td_tok_ranges){0};
}

/* The next match at or after `from`: TD_OK, or TD_ERR_NOT_FOUND, TD_ERR_LIMIT, TD_ERR_NOMEM. */
static td_status find(const struct td_tok_pattern *p, struct td_tok_matcher *m, const char *text,
                      size_t n, size_t from, size_t *ret_start, size_t *ret_end)
{
    if (p->literal) {
        const char *hit = memmem(text + from, n - from, p->literal, p->n_literal);
        if (!hit) return TD_ERR_NOT_FOUND;
        *ret_start = (size_t)(hit - text);
        *ret_end = *ret_start + p->n_literal;
        return TD_OK;
    }
    /* one pair, because only the whole match is needed */
    if (!m->data) m->data = pcre2_match_data_create(1, NULL);
    if (!m->context) m->context = pcre2_match_context_create(NULL);
    if (!m->data || !m->context) return TD_ERR_NOMEM;
    size_t steps = MATCH_STEPS_MIN + MATCH_STEPS_PER_BYTE * (n - from);
    pcre2_set_match_limit(m->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    int rc;
    for (;;) {
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, m->data,
                         m->context);
        if (rc != PCRE2_ERROR_JIT_STACKLIMIT || m->stack) break;
        m->stack = pcre2_jit_stack_create(64u << 10, JIT_STACK_MAX_BYTES, NULL);
        if (!m->stack) return TD_ERR_NOMEM;
        pcre2_jit_stack_assign(m->context, NULL, m->stack);
    }
    if (rc == PCRE2_ERROR_NOMATCH) return TD_ERR_NOT_FOUND;
    if (rc == PCRE2_ERROR_NOMEMORY) return TD_ERR_NOMEM;
    if (rc < 0) return TD_ERR_LIMIT; /* match, depth, heap or JIT stack limit */
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(m->data);
    *ret_start = range[0];
    *ret_end = range[1];
    return TD_OK;
}

td_status td_tok_pattern_ranges(const struct td_tok_pattern *p, struct td_tok_matcher *m,
                                const char *text, size_t n, struct td_tok_ranges *ranges)
{
    if (!n) return td_tok_ranges_add(ranges, 0, 0, false);
    size_t done = 0, from = 0, last_end = SIZE_MAX;
    td_status s = TD_OK;
    while (from <= n && !s) {
        size_t start, end;
        s = find(p, m, text, n, from, &start, &end);
        if (s == TD_ERR_NOT_FOUND) {
            s = TD_OK;
            break;
        }
        if (s) return s;
        if (end <= start && end == last_end) {
            uint32_t cp;
            from += from < n ? (size_t)td_utf8_next(text + from, n - from, &cp) : 1;
            continue;
        }
        /* a guard against results as of \K; such constructs were refused */
        if (start < done || end < start) return TD_ERR_LIMIT;
        from = last_end = end;
        if (done != start) s = td_tok_ranges_add(ranges, done, start, false);
        if (!s) s = td_tok_ranges_add(ranges, start, end, true);
        done = end;
    }
    if (!s && done != n) s = td_tok_ranges_add(ranges, done, n, false);
    return s;
}
