/* records.c - a parser of record heads with two states: inside the five bytes of a record's head,
 * or inside the record. */
#include "common/rpc/records.h"

enum { APPLICATION_DATA = 23 };

bool td_rpc_records_take(struct td_rpc_records *r, const uint8_t *bytes, size_t n_bytes)
{
    const uint8_t *end = bytes + n_bytes;
    while (bytes < end) {
        if (r->left) {
            size_t n = (size_t)(end - bytes) < r->left ? (size_t)(end - bytes) : r->left;
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
