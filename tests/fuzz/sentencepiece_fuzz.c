/* sentencepiece_fuzz.c - a tokenizer.model (SentencePiece's, or tiktoken's list of ranks), a
 * tokenizer_config.json and a text, all from outside.
 *
 * Input: bytes of the text and of the JSON, two bytes each, low byte first; the text; the JSON
 * (none when it does not parse); the model. Invariants: tokenizer_check.h. */
#include <stdint.h>

#include "common/base/json.h"
#include "common/text/tokenizer_sentencepiece.h"
#include "tests/fuzz/tokenizer_check.h"

#define TEXT_MAX 2048

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

static size_t part(const uint8_t *number, size_t n_left)
{
    size_t n = (size_t)number[0] | (size_t)number[1] << 8;
    return n < n_left ? n : n_left;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    if (n_bytes < 4) return 0;
    const uint8_t *text = bytes + 4;
    size_t n_text = part(bytes, n_bytes - 4);
    const uint8_t *config = text + n_text;
    size_t n_config = part(bytes + 2, n_bytes - 4 - n_text);
    const uint8_t *model = config + n_config;
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    json_t *json = NULL;
    if (td_json_load_text((const char *)config, n_config, "fuzz", &json, NULL)) json = NULL;
    td_status s = td_tokenizer_from_sentencepiece(model, n_bytes - 4 - n_text - n_config, json,
                                                  NULL, &t, &err);
    json_decref(json);
    TD_ASSERT(s == TD_OK || (t == NULL && err.msg[0] && err.code == s));
    if (!s) check(t, (const char *)text, n_text < TEXT_MAX ? n_text : TEXT_MAX);
    td_tokenizer_free(t);
    return 0;
}
