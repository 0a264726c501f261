/* comm.cu - ranks of tensor parallelism: one process per device, NCCL between them. NCCL is opened
 * when it is needed.
 *
 * NCCL's own sum adds in an order that follows from an element's place in the message and from the
 * message's size. With three ranks or more the bits of a row would then depend on the batch (I1);
 * two terms have only one sum. So all_reduce_sum is NCCL's for two ranks, or where the device need
 * not be deterministic. Otherwise it is
 *
 *     1. send slice r of x to rank r, and receive one's own slice of every rank;
 *     2. add those in the order of ranks;
 *     3. send the sum to all ranks, and receive theirs,
 *
 * which moves the same 2 (n - 1) / n of the bytes. Everything is issued to the compute stream, in
 * order with the entries, and may be recorded in a graph.
 *
 * NCCL's rules, and the code that keeps them (tests/fake/nccl_stub.c fails where one is broken):
 *   (1) A communicator outlives every graph that holds its calls: ncclCommDestroy and ncclCommAbort
 *       both spin until the last such graph is gone. So `leave` drops the graphs first, and the
 *       caller of `abort` holds no lock that the thread which drops the graphs might want.
 *   (2) A communicator is destroyed or aborted while no thread is inside another call on it. Calls
 *       go through use_begin .. use_end; abort refuses new ones and then waits ABORT_WAIT_MS for
 *       those inside. A call that is still inside then hangs in NCCL itself, and the abort is what
 *       ends it.
 *   (3) ncclCommInitRank waits for the last rank for ever. So the communicator does not block
 *       (ncclCommInitRankConfig): join polls until all have come or its time is over, and aborts
 *       then. After that every call may return "in progress"; `settled` waits until
 *       ncclCommGetAsyncError says otherwise before the next call is made. NCCL before 2.14 has no
 *       such communicator: there join has no deadline.
 *   (4) An error on the device or on another rank is reported by ncclCommGetAsyncError alone:
 *       forward_device.c calls `check` every 50 ms.
 *
 *     JOINED --abort: refuse new calls, wait for those inside, take the communicator--> ABORTING
 *     ABORTING --the graphs are gone--> LEFT
 *     JOINED --leave: drop the graphs, then as abort, then destroy--> LEFT
 *
 * A dead rank leaves the entries of the others waiting on the device. The thread that learns of the
 * death by other ways calls abort; then the entries end, `wait` returns, and the device counts as
 * lost. */
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/symbols.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/nccl_api.h"

#if !defined(TD_CUDA_EMULATE) && __has_include(<nccl.h>)
#include <nccl.h>
static_assert(TD_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES && sizeof(ncclUniqueId) == TD_NCCL_ID_BYTES,
              "nccl_api.h");
static_assert((int)TD_NCCL_SUCCESS == (int)ncclSuccess &&
                  (int)TD_NCCL_IN_PROGRESS == (int)ncclInProgress &&
                  (int)TD_NCCL_FLOAT == (int)ncclFloat && (int)TD_NCCL_SUM == (int)ncclSum &&
                  (int)TD_NCCL_REMOTE_ERROR == (int)ncclRemoteError,
              "nccl_api.h");
#endif

/* milliseconds in join: the slowest rank has loaded its weights by then, or never will */
#define JOIN_MS_DEFAULT 120000
#define JOIN_MS_NAME "TANDEM_NCCL_JOIN_TIMEOUT_MS"
/* A call in progress for 30 s loses the device. The first call makes connections, which takes a
 * second or two. */
#define CALL_MS 30000
/* Calls on connected ranks return in microseconds: a call that takes 2 s waits for a dead rank. */
#define ABORT_WAIT_MS 2000

static struct {
    void *library;
#define NCCL_MEMBER(name, result, arguments) result(*name) arguments;
    TD_NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    td_nccl_init_config_fn *init_config; /* NULL: the library is too old */
} nccl;

static struct {
    /* NULL: no other ranks. Abort or leave takes it, whichever comes first */
    struct td_nccl_comm *comm;
    int32_t n_inside; /* threads inside a call of NCCL on it */
    bool is_closing;  /* no new calls may begin */
    int32_t rank, n_ranks;
    float *scratch; /* [n_ranks] slices */
    size_t max_floats;
    int32_t n_failures;
    /* the message of the first failed call; static, because td_cuda keeps the pointer */
    char failure[192];
} self;

static_assert(TD_DEVICE_RANK_ID_BYTES == TD_NCCL_ID_BYTES,
              "NCCL's id goes through the table as it is");

/* The emulated GPU has no NCCL; it uses a stand-in of this name. */
static const char *library_name(void)
{
#ifdef TD_CUDA_EMULATE
    const char *stub = getenv("TD_CUDA_EMU_NCCL");
    return stub && *stub ? stub : NULL;
#else
    return TD_NCCL_LIBRARY;
#endif
}

static td_status load(struct td_err *err)
{
    if (nccl.library) return TD_OK;
    void *library =
        td_cuda_open_library(library_name(), "TANDEM_NCCL_LIBRARY", "run with --tp 1", err);
    if (!library) return td_err_prefix(err, "tp: NCCL is needed between devices");
    const char *missing = NULL;
#define NCCL_FIND(name, result, arguments)                                                         \
    td_symbol_find(library, #name, NULL, true, &nccl.name, &missing);
    TD_NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    td_symbol_find(library, TD_NCCL_INIT_CONFIG, NULL, false, &nccl.init_config, &missing);
    if (missing)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "tp: %s has no %s: it is of another version than this library was built for",
                       library_name(), missing);
#ifdef TD_CUDA_EMULATE
    static const struct td_nccl_stub_cuda cuda = {
        (int (*)(void *, void (*)(void *), void *))cudaLaunchHostFunc,
        (int (*)(void *, void (*)(void *), void *))td_emu_graph_attach};
    void (*open)(const struct td_nccl_stub_cuda *);
    td_symbol_find(library, TD_NCCL_STUB_OPEN, NULL, true, &open, &missing);
    if (!open)
        return td_fail(err, TD_ERR_UNSUPPORTED, "tp: %s is no stand-in for NCCL on an emulated GPU",
                       library_name());
    open(&cuda);
#endif
    nccl.library = library;
    return TD_OK;
}

static void use_end(void) { __atomic_sub_fetch(&self.n_inside, 1, __ATOMIC_SEQ_CST); }

/* The communicator for one call, which use_end must follow; NULL: there is none, or it is about to
 * go. Sequentially consistent with use_stop: one of the two sees the other. */
static struct td_nccl_comm *use_begin(void)
{
    __atomic_add_fetch(&self.n_inside, 1, __ATOMIC_SEQ_CST);
    bool is_closing = __atomic_load_n(&self.is_closing, __ATOMIC_SEQ_CST);
    struct td_nccl_comm *comm = is_closing ? NULL : __atomic_load_n(&self.comm, __ATOMIC_SEQ_CST);
    if (!comm) use_end();
    return comm;
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* The final result of a call that returned r: waits while the call is in progress.
 * TD_NCCL_IN_PROGRESS: it still was after CALL_MS, or the communicator is about to go. Between
 * use_begin and use_end. */
static int settled(struct td_nccl_comm *comm, int r)
{
    uint64_t deadline_ms = r == TD_NCCL_IN_PROGRESS ? now_ms() + CALL_MS : 0;
    while (r == TD_NCCL_IN_PROGRESS && !__atomic_load_n(&self.is_closing, __ATOMIC_SEQ_CST) &&
           now_ms() < deadline_ms) {
        int state = TD_NCCL_SUCCESS, asked = nccl.ncclCommGetAsyncError(comm, &state);
        r = asked == TD_NCCL_SUCCESS ? state : asked;
        if (r == TD_NCCL_IN_PROGRESS) (void)sched_yield();
    }
    return r;
}

/* A failed call loses the device, as a failed launch does: no result of this process's steps can be
 * relied on. */
static bool failed(int r, const char *label)
{
    if (__atomic_fetch_add(&self.n_failures, 1, __ATOMIC_RELAXED) == 0) {
        snprintf(self.failure, sizeof self.failure, "%s: NCCL says %s", label,
                 nccl.ncclGetErrorString(r));
        label = self.failure;
    }
    return td_cuda_ok(cudaErrorUnknown, label);
}

/* True: the call that returned r has succeeded. Between use_begin and use_end, as is the next
 * function. */
static bool ok(struct td_nccl_comm *comm, int r, const char *label)
{
    r = settled(comm, r);
    return r == TD_NCCL_SUCCESS ? td_cuda_ok(cudaSuccess, label) : failed(r, label);
}

/* For a call within a group, where NCCL only notes the call: the end of the group returns its
 * result. */
static bool noted(int r, const char *label)
{
    return r == TD_NCCL_IN_PROGRESS || r == TD_NCCL_SUCCESS ? td_cuda_ok(cudaSuccess, label)
                                                            : failed(r, label);
}

/* Takes the communicator, which the caller alone may now end. NULL: another thread has taken it, or
 * there is none. */
static struct td_nccl_comm *use_stop(void)
{
    __atomic_store_n(&self.is_closing, true, __ATOMIC_SEQ_CST);
    uint64_t deadline_ms = now_ms() + ABORT_WAIT_MS;
    while (__atomic_load_n(&self.n_inside, __ATOMIC_SEQ_CST) > 0 && now_ms() < deadline_ms)
        (void)sched_yield();
    return __atomic_exchange_n(&self.comm, (struct td_nccl_comm *)NULL, __ATOMIC_SEQ_CST);
}

static td_status new_id(uint8_t *ret_id, struct td_err *err)
{
    struct td_nccl_id id;
    td_status s = load(err);
    if (s) return s;
    int r = nccl.ncclGetUniqueId(&id);
    if (r != TD_NCCL_SUCCESS)
        return td_fail(err, TD_ERR_DEVICE, "tp: NCCL gives no id: %s", nccl.ncclGetErrorString(r));
    memcpy(ret_id, &id, sizeof id);
    return TD_OK;
}

static td_status read_join_ms(uint64_t *ret_ms, struct td_err *err)
{
    const char *text = getenv(JOIN_MS_NAME);
    char *end;
    *ret_ms = JOIN_MS_DEFAULT;
    if (!text || !*text) return TD_OK;
    unsigned long long ms = strtoull(text, &end, 10);
    if (*end || text[0] == '-' || ms < 100 || ms > 86400000)
        return td_fail(err, TD_ERR_INVALID, "tp: %s is \"%.40s\", must be 100..86400000",
                       JOIN_MS_NAME, text);
    *ret_ms = ms;
    return TD_OK;
}

/* Makes the communicator of all ranks and returns when all have joined. On failure there is
 * none. */
static td_status init_comm(const struct td_nccl_id *id, int32_t rank, int32_t n_ranks,
                           struct td_nccl_comm **ret_comm, struct td_err *err)
{
    struct td_nccl_comm *comm = NULL;
    uint64_t join_ms, begin_ms = now_ms();
    td_status s = read_join_ms(&join_ms, err);
    if (s) return s;
    struct td_nccl_config config = {sizeof config, TD_NCCL_CONFIG_MAGIC, TD_NCCL_CONFIG_VERSION, 0};
    int r = nccl.init_config ? nccl.init_config(&comm, n_ranks, *id, rank, &config)
                             : nccl.ncclCommInitRank(&comm, n_ranks, *id, rank);
    while (r == TD_NCCL_IN_PROGRESS && now_ms() - begin_ms < join_ms) {
        int state = TD_NCCL_SUCCESS, asked = nccl.ncclCommGetAsyncError(comm, &state);
        r = asked == TD_NCCL_SUCCESS ? state : asked;
        if (r == TD_NCCL_IN_PROGRESS) (void)poll(NULL, 0, 1);
    }
    if (r == TD_NCCL_SUCCESS) {
        *ret_comm = comm;
        return TD_OK;
    }
    s = r == TD_NCCL_IN_PROGRESS
            ? td_fail(err, TD_ERR_DEVICE,
                      "tp: rank %d of %d joined over NCCL, and not all others did within %llu ms "
                      "(%s): look at their "
                      "logs",
                      (int)rank, (int)n_ranks, (unsigned long long)join_ms, JOIN_MS_NAME)
            : td_fail(err, TD_ERR_DEVICE, "tp: rank %d of %d does not join over NCCL: %s (%s)",
                      (int)rank, (int)n_ranks, nccl.ncclGetErrorString(r),
                      nccl.ncclGetLastError(NULL));
    /* without init_config, what a failed call leaves in comm is undefined */
    if (comm && nccl.init_config) (void)nccl.ncclCommAbort(comm);
    return s;
}

static td_status join(const uint8_t *id_bytes, const struct td_device_group *g, size_t max_floats,
                      struct td_err *err)
{
    int32_t rank = g->rank, n_ranks = g->n_ranks;
    struct td_nccl_id id;
    td_status s = load(err);
    if (s) return s;
    memcpy(&id, id_bytes, sizeof id);
    size_t bytes = (max_floats + (size_t)n_ranks * 4) * sizeof(float);
    struct td_nccl_comm *comm = NULL;
    cudaError_t e = cudaSetDevice(td_cuda.index);
    if (e == cudaSuccess) e = cudaMalloc((void **)&self.scratch, bytes);
    if (e != cudaSuccess)
        return td_fail(err, TD_ERR_NOMEM, "tp: %zu bytes for sums over ranks: %s", bytes,
                       cudaGetErrorString(e));
    if ((s = init_comm(&id, rank, n_ranks, &comm, err))) {
        (void)cudaFree(self.scratch);
        self.scratch = NULL;
        return s;
    }
    self.rank = rank, self.n_ranks = n_ranks, self.max_floats = max_floats, self.n_failures = 0;
    __atomic_store_n(&self.is_closing, false, __ATOMIC_SEQ_CST);
    __atomic_store_n(&self.comm, comm, __ATOMIC_SEQ_CST);
    return TD_OK;
}

/* x[i] = x of rank 0 + x of rank 1 + ..., for the rank's own slice. The other ranks' slices lie in
 * scratch, `stride` apart. */
static __global__ void sum_ranks_kernel(float *x, const float *scratch, int64_t n, int64_t stride,
                                        int32_t rank, int32_t n_ranks)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = rank == 0 ? x[i] : scratch[i];
    for (int32_t r = 1; r < n_ranks; r++) sum += r == rank ? x[i] : scratch[r * stride + i];
    x[i] = sum;
}

static size_t slice_at(size_t n, size_t each, int32_t r)
{
    return each * (size_t)r < n ? each * (size_t)r : n;
}

static void sum_in_order(struct td_nccl_comm *comm, float *x, size_t n)
{
    size_t each = (n / (size_t)self.n_ranks + 4) / 4 * 4, mine = slice_at(n, each, self.rank),
           n_mine = slice_at(n, each, self.rank + 1) - mine;
    bool good = ok(comm, nccl.ncclGroupStart(), "tp: group");
    for (int32_t r = 0; r < self.n_ranks && good; r++) {
        size_t at = slice_at(n, each, r), len = slice_at(n, each, r + 1) - at;
        if (r == self.rank) continue;
        if (len)
            good = noted(nccl.ncclSend(x + at, len, TD_NCCL_FLOAT, r, comm, td_cuda.compute),
                         "tp: send parts");
        if (good && n_mine)
            good = noted(nccl.ncclRecv(self.scratch + (size_t)r * each, n_mine, TD_NCCL_FLOAT, r,
                                       comm, td_cuda.compute),
                         "tp: receive parts");
    }
    good = ok(comm, nccl.ncclGroupEnd(), "tp: exchange of parts") && good;
    if (good && n_mine) {
        TD_LAUNCH(sum_ranks_kernel, dim3((unsigned)((n_mine + 255) / 256)), dim3(256), 0,
                  td_cuda.compute, x + mine, self.scratch, (int64_t)n_mine, (int64_t)each,
                  self.rank, self.n_ranks);
        TD_LAUNCHED("tp: sum over ranks");
    }
    td_cuda.behind_kernel = false;
    good = good && ok(comm, nccl.ncclGroupStart(), "tp: group");
    if (!good) return;
    for (int32_t r = 0; r < self.n_ranks && good; r++) {
        size_t at = slice_at(n, each, r), len = slice_at(n, each, r + 1) - at;
        if (r == self.rank) continue;
        if (n_mine)
            good = noted(nccl.ncclSend(x + mine, n_mine, TD_NCCL_FLOAT, r, comm, td_cuda.compute),
                         "tp: send sums");
        if (good && len)
            good = noted(nccl.ncclRecv(x + at, len, TD_NCCL_FLOAT, r, comm, td_cuda.compute),
                         "tp: receive sums");
    }
    (void)ok(comm, nccl.ncclGroupEnd(), "tp: exchange of sums");
}

static void all_reduce_sum(float *x, size_t n)
{
    struct td_nccl_comm *comm = n ? use_begin() : NULL;
    if (!comm) return;
    td_cuda.behind_kernel = false;
    TD_ASSERT(n <= self.max_floats);
    if (self.n_ranks == 2 || !td_cuda.is_deterministic)
        (void)ok(comm,
                 nccl.ncclAllReduce(x, x, n, TD_NCCL_FLOAT, TD_NCCL_SUM, comm, td_cuda.compute),
                 "tp: sum over ranks");
    else
        sum_in_order(comm, x, n);
    use_end();
}

/* Each rank's block of columns is sent as one dense array and spread by a strided copy. */
static void gather_on_first(struct td_nccl_comm *comm, size_t rows, const int32_t *first,
                            float *out)
{
    size_t stride = (size_t)first[self.n_ranks];
    TD_ASSERT(rows * (stride - (size_t)(first[1] - first[0])) <= self.max_floats);
    bool good = ok(comm, nccl.ncclGroupStart(), "tp: group");
    if (!good) return;
    for (int32_t r = 1; r < self.n_ranks && good; r++) {
        size_t w = (size_t)(first[r + 1] - first[r]), at = rows * (size_t)(first[r] - first[1]);
        if (w)
            good = noted(
                nccl.ncclRecv(self.scratch + at, rows * w, TD_NCCL_FLOAT, r, comm, td_cuda.compute),
                "tp: receive logits");
    }
    good = ok(comm, nccl.ncclGroupEnd(), "tp: logits of all ranks") && good;
    for (int32_t r = 1; r < self.n_ranks && good; r++) {
        size_t w = (size_t)(first[r + 1] - first[r]), at = rows * (size_t)(first[r] - first[1]);
        if (w)
            good = td_cuda_ok(cudaMemcpy2DAsync(out + first[r], stride * 4, self.scratch + at,
                                                w * 4, w * 4, rows, cudaMemcpyDeviceToDevice,
                                                td_cuda.compute),
                              "tp: logits to their columns");
    }
}

static void gather_columns(const float *mine, int32_t n_rows, const int32_t *first, float *out)
{
    struct td_nccl_comm *comm = use_begin();
    if (!comm) return;
    td_cuda.behind_kernel = false;
    size_t width = (size_t)(first[self.rank + 1] - first[self.rank]);
    if (self.rank == 0)
        gather_on_first(comm, (size_t)n_rows, first, out);
    else if (width)
        (void)ok(
            comm,
            nccl.ncclSend(mine, (size_t)n_rows * width, TD_NCCL_FLOAT, 0, comm, td_cuda.compute),
            "tp: send logits");
    use_end();
}

static td_status check(struct td_err *err)
{
    struct td_nccl_comm *comm = use_begin();
    if (!comm) return TD_OK;
    int error = TD_NCCL_SUCCESS, r = nccl.ncclCommGetAsyncError(comm, &error);
    use_end();
    if (r == TD_NCCL_SUCCESS && (error == TD_NCCL_SUCCESS || error == TD_NCCL_IN_PROGRESS))
        return TD_OK;
    (void)failed(r ? r : error, "tp: an error between ranks");
    return td_cuda_lost(err);
}

static void abort_ranks(void)
{
    (void)td_cuda_ok(cudaErrorUnknown, "tp: another rank is lost");
    struct td_nccl_comm *comm = use_stop();
    if (comm) (void)nccl.ncclCommAbort(comm);
}

/* When td_cuda_drop_graphs returns, the last launches of the graphs have ended: normally, or by an
 * abort. */
static void leave(void)
{
    td_cuda_drop_graphs();
    struct td_nccl_comm *comm = use_stop();
    if (comm)
        (void)(td_cuda_ok(cudaSuccess, "") ? nccl.ncclCommDestroy(comm) : nccl.ncclCommAbort(comm));
    if (self.scratch) (void)cudaFree(self.scratch);
    self.scratch = NULL;
}

static const struct td_device_ranks over_nccl = {
    new_id, join, all_reduce_sum, gather_columns, check, abort_ranks, leave};

/* Without a stand-in the emulated device uses the ranks' own communicator, called by the stream in
 * the order of the entries. */
#ifdef TD_CUDA_EMULATE

struct call {
    float *x, *out;
    size_t n;
    const int32_t *first; /* NULL: a sum */
    struct call *prev, *next;
};

/* A stream whose device is lost runs none of the calls that it still holds, so the calls that have
 * not begun are listed here, under calls_lock, and leave frees them. */
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static struct call *calls;
static struct td_device_group group;

static void unlist(struct call *c)
{
    pthread_mutex_lock(&calls_lock);
    if (c->prev)
        c->prev->next = c->next;
    else
        calls = c->next;
    if (c->next) c->next->prev = c->prev;
    pthread_mutex_unlock(&calls_lock);
}

static void list(struct call *c)
{
    pthread_mutex_lock(&calls_lock);
    c->prev = NULL, c->next = calls;
    if (calls) calls->prev = c;
    calls = c;
    pthread_mutex_unlock(&calls_lock);
}

static void run_call(void *arg)
{
    struct call *c = (struct call *)arg;
    unlist(c);
    td_status s = c->first ? group.gather_columns(group.ctx, c->x, (int32_t)c->n, c->first, c->out)
                           : group.all_reduce_sum(group.ctx, c->x, c->n);
    if (s) (void)td_cuda_ok(cudaErrorUnknown, "tp: another rank is lost");
    free(c);
}

static void issue(float *x, size_t n, const int32_t *first, float *out)
{
    struct call *c = (struct call *)malloc(sizeof *c);
    td_cuda.behind_kernel = false;
    if (!c) {
        (void)td_cuda_ok(cudaErrorMemoryAllocation, "tp: a call");
        return;
    }
    c->x = x, c->n = n, c->first = first, c->out = out;
    list(c);
    if (td_cuda_ok(cudaLaunchHostFunc(td_cuda.compute, run_call, c), "tp: a call")) return;
    unlist(c);
    free(c);
}

static td_status host_new_id(uint8_t *ret_id, struct td_err *err)
{
    (void)err;
    memset(ret_id, 0, TD_DEVICE_RANK_ID_BYTES);
    return TD_OK;
}

static td_status host_join(const uint8_t *id, const struct td_device_group *g, size_t max_floats,
                           struct td_err *err)
{
    (void)id, (void)max_floats, (void)err;
    group = *g;
    return TD_OK;
}

static void host_all_reduce_sum(float *x, size_t n) { issue(x, n, NULL, NULL); }

static void host_gather_columns(const float *mine, int32_t n_rows, const int32_t *first, float *out)
{
    issue((float *)(uintptr_t)mine, (size_t)n_rows, first, out);
}

static void host_abort_ranks(void) {}

static td_status host_check(struct td_err *err)
{
    (void)err;
    return TD_OK;
}

/* The stream has ended: nothing begins a call any more. */
static void host_leave(void)
{
    (void)cudaStreamSynchronize(td_cuda.compute);
    while (calls) {
        struct call *c = calls;
        unlist(c);
        free(c);
    }
    memset(&group, 0, sizeof group);
}

static const struct td_device_ranks over_host = {
    host_new_id, host_join,        host_all_reduce_sum, host_gather_columns,
    host_check,  host_abort_ranks, host_leave};
#endif

const struct td_device_ranks *td_cuda_ranks(void)
{
#ifdef TD_CUDA_EMULATE
    if (!library_name()) return &over_host;
#endif
    return &over_nccl;
}
