/* say.c - see say.h. */
#include "common/base/say.h"

#include <locale.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

unsigned td_terminal_columns(FILE *f)
{
    struct winsize size = {0};
    int fd = fileno(f);
    if (fd < 0 || !isatty(fd)) return 0;
    unsigned n = ioctl(fd, TIOCGWINSZ, &size) ? 0 : size.ws_col;
    if (n == 0) n = 80; /* a serial line, say, that does not know */
    return n < 20 ? 20 : n;
}

/* Columns that the bytes take, in the locale of say_text. Bytes that are no character take one. */
static unsigned width_of(const char *text, size_t n_bytes)
{
    mbstate_t state = {0};
    unsigned width = 0;
    for (size_t i = 0; i < n_bytes;) {
        wchar_t c;
        size_t n = mbrtowc(&c, text + i, n_bytes - i, &state);
        if (n == 0 || n > n_bytes) { /* a zero byte, or none that begins a character */
            memset(&state, 0, sizeof state);
            n = 1;
            c = '?';
        }
        int columns = wcwidth(c);
        width += columns < 0 ? 1 : (unsigned)columns;
        i += n;
    }
    return width;
}

struct place {
    FILE *out;
    unsigned columns, indent, at;
};

static void next_line(struct place *p)
{
    fprintf(p->out, "\n%*s", (int)p->indent, "");
    p->at = p->indent;
}

/* A word at p. One that is too long for the line may end after each '|' in it. */
static void say_word(struct place *p, const char *word, size_t n_bytes)
{
    while (n_bytes && p->at + width_of(word, n_bytes) > p->columns) {
        size_t n = n_bytes;
        do {
            n--;
            while (n > 0 && word[n - 1] != '|') n--;
        } while (n > 0 && p->at + width_of(word, n) > p->columns);
        if (n == 0) break;
        fwrite(word, 1, n, p->out);
        next_line(p);
        word += n;
        n_bytes -= n;
    }
    fwrite(word, 1, n_bytes, p->out);
    p->at += width_of(word, n_bytes);
}

static void say_line(struct place p, const char *line, size_t n_bytes)
{
    size_t i = 0, own = 0;
    while (own < n_bytes && line[own] == ' ') own++;
    if (own > p.indent) p.indent = (unsigned)own;
    if (p.indent > p.columns / 2) p.indent = p.columns / 2;
    while (i < n_bytes) {
        size_t gap = 0, word = 0;
        while (i + gap < n_bytes && line[i + gap] == ' ') gap++;
        while (i + gap + word < n_bytes && line[i + gap + word] != ' ') word++;
        bool fits = p.at + gap + width_of(line + i + gap, word) <= p.columns;
        if (!fits && p.at + gap > p.indent && word) {
            next_line(&p);
        } else if (p.at + gap <= p.columns) {
            fprintf(p.out, "%*s", (int)gap, "");
            p.at += (unsigned)gap;
        }
        say_word(&p, line + i + gap, word);
        i += gap + word;
    }
}

static void say_text(FILE *out, unsigned columns, unsigned indent, const char *text)
{
    locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0), before = (locale_t)0;
    if (utf8) before = uselocale(utf8);
    while (*text) {
        size_t n = strcspn(text, "\n");
        say_line((struct place){.out = out, .columns = columns, .indent = indent}, text, n);
        if (text[n]) fputc('\n', out);
        text += n + (text[n] == '\n');
    }
    if (utf8) {
        uselocale(before);
        freelocale(utf8);
    }
}

void td_say(FILE *out, unsigned indent, const char *format, ...)
{
    unsigned columns = td_terminal_columns(out);
    char *text = NULL;
    va_list ap;
    va_start(ap, format);
    int n = columns ? vasprintf(&text, format, ap) : vfprintf(out, format, ap);
    va_end(ap);
    if (columns && n >= 0) {
        say_text(out, columns, indent, text);
        free(text);
    }
    fflush(out);
}

FILE *td_said_open(struct td_said *s, FILE *out, unsigned indent)
{
    *s = (struct td_said){.out = out, .indent = indent};
    if (td_terminal_columns(out)) s->f = open_memstream(&s->text, &s->n_bytes);
    return s->f ? s->f : out;
}

void td_said_close(struct td_said *s)
{
    if (!s->f) return;
    if (!fclose(s->f)) say_text(s->out, td_terminal_columns(s->out), s->indent, s->text);
    free(s->text);
    fflush(s->out);
}
