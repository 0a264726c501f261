/* rank_hosts.c - ranks that share no memory: what they must agree on, and how the parts of their KV
 * reach rank 0's pool of whole blocks and come from there (engine_ranks.h).
 *
 * What collecting costs. A step's row has, in bytes of a rank, 2 * layers * its heads * head_dim *
 * element of KV, and 2 * layers * hidden * 4 of sums: KV of a model with grouped heads is less than
 * a tenth. Only a worker that hands KV over pays it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/hash.h"
#include "common/engine/engine_ranks.h"

/* Parts travel so many bytes at a time, or a block's. */
#define STAGING_BYTES ((size_t)1 << 20)

/* ---- terms ----------------------------------------------------------------------------------- */

enum { SAMPLES = 64, SAMPLE_BYTES = 4096 };

/* Name, size, and SAMPLES pieces spread from the first byte to the last. */
static td_status sample_file(const char *path, const char *name, uint64_t *hash, struct td_err *err)
{
    uint8_t bytes[SAMPLE_BYTES];
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC), e = 0;
    if (fd < 0 || fstat(fd, &st)) e = errno;
    if (!e) {
        uint64_t size = (uint64_t)st.st_size;
        uint64_t last = size > sizeof bytes ? size - sizeof bytes : 0;
        *hash = td_hash64(name, strlen(name), *hash);
        *hash = td_hash64(&size, sizeof size, *hash);
        for (uint64_t i = 0; i < SAMPLES && !e; i++) {
            ssize_t n = pread(fd, bytes, sizeof bytes, (off_t)(last * i / (SAMPLES - 1)));
            if (n < 0) e = errno;
            if (n > 0) *hash = td_hash64(bytes, (size_t)n, *hash);
        }
    }
    if (fd >= 0) close(fd);
    return e ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(e)) : TD_OK;
}

static int is_of_model(const struct dirent *d)
{
    static const char suffix[] = ".safetensors";
    size_t n = strlen(d->d_name), k = sizeof suffix - 1;
    return !strcmp(d->d_name, "config.json") || (n > k && !strcmp(d->d_name + n - k, suffix));
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

td_status td_rank_model_sample(const char *path, uint64_t *ret_sample, struct td_err *err)
{
    struct stat st;
    struct dirent **files = NULL;
    uint64_t hash = 0;
    td_status s = TD_OK;
    if (stat(path, &st)) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) {
        s = sample_file(path, "", &hash, err);
    } else {
        int n = scandir(path, &files, is_of_model, by_name);
        if (n < 0) s = td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
        for (int i = 0; i < n; i++) {
            char file[4096];
            snprintf(file, sizeof file, "%s/%s", path, files[i]->d_name);
            if (!s) s = sample_file(file, files[i]->d_name, &hash, err);
            free(files[i]);
        }
        free(files);
    }
    if (!s) *ret_sample = hash;
    return s;
}

/* The first term that differs, as text; "" where none does. */
static void differs(const struct td_rank_terms *a, const struct td_rank_terms *b, char *text,
                    size_t bytes)
{
    const struct {
        const char *name;
        int32_t a, b;
    } numbers[] = {{"block_size", a->block_size, b->block_size},
                   {"max_seqs", a->max_seqs, b->max_seqs},
                   {"max_batch", a->max_batch, b->max_batch},
                   {"max_step_tokens", a->max_step_tokens, b->max_step_tokens},
                   {"max_model_len", a->max_model_len, b->max_model_len},
                   {"ep", a->ep, b->ep}};
    const struct {
        const char *name, *a, *b;
    } words[] = {{"dtype", a->dtype, b->dtype},
                 {"kv_dtype", a->kv_dtype, b->kv_dtype},
                 {"ops", a->numerics, b->numerics}};
    text[0] = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers && !text[0]; i++)
        if (numbers[i].a != numbers[i].b)
            snprintf(text, bytes, "%s is %d, rank 0's is %d", numbers[i].name, numbers[i].a,
                     numbers[i].b);
    for (size_t i = 0; i < sizeof words / sizeof *words && !text[0]; i++)
        if (strcmp(words[i].a, words[i].b) != 0)
            snprintf(text, bytes, "%s is %.23s, rank 0's is %.23s", words[i].name, words[i].a,
                     words[i].b);
    if (!text[0] && a->model != b->model)
        snprintf(text, bytes, "its model's files are not those of rank 0");
}

td_status td_rank_terms_agree(struct td_comm *comm, const struct td_rank_terms *mine,
                              struct td_err *err)
{
    struct td_rank_terms all[TD_COMM_MAX_RANKS];
    char text[160], why[TD_COMM_REASON_MAX];
    td_status s = td_comm_all_gather(comm, mine, sizeof *mine, all);
    if (s) return td_fail(err, s, "ranks: %s", td_comm_reason(comm, why));
    for (int32_t r = 0; r < td_comm_n_ranks(comm); r++) {
        all[r].dtype[sizeof all[r].dtype - 1] = 0;
        all[r].kv_dtype[sizeof all[r].kv_dtype - 1] = 0;
        all[r].numerics[sizeof all[r].numerics - 1] = 0;
        differs(&all[r], &all[0], text, sizeof text);
        if (text[0])
            return td_fail(err, TD_ERR_INVALID, "rank %d: %s; all ranks must have the same", r,
                           text);
    }
    return TD_OK;
}

/* ---- KV -------------------------------------------------------------------------------------- */

td_status td_rank_kv_apart(struct td_rank_kv *kv, int32_t rank, uint8_t *base, int32_t n_blocks,
                           struct td_err *err)
{
    size_t part = kv->part.block_bytes;
    kv->apart = true;
    kv->n_blocks = n_blocks;
    kv->base = kv->mine = base;
    kv->stride = rank == 0 ? kv->whole.block_bytes : part;
    kv->n_staged = part < STAGING_BYTES ? (int32_t)(STAGING_BYTES / part) : 1;
    kv->staging = malloc((size_t)(rank == 0 ? kv->n_ranks : 1) * (size_t)kv->n_staged * part);
    if (kv->staging) return TD_OK;
    return td_fail(err, TD_ERR_NOMEM, "engine: no memory for %d KV blocks on their way",
                   kv->n_staged);
}

/* Copy 0 is what rank 0's pool has, and where copies come from. */
static bool collected_from(const struct td_rank_kv *kv, int32_t rank)
{
    return rank > 0 && rank % kv->n_copies == 0;
}

static uint8_t *staged(const struct td_rank_kv *kv, int32_t rank)
{
    return kv->staging + (size_t)rank * (size_t)kv->n_staged * kv->part.block_bytes;
}

/* Rank 0: the part of rank `rank` in block `id` of its pool. */
static uint8_t *part_of(const struct td_rank_kv *kv, int32_t rank, int32_t id)
{
    return kv->base + (size_t)id * kv->whole.block_bytes +
           (size_t)(rank / kv->n_copies) * kv->part.block_bytes;
}

/* At most n_staged blocks. */
static td_status collect_some(struct td_comm *comm, const struct td_rank_kv *kv, const int32_t *ids,
                              int32_t n)
{
    size_t part = kv->part.block_bytes, bytes[TD_COMM_MAX_RANKS];
    uint8_t *at[TD_COMM_MAX_RANKS];
    int32_t rank = td_comm_rank(comm);
    for (int32_t r = 0; r < kv->n_ranks; r++) {
        bytes[r] = collected_from(kv, r) ? (size_t)n * part : 0;
        at[r] = rank == 0 ? staged(kv, r) : NULL;
    }
    for (int32_t i = 0; i < n && bytes[rank]; i++)
        memcpy(kv->staging + (size_t)i * part, kv->mine + (size_t)ids[i] * kv->stride, part);
    td_status s = td_comm_collect(comm, kv->staging, bytes, at);
    for (int32_t r = 1; r < kv->n_ranks && rank == 0 && !s; r++)
        for (int32_t i = 0; i < n && bytes[r]; i++)
            memcpy(part_of(kv, r, ids[i]), at[r] + (size_t)i * part, part);
    return s;
}

td_status td_rank_collect(struct td_comm *comm, const struct td_rank_kv *kv,
                          const struct td_forward_args *a)
{
    int32_t ids[256], n = 0, last = -1,
                      most = kv->n_staged < 256 ? kv->n_staged : 256; /* the same on all ranks */
    td_status s = TD_OK;
    if (!kv->apart || kv->n_parts == 1) return TD_OK;
    for (int32_t row = 0; row < a->n_rows && !s; row++) {
        int32_t id = a->block_tables[a->row_seq[row]][a->positions[row] / kv->whole.block_size];
        if (id == last) continue; /* rows of a sequence come one after the other */
        ids[n++] = last = id;
        if (n < most) continue;
        s = collect_some(comm, kv, ids, n);
        n = 0;
    }
    return s || n == 0 ? s : collect_some(comm, kv, ids, n);
}

td_status td_rank_deal(struct td_comm *comm, const struct td_rank_kv *kv, const int32_t *block_ids,
                       int32_t n)
{
    size_t part = kv->part.block_bytes, bytes[TD_COMM_MAX_RANKS];
    const uint8_t *at[TD_COMM_MAX_RANKS];
    int32_t rank = td_comm_rank(comm);
    td_status s = TD_OK;
    for (int32_t from = 0; from < n && !s; from += kv->n_staged) {
        int32_t some = n - from < kv->n_staged ? n - from : kv->n_staged;
        for (int32_t r = 0; r < kv->n_ranks; r++) {
            bytes[r] = (size_t)some * part;
            at[r] = rank == 0 ? staged(kv, r) : NULL;
            for (int32_t i = 0; i < some && rank == 0 && r > 0; i++)
                memcpy(staged(kv, r) + (size_t)i * part, part_of(kv, r, block_ids[from + i]), part);
        }
        s = td_comm_deal(comm, at, bytes, kv->staging);
        for (int32_t i = 0; i < some && rank > 0 && !s; i++)
            memcpy(kv->mine + (size_t)block_ids[from + i] * kv->stride,
                   kv->staging + (size_t)i * part, part);
    }
    return s;
}
