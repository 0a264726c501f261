/* gguf_fuzz.c - a GGUF file's bytes, behind a good magic and version when the first input byte is
 * odd. What is accepted has every string and tensor inside the file, and goes on to those who read
 * its keys: the settings of a model, its tokenizer. They may refuse it.
 *
 * With bit 1 of the first byte the input is two files of one model: the next two bytes are the
 * length of the first. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/gguf_config.h"
#include "common/text/tokenizer_gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

struct file {
    uint8_t *bytes; /* as long as the file, so that a sanitizer sees a read behind it */
    size_t n;
};

static bool is_inside(const struct td_gguf_tensor *t, const struct file *f)
{
    return t->data >= f->bytes && t->data <= f->bytes + f->n &&
           t->n_bytes <= (uint64_t)(f->bytes + f->n - t->data);
}

static void walk(const struct td_gguf *g, const struct file *first, const struct file *second)
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
    for (size_t i = 0; i < g->n_tensors; i++)
        TD_ASSERT(is_inside(&g->tensors[i], first) || is_inside(&g->tensors[i], second));
}

static struct file copy_file(const uint8_t *data, size_t n, bool with_head)
{
    static const uint8_t head[8] = {'G', 'G', 'U', 'F', 3};
    size_t skip = with_head ? sizeof head : 0;
    struct file f = {malloc(n + skip ? n + skip : 1), n + skip};
    TD_ASSERT(f.bytes);
    memcpy(f.bytes, head, skip);
    if (n) memcpy(f.bytes + skip, data, n);
    return f;
}

/* Adds the second of two files, as td_gguf_open adds each but the first. */
static td_status add_second(struct td_gguf *g, const struct file *f, struct td_err *err)
{
    struct td_gguf *part = NULL;
    td_status s = td_gguf_parse(f->bytes, f->n, "second", &part, err);
    if (!s) s = td_gguf_add_part(g, part, 1, "second", err);
    td_gguf_close(part);
    return s ? s : td_gguf_check_parts(g, "both", err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 3) return 0;
    bool with_head = data[0] & 1, are_two = data[0] & 2;
    size_t skip = are_two ? 3 : 1, n = n_bytes - skip, n_first = n;
    if (are_two) n_first = (size_t)(data[1] | data[2] << 8);
    if (n_first > n) n_first = n;
    struct file first = copy_file(data + skip, n_first, with_head),
                second = copy_file(data + skip + n_first, n - n_first, with_head);
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    td_status s = td_gguf_parse(first.bytes, first.n, "fuzz", &g, &err);
    if (!s && are_two) s = add_second(g, &second, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
    } else {
        struct td_model_config config;
        struct td_tokenizer *t = NULL;
        walk(g, &first, &second);
        s = td_gguf_config(g, "fuzz", &config, &err);
        TD_ASSERT(!s || err.msg[0]);
        s = td_tokenizer_from_gguf(g, "fuzz", &t, &err);
        TD_ASSERT(!s || err.msg[0]);
        td_tokenizer_free(t);
    }
    td_gguf_close(g);
    free(first.bytes);
    free(second.bytes);
    return 0;
}
