/* reshard.h - computes the copies that move one request's KV from the ranks of a source worker to
 * the ranks of a destination worker, when the two split the model differently: unequal tensor and
 * pipeline parallelism, block sizes and physical orders.
 *
 *   td_reshard_ask   --td_reshard_plan-->       td_reshard (model, two sides, token range, checked)
 *   td_reshard       --td_reshard_next_pair-->  pairs (source rank, destination rank)
 *   td_reshard_pair  --td_reshard_iter_init-->  strided copies, runs, or work requests
 *
 * Why arithmetic: engines that find the copies by running the engine code hang, or write plausible
 * bytes to wrong places. Here every byte follows from strides, nothing is stored per run, and a
 * test executes the plan of every pair of degrees and checks every byte. Why it is fast: what
 * depends on the pair alone (which dimensions are adjacent in memory) is found once; per block only
 * its two ids are read.
 *
 * Rank numbering: rank = stage * tp + tp rank. KV heads: with tp <= n_kv_heads each rank has
 * n_kv_heads / tp heads in order. With tp > n_kv_heads heads are replicated, and the head of a rank
 * is tp rank / (tp / n_kv_heads), never a remainder. One of the two must divide the other: no
 * system splits a head.
 *
 * Everything here is pure: no allocation, no I/O, any thread. Plans and iterators are plain values
 * in the caller's memory; the ask's arrays are borrowed for as long as a plan is used. Source: Kwon
 * et al. 2023 for paged blocks. */
#ifndef TD_KV_RESHARD_H
#define TD_KV_RESHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_RESHARD_MAX_DEGREE 16 /* tp and pp, each */
#define TD_RESHARD_MAX_RANKS (TD_RESHARD_MAX_DEGREE * TD_RESHARD_MAX_DEGREE)
#define TD_RESHARD_MAX_TOKENS (1 << 26)
#define TD_RESHARD_SGE_MAX 16
#define TD_RESHARD_ALL (-1)

struct td_reshard_model {
    int32_t n_layers, n_kv_heads, head_dim;
    int32_t element_bytes; /* 1, 2 or 4 */
};

/* The physical order inside a block of a rank, which holds the rank's own layers and heads only.
 * [token][head_dim] is always innermost. */
enum td_reshard_order {
    TD_RESHARD_LAYER_OUTER = 1, /* [layer][K,V][kv head]: the canonical order of
                                   kv_layout.h */
    TD_RESHARD_HEAD_OUTER = 2,  /* [kv head][layer][K,V]: any range of heads is one run */
};

struct td_reshard_rank {
    const int32_t *block_ids; /* the request's blocks in order of tokens; all different */
    int32_t n_ids;
    int32_t pool_blocks; /* every id is below this */
};

struct td_reshard_side {
    int32_t tp, pp;              /* 1..16 each */
    const int32_t *stage_layers; /* [pp + 1]: first layer of each stage, then n_layers.
                                    NULL: even, pp divides n_layers */
    enum td_reshard_order order;
    int32_t block_size; /* tokens */
    /* the first token of block_ids[0]: a multiple of block_size, at most the ask's first_token */
    int32_t first_token;
    const struct td_reshard_rank *ranks; /* [pp * tp]; ranks that the ask does not touch may be
                                            zero */
};

struct td_reshard_ask {
    struct td_reshard_model model;
    struct td_reshard_side src, dst;
    /* the tokens that move: [first_token, end_token); equal: nothing moves */
    int32_t first_token, end_token;
    /* the layers that move, for pushing groups of layers as they are computed; 0, 0: every layer */
    int32_t first_layer, end_layer;
    int32_t only_src, only_dst; /* one rank's part of the plan, or TD_RESHARD_ALL */
    /* For a dst that replicates heads: one rank per head and stage receives, and the others copy
     * from it on their side (pairs with `local` set). Off: every dst rank receives its own copy. */
    bool dedup;
    /* For a src that replicates heads: the tokens of one receiver are cut at block ends and shared
     * out, so that all replicas send equally much. Off: each dst rank has exactly one source per
     * stage and head, and receivers take turns among the replicas. */
    bool split;
};

/* Per side and stage: bytes from one index of a dimension to the next. */
struct td_reshard_strides {
    uint64_t layer, kv, head, block;
};

struct td_reshard_split {             /* how one side splits the heads */
    int32_t heads_per_rank, replicas; /* one of the two is 1, or both */
    int32_t stage_layers[TD_RESHARD_MAX_DEGREE + 1];
    struct td_reshard_strides strides[TD_RESHARD_MAX_DEGREE];
};

struct td_reshard {
    struct td_reshard_ask ask;        /* its pointers are borrowed; end_layer is never 0 */
    struct td_reshard_split split[2]; /* src, dst */
    uint64_t row_bytes;
};

/* Checks everything that the pairs will touch, block ids included. Errors name the field, its value
 * and the limit: TD_ERR_INVALID; TD_ERR_LIMIT (a block of 1 GiB or more); TD_ERR_UNSUPPORTED
 * (neither of tp and n_kv_heads divides the other). *ret_plan is untouched on failure. */
td_status td_reshard_plan(const struct td_reshard_ask *ask, struct td_reshard *ret_plan,
                          struct td_err *err);

/* What one rank gives another: a box of layers, heads and tokens, never empty. The boxes of one dst
 * rank do not overlap. */
struct td_reshard_pair {
    int32_t src, dst; /* rank numbers; with `local` both are ranks of the destination */
    bool local;
    int32_t first_layer, end_layer, first_head, end_head, first_token, end_token;
};

struct td_reshard_cursor { /* zero it, then call td_reshard_next_pair until that returns false */
    int32_t dst, src_stage, src_tp;
    bool in_local;
};

/* Yields the pairs over the network, ordered by dst rank, then the local copies, each of which
 * needs the network pairs of its source to be complete. */
bool td_reshard_next_pair(const struct td_reshard *plan, struct td_reshard_cursor *cursor,
                          struct td_reshard_pair *ret_pair);

uint64_t td_reshard_pair_bytes(const struct td_reshard *plan, const struct td_reshard_pair *pair);
/* The size of a rank's pool in bytes; all offsets end below it. side 0: src, 1: dst. */
uint64_t td_reshard_pool_bytes(const struct td_reshard *plan, int side, int32_t rank);
uint64_t td_reshard_block_bytes(const struct td_reshard *plan, int side, int32_t rank);

/* Which side posts the work requests: that decides which side must be contiguous in one of them,
 * and so the order of the runs. */
enum td_reshard_dir {
    /* src writes (RDMA WRITE): remote is dst, local pieces are gathered from src */
    TD_RESHARD_PUSH = 0,
    /* dst reads (RDMA READ): remote is src, local pieces are scattered into dst */
    TD_RESHARD_PULL = 1,
};

/* `count` runs, each `stride` bytes after the one before. */
struct td_reshard_dim {
    uint32_t count;
    uint64_t src_stride, dst_stride;
};

/* Runs of run_bytes over up to four dimensions (blocks, layers, K and V, heads, in some order),
 * outermost first. Offsets are into the ranks' pools. */
struct td_reshard_strided {
    uint64_t src_offset, dst_offset, run_bytes;
    uint32_t n_dims;
    struct td_reshard_dim dims[4];
};

struct td_reshard_run {
    uint64_t src_offset, dst_offset, bytes;
};

struct td_reshard_wr {
    uint64_t remote_offset, bytes;
    uint32_t n_sge;
    struct {
        uint64_t offset, bytes;
    } sge[TD_RESHARD_SGE_MAX]; /* local pieces, in order */
};

/* segments that are walked together; no work request takes more pieces */
#define TD_RESHARD_GROUP 16

struct td_reshard_at { /* a token, and its place on both sides */
    int32_t token, block[2], place[2];
};

struct td_reshard_iter {
    /* the pair, resolved: index 0 is src, 1 is dst */
    const int32_t *ids[2];
    int32_t block_size[2], end_token;
    uint64_t block_bytes[2], base[2]; /* base: offset of the box inside a block */
    uint64_t row_bytes, max_bytes;
    int dir; /* the side that orders the runs */
    /* the dimensions that remain when a segment is part of a block on some side, and when it is
     * whole on both */
    uint32_t n_part, n_full;
    struct td_reshard_dim part[3], full[3];
    uint64_t full_bytes; /* the run of a whole segment */
    bool joins; /* whole blocks are one run on both sides, so consecutive ids make longer runs */
    /* the present position */
    struct td_reshard_at next;
    bool ahead; /* `peeked` holds a run that was taken and not yet returned */
    struct td_reshard_run peeked;
    /* the segments of the group, at index 0 of every dimension */
    struct td_reshard_run segments[TD_RESHARD_GROUP];
    uint32_t n_segments, segment, n_dims, index[4];
    struct td_reshard_dim dims[4];
    uint64_t dim_offset[2], done; /* done: bytes of the current run that were returned */
};

/* max_bytes bounds a run and a work request (0: no bound). Of the plan the iterator keeps only the
 * ask's arrays of block ids. */
void td_reshard_iter_init(struct td_reshard_iter *it, const struct td_reshard *plan,
                          const struct td_reshard_pair *pair, enum td_reshard_dir dir,
                          uint64_t max_bytes);
/* An iterator serves one of these three functions; each visits every byte of the pair once. Bytes
 * that are contiguous on both sides come as one run, across blocks when ids are consecutive on
 * both; max_bytes then cuts runs (but not strided ones). */
bool td_reshard_next_strided(struct td_reshard_iter *it, struct td_reshard_strided *ret_strided);
bool td_reshard_next(struct td_reshard_iter *it, struct td_reshard_run *ret_run);
/* Joins up to max_sge (1..TD_RESHARD_SGE_MAX) runs that follow each other on the remote side. */
bool td_reshard_next_wr(struct td_reshard_iter *it, uint32_t max_sge, struct td_reshard_wr *ret_wr);

struct td_reshard_totals {
    uint64_t n_pairs, bytes;
    uint64_t n_strided;
    uint64_t n_runs;   /* contiguous on both sides */
    uint64_t n_capped; /* runs contiguous on both sides, cut at max_bytes */
    /* runs contiguous on one side alone: what gathering (dst) or scattering (src) can reach. A run
     * that a partial block at an end would lengthen across blocks counts as two */
    uint64_t n_side_runs[2];
};

/* Adds the pair to *totals. */
void td_reshard_count(const struct td_reshard *plan, const struct td_reshard_pair *pair,
                      uint64_t max_bytes, struct td_reshard_totals *totals);
/* Totals of the whole plan, of network pairs and of local copies; either pointer may be NULL. */
void td_reshard_total(const struct td_reshard *plan, uint64_t max_bytes,
                      struct td_reshard_totals *ret_network, struct td_reshard_totals *ret_local);
/* bytes; 0 when nothing moves */
uint64_t td_reshard_average_run(const struct td_reshard_totals *totals);

#define TD_RESHARD_DIRECT_RUN_BYTES (32u << 10)
#define TD_RESHARD_DIRECT_RUNS 256

enum td_reshard_how {
    TD_RESHARD_DIRECT = 1, /* one work request per run: runs of 32 KiB on average, or
                              at most 256 of them */
    TD_RESHARD_GATHER,     /* work requests of several local pieces reach 32 KiB on
                              average, within max_sge */
    /* runs are short on both sides: gather into a staging buffer, write once, scatter */
    TD_RESHARD_STAGED,
};

enum td_reshard_how td_reshard_choose(const struct td_reshard_totals *totals,
                                      enum td_reshard_dir dir, uint32_t max_sge);

#endif
