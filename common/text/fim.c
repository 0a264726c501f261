/* fim.c - see fim.h. */
#include "common/text/fim.h"

#include <stdlib.h>
#include <string.h>

static const struct words {
    const char *before, *after, *middle;
} families[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}, /* Qwen2.5-Coder, CodeGemma */
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"},       /* StarCoder, StarCoder2 */
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>"},       /* SantaCoder */
    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}, /* DeepSeek-Coder */
};

/* Whether the word in a text is one token: a piece of the vocabulary that is no added token is
 * not. */
static bool is_token(const struct td_tokenizer *t, const char *word)
{
    struct td_token_list list = {0};
    struct td_err err;
    int32_t id = td_tokenizer_token_id(t, word);
    bool is = id >= 0 && !td_tokenizer_encode(t, word, strlen(word), false, 8, &list, &err) &&
              list.n == 1 && list.ids[0] == id;
    td_token_list_free(&list);
    return is;
}

static const struct words *words_of(const struct td_tokenizer *t)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const struct words *w = &families[i];
        if (is_token(t, w->before) && is_token(t, w->after) && is_token(t, w->middle)) return w;
    }
    return NULL;
}

static char *put(char *to, const char *bytes, size_t n)
{
    memcpy(to, bytes, n);
    return to + n;
}

td_status td_fim_prompt(const struct td_tokenizer *t, const char *before, size_t n_before,
                        const char *after, size_t n_after, char **ret_text, size_t *ret_bytes,
                        struct td_err *err)
{
    const struct words *w = words_of(t);
    if (!w)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "suffix is not supported by this model: its tokenizer has no tokens like %s,"
                       " %s and %s",
                       families[0].before, families[0].after, families[0].middle);
    size_t n[] = {strlen(w->before), n_before, strlen(w->after), n_after, strlen(w->middle)};
    size_t n_bytes = n[0] + n[1] + n[2] + n[3] + n[4];
    char *text = malloc(n_bytes), *at = text;
    if (!text) return td_fail(err, TD_ERR_AGAIN, "no memory for a prompt of %zu bytes", n_bytes);
    at = put(at, w->before, n[0]);
    if (n_before) at = put(at, before, n_before);
    at = put(at, w->after, n[2]);
    if (n_after) at = put(at, after, n_after);
    put(at, w->middle, n[4]);
    *ret_text = text;
    *ret_bytes = n_bytes;
    return TD_OK;
}
