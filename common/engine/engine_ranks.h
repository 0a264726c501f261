/* engine_ranks.h - what the ranks of one engine share beside the model: the memory of their KV, and
 * the description of each step. engine.c, engine_ranks.c and rank_hosts.c include it.
 *
 * KV of several ranks. One arena of rank 0, which the others map. A block id names the same block
 * on all ranks; a rank's part of a block is in the canonical layout with the rank's heads only, and
 * the parts lie side by side in order of ranks:
 *
 *     [copy][block][part][layer][K,V][kv head of the part][token][head_dim]
 *     n_parts = min(ranks, KV heads), copies = ranks / n_parts
 *
 * So a block has the same bytes whatever the number of ranks, a rank's cache is an ordinary paged
 * cache with a larger stride between blocks, and a transfer moves whole blocks from copy 0 to copy
 * 0 whatever the degrees of its two sides: only the order inside the block differs, and the
 * receiver sets it right (td_rank_kv_import, by the copies that common/kv/reshard.h plans). Where
 * KV heads are fewer than ranks, the ranks of a head each write a copy of their own, so that none
 * waits for another; an import fills copies 1.. from copy 0.
 *
 * Ranks with a device each. Then a rank's part of every block lies on its device, blocks
 * part.block_bytes apart, and rank 0 opens the others' memory. What is laid out as above are
 * addresses without memory, which a table of rank 0 knows how to copy to and from (split_memory.h);
 * an import is copies on the device.
 *
 * Ranks on several hosts (rank_hosts.c). Nobody maps anybody's memory: rank 0 has a pool of whole
 * blocks, of copy 0 alone, and every other rank a pool of its own parts, part.block_bytes apart. A
 * rank reads and writes its own part in its own pool. Rank 0's pool is whole where a transfer reads
 * it or has written it. After a step of a worker that hands KV over, the others' parts of the
 * blocks that it wrote are collected; the parts of imported blocks are dealt to the others.
 *
 * Steps. Rank 0 tells tokens, positions and block tables of each batch before its forward; the
 * others (td_rank_follow) do as told until told to end. */
#ifndef TD_ENGINE_ENGINE_RANKS_H
#define TD_ENGINE_ENGINE_RANKS_H

#include "common/model/comm.h"
#include "common/base/device_memory.h"
#include "common/base/mem.h"
#include "common/base/thread_pool.h"
#include "common/kv/kv_layout.h"
#include "common/model/model.h"
#include "common/engine/split_memory.h"

struct td_rank_copy { /* inside a block */
    size_t from, to, bytes;
};

struct td_rank_kv {
    struct td_kv_layout whole, part; /* of all heads (n_parts of the others); of one rank's */
    int32_t n_ranks, n_parts, n_copies, n_blocks;
    bool apart;                     /* ranks on several hosts (rank_hosts.c) */
    uint8_t *base;                  /* copy 0, block 0; with a device no address of this
                                       process's CPU */
    size_t copy_bytes;              /* from a copy to the next */
    uint8_t *mine;                  /* this rank's part of block 0 */
    size_t stride;                  /* bytes from one of its blocks to the next */
    struct td_rank_copy *copies[5]; /* from 1, 2, 4, 8, 16 parts to n_parts; NULL: cannot be, or
                                       nothing to do */
    int32_t n_of_copies[5];
    /* apart: parts on their way, [rank 0: n_ranks; others: 1][n_staged][part.block_bytes] */
    uint8_t *staging;
    int32_t n_staged;
    uint8_t *scratch; /* [n_scratch][whole.block_bytes]; where base is */
    int32_t n_scratch;
    /* devices, rank 0 */
    const struct td_device_memory *memory; /* what reaches base; NULL: the host's */
    struct td_split_memory *split;         /* memory is its table */
    const struct td_device_memory *device;
    void *opened[TD_COMM_MAX_RANKS]; /* the others' memory */
    struct td_device_run *runs;      /* [max_runs], of an import */
    size_t max_runs;
};

/* Layouts and plans; memory (base, n_blocks, copy_bytes) is set by the caller, or by one of
 * those below. n_threads: how many will import at once. */
td_status td_rank_kv_init(struct td_rank_kv *kv, const struct td_model *model, int32_t block_size,
                          int32_t n_threads, struct td_err *err);
/* init's part that needs no model: `part` is one rank's layout, of a model of n_kv_heads. */
td_status td_rank_kv_plan(struct td_rank_kv *kv, const struct td_kv_layout *part,
                          int32_t n_kv_heads, int32_t n_ranks, int32_t n_threads,
                          struct td_err *err);
/* base: the memory of all */
void td_rank_kv_on_host(struct td_rank_kv *kv, int32_t rank, uint8_t *base, int32_t n_blocks);
/* With a device: collective, each rank with its own memory, n_blocks parts and tail_bytes behind
 * them (comm NULL: one rank). Rank 0 gets base; memory and scratch are for imports, scratch of
 * TD_RANK_SCRATCH_BLOCKS whole blocks on its device. TD_ERR_UNSUPPORTED: rank 0's device does
 * not reach another's memory. */
td_status td_rank_kv_on_devices(struct td_rank_kv *kv, struct td_comm *comm,
                                const struct td_device_memory *device, void *mine, int32_t n_blocks,
                                size_t tail_bytes, void *scratch, struct td_err *err);
/* on_devices' part that rank 0 does alone: rank_base[r] is rank r's part of block 0 as rank 0's
 * device reaches it, handles[r] (NULL: none) is for other processes. device NULL: it has no
 * copies. */
td_status td_rank_kv_over_devices(struct td_rank_kv *kv, const struct td_device_memory *device,
                                  void *const *rank_base, const struct td_split_handle *handles,
                                  int32_t n_blocks, size_t tail_bytes, void *scratch,
                                  struct td_err *err);
void td_rank_kv_free(struct td_rank_kv *kv); /* zeroed is fine; not the memory. Rank 0 before the
                                                others give theirs back */
/* Rank 0's pool: every copy; ranks apart: one. */
size_t td_rank_kv_bytes(const struct td_rank_kv *kv, int32_t n_blocks);
#define TD_RANK_SCRATCH_BLOCKS 8
/* Blocks whose copy 0 came from a worker of `from_parts`: brings the parts into this one's order
 * and fills the other copies. TD_ERR_INVALID: no such worker can hold this model. */
td_status td_rank_kv_import(const struct td_rank_kv *kv, const int32_t *block_ids, int32_t n,
                            int32_t from_parts, struct td_thread_pool *threads, struct td_err *err);

/* Blocks of coded KV that another worker sent, after their import: TD_ERR_CORRUPT when a scale of
 * one of the n_tokens tokens is negative or no number, which a digest of the sender cannot tell.
 * Other types, and blocks on a device, are not looked at. */
td_status td_rank_kv_check(const struct td_rank_kv *kv, const int32_t *block_ids, int32_t n,
                           int32_t n_tokens, struct td_thread_pool *threads, struct td_err *err);

/* Rank 0: room for the largest step. */
size_t td_rank_step_bytes(int32_t max_rows, int32_t max_seqs, int32_t max_blocks_per_seq);
/* n_blocks[s]: blocks of sequence s that the step reads or writes. Packs into `room` and tells
 * the others. collects: td_rank_collect follows, for these rows. */
td_status td_rank_step_tell(struct td_comm *comm, const struct td_forward_args *a,
                            const int32_t *n_blocks, int32_t n_seqs, bool collects, int32_t *room);
void td_rank_end_tell(struct td_comm *comm, int32_t *room);

/* Rank 0's pool and sizes, to all. The others get rank 0's arena mapped (*ret_arena). */
struct td_rank_boot {
    int32_t n_blocks, max_rows, max_seqs, max_blocks_per_seq;
    uint64_t arena_bytes; /* 0: each rank has its own */
};
td_status td_rank_boot_tell(struct td_comm *comm, struct td_rank_boot *boot,
                            const struct td_arena *arena, struct td_arena *ret_arena,
                            struct td_err *err);

/* The others' life: one forward for each step told. TD_OK: told to end. */
td_status td_rank_follow(struct td_comm *comm, struct td_model *model, struct td_workspace *ws,
                         const struct td_rank_kv *kv, const struct td_rank_boot *boot,
                         struct td_err *err);
/* ---- ranks on several hosts (rank_hosts.c) --------------------------------------------------- */

/* What must be equal on all ranks for their parts to be those of one model. On one host it is: they
 * are copies of one process. */
struct td_rank_terms {
    char dtype[24], kv_dtype[16], numerics[24];
    int32_t block_size, max_seqs, max_batch, max_step_tokens, max_model_len, ep;
    uint64_t model; /* td_rank_model_sample */
};
/* A hash of names, sizes and some of the bytes of the files of a model: config.json and safetensors
 * of a directory, or the one file. Fine-tunings of one model differ in it. TD_ERR_IO. */
td_status td_rank_model_sample(const char *path, uint64_t *ret_sample, struct td_err *err);
/* Collective: TD_ERR_INVALID on all ranks when one's terms are not rank 0's, by name. */
td_status td_rank_terms_agree(struct td_comm *comm, const struct td_rank_terms *mine,
                              struct td_err *err);

/* base: of rank 0 all of td_rank_kv_bytes, of the others n_blocks of part.block_bytes. */
td_status td_rank_kv_apart(struct td_rank_kv *kv, int32_t rank, uint8_t *base, int32_t n_blocks,
                           struct td_err *err);
/* Collective. The parts of blocks that the rows of a step (a) wrote, to rank 0's pool. */
td_status td_rank_collect(struct td_comm *comm, const struct td_rank_kv *kv,
                          const struct td_forward_args *a);
/* Collective. The parts of whole blocks of rank 0's pool, to the others. */
td_status td_rank_deal(struct td_comm *comm, const struct td_rank_kv *kv, const int32_t *block_ids,
                       int32_t n);
/* Rank 0: tells the others to take their parts of these blocks, and deals them. room: as a
 * step's. */
td_status td_rank_deal_tell(struct td_comm *comm, const struct td_rank_kv *kv,
                            const int32_t *block_ids, int32_t n, int32_t *room);

/* Devices: the number of blocks that every rank has room for. Collective. */
td_status td_rank_agree(struct td_comm *comm, int32_t n_blocks, int32_t *ret_n_blocks,
                        struct td_err *err);

#endif
