/* scheduler.h - one worker's queue, batches and KV blocks, by counts: what the daemons run and what
 * the simulator runs.
 *
 * The engine (engine.c) embeds one beside its model and its pool of KV blocks; each worker of the
 * simulator (sim/cluster.c) has one beside a pool of counts. Both call the functions below, so a
 * policy that is measured in the simulator is the policy that serves. The rules themselves are in
 * schedule.h.
 *
 * Nothing here reads a clock, sends a message or computes a token: the caller says what time it is,
 * what a step has computed and where the blocks are.
 *
 * Phases of a sequence, and the function that changes each. IDLE is on the waiting list or on none,
 * IMPORT on none, PREFILL and DECODE on the running list:
 *
 *     IDLE --admit----------> PREFILL --computed, sampled--> DECODE --release--> IDLE
 *     IDLE --admit(import)--> IMPORT  --imported-----------> DECODE
 *     PREFILL, DECODE --batch, when blocks run out--> IDLE (its blocks are gone, its tokens stay)
 *
 * Invariants:
 *  (1) n_computed <= n_tokens, and n_blocks blocks hold at least n_computed tokens. In PREFILL they
 *      hold n_tokens, in DECODE n_tokens after the batch was made.
 *  (2) Prefix hits end before the last token: one token at least is left to compute, or there would
 *      be no logits.
 *  (3) A sequence is on at most one of the two lists.
 *
 * Threads: one owning thread. Memory: arrays made by init; nothing is allocated later. */
#ifndef TD_ENGINE_SCHEDULER_H
#define TD_ENGINE_SCHEDULER_H

#include "common/engine/schedule.h"

enum td_seq_phase { TD_SEQ_IDLE, TD_SEQ_IMPORT, TD_SEQ_PREFILL, TD_SEQ_DECODE };
enum td_sched_list { TD_SCHED_NO_LIST, TD_SCHED_WAITING, TD_SCHED_RUNNING };

/* What the scheduler knows of a sequence. The owner embeds it (struct td_seq, the simulator's
 * leg), sets the first five fields before the sequence first waits, and reads the rest. Zero is
 * a sequence without tokens on no list. */
struct td_sched_seq {
    uint64_t priority; /* ordering key: the smaller one goes first */
    uint64_t order;    /* among equal keys: the older request, which has the smaller number, goes
                          first */
    int32_t n_tokens;  /* known so far: prompt, then output */
    uint64_t work_ns;  /* that computing its prompt is predicted to take; 0 = unknown */
    uint64_t finish_by_ns; /* when its prompt should be computed; 0 = however late. Only
                              td_scheduler_late reads these two */

    enum td_seq_phase phase;
    enum td_sched_list list;
    int32_t n_computed;  /* leading tokens whose KV is in its blocks */
    int32_t n_cached;    /* of those, found in the prefix cache at the last admission */
    int32_t n_published; /* leading blocks offered to the prefix cache */
    int32_t n_blocks;
    uint32_t n_preemptions;
    struct td_sched_seq *prev, *next; /* in the waiting list */
};

/* The owner's KV blocks. ctx is td_scheduler_config's. A sequence's blocks are a list of which
 * the owner keeps the names (ids, or hashes) and the scheduler keeps the length, n_blocks. */
struct td_sched_blocks {
    void (*room)(void *ctx, struct td_schedule_room *ret_room);
    /* Takes a reference on each of the longest run of leading full blocks that the prefix cache
     * holds, at most max_blocks; they become the first of seq's list. Returns how many. */
    int32_t (*lookup)(void *ctx, struct td_sched_seq *seq, int32_t max_blocks);
    /* Puts n blocks behind the n_blocks of seq's list, evicting cached ones. All or nothing:
     * false when there are not so many. */
    bool (*alloc)(void *ctx, struct td_sched_seq *seq, int32_t n);
    /* Blocks [seq->n_published, n_full) are full and final: the prefix cache may have them. */
    void (*publish)(void *ctx, struct td_sched_seq *seq, int32_t n_full);
    /* Drops the references on all n_blocks; the first n_published of them may stay cached. */
    void (*release)(void *ctx, struct td_sched_seq *seq);
};

struct td_scheduler_config {
    const struct td_sched_blocks *blocks;
    void *ctx;
    int32_t block_size;      /* tokens in a KV block */
    int32_t max_seqs;        /* that run at once */
    int32_t max_batch;       /* sequences in one step */
    int32_t max_step_tokens; /* rows of one step */
};

/* Its fields are the owner's to read. */
struct td_scheduler {
    struct td_scheduler_config cfg;
    /* The sequences that run here grow (a decode worker): an admission leaves a free block for
     * each of them. */
    bool grows;
    struct td_sched_seq *waiting_head, *waiting_tail;
    struct td_sched_seq **running; /* [max_seqs], in order */
    int32_t n_waiting, n_running;
    uint64_t n_preemptions; /* of td_scheduler_batch */
    struct {                /* the head of the queue that found no room */
        const struct td_sched_seq *seq;
        int32_t room; /* blocks that there were */
        uint64_t again_ns;
    } refused;
    int32_t *remaining, *n_new; /* [max_seqs] each: scratch of one batch */
    bool *is_decode;
};

/* Zeroed by the caller. TD_ERR_NOMEM. */
td_status td_scheduler_init(struct td_scheduler *s, const struct td_scheduler_config *config,
                            struct td_err *err);
void td_scheduler_free(struct td_scheduler *s); /* zeroed is fine */

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Gives an IDLE sequence blocks for the tokens it has: prefix hits first, then new ones. import:
 * the KV behind the hits comes from another worker (phase IMPORT); else it is computed here
 * (phase PREFILL). `headroom` blocks stay available beside it. TD_ERR_AGAIN: not now, ask again
 * after a release. TD_ERR_LIMIT: never, the pool is too small. */
td_status td_scheduler_admit(struct td_scheduler *s, struct td_sched_seq *seq, bool import,
                             int32_t headroom);
/* IMPORT -> DECODE: the KV of all tokens has arrived, and with it the first token, which the
 * caller appends. */
void td_scheduler_imported(struct td_scheduler *s, struct td_sched_seq *seq);
/* Drops the blocks; phase IDLE. n_tokens stays. */
void td_scheduler_release(struct td_scheduler *s, struct td_sched_seq *seq);

/* Blocks that an admission leaves free beside it. */
int32_t td_scheduler_headroom(const struct td_scheduler *s);

/* ---- the two lists --------------------------------------------------------------------------- */

/* no list -> waiting, in order */
void td_scheduler_wait(struct td_scheduler *s, struct td_sched_seq *seq);
/* no list -> running, in order */
void td_scheduler_run(struct td_scheduler *s, struct td_sched_seq *seq);
void td_scheduler_detach(struct td_scheduler *s, struct td_sched_seq *seq); /* any list -> none */

/* The owner's part of an admission: td_scheduler_admit with td_scheduler_headroom, then whatever
 * else the sequence needs (a transfer, a message), then td_scheduler_run unless its KV is still
 * to come. seq is on no list. TD_ERR_AGAIN: it holds nothing and goes on waiting. Anything else:
 * it was moved on, or ended. */
typedef td_status (*td_scheduler_admit_fn)(void *ctx, struct td_sched_seq *seq);
/* Admits from the head of the waiting list, while there is room for it. A head that found no
 * room is asked again when there is more, or after TD_SCHEDULER_AGAIN_MS: asking walks its whole
 * prompt through the prefix cache, and this runs between decode steps, but somebody may have
 * published a prefix of it meanwhile. */
void td_scheduler_admit_waiting(struct td_scheduler *s, uint64_t now_ns,
                                td_scheduler_admit_fn admit, void *ctx);
#define TD_SCHEDULER_AGAIN_MS 50

/* The first of the running ones, in their order, whose prompt is not begun and will not be computed
 * by its finish_by_ns behind those before it; NULL = none. Computing it would make those behind it
 * late, too: the caller ends it, and asks again. */
struct td_sched_seq *td_scheduler_late(const struct td_scheduler *s, uint64_t now_ns);

/* Prompt tokens that are still to be computed here: of those that wait and of those that run. */
uint64_t td_scheduler_queued_tokens(const struct td_scheduler *s);

/* ---- batches --------------------------------------------------------------------------------- */

struct td_sched_item {
    struct td_sched_seq *seq;
    int32_t n_new; /* tokens to compute: 1 for DECODE, a chunk for PREFILL */
};

/* Chooses the next batch among running[0..n), which is in order (phases PREFILL and DECODE),
 * into ret_items[max_batch]. Gives each decode its block first; when blocks run out it preempts
 * from the back. Returns the number of items. *ret_n_left of the running ones stay;
 * running[*ret_n_left..n) were preempted and hold nothing, the last one first. */
int32_t td_scheduler_plan(struct td_scheduler *s, struct td_sched_seq *const *running, int32_t n,
                          struct td_sched_item *ret_items, int32_t *ret_n_left);

/* What a batch costs, as the router's latency model counts it. */
struct td_sched_load {
    uint64_t prefill_rows, decode_rows;
    uint64_t attention_work_x2; /* prefill: sum of u * (2h + u), u new tokens behind h computed
                                   ones; twice the pairs */
    uint64_t context_tokens;    /* decode: sum of the sequences' tokens */
};
/* td_scheduler_plan among its own running list; the preempted wait again. */
int32_t td_scheduler_batch(struct td_scheduler *s, struct td_sched_item *ret_items,
                           struct td_sched_load *ret_load);

/* A step has computed n_new tokens of seq; blocks that became full are published. True: all its
 * tokens are computed, so the step has logits to sample its next token from. */
bool td_scheduler_computed(struct td_scheduler *s, struct td_sched_seq *seq, int32_t n_new);
/* That token was appended: n_tokens counts it, and the next step of seq is a decode. */
void td_scheduler_sampled(struct td_sched_seq *seq);

#endif
