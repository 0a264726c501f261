/* tool_calls.c - the parser of chat answers: a state machine over bytes.
 *
 *   START ("<think>"?) --> REASONING --> AFTER_THINK ---+
 *     |                                                 v
 *     +-------------------------------------------> CONTENT <------------+
 *     +--(llama3)--> OPENING --> OBJECT ...            | "<tool_call>",  | broken head, or
 *                                                      v "[TOOL_CALLS]"  | after the last call
 *                                                   OPENING (blanks, "[", NAME[ARGS])
 *                                                      v "{"
 *                                                   OBJECT --(name and arguments known: CALL_BEGIN)
 *                                                      v "}"
 *                                                   CLOSING ("</tool_call>", "," or "]", ";")
 *
 *   channels: BEFORE --"<|start|>", "<|channel|>"--> HEADER --"<|message|>"--> MESSAGE
 *               |  ^                                   ^        |    |  "<|end|>" and the like
 *               |  +-----------------------------------|--------|----+
 *               |                                      +--------+ "<|start|>"
 *               +--(another byte)--> MESSAGE            to a function: ARGUMENTS --"{"--> OBJECT
 *
 * Bytes that are undecided wait in `held`: a mark that may not become one, a call's head. They are
 * replayed when the state turns out wrong (a mark's beginning, at most 14 bytes) or come out as
 * content (a head), so each byte is looked at a bounded number of times. What is decided is
 * gathered in `out` until its kind changes or the piece ends. */
#include "common/text/tool_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"

#define MAX_HELD 4096
#define MAX_NAME 128
#define MAX_DEPTH 64

/* ---- JSON, one byte at a time ---------------------------------------------------------------- */

enum scan_state {
    J_VALUE,
    J_FIRST_VALUE, /* behind [: a value or ] */
    J_FIRST_KEY,   /* behind {: a key or } */
    J_KEY,
    J_COLON,
    J_AFTER, /* behind a value: , ] or } */
    J_STRING,
    J_ESCAPE,
    J_HEX,
    J_LITERAL,
    J_MINUS,
    J_ZERO,
    J_INTEGER,
    J_POINT,
    J_FRACTION,
    J_E,
    J_SIGN,
    J_EXPONENT
};

struct scan {
    enum scan_state state;
    int depth;
    uint64_t objects;    /* bit i: the level i + 1 is an object, else a list */
    bool key;            /* the string is one */
    int n_hex;           /* digits that are still to come */
    const char *literal; /* what is still to come of it */
};

enum scan_result { SCAN_BAD, SCAN_MORE, SCAN_DONE };

static bool blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static bool digit(char c) { return c >= '0' && c <= '9'; }

static enum scan_result open_level(struct scan *s, bool object)
{
    if (s->depth == MAX_DEPTH) return SCAN_BAD;
    uint64_t bit = 1ull << s->depth++;
    s->objects = object ? s->objects | bit : s->objects & ~bit;
    s->state = object ? J_FIRST_KEY : J_FIRST_VALUE;
    return SCAN_MORE;
}

static enum scan_result close_level(struct scan *s, char c)
{
    bool object = (s->objects >> (s->depth - 1) & 1) != 0;
    if ((c == '}') != object) return SCAN_BAD;
    s->state = J_AFTER;
    return --s->depth == 0 ? SCAN_DONE : SCAN_MORE;
}

static enum scan_result begin_value(struct scan *s, char c)
{
    if (c == '{' || c == '[') return open_level(s, c == '{');
    s->key = false;
    s->literal = c == 't' ? "rue" : c == 'f' ? "alse" : c == 'n' ? "ull" : NULL;
    s->state = c == '"'               ? J_STRING
               : s->literal != NULL   ? J_LITERAL
               : c == '-'             ? J_MINUS
               : c == '0'             ? J_ZERO
               : c >= '1' && c <= '9' ? J_INTEGER
                                      : J_VALUE;
    return s->state != J_VALUE ? SCAN_MORE : SCAN_BAD;
}

static enum scan_result after_value(struct scan *s, char c)
{
    if (blank(c)) {
        s->state = J_AFTER;
        return SCAN_MORE;
    }
    if (c == '}' || c == ']') return close_level(s, c);
    if (c != ',') return SCAN_BAD;
    s->state = s->objects >> (s->depth - 1) & 1 ? J_KEY : J_VALUE;
    return SCAN_MORE;
}

static enum scan_result scan_number(struct scan *s, char c)
{
    enum scan_state next = J_AFTER;
    switch (s->state) {
    case J_MINUS:
        next = c == '0' ? J_ZERO : digit(c) ? J_INTEGER : J_AFTER;
        break;
    case J_ZERO:
    case J_INTEGER:
        next = digit(c) && s->state == J_INTEGER ? J_INTEGER
               : c == '.'                        ? J_POINT
               : c == 'e' || c == 'E'            ? J_E
                                                 : J_AFTER;
        break;
    case J_POINT:
        next = digit(c) ? J_FRACTION : J_AFTER;
        break;
    case J_FRACTION:
        next = digit(c) ? J_FRACTION : c == 'e' || c == 'E' ? J_E : J_AFTER;
        break;
    case J_E:
        next = digit(c) ? J_EXPONENT : c == '+' || c == '-' ? J_SIGN : J_AFTER;
        break;
    default: /* J_SIGN, J_EXPONENT */
        next = digit(c) ? J_EXPONENT : J_AFTER;
    }
    bool whole = s->state == J_ZERO || s->state == J_INTEGER || s->state == J_FRACTION ||
                 s->state == J_EXPONENT;
    if (next == J_AFTER) return whole ? after_value(s, c) : SCAN_BAD;
    s->state = next;
    return SCAN_MORE;
}

/* The first byte must be the { of an object. A byte that is BAD leaves the scan as it was. */
static enum scan_result scan_byte(struct scan *s, char c)
{
    switch (s->state) {
    case J_VALUE:
    case J_FIRST_VALUE:
        if (blank(c)) return SCAN_MORE;
        if (c == ']' && s->state == J_FIRST_VALUE) return close_level(s, c);
        return begin_value(s, c);
    case J_FIRST_KEY:
    case J_KEY:
        if (blank(c)) return SCAN_MORE;
        if (c == '}' && s->state == J_FIRST_KEY) return close_level(s, c);
        if (c != '"') return SCAN_BAD;
        s->state = J_STRING;
        s->key = true;
        return SCAN_MORE;
    case J_COLON:
        if (c == ':') s->state = J_VALUE;
        return c == ':' || blank(c) ? SCAN_MORE : SCAN_BAD;
    case J_AFTER:
        return after_value(s, c);
    case J_STRING:
        if ((unsigned char)c < 0x20) return SCAN_BAD;
        if (c == '\\') s->state = J_ESCAPE;
        if (c == '"') s->state = s->key ? J_COLON : J_AFTER;
        return SCAN_MORE;
    case J_ESCAPE:
        if (c == 0 || strchr("\"\\/bfnrtu", c) == NULL) return SCAN_BAD;
        s->state = c == 'u' ? J_HEX : J_STRING;
        s->n_hex = 4;
        return SCAN_MORE;
    case J_HEX:
        if (!digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F')) return SCAN_BAD;
        if (--s->n_hex == 0) s->state = J_STRING;
        return SCAN_MORE;
    case J_LITERAL:
        if (c != *s->literal) return SCAN_BAD;
        if (*++s->literal == 0) s->state = J_AFTER;
        return SCAN_MORE;
    default:
        return scan_number(s, c);
    }
}

/* ---- the parser ------------------------------------------------------------------------------ */

enum state {
    START,
    REASONING,
    AFTER_THINK,
    CONTENT,
    OPENING,
    OBJECT,
    CLOSING,
    PLAIN,
    /* channels: between messages; in a header; in a message; in one to a function, before its { */
    BEFORE,
    HEADER,
    MESSAGE,
    ARGUMENTS
};

/* In OPENING, what comes next. */
enum opening {
    O_PYTHON_TAG, /* llama3: blanks, the tag or { */
    O_LIST,       /* mistral: [ */
    O_BRACE,      /* { */
    O_NAME,       /* mistral_args: the name, then a tag or { */
    O_TAG,        /* [CALL_ID] or [ARGS] */
    O_ID
};

enum member { M_NONE, M_OTHER, M_NAME, M_ARGUMENTS };

struct td_output_parser {
    struct td_output_format format;
    enum state state;
    enum opening opening;
    const char *mark; /* before a call: hermes, mistral; NULL: calls are not looked for */
    char id_seed[40]; /* hash of the request's id, in digits */
    uint32_t n_calls;
    bool only_blanks;  /* since the start or the last call: blanks before the next are markup */
    bool listed_comma; /* CLOSING: , or ; was seen, so another call must follow */
    struct scan scan;
    enum member member;                      /* whose value is scanned, at the first level */
    size_t member_at;                        /* where in held the key or value begins */
    size_t name_at, n_name, args_at, n_args; /* in held; n 0: not known yet */
    size_t tag_at;
    enum td_output_kind message_kind; /* of the text in MESSAGE */
    bool args_first;                  /* the arguments began before the name was known */
    bool begun,
        in_args; /* of this call: CALL_BEGIN was given; its arguments are not at their end */
    size_t n_held, n_out;
    enum td_output_kind out_kind;
    td_output_fn fn;
    void *user;
    char name[MAX_NAME + 1], id[32];
    char held[MAX_HELD], out[MAX_HELD];
};

static void give(struct td_output_parser *p, const struct td_output_delta *d) { p->fn(p->user, d); }

static void flush(struct td_output_parser *p)
{
    if (p->n_out == 0) return;
    give(p, &(struct td_output_delta){.kind = p->out_kind,
                                      .text = p->out,
                                      .n_bytes = p->n_out,
                                      .index = p->n_calls > 0 ? p->n_calls - 1 : 0});
    p->n_out = 0;
}

static void put(struct td_output_parser *p, enum td_output_kind kind, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool begins_character = ((unsigned char)text[i] & 0xc0) != 0x80;
        if (kind != p->out_kind || p->n_out == sizeof p->out ||
            (begins_character && p->n_out + 4 > sizeof p->out))
            flush(p);
        p->out_kind = kind;
        p->out[p->n_out++] = text[i];
    }
}

static void release(struct td_output_parser *p, enum td_output_kind kind)
{
    put(p, kind, p->held, p->n_held);
    p->n_held = 0;
}

static void hold(struct td_output_parser *p, char c) { p->held[p->n_held++] = c; }

static void feed_byte(struct td_output_parser *p, char c);

/* The state was wrong about what is held: the bytes come again, in another one. Only marks'
 * beginnings and blanks are replayed, and never twice, as the new state is a later one. */
static void replay(struct td_output_parser *p, enum state state)
{
    char bytes[MAX_HELD];
    size_t n = p->n_held;
    memcpy(bytes, p->held, n);
    p->n_held = 0;
    p->state = state;
    for (size_t i = 0; i < n; i++) feed_byte(p, bytes[i]);
}

/* Of the held bytes those from `at` on, and c, begin or complete the mark. */
enum fit { FITS_NOT, FITS_SO_FAR, FITS_WHOLE };

static enum fit fits(const struct td_output_parser *p, size_t at, char c, const char *mark)
{
    size_t n = p->n_held - at, n_mark = strlen(mark);
    if (n >= n_mark || mark[n] != c || memcmp(p->held + at, mark, n) != 0) return FITS_NOT;
    return n + 1 == n_mark ? FITS_WHOLE : FITS_SO_FAR;
}

static size_t n_leading(const struct td_output_parser *p, bool newlines_only)
{
    size_t n = 0;
    while (n < p->n_held && (newlines_only ? p->held[n] == '\n' : blank(p->held[n]))) n++;
    return n;
}

static void begin_content(struct td_output_parser *p)
{
    p->state = CONTENT;
    p->only_blanks = p->mark != NULL;
    if (p->format.calls == TD_CALLS_LLAMA3) {
        p->state = OPENING;
        p->opening = O_PYTHON_TAG;
    }
}

static void begin_opening(struct td_output_parser *p, enum opening opening)
{
    p->state = OPENING;
    p->opening = opening;
    p->begun = p->in_args = p->args_first = p->listed_comma = false;
    p->n_name = p->n_args = p->name_at = p->args_at = 0;
    p->member = M_NONE;
}

static void begin_object(struct td_output_parser *p)
{
    p->state = OBJECT;
    p->scan = (struct scan){.state = J_VALUE};
    p->member = M_NONE;
}

static bool has_channels(const struct td_output_parser *p)
{
    return p->format.reasoning == TD_REASONING_CHANNELS;
}

/* Arguments stand alone, and are no member of an object. */
static bool has_bare_args(const struct td_output_parser *p)
{
    return p->format.calls == TD_CALLS_MISTRAL_ARGS || p->format.calls == TD_CALLS_HARMONY;
}

/* What is held is no call; c comes again as content. */
static void not_a_call(struct td_output_parser *p, char c)
{
    release(p, TD_OUTPUT_CONTENT);
    p->message_kind = TD_OUTPUT_CONTENT;
    p->state = has_channels(p) ? MESSAGE : p->mark != NULL ? CONTENT : PLAIN;
    p->only_blanks = false;
    feed_byte(p, c);
}

static void make_id(struct td_output_parser *p)
{
    char text[64];
    int n = snprintf(text, sizeof text, "%s/%u", p->id_seed, p->n_calls);
    uint64_t h = td_hash64(text, (size_t)n, 0);
    if (p->format.calls == TD_CALLS_MISTRAL || p->format.calls == TD_CALLS_MISTRAL_ARGS) {
        static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyz";
        for (int i = 0; i < 9; i++, h /= 36) p->id[i] = letters[h % 36];
        p->id[9] = 0;
    } else {
        snprintf(p->id, sizeof p->id, "call_%016llx", (unsigned long long)h);
    }
}

/* Name and arguments are known, the latter perhaps only by their first byte, the last one held. */
static void begin_call(struct td_output_parser *p)
{
    flush(p);
    memcpy(p->name, p->held + p->name_at, p->n_name);
    p->name[p->n_name] = 0;
    make_id(p);
    give(p, &(struct td_output_delta){.kind = TD_OUTPUT_CALL_BEGIN,
                                      .text = p->held,
                                      .n_bytes = p->args_at,
                                      .index = p->n_calls,
                                      .id = p->id,
                                      .name = p->name});
    p->n_calls++;
    p->begun = true;
    size_t n = p->in_args ? p->n_held - p->args_at : p->n_args;
    put(p, TD_OUTPUT_CALL_ARGUMENTS, p->held + p->args_at, n);
    size_t rest = p->args_at + n;
    memmove(p->held, p->held + rest, p->n_held - rest);
    p->n_held -= rest;
}

static void end_call(struct td_output_parser *p, bool complete)
{
    flush(p);
    p->in_args = false;
    give(p, &(struct td_output_delta){.kind = TD_OUTPUT_CALL_END,
                                      .text = "",
                                      .index = p->n_calls - 1,
                                      .complete = complete});
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Behind a byte of the head that is held already (the last one): what it says of the first level's
 * members. False: this is no call. */
static bool note_member(struct td_output_parser *p, const struct scan *before)
{
    const struct scan *now = &p->scan;
    size_t last = p->n_held - 1;

    if (before->depth == 1 && now->state == J_STRING && now->key && before->state != J_STRING &&
        before->state != J_ESCAPE && before->state != J_HEX) {
        p->member_at = p->n_held; /* a key begins */
    } else if (now->depth == 1 && now->state == J_COLON && before->state == J_STRING) {
        const char *key = p->held + p->member_at;
        size_t n = last - p->member_at;
        bool name = n == 4 && memcmp(key, "name", 4) == 0;
        bool args = (n == 9 && memcmp(key, "arguments", 9) == 0) ||
                    (n == 10 && memcmp(key, "parameters", 10) == 0);
        bool other =
            (n == 2 && memcmp(key, "id", 2) == 0) || (n == 4 && memcmp(key, "type", 4) == 0);
        p->member = name ? M_NAME : args ? M_ARGUMENTS : M_OTHER;
        if (!name && !args && !other) return false;
        if ((name && p->n_name > 0) || (args && p->args_first)) return false;
    } else if (before->depth == 1 && before->state == J_VALUE && now->state != J_VALUE) {
        p->member_at = last; /* a value begins */
        if (p->member == M_NAME) return p->held[last] == '"';
        if (p->member == M_ARGUMENTS) {
            if (p->held[last] != '{') return false;
            p->args_at = last;
            p->in_args = p->args_first = true;
        }
    } else if (now->depth == 1 && now->state == J_AFTER &&
               (before->state != J_AFTER || before->depth > 1)) {
        if (p->member == M_NAME) { /* a value ends */
            p->name_at = p->member_at + 1;
            p->n_name = last - p->name_at;
            return p->n_name > 0 && p->n_name <= MAX_NAME &&
                   memchr(p->held + p->name_at, '\\', p->n_name) == NULL;
        }
        if (p->in_args) {
            p->n_args = p->n_held - p->args_at;
            p->in_args = false;
        }
    }
    return true;
}

static void end_object(struct td_output_parser *p)
{
    p->state = CLOSING;
    p->listed_comma = false;
    if (!has_bare_args(p)) return;
    p->state = has_channels(p) ? BEFORE : CONTENT;
    p->only_blanks = true;
}

static void object_byte(struct td_output_parser *p, char c)
{
    struct scan before = p->scan;
    enum scan_result r = scan_byte(&p->scan, c);

    if (!p->begun) {
        if (r == SCAN_BAD || p->n_held == sizeof p->held) {
            not_a_call(p, c);
            return;
        }
        hold(p, c);
        if (!note_member(p, &before) || r == SCAN_DONE) { /* DONE: without a name or arguments */
            p->n_held--;
            not_a_call(p, c);
            return;
        }
        if (p->n_name == 0 || !p->args_first) return;
        bool ended = !p->in_args;
        begin_call(p);
        if (ended) {
            end_call(p, true);
            release(p, TD_OUTPUT_MARKUP);
        }
        return;
    }
    if (r == SCAN_BAD) {
        if (p->in_args) end_call(p, false);
        not_a_call(p, c);
        return;
    }
    put(p, p->in_args ? TD_OUTPUT_CALL_ARGUMENTS : TD_OUTPUT_MARKUP, &c, 1);
    int level = has_bare_args(p) ? 0 : 1;
    if (p->in_args && p->scan.depth == level) end_call(p, true);
    if (r == SCAN_DONE) end_object(p);
}

static bool name_byte(char c)
{
    return digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-' ||
           c == '.';
}

/* { behind the name or its tags, of arguments that stand alone */
static void begin_bare_args(struct td_output_parser *p, char c)
{
    begin_object(p);
    scan_byte(&p->scan, c);
    p->args_at = p->n_held;
    hold(p, c);
    p->in_args = p->args_first = true;
    begin_call(p);
}

/* <|python_tag|>, behind blanks, or a brace without it. False: c is for the opening brace. */
static bool python_tag_byte(struct td_output_parser *p, char c)
{
    size_t at = n_leading(p, false);
    enum fit fit = fits(p, at, c, "<|python_tag|>");
    if (c == '{' && at == p->n_held) return false;
    if (fit == FITS_NOT && !(blank(c) && at == p->n_held)) {
        not_a_call(p, c);
        return true;
    }
    hold(p, c);
    if (fit == FITS_WHOLE) p->opening = O_BRACE;
    return true;
}

static void name_of_call_byte(struct td_output_parser *p, char c)
{
    if (name_byte(c) && p->n_name < MAX_NAME) {
        if (p->n_name++ == 0) p->name_at = p->n_held;
        hold(p, c);
    } else if (blank(c) && p->n_name == 0) {
        hold(p, c);
    } else if (c == '[' && p->n_name > 0) {
        p->opening = O_TAG;
        p->tag_at = p->n_held;
        hold(p, c);
    } else if (c == '{' && p->n_name > 0) {
        begin_bare_args(p, c);
    } else {
        not_a_call(p, c);
    }
}

/* [CALL_ID] or [ARGS] behind the name. */
static void tag_byte(struct td_output_parser *p, char c)
{
    enum fit id = fits(p, p->tag_at, c, "[CALL_ID]"), args = fits(p, p->tag_at, c, "[ARGS]");
    if (id == FITS_NOT && args == FITS_NOT) {
        not_a_call(p, c);
        return;
    }
    hold(p, c);
    if (id == FITS_WHOLE) p->opening = O_ID;
    if (args == FITS_WHOLE) p->opening = O_BRACE;
}

static void id_byte(struct td_output_parser *p, char c)
{
    if (!name_byte(c) && c != '[') {
        not_a_call(p, c);
        return;
    }
    if (c == '[') {
        p->opening = O_TAG;
        p->tag_at = p->n_held;
    }
    hold(p, c);
}

static void opening_byte(struct td_output_parser *p, char c)
{
    bool room = p->n_held < sizeof p->held;
    switch (room ? p->opening : O_BRACE) {
    case O_PYTHON_TAG:
        if (python_tag_byte(p, c)) return;
        break;
    case O_LIST:
        if (!blank(c) && c != '[') {
            not_a_call(p, c);
            return;
        }
        hold(p, c);
        if (c == '[') p->opening = O_BRACE;
        return;
    case O_NAME:
        name_of_call_byte(p, c);
        return;
    case O_TAG:
        tag_byte(p, c);
        return;
    case O_ID:
        id_byte(p, c);
        return;
    default:
        break;
    }
    if (blank(c) && room) {
        hold(p, c);
    } else if (c != '{' || !room) {
        not_a_call(p, c);
    } else if (p->format.calls == TD_CALLS_MISTRAL_ARGS) {
        begin_bare_args(p, c);
    } else {
        begin_object(p);
        scan_byte(&p->scan, c);
        hold(p, c);
    }
}

/* Behind a call's object. */
static void closing_byte(struct td_output_parser *p, char c)
{
    char more = p->format.calls == TD_CALLS_MISTRAL ? ',' : ';';

    if (p->format.calls == TD_CALLS_HERMES) {
        enum fit fit = fits(p, 0, c, "</tool_call>");
        if (fit == FITS_NOT && blank(c) && p->n_held == 0) {
            put(p, TD_OUTPUT_MARKUP, &c, 1);
        } else if (fit == FITS_NOT) {
            p->only_blanks = false;
            replay(p, CONTENT);
            feed_byte(p, c);
        } else {
            hold(p, c);
            if (fit == FITS_SO_FAR) return;
            release(p, TD_OUTPUT_MARKUP);
            p->state = CONTENT;
            p->only_blanks = true;
        }
        return;
    }
    if (blank(c) && p->n_held < sizeof p->held) {
        hold(p, c);
    } else if (c == more && p->n_held < sizeof p->held) {
        begin_opening(p, O_BRACE); /* what is held becomes the next head */
        hold(p, c);
    } else if (c == ']' && p->format.calls == TD_CALLS_MISTRAL) {
        release(p, TD_OUTPUT_MARKUP);
        put(p, TD_OUTPUT_MARKUP, &c, 1);
        p->state = CONTENT;
        p->only_blanks = true;
    } else {
        not_a_call(p, c);
    }
}

/* ---- text ------------------------------------------------------------------------------------ */

static void content_byte(struct td_output_parser *p, char c)
{
    if (p->mark == NULL) {
        put(p, TD_OUTPUT_CONTENT, &c, 1);
        return;
    }
    size_t at = p->only_blanks ? n_leading(p, false) : 0;
    enum fit fit = fits(p, at, c, p->mark);
    if (fit == FITS_WHOLE) {
        put(p, TD_OUTPUT_MARKUP, p->held, at);
        memmove(p->held, p->held + at, p->n_held - at);
        p->n_held -= at;
        hold(p, c);
        begin_opening(p, p->format.calls == TD_CALLS_MISTRAL        ? O_LIST
                         : p->format.calls == TD_CALLS_MISTRAL_ARGS ? O_NAME
                                                                    : O_BRACE);
    } else if (fit == FITS_SO_FAR || (p->only_blanks && blank(c) && at == p->n_held)) {
        if (p->n_held == sizeof p->held) { /* all blanks: more than any model puts between calls */
            release(p, TD_OUTPUT_CONTENT);
            p->only_blanks = false;
            content_byte(p, c);
            return;
        }
        hold(p, c);
    } else if (p->n_held > 0) {
        release(p, TD_OUTPUT_CONTENT);
        p->only_blanks = false;
        content_byte(p, c); /* nothing is held: at most once more */
    } else {
        p->only_blanks = false;
        put(p, TD_OUTPUT_CONTENT, &c, 1);
    }
}

static void start_byte(struct td_output_parser *p, char c)
{
    size_t at = n_leading(p, false);
    enum fit fit = fits(p, at, c, "<think>");
    bool goes_on = fit != FITS_NOT || (blank(c) && at == p->n_held);
    if (!goes_on || p->n_held == sizeof p->held) {
        begin_content(p);
        replay(p, p->state);
        feed_byte(p, c);
        return;
    }
    hold(p, c);
    if (fit != FITS_WHOLE) return;
    release(p, TD_OUTPUT_MARKUP);
    p->state = REASONING;
    p->only_blanks = true;
}

/* Newlines around the thoughts are the template's own (it strips them from an earlier answer). */
static void reasoning_byte(struct td_output_parser *p, char c)
{
    if (p->only_blanks && c == '\n') {
        put(p, TD_OUTPUT_MARKUP, &c, 1);
        return;
    }
    p->only_blanks = false;
    size_t at = n_leading(p, true);
    enum fit fit = fits(p, at, c, "</think>");
    bool goes_on = fit != FITS_NOT || (c == '\n' && at == p->n_held);
    if (goes_on && p->n_held < sizeof p->held) {
        hold(p, c);
        if (fit != FITS_WHOLE) return;
        release(p, TD_OUTPUT_MARKUP);
        p->state = AFTER_THINK;
    } else if (p->n_held > 0) {
        release(p, TD_OUTPUT_REASONING);
        reasoning_byte(p, c); /* nothing is held: at most once more */
    } else {
        put(p, TD_OUTPUT_REASONING, &c, 1);
    }
}

/* ---- channels -------------------------------------------------------------------------------- */

#define MAX_HEADER 512

/* Of these the first N_ENDS end a message, as does the next one, which begins a header; all may
 * come between messages. What goes to a function may name it before the channel. */
static const char *const marks[] = {"<|end|>",     "<|call|>",    "<|return|>",   "<|start|>",
                                    "<|channel|>", "<|message|>", "to=functions."};
enum { N_ENDS = 3, IN_MESSAGE = 4, MESSAGE_MARK = 5, N_MARKS = 7 };

/* Of the first n marks the one that the held bytes from `at` on, and c, begin or complete. */
static enum fit find_mark(const struct td_output_parser *p, size_t at, char c, int n, int *ret_mark)
{
    enum fit fit = FITS_NOT;
    for (int i = 0; i < n && fit == FITS_NOT; i++) {
        fit = fits(p, at, c, marks[i]);
        *ret_mark = i;
    }
    return fit;
}

/* Where `what` ends in what is held; NULL: it is not there. */
static const char *behind(const struct td_output_parser *p, const char *what)
{
    const char *at = memmem(p->held, p->n_held, what, strlen(what));
    return at != NULL ? at + strlen(what) : NULL;
}

/* A whole header is held, to its <|message|>: at may be any place in it. */
static bool begins(const char *at, const char *what)
{
    return at != NULL && strncmp(at, what, strlen(what)) == 0;
}

/* Whose the message is. */
static void end_header(struct td_output_parser *p)
{
    static const char functions[] = "functions.";
    const char *channel = behind(p, "<|channel|>"), *to = behind(p, "to=");
    bool function = begins(to, functions), final = begins(channel, "final");

    if (function && p->format.calls == TD_CALLS_HARMONY) {
        const char *name = to + sizeof functions - 1;
        size_t n = 0;
        while (n <= MAX_NAME && name_byte(name[n])) n++;
        if (n > 0 && n <= MAX_NAME && (name[n] == ' ' || name[n] == '<')) {
            p->name_at = (size_t)(name - p->held);
            p->n_name = n;
            p->state = ARGUMENTS;
            return;
        }
    }
    release(p, TD_OUTPUT_MARKUP);
    bool thought = begins(channel, "analysis") || (to != NULL && !function && !final);
    p->message_kind = thought ? TD_OUTPUT_REASONING : TD_OUTPUT_CONTENT;
    p->state = MESSAGE;
}

static void header_byte(struct td_output_parser *p, char c)
{
    const char *mark = marks[MESSAGE_MARK];
    size_t n = strlen(mark);
    if ((unsigned char)c < 0x20 || p->n_held == MAX_HEADER) {
        not_a_call(p, c);
        return;
    }
    hold(p, c);
    if (p->n_held >= n && memcmp(p->held + p->n_held - n, mark, n) == 0) end_header(p);
}

/* Between messages, or before the first, whose header the prompt has begun. */
static void before_byte(struct td_output_parser *p, char c)
{
    size_t at = n_leading(p, false);
    int mark;
    enum fit fit = find_mark(p, at, c, N_MARKS, &mark);
    if (fit == FITS_NOT && blank(c) && at == p->n_held && at < MAX_HEADER) {
        if (p->only_blanks)
            put(p, TD_OUTPUT_MARKUP, &c, 1);
        else
            hold(p, c); /* text without channels may begin so */
        return;
    }
    if (fit == FITS_NOT) {
        p->message_kind = TD_OUTPUT_CONTENT;
        replay(p, MESSAGE);
        feed_byte(p, c);
        return;
    }
    hold(p, c);
    if (fit == FITS_SO_FAR) return;
    if (mark == MESSAGE_MARK)
        end_header(p);
    else if (mark >= N_ENDS)
        p->state = HEADER;
    else
        release(p, TD_OUTPUT_MARKUP);
    p->only_blanks = true;
}

static void message_byte(struct td_output_parser *p, char c)
{
    int mark;
    enum fit fit = find_mark(p, 0, c, IN_MESSAGE, &mark);
    if (fit == FITS_NOT && p->n_held > 0) {
        release(p, p->message_kind);
        message_byte(p, c); /* nothing is held: at most once more */
    } else if (fit == FITS_NOT) {
        put(p, p->message_kind, &c, 1);
    } else {
        hold(p, c);
        if (fit == FITS_SO_FAR) return;
        if (mark < N_ENDS) release(p, TD_OUTPUT_MARKUP);
        p->state = mark < N_ENDS ? BEFORE : HEADER;
        p->only_blanks = true;
    }
}

/* The header of a message to a function is held, and blanks. */
static void arguments_byte(struct td_output_parser *p, char c)
{
    bool room = p->n_held < sizeof p->held;
    if (c == '{' && room) {
        begin_bare_args(p, c);
    } else if (blank(c) && room) {
        hold(p, c);
    } else {
        release(p, TD_OUTPUT_MARKUP);
        p->message_kind = TD_OUTPUT_CONTENT;
        p->state = MESSAGE;
        message_byte(p, c);
    }
}

static void feed_byte(struct td_output_parser *p, char c)
{
    switch (p->state) {
    case START:
        start_byte(p, c);
        return;
    case REASONING:
        reasoning_byte(p, c);
        return;
    case AFTER_THINK:
        if (c == '\n') {
            put(p, TD_OUTPUT_MARKUP, &c, 1);
            return;
        }
        begin_content(p);
        feed_byte(p, c);
        return;
    case CONTENT:
        content_byte(p, c);
        return;
    case OPENING:
        opening_byte(p, c);
        return;
    case OBJECT:
        object_byte(p, c);
        return;
    case CLOSING:
        closing_byte(p, c);
        return;
    case PLAIN:
        put(p, TD_OUTPUT_CONTENT, &c, 1);
        return;
    case BEFORE:
        before_byte(p, c);
        return;
    case HEADER:
        header_byte(p, c);
        return;
    case MESSAGE:
        message_byte(p, c);
        return;
    case ARGUMENTS:
        arguments_byte(p, c);
        return;
    }
}

/* ---- what others call ------------------------------------------------------------------------ */

struct td_output_parser *td_output_parser_create(struct td_output_format format,
                                                 bool begins_in_reasoning, const char *request_id)
{
    struct td_output_parser *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    p->format = format;
    p->mark = format.calls == TD_CALLS_HERMES ? "<tool_call>"
              : format.calls == TD_CALLS_MISTRAL || format.calls == TD_CALLS_MISTRAL_ARGS
                  ? "[TOOL_CALLS]"
                  : NULL;
    snprintf(p->id_seed, sizeof p->id_seed, "%016llx",
             (unsigned long long)td_hash64(request_id, strlen(request_id), 0));
    if (has_channels(p)) {
        p->state = BEFORE;
    } else if (format.reasoning && begins_in_reasoning) {
        p->state = REASONING;
        p->only_blanks = true;
    } else if (!format.reasoning) {
        begin_content(p);
    }
    return p;
}

void td_output_parser_free(struct td_output_parser *p) { free(p); }

uint32_t td_output_parser_n_calls(const struct td_output_parser *p) { return p->n_calls; }

void td_output_parser_feed(struct td_output_parser *p, const char *text, size_t n_bytes,
                           td_output_fn fn, void *user)
{
    p->fn = fn;
    p->user = user;
    for (size_t i = 0; i < n_bytes; i++) feed_byte(p, text[i]);
    flush(p);
}

void td_output_parser_end(struct td_output_parser *p, td_output_fn fn, void *user)
{
    p->fn = fn;
    p->user = user;
    bool blanks = n_leading(p, false) == p->n_held;
    enum td_output_kind kind = TD_OUTPUT_CONTENT;
    if (p->state == REASONING) kind = TD_OUTPUT_REASONING;
    if (p->state == MESSAGE) kind = p->message_kind;
    bool named = p->state == HEADER && p->held[n_leading(p, false)] == '<';
    if (p->state == CLOSING || (p->state == CONTENT && blanks && p->n_calls > 0) || named ||
        p->state == ARGUMENTS)
        kind = TD_OUTPUT_MARKUP;
    if (p->state == OBJECT && p->begun && p->in_args) end_call(p, false);
    release(p, kind);
    flush(p);
    p->state = PLAIN;
}

static bool ends_in(const char *text, size_t n_bytes, const char *end)
{
    size_t n = strlen(end);
    return n_bytes >= n && memcmp(text + n_bytes - n, end, n) == 0;
}

bool td_output_begins_in_reasoning(const char *prompt, size_t n_bytes)
{
    while (n_bytes > 0 && blank(prompt[n_bytes - 1])) n_bytes--;
    return ends_in(prompt, n_bytes, "<think>");
}

const char *td_output_guided_header(struct td_output_format format, const char *prompt,
                                    size_t n_bytes)
{
    bool open =
        format.reasoning == TD_REASONING_CHANNELS && ends_in(prompt, n_bytes, "<|start|>assistant");
    return open ? "<|channel|>final<|message|>" : "";
}

bool td_output_marks_are_special(struct td_output_format format)
{
    return format.reasoning == TD_REASONING_CHANNELS || format.calls == TD_CALLS_LLAMA3 ||
           format.calls == TD_CALLS_MISTRAL || format.calls == TD_CALLS_MISTRAL_ARGS;
}

/* All marks must occur, and none of the others: those belong to families that use the same tag in
 * another way. The first row that fits counts. */
static const struct {
    enum td_call_format calls;
    const char *marks[2], *others[2];
} formats[] = {
    {TD_CALLS_MISTRAL_ARGS, {"[TOOL_CALLS]", "[ARGS]"}, {NULL, NULL}},
    {TD_CALLS_MISTRAL, {"[TOOL_CALLS]", "[INST]"}, {NULL, NULL}},
    {TD_CALLS_HERMES, {"<tool_call>", "arguments\": "}, {"<function=", "<arg_key>"}},
    {TD_CALLS_HERMES, {"<tool_call>", "arguments\\\": "}, {"<function=", "<arg_key>"}},
    {TD_CALLS_LLAMA3,
     {"<|start_header_id|>", "{\"name\": function name, \"parameters\""},
     {NULL, NULL}},
    {TD_CALLS_HARMONY, {"<|channel|>", "<|message|>"}, {NULL, NULL}},
};

struct td_output_format td_output_format_find(const char *jinja, size_t n_bytes)
{
    bool thinks = memmem(jinja, n_bytes, "<think>", 7) != NULL ||
                  memmem(jinja, n_bytes, "</think>", 8) != NULL;
    struct td_output_format f = {.reasoning = thinks ? TD_REASONING_THINK : TD_REASONING_NONE};
    for (size_t i = 0; i < sizeof formats / sizeof *formats && f.calls == TD_CALLS_NONE; i++) {
        bool fit = true;
        for (int k = 0; k < 2; k++) {
            const char *mark = formats[i].marks[k], *other = formats[i].others[k];
            if (mark != NULL) fit = fit && memmem(jinja, n_bytes, mark, strlen(mark)) != NULL;
            if (other != NULL) fit = fit && memmem(jinja, n_bytes, other, strlen(other)) == NULL;
        }
        if (fit) f.calls = formats[i].calls;
    }
    if (f.calls == TD_CALLS_HARMONY) f.reasoning = TD_REASONING_CHANNELS;
    return f;
}

const char *td_call_format_name(enum td_call_format f)
{
    static const char *const names[] = {"none",    "hermes",       "llama3",
                                        "mistral", "mistral_args", "harmony"};
    return names[f];
}
