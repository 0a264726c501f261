/* kserve_http.c - see kserve_http.h. The table of paths is at the end. */
#include "router/kserve/kserve_http.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/rpc_status.h"
#include "router/http/call.h"
#include "router/kserve/kserve.h"
#include "router/kserve/kserve_answer.h"
#include "router/kserve/kserve_request.h"

struct kserve_http {
    char model[256], version[32]; /* of the path */
    bool is_infer, is_events;
    struct kserve_request *request;
    struct kserve_answer answer;
};

void kserve_http_free(struct kserve_http *k)
{
    if (!k) return;
    kserve_request_free(k->request);
    kserve_answer_free(&k->answer);
    free(k);
}

void kserve_http_forget_request(struct kserve_http *k)
{
    if (!k) return;
    kserve_request_free(k->request);
    k->request = NULL;
}

void kserve_http_error(struct text_buffer *out, const char *message)
{
    text_addf(out, "{\"error\":");
    text_add_json(out, message, strlen(message));
    text_addf(out, "}");
}

void kserve_http_add(struct kserve_http *k, const Tandem__V1__GenerateResponse *m,
                     struct text_buffer *out)
{
    struct kserve_piece p;
    if (!kserve_answer_take(&k->answer, m, &p)) {
        if (k->answer.text.failed) out->failed = true;
        return;
    }
    if (k->is_events) text_addf(out, "data: ");
    (k->is_infer ? kserve_answer_infer : kserve_answer_generate)(&k->answer, &p, out);
    if (k->is_events) text_addf(out, "\n\n");
}

/* ---- requests for text ----------------------------------------------------------------------- */

static td_status check_head(struct http_call *c, struct td_err *err)
{
    static const char header[] = "Inference-Header-Content-Length";
    if (MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, header))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: the binary tensor data extension is not served, send JSON alone",
                       header);
    const char *after = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "Last-Event-ID");
    if (after && after[0])
        return td_fail(err, TD_ERR_INVALID, "Last-Event-ID: %s", KSERVE_NO_RESUME);
    return kserve_check_version(c->kserve->version, err);
}

static td_status read_infer(struct http_call *c, struct td_err *err)
{
    struct kserve_http *k = c->kserve;
    td_status s = check_head(c, err);
    k->is_infer = true;
    return s ? s
             : kserve_request_from_infer(c->body ? c->body : "", c->n_body, k->model, &k->request,
                                         err);
}

static td_status read_generate(struct http_call *c, struct td_err *err)
{
    struct kserve_http *k = c->kserve;
    td_status s = check_head(c, err);
    return s ? s
             : kserve_request_from_generate(c->body ? c->body : "", c->n_body, k->model,
                                            k->is_events, &k->request, err);
}

static td_status read_generate_stream(struct http_call *c, struct td_err *err)
{
    c->kserve->is_events = true;
    td_status s = read_generate(c, err);
    c->is_stream = !s;
    return s;
}

static void generate(struct http_call *c)
{
    struct router *r = c->http->router;
    struct kserve_http *k = c->kserve;
    Tandem__V1__GenerateRequest *in = kserve_request_message(k->request);
    const Tandem__V1__GenerateRequest *one = in;
    struct served_model *m = NULL;
    router_find_model(r, in->model, &m, NULL); /* else inference_generate refuses it */
    kserve_answer_begin(&k->answer, k->request,
                        !m             ? ""
                        : in->model[0] ? in->model
                                       : served_model_name(m));
    if (!in->request_id[0]) in->request_id = c->request_id;
    inference_generate(r, http_call_client(c), &one, 1);
}

/* ---- what is served, and whether it is ------------------------------------------------------- */

static enum MHD_Result tell_server(struct http_call *c)
{
    struct text_buffer text = {0};
    text_addf(&text, "{\"name\":\"tandem\",\"version\":\"" TD_VERSION "\",\"extensions\":[]}");
    return http_call_answer(c, &text, MHD_HTTP_OK, "application/json");
}

static enum MHD_Result tell_live(struct http_call *c)
{
    struct text_buffer text = {0};
    text_addf(&text, "{\"live\":true}");
    return http_call_answer(c, &text, MHD_HTTP_OK, "application/json");
}

static void finish_ready(struct http_call *c, bool is_ready)
{
    struct text_buffer text = {0};
    if (!is_ready) {
        http_ops.finish(c, TD_CODE_UNAVAILABLE, "workers for this model are missing", NULL, 0);
        return;
    }
    text_addf(&text, "{\"ready\":true}");
    http_call_finish_json(c, &text);
}

static void tell_ready(struct http_call *c)
{
    finish_ready(c, kserve_server_is_ready(c->http->router));
}

/* False: the call is finished with why not. */
static bool find_model(struct http_call *c, struct served_model **ret_model)
{
    struct router *r = c->http->router;
    struct td_err err = {0};
    if (!inference_may_call(r, http_call_client(c))) return false;
    td_status s = router_find_model(r, c->kserve->model, ret_model, &err);
    if (!s) s = kserve_check_version(c->kserve->version, &err);
    if (s) http_ops.finish(c, td_rpc_code(s), err.msg, NULL, 0);
    return !s;
}

static void tell_model_ready(struct http_call *c)
{
    struct served_model *m;
    if (find_model(c, &m)) finish_ready(c, kserve_model_is_ready(c->http->router, m));
}

static void list_tensors(struct text_buffer *out, const struct kserve_tensor *(*get)(size_t i))
{
    const struct kserve_tensor *t;
    for (size_t i = 0; (t = get(i)); i++)
        text_addf(out, "%s{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":[1]}", i ? "," : "",
                  t->name, t->datatype);
}

static void tell_model(struct http_call *c)
{
    struct served_model *m;
    struct text_buffer text = {0};
    if (!find_model(c, &m)) return;
    text_addf(&text, "{\"name\":");
    text_add_json(&text, served_model_name(m), strlen(served_model_name(m)));
    text_addf(&text, ",\"versions\":[\"" KSERVE_MODEL_VERSION "\"],\"platform\":\"tandem\","
                     "\"inputs\":[");
    list_tensors(&text, kserve_input);
    text_addf(&text, "],\"outputs\":[");
    list_tensors(&text, kserve_output);
    text_addf(&text, "]}");
    http_call_finish_json(c, &text);
}

/* ---- the tables ------------------------------------------------------------------------------ */

static const struct http_route server_routes[] = {
    {"/v2", "GET", .answer_here = tell_server},
    {"/v2/health/live", "GET", .answer_here = tell_live},
    {"/v2/health/ready", "GET", .on_loop = tell_ready},
};

/* The ends of paths of a model; the last fits any. */
static const struct http_route model_routes[] = {
    {"/infer", "POST", .read = read_infer, .on_loop = generate, .is_limited = true},
    {"/generate", "POST", .read = read_generate, .on_loop = generate, .is_limited = true},
    {"/generate_stream", "POST", .read = read_generate_stream, .on_loop = generate,
     .is_limited = true},
    {"/ready", "GET", .on_loop = tell_model_ready},
    {"", "GET", .on_loop = tell_model},
};

static const char models[] = "/v2/models/";

/* The n bytes as the model's name, and as its version what follows a last "/versions/". Names may
 * have slashes of their own. */
static bool take_name(struct kserve_http *k, const char *name, size_t n)
{
    static const char mark[] = "/versions/";
    size_t slash = n;
    while (slash && name[slash - 1] != '/') slash--;
    size_t n_mark = sizeof mark - 1;
    if (slash >= n_mark && !strncmp(name + slash - n_mark, mark, n_mark)) {
        if (n - slash >= sizeof k->version || n == slash) return false;
        memcpy(k->version, name + slash, n - slash);
        n = slash - n_mark;
    }
    if (n == 0 || n >= sizeof k->model) return false;
    memcpy(k->model, name, n);
    return true;
}

static const struct http_route *find_of_model(const char *rest, struct kserve_http *k)
{
    size_t n = strlen(rest);
    for (size_t i = 0; i < sizeof model_routes / sizeof *model_routes; i++) {
        size_t n_end = strlen(model_routes[i].path);
        if (n < n_end || strcmp(rest + n - n_end, model_routes[i].path)) continue;
        return take_name(k, rest, n - n_end) ? &model_routes[i] : NULL;
    }
    return NULL;
}

bool kserve_http_has(const char *path)
{
    return !strncmp(path, "/v2", 3) && (!path[3] || path[3] == '/');
}

const struct http_route *kserve_http_find(const char *path, const char *method,
                                          struct kserve_http **ret_kserve, unsigned *ret_status,
                                          const char **ret_allowed)
{
    struct kserve_http *k = calloc(1, sizeof *k);
    const struct http_route *found = NULL;
    *ret_kserve = k;
    *ret_status = k ? MHD_HTTP_NOT_FOUND : MHD_HTTP_SERVICE_UNAVAILABLE;
    if (!k) return NULL;
    for (size_t i = 0; i < sizeof server_routes / sizeof *server_routes; i++)
        if (!strcmp(path, server_routes[i].path)) found = &server_routes[i];
    if (!found && !strncmp(path, models, sizeof models - 1))
        found = find_of_model(path + sizeof models - 1, k);
    if (!found || !strcmp(method, found->method)) return found;
    *ret_status = MHD_HTTP_METHOD_NOT_ALLOWED;
    *ret_allowed = found->method;
    return NULL;
}
