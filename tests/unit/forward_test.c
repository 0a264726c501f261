/* forward_test.c - the loader's refusals, and the forward pass's promise: a row's bits depend on
 * its own sequence alone (I1). */
#include "common/base/random.h"
#include "common/model/model_internal.h"
#include "common/base/sanitizers.h"
#include "tests/golden/layers_rig.h"
#include "tests/golden/model_rig.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[64];

static void write_file(const char *name, const void *bytes, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/td_forward_XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < 2; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    return rmdir(dir);
}

/* ---- a checkpoint written here, with one thing wrong at a time ------------------------------- */

struct part {
    const char *name, *dtype;
    int rows, cols; /* cols 0: a vector */
};

/* hidden 8, 2 heads, 1 KV head of 4, intermediate 12, vocab 16, one layer, untied */
static const struct part whole[] = {
    {"model.embed_tokens.weight", "F32", 16, 8},
    {"model.layers.0.input_layernorm.weight", "F32", 8, 0},
    {"model.layers.0.self_attn.q_proj.weight", "F32", 8, 8},
    {"model.layers.0.self_attn.k_proj.weight", "F32", 4, 8},
    {"model.layers.0.self_attn.v_proj.weight", "F32", 4, 8},
    {"model.layers.0.self_attn.o_proj.weight", "F32", 8, 8},
    {"model.layers.0.post_attention_layernorm.weight", "F32", 8, 0},
    {"model.layers.0.mlp.gate_proj.weight", "F32", 12, 8},
    {"model.layers.0.mlp.up_proj.weight", "F32", 12, 8},
    {"model.layers.0.mlp.down_proj.weight", "F32", 8, 12},
    {"model.norm.weight", "F32", 8, 0},
    {"lm_head.weight", "F32", 16, 8},
};
enum { N_PARTS = sizeof whole / sizeof *whole };

#define SIZES                                                                                      \
    "\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"                          \
    "\"num_attention_heads\":2,"                                                                   \
    "\"num_key_value_heads\":1,\"vocab_size\":16,\"max_position_embeddings\":32"
#define CONFIG "{\"model_type\":\"llama\"," SIZES

/* `pad` spaces after the header: the data starts at any alignment. */
static void write_checkpoint(const struct part *parts, int n_parts, int pad, uint32_t salt)
{
    static char header[8192];
    static uint8_t file[65536];
    size_t n = (size_t)snprintf(header, sizeof header, "{"), at = 0;
    for (int i = 0; i < n_parts; i++) {
        size_t bytes = (size_t)parts[i].rows * (size_t)(parts[i].cols ? parts[i].cols : 1) *
                       (parts[i].dtype[0] == 'F' && parts[i].dtype[1] == '3' ? 4 : 2);
        char shape[32];
        snprintf(shape, sizeof shape, parts[i].cols ? "%d,%d" : "%d", parts[i].rows, parts[i].cols);
        n += (size_t)snprintf(
            header + n, sizeof header - n,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", i ? "," : "",
            parts[i].name, parts[i].dtype, shape, at, at + bytes);
        at += bytes;
    }
    n += (size_t)snprintf(header + n, sizeof header - n, "}%*s", pad, "");
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(file + 8, header, n);
    assert_true(8 + n + at < sizeof file);
    /* Values by name and index, so that moving a tensor moves its values: small f32, or the same
       rounded to 16 bits of 1.xx */
    uint8_t *data = file + 8 + n;
    for (int i = 0; i < n_parts; i++) {
        bool wide = parts[i].dtype[1] == '3';
        uint64_t z = salt;
        for (const char *c = parts[i].name; *c; c++) z = z * 31 + (uint8_t)*c;
        for (int k = 0; k < parts[i].rows * (parts[i].cols ? parts[i].cols : 1); k++) {
            /* eight bits: exact in every type */
            float v = (float)(td_random_step(&z) >> 56) / 256.0f - 0.5f;
            uint16_t half = td_f32_to_bf16(v);
            memcpy(data, wide ? (const void *)&v : (const void *)&half, wide ? 4 : 2);
            data += wide ? 4 : 2;
        }
    }
    write_file("model.safetensors", file, (size_t)(data - file));
}

static td_status try_open(const char *config, const char *dtype, int32_t max_len, int n_threads,
                          struct td_err *err, uint64_t *ret_hash, uint64_t *ret_bytes)
{
    struct td_thread_pool *threads;
    struct td_model *model = NULL;
    write_file("config.json", config, strlen(config));
    *err = (struct td_err){0};
    assert_int_equal(td_thread_pool_create(n_threads, NULL, 0, &threads, err), TD_OK);
    struct td_model_params p = {
        .dir = dir, .dtype = dtype, .threads = threads, .max_model_len = max_len, .quiet = true};
    td_status s = td_model_open(&p, &model, err);
    if (!s && ret_hash) *ret_hash = td_model_hash(model);
    if (!s && ret_bytes) *ret_bytes = td_model_weight_bytes(model);
    assert_true(s ? model == NULL : model != NULL);
    td_model_close(model);
    td_thread_pool_destroy(threads);
    return s;
}

static void expect(const char *config, const char *dtype, int32_t max_len, td_status want,
                   const char *says)
{
    struct td_err err;
    td_status s = try_open(config, dtype, max_len, 2, &err, NULL, NULL);
    if (s != want || !strstr(err.msg, says))
        fail_msg("answered %s: %s\n  expected %s: ...%s...", td_status_name(s), err.msg,
                 td_status_name(want), says);
}

static void loader_refuses(void **state)
{
    (void)state;
    struct part parts[N_PARTS + 2];
    write_checkpoint(whole, N_PARTS, 0, 0);
    expect(CONFIG "}", "f32", 0, TD_OK, "");
    expect(CONFIG "}", "f32", 32, TD_OK, "");
    expect(CONFIG "}", "f32", 33, TD_ERR_INVALID, "max_model_len is 33, must be in 1..32");
    expect(CONFIG "}", "f32", -1, TD_ERR_INVALID, "max_model_len is -1");
    expect(CONFIG "}", "int3", 0, TD_ERR_INVALID, "dtype is int3");
    expect(CONFIG ",\"attention_bias\":true}", "f32", 0, TD_ERR_CORRUPT,
           "model.layers.0.self_attn.q_proj.bias [8] is missing");
    expect(CONFIG ",\"num_hidden_layers\":2}", "f32", 0, TD_ERR_CORRUPT,
           "model.layers.1.input_layernorm.weight [8] is missing");
    expect(CONFIG ",\"vocab_size\":17}", "f32", 0, TD_ERR_CORRUPT,
           "model.embed_tokens.weight has shape [16, 8], must be [17, 8]");
    expect(CONFIG ",\"head_dim\":6}", "f32", 0, TD_ERR_CORRUPT,
           "q_proj.weight has shape [8, 8], must be [12, 8]");
    expect(CONFIG ",\"tie_word_embeddings\":true}", "f32", 0, TD_ERR_CORRUPT,
           "lm_head.weight differ");

    for (int i = 0; i < N_PARTS; i++) { /* each one missing, and each one in a type we do not
                                           compute with */
        memcpy(parts, whole, sizeof whole);
        parts[i] = parts[N_PARTS - 1];
        write_checkpoint(parts, N_PARTS - 1, 0, 0);
        if (i < N_PARTS - 1)
            expect(CONFIG "}", "f32", 0, TD_ERR_CORRUPT, whole[i].name);
        else
            expect(CONFIG "}", "f32", 0, TD_ERR_CORRUPT, "lm_head.weight [16, 8] is missing");
        memcpy(parts, whole, sizeof whole);
        parts[i].dtype = "I16";
        write_checkpoint(parts, N_PARTS, 0, 0);
        expect(CONFIG "}", "f32", 0, TD_ERR_UNSUPPORTED, "has dtype I16, must be F32, F16 or BF16");
    }
    memcpy(parts, whole, sizeof whole);
    parts[N_PARTS] = (struct part){"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", 2, 0};
    write_checkpoint(parts, N_PARTS + 1, 0, 0);
    expect(CONFIG "}", "f32", 0, TD_OK, "");
    parts[N_PARTS + 1] = (struct part){"model.layers.0.self_attn.q_norm.weight", "F32", 4, 0};
    write_checkpoint(parts, N_PARTS + 2, 0, 0);
    expect(CONFIG "}", "f32", 0, TD_ERR_UNSUPPORTED,
           "model.layers.0.self_attn.q_norm.weight has no place");
    /* tied: under either name alone */
    write_checkpoint(whole, N_PARTS - 1, 0, 0);
    expect(CONFIG ",\"tie_word_embeddings\":true}", "f32", 0, TD_OK, "");
    write_checkpoint(whole + 1, N_PARTS - 1, 0, 0);
    expect(CONFIG ",\"tie_word_embeddings\":true}", "f32", 0, TD_OK, "");
    write_checkpoint(whole + 1, N_PARTS - 2, 0, 0);
    expect(CONFIG ",\"tie_word_embeddings\":true}", "f32", 0, TD_ERR_CORRUPT,
           "model.embed_tokens.weight");
    write_file("model.safetensors", "short", 5);
    expect(CONFIG "}", "f32", 0, TD_ERR_CORRUPT, "5 bytes");
}

/* The text model of a checkpoint that takes images: errors name a tensor as the file does. */
static void names_of_text_in_images(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"language_model.model.", "language_model.lm_head."},
                                           {"model.language_model.", "lm_head."}};
    static const char config[] = "{\"model_type\":\"mistral3\",\"vision_config\":{},"
                                 "\"text_config\":{\"model_type\":\"mistral\"," SIZES "}}",
                      tied[] = "{\"model_type\":\"mistral3\",\"tie_word_embeddings\":true,"
                               "\"text_config\":{\"model_type\":\"mistral\"," SIZES "}}";
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        struct part parts[N_PARTS], other[N_PARTS];
        char text[N_PARTS][96], says[256];
        for (int i = 0; i < N_PARTS; i++) {
            bool is_head = i == N_PARTS - 1;
            parts[i] = whole[i];
            snprintf(text[i], sizeof text[i], "%s%s", names[k][is_head],
                     whole[i].name + strlen(is_head ? "lm_head." : "model."));
            parts[i].name = text[i];
        }
        write_checkpoint(parts, N_PARTS, 0, 0);
        expect(config, "f32", 0, TD_OK, "");
        snprintf(says, sizeof says, "but %s and %s differ", text[0], text[N_PARTS - 1]);
        expect(tied, "f32", 0, TD_ERR_CORRUPT, says);
        for (int i = 0; i < N_PARTS; i++) {
            memcpy(other, parts, sizeof parts);
            other[i].dtype = "I16";
            write_checkpoint(other, N_PARTS, 0, 0);
            snprintf(says, sizeof says, "tensor %s has dtype I16", text[i]);
            expect(config, "f32", 0, TD_ERR_UNSUPPORTED, says);
            other[i] = other[N_PARTS - 1];
            write_checkpoint(other, N_PARTS - 1, 0, 0);
            snprintf(says, sizeof says, "tensor %s [", text[i]);
            expect(config, "f32", 0, TD_ERR_CORRUPT, says);
        }
    }
}

/* Any alignment of the data, mixed types in one fused matrix: the same values give the same
 * logits. */
static void storage_does_not_matter(void **state)
{
    (void)state;
    struct part mixed[N_PARTS];
    static const int32_t tokens[] = {3, 1, 15, 0, 7, 7, 2};
    float *first = NULL;
    for (int k = 0; k < 6; k++) {
        memcpy(mixed, whole, sizeof whole);
        if (k == 4) mixed[3].dtype = mixed[8].dtype = mixed[0].dtype = mixed[1].dtype = "BF16";
        if (k == 5)
            for (int i = 0; i < N_PARTS; i++) mixed[i].dtype = "BF16";
        write_checkpoint(mixed, N_PARTS, k, 0);
        write_file("config.json", CONFIG "}", strlen(CONFIG "}"));
        struct rig g;
        rig_open(&g, &(struct td_model_params){.dir = dir, .dtype = "f32"}, 1 + k % 2, 8, 16, 16);
        float *logits = rig_prompt(&g, 0, tokens, 7, 7);
        if (!first)
            first = logits;
        else {
            assert_memory_equal(first, logits, 7 * 16 * sizeof(float));
            free(logits);
        }
        rig_close(&g);
    }
    free(first);
}

static void hash_tells_weights_apart(void **state)
{
    (void)state;
    struct td_err err;
    uint64_t a, b, bytes_f32, bytes_bf16;
    write_checkpoint(whole, N_PARTS, 0, 0);
    assert_int_equal(try_open(CONFIG "}", "f32", 0, 1, &err, &a, &bytes_f32), TD_OK);
    assert_int_equal(try_open(CONFIG "}", "f32", 0, 2, &err, &b, NULL), TD_OK);
    assert_true(a == b);
    assert_int_equal(try_open(CONFIG "}", "f32", 16, 2, &err, &b, NULL), TD_OK);
    assert_true(a == b); /* a shorter context computes the same */
    assert_int_equal(try_open(CONFIG "}", "bf16", 0, 1, &err, &b, &bytes_bf16), TD_OK);
    assert_true(a != b);
    /* A row of 8 values may be filled up to 32: kernels_gemm_test has the bytes of all tables. */
    const struct td_ops *ops = td_ops_best();
    if (ops->packed_bytes(8, 8, TD_BF16) < ops->packed_bytes(8, 8, TD_F32))
        assert_true(bytes_bf16 < bytes_f32);
    assert_int_equal(try_open(CONFIG ",\"rms_norm_eps\":1e-5}", "f32", 0, 1, &err, &b, NULL),
                     TD_OK);
    assert_true(a != b);
    write_checkpoint(whole, N_PARTS, 0, 1);
    assert_int_equal(try_open(CONFIG "}", "f32", 0, 1, &err, &b, NULL), TD_OK);
    assert_true(a != b);
}

/* ---- random weights -------------------------------------------------------------------------- */

/* Large enough for every tile and tail of the kernels: 3 KV heads, sizes that are no multiples
 * of 32. */
static const char random_config[] = "{\"model_type\":\"qwen3\",\"hidden_size\":200,\"intermediate_"
                                    "size\":344,\"num_hidden_layers\":3,\"num_attention_heads\":6,"
                                    "\"num_key_value_heads\":3,\"head_dim\":32,\"vocab_size\":777,"
                                    "\"max_position_embeddings\":512,\"attention_bias\":true,"
                                    "\"use_sliding_window\":true,\"sliding_window\":21,\"max_"
                                    "window_layers\":2,\"tie_word_embeddings\":true,\"dtype\":"
                                    "\"bfloat16\"}";

static const char *write_config(const char *text)
{
    static char path[128];
    write_file("config.json", text, strlen(text));
    snprintf(path, sizeof path, "%s/config.json", dir);
    return path;
}

/* Experts in two of three layers; 7 of them, so that a decode step leaves some without rows. */
static const char *write_mixture_config(int hidden, int expert_mlp)
{
    char text[800];
    snprintf(text, sizeof text,
             "{\"model_type\":\"qwen3_moe\",\"hidden_size\":%d,\"intermediate_size\":96,"
             "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
             "\"head_dim\":16,\"vocab_size\":99,\"max_position_embeddings\":2048,"
             "\"num_experts\":7,\"num_experts_per_tok\":3,\"moe_intermediate_size\":%d,"
             "\"norm_topk_prob\":true,\"mlp_only_layers\":[1],\"dtype\":\"bfloat16\"}",
             hidden, expert_mlp);
    return write_config(text);
}

static const char *write_random_config(void) { return write_config(random_config); }

static void random_weights_are_sane(void **state)
{
    (void)state;
    const char *path = write_random_config();
    static const char *const dtypes[] = {"auto", "bf16", "f32"};
    uint64_t hashes[3];
    int32_t tokens[40];
    for (int32_t i = 0; i < 40; i++) tokens[i] = (i * 7919 + 13) % 777;
    for (int k = 0; k < 3; k++) {
        struct rig g;
        rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = dtypes[k]}, 1 + k,
                 16, 64, 64);
        hashes[k] = td_model_hash(g.model);
        assert_int_equal(td_model_dtype(g.model), k < 2 ? TD_BF16 : TD_F32);
        float *logits = rig_prompt(&g, 0, tokens, 40, 40);
        double sum = 0, sum2 = 0, n = 40.0 * 777;
        for (size_t i = 0; i < 40 * 777; i++)
            sum += (double)logits[i], sum2 += (double)logits[i] * (double)logits[i];
        double deviation = sqrt(sum2 / n - sum / n * sum / n);
        if (!(deviation > 0.3 && deviation < 3))
            fail_msg("%s: logits have a standard deviation of %g, must be near 1", dtypes[k],
                     deviation);
        free(logits);
        rig_close(&g);
    }
    /* auto is bf16 here; 1 thread or 2 */
    assert_true(hashes[0] == hashes[1] && hashes[0] != hashes[2]);
}

/* ---- invariance ------------------------------------------------------------------------------ */

#define SEQS 5
#define LEN_MAX 75

static void make_tokens(int32_t tokens[SEQS][LEN_MAX], int32_t vocab)
{
    uint64_t z = 12345;
    for (int s = 0; s < SEQS; s++)
        for (int i = 0; i < LEN_MAX; i++)
            tokens[s][i] = (int32_t)td_random_index(&z, (uint32_t)vocab);
}

static const int32_t lens[SEQS] = {75, 1, 33, 64, 17};

/* Runs all sequences together: step by step each takes up to `take[s]` tokens, in the order of
 * `order`. Every row's logits to out[s][position]. */
static void run_batched(struct rig *g, int32_t tokens[SEQS][LEN_MAX], const int32_t *order,
                        const int32_t *take, float *out[SEQS])
{
    int32_t done[SEQS] = {0};
    for (;;) {
        int32_t ids[256], positions[256], row_seq[256], wanted[256], n = 0, n_seqs = 0;
        const int32_t *tables[SEQS];
        struct {
            int32_t seq, position;
        } owner[256];
        for (int k = 0; k < SEQS; k++) {
            int32_t s = order[k], room = g->max_rows - n,
                    m = lens[s] - done[s] < take[s] ? lens[s] - done[s] : take[s];
            if (m > room) m = room;
            if (m <= 0) continue;
            for (int32_t i = 0; i < m; i++, n++) {
                ids[n] = tokens[s][done[s]];
                positions[n] = done[s];
                row_seq[n] = n_seqs;
                wanted[n] = n;
                owner[n].seq = s;
                owner[n].position = done[s]++;
            }
            tables[n_seqs++] = g->tables[s];
        }
        if (n == 0) return;
        struct td_forward_args a = {.tokens = ids,
                                    .positions = positions,
                                    .row_seq = row_seq,
                                    .block_tables = tables,
                                    .n_rows = n,
                                    .kv_base = g->cache,
                                    .kv = &g->kv,
                                    .logit_rows = wanted,
                                    .n_logit_rows = n};
        float *logits = NULL;
        assert_int_equal(td_model_forward(g->model, g->ws, &a, &logits), TD_OK);
        for (int32_t i = 0; i < n; i++)
            memcpy(out[owner[i].seq] + (size_t)owner[i].position * (size_t)g->vocab,
                   logits + (size_t)i * (size_t)g->vocab, (size_t)g->vocab * sizeof(float));
    }
}

/* Sanitizer builds: the plain kernels in one type and one cut. */
static bool is_short(void)
{
    const char *text = getenv("TANDEM_TEST_SHORT");
    return text && strcmp(text, "1") == 0;
}

static void check_invariance(const char *path, const char *dtype, const char *kv_dtype,
                             const struct td_ops *ops)
{
    static const int32_t forwards[SEQS] = {0, 1, 2, 3, 4}, backwards[SEQS] = {4, 3, 2, 1, 0};
    static const int32_t takes[][SEQS] = {
        {75, 75, 75, 75, 75}, {1, 1, 1, 1, 1}, {16, 1, 7, 33, 5}, {3, 64, 17, 2, 16}};
    int32_t tokens[SEQS][LEN_MAX];
    float *alone[SEQS], *out[SEQS];
    uint64_t hash = 0;
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        struct rig g;
        rig_open(&g,
                 &(struct td_model_params){
                     .random_config = path, .dtype = dtype, .kv_dtype = kv_dtype, .ops = ops},
                 n_threads, 16, 128, LEN_MAX);
        make_tokens(tokens, g.vocab);
        if (n_threads == 1) {
            hash = td_model_hash(g.model);
            for (int32_t s = 0; s < SEQS; s++)
                alone[s] = rig_prompt(&g, s, tokens[s], lens[s], lens[s]);
            for (int32_t s = 0; s < SEQS; s++)
                out[s] = malloc((size_t)lens[s] * (size_t)g.vocab * sizeof(float));
        }
        assert_true(td_model_hash(g.model) == hash);
        for (size_t k = 0; k < 4; k++) {
            /* Reference kernels are slow: two threads and two cuts are enough for them. */
            if (strcmp(ops->name, "ref") == 0 &&
                (n_threads != 2 || k % 2 == 0 || (is_short() && k != 3)))
                continue;
            /* Sanitizer builds: two of the cuts with two threads, the other two with three; one
               thread is what `alone` was. */
            if (is_short() && (n_threads == 1 || (size_t)n_threads % 2 == k % 2)) continue;
            memset(g.cache, 0xff, (size_t)(g.blocks_per_seq * RIG_SEQS) * g.kv.block_bytes);
            run_batched(&g, tokens, k % 2 ? backwards : forwards, takes[k], out);
            for (int32_t s = 0; s < SEQS; s++)
                for (size_t i = 0; i < (size_t)lens[s] * (size_t)g.vocab; i++)
                    if (memcmp(&out[s][i], &alone[s][i], sizeof(float)) != 0)
                        fail_msg("%s %s, KV %s, %d threads, cut %zu: sequence %d, position %zu, "
                                 "token %zu is %a in the batch, %a alone",
                                 ops->name, dtype, kv_dtype, n_threads, k, s, i / (size_t)g.vocab,
                                 i % (size_t)g.vocab, (double)out[s][i], (double)alone[s][i]);
        }
        rig_close(&g);
    }
    for (int32_t s = 0; s < SEQS; s++) {
        free(alone[s]);
        free(out[s]);
    }
}

static void batch_and_threads_do_not_matter(void **state)
{
    (void)state;
    const char *path = write_random_config();
    for (int i = 0; i < TD_N_OPS; i++) {
        const struct td_ops *ops = td_ops_by_name(td_ops_names[i]);
        if (!ops || strcmp(ops->name, "avxvnni") == 0) continue; /* avx2 with other integers */
        check_invariance(path, "f32", "auto", ops);
        if (strcmp(ops->name, "ref") != 0 || !is_short())
            check_invariance(path, "bf16", "auto", ops);
    }
    check_invariance(path, "bf16", "int8", td_ops_best());
}

/* A row's bits do not depend on who else chose its experts, or on how many rows are taken at a
 * time. */
static void rows_of_a_mixture_do_not_meet(void **state)
{
    (void)state;
    enum { N = 1100, CHUNK = 450 }; /* more than experts.c takes at a time */
    const char *path = write_mixture_config(72, 40);
    check_invariance(path, "bf16", "auto", td_ops_best());
    if (!is_short()) check_invariance(path, "f32", "auto", td_ops_best());
    if (!is_short()) check_invariance(path, "bf16", "auto", td_ops_by_name("ref"));
    check_invariance(path, "bf16", "int8", td_ops_best());
    if (!is_short()) check_invariance(path, "f32", "fp8", td_ops_best());

    struct rig g;
    int32_t tokens[N];
    for (int32_t i = 0; i < N; i++) tokens[i] = (i * 7919 + 13) % 99;
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "bf16"}, 2, 16, N, N);
    float *once = rig_prompt(&g, 0, tokens, N, N), *cut = rig_prompt(&g, 1, tokens, N, CHUNK);
    assert_memory_equal(once, cut, (size_t)N * 99 * sizeof(float));
    free(once);
    free(cut);
    rig_close(&g);
}

/* Experts rounded to blocks while they are loaded. */
static void experts_may_be_blocks(void **state)
{
    (void)state;
    const char *path = write_mixture_config(96, 64);
    check_invariance(path, "q8_0", "auto", td_ops_best());
    if (!is_short()) check_invariance(path, "q4_0", "auto", td_ops_by_name("ref"));
}

/* ---- what the experts of a mixture have had -------------------------------------------------- */

enum { MIXED = 3, N_EXPERTS = 7, N_CHOSEN = 3, GROUP = 1024 }; /* of write_mixture_config */

struct routed {
    const struct td_workspace *ws;
    int32_t n_rows;
    uint64_t had[MIXED][N_EXPERTS], rows, busiest, active;
};

/* By a look at every pair of logits of a row, where those of the layer are still there. */
static void route(struct routed *r, int32_t layer, int32_t n_rows)
{
    for (int32_t from = 0; from < n_rows; from += GROUP) {
        uint64_t of_group[N_EXPERTS] = {0}, most = 0;
        for (int32_t i = from; i < n_rows && i < from + GROUP; i++)
            for (int32_t e = 0; e < N_EXPERTS; e++) {
                const float *logits = r->ws->mixture.logits + (int64_t)i * N_EXPERTS;
                int n_better = 0;
                for (int32_t o = 0; o < N_EXPERTS; o++)
                    n_better += logits[o] > logits[e] || (logits[o] == logits[e] && o < e);
                of_group[e] += n_better < N_CHOSEN;
            }
        for (int32_t e = 0; e < N_EXPERTS; e++) {
            r->had[layer][e] += of_group[e];
            r->rows += of_group[e];
            r->active += of_group[e] > 0;
            if (of_group[e] > most) most = of_group[e];
        }
        r->busiest += most;
    }
}

/* K and V of layer n_layers - 1 are there: the layer before it has just ended. */
static void route_layer_before(void *ctx, int32_t n_layers)
{
    struct routed *r = ctx;
    if (n_layers - 2 == 0) route(r, 0, r->n_rows); /* layer 1 is no mixture */
}

static void check_counts(const struct routed *r)
{
    struct td_expert_counts counts;
    double share = 0;
    td_workspace_expert_counts(r->ws, &counts);
    for (int32_t layer = 0; layer < MIXED; layer++) {
        uint64_t rows = 0, most = 0;
        for (int32_t e = 0; e < N_EXPERTS; e++) {
            assert_true(r->ws->mixture.had[layer * N_EXPERTS + e] == r->had[layer][e]);
            rows += r->had[layer][e];
            if (r->had[layer][e] > most) most = r->had[layer][e];
        }
        if (rows) share = fmax(share, (double)most * N_EXPERTS / (double)rows);
    }
    if (counts.rows != r->rows || counts.busiest_rows != r->busiest)
        fail_msg("%llu rows, %llu of busiest experts; by hand %llu and %llu",
                 (unsigned long long)counts.rows, (unsigned long long)counts.busiest_rows,
                 (unsigned long long)r->rows, (unsigned long long)r->busiest);
    assert_true(counts.busiest_part_rows == counts.rows); /* one rank has all */
    assert_true(counts.active == r->active);
    assert_true(counts.busiest_share == share);
}

/* The first and the last layer are mixtures; the last one has the wanted rows alone. */
static void counts_of_experts_are_exact(void **state)
{
    (void)state;
    static const int32_t cuts[][2] = {{1500, 1500}, {1500, 1}, {333, 7}, {1, 1}, {64, 64}, {1, 1}};
    enum { N = 2 * 1500 + 333 + 1 + 64 + 1 };
    const char *path = write_mixture_config(72, 40);
    struct rig g;
    int32_t tokens[N], positions[N], row_seq[N] = {0}, wanted[N], done = 0;
    struct td_expert_counts none;
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "f32"}, 2, 16, 1500,
             1500);
    td_workspace_expert_counts(g.ws, &none);
    assert_true(none.rows == 0 && none.busiest_share == 0);
    struct routed r = {.ws = g.ws};
    const struct td_forward_layers layers = {.done = route_layer_before, .ctx = &r, .every = 1};
    for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
        int32_t n = cuts[k][0], n_wanted = cuts[k][1];
        for (int32_t i = 0; i < n; i++) {
            tokens[i] = (done++ * 7919 + 13) % 99;
            positions[i] = i;
            wanted[i] = n - n_wanted + i;
        }
        struct td_forward_args a = {.tokens = tokens,
                                    .positions = positions,
                                    .row_seq = row_seq,
                                    .block_tables = (const int32_t *const *)&g.tables[k],
                                    .n_rows = n,
                                    .kv_base = g.cache,
                                    .kv = &g.kv,
                                    .logit_rows = wanted,
                                    .n_logit_rows = n_wanted,
                                    .layers = &layers};
        float *logits = NULL;
        r.n_rows = n;
        assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
        route(&r, 2, n_wanted);
        check_counts(&r);
    }
    assert_true(r.busiest * N_EXPERTS > r.rows); /* uneven, or the check saw nothing */
    rig_close(&g);
    write_random_config();
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "f32"}, 2, 16, 8, 8);
    td_workspace_expert_counts(g.ws, &none);
    assert_true(none.rows == 0 && none.busiest_rows == 0 && none.busiest_share == 0);
    rig_close(&g);
}

/* The hash of a shape with layers 0 and `n - 1` as given, of which `first` are kept. */
static uint64_t hash_of_layers(int n, int first, int32_t *ret_experts)
{
    char text[800];
    struct rig g;
    snprintf(text, sizeof text,
             "{\"model_type\":\"qwen3_moe\",\"hidden_size\":72,\"intermediate_size\":96,"
             "\"num_hidden_layers\":%d,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
             "\"head_dim\":16,\"vocab_size\":99,\"max_position_embeddings\":64,\"num_experts\":7,"
             "\"num_experts_per_tok\":3,\"moe_intermediate_size\":40,\"norm_topk_prob\":true,"
             "\"mlp_only_layers\":[0],\"dtype\":\"bfloat16\"}",
             n);
    const struct td_model_params p = {.random_config = write_config(text), .random_layers = first};
    rig_open(&g, &p, 1, 16, 8, 8);
    uint64_t hash = td_model_hash(g.model);
    *ret_experts = td_model_config(g.model)->experts.n;
    assert_int_equal(td_model_config(g.model)->n_layers, first ? first : n);
    free(rig_prompt(&g, 0, (const int32_t[]){5, 7, 98}, 3, 3)); /* it computes */
    rig_close(&g);
    return hash;
}

/* The first layers of a shape are the shape of so many layers. */
static void random_layers_are_the_first(void **state)
{
    (void)state;
    int32_t n_experts, unused;
    uint64_t two = hash_of_layers(2, 0, &unused), four = hash_of_layers(4, 0, &unused);
    assert_true(two != four);
    assert_true(hash_of_layers(4, 2, &n_experts) == two && n_experts == 7);
    assert_true(hash_of_layers(4, 4, &unused) == four);
    hash_of_layers(4, 1, &n_experts);
    assert_int_equal(n_experts, 0); /* of the layer that is left */

    static const int32_t wrong[] = {5, -1, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct td_err err = {0};
        struct td_model *model = NULL;
        struct td_model_params p = {.random_config = write_random_config(),
                                    .random_layers = wrong[i],
                                    .dtype = "f32",
                                    .only_look = true};
        assert_int_equal(td_model_open(&p, &model, &err), TD_ERR_INVALID);
        assert_null(model);
        if (!strstr(err.msg, "must be in 1..3 (num_hidden_layers)")) fail_msg("%s", err.msg);
    }
}

/* Latent attention, with q of two products and groups of experts in two of three layers. */
static const char latent_config[] =
    "{\"model_type\":\"deepseek_v3\",\"hidden_size\":72,\"intermediate_size\":88,\"num_hidden_"
    "layers\":3,\"num_attention_heads\":3,\"vocab_size\":99,\"max_position_embeddings\":2048,"
    "\"kv_lora_rank\":36,\"q_lora_rank\":40,\"qk_nope_head_dim\":20,\"qk_rope_head_dim\":12,"
    "\"v_head_dim\":28,\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"n_group\":4,\"topk_"
    "group\":2,\"n_shared_experts\":1,\"moe_intermediate_size\":40,\"first_k_dense_replace\":1,"
    "\"dtype\":\"bfloat16\"";

/* Prefill and decode of one row have the same bits, and a block holds one row of a token and
 * layer. */
static void latent_rows_do_not_meet(void **state)
{
    (void)state;
    enum { N = 150 }; /* more than latent.c takes at a time */
    char text[800];
    snprintf(text, sizeof text, "%s}", latent_config);
    const char *path = write_config(text);
    check_invariance(path, "bf16", "auto", td_ops_best());
    if (!is_short()) check_invariance(path, "f32", "auto", td_ops_best());
    if (!is_short()) check_invariance(path, "bf16", "auto", td_ops_by_name("ref"));

    struct rig g;
    int32_t tokens[N];
    for (int32_t i = 0; i < N; i++) tokens[i] = (i * 7919 + 13) % 99;
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "bf16"}, 2, 16, N, N);
    assert_int_equal(g.kv.block_bytes, 3 * 16 * (36 + 12) * 2);
    /* q's rank and a row of the cache, not heads of the cache's width */
    assert_int_equal(g.ws->attn - g.ws->qkv, 13248); /* 150 rows of 88, rounded up */
    float *once = rig_prompt(&g, 0, tokens, N, N), *cut = rig_prompt(&g, 1, tokens, N, 70);
    assert_memory_equal(once, cut, (size_t)N * 99 * sizeof(float));
    free(once);
    free(cut);
    rig_close(&g);
}

/* With rows of whole blocks all matrices are rounded but the heads of kv_b_proj, whose rows are
 * not the file's; chunks and company leave the bits. */
static void latent_rows_are_rounded(void **state)
{
    (void)state;
    static const char config[] =
        "{\"model_type\":\"deepseek_v3\",\"hidden_size\":96,\"intermediate_size\":64,"
        "\"num_hidden_layers\":2,\"num_attention_heads\":3,\"vocab_size\":99,"
        "\"max_position_embeddings\":2048,\"kv_lora_rank\":64,\"q_lora_rank\":64,"
        "\"qk_nope_head_dim\":32,\"qk_rope_head_dim\":12,\"v_head_dim\":32,"
        "\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"n_group\":4,\"topk_group\":2,"
        "\"n_shared_experts\":1,\"moe_intermediate_size\":64,\"first_k_dense_replace\":1,"
        "\"dtype\":\"bfloat16\"}";
    const char *path = write_config(config);
    check_invariance(path, "q8_0", "auto", td_ops_best());
    struct rig g;
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "q8_0"}, 1, 16, 8, 8);
    for (int i = 0; i < 2; i++) {
        const struct td_layer *y = &g.model->layers[i];
        for (int h = 0; h < 3; h++) {
            assert_string_equal(y->k_absorbed[h].pieces[0].format->name, "BF16");
            assert_string_equal(y->v_expanded[h].pieces[0].format->name, "BF16");
        }
        assert_string_equal(y->qkv.pieces[0].format->name, "Q8_0");
        assert_string_equal(y->q_b.pieces[0].format->name, "Q8_0");
        assert_string_equal(y->o.pieces[0].format->name, "Q8_0");
    }
    assert_string_equal(g.model->layers[1].experts[7].down.pieces[0].format->name, "Q8_0");
    rig_close(&g);
}

/* Asking for fewer logits, or none, changes neither the logits nor a byte of the cache. */
static void unwanted_rows_do_not_matter(void **state)
{
    (void)state;
    const char *path = write_random_config();
    int32_t tokens[SEQS][LEN_MAX];
    struct rig g;
    rig_open(&g, &(struct td_model_params){.random_config = path, .dtype = "bf16"}, 2, 8, 128,
             LEN_MAX);
    make_tokens(tokens, g.vocab);
    size_t cache_bytes = (size_t)(g.blocks_per_seq * RIG_SEQS) * g.kv.block_bytes;
    float *all = rig_prompt(&g, 0, tokens[0], LEN_MAX, LEN_MAX),
          *last = malloc((size_t)g.vocab * sizeof(float));
    uint8_t *cache = malloc(cache_bytes);
    memcpy(cache, g.cache, cache_bytes);
    memset(g.cache, 0xff, cache_bytes);
    rig_chunk(&g, 0, tokens[0], 0, LEN_MAX, true, last);
    assert_memory_equal(last, all + (size_t)(LEN_MAX - 1) * (size_t)g.vocab,
                        (size_t)g.vocab * sizeof(float));
    assert_memory_equal(cache, g.cache, cache_bytes);

    memset(g.cache, 0xff, cache_bytes);
    int32_t positions[LEN_MAX], row_seq[LEN_MAX] = {0};
    for (int32_t i = 0; i < LEN_MAX; i++) positions[i] = i;
    const int32_t *table = g.tables[0];
    struct td_forward_args a = {.tokens = tokens[0],
                                .positions = positions,
                                .row_seq = row_seq,
                                .block_tables = &table,
                                .n_rows = LEN_MAX,
                                .kv_base = g.cache,
                                .kv = &g.kv};
    float *logits;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
    assert_memory_equal(cache, g.cache, cache_bytes);

    /* Three rows out of the middle. */
    static const int32_t some[] = {0, 31, 32};
    a.logit_rows = some;
    a.n_logit_rows = 3;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
    for (size_t i = 0; i < 3; i++)
        assert_memory_equal(logits + i * (size_t)g.vocab, all + (size_t)some[i] * (size_t)g.vocab,
                            (size_t)g.vocab * sizeof(float));
    free(cache);
    free(all);
    free(last);
    rig_close(&g);
}

static void ref_and_best_agree(void **state)
{
    (void)state;
#ifdef TD_WITH_TSAN
    skip(); /* a comparison of figures: batch_and_threads_do_not_matter runs the same kernels on
               as many threads */
#endif
    const char *path = write_random_config();
    int32_t tokens[SEQS][LEN_MAX];
    static const char *const dtypes[] = {"f32", "bf16"};
    /* f32: sums of up to 344 products in another order, three layers. bf16: one rounding more or
       less of an input, 2^-9 each. */
    static const double bounds[] = {2e-5, 2e-2};
    for (int k = 0; k < 2; k++) {
        struct rig a, b;
        rig_open(&a,
                 &(struct td_model_params){
                     .random_config = path, .dtype = dtypes[k], .ops = td_ops_by_name("ref")},
                 2, 16, 128, LEN_MAX);
        rig_open(&b,
                 &(struct td_model_params){
                     .random_config = path, .dtype = dtypes[k], .ops = td_ops_best()},
                 2, 16, 128, LEN_MAX);
        make_tokens(tokens, a.vocab);
        float *x = rig_prompt(&a, 0, tokens[0], LEN_MAX, LEN_MAX),
              *y = rig_prompt(&b, 0, tokens[0], LEN_MAX, LEN_MAX);
        double off = 0, largest = 0;
        for (size_t i = 0; i < (size_t)LEN_MAX * (size_t)a.vocab; i++) {
            off = fmax(off, fabs((double)x[i] - (double)y[i]));
            largest = fmax(largest, fabs((double)x[i]));
            assert_true(isfinite(y[i]));
        }
        printf("ref and %s, %s: off by %.2g of the largest logit\n", td_ops_best()->name, dtypes[k],
               off / largest);
        if (!(off / largest < bounds[k]))
            fail_msg("%s: ref and best differ by %g of the largest logit", dtypes[k],
                     off / largest);
        free(x);
        free(y);
        rig_close(&a);
        rig_close(&b);
    }
}

/* A table that is chosen for its speed gives the same logits, and its workers may finish the
 * requests of others: one hash. Tables with bits of their own have another. */
static void tables_of_one_class_agree(void **state)
{
    (void)state;
    const struct td_ops *ops[] = {td_ops_by_name("avx512"), td_ops_by_name("avx512bf16"),
                                  td_ops_by_name("ref")};
    if (!ops[0] || !ops[1]) skip(); /* this CPU has no dot of bf16 pairs */
    assert_string_equal(td_ops_numerics(ops[0]), td_ops_numerics(ops[1]));
    const char *path = write_random_config();
    int32_t tokens[SEQS][LEN_MAX];
    struct rig g[3];
    for (int i = 0; i < 3; i++)
        rig_open(&g[i],
                 &(struct td_model_params){
                     .random_config = path, .dtype = "bf16", .ops = ops[i], .quiet = true},
                 2, 16, 128, LEN_MAX);
    make_tokens(tokens, g[0].vocab);
    float *x = rig_prompt(&g[0], 0, tokens[0], LEN_MAX, LEN_MAX),
          *y = rig_prompt(&g[1], 0, tokens[0], LEN_MAX, LEN_MAX);
    assert_memory_equal(x, y, (size_t)LEN_MAX * (size_t)g[0].vocab * sizeof *x);
    assert_true(td_model_hash(g[0].model) == td_model_hash(g[1].model));
    assert_true(td_model_hash(g[0].model) != td_model_hash(g[2].model));
    free(x);
    free(y);
    for (int i = 0; i < 3; i++) rig_close(&g[i]);
}

static void layers_are_told_when_they_are_there(void **state)
{
    (void)state;
    for (int n_threads = is_short() ? 3 : 1; n_threads <= 3; n_threads += 2) {
        struct rig g;
        rig_open(&g, &(struct td_model_params){.dir = "models/pocket", .dtype = "bf16"}, n_threads,
                 8, 64, 64);
        layers_check_all(&g, true);
        rig_close(&g);
    }
}

static void bad_calls(void **state)
{
    (void)state;
    const char *path = write_random_config();
    struct td_err err = {0};
    struct rig g;
    rig_open(&g,
             &(struct td_model_params){.random_config = path, .dtype = "bf16", .max_model_len = 64},
             2, 8, 16, 64);
    assert_int_equal(td_model_max_len(g.model), 64);
    struct td_kv_layout layout;
    assert_int_equal(td_model_kv_layout(g.model, 12, &layout, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "block_size is 12"));
    assert_int_equal(td_model_kv_layout(g.model, 512, &layout, &err), TD_ERR_INVALID);
    assert_int_equal(td_model_kv_layout(g.model, 256, &layout, &err), TD_OK);
    assert_int_equal(layout.block_bytes, (size_t)3 * 2 * 3 * 256 * 32 * 2);
    struct td_workspace *ws;
    assert_int_equal(td_workspace_create(g.model, 0, 1, &ws, &err), TD_ERR_INVALID);
    assert_int_equal(td_workspace_create(g.model, 8, 9, &ws, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "max_logit_rows is 9, must be in 1..8"));

    int32_t zeros[32] = {0};
    const int32_t *table = g.tables[0];
    struct td_kv_layout other = g.kv;
    other.dtype = TD_F32;
    float *logits;
    struct td_forward_args good = {.tokens = zeros,
                                   .positions = zeros,
                                   .row_seq = zeros,
                                   .block_tables = &table,
                                   .n_rows = 1,
                                   .kv_base = g.cache,
                                   .kv = &g.kv};
    struct td_forward_args a = good;
    a.n_rows = 17;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_ERR_INVALID);
    a.n_rows = 0;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_ERR_INVALID);
    a = good;
    a.n_logit_rows = 2;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_ERR_INVALID);
    a = good;
    a.kv = &other;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_ERR_INVALID);
    assert_int_equal(td_model_forward(g.model, g.ws, &good, &logits), TD_OK);
    rig_close(&g);

    struct td_model *model;
    assert_int_equal(td_model_open(&(struct td_model_params){.dtype = "f32"}, &model, &err),
                     TD_ERR_INVALID);
    assert_int_equal(
        td_model_open(&(struct td_model_params){.dir = "/absent", .random_config = path}, &model,
                      &err),
        TD_ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(loader_refuses, setup, teardown),
        cmocka_unit_test_setup_teardown(names_of_text_in_images, setup, teardown),
        cmocka_unit_test_setup_teardown(storage_does_not_matter, setup, teardown),
        cmocka_unit_test_setup_teardown(hash_tells_weights_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(random_weights_are_sane, setup, teardown),
        cmocka_unit_test_setup_teardown(batch_and_threads_do_not_matter, setup, teardown),
        cmocka_unit_test_setup_teardown(rows_of_a_mixture_do_not_meet, setup, teardown),
        cmocka_unit_test_setup_teardown(experts_may_be_blocks, setup, teardown),
        cmocka_unit_test_setup_teardown(counts_of_experts_are_exact, setup, teardown),
        cmocka_unit_test_setup_teardown(random_layers_are_the_first, setup, teardown),
        cmocka_unit_test_setup_teardown(latent_rows_do_not_meet, setup, teardown),
        cmocka_unit_test_setup_teardown(latent_rows_are_rounded, setup, teardown),
        cmocka_unit_test_setup_teardown(unwanted_rows_do_not_matter, setup, teardown),
        cmocka_unit_test_setup_teardown(ref_and_best_agree, setup, teardown),
        cmocka_unit_test_setup_teardown(tables_of_one_class_agree, setup, teardown),
        cmocka_unit_test(layers_are_told_when_they_are_there),
        cmocka_unit_test_setup_teardown(bad_calls, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
