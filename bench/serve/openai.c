/* openai.c - see openai.h.
 *
 * A line is read in one pass, and only data is kept:
 *   AT_NAME --':'--> AT_SPACE --one ' ' is dropped--> AT_VALUE --end of line--> AT_NAME
 *      '--end of line: empty = the event is complete; else a field without a value     */
#include "bench/serve/openai.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"

enum { AT_NAME, AT_SPACE, AT_VALUE };

static td_status keep(struct bench_sse *s, const char *bytes, size_t n, struct td_err *err)
{
    if (n > BENCH_SSE_MAX_EVENT - s->n)
        return td_fail(err, TD_ERR_INVALID, "server-sent event: data is more than %zu bytes",
                       BENCH_SSE_MAX_EVENT);
    if (n > s->capacity - s->n) {
        size_t capacity = s->capacity ? s->capacity : 512;
        while (n > capacity - s->n) capacity *= 2;
        char *grown = realloc(s->data, capacity);
        if (!grown)
            return td_fail(err, TD_ERR_NOMEM, "server-sent event: no memory for %zu bytes",
                           capacity);
        s->data = grown;
        s->capacity = capacity;
    }
    if (n) memcpy(s->data + s->n, bytes, n);
    s->n += n;
    return TD_OK;
}

/* The field's name is complete: is it data? A second data line of one event goes on after a line
 * feed. */
static td_status name_ended(struct bench_sse *s, struct td_err *err)
{
    s->is_data = s->n_name == 4 && !memcmp(s->name, "data", 4);
    if (!s->is_data) return TD_OK;
    td_status st = s->has_data ? keep(s, "\n", 1, err) : TD_OK;
    s->has_data = true;
    return st;
}

static td_status line_ended(struct bench_sse *s, bench_sse_fn fn, void *ctx, struct td_err *err)
{
    td_status st = TD_OK;
    if (s->at == AT_NAME && s->n_name == 0) {
        size_t n = s->n;
        bool has_data = s->has_data;
        s->n = 0;
        s->has_data = false;
        if (has_data) st = fn(n ? s->data : "", n, ctx, err);
    } else if (s->at == AT_NAME) {
        st = name_ended(s, err);
    }
    s->at = AT_NAME;
    s->n_name = 0;
    s->is_data = false;
    return st;
}

td_status bench_sse_feed(struct bench_sse *s, const char *bytes, size_t n_bytes, bench_sse_fn fn,
                         void *ctx, struct td_err *err)
{
    td_status st = TD_OK;
    for (size_t i = 0; i < n_bytes && !st;) {
        char c = bytes[i];
        if (s->after_cr && c == '\n') {
            s->after_cr = false;
            i++;
            continue; /* the line ended before it */
        }
        s->after_cr = false;
        if (c == '\n' || c == '\r') {
            s->after_cr = c == '\r';
            i++;
            st = line_ended(s, fn, ctx, err);
            continue;
        }
        if (s->at == AT_NAME) {
            i++;
            if (c != ':') {
                /* as long as there is room: one that fills it is too long for "data" */
                if (s->n_name < sizeof s->name) s->name[s->n_name++] = c;
                continue;
            }
            st = name_ended(s, err);
            s->at = AT_SPACE;
            continue;
        }
        if (s->at == AT_SPACE) {
            s->at = AT_VALUE;
            if (c == ' ') {
                i++;
                continue;
            }
        }
        size_t n = 1;
        while (i + n < n_bytes && bytes[i + n] != '\n' && bytes[i + n] != '\r') n++;
        if (s->is_data) st = keep(s, bytes + i, n, err);
        i += n;
    }
    return st;
}

void bench_sse_free(struct bench_sse *s)
{
    free(s->data);
    *s = (struct bench_sse){0};
}

/* --- what is in an event ---------------------------------------------------------------------- */

static const char *text_of(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key)); /* NULL: not there, or no text */
}

/* OpenAI's {"error": {"message"}}, vLLM's older {"message"}, FastAPI's {"detail"}; NULL: none of
 * them. */
static const char *message_of(const json_t *root)
{
    const json_t *e = json_object_get(root, "error");
    if (json_is_string(e)) return json_string_value(e);
    if (text_of(e, "message")) return text_of(e, "message");
    if (text_of(root, "message")) return text_of(root, "message");
    return text_of(root, "detail");
}

static void printable(const char *text, size_t n, char ret[201])
{
    size_t k = 0;
    for (size_t i = 0; i < n && k < 200; i++)
        ret[k++] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? ' ' : text[i];
    /* not in the middle of a character */
    while (k && n > 200 && ((unsigned char)text[k] & 0xc0) == 0x80) k--;
    ret[k] = 0;
}

void bench_openai_error(const char *body, size_t n_bytes, char ret_message[201])
{
    json_t *root = NULL;
    const char *message = NULL;
    if (n_bytes && !td_json_load_text(body, n_bytes, "body", &root, NULL))
        message = message_of(root);
    if (message) {
        printable(message, strlen(message), ret_message);
    } else {
        size_t n = 0;
        while (n < n_bytes && body[n] != '\n' && body[n] != '\r') n++;
        printable(body, n, ret_message);
    }
    json_decref(root);
    for (char *c = ret_message; *c;) { /* the report is JSON: only UTF-8 may go in */
        json_t *ok = json_string(c);
        if (ok) {
            json_decref(ok);
            break;
        }
        unsigned char u = (unsigned char)*c;
        size_t n = u < 0x80 ? 1 : u >= 0xf0 ? 4 : u >= 0xe0 ? 3 : 2;
        json_t *one = strnlen(c, n) == n ? json_stringn(c, n) : NULL;
        if (!one)
            *c++ = '?';
        else
            c += n;
        json_decref(one);
    }
}

static td_status usage(const json_t *u, struct bench_chunk *c, struct td_err *err)
{
    static const char what[] = "chunk: usage";
    int64_t prompt = -1, completion = -1, cached = -1;
    if (json_is_null(u) || !u) return TD_OK;
    if (!json_is_object(u)) return td_fail(err, TD_ERR_INVALID, "chunk: usage must be an object");
    td_status s = td_json_i64(u, what, "prompt_tokens", 0, INT32_MAX, &prompt, NULL, err);
    if (!s) s = td_json_i64(u, what, "completion_tokens", 0, INT32_MAX, &completion, NULL, err);
    const json_t *details = json_object_get(u, "prompt_tokens_details");
    if (!s && json_is_object(details))
        s = td_json_i64(details, what, "cached_tokens", 0, INT32_MAX, &cached, &c->has_cached, err);
    c->has_usage = true;
    c->prompt_tokens = (int32_t)prompt;
    c->completion_tokens = (int32_t)completion;
    c->cached_tokens = (int32_t)cached;
    return s;
}

static td_status choice(const json_t *o, struct bench_chunk *c, struct td_err *err)
{
    if (!json_is_object(o))
        return td_fail(err, TD_ERR_INVALID, "chunk: choices[0] must be an object");
    const json_t *text = json_object_get(o, "text"), *ids = json_object_get(o, "token_ids"),
                 *finish = json_object_get(o, "finish_reason");
    if (text && !json_is_null(text) && !json_is_string(text))
        return td_fail(err, TD_ERR_INVALID, "chunk: choices[0].text must be a string");
    if (ids && !json_is_null(ids) && !json_is_array(ids))
        return td_fail(err, TD_ERR_INVALID, "chunk: choices[0].token_ids must be an array");
    if (finish && !json_is_null(finish) && !json_is_string(finish))
        return td_fail(err, TD_ERR_INVALID,
                       "chunk: choices[0].finish_reason must be a string or null");
    c->has_choice = true;
    c->n_ids = (int32_t)json_array_size(ids); /* bounded by the event */
    c->has_tokens = c->n_ids > 0 || json_string_length(text) > 0;
    c->has_finish = json_is_string(finish);
    return TD_OK;
}

td_status bench_chunk_parse(const char *data, size_t n_bytes, struct bench_chunk *ret,
                            struct td_err *err)
{
    struct bench_chunk c = {.prompt_tokens = -1, .completion_tokens = -1, .cached_tokens = -1};
    json_t *root = NULL;
    if (n_bytes == 6 && !memcmp(data, "[DONE]", 6)) {
        *ret = (struct bench_chunk){
            .is_done = true, .prompt_tokens = -1, .completion_tokens = -1, .cached_tokens = -1};
        return TD_OK;
    }
    td_status s = td_json_load_text(data, n_bytes, "chunk", &root, err);
    if (s) return s;
    const json_t *choices = json_object_get(root, "choices"),
                 *error = json_object_get(root, "error");
    const char *object = text_of(root, "object");
    if (!json_is_object(root)) {
        s = td_fail(err, TD_ERR_INVALID, "chunk: must be an object");
    } else if ((error && !json_is_null(error)) || (object && !strcmp(object, "error"))) {
        char message[201];
        bench_openai_error(data, n_bytes, message);
        s = td_fail(err, TD_ERR_PEER, "%s", message);
    } else if (choices && !json_is_null(choices) && !json_is_array(choices)) {
        s = td_fail(err, TD_ERR_INVALID, "chunk: choices must be an array");
    }
    if (!s && json_array_size(choices) > 0) s = choice(json_array_get(choices, 0), &c, err);
    if (!s) s = usage(json_object_get(root, "usage"), &c, err);
    json_decref(root);
    if (!s) *ret = c;
    return s;
}
