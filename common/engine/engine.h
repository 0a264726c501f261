/* engine.h - sequences over a model and a paged KV pool: admission, prefix hits, batched steps,
 * preemption by recompute.
 *
 * The engine knows tokens and blocks; it knows nothing of RPCs or transfers. Both worker daemons,
 * the command line and the tests run this same code, so a cluster's tokens can be compared with one
 * process's, bit for bit (I1).
 *
 * Life of a sequence here:
 *     FREE --seq_get--> IDLE --admit--> PREFILL --step...--> DECODE --step...--> (finish set)
 *         --release, seq_put--> FREE
 *                       IDLE --admit(import)--> IMPORT --imported--> DECODE
 *                       PREFILL, DECODE --preempt--> IDLE (blocks gone, tokens kept; admitted again
 *                       by its owner)
 *
 * Threads: one owning thread, except seq_get/seq_put and seq_set, which any thread may call (a
 * new request is filled in by the RPC thread). Sources: Kwon et al. 2023 (paged KV, preemption),
 * Yu et al. 2022 (continuous batching), Agrawal et al. 2024 (chunked prefill). */
#ifndef TD_ENGINE_ENGINE_H
#define TD_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/kv/kv_pool.h"
#include "common/model/model.h"
#include "common/model/sampler.h"
#include "common/engine/scheduler.h" /* what the simulator shares: queue, batches, blocks */

struct td_engine;
struct td_device_info;
struct td_device_memory;

struct td_engine_config {
    const char *model_dir; /* or NULL with random_config */
    const char *random_config;
    int32_t random_layers;   /* the first so many of its layers; 0: all */
    const char *dtype;       /* auto | f32 | bf16 */
    const char *kv_dtype;    /* NULL, "" or auto (as dtype) | f32 | bf16 | int8 | fp8 */
    const char *ops;         /* NULL or "" = fastest */
    const char *cpus;        /* "" = unpinned, else a list "0-3" of n_threads CPUs */
    int32_t n_threads;       /* 0 = all CPUs */
    const char *kv_memory;   /* "2GiB", or "50%" of what is available after the weights
                                are loaded: then at most what max_seqs sequences of the
                                longest kind fill */
    int32_t block_size;      /* tokens per KV block */
    int32_t max_seqs;        /* sequences alive at once, waiting ones included */
    int32_t max_batch;       /* sequences in one step */
    int32_t max_model_len;   /* 0 = the model's */
    int32_t max_step_tokens; /* rows of one step: decode rows + prefill chunk */
    bool prefix_cache, shareable_kv, quiet;
    struct td_comm *comm;     /* borrowed; NULL = one rank. Else rank 0 opens the engine,
                             and every other rank runs td_engine_follow with the same
                             configuration: n_threads, cpus and kv_memory are of all
                             ranks together. Ranks of several hosts (td_comm_is_remote):
                             n_threads and cpus are each rank's own, kv_memory is rank
                             0's, and the others have their parts of its blocks */
    bool hands_over;          /* ranks of several hosts: rank 0's pool is whole after every
                                step, because a transfer reads it */
    int32_t expert_ranks;     /* of a mixture (model.h); 0: as many as ranks */
    const char *experts;      /* when they are packed (model.h); NULL: at load */
    uint32_t rank_timeout_ms; /* ranks of several hosts, from the first step on: 0 = 60 s */
    const char *device;   /* NULL, "" or "cpu": this machine's memory and kernels;
                             "cuda": device_index of the visible GPUs; one engine per
                             process */
    int32_t device_index;
    bool deterministic;            /* device: the same algorithms whatever the batch (I1) */
    bool no_graphs, host_sampling; /* device, tests: issue every step anew; sample what comes
                                      down. Same tokens */
};

/* numbers of proto FinishReason */
enum td_finish { TD_FINISH_NONE = 0, TD_FINISH_STOP = 1, TD_FINISH_LENGTH = 2 };

struct td_seq;
/* What restricts the next token of a sequence. */
struct td_seq_guide {
    /* [the engine's thread, in td_engine_step] *ret_words: as td_sampling.allowed, unchanged until
     * the step is done. A function of seq's tokens alone (I1). An error is the item's status. NULL:
     * every token may come. */
    td_status (*allowed)(void *ctx, const struct td_seq *seq, const uint64_t **ret_words);
    void *ctx;
};

struct td_seq {
    struct td_sched_seq sched; /* first: order, phase, counts, lists */
    uint32_t index;            /* 0..max_seqs-1, stable: lets an owner keep its own state
                                  in an array */
    uint64_t request;          /* identity, for logs and stale checks */
    uint32_t attempt;
    enum td_finish finish; /* set by the step that sampled the last token */

    int32_t *tokens; /* [max_model_len + 1]: prompt, then output; sched.n_tokens
                        of them */
    int32_t n_prompt;
    int32_t n_input;            /* tokens that came with the request (prompt + already
                                   sent) */
    int32_t *blocks;            /* [max blocks per sequence], sched.n_blocks of them */
    struct td_prefix_salt salt; /* its blocks are shared with sequences of the same salt
                                   only; set by the owner before the first admission */

    struct td_sampling sampling;
    struct td_logit_bias *logit_bias; /* [TD_MAX_LOGIT_BIAS] */
    int32_t stop_tokens[TD_MAX_STOP_TOKENS];
    int32_t n_stop_tokens;
    int32_t max_tokens; /* output tokens, counted from n_prompt */
    int32_t min_tokens; /* before so many, no stop token is chosen */
    int32_t n_bias;     /* of logit_bias by the request; the stop tokens' are behind them */
    /* How many of the best tokens are told beside each token of the prompt as it is computed
     * (td_step_item.scored); -1: nothing is told. Such a sequence computes all of its prompt: it
     * takes nothing from the prefix cache, which holds no logits. -1 again when all is told. */
    int32_t n_prompt_logprobs;

    struct td_seq_guide guide; /* set by the owner, after td_engine_seq_set */
    void *owner;               /* the daemon's request state */
};

/* Several ranks: collective with td_engine_follow; a failure of any rank is every rank's, with
 * its reason. */
td_status td_engine_open(const struct td_engine_config *config, struct td_engine **ret_engine,
                         struct td_err *err);
/* What kv_memory means here and now: "50%" of this machine's memory that is available (an engine
 * takes no more than its sequences can use, and leaves what lazy experts may take), or a size. On a
 * device: of what is free there beside weights and workspace. */
td_status td_engine_kv_bytes(const char *text, uint64_t *ret_bytes, struct td_err *err);
void td_engine_close(struct td_engine *engine); /* asserts that no sequence is out; ends
                                                   the other ranks */

/* A rank other than 0: its part of every step, until rank 0 closes its engine (TD_OK) or a rank
 * is lost (TD_ERR_PEER). */
td_status td_engine_follow(const struct td_engine_config *config, struct td_err *err);
/* Rank 0 while there is nothing to do: TD_ERR_PEER when another rank is dead. Does not wait. */
td_status td_engine_check(struct td_engine *engine, struct td_err *err);
int32_t td_engine_n_ranks(const struct td_engine *engine);

struct td_model *td_engine_model(struct td_engine *engine);
/* NULL: no device */
const struct td_device_info *td_engine_device_info(const struct td_engine *engine);
/* what KV transfer copies with; NULL: the pool is the host's */
const struct td_device_memory *td_engine_device_memory(const struct td_engine *engine);
struct td_kv_pool *td_engine_kv(struct td_engine *engine);
/* [the engine's thread] of all steps; several ranks: rank 0's, which are everybody's */
void td_engine_expert_counts(const struct td_engine *engine, struct td_expert_counts *ret);
/* what a transfer registers: its first n_blocks x block_bytes */
const struct td_arena *td_engine_kv_arena(const struct td_engine *engine);
/* ranks' parts in a block, in order; 1 = the canonical layout */
int32_t td_engine_kv_parts(const struct td_engine *engine);
/* Blocks that came from a worker of from_parts: into this engine's order, and to all its ranks.
 * Before td_engine_imported. TD_ERR_INVALID: no worker of this model has so many parts;
 * TD_ERR_UNSUPPORTED: the blocks are on a device. */
td_status td_engine_kv_arrange(struct td_engine *engine, const int32_t *block_ids, int32_t n,
                               int32_t from_parts, struct td_err *err);
/* After td_engine_kv_arrange, the same blocks, which hold n_tokens tokens: TD_ERR_CORRUPT when
 * codes came with a scale that is negative or no number. Blocks on a device are not looked at. */
td_status td_engine_kv_check(struct td_engine *engine, const int32_t *block_ids, int32_t n,
                             int32_t n_tokens, struct td_err *err);
uint64_t td_engine_layout_hash(const struct td_engine *engine);
/* longest sequence: context and pool both bound it */
int32_t td_engine_max_len(const struct td_engine *engine);
int32_t td_engine_max_batch(const struct td_engine *engine);
int32_t td_engine_max_step_tokens(const struct td_engine *engine);
int32_t td_engine_seqs_live(struct td_engine *engine); /* any thread */

/* [any thread] A blank sequence, NULL when max_seqs are out. put: it must hold no blocks. */
struct td_seq *td_engine_seq_get(struct td_engine *engine);
void td_engine_seq_put(struct td_engine *engine, struct td_seq *seq);

/* [any thread] Fills a blank sequence; refuses by field, value and limit: empty or too long,
 * token ids out of range, max_tokens, sampling. */
td_status td_engine_seq_set(struct td_engine *engine, struct td_seq *seq, const int32_t *tokens,
                            int32_t n_tokens, int32_t n_prompt, const struct td_sampling *sampling,
                            const int32_t *stop_tokens, int32_t n_stop_tokens, int64_t max_tokens,
                            struct td_err *err);

/* [any thread] After td_engine_seq_set: no stop token comes before so many output tokens. Counted
 * from n_prompt, so that a sequence that goes on elsewhere goes on the same (I1). TD_ERR_INVALID:
 * above max_tokens; or logit_bias and stop tokens together have more than TD_MAX_LOGIT_BIAS. */
td_status td_engine_seq_set_min_tokens(struct td_seq *seq, int64_t min_tokens, struct td_err *err);

/* [any thread] After td_engine_seq_set: sets n_prompt_logprobs, -1..TD_MAX_TOP_LOGPROBS. */
td_status td_engine_seq_set_prompt_logprobs(struct td_seq *seq, int64_t n, struct td_err *err);

/* Gives an IDLE sequence its blocks: prefix hits first, the rest newly allocated. import: KV of
 * tokens past the hit comes from a prefill worker (phase IMPORT), else it is computed here
 * (phase PREFILL). `headroom` blocks must stay available beside it. TD_ERR_AGAIN: not enough
 * blocks now; retry after a release. */
td_status td_engine_admit(struct td_engine *engine, struct td_seq *seq, bool import,
                          int32_t headroom);
/* IMPORT -> DECODE: the KV of all tokens has arrived; appends the prefill worker's first token
 * (sets finish when it is the last). */
void td_engine_imported(struct td_engine *engine, struct td_seq *seq, int32_t first_token);
/* Drops the blocks; phase IDLE. The tokens stay. */
void td_engine_release(struct td_engine *engine, struct td_seq *seq);

struct td_step_item {
    struct td_seq *seq;
    int32_t n_new;         /* in: tokens to compute, 1 for DECODE, a chunk for PREFILL */
    bool sampled;          /* out: a token was appended to seq->tokens */
    td_status status;      /* out: TD_ERR_CORRUPT when the row had no finite logit, or what
                              its guide said: end this request, the others are fine */
    struct td_sampled out; /* out: that token and its logprobs */
    /* out: what the model says of prompt tokens [first_scored, first_scored + n_scored), where
     * seq->n_prompt_logprobs asked for it; until the next step */
    const struct td_scored *scored;
    int32_t n_scored, first_scored;
};

/* Runs one batch: computes n_new tokens of each item and samples where a sequence's last token
 * was computed. Every item must have blocks for its tokens (td_engine_plan sees to it). n_items
 * <= max_batch, sum of n_new <= max_step_tokens. n_new of an item whose prompt is scored becomes
 * what was left of it behind the scored tokens. TD_ERR_DEVICE: the device is lost and so is all
 * KV on it, that of this step and of every other sequence; err has the device's words. Further
 * steps fail alike. */
td_status td_engine_step(struct td_engine *engine, struct td_step_item *items, int32_t n_items,
                         struct td_err *err);

/* Told of finished layers from inside td_engine_step, on its thread: K and V of layers [0,
 * n_layers) are in the blocks for every token that items[] computes in this step (n_computed is
 * what it was before the step). When: model.h, td_forward_layers; never in a step of decodes
 * alone. It changes no item and no sequence; a failed step has told of what came before. Rank 0
 * alone. */
struct td_engine_layers {
    void (*done)(void *ctx, const struct td_step_item *items, int32_t n_items, int32_t n_layers);
    void *ctx;
    int32_t every;
};
/* copied; NULL: nobody is told */
void td_engine_on_layers(struct td_engine *engine, const struct td_engine_layers *layers);

/* Chooses the next batch among running[0..n) (phases PREFILL and DECODE, sorted by priority):
 * every decode first, then prefill chunks in order within the token budget (stall-free
 * batching). Makes room for each decode token; when blocks run out it preempts from the back
 * (largest priority key): those are released, counted and returned in preempted[] for their
 * owner to queue again. */
int32_t td_engine_plan(struct td_engine *engine, struct td_seq **running, int32_t n,
                       struct td_step_item *ret_items, struct td_seq **preempted,
                       int32_t *ret_n_preempted);

/* The scheduler of this engine's sequences: the owning thread queues and runs sequences there
 * (seq->sched). */
struct td_scheduler *td_engine_scheduler(struct td_engine *engine);
/* td_engine_plan among the scheduler's own running list: the preempted wait again. Returns the
 * number of items. */
int32_t td_engine_batch(struct td_engine *engine, struct td_step_item *ret_items,
                        struct td_sched_load *ret_load);

#endif
