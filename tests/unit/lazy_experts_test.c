/* lazy_experts_test.c - experts that are packed when a row chooses them: places and their memory
 * in random play beside a plain model, and logits, hash and refusals beside packing at load. */
#include "common/model/lazy_experts.h"

#include "tests/golden/model_rig.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "common/base/random.h"

static uint32_t draw(struct td_random *random, uint32_t n)
{
    return td_random_index(&random->s, n);
}

static bool is_short(void)
{
    const char *text = getenv("TANDEM_TEST_SHORT");
    return text && strcmp(text, "1") == 0;
}

/* ---- places, alone --------------------------------------------------------------------------- */

enum { LAYERS = 3, EXPERTS = 6, N = LAYERS * EXPERTS, PARTS = 3, CHUNK = 4096 };

struct play {
    struct td_lazy_experts *lazy;
    struct td_thread_pool *threads;
    size_t bytes[N];
    int32_t n_chunks[N];
    _Atomic int n_packs[N]; /* chunks packed, ever */
    int32_t layer, from, end, first[EXPERTS + 1];
};

/* What chunk `chunk` of an expert is filled with, at its begin and end. */
static uint8_t mark(int32_t index, int32_t chunk) { return (uint8_t)(1 + index * 13 + chunk); }

static void pack(void *ctx, int32_t index, int32_t chunk, int part)
{
    struct play *p = ctx;
    uint8_t *to = td_lazy_experts_place(p->lazy, index) + (size_t)chunk * CHUNK;
    size_t left = p->bytes[index] - (size_t)chunk * CHUNK, n = left < CHUNK ? left : CHUNK;
    assert_true(part >= 0 && part < PARTS && chunk < p->n_chunks[index]);
    for (size_t i = 0; i < n; i++) assert_int_equal(to[i], 0); /* zeroed, and nobody else's */
    memset(to, mark(index, chunk), n);
    p->n_packs[index]++;
}

static void meet(void *threads) { td_thread_pool_barrier(threads); }

static void need_part(void *ctx, int part, int n_parts)
{
    struct play *p = ctx;
    const struct td_lazy_team team = {part, n_parts, meet, p->threads};
    td_lazy_experts_need(p->lazy, &team, p->layer, p->first, p->from, p->end);
    for (int32_t e = p->from; e < p->end; e++) { /* every part sees them at once */
        int32_t index = p->layer * EXPERTS + e;
        const uint8_t *at = td_lazy_experts_place(p->lazy, index);
        if (p->first[e] == p->first[e + 1]) continue;
        for (int32_t c = 0; c < p->n_chunks[index]; c++)
            assert_int_equal(at[(size_t)c * CHUNK], mark(index, c));
        assert_int_equal(at[p->bytes[index] - 1], mark(index, p->n_chunks[index] - 1));
    }
}

/* Pages of a place that have memory. */
static size_t resident(const struct play *p, int32_t index)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (p->bytes[index] + page - 1) / page, sum = 0;
    unsigned char map[64];
    assert_true(n <= sizeof map);
    assert_int_equal(mincore(td_lazy_experts_place(p->lazy, index), n * page, map), 0);
    for (size_t i = 0; i < n; i++) sum += map[i] & 1;
    return sum;
}

/* What is packed, by the rule: the last chosen ones for which there is room. */
struct packed {
    bool is[N];
    uint64_t used[N], n_packings;
};

static size_t place_bytes(const struct play *p, int32_t index)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (p->bytes[index] + page - 1) / page * page;
}

static uint64_t packed_bytes(const struct play *p, const struct packed *x)
{
    uint64_t bytes = 0;
    for (int32_t k = 0; k < N; k++) bytes += x->is[k] ? place_bytes(p, k) : 0;
    return bytes;
}

static void need_by_the_rule(const struct play *p, struct packed *x, uint64_t most, uint64_t turn)
{
    uint64_t missing = 0;
    for (int32_t e = p->from; e < p->end; e++) {
        int32_t k = p->layer * EXPERTS + e;
        if (p->first[e] == p->first[e + 1]) continue;
        x->used[k] = turn;
        if (x->is[k]) continue;
        missing += place_bytes(p, k);
        x->n_packings++;
    }
    while (missing && packed_bytes(p, x) + missing > most) {
        int32_t oldest = -1;
        for (int32_t k = 0; k < N; k++)
            if (x->is[k] && x->used[k] < turn && (oldest < 0 || x->used[k] < x->used[oldest]))
                oldest = k;
        assert_true(oldest >= 0);
        x->is[oldest] = false;
    }
    for (int32_t e = p->from; e < p->end; e++)
        x->is[p->layer * EXPERTS + e] |= p->first[e] < p->first[e + 1];
}

static void check_memory(const struct play *p, const struct packed *x, uint64_t most)
{
    struct td_expert_memory m;
    uint64_t n = 0;
    td_lazy_experts_memory(p->lazy, &m);
    for (int32_t k = 0; k < N; k++) {
        if (p->bytes[k]) assert_true(x->is[k] || resident(p, k) == 0);
        n += x->is[k];
    }
    assert_true(m.packed_bytes == packed_bytes(p, x) && m.n_packed == n);
    assert_true(m.packings == x->n_packings && m.n == 10);
    assert_true(m.packed_bytes <= m.bytes && m.bytes <= most);
}

static void play(uint64_t most, struct td_random *random, int n_turns)
{
    struct play p = {0};
    struct packed x = {0};
    struct td_err err = {0};
    assert_int_equal(td_thread_pool_create(PARTS, NULL, 0, &p.threads, &err), TD_OK);
    for (int32_t i = 0; i < N; i++) {
        if (i / EXPERTS == 1 || i % EXPERTS == 5) continue; /* no mixture; another rank's */
        p.bytes[i] = 100 + draw(random, 3 * CHUNK);
        p.n_chunks[i] = (int32_t)((p.bytes[i] + CHUNK - 1) / CHUNK);
    }
    const struct td_lazy_config c = {.bytes = p.bytes,
                                     .n_chunks = p.n_chunks,
                                     .n_layers = LAYERS,
                                     .n_experts = EXPERTS,
                                     .most_bytes = most,
                                     .n_ranks = 1,
                                     .pack = pack,
                                     .ctx = &p};
    if (td_lazy_experts_create(&c, &p.lazy, &err)) fail_msg("%s", err.msg);
    for (int turn = 1; turn <= n_turns; turn++) {
        p.layer = draw(random, 2) ? 2 : 0;
        p.from = (int32_t)draw(random, 2), p.end = 5;
        for (int32_t e = 0; e < EXPERTS; e++) p.first[e + 1] = p.first[e] + (draw(random, 3) == 0);
        need_by_the_rule(&p, &x, most, (uint64_t)turn);
        td_thread_pool_run(p.threads, need_part, &p);
        check_memory(&p, &x, most);
    }
    td_lazy_experts_destroy(p.lazy);
    td_thread_pool_destroy(p.threads);
}

static void places_hold_what_was_packed(void **state)
{
    (void)state;
    const char *seed = getenv("SEED");
    struct td_random random = td_random_stream(seed ? strtoull(seed, NULL, 0) : 20261128, 0);
    int n_turns = is_short() ? 40 : 200;
    play(UINT64_MAX, &random, n_turns);
    for (int i = 0; i < 4; i++) play((uint64_t)(5 + 2 * i) * 4 * CHUNK, &random, n_turns);
}

/* ---- models ---------------------------------------------------------------------------------- */

static char made[64]; /* a config */

static void write_config(int hidden, int expert_mlp)
{
    snprintf(made, sizeof made, "/tmp/td_lazy_XXXXXX");
    int fd = mkstemp(made);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    fprintf(f,
            "{\"model_type\":\"qwen3_moe\",\"hidden_size\":%d,\"intermediate_size\":96,"
            "\"num_hidden_layers\":4,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
            "\"head_dim\":16,\"vocab_size\":99,\"max_position_embeddings\":256,\"num_experts\":9,"
            "\"num_experts_per_tok\":2,\"moe_intermediate_size\":%d,\"norm_topk_prob\":true,"
            "\"mlp_only_layers\":[1],\"dtype\":\"bfloat16\"}",
            hidden, expert_mlp);
    fclose(f);
}

struct seen {
    float *logits;
    size_t n_bytes; /* of the logits */
    uint64_t hash;
    struct td_expert_memory before, after;
};

static int n_gave_way; /* models in which some experts did */

static struct seen look(const struct td_model_params *params, const char *experts, int n_threads,
                        int32_t chunk)
{
    enum { TOKENS = 40 };
    struct td_model_params p = *params;
    struct rig g;
    struct seen s;
    int32_t tokens[TOKENS];
    p.experts = experts;
    rig_open(&g, &p, n_threads, 16, TOKENS, TOKENS);
    for (int32_t i = 0; i < TOKENS; i++) tokens[i] = (i * i * 7 + 3) % (g.vocab - 1);
    s.hash = td_model_hash(g.model);
    td_model_expert_memory(g.model, &s.before);
    s.logits = rig_prompt(&g, 0, tokens, TOKENS, chunk);
    s.n_bytes = TOKENS * (size_t)g.vocab * sizeof *s.logits;
    td_model_expert_memory(g.model, &s.after);
    rig_close(&g);
    return s;
}

static void compare(const struct seen *want, const struct seen *got, const char *what)
{
    if (memcmp(want->logits, got->logits, want->n_bytes) != 0 || want->hash != got->hash)
        fail_msg("%s: other %s than packed at load", what,
                 want->hash != got->hash ? "hash" : "logits");
}

/* One model: the same bits whenever experts are packed, in room for all and for those of a layer,
 * whatever chunks and threads. */
static void check_model(const struct td_model_params *params, const char *what)
{
    char most[32];
    struct seen load = look(params, "load", 1, 40), lazy = look(params, "lazy", 2, 7);
    compare(&load, &lazy, what);
    assert_true(load.before.n == load.before.n_packed && load.after.packings == 0);
    assert_true(lazy.before.n == load.before.n && lazy.before.n_packed == 0);
    assert_true(lazy.before.packed_bytes == 0 && lazy.before.bytes >= load.before.bytes);
    assert_true(lazy.after.packings == lazy.after.n_packed && lazy.after.n_packed > 0);
    /* as few as all layers with experts, of which there are at most four, leave for one */
    for (uint64_t n = 4; n > 1; n /= 2) {
        snprintf(most, sizeof most, "%llu", (unsigned long long)(lazy.before.bytes / n));
        struct td_model_params p = *params;
        struct td_model *m = NULL;
        struct td_err err = {0};
        p.experts = most;
        p.quiet = true;
        if (td_thread_pool_create(1, NULL, 0, &p.threads, &err)) fail_msg("%s", err.msg);
        td_status s = td_model_open(&p, &m, &err);
        td_model_close(m);
        td_thread_pool_destroy(p.threads);
        if (s == TD_ERR_INVALID && strstr(err.msg, "the experts of one layer")) continue;
        if (s) fail_msg("%s: %s", what, err.msg);
        struct seen few = look(params, most, 3, 1);
        compare(&load, &few, what);
        assert_true(few.after.packed_bytes <= few.after.bytes);
        assert_true(few.after.bytes == lazy.before.bytes / n);
        n_gave_way += few.after.packings > few.after.n_packed;
        free(few.logits);
        break;
    }
    free(load.logits);
    free(lazy.logits);
}

static void every_format_of_a_random_model(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"f32", "bf16", "q8_0", "q4_0"};
    write_config(96, 64);
    for (int i = 0; i < 4; i++) {
        if (is_short() && i % 2 == 0) continue;
        check_model(&(struct td_model_params){.random_config = made, .dtype = dtypes[i]},
                    dtypes[i]);
        assert_true(n_gave_way > 0);
        n_gave_way = 0;
    }
    unlink(made);
}

/* Mixtures of every family, in F16, BF16 and MXFP4, one tensor for each expert or one for all. */
static void every_golden_mixture(void **state)
{
    (void)state;
    static const char *const folders[] = {"tests/golden/mixtures", "tests/golden/latent"};
    int n = 0;
    for (int f = 0; f < 2; f++) {
        DIR *dir = opendir(folders[f]);
        if (!dir) fail_msg("%s is missing (run from the source root)", folders[f]);
        for (struct dirent *e; (e = readdir(dir));) {
            char path[400];
            struct td_model_config c;
            struct td_err err = {0};
            if (strchr(e->d_name, '.')) continue;
            snprintf(path, sizeof path, "%s/%s", folders[f], e->d_name);
            if (td_model_config_load(path, &c, &err)) fail_msg("%s", err.msg);
            if (!c.experts.n) continue;
            if (is_short() && n++ % 4) continue;
            for (int k = 0; k < 2; k++)
                check_model(&(struct td_model_params){.dir = path, .dtype = k ? "f32" : "bf16"},
                            path);
        }
        closedir(dir);
    }
    printf("lazy experts: some gave way in %d runs\n", n_gave_way);
    assert_true(n_gave_way > 3);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void refuse(const char *dir, const char *experts, td_status want, const char *says)
{
    struct td_err err = {0};
    struct td_model *m = NULL;
    struct td_thread_pool *threads;
    assert_int_equal(td_thread_pool_create(2, NULL, 0, &threads, &err), TD_OK);
    bool is_config = strcmp(dir, made) == 0;
    struct td_model_params p = {.dir = is_config ? NULL : dir,
                                .random_config = is_config ? made : NULL,
                                .threads = threads,
                                .experts = experts,
                                .quiet = true};
    td_status s = td_model_open(&p, &m, &err);
    if (s != want || !strstr(err.msg, says))
        fail_msg("answered %s: %s\n  expected %s: ...%s...", td_status_name(s), err.msg,
                 td_status_name(want), says);
    td_model_close(m);
    td_thread_pool_destroy(threads);
}

static void texts_and_bounds_are_refused_by_name(void **state)
{
    (void)state;
    write_config(96, 64);
    refuse(made, "later", TD_ERR_INVALID,
           "experts is \"later\", must be load, lazy or a size (20GiB)");
    refuse(made, "0", TD_ERR_INVALID, "experts is \"0\"");
    refuse(made, "-1", TD_ERR_INVALID, "experts is \"-1\"");
    refuse(made, "4KiB", TD_ERR_INVALID, "experts is 4 KiB, must be at least ");
    refuse(made, "1TiB", TD_OK, ""); /* all */
    unlink(made);
}

#define GPT_OSS "tests/golden/mixtures/gpt_oss_mxfp4"

/* A copy of a model of golden files whose one file can be written to. */
static void copy_model(char dir[64])
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    snprintf(dir, 64, "/tmp/td_lazy_XXXXXX");
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < 2; i++) {
        char path[128], *text;
        size_t bytes;
        struct td_err err = {0};
        snprintf(path, sizeof path, "%s/%s", GPT_OSS, names[i]);
        if (td_file_read(path, (size_t)1 << 24, &text, &bytes, &err)) fail_msg("%s", err.msg);
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        FILE *f = fopen(path, "wb");
        assert_int_equal(fwrite(text, 1, bytes, f), bytes);
        fclose(f);
        free(text);
    }
}

static void remove_model(const char *dir)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
}

/* Overwrites the scales of every layer's experts in place. */
static void write_scales(const char *dir, uint8_t with)
{
    char path[128], *text, *at;
    size_t bytes;
    unsigned long long n, begin, end;
    struct td_err err = {0};
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (td_file_read(path, (size_t)1 << 24, &text, &bytes, &err)) fail_msg("%s", err.msg);
    memcpy(&n, text, 8);
    FILE *f = fopen(path, "r+b");
    text[8 + n] = 0;
    for (char *t = text + 8; (t = strstr(t, "_scales\"")); t = at) {
        at = strstr(t, "data_offsets\"");
        assert_int_equal(sscanf(strchr(at, '['), "[%llu,%llu]", &begin, &end), 2);
        fseek(f, (long)(8 + n + begin), SEEK_SET);
        for (; begin < end; begin++) fputc(with, f);
    }
    fclose(f);
    free(text);
}

/* A scale that is no number is refused as the model loads, though nobody has chosen the expert. */
static void scales_are_checked_at_load(void **state)
{
    (void)state;
    char dir[64];
    copy_model(dir);
    refuse(dir, "lazy", TD_OK, "");
    write_scales(dir, 255);
    refuse(dir, "load", TD_ERR_CORRUPT, "is infinite or no number");
    refuse(dir, "lazy", TD_ERR_CORRUPT, "is infinite or no number");
    remove_model(dir);
}

/* The process ends, and says which file it was, before a row is multiplied by other weights. */
static void files_must_not_change(void **state)
{
    (void)state;
    char dir[64], said[512] = "";
    int pipes[2], status;
    copy_model(dir);
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct rig g;
        int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        dup2(pipes[1], STDERR_FILENO);
        rig_open(&g, &(struct td_model_params){.dir = dir, .experts = "lazy"}, 2, 16, 8, 8);
        write_scales(dir, 125);
        free(rig_prompt(&g, 0, tokens, 8, 8));
        _exit(0);
    }
    close(pipes[1]);
    for (ssize_t n, at = 0; (n = read(pipes[0], said + at, sizeof said - 1 - (size_t)at)) > 0;)
        at += n;
    close(pipes[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 || !strstr(said, dir) ||
        !strstr(said, "changed since it was loaded"))
        fail_msg("status %d, said %s", status, said);
    remove_model(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_hold_what_was_packed),
        cmocka_unit_test(every_format_of_a_random_model),
        cmocka_unit_test(every_golden_mixture),
        cmocka_unit_test(texts_and_bounds_are_refused_by_name),
        cmocka_unit_test(scales_are_checked_at_load),
        cmocka_unit_test(files_must_not_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
