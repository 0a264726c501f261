/* split_memory_test.c - random batches of copies through the table of a split pool against one
 * plain array laid out as the pool says: every byte of every rank's memory is compared after
 * each batch, the guards around it too. The ranks' memory is a fake device's, whose addresses
 * nobody can follow and whose copies run late. A pool of another process is opened from its
 * description, whole or spoilt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "common/engine/split_memory.h"
#include "tests/fake/fake_device.h"

#define GUARD 256
#define POISON 0xa5
#define SCRATCH ((size_t)1 << 16)
#define BATCHES 400
#define RUNS_MAX 12

static uint64_t random_state;

static size_t draw(size_t n) { return td_random_index(&random_state, n); }

struct shape {
    int32_t n_parts, n_copies, n_blocks;
    size_t part_bytes, tail_bytes;
};

struct pool {
    struct shape s;
    struct fake_device *d;
    struct td_split_memory *m;
    const struct td_device_memory *table;
    /* rank, scratch: the device's addresses */
    uint8_t *rank[TD_SPLIT_RANKS_MAX], *scratch, *base, *host;
    uint8_t *want, *want_scratch, *want_host; /* the plain arrays */
    size_t rank_bytes, bytes;
};

static void pool_open(struct pool *p, struct shape s, const char *words)
{
    struct td_err err = {0};
    void *base[TD_SPLIT_RANKS_MAX], *pinned;
    *p = (struct pool){.s = s, .d = fake_device_open(words)};
    const struct td_device_memory *dm = fake_device_memory(p->d);
    p->rank_bytes = (size_t)s.n_blocks * s.part_bytes + s.tail_bytes;
    for (int32_t r = 0; r < s.n_parts * s.n_copies; r++) {
        p->rank[r] = fake_device_alloc(p->d, p->rank_bytes + 2 * GUARD);
        memset(fake_device_bytes(p->d, p->rank[r]), POISON, p->rank_bytes + 2 * GUARD);
        base[r] = p->rank[r] + GUARD;
    }
    p->scratch = fake_device_alloc(p->d, SCRATCH);
    struct td_split_config c = {.device = dm,
                                .rank_base = base,
                                .n_parts = s.n_parts,
                                .n_copies = s.n_copies,
                                .n_blocks = s.n_blocks,
                                .part_bytes = s.part_bytes,
                                .tail_bytes = s.tail_bytes};
    if (td_split_memory_create(&c, &p->m, &err)) fail_msg("%s", err.msg);
    p->table = td_split_memory_table(p->m);
    p->base = td_split_memory_base(p->m);
    p->bytes = (size_t)s.n_copies * td_split_memory_bytes(p->m);
    assert_int_equal(td_split_memory_bytes(p->m),
                     (size_t)s.n_blocks * (size_t)s.n_parts * s.part_bytes + s.tail_bytes);
    assert_int_equal(p->table->alloc_pinned(p->table->ctx, SCRATCH, &pinned, &err), TD_OK);
    p->host = pinned;
    memset(p->host, 0, SCRATCH);
    p->want = malloc(p->bytes);
    p->want_scratch = calloc(1, SCRATCH);
    p->want_host = calloc(1, SCRATCH);
    assert_true(p->want && p->want_scratch && p->want_host);
    memset(p->want, POISON, p->bytes);
}

static void pool_close(struct pool *p)
{
    p->table->release_pinned(p->table->ctx, p->host);
    td_split_memory_destroy(p->m);
    fake_device_close(p->d);
    free(p->want);
    free(p->want_scratch);
    free(p->want_host);
}

/* The plain formula of split_memory.h, byte by byte. */
static void compare(struct pool *p, int batch)
{
    const struct shape *s = &p->s;
    size_t copy_bytes = td_split_memory_bytes(p->m),
           block_bytes = (size_t)s->n_parts * s->part_bytes,
           blocks = (size_t)s->n_blocks * block_bytes;
    for (int32_t part = 0; part < s->n_parts; part++)
        for (int32_t copy = 0; copy < s->n_copies; copy++) {
            const uint8_t *mem = fake_device_bytes(p->d, p->rank[part * s->n_copies + copy]),
                          *pool = p->want + (size_t)copy * copy_bytes;
            for (size_t i = 0; i < p->rank_bytes + 2 * GUARD; i++) {
                uint8_t want = POISON;
                size_t at = i - GUARD;
                if (i >= GUARD && at < (size_t)s->n_blocks * s->part_bytes)
                    want = pool[at / s->part_bytes * block_bytes + (size_t)part * s->part_bytes +
                                at % s->part_bytes];
                else if (i >= GUARD && at < p->rank_bytes && part == 0)
                    want = pool[blocks + at - (size_t)s->n_blocks * s->part_bytes];
                if (mem[i] != want)
                    fail_msg("batch %d: part %d copy %d byte %zd is %02x, wanted %02x", batch, part,
                             copy, (ssize_t)at, mem[i], want);
            }
        }
    assert_memory_equal(fake_device_bytes(p->d, p->scratch), p->want_scratch, SCRATCH);
    assert_memory_equal(p->host, p->want_host, SCRATCH);
}

static bool overlap(const uint8_t *a, size_t n, const uint8_t *b, size_t m)
{
    return a < b + m && b < a + n;
}

/* One of the runs of a batch: from and to as offsets into the pool (which 0), the scratch (1) or
 * the host's memory (2). */
struct end {
    int which;
    size_t at;
};

static struct end pick(const struct pool *p, int which, size_t n)
{
    return (struct end){which, draw((which ? SCRATCH : p->bytes) - n + 1)};
}

static uint8_t *address(const struct pool *p, struct end e)
{
    return (e.which == 0 ? p->base : e.which == 1 ? p->scratch : p->host) + e.at;
}
static uint8_t *plain(const struct pool *p, struct end e)
{
    return (e.which == 0 ? p->want : e.which == 1 ? p->want_scratch : p->want_host) + e.at;
}

static void one_batch(struct pool *p, int batch)
{
    struct td_err err = {0};
    struct td_device_run runs[RUNS_MAX];
    struct end ends[RUNS_MAX];
    size_t n_runs = 1 + draw(RUNS_MAX), n = 0;
    enum td_device_copy kind = (enum td_device_copy)draw(3);
    size_t limit = p->bytes < SCRATCH ? p->bytes : SCRATCH;
    for (size_t b = 0; b < SCRATCH && kind == TD_COPY_TO_DEVICE; b++)
        p->host[b] = p->want_host[b] = (uint8_t)(b * 31 + (size_t)batch + b / 253);
    for (size_t i = 0; i < n_runs; i++) {
        size_t bytes = 1 + draw(draw(2) ? limit : 64 < limit ? 64 : limit);
        int on_device = (int)draw(3);
        struct end from = pick(p,
                               kind == TD_COPY_TO_DEVICE   ? 2
                               : kind == TD_COPY_ON_DEVICE ? on_device == 1
                                                           : 0,
                               bytes);
        struct end to = pick(p,
                             kind == TD_COPY_TO_HOST     ? 2
                             : kind == TD_COPY_ON_DEVICE ? on_device == 2
                                                         : 0,
                             bytes);
        /* runs of a batch may go in any order */
        bool clear = !overlap(address(p, from), bytes, address(p, to), bytes);
        for (size_t k = 0; k < n; k++)
            clear = clear && !overlap(address(p, to), bytes, runs[k].to, runs[k].bytes) &&
                    !overlap(address(p, from), bytes, runs[k].to, runs[k].bytes) &&
                    !overlap(address(p, to), bytes, runs[k].from, runs[k].bytes);
        if (!clear) continue;
        ends[n] = to;
        runs[n++] =
            (struct td_device_run){.to = address(p, to), .from = address(p, from), .bytes = bytes};
        memcpy(plain(p, ends[n - 1]), plain(p, from), bytes);
    }
    if (n == 0) return;
    uint64_t ticket = 0;
    if (p->table->copy(p->table->ctx, kind, runs, n, &ticket, &err))
        fail_msg("batch %d: %s", batch, err.msg);
    if (draw(2)) {
        assert_int_equal(p->table->wait(p->table->ctx, ticket, &err), TD_OK);
    } else {
        td_status s;
        while ((s = p->table->done(p->table->ctx, ticket, &err)) == TD_INPROGRESS) continue;
        assert_int_equal(s, TD_OK);
    }
    compare(p, batch);
}

static void test_as_one_array(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        {1, 1, 3, 96, 64}, {2, 1, 7, 64, 64}, {4, 1, 5, 48, 4096}, {2, 2, 6, 80, 100},
        {1, 4, 4, 33, 1},  {8, 2, 3, 7, 64},  {16, 1, 2, 1, 3},    {2, 1, 3, 8192, 64},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int slow = 0; slow < 2; slow++) {
            struct pool p;
            random_state = i * 2 + (size_t)slow + 1;
            pool_open(&p, shapes[i], slow ? "slow" : "");
            for (int b = 0; b < BATCHES / 2; b++) one_batch(&p, b);
            pool_close(&p);
        }
}

/* A run of the whole pool, longer than the list at boot. */
static void test_longer_than_the_list(void **state)
{
    (void)state;
    struct pool p;
    struct td_err err = {0};
    uint64_t ticket = 0;
    pool_open(&p, (struct shape){16, 1, 600, 1, 64}, "");
    struct td_device_run run = {.to = p.base, .from = p.host, .bytes = 600 * 16};
    for (size_t i = 0; i < run.bytes; i++)
        p.host[i] = p.want_host[i] = p.want[i] = (uint8_t)(i * 7 + i / 251);
    assert_int_equal(p.table->copy(p.table->ctx, TD_COPY_TO_DEVICE, &run, 1, &ticket, &err), TD_OK);
    assert_int_equal(p.table->wait(p.table->ctx, ticket, &err), TD_OK);
    compare(&p, 0);
    pool_close(&p);
}

/* What a handle or a dma-buf cannot say is refused, and the device's failures are passed on. */
static void test_refusals(void **state)
{
    (void)state;
    struct pool p;
    struct td_err err = {0};
    uint8_t handle[TD_DEVICE_HANDLE_BYTES];
    uint64_t offset, ticket;
    int fd;
    pool_open(&p, (struct shape){2, 2, 3, 64, 64}, "fails=2");
    assert_int_equal(p.table->ipc_export(p.table->ctx, p.base, handle, &offset, &err),
                     TD_ERR_UNSUPPORTED);
    assert_string_equal(err.msg,
                        "the pool lies on the devices of 4 ranks (tp), and a handle is of one");
    assert_int_equal(p.table->dmabuf(p.table->ctx, p.base, 384, &fd, &offset, &err),
                     TD_ERR_UNSUPPORTED);
    assert_string_equal(err.msg,
                        "the pool lies on the devices of 4 ranks (tp), and a dma-buf is of one");
    struct td_device_run run = {.to = p.host, .from = p.base + 60, .bytes = 8};
    assert_int_equal(p.table->copy(p.table->ctx, TD_COPY_TO_HOST, &run, 1, &ticket, &err), TD_OK);
    assert_int_equal(p.table->wait(p.table->ctx, ticket, &err), TD_OK);
    td_status s = p.table->copy(p.table->ctx, TD_COPY_TO_HOST, &run, 1, &ticket, &err);
    if (!s) s = p.table->wait(p.table->ctx, ticket, &err);
    assert_int_equal(s, TD_ERR_DEVICE);
    pool_close(&p);
}

/* ---- a pool of another process --------------------------------------------------------------- */

enum { PEER_BLOCKS = 9, PEER_PART = 96, PEER_TAIL = 64 };

/* Byte i of the peer's copy 0 as one array; its second copies hold other bytes. */
static uint8_t peer_byte(size_t i) { return (uint8_t)(i * 13 + i / 256 * 7 + 1); }

struct peer {
    pid_t pid;
    int end; /* closed: it ends */
    uint8_t pool[TD_DEVICE_POOL_BYTES];
    size_t bytes;
    int32_t n_parts;
};

/* The child's life: writes the size and bytes of its description to `out`, stays until `end` is
 * closed at the other side. */
static void be_a_peer(int32_t n_parts, int out, int end)
{
    struct fake_device *d = fake_device_open("");
    const struct td_device_memory *dm = fake_device_memory(d);
    void *base[TD_SPLIT_RANKS_MAX];
    struct td_split_handle handles[TD_SPLIT_RANKS_MAX];
    struct td_split_memory *m;
    uint8_t pool[TD_DEVICE_POOL_BYTES];
    size_t bytes = 0, block = (size_t)n_parts * PEER_PART;
    for (int32_t r = 0; r < 2 * n_parts; r++) {
        uint8_t *p = fake_device_alloc(d, GUARD + PEER_BLOCKS * PEER_PART + PEER_TAIL),
                *b = fake_device_bytes(d, p) + GUARD;
        base[r] = p + GUARD;
        for (size_t i = 0; i < PEER_BLOCKS * PEER_PART; i++)
            b[i] = r % 2 ? 0xee
                         : peer_byte(i / PEER_PART * block + (size_t)(r / 2) * PEER_PART +
                                     i % PEER_PART);
        if (dm->ipc_export(dm->ctx, base[r], handles[r].handle, &handles[r].offset, NULL)) _exit(2);
    }
    struct td_split_config c = {.device = dm,
                                .rank_base = base,
                                .handles = handles,
                                .n_parts = n_parts,
                                .n_copies = 2,
                                .n_blocks = PEER_BLOCKS,
                                .part_bytes = PEER_PART,
                                .tail_bytes = PEER_TAIL};
    if (td_split_memory_create(&c, &m, NULL)) _exit(3);
    const struct td_device_memory *t = td_split_memory_table(m);
    if (t->pool_export(t->ctx, pool, &bytes, NULL) ||
        write(out, &bytes, sizeof bytes) != sizeof bytes ||
        write(out, pool, bytes) != (ssize_t)bytes)
        _exit(4);
    char c1;
    if (read(end, &c1, 1) != 0) _exit(5);
    td_split_memory_destroy(m);
    fake_device_close(d);
    _exit(0);
}

static void peer_start(struct peer *p, int32_t n_parts)
{
    int out[2], end[2];
    assert_int_equal(pipe(out), 0);
    assert_int_equal(pipe(end), 0);
    *p = (struct peer){.pid = fork(), .end = end[1], .n_parts = n_parts};
    if (p->pid == 0) {
        close(end[1]);
        be_a_peer(n_parts, out[1], end[0]);
    }
    close(out[1]);
    close(end[0]);
    assert_int_equal(read(out[0], &p->bytes, sizeof p->bytes), sizeof p->bytes);
    assert_true(p->bytes <= sizeof p->pool);
    assert_int_equal(read(out[0], p->pool, p->bytes), p->bytes);
    close(out[0]);
}

/* All of them: a later one has inherited an earlier one's pipe. */
static void peers_stop(struct peer *p, int n)
{
    int status;
    for (int i = 0; i < n; i++) close(p[i].end);
    for (int i = 0; i < n; i++) {
        assert_int_equal(waitpid(p[i].pid, &status, 0), p[i].pid);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static td_status open_peer(struct pool *p, const struct peer *peer, const uint8_t *pool,
                           size_t bytes, void **ret_base, struct td_err *err)
{
    return p->table->pool_open(p->table->ctx, pool, bytes, (size_t)peer->n_parts * PEER_PART,
                               PEER_BLOCKS, ret_base, err);
}

/* Whole blocks of a peer of 1, 2 or 4 parts to a pool of 1, 2, 3 or 4: two peers at once, and
 * what was there before them is untouched. */
static void test_pool_of_another_process(void **state)
{
    (void)state;
    static const int32_t degrees[][2] = {{1, 4}, {2, 1}, {4, 2}, {3, 4}, {4, 4}};
    for (size_t k = 0; k < sizeof degrees / sizeof *degrees; k++) {
        struct peer peers[2];
        struct td_err err = {0};
        struct pool p;
        void *base[2];
        int32_t from = degrees[k][0], to = degrees[k][1];
        peer_start(&peers[0], from);
        peer_start(&peers[1], from);
        random_state = k + 1;
        pool_open(&p, (struct shape){to, 1, PEER_BLOCKS, (size_t)from * PEER_PART / (size_t)to, 64},
                  "");
        size_t block = (size_t)from * PEER_PART;
        for (int i = 0; i < 2; i++)
            if (open_peer(&p, &peers[i], peers[i].pool, peers[i].bytes, &base[i], &err))
                fail_msg("%d to %d: %s", from, to, err.msg);
        for (int i = 0; i < 40; i++) {
            size_t src = draw(PEER_BLOCKS), dst = draw(PEER_BLOCKS), in = draw(2) ? 0 : draw(block),
                   n = in ? 1 + draw(block - in) : block;
            struct td_device_run run = {.to = p.base + dst * block + in,
                                        .from = (uint8_t *)base[i & 1] + src * block + in,
                                        .bytes = n};
            uint64_t ticket = 0;
            for (size_t b = 0; b < n; b++)
                p.want[dst * block + in + b] = peer_byte(src * block + in + b);
            if (p.table->copy(p.table->ctx, TD_COPY_ON_DEVICE, &run, 1, &ticket, &err) ||
                p.table->wait(p.table->ctx, ticket, &err))
                fail_msg("%s", err.msg);
        }
        compare(&p, (int)k);
        for (int i = 0; i < 2; i++) p.table->ipc_close(p.table->ctx, base[i]);
        for (int b = 0; b < 10; b++) one_batch(&p, b);
        pool_close(&p);
        peers_stop(peers, 2);
    }
}

static void put(uint8_t *pool, size_t at, uint64_t value, size_t bytes)
{
    memcpy(pool + at, &value, bytes);
}

static const struct {
    size_t at, bytes;
    uint64_t value;
    td_status status;
    const char *says;
} spoilt[] = {
    {0, 4, 1, TD_ERR_CORRUPT, "are no description of a pool"},
    {4, 4, 0, TD_ERR_CORRUPT, "are no description of a pool"},
    {4, 4, 1, TD_ERR_CORRUPT, "are no description of a pool"},
    {4, 4, 17, TD_ERR_CORRUPT, "are no description of a pool"},
    {4, 4, 0xffffffff, TD_ERR_CORRUPT, "are no description of a pool"},
    {8, 8, PEER_BLOCKS + 1, TD_ERR_CORRUPT,
     "a pool of 10 blocks in 2 parts of 96 bytes, tail 64: it must be 9 of 192 bytes"},
    {8, 8, 1ull << 32 | PEER_BLOCKS, TD_ERR_CORRUPT, "it must be 9 of 192 bytes"},
    {16, 8, PEER_PART / 2, TD_ERR_CORRUPT, "it must be 9 of 192 bytes"},
    {16, 8, UINT64_MAX, TD_ERR_CORRUPT, "it must be 9 of 192 bytes"},
    {24, 8, 15, TD_ERR_CORRUPT, "tail 15"},
    {24, 8, UINT64_MAX, TD_ERR_CORRUPT, "it must be 9 of 192 bytes"},
    {32, 8, 1, TD_ERR_UNSUPPORTED, "part 0 of 2: invalid resource handle"},
    {32 + 88, 8, 1, TD_ERR_UNSUPPORTED, "part 1 of 2: invalid resource handle"},
    {32 + 64, 8, UINT64_MAX / 2, TD_ERR_CORRUPT,
     "part 0 of the pool begins at 9223372036854775807"},
    {32 + 72, 8, 0, TD_ERR_UNSUPPORTED, "part 0 of 2 holds other bytes than were put there"},
    {32 + 88 + 72, 8, 0, TD_ERR_UNSUPPORTED, "part 1 of 2 holds other bytes than were put there"},
};

/* What comes from outside and is not the description of such a pool. */
static void test_spoilt_descriptions(void **state)
{
    (void)state;
    struct peer peer;
    struct pool p, wrong;
    struct td_err err = {0};
    uint8_t pool[TD_DEVICE_POOL_BYTES];
    void *base;
    peer_start(&peer, 2);
    pool_open(&p, (struct shape){2, 1, PEER_BLOCKS, PEER_PART, 64}, "");
    for (size_t k = 0; k < sizeof spoilt / sizeof *spoilt; k++) {
        memcpy(pool, peer.pool, peer.bytes);
        put(pool, spoilt[k].at, spoilt[k].value, spoilt[k].bytes);
        td_status s = open_peer(&p, &peer, pool, peer.bytes, &base, &err);
        if (s != spoilt[k].status || !strstr(err.msg, spoilt[k].says))
            fail_msg("case %zu: %d, %s", k, s, err.msg);
    }
    for (size_t bytes = 0; bytes < peer.bytes; bytes++)
        assert_int_equal(open_peer(&p, &peer, peer.pool, bytes, &base, &err), TD_ERR_CORRUPT);
    memcpy(pool, peer.pool, peer.bytes); /* the parts the other way round */
    memcpy(pool + 32, peer.pool + 32 + 88, 72);
    memcpy(pool + 32 + 88, peer.pool + 32, 72);
    assert_int_equal(open_peer(&p, &peer, pool, peer.bytes, &base, &err), TD_ERR_UNSUPPORTED);
    assert_int_equal(open_peer(&p, &peer, peer.pool, peer.bytes, &base, &err), TD_OK);
    p.table->ipc_close(p.table->ctx, base);
    pool_close(&p);
    static const char *const words[][2] = {
        {"blind-ipc", "part 0 of 2: peer access is not supported"},
        {"wrong-ipc", "part 0 of 2 holds other bytes"}};
    for (int k = 0; k < 2; k++) {
        pool_open(&wrong, (struct shape){1, 1, PEER_BLOCKS, 2 * PEER_PART, 64}, words[k][0]);
        assert_int_equal(open_peer(&wrong, &peer, peer.pool, peer.bytes, &base, &err),
                         TD_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.msg, words[k][1]));
        pool_close(&wrong);
    }
    peers_stop(&peer, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_of_another_process), cmocka_unit_test(test_spoilt_descriptions),
        cmocka_unit_test(test_as_one_array), cmocka_unit_test(test_longer_than_the_list),
        cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
