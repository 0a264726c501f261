/* frames.h - the HTTP/2 frames that a client sends, counted before gRPC core reads them. Pure: no
 * I/O, no clock, no lock. Internal to common/rpc and its tests.
 *
 * gRPC core 1.51 stores each header of a block before it looks at its limit of 16 KiB, and sees
 * the limit only at the block's end: one byte of HPACK becomes 72 bytes of memory, and HEADERS
 * without END_HEADERS followed by CONTINUATION frames took 4.5 GB for 64 MiB sent (1.1 GB when
 * each header is four bytes). It enforces max_concurrent_streams only after the client's
 * SETTINGS ACK, and has no bound on RST_STREAM. So what a client may send is bounded here, by
 * frame types and lengths alone (RFC 9113, section 4.1). Sources of the attacks: CVE-2024-27316
 * and its siblings (CONTINUATION), CVE-2023-44487 (rapid reset). */
#ifndef TD_RPC_FRAMES_H
#define TD_RPC_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    /* A block is HEADERS and its CONTINUATIONs. Core refuses one above 16 KiB of text with
     * RESOURCE_EXHAUSTED; HPACK is not longer than the text, so who sends four times as much
     * does not wait for that answer. */
    TD_RPC_MAX_BLOCK_BYTES = 64 << 10,
    TD_RPC_MAX_BLOCK_FRAMES = 64, /* empty ones cost core time too */
    /* Above this a block that is not complete counts as large: it is one of few (accept.c). Ours
       are below 500 bytes. */
    TD_RPC_LARGE_BLOCK_BYTES = 1 << 10,
    /* Frames that cost the server work and the client nothing: RST_STREAM, SETTINGS, PRIORITY,
     * empty DATA without END_STREAM. So many at once, and then so many a second. A client that
     * cancels all its calls is within it. */
    TD_RPC_CHEAP_FRAMES = 4096,
    TD_RPC_CHEAP_FRAMES_PER_S = 512,
};

struct td_rpc_frames {
    uint32_t max_unacked_streams; /* HEADERS before the client's SETTINGS ACK */
    uint8_t preface;              /* bytes of it seen */
    uint8_t n_head, head[9];
    uint32_t left; /* bytes of the frame's payload to come */
    bool acked, in_block;
    uint32_t n_streams, block_bytes, block_frames;
    double cheap; /* tokens left */
    uint64_t cheap_ns;
};

/* Zeroed, then max_unacked_streams set, is a new connection. Takes the next bytes of it; NULL =
 * well, else why the connection must end (a static word for the log). */
const char *td_rpc_frames_take(struct td_rpc_frames *frames, const uint8_t *bytes, size_t n_bytes,
                               uint64_t now_ns);

/* The connection is inside a header block of which more than TD_RPC_LARGE_BLOCK_BYTES have come. */
bool td_rpc_frames_in_large_block(const struct td_rpc_frames *frames);

#endif
