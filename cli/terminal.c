/* terminal.c - see terminal.h: width, wrapping, cutting. */
#include "cli/terminal.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* The character at text, *ret_bytes long. Bytes that are none are U+FFFD, one at a time. */
static int32_t character(const char *text, size_t n_bytes, size_t *ret_bytes)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t n =
        utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)n_bytes, &c);
    *ret_bytes = n > 0 ? (size_t)n : 1;
    return n > 0 ? c : 0xFFFD;
}

static unsigned width_of(int32_t c)
{
    int n = utf8proc_charwidth(c);
    return n > 0 ? (unsigned)n : 0;
}

unsigned cli_width(const char *text, size_t n_bytes)
{
    unsigned width = 0;
    for (size_t i = 0, n; i < n_bytes; i += n)
        width += width_of(character(text + i, n_bytes - i, &n));
    return width;
}

/* Bytes that the character beginning with this one has. */
static size_t length_of(uint8_t first)
{
    return first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
}

/* Bytes of the characters at the text's beginning that take at most so many columns. */
static size_t beginning(const char *text, size_t n_bytes, unsigned columns)
{
    size_t at = 0, n;
    for (unsigned width = 0; at < n_bytes; at += n) {
        width += width_of(character(text + at, n_bytes - at, &n));
        if (width > columns) break;
    }
    return at;
}

/* Takes the bytes of a cut character off the end. */
static void drop_part(char *text)
{
    size_t n_bytes = strlen(text), at = n_bytes;
    while (at && ((uint8_t)text[at - 1] & 0xC0) == 0x80) at--;
    if (at && n_bytes - (at - 1) < length_of((uint8_t)text[at - 1])) text[at - 1] = 0;
}

void cli_fit(const char *text, unsigned columns, char *to, size_t to_bytes)
{
    size_t n_bytes = strlen(text), n, head = n_bytes, tail = n_bytes;
    const char *dots = "";
    if (cli_width(text, n_bytes) > columns && columns < 5) {
        head = beginning(text, n_bytes, columns);
    } else if (cli_width(text, n_bytes) > columns) {
        dots = "...";
        head = beginning(text, n_bytes, (columns - 3 + 1) / 2);
        unsigned left = columns - 3 - cli_width(text, head);
        /* forward to the first character from which the rest fits */
        for (tail = head; tail < n_bytes; tail += n) {
            if (cli_width(text + tail, n_bytes - tail) <= left) break;
            character(text + tail, n_bytes - tail, &n);
        }
    }
    if (snprintf(to, to_bytes, "%.*s%s%s", (int)head, text, dots, text + tail) >= (int)to_bytes)
        drop_part(to);
}

/* ---- wrapping -------------------------------------------------------------------------------- */

void cli_wrap_begin(struct cli_wrap *w, FILE *out, unsigned columns, unsigned at)
{
    memset(w, 0, sizeof *w);
    w->out = out;
    /* the last column stays empty: what terminals do after it differs */
    w->columns = columns ? columns - 1 : 0;
    w->at = at;
}

static void forget_word(struct cli_wrap *w) { w->word_bytes = w->word_columns = 0; }

static void new_line(struct cli_wrap *w)
{
    fputc('\n', w->out);
    w->at = 0;
    w->is_edge = false;
}

/* Takes the line's last word back and begins the next line with it. */
static void move_word(struct cli_wrap *w)
{
    fprintf(w->out, "\033[%uD\033[K", w->word_columns);
    new_line(w);
    fwrite(w->word, 1, w->word_bytes, w->out);
    w->at = w->word_columns;
}

static void put_space(struct cli_wrap *w)
{
    forget_word(w);
    if (w->at >= w->columns) {
        w->is_edge = true;
        return;
    }
    fputc(' ', w->out);
    w->at++;
}

static void put(struct cli_wrap *w, int32_t c, const char *bytes, size_t n_bytes)
{
    unsigned width = width_of(c);
    if (w->is_edge && width) new_line(w);
    if (w->at + width > w->columns) {
        if (w->word_bytes && w->word_columns < w->at && w->word_columns + width <= w->columns) {
            move_word(w);
        } else {
            new_line(w);
            forget_word(w);
        }
    }
    fwrite(bytes, 1, n_bytes, w->out);
    w->at += width;
    /* a line may be broken before and behind a wide character: its script has no spaces */
    if (width > 1) {
        forget_word(w);
    } else if (w->word_bytes + n_bytes <= sizeof w->word) {
        memcpy(w->word + w->word_bytes, bytes, n_bytes);
        w->word_bytes += n_bytes;
        w->word_columns += width;
    }
}

static void put_character(struct cli_wrap *w, int32_t c, const char *bytes, size_t n_bytes)
{
    if (c == '\n') {
        new_line(w);
        forget_word(w);
    } else if (c == ' ') {
        put_space(w);
    } else if (c == '\t') {
        do put_space(w);
        while (w->at % 8 && !w->is_edge);
    } else if (c == '\r') {
        /* "\r\n" is one line end */
    } else if (c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0xFFFD) {
        put(w, 0xFFFD, "\xEF\xBF\xBD", 3);
    } else {
        put(w, c, bytes, n_bytes);
    }
}

void cli_wrap_text(struct cli_wrap *w, const void *text, size_t n_bytes)
{
    const char *p = text, *end = p + n_bytes;
    if (!w->columns) {
        fwrite(text, 1, n_bytes, w->out);
        return;
    }
    while (p < end) {
        size_t n;
        if (w->part_bytes || p + length_of((uint8_t)*p) > end) {
            w->part[w->part_bytes++] = *p++;
            if (w->part_bytes < length_of((uint8_t)w->part[0])) continue;
            for (size_t i = 0; i < w->part_bytes; i += n) {
                int32_t c = character(w->part + i, w->part_bytes - i, &n);
                put_character(w, c, w->part + i, n);
            }
            w->part_bytes = 0;
        } else {
            int32_t c = character(p, (size_t)(end - p), &n);
            put_character(w, c, p, n);
            p += n;
        }
    }
}

void cli_wrap_end(struct cli_wrap *w)
{
    new_line(w);
    forget_word(w);
}
