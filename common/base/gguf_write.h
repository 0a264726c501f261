/* gguf_write.h - writes a GGUF file (version 3, little endian): first the values, then the list of
 * tensors, then their bytes, streamed in the order of the list.
 *
 * The file appears under its name when it is complete (new_file.h). Values and the list are kept in
 * memory until td_gguf_writer_open, which writes them; a failure to allocate is remembered until
 * then. One thread. */
#ifndef TD_BASE_GGUF_WRITE_H
#define TD_BASE_GGUF_WRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/gguf.h"
#include "common/base/status.h"

struct td_gguf_writer;

td_status td_gguf_writer_create(struct td_gguf_writer **ret, struct td_err *err);
/* Abandons the file unless it is finished; NULL is allowed. */
void td_gguf_writer_close(struct td_gguf_writer *w);

/* A value under `key`, which must not be there yet. Texts are copied. */
void td_gguf_put_u32(struct td_gguf_writer *w, const char *key, uint32_t v);
void td_gguf_put_f32(struct td_gguf_writer *w, const char *key, float v);
void td_gguf_put_bool(struct td_gguf_writer *w, const char *key, bool v);
void td_gguf_put_text(struct td_gguf_writer *w, const char *key, const char *text, size_t n_bytes);
void td_gguf_put_texts(struct td_gguf_writer *w, const char *key, const struct td_gguf_text *texts,
                       size_t n);
/* kind: TD_GGUF_I32 or TD_GGUF_F32 */
void td_gguf_put_numbers(struct td_gguf_writer *w, const char *key, enum td_gguf_kind kind,
                         const void *values, size_t n);
/* A value of another file, as it is. */
void td_gguf_put_value(struct td_gguf_writer *w, const struct td_gguf_value *v);

/* The next tensor of the list. ne: fastest first, ne[0] a multiple of the type's block; the name
 * has fewer than TD_GGUF_NAME_BYTES bytes. */
void td_gguf_put_tensor(struct td_gguf_writer *w, const char *name, uint32_t type, int32_t n_dims,
                        const int64_t *ne);

/* Creates the file and writes all that was put. TD_ERR_INVALID: it exists, and may_replace is
 * false. TD_ERR_IO: no room for it, or another cause. */
td_status td_gguf_writer_open(struct td_gguf_writer *w, const char *path, bool may_replace,
                              struct td_err *err);
/* The next bytes of the tensors, one behind the other without padding. */
td_status td_gguf_writer_append(struct td_gguf_writer *w, const void *bytes, size_t n_bytes,
                                struct td_err *err);
/* When all bytes of all tensors are written. */
td_status td_gguf_writer_finish(struct td_gguf_writer *w, struct td_err *err);

/* Of the whole file, and of the tensors alone; known when the list is complete. */
uint64_t td_gguf_writer_bytes(const struct td_gguf_writer *w, uint64_t *ret_tensor_bytes);

#endif
