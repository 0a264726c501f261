/* gguf_file.h - writes GGUF files for tests: values and tensors are appended, gf_finish puts the
 * header in front. Everything is little endian, as the hosts of the tests are. */
#ifndef TD_TESTS_GGUF_FILE_H
#define TD_TESTS_GGUF_FILE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/gguf.h"

struct gf_buf {
    uint8_t *bytes;
    size_t n, capacity;
};

struct gf {
    struct gf_buf values, infos, data;
    uint64_t n_values, n_tensors;
    size_t alignment; /* 0: 32 */
};

static inline void gf_put(struct gf_buf *b, const void *bytes, size_t n)
{
    if (b->n + n > b->capacity) {
        b->capacity = (b->n + n) * 2;
        b->bytes = realloc(b->bytes, b->capacity);
        assert_non_null(b->bytes);
    }
    if (n) memcpy(b->bytes + b->n, bytes, n);
    b->n += n;
}
static inline void gf_put_u32(struct gf_buf *b, uint32_t v) { gf_put(b, &v, 4); }
static inline void gf_put_u64(struct gf_buf *b, uint64_t v) { gf_put(b, &v, 8); }
static inline void gf_put_text(struct gf_buf *b, const char *text)
{
    gf_put_u64(b, strlen(text));
    gf_put(b, text, strlen(text));
}

/* A value of any kind, its bytes given. */
static inline void gf_raw(struct gf *f, const char *key, uint32_t kind, const void *bytes, size_t n)
{
    gf_put_text(&f->values, key);
    gf_put_u32(&f->values, kind);
    gf_put(&f->values, bytes, n);
    f->n_values++;
}
static inline void gf_u32(struct gf *f, const char *key, uint32_t v)
{
    gf_raw(f, key, TD_GGUF_U32, &v, 4);
}
static inline void gf_f32(struct gf *f, const char *key, float v)
{
    gf_raw(f, key, TD_GGUF_F32, &v, 4);
}
static inline void gf_bool(struct gf *f, const char *key, uint8_t v)
{
    gf_raw(f, key, TD_GGUF_BOOL, &v, 1);
}
static inline void gf_str(struct gf *f, const char *key, const char *text)
{
    struct gf_buf b = {0};
    gf_put_text(&b, text);
    gf_raw(f, key, TD_GGUF_STRING, b.bytes, b.n);
    free(b.bytes);
}
/* An array whose elements are `bytes`. */
static inline void gf_array(struct gf *f, const char *key, uint32_t kind, uint64_t n,
                            const void *bytes, size_t n_bytes)
{
    struct gf_buf b = {0};
    gf_put_u32(&b, kind);
    gf_put_u64(&b, n);
    gf_put(&b, bytes, n_bytes);
    gf_raw(f, key, TD_GGUF_ARRAY, b.bytes, b.n);
    free(b.bytes);
}
static inline void gf_strs(struct gf *f, const char *key, const char *const *texts, uint64_t n)
{
    struct gf_buf b = {0};
    for (uint64_t i = 0; i < n; i++) gf_put_text(&b, texts[i]);
    gf_array(f, key, TD_GGUF_STRING, n, b.bytes, b.n);
    free(b.bytes);
}

static inline size_t gf_align(const struct gf *f, size_t n)
{
    size_t unit = f->alignment ? f->alignment : 32;
    return (n + unit - 1) / unit * unit;
}

/* A tensor's record alone, so that any of it may be wrong. */
static inline void gf_info(struct gf *f, const char *name, uint32_t n_dims, const int64_t *ne,
                           uint32_t type, uint64_t offset)
{
    gf_put_text(&f->infos, name);
    gf_put_u32(&f->infos, n_dims);
    gf_put(&f->infos, ne, n_dims * sizeof *ne);
    gf_put_u32(&f->infos, type);
    gf_put_u64(&f->infos, offset);
    f->n_tensors++;
}

/* ne[1] or ne[2] 0: fewer dimensions. */
static inline void gf_tensor3(struct gf *f, const char *name, const int64_t ne[3], uint32_t type,
                              const void *bytes, size_t n)
{
    static const uint8_t zeros[65536];
    gf_put(&f->data, zeros, gf_align(f, f->data.n) - f->data.n);
    gf_info(f, name, ne[1] ? ne[2] ? 3 : 2 : 1, ne, type, f->data.n);
    gf_put(&f->data, bytes, n);
}

/* ne1 0: a vector. */
static inline void gf_tensor(struct gf *f, const char *name, int64_t ne0, int64_t ne1,
                             uint32_t type, const void *bytes, size_t n)
{
    gf_tensor3(f, name, (const int64_t[3]){ne0, ne1, 0}, type, bytes, n);
}

/* The file, malloc'd; f is emptied. */
static inline uint8_t *gf_finish(struct gf *f, size_t *ret_n)
{
    static const uint8_t zeros[65536];
    struct gf_buf out = {0};
    gf_put(&out, "GGUF", 4);
    gf_put_u32(&out, 3);
    gf_put_u64(&out, f->n_tensors);
    gf_put_u64(&out, f->n_values);
    gf_put(&out, f->values.bytes, f->values.n);
    gf_put(&out, f->infos.bytes, f->infos.n);
    gf_put(&out, zeros, gf_align(f, out.n) - out.n);
    gf_put(&out, f->data.bytes, f->data.n);
    free(f->values.bytes), free(f->infos.bytes), free(f->data.bytes);
    *f = (struct gf){0};
    /* exactly as long as the file, so that a sanitizer sees a read behind it */
    uint8_t *exact = malloc(out.n);
    assert_non_null(exact);
    memcpy(exact, out.bytes, out.n);
    free(out.bytes);
    *ret_n = out.n;
    return exact;
}

static inline void gf_write(struct gf *f, const char *path)
{
    size_t n;
    uint8_t *bytes = gf_finish(f, &n);
    FILE *out = fopen(path, "wb");
    if (!out || fwrite(bytes, 1, n, out) != n || fclose(out)) fail_msg("cannot write %s", path);
    free(bytes);
}

#endif
