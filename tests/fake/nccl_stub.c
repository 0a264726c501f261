/* nccl_stub.c - a libnccl.so.2 for the emulated GPU: the calls of kernels/cuda/nccl_api.h among
 * processes of one host, with NCCL's rules.
 *
 * Why here: no test machine has NCCL and two GPUs, so the calls of comm.cu would run for the first
 * time at a customer. Where NCCL would hang, crash or give wrong sums, this library prints "nccl
 * stub: ..." and ends the process with abort():
 *   (1) any call on a communicator that was destroyed or aborted, also by a graph that is launched
 *       later;
 *   (2) a destroy or abort while another thread is inside a call on it, and two threads inside at
 *       once;
 *   (3) a destroy or abort while graphs hold its calls: NCCL spins until they are gone, and so does
 *       this library, for SPIN_MS;
 *   (4) a group that is not ended, a send or receive to oneself or to a rank that does not exist;
 *   (5) a call on a communicator that does not block while its joining, or an earlier call, is in
 *       progress: ncclCommGetAsyncError must have said that it is over. Every call there is in
 *       progress until it was asked for the second time;
 *   (6) ranks that do not make the same calls in the same order with the same counts; a call that
 *       another rank never makes (WAIT_MS).
 * Sums of three ranks or more are taken in an order that depends on element and size, as NCCL's
 * are: a caller that needs one order must not use them.
 *
 * How. A message goes from rank to rank through a mailbox in shared memory that holds one piece of
 * it. A call is a list of messages to and from other ranks, which the stream runs (as a host
 * function), piece by piece as mailboxes become free. A sum sends everything to every rank. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cuda/nccl_api.h"
#include "tests/fake/nccl_stub.h"

#define EXPORT __attribute__((visibility("default")))
#define DECLARED(name, result, arguments) EXPORT result name arguments;
TD_NCCL_FUNCTIONS(DECLARED)
#ifndef TD_NCCL_STUB_IS_OLD /* as NCCL before 2.14 */
EXPORT td_nccl_init_config_fn ncclCommInitRankConfig;
#endif
EXPORT void td_nccl_stub_open(const struct td_nccl_stub_cuda *of_cuda);
EXPORT td_nccl_stub_hold_fn td_nccl_stub_hold;
EXPORT td_nccl_stub_count_fn td_nccl_stub_inside, td_nccl_stub_ended;
EXPORT td_nccl_stub_fail_fn td_nccl_stub_fail;

#define MAX_RANKS 8
#define PIECE 8192 /* floats of a mailbox */
#define MAX_GROUP 64
#define SPIN_MS 1500
#define WAIT_MS 60000 /* long, because an emulated GPU beside others on a busy machine is slow */
#define ALIVE 0x4e43434cu

struct mailbox {
    _Atomic uint32_t is_full;
    uint32_t kind; /* 'p' point to point, 's' sum */
    uint64_t total, n;
    float data[PIECE];
};

struct shared {
    _Atomic int32_t n_joined;
    struct mailbox mail[MAX_RANKS][MAX_RANKS]; /* [from][to] */
};

struct td_nccl_comm {
    struct td_nccl_comm *next_kept;
    _Atomic uint32_t magic;
    int rank, n_ranks;
    struct shared *shared;
    _Atomic int n_inside, n_graphs, n_queued;
    _Atomic bool is_aborted;
    bool is_blocking, has_joined; /* has_joined: told so */
    /* not blocking: how many times ncclCommGetAsyncError still says "in progress" */
    _Atomic int n_asks;
    char name[64];
};

struct message {
    bool is_send;
    int peer;
    const float *from;
    float *to;
    size_t n, at;
};

struct call {
    struct td_nccl_comm *comm;
    uint32_t kind;
    int n_messages;
    float *sum; /* 's' */
    size_t n_sum;
    bool is_recorded;
    struct message messages[];
};

static struct td_nccl_stub_cuda cuda;
static _Atomic int hold_fd = -1, n_inside_all, n_ended, async_error;
static __thread int group_depth, n_group;
static __thread struct message group[MAX_GROUP];
static __thread struct td_nccl_comm *group_comm;
static __thread void *group_stream;

_Noreturn static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("nccl stub: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- who is inside */

static void enter(struct td_nccl_comm *comm, const char *call)
{
    if (!comm || comm->magic != ALIVE)
        die("%s on a communicator that was destroyed or aborted", call);
    if (!comm->has_joined) die("%s before all ranks have joined", call);
    if (comm->n_asks > 0 && group_depth == 0) die("%s while an earlier call is in progress", call);
    if (atomic_fetch_add(&comm->n_inside, 1) > 0)
        die("%s while another thread is inside a call on the communicator", call);
    atomic_fetch_add(&n_inside_all, 1);
    int fd = atomic_exchange(&hold_fd, -1);
    char byte;
    if (fd >= 0)
        while (read(fd, &byte, 1) < 0 && errno == EINTR) continue;
}

static void leave(struct td_nccl_comm *comm)
{
    atomic_fetch_sub(&n_inside_all, 1);
    atomic_fetch_sub(&comm->n_inside, 1);
}

/* ---- on the stream */

static bool move_piece(struct call *c, struct message *m)
{
    struct shared *s = c->comm->shared;
    struct mailbox *box =
        m->is_send ? &s->mail[c->comm->rank][m->peer] : &s->mail[m->peer][c->comm->rank];
    if (atomic_load_explicit(&box->is_full, memory_order_acquire) == m->is_send) return false;
    size_t n = m->n - m->at < PIECE ? m->n - m->at : PIECE;
    if (m->is_send) {
        memcpy(box->data, m->from + m->at, n * sizeof(float));
        box->kind = c->kind, box->total = m->n, box->n = n;
    } else {
        if (box->kind != c->kind || box->total != m->n || box->n != n)
            die("rank %d expects %zu floats of a %s from rank %d, which sends %llu of a %s",
                c->comm->rank, m->n, c->kind == 's' ? "sum" : "send", m->peer,
                (unsigned long long)box->total, box->kind == 's' ? "sum" : "send");
        memcpy(m->to + m->at, box->data, n * sizeof(float));
    }
    atomic_store_explicit(&box->is_full, m->is_send, memory_order_release);
    m->at += n;
    return true;
}

static void add_up(const struct call *c)
{
    int n_ranks = c->comm->n_ranks;
    for (size_t i = 0; i < c->n_sum; i++) {
        float sum = 0;
        for (int k = 0; k < n_ranks; k++) {
            /* two terms have one sum */
            int r = n_ranks == 2 ? k : (int)((i / 4 + c->n_sum + (size_t)k) % (size_t)n_ranks);
            float term = r == c->comm->rank ? c->messages[0].from[i] : 0;
            for (int j = 0; j < c->n_messages; j++)
                if (!c->messages[j].is_send && c->messages[j].peer == r)
                    term = c->messages[j].to[i];
            sum = k == 0 ? term : sum + term;
        }
        c->sum[i] = sum;
    }
}

static void call_free(void *arg)
{
    struct call *c = arg;
    if (c->is_recorded) atomic_fetch_sub(&c->comm->n_graphs, 1);
    for (int i = 0; c->kind == 's' && i < c->n_messages; i++) free(c->messages[i].to);
    free(c);
}

static void run_call(void *arg)
{
    struct call *c = arg;
    uint64_t deadline = now_ms() + WAIT_MS;
    if (c->comm->magic != ALIVE && !c->comm->is_aborted)
        die("a launched graph holds a call on a communicator that was destroyed");
    for (int i = 0; i < c->n_messages; i++) c->messages[i].at = 0;
    for (bool is_done = false; !is_done && !c->comm->is_aborted;) {
        bool moved = false;
        is_done = true;
        for (int i = 0; i < c->n_messages; i++) {
            struct message *m = &c->messages[i];
            bool is_behind = false; /* messages of one pair and direction arrive in order */
            for (int j = 0; j < i; j++)
                is_behind |= c->messages[j].peer == m->peer &&
                             c->messages[j].is_send == m->is_send &&
                             c->messages[j].at < c->messages[j].n;
            if (m->at < m->n && !is_behind) moved |= move_piece(c, m);
            is_done &= m->at == m->n;
        }
        if (moved)
            deadline = now_ms() + WAIT_MS;
        else if (!is_done)
            sched_yield();
        if (now_ms() > deadline)
            die("rank %d waited %d s for a call that another rank did not make", c->comm->rank,
                WAIT_MS / 1000);
    }
    if (c->kind == 's' && !c->comm->is_aborted) add_up(c);
    if (!c->is_recorded) {
        atomic_fetch_sub(&c->comm->n_queued, 1);
        call_free(c);
    }
}

static struct call *call_new(struct td_nccl_comm *comm, uint32_t kind, int n_messages)
{
    struct call *c = calloc(1, sizeof *c + (size_t)n_messages * sizeof c->messages[0]);
    if (!c) die("no memory");
    c->comm = comm, c->kind = kind, c->n_messages = n_messages;
    return c;
}

static int issue(struct call *c, void *stream)
{
    c->is_recorded = cuda.attach(stream, call_free, c);
    atomic_fetch_add(c->is_recorded ? &c->comm->n_graphs : &c->comm->n_queued, 1);
    if (cuda.launch_host(stream, run_call, c)) return 1;
    if (c->comm->is_blocking) return TD_NCCL_SUCCESS;
    c->comm->n_asks = 2;
    return TD_NCCL_IN_PROGRESS;
}

static int add_message(const char *call, struct message m, struct td_nccl_comm *comm, void *stream)
{
    enter(comm, call);
    if (m.peer < 0 || m.peer >= comm->n_ranks || m.peer == comm->rank)
        die("%s: rank %d of %d names rank %d", call, comm->rank, comm->n_ranks, m.peer);
    int r = TD_NCCL_SUCCESS;
    if (group_depth == 0) {
        struct call *c = call_new(comm, 'p', 1);
        c->messages[0] = m;
        r = issue(c, stream);
    } else {
        if (n_group == MAX_GROUP) die("a group of more than %d calls", MAX_GROUP);
        if (n_group > 0 && (comm != group_comm || stream != group_stream))
            die("%s: a group on two communicators or streams", call);
        group_comm = comm, group_stream = stream, group[n_group++] = m;
    }
    leave(comm);
    return r;
}

/* ---- NCCL's calls */

int ncclGetUniqueId(struct td_nccl_id *ret_id)
{
    static _Atomic int n;
    memset(ret_id, 0, sizeof *ret_id);
    snprintf(ret_id->bytes, sizeof ret_id->bytes, "/td-nccl-stub-%d-%d", (int)getpid(), n++);
    int fd = shm_open(ret_id->bytes, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(struct shared)))
        die("%s: %s", ret_id->bytes, strerror(errno));
    close(fd);
    return TD_NCCL_SUCCESS;
}

/* Every communicator of this process. None is ever freed, so that a call on one that has ended
 * finds that its magic is gone. */
static struct td_nccl_comm *_Atomic kept;

static struct td_nccl_comm *comm_new(int n_ranks, struct td_nccl_id id, int rank)
{
    if (n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks)
        die("ncclCommInitRank: rank %d of %d", rank, n_ranks);
    int fd = shm_open(id.bytes, O_RDWR, 0);
    struct shared *shared =
        fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) die("ncclCommInitRank: %s: %s", id.bytes, strerror(errno));
    close(fd);
    struct td_nccl_comm *c = calloc(1, sizeof *c);
    if (!c) die("no memory");
    c->magic = ALIVE;
    c->rank = rank, c->n_ranks = n_ranks, c->shared = shared;
    snprintf(c->name, sizeof c->name, "%.63s", id.bytes);
    c->next_kept = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &c->next_kept, c)) {
    }
    atomic_fetch_add(&shared->n_joined, 1);
    return c;
}

static bool all_have_joined(struct td_nccl_comm *c)
{
    if (c->has_joined) return true;
    if (atomic_load(&c->shared->n_joined) < c->n_ranks) return false;
    if (c->rank == 0) shm_unlink(c->name);
    return c->has_joined = true;
}

int ncclCommInitRank(struct td_nccl_comm **ret_comm, int n_ranks, struct td_nccl_id id, int rank)
{
    struct td_nccl_comm *c = comm_new(n_ranks, id, rank);
    c->is_blocking = true;
    for (uint64_t deadline = now_ms() + WAIT_MS; !all_have_joined(c); sched_yield())
        if (now_ms() > deadline)
            die("ncclCommInitRank: %d of %d ranks came within %d s", (int)c->shared->n_joined,
                n_ranks, WAIT_MS / 1000);
    *ret_comm = c;
    return TD_NCCL_SUCCESS;
}

#ifndef TD_NCCL_STUB_IS_OLD
int ncclCommInitRankConfig(struct td_nccl_comm **ret_comm, int n_ranks, struct td_nccl_id id,
                           int rank, struct td_nccl_config *config)
{
    if (config->magic != TD_NCCL_CONFIG_MAGIC || config->size < sizeof *config ||
        config->version < TD_NCCL_CONFIG_VERSION)
        die("ncclCommInitRankConfig: the config is not one of NCCL's");
    if (config->blocking) return ncclCommInitRank(ret_comm, n_ranks, id, rank);
    *ret_comm = comm_new(n_ranks, id, rank);
    return TD_NCCL_IN_PROGRESS;
}
#endif

/* The communicator's memory is kept, so that later calls on it are detected. */
static int end(struct td_nccl_comm *comm, const char *call, bool is_abort)
{
    if (!comm || comm->magic != ALIVE)
        die("%s on a communicator that was destroyed or aborted", call);
    atomic_fetch_add(&n_ended, 1);
    if (comm->n_inside > 0)
        die("%s while another thread is inside a call on the communicator", call);
    if (!comm->has_joined && !is_abort) die("%s before all ranks have joined", call);
    if (!comm->has_joined && comm->rank == 0) shm_unlink(comm->name);
    if (is_abort) comm->is_aborted = true;
    comm->magic = 0;
    uint64_t deadline = now_ms() + SPIN_MS;
    for (; comm->n_graphs > 0; sched_yield())
        if (now_ms() > deadline)
            die("%s: %d calls are held by graphs that were not destroyed: NCCL spins for ever",
                call, (int)comm->n_graphs);
    if (!is_abort && comm->n_queued > 0)
        die("%s: %d calls are still to run", call, (int)comm->n_queued);
    return TD_NCCL_SUCCESS;
}

int ncclCommAbort(struct td_nccl_comm *comm) { return end(comm, "ncclCommAbort", true); }

int ncclCommDestroy(struct td_nccl_comm *comm) { return end(comm, "ncclCommDestroy", false); }

int ncclCommGetAsyncError(struct td_nccl_comm *comm, int *ret_error)
{
    if (!comm || comm->magic != ALIVE)
        die("ncclCommGetAsyncError on a communicator that was destroyed or aborted");
    *ret_error = async_error;
    if (!all_have_joined(comm)) *ret_error = TD_NCCL_IN_PROGRESS;
    int n = comm->n_asks;
    while (n > 0 && !atomic_compare_exchange_weak(&comm->n_asks, &n, n - 1)) {
    }
    if (n > 1) *ret_error = TD_NCCL_IN_PROGRESS;
    return TD_NCCL_SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, struct td_nccl_comm *comm,
                  void *stream)
{
    enter(comm, "ncclAllReduce");
    if (type != TD_NCCL_FLOAT || op != TD_NCCL_SUM || group_depth > 0)
        die("ncclAllReduce: only sums of floats outside groups are here");
    struct call *c = call_new(comm, 's', 2 * (comm->n_ranks - 1));
    c->sum = to, c->n_sum = n;
    for (int r = 0, i = 0; r < comm->n_ranks; r++) {
        if (r == comm->rank) continue;
        c->messages[i++] = (struct message){.is_send = true, .peer = r, .from = from, .n = n};
        c->messages[i++] = (struct message){.peer = r, .to = malloc(n * sizeof(float)), .n = n};
        if (!c->messages[i - 1].to) die("no memory");
    }
    int result = issue(c, stream);
    leave(comm);
    return result;
}

int ncclSend(const void *from, size_t n, int type, int peer, struct td_nccl_comm *comm,
             void *stream)
{
    if (type != TD_NCCL_FLOAT) die("ncclSend: only floats are here");
    return add_message("ncclSend",
                       (struct message){.is_send = true, .peer = peer, .from = from, .n = n}, comm,
                       stream);
}

int ncclRecv(void *to, size_t n, int type, int peer, struct td_nccl_comm *comm, void *stream)
{
    if (type != TD_NCCL_FLOAT) die("ncclRecv: only floats are here");
    return add_message("ncclRecv", (struct message){.peer = peer, .to = to, .n = n}, comm, stream);
}

int ncclGroupStart(void)
{
    group_depth++;
    return TD_NCCL_SUCCESS;
}

int ncclGroupEnd(void)
{
    if (group_depth == 0) die("ncclGroupEnd without ncclGroupStart");
    if (--group_depth > 0 || n_group == 0) return TD_NCCL_SUCCESS;
    enter(group_comm, "ncclGroupEnd");
    struct call *c = call_new(group_comm, 'p', n_group);
    memcpy(c->messages, group, (size_t)n_group * sizeof group[0]);
    n_group = 0;
    int result = issue(c, group_stream);
    leave(group_comm);
    return result;
}

const char *ncclGetErrorString(int result)
{
    if (result == TD_NCCL_REMOTE_ERROR) return "remote process exited or there was a network error";
    if (result == TD_NCCL_IN_PROGRESS) return "NCCL operation in progress";
    return result == TD_NCCL_SUCCESS ? "no error" : "another error";
}

const char *ncclGetLastError(struct td_nccl_comm *comm)
{
    (void)comm;
    return "";
}

/* ---- a test's */

void td_nccl_stub_open(const struct td_nccl_stub_cuda *of_cuda) { cuda = *of_cuda; }

void td_nccl_stub_hold(int fd) { hold_fd = fd; }

int td_nccl_stub_inside(void) { return n_inside_all; }

int td_nccl_stub_ended(void) { return n_ended; }

void td_nccl_stub_fail(int result) { async_error = result; }
