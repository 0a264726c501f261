/* tinystories_test.c - a trained model's published greedy text, token for token, and its top
 * logits. */
#include "tests/golden/model_rig.h"

#include <math.h>
#include <unistd.h>

#define GGUF "TinyStories-656K-Q8_0.gguf"

/* bound: how far a logit may be off; two tokens nearer than twice that may change places. */
static void check_case(struct rig *g, const json_t *c, const char *ops, float bound)
{
    int32_t n_prompt, n_greedy, n_equal = 0;
    int32_t *prompt = rig_ids(json_object_get(c, "prompt_ids"), &n_prompt),
            *greedy = rig_ids(json_object_get(c, "greedy_ids"), &n_greedy);
    const json_t *steps = json_object_get(c, "steps");
    assert_true(n_prompt > 0 && n_greedy > 0);
    int32_t *tokens = malloc((size_t)(n_prompt + n_greedy) * 4);
    memcpy(tokens, prompt, (size_t)n_prompt * 4);
    float *logits = malloc((size_t)g->vocab * sizeof(float)), worst = 0;
    for (int32_t i = 0; i < n_greedy; i++) {
        if (i == 0)
            rig_chunk(g, 0, tokens, 0, n_prompt, true, logits);
        else
            rig_chunk(g, 0, tokens, n_prompt + i - 1, 1, true, logits);
        int32_t next = rig_argmax(logits, g->vocab);
        const json_t *top = json_object_get(json_array_get(steps, (size_t)i), "top5");
        double lead = json_number_value(json_array_get(json_array_get(top, 0), 1)) -
                      json_number_value(json_array_get(json_array_get(top, 1), 1));
        if (next != greedy[i] && lead >= 2 * (double)bound)
            fail_msg("%s: token %d is %d, published %d by %g", ops, i, next, greedy[i], lead);
        n_equal += next == greedy[i];
        tokens[n_prompt + i] = greedy[i];
        for (size_t k = 0; k < json_array_size(top); k++) {
            const json_t *pair = json_array_get(top, k);
            int32_t id = (int32_t)json_integer_value(json_array_get(pair, 0));
            float off = fabsf(logits[id] - (float)json_number_value(json_array_get(pair, 1)));
            if (off > worst) worst = off;
        }
    }
    if (!(worst < bound)) fail_msg("%s: a top-5 logit is off by %g", ops, (double)worst);
    assert_true(n_equal >= n_greedy - 1);
    printf("tinystories %s: %d of %d tokens equal, worst top-5 logit off by %.2g\n", ops, n_equal,
           n_greedy, (double)worst);
    free(logits);
    free(tokens);
    free(prompt);
    free(greedy);
}

/* The cases of one model of the folder. `file` NULL: the directory itself. */
static void check_model(const char *file, const char *name, float bound)
{
    char dir[512], path[512];
    struct td_err err = {0};
    snprintf(path, sizeof path, "tinystories-656k%s%s", file ? "/" : "", file ? file : "");
    rig_data_path(dir, sizeof dir, path);
    rig_data_path(path, sizeof path, "tinystories-656k/reference_greedy.json");
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s is absent\n", path);
        skip();
    }
    json_t *root;
    assert_int_equal(td_json_load_file(path, (size_t)16 << 20, &root, &err), TD_OK);
    for (int i = 0; i < TD_N_OPS; i++) {
        const struct td_ops *ops = td_ops_by_name(td_ops_names[i]);
        if (!ops || strcmp(ops->name, "avxvnni") == 0) continue; /* avx2 with other integers */
        struct rig g;
        rig_open(&g, &(struct td_model_params){.dir = dir, .dtype = "f32", .ops = ops}, 2, 16, 128,
                 512);
        int n_cases = 0;
        size_t k;
        json_t *c;
        json_array_foreach(json_object_get(root, "cases"), k, c)
        {
            if (strcmp(json_string_value(json_object_get(c, "model")), name) != 0) continue;
            check_case(&g, c, ops->name, bound);
            n_cases++;
        }
        assert_true(n_cases > 0);
        rig_close(&g);
    }
    json_decref(root);
}

/* The reference is float64; logits reach 20, so 1e-3 is 5e-5 of the largest. */
static void published_greedy_text(void **state)
{
    (void)state;
    check_model(NULL, "model.safetensors", 1e-3f);
}

/* The reference widens the weights and leaves the activations as they are. Rounding those to 8 bits
 * moves a logit by 1 % of the largest at most (0.17 was seen); rows of q and k that are not put
 * back in order move them by 130 %. */
static void published_greedy_text_of_gguf(void **state)
{
    (void)state;
    check_model(GGUF, GGUF, 0.25f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(published_greedy_text),
                                       cmocka_unit_test(published_greedy_text_of_gguf)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
