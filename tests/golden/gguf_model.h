/* gguf_model.h - writes the model of a Hugging Face directory as a GGUF file, as llama.cpp's
 * converter does: other names, dimensions fastest first, rows of q and k of architecture llama in
 * pairs. Tests of GGUF compare such a file with its directory. */
#ifndef TD_TESTS_GGUF_MODEL_H
#define TD_TESTS_GGUF_MODEL_H

#include "tests/unit/gguf_file.h"

#include <math.h>

#include "common/base/json.h"
#include "common/model/checkpoint.h"
#include "common/model/config.h"
#include "kernels/format.h"
#include "kernels/part.h"

/* GGUF's number of the type in which a tensor is written; NULL function: as in the directory. */
typedef uint32_t (*gm_type_fn)(const char *gguf_name, const struct td_tensor *t);

static const char *const gm_names[][2] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
    {"input_layernorm.weight", "attn_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
    {"mlp.gate.weight", "ffn_gate_inp.weight"},
    {"mlp.experts.0.gate_proj.weight", "ffn_gate_exps.weight"},
    {"mlp.experts.0.up_proj.weight", "ffn_up_exps.weight"},
    {"mlp.experts.0.down_proj.weight", "ffn_down_exps.weight"},
    {"block_sparse_moe.gate.weight", "ffn_gate_inp.weight"},
    {"block_sparse_moe.experts.0.w1.weight", "ffn_gate_exps.weight"},
    {"block_sparse_moe.experts.0.w3.weight", "ffn_up_exps.weight"},
    {"block_sparse_moe.experts.0.w2.weight", "ffn_down_exps.weight"},
};

static inline void gm_name(const char *name, char *buf, size_t n)
{
    int layer, at = 0;
    const char *rest = name;
    if (sscanf(name, "model.layers.%d.%n", &layer, &at) == 1 && at) rest = name + at;
    for (size_t i = 0; i < sizeof gm_names / sizeof *gm_names; i++) {
        if (strcmp(gm_names[i][0], rest) != 0) continue;
        if (at)
            snprintf(buf, n, "blk.%d.%s", layer, gm_names[i][1]);
        else
            snprintf(buf, n, "%s", gm_names[i][1]);
        return;
    }
    fail_msg("%s has no name in GGUF", name);
}

/* f16 of a number below 65504, to nearest even. */
static inline uint16_t gm_f16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if (fabsf(f) < 0x1p-14f) /* subnormal: whole multiples of 2^-24 */
        return (uint16_t)((u >> 16 & 0x8000u) | (uint32_t)rintf(fabsf(f) * 0x1p24f));
    int32_t e = (int32_t)(u >> 23 & 255) - 112;
    assert_true(e > 0 && e < 31);
    uint32_t m = (uint32_t)e << 10 | (u >> 13 & 0x3ffu), low = u & 0x1fffu;
    if (low > 0x1000u || (low == 0x1000u && (m & 1))) m++;
    return (uint16_t)((u >> 16 & 0x8000u) | m);
}

/* 32 values as a block of Q8_0 or Q4_0, with the rounding that ggml has. */
static inline void gm_block(uint32_t type, const float *x, uint8_t *out)
{
    float most = 0;
    for (int i = 0; i < 32; i++)
        if (fabsf(x[i]) > fabsf(most)) most = x[i];
    float d = type == 8 ? fabsf(most) / 127.0f : most / -8.0f, inverse = d != 0 ? 1.0f / d : 0;
    uint16_t h = gm_f16(d);
    memcpy(out, &h, 2);
    for (int i = 0; i < 32 && type == 8; i++) out[2 + i] = (uint8_t)(int8_t)roundf(x[i] * inverse);
    for (int i = 0; i < 16 && type == 2; i++) {
        int lo = (int)(x[i] * inverse + 8.5f), hi = (int)(x[i + 16] * inverse + 8.5f);
        out[2 + i] = (uint8_t)((lo < 15 ? lo : 15) | (hi < 15 ? hi : 15) << 4);
    }
}

static inline void gm_values(const float *x, int64_t n, uint32_t type, uint8_t *out)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h = type == 30 ? td_f32_to_bf16(x[i]) : type == 1 ? gm_f16(x[i]) : 0;
        if (type == 0)
            memcpy(out + 4 * i, &x[i], 4);
        else if (type == 30 || type == 1)
            memcpy(out + 2 * i, &h, 2);
        else if (i % 32 == 0)
            gm_block(type, x + i, out + i / 32 * (type == 8 ? 34 : 18));
    }
}

/* Row r of the file, from the rows of the directory. */
static inline int64_t gm_row(int64_t r, int64_t head)
{
    int64_t i = head ? r % head : 0;
    return head ? r - i + i / 2 + i % 2 * (head / 2) : r;
}

/* n_rows rows of t from the directory's to the file's, as `format`. */
static inline void gm_rows(const struct td_tensor *t, int64_t n_rows, int64_t n_in, int64_t head,
                           const struct td_format *format, uint8_t *out)
{
    float *row = malloc((size_t)n_in * 4);
    size_t row_bytes = td_format_bytes(format, n_in);
    for (int64_t r = 0; r < n_rows; r++, out += row_bytes) {
        const uint8_t *src = t->data + td_format_bytes(t->format, gm_row(r, head) * n_in);
        if (t->format == format) {
            memcpy(out, src, row_bytes);
            continue;
        }
        td_format_read(t->format, src, n_in, row);
        gm_values(row, n_in, format->gguf_type, out);
    }
    free(row);
}

/* The tensor of the same name of expert `e`, whose first one's is t. */
static inline const struct td_tensor *gm_expert(const struct td_checkpoint *ck,
                                                const struct td_tensor *t, int32_t e)
{
    char name[160];
    const char *at = strstr(t->name, ".experts.0.");
    if (!at) return t;
    snprintf(name, sizeof name, "%.*s.experts.%d.%s", (int)(at - t->name), t->name, e, at + 11);
    const struct td_tensor *found = td_checkpoint_find(ck, name);
    assert_non_null(found);
    return found;
}

/* A tensor, or those of all experts as one. */
static inline void gm_tensor(struct gf *f, const struct td_model_config *c,
                             const struct td_checkpoint *ck, const struct td_tensor *t,
                             gm_type_fn type_of)
{
    char name[64];
    gm_name(t->name, name, sizeof name);
    int64_t n_in = t->shape[t->n_dims - 1], n_rows = t->n_dims == 2 ? t->shape[0] : 1;
    int32_t n_experts = strstr(t->name, ".experts.") ? c->experts.n : 0;
    bool rotated = strstr(name, "attn_q.") || strstr(name, "attn_k."),
         paired = rotated && (c->arch == TD_ARCH_LLAMA || c->arch == TD_ARCH_MISTRAL ||
                              c->arch == TD_ARCH_MIXTRAL);
    uint32_t type = t->n_dims == 1 || strstr(name, "gate_inp") ? 0
                    : type_of                                  ? type_of(name, t)
                                                               : t->format->gguf_type;
    const struct td_format *format = td_format_of_gguf(type);
    const int64_t ne[3] = {n_in, t->n_dims == 2 ? n_rows : 0, n_experts};
    if (t->n_dims == 1 && paired) n_rows = n_in, n_in = 1; /* a bias is a column */
    size_t each = (size_t)n_rows * td_format_bytes(format, n_in),
           n = each * (size_t)(n_experts ? n_experts : 1);
    uint8_t *bytes = malloc(n);
    for (int32_t e = 0; e == 0 || e < n_experts; e++)
        gm_rows(gm_expert(ck, t, e), n_rows, n_in, paired ? c->head_dim : 0, format,
                bytes + (size_t)e * each);
    gf_tensor3(f, name, ne, type, bytes, n);
    free(bytes);
}

/* The vocabulary of a byte-level tokenizer.json that splits as GPT-2 does, and the chat template.
 */
static inline void gm_vocab(struct gf *f, const char *dir)
{
    char path[512];
    struct td_err err = {0};
    json_t *root, *config, *v;
    const char *key;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    if (td_json_load_file(path, (size_t)64 << 20, &root, &err)) fail_msg("%s", err.msg);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
    if (td_json_load_file(path, (size_t)64 << 20, &config, &err)) fail_msg("%s", err.msg);
    const json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab"),
                 *added = json_object_get(root, "added_tokens"),
                 *list = json_object_get(model, "merges");
    size_t n = json_object_size(vocab), n_merges = json_array_size(list), at;
    const char **texts = calloc(n, sizeof *texts), **merges = calloc(n_merges, sizeof *merges);
    int32_t *types = calloc(n, sizeof *types);
    json_object_foreach((json_t *)(uintptr_t)vocab, key, v)
    {
        assert_true(json_integer_value(v) < (json_int_t)n);
        texts[json_integer_value(v)] = key;
        types[json_integer_value(v)] = 1;
    }
    json_array_foreach(added, at, v) types[json_integer_value(json_object_get(v, "id"))] = 3;
    char *pairs = calloc(n_merges, 128);
    for (size_t i = 0; i < n_merges; i++) {
        const json_t *m = json_array_get(list, i);
        merges[i] = json_string_value(m);
        if (merges[i]) continue;
        snprintf(pairs + i * 128, 128, "%s %s", json_string_value(json_array_get(m, 0)),
                 json_string_value(json_array_get(m, 1)));
        merges[i] = pairs + i * 128;
    }
    gf_str(f, "tokenizer.ggml.model", "gpt2");
    gf_str(f, "tokenizer.ggml.pre", "gpt-2");
    gf_strs(f, "tokenizer.ggml.tokens", texts, n);
    gf_array(f, "tokenizer.ggml.token_type", TD_GGUF_I32, n, types, n * 4);
    gf_strs(f, "tokenizer.ggml.merges", merges, n_merges);
    gf_u32(f, "tokenizer.ggml.bos_token_id", 0);
    gf_u32(f, "tokenizer.ggml.eos_token_id", 0);
    gf_bool(f, "tokenizer.ggml.add_bos_token", 1);
    gf_str(f, "tokenizer.chat_template",
           json_string_value(json_object_get(config, "chat_template")));
    free(texts), free(types), free(merges), free(pairs);
    json_decref(root);
    json_decref(config);
}

/* Llama 3's scaling as converters store it: the number by which each frequency is divided. */
static inline void gm_rope_freqs(struct gf *f, const struct td_model_config *c)
{
    const struct td_rope *r = &c->rope[0];
    float factors[TD_ROPE_PAIRS_MAX];
    double low = r->original_max_positions / r->low_freq_factor,
           high = r->original_max_positions / r->high_freq_factor;
    for (int32_t i = 0; i < c->head_dim / 2; i++) {
        double wave = 2 * 3.14159265358979323846 * pow(r->theta, 2.0 * i / c->head_dim),
               smooth = (r->original_max_positions / wave - r->low_freq_factor) /
                        (r->high_freq_factor - r->low_freq_factor);
        factors[i] = wave < high  ? 1
                     : wave > low ? (float)r->factor
                                  : (float)(1 / ((1 - smooth) / r->factor + smooth));
    }
    gf_tensor(f, "rope_freqs.weight", c->head_dim / 2, 0, 0, factors, (size_t)c->head_dim * 2);
}

/* Writes DIR as a GGUF file, with its vocabulary if asked. */
static inline void gm_write(const char *dir, const char *path, gm_type_fn type_of, bool with_vocab)
{
    struct td_checkpoint ck;
    struct td_model_config c;
    struct td_err err = {0};
    struct gf f = {0};
    char key[64];
    if (td_checkpoint_open(dir, &ck, &err) || td_model_config_load(dir, &c, &err))
        fail_msg("%s", err.msg);
    const char *arch = c.arch == TD_ARCH_QWEN2       ? "qwen2"
                       : c.arch == TD_ARCH_QWEN3     ? "qwen3"
                       : c.arch == TD_ARCH_QWEN3_MOE ? "qwen3moe"
                                                     : "llama";
    gf_str(&f, "general.architecture", arch);
#define GM_KEY(name) (snprintf(key, sizeof key, "%s.%s", arch, name), key)
    gf_u32(&f, GM_KEY("block_count"), (uint32_t)c.n_layers);
    gf_u32(&f, GM_KEY("context_length"), (uint32_t)c.max_positions);
    gf_u32(&f, GM_KEY("embedding_length"), (uint32_t)c.hidden);
    gf_u32(&f, GM_KEY("feed_forward_length"), (uint32_t)c.intermediate);
    gf_u32(&f, GM_KEY("attention.head_count"), (uint32_t)c.n_heads);
    gf_u32(&f, GM_KEY("attention.head_count_kv"), (uint32_t)c.n_kv_heads);
    gf_u32(&f, GM_KEY("attention.key_length"), (uint32_t)c.head_dim);
    gf_u32(&f, GM_KEY("attention.value_length"), (uint32_t)c.head_dim);
    gf_f32(&f, GM_KEY("attention.layer_norm_rms_epsilon"), c.rms_eps);
    gf_f32(&f, GM_KEY("rope.freq_base"), (float)c.rope[0].theta);
    if (c.rope[0].scaling == TD_ROPE_LINEAR) {
        gf_str(&f, GM_KEY("rope.scaling.type"), "linear");
        gf_f32(&f, GM_KEY("rope.scaling.factor"), (float)c.rope[0].factor);
    }
    if (c.rope[0].scaling == TD_ROPE_LLAMA3) gm_rope_freqs(&f, &c);
    if (c.experts.n) {
        gf_u32(&f, GM_KEY("expert_count"), (uint32_t)c.experts.n);
        gf_u32(&f, GM_KEY("expert_used_count"), (uint32_t)c.experts.n_used);
        gf_u32(&f, GM_KEY("expert_feed_forward_length"), (uint32_t)c.experts.intermediate);
    }
#undef GM_KEY
    if (with_vocab) gm_vocab(&f, dir);
    for (int32_t i = 0; i < ck.n_tensors; i++)
        if ((!c.tied_embeddings || strcmp(ck.tensors[i].name, "lm_head.weight") != 0) &&
            (!strstr(ck.tensors[i].name, ".experts.") || strstr(ck.tensors[i].name, ".experts.0.")))
            gm_tensor(&f, &c, &ck, &ck.tensors[i], type_of);
    td_checkpoint_close(&ck);
    gf_write(&f, path);
}

#endif
