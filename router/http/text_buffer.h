/* text_buffer.h - a growing text for answers: JSON and server-sent events are appended to it.
 *
 * A failed allocation sets `failed` and every later append does nothing, so callers look once, at
 * the end. Owner: whoever holds it; one thread at a time. */
#ifndef TD_ROUTER_HTTP_TEXT_BUFFER_H
#define TD_ROUTER_HTTP_TEXT_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct text_buffer {
    char *bytes; /* malloc'd; no terminating NUL */
    size_t n, capacity;
    bool failed;
};

void text_add(struct text_buffer *b, const char *bytes, size_t n);
/* A literal, whose length is known when this is compiled. */
#define text_adds(b, literal) text_add(b, "" literal, sizeof(literal) - 1)
void text_addf(struct text_buffer *b, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void text_add_u64(struct text_buffer *b, uint64_t x); /* in decimal */
/* The bytes as a JSON string with its quotes. What is not UTF-8 becomes U+FFFD, one for each
 * longest beginning of a character (common/text/tokenizer_text.h). */
void text_add_json(struct text_buffer *b, const char *bytes, size_t n);
void text_free(struct text_buffer *b);

#endif
