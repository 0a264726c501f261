/* xfer_test.c - one suite over tcp and shm, with both ends in this process and with either end
 * in a child process. Content is compared byte by byte; every destination block outside the
 * grant is poisoned before and compared after. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/random.h"
#include "common/base/sanitizers.h"
#include "common/transfer/tls.h"
#include "common/transfer/wire.h"
#include "tests/unit/tls_files.h"
#include "tests/unit/xfer_ask.h"

/* Making, poisoning and comparing blocks that no transfer needs is most of a test's cost: so many
   have the pools where a transfer has more than 12 of them, or random many */
#define N_BLOCKS 48
#define SOME_BLOCKS 16       /* where it has no more than 12 */
#define BLOCK_BYTES 24576    /* several per frame, and no power of two */
#define BIG_BYTES (9u << 18) /* three frames per block, the last not full */
#define FEW_BLOCKS 6         /* of large ones, where a transfer has no more than 5 */
/* of large ones, where one has MANY: it takes so long that something can happen in its middle */
#define MORE_BLOCKS 24
#define MANY 20
/* of what a thread that loses its core can spoil: one in three at a load of 16 on two cores */
#define MAX_TRIES 200
#define TIMEOUT_MS 1000 /* peer_timeout; every wait below is bounded by WAIT_MS */
/* where nobody's silence is the test: whose threads had no turn for a second is not silent, only
   on a busy machine */
#define CALM_MS 10000
/* for what hangs: with 45 others ready to run, 15 s were too few for a frame through a small
   socket, and 60 s for a transfer under ThreadSanitizer */
#define WAIT_MS 180000
#define POISON 0xdeadull

static char real_devices[2][64]; /* TANDEM_XFER_REAL=rxe0,rxe1: the sender's and the receiver's,
                                    over libibverbs */
static const char *program;
static uint32_t timeout_ms = TIMEOUT_MS;
/* and ops. Each has room for the most blocks that a grant may have, 1.5 MiB, and a sanitizer
   touches three times that */
#define N_SLOTS 4
static uint32_t n_slots = N_SLOTS;

/* Sanitizer builds run fewer rounds of the same tests. */
static bool is_short(void)
{
    const char *text = getenv("TANDEM_TEST_SHORT");
    return text && strcmp(text, "1") == 0;
}

static uint32_t normal_timeout_ms(void) { return real_devices[0][0] ? 5000 : TIMEOUT_MS; }

enum where { BOTH_HERE, SENDER_CHILD, RECEIVER_CHILD };

#ifdef TD_WITH_TSAN
#define UNDER_TSAN true
#else
#define UNDER_TSAN false
#endif

struct variant {
    enum td_xfer_path path;
    enum where where;
    const char *name; /* "" or what is special */
    uint32_t lanes, digest_every;
    const char *fabric; /* rdma: more options of the fake */
    bool tls;
    bool pull;          /* rdma: what is submitted from block 0 on is left to the receiver
                           to READ */
    const char *device; /* NULL: pools of the host's; else of a fake device, which is so */
};

/* The short form runs all of a test's points on the plain variant of each path, and one in three
 * on the special ones: others on each. */
static bool is_left_out(const struct variant *v, int point)
{
    return is_short() && v->name[0] && ((size_t)point + strlen(v->name)) % 3;
}

static char fabric_path[64];          /* of each test anew */
static const char *child_fabric = ""; /* rdma: options of the child's NIC alone */
static bool small_sockets;            /* tcp: of receivers opened meanwhile */

struct pair {
    struct variant v;
    struct node *p, *d; /* sender, receiver */
    uint64_t block_bytes;
    int32_t n_blocks; /* of either pool */
    uint16_t port;    /* receiver's */
    uint64_t seed;
};

/* --- certificates: those of two workers and of a stranger by one CA, one of another CA -------- */

#ifdef TD_HAVE_OPENSSL
static const bool have_tls = true;
static const char *const tls_names[] = {"ca",       "other",   "prefill", "decode",
                                        "stranger", "foreign", "live"};

static int make_certificates(void **state)
{
    (void)state;
    tls_files_open();
    struct tls_files_id ca =
        tls_files_make(NULL, &(struct tls_files_make){.name = "ca", .ca = true});
    struct tls_files_id other =
        tls_files_make(NULL, &(struct tls_files_make){.name = "other", .ca = true});
    for (size_t i = 2; i + 1 < sizeof tls_names / sizeof tls_names[0]; i++) { /* "live" is a copy */
        struct tls_files_id id = tls_files_make(strcmp(tls_names[i], "foreign") == 0 ? &other : &ca,
                                                &(struct tls_files_make){.name = tls_names[i]});
        tls_files_free(&id);
    }
    tls_files_free(&ca);
    tls_files_free(&other);
    return 0;
}

static int remove_certificates(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof tls_names / sizeof tls_names[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.crt", tls_names[i]);
        unlink(tls_files_in(name));
        snprintf(name, sizeof name, "%s.key", tls_names[i]);
        unlink(tls_files_in(name));
    }
    return tls_files_close();
}
#else
static const bool have_tls = false;
#define make_certificates NULL
#define remove_certificates NULL
#endif

static void as_identity(struct node_command *c, const char *name, const char *ca)
{
    char ca_file[64];
    snprintf(ca_file, sizeof ca_file, "%s.crt", ca);
    snprintf(c->tls, sizeof c->tls, "%s", tls_files_in(name));
    snprintf(c->tls_ca, sizeof c->tls_ca, "%s", tls_files_in(ca_file));
}

/* tcp: sends that are not copied, though it is this host. */
static bool is_zerocopy(const struct variant *v)
{
    return v->name && strstr(v->name, "zero copy"); /* paths_are_chosen_openly names none */
}

/* Linux has had it since 4.14; qemu's emulation has not, and what is sent there is copied. */
static bool host_has_zerocopy(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    assert_true(fd >= 0);
    bool has = setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0;
    close(fd);
    return has;
}

static struct node_command open_command(const struct pair *t, uint16_t port, bool receiver)
{
    struct node_command c = {.verb = NODE_OPEN,
                             .path = t->v.path,
                             .port = port,
                             .shareable = true,
                             .max_slots = n_slots,
                             .max_ops = n_slots,
                             .timeout_ms = timeout_ms,
                             .block_bytes = t->block_bytes,
                             .layout_hash = 0x1a70,
                             .n_blocks = t->n_blocks,
                             .lanes = t->v.lanes,
                             .digest_every = t->v.digest_every,
                             .small_sockets = receiver && small_sockets};
    if (t->v.path == TD_XFER_PATH_RDMA) {
        if (real_devices[0][0])
            snprintf(c.fabric, sizeof c.fabric, "real:%s", real_devices[receiver]);
        else
            snprintf(c.fabric, sizeof c.fabric, "path=%s,retry_ms=20%s", fabric_path, t->v.fabric);
        /* 4.096 us x 2^12 = 17 ms make the provider in memory repeat a lost request soon. An
         * emulated device that waits for its processor answers later than that, and Soft-RoCE's
         * receiver may refuse what its sender then repeats ("remote invalid request"): 4.3 s.
         * Lost packets over Soft-RoCE are tests/rdma/test_rdma_cluster.py's. */
        c.ib_timeout = real_devices[0][0] ? 20 : 12;
        c.ib_retry = 3;
        c.rnr_never_waits = true;
        c.windows = strstr(t->v.name, "windows") != NULL;
        c.pull = t->v.pull;
    }
    size_t n = strlen(c.fabric);
    if (receiver ? t->v.where == RECEIVER_CHILD : t->v.where == SENDER_CHILD)
        snprintf(c.fabric + n, sizeof c.fabric - n, "%s", child_fabric);
    if (t->v.device) snprintf(c.device, sizeof c.device, "%s", t->v.device);
    if (is_zerocopy(&t->v)) c.zerocopy = TD_XFER_ZEROCOPY_ON;
    if (t->v.tls) as_identity(&c, receiver ? "decode" : "prefill", "ca");
    return c;
}

/* The poison of a block depends on its number. */
static void poison(struct pair *t, const int32_t *ids, int32_t n)
{
    struct node_command c = {.verb = NODE_FILL, .seed = POISON, .by_id = true, .n = n};
    memcpy(c.ids, ids, (size_t)n * sizeof ids[0]);
    ask(t->d, &c);
}

static void poison_all(struct pair *t)
{
    int32_t ids[N_BLOCKS];
    for (int32_t i = 0; i < t->n_blocks; i++) ids[i] = i;
    poison(t, ids, t->n_blocks);
}

static void pair_open_of(struct pair *t, const struct variant *v, uint64_t block_bytes,
                         int32_t n_blocks)
{
    *t = (struct pair){.v = *v, .block_bytes = block_bytes, .n_blocks = n_blocks, .seed = 77};
    static int n_fabrics;
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-xfer-test-%d-%d", (int)getpid(),
             n_fabrics++);
    t->p = v->where == SENDER_CHILD ? node_spawn(program) : node_local();
    t->d = v->where == RECEIVER_CHILD ? node_spawn(program) : node_local();
    struct node_command c = open_command(t, 0, true);
    struct node_reply r = ask(t->d, &c);
    if (r.status) fail_msg("receiver: %s", r.msg);
    t->port = r.port;
    c = open_command(t, 0, false);
    r = ask(t->p, &c);
    if (r.status) fail_msg("sender: %s", r.msg);
    poison_all(t);
}

static void pair_open(struct pair *t, const struct variant *v, uint64_t block_bytes)
{
    pair_open_of(t, v, block_bytes, SOME_BLOCKS);
}

static void pair_open_calm(struct pair *t, const struct variant *v, uint64_t block_bytes,
                           int32_t n_blocks)
{
    timeout_ms = CALM_MS;
    pair_open_of(t, v, block_bytes, n_blocks);
    timeout_ms = normal_timeout_ms();
}

static void pair_close(struct pair *t)
{
    node_free(t->p);
    node_free(t->d);
    unlink(fabric_path);
}

/* A grant of n blocks: 5, 12, 19, ... mod the blocks of the pool (7 and 48, or 16, have no
 * common factor), so that neighbours in the grant are none in the pool. */
struct transfer {
    int32_t n;
    int32_t src[NODE_MAX_IDS], dst[NODE_MAX_IDS];
    uint64_t seed;
    uint32_t slot, op;
    struct node_reply grant;
};

static void grant_from(struct pair *t, struct transfer *m, int32_t first, int32_t n,
                       uint64_t deadline_ms)
{
    struct node_command c = {.verb = NODE_GRANT, .n = n, .deadline_ms = deadline_ms, .user = 1000};
    m->n = n;
    m->seed = t->seed += 1000;
    for (int32_t i = 0; i < n; i++) {
        m->dst[i] = c.ids[i] = (5 + 7 * (first + i)) % t->n_blocks;
        m->src[i] = (11 + 13 * (first + i)) % t->n_blocks;
    }
    m->grant = ask(t->d, &c);
    if (m->grant.status) fail_msg("grant: %s", m->grant.msg);
    m->slot = m->grant.id;
}

static void grant(struct pair *t, struct transfer *m, int32_t n, uint64_t deadline_ms)
{
    grant_from(t, m, 0, n, deadline_ms);
}

static void op(struct pair *t, struct transfer *m, uint64_t deadline_ms)
{
    struct node_command c = {.verb = NODE_OP,
                             .deadline_ms = deadline_ms,
                             .user = 2000,
                             .blob_bytes = m->grant.blob_bytes};
    memcpy(c.blob, m->grant.blob, c.blob_bytes);
    struct node_reply r = ask(t->p, &c);
    if (r.status) fail_msg("op: %s", r.msg);
    assert_int_equal(r.n, m->n);
    m->op = r.id;
    struct node_command fill = {.verb = NODE_FILL, .seed = m->seed, .n = m->n};
    memcpy(fill.ids, m->src, sizeof fill.ids);
    ask(t->p, &fill);
}

static struct node_command submit_command(const struct transfer *m, int32_t first, int32_t n,
                                          bool final)
{
    struct node_command c = {.verb = NODE_SUBMIT,
                             .id = m->op,
                             .first = first,
                             .n = n,
                             .final = final,
                             .note_bytes = final ? 10 : 0};
    memcpy(c.note, "first=1234", 10);
    memcpy(c.ids, m->src + first, (size_t)n * sizeof c.ids[0]);
    return c;
}

static td_status submit(struct pair *t, struct transfer *m, int32_t first, int32_t n, bool final)
{
    struct node_command c = submit_command(m, first, n, final);
    if (t->v.pull && first == 0 && n > 1 && !final) c.verb = NODE_SUBMIT_PULL;
    return ask(t->p, &c).status;
}

/* The granted blocks hold the source's bytes; with `content` false they may hold anything. All
 * others hold the poison. */
static void check_pool(struct pair *t, const struct transfer *m, bool content)
{
    bool granted[N_BLOCKS] = {0};
    for (int32_t i = 0; i < m->n; i++) granted[m->dst[i]] = true;
    if (content) {
        struct node_command c = {.verb = NODE_CHECK, .seed = m->seed, .n = m->n};
        memcpy(c.ids, m->dst, sizeof c.ids);
        struct node_reply r = ask(t->d, &c);
        if (!r.ok) fail_msg("grant block %d differs", r.n);
    }
    struct node_command c = {.verb = NODE_CHECK, .seed = POISON, .by_id = true};
    for (int32_t i = 0; i < t->n_blocks; i++)
        if (!granted[i]) c.ids[c.n++] = i;
    struct node_reply r = ask(t->d, &c);
    if (!r.ok) fail_msg("block %d was written and is not in the grant", c.ids[r.n]);
}

static void give_back(struct pair *t, uint32_t slot)
{
    struct node_command c = {.verb = NODE_REVOKE, .id = slot};
    ask(t->d, &c);
}

static void cancel(struct pair *t, uint32_t id)
{
    struct node_command c = {.verb = NODE_CANCEL, .id = id};
    ask(t->p, &c);
}

static struct td_xfer_stats stats(struct node *n)
{
    struct node_command c = {.verb = NODE_STATS};
    return ask(n, &c).stats;
}

/* For how long the node's threads have been ready to run and have not run, as the kernel counts
 * it. */
static uint64_t starved_ns(const struct node *n)
{
    char name[64];
    uint64_t all_ns = 0;
    snprintf(name, sizeof name, "/proc/%d/task", (int)(node_pid(n) ? node_pid(n) : getpid()));
    DIR *threads = opendir(name);
    for (struct dirent *e; threads && (e = readdir(threads));) {
        char path[sizeof name + sizeof e->d_name + 16];
        unsigned long long ran_ns, waited_ns;
        snprintf(path, sizeof path, "%s/%s/schedstat", name, e->d_name);
        FILE *f = fopen(path, "re");
        if (f && fscanf(f, "%llu %llu", &ran_ns, &waited_ns) == 2) all_ns += waited_ns;
        if (f) fclose(f);
    }
    if (threads) closedir(threads);
    return all_ns;
}

static void whole(struct pair *t, int32_t n)
{
    struct transfer m;
    grant(t, &m, n, WAIT_MS);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, n / 2, false), TD_OK);
    assert_int_equal(submit(t, &m, n / 2, n - n / 2, true), TD_OK);
    struct td_xfer_event e = event(t->d);
    if (e.kind != TD_XFER_SLOT_READY) {
        /* "silent for too long" is a fault only of a side that had a processor */
        uint64_t ms = (starved_ns(t->d) + starved_ns(t->p)) / TD_NS_PER_MS;
        fail_msg("event %d: %s (%llu ms of waiting for a processor since both ends began)",
                 (int)e.kind, e.reason, (unsigned long long)ms);
    }
    assert_int_equal(e.id, m.slot);
    assert_int_equal(e.user, 1000);
    assert_int_equal(e.path, t->v.path ? t->v.path : TD_XFER_PATH_SHM);
    assert_int_equal(e.bytes, (uint64_t)n * t->block_bytes);
    assert_int_equal(e.note_bytes, 10);
    assert_memory_equal(e.note, "first=1234", 10);
    check_pool(t, &m, true);
    e = event(t->p);
    if (e.kind != TD_XFER_OP_DONE) fail_msg("event %d: %s", (int)e.kind, e.reason);
    assert_int_equal(e.id, m.op);
    assert_int_equal(e.user, 2000);
    assert_int_equal(e.bytes, (uint64_t)n * t->block_bytes);
    assert_int_equal(e.path, t->v.path ? t->v.path : TD_XFER_PATH_SHM);
    give_back(t, m.slot);
    expect(t->d, TD_XFER_SLOT_FREE, TD_OK);
    poison(t, m.dst, n);
}

/* Nothing is left behind on either side. */
static void check_idle(struct pair *t)
{
    assert_int_equal(stats(t->d).n_slots_used, 0);
    assert_int_equal(stats(t->p).n_ops_used, 0);
}

static void transfers_arrive_whole(void **state)
{
    struct pair t;
    pair_open_calm(&t, *state, BLOCK_BYTES, N_BLOCKS);
    for (int i = 0; i < 5; i++) whole(&t, 1 + 9 * i);
    whole(&t, 0);
    check_idle(&t);
    assert_int_equal(stats(t.d).bytes_pulled > 0, t.v.pull);
    assert_int_equal(stats(t.p).n_zerocopy > 0, is_zerocopy(&t.v) && host_has_zerocopy());
    assert_int_equal(stats(t.d).n_stale_frames + stats(t.d).n_bad_frames + stats(t.p).n_bad_frames,
                     0);
    pair_close(&t);
}

/* The time of a transfer is what it took from the first submit on, on every path: the receiver
 * of RDMA sees only the last words. It leaves out the fastest frame's flight, which others on
 * this machine may have held up; but never so much that the submits would lie closer together
 * than they did. */
static void times_begin_at_the_first_submit(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    for (int try = 0; try < 3; try++) {
        grant(&t, &m, 8, WAIT_MS);
        op(&t, &m, WAIT_MS);
        uint64_t before_first = td_now_ns();
        assert_int_equal(submit(&t, &m, 0, 4, false), TD_OK);
        uint64_t after_first = td_now_ns();
        /* the sender computes; and frames wait for the receiver's lock */
        while (td_now_ns() < after_first + 5 * TD_NS_PER_MS) stats(t.d);
        uint64_t before_last = td_now_ns();
        assert_int_equal(submit(&t, &m, 4, 4, true), TD_OK);
        struct td_xfer_event ready = event(t.d);
        uint64_t after_ready = td_now_ns();
        assert_int_equal(ready.kind, TD_XFER_SLOT_READY);
        struct td_xfer_event done = event(t.p);
        uint64_t after_done = td_now_ns();
        assert_int_equal(done.kind, TD_XFER_OP_DONE);
        /* the wire has whole microseconds */
        uint64_t apart = before_last - after_first, us = 2 * TD_NS_PER_US;
        assert_in_range(ready.tail_ns, 0, after_ready - before_last + us);
        assert_in_range(ready.at_ns, after_first, after_ready);
        assert_in_range(done.elapsed_ns, apart, after_done - before_first);
        assert_in_range(done.elapsed_ns - done.tail_ns, apart, after_done - before_first);
        assert_in_range(ready.elapsed_ns, apart - us, after_ready - before_first + us);
        assert_in_range(ready.elapsed_ns - ready.tail_ns, apart - us,
                        after_ready - before_first + us);
        check_pool(&t, &m, true);
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
        poison_all(&t);
    }
    check_idle(&t);
    pair_close(&t);
}

/* How long all threads of a process (0: this one) have been ready and had no core; 0 where the
 * kernel does not say. */
static uint64_t core_wait_of(pid_t pid)
{
    char path[64];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid ? (int)pid : (int)getpid());
    DIR *tasks = opendir(path);
    for (struct dirent *e; tasks && (e = readdir(tasks));) {
        char file[sizeof path + sizeof e->d_name + 16], text[96];
        snprintf(file, sizeof file, "%s/%s/schedstat", path, e->d_name);
        int fd = e->d_name[0] == '.' ? -1 : open(file, O_RDONLY | O_CLOEXEC);
        ssize_t k = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (fd >= 0) close(fd);
        text[k > 0 ? k : 0] = 0;
        char *second = strchr(text, ' '); /* ns on a core, ns waiting for one, turns */
        if (second) sum += strtoull(second, NULL, 10);
    }
    if (tasks) closedir(tasks);
    return sum;
}

static uint64_t core_wait_ns(const struct pair *t)
{
    pid_t p = node_pid(t->p), d = node_pid(t->d);
    return core_wait_of(p) + (p == d ? 0 : core_wait_of(d));
}

/* A clock that stands while threads of this process are ready and have no core. */
static uint64_t less_core_wait_ns(void) { return td_now_ns() - core_wait_of(0); }

/* Lets a moment of at most 100 us pass, at work or asleep: a progress thread looks for 20 to 50
 * us before it sleeps. */
static void moment(uint64_t *random)
{
    td_random_step(random);
    uint64_t ns = (*random >> 40) % 100000, start = td_now_ns();
    struct timespec ts = {.tv_nsec = (long)ns};
    if (*random >> 33 & 1) ppoll(NULL, 0, &ts, NULL);
    while (td_now_ns() - start < ns) {
    }
}

/* Wherever a wake meets the progress threads: looking, about to sleep, asleep. Their timers are
 * many seconds away, so what nobody wakes is late by as much. A transfer's time is counted less
 * what threads of both ends waited for a core meanwhile: on a busy machine that is no lost wake. */
static void no_wake_is_lost(void **state)
{
    struct pair t;
    struct transfer m;
    const char *seed_text = getenv("SEED"), *n_text = getenv("TANDEM_XFER_WAKES");
    uint64_t random = seed_text ? strtoull(seed_text, NULL, 0) : td_random_u64() >> 32,
             seed = random, worst = 0, worst_wait = 0;
    int n_total = n_text ? (int)strtol(n_text, NULL, 10) : is_short() ? 60 : 250;
    timeout_ms = 600000; /* a look at the timers each 37 s, heartbeats each 150 s */
    pair_open(&t, *state, BLOCK_BYTES);
    timeout_ms = normal_timeout_ms();
    whole(&t, 1);
    for (int i = 0; i < n_total; i++) {
        grant(&t, &m, 1 + i % 3, WAIT_MS);
        moment(&random);
        op(&t, &m, WAIT_MS);
        moment(&random);
        uint64_t waited = core_wait_ns(&t), start = td_now_ns();
        if (m.n > 1) {
            assert_int_equal(submit(&t, &m, 0, m.n - 1, false), TD_OK);
            moment(&random);
        }
        assert_int_equal(submit(&t, &m, m.n - 1, 1, true), TD_OK);
        expect(t.d, TD_XFER_SLOT_READY, TD_OK);
        expect(t.p, TD_XFER_OP_DONE, TD_OK);
        uint64_t spent = td_now_ns() - start;
        waited = core_wait_ns(&t) - waited;
        if (spent > waited && spent - waited > worst) worst = spent - waited;
        if (waited > worst_wait) worst_wait = waited;
        if (spent > waited + TD_NS_PER_S)
            fail_msg("transfer %d took %.3f s, its threads waited %.3f s for a core; SEED=%" PRIu64,
                     i, (double)spent / 1e9, (double)waited / 1e9, seed);
        moment(&random);
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
    }
    if (n_text)
        printf("%d transfers, at worst %.1f ms, or %.1f ms of waiting for cores; SEED=%" PRIu64
               "\n",
               n_total, (double)worst / 1e6, (double)worst_wait / 1e6, seed);
    poison_all(&t);
    whole(&t, 3);
    check_idle(&t);
    pair_close(&t);
}

static void blocks_larger_than_a_frame_arrive_whole(void **state)
{
    struct pair t;
    pair_open_calm(&t, *state, BIG_BYTES, FEW_BLOCKS);
    whole(&t, 3);
    whole(&t, 5);
    check_idle(&t);
    pair_close(&t);
}

static void any_order_and_late_final(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    grant(&t, &m, 12, WAIT_MS);
    op(&t, &m, WAIT_MS);
    for (int32_t i = 11; i >= 0; i--) assert_int_equal(submit(&t, &m, i, 1, false), TD_OK);
    assert_int_equal(submit(&t, &m, 3, 1, false), TD_ERR_INVALID); /* twice */
    assert_int_equal(submit(&t, &m, 12, 1, false), TD_ERR_INVALID);
    bool any;
    event_within(t.d, 50, &any);
    assert_false(any); /* all bytes, but no FINAL */
    assert_int_equal(submit(&t, &m, 12, 0, true), TD_OK);
    expect(t.d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(&t, &m, true);
    expect(t.p, TD_XFER_OP_DONE, TD_OK);
    give_back(&t, m.slot);
    expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
    assert_int_equal(submit(&t, &m, 0, 0, true), TD_ERR_NOT_FOUND);
    /* FINAL before all blocks is the caller's mistake and says so */
    grant(&t, &m, 4, WAIT_MS);
    op(&t, &m, WAIT_MS);
    assert_int_equal(submit(&t, &m, 0, 3, true), TD_ERR_INVALID);
    cancel(&t, m.op);
    expect(t.p, TD_XFER_OP_FAILED, TD_ERR_CANCELLED);
    give_back(&t, m.slot);
    pair_close(&t);
}

/* The points at which something may happen to a transfer. */
enum point { ARMED, BOUND, HALF, ALL_BUT_FINAL, FINAL, N_POINTS };
static const char *const point_names[] = {"armed", "bound", "half", "all but final", "final"};

static void go_to(struct pair *t, struct transfer *m, enum point point, uint64_t d_ms,
                  uint64_t p_ms)
{
    grant(t, m, 10, d_ms);
    if (point == ARMED) return;
    op(t, m, p_ms);
    if (point >= HALF) submit(t, m, 0, 5, false);
    if (point >= ALL_BUT_FINAL) submit(t, m, 5, 5, false);
    if (point >= FINAL) submit(t, m, 10, 0, true);
}

/* On rdma the receiver's process does not see single bytes arrive; the writer sees that they
 * have. */
static uint64_t n_moved(struct pair *t)
{
    return t->v.path == TD_XFER_PATH_RDMA ? stats(t->p).bytes_sent : stats(t->d).bytes_received;
}

static void moved(struct pair *t, uint64_t want)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (n_moved(t) < want) {
        if (td_now_ns() > until) fail_msg("%" PRIu64 " bytes were not reached", want);
        poll(NULL, 0, 1);
    }
}

static td_status submit_part(struct pair *t, const struct transfer *m, int32_t first, int32_t n,
                             uint64_t offset, uint64_t n_bytes)
{
    struct node_command c = {.verb = NODE_SUBMIT_PART,
                             .id = m->op,
                             .first = first,
                             .n = n,
                             .offset = offset,
                             .n_bytes = n_bytes};
    memcpy(c.ids, m->src + first, (size_t)n * sizeof c.ids[0]);
    return ask(t->p, &c).status;
}

/* Layers first: parts of blocks go before the rest of them is there, and beside them whole ones. */
static void parts_arrive_whole(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    whole(&t, 2);
    for (int round = 0; round < 3; round++) {
        uint64_t third = t.block_bytes / 3, at = 0, before = n_moved(&t);
        grant(&t, &m, 12, WAIT_MS);
        op(&t, &m, WAIT_MS);
        for (int part = 0; part < 3; part++) {
            uint64_t n_bytes = part < 2 ? third : t.block_bytes - at;
            assert_int_equal(submit_part(&t, &m, 0, 8, at, n_bytes), TD_OK);
            assert_int_equal(submit_part(&t, &m, 3, 1, at, n_bytes), TD_ERR_INVALID); /* twice */
            /* not every byte is there */
            assert_int_equal(submit(&t, &m, 12, 0, true), TD_ERR_INVALID);
            /* with the sender awake, and with it asleep */
            if (round && part < 2) moved(&t, before + 8 * (at + n_bytes));
            at += n_bytes;
        }
        assert_int_equal(submit(&t, &m, 8, 4, round != 1), TD_OK); /* whole ones beside them */
        if (round == 1) assert_int_equal(submit(&t, &m, 12, 0, true), TD_OK);
        struct td_xfer_event e = event(t.d);
        if (e.kind != TD_XFER_SLOT_READY)
            fail_msg("round %d: event %d: %s", round, (int)e.kind, e.reason);
        assert_int_equal(e.bytes, 12 * t.block_bytes);
        check_pool(&t, &m, true);
        expect(t.p, TD_XFER_OP_DONE, TD_OK);
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
        check_idle(&t);
        poison_all(&t);
    }
    /* the sender gives up in the middle of blocks; the receiver does */
    for (int who = 0; who < 2; who++) {
        uint64_t before = n_moved(&t);
        grant(&t, &m, 6, WAIT_MS);
        op(&t, &m, WAIT_MS);
        assert_int_equal(submit_part(&t, &m, 0, 6, 0, t.block_bytes / 2), TD_OK);
        moved(&t, before + 6 * (t.block_bytes / 2));
        if (who == 0)
            cancel(&t, m.op);
        else
            give_back(&t, m.slot);
        assert_int_equal(event(t.p).kind, TD_XFER_OP_FAILED);
        assert_int_not_equal(
            submit_part(&t, &m, 0, 6, t.block_bytes / 2, t.block_bytes - t.block_bytes / 2), TD_OK);
        if (who == 0) assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FAILED);
        if (who == 0) give_back(&t, m.slot);
        assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
        check_idle(&t);
        poison_all(&t);
    }
    whole(&t, 5);
    pair_close(&t);
}

/* Waits until the receiver has counted what was submitted up to this point: only then the point
 * is reached on both sides. */
static void reached(struct pair *t, enum point point, uint64_t before)
{
    moved(t, before + (point >= HALF ? 5 * t->block_bytes : 0) +
                 (point >= ALL_BUT_FINAL ? 5 * t->block_bytes : 0));
}

static void end_at_every_point(void **state, enum node_verb verb, td_status status,
                               const char *reason)
{
    struct pair t;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    whole(&t, 3); /* a cancel before the first connection stands is not told to the receiver; its
                     deadline or its own abort ends that */
    for (enum point point = BOUND; point < N_POINTS; point++) {
        struct transfer m;
        go_to(&t, &m, point, WAIT_MS, WAIT_MS);
        struct node_command end = {.verb = verb, .id = m.op};
        ask(t.p, &end);
        cancel(&t, m.op); /* it has ended: nothing */
        struct td_xfer_event p = event(t.p), d;
        if (point < FINAL) assert_int_equal(p.kind, TD_XFER_OP_FAILED);
        if (p.kind == TD_XFER_OP_FAILED) assert_int_equal(p.status, status);
        /* The op's blocks are the caller's again: whatever they become, the slot must not turn
           READY with it. */
        struct node_command junk = {.verb = NODE_FILL, .seed = 999, .n = m.n};
        memcpy(junk.ids, m.src, sizeof junk.ids);
        ask(t.p, &junk);
        d = event(t.d);
        if (d.kind == TD_XFER_SLOT_READY) {
            assert_int_equal(point, FINAL);
            check_pool(&t, &m, true);
        } else {
            assert_int_equal(d.kind, TD_XFER_SLOT_FAILED);
            assert_int_equal(d.status, status);
            assert_non_null(strstr(d.reason, reason));
        }
        check_pool(&t, &m, false);
        give_back(&t, m.slot);
        give_back(&t, m.slot);
        struct td_xfer_event e = event(t.d);
        assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
        check_idle(&t);
        poison_all(&t);
    }
    whole(&t, 10);
    pair_close(&t);
}

static void cancel_at_every_point(void **state)
{
    end_at_every_point(state, NODE_CANCEL, TD_ERR_CANCELLED, "cancelled by the test");
}

/* "The request is finished" is told apart from a failure, and is as safe. */
static void finished_at_every_point(void **state)
{
    end_at_every_point(state, NODE_FINISHED, TD_ERR_FINISHED, "the request is finished");
}

static void revoke_at_every_point(void **state)
{
    struct pair t;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    for (enum point point = ARMED; point < N_POINTS; point++) {
        struct transfer m;
        go_to(&t, &m, point, WAIT_MS, 1000);
        give_back(&t, m.slot);
        struct td_xfer_event e = event(t.d);
        if (e.kind == TD_XFER_SLOT_READY && point == FINAL) e = event(t.d);
        assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
        poison_all(&t); /* from now on the blocks are somebody else's */
        if (point == ARMED) op(&t, &m, WAIT_MS);
        e = event(t.p);
        if (e.kind != TD_XFER_OP_DONE || point != FINAL) {
            assert_int_equal(e.kind, TD_XFER_OP_FAILED);
            if (e.status != TD_ERR_CANCELLED && e.status != TD_ERR_STALE)
                fail_msg("%s: status %d %s", point_names[point], e.status, e.reason);
        }
        struct transfer none = {.n = 0};
        check_pool(&t, &none, false);
        check_idle(&t);
    }
    whole(&t, 10);
    pair_close(&t);
}

static void deadlines_end_both_sides(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open(&t, *state, BLOCK_BYTES);
    for (enum point point = ARMED; point < FINAL; point++) {
        go_to(&t, &m, point, 100, WAIT_MS);
        struct td_xfer_event e = event(t.d);
        assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
        assert_int_equal(e.status, TD_ERR_DEADLINE);
        bool any;
        event_within(t.d, 20, &any);
        assert_false(any); /* FREE only after revoke */
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_DEADLINE);
        if (point > ARMED) {
            e = event(t.p);
            assert_int_equal(e.kind, TD_XFER_OP_FAILED);
            if (e.status != TD_ERR_DEADLINE && e.status != TD_ERR_STALE)
                fail_msg("status %d %s", e.status, e.reason);
        }
        poison_all(&t);
    }
    for (enum point point = BOUND; point < FINAL; point++) {
        go_to(&t, &m, point, WAIT_MS, 100);
        expect(t.p, TD_XFER_OP_FAILED, TD_ERR_DEADLINE);
        expect(t.d, TD_XFER_SLOT_FAILED, TD_ERR_DEADLINE);
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_DEADLINE);
    }
    check_idle(&t);
    pair_close(&t);
}

static void an_old_grant_opens_nothing(void **state)
{
    struct pair t;
    struct transfer old, now;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    for (int round = 0; round < 20; round++) { /* all slot numbers come round */
        grant(&t, &old, 4, WAIT_MS);
        give_back(&t, old.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
    }
    /* old.slot is armed again, for somebody else */
    for (int i = 0; i < N_SLOTS; i++) grant(&t, &now, 4, WAIT_MS);
    struct node_command c = {.verb = NODE_GRANT};
    assert_int_equal(ask(t.d, &c).status, TD_ERR_AGAIN);
    op(&t, &old, WAIT_MS);
    submit(&t, &old, 0, 4, true);
    struct td_xfer_event e = event(t.p);
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    assert_int_equal(e.status, TD_ERR_STALE);
    check_pool(&t, &now, false);
    assert_true(stats(t.d).n_stale_frames > 0);
    /* the new owner of the last slot is served as if nothing had been */
    op(&t, &now, WAIT_MS);
    assert_int_equal(submit(&t, &now, 0, 4, true), TD_OK);
    expect(t.d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(&t, &now, true);
    expect(t.p, TD_XFER_OP_DONE, TD_OK);
    pair_close(&t);
}

static void bad_grants_are_refused_by_name(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open_calm(&t, *state, BLOCK_BYTES, SOME_BLOCKS);
    grant(&t, &m, 4, WAIT_MS);
    struct node_command c = {.verb = NODE_OP, .blob_bytes = m.grant.blob_bytes};
    memcpy(c.blob, m.grant.blob, c.blob_bytes);
    struct td_xfer_grant_blob g;
    assert_int_equal(td_xfer_grant_decode(c.blob, c.blob_bytes, &g, NULL), TD_OK);
    for (uint32_t i = 0; i < c.blob_bytes; i++) { /* every byte counts */
        c.blob[i] ^= 0x40;
        assert_true(ask(t.p, &c).status < 0);
        c.blob[i] ^= 0x40;
    }
    c.blob_bytes--;
    assert_int_equal(ask(t.p, &c).status, TD_ERR_INVALID);
    c.blob_bytes++;
    struct td_xfer_grant_blob other = g;
    other.layout_hash++;
    td_xfer_grant_encode(&other, c.blob);
    struct node_reply r = ask(t.p, &c);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(r.msg, "layout"));
    /* A right grant with a wrong key: the receiver refuses the connection and the slot is as it
       was. */
    other = g;
    other.key[7] ^= 1;
    td_xfer_grant_encode(&other, c.blob);
    r = ask(t.p, &c);
    assert_int_equal(r.status, TD_OK);
    expect(t.p, TD_XFER_OP_FAILED, TD_ERR_PEER);
    assert_true(stats(t.d).n_refused_peers > 0);
    check_pool(&t, &m, false);
    op(&t, &m, WAIT_MS);
    assert_int_equal(submit(&t, &m, 0, 4, true), TD_OK);
    expect(t.d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(&t, &m, true);
    pair_close(&t);
}

/* How turns go round is proved by their count where there are no threads: xfer_core_test,
 * turns_follow_the_ordering_key. Here that every path asks the core for turns: where the large
 * transfer keeps the link until it is through, the small one's last byte never finds more of the
 * large one behind it than what other lanes have left of a block each. Bytes are counted, no
 * time: on a busy machine a thread may lose its core between the two submits, or before it looks
 * at the second, while the large one goes through. Such a try shows nothing about turns and does
 * not count. */
static void a_small_transfer_does_not_wait_for_a_large_one(void **state)
{
    struct pair t;
    struct transfer large, small;
    bool shown = false;
    pair_open_calm(&t, *state, BIG_BYTES, MORE_BLOCKS);
    uint64_t n_lanes = t.v.path != TD_XFER_PATH_TCP ? 1 : t.v.lanes ? t.v.lanes : 4;
    for (int try = 0; try < MAX_TRIES && !shown; try++) {
        grant(&t, &large, MANY, WAIT_MS);
        grant_from(&t, &small, MANY, 1, WAIT_MS); /* no block is in both, at either end */
        op(&t, &large, WAIT_MS);
        op(&t, &small, WAIT_MS);
        struct node_command c = submit_command(&large, 0, MANY, true);
        c.behind_id = small.op; /* both by one command, so that fewer tries are lost */
        c.n_behind = 1;
        c.ids[MANY] = small.src[0];
        assert_int_equal(ask(t.p, &c).status, TD_OK);
        struct td_xfer_event e = event(t.d);
        if (e.kind != TD_XFER_SLOT_READY)
            fail_msg("event %d of slot %u: %s; the sender: %s", (int)e.kind, e.id, e.reason,
                     event(t.p).reason);
        bool is_first = e.id == small.slot;
        uint64_t behind_bytes = is_first ? e.behind_bytes : 0;
        e = event(t.d);
        assert_int_equal(e.kind, TD_XFER_SLOT_READY);
        assert_int_equal(e.id, is_first ? large.slot : small.slot);
        for (int i = 0; i < 2; i++) {
            e = event(t.p);
            assert_int_equal(e.kind, TD_XFER_OP_DONE);
            /* one of the two sides says 0 */
            if (e.id == small.op && is_first) behind_bytes += e.behind_bytes;
        }
        shown = behind_bytes >= n_lanes * BIG_BYTES;
        give_back(&t, large.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
        give_back(&t, small.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_OK);
    }
    if (!shown)
        fail_msg(
            "in none of %d tries the small one was through while the large one had much to send",
            MAX_TRIES);
    check_idle(&t);
    pair_close(&t);
}

/* --- peers that die, stop or lie -------------------------------------------------------------- */

static void kill_at_every_point(void **state)
{
    const struct variant *v = *state;
    for (enum point point = ARMED; point < N_POINTS; point++) {
        if (is_left_out(v, (int)point)) continue;
        struct pair t;
        struct transfer m;
        pair_open_calm(&t, v, BLOCK_BYTES, SOME_BLOCKS); /* it is not the silence of the dead that
                                                         ends it */
        whole(&t, 3);
        uint64_t before = stats(t.d).bytes_received;
        /* before a peer is bound to the slot only its deadline ends it */
        go_to(&t, &m, point, point <= BOUND ? 3000 : WAIT_MS, WAIT_MS);
        reached(&t, point, before);
        if (v->where == SENDER_CHILD) {
            node_kill(t.p);
            uint64_t killed = less_core_wait_ns();
            struct td_xfer_event e = event(t.d);
            if (e.kind == TD_XFER_SLOT_READY) {
                assert_int_equal(point, FINAL);
                check_pool(&t, &m, true);
            } else {
                assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
                assert_int_equal(e.status,
                                 point == ARMED || (point == BOUND && e.status == TD_ERR_DEADLINE)
                                     ? TD_ERR_DEADLINE
                                     : TD_ERR_PEER);
            }
            if (point > BOUND)
                assert_true((int64_t)(less_core_wait_ns() - killed) < 2 * (int64_t)TD_NS_PER_S);
            check_pool(&t, &m, false);
            give_back(&t, m.slot);
            e = event(t.d);
            assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
            assert_int_equal(stats(t.d).n_slots_used, 0);
        } else {
            node_kill(t.d);
            uint64_t killed = less_core_wait_ns();
            if (point == ARMED) op(&t, &m, WAIT_MS);
            struct td_xfer_event e = event(t.p);
            if (e.kind == TD_XFER_OP_FAILED)
                assert_int_equal(e.status, TD_ERR_PEER);
            else
                assert_int_equal(point, FINAL);
            assert_true((int64_t)(less_core_wait_ns() - killed) < 2 * (int64_t)TD_NS_PER_S);
            assert_int_equal(stats(t.p).n_ops_used, 0);
        }
        pair_close(&t);
    }
}

/* Until the child is dead of itself. */
static void wait_dead(struct node *n, const char *point)
{
    siginfo_t info = {0};
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); !info.si_pid;
         poll(NULL, 0, 1)) {
        assert_int_equal(waitid(P_PID, (id_t)node_pid(n), &info, WEXITED | WNOHANG | WNOWAIT), 0);
        if (!info.si_pid && td_now_ns() > until) fail_msg("%s was not reached", point);
    }
    if (info.si_code != CLD_KILLED || info.si_status != SIGKILL)
        fail_msg("%s: the child ended by itself: %d", point, info.si_status);
}

/* The states that kill_at_every_point does not see, because its connection stands: a fault point
 * each, and where and on which variants it is reached. */
enum {
    AT_SENDER = 1,
    AT_RECEIVER = 2,
    ONLY_TLS = 4,
    ONLY_RDMA = 8,
    ONLY_SET_UP = 16,
    IN_SHORT = 32
};
static const struct kill_state {
    const char *name;
    unsigned flags;
} kill_states[] = {
    {"xfer_tls", AT_SENDER | AT_RECEIVER | ONLY_TLS},
    {"xfer_hello", AT_SENDER | AT_RECEIVER | IN_SHORT},
    {"xfer_offer", AT_SENDER | AT_RECEIVER | ONLY_SET_UP},
    {"xfer_rtr", AT_SENDER | AT_RECEIVER | ONLY_RDMA},
    {"xfer_rts", AT_SENDER | AT_RECEIVER | ONLY_RDMA},
    {"xfer_probe", AT_SENDER | AT_RECEIVER | ONLY_RDMA | IN_SHORT},
    {"xfer_verifying", AT_RECEIVER | IN_SHORT},
    {"xfer_revoking", AT_RECEIVER},
    {"xfer_stopping", AT_SENDER | IN_SHORT},
    {"xfer_fencing", AT_SENDER | AT_RECEIVER | ONLY_RDMA},
};

static bool has_state(const struct variant *v, unsigned flags)
{
    bool is_rdma = v->path == TD_XFER_PATH_RDMA,
         has_set_up = is_rdma || v->path == TD_XFER_PATH_CUDA_IPC;
    if (!(flags & (v->where == SENDER_CHILD ? AT_SENDER : AT_RECEIVER))) return false;
    if ((flags & ONLY_TLS && !v->tls) || (flags & ONLY_RDMA && !is_rdma)) return false;
    return !(flags & ONLY_SET_UP && !has_set_up) && !(is_short() && !(flags & IN_SHORT));
}

/* A pair whose child kills itself as it comes to the state. */
static void pair_open_to_die(struct pair *t, const struct variant *v, const char *at)
{
    char fault[64];
    snprintf(fault, sizeof fault, "%s:kill", at);
    setenv("TANDEM_FAULT", fault, 1);
    if (strcmp(at, "xfer_fencing") == 0) /* data; an answer to a probe */
        child_fabric =
            v->where == SENDER_CHILD ? ",fail_nth=6,fail_status=11" : ",fail_nth=1,fail_status=11";
    pair_open(t, v, BLOCK_BYTES);
    child_fabric = "";
    unsetenv("TANDEM_FAULT");
}

/* One transfer up to the child's death. */
static void transfer_into_death(struct pair *t, struct transfer *m, const char *at)
{
    grant(t, m, 12, WAIT_MS);
    struct node_command c = {
        .verb = NODE_OP, .deadline_ms = WAIT_MS, .user = 2000, .blob_bytes = m->grant.blob_bytes};
    memcpy(c.blob, m->grant.blob, c.blob_bytes);
    struct node_reply r = ask(t->p, &c); /* from here on a child may be gone: no answer is
                                            looked at */
    m->op = r.id;
    struct node_command fill = {.verb = NODE_FILL, .seed = m->seed, .n = m->n};
    memcpy(fill.ids, m->src, sizeof fill.ids);
    if (r.status == TD_OK) ask(t->p, &fill);
    submit(t, m, 0, 6, false);
    if (strcmp(at, "xfer_revoking") == 0) give_back(t, m->slot);
    submit(t, m, 6, 6, true);
    wait_dead(t->v.where == SENDER_CHILD ? t->p : t->d, at);
}

/* What the living side holds for the dead one is free soon. */
static void check_survivor(struct pair *t, struct transfer *m, const char *at)
{
    struct td_xfer_event e;
    if (t->v.where == SENDER_CHILD) {
        give_back(t, m->slot);
        do {
            e = event(t->d);
            if (e.kind == TD_XFER_SLOT_READY) check_pool(t, m, true);
        } while (e.kind != TD_XFER_SLOT_FREE);
        check_pool(t, m, false);
    } else {
        e = event(t->p);
        if (e.kind != TD_XFER_OP_FAILED) fail_msg("%s: event %d", at, (int)e.kind);
    }
}

/* The next transfer, with a child that takes the dead one's place, arrives. */
static void replace_dead(struct pair *t, const char *at)
{
    bool is_sender = t->v.where == SENDER_CHILD;
    struct node **dead = is_sender ? &t->p : &t->d;
    node_kill(*dead);
    node_free(*dead);
    *dead = node_spawn(program);
    struct node_command c = open_command(t, 0, !is_sender);
    struct node_reply r = ask(*dead, &c);
    if (r.status) fail_msg("%s: the next child: %s", at, r.msg);
    poison_all(t);
    check_idle(t);
    whole(t, 9);
    check_idle(t);
}

static void kill_in_every_state(void **state)
{
    const struct variant *v = *state;
    for (size_t i = 0; i < sizeof kill_states / sizeof kill_states[0]; i++) {
        if (!has_state(v, kill_states[i].flags)) continue;
        struct pair t;
        struct transfer m;
        pair_open_to_die(&t, v, kill_states[i].name);
        transfer_into_death(&t, &m, kill_states[i].name);
        check_survivor(&t, &m, kill_states[i].name);
        replace_dead(&t, kill_states[i].name);
        pair_close(&t);
    }
}

/* Takes a transfer to the point and stops the child there. A receiver stops first, so that
 * everything happens behind its back. */
static void stop_at(struct pair *t, struct transfer *m, enum point point)
{
    if (t->v.where == SENDER_CHILD) {
        uint64_t before = stats(t->d).bytes_received;
        /* bound may not have been told yet: the deadline ends it then */
        go_to(t, m, point, point == BOUND ? 3000 : 30000, 30000);
        reached(t, point, before);
        kill(node_pid(t->p), SIGSTOP);
        return;
    }
    grant(t, m, 10, 30000);
    kill(node_pid(t->d), SIGSTOP);
    waitpid(node_pid(t->d), NULL, WUNTRACED);
    op(t, m, 30000);
    if (point >= HALF) submit(t, m, 0, 5, false);
    if (point >= ALL_BUT_FINAL) submit(t, m, 5, 5, false);
    if (point >= FINAL) submit(t, m, 10, 0, true);
}

/* The side that is awake gives up, and its blocks get new content. */
static void give_up_stopped(struct pair *t, struct transfer *m, enum point point)
{
    struct node *awake = t->v.where == SENDER_CHILD ? t->d : t->p;
    struct td_xfer_event e = event(awake);
    if (e.kind == TD_XFER_SLOT_READY || e.kind == TD_XFER_OP_DONE)
        assert_int_equal(point, FINAL);
    else
        assert_true(e.status == TD_ERR_PEER || (point == BOUND && e.status == TD_ERR_DEADLINE));
    if (awake == t->p) {
        struct node_command junk = {.verb = NODE_FILL, .seed = 999, .n = m->n};
        memcpy(junk.ids, m->src, sizeof junk.ids);
        ask(t->p, &junk);
    } else if (e.kind == TD_XFER_SLOT_FAILED) {
        give_back(t, m->slot);
        e = event(t->d);
        assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
        poison_all(t);
    } else {
        check_pool(t, m, true);
    }
}

static void wake_receiver(struct pair *t, struct transfer *m)
{
    kill(node_pid(t->d), SIGCONT);
    struct td_xfer_event e = event(t->d);
    /* only ever with the right bytes */
    if (e.kind == TD_XFER_SLOT_READY)
        check_pool(t, m, true);
    else
        assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
    check_pool(t, m, false);
    give_back(t, m->slot);
    e = event(t->d);
    assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
    poison_all(t);
}

static void wake_sender(struct pair *t, struct transfer *m, enum point point)
{
    kill(node_pid(t->p), SIGCONT);
    struct td_xfer_event e = event(t->p);
    assert_true(e.kind == TD_XFER_OP_FAILED || e.kind == TD_XFER_OP_DONE);
    if (e.kind == TD_XFER_OP_DONE) {
        assert_int_equal(point, FINAL);
        give_back(t, m->slot);
        expect(t->d, TD_XFER_SLOT_FREE, TD_OK);
        poison_all(t);
    } else {
        struct transfer none = {.n = 0};
        check_pool(t, &none, false);
    }
}

/* The stopped side's peer gives up, its blocks get new content, and then the stopped side wakes:
 * it must not take anything wrong for right. */
static void stop_at_every_point(void **state)
{
    const struct variant *v = *state;
    for (enum point point = BOUND; point < N_POINTS; point++) {
        struct pair t;
        struct transfer m;
        pair_open(&t, v, BLOCK_BYTES);
        whole(&t, 3);
        stop_at(&t, &m, point);
        give_up_stopped(&t, &m, point);
        if (v->where == SENDER_CHILD)
            wake_sender(&t, &m, point);
        else
            wake_receiver(&t, &m);
        check_idle(&t);
        whole(&t, 10); /* and both go on */
        pair_close(&t);
    }
}

/* The socket is full in the middle of a frame when the op is cancelled: its blocks are free at
 * once, and the connection goes on. */
static void a_cancel_inside_a_frame_keeps_the_connection(void **state)
{
    struct pair t;
    struct transfer m;
    timeout_ms = 60000;   /* the receiver stands still for a while, and that is not what is tested
                             here */
    small_sockets = true; /* else they hold tens of megabytes */
    pair_open_of(&t, *state, BIG_BYTES, MORE_BLOCKS);
    small_sockets = false;
    timeout_ms = normal_timeout_ms();
    whole(&t, 1);
    grant(&t, &m, MANY, 4 * WAIT_MS);
    kill(node_pid(t.d), SIGSTOP);
    waitpid(node_pid(t.d), NULL, WUNTRACED);
    op(&t, &m, 4 * WAIT_MS);
    assert_int_equal(submit(&t, &m, 0, MANY, true), TD_OK);
    uint64_t sent = 0, quiet = 0;
    while (quiet < 50) { /* until the socket takes no more */
        poll(NULL, 0, 1);
        uint64_t now = stats(t.p).bytes_sent;
        quiet = now > t.block_bytes && now == sent ? quiet + 1 : 0;
        sent = now;
    }
    assert_true(sent < (uint64_t)MANY * BIG_BYTES);
    cancel(&t, m.op);
    expect(t.p, TD_XFER_OP_FAILED, TD_ERR_CANCELLED); /* while the receiver still sleeps */
    struct node_command junk = {.verb = NODE_FILL, .seed = 999, .n = m.n};
    memcpy(junk.ids, m.src, sizeof junk.ids);
    ask(t.p, &junk);
    kill(node_pid(t.d), SIGCONT);
    expect(t.d, TD_XFER_SLOT_FAILED, TD_ERR_CANCELLED);
    give_back(&t, m.slot);
    expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
    poison_all(&t);
    whole(&t, 3);
    assert_int_equal(stats(t.d).n_bad_frames, 0);
    assert_int_equal(stats(t.d).n_conns, 1);
    pair_close(&t);
}

/* The connection that this process dialled to the receiver and that is not the socket
 * `not_inode`; -1 when there is none. */
static int dialled_connection(const struct pair *t, ino_t not_inode, ino_t *ret_inode)
{
    for (int fd = 3; fd < 256; fd++) {
        union {
            struct sockaddr any;
            struct sockaddr_in in;
            struct sockaddr_un un;
        } a = {0};
        socklen_t n = sizeof a;
        struct stat s;
        /* By syscall(2): the endpoint's thread may close any of these meanwhile, which is fine
           here and an error to a sanitizer. */
        if (syscall(SYS_getpeername, fd, &a.any, &n) || syscall(SYS_fstat, fd, &s) ||
            s.st_ino == not_inode)
            continue;
        bool tcp = a.any.sa_family == AF_INET && ntohs(a.in.sin_port) == t->port;
        bool shm = a.any.sa_family == AF_UNIX && n > offsetof(struct sockaddr_un, sun_path) + 12 &&
                   memcmp(a.un.sun_path + 1, "tandem-xfer-", 12) == 0;
        if (!tcp && !shm) continue;
        *ret_inode = s.st_ino;
        return fd;
    }
    return -1;
}

/* Cuts the connection as a network would, once this attempt has sent its block: each attempt sends
 * it again. A receiver that has not heard of the last cut yet asks an attempt to come again, and
 * that one sends the block once more. *sent: what had been sent before, and has been now. */
static void cut_connection(struct pair *t, uint64_t *sent, ino_t *last)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS), now;
    while ((now = stats(t->p).bytes_sent) < *sent + BIG_BYTES && td_now_ns() < until)
        poll(NULL, 0, 1);
    assert_true(now >= *sent + BIG_BYTES);
    *sent = now;
    int fd = dialled_connection(t, *last, last);
    if (syscall(SYS_shutdown, fd, SHUT_RDWR))
        fail_msg("there is no connection to cut: %s", strerror(errno));
}

/* A slot waits an eighth of the time-out for the next attempt: long where one comes, however
 * slow the machine is, and short where none does. */
static void cut(const struct variant *v, uint32_t slot_waits_ms, int min_cuts, int max_cuts)
{
    struct pair t;
    struct transfer m;
    const int32_t n = 4; /* blocks: each attempt is cut behind the first of them, and the last
                            one sends all */
    timeout_ms = 8 * slot_waits_ms;
    pair_open_of(&t, v, BIG_BYTES, FEW_BLOCKS);
    timeout_ms = normal_timeout_ms();
    whole(&t, 1);
    for (int n_cuts = min_cuts; n_cuts <= max_cuts; n_cuts++) {
        if (is_left_out(v, n_cuts)) continue;
        ino_t last = 0;
        uint64_t sent = stats(t.p).bytes_sent;
        grant(&t, &m, n, 4 * WAIT_MS); /* its deadline is not what is tested here: in it lies the
                                          filling, too */
        op(&t, &m, 4 * WAIT_MS);
        for (int i = 0; i < n_cuts; i++) {
            if (i == 0) assert_int_equal(submit(&t, &m, 0, 1, false), TD_OK);
            cut_connection(&t, &sent, &last);
        }
        if (n_cuts < 3) assert_int_equal(submit(&t, &m, 1, n - 2, false), TD_OK);
        td_status status = submit(&t, &m, n - 1, 1, true);
        struct td_xfer_event e = event(t.d);
        if (n_cuts < 3) {
            assert_int_equal(status, TD_OK);
            if (e.kind != TD_XFER_SLOT_READY)
                fail_msg("%d cuts: event %d %s", n_cuts, (int)e.kind, e.reason);
            check_pool(&t, &m, true);
            expect(t.p, TD_XFER_OP_DONE, TD_OK);
        } else {
            assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
            assert_int_equal(e.status, TD_ERR_PEER);
            expect(t.p, TD_XFER_OP_FAILED, TD_ERR_PEER);
        }
        give_back(&t, m.slot);
        assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
        poison_all(&t);
    }
    whole(&t, 3);
    check_idle(&t);
    pair_close(&t);
}

/* A connection that breaks is not a peer that died: the op goes on with its next attempt, and
 * after the last one it fails. */
static void a_cut_connection_is_another_attempt(void **state)
{
    cut(*state, 10000, 1, 2);
    cut(*state, 1250, 3, 3);
}

/* For tests in which one peer stops for good and the other must not be taken for it. A peer may be
 * silent for many times what the most that is done without a word takes here and now: on a machine
 * with 45 ready threads, a program under ThreadSanitizer was silent for more than a second. */
static void pair_open_for_silence(struct pair *t, const struct variant *v, uint64_t block_bytes,
                                  int32_t n_blocks)
{
    pair_open_calm(t, v, block_bytes, n_blocks);
    uint64_t start = td_now_ns();
    whole(t, 1);
    poison_all(t);
    uint64_t ms = 20 * (td_now_ns() - start) / TD_NS_PER_MS;
    pair_close(t);
    if (ms > timeout_ms) timeout_ms = ms < CALM_MS ? (uint32_t)ms : CALM_MS;
    pair_open_of(t, v, block_bytes, n_blocks);
    timeout_ms = normal_timeout_ms();
}

/* One side stopped in the middle of a large transfer, again and again, at moments chosen by the
 * clock: both go on. */
static void stop_in_the_middle_of_bytes(void **state)
{
    const struct variant *v = *state;
    int n_ready = 0, n_failed = 0, n_rounds = is_short() ? 1 : 4;
    struct pair t;
    struct transfer m;
    pair_open_for_silence(&t, v, BIG_BYTES, MORE_BLOCKS);
    for (int round = 0; round < n_rounds; round++) {
        whole(&t, 1);
        uint64_t before = n_moved(&t);
        grant(&t, &m, MANY, WAIT_MS);
        op(&t, &m, WAIT_MS);
        assert_int_equal(submit(&t, &m, 0, MANY, true), TD_OK);
        /* somewhere in the first half; where exactly does not matter, but the slot must be bound */
        moved(&t, before + (uint64_t)round * (MANY / 8) * BIG_BYTES + 1);
        struct node *stopped = v->where == SENDER_CHILD ? t.p : t.d,
                    *awake = v->where == SENDER_CHILD ? t.d : t.p;
        kill(node_pid(stopped), SIGSTOP);
        waitpid(node_pid(stopped), NULL, WUNTRACED);
        struct td_xfer_event e = event(awake);
        if (awake == t.p) {
            struct node_command junk = {.verb = NODE_FILL, .seed = 999, .n = m.n};
            memcpy(junk.ids, m.src, sizeof junk.ids);
            ask(t.p, &junk);
        } else if (e.kind == TD_XFER_SLOT_FAILED) {
            give_back(&t, m.slot);
            e = event(t.d);
            assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
            poison_all(&t);
            n_failed++;
        }
        kill(node_pid(stopped), SIGCONT);
        struct td_xfer_event late = event(stopped);
        if (stopped == t.d) {
            if (late.kind == TD_XFER_SLOT_READY) {
                check_pool(&t, &m, true);
                n_ready++;
            } else {
                assert_int_equal(late.kind, TD_XFER_SLOT_FAILED);
                check_pool(&t, &m, false);
                n_failed++;
            }
            give_back(&t, m.slot);
            assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
        } else if (e.kind == TD_XFER_SLOT_READY) {
            check_pool(&t, &m, true);
            n_ready++;
            give_back(&t, m.slot);
            assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
        } else {
            struct transfer none = {.n = 0};
            check_pool(&t, &none, false);
        }
        poison_all(&t);
        whole(&t, 2);
        check_idle(&t);
    }
    pair_close(&t);
    print_message("stopped in the middle: %d ready, %d failed\n", n_ready, n_failed);
    assert_int_equal(n_ready + n_failed, n_rounds);
}

/* Stopped before the receiver has heard of the transfer: no peer is bound to the slot, so
 * nobody's silence ends it, but its deadline does. */
static void stop_before_the_slot_is_bound(void **state)
{
    const struct variant *v = *state;
    struct pair t;
    struct transfer m;
    pair_open(&t, v, BLOCK_BYTES);
    struct node *stopped = v->where == SENDER_CHILD ? t.p : t.d;
    grant(&t, &m, 4, 3 * timeout_ms);
    kill(node_pid(stopped), SIGSTOP);
    waitpid(node_pid(stopped), NULL, WUNTRACED);
    if (stopped == t.d) { /* what the sender says goes to a socket that nobody accepts */
        op(&t, &m, 30000);
        assert_int_equal(submit(&t, &m, 0, 4, true), TD_OK);
        expect(t.p, TD_XFER_OP_FAILED, TD_ERR_PEER);
        struct node_command junk = {.verb = NODE_FILL, .seed = 999, .n = m.n};
        memcpy(junk.ids, m.src, sizeof junk.ids);
        ask(t.p, &junk);
        kill(node_pid(stopped), SIGCONT);
    }
    expect(t.d, TD_XFER_SLOT_FAILED, TD_ERR_DEADLINE);
    give_back(&t, m.slot);
    assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
    if (stopped == t.p) kill(node_pid(stopped), SIGCONT);
    struct transfer none = {.n = 0};
    check_pool(&t, &none, false);
    check_idle(&t);
    whole(&t, 3);
    pair_close(&t);
}

static void a_restarted_receiver_refuses_old_grants(void **state)
{
    const struct variant *v = *state;
    struct pair t;
    struct transfer m;
    pair_open(&t, v, BLOCK_BYTES);
    whole(&t, 3);
    grant(&t, &m, 4, WAIT_MS);
    node_kill(t.d);
    struct node *dead = t.d;
    t.d = node_spawn(program);
    /* tcp: the same address; shm: a new name, so the old one is gone */
    struct node_command c = open_command(&t, t.port, true);
    struct node_reply r = ask(t.d, &c);
    if (r.status) fail_msg("restart: %s", r.msg);
    poison_all(&t);
    op(&t, &m, WAIT_MS);
    submit(&t, &m, 0, 4, true);
    struct td_xfer_event e = event(t.p);
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    bool by_name = v->path == TD_XFER_PATH_SHM || v->path == TD_XFER_PATH_CUDA_IPC ||
                   v->path == TD_XFER_PATH_SHM_STAGED;
    assert_int_equal(e.status, by_name ? TD_ERR_PEER : TD_ERR_STALE);
    if (v->path == TD_XFER_PATH_TCP)
        assert_non_null(strstr(e.reason, "another process has the address"));
    struct transfer none = {.n = 0};
    check_pool(&t, &none, false);
    whole(&t, 5);
    node_free(dead);
    pair_close(&t);
}

/* --- strangers on the port -------------------------------------------------------------------- */

static int dial(uint16_t port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* A stranger's channel over the socket of this number; NULL: it speaks in the clear. */
static struct td_xfer_tls_conn *channels[1024];

/* Shakes hands as this identity (NULL: no certificate) on a connected socket. False: refused; by
 * TLS 1.3's order that may show only at the first read. */
static bool encrypt(int fd, const char *name, const char *ca)
{
    struct td_xfer_tls *tls = NULL;
    struct td_err err = {0};
    char cert[64], key[64], ca_file[64];
    snprintf(cert, sizeof cert, "%s.crt", name ? name : "");
    snprintf(key, sizeof key, "%s.key", name ? name : "");
    snprintf(ca_file, sizeof ca_file, "%s.crt", ca);
    struct td_xfer_tls_config config = {.cert_file = name ? tls_files_in(cert) : NULL,
                                        .key_file = name ? tls_files_in(key) : NULL,
                                        .ca_file = tls_files_in(ca_file)};
    assert_true(fd >= 0 && fd < 1024);
    if (td_xfer_tls_open(&config, &tls, &err)) fail_msg("%s", err.msg);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    assert_int_equal(td_tls_conn_open(tls, fd, true, &channels[fd], &err), TD_OK);
    td_xfer_tls_close(tls);
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    td_status status;
    bool in, out;
    while ((status = td_tls_handshake(channels[fd], &in, &out, &err)) == TD_INPROGRESS &&
           td_now_ns() < until)
        poll(&(struct pollfd){.fd = fd, .events = (short)((in ? POLLIN : 0) | (out ? POLLOUT : 0))},
             1, 100);
    return status == TD_OK;
}

/* As recv, by the channel where there is one; waits for at most WAIT_MS. */
static ssize_t hear(int fd, void *to, size_t n)
{
    if (!channels[fd]) return recv(fd, to, n, 0);
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); td_now_ns() < until;) {
        ssize_t k = td_tls_recv(channels[fd], to, n);
        if (k >= 0 || errno != EAGAIN) return k;
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 100);
    }
    errno = EAGAIN;
    return -1;
}

static void hear_all(int fd, void *to, size_t n)
{
    for (size_t got = 0; got < n;) {
        ssize_t k = hear(fd, (uint8_t *)to + got, n - got);
        assert_true(k > 0);
        got += (size_t)k;
    }
}

static void say(int fd, const void *bytes, size_t n)
{
    if (channels[fd])
        td_tls_send(channels[fd], bytes, n);
    else
        send(fd, bytes, n, MSG_NOSIGNAL);
}

static void hang_up(int fd)
{
    td_tls_conn_close(channels[fd]);
    channels[fd] = NULL;
    close(fd);
}

/* A connection to the receiver as a peer of its cluster makes it. */
static int dial_peer(const struct pair *t)
{
    int fd = dial(t->port);
    if (t->v.tls) assert_true(encrypt(fd, "stranger", "ca"));
    return fd;
}

/* True when the other end closed the connection within WAIT_MS; everything it says before is
 * dropped. */
static bool is_closed(int fd)
{
    uint8_t bytes[4096];
    for (;;) {
        ssize_t k = hear(fd, bytes, sizeof bytes);
        if (k > 0) continue;
        return k == 0 || errno == ECONNRESET || errno == EPROTO;
    }
}

static void send_frame(int fd, struct td_xfer_frame f, const void *payload)
{
    uint8_t bytes[64 + TD_XFER_PAYLOAD_MAX];
    td_xfer_frame_encode(&f, bytes);
    if (payload) memcpy(bytes + 64, payload, f.length);
    say(fd, bytes, 64 + (payload ? f.length : 0));
}

/* Shakes hands as a well-behaved peer; returns the connection's tag. */
static uint64_t shake(int fd, const struct td_xfer_grant_blob *g)
{
    struct td_xfer_hello hello = {.incarnation = 1,
                                  .layout_hash = g->layout_hash,
                                  .block_bytes = g->block_bytes,
                                  .nonce = 42,
                                  .instance = "stranger"};
    send_frame(fd,
               (struct td_xfer_frame){
                   .type = TD_XFER_HELLO, .length = sizeof hello, .slot = TD_XFER_PATH_TCP},
               &hello);
    uint8_t header[64];
    hear_all(fd, header, 64);
    struct td_xfer_frame f;
    assert_int_equal(td_xfer_frame_decode(header, &f, NULL), TD_OK);
    assert_int_equal(f.type, TD_XFER_HELLO_ACK);
    assert_int_equal(f.status, 0);
    hear_all(fd, &hello, sizeof hello);
    static const uint8_t none[TD_XFER_KEY_BYTES];
    assert_memory_equal(hello.proof, none, sizeof none); /* tcp never says the proof */
    return hello.nonce ^ 42;
}

#define FAIR_BYTES (1u << 20)
#define FAIR_BLOCKS 16

/* A receiver by hand, which takes as much as the test lets it: n grants, all of the same blocks
 * of the sender's. */
struct taker {
    int listener, fd;
    struct td_xfer_grant_blob g;
    uint64_t n_bytes;
};

static void taker_open(struct taker *h, uint64_t incarnation)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    *h = (struct taker){.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), .fd = -1};
    assert_int_equal(bind(h->listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(h->listener, 4), 0);
    assert_int_equal(getsockname(h->listener, (struct sockaddr *)&a, &n), 0);
    h->g = (struct td_xfer_grant_blob){.generation = 1,
                                       .n_blocks = FAIR_BLOCKS,
                                       .incarnation = incarnation,
                                       .layout_hash = 0x1a70,
                                       .block_bytes = FAIR_BYTES,
                                       .port = ntohs(a.sin_port),
                                       .path = TD_XFER_PATH_TCP,
                                       .host = "127.0.0.1",
                                       .instance = "taker"};
}

static uint32_t taker_grant(struct taker *h, struct node *sender, uint32_t slot)
{
    struct node_command c = {.verb = NODE_OP, .user = 2000, .blob_bytes = sizeof h->g};
    h->g.slot = slot;
    td_xfer_grant_encode(&h->g, c.blob);
    struct node_reply r = ask(sender, &c);
    if (r.status) fail_msg("op: %s", r.msg);
    return r.id;
}

static void taker_shake(struct taker *h)
{
    uint8_t bytes[64 + sizeof(struct td_xfer_hello)];
    struct td_xfer_hello hello;
    h->fd = accept(h->listener, NULL, NULL);
    assert_true(h->fd >= 0);
    hear_all(h->fd, bytes, sizeof bytes);
    memcpy(&hello, bytes + 64, sizeof hello);
    hello.incarnation = h->g.incarnation;
    hello.nonce = 99;
    send_frame(h->fd, (struct td_xfer_frame){.type = TD_XFER_HELLO_ACK, .length = sizeof hello},
               &hello);
}

/* Three large transfers go to one peer and one as large to another. Both take what comes at the
 * same pace, so what each has got when the one has its all is the sender's choice: about as
 * much. Sockets hold some megabytes, and a turn is 4. */
static void peers_share_the_link(void **state)
{
    static uint8_t bytes[65536];
    (void)state;
    struct taker a, b;
    uint32_t ops[4];
    struct node *p = node_local();
    struct node_command c = {.verb = NODE_OPEN,
                             .path = TD_XFER_PATH_TCP,
                             .shareable = true,
                             .max_slots = 4,
                             .max_ops = 4,
                             .timeout_ms = 60000,
                             .lanes = 1,
                             .block_bytes = FAIR_BYTES,
                             .layout_hash = 0x1a70,
                             .n_blocks = FAIR_BLOCKS};
    struct node_reply r = ask(p, &c);
    if (r.status) fail_msg("sender: %s", r.msg);
    taker_open(&a, 7);
    taker_open(&b, 8);
    for (uint32_t i = 0; i < 3; i++) ops[i] = taker_grant(&a, p, i);
    ops[3] = taker_grant(&b, p, 0);
    taker_shake(&a);
    taker_shake(&b);
    for (int i = 0; i < 4; i++) {
        struct node_command submit_all = {
            .verb = NODE_SUBMIT, .id = ops[i], .n = FAIR_BLOCKS, .final = true};
        for (int32_t k = 0; k < FAIR_BLOCKS; k++) submit_all.ids[k] = k;
        assert_int_equal(ask(p, &submit_all).status, TD_OK);
    }
    const uint64_t all = (uint64_t)FAIR_BYTES * FAIR_BLOCKS;
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); b.n_bytes < all;) {
        struct pollfd fds[2] = {{.fd = a.fd, .events = POLLIN}, {.fd = b.fd, .events = POLLIN}};
        if (td_now_ns() > until)
            fail_msg("%" PRIu64 " and %" PRIu64 " bytes came", a.n_bytes, b.n_bytes);
        poll(fds, 2, 10);
        for (int i = 0; i < 2; i++) {
            struct taker *h = i ? &b : &a;
            ssize_t k = recv(h->fd, bytes, sizeof bytes, MSG_DONTWAIT);
            if (k == 0) fail_msg("peer %d: the sender has gone", i);
            if (k > 0) h->n_bytes += (uint64_t)k;
        }
    }
    if (a.n_bytes >= 2 * all)
        fail_msg("when one peer had %" PRIu64 " bytes the other had %" PRIu64, b.n_bytes,
                 a.n_bytes);
    node_free(p);
    close(a.fd);
    close(b.fd);
    close(a.listener);
    close(b.listener);
}

/* n transfers of a block each, whose ops all begin while the receiver is stopped. */
static void begin_together(struct pair *t, struct transfer *m, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) grant(t, &m[i], 1, WAIT_MS);
    kill(node_pid(t->d), SIGSTOP);
    waitpid(node_pid(t->d), NULL, WUNTRACED);
    for (uint32_t i = 0; i < n; i++) op(t, &m[i], WAIT_MS);
    for (uint32_t i = 0; i < n; i++) submit(t, &m[i], 0, 1, true); /* one that fails says why */
    kill(node_pid(t->d), SIGCONT);
    for (uint32_t i = 0; i < n; i++) expect(t->p, TD_XFER_OP_DONE, TD_OK);
    for (uint32_t i = 0; i < n; i++) expect(t->d, TD_XFER_SLOT_READY, TD_OK);
    for (uint32_t i = 0; i < n; i++) give_back(t, m[i].slot);
    for (uint32_t i = 0; i < n; i++) expect(t->d, TD_XFER_SLOT_FREE, TD_OK);
}

/* So many ops begin at once that their OPENs are more than a connection's memory: those that have
 * waited for it, and those that find it there. The connection was cut, with all of them. */
static void many_ops_begin_at_once(void **state)
{
    const uint32_t n = is_short() ? 320 : 600;
    static struct transfer m[600];
    struct pair t;
    n_slots = n;
    pair_open_calm(&t, *state, 1024, SOME_BLOCKS);
    n_slots = N_SLOTS;
    begin_together(&t, m, n);
    begin_together(&t, m, n);
    assert_int_equal(stats(t.p).n_bad_frames + stats(t.d).n_bad_frames, 0);
    check_idle(&t);
    pair_close(&t);
}

/* The frame with which a peer that holds grant `g` begins, of its connection with the tag. */
static struct td_xfer_frame open_frame_of(const struct td_xfer_grant_blob *g, uint64_t tag)
{
    return (struct td_xfer_frame){.type = TD_XFER_OPEN,
                                  .slot = g->slot,
                                  .generation = g->generation,
                                  .attempt = 1,
                                  .handle = 9,
                                  .length = 16,
                                  .conn = tag};
}

static struct td_xfer_frame data_frame_of(const struct td_xfer_grant_blob *g, uint64_t tag,
                                          uint32_t length)
{
    struct td_xfer_frame f = open_frame_of(g, tag);
    f.type = TD_XFER_DATA;
    f.length = length;
    return f;
}

static struct node_reply refusals_of(struct node *n)
{
    struct node_command c = {.verb = NODE_STATS};
    return ask(n, &c);
}

/* Garbage, and a request of another protocol. The first is told at once, and others of the same
 * second are counted. */
static void speak_no_protocol(struct pair *t, const uint8_t noise[static 256])
{
    int fd = dial_peer(t);
    say(fd, noise, 256);
    assert_true(is_closed(fd));
    hang_up(fd);
    struct node_reply told = refusals_of(t->d);
    assert_int_equal(told.n_refusals, 1);
    assert_non_null(strstr(told.refusal, "frame: magic is"));
    assert_non_null(strstr(told.refusal, "at 127.0.0.1:"));
    fd = dial_peer(t);
    say(fd, "GET / HTTP/1.1\r\nHost: here\r\n\r\n0123456789012345678901234567890123456789", 70);
    assert_true(is_closed(fd));
    hang_up(fd);
}

/* A frame out of turn: data without hello, hello twice, data without open, a foreign tag, a
 * length over the bound. */
static void speak_out_of_turn(struct pair *t, const struct td_xfer_grant_blob *g)
{
    int fd = dial_peer(t);
    send_frame(fd, open_frame_of(g, 0), g->key);
    assert_true(is_closed(fd));
    hang_up(fd);
    fd = dial_peer(t);
    uint64_t tag = shake(fd, g);
    struct td_xfer_hello again = {.nonce = 1};
    send_frame(fd,
               (struct td_xfer_frame){.type = TD_XFER_HELLO, .length = sizeof again, .conn = tag},
               &again);
    assert_true(is_closed(fd));
    hang_up(fd);
    fd = dial_peer(t);
    tag = shake(fd, g);
    send_frame(fd, open_frame_of(g, tag + 1), g->key);
    assert_true(is_closed(fd));
    hang_up(fd);
    fd = dial_peer(t);
    tag = shake(fd, g);
    send_frame(fd, data_frame_of(g, tag, 0x7fffffff), NULL);
    assert_true(is_closed(fd));
    hang_up(fd);
}

/* Data without open is read and dropped: no byte of it lands. Then a wrong key, one bit off. */
static void speak_without_the_key(struct pair *t, const struct td_xfer_grant_blob *g,
                                  const uint8_t noise[static 256])
{
    int fd = dial_peer(t);
    uint64_t tag = shake(fd, g);
    send_frame(fd, data_frame_of(g, tag, 256), noise);
    uint8_t key[TD_XFER_KEY_BYTES];
    memcpy(key, g->key, sizeof key);
    key[15] ^= 0x80;
    send_frame(fd, open_frame_of(g, tag), key);
    assert_true(is_closed(fd));
    hang_up(fd);
}

/* The right key, then data beyond the grant, or twice. */
static void break_a_grant(struct pair *t, bool twice, const uint8_t noise[static 256])
{
    struct transfer mine;
    struct td_xfer_grant_blob g;
    grant(t, &mine, 4, WAIT_MS);
    assert_int_equal(td_xfer_grant_decode(mine.grant.blob, mine.grant.blob_bytes, &g, NULL), TD_OK);
    int fd = dial_peer(t);
    uint64_t tag = shake(fd, &g);
    send_frame(fd, open_frame_of(&g, tag), g.key);
    struct td_xfer_frame f = data_frame_of(&g, tag, 256);
    f.offset = twice ? 0 : 4 * g.block_bytes - 255;
    send_frame(fd, f, noise);
    if (twice) send_frame(fd, f, noise);
    assert_true(is_closed(fd));
    hang_up(fd);
    expect(t->d, TD_XFER_SLOT_FAILED, TD_ERR_PEER);
    give_back(t, mine.slot);
    expect(t->d, TD_XFER_SLOT_FREE, TD_ERR_PEER);
    poison(t, mine.dst, 4);
}

static void strangers_are_refused(void **state)
{
    struct pair t;
    struct transfer m;
    struct td_xfer_grant_blob g;
    uint8_t noise[256];
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (uint8_t)(i * 37 + 11);
    pair_open(&t, *state, BLOCK_BYTES);
    grant(&t, &m, 4, WAIT_MS);
    assert_int_equal(td_xfer_grant_decode(m.grant.blob, m.grant.blob_bytes, &g, NULL), TD_OK);
    uint64_t start = td_now_ns();
    speak_no_protocol(&t, noise);
    speak_out_of_turn(&t, &g);
    speak_without_the_key(&t, &g, noise);
    for (int twice = 0; twice < 2; twice++) break_a_grant(&t, twice, noise);

    struct td_xfer_stats s = stats(t.d);
    assert_int_equal(s.n_bad_frames, 9); /* each of them, for what it did */
    assert_true(s.n_refused_peers >= 7);
    struct node_reply told = refusals_of(t.d);
    if (told.n_refusals > 1 + (td_now_ns() - start) / TD_NS_PER_S)
        fail_msg("%u refusals were told, more than one each second", told.n_refusals);
    check_pool(&t, &m, false);
    op(&t, &m, WAIT_MS); /* the honest sender is served */
    assert_int_equal(submit(&t, &m, 0, 4, true), TD_OK);
    expect(t.d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(&t, &m, true);
    pair_close(&t);
}

static void silent_connections_are_bounded(void **state)
{
    struct pair t;
    int fds[200];
    pair_open(&t, *state, BLOCK_BYTES);
    for (int i = 0; i < 200; i++) fds[i] = dial(t.port);
    whole(&t, 6); /* a newcomer pushes the oldest silent one out */
    assert_true(stats(t.d).n_conns <= 80);
    assert_true(stats(t.d).n_refused_peers >= 100);
    /* none of them is kept for ever */
    for (int i = 0; i < 200; i++) assert_true(is_closed(fds[i]));
    for (int i = 0; i < 200; i++) close(fds[i]);
    assert_int_equal(stats(t.d).n_conns, 1);
    pair_close(&t);
}

/* The grant's socket is not there (another host), or it is there and not the author's: tcp, and
 * the event says so. */
static void fall_back_to_tcp(const struct td_xfer_grant_blob *theirs, bool squatted)
{
    struct pair fresh; /* no connection yet, so the probe is made */
    struct transfer m;
    struct td_xfer_grant_blob g;
    pair_open(&fresh, &(struct variant){.path = TD_XFER_PATH_AUTO, .where = RECEIVER_CHILD},
              BLOCK_BYTES);
    grant(&fresh, &m, 4, WAIT_MS);
    assert_int_equal(td_xfer_grant_decode(m.grant.blob, m.grant.blob_bytes, &g, NULL), TD_OK);
    if (squatted)
        memcpy(g.shm_name, theirs->shm_name, sizeof g.shm_name);
    else
        memset(g.shm_name + 12, 'x', 8);
    td_xfer_grant_encode(&g, m.grant.blob);
    op(&fresh, &m, WAIT_MS);
    assert_int_equal(submit(&fresh, &m, 0, 4, true), TD_OK);
    struct td_xfer_event e = event(fresh.d);
    assert_int_equal(e.kind, TD_XFER_SLOT_READY);
    assert_int_equal(e.path, TD_XFER_PATH_TCP);
    check_pool(&fresh, &m, true);
    assert_int_equal(event(fresh.p).path, TD_XFER_PATH_TCP);
    pair_close(&fresh);
}

/* A side that names shm does not fall back. */
static void named_shm_stays_shm(void)
{
    struct pair shm;
    struct transfer m;
    pair_open(&shm, &(struct variant){.path = TD_XFER_PATH_SHM, .where = BOTH_HERE}, BLOCK_BYTES);
    grant(&shm, &m, 1, WAIT_MS);
    struct node *tcp = node_local();
    struct node_command c = open_command(&shm, 0, false);
    c.path = TD_XFER_PATH_TCP;
    assert_int_equal(ask(tcp, &c).status, TD_OK);
    struct node_command start = {.verb = NODE_OP, .blob_bytes = m.grant.blob_bytes};
    memcpy(start.blob, m.grant.blob, start.blob_bytes);
    struct node_reply r = ask(tcp, &start);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(r.msg, "only tcp"));
    node_free(tcp);
    pair_close(&shm);
}

static void paths_are_chosen_openly(void **state)
{
    (void)state;
    struct pair t;
    pair_open(&t, &(struct variant){.path = TD_XFER_PATH_AUTO, .where = RECEIVER_CHILD},
              BLOCK_BYTES);
    whole(&t, 4); /* checks that the event says shm */
    assert_true(stats(t.d).bytes_by_path[TD_XFER_PATH_SHM] > 0 &&
                stats(t.d).bytes_by_path[TD_XFER_PATH_TCP] == 0);

    struct pair imposter;
    pair_open(&imposter, &(struct variant){.path = TD_XFER_PATH_SHM, .where = RECEIVER_CHILD},
              BLOCK_BYTES);
    struct transfer foreign;
    grant(&imposter, &foreign, 1, WAIT_MS);
    struct td_xfer_grant_blob theirs;
    assert_int_equal(
        td_xfer_grant_decode(foreign.grant.blob, foreign.grant.blob_bytes, &theirs, NULL), TD_OK);
    for (int squatted = 0; squatted < 2; squatted++) fall_back_to_tcp(&theirs, squatted);
    pair_close(&imposter);
    pair_close(&t);
    named_shm_stays_shm();
}

/* --- many transfers with everything going wrong now and then ---------------------------------- */

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

#define SOAK_JOBS 8
#define JOB_BLOCKS (N_BLOCKS / SOAK_JOBS)

/* One transfer slot of the soak: it owns its own JOB_BLOCKS blocks in both pools, so contents
 * never overlap. */
struct job {
    bool slot_live, op_live, ready;
    struct transfer m;
    int32_t n_sent;
    uint32_t slot_ends, op_ends;
};

struct soak {
    struct pair t;
    struct job jobs[SOAK_JOBS];
    int n_total, n_started, n_ready, n_done, n_failed, live;
};

/* Grants blocks of this job, fills their source and starts the op: either may have a deadline
 * that it cannot keep. */
static void soak_begin(struct soak *s, int job)
{
    struct job *j = &s->jobs[job];
    *j = (struct job){.slot_live = true,
                      .op_live = true,
                      .m = {.n = (int32_t)rnd(JOB_BLOCKS + 1), .seed = s->t.seed += 1000}};
    struct transfer *m = &j->m;
    struct node_command c = {.verb = NODE_GRANT,
                             .n = m->n,
                             .user = (uint64_t)job,
                             .deadline_ms = rnd(20) ? WAIT_MS : 1 + rnd(5)};
    for (int32_t i = 0; i < m->n; i++) {
        m->dst[i] = c.ids[i] = job * JOB_BLOCKS + (i * 5 + 1) % JOB_BLOCKS;
        m->src[i] = job * JOB_BLOCKS + i;
    }
    m->grant = ask(s->t.d, &c);
    assert_int_equal(m->grant.status, TD_OK);
    m->slot = m->grant.id;
    c = (struct node_command){.verb = NODE_FILL, .seed = m->seed, .n = m->n};
    memcpy(c.ids, m->src, sizeof m->src);
    ask(s->t.p, &c);
    c = (struct node_command){.verb = NODE_OP,
                              .user = (uint64_t)job,
                              .deadline_ms = rnd(20) ? WAIT_MS : 1 + rnd(5),
                              .blob_bytes = m->grant.blob_bytes};
    memcpy(c.blob, m->grant.blob, c.blob_bytes);
    struct node_reply r = ask(s->t.p, &c);
    assert_int_equal(r.status, TD_OK);
    m->op = r.id;
    s->n_started++;
    s->live++;
}

/* Some of the blocks that are left; with the last of them, the note. */
static void soak_submit(struct soak *s, struct job *j)
{
    int32_t n = (int32_t)rnd((uint32_t)(j->m.n - j->n_sent) + 1);
    bool final = j->n_sent + n == j->m.n;
    struct node_command c = {.verb = NODE_SUBMIT,
                             .id = j->m.op,
                             .first = j->n_sent,
                             .n = n,
                             .final = final,
                             .note_bytes = final ? 8 : 0};
    memcpy(c.ids, j->m.src + j->n_sent, (size_t)n * sizeof c.ids[0]);
    memcpy(c.note, &j->m.seed, 8);
    td_status status = ask(s->t.p, &c).status;
    assert_true(status == TD_OK || status == TD_ERR_DEADLINE || status == TD_ERR_CANCELLED ||
                status == TD_ERR_PEER || status == TD_ERR_STALE);
    j->n_sent = final ? j->m.n + 1 : j->n_sent + n;
}

static void soak_slot_event(struct soak *s, const struct td_xfer_event *e)
{
    struct job *j = &s->jobs[e->user];
    assert_true(j->slot_live && e->id == j->m.slot);
    if (e->kind == TD_XFER_SLOT_READY) {
        assert_false(j->ready);
        j->ready = true;
        s->n_ready++;
        assert_memory_equal(e->note, &j->m.seed, 8);
        struct node_command c = {.verb = NODE_CHECK, .seed = j->m.seed, .n = j->m.n};
        memcpy(c.ids, j->m.dst, sizeof j->m.dst);
        struct node_reply r = ask(s->t.d, &c);
        if (!r.ok) fail_msg("job %d: grant block %d of %d is wrong", (int)e->user, r.n, j->m.n);
        give_back(&s->t, j->m.slot);
    } else if (e->kind == TD_XFER_SLOT_FAILED) {
        assert_false(j->ready);
        assert_int_equal(j->slot_ends++, 0);
        give_back(&s->t, j->m.slot);
    } else {
        assert_int_equal(e->kind, TD_XFER_SLOT_FREE);
        j->slot_live = false;
        /* Poison what was granted: a late write would show in the next check of this job's
           neighbours or at the end. */
        int32_t ids[JOB_BLOCKS];
        for (int32_t i = 0; i < JOB_BLOCKS; i++) ids[i] = (int32_t)e->user * JOB_BLOCKS + i;
        poison(&s->t, ids, JOB_BLOCKS);
        if (!j->op_live) s->live--;
    }
}

static void soak_op_event(struct soak *s, const struct td_xfer_event *e)
{
    struct job *j = &s->jobs[e->user];
    assert_true(j->op_live && e->id == j->m.op);
    assert_int_equal(j->op_ends++, 0);
    j->op_live = false;
    j->n_sent = j->m.n + 1;
    if (e->kind == TD_XFER_OP_DONE)
        s->n_done++;
    else
        s->n_failed++;
    /* the source changes at once */
    struct node_command c = {.verb = NODE_FILL, .seed = 4242, .n = j->m.n};
    memcpy(c.ids, j->m.src, sizeof j->m.src);
    ask(s->t.p, &c);
    if (!j->slot_live) s->live--;
}

/* One thing happens to a job by chance. */
static void soak_act(struct soak *s)
{
    int job = (int)rnd(SOAK_JOBS);
    struct job *j = &s->jobs[job];
    if (!j->slot_live && !j->op_live) {
        if (s->n_started == s->n_total) return;
        soak_begin(s, job);
    } else if (j->op_live && j->n_sent <= j->m.n) {
        soak_submit(s, j);
    }
    uint32_t fault = rnd(400);
    if (fault < 8 && j->op_live)
        cancel(&s->t, j->m.op);
    else if (fault < 16 && j->slot_live)
        give_back(&s->t, j->m.slot);
}

static void random_transfers_with_faults(void **state)
{
    const char *seed_text = getenv("SEED"), *n_text = getenv("TANDEM_XFER_SOAK");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : td_random_u64() >> 32;
    /* xfer_soak has 10,000 in the same stage */
    int n_usual = is_short() ? 200 : getenv("TANDEM_TEST_LONG") ? 1000 : 400;
    struct soak s = {.n_total = n_text ? (int)strtol(n_text, NULL, 10) : n_usual};
    print_message("SEED=%llu\n", (unsigned long long)seed);
    rng_state = seed;
    n_slots = SOAK_JOBS;
    pair_open_calm(&s.t, *state, BLOCK_BYTES, N_BLOCKS);
    n_slots = N_SLOTS;
    uint64_t stuck = td_now_ns() + 120 * TD_NS_PER_S;
    while (s.n_started < s.n_total || s.live) {
        bool any;
        if (td_now_ns() > stuck) fail_msg("stuck: %d started, %d live", s.n_started, s.live);
        soak_act(&s);
        struct td_xfer_event e = event_within(s.t.d, s.live == SOAK_JOBS ? 1 : 0, &any);
        if (any) soak_slot_event(&s, &e);
        e = event_within(s.t.p, 0, &any);
        if (any) soak_op_event(&s, &e);
    }
    print_message("%d transfers: %d ready, %d done, %d failed\n", s.n_started, s.n_ready, s.n_done,
                  s.n_failed);
    assert_int_equal(s.n_done + s.n_failed, s.n_total);
    assert_true(s.n_done <= s.n_ready && s.n_ready > s.n_total / 2 && s.n_failed > 0);
    struct transfer none = {.n = 0};
    check_pool(&s.t, &none, false);
    check_idle(&s.t);
    pair_close(&s.t);
}

/* --- a sender made by hand, for what an honest one never does on shm -------------------------- */

struct hand {
    int fd, arena_fd, words_fd;
    uint64_t tag, bytes;
    uint8_t *arena;
    _Atomic uint64_t *word; /* control word of op 0 */
    struct td_xfer_grant_blob g;
    enum td_xfer_path path; /* shm: the arena is a pool; shm-staged: a ring */
};

enum hand_fault {
    NO_FAULT,
    NO_MEM,
    NO_FDS,
    PIPES,
    SMALL_ARENA,
    UNSEALED_ARENA,
    UNSEALED_WORDS,
    FEW_WORDS,
    TWO_MEMS,
    N_HAND_FAULTS
};

static void hand_memory(struct hand *h, uint64_t bytes, enum hand_fault fault)
{
    h->arena_fd = memfd_create("hand", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    h->words_fd = memfd_create("hand", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(h->arena_fd, (off_t)(fault == SMALL_ARENA ? bytes - 1 : bytes)), 0);
    assert_int_equal(ftruncate(h->words_fd, 4096), 0);
    if (fault != UNSEALED_ARENA)
        assert_int_equal(fcntl(h->arena_fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    if (fault != UNSEALED_WORDS)
        assert_int_equal(fcntl(h->words_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    h->arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, h->arena_fd, 0);
    h->word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, h->words_fd, 0);
    assert_true(h->arena != MAP_FAILED && (void *)h->word != MAP_FAILED);
}

static void hand_shake(struct hand *h)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(h->g.shm_name);
    memcpy(a.sun_path + 1, h->g.shm_name, n);
    h->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(h->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(connect(h->fd, (struct sockaddr *)&a,
                             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)),
                     0);
    struct td_xfer_hello hello = {.incarnation = 1,
                                  .layout_hash = h->g.layout_hash,
                                  .block_bytes = h->g.block_bytes,
                                  .nonce = 42,
                                  .instance = "hand"};
    send_frame(
        h->fd,
        (struct td_xfer_frame){.type = TD_XFER_HELLO, .length = sizeof hello, .slot = h->path},
        &hello);
    uint8_t bytes_in[64 + sizeof hello];
    assert_int_equal(recv(h->fd, bytes_in, sizeof bytes_in, MSG_WAITALL), sizeof bytes_in);
    memcpy(&hello, bytes_in + 64, sizeof hello);
    assert_memory_equal(hello.proof, h->g.proof, sizeof hello.proof);
    h->tag = hello.nonce ^ 42;
}

/* MEM, with the two descriptors in its control message. */
static void hand_send_mem(struct hand *h, enum hand_fault fault)
{
    struct td_xfer_mem mem = {.arena_bytes = h->bytes,
                              .block_bytes = h->g.block_bytes,
                              .n_blocks = (uint32_t)(h->bytes / h->g.block_bytes),
                              .n_words = fault == FEW_WORDS ? 65 : 64};
    struct td_xfer_frame f = {.type = TD_XFER_MEM, .length = sizeof mem, .conn = h->tag};
    uint8_t out[64 + sizeof mem];
    int pipes[2], fds[2] = {h->arena_fd, h->words_fd};
    if (fault == PIPES) {
        assert_int_equal(pipe(pipes), 0);
        memcpy(fds, pipes, sizeof fds);
    }
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec iov = {.iov_base = out, .iov_len = sizeof out};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    td_xfer_frame_encode(&f, out);
    memcpy(out + 64, &mem, sizeof mem);
    if (fault != NO_FDS) {
        msg.msg_control = &control;
        msg.msg_controllen = sizeof control;
        control.header = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fds)};
        memcpy(CMSG_DATA(&control.header), fds, sizeof fds);
    }
    for (int i = 0; i < (fault == TWO_MEMS ? 2 : 1); i++)
        assert_int_equal(sendmsg(h->fd, &msg, MSG_NOSIGNAL), sizeof out);
    if (fault == PIPES) {
        close(pipes[0]);
        close(pipes[1]);
    }
}

static void hand_open(struct hand *h, const struct pair *t, const struct transfer *m,
                      uint64_t bytes, enum hand_fault fault)
{
    *h = (struct hand){.bytes = bytes, .path = t->v.path};
    assert_int_equal(td_xfer_grant_decode(m->grant.blob, m->grant.blob_bytes, &h->g, NULL), TD_OK);
    hand_memory(h, bytes, fault);
    hand_shake(h);
    if (fault != NO_MEM) hand_send_mem(h, fault);
}

static void hand_say(struct hand *h, enum td_xfer_frame_type type, uint32_t op_, uint64_t handle,
                     uint64_t offset, const void *payload, uint32_t n)
{
    struct td_xfer_frame f = {.type = (uint8_t)type,
                              .slot = h->g.slot,
                              .generation = h->g.generation,
                              .op = op_,
                              .attempt = 1,
                              .handle = handle,
                              .offset = offset,
                              .length = n,
                              .conn = h->tag};
    send_frame(h->fd, f, payload);
}

/* Source block `from` of the arena is grant block `to`. */
static void hand_name(struct hand *h, uint32_t to, uint32_t from)
{
    uint32_t ref[2] = {to, from};
    struct td_xfer_lent lent = {.place = from * (uint32_t)h->g.block_bytes,
                                .n_bytes = (uint32_t)h->g.block_bytes};
    if (h->path == TD_XFER_PATH_SHM)
        hand_say(h, TD_XFER_REF, 0, 9, h->g.block_bytes, ref, sizeof ref);
    else
        hand_say(h, TD_XFER_LENT, 0, 9, to * h->g.block_bytes, &lent, sizeof lent);
}

static void hand_close(struct hand *h)
{
    close(h->fd);
    close(h->arena_fd);
    close(h->words_fd);
    munmap(h->arena, h->bytes);
    munmap((void *)h->word, 4096);
}

/* One block of one frame, sent by hand. The word is withdrawn before (delay < 0) or some time
 * after the blocks were announced, and the block is overwritten at once: the slot is READY with
 * the right bytes, or it is not READY. Returns whether it was. AFTER_READY: not before it is. */
#define AFTER_READY INT_MAX
static bool hand_round(struct pair *t, int delay_us)
{
    struct transfer m;
    struct hand h;
    grant(t, &m, 1, WAIT_MS);
    hand_open(&h, t, &m, 4 * t->block_bytes, NO_FAULT);
    uint64_t n_stale = stats(t->d).n_stale_frames;
    node_fill_bytes(h.arena + 2 * t->block_bytes, t->block_bytes, m.seed);
    *h.word = delay_us < 0 ? 0 : 9;
    hand_say(&h, TD_XFER_OPEN, 0, 9, 0, h.g.key, TD_XFER_KEY_BYTES);
    hand_name(&h, 0, 2);
    hand_say(&h, TD_XFER_FINAL, 0, 9, t->block_bytes, "", 0);
    if (delay_us < 0) { /* the receiver has looked, and has not taken it */
        uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
        while (stats(t->d).n_stale_frames == n_stale && td_now_ns() < until) poll(NULL, 0, 1);
        assert_int_equal(stats(t->d).n_stale_frames, n_stale + 1);
    }
    struct td_xfer_event e = {0};
    if (delay_us == AFTER_READY)
        e = event(t->d);
    else
        for (uint64_t until = td_now_ns() + (uint64_t)(delay_us > 0 ? delay_us : 0) * 1000;
             td_now_ns() < until;) {
        }
    atomic_store(h.word, 0);
    atomic_thread_fence(memory_order_seq_cst);
    memset(h.arena + 2 * t->block_bytes, 0xee, t->block_bytes);
    hand_say(&h, TD_XFER_ABORT, 0, 9, 0, "", 0);
    if (delay_us != AFTER_READY) e = event(t->d);
    bool ready = e.kind == TD_XFER_SLOT_READY;
    if (ready)
        check_pool(t, &m, true);
    else
        assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
    give_back(t, m.slot);
    assert_int_equal(event(t->d).kind, TD_XFER_SLOT_FREE);
    hand_close(&h);
    return ready;
}

static void withdrawn_blocks_are_never_ready(void **state)
{
    struct pair t;
    int n_ready = 0, n_rounds = is_short() ? 40 : 150;
    pair_open_of(&t, *state, 1u << 20, FEW_BLOCKS);
    for (int i = 0; i < 3; i++) assert_false(hand_round(&t, -1));
    assert_true(hand_round(&t, AFTER_READY)); /* and with time enough it is ready: the check
                                                 above can fail */
    rng_state = 5;
    for (int i = 0; i < n_rounds; i++) n_ready += hand_round(&t, (int)rnd(600));
    print_message("withdrawn in the middle: %d of %d were ready before\n", n_ready, n_rounds);
    pair_close(&t);
}

static void lying_senders_on_this_host_are_refused(void **state)
{
    struct pair t;
    struct transfer m;
    struct hand h;
    pair_open(&t, *state, BLOCK_BYTES);
    uint64_t bytes = 4 * BLOCK_BYTES;
    for (enum hand_fault fault = NO_MEM; fault < N_HAND_FAULTS; fault++) {
        uint64_t n_bad = stats(t.d).n_bad_frames;
        grant(&t, &m, 1, WAIT_MS);
        hand_open(&h, &t, &m, bytes, fault);
        if (fault == NO_MEM) hand_say(&h, TD_XFER_OPEN, 0, 9, 0, h.g.key, TD_XFER_KEY_BYTES);
        assert_true(is_closed(h.fd));
        /* closed for this, and not for being silent */
        assert_int_equal(stats(t.d).n_bad_frames, n_bad + 1);
        hand_close(&h);
        give_back(&t, m.slot);
        expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
    }
    /* a control word that does not exist; a source block that does not exist; the same grant
     * block twice; DATA; the other path's name for it; what the receiver says; of shm-staged:
     * bytes that end behind the ring, none, more than a frame */
    for (int fault = 0; fault < (t.v.path == TD_XFER_PATH_SHM ? 6 : 9); fault++) {
        uint64_t n_bad = stats(t.d).n_bad_frames;
        grant(&t, &m, 2, WAIT_MS);
        hand_open(&h, &t, &m, bytes, NO_FAULT);
        *h.word = 9;
        hand_say(&h, TD_XFER_OPEN, fault == 0 ? 64 : 0, 9, 0, h.g.key, TD_XFER_KEY_BYTES);
        uint32_t near[2] = {1, 3};
        struct td_xfer_lent lent[] = {
            {3 * BLOCK_BYTES + 1, BLOCK_BYTES}, {0, 0}, {0, TD_XFER_FRAME_DATA_MAX + 1}};
        if (fault == 1) hand_name(&h, 0, 4);
        for (int i = 0; fault == 2 && i < 2; i++) hand_name(&h, 1, 3);
        if (fault == 3) hand_say(&h, TD_XFER_DATA, 0, 9, 0, near, sizeof near);
        if (fault == 4)
            hand_say(&h, h.path == TD_XFER_PATH_SHM ? TD_XFER_LENT : TD_XFER_REF, 0, 9, BLOCK_BYTES,
                     near, sizeof near);
        if (fault == 5) hand_say(&h, TD_XFER_TAKEN, 0, 9, 0, near, 0);
        if (fault > 5) hand_say(&h, TD_XFER_LENT, 0, 9, 0, &lent[fault - 6], sizeof lent[0]);
        assert_true(is_closed(h.fd));
        assert_int_equal(stats(t.d).n_bad_frames, n_bad + 1);
        hand_close(&h);
        if (fault) expect(t.d, TD_XFER_SLOT_FAILED, TD_ERR_PEER);
        give_back(&t, m.slot);
        assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
    }
    poison_all(&t);
    whole(&t, 10);
    pair_close(&t);
}

/* --- TLS: strangers, the wire, who is configured how ------------------------------------------ */

/* Somebody on the way: forwards every connection and keeps what passes. */
#define WIRE_CONNS 16
struct wire {
    pthread_t thread;
    int listen_fd;
    uint16_t port, to;
    atomic_bool stop;
    atomic_uint turns_away; /* so many that come next */
    uint32_t n;
    struct wire_conn {
        int fd[2];         /* sender's, receiver's; -1: closed */
        uint8_t *bytes[2]; /* heard from each; wire_end may look, after the thread ended */
        size_t n[2], room[2];
    } conn[WIRE_CONNS];
};

static void wire_pass(struct wire_conn *c, int from)
{
    uint8_t piece[65536];
    ssize_t k = recv(c->fd[from], piece, sizeof piece, 0);
    if (k <= 0) {
        close(c->fd[0]);
        close(c->fd[1]);
        c->fd[0] = c->fd[1] = -1;
        return;
    }
    if (c->n[from] + (size_t)k > c->room[from]) {
        c->room[from] = 2 * (c->n[from] + (size_t)k);
        c->bytes[from] = realloc(c->bytes[from], c->room[from]);
        TD_ASSERT(c->bytes[from]);
    }
    memcpy(c->bytes[from] + c->n[from], piece, (size_t)k);
    c->n[from] += (size_t)k;
    for (ssize_t at = 0, sent; at < k; at += sent) /* its end is read next */
        if ((sent = send(c->fd[!from], piece + at, (size_t)(k - at), MSG_NOSIGNAL)) <= 0) return;
}

static void *wire_main(void *ctx)
{
    struct wire *w = ctx;
    while (!atomic_load(&w->stop)) {
        struct pollfd fds[1 + 2 * WIRE_CONNS] = {
            {.fd = w->listen_fd, .events = w->n < WIRE_CONNS ? POLLIN : 0}};
        uint32_t n = w->n;
        for (uint32_t i = 0; i < 2 * n; i++)
            fds[1 + i] = (struct pollfd){.fd = w->conn[i / 2].fd[i % 2], .events = POLLIN};
        if (poll(fds, 1 + 2 * n, 20) <= 0) continue;
        for (uint32_t i = 0; i < 2 * n; i++)
            if (fds[1 + i].revents && w->conn[i / 2].fd[i % 2] >= 0)
                wire_pass(&w->conn[i / 2], (int)i % 2);
        if (!fds[0].revents) continue;
        if (atomic_load(&w->turns_away)) {
            atomic_fetch_sub(&w->turns_away, 1);
            close(accept(w->listen_fd, NULL, NULL));
            continue;
        }
        struct sockaddr_in a = {
            .sin_family = AF_INET, .sin_port = htons(w->to), .sin_addr = {htonl(INADDR_LOOPBACK)}};
        struct wire_conn *c = &w->conn[w->n++];
        *c = (struct wire_conn){.fd = {accept(w->listen_fd, NULL, NULL),
                                       socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)}};
        TD_ASSERT(connect(c->fd[1], (struct sockaddr *)&a, sizeof a) == 0);
    }
    return NULL;
}

static void wire_start(struct wire *w, uint16_t to)
{
    *w = (struct wire){.to = to, .listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    assert_int_equal(bind(w->listen_fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(w->listen_fd, 16), 0);
    assert_int_equal(getsockname(w->listen_fd, (struct sockaddr *)&a, &n), 0);
    w->port = ntohs(a.sin_port);
    assert_int_equal(pthread_create(&w->thread, NULL, wire_main, w), 0);
}

/* The wire is cut; what passed stays to be looked at. */
static void wire_stop(struct wire *w)
{
    atomic_store(&w->stop, true);
    pthread_join(w->thread, NULL);
    close(w->listen_fd);
    for (uint32_t i = 0; i < 2 * w->n; i++)
        if (w->conn[i / 2].fd[i % 2] >= 0) close(w->conn[i / 2].fd[i % 2]);
}

static void wire_free(struct wire *w)
{
    for (uint32_t i = 0; i < 2 * w->n; i++) free(w->conn[i / 2].bytes[i % 2]);
}

static int wire_count(const struct wire *w, const void *what, size_t n)
{
    int n_found = 0;
    for (uint32_t i = 0; i < 2 * w->n; i++)
        n_found += w->conn[i / 2].n[i % 2] &&
                   memmem(w->conn[i / 2].bytes[i % 2], w->conn[i / 2].n[i % 2], what, n) != NULL;
    return n_found;
}

/* The grant says another port than it did. */
static void divert(struct transfer *m, uint16_t port)
{
    struct td_xfer_grant_blob g;
    assert_int_equal(td_xfer_grant_decode(m->grant.blob, m->grant.blob_bytes, &g, NULL), TD_OK);
    g.port = port;
    td_xfer_grant_encode(&g, m->grant.blob);
}

static void finish(struct pair *t, struct transfer *m)
{
    op(t, m, WAIT_MS);
    assert_int_equal(submit(t, m, 0, m->n, true), TD_OK);
    expect(t->d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(t, m, true);
    expect(t->p, TD_XFER_OP_DONE, TD_OK);
    give_back(t, m->slot);
    expect(t->d, TD_XFER_SLOT_FREE, TD_OK);
    poison_all(t);
}

/* One transfer through the wire: how many of its blocks' pieces can be read there, and whether
 * the key can. */
static int overheard(const struct variant *v, bool *ret_key)
{
    struct pair t;
    struct wire w;
    struct transfer m;
    struct td_xfer_grant_blob g;
    int n_read = 0;
    pair_open(&t, v, BLOCK_BYTES);
    wire_start(&w, t.port);
    grant(&t, &m, 10, WAIT_MS);
    assert_int_equal(td_xfer_grant_decode(m.grant.blob, m.grant.blob_bytes, &g, NULL), TD_OK);
    divert(&m, w.port);
    finish(&t, &m);
    wire_stop(&w);
    uint64_t n_seen = 0;
    for (uint32_t i = 0; i < w.n; i++) n_seen += w.conn[i].n[0];
    /* it did pass there */
    assert_true(n_seen > (v->path == TD_XFER_PATH_TCP ? 10 * BLOCK_BYTES : 500));
    *ret_key = wire_count(&w, g.key, sizeof g.key) > 0;
    uint8_t block[BLOCK_BYTES];
    for (uint64_t i = 0; i < 10; i++) { /* 16 bytes: no accident */
        node_fill_bytes(block, sizeof block, m.seed + i);
        n_read += wire_count(&w, block, 16) + wire_count(&w, block + 8192, 16) +
                  wire_count(&w, block + sizeof block - 16, 16);
    }
    n_read += wire_count(&w, "first=1234", 10) + wire_count(&w, "TDX1", 4);

    /* Played again, byte for byte, to a receiver that waits for the same kind of thing. */
    grant(&t, &m, 10, WAIT_MS);
    uint64_t n_received = stats(t.d).bytes_received;
    for (uint32_t i = 0; i < w.n; i++) {
        int fd = dial(t.port);
        send(fd, w.conn[i].bytes[0], w.conn[i].n[0], MSG_NOSIGNAL);
        assert_true(is_closed(fd));
        close(fd);
    }
    struct transfer none = {.n = 0};
    check_pool(&t, &none, false);
    assert_int_equal(stats(t.d).bytes_received, n_received);
    finish(&t, &m);
    wire_free(&w);
    pair_close(&t);
    return n_read;
}

static void pains_18_the_wire_tells_nothing(void **state)
{
    struct variant clear = *(const struct variant *)*state;
    bool key;
    assert_int_equal(overheard(*state, &key), 0);
    assert_false(key);
    clear.tls = false; /* and without TLS it does: whoever looks can see */
    int n_read = overheard(&clear, &key);
    assert_true(key);
    assert_true(clear.path == TD_XFER_PATH_TCP ? n_read >= 30 : n_read > 0);
}

/* A receiver that is flooded closes connections without a word, honest ones, too: who was turned
 * away calls again. With a receiver that always does so the op fails. */
static void who_is_turned_away_calls_again(void **state)
{
    struct pair t;
    struct wire w;
    struct transfer m;
    pair_open(&t, *state, BLOCK_BYTES);
    wire_start(&w, t.port);
    atomic_store(&w.turns_away, 5);
    grant(&t, &m, 10, WAIT_MS);
    divert(&m, w.port);
    finish(&t, &m);
    assert_int_equal(atomic_load(&w.turns_away), 0);
    wire_stop(&w);
    wire_free(&w);

    wire_start(&w, t.port);
    atomic_store(&w.turns_away, 1000);
    grant(&t, &m, 10, WAIT_MS);
    divert(&m, w.port);
    op(&t, &m, WAIT_MS);
    expect(t.p, TD_XFER_OP_FAILED, TD_ERR_PEER);
    assert_int_equal(atomic_load(&w.turns_away), 1000 - 8);
    give_back(&t, m.slot);
    assert_int_equal(event(t.d).kind, TD_XFER_SLOT_FREE);
    wire_stop(&w);
    wire_free(&w);
    pair_close(&t);
}

/* A node of this process with this identity (NULL: in the clear), as sender or receiver against
 * the pair's other one. */
static struct node *another(const struct pair *t, const char *name, const char *ca)
{
    struct node *n = node_local();
    struct node_command c = open_command(t, 0, false);
    c.tls[0] = 0;
    if (name) as_identity(&c, name, ca);
    struct node_reply r = ask(n, &c);
    if (r.status) fail_msg("%s", r.msg);
    return n;
}

/* A peer may know of its refusal before it has been counted. */
static void wait_refused(struct node *n, uint64_t want)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (stats(n).n_refused_peers < want && td_now_ns() < until) poll(NULL, 0, 1);
    assert_int_equal(stats(n).n_refused_peers, want);
}

/* Whoever has no certificate of this cluster (0: in the clear, 1: none, 2: another CA's) gets no
 * frame answered, even with the key in hand. */
static void speak_as_nobody(struct pair *t, int who, const struct td_xfer_grant_blob *g,
                            const uint8_t noise[static 256])
{
    struct transfer none = {.n = 0};
    uint8_t heard[4096];
    uint64_t n_refused = stats(t->d).n_refused_peers;
    int fd = dial(t->port);
    if (who == 1) encrypt(fd, NULL, "ca");
    if (who == 2) encrypt(fd, "foreign", "ca");
    struct td_xfer_hello hello = {.incarnation = 1,
                                  .layout_hash = g->layout_hash,
                                  .block_bytes = g->block_bytes,
                                  .nonce = 42,
                                  .instance = "stranger"};
    send_frame(
        fd,
        (struct td_xfer_frame){.type = TD_XFER_HELLO, .length = sizeof hello, .slot = t->v.path},
        &hello);
    send_frame(fd, open_frame_of(g, 42), g->key);
    send_frame(fd, data_frame_of(g, 42, 256), noise);
    ssize_t k, n = 0;
    while ((k = hear(fd, heard, sizeof heard)) > 0) n += k;
    assert_true(k == 0 || errno == ECONNRESET || errno == EPROTO);
    assert_true(who ? n == 0 : n < 64); /* in the clear: an alert */
    hang_up(fd);
    wait_refused(t->d, n_refused + 1);
    check_pool(t, &none, false);
}

/* A worker of this cluster to whom nothing was granted: it may say hello, and that is all. */
static void speak_as_a_worker(struct pair *t, const struct td_xfer_grant_blob *g,
                              const uint8_t noise[static 256])
{
    struct transfer none = {.n = 0};
    uint64_t n_bad = stats(t->d).n_bad_frames;
    int fd = dial_peer(t);
    uint64_t tag = shake(fd, g);
    send_frame(fd, data_frame_of(g, tag, 256), noise); /* without OPEN: read, and dropped */
    uint8_t key[TD_XFER_KEY_BYTES];
    memcpy(key, g->key, sizeof key);
    key[0] ^= 1;
    send_frame(fd, open_frame_of(g, tag), key);
    assert_true(is_closed(fd));
    hang_up(fd);
    assert_int_equal(stats(t->d).n_bad_frames, n_bad + 1);

    fd = dial_peer(t); /* OPEN as it was overheard on another connection, by somebody who can
                          break TLS */
    shake(fd, g);
    send_frame(fd, open_frame_of(g, tag), g->key);
    assert_true(is_closed(fd));
    hang_up(fd);
    assert_int_equal(stats(t->d).n_bad_frames, n_bad + 2);
    check_pool(t, &none, false);
}

/* Workers that connect and say nothing wait a little, only so many at a time. */
static void wait_as_workers(struct pair *t)
{
    struct transfer none = {.n = 0};
    uint8_t heard[4096];
    int fds[80];
    uint64_t n_refused = stats(t->d).n_refused_peers;
    for (int i = 0; i < 80; i++) fds[i] = dial_peer(t);
    assert_true(stats(t->d).n_conns + stats(t->d).n_lanes <= 64 + 8);
    for (int i = 0; i < 80; i++) {
        size_t n = 0;
        for (ssize_t k; (k = hear(fds[i], heard, sizeof heard)) > 0;) n += (size_t)k;
        assert_int_equal(n, 0);
        hang_up(fds[i]);
    }
    wait_refused(t->d, n_refused + 80);
    check_pool(t, &none, false);
}

/* The other way round: whoever takes the receiver's place gets neither key nor bytes. */
static void take_the_receivers_place(struct pair *t)
{
    struct transfer m;
    struct node *imposter = another(t, "foreign", "other");
    grant(t, &m, 4, WAIT_MS);
    struct transfer diverted = m;
    divert(&diverted, td_xfer_port(node_xfer(imposter)));
    op(t, &diverted, WAIT_MS);
    struct td_xfer_event e = event(t->p);
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    assert_int_equal(e.status, TD_ERR_PEER);
    if (!strstr(e.reason, "certificate is refused")) fail_msg("%s", e.reason);
    assert_int_equal(stats(imposter).n_bad_frames + stats(imposter).n_stale_frames +
                         stats(imposter).bytes_received,
                     0);
    wait_refused(imposter, 1);
    finish(t, &m);
    node_free(imposter);
}

/* A sender with another CA's certificate learns why it gets nowhere. */
static void send_as_a_foreigner(struct pair *t)
{
    struct transfer m;
    struct node *foreign = another(t, "foreign", "ca");
    grant(t, &m, 4, WAIT_MS);
    struct pair wrong = *t;
    wrong.p = foreign;
    op(&wrong, &m, WAIT_MS);
    struct td_xfer_event e = event(foreign);
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    if (!strstr(e.reason, "the peer refuses: alert unknown ca")) fail_msg("%s", e.reason);
    finish(t, &m);
    node_free(foreign);
}

static void pains_18_a_stranger_can_neither_read_nor_write_kv(void **state)
{
    struct pair t;
    struct transfer m;
    struct td_xfer_grant_blob g;
    uint8_t noise[256];
    memset(noise, 0xa5, sizeof noise);
    pair_open(&t, *state, BLOCK_BYTES);
    whole(&t, 3);
    grant(&t, &m, 4, 4 * WAIT_MS);
    assert_int_equal(td_xfer_grant_decode(m.grant.blob, m.grant.blob_bytes, &g, NULL), TD_OK);
    uint64_t n_received = stats(t.d).bytes_received;
    for (int who = 0; who < 3; who++) speak_as_nobody(&t, who, &g, noise);
    if (t.v.path == TD_XFER_PATH_TCP) speak_as_a_worker(&t, &g, noise);
    wait_as_workers(&t);
    assert_int_equal(stats(t.d).bytes_received, n_received);
    finish(&t, &m); /* the grant is as good as it was */
    take_the_receivers_place(&t);
    send_as_a_foreigner(&t);
    check_idle(&t);
    pair_close(&t);
}

static void a_side_without_tls_is_told_what_to_configure(void **state)
{
    struct pair t;
    struct transfer m;
    pair_open(&t, *state, BLOCK_BYTES);
    struct node *clear = another(&t, NULL, NULL);
    grant(&t, &m, 4, WAIT_MS);
    struct node_command c = {.verb = NODE_OP, .blob_bytes = m.grant.blob_bytes};
    memcpy(c.blob, m.grant.blob, c.blob_bytes);
    struct node_reply r = ask(clear, &c);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(
        r.msg, "speaks TLS and this side does not: give this side tls_cert, tls_key and tls_ca"));
    struct node_command g = {.verb = NODE_GRANT, .n = 1};
    r = ask(clear, &g);
    assert_int_equal(r.status, TD_OK);
    memcpy(c.blob, r.blob, r.blob_bytes);
    r = ask(t.p, &c);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(
        r.msg, "in the clear and this side speaks TLS: give node tls_cert, tls_key and tls_ca"));
    finish(&t, &m);
    node_free(clear);

    /* A grant whose flag lies: the handshake finds it out, and the op ends instead of hanging. */
    clear = another(&t, NULL, NULL);
    grant(&t, &m, 4, WAIT_MS);
    divert(&m, td_xfer_port(node_xfer(clear)));
    op(&t, &m, WAIT_MS);
    expect(t.p, TD_XFER_OP_FAILED, TD_ERR_PEER);
    give_back(&t, m.slot);
    expect(t.d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
    node_free(clear);
    pair_close(&t);
}

/* Sealed bytes that the socket did not take go out when it does, though there is nothing more to
 * send (the next PING is 15 s away). */
static void sealed_bytes_go_out_without_more(void **state)
{
    struct variant v = *(const struct variant *)*state;
    struct pair t;
    struct transfer m;
    ino_t inode;
    int32_t n = 0, n_extra = 0, bytes = 8192;
    v.lanes = 1;
    timeout_ms = 60000;
    pair_open_of(&t, &v, BLOCK_BYTES, N_BLOCKS);
    timeout_ms = normal_timeout_ms();
    whole(&t, 1);
    int fd = dialled_connection(&t, 0, &inode);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), 0);
    uint64_t received = stats(t.d).bytes_received, sent = stats(t.p).bytes_sent;
    grant(&t, &m, N_BLOCKS - 1, 4 * WAIT_MS);
    op(&t, &m, 4 * WAIT_MS);
    kill(node_pid(t.d), SIGSTOP);
    waitpid(node_pid(t.d), NULL, WUNTRACED);
    while (n_extra < 2 && n < m.n - 1) { /* until the socket is full, and one block more: that is
                                            in the channel */
        assert_int_equal(submit(&t, &m, n++, 1, false), TD_OK);
        sent += t.block_bytes;
        for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
             stats(t.p).bytes_sent < sent && td_now_ns() < until;)
            poll(NULL, 0, 1);
        assert_int_equal(stats(t.p).bytes_sent, sent);
        n_extra += n_extra || poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 0) == 0;
    }
    assert_int_equal(n_extra, 2);
    kill(node_pid(t.d), SIGCONT);
    received += (uint64_t)n * t.block_bytes;
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), 8000);
         stats(t.d).bytes_received < received && td_now_ns() < until;)
        poll(NULL, 0, 1);
    assert_int_equal(stats(t.d).bytes_received, received);
    assert_int_equal(submit(&t, &m, n, m.n - n, true), TD_OK);
    expect(t.d, TD_XFER_SLOT_READY, TD_OK);
    check_pool(&t, &m, true);
    pair_close(&t);
}

static void copy_file(const char *from, const char *to)
{
    char text[16384], temporary[160];
    FILE *f = fopen(tls_files_in(from), "re");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text, f);
    fclose(f);
    snprintf(temporary, sizeof temporary, "%s.new", tls_files_in(to));
    f = fopen(temporary, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
    assert_int_equal(rename(temporary, tls_files_in(to)), 0);
}

/* Rotation: the files change under a running endpoint, and connections that stand are not
 * touched. */
static void a_new_certificate_is_for_new_connections(void **state)
{
    struct variant v = *(const struct variant *)*state;
    struct pair t;
    struct transfer m;
    struct td_err err;
    bool loaded;
    v.where = BOTH_HERE;
    copy_file("decode.crt", "live.crt");
    copy_file("decode.key", "live.key");
    pair_open(&t, &v, BLOCK_BYTES);
    node_free(t.d);
    t.d = another(&t, "live", "ca");
    t.port = td_xfer_port(node_xfer(t.d));
    poison_all(&t);
    whole(&t, 4);
    assert_int_equal(td_xfer_tls_reload_files(node_xfer(t.d), &loaded, &err), TD_OK);
    assert_false(loaded);
    copy_file("foreign.crt", "live.crt");
    /* between the two writes */
    assert_int_equal(td_xfer_tls_reload_files(node_xfer(t.d), &loaded, &err), TD_ERR_INVALID);
    copy_file("foreign.key", "live.key");
    assert_int_equal(td_xfer_tls_reload_files(node_xfer(t.d), &loaded, &err), TD_OK);
    assert_true(loaded);
    whole(&t, 4); /* over the old connection */
    struct node *fresh = another(&t, "prefill", "ca");
    struct pair late = t;
    late.p = fresh;
    grant(&t, &m, 4, WAIT_MS);
    op(&late, &m, WAIT_MS);
    struct td_xfer_event e = event(fresh);
    if (!strstr(e.reason, "certificate is refused")) fail_msg("%s", e.reason);
    copy_file("decode.crt", "live.crt");
    copy_file("decode.key", "live.key");
    assert_int_equal(td_xfer_tls_reload_files(node_xfer(t.d), &loaded, &err), TD_OK);
    assert_true(loaded);
    finish(&late, &m);
    node_free(fresh);
    pair_close(&t);
}

/* ---------------------------------------------------------------------------------------------- */

static struct variant variants[] = {
    {TD_XFER_PATH_TCP, BOTH_HERE, "", 4, 0, "", false, false, NULL},
    {TD_XFER_PATH_TCP, SENDER_CHILD, "", 1, 0, "", false, false, NULL},
    {TD_XFER_PATH_TCP, RECEIVER_CHILD, "", 4, 1, "", false, false, NULL},
    {TD_XFER_PATH_SHM, BOTH_HERE, "", 0, 1, "", false, false, NULL},
    {TD_XFER_PATH_SHM, SENDER_CHILD, "", 0, 0, "", false, false, NULL},
    {TD_XFER_PATH_SHM, RECEIVER_CHILD, "", 0, 4, "", false, false, NULL},
    {TD_XFER_PATH_RDMA, BOTH_HERE, "", 0, 0, "", false, false, NULL},
    {TD_XFER_PATH_RDMA, SENDER_CHILD, "", 0, 1, "", false, false, NULL},
    {TD_XFER_PATH_RDMA, RECEIVER_CHILD, "", 0, 0, "", false, false, NULL},
    {TD_XFER_PATH_RDMA, RECEIVER_CHILD, ", 2 rails, unordered", 0, 3,
     ",devices=2,unordered=1,relaxed=1", false, false, NULL},
    {TD_XFER_PATH_RDMA, BOTH_HERE, ", tiny device", 0, 0, ",tiny=1,unordered=1", false, false,
     NULL},
    {TD_XFER_PATH_TCP, RECEIVER_CHILD, ", tls, 2 lanes", 2, 1, "", true, false, NULL},
    {TD_XFER_PATH_RDMA, SENDER_CHILD, ", tls", 0, 0, "", true, false, NULL},
    {TD_XFER_PATH_RDMA, RECEIVER_CHILD, ", pulled", 0, 1, ",unordered=1", false, true, NULL},
    {TD_XFER_PATH_RDMA, SENDER_CHILD, ", pulled", 0, 0, ",devices=2", false, true, NULL},
    {TD_XFER_PATH_RDMA, SENDER_CHILD, ", windows", 0, 1, "", false, false, NULL},
    {TD_XFER_PATH_RDMA, RECEIVER_CHILD, ", windows, 2 rails, unordered, pulled", 0, 0,
     ",devices=2,unordered=1", false, true, NULL},
    {TD_XFER_PATH_TCP, RECEIVER_CHILD, ", zero copy, 2 lanes", 2, 0, "", false, false, NULL},
    {TD_XFER_PATH_TCP, SENDER_CHILD, ", zero copy", 1, 1, "", false, false, NULL},
    {TD_XFER_PATH_TCP, BOTH_HERE, ", device", 4, 0, "", false, false, "slow"},
    {TD_XFER_PATH_TCP, SENDER_CHILD, ", device", 1, 1, "", false, false, "slow"},
    {TD_XFER_PATH_TCP, RECEIVER_CHILD, ", device", 4, 3, "", false, false, "device"},
    {TD_XFER_PATH_TCP, RECEIVER_CHILD, ", device, tls, 2 lanes", 2, 1, "", true, false, "slow"},
    {TD_XFER_PATH_RDMA, RECEIVER_CHILD, ", device", 0, 3, ",device_late=1", false, false, "slow"},
    {TD_XFER_PATH_RDMA, SENDER_CHILD, ", device, 2 rails, unordered, pulled", 0, 0,
     ",devices=2,unordered=1,device_late=1", false, true, "device"},
    {TD_XFER_PATH_CUDA_IPC, BOTH_HERE, "", 0, 1, "", false, false, "slow"},
    {TD_XFER_PATH_CUDA_IPC, SENDER_CHILD, ", no digests", 0, 0, "", false, false, "slow"},
    {TD_XFER_PATH_CUDA_IPC, RECEIVER_CHILD, "", 0, 4, "", false, false, "device"},
    {TD_XFER_PATH_SHM_STAGED, BOTH_HERE, "", 0, 0, "", false, false, "slow"},
    {TD_XFER_PATH_SHM_STAGED, SENDER_CHILD, "", 0, 1, "", false, false, "slow"},
    {TD_XFER_PATH_SHM_STAGED, RECEIVER_CHILD, "", 0, 4, "", false, false, "device"},
};

/* Names like "kill_at_every_point(shm, sender in a child)". */
static const char *variant_name(const char *test, const struct variant *v)
{
    static const char *const where[] = {"one process", "sender in a child", "receiver in a child"};
    char *name = malloc(128);
    assert_non_null(name);
    snprintf(name, 128, "%s(%s, %s%s)", test, td_xfer_path_name(v->path), where[v->where], v->name);
    return name;
}

/* The tests, and the variants that each of them is for. */
static const struct suite_test {
    const char *name;
    CMUnitTestFunction function;
    bool needs_child, tcp_only, receiver_child_only, shm_only, tls_only;
} suite[] = {
    {"transfers_arrive_whole", transfers_arrive_whole, false, false, false, false, false},
    {"times_begin_at_the_first_submit", times_begin_at_the_first_submit, false, false, false, false,
     false},
    {"no_wake_is_lost", no_wake_is_lost, false, false, false, false, false},
    {"blocks_larger_than_a_frame_arrive_whole", blocks_larger_than_a_frame_arrive_whole, false,
     false, false, false, false},
    {"any_order_and_late_final", any_order_and_late_final, false, false, false, false, false},
    {"parts_arrive_whole", parts_arrive_whole, false, false, false, false, false},
    {"cancel_at_every_point", cancel_at_every_point, false, false, false, false, false},
    {"finished_at_every_point", finished_at_every_point, false, false, false, false, false},
    {"revoke_at_every_point", revoke_at_every_point, false, false, false, false, false},
    {"deadlines_end_both_sides", deadlines_end_both_sides, false, false, false, false, false},
    {"an_old_grant_opens_nothing", an_old_grant_opens_nothing, false, false, false, false, false},
    {"bad_grants_are_refused_by_name", bad_grants_are_refused_by_name, false, false, false, false,
     false},
    {"a_small_transfer_does_not_wait_for_a_large_one",
     a_small_transfer_does_not_wait_for_a_large_one, false, false, false, false, false},
    {"random_transfers_with_faults", random_transfers_with_faults, false, false, false, false,
     false},
    {"many_ops_begin_at_once", many_ops_begin_at_once, true, false, true, false, false},
    {"kill_at_every_point", kill_at_every_point, true, false, false, false, false},
    {"kill_in_every_state", kill_in_every_state, true, false, false, false, false},
    {"stop_at_every_point", stop_at_every_point, true, false, false, false, false},
    {"stop_in_the_middle_of_bytes", stop_in_the_middle_of_bytes, true, false, false, false, false},
    {"stop_before_the_slot_is_bound", stop_before_the_slot_is_bound, true, false, false, false,
     false},
    {"a_restarted_receiver_refuses_old_grants", a_restarted_receiver_refuses_old_grants, true,
     false, true, false, false},
    {"strangers_are_refused", strangers_are_refused, false, true, false, false, false},
    {"silent_connections_are_bounded", silent_connections_are_bounded, false, true, false, false,
     false},
    {"a_cut_connection_is_another_attempt", a_cut_connection_is_another_attempt, true, false, true,
     false, false},
    {"a_cancel_inside_a_frame_keeps_the_connection", a_cancel_inside_a_frame_keeps_the_connection,
     true, true, true, false, false},
    {"withdrawn_blocks_are_never_ready", withdrawn_blocks_are_never_ready, true, false, true, true,
     false},
    {"lying_senders_on_this_host_are_refused", lying_senders_on_this_host_are_refused, true, false,
     true, true, false},
    {"who_is_turned_away_calls_again", who_is_turned_away_calls_again, false, true, false, false,
     false},
    {"pains_18_a_stranger_can_neither_read_nor_write_kv",
     pains_18_a_stranger_can_neither_read_nor_write_kv, false, false, false, false, true},
    {"pains_18_the_wire_tells_nothing", pains_18_the_wire_tells_nothing, false, false, false, false,
     true},
    {"a_side_without_tls_is_told_what_to_configure", a_side_without_tls_is_told_what_to_configure,
     false, false, false, false, true},
    {"sealed_bytes_go_out_without_more", sealed_bytes_go_out_without_more, true, true, true, false,
     true},
    {"a_new_certificate_is_for_new_connections", a_new_certificate_is_for_new_connections, false,
     true, false, false, true},
};

static bool is_one_of(CMUnitTestFunction test, const CMUnitTestFunction *those, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (test == those[i]) return true;
    return false;
}

/* The path that the test is for, and the side that it has in a child. */
static bool is_for(const struct suite_test *s, const struct variant *v)
{
    if (s->needs_child && v->where == BOTH_HERE) return false;
    if (s->tls_only && (!v->tls || v->device)) return false;
    if (s->tcp_only && v->path != TD_XFER_PATH_TCP) return false;
    if (s->shm_only && v->path != TD_XFER_PATH_SHM && v->path != TD_XFER_PATH_SHM_STAGED)
        return false;
    return !(s->receiver_child_only && v->where != RECEIVER_CHILD);
}

/* What a test would say again, or cannot say, of a special variant. */
static bool says_nothing_new(CMUnitTestFunction test, const struct variant *v, bool is_real)
{
    const CMUnitTestFunction large[] = {blocks_larger_than_a_frame_arrive_whole,
                                        a_small_transfer_does_not_wait_for_a_large_one},
                             no_pool[] = {strangers_are_refused, silent_connections_are_bounded};
    /* its blocks are more than the device registers */
    if (strstr(v->name, "tiny") && is_one_of(test, large, 2)) return true;
    /* the states are the same there */
    bool special = v->name[0] && !v->tls && v->path != TD_XFER_PATH_CUDA_IPC;
    bool staged = v->device && v->path == TD_XFER_PATH_TCP;
    if (test == kill_in_every_state && (is_real || special || staged)) return true;
    /* its blocks are free when the kernel says so */
    if (is_zerocopy(v) && test == a_cancel_inside_a_frame_keeps_the_connection) return true;
    /* no pool has to do with it */
    return v->device && is_one_of(test, no_pool, 2);
}

/* What only the long form has, or another build. */
static bool is_elsewhere(const struct suite_test *s, const struct variant *v)
{
    const CMUnitTestFunction stops[] = {stop_at_every_point, stop_in_the_middle_of_bytes,
                                        stop_before_the_slot_is_bound};
    /* seconds of waiting each */
    if (is_one_of(s->function, stops, 3) && v->name[0] &&
        (is_short() || !strstr(v->name, "windows")))
        return true;
    /* in the long form only */
    if (is_short() && v->where == SENDER_CHILD && !s->needs_child) return true;
    /* no race more than both ends in one process have */
    return UNDER_TSAN && v->where != BOTH_HERE && !s->needs_child;
}

static bool is_run(const struct suite_test *s, const struct variant *v, bool is_real)
{
    if (v->tls && !have_tls) return false;
    if (is_real && (v->path != TD_XFER_PATH_RDMA || (v->name[0] && strcmp(v->name, ", windows"))))
        return false;
    return is_for(s, v) && !says_nothing_new(s->function, v, is_real) && !is_elsewhere(s, v);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--node") == 0)
        return node_child_main((int)strtol(argv[2], NULL, 10));
    program = argv[0];
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    const char *real = getenv("TANDEM_XFER_REAL");
    if (real && sscanf(real, "%63[^,],%63s", real_devices[0], real_devices[1]) != 2) return 2;
    timeout_ms = normal_timeout_ms();
    struct CMUnitTest tests[768];
    size_t n = 0;
    for (size_t i = 0; i < sizeof suite / sizeof suite[0]; i++)
        for (size_t k = 0; k < sizeof variants / sizeof variants[0]; k++) {
            if (!is_run(&suite[i], &variants[k], real != NULL)) continue;
            TD_ASSERT(n + 16 < sizeof tests / sizeof tests[0]);
            tests[n++] = (struct CMUnitTest){.name = variant_name(suite[i].name, &variants[k]),
                                             .test_func = suite[i].function,
                                             .initial_state = &variants[k]};
        }
    size_t n_named = n;
    if (!real) tests[n++] = (struct CMUnitTest)cmocka_unit_test(paths_are_chosen_openly);
    if (!real) tests[n++] = (struct CMUnitTest)cmocka_unit_test(peers_share_the_link);
    int failed = _cmocka_run_group_tests("xfer", tests, n, make_certificates, remove_certificates);
    for (size_t i = 0; i < n_named; i++) free((void *)(uintptr_t)tests[i].name);
    return failed;
}
