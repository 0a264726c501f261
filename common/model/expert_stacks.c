/* expert_stacks.c - cuts stacks of experts into the tensors of each.
 *
 * MXFP4 (Open Compute Project 2023, Microscaling Formats): 32 values of a row share a power of two,
 * 2^(scale - 127), and are numbers of 4 bits (E2M1), the first of two in the low half of a byte. As
 * a scaled format they stay 4 bits in memory, and every value is exact in bf16. */
#include "common/model/expert_stacks.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/family.h"
#include "common/model/quant_internal.h"
#include "kernels/scaled.h"

enum { VALUES = 32, BLOCK_BYTES = 16, GROUPS_MAX = 65535, NO_SCALE = 255 };

/* E2M1 */
static const float table[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct cutting {
    const struct td_model_config *config;
    const char *what;
    struct td_checkpoint *c;
    struct td_tensor *made;
    struct td_quant_tensor *quant;
    bool *taken; /* [c->n_tensors] */
    int32_t n_made, n_quant;
    struct td_err *err;
};

/* One stack: where its tensors are, and what they become. */
struct stack {
    int32_t layer;
    const struct td_layer_spec *spec;
    const struct td_tensor_row *row;
    /* tensor: plain values; or else blocks and scales */
    const struct td_tensor *tensor, *blocks, *scales;
};

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t g0 = td_quant_first_group(t, col0), n_groups = t->format.scaled.n_groups;
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_quant_clear_row(cut, ret_rows, i);
        const uint8_t *codes = t->codes + (int64_t)(row0 + i) * (t->n_in / 2),
                      *scales = t->scales + (int64_t)(row0 + i) * n_groups + g0;
        for (int32_t k = 0; k < cut->block; k++)
            r.codes[k] = codes[(col0 + k) / 2] >> ((col0 + k) % 2 ? 4 : 0) & 15;
        for (int32_t g = 0; g < cut->scaled.n_groups; g++)
            r.scales[g] = scales[g] == NO_SCALE ? NAN : ldexpf(1, scales[g] - 127);
    }
}

/* The tensor PREFIX.NAME and `suffix`; NULL when there is none. NAME is the row's without its last
 * part. */
static const struct td_tensor *find(const struct cutting *x, const struct stack *s,
                                    const char *suffix, char ret_name[TD_TENSOR_NAME_BYTES])
{
    const char *end = strrchr(s->row->name, '.');
    TD_ASSERT(end);
    snprintf(ret_name, TD_TENSOR_NAME_BYTES, "model.layers.%d.%s%.*s%s", s->layer,
             s->spec->expert_prefix, (int)(end - s->row->name), s->row->name, suffix);
    return td_checkpoint_find(x->c, ret_name);
}

/* False with no error: the checkpoint has none, which shows when its tensors are looked for. */
static td_status find_stack(const struct cutting *x, struct stack *s)
{
    char name[TD_TENSOR_NAME_BYTES], plain[TD_TENSOR_NAME_BYTES];
    bool is_vector = s->row->cols == TD_DIM_NONE;
    s->blocks = s->scales = NULL;
    s->tensor = find(x, s, is_vector ? "_bias" : "", plain);
    if (!is_vector && x->config->quant[0].scheme == TD_QUANT_MXFP4) {
        s->scales = find(x, s, "_scales", name);
        s->blocks = find(x, s, "_blocks", name);
    }
    if (s->blocks && s->tensor)
        return td_fail(x->err, TD_ERR_CORRUPT, "%s: both %s and %s are there, must be one of them",
                       x->what, plain, name);
    if (s->blocks && !s->scales)
        return td_fail(x->err, TD_ERR_CORRUPT, "%s: tensor %s is there without its _scales",
                       x->what, name);
    if (!s->blocks && !s->tensor)
        return td_fail(x->err, TD_ERR_CORRUPT, "%s: tensor %s is missing", x->what, plain);
    return TD_OK;
}

/* A tensor of type `type` (NULL: any plain one) whose dimensions are at least 1 and fit: the first
 * is the number of experts, and the last `last`, where that is not 0. */
static td_status check_shape(const struct cutting *x, const struct td_tensor *t, const char *type,
                             int32_t n_dims, int64_t last)
{
    bool right_type = type ? strcmp(t->dtype_name, type) == 0 : t->format && t->format->dtype;
    if (!right_type)
        return td_fail(x->err, TD_ERR_UNSUPPORTED, "%s: tensor %s has dtype %s, must be %s",
                       x->what, t->name, t->dtype_name, type ? type : "F32, F16 or BF16");
    bool ok = t->n_dims == n_dims && t->shape[0] == x->config->experts.n &&
              (!last || t->shape[n_dims - 1] == last);
    for (int32_t i = 0; i < t->n_dims && ok; i++)
        ok = t->shape[i] >= 1 && t->shape[i] <= INT32_MAX / 2 / VALUES;
    if (ok) return TD_OK;
    return td_fail(x->err, TD_ERR_CORRUPT,
                   "%s: tensor %s has %d dimensions, the first of %" PRId64 " and the last of "
                   "%" PRId64 ": must have %d, the first of %d experts",
                   x->what, t->name, t->n_dims, t->n_dims ? t->shape[0] : 0,
                   t->n_dims ? t->shape[t->n_dims - 1] : 0, n_dims, x->config->experts.n);
}

static td_status check_stack(const struct cutting *x, const struct stack *s)
{
    if (s->tensor) return check_shape(x, s->tensor, NULL, s->row->cols == TD_DIM_NONE ? 2 : 3, 0);
    td_status status = check_shape(x, s->blocks, "U8", 4, BLOCK_BYTES);
    if (status || (status = check_shape(x, s->scales, "U8", 3, 0))) return status;
    if (s->scales->shape[1] != s->blocks->shape[1] || s->scales->shape[2] != s->blocks->shape[2])
        return td_fail(x->err, TD_ERR_CORRUPT,
                       "%s: tensor %s has %" PRId64 " rows of %" PRId64 " scales, must have "
                       "%" PRId64 " of %" PRId64 " beside %s",
                       x->what, s->scales->name, s->scales->shape[1], s->scales->shape[2],
                       s->blocks->shape[1], s->blocks->shape[2], s->blocks->name);
    if (s->blocks->shape[2] > GROUPS_MAX)
        return td_fail(x->err, TD_ERR_LIMIT,
                       "%s: tensor %s has %" PRId64 " blocks in a row, must "
                       "be at most %d",
                       x->what, s->blocks->name, s->blocks->shape[2], GROUPS_MAX);
    return TD_OK;
}

/* Expert `e` of plain values. */
static struct td_tensor cut_plain(const struct td_tensor *from, int32_t e)
{
    struct td_tensor t = *from;
    t.n_bytes /= (uint64_t)from->shape[0];
    t.data += (uint64_t)e * t.n_bytes;
    t.n_dims--;
    t.shape[0] = from->shape[t.n_dims];
    t.shape[1] = from->shape[1];
    t.turned = t.n_dims == 2;
    return t;
}

/* Expert `e` in MXFP4, which is *q. */
static struct td_tensor cut_mxfp4(const struct stack *s, int32_t e, struct td_quant_tensor *q)
{
    int64_t rows = s->blocks->shape[1], blocks = s->blocks->shape[2];
    *q = (struct td_quant_tensor){.n_out = (int32_t)rows,
                                  .n_in = (int32_t)(blocks * VALUES),
                                  .bits = 4,
                                  .codes = s->blocks->data + e * rows * blocks * BLOCK_BYTES,
                                  .scales = s->scales->data + e * rows * blocks,
                                  .scales_type = TD_BF16,
                                  .read_rows = read_rows};
    q->format.name = "mxfp4";
    q->format.bits = q->bits;
    q->format.scaled.kind = TD_SCALED_TABLE;
    q->format.scaled.scale_type = q->scales_type;
    q->format.scaled.group = VALUES;
    q->format.scaled.n_groups = (int32_t)blocks;
    memcpy(q->format.scaled.table, table, sizeof table);
    q->format.block = q->n_in;
    q->format.block_bytes = (int32_t)td_scaled_row_bytes(&q->format.scaled, q->n_in);
    return (struct td_tensor){.format = &q->format,
                              .quant = q,
                              .dtype_name = "mxfp4",
                              .n_dims = 2,
                              .shape = {q->n_out, q->n_in}};
}

static td_status cut_stack(struct cutting *x, const struct stack *s)
{
    const struct td_tensor *parts[] = {s->tensor, s->blocks, s->scales};
    for (int i = 0; i < 3; i++)
        if (parts[i]) x->taken[parts[i] - x->c->tensors] = true;
    for (int32_t e = 0; e < x->config->experts.n; e++) {
        char name[TD_TENSOR_NAME_BYTES];
        struct td_tensor t =
            s->tensor ? cut_plain(s->tensor, e) : cut_mxfp4(s, e, &x->quant[x->n_quant++]);
        td_tensor_name(s->spec, s->row, s->layer, e, name);
        if (!(t.name = strdup(name)))
            return td_fail(x->err, TD_ERR_NOMEM, "%s: no memory", x->what);
        x->made[x->n_made++] = t;
    }
    return TD_OK;
}

/* Visits every stack that the model has; `cut` NULL: only counts what they become. */
static td_status each_stack(struct cutting *x, bool cut, int64_t *ret_n, int64_t *ret_n_quant)
{
    td_status status = TD_OK;
    for (int32_t i = 0; i < x->config->n_layers && !status; i++) {
        struct td_layer_spec spec;
        td_model_config_layer(x->config, i, &spec);
        if (!spec.expert_stacks) continue;
        for (const struct td_tensor_row *row = spec.expert_tensors; row->name && !status; row++) {
            struct stack s = {.layer = i, .spec = &spec, .row = row};
            if ((status = find_stack(x, &s)) || (status = check_stack(x, &s))) break;
            *ret_n += x->config->experts.n;
            if (s.blocks) *ret_n_quant += x->config->experts.n;
            if (cut) status = cut_stack(x, &s);
        }
    }
    return status;
}

/* The tensors that are no stacks, and those made of stacks, sorted. */
static td_status replace(struct cutting *x)
{
    struct td_checkpoint *c = x->c;
    int32_t n = x->n_made;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        if (x->taken[i])
            free(c->tensors[i].name);
        else
            x->made[n++] = c->tensors[i];
    }
    free(c->tensors);
    c->tensors = x->made;
    c->n_tensors = n;
    if (x->quant) c->quant = x->quant; /* else those of another scheme stay */
    x->made = NULL;
    x->quant = NULL;
    qsort(c->tensors, (size_t)n, sizeof *c->tensors, td_tensor_by_name);
    for (int32_t i = 1; i < n; i++)
        if (td_tensor_by_name(&c->tensors[i - 1], &c->tensors[i]) == 0)
            return td_fail(x->err, TD_ERR_CORRUPT,
                           "%s: tensor %s is there beside the one of all experts", x->what,
                           c->tensors[i].name);
    return TD_OK;
}

td_status td_expert_stacks_open(const struct td_model_config *config, const char *what,
                                struct td_checkpoint *c, struct td_err *err)
{
    struct cutting x = {.config = config, .what = what, .c = c, .err = err};
    int64_t n = 0, n_quant = 0, unused = 0;
    if (c->gguf) return TD_OK;
    td_status s = each_stack(&x, false, &n, &n_quant);
    if (s) return s;
    if (config->quant[0].scheme == TD_QUANT_MXFP4 && n_quant == 0)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: quantization_config says mxfp4, but no experts are in *_blocks", what);
    if (n == 0) return TD_OK;
    if (n + c->n_tensors > INT32_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s: %" PRId64 " tensors of experts are too many", what,
                       n);
    x.made = calloc((size_t)(n + c->n_tensors), sizeof *x.made);
    x.taken = calloc((size_t)c->n_tensors, sizeof *x.taken);
    if (n_quant) x.quant = calloc((size_t)n_quant, sizeof *x.quant);
    if (!x.made || !x.taken || (n_quant && !x.quant))
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory for %" PRId64 " tensors", what, n);
    if (!s) s = each_stack(&x, true, &unused, &unused);
    if (!s) {
        s = replace(&x);
    } else {
        for (int32_t i = 0; i < x.n_made; i++) free(x.made[i].name);
    }
    free(x.made);
    free(x.taken);
    free(x.quant);
    return s;
}
