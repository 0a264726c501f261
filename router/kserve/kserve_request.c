/* kserve_request.c - see kserve_request.h. A builder collects an object of completion's fields;
 * each form feeds it with tensors (take_input) and parameters (take_parameter). */
#include "router/kserve/kserve_request.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/json.h"
#include "router/http/openai_request.h"

struct kserve_request {
    struct openai_request *openai;
    struct kserve_options options;
};

struct builder {
    json_t *fields; /* of a completion */
    struct kserve_options options;
    bool has_exclude, excludes; /* exclude_input_in_output */
    struct td_err *err;
};

/* ---- names ----------------------------------------------------------------------------------- */

enum input {
    TEXT_INPUT,
    STREAM,
    SAMPLING_PARAMETERS,
    EXCLUDE_INPUT,
    RETURN_FINISH_REASON,
    RETURN_NUM_INPUT_TOKENS,
    RETURN_NUM_OUTPUT_TOKENS,
    N_INPUTS
};

static const struct kserve_tensor inputs[N_INPUTS + 1] = {
    [TEXT_INPUT] = {"text_input", "BYTES"},
    [STREAM] = {"stream", "BOOL"},
    [SAMPLING_PARAMETERS] = {"sampling_parameters", "BYTES"},
    [EXCLUDE_INPUT] = {"exclude_input_in_output", "BOOL"},
    [RETURN_FINISH_REASON] = {"return_finish_reason", "BOOL"},
    [RETURN_NUM_INPUT_TOKENS] = {"return_num_input_tokens", "BOOL"},
    [RETURN_NUM_OUTPUT_TOKENS] = {"return_num_output_tokens", "BOOL"},
};

static const struct kserve_tensor outputs[KSERVE_N_OUTPUTS + 1] = {
    [KSERVE_TEXT_OUTPUT] = {"text_output", "BYTES"},
    [KSERVE_FINISH_REASON] = {"finish_reason", "BYTES"},
    [KSERVE_NUM_INPUT_TOKENS] = {"num_input_tokens", "UINT32"},
    [KSERVE_NUM_OUTPUT_TOKENS] = {"num_output_tokens", "UINT32"},
};

const struct kserve_tensor *kserve_input(size_t i) { return i < N_INPUTS ? &inputs[i] : NULL; }

const struct kserve_tensor *kserve_output(size_t i)
{
    return i < KSERVE_N_OUTPUTS ? &outputs[i] : NULL;
}

/* How a parameter's value is read. Many clients send numbers as strings, because maps of strings
 * are what their languages have: a string that is a number is one. */
enum kind {
    NUMBER,
    INTEGER,
    BOOLEAN,
    AS_IT_IS,
    JSON,      /* a string is the text of it */
    ONLY_ONE,  /* an integer that must be 1: an answer has one text */
    NOT_HERE,  /* no tensor for it goes out */
    NO_RESUME, /* it would go on with a stream */
};

static const struct {
    const char *name;
    enum kind kind;
} parameters[] = {
    {"temperature", NUMBER},
    {"top_p", NUMBER},
    {"min_p", NUMBER},
    {"repetition_penalty", NUMBER},
    {"presence_penalty", NUMBER},
    {"frequency_penalty", NUMBER},
    {"length_penalty", NUMBER},
    {"max_tokens", INTEGER},
    {"min_tokens", INTEGER},
    {"top_k", INTEGER},
    {"seed", INTEGER},
    {"priority", INTEGER},
    {"truncate_prompt_tokens", INTEGER},
    {"ignore_eos", BOOLEAN},
    {"skip_special_tokens", BOOLEAN},
    {"add_special_tokens", BOOLEAN},
    {"include_stop_str_in_output", BOOLEAN},
    {"use_beam_search", BOOLEAN},
    {"stop", AS_IT_IS},
    {"slo_class", AS_IT_IS},
    {"tenant", AS_IT_IS},
    {"cache_salt", AS_IT_IS},
    {"guided_regex", AS_IT_IS},
    {"guided_grammar", AS_IT_IS},
    {"stop_token_ids", JSON},
    {"logit_bias", JSON},
    {"bad_words", JSON},
    {"allowed_token_ids", JSON},
    {"guided_json", JSON},
    {"guided_choice", JSON},
    {"structured_outputs", JSON},
    {"response_format", JSON},
    {"objectives", JSON},
    {"n", ONLY_ONE},
    {"best_of", ONLY_ONE},
    {"logprobs", NOT_HERE},
    {"prompt_logprobs", NOT_HERE},
    {"echo", NOT_HERE},
    {"resume_from", NO_RESUME},
    {"resume_token_ids", NO_RESUME},
};

/* ---- values ---------------------------------------------------------------------------------- */

/* Takes value over; the object's size is the caller's to bound. */
static td_status put(struct builder *b, const char *name, json_t *value)
{
    if (json_object_set_new(b->fields, name, value))
        return td_fail(b->err, TD_ERR_INVALID, "%.64s is not valid UTF-8, or there is no memory",
                       name);
    return TD_OK;
}

static td_status bad_parameter(struct builder *b, const char *name, const char *what)
{
    return td_fail(b->err, TD_ERR_INVALID, "parameter %.64s must be %s", name, what);
}

static td_status as_bool(struct builder *b, const char *name, const json_t *v, bool *ret)
{
    const char *text = json_string_value(v);
    bool is_true = text ? !strcasecmp(text, "true") : json_is_true(v);
    bool is_false = text ? !strcasecmp(text, "false") : json_is_false(v);
    if (!is_true && !is_false) return bad_parameter(b, name, "true or false");
    *ret = is_true;
    return TD_OK;
}

static td_status put_number(struct builder *b, const char *name, const json_t *v)
{
    const char *text = json_string_value(v);
    char *end = NULL;
    double x = text ? strtod(text, &end) : json_number_value(v);
    bool ok = text ? end != text && !*end : json_is_number(v);
    json_t *value = ok ? json_real(x) : NULL; /* NULL of what is not finite */
    return value ? put(b, name, value) : bad_parameter(b, name, "a number");
}

static td_status read_integer(struct builder *b, const char *name, const json_t *v, long long *ret)
{
    const char *text = json_string_value(v);
    char *end = NULL;
    errno = 0;
    *ret = text ? strtoll(text, &end, 10) : json_integer_value(v);
    bool ok = text ? end != text && !*end && !errno : json_is_integer(v);
    return ok ? TD_OK : bad_parameter(b, name, "an integer of 64 bits");
}

/* JSON within a text of the request: what it becomes in memory is bounded as a body is. */
static td_status load_json(struct builder *b, const char *name, const json_t *text, json_t **ret)
{
    const char *bytes = json_string_value(text);
    size_t n = json_string_length(text);
    td_status s = openai_check_body(bytes, n, b->err);
    if (s) return td_err_prefix(b->err, "%s", name);
    return td_json_load_text(bytes, n, name, ret, b->err);
}

static td_status put_json(struct builder *b, const char *name, const json_t *v)
{
    json_t *value = NULL;
    if (!json_is_string(v)) return put(b, name, json_incref((json_t *)(uintptr_t)v));
    td_status s = load_json(b, name, v, &value);
    return s ? s : put(b, name, value);
}

static bool is_nothing(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) ||
           (json_is_integer(v) && json_integer_value(v) == 0);
}

static td_status put_value(struct builder *b, const char *name, enum kind kind, const json_t *v)
{
    long long i = 0;
    bool flag = false;
    td_status s;
    switch (kind) {
    case NUMBER:
        return put_number(b, name, v);
    case INTEGER:
        s = read_integer(b, name, v, &i);
        return s ? s : put(b, name, json_integer(i));
    case BOOLEAN:
        s = as_bool(b, name, v, &flag);
        return s ? s : put(b, name, json_boolean(flag));
    case JSON:
        return put_json(b, name, v);
    case ONLY_ONE:
        s = read_integer(b, name, v, &i);
        return s || i == 1 ? s : bad_parameter(b, name, "1: an answer has one text here");
    case NOT_HERE:
        return is_nothing(v) ? TD_OK : bad_parameter(b, name, "left out: no output returns it");
    case NO_RESUME:
        return is_nothing(v) ? TD_OK
                             : td_fail(b->err, TD_ERR_INVALID, "%s: %s", name, KSERVE_NO_RESUME);
    case AS_IT_IS:
        break;
    }
    return put(b, name, json_incref((json_t *)(uintptr_t)v));
}

/* ---- tensors and parameters ------------------------------------------------------------------ */

static void set_flag(struct builder *b, enum input input, bool flag)
{
    struct kserve_options *o = &b->options;
    if (input == STREAM) o->is_stream = flag;
    if (input == EXCLUDE_INPUT) {
        b->has_exclude = true;
        b->excludes = flag;
    }
    if (input == RETURN_FINISH_REASON) o->want[KSERVE_FINISH_REASON] = flag;
    if (input == RETURN_NUM_INPUT_TOKENS) o->want[KSERVE_NUM_INPUT_TOKENS] = flag;
    if (input == RETURN_NUM_OUTPUT_TOKENS) o->want[KSERVE_NUM_OUTPUT_TOKENS] = flag;
}

static int find_input(const char *name)
{
    for (int i = 0; i < N_INPUTS; i++)
        if (!strcmp(name, inputs[i].name)) return i;
    return -1;
}

static bool is_flag(int input) { return input >= 0 && !strcmp(inputs[input].datatype, "BOOL"); }

/* is_sampling: in sampling_parameters, where every name is one; elsewhere clients also send
 * parameters of their own, which pass unread. */
static td_status take_parameter(struct builder *b, const char *name, const json_t *v,
                                bool is_sampling)
{
    int input = find_input(name);
    if (json_is_null(v)) return TD_OK;
    if (is_flag(input)) {
        bool flag = false;
        td_status s = as_bool(b, name, v, &flag);
        if (!s) set_flag(b, (enum input)input, flag);
        return s;
    }
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++)
        if (!strcmp(name, parameters[i].name)) return put_value(b, name, parameters[i].kind, v);
    if (!is_sampling) return TD_OK;
    return td_fail(b->err, TD_ERR_INVALID,
                   "sampling_parameters has \"%.64s\", which is not supported by this server",
                   name);
}

static td_status take_parameters(struct builder *b, const char *what, const json_t *object,
                                 bool is_sampling)
{
    const char *name;
    json_t *v;
    td_status s = TD_OK;
    if (!object || json_is_null(object)) return TD_OK;
    if (!json_is_object(object))
        return td_fail(b->err, TD_ERR_INVALID, "%s must be a JSON object", what);
    if (json_object_size(object) > KSERVE_MAX_PARAMETERS)
        return td_fail(b->err, TD_ERR_INVALID, "%s has %zu entries, limit %d", what,
                       json_object_size(object), KSERVE_MAX_PARAMETERS);
    json_object_foreach((json_t *)(uintptr_t)object, name, v)
    {
        s = take_parameter(b, name, v, is_sampling);
        if (s) return s;
    }
    return TD_OK;
}

static td_status take_sampling(struct builder *b, const json_t *text)
{
    json_t *object = NULL;
    td_status s = load_json(b, inputs[SAMPLING_PARAMETERS].name, text, &object);
    if (!s) s = take_parameters(b, inputs[SAMPLING_PARAMETERS].name, object, true);
    json_decref(object);
    return s;
}

/* One element of an input tensor: a string for BYTES, true or false for BOOL. */
static td_status take_input(struct builder *b, int input, const json_t *v)
{
    if (is_flag(input)) {
        if (!json_is_boolean(v))
            return td_fail(b->err, TD_ERR_INVALID, "input %s must be true or false",
                           inputs[input].name);
        set_flag(b, (enum input)input, json_is_true(v));
        return TD_OK;
    }
    if (!json_is_string(v))
        return td_fail(b->err, TD_ERR_INVALID, "input %s must be a string", inputs[input].name);
    if (input == SAMPLING_PARAMETERS) return take_sampling(b, v);
    return put(b, "prompt", json_incref((json_t *)(uintptr_t)v));
}

static td_status check_input(struct builder *b, const char *name, const char *datatype,
                             int *ret_input)
{
    int input = find_input(name);
    if (input < 0)
        return td_fail(b->err, TD_ERR_INVALID, "input \"%.64s\" is not supported by this server",
                       name);
    if (strcmp(datatype, inputs[input].datatype))
        return td_fail(b->err, TD_ERR_INVALID, "input %s has datatype \"%.16s\", must be %s",
                       inputs[input].name, datatype, inputs[input].datatype);
    *ret_input = input;
    return TD_OK;
}

static td_status bad_shape(struct builder *b, int input)
{
    return td_fail(b->err, TD_ERR_INVALID,
                   "input %s must have one element: its shape is [1], or up to %d ones",
                   inputs[input].name, KSERVE_MAX_DIMENSIONS);
}

static td_status take_output(struct builder *b, const char *name)
{
    for (size_t i = 0; i < KSERVE_N_OUTPUTS; i++) {
        if (strcmp(name, outputs[i].name)) continue;
        b->options.want[i] = true;
        return TD_OK;
    }
    return td_fail(b->err, TD_ERR_INVALID,
                   "output \"%.64s\" does not exist; there are text_output, finish_reason, "
                   "num_input_tokens and num_output_tokens",
                   name);
}

static td_status take_id(struct builder *b, const char *id)
{
    size_t n = strlen(id);
    if (n > KSERVE_MAX_ID_BYTES)
        return td_fail(b->err, TD_ERR_INVALID, "id has %zu bytes, limit %d", n,
                       KSERVE_MAX_ID_BYTES);
    memcpy(b->options.id, id, n + 1);
    return TD_OK;
}

static td_status check_count(struct builder *b, const char *what, size_t n)
{
    if (n <= KSERVE_MAX_TENSORS) return TD_OK;
    return td_fail(b->err, TD_ERR_INVALID, "%s has %zu tensors, limit %d", what, n,
                   KSERVE_MAX_TENSORS);
}

td_status kserve_check_version(const char *version, struct td_err *err)
{
    if (!version[0] || !strcmp(version, KSERVE_MODEL_VERSION)) return TD_OK;
    return td_fail(err, TD_ERR_NOT_FOUND,
                   "model version \"%.40s\" is not served here; models have version %s alone",
                   version, KSERVE_MODEL_VERSION);
}

/* ---- begin and end --------------------------------------------------------------------------- */

static td_status begin(struct builder *b, struct td_err *err)
{
    *b = (struct builder){.fields = json_object(), .err = err};
    return b->fields ? TD_OK : td_fail(err, TD_ERR_AGAIN, "no memory for a request");
}

/* Ends the builder, whose work so far ended with s. */
static td_status finish(struct builder *b, td_status s, const char *model, bool can_stream,
                        struct kserve_request **ret_request)
{
    char param[64];
    struct kserve_options *o = &b->options;
    struct kserve_request *q = NULL;
    if (!s && !json_object_get(b->fields, "prompt"))
        s = td_fail(b->err, TD_ERR_INVALID, "input text_input is missing");
    if (!s && o->is_stream && !can_stream)
        s = td_fail(b->err, TD_ERR_INVALID,
                    "stream is true, must be false: this call has one answer (ModelStreamInfer and "
                    "generate_stream have several)");
    o->prepends_input = b->has_exclude ? !b->excludes : !o->is_stream;
    if (!s && o->is_stream && o->prepends_input)
        s = td_fail(b->err, TD_ERR_INVALID,
                    "exclude_input_in_output is false, must be true when stream is");
    if (!s && model[0]) s = put(b, "model", json_string(model));
    if (!s && !(q = calloc(1, sizeof *q)))
        s = td_fail(b->err, TD_ERR_AGAIN, "no memory for a request");
    if (s) {
        json_decref(b->fields);
        return s;
    }
    s = openai_request_take(b->fields, OPENAI_COMPLETION, &q->openai, param, b->err);
    if (s) {
        free(q);
        return s;
    }
    q->options = *o;
    Tandem__V1__GenerateRequest *in = openai_request_message(q->openai);
    in->request_id = q->options.id;
    in->return_token_ids = o->want[KSERVE_NUM_OUTPUT_TOKENS];
    *ret_request = q;
    return TD_OK;
}

void kserve_request_free(struct kserve_request *q)
{
    if (!q) return;
    openai_request_free(q->openai);
    free(q);
}

const struct kserve_options *kserve_request_options(const struct kserve_request *q)
{
    return &q->options;
}

Tandem__V1__GenerateRequest *kserve_request_message(struct kserve_request *q)
{
    return openai_request_message(q->openai);
}

/* ---- the gRPC message ------------------------------------------------------------------------ */

static json_t *proto_value(const Inference__InferParameter *p)
{
    switch (p ? p->parameter_choice_case : INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE__NOT_SET) {
    case INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_BOOL_PARAM:
        return json_boolean(p->bool_param);
    case INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_INT64_PARAM:
        return json_integer(p->int64_param);
    case INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_STRING_PARAM:
        return json_stringn(p->string_param.data ? (const char *)p->string_param.data : "",
                            p->string_param.len);
    case INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_DOUBLE_PARAM:
        return json_real(p->double_param);
    case INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_UINT64_PARAM:
        return p->uint64_param <= INT64_MAX ? json_integer((json_int_t)p->uint64_param) : NULL;
    default:
        return json_null();
    }
}

static td_status take_proto_parameters(struct builder *b, const Inference__ModelInferRequest *in)
{
    if (in->n_parameters > KSERVE_MAX_PARAMETERS)
        return td_fail(b->err, TD_ERR_INVALID, "parameters has %zu entries, limit %d",
                       in->n_parameters, KSERVE_MAX_PARAMETERS);
    for (size_t i = 0; i < in->n_parameters; i++) {
        const char *name = in->parameters[i]->key;
        json_t *v = proto_value(in->parameters[i]->value);
        td_status s = v ? take_parameter(b, name, v, false)
                        : bad_parameter(b, name,
                                        "UTF-8 text, a finite number or an integer of 63 "
                                        "bits");
        json_decref(v);
        if (s) return s;
    }
    return TD_OK;
}

static json_t *text_value(const void *bytes, size_t n) { return json_stringn(n ? bytes : "", n); }

/* The one element of a tensor as raw bytes; NULL: it is not that. */
static json_t *raw_value(bool flag, const ProtobufCBinaryData *raw)
{
    const uint8_t *p = raw->data;
    if (flag) return raw->len == 1 && p[0] <= 1 ? json_boolean(p[0]) : NULL;
    if (raw->len < 4) return NULL;
    uint32_t n = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    return n == raw->len - 4 ? text_value(p + 4, n) : NULL;
}

static json_t *contents_value(bool flag, const Inference__InferTensorContents *c)
{
    if (!c) return NULL;
    if (flag) return c->n_bool_contents == 1 ? json_boolean(c->bool_contents[0]) : NULL;
    if (c->n_bytes_contents != 1) return NULL;
    return text_value(c->bytes_contents[0].data, c->bytes_contents[0].len);
}

static td_status take_proto_input(struct builder *b, const Inference__ModelInferRequest *in,
                                  size_t i)
{
    const Inference__ModelInferRequest__InferInputTensor *t = in->inputs[i];
    int input = -1;
    td_status s = check_input(b, t->name, t->datatype, &input);
    if (s) return s;
    bool fits = t->n_shape <= KSERVE_MAX_DIMENSIONS;
    for (size_t k = 0; fits && k < t->n_shape; k++) fits = t->shape[k] == 1;
    if (!fits) return bad_shape(b, input);
    for (size_t k = 0; k < t->n_parameters; k++)
        if (!strncmp(t->parameters[k]->key, "shared_memory_", 14))
            return td_fail(b->err, TD_ERR_INVALID, "input %s: shared memory is not served",
                           inputs[input].name);
    json_t *v = in->n_raw_input_contents ? raw_value(is_flag(input), &in->raw_input_contents[i])
                                         : contents_value(is_flag(input), t->contents);
    if (!v)
        return td_fail(b->err, TD_ERR_INVALID, "input %s: its contents must be one element of %s%s",
                       inputs[input].name, inputs[input].datatype,
                       is_flag(input) ? "" : " in UTF-8");
    s = take_input(b, input, v);
    json_decref(v);
    return s;
}

static td_status take_proto(struct builder *b, const Inference__ModelInferRequest *in)
{
    td_status s = kserve_check_version(in->model_version, b->err);
    if (!s) s = take_id(b, in->id);
    if (!s) s = check_count(b, "inputs", in->n_inputs);
    if (!s) s = check_count(b, "outputs", in->n_outputs);
    if (!s && in->n_raw_input_contents && in->n_raw_input_contents != in->n_inputs)
        s = td_fail(b->err, TD_ERR_INVALID,
                    "raw_input_contents has %zu elements, must be one for each of %zu inputs",
                    in->n_raw_input_contents, in->n_inputs);
    if (!s) s = take_proto_parameters(b, in);
    b->options.is_raw = in->n_raw_input_contents > 0;
    b->options.want[KSERVE_TEXT_OUTPUT] = in->n_outputs == 0;
    for (size_t i = 0; !s && i < in->n_inputs; i++) s = take_proto_input(b, in, i);
    for (size_t i = 0; !s && i < in->n_outputs; i++) s = take_output(b, in->outputs[i]->name);
    return s;
}

td_status kserve_request_from_proto(const Inference__ModelInferRequest *in, bool can_stream,
                                    struct kserve_request **ret_request, struct td_err *err)
{
    struct builder b;
    td_status s = begin(&b, err);
    if (s) return s;
    return finish(&b, take_proto(&b, in), in->model_name, can_stream, ret_request);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static td_status take_json_id(struct builder *b, const json_t *root)
{
    const char *id = NULL;
    td_status s = td_json_str(root, "request", "id", &id, NULL, b->err);
    return s || !id ? s : take_id(b, id);
}

static td_status take_json_input(struct builder *b, const json_t *t)
{
    const char *name = "", *datatype = "";
    int input = -1;
    td_status s = td_json_str(t, "inputs", "name", &name, NULL, b->err);
    if (!s) s = td_json_str(t, "inputs", "datatype", &datatype, NULL, b->err);
    if (!s) s = check_input(b, name, datatype, &input);
    if (s) return s;
    if (json_object_get(json_object_get(t, "parameters"), "binary_data_size"))
        return td_fail(b->err, TD_ERR_INVALID,
                       "input %s has binary_data_size: the binary tensor data extension is not "
                       "served, send its data as JSON",
                       inputs[input].name);
    const json_t *shape = json_object_get(t, "shape"), *data = json_object_get(t, "data");
    size_t n = json_array_size(shape);
    bool fits = json_is_array(shape) && n <= KSERVE_MAX_DIMENSIONS;
    for (size_t k = 0; fits && k < n; k++) fits = json_integer_value(json_array_get(shape, k)) == 1;
    for (size_t k = 0; fits && json_is_array(data) && k < KSERVE_MAX_DIMENSIONS; k++) {
        fits = json_array_size(data) == 1; /* flat, or nested as its shape is */
        data = json_array_get(data, 0);
    }
    return fits ? take_input(b, input, data) : bad_shape(b, input);
}

static td_status take_infer(struct builder *b, const json_t *root)
{
    const json_t *in = json_object_get(root, "inputs"), *out = json_object_get(root, "outputs");
    td_status s = take_json_id(b, root);
    if (!s && !json_is_array(in))
        s = td_fail(b->err, TD_ERR_INVALID, "inputs must be a list of tensors");
    if (!s && out && !json_is_array(out) && !json_is_null(out))
        s = td_fail(b->err, TD_ERR_INVALID, "outputs must be a list of tensors");
    if (!s) s = check_count(b, "inputs", json_array_size(in));
    if (!s) s = check_count(b, "outputs", json_array_size(out));
    if (!s) s = take_parameters(b, "parameters", json_object_get(root, "parameters"), false);
    b->options.want[KSERVE_TEXT_OUTPUT] = json_array_size(out) == 0;
    for (size_t i = 0; !s && i < json_array_size(in); i++)
        s = take_json_input(b, json_array_get(in, i));
    for (size_t i = 0; !s && i < json_array_size(out); i++) {
        const char *name = "";
        s = td_json_str(json_array_get(out, i), "outputs", "name", &name, NULL, b->err);
        if (!s) s = take_output(b, name);
    }
    return s;
}

/* A flat object: names of inputs, `parameters`, `id`; what else there is counts as a parameter. */
static td_status take_generate(struct builder *b, const json_t *root)
{
    const char *name;
    json_t *v;
    td_status s = take_json_id(b, root);
    if (!s && json_object_size(root) > KSERVE_MAX_PARAMETERS)
        s = td_fail(b->err, TD_ERR_INVALID, "request has %zu fields, limit %d",
                    json_object_size(root), KSERVE_MAX_PARAMETERS);
    if (!s) s = take_parameters(b, "parameters", json_object_get(root, "parameters"), false);
    b->options.want[KSERVE_TEXT_OUTPUT] = true;
    json_object_foreach((json_t *)(uintptr_t)root, name, v)
    {
        int input = find_input(name);
        if (s) break;
        if (!strcmp(name, "id") || !strcmp(name, "parameters")) continue;
        s = input >= 0 ? take_input(b, input, v) : take_parameter(b, name, v, false);
    }
    return s;
}

static td_status from_json(const char *body, size_t n_bytes, const char *model, bool can_stream,
                           td_status (*take)(struct builder *b, const json_t *root),
                           struct kserve_request **ret_request, struct td_err *err)
{
    struct builder b;
    json_t *root = NULL;
    td_status s = begin(&b, err);
    if (s) return s;
    s = openai_check_body(body, n_bytes, err);
    if (!s) s = td_json_load_text(body, n_bytes, "request body", &root, err);
    if (!s && !json_is_object(root))
        s = td_fail(err, TD_ERR_INVALID, "request body must be a JSON object");
    if (!s) s = take(&b, root);
    s = finish(&b, s, model, can_stream, ret_request);
    json_decref(root);
    return s;
}

td_status kserve_request_from_infer(const char *body, size_t n_bytes, const char *model,
                                    struct kserve_request **ret_request, struct td_err *err)
{
    return from_json(body, n_bytes, model, false, take_infer, ret_request, err);
}

td_status kserve_request_from_generate(const char *body, size_t n_bytes, const char *model,
                                       bool can_stream, struct kserve_request **ret_request,
                                       struct td_err *err)
{
    return from_json(body, n_bytes, model, can_stream, take_generate, ret_request, err);
}
