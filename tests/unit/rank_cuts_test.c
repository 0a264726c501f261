/* rank_cuts_test.c - quantised weights that ranks share: what a rank has packed, read back as
 * numbers, are the same rows and columns of what one rank has, bit for bit, by every kernel table
 * of this CPU; columns may begin and end inside a group of integers, and where a cut would break
 * blocks that belong together the model is refused by name. */
#include "tests/golden/model_rig.h"
#include "tests/unit/gguf_file.h"

#include <dirent.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "common/base/random.h"
#include "common/model/model_internal.h"
#include "common/model/quant_tensors.h"
#include "kernels/format.h"
#include "kernels/scaled.h"

enum { MAX_RANKS = 4 };
#define CHECKPOINTS "tests/golden/checkpoints"

static _Atomic int n_rows_compared; /* by all ranks' threads */

/* ---- what a rank has packed ------------------------------------------------------------------ */

/* Row `row` of a matrix as numbers; false: its piece is of a plain type. */
static bool read_row(const struct td_model *m, const struct td_matrix *x, int32_t row, float *ret)
{
    int32_t i = 0;
    for (; i < x->n_pieces - 1 && row >= x->pieces[i].n_out; i++) row -= x->pieces[i].n_out;
    const struct td_weight *w = &x->pieces[i];
    assert_true(row >= 0 && row < w->n_out);
    if (w->format->dtype) return false;
    td_ops_blocks(m->ops, w->format)->read_row(w, row, ret);
    return true;
}

struct pair {
    const struct td_model_params *params;
    const struct td_model *whole, *mine;
    int32_t rank, n_ranks;
    float *a, *b; /* a row of each */
};

/* Rows [row, row + n) of a rank's matrix are rows [from, from + n) of the whole one, of which the
 * rank has columns [col, col + n_in). */
static void compare_rows(struct pair *p, const struct td_matrix *whole, int32_t from,
                         const struct td_matrix *mine, int32_t row, int32_t n, int32_t col,
                         const char *what)
{
    size_t n_in = (size_t)mine->pieces[0].n_in;
    assert_true(col + mine->pieces[0].n_in <= whole->pieces[0].n_in);
    for (int32_t i = 0; i < n; i++) {
        bool is_packed = read_row(p->whole, whole, from + i, p->a);
        assert_true(read_row(p->mine, mine, row + i, p->b) == is_packed);
        if (!is_packed) return;
        for (size_t k = 0; k < n_in; k++)
            if (memcmp(&p->a[(size_t)col + k], &p->b[k], sizeof *p->b))
                fail_msg("%s by %s: %s of rank %d of %d: [%d, %zu] is %a, one rank has %a",
                         p->params->dir ? p->params->dir : p->params->dtype, p->mine->ops->name,
                         what, p->rank, p->n_ranks, row + i, k, (double)p->b[k],
                         (double)p->a[(size_t)col + k]);
        n_rows_compared++;
    }
}

static void compare_layer(struct pair *p, const struct td_layer *whole, const struct td_layer *mine)
{
    const struct td_model_config *c = &p->whole->config;
    int32_t r = p->rank, n = p->n_ranks, dim = c->head_dim, q = c->n_heads * dim,
            kv = c->n_kv_heads * dim, my_q = q / n, ff = c->intermediate, my_ff = ff / n,
            my_kv = c->n_kv_heads >= n ? kv / n : dim,
            kv_from = c->n_kv_heads >= n ? r * my_kv : r * c->n_kv_heads / n * dim;
    compare_rows(p, &whole->qkv, r * my_q, &mine->qkv, 0, my_q, 0, "q");
    compare_rows(p, &whole->qkv, q + kv_from, &mine->qkv, my_q, my_kv, 0, "k");
    compare_rows(p, &whole->qkv, q + kv + kv_from, &mine->qkv, my_q + my_kv, my_kv, 0, "v");
    compare_rows(p, &whole->o, 0, &mine->o, 0, c->hidden, r * my_q, "o");
    compare_rows(p, &whole->gate_up, r * my_ff, &mine->gate_up, 0, my_ff, 0, "gate");
    compare_rows(p, &whole->gate_up, ff + r * my_ff, &mine->gate_up, my_ff, my_ff, 0, "up");
    compare_rows(p, &whole->down, 0, &mine->down, 0, c->hidden, r * my_ff, "down");
}

struct rank {
    const struct td_model *whole;
    const struct td_model_params *params;
    struct td_comm_segment *segment;
    int32_t rank, n_ranks;
    const char *refused; /* what opening must say; NULL: it must succeed */
};

static struct td_model *open_model(struct td_model_params p, struct td_err *err)
{
    struct td_model *m = NULL;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &p.threads, err), TD_OK);
    p.quiet = true;
    if (!td_model_open(&p, &m, err)) return m;
    td_thread_pool_destroy(p.threads);
    return NULL;
}

static void close_model(struct td_model *m)
{
    struct td_thread_pool *threads = m ? m->threads : NULL;
    td_model_close(m);
    td_thread_pool_destroy(threads);
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;
    struct td_comm *comm = NULL;
    struct td_comm_config cfg = {.timeout_ms = 30000};
    struct td_err err = {0};
    struct td_model_params params = *me->params;
    assert_int_equal(td_comm_open(me->segment, me->rank, &cfg, &comm, NULL), TD_OK);
    params.comm = comm;
    struct td_model *mine = open_model(params, &err);
    if (!mine != (me->refused != NULL) || (!mine && !strstr(err.msg, me->refused)))
        fail_msg("rank %d of %d: %s, expected %s", me->rank, me->n_ranks,
                 mine ? "it opens" : err.msg, me->refused ? me->refused : "it to open");
    if (mine) {
        const struct td_model_config *c = &me->whole->config;
        size_t most = (size_t)(c->hidden + c->intermediate + c->n_heads * c->head_dim);
        struct pair p = {me->params, me->whole, mine, me->rank, 0, NULL, NULL};
        p.n_ranks = me->n_ranks;
        p.a = calloc(2 * most, sizeof *p.a);
        assert_non_null(p.a);
        p.b = p.a + most;
        for (int32_t i = 0; i < c->n_layers; i++)
            compare_layer(&p, &me->whole->layers[i], &mine->layers[i]);
        int32_t first = mine->logit_first[me->rank], end = mine->logit_first[me->rank + 1];
        compare_rows(&p, &me->whole->lm_head, first, &mine->lm_head, 0, end - first, 0, "lm_head");
        free(p.a);
    }
    close_model(mine);
    td_comm_close(comm);
    return NULL;
}

static void compare_ranks(const struct td_model_params *params, int32_t n_ranks,
                          const char *refused)
{
    struct td_comm_segment segment = {0};
    struct td_err err = {0};
    struct rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    struct td_model *whole = open_model(*params, &err);
    if (!whole) fail_msg("%s", err.msg);
    if (td_comm_segment_create(n_ranks, 4096, &segment, &err)) fail_msg("%s", err.msg);
    for (int32_t r = 0; r < n_ranks; r++) {
        ranks[r] = (struct rank){whole, params, &segment, r, n_ranks, refused};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < n_ranks; r++) pthread_join(threads[r], NULL);
    td_comm_segment_close(&segment);
    close_model(whole);
}

/* Every format that weights can be rounded to while they load, and every scheme of a directory. Of
 * --dtype, blocks of 256 values are cut by 2 ranks and not by 4. */
static void ranks_have_their_part(void **state)
{
    (void)state;
    static const char *const mixes[] = {"q8_0",   "q6_k",   "q5_k_m", "q5_k_s", "q5_1",   "q5_0",
                                        "q4_k_m", "q4_k_s", "q4_1",   "q4_0",   "iq4_nl", "mxfp4"};
    char path[] = "/tmp/rank_cuts_test_XXXXXX";
    int fd = mkstemp(path);
    static const char config[] =
        "{\"model_type\":\"llama\",\"hidden_size\":256,\"intermediate_size\":512,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
        "\"head_dim\":128,\"vocab_size\":67,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-05,"
        "\"rope_theta\":10000.0,\"hidden_act\":\"silu\",\"tie_word_embeddings\":false,"
        "\"torch_dtype\":\"float32\"}";
    assert_true(fd >= 0 && write(fd, config, sizeof config - 1) == (ssize_t)sizeof config - 1);
    close(fd);
    for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++) {
        struct td_model_params p = {.random_config = path, .dtype = mixes[i]};
        int before = n_rows_compared;
        compare_ranks(&p, 2, NULL);
        assert_true(n_rows_compared - before > 2 * (256 + 256 + 128 + 67 / 2));
        bool is_large = strstr(mixes[i], "_k");
        compare_ranks(&p, 4, is_large ? "blocks of 256 values tp 4 would cut" : NULL);
    }
    unlink(path);
}

/* A layer of random blocks of one type. The mask keeps every f16 among them finite. */
static void write_gguf(const char *path, const struct td_format *f, struct td_random *rng)
{
    enum { HIDDEN = 256, FF = 512, Q = 512, KV = 256, VOCAB = 67 };
    static const struct {
        const char *key;
        uint32_t value;
    } keys[] = {{"block_count", 1},
                {"context_length", 64},
                {"embedding_length", HIDDEN},
                {"feed_forward_length", FF},
                {"attention.head_count", 4},
                {"attention.head_count_kv", 2},
                {"attention.key_length", 128},
                {"attention.value_length", 128}};
    static const struct {
        const char *name;
        int32_t n_in, n_out; /* n_out 0: a norm */
    } rows[] = {{"token_embd", HIDDEN, VOCAB},    {"output", HIDDEN, VOCAB},
                {"output_norm", HIDDEN, 0},       {"blk.0.attn_norm", HIDDEN, 0},
                {"blk.0.ffn_norm", HIDDEN, 0},    {"blk.0.attn_q", HIDDEN, Q},
                {"blk.0.attn_k", HIDDEN, KV},     {"blk.0.attn_v", HIDDEN, KV},
                {"blk.0.attn_output", Q, HIDDEN}, {"blk.0.ffn_gate", HIDDEN, FF},
                {"blk.0.ffn_up", HIDDEN, FF},     {"blk.0.ffn_down", FF, HIDDEN}};
    struct gf file = {0};
    char name[64];
    float ones[HIDDEN];
    for (int i = 0; i < HIDDEN; i++) ones[i] = 1;
    gf_str(&file, "general.architecture", "llama");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(name, sizeof name, "llama.%s", keys[i].key);
        gf_u32(&file, name, keys[i].value);
    }
    gf_f32(&file, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(name, sizeof name, "%s.weight", rows[i].name);
        size_t n = (size_t)rows[i].n_out * td_format_bytes(f, rows[i].n_in);
        uint8_t *blocks = malloc(n + 1);
        assert_non_null(blocks);
        for (size_t k = 0; k < n; k++) blocks[k] = td_random_step(&rng->s) >> 40 & 0xbf;
        if (rows[i].n_out)
            gf_tensor(&file, name, rows[i].n_in, rows[i].n_out, f->gguf_type, blocks, n);
        else
            gf_tensor(&file, name, rows[i].n_in, 0, 0, ones, sizeof ones);
        free(blocks);
    }
    gf_write(&file, path);
}

/* Files of every type with blocks. Rows of q and k stand in pairs there, so a rank has rows in
 * another order, too. */
static void ranks_of_gguf(void **state)
{
    (void)state;
    char path[] = "/tmp/rank_cuts_test_XXXXXX";
    struct td_random rng = td_random_stream(7, 0);
    int fd = mkstemp(path), n = 0;
    assert_true(fd >= 0);
    close(fd);
    for (uint32_t type = 0; type < 64; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        write_gguf(path, f, &rng);
        struct td_model_params p = {.dir = path, .dtype = "bf16"};
        int before = n_rows_compared;
        compare_ranks(&p, 2, NULL);
        assert_int_equal(n_rows_compared - before, 512 + 2 * 256 + 2 * 256 + 1024 + 2 * 256 + 67);
        compare_ranks(&p, 4, f->block == 256 ? "blocks of 256 values tp 4 would cut" : NULL);
        n++;
    }
    assert_int_equal(n, 13);
    unlink(path);
}

/* Each directory, by every table (in short form by ref and one other, in turn) and in both compute
 * types. */
static void ranks_of_checkpoints(void **state)
{
    (void)state;
    DIR *dir = opendir(CHECKPOINTS);
    if (!dir) fail_msg("%s is missing (run from the source root)", CHECKPOINTS);
    const char *text = getenv("TANDEM_TEST_SHORT");
    bool is_short = text && strcmp(text, "1") == 0;
    int n = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        char path[300];
        if (strchr(e->d_name, '.')) continue;
        snprintf(path, sizeof path, "%s/%.200s", CHECKPOINTS, e->d_name);
        bool is_block = strcmp(e->d_name, "fp8_block") == 0;
        for (int i = 0; i < TD_N_OPS; i++) {
            const struct td_ops *ops = td_model_ops_by_name(td_ops_names[i]);
            if (!ops || (is_short && i != n % TD_N_OPS && strcmp(ops->name, "ref") != 0)) continue;
            struct td_model_params p = {.dir = path, .dtype = i % 2 ? "bf16" : "f32", .ops = ops};
            int before = n_rows_compared;
            for (int32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2)
                compare_ranks(&p, n_ranks,
                              is_block && n_ranks == 4 ? "blocks of 128 values tp 4 would cut"
                                                       : NULL);
            assert_true(n_rows_compared > before);
        }
        n++;
    }
    closedir(dir);
    assert_true(n >= 18);
    printf("rank cuts: %d checkpoints, %d rows equal\n", n, n_rows_compared);
}

/* ---- any columns of a quantised tensor ------------------------------------------------------- */

static void compare_cut(const struct td_tensor *t, int32_t row, int32_t col0, int32_t n_cols,
                        bool use_bf16, const float *whole)
{
    const struct td_quant_tensor *q = t->quant;
    struct td_format f;
    uint16_t *group_of = calloc((size_t)n_cols, sizeof *group_of);
    float *values = calloc((size_t)n_cols, sizeof *values);
    assert_true(group_of && values);
    td_quant_cut(q, col0, n_cols, use_bf16, group_of, &f);
    uint32_t *codes = calloc((size_t)f.block_bytes / 4 + 1, 4);
    assert_non_null(codes);
    q->read_rows(q, &f, col0, row, 1, (uint8_t *)codes);
    td_scaled_read(&f, codes, values);
    if (memcmp(values, whole + col0, (size_t)n_cols * sizeof *values))
        fail_msg("%s (%s): row %d, columns %d to %d: not the whole row's", t->name, t->dtype_name,
                 row, col0, col0 + n_cols);
    free(codes), free(values), free(group_of);
}

static void compare_cuts(const struct td_tensor *t, bool use_bf16, struct td_random *rng)
{
    const struct td_quant_tensor *q = t->quant;
    float *whole = calloc((size_t)q->n_in, sizeof *whole);
    uint16_t *group_of = calloc((size_t)q->n_in, sizeof *group_of);
    struct td_format f;
    assert_true(whole && group_of);
    td_quant_cut(q, 0, q->n_in, use_bf16, group_of, &f);
    uint32_t *codes = calloc((size_t)f.block_bytes / 4 + 1, 4);
    assert_non_null(codes);
    for (int k = 0; k < 20; k++) {
        int32_t row = (int32_t)td_random_below(rng, (uint64_t)q->n_out),
                col0 = (int32_t)td_random_below(rng, (uint64_t)q->n_in),
                n = 1 + (int32_t)td_random_below(rng, (uint64_t)(q->n_in - col0));
        q->read_rows(q, &f, 0, row, 1, (uint8_t *)codes);
        td_scaled_read(&f, codes, whole);
        compare_cut(t, row, col0, n, use_bf16, whole);
    }
    free(codes), free(whole), free(group_of);
}

/* Whatever columns a rank may have, of every scheme. */
static void any_columns(void **state)
{
    (void)state;
    const char *seed = getenv("SEED");
    uint64_t number = seed ? strtoull(seed, NULL, 10) : (uint64_t)time(NULL);
    struct td_random rng = td_random_stream(number, 0);
    printf("SEED=%llu\n", (unsigned long long)number);
    DIR *dir = opendir(CHECKPOINTS);
    assert_non_null(dir);
    int n = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        char path[300];
        struct td_model_config config;
        struct td_checkpoint c;
        struct td_err err = {0};
        if (strchr(e->d_name, '.')) continue;
        snprintf(path, sizeof path, "%s/%.200s", CHECKPOINTS, e->d_name);
        if (td_model_config_load(path, &config, &err) || td_checkpoint_open(path, &c, &err) ||
            td_quant_tensors(config.quant, path, &c, &err))
            fail_msg("%s", err.msg);
        for (int32_t i = 0; i < c.n_tensors; i++) {
            if (!c.tensors[i].quant) continue;
            compare_cuts(&c.tensors[i], n % 2, &rng);
            n++;
        }
        td_checkpoint_close(&c);
    }
    closedir(dir);
    assert_true(n > 18 * 7);
}

/* One row of codes of every kind, and a scale for each group. */
static void read_made_rows(const struct td_quant_tensor *t, const struct td_format *cut,
                           int32_t col0, int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    assert_true(row0 == 0 && n_rows == 1);
    struct td_scaled_row r = td_scaled_row_at(cut, ret_rows);
    for (int32_t k = 0; k < cut->block; k++) r.codes[k] = (uint8_t)((col0 + k) * 7 % 16);
    for (int32_t g = 0; g < cut->scaled.n_groups; g++)
        r.scales[g] = 1 + (float)(col0 / t->format.scaled.group + g) / 8;
}

/* Every cut of a row whose groups have any size, also one that 4 does not divide: rows in bf16 have
 * entries of a table that are rounded, and so have all cuts of them or none. */
static void any_group(void **state)
{
    (void)state;
    static const int32_t groups[] = {31, 32, 33, 34, 36, 99};
    float whole[99];
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        struct td_quant_tensor q = {.n_out = 1, .n_in = 99, .bits = 4, .read_rows = read_made_rows};
        struct td_tensor t = {.name = (char[]){"made"}, .quant = &q, .dtype_name = "table"};
        struct td_scaled *s = &q.format.scaled;
        *s = (struct td_scaled){.kind = TD_SCALED_TABLE, .scale_type = TD_F32, .group = groups[i]};
        s->n_groups = (q.n_in + s->group - 1) / s->group;
        for (int k = 0; k < 16; k++) s->table[k] = 1.0f / (float)(k + 3);
        q.format.bits = q.bits;
        q.format.block = q.n_in;
        q.format.block_bytes = (int32_t)td_scaled_row_bytes(s, q.n_in);
        uint16_t group_of[99];
        uint32_t row[256];
        struct td_format f;
        td_quant_cut(&q, 0, q.n_in, true, group_of, &f);
        assert_true((size_t)f.block_bytes <= sizeof row);
        q.read_rows(&q, &f, 0, 0, 1, (uint8_t *)row);
        td_scaled_read(&f, row, whole);
        assert_true((f.scaled.x == TD_SCALED_X_BF16) == (s->group % 4 == 0 || s->n_groups == 1));
        for (int32_t col0 = 0; col0 < q.n_in; col0++)
            for (int32_t n = 1; n <= q.n_in - col0; n++) compare_cut(&t, 0, col0, n, true, whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_columns),           cmocka_unit_test(any_group),
        cmocka_unit_test(ranks_have_their_part), cmocka_unit_test(ranks_of_gguf),
        cmocka_unit_test(ranks_of_checkpoints),
    };
    return cmocka_run_group_tests_name("rank cuts", tests, NULL, NULL);
}
