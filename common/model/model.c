/* model.c - opens and describes a model: config, compute type, weights (weights.c), rotary table,
 * identity. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/base/options.h"
#include "common/model/lazy_experts.h"
#include "common/model/model_internal.h"
#include "kernels/device.h"

_Static_assert(TD_ROPE_PAIRS_MAX >= TD_ATTN_HEAD_DIM_MAX / 2 &&
                   TD_ROPE_PAIRS_MAX >= TD_LATENT_ROPE_MAX / 2,
               "a table of frequencies has a place for each pair");

#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif

static float plain_frequency(const struct td_model_config *c, const struct td_rope *rope, int32_t i)
{
    return 1.0f / (float)pow(rope->theta, (double)((float)(2 * i) / (float)c->rotary_dim));
}

/* Llama 3: wavelengths beyond the old context are stretched by `factor`, short ones stay, and
 * between the two is a linear blend. */
static float llama3_frequency(const struct td_rope *rope, float f)
{
    double old_len = (double)rope->original_max_positions, wavelength = 2 * M_PI / (double)f;
    double low_wavelength = old_len / rope->low_freq_factor,
           high_wavelength = old_len / rope->high_freq_factor;
    double stretched = (double)f / rope->factor;
    double blend = (old_len / wavelength - rope->low_freq_factor) /
                   (rope->high_freq_factor - rope->low_freq_factor);
    if (wavelength > low_wavelength) return (float)stretched;
    if (wavelength >= high_wavelength) return (float)((1 - blend) * stretched + blend * (double)f);
    return f;
}

/* The pair that turns `turns` times within the old context, as a real number. */
static double yarn_pair(const struct td_model_config *c, const struct td_rope *rope, double turns)
{
    return c->rotary_dim * log(rope->original_max_positions / (turns * 2 * M_PI)) /
           (2 * log(rope->theta));
}

/* YaRN (Peng et al. 2023): pairs that turn often stay, those that turn less than once are stretched
 * by `factor`, and between the two is a linear ramp over their numbers. */
static float yarn_frequency(const struct td_model_config *c, const struct td_rope *rope, int32_t i,
                            float f)
{
    double low = yarn_pair(c, rope, rope->beta_fast), high = yarn_pair(c, rope, rope->beta_slow);
    if (!rope->keeps_fractions) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, c->rotary_dim - 1);
    if (low == high) high += 0.001;
    double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
    return (float)((double)f / rope->factor * ramp + (double)f * (1 - ramp));
}

void td_model_rope_frequencies(const struct td_model_config *c, const struct td_rope *rope,
                               int32_t max_len, float *ret_frequencies)
{
    const float *factors =
        max_len > rope->original_max_positions ? rope->long_factors : rope->short_factors;
    for (int32_t i = 0; i < c->rotary_dim / 2; i++) {
        float f = plain_frequency(c, rope, i);
        if (rope->scaling == TD_ROPE_LINEAR) f /= (float)rope->factor;
        if (rope->scaling == TD_ROPE_LLAMA3) f = llama3_frequency(rope, f);
        if (rope->scaling == TD_ROPE_YARN) f = yarn_frequency(c, rope, i, f);
        if (rope->scaling == TD_ROPE_LONG)
            f = 1.0f / (factors[i] *
                        (float)pow(rope->theta, (double)((float)(2 * i) / (float)c->rotary_dim)));
        ret_frequencies[i] = rope->scaling == TD_ROPE_NONE ? 0 : f;
    }
}

void td_model_alibi_slopes(int32_t n_heads, int32_t first, int32_t n, float *ret_slopes)
{
    int32_t power = 1;
    while (power <= n_heads / 2) power *= 2;
    for (int32_t i = 0; i < n; i++) {
        int32_t h = first + i;
        double at = h < power ? h + 1 : h - power + 0.5;
        ret_slopes[i] = (float)exp2(-8 * at / power);
    }
}

/* Of the factors that give the scaled frequency when they divide the plain one, if there is one:
 * files with factors and directories with the formula then have the same angles. */
void td_model_rope_factors(const struct td_model_config *c, float *ret_factors)
{
    const struct td_rope *rope = &c->rope[0];
    for (int32_t i = 0; i < c->rotary_dim / 2; i++) {
        float f = plain_frequency(c, rope, i), scaled = llama3_frequency(rope, f),
              factor = f / scaled;
        ret_factors[i] = factor;
        const float near[] = {factor, nextafterf(factor, 0), nextafterf(factor, INFINITY)};
        for (int k = 2; k >= 0; k--)
            if (f / near[k] == scaled) ret_factors[i] = near[k];
    }
}

/* The rotation of pair i at position p is p * inv_freq[i]; pairs behind the rotary ones do not
 * turn. Frequencies and angles are rounded to f32 as in the reference implementation, because
 * trained models saw those angles: at position 10^5 an f32 angle differs from the exact one by up
 * to 0.004. */
static void make_rope_table(const struct td_model *m, const struct td_rope *rope, float *table)
{
    const struct td_model_config *c = &m->config;
    int32_t half = td_rope_width(c) / 2, pairs = c->rotary_dim / 2;
    float inv_freq[TD_ROPE_PAIRS_MAX];
    double times =
        rope->scaling == TD_ROPE_YARN || rope->scaling == TD_ROPE_LONG ? rope->attention_factor : 1;
    td_model_rope_frequencies(c, rope, m->max_len, inv_freq);
    for (int32_t i = 0; i < m->n_rope_factors; i++) inv_freq[i] /= m->rope_factors[i];
    for (int32_t p = 0; p < m->max_len; p++) {
        float *row = table + (int64_t)p * td_rope_width(c);
        for (int32_t i = 0; i < half; i++) {
            float angle = i < pairs ? (float)p * inv_freq[i] : 0;
            row[i] = (float)(cos((double)angle) * (i < pairs ? times : 1));
            row[i + half] = (float)(sin((double)angle) * times);
        }
    }
}

static td_status place_rope_tables(struct td_model *m, struct td_err *err)
{
    const struct td_device *dev = m->ops->device;
    size_t bytes = (size_t)m->max_len * (size_t)td_rope_width(&m->config) * sizeof(float);
    float *table = dev ? malloc(bytes) : NULL;
    if (dev && !table)
        return td_fail(err, TD_ERR_NOMEM, "rotary table: no memory for %zu bytes", bytes);
    td_status s = TD_OK;
    for (int32_t i = 0; i < m->config.n_ropes && !s; i++) {
        make_rope_table(m, &m->config.rope[i], dev ? table : m->cos_sin[i]);
        if (dev) s = dev->upload(m->cos_sin[i], table, bytes, err);
    }
    free(table);
    return s;
}

/* Sets dtype and mix. */
static td_status choose_dtype(const char *name, struct td_model *m, struct td_err *err)
{
    const struct td_mix *mix = td_mix_by_name(name);
    if (!name || strcmp(name, "auto") == 0) /* f16 files keep f16 storage and compute in f32 */
        m->dtype = m->config.checkpoint_dtype == TD_BF16 ? TD_BF16 : TD_F32;
    else if (strcmp(name, "f32") == 0)
        m->dtype = TD_F32;
    else if (strcmp(name, "bf16") == 0)
        m->dtype = TD_BF16;
    else if (mix && td_mix_has_blocks(mix)) {
        m->dtype = TD_BF16;
        m->mix = mix;
    } else
        return td_fail(err, TD_ERR_INVALID,
                       "dtype is %.32s, must be auto, f32, bf16 or one of " TD_MIX_NAMES, name);
    return TD_OK;
}

static td_status choose_kv_dtype(const char *name, const struct td_model *m, enum td_dtype *ret,
                                 struct td_err *err)
{
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    *ret = m->dtype;
    if (!name || !name[0] || strcmp(name, "auto") == 0) return TD_OK;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(name, td_dtype_name(types[i])) != 0) continue;
        if (td_dtype_is_coded(types[i]) && m->ops->device && !m->ops->device->has_coded_kv)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "kv_dtype is %s: the kernels of table %s take f32 and bf16", name,
                           m->ops->name);
        *ret = types[i];
        return TD_OK;
    }
    return td_fail(err, TD_ERR_INVALID, "kv_dtype is %.32s, must be auto, f32, bf16, int8 or fp8",
                   name);
}

/* Of what each layer computes and of the rotations. 0 for a model whose layers are those of the
 * first families: what model_hash says of them is enough, and was all there was. */
static uint64_t hash_layers(const struct td_model *m)
{
    const struct td_model_config *c = &m->config;
    char text[400];
    uint64_t hash = 0;
    if (c->arch <= TD_ARCH_MIXTRAL && c->rope[0].scaling <= TD_ROPE_LLAMA3) return 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        const struct td_layer_spec *y = &m->layers[i].spec;
        int n = snprintf(text, sizeof text, "%d %d %a %a %d %d %a %d", y->window, y->rope,
                         (double)y->attn_scale, (double)y->attn_cap, y->qk_norm, y->act,
                         (double)y->residual_scale, y->parallel);
        if (y->alibi) n += snprintf(text + n, sizeof text - (size_t)n, " alibi");
        hash = td_hash64(text, (size_t)n, hash);
    }
    for (int32_t i = 0; i < c->n_ropes; i++) {
        float frequencies[TD_ROPE_PAIRS_MAX];
        td_model_rope_frequencies(c, &c->rope[i], m->max_len, frequencies);
        hash = td_hash64(frequencies, (size_t)c->rotary_dim / 2 * sizeof(float), hash);
        int n = snprintf(text, sizeof text, "%a", c->rope[i].attention_factor);
        hash = td_hash64(text, (size_t)n, hash);
    }
    int n = snprintf(text, sizeof text, "%d %d %d %d %a %a %a", c->rotary_dim, c->rope_neighbours,
                     c->norm_centres, c->embed_root, (double)c->embed_scale, (double)c->logit_scale,
                     (double)c->logit_cap);
    hash = td_hash64(text, (size_t)n, hash);
    return hash ? hash : 1;
}

/* A hash of everything that decides a logit's bits, as text, so that padding does not count. The
 * number of multiprocessors is not in it: it decides how a step's work is cut and spread, while
 * every sum keeps its order, so cards of one architecture, or slices of one, may finish each
 * other's requests. (Where the device need not be deterministic, cuBLASLt's choice may follow that
 * number; but then a row's bits follow its batch, too.) */
static uint64_t model_hash(const struct td_model *m, uint64_t digest)
{
    const struct td_model_config *c = &m->config;
    char text[800], device[160] = "";
    /* another architecture, or other algorithms, count as another instruction set */
    if (m->ops->device) {
        const struct td_device_info *i = &m->ops->device->info;
        snprintf(device, sizeof device, "sm_%d%d deterministic %d emulated %d ", i->cc_major,
                 i->cc_minor, i->is_deterministic, i->is_emulated);
    }
    int n = snprintf(text, sizeof text,
                     "arch %d layers %d hidden %d inter %d heads %d kv %d dim %d vocab %d eps %a "
                     "tied %d bias %d %d %d qknorm %d "
                     "window %d from %d "
                     "rope %d %a %a %a %a %d dtype %s ops %s %sweights %016" PRIx64,
                     c->arch, c->n_layers, c->hidden, c->intermediate, c->n_heads, c->n_kv_heads,
                     c->head_dim, c->vocab, (double)c->rms_eps, c->tied_embeddings, c->qkv_bias,
                     c->o_bias, c->mlp_bias, c->qk_norm, c->sliding_window, c->sliding_from_layer,
                     c->rope[0].scaling, c->rope[0].theta, c->rope[0].factor,
                     c->rope[0].low_freq_factor, c->rope[0].high_freq_factor,
                     c->rope[0].original_max_positions, td_dtype_name(m->dtype),
                     td_ops_numerics(m->ops), device, digest);
    if (c->experts.n)
        n += snprintf(text + n, sizeof text - (size_t)n, " experts %d %d %d %d", c->experts.n,
                      c->experts.n_used, c->experts.intermediate, c->experts.rule.normalise);
    if (c->experts.shared || c->experts.rule.sigmoid || c->experts.rule.scale != 0 ||
        c->experts.rule.n_groups)
        n += snprintf(text + n, sizeof text - (size_t)n, " shared %d sigmoid %d groups %d %d %d %a",
                      c->experts.shared, c->experts.rule.sigmoid, c->experts.rule.n_groups,
                      c->experts.rule.n_groups_used, c->experts.rule.groups_by_two,
                      (double)c->experts.rule.scale);
    if (c->latent.kv_rank)
        n += snprintf(text + n, sizeof text - (size_t)n, " latent %d %d %d %d %d %a",
                      c->latent.kv_rank, c->latent.q_rank, c->latent.nope, c->latent.rope,
                      c->latent.v, (double)c->latent.scale);
    TD_ASSERT(n > 0 && (size_t)n < sizeof text);
    return td_hash64(text, (size_t)n, hash_layers(m));
}

/* Whether a layer has an MLP in place of a mixture. */
static bool has_mlp(const struct td_model_config *c)
{
    bool any = !c->experts.n;
    for (int32_t i = 0; i < c->n_layers && !any; i++) any = !td_model_config_has_experts(c, i);
    return any;
}

td_status td_model_check_ranks(const struct td_model_config *c, int32_t n_ranks, struct td_err *err)
{
    if (n_ranks != 1 && n_ranks != 2 && n_ranks != 4 && n_ranks != 8 && n_ranks != 16)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp is %d, must be 1, 2, 4, 8 or 16", n_ranks);
    if (c->n_heads % n_ranks)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp is %d, must divide num_attention_heads %d",
                       n_ranks, c->n_heads);
    if (c->n_kv_heads % n_ranks && n_ranks % c->n_kv_heads)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "tp is %d, must divide num_key_value_heads %d or be a multiple of it",
                       n_ranks, c->n_kv_heads);
    if (has_mlp(c) && c->intermediate % n_ranks)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp is %d, must divide intermediate_size %d",
                       n_ranks, c->intermediate);
    if (c->experts.shared % n_ranks)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "tp is %d, must divide the %d rows of the shared experts", n_ranks,
                       c->experts.shared);
    if (c->vocab < n_ranks)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp is %d, must be at most vocab_size %d", n_ranks,
                       c->vocab);
    return TD_OK;
}

/* What the kernels of devices cannot compute yet; of layer y, or (NULL) of the whole model. NULL:
 * nothing. */
static const char *lacks_on_device(const struct td_model_config *c, const struct td_layer_spec *y)
{
    if (!y)
        return c->norm_centres                        ? "norms that subtract the mean"
               : c->embed_root || c->embed_scale != 1 ? "scaled embeddings"
               : c->logit_cap > 0                     ? "soft caps of logits"
               : c->logit_scale != 1                  ? "scaled logits"
                                                      : NULL;
    if (y->attn_cap > 0) return "soft caps of attention";
    if (y->alibi) return "slopes of scores (ALiBi)";
    if (y->act != TD_ACT_SILU) return "gates other than SwiGLU";
    if (y->parallel) return "attention and MLP side by side";
    if (y->residual_scale != 1) return "a scaled residual";
    if (y->qk_norm == TD_QK_NORM_ROWS) return "norms of whole rows of q and k";
    for (const struct td_tensor_row *t = y->expert_tensors; t && t->name; t++)
        if (t->cols == TD_DIM_NONE && td_tensor_is_wanted(c, t)) return "biases of experts";
    bool has_norm = false;
    for (int k = 0; k < TD_LAYER_TABLES; k++)
        for (const struct td_tensor_row *t = y->tensors[k]; t && t->name; t++) {
            if (t->into == TD_INTO_ATTN_OUT_NORM || t->into == TD_INTO_MLP_OUT_NORM)
                return "norms behind attention and MLP";
            if (t->into == TD_INTO_SINKS) return "attention sinks";
            has_norm |= t->into == TD_INTO_ATTN_NORM;
        }
    return has_norm ? NULL : "layers without an input norm";
}

static td_status check_device(const struct td_model *m, struct td_err *err)
{
    const struct td_model_config *c = &m->config;
    struct td_layer_spec spec;
    if (!m->ops->device) return TD_OK;
    const char *lacks = lacks_on_device(c, NULL);
    for (int32_t i = 0; i < c->n_layers && !lacks; i++) {
        td_model_config_layer(c, i, &spec);
        lacks = lacks_on_device(c, &spec);
    }
    return lacks ? td_fail(err, TD_ERR_UNSUPPORTED,
                           "model_type is %s, whose %s the kernels of table %s do not have: use "
                           "those of the CPU",
                           td_families[c->arch]->model_type, lacks, m->ops->name)
                 : TD_OK;
}

/* What mixtures of experts on a device cannot have yet. */
static td_status check_experts(const struct td_model *m, struct td_err *err)
{
    int32_t n = m->config.experts.n, n_ranks = td_comm_n_ranks(m->comm);
    if (!n || !m->ops->device) return TD_OK;
    if (!m->ops->device->experts)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "num_experts is %d: the kernels of table %s have no mixtures of experts", n,
                       m->ops->name);
    if (n_ranks > 1)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "tp is %d, must be 1: experts (num_experts is %d) are not divided over "
                       "devices yet",
                       n_ranks, n);
    if (m->experts_most)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "experts are to be packed when they are chosen: on a device they are there "
                       "from the start, experts must be load");
    return TD_OK;
}

/* What latent attention cannot have yet. */
static td_status check_latent(const struct td_model *m, struct td_err *err)
{
    int32_t rank = m->config.latent.kv_rank;
    if (!rank) return TD_OK;
    if (m->ops->device)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "kv_lora_rank is %d: the kernels of table %s have no latent attention", rank,
                       m->ops->name);
    return TD_OK;
}

/* When experts are packed, and how many bytes of them at once: of this rank. */
static td_status choose_experts(const char *text, struct td_model *m, struct td_err *err)
{
    uint64_t bytes = UINT64_MAX, n_ranks = 1;
    if (!text || strcmp(text, "load") == 0) return TD_OK;
    if (strcmp(text, "lazy") != 0) {
        if (!td_comm_is_remote(m->comm)) n_ranks = (uint64_t)td_comm_n_ranks(m->comm);
        if (td_parse_size(text, &bytes, NULL) || bytes < n_ranks)
            return td_fail(err, TD_ERR_INVALID,
                           "experts is \"%s\", must be load, lazy or a size (20GiB)", text);
    }
    if (m->config.experts.n) m->experts_most = bytes / n_ranks;
    return TD_OK;
}

static td_status check_expert_ranks(const struct td_model *m, struct td_err *err)
{
    const struct td_model_config *c = &m->config;
    int32_t n = td_comm_n_ranks(m->comm), ep = m->expert_ranks, n_shares = ep > 0 ? n / ep : 0;
    if (ep < 1 || n % ep)
        return td_fail(err, TD_ERR_INVALID, "ep is %d, must be 0 or divide tp %d", ep, n);
    if (c->experts.n && (c->experts.intermediate % n_shares || c->hidden % n_shares))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "ep is %d of tp %d, so %d ranks share an expert: that must divide its %d "
                       "rows and hidden_size %d",
                       ep, n, n_shares, c->experts.intermediate, c->hidden);
    return TD_OK;
}

static td_status make_shard(struct td_model *m, struct td_err *err)
{
    int32_t n = td_comm_n_ranks(m->comm);
    td_status s = td_model_check_ranks(&m->config, n, err);
    if (!s) s = check_expert_ranks(m, err);
    if (s) return s;
    if (n > 1 && m->ops->device && !m->ops->device->ranks)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp is %d, and this device has no way to others",
                       n);
    if (n > 1)
        /* A graph with calls between ranks must be recorded by all ranks in the same step; that is
         * not implemented yet. */
        m->no_graphs = true;
    m->shard = m->config;
    m->shard.n_heads /= n;
    m->shard.n_kv_heads = m->config.n_kv_heads >= n ? m->config.n_kv_heads / n : 1;
    m->shard.intermediate /= n;
    m->shard.experts.shared /= n;
    if (m->config.alibi)
        td_model_alibi_slopes(m->config.n_heads, td_comm_rank(m->comm) * m->shard.n_heads,
                              m->shard.n_heads, m->slopes);
    for (int32_t r = 0; r <= n; r++) m->logit_first[r] = td_logit_first(m->config.vocab, r, n);
    return TD_OK;
}

const struct td_ops *td_model_ops_by_name(const char *name) { return td_ops_by_name(name); }

/* Leaves out all layers but the first n; 0: none. */
static td_status keep_layers(struct td_model_config *c, int32_t n, struct td_err *err)
{
    bool mixes = false;
    if (n < 0 || n > c->n_layers)
        return td_fail(err, TD_ERR_INVALID,
                       "layers is %d, must be in 1..%d (num_hidden_layers), or 0 for that", n,
                       c->n_layers);
    if (n) c->n_layers = n;
    for (int32_t i = 0; i < c->n_layers; i++) mixes = mixes || td_model_config_has_experts(c, i);
    if (n && !mixes) c->experts = (struct td_experts_config){0};
    return TD_OK;
}

td_status td_model_open(const struct td_model_params *params, struct td_model **ret_model,
                        struct td_err *err)
{
    if (!params->dir == !params->random_config)
        return td_fail(err, TD_ERR_INVALID,
                       "model: give either a model directory or a config for random weights");
    struct td_model *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "model: no memory");
    m->arena.memfd = -1;
    m->threads = params->threads;
    m->comm = params->comm;
    m->expert_ranks = params->expert_ranks ? params->expert_ranks : td_comm_n_ranks(m->comm);
    m->no_graphs = params->no_graphs;
    struct td_ops_choice choice = {.ops = params->ops};
    if (!choice.ops) td_ops_choose(&choice);
    m->ops = choice.ops;
    td_status s =
        m->ops ? TD_OK
               : td_fail(err, TD_ERR_INVALID,
                         "model: TANDEM_OPS names a table of kernels that this CPU does not run");
    if (!s)
        s = params->dir ? td_model_config_load(params->dir, &m->config, err)
                        : td_model_config_load_file(params->random_config, &m->config, err);
    if (!s && params->random_config) s = keep_layers(&m->config, params->random_layers, err);
    if (!s) td_ops_choice_text(&choice, m->kernels, sizeof m->kernels);
    if (!s && params->random_config && m->config.quant[0].scheme)
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "%s: quantization_config is %s, but random weights are not quantised: must be "
                    "absent",
                    params->random_config, m->config.quant[0].name);
    if (!s) s = choose_dtype(params->dtype, m, err);
    if (!s && m->mix && m->config.quant[0].scheme)
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "dtype is %s, but the checkpoint is quantised (%s): must be auto, f32 or bf16",
                    params->dtype, m->config.quant[0].name);
    if (!s) s = check_device(m, err);
    if (!s) s = choose_experts(params->experts, m, err);
    if (!s) s = check_experts(m, err);
    if (!s) s = choose_kv_dtype(params->kv_dtype, m, &m->kv_dtype, err);
    if (!s) s = check_latent(m, err);
    if (!s && (params->max_model_len < 0 || params->max_model_len > m->config.max_positions))
        s = td_fail(
            err, TD_ERR_INVALID,
            "max_model_len is %d, must be in 1..%d (max_position_embeddings), or 0 for that",
            params->max_model_len, m->config.max_positions);
    uint64_t digest = 0;
    if (!s) s = make_shard(m, err);
    if (!s) {
        m->max_len = params->max_model_len ? params->max_model_len : m->config.max_positions;
        s = params->only_look ? td_weights_look(m, params->dir, err)
                              : td_weights_load(m, params->dir, params->quiet, &digest, err);
    }
    if (!s && !params->only_look) s = place_rope_tables(m, err);
    if (s) {
        td_model_close(m);
        return s;
    }
    if (!params->only_look) m->hash = model_hash(m, digest);
    *ret_model = m;
    return TD_OK;
}

void td_model_close(struct td_model *model)
{
    if (!model) return;
    if (model->device_memory) model->ops->device->release(model->device_memory);
    td_weights_close(model);
    td_arena_destroy(&model->arena);
    td_weights_free_formats(model);
    td_weights_free_layers(model);
    free(model);
}

const struct td_model_config *td_model_config(const struct td_model *model)
{
    return &model->config;
}
enum td_dtype td_model_dtype(const struct td_model *model) { return model->dtype; }
enum td_dtype td_model_kv_dtype(const struct td_model *model) { return model->kv_dtype; }
const struct td_device *td_model_device(const struct td_model *model) { return model->ops->device; }
const char *td_model_kernels(const struct td_model *model) { return model->kernels; }
int32_t td_model_max_len(const struct td_model *model) { return model->max_len; }
uint64_t td_model_hash(const struct td_model *model) { return model->hash; }

void td_model_expert_memory(const struct td_model *m, struct td_expert_memory *ret)
{
    int32_t n = m->config.experts.n, mine;
    *ret = (struct td_expert_memory){.bytes = m->expert_bytes, .packed_bytes = m->expert_bytes};
    if (m->lazy_experts) {
        td_lazy_experts_memory(m->lazy_experts, ret);
        return;
    }
    mine = td_comm_rank(m->comm) / (td_comm_n_ranks(m->comm) / m->expert_ranks);
    for (int32_t i = 0; i < m->config.n_layers && n; i++)
        if (m->layers[i].experts)
            ret->n += (uint64_t)(td_expert_first(n, mine + 1, m->expert_ranks) -
                                 td_expert_first(n, mine, m->expert_ranks));
    ret->n_packed = ret->n;
}

int32_t td_model_n_ranks(const struct td_model *model) { return td_comm_n_ranks(model->comm); }
uint64_t td_model_memory_bytes(const struct td_model *model) { return model->memory_bytes; }
uint64_t td_model_weight_bytes(const struct td_model *model) { return model->weight_bytes; }
uint64_t td_model_expert_weight_bytes(const struct td_model *model)
{
    return model->expert_weight_bytes;
}

td_status td_model_kv_layout(const struct td_model *model, int32_t block_size,
                             struct td_kv_layout *ret_layout, struct td_err *err)
{
    if (block_size < 8 || block_size > 256 || (block_size & (block_size - 1)))
        return td_fail(err, TD_ERR_INVALID, "block_size is %d, must be a power of two in 8..256",
                       block_size);
    const struct td_model_config *c = &model->shard;
    struct td_kv_layout layout = {.n_layers = c->n_layers,
                                  .n_kv_heads = c->n_kv_heads,
                                  .head_dim = c->head_dim,
                                  .v_dim = c->latent.kv_rank ? TD_KV_V_IN_K : 0,
                                  .block_size = block_size,
                                  .dtype = model->kv_dtype};
    td_status s = td_kv_layout_init(&layout, err);
    if (!s) *ret_layout = layout;
    return s;
}
