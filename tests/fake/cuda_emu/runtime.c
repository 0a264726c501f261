/* runtime.c - streams, events, graphs, copies and errors of the emulated runtime.
 *
 * Work. Every asynchronous call makes a `struct work` and appends it to its stream (or to the graph
 * that the stream records). Work runs in drain(): in the order of its stream, outside the lock, by
 * whichever thread first needs it done; `is_busy` keeps a second thread out of the same stream. A
 * stream that comes to a wait for an event drains the event's stream first. Records come before the
 * waits that name them, so this ends.
 *
 * Errors. A call's own error is its result and the thread's last error. A failed kernel loses the
 * device: `lost` is the result of every later call, and work that is still queued is dropped (its
 * events count as done, so that no wait hangs).
 *
 * Lock order: `lock` before those of memory.c and block.c; none is held while work runs. */
#include "tests/fake/cuda_emu/runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/fake/cuda_emu/memory.h"

enum {
    MAX_DEVICES = 8,
    STAGED_BYTES = 64 * 1024, /* pageable copies up to this size are copied into the work itself */
    SHARED_DEFAULT = 48 * 1024,
    SHARED_MAX = 227 * 1024,
    MAX_FUNCTIONS = 1024,
    N_SMS = 8, /* few, so that grids sized by it stay small */
    PAGE = 4096,
};
#define EVENT_MAGIC 0x54444531u /* "TDE1" */
#define cudaErrorStreamCaptureImplicit ((cudaError_t)906)

enum work_kind {
    WORK_KERNEL,
    WORK_COPY,
    WORK_SET,
    WORK_HOST,
    WORK_RECORD,
    WORK_WAIT,
    WORK_GRAPH,
    WORK_OBJECT
};

/* An object that lives as long as the graphs that name it (cudaGraphRetainUserObject). */
struct object {
    uint32_t n_refs;
    cudaHostFn_t release;
    void *data;
};

struct work {
    struct work *next;
    enum work_kind kind;
    size_t n_bytes; /* bytes of what follows the struct: a closure, or staged bytes to copy */
    union {
        struct {
            const char *name;
            struct td_emu_dims grid, block;
            size_t shared_bytes;
            void (*run)(const void *closure);
        } kernel;
        /* from NULL: staged */
        struct {
            uint8_t *to;
            const uint8_t *from;
            size_t to_pitch, from_pitch, width, height;
        } copy;
        struct {
            uint8_t *to;
            int value;
            size_t bytes;
        } set;
        struct {
            cudaHostFn_t function;
            void *data;
        } host;
        struct {
            struct td_emu_event *event;
            uint64_t number;
            struct td_emu_stream *stream;
            uint64_t until;
        } event;
        struct td_emu_graph_exec *graph;
        struct object *object;
    } u;
    _Alignas(16) uint8_t bytes[];
};

struct queue {
    struct work *head, **tail;
};

struct td_emu_graph {
    struct queue works;
    size_t n_works;
    enum work_kind last; /* of n_works */
};

struct td_emu_graph_exec {
    struct queue works;
    uint32_t n_refs; /* its owner, and each launch that has not run */
};

struct capture {
    struct td_emu_graph *graph;
    struct td_emu_stream *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool is_invalid;
    struct capture *next;
};

struct td_emu_stream {
    struct queue works;
    uint64_t n_submitted, n_done;
    bool is_busy, is_blocking, was_asked;
    uint32_t n_users; /* threads inside drain(), during which the stream must not be freed */
    struct capture *capture;
    uint64_t n_captured; /* works put into the capture, to detect whether a fork was joined */
    bool is_forked, is_unjoined;
    struct td_emu_stream *next;
};

struct td_emu_event {
    uint32_t n_refs;
    uint64_t n_recorded, n_done;
    struct td_emu_stream *stream; /* of the last record, while n_done < n_recorded */
    uint64_t until;
    bool was_asked;
    struct capture *capture; /* recorded into one */
    struct td_emu_stream *capture_stream;
    uint64_t n_captured;
    int fd; /* interprocess: a page with the number of records */
    uint64_t *shared;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Under the lock. */
static struct td_emu_stream default_stream = {.works = {NULL, &default_stream.works.head},
                                              .is_blocking = true};
static struct td_emu_stream *streams;
static struct capture *captures;
static cudaError_t lost;
static char environment[512]; /* as it was read */
static bool is_eager, has_no_device, has_no_driver, has_no_image, is_read;
static int cc = 90, n_devices = 1, n_sms = N_SMS;
static int64_t launches_to_fault, launches_to_ecc, mallocs_to_fault; /* 0: none */
static int fault_device = -1, used_device; /* -1: any; the one that this process chose last */
static bool has_no_peers;
static struct {
    const void *kernel;
    int shared_bytes;
    bool has_carveout;
} functions[MAX_FUNCTIONS];
static int n_functions;

static __thread cudaError_t last_error;
static __thread int current_device;
static __thread bool next_is_early;

static cudaError_t answer(cudaError_t error)
{
    if (error && error != cudaErrorNotReady) last_error = error;
    return error;
}

/* ---- environment */

static const char *env(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "";
}

static uint64_t parse_bytes(const char *text, uint64_t fallback)
{
    char *end;
    uint64_t n = strtoull(text, &end, 10);
    if (end == text || !n) return fallback;
    if (*end == 'K' || *end == 'k') n <<= 10;
    if (*end == 'M' || *end == 'm') n <<= 20;
    if (*end == 'G' || *end == 'g') n <<= 30;
    return n;
}

static void read_environment(void)
{
    char now[sizeof environment];
    snprintf(now, sizeof now, "%s|%s|%s|%s|%s|%s", env("TD_CUDA_EMU_FAULT"),
             env("TD_CUDA_EMU_MEMORY"), env("TD_CUDA_EMU_DEVICES"), env("TD_CUDA_EMU_EAGER"),
             env("TD_CUDA_EMU_STRICT"), env("TD_CUDA_EMU_SMS"));
    if (is_read && !strcmp(now, environment)) return;
    is_read = true;
    memcpy(environment, now, sizeof environment);
    td_emu_memory_set_total(parse_bytes(env("TD_CUDA_EMU_MEMORY"), (uint64_t)4 << 30));
    td_emu_memory_set_strict(*env("TD_CUDA_EMU_STRICT") == '1');
    is_eager = *env("TD_CUDA_EMU_EAGER") == '1';
    n_sms = (int)parse_bytes(env("TD_CUDA_EMU_SMS"), N_SMS);
    int n = (int)parse_bytes(env("TD_CUDA_EMU_DEVICES"), 1);
    n_devices = n < MAX_DEVICES ? n : MAX_DEVICES;
    lost = cudaSuccess;
    has_no_device = has_no_driver = has_no_image = false;
    launches_to_fault = launches_to_ecc = mallocs_to_fault = 0;
    fault_device = -1;
    has_no_peers = false;
    cc = 90;
    char list[256], *at = list, *word;
    snprintf(list, sizeof list, "%s", env("TD_CUDA_EMU_FAULT"));
    while ((word = strsep(&at, ","))) {
        char *number = strchr(word, ':');
        int64_t value = 0;
        if (number) {
            *number++ = 0;
            value = (int64_t)strtoll(number, &number, 10);
            if (*number == '@') fault_device = (int)strtol(number + 1, NULL, 10);
        }
        if (!*word) continue;
        if (!strcmp(word, "launch") && value > 0)
            launches_to_fault = value;
        else if (!strcmp(word, "ecc") && value > 0)
            launches_to_ecc = value;
        else if (!strcmp(word, "malloc") && value > 0)
            mallocs_to_fault = value;
        else if (!strcmp(word, "cc") && value > 0)
            cc = (int)value;
        else if (!strcmp(word, "nodevice") && !number)
            has_no_device = true;
        else if (!strcmp(word, "nodriver") && !number)
            has_no_driver = true;
        else if (!strcmp(word, "noimage") && !number)
            has_no_image = true;
        else if (!strcmp(word, "nopeer") && !number)
            has_no_peers = true;
        else if (strcmp(word, "ltnone") != 0 && strcmp(word, "ltrefuse") != 0) /* cublaslt.c's */
            td_emu_die("TD_CUDA_EMU_FAULT: \"%s\" is not launch:N, ecc:N, malloc:N, cc:N, "
                       "nodevice, nodriver, noimage, nopeer, ltnone or ltrefuse",
                       word);
    }
}

static void enter(void)
{
    pthread_mutex_lock(&lock);
    if (!is_read) read_environment();
}

static cudaError_t leave(cudaError_t error)
{
    if (lost && error != cudaErrorNoDevice && error != cudaErrorInsufficientDriver) error = lost;
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* True while the fault is due: counts down to it. */
static bool is_due(int64_t *to_fault)
{
    return (fault_device < 0 || fault_device == used_device) && *to_fault > 0 && --*to_fault == 0;
}

/* ---- work */

static void append(struct queue *q, struct work *w)
{
    w->next = NULL;
    *q->tail = w;
    q->tail = &w->next;
}

static struct work *work_new(enum work_kind kind, const void *bytes, size_t n_bytes)
{
    struct work *w = calloc(1, sizeof *w + n_bytes);
    if (!w) td_emu_die("no memory for queued work");
    w->kind = kind;
    w->n_bytes = n_bytes;
    if (n_bytes) memcpy(w->bytes, bytes, n_bytes);
    return w;
}

static struct work *work_copy(const struct work *from)
{
    struct work *w = work_new(from->kind, from->bytes, from->n_bytes);
    w->u = from->u;
    if (w->kind == WORK_OBJECT) w->u.object->n_refs++;
    return w;
}

static void work_free(struct work *w)
{
    if (w->kind == WORK_OBJECT && --w->u.object->n_refs == 0) {
        w->u.object->release(w->u.object->data);
        free(w->u.object);
    }
    free(w);
}

static void works_free(struct queue *q)
{
    while (q->head) {
        struct work *w = q->head;
        q->head = w->next;
        work_free(w);
    }
    q->tail = &q->head;
}

static void event_release(struct td_emu_event *e)
{
    if (--e->n_refs) return;
    if (e->shared) munmap(e->shared, PAGE);
    if (e->fd >= 0) close(e->fd);
    free(e);
}

static void exec_release(struct td_emu_graph_exec *g)
{
    if (--g->n_refs) return;
    works_free(&g->works);
    free(g);
}

/* Outside the lock. */
static void run(struct work *w)
{
    pthread_mutex_lock(&lock);
    if (w->kind == WORK_KERNEL && !lost) {
        if (is_due(&launches_to_fault))
            lost = cudaErrorLaunchFailure;
        else if (is_due(&launches_to_ecc))
            lost = cudaErrorECCUncorrectable;
    }
    bool is_dropped = lost != cudaSuccess;
    pthread_mutex_unlock(&lock);
    if (is_dropped) return;
    switch (w->kind) {
    case WORK_KERNEL:
        td_emu_grid_run(w->u.kernel.name, w->u.kernel.grid, w->u.kernel.block,
                        w->u.kernel.shared_bytes, w->u.kernel.run, w->bytes);
        break;
    case WORK_COPY: {
        const uint8_t *from = w->u.copy.from ? w->u.copy.from : w->bytes;
        for (size_t i = 0; i < w->u.copy.height; i++)
            memmove(w->u.copy.to + i * w->u.copy.to_pitch, from + i * w->u.copy.from_pitch,
                    w->u.copy.width);
        break;
    }
    case WORK_SET:
        memset(w->u.set.to, w->u.set.value, w->u.set.bytes);
        break;
    case WORK_HOST:
        w->u.host.function(w->u.host.data);
        break;
    case WORK_GRAPH:
        for (struct work *part = w->u.graph->works.head; part; part = part->next) run(part);
        break;
    case WORK_RECORD:
    case WORK_OBJECT:
    case WORK_WAIT:
        break;
    }
}

/* Runs works of the stream up to `until`. Called under the lock, which is released meanwhile. */
static void drain(struct td_emu_stream *s, uint64_t until)
{
    bool is_inside = s->n_done < until;
    if (is_inside) td_emu_memory_enter();
    s->n_users++;
    while (s->n_done < until) {
        if (s->is_busy) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        struct work *w = s->works.head;
        s->works.head = w->next;
        if (!w->next) s->works.tail = &s->works.head;
        s->is_busy = true;
        if (w->kind == WORK_WAIT) {
            if (w->u.event.event->n_done < w->u.event.number)
                drain(w->u.event.stream, w->u.event.until);
            event_release(w->u.event.event);
        } else if (w->kind == WORK_RECORD) {
            struct td_emu_event *e = w->u.event.event;
            e->n_done = w->u.event.number;
            event_release(e);
        } else {
            pthread_mutex_unlock(&lock);
            run(w);
            pthread_mutex_lock(&lock);
            if (w->kind == WORK_GRAPH) exec_release(w->u.graph);
        }
        free(w);
        s->is_busy = false;
        s->n_done++;
        pthread_cond_broadcast(&changed);
    }
    if (--s->n_users == 0) pthread_cond_broadcast(&changed);
    if (is_inside) td_emu_memory_leave();
}

static void drain_all(bool blocking_only)
{
    drain(&default_stream, default_stream.n_submitted);
    for (struct td_emu_stream *s = streams, *next; s; s = next) {
        s->n_users++;
        if (s->is_blocking || !blocking_only) drain(s, s->n_submitted);
        next = s->next;
        if (--s->n_users == 0) pthread_cond_broadcast(&changed);
    }
}

static struct td_emu_stream *stream_of(cudaStream_t stream)
{
    return stream ? stream : &default_stream;
}

/* Under the lock. Takes the work, whatever it answers. */
static cudaError_t submit(struct td_emu_stream *s, struct work *w)
{
    cudaError_t error = cudaSuccess;
    if (s->capture) {
        if (s->capture->is_invalid)
            error = cudaErrorStreamCaptureInvalidated;
        else if (w->kind == WORK_GRAPH) { /* its parts, as they are */
            for (const struct work *part = w->u.graph->works.head; part; part = part->next) {
                append(&s->capture->graph->works, work_copy(part));
                s->capture->graph->n_works++;
            }
            exec_release(w->u.graph);
            free(w);
            s->n_captured++;
            s->is_unjoined = true;
            return cudaSuccess;
        } else {
            append(&s->capture->graph->works, w);
            s->capture->graph->n_works++;
            s->capture->graph->last = w->kind;
            s->n_captured++;
            s->is_unjoined = true;
            return cudaSuccess;
        }
    } else if (s->is_blocking) { /* the default stream and blocking ones wait for each other */
        for (struct capture *c = captures; c; c = c->next) {
            if (s == &default_stream && c->origin->is_blocking) {
                c->is_invalid = true;
                error = cudaErrorStreamCaptureImplicit;
            }
        }
        if (s == &default_stream)
            drain_all(true);
        else
            drain(&default_stream, default_stream.n_submitted);
    }
    if (!error) error = lost;
    if (error) {
        if (w->kind == WORK_GRAPH) exec_release(w->u.graph);
        if (w->kind == WORK_RECORD || w->kind == WORK_WAIT) event_release(w->u.event.event);
        free(w);
        return error;
    }
    append(&s->works, w);
    s->n_submitted++;
    s->was_asked = false;
    if (is_eager) drain(s, s->n_submitted);
    return cudaSuccess;
}

/* Calls that a recording forbids: they invalidate it, as CUDA does. */
static cudaError_t refuse_in_capture(void)
{
    cudaError_t error = cudaSuccess;
    for (struct capture *c = captures; c; c = c->next) {
        if (c->mode == cudaStreamCaptureModeGlobal ||
            (c->mode == cudaStreamCaptureModeThreadLocal &&
             pthread_equal(c->thread, pthread_self()))) {
            c->is_invalid = true;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

static cudaError_t refuse_captured(struct capture *c)
{
    if (!c) return cudaSuccess;
    c->is_invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* ---- device and errors */

cudaError_t cudaGetDeviceCount(int *ret_count)
{
    enter();
    read_environment();
    if (has_no_driver) return leave(cudaErrorInsufficientDriver);
    if (has_no_device) return leave(cudaErrorNoDevice);
    *ret_count = n_devices;
    return leave(cudaSuccess);
}

static cudaError_t check_device(int device)
{
    if (has_no_driver) return cudaErrorInsufficientDriver;
    if (has_no_device) return cudaErrorNoDevice;
    return device < 0 || device >= n_devices ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret_properties, int device)
{
    enter();
    cudaError_t error = check_device(device);
    if (!error) {
        uint64_t unused, total;
        td_emu_memory_info(&unused, &total);
        struct cudaDeviceProp p = {.totalGlobalMem = total,
                                   .sharedMemPerBlock = SHARED_DEFAULT,
                                   .sharedMemPerBlockOptin = SHARED_MAX,
                                   .sharedMemPerMultiprocessor = SHARED_MAX + 1024,
                                   .regsPerBlock = 65536,
                                   .warpSize = TD_EMU_LANES,
                                   .maxThreadsPerBlock = TD_EMU_MAX_THREADS,
                                   .major = cc / 10,
                                   .minor = cc % 10,
                                   .multiProcessorCount = n_sms,
                                   .l2CacheSize = 50 << 20,
                                   .ECCEnabled = 1,
                                   .pciBusID = 0xe0 + device,
                                   .maxThreadsPerMultiProcessor = 2048,
                                   .unifiedAddressing = 1,
                                   .memoryBusWidth = 5120};
        snprintf(p.name, sizeof p.name, "emulated GPU");
        memcpy(p.uuid.bytes, "tandem-emulated", 15);
        p.uuid.bytes[15] = (char)device;
        *ret_properties = p;
    }
    return leave(error);
}

cudaError_t cudaDeviceGetAttribute(int *ret_value, enum cudaDeviceAttr attribute, int device)
{
    enter();
    cudaError_t error = check_device(device);
    int value = 0;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        value = TD_EMU_MAX_THREADS;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        value = SHARED_DEFAULT;
        break;
    case cudaDevAttrWarpSize:
        value = TD_EMU_LANES;
        break;
    case cudaDevAttrMultiProcessorCount:
        value = n_sms;
        break;
    case cudaDevAttrPciBusId:
        value = 0xe0 + device;
        break;
    case cudaDevAttrPciDeviceId:
        value = 0;
        break;
    case cudaDevAttrUnifiedAddressing:
        value = 1;
        break;
    case cudaDevAttrPciDomainId:
        value = 0;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        value = cc / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        value = cc % 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        value = SHARED_MAX;
        break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
        value = 1;
        break;
    case cudaDevAttrGPUDirectRDMASupported:
        value = 0;
        break;
    default:
        error = error ? error : cudaErrorInvalidValue;
    }
    if (!error) *ret_value = value;
    return leave(error);
}

cudaError_t cudaSetDevice(int device)
{
    enter();
    cudaError_t error = check_device(device);
    if (!error) current_device = used_device = device;
    return leave(error);
}

cudaError_t cudaDeviceSynchronize(void)
{
    enter();
    cudaError_t error = refuse_in_capture();
    if (!error) drain_all(false);
    return leave(error);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *ret_least, int *ret_greatest)
{
    enter();
    *ret_least = 0;
    *ret_greatest = -5;
    return leave(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int *ret_version)
{
    enter();
    *ret_version = has_no_driver ? 0 : CUDART_VERSION;
    return leave(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *ret_version)
{
    *ret_version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    enter();
    cudaError_t error = lost ? lost : last_error;
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorAlreadyMapped, "cudaErrorAlreadyMapped", "resource already mapped"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not initiated in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++) {
        if (error_texts[i].error == error) return error_texts[i].name;
    }
    return "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++) {
        if (error_texts[i].error == error) return error_texts[i].text;
    }
    return "unknown error";
}

/* ---- memory */

cudaError_t cudaMalloc(void **ret_memory, size_t bytes)
{
    enter();
    cudaError_t error = check_device(current_device);
    if (!error) error = refuse_in_capture();
    if (!error && is_due(&mallocs_to_fault)) error = cudaErrorMemoryAllocation;
    void *memory = NULL;
    if (!error && !lost && bytes) error = td_emu_memory_alloc(bytes, &memory);
    if (!error && !lost) *ret_memory = memory;
    return leave(error);
}

cudaError_t cudaFree(void *memory)
{
    enter();
    cudaError_t error = refuse_in_capture();
    if (!error) drain_all(false);
    if (!error && memory) error = td_emu_memory_free(memory);
    return leave(error);
}

cudaError_t cudaHostAlloc(void **ret_memory, size_t bytes, unsigned flags)
{
    (void)flags;
    enter();
    cudaError_t error = check_device(current_device);
    if (!error) error = refuse_in_capture();
    void *memory = NULL;
    if (!error && !lost && bytes) {
        if (posix_memalign(&memory, PAGE, bytes))
            error = cudaErrorMemoryAllocation;
        else
            error = td_emu_pinned_add(memory, bytes, false);
    }
    if (!error && !lost) *ret_memory = memory;
    return leave(error);
}

cudaError_t cudaMallocHost(void **ret_memory, size_t bytes)
{
    return cudaHostAlloc(ret_memory, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *memory)
{
    enter();
    cudaError_t error = cudaSuccess;
    drain_all(false);
    if (memory) {
        error = td_emu_pinned_remove(memory, false);
        if (!error) free(memory);
    }
    return leave(error);
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    enter();
    cudaError_t error = check_device(current_device);
    if (!error) error = refuse_in_capture();
    if (!error && (!memory || !bytes || td_emu_memory_where(memory, bytes) == TD_EMU_DEVICE))
        error = cudaErrorInvalidValue;
    if (!error && !lost) error = td_emu_pinned_add(memory, bytes, true);
    return leave(error);
}

cudaError_t cudaHostUnregister(void *memory)
{
    enter();
    drain_all(false);
    return leave(td_emu_pinned_remove(memory, true));
}

cudaError_t cudaMemGetInfo(size_t *ret_free, size_t *ret_total)
{
    enter();
    cudaError_t error = check_device(current_device);
    uint64_t free_bytes, total;
    td_emu_memory_info(&free_bytes, &total);
    if (!error) {
        *ret_free = free_bytes;
        *ret_total = total;
    }
    return leave(error);
}

static size_t extent(size_t pitch, size_t width, size_t height)
{
    return (height - 1) * pitch + width;
}

/* Under the lock. is_async: may be done later. */
static cudaError_t copy(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                        size_t width, size_t height, enum cudaMemcpyKind kind,
                        struct td_emu_stream *s, bool is_async)
{
    if (!width || !height) return cudaSuccess;
    if (!to || !from || (height > 1 && (to_pitch < width || from_pitch < width)))
        return cudaErrorInvalidValue;
    enum td_emu_where to_where = td_emu_memory_where(to, extent(to_pitch, width, height));
    enum td_emu_where from_where = td_emu_memory_where(from, extent(from_pitch, width, height));
    if (to_where == TD_EMU_STRAY || from_where == TD_EMU_STRAY) return cudaErrorInvalidValue;
    bool to_device = to_where == TD_EMU_DEVICE, from_device = from_where == TD_EMU_DEVICE;
    if (kind != cudaMemcpyDefault) {
        bool wants_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        bool wants_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if (wants_to != to_device || wants_from != from_device)
            return cudaErrorInvalidMemcpyDirection;
    }
    bool from_pageable =
        !from_device && !td_emu_pinned_has(from, extent(from_pitch, width, height));
    bool to_pageable = !to_device && !td_emu_pinned_has(to, extent(to_pitch, width, height));
    bool is_staged =
        is_async && !s->capture && from_pageable && height == 1 && width <= STAGED_BYTES;
    struct work *w = work_new(WORK_COPY, from, is_staged ? width : 0);
    w->u.copy.to = to;
    w->u.copy.from = is_staged ? NULL : from;
    w->u.copy.to_pitch = to_pitch;
    w->u.copy.from_pitch = from_pitch;
    w->u.copy.width = width;
    w->u.copy.height = height;
    cudaError_t error = submit(s, w);
    /* Pageable memory: the call returns when the bytes have been taken, or have arrived. */
    if (!error && !s->capture && (!is_async || to_pageable || (from_pageable && !is_staged)))
        drain(s, s->n_submitted);
    return error;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    enter();
    return leave(
        copy(to, to_pitch, from, from_pitch, width, height, kind, stream_of(stream), true));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind)
{
    enter();
    cudaError_t error = refuse_in_capture();
    return leave(
        error ? error
              : copy(to, to_pitch, from, from_pitch, width, height, kind, &default_stream, false));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    enter();
    if (!bytes) return leave(cudaSuccess);
    if (td_emu_memory_where(memory, bytes) != TD_EMU_DEVICE && !td_emu_pinned_has(memory, bytes))
        return leave(cudaErrorInvalidValue);
    struct work *w = work_new(WORK_SET, NULL, 0);
    w->u.set.to = memory;
    w->u.set.value = value;
    w->u.set.bytes = bytes;
    return leave(submit(stream_of(stream), w));
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    enter();
    cudaError_t error = refuse_in_capture();
    pthread_mutex_unlock(&lock);
    return error ? answer(error) : cudaMemsetAsync(memory, value, bytes, NULL);
}

/* ---- streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret_stream, unsigned flags, int priority)
{
    (void)priority;
    enter();
    cudaError_t error =
        flags > cudaStreamNonBlocking ? cudaErrorInvalidValue : check_device(current_device);
    struct td_emu_stream *s = error || lost ? NULL : calloc(1, sizeof *s);
    if (s) {
        s->works.tail = &s->works.head;
        s->is_blocking = flags != cudaStreamNonBlocking;
        s->next = streams;
        streams = s;
        *ret_stream = s;
    } else if (!error) {
        error = cudaErrorMemoryAllocation;
    }
    return leave(error);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret_stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(ret_stream, flags, 0);
}
static struct td_emu_stream **find_stream(cudaStream_t stream)
{
    struct td_emu_stream **at = &streams;
    while (*at && *at != stream) at = &(*at)->next;
    return at;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    enter();
    if (!stream || !*find_stream(stream)) return leave(cudaErrorInvalidResourceHandle);
    if (stream->capture) return leave(refuse_captured(stream->capture));
    drain(stream, stream->n_submitted);
    while (stream->n_users) pthread_cond_wait(&changed, &lock);
    *find_stream(stream) = stream->next;
    free(stream);
    return leave(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    enter();
    struct td_emu_stream *s = stream_of(stream);
    cudaError_t error = refuse_captured(s->capture);
    if (!error && s == &default_stream) drain_all(true);
    if (!error) drain(s, s->n_submitted);
    return leave(error);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    enter();
    struct td_emu_stream *s = stream_of(stream);
    cudaError_t error = refuse_captured(s->capture);
    if (!error && s->n_done < s->n_submitted) {
        if (s->was_asked)
            drain(s, s->n_submitted);
        else
            error = cudaErrorNotReady;
        s->was_asked = true;
    }
    return leave(error);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    enter();
    struct work *w = work_new(WORK_HOST, NULL, 0);
    w->u.host.function = function;
    w->u.host.data = data;
    return leave(submit(stream_of(stream), w));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret_event, unsigned flags)
{
    enter();
    cudaError_t error = check_device(current_device);
    if (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess))
        error = cudaErrorInvalidValue;
    /* as CUDA has it */
    if (flags & cudaEventInterprocess && !(flags & cudaEventDisableTiming))
        error = cudaErrorInvalidValue;
    if (error || lost) return leave(error);
    struct td_emu_event *e = calloc(1, sizeof *e);
    if (!e) return leave(cudaErrorMemoryAllocation);
    e->n_refs = 1;
    e->fd = -1;
    if (flags & cudaEventInterprocess) {
        e->fd = memfd_create("tandem-cuda-emu-event", MFD_CLOEXEC);
        void *p = e->fd < 0 || ftruncate(e->fd, PAGE)
                      ? MAP_FAILED
                      : mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);
        if (p == MAP_FAILED) {
            event_release(e);
            return leave(cudaErrorMemoryAllocation);
        }
        e->shared = p;
    }
    *ret_event = e;
    return leave(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    enter();
    if (!event) return leave(cudaErrorInvalidResourceHandle);
    event_release(event);
    return leave(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    enter();
    if (!event) return leave(cudaErrorInvalidResourceHandle);
    struct td_emu_stream *s = stream_of(stream);
    /* an edge of the graph, which needs none: its works stand in one order anyway */
    if (s->capture) {
        event->capture = s->capture;
        event->capture_stream = s;
        event->n_captured = s->n_captured;
        return leave(s->capture->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    }
    event->capture = NULL;
    if (event->shared) { /* another process cannot do our work for us: done now */
        drain(s, s->n_submitted);
        __atomic_fetch_add(event->shared, 1, __ATOMIC_RELEASE);
        return leave(cudaSuccess);
    }
    struct work *w = work_new(WORK_RECORD, NULL, 0);
    w->u.event.event = event;
    event->n_refs++;
    w->u.event.number = ++event->n_recorded;
    cudaError_t error = submit(s, w);
    if (error) {
        event->n_recorded--;
    } else {
        event->stream = s;
        event->until = s->n_submitted;
        event->was_asked = false;
    }
    return leave(error);
}

/* Makes visible what another process wrote before its record. */
static void see_shared(const struct td_emu_event *e)
{
    if (e->shared) (void)__atomic_load_n(e->shared, __ATOMIC_ACQUIRE);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    enter();
    if (!event || flags)
        return leave(event ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    struct td_emu_stream *s = stream_of(stream);
    if (event->capture) {
        struct capture *c = captures;
        while (c && c != event->capture) c = c->next;
        if (!c || (s->capture && s->capture != c)) return leave(cudaErrorInvalidValue);
        if (!s->capture) {
            s->capture = c;
            s->is_forked = true;
            s->is_unjoined = true;
            s->n_captured = 0;
        }
        if (event->capture_stream->n_captured == event->n_captured && event->capture_stream != s)
            event->capture_stream->is_unjoined = false;
        return leave(cudaSuccess);
    }
    see_shared(event);
    if (event->n_done == event->n_recorded) return leave(cudaSuccess);
    /* work outside the graph cannot be waited for inside */
    if (s->capture) return leave(refuse_captured(s->capture));
    struct work *w = work_new(WORK_WAIT, NULL, 0);
    w->u.event.event = event;
    event->n_refs++;
    w->u.event.number = event->n_recorded;
    w->u.event.stream = event->stream;
    w->u.event.until = event->until;
    return leave(submit(s, w));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    enter();
    if (!event) return leave(cudaErrorInvalidResourceHandle);
    cudaError_t error = refuse_captured(event->capture);
    see_shared(event);
    if (!error && event->n_done < event->n_recorded) drain(event->stream, event->until);
    return leave(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    enter();
    if (!event) return leave(cudaErrorInvalidResourceHandle);
    cudaError_t error = refuse_captured(event->capture);
    see_shared(event);
    if (!error && event->n_done < event->n_recorded) {
        if (event->was_asked)
            drain(event->stream, event->until);
        else
            error = cudaErrorNotReady;
        event->was_asked = true;
    }
    return leave(error);
}

/* ---- graphs */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    enter();
    if (!stream) return leave(cudaErrorStreamCaptureUnsupported); /* the default stream cannot */
    if (stream->capture) return leave(cudaErrorInvalidValue);
    struct capture *c = calloc(1, sizeof *c);
    struct td_emu_graph *g = calloc(1, sizeof *g);
    if (!c || !g) td_emu_die("no memory for a graph");
    g->works.tail = &g->works.head;
    *c = (struct capture){g, stream, mode, pthread_self(), false, captures};
    captures = c;
    stream->capture = c;
    stream->n_captured = 0;
    stream->is_forked = false;
    return leave(cudaSuccess);
}

static void graph_free(struct td_emu_graph *g)
{
    works_free(&g->works);
    free(g);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret_graph)
{
    enter();
    struct capture *c = stream ? stream->capture : NULL;
    if (!c) return leave(cudaErrorInvalidValue);
    if (c->origin != stream) {
        c->is_invalid = true;
        return leave(cudaErrorStreamCaptureUnmatched);
    }
    cudaError_t error = c->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (struct td_emu_stream *s = streams; s; s = s->next) {
        if (s->capture != c) continue;
        if (s != stream && s->is_unjoined && !error) error = cudaErrorStreamCaptureUnjoined;
        s->capture = NULL;
        s->is_forked = false;
    }
    struct capture **at = &captures;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    if (error) graph_free(c->graph);
    *ret_graph = error ? NULL : c->graph;
    free(c);
    return leave(error);
}

int td_emu_graph_attach(cudaStream_t stream, cudaHostFn_t release, void *data)
{
    pthread_mutex_lock(&lock);
    struct capture *c = stream_of(stream)->capture;
    if (c) {
        struct work *w = work_new(WORK_OBJECT, NULL, 0);
        w->u.object = calloc(1, sizeof *w->u.object);
        if (!w->u.object) td_emu_die("no memory for an object of a graph");
        *w->u.object = (struct object){1, release, data};
        append(&c->graph->works, w);
    }
    pthread_mutex_unlock(&lock);
    return c != NULL;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret_exec, cudaGraph_t graph,
                                 unsigned long long flags)
{
    (void)flags;
    enter();
    if (!graph) return leave(cudaErrorInvalidValue);
    struct td_emu_graph_exec *g = calloc(1, sizeof *g);
    if (!g) return leave(cudaErrorMemoryAllocation);
    g->works.tail = &g->works.head;
    g->n_refs = 1;
    for (const struct work *w = graph->works.head; w; w = w->next) append(&g->works, work_copy(w));
    *ret_exec = g;
    return leave(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    enter();
    if (!exec) return leave(cudaErrorInvalidValue);
    struct work *w = work_new(WORK_GRAPH, NULL, 0);
    w->u.graph = exec;
    exec->n_refs++;
    return leave(submit(stream_of(stream), w));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *ret_n_nodes)
{
    enter();
    if (!graph || nodes) return leave(cudaErrorInvalidValue); /* only their number is told */
    *ret_n_nodes = graph->n_works;
    return leave(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    enter();
    if (!exec) return leave(cudaErrorInvalidValue);
    exec_release(exec);
    return leave(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    enter();
    if (!graph) return leave(cudaErrorInvalidValue);
    graph_free(graph);
    return leave(cudaSuccess);
}

/* ---- other processes */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret_handle, void *memory)
{
    enter();
    return leave(td_emu_memory_export(memory, ret_handle));
}

cudaError_t cudaIpcOpenMemHandle(void **ret_memory, cudaIpcMemHandle_t handle, unsigned flags)
{
    enter();
    cudaError_t error = flags != cudaIpcMemLazyEnablePeerAccess ? cudaErrorInvalidValue
                                                                : check_device(current_device);
    if (!error) error = refuse_in_capture();
    if (!error && has_no_peers) error = cudaErrorPeerAccessUnsupported;
    return leave(error ? error : td_emu_memory_import(&handle, ret_memory));
}

cudaError_t cudaIpcCloseMemHandle(void *memory)
{
    enter();
    drain_all(false);
    return leave(td_emu_memory_close(memory));
}

struct event_handle { /* the bytes of a cudaIpcEventHandle_t */
    uint32_t magic;
    int32_t pid, fd, reserved;
    uint64_t inode;
};

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *ret_handle, cudaEvent_t event)
{
    enter();
    struct stat file;
    if (!event || !event->shared || fstat(event->fd, &file))
        return leave(cudaErrorInvalidResourceHandle);
    struct event_handle h = {EVENT_MAGIC, getpid(), event->fd, 0, file.st_ino};
    memset(ret_handle, 0, sizeof *ret_handle);
    memcpy(ret_handle, &h, sizeof h);
    return leave(cudaSuccess);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *ret_event, cudaIpcEventHandle_t handle)
{
    enter();
    struct event_handle h;
    memcpy(&h, &handle, sizeof h);
    if (h.magic != EVENT_MAGIC) return leave(cudaErrorInvalidValue);
    if (h.pid == getpid()) return leave(cudaErrorDeviceUninitialized);
    struct td_emu_event *e = calloc(1, sizeof *e);
    if (!e) return leave(cudaErrorMemoryAllocation);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    struct stat file;
    e->n_refs = 1;
    e->fd = open(path, O_RDWR | O_CLOEXEC);
    void *p = e->fd < 0 || fstat(e->fd, &file) || file.st_ino != h.inode
                  ? MAP_FAILED
                  : mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);
    if (p == MAP_FAILED) {
        event_release(e);
        return leave(cudaErrorInvalidResourceHandle);
    }
    e->shared = p;
    *ret_event = e;
    return leave(cudaSuccess);
}

/* ---- kernels */

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    enter();
    bool is_carveout = attribute == cudaFuncAttributePreferredSharedMemoryCarveout;
    if (!is_carveout && attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return leave(cudaErrorInvalidValue);
    if (value < (is_carveout ? -1 : 0) || value > (is_carveout ? 100 : SHARED_MAX))
        return leave(cudaErrorInvalidValue);
    int i = 0;
    while (i < n_functions && functions[i].kernel != kernel) i++;
    if (i == MAX_FUNCTIONS)
        td_emu_die("more than %d kernels with shared memory of their own", MAX_FUNCTIONS);
    functions[i].kernel = kernel;
    if (is_carveout)
        functions[i].has_carveout = true;
    else
        functions[i].shared_bytes = value;
    if (i == n_functions) n_functions++;
    return leave(cudaSuccess);
}

static cudaError_t check_launch(const void *kernel, struct td_emu_dims grid,
                                struct td_emu_dims block, size_t shared_bytes)
{
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (has_no_image) return cudaErrorNoKernelImageForDevice;
    if (!block.x || !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64)
        return cudaErrorInvalidConfiguration;
    if ((uint64_t)block.x * block.y * block.z > TD_EMU_MAX_THREADS)
        return cudaErrorInvalidConfiguration;
    size_t limit = SHARED_DEFAULT;
    bool has_carveout = false;
    for (int i = 0; i < n_functions; i++) {
        if (functions[i].kernel != kernel) continue;
        if ((size_t)functions[i].shared_bytes > limit) limit = (size_t)functions[i].shared_bytes;
        has_carveout = functions[i].has_carveout;
    }
    if (shared_bytes > limit) return cudaErrorInvalidValue;
    /* the house's rule: runtime.h */
    return shared_bytes > SHARED_DEFAULT && !has_carveout ? cudaErrorInvalidConfiguration
                                                          : cudaSuccess;
}

void td_emu_next_is_early(bool is_early) { next_is_early = is_early; }

void td_emu_launch(const char *name, const void *kernel, struct td_emu_dims grid,
                   struct td_emu_dims block, size_t shared_bytes, cudaStream_t stream,
                   void (*run_block)(const void *closure), const void *closure,
                   size_t closure_bytes)
{
    enter();
    cudaError_t error = check_device(current_device);
    if (!error) error = check_launch(kernel, grid, block, shared_bytes);
    const struct capture *c = stream_of(stream)->capture;
    if (!error && next_is_early && c && c->graph->n_works && c->graph->last != WORK_KERNEL)
        error = cudaErrorStreamCaptureUnsupported;
    next_is_early = false;
    if (!error) {
        struct work *w = work_new(WORK_KERNEL, closure, closure_bytes);
        w->u.kernel.name = name;
        w->u.kernel.grid = grid;
        w->u.kernel.block = block;
        w->u.kernel.shared_bytes = shared_bytes;
        w->u.kernel.run = run_block;
        error = submit(stream_of(stream), w);
    }
    leave(error);
}

__attribute__((destructor)) static void runtime_unload(void)
{
    works_free(&default_stream.works);
    while (streams) { /* a program may end without giving them back */
        struct td_emu_stream *s = streams;
        streams = s->next;
        works_free(&s->works);
        free(s);
    }
}
