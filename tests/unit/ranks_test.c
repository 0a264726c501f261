/* common/model split over ranks: logits and KV beside those of one rank, mixtures and latent
 * attention beside the logits of Hugging Face transformers, the same bits whatever the chunks,
 * threads and timing, one identity for every number of ranks, and refusals by name.
 * Ranks are threads here, each with a model of its own; tests of processes: comm_test,
 * engine_ranks_test, cluster. */
#include "common/model/model_internal.h"
#include "tests/golden/model_rig.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "common/model/comm.h"
#include "common/model/family.h"

enum { MAX_RANKS = 8, BS = 8, MAX_TOKENS = 64, N_TOKENS = 45 };

static char config_path[64];

static void write_config(const char *text)
{
    FILE *f = fopen(config_path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    fclose(f);
}

static int setup(void **state)
{
    (void)state;
    snprintf(config_path, sizeof config_path, "/tmp/ranks_test_XXXXXX");
    int fd = mkstemp(config_path);
    if (fd >= 0) close(fd);
    return fd >= 0 ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return unlink(config_path);
}

/* One run of a prompt by a group of ranks. */
struct run {
    int32_t n_ranks, n_threads, chunk;
    struct td_model_params params;
    const int32_t *tokens; /* [n]; NULL: made ones */
    int32_t n;
    int32_t vocab, n_layers, n_kv_heads, head_dim; /* of one rank */
    enum td_arch arch;
    bool is_latent, norms_all_heads;
    uint64_t hashes[MAX_RANKS], weight_bytes;
    struct td_expert_counts counts[MAX_RANKS];
    float *logits;          /* rank 0's, [N_TOKENS, vocab] */
    uint8_t *kv[MAX_RANKS]; /* the blocks of sequence 1 in order, each rank's layout */
    size_t block_bytes, kv_bytes;
};

struct rank {
    struct run *run;
    struct td_comm_segment *segment;
    int32_t rank;
};

/* Sanitizer builds: each model and degree in one of the cuts and numbers of threads, in turn. */
static bool is_short(void)
{
    const char *text = getenv("TANDEM_TEST_SHORT");
    return text && strcmp(text, "1") == 0;
}

static int32_t token(int32_t i, int32_t vocab)
{
    return (int32_t)(((uint32_t)i * 2654435761u >> 7) % (uint32_t)vocab);
}

/* One forward, so that what experts have had is what they have had of one group in each layer. */
static void check_parts(const struct rig *g, const struct td_expert_counts *counts, bool is_one)
{
    const struct td_model *m = g->model;
    int32_t n = m->config.experts.n, ep = m->expert_ranks;
    uint64_t busiest = 0;
    if (!n || !is_one) return;
    for (int32_t layer = 0; layer < m->config.n_layers; layer++) {
        uint64_t most = 0, of_part = 0;
        for (int32_t e = 0, part = 0; e < n; e++) {
            while (e == td_expert_first(n, part + 1, ep)) part++, of_part = 0;
            of_part += g->ws->mixture.had[layer * n + e];
            if (of_part > most) most = of_part;
        }
        busiest += most;
    }
    assert_true(counts->busiest_part_rows == busiest);
}

/* All ranks count what one rank counts, and parts of experts are the difference. alike: in equal
 * chunks, so that groups are the same. */
static void compare_counts(const struct run *one, const struct run *many, bool alike)
{
    const struct td_expert_counts *a = &one->counts[0];
    for (int32_t r = 0; r < many->n_ranks; r++) {
        const struct td_expert_counts *b = &many->counts[r];
        if (a->rows != b->rows || (alike && a->busiest_rows != b->busiest_rows) ||
            (alike && a->active != b->active) || a->busiest_share != b->busiest_share)
            fail_msg("%s: rank %d of %d has counted %llu rows, %llu of busiest experts; one rank "
                     "%llu and %llu",
                     many->params.dir, r, many->n_ranks, (unsigned long long)b->rows,
                     (unsigned long long)b->busiest_rows, (unsigned long long)a->rows,
                     (unsigned long long)a->busiest_rows);
        assert_true(b->busiest_part_rows == many->counts[0].busiest_part_rows);
        assert_true(b->busiest_part_rows <= b->rows && b->busiest_part_rows >= b->busiest_rows);
    }
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;
    struct run *run = me->run;
    struct td_comm *comm = NULL;
    struct td_comm_config cfg = {.timeout_ms = 30000};
    if (run->n_ranks > 1)
        assert_int_equal(td_comm_open(me->segment, me->rank, &cfg, &comm, NULL), TD_OK);
    struct td_model_params p = run->params;
    p.comm = comm;
    struct rig g;
    int32_t tokens[N_TOKENS];
    rig_open(&g, &p, run->n_threads, BS, MAX_TOKENS, MAX_TOKENS);
    for (int32_t i = 0; i < N_TOKENS; i++) tokens[i] = token(i, g.vocab);
    float *logits = rig_prompt(&g, 1, run->tokens ? run->tokens : tokens,
                               run->tokens ? run->n : N_TOKENS, run->chunk);
    run->hashes[me->rank] = td_model_hash(g.model);
    td_workspace_expert_counts(g.ws, &run->counts[me->rank]);
    check_parts(&g, &run->counts[me->rank], run->chunk >= (run->tokens ? run->n : N_TOKENS));
    assert_int_equal(td_model_n_ranks(g.model), run->n_ranks);
    run->kv[me->rank] = malloc((size_t)g.blocks_per_seq * g.kv.block_bytes);
    for (int32_t b = 0; b < g.blocks_per_seq; b++)
        memcpy(run->kv[me->rank] + (size_t)b * g.kv.block_bytes,
               g.cache + (size_t)g.tables[1][b] * g.kv.block_bytes, g.kv.block_bytes);
    if (me->rank == 0) {
        run->logits = logits;
        run->vocab = g.vocab;
        run->arch = td_model_config(g.model)->arch;
        run->is_latent = td_model_config(g.model)->latent.kv_rank > 0;
        run->norms_all_heads = g.model->layers[0].spec.qk_norm == TD_QK_NORM_ROWS;
        run->n_layers = g.kv.n_layers;
        run->n_kv_heads = g.kv.n_kv_heads;
        run->head_dim = g.kv.head_dim;
        run->block_bytes = g.kv.block_bytes;
        run->kv_bytes = (size_t)g.blocks_per_seq * g.kv.block_bytes;
        run->weight_bytes = td_model_weight_bytes(g.model);
    } else {
        free(logits);
    }
    rig_close(&g);
    td_comm_close(comm);
    return NULL;
}

static struct run run_ranks(struct run run)
{
    struct td_comm_segment segment = {0};
    struct td_err err = {0};
    struct rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    if (td_comm_segment_create(run.n_ranks, 4096, &segment, &err)) fail_msg("%s", err.msg);
    for (int32_t r = 0; r < run.n_ranks; r++) {
        ranks[r] = (struct rank){&run, &segment, r};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < run.n_ranks; r++) pthread_join(threads[r], NULL);
    td_comm_segment_close(&segment);
    return run;
}

static struct run run_group(const struct td_model_params *params, int32_t n_ranks,
                            int32_t n_threads, int32_t chunk)
{
    return run_ranks((struct run){
        .n_ranks = n_ranks, .n_threads = n_threads, .chunk = chunk, .params = *params});
}

static void run_free(struct run *run)
{
    free(run->logits);
    for (int32_t r = 0; r < run->n_ranks; r++) free(run->kv[r]);
}

static double worst(const float *a, const float *b, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most)) most = d; /* a NaN shows, too */
    }
    return most;
}

/* K or V of one token: layer, kv (0: K), head of this rank. */
static const uint8_t *kv_row(const struct run *run, int32_t rank, int32_t t, int32_t layer, int kv,
                             int32_t head, size_t elem)
{
    size_t row = (size_t)run->head_dim * elem, per_head = (size_t)BS * row;
    return run->kv[rank] + (size_t)(t / BS) * run->block_bytes +
           ((((size_t)layer * 2 + (size_t)kv) * (size_t)run->n_kv_heads + (size_t)head) * per_head +
            (size_t)(t % BS) * row);
}

/* Every head of every rank beside the same head of one rank: layer 0 bit for bit (its input is
 * the embedding) unless k is normed over all heads, whose squares ranks sum; later ones within
 * `tol`. */
static void compare_kv(const struct run *one, const struct run *many, size_t elem, double tol)
{
    size_t row = (size_t)one->head_dim * elem;
    for (int32_t r = 0; r < many->n_ranks; r++)
        for (int32_t t = 0; t < N_TOKENS; t++)
            for (int32_t layer = 0; layer < one->n_layers; layer++)
                for (int kv = 0; kv < 2; kv++)
                    for (int32_t h = 0; h < many->n_kv_heads; h++) {
                        int32_t whole = one->n_kv_heads >= many->n_ranks
                                            ? r * many->n_kv_heads + h
                                            : r * one->n_kv_heads / many->n_ranks;
                        const uint8_t *a = kv_row(one, 0, t, layer, kv, whole, elem),
                                      *b = kv_row(many, r, t, layer, kv, h, elem);
                        bool is_same = layer == 0 && !(kv == 0 && one->norms_all_heads);
                        if (is_same && memcmp(a, b, row))
                            fail_msg("%d ranks: layer 0, %c of token %d, head %d of rank %d is not "
                                     "head %d of one rank",
                                     many->n_ranks, "KV"[kv], t, h, r, whole);
                        for (int32_t i = 0; i < one->head_dim; i++) {
                            float x, y;
                            if (elem == 4) {
                                memcpy(&x, a + 4 * i, 4);
                                memcpy(&y, b + 4 * i, 4);
                            } else {
                                uint16_t u, v;
                                memcpy(&u, a + 2 * i, 2);
                                memcpy(&v, b + 2 * i, 2);
                                x = td_bf16_to_f32(u);
                                y = td_bf16_to_f32(v);
                            }
                            double d = fabs((double)x - (double)y);
                            if (!(d <= tol))
                                fail_msg("%d ranks: layer %d, %c of token %d, head %d of rank %d: "
                                         "%g, one rank has %g",
                                         many->n_ranks, layer, "KV"[kv], t, h, r, (double)y,
                                         (double)x);
                        }
                    }
}

/* Each rank's KV of two runs, in which every slot that no token has is as it was. */
static void compare_caches(const struct run *a, const struct run *b, const char *what)
{
    for (int32_t r = 0; r < a->n_ranks; r++)
        if (memcmp(a->kv[r], b->kv[r], a->kv_bytes))
            fail_msg("%s, %d ranks: other KV on rank %d with %s",
                     a->params.dir ? a->params.dir : td_families[a->arch]->model_type, a->n_ranks,
                     r, what);
}

static void compare_bits(const struct run *a, const struct run *b, const char *what)
{
    if (memcmp(a->logits, b->logits, (size_t)N_TOKENS * (size_t)a->vocab * sizeof(float)))
        fail_msg("%s, %d ranks: other logits with %s", td_families[a->arch]->model_type, a->n_ranks,
                 what);
    compare_caches(a, b, what);
}

/* Ranks that share a head hold the same bytes of it: either can be read for the other. */
static void compare_replicas(const struct run *one, const struct run *many)
{
    int32_t n = many->n_ranks / one->n_kv_heads;
    for (int32_t r = 0; r < many->n_ranks && n > 1; r++)
        for (int32_t t = 0; t < N_TOKENS; t++)
            for (int32_t layer = 0; layer < one->n_layers; layer++)
                for (int kv = 0; kv < 2; kv++) {
                    size_t elem = many->block_bytes / ((size_t)BS * (size_t)many->n_layers * 2 *
                                                       (size_t)many->head_dim);
                    assert_memory_equal(kv_row(many, r, t, layer, kv, 0, elem),
                                        kv_row(many, r / n * n, t, layer, kv, 0, elem),
                                        (size_t)many->head_dim * elem);
                }
}

/* Which families have been shared by 2 and by 4 ranks. */
static bool shared_by[TD_N_FAMILIES][2];

static void note_degree(enum td_arch arch, int32_t n_ranks)
{
    if (n_ranks == 2 || n_ranks == 4) shared_by[arch][n_ranks == 4] = true;
}

/* Tolerances: what n partial sums rounded apart may differ by after three layers. f32: 2^-23 of
 * activations of a few units, over some hundred additions. bf16: an activation that rounds to
 * the other neighbour (2^-8 of it) in one of the last layers. Seen: up to 3.6e-6, 0.0012, and
 * 2.9e-5 with the trained model, whose activations are larger. */
static void compare_degrees(const struct td_model_params *params, const int32_t *degrees,
                            size_t elem, double tol)
{
    static size_t n_degrees; /* of all models: the short form takes two of four in turn */
    struct run one = run_group(params, 1, 1, N_TOKENS);
    for (; *degrees; degrees++) {
        struct run many = run_group(params, *degrees, 1, N_TOKENS);
        for (int32_t r = 0; r < *degrees; r++) assert_int_equal(many.hashes[r], one.hashes[0]);
        assert_true(many.weight_bytes < one.weight_bytes);
        double d = worst(one.logits, many.logits, (size_t)N_TOKENS * (size_t)one.vocab);
        if (!(d <= tol))
            fail_msg("%s, %d ranks: logits differ by %g from one rank's, allowed %g",
                     td_families[one.arch]->model_type, *degrees, d, tol);
        if (!one.is_latent) { /* whose rows every rank has, and no head */
            compare_kv(&one, &many, elem, tol);
            compare_replicas(&one, &many);
        }
        static const struct {
            int32_t n_threads, chunk;
            const char *what;
        } others[] = {{1, N_TOKENS, "another run"},
                      {2, N_TOKENS, "two threads"},
                      {1, 1, "chunks of 1"},
                      {2, 7, "chunks of 7"}};
        for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
            if (is_short() && k % 2 == (n_degrees + n_degrees / 2) % 2) continue;
            struct run again = run_group(params, *degrees, others[k].n_threads, others[k].chunk);
            compare_bits(&many, &again, others[k].what);
            run_free(&again);
        }
        n_degrees++;
        note_degree(one.arch, *degrees);
        run_free(&many);
    }
    run_free(&one);
}

#define SHAPE(HEADS, KV)                                                                           \
    "\"hidden_size\":96,\"intermediate_size\":208,\"num_hidden_layers\":3,\"num_attention_"        \
    "heads\":" #HEADS ",\"num_key_value_heads\":" #KV                                              \
    ",\"head_dim\":16,\"vocab_size\":131,\"max_position_embeddings\":128,\"rms_norm_eps\":1e-05,"  \
    "\"rope_theta\":10000.0,\"hidden_act\":\"silu\","

#define GEMMA_SHAPE                                                                                \
    "\"hidden_size\":96,\"intermediate_size\":208,\"num_hidden_layers\":3,\"num_attention_"        \
    "heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,\"vocab_size\":131,"                      \
    "\"max_position_embeddings\":128,"

static void random_models(void **state)
{
    (void)state;
    static const int32_t all[] = {2, 4, 8, 0}, some[] = {2, 4, 0};
    struct td_model_params p = {.random_config = config_path, .dtype = "f32"};
    /* every bias, heads split 8 ways, KV heads shared from 4 ranks on */
    write_config("{\"model_type\":\"llama\"," SHAPE(
        8, 2) "\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":false,\"torch_"
              "dtype\":\"float32\"}");
    compare_degrees(&p, all, 4, 2e-5);
    /* q and k norms, tied embeddings, bf16 */
    p.dtype = "bf16";
    write_config("{\"model_type\":\"qwen3\"," SHAPE(
        8,
        4) "\"attention_bias\":false,\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\"}");
    compare_degrees(&p, some, 2, 0.04);
    p.dtype = "f32";
    write_config("{\"model_type\":\"qwen2\"," SHAPE(
        4, 1) "\"tie_word_embeddings\":true,\"sliding_window\":16,\"use_sliding_window\":false,"
              "\"torch_dtype\":\"float32\"}");
    compare_degrees(&p, some, 4, 2e-5);
    /* sums over ranks are normed before they are added; soft caps, windows of some layers */
    write_config("{\"model_type\":\"gemma2\"," GEMMA_SHAPE
                 "\"sliding_window\":16,\"attn_logit_softcapping\":2.0,\"torch_dtype\":"
                 "\"float32\"}");
    compare_degrees(&p, some, 4, 2e-5);
    /* parts of fused tensors, of heads whose rows get another order; two norms more */
    write_config("{\"model_type\":\"glm4\"," GEMMA_SHAPE "\"torch_dtype\":\"float32\"}");
    compare_degrees(&p, some, 4, 2e-5);
    write_config("{\"model_type\":\"phi3\"," GEMMA_SHAPE
                 "\"partial_rotary_factor\":0.75,\"torch_dtype\":\"float32\"}");
    compare_degrees(&p, some, 4, 2e-5);
    /* one sum for attention and MLP */
    write_config("{\"model_type\":\"cohere2\"," GEMMA_SHAPE
                 "\"sliding_window\":16,\"torch_dtype\":\"float32\"}");
    compare_degrees(&p, some, 4, 2e-5);
}

/* Families whose golden models have sizes that 4 ranks cannot share. */
static void families_of_4_ranks(void **state)
{
    (void)state;
    static const int32_t four[] = {4, 0};
    static const char *const configs[] = {
        "{\"model_type\":\"mistral\"," GEMMA_SHAPE "\"sliding_window\":16}",
        "{\"model_type\":\"gemma\"," GEMMA_SHAPE "\"rms_norm_eps\":1e-6}",
        "{\"model_type\":\"gemma3_text\"," GEMMA_SHAPE
        "\"sliding_window\":16,\"sliding_window_pattern\":2}",
        "{\"model_type\":\"granite\"," GEMMA_SHAPE
        "\"mlp_bias\":true,\"embedding_multiplier\":6.0,\"attention_multiplier\":0.2,"
        "\"residual_multiplier\":0.3,\"logits_scaling\":2.0}",
        "{\"model_type\":\"olmo2\"," GEMMA_SHAPE "\"attention_bias\":true}",
        "{\"model_type\":\"smollm3\"," GEMMA_SHAPE "\"no_rope_layers\":[1,0,1]}",
        "{\"model_type\":\"glm\"," GEMMA_SHAPE "\"attention_bias\":true}",
        "{\"model_type\":\"cohere\"," GEMMA_SHAPE "\"logit_scale\":0.25,\"use_qk_norm\":true}",
        "{\"model_type\":\"internlm3\"," GEMMA_SHAPE "\"bias\":true,\"qkv_bias\":true}",
        "{\"model_type\":\"chatglm\",\"hidden_size\":96,\"ffn_hidden_size\":208,\"num_layers\":3,"
        "\"num_attention_heads\":4,\"padded_vocab_size\":131,\"seq_length\":128,"
        "\"kv_channels\":16,\"multi_query_attention\":true,\"multi_query_group_num\":2,"
        "\"add_qkv_bias\":true}",
        "{\"model_type\":\"baichuan\"," GEMMA_SHAPE "\"z_loss_weight\":0}",
        "{\"model_type\":\"baichuan\",\"hidden_size\":96,\"intermediate_size\":208,"
        "\"num_hidden_layers\":3,\"num_attention_heads\":12,\"vocab_size\":131,"
        "\"model_max_length\":128}",
        "{\"model_type\":\"kimi_k2\",\"hidden_size\":96,\"intermediate_size\":208,"
        "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"vocab_size\":131,"
        "\"max_position_embeddings\":128,\"num_key_value_heads\":4,\"q_lora_rank\":28,"
        "\"kv_lora_rank\":32,\"qk_nope_head_dim\":12,\"qk_rope_head_dim\":8,\"v_head_dim\":10,"
        "\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"n_shared_experts\":2,\"n_group\":1,"
        "\"topk_group\":1,\"moe_intermediate_size\":24,\"first_k_dense_replace\":1}",
    };
    const struct td_model_params p = {.random_config = config_path, .dtype = "f32"};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        write_config(configs[i]);
        compare_degrees(&p, four, 4, 2e-5);
    }
}

static void trained_model(void **state)
{
    (void)state;
    static const int32_t two[] = {2, 0};
    struct td_model_params p = {.dir = TD_POCKET_DIR, .dtype = "f32", .max_model_len = 64};
    compare_degrees(&p, two, 4, 2e-4);
}

static int n_shared; /* pairs of a golden model and a number of ranks that share its experts */

/* A model of tests/golden and its logits. */
struct golden {
    char dir[300];
    int32_t *tokens, n;
    float *logits;
    size_t logits_bytes;
};

static struct golden golden_open(const char *folder, const char *name)
{
    struct golden d;
    char path[400], *bytes;
    struct td_err err = {0};
    json_t *root;
    snprintf(d.dir, sizeof d.dir, "%s/%.150s", folder, name);
    snprintf(path, sizeof path, "%s/tokens.json", d.dir);
    if (td_json_load_file(path, (size_t)1 << 20, &root, &err)) fail_msg("%s", err.msg);
    d.tokens = rig_ids(json_object_get(root, "tokens"), &d.n);
    json_decref(root);
    snprintf(path, sizeof path, "%s/logits.f32", d.dir);
    if (td_file_read(path, (size_t)1 << 24, &bytes, &d.logits_bytes, &err)) fail_msg("%s", err.msg);
    d.logits = (float *)(void *)bytes;
    return d;
}

/* Whole experts on each rank, or experts that ranks share: the same bits. */
static void check_expert_ranks(const struct run *ask, const struct run *want)
{
    for (int32_t ep = 1; ep < ask->n_ranks; ep *= 2) {
        struct run other = *ask;
        struct td_model_config c;
        struct td_err err = {0};
        int32_t n_shares = ask->n_ranks / ep;
        assert_int_equal(td_model_config_load(ask->params.dir, &c, &err), TD_OK);
        if (!c.experts.n) return;
        if (c.experts.intermediate % n_shares || c.hidden % n_shares) continue;
        other.params.expert_ranks = ep;
        other.params.experts = "lazy";
        other = run_ranks(other);
        if (memcmp(want->logits, other.logits, (size_t)ask->n * (size_t)want->vocab * 4))
            fail_msg("%s, %d ranks: other logits with experts in %d parts", ask->params.dir,
                     ask->n_ranks, ep);
        compare_caches(want, &other, "experts in other parts");
        compare_counts(want, &other, false);
        if (ep == 1) assert_true(other.counts[0].busiest_part_rows == other.counts[0].rows);
        for (int32_t r = 0; r < ask->n_ranks; r++)
            assert_int_equal(other.hashes[r], want->hashes[r]);
        run_free(&other);
        n_shared++;
    }
}

/* way: in short form the one of `others` that is taken, by its remainder. */
static void check_golden(const struct golden *d, int32_t n_ranks, int way, double *worst_of_all)
{
    static const struct {
        int32_t n_threads, chunk;
        const char *what;
    } others[] = {{2, 64, "two threads"}, {1, 1, "chunks of 1"}, {2, 7, "chunks of 7"}};
    struct run ask = {.n_ranks = n_ranks,
                      .n_threads = 1,
                      .chunk = d->n,
                      .params = {.dir = d->dir, .dtype = "f32", .max_model_len = 64},
                      .tokens = d->tokens,
                      .n = d->n},
               one_rank = ask;
    one_rank.n_ranks = 1;
    struct run run = run_ranks(ask), one = run_ranks(one_rank);
    size_t n = (size_t)d->n * (size_t)run.vocab;
    double largest = 0;
    assert_int_equal(d->logits_bytes, n * sizeof(float));
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)d->logits[i]));
    double off = worst(run.logits, d->logits, n) / largest;
    if (!(off <= 1e-4))
        fail_msg("%s, %d ranks: off by %g of the largest logit, must be at most 1e-4", d->dir,
                 n_ranks, off);
    *worst_of_all = fmax(*worst_of_all, off);
    for (int32_t r = 0; r < n_ranks; r++) assert_int_equal(run.hashes[r], one.hashes[0]);
    if (strstr(d->dir, "/latent/")) /* every rank has the rows of all heads */
        for (int32_t r = 1; r < n_ranks; r++)
            assert_memory_equal(run.kv[0], run.kv[r], run.kv_bytes);
    for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        if (is_short() && k != (size_t)way % (sizeof others / sizeof *others)) continue;
        ask.n_threads = others[k].n_threads;
        ask.chunk = others[k].chunk;
        struct run again = run_ranks(ask);
        if (memcmp(run.logits, again.logits, d->logits_bytes))
            fail_msg("%s, %d ranks: other logits with %s", d->dir, n_ranks, others[k].what);
        compare_caches(&run, &again, others[k].what);
        run_free(&again);
    }
    check_expert_ranks(&ask, &run);
    compare_counts(&one, &run, true);
    run_free(&run);
    run_free(&one);
}

/* Mixtures, latent attention and families with tensors of their own that 2 or 4 ranks can share,
 * against the reference. */
static void golden_models(void **state)
{
    (void)state;
    static const char *const folders[] = {"tests/golden/mixtures", "tests/golden/latent",
                                          "tests/golden/families"};
    int n = 0, seen[TD_N_FAMILIES] = {0};
    double off = 0;
    for (size_t f = 0; f < sizeof folders / sizeof *folders; f++) {
        DIR *dir = opendir(folders[f]);
        if (!dir) fail_msg("%s is missing (run from the source root)", folders[f]);
        for (struct dirent *e; (e = readdir(dir));) {
            struct td_model_config c;
            struct td_err err = {0};
            if (strchr(e->d_name, '.')) continue;
            struct golden d = golden_open(folders[f], e->d_name);
            if (td_model_config_load(d.dir, &c, &err)) fail_msg("%s", err.msg);
            for (int32_t n_ranks = 2; n_ranks <= 4; n_ranks *= 2) {
                if (td_model_check_ranks(&c, n_ranks, &err)) continue;
                check_golden(&d, n_ranks, seen[c.arch], &off);
                note_degree(c.arch, n_ranks);
                seen[c.arch]++;
                n++;
            }
            free(d.tokens);
            free(d.logits);
        }
        closedir(dir);
    }
    printf("ranks: %d pairs of a golden model and a degree, worst error %.2g of the largest "
           "logit; %d more whose ranks share experts\n",
           n, off, n_shared);
    assert_true(n_shared > 30);
    static const enum td_arch all[] = {
        TD_ARCH_QWEN3_MOE, TD_ARCH_QWEN2_MOE,   TD_ARCH_MIXTRAL,     TD_ARCH_GPT_OSS,
        TD_ARCH_GLM4_MOE,  TD_ARCH_DEEPSEEK_V2, TD_ARCH_DEEPSEEK_V3, TD_ARCH_GLM4_MOE_LITE,
        TD_ARCH_INTERNLM2, TD_ARCH_CHATGLM,     TD_ARCH_BAICHUAN};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (seen[all[i]] < 2) fail_msg("%s: too few", td_families[all[i]]->model_type);
}

/* 40 heads, as in Baichuan 13B: those of 32, and every second of 64. A rank has its own. */
static void slopes_of_heads(void **state)
{
    (void)state;
    float all[40], some[10], of_8[8];
    td_model_alibi_slopes(40, 0, 40, all);
    for (int i = 0; i < 40; i++) {
        double want = i < 32 ? pow(2, -(i + 1) / 4.0) : pow(2, -(2 * (i - 32) + 1) / 8.0);
        if (fabs((double)all[i] - want) > 1e-7 * want)
            fail_msg("slope of head %d is %.9g, must be %.9g", i, (double)all[i], want);
    }
    for (int rank = 0; rank < 4; rank++) {
        td_model_alibi_slopes(40, 10 * rank, 10, some);
        assert_memory_equal(some, all + (ptrdiff_t)10 * rank, sizeof some);
    }
    td_model_alibi_slopes(8, 0, 8, of_8);
    for (int i = 0; i < 8; i++) assert_true(of_8[i] == ldexpf(1, -(i + 1)));
}

/* Behind the tests above: no family drops out of them unseen. */
static void every_family_has_been_shared(void **state)
{
    (void)state;
    for (int i = 0; i < TD_N_FAMILIES; i++)
        for (int four = 0; four < 2; four++)
            if (!shared_by[i][four])
                fail_msg("%s: not shared by %d ranks", td_families[i]->model_type, four ? 4 : 2);
}

/* Layers that rank 0 is told of while a forward runs are in every rank's cache, whether the
 * forward ends with logits or without. */
struct told {
    struct rig *rigs[2];
    int32_t done, n, n_calls;
};

struct told_rank {
    struct told *t;
    struct td_comm_segment *segment;
    int32_t rank;
};

static void check_told(void *ctx, int32_t n_layers)
{
    struct told *t = ctx;
    t->n_calls++;
    assert_int_equal(n_layers, t->n_calls);
    for (int r = 0; r < 2; r++) {
        const struct rig *g = t->rigs[r];
        const struct td_kv_layout *l = &g->kv;
        for (int32_t pos = t->done; pos < t->done + t->n; pos++)
            for (int32_t row = 0; row < n_layers * 2 * l->n_kv_heads; row++) {
                const uint8_t *block = g->cache + (size_t)g->tables[1][pos / BS] * l->block_bytes;
                const uint8_t *at = block + ((size_t)row * BS + (size_t)(pos % BS)) * l->row_bytes;
                for (size_t i = 0; i < l->row_bytes; i += 4) {
                    uint32_t bits;
                    memcpy(&bits, at + i, 4);
                    if (bits == UINT32_MAX)
                        fail_msg("told of %d layers: rank %d has not stored row %d of token %d",
                                 n_layers, r, row, pos);
                }
            }
    }
}

static void *told_rank(void *arg)
{
    struct told_rank *me = arg;
    struct td_comm *comm = NULL;
    struct td_comm_config cfg = {.timeout_ms = 30000};
    struct rig g;
    assert_int_equal(td_comm_open(me->segment, me->rank, &cfg, &comm, NULL), TD_OK);
    me->t->rigs[me->rank] = &g; /* the group's first meeting comes after it */
    rig_open(&g,
             &(struct td_model_params){
                 .dir = TD_POCKET_DIR, .dtype = "f32", .max_model_len = 64, .comm = comm},
             1, BS, MAX_TOKENS, MAX_TOKENS);
    const struct td_forward_layers layers = {.done = check_told, .ctx = me->t, .every = 1};
    for (int32_t done = 0; done < 24; done += 12) {
        int32_t tokens[12], positions[12], row_seq[12] = {0}, wanted[1] = {11};
        for (int32_t i = 0; i < 12; i++) {
            tokens[i] = token(done + i, g.vocab);
            positions[i] = done + i;
        }
        const int32_t *table = g.tables[1];
        struct td_forward_args a = {.tokens = tokens,
                                    .positions = positions,
                                    .row_seq = row_seq,
                                    .block_tables = &table,
                                    .n_rows = 12};
        a.kv_base = g.cache, a.kv = &g.kv, a.logit_rows = wanted, a.n_logit_rows = done ? 1 : 0;
        if (me->rank == 0) {
            me->t->done = done, me->t->n = 12, me->t->n_calls = 0;
            a.layers = &layers;
        }
        float *logits;
        assert_int_equal(td_model_forward(g.model, g.ws, &a, &logits), TD_OK);
        if (me->rank == 0) assert_int_equal(me->t->n_calls, g.kv.n_layers);
    }
    assert_int_equal(td_comm_barrier(comm), TD_OK); /* rank 0 has looked */
    rig_close(&g);
    td_comm_close(comm);
    return NULL;
}

static void layers_are_told_when_all_ranks_have_them(void **state)
{
    (void)state;
    struct td_comm_segment segment = {0};
    struct td_err err = {0};
    struct told t = {0};
    struct told_rank ranks[2];
    pthread_t threads[2];
    if (td_comm_segment_create(2, 4096, &segment, &err)) fail_msg("%s", err.msg);
    for (int32_t r = 0; r < 2; r++) {
        ranks[r] = (struct told_rank){&t, &segment, r};
        assert_int_equal(pthread_create(&threads[r], NULL, told_rank, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < 2; r++) pthread_join(threads[r], NULL);
    td_comm_segment_close(&segment);
}

static void refusals(void **state)
{
    (void)state;
    struct td_model_config c = {.n_heads = 12, .n_kv_heads = 6, .intermediate = 40, .vocab = 100};
    struct td_err err = {0};
    static const struct {
        int32_t tp, heads, kv, inter, vocab;
        const char *says;
    } cases[] = {
        {3, 12, 6, 42, 100, "tp is 3, must be 1, 2, 4, 8 or 16"},
        {0, 12, 6, 42, 100, "tp is 0, must be 1, 2, 4, 8 or 16"},
        {32, 32, 32, 64, 100, "tp is 32, must be"},
        {8, 12, 6, 40, 100, "tp is 8, must divide num_attention_heads 12"},
        {4, 12, 6, 40, 100, "tp is 4, must divide num_key_value_heads 6 or be a multiple of it"},
        {4, 12, 4, 42, 100, "tp is 4, must divide intermediate_size 42"},
        {16, 16, 16, 32, 12, "tp is 16, must be at most vocab_size 12"},
        {1, 7, 7, 9, 1, ""},
        {2, 12, 6, 40, 100, ""},
        {4, 12, 2, 40, 100, ""},
        {4, 12, 4, 40, 100, ""},
        {16, 16, 1, 32, 100, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c.n_heads = cases[i].heads;
        c.n_kv_heads = cases[i].kv;
        c.intermediate = cases[i].inter;
        c.vocab = cases[i].vocab;
        td_status s = td_model_check_ranks(&c, cases[i].tp, &err);
        if (s != (cases[i].says[0] ? TD_ERR_UNSUPPORTED : TD_OK) ||
            (s && !strstr(err.msg, cases[i].says)))
            fail_msg("case %zu: %s %s, expected %s", i, td_status_name(s), err.msg, cases[i].says);
    }
    c.experts.n = 8;
    c.experts.shared = 6;
    c.experts.step = 1;
    assert_int_equal(td_model_check_ranks(&c, 2, &err), TD_OK);
    assert_int_equal(td_model_check_ranks(&c, 4, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "tp is 4, must divide the 6 rows of the shared experts"));
    c.experts.n = c.experts.shared = 0;
}

/* What ep cannot be; one rank opens alone, since that is said before a weight is read. */
static void expert_ranks_refused(void **state)
{
    (void)state;
    static const struct {
        int32_t n_ranks, ep;
        const char *says;
    } cases[] = {{1, 2, "ep is 2, must be 0 or divide tp 1"},
                 {4, 3, "ep is 3, must be 0 or divide tp 4"},
                 {4, 8, "ep is 8, must be 0 or divide tp 4"},
                 {4, -1, "ep is -1, must be 0 or divide tp 4"},
                 {4, 2,
                  "ep is 2 of tp 4, so 2 ranks share an expert: that must divide its 23 "
                  "rows and hidden_size 96"}};
    write_config("{\"model_type\":\"qwen3_moe\"," SHAPE(
        8, 4) "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":23,"
              "\"torch_dtype\":\"float32\"}");
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct td_comm_segment segment;
        struct td_comm *comm;
        struct td_comm_config cfg = {0};
        struct td_err err = {0};
        struct td_model *model = NULL;
        int32_t n = cases[k].n_ranks;
        assert_int_equal(td_comm_segment_create(n, 0, &segment, &err), TD_OK);
        assert_int_equal(td_comm_open(&segment, 0, &cfg, &comm, &err), TD_OK);
        struct td_model_params p = {.random_config = config_path,
                                    .dtype = "f32",
                                    .comm = comm,
                                    .expert_ranks = cases[k].ep,
                                    .quiet = true};
        assert_true(td_model_open(&p, &model, &err) < 0);
        if (!strstr(err.msg, cases[k].says)) fail_msg("case %zu: %s", k, err.msg);
        td_comm_close(comm);
        td_comm_segment_close(&segment);
    }
}

/* A rank that cannot load its part ends the others' load, and they say why. */
static void rank_fails_to_load(void **state)
{
    (void)state;
    struct td_comm_segment segment;
    struct td_comm *comm[2];
    struct td_comm_config cfg = {0};
    struct td_err err = {0};
    struct td_thread_pool *threads;
    struct td_model *model = NULL;
    write_config("{\"model_type\":\"llama\"," SHAPE(
        8, 2) "\"tie_word_embeddings\":false,\"torch_dtype\":\"float32\"}");
    assert_int_equal(td_comm_segment_create(2, 0, &segment, &err), TD_OK);
    for (int32_t r = 0; r < 2; r++)
        assert_int_equal(td_comm_open(&segment, r, &cfg, &comm[r], &err), TD_OK);
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    td_comm_abort(comm[1], "rank 1: no room for weights");
    struct td_model_params p = {.random_config = config_path,
                                .dtype = "f32",
                                .threads = threads,
                                .comm = comm[0],
                                .quiet = true};
    assert_int_equal(td_model_open(&p, &model, &err), TD_ERR_PEER);
    assert_string_equal(err.msg, "loading weights: rank 1: no room for weights");
    td_thread_pool_destroy(threads);
    for (int32_t r = 0; r < 2; r++) td_comm_close(comm[r]);
    td_comm_segment_close(&segment);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_models),
        cmocka_unit_test(families_of_4_ranks),
        cmocka_unit_test(trained_model),
        cmocka_unit_test(golden_models),
        cmocka_unit_test(slopes_of_heads),
        cmocka_unit_test(every_family_has_been_shared),
        cmocka_unit_test(layers_are_told_when_all_ranks_have_them),
        cmocka_unit_test(refusals),
        cmocka_unit_test(expert_ranks_refused),
        cmocka_unit_test(rank_fails_to_load),
    };
    return cmocka_run_group_tests_name("ranks", tests, setup, teardown);
}
