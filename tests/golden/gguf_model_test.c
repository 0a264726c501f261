/* gguf_model_test.c - models in GGUF files against the same models in Hugging Face directories:
 * with plain formats the same bits, with blocks close to them. */
#include "common/base/random.h"
#include "tests/golden/gguf_model.h"
#include "tests/golden/model_rig.h"

#include <unistd.h>

static char path[64];

static const char *experts; /* when they are packed */

static float *logits_of(const char *dir, const char *dtype, const struct td_ops *ops,
                        const int32_t *tokens, int32_t n, int32_t chunk, int32_t *ret_vocab)
{
    struct rig g;
    rig_open(&g,
             &(struct td_model_params){.dir = dir, .dtype = dtype, .ops = ops, .experts = experts},
             2, 8, n, n);
    float *logits = rig_prompt(&g, 1, tokens, n, chunk);
    *ret_vocab = g.vocab;
    rig_close(&g);
    return logits;
}

/* Every family and bias, experts, widths that are no multiple of anything. */
static void plain_formats_give_the_bits_of_the_directory(void **state)
{
    (void)state;
    static const char *const names[] = {
        "fixtures/llama1_mha",        "fixtures/llama2_gqa",
        "fixtures/llama_mqa_sharded", "fixtures/llama_linear_rope",
        "fixtures/llama_odd_sizes",   "fixtures/mistral_head_dim_no_window",
        "fixtures/qwen2_bias_tied",   "fixtures/qwen3_head_dim",
        "mixtures/mixtral_odd_sizes", "mixtures/mixtral_old_config"};
    int32_t tokens[20], vocab;
    for (int32_t i = 0; i < 20; i++) tokens[i] = (i * 37 + 11) % 97;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char dir[128];
        snprintf(dir, sizeof dir, "tests/golden/%s", names[i]);
        gm_write(dir, path, NULL, false);
        for (int bf16 = 0; bf16 < 2; bf16++) {
            const char *dtype = bf16 ? "bf16" : "f32";
            float *want = logits_of(dir, dtype, NULL, tokens, 20, 20, &vocab),
                  *got = logits_of(path, dtype, NULL, tokens, 20, 20, &vocab);
            for (int32_t k = 0; k < 20 * vocab; k++)
                if (memcmp(&want[k], &got[k], 4) != 0)
                    fail_msg("%s %s: logit %d is %a, in the directory %a", names[i], dtype, k,
                             (double)got[k], (double)want[k]);
            free(want), free(got);
        }
    }
}

/* Llama 3's rotation, which a file has as factors and a directory as a formula: roundings of f32
 * apart. */
static void rotation_by_factors(void **state)
{
    (void)state;
    static const char *const names[] = {"llama3_rope_tied", "llama3_rope_old_config"};
    int32_t tokens[60], vocab;
    for (int32_t i = 0; i < 60; i++) tokens[i] = (i * 37 + 11) % 97;
    for (size_t i = 0; i < 2; i++) {
        char dir[128];
        double off = 0, largest = 0;
        snprintf(dir, sizeof dir, "tests/golden/fixtures/%s", names[i]);
        gm_write(dir, path, NULL, false);
        float *want = logits_of(dir, "f32", NULL, tokens, 60, 60, &vocab),
              *got = logits_of(path, "f32", NULL, tokens, 60, 60, &vocab);
        for (int32_t k = 0; k < 60 * vocab; k++) {
            double diff = fabs((double)got[k] - (double)want[k]);
            if (!(diff <= off)) off = diff; /* NaN counts */
            largest = fmax(largest, fabs((double)want[k]));
        }
        free(want), free(got);
        printf("gguf %s: off by %.2g of the largest logit\n", names[i], off / largest);
        assert_true(off <= 1e-5 * largest);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Files that gguf-py wrote (make_gguf_families.py), against the directories of the same models. The
 * same bits where both have the same numbers; scaled: queries or angles are multiplied by a number
 * that the directory has not, so the bound is that of golden_test.c; mxfp4: the kernels of blocks
 * round activations to 8 bits, those of the directory do not. There the median of rows is bounded:
 * in some rows the rounding decides between two experts. */
static void files_of_another_writer(void **state)
{
    (void)state;
    enum { SAME, SCALED, ROUNDED };
    static const struct {
        const char *folder, *name;
        int kind;
    } rows[] = {
        {"families", "gemma1", SAME},
        {"families", "gemma1_one_kv_head", SAME},
        {"families", "gemma2", SCALED},
        {"families", "gemma2_old_config", SAME},
        {"families", "gemma3", SCALED},
        {"families", "gemma3_old_config", SAME},
        {"families", "phi3", SAME},
        {"families", "phi3_long", SCALED},
        {"families", "phi3_short_partial", SCALED},
        {"mixtures", "mixtral_odd_sizes", SAME},
        {"mixtures", "mixtral_old_config", SAME},
        {"mixtures", "qwen3_moe_every_layer", SAME},
        {"mixtures", "gpt_oss_odd_sizes", SAME},
        {"mixtures", "gpt_oss_mxfp4", ROUNDED},
    };
    int32_t tokens[36], vocab;
    for (int32_t i = 0; i < 36; i++) tokens[i] = (i * 37 + 11) % 41;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char dir[128], file[128];
        snprintf(dir, sizeof dir, "tests/golden/%s/%s", rows[i].folder, rows[i].name);
        snprintf(file, sizeof file, "tests/golden/gguf/%s.gguf", rows[i].name);
        for (int bf16 = 0; bf16 < (rows[i].kind == SAME ? 2 : 1); bf16++) {
            const char *dtype = bf16 ? "bf16" : "f32";
            float *want = logits_of(dir, dtype, NULL, tokens, 36, 36, &vocab),
                  *got = logits_of(file, dtype, NULL, tokens, 36, 36, &vocab);
            double largest = 0, off = 0, kl[36];
            for (int32_t k = 0; k < 36 * vocab; k++) {
                double diff = fabs((double)got[k] - (double)want[k]);
                if (!(diff <= off)) off = diff; /* NaN counts */
                largest = fmax(largest, fabs((double)want[k]));
            }
            for (int32_t r = 0; r < 36; r++)
                kl[r] = rig_kl(want + r * vocab, got + r * vocab, vocab);
            qsort(kl, 36, sizeof *kl, by_value);
            printf("gguf %s %s: off by %.2g of the largest logit, median KL %.2g, largest %.2g\n",
                   rows[i].name, dtype, off / largest, kl[18], kl[35]);
            bool ok = rows[i].kind == SAME     ? memcmp(want, got, (size_t)(36 * vocab) * 4) == 0
                      : rows[i].kind == SCALED ? off <= 1e-4 * largest
                                               : kl[18] <= 0.002;
            if (!ok) fail_msg("%s, %s", file, dtype);
            free(want), free(got);
        }
    }
}

static uint32_t all_q8_0(const char *name, const struct td_tensor *t)
{
    (void)name, (void)t;
    return 8;
}
static uint32_t all_q4_0(const char *name, const struct td_tensor *t)
{
    (void)name, (void)t;
    return 2;
}
/* q, k and v in three formats, gate and up in two: each a product of its own. */
static uint32_t mixed(const char *name, const struct td_tensor *t)
{
    return strstr(name, "attn_q") || strstr(name, "ffn_up") ? 8
           : strstr(name, "attn_k")                         ? 30
           : strstr(name, "attn_v")                         ? 2
           : strstr(name, "token_embd")                     ? t->format->gguf_type
                                                            : 8;
}

/* Tokens of the trained model's published text. */
static int32_t *reference_tokens(int32_t *ret_n)
{
    json_t *root;
    struct td_err err = {0};
    if (td_json_load_file("models/pocket/reference_greedy.json", (size_t)16 << 20, &root, &err))
        fail_msg("%s", err.msg);
    const json_t *c = json_array_get(json_object_get(root, "cases"), 0);
    int32_t n_prompt, n_greedy;
    int32_t *prompt = rig_ids(json_object_get(c, "ids"), &n_prompt),
            *greedy = rig_ids(json_object_get(c, "continuation_ids"), &n_greedy);
    int32_t *all = malloc((size_t)(n_prompt + n_greedy) * 4);
    memcpy(all, prompt, (size_t)n_prompt * 4);
    memcpy(all + n_prompt, greedy, (size_t)n_greedy * 4);
    *ret_n = n_prompt + n_greedy;
    free(prompt), free(greedy);
    json_decref(root);
    return all;
}

/* The trained model in blocks: every table the same bits where attention is the same, any chunks
 * the same bits, and a distribution as close to the directory's as its rounding allows: the bounds
 * are above what held-out text gives (0.0002 with Q8_0, 0.02 with Q4_0), because this text is
 * short. */
static void blocks_are_close_and_do_not_know_chunks(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        gm_type_fn type_of;
        double mean_kl;
    } rows[] = {{"Q8_0", all_q8_0, 0.0006}, {"Q4_0", all_q4_0, 0.06}, {"mixed", mixed, 0.03}};
    int32_t n, vocab;
    int32_t *tokens = reference_tokens(&n);
    if (n > 96) n = 96;
    float *want = logits_of("models/pocket", "f32", NULL, tokens, n, n, &vocab);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gm_write("models/pocket", path, rows[i].type_of, false);
        for (int t = 0; t < TD_N_OPS; t++) {
            const struct td_ops *ops = td_ops_by_name(td_ops_names[t]);
            if (!ops) continue;
            float *got = logits_of(path, "f32", ops, tokens, n, n, &vocab);
            double sum = 0;
            for (int32_t r = 0; r < n; r++) sum += rig_kl(want + r * vocab, got + r * vocab, vocab);
            if (!(sum / n <= rows[i].mean_kl))
                fail_msg("%s %s: mean KL %g, must be at most %g", rows[i].name, td_ops_names[t],
                         sum / n, rows[i].mean_kl);
            printf("pocket %s %s: mean KL %.2g over %d positions\n", rows[i].name, td_ops_names[t],
                   sum / n, n);
            for (int32_t chunk = 1; chunk < n; chunk = chunk * 3 + 1) {
                float *cut = logits_of(path, "f32", ops, tokens, n, chunk, &vocab);
                assert_memory_equal(got, cut, (size_t)n * (size_t)vocab * 4);
                free(cut);
            }
            free(got);
        }
    }
    free(want), free(tokens);
}

/* The weights in memory are those of the file, norms and rotary table aside. */
static void blocks_stay_blocks_in_memory(void **state)
{
    (void)state;
    struct rig g;
    gm_write("models/pocket", path, all_q8_0, false);
    rig_open(&g, &(struct td_model_params){.dir = path}, 1, 8, 8, 8);
    int64_t n = td_model_config_n_params(td_model_config(g.model));
    uint64_t bytes = td_model_weight_bytes(g.model);
    if (bytes > (uint64_t)n * 34 / 32 * 107 / 100)
        fail_msg("%llu bytes for %lld parameters in Q8_0", (unsigned long long)bytes, (long long)n);
    assert_int_equal(td_model_dtype(g.model), TD_BF16);
    rig_close(&g);
}

enum {
    R_HIDDEN = 256,
    R_MLP = 512,
    R_HEADS = 4,
    R_KV_HEADS = 2,
    R_VOCAB = 96,
    R_LAYERS = 2,
    R_EXPERTS = 3,
    R_EXPERT_MLP = 256
};

/* A model of every family; experts of Mixtral are as wide as its MLP. */
static const struct r_kind {
    const char *arch;
    int expert_mlp; /* 0: no experts */
} r_kinds[] = {
    {"llama", 0}, {"qwen2", 0}, {"qwen3", 0}, {"llama", R_MLP}, {"qwen3moe", R_EXPERT_MLP}};
enum { N_KINDS = sizeof r_kinds / sizeof *r_kinds };

/* Where a block has its f16 factors, and what a minimum must be for values to be around 0. */
static const struct {
    const char *name;
    int d_at, m_at;
    float m_of_d;
} factors[] = {
    {"Q4_1", 0, 2, -7.5f}, {"Q5_1", 0, 2, -15.5f}, {"Q2_K", 80, 82, 1.5f}, {"Q3_K", 108, -1, 0},
    {"Q4_K", 0, 2, 7.5f},  {"Q5_K", 0, 2, 15.5f},  {"Q6_K", 208, -1, 0},
};

static uint64_t r_state;
static uint32_t r_next(void) { return (uint32_t)(td_random_step(&r_state) >> 33); }

/* Random blocks whose values have about the variance 1 / n_in; in F32 the values of the same
 * blocks. n_experts: so many matrices as one tensor; 0: one matrix. */
static void random_stack(struct gf *file, const char *name, const struct td_format *f, bool as_f32,
                         int64_t n_in, int64_t n_rows, int64_t n_experts)
{
    int64_t n_out = n_rows * (n_experts ? n_experts : 1), ne[3] = {n_in, n_rows, n_experts};
    size_t bytes = (size_t)n_out * td_format_bytes(f, n_in);
    uint8_t *rows = malloc(bytes);
    float *values = malloc((size_t)(n_in * n_out) * 4), d = 1;
    int d_at = 0, m_at = -1;
    float m_of_d = 0;
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
        if (strcmp(factors[i].name, f->name) == 0)
            d_at = factors[i].d_at, m_at = factors[i].m_at, m_of_d = factors[i].m_of_d;
    for (size_t i = 0; i < bytes; i++) rows[i] = (uint8_t)r_next();
    for (int pass = 0; pass < 2; pass++) { /* the second with the scale that the first asks for */
        uint16_t h = gm_f16(d), m = gm_f16(m_of_d * d);
        for (uint8_t *b = rows; b < rows + bytes; b += f->block_bytes) {
            memcpy(b + d_at, &h, 2);
            if (m_at >= 0) memcpy(b + m_at, &m, 2);
            if (strcmp(f->name, "MXFP4") == 0) b[0] = pass ? 128 - 6 : 128;
        }
        td_format_read(f, rows, n_in * n_out, values);
        double sum = 0;
        for (int64_t i = 0; i < n_in * n_out; i++) sum += (double)values[i] * (double)values[i];
        d = (float)(1 / sqrt(sum / (double)n_out));
    }
    if (as_f32)
        gf_tensor3(file, name, ne, 0, values, (size_t)(n_in * n_out) * 4);
    else
        gf_tensor3(file, name, ne, f->gguf_type, rows, bytes);
    free(rows), free(values);
}

static void random_matrix(struct gf *file, const char *name, const struct td_format *f, bool as_f32,
                          int64_t n_in, int64_t n_out)
{
    random_stack(file, name, f, as_f32, n_in, n_out, 0);
}

static void random_vector(struct gf *file, const char *name, int32_t n, float center, float range)
{
    float v[R_MLP];
    for (int32_t i = 0; i < n; i++) v[i] = center + range * ((float)r_next() * 0x1p-30f - 1);
    gf_tensor(file, name, n, 0, 0, v, (size_t)n * 4);
}

/* All experts serve every row, because rounding may decide which of two with nearly the same logits
 * a row goes to. Gate and up have different formats: in one family two kinds of blocks, in the
 * other blocks and F32, for which rows are prepared in two ways. */
static void random_experts(struct gf *f, int layer, const struct r_kind *kind,
                           const struct td_format *format, bool as_f32)
{
    bool is_llama = strcmp(kind->arch, "llama") == 0;
    char name[64];
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", layer);
    random_matrix(f, name, td_format_of_gguf(8), true, R_HIDDEN, R_EXPERTS);
    snprintf(name, sizeof name, "blk.%d.ffn_gate_exps.weight", layer);
    random_stack(f, name, format, as_f32, R_HIDDEN, kind->expert_mlp, R_EXPERTS);
    snprintf(name, sizeof name, "blk.%d.ffn_up_exps.weight", layer);
    random_stack(f, name, td_format_of_gguf(8), as_f32 || !is_llama, R_HIDDEN, kind->expert_mlp,
                 R_EXPERTS);
    snprintf(name, sizeof name, "blk.%d.ffn_down_exps.weight", layer);
    random_stack(f, name, format, as_f32, kind->expert_mlp, R_HIDDEN, R_EXPERTS);
}

static void random_layer(struct gf *f, int layer, const struct r_kind *kind,
                         const struct td_format *format, bool as_f32)
{
    const char *arch = kind->arch;
    static const struct {
        const char *name;
        int n_in, n_out;
    } rows[] = {{"attn_q", R_HIDDEN, R_HIDDEN},     {"attn_k", R_HIDDEN, R_HIDDEN / 2},
                {"attn_v", R_HIDDEN, R_HIDDEN / 2}, {"attn_output", R_HIDDEN, R_HIDDEN},
                {"ffn_gate", R_HIDDEN, R_MLP},      {"ffn_up", R_HIDDEN, R_MLP},
                {"ffn_down", R_MLP, R_HIDDEN}};
    char name[64];
    size_t n_rows = kind->expert_mlp ? 4 : sizeof rows / sizeof *rows;
    if (kind->expert_mlp) random_experts(f, layer, kind, format, as_f32);
    for (size_t i = 0; i < n_rows; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", layer, rows[i].name);
        random_matrix(f, name, format, as_f32, rows[i].n_in, rows[i].n_out);
        snprintf(name, sizeof name, "blk.%d.%s.bias", layer, rows[i].name);
        if (strcmp(arch, "qwen2") == 0 && i < 3) random_vector(f, name, rows[i].n_out, 0, 0.1f);
    }
    snprintf(name, sizeof name, "blk.%d.attn_norm.weight", layer);
    random_vector(f, name, R_HIDDEN, 1, 0.2f);
    snprintf(name, sizeof name, "blk.%d.ffn_norm.weight", layer);
    random_vector(f, name, R_HIDDEN, 1, 0.2f);
    if (strncmp(arch, "qwen3", 5) != 0) return;
    snprintf(name, sizeof name, "blk.%d.attn_q_norm.weight", layer);
    random_vector(f, name, R_HIDDEN / R_HEADS, 1, 0.2f);
    snprintf(name, sizeof name, "blk.%d.attn_k_norm.weight", layer);
    random_vector(f, name, R_HIDDEN / R_HEADS, 1, 0.2f);
}

static void write_random(const struct r_kind *kind, const struct td_format *format, bool as_f32)
{
    static const struct {
        const char *key;
        uint32_t value;
    } rows[] = {{"block_count", R_LAYERS},         {"context_length", 64},
                {"embedding_length", R_HIDDEN},    {"feed_forward_length", R_MLP},
                {"attention.head_count", R_HEADS}, {"attention.head_count_kv", R_KV_HEADS},
                {"expert_count", R_EXPERTS},       {"expert_used_count", R_EXPERTS}};
    struct gf f = {0};
    char key[64];
    const char *arch = kind->arch;
    size_t n_keys = kind->expert_mlp ? sizeof rows / sizeof *rows : 6;
    r_state = format->gguf_type;
    gf_str(&f, "general.architecture", arch);
    for (size_t i = 0; i < n_keys; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        gf_u32(&f, key, rows[i].value);
    }
    snprintf(key, sizeof key, "%s.expert_feed_forward_length", arch);
    if (kind->expert_mlp) gf_u32(&f, key, (uint32_t)kind->expert_mlp);
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    gf_f32(&f, key, 1e-5f);
    random_matrix(&f, "token_embd.weight", format, as_f32, R_HIDDEN, R_VOCAB);
    random_matrix(&f, "output.weight", format, as_f32, R_HIDDEN, R_VOCAB);
    random_vector(&f, "output_norm.weight", R_HIDDEN, 3, 0.5f);
    for (int i = 0; i < R_LAYERS; i++) random_layer(&f, i, kind, format, as_f32);
    gf_write(&f, path);
}

/* A seeded model in every block format, of every family in turn, against the model with the values
 * of the same blocks in f32. What differs is the rounding of activations to 8 bits: half a step of
 * 127 of a group's largest, some 0.4 % of a product, and a few percent of a logit's spread behind
 * 14 products. A scale, minimum or half that stands wrong gives a correlation near 0. */
static void every_format_in_a_whole_model(void **state)
{
    (void)state;
    int32_t tokens[24], vocab, n_formats = 0;
    for (int32_t i = 0; i < 24; i++) tokens[i] = (i * 37 + 11) % R_VOCAB;
    for (uint32_t type = 0; type < 64; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        const struct r_kind *kind = &r_kinds[n_formats++ % N_KINDS];
        write_random(kind, f, true);
        float *want = logits_of(path, "f32", NULL, tokens, 24, 24, &vocab);
        write_random(kind, f, false);
        float *got = logits_of(path, "f32", NULL, tokens, 24, 24, &vocab), *cut = NULL;
        experts = "lazy";
        cut = logits_of(path, "f32", NULL, tokens, 24, 5, &vocab);
        experts = NULL;
        assert_memory_equal(got, cut, (size_t)(24 * vocab) * 4);
        double off = 0, size = 0;
        for (int32_t i = 0; i < 24 * vocab; i++) {
            off += pow((double)got[i] - (double)want[i], 2);
            size += pow((double)want[i], 2);
        }
        if (!(sqrt(off / size) <= 0.04))
            fail_msg("%s %s: logits are off by %g of their size", f->name, kind->arch,
                     sqrt(off / size));
        printf("%s %s%s: logits off by %.2g of their size %.2g\n", f->name, kind->arch,
               kind->expert_mlp ? " with experts" : "", sqrt(off / size),
               sqrt(size / (24 * vocab)));
        free(want), free(got), free(cut);
    }
    assert_int_equal(n_formats, 13);
}

static void refuse(td_status want, const char *part)
{
    struct td_err err = {0};
    struct td_model *m = NULL;
    struct td_thread_pool *threads;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    td_status s = td_model_open(
        &(struct td_model_params){.dir = path, .threads = threads, .quiet = true}, &m, &err);
    if (s != want || !strstr(err.msg, part))
        fail_msg("%s (%s), must be %s with \"%s\"", td_status_name(s), err.msg,
                 td_status_name(want), part);
    td_thread_pool_destroy(threads);
}

/* The keys of a model with nothing in it, then one more. */
static struct gf keys_but_layers(const char *arch, uint32_t n_layers)
{
    struct gf f = {0};
    char key[64];
    const struct {
        const char *key;
        uint32_t value;
    } rows[] = {{"block_count", n_layers},
                {"context_length", 64},
                {"embedding_length", 64},
                {"feed_forward_length", 64},
                {"attention.head_count", 2}};
    gf_str(&f, "general.architecture", arch);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        gf_u32(&f, key, rows[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    gf_f32(&f, key, 1e-5f);
    return f;
}

static struct gf keys_of(const char *arch) { return keys_but_layers(arch, 1); }

static void add_embedding(struct gf *f)
{
    float *zeros = calloc(64 * 64, 4);
    gf_tensor(f, "token_embd.weight", 64, 64, 0, zeros, 64 * 64 * 4);
    free(zeros);
}

static void settings_are_refused_by_name(void **state)
{
    (void)state;
    struct gf f = keys_of("bloom");
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED,
           "general.architecture is bloom, must be llama, qwen2, qwen3, qwen3moe, gemma, "
           "gemma2, gemma3, phi3 or gpt-oss");
    f = keys_of("llama");
    gf_str(&f, "general.type", "adapter");
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "general.type is adapter");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_shared_count", 8);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "unknown key llama.expert_shared_count");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 0);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor token_embd.weight is missing");
    f = keys_of("llama");
    gf_str(&f, "llama.rope.scaling.type", "dynamic");
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "llama.rope.scaling.type is dynamic, must be none, linear, yarn or");
    f = keys_of("llama");
    gf_u32(&f, "llama.rope.dimension_count", 16);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "llama.rope.dimension_count is 16, must be in 32..32");
    f = keys_of("llama");
    gf_u32(&f, "llama.attention.head_count_kv", 3);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "num_key_value_heads is 3");
    f = keys_of("qwen2");
    gf_u32(&f, "qwen2.vocab_size", 65);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "qwen2.vocab_size is 65, must be in 64..64");
    f = keys_of("llama");
    static const char *ends[64];
    int32_t types[64];
    for (int i = 0; i < 64; i++) ends[i] = "<|im_end|>", types[i] = 3;
    gf_strs(&f, "tokenizer.ggml.tokens", ends, 64);
    gf_array(&f, "tokenizer.ggml.token_type", TD_GGUF_I32, 64, types, sizeof types);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_LIMIT, "more than 16 tokens end a generation");
    f = keys_of("qwen3");
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor output_norm.weight [64] is missing");
}

static void scaling_may_be_none(void **state)
{
    (void)state;
    struct td_model_config c;
    struct td_err err = {0};
    struct gf f = keys_of("llama");
    gf_str(&f, "llama.rope.scaling.type", "none");
    add_embedding(&f);
    gf_write(&f, path);
    if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
    assert_int_equal(c.rope[0].scaling, TD_ROPE_PLAIN);
}

static bool ends(const struct td_model_config *c, int32_t id)
{
    for (int32_t i = 0; i < c->n_eos; i++)
        if (c->eos_ids[i] == id) return true;
    return false;
}

/* Control tokens end an answer by their text; <|end|> only where it does not end one message of
 * several (gpt-oss). */
static void ends_by_text(void **state)
{
    (void)state;
    for (int messages = 0; messages < 2; messages++) {
        static const char *tokens[64];
        int32_t types[64];
        struct td_model_config c;
        struct td_err err = {0};
        for (int i = 0; i < 64; i++) tokens[i] = "x", types[i] = 3;
        tokens[20] = "<|end|>";
        if (messages) tokens[21] = "<|return|>", tokens[22] = "<|call|>";
        struct gf f = keys_of("llama");
        gf_strs(&f, "tokenizer.ggml.tokens", tokens, 64);
        gf_array(&f, "tokenizer.ggml.token_type", TD_GGUF_I32, 64, types, sizeof types);
        add_embedding(&f);
        gf_write(&f, path);
        if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
        assert_int_equal(ends(&c, 20), !messages);
        assert_int_equal(ends(&c, 21), messages);
        assert_int_equal(ends(&c, 22), messages);
    }
}

static void experts_are_refused_by_name(void **state)
{
    (void)state;
    struct gf f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 8);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "llama.expert_used_count is missing");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 8);
    gf_u32(&f, "llama.expert_used_count", 9);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "llama.expert_used_count is 9, must be in 1..8");
    f = keys_of("qwen2");
    gf_u32(&f, "qwen2.expert_count", 8);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "qwen2.expert_count is 8, must be 0 in this architecture");
    f = keys_of("qwen3moe");
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "qwen3moe.expert_count is 0, must be 1 or more");
    f = keys_of("qwen3moe");
    gf_u32(&f, "qwen3moe.expert_count", 8);
    gf_u32(&f, "qwen3moe.expert_used_count", 2);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "qwen3moe.expert_feed_forward_length is missing");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 8);
    gf_u32(&f, "llama.expert_used_count", 2);
    add_embedding(&f);
    float *zeros = calloc(7 * 64 * 64, 4);
    gf_tensor3(&f, "blk.0.ffn_up_exps.weight", (const int64_t[]){64, 64, 7}, 0, zeros,
               (size_t)7 * 64 * 64 * 4);
    free(zeros);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor blk.0.ffn_up_exps.weight has 3 dimensions, the last of 7, must "
                           "have 3, the last of expert_count 8");
}

/* What a file of these families may say, and what it leaves to its reader. */
static void settings_of_gemma(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct td_model_config c;
    struct gf f = keys_of("gemma2");
    gf_u32(&f, "gemma2.attention.key_length", 8);
    add_embedding(&f);
    gf_write(&f, path);
    if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
    assert_true(c.attn_scale == 1 / sqrtf(8) && c.attn_cap == 50 && c.logit_cap == 30);
    assert_true(c.sliding_window == 4096 && c.embed_root);
    /* the numbers of layers of the models of 27 B; 64 / 2 to a head */
    static const struct {
        const char *arch;
        uint32_t n_layers;
    } wide[] = {{"gemma2", 46}, {"gemma3", 62}};
    for (size_t i = 0; i < 2; i++) {
        f = keys_but_layers(wide[i].arch, wide[i].n_layers);
        char key[64];
        snprintf(key, sizeof key, "%s.attention.key_length", wide[i].arch);
        gf_u32(&f, key, 8);
        add_embedding(&f);
        gf_write(&f, path);
        if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
        assert_true(c.attn_scale == 1 / sqrtf(32));
    }
    /* of gemma3 without a window: every layer is full and takes the rotation of full ones */
    for (int32_t i = 0; i < c.n_layers; i++)
        assert_true(td_layer_bit(c.full_layers, i) && !td_layer_bit(c.second_rope, i));
    f = keys_of("gemma2");
    gf_u32(&f, "gemma2.rope.freq_base_swa", 10000);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "unknown key gemma2.rope.freq_base_swa");
}

static void settings_of_longrope(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct td_model_config c;
    struct gf f;
    float ones[17] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    f = keys_of("phi3");
    gf_u32(&f, "phi3.attention.sliding_window", 0);
    add_embedding(&f);
    gf_write(&f, path);
    if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
    assert_true(c.sliding_window == 0 && c.rope[0].scaling == TD_ROPE_PLAIN);
    f = keys_of("phi3");
    add_embedding(&f);
    gf_tensor(&f, "rope_factors_long.weight", 16, 0, 0, ones, 64);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor rope_factors_short.weight is missing");
    f = keys_of("phi3");
    add_embedding(&f);
    gf_tensor(&f, "rope_factors_long.weight", 17, 0, 0, ones, 68);
    gf_tensor(&f, "rope_factors_short.weight", 16, 0, 0, ones, 64);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "long_factor must be a list of 16 numbers");
    ones[3] = INFINITY;
    f = keys_of("phi3");
    add_embedding(&f);
    gf_tensor(&f, "rope_factors_long.weight", 16, 0, 0, ones, 64);
    gf_tensor(&f, "rope_factors_short.weight", 16, 0, 0, ones, 64);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "short_factor[3] is 0, must be in 1e-3..1e6");
}

static void experts_of_gpt_oss(void **state)
{
    (void)state;
    struct gf f = keys_of("gpt-oss");
    gf_u32(&f, "gpt-oss.expert_count", 4);
    gf_u32(&f, "gpt-oss.expert_used_count", 2);
    gf_u32(&f, "gpt-oss.expert_feed_forward_length", 63);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "gpt-oss.expert_feed_forward_length is 63, must be in 64..64");
}

static void numbers_are_finite(void **state)
{
    (void)state;
    write_random(&r_kinds[0], td_format_of_gguf(12), false);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    const uint16_t infinity = 0x7c00;
    fseek(file, -(144 * 3 + 4096),
          SEEK_END); /* in a matrix of the last layer, behind it two norms */
    for (int i = 0; i < 144; i += 2) fwrite(&infinity, 2, 1, file);
    fclose(file);
    refuse(TD_ERR_CORRUPT, "is infinite or no number");
    write_random(&r_kinds[0], td_format_of_gguf(12), false);
    file = fopen(path, "r+b");
    assert_non_null(file);
    const float nan = NAN;
    fseek(file, -4, SEEK_END); /* the end of the last norm */
    fwrite(&nan, 4, 1, file);
    fclose(file);
    char part[96];
    snprintf(part, sizeof part, "tensor blk.%d.ffn_norm.weight: a value is infinite, no number",
             R_LAYERS - 1);
    refuse(TD_ERR_CORRUPT, part);
}

/* The embedding is read by rows where it lies, and the output matrix is another one. */
static void numbers_of_the_embedding_are_finite(void **state)
{
    (void)state;
    static const uint32_t types[] = {8, 12, 39}; /* Q8_0, Q4_K, MXFP4 */
    for (size_t k = 0; k < 3; k++) {
        struct td_checkpoint c;
        struct td_err err = {0};
        const struct td_format *format = td_format_of_gguf(types[k]);
        write_random(&r_kinds[0], format, false);
        if (td_checkpoint_open(path, &c, &err)) fail_msg("%s", err.msg);
        const struct td_tensor *t = td_checkpoint_find(&c, "model.embed_tokens.weight");
        assert_true(t && t->format == format && td_checkpoint_find(&c, "lm_head.weight"));
        /* the last block but one */
        long at =
            t->data - c.gguf->files[0].base + (long)t->n_bytes - 2 * (long)format->block_bytes;
        td_checkpoint_close(&c);
        FILE *file = fopen(path, "r+b");
        assert_non_null(file);
        const uint8_t nan[2] = {255, 0x7f}; /* of f16, and the exponent that is none */
        fseek(file, at, SEEK_SET);
        fwrite(nan, format->scales == TD_SCALES_E8M0 ? 1 : 2, 1, file);
        fclose(file);
        refuse(TD_ERR_CORRUPT, "tensor token_embd.weight (");
        refuse(TD_ERR_CORRUPT, "is infinite or no number");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_formats_give_the_bits_of_the_directory),
        cmocka_unit_test(rotation_by_factors),
        cmocka_unit_test(files_of_another_writer),
        cmocka_unit_test(blocks_are_close_and_do_not_know_chunks),
        cmocka_unit_test(every_format_in_a_whole_model),
        cmocka_unit_test(blocks_stay_blocks_in_memory),
        cmocka_unit_test(settings_are_refused_by_name),
        cmocka_unit_test(scaling_may_be_none),
        cmocka_unit_test(ends_by_text),
        cmocka_unit_test(experts_are_refused_by_name),
        cmocka_unit_test(settings_of_gemma),
        cmocka_unit_test(settings_of_longrope),
        cmocka_unit_test(experts_of_gpt_oss),
        cmocka_unit_test(numbers_are_finite),
        cmocka_unit_test(numbers_of_the_embedding_are_finite),
    };
    snprintf(path, sizeof path, "/tmp/tandem-gguf-model-%d.gguf", (int)getpid());
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
