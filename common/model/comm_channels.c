/* comm_channels.c - the collectives among ranks of several hosts: a star of byte streams whose
 * middle is rank 0.
 *
 * A call is one frame up each channel (rank r to rank 0), one frame down, or both:
 *
 *     sum        up: x; rank 0 adds in the order of ranks; down: the sums.   [two ranks: see below]
 *     all_gather, parts  up: mine; down: all  columns, collect  up: the rank's part
 *     barrier    up: empty; down: empty       broadcast, deal   down: what rank 0 says
 *
 * Two ranks send each other their x and both add x of rank 0 and x of rank 1, in this order: the
 * same bits after half the way. With more ranks a mesh would halve the way, too; it would also need
 * a listening port on every rank.
 *
 * A frame is a head of 24 bytes - magic, kind, number of the call, bytes that follow - in the byte
 * order of the machine, little-endian as KV is on the wire. Every rank knows what frame comes next,
 * so whatever differs from that ends the group: kind, number and size are compared before a byte of
 * the body is read, and nothing is ever read beyond what the call has room for. One frame may come
 * at any border between frames: ABORT, whose body is the reason, of at most TD_COMM_REASON_MAX - 1
 * bytes.
 *
 * turn() moves all frames of a call at once, in both directions, without blocking on any one of
 * them. It ends when all are there, when a stream ends or fails, or when nothing has moved for the
 * time limit. The end of a process closes its streams, which the others see at once; of a host that
 * vanishes keepalive tells after some 20 s, or the time limit while bytes to it are under way
 * (TCP_USER_TIMEOUT would also end a rank that lives and does not read yet, because it loads
 * weights). A failed communicator says its reason in an ABORT frame on every channel that is at a
 * border, shuts all down, and answers TD_ERR_PEER from then on. */
#include "common/model/comm_channels.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/clock.h"

#define MAGIC 0x746b6e72u
/* A large sum, or columns, go in rounds: rank 0 has room for one round of every other rank. */
#define ROUND_FLOATS ((size_t)1 << 18)
/* A wait looks at the clock so often. */
#define LOOK_MS 1000
/* A host that answers nothing is gone after QUIET_S + PROBES * PROBE_S. */
enum { QUIET_S = 5, PROBE_S = 5, PROBES = 3 };

enum kind { SUM = 1, GATHER, COLUMNS, BROADCAST, BARRIER, COLLECT, DEAL, ABORT, PARTS };
static const char *const KINDS[] = {"nothing", "sum",     "all_gather", "columns", "broadcast",
                                    "barrier", "collect", "deal",       "abort",   "parts"};

struct frame {
    uint32_t magic, kind;
    uint64_t call, bytes;
};
_Static_assert(sizeof(struct frame) == 24, "a frame's head on the wire");

struct channel {
    struct td_comm_channel io;
    /* of the running call */
    bool sends, receives;
    struct frame tx, rx;
    const uint8_t *out;
    uint8_t *in;
    size_t max_in; /* room at in */
    bool exact;    /* max_in bytes, neither more nor less */
    /* bytes of head and body that went and came */
    size_t n_tx, n_rx;
    bool ended;                    /* the stream: nothing can be sent */
    char told[TD_COMM_REASON_MAX]; /* body of an ABORT */
};

struct comm_channels {
    int32_t rank, n_ranks;
    uint64_t timeout_ns, n_calls;
    struct channel ranks[TD_COMM_MAX_RANKS]; /* rank 0: of the others; others: ranks[0] alone */
    /* rank 0, or either of two: [n_ranks - 1, ROUND_FLOATS], a round of each other rank */
    float *room;
    td_status status; /* of the group: TD_OK, or TD_ERR_PEER for ever */
    td_status cause;  /* what the call that failed returns */
    bool moved;       /* bytes, in this look */
    char reason[TD_COMM_REASON_MAX];
};

/* The other ends of this rank's channels. */
static int32_t first_other(const struct comm_channels *w) { return w->rank == 0 ? 1 : 0; }
static int32_t end_other(const struct comm_channels *w) { return w->rank == 0 ? w->n_ranks : 1; }

/* ---- failure --------------------------------------------------------------------------------- */

static ssize_t channel_send(struct channel *c, const struct iovec *iov, int n_iov)
{
    if (c->io.sendv) return c->io.sendv(c->io.ctx, iov, n_iov);
    struct msghdr m = {.msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = (size_t)n_iov};
    ssize_t n;
    do n = sendmsg(c->io.fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n;
}

static size_t channel_unsent(const struct channel *c)
{
    return c->io.unsent ? c->io.unsent(c->io.ctx) : 0;
}

/* Best effort: what the socket does not take at once is lost, and the stream's end tells enough. */
static void say_abort(struct comm_channels *w, struct channel *c)
{
    bool at_border = c->n_tx == 0 || c->n_tx == sizeof c->tx + c->tx.bytes;
    if (at_border && !c->ended) {
        struct frame head = {
            .magic = MAGIC, .kind = ABORT, .call = w->n_calls, .bytes = strlen(w->reason)};
        struct iovec iov[2] = {{&head, sizeof head}, {w->reason, (size_t)head.bytes}};
        if (channel_send(c, iov, 2) > 0 && c->io.flush) c->io.flush(c->io.ctx);
    }
    shutdown(c->io.fd, SHUT_WR);
    c->ended = true;
}

static td_status fail(struct comm_channels *w, td_status s, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static td_status fail(struct comm_channels *w, td_status s, const char *format, ...)
{
    if (w->status) return TD_ERR_PEER;
    va_list args;
    va_start(args, format);
    vsnprintf(w->reason, sizeof w->reason, format, args);
    va_end(args);
    w->status = TD_ERR_PEER;
    w->cause = s;
    for (int32_t r = first_other(w); r < end_other(w); r++) say_abort(w, &w->ranks[r]);
    return s;
}

void comm_channels_abort(struct comm_channels *w, const char *reason)
{
    fail(w, TD_ERR_PEER, "%s", reason);
}

const char *comm_channels_reason(const struct comm_channels *w, char *buf)
{
    snprintf(buf, TD_COMM_REASON_MAX, "%s", w->reason);
    return buf;
}

/* Another rank gave up. Its words go on to other ranks and into logs: no control characters. */
static td_status told_abort(struct comm_channels *w, struct channel *c)
{
    c->told[c->rx.bytes] = 0;
    for (char *t = c->told; *t; t++)
        if ((unsigned char)*t < ' ' || *t == 127) *t = '?';
    c->ended = true;
    return fail(w, TD_ERR_PEER, "%s", c->told[0] ? c->told : "another rank gave up");
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* As recv(2); 0 and errors other than EAGAIN end the group. */
static ssize_t receive(struct comm_channels *w, int32_t r, void *buf, size_t n)
{
    struct channel *c = &w->ranks[r];
    ssize_t got;
    do got = c->io.recv ? c->io.recv(c->io.ctx, buf, n) : recv(c->io.fd, buf, n, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got > 0) {
        c->n_rx += (size_t)got;
        w->moved = true;
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        c->ended = true;
        fail(w, TD_ERR_PEER, "rank %d (%s) is gone: %s", r, c->io.name,
             got == 0 ? "its connection ended" : strerror(errno));
    }
    return got;
}

/* Reads on towards a whole head, and the body of an ABORT. False: nothing to look at yet, or it is
 * over. */
static bool pull_head(struct comm_channels *w, int32_t r)
{
    struct channel *c = &w->ranks[r];
    while (c->n_rx < sizeof c->rx)
        if (receive(w, r, (uint8_t *)&c->rx + c->n_rx, sizeof c->rx - c->n_rx) <= 0) return false;
    if (c->rx.magic != MAGIC) {
        fail(w, TD_ERR_PEER, "rank %d (%s) sent %08x where a frame begins: it is no rank", r,
             c->io.name, c->rx.magic);
        return false;
    }
    if (c->rx.kind != ABORT) return true;
    if (c->rx.bytes >= sizeof c->told) {
        fail(w, TD_ERR_PEER, "rank %d (%s) gave up with %llu bytes of reason, limit %zu", r,
             c->io.name, (unsigned long long)c->rx.bytes, sizeof c->told - 1);
        return false;
    }
    while (c->n_rx < sizeof c->rx + c->rx.bytes)
        if (receive(w, r, c->told + (c->n_rx - sizeof c->rx),
                    sizeof c->rx + (size_t)c->rx.bytes - c->n_rx) <= 0)
            return false;
    told_abort(w, c);
    return false;
}

/* Is the frame that begins the one of this call? */
static bool fits(struct comm_channels *w, int32_t r, enum kind kind)
{
    struct channel *c = &w->ranks[r];
    bool size = c->exact ? c->rx.bytes == c->max_in : c->rx.bytes <= c->max_in;
    if (c->rx.kind == kind && c->rx.call == w->n_calls && size) return true;
    const char *other = c->rx.kind <= PARTS ? KINDS[c->rx.kind] : "unknown";
    fail(w, TD_ERR_INTERNAL,
         "rank %d (%s) sent %s %llu of %llu bytes, rank %d is in %s %llu with room for %zu", r,
         c->io.name, other, (unsigned long long)c->rx.call, (unsigned long long)c->rx.bytes,
         w->rank, KINDS[kind], (unsigned long long)w->n_calls, c->max_in);
    return false;
}

static void pull(struct comm_channels *w, int32_t r, enum kind kind)
{
    struct channel *c = &w->ranks[r];
    if (!pull_head(w, r) || !fits(w, r, kind)) return;
    while (c->n_rx < sizeof c->rx + c->rx.bytes)
        if (receive(w, r, c->in + (c->n_rx - sizeof c->rx),
                    sizeof c->rx + (size_t)c->rx.bytes - c->n_rx) <= 0)
            return;
    c->receives = false;
    c->n_rx = 0;
}

static void push(struct comm_channels *w, int32_t r)
{
    struct channel *c = &w->ranks[r];
    size_t all = sizeof c->tx + c->tx.bytes;
    while (c->n_tx < all) {
        size_t of_head = c->n_tx < sizeof c->tx ? sizeof c->tx - c->n_tx : 0,
               of_body = c->n_tx > sizeof c->tx ? c->n_tx - sizeof c->tx : 0;
        struct iovec iov[2] = {{(uint8_t *)&c->tx + (sizeof c->tx - of_head), of_head},
                               {(uint8_t *)(uintptr_t)c->out + of_body, c->tx.bytes - of_body}};
        ssize_t n =
            of_head ? channel_send(c, iov, c->tx.bytes ? 2 : 1) : channel_send(c, iov + 1, 1);
        if (n < 0) break;
        c->n_tx += (size_t)n;
        w->moved = true;
    }
    bool blocked = c->n_tx < all && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (c->n_tx == all && channel_unsent(c) && c->io.flush(c->io.ctx))
        blocked = errno == EAGAIN || errno == EWOULDBLOCK;
    if (c->n_tx == all && !channel_unsent(c)) {
        c->sends = false;
    } else if (!blocked) {
        /* its last words, if there are any, say more than the error of a send */
        int e = errno;
        c->ended = true;
        if (c->n_rx < sizeof c->rx || c->rx.kind == ABORT) pull_head(w, r);
        fail(w, TD_ERR_PEER, "rank %d (%s) is gone: %s", r, c->io.name, strerror(e));
    }
}

static void wait_for_any(struct comm_channels *w, uint64_t left_ns)
{
    struct pollfd fds[TD_COMM_MAX_RANKS];
    nfds_t n = 0;
    uint64_t ms = left_ns / TD_NS_PER_MS + 1;
    for (int32_t r = first_other(w); r < end_other(w); r++) {
        const struct channel *c = &w->ranks[r];
        short events = (short)((c->receives ? POLLIN : 0) | (c->sends ? POLLOUT : 0));
        if (!events) continue;
        if (c->receives && c->io.pending && c->io.pending(c->io.ctx)) return;
        fds[n++] = (struct pollfd){.fd = c->io.fd, .events = events};
    }
    poll(fds, n, (int)(ms < LOOK_MS ? ms : LOOK_MS));
}

static td_status late(struct comm_channels *w, enum kind kind)
{
    char who[TD_COMM_REASON_MAX / 2];
    size_t n = 0;
    for (int32_t r = first_other(w); r < end_other(w) && n < sizeof who; r++)
        if (w->ranks[r].receives || w->ranks[r].sends)
            n += (size_t)snprintf(who + n, sizeof who - n, " rank %d (%s)", r, w->ranks[r].io.name);
    return fail(w, TD_ERR_PEER, "after %llu ms rank %d still waits for%s in %s %llu",
                (unsigned long long)(w->timeout_ns / TD_NS_PER_MS), w->rank, who, KINDS[kind],
                (unsigned long long)w->n_calls);
}

/* Moves the frames that were set up by send_to and receive_from. idle: for as long as nothing has
 * come. */
static td_status turn(struct comm_channels *w, enum kind kind, bool idle)
{
    uint64_t last = td_now_ns();
    if (w->status) return TD_ERR_PEER;
    for (;;) {
        bool done = true;
        w->moved = false;
        for (int32_t r = first_other(w); r < end_other(w) && !w->status; r++) {
            struct channel *c = &w->ranks[r];
            if (c->sends) push(w, r);
            if (c->receives && !w->status) pull(w, r, kind);
            done = done && !c->sends && !c->receives;
        }
        if (w->status) return w->cause;
        if (done) return TD_OK;
        uint64_t now = td_now_ns();
        if (w->moved) {
            last = now;
            idle = false;
        }
        if (!idle && now - last > w->timeout_ns) return late(w, kind);
        wait_for_any(w, idle ? w->timeout_ns : last + w->timeout_ns - now);
    }
}

static void send_to(struct comm_channels *w, int32_t r, enum kind kind, const void *out, size_t n)
{
    struct channel *c = &w->ranks[r];
    c->tx = (struct frame){.magic = MAGIC, .kind = kind, .call = w->n_calls, .bytes = n};
    c->out = out;
    c->n_tx = 0;
    c->sends = true;
}

static void receive_from(struct comm_channels *w, int32_t r, void *in, size_t max, bool exact)
{
    struct channel *c = &w->ranks[r]; /* n_rx stays: td_comm_check may have the head already */
    c->in = in;
    c->max_in = max;
    c->exact = exact;
    c->receives = true;
}

/* Another rank than 0: mine up (NULL: nothing), its answer down (NULL: none). */
static td_status ask(struct comm_channels *w, enum kind kind, const void *mine, size_t n, void *in,
                     size_t n_in)
{
    send_to(w, 0, kind, mine, n);
    if (in) receive_from(w, 0, in, n_in, true);
    return turn(w, kind, false);
}

/* Rank 0: the same bytes down to all. */
static td_status answer(struct comm_channels *w, enum kind kind, const void *data, size_t n)
{
    for (int32_t r = 1; r < w->n_ranks; r++) send_to(w, r, kind, data, n);
    return turn(w, kind, false);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* How many of n numbers go in the round that begins with number `at`. */
static size_t in_round(size_t at, size_t n)
{
    return at >= n ? 0 : n - at < ROUND_FLOATS ? n - at : ROUND_FLOATS;
}

static float *room_of(struct comm_channels *w, int32_t r)
{
    return w->room + (size_t)(r - 1) * ROUND_FLOATS;
}

static void add(float *restrict sum, const float *restrict x, size_t n)
{
    for (size_t i = 0; i < n; i++) sum[i] += x[i];
}

static td_status sum_of_two(struct comm_channels *w, float *x, size_t n)
{
    int32_t other = first_other(w);
    float *theirs = w->room;
    send_to(w, other, SUM, x, n * sizeof *x);
    receive_from(w, other, theirs, n * sizeof *x, true);
    td_status s = turn(w, SUM, false);
    if (s) return s;
    if (w->rank == 0) {
        add(x, theirs, n);
    } else {
        add(theirs, x, n);
        memcpy(x, theirs, n * sizeof *x);
    }
    return TD_OK;
}

static td_status sum_as_middle(struct comm_channels *w, float *x, size_t n)
{
    for (int32_t r = 1; r < w->n_ranks; r++) receive_from(w, r, room_of(w, r), n * sizeof *x, true);
    td_status s = turn(w, SUM, false);
    for (int32_t r = 1; r < w->n_ranks && !s; r++) add(x, room_of(w, r), n);
    return s ? s : answer(w, SUM, x, n * sizeof *x);
}

td_status comm_channels_sum(struct comm_channels *w, float *x, size_t n)
{
    td_status s = TD_OK;
    if (w->status) return TD_ERR_PEER;
    for (size_t at = 0; at < n && !s; at += ROUND_FLOATS) {
        size_t m = in_round(at, n);
        if (w->n_ranks == 2)
            s = sum_of_two(w, x + at, m);
        else if (w->rank == 0)
            s = sum_as_middle(w, x + at, m);
        else /* rank 0 answers when it has all of x: the sums may take its place */
            s = ask(w, SUM, x + at, m * sizeof *x, x + at, m * sizeof *x);
        w->n_calls++;
    }
    return s;
}

td_status comm_channels_all_gather(struct comm_channels *w, const void *mine, size_t bytes,
                                   void *all)
{
    td_status s;
    size_t total = bytes * (size_t)w->n_ranks;
    if (w->rank > 0) {
        s = ask(w, GATHER, mine, bytes, all, total);
    } else {
        memcpy(all, mine, bytes);
        for (int32_t r = 1; r < w->n_ranks; r++)
            receive_from(w, r, (uint8_t *)all + (size_t)r * bytes, bytes, true);
        s = turn(w, GATHER, false);
        if (!s) s = answer(w, GATHER, all, total);
    }
    w->n_calls++;
    return s;
}

td_status comm_channels_parts(struct comm_channels *w, float *all, const size_t *first)
{
    size_t total = first[w->n_ranks] * sizeof *all;
    td_status s;
    if (w->status) return TD_ERR_PEER;
    if (w->rank > 0) { /* rank 0 answers when it has this rank's part: all may be overwritten */
        size_t n = first[w->rank + 1] - first[w->rank];
        s = ask(w, PARTS, all + first[w->rank], n * sizeof *all, all, total);
    } else {
        for (int32_t r = 1; r < w->n_ranks; r++)
            receive_from(w, r, all + first[r], (first[r + 1] - first[r]) * sizeof *all, true);
        s = turn(w, PARTS, false);
        if (!s) s = answer(w, PARTS, all, total);
    }
    w->n_calls++;
    return s;
}

/* In rounds of ROUND_FLOATS of a rank's columns, wherever in a row that ends. A rank that has fewer
 * than the others is silent in the last rounds, which all ranks compute from `first`. */
td_status comm_channels_columns(struct comm_channels *w, const float *mine, int32_t n_rows,
                                const int32_t *first, float *out)
{
    size_t width[TD_COMM_MAX_RANKS], n[TD_COMM_MAX_RANKS], most = 0;
    td_status s = TD_OK;
    if (w->status) return TD_ERR_PEER;
    for (int32_t r = 1; r < w->n_ranks; r++) {
        width[r] = (size_t)(first[r + 1] - first[r]);
        n[r] = width[r] * (size_t)n_rows;
        if (n[r] > most) most = n[r];
    }
    for (size_t at = 0; at < most && !s; at += ROUND_FLOATS) {
        if (w->rank > 0) {
            size_t m = in_round(at, n[w->rank]);
            if (m) s = ask(w, COLUMNS, mine + at, m * sizeof *mine, NULL, 0);
        } else {
            for (int32_t r = 1; r < w->n_ranks; r++)
                if (in_round(at, n[r]))
                    receive_from(w, r, room_of(w, r), in_round(at, n[r]) * sizeof *out, true);
            s = turn(w, COLUMNS, false);
            for (int32_t r = 1; r < w->n_ranks && !s; r++)
                comm_place_columns(room_of(w, r), at, in_round(at, n[r]), width[r], out,
                                   (size_t)first[r], (size_t)first[w->n_ranks]);
        }
        w->n_calls++;
    }
    return s;
}

td_status comm_channels_broadcast(struct comm_channels *w, void *data, size_t *bytes, bool idle)
{
    td_status s;
    if (w->rank == 0) {
        s = answer(w, BROADCAST, data, *bytes);
    } else {
        receive_from(w, 0, data, *bytes, false);
        s = turn(w, BROADCAST, idle);
        if (!s) *bytes = (size_t)w->ranks[0].rx.bytes;
    }
    w->n_calls++;
    return s;
}

td_status comm_channels_barrier(struct comm_channels *w)
{
    td_status s;
    uint8_t nothing = 0;
    if (w->rank > 0) {
        s = ask(w, BARRIER, NULL, 0, &nothing, 0);
    } else {
        for (int32_t r = 1; r < w->n_ranks; r++) receive_from(w, r, NULL, 0, true);
        s = turn(w, BARRIER, false);
        if (!s) s = answer(w, BARRIER, NULL, 0);
    }
    w->n_calls++;
    return s;
}

td_status comm_channels_collect(struct comm_channels *w, const void *mine, const size_t *bytes,
                                uint8_t *const *at)
{
    td_status s = TD_OK;
    if (w->rank > 0) {
        if (bytes[w->rank]) s = ask(w, COLLECT, mine, bytes[w->rank], NULL, 0);
    } else {
        for (int32_t r = 1; r < w->n_ranks; r++)
            if (bytes[r]) receive_from(w, r, at[r], bytes[r], true);
        s = turn(w, COLLECT, false);
    }
    w->n_calls++;
    return s;
}

td_status comm_channels_deal(struct comm_channels *w, const uint8_t *const *at, const size_t *bytes,
                             void *mine)
{
    if (w->rank > 0) {
        if (bytes[w->rank]) receive_from(w, 0, mine, bytes[w->rank], true);
    } else {
        for (int32_t r = 1; r < w->n_ranks; r++)
            if (bytes[r]) send_to(w, r, DEAL, at[r], bytes[r]);
    }
    td_status s = turn(w, DEAL, false);
    w->n_calls++;
    return s;
}

/* A head that has come stays for the call whose it is. */
td_status comm_channels_check(struct comm_channels *w)
{
    for (int32_t r = first_other(w); r < end_other(w) && !w->status; r++) pull_head(w, r);
    return w->status;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Of a socket that is no TCP socket nothing of this is true, nor needed. */
void td_comm_watch_host(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {{SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_NODELAY, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, QUIET_S},
                   {IPPROTO_TCP, TCP_KEEPINTVL, PROBE_S},
                   {IPPROTO_TCP, TCP_KEEPCNT, PROBES}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

td_status comm_channels_open(const struct td_comm_channel *channels, int32_t n_ranks, int32_t rank,
                             struct comm_channels **ret, struct td_err *err)
{
    struct comm_channels *w = calloc(1, sizeof *w);
    if (!w) return td_fail(err, TD_ERR_NOMEM, "ranks: no memory");
    w->rank = rank;
    w->n_ranks = n_ranks;
    if (rank == 0 || n_ranks == 2) {
        /* here, because a step must not fail for want of memory */
        size_t bytes = (size_t)(n_ranks - 1) * ROUND_FLOATS * sizeof *w->room;
        w->room = malloc(bytes);
        if (!w->room) {
            free(w);
            return td_fail(err, TD_ERR_NOMEM, "ranks: no memory for %zu bytes of %d other ranks",
                           bytes, n_ranks - 1);
        }
    }
    for (int32_t r = first_other(w); r < end_other(w); r++) {
        w->ranks[r].io = channels[r];
        td_comm_watch_host(channels[r].fd);
    }
    *ret = w;
    return TD_OK;
}

void comm_channels_set_timeout(struct comm_channels *w, uint64_t timeout_ns)
{
    w->timeout_ns = timeout_ns;
}

void comm_channels_close(struct comm_channels *w)
{
    if (!w) return;
    for (int32_t r = first_other(w); r < end_other(w); r++) {
        struct td_comm_channel *io = &w->ranks[r].io;
        if (io->close)
            io->close(io->ctx);
        else
            close(io->fd);
    }
    free(w->room);
    free(w);
}
