/* backends.c - every path, in order of preference. A new one is a folder and a line here. */
#include "common/transfer/backend.h"

#include "common/transfer/endpoint.h"

/* What moves a block with the fewest copies comes first; tcp, which every host has, comes last. */
#define TD_BACKENDS(BACKEND)                                                                       \
    BACKEND(td_transfer_ipc)  /* gpu/ipc.c: one host, both pools in device memory */               \
    BACKEND(td_transfer_shm)  /* shm/shm.c: one host, both pools in host memory */                 \
    BACKEND(td_transfer_rdma) /* rdma/rdma.c: both hosts have an RDMA device */                    \
    BACKEND(td_transfer_ring) /* gpu/ring.c: one host, the sender's pool in device memory */       \
    BACKEND(td_transfer_tcp)  /* tcp/tcp.c: any two hosts */

#define TD_DECLARE(name) extern const struct td_transfer_backend name;
#define TD_LIST(name) &name,
TD_BACKENDS(TD_DECLARE)
const struct td_transfer_backend *const td_transfer_backends[TD_TRANSFER_N_BACKENDS + 1] = {
    TD_BACKENDS(TD_LIST) NULL,
};

const struct td_transfer_backend *td_transfer_backend_of(enum td_xfer_path path)
{
    TD_EACH_BACKEND (b)
        if (b->path == path) return b;
    return NULL;
}

const char *td_xfer_path_name(enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return b ? b->name : path == TD_XFER_PATH_AUTO ? "auto" : "unknown";
}

bool td_xfer_path_is_local(enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return b && b->local;
}

bool td_xfer_path_needs_verbs(enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return b && b->needs_verbs;
}

bool td_xfer_path_needs_device(enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return b && b->needs_device;
}

bool td_xfer_path_uses_verbs(enum td_xfer_path path)
{
    TD_EACH_BACKEND (b)
        if (b->needs_verbs && xfer_path_allows(path, b->path)) return true;
    return false;
}

enum td_xfer_way td_xfer_path_way(enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return b ? b->way : TD_XFER_WAY_NONE;
}
