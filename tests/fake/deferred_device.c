/* deferred_device.c - a device table over kernels of the CPU that is as strict as a GPU:
 * libtandem_deferred_device.so, loaded in place of libtandem_cuda.so.
 *
 * A forbidden action of the forward pass or the engine shows here at once, fast and under every
 * sanitizer:
 *   - memory from alloc is accessible only while entries or a copy run: touching it at another time
 *     ends the process;
 *   - entries, puts and gets are only recorded. They run at `wait`, in order, so whatever they
 *     point to must still be valid;
 *   - entries behind a mark have not run when its wait is over;
 *   - a graph key's second step must issue what its first did, argument by argument; its third and
 *     later ones are launched from the first's list.
 * TD_DEFERRED_FAIL_AT=N: the N-th wait from the start finds the device lost, and so does every call
 * after it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/model/sampler.h"
#include "kernels/device.h"

enum kind { PUT, GET, MARK, PREPARE, GEMM, NORM, ROPE, STORE, ATTN, SILU, EMBED, SAMPLE };

struct entry {
    enum kind kind;
    union {
        struct {
            void *to;
            const void *from;
            size_t bytes;
        } copy;
        struct {
            struct td_gemm_args a;
            struct td_weight w;
        } gemm;
        struct td_rmsnorm_args norm;
        struct td_rope_args rope;
        struct td_kv_store_args store;
        struct td_attn_args attn;
        struct {
            float *out;
            const float *gate, *up;
            int32_t n_rows, dim;
            int64_t out_stride, gate_stride, up_stride;
        } silu;
        struct {
            float *out;
            const void *table;
            enum td_dtype dtype;
            const int32_t *ids;
            int32_t n_rows, dim;
        } embed;
        struct td_sample_args sample;
    } u;
};

struct list {
    struct entry *entries;
    size_t n, room;
};

struct graph {
    uint64_t key;
    struct list list;
    uint32_t n_launched;
};

struct region {
    void *base;
    size_t bytes;
};

enum { REGIONS_MAX = 64, GRAPHS_MAX = 4096, PLAN_MARK = 0x504c414e };

static struct {
    struct td_device device;
    struct td_ops ops;
    const struct td_ops *host;
    struct region regions[REGIONS_MAX];
    struct list step, pending; /* being issued; issued */
    size_t n_run;              /* of pending */
    int32_t n_marks, n_marks_run;
    struct graph *graphs;
    size_t n_graphs;
    struct graph *graph; /* of the step */
    bool in_step, is_check, is_lost;
    uint64_t n_waits, fail_at, used_bytes, total_bytes;
    struct td_sampler *sampler;
    int32_t sampler_vocab;
} self;

static void protect(int rights)
{
    for (int i = 0; i < REGIONS_MAX; i++)
        if (self.regions[i].base)
            TD_ASSERT(mprotect(self.regions[i].base, self.regions[i].bytes, rights) == 0);
}

static td_status lost(struct td_err *err)
{
    return td_fail(
        err, TD_ERR_DEVICE,
        "deferred device 0 is lost for this process: wait: asked for by TD_DEFERRED_FAIL_AT");
}

static void push(struct list *l, const struct entry *e)
{
    if (l->n == l->room) {
        l->room = l->room ? l->room * 2 : 256;
        l->entries = realloc(l->entries, l->room * sizeof *e);
        TD_ASSERT(l->entries);
    }
    l->entries[l->n++] = *e;
}

static struct entry blank(enum kind kind)
{
    struct entry e;
    memset(&e, 0, sizeof e); /* padding too: entries are compared as bytes */
    e.kind = kind;
    return e;
}

static void issue(struct entry e)
{
    TD_ASSERT(self.in_step);
    push(&self.step, &e);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static td_status alloc(size_t bytes, const char *what, void **ret, struct td_err *err)
{
    size_t size = (bytes + 4095) / 4096 * 4096;
    if (self.is_lost) return lost(err);
    if (size > self.total_bytes - self.used_bytes)
        return td_fail(err, TD_ERR_NOMEM,
                       "device memory: %zu bytes for %s asked, %llu of %llu are free", bytes, what,
                       (unsigned long long)(self.total_bytes - self.used_bytes),
                       (unsigned long long)self.total_bytes);
    for (int i = 0; i < REGIONS_MAX; i++) {
        if (self.regions[i].base) continue;
        void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) break;
        memset(p, 0xff, size); /* NaN */
        mprotect(p, size, PROT_NONE);
        self.regions[i] = (struct region){p, size};
        self.used_bytes += size;
        *ret = p;
        return TD_OK;
    }
    return td_fail(err, TD_ERR_NOMEM, "deferred device: %zu bytes for %s: no region", bytes, what);
}

static void release(void *memory)
{
    for (int i = 0; i < REGIONS_MAX; i++)
        if (self.regions[i].base == memory && memory) {
            munmap(memory, self.regions[i].bytes);
            self.used_bytes -= self.regions[i].bytes;
            self.regions[i] = (struct region){0};
            return;
        }
    TD_ASSERT(!memory);
}

static td_status alloc_pinned(size_t bytes, const char *what, void **ret, struct td_err *err)
{
    *ret = calloc(1, bytes ? bytes : 1);
    return *ret ? TD_OK
                : td_fail(err, TD_ERR_NOMEM, "pinned memory: %zu bytes for %s", bytes, what);
}

static td_status free_bytes(uint64_t *ret_free, uint64_t *ret_total, struct td_err *err)
{
    if (self.is_lost) return lost(err);
    *ret_free = self.total_bytes - self.used_bytes;
    *ret_total = self.total_bytes;
    return TD_OK;
}

static td_status copy_now(void *to, const void *from, size_t bytes, struct td_err *err)
{
    if (self.is_lost) return lost(err);
    protect(PROT_READ | PROT_WRITE);
    memcpy(to, from, bytes);
    protect(PROT_NONE);
    return TD_OK;
}

static td_status upload(void *to, const void *from, size_t bytes, struct td_err *err)
{
    return copy_now(to, from, bytes, err);
}
static td_status download(void *to, const void *from, size_t bytes, struct td_err *err)
{
    return copy_now(to, from, bytes, err);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static bool step_begin(uint64_t key)
{
    TD_ASSERT(!self.in_step);
    self.in_step = true;
    self.step.n = 0;
    self.n_marks = self.n_marks_run = 0;
    self.graph = NULL;
    self.is_check = false;
    if (key == 0) return true;
    for (size_t i = 0; i < self.n_graphs && !self.graph; i++)
        if (self.graphs[i].key == key) self.graph = &self.graphs[i];
    if (self.graph) {
        self.is_check = self.graph->n_launched == 1;
        return self.is_check;
    }
    TD_ASSERT(self.n_graphs < GRAPHS_MAX);
    self.graph = &self.graphs[self.n_graphs++];
    *self.graph = (struct graph){.key = key};
    return true;
}

static void put(void *to, const void *from, size_t bytes)
{
    struct entry e = blank(PUT);
    e.u.copy.to = to, e.u.copy.from = from, e.u.copy.bytes = bytes;
    issue(e);
}

static void get(void *to, const void *from, size_t bytes)
{
    struct entry e = blank(GET);
    e.u.copy.to = to, e.u.copy.from = from, e.u.copy.bytes = bytes;
    issue(e);
}

static td_status step_end(struct td_err *err)
{
    TD_ASSERT(self.in_step);
    self.in_step = false;
    if (self.is_lost) return lost(err);
    const struct list *l = &self.step;
    if (self.graph) {
        struct list *kept = &self.graph->list;
        if (self.graph->n_launched == 0)
            for (size_t i = 0; i < self.step.n; i++) push(kept, &self.step.entries[i]);
        if (self.is_check) {
            TD_ASSERT(kept->n == self.step.n);
            for (size_t i = 0; i < kept->n; i++)
                TD_ASSERT(memcmp(&kept->entries[i], &self.step.entries[i], sizeof(struct entry)) ==
                          0);
        }
        self.graph->n_launched++;
        l = kept;
    }
    for (size_t i = 0; i < l->n; i++) push(&self.pending, &l->entries[i]);
    return TD_OK;
}

/* ---- what runs at wait ----------------------------------------------------------------------- */

/* The plain kernels have no padding rows, so rows go one by one. */
static void run_rope(const struct td_rope_args *a)
{
    for (int32_t r = 0; r < a->n_rows; r++) {
        struct td_rope_args one = *a;
        one.x = a->x + r * a->x_stride, one.positions = a->positions + r, one.n_rows = 1;
        if (*one.positions >= 0) self.host->rope(&one, 0, 1);
    }
}

static void run_store(const struct td_kv_store_args *a)
{
    for (int32_t r = 0; r < a->n_rows; r++) {
        struct td_kv_store_args one = *a;
        one.k = a->k + r * a->k_stride, one.v = a->v + r * a->v_stride,
        one.positions = a->positions + r, one.row_seq = a->row_seq + r, one.n_rows = 1;
        if (*one.positions >= 0) self.host->kv_store(&one, 0, 1);
    }
}

static void run_attn(const struct td_attn_args *a)
{
    /* attn_plan recorded its arguments, which must equal those of this entry */
    const int32_t *plan = a->device_plan;
    TD_ASSERT((uintptr_t)plan % 256 == 0 && plan[0] == PLAN_MARK && plan[1] == a->n_rows);
    for (int32_t r = 0; r < a->n_rows; r++) {
        struct td_attn_args one = *a;
        TD_ASSERT(plan[2 + r] == a->positions[r]);
        one.q = a->q + r * a->q_stride, one.out = a->out + r * a->out_stride,
        one.positions = a->positions + r, one.row_seq = a->row_seq + r, one.n_rows = 1;
        if (*one.positions >= 0)
            self.host->attn(&one, 0, 1);
        else
            memset(one.out, 0, (size_t)a->n_heads * (size_t)a->kv.head_dim * sizeof(float));
    }
}

static void run_sample(const struct td_sample_args *a)
{
    struct td_err err;
    if (self.sampler_vocab != a->vocab) {
        td_sampler_destroy(self.sampler);
        TD_ASSERT(td_sampler_create(a->vocab, &self.sampler, &err) == TD_OK);
        self.sampler_vocab = a->vocab;
    }
    for (int32_t i = 0; i < a->n_rows; i++) {
        const struct td_sample_row *r = &a->rows[i];
        struct td_sample_result *out = &a->results[i];
        if (r->logits_row < 0) continue;
        static struct td_logit_bias bias[TD_MAX_LOGIT_BIAS];
        for (int32_t k = 0; k < r->n_bias; k++)
            bias[k] = (struct td_logit_bias){r->bias[k].token, r->bias[k].bias};
        struct td_sampling s = {.temperature = r->temperature,
                                .top_k = r->top_k,
                                .top_p = r->top_p,
                                .min_p = r->min_p,
                                .repetition_penalty = r->repetition_penalty,
                                .presence_penalty = r->presence_penalty,
                                .frequency_penalty = r->frequency_penalty,
                                .seed = r->seed,
                                .n_logprobs = r->n_logprobs,
                                .logit_bias = bias,
                                .n_logit_bias = r->n_bias};
        struct td_sampled got = {0};
        out->status = td_sample(self.sampler, &s, a->logits + r->logits_row * a->logits_stride,
                                r->tokens, r->n_tokens, r->n_prompt, &got);
        out->token = got.token, out->logprob = got.logprob, out->n_top = got.n_top;
        memcpy(out->top_tokens, got.top_tokens, sizeof out->top_tokens);
        memcpy(out->top_logprobs, got.top_logprobs, sizeof out->top_logprobs);
    }
}

static void run(struct entry *e)
{
    const struct td_ops *h = self.host;
    if (e->kind == PREPARE || e->kind == GEMM) e->u.gemm.a.w = &e->u.gemm.w;
    switch (e->kind) {
    case PUT:
    case GET:
        memcpy(e->u.copy.to, e->u.copy.from, e->u.copy.bytes);
        break;
    case PREPARE:
        h->gemm_prepare(&e->u.gemm.a, 0, 1);
        break;
    case GEMM:
        h->gemm(&e->u.gemm.a, 0, 1);
        break;
    case NORM:
        h->rmsnorm(&e->u.norm, 0, 1);
        break;
    case ROPE:
        run_rope(&e->u.rope);
        break;
    case STORE:
        run_store(&e->u.store);
        break;
    case ATTN:
        run_attn(&e->u.attn);
        break;
    case SILU:
        h->silu_mul(e->u.silu.out, e->u.silu.gate, e->u.silu.up, e->u.silu.n_rows, e->u.silu.dim,
                    e->u.silu.out_stride, e->u.silu.gate_stride, e->u.silu.up_stride, 0, 1);
        break;
    case EMBED:
        h->embed(e->u.embed.out, e->u.embed.table, e->u.embed.dtype, e->u.embed.ids,
                 e->u.embed.n_rows, e->u.embed.dim, 0, 1);
        break;
    case SAMPLE:
        run_sample(&e->u.sample);
        break;
    case MARK:
        self.n_marks_run++;
        break;
    }
}

/* What is pending, in order, up to so many marks. */
static td_status run_upto(int32_t n_marks, struct td_err *err)
{
    if (++self.n_waits == self.fail_at) self.is_lost = true;
    if (self.is_lost) return lost(err);
    protect(PROT_READ | PROT_WRITE);
    while (self.n_run < self.pending.n && self.n_marks_run < n_marks)
        run(&self.pending.entries[self.n_run++]);
    protect(PROT_NONE);
    return TD_OK;
}

static td_status wait_all(struct td_err *err)
{
    td_status s = run_upto(INT32_MAX, err);
    if (!s) self.pending.n = self.n_run = 0;
    return s;
}

static void mark(void)
{
    TD_ASSERT(!self.graph && self.n_marks < TD_DEVICE_MARKS_MAX);
    self.n_marks++;
    issue(blank(MARK));
}

static td_status wait_mark(int32_t n, struct td_err *err)
{
    TD_ASSERT(!self.in_step && n >= 0 && n < self.n_marks);
    return run_upto(n + 1, err);
}

/* ---- entries --------------------------------------------------------------------------------- */

static void gemm_entry(enum kind kind, const struct td_gemm_args *a)
{
    struct entry e = blank(kind);
    e.u.gemm.a.x = a->x, e.u.gemm.a.y = a->y, e.u.gemm.a.bias = a->bias,
    e.u.gemm.a.scratch = a->scratch, e.u.gemm.a.n_rows = a->n_rows;
    e.u.gemm.a.x_stride = a->x_stride, e.u.gemm.a.y_stride = a->y_stride,
    e.u.gemm.a.accumulate = a->accumulate;
    e.u.gemm.w.data = a->w->data, e.u.gemm.w.n_out = a->w->n_out, e.u.gemm.w.n_in = a->w->n_in,
    e.u.gemm.w.format = a->w->format;
    issue(e);
}

static void one_part(int part, int n_parts) { TD_ASSERT(part == 0 && n_parts == 1); }

static void d_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    one_part(part, n_parts);
    gemm_entry(PREPARE, a);
}

static void d_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    one_part(part, n_parts);
    gemm_entry(GEMM, a);
}

static void d_norm(const struct td_rmsnorm_args *a, int part, int n_parts)
{
    struct entry e = blank(NORM);
    one_part(part, n_parts);
    e.u.norm.x = a->x, e.u.norm.w = a->w, e.u.norm.out = a->out, e.u.norm.n_rows = a->n_rows,
    e.u.norm.dim = a->dim;
    e.u.norm.x_stride = a->x_stride, e.u.norm.out_stride = a->out_stride, e.u.norm.eps = a->eps;
    issue(e);
}

static void d_rope(const struct td_rope_args *a, int part, int n_parts)
{
    struct entry e = blank(ROPE);
    one_part(part, n_parts);
    e.u.rope.x = a->x, e.u.rope.cos_sin = a->cos_sin, e.u.rope.positions = a->positions,
    e.u.rope.n_rows = a->n_rows, e.u.rope.n_heads = a->n_heads;
    e.u.rope.head_dim = a->head_dim, e.u.rope.x_stride = a->x_stride;
    issue(e);
}

static void set_view(struct td_kv_view *to, const struct td_kv_view *v)
{
    to->base = v->base, to->block_bytes = v->block_bytes, to->n_kv_heads = v->n_kv_heads,
    to->block_size = v->block_size, to->head_dim = v->head_dim, to->dtype = v->dtype;
}

static void d_store(const struct td_kv_store_args *a, int part, int n_parts)
{
    struct entry e = blank(STORE);
    struct td_kv_store_args *t = &e.u.store;
    one_part(part, n_parts);
    set_view(&t->kv, &a->kv);
    t->k = a->k, t->v = a->v, t->k_stride = a->k_stride, t->v_stride = a->v_stride,
    t->positions = a->positions, t->row_seq = a->row_seq;
    t->block_tables = a->block_tables, t->n_rows = a->n_rows;
    issue(e);
}

static void d_attn(const struct td_attn_args *a, int part, int n_parts)
{
    struct entry e = blank(ATTN);
    struct td_attn_args *t = &e.u.attn;
    one_part(part, n_parts);
    set_view(&t->kv, &a->kv);
    t->q = a->q, t->out = a->out, t->q_stride = a->q_stride, t->out_stride = a->out_stride,
    t->positions = a->positions, t->row_seq = a->row_seq;
    t->block_tables = a->block_tables, t->n_rows = a->n_rows, t->n_heads = a->n_heads,
    t->scale = a->scale, t->sliding_window = a->sliding_window, t->scratch = a->scratch;
    t->scratch_bytes_per_part = a->scratch_bytes_per_part, t->device_plan = a->device_plan;
    const int32_t *plan = a->plan;
    TD_ASSERT(plan[0] == PLAN_MARK && plan[1] == a->n_rows);
    issue(e);
}

static void d_silu(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                   int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                   int n_parts)
{
    struct entry e = blank(SILU);
    one_part(part, n_parts);
    e.u.silu.out = out, e.u.silu.gate = gate, e.u.silu.up = up, e.u.silu.n_rows = n_rows,
    e.u.silu.dim = dim;
    e.u.silu.out_stride = out_stride, e.u.silu.gate_stride = gate_stride,
    e.u.silu.up_stride = up_stride;
    issue(e);
}

static void d_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                    int32_t n_rows, int32_t dim, int part, int n_parts)
{
    struct entry e = blank(EMBED);
    one_part(part, n_parts);
    e.u.embed.out = out, e.u.embed.table = table, e.u.embed.dtype = dtype, e.u.embed.ids = ids,
    e.u.embed.n_rows = n_rows, e.u.embed.dim = dim;
    issue(e);
}

static void d_sample(const struct td_sample_args *a)
{
    struct entry e = blank(SAMPLE);
    struct td_sample_args *t = &e.u.sample;
    t->logits = a->logits, t->logits_stride = a->logits_stride, t->vocab = a->vocab,
    t->n_rows = a->n_rows, t->features = a->features, t->rows = a->rows;
    t->results = a->results, t->scratch = a->scratch;
    issue(e);
}

static size_t sample_scratch_bytes(int32_t max_rows, int32_t vocab)
{
    (void)vocab;
    return (size_t)max_rows * 64;
}

static td_status sample_clear(void *scratch, int32_t max_rows, int32_t vocab, struct td_err *err)
{
    (void)scratch, (void)max_rows, (void)vocab, (void)err;
    return TD_OK;
}

static size_t attn_plan_bytes(int32_t max_rows, int32_t n_kv_heads)
{
    (void)n_kv_heads;
    return (2 + (size_t)max_rows) * 4;
}

/* The shape includes whether any sequence is past 64 tokens, so that one number of rows has two
 * shapes. */
static void attn_plan(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape)
{
    int32_t *plan = ret_plan;
    plan[0] = PLAN_MARK;
    plan[1] = a->n_rows;
    *ret_shape = 0;
    for (int32_t i = 0; i < a->n_rows; i++) {
        plan[2 + i] = a->positions[i];
        if (a->positions[i] >= 64) *ret_shape = 1;
    }
}

static void close_device(void)
{
    /* all memory came back */
    for (int i = 0; i < REGIONS_MAX; i++) TD_ASSERT(!self.regions[i].base);
    for (size_t i = 0; i < self.n_graphs; i++) free(self.graphs[i].list.entries);
    free(self.graphs);
    free(self.step.entries);
    free(self.pending.entries);
    td_sampler_destroy(self.sampler);
    memset(&self, 0, sizeof self);
}

td_cuda_open_fn td_cuda_open;

static struct td_device device_table(bool deterministic)
{
    return (struct td_device){.has_coded_kv = true,
                              .info = {.name = "deferred",
                                       .uuid = "GPU-0",
                                       .index = 0,
                                       .cc_major = 9,
                                       .n_sms = 4,
                                       .memory_bytes = self.total_bytes,
                                       .is_emulated = true,
                                       .is_deterministic = deterministic},
                              .alloc = alloc,
                              .release = release,
                              .alloc_pinned = alloc_pinned,
                              .release_pinned = free,
                              .free_bytes = free_bytes,
                              .upload = upload,
                              .download = download,
                              .step_begin = step_begin,
                              .put = put,
                              .get = get,
                              .step_end = step_end,
                              .wait = wait_all,
                              .mark = mark,
                              .wait_mark = wait_mark,
                              .sample_scratch_bytes = sample_scratch_bytes,
                              .sample_clear = sample_clear,
                              .sample = d_sample,
                              .close = close_device};
}

static struct td_ops ops_table(const struct td_ops *host)
{
    return (struct td_ops){.name = "deferred",
                           .device = &self.device,
                           .packed_bytes = host->packed_bytes,
                           .pack = host->pack,
                           .gemm_scratch_bytes = host->gemm_scratch_bytes,
                           .gemm_prepare = d_prepare,
                           .gemm = d_gemm,
                           .rmsnorm = d_norm,
                           .rope = d_rope,
                           .kv_store = d_store,
                           .attn_scratch_bytes = host->attn_scratch_bytes,
                           .attn = d_attn,
                           .attn_plan_bytes = attn_plan_bytes,
                           .attn_plan = attn_plan,
                           .silu_mul = d_silu,
                           .embed = d_embed};
}

__attribute__((visibility("default"))) td_status td_cuda_open(uint32_t abi,
                                                              const struct td_device_config *config,
                                                              const struct td_ops **ret_ops,
                                                              struct td_err *err)
{
    if (abi != TD_CUDA_ABI)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "this library's interface has number %u, the program's %u", TD_CUDA_ABI,
                       abi);
    if (self.host) return td_fail(err, TD_ERR_INVALID, "the device is open already");
    if (config->index != 0)
        return td_fail(err, TD_ERR_INVALID, "CUDA device index %d: there is 1, numbered from 0",
                       config->index);
    const char *fail_at = getenv("TD_DEFERRED_FAIL_AT");
    /* What is tested here is the order of calls, and not the products: the faster table will do. */
    const struct td_ops *host = td_ops_by_name("avx2");
    if (!host) host = td_ops_by_name("ref");
    self.host = host;
    self.fail_at = fail_at ? strtoull(fail_at, NULL, 10) : 0;
    self.total_bytes = (uint64_t)256 << 20;
    self.graphs = calloc(GRAPHS_MAX, sizeof *self.graphs);
    if (!self.graphs) return td_fail(err, TD_ERR_NOMEM, "no memory");
    self.device = device_table(config->deterministic);
    self.ops = ops_table(host);
    *ret_ops = &self.ops;
    return TD_OK;
}
