/* xfer_soak.c - very many transfers between several endpoints while everything goes wrong now and
 * then; what is looked at is in xfer_soak.h.
 *
 *   xfer_soak [--transfers N] [--path tcp|shm|rdma|all] [--processes 1|2|0] [--seed S] [--fault-ppm
 *       20000] [--touched-percent 10]
 *             [--deadline-ms 4000] [--grace-ms 5000] [--peer-timeout-ms 500] [--csv FILE --machine
 *             CLASS --commit ID] [--break WHAT] [--break-all] [--reconnects N] [--storm N]
 *
 * --processes 1: every endpoint is a thread here; 2: a child each, which may be killed, restarted
 * under its name and stopped; 0: half the transfers each. N transfers are shared out over the
 * rounds (path, processes). fault-ppm: for how many of a million transfers each kind of fault is
 * planned; a tenth of that for faults of endpoints, which meet every transfer there.
 * touched-percent: fewer transfers that met a fault are a violation (fault-ppm 0: none is asked
 * for).
 *
 * A job carries one transfer at a time:
 *
 *   IDLE --start: blocks, plan--> GRANT --granted--> OP, SUBMIT ... --READY, DONE, FAILED, FREE in
 *       an order that is allowed--> over --> IDLE
 *
 * Over means: the slot is FREE and the op has ended, each once, within its deadline and the grace
 * (time in which the soak kept an endpoint stopped, or the machine did not let it run, is not
 * counted); or the endpoint was killed. Then, in one of many, the old grant is used again, which
 * must write nothing.
 *
 * The seed fixes what is planned, not how threads meet: the same seed meets the same faults at
 * other instants. A violation ends the run with exit status 1, the seed, and what happened to
 * the transfer. */
#include "common/base/random.h"
#include "tests/unit/xfer_soak.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/progress.h"
#include "common/base/sanitizers.h"

enum {
    LOG_LINES = 40,
    LOG_BYTES = 120,
    MAX_CHUNKS = 10,
    SLACK_HEAP = 512 << 10,
    SLACK_RSS = 32 << 20
};

/* From F_CUT on a fault meets endpoints, and with each all that they are at. ORPHAN: no sender
 * comes. SHORT_*: a deadline of a few milliseconds. */
enum fault {
    F_CANCEL,
    F_REVOKE,
    F_SHORT_SLOT,
    F_SHORT_OP,
    F_ORPHAN,
    F_REPLAY,
    F_CUT,
    F_KILL_SENDER,
    F_KILL_RECEIVER,
    F_STOP,
    F_PORT,
    F_GID,
    F_RULE,
    N_FAULTS
};
static const struct {
    const char *name, *column;
} fault_names[N_FAULTS] = {{"cancel", "cancels"},
                           {"revoke", "revokes"},
                           {"slot deadline", "slot_deadlines"},
                           {"op deadline", "op_deadlines"},
                           {"no sender", "orphans"},
                           {"replayed grant", "replays"},
                           {"cut", "cuts"},
                           {"sender killed", "sender_kills"},
                           {"receiver killed", "receiver_kills"},
                           {"stop", "stops"},
                           {"port", "port_flaps"},
                           {"gid", "gid_changes"},
                           {"work request", "wr_faults"}};

struct options {
    uint64_t n_transfers, seed;
    uint32_t fault_ppm, touched_percent, deadline_ms, grace_ms, timeout_ms;
    enum td_xfer_path path; /* AUTO: all */
    int processes;          /* 0: both */
    enum soak_break broken;
    const char *csv, *machine, *commit;
};

struct counts {
    uint64_t n_touched; /* transfers that met a fault: see `touch` */
    uint64_t n, n_ready, n_done, n_killed, n_refused, n_ops, bytes, faults[N_FAULTS], failed[8];
    uint64_t n_fenced, n_digests, bytes_pulled;
    double seconds;
};
static const struct {
    td_status status;
    const char *name;
} failures[8] = {{TD_ERR_CANCELLED, "cancelled"},
                 {TD_ERR_DEADLINE, "deadline"},
                 {TD_ERR_STALE, "stale"},
                 {TD_ERR_PEER, "peer"},
                 {TD_ERR_CORRUPT, "corrupt"},
                 {TD_ERR_DEVICE, "device"},
                 {TD_ERR_UNSUPPORTED, "unsupported"},
                 {TD_OK, "other"}};

struct chunk {
    int32_t first, n;
};

struct job {
    bool busy, draining; /* draining: waits for whole pools */
    bool granting, slot_live, op_pending, op_live;
    bool ready, failed, done, op_over, slot_killed, op_killed, revoked, replaying, blocks_held,
        src_held;
    uint64_t id;
    uint32_t p, d;
    int32_t n;
    struct chunk chunk[MAX_CHUNKS];
    int n_chunks, at_chunk;
    bool final_apart, orphan, slow, pull;             /* pull: the first chunk is a prefix hit */
    uint64_t start_ns, next_ns, revoke_ns, cancel_ns; /* TD_NEVER_NS: not planned */
    uint64_t slot_limit_ns, op_limit_ns, stopped_ns;  /* stopped_ns: of both ends, when it began */
    uint32_t faults;
    bool touched;
    char log[LOG_LINES][LOG_BYTES];
    uint32_t n_log;
};

enum end_state { END_OPENING, END_UP, END_STOPPED, END_CLOSING, END_CLOSED };

/* How long the threads of a process were ready and were not let run, as the kernel counts: that
 * is no fault of what is tested. */
enum { MAX_TASKS = 64 };
struct starved {
    struct {
        int tid;
        uint64_t ran, since_ns, credit;
    } task[MAX_TASKS];
    int n;
    uint64_t late_ns; /* of the thread that waited most, interval by interval */
};

struct endpoint {
    enum end_state state;
    pid_t pid;
    pthread_t thread;
    int32_t free[SOAK_BLOCKS], n_free;
    int drain_job; /* -1: none */
    uint64_t stopped_ns, stop_ns, cont_ns, port_up_ns[SOAK_DEVICES], opening_ns;
    uint32_t n_lives;
    struct starved starved; /* of the child */
};

struct soak {
    const struct options *o;
    struct soak_shared *s;
    struct job job[SOAK_JOBS];
    struct endpoint end[SOAK_ENDS];
    struct counts c;
    struct td_progress *progress;
    struct starved starved; /* of this process */
    uint64_t random, n_before, n_over, start_ns, id_base;
    char fabric[64];
    bool violated;
};

/* --- chance ----------------------------------------------------------------------------------- */

static uint32_t rnd(struct soak *k, uint32_t n) { return td_random_index(&k->random, n); }

/* A fault of an endpoint meets several transfers and costs it more time, so there are fewer of
 * them. */
enum { OF_ENDS = 10 };

static bool strikes(struct soak *k, enum fault f)
{
    uint32_t ppm = f >= F_CUT ? k->o->fault_ppm / OF_ENDS : k->o->fault_ppm;
    return rnd(k, 1000000) < ppm && k->o->broken != BREAK_UNTOUCHED;
}

/* This transfer has met a fault: its own was carried out, or one of its endpoints was cut off,
 * stopped, killed or lost a port while it was under way. A changed GID and a work request that
 * is to fail are not counted, for they may meet nobody; nor is what the NIC in memory does by
 * itself. */
static void touch(struct job *j) { j->touched = true; }

static void touch_end(struct soak *k, uint32_t end)
{
    for (uint32_t q = 0; q < SOAK_JOBS; q++)
        if (k->job[q].busy && !k->job[q].draining && (k->job[q].p == end || k->job[q].d == end))
            touch(&k->job[q]);
}

/* --- what is said ----------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static void note(struct soak *k, struct job *j,
                                                       const char *fmt, ...)
{
    char *to = j->log[j->n_log++ % LOG_LINES];
    int n = snprintf(to, LOG_BYTES, "%9.3f ms  ", (double)(td_now_ns() - k->start_ns) / 1e6);
    va_list args;
    va_start(args, fmt);
    vsnprintf(to + n, LOG_BYTES - (size_t)n, fmt, args);
    va_end(args);
}

/* The first is told in full; the run ends after it. */
static void violate(struct soak *k, struct job *j, const char *text)
{
    if (k->violated) return;
    k->violated = true;
    fflush(stdout);
    fprintf(stderr, "\nviolation: %s\n", text);
    fprintf(stderr, "  seed %" PRIu64 ", path %s, %s, transfer %" PRIu64 " of %" PRIu64 "\n",
            k->o->seed, td_xfer_path_name(k->s->path), k->s->processes ? "children" : "one process",
            k->n_over, k->c.n);
    if (!j) return;
    fprintf(stderr, "  transfer %" PRIu64 ": %d blocks from sender %u to receiver %u\n", j->id,
            j->n, j->p, j->d);
    for (uint32_t i = j->n_log > LOG_LINES ? j->n_log - LOG_LINES : 0; i < j->n_log; i++)
        fprintf(stderr, "  %s\n", j->log[i % LOG_LINES]);
    fprintf(stderr,
            "  again: xfer_soak --seed %" PRIu64 " --transfers %" PRIu64
            " --fault-ppm %u --path %s --processes %d\n",
            k->o->seed, k->o->n_transfers, k->o->fault_ppm,
            k->o->path ? td_xfer_path_name(k->o->path) : "all", k->o->processes);
}

__attribute__((format(printf, 3, 4))) static void violatef(struct soak *k, struct job *j,
                                                           const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    violate(k, j, text);
}

static struct job *job_of(struct soak *k, const struct soak_message *m)
{
    struct job *j = &k->job[m->job];
    return j->busy && j->id * SOAK_JOBS + m->job == m->user ? j : NULL;
}

static void command(struct soak *k, uint32_t end, const struct soak_message *m)
{
    TD_ASSERT(soak_ring_put(&k->s->end[end].commands, m)); /* a job has a dozen at most */
    td_wakeup_signal(&k->s->end[end].wakeup);
}

static void job_command(struct soak *k, struct job *j, uint32_t end, struct soak_message m)
{
    m.job = (uint32_t)(j - k->job);
    m.user = j->id * SOAK_JOBS + m.job;
    command(k, end, &m);
}

/* What an endpoint knows of its transfers goes to stderr, behind a violation that asks why. */
static void ask_state(struct soak *k, uint32_t end)
{
    struct soak_end *e = &k->s->end[end];
    uint64_t until = td_now_ns() + 5 * TD_NS_PER_S;
    fflush(NULL);
    command(k, end, &(struct soak_message){.verb = SOAK_STATE});
    while (!atomic_load(&e->state_told) && td_now_ns() < until)
        td_wakeup_wait(&k->s->wakeup, td_now_ns() + 20 * TD_NS_PER_MS);
    if (!atomic_load(&e->state_told))
        fprintf(stderr, "  endpoint %u does not answer: its thread is stopped or hangs\n", end);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* ids are drawn at random; runs of neighbours come from sorting them. */
static int by_number(const void *a, const void *b)
{
    int32_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

static void blocks_take(struct soak *k, struct endpoint *e, int32_t *ids, int32_t n, bool sorted)
{
    for (int32_t i = 0; i < n; i++) {
        int32_t at = (int32_t)rnd(k, (uint32_t)e->n_free);
        ids[i] = e->free[at];
        e->free[at] = e->free[--e->n_free];
    }
    if (sorted) qsort(ids, (size_t)n, sizeof *ids, by_number);
}

static void blocks_give(struct endpoint *e, const int32_t *ids, int32_t n)
{
    for (int32_t i = 0; i < n; i++) e->free[e->n_free++] = ids[i];
}

/* Every block that belongs to nobody still says so. */
static void blocks_sweep(struct soak *k, uint32_t end, const char *when)
{
    const struct endpoint *e = &k->end[end];
    for (int32_t i = 0; i < e->n_free; i++) {
        if (soak_check(soak_block(&k->s->end[end], e->free[i]),
                       soak_free(&k->s->end[end], e->free[i])))
            continue;
        violatef(k, NULL,
                 "stray: block %d of endpoint %u was written while it belonged to nobody (%s)",
                 e->free[i], end, when);
        return;
    }
}

static void pool_make(struct soak *k, uint32_t end)
{
    struct soak_end *e = &k->s->end[end];
    struct td_err err = {0};
    if (e->pool.base) td_arena_destroy(&e->pool);
    if (td_arena_create((size_t)SOAK_BLOCKS * SOAK_BLOCK_BYTES, true, "xfer-soak", &e->pool,
                        &err)) {
        fprintf(stderr, "xfer_soak: %s\n", err.msg);
        exit(2);
    }
    for (int32_t b = 0; b < SOAK_BLOCKS; b++) soak_fill(soak_block(e, b), soak_free(e, b));
}

/* --- endpoints -------------------------------------------------------------------------------- */

struct thread_arg {
    struct soak_shared *s;
    uint32_t end;
};

static void *end_thread(void *arg)
{
    struct thread_arg a = *(struct thread_arg *)arg;
    free(arg);
    soak_end_run(a.s, a.end);
    return NULL;
}

static void end_start(struct soak *k, uint32_t i)
{
    struct endpoint *e = &k->end[i];
    struct soak_end *shared = &k->s->end[i];
    e->state = END_OPENING;
    e->opening_ns = td_now_ns();
    e->n_lives++;
    shared->incarnation = td_hash64(&(uint64_t[2]){k->o->seed, k->id_base + e->n_lives}, 16, i);
    shared->n_gid_changes = 0;
    shared->fabric[0] = 0;
    if (k->s->path == TD_XFER_PATH_RDMA) /* a transfer has some 20 requests */
        snprintf(shared->fabric, sizeof shared->fabric,
                 "path=%s,devices=%d,seed=%" PRIu64
                 ",retry_ms=20,spin_us=1,fault_ppm=%u,unordered=%d,relaxed=%d,delay_us=%u",
                 k->fabric, SOAK_DEVICES, shared->incarnation >> 1, k->o->fault_ppm / 200,
                 shared->is_receiver ? 1 : (int)(i & 1), i == SOAK_SENDERS ? 1 : 0,
                 i == SOAK_SENDERS + 1 ? 100 : 0);
    td_wakeup_clear(&shared->wakeup);
    if (!k->s->processes) {
        struct thread_arg *a = malloc(sizeof *a);
        TD_ASSERT(a);
        *a = (struct thread_arg){k->s, i};
        TD_ASSERT(pthread_create(&e->thread, NULL, end_thread, a) == 0);
        return;
    }
    pid_t parent = getpid();
    fflush(NULL);
    e->pid = fork();
    TD_ASSERT(e->pid >= 0);
    if (e->pid) return;
    signal(SIGINT, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent) soak_end_run(k->s, i);
    _exit(0);
}

static void starved_sample(struct starved *s, pid_t pid, uint64_t now)
{
    char path[64], text[512];
    struct starved old = *s;
    uint64_t most = 0;
    s->n = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    for (struct dirent *e = d ? readdir(d) : NULL; e && s->n < MAX_TASKS; e = readdir(d)) {
        unsigned long long ran, late;
        char state = 0;
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.12s/schedstat", (int)pid, e->d_name);
        FILE *f = fopen(path, "re");
        if (!f) continue;
        int n = fscanf(f, "%llu %llu", &ran, &late);
        fclose(f);
        snprintf(path, sizeof path, "/proc/%d/task/%.12s/stat", (int)pid, e->d_name);
        if (n != 2 || !(f = fopen(path, "re"))) continue;
        if (fgets(text, sizeof text, f) && strrchr(text, ')')) state = strrchr(text, ')')[2];
        fclose(f);
        int tid = (int)strtol(e->d_name, NULL, 10), at = 0;
        while (at < old.n && old.task[at].tid != tid) at++;
        bool is_new = at == old.n, waits = state == 'R' && !is_new && old.task[at].ran == ran;
        uint64_t since = is_new || !waits ? now : old.task[at].since_ns;
        /* the kernel adds a wait when it is over */
        uint64_t credit = late + (waits && now > since ? now - since : 0);
        if (!is_new && credit < old.task[at].credit) credit = old.task[at].credit;
        if (!is_new && credit - old.task[at].credit > most) most = credit - old.task[at].credit;
        s->task[s->n].tid = tid;
        s->task[s->n].ran = ran;
        s->task[s->n].since_ns = since;
        s->task[s->n++].credit = credit;
    }
    if (d) closedir(d);
    s->late_ns += most;
}

/* Time that is not held against a transfer at this endpoint: the soak stopped it, or the machine
 * did not let it, or the driver, run. */
static uint64_t stopped_ns(const struct soak *k, uint32_t end, uint64_t now)
{
    const struct endpoint *e = &k->end[end];
    return e->stopped_ns + (e->state == END_STOPPED && now > e->stop_ns ? now - e->stop_ns : 0) +
           e->starved.late_ns + k->starved.late_ns;
}

static void job_op_over(struct soak *k, struct job *j, uint64_t now);
static void job_check_over(struct soak *k, struct job *j);
static void news_take(struct soak *k, uint32_t end);

static void slot_over(struct soak *k, struct job *j)
{
    j->granting = j->slot_live = false;
    j->revoke_ns = TD_NEVER_NS;
    if (j->blocks_held) blocks_give(&k->end[j->d], k->s->job[j - k->job].dst, j->n);
    j->blocks_held = false;
}

static void op_over(struct soak *k, struct job *j)
{
    j->op_pending = j->op_live = false;
    j->op_over = true;
    j->cancel_ns = j->next_ns = TD_NEVER_NS;
    if (j->src_held) blocks_give(&k->end[j->p], k->s->job[j - k->job].src, j->n);
    j->src_held = false;
}

static void end_kill(struct soak *k, uint32_t i)
{
    struct endpoint *e = &k->end[i];
    uint64_t now = td_now_ns();
    kill(e->pid, SIGKILL);
    waitpid(e->pid, NULL, 0);
    if (e->state == END_STOPPED) e->stopped_ns += now > e->stop_ns ? now - e->stop_ns : 0;
    e->state = END_OPENING;
    news_take(k, i); /* what it had said before, it had done */
    blocks_sweep(k, i, "its owner was killed");
    struct soak_message m;
    while (soak_ring_get(&k->s->end[i].commands, &m)) {
    }
    memset(e->port_up_ns, 0xff, sizeof e->port_up_ns);
    bool is_receiver = k->s->end[i].is_receiver;
    struct job *ended[SOAK_JOBS];
    int n_ended = 0;
    for (uint32_t q = 0; q < SOAK_JOBS; q++) {
        struct job *j = &k->job[q];
        if (!j->busy || j->draining || (is_receiver ? j->d : j->p) != i) continue;
        if (is_receiver && (j->slot_live || j->granting)) {
            note(k, j, "the receiver is killed");
            j->slot_killed = true;
            slot_over(k, j);
        } else if (!is_receiver && (j->op_live || j->op_pending)) {
            note(k, j, "the sender is killed");
            j->op_killed = true;
            op_over(k, j);
            job_op_over(k, j, now);
        } else {
            continue;
        }
        ended[n_ended++] = j;
    }
    /* A receiver on this host may still read a dead sender's memory, so nobody may write there:
     * its successor gets a pool of its own, as a new process has. Nothing but the process itself
     * can write into a receiver's pool. */
    if (!is_receiver) pool_make(k, i);
    for (int32_t b = 0; b < SOAK_BLOCKS && is_receiver; b++)
        soak_fill(soak_block(&k->s->end[i], b), soak_free(&k->s->end[i], b));
    for (int q = 0; q < n_ended; q++) job_check_over(k, ended[q]);
    end_start(k, i);
}

static void end_stop(struct soak *k, uint32_t i, uint64_t now)
{
    struct endpoint *e = &k->end[i];
    if (kill(e->pid, SIGSTOP)) return;
    e->state = END_STOPPED;
    e->stop_ns = now;
    /* a quarter is longer than peers wait */
    uint32_t ms = 1 + rnd(k, rnd(k, 4) ? k->o->timeout_ms / 8 : k->o->timeout_ms * 2);
    e->cont_ns = now + ms * TD_NS_PER_MS;
}

static void end_continue(struct endpoint *e, uint64_t now)
{
    kill(e->pid, SIGCONT);
    e->state = END_UP;
    e->stopped_ns += now - e->stop_ns;
}

/* --- a transfer ------------------------------------------------------------------------------- */

static bool flip(struct soak *k, uint32_t one_in) { return rnd(k, one_in) == 0; }

static void job_plan(struct soak *k, struct job *j, uint64_t now)
{
    struct soak_job *s = &k->s->job[j - k->job];
    uint32_t slot_ms = k->o->deadline_ms, op_ms = k->o->deadline_ms;
    for (int f = 0; f < N_FAULTS; f++)
        if (strikes(k, (enum fault)f)) j->faults |= 1u << f;
    if (!k->s->processes)
        j->faults &= ~(1u << F_KILL_SENDER | 1u << F_KILL_RECEIVER | 1u << F_STOP);
    if (k->s->path != TD_XFER_PATH_RDMA) j->faults &= ~(1u << F_PORT | 1u << F_GID | 1u << F_RULE);
    j->revoke_ns = j->cancel_ns = TD_NEVER_NS;
    /* a small one takes some hundred microseconds */
    uint64_t soon = now + rnd(k, flip(k, 2) ? 300 : 5000) * TD_NS_PER_US;
    if (j->faults & 1u << F_CANCEL) j->cancel_ns = soon;
    if (j->faults & 1u << F_REVOKE) j->revoke_ns = soon;
    if (j->faults & 1u << F_SHORT_SLOT) slot_ms = rnd(k, 8);
    if (j->faults & 1u << F_SHORT_OP) op_ms = rnd(k, 8);
    k->c.faults[F_SHORT_SLOT] += j->faults >> F_SHORT_SLOT & 1;
    k->c.faults[F_SHORT_OP] += j->faults >> F_SHORT_OP & 1;
    if (j->faults & (1u << F_SHORT_SLOT | 1u << F_SHORT_OP)) touch(j);
    if (j->faults & 1u << F_ORPHAN) {
        j->orphan = true;
        if (flip(k, 2))
            slot_ms = rnd(k, 20);
        else
            j->revoke_ns = soon;
    }
    if (k->o->broken == BREAK_VACUOUS) {
        j->orphan = true;
        j->revoke_ns = soon;
    }
    s->slot_deadline_ns = td_deadline_after_ms(now, slot_ms);
    s->op_deadline_ns = td_deadline_after_ms(now, op_ms);
    uint64_t grace = k->o->grace_ms * TD_NS_PER_MS;
    j->slot_limit_ns = s->slot_deadline_ns + grace;
    j->op_limit_ns = s->op_deadline_ns + grace;
    j->stopped_ns = stopped_ns(k, j->p, now) + stopped_ns(k, j->d, now);

    int n_chunks = j->n ? 1 + (int)rnd(k, flip(k, 4) ? MAX_CHUNKS : 3) : 1;
    int32_t at = 0;
    j->n_chunks = 0;
    for (int i = 0; i < n_chunks; i++) {
        int32_t n = i + 1 == n_chunks ? j->n - at : (int32_t)rnd(k, (uint32_t)(j->n - at) + 1);
        j->chunk[j->n_chunks++] = (struct chunk){at, n};
        at += n;
    }
    for (int i = j->n_chunks - 1; i > 0 && flip(k, 2); i--) {
        int other = (int)rnd(k, (uint32_t)i + 1);
        struct chunk c = j->chunk[i];
        j->chunk[i] = j->chunk[other];
        j->chunk[other] = c;
    }
    j->final_apart = flip(k, 8);
    j->slow = flip(k, 8);
    j->pull = flip(k, 4);
}

static int32_t random_size(struct soak *k) { return (int32_t)rnd(k, (1u << rnd(k, 8)) + 1); }

/* False: no room now. */
static bool job_start(struct soak *k, struct job *j, uint64_t now)
{
    uint32_t q = (uint32_t)(j - k->job);
    if (!j->draining) {
        uint32_t p = rnd(k, SOAK_SENDERS), d = SOAK_SENDERS + rnd(k, SOAK_RECEIVERS);
        if (k->end[p].state != END_UP || k->end[d].state != END_UP) return false;
        if (k->end[p].drain_job >= 0 || k->end[d].drain_job >= 0) return false;
        memset(j, 0, offsetof(struct job, log));
        j->n_log = 0;
        j->busy = true;
        j->p = p;
        j->d = d;
        j->n = random_size(k);
        j->id = ++k->id_base;
        if (flip(k, 400)) { /* the whole of both pools */
            j->draining = true;
            j->n = SOAK_BLOCKS;
            j->next_ns = now + 100 * TD_NS_PER_MS; /* or what is free by then */
            k->end[p].drain_job = k->end[d].drain_job = (int)q;
        }
    }
    struct endpoint *p = &k->end[j->p], *d = &k->end[j->d];
    if (j->draining) {
        if ((p->n_free < SOAK_BLOCKS || d->n_free < SOAK_BLOCKS) && now < j->next_ns) return false;
        j->draining = false;
        p->drain_job = d->drain_job = -1;
    }
    if (j->n > p->n_free) j->n = p->n_free;
    if (j->n > d->n_free) j->n = d->n_free;
    struct soak_job *s = &k->s->job[q];
    bool sorted = flip(k, 3);
    s->user = j->id * SOAK_JOBS + q;
    s->n = j->n;
    blocks_take(k, p, s->src, j->n, sorted);
    blocks_take(k, d, s->dst, j->n, sorted);
    j->blocks_held = j->src_held = true;
    j->start_ns = now;
    job_plan(k, j, now);
    j->granting = true;
    j->next_ns = TD_NEVER_NS;
    note(k, j, "grant %d blocks%s, deadlines in %.0f and %.0f ms", j->n, sorted ? ", sorted" : "",
         ((double)s->slot_deadline_ns - (double)now) / 1e6,
         ((double)s->op_deadline_ns - (double)now) / 1e6);
    job_command(k, j, j->d, (struct soak_message){.verb = SOAK_GRANT});
    return true;
}

static void job_revoke(struct soak *k, struct job *j, const char *why)
{
    j->revoke_ns = TD_NEVER_NS;
    if (!j->slot_live || j->revoked) return;
    note(k, j, "revoke: %s", why);
    j->revoked = true;
    job_command(k, j, j->d, (struct soak_message){.verb = SOAK_REVOKE});
}

/* The op has ended, or died: who granted is told by somebody, mostly. */
static void job_op_over(struct soak *k, struct job *j, uint64_t now)
{
    if (j->done || j->ready || j->failed || j->revoke_ns != TD_NEVER_NS ||
        (!j->slot_live && !j->granting))
        return;
    if (!flip(k, 32)) j->revoke_ns = now + rnd(k, 30000) * TD_NS_PER_US;
}

static void job_start_op(struct soak *k, struct job *j, bool replay)
{
    struct soak_job *s = &k->s->job[j - k->job];
    uint64_t now = td_now_ns();
    if (replay) {
        s->op_deadline_ns = td_deadline_after_ms(now, k->o->deadline_ms);
        j->op_limit_ns = s->op_deadline_ns + k->o->grace_ms * TD_NS_PER_MS;
        j->stopped_ns = stopped_ns(k, j->p, now) + stopped_ns(k, j->d, now);
    }
    j->op_pending = true;
    j->op_over = false;
    job_command(
        k, j, j->p,
        (struct soak_message){.verb = SOAK_OP, .replay = replay, .deadline_ns = s->op_deadline_ns});
    j->at_chunk = 0;
    j->next_ns = 0; /* at once, and in order behind it */
}

/* The next piece of the plan. */
static void job_submit(struct soak *k, struct job *j, uint64_t now)
{
    do {
        bool is_last = j->at_chunk + 1 == j->n_chunks;
        struct soak_message m = {.verb = SOAK_SUBMIT};
        if (j->at_chunk == j->n_chunks) {
            m.first = j->n;
            m.final = true;
        } else {
            m.first = j->chunk[j->at_chunk].first;
            m.n = j->chunk[j->at_chunk].n;
            m.pull = j->pull && j->at_chunk == 0;
            m.final = is_last && !j->final_apart && !m.pull;
        }
        note(k, j, "submit %d..%d%s%s", m.first, m.first + m.n, m.pull ? ", to be pulled" : "",
             m.final ? ", final" : "");
        job_command(k, j, j->p, m);
        j->at_chunk++;
        if (m.final) {
            j->next_ns = TD_NEVER_NS;
            return;
        }
        j->next_ns = now + rnd(k, 3000) * TD_NS_PER_US;
    } while (!j->slow);
}

static void job_check_over(struct soak *k, struct job *j)
{
    if (!j->busy || j->draining || j->granting || j->slot_live || j->op_pending || j->op_live)
        return;
    if (j->done && !j->ready && !j->slot_killed)
        violate(k, j, "lost ready: the op is DONE and its slot never was READY");
    bool replay = (j->faults & 1u << F_REPLAY) && !j->replaying && !j->op_killed &&
                  !j->slot_killed && !j->orphan && j->op_over;
    struct endpoint *p = &k->end[j->p];
    if (replay && p->state == END_UP && p->n_free >= j->n && p->drain_job < 0) {
        j->replaying = true;
        j->done = false;
        blocks_take(k, p, k->s->job[j - k->job].src, j->n, false);
        j->src_held = true;
        note(k, j, "the grant is used again");
        k->c.faults[F_REPLAY]++;
        touch(j);
        job_start_op(k, j, true);
        return;
    }
    if (j->src_held) op_over(k, j); /* the receiver was killed before it granted */
    k->c.n_ready += j->ready;
    k->c.n_touched += j->touched;
    k->c.n_killed += j->op_killed || j->slot_killed;
    j->busy = false;
    k->n_over++;
}

/* Ends both sides of a transfer that never got under way. */
static void on_granted(struct soak *k, struct job *j, const struct soak_message *m)
{
    if (!j->granting) return;
    if (m->status) {
        violatef(k, j, "slot leak: the grant was refused with status %d (%s)", (int)m->status,
                 m->text);
        return;
    }
    j->granting = false;
    j->slot_live = true;
    k->s->job[m->job].slot = m->id;
    note(k, j, "granted: slot %u", m->id);
    k->c.bytes += (uint64_t)j->n * SOAK_BLOCK_BYTES;
    if (j->orphan || j->op_killed) {
        op_over(k, j);
        if (j->orphan) k->c.faults[F_ORPHAN]++;
        if (j->orphan) touch(j);
        return;
    }
    job_start_op(k, j, false);
}

static void on_started(struct soak *k, struct job *j, const struct soak_message *m)
{
    if (!j->op_pending) return;
    if (m->status) {
        /* Only a grant whose author had no port up at that moment may be refused. */
        if (m->status != TD_ERR_UNSUPPORTED || k->s->path != TD_XFER_PATH_RDMA)
            violatef(k, j, "op leak: the op was refused with status %d (%s)", (int)m->status,
                     m->text);
        note(k, j, "op refused: %.80s", m->text);
        k->c.n_refused++;
        op_over(k, j);
        job_op_over(k, j, td_now_ns());
        if (!j->replaying) job_revoke(k, j, "no op");
        job_check_over(k, j);
        return;
    }
    j->op_pending = false;
    j->op_live = true;
    k->c.n_ops++;
    k->s->job[m->job].op = m->id;
    note(k, j, "started: op %u", m->id);
}

static const char *event_name(enum td_xfer_event_kind kind)
{
    static const char *const name[] = {"none",    "SLOT_READY", "SLOT_FAILED", "SLOT_FREE",
                                       "OP_DONE", "OP_FAILED",  "PATH_CHOSEN"};
    return name[kind <= TD_XFER_PATH_CHOSEN ? kind : 0];
}

static void on_event(struct soak *k, struct job *j, const struct soak_message *m)
{
    uint64_t now = td_now_ns();
    bool of_op = m->kind == TD_XFER_OP_DONE || m->kind == TD_XFER_OP_FAILED;
    note(k, j, "%s %d %.70s", event_name(m->kind), (int)m->status, m->text);
    if (of_op ? !j->op_live : !j->slot_live) {
        violatef(k, j, "twice: %s of what has ended", event_name(m->kind));
        return;
    }
    switch (m->kind) {
    case TD_XFER_SLOT_READY:
        if (j->ready || j->failed)
            violate(k, j, "twice: SLOT_READY of a slot that was READY or FAILED");
        j->ready = true;
        if (flip(k, 4))
            j->revoke_ns = now + rnd(k, 5000) * TD_NS_PER_US;
        else
            job_revoke(k, j, "it is READY");
        break;
    case TD_XFER_SLOT_FAILED:
        if (j->ready || j->failed)
            violate(k, j, "twice: SLOT_FAILED of a slot that was READY or FAILED");
        j->failed = true;
        if (m->status == TD_ERR_CORRUPT) violate(k, j, "corrupt: a digest differed");
        if (flip(k, 8))
            j->revoke_ns = now + rnd(k, 5000) * TD_NS_PER_US;
        else
            job_revoke(k, j, "it has FAILED");
        break;
    case TD_XFER_SLOT_FREE:
        slot_over(k, j);
        break;
    case TD_XFER_OP_DONE:
        if (j->replaying && !j->ready)
            violate(k, j, "lost ready: a replayed grant was DONE, and it never was READY");
        if (!j->replaying) k->c.n_done++;
        j->done = true;
        op_over(k, j);
        break;
    case TD_XFER_OP_FAILED: {
        int f = 0;
        while (f < 7 && failures[f].status != m->status) f++;
        if (!j->replaying) k->c.failed[f]++;
        op_over(k, j);
        job_op_over(k, j, now);
        break;
    }
    case TD_XFER_PATH_CHOSEN:
    case TD_XFER_PEER_REFUSED:
        break;
    }
    job_check_over(k, j);
}

static void news_take(struct soak *k, uint32_t end)
{
    struct soak_message m;
    struct endpoint *e = &k->end[end];
    while (soak_ring_get(&k->s->end[end].news, &m)) {
        struct job *j = job_of(k, &m);
        switch (m.verb) {
        case SOAK_OPENED:
            if (m.status)
                violatef(k, NULL, "open: endpoint %u, life %u: %s", end, e->n_lives, m.text);
            k->s->end[end].port = (uint16_t)m.n;
            if (e->state == END_OPENING) e->state = END_UP;
            break;
        case SOAK_GRANTED:
            if (j) on_granted(k, j, &m);
            break;
        case SOAK_STARTED:
            if (j) on_started(k, j, &m);
            break;
        case SOAK_EVENT:
            if (j)
                on_event(k, j, &m);
            else
                violatef(k, &k->job[m.job], "twice: %s of a transfer that is over",
                         event_name(m.kind));
            break;
        case SOAK_CLOSED:
            e->state = END_CLOSED;
            break;
        case SOAK_VIOLATION:
            violate(k, j, m.text);
            break;
        default:
            TD_ASSERT(!"news that are none");
        }
    }
}

/* --- faults that meet endpoints --------------------------------------------------------------- */

static void strike_ends(struct soak *k, struct job *j, uint64_t now)
{
    uint32_t f = j->faults, any = rnd(k, SOAK_ENDS);
    if (f & 1u << F_CUT) {
        command(k, any,
                &(struct soak_message){.verb = SOAK_CUT,
                                       .n = flip(k, 2) ? -1 : (int32_t)(1 + rnd(k, 0x7fffffff))});
        note(k, j, "connections of endpoint %u are cut", any);
        k->c.faults[F_CUT]++;
        touch_end(k, any);
    }
    if (f & 1u << F_PORT) {
        uint32_t device = rnd(k, SOAK_DEVICES);
        if (k->end[any].port_up_ns[device] == TD_NEVER_NS) {
            command(k, any,
                    &(struct soak_message){.verb = SOAK_PORT, .id = device, .final = false});
            k->end[any].port_up_ns[device] = now + (1 + rnd(k, 100)) * TD_NS_PER_MS;
            note(k, j, "port of device %u of endpoint %u goes down", device, any);
            k->c.faults[F_PORT]++;
            touch_end(k, any);
        }
    }
    if (f & 1u << F_GID) {
        command(k, any, &(struct soak_message){.verb = SOAK_GID, .id = rnd(k, SOAK_DEVICES)});
        note(k, j, "the GID of endpoint %u changes", any);
        k->c.faults[F_GID]++;
    }
    if (f & 1u << F_RULE) {
        command(k, any,
                &(struct soak_message){
                    .verb = SOAK_RULE, .first = (int32_t)rnd(k, 60), .n = (int32_t)rnd(k, 20)});
        note(k, j, "a work request of endpoint %u will fail", any);
        k->c.faults[F_RULE]++;
    }
    if ((f & 1u << F_STOP) && k->end[any].state == END_UP) {
        end_stop(k, any, now);
        note(k, j, "endpoint %u is stopped", any);
        k->c.faults[F_STOP]++;
        touch_end(k, any);
    }
    for (int side = 0; side < 2; side++) {
        enum fault kill_fault = side ? F_KILL_RECEIVER : F_KILL_SENDER;
        uint32_t victim = side ? SOAK_SENDERS + rnd(k, SOAK_RECEIVERS) : rnd(k, SOAK_SENDERS);
        if (!(f & 1u << kill_fault) ||
            (k->end[victim].state != END_UP && k->end[victim].state != END_STOPPED))
            continue;
        j->faults &= ~(1u << kill_fault);
        note(k, j, "endpoint %u is killed", victim);
        k->c.faults[kill_fault]++;
        touch_end(k, victim);
        end_kill(k, victim);
    }
}

/* --- the round -------------------------------------------------------------------------------- */

/* More than its deadline and the grace; extra: of that, stopped or starved. */
static void hangs(struct soak *k, struct job *j, const char *what, uint64_t now, uint64_t extra)
{
    if (k->violated) return;
    violatef(k, j, "%s %.1f s after the transfer began, %.1f s of them stopped or starved", what,
             (double)(now - j->start_ns) / 1e9, (double)extra / 1e9);
    ask_state(k, j->p);
    ask_state(k, j->d);
}

static void check_limits(struct soak *k, uint64_t now)
{
    starved_sample(&k->starved, getpid(), now);
    for (uint32_t i = 0; i < SOAK_ENDS; i++)
        if (k->s->processes && k->end[i].pid)
            starved_sample(&k->end[i].starved, k->end[i].pid, now);
    for (uint32_t q = 0; q < SOAK_JOBS; q++) {
        struct job *j = &k->job[q];
        if (!j->busy || j->draining) continue;
        uint64_t extra = stopped_ns(k, j->p, now) + stopped_ns(k, j->d, now) - j->stopped_ns;
        if ((j->slot_live || j->granting) && now > j->slot_limit_ns + extra)
            hangs(k, j, "hung slot: no SLOT_FREE", now, extra);
        if ((j->op_live || j->op_pending) && now > j->op_limit_ns + extra)
            hangs(k, j, "hung op: no end", now, extra);
    }
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        struct endpoint *e = &k->end[i];
        int status;
        if (e->state == END_OPENING && now > e->opening_ns + 120 * TD_NS_PER_S)
            violatef(k, NULL, "open: endpoint %u takes too long", i);
        if (k->s->processes && e->pid && e->state != END_CLOSED &&
            waitpid(e->pid, &status, WNOHANG) == e->pid) {
            news_take(k, i);
            if (e->state != END_CLOSED)
                violatef(k, NULL, "died: endpoint %u, %s %d", i,
                         WIFSIGNALED(status) ? "signal" : "exit",
                         WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            e->pid = 0;
        }
    }
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void jobs_turn(struct soak *k, uint64_t now, uint64_t *due)
{
    for (uint32_t q = 0; q < SOAK_JOBS && !k->violated; q++) {
        struct job *j = &k->job[q];
        if (j->busy && j->draining && k->end[j->p].state == END_UP &&
            k->end[j->d].state == END_UP && job_start(k, j, now))
            strike_ends(k, j, now);
        if (!j->busy && k->c.n < k->n_before) {
            if (!job_start(k, j, now)) {
                if (j->draining) k->c.n++;
                continue;
            }
            k->c.n++;
            strike_ends(k, j, now);
        }
        if (!j->busy || j->draining) continue;
        if (j->op_pending || j->op_live) {
            if (now >= j->next_ns) job_submit(k, j, now);
            if (now >= j->cancel_ns) {
                j->cancel_ns = TD_NEVER_NS;
                note(k, j, "cancel");
                k->c.faults[F_CANCEL]++;
                touch(j);
                job_command(k, j, j->p, (struct soak_message){.verb = SOAK_CANCEL});
            }
        }
        if (j->slot_live && now >= j->revoke_ns) {
            if ((j->faults & 1u << F_REVOKE) && !j->revoked && !j->ready) {
                k->c.faults[F_REVOKE]++;
                touch(j);
            }
            job_revoke(k, j, "it is time");
        }
        *due = earlier(*due, earlier(j->next_ns, earlier(j->cancel_ns, j->revoke_ns)));
    }
}

static void ends_turn(struct soak *k, uint64_t now, uint64_t *due)
{
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        struct endpoint *e = &k->end[i];
        if (e->state == END_STOPPED) {
            if (now >= e->cont_ns)
                end_continue(e, now);
            else
                *due = earlier(*due, e->cont_ns);
        }
        for (uint32_t d = 0; d < SOAK_DEVICES; d++) {
            if (now < e->port_up_ns[d]) {
                *due = earlier(*due, e->port_up_ns[d]);
                continue;
            }
            e->port_up_ns[d] = TD_NEVER_NS;
            command(k, i, &(struct soak_message){.verb = SOAK_PORT, .id = d, .final = true});
        }
        news_take(k, i);
    }
}

static void run_transfers(struct soak *k, uint64_t shown_before)
{
    uint64_t next_check = 0;
    while (!k->violated && k->n_over < k->n_before) {
        uint64_t now = td_now_ns(), due = now + 20 * TD_NS_PER_MS;
        ends_turn(k, now, &due);
        jobs_turn(k, now, &due);
        if (now >= next_check) {
            check_limits(k, now);
            next_check = now + 100 * TD_NS_PER_MS;
            td_progress_update(k->progress, shown_before + k->n_over);
        }
        td_wakeup_wait(&k->s->wakeup, due);
    }
}

static void close_ends(struct soak *k)
{
    uint64_t until = td_now_ns() + 60 * TD_NS_PER_S;
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        struct endpoint *e = &k->end[i];
        if (e->state == END_STOPPED) end_continue(e, td_now_ns());
        if (k->violated && k->s->processes) {
            if (e->pid) {
                kill(e->pid, SIGKILL);
                waitpid(e->pid, NULL, 0);
            }
            e->state = END_CLOSED;
            continue;
        }
        command(k, i, &(struct soak_message){.verb = SOAK_CLOSE});
    }
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        struct endpoint *e = &k->end[i];
        while (e->state != END_CLOSED && td_now_ns() < until) {
            news_take(k, i);
            if (e->state != END_CLOSED)
                td_wakeup_wait(&k->s->wakeup, td_now_ns() + 20 * TD_NS_PER_MS);
        }
        if (e->state != END_CLOSED) {
            violatef(k, NULL, "hung close: endpoint %u", i);
            fflush(NULL);
            _exit(1);
        }
        if (!k->s->processes)
            pthread_join(e->thread, NULL);
        else if (e->pid)
            waitpid(e->pid, NULL, 0);
        e->pid = 0;
    }
}

static void check_leaks(struct soak *k, int fds_before, int64_t heap_before)
{
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        const struct soak_leaks *j = &k->s->end[i].leaks;
        const struct td_xfer_stats *st = &k->s->end[i].stats;
        k->c.n_fenced += st->n_fenced;
        k->c.n_digests += st->n_digests;
        k->c.bytes_pulled += st->bytes_pulled;
        if (j->n_slots)
            violatef(k, NULL, "slot leak: endpoint %u ends with %u slots in use", i, j->n_slots);
        if (j->n_ops)
            violatef(k, NULL, "op leak: endpoint %u ends with %u ops in use", i, j->n_ops);
        if (st->n_digest_mismatches)
            violatef(k, NULL, "corrupt: endpoint %u saw %" PRIu64 " digests that differ", i,
                     st->n_digest_mismatches);
        /* A lane of tcp that says hello after its connection was cut is refused, and counted. */
        if (st->n_bad_frames &&
            (k->s->path != TD_XFER_PATH_TCP || !(k->c.faults[F_CUT] + k->c.faults[F_STOP])))
            violatef(k, NULL, "bad frames: endpoint %u refused %" PRIu64 " frames of honest peers",
                     i, st->n_bad_frames);
        if (j->rss_growth_bytes > SLACK_RSS)
            violatef(k, NULL, "heap leak: endpoint %u grew by %" PRId64 " KiB while it ran", i,
                     j->rss_growth_bytes >> 10);
        if (!k->s->processes) continue;
        if (j->fds)
            violatef(k, NULL, "fd leak: endpoint %u closes with %d descriptors more than it had", i,
                     j->fds);
        if (j->heap_bytes > SLACK_HEAP)
            violatef(k, NULL, "heap leak: endpoint %u closes with %" PRId64 " KiB more than it had",
                     i, j->heap_bytes >> 10);
    }
    int fds = soak_count_fds() - fds_before;
    int64_t heap = soak_heap_bytes() - heap_before;
    if (fds) violatef(k, NULL, "fd leak: %d descriptors more than before", fds);
    if (heap > SLACK_HEAP)
        violatef(k, NULL, "heap leak: %" PRId64 " KiB more than before", heap >> 10);
}

static void csv_row(const struct options *o, const struct soak *k)
{
    FILE *f = o->csv ? fopen(o->csv, "ae") : NULL;
    const struct counts *c = &k->c;
    if (!f) return;
    if (ftell(f) == 0) {
        fprintf(f, "commit,machine,seed,fault_ppm,path,processes,transfers,seconds,transfers_per_s,"
                   "granted_mib,ready,op_done,killed,refused");
        for (int i = 0; i < 8; i++) fprintf(f, ",op_%s", failures[i].name);
        for (int i = 0; i < N_FAULTS; i++) fprintf(f, ",%s", fault_names[i].column);
        fprintf(f, ",fenced,digests,pulled_mib,corrupt,stale_or_stray,hung,leaked,touched\n");
    }
    fprintf(f,
            "%s,%s,%" PRIu64 ",%u,%s,%d,%" PRIu64 ",%.1f,%.0f,%" PRIu64 ",%" PRIu64 ",%" PRIu64
            ",%" PRIu64 ",%" PRIu64,
            o->commit, o->machine, o->seed, o->fault_ppm, td_xfer_path_name(k->s->path),
            k->s->processes ? 2 : 1, c->n, c->seconds, (double)c->n / c->seconds, c->bytes >> 20,
            c->n_ready, c->n_done, c->n_killed, c->n_refused);
    for (int i = 0; i < 8; i++) fprintf(f, ",%" PRIu64, c->failed[i]);
    for (int i = 0; i < N_FAULTS; i++) fprintf(f, ",%" PRIu64, c->faults[i]);
    /* a round with any of the last four has ended the run */
    fprintf(f, ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",0,0,0,0,%" PRIu64 "\n", c->n_fenced,
            c->n_digests, c->bytes_pulled >> 20, c->n_touched);
    fclose(f);
}

/* The round's state, its pools and its ends, which run when this returns. */
static void round_open(struct soak *k, const struct options *o, struct soak_shared *s,
                       enum td_xfer_path path, bool processes, uint64_t n)
{
    static uint32_t n_rounds;
    struct td_err err = {0};
    memset(k, 0, sizeof *k);
    k->o = o;
    k->s = s;
    k->start_ns = td_now_ns();
    k->n_before = n;
    k->id_base = (uint64_t)++n_rounds << 40;
    k->random = o->seed ^ k->id_base;
    *s = (struct soak_shared){
        .path = path, .processes = processes, .broken = o->broken, .timeout_ms = o->timeout_ms};
    snprintf(k->fabric, sizeof k->fabric, "/dev/shm/tandem-soak-%d-%u", (int)getpid(), n_rounds);
    TD_ASSERT(td_wakeup_open(&s->wakeup, &err) == TD_OK);
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        s->end[i].index = i;
        s->end[i].is_receiver = i >= SOAK_SENDERS;
        TD_ASSERT(td_wakeup_open(&s->end[i].wakeup, &err) == TD_OK);
        pool_make(k, i);
        k->end[i].drain_job = -1;
        memset(k->end[i].port_up_ns, 0xff, sizeof k->end[i].port_up_ns);
        for (int32_t b = 0; b < SOAK_BLOCKS; b++) k->end[i].free[k->end[i].n_free++] = b;
    }
    for (uint32_t i = 0; i < SOAK_ENDS; i++) end_start(k, i);
}

/* The ends have closed: every block is free and holds what a free one holds. */
static void round_close(struct soak *k)
{
    struct soak_shared *s = k->s;
    if (k->o->broken == BREAK_STRAY_END)
        soak_block(&s->end[SOAK_SENDERS], 3)[SOAK_BLOCK_BYTES / 2] ^= 4;
    for (uint32_t i = 0; i < SOAK_ENDS && !k->violated; i++) {
        if (k->end[i].n_free != SOAK_BLOCKS)
            violatef(k, NULL, "block leak: endpoint %u has %d of %d", i, k->end[i].n_free,
                     SOAK_BLOCKS);
        blocks_sweep(k, i, "at the end");
    }
    for (uint32_t i = 0; i < SOAK_ENDS; i++) {
        td_arena_destroy(&s->end[i].pool);
        td_wakeup_close(&s->end[i].wakeup);
    }
    td_wakeup_close(&s->wakeup);
    unlink(k->fabric);
}

static void add_counts(struct counts *total, const struct counts *c)
{
    total->n += c->n;
    total->n_ready += c->n_ready;
    total->n_touched += c->n_touched;
    total->n_done += c->n_done;
    total->n_killed += c->n_killed;
    total->n_refused += c->n_refused;
    total->bytes += c->bytes;
    total->n_fenced += c->n_fenced;
    total->n_digests += c->n_digests;
    for (int i = 0; i < N_FAULTS; i++) total->faults[i] += c->faults[i];
    for (int i = 0; i < 8; i++) total->failed[i] += c->failed[i];
}

/* False: violated. */
static bool run_round(const struct options *o, enum td_xfer_path path, bool processes, uint64_t n,
                      struct td_progress *progress, uint64_t shown_before, struct counts *total)
{
    static struct soak k;
    int fds = soak_count_fds();
    int64_t heap = soak_heap_bytes();
    struct soak_shared *s =
        mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TD_ASSERT(s != MAP_FAILED);
    round_open(&k, o, s, path, processes, n);
    k.progress = progress;
    run_transfers(&k, shown_before);
    close_ends(&k);
    k.c.seconds = (double)(td_now_ns() - k.start_ns) / 1e9;
    round_close(&k);
    if (!k.violated) check_leaks(&k, fds, heap);
    if (!k.violated && k.c.n_ready * 2 < n)
        violatef(&k, NULL, "vacuous: only %" PRIu64 " of %" PRIu64 " were READY", k.c.n_ready, n);
    if (!k.violated) csv_row(o, &k);
    add_counts(total, &k.c);
    fprintf(stderr,
            "%s%s, %s: %" PRIu64 " transfers in %.1f s (%.0f/s), %" PRIu64 " READY, %" PRIu64
            " DONE, %" PRIu64 " killed, %" PRIu64 " fenced, %.1f %% met a fault\n",
            progress->is_tty ? "\r\033[K" : "", td_xfer_path_name(path),
            processes ? "children" : "one process", k.n_over, k.c.seconds,
            (double)k.n_over / k.c.seconds, k.c.n_ready, k.c.n_done, k.c.n_killed, k.c.n_fenced,
            100.0 * (double)k.c.n_touched / (double)(k.c.n ? k.c.n : 1));
    munmap(s, sizeof *s);
    return !k.violated;
}

static int run(const struct options *o)
{
    static const enum td_xfer_path paths[] = {TD_XFER_PATH_TCP, TD_XFER_PATH_SHM,
                                              TD_XFER_PATH_RDMA};
    struct {
        enum td_xfer_path path;
        bool processes;
    } round[6];
    struct counts c = {0};
    struct td_progress progress;
    int n_rounds = 0;
    uint64_t shown = 0;
    for (int i = 0; i < 3; i++)
        for (int p = 2; p >= 1; p--)
            if ((!o->path || o->path == paths[i]) && (!o->processes || o->processes == p)) {
                round[n_rounds].path = paths[i];
                round[n_rounds++].processes = p == 2;
            }
    fprintf(stderr,
            "soak: seed %" PRIu64 ", %" PRIu64
            " transfers, each kind of fault for %u of a million\n",
            o->seed, o->n_transfers, o->fault_ppm);
    td_progress_start(&progress, "soak", "transfers", o->n_transfers);
    for (int i = 0; i < n_rounds; i++) {
        uint64_t n = o->n_transfers * (uint64_t)(i + 1) / (uint64_t)n_rounds -
                     o->n_transfers * (uint64_t)i / (uint64_t)n_rounds;
        if (!run_round(o, round[i].path, round[i].processes, n, &progress, shown, &c)) return 1;
        shown += n;
    }
    progress.done = shown;
    td_progress_end(&progress);
    printf("soak: seed %" PRIu64 ": %" PRIu64 " transfers, %" PRIu64 " MiB granted: ", o->seed, c.n,
           c.bytes >> 20);
    printf("%" PRIu64 " READY, %" PRIu64 " DONE, %" PRIu64 " killed, %" PRIu64 " refused",
           c.n_ready, c.n_done, c.n_killed, c.n_refused);
    for (int i = 0; i < 8; i++) printf(", %" PRIu64 " %s", c.failed[i], failures[i].name);
    printf("; faults:");
    for (int i = 0; i < N_FAULTS; i++)
        printf("%s %" PRIu64 " %s", i ? "," : "", c.faults[i], fault_names[i].name);
    printf("; %" PRIu64
           " transfers met one (%.1f %%); 0 corrupt, 0 stale or stray, 0 hung, 0 leaked\n",
           c.n_touched, 100.0 * (double)c.n_touched / (double)c.n);
    if (!o->fault_ppm || c.n_touched * 100 >= c.n * o->touched_percent) return 0;
    fprintf(stderr,
            "\nviolation: untouched: only %" PRIu64 " of %" PRIu64
            " transfers met a fault, must be %u %% at least (--fault-ppm is %u)\n",
            c.n_touched, c.n, o->touched_percent, o->fault_ppm);
    return 1;
}

/* --- the checks are checked ------------------------------------------------------------------- */

/* Runs this program with one thing broken; true when it exits with 1 and names the violation. */
static bool break_one(enum soak_break what, int processes)
{
    int pipes[2];
    static char text[1 << 18];
    char want[64];
    size_t used = 0;
    TD_ASSERT(pipe(pipes) == 0);
    fflush(NULL);
    pid_t pid = fork();
    TD_ASSERT(pid >= 0);
    if (pid == 0) {
        char processes_text[8];
        dup2(pipes[1], 2);
        close(pipes[0]);
        close(pipes[1]);
        snprintf(processes_text, sizeof processes_text, "%d", processes);
        execl("/proc/self/exe", "xfer_soak", "--transfers", "400", "--path", "tcp", "--processes",
              processes_text, "--seed", "7", "--deadline-ms", "800", "--grace-ms", "700",
              "--fault-ppm", what == BREAK_UNTOUCHED ? "20000" : "0", "--break",
              soak_break_words[what], (char *)NULL);
        _exit(127);
    }
    close(pipes[1]);
    for (ssize_t n;
         used < sizeof text - 1 && (n = read(pipes[0], text + used, sizeof text - 1 - used)) > 0;)
        used += (size_t)n;
    close(pipes[0]);
    text[used] = 0;
    int status = 0;
    waitpid(pid, &status, 0);
    snprintf(want, sizeof want, "violation: %s", soak_break_names[what]);
    bool right = what == BREAK_NONE
                     ? WIFEXITED(status) && WEXITSTATUS(status) == 0 && !strstr(text, "violation")
                     : WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(text, want);
    /* One that hangs is told with what both its ends know. On a busy machine that is after minutes,
     * and their connection was closed meanwhile, since nothing used it. */
    if (what == BREAK_HUNG_SLOT || what == BREAK_HUNG_OP)
        right = right && (strstr(text, "    connection ") || strstr(text, "    no connection\n")) &&
                !strstr(text, "does not answer");
    printf("%-12s %s: %s\n", soak_break_words[what], processes == 2 ? "children   " : "one process",
           right ? (what ? "reported" : "silent") : "NOT AS IT SHOULD BE");
    if (!right) printf("exit %d, wanted \"%s\"; it said:\n%s\n", status, want, text);
    return right;
}

static int break_all(void)
{
    int n_wrong = 0;
    for (int what = 0; what < N_BREAKS; what++) {
#if defined(TD_WITH_ASAN) || defined(TD_WITH_TSAN)
        if (what == BREAK_HEAP_LEAK) continue; /* the sanitizer's own check */
#endif
        for (int processes = 1; processes <= 2; processes++)
            n_wrong += !break_one((enum soak_break)what, processes);
    }
    return n_wrong ? 1 : 0;
}

/* --- the command line ------------------------------------------------------------------------- */

static uint64_t number(const char *name, const char *text, uint64_t max)
{
    char *end;
    errno = 0;
    unsigned long long v = text ? strtoull(text, &end, 0) : 0;
    if (!text || errno || end == text || *end || v > max) {
        fprintf(stderr, "xfer_soak: %s is \"%s\", must be 0..%" PRIu64 "\n", name, text ? text : "",
                max);
        exit(2);
    }
    return v;
}

/* The place of a name in a table of words; exits when it is none of them. */
static int word_of(const char *option, const char *value, const char *const *words, int n,
                   const char *what)
{
    for (int i = 0; i < n; i++)
        if (words[i] && !strcmp(value, words[i])) return i;
    fprintf(stderr, "xfer_soak: %s is \"%s\", %s\n", option, value, what);
    exit(2);
}

/* Options of one number; false when the name is none of them. */
static bool take_number(struct options *o, const char *name, const char *value, int *ret_reconnects,
                        int *ret_peers)
{
    if (!strcmp(name, "--transfers"))
        o->n_transfers = number(name, value, 1ull << 32);
    else if (!strcmp(name, "--seed"))
        o->seed = number(name, value, UINT64_MAX);
    else if (!strcmp(name, "--fault-ppm"))
        o->fault_ppm = (uint32_t)number(name, value, 1000000);
    else if (!strcmp(name, "--touched-percent"))
        o->touched_percent = (uint32_t)number(name, value, 100);
    else if (!strcmp(name, "--deadline-ms"))
        o->deadline_ms = (uint32_t)number(name, value, 600000);
    else if (!strcmp(name, "--grace-ms"))
        o->grace_ms = (uint32_t)number(name, value, 600000);
    else if (!strcmp(name, "--peer-timeout-ms"))
        o->timeout_ms = (uint32_t)number(name, value, 600000);
    else if (!strcmp(name, "--processes"))
        o->processes = (int)number(name, value, 2);
    else if (!strcmp(name, "--reconnects"))
        *ret_reconnects = (int)number(name, value, 1000000);
    else if (!strcmp(name, "--storm"))
        *ret_peers = (int)number(name, value, 256);
    else
        return false;
    return true;
}

static void take_text(struct options *o, const char *name, const char *value)
{
    const char *paths[TD_XFER_PATH_RDMA + 1] = {"all"};
    for (int p = 1; p <= TD_XFER_PATH_RDMA; p++) paths[p] = td_xfer_path_name((enum td_xfer_path)p);
    if (!strcmp(name, "--csv") && value)
        o->csv = value;
    else if (!strcmp(name, "--machine") && value)
        o->machine = value;
    else if (!strcmp(name, "--commit") && value)
        o->commit = value;
    else if (!strcmp(name, "--path") && value)
        o->path = (enum td_xfer_path)word_of(name, value, paths, TD_XFER_PATH_RDMA + 1,
                                             "must be tcp, shm, rdma or all");
    else if (!strcmp(name, "--break") && value)
        o->broken = (enum soak_break)word_of(name, value, soak_break_words, N_BREAKS,
                                             "and there is no such check");
    else {
        fprintf(stderr, "xfer_soak: \"%s\" is no option, or lacks its value\n", name);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    struct options o = {.n_transfers = 10000,
                        .fault_ppm = 20000,
                        .touched_percent = 10,
                        .deadline_ms = 4000,
                        .grace_ms = 5000,
                        .timeout_ms = 500,
                        .machine = "",
                        .commit = "",
                        .seed = td_random_u64() >> 32};
    int n_reconnects = 0, n_peers = 0;
    if (getenv("SEED")) o.seed = number("SEED", getenv("SEED"), UINT64_MAX);
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(name, "--break-all")) return break_all();
        if (!take_number(&o, name, value, &n_reconnects, &n_peers)) take_text(&o, name, value);
    }
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { /* a storm has some thousand */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    int failed = 0;
    for (int p = TD_XFER_PATH_TCP; p <= TD_XFER_PATH_RDMA && (n_reconnects || n_peers); p++) {
        if (o.path && (int)o.path != p) continue;
        if (n_reconnects) failed |= soak_reconnects((enum td_xfer_path)p, n_reconnects);
        if (n_peers) failed |= soak_storm((enum td_xfer_path)p, n_peers);
    }
    return n_reconnects || n_peers ? failed : run(&o);
}
