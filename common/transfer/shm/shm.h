/* shm.h - what paths over the unix socket of one host share: descriptors that come along with
 * frames, control words, and the pool that one side maps of the other's. */
#ifndef TD_TRANSFER_SHM_SHM_H
#define TD_TRANSFER_SHM_SHM_H

#include "common/base/sanitizers.h"
#include "common/transfer/endpoint.h"

/* Between blocks and control words. TSan knows no fences; the mutex orders what it watches. */
#ifdef TD_WITH_TSAN
#define XFER_FENCE(order) ((void)0)
#else
#define XFER_FENCE(order) atomic_thread_fence(order)
#endif

#define XFER_MAX_FDS 2

/* An op's handle while its source blocks may be copied, else 0. The sender writes it. */
struct xfer_control_word {
    _Atomic uint64_t handle;
    uint8_t pad[56];
};
_Static_assert(sizeof(struct xfer_control_word) == 64, "shared layout");

/* This side as a sender: what receivers on this host are given. */
struct xfer_shm {
    struct xfer_control_word *words; /* [max_ops] */
    int words_fd, arena_ro_fd;       /* arena_ro_fd -1: the pool is a device's */
};

/* Every path over the unix socket begins its struct with this. */
struct xfer_local_conn {
    int fds[XFER_MAX_FDS], n_fds; /* came with the last header */
    /* receiver: the sender's control words, and how many blocks its pool has */
    const struct xfer_control_word *words;
    uint32_t n_words;
    int32_t n_source_blocks;
    const uint8_t *source;          /* receiver: the sender's pool, or its ring */
    size_t source_bytes, map_bytes; /* map_bytes: to be unmapped; 0: it was not mapped */
};

/* Memory that other processes can be given, sealed at this size; NULL with errno. */
void *xfer_shm_memory(const char *name, size_t bytes, int *ret_fd);
/* another descriptor of it, for receivers: they need not, and so must not, be able to write */
int xfer_shm_read_only(int fd);
/* x->shm: the control words of this side's ops */
td_status xfer_shm_make_words(struct td_xfer *x, struct td_err *err);
td_status xfer_shm_take_words(struct xfer_local_conn *l, int fd, uint32_t n_words); /* the peer's */
/* fd, or -1 with errno */
int xfer_shm_dial(struct td_xfer *x, const struct td_xfer_address *to, bool *ret_connected);
/* MEM: memory that fd names, the pool or the ring, and the control words. False: reason. */
bool xfer_shm_send_mem(struct td_xfer *x, struct td_xfer_conn *c, uint64_t block_bytes,
                       uint32_t n_blocks, int fd, char reason[TD_XFER_REASON_MAX]);
/* A frame of SETUP with descriptors (at most XFER_MAX_FDS); false: the socket did not take it. */
bool xfer_shm_send_fds(struct td_xfer_conn *c, struct td_xfer_frame *f, const void *payload,
                       size_t n_bytes, const int *fds, size_t n_fds);
/* keeps descriptors that came along */
ssize_t xfer_shm_recv(struct td_xfer_conn *c, void *to, size_t n);
/* MEM came; refused when wrong. unit: the block size that it must say; 0: any. */
void xfer_shm_on_mem(struct td_xfer *x, struct td_xfer_conn *c, uint64_t unit);
bool xfer_shm_may_open(struct td_xfer_conn *c, uint32_t op); /* source and the op's word are here */
int32_t xfer_shm_n_source_blocks(const struct td_xfer *x, const struct td_xfer_conn *c);
/* gives back what came: mapping, words, descriptors */
void xfer_shm_conn_close(struct td_xfer *x, struct td_xfer_conn *c);
/* shm, shm-staged: one of them is named */
td_status xfer_shm_fits(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                        struct td_err *err);
bool xfer_shm_word_shows(const struct xfer_control_word *word, uint64_t handle);
void xfer_shm_op_handle(struct td_xfer *x, uint32_t op, uint64_t handle);

#endif
