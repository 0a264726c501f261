/* weights.c - loads a checkpoint (or generates weights) into packed matrices.
 *
 *   1. plan   walks the tables of the model's family (family.h) once and lists every destination
 *             with its sources, by the names that Hugging Face uses. Fused matrices have several
 *             sources, stacked by rows. Each source must exist with exactly the expected shape;
 *             each tensor of the checkpoint must be a source, or on the short list of those that
 *             hold no information.
 *   2. place  one arena for everything, with sizes from td_ops.packed_bytes.
 *   3. fill   matrices are cut into chunks of whole 64-row panels. All threads take chunks from one
 *             counter; member 0 draws progress. A chunk that lies in one aligned tensor is packed
 *             straight from the mapped file, others go through a staging buffer. Vectors are few
 *             and small: one thread widens each to f32. On a device the arena is the device's: a
 *             chunk is packed into a pinned buffer of its thread and uploaded, one at a time.
 *
 * Ranks (tensor parallelism, after Shoeybi et al. 2019): a rank loads its heads of q, k and v, its
 * part of gate, up and the vocabulary (cut_rows), and the columns of o and down that meet them
 * (cut_cols); embedding and norms are complete on every rank. Of a mixture's experts it loads some,
 * whole or its share of their rows (experts.c). The digest is of the whole checkpoint
 * whatever the number of ranks: the chunks that one rank would load are divided among the ranks,
 * hashed and gathered.
 *
 * Experts that are packed when they are chosen (lazy_experts.h) are read and hashed with the rest,
 * and refused with it, but not kept: the loader stays, with the files mapped, and fills their
 * chunks later. A chunk whose hash is then another ends the process.
 *
 * The digest covers the bytes of every chunk (as read or generated). They are hashed chunk by chunk
 * and combined in the order of chunks, so the digest does not depend on the number of threads.
 *
 * The generator is counter-based: element i of source s is a pure function of (seed, s, i),
 * whatever thread makes it. */
#include <inttypes.h>
#include <stdatomic.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/base/progress.h"
#include "common/base/random.h"
#include "common/base/shrunk.h"
#include "common/model/model_internal.h"
#include "common/model/checkpoint.h"
#include "common/model/expert_stacks.h"
#include "common/model/gguf_config.h"
#include "common/model/lazy_experts.h"
#include "common/model/quant_tensors.h"
#include "kernels/device.h"
#include "kernels/part.h"
#include "kernels/quantize.h"
#include "kernels/scaled.h"

#define SOURCES_MAX TD_MATRIX_PIECES_MAX
#define PANEL_ROWS 64                  /* td_ops.pack takes ranges of multiples of this */
#define CHUNK_BYTES ((int64_t)1 << 20) /* approximate, because a chunk is at least one panel */
#define ALIGN_BYTES ((size_t)64)
#define SEED 0x74616e64656d0001ull

/* Rows of one tensor of the checkpoint. With random weights `tensor` is NULL and `stream` numbers
 * it. */
struct source {
    const struct td_tensor *tensor;
    /* in which its values are read: the tensor's own, unless the model's mix rounds them to
     * another */
    const struct td_format *format;
    int32_t n_rows;
    /* the part that is taken of the tensor: n_rows from row0 on, the destination's columns from
     * col0 on */
    int32_t row0, col0, full_cols;
    int32_t first_head;             /* row of the tensor at which heads begin */
    int32_t head_rows, rotary_rows; /* of heads whose rows are put in another order; 0: in order */
    bool neighbours;                /* pairs of rotary rows are neighbours in the file */
    float plus;                     /* added to each value, f32 vectors alone */
    uint64_t stream;
    float range; /* random: uniform in (-range, range) around center */
    float center;
    /* Its rows are n_heads heads of `plain` rows and then `rotated` ones, which come behind the
     * plain ones of all heads here; and if they are interleaved, row i of the latter and row i +
     * half of them are rows 2i and 2i + 1 of the file. first: the row of the file at which they, or
     * rows that are turned, begin. n_heads 0: rows in order. */
    struct {
        int32_t n_heads, plain, rotated, first;
        bool interleaved;
    } heads;
    bool turned; /* row r of the destination is column r of rows row0.. of the tensor */
    bool wide;   /* quantised, and read as the numbers that it stands for */
    bool unit;   /* each row is divided by its length */
};

enum dest_kind { DEST_PACKED, DEST_TABLE, DEST_VECTOR };

struct dest {
    enum dest_kind kind;
    struct td_matrix *matrix; /* DEST_PACKED: its piece number `piece` is filled          */
    int32_t piece;
    const void **data;              /* others: where the pointer goes                           */
    const struct td_format *format; /* of the destination                                       */
    int32_t n_rows, n_cols;
    bool is_f32; /* DEST_PACKED: F32 whatever the compute type */
    /* experts.n * the layer + an id, of one expert: a token reads n_used of experts.n such; -1: of
     * none */
    int32_t expert;
    struct source sources[SOURCES_MAX];
    int32_t n_sources;
    size_t at, bytes; /* in the arena; of a lazy one in its expert's place        */
    int32_t chunk_rows;
    int32_t first_chunk, n_chunks; /* numbers of its chunks, for the digest                    */
};

struct loader {
    struct td_model *model;
    const struct td_checkpoint *st; /* NULL: random */
    const char *dir;
    bool *used; /* [st->n_tensors] */
    struct dest *dests;
    int32_t n_dests, max_dests;
    uint64_t n_streams;
    struct td_err *err;
    int32_t rank, n_ranks; /* the part of the model that is loaded */
    bool only_hash;        /* places nothing, and hashes every n_ranks-th chunk of the whole */

    /* Of lazy experts, [n_layers * experts.n]; NULL: experts are as all else. */
    size_t *expert_bytes;
    int32_t *expert_chunks, *expert_first_chunk;
    bool is_loaded; /* what is filled now is an expert that was chosen */

    /* fill */
    uint64_t *chunk_hashes; /* [n_chunks] */
    int32_t n_chunks;
    uint8_t *base;                 /* the arena, or the device's memory */
    const struct td_ops *host_ops; /* for widening */
    uint8_t *staging;              /* [threads][staging_bytes] */
    size_t staging_bytes, piece_bytes;
    uint8_t *pieces; /* device: [threads][piece_bytes], pinned, to upload from */
    uint8_t *trials; /* lazy experts: [threads][piece_bytes], packed to see whether that can be */
    pthread_mutex_t upload_lock; /* also guards upload_status and *err */
    _Atomic td_status upload_status;
    _Atomic int32_t next_chunk;
    _Atomic uint64_t done_bytes;
    struct td_progress *progress; /* NULL: quiet */
};

/* ---- plan ------------------------------------------------------------------------------------ */

static struct dest *add_dest(struct loader *l, enum dest_kind kind, int32_t n_cols)
{
    TD_ASSERT(l->n_dests < l->max_dests);
    struct dest *d = &l->dests[l->n_dests++];
    *d = (struct dest){.kind = kind, .n_cols = n_cols, .expert = -1};
    return d;
}

/* Whether memory comes to it when its expert is chosen. Vectors are small. */
static bool is_lazy(const struct loader *l, const struct dest *d)
{
    return l->expert_bytes && d->expert >= 0 && d->kind == DEST_PACKED;
}

static const struct td_tensor *find(struct loader *l, const char *name)
{
    const struct td_tensor *t = td_checkpoint_find(l->st, name);
    if (t) l->used[t - l->st->tensors] = true;
    return t;
}

static const char *shape_text(const struct td_tensor *t, char *buf, size_t buf_bytes)
{
    size_t n = 0;
    buf[0] = '\0';
    for (int32_t i = 0; i < t->n_dims && n < buf_bytes; i++)
        n += (size_t)snprintf(buf + n, buf_bytes - n, "%s%" PRId64, i ? ", " : "", t->shape[i]);
    return buf;
}

/* The format in which a tensor of format `own` is packed. */
static const struct td_format *rounded(const struct loader *l, const struct dest *d,
                                       const char *name, const struct td_format *own)
{
    const struct td_model *m = l->model;
    return m->mix && d->kind != DEST_VECTOR && !d->is_f32
               ? td_mix_format(m->mix, &m->config, name, d->n_cols, own)
               : own;
}

static td_status check_kernels(const struct loader *l, const struct source *s, const char *name)
{
    if (s->format->dtype || td_ops_blocks(l->model->ops, s->format)) return TD_OK;
    return td_fail(l->err, TD_ERR_UNSUPPORTED,
                   "%s: tensor %s is %s, and the %s kernels multiply only F32, F16 and BF16",
                   l->dir ? l->dir : "random weights", name, s->format->name, l->model->ops->name);
}

/* Whether t has the shape of a vector of n_rows. Weights of norms that each head has for itself are
 * a row for each head in the file. */
static bool is_vector_of(const struct loader *l, const struct td_tensor *t, int32_t n_rows)
{
    int32_t dim = l->model->config.head_dim;
    bool by_heads = l->model->layers[0].spec.qk_norm == TD_QK_NORM_OWN && t->n_dims == 2 &&
                    t->shape[1] == dim && n_rows % dim == 0;
    return by_heads ? t->shape[0] == n_rows / dim : t->n_dims == 1 && t->shape[0] == n_rows;
}

/* Adds [n_rows, d->n_cols] (or, for vectors, [n_rows] with one column) to d. range, center: of
 * random weights. */
static td_status add_source(struct loader *l, struct dest *d, int32_t n_rows, float range,
                            float center, const char *model_name)
{
    TD_ASSERT(d->n_sources < SOURCES_MAX);
    struct source *s = &d->sources[d->n_sources++];
    *s = (struct source){.n_rows = n_rows,
                         .full_cols = d->n_cols,
                         .stream = l->n_streams++,
                         .range = range,
                         .center = center};
    d->n_rows += n_rows;

    char shape[160], buf[TD_TENSOR_FILE_NAME_BYTES];
    bool is_vector = d->kind == DEST_VECTOR;
    if (!l->st) {
        s->format = rounded(l, d, model_name, td_format_of_dtype(TD_F32));
        return check_kernels(l, s, model_name);
    }
    const struct td_tensor *t = s->tensor = find(l, model_name);
    const char *name = td_checkpoint_file_name(l->st, model_name, buf);
    if (!t) {
        return td_fail(l->err, TD_ERR_CORRUPT,
                       is_vector ? "%s: tensor %s [%d] is missing"
                                 : "%s: tensor %s [%d, %d] is missing",
                       l->dir, name, n_rows, d->n_cols);
    }
    if (!t->format || (!t->format->dtype && is_vector))
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s has dtype %s, must be F32, F16 or BF16", l->dir, name,
                       t->dtype_name);
    if (t->quant && d->kind == DEST_TABLE)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s is quantised (%s), not supported: must be F32, F16 or BF16",
                       l->dir, name, t->format->name);
    s->format = rounded(l, d, model_name, t->format);
    s->turned = t->turned;
    if (s->turned) s->full_cols = n_rows;
    if (check_kernels(l, s, name)) return TD_ERR_UNSUPPORTED;
    if (is_vector ? !is_vector_of(l, t, n_rows)
                  : t->n_dims != 2 || t->shape[0] != n_rows || t->shape[1] != d->n_cols) {
        return td_fail(l->err, TD_ERR_CORRUPT,
                       is_vector ? "%s: tensor %s has shape [%s], must be [%d] by config.json"
                                 : "%s: tensor %s has shape [%s], must be [%d, %d] by config.json",
                       l->dir, name, shape_text(t, shape, sizeof shape), n_rows, d->n_cols);
    }
    return TD_OK;
}

/* Keeps only rows [from, from + n) of the source that was added last. */
static void cut_rows(struct dest *d, int32_t from, int32_t n)
{
    struct source *s = &d->sources[d->n_sources - 1];
    d->n_rows -= s->n_rows - n;
    s->row0 = from;
    s->n_rows = n;
}

/* Keeps only columns [from, from + n) of the one source: whole blocks, if it has blocks. */
static td_status cut_cols(struct loader *l, struct dest *d, int32_t from, int32_t n)
{
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    const struct source *s = &d->sources[0];
    const struct td_scaled *scaled = s->format->scaled.kind ? &s->format->scaled : NULL;
    int32_t block = s->format->block;
    bool is_last = from + n == s->full_cols;
    if (scaled) /* only chains of E4M3 are a group's; its last group may be shorter */
        block = scaled->kind == TD_SCALED_E4M3 && scaled->n_groups > 1 ? scaled->group : 1;
    if (from % block || (n % block && !(scaled && is_last)))
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s is %s, whose blocks of %d values tp %d would cut: a rank has "
                       "columns %d to %d",
                       l->dir ? l->dir : "random weights",
                       s->tensor ? td_checkpoint_file_name(l->st, s->tensor->name, buf)
                                 : "of o or down",
                       s->format->name, block, l->n_ranks, from, from + n);
    d->sources[0].col0 = from;
    d->n_cols = n;
    return TD_OK;
}

/* The last destination, to which all sources were added: when their formats differ and one has
 * blocks, which cannot be brought to another format, every source becomes a piece of its own. */
static void split_mixed(struct loader *l)
{
    struct dest *d = &l->dests[l->n_dests - 1];
    struct source sources[SOURCES_MAX];
    int32_t n = d->n_sources;
    bool differ = false, any_blocks = false;
    memcpy(sources, d->sources, sizeof sources);
    for (int32_t i = 0; i < n; i++) {
        differ |= sources[i].format != sources[0].format;
        any_blocks |= !sources[i].format->dtype;
    }
    bool splits = differ && any_blocks;
    if (!l->only_hash) d->matrix->n_pieces = splits ? n : 1;
    if (!splits) return;
    for (int32_t i = 0; i < n; i++) {
        struct dest *piece = i ? add_dest(l, DEST_PACKED, d->n_cols) : d;
        piece->matrix = d->matrix;
        piece->piece = i;
        piece->sources[0] = sources[i];
        piece->n_sources = 1;
        piece->n_rows = sources[i].n_rows;
        piece->expert = d->expert;
    }
}

/* This rank's rows [*ret_from, + *ret_n), in whole units of `unit` rows, of n_units units;
 * replicated when there are fewer units than ranks. */
static void my_part(const struct loader *l, int32_t n_units, int32_t unit, int32_t *ret_from,
                    int32_t *ret_n)
{
    int32_t n = n_units / l->n_ranks;
    *ret_from = (n ? n * l->rank : (int32_t)((int64_t)l->rank * n_units / l->n_ranks)) * unit;
    *ret_n = (n ? n : 1) * unit;
}

/* The format of a quantised matrix, of the columns that are taken; the model keeps it. */
static td_status make_format(struct loader *l, struct dest *d)
{
    const struct source *s = &d->sources[0];
    struct td_model_format *f = malloc(sizeof *f + (size_t)d->n_cols * sizeof f->group_of[0]);
    if (!f) return td_fail(l->err, TD_ERR_NOMEM, "loading weights: no memory for a format");
    bool use_bf16 = l->model->dtype == TD_BF16 && !l->model->ops->device;
    td_quant_cut(s->tensor->quant, s->col0, d->n_cols, use_bf16, f->group_of, &f->format);
    f->next = l->model->formats;
    l->model->formats = f;
    d->format = &f->format;
    return TD_OK;
}

void td_weights_free_formats(struct td_model *model)
{
    for (struct td_model_format *f = model->formats, *next; f; f = next) {
        next = f->next;
        free(f);
    }
    model->formats = NULL;
}

/* A packed matrix is kept in the compute type, except that blocks stay blocks, and f16 files keep
 * f16 storage under f32 (half the bytes, widened exactly). */
static td_status set_format(struct loader *l, struct dest *d)
{
    enum td_dtype compute = d->is_f32 ? TD_F32 : l->model->dtype;
    d->format = td_format_of_dtype(d->kind == DEST_VECTOR ? TD_F32 : compute);
    const struct td_format *first = d->sources[0].format;
    if (d->kind == DEST_VECTOR || (!l->st && first->dtype)) return TD_OK;
    if (first->scaled.kind) return make_format(l, d);
    if (d->kind == DEST_TABLE || !first->dtype) {
        d->format = first;
        return TD_OK;
    }
    bool all_f16 = compute == TD_F32;
    for (int32_t i = 0; i < d->n_sources; i++) all_f16 &= d->sources[i].format->dtype == TD_F16;
    if (all_f16) d->format = first;
    return TD_OK;
}

static size_t packed_bytes(const struct loader *l, const struct dest *d, int32_t n_rows)
{
    const struct td_ops *ops = l->model->ops;
    return d->format->dtype
               ? ops->packed_bytes(n_rows, d->n_cols, d->format->dtype)
               : td_ops_blocks(ops, d->format)->packed_bytes(n_rows, d->n_cols, d->format);
}

static struct dest *add_packed(struct loader *l, struct td_matrix *w, int32_t n_in)
{
    struct dest *d = add_dest(l, DEST_PACKED, n_in);
    d->matrix = w;
    return d;
}

static struct dest *add_vector(struct loader *l, const float **ret)
{
    struct dest *d = add_dest(l, DEST_VECTOR, 1);
    d->data = (const void **)ret;
    return d;
}

/* Random weights: a variance of 1/n_in keeps activations near 1, and what is added to the residual
 * shrinks with depth. */
#define RANDOM_BIAS 0.02f
static float random_range(int32_t n_in) { return sqrtf(3.0f / (float)n_in); }
static float random_depth(const struct td_model_config *c)
{
    return 1.0f / sqrtf(2.0f * (float)c->n_layers);
}

/* expert: of the layer's; -1: of none. */
static struct td_matrix *matrix_of(struct td_layer *y, enum td_into into, int32_t expert)
{
    switch (into) {
    case TD_INTO_QKV:
        return &y->qkv;
    case TD_INTO_O:
        return &y->o;
    case TD_INTO_GATE_UP:
        return &y->gate_up;
    case TD_INTO_DOWN:
        return &y->down;
    case TD_INTO_EXPERT_ROUTER:
        return &y->expert_router;
    case TD_INTO_SHARED_GATE:
        return &y->shared_gate;
    case TD_INTO_Q_B:
        return &y->q_b;
    case TD_INTO_EXPERT_GATE_UP:
        return &y->experts[expert].gate_up;
    case TD_INTO_EXPERT_DOWN:
        return &y->experts[expert].down;
    default:
        return NULL;
    }
}

static const float **vector_of(struct td_layer *y, enum td_into into, int32_t expert)
{
    switch (into) {
    case TD_INTO_ATTN_NORM:
        return &y->attn_norm;
    case TD_INTO_QKV_BIAS:
        return &y->qkv_bias;
    case TD_INTO_Q_NORM:
        return &y->q_norm;
    case TD_INTO_K_NORM:
        return &y->k_norm;
    case TD_INTO_O_BIAS:
        return &y->o_bias;
    case TD_INTO_MLP_NORM:
        return &y->mlp_norm;
    case TD_INTO_GATE_UP_BIAS:
        return &y->gate_up_bias;
    case TD_INTO_DOWN_BIAS:
        return &y->down_bias;
    case TD_INTO_EXPERT_BIAS:
        return &y->expert_bias;
    case TD_INTO_EXPERT_ROUTER_BIAS:
        return &y->expert_router_bias;
    case TD_INTO_EXPERT_GATE_UP_BIAS:
        return &y->experts[expert].gate_up_bias;
    case TD_INTO_EXPERT_DOWN_BIAS:
        return &y->experts[expert].down_bias;
    case TD_INTO_ATTN_OUT_NORM:
        return &y->attn_out_norm;
    case TD_INTO_MLP_OUT_NORM:
        return &y->mlp_out_norm;
    case TD_INTO_SINKS:
        return &y->sinks;
    default:
        return NULL;
    }
}

static bool is_norm(enum td_into into)
{
    return into == TD_INTO_ATTN_NORM || into == TD_INTO_MLP_NORM || into == TD_INTO_Q_NORM ||
           into == TD_INTO_K_NORM || into == TD_INTO_ATTN_OUT_NORM || into == TD_INTO_MLP_OUT_NORM;
}

/* What the loader adds to the weights of norms. */
static float norm_plus(const struct loader *l)
{
    return l->st && !l->st->gguf && td_families[l->model->config.arch]->norms_less_1 ? 1 : 0;
}

/* How random weights are spread: norms are 1, biases small, matrices keep activations. */
static void random_of(const struct td_model_config *c, enum td_into into, int32_t n_in,
                      float *ret_range, float *ret_center)
{
    bool adds = into == TD_INTO_O || into == TD_INTO_DOWN ||
                into == TD_INTO_EXPERT_DOWN; /* to the residual */
    *ret_center = is_norm(into) ? 1 : 0;
    *ret_range = is_norm(into) ? 0
                 : n_in == 0   ? RANDOM_BIAS
                 : adds        ? random_range(n_in) * random_depth(c)
                               : random_range(n_in);
}

/* The order of rows of the source that was added last. */
static void set_heads(const struct td_model_config *c, enum td_dim rows, struct dest *d)
{
    struct source *s = &d->sources[d->n_sources - 1];
    bool is_q = rows == TD_DIM_LATENT_Q;
    s->heads.n_heads = is_q ? c->n_heads : 1;
    s->heads.plain = is_q ? c->latent.nope : c->latent.kv_rank;
    s->heads.rotated = c->latent.rope;
    s->heads.interleaved = c->latent.interleaved;
}

/* The source that was added last has rows of two matrices in turn: one head, all of it rotated in
 * pairs of neighbours. */
static void set_pairs(int32_t n_rows, struct dest *d)
{
    struct source *s = &d->sources[d->n_sources - 1];
    s->heads.n_heads = 1;
    s->heads.rotated = n_rows;
    s->heads.interleaved = true;
}

/* A source of latent heads: quantised ones are read as numbers, because a product that is turned
 * has other groups than its scales. For the same reason the model's mix rounds none. */
static td_status add_latent_source(struct loader *l, struct dest *d, int32_t n_rows, float range,
                                   const char *name)
{
    td_status status = add_source(l, d, n_rows, range, 0, name);
    struct source *s = &d->sources[0];
    if (status) return status;
    s->wide = s->tensor && s->tensor->quant;
    s->format = s->tensor && !s->wide ? s->tensor->format : td_format_of_dtype(TD_F32);
    return TD_OK;
}

/* The matrix whose rows are, of each head, those that make K of a latent row and then those that
 * make V: two matrices for each head (latent.c), the first one turned. */
static td_status plan_latent_heads(struct loader *l, int32_t layer, const struct td_tensor_row *t)
{
    const struct td_model_config *c = &l->model->config;
    struct td_layer *y = &l->model->layers[layer];
    int32_t rank = c->latent.kv_rank, nope = c->latent.nope, v = c->latent.v, first, n;
    char name[TD_TENSOR_NAME_BYTES];
    uint64_t stream = l->n_streams; /* of one tensor, however many of its heads this rank has */
    td_tensor_name(&y->spec, t, layer, -1, name);
    my_part(l, c->n_heads, 1, &first, &n);
    for (int32_t h = first; h < first + n; h++) {
        struct dest *d = add_packed(l, &y->k_absorbed[h - first], rank);
        td_status s = add_latent_source(l, d, c->n_heads * (nope + v), random_range(nope), name);
        if (s) return s;
        cut_rows(d, h * (nope + v), rank);
        d->sources[0].turned = true;
        d->sources[0].stream = stream;
        d->n_cols = nope;
        split_mixed(l);
        d = add_packed(l, &y->v_expanded[h - first], rank);
        s = add_latent_source(l, d, c->n_heads * (nope + v), random_range(rank), name);
        if (s) return s;
        cut_rows(d, h * (nope + v) + nope, v);
        d->sources[0].stream = stream;
        split_mixed(l);
    }
    l->n_streams = stream + 1;
    return TD_OK;
}

/* The part of a fused tensor that begins at row `before` if its rows are not by KV heads, but here
 * are: each has its q heads, its k and its v. */
static void set_groups(const struct td_model_config *c, int32_t before, int32_t n_rows,
                       struct dest *d)
{
    struct source *s = &d->sources[d->n_sources - 1];
    int32_t all = (c->n_heads / c->n_kv_heads + 2) * c->head_dim;
    s->row0 = 0;
    s->heads.n_heads = c->n_kv_heads;
    s->heads.plain = n_rows / c->n_kv_heads;
    s->heads.rotated = all - s->heads.plain; /* those of the others, which are never read */
    s->heads.first = before / c->n_kv_heads;
}

static int32_t n_rows_of_dim(const struct td_model_config *c, enum td_dim dim)
{
    struct td_dim_size size = td_dim_size(c, dim);
    return size.n_units * size.unit;
}

/* Whether a neighbour of row t in its table is another part of its tensor. */
static bool is_same_tensor(const struct td_model_config *c, const struct td_tensor_row *other,
                           const struct td_tensor_row *t)
{
    return other->name && strcmp(other->name, t->name) == 0 && td_tensor_is_wanted(c, other);
}

/* Heads of which not all rows are rotated, or whose pairs are neighbours, are put in the order in
 * which the kernels rotate: see row_in_file. q . k stays the same, because q and k change alike. */
static void order_rows(const struct loader *l, struct source *s, const struct td_tensor_row *t)
{
    const struct td_model_config *c = &l->model->config;
    bool rotated = t->rows == TD_DIM_Q || t->rows == TD_DIM_K || t->rows == TD_DIM_HEAD;
    if (is_norm(t->into)) s->plus = norm_plus(l);
    if (s->tensor && s->tensor->paired_head_rows) {
        s->head_rows = s->rotary_rows = s->tensor->paired_head_rows;
        s->neighbours = true;
    } else if (rotated && (c->rope_neighbours || c->rotary_dim < c->head_dim)) {
        s->head_rows = c->head_dim;
        s->rotary_rows = c->rotary_dim;
        s->neighbours = c->rope_neighbours;
    }
}

/* Of the expert's tensor that was added last, this rank's share of rows: in any matrix, so that
 * no sum over columns is cut, and the bits are those of a whole expert. */
static void cut_expert(const struct loader *l, int32_t n_rows, struct dest *d)
{
    struct source *s = &d->sources[d->n_sources - 1];
    int32_t n_shares = l->n_ranks > 1 ? l->n_ranks / l->model->expert_ranks : 1,
            n = n_rows / n_shares, from = l->rank % n_shares * n, row0 = s->row0;
    if (n_shares == 1) return;
    bool counts = !s->heads.n_heads && !s->turned;
    cut_rows(d, counts ? row0 + from : row0, n);
    if (!counts) s->heads.first = from;
    if (s->heads.n_heads) s->heads.rotated = n;
}

/* Row t of a table becomes the next source of d. */
static td_status plan_row(struct loader *l, int32_t layer, int32_t expert,
                          const struct td_tensor_row *table, const struct td_tensor_row *t,
                          struct dest *d)
{
    const struct td_model_config *c = &l->model->config;
    bool is_vector = t->cols == TD_DIM_NONE;
    struct td_dim_size rows = td_dim_size(c, t->rows), cols = td_dim_size(c, t->cols);
    char name[TD_TENSOR_NAME_BYTES];
    float range, center;
    int32_t from, n;
    random_of(c, t->into, is_vector ? 0 : d->n_cols, &range, &center);
    td_tensor_name(&l->model->layers[layer].spec, t, layer, expert, name);
    int32_t n_rows = rows.n_units * rows.unit, before = 0, behind = 0;
    for (const struct td_tensor_row *p = t; p > table && is_same_tensor(c, p - 1, t); p--)
        before += n_rows_of_dim(c, p[-1].rows);
    for (const struct td_tensor_row *p = t; is_same_tensor(c, p + 1, t); p++)
        behind += n_rows_of_dim(c, p[1].rows);
    td_status s = add_source(l, d, before + n_rows + behind, range, center, name);
    if (s) return s;
    if (before + behind) cut_rows(d, before, n_rows);
    bool grouped = before + behind && td_families[c->arch]->grouped_qkv;
    if (grouped) set_groups(c, before, n_rows, d), before = 0;
    d->sources[d->n_sources - 1].first_head = before;
    if (t->rows == TD_DIM_LATENT_Q || t->rows == TD_DIM_LATENT_KV) set_heads(c, t->rows, d);
    if (t->rows == TD_DIM_EXPERT_PAIRS) set_pairs(n_rows, d);
    order_rows(l, &d->sources[d->n_sources - 1], t);
    if (expert >= 0) cut_expert(l, n_rows, d);
    if (t->cut == TD_CUT_NONE) return TD_OK;
    if (t->cut == TD_CUT_ROWS) {
        my_part(l, rows.n_units, rows.unit, &from, &n);
        cut_rows(d, before + from, n);
        struct source *source = &d->sources[d->n_sources - 1];
        if (source->heads.n_heads &&
            !grouped) { /* the order of rows is that of this rank's heads */
            source->row0 = 0;
            source->heads.first = before + from;
            source->heads.n_heads = n / rows.unit;
        }
        return TD_OK;
    }
    my_part(l, cols.n_units, cols.unit, &from, &n);
    return cut_cols(l, d, from, n);
}

/* The tensors of one table, for one layer or for one expert of it. Those of one place that follow
 * each other share a destination. */
static td_status plan_table(struct loader *l, int32_t layer, int32_t expert,
                            const struct td_tensor_row *table)
{
    const struct td_model_config *c = &l->model->config;
    struct td_layer *y = &l->model->layers[layer];
    struct dest *d = NULL;
    const struct td_tensor_row *last = NULL;
    for (const struct td_tensor_row *t = table; t->name; t++) {
        if (!td_tensor_is_wanted(c, t)) continue;
        if (t->into == TD_INTO_KV_B) {
            if (d && d->kind == DEST_PACKED) split_mixed(l);
            td_status s = plan_latent_heads(l, layer, t);
            if (s) return s;
            d = NULL, last = t;
            continue;
        }
        if (!last || last->into != t->into) {
            struct td_dim_size cols = td_dim_size(c, t->cols);
            if (d && d->kind == DEST_PACKED) split_mixed(l);
            d = t->cols == TD_DIM_NONE
                    ? add_vector(l, vector_of(y, t->into, expert))
                    : add_packed(l, matrix_of(y, t->into, expert), cols.n_units * cols.unit);
            d->is_f32 = t->into == TD_INTO_EXPERT_ROUTER || t->into == TD_INTO_SHARED_GATE;
            d->expert = expert < 0 ? -1 : layer * c->experts.n + expert;
        }
        td_status s = plan_row(l, layer, expert, table, t, d);
        if (s) return s;
        last = t;
    }
    if (d && d->kind == DEST_PACKED) split_mixed(l);
    return TD_OK;
}

static td_status plan_layer(struct loader *l, int32_t layer)
{
    const struct td_model_config *c = &l->model->config;
    struct td_layer *y = &l->model->layers[layer];
    td_status s = TD_OK;
    for (int i = 0; i < TD_LAYER_TABLES && y->spec.tensors[i] && !s; i++)
        s = plan_table(l, layer, -1, y->spec.tensors[i]);
    int32_t n_parts = l->n_ranks > 1 ? l->model->expert_ranks : 1,
            mine = l->rank / (l->n_ranks / n_parts),
            first = td_expert_first(c->experts.n, mine, n_parts),
            end = td_expert_first(c->experts.n, mine + 1, n_parts);
    for (int32_t e = 0; e < c->experts.n && y->experts && !s; e++) {
        int32_t n_dests = l->n_dests;
        s = plan_table(l, layer, e, y->spec.expert_tensors);
        if (e >= first && e < end) continue;
        l->n_dests = n_dests; /* another rank's: its tensors were only looked for */
        y->experts[e] = (struct td_expert){0};
    }
    return s;
}

/* The rows of the output matrix are read as numbers, to be divided by their length. */
static td_status set_unit(struct loader *l, struct dest *d, const char *name)
{
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    struct source *s = &d->sources[0];
    if (!l->model->config.unit_head || !l->st) return TD_OK;
    if (!s->tensor->format->dtype)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s is %s, whose rows cannot be divided by their length: must be "
                       "F32, F16 or BF16",
                       l->dir, td_checkpoint_file_name(l->st, name, buf), s->tensor->format->name);
    s->unit = true;
    if (s->format->dtype) s->format = td_format_of_dtype(TD_F32);
    return TD_OK;
}

/* Tied models store the one matrix under either name. When both names occur they must be the same
 * matrix, or the file contradicts itself. */
static td_status plan_ends(struct loader *l)
{
    static const char embed_name[] = "model.embed_tokens.weight", head_name[] = "lm_head.weight";
    struct td_model *m = l->model;
    const struct td_model_config *c = &m->config;
    float range = sqrtf(3.0f / (float)c->hidden);
    const char *embed_from = embed_name, *head_from = head_name;
    char buf[2][TD_TENSOR_FILE_NAME_BYTES];
    td_status s;
    if (l->st && c->tied_embeddings) {
        const struct td_tensor *e = find(l, embed_name), *h = find(l, head_name);
        if (e && h &&
            (e->n_bytes != h->n_bytes || strcmp(e->dtype_name, h->dtype_name) != 0 ||
             (e->data && memcmp(e->data, h->data, (size_t)e->n_bytes) != 0)))
            return td_fail(l->err, TD_ERR_CORRUPT,
                           "%s: tie_word_embeddings is true, but %s and %s differ", l->dir,
                           td_checkpoint_file_name(l->st, embed_name, buf[0]),
                           td_checkpoint_file_name(l->st, head_name, buf[1]));
        embed_from = head_from = e || !h ? embed_name : head_name;
    }
    struct dest *d = add_dest(l, DEST_TABLE, c->hidden);
    d->data = &m->embed;
    if ((s = add_source(l, d, c->vocab, range, 0, embed_from))) return s;
    uint64_t embed_stream = d->sources[0].stream;
    bool has_blocks = !d->sources[0].format->dtype;
    /* rows of blocks are read from the packed matrix, where this rank has all of it */
    if (c->tied_embeddings && has_blocks && l->n_ranks == 1) {
        l->n_dests--;
    } else if (has_blocks && m->ops->device) { /* whose kernels read blocks in no other form */
        d->kind = DEST_PACKED;
        d->matrix = &m->embed_rows;
        split_mixed(l);
    }
    d = add_vector(l, &m->final_norm);
    if ((s = add_source(l, d, c->hidden, 0, 1, "model.norm.weight"))) return s;
    d->sources[0].plus = norm_plus(l);
    d = add_packed(l, &m->lm_head, c->hidden);
    if ((s = add_source(l, d, c->vocab, range, 0, head_from))) return s;
    if (c->tied_embeddings) d->sources[0].stream = embed_stream;
    if ((s = set_unit(l, d, head_from))) return s;
    int32_t first = td_logit_first(c->vocab, l->rank, l->n_ranks);
    cut_rows(d, first, td_logit_first(c->vocab, l->rank + 1, l->n_ranks) - first);
    split_mixed(l);
    return TD_OK;
}

/* Biases of 0 that some quantisers write for layers which have none. */
static bool is_zero_bias(const struct loader *l, const struct td_tensor *t)
{
    size_t n = strlen(t->name);
    bool is_zero = l->model->config.quant[0].scheme && t->data && n > 5 &&
                   strcmp(t->name + n - 5, ".bias") == 0;
    for (uint64_t i = 0; i < t->n_bytes && is_zero; i++) is_zero = t->data[i] == 0;
    return is_zero;
}

/* Of a layer behind the last one, which predicts one more token (td_model_config.n_skipped). */
static bool is_skipped(const struct td_model_config *c, const char *name)
{
    static const char prefix[] = "model.layers.";
    if (c->n_skipped == 0 || strncmp(name, prefix, sizeof prefix - 1) != 0) return false;
    const char *digits = name + sizeof prefix - 1;
    char *end;
    if (*digits < '0' || *digits > '9') return false;
    long layer = strtol(digits, &end, 10);
    return *end == '.' && layer >= c->n_layers && layer - c->n_layers < c->n_skipped;
}

static td_status refuse_extra(const struct loader *l)
{
    int32_t n_extra = 0, first = 0;
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    for (int32_t i = 0; i < l->st->n_tensors; i++) {
        if (l->used[i] || td_tensor_is_redundant(l->st->tensors[i].name) ||
            is_skipped(&l->model->config, l->st->tensors[i].name) ||
            is_zero_bias(l, &l->st->tensors[i]))
            continue;
        if (n_extra++ == 0) first = i;
    }
    if (n_extra == 0) return TD_OK;
    return td_fail(l->err, TD_ERR_UNSUPPORTED,
                   "%s: tensor %.128s%s has no place in the model that config.json describes (%d "
                   "such tensors)",
                   l->dir, td_checkpoint_file_name(l->st, l->st->tensors[first].name, buf),
                   n_extra > 1 ? " (and others)" : "", n_extra);
}

/* The factors of the rotary frequencies, which some files have instead of a formula. */
static td_status read_rope_factors(struct loader *l)
{
    struct td_model *m = l->model;
    int32_t half = m->config.head_dim / 2;
    if (l->st && l->st->gguf && m->config.rope[0].scaling == TD_ROPE_LONG) {
        find(l, TD_GGUF_LONG_FACTORS); /* the config has them */
        find(l, TD_GGUF_SHORT_FACTORS);
    }
    const struct td_tensor *t = l->st && l->st->gguf ? find(l, "rope_freqs.weight") : NULL;
    if (!t) return TD_OK;
    if (t->format->dtype != TD_F32 || t->n_dims != 1 || t->shape[0] != half)
        return td_fail(l->err, TD_ERR_CORRUPT, "%s: tensor %s must be F32 [%d]", l->dir, t->name,
                       half);
    memcpy(m->rope_factors, t->data, (size_t)half * sizeof(float));
    for (int32_t i = 0; i < half; i++)
        if (!(m->rope_factors[i] >= 1e-6f && m->rope_factors[i] <= 1e6f))
            return td_fail(l->err, TD_ERR_CORRUPT,
                           "%s: tensor %s: factor %d is %g, must be in "
                           "1e-6..1e6",
                           l->dir, t->name, i, (double)m->rope_factors[i]);
    m->n_rope_factors = half;
    return TD_OK;
}

static td_status plan(struct loader *l)
{
    td_status s = plan_ends(l);
    if (!s) s = read_rope_factors(l);
    for (int32_t i = 0; !s && i < l->model->config.n_layers; i++) s = plan_layer(l, i);
    if (!s && l->st) s = refuse_extra(l);
    return s;
}

/* ---- place ----------------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* The kernels of devices take a layer's experts together: plain ones of one format, which therefore
 * lie at one distance from one another. */
static td_status check_expert_format(const struct loader *l, const struct dest *d)
{
    const struct td_format *first = NULL;
    if (!l->model->ops->device || d->expert < 0 || d->kind != DEST_PACKED) return TD_OK;
    for (int32_t i = 0; i < l->n_dests && !first; i++)
        if (l->dests[i].expert >= 0 && l->dests[i].kind == DEST_PACKED) first = l->dests[i].format;
    if (d->format->dtype && d->format == first) return TD_OK;
    return td_fail(l->err, TD_ERR_UNSUPPORTED,
                   "%s: experts are %s%s%s: on a device all must be F32, all F16 or all BF16",
                   l->dir ? l->dir : "random weights", first->name,
                   first == d->format ? "" : " and ", first == d->format ? "" : d->format->name);
}

/* Computes sizes, places and chunks. *ret_total: the bytes of all destinations. */
static td_status measure(struct loader *l, size_t *ret_total)
{
    size_t total = 0;
    int64_t n_chunks = 0;
    for (int32_t i = 0; i < l->n_dests; i++) {
        struct dest *d = &l->dests[i];
        td_status s = set_format(l, d);
        if (!s) s = check_expert_format(l, d);
        if (s) return s;
        d->bytes = d->kind == DEST_PACKED
                       ? packed_bytes(l, d, d->n_rows)
                       : td_format_bytes(d->format, d->n_rows * (int64_t)d->n_cols);
        size_t *end = is_lazy(l, d) ? &l->expert_bytes[d->expert] : &total;
        d->at = *end;
        *end += round_up(d->bytes, ALIGN_BYTES);
        if (d->kind == DEST_VECTOR) {
            d->chunk_rows = d->n_rows;
            if (d->bytes > l->piece_bytes) l->piece_bytes = d->bytes;
            if (l->only_hash && d->bytes > l->staging_bytes)
                l->staging_bytes = round_up(d->bytes, ALIGN_BYTES);
        } else {
            int64_t row_bytes = (int64_t)d->n_cols * 4,
                    panels = CHUNK_BYTES / (row_bytes * PANEL_ROWS);
            d->chunk_rows = (int32_t)(panels < 1 ? 1 : panels) * PANEL_ROWS;
            if (d->format->scaled.kind && d->format->block_bytes > row_bytes)
                row_bytes = d->format->block_bytes;
            size_t need = (size_t)d->chunk_rows * (size_t)row_bytes;
            if (need > l->staging_bytes) l->staging_bytes = need;
            size_t piece = d->kind == DEST_PACKED ? packed_bytes(l, d, d->chunk_rows) : need;
            if (piece > l->piece_bytes) l->piece_bytes = piece;
        }
        d->first_chunk = (int32_t)n_chunks;
        d->n_chunks = (d->n_rows + d->chunk_rows - 1) / d->chunk_rows;
        n_chunks += d->n_chunks;
        if (l->expert_bytes && d->expert >= 0) {
            if (!l->expert_chunks[d->expert]) l->expert_first_chunk[d->expert] = d->first_chunk;
            l->expert_chunks[d->expert] += d->n_chunks;
        }
    }
    TD_ASSERT(n_chunks <= INT32_MAX);
    l->n_chunks = (int32_t)n_chunks;
    *ret_total = total;
    return TD_OK;
}

static size_t rope_table_bytes(const struct td_model *m)
{
    return round_up((size_t)m->max_len * (size_t)td_rope_width(&m->config) * sizeof(float),
                    ALIGN_BYTES);
}

/* measure(), and what the model keeps of it. */
static td_status count_bytes(struct loader *l, size_t *ret_weights)
{
    struct td_model *m = l->model;
    td_status s = measure(l, ret_weights);
    if (s) return s;
    for (int32_t i = 0; i < l->n_dests; i++)
        if (l->dests[i].expert >= 0) {
            m->expert_weight_bytes += l->dests[i].bytes;
            if (l->dests[i].kind == DEST_PACKED) m->expert_bytes += l->dests[i].bytes;
        } else if (l->dests[i].kind != DEST_TABLE && l->dests[i].matrix != &m->embed_rows)
            m->weight_bytes += l->dests[i].bytes;
    if (m->expert_weight_bytes) /* experts are of one size */
        m->weight_bytes += m->expert_weight_bytes / (uint64_t)m->config.experts.n *
                           (uint64_t)m->config.experts.n_used;
    m->memory_bytes = *ret_weights + rope_table_bytes(m) * (size_t)m->config.n_ropes;
    return TD_OK;
}

static void pack_expert_chunk(void *ctx, int32_t index, int32_t chunk, int part);

/* Places for the experts, which are packed when they are chosen. */
static td_status place_experts(struct loader *l)
{
    struct td_model *m = l->model;
    const struct td_lazy_config c = {.bytes = l->expert_bytes,
                                     .n_chunks = l->expert_chunks,
                                     .n_layers = m->config.n_layers,
                                     .n_experts = m->config.experts.n,
                                     .most_bytes = m->experts_most,
                                     .n_ranks = td_comm_is_remote(m->comm) ? 1 : l->n_ranks,
                                     .pack = pack_expert_chunk,
                                     .ctx = l};
    struct td_expert_memory memory;
    if (!l->expert_bytes) return TD_OK;
    td_status s = td_lazy_experts_create(&c, &m->lazy_experts, l->err);
    if (s) return s;
    td_lazy_experts_memory(m->lazy_experts, &memory);
    m->memory_bytes += memory.bytes;
    return TD_OK;
}

/* Where a destination is on the host. */
static uint8_t *place_of(const struct loader *l, const struct dest *d)
{
    return (is_lazy(l, d) ? td_lazy_experts_place(l->model->lazy_experts, d->expert) : l->base) +
           d->at;
}

static td_status place(struct loader *l, bool quiet)
{
    struct td_model *m = l->model;
    size_t rope_at, rope_bytes = rope_table_bytes(m);
    td_status s = count_bytes(l, &rope_at);
    if (s) return s;
    size_t total = m->memory_bytes;
    if ((s = place_experts(l))) return s;
    const struct td_device *dev = m->ops->device;
    void *memory = NULL;
    s = dev ? dev->alloc(total, "weights", &memory, l->err)
            : td_arena_create(total, quiet ? 0 : TD_ARENA_SHOW, "weights", &m->arena, l->err);
    if (s)
        return dev ? td_err_prefix(
                         l->err,
                         "the model does not fit the device; a smaller dtype or max_model_len may")
                   : s;
    m->device_memory = memory;
    uint8_t *base = l->base = dev ? m->device_memory : m->arena.base;
    for (int32_t i = 0; i < m->config.n_ropes; i++)
        m->cos_sin[i] = (float *)(void *)(base + rope_at + (size_t)i * rope_bytes);
    for (int32_t i = 0; i < l->n_dests; i++) {
        struct dest *d = &l->dests[i];
        if (d->kind == DEST_PACKED) {
            d->matrix->pieces[d->piece] = (struct td_weight){
                .data = place_of(l, d), .n_out = d->n_rows, .n_in = d->n_cols, .format = d->format};
            d->matrix->n_out += d->n_rows;
        } else {
            *d->data = base + d->at;
        }
        if (d->kind == DEST_TABLE) m->embed_format = d->format;
    }
    return TD_OK;
}

/* ---- fill ------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t z) { return td_keyed_step(&z); }

/* Elements [first, first + n) of a random source; two per mix. */
static void generate(const struct source *s, int64_t first, int64_t n, float *out)
{
    uint64_t key = mix(SEED ^ s->stream << 32), pair = (uint64_t)first >> 1;
    float scale = s->range * 0x1p-31f;
    int64_t i = 0;
    if (first & 1) out[i++] = s->center + scale * (float)(int32_t)(mix(key + pair++) >> 32);
    for (; i + 1 < n; i += 2, pair++) {
        uint64_t z = mix(key + pair);
        out[i] = s->center + scale * (float)(int32_t)(uint32_t)z;
        out[i + 1] = s->center + scale * (float)(int32_t)(z >> 32);
    }
    if (i < n) out[i] = s->center + scale * (float)(int32_t)(uint32_t)mix(key + pair);
}

static int64_t row_of_heads(const struct source *s, int64_t r)
{
    int64_t first = s->heads.first;
    int64_t plain = s->heads.plain, rotated = s->heads.rotated, n_plain = plain * s->heads.n_heads;
    if (r < n_plain) return first + r / plain * (plain + rotated) + r % plain;
    int64_t i = (r - n_plain) % rotated, half = rotated / 2;
    if (s->heads.interleaved) i = i < half ? 2 * i : 2 * (i - half) + 1;
    return first + (r - n_plain) / rotated * (plain + rotated) + plain + i;
}

/* Where row `row` of a source stands in the tensor. Kernels rotate rows (i, i + half a head) of a
 * head: of the first i these are the file's rotary pairs, of the others what is not rotated. */
static int64_t row_in_file(const struct source *s, int32_t row)
{
    int64_t r = (int64_t)s->row0 + row, head = s->head_rows, pairs = s->rotary_rows / 2;
    if (s->heads.n_heads) return row_of_heads(s, r);
    if (!head) return r;
    int64_t i = (r - s->first_head) % head, half = head / 2, base = r - i;
    bool second = i >= half;
    int64_t pair = second ? i - half : i;
    if (pair >= pairs) return base + 2 * pairs + (second ? half - pairs : 0) + pair - pairs;
    return base + (s->neighbours ? 2 * pair + second : pair + (second ? pairs : 0));
}

/* Whether any range of rows, as the destination has them, is one run of bytes of the tensor. */
static bool is_in_order(const struct source *s, int32_t n_cols)
{
    return n_cols == s->full_cols && !s->heads.n_heads && !s->turned && !s->head_rows && !s->unit &&
           !(s->tensor && s->tensor->quant);
}

/* Any thread. The first failure is kept, and the other threads stop. */
static void refuse_values(struct loader *l, const struct source *s, const struct td_format *format)
{
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    pthread_mutex_lock(&l->upload_lock);
    if (!l->upload_status)
        l->upload_status =
            td_fail(l->err, TD_ERR_CORRUPT,
                    "%s: tensor %s: a value is infinite, no number, or too large for %s", l->dir,
                    td_checkpoint_file_name(l->st, s->tensor->name, buf), format->name);
    pthread_mutex_unlock(&l->upload_lock);
}

/* Values [first, first + n) of a source rounded to another format, whole blocks. */
static void round_values(struct loader *l, const struct source *s, int64_t first, int64_t n,
                         const struct td_format *format, uint8_t *out)
{
    float piece[TD_BLOCK_VALUES_MAX];
    for (int64_t i = 0; i < n; i += TD_BLOCK_VALUES_MAX) {
        int64_t k = n - i < TD_BLOCK_VALUES_MAX ? n - i : TD_BLOCK_VALUES_MAX;
        if (s->tensor)
            td_format_read(s->tensor->format,
                           s->tensor->data + td_format_bytes(s->tensor->format, first + i), k,
                           piece);
        else
            generate(s, first + i, k, piece);
        if (td_format_write(format, piece, k, out + td_format_bytes(format, i))) continue;
        refuse_values(l, s, format);
        return;
    }
}

/* Where element `c` of row `row` of a source that is turned stands in the tensor. */
static int64_t at_turned(const struct source *s, int32_t row, int32_t c)
{
    int64_t r = s->heads.n_heads ? row_of_heads(s, row) : s->heads.first + row;
    return ((int64_t)s->row0 + c) * s->full_cols + r;
}

/* The same of a source that is turned. */
static void read_turned(const struct source *s, int32_t row0, int32_t n_rows, int32_t n_cols,
                        const struct td_format *format, uint8_t *out)
{
    const struct td_format *own = s->tensor ? s->tensor->format : td_format_of_dtype(TD_F32);
    size_t bytes = td_format_bytes(own, 1), to_bytes = td_format_bytes(format, 1);
    TD_ASSERT(own->dtype && (own == format || format->dtype == TD_F32));
    for (int32_t r = 0; r < n_rows; r++)
        for (int32_t c = 0; c < n_cols; c++, out += to_bytes) {
            int64_t at = at_turned(s, row0 + r, c);
            uint32_t value;
            float wide;
            if (s->tensor)
                memcpy(&value, s->tensor->data + (size_t)at * bytes, bytes);
            else
                generate(s, at, 1, (float *)(void *)&value);
            if (own != format) {
                wide = td_widen(&value, own->dtype, 0);
                memcpy(&value, &wide, sizeof wide);
            }
            memcpy(out, &value, to_bytes);
        }
}

/* The same rounded to a block format. */
static void round_turned(struct loader *l, const struct source *s, int32_t row0, int32_t n_rows,
                         int32_t n_cols, const struct td_format *format, uint8_t *out)
{
    float piece[TD_BLOCK_VALUES_MAX];
    for (int32_t r = 0; r < n_rows; r++)
        for (int32_t c = 0; c < n_cols; c += TD_BLOCK_VALUES_MAX) {
            int32_t n = n_cols - c < TD_BLOCK_VALUES_MAX ? n_cols - c : TD_BLOCK_VALUES_MAX;
            for (int32_t k = 0; k < n; k++) {
                int64_t at = at_turned(s, row0 + r, c + k);
                if (s->tensor)
                    td_format_read(s->tensor->format,
                                   s->tensor->data + td_format_bytes(s->tensor->format, at), 1,
                                   &piece[k]);
                else
                    generate(s, at, 1, &piece[k]);
            }
            if (!td_format_write(format, piece, n, out)) {
                refuse_values(l, s, format);
                return;
            }
            out += td_format_bytes(format, n);
        }
}

/* Row `row` of a quantised tensor as numbers. */
static void read_wide_row(const struct source *s, int64_t row, float ret[TD_LATENT_RANK_MAX])
{
    /* codes, scales and zeros, of one value each at most */
    uint32_t parts[(1 + 4 + 1) * TD_LATENT_RANK_MAX / 4];
    uint16_t group_of[TD_LATENT_RANK_MAX];
    struct td_format whole;
    TD_ASSERT(s->full_cols <= TD_LATENT_RANK_MAX);
    td_quant_cut(s->tensor->quant, 0, s->full_cols, false, group_of, &whole);
    TD_ASSERT((size_t)whole.block_bytes <= sizeof parts);
    s->tensor->quant->read_rows(s->tensor->quant, &whole, 0, (int32_t)row, 1, (uint8_t *)parts);
    td_scaled_read(&whole, parts, ret);
}

/* Rows of a quantised source of latent heads, turned or not, in f32. */
static void read_wide(struct loader *l, const struct source *s, int32_t row0, int32_t n_rows,
                      int32_t n_cols, float *out)
{
    float values[TD_LATENT_RANK_MAX];
    bool is_finite = true;
    for (int32_t i = 0; i < (s->turned ? n_cols : n_rows); i++) {
        read_wide_row(s, (int64_t)s->row0 + (s->turned ? i : row0 + i), values);
        for (int32_t k = 0; k < (s->turned ? n_rows : n_cols); k++) {
            float v = values[s->turned ? row0 + k : k];
            is_finite &= isfinite(v) != 0;
            out[s->turned ? (int64_t)k * n_cols + i : (int64_t)i * n_cols + k] = v;
        }
    }
    if (!is_finite) refuse_values(l, s, td_format_of_dtype(TD_F32));
}

/* A row of a source whose rows get the length 1; one of zeros stays. */
static void read_unit(struct loader *l, const struct source *s, int32_t row, int32_t n_cols,
                      const struct td_format *format, uint8_t *out)
{
    float piece[TD_BLOCK_VALUES_MAX];
    int64_t first = row_in_file(s, row) * s->full_cols;
    const struct td_format *own = s->tensor->format;
    double sum = 0;
    TD_ASSERT(n_cols == s->full_cols);
    for (int pass = 0; pass < 2; pass++)
        for (int32_t i = 0, n; i < n_cols; i += n) {
            n = n_cols - i < TD_BLOCK_VALUES_MAX ? n_cols - i : TD_BLOCK_VALUES_MAX;
            td_format_read(own, s->tensor->data + td_format_bytes(own, first + i), n, piece);
            for (int32_t k = 0; k < n && pass == 0; k++) sum += (double)piece[k] * (double)piece[k];
            if (pass == 0) continue;
            for (int32_t k = 0; k < n; k++)
                piece[k] = (float)((double)piece[k] / fmax(sqrt(sum), 1e-12));
            if (td_format_write(format, piece, n, out + td_format_bytes(format, i))) continue;
            refuse_values(l, s, format);
            return;
        }
}

/* Reads n_rows rows of one source from row0 on into `out` as `format`: unchanged when that is the
 * tensor's own, widened for f32, or rounded to blocks. */
static void read_rows(struct loader *l, const struct source *s, int32_t row0, int32_t n_rows,
                      int32_t n_cols, const struct td_format *format, void *out)
{
    if (s->wide) {
        read_wide(l, s, row0, n_rows, n_cols, out);
        return;
    }
    if (s->tensor && s->tensor->quant && (s->heads.n_heads || s->head_rows)) {
        for (int32_t i = 0; i < n_rows; i++)
            s->tensor->quant->read_rows(s->tensor->quant, format, s->col0,
                                        (int32_t)row_in_file(s, row0 + i), 1,
                                        (uint8_t *)out + (size_t)i * (size_t)format->block_bytes);
        return;
    }
    if (s->tensor && s->tensor->quant) {
        s->tensor->quant->read_rows(s->tensor->quant, format, s->col0, s->row0 + row0, n_rows, out);
        return;
    }
    if (s->turned && !format->dtype) {
        round_turned(l, s, row0, n_rows, n_cols, format, out);
        return;
    }
    if (s->turned) {
        read_turned(s, row0, n_rows, n_cols, format, out);
        return;
    }
    if (n_rows > 1 && !is_in_order(s, n_cols)) {
        for (int32_t i = 0; i < n_rows; i++)
            read_rows(l, s, row0 + i, 1, n_cols, format,
                      (uint8_t *)out + td_format_bytes(format, (int64_t)i * n_cols));
        return;
    }
    if (s->unit) {
        read_unit(l, s, row0, n_cols, format, out);
        return;
    }
    int64_t first = row_in_file(s, row0) * s->full_cols + s->col0, n = (int64_t)n_rows * n_cols;
    const struct td_format *own = s->tensor ? s->tensor->format : td_format_of_dtype(TD_F32);
    if (own != format && format->dtype != TD_F32) {
        round_values(l, s, first, n, format, out);
        return;
    }
    if (!s->tensor) {
        generate(s, first, n, out);
        return;
    }
    const uint8_t *src = s->tensor->data + td_format_bytes(own, first);
    if (own == format) {
        memcpy(out, src, td_format_bytes(own, n));
        return;
    }
    TD_ASSERT(format->dtype == TD_F32 && own->dtype);
    /* The table's `embed` entry is the fastest exact widening. It needs alignment, so copy in small
     * aligned pieces. */
    static const int32_t zero = 0;
    uint16_t piece[512];
    for (int64_t i = 0; i < n; i += 512) {
        int32_t m = n - i < 512 ? (int32_t)(n - i) : 512;
        memcpy(piece, src + td_format_bytes(own, i), td_format_bytes(own, m));
        l->host_ops->embed((float *)out + i, piece, own->dtype, &zero, 1, m, 0, 1);
    }
}

/* Returns rows [row0, row0 + n_rows) of d: a pointer into the file when they lie in one tensor,
 * aligned; else gathered in `staging`. */
static const void *gather(struct loader *l, const struct dest *d, int32_t row0, int32_t n_rows,
                          uint8_t *staging, const struct td_format **ret_format)
{
    const struct td_format *format = d->sources[0].format;
    for (int32_t i = 1; i < d->n_sources; i++)
        if (d->sources[i].format != format) format = td_format_of_dtype(TD_F32);
    if (format->scaled.kind) format = d->format;
    *ret_format = format;
    size_t row_bytes = td_format_bytes(format, d->n_cols);
    int32_t base = 0;
    for (int32_t i = 0; i < d->n_sources; i++) {
        const struct source *s = &d->sources[i];
        int32_t lo = row0 > base ? row0 : base,
                hi = row0 + n_rows < base + s->n_rows ? row0 + n_rows : base + s->n_rows;
        if (lo < hi) {
            if (hi - lo == n_rows && s->tensor && s->tensor->format == format &&
                is_in_order(s, d->n_cols)) {
                const uint8_t *src = s->tensor->data + (size_t)(lo - base + s->row0) * row_bytes;
                if (!format->dtype || (uintptr_t)src % td_dtype_bytes(format->dtype) == 0)
                    return src;
            }
            read_rows(l, s, lo - base, hi - lo, d->n_cols, format,
                      staging + (size_t)(lo - row0) * row_bytes);
        }
        base += s->n_rows;
    }
    return staging;
}

/* Any thread. The first failure is kept, and the other threads stop. */
static void upload(struct loader *l, size_t at, const void *from, size_t bytes)
{
    pthread_mutex_lock(&l->upload_lock);
    if (!l->upload_status)
        l->upload_status = l->model->ops->device->upload(l->base + at, from, bytes, l->err);
    pthread_mutex_unlock(&l->upload_lock);
}

/* What a hash begins with, so that equal bytes in two formats differ. */
static uint64_t hash_seed(const struct td_format *f)
{
    if (f->scaled.kind) return f->scaled.digest;
    return f->dtype ? (uint64_t)f->dtype : 0x100u + f->gguf_type;
}

/* Any thread. */
static void refuse_scales(struct loader *l, const struct dest *d, int32_t row0, int32_t n_rows)
{
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    pthread_mutex_lock(&l->upload_lock);
    if (!l->upload_status)
        l->upload_status =
            td_fail(l->err, TD_ERR_CORRUPT,
                    "%s: tensor %s (%s): a scale or value in rows %d to %d of its matrix is "
                    "infinite or no number",
                    l->dir, td_checkpoint_file_name(l->st, d->sources[0].tensor->name, buf),
                    d->format->name, row0, row0 + n_rows - 1);
    pthread_mutex_unlock(&l->upload_lock);
}

/* Of what was read for a chunk: keeps its hash, or compares it with the one that was kept. */
static void check_hash(struct loader *l, const struct dest *d, int32_t chunk, uint64_t hash)
{
    uint64_t *kept = &l->chunk_hashes[d->first_chunk + chunk];
    if (!l->is_loaded) *kept = hash;
    if (*kept == hash) return;
    char what[TD_ERR_MSG_MAX], buf[TD_TENSOR_FILE_NAME_BYTES];
    const struct td_tensor *t = d->sources[0].tensor;
    snprintf(what, sizeof what, "%s: tensor %s", l->dir ? l->dir : "random weights",
             t ? td_checkpoint_file_name(l->st, t->name, buf) : "of an expert");
    td_changed_exit(what);
}

/* Refuses a matrix of plain values by the first tensor and row with one that is no number. The
 * chunk is in the cache: its hash has just been made. */
static void check_plain(struct loader *l, const struct dest *d, const struct td_format *format,
                        const uint8_t *src, int32_t row0, int32_t n_rows)
{
    enum td_dtype from = format->dtype, to = d->format->dtype;
    int32_t row = row0, c = 0, k = 0, n = d->n_cols;
    if (!l->st || !from || td_plain_is_finite(from, to, src, (int64_t)n_rows * n)) return;
    for (; td_plain_is_finite(from, to, src, n); row++) src += td_format_bytes(format, n);
    while (td_plain_is_finite(from, to, src + td_format_bytes(format, c), 1)) c++;
    for (; row >= d->sources[k].n_rows; k++) row -= d->sources[k].n_rows;
    const struct source *s = &d->sources[k];
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    pthread_mutex_lock(&l->upload_lock);
    if (!l->upload_status)
        l->upload_status = td_fail(
            l->err, TD_ERR_CORRUPT,
            "%s: tensor %s, row %" PRId64 ": a value is infinite, no number, or too large for %s",
            l->dir, td_checkpoint_file_name(l->st, s->tensor->name, buf),
            s->turned ? (int64_t)s->row0 + c : row_in_file(s, row), d->format->name);
    pthread_mutex_unlock(&l->upload_lock);
}

/* Packs rows of a lazy expert that nobody has chosen yet, where that may be refused, to refuse it
 * as the model loads. Nothing is kept. */
static void try_packing(struct loader *l, const struct dest *d, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows, int part)
{
    if (format->dtype) return;
    const struct td_block_ops *blocks = td_ops_blocks(l->model->ops, format);
    uint8_t *to = l->trials + (size_t)part * l->piece_bytes;
    if (!blocks->pack(to, n_rows, d->n_cols, format, src, 0, n_rows))
        refuse_scales(l, d, row0, n_rows);
}

/* Whether the factors of n values in blocks are numbers: those of all groups are the block's. */
static bool blocks_are_finite(const struct td_format *f, const uint8_t *blocks, int64_t n)
{
    for (int64_t i = 0; i < n; i += f->block, blocks += f->block_bytes) {
        struct td_group group = {0};
        f->split(blocks, 0, &group);
        if (!td_group_is_finite(f, &group)) return false;
    }
    return true;
}

/* piece: device only, this thread's. */
static void fill_chunk(struct loader *l, const struct dest *d, int32_t chunk, int part,
                       uint8_t *staging, uint8_t *piece)
{
    const struct td_ops *ops = l->model->ops;
    int32_t row0 = chunk * d->chunk_rows,
            n_rows = d->n_rows - row0 < d->chunk_rows ? d->n_rows - row0 : d->chunk_rows;
    const struct td_format *format;
    const void *src = gather(l, d, row0, n_rows, staging, &format);
    int64_t n = (int64_t)n_rows * d->n_cols;
    check_hash(l, d, chunk, td_hash64(src, td_format_bytes(format, n), hash_seed(format)));
    if (l->only_hash) return;
    if (!l->is_loaded) check_plain(l, d, format, src, row0, n_rows);
    if (is_lazy(l, d) && !l->is_loaded) {
        try_packing(l, d, format, src, row0, n_rows, part);
        return;
    }
    if (d->kind == DEST_PACKED) {
        /* a device's piece is packed as if it were a whole matrix, and uploaded to its place */
        uint8_t *to = piece ? piece : place_of(l, d);
        int32_t of_rows = piece ? n_rows : d->n_rows, at_row = piece ? 0 : row0;
        if (format->dtype)
            ops->pack(to, of_rows, d->n_cols, d->format->dtype, src, format->dtype, at_row, n_rows);
        else if (!td_ops_blocks(ops, format)
                      ->pack(to, of_rows, d->n_cols, format, src, at_row, n_rows))
            refuse_scales(l, d, row0, n_rows);
        if (!piece) return;
        size_t first = row0 ? packed_bytes(l, d, row0) : 0, bytes = packed_bytes(l, d, n_rows);
        TD_ASSERT(bytes <= l->piece_bytes && first < d->bytes);
        upload(l, d->at + first, piece, bytes < d->bytes - first ? bytes : d->bytes - first);
        return;
    }
    size_t at = d->at + td_format_bytes(d->format, (int64_t)row0 * d->n_cols),
           bytes = td_format_bytes(d->format, n);
    uint8_t *to = piece ? piece : l->base + at;
    if (d->format == format) {
        memcpy(to, src, bytes);
        if (!format->dtype && !blocks_are_finite(format, src, n)) refuse_scales(l, d, row0, n_rows);
    } else { /* a random table in bf16 */
        TD_ASSERT(format->dtype == TD_F32 && d->format->dtype == TD_BF16);
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)(void *)to)[i] = td_f32_to_bf16(((const float *)src)[i]);
    }
    if (piece) upload(l, at, piece, bytes);
}

static void fill_vector(struct loader *l, const struct dest *d, uint8_t *staging, uint8_t *piece)
{
    float *to = (float *)(void *)(l->only_hash ? staging : piece ? piece : l->base + d->at);
    int32_t at = 0;
    for (int32_t i = 0; i < d->n_sources; i++) {
        read_rows(l, &d->sources[i], 0, d->sources[i].n_rows, 1, td_format_of_dtype(TD_F32),
                  to + at);
        for (int32_t k = at; k < at + d->sources[i].n_rows; k++) to[k] += d->sources[i].plus;
        for (int32_t k = at; k < at + d->sources[i].n_rows && l->st; k++)
            if (!isfinite(to[k])) refuse_values(l, &d->sources[i], td_format_of_dtype(TD_F32));
        at += d->sources[i].n_rows;
    }
    l->chunk_hashes[d->first_chunk] = td_hash64(to, d->bytes, TD_F32);
    if (piece) upload(l, d->at, piece, d->bytes);
}

/* The destination that holds chunk number `chunk`. */
static const struct dest *dest_of_chunk(const struct loader *l, int32_t chunk)
{
    int32_t lo = 0, hi = l->n_dests - 1;
    while (lo < hi) {
        int32_t mid = (lo + hi + 1) / 2;
        if (l->dests[mid].first_chunk <= chunk)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &l->dests[lo];
}

static void fill_part(void *ctx, int part, int n_parts)
{
    (void)n_parts;
    struct loader *l = ctx;
    uint8_t *staging = l->staging + (size_t)part * l->staging_bytes,
            *piece = l->pieces ? l->pieces + (size_t)part * l->piece_bytes : NULL;
    int32_t chunk;
    while ((chunk = atomic_fetch_add(&l->next_chunk, 1)) < l->n_chunks && !l->upload_status) {
        const struct dest *d = dest_of_chunk(l, chunk);
        if (l->only_hash && chunk % td_comm_n_ranks(l->model->comm) != td_comm_rank(l->model->comm))
            continue;
        if (d->kind == DEST_VECTOR)
            fill_vector(l, d, staging, piece);
        else
            fill_chunk(l, d, chunk - d->first_chunk, part, staging, piece);
        uint64_t done = atomic_fetch_add(&l->done_bytes, d->bytes / (uint64_t)d->n_chunks) +
                        d->bytes / (uint64_t)d->n_chunks;
        if (part == 0 && l->progress) td_progress_update(l->progress, done);
    }
}

/* Chunk `chunk` of an expert that was chosen; those of its vectors are there. */
static void pack_expert_chunk(void *ctx, int32_t index, int32_t chunk, int part)
{
    struct loader *l = ctx;
    int32_t number = l->expert_first_chunk[index] + chunk;
    const struct dest *d = dest_of_chunk(l, number);
    if (is_lazy(l, d))
        fill_chunk(l, d, number - d->first_chunk, part,
                   l->staging + (size_t)part * l->staging_bytes, NULL);
}

static td_status fill(struct loader *l, bool quiet)
{
    size_t n_threads = (size_t)td_thread_pool_size(l->model->threads);
    l->chunk_hashes = calloc((size_t)l->n_chunks, sizeof *l->chunk_hashes);
    l->staging = aligned_alloc(ALIGN_BYTES, round_up(n_threads * l->staging_bytes, ALIGN_BYTES));
    if (!l->chunk_hashes || !l->staging)
        return td_fail(l->err, TD_ERR_NOMEM, "loading weights: no memory for %zu bytes",
                       n_threads * l->staging_bytes);
    if (l->model->ops->device && !l->only_hash) {
        void *pieces = NULL;
        l->piece_bytes = round_up(l->piece_bytes, 4096);
        td_status s = l->model->ops->device->alloc_pinned(n_threads * l->piece_bytes,
                                                          "staging of weights", &pieces, l->err);
        if (s) return s;
        l->pieces = pieces;
    }
    if (l->expert_bytes) {
        l->piece_bytes = round_up(l->piece_bytes, ALIGN_BYTES);
        l->trials = aligned_alloc(ALIGN_BYTES, n_threads * l->piece_bytes);
        if (!l->trials)
            return td_fail(l->err, TD_ERR_NOMEM, "loading weights: no memory for %zu bytes",
                           n_threads * l->piece_bytes);
    }
    struct td_progress progress;
    if (!quiet) {
        uint64_t total = 0;
        for (int32_t i = 0; i < l->n_dests; i++) total += l->dests[i].bytes;
        td_progress_start(&progress, l->st ? "loading weights" : "making random weights", "B",
                          total);
        l->progress = &progress;
    }
    td_thread_pool_run(l->model->threads, fill_part, l);
    if (l->progress) {
        if (!l->upload_status) td_progress_update(l->progress, progress.total);
        td_progress_end(l->progress);
        l->progress = NULL;
    }
    return l->upload_status ? td_err_prefix(l->err, "loading weights") : TD_OK;
}

static uint64_t fold(const struct loader *l)
{
    const struct td_model *m = l->model;
    uint64_t factors =
        m->n_rope_factors ? td_hash64(m->rope_factors, (size_t)m->n_rope_factors * sizeof(float), 0)
                          : 0;
    return td_hash64(l->chunk_hashes, (size_t)l->n_chunks * sizeof *l->chunk_hashes, factors);
}

/* Several ranks: the digest that one rank would get by loading everything. `whole` has the
 * checkpoint open. Collective. */
static td_status digest_whole(struct loader *whole, uint64_t *ret_digest)
{
    struct td_comm *comm = whole->model->comm;
    size_t total;
    td_status s = plan(whole);
    if (s || (s = measure(whole, &total))) return s;
    if ((s = fill(whole, true))) return s;
    size_t n = (size_t)whole->n_chunks, n_ranks = (size_t)td_comm_n_ranks(comm);
    uint64_t *all = calloc(n * n_ranks, sizeof *all);
    if (!all)
        return td_fail(whole->err, TD_ERR_NOMEM, "loading weights: no memory for %zu hashes",
                       n * n_ranks);
    if (!(s = td_comm_all_gather(comm, whole->chunk_hashes, n * sizeof *all, all))) {
        for (size_t i = 0; i < n; i++) whole->chunk_hashes[i] = all[i % n_ranks * n + i];
        *ret_digest = fold(whole);
    } else {
        char why[TD_COMM_REASON_MAX];
        td_fail(whole->err, s, "loading weights: %s", td_comm_reason(comm, why));
    }
    free(all);
    return s;
}

static void loader_free(struct loader *l)
{
    free(l->dests);
    free(l->chunk_hashes);
    free(l->staging);
    free(l->trials);
    free(l->expert_bytes);
    free(l->expert_chunks);
    free(l->expert_first_chunk);
    if (l->pieces) l->model->ops->device->release_pinned(l->pieces);
    pthread_mutex_destroy(&l->upload_lock);
}

static int32_t n_rows_of(const struct td_tensor_row *table)
{
    int32_t n = 0;
    while (table && table[n].name) n++;
    return n;
}

/* A mixture adds to the residual as it is, and its shared experts have SwiGLU: a family whose
 * layers want more needs code in forward.c first. */
static void check_mixture(const struct td_layer_spec *spec)
{
    bool has_shared = false, has_norm = false;
    for (int k = 0; k < TD_LAYER_TABLES; k++)
        for (const struct td_tensor_row *t = spec->tensors[k]; t && t->name; t++) {
            has_shared |= t->into == TD_INTO_GATE_UP;
            has_norm |= t->into == TD_INTO_MLP_OUT_NORM;
        }
    TD_ASSERT(spec->residual_scale == 1 && !spec->parallel && !has_norm);
    TD_ASSERT(spec->act == TD_ACT_SILU || !has_shared);
}

/* The model's layers, whose matrices are to be filled. */
static td_status make_layers(struct td_model *m, struct td_err *err)
{
    const struct td_model_config *c = &m->config;
    m->layers = calloc((size_t)c->n_layers, sizeof *m->layers);
    for (int32_t i = 0; i < c->n_layers && m->layers; i++) {
        struct td_layer *y = &m->layers[i];
        td_model_config_layer(c, i, &y->spec);
        if (y->spec.is_latent) {
            y->k_absorbed = calloc((size_t)c->n_heads, 2 * sizeof *y->k_absorbed);
            if (!y->k_absorbed) {
                td_weights_free_layers(m);
                break;
            }
            y->v_expanded = y->k_absorbed + c->n_heads;
        }
        if (!y->spec.expert_tensors) continue;
        check_mixture(&y->spec);
        y->experts = calloc((size_t)c->experts.n, sizeof *y->experts);
        if (!y->experts) td_weights_free_layers(m);
    }
    return m->layers ? TD_OK
                     : td_fail(err, TD_ERR_NOMEM, "loading weights: no memory for %d layers",
                               c->n_layers);
}

void td_weights_free_layers(struct td_model *model)
{
    for (int32_t i = 0; i < model->config.n_layers && model->layers; i++) {
        free(model->layers[i].experts);
        free(model->layers[i].k_absorbed);
    }
    free(model->layers);
    model->layers = NULL;
}

/* Room for what plan() lists. The model has its layers. */
static td_status loader_init(struct loader *l)
{
    l->max_dests = 16;
    for (int32_t i = 0; i < l->model->config.n_layers; i++) {
        const struct td_layer_spec *spec = &l->model->layers[i].spec;
        for (int k = 0; k < TD_LAYER_TABLES; k++) l->max_dests += n_rows_of(spec->tensors[k]);
        l->max_dests += l->model->config.experts.n * n_rows_of(spec->expert_tensors);
        l->max_dests += spec->is_latent ? 2 * l->model->config.n_heads : 0;
    }
    l->dests = calloc((size_t)l->max_dests, sizeof *l->dests);
    return l->dests ? TD_OK
                    : td_fail(l->err, TD_ERR_NOMEM, "loading weights: no memory for %d layers",
                              l->model->config.n_layers);
}

/* The model's experts are to be packed when they are chosen. */
static td_status make_lazy(struct loader *l)
{
    size_t n = (size_t)l->model->config.n_layers * (size_t)l->model->config.experts.n;
    if (!l->model->experts_most) return TD_OK;
    l->expert_bytes = calloc(n, sizeof *l->expert_bytes);
    l->expert_chunks = calloc(n, sizeof *l->expert_chunks);
    l->expert_first_chunk = calloc(n, sizeof *l->expert_first_chunk);
    return l->expert_bytes && l->expert_chunks && l->expert_first_chunk
               ? TD_OK
               : td_fail(l->err, TD_ERR_NOMEM, "loading weights: no memory for %zu experts", n);
}

/* Makes the model's layers and lists what they want of the checkpoint, which is opened in *st
 * unless weights are random. On failure, too, the caller ends with finish(). */
static td_status start(struct loader *l, struct td_checkpoint *st)
{
    td_status s = make_layers(l->model, l->err);
    if (!s) s = loader_init(l);
    if (!s && l->dir) {
        const struct td_family *family = td_families[l->model->config.arch];
        if (!(s = td_checkpoint_open(l->dir, st, l->err)) &&
            !(s = td_checkpoint_rename(family, l->dir, st, l->err)) &&
            !(s = td_quant_tensors(l->model->config.quant, l->dir, st, l->err)) &&
            !(s = td_expert_stacks_open(&l->model->config, l->dir, st, l->err))) {
            l->st = st;
            l->used = calloc((size_t)st->n_tensors, sizeof *l->used);
            if (!l->used)
                s = td_fail(l->err, TD_ERR_NOMEM, "%s: no memory for %d tensors", l->dir,
                            st->n_tensors);
        }
    }
    return s ? s : plan(l);
}

static void finish(struct loader *l, struct td_checkpoint *st)
{
    free(l->used);
    loader_free(l);
    td_checkpoint_close(st);
}

td_status td_weights_look(struct td_model *model, const char *dir, struct td_err *err)
{
    struct td_checkpoint st = {0};
    struct loader l = {.model = model, .dir = dir, .err = err, .n_ranks = 1};
    pthread_mutex_init(&l.upload_lock, NULL);
    size_t bytes;
    td_status s = start(&l, &st);
    if (!s) s = count_bytes(&l, &bytes);
    finish(&l, &st);
    return s;
}

/* A loader, and the checkpoint that it reads. Lazy experts: they stay until the model is closed. */
struct td_weights {
    struct loader l;
    struct td_checkpoint st;
    char *dir; /* a copy, of one that stays */
    struct td_err err;
};

static void weights_free(struct td_weights *w)
{
    finish(&w->l, &w->st);
    free(w->dir);
    free(w);
}

void td_weights_close(struct td_model *model)
{
    if (model->weights) weights_free(model->weights);
    model->weights = NULL;
    td_lazy_experts_destroy(model->lazy_experts);
    model->lazy_experts = NULL;
}

/* All is loaded but lazy experts, which w packs from now on. */
static td_status keep(struct td_weights *w)
{
    struct loader *l = &w->l;
    w->dir = l->dir ? strdup(l->dir) : NULL;
    if (l->dir && !w->dir) return td_fail(l->err, TD_ERR_NOMEM, "%s: no memory", l->dir);
    free(l->trials);
    l->trials = NULL;
    l->dir = w->dir;
    l->err = &w->err;
    l->is_loaded = true;
    l->model->weights = w;
    return TD_OK;
}

td_status td_weights_load(struct td_model *model, const char *dir, bool quiet, uint64_t *ret_digest,
                          struct td_err *err)
{
    struct td_weights *w = calloc(1, sizeof *w);
    if (!w) return td_fail(err, TD_ERR_NOMEM, "loading weights: no memory");
    struct loader *l = &w->l;
    *l = (struct loader){.model = model,
                         .dir = dir,
                         .err = err,
                         .host_ops = model->ops->device ? td_ops_best() : model->ops,
                         .rank = td_comm_rank(model->comm),
                         .n_ranks = td_comm_n_ranks(model->comm)};
    pthread_mutex_init(&l->upload_lock, NULL);
    td_status s = make_lazy(l);
    if (!s) s = start(l, &w->st);
    if (!s) s = place(l, quiet);
    if (!s) s = fill(l, quiet);
    if (!s && l->n_ranks == 1) *ret_digest = fold(l);
    if (!s && l->n_ranks > 1) {
        struct loader whole = {.model = model,
                               .dir = dir,
                               .err = err,
                               .host_ops = l->host_ops,
                               .st = l->st,
                               .used = l->used,
                               .n_ranks = 1,
                               .only_hash = true};
        pthread_mutex_init(&whole.upload_lock, NULL);
        if (!(s = loader_init(&whole))) s = digest_whole(&whole, ret_digest);
        loader_free(&whole);
    }
    if (!s && l->expert_bytes) s = keep(w);
    if (model->weights != w) weights_free(w);
    return s;
}
