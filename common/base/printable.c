/* printable.c - see printable.h. */
#include "common/base/printable.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Bytes of the UTF-8 character at p; 0: there is none. */
static size_t character_bytes(const unsigned char *p)
{
    size_t n = *p >= 0xf5 ? 0 : *p >= 0xf0 ? 4 : *p >= 0xe0 ? 3 : *p >= 0xc2 ? 2 : *p < 0x80;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return n;
}

void td_make_printable(char *text)
{
    size_t n;
    for (unsigned char *p = (unsigned char *)text; *p; p += n) {
        n = character_bytes(p);
        bool is_c0 = n == 1 && (*p < 0x20 || *p == 0x7f),
             is_c1 = n == 2 && *p == 0xc2 && p[1] < 0xa0;
        if (n && !is_c0 && !is_c1) continue;
        if (!n) n = 1;
        memset(p, '?', n);
    }
}
