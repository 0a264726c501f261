/* comm.cu - ranks: one process per device, NCCL between them (tensor parallelism). NCCL is opened when it is needed.
 *
 * NCCL's own sum adds in an order that follows from an element's place in the message and from the message's size, so with three ranks or more a
 * row's bits would depend on the batch (I1). Two terms have one sum. So all_reduce_sum is NCCL's for two ranks, or where the device need not be
 * deterministic; else
 *
 *     send slice r of x to rank r, receive own slice of all | add them in order of ranks | send the sum to all, receive theirs
 *
 * which moves the same 2 (n - 1) / n of the bytes. Everything is issued to the compute stream, in order with the entries, and may be recorded in a
 * graph.
 *
 * A rank that is dead leaves the others' entries waiting on the device. Who learns of it by other ways calls abort from another thread, after
 * which the entries end, `wait` returns, and the device counts as lost. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

#ifndef TD_CUDA_EMULATE
#include <dlfcn.h>
#include <nccl.h>

#define NCCL_LIBRARY "libnccl.so.2"
#define NCCL_FUNCTIONS(X) \
    X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommAbort) X(ncclCommDestroy) X(ncclAllReduce) X(ncclSend) X(ncclRecv) X(ncclGroupStart) \
    X(ncclGroupEnd) X(ncclGetErrorString) X(ncclGetLastError)

static struct {
    void *library;
#define NCCL_MEMBER(name) decltype(&::name) name;
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
} nccl;

static struct {
    ncclComm_t comm; /* NULL: alone; taken by abort, which may be another thread's */
    int32_t rank, n_ranks;
    float *scratch;  /* [n_ranks] slices */
    size_t max_floats;
} self;

static_assert(TD_DEVICE_RANK_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "NCCL's id goes through the table as it is");

static td_status load(struct td_err *err)
{
    if (nccl.library) return TD_OK;
    nccl.library = dlopen(NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!nccl.library) return td_fail(err, TD_ERR_UNSUPPORTED, "tp: NCCL is needed between devices and does not load (%s)", dlerror());
    const char *missing = NULL;
#define NCCL_FIND(name) \
    if (!(nccl.name = (decltype(nccl.name))dlsym(nccl.library, #name))) missing = #name;
    NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    return missing ? td_fail(err, TD_ERR_UNSUPPORTED, "tp: " NCCL_LIBRARY " has no %s: it is of another version than this library was built with",
                             missing)
                   : TD_OK;
}

/* A failed call loses the device, as a failed launch does: nothing of this process' steps can be relied on. */
static bool ok(ncclResult_t r, const char *label)
{
    return r == ncclSuccess || td_cuda_ok(cudaErrorUnknown, label);
}

static td_status new_id(uint8_t *ret_id, struct td_err *err)
{
    ncclUniqueId id;
    td_status s = load(err);
    if (s) return s;
    ncclResult_t r = nccl.ncclGetUniqueId(&id);
    if (r != ncclSuccess) return td_fail(err, TD_ERR_DEVICE, "tp: NCCL gives no id: %s", nccl.ncclGetErrorString(r));
    memcpy(ret_id, &id, sizeof id);
    return TD_OK;
}

static td_status join(const uint8_t *id_bytes, const struct td_device_group *g, size_t max_floats, struct td_err *err)
{
    int32_t rank = g->rank, n_ranks = g->n_ranks;
    ncclUniqueId id;
    td_status s = load(err);
    if (s) return s;
    memcpy(&id, id_bytes, sizeof id);
    size_t bytes = (max_floats + (size_t)n_ranks * 4) * sizeof(float);
    cudaError_t e = cudaSetDevice(td_cuda.index);
    if (e == cudaSuccess) e = cudaMalloc((void **)&self.scratch, bytes);
    if (e != cudaSuccess) return td_fail(err, TD_ERR_NOMEM, "tp: %zu bytes for sums over ranks: %s", bytes, cudaGetErrorString(e));
    ncclResult_t r = nccl.ncclCommInitRank(&self.comm, n_ranks, id, rank);
    if (r != ncclSuccess) {
        (void)cudaFree(self.scratch);
        self.scratch = NULL, self.comm = NULL;
        return td_fail(err, TD_ERR_DEVICE, "tp: rank %d of %d does not join over NCCL: %s (%s)", (int)rank, (int)n_ranks, nccl.ncclGetErrorString(r),
                       nccl.ncclGetLastError(NULL));
    }
    self.rank = rank, self.n_ranks = n_ranks, self.max_floats = max_floats;
    return TD_OK;
}

/* x[i] = x of rank 0 + x of rank 1 + ..., of the own slice; the other ranks' lie in scratch, `stride` apart. */
static __global__ void sum_ranks_kernel(float *x, const float *scratch, int64_t n, int64_t stride, int32_t rank, int32_t n_ranks)
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

static void sum_in_order(ncclComm_t comm, float *x, size_t n)
{
    size_t each = (n / (size_t)self.n_ranks + 4) / 4 * 4, mine = slice_at(n, each, self.rank), n_mine = slice_at(n, each, self.rank + 1) - mine;
    bool good = ok(nccl.ncclGroupStart(), "tp: group");
    for (int32_t r = 0; r < self.n_ranks && good; r++) {
        size_t at = slice_at(n, each, r), len = slice_at(n, each, r + 1) - at;
        if (r == self.rank) continue;
        if (len) good = ok(nccl.ncclSend(x + at, len, ncclFloat, r, comm, td_cuda.compute), "tp: send parts");
        if (good && n_mine)
            good = ok(nccl.ncclRecv(self.scratch + (size_t)r * each, n_mine, ncclFloat, r, comm, td_cuda.compute), "tp: receive parts");
    }
    good = ok(nccl.ncclGroupEnd(), "tp: exchange of parts") && good;
    if (good && n_mine) {
        TD_LAUNCH(sum_ranks_kernel, dim3((unsigned)((n_mine + 255) / 256)), dim3(256), 0, td_cuda.compute, x + mine, self.scratch, (int64_t)n_mine,
                  (int64_t)each, self.rank, self.n_ranks);
        TD_LAUNCHED("tp: sum over ranks");
    }
    good = good && ok(nccl.ncclGroupStart(), "tp: group");
    if (!good) return;
    for (int32_t r = 0; r < self.n_ranks && good; r++) {
        size_t at = slice_at(n, each, r), len = slice_at(n, each, r + 1) - at;
        if (r == self.rank) continue;
        if (n_mine) good = ok(nccl.ncclSend(x + mine, n_mine, ncclFloat, r, comm, td_cuda.compute), "tp: send sums");
        if (good && len) good = ok(nccl.ncclRecv(x + at, len, ncclFloat, r, comm, td_cuda.compute), "tp: receive sums");
    }
    (void)ok(nccl.ncclGroupEnd(), "tp: exchange of sums");
}

static void all_reduce_sum(float *x, size_t n)
{
    ncclComm_t comm = __atomic_load_n(&self.comm, __ATOMIC_ACQUIRE);
    if (!comm || n == 0) return;
    TD_ASSERT(n <= self.max_floats);
    if (self.n_ranks == 2 || !td_cuda.is_deterministic)
        (void)ok(nccl.ncclAllReduce(x, x, n, ncclFloat, ncclSum, comm, td_cuda.compute), "tp: sum over ranks");
    else sum_in_order(comm, x, n);
}

/* A column block per rank goes tight over the wire and is spread by a strided copy. */
static void gather_columns(const float *mine, int32_t n_rows, const int32_t *first, float *out)
{
    ncclComm_t comm = __atomic_load_n(&self.comm, __ATOMIC_ACQUIRE);
    if (!comm) return;
    size_t rows = (size_t)n_rows, width = (size_t)(first[self.rank + 1] - first[self.rank]), stride = (size_t)first[self.n_ranks];
    if (self.rank > 0) {
        if (width) (void)ok(nccl.ncclSend(mine, rows * width, ncclFloat, 0, comm, td_cuda.compute), "tp: send logits");
        return;
    }
    TD_ASSERT(rows * (stride - width) <= self.max_floats);
    bool good = ok(nccl.ncclGroupStart(), "tp: group");
    for (int32_t r = 1; r < self.n_ranks && good; r++) {
        size_t w = (size_t)(first[r + 1] - first[r]), at = rows * (size_t)(first[r] - first[1]);
        if (w) good = ok(nccl.ncclRecv(self.scratch + at, rows * w, ncclFloat, r, comm, td_cuda.compute), "tp: receive logits");
    }
    good = ok(nccl.ncclGroupEnd(), "tp: logits of all ranks") && good;
    for (int32_t r = 1; r < self.n_ranks && good; r++) {
        size_t w = (size_t)(first[r + 1] - first[r]), at = rows * (size_t)(first[r] - first[1]);
        if (w)
            good = td_cuda_ok(
                cudaMemcpy2DAsync(out + first[r], stride * 4, self.scratch + at, w * 4, w * 4, rows, cudaMemcpyDeviceToDevice, td_cuda.compute),
                "tp: logits to their columns");
    }
}

static void abort_ranks(void)
{
    ncclComm_t comm = __atomic_exchange_n(&self.comm, (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
    if (!comm) return;
    (void)td_cuda_ok(cudaErrorUnknown, "tp: another rank is lost");
    (void)nccl.ncclCommAbort(comm);
}

static void leave(void)
{
    ncclComm_t comm = __atomic_exchange_n(&self.comm, (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
    if (comm) (void)nccl.ncclCommDestroy(comm);
    if (self.scratch) (void)cudaFree(self.scratch);
    self.scratch = NULL;
}

#else /* emulated: the ranks' own communicator, called by the stream in order with the entries */

struct call {
    float *x, *out;
    size_t n;
    const int32_t *first; /* NULL: a sum */
};

static struct td_device_group group;

static void run_call(void *arg)
{
    struct call *c = (struct call *)arg;
    td_status s = c->first ? group.gather_columns(group.ctx, c->x, (int32_t)c->n, c->first, c->out) : group.all_reduce_sum(group.ctx, c->x, c->n);
    if (s) (void)td_cuda_ok(cudaErrorUnknown, "tp: another rank is lost");
    free(c);
}

static void issue(float *x, size_t n, const int32_t *first, float *out)
{
    struct call *c = (struct call *)malloc(sizeof *c);
    if (!c) {
        (void)td_cuda_ok(cudaErrorMemoryAllocation, "tp: a call");
        return;
    }
    c->x = x, c->n = n, c->first = first, c->out = out;
    if (!td_cuda_ok(cudaLaunchHostFunc(td_cuda.compute, run_call, c), "tp: a call")) free(c);
}

static td_status new_id(uint8_t *ret_id, struct td_err *err)
{
    (void)err;
    memset(ret_id, 0, TD_DEVICE_RANK_ID_BYTES);
    return TD_OK;
}

static td_status join(const uint8_t *id, const struct td_device_group *g, size_t max_floats, struct td_err *err)
{
    (void)id, (void)max_floats, (void)err;
    group = *g;
    return TD_OK;
}

static void all_reduce_sum(float *x, size_t n)
{
    issue(x, n, NULL, NULL);
}

static void gather_columns(const float *mine, int32_t n_rows, const int32_t *first, float *out)
{
    issue((float *)(uintptr_t)mine, (size_t)n_rows, first, out);
}

static void abort_ranks(void) {}

static void leave(void)
{
    memset(&group, 0, sizeof group);
}
#endif

static const struct td_device_ranks ranks = {new_id, join, all_reduce_sum, gather_columns, abort_ranks, leave};

const struct td_device_ranks *td_cuda_ranks(void)
{
    return &ranks;
}
