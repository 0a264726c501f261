/* proto_fuzz.c - every message that comes from outside, through the unpacker with its budget. The
 * first byte picks the type.
 *
 * What unpacks must pack again, and that must unpack to the same bytes: a field that changes on
 * the way would be answered wrongly. Budgets from tiny to generous make every allocation fail
 * once. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/scan.h"
#include "common/rpc/unpack.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "tandem/v1/inference.pb-c.h"
#include "tandem/v1/worker.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const ProtobufCMessageDescriptor *const types[] = {
    &tandem__v1__generate_request__descriptor,
    &tandem__v1__generate_response__descriptor,
    &tandem__v1__tokenize_request__descriptor,
    &tandem__v1__tokenize_response__descriptor,
    &tandem__v1__models_request__descriptor,
    &tandem__v1__models_response__descriptor,
    &tandem__v1__status_request__descriptor,
    &tandem__v1__status_response__descriptor,
    &tandem__v1__decode_request__descriptor,
    &tandem__v1__decode_event__descriptor,
    &tandem__v1__prefill_request__descriptor,
    &tandem__v1__prefill_event__descriptor,
    &tandem__v1__abort_request__descriptor,
    &tandem__v1__abort_response__descriptor,
    &tandem__v1__worker_message__descriptor,
    &tandem__v1__router_message__descriptor,
    &grpc__health__v1__health_check_request__descriptor,
    &grpc__health__v1__health_check_response__descriptor,
    &grpc__reflection__v1__server_reflection_request__descriptor,
    &grpc__reflection__v1__server_reflection_response__descriptor,
    &grpc__reflection__v1alpha__server_reflection_request__descriptor,
    &tandem__v1__multiplex_up__descriptor,
    &tandem__v1__multiplex_down__descriptor,
};

/* protobuf-c keeps unknown fields with their tag rewritten; one with the illegal number 0 then
 * no longer parses. Nobody reads those. */
static bool has_unknown(const ProtobufCMessage *msg)
{
    if (msg->n_unknown_fields) return true;
    for (unsigned f = 0; f < msg->descriptor->n_fields; f++) {
        const ProtobufCFieldDescriptor *field = &msg->descriptor->fields[f];
        if (field->type != PROTOBUF_C_TYPE_MESSAGE) continue;
        const char *base = (const char *)msg;
        const ProtobufCMessage *one, *const *list;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t n;
            memcpy(&n, base + field->quantifier_offset, sizeof n);
            memcpy(&list, base + field->offset, sizeof list);
            for (size_t i = 0; i < n; i++)
                if (has_unknown(list[i])) return true;
            continue;
        }
        uint32_t chosen = field->id;
        if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
            memcpy(&chosen, base + field->quantifier_offset, sizeof chosen);
        memcpy(&one, base + field->offset, sizeof one);
        if (chosen == field->id && one && has_unknown(one)) return true;
    }
    return false;
}

/* What is counted before unpacking (scan.h) is never less than what unpacking makes: one element
 * below it must be refused. */
static void check_counts(const Tandem__V1__GenerateRequest *q, const uint8_t *bytes, size_t n_bytes)
{
    bool is_chat = q->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT;
    bool is_ids = q->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
    size_t n = is_chat ? q->chat->n_messages : is_ids ? q->token_ids->n_ids : 0;
    if (n == 0) return;
    const struct td_rpc_field_limit limits[] = {
        {is_chat ? &tandem__v1__chat__descriptor : &tandem__v1__token_ids__descriptor, 1,
         (uint32_t)n - 1, "elements"},
        {NULL, 0, 0, NULL},
    };
    struct td_err err = {0};
    if (td_rpc_scan(&tandem__v1__generate_request__descriptor, limits, bytes, n_bytes, &err) !=
        TD_ERR_INVALID)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 2) return 0;
    const ProtobufCMessageDescriptor *type = types[data[0] % (sizeof types / sizeof *types)];
    size_t budget = (size_t)64 << (data[1] % 16); /* 64 B .. 2 MiB */
    struct td_rpc_unpacker u;
    td_rpc_unpacker_init(&u);
    const ProtobufCMessage *msg;
    struct td_err err = {0};
    td_status status = td_rpc_unpack(&u, type, data + 2, n_bytes - 2, budget, &msg, &err);
    if (status == TD_OK) {
        if (u.used_bytes > budget) abort();
        if (type == &tandem__v1__generate_request__descriptor)
            check_counts((const Tandem__V1__GenerateRequest *)(const void *)msg, data + 2,
                         n_bytes - 2);
        bool unknown = has_unknown(msg);
        size_t n = protobuf_c_message_get_packed_size(msg);
        uint8_t *first = malloc(n + 1), *second = malloc(n + 1);
        if (!first || !second || protobuf_c_message_pack(msg, first) != n) abort();
        status = td_rpc_unpack(&u, type, first, n, (size_t)64 << 20, &msg, &err);
        if (status == TD_OK) {
            if (protobuf_c_message_get_packed_size(msg) != n ||
                protobuf_c_message_pack(msg, second) != n)
                abort();
            if (memcmp(first, second, n) != 0) abort();
        } else if (!unknown) {
            abort();
        }
        free(first);
        free(second);
    } else if (status != TD_ERR_INVALID && status != TD_ERR_LIMIT) {
        abort();
    } else if (!err.msg[0]) {
        abort();
    }
    td_rpc_unpacker_close(&u);
    return 0;
}
