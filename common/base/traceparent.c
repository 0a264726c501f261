/* traceparent.c - reads from left to right; every byte is looked at before the next one. */
#include "common/base/traceparent.h"

#include <stddef.h>
#include <string.h>

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads n bytes as 2 n digits, and moves *text behind them. */
static bool read_bytes(const char **text, uint8_t *ret, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int high = digit((*text)[0]), low = high < 0 ? -1 : digit((*text)[1]);
        if (low < 0) return false;
        ret[i] = (uint8_t)(high * 16 + low);
        *text += 2;
    }
    return true;
}

static bool read_dash(const char **text)
{
    if (**text != '-') return false;
    ++*text;
    return true;
}

static bool is_zero(const uint8_t *bytes, size_t n)
{
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++) any |= bytes[i];
    return !any;
}

bool td_traceparent_parse(const char *text, struct td_traceparent *ret)
{
    struct td_traceparent t;
    uint8_t version, flags;
    if (!read_bytes(&text, &version, 1) || !read_dash(&text) ||
        !read_bytes(&text, t.trace_id, sizeof t.trace_id) || !read_dash(&text) ||
        !read_bytes(&text, t.parent_id, sizeof t.parent_id) || !read_dash(&text) ||
        !read_bytes(&text, &flags, 1))
        return false;
    bool ends_well = !*text || (version > 0 && *text == '-');
    if (version == 0xff || !ends_well || is_zero(t.trace_id, sizeof t.trace_id) ||
        is_zero(t.parent_id, sizeof t.parent_id))
        return false;
    t.is_sampled = flags & 1;
    *ret = t;
    return true;
}
