/* scan.c - one walk over tags and lengths; payloads are skipped, and packed numbers are counted by
 * their last bytes.
 *
 * The same member may come many times (protobuf merges them), so counts are of the whole message,
 * not of one member. */
#include "common/rpc/scan.h"

#include <string.h>

enum { MAX_LIMITS = 16, VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

struct walk {
    const struct td_rpc_field_limit *limits;
    size_t n_limits;
    uint64_t counts[MAX_LIMITS];
};

/* Reads a varint; false: there is none here. */
static bool take_varint(const uint8_t **at, const uint8_t *end, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned shift = 0; *at < end && shift < 64; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

static bool is_limited_type(const struct walk *w, const ProtobufCMessageDescriptor *type)
{
    for (size_t i = 0; i < w->n_limits; i++)
        if (w->limits[i].type == type) return true;
    return false;
}

/* The number of elements in a length-delimited field: one, or packed numbers. */
static uint64_t elements(const ProtobufCFieldDescriptor *field, const uint8_t *at, uint64_t n)
{
    uint64_t count = 0;
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return 1;
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return n / 4;
    case PROTOBUF_C_TYPE_DOUBLE:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return n / 8;
    default:
        break;
    }
    for (uint64_t i = 0; i < n; i++) count += !(at[i] & 0x80);
    return count;
}

static void count(struct walk *w, const ProtobufCMessageDescriptor *type, uint32_t id, uint64_t n)
{
    for (size_t i = 0; i < w->n_limits; i++)
        if (w->limits[i].type == type && w->limits[i].field == id) w->counts[i] += n;
}

/* The recursion is as deep as the schema, which has no recursive messages (rpc_test). */
static void walk(struct walk *w, const ProtobufCMessageDescriptor *type, const uint8_t *at,
                 const uint8_t *end)
{
    uint64_t tag, value;
    while (at < end && take_varint(&at, end, &tag)) {
        uint32_t id = (uint32_t)(tag >> 3);
        const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(type, id);
        switch (tag & 7) {
        case VARINT:
            if (!take_varint(&at, end, &value)) return;
            count(w, type, id, 1);
            break;
        case FIXED64:
        case FIXED32: {
            size_t n = (tag & 7) == FIXED64 ? 8 : 4;
            if ((size_t)(end - at) < n) return;
            at += n;
            count(w, type, id, 1);
            break;
        }
        case BYTES:
            if (!take_varint(&at, end, &value) || value > (uint64_t)(end - at)) return;
            if (field) count(w, type, id, elements(field, at, value));
            if (field && field->type == PROTOBUF_C_TYPE_MESSAGE &&
                is_limited_type(w, field->descriptor))
                walk(w, field->descriptor, at, at + value);
            at += value;
            break;
        default:
            return;
        }
    }
}

td_status td_rpc_scan(const ProtobufCMessageDescriptor *type,
                      const struct td_rpc_field_limit *limits, const uint8_t *bytes, size_t n_bytes,
                      struct td_err *err)
{
    struct walk w = {.limits = limits};
    if (!limits || !n_bytes) return TD_OK;
    while (limits[w.n_limits].type) w.n_limits++;
    TD_ASSERT(w.n_limits <= MAX_LIMITS);
    walk(&w, type, bytes, bytes + n_bytes);
    for (size_t i = 0; i < w.n_limits; i++)
        if (w.counts[i] > limits[i].max)
            return td_fail(err, TD_ERR_INVALID, "%s has %llu elements, limit %u", limits[i].name,
                           (unsigned long long)w.counts[i], limits[i].max);
    return TD_OK;
}
