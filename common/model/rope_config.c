/* rope_config.c - the rotation of q and k as config.json says it: the fields rope_theta,
 * rope_scaling (transformers 4) and rope_parameters (transformers 5), with one object for each kind
 * of layer where the family has two rotations.
 *
 * Formulas are model.c's (td_model_rope_frequencies). "dynamic" stretches a rotation when a
 * sequence is longer than max_position_embeddings, so that keys in a cache would depend on how a
 * prompt was cut (I1). No sequence is longer here, and up to that length it is the plain
 * rotation. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "common/model/family.h"

#define POSITIONS_MAX TD_POSITIONS_MAX

/* One object, while it is read. */
struct reading {
    const json_t *r;
    char where[128];
    const struct td_model_config *c;
    struct td_rope *rope;
    struct td_err *err;
};

static td_status need_f64(const struct reading *x, const char *key, double min, double max,
                          double *ret)
{
    bool present;
    td_status s = td_json_f64(x->r, x->where, key, min, max, ret, &present, x->err);
    if (s || present) return s;
    return td_fail(x->err, TD_ERR_INVALID, "%s: %s is missing, must be a number in %g..%g",
                   x->where, key, min, max);
}

/* Present, not null and not "off". */
static bool is_set(const struct reading *x, const char *key)
{
    const json_t *v = json_object_get(x->r, key);
    return v && !json_is_null(v);
}

static td_status read_llama3(const struct reading *x)
{
    struct td_rope *r = x->rope;
    td_status s;
    if ((s = need_f64(x, "factor", 1, 1e6, &r->factor)) ||
        (s = need_f64(x, "low_freq_factor", 1e-6, 1e6, &r->low_freq_factor)) ||
        (s = need_f64(x, "high_freq_factor", 1e-6, 1e6, &r->high_freq_factor)))
        return s;
    if (!(r->high_freq_factor > r->low_freq_factor))
        return td_fail(x->err, TD_ERR_INVALID,
                       "%s: high_freq_factor is %g, must be above low_freq_factor %g", x->where,
                       r->high_freq_factor, r->low_freq_factor);
    return td_json_need_i32(x->r, x->where, "original_max_position_embeddings", 1, POSITIONS_MAX,
                            &r->original_max_positions, x->err);
}

/* The length before the context was stretched: in the object, or beside it (Phi-3), which counts
 * more. */
static td_status read_original(const struct reading *x, const json_t *obj, const char *what)
{
    static const char key[] = "original_max_position_embeddings";
    struct td_rope *r = x->rope;
    r->original_max_positions = x->c->max_positions;
    td_status s =
        td_config_i32(x->r, x->where, key, 2, POSITIONS_MAX, &r->original_max_positions, x->err);
    return s ? s
             : td_config_i32(obj, what, key, 2, POSITIONS_MAX, &r->original_max_positions, x->err);
}

/* 0.1 * mscale * ln(factor) + 1, of YaRN (Peng et al. 2023). */
static double yarn_scale(double factor, double mscale)
{
    return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
}

static td_status read_yarn(const struct reading *x)
{
    struct td_rope *r = x->rope;
    double mscale = 0, all_dim = 0;
    bool truncate = true, has_factor;
    td_status s;
    r->beta_fast = 32, r->beta_slow = 1;
    r->factor = fmax(1, (double)x->c->max_positions / r->original_max_positions);
    if ((s = td_json_f64(x->r, x->where, "factor", 1, 1e6, &r->factor, &has_factor, x->err)) ||
        (s = td_json_f64(x->r, x->where, "beta_fast", 1e-3, 1e6, &r->beta_fast, NULL, x->err)) ||
        (s = td_json_f64(x->r, x->where, "beta_slow", 1e-3, 1e6, &r->beta_slow, NULL, x->err)) ||
        (s = td_json_f64(x->r, x->where, "mscale", 0, TD_MSCALE_MAX, &mscale, NULL, x->err)) ||
        (s = td_json_f64(x->r, x->where, "mscale_all_dim", 0, TD_MSCALE_MAX, &all_dim, NULL,
                         x->err)) ||
        (s = td_json_bool(x->r, x->where, "truncate", &truncate, NULL, x->err)))
        return s;
    /* Latent attention scales by the field itself (deepseek.c), not by the ratio of two lengths. */
    if (x->c->latent.kv_rank && all_dim > 0 && !has_factor)
        return need_f64(x, "factor", 1, 1e6, &r->factor);
    r->keeps_fractions = !truncate;
    r->attention_factor = mscale > 0 && all_dim > 0
                              ? yarn_scale(r->factor, mscale) / yarn_scale(r->factor, all_dim)
                              : yarn_scale(r->factor, 1);
    return td_json_f64(x->r, x->where, "attention_factor", 1e-3, 1e3, &r->attention_factor, NULL,
                       x->err);
}

static td_status read_factors(const struct reading *x, const char *key, float *ret)
{
    const json_t *list = json_object_get(x->r, key);
    size_t n = (size_t)x->c->rotary_dim / 2;
    TD_ASSERT(n <= TD_ROPE_PAIRS_MAX);
    if (!json_is_array(list) || json_array_size(list) != n)
        return td_fail(x->err, TD_ERR_INVALID, "%s: %s must be a list of %zu numbers", x->where,
                       key, n);
    for (size_t i = 0; i < n; i++) {
        double v = json_number_value(json_array_get(list, i));
        if (!(v >= 1e-3 && v <= 1e6))
            return td_fail(x->err, TD_ERR_INVALID, "%s: %s[%zu] is %g, must be in 1e-3..1e6",
                           x->where, key, i, v);
        ret[i] = (float)v;
    }
    return TD_OK;
}

/* factor, where there is one, counts more than the ratio of the two lengths: so it is in
 * transformers 5. (In 4 the ratio counts more; published models have no factor, or the same.) */
static td_status read_long(const struct reading *x)
{
    struct td_rope *r = x->rope;
    td_status s;
    r->factor = fmax(1, (double)x->c->max_positions / r->original_max_positions);
    if ((s = read_factors(x, "short_factor", r->short_factors)) ||
        (s = read_factors(x, "long_factor", r->long_factors)) ||
        (s = td_json_f64(x->r, x->where, "factor", 1, 1e6, &r->factor, NULL, x->err)))
        return s;
    bool stretched = r->factor > 1 && r->original_max_positions > 1;
    r->attention_factor =
        stretched ? sqrt(1 + log(r->factor) / log((double)r->original_max_positions)) : 1;
    return td_json_f64(x->r, x->where, "attention_factor", 1e-3, 1e3, &r->attention_factor, NULL,
                       x->err);
}

struct kind {
    const char *name;
    enum td_rope_scaling scaling;
    const char *fields[8]; /* beside those of all */
};
static const struct kind kinds[] = {
    {"default", TD_ROPE_PLAIN, {NULL}},
    {"dynamic", TD_ROPE_PLAIN, {"factor"}},
    {"linear", TD_ROPE_LINEAR, {"factor"}},
    {"llama3",
     TD_ROPE_LLAMA3,
     {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
    {"yarn",
     TD_ROPE_YARN,
     {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
      "attention_factor", "original_max_position_embeddings"}},
    {"longrope",
     TD_ROPE_LONG,
     {"factor", "short_factor", "long_factor", "attention_factor",
      "original_max_position_embeddings"}},
};

static td_status find_kind(const struct reading *x, const struct kind **ret)
{
    const char *type = NULL, *old_type = NULL;
    td_status s;
    if ((s = td_json_str(x->r, x->where, "rope_type", &type, NULL, x->err)) ||
        (s = td_json_str(x->r, x->where, "type", &old_type, NULL, x->err)))
        return s;
    if (type && old_type && strcmp(type, old_type) != 0)
        return td_fail(x->err, TD_ERR_INVALID,
                       "%s: rope_type is %.32s and type is %.32s, must be the same", x->where, type,
                       old_type);
    if (!type) type = old_type ? old_type : "default";
    /* how the first files of Phi-3 called it */
    if ((strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0) && is_set(x, "short_factor"))
        type = "longrope";
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i].name, type) == 0) {
            *ret = &kinds[i];
            return TD_OK;
        }
    return td_fail(x->err, TD_ERR_UNSUPPORTED,
                   "%s: rope_type is %.32s, not supported: must be default, dynamic, linear, "
                   "llama3, yarn or longrope",
                   x->where, type);
}

/* Refuses a field that the kind of scaling does not have, unless it is switched off. */
static td_status check_fields(const struct reading *x, const struct kind *kind)
{
    static const char *const always[] = {"type", "rope_type", "rope_theta",
                                         "partial_rotary_factor"};
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)x->r, key, v)
    {
        bool ok = json_is_null(v) || json_is_false(v) ||
                  (json_is_number(v) && (json_number_value(v) == 0 || (strcmp(key, "factor") == 0 &&
                                                                       json_number_value(v) == 1)));
        for (size_t i = 0; i < sizeof always / sizeof *always; i++)
            ok |= strcmp(key, always[i]) == 0;
        for (size_t i = 0; i < sizeof kind->fields / sizeof *kind->fields && kind->fields[i]; i++)
            ok |= strcmp(key, kind->fields[i]) == 0;
        if (!ok) return td_config_unsupported(x->where, key, v, "absent", x->err);
    }
    return TD_OK;
}

/* The share of each head that is rotated, from its first dim on. In latent attention: of the part
 * of the head that is for rotation. */
static td_status read_share(const json_t *obj, const char *where, struct td_model_config *c,
                            struct td_err *err)
{
    double share = 0;
    bool present;
    td_status s = td_json_f64(obj, where, "partial_rotary_factor", 0, 1, &share, &present, err);
    if (s || !present) return s;
    if (share == 0 && !(td_families[c->arch]->partial_rotary > 0)) return TD_OK; /* switched off */
    if (share != 1 && !(td_families[c->arch]->partial_rotary > 0))
        return td_config_unsupported(where, "partial_rotary_factor",
                                     json_object_get(obj, "partial_rotary_factor"),
                                     "absent or switched off", err);
    int32_t whole = c->latent.kv_rank ? c->latent.rope : c->head_dim;
    int32_t dim = (int32_t)((double)whole * share);
    if (dim < 2 || dim % 2)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: partial_rotary_factor is %g, which rotates %d dims of a head of %d: "
                       "must be an even number of at least 2",
                       where, share, dim, whole);
    c->rotary_dim = dim;
    return TD_OK;
}

/* A file may have the context that the model was trained with, and be stretched beyond it by hand,
 * as Qwen2.5's card says: 32,768 positions times 4. */
static void stretch_context(const struct reading *x, struct td_model_config *c)
{
    double longest = floor((double)x->rope->original_max_positions * x->rope->factor);
    if (is_set(x, "original_max_position_embeddings") && longest > c->max_positions)
        c->max_positions = (int32_t)fmin(longest, POSITIONS_MAX);
}

static td_status read_object(const json_t *obj, const char *what, const json_t *r, const char *name,
                             struct td_model_config *c, struct td_rope *rope, struct td_err *err)
{
    struct reading x = {.r = r, .c = c, .rope = rope, .err = err};
    const struct kind *kind = NULL;
    snprintf(x.where, sizeof x.where, "%.96s: %s", what, name);
    if (!json_is_object(r)) return td_fail(err, TD_ERR_INVALID, "%s must be an object", x.where);
    td_status s;
    if ((s = find_kind(&x, &kind)) || (s = check_fields(&x, kind)) ||
        (s = td_json_f64(r, x.where, "rope_theta", 1, 1e12, &rope->theta, NULL, err)) ||
        (s = read_share(r, x.where, c, err)))
        return s;
    rope->scaling = kind->scaling;
    switch (kind->scaling) {
    case TD_ROPE_LINEAR:
        return need_f64(&x, "factor", 1, 1e6, &rope->factor);
    case TD_ROPE_LLAMA3:
        return read_llama3(&x);
    case TD_ROPE_YARN:
        s = read_original(&x, obj, what);
        if (!s && !(s = read_yarn(&x))) stretch_context(&x, c);
        return s;
    case TD_ROPE_LONG:
        s = read_original(&x, obj, what);
        return s ? s : read_long(&x);
    default:
        return TD_OK;
    }
}

/* A field that holds one object, or one for each kind of layer: of full ones to rope[0], of
 * windowed ones to rope[1]. */
static td_status read_field(const json_t *obj, const char *what, const char *name,
                            struct td_model_config *c, struct td_err *err)
{
    const json_t *r = json_object_get(obj, name);
    if (!r || json_is_null(r)) return TD_OK;
    const json_t *full = json_object_get(r, "full_attention"),
                 *sliding = json_object_get(r, "sliding_attention");
    if (!(td_families[c->arch]->local_theta > 0) || (!full && !sliding))
        return read_object(obj, what, r, name, c, &c->rope[0], err);
    if (!full || !sliding || json_object_size(r) != 2)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: %s must have full_attention and sliding_attention, and nothing else",
                       what, name);
    td_status s = read_object(obj, what, full, "rope of full_attention", c, &c->rope[0], err);
    return s ? s
             : read_object(obj, what, sliding, "rope of sliding_attention", c, &c->rope[1], err);
}

static td_status read_ropes(const json_t *obj, const char *what, struct td_model_config *c,
                            struct td_err *err)
{
    const struct td_family *family = td_families[c->arch];
    td_status s;
    struct td_rope *first = &c->rope[0], *second = &c->rope[1];
    *first = (struct td_rope){.factor = 1,
                              .attention_factor = 1,
                              .theta = family->default_theta > 0 ? family->default_theta : 10000};
    if (!c->rotary_dim)
        c->rotary_dim = family->partial_rotary > 0
                            ? (int32_t)((double)c->head_dim * family->partial_rotary)
                            : c->head_dim;
    if (family->local_theta > 0) {
        *second = *first;
        second->theta = family->local_theta;
        if ((s = td_json_f64(obj, what, "rope_local_base_freq", 1, 1e12, &second->theta, NULL,
                             err)))
            return s;
    }
    if ((s = td_json_f64(obj, what, "rope_theta", 1, 1e12, &first->theta, NULL, err)) ||
        (s = read_share(obj, what, c, err)))
        return s;
    const json_t *old = json_object_get(obj, "rope_scaling"),
                 *new = json_object_get(obj, "rope_parameters");
    if (old && !json_is_null(old) && new && !json_is_null(new) && !json_equal(old, new))
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: rope_scaling and rope_parameters are both set and differ: must be one of them",
            what);
    if ((s = read_field(obj, what, "rope_scaling", c, err))) return s;
    return new && !json_is_null(new) ? read_field(obj, what, "rope_parameters", c, err) : TD_OK;
}

td_status td_config_read_rope(const json_t *obj, const char *what, struct td_model_config *c,
                              struct td_err *err)
{
    /* by the family's own field; 0: by none */
    int32_t said = c->latent.kv_rank ? 0 : c->rotary_dim;
    td_status s = read_ropes(obj, what, c, err);
    if (s) return s;
    if (c->alibi) c->rope[0].scaling = TD_ROPE_NONE;
    /* by the family's share, which no field named */
    if (c->rotary_dim < 2 || c->rotary_dim % 2)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: head_dim is %d, of which %s rotates %d dims: must be an even number "
                       "of at least 2",
                       what, c->head_dim, td_families[c->arch]->model_type, c->rotary_dim);
    if (!said || c->rotary_dim == said) return TD_OK;
    return td_fail(
        err, TD_ERR_INVALID,
        "%s: rotary_dim is %d, but partial_rotary_factor rotates %d dims of a head: must "
        "be the same",
        what, said, c->rotary_dim);
}
