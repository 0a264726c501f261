/* frames.c - a parser of frame heads with two states: inside the nine bytes of a frame's head, or
 * inside its payload. */
#include "common/rpc/frames.h"

#include <string.h>

enum { DATA = 0, HEADERS = 1, PRIORITY = 2, RST_STREAM = 3, SETTINGS = 4, CONTINUATION = 9 };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };
enum { PREFACE_BYTES = 24, TYPE_AT = 3 };
/* 0xf0 to 0xff are for experiments (RFC 7540, section 11.2): no standard will define it. */
enum { UNKNOWN = 0xf0 };

static const char *take_cheap(struct td_rpc_frames *f, uint64_t now_ns)
{
    if (!f->cheap_ns)
        f->cheap = TD_RPC_CHEAP_FRAMES;
    else if (now_ns > f->cheap_ns)
        f->cheap += (double)(now_ns - f->cheap_ns) * 1e-9 * TD_RPC_CHEAP_FRAMES_PER_S;
    if (f->cheap > TD_RPC_CHEAP_FRAMES) f->cheap = TD_RPC_CHEAP_FRAMES;
    f->cheap_ns = now_ns;
    f->cheap -= 1;
    return f->cheap < 0 ? "cheap_frames" : NULL;
}

/* *type, a byte that core is about to read, is a frame's type. It is decided here, not at the end
 * of the head: core may get the type now and the rest with its next read. */
static void show_or_hide(struct td_rpc_frames *f, uint8_t *type)
{
    if (*type == HEADERS && !f->in_block) {
        f->is_hidden = f->hides;
        if (!f->is_hidden) f->n_shown++;
    } else if (*type != CONTINUATION || !f->in_block) {
        return;
    }
    if (f->is_hidden) *type = UNKNOWN;
}

static const char *begin_frame(struct td_rpc_frames *f, uint64_t now_ns)
{
    uint8_t type = f->head[3], flags = f->head[4];
    f->left = (uint32_t)f->head[0] << 16 | (uint32_t)f->head[1] << 8 | f->head[2];
    f->n_head = 0;
    if (f->in_block && type != CONTINUATION) /* core ends such a connection if it sees the block */
        return f->is_hidden ? "frame_in_hidden_block" : NULL;
    switch (type) {
    case HEADERS:
        f->in_block = true;
        f->block_bytes = f->block_frames = 0;
        if (!f->acked && ++f->n_streams > f->max_unacked_streams)
            return "streams_before_settings_ack";
        break;
    case CONTINUATION:
        if (!f->in_block) return NULL; /* core's, too */
        if (++f->block_frames > TD_RPC_MAX_BLOCK_FRAMES) return "continuation_frames";
        break;
    case SETTINGS:
        if (!(flags & ACK)) return take_cheap(f, now_ns);
        f->acked = true;
        return NULL;
    case DATA:
        return f->left == 0 && !(flags & END_STREAM) ? take_cheap(f, now_ns) : NULL;
    case RST_STREAM:
    case PRIORITY:
        return take_cheap(f, now_ns);
    default:
        return NULL;
    }
    return NULL;
}

/* The last byte of a frame has come. */
static void end_frame(struct td_rpc_frames *f)
{
    if ((f->head[3] == HEADERS || f->head[3] == CONTINUATION) && f->head[4] & END_HEADERS)
        f->in_block = false;
}

const char *td_rpc_frames_take(struct td_rpc_frames *f, uint8_t *bytes, size_t n_bytes,
                               uint64_t now_ns)
{
    uint8_t *end = bytes + n_bytes;
    size_t skip = PREFACE_BYTES - f->preface;
    if (skip > n_bytes) skip = n_bytes;
    f->preface = (uint8_t)(f->preface + skip);
    bytes += skip;
    while (bytes < end) {
        if (f->left) {
            size_t n = (size_t)(end - bytes) < f->left ? (size_t)(end - bytes) : f->left;
            f->left -= (uint32_t)n;
            bytes += n;
            if (f->in_block && (f->block_bytes += (uint32_t)n) > TD_RPC_MAX_BLOCK_BYTES)
                return "header_block_bytes";
            if (!f->left) end_frame(f);
            continue;
        }
        f->head[f->n_head] = *bytes;
        if (f->n_head == TYPE_AT) show_or_hide(f, bytes);
        f->n_head++;
        bytes++;
        if (f->n_head < sizeof f->head) continue;
        const char *why = begin_frame(f, now_ns);
        if (why) return why;
        if (!f->left) end_frame(f);
    }
    return NULL;
}

bool td_rpc_frames_in_large_block(const struct td_rpc_frames *f)
{
    return f->in_block && f->block_bytes > TD_RPC_LARGE_BLOCK_BYTES;
}
