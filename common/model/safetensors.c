/* safetensors.c - checks and maps safetensors files.
 *
 * After parse has returned TD_OK, for one file:
 *   1. the header lies inside the file and is JSON without duplicate names;
 *   2. every tensor's bytes lie inside the data that follows the header;
 *   3. sorted by offset the tensors tile that data: no overlap, no hole, nothing after the last;
 *   4. for every element type whose size we know, shape x size = bytes.
 * For a sharded model also: every tensor is in exactly one shard, the one that the index names, and
 * the index names them all. */
#include "common/model/safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/json.h"

/* enough for 150 thousand tensors; JSON takes up to 20 times as much memory */
#define HEADER_BYTES_MAX ((uint64_t)16 << 20)
#define INDEX_BYTES_MAX ((size_t)16 << 20)
#define TENSORS_MAX 200000
#define NAME_BYTES_MAX 512
#define FILES_MAX 4096
#define DIM_MAX ((int64_t)1 << 48)

static const struct {
    const char *name;
    int bits;
    int dtype; /* enum td_dtype, 0 = not one we compute with */
} element_types[] = {
    {"F32", 32, TD_F32}, {"F16", 16, TD_F16}, {"BF16", 16, TD_BF16}, {"F64", 64, 0},
    {"I64", 64, 0},      {"I32", 32, 0},      {"I16", 16, 0},        {"I8", 8, 0},
    {"U64", 64, 0},      {"U32", 32, 0},      {"U16", 16, 0},        {"U8", 8, 0},
    {"BOOL", 8, 0},      {"F8_E4M3", 8, 0},   {"F8_E5M2", 8, 0},     {"F8_E8M0", 8, 0},
    {"C64", 64, 0},      {"F6_E2M3", 6, 0},   {"F6_E3M2", 6, 0},     {"F4", 4, 0},
};

/* Sorts by first byte; of equal ones the empty tensors come first, so that an empty tensor never
 * looks like an overlap. */
static int by_offset(const void *a, const void *b)
{
    const struct td_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

/* Reads "shape" into *t; *ret_n_elements is its product. */
static td_status read_shape(const char *what, const char *name, const json_t *shape,
                            struct td_tensor *t, uint64_t *ret_n_elements, struct td_err *err)
{
    if (json_array_size(shape) > TD_TENSOR_DIMS_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "%s: tensor %.128s has %zu dimensions, must be at most %d", what, name,
                       json_array_size(shape), TD_TENSOR_DIMS_MAX);
    uint64_t n_elements = 1;
    t->n_dims = (int32_t)json_array_size(shape);
    for (int32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        t->shape[i] = json_is_integer(d) ? json_integer_value(d) : -1;
        if (t->shape[i] < 0 || t->shape[i] > DIM_MAX)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: tensor %.128s: shape[%d] must be an integer in 0..2^48", what, name,
                           i);
        if (__builtin_mul_overflow(n_elements, (uint64_t)t->shape[i], &n_elements) ||
            n_elements > UINT64_MAX / 64)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: tensor %.128s: the product of its shape passes 2^58", what, name);
    }
    *ret_n_elements = n_elements;
    return TD_OK;
}

/* Reads {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}. */
static td_status read_tensor(const char *what, const char *name, const json_t *v,
                             const uint8_t *data, uint64_t data_bytes, struct td_tensor *ret,
                             struct td_err *err)
{
    if (strlen(name) > NAME_BYTES_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "%s: tensor name of %zu bytes (%.32s...), must be at most %d", what,
                       strlen(name), name, NAME_BYTES_MAX);
    struct td_tensor t = {0};
    const char *type = json_string_value(json_object_get(v, "dtype"));
    const json_t *shape = json_object_get(v, "shape"),
                 *offsets = json_object_get(v, "data_offsets");
    if (!type || !json_is_array(shape) || !json_is_array(offsets) ||
        json_array_size(offsets) != 2 || json_object_size(v) != 3)
        return td_fail(
            err, TD_ERR_CORRUPT,
            "%s: tensor %.128s must have a dtype, a shape and two data_offsets, and nothing else",
            what, name);
    snprintf(t.dtype_name, sizeof t.dtype_name, "%s", type);

    uint64_t n_elements;
    td_status s = read_shape(what, name, shape, &t, &n_elements, err);
    if (s) return s;

    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!json_is_integer(first) || !json_is_integer(last) || json_integer_value(first) < 0 ||
        json_integer_value(last) < json_integer_value(first))
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: tensor %.128s: data_offsets must be integers with 0 <= begin <= end",
                       what, name);
    uint64_t begin = (uint64_t)json_integer_value(first), end = (uint64_t)json_integer_value(last);
    if (end > data_bytes)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: tensor %.128s ends at byte %" PRIu64 " of the data, which has %" PRIu64
                       " bytes",
                       what, name, end, data_bytes);
    t.data = data + begin;
    t.n_bytes = end - begin;
    for (size_t i = 0; i < sizeof element_types / sizeof *element_types; i++) {
        if (strcmp(type, element_types[i].name) != 0) continue;
        uint64_t n_bits = n_elements * (uint64_t)element_types[i].bits;
        if (n_bits % 8 || n_bits / 8 != t.n_bytes)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: tensor %.128s: %" PRIu64 " elements of %s are %" PRIu64
                           " bytes, but its data_offsets hold %" PRIu64,
                           what, name, n_elements, type, (n_bits + 7) / 8, t.n_bytes);
        if (element_types[i].dtype)
            t.format = td_format_of_dtype((enum td_dtype)element_types[i].dtype);
    }
    t.name = strdup(name);
    if (!t.name) return td_fail(err, TD_ERR_NOMEM, "%s: no memory for a tensor name", what);
    *ret = t;
    return TD_OK;
}

/* Invariant 3. */
static td_status check_tiling(const char *what, struct td_checkpoint *st, const uint8_t *data,
                              uint64_t data_bytes, struct td_err *err)
{
    qsort(st->tensors, (size_t)st->n_tensors, sizeof *st->tensors, by_offset);
    uint64_t at = 0;
    for (int32_t i = 0; i < st->n_tensors; i++) {
        const struct td_tensor *t = &st->tensors[i];
        uint64_t begin = (uint64_t)(t->data - data);
        if (begin < at)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: tensor %.128s begins at byte %" PRIu64
                           ", inside tensor %.128s, which ends at %" PRIu64,
                           what, t->name, begin, st->tensors[i - 1].name, at);
        if (begin > at)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: bytes %" PRIu64 " to %" PRIu64
                           " before tensor %.128s belong to no tensor",
                           what, at, begin, t->name);
        at = begin + t->n_bytes;
    }
    if (at != data_bytes)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: the tensors end at byte %" PRIu64 " of the data, which has %" PRIu64
                       " bytes",
                       what, at, data_bytes);
    return TD_OK;
}

static td_status read_header(const char *what, const json_t *root, const uint8_t *data,
                             uint64_t data_bytes, struct td_checkpoint *st, struct td_err *err)
{
    const json_t *meta = json_object_get(root, "__metadata__");
    if (meta && !json_is_object(meta))
        return td_fail(err, TD_ERR_CORRUPT, "%s: __metadata__ must be an object", what);
    size_t n = json_object_size(root) - (meta != NULL);
    if (n == 0) return td_fail(err, TD_ERR_CORRUPT, "%s: the header names no tensor", what);
    if (n > TENSORS_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s: %zu tensors, must be at most %d", what, n,
                       TENSORS_MAX);
    st->tensors = calloc(n, sizeof *st->tensors);
    if (!st->tensors) return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu tensors", what, n);
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)root, name, v)
    {
        if (v == meta) continue;
        td_status s =
            read_tensor(what, name, v, data, data_bytes, &st->tensors[st->n_tensors], err);
        if (s) return s;
        st->n_tensors++;
    }
    return check_tiling(what, st, data, data_bytes, err);
}

td_status td_safetensors_parse(const uint8_t *bytes, size_t n_bytes, const char *what,
                               struct td_checkpoint *ret_st, struct td_err *err)
{
    if (n_bytes < 8)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: %zu bytes are too few for a safetensors file (header length: 8 bytes)",
                       what, n_bytes);
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | bytes[i];
    if (header_bytes > n_bytes - 8)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: header length is %" PRIu64 ", but only %zu bytes follow it", what,
                       header_bytes, n_bytes - 8);
    if (header_bytes > HEADER_BYTES_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "%s: header length is %" PRIu64 ", must be at most %" PRIu64, what,
                       header_bytes, HEADER_BYTES_MAX);
    json_error_t je;
    json_t *root =
        json_loadb((const char *)bytes + 8, (size_t)header_bytes, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return td_fail(err, TD_ERR_CORRUPT, "%s: header: line %d, column %d: %s", what, je.line,
                       je.column, je.text);

    struct td_checkpoint st = {0};
    td_status s = TD_OK;
    if (!json_is_object(root))
        s = td_fail(err, TD_ERR_CORRUPT, "%s: header must be a JSON object", what);
    else
        s = read_header(what, root, bytes + 8 + header_bytes, n_bytes - 8 - header_bytes, &st, err);
    json_decref(root);
    if (s) {
        td_checkpoint_close(&st);
        return s;
    }
    qsort(st.tensors, (size_t)st.n_tensors, sizeof *st.tensors, td_tensor_by_name);
    *ret_st = st;
    return TD_OK;
}

/* Maps DIR/FILE and moves its tensors (unsorted) behind those of st. */
static td_status add_file(const char *dir, const char *file, struct td_checkpoint *st,
                          struct td_err *err)
{
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    if (n < 0 || (size_t)n >= sizeof path)
        return td_fail(err, TD_ERR_LIMIT, "model directory: path is longer than %zu bytes",
                       sizeof path - 1);
    struct td_file_map *map = &st->files[st->n_files];
    td_status s = td_file_map_open(path, map, err);
    if (s) return s;
    st->n_files++;
    static const uint8_t nothing[1];
    struct td_checkpoint one;
    if ((s = td_safetensors_parse(map->base ? map->base : nothing, map->bytes, path, &one, err)))
        return s;
    struct td_tensor *all =
        realloc(st->tensors, ((size_t)st->n_tensors + (size_t)one.n_tensors) * sizeof *all);
    if (!all) {
        td_checkpoint_close(&one);
        return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %d tensors", path, one.n_tensors);
    }
    memcpy(all + st->n_tensors, one.tensors, (size_t)one.n_tensors * sizeof *all);
    st->tensors = all;
    st->n_tensors += one.n_tensors;
    free(one.tensors);
    return TD_OK;
}

/* A shard is a plain file name beside the index; a path that leaves the directory is an attack or a
 * mistake. */
static bool is_shard_name(const char *file)
{
    size_t n = strlen(file);
    return n > 12 && n < 256 && strcmp(file + n - 12, ".safetensors") == 0 && !strchr(file, '/') &&
           file[0] != '.';
}

static td_status check_map(const char *what, const json_t *map, const json_t *shards,
                           const struct td_checkpoint *st, struct td_err *err)
{
    /* st->tensors still stand in file order: file i holds the tensors between its mapping's
       bounds. */
    for (int32_t i = 0; i < st->n_tensors; i++) {
        const struct td_tensor *t = &st->tensors[i];
        const char *file = json_string_value(json_object_get(map, t->name));
        if (!file)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: tensor %.128s is in a shard, but not in weight_map", what, t->name);
        size_t f = (size_t)json_integer_value(json_object_get(shards, file));
        if (t->data < st->files[f].base || t->data > st->files[f].base + st->files[f].bytes)
            return td_fail(
                err, TD_ERR_CORRUPT,
                "%s: tensor %.128s is not in %.64s, where weight_map puts it, but in another shard",
                what, t->name, file);
    }
    return TD_OK;
}

/* Opens each file that weight_map names; shards gets file name -> number. */
static td_status add_shards(const char *dir, const char *what, json_t *map, json_t *shards,
                            struct td_checkpoint *st, struct td_err *err)
{
    const char *name;
    json_t *v;
    json_object_foreach(map, name, v)
    {
        const char *file = json_string_value(v);
        if (!file || !is_shard_name(file))
            return td_fail(
                err, TD_ERR_CORRUPT,
                "%s: weight_map puts %.128s into \"%.64s\", must be a plain name ending in "
                ".safetensors",
                what, name, file ? file : "(not a string)");
        if (json_object_get(shards, file)) continue;
        if (json_object_size(shards) == FILES_MAX)
            return td_fail(err, TD_ERR_LIMIT, "%s: more than %d shards", what, FILES_MAX);
        if (json_object_set_new(shards, file, json_integer(st->n_files)))
            return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
        td_status s = add_file(dir, file, st, err);
        if (s) return s;
    }
    return TD_OK;
}

/* Sorts the tensors of all shards by name: none may be there twice, and each that weight_map names
 * must be there. */
static td_status sort_tensors(const char *what, json_t *map, struct td_checkpoint *st,
                              struct td_err *err)
{
    const char *name;
    json_t *v;
    qsort(st->tensors, (size_t)st->n_tensors, sizeof *st->tensors, td_tensor_by_name);
    for (int32_t i = 1; i < st->n_tensors; i++)
        if (strcmp(st->tensors[i - 1].name, st->tensors[i].name) == 0)
            return td_fail(err, TD_ERR_CORRUPT, "%s: tensor %.128s is in two shards", what,
                           st->tensors[i].name);
    json_object_foreach(map, name, v)
    {
        if (!td_checkpoint_find(st, name))
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: weight_map names tensor %.128s, but %.64s does not hold it", what,
                           name, json_string_value(v));
    }
    return TD_OK;
}

static td_status open_shards(const char *dir, const char *index_path, struct td_checkpoint *st,
                             struct td_err *err)
{
    json_t *root, *shards = NULL;
    td_status s = td_json_load_file(index_path, INDEX_BYTES_MAX, &root, err);
    if (s) return s;
    json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0) {
        s = td_fail(err, TD_ERR_CORRUPT,
                    "%s: weight_map is missing or empty, must map tensor names to files",
                    index_path);
        goto out;
    }
    shards = json_object();
    st->files = calloc(FILES_MAX, sizeof *st->files);
    if (!shards || !st->files) {
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory", index_path);
        goto out;
    }
    s = add_shards(dir, index_path, map, shards, st, err);
    if (!s) s = check_map(index_path, map, shards, st, err);
    if (!s) s = sort_tensors(index_path, map, st, err);
out:
    json_decref(shards);
    json_decref(root);
    return s;
}

td_status td_safetensors_open(const char *dir, struct td_checkpoint *ret_st, struct td_err *err)
{
    char path[4096], index_path[4096];
    int n = snprintf(path, sizeof path, "%s/model.safetensors", dir);
    int m = snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", dir);
    if (n < 0 || (size_t)n >= sizeof path || m < 0 || (size_t)m >= sizeof index_path)
        return td_fail(err, TD_ERR_LIMIT,
                       "model directory: path of %zu bytes is too long, must be below %zu",
                       strlen(dir), sizeof path - 32);
    struct td_checkpoint st = {0};
    td_status s;
    if (access(path, F_OK) == 0) {
        st.files = calloc(1, sizeof *st.files);
        s = st.files ? add_file(dir, "model.safetensors", &st, err)
                     : td_fail(err, TD_ERR_NOMEM, "%s: no memory", path);
    } else if (access(index_path, F_OK) == 0) {
        s = open_shards(dir, index_path, &st, err);
    } else {
        return td_fail(err, TD_ERR_NOT_FOUND,
                       "%s: holds neither model.safetensors nor model.safetensors.index.json", dir);
    }
    if (s) {
        td_checkpoint_close(&st);
        return s;
    }
    *ret_st = st;
    return TD_OK;
}
