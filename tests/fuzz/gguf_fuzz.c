/* gguf_fuzz.c - a GGUF file's bytes, behind a good magic and version when the first input byte is
 * odd. What is accepted has every string and tensor inside the file, and goes on to those who read
 * its keys: the settings of a model, its tokenizer. They may refuse it. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/gguf_config.h"
#include "common/text/tokenizer_gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void walk(const struct td_gguf *g, const uint8_t *file, size_t n)
{
    volatile uint8_t sink = 0;
    for (size_t i = 0; i < g->n_values; i++) {
        const struct td_gguf_value *v = &g->values[i];
        const uint8_t *at = NULL;
        for (uint64_t k = 0; v->kind == TD_GGUF_STRING && k < v->n; k++) {
            struct td_gguf_text t = td_gguf_next(v, &at);
            for (size_t j = 0; j < t.n; j++) sink = (uint8_t)(sink + (uint8_t)t.bytes[j]);
        }
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        const struct td_gguf_tensor *t = &g->tensors[i];
        TD_ASSERT(t->data >= file && t->n_bytes <= (uint64_t)(file + n - t->data));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const uint8_t head[8] = {'G', 'G', 'U', 'F', 3};
    if (n_bytes < 1) return 0;
    size_t skip = data[0] & 1 ? sizeof head : 0, n = n_bytes - 1 + skip;
    uint8_t *file = malloc(n ? n : 1);
    if (!file) return 0;
    memcpy(file, head, skip);
    memcpy(file + skip, data + 1, n_bytes - 1);
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    td_status s = td_gguf_parse(file, n, "fuzz", &g, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
    } else {
        struct td_model_config config;
        struct td_tokenizer *t = NULL;
        walk(g, file, n);
        s = td_gguf_config(g, "fuzz", &config, &err);
        TD_ASSERT(!s || err.msg[0]);
        s = td_tokenizer_from_gguf(g, "fuzz", &t, &err);
        TD_ASSERT(!s || err.msg[0]);
        td_tokenizer_free(t);
        td_gguf_close(g);
    }
    free(file);
    return 0;
}
