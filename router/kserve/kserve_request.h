/* kserve_request.h - a request of KServe's Open Inference Protocol v2 as a GenerateRequest.
 *
 * Three forms come in: the gRPC message, the JSON of /infer (tensors) and of /generate (a flat
 * object). Each becomes one JSON object with the names that OpenAI's completions have, which
 * openai_request.h reads: values are checked once, and errors have the same words at every door.
 * What a tensor or parameter is called, and of which type it is, stands in two tables here; they
 * are those of Triton's vLLM backend. docs/kserve.md lists them.
 *
 * Threads: none of its own. Bounds: one element for each tensor, whose bytes the caller's bound on
 * a message limits; KSERVE_MAX_* for what repeats. */
#ifndef TD_ROUTER_KSERVE_REQUEST_H
#define TD_ROUTER_KSERVE_REQUEST_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"
#include "inference/grpc_service.pb-c.h"
#include "tandem/v1/inference.pb-c.h"

enum {
    KSERVE_MAX_TENSORS = 16, /* inputs, and outputs that are asked for */
    KSERVE_MAX_PARAMETERS = 64,
    KSERVE_MAX_DIMENSIONS = 8,
    KSERVE_MAX_ID_BYTES = 127, /* as long as a request's name may be */
};

#define KSERVE_MODEL_VERSION "1" /* of every model: a model here has no versions */

/* To a client that would go on with a stream. The protocol has no field for what it received, and
 * an answer from the beginning would give it the same text twice. */
#define KSERVE_NO_RESUME                                                                           \
    "a KServe stream cannot be resumed: begin anew, or use OpenAI's API or tandem.v1.Inference"

enum kserve_output {
    KSERVE_TEXT_OUTPUT,
    KSERVE_FINISH_REASON,
    KSERVE_NUM_INPUT_TOKENS,
    KSERVE_NUM_OUTPUT_TOKENS,
    KSERVE_N_OUTPUTS
};

struct kserve_options {
    bool is_stream;
    bool is_raw;         /* gRPC: tensors came, and go, as raw bytes */
    bool prepends_input; /* the text begins with the prompt */
    bool want[KSERVE_N_OUTPUTS];
    char id[KSERVE_MAX_ID_BYTES + 1];
};

struct kserve_request;

/* *ret_request is freed by kserve_request_free. Errors name the tensor or parameter.
 * can_stream: the call can give more than one answer; else a request to stream is refused. */
td_status kserve_request_from_proto(const Inference__ModelInferRequest *in, bool can_stream,
                                    struct kserve_request **ret_request, struct td_err *err);
/* model: of the path. */
td_status kserve_request_from_infer(const char *body, size_t n_bytes, const char *model,
                                    struct kserve_request **ret_request, struct td_err *err);
td_status kserve_request_from_generate(const char *body, size_t n_bytes, const char *model,
                                       bool can_stream, struct kserve_request **ret_request,
                                       struct td_err *err);
void kserve_request_free(struct kserve_request *q); /* NULL is fine */

const struct kserve_options *kserve_request_options(const struct kserve_request *q);
/* Borrowed, and valid while q is. The caller may set its strings. */
Tandem__V1__GenerateRequest *kserve_request_message(struct kserve_request *q);

/* TD_ERR_NOT_FOUND unless "" or the one that there is. */
td_status kserve_check_version(const char *version, struct td_err *err);

/* Name and datatype of an input or output, for metadata; NULL after the last. */
struct kserve_tensor {
    const char *name, *datatype;
};
const struct kserve_tensor *kserve_input(size_t i);
const struct kserve_tensor *kserve_output(size_t i);

#endif
