/* cuda.cu - opens the device and holds its table, its memory, steps, graphs and errors.
 *
 * States of a step (one owner: the thread that calls step_begin):
 *
 *     IDLE --step_begin(0)-----------------> DIRECT
 *     DIRECT --step_end: nothing left to do--> IDLE
 *     IDLE --step_begin(key), key unknown--> RECORDING
 *     RECORDING --step_end: instantiate, keep, launch--> IDLE
 *     IDLE --step_begin(key), key known----> REPLAY
 *     REPLAY --step_end: launch the kept graph--> IDLE
 *
 * Graphs. At most N_GRAPHS are kept; a new key then replaces the graph that was launched longest
 * ago (LRU). A graph may be destroyed only when it no longer runs. Every launch carries the number
 * of its step, and `wait` remembers the last number that is known to be done, so replacing an old
 * graph costs nothing. Only a cache smaller than one burst of steps without a `wait` would have to
 * wait for the device. Recording is thread-local, so other threads may allocate and copy meanwhile.
 * A kernel that is used for the first time loads while it is recorded; drivers can do that since
 * CUDA 12.3, and this library needs 13.
 *
 * Errors. CUDA reports a failed launch or copy, an ECC error or a dead device late, and then for
 * ever. So the first error is kept with the label of the call that saw it (first_error,
 * first_error_at), and every later call of the table returns TD_ERR_DEVICE with it. A kernel's own
 * failure is seen by a later call; CUDA_LAUNCH_BLOCKING=1 makes the label exact. Running out of
 * memory is not such an error: alloc returns TD_ERR_NOMEM and the device goes on.
 *
 * Copies. upload and download take pageable memory. Pieces of STAGE_BYTES go through two pinned
 * buffers in turn, so that the host copies one piece into its buffer while the other piece is
 * transferred (whether that is faster than the driver's own staging is to be measured: cuda_bench,
 * rows "upload"). They use a stream of their own and wait for that stream alone; one of them runs
 * at a time. They do not wait for entries issued before: call `wait` first where that matters. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant.h"
#include "kernels/cuda/quant_codes.h"

#define N_GRAPHS 64
#define STAGE_BYTES ((size_t)4 << 20)
#define CC_MIN 80

struct td_cuda td_cuda;

struct graph {
    uint64_t key; /* 0: free */
    uint64_t last_step;
    cudaGraphExec_t exec;
};

enum step_state { STEP_IDLE, STEP_DIRECT, STEP_RECORDING, STEP_REPLAY };

static struct {
    bool is_open;
    struct td_device device;
    struct td_ops ops;
    struct td_block_ops quant;
    enum step_state state;
    uint64_t step, n_done; /* the number of the last step begun, and of the last known to be done */
    uint64_t key;
    struct graph graphs[N_GRAPHS], *replay;
    cudaStream_t copy;
    void *stage[2];
    cudaEvent_t stage_free[2];
    cudaEvent_t marks[TD_DEVICE_MARKS_MAX]; /* marks of the current step */
    int32_t n_marks;
} self;
static pthread_mutex_t copy_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- errors ---------------------------------------------------------------------------------- */

static bool is_lost(void)
{
    return __atomic_load_n(&td_cuda.first_error, __ATOMIC_ACQUIRE) != cudaSuccess;
}

bool td_cuda_ok(cudaError_t error, const char *label)
{
    if (error != cudaSuccess) {
        pthread_mutex_lock(&error_lock);
        if (td_cuda.first_error == cudaSuccess) {
            td_cuda.first_error_at = label;
            __atomic_store_n(&td_cuda.first_error, error, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&error_lock);
    }
    return !is_lost();
}

bool td_cuda_allow_shared(const void *kernel, size_t bytes, const char *label)
{
    return td_cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)bytes),
                      label) &&
           td_cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared),
                      label);
}

td_status td_cuda_lost(struct td_err *err)
{
    cudaError_t e = td_cuda.first_error;
    return td_fail(err, TD_ERR_DEVICE,
                   "CUDA device %d (%s) is lost for this process: %s: %s (%s)%s", td_cuda.index,
                   self.device.info.name, td_cuda.first_error_at, cudaGetErrorName(e),
                   cudaGetErrorString(e),
                   e == cudaErrorECCUncorrectable ? "; an uncorrectable memory error: nvidia-smi "
                                                    "-q -d ECC shows it, the device needs a reset"
                                                  : "");
}

/* ---- memory ---------------------------------------------------------------------------------- */

static const char *bytes_text(uint64_t bytes, char *text, size_t text_bytes)
{
    if (bytes >= (uint64_t)1 << 30)
        snprintf(text, text_bytes, "%.2f GiB", (double)bytes / (double)((uint64_t)1 << 30));
    else if (bytes >= (uint64_t)1 << 20)
        snprintf(text, text_bytes, "%.2f MiB", (double)bytes / (double)((uint64_t)1 << 20));
    else
        snprintf(text, text_bytes, "%llu bytes", (unsigned long long)bytes);
    return text;
}

/* Selects the device for the calling thread, which may be any: the runtime's current device is per
 * thread. */
static bool on_device(const char *label)
{
    return !is_lost() && td_cuda_ok(cudaSetDevice(td_cuda.index), label);
}

static td_status device_alloc(size_t bytes, const char *what, void **ret_memory, struct td_err *err)
{
    if (!on_device("alloc")) return td_cuda_lost(err);
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, bytes ? bytes : 1);
    if (e == cudaSuccess) {
        *ret_memory = p;
        return TD_OK;
    }
    (void)cudaGetLastError(); /* clear the error: otherwise the next launch would report it */
    if (e != cudaErrorMemoryAllocation) {
        (void)td_cuda_ok(e, "cudaMalloc");
        return td_cuda_lost(err);
    }
    size_t free_bytes = 0, total_bytes = 0;
    char asked[32], left[32], all[32];
    if (!td_cuda_ok(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"))
        return td_cuda_lost(err);
    return td_fail(err, TD_ERR_NOMEM,
                   "device memory: %s for %s asked, %s of %s are free on CUDA device %d (%s): "
                   "lower the option that sizes it, or free the device (nvidia-smi "
                   "lists who holds memory)",
                   bytes_text(bytes, asked, sizeof asked), what,
                   bytes_text(free_bytes, left, sizeof left),
                   bytes_text(total_bytes, all, sizeof all), td_cuda.index, self.device.info.name);
}

/* Also called on a lost device, where it may fail: whatever can be freed is freed. */
static void device_release(void *memory)
{
    if (!memory) return;
    (void)cudaSetDevice(td_cuda.index);
    (void)td_cuda_ok(cudaFree(memory), "cudaFree");
}

static td_status pinned_alloc(size_t bytes, const char *what, void **ret_memory, struct td_err *err)
{
    if (!on_device("alloc_pinned")) return td_cuda_lost(err);
    void *p = NULL;
    cudaError_t e = cudaMallocHost(&p, bytes ? bytes : 1);
    if (e == cudaSuccess) {
        *ret_memory = p;
        return TD_OK;
    }
    (void)cudaGetLastError();
    if (e != cudaErrorMemoryAllocation) {
        (void)td_cuda_ok(e, "cudaMallocHost");
        return td_cuda_lost(err);
    }
    char asked[32];
    return td_fail(err, TD_ERR_NOMEM,
                   "page-locked host memory: %s for %s asked and refused: lower the option that "
                   "sizes it, or raise the memory limit of the container",
                   bytes_text(bytes, asked, sizeof asked), what);
}

static void pinned_release(void *memory)
{
    if (!memory) return;
    (void)cudaSetDevice(td_cuda.index);
    (void)td_cuda_ok(cudaFreeHost(memory), "cudaFreeHost");
}

static td_status free_bytes(uint64_t *ret_free, uint64_t *ret_total, struct td_err *err)
{
    size_t f = 0, t = 0;
    if (!on_device("free_bytes") || !td_cuda_ok(cudaMemGetInfo(&f, &t), "cudaMemGetInfo"))
        return td_cuda_lost(err);
    *ret_free = f, *ret_total = t;
    return TD_OK;
}

static bool upload_pieces(uint8_t *to, const uint8_t *from, size_t bytes)
{
    int turn = 0;
    for (size_t at = 0; at < bytes; at += STAGE_BYTES, turn ^= 1) {
        size_t n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
        if (at >= 2 * STAGE_BYTES &&
            !td_cuda_ok(cudaEventSynchronize(self.stage_free[turn]), "upload: wait for a piece"))
            return false;
        memcpy(self.stage[turn], from + at, n);
        if (!td_cuda_ok(
                cudaMemcpyAsync(to + at, self.stage[turn], n, cudaMemcpyHostToDevice, self.copy),
                "upload") ||
            !td_cuda_ok(cudaEventRecord(self.stage_free[turn], self.copy), "upload: mark a piece"))
            return false;
    }
    return td_cuda_ok(cudaStreamSynchronize(self.copy), "upload");
}

/* Piece i is transferred while piece i-1 is copied out of its buffer. */
static bool download_pieces(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t n_pieces = (bytes + STAGE_BYTES - 1) / STAGE_BYTES;
    for (size_t i = 0; i <= n_pieces; i++) {
        if (i < n_pieces) {
            size_t n =
                bytes - i * STAGE_BYTES < STAGE_BYTES ? bytes - i * STAGE_BYTES : STAGE_BYTES;
            if (!td_cuda_ok(cudaMemcpyAsync(self.stage[i & 1], from + i * STAGE_BYTES, n,
                                            cudaMemcpyDeviceToHost, self.copy),
                            "download") ||
                !td_cuda_ok(cudaEventRecord(self.stage_free[i & 1], self.copy),
                            "download: mark a piece"))
                return false;
        }
        if (i > 0) {
            size_t at = (i - 1) * STAGE_BYTES,
                   n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
            if (!td_cuda_ok(cudaEventSynchronize(self.stage_free[(i - 1) & 1]), "download"))
                return false;
            memcpy(to + at, self.stage[(i - 1) & 1], n);
        }
    }
    return true;
}

static td_status upload(void *device_memory, const void *host_memory, size_t bytes,
                        struct td_err *err)
{
    if (bytes == 0) return is_lost() ? td_cuda_lost(err) : TD_OK;
    pthread_mutex_lock(&copy_lock);
    bool ok = on_device("upload") &&
              upload_pieces((uint8_t *)device_memory, (const uint8_t *)host_memory, bytes);
    pthread_mutex_unlock(&copy_lock);
    return ok ? TD_OK : td_cuda_lost(err);
}

static td_status download(void *host_memory, const void *device_memory, size_t bytes,
                          struct td_err *err)
{
    if (bytes == 0) return is_lost() ? td_cuda_lost(err) : TD_OK;
    pthread_mutex_lock(&copy_lock);
    bool ok = on_device("download") &&
              download_pieces((uint8_t *)host_memory, (const uint8_t *)device_memory, bytes);
    pthread_mutex_unlock(&copy_lock);
    return ok ? TD_OK : td_cuda_lost(err);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static struct graph *graph_of(uint64_t key)
{
    for (int i = 0; i < N_GRAPHS; i++)
        if (self.graphs[i].key == key) return &self.graphs[i];
    return NULL;
}

static void graph_drop(struct graph *g)
{
    if (g->exec) (void)td_cuda_ok(cudaGraphExecDestroy(g->exec), "cudaGraphExecDestroy");
    *g = graph();
}

void td_cuda_drop_graphs(void)
{
    TD_ASSERT(self.state == STEP_IDLE);
    if (td_cuda.compute)
        (void)td_cuda_ok(cudaStreamSynchronize(td_cuda.compute),
                         "wait for the graphs before dropping them");
    for (int i = 0; i < N_GRAPHS; i++) graph_drop(&self.graphs[i]);
}

/* A free entry of the cache, if necessary by dropping the graph that was launched longest ago. */
static struct graph *graph_place(void)
{
    struct graph *oldest = NULL;
    for (int i = 0; i < N_GRAPHS; i++) {
        if (self.graphs[i].key == 0) return &self.graphs[i];
        if (!oldest || self.graphs[i].last_step < oldest->last_step) oldest = &self.graphs[i];
    }
    if (oldest->last_step > self.n_done)
        (void)td_cuda_ok(cudaStreamSynchronize(td_cuda.compute),
                         "wait for a graph before dropping it");
    graph_drop(oldest);
    return oldest;
}

static bool step_begin(uint64_t graph_key)
{
    TD_ASSERT(self.state == STEP_IDLE);
    self.step++;
    self.key = graph_key;
    self.n_marks = 0;
    self.state = STEP_DIRECT;
    td_cuda.behind_kernel = false;
    /* a lost device: entries do no harm, and step_end reports it */
    if (!on_device("step_begin") || graph_key == 0) return true;
    if ((self.replay = graph_of(graph_key))) {
        self.state = STEP_REPLAY;
        return false;
    }
    if (td_cuda_ok(cudaStreamBeginCapture(td_cuda.compute, cudaStreamCaptureModeThreadLocal),
                   "cudaStreamBeginCapture"))
        self.state = STEP_RECORDING;
    return true;
}

static void put(void *device_memory, const void *pinned, size_t bytes)
{
    td_cuda.behind_kernel = false;
    if (bytes && !is_lost())
        (void)td_cuda_ok(
            cudaMemcpyAsync(device_memory, pinned, bytes, cudaMemcpyHostToDevice, td_cuda.compute),
            "put");
}

static void get(void *pinned, const void *device_memory, size_t bytes)
{
    td_cuda.behind_kernel = false;
    if (bytes && !is_lost())
        (void)td_cuda_ok(
            cudaMemcpyAsync(pinned, device_memory, bytes, cudaMemcpyDeviceToHost, td_cuda.compute),
            "get");
}

/* Turns what was recorded into a kept graph. NULL: the device is lost. */
static struct graph *keep_recording(void)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool ok = td_cuda_ok(cudaStreamEndCapture(td_cuda.compute, &graph), "cudaStreamEndCapture");
    ok = ok && td_cuda_ok(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    if (graph) ok = td_cuda_ok(cudaGraphDestroy(graph), "cudaGraphDestroy") && ok;
    /* Drop the recording: an abort of the ranks waits until no graph holds their communicator. */
    if (!ok) {
        if (exec) (void)cudaGraphExecDestroy(exec);
        return NULL;
    }
    struct graph *g = graph_place();
    g->key = self.key, g->exec = exec;
    return g;
}

static td_status step_end(struct td_err *err)
{
    TD_ASSERT(self.state != STEP_IDLE);
    struct graph *g = self.state == STEP_REPLAY ? self.replay : NULL;
    if (self.state == STEP_RECORDING) g = keep_recording();
    self.state = STEP_IDLE;
    self.replay = NULL;
    if (is_lost()) return td_cuda_lost(err);
    if (g) {
        g->last_step = self.step;
        if (!td_cuda_ok(cudaGraphLaunch(g->exec, td_cuda.compute), "cudaGraphLaunch"))
            return td_cuda_lost(err);
    }
    return TD_OK;
}

static td_status wait_done(struct td_err *err)
{
    TD_ASSERT(self.state == STEP_IDLE || self.state == STEP_DIRECT);
    if (!on_device("wait") || !td_cuda_ok(cudaStreamSynchronize(td_cuda.compute),
                                          "an entry of the step that was waited for"))
        return td_cuda_lost(err);
    self.n_done = self.step;
    return TD_OK;
}

static void mark(void)
{
    TD_ASSERT(self.state == STEP_DIRECT && self.n_marks < TD_DEVICE_MARKS_MAX);
    td_cuda.behind_kernel = false;
    if (!is_lost())
        (void)td_cuda_ok(cudaEventRecord(self.marks[self.n_marks], td_cuda.compute), "mark");
    self.n_marks++;
}

static td_status wait_mark(int32_t n, struct td_err *err)
{
    TD_ASSERT(self.state == STEP_IDLE && n >= 0 && n < self.n_marks);
    if (!on_device("wait_mark") || !td_cuda_ok(cudaEventSynchronize(self.marks[n]),
                                               "an entry before the mark that was waited for"))
        return td_cuda_lost(err);
    return TD_OK;
}

/* ---- open and close -------------------------------------------------------------------------- */

static void version_text(int version, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%d.%d", version / 1000, version % 1000 / 10);
}

static td_status open_failed(cudaError_t e, struct td_err *err)
{
    int driver = 0, runtime = 0;
    char has[16], needs[16];
    (void)cudaGetLastError();
    (void)cudaRuntimeGetVersion(&runtime);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    (void)cudaGetLastError();
    version_text(driver, has, sizeof has), version_text(runtime, needs, sizeof needs);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (e == cudaErrorInsufficientDriver && driver == 0)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA is not available: no NVIDIA driver on this machine (this library "
                       "needs one for CUDA %s or later)",
                       needs);
    if (e == cudaErrorInsufficientDriver)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA is not available: the NVIDIA driver is too old: it serves CUDA %s, "
                       "this library needs %s or later",
                       has, needs);
    if (e == cudaErrorNoDevice && visible)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA is not available: no device is visible (CUDA_VISIBLE_DEVICES=\"%s\")",
                       visible);
    if (e == cudaErrorNoDevice)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA is not available: the driver sees no device (nvidia-smi -L)");
    return td_fail(err, TD_ERR_DEVICE, "CUDA is not available: %s (%s)", cudaGetErrorName(e),
                   cudaGetErrorString(e));
}

static __global__ void probe_kernel(int32_t *out) { out[0] = 1234567; }

/* A library built for other architectures has no code for this device: report it here, not at the
 * first step. */
static td_status probe(struct td_err *err)
{
    int32_t *p = NULL, answer = 0;
    cudaError_t e = cudaMalloc((void **)&p, sizeof *p);
    if (e == cudaSuccess) {
        TD_LAUNCH(probe_kernel, dim3(1), dim3(1), 0, td_cuda.compute, p);
        e = cudaGetLastError();
        if (e == cudaSuccess) e = cudaStreamSynchronize(td_cuda.compute);
        if (e == cudaSuccess) e = cudaMemcpy(&answer, p, sizeof answer, cudaMemcpyDeviceToHost);
        (void)cudaFree(p);
    }
    if (e == cudaErrorNoKernelImageForDevice)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA device %d (%s) is sm_%d: this library was built without code for it",
                       td_cuda.index, self.device.info.name, td_cuda.cc);
    if (e != cudaSuccess)
        return td_fail(err, e == cudaErrorMemoryAllocation ? TD_ERR_NOMEM : TD_ERR_DEVICE,
                       "CUDA device %d (%s) does not run a first kernel: %s (%s)", td_cuda.index,
                       self.device.info.name, cudaGetErrorName(e), cudaGetErrorString(e));
    return answer == 1234567
               ? TD_OK
               : td_fail(err, TD_ERR_DEVICE, "CUDA device %d (%s): a first kernel answered wrongly",
                         td_cuda.index, self.device.info.name);
}

static td_status fill_info(int index, struct td_device_info *info, struct td_err *err)
{
    cudaDeviceProp prop;
    cudaError_t e = cudaGetDeviceProperties(&prop, index);
    if (e != cudaSuccess) return open_failed(e, err);
    *info = td_device_info();
    snprintf(info->name, sizeof info->name, "%.127s", prop.name);
    const unsigned char *u = (const unsigned char *)prop.uuid.bytes;
    snprintf(info->uuid, sizeof info->uuid,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
    snprintf(info->pci, sizeof info->pci, "%04x:%02x:%02x.0", (unsigned)prop.pciDomainID,
             (unsigned)prop.pciBusID, (unsigned)prop.pciDeviceID);
    info->index = index, info->cc_major = prop.major, info->cc_minor = prop.minor,
    info->n_sms = prop.multiProcessorCount;
    info->memory_bytes = prop.totalGlobalMem;
    int driver = 0, runtime = 0; /* the newest CUDA that the driver serves; ours */
    if (cudaDriverGetVersion(&driver) == cudaSuccess &&
        cudaRuntimeGetVersion(&runtime) == cudaSuccess)
        snprintf(info->driver, sizeof info->driver, "%d.%d runtime=%d.%d", driver / 1000,
                 driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
#ifdef TD_CUDA_EMULATE
    info->is_emulated = true;
#endif
    return TD_OK;
}

/* Undoes what open has done so far; also the table's close. */
static void close_device(void)
{
    if (td_cuda.compute) (void)cudaStreamSynchronize(td_cuda.compute);
    td_cuda_memory_close();
    for (int i = 0; i < N_GRAPHS; i++) graph_drop(&self.graphs[i]);
    td_cuda_gemm_close();
    for (int i = 0; i < 2; i++) {
        if (self.stage_free[i]) (void)cudaEventDestroy(self.stage_free[i]);
        if (self.stage[i]) (void)cudaFreeHost(self.stage[i]);
    }
    for (int i = 0; i < TD_DEVICE_MARKS_MAX; i++)
        if (self.marks[i]) (void)cudaEventDestroy(self.marks[i]);
    if (self.copy) (void)cudaStreamDestroy(self.copy);
    if (td_cuda.compute) (void)cudaStreamDestroy(td_cuda.compute);
    memset(&self, 0, sizeof self);
    memset(&td_cuda, 0, sizeof td_cuda);
}

static td_status open_streams(struct td_err *err)
{
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&td_cuda.compute, cudaStreamNonBlocking, greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&self.copy, cudaStreamNonBlocking, least);
    for (int i = 0; i < 2 && e == cudaSuccess; i++) {
        e = cudaMallocHost(&self.stage[i], STAGE_BYTES);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&self.stage_free[i], cudaEventDisableTiming);
    }
    for (int i = 0; i < TD_DEVICE_MARKS_MAX && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&self.marks[i], cudaEventDisableTiming);
    if (e == cudaSuccess) return TD_OK;
    return td_fail(err, e == cudaErrorMemoryAllocation ? TD_ERR_NOMEM : TD_ERR_DEVICE,
                   "CUDA device %d (%s) does not open: %s (%s)", td_cuda.index,
                   self.device.info.name, cudaGetErrorName(e), cudaGetErrorString(e));
}

static void fill_tables(void)
{
    struct td_device *d = &self.device;
    d->has_coded_kv = true;
    d->alloc = device_alloc, d->release = device_release, d->alloc_pinned = pinned_alloc,
    d->release_pinned = pinned_release;
    d->free_bytes = free_bytes, d->upload = upload, d->download = download;
    d->step_begin = step_begin, d->put = put, d->get = get, d->step_end = step_end,
    d->wait = wait_done, d->close = close_device;
    d->mark = mark, d->wait_mark = wait_mark;
    d->sample_scratch_bytes = td_cuda_sample_scratch_bytes, d->sample_clear = td_cuda_sample_clear,
    d->sample = td_cuda_sample;

    d->ranks = td_cuda_ranks(), d->experts = td_cuda_experts();

    struct td_ops *o = &self.ops;
    o->name = "cuda", o->device = d;
    o->packed_bytes = td_cuda_packed_bytes, o->pack = td_cuda_pack;
    o->gemm_scratch_bytes = td_cuda_gemm_scratch_bytes, o->gemm_prepare = td_cuda_gemm_prepare,
    o->gemm = td_cuda_gemm;
    o->rmsnorm = td_cuda_rmsnorm, o->rope = td_cuda_rope, o->kv_store = td_cuda_kv_store,
    o->rope_store = td_cuda_rope_store;
    o->attn_scratch_bytes = td_cuda_attn_scratch_bytes, o->attn = td_cuda_attn;
    o->attn_plan_bytes = td_cuda_attn_plan_bytes, o->attn_plan = td_cuda_attn_plan;
    o->rmsnorm_prepare = td_cuda_rmsnorm_prepare, o->silu_mul_prepare = td_cuda_silu_mul_prepare;
    o->silu_mul = td_cuda_silu_mul, o->embed = td_cuda_embed;

    struct td_block_ops *q = &self.quant;
    q->packed_bytes = td_cuda_quant_packed_bytes, q->pack = td_cuda_quant_pack;
    q->gemm_scratch_bytes = td_cuda_quant_scratch_bytes, q->gemm_prepare = td_cuda_quant_prepare,
    q->gemm = td_cuda_quant_gemm, q->embed = td_cuda_quant_embed;
    o->blocks = q, o->scaled = q;
}

static td_status open_device(const struct td_device_config *config, struct td_err *err)
{
    int n_devices = 0;
    cudaError_t e = cudaGetDeviceCount(&n_devices);
    if (e == cudaSuccess && n_devices == 0) e = cudaErrorNoDevice;
    if (e != cudaSuccess) return open_failed(e, err);
    if (config->index < 0 || config->index >= n_devices)
        return td_fail(err, TD_ERR_INVALID, "CUDA device index %d: there %s %d, numbered from 0",
                       (int)config->index, n_devices == 1 ? "is" : "are", n_devices);
    td_cuda.index = config->index;
    td_status s = fill_info(config->index, &self.device.info, err);
    if (s) return s;
    self.device.info.is_deterministic = config->deterministic;
    const struct td_device_info *info = &self.device.info;
    td_cuda.n_sms = info->n_sms, td_cuda.cc = info->cc_major * 10 + info->cc_minor,
    td_cuda.is_deterministic = config->deterministic;
    const char *overlap = getenv("TANDEM_CUDA_OVERLAP");
    td_cuda.overlaps = overlap && strcmp(overlap, "1") == 0 && td_cuda.cc >= 90;
    if (td_cuda.cc < CC_MIN)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "CUDA device %d (%s) is sm_%d: sm_%d or later is needed (bf16 tensor cores)",
                       (int)config->index, info->name, td_cuda.cc, CC_MIN);
    if ((e = cudaSetDevice(config->index)) != cudaSuccess) return open_failed(e, err);
    if ((s = open_streams(err)) || (s = probe(err)) || (s = td_cuda_gemm_open(err))) return s;
    if ((s = td_cuda_memory_open(info, &self.device.memory, err))) return s;
    fill_tables();
    self.is_open = true;
    return TD_OK;
}

extern "C" __attribute__((visibility("default"))) td_status
td_cuda_open(uint32_t abi, const struct td_device_config *config, const struct td_ops **ret_ops,
             struct td_err *err)
{
    if (abi != TD_CUDA_ABI)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "this library's interface has number %u, the program's %u: take both from one build",
            (unsigned)TD_CUDA_ABI, (unsigned)abi);
    if (self.is_open)
        return td_fail(err, TD_ERR_INVALID,
                       "CUDA device %d is open already: one device per process", td_cuda.index);
    td_status s = open_device(config, err);
    if (s) {
        close_device();
        return s;
    }
    *ret_ops = &self.ops;
    return TD_OK;
}
