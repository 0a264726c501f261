/* kernels_quantize_test.c - the write side of formats: the bytes of gguf-py where it has them, the
 * error that a format may have on Gaussian values, and values that no format holds. */
#include "tests/unit/kernels_test.h"

#include "kernels/formats/write.h"
#include "kernels/quantize.h"

enum { N_TYPES = 64 };

static const struct td_format *format(const char *name)
{
    for (uint32_t t = 0; t < N_TYPES; t++) {
        const struct td_format *f = td_format_of_gguf(t);
        if (f && strcmp(f->name, name) == 0) return f;
    }
    fail_msg("no format %s", name);
    return NULL;
}

/* Files of tests/golden/make_quantised.py. */
static void the_bytes_of_gguf_py(void **state)
{
    (void)state;
    static const char *const names[] = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"};
    enum { N = 16 * 32 };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct td_format *f = format(names[i]);
        size_t bytes = td_format_bytes(f, N), block = (size_t)f->block_bytes;
        char path[128];
        float values[N];
        uint8_t want[N * 4], got[N * 4];
        snprintf(path, sizeof path, "tests/golden/quantised/%s.bin", names[i]);
        FILE *file = fopen(path, "rb");
        if (!file) fail_msg("cannot open %s", path);
        assert_int_equal(fread(values, 4, N, file), N);
        assert_int_equal(fread(want, 1, bytes, file), bytes);
        assert_int_equal(fgetc(file), EOF);
        fclose(file);
        assert_true(td_format_write(f, values, N, got));
        for (size_t b = 0; b < bytes / block; b++)
            if (memcmp(want + b * block, got + b * block, block) != 0)
                for (size_t k = 0; k < block; k++)
                    if (want[b * block + k] != got[b * block + k])
                        fail_msg("%s: byte %zu of block %zu is %02x, must be %02x", f->name, k, b,
                                 got[b * block + k], want[b * block + k]);
    }
}

/* Relative RMS error on Gaussian values: what ggml's quantisers have, to two digits, and 2 % for
 * the rest of the digits and the draw. Q8_0's is 0.00535, with a standard deviation of 0.2 % for as
 * many values as are drawn here (0.8 % for a sixteenth of them, which once was too much). */
static void errors_are_those_of_the_formats(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double most;
    } rows[] = {{"Q8_0", 0.0053}, {"Q6_K", 0.018}, {"Q5_K", 0.036},   {"Q5_1", 0.038},
                {"Q5_0", 0.043},  {"Q4_K", 0.071}, {"IQ4_NL", 0.076}, {"Q4_1", 0.078},
                {"Q4_0", 0.086},  {"MXFP4", 0.115}};
    enum { N = 256 * 1024 };
    float *x = alloc_poisoned(N * 4), *back = alloc_poisoned(N * 4);
    uint8_t *bytes = alloc_poisoned(N * 4);
    for (int i = 0; i < N; i++) x[i] = 0.02f * rng_normal();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct td_format *f = format(rows[i].name);
        double off = 0, size = 0;
        assert_true(td_format_write(f, x, N, bytes));
        td_format_read(f, bytes, N, back);
        for (int k = 0; k < N; k++) {
            off += pow((double)back[k] - (double)x[k], 2);
            size += pow((double)x[k], 2);
        }
        printf("%s: relative error %.5f\n", f->name, sqrt(off / size));
        if (!(sqrt(off / size) <= rows[i].most * 1.02))
            fail_msg("%s: relative error %.4f, at most %.4f", f->name, sqrt(off / size),
                     rows[i].most);
    }
    free(x), free(back), free(bytes);
}

/* Values of one sign, constants, steps, zeros, the smallest and the largest: what comes back is
 * within a step of the format, and a block does not depend on its neighbours. */
static void odd_blocks(void **state)
{
    (void)state;
    enum { N = 256, N_KINDS = 8 };
    for (uint32_t t = 0; t < N_TYPES; t++) {
        const struct td_format *f = td_format_of_gguf(t);
        if (!f || f->dtype || !td_format_is_written(f)) continue;
        float x[N * N_KINDS], back[N * N_KINDS];
        uint8_t together[N * N_KINDS * 4], alone[N * 4];
        for (int i = 0; i < N; i++) {
            float g = rng_normal();
            x[i] = 0;
            x[N + i] = fabsf(g);
            x[2 * N + i] = -fabsf(g);
            x[3 * N + i] = 0.3f;
            x[4 * N + i] = i == 200 ? -7.0f : 0;
            x[5 * N + i] = 1e-30f * g;
            x[6 * N + i] = 3e4f * (2.0f * (float)i / N - 1);
            x[7 * N + i] = i % 2 ? 1.0f : -1.0f;
        }
        assert_true(td_format_write(f, x, N * N_KINDS, together));
        td_format_read(f, together, N * N_KINDS, back);
        for (int k = 0; k < N_KINDS; k++) {
            /* MXFP4: a value just below 8 units becomes 6 */
            float most = 0, part = f->scales == TD_SCALES_E8M0 ? 0.25f
                                   : f->bits == 4              ? 0.15f
                                                               : 0.08f;
            for (int i = 0; i < N; i++) most = fmaxf(most, fabsf(x[k * N + i]));
            for (int i = 0; i < N; i++)
                if (!(fabsf(back[k * N + i] - x[k * N + i]) <=
                      most * part + 1e-6f)) /* f16 ends at 6e-8 */
                    fail_msg("%s, kind %d: %g came back as %g", f->name, k, (double)x[k * N + i],
                             (double)back[k * N + i]);
            assert_true(td_format_write(f, x + k * N, N, alone));
            assert_memory_equal(alone, together + td_format_bytes(f, k * N), td_format_bytes(f, N));
        }
    }
}

static void values_that_no_format_holds(void **state)
{
    (void)state;
    const float bad[] = {INFINITY, -INFINITY, NAN, 3e38f};
    for (uint32_t t = 0; t < N_TYPES; t++) {
        const struct td_format *f = td_format_of_gguf(t);
        if (!f || !td_format_is_written(f)) continue;
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            float x[256] = {[77] = bad[i]};
            uint8_t bytes[1024];
            bool fits = bad[i] == 3e38f && (f->dtype == TD_F32 || f->dtype == TD_BF16);
            if (td_format_write(f, x, 256, bytes) != fits)
                fail_msg("%s %s %g", f->name, fits ? "refuses" : "takes", (double)bad[i]);
        }
    }
}

/* Every f16 comes back, and a number between two neighbours goes to the nearer, to the even one
 * from the middle. */
static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float a = td_f16_to_f32((uint16_t)h),
              b = h == 0x7bff ? 65536.0f : td_f16_to_f32((uint16_t)(h + 1)), middle = (a + b) / 2;
        assert_int_equal(td_f32_to_f16(a), h);
        assert_int_equal(td_f32_to_f16(-a), h | 0x8000u);
        assert_int_equal(td_f32_to_f16(middle), h + (h & 1));
        assert_int_equal(td_f32_to_f16(nextafterf(middle, a)), h);
        assert_int_equal(td_f32_to_f16(nextafterf(middle, b)), h + 1);
    }
    assert_int_equal(td_f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(td_f32_to_f16(NAN) & 0x7e00, 0x7e00);
}

/* Every type, at the edges of what is finite, beside the plain form. */
static void plain_values_that_are_no_numbers(void **state)
{
    (void)state;
    static const enum td_dtype types[] = {TD_F32, TD_F16, TD_BF16};
    static const uint32_t words[] = {0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f800000,
                                     0x7f800001, 0xff800000, 0x7fffffff, 0xff7f7fff};
    static const uint16_t halves[] = {0x7c00, 0x7bff, 0xfc00, 0xfbff,
                                      0x7f80, 0x7f7f, 0xff80, 0xffff};
    int n_refused = 0, n_taken = 0;
    for (int i = 0; i < 3000; i++) {
        enum td_dtype from = types[i % 3], to = types[i / 3 % 3];
        if (from != to && to != TD_BF16 && to != TD_F32) continue;
        int32_t n = rng_int(1, 37), at = rng_int(0, 3), bytes = (int32_t)td_dtype_bytes(from);
        uint8_t *src = alloc_poisoned((size_t)((n + 4) * bytes));
        for (int32_t k = 0; k < n; k++) put(src + at * bytes, from, k, rng_normal());
        int32_t odd = rng_int(-n, n - 1), which = rng_int(0, 7);
        if (odd >= 0)
            memcpy(src + (at + odd) * bytes,
                   from == TD_F32 ? (const void *)&words[which] : (const void *)&halves[which],
                   (size_t)bytes);
        bool want = true;
        for (int32_t k = 0; k < n; k++) {
            float v = td_widen(src + at * bytes, from, k);
            want &= isfinite(v) && (to != TD_BF16 || from != TD_F32 ||
                                    isfinite(td_bf16_to_f32(td_f32_to_bf16(v))));
        }
        if (td_plain_is_finite(from, to, src + at * bytes, n) != want)
            fail_msg("dtype %d as %d, n %d, value %d: must%s be finite", from, to, n, odd,
                     want ? "" : " not");
        n_refused += !want, n_taken += want;
        free(src);
    }
    assert_true(n_refused > 100 && n_taken > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bytes_of_gguf_py),
        cmocka_unit_test(errors_are_those_of_the_formats),
        cmocka_unit_test(odd_blocks),
        cmocka_unit_test(values_that_no_format_holds),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(plain_values_that_are_no_numbers),
    };
    rng_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
