/* text_buffer.c - see text_buffer.h. */
#include "router/http/text_buffer.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_text.h"

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

void text_add_u64(struct text_buffer *b, uint64_t x)
{
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + x % 10);
    } while (x /= 10);
    text_add(b, digits + at, sizeof digits - at);
}

/* Bytes from the beginning that JSON has as they are. */
static size_t n_plain(const char *bytes, size_t n)
{
    size_t i = 0;
    while (i < n && bytes[i] >= ' ' && bytes[i] < 0x7f && bytes[i] != '"' && bytes[i] != '\\') i++;
    return i;
}

void text_add_json(struct text_buffer *b, const char *bytes, size_t n)
{
    text_add(b, "\"", 1);
    for (size_t i = 0; i < n;) {
        size_t plain = n_plain(bytes + i, n - i);
        text_add(b, bytes + i, plain);
        i += plain;
        if (i == n) break;
        uint32_t c;
        int len = td_utf8_next(bytes + i, n - i, &c);
        if (len <= 0) { /* no character, or one that is cut off by the end */
            text_add(b, "\\ufffd", 6);
            i += len ? (size_t)-len : n - i;
            continue;
        }
        if (c == '"' || c == '\\')
            text_addf(b, "\\%c", (char)c);
        else if (c == '\n')
            text_add(b, "\\n", 2);
        else if (c < 0x20 || c == 0x7f)
            text_addf(b, "\\u%04x", c);
        else
            text_add(b, bytes + i, (size_t)len);
        i += (size_t)len;
    }
    text_add(b, "\"", 1);
}

void text_free(struct text_buffer *b)
{
    free(b->bytes);
    *b = (struct text_buffer){0};
}
