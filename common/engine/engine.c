/* engine.c - see engine.h.
 *
 * Who gets blocks and who is in a batch is the scheduler's (scheduler.h). This file lends it the
 * pool's blocks (engine_blocks) and computes what it has chosen.
 *
 * Invariant: a block reached through the prefix cache is full and never written again, because
 * sequences write only at positions >= their n_cached. */
#include "common/engine/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/cgroup.h"
#include "common/base/mem.h"
#include "common/base/options.h"
#include "common/base/pool.h"
#include "common/base/thread_pool.h"
#include "common/engine/engine_device.h"
#include "common/engine/engine_ranks.h"
#include "kernels/device.h"

/* The pool of sequences, and what each points into, by its index. */
struct td_engine_seqs {
    pthread_mutex_t lock; /* guards pool: RPC threads get, the owner puts */
    struct td_pool *pool;
    int32_t *tokens;            /* [max_seqs][max_len + 1] */
    int32_t *blocks;            /* [max_seqs][max_blocks_per_seq] */
    struct td_logit_bias *bias; /* [max_seqs][TD_MAX_LOGIT_BIAS] */
};

/* Scratch of one step, sized at boot. */
struct td_engine_scratch {
    int32_t *row_tokens, *row_positions, *row_seq; /* [max_step_tokens] */
    int32_t *logit_rows;                           /* [max_batch] */
    struct td_scored *scored;                      /* [max_step_tokens] */
    const int32_t **block_tables;                  /* [max_batch] */
    struct td_sched_seq **planned;                 /* [max_seqs] */
    struct td_sched_item *planned_items;           /* [max_batch] */
    int32_t *room, *seq_blocks; /* several ranks: what the others are told; NULL: one rank */
};

struct td_engine {
    struct td_thread_pool *threads;
    struct td_model *model;
    struct td_workspace *ws;
    struct td_kv_pool *kv;
    struct td_engine_device *device; /* NULL: none */
    struct td_kv_layout layout;      /* of whole blocks */
    uint64_t layout_hash;
    struct td_comm *comm; /* NULL: one rank */
    struct td_rank_kv ranks;
    struct td_arena ranks_arena;  /* several ranks of one host: the KV of all */
    bool collects;                /* ranks of several hosts: after each step */
    struct td_sampler **samplers; /* one per thread */
    int32_t n_threads, max_len, max_batch, max_step_tokens, max_seqs, max_blocks_per_seq, vocab;
    struct td_engine_layers layers; /* done NULL: nobody is told */

    struct td_engine_seqs seqs;
    struct td_scheduler sched;
    struct td_engine_scratch step;
};

/* ---- the pool's blocks, as the scheduler asks for them --------------------------------------- */

static struct td_seq *seq_of(struct td_sched_seq *sched) { return (struct td_seq *)(void *)sched; }

static void blocks_room(void *ctx, struct td_schedule_room *ret_room)
{
    const struct td_engine *e = ctx;
    struct td_kv_pool_stats st;
    td_kv_pool_stats(e->kv, &st);
    *ret_room = (struct td_schedule_room){
        .n_blocks = st.n_blocks, .n_held = st.n_held, .n_available = st.n_free + st.n_cached};
}

static int32_t blocks_lookup(void *ctx, struct td_sched_seq *sched, int32_t max_blocks)
{
    struct td_engine *e = ctx;
    struct td_seq *seq = seq_of(sched);
    if (seq->n_prompt_logprobs >= 0) return 0;
    return td_kv_prefix_lookup(e->kv, seq->salt, seq->tokens, sched->n_tokens, max_blocks,
                               seq->blocks);
}

static bool blocks_alloc(void *ctx, struct td_sched_seq *sched, int32_t n)
{
    struct td_engine *e = ctx;
    TD_ASSERT(sched->n_blocks + n <= e->max_blocks_per_seq);
    return td_kv_pool_alloc(e->kv, n, seq_of(sched)->blocks + sched->n_blocks) == TD_OK;
}

static void blocks_publish(void *ctx, struct td_sched_seq *sched, int32_t n_full)
{
    struct td_engine *e = ctx;
    const struct td_seq *seq = seq_of(sched);
    td_kv_prefix_publish(e->kv, seq->salt, seq->tokens, seq->blocks, sched->n_published, n_full);
}

static void blocks_release(void *ctx, struct td_sched_seq *sched)
{
    struct td_engine *e = ctx;
    const struct td_seq *seq = seq_of(sched);
    for (int32_t i = 0; i < sched->n_blocks; i++) td_kv_pool_unref(e->kv, seq->blocks[i]);
}

static const struct td_sched_blocks engine_blocks = {.room = blocks_room,
                                                     .lookup = blocks_lookup,
                                                     .alloc = blocks_alloc,
                                                     .publish = blocks_publish,
                                                     .release = blocks_release};

/* ---- boot ------------------------------------------------------------------------------------ */

static bool is_share(const char *kv_memory)
{
    return kv_memory[0] && kv_memory[strlen(kv_memory) - 1] == '%';
}

/* available: in bytes, of which text may be a share. */
static td_status kv_bytes(const char *text, uint64_t available, uint64_t *ret_bytes,
                          struct td_err *err)
{
    size_t n = strlen(text);
    if (is_share(text)) {
        char *end;
        double share = strtod(text, &end);
        if (end != text + n - 1 || !(share > 0) || share > 95)
            return td_fail(
                err, TD_ERR_INVALID,
                "kv_memory: \"%s\" is not a share; use 1%%..95%% of what is available, or a size",
                text);
        *ret_bytes = (uint64_t)((double)available * share / 100.0);
        return TD_OK;
    }
    td_status s = td_parse_size(text, ret_bytes, err);
    if (s) return td_err_prefix(err, "kv_memory");
    return TD_OK;
}

td_status td_engine_kv_bytes(const char *text, uint64_t *ret_bytes, struct td_err *err)
{
    return kv_bytes(text, td_mem_available(), ret_bytes, err);
}

/* Memory of this host for the KV pool: not what experts will take that are not packed yet. */
static uint64_t available_for_kv(const struct td_engine *e)
{
    struct td_expert_memory experts;
    td_model_expert_memory(e->model, &experts);
    uint64_t n_ranks = td_comm_is_remote(e->comm) ? 1 : (uint64_t)td_comm_n_ranks(e->comm),
             later = (experts.bytes - experts.packed_bytes) * n_ranks,
             available = td_mem_available();
    return available > later ? available - later : 0;
}

static td_status engine_open_threads(struct td_engine *e, const struct td_engine_config *c,
                                     struct td_err *err)
{
    int cpus[1024], n_cpus = 0;
    e->n_threads = c->n_threads > 0 ? c->n_threads : td_cpus_usable("");
    /* they share what the engine was given, unless each is on a host of its own */
    bool shared = !td_comm_is_remote(c->comm);
    int32_t n_ranks = shared ? td_comm_n_ranks(c->comm) : 1,
            rank = shared ? td_comm_rank(c->comm) : 0;
    e->n_threads = e->n_threads < n_ranks ? 1 : e->n_threads / n_ranks;
    if (e->n_threads > 1024)
        return td_fail(err, TD_ERR_LIMIT, "threads is %d, limit 1024", e->n_threads);
    bool pinned = c->cpus && c->cpus[0];
    if (pinned) {
        td_status s = td_parse_cpu_list(c->cpus, cpus, 1024, &n_cpus, err);
        if (!s) s = td_check_cpu_list(cpus, n_cpus, err);
        if (s) return td_err_prefix(err, "cpus");
        if (n_cpus < e->n_threads * n_ranks)
            return td_fail(err, TD_ERR_INVALID,
                           "cpus lists %d CPUs, threads is %d: give at least as many CPUs", n_cpus,
                           e->n_threads * n_ranks);
    }
    return td_thread_pool_create(e->n_threads, pinned ? cpus + rank * e->n_threads : NULL, 50,
                                 &e->threads, err);
}

/* Of any rank: its own memory. Others than rank 0 have no pool: it decides for all. */
static td_status engine_open_device_kv(struct td_engine *e, struct td_kv_pool_config *kc,
                                       struct td_err *err)
{
    struct td_engine_device_kv m;
    bool leads = td_comm_rank(e->comm) == 0;
    size_t bytes = (size_t)kc->n_blocks * e->ranks.part.block_bytes;
    td_status s = td_engine_device_kv_alloc(
        e->device, bytes, leads ? TD_RANK_SCRATCH_BLOCKS * e->layout.block_bytes : 0, &m, err);
    if (!s)
        s = td_rank_kv_on_devices(&e->ranks, e->comm,
                                  td_engine_device_ops(e->device)->device->memory, m.blocks,
                                  kc->n_blocks, m.bytes - bytes, m.scratch, err);
    if (s) return s;
    kc->borrowed = e->ranks.base;
    kc->borrowed_bytes = (size_t)kc->n_blocks * e->layout.block_bytes + (m.bytes - bytes);
    return TD_OK;
}

/* Room for a last partial block, and one more to grow into. */
static int32_t blocks_per_seq(int32_t max_len, int32_t block_size)
{
    return (max_len + block_size) / block_size + 1;
}

static td_status engine_open_kv(struct td_engine *e, const struct td_engine_config *c,
                                struct td_err *err)
{
    td_status s = td_rank_kv_init(&e->ranks, e->model, c->block_size, e->n_threads, err);
    if (s) return s;
    e->ranks.apart = td_comm_is_remote(e->comm);
    e->layout = e->ranks.whole;
    uint64_t bytes, per_block = td_rank_kv_bytes(&e->ranks, 1);
    s = e->device ? td_engine_device_kv_bytes(e->device, c->kv_memory, &bytes, err)
                  : kv_bytes(c->kv_memory, available_for_kv(e), &bytes, err);
    if (s) return s;
    uint64_t available = e->device ? bytes : available_for_kv(e);
    if (bytes > available)
        return td_fail(err, TD_ERR_NOMEM,
                       "kv_memory asks for %llu MiB, only %llu MiB are available",
                       (unsigned long long)(bytes >> 20), (unsigned long long)(available >> 20));
    if (e->device) per_block = e->ranks.part.block_bytes; /* each rank on its own device */
    uint64_t n = bytes / per_block;
    if (n < 2)
        return td_fail(err, TD_ERR_INVALID,
                       "kv_memory %llu bytes holds %llu KV blocks of %llu bytes, need at least 2",
                       (unsigned long long)bytes, (unsigned long long)n,
                       (unsigned long long)per_block);
    if (n > 1 << 24) n = 1 << 24;
    uint64_t usable =
        (uint64_t)c->max_seqs * (uint64_t)blocks_per_seq(td_model_max_len(e->model), c->block_size);
    /* every page is touched at boot: seconds for each 5 GiB */
    if (is_share(c->kv_memory) && n > usable) n = usable;
    struct td_kv_pool_config kc = {.layout = e->layout,
                                   .n_blocks = (int32_t)n,
                                   .shareable = c->shareable_kv,
                                   .show = !c->quiet,
                                   .prefix_cache = c->prefix_cache};
    if (e->device) {
        if (e->comm && (s = td_rank_agree(e->comm, kc.n_blocks, &kc.n_blocks, err))) return s;
        n = (uint64_t)kc.n_blocks;
        if ((s = engine_open_device_kv(e, &kc, err)) || td_comm_rank(e->comm) > 0) return s;
    } else if (e->comm && !e->ranks.apart) { /* all of it, for all ranks, whose other processes
                                                map it */
        if ((s = td_arena_create(td_rank_kv_bytes(&e->ranks, kc.n_blocks),
                                 TD_ARENA_SHAREABLE | TD_ARENA_SHOW, "tandem-kv", &e->ranks_arena,
                                 err)))
            return s;
        kc.borrowed = e->ranks_arena.base;
    }
    if ((s = td_kv_pool_create(&kc, &e->kv, err))) return s;
    if (e->ranks.apart)
        s = td_rank_kv_apart(&e->ranks, 0, td_kv_pool_block(e->kv, 0), kc.n_blocks, err);
    else if (!e->device)
        td_rank_kv_on_host(&e->ranks, 0, td_kv_pool_block(e->kv, 0), kc.n_blocks);
    if (s) return s;
    e->layout_hash = td_kv_layout_hash(&e->layout, td_model_hash(e->model));
    uint64_t pool_tokens = n * (uint64_t)c->block_size;
    e->max_len = td_model_max_len(e->model);
    if (pool_tokens < (uint64_t)e->max_len) e->max_len = (int32_t)pool_tokens;
    e->max_blocks_per_seq = blocks_per_seq(e->max_len, c->block_size);
    return TD_OK;
}

static void *engine_array(size_t n, size_t elem_bytes) { return calloc(n ? n : 1, elem_bytes); }

static td_status engine_open_pools(struct td_engine *e, const struct td_engine_config *c,
                                   struct td_err *err)
{
    size_t seqs = (size_t)c->max_seqs, tokens = (size_t)e->max_len + 1;
    td_status s = td_pool_create(sizeof(struct td_seq), (uint32_t)c->max_seqs, &e->seqs.pool, err);
    if (s) return s;
    e->max_seqs = c->max_seqs;
    e->seqs.tokens = engine_array(seqs * tokens, sizeof(int32_t));
    e->seqs.blocks = engine_array(seqs * (size_t)e->max_blocks_per_seq, sizeof(int32_t));
    e->seqs.bias = engine_array(seqs * TD_MAX_LOGIT_BIAS, sizeof(struct td_logit_bias));
    size_t rows = (size_t)e->max_step_tokens;
    e->step.row_tokens = engine_array(rows, sizeof(int32_t));
    e->step.row_positions = engine_array(rows, sizeof(int32_t));
    e->step.row_seq = engine_array(rows, sizeof(int32_t));
    e->step.logit_rows = engine_array((size_t)e->max_batch, sizeof(int32_t));
    e->step.scored = engine_array(rows, sizeof *e->step.scored);
    e->step.block_tables = engine_array((size_t)e->max_batch, sizeof(int32_t *));
    e->step.planned = engine_array(seqs, sizeof(struct td_sched_seq *));
    e->step.planned_items = engine_array((size_t)e->max_batch, sizeof *e->step.planned_items);
    e->samplers = engine_array((size_t)e->n_threads, sizeof(struct td_sampler *));
    if (!e->seqs.tokens || !e->seqs.blocks || !e->seqs.bias || !e->step.row_tokens ||
        !e->step.row_positions || !e->step.row_seq || !e->step.logit_rows || !e->step.scored ||
        !e->step.block_tables || !e->step.planned || !e->step.planned_items || !e->samplers)
        return td_fail(
            err, TD_ERR_NOMEM,
            "engine: no memory for max_seqs %d x max_model_len %d tokens; lower one of them",
            c->max_seqs, e->max_len);
    for (int32_t i = 0; i < e->n_threads; i++)
        if ((s = td_sampler_create(e->vocab, &e->samplers[i], err))) return s;
    struct td_scheduler_config sc = {.blocks = &engine_blocks,
                                     .ctx = e,
                                     .block_size = c->block_size,
                                     .max_seqs = c->max_seqs,
                                     .max_batch = e->max_batch,
                                     .max_step_tokens = e->max_step_tokens};
    if ((s = td_scheduler_init(&e->sched, &sc, err)) || !e->comm) return s;
    e->step.room =
        malloc(td_rank_step_bytes(e->max_step_tokens, e->max_batch, e->max_blocks_per_seq));
    e->step.seq_blocks = engine_array((size_t)e->max_batch, sizeof(int32_t));
    if (!e->step.room || !e->step.seq_blocks)
        return td_fail(err, TD_ERR_NOMEM, "engine: no memory for the largest step");
    struct td_rank_boot boot = {.n_blocks = e->ranks.n_blocks,
                                .max_rows = e->max_step_tokens,
                                .max_seqs = e->max_batch,
                                .max_blocks_per_seq = e->max_blocks_per_seq,
                                .arena_bytes = e->ranks_arena.bytes};
    return td_rank_boot_tell(e->comm, &boot, &e->ranks_arena, NULL, err);
}

/* Ranks of several hosts: each has its own command line, files and CPU. */
static td_status agree_on_terms(const struct td_engine_config *c, const struct td_ops *ops,
                                struct td_err *err)
{
    struct td_rank_terms t = {.block_size = c->block_size,
                              .max_seqs = c->max_seqs,
                              .max_batch = c->max_batch,
                              .max_step_tokens = c->max_step_tokens,
                              .max_model_len = c->max_model_len,
                              .ep = c->expert_ranks};
    if (!ops && !(ops = td_ops_best()))
        return td_fail(err, TD_ERR_INVALID,
                       "TANDEM_OPS names a table of kernels that this CPU does not run");
    snprintf(t.dtype, sizeof t.dtype, "%s", c->dtype);
    snprintf(t.kv_dtype, sizeof t.kv_dtype, "%s", c->kv_dtype ? c->kv_dtype : "auto");
    snprintf(t.numerics, sizeof t.numerics, "%s", td_ops_numerics(ops));
    td_status s =
        td_rank_model_sample(c->model_dir ? c->model_dir : c->random_config, &t.model, err);
    return s ? s : td_rank_terms_agree(c->comm, &t, err);
}

static td_status engine_open_model(struct td_engine *e, const struct td_engine_config *c,
                                   struct td_err *err)
{
    const struct td_ops *ops = NULL;
    if (c->ops && c->ops[0] && !(ops = td_model_ops_by_name(c->ops)))
        return td_fail(err, TD_ERR_UNSUPPORTED, "ops \"%s\": %s", c->ops, td_ops_lack(c->ops));
    td_status s = td_engine_device_open(c, &e->device, err);
    if (!s && td_comm_is_remote(c->comm)) s = agree_on_terms(c, ops, err);
    if (!s) s = engine_open_threads(e, c, err);
    if (s) return s;
    struct td_model_params p = {.dir = c->model_dir,
                                .random_config = c->random_config,
                                .random_layers = c->random_layers,
                                .dtype = c->dtype,
                                .kv_dtype = c->kv_dtype,
                                .threads = e->threads,
                                .ops = e->device ? td_engine_device_ops(e->device) : ops,
                                .comm = c->comm,
                                .expert_ranks = c->expert_ranks,
                                .experts = c->experts,
                                .max_model_len = c->max_model_len,
                                .quiet = c->quiet || td_comm_rank(c->comm) > 0,
                                .no_graphs = c->no_graphs};
    return td_model_open(&p, &e->model, err);
}

/* Before the KV pool, which may be a share of what is left. */
static td_status engine_open_workspace(struct td_engine *e, const struct td_engine_config *c,
                                       struct td_err *err)
{
    e->max_batch = c->max_batch;
    e->max_step_tokens = c->max_step_tokens < c->max_batch ? c->max_batch : c->max_step_tokens;
    e->vocab = td_model_config(e->model)->vocab;
    td_status s = td_workspace_create(e->model, e->max_step_tokens, e->max_batch, &e->ws, err);
    if (!s && e->device && !c->host_sampling && td_comm_rank(e->comm) == 0)
        s = td_engine_device_sampler_open(e->device, e->max_batch, e->vocab, err);
    return s;
}

/* The others must not wait for a rank that will not come. */
static void tell_failure(struct td_comm *comm, const struct td_err *err)
{
    char why[TD_COMM_REASON_MAX];
    if (err)
        snprintf(why, sizeof why, "rank %d: %s", td_comm_rank(comm), err->msg);
    else
        snprintf(why, sizeof why, "rank %d failed", td_comm_rank(comm));
    td_comm_abort(comm, why);
}

/* A rank of another host than rank 0's: its parts of rank 0's blocks. */
static td_status open_parts(struct td_engine *e, const struct td_rank_boot *boot,
                            struct td_arena *ret_arena, struct td_err *err)
{
    uint64_t bytes = (uint64_t)boot->n_blocks * e->ranks.part.block_bytes,
             available = available_for_kv(e);
    if (boot->n_blocks < 1 || bytes > available)
        return td_fail(err, TD_ERR_NOMEM,
                       "this rank's part of %d KV blocks is %llu MiB, only %llu MiB are available",
                       boot->n_blocks, (unsigned long long)(bytes >> 20),
                       (unsigned long long)(available >> 20));
    td_status s = td_arena_create(bytes, 0, "tandem-kv-part", ret_arena, err);
    return s ? s
             : td_rank_kv_apart(&e->ranks, td_comm_rank(e->comm), ret_arena->base, boot->n_blocks,
                                err);
}

/* Loading takes minutes and is not equally fast everywhere; a step is. */
/* Every host has its part of the KV: the time limit of a step may begin to count. */
static td_status await_parts(struct td_comm *comm, struct td_err *err)
{
    char why[TD_COMM_REASON_MAX];
    td_status s = td_comm_barrier(comm);
    return s ? td_fail(err, s, "ranks: %s", td_comm_reason(comm, why)) : TD_OK;
}

td_status td_engine_follow(const struct td_engine_config *c, struct td_err *err)
{
    TD_ASSERT(td_comm_rank(c->comm) > 0);
    struct td_engine e = {.comm = c->comm}; /* threads, model and KV of an engine that decides
                                               nothing */
    struct td_rank_boot boot = {0};
    struct td_arena arena = {.memfd = -1};
    td_status s = engine_open_model(&e, c, err);
    if (!s) s = engine_open_workspace(&e, c, err);
    if (!s)
        s = e.device ? engine_open_kv(&e, c, err)
                     : td_rank_kv_init(&e.ranks, e.model, c->block_size, 1, err);
    if (!s) s = td_rank_boot_tell(c->comm, &boot, NULL, &arena, err);
    if (!s && td_comm_is_remote(c->comm)) {
        s = open_parts(&e, &boot, &arena, err);
        if (!s) s = await_parts(c->comm, err);
    } else if (!s && !e.device) {
        td_rank_kv_on_host(&e.ranks, td_comm_rank(c->comm), arena.base, boot.n_blocks);
    }
    if (!s) td_comm_set_timeout(c->comm, c->rank_timeout_ms);
    if (!s) s = td_rank_follow(c->comm, e.model, e.ws, &e.ranks, &boot, err);
    if (s) tell_failure(c->comm, err);
    td_workspace_destroy(e.ws);
    td_arena_destroy(&arena);
    td_rank_kv_free(&e.ranks);
    td_model_close(e.model);
    td_engine_device_close(e.device);
    td_thread_pool_destroy(e.threads);
    return s;
}

td_status td_engine_open(const struct td_engine_config *c, struct td_engine **ret_engine,
                         struct td_err *err)
{
    if (c->max_seqs < 1 || c->max_seqs > 65536)
        return td_fail(err, TD_ERR_INVALID, "max_seqs is %d, must be 1..65536", c->max_seqs);
    if (c->max_batch < 1 || c->max_batch > 4096)
        return td_fail(err, TD_ERR_INVALID, "max_batch is %d, must be 1..4096", c->max_batch);
    if (c->max_step_tokens < 1 || c->max_step_tokens > 1 << 20)
        return td_fail(err, TD_ERR_INVALID, "max_step_tokens is %d, must be 1..%d",
                       c->max_step_tokens, 1 << 20);
    struct td_engine *e = calloc(1, sizeof *e);
    if (!e) return td_fail(err, TD_ERR_NOMEM, "engine: out of memory");
    pthread_mutex_init(&e->seqs.lock, NULL);
    e->comm = td_comm_n_ranks(c->comm) > 1 ? c->comm : NULL;
    td_status s = engine_open_model(e, c, err);
    if (!s) s = engine_open_workspace(e, c, err);
    if (!s) s = engine_open_kv(e, c, err);
    if (!s) s = engine_open_pools(e, c, err);
    if (!s && e->ranks.apart) s = await_parts(e->comm, err);
    e->collects = e->ranks.apart && c->hands_over;
    if (!s && e->ranks.apart) td_comm_set_timeout(e->comm, c->rank_timeout_ms);
    if (s) {
        tell_failure(c->comm, err);
        td_engine_close(e);
        return s;
    }
    *ret_engine = e;
    return TD_OK;
}

void td_engine_close(struct td_engine *e)
{
    if (!e) return;
    td_rank_kv_free(&e->ranks); /* before the others give back what it has opened */
    if (e->step.room) td_rank_end_tell(e->comm, e->step.room);
    for (int32_t i = 0; e->samplers && i < e->n_threads; i++) td_sampler_destroy(e->samplers[i]);
    free(e->samplers);
    td_workspace_destroy(e->ws);
    td_pool_destroy(e->seqs.pool);
    td_kv_pool_destroy(e->kv);
    td_arena_destroy(&e->ranks_arena);
    free(e->step.room);
    free(e->step.seq_blocks);
    td_model_close(e->model);
    td_engine_device_close(e->device);
    td_thread_pool_destroy(e->threads);
    free(e->seqs.tokens);
    free(e->seqs.blocks);
    free(e->seqs.bias);
    free(e->step.row_tokens);
    free(e->step.row_positions);
    free(e->step.row_seq);
    free(e->step.logit_rows);
    free(e->step.scored);
    free(e->step.block_tables);
    free(e->step.planned);
    free(e->step.planned_items);
    td_scheduler_free(&e->sched);
    pthread_mutex_destroy(&e->seqs.lock);
    free(e);
}

struct td_model *td_engine_model(struct td_engine *e) { return e->model; }
struct td_kv_pool *td_engine_kv(struct td_engine *e) { return e->kv; }
void td_engine_expert_counts(const struct td_engine *e, struct td_expert_counts *ret)
{
    td_workspace_expert_counts(e->ws, ret);
}
struct td_scheduler *td_engine_scheduler(struct td_engine *e) { return &e->sched; }
const struct td_device_info *td_engine_device_info(const struct td_engine *e)
{
    return e->device ? &td_engine_device_ops(e->device)->device->info : NULL;
}
const struct td_arena *td_engine_kv_arena(const struct td_engine *e)
{
    return e->ranks_arena.base ? &e->ranks_arena : td_kv_pool_arena(e->kv);
}
int32_t td_engine_n_ranks(const struct td_engine *e) { return e->ranks.n_ranks; }
int32_t td_engine_kv_parts(const struct td_engine *e) { return e->ranks.n_parts; }
const struct td_device_memory *td_engine_device_memory(const struct td_engine *e)
{
    return e->ranks.memory;
}
uint64_t td_engine_layout_hash(const struct td_engine *e) { return e->layout_hash; }
int32_t td_engine_max_len(const struct td_engine *e) { return e->max_len; }
int32_t td_engine_max_batch(const struct td_engine *e) { return e->max_batch; }
int32_t td_engine_max_step_tokens(const struct td_engine *e) { return e->max_step_tokens; }

/* ---- sequences ------------------------------------------------------------------------------- */

int32_t td_engine_seqs_live(struct td_engine *e)
{
    pthread_mutex_lock(&e->seqs.lock);
    int32_t n = (int32_t)td_pool_n_used(e->seqs.pool);
    pthread_mutex_unlock(&e->seqs.lock);
    return n;
}

struct td_seq *td_engine_seq_get(struct td_engine *e)
{
    pthread_mutex_lock(&e->seqs.lock);
    struct td_seq *seq = td_pool_get(e->seqs.pool);
    pthread_mutex_unlock(&e->seqs.lock);
    if (!seq) return NULL;
    size_t i = td_pool_index(e->seqs.pool, seq);
    seq->index = (uint32_t)i;
    seq->tokens = e->seqs.tokens + i * ((size_t)e->max_len + 1);
    seq->blocks = e->seqs.blocks + i * (size_t)e->max_blocks_per_seq;
    seq->logit_bias = e->seqs.bias + i * TD_MAX_LOGIT_BIAS;
    return seq;
}

void td_engine_seq_put(struct td_engine *e, struct td_seq *seq)
{
    TD_ASSERT(seq->sched.n_blocks == 0);
    pthread_mutex_lock(&e->seqs.lock);
    td_pool_put(e->seqs.pool, seq);
    pthread_mutex_unlock(&e->seqs.lock);
}

static td_status check_ids(const struct td_engine *e, const char *name, const int32_t *ids,
                           int32_t n, struct td_err *err)
{
    for (int32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->vocab)
            return td_fail(err, TD_ERR_INVALID, "%s[%d] is %d, must be 0..%d", name, i, ids[i],
                           e->vocab - 1);
    return TD_OK;
}

td_status td_engine_seq_set(struct td_engine *e, struct td_seq *seq, const int32_t *tokens,
                            int32_t n_tokens, int32_t n_prompt, const struct td_sampling *sampling,
                            const int32_t *stop_tokens, int32_t n_stop_tokens, int64_t max_tokens,
                            struct td_err *err)
{
    if (n_tokens < 1) return td_fail(err, TD_ERR_INVALID, "tokens is empty, need at least 1");
    if (n_tokens >= e->max_len)
        return td_fail(
            err, TD_ERR_INVALID,
            "tokens has %d ids, must be below the longest sequence this worker can hold, %d",
            n_tokens, e->max_len);
    if (n_prompt < 1 || n_prompt > n_tokens)
        return td_fail(err, TD_ERR_INVALID, "n_prompt is %d, must be 1..%d", n_prompt, n_tokens);
    if (max_tokens < 1 || max_tokens > e->max_len - n_prompt)
        return td_fail(err, TD_ERR_INVALID,
                       "max_tokens is %lld, must be 1..%d (longest sequence %d - prompt %d)",
                       (long long)max_tokens, e->max_len - n_prompt, e->max_len, n_prompt);
    if (n_tokens - n_prompt >= max_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "tokens holds %d output tokens, max_tokens is %lld: nothing is left to do",
                       n_tokens - n_prompt, (long long)max_tokens);
    if (n_stop_tokens > TD_MAX_STOP_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "stop_token_ids has %d ids, limit %d", n_stop_tokens,
                       TD_MAX_STOP_TOKENS);
    td_status s = check_ids(e, "tokens", tokens, n_tokens, err);
    if (!s) s = check_ids(e, "stop_token_ids", stop_tokens, n_stop_tokens, err);
    if (!s) s = td_sampling_check(sampling, e->vocab, err);
    if (s) return s;
    TD_ASSERT(sampling->n_logit_bias <= TD_MAX_LOGIT_BIAS);
    memcpy(seq->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
    seq->sched.n_tokens = seq->n_input = n_tokens;
    seq->n_prompt = n_prompt;
    seq->sampling = *sampling;
    if (sampling->n_logit_bias)
        memcpy(seq->logit_bias, sampling->logit_bias,
               (size_t)sampling->n_logit_bias * sizeof *seq->logit_bias);
    seq->sampling.logit_bias = seq->logit_bias;
    if (n_stop_tokens)
        memcpy(seq->stop_tokens, stop_tokens, (size_t)n_stop_tokens * sizeof *stop_tokens);
    seq->n_stop_tokens = n_stop_tokens;
    seq->max_tokens = (int32_t)max_tokens;
    seq->min_tokens = 0;
    seq->n_prompt_logprobs = -1;
    seq->n_bias = sampling->n_logit_bias;
    seq->sched.phase = TD_SEQ_IDLE;
    return TD_OK;
}

td_status td_engine_seq_set_prompt_logprobs(struct td_seq *seq, int64_t n, struct td_err *err)
{
    if (n < -1 || n > TD_MAX_TOP_LOGPROBS)
        return td_fail(err, TD_ERR_INVALID, "prompt_logprobs is %lld, must be 0..%d", (long long)n,
                       TD_MAX_TOP_LOGPROBS);
    seq->n_prompt_logprobs = (int32_t)n;
    return TD_OK;
}

td_status td_engine_seq_set_min_tokens(struct td_seq *seq, int64_t min_tokens, struct td_err *err)
{
    if (min_tokens < 0 || min_tokens > seq->max_tokens)
        return td_fail(err, TD_ERR_INVALID, "min_tokens is %lld, must be 0..max_tokens, %d",
                       (long long)min_tokens, seq->max_tokens);
    if (min_tokens && seq->n_bias + seq->n_stop_tokens > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID,
                       "min_tokens: logit_bias and stop_token_ids have %d entries, limit %d",
                       seq->n_bias + seq->n_stop_tokens, TD_MAX_LOGIT_BIAS);
    seq->min_tokens = (int32_t)min_tokens;
    for (int32_t i = 0; min_tokens && i < seq->n_stop_tokens; i++)
        seq->logit_bias[seq->n_bias + i] =
            (struct td_logit_bias){.token = seq->stop_tokens[i], .bias = -INFINITY};
    return TD_OK;
}

/* A token was appended: was it the last? */
static void seq_finish(struct td_seq *seq)
{
    int32_t token = seq->tokens[seq->sched.n_tokens - 1];
    for (int32_t i = 0; i < seq->n_stop_tokens; i++)
        if (seq->stop_tokens[i] == token) {
            seq->finish = TD_FINISH_STOP;
            return;
        }
    if (seq->sched.n_tokens - seq->n_prompt >= seq->max_tokens) seq->finish = TD_FINISH_LENGTH;
}

td_status td_engine_admit(struct td_engine *e, struct td_seq *seq, bool import, int32_t headroom)
{
    return td_scheduler_admit(&e->sched, &seq->sched, import, headroom);
}

td_status td_engine_kv_check(struct td_engine *e, const int32_t *block_ids, int32_t n,
                             int32_t n_tokens, struct td_err *err)
{
    return td_rank_kv_check(&e->ranks, block_ids, n, n_tokens, e->threads, err);
}

td_status td_engine_kv_arrange(struct td_engine *e, const int32_t *block_ids, int32_t n,
                               int32_t from_parts, struct td_err *err)
{
    char why[TD_COMM_REASON_MAX];
    td_status s = td_rank_kv_import(&e->ranks, block_ids, n, from_parts, e->threads, err);
    if (s || !e->ranks.apart) return s;
    s = td_rank_deal_tell(e->comm, &e->ranks, block_ids, n, e->step.room);
    return s ? td_fail(err, s, "ranks: %s", td_comm_reason(e->comm, why)) : TD_OK;
}

void td_engine_imported(struct td_engine *e, struct td_seq *seq, int32_t first_token)
{
    seq->tokens[seq->sched.n_tokens] = first_token;
    td_scheduler_imported(&e->sched, &seq->sched);
    seq_finish(seq);
}

void td_engine_release(struct td_engine *e, struct td_seq *seq)
{
    td_scheduler_release(&e->sched, &seq->sched);
}

/* ---- batches --------------------------------------------------------------------------------- */

static void take_items(const struct td_engine *e, int32_t n, struct td_step_item *ret_items)
{
    for (int32_t i = 0; i < n; i++)
        ret_items[i] = (struct td_step_item){.seq = seq_of(e->step.planned_items[i].seq),
                                             .n_new = e->step.planned_items[i].n_new};
}

int32_t td_engine_batch(struct td_engine *e, struct td_step_item *ret_items,
                        struct td_sched_load *ret_load)
{
    int32_t n = td_scheduler_batch(&e->sched, e->step.planned_items, ret_load);
    take_items(e, n, ret_items);
    return n;
}

int32_t td_engine_plan(struct td_engine *e, struct td_seq **running, int32_t n,
                       struct td_step_item *ret_items, struct td_seq **preempted,
                       int32_t *ret_n_preempted)
{
    int32_t n_left = 0;
    TD_ASSERT(n <= e->max_seqs);
    for (int32_t i = 0; i < n; i++) e->step.planned[i] = &running[i]->sched;
    int32_t n_items =
        td_scheduler_plan(&e->sched, e->step.planned, n, e->step.planned_items, &n_left);
    take_items(e, n_items, ret_items);
    for (int32_t i = n; i-- > n_left;) preempted[n - 1 - i] = running[i];
    *ret_n_preempted = n - n_left;
    return n_items;
}

struct sample_ctx {
    struct td_engine *e;
    struct td_step_item *items;
    const float *logits;
    int32_t n_items;
};

/* Rows are independent, so any member may sample any row: member p takes every n_parts-th. */
static void sample_part(void *arg, int part, int n_parts)
{
    struct sample_ctx *c = arg;
    int32_t row = 0;
    for (int32_t i = 0; i < c->n_items; i++) {
        struct td_step_item *it = &c->items[i];
        if (it->seq->sched.n_computed < it->seq->sched.n_tokens) continue;
        if (row % n_parts == part && !it->status)
            it->status = td_sample(c->e->samplers[part], &it->seq->sampling,
                                   c->logits + (size_t)row * (size_t)c->e->vocab, it->seq->tokens,
                                   it->seq->sched.n_tokens, it->seq->n_prompt, &it->out);
        row++;
    }
}

/* Stop tokens have no chance in rows that must not end yet. */
static void keep_min_tokens(struct td_step_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        struct td_seq *seq = items[i].seq;
        bool may_end = seq->sched.n_tokens - seq->n_prompt >= seq->min_tokens;
        seq->sampling.n_logit_bias = seq->n_bias + (may_end ? 0 : seq->n_stop_tokens);
    }
}

/* The device's sampler takes no masks: such a step is sampled on the host, to the same tokens. */
static bool is_guided(const struct td_step_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++)
        if (items[i].seq->guide.allowed) return true;
    return false;
}

static void ask_guides(struct td_step_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        struct td_seq *seq = items[i].seq;
        bool sampled = seq->sched.n_computed == seq->sched.n_tokens && !items[i].status;
        if (!seq->guide.allowed || !sampled) continue;
        items[i].status = seq->guide.allowed(seq->guide.ctx, seq, &seq->sampling.allowed);
    }
}

td_status td_engine_check(struct td_engine *e, struct td_err *err)
{
    char why[TD_COMM_REASON_MAX];
    td_status s = td_comm_check(e->comm);
    return s ? td_fail(err, s, "%s", td_comm_reason(e->comm, why)) : TD_OK;
}

void td_engine_on_layers(struct td_engine *e, const struct td_engine_layers *layers)
{
    e->layers = layers ? *layers : (struct td_engine_layers){0};
}

struct layers_ctx {
    const struct td_engine *e;
    const struct td_step_item *items;
    int32_t n_items;
};

static void layers_done(void *arg, int32_t n_layers)
{
    const struct layers_ctx *c = arg;
    c->e->layers.done(c->e->layers.ctx, c->items, c->n_items, n_layers);
}

/* The rows of a step, as the forward pass reads them. */
struct step_rows {
    int32_t n, n_logits;
    bool prefills; /* some item is of a prompt */
};

static struct step_rows lay_rows(struct td_engine *e, const struct td_step_item *items,
                                 int32_t n_items)
{
    struct step_rows r = {0};
    for (int32_t i = 0; i < n_items; i++) {
        const struct td_seq *seq = items[i].seq;
        r.prefills = r.prefills || seq->sched.phase == TD_SEQ_PREFILL;
        int32_t n_blocks =
            td_schedule_blocks(seq->sched.n_computed + items[i].n_new, e->layout.block_size);
        TD_ASSERT(items[i].n_new >= 0 && r.n + items[i].n_new <= e->max_step_tokens);
        TD_ASSERT(seq->sched.n_computed + items[i].n_new <= seq->sched.n_tokens &&
                  n_blocks <= seq->sched.n_blocks);
        e->step.block_tables[i] = seq->blocks;
        if (e->step.seq_blocks) e->step.seq_blocks[i] = n_blocks;
        for (int32_t j = 0; j < items[i].n_new; j++, r.n++) {
            e->step.row_tokens[r.n] = seq->tokens[seq->sched.n_computed + j];
            e->step.row_positions[r.n] = seq->sched.n_computed + j;
            e->step.row_seq[r.n] = i;
        }
        if (seq->sched.n_computed + items[i].n_new == seq->sched.n_tokens)
            e->step.logit_rows[r.n_logits++] = r.n - 1;
    }
    return r;
}

static struct td_forward_args args_of(const struct td_engine *e, const struct step_rows *rows,
                                      struct td_err *err)
{
    return (struct td_forward_args){.tokens = e->step.row_tokens,
                                    .positions = e->step.row_positions,
                                    .row_seq = e->step.row_seq,
                                    .block_tables = e->step.block_tables,
                                    .n_rows = rows->n,
                                    .kv_base = e->ranks.mine,
                                    .kv = &e->ranks.part,
                                    .kv_stride = e->ranks.stride,
                                    .logit_rows = e->step.logit_rows,
                                    .n_logit_rows = rows->n_logits,
                                    .err = err};
}

/* The forward pass on every rank. An error says how many rows it was of. */
static td_status forward(struct td_engine *e, const struct td_forward_args *a, int32_t n_items,
                         float **ret_logits, struct td_err *err)
{
    td_status s = e->comm ? td_rank_step_tell(e->comm, a, e->step.seq_blocks, n_items, e->collects,
                                              e->step.room)
                          : TD_OK;
    if (!s) s = td_model_forward(e->model, e->ws, a, ret_logits);
    if (!s && e->collects) s = td_rank_collect(e->comm, &e->ranks, a);
    if (s && td_comm_check(e->comm)) { /* a device only knows that a call failed */
        char why[TD_COMM_REASON_MAX];
        return td_fail(err, TD_ERR_PEER, "%s", td_comm_reason(e->comm, why));
    }
    if (s == TD_ERR_DEVICE) {
        td_err_prefix(err, "forward of %d rows", a->n_rows);
        if (e->comm) tell_failure(e->comm, err); /* they wait for this rank's part of it */
        return s;
    }
    return s ? td_fail(err, s, "forward of %d rows failed: %s", a->n_rows, td_status_name(s))
             : TD_OK;
}

/* Takes the tokens that the device has sampled, in the order of the rows of logits. */
static void device_sampled(struct td_engine *e, struct td_step_item *items, int32_t n_items)
{
    int32_t row = 0;
    for (int32_t i = 0; i < n_items; i++)
        if (items[i].seq->sched.n_computed == items[i].seq->sched.n_tokens) {
            td_status s = td_engine_device_sample_take(e->device, row++, &items[i].out);
            if (!items[i].status) items[i].status = s;
        }
}

static void host_sample(struct td_engine *e, struct td_step_item *items, int32_t n_items,
                        const float *logits, int32_t n_logits)
{
    ask_guides(items, n_items);
    struct sample_ctx c = {.e = e, .items = items, .logits = logits, .n_items = n_items};
    if (n_logits == 1)
        sample_part(&c, 0, 1);
    else
        td_thread_pool_run(e->threads, sample_part, &c);
}

static void append_sampled(struct td_step_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        struct td_seq *seq = items[i].seq;
        bool done = seq->sched.n_computed == seq->sched.n_tokens;
        if (!done || items[i].status) continue;
        seq->tokens[seq->sched.n_tokens] = items[i].out.token;
        td_scheduler_sampled(&seq->sched);
        seq_finish(seq);
        items[i].sampled = true;
    }
}

/* ---- log-probabilities of prompts ------------------------------------------------------------ */

struct score_ctx {
    struct td_engine *e;
    const struct td_seq *seq;
    const float *logits;
    struct td_scored *out; /* [n]; rank 0: the row has no finite logit */
    int32_t n;
};

static void score_part(void *arg, int part, int n_parts)
{
    const struct score_ctx *c = arg;
    for (int32_t i = part; i < c->n; i += n_parts) {
        const float *logits = c->logits + (size_t)i * (size_t)c->e->vocab;
        int32_t token = c->seq->tokens[c->seq->sched.n_computed + i + 1];
        if (td_sample_score(logits, c->e->vocab, token, c->seq->n_prompt_logprobs, &c->out[i]))
            c->out[i].rank = 0;
    }
}

/* The next n tokens of the item, each with its logits: n <= max_batch, which is how many rows of
 * logits a workspace holds. */
static td_status score_rows(struct td_engine *e, struct td_step_item *item, int32_t n,
                            struct td_scored *out, struct td_err *err)
{
    struct td_step_item some = {.seq = item->seq, .n_new = n};
    struct step_rows rows = lay_rows(e, &some, 1);
    float *logits = NULL;
    rows.n_logits = n;
    for (int32_t i = 0; i < n; i++) e->step.logit_rows[i] = i;
    struct td_forward_args a = args_of(e, &rows, err);
    td_status s = forward(e, &a, 1, &logits, err);
    if (s) return s;
    struct score_ctx c = {.e = e, .seq = item->seq, .logits = logits, .out = out, .n = n};
    td_thread_pool_run(e->threads, score_part, &c);
    for (int32_t i = 0; i < n; i++)
        if (out[i].rank == 0) item->status = TD_ERR_CORRUPT;
    td_scheduler_computed(&e->sched, &item->seq->sched, n);
    item->n_new -= n;
    return TD_OK;
}

/* Computes what of the items has a prompt token behind it whose log-probability is wanted; the rest
 * of n_new is the step's. A row's bits do not depend on the other rows (I1), so chunks, batches and
 * this way of computing give the same numbers. */
static td_status score_prompts(struct td_engine *e, struct td_step_item *items, int32_t n_items,
                               struct td_err *err)
{
    int32_t n_all = 0;
    for (int32_t i = 0; i < n_items; i++) {
        struct td_step_item *it = &items[i];
        struct td_seq *seq = it->seq;
        it->sampled = false;
        it->status = TD_OK;
        it->n_scored = 0;
        if (seq->n_prompt_logprobs < 0) continue;
        int32_t end = seq->sched.n_computed + it->n_new;
        if (end > seq->n_prompt - 1) end = seq->n_prompt - 1;
        it->first_scored = seq->sched.n_computed + 1;
        it->scored = e->step.scored + n_all;
        while (seq->sched.n_computed < end && !it->status) {
            int32_t n = end - seq->sched.n_computed;
            if (n > e->max_batch) n = e->max_batch;
            td_status s = score_rows(e, it, n, e->step.scored + n_all, err);
            if (s) return s;
            n_all += n;
            it->n_scored += n;
        }
        if (seq->sched.n_computed >= seq->n_prompt - 1) seq->n_prompt_logprobs = -1;
    }
    return TD_OK;
}

td_status td_engine_step(struct td_engine *e, struct td_step_item *items, int32_t n_items,
                         struct td_err *err)
{
    TD_ASSERT(n_items <= e->max_batch);
    td_status s = score_prompts(e, items, n_items, err);
    if (s) return s;
    struct step_rows rows = lay_rows(e, items, n_items);
    if (rows.n == 0) return TD_OK;
    struct td_forward_args a = args_of(e, &rows, err);
    float *logits = NULL;
    struct td_forward_tail tail;
    struct layers_ctx told = {.e = e, .items = items, .n_items = n_items};
    const struct td_forward_layers layers = {
        .done = layers_done, .ctx = &told, .every = e->layers.every};
    if (e->layers.done && rows.prefills) a.layers = &layers;
    keep_min_tokens(items, n_items);
    if (e->device && rows.n_logits > 0 && !is_guided(items, n_items)) {
        /* Decode steps are padded, and so are their rows of logits. A step in which an item has no
         * row is none to the forward pass (is_decode_step in forward_device.c). */
        bool decodes = rows.n_logits == rows.n && rows.n == n_items;
        int32_t n = decodes ? td_workspace_padded_rows(e->ws, rows.n_logits) : rows.n_logits;
        if (td_engine_device_sample_fill(e->device, items, n_items, n, &tail) == TD_OK)
            a.tail = &tail;
    }
    s = forward(e, &a, n_items, &logits, err);
    if (s) return s;
    for (int32_t i = 0; i < n_items; i++)
        td_scheduler_computed(&e->sched, &items[i].seq->sched, items[i].n_new);
    if (a.tail)
        device_sampled(e, items, n_items);
    else if (rows.n_logits > 0)
        host_sample(e, items, n_items, logits, rows.n_logits);
    append_sampled(items, n_items);
    return TD_OK;
}
