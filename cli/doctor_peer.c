/* doctor_peer.c - measures KV paths between two machines with the transfer engine itself.
 *
 * One doctor listens, the other leads. The leader has both sides open an endpoint for each path and
 * block size, asks for grants, sends as a prefill worker would, and has the listener verify every
 * transfer's bytes before it counts. Each transfer reports the path that it took; a transfer over
 * another path than the one asked for is a failure, never a slow success.
 *
 *   leader                                  listener
 *   HELLO           ----------------------> no HELLO in time: drops the connection, listens again
 *                   <---------------------- HELLO
 *   OPEN(path)      ----------------------> td_xfer_open, td_xfer_mem_add
 *   GRANT           ----------------------> td_xfer_grant
 *   td_xfer_op_start, _submit ============> (the path)        clock: from op_start to OP_DONE
 *   VERIFY(seed)    ----------------------> SLOT_READY, compare, revoke, SLOT_FREE
 *   BYE             ----------------------> ends, or listens again (--sessions) */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "cli/doctor_wire.h"
#include "common/base/clock.h"
#include "common/base/wakeup.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/mem.h"
#include "common/transfer/rdma/verbs.h"

#define GROUP "peer"
#define SMALL_BYTES 4096u
#define LARGE_BYTES (1u << 20)
#define N_SMALL 100 /* timed transfers of SMALL_BYTES */
#define N_WARM 3
#define N_WHOLE 3 /* transfers of the whole pool */
/* bounds a measurement to about this time: a slow network sends less than the whole pool */
#define WHOLE_S 4.0
#define STRANGERS_TOLD 8
#define EVENTS 16
#define PENDING 256

const char *doctor_path_verdict(enum td_xfer_path asked, enum td_xfer_path used)
{
    static char text[96];
    if (asked == TD_XFER_PATH_AUTO || asked == used) return NULL;
    snprintf(text, sizeof text, "%s was asked for, but the transfer went by %s",
             td_xfer_path_name(asked), td_xfer_path_name(used));
    return text;
}

/* ---- endpoint: both sides have one ----------------------------------------------------------- */

struct end {
    struct td_xfer *x;
    struct td_arena arena;
    struct td_wakeup wakeup;
    bool has_wakeup;
    uint64_t block_bytes;
    uint32_t n_blocks;
    bool over_tls;                 /* its data port speaks TLS */
    struct td_xfer_event *pending; /* [PENDING] events that a later call will ask for */
    size_t n_pending;
};

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static void end_close(struct end *e)
{
    td_xfer_close(e->x);
    if (e->arena.base) td_arena_destroy(&e->arena);
    if (e->has_wakeup) td_wakeup_close(&e->wakeup);
    free(e->pending);
    memset(e, 0, sizeof *e);
}

/* Opens the endpoint as a worker here would: path, RDMA devices and TLS from the same options. vb
 * NULL: no RDMA device. */
static td_status end_open(struct end *e, const struct doctor_config *o, const struct td_verbs *vb,
                          enum td_xfer_path path, const char *host, uint64_t block_bytes,
                          uint32_t n_blocks, struct td_err *err)
{
    memset(e, 0, sizeof *e);
    e->block_bytes = block_bytes;
    e->n_blocks = n_blocks;
    struct td_xfer_config c = {.instance = "doctor",
                               .incarnation = td_random_u64(),
                               .layout_hash = block_bytes,
                               .listen_host = host,
                               .max_slots = DOCTOR_SLOTS,
                               .max_ops = DOCTOR_SLOTS,
                               .peer_timeout_ms = (uint32_t)o->timeout_ms,
                               .hooks = {.wake = ring, .ctx = &e->wakeup}};
    struct td_kv_port port;
    const struct td_kv_port_files files = {.tls_cert = o->at.tls_cert,
                                           .tls_key = o->at.tls_key,
                                           .tls_ca = o->at.tls_ca,
                                           .secret = o->secret};
    td_status s = td_kv_port_fill(&o->kv_port, td_xfer_path_name(path), &files,
                                  td_xfer_path_uses_verbs(path) ? vb : NULL, &port, &c, err);
    if (s) return s;
    e->over_tls = port.use_tls;
    s = td_wakeup_open(&e->wakeup, err);
    if (s) return s;
    e->has_wakeup = true;
    e->pending = calloc(PENDING, sizeof *e->pending);
    s = e->pending ? TD_OK : td_fail(err, TD_ERR_NOMEM, "no memory for events");
    if (!s) s = td_arena_create(block_bytes * n_blocks, 1, "tandem-doctor", &e->arena, err);
    if (!s) s = td_xfer_open(&c, &e->x, err);
    if (!s) s = td_xfer_mem_add(e->x, &e->arena, block_bytes, (int32_t)n_blocks, err);
    if (s) end_close(e);
    return s;
}

/* The event of `id` whose kind is a or b. */
static td_status end_event(struct end *e, enum td_xfer_event_kind a, enum td_xfer_event_kind b,
                           uint32_t id, uint64_t deadline_ns, struct td_xfer_event *ret,
                           struct td_err *err)
{
    for (;;) {
        for (size_t i = 0; i < e->n_pending; i++) {
            struct td_xfer_event *p = &e->pending[i];
            if ((p->kind != a && p->kind != b) || p->id != id) continue;
            *ret = *p;
            memmove(p, p + 1, (e->n_pending - i - 1) * sizeof *p);
            e->n_pending--;
            return TD_OK;
        }
        if (e->n_pending == PENDING)
            return td_fail(err, TD_ERR_INTERNAL, "more events than transfers");
        size_t room = PENDING - e->n_pending,
               n = td_xfer_poll(e->x, e->pending + e->n_pending, room < EVENTS ? room : EVENTS);
        e->n_pending += n;
        if (n > 0) continue;
        if (td_now_ns() >= deadline_ns)
            return td_fail(err, TD_ERR_DEADLINE, "the transfer did not end in time");
        td_wakeup_wait(&e->wakeup, deadline_ns);
    }
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* The first 8 bytes of block b. Each (seed, block) has a sequence of its own, so that a block in a
 * wrong place, an old one and a short one are all noticed. */
static uint64_t first_word(uint64_t seed, uint32_t block)
{
    uint64_t v = seed + 0x9e3779b97f4a7c15ull * (block + 1);
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
    return v ^ v >> 31;
}

static void fill(struct end *e, uint32_t first, uint32_t n, uint64_t seed)
{
    for (uint32_t b = 0; b < n; b++) {
        uint64_t v = first_word(seed, b),
                 *to = (uint64_t *)((uint8_t *)e->arena.base + (first + b) * e->block_bytes);
        for (size_t i = 0; i < e->block_bytes / 8; i++, v += 0x9e3779b97f4a7c15ull) to[i] = v;
    }
}

/* -1, or the offset of the 8 bytes that contain the first wrong byte. */
static int64_t first_wrong(const struct end *e, uint32_t first, uint32_t n, uint64_t seed)
{
    for (uint32_t b = 0; b < n; b++) {
        const uint64_t *from =
            (const uint64_t *)((const uint8_t *)e->arena.base + (first + b) * e->block_bytes);
        uint64_t v = first_word(seed, b);
        for (size_t i = 0; i < e->block_bytes / 8; i++, v += 0x9e3779b97f4a7c15ull)
            if (from[i] != v) return (int64_t)(b * e->block_bytes + i * 8);
    }
    return -1;
}

/* A number that is equal on both sides when they share kernel, network namespace and user, which
 * the shm path needs. Hashed, because the peer need not know more. */
static void host_id(uint64_t ret[2])
{
    char boot[64], text[160];
    struct stat ns = {0};
    doctor_read("", "/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    if (stat("/proc/self/ns/net", &ns)) ns.st_ino = 0;
    snprintf(text, sizeof text, "%s:%llu:%u", boot, (unsigned long long)ns.st_ino,
             (unsigned)geteuid());
    struct td_hash128 h = td_hash128(text, strlen(text), 1);
    ret[0] = h.lo;
    ret[1] = h.hi;
}

/* ---- listener -------------------------------------------------------------------------------- */

struct session {
    int fd;
    struct end end;
    struct doctor_msg in, out;
    uint64_t n_verified, bytes_verified;
    char host[64], peer[96];
    const struct doctor_config *o;
    const struct td_verbs *vb;
};

static void answer_open(struct session *s, struct td_err *err)
{
    const struct doctor_msg *m = &s->in;
    end_close(&s->end);
    uint64_t bytes = m->block_bytes * m->n_blocks;
    if (bytes > td_mem_available() / 2) {
        td_fail(err, TD_ERR_NOMEM, "a pool of %s is more than half of the memory there",
                td_size_text(bytes).s);
        return;
    }
    end_open(&s->end, s->o, s->vb, (enum td_xfer_path)m->path, s->host, m->block_bytes, m->n_blocks,
             err);
}

static void answer_grant(struct session *s, struct td_err *err)
{
    static int32_t ids[TD_XFER_MAX_BLOCKS];
    static uint8_t blob[TD_XFER_BLOB_MAX];
    size_t blob_bytes = 0;
    uint32_t slot = 0;
    for (uint32_t i = 0; i < s->in.n; i++) ids[i] = (int32_t)(s->in.first + i);
    if (td_xfer_grant(s->end.x, ids, (int32_t)s->in.n, TD_NEVER_NS, 0, &slot, blob, &blob_bytes,
                      err))
        return;
    if (blob_bytes > DOCTOR_BLOB_MAX || slot >= DOCTOR_SLOTS) {
        td_xfer_revoke(s->end.x, slot, "doctor");
        td_fail(err, TD_ERR_LIMIT, "a grant of %zu bytes does not fit a message of the doctor",
                blob_bytes);
        return;
    }
    memcpy(s->out.blob, blob, blob_bytes);
    s->out.blob_bytes = (uint16_t)blob_bytes;
    s->out.slot = slot;
}

static void answer_verify(struct session *s, struct td_err *err)
{
    struct td_xfer_event ready, freed;
    struct td_err ignored;
    uint64_t until = td_deadline_after_ms(td_now_ns(), s->o->timeout_ms);
    if (end_event(&s->end, TD_XFER_SLOT_READY, TD_XFER_SLOT_FAILED, s->in.slot, until, &ready, err))
        return;
    if (ready.kind == TD_XFER_SLOT_FAILED) {
        td_fail(err, TD_ERR_PEER, "the receiver says: %s", ready.reason);
    } else {
        int64_t wrong = first_wrong(&s->end, s->in.first, s->in.n, s->in.seed);
        if (wrong >= 0)
            td_fail(err, TD_ERR_CORRUPT, "WRONG BYTES at offset %lld of %llu", (long long)wrong,
                    (unsigned long long)s->in.n * s->end.block_bytes);
        else
            s->n_verified++, s->bytes_verified += s->in.n * s->end.block_bytes;
        s->out.path = (uint8_t)ready.path;
    }
    td_xfer_revoke(s->end.x, s->in.slot, "doctor");
    end_event(&s->end, TD_XFER_SLOT_FREE, TD_XFER_SLOT_FREE, s->in.slot, until, &freed,
              err->code ? &ignored : err);
}

/* Answers until BYE. A refusal is an answer; an error of the connection ends the session. */
static td_status serve(struct session *s, struct td_err *err)
{
    uint64_t session_until = td_deadline_after_ms(td_now_ns(), 600000 + s->o->timeout_ms);
    for (;;) {
        /* the leader may be in the middle of a large transfer */
        uint64_t until = td_deadline_after_ms(td_now_ns(), 60000 + s->o->timeout_ms);
        td_status st =
            doctor_msg_recv(s->fd, &s->in, until < session_until ? until : session_until, err);
        if (!st) st = doctor_msg_check(&s->in, s->end.x ? s->end.n_blocks : 0, err);
        if (!st && s->in.answer)
            st = td_fail(err, TD_ERR_CORRUPT, "an answer that nobody asked for");
        if (st) return st;
        struct td_err refusal = {0};
        doctor_msg_init(&s->out, (enum doctor_msg_type)s->in.type, 1);
        switch ((enum doctor_msg_type)s->in.type) {
        case DOCTOR_MSG_OPEN:
            answer_open(s, &refusal);
            break;
        case DOCTOR_MSG_GRANT:
            answer_grant(s, &refusal);
            break;
        case DOCTOR_MSG_VERIFY:
            answer_verify(s, &refusal);
            break;
        case DOCTOR_MSG_BYE:
            return TD_OK;
        default:
            return td_fail(err, TD_ERR_CORRUPT, "type %u in the middle of a session", s->in.type);
        }
        s->out.status = refusal.code;
        snprintf(s->out.text, sizeof s->out.text, "%.*s", (int)sizeof s->out.text - 1, refusal.msg);
        if ((st = doctor_msg_send(s->fd, &s->out,
                                  td_deadline_after_ms(td_now_ns(), s->o->timeout_ms), err)))
            return st;
    }
}

/* Waits for a doctor; a connection that is not one is refused and dropped. */
static td_status accept_session(int listener, struct session *s, uint64_t deadline_ns,
                                struct doctor_report *r, struct td_err *err)
{
    for (unsigned n_strangers = 0;;) {
        if (td_now_ns() >= deadline_ns)
            return td_fail(err, TD_ERR_DEADLINE, "no --peer came in time, and %u strangers",
                           n_strangers);
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
                return td_fail(err, TD_ERR_IO, "accept: %s", strerror(errno));
            td_status st = doctor_wait(listener, deadline_ns, err);
            if (st) return td_fail(err, TD_ERR_DEADLINE, "no --peer came in time");
            continue;
        }
        struct td_err why = {0};
        uint16_t port = 0;
        char host[64] = "?";
        doctor_socket_name(fd, 1, host, &port, &why);
        snprintf(s->peer, sizeof s->peer, "%s port %u", host, port);
        td_status st =
            doctor_msg_recv(fd, &s->in, td_deadline_after_ms(td_now_ns(), s->o->timeout_ms), &why);
        if (!st) st = doctor_msg_check(&s->in, 0, &why);
        if (!st && (s->in.type != DOCTOR_MSG_HELLO || s->in.answer))
            st = td_fail(&why, TD_ERR_CORRUPT, "type is %u, not HELLO", s->in.type);
        if (!st) st = doctor_socket_name(fd, 0, s->host, &port, &why);
        doctor_msg_init(&s->out, DOCTOR_MSG_HELLO, 1);
        s->out.status = st;
        snprintf(s->out.text, sizeof s->out.text, "%.*s", (int)sizeof s->out.text - 1, why.msg);
        s->out.has_rdma = s->vb != NULL;
        host_id(s->out.host);
        td_status sent =
            st == TD_OK || st == TD_ERR_UNSUPPORTED
                ? doctor_msg_send(fd, &s->out, td_deadline_after_ms(td_now_ns(), s->o->timeout_ms),
                                  &why)
                : st;
        if (!st && !sent) {
            s->fd = fd;
            return TD_OK;
        }
        close(fd);
        if (n_strangers++ >= STRANGERS_TOLD) continue;
        struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_WARN, "stranger",
                                            "%s: %s; still listening", s->peer, why.msg);
        doctor_fix(c, "a doctor of another build, a port scan or a load balancer's probe: another "
                      "port, or nothing");
        doctor_flush(r);
    }
}

/* One session, and its line. False: nobody came. */
static bool listen_once(struct session *s, int listener, uint16_t port, struct doctor_report *r)
{
    struct td_err err = {0};
    td_status st = accept_session(
        listener, s, td_deadline_after_ms(td_now_ns(), s->o->listen_timeout_ms), r, &err);
    if (st) {
        struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_FAIL, "listen", "%s", err.msg);
        doctor_fix(
            c,
            "tandem doctor --peer THIS-HOST:%u on the other machine; a firewall may be in between",
            port);
        return false;
    }
    st = serve(s, &err);
    struct doctor_check *c = doctor_add(
        r, GROUP, st ? DOCTOR_FAIL : DOCTOR_OK, "session",
        "with %s: %llu transfers verified, %s%s%s", s->peer, (unsigned long long)s->n_verified,
        td_size_text(s->bytes_verified).s, st ? "; ended by: " : "", st ? err.msg : "");
    doctor_fix(c, "the other doctor's lines say more");
    doctor_number(c, "transfers", (double)s->n_verified);
    doctor_number(c, "bytes", (double)s->bytes_verified);
    doctor_flush(r);
    return true;
}

void doctor_listen(struct doctor_report *r, const struct doctor_config *o,
                   const struct td_verbs *vb)
{
    static struct session s;
    struct td_err err = {0};
    int listener = -1;
    uint16_t port;
    char host[64];
    td_status st = doctor_socket(
        o->listen, 1, td_deadline_after_ms(td_now_ns(), o->listen_timeout_ms), &listener, &err);
    if (!st) st = doctor_socket_name(listener, 0, host, &port, &err);
    if (st) {
        struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_FAIL, "listen", "%s", err.msg);
        doctor_fix(c, "--listen HOST:PORT with an address of this machine and a free port");
    } else {
        fprintf(r->out, strchr(host, ':') ? "listening at [%s]:%u\n" : "listening at %s:%u\n", host,
                port);
        fflush(r->out);
    }
    for (uint64_t i = 0; !st && i < o->sessions; i++) {
        s = (struct session){.fd = -1, .o = o, .vb = vb};
        bool came = listen_once(&s, listener, port, r);
        end_close(&s.end);
        if (s.fd >= 0) close(s.fd);
        if (!came) break;
    }
    if (listener >= 0) close(listener);
}

/* ---- leader ---------------------------------------------------------------------------------- */

struct lead {
    struct doctor_report *r;
    const struct doctor_config *o;
    const struct td_verbs *vb;
    int fd;
    struct end end;
    struct doctor_msg q, a; /* question and answer */
    char peer[300];         /* its address, as asked for */
    bool many;              /* there are several peers, so lines are named after them */
    char host[64];
    /* broken: the connection failed, so nothing more can be asked */
    bool same_host, rdma_here, rdma_there, broken;
    uint64_t seed;
    enum td_xfer_path used; /* by the last verified transfer */
};

/* Sends q and receives the answer in a. A refusal is returned as its status and text. */
static td_status ask(struct lead *l, uint64_t extra_ms, struct td_err *err)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), l->o->timeout_ms + extra_ms);
    td_status s = doctor_msg_send(l->fd, &l->q, until, err);
    if (!s) s = doctor_msg_recv(l->fd, &l->a, until, err);
    if (!s) s = doctor_msg_check(&l->a, 0, err);
    if (!s && (!l->a.answer || l->a.type != l->q.type))
        s = td_fail(err, TD_ERR_CORRUPT, "answer %u to question %u", l->a.type, l->q.type);
    if (s) {
        l->broken = true;
        return s;
    }
    return l->a.status ? td_fail(err, (td_status)l->a.status, "%s", l->a.text) : TD_OK;
}

static td_status open_both(struct lead *l, enum td_xfer_path path, uint64_t block_bytes,
                           uint32_t n_blocks, struct td_err *err)
{
    end_close(&l->end);
    doctor_msg_init(&l->q, DOCTOR_MSG_OPEN, 0);
    l->q.path = (uint8_t)path;
    l->q.block_bytes = block_bytes;
    l->q.n_blocks = n_blocks;
    td_status s = ask(l, 5000, err);
    return s ? s : end_open(&l->end, l->o, l->vb, path, l->host, block_bytes, n_blocks, err);
}

struct grant {
    uint8_t blob[DOCTOR_BLOB_MAX];
    size_t blob_bytes;
    uint32_t slot, op, first, n;
    uint64_t seed;
};

static td_status get_grant(struct lead *l, uint32_t first, uint32_t n, struct grant *g,
                           struct td_err *err)
{
    doctor_msg_init(&l->q, DOCTOR_MSG_GRANT, 0);
    l->q.first = first;
    l->q.n = n;
    td_status s = ask(l, 0, err);
    if (s) return s;
    memcpy(g->blob, l->a.blob, l->a.blob_bytes);
    g->blob_bytes = l->a.blob_bytes;
    g->slot = l->a.slot;
    g->first = first;
    g->n = n;
    g->seed = l->seed += 0x632be59bd9b4e019ull;
    fill(&l->end, first, n, g->seed);
    return TD_OK;
}

static td_status verify(struct lead *l, const struct grant *g, struct td_err *err)
{
    doctor_msg_init(&l->q, DOCTOR_MSG_VERIFY, 0);
    l->q.first = g->first;
    l->q.n = g->n;
    l->q.slot = g->slot;
    l->q.seed = g->seed;
    td_status s = ask(l, 20000, err);
    if (!s) l->used = (enum td_xfer_path)l->a.path;
    return s;
}

/* Sends to all grants at once; *ret_s: seconds from the first op_start to the last OP_DONE. */
static td_status send_grants(struct lead *l, struct grant *g, size_t n_grants, double *ret_s,
                             struct td_err *err)
{
    static int32_t ids[TD_XFER_MAX_BLOCKS];
    uint64_t bytes = 0, t0 = td_now_ns();
    struct td_xfer_event ev;
    for (size_t i = 0; i < n_grants; i++) bytes += g[i].n * l->end.block_bytes;
    /* 10 MB/s: slower than any network that KV should take */
    uint64_t until = td_deadline_after_ms(t0, l->o->timeout_ms + bytes / 10000);
    for (size_t i = 0; i < n_grants; i++) {
        int32_t n_blocks = 0;
        for (uint32_t b = 0; b < g[i].n; b++) ids[b] = (int32_t)(g[i].first + b);
        td_status s = td_xfer_op_start(l->end.x, g[i].blob, g[i].blob_bytes, until, i, &g[i].op,
                                       &n_blocks, err);
        if (!s && n_blocks != (int32_t)g[i].n)
            s = td_fail(err, TD_ERR_CORRUPT, "the grant is for %d blocks, %u were asked for",
                        n_blocks, g[i].n);
        if (s) return s;
        s = td_xfer_submit(l->end.x, g[i].op, 0, ids, n_blocks, true, NULL, 0);
        if (s == TD_ERR_INVALID || s == TD_ERR_NOT_FOUND)
            return td_fail(err, s, "submit: %s", td_status_name(s));
        /* Any other status means that the op has failed since it began: its event, below, gives the
         * reason. */
    }
    for (size_t i = 0; i < n_grants; i++) {
        td_status s = end_event(&l->end, TD_XFER_OP_DONE, TD_XFER_OP_FAILED, g[i].op,
                                until + TD_NS_PER_S, &ev, err);
        if (s) return s;
        if (ev.kind == TD_XFER_OP_FAILED)
            return td_fail(err, ev.status ? ev.status : TD_ERR_PEER, "%s", ev.reason);
    }
    *ret_s = (double)(td_now_ns() - t0) / 1e9;
    return TD_OK;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct figures {
    double small_us, small_min_us, small_max_us, many_gbps, whole_gbps;
    uint64_t whole_bytes;
    size_t n_small;
    enum td_xfer_path used;
};

/* n transfers of one small block, one after the other. */
static td_status measure_small(struct lead *l, enum td_xfer_path path, size_t n, struct figures *f,
                               struct td_err *err)
{
    static struct grant g;
    double us[N_SMALL];
    td_status s = open_both(l, path, SMALL_BYTES, 64, err);
    uint64_t enough = td_deadline_after_ms(td_now_ns(), 2000);
    for (size_t i = 0; !s && i < N_WARM + n && (td_now_ns() < enough || i <= N_WARM); i++) {
        double seconds = 0;
        s = get_grant(l, (uint32_t)i % 64, 1, &g, err);
        if (!s) s = send_grants(l, &g, 1, &seconds, err);
        if (!s) s = verify(l, &g, err);
        if (s) break;
        f->used = l->used;
        const char *wrong = doctor_path_verdict(path, l->used);
        if (wrong) return td_fail(err, TD_ERR_UNSUPPORTED, "%s", wrong);
        if (i >= N_WARM) us[f->n_small++] = seconds * 1e6;
    }
    if (s) return s;
    qsort(us, f->n_small, sizeof *us, by_value);
    f->small_us = us[f->n_small / 2];
    f->small_min_us = us[0];
    f->small_max_us = us[f->n_small - 1];
    return TD_OK;
}

static td_status measure_large(struct lead *l, enum td_xfer_path path, struct figures *f,
                               struct td_err *err)
{
    static struct grant g[DOCTOR_SLOTS];
    uint32_t n_blocks = (uint32_t)(l->o->bytes / LARGE_BYTES),
             n_many = n_blocks < DOCTOR_SLOTS ? n_blocks : DOCTOR_SLOTS;
    double seconds = 0, best[N_WHOLE];
    td_status s = open_both(l, path, LARGE_BYTES, n_blocks, err);
    for (int round = 0; !s && round < 2; round++) { /* the first warms up: connections, page
                                                       tables */
        for (uint32_t i = 0; !s && i < n_many; i++) s = get_grant(l, i, 1, &g[i], err);
        if (!s) s = send_grants(l, g, n_many, &seconds, err);
        for (uint32_t i = 0; !s && i < n_many; i++) s = verify(l, &g[i], err);
        if (!s && round > 0) f->many_gbps = (double)n_many * LARGE_BYTES / seconds / 1e9;
    }
    if (s) return s;
    double can = f->many_gbps * 1e9 * WHOLE_S / LARGE_BYTES;
    if (can < n_blocks) n_blocks = can < 1 ? 1 : (uint32_t)can;
    f->whole_bytes = (uint64_t)n_blocks * LARGE_BYTES;
    size_t n = 0;
    uint64_t enough = td_deadline_after_ms(td_now_ns(), 6000);
    for (; !s && n < N_WHOLE && (n == 0 || td_now_ns() < enough); n++) {
        s = get_grant(l, 0, n_blocks, g, err);
        if (!s) s = send_grants(l, g, 1, &seconds, err);
        if (!s) s = verify(l, g, err);
        if (!s) best[n] = seconds;
    }
    if (s) return s;
    qsort(best, n, sizeof *best, by_value);
    f->whole_gbps = (double)f->whole_bytes / best[n / 2] / 1e9;
    f->used = l->used;
    const char *wrong = doctor_path_verdict(path, l->used);
    return wrong ? td_fail(err, TD_ERR_UNSUPPORTED, "%s", wrong) : TD_OK;
}

/* Says which part of the way is encrypted, for the report. */
static const char *tls_words(const struct lead *l, enum td_xfer_path used)
{
    return !l->end.over_tls || td_xfer_path_is_local(used) ? ""
           : td_xfer_path_needs_verbs(used)                ? " (set up over TLS, KV in the clear)"
                                                           : " over TLS";
}

static void advise(const struct lead *l, struct doctor_check *c, enum td_xfer_path path)
{
    bool is_local = td_xfer_path_is_local(path);
    if (l->broken)
        doctor_fix(c, "see what the other doctor says");
    else if (is_local && !l->same_host)
        doctor_fix(c, "shm needs both sides in one kernel, network namespace and user; between "
                      "hosts use rdma or tcp");
    else if (l->end.over_tls || l->o->at.tls_ca[0])
        doctor_fix(c, "both doctors, as all workers, need --tls-cert, --tls-key and --tls-ca, with "
                      "certificates that hold the other's --kv-tls-peer-name; a firewall must let "
                      "TCP to the listener's data port "
                      "through (--transfer-port there pins it)");
    else if (!is_local && !td_xfer_path_needs_verbs(path))
        doctor_fix(c,
                   "data ports are chosen by the system, or by --transfer-port there: a firewall "
                   "between the two must let TCP to %s's ports through; with "
                   "TLS there (--tls-cert, --tls-key, --tls-ca) it is needed here, too",
                   l->peer);
    else
        doctor_fix(c, "see the checks of this host and run tandem doctor on the other one");
}

/* A line's name: the path's; with several peers it follows the peer's address. */
static const char *row_name(const struct lead *l, const char *name)
{
    static char text[320];
    snprintf(text, sizeof text, "%s%s%s", l->many ? l->peer : "", l->many ? " " : "", name);
    return text;
}

static void full_row(struct lead *l, enum td_xfer_path path)
{
    struct figures f = {0};
    struct td_err err = {0};
    const char *name = row_name(l, td_xfer_path_name(path));
    td_status s = measure_small(l, path, N_SMALL, &f, &err);
    if (!s) s = measure_large(l, path, &f, &err);
    if (s) {
        struct doctor_check *c = doctor_add(l->r, GROUP, DOCTOR_FAIL, name, "%s", err.msg);
        advise(l, c, path);
        return;
    }
    struct doctor_check *c = doctor_add(
        l->r, GROUP, DOCTOR_OK, name,
        "used %s%s; 4 KiB in %.1f us (median of %zu, %.1f..%.1f), 1 MiB pieces at %.2f "
        "GB/s, %s at %.2f GB/s; every byte verified",
        td_xfer_path_name(f.used), tls_words(l, f.used), f.small_us, f.n_small, f.small_min_us,
        f.small_max_us, f.many_gbps, td_size_text(f.whole_bytes).s, f.whole_gbps);
    doctor_string(c, "peer", l->peer);
    doctor_string(c, "used", td_xfer_path_name(f.used));
    doctor_number(c, "small_us", f.small_us);
    doctor_number(c, "many_gb_per_s", f.many_gbps);
    doctor_number(c, "whole_bytes", (double)f.whole_bytes);
    doctor_number(c, "whole_gb_per_s", f.whole_gbps);
}

/* Reports the path that workers would get by default, with a few transfers. */
static void auto_row(struct lead *l)
{
    struct figures f = {0};
    struct td_err err = {0};
    if (measure_small(l, TD_XFER_PATH_AUTO, 5, &f, &err)) {
        struct doctor_check *c =
            doctor_add(l->r, GROUP, DOCTOR_FAIL, row_name(l, "auto"), "%s", err.msg);
        advise(l, c, TD_XFER_PATH_TCP);
        return;
    }
    bool rdma_missed =
        !l->same_host && l->rdma_here && l->rdma_there && !td_xfer_path_needs_verbs(f.used);
    bool shm_missed = l->same_host && !td_xfer_path_is_local(f.used);
    struct doctor_check *c =
        doctor_add(l->r, GROUP, rdma_missed || shm_missed ? DOCTOR_WARN : DOCTOR_OK,
                   row_name(l, "auto"), "workers of these two hosts use %s%s",
                   td_xfer_path_name(f.used), rdma_missed ? ", though both have RDMA devices" : "");
    doctor_fix(c,
               "--transfer %s asks for the faster path and refuses to fall back; its line below "
               "says what is wrong",
               shm_missed ? "shm" : "rdma");
    doctor_string(c, "used", td_xfer_path_name(f.used));
}

static void lead_rows(struct lead *l)
{
    bool any = !strcmp(l->o->transfer, "auto");
    if (any) auto_row(l);
    for (int i = TD_XFER_PATH_AUTO + 1; i < TD_XFER_N_PATHS && !l->broken; i++) {
        enum td_xfer_path path = (enum td_xfer_path)i;
        const char *name = td_xfer_path_name(path);
        doctor_flush(l->r);
        if (!any && strcmp(l->o->transfer, name)) continue;
        if (td_xfer_path_needs_device(path)) {
            if (!any)
                doctor_add(l->r, GROUP, DOCTOR_FAIL, row_name(l, name),
                           "doctor's pools are the host's: `tandem bench xfer --device cuda` tries "
                           "this path between GPU pools");
            continue;
        }
        if (any && td_xfer_path_is_local(path) && !l->same_host)
            doctor_add(l->r, GROUP, DOCTOR_OK, row_name(l, name),
                       "not tried: the two sides share no kernel, network namespace and user");
        else if (any && td_xfer_path_needs_verbs(path) && (!l->rdma_here || !l->rdma_there))
            doctor_add(l->r, GROUP, DOCTOR_OK, row_name(l, name), "not tried: no RDMA device %s",
                       l->rdma_here ? "there" : "here");
        else
            full_row(l, path);
    }
}

static void lead_one(struct doctor_report *r, const struct doctor_config *o,
                     const struct td_verbs *vb, const char *peer, bool many)
{
    static struct lead l;
    struct td_err err = {0};
    uint16_t port;
    uint64_t ours[2], t0 = td_now_ns();
    l = (struct lead){.r = r,
                      .o = o,
                      .fd = -1,
                      .many = many,
                      .rdma_here = vb != NULL,
                      .vb = vb,
                      .seed = td_random_u64()};
    snprintf(l.peer, sizeof l.peer, "%s", peer);
    host_id(ours);
    td_status s = doctor_socket(peer, 0, td_deadline_after_ms(t0, o->timeout_ms), &l.fd, &err);
    if (!s) s = doctor_socket_name(l.fd, 0, l.host, &port, &err);
    if (!s) {
        doctor_msg_init(&l.q, DOCTOR_MSG_HELLO, 0);
        memcpy(l.q.host, ours, sizeof ours);
        l.q.has_rdma = vb != NULL;
        s = ask(&l, 0, &err);
    }
    if (s) {
        struct doctor_check *c =
            doctor_add(r, GROUP, DOCTOR_FAIL, many ? peer : "peer", "%s: %s", peer, err.msg);
        doctor_fix(c, "tandem doctor --listen HOST:PORT on the other machine, and this build "
                      "there; a firewall may be in between");
        goto out;
    }
    l.same_host = l.a.host[0] == ours[0] && l.a.host[1] == ours[1];
    l.rdma_there = l.a.has_rdma != 0;
    doctor_add(r, GROUP, DOCTOR_OK, many ? peer : "peer",
               "%s answers from %s; RDMA devices %s here, %s there", peer,
               l.same_host ? "this host" : "another host, network namespace or user",
               l.rdma_here ? "yes" : "no", l.rdma_there ? "yes" : "no");
    doctor_flush(r);
    lead_rows(&l);
    doctor_msg_init(&l.q, DOCTOR_MSG_BYE, 0);
    if (!l.broken)
        doctor_msg_send(l.fd, &l.q, td_deadline_after_ms(td_now_ns(), o->timeout_ms), &err);
out:
    end_close(&l.end);
    if (l.fd >= 0) close(l.fd);
    doctor_flush(r);
}

/* One peer after the other, because they would take bandwidth from each other. */
void doctor_peer(struct doctor_report *r, const struct doctor_config *o, const struct td_verbs *vb)
{
    char peer[sizeof((struct lead *)NULL)->peer];
    bool many = strchr(o->peer, ',') != NULL;
    for (const char *p = o->peer; *p;) {
        size_t n = strcspn(p, ",");
        snprintf(peer, sizeof peer, "%.*s", (int)n, p);
        if (n) lead_one(r, o, vb, peer, many);
        p += n + (p[n] == ',');
    }
}
