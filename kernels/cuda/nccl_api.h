/* nccl_api.h - the dozen calls of NCCL that comm.cu makes, as libnccl.so.2 exports them.
 *
 * Why here: NCCL is opened at run time, so only its binary interface matters. Written down here, it
 * lets the library be built, and comm.cu be tested, on machines without nccl.h;
 * tests/fake/nccl_stub.c stands in for NCCL there. Where nccl.h is installed, comm.cu compares the
 * two. Source: nccl.h of NCCL 2.28; these values have not changed since NCCL 2. */
#ifndef TD_KERNELS_CUDA_NCCL_API_H
#define TD_KERNELS_CUDA_NCCL_API_H

#include <stddef.h>

#define TD_NCCL_LIBRARY "libnccl.so.2"
#define TD_NCCL_ID_BYTES 128

struct td_nccl_comm; /* ncclComm */

struct td_nccl_id { /* ncclUniqueId: passed by value */
    char bytes[TD_NCCL_ID_BYTES];
};

/* ncclResult_t, ncclDataType_t, ncclRedOp_t: ints. */
enum {
    TD_NCCL_SUCCESS = 0,
    TD_NCCL_INTERNAL_ERROR = 3,
    TD_NCCL_INVALID_USAGE = 5,
    TD_NCCL_REMOTE_ERROR = 6,
    TD_NCCL_IN_PROGRESS = 7
};
enum { TD_NCCL_FLOAT = 7 };
enum { TD_NCCL_SUM = 0 };

/* ncclConfig_t as in NCCL 2.14. Later versions only append fields: the library reads `size` bytes
 * and uses defaults for what `version` did not know. */
struct td_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
};
#define TD_NCCL_CONFIG_MAGIC 0xcafebeefu
#define TD_NCCL_CONFIG_VERSION 21400u

/* Missing in NCCL before 2.14, so it is looked up by name and may be NULL. */
#define TD_NCCL_INIT_CONFIG "ncclCommInitRankConfig"
typedef int td_nccl_init_config_fn(struct td_nccl_comm **ret_comm, int n_ranks,
                                   struct td_nccl_id id, int rank, struct td_nccl_config *config);

/* X(name, result, arguments); `stream` is a cudaStream_t. */
#define TD_NCCL_FUNCTIONS(X)                                                                       \
    X(ncclGetUniqueId, int, (struct td_nccl_id * ret_id))                                          \
    X(ncclCommInitRank, int,                                                                       \
      (struct td_nccl_comm * *ret_comm, int n_ranks, struct td_nccl_id id, int rank))              \
    X(ncclCommAbort, int, (struct td_nccl_comm * comm))                                            \
    X(ncclCommDestroy, int, (struct td_nccl_comm * comm))                                          \
    X(ncclCommGetAsyncError, int, (struct td_nccl_comm * comm, int *ret_error))                    \
    X(ncclAllReduce, int,                                                                          \
      (const void *from, void *to, size_t n, int type, int op, struct td_nccl_comm *comm,          \
       void *stream))                                                                              \
    X(ncclSend, int,                                                                               \
      (const void *from, size_t n, int type, int peer, struct td_nccl_comm *comm, void *stream))   \
    X(ncclRecv, int,                                                                               \
      (void *to, size_t n, int type, int peer, struct td_nccl_comm *comm, void *stream))           \
    X(ncclGroupStart, int, (void))                                                                 \
    X(ncclGroupEnd, int, (void))                                                                   \
    X(ncclGetErrorString, const char *, (int result))                                              \
    X(ncclGetLastError, const char *, (struct td_nccl_comm * comm))

/* What the stand-in needs of the emulated GPU. comm.cu passes it where the library exports
 * TD_NCCL_STUB_OPEN. */
struct td_nccl_stub_cuda {
    int (*launch_host)(void *stream, void (*function)(void *), void *data); /* cudaLaunchHostFunc */
    /* td_emu_graph_attach: 1 = the stream records */
    int (*attach)(void *stream, void (*release)(void *), void *object);
};
#define TD_NCCL_STUB_OPEN "td_nccl_stub_open"

#endif
