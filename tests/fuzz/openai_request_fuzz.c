/* openai_request_fuzz.c - any bytes as a request's body, for each path that takes one; the first
 * byte is the path. What is accepted can go over the wire; what is refused says why. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "router/http/openai_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* The bytes as Last-Event-ID: what is taken is written as it was read. */
static void check_event_id(const uint8_t *data, size_t n_bytes, struct openai_request *q)
{
    struct td_err err = {0};
    struct openai_event_id id, again;
    struct text_buffer text = {0};
    char *value = strndup((const char *)data, n_bytes);
    TD_ASSERT(value);
    if (!openai_event_id_parse(value, &id, &err)) {
        openai_event_id_write(&id, &text);
        text_add(&text, "", 1);
        TD_ASSERT(!openai_event_id_parse(text.bytes, &again, &err));
        openai_event_id_write(&again, &text);
        TD_ASSERT(text.n % 2 == 1 && !memcmp(text.bytes, text.bytes + text.n / 2 + 1, text.n / 2));
    }
    openai_request_resume(q, value, &err);
    text_free(&text);
    free(value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0) return 0;
    enum openai_kind kind = (enum openai_kind)(data[0] % 4);
    struct openai_request *q = NULL;
    struct td_err err = {0};
    char param[64];
    memset(param, 'x', sizeof param);
    td_status s = openai_request_parse((const char *)data + 1, n_bytes - 1, kind, &q, param, &err);
    TD_ASSERT(memchr(param, 0, sizeof param));
    if (s) {
        TD_ASSERT(!q && err.msg[0]);
        return 0;
    }
    TD_ASSERT(q && !param[0]);
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    TD_ASSERT(in->input_case != TANDEM__V1__GENERATE_REQUEST__INPUT__NOT_SET);
    size_t n = tandem__v1__generate_request__get_packed_size(in);
    uint8_t *packed = malloc(n ? n : 1);
    TD_ASSERT(packed && tandem__v1__generate_request__pack(in, packed) == n);
    Tandem__V1__GenerateRequest *again = tandem__v1__generate_request__unpack(NULL, n, packed);
    TD_ASSERT(again && tandem__v1__generate_request__get_packed_size(again) == n);
    tandem__v1__generate_request__free_unpacked(again, NULL);
    free(packed);
    check_event_id(data, n_bytes, q);
    openai_request_free(q);
    return 0;
}
