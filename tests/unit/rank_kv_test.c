/* rank_kv_test.c - KV that came from another number of parts, brought into order on devices: the
 * whole pools, all copies, against the same import in the host's memory (which engine_test.c has
 * compared with the plain formula). The devices are fakes, whose addresses nobody can follow and
 * whose copies run late. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "common/engine/engine_ranks.h"
#include "tests/fake/fake_device.h"

enum { N_BLOCKS = 40, N_IDS = 19, TAIL = 64 };

static uint64_t random_state = 5;

static size_t draw(size_t n)
{
    td_random_step(&random_state);
    return (size_t)(random_state >> 33) % n;
}

static enum td_dtype dtype = TD_BF16;

static void plan(struct td_rank_kv *kv, int32_t n_kv_heads, int32_t n_ranks)
{
    struct td_err err = {0};
    struct td_kv_layout part = {.n_layers = 3,
                                .n_kv_heads = n_ranks < n_kv_heads ? n_kv_heads / n_ranks : 1,
                                .head_dim = 8,
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

/* Scales that no worker stores are refused, in every head and token that counts. */
static void test_bad_scales(void **state)
{
    (void)state;
    static const uint32_t bad[] = {0x7f800000, 0x7fc00000, 0xff800000, 0x80000000, 0xbf800000};
    struct td_rank_kv kv;
    struct td_err err = {0};
    struct td_thread_pool *threads = NULL;
    int32_t ids[3] = {7, 0, 4};
    dtype = TD_INT8;
    plan(&kv, 4, 2); /* blocks of 4 tokens */
    if (td_thread_pool_create(2, NULL, 0, &threads, &err)) fail_msg("%s", err.msg);
    uint8_t *base = calloc(N_BLOCKS, kv.whole.block_bytes);
    assert_non_null(base);
    td_rank_kv_on_host(&kv, 0, base, N_BLOCKS);
    assert_int_equal(kv.whole.block_bytes, 3 * 2 * 4 * kv.whole.head_bytes);
    size_t at = td_kv_scales_at(TD_INT8, 4, 8);
    for (int k = 0; k < 200; k++) {
        size_t i = draw(3), head = draw(3 * 2 * 4), token = draw(4);
        uint8_t *scale = base + (size_t)ids[i] * kv.whole.block_bytes +
                         head * kv.whole.head_bytes + at + token * 4;
        int32_t n_tokens = (int32_t)(1 + draw(12));
        memcpy(scale, &bad[draw(5)], 4);
        bool counts = (int32_t)(i * 4 + token) < n_tokens;
        td_status s = td_rank_kv_check(&kv, ids, (n_tokens + 3) / 4, n_tokens, threads, &err);
        assert_int_equal(s, counts ? TD_ERR_CORRUPT : TD_OK);
        memset(scale, 0, 4);
    }
    assert_non_null(strstr(err.msg, "holds a scale that is negative or no number"));
    uint32_t largest = 0x7f7fffff; /* the largest number */
    memcpy(base + (size_t)7 * kv.whole.block_bytes + at, &largest, 4);
    assert_int_equal(td_rank_kv_check(&kv, ids, 3, 12, threads, &err), TD_OK);
    td_thread_pool_destroy(threads);
    td_rank_kv_free(&kv);
    free(base);
    dtype = TD_BF16;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_import_on_devices),
                                       cmocka_unit_test(test_bad_scales)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
