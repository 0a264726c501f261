/* chat_template_fuzz.c - any bytes as a template, rendered for a few chats, and as the JSON of a
 * chat's tools, arguments and template_kwargs. Nothing may crash,
 * leak, run long or hold more bytes than its budget; text has its stated length and no more than
 * it may. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/chat_template.h"
#include "common/text/jinja.h"
#include "tests/fuzz/heap.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const struct td_chat_message messages[] = {
    {.role = "system", .content = "be\xc2\xa0 brief ", .content_bytes = 11},
    {.role = "user", .content = " Hello\n", .content_bytes = 7},
    {.role = "assistant",
     .content = "<think>\nhm\n</think>\n\nHi \xf0\x9f\x98\x80",
     .content_bytes = 28},
    {.role = "user", .content = "a\0b\xff\xe3\x80", .content_bytes = 6}};

static const char args_text[] = "{\"x\": [1.5, \"\u00e9\"]}";
static const char tool_text[] = "{\"function\": {\"name\": \"f\", \"p\": {\"q\": 0.5}}}";
static const struct td_chat_tool_call call = {"c1", "f", {args_text, sizeof args_text - 1}};
static const struct td_chat_message tool_messages[] = {
    {.role = "user", .content = "a", .content_bytes = 1},
    {.role = "assistant", .content = "", .tool_calls = &call, .n_tool_calls = 1},
    {.role = "tool", .content = "\"42\"", .content_bytes = 4, .tool_call_id = "c1", .name = "f"}};
static const struct td_chat_json tool = {tool_text, sizeof tool_text - 1};

/* jansson's own memory for one JSON text of TD_CHAT_MAX_JSON_BYTES */
enum { MAX_TEXT = 1 << 16, MAX_JANSSON = 16 << 20 };

static void render_json(const uint8_t *data, size_t n_bytes)
{
    static const char source[] =
        "{#<|im_start|><|im_end|>'tool'#}{{ tools | tojson(indent=2) }}{% for m in messages %}"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson(ensure_ascii=true, "
        "sort_keys=true) }}{% endfor %}{% endfor %}{% for k in x %}{{ x[k] }}{% endfor %}";
    struct td_chat_template *t = NULL;
    struct td_err err = {0};
    struct td_chat_json json = {(const char *)data, n_bytes};
    struct td_chat_tool_call fuzzed = {"c1", "f", json};
    struct td_chat_message m = {
        .role = "assistant", .content = "", .tool_calls = &fuzzed, .n_tool_calls = 1};
    const struct td_chat chats[] = {
        {.messages = messages, .n_messages = 1, .tools = &json, .n_tools = 1},
        {.messages = messages, .n_messages = 1, .template_kwargs = json},
        {.messages = &m, .n_messages = 1}};
    if (td_chat_template_parse(source, sizeof source - 1, NULL, NULL, &t, &err) != TD_OK) return;
    for (size_t k = 0; k < sizeof chats / sizeof *chats; k++) {
        char *text = NULL;
        size_t n = 0;
        if (td_chat_template_render(t, &chats[k], &text, &n, &err) == TD_OK)
            TD_ASSERT(text[n] == 0);
        else
            TD_ASSERT(err.code != TD_OK && err.msg[0] != 0);
        free(text);
    }
    td_chat_template_free(t);
}

/* All memory of a rendering, and the text that is given out. */
static void check_heap(size_t n_messages, size_t peak)
{
    size_t content = 0;
    for (size_t i = 0; i < n_messages; i++) content += messages[i].content_bytes + 256;
    TD_ASSERT(peak <= ((size_t)64 << 20) + 64 * content + MAX_TEXT + 1 + MAX_JANSSON);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct td_chat_template *t = NULL;
    struct td_jinja *jinja = NULL;
    struct td_err err = {0};
    char *text = NULL;
    size_t n = 0;

    if (td_chat_template_parse((const char *)data, n_bytes, "<s>", n_bytes % 2 ? "</s>" : NULL, &t,
                               &err) == TD_OK) {
        td_chat_template_set_max_bytes(t, MAX_TEXT);
        for (size_t k = 1; k <= 5; k++) {
            struct td_chat chat = {.messages = messages + (k == 3),
                                   .n_messages = k - (k == 3),
                                   .add_generation_prompt = k % 2 != 0};
            if (k == 5)
                chat = (struct td_chat){
                    .messages = tool_messages, .n_messages = 3, .tools = &tool, .n_tools = 1};
            heap_begin();
            bool ok = td_chat_template_render(t, &chat, &text, &n, &err) == TD_OK;
            check_heap(4, heap_end());
            if (ok) {
                TD_ASSERT(text[n] == 0 && n <= MAX_TEXT);
                free(text);
            } else {
                TD_ASSERT(err.code != TD_OK && err.msg[0] != 0);
            }
        }
        td_chat_template_free(t);
    }
    /* past the families' gate */
    if (td_jinja_parse((const char *)data, n_bytes, &jinja, &err) == TD_OK) {
        const struct td_chat chat = {
            .messages = messages, .n_messages = 4, .add_generation_prompt = true};
        struct td_jinja_input input = {
            .chat = &chat, .bos_token = "<s>", .max_text_bytes = MAX_TEXT};
        heap_begin();
        bool ok = td_jinja_render(jinja, &input, &text, &n, &err) == TD_OK;
        check_heap(4, heap_end());
        TD_ASSERT(!ok || n <= MAX_TEXT);
        if (ok) free(text);
        td_jinja_free(jinja);
    }
    render_json(data, n_bytes);
    return 0;
}
