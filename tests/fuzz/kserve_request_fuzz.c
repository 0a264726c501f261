/* kserve_request_fuzz.c - any bytes as a request of KServe's protocol, in each of its three forms
 * (the first byte says which). What is accepted can go over the wire and be answered in every form;
 * what is refused says why. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "router/kserve/kserve_answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static td_status read_proto(const uint8_t *data, size_t n, bool can_stream,
                            struct kserve_request **ret, struct td_err *err)
{
    Inference__ModelInferRequest *in = inference__model_infer_request__unpack(NULL, n, data);
    if (!in) return td_fail(err, TD_ERR_INVALID, "no message");
    td_status s = kserve_request_from_proto(in, can_stream, ret, err);
    inference__model_infer_request__free_unpacked(in, NULL); /* nothing of it is kept */
    return s;
}

static void check_answer(struct kserve_request *q)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    struct kserve_answer a;
    struct kserve_piece p;
    struct kserve_proto o;
    struct text_buffer out = {0};
    kserve_answer_begin(&a, q, "model");
    m.text = (ProtobufCBinaryData){3, (uint8_t *)(uintptr_t) "a\0b"};
    m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    m.usage = &usage;
    TD_ASSERT(kserve_answer_take(&a, &m, &p) && p.is_last);
    TD_ASSERT(a.options.is_stream == (p.text != a.text.bytes));
    kserve_answer_infer(&a, &p, &out);
    kserve_answer_generate(&a, &p, &out);
    TD_ASSERT(!out.failed && out.n > 0);
    TD_ASSERT(kserve_proto_fill(&o, &a, &p));
    size_t n = inference__model_infer_response__get_packed_size(&o.response);
    uint8_t *packed = malloc(n);
    TD_ASSERT(packed && inference__model_infer_response__pack(&o.response, packed) == n);
    free(packed);
    kserve_proto_free(&o);
    kserve_answer_free(&a);
    text_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0) return 0;
    struct kserve_request *q = NULL;
    struct td_err err = {0};
    bool can_stream = data[0] & 4;
    const char *text = (const char *)data + 1;
    td_status s;
    switch (data[0] % 3) {
    case 0:
        s = read_proto(data + 1, n_bytes - 1, can_stream, &q, &err);
        break;
    case 1:
        s = kserve_request_from_infer(text, n_bytes - 1, "pocket", &q, &err);
        break;
    default:
        s = kserve_request_from_generate(text, n_bytes - 1, "", can_stream, &q, &err);
    }
    if (s) {
        TD_ASSERT(!q && err.msg[0]);
        return 0;
    }
    const Tandem__V1__GenerateRequest *in = kserve_request_message(q);
    TD_ASSERT(in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT);
    TD_ASSERT(!in->sampling || in->sampling->n <= 1);
    check_answer(q);
    kserve_request_free(q);
    return 0;
}
