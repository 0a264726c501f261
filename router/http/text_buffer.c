/* text_buffer.c - see text_buffer.h. */
#include "router/http/text_buffer.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool reserve(struct text_buffer *b, size_t more)
{
    if (b->failed) return false;
    if (b->capacity - b->n >= more) return true;
    size_t capacity = b->capacity ? b->capacity : 256;
    while (capacity - b->n < more) capacity *= 2;
    char *bytes = realloc(b->bytes, capacity);
    if (!bytes) {
        b->failed = true;
        return false;
    }
    b->bytes = bytes;
    b->capacity = capacity;
    return true;
}

void text_add(struct text_buffer *b, const char *bytes, size_t n)
{
    if (n == 0 || !reserve(b, n)) return;
    memcpy(b->bytes + b->n, bytes, n);
    b->n += n;
}

void text_addf(struct text_buffer *b, const char *format, ...)
{
    char small[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(small, sizeof small, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof small) {
        text_add(b, small, (size_t)n);
        return;
    }
    if (n < 0 || !reserve(b, (size_t)n + 1)) return;
    va_start(args, format);
    vsnprintf(b->bytes + b->n, (size_t)n + 1, format, args);
    va_end(args);
    b->n += (size_t)n;
}

/* Bytes of the UTF-8 character at p (1..4), or 0. */
static size_t utf8_length(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80) return 1;
    size_t len = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || len > n) return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return len;
}

void text_add_json(struct text_buffer *b, const char *bytes, size_t n)
{
    const uint8_t *p = (const uint8_t *)bytes;
    text_add(b, "\"", 1);
    for (size_t i = 0; i < n;) {
        size_t len = utf8_length(p + i, n - i);
        if (len == 0) {
            text_add(b, "\\ufffd", 6);
            i++;
            continue;
        }
        uint8_t c = p[i];
        if (c == '"' || c == '\\')
            text_addf(b, "\\%c", c);
        else if (c == '\n')
            text_add(b, "\\n", 2);
        else if (c < 0x20 || c == 0x7f)
            text_addf(b, "\\u%04x", c);
        else
            text_add(b, bytes + i, len);
        i += len;
    }
    text_add(b, "\"", 1);
}

void text_free(struct text_buffer *b)
{
    free(b->bytes);
    *b = (struct text_buffer){0};
}
