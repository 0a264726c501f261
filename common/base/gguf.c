/* gguf.c - checks and maps GGUF files.
 *
 * A file is a header (magic, version, two counts), values with keys, one record for each tensor,
 * and the tensors' bytes, which begin at the next multiple of the alignment. All reads go through
 * struct reader, which never passes the end. */
#include "common/base/gguf.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define VALUES_MAX 65536
#define TENSORS_MAX 200000
#define TEXT_BYTES_MAX ((uint64_t)1 << 20)
#define TEMPLATE_BYTES_MAX ((uint64_t)64 << 20)
#define ALIGNMENT_MAX 65536
#define ALIGNMENT_DEFAULT 32
#define VALUES_IN_TENSOR_MAX ((int64_t)1 << 48)
#define FILES_MAX 1024
/* the fewest bytes that a value and a tensor's record take */
#define VALUE_BYTES_MIN 13
#define TENSOR_BYTES_MIN 24

static const int kind_bytes[TD_GGUF_N_KINDS] = {
    [TD_GGUF_U8] = 1,  [TD_GGUF_I8] = 1,  [TD_GGUF_U16] = 2, [TD_GGUF_I16] = 2,
    [TD_GGUF_U32] = 4, [TD_GGUF_I32] = 4, [TD_GGUF_F32] = 4, [TD_GGUF_BOOL] = 1,
    [TD_GGUF_U64] = 8, [TD_GGUF_I64] = 8, [TD_GGUF_F64] = 8, [TD_GGUF_STRING] = 8, /* at least */
};

static const char *const kind_names[TD_GGUF_N_KINDS] = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};

/* block 0: known by name only */
static const struct {
    uint32_t type;
    const char *name;
    int32_t block, block_bytes;
} types[] = {
    {0, "F32", 1, 4},       {1, "F16", 1, 2},         {30, "BF16", 1, 2},
    {2, "Q4_0", 32, 18},    {8, "Q8_0", 32, 34},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},      {9, "Q8_1", 0, 0},
    {10, "Q2_K", 256, 84},  {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},
    {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210},   {15, "Q8_K", 0, 0},
    {16, "IQ2_XXS", 0, 0},  {17, "IQ2_XS", 0, 0},     {18, "IQ3_XXS", 0, 0},
    {19, "IQ1_S", 0, 0},    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 0, 0},
    {22, "IQ2_S", 0, 0},    {23, "IQ4_XS", 256, 136}, {24, "I8", 0, 0},
    {25, "I16", 0, 0},      {26, "I32", 0, 0},        {27, "I64", 0, 0},
    {28, "F64", 0, 0},      {29, "IQ1_M", 0, 0},      {34, "TQ1_0", 0, 0},
    {35, "TQ2_0", 0, 0},    {39, "MXFP4", 32, 17},    {40, "NVFP4", 0, 0},
    {41, "Q1_0", 0, 0},     {42, "Q2_0", 0, 0},
};

bool td_gguf_type(uint32_t type, const char **ret_name, int32_t *ret_block,
                  int32_t *ret_block_bytes)
{
    *ret_name = NULL;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i].type != type) continue;
        *ret_name = types[i].name;
        *ret_block = types[i].block;
        *ret_block_bytes = types[i].block_bytes;
        return types[i].block > 0;
    }
    return false;
}

/* ---- reading --------------------------------------------------------------------------------- */

struct reader {
    const uint8_t *at, *end;
    const char *what;
    struct td_err *err;
};

static uint64_t left(const struct reader *r) { return (uint64_t)(r->end - r->at); }

static uint64_t load(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = n - 1; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

static td_status take(struct reader *r, int n, const char *field, uint64_t *ret)
{
    if (left(r) < (uint64_t)n)
        return td_fail(r->err, TD_ERR_CORRUPT, "%s: the file ends inside %s", r->what, field);
    *ret = load(r->at, n);
    r->at += n;
    return TD_OK;
}

static td_status take_text(struct reader *r, uint64_t max, const char *field,
                           struct td_gguf_text *ret)
{
    uint64_t n;
    td_status s = take(r, 8, field, &n);
    if (s) return s;
    if (n > left(r))
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: %s is a text of %" PRIu64 " bytes, but %" PRIu64 " are left", r->what,
                       field, n, left(r));
    if (n > max)
        return td_fail(r->err, TD_ERR_LIMIT,
                       "%s: %s is a text of %" PRIu64 " bytes, must be at most %" PRIu64, r->what,
                       field, n, max);
    *ret = (struct td_gguf_text){(const char *)r->at, (size_t)n};
    r->at += n;
    return TD_OK;
}

static bool is_plain_name(struct td_gguf_text t)
{
    for (size_t i = 0; i < t.n; i++)
        if (t.bytes[i] < 0x21 || t.bytes[i] > 0x7e) return false;
    return t.n > 0;
}

static int by_text(struct td_gguf_text a, struct td_gguf_text b)
{
    int c = memcmp(a.bytes, b.bytes, a.n < b.n ? a.n : b.n);
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

static int by_key(const void *a, const void *b)
{
    return by_text(((const struct td_gguf_value *)a)->key, ((const struct td_gguf_value *)b)->key);
}

/* The elements of a value whose kind and count are known. */
static td_status skip_elements(struct reader *r, const char *field, uint64_t text_max,
                               struct td_gguf_value *v)
{
    v->data = r->at;
    uint64_t size = (uint64_t)kind_bytes[v->kind];
    if (v->n > left(r) / size)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: %s has %" PRIu64 " elements of at least %" PRIu64 " bytes, but %" PRIu64
                       " are left",
                       r->what, field, v->n, size, left(r));
    if (v->kind == TD_GGUF_STRING) {
        struct td_gguf_text text;
        td_status s = TD_OK;
        for (uint64_t i = 0; i < v->n && !s; i++) s = take_text(r, text_max, field, &text);
        return s;
    }
    for (uint64_t i = 0; i < v->n && v->kind == TD_GGUF_BOOL; i++)
        if (v->data[i] > 1)
            return td_fail(r->err, TD_ERR_CORRUPT, "%s: %s is %u, must be 0 or 1 (bool)", r->what,
                           field, v->data[i]);
    r->at += v->n * size;
    return TD_OK;
}

static td_status read_kind(struct reader *r, const char *field, enum td_gguf_kind *ret)
{
    uint64_t kind;
    td_status s = take(r, 4, field, &kind);
    if (s) return s;
    if (kind >= TD_GGUF_N_KINDS)
        return td_fail(r->err, TD_ERR_CORRUPT, "%s: %s has type %" PRIu64 ", must be in 0..%d",
                       r->what, field, kind, TD_GGUF_N_KINDS - 1);
    *ret = (enum td_gguf_kind)kind;
    return TD_OK;
}

static td_status read_value(struct reader *r, uint64_t at, struct td_gguf_value *v)
{
    char field[160];
    snprintf(field, sizeof field, "key number %" PRIu64, at);
    td_status s = take_text(r, TEXT_BYTES_MAX, field, &v->key);
    if (s) return s;
    if (!is_plain_name(v->key))
        return td_fail(r->err, TD_ERR_CORRUPT, "%s: %s is empty or not printable ASCII", r->what,
                       field);
    snprintf(field, sizeof field, "%.*s", v->key.n < 128 ? (int)v->key.n : 128, v->key.bytes);
    if ((s = read_kind(r, field, &v->kind))) return s;
    v->n = 1;
    if (v->kind == TD_GGUF_ARRAY) {
        v->is_array = true;
        if ((s = read_kind(r, field, &v->kind)) || (s = take(r, 8, field, &v->n))) return s;
        if (v->kind == TD_GGUF_ARRAY)
            return td_fail(r->err, TD_ERR_UNSUPPORTED, "%s: %s is an array of arrays", r->what,
                           field);
    }
    bool is_template = strncmp(field, "tokenizer.chat_template", 23) == 0;
    return skip_elements(r, field, is_template ? TEMPLATE_BYTES_MAX : TEXT_BYTES_MAX, v);
}

static td_status read_values(struct reader *r, uint64_t n, struct td_gguf *g)
{
    if (n > left(r) / VALUE_BYTES_MIN || n > VALUES_MAX)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: the header counts %" PRIu64
                       " values, must be at most %d and fit the file's %" PRIu64 " bytes",
                       r->what, n, VALUES_MAX, left(r));
    g->values = calloc(n ? (size_t)n : 1, sizeof *g->values);
    if (!g->values)
        return td_fail(r->err, TD_ERR_NOMEM, "%s: no memory for %" PRIu64 " values", r->what, n);
    for (uint64_t i = 0; i < n; i++) {
        td_status s = read_value(r, i, &g->values[i]);
        if (s) return s;
    }
    g->n_values = (size_t)n;
    qsort(g->values, g->n_values, sizeof *g->values, by_key);
    for (size_t i = 1; i < g->n_values; i++)
        if (by_key(&g->values[i - 1], &g->values[i]) == 0)
            return td_fail(r->err, TD_ERR_CORRUPT, "%s: key %.*s is there twice", r->what,
                           g->values[i].key.n < 128 ? (int)g->values[i].key.n : 128,
                           g->values[i].key.bytes);
    return TD_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static td_status read_shape(struct reader *r, struct td_gguf_tensor *t)
{
    uint64_t n_dims, ne, type;
    td_status s = take(r, 4, t->name, &n_dims);
    if (s) return s;
    if (n_dims < 1 || n_dims > TD_GGUF_DIMS_MAX)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: tensor %s has %" PRIu64 " dimensions, must have 1 to %d", r->what,
                       t->name, n_dims, TD_GGUF_DIMS_MAX);
    t->n_dims = (int32_t)n_dims;
    int64_t n = 1;
    for (int32_t i = 0; i < TD_GGUF_DIMS_MAX; i++) t->ne[i] = 1;
    for (int32_t i = 0; i < t->n_dims; i++) {
        if ((s = take(r, 8, t->name, &ne))) return s;
        t->ne[i] = (int64_t)ne;
        if (t->ne[i] < 1 || __builtin_mul_overflow(n, t->ne[i], &n) || n > VALUES_IN_TENSOR_MAX)
            return td_fail(r->err, TD_ERR_CORRUPT,
                           "%s: tensor %s: dimension %d is %" PRId64
                           ", must be at least 1, and all together at most 2^48 values",
                           r->what, t->name, i, t->ne[i]);
    }
    if ((s = take(r, 4, t->name, &type))) return s;
    t->type = (uint32_t)type;
    const char *name;
    int32_t block, block_bytes;
    if (!td_gguf_type(t->type, &name, &block, &block_bytes))
        return td_fail(r->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s has type %u (%s), which this version does not read", r->what,
                       t->name, t->type, name ? name : "unknown");
    if (t->ne[0] % block)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: tensor %s: rows of %" PRId64 " values are no whole blocks of %d (%s)",
                       r->what, t->name, t->ne[0], block, name);
    t->n_bytes = (uint64_t)(n / block) * (uint64_t)block_bytes;
    return TD_OK;
}

/* Reads one record; *ret_offset is where its bytes begin in the data. */
static td_status read_tensor(struct reader *r, uint64_t at, struct td_gguf_tensor *t,
                             uint64_t *ret_offset)
{
    char field[64];
    struct td_gguf_text name;
    snprintf(field, sizeof field, "the name of tensor number %" PRIu64, at);
    td_status s = take_text(r, TD_GGUF_NAME_BYTES - 1, field, &name);
    if (s) return s;
    if (!is_plain_name(name))
        return td_fail(r->err, TD_ERR_CORRUPT, "%s: %s is empty or not printable ASCII", r->what,
                       field);
    memcpy(t->name, name.bytes, name.n);
    if ((s = read_shape(r, t))) return s;
    return take(r, 8, t->name, ret_offset);
}

static int by_name(const void *a, const void *b)
{
    const struct td_gguf_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* The file of a split model that holds the tensor, from 1; 0 where nothing is mapped. */
static size_t file_of(const struct td_gguf *g, const struct td_gguf_tensor *t)
{
    for (size_t i = 0; i < g->n_files; i++) {
        const uint8_t *base = g->files[i].base;
        if (t->data >= base && t->data < base + g->files[i].bytes) return i + 1;
    }
    return 0;
}

static td_status fail_twice(const struct td_gguf *g, const struct td_gguf_tensor *a,
                            const struct td_gguf_tensor *b, const char *what, struct td_err *err)
{
    size_t in_a = file_of(g, a), in_b = file_of(g, b);
    if (in_a == in_b)
        return td_fail(err, TD_ERR_CORRUPT, "%s: tensor %s is there twice", what, a->name);
    return td_fail(err, TD_ERR_CORRUPT,
                   "%s: tensor %s is there twice, in files %zu and %zu of the model: one is a file "
                   "of another",
                   what, a->name, in_a < in_b ? in_a : in_b, in_a < in_b ? in_b : in_a);
}

static td_status check_names(const struct td_gguf *g, const char *what, struct td_err *err)
{
    const struct td_gguf_tensor **sorted = calloc(g->n_tensors ? g->n_tensors : 1, sizeof *sorted);
    if (!sorted)
        return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu tensors", what, g->n_tensors);
    for (size_t i = 0; i < g->n_tensors; i++) sorted[i] = &g->tensors[i];
    qsort(sorted, g->n_tensors, sizeof *sorted, by_name);
    td_status s = TD_OK;
    for (size_t i = 1; i < g->n_tensors && !s; i++)
        if (by_name(&sorted[i - 1], &sorted[i]) == 0)
            s = fail_twice(g, sorted[i - 1], sorted[i], what, err);
    free(sorted);
    return s;
}

/* Places the tensors one behind the other in data[0..data_bytes), as their offsets must say. */
static td_status place_tensors(const struct reader *r, struct td_gguf *g, const uint64_t *offsets,
                               const uint8_t *data, uint64_t data_bytes, uint64_t alignment)
{
    uint64_t at = 0, end = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct td_gguf_tensor *t = &g->tensors[i];
        if (offsets[i] != at)
            return td_fail(r->err, TD_ERR_CORRUPT,
                           "%s: tensor %s begins at byte %" PRIu64 " of the data, must begin at "
                           "%" PRIu64 " (after the one before, aligned to %" PRIu64 ")",
                           r->what, t->name, offsets[i], at, alignment);
        if (at > data_bytes || t->n_bytes > data_bytes - at)
            return td_fail(r->err, TD_ERR_CORRUPT,
                           "%s: tensor %s has %" PRIu64 " bytes from byte %" PRIu64
                           " of the data, which has %" PRIu64 " bytes",
                           r->what, t->name, t->n_bytes, at, data_bytes);
        t->data = data + at;
        end = at + t->n_bytes; /* below 2^48 values of at most 4 bytes: no overflow */
        at = (end + alignment - 1) / alignment * alignment;
    }
    if (data_bytes > at)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: the tensors end at byte %" PRIu64 " of the data, which has %" PRIu64
                       " bytes",
                       r->what, end, data_bytes);
    return TD_OK;
}

static td_status read_tensors(struct reader *r, uint64_t n, const uint8_t *begin, struct td_gguf *g)
{
    if (n > left(r) / TENSOR_BYTES_MIN || n > TENSORS_MAX)
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: the header counts %" PRIu64
                       " tensors, must be at most %d and fit the file's %" PRIu64 " bytes",
                       r->what, n, TENSORS_MAX, left(r));
    int64_t alignment = ALIGNMENT_DEFAULT;
    td_status s = td_gguf_i64(g, "general.alignment", 1, ALIGNMENT_MAX, &alignment, NULL, r->err);
    if (s) return td_err_prefix(r->err, "%s", r->what);
    if (alignment & (alignment - 1))
        return td_fail(r->err, TD_ERR_CORRUPT,
                       "%s: general.alignment is %" PRId64 ", must be a power of two", r->what,
                       alignment);
    uint64_t *offsets = calloc(n ? (size_t)n : 1, sizeof *offsets);
    g->tensors = calloc(n ? (size_t)n : 1, sizeof *g->tensors);
    if (!g->tensors || !offsets)
        s = td_fail(r->err, TD_ERR_NOMEM, "%s: no memory for %" PRIu64 " tensors", r->what, n);
    for (uint64_t i = 0; i < n && !s; i++) s = read_tensor(r, i, &g->tensors[i], &offsets[i]);
    if (!s) {
        g->n_tensors = (size_t)n;
        uint64_t head = (uint64_t)(r->at - begin), all = (uint64_t)(r->end - begin),
                 unit = (uint64_t)alignment, data = (head + unit - 1) / unit * unit;
        if (data > all) data = all; /* a vocabulary alone may end without padding */
        s = place_tensors(r, g, offsets, begin + data, all - data, unit);
    }
    if (!s) s = check_names(g, r->what, r->err);
    free(offsets);
    return s;
}

static td_status parse(const uint8_t *bytes, size_t n_bytes, const char *what, struct td_gguf *g,
                       struct td_err *err)
{
    struct reader r = {bytes, bytes + n_bytes, what, err};
    uint64_t magic, version, n_tensors, n_values;
    td_status s;
    if ((s = take(&r, 4, "the header", &magic)) || (s = take(&r, 4, "the header", &version)))
        return s;
    if (magic != 0x46554747u)
        return td_fail(err, TD_ERR_CORRUPT, "%s: the first bytes are not GGUF", what);
    if ((version & 0xffff) == 0 && version)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: a big-endian GGUF file; convert it to little endian", what);
    if (version != 2 && version != 3)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: GGUF version %" PRIu64 ", must be 2 or 3",
                       what, version);
    if ((s = take(&r, 8, "the header", &n_tensors)) || (s = take(&r, 8, "the header", &n_values)))
        return s;
    if ((s = read_values(&r, n_values, g))) return s;
    return read_tensors(&r, n_tensors, bytes, g);
}

td_status td_gguf_parse(const uint8_t *bytes, size_t n_bytes, const char *what,
                        struct td_gguf **ret, struct td_err *err)
{
    struct td_gguf *g = calloc(1, sizeof *g);
    if (!g) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    td_status s = parse(bytes, n_bytes, what, g, err);
    if (s)
        td_gguf_close(g);
    else
        *ret = g;
    return s;
}

void td_gguf_close(struct td_gguf *g)
{
    if (!g) return;
    for (size_t i = 0; i < g->n_files; i++) td_file_map_close(&g->files[i]);
    free(g->files);
    free(g->values);
    free(g->tensors);
    free(g);
}

/* ---- files ----------------------------------------------------------------------------------- */

bool td_gguf_is_file(const char *path)
{
    struct stat st;
    if (stat(path, &st) || !S_ISREG(st.st_mode)) return false;
    size_t n = strlen(path);
    if (n >= 5 && !strcasecmp(path + n - 5, ".gguf")) return true;
    char magic[4] = {0};
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    bool same =
        fread(magic, 1, sizeof magic, f) == sizeof magic && !memcmp(magic, "GGUF", sizeof magic);
    fclose(f);
    return same;
}

/* Maps and parses one file into *ret, which owns the mapping. */
static td_status open_one(const char *path, struct td_gguf **ret, struct td_err *err)
{
    static const uint8_t nothing[1];
    struct td_file_map map;
    td_status s = td_file_map_open(path, &map, err);
    if (s) return s;
    struct td_gguf *g = NULL;
    s = td_gguf_parse(map.base ? map.base : nothing, map.bytes, path, &g, err);
    struct td_file_map *files = s ? NULL : calloc(1, sizeof *files);
    if (!s && !files) s = td_fail(err, TD_ERR_NOMEM, "%s: no memory", path);
    if (s) {
        td_gguf_close(g);
        td_file_map_close(&map);
        return s;
    }
    files[0] = map;
    g->files = files;
    g->n_files = 1;
    *ret = g;
    return TD_OK;
}

/* What a file says of the split of its model; a model in one file may say nothing. */
struct split {
    int64_t no, count, n_tensors; /* of all files; -1: not said */
};

static td_status read_split(const struct td_gguf *g, const char *path, struct split *ret,
                            struct td_err *err)
{
    bool has_no = false, has_tensors = false;
    *ret = (struct split){.count = 1, .n_tensors = -1};
    td_status s = td_gguf_i64(g, "split.count", 0, FILES_MAX, &ret->count, NULL, err);
    if (!s) s = td_gguf_i64(g, "split.no", 0, FILES_MAX - 1, &ret->no, &has_no, err);
    if (!s)
        s = td_gguf_i64(g, "split.tensors.count", 0, TENSORS_MAX, &ret->n_tensors, &has_tensors,
                        err);
    if (s) return td_err_prefix(err, "%s", path);
    if (ret->count == 0) ret->count = 1;
    if (ret->no >= ret->count)
        return td_fail(err, TD_ERR_CORRUPT, "%s: split.no is %d, must be below split.count %d",
                       path, (int)ret->no, (int)ret->count);
    if (ret->count > 1 && !(has_no && has_tensors))
        return td_fail(err, TD_ERR_CORRUPT, "%s: split.count is %d, but split.%s is missing", path,
                       (int)ret->count, has_no ? "tensors.count" : "no");
    return TD_OK;
}

static bool is_same_value(const struct td_gguf_value *a, const struct td_gguf_value *b)
{
    uint64_t n_bytes = td_gguf_value_bytes(a);
    return a->kind == b->kind && a->is_array == b->is_array && a->n == b->n &&
           n_bytes == td_gguf_value_bytes(b) && memcmp(a->data, b->data, (size_t)n_bytes) == 0;
}

/* Writers put settings into the first file alone. What another file says nevertheless must be what
 * the first says, except of the split and of its own padding. */
static td_status check_values(const struct td_gguf *g, const struct td_gguf *part, const char *what,
                              struct td_err *err)
{
    for (size_t i = 0; i < part->n_values; i++) {
        const struct td_gguf_value *v = &part->values[i],
                                   *first = bsearch(v, g->values, g->n_values, sizeof *v, by_key);
        bool is_own = (v->key.n > 6 && !memcmp(v->key.bytes, "split.", 6)) ||
                      td_gguf_text_is(v->key, "general.alignment");
        if (is_own || (first && is_same_value(first, v))) continue;
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: %.*s %s the first file's: this is a file of another model", what,
                       v->key.n < 128 ? (int)v->key.n : 128, v->key.bytes,
                       first ? "differs from" : "is not among");
    }
    return TD_OK;
}

td_status td_gguf_add_part(struct td_gguf *g, struct td_gguf *part, int32_t no, const char *what,
                           struct td_err *err)
{
    struct split whole, mine;
    td_status s = read_split(g, "the first file", &whole, err);
    if (s || (s = read_split(part, what, &mine, err))) return s;
    if (mine.no != no || mine.count != whole.count)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: split.no is %d and split.count %d, must be %d and %d", what,
                       (int)mine.no, (int)mine.count, no, (int)whole.count);
    if (mine.n_tensors != whole.n_tensors)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: split.tensors.count is %d, but the first file says %d: this is a file "
                       "of another model",
                       what, (int)mine.n_tensors, (int)whole.n_tensors);
    if ((s = check_values(g, part, what, err))) return s;
    size_t n = g->n_tensors + part->n_tensors;
    if (n > (size_t)whole.n_tensors)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: %zu tensors up to here, but split.tensors.count is %d", what, n,
                       (int)whole.n_tensors);
    struct td_gguf_tensor *tensors = realloc(g->tensors, (n + 1) * sizeof *tensors);
    if (tensors) g->tensors = tensors;
    struct td_file_map *files = realloc(g->files, (g->n_files + part->n_files + 1) * sizeof *files);
    if (files) g->files = files;
    if (!tensors || !files) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    memcpy(tensors + g->n_tensors, part->tensors, part->n_tensors * sizeof *tensors);
    g->n_tensors = n;
    if (part->n_files) memcpy(files + g->n_files, part->files, part->n_files * sizeof *files);
    g->n_files += part->n_files;
    part->n_files = 0;
    return TD_OK;
}

td_status td_gguf_check_parts(const struct td_gguf *g, const char *what, struct td_err *err)
{
    struct split whole;
    td_status s = read_split(g, what, &whole, err);
    if (!s && whole.n_tensors >= 0 && (size_t)whole.n_tensors != g->n_tensors)
        s = td_fail(err, TD_ERR_CORRUPT, "%s: split.tensors.count is %d, but %d file%s %zu tensors",
                    what, (int)whole.n_tensors, (int)whole.count,
                    whole.count > 1 ? "s have" : " has", g->n_tensors);
    return s ? s : check_names(g, what, err);
}

/* Opens the other files of a split model, of which `path` must be the first. */
static td_status open_rest(const char *path, int64_t n_files, struct td_gguf *g, struct td_err *err)
{
    char end[32], other[4096];
    int n_end = snprintf(end, sizeof end, "-%05d-of-%05d.gguf", 1, (int)n_files);
    size_t n = strlen(path);
    if (n < (size_t)n_end || strcmp(path + n - (size_t)n_end, end) != 0)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: the first of %d files of one model must be named *%s, as the others "
                       "are found by that name",
                       path, (int)n_files, end);
    td_status s = TD_OK;
    for (int64_t i = 1; i < n_files && !s; i++) {
        int len = snprintf(other, sizeof other, "%.*s-%05d-of-%05d.gguf", (int)(n - (size_t)n_end),
                           path, (int)i + 1, (int)n_files);
        if (len < 0 || (size_t)len >= sizeof other)
            return td_fail(err, TD_ERR_LIMIT, "the model's path is longer than %zu bytes",
                           sizeof other - 1);
        struct td_gguf *part = NULL;
        if ((s = open_one(other, &part, err))) break;
        s = td_gguf_add_part(g, part, (int32_t)i, other, err);
        td_gguf_close(part);
    }
    return s;
}

td_status td_gguf_open(const char *path, struct td_gguf **ret, struct td_err *err)
{
    struct td_gguf *g = NULL;
    struct split split;
    td_status s = open_one(path, &g, err);
    if (s) return s;
    s = read_split(g, path, &split, err);
    if (!s && split.no != 0)
        s = td_fail(err, TD_ERR_INVALID,
                    "%s: file %d of %d of one model (split.no is %d): give the first", path,
                    (int)split.no + 1, (int)split.count, (int)split.no);
    if (!s && split.count > 1) s = open_rest(path, split.count, g, err);
    if (!s) s = td_gguf_check_parts(g, path, err);
    if (s)
        td_gguf_close(g);
    else
        *ret = g;
    return s;
}

/* ---- values ---------------------------------------------------------------------------------- */

const struct td_gguf_value *td_gguf_find(const struct td_gguf *g, const char *key)
{
    struct td_gguf_value k = {.key = {key, strlen(key)}};
    return bsearch(&k, g->values, g->n_values, sizeof k, by_key);
}

static bool as_i64(const struct td_gguf_value *v, uint64_t i, int64_t *ret)
{
    if (v->kind == TD_GGUF_STRING) return false; /* perhaps none: an empty array */
    const uint8_t *p = v->data + i * (uint64_t)kind_bytes[v->kind];
    uint64_t u = load(p, kind_bytes[v->kind]);
    switch (v->kind) {
    case TD_GGUF_U8:
    case TD_GGUF_U16:
    case TD_GGUF_U32:
        *ret = (int64_t)u;
        return true;
    case TD_GGUF_U64:
        *ret = u > INT64_MAX ? INT64_MAX : (int64_t)u;
        return true;
    case TD_GGUF_I8:
        *ret = (int8_t)u;
        return true;
    case TD_GGUF_I16:
        *ret = (int16_t)u;
        return true;
    case TD_GGUF_I32:
        *ret = (int32_t)u;
        return true;
    case TD_GGUF_I64:
        *ret = (int64_t)u;
        return true;
    default:
        return false;
    }
}

static bool as_f64(const struct td_gguf_value *v, uint64_t i, double *ret)
{
    float f;
    const uint8_t *p = v->data + i * (uint64_t)kind_bytes[v->kind];
    if (v->kind == TD_GGUF_F64) {
        memcpy(ret, p, sizeof *ret);
        return true;
    }
    if (v->kind != TD_GGUF_F32) return false;
    memcpy(&f, p, sizeof f);
    *ret = (double)f;
    return true;
}

/* Whether all elements have the bytes of the first, or there is only one. */
static bool all_equal(const struct td_gguf_value *v)
{
    size_t size = (size_t)kind_bytes[v->kind];
    return v->n > 0 &&
           (v->n == 1 || memcmp(v->data, v->data + size, (size_t)(v->n - 1) * size) == 0);
}

/* Finds a value that stands for one element of a number or bool; NULL when absent. */
static td_status find_one(const struct td_gguf *g, const char *key, bool *present,
                          const struct td_gguf_value **ret, struct td_err *err)
{
    *ret = td_gguf_find(g, key);
    if (present) *present = *ret != NULL;
    if (!*ret || (*ret)->kind == TD_GGUF_STRING || all_equal(*ret)) return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s is an array of %" PRIu64 " values that differ, must be one value", key,
                   (*ret)->n);
}

static td_status wrong_kind(const struct td_gguf_value *v, const char *key, const char *must,
                            struct td_err *err)
{
    return td_fail(err, TD_ERR_INVALID, "%s has type %s%s, must be %s", key,
                   v->is_array ? "array of " : "", kind_names[v->kind], must);
}

td_status td_gguf_i64(const struct td_gguf *g, const char *key, int64_t min, int64_t max,
                      int64_t *ret, bool *present, struct td_err *err)
{
    const struct td_gguf_value *v;
    int64_t n;
    td_status s = find_one(g, key, present, &v, err);
    if (s || !v) return s;
    if (!as_i64(v, 0, &n)) return wrong_kind(v, key, "an integer", err);
    if (n < min || n > max)
        return td_fail(err, TD_ERR_INVALID, "%s is %" PRId64 ", must be in %" PRId64 "..%" PRId64,
                       key, n, min, max);
    *ret = n;
    return TD_OK;
}

td_status td_gguf_f64(const struct td_gguf *g, const char *key, double min, double max, double *ret,
                      bool *present, struct td_err *err)
{
    const struct td_gguf_value *v;
    double f;
    td_status s = find_one(g, key, present, &v, err);
    if (s || !v) return s;
    if (!as_f64(v, 0, &f)) return wrong_kind(v, key, "f32 or f64", err);
    if (!(f >= min && f <= max))
        return td_fail(err, TD_ERR_INVALID, "%s is %g, must be in %g..%g", key, f, min, max);
    *ret = f;
    return TD_OK;
}

td_status td_gguf_bool(const struct td_gguf *g, const char *key, bool *ret, bool *present,
                       struct td_err *err)
{
    const struct td_gguf_value *v;
    td_status s = find_one(g, key, present, &v, err);
    if (s || !v) return s;
    if (v->kind != TD_GGUF_BOOL) return wrong_kind(v, key, "a bool", err);
    *ret = v->data[0];
    return TD_OK;
}

td_status td_gguf_str(const struct td_gguf *g, const char *key, struct td_gguf_text *ret,
                      struct td_err *err)
{
    const struct td_gguf_value *v = td_gguf_find(g, key);
    const uint8_t *at = NULL;
    *ret = (struct td_gguf_text){0};
    if (!v) return TD_OK;
    if (v->kind != TD_GGUF_STRING || v->is_array) return wrong_kind(v, key, "a string", err);
    *ret = td_gguf_next(v, &at);
    return TD_OK;
}

td_status td_gguf_array(const struct td_gguf *g, const char *key, enum td_gguf_kind kind,
                        const struct td_gguf_value **ret, struct td_err *err)
{
    char must[32];
    *ret = td_gguf_find(g, key);
    if (!*ret || ((*ret)->is_array && (*ret)->kind == kind)) return TD_OK;
    snprintf(must, sizeof must, "array of %s", kind_names[kind]);
    return wrong_kind(*ret, key, must, err);
}

bool td_gguf_text_is(struct td_gguf_text t, const char *s)
{
    return t.bytes && t.n == strlen(s) && !memcmp(t.bytes, s, t.n);
}

const char *td_gguf_show(struct td_gguf_text t, char buf[TD_GGUF_SHOWN])
{
    if (!t.bytes) return "absent";
    size_t n = t.n < TD_GGUF_SHOWN - 1 ? t.n : TD_GGUF_SHOWN - 1;
    for (size_t i = 0; i < n; i++)
        buf[i] = t.bytes[i] >= ' ' && t.bytes[i] <= '~' ? t.bytes[i] : '?';
    buf[n] = 0;
    return buf;
}

struct td_gguf_text td_gguf_next(const struct td_gguf_value *array, const uint8_t **at)
{
    const uint8_t *p = *at ? *at : array->data;
    struct td_gguf_text t = {(const char *)p + 8, (size_t)load(p, 8)};
    *at = p + 8 + t.n;
    return t;
}

uint64_t td_gguf_value_bytes(const struct td_gguf_value *v)
{
    if (v->kind != TD_GGUF_STRING) return v->n * (uint64_t)kind_bytes[v->kind];
    const uint8_t *at = v->data;
    for (uint64_t i = 0; i < v->n; i++) td_gguf_next(v, &at);
    return (uint64_t)(at - v->data);
}

int32_t td_gguf_i32_at(const struct td_gguf_value *array, uint64_t i)
{
    return (int32_t)load(array->data + 4 * i, 4);
}

float td_gguf_f32_at(const struct td_gguf_value *array, uint64_t i)
{
    float f;
    memcpy(&f, array->data + 4 * i, sizeof f);
    return f;
}
