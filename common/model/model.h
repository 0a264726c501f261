/* model.h - a model: weights in memory, and the forward pass over a paged KV cache.
 *
 * td_model_open maps the safetensors, packs every matrix into the physical order of its kernels (on
 * all threads, with progress), and keeps norms, biases and rotary tables in f32. td_model_forward
 * runs one ragged batch: any mix of prefill chunks and decode steps. The result of each row depends
 * only on that row's tokens and KV (I1). */
#ifndef TD_MODEL_H
#define TD_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/base/thread_pool.h"
#include "common/kv/kv_layout.h"
#include "common/model/config.h"

struct td_comm;
struct td_ops;
struct td_device;
struct td_model;
struct td_workspace;

struct td_model_params {
    const char *dir; /* a Hugging Face directory, or NULL with random_config */
    /* path of a config.json: weights come from a generator with a fixed seed instead of files */
    const char *random_config;
    int32_t random_layers; /* with random_config: the first so many of its layers; 0: all */
    const char *dtype;              /* "auto" (the checkpoint's; F16 -> f32), "f32", "bf16":
                                       compute type; or a mix of mix.h ("q8_0"): weights
                                       rounded to it, the rest bf16, as a GGUF file of it */
    const char *kv_dtype;           /* of the KV cache: NULL or "auto" (the compute type), "f32",
                                       "bf16", "int8", "fp8" */
    const struct td_ops *ops;       /* NULL = td_ops_best() */
    struct td_thread_pool *threads; /* borrowed; used for loading and every forward */
    /* borrowed; NULL = one rank. Otherwise this process computes the part of its rank, and open and
     * forward are collective */
    struct td_comm *comm;
    /* into how many parts, of whole experts each, the ranks divide those of a mixture; the ranks of
     * a part share each of its experts. Divides the number of ranks; 0: as many. Changes no bit */
    int32_t expert_ranks;
    /* When the experts of a mixture are packed: NULL or "load" (all, with the other weights),
     * "lazy" (each when a row first chooses it), or a size, "20GiB" (lazily, and those chosen
     * longest ago give way so that they take no more; of all ranks of this host together). Changes
     * no bit. The files stay mapped and must not change. No effect on other models */
    const char *experts;
    int32_t max_model_len; /* 0 = the config's max_positions; larger than that is
                                       refused */
    bool quiet;            /* no progress lines */
    bool no_graphs; /* device tables: record no CUDA graphs, issue the entries of every step */
    /* Only looks: config and tensors are checked as always, and memory is counted, but no weight is
     * read and no memory is taken for one. The model may then be described, and not be computed
     * with; its hash is 0. Needs no threads; one rank. */
    bool only_look;
};

/* The kernels of that name (td_ops_names) for params.ops; NULL when the name is unknown or this CPU
 * lacks them. */
const struct td_ops *td_model_ops_by_name(const char *name);

td_status td_model_open(const struct td_model_params *params, struct td_model **ret_model,
                        struct td_err *err);
void td_model_close(struct td_model *model);

const struct td_model_config *td_model_config(const struct td_model *model);
enum td_dtype td_model_dtype(const struct td_model *model);
enum td_dtype td_model_kv_dtype(const struct td_model *model);
const struct td_device *td_model_device(const struct td_model *model); /* NULL: the host's memory */
int32_t td_model_max_len(const struct td_model *model);
/* hash of config, dtype, instruction set and a digest of the weights; part of the KV layout hash */
uint64_t td_model_hash(const struct td_model *model);
/* bytes of weights that a decode step of one row reads (of this rank) */
uint64_t td_model_weight_bytes(const struct td_model *model);
/* bytes of all experts of all layers, as the above counts those of one row (of this rank) */
uint64_t td_model_expert_weight_bytes(const struct td_model *model);
/* bytes that weights and rotary tables take in memory (of this rank) */
uint64_t td_model_memory_bytes(const struct td_model *model);
/* Memory of the experts of a mixture (of this rank); zeros where the model has none. The thread
 * that calls forward. */
struct td_expert_memory {
    uint64_t n, n_packed;         /* experts of all layers; of them those that are packed */
    uint64_t bytes, packed_bytes; /* that experts take at most; that the packed ones take */
    uint64_t packings; /* lazily, since the model was loaded; more than n_packed: some gave way */
};
void td_model_expert_memory(const struct td_model *model, struct td_expert_memory *ret);
int32_t td_model_n_ranks(const struct td_model *model);
/* The name of its kernel table and, if that was chosen by measuring, the figures: for people. */
const char *td_model_kernels(const struct td_model *model);

/* Checks whether a model can be split over n_ranks ranks: 1, 2, 4, 8 or 16. Each has n_heads /
 * n_ranks heads, n_kv_heads / n_ranks KV heads (or, when there are fewer KV heads than ranks, one
 * that it shares), and intermediate / n_ranks of the MLP. TD_ERR_UNSUPPORTED names field, value and
 * limit. */
td_status td_model_check_ranks(const struct td_model_config *config, int32_t n_ranks,
                               struct td_err *err);

/* The layout of this rank's part of the KV, for a block size in tokens (8..256, power of two). */
td_status td_model_kv_layout(const struct td_model *model, int32_t block_size,
                             struct td_kv_layout *ret_layout, struct td_err *err);

/* Makes the scratch memory for batches of up to max_rows tokens, of which up to max_logit_rows need
 * logits. One per thread that calls forward. */
td_status td_workspace_create(const struct td_model *model, int32_t max_rows,
                              int32_t max_logit_rows, struct td_workspace **ret_ws,
                              struct td_err *err);
void td_workspace_destroy(struct td_workspace *ws);

/* How the mixtures of a workspace have spread rows over experts, since it was made; zeros where the
 * model has none. All ranks count alike: one rank's numbers are the model's. A group is what the
 * products of experts share: the rows of one layer of a forward, or up to 1,024 of them. */
struct td_expert_counts {
    uint64_t rows;         /* given to experts: a row counts once in each layer for each that it
                              chose */
    uint64_t busiest_rows; /* of each group those of its busiest expert, summed */
    uint64_t busiest_part_rows; /* the same of the experts of a part (expert_ranks) */
    uint64_t active; /* of each group the experts that had rows, summed: whose weights it read */
    /* of the layer where it is the largest: rows of the expert that has had most over the mean of
     * the layer's; 0: no rows yet */
    double busiest_share;
};
/* The thread that calls forward. */
void td_workspace_expert_counts(const struct td_workspace *ws, struct td_expert_counts *ret);

/* Device tables: the number of rows that a step of n_rows decode rows is padded to, so that few
 * CUDA graphs serve all sizes; at most what the workspace holds. */
int32_t td_workspace_padded_rows(const struct td_workspace *ws, int32_t n_rows);

/* More entries at the end of a device's step, after the logits: the sampler's. */
struct td_forward_tail {
    /* Issues puts, entries and gets only. It is not called when a graph of the step's shape is
     * launched instead: what varies is put from the same pinned memory, which the caller has filled
     * before the forward. n_rows: rows of logits, padding included. logits: [n_rows, vocab] f32,
     * the device's. */
    void (*issue)(void *ctx, const float *logits, int32_t n_rows);
    void *ctx;
    uint64_t shape; /* identifies what issue does, apart from n_rows */
};

/* Called for finished layers while a forward runs, so that computed KV can be sent while the rest
 * is computed. */
struct td_forward_layers {
    /* K and V of all rows are in the cache for layers [0, n_layers), on every rank. Called in
     * order, once for each multiple of `every` and once for the last layer, by the thread that
     * called forward. On the host the other threads of its pool wait meanwhile, so it may only take
     * a note or wake another thread. Not called again after a failure. */
    void (*done)(void *ctx, int32_t n_layers);
    void *ctx;
    int32_t every; /* >= 1; device tables: at most TD_FORWARD_MARKS_MAX calls may result */
};
#define TD_FORWARD_MARKS_MAX 64

/* Looks at what the norms of a layer give to its matrices: to calibrate a rounding. */
struct td_forward_inputs {
    /* input: 2 * layer before q, k and v, 2 * layer + 1 before gate and up. x: [n_rows, dim], valid
     * during the call. Called by the thread that called forward, in order. */
    void (*observe)(void *ctx, int32_t input, const float *x, int32_t n_rows, int32_t dim);
    void *ctx;
};

struct td_forward_args {
    const int32_t *tokens;              /* [n_rows], each in [0, vocab), checked by the caller */
    const int32_t *positions;           /* [n_rows], each < max_len; consecutive rows of one
                                           sequence have consecutive positions */
    const int32_t *row_seq;             /* [n_rows] index into block_tables, non-decreasing */
    const int32_t *const *block_tables; /* [n_seqs] */
    int32_t n_rows;
    /* block 0 of the pool, in the canonical layout of `kv`; device memory with a device table */
    uint8_t *kv_base;
    const struct td_kv_layout *kv;
    /* bytes from one block to the next, where ranks' parts of a block lie side by side; 0 =
     * kv->block_bytes */
    size_t kv_stride;
    const int32_t *logit_rows; /* [n_logit_rows] ascending row indices whose logits are
                                  wanted */
    int32_t n_logit_rows;
    /* device tables: NULL = the logits are copied to the host; otherwise *ret_logits is NULL */
    const struct td_forward_tail *tail;
    /* NULL: no calls. Rank 0 only. Device tables: ignored in decode steps, which are graphs;
     * everything is there at their end */
    const struct td_forward_layers *layers;
    const struct td_forward_inputs *inputs; /* NULL: no calls. Not for device tables */
    struct td_err *err; /* may be NULL; filled when the device fails */
};

/* Computes K and V of every row into the cache, and logits of the chosen rows; blocks until done.
 * *ret_logits is [n_logit_rows, vocab] f32 in the workspace (host memory), valid until the
 * workspace is used again. One forward at a time per workspace and per thread pool. Never
 * allocates. Device tables: all arguments but kv_base are host memory. A batch in which every row
 * is the one wanted row of a sequence (a decode step) is padded and, from its shape's second
 * occurrence on, launched as a CUDA graph. Several ranks: all call with the same arguments except
 * kv_base. The logits are rank 0's; those of other ranks are parts and of no use. When rank 0
 * returns, the KV of all ranks is there. Errors: TD_ERR_INVALID: a count exceeds the workspace.
 * TD_ERR_PEER: another rank is lost, and with it the group. TD_ERR_DEVICE: the device is lost, and
 * with it the contents of its memory. */
td_status td_model_forward(struct td_model *model, struct td_workspace *ws,
                           const struct td_forward_args *args, float **ret_logits);

#endif
