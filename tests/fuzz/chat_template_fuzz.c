/* chat_template_fuzz.c - any bytes as a template, rendered for a few chats. Nothing may crash,
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
    {"system", "be\xc2\xa0 brief ", 11},
    {"user", " Hello\n", 7},
    {"assistant", "<think>\nhm\n</think>\n\nHi \xf0\x9f\x98\x80", 28},
    {"user", "a\0b\xff\xe3\x80", 6}};

enum { MAX_TEXT = 1 << 16 };

/* All memory of a rendering, and the text that is given out. */
static void check_heap(size_t n_messages, size_t peak)
{
    size_t content = 0;
    for (size_t i = 0; i < n_messages; i++) content += messages[i].content_bytes + 256;
    TD_ASSERT(peak <= ((size_t)64 << 20) + 64 * content + MAX_TEXT + 1);
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
        for (size_t k = 1; k <= 4; k++) {
            heap_begin();
            bool ok = td_chat_template_render(t, messages + (k == 3), k - (k == 3), k % 2, &text,
                                              &n, &err) == TD_OK;
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
        struct td_jinja_input input = {.messages = messages,
                                       .n_messages = 4,
                                       .add_generation_prompt = true,
                                       .bos_token = "<s>",
                                       .max_text_bytes = MAX_TEXT};
        heap_begin();
        bool ok = td_jinja_render(jinja, &input, &text, &n, &err) == TD_OK;
        check_heap(4, heap_end());
        TD_ASSERT(!ok || n <= MAX_TEXT);
        if (ok) free(text);
        td_jinja_free(jinja);
    }
    return 0;
}
