/* tokenizer_fuzz.c - a tokenizer.json and a text, both from outside.
 *
 * Input: JSON, a NUL, then the text. With no model in the JSON a small byte-level one is put in,
 * so that most inputs reach the components. Invariants: tokenizer_check.h. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_text.h"
#include "tests/fuzz/tokenizer_check.h"

#define TEXT_MAX 2048

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

/* `json` with the small model in it; NULL when it is no object or has a model. Caller frees. */
static char *with_model(const char *text, size_t n)
{
    json_t *root;
    if (td_json_load_text(text, n, "fuzz", &root, NULL)) return NULL;
    char *out = NULL;
    if (json_is_object(root) && !json_object_get(root, "model")) {
        json_t *vocab = json_object();
        for (int byte = 0; byte < 256; byte++) {
            char utf8[5] = {0};
            td_utf8_put(td_byte_to_cp((uint8_t)byte), utf8);
            json_object_set_new(vocab, utf8, json_integer(byte));
        }
        json_object_set_new(vocab, "aa", json_integer(256));
        json_object_set_new(vocab, "\xE2\x96\x81", json_integer(257));
        json_object_set_new(vocab, "<0xE2>", json_integer(258));
        json_object_set_new(root, "model",
                            json_pack("{s:o, s:[s], s:b, s:s}", "vocab", vocab, "merges", "a a",
                                      "byte_fallback", 1, "unk_token", "a"));
        out = json_dumps(root, 0);
    }
    json_decref(root);
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    const uint8_t *nul = n_bytes ? memchr(bytes, 0, n_bytes) : NULL;
    size_t n_json = nul ? (size_t)(nul - bytes) : n_bytes, n_text = nul ? n_bytes - n_json - 1 : 0;
    const char *text = nul ? (const char *)nul + 1 : "";
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    char *whole = with_model((const char *)bytes, n_json);
    td_status s = td_tokenizer_parse(whole ? whole : (const char *)bytes,
                                     whole ? strlen(whole) : n_json, &t, &err);
    TD_ASSERT(s == TD_OK || (t == NULL && err.msg[0] && err.code == s));
    if (!s) check(t, text, n_text < TEXT_MAX ? n_text : TEXT_MAX);
    td_tokenizer_free(t);
    free(whole);
    return 0;
}
