/* expert_stacks_test.c - stacks of experts become the matrices of each, values included, and what
 * is wrong with a stack is refused by its name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/random.h"
#include "common/model/checkpoint.h"
#include "common/model/config.h"
#include "common/model/expert_stacks.h"
#include "common/model/quant_tensors.h"
#include "kernels/scaled.h"

enum { EXPERTS = 3, HIDDEN = 64, INNER = 32, STACKS = 4, TENSORS_MAX = 8 };

/* One layer, whose stacks have bytes that count up. */
struct made {
    struct td_model_config config;
    struct td_checkpoint c;
    uint8_t *bytes;
};

static const char names[STACKS][20] = {"gate_up_proj", "gate_up_proj_bias", "down_proj",
                                       "down_proj_bias"};

static struct td_tensor *add(struct made *m, const char *name, const char *type, int32_t n_dims,
                             const int64_t *shape)
{
    struct td_tensor *t = &m->c.tensors[m->c.n_tensors++];
    char full[100];
    snprintf(full, sizeof full, "model.layers.0.mlp.experts.%s", name);
    *t = (struct td_tensor){.name = strdup(full), .data = m->bytes, .n_dims = n_dims, .n_bytes = 1};
    assert_non_null(t->name);
    snprintf(t->dtype_name, sizeof t->dtype_name, "%s", type);
    if (strcmp(type, "F32") == 0) t->format = td_format_of_dtype(TD_F32), t->n_bytes = 4;
    for (int32_t i = 0; i < n_dims; i++) t->n_bytes *= (uint64_t)(t->shape[i] = shape[i]);
    return t;
}

static void sort(struct made *m)
{
    qsort(m->c.tensors, (size_t)m->c.n_tensors, sizeof *m->c.tensors, td_tensor_by_name);
}

static struct made make(bool quantised)
{
    char text[600];
    struct made m = {0};
    struct td_err err = {0};
    size_t n_bytes = (size_t)EXPERTS * HIDDEN * 2 * INNER * sizeof(float);
    snprintf(text, sizeof text,
             "{\"model_type\":\"gpt_oss\",\"hidden_size\":%d,\"intermediate_size\":%d,"
             "\"num_hidden_layers\":1,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
             "\"vocab_size\":256,\"max_position_embeddings\":128,\"num_local_experts\":%d,"
             "\"num_experts_per_tok\":2,\"rope_parameters\":{\"rope_type\":\"default\"}%s}",
             HIDDEN, INNER, EXPERTS,
             quantised ? ",\"quantization_config\":{\"quant_method\":\"mxfp4\"}" : "");
    if (td_model_config_parse(text, strlen(text), NULL, 0, &m.config, &err))
        fail_msg("%s", err.msg);
    m.c.tensors = calloc(TENSORS_MAX, sizeof *m.c.tensors);
    m.bytes = malloc(n_bytes);
    assert_true(m.c.tensors && m.bytes);
    for (size_t i = 0; i < n_bytes / sizeof(float); i++) {
        float v = (float)i;
        memcpy(m.bytes + i * sizeof v, &v, sizeof v);
    }
    int64_t up[] = {EXPERTS, HIDDEN, 2 * INNER}, down[] = {EXPERTS, INNER, HIDDEN};
    if (quantised) {
        int64_t blocks[] = {EXPERTS, 2 * INNER, HIDDEN / 32, 16},
                down_blocks[] = {EXPERTS, HIDDEN, INNER / 32, 16};
        add(&m, "gate_up_proj_blocks", "U8", 4, blocks);
        add(&m, "gate_up_proj_scales", "U8", 3, blocks);
        add(&m, "down_proj_blocks", "U8", 4, down_blocks);
        add(&m, "down_proj_scales", "U8", 3, down_blocks);
    } else {
        add(&m, names[0], "F32", 3, up);
        add(&m, names[2], "F32", 3, down);
    }
    int64_t up_bias[] = {EXPERTS, 2 * INNER}, down_bias[] = {EXPERTS, HIDDEN};
    add(&m, names[1], "F32", 2, up_bias);
    add(&m, names[3], "F32", 2, down_bias);
    sort(&m);
    return m;
}

static void drop(struct made *m)
{
    td_checkpoint_close(&m->c);
    free(m->bytes);
}

static struct td_tensor *of(struct made *m, const char *name)
{
    char full[100];
    snprintf(full, sizeof full, "model.layers.0.mlp.experts.%s", name);
    const struct td_tensor *t = td_checkpoint_find(&m->c, full);
    if (!t) fail_msg("%s is missing", full);
    return &m->c.tensors[t - m->c.tensors];
}

static void open(struct made *m)
{
    struct td_err err = {0};
    if (td_expert_stacks_open(&m->config, "model", &m->c, &err)) fail_msg("%s", err.msg);
    assert_int_equal(m->c.n_tensors, EXPERTS * STACKS);
}

static void plain_stacks_are_cut(void **state)
{
    (void)state;
    struct made m = make(false);
    open(&m);
    struct td_tensor *t = of(&m, "2.gate_up_proj.weight");
    assert_true(t->turned && t->n_dims == 2 && t->shape[0] == 2 * INNER && t->shape[1] == HIDDEN);
    float first;
    memcpy(&first, t->data, sizeof first);
    assert_true(first == (float)(2 * HIDDEN * 2 * INNER));
    t = of(&m, "1.down_proj.bias");
    assert_true(!t->turned && t->n_dims == 1 && t->shape[0] == HIDDEN);
    memcpy(&first, t->data, sizeof first);
    assert_true(first == (float)HIDDEN);
    drop(&m);
}

/* Against the formula, value by value. */
static void mxfp4_rows_are_what_they_stand_for(void **state)
{
    (void)state;
    static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    struct made m = make(true);
    size_t n = (size_t)EXPERTS * 2 * INNER * HIDDEN / 2;
    uint8_t *codes = m.bytes, *scales = m.bytes + n;
    uint64_t random = 7;
    for (size_t i = 0; i < n + n / 16; i++) {
        m.bytes[i] = (uint8_t)(td_random_step(&random) >> 56);
        if (i >= n && m.bytes[i] == 255) m.bytes[i] = 0;
    }
    of(&m, "gate_up_proj_scales")->data = scales;
    open(&m);
    for (int32_t e = 0; e < EXPERTS; e++) {
        char name[40];
        uint16_t unused[HIDDEN];
        struct td_format whole;
        snprintf(name, sizeof name, "%d.gate_up_proj.weight", e);
        const struct td_quant_tensor *q = of(&m, name)->quant;
        assert_true(q && q->n_out == 2 * INNER && q->n_in == HIDDEN);
        td_quant_cut(q, 0, HIDDEN, false, unused, &whole);
        uint32_t *row = malloc((size_t)whole.block_bytes);
        assert_non_null(row);
        for (int32_t r = 0; r < q->n_out; r++) {
            float values[HIDDEN];
            q->read_rows(q, &whole, 0, r, 1, (uint8_t *)row);
            td_scaled_read(&whole, row, values);
            for (int32_t k = 0; k < HIDDEN; k++) {
                size_t at = ((size_t)e * 2 * INNER + (size_t)r) * HIDDEN + (size_t)k;
                int code = codes[at / 2] >> (at % 2 ? 4 : 0) & 15;
                float want = ldexpf(e2m1[code & 7], scales[at / 32] - 127);
                assert_true(values[k] == (code & 8 ? -want : want));
            }
        }
        free(row);
    }
    scales[0] = 255; /* no number */
    uint16_t unused[HIDDEN];
    struct td_format whole;
    const struct td_quant_tensor *q = of(&m, "0.gate_up_proj.weight")->quant;
    td_quant_cut(q, 0, HIDDEN, false, unused, &whole);
    uint32_t *row = malloc((size_t)whole.block_bytes);
    assert_non_null(row);
    q->read_rows(q, &whole, 0, 0, 1, (uint8_t *)row);
    assert_false(td_scaled_is_finite(&whole, row));
    free(row);
    drop(&m);
}

static void no_scales(struct made *m) { of(m, "down_proj_scales")->name[27] = 'x'; }
static void no_bias(struct made *m) { of(m, "down_proj_bias")->name[27] = 'x'; }
static void fewer(struct made *m) { of(m, "gate_up_proj_blocks")->shape[0] = EXPERTS - 1; }
static void wrong_scales(struct made *m) { of(m, "gate_up_proj_scales")->shape[2] = 1; }
static void wrong_block(struct made *m) { of(m, "gate_up_proj_blocks")->shape[3] = 8; }
static void wrong_type(struct made *m)
{
    snprintf(of(m, "gate_up_proj_blocks")->dtype_name, sizeof(char[16]), "I8");
}
static void no_blocks(struct made *m)
{
    int64_t up[] = {EXPERTS, HIDDEN, 2 * INNER}, down[] = {EXPERTS, INNER, HIDDEN};
    no_scales(m);
    of(m, "down_proj_blocks")->name[27] = 'x';
    of(m, "gate_up_proj_blocks")->name[27] = 'x';
    add(m, "gate_up_proj", "F32", 3, up);
    add(m, "down_proj", "F32", 3, down);
}
static void both(struct made *m)
{
    int64_t up[] = {EXPERTS, HIDDEN, 2 * INNER};
    add(m, "gate_up_proj", "F32", 3, up);
}
static void own(struct made *m)
{
    int64_t bias[] = {HIDDEN};
    add(m, "0.down_proj.bias", "F32", 1, bias);
}

static void wrong_stacks_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        void (*change)(struct made *m);
        const char *says;
    } cases[] = {
        {no_scales, "down_proj_blocks is there without its _scales"},
        {no_bias, "model.layers.0.mlp.experts.down_proj_bias is missing"},
        {fewer, "gate_up_proj_blocks has 4 dimensions, the first of 2"},
        {wrong_scales, "gate_up_proj_scales has 64 rows of 1 scales, must have 64 of 2"},
        {wrong_block, "the last of 8"},
        {wrong_type, "gate_up_proj_blocks has dtype I8, must be U8"},
        {no_blocks, "quantization_config says mxfp4, but no experts are in *_blocks"},
        {both, "gate_up_proj_blocks are there, must be one of them"},
        {own, "0.down_proj.bias is there beside the one of all experts"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_err err = {0};
        struct made m = make(true);
        cases[i].change(&m);
        sort(&m);
        if (!td_expert_stacks_open(&m.config, "model", &m.c, &err))
            fail_msg("case %zu was taken, must say %s", i, cases[i].says);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("case %zu says %s, must say %s", i, err.msg, cases[i].says);
        drop(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(plain_stacks_are_cut),
                                       cmocka_unit_test(mxfp4_rows_are_what_they_stand_for),
                                       cmocka_unit_test(wrong_stacks_are_refused_by_name)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
