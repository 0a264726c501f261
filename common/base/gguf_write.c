/* gguf_write.c - see gguf_write.h. Multi-byte numbers are copied as they stand in memory, so this
 * is for little-endian hosts, as all of tandem. */
#include "common/base/gguf_write.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/new_file.h"

#define ALIGNMENT 32u

struct bytes {
    uint8_t *at;
    size_t n, capacity;
};

struct td_gguf_writer {
    struct bytes values, infos;
    uint64_t n_values, n_tensors;
    uint64_t *ends; /* [n_tensors] in the data, padding left out, from the first tensor on */
    size_t ends_capacity;
    uint64_t tensor_bytes, data_bytes; /* without and with padding */
    bool no_memory;
    struct td_new_file file;
    uint64_t written;   /* of tensor_bytes */
    uint64_t at_tensor; /* whose bytes come next */
};

static const uint8_t zeros[ALIGNMENT];

static uint64_t align(uint64_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static void put(struct td_gguf_writer *w, struct bytes *b, const void *from, size_t n)
{
    if (w->no_memory || n == 0) return;
    if (n > b->capacity - b->n) {
        size_t capacity = (b->n + n) * 2;
        uint8_t *grown = realloc(b->at, capacity);
        if (!grown) {
            w->no_memory = true;
            return;
        }
        b->at = grown;
        b->capacity = capacity;
    }
    memcpy(b->at + b->n, from, n);
    b->n += n;
}

static void put_u32(struct td_gguf_writer *w, struct bytes *b, uint32_t v) { put(w, b, &v, 4); }
static void put_u64(struct td_gguf_writer *w, struct bytes *b, uint64_t v) { put(w, b, &v, 8); }
static void put_text(struct td_gguf_writer *w, struct bytes *b, const char *text, size_t n)
{
    put_u64(w, b, n);
    put(w, b, text, n);
}

static void put_key(struct td_gguf_writer *w, const char *key, size_t n, enum td_gguf_kind kind)
{
    put_text(w, &w->values, key, n);
    put_u32(w, &w->values, kind);
    w->n_values++;
}

void td_gguf_put_u32(struct td_gguf_writer *w, const char *key, uint32_t v)
{
    put_key(w, key, strlen(key), TD_GGUF_U32);
    put_u32(w, &w->values, v);
}

void td_gguf_put_f32(struct td_gguf_writer *w, const char *key, float v)
{
    put_key(w, key, strlen(key), TD_GGUF_F32);
    put(w, &w->values, &v, sizeof v);
}

void td_gguf_put_bool(struct td_gguf_writer *w, const char *key, bool v)
{
    uint8_t byte = v;
    put_key(w, key, strlen(key), TD_GGUF_BOOL);
    put(w, &w->values, &byte, 1);
}

void td_gguf_put_text(struct td_gguf_writer *w, const char *key, const char *text, size_t n_bytes)
{
    put_key(w, key, strlen(key), TD_GGUF_STRING);
    put_text(w, &w->values, text, n_bytes);
}

static void put_array(struct td_gguf_writer *w, const char *key, size_t n_key,
                      enum td_gguf_kind kind, uint64_t n)
{
    put_key(w, key, n_key, TD_GGUF_ARRAY);
    put_u32(w, &w->values, kind);
    put_u64(w, &w->values, n);
}

void td_gguf_put_texts(struct td_gguf_writer *w, const char *key, const struct td_gguf_text *texts,
                       size_t n)
{
    put_array(w, key, strlen(key), TD_GGUF_STRING, n);
    for (size_t i = 0; i < n; i++) put_text(w, &w->values, texts[i].bytes, texts[i].n);
}

void td_gguf_put_numbers(struct td_gguf_writer *w, const char *key, enum td_gguf_kind kind,
                         const void *values, size_t n)
{
    TD_ASSERT(kind == TD_GGUF_I32 || kind == TD_GGUF_F32);
    put_array(w, key, strlen(key), kind, n);
    put(w, &w->values, values, n * 4);
}

void td_gguf_put_value(struct td_gguf_writer *w, const struct td_gguf_value *v)
{
    if (v->is_array)
        put_array(w, v->key.bytes, v->key.n, v->kind, v->n);
    else
        put_key(w, v->key.bytes, v->key.n, v->kind);
    put(w, &w->values, v->data, td_gguf_value_bytes(v));
}

void td_gguf_put_tensor(struct td_gguf_writer *w, const char *name, uint32_t type, int32_t n_dims,
                        const int64_t *ne)
{
    const char *type_name;
    int32_t block, block_bytes;
    uint64_t n = 1;
    TD_ASSERT(td_gguf_type(type, &type_name, &block, &block_bytes) && ne[0] % block == 0);
    TD_ASSERT(n_dims >= 1 && n_dims <= TD_GGUF_DIMS_MAX && strlen(name) < TD_GGUF_NAME_BYTES);
    if (w->n_tensors == w->ends_capacity) {
        size_t capacity = w->ends_capacity ? 2 * w->ends_capacity : 256;
        uint64_t *grown = realloc(w->ends, capacity * sizeof *grown);
        if (!grown) {
            w->no_memory = true;
            return;
        }
        w->ends = grown;
        w->ends_capacity = capacity;
    }
    put_text(w, &w->infos, name, strlen(name));
    put_u32(w, &w->infos, (uint32_t)n_dims);
    for (int32_t i = 0; i < n_dims; i++) {
        put_u64(w, &w->infos, (uint64_t)ne[i]);
        n *= (uint64_t)ne[i];
    }
    put_u32(w, &w->infos, type);
    put_u64(w, &w->infos, w->data_bytes);
    w->tensor_bytes += n / (uint64_t)block * (uint64_t)block_bytes;
    w->data_bytes = align(w->data_bytes + n / (uint64_t)block * (uint64_t)block_bytes);
    w->ends[w->n_tensors++] = w->tensor_bytes;
}

uint64_t td_gguf_writer_bytes(const struct td_gguf_writer *w, uint64_t *ret_tensor_bytes)
{
    if (ret_tensor_bytes) *ret_tensor_bytes = w->tensor_bytes;
    return align(24 + w->values.n + w->infos.n) + w->data_bytes;
}

td_status td_gguf_writer_create(struct td_gguf_writer **ret, struct td_err *err)
{
    struct td_gguf_writer *w = calloc(1, sizeof *w);
    if (!w) return td_fail(err, TD_ERR_NOMEM, "no memory for a file's header");
    w->file.fd = -1;
    *ret = w;
    return TD_OK;
}

static td_status write_head(struct td_gguf_writer *w, struct td_err *err)
{
    struct bytes head = {0};
    put(w, &head, "GGUF", 4);
    put_u32(w, &head, 3);
    put_u64(w, &head, w->n_tensors);
    put_u64(w, &head, w->n_values);
    put(w, &head, w->values.at, w->values.n);
    put(w, &head, w->infos.at, w->infos.n);
    put(w, &head, zeros, (size_t)(align(head.n) - head.n));
    td_status s = w->no_memory ? td_fail(err, TD_ERR_NOMEM, "no memory for a file's header")
                               : td_new_file_write(&w->file, head.at, head.n, err);
    free(head.at);
    return s;
}

td_status td_gguf_writer_open(struct td_gguf_writer *w, const char *path, bool may_replace,
                              struct td_err *err)
{
    td_status s = td_new_file_create(&w->file, path, may_replace, err);
    if (!s) s = td_new_file_reserve(&w->file, td_gguf_writer_bytes(w, NULL), err);
    return s ? s : write_head(w, err);
}

td_status td_gguf_writer_append(struct td_gguf_writer *w, const void *bytes, size_t n_bytes,
                                struct td_err *err)
{
    const uint8_t *at = bytes;
    TD_ASSERT(n_bytes <= w->tensor_bytes - w->written);
    while (n_bytes > 0) {
        uint64_t left = w->ends[w->at_tensor] - w->written;
        size_t n = n_bytes < left ? n_bytes : (size_t)left;
        td_status s = td_new_file_write(&w->file, at, n, err);
        if (s) return s;
        at += n;
        n_bytes -= n;
        w->written += n;
        if (n < left) break;
        w->at_tensor++;
        s = td_new_file_write(&w->file, zeros, (size_t)(align(w->file.n_bytes) - w->file.n_bytes),
                              err);
        if (s) return s;
    }
    return TD_OK;
}

td_status td_gguf_writer_finish(struct td_gguf_writer *w, struct td_err *err)
{
    TD_ASSERT(w->written == w->tensor_bytes);
    return td_new_file_commit(&w->file, err);
}

void td_gguf_writer_close(struct td_gguf_writer *w)
{
    if (!w) return;
    td_new_file_abandon(&w->file);
    free(w->values.at);
    free(w->infos.at);
    free(w->ends);
    free(w);
}
