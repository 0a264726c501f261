/* forward_device.c - runs one batch on a device: a step of its table (kernels/device.h).
 *
 * Besides weights and cache, a step's entries read one descriptor: tokens, positions, sequences,
 * block tables, wanted rows, attention's plans. It is written into pinned memory and copied to the
 * device by one put, ahead of the entries, which forward.c's walk issues. Nothing waits until the
 * end of the step; then the logits are copied to the host, unless the caller's tail (the sampler)
 * reads them on the device. For a caller that asks for finished layers, a mark is set in the stream
 * behind each group of layers. This thread, which would wait for the end anyway, waits for the
 * marks in turn; the stream itself never waits.
 *
 *   descriptor, in pinned memory and on the device:
 *   [pointers of block tables | tokens | positions | row_seq | logit_rows | position_last |
 *    seq_last | plan | plan_last | block ids]
 *
 * Graphs. A batch in which every row is the one wanted row of a sequence is a decode step. It is
 * padded (with rows of position -1) to one of a few sizes, and so is the space of the block ids, so
 * that most steps repeat the shape of an earlier one; the shape is everything that decides the
 * entries' arguments. A shape's first step runs without a graph, which also lets the table choose
 * its algorithms. Its second step is recorded under a key of its own, and later ones only launch
 * that graph. A workspace knows SHAPES_MAX shapes; a further one replaces the shape that was seen
 * longest ago. Keys are never used twice in a process, because a graph holds the addresses of its
 * workspace and the arguments of its shape; the table drops graphs that are no longer launched. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/model/model_internal.h"
#include "kernels/device.h"

/* more than the 64 graphs that a table keeps, so that shapes seen once do not replace those in
 * use */
#define SHAPES_MAX 128
#define TABLE_INTS_MAX ((size_t)1 << 24) /* block ids of one step; a batch with more is refused */
#define TABLE_INTS_MIN ((size_t)256)
#define BLOCK_SIZE_MIN 8
_Static_assert(TD_FORWARD_MARKS_MAX <= TD_DEVICE_MARKS_MAX, "a mark for each group of layers");

/* Everything that decides the arguments of a decode step's entries. */
struct shape {
    int32_t n_rows, block_size;
    size_t table_ints;
    uint64_t attn, tail;
    const uint8_t *kv_base;
    bool has_tail;
};

struct td_forward_device {
    const struct td_device *dev;
    uint8_t *memory;          /* the workspace's buffers */
    uint8_t *pinned, *device; /* the descriptor, twice */
    size_t table_ints_max;
    /* [max_logit_rows, vocab], host memory; its pages stay unused while a tail reads the logits */
    float *logits;
    uint32_t serial, n_keys;
    uint64_t n_steps; /* with a shape */
    /* With several ranks: a thread that watches the other ranks, because entries that wait for a
     * dead one would wait for ever. */
    bool has_ranks, stop;
    struct td_comm *watched;
    pthread_t watch;
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_cond;
    struct {
        struct shape shape;
        uint32_t key; /* 0: seen once */
        uint64_t last_step;
    } shapes[SHAPES_MAX];
    int32_t n_shapes;
};

/* Offsets of the parts of a descriptor. */
struct plan {
    size_t tables, tokens, positions, row_seq, logit_rows, position_last, seq_last, plan, plan_last,
        ids, bytes;
};

static size_t reserve(size_t *total, size_t bytes)
{
    size_t at = *total;
    *total += (bytes + 255) / 256 * 256; /* a plan wants that */
    return at;
}

static struct plan plan_of(const struct td_workspace *ws, int32_t n_rows, int32_t n_logit_rows,
                           int32_t n_seqs, size_t table_ints)
{
    const struct td_model *m = ws->model;
    size_t n = (size_t)n_rows * 4, k = (size_t)n_logit_rows * 4;
    bool has_last = n_logit_rows > 0 && n_logit_rows < n_rows;
    struct plan p = {0};
    p.tables = reserve(&p.bytes, (size_t)n_seqs * sizeof(int32_t *));
    p.tokens = reserve(&p.bytes, n);
    p.positions = reserve(&p.bytes, n);
    p.row_seq = reserve(&p.bytes, n);
    p.logit_rows = reserve(&p.bytes, k);
    p.position_last = reserve(&p.bytes, k);
    p.seq_last = reserve(&p.bytes, k);
    p.plan = reserve(&p.bytes, m->ops->attn_plan_bytes(n_rows, m->shard.n_kv_heads));
    p.plan_last = reserve(
        &p.bytes, has_last ? m->ops->attn_plan_bytes(n_logit_rows, m->shard.n_kv_heads) : 0);
    p.ids = reserve(&p.bytes, table_ints * 4);
    return p;
}

#define WATCH_MS 50

static void *watch_ranks(void *arg)
{
    struct td_forward_device *d = arg;
    pthread_mutex_lock(&d->watch_lock);
    while (!d->stop) {
        struct td_err why;
        if (td_comm_check(d->watched) || d->dev->ranks->check(&why)) {
            /* abort returns when leave_ranks has dropped the graphs, which needs this lock */
            pthread_mutex_unlock(&d->watch_lock);
            d->dev->ranks->abort();
            return NULL;
        }
        struct timespec at;
        clock_gettime(CLOCK_REALTIME, &at);
        at.tv_nsec += WATCH_MS * 1000000;
        at.tv_sec += at.tv_nsec / 1000000000;
        at.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&d->watch_cond, &d->watch_lock, &at);
    }
    pthread_mutex_unlock(&d->watch_lock);
    return NULL;
}

/* Leaves the group first, while the watching thread still runs: only its abort ends work that a
 * dead rank left unfinished. */
static void leave_ranks(struct td_forward_device *d)
{
    if (!d->has_ranks) return;
    d->dev->ranks->leave();
    pthread_mutex_lock(&d->watch_lock);
    d->stop = true;
    pthread_cond_signal(&d->watch_cond);
    pthread_mutex_unlock(&d->watch_lock);
    pthread_join(d->watch, NULL);
    pthread_mutex_destroy(&d->watch_lock);
    pthread_cond_destroy(&d->watch_cond);
    td_comm_close(d->watched);
}

static td_status group_sum(void *comm, float *x, size_t n)
{
    return td_comm_all_reduce_sum(comm, NULL, x, n);
}

static td_status group_gather(void *comm, const float *mine, int32_t n_rows, const int32_t *first,
                              float *out)
{
    return td_comm_gather_columns(comm, mine, n_rows, first, out);
}

/* Collective: connects the ranks' devices. */
static td_status join_ranks(struct td_forward_device *d, const struct td_workspace *ws,
                            struct td_err *err)
{
    const struct td_model *m = ws->model;
    uint8_t id[TD_DEVICE_RANK_ID_BYTES];
    size_t bytes = sizeof id, rows = (size_t)ws->max_rows * (size_t)m->shard.hidden,
           logits = (size_t)ws->max_logit_rows * (size_t)m->shard.vocab;
    td_status s = td_comm_rank(m->comm) == 0 ? d->dev->ranks->new_id(id, err) : TD_OK;
    if (s) return s;
    if ((s = td_comm_broadcast(m->comm, id, &bytes, false))) {
        char why[TD_COMM_REASON_MAX];
        return td_fail(err, s, "ranks: %s", td_comm_reason(m->comm, why));
    }
    if ((s = td_comm_again(m->comm, &d->watched, err))) return s;
    const struct td_device_group group = {td_comm_rank(m->comm), td_comm_n_ranks(m->comm), m->comm,
                                          group_sum, group_gather};
    if ((s = d->dev->ranks->join(id, &group, rows > logits ? rows : logits, err))) {
        td_comm_close(d->watched);
        return s;
    }
    pthread_mutex_init(&d->watch_lock, NULL);
    pthread_cond_init(&d->watch_cond, NULL);
    if (pthread_create(&d->watch, NULL, watch_ranks, d)) {
        td_comm_close(d->watched);
        d->dev->ranks->leave();
        return td_fail(err, TD_ERR_NOMEM, "ranks: no thread to look after them");
    }
    d->has_ranks = true;
    return TD_OK;
}

td_status td_forward_device_create(struct td_workspace *ws, size_t bytes, uint8_t **ret_memory,
                                   struct td_err *err)
{
    static atomic_uint next_serial = 1;
    const struct td_model *m = ws->model;
    const struct td_device *dev = m->ops->device;
    size_t per_seq = (size_t)m->max_len / BLOCK_SIZE_MIN + 1,
           ints = per_seq * (size_t)ws->max_logit_rows;
    struct td_forward_device *d = ws->device = calloc(1, sizeof *d);
    if (!d) return td_fail(err, TD_ERR_NOMEM, "workspace: no memory");
    d->dev = dev;
    d->serial = atomic_fetch_add(&next_serial, 1);
    d->table_ints_max = ints > TABLE_INTS_MAX
                            ? (per_seq > TABLE_INTS_MAX ? per_seq : TABLE_INTS_MAX)
                        : ints < TABLE_INTS_MIN ? TABLE_INTS_MIN
                                                : ints;
    size_t last = plan_of(ws, ws->max_rows, ws->max_logit_rows, ws->max_rows, 0).bytes + 256 +
                  m->ops->attn_plan_bytes(ws->max_logit_rows, m->shard.n_kv_heads);
    size_t desc = last + d->table_ints_max * 4 + 256;
    void *memory = NULL, *pinned = NULL, *there = NULL;
    td_status s = dev->alloc(bytes, "workspace", &memory, err);
    d->memory = memory;
    if (!s) s = dev->alloc_pinned(desc, "step descriptor", &pinned, err);
    d->pinned = pinned;
    if (!s) s = dev->alloc(desc, "step descriptor", &there, err);
    d->device = there;
    if (s)
        return td_err_prefix(err,
                             "workspace of %d rows (max_step_tokens) and %d logit rows (max_batch)",
                             ws->max_rows, ws->max_logit_rows);
    d->logits = malloc((size_t)ws->max_logit_rows * (size_t)m->config.vocab * sizeof(float));
    if (!d->logits)
        return td_fail(err, TD_ERR_NOMEM, "workspace: no memory for the logits of %d rows",
                       ws->max_logit_rows);
    *ret_memory = d->memory;
    return td_comm_n_ranks(m->comm) > 1 ? join_ranks(d, ws, err) : TD_OK;
}

void td_forward_device_destroy(struct td_workspace *ws)
{
    struct td_forward_device *d = ws->device;
    if (!d) return;
    leave_ranks(d);
    if (d->memory) d->dev->release(d->memory);
    if (d->device) d->dev->release(d->device);
    if (d->pinned) d->dev->release_pinned(d->pinned);
    free(d->logits);
    free(d);
    ws->device = NULL;
}

int32_t td_workspace_padded_rows(const struct td_workspace *ws, int32_t n_rows)
{
    if (!ws->device || ws->model->no_graphs) return n_rows;
    int32_t n = 1, unit = n_rows <= 32 ? 8 : n_rows <= 64 ? 16 : n_rows <= 256 ? 32 : 128;
    if (n_rows <= 8)
        while (n < n_rows) n *= 2;
    else
        n = (n_rows + unit - 1) / unit * unit;
    return n < ws->max_logit_rows ? n : ws->max_logit_rows;
}

static bool is_same(const struct shape *a, const struct shape *b)
{
    return a->n_rows == b->n_rows && a->block_size == b->block_size &&
           a->table_ints == b->table_ints && a->attn == b->attn && a->tail == b->tail &&
           a->kv_base == b->kv_base && a->has_tail == b->has_tail;
}

/* 0 when a shape is seen for the first time, or again after others replaced it; otherwise its
 * graph's key. */
static uint64_t graph_key(struct td_forward_device *d, const struct shape *s)
{
    int32_t i = 0, oldest = 0;
    d->n_steps++;
    for (; i < d->n_shapes && !is_same(&d->shapes[i].shape, s); i++)
        if (d->shapes[i].last_step < d->shapes[oldest].last_step) oldest = i;
    bool is_known = i < d->n_shapes;
    if (!is_known) {
        i = d->n_shapes < SHAPES_MAX ? d->n_shapes++ : oldest;
        d->shapes[i].shape = *s;
        d->shapes[i].key = 0;
    } else if (!d->shapes[i].key) {
        d->shapes[i].key = ++d->n_keys;
    }
    d->shapes[i].last_step = d->n_steps;
    return is_known ? (uint64_t)d->serial << 32 | d->shapes[i].key : 0;
}

/* Waits for the marks that the walk set, in their order, and reports the layers. *ret_told: how
 * many. */
static td_status tell_layers(const struct td_device *dev, const struct td_forward_layers *l,
                             int32_t n_layers, bool last_marked, int32_t *ret_told,
                             struct td_err *err)
{
    for (int32_t mark = 0, n = 0; n < (last_marked ? n_layers : n_layers - 1); mark++) {
        n = n_layers - n > l->every ? n + l->every : n_layers;
        if (n == n_layers && !last_marked) break;
        td_status s = dev->wait_mark(mark, err);
        if (s) return s;
        l->done(l->ctx, n);
        *ret_told = n;
    }
    return TD_OK;
}

static bool is_decode_step(const struct td_forward_args *a)
{
    if (a->n_logit_rows != a->n_rows) return false;
    for (int32_t i = 0; i < a->n_rows; i++)
        if (a->row_seq[i] != i) return false;
    return true;
}

/* Lists the blocks that the rows of each sequence reach; *ret_ints: the number of block ids. */
static td_status count_blocks(const struct td_forward_args *a, size_t max_ints, size_t *ret_ints,
                              struct td_err *err)
{
    size_t n = 0;
    for (int32_t i = 0; i < a->n_rows; i++)
        if (i + 1 == a->n_rows || a->row_seq[i + 1] != a->row_seq[i])
            n += (size_t)(a->positions[i] / a->kv->block_size) + 1;
    if (n > max_ints)
        return td_fail(err, TD_ERR_LIMIT, "a step's block tables hold %zu blocks, limit %zu", n,
                       max_ints);
    *ret_ints = n;
    return TD_OK;
}

static void fill(const struct td_forward_device *d, const struct plan *p,
                 const struct td_forward_args *a, int32_t n_rows, int32_t n_seqs)
{
    uint8_t *at = d->pinned;
    int32_t *tokens = (int32_t *)(void *)(at + p->tokens),
            *positions = (int32_t *)(void *)(at + p->positions),
            *row_seq = (int32_t *)(void *)(at + p->row_seq),
            *logit_rows = (int32_t *)(void *)(at + p->logit_rows),
            *position_last = (int32_t *)(void *)(at + p->position_last),
            *seq_last = (int32_t *)(void *)(at + p->seq_last),
            *ids = (int32_t *)(void *)(at + p->ids);
    const int32_t **tables = (const int32_t **)(void *)(at + p->tables);
    const int32_t *ids_there = (const int32_t *)(const void *)(d->device + p->ids);
    memcpy(tokens, a->tokens, (size_t)a->n_rows * 4);
    memcpy(positions, a->positions, (size_t)a->n_rows * 4);
    memcpy(row_seq, a->row_seq, (size_t)a->n_rows * 4);
    for (int32_t i = a->n_rows; i < n_rows; i++) { /* padding */
        tokens[i] = row_seq[i] = 0;
        positions[i] = -1;
    }
    for (int32_t i = 0; i < a->n_logit_rows; i++) {
        logit_rows[i] = a->logit_rows[i];
        position_last[i] = a->positions[a->logit_rows[i]];
        seq_last[i] = a->row_seq[a->logit_rows[i]];
    }
    for (int32_t i = 0; i < n_seqs; i++) tables[i] = ids_there;
    size_t n = 0;
    for (int32_t i = 0; i < a->n_rows; i++) {
        int32_t seq = a->row_seq[i];
        if (i + 1 < a->n_rows && a->row_seq[i + 1] == seq) continue;
        size_t n_blocks = (size_t)(a->positions[i] / a->kv->block_size) + 1;
        memcpy(ids + n, a->block_tables[seq], n_blocks * 4);
        tables[seq] = ids_there + n;
        n += n_blocks;
    }
}

/* Offsets into the descriptor. */
static void make_plan(const struct td_workspace *ws, size_t positions, size_t row_seq,
                      int32_t n_rows, size_t to, uint64_t *ret_shape)
{
    const struct td_model_config *c = &ws->model->shard;
    uint8_t *at = ws->device->pinned;
    struct td_attn_plan_args a = {.positions = (const int32_t *)(const void *)(at + positions),
                                  .row_seq = (const int32_t *)(const void *)(at + row_seq),
                                  .n_rows = n_rows,
                                  .n_heads = c->n_heads,
                                  .n_kv_heads = c->n_kv_heads};
    ws->model->ops->attn_plan(&a, at + to, ret_shape);
}

/* The batch as the entries take it: n rows of which k are wanted, at the descriptor's offsets p. */
static struct td_batch batch_of(const struct td_forward_device *d, const struct plan *p,
                                const struct td_forward_args *a, int32_t n, int32_t k,
                                const struct td_forward_layers *layers)
{
    uint8_t *there = d->device;
    return (struct td_batch){
        .tokens = (const int32_t *)(const void *)(there + p->tokens),
        .positions = (const int32_t *)(const void *)(there + p->positions),
        .row_seq = (const int32_t *)(const void *)(there + p->row_seq),
        .block_tables = (const int32_t *const *)(const void *)(there + p->tables),
        .n_rows = n,
        .n_logit_rows = k,
        .kv_base = a->kv_base,
        .kv = a->kv,
        .kv_stride = a->kv_stride,
        .logit_rows = (const int32_t *)(const void *)(there + p->logit_rows),
        .layers = layers,
        .position_last = (const int32_t *)(const void *)(there + p->position_last),
        .seq_last = (const int32_t *)(const void *)(there + p->seq_last),
        .plan = d->pinned + p->plan,
        .device_plan = there + p->plan,
        .plan_last = d->pinned + p->plan_last,
        .device_plan_last = there + p->plan_last};
}

td_status td_forward_device(struct td_model *model, struct td_workspace *ws,
                            const struct td_forward_args *a, float **ret_logits)
{
    struct td_forward_device *d = ws->device;
    const struct td_device *dev = d->dev;
    bool can_graph = !model->no_graphs && is_decode_step(a);
    int32_t n = can_graph ? td_workspace_padded_rows(ws, a->n_rows) : a->n_rows,
            k = can_graph ? n : a->n_logit_rows;
    if (n > ws->max_rows) n = k = a->n_rows;
    int32_t n_seqs = can_graph ? n : a->row_seq[a->n_rows - 1] + 1;
    size_t used, ints = TABLE_INTS_MIN;
    td_status s = count_blocks(a, d->table_ints_max, &used, a->err);
    if (s) return s;
    while (ints < used) ints *= 2;
    if (!can_graph) ints = used;
    if (ints > d->table_ints_max) ints = d->table_ints_max;

    struct plan p = plan_of(ws, n, k, n_seqs, ints);
    fill(d, &p, a, n, n_seqs);
    uint64_t shape = 0, unused;
    make_plan(ws, p.positions, p.row_seq, n, p.plan, &shape);
    if (k > 0 && k < n) make_plan(ws, p.position_last, p.seq_last, k, p.plan_last, &unused);

    const struct td_forward_tail *tail = k > 0 ? a->tail : NULL;
    struct shape all = {.n_rows = n,
                        .block_size = a->kv->block_size,
                        .table_ints = ints,
                        .attn = shape,
                        .tail = tail ? tail->shape : 0,
                        .kv_base = a->kv_base,
                        .has_tail = tail != NULL};
    int32_t n_layers = model->shard.n_layers, n_told = 0;
    const struct td_forward_layers *layers = can_graph ? NULL : a->layers;
    if (layers && (n_layers + layers->every - 1) / layers->every > TD_FORWARD_MARKS_MAX)
        return td_fail(a->err, TD_ERR_INVALID,
                       "forward: every is %d, of %d layers that are more than %d groups",
                       layers->every, n_layers, TD_FORWARD_MARKS_MAX);
    if (dev->step_begin(can_graph ? graph_key(d, &all) : 0)) {
        struct td_batch b = batch_of(d, &p, a, n, k, layers);
        dev->put(d->device, d->pinned, p.bytes);
        td_forward_walk(model, ws, &b, 0, 1);
        if (tail) tail->issue(tail->ctx, ws->logits, k);
    }
    s = dev->step_end(a->err);
    if (!s && layers)
        s = tell_layers(dev, layers, n_layers, k > 0 || td_comm_n_ranks(model->comm) == 1, &n_told,
                        a->err);
    if (!s) s = dev->wait(a->err);
    if (!s && k == 0)
        /* No logits were gathered, so wait here: the other ranks' last K and V must be stored, too,
         * before they are sent on. */
        s = td_comm_barrier(model->comm);
    if (!s && layers && n_told < n_layers) layers->done(layers->ctx, n_layers);
    *ret_logits = NULL;
    if (s || tail || k == 0 || td_comm_rank(model->comm) > 0) return s;
    s = dev->download(d->logits, ws->logits,
                      (size_t)a->n_logit_rows * (size_t)model->config.vocab * sizeof(float),
                      a->err);
    if (!s) *ret_logits = d->logits;
    return s;
}
