/* quant_tensors.c - finds the matrices by the suffix of their codes, and cuts their columns. */
#include "common/model/quant_tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/model/quant_internal.h"
#include "kernels/part.h"
#include "kernels/scaled.h"

#define NAME_BYTES 600 /* of a tensor's name with a suffix; safetensors' are at most 512 */
#define GROUPS_MAX 65535

/* How a matrix of each scheme is recognised, and its reader. */
static const struct scheme {
    const char *suffix, *dtype; /* of the codes; dtype NULL: any */
    td_status (*open)(const struct td_quant_open *o, struct td_quant_tensor *ret);
} schemes[] = {
    [TD_QUANT_GPTQ] = {"qweight", NULL, td_quant_open_gptq},
    [TD_QUANT_AWQ] = {"qweight", NULL, td_quant_open_awq},
    [TD_QUANT_PACKED] = {"weight_packed", NULL, td_quant_open_packed},
    [TD_QUANT_INT8] = {"weight", "I8", td_quant_open_int8},
    [TD_QUANT_FP8] = {"weight", "F8_E4M3", td_quant_open_fp8},
    [TD_QUANT_BNB8] = {"weight", "I8", td_quant_open_int8},
    [TD_QUANT_BNB4] = {"weight", "U8", td_quant_open_bnb4},
};

const struct td_tensor *td_quant_find(const struct td_quant_open *o, const char *suffix)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%s.%s", o->base, suffix);
    return td_checkpoint_find(o->checkpoint, name);
}

const struct td_tensor *td_quant_part(const struct td_quant_open *o, const char *suffix)
{
    const struct td_tensor *t = td_quant_find(o, suffix);
    if (t && o->taken) o->taken[t - o->checkpoint->tensors] = true;
    return t;
}

const char *td_quant_part_name(const struct td_quant_open *o, const char *suffix,
                               char buf[TD_TENSOR_FILE_NAME_BYTES])
{
    char name[NAME_BYTES], file_name[TD_TENSOR_FILE_NAME_BYTES];
    snprintf(name, sizeof name, "%s.%s", o->base, suffix);
    snprintf(buf, TD_TENSOR_FILE_NAME_BYTES, "%s",
             td_checkpoint_file_name(o->checkpoint, name, file_name));
    return buf;
}

td_status td_quant_need(const struct td_quant_open *o, const char *suffix, const char *type,
                        int64_t rows, int64_t cols, const struct td_tensor **ret_part)
{
    const struct td_tensor *t = td_quant_part(o, suffix);
    char shape[64], name[TD_TENSOR_FILE_NAME_BYTES], codes[TD_TENSOR_FILE_NAME_BYTES];
    if (cols)
        snprintf(shape, sizeof shape, "[%" PRId64 ", %" PRId64 "]", rows, cols);
    else
        snprintf(shape, sizeof shape, "[%" PRId64 "]", rows);
    if (!t)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s %s of a %s matrix is missing",
                       o->what, td_quant_part_name(o, suffix, name), shape, o->config->name);
    bool right_type = type ? strcmp(t->dtype_name, type) == 0 : t->format && t->format->dtype;
    if (!right_type)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s has dtype %s, must be %s", o->what,
                       td_quant_name_of(o, t, name), t->dtype_name,
                       type ? type : "F16, BF16 or F32");
    if (t->n_dims != (cols ? 2 : 1) || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        char got[64] = "";
        for (int32_t i = 0, n = 0; i < t->n_dims && n < (int32_t)sizeof got; i++)
            n +=
                snprintf(got + n, sizeof got - (size_t)n, "%s%" PRId64, i ? ", " : "", t->shape[i]);
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s has shape [%s], must be %s beside %s",
                       o->what, td_quant_name_of(o, t, name), got, shape,
                       td_quant_part_name(o, schemes[o->config->scheme].suffix, codes));
    }
    *ret_part = t;
    return TD_OK;
}

td_status td_quant_set_groups(const struct td_quant_open *o, struct td_quant_tensor *t,
                              int32_t group)
{
    char name[TD_TENSOR_FILE_NAME_BYTES];
    struct td_scaled *s = &t->format.scaled;
    s->group = group && group < t->n_in ? group : t->n_in;
    s->n_groups = (t->n_in + s->group - 1) / s->group;
    if (s->n_groups > GROUPS_MAX)
        return td_fail(o->err, TD_ERR_LIMIT, "%s: tensor %s has %d groups, must be at most %d",
                       o->what, td_quant_part_name(o, schemes[o->config->scheme].suffix, name),
                       s->n_groups, GROUPS_MAX);
    return TD_OK;
}

td_status td_quant_order(const struct td_quant_open *o, const char *suffix,
                         struct td_quant_tensor *t)
{
    const struct td_scaled *s = &t->format.scaled;
    const struct td_tensor *groups = td_quant_part(o, suffix);
    char name[TD_TENSOR_FILE_NAME_BYTES];
    bool in_order = true;
    if (!groups) return TD_OK;
    td_status status = td_quant_need(o, suffix, "I32", t->n_in, 0, &groups);
    if (status) return status;
    for (int32_t k = 0; k < t->n_in; k++) {
        uint32_t g = td_quant_word(groups->data, k);
        if (g >= (uint32_t)s->n_groups)
            return td_fail(o->err, TD_ERR_CORRUPT,
                           "%s: tensor %s: entry %d is %d, must be in 0..%d", o->what,
                           td_quant_name_of(o, groups, name), k, (int32_t)g, s->n_groups - 1);
        in_order &= g == (uint32_t)(k / s->group);
    }
    if (!in_order && !o->config->act_order)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s puts columns in another order, but quantization_config has "
                       "no act order (desc_act, actorder)",
                       o->what, td_quant_name_of(o, groups, name));
    t->order = in_order ? NULL : groups->data;
    return TD_OK;
}

td_status td_quant_check_bytes(const struct td_quant_open *o, const struct td_tensor *codes,
                               struct td_quant_tensor *t)
{
    char name[TD_TENSOR_FILE_NAME_BYTES];
    if (codes->n_dims != 2 || codes->shape[0] < 1 || codes->shape[1] < 1 ||
        codes->shape[0] > INT32_MAX / 2 || codes->shape[1] > INT32_MAX / 2)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s must be %s [rows, columns]", o->what,
                       td_quant_name_of(o, codes, name), codes->dtype_name);
    *t = (struct td_quant_tensor){.n_out = (int32_t)codes->shape[0],
                                  .n_in = (int32_t)codes->shape[1],
                                  .bits = 8,
                                  .codes = codes->data};
    return TD_OK;
}

float td_quant_scale(const struct td_quant_tensor *t, int64_t i)
{
    uint8_t bytes[4];
    if (t->scales_are_e8m0) return t->scales[i] == UINT8_MAX ? NAN : ldexpf(1, t->scales[i] - 127);
    size_t n = td_dtype_bytes(t->scales_type);
    memcpy(bytes, t->scales + (size_t)i * n, n);
    return td_widen(bytes, t->scales_type, 0);
}

/* The digest of a description, behind which equal codes are equal numbers. */
static uint64_t digest_of(const struct td_format *f)
{
    const struct td_scaled *s = &f->scaled;
    const int32_t x = (int32_t)s->x | s->x_powers << 8,
                  fields[] = {(int32_t)s->kind, x,           (int32_t)s->scale_type,
                              s->group,         s->n_groups, s->has_zeros,
                              f->bits,          f->offset,   f->block};
    uint64_t h = td_hash64(fields, sizeof fields, 0);
    h = td_hash64(s->table, sizeof s->table, h);
    h = td_hash64(&s->x_scale, sizeof s->x_scale, h);
    return s->group_of ? td_hash64(s->group_of, (size_t)f->block * sizeof *s->group_of, h) : h;
}

void td_quant_cut(const struct td_quant_tensor *t, int32_t col0, int32_t n_cols, bool use_bf16,
                  uint16_t *group_of, struct td_format *ret_format)
{
    struct td_format f = t->format;
    struct td_scaled *s = &f.scaled;
    int32_t first = td_quant_first_group(t, col0);
    bool own_order = t->order || (s->n_groups > 1 && col0 % s->group);
    if (!t->order) s->n_groups = (col0 + n_cols - 1) / s->group - first + 1;
    for (int32_t k = 0; k < n_cols && own_order; k++)
        group_of[k] = (uint16_t)(t->order ? td_quant_word(t->order, col0 + k)
                                          : (uint32_t)((col0 + k) / s->group - first));
    if (s->group > n_cols) s->group = n_cols;
    s->group_of = own_order ? group_of : NULL;
    f.block = n_cols;
    f.block_bytes = (int32_t)td_scaled_row_bytes(s, n_cols);
    struct td_format whole = t->format;
    whole.scaled.group_of = t->order ? group_of : NULL;
    /* a cut inside a group computes in f32, but with the numbers that the whole matrix has */
    if (use_bf16 && td_scaled_use_bf16(&whole) && !td_scaled_use_bf16(&f))
        memcpy(s->table, whole.scaled.table, sizeof s->table);
    s->digest = digest_of(&f);
    *ret_format = f;
}

/* What all schemes have in common once the parts are known. */
static void finish_tensor(const struct td_quant_open *o, const struct td_quant_tensor *q,
                          char *name, struct td_tensor *ret)
{
    *ret = (struct td_tensor){
        .name = name, .format = &q->format, .quant = q, .n_dims = 2, .shape = {q->n_out, q->n_in}};
    snprintf(ret->dtype_name, sizeof ret->dtype_name, "%s", o->config->name);
}

/* The matrix whose codes are tensor `codes`: *q, and its tensor to *ret. */
static td_status open_one(struct td_quant_open *o, const struct td_tensor *codes,
                          struct td_quant_tensor *q, struct td_tensor *ret)
{
    const struct scheme *scheme = &schemes[o->config->scheme];
    size_t n = strlen(codes->name) - strlen(scheme->suffix) - 1;
    char base[NAME_BYTES], name[NAME_BYTES], whole[TD_TENSOR_FILE_NAME_BYTES],
        part[TD_TENSOR_FILE_NAME_BYTES];
    snprintf(base, sizeof base, "%.*s", (int)n, codes->name);
    snprintf(name, sizeof name, "%s.weight", base);
    o->base = base;
    if (strcmp(scheme->suffix, "weight") != 0 && td_checkpoint_find(o->checkpoint, name))
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: both %s and %s are there, must be one of them",
                       o->what, td_quant_part_name(o, "weight", whole),
                       td_quant_name_of(o, codes, part));
    td_status s = scheme->open(o, q);
    if (s) return s;
    q->format.name = o->config->name;
    q->format.bits = q->bits;
    q->format.scaled.scale_type = q->scales_type;
    q->format.block = q->n_in;
    q->format.block_bytes = (int32_t)td_scaled_row_bytes(&q->format.scaled, q->n_in);
    char *copy = strdup(name);
    if (!copy) return td_fail(o->err, TD_ERR_NOMEM, "%s: no memory", o->what);
    finish_tensor(o, q, copy, ret);
    return TD_OK;
}

/* The codes of a matrix have this name's end, and this type. */
static bool is_codes(const struct td_tensor *t, const struct scheme *scheme)
{
    const char *suffix = scheme->suffix;
    size_t n = strlen(t->name), n_suffix = strlen(suffix);
    if (scheme->dtype && strcmp(t->dtype_name, scheme->dtype) != 0) return false;
    return n > n_suffix + 1 && t->name[n - n_suffix - 1] == '.' &&
           strcmp(t->name + n - n_suffix, suffix) == 0;
}

/* A KV cache in 8 bits has scales of its own here, not those that a checkpoint fixes. */
static bool is_kv_scale(const struct td_tensor *t)
{
    const char *end = strrchr(t->name, '.');
    return end && (strcmp(end, ".k_scale") == 0 || strcmp(end, ".v_scale") == 0);
}

/* The tensors that are no parts, and the matrices, sorted; to c. */
static void replace(struct td_checkpoint *c, const bool *taken, struct td_tensor *made,
                    int32_t n_made)
{
    int32_t n = 0;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        if (taken[i])
            free(c->tensors[i].name);
        else
            c->tensors[n++] = c->tensors[i];
    }
    for (int32_t i = 0; i < n_made; i++) c->tensors[n++] = made[i]; /* each replaces one or more */
    c->n_tensors = n;
    qsort(c->tensors, (size_t)n, sizeof *c->tensors, td_tensor_by_name);
}

/* Whether both readings of one matrix give the same numbers: a group of 128 values is a whole row
 * where rows have 128, say. */
static bool is_same_matrix(const struct td_quant_tensor *a, const struct td_quant_tensor *b)
{
    return digest_of(&a->format) == digest_of(&b->format) && a->n_out == b->n_out &&
           a->n_in == b->n_in && a->codes == b->codes && a->scales == b->scales &&
           a->scales_are_e8m0 == b->scales_are_e8m0 && a->zeros == b->zeros &&
           a->order == b->order && a->zero_add == b->zero_add && a->scale_rows == b->scale_rows;
}

/* The scheme that the matrix of `codes` follows: the only one that it may, or the first of those
 * that its shapes fit, between which there must be no difference; NULL: it is none's. ret_fits: all
 * of those. */
static td_status choose(const struct td_quant_open *o, const struct td_quant_config *configs,
                        const struct td_tensor *codes, const struct td_quant_config **ret,
                        bool ret_fits[TD_QUANT_SCHEMES_MAX])
{
    int first = -1, n = 0, n_fits = 0;
    struct td_err trial_err = {0};
    struct td_quant_tensor found = {0};
    bool is_one = true, fits[TD_QUANT_SCHEMES_MAX] = {false};
    char name[TD_TENSOR_FILE_NAME_BYTES];
    size_t skip = strlen(o->what) + 2; /* what every error begins with */
    for (int k = 0; k < TD_QUANT_SCHEMES_MAX && configs[k].scheme; k++) {
        if (!is_codes(codes, &schemes[configs[k].scheme])) continue;
        if (first < 0) first = k;
        n++;
    }
    *ret = first < 0 ? NULL : &configs[first];
    if (first >= 0) fits[first] = n == 1;
    for (int k = 0; k < TD_QUANT_SCHEMES_MAX && configs[k].scheme && n > 1; k++) {
        struct td_quant_tensor q;
        struct td_tensor t;
        struct td_quant_open trial = {configs + k, o->what, o->checkpoint, NULL, NULL, &trial_err};
        if (configs[k].scheme != configs[first].scheme || open_one(&trial, codes, &q, &t)) continue;
        free(t.name);
        if (n_fits++ == 0)
            found = q, *ret = &configs[k];
        else
            is_one &= is_same_matrix(&found, &q);
        fits[k] = true;
    }
    memcpy(ret_fits, fits, sizeof fits);
    if (n > 1 && n_fits == 0)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s fits none of %d groups of quantization_config: for one of "
                       "them %s",
                       o->what, td_quant_name_of(o, codes, name), n,
                       strlen(trial_err.msg) > skip ? trial_err.msg + skip
                                                    : "its tensors are others");
    if (is_one) return TD_OK;
    return td_fail(o->err, TD_ERR_UNSUPPORTED,
                   "%s: tensor %s fits %d groups of quantization_config, which make different "
                   "numbers of it, not supported: must fit one",
                   o->what, td_quant_name_of(o, codes, name), n_fits);
}

static td_status refuse_none(const struct td_quant_config *config, const char *what,
                             struct td_err *err)
{
    const struct scheme *scheme = &schemes[config->scheme];
    return td_fail(err, TD_ERR_CORRUPT,
                   "%s: quantization_config says %s of %d bits, but no tensor for it is named "
                   "*.%s%s%s",
                   what, config->name, config->bits, scheme->suffix,
                   scheme->dtype ? " of type " : "", scheme->dtype ? scheme->dtype : "");
}

td_status td_quant_tensors(const struct td_quant_config configs[TD_QUANT_SCHEMES_MAX],
                           const char *what, struct td_checkpoint *c, struct td_err *err)
{
    if (configs[0].scheme == TD_QUANT_NONE || configs[0].scheme == TD_QUANT_MXFP4) return TD_OK;
    size_t n = (size_t)c->n_tensors;
    bool *taken = calloc(n, sizeof *taken);
    struct td_tensor *made = calloc(n, sizeof *made);
    int32_t n_made = 0;
    c->quant = calloc(n, sizeof *c->quant);
    td_status s = taken && made && c->quant
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu tensors", what, n);
    for (size_t i = 0; i < n && !s; i++) taken[i] = is_kv_scale(&c->tensors[i]);
    int32_t n_of[TD_QUANT_SCHEMES_MAX] = {0};
    struct td_quant_open o = {.what = what, .checkpoint = c, .taken = taken, .err = err};
    for (size_t i = 0; i < n && !s; i++) {
        bool fits[TD_QUANT_SCHEMES_MAX];
        s = choose(&o, configs, &c->tensors[i], &o.config, fits);
        if (s || !o.config) continue;
        s = open_one(&o, &c->tensors[i], &c->quant[n_made], &made[n_made]);
        if (s) continue;
        n_made++;
        for (int k = 0; k < TD_QUANT_SCHEMES_MAX; k++) n_of[k] += fits[k];
    }
    for (int k = 0; k < TD_QUANT_SCHEMES_MAX && configs[k].scheme && !s; k++)
        /* a pattern of GPTQ's "dynamic" may name no layer */
        if (n_of[k] == 0 && (configs[k].scheme != TD_QUANT_GPTQ || n_made == 0))
            s = refuse_none(&configs[k], what, err);
    if (!s)
        replace(c, taken, made, n_made);
    else
        for (int32_t i = 0; i < n_made; i++) free(made[i].name);
    free(made);
    free(taken);
    return s;
}
