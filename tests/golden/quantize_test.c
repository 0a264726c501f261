/* quantize_test.c - `tandem quantize`'s files: plain ones give the bits of their directory, rounded
 * ones those of the directory rounded while it loads; types by layer; what cannot be written. */
#include "tests/golden/gguf_model.h"
#include "tests/golden/model_rig.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/random.h"
#include "common/model/quantize.h"
#include "common/text/tokenizer.h"

#define FIXTURES "tests/golden/fixtures/"

static char folder[64], path[96], other[96];

/* A model that is to be written. */
struct source {
    struct td_quantize q;
    struct td_checkpoint ck;
    struct td_model_config c;
};

static td_status source_open(struct source *s, const char *from, const char *mix,
                             struct td_err *err)
{
    *s = (struct source){.q = {.from = from, .quiet = true, .mix = td_mix_by_name(mix)}};
    s->q.checkpoint = &s->ck;
    s->q.config = &s->c;
    td_status st = td_model_config_load(from, &s->c, err);
    if (!st) st = td_checkpoint_open(from, &s->ck, err);
    return st ? st : td_thread_pool_create(2, NULL, 0, &s->q.threads, err);
}

static void source_close(struct source *s)
{
    td_thread_pool_destroy(s->q.threads);
    td_checkpoint_close(&s->ck);
}

static const struct td_fold *fold; /* of what is written next */
/* for the model's own ends of a generation in what is written next; n 0: those */
static struct {
    int32_t ids[TD_MAX_EOS], n;
} ends;

static td_status try_quantize(const char *from, const char *mix, const char *to, bool vocab,
                              bool force, struct td_err *err)
{
    struct source x;
    struct td_gguf_writer *w = NULL;
    td_status s = source_open(&x, from, mix, err);
    x.q.fold = fold;
    if (ends.n) {
        memcpy(x.c.eos_ids, ends.ids, sizeof ends.ids);
        x.c.n_eos = ends.n;
    }
    if (!s) s = td_gguf_writer_create(&w, err);
    if (!s) s = td_quantize_keys(&x.q, w, err);
    if (!s && vocab && !x.ck.gguf)
        s = td_tokenizer_put_gguf(from, x.c.vocab, x.c.bos_id, x.c.eos_ids, x.c.n_eos, w, err);
    if (!s) s = td_quantize_gguf(&x.q, w, to, force, err);
    td_gguf_writer_close(w);
    source_close(&x);
    return s;
}

static void quantize(const char *from, const char *mix, const char *to)
{
    struct td_err err = {0};
    if (try_quantize(from, mix, to, strstr(from, "pocket") != NULL, true, &err))
        fail_msg("%s as %s: %s", from, mix, err.msg);
}

static float *logits_of(const char *dir, const char *dtype, int32_t n, uint64_t *ret_hash)
{
    struct rig g;
    int32_t tokens[64];
    for (int32_t i = 0; i < n; i++) tokens[i] = (i * 37 + 11) % 97;
    rig_open(&g, &(struct td_model_params){.dir = dir, .dtype = dtype}, 2, 8, n, n);
    float *logits = rig_prompt(&g, 1, tokens, n, n);
    *ret_hash = td_model_hash(g.model);
    rig_close(&g);
    return logits;
}

/* Two models give the same bits; with `same_hash` they may also serve each other's requests. */
static void same_bits(const char *a, const char *a_dtype, const char *b, const char *b_dtype,
                      bool same_hash)
{
    enum { N = 20 };
    struct td_model_config c;
    struct td_err err = {0};
    uint64_t hash[2];
    if (td_model_config_load(a, &c, &err)) fail_msg("%s", err.msg);
    float *x = logits_of(a, a_dtype, N, &hash[0]), *y = logits_of(b, b_dtype, N, &hash[1]);
    for (int32_t i = 0; i < N * c.vocab; i++)
        if (memcmp(&x[i], &y[i], 4) != 0)
            fail_msg("%s %s, %s %s: logit %d is %a and %a", a, a_dtype, b, b_dtype, i, (double)x[i],
                     (double)y[i]);
    if (same_hash && hash[0] != hash[1]) fail_msg("%s, %s: hashes differ", a, b);
    free(x), free(y);
}

/* Every family: names, pairs of rows, biases, rotary scaling. */
static void plain_files_give_the_bits_of_the_directory(void **state)
{
    (void)state;
    static const char *const names[] = {
        "llama1_mha",      "llama_mqa_sharded",          "llama_linear_rope", "llama3_rope_tied",
        "llama_odd_sizes", "mistral_head_dim_no_window", "qwen2_bias_tied",   "qwen3_head_dim"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char dir[128];
        snprintf(dir, sizeof dir, FIXTURES "%s", names[i]);
        quantize(dir, "f32", path);
        same_bits(dir, "f32", path, "f32", false);
        quantize(path, "bf16", other); /* a file from a file */
        quantize(dir, "bf16", path);
        same_bits(path, "bf16", other, "bf16", true);
    }
}

/* models/pocket has rows of 192 and 512 values: of blocks of 256 only `down` is made. */
static void rounding_at_load_is_the_file(void **state)
{
    (void)state;
    static const char *const mixes[] = {"q8_0", "q4_k_m", "q5_1"};
    for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++) {
        quantize("models/pocket", mixes[i], path);
        same_bits("models/pocket", mixes[i], path, "auto", true);
    }
    quantize("models/pocket", "bf16", other);
    quantize(other, "q5_1", other); /* replaces what it reads */
    same_bits(path, "f32", other, "f32", true);
}

/* GGUF has keys for three; llama.cpp finds others by their texts, and these have none that it
 * knows. */
static void all_ends_of_a_generation_are_carried(void **state)
{
    (void)state;
    struct td_model_config c;
    struct td_err err = {0};
    for (ends.n = 2; ends.n <= TD_MAX_EOS; ends.n += 7) {
        /* 0 and 2 are the model's own, <|endoftext|> and <|im_end|> */
        for (int32_t i = 0; i < ends.n; i++) ends.ids[i] = i < 2 ? 2 * i : 3 * i;
        quantize("models/pocket", "q8_0", path);
        if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
        assert_int_equal(c.n_eos, ends.n);
        assert_memory_equal(c.eos_ids, ends.ids, (size_t)ends.n * sizeof *ends.ids);
    }
    ends.n = 0;
}

/* A model with rows of 256 values, in f32. */
enum { HIDDEN = 256, FF = 256, VOCAB = 97, LAYERS = 4 };
static struct td_random random_values = {7};
static void random_tensor(struct gf *f, const char *name, int64_t n_in, int64_t n_out, float center)
{
    int64_t n = n_in * (n_out ? n_out : 1);
    float *x = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = center + (float)(td_random_uniform(&random_values) - 0.5) * 0.2f;
    gf_tensor(f, name, n_in, n_out, 0, x, (size_t)n * 4);
    free(x);
}

static struct gf large_model(const char *leave_out)
{
    static const struct {
        const char *key;
        uint32_t value;
    } keys[] = {{"block_count", LAYERS},      {"context_length", 64},
                {"embedding_length", HIDDEN}, {"feed_forward_length", FF},
                {"attention.head_count", 8},  {"attention.head_count_kv", 2}};
    static const struct {
        const char *name;
        int64_t n_in, n_out;
    } rows[] = {{"attn_norm", HIDDEN, 0},       {"ffn_norm", HIDDEN, 0},
                {"attn_q", HIDDEN, HIDDEN},     {"attn_k", HIDDEN, HIDDEN / 4},
                {"attn_v", HIDDEN, HIDDEN / 4}, {"attn_output", HIDDEN, HIDDEN},
                {"ffn_gate", HIDDEN, FF},       {"ffn_up", HIDDEN, FF},
                {"ffn_down", FF, HIDDEN}};
    struct gf f = {0};
    char name[64];
    gf_str(&f, "general.architecture", "llama");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(name, sizeof name, "llama.%s", keys[i].key);
        gf_u32(&f, name, keys[i].value);
    }
    gf_f32(&f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    random_tensor(&f, "token_embd.weight", HIDDEN, VOCAB, 0);
    random_tensor(&f, "output.weight", HIDDEN, VOCAB, 0);
    random_tensor(&f, "output_norm.weight", HIDDEN, 0, 1);
    for (int i = 0; i < LAYERS; i++)
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", i, rows[k].name);
            if (!leave_out || strcmp(name, leave_out) != 0)
                random_tensor(&f, name, rows[k].n_in, rows[k].n_out, rows[k].n_out ? 0 : 1);
        }
    return f;
}

/* The mixes of llama.cpp, by layer. Of 10 layers "more" are 0, 3, 6, 8 and 9. */
static void types_by_layer(void **state)
{
    (void)state;
    static const struct {
        const char *mix, *tensor, *type;
    } rows[] = {{"q4_k_m", "model.embed_tokens.weight", "Q4_K"},
                {"q4_k_m", "lm_head.weight", "Q6_K"},
                {"q4_k_m", "0.self_attn.v_proj.weight", "Q6_K"},
                {"q4_k_m", "1.self_attn.v_proj.weight", "Q4_K"},
                {"q4_k_m", "3.mlp.down_proj.weight", "Q6_K"},
                {"q4_k_m", "4.mlp.down_proj.weight", "Q4_K"},
                {"q4_k_m", "8.self_attn.v_proj.weight", "Q6_K"},
                {"q4_k_m", "7.self_attn.v_proj.weight", "Q4_K"},
                {"q4_k_m", "0.self_attn.q_proj.weight", "Q4_K"},
                {"q5_k_m", "9.mlp.down_proj.weight", "Q6_K"},
                {"q5_k_m", "5.mlp.up_proj.weight", "Q5_K"},
                {"q4_k_s", "3.self_attn.v_proj.weight", "Q5_K"},
                {"q4_k_s", "4.self_attn.v_proj.weight", "Q4_K"},
                {"q4_k_s", "0.mlp.down_proj.weight", "Q5_K"},
                {"q4_k_s", "1.mlp.down_proj.weight", "Q4_K"},
                {"q5_k_s", "0.mlp.down_proj.weight", "Q5_K"},
                {"iq4_nl", "7.self_attn.v_proj.weight", "Q5_K"},
                {"iq4_nl", "0.self_attn.k_proj.weight", "IQ4_NL"},
                {"q4_0", "lm_head.weight", "Q6_K"},
                {"q4_0", "model.embed_tokens.weight", "Q4_0"},
                {"q8_0", "lm_head.weight", "Q8_0"},
                {"q6_k", "2.mlp.up_proj.weight", "Q6_K"}};
    const struct td_model_config c = {.n_layers = 10, .n_heads = 8, .n_kv_heads = 2};
    const struct td_format *own = td_format_of_dtype(TD_BF16);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char name[96];
        bool in_layer = rows[i].tensor[0] >= '0' && rows[i].tensor[0] <= '9';
        snprintf(name, sizeof name, "%s%s", in_layer ? "model.layers." : "", rows[i].tensor);
        const struct td_format *f =
            td_mix_format(td_mix_by_name(rows[i].mix), &c, name, HIDDEN, own);
        if (strcmp(f->name, rows[i].type) != 0)
            fail_msg("%s: %s is %s, must be %s", rows[i].mix, name, f->name, rows[i].type);
    }
    const struct td_model_config tied = {.n_layers = 1, .tied_embeddings = true};
    const struct td_mix *mix = td_mix_by_name("q4_k_m");
#define TYPE_OF(cols) td_mix_format(mix, &tied, "model.embed_tokens.weight", cols, own)->name
    assert_string_equal(TYPE_OF(HIDDEN), "Q6_K");
    assert_string_equal(TYPE_OF(HIDDEN + 32), "Q8_0"); /* no blocks of 256 */
    assert_string_equal(TYPE_OF(HIDDEN + 16), "BF16"); /* no blocks at all */
#undef TYPE_OF
    struct gf f = large_model(NULL);
    gf_write(&f, path);
    quantize(path, "q4_k_m", other);
    same_bits(path, "q4_k_m", other, "auto", true);
}

static int files_in_folder(void)
{
    int n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void fails(const char *from, const char *to, bool force, td_status want, const char *part)
{
    struct td_err err = {0};
    td_status s = try_quantize(from, "q8_0", to, false, force, &err);
    if (s != want || !strstr(err.msg, part))
        fail_msg("%s (%s), must be %s with \"%s\"", td_status_name(s), err.msg,
                 td_status_name(want), part);
}

static void what_cannot_be_written_leaves_nothing(void **state)
{
    (void)state;
    struct gf f = large_model("blk.2.ffn_norm.weight");
    gf_write(&f, path);
    unlink(other);
    fails(path, other, false, TD_ERR_CORRUPT, "tensor blk.2.ffn_norm.weight is missing");
    f = large_model(NULL);
    gf_write(&f, path);
    FILE *file = fopen(path, "r+b");
    const float infinity = INFINITY;
    assert_non_null(file);
    fseek(file, -4 * 1000, SEEK_END); /* in ffn_down of the last layer */
    fwrite(&infinity, 4, 1, file);
    fclose(file);
    fails(path, other, false, TD_ERR_CORRUPT,
          "tensor blk.3.ffn_down.weight, row 252: a value is infinite");
    fails(FIXTURES "mistral_window", other, false, TD_ERR_UNSUPPORTED, "sliding_window is");
    f = large_model(NULL);
    gf_write(&f, path);
    fails(path, "/tmp/no such folder/x.gguf", false, TD_ERR_IO, "No such file or directory");
    assert_int_equal(files_in_folder(), 1); /* what was read */

    quantize(path, "q8_0", other);
    fails(path, other, false, TD_ERR_INVALID, "exists");
    /* a disk that is full: the old file stays as it was */
    struct stat before, after;
    struct rlimit was, small = {.rlim_cur = 100000, .rlim_max = RLIM_INFINITY};
    stat(other, &before);
    getrlimit(RLIMIT_FSIZE, &was);
    small.rlim_max = was.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    fails(path, other, true, TD_ERR_IO, "no room for");
    setrlimit(RLIMIT_FSIZE, &was);
    stat(other, &after);
    assert_true(before.st_ino == after.st_ino && before.st_size == after.st_size);
    assert_int_equal(files_in_folder(), 2);
}

/* ---- directories ----------------------------------------------------------------------------- */

static float value_of(const struct td_tensor *t, int64_t i)
{
    float f;
    td_format_read(t->format, t->data + td_format_bytes(t->format, i), 1, &f);
    return f;
}

/* 8-bit floats by their definition: sign, 4 bits of exponent of bias 7, 3 of fraction. */
static double e4m3(uint8_t c)
{
    int e = c >> 3 & 15;
    double v = e ? ldexp(8 + (c & 7), e - 10) : ldexp(c & 7, -9);
    return c & 0x80 ? -v : v;
}

/* Codes and scales of a matrix against the values that they were made of. */
static void check_matrix(const struct td_tensor *was, const struct td_tensor *t,
                         const struct td_tensor *scales, bool is_fp8)
{
    int64_t n_rows = was->shape[0], n = was->shape[1];
    bool by_row = scales->n_dims == 2;
    assert_string_equal(t->dtype_name, is_fp8 ? "F8_E4M3" : "I8");
    assert_true(t->shape[0] == n_rows && t->shape[1] == n);
    assert_true(scales->shape[0] == (by_row ? n_rows : 1));
    for (int64_t r = 0; r < n_rows; r++) {
        double s = (double)value_of(scales, by_row ? r : 0), most = 0, limit = is_fp8 ? 448 : 127;
        for (int64_t k = 0; k < n; k++) {
            double w = (double)value_of(was, r * n + k);
            uint8_t c = t->data[r * n + k];
            double got = s * (is_fp8 ? e4m3(c) : (int8_t)c),
                   step = is_fp8 ? fmax(fabs(got) / 16, s * 0x1p-10) : s / 2;
            most = fmax(most, fabs(w));
            assert_true(is_fp8 ? (c & 0x7f) != 0x7f : (int8_t)c != -128);
            /* beyond half a step only what the scale's own rounding to bf16 cuts off */
            if (!(fabs(got - w) <= step * 1.001 + fabs(w) * 0x1p-8))
                fail_msg("%s[%d, %d]: %g became %g, scale %g", was->name, (int)r, (int)k, w, got,
                         s);
        }
        if (by_row && !(fabs(s * limit / most - 1) <= 0x1p-8))
            fail_msg("%s row %d: scale %g for values up to %g", was->name, (int)r, s, most);
    }
}

static td_status write_directory(enum td_quantize_codes codes, bool force, struct td_err *err)
{
    struct source x;
    td_status s = source_open(&x, "models/pocket", NULL, err);
    if (!s) s = td_quantize_directory(&x.q, codes, other, force, err);
    source_close(&x);
    return s;
}

static void empty_directory(void)
{
    char file[300];
    DIR *d = opendir(other);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(file, sizeof file, "%s/%s", other, e->d_name);
        unlink(file);
    }
    if (d) closedir(d);
    rmdir(other);
}

/* `other` becomes llama1_mha with no values in the norm that its file ends with. */
static void write_empty_norm(void)
{
    static const char from[] = FIXTURES "llama1_mha", norm[] = "\"model.norm.weight\"",
                      full[] = "\"shape\":[48]", empty[] = "\"shape\":[0] ";
    struct td_err err = {0};
    const char *const names[] = {"config.json", "model.safetensors"};
    assert_int_equal(mkdir(other, 0700), 0);
    for (int i = 0; i < 2; i++) {
        char *bytes, *at, file[200];
        size_t n;
        snprintf(file, sizeof file, "%s/%s", from, names[i]);
        if (td_file_read(file, 1 << 20, &bytes, &n, &err)) fail_msg("%s", err.msg);
        if (i == 1) {
            at = memmem(bytes, n, norm, strlen(norm));
            assert_non_null(at);
            at = strstr(at, full);
            assert_non_null(at);
            memcpy(at, empty, strlen(empty));
            char *begin = strchr(strchr(at + strlen(full), '['), ',') - 6, *end = begin + 7;
            assert_true(begin[6] == ',' && end[6] == ']');
            memcpy(end, begin, 6);
            n -= 48 * sizeof(float);
        }
        snprintf(file, sizeof file, "%s/%s", other, names[i]);
        FILE *f = fopen(file, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, n, f), n);
        fclose(f);
        free(bytes);
    }
}

/* safetensors allows a dimension of 0, a GGUF file a vector in blocks. */
static void tensors_of_no_size_or_of_blocks(void **state)
{
    (void)state;
    static const uint8_t blocks[HIDDEN / 32 * 34];
    struct source x;
    struct td_err err = {0};
    unlink(path), unlink(other);
    write_empty_norm();
    fails(other, path, false, TD_ERR_CORRUPT,
          "tensor model.norm.weight has no values: a dimension is 0");
    if (source_open(&x, other, NULL, &err)) fail_msg("%s", err.msg);
    td_status s = td_quantize_directory(&x.q, TD_QUANTIZE_W8A8, path, false, &err);
    source_close(&x);
    if (s != TD_ERR_CORRUPT ||
        !strstr(err.msg, "tensor model.norm.weight has no values: a dimension is 0"))
        fail_msg("%s (%s)", td_status_name(s), err.msg);
    assert_int_equal(files_in_folder(), 1); /* what was read */
    empty_directory();

    struct gf f = large_model(NULL);
    gf_tensor(&f, "blk.0.attn_q.bias", HIDDEN, 0, 8, blocks, sizeof blocks);
    gf_write(&f, path);
    fails(path, other, false, TD_ERR_UNSUPPORTED,
          "tensor blk.0.attn_q.bias is Q8_0 with 1 dimensions");
    assert_int_equal(files_in_folder(), 1);
}

static void directories_of_compressed_tensors(void **state)
{
    (void)state;
    static const char *const format[] = {"int-quantized", "float-quantized", "float-quantized"};
    struct td_err err = {0};
    unlink(path), unlink(other);
    for (int codes = TD_QUANTIZE_W8A8; codes <= TD_QUANTIZE_FP8_TENSOR; codes++) {
        struct td_checkpoint was, now;
        json_t *config;
        char name[200];
        int n_codes = 0;
        if (write_directory((enum td_quantize_codes)codes, codes > 0, &err))
            fail_msg("%s", err.msg);
        if (td_checkpoint_open("models/pocket", &was, &err) ||
            td_checkpoint_open(other, &now, &err))
            fail_msg("%s", err.msg);
        for (int32_t i = 0; i < was.n_tensors; i++) {
            const struct td_tensor *t = &was.tensors[i], *u = td_checkpoint_find(&now, t->name);
            snprintf(name, sizeof name, "%s_scale", t->name);
            const struct td_tensor *scales = td_checkpoint_find(&now, name);
            assert_non_null(u);
            if (!scales) {
                assert_true(u->n_bytes == t->n_bytes && u->format == t->format);
                assert_memory_equal(u->data, t->data, t->n_bytes);
                continue;
            }
            n_codes++;
            check_matrix(t, u, scales, codes != TD_QUANTIZE_W8A8);
        }
        assert_int_equal(n_codes, 7 * 5);
        td_checkpoint_close(&was), td_checkpoint_close(&now);
        snprintf(name, sizeof name, "%s/config.json", other);
        if (td_json_load_file(name, 1 << 20, &config, &err)) fail_msg("%s", err.msg);
        const json_t *quant = json_object_get(config, "quantization_config");
        assert_string_equal(json_string_value(json_object_get(quant, "format")), format[codes]);
        json_decref(config);
        snprintf(name, sizeof name, "%s/tokenizer.json", other);
        assert_int_equal(access(name, F_OK), 0);
        assert_int_equal(files_in_folder(), 1); /* nothing partial */
    }
    assert_int_equal(write_directory(TD_QUANTIZE_W8A8, false, &err), TD_ERR_IO);
    assert_int_equal(files_in_folder(), 1);
    empty_directory();
}

/* Words and scales of a packed matrix against the values that they were made of: every code is the
 * nearest, and scales are by least squares, so the whole is closer than by the largest value. */
static void check_packed(const struct td_tensor *was, const struct td_tensor *words,
                         const struct td_tensor *scales, const struct td_tensor *shape)
{
    enum { GROUP = 64 }; /* of rows of 192 and 512 */
    int64_t n = was->shape[1], n_rows = was->shape[0], told[2];
    double off = 0, size = 0;
    assert_string_equal(words->dtype_name, "I32");
    assert_string_equal(shape->dtype_name, "I64");
    assert_true(words->shape[0] == n_rows && words->shape[1] == n / 8);
    assert_true(scales->shape[0] == n_rows && scales->shape[1] == n / GROUP);
    memcpy(told, shape->data, sizeof told);
    assert_true(shape->n_dims == 1 && told[0] == n_rows && told[1] == n);
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t k = 0; k < n; k++) {
            uint32_t word;
            memcpy(&word, words->data + 4 * (r * n / 8 + k / 8), sizeof word);
            int code = (int)(word >> 4 * (k % 8) & 15) - 8;
            double w = (double)value_of(was, r * n + k),
                   s = (double)value_of(scales, r * n / GROUP + k / GROUP);
            assert_true(s > 0);
            double low = code > -8 ? -0.5 : -INFINITY, high = code < 7 ? 0.5 : INFINITY;
            if (!(w / s - code >= low * 1.0001 && w / s - code <= high * 1.0001))
                fail_msg("%s[%d, %d]: %g has code %d, scale %g", was->name, (int)r, (int)k, w, code,
                         s);
            off += pow(w - s * code, 2);
            size += w * w;
        }
    if (!(sqrt(off / size) < 0.11))
        fail_msg("%s: relative error %g, at most 0.11", was->name, sqrt(off / size));
}

static void directory_of_packed_words(void **state)
{
    (void)state;
    struct td_checkpoint was;
    struct td_checkpoint now;
    struct td_err err = {0};
    int n_codes = 0;
    uint64_t hash;
    unlink(path), unlink(other);
    if (write_directory(TD_QUANTIZE_W4A16, false, &err) ||
        td_checkpoint_open("models/pocket", &was, &err) || td_checkpoint_open(other, &now, &err))
        fail_msg("%s", err.msg);
    for (int32_t i = 0; i < was.n_tensors; i++) {
        const struct td_tensor *t = &was.tensors[i], *part[3];
        static const char *const suffix[] = {"packed", "scale", "shape"};
        char name[200];
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "%s_%s", t->name, suffix[k]);
            part[k] = td_checkpoint_find(&now, name);
        }
        if (!part[0]) continue;
        assert_true(part[1] && part[2] && !td_checkpoint_find(&now, t->name));
        n_codes++;
        check_packed(t, part[0], part[1], part[2]);
    }
    assert_int_equal(n_codes, 7 * 5);
    td_checkpoint_close(&was), td_checkpoint_close(&now);
    free(logits_of(other, "auto", 20, &hash)); /* the loader agrees with its configuration */
    empty_directory();
}

/* ---- folding --------------------------------------------------------------------------------- */

/* Channels 3 and 77 see activations 40 times as large as the rest. */
static struct td_calibration loud_channels(const struct td_model_config *c)
{
    struct td_calibration k;
    struct td_err err = {0};
    if (td_calibration_create(c, &k, &err)) fail_msg("%s", err.msg);
    float *x = malloc((size_t)c->hidden * sizeof *x);
    for (int32_t input = 0; input < 2 * c->n_layers; input++)
        for (int r = 0; r < 40; r++) {
            for (int32_t j = 0; j < c->hidden; j++)
                x[j] =
                    (float)(td_random_uniform(&random_values) - 0.5) * (j == 3 || j == 77 ? 40 : 1);
            td_calibration_observe(&k, input, x, 1, c->hidden);
        }
    free(x);
    return k;
}

/* Squared difference of the outputs of q in layer 0 on the kept rows: made by a file of a mix. */
static double output_error(const char *mix, const struct td_fold *f, const struct td_calibration *k)
{
    struct td_checkpoint was, now;
    struct td_err err = {0};
    static const char name[] = "model.layers.0.self_attn.q_proj.weight";
    fold = f;
    quantize(path, mix, other);
    fold = NULL;
    if (td_checkpoint_open(path, &was, &err) || td_checkpoint_open(other, &now, &err))
        fail_msg("%s", err.msg);
    const struct td_tensor *a = td_checkpoint_find(&was, name), *b = td_checkpoint_find(&now, name);
    float w[HIDDEN], v[HIDDEN];
    double error = 0;
    for (int64_t r = 0; r < a->shape[0]; r++) {
        td_format_read(a->format, a->data + td_format_bytes(a->format, r * HIDDEN), HIDDEN, w);
        td_format_read(b->format, b->data + td_format_bytes(b->format, r * HIDDEN), HIDDEN, v);
        for (int i = 0; i < TD_CALIBRATION_ROWS; i++) {
            double sum = 0;
            for (int j = 0; j < HIDDEN; j++)
                sum += (double)k->rows[i * HIDDEN + j] *
                       ((double)v[j] / (f ? (double)f->scales[j] : 1) - (double)w[j]);
            error += sum * sum;
        }
    }
    td_checkpoint_close(&was), td_checkpoint_close(&now);
    return error;
}

static void folding_changes_no_logit_and_helps_rounding(void **state)
{
    (void)state;
    struct source x;
    struct td_err err = {0};
    struct td_fold smooth, searched;
    struct gf f = large_model(NULL);
    gf_write(&f, path);
    if (source_open(&x, path, "q4_0", &err)) fail_msg("%s", err.msg);
    struct td_calibration k = loud_channels(&x.c);
    if (td_fold_smooth(&x.q, &k, 0.5f, &smooth, &err) || td_fold_search(&x.q, &k, &searched, &err))
        fail_msg("%s", err.msg);
    source_close(&x);
    assert_true(smooth.scales[3] >= 4 * smooth.scales[4]);
    assert_true(searched.scales[77] > 2 * searched.scales[4]);
    fold = &smooth; /* powers of two: the bits stay */
    quantize(path, "f32", other);
    same_bits(path, "f32", other, "f32", false);
    fold = &searched; /* others: each factor is rounded once, 24 bits */
    quantize(path, "f32", other);
    fold = NULL;
    uint64_t hash;
    float *a = logits_of(path, "f32", 20, &hash), *b = logits_of(other, "f32", 20, &hash);
    double off = 0, size = 0;
    for (int i = 0; i < 20 * VOCAB; i++) {
        off = fmax(off, fabs((double)a[i] - (double)b[i]));
        size = fmax(size, fabs((double)a[i]));
    }
    free(a), free(b);
    if (!(off > 0 && off <= 1e-4 * size)) fail_msg("logits of %g are off by %g", size, off);
    double plain = output_error("q4_0", NULL, &k), better = output_error("q4_0", &searched, &k);
    printf("output error %g, with the search %g\n", plain, better);
    if (!(better < 0.5 * plain)) fail_msg("error %g, with the search %g", plain, better);
    td_fold_free(&smooth), td_fold_free(&searched);
    td_calibration_free(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_files_give_the_bits_of_the_directory),
        cmocka_unit_test(rounding_at_load_is_the_file),
        cmocka_unit_test(all_ends_of_a_generation_are_carried),
        cmocka_unit_test(types_by_layer),
        cmocka_unit_test(what_cannot_be_written_leaves_nothing),
        cmocka_unit_test(folding_changes_no_logit_and_helps_rounding),
        cmocka_unit_test(tensors_of_no_size_or_of_blocks),
        cmocka_unit_test(directories_of_compressed_tensors),
        cmocka_unit_test(directory_of_packed_words),
    };
    snprintf(folder, sizeof folder, "/tmp/tandem-quantize-%d", (int)getpid());
    snprintf(path, sizeof path, "%s/a.gguf", folder);
    snprintf(other, sizeof other, "%s/b.gguf", folder);
    mkdir(folder, 0700);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path), unlink(other), rmdir(folder);
    return failed;
}
