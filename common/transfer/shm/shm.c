/* shm.c - two processes on one host: the receiver copies.
 *
 * The receiver listens on an abstract unix socket whose name holds a random number; the name and a
 * random proof are in every grant. A sender that can connect to it shares the host (the network
 * namespace), runs as the same user (SO_PEERCRED, both sides look) and has shown to be talking to
 * the grant's author once HELLO_ACK carries the proof: only then it hands over, by SCM_RIGHTS, its
 * pool (a read-only descriptor) and its control words. After that the same frames as on tcp flow,
 * except that REF names source blocks where DATA would carry bytes. The receiver maps both,
 * read-only, and takes only memfds that are sealed against shrinking, so that no sender can make a
 * copy end in SIGBUS. (pread instead of the mapping was measured at half the speed.)
 *
 * The fence is a control word per op, written by the sender alone: the op's handle while its source
 * blocks hold what was submitted, 0 from just before the op's terminal event. As in a seqlock the
 * receiver looks before and after the copy; bytes between two looks that both show the handle of
 * the slot's binding were read while the sender could not have reused the blocks, for however long
 * the receiver was stopped in the middle. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/transfer/copy.h"
#include "common/transfer/shm/shm.h"

#define SHM_ANSWER_MIN (256u << 10) /* copied before answers that are due go out, */
#define SHM_ANSWER_MAX (2u << 20)   /* at least and at most */

static socklen_t abstract_address(const char *name, struct sockaddr_un *ret_address)
{
    size_t n = strlen(name);
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret_address->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

static td_status shm_open_side(struct td_xfer *x, const struct td_xfer_config *config,
                               struct td_err *err)
{
    struct sockaddr_un address;
    (void)config;
    if (x->self.path != TD_XFER_PATH_AUTO && !td_xfer_path_is_local(x->self.path)) return TD_OK;
    snprintf(x->self.shm_name, sizeof x->self.shm_name, "tandem-xfer-%016" PRIx64, xfer_random(x));
    uint64_t proof[2] = {xfer_random(x), xfer_random(x)};
    memcpy(x->self.proof, proof, sizeof x->self.proof);
    socklen_t n = abstract_address(x->self.shm_name, &address);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, n) || listen(fd, 128)) {
        td_status status = td_fail(err, TD_ERR_IO, "xfer: listen on unix socket @%s: %s",
                                   x->self.shm_name, strerror(errno));
        if (fd >= 0) close(fd);
        x->self.shm_name[0] = 0;
        return status;
    }
    x->listen.shm_fd = fd;
    return TD_OK;
}

void *xfer_shm_memory(const char *name, size_t bytes, int *ret_fd)
{
    void *map = MAP_FAILED;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
        map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *ret_fd = fd;
    if (map != MAP_FAILED) return map;
    int e = errno;
    if (fd >= 0) close(fd);
    errno = e;
    return NULL;
}

int xfer_shm_read_only(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

td_status xfer_shm_make_words(struct td_xfer *x, struct td_err *err)
{
    size_t bytes = (size_t)x->core.max_ops * sizeof(struct xfer_control_word);
    struct xfer_shm *shm = calloc(1, sizeof *shm);
    int fd;
    void *map = shm ? xfer_shm_memory("tandem-xfer-words", bytes, &fd) : NULL;
    if (!map) {
        free(shm);
        return td_fail(err, TD_ERR_IO, "xfer: cannot share control words with this host: %s",
                       strerror(errno));
    }
    *shm = (struct xfer_shm){.words = map, .words_fd = fd, .arena_ro_fd = -1};
    x->shm = shm;
    return TD_OK;
}

static td_status shm_mem_add(struct td_xfer *x, const struct td_arena *arena, struct td_err *err)
{
    if (x->self.path == TD_XFER_PATH_SHM && !x->pool.memory && arena->memfd < 0)
        return td_fail(err, TD_ERR_UNSUPPORTED, "xfer: path shm needs a pool in shareable memory");
    if (x->pool.memory || arena->memfd < 0 || x->listen.shm_fd < 0) return TD_OK;
    bool sealed = fcntl(arena->memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0;
    int ro = sealed ? xfer_shm_read_only(arena->memfd) : -1;
    if (ro < 0)
        return td_fail(err, TD_ERR_IO, "xfer: cannot offer the pool to this host: %s",
                       strerror(errno));
    td_status status = xfer_shm_make_words(x, err);
    if (status)
        close(ro);
    else
        x->shm->arena_ro_fd = ro;
    return status;
}

static bool peer_allowed(const struct td_xfer *x, int fd) /* the same user as this process */
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    (void)x;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n)) return false;
    if (peer.uid == geteuid()) return true;
    errno = EACCES;
    return false;
}

int xfer_shm_dial(struct td_xfer *x, const struct td_xfer_address *to, bool *ret_connected)
{
    struct sockaddr_un address;
    socklen_t n = abstract_address(to->shm_name, &address);
    *ret_connected = true;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr *)&address, n) || !peer_allowed(x, fd)) {
        int e = errno;
        close(fd);
        errno = e;
        return -1;
    }
    return fd;
}

union control { /* of a message with descriptors */
    struct cmsghdr header;
    char room[CMSG_SPACE(XFER_MAX_FDS * sizeof(int))];
};

bool xfer_shm_send_fds(struct td_xfer_conn *c, struct td_xfer_frame *f, const void *payload,
                       size_t n_bytes, const int *fds, size_t n_fds)
{
    uint8_t header[64];
    union control control = {0};
    struct iovec iov[2] = {{.iov_base = header, .iov_len = sizeof header},
                           {.iov_base = (void *)(uintptr_t)payload, .iov_len = n_bytes}};
    struct msghdr msg = {.msg_iov = iov,
                         .msg_iovlen = 2,
                         .msg_control = &control,
                         .msg_controllen = CMSG_SPACE(n_fds * sizeof *fds)};
    f->length = (uint32_t)n_bytes;
    f->conn = c->tag;
    td_xfer_frame_encode(f, header);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(n_fds * sizeof *fds);
    memcpy(CMSG_DATA(&control.header), fds, n_fds * sizeof *fds);
    /* Nothing is queued before it on this new connection, so it goes whole or not at all. */
    return c->tx.used == 0 &&
           sendmsg(c->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)(sizeof header + n_bytes);
}

bool xfer_shm_send_mem(struct td_xfer *x, struct td_xfer_conn *c, uint64_t block_bytes,
                       uint32_t n_blocks, int fd, char reason[TD_XFER_REASON_MAX])
{
    struct td_xfer_frame f = {.type = TD_XFER_MEM};
    struct td_xfer_mem mem = {.arena_bytes = block_bytes * n_blocks,
                              .block_bytes = block_bytes,
                              .n_blocks = n_blocks,
                              .n_words = x->core.max_ops};
    int fds[2] = {fd, x->shm->words_fd};
    xfer_say(reason, "could not hand over the pool");
    return xfer_shm_send_fds(c, &f, &mem, sizeof mem, fds, 2);
}

static bool shm_open_conn(struct td_xfer *x, struct td_xfer_conn *c,
                          char reason[TD_XFER_REASON_MAX])
{
    return xfer_shm_send_mem(x, c, x->pool.block_bytes, (uint32_t)x->pool.n_blocks,
                             x->shm->arena_ro_fd, reason);
}

static void drop_fds(struct xfer_local_conn *l)
{
    for (int i = 0; i < l->n_fds; i++) close(l->fds[i]);
    l->n_fds = 0;
}

ssize_t xfer_shm_recv(struct td_xfer_conn *c, void *to, size_t n)
{
    struct xfer_local_conn *l = c->own;
    union control control;
    struct iovec iov = {.iov_base = to, .iov_len = n};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = &control,
                         .msg_controllen = sizeof control};
    ssize_t k = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (k <= 0) return k;
    for (struct cmsghdr *m = CMSG_FIRSTHDR(&msg); m; m = CMSG_NXTHDR(&msg, m)) {
        if (m->cmsg_level != SOL_SOCKET || m->cmsg_type != SCM_RIGHTS) continue;
        int n_fds = (int)((m->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < n_fds; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(m) + (size_t)i * sizeof fd, sizeof fd);
            if (l->n_fds < XFER_MAX_FDS)
                l->fds[l->n_fds++] = fd;
            else
                close(fd);
        }
    }
    return k;
}

/* False for all but memfds, too. */
static bool is_sealed(int fd)
{
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
}

td_status xfer_shm_take_words(struct xfer_local_conn *l, int fd, uint32_t n_words)
{
    struct stat words;
    if (!is_sealed(fd) || fstat(fd, &words)) return TD_ERR_CORRUPT;
    if (n_words < 1 || n_words > 65536 || (uint64_t)words.st_size < n_words * sizeof *l->words)
        return TD_ERR_CORRUPT;
    void *map = mmap(NULL, n_words * sizeof *l->words, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return TD_ERR_CORRUPT;
    l->words = map;
    l->n_words = n_words;
    return TD_OK;
}

/* Maps what MEM names; the descriptors are closed by the caller. */
static td_status take_mem(struct xfer_local_conn *l, const struct td_xfer_mem *mem, uint64_t unit)
{
    struct stat arena;
    if (l->source || l->n_fds != XFER_MAX_FDS) return TD_ERR_CORRUPT; /* once, and with both */
    if (!is_sealed(l->fds[0]) || fstat(l->fds[0], &arena)) return TD_ERR_CORRUPT;
    if (unit < 1 || unit > 1u << 30 || mem->block_bytes != unit || mem->n_blocks < 1 ||
        mem->n_blocks > 1u << 28 || mem->arena_bytes != mem->block_bytes * mem->n_blocks ||
        (uint64_t)arena.st_size < mem->arena_bytes)
        return TD_ERR_CORRUPT;
    if (xfer_shm_take_words(l, l->fds[1], mem->n_words)) return TD_ERR_CORRUPT;
    /* On reserved huge pages a mapping has whole ones, and so must its end. */
    uint64_t page =
        arena.st_blksize > 4096 && arena.st_blksize <= 1 << 30 ? (uint64_t)arena.st_blksize : 4096;
    uint64_t map_bytes = (mem->arena_bytes + page - 1) / page * page;
    void *map = mmap(NULL, map_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, l->fds[0], 0);
    if (map == MAP_FAILED) return TD_ERR_CORRUPT;
    madvise(map, map_bytes, MADV_HUGEPAGE); /* a wish */
    l->source = map;
    l->map_bytes = map_bytes;
    l->source_bytes = mem->arena_bytes;
    l->n_source_blocks = (int32_t)mem->n_blocks;
    return TD_OK;
}

void xfer_shm_on_mem(struct td_xfer *x, struct td_xfer_conn *c, uint64_t unit)
{
    struct xfer_local_conn *l = c->own;
    struct td_xfer_mem mem;
    memcpy(&mem, c->rx.payload, sizeof mem);
    td_status status = take_mem(l, &mem, unit ? unit : mem.block_bytes);
    drop_fds(l);
    if (status) xfer_conn_refuse(x, c, "mem: the descriptors do not hold what it says");
}

static void shm_on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    xfer_shm_on_mem(x, c, x->pool.block_bytes);
}

static bool shm_expects(const struct td_xfer_conn *c, uint8_t type)
{
    return !c->initiator && type == TD_XFER_MEM;
}

bool xfer_shm_may_open(struct td_xfer_conn *c, uint32_t op)
{
    const struct xfer_local_conn *l = c->own;
    return l->source && op < l->n_words;
}

int32_t xfer_shm_n_source_blocks(const struct td_xfer *x, const struct td_xfer_conn *c)
{
    const struct xfer_local_conn *l = c->own;
    (void)x;
    return l->n_source_blocks;
}

void xfer_shm_conn_close(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_local_conn *l = c->own;
    (void)x;
    drop_fds(l);
    if (l->map_bytes) munmap((void *)(uintptr_t)l->source, l->map_bytes);
    if (l->words) munmap((void *)(uintptr_t)l->words, l->n_words * sizeof *l->words);
    l->source = NULL;
    l->words = NULL;
    l->map_bytes = 0;
}

/* Half-made, too: no copy of what comes after us is valid. */
static void shm_close_side(struct td_xfer *x)
{
    struct xfer_shm *shm = x->shm;
    if (!shm) return;
    munmap(shm->words, (size_t)x->core.max_ops * sizeof *shm->words);
    close(shm->words_fd);
    if (shm->arena_ro_fd >= 0) close(shm->arena_ro_fd);
    free(shm);
    x->shm = NULL;
}

void xfer_shm_op_handle(struct td_xfer *x, uint32_t op, uint64_t handle)
{
    if (!x->shm) return;
    XFER_FENCE(memory_order_seq_cst); /* the blocks' bytes are there before the handle */
    atomic_store(&x->shm->words[op].handle, handle);
    XFER_FENCE(memory_order_seq_cst); /* and the handle is gone before the blocks change */
}

bool xfer_shm_word_shows(const struct xfer_control_word *word, uint64_t handle)
{
    return atomic_load((_Atomic uint64_t *)(uintptr_t)&word->handle) == handle;
}

static size_t copy_piece(struct td_xfer *x)
{
    struct td_xfer_copy copy;
    if (!td_xfer_core_copy_next(&x->core, &x->copy_turns, TD_XFER_BY_COPY, TD_XFER_FRAME_DATA_MAX,
                                TD_XFER_FRAME_DATA_MAX, XFER_MAX_IOV, &copy))
        return 0;
    const struct td_xfer_slot *s = &x->core.slots[copy.slot]; /* its lists stand still while io */
    struct td_xfer_conn *c = xfer_conn_by_id(x, copy.conn);
    const struct xfer_local_conn *l = c ? c->own : NULL;
    TD_ASSERT(l && l->source); /* REF without MEM is refused */
    const struct xfer_control_word *word = &l->words[copy.op];
    const uint8_t *source = l->source;
    pthread_mutex_unlock(&x->lock);
    bool valid = xfer_shm_word_shows(word, copy.handle);
    XFER_FENCE(memory_order_acquire);
    for (int32_t i = 0; valid && i < copy.n_blocks; i++) {
        int32_t b = copy.grant_block + i;
        size_t n = copy.n_blocks == 1 ? copy.n_bytes : x->pool.block_bytes;
        td_xfer_copy(xfer_block(x, s->dst[b]) + copy.offset,
                     source + (size_t)s->src[b] * x->pool.block_bytes + copy.offset, n);
    }
    XFER_FENCE(memory_order_acquire); /* the copy's reads, then the word */
    valid = valid && xfer_shm_word_shows(word, copy.handle);
    pthread_mutex_lock(&x->lock);
    uint64_t now = xfer_now(x);
    if (valid) c->last_use_ns = now;
    td_xfer_core_copy_end(&x->core, now, &copy, valid);
    return copy.n_bytes;
}

/* Copied enough for one turn? What ended in it is answered with one frame and one wake for all,
 * which cost as much as copying 64 KiB each; meanwhile senders make their next ones ready. */
static bool turn_is_over(const struct td_xfer *x, size_t n_bytes, uint64_t n_ended)
{
    if (!n_ended) return n_bytes >= TD_XFER_FRAME_DATA_MAX;
    return n_bytes >= SHM_ANSWER_MAX ||
           (n_bytes >= SHM_ANSWER_MIN && n_ended >= td_xfer_core_n_fetching(&x->core));
}

static bool shm_work(struct td_xfer *x, uint64_t now_ns)
{
    (void)now_ns;
    size_t n_bytes = 0, n;
    uint64_t n_emitted = x->core.n_emitted;
    while (!turn_is_over(x, n_bytes, x->core.n_emitted - n_emitted) && (n = copy_piece(x)) > 0)
        n_bytes += n;
    return n_bytes > 0;
}

static bool shm_offers(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                       char why[TD_XFER_REASON_MAX])
{
    (void)why;
    return g->shm_name[0] && x->shm && !x->device && !g->device;
}

td_status xfer_shm_fits(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                        struct td_err *err)
{
    if (g->device && !x->device)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant of %s: only shm is allowed, and its pool is in the memory of a "
                       "device, which host memory reaches by tcp",
                       g->instance);
    if (x->device && !td_transfer_backend_of(TD_XFER_PATH_SHM_STAGED)->choice.offers(x, g, NULL))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant of %s: only shm is allowed, and this side's pool is in the memory of "
                       "a device, whose staging buffers are not shareable",
                       g->instance);
    if (!x->shm)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant of %s: only shm is allowed, and this side's pool is not shareable",
                       g->instance);
    return TD_OK;
}

static bool shm_admits(const struct td_xfer *x, char why[TD_XFER_REASON_MAX])
{
    if (x->device) xfer_say(why, "path shm: its pool is in a device's memory");
    return !x->device;
}

const struct td_transfer_backend td_transfer_shm = {
    .path = TD_XFER_PATH_SHM,
    .name = "shm",
    .way = TD_XFER_BY_COPY,
    .local = true,
    .conn_bytes = sizeof(struct xfer_local_conn),
    .side = {.open = shm_open_side,
             .mem_add = shm_mem_add,
             .close = shm_close_side,
             .op_handle = xfer_shm_op_handle},
    .choice = {.fits = xfer_shm_fits, .offers = shm_offers, .admits = shm_admits},
    .conn = {.dial = xfer_shm_dial,
             .accepted = peer_allowed,
             .open_conn = shm_open_conn,
             .expects = shm_expects,
             .on_frame = shm_on_frame,
             .may_open = xfer_shm_may_open,
             .n_source_blocks = xfer_shm_n_source_blocks,
             .close = xfer_shm_conn_close},
    .bytes = {.read = xfer_shm_recv},
    .turn = {.work = shm_work},
};
