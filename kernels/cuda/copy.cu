/* copy.cu - what KV transfer does with the device's memory (common/base/device_memory.h): copies
 * beside the steps, handles for other processes, dma-bufs.
 *
 * There is one stream per kind of copy (enum td_device_copy), so that both copy engines and the
 * device's own bandwidth are used at the same time. Within a stream tickets end in order. A ticket
 * is the number of its batch on its stream, with an event recorded behind the batch. At most
 * N_EVENTS batches may be in flight on each stream; one more waits for the oldest.
 *
 * Batches. Copies of KV blocks are few and large (a MiB each), or many and small (a shard's block
 * of 16 KiB). A cudaMemcpyAsync costs the host and the copy engine some microseconds whatever its
 * size, so one kernel moves all small ones instead: a block of threads for each run, 16 bytes a
 * thread where the run is aligned. The kernel reaches page-locked memory by its host address.
 * SMALL_RUN is the size from which a copy of its own is expected to be as fast (25 GB/s x 2.5 us);
 * it is to be measured on a card (`tandem bench xfer --device cuda` has both).
 *
 * An error of a copy loses the device (td_cuda_ok). An error of export, open or dmabuf is an
 * answer: it is cleared, and returned with its reason. */
#include <pthread.h>
#include <stdio.h>

#include "kernels/cuda/cuda.h"

#define N_STREAMS 3 /* enum td_device_copy */
#define N_EVENTS 32
#define SMALL_RUN ((size_t)64 << 10)
#define TABLE_RUNS 2048 /* runs of one launch */
/* page-locked lists of runs; each may be in use by one launch in flight */
#define N_TABLES 8

struct lane {
    cudaStream_t stream;
    cudaEvent_t event[N_EVENTS]; /* the event of batch n is event[n % N_EVENTS] */
    uint64_t n_issued;           /* under issue_locks */
    uint64_t n_done;             /* atomic; only grows */
    struct td_device_run *table[N_TABLES];
    uint64_t table_of[N_TABLES]; /* the batch that reads each table; under issue_locks */
};

static struct {
    struct td_device_memory memory;
    struct lane lane[N_STREAMS];
} self;
/* One lock per stream, held while a batch is issued, which may wait for an older batch of the same
 * stream. `done`, `wait` and other streams never take it. */
static pthread_mutex_t issue_locks[N_STREAMS] = {
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};

static __global__ void copy_runs(const struct td_device_run *runs)
{
    const struct td_device_run r = runs[blockIdx.x];
    uint8_t *to = (uint8_t *)r.to;
    const uint8_t *from = (const uint8_t *)r.from;
    size_t at = 0;
    if ((((uintptr_t)to | (uintptr_t)from) & 15) == 0) {
        at = r.bytes & ~(size_t)15;
        for (size_t i = (size_t)threadIdx.x * 16; i < at; i += (size_t)blockDim.x * 16)
            *(uint4 *)(to + i) = *(const uint4 *)(from + i);
    }
    for (size_t i = at + threadIdx.x; i < r.bytes; i += blockDim.x) to[i] = from[i];
}

static bool is_lost(void) { return !td_cuda_ok(cudaSuccess, ""); }

/* Selects the device for the calling thread, which may be any. */
static bool on_device(void)
{
    return !is_lost() && td_cuda_ok(cudaSetDevice(td_cuda.index), "copy: cudaSetDevice");
}

static bool lane_is_done(const struct lane *l, uint64_t n)
{
    return n <= __atomic_load_n(&l->n_done, __ATOMIC_ACQUIRE);
}

static void lane_set_done(struct lane *l, uint64_t n)
{
    uint64_t before = __atomic_load_n(&l->n_done, __ATOMIC_RELAXED);
    while (before < n && !__atomic_compare_exchange_n(&l->n_done, &before, n, true,
                                                      __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        continue;
}

/* Blocks until batches up to n of the stream are done. Its event may have been recorded again
 * meanwhile, for batch n + N_EVENTS: that happens only when n is done. */
static bool lane_wait(struct lane *l, uint64_t n)
{
    if (lane_is_done(l, n)) return true;
    if (!td_cuda_ok(cudaEventSynchronize(l->event[n % N_EVENTS]), "KV copy")) return false;
    lane_set_done(l, n);
    return true;
}

/* A table that no launch reads any more. The stream's lock is held. */
static int take_table(struct lane *l, uint64_t batch)
{
    int oldest = 0;
    for (int i = 1; i < N_TABLES; i++)
        if (l->table_of[i] < l->table_of[oldest]) oldest = i;
    /* all tables belong to this batch, which has no event yet */
    if (l->table_of[oldest] == batch) {
        if (!td_cuda_ok(cudaStreamSynchronize(l->stream), "KV copy")) return -1;
    } else if (!lane_wait(l, l->table_of[oldest])) {
        return -1;
    }
    l->table_of[oldest] = batch;
    return oldest;
}

static bool launch_small(struct lane *l, uint64_t batch, const struct td_device_run *runs,
                         size_t n_runs)
{
    for (size_t i = 0; i < n_runs;) {
        int t = take_table(l, batch);
        unsigned n = 0;
        if (t < 0) return false;
        for (; i < n_runs && n < TABLE_RUNS; i++)
            if (runs[i].bytes < SMALL_RUN) l->table[t][n++] = runs[i];
        if (!n) return true;
        TD_LAUNCH(copy_runs, dim3(n), dim3(256), 0, l->stream, l->table[t]);
        if (!td_cuda_ok(cudaGetLastError(), "copy_runs")) return false;
    }
    return true;
}

static bool issue(struct lane *l, enum td_device_copy kind, const struct td_device_run *runs,
                  size_t n_runs)
{
    static const enum cudaMemcpyKind kinds[N_STREAMS] = {
        cudaMemcpyDeviceToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice};
    uint64_t batch = l->n_issued + 1;
    size_t n_small = 0;
    for (size_t i = 0; i < n_runs; i++) n_small += runs[i].bytes < SMALL_RUN;
    bool together = n_small >= 4;
    if (batch > N_EVENTS && !lane_wait(l, batch - N_EVENTS)) return false;
    if (together && !launch_small(l, batch, runs, n_runs)) return false;
    for (size_t i = 0; i < n_runs; i++) {
        if (together && runs[i].bytes < SMALL_RUN) continue;
        if (!td_cuda_ok(
                cudaMemcpyAsync(runs[i].to, runs[i].from, runs[i].bytes, kinds[kind], l->stream),
                "KV copy"))
            return false;
    }
    if (!td_cuda_ok(cudaEventRecord(l->event[batch % N_EVENTS], l->stream), "KV copy"))
        return false;
    l->n_issued = batch;
    return true;
}

static td_status copy(void *ctx, enum td_device_copy kind, const struct td_device_run *runs,
                      size_t n_runs, uint64_t *ret_ticket, struct td_err *err)
{
    (void)ctx;
    struct lane *l = &self.lane[kind];
    pthread_mutex_lock(&issue_locks[kind]);
    bool ok = on_device() && issue(l, kind, runs, n_runs);
    if (ok) *ret_ticket = l->n_issued << 2 | (uint64_t)kind;
    pthread_mutex_unlock(&issue_locks[kind]);
    return ok ? TD_OK : td_cuda_lost(err);
}

static td_status done(void *ctx, uint64_t ticket, struct td_err *err)
{
    (void)ctx;
    struct lane *l = &self.lane[ticket & 3];
    uint64_t n = ticket >> 2;
    if (!on_device()) return td_cuda_lost(err);
    if (lane_is_done(l, n)) return TD_OK;
    cudaError_t e = cudaEventQuery(l->event[n % N_EVENTS]);
    if (e == cudaErrorNotReady)
        /* or the event is that of a later batch: the next call finds n done */
        return TD_INPROGRESS;
    if (!td_cuda_ok(e, "KV copy")) return td_cuda_lost(err);
    lane_set_done(l, n);
    return TD_OK;
}

static td_status wait_for(void *ctx, uint64_t ticket, struct td_err *err)
{
    (void)ctx;
    return on_device() && lane_wait(&self.lane[ticket & 3], ticket >> 2) ? TD_OK
                                                                         : td_cuda_lost(err);
}

static td_status alloc_pinned(void *ctx, size_t bytes, void **ret_memory, struct td_err *err)
{
    (void)ctx;
    if (!on_device()) return td_cuda_lost(err);
    cudaError_t e = cudaHostAlloc(ret_memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaSuccess) return TD_OK;
    (void)cudaGetLastError();
    return td_fail(err, TD_ERR_NOMEM,
                   "page-locked host memory: %zu bytes for KV transfer asked and refused (%s): "
                   "raise the memory limit of the container",
                   bytes, cudaGetErrorString(e));
}

static void release_pinned(void *ctx, void *memory)
{
    (void)ctx;
    if (on_device()) (void)td_cuda_ok(cudaFreeHost(memory), "cudaFreeHost");
}

static td_status refused(cudaError_t e, const char *what, struct td_err *err)
{
    (void)cudaGetLastError();
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %s (%s)", what, cudaGetErrorName(e),
                   cudaGetErrorString(e));
}

/* copy_runs reaches the memory by the host's address, as it does memory of cudaHostAlloc. */
static td_status pin(void *ctx, void *memory, size_t bytes, struct td_err *err)
{
    int same = 0;
    (void)ctx;
    if (!on_device()) return td_cuda_lost(err);
    cudaError_t e =
        cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, td_cuda.index);
    if (e != cudaSuccess) return refused(e, "cudaDeviceGetAttribute", err);
    if (!same)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "this device reaches memory of the host that was registered at addresses of its own");
    e = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    return e == cudaSuccess ? TD_OK : refused(e, "cudaHostRegister", err);
}

static void unpin(void *ctx, void *memory)
{
    (void)ctx;
    if (on_device()) (void)td_cuda_ok(cudaHostUnregister(memory), "cudaHostUnregister");
}

/* ---- other processes, NICs ---- */

#ifdef TD_CUDA_EMULATE
static bool allocation_of(const void *memory, void **ret_base, struct td_err *err)
{
    (void)err;
    /* the base that cudaMalloc returned; the emulated handle refuses any other */
    *ret_base = (void *)(uintptr_t)memory;
    return true;
}
#else
#include <cuda.h>

/* A function of the driver, looked up by name because this library is not linked with the
 * driver. */
static void *driver(const char *name, unsigned version, struct td_err *err)
{
    void *f = NULL;
    cudaDriverEntryPointQueryResult found;
    cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &found);
    if (e == cudaSuccess && found == cudaDriverEntryPointSuccess && f) return f;
    (void)cudaGetLastError();
    td_fail(err, TD_ERR_UNSUPPORTED, "this driver has no %s", name);
    return NULL;
}

static bool allocation_of(const void *memory, void **ret_base, struct td_err *err)
{
    typedef CUresult range_fn(CUdeviceptr *, size_t *, CUdeviceptr);
    range_fn *range = (range_fn *)driver("cuMemGetAddressRange", 3020, err);
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (!range) return false;
    CUresult r = range(&base, &bytes, (CUdeviceptr)(uintptr_t)memory);
    *ret_base = (void *)(uintptr_t)base;
    if (r != CUDA_SUCCESS)
        td_fail(err, TD_ERR_UNSUPPORTED, "cuMemGetAddressRange of the pool answers %d", (int)r);
    return r == CUDA_SUCCESS;
}

/* Source for the order of calls and for pages: NVIDIA's GPUDirect RDMA guide, "dma-buf". */
static td_status dmabuf(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                        uint64_t *ret_offset, struct td_err *err)
{
    typedef CUresult export_fn(void *, CUdeviceptr, size_t, CUmemRangeHandleType,
                               unsigned long long);
    (void)ctx;
    if (!on_device()) return td_cuda_lost(err);
    int has = 0;
    typedef CUresult attribute_fn(int *, CUdevice_attribute, CUdevice);
    attribute_fn *attribute = (attribute_fn *)driver("cuDeviceGetAttribute", 2000, err);
    if (!attribute) return TD_ERR_UNSUPPORTED;
    if (attribute(&has, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, (CUdevice)td_cuda.index) !=
            CUDA_SUCCESS ||
        !has)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "the driver exports no dma-buf of this device: that takes the open kernel "
                       "modules (nvidia-open) and Linux 5.12 or later");
    export_fn *handle = (export_fn *)driver("cuMemGetHandleForAddressRange", 11070, err);
    if (!handle) return TD_ERR_UNSUPPORTED;
    const uintptr_t page = 65536; /* the largest page size of a host (arm64) */
    uintptr_t begin = (uintptr_t)memory & ~(page - 1),
              end = ((uintptr_t)memory + bytes + page - 1) & ~(page - 1);
    int fd = -1;
    CUresult r =
        handle(&fd, (CUdeviceptr)begin, end - begin, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
    if (r != CUDA_SUCCESS)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "cuMemGetHandleForAddressRange of %zu MiB answers %d", bytes >> 20, (int)r);
    *ret_fd = fd;
    *ret_offset = (uint64_t)((uintptr_t)memory - begin);
    return TD_OK;
}
#endif

static td_status ipc_export(void *ctx, const void *memory,
                            uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                            struct td_err *err)
{
    cudaIpcMemHandle_t h;
    void *base;
    (void)ctx;
    static_assert(sizeof h == TD_DEVICE_HANDLE_BYTES, "a handle travels whole");
    if (!on_device()) return td_cuda_lost(err);
    if (!allocation_of(memory, &base, err)) return TD_ERR_UNSUPPORTED;
    cudaError_t e = cudaIpcGetMemHandle(&h, base);
    if (e != cudaSuccess) return refused(e, "cudaIpcGetMemHandle", err);
    memcpy(ret_handle, &h, sizeof h);
    *ret_offset = (uint64_t)((const uint8_t *)memory - (const uint8_t *)base);
    return TD_OK;
}

static td_status ipc_open(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base,
                          struct td_err *err)
{
    cudaIpcMemHandle_t h;
    (void)ctx;
    if (!on_device()) return td_cuda_lost(err);
    memcpy(&h, handle, sizeof h);
    cudaError_t e = cudaIpcOpenMemHandle(ret_base, h, cudaIpcMemLazyEnablePeerAccess);
    return e == cudaSuccess ? TD_OK : refused(e, "cudaIpcOpenMemHandle", err);
}

static void ipc_close(void *ctx, void *base)
{
    (void)ctx;
    /* on failure its exporter is gone, and nothing is left to give back */
    if (on_device() && cudaIpcCloseMemHandle(base) != cudaSuccess) (void)cudaGetLastError();
}

/* ---- life ---- */

void td_cuda_memory_close(void)
{
    for (int k = 0; k < N_STREAMS; k++) {
        struct lane *l = &self.lane[k];
        if (l->stream) (void)cudaStreamSynchronize(l->stream);
        for (int i = 0; i < N_EVENTS; i++)
            if (l->event[i]) (void)cudaEventDestroy(l->event[i]);
        for (int i = 0; i < N_TABLES; i++)
            if (l->table[i]) (void)cudaFreeHost(l->table[i]);
        if (l->stream) (void)cudaStreamDestroy(l->stream);
    }
    memset(&self, 0, sizeof self);
}

td_status td_cuda_memory_open(const struct td_device_info *info,
                              const struct td_device_memory **ret_memory, struct td_err *err)
{
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    for (int k = 0; k < N_STREAMS && e == cudaSuccess; k++) {
        struct lane *l = &self.lane[k];
        e = cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, least);
        for (int i = 0; i < N_EVENTS && e == cudaSuccess; i++)
            e = cudaEventCreateWithFlags(&l->event[i], cudaEventDisableTiming);
        for (int i = 0; i < N_TABLES && e == cudaSuccess; i++)
            e = cudaHostAlloc((void **)&l->table[i], TABLE_RUNS * sizeof(struct td_device_run),
                              cudaHostAllocPortable | cudaHostAllocMapped);
    }
    if (e != cudaSuccess) {
        td_cuda_memory_close();
        return td_fail(err, e == cudaErrorMemoryAllocation ? TD_ERR_NOMEM : TD_ERR_DEVICE,
                       "CUDA device %d (%s): streams for KV transfer: %s (%s)", td_cuda.index,
                       info->name, cudaGetErrorName(e), cudaGetErrorString(e));
    }
    struct td_device_memory *m = &self.memory;
    memcpy(m->name, info->name, sizeof m->name);
    memcpy(m->uuid, info->uuid, sizeof m->uuid);
    memcpy(m->pci, info->pci, sizeof m->pci);
    m->rdma_order = TD_RDMA_ORDER_NONE;
#ifndef TD_CUDA_EMULATE
    int order = 0;
    if (cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, td_cuda.index) ==
        cudaSuccess)
        m->rdma_order = (enum td_device_rdma_order)order;
    else
        (void)cudaGetLastError();
    m->dmabuf = dmabuf;
#endif
    m->alloc_pinned = alloc_pinned, m->release_pinned = release_pinned;
    m->pin = pin, m->unpin = unpin;
    m->copy = copy, m->done = done, m->wait = wait_for;
    m->ipc_export = ipc_export, m->ipc_open = ipc_open, m->ipc_close = ipc_close;
    *ret_memory = m;
    return TD_OK;
}
