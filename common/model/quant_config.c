/* quant_config.c - one reader for each "quant_method", each with a table of the fields it knows. */
#include "common/model/quant_config.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/json.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof *(a))
#define FILE_BYTES_MAX ((size_t)1 << 20)
#define GROUP_MIN 16
#define GROUP_MAX 65536

/* READ: this scheme's reader looks at it. HARMLESS: of how the weights were made, or of how others
 * compute with them. OFF: null, false, empty or zero is accepted, and nothing else. */
enum field_kind { READ, HARMLESS, OFF };
struct field {
    const char *name;
    enum field_kind kind;
};

static bool is_off(const json_t *v)
{
    if (json_is_null(v) || json_is_false(v)) return true;
    if (json_is_number(v)) return json_number_value(v) == 0;
    if (json_is_string(v)) return json_string_length(v) == 0;
    return (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

static td_status refuse(const char *what, const char *key, const json_t *v, const char *must,
                        struct td_err *err)
{
    char text[80];
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %.64s is %s, not supported: must be %s", what, key,
                   td_json_show(v, text, sizeof text), must);
}

static td_status check_fields(const json_t *obj, const char *what, const struct field *fields,
                              size_t n_fields, struct td_err *err)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)obj, key, v)
    {
        size_t i = 0;
        while (i < n_fields && strcmp(fields[i].name, key) != 0) i++;
        if (i == n_fields)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "%s: unknown field %.64s: refused, because it may change the result",
                           what, key);
        if (fields[i].kind == OFF && !is_off(v))
            return refuse(what, key, v, "absent or switched off", err);
    }
    return TD_OK;
}

/* "bits" and "group_size" (-1: a whole row) of the weight-only schemes. */
static td_status read_bits_and_group(const json_t *obj, const char *what, const char *bits_key,
                                     struct td_quant_config *c, struct td_err *err)
{
    td_status s = td_json_need_i32(obj, what, bits_key, 1, 32, &c->bits, err);
    if (s) return s;
    if (c->bits != 4 && c->bits != 8)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %s is %d, must be 4 or 8", what, bits_key,
                       c->bits);
    if ((s = td_json_need_i32(obj, what, "group_size", -1, GROUP_MAX, &c->group, err))) return s;
    if (c->group == -1) {
        c->group = 0;
        return TD_OK;
    }
    if (c->group < GROUP_MIN || c->group % 8)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: group_size is %d, must be a multiple of 8 in %d..%d, or -1", what,
                       c->group, GROUP_MIN, GROUP_MAX);
    return TD_OK;
}

/* A text that may be absent, and else is one of two. */
static td_status read_choice(const json_t *obj, const char *what, const char *key, const char *a,
                             const char *b, const char **ret, struct td_err *err)
{
    const char *v = NULL;
    td_status s = td_json_str(obj, what, key, &v, NULL, err);
    if (s) return s;
    if (v && strcmp(v, a) != 0 && (!b || strcmp(v, b) != 0))
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %s is %.32s, not supported: must be %s%s%s",
                       what, key, v, a, b ? " or " : "", b ? b : "");
    *ret = v;
    return TD_OK;
}

// clang-format off
/* What GPTQModel and transformers 5 write of GPTQ and AWQ alike. */
#define GPTQMODEL_FIELDS                                                              \
    {"method", READ}, /* a second name of quant_method */                             \
    {"format", READ}, /* a second name of checkpoint_format */                        \
    {"checkpoint_format", READ},                                                      \
    {"pack_dtype", READ},                                                             \
    {"sym", HARMLESS}, /* qzeros say it */                                            \
    {"act_group_aware", HARMLESS}, /* g_idx says it, where there is one */            \
    {"lm_head", HARMLESS}, /* its tensors say it */                                   \
    {"true_sequential", HARMLESS},                                                    \
    {"damp_percent", HARMLESS},                                                       \
    {"modules_in_block_to_quantize", HARMLESS},                                       \
    {"block_name_to_quantize", HARMLESS},                                             \
    {"module_name_preceding_first_block", HARMLESS},                                  \
    {"dataset", HARMLESS},                                                            \
    {"tokenizer", HARMLESS},                                                          \
    {"meta", HARMLESS},                                                               \
    {"batch_size", HARMLESS},                                                         \
    {"pad_token_id", HARMLESS},                                                       \
    {"model_seqlen", HARMLESS},                                                       \
    {"max_input_length", HARMLESS},                                                   \
    {"cache_block_outputs", HARMLESS},                                                \
    {"rotation", OFF},                                                                \
    {"activation", OFF} /* activations of 8 or 4 bits */
// clang-format on

static const struct field gptq_fields[] = {
    {"quant_method", READ},
    {"bits", READ},
    {"group_size", READ},
    {"desc_act", READ},
    {"static_groups", HARMLESS},
    {"damp_auto_increment", HARMLESS},
    {"model_name_or_path", HARMLESS},
    {"model_file_base_name", HARMLESS},
    {"modules_to_not_convert", HARMLESS},
    {"quantizer", HARMLESS},
    {"cache_examples_on_gpu", HARMLESS},
    {"use_cuda_fp16", HARMLESS},
    {"use_exllama", HARMLESS},
    {"disable_exllama", HARMLESS},
    {"exllama_config", HARMLESS},
    {"backend", HARMLESS},
    {"mse", HARMLESS},
    {"parallel_packing", HARMLESS},
    {"dynamic", READ}, /* other parameters for some modules */
    {"is_marlin_format", OFF},
    {"adapter", OFF},
    {"is_sym", HARMLESS},
    {"hyb_act", OFF},
    GPTQMODEL_FIELDS,
};

/* "format" and "checkpoint_format", which are two names of one thing where both are there. */
static td_status read_format(const json_t *obj, const char *what, const char *a, const char *b,
                             const char **ret, struct td_err *err)
{
    const char *second = NULL;
    td_status s = read_choice(obj, what, "checkpoint_format", a, b, ret, err);
    if (s || (s = read_choice(obj, what, "format", a, b, &second, err))) return s;
    if (*ret && second && strcmp(*ret, second) != 0)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: format is %s, but checkpoint_format is %s: must be the same", what,
                       second, *ret);
    if (second) *ret = second;
    return TD_OK;
}

/* A parameter in which the two differ; NULL: in none. */
static const char *difference(const struct td_quant_config *a, const struct td_quant_config *b)
{
    const struct {
        const char *field;
        int32_t a, b;
    } rows[] = {
        {"scheme", (int32_t)a->scheme, (int32_t)b->scheme},
        {"bits", a->bits, b->bits},
        {"group_size", a->group, b->group},
        {"rows of a block", a->block_rows, b->block_rows},
        {"scale of activations", (int32_t)a->x, (int32_t)b->x},
        {"scale_fmt", a->x_powers, b->x_powers},
        {"symmetric", a->symmetric, b->symmetric},
        {"act order", a->act_order, b->act_order},
        {"checkpoint_format", a->zeros_minus_1, b->zeros_minus_1},
    };
    for (size_t i = 0; i < N_ELEMENTS(rows); i++)
        if (rows[i].a != rows[i].b) return rows[i].field;
    return NULL;
}

/* Adds what one more group says to those before it. Which group a matrix follows its tensors say,
 * so two groups of one scheme must be alike, whatever layers they name, or differ in what shapes
 * show. */
static td_status add_config(const struct td_quant_config *c, const char *where,
                            struct td_quant_config all[TD_QUANT_SCHEMES_MAX], struct td_err *err)
{
    int k = 0;
    for (; k < TD_QUANT_SCHEMES_MAX && all[k].scheme; k++) {
        const struct td_quant_config *other = &all[k];
        const char *field = difference(other, c);
        if (!field) return TD_OK;
        if (other->scheme == c->scheme && other->bits == c->bits && other->group == c->group &&
            other->block_rows == c->block_rows)
            return td_fail(
                err, TD_ERR_UNSUPPORTED,
                "%s: differs in %s, and not in bits or group_size, from another group of "
                "the same format, not supported: no tensor says which it follows",
                where, field);
    }
    if (k == TD_QUANT_SCHEMES_MAX)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: differs from %d others, not supported: at most %d may differ", where, k,
                       TD_QUANT_SCHEMES_MAX);
    all[k] = *c;
    return TD_OK;
}

/* What holds for every module that "dynamic" does not name. */
static td_status read_gptq_whole(const json_t *obj, const char *what, struct td_quant_config *c,
                                 struct td_err *err)
{
    const char *format = NULL, *pack = NULL, *method = NULL;
    td_status s = check_fields(obj, what, gptq_fields, N_ELEMENTS(gptq_fields), err);
    if (s) return s;
    c->scheme = TD_QUANT_GPTQ;
    c->name = "gptq";
    if ((s = read_bits_and_group(obj, what, "bits", c, err)) ||
        (s = td_json_bool(obj, what, "desc_act", &c->act_order, NULL, err)) ||
        (s = read_choice(obj, what, "method", "gptq", NULL, &method, err)) ||
        (s = read_format(obj, what, "gptq", "gptq_v2", &format, err)) ||
        (s = read_choice(obj, what, "pack_dtype", "int32", NULL, &pack, err)))
        return s;
    c->zeros_minus_1 = !format || strcmp(format, "gptq") == 0;
    return TD_OK;
}

/* What "dynamic" may change for some modules. */
static const struct field gptq_module_fields[] = {
    {"bits", READ},
    {"group_size", READ},
    {"desc_act", READ},
    {"sym", HARMLESS}, /* qzeros say it */
    {"act_group_aware", HARMLESS},
    {"static_groups", HARMLESS},
    {"damp_percent", HARMLESS},
    {"damp_auto_increment", HARMLESS},
    {"mse", HARMLESS},
    {"adapter", OFF},
};

/* The parameters of the whole `obj` but for those that `change` has. */
static td_status read_gptq_module(const json_t *obj, const json_t *change, const char *where,
                                  struct td_quant_config *c, struct td_err *err)
{
    if (!json_is_object(change))
        return td_fail(err, TD_ERR_INVALID, "%s: must be an object", where);
    td_status s =
        check_fields(change, where, gptq_module_fields, N_ELEMENTS(gptq_module_fields), err);
    if (s) return s;
    json_t *own = json_copy((json_t *)(uintptr_t)obj);
    if (!own || json_object_update(own, (json_t *)(uintptr_t)change))
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory", where);
    else
        s = read_gptq_whole(own, where, c, err);
    json_decref(own);
    return s;
}

/* "dynamic" of GPTQModel: {"+:PATTERN": {"bits": 8}, "-:PATTERN": {}}. Patterns are not looked at:
 * a matrix follows the parameters that its tensors' shapes fit, and one that is not quantised has a
 * plain tensor ("-:"). */
static td_status read_gptq(const json_t *obj, const char *what, struct td_quant_config *all,
                           struct td_err *err)
{
    const json_t *dynamic = json_object_get(obj, "dynamic");
    const char *pattern;
    json_t *change;
    char where[200];
    td_status s = read_gptq_whole(obj, what, &all[0], err);
    if (s || !dynamic || is_off(dynamic)) return s;
    if (!json_is_object(dynamic)) return refuse(what, "dynamic", dynamic, "an object", err);
    json_object_foreach((json_t *)(uintptr_t)dynamic, pattern, change)
    {
        struct td_quant_config c = {0};
        if (strncmp(pattern, "-:", 2) == 0) continue;
        snprintf(where, sizeof where, "%.120s: dynamic.%.48s", what, pattern);
        if ((s = read_gptq_module(obj, change, where, &c, err)) ||
            (s = add_config(&c, where, all, err)))
            return s;
    }
    return TD_OK;
}

static const struct field awq_fields[] = {
    {"quant_method", READ},
    {"bits", READ},
    {"group_size", READ},
    {"version", READ},
    {"zero_point", READ},
    {"backend", HARMLESS},
    {"modules_to_not_convert", HARMLESS}, /* the tensors say it */
    {"do_fuse", HARMLESS},
    {"fuse_max_seq_len", HARMLESS},
    {"modules_to_fuse", HARMLESS},
    {"exllama_config", HARMLESS},
    {"desc_act", OFF},
    {"dynamic", OFF},
    GPTQMODEL_FIELDS,
};

static td_status read_awq(const json_t *obj, const char *what, struct td_quant_config *c,
                          struct td_err *err)
{
    const char *version = NULL, *method = NULL, *format = NULL, *pack = NULL;
    bool zero_point = true;
    td_status s = check_fields(obj, what, awq_fields, N_ELEMENTS(awq_fields), err);
    if (s) return s;
    c->scheme = TD_QUANT_AWQ;
    c->name = "awq";
    if ((s = read_bits_and_group(obj, what, "bits", c, err)) ||
        (s = read_choice(obj, what, "method", "awq", NULL, &method, err)) ||
        (s = read_choice(obj, what, "version", "gemm", "GEMM", &version, err)) ||
        (s = read_format(obj, what, "gemm", "GEMM", &format, err)) ||
        (s = read_choice(obj, what, "pack_dtype", "int32", NULL, &pack, err)) ||
        (s = td_json_bool(obj, what, "zero_point", &zero_point, NULL, err)))
        return s;
    if (c->bits != 4)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: bits is %d, must be 4 for awq", what, c->bits);
    if (!zero_point)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: zero_point is false, must be true", what);
    return TD_OK;
}

/* ---- compressed-tensors ---------------------------------------------------------------------- */

static const struct field ct_fields[] = {
    {"quant_method", READ},
    {"format", READ},
    {"config_groups", READ},
    {"quantization_status", READ},
    {"kv_cache_scheme", HARMLESS}, /* of a KV cache in 8 bits, which has scales of its own here */
    {"ignore", HARMLESS},          /* the tensors say it */
    {"global_compression_ratio", HARMLESS},
    {"version", HARMLESS},
    {"sparsity_config", READ},
    {"moe_sparsity_config", OFF}, /* of compressed-tensors 0.20, which writes null */
    {"transform_config", OFF},
};
static const struct field ct_group_fields[] = {
    {"weights", READ},     {"input_activations", READ}, {"output_activations", OFF},
    {"targets", HARMLESS}, /* the tensors say it */
    {"format", READ},
};
static const struct field ct_args_fields[] = {
    {"num_bits", READ},        {"type", READ},
    {"strategy", READ},        {"symmetric", READ},
    {"group_size", READ},      {"block_structure", READ},
    {"dynamic", READ},         {"actorder", READ},
    {"observer", HARMLESS},    {"observer_kwargs", HARMLESS},
    {"scale_dtype", HARMLESS}, {"zp_dtype", HARMLESS},
};

/* What is said of weights, or of activations. */
struct ct_args {
    int32_t bits, group;
    const char *type, *strategy, *actorder;
    bool symmetric, is_dynamic;
    const json_t *block; /* of weights by block */
};

static td_status read_ct_args(const json_t *obj, const char *what, struct ct_args *ret,
                              struct td_err *err)
{
    td_status s = check_fields(obj, what, ct_args_fields, N_ELEMENTS(ct_args_fields), err);
    *ret = (struct ct_args){.group = -1,
                            .symmetric = true,
                            .type = "int",
                            .strategy = "missing",
                            .block = json_object_get(obj, "block_structure")};
    if (s || (s = td_json_need_i32(obj, what, "num_bits", 1, 64, &ret->bits, err)) ||
        (s = td_json_str(obj, what, "type", &ret->type, NULL, err)) ||
        (s = td_json_str(obj, what, "strategy", &ret->strategy, NULL, err)) ||
        (s = td_json_bool(obj, what, "symmetric", &ret->symmetric, NULL, err)) ||
        (s = td_json_bool(obj, what, "dynamic", &ret->is_dynamic, NULL, err)))
        return s;
    int64_t group = -1;
    if ((s = td_json_i64(obj, what, "group_size", -1, GROUP_MAX, &group, NULL, err))) return s;
    ret->group = (int32_t)group;
    const json_t *order = json_object_get(obj, "actorder");
    if (order && !is_off(order)) {
        if ((s = td_json_str(obj, what, "actorder", &ret->actorder, NULL, err))) return s;
        if (strcmp(ret->actorder, "group") != 0 && strcmp(ret->actorder, "weight") != 0 &&
            strcmp(ret->actorder, "static") != 0)
            return refuse(what, "actorder", order, "group, weight or static", err);
    }
    return TD_OK;
}

static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static td_status check_group(const char *what, int32_t group, struct td_err *err)
{
    if (group >= GROUP_MIN && group % 8 == 0) return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s: group_size is %d, must be a multiple of 8 in %d..%d for weights by group",
                   what, group, GROUP_MIN, GROUP_MAX);
}

/* Integer weights in words; activations stay as they are. */
static td_status read_ct_packed(const char *what, const struct ct_args *w, const struct ct_args *x,
                                struct td_quant_config *c, struct td_err *err)
{
    c->scheme = TD_QUANT_PACKED;
    if (!is(w->type, "int") || (w->bits != 4 && w->bits != 8) ||
        (!is(w->strategy, "group") && !is(w->strategy, "channel")))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: weights are %s of %d bits by %.16s, must be int of 4 or 8 bits by "
                       "group or channel in format pack-quantized",
                       what, w->type, w->bits, w->strategy);
    if (x)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: input_activations with format pack-quantized, not supported: must be "
                       "null",
                       what);
    c->bits = w->bits;
    c->symmetric = w->symmetric;
    c->act_order = w->actorder && is(w->actorder, "group");
    bool by_group = is(w->strategy, "group");
    c->group = by_group ? w->group : 0;
    return by_group ? check_group(what, c->group, err) : TD_OK;
}

static td_status read_ct_int(const char *what, const struct ct_args *w, const struct ct_args *x,
                             struct td_quant_config *c, struct td_err *err)
{
    c->scheme = TD_QUANT_INT8;
    if (!is(w->type, "int") || w->bits != 8 || !w->symmetric ||
        (!is(w->strategy, "channel") && !is(w->strategy, "tensor")))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: weights are %s%s of %d bits by %.16s, must be symmetric int of 8 bits "
                       "by channel or tensor in format int-quantized",
                       what, w->symmetric ? "" : "asymmetric ", w->type, w->bits, w->strategy);
    if (x && (!is(x->type, "int") || x->bits != 8 || !x->symmetric || !x->is_dynamic ||
              !is(x->strategy, "token")))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: input_activations are %s%s %s of %d bits by %.16s, must be symmetric "
                       "dynamic int of 8 bits by token",
                       what, x->symmetric ? "" : "asymmetric ",
                       x->is_dynamic ? "dynamic" : "static", x->type, x->bits, x->strategy);
    c->x = x ? TD_QUANT_X_ROW : TD_QUANT_X_NONE;
    c->bits = 8;
    return TD_OK;
}

/* A grid of blocks: rows x columns that share a scale, for weights; columns for activations. */
static td_status read_block(const char *what, const json_t *block, struct td_quant_config *c,
                            struct td_err *err)
{
    char text[80];
    json_int_t size[2];
    for (size_t i = 0; i < 2; i++) {
        size[i] = json_integer_value(json_array_get(block, i)); /* 0 if it is none */
        if (json_array_size(block) != 2 || size[i] < 32 || size[i] > GROUP_MAX || size[i] % 8)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "%s: a block of weights is %s, must be [rows, columns], multiples of 8 "
                           "in 32..%d",
                           what, block ? td_json_show(block, text, sizeof text) : "missing",
                           GROUP_MAX);
    }
    c->block_rows = (int32_t)size[0];
    c->group = (int32_t)size[1];
    return TD_OK;
}

static td_status read_ct_float(const char *what, const struct ct_args *w, const struct ct_args *x,
                               struct td_quant_config *c, struct td_err *err)
{
    c->scheme = TD_QUANT_FP8;
    c->bits = 8;
    bool blocks = is(w->strategy, "block"), ok = true;
    if (!is(w->type, "float") || w->bits != 8 || !w->symmetric ||
        (!blocks && !is(w->strategy, "channel") && !is(w->strategy, "tensor")))
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: weights are %s of %d bits by %.16s, must be float of 8 bits by channel, "
            "tensor or block in format float-quantized",
            what, w->type, w->bits, w->strategy);
    td_status s = blocks ? read_block(what, w->block, c, err) : TD_OK;
    if (s || !x) return s;
    ok = is(x->type, "float") && x->bits == 8 && x->symmetric;
    if (ok && x->is_dynamic && !blocks && (is(x->strategy, "token") || is(x->strategy, "tensor")))
        c->x = TD_QUANT_X_ROW;
    else if (ok && x->is_dynamic && blocks && is(x->strategy, "group") && x->group == c->group)
        c->x = TD_QUANT_X_GROUP;
    else if (ok && !x->is_dynamic && !blocks && is(x->strategy, "tensor"))
        c->x = TD_QUANT_X_STATIC;
    else
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: input_activations are %s %s of %d bits by %.16s beside weights by "
                       "%.16s, must be float of 8 bits: dynamic by token, static by tensor, or "
                       "with blocks dynamic by group of as many columns",
                       what, x->is_dynamic ? "dynamic" : "static", x->type, x->bits, x->strategy,
                       w->strategy);
    return TD_OK;
}

/* A group's "weights" and "input_activations". */
static td_status read_ct_group(const json_t *group, const char *where, const char *format,
                               struct td_quant_config *c, struct td_err *err)
{
    static const struct {
        const char *format;
        td_status (*read)(const char *what, const struct ct_args *w, const struct ct_args *x,
                          struct td_quant_config *c, struct td_err *err);
    } readers[] = {{"pack-quantized", read_ct_packed},
                   {"int-quantized", read_ct_int},
                   {"float-quantized", read_ct_float}};
    struct ct_args w, x;
    const json_t *own = json_object_get(group, "input_activations");
    const char *own_format = NULL;
    td_status s;
    if (!json_is_object(group) || !json_is_object(json_object_get(group, "weights")))
        return td_fail(err, TD_ERR_INVALID, "%s: must be an object with weights", where);
    if ((s = check_fields(group, where, ct_group_fields, N_ELEMENTS(ct_group_fields), err)) ||
        (s = read_ct_args(json_object_get(group, "weights"), where, &w, err)) ||
        (s = td_json_str(group, where, "format", &own_format, NULL, err)))
        return s;
    bool has_x = own && !json_is_null(own);
    if (has_x && (s = read_ct_args(own, where, &x, err))) return s;
    if (own_format) format = own_format;
    for (size_t i = 0; i < N_ELEMENTS(readers); i++)
        if (format && is(format, readers[i].format))
            return readers[i].read(where, &w, has_x ? &x : NULL, c, err);
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s: format is %.32s, not supported: must be pack-quantized, int-quantized or "
                   "float-quantized",
                   where, format ? format : "missing");
}

static td_status read_ct(const json_t *obj, const char *what, struct td_quant_config *all,
                         struct td_err *err)
{
    const json_t *groups = json_object_get(obj, "config_groups"),
                 *sparse = json_object_get(json_object_get(obj, "sparsity_config"), "format");
    const char *format = NULL, *status = NULL, *name;
    json_t *group;
    char where[200];
    td_status s = check_fields(obj, what, ct_fields, N_ELEMENTS(ct_fields), err);
    if (s) return s;
    if ((s = td_json_str(obj, what, "format", &format, NULL, err)) ||
        (s = read_choice(obj, what, "quantization_status", "compressed", "frozen", &status, err)))
        return s;
    if (sparse && !is_off(sparse) &&
        !is(json_string_value(sparse) ? json_string_value(sparse) : "", "dense"))
        return refuse(what, "sparsity_config: format", sparse, "dense", err);
    if (!json_is_object(groups) || json_object_size(groups) == 0)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: config_groups has no groups", what);
    json_object_foreach((json_t *)(uintptr_t)groups, name, group)
    {
        struct td_quant_config c = {.name = "compressed-tensors"};
        snprintf(where, sizeof where, "%.120s: config_groups.%.48s", what, name);
        if ((s = read_ct_group(group, where, format, &c, err)) ||
            (s = add_config(&c, where, all, err)))
            return s;
    }
    return TD_OK;
}

/* ---- 8-bit floats ---------------------------------------------------------------------------- */

static const struct field fp8_fields[] = {
    {"quant_method", READ},       {"weight_block_size", READ},
    {"activation_scheme", READ},  {"fmt", READ},
    {"scale_fmt", READ},          {"modules_to_not_convert", HARMLESS}, /* the tensors say it */
    {"ignored_layers", HARMLESS}, {"kv_cache_scheme", HARMLESS},
    {"dequantize", HARMLESS},     {"modules_to_convert", OFF}, /* embeddings, too */
    {"expert_dtype", READ},
};

static td_status read_fp8(const json_t *obj, const char *what, struct td_quant_config *c,
                          struct td_err *err)
{
    const json_t *size = json_object_get(obj, "weight_block_size");
    const char *scheme = NULL, *fmt = NULL, *scale_fmt = NULL, *experts = NULL;
    td_status s = check_fields(obj, what, fp8_fields, N_ELEMENTS(fp8_fields), err);
    c->scheme = TD_QUANT_FP8;
    c->name = "fp8";
    c->bits = 8;
    if (s || (s = read_choice(obj, what, "activation_scheme", "dynamic", "static", &scheme, err)) ||
        (s = read_choice(obj, what, "fmt", "e4m3", "float8_e4m3fn", &fmt, err)) ||
        (s = read_choice(obj, what, "scale_fmt", "float", "ue8m0", &scale_fmt, err)) ||
        (s = read_choice(obj, what, "expert_dtype", "fp8", NULL, &experts, err)))
        return s;
    bool is_static = scheme && is(scheme, "static"), has_blocks = size && !json_is_null(size),
         has_powers = scale_fmt && is(scale_fmt, "ue8m0");
    if (is_static && has_powers)
        return refuse(what, "scale_fmt", json_object_get(obj, "scale_fmt"),
                      "float with a static activation_scheme", err);
    if (is_static && has_blocks)
        return refuse(what, "weight_block_size", size, "null with a static activation_scheme", err);
    c->x = is_static ? TD_QUANT_X_STATIC : has_blocks ? TD_QUANT_X_GROUP : TD_QUANT_X_ROW;
    c->x_powers = has_powers;
    return has_blocks ? read_block(what, size, c, err) : TD_OK;
}

static const struct field modelopt_fields[] = {
    {"quant_method", READ},
    {"quant_algo", READ},
    {"kv_cache_quant_algo",
     HARMLESS}, /* of a KV cache in 8 bits, which has scales of its own here */
    {"kv_cache_scheme", HARMLESS},
    {"exclude_modules", HARMLESS}, /* the tensors say it */
    {"ignore", HARMLESS},
    {"producer", HARMLESS},
    {"config_groups", HARMLESS}, /* quant_algo says it */
};

static td_status read_modelopt(const json_t *obj, const char *what, struct td_quant_config *c,
                               struct td_err *err)
{
    const char *algo = NULL;
    td_status s = read_choice(obj, what, "quant_algo", "FP8", NULL, &algo, err);
    if (s || (s = check_fields(obj, what, modelopt_fields, N_ELEMENTS(modelopt_fields), err)))
        return s;
    if (!algo) return td_fail(err, TD_ERR_INVALID, "%s: quant_algo is missing, must be FP8", what);
    c->scheme = TD_QUANT_FP8;
    c->name = "modelopt";
    c->bits = 8;
    c->x = TD_QUANT_X_STATIC;
    return TD_OK;
}

/* ---- bitsandbytes ---------------------------------------------------------------------------- */

static const struct field bnb_fields[] = {
    {"quant_method", READ},
    {"load_in_8bit", READ},
    {"load_in_4bit", READ},
    {"_load_in_8bit", READ},
    {"_load_in_4bit", READ},
    {"llm_int8_threshold", READ},
    {"llm_int8_has_fp16_weight", OFF},
    {"llm_int8_enable_fp32_cpu_offload", HARMLESS},
    {"llm_int8_skip_modules", HARMLESS}, /* the tensors say it */
    {"bnb_4bit_quant_type", READ},
    {"bnb_4bit_use_double_quant", HARMLESS}, /* the tensors say it */
    {"bnb_4bit_compute_dtype", HARMLESS},
    {"bnb_4bit_quant_storage", READ},
};

static td_status read_bnb(const json_t *obj, const char *what, struct td_quant_config *c,
                          struct td_err *err)
{
    bool is_8 = false, is_4 = false;
    double threshold = 6;
    const char *type = "fp4", *storage = NULL;
    td_status s = check_fields(obj, what, bnb_fields, N_ELEMENTS(bnb_fields), err);
    if (s || (s = td_json_bool(obj, what, "load_in_8bit", &is_8, NULL, err)) ||
        (s = td_json_bool(obj, what, "load_in_4bit", &is_4, NULL, err)) ||
        (s = td_json_f64(obj, what, "llm_int8_threshold", 0, 1e9, &threshold, NULL, err)) ||
        (s = read_choice(obj, what, "bnb_4bit_quant_storage", "uint8", NULL, &storage, err)))
        return s;
    if (is_8 == is_4)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: load_in_8bit and load_in_4bit are both %s, must be one of them", what,
                       is_8 ? "true" : "false");
    c->bits = is_8 ? 8 : 4;
    if (is_8) {
        c->scheme = TD_QUANT_BNB8;
        c->name = "bitsandbytes";
        c->x = threshold == 0 ? TD_QUANT_X_ROW : TD_QUANT_X_OUTLIER;
        if (threshold != 0 && threshold != 6)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "%s: llm_int8_threshold is %g, must be 6, or 0 for no outliers", what,
                           threshold);
        return TD_OK;
    }
    if ((s = read_choice(obj, what, "bnb_4bit_quant_type", "nf4", "fp4", &type, err))) return s;
    c->scheme = TD_QUANT_BNB4;
    c->name = type && is(type, "nf4") ? "nf4" : "fp4";
    return TD_OK;
}

/* ---- MXFP4 ----------------------------------------------------------------------------------- */

static const struct field mxfp4_fields[] = {
    {"quant_method", READ},
    {"modules_to_not_convert", HARMLESS}, /* the tensors say it */
    {"dequantize", HARMLESS},             /* how others compute with them */
};

static td_status read_mxfp4(const json_t *obj, const char *what, struct td_quant_config *c,
                            struct td_err *err)
{
    c->scheme = TD_QUANT_MXFP4;
    c->name = "mxfp4";
    c->bits = 4;
    c->group = 32;
    return check_fields(obj, what, mxfp4_fields, N_ELEMENTS(mxfp4_fields), err);
}

static const struct method {
    const char *name;
    td_status (*read)(const json_t *obj, const char *what, struct td_quant_config *c,
                      struct td_err *err);
} methods[] = {
    {"gptq", read_gptq},   {"awq", read_awq},           {"compressed-tensors", read_ct},
    {"fp8", read_fp8},     {"modelopt", read_modelopt}, {"bitsandbytes", read_bnb},
    {"mxfp4", read_mxfp4},
};

td_status td_quant_config_read(const json_t *value, const char *what,
                               struct td_quant_config ret_configs[TD_QUANT_SCHEMES_MAX],
                               struct td_err *err)
{
    char where[128], known[128] = "";
    size_t n = 0;
    const char *name = NULL;
    memset(ret_configs, 0, TD_QUANT_SCHEMES_MAX * sizeof *ret_configs);
    if (!value || is_off(value)) return TD_OK;
    snprintf(where, sizeof where, "%.96s: quantization_config", what);
    if (!json_is_object(value)) return td_fail(err, TD_ERR_INVALID, "%s: must be an object", where);
    td_status s = td_json_str(value, where, "quant_method", &name, NULL, err);
    if (s) return s;
    for (size_t i = 0; i < N_ELEMENTS(methods); i++) {
        if (name && strcmp(methods[i].name, name) == 0)
            return methods[i].read(value, where, ret_configs, err);
        if (n < sizeof known)
            n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "",
                                  methods[i].name);
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: quant_method is %.32s, not supported: must be %s",
                   where, name ? name : "missing", known);
}

/* What a directory may have beside config.json. */
static const struct beside {
    const char *name;
    const char *key;    /* of the object in it; NULL: its own */
    const char *method; /* what it means where it does not say */
    /* {its name, today's}; without the first of them the file is somebody else's */
    const char *names[2][2];
} files_beside[] = {
    {"quantize_config.json", NULL, "gptq", {{NULL}}},
    {"hf_quant_config.json", "quantization", "modelopt", {{NULL}}},
    {"quant_config.json", NULL, "awq", {{"w_bit", "bits"}, {"q_group_size", "group_size"}}},
};

/* Fills in what such a file does not say, and gives fields today's names. */
static bool complete(const struct beside *file, json_t *obj)
{
    bool ok = json_object_get(obj, "quant_method") ||
              !json_object_set_new(obj, "quant_method", json_string(file->method));
    for (int i = 0; i < 2 && file->names[i][0] && ok; i++) {
        json_t *v = json_object_get(obj, file->names[i][0]);
        if (!v || json_object_get(obj, file->names[i][1])) continue;
        ok =
            !json_object_set(obj, file->names[i][1], v) && !json_object_del(obj, file->names[i][0]);
    }
    return ok;
}

/* One such file; of somebody else's nothing. */
static td_status read_beside(const char *path, const struct beside *file,
                             struct td_quant_config *ret_configs, struct td_err *err)
{
    json_t *root;
    const char *key = file->key, *own = file->names[0][0];
    td_status s = td_json_load_file(path, FILE_BYTES_MAX, &root, own ? NULL : err);
    memset(ret_configs, 0, TD_QUANT_SCHEMES_MAX * sizeof *ret_configs);
    if (s) return own ? TD_OK : s;
    json_t *obj = key ? json_object_get(root, key) : root;
    if (own && !json_object_get(obj, own)) {
        json_decref(root);
        return TD_OK;
    }
    if (!json_is_object(obj))
        s = td_fail(err, TD_ERR_INVALID, "%s: %s must be an object", path, key ? key : "it");
    else if (!complete(file, obj))
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory", path);
    if (!s) s = td_quant_config_read(obj, path, ret_configs, err);
    json_decref(root);
    return s;
}

/* Two files of one directory that say different things: which of them its tensors follow would be a
 * guess, and a wrong one gives plausible nonsense where only a zero's meaning differs. Groups of
 * 128 columns and of whole rows differ, too: they are the same for a matrix of 128 columns, and a
 * model has others. */
static td_status check_same(const char *path, const struct td_quant_config *a,
                            const struct td_quant_config *b, struct td_err *err)
{
    for (int k = 0; k < TD_QUANT_SCHEMES_MAX; k++) {
        const char *field = difference(&a[k], &b[k]);
        if (field)
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s (%s) and the quantization_config of config.json (%s) differ in %s",
                           path, a->name, b->name, field);
    }
    return TD_OK;
}

td_status td_quant_config_beside(const char *dir,
                                 struct td_quant_config configs[TD_QUANT_SCHEMES_MAX],
                                 struct td_err *err)
{
    bool is_known = configs[0].scheme != TD_QUANT_NONE;
    for (size_t i = 0; i < N_ELEMENTS(files_beside); i++) {
        char path[4096];
        struct td_quant_config beside[TD_QUANT_SCHEMES_MAX];
        int n = snprintf(path, sizeof path, "%s/%s", dir, files_beside[i].name);
        if (n < 0 || (size_t)n >= sizeof path || access(path, F_OK) != 0) continue;
        td_status s = read_beside(path, &files_beside[i], beside, is_known ? NULL : err);
        if (!s && beside[0].scheme == TD_QUANT_NONE) continue;
        if (!is_known) {
            if (!s) memcpy(configs, beside, sizeof beside);
            return s;
        }
        /* what cannot be read is not needed */
        if (!s && (s = check_same(path, beside, configs, err))) return s;
    }
    return TD_OK;
}
