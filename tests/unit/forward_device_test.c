/* forward_device_test.c - the forward pass on a device's table: what TANDEM_CUDA_LIBRARY names.
 *
 * Against the plain kernels within a tolerance; and bit for bit against itself, however a prompt
 * is cut, whoever shares the batch, padded or not, with graphs or without (I1). The models are
 * those of tests/golden/fixtures: every architecture and oddity that the loader takes. With
 * TANDEM_DEVICE_TEST_MODELS=N only every N-th of them is run: an emulated GPU is slow.
 * TANDEM_DEVICE_TEST_SHORT_MODELS is the same for the short form (TANDEM_TEST_SHORT): each kernel
 * has a test of its own, which runs all its shapes there. */
#include "common/base/random.h"
#include "tests/golden/layers_rig.h"
#include "tests/golden/model_rig.h"

#include <dirent.h>
#include <math.h>
#include <unistd.h>

#include "common/base/mem.h"

#define FIXTURES "tests/golden/fixtures"
#define LAYERS_FIXTURE "qwen2_mixed_window" /* three layers or more */
enum { MODELS_MAX = 64, LEN_MAX = 48, BLOCK_SIZE = 8 };

static const struct td_ops *device;

static int open_device(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct td_device_config c = {.deterministic = true};
    if (td_device_open(&c, &device, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return -1;
    }
    printf("device: %s, sm_%d%d, emulated %d\n", device->device->info.name,
           device->device->info.cc_major, device->device->info.cc_minor,
           device->device->info.is_emulated);
    return 0;
}

static int close_device(void **state)
{
    (void)state;
    td_device_close(device);
    return 0;
}

struct fixture {
    char dir[300];
    int32_t *tokens, n;
    float *logits; /* what transformers computed in f32 */
};

static void fixture_open(struct fixture *f, const char *name)
{
    char path[400], *bytes;
    struct td_err err = {0};
    json_t *root;
    size_t n_bytes;
    snprintf(f->dir, sizeof f->dir, FIXTURES "/%s", name);
    snprintf(path, sizeof path, "%s/tokens.json", f->dir);
    if (td_json_load_file(path, (size_t)1 << 20, &root, &err)) fail_msg("%s", err.msg);
    f->tokens = rig_ids(json_object_get(root, "tokens"), &f->n);
    json_decref(root);
    snprintf(path, sizeof path, "%s/logits.f32", f->dir);
    if (td_file_read(path, (size_t)1 << 24, &bytes, &n_bytes, &err)) fail_msg("%s", err.msg);
    f->logits = (float *)(void *)bytes;
}

static void fixture_close(struct fixture *f)
{
    free(f->tokens);
    free(f->logits);
}

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

static int every_nth(void)
{
    const char *text = getenv("TANDEM_DEVICE_TEST_MODELS");
    if (!text && getenv("TANDEM_TEST_SHORT")) text = getenv("TANDEM_DEVICE_TEST_SHORT_MODELS");
    return text ? (int)strtol(text, NULL, 10) : 1;
}

static int fixture_names(char names[MODELS_MAX][200])
{
    int n = 0, k = 0, every = every_nth();
    DIR *dir = opendir(FIXTURES);
    if (!dir) fail_msg("%s is missing (run from the source root)", FIXTURES);
    for (struct dirent *e; (e = readdir(dir));)
        if (!strchr(e->d_name, '.')) snprintf(names[n++], 200, "%.199s", e->d_name);
    closedir(dir);
    assert_true(n >= 12 && every >= 1);
    qsort(names, (size_t)n, 200, by_name);
    for (int i = 0; i < n; i += every) memmove(names[k++], names[i], 200);
    return k;
}

/* Largest difference over the largest of `want`. */
static double off_by(const float *got, const float *want, size_t n)
{
    double off = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        double diff = fabs((double)got[i] - (double)want[i]);
        if (!(diff <= off)) off = diff; /* NaN counts */
        largest = fmax(largest, fabs((double)want[i]));
    }
    return off / largest;
}

static void same_bits(const char *what, const float *got, const float *want, size_t n,
                      int32_t vocab)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            fail_msg("%s: row %zu, token %zu is %a, must be %a", what, i / (size_t)vocab,
                     i % (size_t)vocab, (double)got[i], (double)want[i]);
}

/* All sequences decode together, a token of each per step: every row's logits to
 * out[s][position]. */
static void decode_together(struct rig *g, int32_t tokens[RIG_SEQS][LEN_MAX], const int32_t *lens,
                            int32_t n_seqs, float *out[RIG_SEQS])
{
    for (int32_t p = 0;; p++) {
        int32_t ids[RIG_SEQS], positions[RIG_SEQS], rows[RIG_SEQS], owner[RIG_SEQS], n = 0;
        const int32_t *tables[RIG_SEQS];
        for (int32_t s = 0; s < n_seqs; s++) {
            if (p >= lens[s]) continue;
            ids[n] = tokens[s][p], positions[n] = p, rows[n] = n, tables[n] = g->tables[s],
            owner[n++] = s;
        }
        if (n == 0) return;
        struct td_err err = {0};
        struct td_forward_args a = {.tokens = ids,
                                    .positions = positions,
                                    .row_seq = rows,
                                    .block_tables = tables,
                                    .n_rows = n,
                                    .kv_base = g->cache,
                                    .kv = &g->kv,
                                    .logit_rows = rows,
                                    .n_logit_rows = n,
                                    .err = &err};
        float *logits = NULL;
        if (td_model_forward(g->model, g->ws, &a, &logits)) fail_msg("forward: %s", err.msg);
        for (int32_t i = 0; i < n; i++)
            memcpy(out[owner[i]] + (size_t)p * (size_t)g->vocab,
                   logits + (size_t)i * (size_t)g->vocab, (size_t)g->vocab * sizeof(float));
    }
}

static void check_model(const char *name, const char *dtype, double bound, double *worst)
{
    struct fixture f;
    struct rig plain, dev;
    char what[400];
    fixture_open(&f, name);
    rig_open(&plain,
             &(struct td_model_params){.dir = f.dir, .dtype = dtype, .ops = td_ops_by_name("ref")},
             1, BLOCK_SIZE, 64, 64);
    rig_open(&dev, &(struct td_model_params){.dir = f.dir, .dtype = dtype, .ops = device}, 2,
             BLOCK_SIZE, 64, 64);
    assert_true(td_model_hash(plain.model) != td_model_hash(dev.model));
    assert_true(td_model_weight_bytes(dev.model) > 0);
    size_t vocab = (size_t)dev.vocab, n = (size_t)f.n * vocab;
    float *want = rig_prompt(&plain, 0, f.tokens, f.n, f.n),
          *whole = rig_prompt(&dev, 0, f.tokens, f.n, f.n);
    double off = off_by(whole, want, n);
    if (!(off <= bound))
        fail_msg("%s, %s: off by %g of the largest logit, must be at most %g", name, dtype, off,
                 bound);
    if (off > *worst) *worst = off;
    if (strcmp(dtype, "f32") == 0 && !((off = off_by(whole, f.logits, n)) <= 1e-4))
        fail_msg("%s: off by %g of transformers' logits", name, off);

    static const int32_t chunks[] = {1, 7, 16};
    for (int32_t k = 0; k < 3; k++) {
        float *cut = rig_prompt(&dev, k + 1, f.tokens, f.n, chunks[k]);
        snprintf(what, sizeof what, "%s, %s, chunks of %d", name, dtype, chunks[k]);
        same_bits(what, cut, whole, n, dev.vocab);
        free(cut);
    }
    float *last = malloc(vocab * sizeof(float));
    uint8_t *before = rig_cache_copy(&dev);
    rig_chunk(&dev, 0, f.tokens, 0, f.n, true, last); /* the same tokens to the same slots, one
                                                         row wanted */
    uint8_t *after = rig_cache_copy(&dev);
    same_bits("the last row alone", last, whole + ((size_t)f.n - 1) * vocab, vocab, dev.vocab);
    assert_memory_equal(before, after, dev.cache_bytes);
    free(before);
    free(after);
    free(last);
    free(want);
    free(whole);
    rig_close(&plain);
    rig_close(&dev);
    fixture_close(&f);
}

/* f32: other orders of sums. bf16: one rounding more or less of an input, 2^-9 each; and the
 * device rounds probabilities. */
static void as_the_plain_kernels(void **state)
{
    (void)state;
    char names[MODELS_MAX][200];
    int n = fixture_names(names);
    double worst[2] = {0, 0};
    for (int i = 0; i < n; i++) {
        check_model(names[i], "f32", 1e-4, &worst[0]);
        check_model(names[i], "bf16", 3e-2, &worst[1]);
    }
    printf("%d models: f32 off by %.2g of the largest logit, bf16 by %.2g\n", n, worst[0],
           worst[1]);
}

/* Mixtures of experts, where the table has them: the same as of other models. Every third has a
 * rule of its own: softmax; shared experts with a gate; sigmoids with a bias. */
static void mixtures_as_the_plain_kernels(void **state)
{
    (void)state;
    static const char *const models[] = {"qwen3_moe_odd_sizes",
                                         "mixtral_odd_sizes",
                                         "mixtral_window",
                                         "qwen2_moe_odd_sizes",
                                         "qwen3_moe_one_expert_a_row",
                                         "qwen3_moe_some_layers",
                                         "glm4_moe",
                                         "qwen2_moe_some_layers",
                                         "glm4_moe_odd_sizes"};
    double worst[2] = {0, 0};
    int n = 0, every = every_nth() > 1 ? 3 : 1;
    if (!device->device->experts) skip();
    for (size_t i = 0; i < sizeof models / sizeof *models; i += (size_t)every, n++) {
        char name[100];
        snprintf(name, sizeof name, "../mixtures/%s", models[i]);
        check_model(name, "f32", 1e-4, &worst[0]);
        check_model(name, "bf16", 3e-2, &worst[1]);
    }
    printf("%d mixtures: f32 off by %.2g of the largest logit, bf16 by %.2g\n", n, worst[0],
           worst[1]);
}

static void batches_padding_and_graphs(void **state)
{
    (void)state;
    static const char *const models[] = {"llama_odd_sizes", "../mixtures/qwen3_moe_odd_sizes",
                                         "qwen3_bias_window"};
    static const char *const dtypes[] = {"f32", "bf16"};
    static const int32_t lens[RIG_SEQS] = {17, 1, 9, 24, 8, 16, 23, 3};
    static const int32_t n_together[] = {1, 2, 3, 5, 8};
    for (int m = 0; m < (every_nth() > 1 ? 2 : 3); m++)
        for (int t = 0; t < 2 && (m != 1 || device->device->experts); t++) {
            struct fixture f;
            int32_t tokens[RIG_SEQS][LEN_MAX];
            float *alone[RIG_SEQS], *out[RIG_SEQS];
            fixture_open(&f, models[m]);
            uint64_t z = 99;
            for (int no_graphs = 0; no_graphs < 2; no_graphs++) {
                struct rig g;
                rig_open(
                    &g,
                    &(struct td_model_params){
                        .dir = f.dir, .dtype = dtypes[t], .ops = device, .no_graphs = no_graphs},
                    1, BLOCK_SIZE, 64, LEN_MAX);
                size_t vocab = (size_t)g.vocab;
                assert_int_equal(td_workspace_padded_rows(g.ws, 3), no_graphs ? 3 : 4);
                assert_int_equal(td_workspace_padded_rows(g.ws, 5), no_graphs ? 5 : 8);
                assert_int_equal(td_workspace_padded_rows(g.ws, 17), no_graphs ? 17 : 24);
                assert_int_equal(td_workspace_padded_rows(g.ws, 63), no_graphs ? 63 : 64);
                for (int32_t s = 0; s < RIG_SEQS; s++) {
                    if (!no_graphs) {
                        for (int32_t i = 0; i < LEN_MAX; i++)
                            tokens[s][i] = (int32_t)td_random_index(&z, vocab);
                        alone[s] = rig_prompt(&g, s, tokens[s], lens[s], lens[s]);
                        out[s] = malloc((size_t)lens[s] * vocab * sizeof(float));
                        assert_non_null(out[s]);
                    }
                }
                for (size_t k = 0; k < sizeof n_together / sizeof *n_together; k++) {
                    rig_cache_clear(&g);
                    decode_together(&g, tokens, lens, n_together[k], out);
                    for (int32_t s = 0; s < n_together[k]; s++) {
                        char what[100];
                        snprintf(what, sizeof what, "%s %s, %d together, graphs %d, sequence %d",
                                 models[m], dtypes[t], n_together[k], !no_graphs, s);
                        same_bits(what, out[s], alone[s], (size_t)lens[s] * vocab, g.vocab);
                    }
                }
                rig_close(&g);
            }
            for (int32_t s = 0; s < RIG_SEQS; s++) {
                free(alone[s]);
                free(out[s]);
            }
            fixture_close(&f);
        }
}

/* Eight contexts that grow past 256 blocks in all: the block ids of a step then take more room,
 * and that is another graph. */
static void contexts_grow(void **state)
{
    (void)state;
    enum { FROM = 250, STEPS = 13, LEN = FROM + STEPS, STEP_ROWS = 50 };
    static const char config[] =
        "{\"model_type\":\"llama\",\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_"
        "layers\":1,\"num_attention_heads\":2,"
        "\"num_key_value_heads\":1,\"vocab_size\":32,\"max_position_embeddings\":512}";
    char path[] = "/tmp/td_forward_device_XXXXXX";
    static int32_t tokens[RIG_SEQS][LEN];
    float *first = NULL;
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, config, sizeof config - 1) == (ssize_t)sizeof config - 1 &&
                close(fd) == 0);
    for (int no_graphs = 0; no_graphs < 2; no_graphs++) {
        struct rig g;
        rig_open(&g,
                 &(struct td_model_params){
                     .random_config = path, .dtype = "f32", .ops = device, .no_graphs = no_graphs},
                 1, BLOCK_SIZE, STEP_ROWS, LEN);
        size_t step_floats = (size_t)RIG_SEQS * (size_t)g.vocab;
        float *all = malloc(STEPS * step_floats * sizeof(float));
        assert_non_null(all);
        uint64_t z = 5;
        for (int32_t s = 0; s < RIG_SEQS; s++) {
            for (int32_t i = 0; i < LEN; i++)
                tokens[s][i] = (int32_t)td_random_index(&z, (uint32_t)g.vocab);
            for (int32_t at = 0; at < FROM; at += STEP_ROWS)
                rig_chunk(&g, s, tokens[s], at, STEP_ROWS, true, NULL);
        }
        for (int32_t step = 0; step < STEPS; step++) {
            int32_t ids[RIG_SEQS], positions[RIG_SEQS], rows[RIG_SEQS];
            const int32_t *tables[RIG_SEQS];
            for (int32_t s = 0; s < RIG_SEQS; s++)
                ids[s] = tokens[s][FROM + step], positions[s] = FROM + step, rows[s] = s,
                tables[s] = g.tables[s];
            struct td_forward_args a = {.tokens = ids,
                                        .positions = positions,
                                        .row_seq = rows,
                                        .block_tables = tables,
                                        .n_rows = RIG_SEQS,
                                        .kv_base = g.cache,
                                        .kv = &g.kv,
                                        .logit_rows = rows,
                                        .n_logit_rows = RIG_SEQS};
            float *logits = NULL;
            assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
            memcpy(all + (size_t)step * step_floats, logits, step_floats * sizeof(float));
        }
        if (!first)
            first = all;
        else {
            same_bits("contexts past 256 blocks", all, first, STEPS * step_floats, g.vocab);
            free(all);
        }
        rig_close(&g);
    }
    free(first);
    unlink(path);
}

static void count_issue(void *ctx, const float *logits, int32_t n_rows)
{
    (void)logits, (void)n_rows;
    ++*(int *)ctx;
}

/* However many shapes of steps there were: the fourth step of a shape is a graph's (the strict
 * table looks at the third), and so are those of a shape that is in use meanwhile. */
static void shapes_come_and_go(void **state)
{
    (void)state;
    enum { SHAPES = 600, IN_USE = 1 << 20, NEW_ONES = 5, STEPS_OF_EACH = 4 };
    struct rig g;
    rig_open(&g,
             &(struct td_model_params){.random_config = FIXTURES "/llama_odd_sizes/config.json",
                                       .dtype = "f32",
                                       .ops = device},
             1, BLOCK_SIZE, 16, 16);
    int n_issued = 0, n_in_use = 0;
    for (int i = 0; i < SHAPES + NEW_ONES * STEPS_OF_EACH; i++) {
        bool is_in_use = i < SHAPES && i % 10 == 9;
        uint64_t shape = is_in_use    ? IN_USE
                         : i < SHAPES ? (uint64_t)i
                                      : IN_USE + 1 + (uint64_t)(i - SHAPES) / STEPS_OF_EACH;
        int seen = is_in_use    ? n_in_use++
                   : i < SHAPES ? 0
                                : (i - SHAPES) % STEPS_OF_EACH,
            before = n_issued;
        const struct td_forward_tail tail = {
            .issue = count_issue, .ctx = &n_issued, .shape = shape};
        const int32_t zero = 0, *tables[] = {g.tables[0]};
        struct td_forward_args a = {.tokens = (int32_t[]){1},
                                    .positions = &zero,
                                    .row_seq = &zero,
                                    .block_tables = tables,
                                    .n_rows = 1,
                                    .kv_base = g.cache,
                                    .kv = &g.kv,
                                    .logit_rows = &zero,
                                    .n_logit_rows = 1,
                                    .tail = &tail};
        float *logits;
        assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
        if (seen != 2 && n_issued != before + (seen < 2))
            fail_msg("step %d: issued %d times, must be %d", i, n_issued - before, seen < 2);
    }
    rig_close(&g);
}

static void random_weights_are_the_hosts(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"f32", "bf16"};
    static const int32_t tokens[] = {1, 5, 9, 2, 30, 11, 7};
    for (int t = 0; t < 2; t++) {
        struct rig plain, dev;
        const char *config = FIXTURES "/llama_odd_sizes/config.json";
        rig_open(&plain,
                 &(struct td_model_params){
                     .random_config = config, .dtype = dtypes[t], .ops = td_ops_by_name("ref")},
                 1, BLOCK_SIZE, 16, 16);
        rig_open(
            &dev,
            &(struct td_model_params){.random_config = config, .dtype = dtypes[t], .ops = device},
            3, BLOCK_SIZE, 16, 16);
        float *want = rig_prompt(&plain, 0, tokens, 7, 7), *got = rig_prompt(&dev, 0, tokens, 7, 3);
        double off = off_by(got, want, 7 * (size_t)dev.vocab);
        if (!(off <= (t ? 3e-2 : 1e-4))) fail_msg("%s: off by %g", dtypes[t], off);
        free(want);
        free(got);
        rig_close(&plain);
        rig_close(&dev);
    }
}

static void layers_are_told_when_they_are_there(void **state)
{
    (void)state;
    struct rig g;
    bool strict = strcmp(device->device->info.name, "deferred") == 0; /* a GPU runs ahead */
    rig_open(&g,
             &(struct td_model_params){
                 .dir = FIXTURES "/" LAYERS_FIXTURE, .dtype = "f32", .ops = device},
             1, BLOCK_SIZE, 64, 64);
    layers_check_all(&g, strict);
    const struct td_forward_layers none = {.every = 0};
    struct td_forward_args a = {
        .tokens = (int32_t[]){1}, .n_rows = 1, .kv_base = g.cache, .kv = &g.kv, .layers = &none};
    float *out;
    assert_int_equal(td_model_forward(g.model, g.ws, &a, &out), TD_ERR_INVALID);
    rig_close(&g);
}

/* What mixtures cannot have on a device is refused by its name. */
static void mixtures_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *model, *experts, *says;
    } cases[] = {
        {"mixtures/qwen3_moe_odd_sizes", "lazy", "experts must be load"},
        {"mixtures/minimax_m2", NULL, "norms of whole rows of q and k"},
        {"mixtures/gpt_oss_odd_sizes", NULL, "gates other than SwiGLU"},
        {"latent/deepseek_v2_odd_sizes", NULL, "have no latent attention"},
    };
    struct td_err err = {0};
    struct td_thread_pool *threads;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_model *model = NULL;
        char dir[200];
        snprintf(dir, sizeof dir, "tests/golden/%s", cases[i].model);
        struct td_model_params p = {.dir = dir,
                                    .dtype = "f32",
                                    .experts = cases[i].experts,
                                    .ops = device,
                                    .threads = threads,
                                    .quiet = true};
        const char *says = device->device->experts ? cases[i].says : "the kernels of table";
        assert_int_equal(td_model_open(&p, &model, &err), TD_ERR_UNSUPPORTED);
        if (!strstr(err.msg, says)) fail_msg("%s: %s, must say %s", dir, err.msg, says);
    }
    td_thread_pool_destroy(threads);
}

static void quantised_mixtures_are_refused(void **state)
{
    (void)state;
    static const char config[] =
        "{\"model_type\":\"qwen3_moe\",\"hidden_size\":64,\"intermediate_size\":64,\"num_hidden_"
        "layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":32,"
        "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32,"
        "\"max_position_embeddings\":64}";
    char path[] = "/tmp/td_forward_device_XXXXXX";
    struct td_err err = {0};
    struct td_thread_pool *threads;
    struct td_model *model = NULL;
    if (!device->device->experts) skip();
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, config, sizeof config - 1) == (ssize_t)sizeof config - 1 &&
                close(fd) == 0);
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    struct td_model_params p = {
        .random_config = path, .dtype = "q8_0", .ops = device, .threads = threads, .quiet = true};
    assert_int_equal(td_model_open(&p, &model, &err), TD_ERR_UNSUPPORTED);
    if (!strstr(err.msg, "experts are Q8_0")) fail_msg("%s, must say experts are Q8_0", err.msg);
    td_thread_pool_destroy(threads);
    unlink(path);
}

/* What the kernels of devices lack is refused by its name; what the loader alone does differently
 * (fused tensors, rotations) runs. */
static void families_run_or_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *model, *says; /* NULL: runs */
    } cases[] = {
        {"gemma1", "scaled embeddings"},
        {"gemma2", "scaled embeddings"},
        {"granite", "scaled embeddings"},
        {"granite_one_scale", NULL},
        {"olmo2", "norms of whole rows of q and k"},
        {"glm4", "norms behind attention and MLP"},
        {"cohere", "norms that subtract the mean"},
        {"baichuan_13b", "slopes of scores (ALiBi)"},
        {"phi3_short_partial", NULL},
        {"smollm3", NULL},
        {"glm", NULL},
    };
    struct td_err err = {0};
    struct td_thread_pool *threads;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f;
        struct td_model *model = NULL;
        char name[100];
        snprintf(name, sizeof name, "../families/%s", cases[i].model);
        fixture_open(&f, name);
        struct td_model_params p = {.dir = f.dir,
                                    .dtype = "f32",
                                    .ops = device,
                                    .threads = threads,
                                    .max_model_len = LEN_MAX,
                                    .quiet = true};
        if (cases[i].says) {
            assert_int_equal(td_model_open(&p, &model, &err), TD_ERR_UNSUPPORTED);
            if (!strstr(err.msg, cases[i].says))
                fail_msg("%s: %s, must say %s", f.dir, err.msg, cases[i].says);
        } else {
            struct rig g;
            rig_open(&g, &p, 1, BLOCK_SIZE, LEN_MAX, LEN_MAX);
            float *whole = rig_prompt(&g, 0, f.tokens, f.n, f.n);
            double off = off_by(whole, f.logits, (size_t)f.n * (size_t)g.vocab);
            if (!(off <= 1e-4)) fail_msg("%s: off by %g of the largest logit", f.dir, off);
            free(whole);
            rig_close(&g);
        }
        free(f.tokens);
        free(f.logits);
    }
    td_thread_pool_destroy(threads);
}

static void too_much_is_refused(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct rig g;
    uint64_t n_free, total, now;
    rig_open(&g,
             &(struct td_model_params){
                 .dir = FIXTURES "/llama_odd_sizes", .dtype = "bf16", .ops = device},
             1, BLOCK_SIZE, 16, 16);
    assert_int_equal(device->device->free_bytes(&n_free, &total, &err), TD_OK);
    struct td_workspace *ws = NULL;
    td_status s = td_workspace_create(g.model, 1 << 20, 1 << 20, &ws, &err);
    if (!s && !device->device->info.is_emulated) { /* a large card has it all */
        td_workspace_destroy(ws);
        rig_close(&g);
        return;
    }
    assert_int_equal(s, TD_ERR_NOMEM);
    assert_non_null(strstr(err.msg, "max_step_tokens"));
    assert_non_null(strstr(err.msg, "free"));
    /* nothing stays behind */
    assert_int_equal(device->device->free_bytes(&now, &total, &err), TD_OK);
    assert_true(now == n_free);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_the_plain_kernels),
        cmocka_unit_test(mixtures_as_the_plain_kernels),
        cmocka_unit_test(batches_padding_and_graphs),
        cmocka_unit_test(contexts_grow),
        cmocka_unit_test(shapes_come_and_go),
        cmocka_unit_test(random_weights_are_the_hosts),
        cmocka_unit_test(layers_are_told_when_they_are_there),
        cmocka_unit_test(mixtures_are_refused),
        cmocka_unit_test(quantised_mixtures_are_refused),
        cmocka_unit_test(families_run_or_are_refused),
        cmocka_unit_test(too_much_is_refused),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
