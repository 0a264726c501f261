/* rpc_frames_fuzz.c - the counter of HTTP/2 frames (common/rpc/frames.h). The first byte says in
 * which pieces the rest comes.
 *
 * However the bytes are cut, the verdict, the state after each and what core would read are the
 * same; a block never holds more than its bound. Header blocks are hidden when the first byte is
 * odd: then none is shown. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/frames.h"

enum { MAX_STREAMS = 8, NOW_NS = 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void check(const struct td_rpc_frames *f)
{
    if (f->n_head >= sizeof f->head || f->preface > 24) abort();
    if (f->in_block && f->block_bytes > TD_RPC_MAX_BLOCK_BYTES) abort();
    if (f->block_frames > TD_RPC_MAX_BLOCK_FRAMES) abort();
    if (!f->acked && f->n_streams > MAX_STREAMS) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 2) return 0;
    size_t piece = (size_t)data[0] + 1;
    const uint8_t *bytes = data + 1;
    n_bytes--;
    struct td_rpc_frames whole, cut;
    memset(&whole, 0, sizeof whole); /* padding too: the states are compared as bytes */
    memset(&cut, 0, sizeof cut);
    whole.max_unacked_streams = cut.max_unacked_streams = MAX_STREAMS;
    whole.hides = cut.hides = data[0] & 1;
    uint8_t *read = malloc(2 * n_bytes), *read_cut = read + n_bytes; /* they are overwritten */
    if (!read) abort();
    memcpy(read, bytes, n_bytes);
    memcpy(read_cut, bytes, n_bytes);
    const char *why = td_rpc_frames_take(&whole, read, n_bytes, NOW_NS), *why_cut = NULL;
    for (size_t at = 0; at < n_bytes && !why_cut; at += piece) {
        size_t n = n_bytes - at < piece ? n_bytes - at : piece;
        why_cut = td_rpc_frames_take(&cut, read_cut + at, n, NOW_NS);
        if (!why_cut) check(&cut);
    }
    if (!why != !why_cut || (why && strcmp(why, why_cut) != 0)) abort();
    if (memcmp(read, read_cut, n_bytes) != 0) abort();
    if (whole.n_shown != cut.n_shown || (whole.hides && whole.n_shown)) abort();
    free(read);
    if (why) return 0;
    check(&whole);
    if (memcmp(&whole, &cut, sizeof whole) != 0) abort();
    return 0;
}
