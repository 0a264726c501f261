/* kv_layout_test.c - sizes of a block, their bounds, and which layouts may meet. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/kv/kv_layout.h"

static struct td_kv_layout make(int32_t n_layers, int32_t n_kv_heads, int32_t head_dim,
                                int32_t block_size, enum td_dtype dtype)
{
    return (struct td_kv_layout){.n_layers = n_layers,
                                 .n_kv_heads = n_kv_heads,
                                 .head_dim = head_dim,
                                 .block_size = block_size,
                                 .dtype = dtype};
}

static void sizes(void **state)
{
    (void)state;
    struct td_kv_layout l = make(32, 8, 128, 16, TD_BF16); /* an 8B GQA model: DESIGN's 2 MiB */
    struct td_err err = {0};
    assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
    assert_int_equal(l.row_bytes, 256);
    assert_int_equal(l.layer_bytes, 2 * 8 * 16 * 256);
    assert_int_equal(l.block_bytes, 2 << 20);
    l = make(1, 1, 1, 1, TD_F32);
    assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
    assert_int_equal(l.block_bytes, 8);
    for (int dtype = TD_INT8; dtype <= TD_FP8; dtype++) { /* 16 scales behind 2,048 codes */
        l = make(32, 8, 128, 16, (enum td_dtype)dtype);
        assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
        assert_int_equal(l.row_bytes, 128);
        assert_int_equal(l.head_bytes, 2048 + 64);
        assert_int_equal(l.layer_bytes, 2 * 8 * 2112);
        assert_int_equal(l.block_bytes / 16, 67584);  /* a token; 131,072 in bf16 */
        l = make(1, 1, 34, 16, (enum td_dtype)dtype); /* rounded up to a multiple of 64 */
        assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
        assert_int_equal(l.head_bytes, 640);
    }
}

/* Latent attention: one row of a token for all heads, V in it; and V of other rows than K. */
static void planes(void **state)
{
    (void)state;
    struct td_kv_layout l = make(61, 1, 576, 16, TD_BF16); /* DeepSeek-V3 */
    struct td_err err = {0};
    l.v_dim = TD_KV_V_IN_K;
    assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
    assert_int_equal(l.n_planes, 1);
    assert_int_equal(l.layer_bytes, 16 * 576 * 2);
    assert_int_equal(l.block_bytes / 16, 70272); /* a token */
    assert_false(td_kv_layout_is_even(&l));
    l = make(61, 1, 576, 16, TD_INT8); /* and the scales of each row behind its codes */
    l.v_dim = TD_KV_V_IN_K;
    assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
    assert_int_equal(l.layer_bytes, 16 * 576 + 16 * 4);
    assert_int_equal(l.block_bytes / 16, 35380); /* a token: 0.503 of bf16 */
    l = make(2, 4, 192, 16, TD_BF16);
    l.v_dim = 128;
    assert_int_equal(td_kv_layout_init(&l, &err), TD_OK);
    assert_int_equal(l.n_planes, 2);
    assert_int_equal(l.planes[1].at, 4 * 16 * 192 * 2);
    assert_int_equal(l.planes[1].row_bytes, 256);
    assert_int_equal(l.layer_bytes, 4 * 16 * (192 + 128) * 2);
    assert_false(td_kv_layout_is_even(&l));
    static const struct {
        int32_t n_kv_heads, v_dim;
        enum td_dtype dtype;
        td_status status;
        const char *says;
    } cases[] = {
        {2, TD_KV_V_IN_K, TD_BF16, TD_ERR_INVALID, "n_kv_heads is 2, must be 1"},
        {1, 32, TD_FP8, TD_ERR_UNSUPPORTED, "dtype is fp8, must be f32 or bf16"},
        {1, 65, TD_F32, TD_ERR_INVALID, "v_dim is 65, must be in 1..64"},
        {1, -2, TD_F32, TD_ERR_INVALID, "v_dim is -2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        l = make(1, cases[i].n_kv_heads, 64, 16, cases[i].dtype);
        l.v_dim = cases[i].v_dim;
        err.msg[0] = 0;
        td_status s = td_kv_layout_init(&l, &err);
        if (s != cases[i].status || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu answered %s: %s", i, td_status_name(s), err.msg);
    }
}

static void bounds(void **state)
{
    (void)state;
    static const struct {
        int32_t n_layers, n_kv_heads, head_dim, block_size;
        int dtype;
        td_status status;
        const char *says;
    } cases[] = {
        {0, 1, 1, 1, TD_F32, TD_ERR_INVALID, "n_layers is 0"},
        {1, -1, 1, 1, TD_F32, TD_ERR_INVALID, "n_kv_heads is -1"},
        {1, 1, 65537, 1, TD_F32, TD_ERR_INVALID, "head_dim is 65537, must be in 1..65536"},
        {1, 1, 1, 0, TD_F32, TD_ERR_INVALID, "block_size is 0"},
        {1, 1, 1, 1, TD_F16, TD_ERR_INVALID, "dtype is 2"},
        {1, 1, 1, 1, 0, TD_ERR_INVALID, "dtype is 0"},
        {1, 1, 1, 1, 6, TD_ERR_INVALID, "dtype is 6"},
        {1, 1, 34, 1, TD_INT8, TD_ERR_INVALID,
         "head_dim 34 x block_size 1 must be a multiple of 4"},
        {1, 1, 34, 2, TD_FP8, TD_OK, ""},
        {65536, 65536, 65536, 65536, TD_INT8, TD_ERR_LIMIT, "must be below 1073741824 bytes"},
        {65536, 65536, 65536, 65536, TD_F32, TD_ERR_LIMIT, "must be below 1073741824 bytes"},
        {128, 64, 256, 128, TD_F32, TD_ERR_LIMIT, "too large"}, /* exactly 2 GiB */
        {64, 64, 256, 128, TD_F32, TD_ERR_LIMIT, "too large"},  /* exactly 1 GiB */
        {63, 64, 256, 128, TD_F32, TD_OK, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_kv_layout l = make(cases[i].n_layers, cases[i].n_kv_heads, cases[i].head_dim,
                                     cases[i].block_size, (enum td_dtype)cases[i].dtype);
        struct td_err err = {0};
        td_status s = td_kv_layout_init(&l, &err);
        if (s != cases[i].status || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu answered %s: %s", i, td_status_name(s), err.msg);
    }
}

static void hash(void **state)
{
    (void)state;
    enum { N = 11 };
    struct td_kv_layout l[N] = {
        make(4, 2, 16, 16, TD_F32),  make(5, 2, 16, 16, TD_F32), make(4, 3, 16, 16, TD_F32),
        make(4, 2, 18, 16, TD_F32),  make(4, 2, 16, 32, TD_F32), make(4, 2, 16, 16, TD_BF16),
        make(4, 2, 16, 16, TD_INT8), make(4, 2, 16, 16, TD_FP8), make(4, 2, 16, 16, TD_F32),
        make(4, 2, 16, 16, TD_F32),  make(4, 1, 16, 16, TD_INT8)};
    l[8].v_dim = l[10].v_dim = TD_KV_V_IN_K, l[8].n_kv_heads = 1, l[9].v_dim = 8;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < N; k++)
            assert_int_equal(td_kv_layout_hash(&l[i], 7) == td_kv_layout_hash(&l[k], 7), i == k);
    assert_true(td_kv_layout_hash(&l[0], 7) != td_kv_layout_hash(&l[0], 8));
    /* Workers of different builds compare this number: changing how it is made needs a new
       TD_KV_LAYOUT_VERSION; another formula of codes and scales needs a new
       TD_KV_LAYOUT_CODED_VERSION. */
    assert_int_equal(TD_KV_LAYOUT_VERSION, 1);
    assert_int_equal(TD_KV_LAYOUT_CODED_VERSION, 1);
    assert_true(td_kv_layout_hash(&l[0], 7) == UINT64_C(0x63c050edba36c9dc));
    assert_true(td_kv_layout_hash(&l[5], 7) == UINT64_C(0x4675a2674059b77e));
    assert_true(td_kv_layout_hash(&l[6], 7) == UINT64_C(0x4f62ba6f6fb04781));
    assert_true(td_kv_layout_hash(&l[7], 7) == UINT64_C(0x4758460a77c53c1e));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes), cmocka_unit_test(planes),
                                       cmocka_unit_test(bounds), cmocka_unit_test(hash)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
