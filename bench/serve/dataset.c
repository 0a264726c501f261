/* dataset.c - see dataset.h. A loader for each kind appends items; what all kinds share
 * (scaling, cutting, order of time) is done at the end. */
#include "bench/serve/dataset.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/json.h"
#include "common/base/random.h"

#define MAX_LINE_BYTES (64u << 20)
#define MAX_FILE_BYTES ((size_t)4 << 30)
#define SHAREGPT_BATCH 64
#define CUSTOM_OUTPUT_LEN 256 /* vLLM's default */

enum { WHAT_LENGTHS = 16, WHAT_PROMPT, WHAT_PREFIX, WHAT_BLOCK, WHAT_ORDER };

struct bench_dataset {
    struct bench_dataset_config config;
    struct bench_item *items;
    size_t n_items, capacity;
    char **texts; /* what items[].text points at: files are sampled more
                     than once */
    size_t n_texts, texts_capacity;
    uint32_t *prefix_of; /* prefix_repetition */
    uint64_t block_tokens, n_cut;
};

bool bench_dataset_is_trace(enum bench_dataset_kind kind)
{
    return kind == BENCH_TIMED || kind == BENCH_MOONCAKE || kind == BENCH_AZURE;
}
size_t bench_dataset_size(const struct bench_dataset *d) { return d->n_items; }
uint64_t bench_dataset_n_cut(const struct bench_dataset *d) { return d->n_cut; }
uint64_t bench_dataset_block_tokens(const struct bench_dataset *d) { return d->block_tokens; }
const struct bench_item *bench_dataset_item(const struct bench_dataset *d, size_t i)
{
    return &d->items[i];
}

static td_status no_memory(struct td_err *err)
{
    return td_fail(err, TD_ERR_NOMEM, "dataset: out of memory");
}

static td_status add_item(struct bench_dataset *d, const struct bench_item *item,
                          struct td_err *err)
{
    if (d->n_items == BENCH_MAX_REQUESTS)
        return td_fail(err, TD_ERR_LIMIT, "dataset: more than %d requests", BENCH_MAX_REQUESTS);
    if (d->n_items == d->capacity) {
        size_t capacity = d->capacity ? 2 * d->capacity : 256;
        struct bench_item *grown = realloc(d->items, capacity * sizeof *grown);
        if (!grown) return no_memory(err);
        d->items = grown;
        d->capacity = capacity;
    }
    d->items[d->n_items++] = *item;
    return TD_OK;
}

/* The dataset's own copy; freed with it. */
static td_status add_text(struct bench_dataset *d, const char *text, const char **ret,
                          struct td_err *err)
{
    if (d->n_texts == d->texts_capacity) {
        size_t capacity = d->texts_capacity ? 2 * d->texts_capacity : 256;
        char **grown = realloc(d->texts, capacity * sizeof *grown);
        if (!grown) return no_memory(err);
        d->texts = grown;
        d->texts_capacity = capacity;
    }
    char *copy = strdup(text);
    if (!copy) return no_memory(err);
    d->texts[d->n_texts++] = copy;
    *ret = copy;
    return TD_OK;
}

/* A permutation of 0..n-1 drawn from the seed, or the order as it is. Caller frees. */
static size_t *make_order(size_t n, bool shuffle, uint64_t seed)
{
    size_t *order = malloc((n ? n : 1) * sizeof *order);
    if (!order) return NULL;
    for (size_t i = 0; i < n; i++) order[i] = i;
    struct td_keyed r = td_keyed_at(seed, WHAT_ORDER, 0);
    for (size_t i = n; shuffle && i > 1; i--) {
        size_t k = (size_t)td_keyed_below(&r, i), keep = order[k];
        order[k] = order[i - 1];
        order[i - 1] = keep;
    }
    return order;
}

/* --- lines of a file -------------------------------------------------------------------------- */

struct lines {
    FILE *file;
    const char *path;
    char *text; /* without its end of line */
    size_t text_bytes;
    unsigned long number; /* from 1 */
};

static td_status lines_open(struct lines *l, const char *path, struct td_err *err)
{
    memset(l, 0, sizeof *l);
    l->path = path;
    if (!path[0])
        return td_fail(err, TD_ERR_INVALID,
                       "--dataset-path is empty: this dataset comes from a file");
    l->file = fopen(path, "rbe");
    if (!l->file)
        return td_fail(err, TD_ERR_INVALID, "--dataset-path %s: %s", path, strerror(errno));
    return TD_OK;
}

static void lines_close(struct lines *l)
{
    if (l->file) fclose(l->file);
    free(l->text);
}

/* Reads the next line that is not empty; *ret_any false at the end. The length is bounded before
 * memory is taken for it. */
static td_status lines_next(struct lines *l, bool *ret_any, struct td_err *err)
{
    for (;;) {
        size_t n = 0;
        int c;
        while ((c = getc_unlocked(l->file)) != EOF && c != '\n') {
            if (n == MAX_LINE_BYTES)
                return td_fail(err, TD_ERR_LIMIT, "%s line %lu: longer than %u bytes", l->path,
                               l->number + 1, MAX_LINE_BYTES);
            if (n + 1 >= l->text_bytes) {
                size_t bytes = l->text_bytes ? 2 * l->text_bytes : 4096;
                char *grown = realloc(l->text, bytes);
                if (!grown) return no_memory(err);
                l->text = grown;
                l->text_bytes = bytes;
            }
            l->text[n++] = (char)c;
        }
        if (ferror(l->file)) return td_fail(err, TD_ERR_IO, "%s: %s", l->path, strerror(errno));
        if (c == EOF && n == 0) {
            *ret_any = false;
            return TD_OK;
        }
        l->number++;
        if (n && l->text[n - 1] == '\r') n--;
        if (n == 0) continue;
        l->text[n] = 0;
        if (strlen(l->text) != n)
            return td_fail(err, TD_ERR_INVALID, "%s line %lu: has a NUL byte", l->path, l->number);
        *ret_any = true;
        return TD_OK;
    }
}

/* --- made from the seed ----------------------------------------------------------------------- */

static int32_t draw_len(struct td_keyed *r, uint64_t len, double ratio)
{
    uint64_t lo = (uint64_t)floor((double)len * (1 - ratio)),
             hi = (uint64_t)ceil((double)len * (1 + ratio));
    if (lo < 1) lo = 1;
    return (int32_t)(lo + (hi > lo ? td_keyed_below(r, hi - lo + 1) : 0));
}

static td_status make_random(struct bench_dataset *d, struct td_err *err)
{
    const struct bench_dataset_config *c = &d->config;
    for (uint64_t i = 0; i < c->n_requests; i++) {
        struct td_keyed r = td_keyed_at(c->seed, WHAT_LENGTHS, i);
        struct bench_item item = {.input_len = draw_len(&r, c->input_len, c->range_ratio)};
        item.output_len = draw_len(&r, c->output_len, c->range_ratio);
        item.input_len += (int32_t)c->prefix_len;
        td_status s = add_item(d, &item, err);
        if (s) return s;
    }
    if (c->kind == BENCH_RANDOM) return TD_OK;
    size_t *order = make_order(d->n_items, true, c->seed);
    d->prefix_of = malloc((d->n_items ? d->n_items : 1) * sizeof *d->prefix_of);
    if (order && d->prefix_of)
        for (size_t i = 0; i < d->n_items; i++)
            d->prefix_of[i] = (uint32_t)(order[i] % c->n_prefixes);
    free(order);
    return order && d->prefix_of ? TD_OK : no_memory(err);
}

/* --- texts ------------------------------------------------------------------------------------ */

static td_status need(const char *where, const char *field, bool present, struct td_err *err)
{
    return present ? TD_OK : td_fail(err, TD_ERR_INVALID, "%s: %s is missing", where, field);
}

/* Rows were appended once each; a run takes n_requests of them, in an order drawn from the seed,
 * from the start again when they are too few. */
static td_status sample_rows(struct bench_dataset *d, struct td_err *err)
{
    size_t n_rows = d->n_items, n = d->config.n_requests ? (size_t)d->config.n_requests : n_rows;
    if (n_rows == 0) return td_fail(err, TD_ERR_INVALID, "%s: has no request", d->config.path);
    if (n > BENCH_MAX_REQUESTS)
        return td_fail(err, TD_ERR_LIMIT, "dataset: more than %d requests", BENCH_MAX_REQUESTS);
    size_t *order = make_order(n_rows, d->config.shuffle, d->config.seed);
    struct bench_item *items = malloc(n * sizeof *items);
    if (!order || !items) {
        free(order);
        free(items);
        return no_memory(err);
    }
    for (size_t i = 0; i < n; i++) items[i] = d->items[order[i % n_rows]];
    free(order);
    free(d->items);
    d->items = items;
    d->n_items = d->capacity = n;
    return TD_OK;
}

static td_status custom_row(struct bench_dataset *d, const char *where, const json_t *row,
                            struct td_err *err)
{
    const char *prompt = NULL;
    int64_t output_len = 0;
    bool has_prompt = false, has_output = false;
    td_status s = td_json_str(row, where, "prompt", &prompt, &has_prompt, err);
    if (!s) s = need(where, "prompt", has_prompt, err);
    if (!s)
        s = td_json_i64(row, where, "output_tokens", 1, BENCH_MAX_TOKENS, &output_len, &has_output,
                        err);
    if (s) return s;
    if (!prompt[0]) return td_fail(err, TD_ERR_INVALID, "%s: prompt is empty", where);
    if (d->config.output_len)
        output_len = (int64_t)d->config.output_len;
    else if (!has_output)
        output_len = CUSTOM_OUTPUT_LEN;
    struct bench_item item = {.output_len = (int32_t)output_len};
    s = add_text(d, prompt, &item.text, err);
    return s ? s : add_item(d, &item, err);
}

/* First human turn and the answer to it. Conversations without both are left out, as everywhere. */
static td_status sharegpt_row(const json_t *row, const char *where, const char **ret_prompt,
                              const char **ret_answer, struct td_err *err)
{
    const json_t *turns = json_object_get(row, "conversations");
    *ret_prompt = *ret_answer = NULL;
    if (!json_is_object(row)) return td_fail(err, TD_ERR_INVALID, "%s: must be an object", where);
    if (!turns) return td_fail(err, TD_ERR_INVALID, "%s: conversations is missing", where);
    if (!json_is_array(turns))
        return td_fail(err, TD_ERR_INVALID, "%s: conversations must be an array", where);
    if (json_array_size(turns) < 2) return TD_OK;
    td_status s = td_json_str(json_array_get(turns, 0), where, "value", ret_prompt, NULL, err);
    return s ? s : td_json_str(json_array_get(turns, 1), where, "value", ret_answer, NULL, err);
}

static td_status sharegpt_batch(struct bench_dataset *d, const char *const *prompts,
                                const char *const *answers, size_t n, struct td_err *err)
{
    int32_t n_prompt[SHAREGPT_BATCH], n_answer[SHAREGPT_BATCH];
    td_status s = d->config.count_tokens(d->config.count_ctx, prompts, n, n_prompt, err);
    if (!s) s = d->config.count_tokens(d->config.count_ctx, answers, n, n_answer, err);
    for (size_t i = 0; !s && i < n; i++) {
        if (d->config.n_requests && d->n_items == d->config.n_requests) break;
        struct bench_item item = {.input_len = n_prompt[i],
                                  .output_len = d->config.output_len ? (int32_t)d->config.output_len
                                                                     : n_answer[i]};
        /* vLLM's filter, so that the same file gives the same kind of load. */
        if (n_prompt[i] < 4 || (!d->config.output_len && n_answer[i] < 4) || n_prompt[i] > 1024 ||
            n_prompt[i] + item.output_len > 2048)
            continue;
        s = add_text(d, prompts[i], &item.text, err);
        if (!s) s = add_item(d, &item, err);
    }
    return s;
}

static td_status load_sharegpt(struct bench_dataset *d, struct td_err *err)
{
    const char *path = d->config.path;
    if (!path[0])
        return td_fail(err, TD_ERR_INVALID,
                       "--dataset-path is empty: this dataset comes from a file");
    json_t *root = NULL;
    td_status s = td_json_load_file(path, MAX_FILE_BYTES, &root, err);
    if (s) return s;
    size_t *order = NULL;
    if (!json_is_array(root)) {
        s = td_fail(err, TD_ERR_INVALID, "%s: must be an array of conversations", path);
        goto end;
    }
    size_t n_rows = json_array_size(root), n = 0;
    order = make_order(n_rows, d->config.shuffle, d->config.seed);
    if (!order) {
        s = no_memory(err);
        goto end;
    }
    const char *prompts[SHAREGPT_BATCH], *answers[SHAREGPT_BATCH];
    for (size_t i = 0; i < n_rows && !s; i++) {
        if (d->config.n_requests && d->n_items == d->config.n_requests) break;
        char where[256];
        snprintf(where, sizeof where, "%s item %zu", path, order[i]);
        s = sharegpt_row(json_array_get(root, order[i]), where, &prompts[n], &answers[n], err);
        if (!s && prompts[n] && answers[n]) n++;
        if (!s && (n == SHAREGPT_BATCH || i + 1 == n_rows) && n)
            s = sharegpt_batch(d, prompts, answers, n, err), n = 0;
    }
    d->config.shuffle = false; /* done */
    if (!s) s = sample_rows(d, err);
end:
    free(order);
    json_decref(root);
    return s;
}

/* --- traces ----------------------------------------------------------------------------------- */

/* hash_ids: one for each block of 512 tokens of the input, in order. */
static td_status trace_hashes(const json_t *row, const char *where, int64_t input_len,
                              struct bench_item *item, struct td_err *err)
{
    const json_t *list = json_object_get(row, "hash_ids");
    if (!list) return td_fail(err, TD_ERR_INVALID, "%s: hash_ids is missing", where);
    if (!json_is_array(list))
        return td_fail(err, TD_ERR_INVALID, "%s: hash_ids must be an array", where);
    size_t n = json_array_size(list),
           blocks = (size_t)(input_len + BENCH_TRACE_BLOCK - 1) / BENCH_TRACE_BLOCK;
    if (n != blocks)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: hash_ids has %zu ids, must be %zu for input_length %" PRId64, where, n,
                       blocks, input_len);
    uint64_t *hashes = malloc(n * sizeof *hashes);
    if (!hashes) return no_memory(err);
    item->hashes = hashes;
    item->n_hashes = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            free(hashes);
            item->hashes = NULL;
            return td_fail(err, TD_ERR_INVALID, "%s: hash_ids[%zu] must be an integer >= 0", where,
                           i);
        }
        hashes[i] = (uint64_t)json_integer_value(id);
    }
    return TD_OK;
}

static td_status trace_row(struct bench_dataset *d, const char *where, const json_t *row,
                           struct td_err *err)
{
    double at_ms = 0;
    int64_t input_len = 0, output_len = 0;
    const char *prompt = NULL;
    bool has_time = false, has_input = false, has_output = false, has_prompt = false;
    td_status s = td_json_f64(row, where, "timestamp", 0, 1e15, &at_ms, &has_time, err);
    if (!s) s = need(where, "timestamp", has_time, err);
    if (!s && d->config.kind == BENCH_TIMED)
        s = td_json_str(row, where, "prompt", &prompt, &has_prompt, err);
    if (!s)
        s = td_json_i64(row, where, "input_length", 1, BENCH_MAX_TOKENS, &input_len, &has_input,
                        err);
    if (!s) s = need(where, "input_length", has_input || has_prompt, err);
    if (!s)
        s = td_json_i64(row, where, "output_length", 0, BENCH_MAX_TOKENS, &output_len, &has_output,
                        err);
    if (!s) s = need(where, "output_length", has_output, err);
    struct bench_item item = {
        .at_s = at_ms / 1e3, .input_len = (int32_t)input_len, .output_len = (int32_t)output_len};
    if (!s && d->config.kind == BENCH_MOONCAKE) s = trace_hashes(row, where, input_len, &item, err);
    if (!s && has_prompt)
        s = prompt[0] ? add_text(d, prompt, &item.text, err)
                      : td_fail(err, TD_ERR_INVALID, "%s: prompt is empty", where);
    if (!s) s = add_item(d, &item, err);
    if (s) free((void *)(uintptr_t)item.hashes);
    return s;
}

/* JSONL: an object a line. */
static td_status load_jsonl(struct bench_dataset *d,
                            td_status (*row_fn)(struct bench_dataset *, const char *,
                                                const json_t *, struct td_err *),
                            struct td_err *err)
{
    struct lines l;
    td_status s = lines_open(&l, d->config.path, err);
    bool trace = bench_dataset_is_trace(d->config.kind);
    while (!s) {
        bool any = false;
        s = lines_next(&l, &any, err);
        if (s || !any || (trace && d->config.n_requests && d->n_items == d->config.n_requests))
            break;
        char where[256];
        snprintf(where, sizeof where, "%s line %lu", l.path, l.number);
        json_t *row = NULL;
        s = td_json_load_text(l.text, strlen(l.text), where, &row, err);
        if (!s && !json_is_object(row))
            s = td_fail(err, TD_ERR_INVALID, "%s: must be an object", where);
        if (!s) s = row_fn(d, where, row, err);
        json_decref(row);
        if (!s && trace && d->n_items > 1 &&
            d->items[d->n_items - 1].at_s < d->items[d->n_items - 2].at_s)
            s = td_fail(
                err, TD_ERR_INVALID,
                "%s: timestamp is %.15g ms, before that of the line before; sort the trace by time",
                where, d->items[d->n_items - 1].at_s * 1e3);
    }
    lines_close(&l);
    return s;
}

/* "2023-11-16 18:17:03.9799600", with "+00:00" or "Z" behind it in later traces. Seconds since
 * 1970. */
static bool parse_time(const char *text, double *ret_s)
{
    struct tm tm = {0};
    const char *at = strptime(text, "%Y-%m-%d", &tm);
    if (!at || (*at != ' ' && *at != 'T')) return false;
    at = strptime(at + 1, "%H:%M:%S", &tm);
    if (!at) return false;
    double fraction = 0, unit = 1;
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++) fraction += (*at - '0') * (unit /= 10);
    if (*at && strcmp(at, "Z") != 0 && strcmp(at, "+00:00") != 0) return false;
    *ret_s = (double)timegm(&tm) + fraction;
    return true;
}

static td_status parse_len(const char *where, const char *field, const char *text, int64_t min,
                           int64_t *ret, struct td_err *err)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || text[0] == ' ' || v < min || v > BENCH_MAX_TOKENS)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: %s is '%.40s', must be an integer in %" PRId64 "..%d", where, field,
                       text, min, BENCH_MAX_TOKENS);
    *ret = v;
    return TD_OK;
}

static td_status azure_row(struct bench_dataset *d, const char *where, char *text,
                           struct td_err *err)
{
    char *rest = text, *stamp = strsep(&rest, ","), *context = strsep(&rest, ","),
         *generated = strsep(&rest, ",");
    if (!generated || rest)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: must have three fields, TIMESTAMP,ContextTokens,GeneratedTokens",
                       where);
    struct bench_item item = {0};
    int64_t input_len = 0, output_len = 0;
    if (!parse_time(stamp, &item.at_s))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: TIMESTAMP is '%.40s', must look like 2023-11-16 18:17:03.9799600",
                       where, stamp);
    td_status s = parse_len(where, "ContextTokens", context, 1, &input_len, err);
    if (!s) s = parse_len(where, "GeneratedTokens", generated, 0, &output_len, err);
    item.input_len = (int32_t)input_len;
    item.output_len = (int32_t)output_len;
    if (!s && d->n_items && item.at_s < d->items[d->n_items - 1].at_s)
        s = td_fail(err, TD_ERR_INVALID,
                    "%s: TIMESTAMP %.40s is before that of the line before; sort the trace by time",
                    where, stamp);
    return s ? s : add_item(d, &item, err);
}

static td_status load_azure(struct bench_dataset *d, struct td_err *err)
{
    struct lines l;
    bool any = false;
    td_status s = lines_open(&l, d->config.path, err);
    if (!s) s = lines_next(&l, &any, err);
    if (!s && (!any || strcmp(l.text, "TIMESTAMP,ContextTokens,GeneratedTokens") != 0))
        s = td_fail(err, TD_ERR_INVALID,
                    "%s line 1: header must be TIMESTAMP,ContextTokens,GeneratedTokens",
                    d->config.path);
    while (!s && !(d->config.n_requests && d->n_items == d->config.n_requests)) {
        s = lines_next(&l, &any, err);
        if (s || !any) break;
        char where[256];
        snprintf(where, sizeof where, "%s line %lu", l.path, l.number);
        s = azure_row(d, where, l.text, err);
    }
    lines_close(&l);
    return s;
}

/* Time stamps relative to the first, groups of equal ones spread evenly up to the next, all
 * scaled; lengths scaled. */
static td_status finish_trace(struct bench_dataset *d, struct td_err *err)
{
    const struct bench_dataset_config *c = &d->config;
    if (d->n_items == 0) return td_fail(err, TD_ERR_INVALID, "%s: has no request", c->path);
    double start_s = d->items[0].at_s, gap_s = 0;
    for (size_t i = 0; i < d->n_items;) {
        size_t end = i;
        double at_s = d->items[i].at_s;
        while (end < d->n_items && d->items[end].at_s == at_s) end++;
        /* the last group takes the gap before it */
        if (end < d->n_items) gap_s = d->items[end].at_s - at_s;
        for (size_t k = i; k < end; k++) {
            double late_s = c->spread && c->kind == BENCH_MOONCAKE
                                ? gap_s * (double)(k - i) / (double)(end - i)
                                : 0;
            d->items[k].at_s = (at_s + late_s - start_s) * c->time_scale;
        }
        i = end;
    }
    for (size_t i = 0; i < d->n_items; i++) {
        struct bench_item *it = &d->items[i];
        if (!it->text) {
            double len = fmax(1, round(it->input_len * c->length_scale));
            /* what the ids stand for */
            if (it->n_hashes) len = fmin(len, (double)it->n_hashes * (double)d->block_tokens);
            it->input_len = (int32_t)fmin(len, BENCH_MAX_TOKENS);
        }
        it->output_len =
            (int32_t)fmin(fmax(1, round(it->output_len * c->length_scale)), BENCH_MAX_TOKENS);
    }
    return TD_OK;
}

/* --- all -------------------------------------------------------------------------------------- */

static td_status check(const struct bench_dataset_config *c, struct td_err *err)
{
    bool made = c->kind == BENCH_RANDOM || c->kind == BENCH_PREFIX;
    if (c->n_requests > BENCH_MAX_REQUESTS)
        return td_fail(err, TD_ERR_INVALID, "num_prompts is %" PRIu64 ", must be <= %d",
                       c->n_requests, BENCH_MAX_REQUESTS);
    bool texts = c->kind == BENCH_CUSTOM || c->kind == BENCH_SHAREGPT;
    if (c->vocab < 2 && !texts)
        return td_fail(err, TD_ERR_INVALID,
                       "the model's vocabulary has %" PRIu32
                       " tokens: too few to draw prompts from",
                       c->vocab);
    if (made && c->n_requests == 0) return td_fail(err, TD_ERR_INVALID, "num_prompts must be > 0");
    if (made && (c->input_len < 1 || c->input_len > BENCH_MAX_TOKENS))
        return td_fail(err, TD_ERR_INVALID, "input_len is %" PRIu64 ", must be in 1..%d",
                       c->input_len, BENCH_MAX_TOKENS);
    if (made && c->output_len < 1)
        return td_fail(err, TD_ERR_INVALID, "output_len is 0, must be in 1..%d", BENCH_MAX_TOKENS);
    if (c->output_len > BENCH_MAX_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "output_len is %" PRIu64 ", must be in 1..%d",
                       c->output_len, BENCH_MAX_TOKENS);
    if (c->prefix_len > BENCH_MAX_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "prefix length is %" PRIu64 ", must be <= %d",
                       c->prefix_len, BENCH_MAX_TOKENS);
    if (!(c->range_ratio >= 0 && c->range_ratio < 1))
        return td_fail(err, TD_ERR_INVALID, "random_range_ratio is %g, must be in [0, 1)",
                       c->range_ratio);
    if (c->kind == BENCH_PREFIX && c->n_prefixes < 1)
        return td_fail(err, TD_ERR_INVALID, "prefix_repetition_num_prefixes is 0, must be >= 1");
    if (bench_dataset_is_trace(c->kind) && !(c->time_scale > 0 && isfinite(c->time_scale)))
        return td_fail(err, TD_ERR_INVALID, "time_scale is %g, must be > 0", c->time_scale);
    if (bench_dataset_is_trace(c->kind) && !(c->length_scale > 0 && c->length_scale <= 1000))
        return td_fail(err, TD_ERR_INVALID, "length_scale is %g, must be in (0, 1000]",
                       c->length_scale);
    if (c->block_tokens > BENCH_MAX_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "trace_block_tokens is %" PRIu64 ", must be <= %d",
                       c->block_tokens, BENCH_MAX_TOKENS);
    if (c->kind == BENCH_SHAREGPT && !c->count_tokens)
        return td_fail(err, TD_ERR_INTERNAL, "sharegpt needs a tokenizer");
    return TD_OK;
}

static td_status load(struct bench_dataset *d, struct td_err *err)
{
    td_status s = TD_ERR_INTERNAL;
    switch (d->config.kind) {
    case BENCH_RANDOM:
    case BENCH_PREFIX:
        return make_random(d, err);
    case BENCH_SHAREGPT:
        return load_sharegpt(d, err);
    case BENCH_CUSTOM:
        s = load_jsonl(d, custom_row, err);
        return s ? s : sample_rows(d, err);
    case BENCH_TIMED:
    case BENCH_MOONCAKE:
        s = load_jsonl(d, trace_row, err);
        break;
    case BENCH_AZURE:
        s = load_azure(d, err);
        break;
    case BENCH_N_DATASETS:
        break;
    }
    return s ? s : finish_trace(d, err);
}

td_status bench_dataset_open(const struct bench_dataset_config *c,
                             struct bench_dataset **ret_dataset, struct td_err *err)
{
    td_status s = check(c, err);
    if (s) return s;
    struct bench_dataset *d = calloc(1, sizeof *d);
    if (!d) return no_memory(err);
    d->config = *c;
    d->block_tokens = c->block_tokens
                          ? c->block_tokens
                          : (uint64_t)fmax(1, round(BENCH_TRACE_BLOCK * c->length_scale));
    s = load(d, err);
    if (s) {
        bench_dataset_close(d);
        return s;
    }
    for (size_t i = 0; i < d->n_items; i++) {
        struct bench_item *it = &d->items[i];
        bool cut = false;
        if (c->max_input_len && !it->text && (uint64_t)it->input_len > c->max_input_len)
            it->input_len = (int32_t)c->max_input_len, cut = true;
        if (c->max_output_len && (uint64_t)it->output_len > c->max_output_len)
            it->output_len = (int32_t)c->max_output_len, cut = true;
        d->n_cut += cut;
    }
    *ret_dataset = d;
    return TD_OK;
}

void bench_dataset_close(struct bench_dataset *d)
{
    if (!d) return;
    for (size_t i = 0; i < d->n_items; i++) free((void *)(uintptr_t)d->items[i].hashes);
    for (size_t i = 0; i < d->n_texts; i++) free(d->texts[i]);
    free(d->texts);
    free(d->items);
    free(d->prefix_of);
    free(d);
}

static void fill(int32_t *ids, size_t n, uint32_t vocab, struct td_keyed r)
{
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)td_keyed_below(&r, vocab);
}

void bench_dataset_tokens(const struct bench_dataset *d, size_t i, int32_t *ret_ids)
{
    const struct bench_dataset_config *c = &d->config;
    const struct bench_item *it = &d->items[i];
    size_t n = (size_t)it->input_len, at = 0;
    TD_ASSERT(!it->text);
    for (uint32_t b = 0; b < it->n_hashes && at < n; b++) {
        size_t part = n - at < d->block_tokens ? n - at : (size_t)d->block_tokens;
        fill(ret_ids + at, part, c->vocab, td_keyed_at(c->seed, WHAT_BLOCK, it->hashes[b]));
        at += part;
    }
    if (it->n_hashes) return;
    if (c->kind == BENCH_RANDOM || c->kind == BENCH_PREFIX) {
        size_t part = n < c->prefix_len ? n : (size_t)c->prefix_len;
        fill(ret_ids, part, c->vocab,
             td_keyed_at(c->seed, WHAT_PREFIX, d->prefix_of ? d->prefix_of[i] : 0));
        at = part;
    }
    fill(ret_ids + at, n - at, c->vocab, td_keyed_at(c->seed, WHAT_PROMPT, i));
}
