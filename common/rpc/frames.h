/* frames.h - bounds the HTTP/2 frames that a client sends, and hides new streams of a server that
 * goes away, before gRPC core reads them. Pure: no I/O, no clock, no lock. Internal to common/rpc
 * and its tests.
 *
 * Why here: gRPC core 1.51 stores each header of a block before it checks its limit of 16 KiB, and
 * it checks the limit only at the block's end. One byte of HPACK becomes 72 bytes of memory;
 * HEADERS without END_HEADERS followed by CONTINUATION frames took 4.5 GB for 64 MiB sent (1.1 GB
 * when each header is four bytes). Core enforces max_concurrent_streams only after the client's
 * SETTINGS ACK, and has no bound on RST_STREAM. So frame types and lengths are bounded here (RFC
 * 9113, section 4.1). Sources of the attacks: CVE-2024-27316 and its siblings (CONTINUATION),
 * CVE-2023-44487 (rapid reset).
 *
 * Hiding: core ends a call that it reads after its shutdown has begun with CANCELLED, which no
 * client repeats. A stream whose HEADERS core has never seen is above the last one that its GOAWAY
 * names, and every gRPC client opens that one again elsewhere (RFC 9113, section 6.8). So the type
 * of HEADERS and CONTINUATION is overwritten by one that no standard defines: who reads such a
 * frame ignores it (section 5.5), and core ignores the other frames of a stream that it does not
 * know. The HPACK state of the connection is of no use then, so no later block may be shown. */
#ifndef TD_RPC_FRAMES_H
#define TD_RPC_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    /* A block is HEADERS and its CONTINUATIONs. Core refuses one above 16 KiB of text with
     * RESOURCE_EXHAUSTED. HPACK is not longer than the text, so a client that sends four times as
     * much is not waiting for that answer. */
    TD_RPC_MAX_BLOCK_BYTES = 64 << 10,
    TD_RPC_MAX_BLOCK_FRAMES = 64, /* bounded as well, because empty frames cost core time, too */
    /* An incomplete block above this size is large, and few of those may exist (accept.c). Blocks
     * of our own clients are below 500 bytes. */
    TD_RPC_LARGE_BLOCK_BYTES = 1 << 10,
    /* Frames that cost the server work and the client nothing: RST_STREAM, SETTINGS, PRIORITY,
     * empty DATA without END_STREAM. This many may come at once, and then this many a second; a
     * client that cancels all its calls stays below it. */
    TD_RPC_CHEAP_FRAMES = 4096,
    TD_RPC_CHEAP_FRAMES_PER_S = 512,
};

struct td_rpc_frames {
    uint32_t max_unacked_streams; /* HEADERS before the client's SETTINGS ACK */
    uint8_t preface;              /* bytes of the client's preface seen */
    uint8_t n_head, head[9];
    uint32_t left; /* bytes of the frame's payload to come */
    bool hides;    /* header blocks that begin now are hidden; once set it stays */
    bool acked, in_block;
    bool is_hidden; /* the block, while in_block */
    uint32_t n_streams, block_bytes, block_frames;
    uint64_t n_shown; /* header blocks that began and were not hidden */
    double cheap; /* tokens left */
    uint64_t cheap_ns;
};

/* Checks the next bytes of a connection; NULL = they are allowed, otherwise why the connection must
 * end (a static string for the log). A new connection is a zeroed struct with max_unacked_streams
 * set. Types of hidden frames are overwritten in bytes. */
const char *td_rpc_frames_take(struct td_rpc_frames *frames, uint8_t *bytes, size_t n_bytes,
                               uint64_t now_ns);

/* True while the connection is inside a header block of which more than TD_RPC_LARGE_BLOCK_BYTES
 * have come. */
bool td_rpc_frames_in_large_block(const struct td_rpc_frames *frames);

#endif
