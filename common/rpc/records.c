/* records.c - a parser of record heads with two states: inside the five bytes of a record's head,
 * or inside the record. */
#include "common/rpc/records.h"

#include <string.h>

enum { HANDSHAKE = 22, APPLICATION_DATA = 23 };

static void keep_hello(struct td_rpc_records *r, const uint8_t *bytes, size_t n_bytes)
{
    size_t n = sizeof r->hello - r->n_hello;
    if (r->head[0] != HANDSHAKE || n == 0) return;
    if (n > n_bytes) n = n_bytes;
    memcpy(r->hello + r->n_hello, bytes, n);
    r->n_hello = (uint8_t)(r->n_hello + n);
}

bool td_rpc_records_take(struct td_rpc_records *r, const uint8_t *bytes, size_t n_bytes)
{
    const uint8_t *end = bytes + n_bytes;
    while (bytes < end) {
        if (r->left) {
            size_t n = (size_t)(end - bytes) < r->left ? (size_t)(end - bytes) : r->left;
            keep_hello(r, bytes, n);
            r->left -= (uint32_t)n;
            bytes += n;
            continue;
        }
        r->head[r->n_head++] = *bytes++;
        if (r->n_head < sizeof r->head) continue;
        if (r->head[0] == APPLICATION_DATA) return true;
        r->n_head = 0;
        r->left = (uint32_t)r->head[3] << 8 | r->head[4];
    }
    return false;
}

bool td_rpc_records_is_random(const struct td_rpc_records *r,
                              const uint8_t random[TD_RPC_RANDOM_BYTES])
{
    return r->n_hello == sizeof r->hello &&
           memcmp(r->hello + TD_RPC_RANDOM_AT, random, TD_RPC_RANDOM_BYTES) == 0;
}
