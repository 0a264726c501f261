/* unpack.c - gives protobuf-c a bump allocator with a budget, then walks over the string fields
 * once.
 *
 * Small messages fit the block and cost no malloc. A message of many small parts (the tokens of a
 * large step) continues in further blocks, each one malloc, and only what is long is a chunk of its
 * own. Under AddressSanitizer there is no
 * block: each allocation is its own, so that a pointer kept after the callback is found. The
 * allocator's free() does nothing; reset drops the whole message. The budget counts everything that
 * was ever asked for one message, so memory given back during a failing parse still counts. */
#include "common/rpc/unpack.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/sanitizers.h"
#include "common/rpc/rpc.h"

enum { CHUNK_HEAD = 16, LONG_SHARE = 8 }; /* above this share of a block: a chunk of its own */
#ifdef TD_WITH_ASAN
enum { BLOCK_BYTES = 0 };
#else
enum { BLOCK_BYTES = 64 << 10 };
#endif

struct td_rpc_unpack_chunk {
    struct td_rpc_unpack_chunk *next;
};
_Static_assert(sizeof(struct td_rpc_unpack_chunk) <= CHUNK_HEAD,
               "data after a chunk's head stays 16-byte aligned");

static void *unpack_alloc(void *data, size_t bytes)
{
    struct td_rpc_unpacker *u = data;
    size_t take = (bytes + 15) & ~(size_t)15;
    if (take < bytes || take + CHUNK_HEAD > u->max_bytes - u->used_bytes) {
        u->exhausted = true;
        return NULL;
    }
    if (take <= u->block_bytes - u->block_used) {
        void *at = u->block + u->block_used;
        u->block_used += take;
        u->used_bytes += take;
        return at;
    }
    bool is_small = take <= u->own_bytes / LONG_SHARE;
    size_t chunk_bytes = is_small ? u->own_bytes : bytes;
    struct td_rpc_unpack_chunk *chunk = malloc(CHUNK_HEAD + chunk_bytes);
    if (!chunk) {
        u->exhausted = true;
        return NULL;
    }
    u->used_bytes += take + CHUNK_HEAD;
    chunk->next = u->chunks;
    u->chunks = chunk;
    uint8_t *at = (uint8_t *)chunk + CHUNK_HEAD;
    if (is_small) {
        u->block = at;
        u->block_bytes = chunk_bytes;
        u->block_used = take;
    }
    return at;
}

static void unpack_free(void *data, void *pointer)
{
    (void)data;
    (void)pointer;
}

void td_rpc_unpacker_init(struct td_rpc_unpacker *unpacker)
{
    memset(unpacker, 0, sizeof *unpacker);
    unpacker->allocator = (ProtobufCAllocator){unpack_alloc, unpack_free, unpacker};
    unpacker->own_bytes = BLOCK_BYTES;
    if (unpacker->own_bytes > 0) unpacker->own = malloc(unpacker->own_bytes);
    if (!unpacker->own) unpacker->own_bytes = 0; /* every allocation gets its own chunk */
    unpacker->block = unpacker->own;
    unpacker->block_bytes = unpacker->own_bytes;
}

void td_rpc_unpack_reset(struct td_rpc_unpacker *unpacker)
{
    while (unpacker->chunks) {
        struct td_rpc_unpack_chunk *chunk = unpacker->chunks;
        unpacker->chunks = chunk->next;
        free(chunk);
    }
    unpacker->block = unpacker->own;
    unpacker->block_bytes = unpacker->own_bytes;
    unpacker->block_used = 0;
    unpacker->used_bytes = 0;
    unpacker->exhausted = false;
}

void td_rpc_unpacker_close(struct td_rpc_unpacker *unpacker)
{
    td_rpc_unpack_reset(unpacker);
    free(unpacker->own);
    unpacker->own = unpacker->block = NULL;
    unpacker->own_bytes = unpacker->block_bytes = 0;
}

/* Well-formed UTF-8 as Unicode defines it: shortest forms only, no surrogates, at most U+10FFFF. */
bool td_rpc_utf8_valid(const void *text, size_t n_bytes)
{
    const uint8_t *s = text;
    size_t i = 0;
    while (i < n_bytes) {
        uint8_t c = s[i];
        if (c < 0x80) {
            i++;
            continue;
        }
        size_t n;
        uint8_t low = 0x80, high = 0xbf; /* the range allowed for the second byte */
        if (c >= 0xc2 && c <= 0xdf)
            n = 2;
        else if (c >= 0xe0 && c <= 0xef) {
            n = 3;
            if (c == 0xe0) low = 0xa0;
            if (c == 0xed) high = 0x9f;
        } else if (c >= 0xf0 && c <= 0xf4) {
            n = 4;
            if (c == 0xf0) low = 0x90;
            if (c == 0xf4) high = 0x8f;
        } else
            return false;
        if (n > n_bytes - i || s[i + 1] < low || s[i + 1] > high) return false;
        for (size_t k = 2; k < n; k++)
            if (s[i + k] < 0x80 || s[i + k] > 0xbf) return false;
        i += n;
    }
    return true;
}

/* The first string field that is not UTF-8, or NULL. */
static const char *find_bad_text(const ProtobufCMessage *msg)
{
    const ProtobufCMessageDescriptor *type = msg->descriptor;
    for (unsigned f = 0; f < type->n_fields; f++) {
        const ProtobufCFieldDescriptor *field = &type->fields[f];
        if (field->type != PROTOBUF_C_TYPE_STRING && field->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        const char *base = (const char *)msg;
        size_t n = 1;
        const char *at = base + field->offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            memcpy(&n, base + field->quantifier_offset, sizeof n);
            const void *list;
            memcpy(&list, at, sizeof list);
            at = list;
        } else if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
            uint32_t chosen;
            memcpy(&chosen, base + field->quantifier_offset, sizeof chosen);
            n = chosen == field->id;
        }
        for (size_t i = 0; i < n; i++) {
            const void *member;
            memcpy(&member, at + i * sizeof member, sizeof member);
            if (!member) continue;
            if (field->type == PROTOBUF_C_TYPE_STRING) {
                if (!td_rpc_utf8_valid(member, strlen(member))) return field->name;
            } else {
                const char *bad = find_bad_text(member);
                if (bad) return bad;
            }
        }
    }
    return NULL;
}

td_status td_rpc_unpack(struct td_rpc_unpacker *unpacker, const ProtobufCMessageDescriptor *type,
                        const uint8_t *bytes, size_t n_bytes, size_t max_bytes,
                        const ProtobufCMessage **ret_msg, struct td_err *err)
{
    td_rpc_unpack_reset(unpacker);
    unpacker->max_bytes = max_bytes;
    /* An empty body may come as NULL, which protobuf-c must not see. */
    ProtobufCMessage *msg = protobuf_c_message_unpack(type, &unpacker->allocator, n_bytes,
                                                      n_bytes ? bytes : (const uint8_t *)"");
    if (!msg) {
        bool exhausted = unpacker->exhausted;
        td_rpc_unpack_reset(unpacker);
        if (exhausted)
            return td_fail(err, TD_ERR_LIMIT,
                           "%s: %zu bytes need more than %zu bytes of memory to unpack", type->name,
                           n_bytes, max_bytes);
        return td_fail(err, TD_ERR_INVALID, "%s: %zu bytes that are not this message", type->name,
                       n_bytes);
    }
    const char *bad = find_bad_text(msg);
    if (bad) {
        td_rpc_unpack_reset(unpacker);
        return td_fail(err, TD_ERR_INVALID, "%s: field %s is not valid UTF-8", type->name, bad);
    }
    *ret_msg = msg;
    return TD_OK;
}
