/* xfer_soak_end.c - one endpoint of the soak; see xfer_soak.h. */
#include "common/base/random.h"
#include "tests/unit/xfer_soak.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/sanitizers.h"
#include "tests/fake/verbs_fake.h"

const char *const soak_break_names[N_BREAKS] = {
    "",          "corrupt", "note",      "late",      "stray",   "stray",
    "source",    "source",  "hung slot", "hung op",   "twice",   "lost ready",
    "slot leak", "op leak", "fd leak",   "heap leak", "vacuous", "untouched"};
const char *const soak_break_words[N_BREAKS] = {
    "none",      "corrupt",     "note",      "late",      "stray",   "stray-end",
    "source",    "source-free", "hung-slot", "hung-op",   "twice",   "lost-ready",
    "slot-leak", "op-leak",     "fd-leak",   "heap-leak", "vacuous", "untouched"};

/* --- blocks ----------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t v) { return td_keyed_step(&v); }

uint64_t soak_content(uint64_t user, int32_t i) { return mix(user * SOAK_BLOCKS + (uint64_t)i); }
uint64_t soak_free(const struct soak_end *e, int32_t block)
{
    return mix(~(uint64_t)(e->index * SOAK_BLOCKS + (uint32_t)block));
}
uint8_t *soak_block(const struct soak_end *e, int32_t block)
{
    return (uint8_t *)e->pool.base + (size_t)block * SOAK_BLOCK_BYTES;
}

/* Words that differ within a block and between blocks, and that a compiler makes many of at a
 * time. */
void soak_fill(uint8_t *to, uint64_t seed)
{
    uint64_t *w = (uint64_t *)(void *)to;
    for (uint64_t i = 0; i < SOAK_BLOCK_BYTES / 8; i++) w[i] = seed + i * 0x9e3779b97f4a7c15ull;
}

bool soak_check(const uint8_t *from, uint64_t seed)
{
    const uint64_t *w = (const uint64_t *)(const void *)from;
    uint64_t differs = 0;
    for (uint64_t i = 0; i < SOAK_BLOCK_BYTES / 8; i++)
        differs |= w[i] ^ (seed + i * 0x9e3779b97f4a7c15ull);
    return !differs;
}

bool soak_breaks(struct soak_shared *s, enum soak_break what)
{
    return s->broken == what && atomic_fetch_add(&s->n_breaks, 1) == 20;
}

/* --- rings and counts ------------------------------------------------------------------------- */

bool soak_ring_put(struct soak_ring *r, const struct soak_message *m)
{
    uint32_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&r->head, memory_order_acquire) == SOAK_RING) return false;
    r->at[tail % SOAK_RING] = *m;
    atomic_store_explicit(&r->tail, tail + 1, memory_order_release);
    return true;
}

bool soak_ring_get(struct soak_ring *r, struct soak_message *ret_m)
{
    uint32_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&r->tail, memory_order_acquire)) return false;
    *ret_m = r->at[head % SOAK_RING];
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    return true;
}

int soak_count_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    TD_ASSERT(d);
    for (struct dirent *e = readdir(d); e; e = readdir(d)) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

int64_t soak_heap_bytes(void)
{
#if defined(TD_WITH_ASAN) || defined(TD_WITH_TSAN)
    return 0;
#else
    struct mallinfo2 m = mallinfo2();
    return (int64_t)(m.uordblks + m.hblkhd);
#endif
}

int64_t soak_rss_bytes(void)
{
#if defined(TD_WITH_ASAN) || defined(TD_WITH_TSAN)
    return 0; /* shadow memory grows by itself */
#else
    /* It would be that of the emulator, too, which keeps something of every thread that ended. */
    if (getenv("TANDEM_TEST_EMULATED")) return 0;
    long long pages = 0, shared = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    TD_ASSERT(f);
    int n = fscanf(f, "%*d %lld %lld", &pages, &shared);
    fclose(f);
    return n == 2 ? (pages - shared) * 4096 : 0; /* pools and maps of peers' pools are shared:
                                                    they come and go */
#endif
}

/* --- the endpoint ----------------------------------------------------------------------------- */

struct end_job {
    uint64_t slot_user, op_user; /* 0: none live */
    uint32_t slot, op;
    bool ready, replay;
};

struct end {
    struct soak_shared *s;
    struct soak_end *me;
    struct td_xfer *x;
    struct td_fake_fabric *fabric;
    struct end_job job[SOAK_JOBS];
};

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static void tell(struct end *e, const struct soak_message *m)
{
    /* back-pressure: the driver always drains */
    while (!soak_ring_put(&e->me->news, m)) poll(NULL, 0, 1);
    td_wakeup_signal(&e->s->wakeup);
}

static void violation(struct end *e, uint64_t user, const char *check, const char *fmt, int32_t a,
                      int32_t b)
{
    struct soak_message m = {
        .verb = SOAK_VIOLATION, .user = user, .job = (uint32_t)(user % SOAK_JOBS)};
    char text[160];
    snprintf(text, sizeof text, fmt, a, b);
    snprintf(m.text, sizeof m.text, "%s: %s", check, text);
    tell(e, &m);
}

static void open_end(struct end *e)
{
    struct soak_end *me = e->me;
    struct soak_message m = {.verb = SOAK_OPENED};
    struct td_err err = {0};
    char name[32], path[256];
    snprintf(name, sizeof name, "soak-%s%u", me->is_receiver ? "d" : "p", me->index);
    struct td_xfer_rdma_config rdma = {.gid_index = -1,
                                       .timeout = 10,
                                       .retry = 3,
                                       .rnr_retry = 1,
                                       .pull = true,
                                       .windows = me->index == SOAK_SENDERS};
    struct td_xfer_config config = {.instance = name,
                                    .incarnation = me->incarnation,
                                    .layout_hash = 0x50a4,
                                    .listen_host = "127.0.0.1",
                                    .listen_port = me->port,
                                    .path = e->s->path,
                                    .max_slots = SOAK_JOBS + 1,
                                    .max_ops = SOAK_JOBS + 1,
                                    .peer_timeout_ms = e->s->timeout_ms,
                                    .tcp_lanes = 2,
                                    .digest_every = me->index % 2 ? 4 : 0,
                                    .rdma = me->fabric[0] ? &rdma : NULL,
                                    .hooks = {.wake = ring, .ctx = &me->wakeup}};
    if (me->fabric[0]) {
        struct td_fake_options options;
        m.status = td_fake_options_parse(me->fabric, &options, path, &err);
        options.path = path;
        if (!m.status) m.status = td_fake_fabric_open(&options, &e->fabric, &err);
        if (!m.status) rdma.verbs = td_fake_verbs(e->fabric);
    }
    if (!m.status) m.status = td_xfer_open(&config, &e->x, &err);
    if (!m.status) m.status = td_xfer_mem_add(e->x, &me->pool, SOAK_BLOCK_BYTES, SOAK_BLOCKS, &err);
    if (!m.status) m.n = td_xfer_port(e->x);
    snprintf(m.text, sizeof m.text, "%.200s", err.msg);
    tell(e, &m);
}

static void grant(struct end *e, const struct soak_message *c)
{
    struct soak_job *j = &e->s->job[c->job];
    static _Thread_local uint8_t blob[TD_XFER_BLOB_MAX];
    struct soak_message m = {.verb = SOAK_GRANTED, .job = c->job, .user = c->user};
    struct td_err err = {0};
    size_t bytes = 0;
    if (j->n && soak_breaks(e->s, BREAK_STRAY)) soak_block(e->me, j->dst[j->n / 2])[77] ^= 1;
    for (int32_t i = 0; i < j->n; i++)
        if (!soak_check(soak_block(e->me, j->dst[i]), soak_free(e->me, j->dst[i])))
            violation(
                e, c->user, "stray",
                "destination block %d was written while it belonged to nobody (grant block %d)",
                j->dst[i], i);
    m.status =
        td_xfer_grant(e->x, j->dst, j->n, j->slot_deadline_ns, c->user, &m.id, blob, &bytes, &err);
    if (!m.status) {
        TD_ASSERT(bytes <= sizeof j->blob);
        memcpy(j->blob, blob, bytes);
        j->blob_bytes = (uint32_t)bytes;
        e->job[c->job] = (struct end_job){.slot_user = c->user, .slot = m.id};
    }
    snprintf(m.text, sizeof m.text, "%.200s", err.msg);
    tell(e, &m);
}

static void op(struct end *e, const struct soak_message *c)
{
    struct soak_job *j = &e->s->job[c->job];
    struct end_job *mine = &e->job[c->job];
    struct soak_message m = {
        .verb = SOAK_STARTED, .job = c->job, .user = c->user, .replay = c->replay};
    struct td_err err = {0};
    int32_t n = 0;
    if (j->n && soak_breaks(e->s, BREAK_SOURCE_FREE))
        soak_block(e->me, j->src[j->n / 2])[4000] ^= 0x80;
    for (int32_t i = 0; i < j->n; i++) {
        if (!soak_check(soak_block(e->me, j->src[i]), soak_free(e->me, j->src[i])))
            violation(e, c->user, "source",
                      "source block %d was written while it belonged to nobody (grant block %d)",
                      j->src[i], i);
        /* a replay sends junk */
        if (!c->replay) soak_fill(soak_block(e->me, j->src[i]), soak_content(c->user, i));
    }
    m.status =
        td_xfer_op_start(e->x, j->blob, j->blob_bytes, c->deadline_ns, c->user, &m.id, &n, &err);
    if (!m.status)
        *mine = (struct end_job){.op_user = c->user, .op = m.id, .replay = c->replay};
    else
        for (int32_t i = 0; i < j->n; i++)
            soak_fill(soak_block(e->me, j->src[i]), soak_free(e->me, j->src[i]));
    if (!m.status && n != j->n)
        violation(e, c->user, "corrupt", "the grant says %d blocks, not %d", n, j->n);
    snprintf(m.text, sizeof m.text, "%.200s", err.msg);
    tell(e, &m);
}

/* The same blocks in parts, so many of them at a time as each block has: layers that are
 * finished before others. */
static td_status submit_parts(struct end *e, uint32_t op, const struct soak_message *c,
                              const int32_t *ids, int n_parts)
{
    uint64_t at = 0, part = SOAK_BLOCK_BYTES / (uint64_t)n_parts;
    td_status status = TD_OK;
    for (int k = 0; k < n_parts && !status; k++, at += part)
        status = td_xfer_submit_part(e->x, op, c->first, ids, c->n, at,
                                     k + 1 < n_parts ? part : SOAK_BLOCK_BYTES - at);
    if (status || !c->final) return status;
    return td_xfer_submit(e->x, op, c->first + c->n, NULL, 0, true, &c->user, sizeof c->user);
}

static void submit(struct end *e, const struct soak_message *c)
{
    struct soak_job *j = &e->s->job[c->job];
    struct end_job *mine = &e->job[c->job];
    if (mine->op_user != c->user) return; /* its end is told already */
    int n_parts = c->n ? 1 + (int)((c->user * 31 + (uint64_t)c->first) % 4) : 1;
    const int32_t *ids = j->src + c->first;
    td_status status = c->pull       ? td_xfer_submit_pull(e->x, mine->op, c->first, ids, c->n)
                       : n_parts > 1 ? submit_parts(e, mine->op, c, ids, n_parts)
                                     : td_xfer_submit(e->x, mine->op, c->first, ids, c->n, c->final,
                                                      &c->user, c->final ? sizeof c->user : 0);
    /* others: it has failed, and the event is queued */
    if (status != TD_ERR_INVALID && status != TD_ERR_NOT_FOUND) return;
    violation(e, c->user, "submit", "the submit of %d blocks was refused with status %d", c->n,
              (int32_t)status);
}

static bool is_loopback_or_ours(const struct sockaddr_storage *a)
{
    struct sockaddr_in in;
    struct sockaddr_un un;
    memcpy(&in, a, sizeof in);
    memcpy(&un, a, sizeof un);
    if (a->ss_family == AF_INET) return in.sin_addr.s_addr == htonl(INADDR_LOOPBACK);
    return a->ss_family == AF_UNIX && memcmp(un.sun_path + 1, "tandem", 6) == 0;
}

void soak_cut(unsigned which)
{
    DIR *d = opendir("/proc/self/fd");
    TD_ASSERT(d);
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        struct sockaddr_storage mine = {0}, theirs = {0};
        socklen_t n = sizeof mine, k = sizeof theirs;
        int fd = (int)strtol(e->d_name, NULL, 10);
        if (fd < 3 || getsockname(fd, (struct sockaddr *)&mine, &n) ||
            getpeername(fd, (struct sockaddr *)&theirs, &k))
            continue;
        bool ours = is_loopback_or_ours(&mine) || is_loopback_or_ours(&theirs);
        if (ours && (which & 1)) shutdown(fd, SHUT_RDWR);
        which = which >> 1 | (which & 1) << 31;
    }
    closedir(d);
}

static void rdma_fault(struct end *e, const struct soak_message *c)
{
    uint32_t device = c->id % SOAK_DEVICES;
    if (!e->fabric) return;
    if (c->verb == SOAK_PORT) {
        td_fake_port_set(e->fabric, td_fake_node(e->fabric), device, 1, c->final);
    } else if (c->verb == SOAK_GID) {
        td_fake_gid_set(e->fabric, device, 1, 4,
                        e->me->n_gid_changes++ % 2 ? TD_FAKE_GID_V4_PRIVATE : TD_FAKE_GID_V4,
                        TD_VB_GID_ROCE_V2, true);
    } else {
        static const enum td_fake_fault fault[] = {TD_FAKE_FAIL_BEFORE, TD_FAKE_FAIL_AFTER,
                                                   TD_FAKE_POST_PARTIAL, TD_FAKE_STALL};
        static const enum td_vb_wc_status status[] = {TD_VB_WC_RETRY_EXC, TD_VB_WC_RNR_RETRY_EXC,
                                                      TD_VB_WC_REM_OP, TD_VB_WC_WR_FLUSH,
                                                      TD_VB_WC_FATAL};
        struct td_fake_rule rule = {.fault = fault[(uint32_t)c->n % 4],
                                    .device = TD_FAKE_ALL,
                                    .nth = 1 + (uint64_t)c->first,
                                    .error = ENOMEM,
                                    .status = status[(uint32_t)c->n / 4 % 5]};
        if (rule.fault == TD_FAKE_FAIL_AFTER) rule.status = TD_VB_WC_RETRY_EXC;
        td_fake_rule_add(e->fabric, &rule);
    }
}

static void obey(struct end *e, const struct soak_message *c)
{
    struct end_job *mine = &e->job[c->job];
    switch (c->verb) {
    case SOAK_GRANT:
        grant(e, c);
        break;
    case SOAK_OP:
        op(e, c);
        break;
    case SOAK_SUBMIT:
        submit(e, c);
        break;
    case SOAK_REVOKE:
        if (mine->slot_user == c->user) td_xfer_revoke(e->x, mine->slot, "revoked by the soak");
        break;
    case SOAK_CANCEL:
        if (mine->op_user == c->user) td_xfer_cancel(e->x, mine->op, "cancelled by the soak");
        break;
    case SOAK_CUT:
        soak_cut((unsigned)c->n);
        break;
    case SOAK_PORT:
    case SOAK_GID:
    case SOAK_RULE:
        rdma_fault(e, c);
        break;
    case SOAK_STATE:
        soak_print_state(e->x, e->me->index);
        atomic_store(&e->me->state_told, true);
        td_wakeup_signal(&e->s->wakeup);
        break;
    default:
        TD_ASSERT(!"a command that is none");
    }
}

static bool content_is_right(struct end *e, const struct soak_job *j, uint64_t user, int32_t *ret_i)
{
    for (int32_t i = 0; i < j->n; i++) {
        *ret_i = i;
        if (!soak_check(soak_block(e->me, e->me->is_receiver ? j->dst[i] : j->src[i]),
                        soak_content(user, i)))
            return false;
    }
    return true;
}

/* The slot is READY: its blocks and its note are what was sent. */
static void on_ready(struct end *e, const struct td_xfer_event *v, const struct soak_job *j)
{
    int32_t i = 0;
    if (j->n && soak_breaks(e->s, BREAK_CORRUPT))
        soak_block(e->me, j->dst[j->n - 1])[SOAK_BLOCK_BYTES - 1] ^= 1;
    if (!content_is_right(e, j, v->user, &i))
        violation(e, v->user, "corrupt", "READY, and grant block %d of %d is not what was sent", i,
                  j->n);
    uint64_t note = 0;
    if (v->note_bytes == sizeof note) memcpy(&note, v->note, sizeof note);
    if (soak_breaks(e->s, BREAK_NOTE)) note++;
    if (note != v->user || v->bytes != (uint64_t)j->n * SOAK_BLOCK_BYTES || v->path != e->s->path)
        violation(e, v->user, "note",
                  "READY with a note of %d bytes that is not its own, or not over path %d",
                  (int32_t)v->note_bytes, (int32_t)e->s->path);
}

/* The slot is FREE: nothing was written to it since it was READY; its blocks are nobody's now. */
static void on_free(struct end *e, const struct td_xfer_event *v, const struct soak_job *j,
                    bool was_ready)
{
    int32_t i = 0;
    if (was_ready && j->n && soak_breaks(e->s, BREAK_LATE)) soak_block(e->me, j->dst[0])[8] ^= 1;
    if (was_ready && !content_is_right(e, j, v->user, &i))
        violation(e, v->user, "late", "grant block %d of %d changed between READY and FREE", i,
                  j->n);
    for (i = 0; i < j->n; i++) soak_fill(soak_block(e->me, j->dst[i]), soak_free(e->me, j->dst[i]));
}

/* The op is over: nobody wrote to its source, which is nobody's now. */
static void on_op_end(struct end *e, const struct td_xfer_event *v, const struct soak_job *j,
                      bool is_replay)
{
    int32_t i = 0;
    if (!is_replay && j->n && soak_breaks(e->s, BREAK_SOURCE)) soak_block(e->me, j->src[0])[0] ^= 1;
    if (!is_replay && !content_is_right(e, j, v->user, &i))
        violation(e, v->user, "source", "source block %d of %d changed under the op", i, j->n);
    for (i = 0; i < j->n; i++) soak_fill(soak_block(e->me, j->src[i]), soak_free(e->me, j->src[i]));
}

static void on_event(struct end *e, const struct td_xfer_event *v)
{
    if (v->kind == TD_XFER_PATH_CHOSEN) return;
    uint32_t job = (uint32_t)(v->user % SOAK_JOBS);
    struct soak_job *j = &e->s->job[job];
    struct end_job *mine = &e->job[job];
    bool of_op = v->kind == TD_XFER_OP_DONE || v->kind == TD_XFER_OP_FAILED;
    struct soak_message m = {.verb = SOAK_EVENT,
                             .job = job,
                             .id = v->id,
                             .user = v->user,
                             .status = v->status,
                             .kind = v->kind,
                             .path = v->path,
                             .bytes = v->bytes};
    memcpy(m.text, v->reason, sizeof v->reason);
    if (v->user != (of_op ? mine->op_user : mine->slot_user) ||
        v->id != (of_op ? mine->op : mine->slot)) {
        violation(e, v->user, "twice", "event %d of %d, which is not live here", (int32_t)v->kind,
                  (int32_t)v->id);
        return;
    }
    switch (v->kind) {
    case TD_XFER_SLOT_READY:
        on_ready(e, v, j);
        mine->ready = true;
        if (soak_breaks(e->s, BREAK_LOST_READY)) m.kind = TD_XFER_SLOT_FAILED;
        break;
    case TD_XFER_SLOT_FREE:
        if (soak_breaks(e->s, BREAK_HUNG_SLOT)) return;
        on_free(e, v, j, mine->ready);
        mine->slot_user = 0;
        if (soak_breaks(e->s, BREAK_TWICE)) tell(e, &m);
        break;
    case TD_XFER_OP_DONE:
    case TD_XFER_OP_FAILED:
        if (soak_breaks(e->s, BREAK_HUNG_OP)) return;
        on_op_end(e, v, j, mine->replay);
        mine->op_user = 0;
        break;
    case TD_XFER_SLOT_FAILED:
    case TD_XFER_PATH_CHOSEN:
    case TD_XFER_PEER_REFUSED:
        break;
    }
    tell(e, &m);
}

void soak_end_run(struct soak_shared *s, uint32_t end)
{
    struct end *e = calloc(1, sizeof *e);
    struct td_xfer_event *events = calloc(16, sizeof *events);
    struct soak_message c;
    TD_ASSERT(e && events);
    e->s = s;
    e->me = &s->end[end];
    int fds = soak_count_fds();
    int64_t heap = soak_heap_bytes(), rss = 0;
    uint64_t n_turns = 0;
    bool stop = false;
    open_end(e);
    while (!stop) {
        bool any = false;
        while (!stop && soak_ring_get(&e->me->commands, &c)) {
            any = true;
            stop = c.verb == SOAK_CLOSE;
            if (!stop && e->x) obey(e, &c);
        }
        size_t n = e->x ? td_xfer_poll(e->x, events, 16) : 0;
        for (size_t i = 0; i < n; i++) on_event(e, &events[i]);
        if (++n_turns == 5000) rss = soak_rss_bytes();
        if (!any && !n) td_wakeup_wait(&e->me->wakeup, td_now_ns() + 50 * TD_NS_PER_MS);
    }
    struct soak_message m = {.verb = SOAK_CLOSED};
    e->me->leaks = (struct soak_leaks){.rss_growth_bytes = rss ? soak_rss_bytes() - rss : 0};
    if (e->x) {
        static _Thread_local uint8_t blob[TD_XFER_BLOB_MAX];
        uint32_t leaked;
        size_t bytes;
        if (s->broken == BREAK_SLOT_LEAK && e->me->is_receiver)
            m.status = td_xfer_grant(e->x, NULL, 0, TD_NEVER_NS, 0, &leaked, blob, &bytes, NULL);
        if (s->broken == BREAK_OP_LEAK && !e->me->is_receiver)
            m.status = td_xfer_op_start(e->x, s->job[0].blob, s->job[0].blob_bytes, TD_NEVER_NS, 0,
                                        &leaked, &m.n, NULL);
        td_xfer_stats(e->x, &e->me->stats);
        e->me->leaks.n_slots = e->me->stats.n_slots_used;
        e->me->leaks.n_ops = e->me->stats.n_ops_used;
    }
    td_xfer_close(e->x);
    td_fake_fabric_close(e->fabric);
    if (s->broken == BREAK_FD_LEAK && end == 0 && dup(1) < 0) m.n = 1;
    if (s->broken == BREAK_HEAP_LEAK && end == 0) {
        static void *volatile leaked;
        leaked = malloc(1u << 20);
        if (leaked) memset(leaked, 1, 1u << 20);
    }
    e->me->leaks.fds = soak_count_fds() - fds;
    e->me->leaks.heap_bytes = soak_heap_bytes() - heap;
    tell(e, &m);
    free(events);
    free(e);
}
