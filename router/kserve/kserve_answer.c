/* kserve_answer.c - see kserve_answer.h. */
#include "router/kserve/kserve_answer.h"

#include <stdio.h>
#include <string.h>

/* ---- pieces ---------------------------------------------------------------------------------- */

void kserve_answer_begin(struct kserve_answer *a, struct kserve_request *q, const char *model)
{
    const Tandem__V1__GenerateRequest *in = kserve_request_message(q);
    *a = (struct kserve_answer){.options = *kserve_request_options(q)};
    snprintf(a->model, sizeof a->model, "%s", model);
    if (a->options.prepends_input)
        text_add(&a->text, (const char *)in->prompt.data, in->prompt.len);
}

static const char *finish_name(Tandem__V1__FinishReason finish)
{
    if (finish == TANDEM__V1__FINISH_REASON__FINISH_NONE) return "";
    return finish == TANDEM__V1__FINISH_REASON__FINISH_LENGTH ? "length" : "stop";
}

bool kserve_answer_take(struct kserve_answer *a, const Tandem__V1__GenerateResponse *m,
                        struct kserve_piece *ret_piece)
{
    struct kserve_piece p = {.text = (const char *)m->text.data,
                             .n_text = m->text.len,
                             .finish = finish_name(m->finish_reason),
                             .n_output = (uint32_t)m->n_token_ids,
                             .is_last = m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE};
    if (m->usage) p.n_input = m->usage->prompt_tokens;
    if (!a->options.is_stream) {
        text_add(&a->text, p.text, p.n_text);
        if (!p.is_last) return false;
        p.text = a->text.bytes;
        p.n_text = a->text.n;
        p.n_output = m->usage ? m->usage->output_tokens : 0;
    }
    if (!p.text) p.text = "";
    if (!p.is_last && !p.n_text && !p.n_output) return false;
    *ret_piece = p;
    return true;
}

void kserve_answer_free(struct kserve_answer *a) { text_free(&a->text); }

/* ---- JSON ------------------------------------------------------------------------------------ */

static void write_head(const struct kserve_answer *a, struct text_buffer *out)
{
    text_addf(out, "{");
    if (a->options.id[0]) {
        text_addf(out, "\"id\":");
        text_add_json(out, a->options.id, strlen(a->options.id));
        text_addf(out, ",");
    }
    text_addf(out, "\"model_name\":");
    text_add_json(out, a->model, strlen(a->model));
    text_addf(out, ",\"model_version\":\"" KSERVE_MODEL_VERSION "\"");
}

static void write_value(enum kserve_output i, const struct kserve_piece *p, struct text_buffer *out)
{
    switch (i) {
    case KSERVE_TEXT_OUTPUT:
        text_add_json(out, p->text, p->n_text);
        break;
    case KSERVE_FINISH_REASON:
        text_add_json(out, p->finish, strlen(p->finish));
        break;
    case KSERVE_NUM_INPUT_TOKENS:
        text_addf(out, "%u", p->n_input);
        break;
    default:
        text_addf(out, "%u", p->n_output);
    }
}

void kserve_answer_infer(const struct kserve_answer *a, const struct kserve_piece *p,
                         struct text_buffer *out)
{
    const char *comma = "";
    write_head(a, out);
    text_addf(out, ",\"outputs\":[");
    for (size_t i = 0; i < KSERVE_N_OUTPUTS; i++) {
        const struct kserve_tensor *t = kserve_output(i);
        if (!a->options.want[i]) continue;
        text_addf(out, "%s{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":[1],\"data\":[", comma,
                  t->name, t->datatype);
        write_value((enum kserve_output)i, p, out);
        text_addf(out, "]}");
        comma = ",";
    }
    text_addf(out, "]}");
}

void kserve_answer_generate(const struct kserve_answer *a, const struct kserve_piece *p,
                            struct text_buffer *out)
{
    write_head(a, out);
    for (size_t i = 0; i < KSERVE_N_OUTPUTS; i++) {
        if (!a->options.want[i]) continue;
        text_addf(out, ",\"%s\":", kserve_output(i)->name);
        write_value((enum kserve_output)i, p, out);
    }
    text_addf(out, "}");
}

/* ---- gRPC ------------------------------------------------------------------------------------ */

static void put_u32(uint8_t to[4], uint32_t x)
{
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(x >> 8 * i);
}

static void raw_bytes(struct text_buffer *to, const char *text, size_t n)
{
    uint8_t length[4];
    put_u32(length, (uint32_t)n); /* texts are shorter than 4 GiB: a message is */
    text_add(to, (const char *)length, sizeof length);
    text_add(to, text, n);
}

static void fill_text(struct kserve_proto *o, size_t n, bool is_raw, struct text_buffer *raw,
                      const char *text, size_t n_text)
{
    if (is_raw) {
        raw_bytes(raw, text, n_text);
        o->raw[n] = (ProtobufCBinaryData){raw->n, (uint8_t *)raw->bytes};
        return;
    }
    o->bytes[n] = (ProtobufCBinaryData){n_text, (uint8_t *)(uintptr_t)text};
    o->contents[n].n_bytes_contents = 1;
    o->contents[n].bytes_contents = &o->bytes[n];
}

static void fill_count(struct kserve_proto *o, size_t n, bool is_raw, uint32_t count)
{
    o->counts[n] = count;
    put_u32(o->words[n], count);
    o->raw[n] = (ProtobufCBinaryData){4, o->words[n]};
    o->contents[n].n_uint_contents = !is_raw;
    o->contents[n].uint_contents = &o->counts[n];
}

bool kserve_proto_fill(struct kserve_proto *o, const struct kserve_answer *a,
                       const struct kserve_piece *p)
{
    bool is_raw = a->options.is_raw;
    size_t n = 0;
    memset(o, 0, sizeof *o);
    inference__model_infer_response__init(&o->response);
    o->one = 1;
    for (size_t i = 0; i < KSERVE_N_OUTPUTS; i++) {
        if (!a->options.want[i]) continue;
        Inference__ModelInferResponse__InferOutputTensor *t = &o->tensors[n];
        inference__model_infer_response__infer_output_tensor__init(t);
        inference__infer_tensor_contents__init(&o->contents[n]);
        t->name = (char *)(uintptr_t)kserve_output(i)->name;
        t->datatype = (char *)(uintptr_t)kserve_output(i)->datatype;
        t->n_shape = 1;
        t->shape = &o->one;
        if (i == KSERVE_TEXT_OUTPUT)
            fill_text(o, n, is_raw, &o->raw_text, p->text, p->n_text);
        else if (i == KSERVE_FINISH_REASON)
            fill_text(o, n, is_raw, &o->raw_finish, p->finish, strlen(p->finish));
        else
            fill_count(o, n, is_raw, i == KSERVE_NUM_INPUT_TOKENS ? p->n_input : p->n_output);
        if (!is_raw) t->contents = &o->contents[n];
        o->tensor_ptrs[n++] = t;
    }
    inference__infer_parameter__init(&o->is_last);
    o->is_last.parameter_choice_case = INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_BOOL_PARAM;
    o->is_last.bool_param = p->is_last;
    inference__model_infer_response__parameters_entry__init(&o->entry);
    o->entry.key = (char *)(uintptr_t) "triton_final_response";
    o->entry.value = &o->is_last;
    o->entries[0] = &o->entry;
    Inference__ModelInferResponse *r = &o->response;
    r->model_name = (char *)(uintptr_t)a->model;
    r->model_version = (char *)(uintptr_t)KSERVE_MODEL_VERSION;
    r->id = (char *)(uintptr_t)a->options.id;
    r->n_parameters = 1;
    r->parameters = o->entries;
    r->n_outputs = n;
    r->outputs = o->tensor_ptrs;
    r->n_raw_output_contents = is_raw ? n : 0;
    r->raw_output_contents = o->raw;
    return !o->raw_text.failed && !o->raw_finish.failed;
}

void kserve_proto_free(struct kserve_proto *o)
{
    text_free(&o->raw_text);
    text_free(&o->raw_finish);
}
