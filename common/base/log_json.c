/* log_json.c - reads pairs from left to right, and writes each as it goes.
 *
 * A quoted value ends at the first quote without a backslash that the line's end or the next key
 * follows: messages that their caller put between quotes by hand may have quotes of their own. */
#include "common/base/log_json.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static const char cut_mark[] = "\",\"log_cut\":\"1\"}"; /* ends a value, too */

struct writer {
    char *out;
    size_t n, room; /* room: without what cut_mark needs */
    bool is_cut;
};

/* All of the text, or nothing and the object is cut. */
static void put(struct writer *w, const char *text, size_t n)
{
    if (w->is_cut || n > w->room - w->n) {
        w->is_cut = true;
        return;
    }
    memcpy(w->out + w->n, text, n);
    w->n += n;
}

/* Bytes of the UTF-8 sequence at p, of which n are there; 0 = it is none (RFC 3629). */
static size_t utf8_bytes(const unsigned char *p, size_t n)
{
    size_t bytes = p[0] < 0x80 ? 1 : p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (bytes == 1) return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4 || n < bytes) return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    bool is_long = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90),
         is_outside = (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf4 && p[1] > 0x8f);
    return is_long || is_outside ? 0 : bytes;
}

/* Writes the character at p, of which n bytes are there, and returns how many it took. */
static size_t put_char(struct writer *w, const char *p, size_t n)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char c = (unsigned char)*p;
    if (c == '"' || c == '\\') {
        put(w, (char[]){'\\', (char)c}, 2);
    } else if (c == '\n') {
        put(w, "\\n", 2);
    } else if (c < 0x20 || c == 0x7f) {
        put(w, (char[]){'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]}, 6);
    } else {
        size_t bytes = utf8_bytes((const unsigned char *)p, n);
        put(w, bytes ? p : "\xef\xbf\xbd", bytes ? bytes : 3);
        return bytes ? bytes : 1;
    }
    return 1;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The same of a quoted value, where a backslash escapes. */
static size_t put_escaped(struct writer *w, const char *p, size_t n)
{
    if (*p != '\\' || n < 2) return put_char(w, p, n);
    if (p[1] == 'n') {
        put_char(w, "\n", 1);
        return 2;
    }
    int high = n >= 4 && p[1] == 'x' ? hex_digit(p[2]) : -1, low = high >= 0 ? hex_digit(p[3]) : -1;
    if (low >= 0) {
        char c = (char)(high * 16 + low);
        put_char(w, &c, 1);
        return 4;
    }
    if (p[1] == '"' || p[1] == '\\') {
        put_char(w, p + 1, 1);
        return 2;
    }
    return put_char(w, p, n); /* a backslash that escapes nothing */
}

static bool is_key_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '-';
}

/* Bytes of "key=" at the begin of p; 0 = there is none. */
static size_t key_bytes(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n && is_key_char(p[i])) i++;
    return i && i < n && p[i] == '=' ? i + 1 : 0;
}

/* Bytes of the quoted value at p, both quotes included; 0 = its end is not there. */
static size_t quoted_bytes(const char *p, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if (p[i] == '\\') {
            i++;
        } else if (p[i] == '"') {
            size_t next = i + 1;
            while (next < n && p[next] == ' ') next++;
            if (next == n || (next > i + 1 && key_bytes(p + next, n - next))) return i + 1;
        }
    }
    return 0;
}

/* Bytes up to the space before the next key, or to the line's end. */
static size_t plain_bytes(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] == ' ' && key_bytes(p + i + 1, n - i - 1)) return i;
    return n;
}

static size_t put_value(struct writer *w, const char *p, size_t n)
{
    size_t quoted = n && *p == '"' ? quoted_bytes(p, n) : 0;
    size_t end = quoted ? quoted - 1 : plain_bytes(p, n);
    for (size_t i = quoted ? 1 : 0; i < end && !w->is_cut;)
        i += quoted ? put_escaped(w, p + i, end - i) : put_char(w, p + i, end - i);
    return quoted ? quoted : end;
}

size_t td_log_to_json(const char *line, size_t n_bytes, char *out, size_t out_bytes)
{
    struct writer w = {.out = out, .room = out_bytes - (sizeof cut_mark - 1)};
    put(&w, "{", 1);
    for (size_t i = 0; i < n_bytes && !w.is_cut;) {
        if (line[i] == ' ') {
            i++;
            continue;
        }
        size_t begin = w.n, key = key_bytes(line + i, n_bytes - i);
        if (begin > 1) put(&w, ",", 1);
        put(&w, "\"", 1);
        put(&w, key ? line + i : "more", key ? key - 1 : 4);
        put(&w, "\":\"", 3);
        if (w.is_cut) { /* no member without a value */
            w.n = begin;
            break;
        }
        i += key;
        i += put_value(&w, line + i, n_bytes - i);
        if (w.is_cut) {
            memcpy(out + w.n, cut_mark, sizeof cut_mark - 1);
            return w.n + sizeof cut_mark - 1;
        }
        put(&w, "\"", 1);
        if (w.is_cut) { /* cut_mark begins with that quote */
            memcpy(out + w.n, cut_mark, sizeof cut_mark - 1);
            return w.n + sizeof cut_mark - 1;
        }
    }
    if (!w.is_cut) {
        out[w.n] = '}'; /* room for cut_mark is room for it */
        return w.n + 1;
    }
    size_t skip = w.n > 1 ? 1 : 2; /* behind a whole member, or none: without the quote */
    memcpy(out + w.n, cut_mark + skip, sizeof cut_mark - 1 - skip);
    return w.n + sizeof cut_mark - 1 - skip;
}
