/* runtime.h - the calls of the CUDA runtime that this project makes, on the host, with CUDA's
 * names, values and behaviour.
 *
 * Why here: streams, events, graphs, copies, IPC and errors, all that lies between the kernels and
 * the daemons, are thus tested on machines without a GPU. What CUDA leaves open is done in the
 * least convenient way that CUDA allows:
 *   - Work is done as late as allowed: when a thread synchronises with it, or asks (a query of an
 *     event or stream answers "not ready" once). A missing wait therefore reads old bytes.
 *     TD_CUDA_EMU_EAGER=1 does work at once instead.
 *   - New device memory up to 16 MiB holds NaN (0xff). Memory that is not allocated is not mapped:
 *     a kernel that leaves its buffers ends with SIGSEGV.
 *   - A recorded graph holds the arguments of its launches as they were, and the addresses of its
 *     copies.
 *   - A copy outside an allocation, or with a direction that does not fit its pointers, returns
 *     cudaErrorInvalidValue or ...InvalidMemcpyDirection.
 * Device memory is one memfd per process: cudaIpcOpenMemHandle in another process of the same user
 * maps the same bytes, also after the owner's end.
 *
 * Environment (read again by each cudaGetDeviceCount, which every opening of a device makes):
 *   TD_CUDA_EMU_MEMORY   bytes of the device, with K, M or G (4G)
 *   TD_CUDA_EMU_DEVICES  number of devices (1)
 *   TD_CUDA_EMU_SMS      multiprocessors (8)
 *   TD_CUDA_EMU_STRICT   1: the host may not follow pointers into device memory (SIGSEGV); for
 *                        tests where no fake NIC writes there
 *   TD_CUDA_EMU_SEED     order of threads and blocks (1)
 *   TD_CUDA_EMU_NCCL     a library in place of libnccl.so.2 (tests/fake/nccl_stub.c); unset: ranks
 *                        meet in the host's memory (comm.cu)
 *   TD_CUDA_EMU_FAULT    comma list: launch:N, ecc:N (the N-th kernel fails and the device is
 *                        lost), malloc:N (the N-th cudaMalloc finds no memory), each with @D behind
 *                        it only in processes that use device D; nodevice, nodriver, nopeer (no
 *                        memory of another process opens), ltnone, ltrefuse (cublaslt.h), noimage
 *                        (the library has no code for this device), cc:75 (another compute
 *                        capability; default 90)
 *
 * Threads: any thread may make any call beside any other. A stream does its work in order, on the
 * host thread that first needs it done. */
#ifndef TD_KERNELS_CUDA_EMU_RUNTIME_H
#define TD_KERNELS_CUDA_EMU_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/fake/cuda_emu/block.h"

#ifdef __cplusplus
extern "C" {
#define TD_EMU_DEFAULT(value) = value
#else
#define TD_EMU_DEFAULT(value)
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorDeviceUninitialized = 201,
    cudaErrorAlreadyMapped = 208,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorECCUncorrectable = 214,
    cudaErrorPeerAccessUnsupported = 217,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorUnknown = 999,
} cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrPciDeviceId = 34,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrPciDomainId = 50,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrGPUDirectRDMASupported = 116,
};

enum { cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxShared = 100 };

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

#define cudaStreamNonBlocking 1u
#define cudaEventBlockingSync 1u
#define cudaEventDisableTiming 2u
#define cudaEventInterprocess 4u
#define cudaHostAllocDefault 0u
#define cudaHostAllocPortable 1u
#define cudaHostAllocMapped 2u
#define cudaHostRegisterPortable 1u
#define cudaHostRegisterMapped 2u
#define cudaIpcMemLazyEnablePeerAccess 1u
#define CUDART_VERSION 13000

typedef struct td_emu_stream *cudaStream_t;
typedef struct td_emu_event *cudaEvent_t;
typedef struct td_emu_graph *cudaGraph_t;
typedef struct td_emu_graph_exec *cudaGraphExec_t;
typedef struct td_emu_node *cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void *data);
typedef struct {
    char reserved[64];
} cudaIpcMemHandle_t;
typedef struct {
    char reserved[64];
} cudaIpcEventHandle_t;
typedef struct {
    char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int regsPerBlock, warpSize, maxThreadsPerBlock, major, minor, multiProcessorCount, l2CacheSize,
        ECCEnabled, pciBusID, pciDeviceID, pciDomainID, maxThreadsPerMultiProcessor,
        unifiedAddressing, integrated, memoryBusWidth;
};

/* ---- device and errors */
cudaError_t cudaGetDeviceCount(int *ret_count);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret_properties, int device);
cudaError_t cudaDeviceGetAttribute(int *ret_value, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceGetStreamPriorityRange(int *ret_least, int *ret_greatest);
cudaError_t cudaDriverGetVersion(int *ret_version);
cudaError_t cudaRuntimeGetVersion(int *ret_version);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);

/* ---- memory */
cudaError_t cudaMalloc(void **ret_memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **ret_memory, size_t bytes);
cudaError_t cudaHostAlloc(void **ret_memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *memory);
cudaError_t cudaMemGetInfo(size_t *ret_free, size_t *ret_total);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream TD_EMU_DEFAULT(0));
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream TD_EMU_DEFAULT(0));
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes,
                            cudaStream_t stream TD_EMU_DEFAULT(0));

/* ---- streams and events */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret_stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret_stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags TD_EMU_DEFAULT(0));
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret_event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream TD_EMU_DEFAULT(0));
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);

/* ---- graphs, by capture */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret_graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret_exec, cudaGraph_t graph,
                                 unsigned long long flags TD_EMU_DEFAULT(0));
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *ret_n_nodes);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

/* Not a call of CUDA, but the purpose of cudaGraphRetainUserObject: `release(data)` runs when the
 * last graph is gone that the stream is recording now, or that was made from it. 0: the stream
 * records none, and nothing was kept. release may call nothing of this header. */
int td_emu_graph_attach(cudaStream_t stream, cudaHostFn_t release, void *data);

/* ---- other processes */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret_handle, void *memory);
cudaError_t cudaIpcOpenMemHandle(void **ret_memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *memory);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *ret_handle, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *ret_event, cudaIpcEventHandle_t handle);

/* ---- kernels: TD_LAUNCH calls these; cudaGetLastError returns the error. Two rules are stricter
 * than CUDA's. The next launch of this thread may begin early (programmatic serialization): refused
 * in a recording unless the last thing recorded is a kernel. More than 48 KiB of dynamic shared
 * memory: refused unless the kernel has asked for a carve-out, because the driver's own choice may
 * have room for one block of a multiprocessor where two were meant. */
void td_emu_next_is_early(bool is_early);
void td_emu_launch(const char *name, const void *kernel, struct td_emu_dims grid,
                   struct td_emu_dims block, size_t shared_bytes, cudaStream_t stream,
                   void (*run)(const void *closure), const void *closure, size_t closure_bytes);
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value);

#ifdef __cplusplus
}

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

template <class T> static inline cudaError_t cudaMalloc(T **ret_memory, size_t bytes)
{
    return cudaMalloc((void **)(void *)ret_memory, bytes);
}
template <class T> static inline cudaError_t cudaMallocHost(T **ret_memory, size_t bytes)
{
    return cudaMallocHost((void **)(void *)ret_memory, bytes);
}
template <class T>
static inline cudaError_t cudaHostAlloc(T **ret_memory, size_t bytes, unsigned flags)
{
    return cudaHostAlloc((void **)(void *)ret_memory, bytes, flags);
}
#endif
#endif
