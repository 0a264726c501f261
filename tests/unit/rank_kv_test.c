/* rank_kv_test.c - KV that came from another number of parts, brought into order on devices: the
 * whole pools, all copies, against the same import in the host's memory (which engine_test.c has
 * compared with the plain formula). The devices are fakes, whose addresses nobody can follow and
 * whose copies run late. And ranks of several hosts: what rank 0 tells is looked at, parts reach
 * their places. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/random.h"
#include "common/engine/engine_ranks.h"
#include "tests/fake/fake_device.h"

enum { N_BLOCKS = 40, N_IDS = 19, TAIL = 64 };

static uint64_t random_state = 5;

static size_t draw(size_t n) { return td_random_index(&random_state, n); }

static enum td_dtype dtype = TD_BF16;
static bool is_latent;

static void plan(struct td_rank_kv *kv, int32_t n_kv_heads, int32_t n_ranks)
{
    struct td_err err = {0};
    struct td_kv_layout part = {.n_layers = 3,
                                .n_kv_heads = n_ranks < n_kv_heads ? n_kv_heads / n_ranks : 1,
                                .head_dim = 8,
                                .v_dim = is_latent ? TD_KV_V_IN_K : 0,
                                .block_size = 4,
                                .dtype = dtype};
    *kv = (struct td_rank_kv){0};
    if (td_kv_layout_init(&part, &err) || td_rank_kv_plan(kv, &part, n_kv_heads, n_ranks, 2, &err))
        fail_msg("%s", err.msg);
}

/* Byte i of a copy of the pool, on the ranks' devices. */
static uint8_t *byte_of(struct fake_device *d, const struct td_rank_kv *kv, void *const *rank_base,
                        int32_t copy, size_t i)
{
    size_t in = i % kv->whole.block_bytes;
    int32_t rank = (int32_t)(in / kv->part.block_bytes) * kv->n_copies + copy;
    return fake_device_bytes(d, rank_base[rank]) +
           i / kv->whole.block_bytes * kv->part.block_bytes + in % kv->part.block_bytes;
}

static void one_case(int32_t n_kv_heads, int32_t n_ranks, int32_t from_parts)
{
    struct td_rank_kv host, there;
    struct td_err err = {0};
    struct fake_device *d = fake_device_open("");
    struct td_thread_pool *threads = NULL;
    void *rank_base[TD_COMM_MAX_RANKS];
    plan(&host, n_kv_heads, n_ranks);
    plan(&there, n_kv_heads, n_ranks);
    size_t copy_bytes = N_BLOCKS * host.whole.block_bytes;
    uint8_t *base = malloc((size_t)host.n_copies * copy_bytes);
    assert_non_null(base);
    td_rank_kv_on_host(&host, 0, base, N_BLOCKS);
    for (int32_t r = 0; r < n_ranks; r++)
        rank_base[r] = fake_device_alloc(d, N_BLOCKS * there.part.block_bytes + TAIL);
    void *scratch = fake_device_alloc(d, TD_RANK_SCRATCH_BLOCKS * there.whole.block_bytes);
    if (td_rank_kv_over_devices(&there, fake_device_memory(d), rank_base, NULL, N_BLOCKS, TAIL,
                                scratch, &err))
        fail_msg("%s", err.msg);
    if (td_thread_pool_create(2, NULL, 0, &threads, &err)) fail_msg("%s", err.msg);
    for (int32_t copy = 0; copy < host.n_copies; copy++)
        for (size_t i = 0; i < copy_bytes; i++)
            *byte_of(d, &there, rank_base, copy, i) = base[(size_t)copy * copy_bytes + i] =
                (uint8_t)draw(256);

    int32_t ids[N_BLOCKS];
    for (int32_t i = 0; i < N_BLOCKS; i++) ids[i] = i;
    for (int32_t i = N_BLOCKS - 1; i > 0; i--) {
        int32_t k = (int32_t)draw((size_t)i + 1), t = ids[i];
        ids[i] = ids[k];
        ids[k] = t;
    }
    if (td_rank_kv_import(&host, ids, N_IDS, from_parts, threads, &err) ||
        td_rank_kv_import(&there, ids, N_IDS, from_parts, threads, &err))
        fail_msg("%s", err.msg);
    for (int32_t copy = 0; copy < host.n_copies; copy++)
        for (size_t i = 0; i < copy_bytes; i++)
            if (*byte_of(d, &there, rank_base, copy, i) != base[(size_t)copy * copy_bytes + i])
                fail_msg("%d KV heads, %d ranks, from %d parts: copy %d block %zu byte %zu differs",
                         n_kv_heads, n_ranks, from_parts, copy, i / host.whole.block_bytes,
                         i % host.whole.block_bytes);
    td_thread_pool_destroy(threads);
    td_rank_kv_free(&host);
    td_rank_kv_free(&there);
    fake_device_close(d);
    free(base);
}

static void test_import_on_devices(void **state)
{
    (void)state;
    for (int32_t n_kv = 1; n_kv <= 8; n_kv *= 2)
        for (int32_t n_ranks = 1; n_ranks <= 8; n_ranks *= 2)
            for (int32_t from = 1; from <= n_kv; from *= 2) one_case(n_kv, n_ranks, from);
    dtype = TD_INT8; /* codes and scales of a head move together */
    one_case(8, 2, 4);
    one_case(2, 4, 1);
    dtype = TD_BF16;
}

/* Blocks of 4 tokens, each with so many heads of K and V in all layers. */
static void check_bad_scales(int32_t n_kv_heads, size_t n_heads)
{
    static const uint32_t bad[] = {0x7f800000, 0x7fc00000, 0xff800000, 0x80000000, 0xbf800000};
    struct td_rank_kv kv;
    struct td_err err = {0};
    struct td_thread_pool *threads = NULL;
    int32_t ids[3] = {7, 0, 4};
    plan(&kv, n_kv_heads, 2);
    if (td_thread_pool_create(2, NULL, 0, &threads, &err)) fail_msg("%s", err.msg);
    uint8_t *base = calloc(N_BLOCKS, kv.whole.block_bytes);
    assert_non_null(base);
    td_rank_kv_on_host(&kv, 0, base, N_BLOCKS);
    assert_int_equal(kv.whole.block_bytes, n_heads * kv.whole.head_bytes);
    size_t at = td_kv_scales_at(TD_INT8, 4, 8);
    for (int k = 0; k < 200; k++) {
        size_t i = draw(3), head = draw(n_heads), token = draw(4);
        uint8_t *scale = base + (size_t)ids[i] * kv.whole.block_bytes + head * kv.whole.head_bytes +
                         at + token * 4;
        int32_t n_tokens = (int32_t)(1 + draw(12));
        uint32_t bits = bad[draw(5)];
        if (is_latent && draw(2)) bits >>= 16; /* the other half */
        memcpy(scale, &bits, 4);
        bool counts = (int32_t)(i * 4 + token) < n_tokens;
        td_status s = td_rank_kv_check(&kv, ids, (n_tokens + 3) / 4, n_tokens, threads, &err);
        assert_int_equal(s, counts ? TD_ERR_CORRUPT : TD_OK);
        memset(scale, 0, 4);
    }
    assert_non_null(strstr(err.msg, "holds a scale that is negative or no number"));
    uint32_t largest = is_latent ? 0x7f7f7f7f : 0x7f7fffff; /* the largest numbers */
    memcpy(base + (size_t)7 * kv.whole.block_bytes + at, &largest, 4);
    assert_int_equal(td_rank_kv_check(&kv, ids, 3, 12, threads, &err), TD_OK);
    td_thread_pool_destroy(threads);
    td_rank_kv_free(&kv);
    free(base);
}

/* Scales that no worker stores are refused, in every head and token that counts, and of a latent
 * row both. */
static void test_bad_scales(void **state)
{
    (void)state;
    dtype = TD_INT8;
    check_bad_scales(4, 3 * 2 * 4);
    is_latent = true;
    check_bad_scales(1, 3);
    is_latent = false;
    dtype = TD_BF16;
}

/* ---- ranks of several hosts: what a rank may be told ----------------------------------------- */

enum { BROADCAST = 4, STEP = 1, END = 2, COLLECTED = 3, DEAL = 4, INTS_MAX = 40 };

/* Rank 1 of two, told this by the test, which stands in the place of rank 0. */
static td_status told(struct td_model *model, const int32_t *ints, size_t n_bytes,
                      struct td_err *err)
{
    static const struct td_rank_boot boot = {
        .n_blocks = N_BLOCKS, .max_rows = 4, .max_seqs = 2, .max_blocks_per_seq = 3};
    const struct {
        uint32_t magic, kind;
        uint64_t call, bytes;
    } head = {0x746b6e72, BROADCAST, 0, n_bytes};
    int ends[2];
    struct td_comm *comm = NULL;
    struct td_rank_kv kv;
    plan(&kv, 4, 2);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    struct td_comm_channel channel = {.fd = ends[0], .name = "rank 0"};
    assert_int_equal(td_comm_open_channels(&channel, 2, 1, &(struct td_comm_config){0}, &comm, err),
                     TD_OK);
    assert_int_equal(write(ends[1], &head, sizeof head), sizeof head);
    assert_int_equal(write(ends[1], ints, n_bytes), n_bytes);
    td_status s = td_rank_follow(comm, model, NULL, &kv, &boot, err);
    td_comm_close(comm);
    close(ends[1]);
    td_rank_kv_free(&kv);
    return s;
}

/* A step, whose every count and index is then changed to one that it may not be: the rank ends
 * before it computes anything. */
static void test_bad_steps(void **state)
{
    (void)state;
    struct td_err err = {0};
    /* head (4) | tokens | positions | row_seq | logit rows | blocks of each sequence | ids */
    static const int32_t step[] = {STEP, 3, 1, 2, 5, 6, 7, 0, 4, 9, 0,
                                   0,    1, 2, 2, 3, 1, 2, 3, 4, 39},
                         end[] = {END, 0, 0, 0}, deal[] = {DEAL, 2, 0, 0, 7, N_BLOCKS};
    static const struct {
        int at;
        int32_t value;
    } wrong[] = {{0, 0},  {0, 9},  {1, -1},  {1, 5},         {1, INT32_MAX}, {2, -1},
                 {2, 4},  {3, -1}, {3, 3},   {3, 1},         {7, -1},        {8, 8},
                 {9, 12}, {10, 2}, {11, -1}, {13, 3},        {13, -1},       {14, 1},
                 {14, 4}, {15, 2}, {16, -1}, {20, N_BLOCKS}, {20, INT32_MAX}};
    const size_t n = sizeof step / sizeof *step;
    assert_int_equal(told(NULL, end, sizeof end, &err), TD_OK);
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        int32_t bad[INTS_MAX];
        memcpy(bad, step, sizeof step);
        bad[wrong[k].at] = wrong[k].value;
        if (k % 2 && wrong[k].at) bad[0] = COLLECTED;
        if (told(NULL, bad, sizeof step, &err) != TD_ERR_CORRUPT) fail_msg("case %zu passes", k);
        assert_non_null(strstr(err.msg, "bytes that are no step"));
    }
    assert_int_equal(told(NULL, step, (n - 1) * sizeof *step, &err), TD_ERR_CORRUPT);
    assert_int_equal(told(NULL, step, sizeof step - 2, &err), TD_ERR_CORRUPT);
    assert_int_equal(told(NULL, step, 3 * sizeof *step, &err), TD_ERR_CORRUPT);
    assert_int_equal(told(NULL, deal, sizeof deal, &err), TD_ERR_CORRUPT);
    assert_int_equal(told(NULL, deal, sizeof deal - 4, &err), TD_ERR_CORRUPT);
}

/* Tokens and positions are indices, too: of the embedding, and of the rotation's table. */
static void test_bad_tokens(void **state)
{
    (void)state;
    static const char config[] =
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_act\": "
        "\"silu\", \"hidden_size\": 32, \"intermediate_size\": 32, \"num_hidden_layers\": 1, "
        "\"num_attention_heads\": 4, \"max_position_embeddings\": 10, \"vocab_size\": 8, "
        "\"rms_norm_eps\": 1e-5, \"tie_word_embeddings\": true, \"bos_token_id\": 0, "
        "\"eos_token_id\": 0}";
    static const int32_t step[] = {STEP, 3, 1, 2, 5, 6, 7, 0, 4, 9, 0,
                                   0,    1, 2, 2, 3, 1, 2, 3, 4, 39};
    static const struct {
        int at;
        int32_t value;
        const char *says;
    } wrong[] = {{4, -1, "row 0 of rank 0's step is token -1 at position 0"},
                 {6, 8, "row 2 of rank 0's step is token 8 at position 9"},
                 {5, INT32_MAX, "row 1 of rank 0's step is token 2147483647 at position 4"},
                 {9, 10, "row 2 of rank 0's step is token 7 at position 10"}};
    char path[] = "/tmp/td-rank-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, config, sizeof config - 1), sizeof config - 1);
    close(fd);
    struct td_err err = {0};
    struct td_thread_pool *threads;
    struct td_model *model;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    struct td_model_params params = {
        .random_config = path, .dtype = "f32", .threads = threads, .quiet = true};
    if (td_model_open(&params, &model, &err)) fail_msg("%s", err.msg);
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        int32_t bad[INTS_MAX];
        memcpy(bad, step, sizeof step);
        bad[wrong[k].at] = wrong[k].value;
        assert_int_equal(told(model, bad, sizeof step, &err), TD_ERR_CORRUPT);
        if (!strstr(err.msg, wrong[k].says)) fail_msg("case %zu: %s", k, err.msg);
    }
    td_model_close(model);
    td_thread_pool_destroy(threads);
    unlink(path);
}

/* ---- parts that travel ----------------------------------------------------------------------- */

struct apart {
    pthread_t thread;
    int32_t rank, n_ranks;
    int sockets[16]; /* rank 0: its ends; others: [0] */
    int wrong;
};

enum { HEADS = 4, APART_BLOCKS = 6 };

static uint8_t pattern(int32_t part, int32_t id, size_t i, int salt)
{
    return (uint8_t)(part * 89 + id * 31 + (int)(i * 7) + salt);
}

/* Every rank has its parts of three blocks, rank 0 collects them; then it deals three others. */
static void *run_apart(void *arg)
{
    struct apart *me = arg;
    static const int32_t ids[] = {5, 0, 3}, others[] = {1, 4, 2};
    static const int32_t *tables[] = {ids, ids + 2};
    struct td_comm_channel channels[16];
    struct td_comm *comm = NULL;
    struct td_rank_kv kv;
    plan(&kv, HEADS, me->n_ranks);
    for (int32_t r = me->rank ? 0 : 1; r < (me->rank ? 1 : me->n_ranks); r++)
        channels[r] = (struct td_comm_channel){.fd = me->sockets[r]};
    size_t part = kv.part.block_bytes, stride = me->rank ? part : kv.whole.block_bytes;
    uint8_t *base = calloc(APART_BLOCKS, stride);
    int32_t mine = me->rank / kv.n_copies, positions[] = {0, 3, 4, 7, 1}, seqs[] = {0, 0, 0, 0, 1};
    struct td_forward_args a = {
        .n_rows = 5, .positions = positions, .row_seq = seqs, .block_tables = tables};
    me->wrong = td_comm_open_channels(channels, me->n_ranks, me->rank, &(struct td_comm_config){0},
                                      &comm, NULL) != TD_OK ||
                td_rank_kv_apart(&kv, me->rank, base, APART_BLOCKS, NULL) != TD_OK;
    for (int k = 0; k < 3; k++)
        for (size_t i = 0; i < part; i++)
            base[(size_t)ids[k] * stride + i] = pattern(mine, ids[k], i, 1);
    me->wrong += td_rank_collect(comm, &kv, &a) != TD_OK;
    for (int k = 0; k < 3 && me->rank == 0; k++)
        for (size_t i = 0; i < stride; i++) {
            uint8_t *at = base + (size_t)others[k] * stride + i;
            me->wrong += base[(size_t)ids[k] * stride + i] !=
                         pattern((int32_t)(i / part), ids[k], i % part, 1);
            me->wrong += *at != 0;
            *at = pattern((int32_t)(i / part), others[k], i % part, 2);
        }
    me->wrong += td_rank_deal(comm, &kv, others, 3) != TD_OK;
    for (int k = 0; k < 3; k++)
        for (size_t i = 0; i < part; i++)
            me->wrong += base[(size_t)others[k] * stride + i] != pattern(mine, others[k], i, 2) ||
                         base[(size_t)ids[k] * stride + i] != pattern(mine, ids[k], i, 1);
    me->wrong += td_comm_barrier(comm) != TD_OK;
    td_comm_close(comm);
    td_rank_kv_free(&kv);
    free(base);
    return NULL;
}

static void test_parts_travel(void **state)
{
    (void)state;
    for (int32_t n = 2; n <= 8; n *= 2) { /* 8: two ranks for each head */
        struct apart ranks[8];
        for (int32_t r = 0; r < n; r++) ranks[r] = (struct apart){.rank = r, .n_ranks = n};
        for (int32_t r = 1; r < n; r++) {
            int ends[2];
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
            ranks[0].sockets[r] = ends[0];
            ranks[r].sockets[0] = ends[1];
        }
        for (int32_t r = 0; r < n; r++)
            assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_apart, &ranks[r]), 0);
        for (int32_t r = 0; r < n; r++) pthread_join(ranks[r].thread, NULL);
        for (int32_t r = 0; r < n; r++) assert_int_equal(ranks[r].wrong, 0);
    }
}

/* What ranks compare of their copies of a model: the last byte counts, whatever the size. 4,158
 * bytes are 62 more than one piece, so that 63 steps of a whole number of bytes go nowhere. */
static void test_sample_of_a_model(void **state)
{
    (void)state;
    char path[] = "/tmp/td-sample-XXXXXX";
    static const off_t sizes[] = {1, 4095, 4096, 4097, 4158, 100003};
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t zeros = 0, last = 0;
        struct td_err err = {0};
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(ftruncate(fd, sizes[i]), 0);
        assert_int_equal(td_rank_model_sample(path, &zeros, &err), TD_OK);
        assert_int_equal(pwrite(fd, "x", 1, sizes[i] - 1), 1);
        assert_int_equal(td_rank_model_sample(path, &last, &err), TD_OK);
        if (last == zeros) fail_msg("the last of %lld bytes is not seen", (long long)sizes[i]);
    }
    close(fd);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_import_on_devices), cmocka_unit_test(test_bad_steps),
        cmocka_unit_test(test_bad_tokens),        cmocka_unit_test(test_parts_travel),
        cmocka_unit_test(test_bad_scales),        cmocka_unit_test(test_sample_of_a_model)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
