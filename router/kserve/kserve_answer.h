/* kserve_answer.h - GenerateResponses as answers of the Open Inference Protocol v2.
 *
 * A request to stream gets one answer for each piece of text; another gets one with the whole. The
 * last says so by the parameter triton_final_response, as Triton's decoupled models do.
 *
 * Threads: one at a time; the caller's lock. */
#ifndef TD_ROUTER_KSERVE_ANSWER_H
#define TD_ROUTER_KSERVE_ANSWER_H

#include "router/http/text_buffer.h"
#include "router/kserve/kserve_request.h"

struct kserve_answer {
    struct kserve_options options;
    char model[256];
    struct text_buffer text; /* not streamed: the answer so far */
};

/* One answer. text is borrowed until the next kserve_answer_take. */
struct kserve_piece {
    const char *text, *finish; /* finish: "" until the last */
    size_t n_text;
    uint32_t n_input, n_output; /* tokens: of the prompt (0 until the last), of this answer */
    bool is_last;
};

/* Begins: the text of a request that wants its input back is its prompt. */
void kserve_answer_begin(struct kserve_answer *a, struct kserve_request *q, const char *model);
/* False: there is nothing to tell yet. a->text.failed: no memory. */
bool kserve_answer_take(struct kserve_answer *a, const Tandem__V1__GenerateResponse *m,
                        struct kserve_piece *ret_piece);
/* The answer of /infer, and that of /generate, as JSON. */
void kserve_answer_infer(const struct kserve_answer *a, const struct kserve_piece *p,
                         struct text_buffer *out);
void kserve_answer_generate(const struct kserve_answer *a, const struct kserve_piece *p,
                            struct text_buffer *out);
void kserve_answer_free(struct kserve_answer *a);

/* A gRPC answer with what it points to; kserve_proto_fill's arguments must outlive it. */
struct kserve_proto {
    Inference__ModelInferResponse response;
    Inference__ModelInferResponse__InferOutputTensor tensors[KSERVE_N_OUTPUTS],
        *tensor_ptrs[KSERVE_N_OUTPUTS];
    Inference__InferTensorContents contents[KSERVE_N_OUTPUTS];
    ProtobufCBinaryData bytes[KSERVE_N_OUTPUTS], raw[KSERVE_N_OUTPUTS];
    uint32_t counts[KSERVE_N_OUTPUTS];
    uint8_t words[KSERVE_N_OUTPUTS][4]; /* raw UINT32 */
    Inference__ModelInferResponse__ParametersEntry entry, *entries[1];
    Inference__InferParameter is_last;
    int64_t one;
    struct text_buffer raw_text, raw_finish; /* length, then bytes */
};
/* False: no memory. */
bool kserve_proto_fill(struct kserve_proto *o, const struct kserve_answer *a,
                       const struct kserve_piece *p);
void kserve_proto_free(struct kserve_proto *o);

#endif
