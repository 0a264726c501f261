/* tokenizer_text.c - buffers, pieces, UTF-8 and byte-level characters. Nothing here allocates but
 * the growing arrays, which double. */
#include "common/text/tokenizer_text.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

struct td_tok_budget td_tok_budget_of(size_t n_bytes)
{
    if (n_bytes > TD_TOK_TEXT_MAX_BYTES) n_bytes = TD_TOK_TEXT_MAX_BYTES;
    size_t text = TD_TOK_TEXT_BASE_BYTES + TD_TOK_TEXT_TIMES * n_bytes;
    return (struct td_tok_budget){
        .max_text_bytes = text < TD_TOK_TEXT_MAX_BYTES ? text : TD_TOK_TEXT_MAX_BYTES,
        .max_heap_bytes = TD_TOK_HEAP_BASE_BYTES + TD_TOK_HEAP_TIMES * n_bytes};
}

void *td_tok_grow(struct td_tok_budget *budget, void *p, size_t old_bytes, size_t new_bytes,
                  td_status *ret_status)
{
    if (budget && budget->heap_bytes + (new_bytes - old_bytes) > budget->max_heap_bytes) {
        budget->heap_over = true;
        *ret_status = TD_ERR_LIMIT;
        return NULL;
    }
    void *grown = realloc(p, new_bytes);
    if (!grown) {
        *ret_status = TD_ERR_NOMEM;
    } else if (budget) {
        budget->heap_bytes += new_bytes - old_bytes;
        if (budget->heap_bytes > budget->peak_bytes) budget->peak_bytes = budget->heap_bytes;
    }
    return grown;
}

void td_tok_release(struct td_tok_budget *budget, void *p, size_t bytes)
{
    free(p);
    if (!budget) return;
    TD_ASSERT(bytes <= budget->heap_bytes);
    budget->heap_bytes -= bytes;
}

td_status td_tok_buf_append(struct td_tok_buf *b, const void *bytes, size_t n)
{
    size_t limit = b->budget ? b->budget->max_text_bytes : TD_TOK_TEXT_MAX_BYTES;
    if (n > limit - b->n) {
        if (b->budget) b->budget->text_over = true;
        return TD_ERR_LIMIT;
    }
    if (b->n + n > b->capacity) {
        size_t capacity = b->capacity ? b->capacity * 2 : 64;
        while (capacity < b->n + n) capacity *= 2;
        td_status s;
        char *grown = td_tok_grow(b->budget, b->bytes, b->capacity, capacity, &s);
        if (!grown) return s;
        b->bytes = grown;
        b->capacity = capacity;
    }
    if (n) memcpy(b->bytes + b->n, bytes, n);
    b->n += n;
    return TD_OK;
}

td_status td_tok_buf_append_cp(struct td_tok_buf *b, uint32_t cp)
{
    char utf8[4];
    return td_tok_buf_append(b, utf8, (size_t)td_utf8_put(cp, utf8));
}

void td_tok_buf_free(struct td_tok_buf *b)
{
    td_tok_release(b->budget, b->bytes, b->capacity);
    *b = (struct td_tok_buf){0};
}

td_status td_tok_text_add_piece(struct td_tok_text *t, size_t start, size_t n, int32_t id,
                                bool first)
{
    if (!n && id < 0) return TD_OK;
    if (t->n == t->capacity) {
        size_t capacity = t->capacity ? t->capacity * 2 : 16;
        td_status s;
        struct td_tok_piece *grown = td_tok_grow(
            t->buf.budget, t->pieces, t->capacity * sizeof *grown, capacity * sizeof *grown, &s);
        if (!grown) return s;
        t->pieces = grown;
        t->capacity = capacity;
    }
    t->pieces[t->n++] = (struct td_tok_piece){(uint32_t)start, (uint32_t)n, id, first};
    return TD_OK;
}

void td_tok_text_clear(struct td_tok_text *t)
{
    t->buf.n = 0;
    t->n = 0;
}

void td_tok_text_free(struct td_tok_text *t)
{
    td_tok_release(t->buf.budget, t->pieces, t->capacity * sizeof *t->pieces);
    td_tok_buf_free(&t->buf);
    *t = (struct td_tok_text){0};
}

int td_utf8_next(const char *s, size_t n, uint32_t *ret_cp)
{
    const uint8_t *u = (const uint8_t *)s;
    uint8_t lead = u[0];
    if (lead < 0x80) {
        *ret_cp = lead;
        return 1;
    }
    int len = lead >= 0xC2 && lead <= 0xDF   ? 2
              : lead >= 0xE0 && lead <= 0xEF ? 3
              : lead >= 0xF0 && lead <= 0xF4 ? 4
                                             : 0;
    if (!len) return -1;
    /* The range of the second byte excludes overlong forms, surrogates and values past U+10FFFF. */
    uint8_t low = lead == 0xE0   ? 0xA0
                  : lead == 0xF0 ? 0x90
                                 : 0x80,
            high = lead == 0xED   ? 0x9F
                   : lead == 0xF4 ? 0x8F
                                  : 0xBF;
    uint32_t cp = lead & (0xFFu >> (len + 1));
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n) return 0;
        if (u[i] < low || u[i] > high) return -i;
        cp = cp << 6 | (u[i] & 0x3Fu);
        low = 0x80, high = 0xBF;
    }
    *ret_cp = cp;
    return len;
}

size_t td_utf8_before(const char *s, size_t at, uint32_t *ret_cp)
{
    size_t start = at - 1;
    while (start > 0 && ((uint8_t)s[start] & 0xC0) == 0x80) start--;
    if (td_utf8_next(s + start, at - start, ret_cp) <= 0) *ret_cp = 0xFFFD;
    return start;
}

int td_utf8_put(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    int len = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = len - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)((0xF00 >> len & 0xFF) | cp);
    return len;
}

bool td_utf8_valid(const char *s, size_t n, size_t *ret_at)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = td_utf8_next(s + i, n - i, &cp);
        if (len <= 0) {
            *ret_at = i;
            return false;
        }
        i += (size_t)len;
    }
    return true;
}

/* Bytes with a visible Latin-1 character stand for themselves; the other 68 take U+0100 and up,
 * in order. */
static bool byte_is_visible(uint32_t b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

uint32_t td_byte_to_cp(uint8_t byte)
{
    if (byte_is_visible(byte)) return byte;
    return byte <= 0x20 ? 0x100u + byte : byte <= 0xA0 ? 0x100u + 33 + (byte - 0x7Fu) : 0x100u + 67;
}

int td_cp_to_byte(uint32_t cp)
{
    if (cp < 0x100) return byte_is_visible(cp) ? (int)cp : -1;
    if (cp > 0x143) return -1;
    cp -= 0x100;
    return cp <= 32 ? (int)cp : cp <= 66 ? (int)(cp - 33 + 0x7F) : 0xAD;
}

bool td_cp_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == 0x20 || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

bool td_cp_is_word(uint32_t cp)
{
    /* Alphabetic outside L, M and Nl is these circled and squared letters; the joiners are
       Join_Control. */
    if ((cp >= 0x24B6 && cp <= 0x24E9) || (cp >= 0x1F130 && cp <= 0x1F149) ||
        (cp >= 0x1F150 && cp <= 0x1F169) || (cp >= 0x1F170 && cp <= 0x1F189) || cp == 0x200C ||
        cp == 0x200D) {
        return true;
    }
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return false;
    }
}
