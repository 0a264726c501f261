/* kserve_grpc.c - inference.GRPCInferenceService: see kserve.h.
 *
 * ModelInfer is one call and one request. ModelStreamInfer is a stream on which each message is a
 * request of its own; answers carry its id, errors are messages, and the stream goes on. It ends
 * well when the client has said its last and every request is over. A stranger's ends as it opens,
 * like other calls with large requests.
 *
 * A kserve_call has two holders at most: the function that begins it, and the work that it became
 * (client_ops.attach). The last frees it. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/rpc_status.h"
#include "router/kserve/kserve.h"
#include "router/kserve/kserve_answer.h"
#include "router/kserve/kserve_request.h"

struct kserve_stream {
    struct kserve_call *calls; /* live */
    uint32_t n_calls;
    bool no_more; /* the client has said its last */
    bool is_over; /* the RPC is: nothing can be sent */
};

struct kserve_call {
    struct td_rpc_call *rpc;
    struct kserve_stream *stream; /* NULL: ModelInfer */
    struct kserve_call *next, *prev;
    struct client_work *work;
    struct kserve_request *request;
    struct kserve_answer answer;
    unsigned n_holders;
};

/* ---- a call's life --------------------------------------------------------------------------- */

static void stream_end_if_done(struct kserve_stream *s, struct td_rpc_call *rpc)
{
    if (s->no_more && s->n_calls == 0 && !s->is_over)
        td_rpc_call_finish(rpc, TD_CODE_OK, NULL, NULL, 0);
}

static void call_drop(struct kserve_call *c)
{
    struct kserve_stream *s = c->stream;
    if (--c->n_holders) return;
    if (s) {
        if (c->next) c->next->prev = c->prev;
        *(c->prev ? &c->prev->next : &s->calls) = c->next;
        s->n_calls--;
        stream_end_if_done(s, c->rpc);
    } else {
        td_rpc_call_set_user(c->rpc, NULL);
    }
    kserve_answer_free(&c->answer);
    kserve_request_free(c->request);
    td_rpc_call_unref(c->rpc);
    free(c);
}

/* ---- the client as inference.c sees it ------------------------------------------------------- */

static void send_piece(struct kserve_call *c, const struct kserve_piece *p)
{
    struct kserve_proto o;
    Inference__ModelStreamInferResponse out = INFERENCE__MODEL_STREAM_INFER_RESPONSE__INIT;
    if (!kserve_proto_fill(&o, &c->answer, p)) {
        td_rpc_call_cancel(c->rpc);
    } else if (c->stream) {
        out.infer_response = &o.response;
        td_rpc_call_send(c->rpc, &out.base);
    } else {
        td_rpc_call_send(c->rpc, &o.response.base);
    }
    kserve_proto_free(&o);
}

static void kserve_send(void *call, const ProtobufCMessage *message)
{
    struct kserve_call *c = call;
    struct kserve_piece p;
    if (c->stream && c->stream->is_over) return;
    if (kserve_answer_take(&c->answer, (const Tandem__V1__GenerateResponse *)message, &p))
        send_piece(c, &p);
    else if (c->answer.text.failed)
        td_rpc_call_cancel(c->rpc);
}

/* An error of one request, as a message: the stream goes on. */
static void stream_error(struct td_rpc_call *rpc, const char *id, const char *why)
{
    Inference__ModelStreamInferResponse out = INFERENCE__MODEL_STREAM_INFER_RESPONSE__INIT;
    Inference__ModelInferResponse which = INFERENCE__MODEL_INFER_RESPONSE__INIT;
    size_t n = strlen(why);
    while (n && !td_rpc_utf8_valid(why, n)) n--; /* a long reason may be cut within a character */
    out.error_message = (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)why};
    which.id = (char *)(uintptr_t)id;
    out.infer_response = &which;
    td_rpc_call_send(rpc, &out.base);
}

static void kserve_finish(void *call, enum td_code code, const char *details,
                          const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    struct kserve_call *c = call;
    if (!c->stream)
        td_rpc_call_finish(c->rpc, code, details, trailing, n_trailing);
    else if (code != TD_CODE_OK && !c->stream->is_over)
        stream_error(c->rpc, c->answer.options.id, details && details[0] ? details : "failed");
}

static bool kserve_is_behind(void *call)
{
    const struct kserve_call *c = call;
    return c->stream && td_rpc_call_is_behind(c->rpc);
}

static const char *kserve_metadata(void *call, const char *name)
{
    return td_rpc_call_metadata(((struct kserve_call *)call)->rpc, name);
}

static const char *kserve_peer(void *call)
{
    return td_rpc_call_peer(((struct kserve_call *)call)->rpc);
}

static bool kserve_certificate_is(void *call, const struct td_peer_names *names)
{
    return td_identity_peer_is(((struct kserve_call *)call)->rpc, names);
}

static uint64_t kserve_remaining_ms(void *call)
{
    return td_rpc_call_remaining_ms(((struct kserve_call *)call)->rpc);
}

static void kserve_attach(void *call, struct client_work *w)
{
    struct kserve_call *c = call;
    c->work = w;
    if (w)
        c->n_holders++;
    else
        call_drop(c);
}

#define KSERVE_OPS(certificate)                                                                    \
    {                                                                                              \
        .send = kserve_send, .is_behind = kserve_is_behind, .finish = kserve_finish,               \
        .metadata = kserve_metadata, .peer = kserve_peer, .certificate_is = certificate,           \
        .remaining_ms = kserve_remaining_ms, .attach = kserve_attach,                              \
    }
static const struct router_client_ops kserve_ops = KSERVE_OPS(NULL),
                                      kserve_verified_ops = KSERVE_OPS(kserve_certificate_is);

static struct router_client client_of(struct kserve_call *c)
{
    return (struct router_client){
        td_rpc_call_peer_verified(c->rpc) ? &kserve_verified_ops : &kserve_ops, c};
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Takes q over. */
static void call_begin(struct router *r, struct td_rpc_call *rpc, struct kserve_stream *s,
                       struct kserve_request *q)
{
    const Tandem__V1__GenerateRequest *in = kserve_request_message(q);
    struct served_model *m = NULL;
    struct kserve_call *c = calloc(1, sizeof *c);
    if (!c) {
        if (s)
            stream_error(rpc, kserve_request_options(q)->id, "no memory for a request");
        else
            td_rpc_call_finish(rpc, TD_CODE_RESOURCE_EXHAUSTED, "no memory for a request", NULL, 0);
        kserve_request_free(q);
        return;
    }
    *c = (struct kserve_call){.rpc = rpc, .stream = s, .request = q, .n_holders = 1};
    td_rpc_call_ref(rpc);
    if (s) {
        c->next = s->calls;
        if (c->next) c->next->prev = c;
        s->calls = c;
        s->n_calls++;
    } else {
        td_rpc_call_set_user(rpc, c);
    }
    router_find_model(r, in->model, &m, NULL); /* else inference_generate refuses it */
    kserve_answer_begin(&c->answer, q, !m ? "" : in->model[0] ? in->model : served_model_name(m));
    inference_generate(r, client_of(c), &in, 1);
    call_drop(c);
}

static void on_infer(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    struct kserve_request *q;
    struct td_err err = {0};
    td_status s =
        kserve_request_from_proto((const Inference__ModelInferRequest *)msg, false, &q, &err);
    if (s)
        td_rpc_call_finish(rpc, td_rpc_code(s), err.msg, NULL, 0);
    else
        call_begin(ctx, rpc, NULL, q);
}

static void on_infer_end(struct td_rpc_call *rpc, bool cancelled, void *ctx)
{
    struct kserve_call *c = td_rpc_call_user(rpc);
    (void)cancelled;
    if (c && c->work) inference_cancel(ctx, c->work);
}

static void stream_take(struct router *r, struct td_rpc_call *rpc, struct kserve_stream *s,
                        const Inference__ModelInferRequest *in)
{
    struct kserve_request *q;
    struct td_err err = {0};
    td_status st;
    if (s->n_calls >= KSERVE_MAX_STREAM_REQUESTS)
        st = td_fail(&err, TD_ERR_AGAIN, "%d requests are live on this stream, the limit",
                     KSERVE_MAX_STREAM_REQUESTS);
    else
        st = kserve_request_from_proto(in, true, &q, &err);
    if (st)
        stream_error(rpc, in->id, err.msg);
    else
        call_begin(r, rpc, s, q);
}

static void on_stream_open(struct td_rpc_call *rpc, void *ctx)
{
    struct kserve_stream *s = calloc(1, sizeof *s);
    td_rpc_call_set_user(rpc, s);
    if (s)
        inference_on_open(rpc, ctx);
    else
        td_rpc_call_finish(rpc, TD_CODE_RESOURCE_EXHAUSTED, "no memory for a stream", NULL, 0);
}

static void on_stream(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    struct kserve_stream *s = td_rpc_call_user(rpc);
    if (!s) return;
    if (msg) {
        stream_take(ctx, rpc, s, (const Inference__ModelInferRequest *)msg);
        return;
    }
    s->no_more = true;
    stream_end_if_done(s, rpc);
}

static void on_stream_end(struct td_rpc_call *rpc, bool cancelled, void *ctx)
{
    struct kserve_stream *s = td_rpc_call_user(rpc);
    (void)cancelled;
    if (!s) return;
    s->is_over = true;
    while (s->calls) inference_cancel(ctx, s->calls->work); /* which detaches it */
    td_rpc_call_set_user(rpc, NULL);
    free(s);
}

/* Each of its requests sends what it kept, in one message. */
static void on_stream_caught_up(struct td_rpc_call *rpc, void *ctx)
{
    const struct kserve_stream *s = td_rpc_call_user(rpc);
    for (const struct kserve_call *c = s ? s->calls : NULL; c; c = c->next)
        if (c->work) inference_caught_up(ctx, c->work);
}

/* ---- what is served, and whether it is ------------------------------------------------------- */

bool kserve_model_is_ready(const struct router *r, const struct served_model *m)
{
    bool is_ready[2] = {false, false};
    if (atomic_load(&r->draining)) return false;
    for (uint32_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        struct td_core_worker_view v;
        if (!w->used || w->gone || w->model != m) continue;
        td_core_worker_view(m->core, w->index, &v);
        if (v.state == TD_WORKER_READY) is_ready[v.role] = true;
    }
    bool needs_prefill = r->core_cfg.mode == TD_MODE_PD;
    return is_ready[TD_ROLE_DECODE] && (is_ready[TD_ROLE_PREFILL] || !needs_prefill);
}

bool kserve_server_is_ready(const struct router *r)
{
    for (uint32_t i = 0; i < r->n_models; i++)
        if (kserve_model_is_ready(r, r->models[i])) return true;
    return false;
}

static void on_nothing_end(struct td_rpc_call *rpc, bool cancelled, void *ctx)
{
    (void)rpc;
    (void)cancelled;
    (void)ctx;
}

static void answer(struct td_rpc_call *rpc, const ProtobufCMessage *out)
{
    td_rpc_call_send(rpc, out);
    td_rpc_call_finish(rpc, TD_CODE_OK, NULL, NULL, 0);
}

static bool may_call(struct router *r, struct td_rpc_call *rpc)
{
    struct kserve_call c = {.rpc = rpc};
    return inference_may_call(r, client_of(&c));
}

static void on_server_live(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    Inference__ServerLiveResponse out = INFERENCE__SERVER_LIVE_RESPONSE__INIT;
    (void)msg;
    (void)ctx;
    out.live = true;
    answer(rpc, &out.base);
}

static void on_server_ready(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    Inference__ServerReadyResponse out = INFERENCE__SERVER_READY_RESPONSE__INIT;
    (void)msg;
    out.ready = kserve_server_is_ready(ctx);
    answer(rpc, &out.base);
}

static void on_server_metadata(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    Inference__ServerMetadataResponse out = INFERENCE__SERVER_METADATA_RESPONSE__INIT;
    (void)msg;
    (void)ctx;
    out.name = (char *)(uintptr_t) "tandem";
    out.version = (char *)(uintptr_t)TD_VERSION;
    answer(rpc, &out.base);
}

static td_status find(struct router *r, const char *name, const char *version,
                      struct served_model **ret_model, struct td_err *err)
{
    td_status s = router_find_model(r, name, ret_model, err);
    return s ? s : kserve_check_version(version, err);
}

static void on_model_ready(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    const Inference__ModelReadyRequest *in = (const Inference__ModelReadyRequest *)msg;
    Inference__ModelReadyResponse out = INFERENCE__MODEL_READY_RESPONSE__INIT;
    struct served_model *m;
    if (!may_call(ctx, rpc)) return;
    out.ready = !find(ctx, in->name, in->version, &m, NULL) && kserve_model_is_ready(ctx, m);
    answer(rpc, &out.base);
}

typedef Inference__ModelMetadataResponse__TensorMetadata tensor_metadata;

static size_t fill_tensors(const struct kserve_tensor *(*get)(size_t i), tensor_metadata *store,
                           tensor_metadata **ptrs, int64_t *one)
{
    size_t n = 0;
    for (const struct kserve_tensor *t; (t = get(n)) && t->name && n < KSERVE_MAX_TENSORS; n++) {
        inference__model_metadata_response__tensor_metadata__init(&store[n]);
        store[n].name = (char *)(uintptr_t)t->name;
        store[n].datatype = (char *)(uintptr_t)t->datatype;
        store[n].n_shape = 1;
        store[n].shape = one;
        ptrs[n] = &store[n];
    }
    return n;
}

static void on_model_metadata(struct td_rpc_call *rpc, const ProtobufCMessage *msg, void *ctx)
{
    const Inference__ModelMetadataRequest *in = (const Inference__ModelMetadataRequest *)msg;
    Inference__ModelMetadataResponse out = INFERENCE__MODEL_METADATA_RESPONSE__INIT;
    tensor_metadata store[2][KSERVE_MAX_TENSORS], *ptrs[2][KSERVE_MAX_TENSORS];
    int64_t one = 1;
    char version[] = KSERVE_MODEL_VERSION, *versions[] = {version};
    struct served_model *m;
    struct td_err err = {0};
    if (!may_call(ctx, rpc)) return;
    td_status s = find(ctx, in->name, in->version, &m, &err);
    if (s) {
        td_rpc_call_finish(rpc, td_rpc_code(s), err.msg, NULL, 0);
        return;
    }
    out.name = (char *)(uintptr_t)served_model_name(m);
    out.n_versions = 1;
    out.versions = versions;
    out.platform = (char *)(uintptr_t) "tandem";
    out.n_inputs = fill_tensors(kserve_input, store[0], ptrs[0], &one);
    out.inputs = ptrs[0];
    out.n_outputs = fill_tensors(kserve_output, store[1], ptrs[1], &one);
    out.outputs = ptrs[1];
    answer(rpc, &out.base);
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Limits that hold before a message is unpacked; each counts in the whole message. */
#define INPUT_TENSOR inference__model_infer_request__infer_input_tensor__descriptor
#define OUTPUT_TENSOR inference__model_infer_request__infer_requested_output_tensor__descriptor
#define CONTENTS inference__infer_tensor_contents__descriptor
static const struct td_rpc_field_limit limits[] = {
    {&inference__model_infer_request__descriptor, 4, KSERVE_MAX_PARAMETERS, "parameters"},
    {&inference__model_infer_request__descriptor, 5, KSERVE_MAX_TENSORS, "inputs"},
    {&inference__model_infer_request__descriptor, 6, KSERVE_MAX_TENSORS, "outputs"},
    {&inference__model_infer_request__descriptor, 7, KSERVE_MAX_TENSORS, "raw_input_contents"},
    {&INPUT_TENSOR, 3, KSERVE_MAX_TENSORS *KSERVE_MAX_DIMENSIONS, "inputs.shape"},
    {&INPUT_TENSOR, 4, KSERVE_MAX_PARAMETERS, "inputs.parameters"},
    {&OUTPUT_TENSOR, 2, KSERVE_MAX_PARAMETERS, "outputs.parameters"},
    {&CONTENTS, 1, KSERVE_MAX_TENSORS, "inputs.contents.bool_contents"},
    {&CONTENTS, 2, KSERVE_MAX_TENSORS, "inputs.contents.int_contents"},
    {&CONTENTS, 3, KSERVE_MAX_TENSORS, "inputs.contents.int64_contents"},
    {&CONTENTS, 4, KSERVE_MAX_TENSORS, "inputs.contents.uint_contents"},
    {&CONTENTS, 5, KSERVE_MAX_TENSORS, "inputs.contents.uint64_contents"},
    {&CONTENTS, 6, KSERVE_MAX_TENSORS, "inputs.contents.fp32_contents"},
    {&CONTENTS, 7, KSERVE_MAX_TENSORS, "inputs.contents.fp64_contents"},
    {&CONTENTS, 8, KSERVE_MAX_TENSORS, "inputs.contents.bytes_contents"},
    {0},
};

#define SMALL(name, type, function)                                                                \
    {                                                                                              \
        .path = "/inference.GRPCInferenceService/" name, .request = &type, .on_message = function, \
        .on_end = on_nothing_end                                                                   \
    }
const struct td_rpc_method kserve_methods[] = {
    SMALL("ServerLive", inference__server_live_request__descriptor, on_server_live),
    SMALL("ServerReady", inference__server_ready_request__descriptor, on_server_ready),
    SMALL("ModelReady", inference__model_ready_request__descriptor, on_model_ready),
    SMALL("ServerMetadata", inference__server_metadata_request__descriptor, on_server_metadata),
    SMALL("ModelMetadata", inference__model_metadata_request__descriptor, on_model_metadata),
    {.path = "/inference.GRPCInferenceService/ModelInfer",
     .request = &inference__model_infer_request__descriptor,
     .on_open = inference_on_open_limited,
     .on_message = on_infer,
     .on_end = on_infer_end,
     .field_limits = limits},
    {.path = "/inference.GRPCInferenceService/ModelStreamInfer",
     .request = &inference__model_infer_request__descriptor,
     .client_streaming = true,
     .on_open = on_stream_open,
     .on_message = on_stream,
     .on_end = on_stream_end,
     .on_caught_up = on_stream_caught_up,
     .field_limits = limits},
    {0},
};
