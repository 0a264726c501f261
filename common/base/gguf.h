/* gguf.h - reads a GGUF file (version 2 or 3, little endian): typed values by key, and where the
 * bytes of each tensor lie. Files of a split model are opened together.
 *
 * Nothing in a file is trusted. Before anything is allocated or read, its count or length is
 * compared with the bytes that are left; td_gguf_parse lists what has been checked when it returns
 * TD_OK. What the keys and tensors mean is the business of those who ask for them.
 *
 * Threads: one thread opens and closes; any number may read. */
#ifndef TD_BASE_GGUF_H
#define TD_BASE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/mem.h"
#include "common/base/status.h"

enum td_gguf_kind {
    TD_GGUF_U8,
    TD_GGUF_I8,
    TD_GGUF_U16,
    TD_GGUF_I16,
    TD_GGUF_U32,
    TD_GGUF_I32,
    TD_GGUF_F32,
    TD_GGUF_BOOL,
    TD_GGUF_STRING,
    TD_GGUF_ARRAY,
    TD_GGUF_U64,
    TD_GGUF_I64,
    TD_GGUF_F64,
    TD_GGUF_N_KINDS
};

/* Text of a file: n bytes, any of them, no NUL at the end. */
struct td_gguf_text {
    const char *bytes;
    size_t n;
};

struct td_gguf_value {
    struct td_gguf_text key; /* printable ASCII */
    enum td_gguf_kind kind;  /* of the elements, where it is an array */
    bool is_array;
    uint64_t n;          /* elements; 1 when no array */
    const uint8_t *data; /* of the first element; strings begin with their length, 8 bytes */
};

#define TD_GGUF_DIMS_MAX 4
#define TD_GGUF_NAME_BYTES 64

struct td_gguf_tensor {
    char name[TD_GGUF_NAME_BYTES]; /* printable ASCII, NUL at the end */
    uint32_t type;                 /* number of the format, one that td_gguf_type_name knows */
    int32_t n_dims;
    int64_t ne[TD_GGUF_DIMS_MAX]; /* values along each dimension, fastest first; 1 beyond n_dims */
    const uint8_t *data;
    uint64_t n_bytes;
};

struct td_gguf {
    struct td_gguf_value *values; /* of the first file, sorted by key */
    size_t n_values;
    struct td_gguf_tensor *tensors; /* of all files, in their order */
    size_t n_tensors;
    struct td_file_map *files;
    size_t n_files;
};

/* Whether the path is a regular file that begins with GGUF's magic or is named *.gguf. */
bool td_gguf_is_file(const char *path);

/* Opens a file, or with PREFIX-00001-of-0000N.gguf all N of them. *ret is closed with
 * td_gguf_close. TD_ERR_CORRUPT, TD_ERR_LIMIT, TD_ERR_UNSUPPORTED (an old version, another byte
 * order, a type of tensor that this version does not read) name the field, value and limit. */
td_status td_gguf_open(const char *path, struct td_gguf **ret, struct td_err *err);

/* One file's bytes (borrowed, must outlive *ret); `what` names it in errors. When it returns TD_OK:
 * (1) keys and names of tensors are unique; (2) strings and arrays end inside the file; booleans
 * are 0 or 1; (3) the tensors follow one another in the order of their list, aligned and without
 * gaps, and the last ends at the end of the file, padding aside; (4) rows are whole blocks. */
td_status td_gguf_parse(const uint8_t *bytes, size_t n_bytes, const char *what,
                        struct td_gguf **ret, struct td_err *err);
void td_gguf_close(struct td_gguf *g); /* NULL is allowed */

/* Moves the tensors of `part`, which is file `no` (from 0) of a split model, behind those of g, the
 * model's first file, to which those between were added; the caller still closes part. `what` names
 * it in errors. TD_ERR_CORRUPT: its split.no, split.count or split.tensors.count does not fit the
 * first file's, or it has another key that is not the first file's, by name and value. Most
 * writers give the other files no such key: a part of a sibling (same names, shapes and number of
 * files) cannot be told, except by those who compare models as a whole (td_model_hash). */
td_status td_gguf_add_part(struct td_gguf *g, struct td_gguf *part, int32_t no, const char *what,
                           struct td_err *err);
/* Once all files are there: as many tensors as split.tensors.count says, and none twice. */
td_status td_gguf_check_parts(const struct td_gguf *g, const char *what, struct td_err *err);

/* NULL when absent. */
const struct td_gguf_value *td_gguf_find(const struct td_gguf *g, const char *key);

/* The value under `key`: *ret is untouched when it is absent, and *present (may be NULL) says so.
 * Another kind or a value outside [min, max] is TD_ERR_INVALID. An array whose elements are all
 * equal counts as its element: some writers repeat a number for every layer. */
td_status td_gguf_i64(const struct td_gguf *g, const char *key, int64_t min, int64_t max,
                      int64_t *ret, bool *present, struct td_err *err);
td_status td_gguf_f64(const struct td_gguf *g, const char *key, double min, double max, double *ret,
                      bool *present, struct td_err *err);
td_status td_gguf_bool(const struct td_gguf *g, const char *key, bool *ret, bool *present,
                       struct td_err *err);
td_status td_gguf_str(const struct td_gguf *g, const char *key, struct td_gguf_text *ret,
                      struct td_err *err); /* absent: bytes NULL */

/* Of all elements, with the lengths of texts. */
uint64_t td_gguf_value_bytes(const struct td_gguf_value *v);

bool td_gguf_text_is(struct td_gguf_text t, const char *s);
/* For an error: what can be printed of the first bytes, else '?'; "absent" for none. */
#define TD_GGUF_SHOWN 41
const char *td_gguf_show(struct td_gguf_text t, char buf[TD_GGUF_SHOWN]);

/* A key of our own: all ends of a generation (I32), where these are more than GGUF has keys for. */
#define TD_GGUF_EOS_IDS "tandem.eos_token_ids"

/* An array of that kind of element; absent: *ret is NULL. */
td_status td_gguf_array(const struct td_gguf *g, const char *key, enum td_gguf_kind kind,
                        const struct td_gguf_value **ret, struct td_err *err);

/* Walks an array of strings: *at is NULL before the first. */
struct td_gguf_text td_gguf_next(const struct td_gguf_value *array, const uint8_t **at);
/* Element i of an array of I32 or F32. */
int32_t td_gguf_i32_at(const struct td_gguf_value *array, uint64_t i);
float td_gguf_f32_at(const struct td_gguf_value *array, uint64_t i);

/* A type of tensor by number: its name as GGUF has it, and its size. False: this version does not
 * read it; *ret_name is its name, or NULL when it has none. */
bool td_gguf_type(uint32_t type, const char **ret_name, int32_t *ret_block,
                  int32_t *ret_block_bytes);

#endif
