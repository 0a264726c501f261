/* grammar_test.c - structured output: regular expressions against PCRE2, masks against a test of
 * every token byte by byte, what is refused and how it is said. JSON schemas: grammar_keywords.py
 * and grammar_schema.py. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/base/random.h"
#include "common/text/grammar.h"

static uint64_t rng = 1;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng, n); }

/* At out[at]; every buffer has room for all that is put there. Returns where it ends. */
static uint32_t append(char *out, uint32_t at, const char *text)
{
    size_t n = strlen(text);
    memcpy(out + at, text, n + 1);
    return at + (uint32_t)n;
}

static int n_rounds(int n) { return getenv("TANDEM_TEST_SHORT") ? n / 10 : n; }

static td_status compile(enum td_grammar_kind kind, const char *text, struct td_grammar **g,
                         struct td_err *err)
{
    struct td_grammar_text t = {text, strlen(text)};
    return td_grammar_compile(kind, &t, kind == TD_GRAMMAR_JSON_OBJECT ? 0 : 1, g, err);
}

static struct td_matcher *matcher(const struct td_grammar *g, const struct td_token_trie *trie)
{
    struct td_matcher *m;
    struct td_err err = {0};
    int32_t eos = 0;
    if (td_matcher_create(g, trie, &eos, trie ? 1 : 0, &m, &err)) fail_msg("%s", err.msg);
    return m;
}

/* The whole text? begins: is it the beginning of one? */
static bool matches(struct td_matcher *m, const char *text, size_t n, bool *ret_begins)
{
    int32_t state;
    assert_int_equal(td_matcher_advance(m, td_matcher_start(m), text, n, &state), TD_OK);
    *ret_begins = state != TD_MATCHER_DEAD;
    return td_matcher_accepts(m, state);
}

static void check(enum td_grammar_kind kind, const char *text, const char *const *yes,
                  const char *const *no)
{
    struct td_grammar *g;
    struct td_err err = {0};
    bool begins;
    if (compile(kind, text, &g, &err)) fail_msg("%s: %s", text, err.msg);
    struct td_matcher *m = matcher(g, NULL);
    for (; *yes; yes++)
        if (!matches(m, *yes, strlen(*yes), &begins)) fail_msg("%s refuses %s", text, *yes);
    for (; *no; no++)
        if (matches(m, *no, strlen(*no), &begins)) fail_msg("%s takes %s", text, *no);
    td_matcher_free(m);
    td_grammar_free(g);
}
#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static void tables(void **state)
{
    (void)state;
    check(TD_GRAMMAR_REGEX, "^a{2,3}(b|cd)?$", LIST("aa", "aaab", "aacd"),
          LIST("a", "aaaa", "aac"));
    check(TD_GRAMMAR_REGEX, "[^a-y]é.\\u00e9", LIST("zéxé", "éé\xF0\x9F\x98\x80é"),
          LIST("aéxé", "zé\né", "zé\xF0\x9Fé"));
    check(TD_GRAMMAR_REGEX, "^yes$|^no$", LIST("yes", "no"), LIST("", "yesno"));
    check(TD_GRAMMAR_EBNF,
          "root ::= item (\",\" item)* # list\nitem ::= [a-c]+ | \"(\" root\n \")\"\n"
          "other ::= \"x\"",
          LIST("a", "ab,(c,(a))"), LIST("", "a,", "(a", "x"));
    check(TD_GRAMMAR_JSON_OBJECT, "",
          LIST("{}", "{\"a\": [1, -2.5e3, {\"b\":null}], \"\\u00e9\":\"\"}"),
          LIST("[]", "{\"a\":01}", "{\"a\":\"\\ud800\"}", "{\"a\":\"\t\"}", "{,}"));
    check(TD_GRAMMAR_JSON_SCHEMA, "{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":205}",
          LIST("-12", "-9", "0", "7", "99", "100", "204"), LIST("-13", "205", "-0", "007", "1000"));
    check(TD_GRAMMAR_JSON_SCHEMA,
          "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"enum\":[\"x\",null]}},"
          "\"required\":[\"b\"],\"additionalProperties\":{\"type\":\"boolean\"}}",
          LIST("{\"b\":\"x\"}", "{\"a\":1,\"b\":null}", "{\"b\":null,\"ab\":true,\"c\":false}"),
          LIST("{}", "{\"b\":null,\"a\":1}", "{\"b\":null,\"a\":true}", "{\"b\":1}"));
    check(TD_GRAMMAR_JSON_SCHEMA,
          "{\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"next\":{\"anyOf\":["
          "{\"$ref\":\"#/$defs/n\"},{\"type\":\"null\"}]}},\"required\":[\"next\"]}},"
          "\"$ref\":\"#/$defs/n\"}",
          LIST("{\"next\":null}", "{\"next\":{\"next\":{\"next\":null}}}"), LIST("{}", "null"));
    check(TD_GRAMMAR_JSON_SCHEMA,
          "{\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"null\"}],\"items\":{\"type\":"
          "\"boolean\"},\"minItems\":1,\"maxItems\":4}",
          LIST("[1]", "[1,null]", "[1,null,true,false]"),
          LIST("[]", "[null]", "[1,true]", "[1,null,true,true,true]"));
    check(TD_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"pattern\":\"^a\\\"b\"}",
          LIST("\"a\\\"b\"", "\"a\\\"bxyz\""), LIST("\"xa\\\"b\"", "\"a\"b\"", "\"ab\""));
}

/* What is white space, and what ends a line, is read differently by ECMAScript, which JSON schemas
 * name, and by Python: what a pattern excludes, it excludes for all readers. */
static void white_space_of_patterns(void **state)
{
    (void)state;
#define SCHEMA(pattern) "{\"type\":\"string\",\"pattern\":\"" pattern "\"}"
    static const char *const space[] = {
        "\\t",    "\\n",    "\\f",    "\\r",    " ",      "\xC2\x85", "\u00a0", "\u1680", "\u2000",
        "\u2005", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f",   "\u3000", "\ufeff", NULL};
    enum { N_SPACES = sizeof space / sizeof *space };
    char quoted[N_SPACES][16];
    const char *spaces[N_SPACES] = {NULL};
    for (int i = 0; space[i]; i++) {
        snprintf(quoted[i], sizeof quoted[i], "\"%s\"", space[i]);
        spaces[i] = quoted[i];
    }
    const char *const *others =
        LIST("\"a\"", "\"\u00e9\"", "\"\u200b\"", "\"\u180e\"", "\"\U0001f600\"");
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^\\\\S$"), others, spaces);
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[\\\\S]$"), others, spaces);
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[^\\\\s]$"), others, spaces);
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[^\\\\s,]$"), others, spaces);
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[\\\\s\\\\S]$"), others, LIST("\"\""));
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[\\\\s\\\\S]$"), spaces, LIST("\"\""));
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^\\\\s$"), LIST("\"\\t\"", "\" \""),
          LIST("\"\u00a0\"", "\"\xC2\x85\"", "\"a\""));
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^[^\\\\S]$"), LIST("\"\\t\"", "\" \""),
          LIST("\"\u00a0\"", "\"\xC2\x85\"", "\"a\""));
    check(TD_GRAMMAR_JSON_SCHEMA, SCHEMA("^.$"),
          LIST("\"a\"", "\" \"", "\"\u00a0\"", "\"\xC2\x85\""),
          LIST("\"\\n\"", "\"\\r\"", "\"\u2028\"", "\"\u2029\""));
    /* the whole output is read as PCRE does */
    check(TD_GRAMMAR_REGEX, "\\S.", LIST("ab", "\u00a0\r", "\u3000\u2028"), LIST(" a", "a\n"));
#undef SCHEMA
}

static void choices(void **state)
{
    (void)state;
    struct td_grammar_text t[] = {{"red", 3}, {"redder", 6}, {"blue", 4}, {"red", 3}};
    struct td_grammar *g;
    struct td_err err = {0};
    bool begins;
    assert_int_equal(td_grammar_compile(TD_GRAMMAR_CHOICE, t, 4, &g, &err), TD_OK);
    struct td_matcher *m = matcher(g, NULL);
    assert_true(matches(m, "red", 3, &begins));
    assert_true(matches(m, "redder", 6, &begins));
    assert_false(matches(m, "redd", 4, &begins));
    assert_true(begins);
    assert_false(matches(m, "redred", 6, &begins));
    assert_false(begins);
    td_matcher_free(m);
    td_grammar_free(g);
}

static void refusals(void **state)
{
    (void)state;
    static const struct {
        enum td_grammar_kind kind;
        const char *text, *words;
    } rows[] = {
        {TD_GRAMMAR_REGEX, "a(?=b)", "(?:"},
        {TD_GRAMMAR_REGEX, "(a)\\1", "back-references"},
        {TD_GRAMMAR_REGEX, "\\bword", "\\b"},
        {TD_GRAMMAR_REGEX, "a{5000}", "limit 4096"},
        {TD_GRAMMAR_REGEX, "((((a{99}){99}){99}){99}){99}", "the limit"},
        {TD_GRAMMAR_REGEX, "((((){4000}){4000}){4000}){4000}b", NULL}, /* only quick */
        {TD_GRAMMAR_REGEX, "(a", "parenthesis"},
        {TD_GRAMMAR_REGEX, "[^\\x00-\\u{10FFFF}]", "empty"},
        {TD_GRAMMAR_REGEX, "a^b", "^ and $"},
        {TD_GRAMMAR_EBNF, "root ::= root \"a\" | \"b\"", "left recursion"},
        {TD_GRAMMAR_EBNF, "root ::= a\na ::= \"x\"? b\nb ::= a \"y\" | \"z\"", "left recursion"},
        {TD_GRAMMAR_EBNF, "root ::= \"a\" root", "never end"},
        {TD_GRAMMAR_EBNF, "root ::= other", "other"},
        {TD_GRAMMAR_EBNF, "a ::= \"b\"", "root"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"not\":{\"pattern\":\"a\"}}", "keyword not"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"multipleOf\":123456789}", "multipleOf"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\",\"minItems\":9999}", "minItems is 9999"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"#\"}", "never end"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"http://x/y\"}", "http://x/y"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"$ref\":\"#/$defs/q\"}", "#/$defs/q"},
        {TD_GRAMMAR_JSON_SCHEMA,
         "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},"
         "\"required\":[\"a\"]}",
         "never end"},
        {TD_GRAMMAR_JSON_SCHEMA,
         "{\"allOf\":[{\"properties\":{\"a\":{}},\"additionalProperties\":"
         "false},{\"properties\":{\"b\":{}}}]}",
         "additionalProperties"},
        {TD_GRAMMAR_JSON_SCHEMA,
         "{\"$defs\":{\"a\":{\"type\":\"object\",\"anyOf\":[{\"$ref\":"
         "\"#/$defs/a\"},{\"$ref\":\"#/$defs/a\"}]}},\"$ref\":\"#/$defs/a\"}",
         "limit"},
        {TD_GRAMMAR_JSON_SCHEMA, "{\"type\":", "not JSON"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct td_grammar *g = NULL;
        struct td_err err = {0};
        td_status s = compile(rows[i].kind, rows[i].text, &g, &err);
        if (rows[i].words && (!s || !strstr(err.msg, rows[i].words)))
            fail_msg("%s: %d \"%s\" has no \"%s\"", rows[i].text, s, err.msg, rows[i].words);
        td_grammar_free(g);
    }
}

/* ---- schemas that multiply ------------------------------------------------------------------- */

struct text {
    char bytes[TD_GRAMMAR_MAX_TEXT_BYTES];
    size_t n;
};

__attribute__((format(printf, 2, 3))) static void put(struct text *t, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    t->n += (size_t)vsnprintf(t->bytes + t->n, sizeof t->bytes - t->n, fmt, args);
    va_end(args);
    assert_true(t->n < sizeof t->bytes);
}

/* "NAME":{"allOf":[n references, to `odd` and `even` by turns]}, */
static void put_list(struct text *t, const char *name, int n, const char *odd, const char *even)
{
    put(t, "\"%s\":{\"allOf\":[", name);
    for (int i = 0; i < n; i++) put(t, "%s{\"$ref\":\"#/%s\"}", i ? "," : "", i % 2 ? odd : even);
    put(t, "]},");
}

static void check_limit(const struct text *t)
{
    struct td_grammar *g = NULL;
    struct td_err err = {0};
    td_status s = compile(TD_GRAMMAR_JSON_SCHEMA, t->bytes, &g, &err);
    if (s != TD_ERR_LIMIT || !strstr(err.msg, "steps, the limit")) fail_msg("%d %s", s, err.msg);
    td_grammar_free(g);
}

/* Short schemas that would have a thread work for hours, memory go, or the stack end. */
static void work_is_bounded(void **state)
{
    (void)state;
    static struct text t;
    char a[8], b[8], c[8], d[8];
    /* Each list is twice as long as the one before. */
    put(&t, "{");
    for (int i = 0; i < 50; i++) {
        snprintf(a, sizeof a, "a%d", i), snprintf(b, sizeof b, "b%d", i);
        snprintf(c, sizeof c, "a%d", i + 1), snprintf(d, sizeof d, "b%d", i + 1);
        put_list(&t, a, 2, c, d);
        put_list(&t, b, 2, d, c);
    }
    put(&t, "\"a50\":{},\"b50\":{},\"$ref\":\"#/a0\"}");
    check_limit(&t);

    /* A million schemas of one property, which hold together one by one. */
    t.n = 0;
    put(&t, "{\"s\":{\"properties\":{\"x\":{\"type\":\"string\"}}},"
            "\"t\":{\"properties\":{\"x\":{\"minLength\":1}}},");
    put_list(&t, "l", 1000, "s", "t");
    put_list(&t, "m", 999, "s", "t");
    put_list(&t, "n", 1000, "l", "m");
    put(&t, "\"$ref\":\"#/n\"}");
    check_limit(&t);
    /* As many as a schema has in earnest are merged. */
    t.n = 0;
    put(&t, "{\"s\":{\"properties\":{\"x\":{\"type\":\"string\"}}},"
            "\"t\":{\"properties\":{\"x\":{\"minLength\":1}}},");
    put_list(&t, "l", 500, "s", "t");
    put(&t, "\"$ref\":\"#/l\"}");
    check(TD_GRAMMAR_JSON_SCHEMA, t.bytes, LIST("{\"x\":\"a\"}", "{}"),
          LIST("{\"x\":\"\"}", "{\"x\":1}"));

    /* Names that a reference writes with escapes, read once for each schema that leads there. */
    t.n = 0;
    put(&t, "{\"long\":{\"$ref\":\"#/");
    for (int i = 0; i < 40 * 1000; i++) put(&t, "%s%%61", i && i % 1000 == 0 ? "/" : "");
    put(&t, "\"},");
    for (int i = 0; i < 40 * 1000; i++) put(&t, "%sa", i % 1000 ? "" : i ? "\":{\"" : "\"");
    put(&t, "\":{\"type\":\"string\"}%.*s,\"anyOf\":[", 39,
        "}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}}");
    for (int i = 0; i < 2000; i++)
        put(&t, "%s{\"$ref\":\"#/long\",\"minLength\":%d}", i ? "," : "", i % 2);
    put(&t, "]}");
    check_limit(&t);

    /* One list of names, looked at for each alternative. */
    t.n = 0;
    put(&t, "{\"properties\":{");
    for (int i = 0; i < 250; i++) put(&t, "\"p%d\":false,", i);
    put(&t, "\"z\":{}},\"required\":[\"z\"");
    for (int i = 0; i < 50 * 1000; i++) put(&t, ",\"z\"");
    put(&t, "],\"anyOf\":[{}");
    for (int i = 0; i < 1500; i++) put(&t, ",{\"minProperties\":1}");
    put(&t, "]}");
    check_limit(&t);
}

/* The values of a `not`, read again in each alternative. */
static void conditions_are_bounded(void **state)
{
    (void)state;
    static struct text t;
    put(&t, "{\"$defs\":{\"n\":{\"enum\":[0");
    for (int i = 0; i < 50 * 1000; i++) put(&t, ",0");
    put(&t, "]}},\"type\":\"string\",\"anyOf\":[{}");
    for (int i = 0; i < 4000; i++) put(&t, ",{\"not\":{\"$ref\":\"#/$defs/n\"}}");
    put(&t, "]}");
    check_limit(&t);
}

/* ---- against PCRE2 --------------------------------------------------------------------------- */

static void random_regex(char *out, size_t room, int depth)
{
    static const char *const atoms[] = {"a",   "b",      "c", ".",   "[ab]", "[^a]",
                                        "\\d", "[a-c1]", "é", "\\w", "\\S",  "[^é\\d]"};
    static const char *const quantifiers[] = {"*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"};
    size_t n = 0;
    out[0] = 0;
    for (uint32_t k = 1 + rnd(3); k-- > 0 && n + 40 < room;) {
        if (depth > 0 && rnd(3) == 0) {
            char inner[200];
            random_regex(inner, sizeof inner, depth - 1);
            n += (size_t)snprintf(out + n, room - n, "(%s)", inner);
        } else {
            n += (size_t)snprintf(out + n, room - n, "%s", atoms[rnd(12)]);
        }
        if (n + 20 < room && rnd(3) == 0)
            n += (size_t)snprintf(out + n, room - n, "%s", quantifiers[rnd(7)]);
        if (n + 20 < room && rnd(5) == 0) n += (size_t)snprintf(out + n, room - n, "|");
    }
}

static void against_pcre2(void **state)
{
    (void)state;
    static const char *const parts[] = {
        "a", "b", "c", "1", "é", "_", " ", "\n", "\xF0\x9F\x98\x80"};
    int n_match = 0, n_no = 0;
    for (int round = 0; round < n_rounds(3000); round++) {
        char regex[600], whole[640];
        struct td_grammar *g;
        struct td_err err = {0};
        int code;
        size_t at;
        random_regex(regex, sizeof regex, 3);
        snprintf(whole, sizeof whole, "\\A(?:%s)\\z", regex);
        pcre2_code *re =
            pcre2_compile((PCRE2_SPTR)whole, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &at, NULL);
        if (!re) fail_msg("pcre2: %s", regex);
        if (compile(TD_GRAMMAR_REGEX, regex, &g, &err)) fail_msg("%s: %s", regex, err.msg);
        struct td_matcher *m = matcher(g, NULL);
        pcre2_match_data *md = pcre2_match_data_create_from_pattern(re, NULL);
        for (int k = 0; k < 40; k++) {
            char text[64] = "";
            for (uint32_t i = rnd(8), n = 0; i-- > 0;) n = append(text, n, parts[rnd(9)]);
            bool begins, mine = matches(m, text, strlen(text), &begins);
            int rc = pcre2_match(re, (PCRE2_SPTR)text, strlen(text), 0, 0, md, NULL);
            if (rc == PCRE2_ERROR_MATCHLIMIT) continue; /* it backtracks, we do not */
            if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
                fail_msg("%s on %s: pcre2 %d", regex, text, rc);
            if (mine != (rc >= 0)) fail_msg("%s on \"%s\": we say %d", regex, text, mine);
            n_match += mine, n_no += !mine;
        }
        pcre2_match_data_free(md);
        pcre2_code_free(re);
        td_matcher_free(m);
        td_grammar_free(g);
    }
    assert_true(n_match > 300 && n_no > 300);
}

/* ---- masks ----------------------------------------------------------------------------------- */

#define VOCAB 500
static const char *const pieces[] = {"a",    "b", "\"", "{", "}",  "[",  "]", ":",
                                     ",",    " ", "1",  "0", "-",  "\\", "n", "true",
                                     "null", "(", ")",  "é", "\n", ".",  "e"};
#define N_PIECES (sizeof pieces / sizeof *pieces)

static struct td_token_trie *random_vocab(void)
{
    static char texts[VOCAB][64];
    static struct td_grammar_text t[VOCAB];
    struct td_token_trie *trie;
    for (int i = 0; i < VOCAB; i++) {
        for (uint32_t k = 1 + rnd(5), n = 0; k-- > 0;)
            n = append(texts[i], n, pieces[rnd(N_PIECES)]);
        if (i < (int)N_PIECES) append(texts[i], 0, pieces[i]);
        t[i] = (struct td_grammar_text){texts[i], rnd(50) ? strlen(texts[i]) : 0};
        if (rnd(40) == 0 && t[i].n_bytes) t[i].n_bytes = 1; /* half a character */
    }
    t[0].n_bytes = 0; /* the end of the sequence */
    struct td_err err = {0};
    assert_int_equal(td_token_trie_build(t, VOCAB, &trie, &err), TD_OK);
    return trie;
}

/* Every token byte by byte, in a matcher of its own that knows no masks. */
static td_status check_mask(struct td_matcher *m, struct td_matcher *plain,
                            const struct td_token_trie *trie, int32_t state, const char *text,
                            size_t n)
{
    static const uint64_t none[(VOCAB + 63) / 64];
    const uint64_t *mask;
    int32_t at, to;
    td_status s = td_matcher_mask(m, state, &mask);
    if (s == TD_ERR_LIMIT) return s;
    if (s == TD_ERR_NOT_FOUND) mask = none; /* then every token must be refused below */
    assert_true(s == TD_OK || s == TD_ERR_NOT_FOUND);
    bool has_tokens = s == TD_OK;
    assert_int_equal(td_matcher_advance(plain, td_matcher_start(plain), text, n, &at), TD_OK);
    for (int32_t i = 0; i < VOCAB; i++) {
        size_t n_bytes = 0;
        const char *bytes = td_token_trie_bytes(trie, i, &n_bytes);
        bool want = i == 0 && td_matcher_accepts(plain, at);
        if (bytes) {
            s = td_matcher_advance(plain, at, bytes, n_bytes, &to);
            assert_true(s == TD_OK ||
                        s == TD_ERR_LIMIT); /* too many readings: of no concern here */
            if (s) continue;
            want = to != TD_MATCHER_DEAD;
        }
        if (want != (mask[i / 64] >> i % 64 & 1))
            fail_msg("token %d \"%.*s\" after \"%.*s\": must be %d", i, (int)n_bytes, bytes, (int)n,
                     text, want);
    }
    return has_tokens ? TD_OK : TD_ERR_NOT_FOUND;
}

static void random_ebnf(char *out, size_t room)
{
    static const char *const leaves[] = {"\"a\"",    "[a-b]",    "\"{\"", "\"}\"",   "\"1\"",
                                         "[^\\\"a]", "\"true\"", "\",\"", "\"\\\"\""};
    size_t n = 0;
    for (int rule = 0; rule < 4; rule++) {
        n += (size_t)snprintf(out + n, room - n,
                              "%s ::= ", (const char *const[]){"root", "x", "y", "z"}[rule]);
        for (uint32_t alt = 1 + rnd(3); alt-- > 0;) {
            /* a byte first: no left recursion; the last alternative ends */
            n += (size_t)snprintf(out + n, room - n, "%s", leaves[rnd(9)]);
            for (uint32_t k = rnd(4); k-- > 0;) {
                bool call = alt > 0 && rnd(2);
                n += (size_t)snprintf(out + n, room - n, " %s%s",
                                      call ? (const char *const[]){"root", "x", "y", "z"}[rnd(4)]
                                           : leaves[rnd(9)],
                                      (const char *const[]){"", "", "?", "*", "{1,2}"}[rnd(5)]);
            }
            n += (size_t)snprintf(out + n, room - n, "%s", alt ? " | " : "\n");
        }
    }
}

static void masks(void **state)
{
    (void)state;
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}"
        ","
        "\"b\":{\"type\":[\"integer\",\"null\"]},\"ab\":{\"type\":\"string\",\"maxLength\":3}}}";
    int n_compared = 0, n_ended = 0, n_limits = 0;
    for (int round = 0; round < n_rounds(400); round++) {
        struct td_token_trie *trie = random_vocab();
        struct td_grammar *g;
        struct td_err err = {0};
        char text[2048];
        enum td_grammar_kind kind = TD_GRAMMAR_EBNF;
        random_ebnf(text, sizeof text);
        if (round % 4 == 1) kind = TD_GRAMMAR_JSON_OBJECT;
        if (round % 4 == 2) kind = TD_GRAMMAR_JSON_SCHEMA, memcpy(text, schema, sizeof schema);
        if (round % 4 == 3) kind = TD_GRAMMAR_REGEX, random_regex(text, 600, 3);
        if (compile(kind, text, &g, &err)) fail_msg("%s: %s", text, err.msg);
        struct td_matcher *m = matcher(g, trie), *plain = matcher(g, NULL);
        int32_t at = td_matcher_start(m);
        char so_far[2048];
        size_t n = 0;
        for (int k = 0; k < 12; k++) {
            const uint64_t *mask;
            td_status s = check_mask(m, plain, trie, at, so_far, n);
            n_limits += s == TD_ERR_LIMIT;
            n_ended += s == TD_ERR_NOT_FOUND;
            if (s) break;
            n_compared++;
            td_matcher_mask(m, at, &mask);
            int32_t token = (int32_t)rnd(VOCAB), tries = 0;
            while (tries++ < VOCAB && !(mask[token / 64] >> token % 64 & 1))
                token = (token + 1) % VOCAB;
            if (tries > VOCAB || token == 0) {
                n_ended++;
                break;
            }
            size_t n_bytes;
            const char *bytes = td_token_trie_bytes(trie, token, &n_bytes);
            memcpy(so_far + n, bytes, n_bytes);
            n += n_bytes;
            if (td_matcher_advance(m, at, bytes, n_bytes, &at)) {
                n_limits++;
                break;
            }
            assert_int_not_equal(at, TD_MATCHER_DEAD);
        }
        td_matcher_free(m);
        td_matcher_free(plain);
        td_grammar_free(g);
        td_token_trie_free(trie);
    }
    print_message("%d masks, %d outputs ended, %d grammars too ambiguous\n", n_compared, n_ended,
                  n_limits);
    assert_true(n_compared > n_rounds(400) * 2 && n_ended > 0 && n_limits < n_rounds(400) / 10 + 2);
}

/* A grammar that makes a new set of readings at every byte, with many in each: refused or
 * answered, in bounded time and memory. */
static void hostile(void **state)
{
    (void)state;
    struct td_grammar *g;
    struct td_err err = {0};
    struct td_token_trie *trie = random_vocab();
    assert_int_equal(compile(TD_GRAMMAR_REGEX, "(.|\\n)*a(.|\\n){1000}", &g, &err), TD_OK);
    struct td_matcher *m = matcher(g, trie);
    int32_t at = td_matcher_start(m);
    td_status s = TD_OK;
    for (int i = 0; i < 3000 && !s; i++) {
        const uint64_t *mask;
        s = td_matcher_advance(m, at, rnd(2) ? "a" : "b", 1, &at);
        if (!s) s = td_matcher_mask(m, at, &mask);
        if (i % 16 == 0) {
            uint32_t generation = td_matcher_generation(m);
            td_matcher_trim(m);
            if (td_matcher_generation(m) != generation) break;
        }
    }
    assert_true(s == TD_OK || s == TD_ERR_LIMIT);
    td_matcher_free(m);
    td_grammar_free(g);
    td_token_trie_free(trie);
}

/* Many tokens are no reason to refuse: any character may come, after any beginning. */
static void large_vocabulary(void **state)
{
    (void)state;
    enum { LARGE = 150000 };
    static char texts[LARGE][8];
    static struct td_grammar_text t[LARGE];
    static const char *const regexes[] = {"(.|\\n)*", "[^a]*", "x(.|\\n)*y(.|\\n)*"};
    struct td_token_trie *trie;
    struct td_err err = {0};
    for (int i = 1; i < LARGE; i++) {
        uint32_t n = 2 + rnd(5);
        for (uint32_t k = 0; k < n; k++) texts[i][k] = (char)(' ' + rnd(90));
        t[i] = (struct td_grammar_text){texts[i], n};
    }
    assert_int_equal(td_token_trie_build(t, LARGE, &trie, &err), TD_OK);
    for (int i = 0; i < 4; i++) {
        struct td_grammar *g;
        const uint64_t *mask;
        int32_t at;
        td_status s = i < 3 ? compile(TD_GRAMMAR_REGEX, regexes[i], &g, &err)
                            : compile(TD_GRAMMAR_JSON_OBJECT, "", &g, &err);
        assert_int_equal(s, TD_OK);
        struct td_matcher *m = matcher(g, trie);
        s = td_matcher_advance(m, td_matcher_start(m), i < 3 ? "xy" : "{\"xy", i < 3 ? 2 : 4, &at);
        assert_int_equal(s, TD_OK);
        assert_int_equal(td_matcher_mask(m, at, &mask), TD_OK);
        td_matcher_free(m);
        td_grammar_free(g);
    }
    td_token_trie_free(trie);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tables),
                                       cmocka_unit_test(choices),
                                       cmocka_unit_test(refusals),
                                       cmocka_unit_test(against_pcre2),
                                       cmocka_unit_test(masks),
                                       cmocka_unit_test(hostile),
                                       cmocka_unit_test(work_is_bounded),
                                       cmocka_unit_test(conditions_are_bounded),
                                       cmocka_unit_test(large_vocabulary),
                                       cmocka_unit_test(white_space_of_patterns)};
    const char *seed = getenv("SEED");
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    rng = td_random_stream(seed ? strtoull(seed, NULL, 10) : 1, 0).s;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
