/* accept.c - accept4, recvmsg and close in front of core: connections counted, refused, ended, and
 * closed.
 *
 * Core does not report that a connection has ended. So a record is kept for each descriptor given
 * to core, with the kernel's cookie of its socket: the connection is over when the descriptor has
 * another cookie, or none. The records are checked when a limit is about to refuse a client (at
 * most every SWEEP_MS) and when statistics are asked for. A refusal can therefore come up to
 * SWEEP_MS after the end of the connection that made room.
 *
 * One mutex guards everything. accept4 holds it for its bookkeeping and not while it waits (core's
 * listeners never wait). */
#include "common/rpc/accept.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/rpc/linger.h"
#include "common/rpc/peers.h"
#include "common/rpc/rpc_internal.h"

enum {
    SWEEP_MS = 100,
    /* Connections refused in one call of accept4. Then core goes back to its other sockets; the
     * next connection wakes it again. */
    MAX_REFUSED_AT_ONCE = 256,
};

struct conn {
    struct td_rpc_guard *guard; /* NULL = none */
    struct td_rpc_peer *peer;   /* NULL = on a unix socket */
    uint64_t cookie;
    int epoll_fd; /* whose set core has put it into; -1 = none */
    struct td_rpc_reader reader;
    uint64_t handshake_ns; /* when an unfinished TLS handshake was accepted; 0 = done, or no TLS */
    struct conn *older,
        *newer; /* list of the guard's handshakes; valid while handshake_ns is set */
    struct td_rpc_records records;
};

/* Handshakes that may begin: a token bucket. */
struct bucket {
    double left;
    uint64_t at_ns; /* 0 = never used: full */
};

struct td_rpc_guard {
    struct td_rpc_guard *next;
    uint64_t id; /* never used again: readers of TLS may outlive the guard */
    int port;
    char unix_path[sizeof((struct sockaddr_un *)0)->sun_path];
    bool use_tls;
    uint32_t max_connections, max_peer_connections, max_unacked_streams;
    uint32_t max_handshakes, max_peer_handshakes;
    double handshakes_per_s, peer_handshakes_per_s; /* 0 = no bound */
    struct conn *oldest, *newest;                   /* handshakes in progress */
    struct bucket handshakes;
    /* By a hash of the address, with the process's seed. A client that has gone leaves an empty
     * bucket behind, and no address needs memory of its own. Addresses of one hash share a
     * bucket. */
    struct bucket peer_handshakes[TD_RPC_PEER_BUCKETS];
    bool hides_streams;
    uint64_t n_streams; /* begun, and not hidden */
    uint64_t swept_ns, told_ns;
    struct td_rpc_guard_stats stats;
};

static void reader_end(struct td_rpc_reader *reader, const char *why);

static pthread_mutex_t g_mu = PTHREAD_MUTEX_INITIALIZER;
static struct td_rpc_guard *g_guards; /* all: under g_mu */
static atomic_uint g_n_guards;        /* lets a process without guarded listeners skip all checks */
static atomic_uint g_n_away;          /* guards that hide streams: their connections linger */
static struct conn **g_conns;         /* by descriptor; NULL = never had one */
static size_t g_n_conns;
static struct td_rpc_peers g_peers;
static int g_reserve_fd = -1;
/* Readers inside a large header block, or ended there and not yet closed by core; NULL = free. */
static struct td_rpc_reader *g_large[TD_RPC_LARGE_BLOCKS + TD_RPC_LARGE_ENDED];
static uint64_t g_last_guard_id, g_ended_told_ns;
/* Of TLS readers whose guard is unknown: the largest bound of all guards, the connections that were
 * ended, and the streams that began. */
static uint32_t g_max_unacked_streams;
static uint64_t g_n_ended, g_n_unknown_streams;

/* What tells one socket from all others that have had its descriptor; 0 = no socket. Kernels
 * without cookies (before 4.12, qemu's emulation of one) number their sockets' inodes. errno stays:
 * core looks at that of connect(2) after an epoll_ctl(2) that has succeeded. */
static uint64_t socket_cookie(int fd)
{
    int saved = errno;
    uint64_t cookie = 0;
    socklen_t n = sizeof cookie;
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &n) != 0) {
        struct stat file;
        cookie = fstat(fd, &file) == 0 && S_ISSOCK(file.st_mode) ? file.st_ino : 0;
    }
    errno = saved;
    return cookie;
}

/* close below takes g_mu. */
static void close_plainly(int fd) { syscall(SYS_close, fd); }

static void hold_reserve(void)
{
    if (g_reserve_fd < 0) g_reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void large_forget(struct td_rpc_reader *reader)
{
    for (int i = 0; reader->large_since && i < TD_RPC_LARGE_BLOCKS + TD_RPC_LARGE_ENDED; i++)
        if (g_large[i] == reader) g_large[i] = NULL;
    reader->large_since = 0;
}

/* The handshake of c is done, or its connection is over. */
static void handshake_end(struct conn *c)
{
    struct td_rpc_guard *guard = c->guard;
    if (!c->handshake_ns) return;
    *(c->older ? &c->older->newer : &guard->oldest) = c->newer;
    *(c->newer ? &c->newer->older : &guard->newest) = c->older;
    c->handshake_ns = 0;
    guard->stats.handshakes--;
    if (c->peer) c->peer->n_handshakes--;
}

static void handshake_begin(struct conn *c)
{
    struct td_rpc_guard *guard = c->guard;
    c->handshake_ns = td_now_ns();
    c->older = guard->newest;
    *(c->older ? &c->older->newer : &guard->oldest) = c;
    guard->newest = c;
    guard->stats.handshakes++;
    if (c->peer) c->peer->n_handshakes++;
}

static void conn_forget(struct conn *c)
{
    handshake_end(c);
    large_forget(&c->reader);
    c->guard->stats.open--;
    td_rpc_peers_drop(&g_peers, c->peer);
    memset(c, 0, sizeof *c);
}

static void conn_remember(struct td_rpc_guard *guard, int fd, const struct sockaddr_storage *from)
{
    if ((size_t)fd >= g_n_conns) {
        size_t n = g_n_conns ? g_n_conns : 256;
        while (n <= (size_t)fd) n *= 2;
        struct conn **grown = realloc(g_conns, n * sizeof *grown);
        TD_ASSERT(grown != NULL);
        memset(grown + g_n_conns, 0, (n - g_n_conns) * sizeof *grown);
        g_conns = grown;
        g_n_conns = n;
    }
    struct conn *c = g_conns[fd];
    if (!c) c = g_conns[fd] = td_rpc_alloc(sizeof *c);
    if (c->guard) /* the descriptor's number is in use again, so its former connection is over */
        conn_forget(c);
    uint64_t key;
    struct td_rpc_peer *peer = td_rpc_peer_key(from, &key) ? td_rpc_peers_add(&g_peers, key) : NULL;
    *c = (struct conn){.guard = guard, .peer = peer, .cookie = socket_cookie(fd), .epoll_fd = -1};
    c->reader.guard_id = guard->id;
    c->reader.fd = fd;
    guard->stats.open++;
    guard->stats.accepted++;
    if (guard->use_tls) handshake_begin(c);
}

/* Forgets the connections that are over. */
static void sweep(void)
{
    for (size_t fd = 0; fd < g_n_conns; fd++)
        if (g_conns[fd] && g_conns[fd]->guard && socket_cookie((int)fd) != g_conns[fd]->cookie)
            conn_forget(g_conns[fd]);
}

static bool sweep_due(struct td_rpc_guard *guard)
{
    uint64_t now = td_now_ns();
    if (now - guard->swept_ns < SWEEP_MS * TD_NS_PER_MS) return false;
    guard->swept_ns = now;
    return true;
}

static bool has_room(const struct td_rpc_guard *guard, const struct sockaddr_storage *from,
                     bool *ret_of_peer)
{
    *ret_of_peer = false;
    if (guard->stats.open >= guard->max_connections) return false;
    uint64_t key;
    if (!td_rpc_peer_key(from, &key)) return true;
    const struct td_rpc_peer *p = td_rpc_peers_find(&g_peers, key);
    *ret_of_peer = p && p->n >= guard->max_peer_connections;
    return !*ret_of_peer;
}

/* ---- handshakes ---------------------------------------------------------------------------- */

static bool bucket_has(struct bucket *b, double per_s, uint64_t now)
{
    double most = per_s * TD_RPC_HANDSHAKE_BURST_S;
    if (most < 1) most = 1;
    b->left = b->at_ns ? b->left + (double)(now - b->at_ns) * 1e-9 * per_s : most;
    if (b->left > most) b->left = most;
    b->at_ns = now;
    return b->left >= 1;
}

static struct bucket *bucket_of(struct td_rpc_guard *guard, uint64_t key)
{
    return &guard->peer_handshakes[td_hash64(&key, sizeof key, g_peers.seed) % TD_RPC_PEER_BUCKETS];
}

/* Ends the oldest handshake in progress, of one peer or of all (NULL), if it has had its time, and
 * forgets those before it whose connection is over. True = there is room now. */
static bool handshake_evict(struct td_rpc_guard *guard, const struct td_rpc_peer *peer,
                            uint64_t now)
{
    for (struct conn *c = guard->oldest, *newer; c; c = newer) {
        newer = c->newer;
        if (peer && c->peer != peer) continue;
        if (socket_cookie(c->reader.fd) != c->cookie) {
            conn_forget(c);
            return true;
        }
        if (now - c->handshake_ns < TD_RPC_HANDSHAKE_PATIENCE_MS * TD_NS_PER_MS) return false;
        handshake_end(c);
        reader_end(&c->reader, "handshake_not_finished");
        return true;
    }
    return false;
}

/* Whether one more handshake may begin; if so, takes its tokens. Otherwise *ret_why. */
static bool handshake_may_begin(struct td_rpc_guard *guard, const struct sockaddr_storage *from,
                                const char **ret_why)
{
    uint64_t now = td_now_ns(), key = 0;
    bool has_key = td_rpc_peer_key(from, &key);
    struct bucket *of_peer = has_key ? bucket_of(guard, key) : NULL;
    *ret_why = "handshakes_per_s";
    if (guard->handshakes_per_s > 0 &&
        !bucket_has(&guard->handshakes, guard->handshakes_per_s, now))
        return false;
    if (of_peer && guard->peer_handshakes_per_s > 0 &&
        !bucket_has(of_peer, guard->peer_handshakes_per_s, now))
        return false;
    *ret_why = "handshakes";
    const struct td_rpc_peer *peer = has_key ? td_rpc_peers_find(&g_peers, key) : NULL;
    if (peer && peer->n_handshakes >= guard->max_peer_handshakes &&
        !handshake_evict(guard, peer, now))
        return false;
    if (guard->stats.handshakes >= guard->max_handshakes && !handshake_evict(guard, NULL, now))
        return false;
    if (guard->handshakes_per_s > 0) guard->handshakes.left -= 1;
    if (of_peer && guard->peer_handshakes_per_s > 0) of_peer->left -= 1;
    return true;
}

static const char *peer_text(const struct sockaddr_storage *from, char *text, socklen_t n_text)
{
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)from;
    snprintf(text, n_text, "local");
    if (from->ss_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)from)->sin_addr, text,
                  n_text);
    else if (from->ss_family == AF_INET6 &&
             /* core listens on IPv4 and IPv6 with one socket */
             IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr))
        inet_ntop(AF_INET, &in6->sin6_addr.s6_addr[12], text, n_text);
    else if (from->ss_family == AF_INET6)
        inet_ntop(AF_INET6, &in6->sin6_addr, text, n_text);
    return text;
}

/* At most one line a second, so that a flood of connections does not flood the log. */
static void tell_refused(struct td_rpc_guard *guard, const char *why,
                         const struct sockaddr_storage *from)
{
    uint64_t now = td_now_ns();
    if (guard->told_ns && now - guard->told_ns < TD_NS_PER_S) return;
    guard->told_ns = now;
    char peer[INET6_ADDRSTRLEN];
    const struct td_rpc_guard_stats *s = &guard->stats;
    td_warn("connections_refused",
            "why=%s peer=%s open=%u limit=%u peer_limit=%u refused=%llu refused_of_peers=%llu "
            "no_descriptor=%llu "
            "handshakes=%u refused_handshakes=%llu",
            why, peer_text(from, peer, sizeof peer), s->open, guard->max_connections,
            guard->max_peer_connections, (unsigned long long)s->refused_total,
            (unsigned long long)s->refused_peer, (unsigned long long)s->starved, s->handshakes,
            (unsigned long long)s->refused_handshakes);
}

static bool takes(struct td_rpc_guard *guard, const struct sockaddr_storage *from)
{
    bool of_peer, room = has_room(guard, from, &of_peer);
    const char *why = NULL;
    if (!room && sweep_due(guard)) {
        sweep();
        room = has_room(guard, from, &of_peer);
    }
    if (room && (!guard->use_tls || handshake_may_begin(guard, from, &why))) return true;
    uint64_t *refused = room      ? &guard->stats.refused_handshakes
                        : of_peer ? &guard->stats.refused_peer
                                  : &guard->stats.refused_total;
    *refused += 1;
    tell_refused(guard, room ? why : of_peer ? "peer_limit" : "limit", from);
    return false;
}

/* ---- accept ---------------------------------------------------------------------------------- */

static int real_accept4(int fd, struct sockaddr_storage *from, socklen_t *n_from, int flags)
{
    *n_from = sizeof *from;
    memset(from, 0, sizeof *from);
    return (int)syscall(SYS_accept4, fd, from, n_from, flags);
}

static struct td_rpc_guard *guard_of(int listener)
{
    struct sockaddr_storage at = {0};
    socklen_t n = sizeof at;
    if (getsockname(listener, (struct sockaddr *)&at, &n) != 0) return NULL;
    int port = at.ss_family == AF_INET    ? ntohs(((struct sockaddr_in *)(void *)&at)->sin_port)
               : at.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)(void *)&at)->sin6_port)
                                          : 0;
    for (struct td_rpc_guard *d = g_guards; d; d = d->next) {
        if (port && port == d->port) return d;
        if (at.ss_family == AF_UNIX && d->unix_path[0] &&
            !strncmp(d->unix_path, ((struct sockaddr_un *)(void *)&at)->sun_path,
                     sizeof d->unix_path))
            return d;
    }
    return NULL;
}

/* No descriptor is left: releases the reserve to accept one connection and close it. False = there
 * was no connection to accept. */
static bool turn_away(struct td_rpc_guard *guard, int listener)
{
    struct sockaddr_storage from;
    socklen_t n_from;
    if (g_reserve_fd < 0) return false;
    close_plainly(g_reserve_fd);
    g_reserve_fd = -1;
    int fd = real_accept4(listener, &from, &n_from, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) close_plainly(fd);
    hold_reserve();
    if (fd < 0) return false;
    guard->stats.starved++;
    tell_refused(guard, "no_descriptor", &from);
    return true;
}

/* The next connection for core, or -1 with an errno that core survives. */
static int accept_guarded(struct td_rpc_guard *guard, int listener, int flags,
                          struct sockaddr_storage *ret_from, socklen_t *ret_n)
{
    hold_reserve();
    for (int i = 0; i < MAX_REFUSED_AT_ONCE; i++) {
        int fd = real_accept4(listener, ret_from, ret_n, flags);
        if (fd >= 0) {
            if (takes(guard, ret_from)) {
                conn_remember(guard, fd, ret_from);
                return fd;
            }
            close_plainly(fd);
            continue;
        }
        if (errno == EAGAIN || errno == EINTR || errno == EBADF || errno == EINVAL ||
            errno == ENOTSOCK)
            return -1;
        /* accept(2) also returns network errors of the new connection. The next connection may be
         * fine. */
        bool starved = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (starved && !turn_away(guard, listener)) break;
    }
    /* The server's own probe (probe.c) dials once a second, which wakes core for the rest of the
     * backlog. */
    errno = EAGAIN;
    return -1;
}

/* Overrides the C library's accept4 for the whole program, libgrpc included. Only the symbol has
 * that name: in C glibc declares the address as a transparent union. */
int td_rpc_accept4(int fd, struct sockaddr *addr, socklen_t *addr_len,
                   int flags) __asm__("accept4");
__attribute__((visibility("default"))) int td_rpc_accept4(int fd, struct sockaddr *addr,
                                                          socklen_t *addr_len, int flags)
{
    if (atomic_load_explicit(&g_n_guards, memory_order_relaxed) == 0)
        return (int)syscall(SYS_accept4, fd, addr, addr_len, flags);
    pthread_mutex_lock(&g_mu);
    struct td_rpc_guard *guard = guard_of(fd);
    if (!guard) {
        pthread_mutex_unlock(&g_mu); /* it may block, and must not delay the guarded listeners */
        return (int)syscall(SYS_accept4, fd, addr, addr_len, flags);
    }
    struct sockaddr_storage from;
    socklen_t n_from;
    int taken = accept_guarded(guard, fd, flags, &from, &n_from);
    int saved = errno;
    pthread_mutex_unlock(&g_mu);
    if (taken >= 0 && addr && addr_len) {
        memcpy(addr, &from, n_from < *addr_len ? n_from : *addr_len);
        *addr_len = n_from;
    }
    errno = saved;
    return taken;
}

/* ---- what core reads ------------------------------------------------------------------------- */

/* NULL = unknown, or closed */
static struct td_rpc_guard *reader_guard(const struct td_rpc_reader *reader)
{
    struct td_rpc_guard *guard = g_guards;
    while (guard && guard->id != reader->guard_id) guard = guard->next;
    return guard;
}

static void tell_ended(const struct td_rpc_reader *reader, const char *why, uint64_t n_ended)
{
    uint64_t now = td_now_ns();
    if (g_ended_told_ns && now - g_ended_told_ns < TD_NS_PER_S) return;
    g_ended_told_ns = now;
    char peer[INET6_ADDRSTRLEN] = "unknown";
    struct sockaddr_storage from = {0};
    socklen_t n = sizeof from;
    if (reader->fd >= 0 && getpeername(reader->fd, (struct sockaddr *)&from, &n) == 0)
        peer_text(&from, peer, sizeof peer);
    td_warn("connection_ended", "why=%s peer=%s ended=%llu", why, peer,
            (unsigned long long)n_ended);
}

/* Locked. The next read returns an end. A client that has stopped sending causes no read, so its
 * socket is shut down. The descriptor cannot belong to another connection by now: its record was
 * found by its cookie, or core is reading from it. */
static void reader_end(struct td_rpc_reader *reader, const char *why)
{
    reader->over = true;
    struct td_rpc_guard *guard = reader_guard(reader);
    uint64_t *n_ended = guard ? &guard->stats.ended : &g_n_ended;
    *n_ended += 1;
    tell_ended(reader, why, *n_ended);
    if (reader->fd >= 0)
        syscall(SYS_shutdown, reader->fd, SHUT_RDWR); /* shutdown below takes g_mu */
    else
        large_forget(reader); /* TLS: core's close of the connection cannot be noticed */
}

/* Locked. Returns the oldest reader with a place, the number of places in use, and a free one (-1:
 * none). */
static struct td_rpc_reader *large_look(int *ret_n, int *ret_free)
{
    struct td_rpc_reader *oldest = NULL;
    *ret_n = 0;
    *ret_free = -1;
    for (int i = 0; i < TD_RPC_LARGE_BLOCKS + TD_RPC_LARGE_ENDED; i++) {
        struct td_rpc_reader *r = g_large[i];
        if (!r) *ret_free = i;
        if (!r || r->over) continue;
        ++*ret_n;
        if (!oldest || r->large_since < oldest->large_since) oldest = r;
    }
    return oldest;
}

/* Locked. Takes one of the places for large header blocks. A client sends its block in one go, so a
 * reader that has had a place for a second is ended to make room; when there is none, the new
 * reader is ended. Core frees what it holds of an ended one in a later turn. At most
 * TD_RPC_LARGE_ENDED may wait for that; while as many do, the new reader is ended, too. So a burst
 * finds the places taken, and core never has more than these to free. */
static bool large_enter(struct td_rpc_reader *reader, uint64_t now)
{
    int n, at;
    struct td_rpc_reader *oldest = large_look(&n, &at);
    if (at < 0 || n >= TD_RPC_LARGE_BLOCKS) {
        for (int i = 0; i < TD_RPC_LARGE_BLOCKS + TD_RPC_LARGE_ENDED; i++) {
            /* forget those that core has closed */
            int fd = g_large[i] ? g_large[i]->fd : -1;
            if (fd >= 0 && g_conns[fd]->cookie != socket_cookie(fd)) conn_forget(g_conns[fd]);
        }
        oldest = large_look(&n, &at);
    }
    if (at < 0) return false;
    if (n >= TD_RPC_LARGE_BLOCKS) {
        if (now - oldest->large_since < TD_NS_PER_S) return false;
        reader_end(oldest, "large_header_blocks");
    }
    g_large[at] = reader;
    reader->large_since = now;
    return true;
}

static bool tls_hides_streams(void)
{
    for (const struct td_rpc_guard *guard = g_guards; guard; guard = guard->next)
        if (guard->use_tls && guard->hides_streams) return true;
    return false;
}

static bool reader_take(struct td_rpc_reader *reader, void *bytes, size_t n_bytes)
{
    if (reader->over) return false;
    struct td_rpc_guard *guard = reader_guard(reader);
    uint64_t now = td_now_ns(), n_before = reader->frames.n_shown;
    if (guard ? guard->hides_streams : tls_hides_streams()) reader->frames.hides = true;
    reader->frames.max_unacked_streams = guard ? guard->max_unacked_streams : g_max_unacked_streams;
    const char *why = td_rpc_frames_take(&reader->frames, bytes, n_bytes, now);
    *(guard ? &guard->n_streams : &g_n_unknown_streams) += reader->frames.n_shown - n_before;
    bool is_large = td_rpc_frames_in_large_block(&reader->frames);
    if (!why && is_large && !reader->large_since && !large_enter(reader, now))
        why = "large_header_blocks";
    if (why) {
        reader_end(reader, why);
        return false;
    }
    if (!is_large && reader->large_since) large_forget(reader);
    return true;
}

bool td_rpc_reader_take(struct td_rpc_reader *reader, void *bytes, size_t n_bytes)
{
    pthread_mutex_lock(&g_mu);
    bool goes_on = reader_take(reader, bytes, n_bytes);
    pthread_mutex_unlock(&g_mu);
    return goes_on;
}

void td_rpc_reader_find_guard(struct td_rpc_reader *reader,
                              const uint8_t random[TD_RPC_RANDOM_BYTES])
{
    pthread_mutex_lock(&g_mu);
    for (size_t fd = 0; fd < g_n_conns && !reader->guard_id; fd++) {
        const struct conn *c = g_conns[fd];
        if (c && c->guard && td_rpc_records_is_random(&c->records, random))
            reader->guard_id = c->guard->id;
    }
    pthread_mutex_unlock(&g_mu);
}

void td_rpc_reader_forget(struct td_rpc_reader *reader)
{
    pthread_mutex_lock(&g_mu);
    large_forget(reader);
    pthread_mutex_unlock(&g_mu);
}

/* Locked. The connection that now has this descriptor and whose bytes are to be checked here, or
 * NULL. With TLS they are checked here until the handshake is done. */
static struct conn *read_conn(int fd)
{
    struct conn *c = fd >= 0 && (size_t)fd < g_n_conns ? g_conns[fd] : NULL;
    if (!c || !c->guard || (c->guard->use_tls && !c->handshake_ns)) return NULL;
    return socket_cookie(fd) == c->cookie ? c : NULL;
}

/* Locked. False = core must read an end instead. */
static bool conn_take(struct conn *c, void *bytes, size_t n_bytes)
{
    if (!c->guard->use_tls) return reader_take(&c->reader, bytes, n_bytes);
    if (c->handshake_ns && td_rpc_records_take(&c->records, bytes, n_bytes)) handshake_end(c);
    return true;
}

/* As with accept4 above, only the symbol has that name. */
ssize_t td_rpc_recvmsg(int fd, struct msghdr *msg, int flags) __asm__("recvmsg");
__attribute__((visibility("default"))) ssize_t td_rpc_recvmsg(int fd, struct msghdr *msg, int flags)
{
    ssize_t n = syscall(SYS_recvmsg, fd, msg, flags);
    if (n <= 0 || flags & MSG_PEEK || atomic_load_explicit(&g_n_guards, memory_order_relaxed) == 0)
        return n;
    pthread_mutex_lock(&g_mu);
    struct conn *c = read_conn(fd);
    size_t left = (size_t)n;
    for (size_t i = 0; c && left && i < msg->msg_iovlen; i++) {
        size_t part = msg->msg_iov[i].iov_len < left ? msg->msg_iov[i].iov_len : left;
        if (!conn_take(c, msg->msg_iov[i].iov_base, part))
            n = left = 0;
        else
            left -= part;
    }
    pthread_mutex_unlock(&g_mu);
    return n;
}

/* ---- what core closes ------------------------------------------------------------------------ */

/* Locked. The connection of a server that goes away, that the client has not lost by what it sent;
 * else NULL. */
static struct conn *away_conn(int fd)
{
    struct conn *c = fd >= 0 && (size_t)fd < g_n_conns ? g_conns[fd] : NULL;
    if (!c || !c->guard || !c->guard->hides_streams || c->reader.over) return NULL;
    return socket_cookie(fd) == c->cookie ? c : NULL;
}

/* As with accept4 above, these override the C library's for the whole program. */
int td_rpc_epoll_ctl(int set, int op, int fd, struct epoll_event *event) __asm__("epoll_ctl");
__attribute__((visibility("default"))) int td_rpc_epoll_ctl(int set, int op, int fd,
                                                            struct epoll_event *event)
{
    int rc = (int)syscall(SYS_epoll_ctl, set, op, fd, event);
    if (rc || op != EPOLL_CTL_ADD || !atomic_load_explicit(&g_n_guards, memory_order_relaxed))
        return rc;
    pthread_mutex_lock(&g_mu);
    struct conn *c = (size_t)fd < g_n_conns ? g_conns[fd] : NULL;
    if (c && c->guard && socket_cookie(fd) == c->cookie) c->epoll_fd = set;
    pthread_mutex_unlock(&g_mu);
    return rc;
}

/* Core shuts a socket down for both directions before it closes it; the kernel would then answer
 * with a reset whatever the client still sends. */
int td_rpc_shutdown(int fd, int how) __asm__("shutdown");
__attribute__((visibility("default"))) int td_rpc_shutdown(int fd, int how)
{
    if (how == SHUT_RDWR && atomic_load_explicit(&g_n_away, memory_order_relaxed)) {
        pthread_mutex_lock(&g_mu);
        if (away_conn(fd)) how = SHUT_WR;
        pthread_mutex_unlock(&g_mu);
    }
    return (int)syscall(SYS_shutdown, fd, how);
}

int td_rpc_close(int fd) __asm__("close");
__attribute__((visibility("default"))) int td_rpc_close(int fd)
{
    if (atomic_load_explicit(&g_n_away, memory_order_relaxed)) {
        pthread_mutex_lock(&g_mu);
        struct conn *c = away_conn(fd);
        bool lingers = c && td_rpc_linger_take(fd, c->epoll_fd);
        if (lingers) { /* counted as open until its descriptor is closed: sweep forgets it then */
            handshake_end(c);
            large_forget(&c->reader);
        }
        pthread_mutex_unlock(&g_mu);
        if (lingers) return 0;
    }
    return (int)syscall(SYS_close, fd);
}

/* ---- guards ---------------------------------------------------------------------------------- */

struct td_rpc_guard *td_rpc_guard_open(const struct td_rpc_guard_config *config)
{
    struct td_rpc_guard *guard = td_rpc_alloc(sizeof *guard);
    guard->port = config->unix_path ? 0 : config->port;
    if (config->unix_path)
        snprintf(guard->unix_path, sizeof guard->unix_path, "%s", config->unix_path);
    guard->use_tls = config->use_tls;
    if (guard->use_tls && !td_rpc_tls_is_guarded())
        td_warn("tls_frames_not_counted", "why=\"built without OpenSSL's headers\"");
    guard->max_unacked_streams = config->max_unacked_streams;
    struct rlimit limit = {0};
    getrlimit(RLIMIT_NOFILE, &limit);
    uint64_t fds = limit.rlim_cur > 2 * TD_RPC_RESERVED_FDS ? limit.rlim_cur - TD_RPC_RESERVED_FDS
                                                            : limit.rlim_cur / 2;
    if (fds > TD_RPC_MAX_CONNECTIONS) fds = TD_RPC_MAX_CONNECTIONS;
    if (fds == 0) fds = 1;
    guard->max_connections = config->max_connections ? config->max_connections : (uint32_t)fds;
    uint32_t half = (guard->max_connections + 1) / 2;
    guard->max_peer_connections =
        config->max_peer_connections ? config->max_peer_connections : half;
    guard->max_handshakes = config->max_handshakes ? config->max_handshakes : TD_RPC_MAX_HANDSHAKES;
    double share = (double)guard->max_peer_connections / guard->max_connections;
    if (share > 1) share = 1;
    guard->max_peer_handshakes = (uint32_t)(guard->max_handshakes * share);
    if (guard->max_peer_handshakes == 0) guard->max_peer_handshakes = 1;
    guard->handshakes_per_s = config->max_handshakes_per_s;
    guard->peer_handshakes_per_s = guard->handshakes_per_s * share;
    pthread_mutex_lock(&g_mu);
    hold_reserve();
    if (guard->max_unacked_streams > g_max_unacked_streams)
        g_max_unacked_streams = guard->max_unacked_streams;
    if (!g_peers.seed) g_peers.seed = td_random_u64();
    guard->id = ++g_last_guard_id;
    guard->next = g_guards;
    g_guards = guard;
    atomic_fetch_add(&g_n_guards, 1);
    pthread_mutex_unlock(&g_mu);
    return guard;
}

void td_rpc_guard_close(struct td_rpc_guard *guard)
{
    if (!guard) return;
    pthread_mutex_lock(&g_mu);
    struct td_rpc_guard **at = &g_guards;
    while (*at != guard) at = &(*at)->next;
    *at = guard->next;
    if (guard->hides_streams) atomic_fetch_sub(&g_n_away, 1);
    for (size_t fd = 0; fd < g_n_conns; fd++)
        if (g_conns[fd] && g_conns[fd]->guard == guard) conn_forget(g_conns[fd]);
    if (atomic_fetch_sub(&g_n_guards, 1) == 1) {
        for (size_t fd = 0; fd < g_n_conns; fd++) free(g_conns[fd]);
        free(g_conns);
        g_conns = NULL;
        g_n_conns = 0;
        if (g_reserve_fd >= 0) close_plainly(g_reserve_fd);
        g_reserve_fd = -1;
    }
    pthread_mutex_unlock(&g_mu);
    free(guard);
}

void td_rpc_guard_hide_streams(struct td_rpc_guard *guard)
{
    pthread_mutex_lock(&g_mu);
    if (!guard->hides_streams) atomic_fetch_add(&g_n_away, 1);
    guard->hides_streams = true;
    pthread_mutex_unlock(&g_mu);
}

uint64_t td_rpc_guard_streams(struct td_rpc_guard *guard)
{
    pthread_mutex_lock(&g_mu);
    bool all = !guard->use_tls || (td_rpc_tls_is_guarded() && g_n_unknown_streams == 0);
    uint64_t n = all ? guard->n_streams : UINT64_MAX;
    pthread_mutex_unlock(&g_mu);
    return n;
}

void td_rpc_guard_stats(struct td_rpc_guard *guard, struct td_rpc_guard_stats *ret_stats)
{
    pthread_mutex_lock(&g_mu);
    sweep();
    *ret_stats = guard->stats;
    if (guard->use_tls) ret_stats->ended += g_n_ended;
    pthread_mutex_unlock(&g_mu);
}

void td_rpc_guard_limits(const struct td_rpc_guard *guard, uint32_t *ret_connections,
                         uint32_t *ret_peer_connections)
{
    *ret_connections = guard->max_connections;
    *ret_peer_connections = guard->max_peer_connections;
}
