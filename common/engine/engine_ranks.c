/* engine_ranks.c - see engine_ranks.h.
 *
 * A step on the wire, all int32: kind, n_rows, n_logit_rows, n_seqs | tokens | positions | row_seq
 *     | logit_rows | n_blocks of each sequence | their
 * blocks. */
#include "common/engine/engine_ranks.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/kv/reshard.h"

/* STEP_COLLECTED: td_rank_collect follows. DEAL: n_rows block ids, and td_rank_deal follows. */
enum { STEP = 1, END = 2, STEP_COLLECTED = 3, DEAL = 4, HEAD_INTS = 4 };
enum { IMPORT_THREADS_MAX = 8 };

static td_status lost(struct td_comm *comm, td_status s, struct td_err *err)
{
    char why[TD_COMM_REASON_MAX];
    return td_fail(err, s, "ranks: %s", td_comm_reason(comm, why));
}

/* ---- KV -------------------------------------------------------------------------------------- */

static int log2_of(int32_t parts)
{
    int k = 0;
    while (k < 5 && 1 << k != parts) k++;
    return k; /* 5: not one of them */
}

/* The copies that turn one block of `from` parts into one of `to` parts. Blocks are copied whole:
 * to the planner all that a head has in a block, scales included, is one token. */
static td_status plan_copies(const struct td_kv_layout *whole, int32_t from, int32_t to,
                             struct td_rank_copy **ret_copies, int32_t *ret_n, struct td_err *err)
{
    static const int32_t first_block = 0;
    if (!td_kv_layout_is_even(whole))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "KV of %d heads whose K and V differ in size is not cut into parts, but "
                       "%d of them are to become %d",
                       whole->n_kv_heads, from, to);
    struct td_reshard_rank ranks[TD_RESHARD_MAX_DEGREE];
    for (int32_t r = 0; r < TD_RESHARD_MAX_DEGREE; r++)
        ranks[r] =
            (struct td_reshard_rank){.block_ids = &first_block, .n_ids = 1, .pool_blocks = 1};
    struct td_reshard_side side = {
        .tp = from, .pp = 1, .order = TD_RESHARD_LAYER_OUTER, .block_size = 1, .ranks = ranks};
    int32_t unit = whole->head_bytes % 4 ? 1 : 4;
    struct td_reshard_ask ask = {.model = {.n_layers = whole->n_layers,
                                           .n_kv_heads = whole->n_kv_heads,
                                           .head_dim = (int32_t)(whole->head_bytes / (size_t)unit),
                                           .element_bytes = unit},
                                 .src = side,
                                 .dst = side,
                                 .end_token = 1,
                                 .only_src = TD_RESHARD_ALL,
                                 .only_dst = TD_RESHARD_ALL};
    ask.dst.tp = to;
    struct td_reshard plan;
    td_status s = td_reshard_plan(&ask, &plan, err);
    if (s) return s;
    /* no run is shorter than a head */
    size_t max = (size_t)whole->n_layers * 2 * (size_t)whole->n_kv_heads;
    struct td_rank_copy *copies = calloc(max, sizeof *copies);
    if (!copies) return td_fail(err, TD_ERR_NOMEM, "engine: no memory for %zu copies", max);
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    int32_t n = 0;
    size_t from_bytes = whole->block_bytes / (size_t)from,
           to_bytes = whole->block_bytes / (size_t)to;
    while (td_reshard_next_pair(&plan, &cursor, &pair)) {
        struct td_reshard_iter it;
        struct td_reshard_run run;
        td_reshard_iter_init(&it, &plan, &pair, TD_RESHARD_PUSH, 0);
        while (td_reshard_next(&it, &run)) {
            TD_ASSERT((size_t)n < max);
            copies[n++] =
                (struct td_rank_copy){.from = (size_t)pair.src * from_bytes + run.src_offset,
                                      .to = (size_t)pair.dst * to_bytes + run.dst_offset,
                                      .bytes = run.bytes};
        }
    }
    *ret_copies = copies;
    *ret_n = n;
    return TD_OK;
}

/* What a rank tells the others of its memory. */
struct place {
    struct td_split_handle at;
    char uuid[48];
};

/* The others' memory, as rank 0's device reaches it. */
static td_status open_places(struct td_rank_kv *kv, const struct place *all, void **ret_base,
                             struct td_err *err)
{
    const struct td_device_memory *m = kv->device;
    for (int32_t r = 1; r < kv->n_ranks; r++) {
        td_status s = m->ipc_open(m->ctx, all[r].at.handle, &kv->opened[r], err);
        if (s)
            return td_err_prefix(err, "rank 0's device %s does not reach the KV of rank %d on %s",
                                 m->uuid, r, all[r].uuid);
        ret_base[r] = (uint8_t *)kv->opened[r] + all[r].at.offset;
    }
    return TD_OK;
}

td_status td_rank_kv_over_devices(struct td_rank_kv *kv, const struct td_device_memory *device,
                                  void *const *rank_base, const struct td_split_handle *handles,
                                  int32_t n_blocks, size_t tail_bytes, void *scratch,
                                  struct td_err *err)
{
    size_t per_block = 1;
    kv->n_blocks = n_blocks;
    kv->mine = kv->base = rank_base[0];
    kv->stride = kv->part.block_bytes;
    kv->device = device;
    if (device) {
        struct td_split_config c = {.device = device,
                                    .rank_base = rank_base,
                                    .handles = handles,
                                    .n_parts = kv->n_parts,
                                    .n_copies = kv->n_copies,
                                    .n_blocks = n_blocks,
                                    .part_bytes = kv->part.block_bytes,
                                    .tail_bytes = tail_bytes};
        td_status s = td_split_memory_create(&c, &kv->split, err);
        if (s) return s;
        kv->base = td_split_memory_base(kv->split);
        kv->copy_bytes = td_split_memory_bytes(kv->split);
        kv->memory = td_split_memory_table(kv->split);
    }
    for (int k = 0; k < 5; k++)
        if (per_block < (size_t)kv->n_of_copies[k]) per_block = (size_t)kv->n_of_copies[k];
    kv->max_runs = TD_RANK_SCRATCH_BLOCKS * (size_t)kv->n_copies * per_block;
    kv->runs = calloc(kv->max_runs, sizeof *kv->runs);
    if (!kv->runs)
        return td_fail(err, TD_ERR_NOMEM, "engine: no memory for %zu copies", kv->max_runs);
    free(kv->scratch); /* from here on it is the device's */
    kv->scratch = scratch;
    kv->n_scratch = TD_RANK_SCRATCH_BLOCKS;
    return TD_OK;
}

td_status td_rank_kv_on_devices(struct td_rank_kv *kv, struct td_comm *comm,
                                const struct td_device_memory *device, void *mine, int32_t n_blocks,
                                size_t tail_bytes, void *scratch, struct td_err *err)
{
    struct place place = {.uuid = ""}, all[TD_COMM_MAX_RANKS];
    struct td_split_handle handles[TD_COMM_MAX_RANKS];
    void *base[TD_COMM_MAX_RANKS] = {mine};
    int32_t rank = td_comm_rank(comm);
    td_status s = TD_OK;
    kv->device = device;
    if (kv->n_ranks > 1) {
        if (!device || !device->ipc_export || !device->ipc_open)
            s = td_fail(err, TD_ERR_UNSUPPORTED,
                        "tp: this device hands no memory to other processes");
        else
            s = device->ipc_export(device->ctx, mine, place.at.handle, &place.at.offset, err);
        if (s) return s;
        memcpy(place.uuid, device->uuid, sizeof place.uuid);
        if ((s = td_comm_all_gather(comm, &place, sizeof place, all))) return lost(comm, s, err);
        if (rank == 0 && (s = open_places(kv, all, base, err))) return s;
        for (int32_t r = 0; r < kv->n_ranks; r++) handles[r] = all[r].at;
    }
    if (rank == 0)
        return td_rank_kv_over_devices(kv, device, base, kv->n_ranks > 1 ? handles : NULL, n_blocks,
                                       tail_bytes, scratch, err);
    kv->n_blocks = n_blocks;
    kv->mine = mine;
    kv->stride = kv->part.block_bytes;
    return TD_OK;
}

td_status td_rank_kv_plan(struct td_rank_kv *kv, const struct td_kv_layout *part,
                          int32_t n_kv_heads, int32_t n_ranks, int32_t n_threads,
                          struct td_err *err)
{
    kv->part = kv->whole = *part;
    kv->whole.n_kv_heads = n_kv_heads;
    td_status s = td_kv_layout_init(&kv->whole, err);
    if (s) return s;
    kv->n_ranks = n_ranks;
    kv->n_parts = n_kv_heads / part->n_kv_heads;
    kv->n_copies = n_ranks / kv->n_parts;
    for (int32_t k = 0; k < 5 && !s; k++)
        if (n_kv_heads % (1 << k) == 0 && 1 << k != kv->n_parts)
            s = plan_copies(&kv->whole, 1 << k, kv->n_parts, &kv->copies[k], &kv->n_of_copies[k],
                            err);
    kv->n_scratch = n_threads < IMPORT_THREADS_MAX ? n_threads : IMPORT_THREADS_MAX;
    /* pages come when another degree's first block does */
    if (!s && !(kv->scratch = malloc((size_t)kv->n_scratch * kv->whole.block_bytes)))
        s = td_fail(err, TD_ERR_NOMEM, "engine: no memory for %d KV blocks", kv->n_scratch);
    return s;
}

td_status td_rank_kv_init(struct td_rank_kv *kv, const struct td_model *model, int32_t block_size,
                          int32_t n_threads, struct td_err *err)
{
    struct td_kv_layout part;
    td_status s = td_model_kv_layout(model, block_size, &part, err);
    return s ? s
             : td_rank_kv_plan(kv, &part, td_model_config(model)->n_kv_heads,
                               td_model_n_ranks(model), n_threads, err);
}

void td_rank_kv_free(struct td_rank_kv *kv)
{
    for (int k = 0; k < 5; k++) free(kv->copies[k]);
    if (!kv->runs) free(kv->scratch);
    free(kv->runs);
    free(kv->staging);
    td_split_memory_destroy(kv->split);
    for (int32_t r = 1; r < TD_COMM_MAX_RANKS; r++)
        if (kv->opened[r]) kv->device->ipc_close(kv->device->ctx, kv->opened[r]);
    memset(kv, 0, sizeof *kv);
}

size_t td_rank_kv_bytes(const struct td_rank_kv *kv, int32_t n_blocks)
{
    return (size_t)n_blocks * (size_t)(kv->apart ? 1 : kv->n_copies) * kv->whole.block_bytes;
}

void td_rank_kv_on_host(struct td_rank_kv *kv, int32_t rank, uint8_t *base, int32_t n_blocks)
{
    size_t part = (size_t)(rank / kv->n_copies), copy = (size_t)(rank % kv->n_copies);
    kv->n_blocks = n_blocks;
    kv->base = base;
    kv->copy_bytes = (size_t)n_blocks * kv->whole.block_bytes;
    kv->stride = kv->whole.block_bytes;
    kv->mine = base + copy * kv->copy_bytes + part * kv->part.block_bytes;
}

struct import {
    const struct td_rank_kv *kv;
    const int32_t *block_ids;
    int32_t n, how; /* index of the copies */
};

static void import_part(void *ctx, int part, int n_parts)
{
    const struct import *m = ctx;
    const struct td_rank_kv *kv = m->kv;
    size_t bytes = kv->whole.block_bytes;
    if (n_parts > kv->n_scratch) n_parts = kv->n_scratch;
    if (part >= n_parts) return;
    uint8_t *scratch = kv->scratch + (size_t)part * bytes;
    for (int32_t i = part; i < m->n; i += n_parts) {
        uint8_t *block = kv->base + (size_t)m->block_ids[i] * bytes;
        const struct td_rank_copy *c = kv->copies[m->how];
        if (c) memcpy(scratch, block, bytes);
        for (int32_t k = 0; c && k < kv->n_of_copies[m->how]; k++)
            memcpy(block + c[k].to, scratch + c[k].from, c[k].bytes);
        for (int32_t k = 1; k < kv->n_copies && !kv->apart; k++)
            memcpy(block + (size_t)k * kv->copy_bytes, block, bytes);
    }
}

static td_status copy_runs(const struct td_rank_kv *kv, size_t n, struct td_err *err)
{
    uint64_t ticket;
    TD_ASSERT(n <= kv->max_runs);
    td_status s = kv->memory->copy(kv->memory->ctx, TD_COPY_ON_DEVICE, kv->runs, n, &ticket, err);
    return s ? s : kv->memory->wait(kv->memory->ctx, ticket, err);
}

/* As import_part, some blocks at a time. From the scratch every copy is written; without a
 * change of order there is no scratch, and copy 0 is there. */
static td_status import_on_device(const struct td_rank_kv *kv, const int32_t *block_ids, int32_t n,
                                  int how, struct td_err *err)
{
    const struct td_rank_copy *c = kv->copies[how];
    size_t bytes = kv->whole.block_bytes;
    for (int32_t at = 0; at < n; at += kv->n_scratch) {
        int32_t some = n - at < kv->n_scratch ? n - at : kv->n_scratch;
        size_t n_runs = 0;
        for (int32_t i = 0; c && i < some; i++)
            kv->runs[n_runs++] =
                (struct td_device_run){.to = kv->scratch + (size_t)i * bytes,
                                       .from = kv->base + (size_t)block_ids[at + i] * bytes,
                                       .bytes = bytes};
        td_status s = n_runs ? copy_runs(kv, n_runs, err) : TD_OK;
        if (s) return s;
        n_runs = 0;
        for (int32_t i = 0; i < some; i++) {
            uint8_t *block = kv->base + (size_t)block_ids[at + i] * bytes,
                    *from = c ? kv->scratch + (size_t)i * bytes : block;
            for (int32_t copy = c ? 0 : 1; copy < kv->n_copies; copy++) {
                uint8_t *to = block + (size_t)copy * kv->copy_bytes;
                for (int32_t k = 0; c && k < kv->n_of_copies[how]; k++)
                    kv->runs[n_runs++] = (struct td_device_run){
                        .to = to + c[k].to, .from = from + c[k].from, .bytes = c[k].bytes};
                if (!c)
                    kv->runs[n_runs++] =
                        (struct td_device_run){.to = to, .from = from, .bytes = bytes};
            }
        }
        if ((s = copy_runs(kv, n_runs, err))) return s;
    }
    return TD_OK;
}

td_status td_rank_kv_import(const struct td_rank_kv *kv, const int32_t *block_ids, int32_t n,
                            int32_t from_parts, struct td_thread_pool *threads, struct td_err *err)
{
    int k = log2_of(from_parts);
    if (k == 5 || kv->whole.n_kv_heads % from_parts)
        return td_fail(
            err, TD_ERR_INVALID,
            "KV in %d parts: a model of %d KV heads is in 1, 2, 4, 8 or 16 that divide them",
            from_parts, kv->whole.n_kv_heads);
    if (from_parts == kv->n_parts && kv->n_copies == 1) return TD_OK;
    if (kv->runs && !kv->memory)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "KV in %d parts cannot be brought into %d on this device: it has no copies",
                       from_parts, kv->n_parts);
    if (kv->memory) return import_on_device(kv, block_ids, n, k, err);
    struct import m = {.kv = kv, .block_ids = block_ids, .n = n, .how = k};
    td_thread_pool_run(threads, import_part, &m);
    return TD_OK;
}

struct check {
    const struct td_rank_kv *kv;
    const int32_t *block_ids;
    int32_t n, n_tokens;
    _Atomic int32_t bad; /* index of a block; -1: none */
};

/* A block is whole.n_layers * n_planes * n_kv_heads heads one after the other, whatever the parts.
 * The scale of a latent row is two of bf16: each is looked at as the upper half of one. */
static void check_part(void *ctx, int part, int n_parts)
{
    struct check *c = ctx;
    const struct td_kv_layout *l = &c->kv->whole;
    size_t at = td_kv_scales_at(l->dtype, l->block_size, l->head_dim);
    for (int32_t i = part; i < c->n; i += n_parts) {
        int32_t n_tokens = c->n_tokens - i * l->block_size;
        const uint8_t *block = c->kv->base + (size_t)c->block_ids[i] * l->block_bytes;
        uint32_t worst = 0; /* infinity, NaN and negative numbers have larger bits than others */
        if (n_tokens > l->block_size) n_tokens = l->block_size;
        for (size_t head = 0; head < l->block_bytes; head += l->head_bytes)
            for (int32_t t = 0; t < n_tokens; t++) {
                uint32_t bits;
                memcpy(&bits, block + head + at + (size_t)t * sizeof bits, sizeof bits);
                worst = bits > worst ? bits : worst;
                if (l->v_dim == TD_KV_V_IN_K && bits << 16 > worst) worst = bits << 16;
            }
        if (worst >= 0x7f800000u) atomic_store(&c->bad, i);
    }
}

td_status td_rank_kv_check(const struct td_rank_kv *kv, const int32_t *block_ids, int32_t n,
                           int32_t n_tokens, struct td_thread_pool *threads, struct td_err *err)
{
    struct check c = {.kv = kv, .block_ids = block_ids, .n = n, .n_tokens = n_tokens, .bad = -1};
    if (!td_dtype_is_coded(kv->whole.dtype) || kv->runs) return TD_OK;
    td_thread_pool_run(threads, check_part, &c);
    int32_t bad = atomic_load(&c.bad);
    if (bad < 0) return TD_OK;
    return td_fail(err, TD_ERR_CORRUPT,
                   "KV block %d of the prompt holds a scale that is negative or no number: it did "
                   "not arrive as a worker stores it",
                   bad);
}

/* ---- steps ----------------------------------------------------------------------------------- */

size_t td_rank_step_bytes(int32_t max_rows, int32_t max_seqs, int32_t max_blocks_per_seq)
{
    return sizeof(int32_t) *
           (HEAD_INTS + 3 * (size_t)max_rows + (size_t)max_seqs * (2 + (size_t)max_blocks_per_seq));
}

static int32_t *put(int32_t *at, const int32_t *from, int32_t n)
{
    memcpy(at, from, (size_t)n * sizeof *at);
    return at + n;
}

td_status td_rank_step_tell(struct td_comm *comm, const struct td_forward_args *a,
                            const int32_t *n_blocks, int32_t n_seqs, bool collects, int32_t *room)
{
    int32_t head[HEAD_INTS] = {collects ? STEP_COLLECTED : STEP, a->n_rows, a->n_logit_rows,
                               n_seqs},
            *at = put(room, head, HEAD_INTS);
    at = put(at, a->tokens, a->n_rows);
    at = put(at, a->positions, a->n_rows);
    at = put(at, a->row_seq, a->n_rows);
    at = put(at, a->logit_rows, a->n_logit_rows);
    at = put(at, n_blocks, n_seqs);
    for (int32_t s = 0; s < n_seqs; s++) at = put(at, a->block_tables[s], n_blocks[s]);
    size_t bytes = (size_t)(at - room) * sizeof *room;
    return td_comm_broadcast(comm, room, &bytes, false);
}

td_status td_rank_deal_tell(struct td_comm *comm, const struct td_rank_kv *kv,
                            const int32_t *block_ids, int32_t n, int32_t *room)
{
    int32_t head[HEAD_INTS] = {DEAL, n};
    put(put(room, head, HEAD_INTS), block_ids, n);
    size_t bytes = (HEAD_INTS + (size_t)n) * sizeof *room;
    td_status s = td_comm_broadcast(comm, room, &bytes, false);
    return s ? s : td_rank_deal(comm, kv, block_ids, n);
}

void td_rank_end_tell(struct td_comm *comm, int32_t *room)
{
    size_t bytes = HEAD_INTS * sizeof *room;
    memset(room, 0, bytes);
    room[0] = END;
    td_comm_broadcast(comm, room, &bytes, false); /* a group that is lost needs no telling */
}

td_status td_rank_boot_tell(struct td_comm *comm, struct td_rank_boot *boot,
                            const struct td_arena *arena, struct td_arena *ret_arena,
                            struct td_err *err)
{
    size_t bytes = sizeof *boot;
    int fd = -1;
    td_status s = td_comm_broadcast(comm, boot, &bytes, false);
    if (!s && bytes != sizeof *boot)
        return td_fail(err, TD_ERR_CORRUPT, "ranks: rank 0 told a pool in %zu bytes, must be %zu",
                       bytes, sizeof *boot);
    if (!s && td_comm_is_remote(comm) &&
        (boot->arena_bytes || boot->n_blocks < 1 || boot->max_rows < 1 || boot->max_seqs < 1 ||
         boot->max_blocks_per_seq < 1))
        return td_fail(err, TD_ERR_CORRUPT,
                       "ranks: rank 0 told %d blocks, %d rows, %d sequences, %d blocks each, %llu "
                       "bytes to map: must be at least 1 each, and 0 bytes",
                       boot->n_blocks, boot->max_rows, boot->max_seqs, boot->max_blocks_per_seq,
                       (unsigned long long)boot->arena_bytes);
    if (s || boot->arena_bytes == 0) return s ? lost(comm, s, err) : TD_OK;
    s = td_comm_share_fd(comm, arena ? arena->memfd : -1, &fd);
    if (s) return lost(comm, s, err);
    if (td_comm_rank(comm) == 0) return TD_OK;
    void *base = mmap(NULL, (size_t)boot->arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int e = errno;
    close(fd);
    if (base == MAP_FAILED)
        return td_fail(err, TD_ERR_NOMEM, "rank %d cannot map %llu bytes of KV: %s",
                       td_comm_rank(comm), (unsigned long long)boot->arena_bytes, strerror(e));
    *ret_arena = (struct td_arena){.base = base, .bytes = (size_t)boot->arena_bytes, .memfd = -1};
    return TD_OK;
}

/* One step as rank 0 told it. */
static td_status do_step(struct td_comm *comm, struct td_model *model, struct td_workspace *ws,
                         const struct td_rank_kv *kv, const int32_t *in, const int32_t **tables,
                         struct td_err *err)
{
    int32_t n_rows = in[1], n_logits = in[2], n_seqs = in[3];
    const int32_t *tokens = in + HEAD_INTS, *positions = tokens + n_rows,
                  *row_seq = positions + n_rows, *logit_rows = row_seq + n_rows,
                  *n_blocks = logit_rows + n_logits, *ids = n_blocks + n_seqs;
    for (int32_t s = 0; s < n_seqs; s++) {
        tables[s] = ids;
        ids += n_blocks[s];
    }
    int32_t vocab = td_model_config(model)->vocab, max_len = td_model_max_len(model);
    for (int32_t i = 0; i < n_rows; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab || positions[i] >= max_len)
            return td_fail(err, TD_ERR_CORRUPT,
                           "ranks: row %d of rank 0's step is token %d at position %d, must be "
                           "below %d and %d",
                           i, tokens[i], positions[i], vocab, max_len);
    struct td_forward_args a = {.tokens = tokens,
                                .positions = positions,
                                .row_seq = row_seq,
                                .block_tables = tables,
                                .n_rows = n_rows,
                                .kv_base = kv->mine,
                                .kv = &kv->part,
                                .kv_stride = kv->stride,
                                .logit_rows = logit_rows,
                                .n_logit_rows = n_logits,
                                .err = err};
    float *logits;
    td_status s = td_model_forward(model, ws, &a, &logits);
    if (!s && in[0] == STEP_COLLECTED && (s = td_rank_collect(comm, kv, &a)))
        return lost(comm, s, err);
    return s;
}

/* Rows, sequences and lists of a step of `ints` ints; *ret_at: where its block ids begin. */
static bool step_fits(const int32_t *in, uint64_t ints, const struct td_rank_boot *boot,
                      int32_t block_size, const int32_t **ret_at)
{
    uint64_t n_rows = (uint64_t)in[1], n_logits = (uint64_t)in[2], n_seqs = (uint64_t)in[3],
             need = HEAD_INTS + 3 * n_rows + n_logits + n_seqs;
    if (in[1] < 1 || in[1] > boot->max_rows || in[2] < 0 || in[2] > in[1] || in[3] < 0 ||
        in[3] > boot->max_seqs || need > ints)
        return false;
    const int32_t *positions = in + HEAD_INTS + n_rows, *row_seq = positions + n_rows,
                  *logit_rows = row_seq + n_rows, *n_blocks = logit_rows + n_logits;
    for (uint64_t i = 0; i < n_seqs; i++) {
        if (n_blocks[i] < 0 || n_blocks[i] > boot->max_blocks_per_seq) return false;
        need += (uint64_t)n_blocks[i];
    }
    for (uint64_t i = 0; i < n_rows; i++)
        if (row_seq[i] < 0 || row_seq[i] >= in[3] || positions[i] < 0 ||
            positions[i] / block_size >= n_blocks[row_seq[i]])
            return false;
    for (uint64_t i = 0; i < n_logits; i++)
        if (logit_rows[i] < 0 || logit_rows[i] >= in[1]) return false;
    *ret_at = n_blocks + n_seqs;
    return need == ints;
}

/* Indexes and counts are looked at before use, though rank 0 has proved to be of the cluster: they
 * may have come through a network. */
static td_status check_told(const int32_t *in, size_t bytes, const struct td_rank_boot *boot,
                            int32_t block_size, struct td_err *err)
{
    uint64_t ints = bytes / sizeof *in;
    const int32_t *at = in + HEAD_INTS;
    bool fits = ints >= HEAD_INTS && bytes % sizeof *in == 0;
    if (fits && in[0] == END) return TD_OK;
    if (fits && in[0] == DEAL)
        fits = in[1] >= 0 && ints == HEAD_INTS + (uint64_t)in[1];
    else
        fits = fits && (in[0] == STEP || in[0] == STEP_COLLECTED) &&
               step_fits(in, ints, boot, block_size, &at);
    for (; fits && at < in + ints; at++) fits = *at >= 0 && *at < boot->n_blocks;
    return fits ? TD_OK
                : td_fail(err, TD_ERR_CORRUPT, "ranks: rank 0 told %zu bytes that are no step",
                          bytes);
}

td_status td_rank_agree(struct td_comm *comm, int32_t n_blocks, int32_t *ret_n_blocks,
                        struct td_err *err)
{
    int32_t all[TD_COMM_MAX_RANKS];
    td_status s = td_comm_all_gather(comm, &n_blocks, sizeof n_blocks, all);
    if (s) return lost(comm, s, err);
    for (int32_t r = 0; r < td_comm_n_ranks(comm); r++)
        if (all[r] < n_blocks) n_blocks = all[r];
    *ret_n_blocks = n_blocks;
    return TD_OK;
}

td_status td_rank_follow(struct td_comm *comm, struct td_model *model, struct td_workspace *ws,
                         const struct td_rank_kv *kv, const struct td_rank_boot *boot,
                         struct td_err *err)
{
    size_t room = td_rank_step_bytes(boot->max_rows, boot->max_seqs, boot->max_blocks_per_seq);
    int32_t *in = malloc(room);
    const int32_t **tables = calloc((size_t)boot->max_seqs, sizeof *tables);
    td_status s = in && tables
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "rank %d: no memory for steps of %zu bytes",
                                td_comm_rank(comm), room);
    while (!s) {
        size_t bytes = room;
        if ((s = td_comm_broadcast(comm, in, &bytes, true))) {
            lost(comm, s, err);
            break;
        }
        if ((s = check_told(in, bytes, boot, kv->whole.block_size, err)) || in[0] == END) break;
        if (in[0] == DEAL)
            s = td_rank_deal(comm, kv, in + HEAD_INTS, in[1]);
        else
            s = do_step(comm, model, ws, kv, in, tables, err);
        /* a device only knows that a call failed */
        if (s && td_comm_check(comm)) s = lost(comm, TD_ERR_PEER, err);
    }
    free(in);
    free(tables);
    return s;
}
