/* cuda_comm_test.c - the ranks' sums and gathers over NCCL's calls, and the order in which a
 * communicator, its graphs and its users go.
 *
 * The library is nccl_stub.c (TD_CUDA_EMU_NCCL), which ends a process that breaks one of NCCL's
 * rules. Every rank is a process with an emulated device of its own; a case is a function that
 * all ranks run, and passes when all end with status 0. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "kernels/device.h"
#include "tests/unit/kernels_test.h"
#include "tests/fake/nccl_stub.h"

#include "kernels/cuda/nccl_api.h"

enum { MAX_RANKS = 3, MAX_FLOATS = 40000, CASE_S = 60 };

/* What the ranks of a case tell each other beside NCCL. */
struct board {
    _Atomic int has_id, n_ready;
    uint8_t id[TD_DEVICE_RANK_ID_BYTES];
};

static struct board *board;
static const struct td_ops *ops;
static const struct td_device *dev;
static int32_t rank, n_ranks;
static float *x, *pinned;
static td_nccl_stub_hold_fn *hold;
static td_nccl_stub_count_fn *inside, *ended;
static td_nccl_stub_fail_fn *fail_comm;

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "rank %d, line %d: not so: %s\n", (int)rank, __LINE__, #what);         \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* Every rank is here. */
static void meet(int n)
{
    atomic_fetch_add(&board->n_ready, 1);
    while (board->n_ready < n * n_ranks) sched_yield();
}

static void open_rank(bool deterministic)
{
    struct td_err err = {0};
    void *stub = dlopen(getenv("TD_CUDA_EMU_NCCL"), RTLD_NOW | RTLD_LOCAL);
    CHECK(stub);
    *(void **)&hold = dlsym(stub, "td_nccl_stub_hold"),
           *(void **)&fail_comm = dlsym(stub, "td_nccl_stub_fail");
    *(void **)&inside = dlsym(stub, "td_nccl_stub_inside"),
           *(void **)&ended = dlsym(stub, "td_nccl_stub_ended");
    CHECK(hold && fail_comm && inside && ended);
    const struct td_device_config config = {.index = rank, .deterministic = deterministic};
    CHECK(td_device_open(&config, &ops, &err) == TD_OK);
    dev = ops->device;
    if (rank == 0) {
        CHECK(dev->ranks->new_id(board->id, &err) == TD_OK);
        board->has_id = 1;
    }
    while (!board->has_id) sched_yield();
    const struct td_device_group group = {.rank = rank, .n_ranks = n_ranks};
    CHECK(dev->ranks->join(board->id, &group, MAX_FLOATS, &err) == TD_OK);
    void *there, *here;
    CHECK(dev->alloc(MAX_FLOATS * sizeof(float), "x", &there, &err) == TD_OK);
    CHECK(dev->alloc_pinned(MAX_FLOATS * sizeof(float), "x", &here, &err) == TD_OK);
    x = there, pinned = here;
}

static void close_rank(void)
{
    dev->ranks->leave();
    dev->release(x);
    dev->release_pinned(pinned);
    td_device_close(ops);
}

static float term(int32_t r, size_t i)
{
    return (float)((double)((i * 7919 + (size_t)r * 104729) % 100003) * 1e-3 + 1e4 * r);
}

static void issue_sum(size_t n)
{
    dev->put(x, pinned, n * sizeof(float));
    dev->ranks->all_reduce_sum(x, n);
}

/* A sum in a step of its own; key as step_begin has it. */
static td_status sum(size_t n, uint64_t key, struct td_err *err)
{
    if (dev->step_begin(key)) issue_sum(n);
    td_status s = dev->step_end(err);
    return s ? s : dev->wait(err);
}

static void fill(size_t n)
{
    for (size_t i = 0; i < n; i++) pinned[i] = term(rank, i);
}

/* In the order of ranks, bit for bit, direct and by a graph, whatever n; the gather beside it. */
static void sums_and_gathers(void)
{
    static const size_t sizes[] = {1, 3, 4, 9, 1000, 1023, 33333};
    static float got[MAX_FLOATS];
    struct td_err err = {0};
    open_rank(true);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int turn = 0; turn < 3; turn++) {
            size_t n = sizes[k];
            fill(n);
            CHECK(sum(n, turn ? k + 1 : 0, &err) == TD_OK);
            CHECK(dev->download(got, x, n * sizeof(float), &err) == TD_OK);
            for (size_t i = 0; i < n; i++) {
                float want = term(0, i);
                for (int32_t r = 1; r < n_ranks; r++) want += term(r, i);
                CHECK(memcmp(&want, &got[i], sizeof want) == 0);
            }
        }
    int32_t first[MAX_RANKS + 1] = {0}, rows = 5;
    for (int32_t r = 0; r < n_ranks; r++) first[r + 1] = first[r] + 3 + r;
    int32_t columns = first[n_ranks], width = first[rank + 1] - first[rank];
    for (int32_t i = 0; i < rows * (rank ? width : columns); i++)
        pinned[i] = (float)(1000 * rank + i);
    if (dev->step_begin(0)) {
        dev->put(x, pinned, (size_t)(rows * (rank ? width : columns)) * sizeof(float));
        dev->ranks->gather_columns(rank ? x : NULL, rows, first, x);
    }
    CHECK(dev->step_end(&err) == TD_OK && dev->wait(&err) == TD_OK);
    CHECK(dev->download(got, x, (size_t)(rows * columns) * sizeof(float), &err) == TD_OK);
    for (int32_t r = 1; r < n_ranks && rank == 0; r++)
        for (int32_t i = 0; i < rows; i++)
            for (int32_t j = 0; j < 3 + r; j++)
                CHECK(got[i * columns + first[r] + j] == (float)(1000 * r + i * (3 + r) + j));
    CHECK(dev->ranks->check(&err) == TD_OK);
    close_rank();
    CHECK(ended() == 1);
}

/* NCCL's own sum, where no order is promised. */
static void sums_in_any_order(void)
{
    static float got[1000];
    struct td_err err = {0};
    open_rank(false);
    fill(1000);
    CHECK(sum(1000, 0, &err) == TD_OK && dev->download(got, x, sizeof got, &err) == TD_OK);
    for (size_t i = 0; i < 1000; i++) {
        double want = 0;
        for (int32_t r = 0; r < n_ranks; r++) want += (double)term(r, i);
        CHECK(got[i] > want * (1 - 1e-6) && got[i] < want * (1 + 1e-6));
    }
    close_rank();
}

static bool is_lost(void)
{
    uint64_t n_free, n_all;
    struct td_err err;
    return dev->free_bytes(&n_free, &n_all, &err) != TD_OK;
}

static void *abort_now(void *arg)
{
    (void)arg;
    dev->ranks->abort();
    return NULL;
}

/* While the owning thread is inside a call, another aborts; the call goes on when the abort has
 * begun, which shows as a lost device. An abort that did not wait would end the communicator at
 * once: it has a tenth of a second for that. */
static void *abort_beside_a_call(void *arg)
{
    const int *ends = arg;
    pthread_t aborter;
    while (inside() == 0) sched_yield();
    CHECK(pthread_create(&aborter, NULL, abort_now, NULL) == 0);
    while (!is_lost()) sched_yield();
    for (uint64_t end = td_now_ns() + 100 * TD_NS_PER_MS; ended() == 0 && td_now_ns() < end;)
        sched_yield();
    CHECK(ended() == 0 && write(ends[1], "", 1) == 1);
    CHECK(pthread_join(aborter, NULL) == 0);
    return NULL;
}

static void abort_waits_for_a_call(void)
{
    open_rank(true);
    if (rank == 0) {
        struct td_err err = {0};
        int ends[2];
        pthread_t other;
        CHECK(pipe(ends) == 0);
        hold(ends[0]);
        CHECK(pthread_create(&other, NULL, abort_beside_a_call, ends) == 0);
        CHECK(dev->step_begin(0));
        issue_sum(10);
        CHECK(dev->step_end(&err) == TD_ERR_DEVICE && dev->wait(&err) == TD_ERR_DEVICE);
        CHECK(strstr(err.msg, "another rank is lost"));
        dev->ranks->all_reduce_sum(x, 10); /* no harm */
        CHECK(pthread_join(other, NULL) == 0);
    }
    close_rank();
    CHECK(ended() == 1);
}

/* Rank 1 is gone, and rank 0 waits for a launched graph: an abort ends the wait, and returns
 * itself once the graphs are dropped. */
static void abort_ends_a_graph(void)
{
    struct td_err err = {0};
    pthread_t aborter;
    open_rank(true);
    fill(10);
    CHECK(sum(10, 1, &err) == TD_OK && sum(10, 1, &err) == TD_OK);
    meet(1);
    if (rank == 1) _exit(0);
    CHECK(!dev->step_begin(1) && dev->step_end(&err) == TD_OK);
    CHECK(pthread_create(&aborter, NULL, abort_now, NULL) == 0);
    CHECK(dev->wait(&err) == TD_ERR_DEVICE);
    close_rank();
    CHECK(pthread_join(aborter, NULL) == 0 && ended() == 1);
}

/* The device is lost while a step is recorded: nothing of the recording stays that an abort
 * would wait for. */
static void abort_while_recording(void)
{
    struct td_err err = {0};
    pthread_t aborter;
    open_rank(true);
    CHECK(dev->step_begin(1));
    issue_sum(10);
    CHECK(pthread_create(&aborter, NULL, abort_now, NULL) == 0);
    while (!is_lost()) sched_yield();
    CHECK(dev->step_end(&err) == TD_ERR_DEVICE);
    close_rank();
    CHECK(pthread_join(aborter, NULL) == 0 && ended() == 1);
}

static void errors_are_told(void)
{
    struct td_err err = {0};
    open_rank(true);
    CHECK(dev->ranks->check(&err) == TD_OK);
    fail_comm(TD_NCCL_IN_PROGRESS);
    CHECK(dev->ranks->check(&err) == TD_OK && !is_lost());
    fail_comm(TD_NCCL_REMOTE_ERROR);
    CHECK(dev->ranks->check(&err) == TD_ERR_DEVICE &&
          strstr(err.msg, "NCCL says remote process exited") && is_lost());
    close_rank();
    CHECK(ended() == 1);
}

/* Rank 1 never comes: rank 0 does not wait for it for ever, and has no communicator then. */
static void a_rank_that_never_comes(void)
{
    struct td_err err = {0};
    setenv("TANDEM_NCCL_JOIN_TIMEOUT_MS", "300", 1);
    if (rank == 1) return;
    void *stub = dlopen(getenv("TD_CUDA_EMU_NCCL"), RTLD_NOW | RTLD_LOCAL);
    CHECK(stub);
    *(void **)&ended = dlsym(stub, "td_nccl_stub_ended");
    const struct td_device_config config = {.deterministic = true};
    CHECK(td_device_open(&config, &ops, &err) == TD_OK);
    dev = ops->device;
    const struct td_device_group group = {.n_ranks = n_ranks};
    CHECK(dev->ranks->new_id(board->id, &err) == TD_OK);
    uint64_t begin_ns = td_now_ns();
    CHECK(dev->ranks->join(board->id, &group, MAX_FLOATS, &err) == TD_ERR_DEVICE);
    /* join counts whole milliseconds, the first of them begun */
    CHECK(td_now_ns() - begin_ns >= 299 * TD_NS_PER_MS);
    CHECK(strstr(err.msg, "rank 0 of 2 joined over NCCL, and not all others did within 300 ms "
                          "(TANDEM_NCCL_JOIN_TIMEOUT_MS)"));
    CHECK(ended() == 1 && dev->ranks->check(&err) == TD_OK); /* aborted once; nobody is joined */
    setenv("TANDEM_NCCL_JOIN_TIMEOUT_MS", "soon", 1);
    CHECK(dev->ranks->new_id(board->id, &err) == TD_OK);
    CHECK(dev->ranks->join(board->id, &group, MAX_FLOATS, &err) == TD_ERR_INVALID &&
          strstr(err.msg, "is \"soon\", must be 100..86400000"));
    shm_unlink((const char *)board->id); /* nobody has joined that one */
    dev->ranks->leave();
    td_device_close(ops);
}

/* ---- the rules themselves: what the stand-in must not let pass */

static void destroy_under_a_graph(void)
{
    struct td_err err = {0};
    open_rank(true);
    CHECK(sum(10, 1, &err) == TD_OK);
    dev->ranks->abort(); /* by the owning thread, which alone could drop the graphs */
}

static void unequal_counts(void)
{
    struct td_err err = {0};
    open_rank(true);
    (void)sum(10 + (size_t)rank, 0, &err);
    meet(1); /* one of the two is dead before: the other stays until its alarm, or finds the same */
}

/* ---- the ranks of a case */

static void run_case(void (*f)(void), int n, int want_signal)
{
    pid_t pids[MAX_RANKS];
    memset(board, 0, sizeof *board);
    n_ranks = n;
    for (rank = 0; rank < n; rank++) {
        pids[rank] = fork();
        assert_true(pids[rank] >= 0);
        if (pids[rank]) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(CASE_S);
        f();
        exit(0);
    }
    int n_wanted = 0;
    for (int i = 0; i < n; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (want_signal && WIFSIGNALED(status) && WTERMSIG(status) == want_signal &&
            n_wanted++ == 0) {
            for (int j = i + 1; j < n; j++) kill(pids[j], SIGABRT); /* the others may wait for it */
            continue;
        }
        if (want_signal && WIFSIGNALED(status)) continue;
        if (WIFSIGNALED(status))
            fail_msg("rank %d of %d ended with signal %d", i, n, WTERMSIG(status));
        if (want_signal == 0) assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_true(!want_signal || n_wanted > 0);
}

#define CASE(name, n, want_signal)                                                                 \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        run_case(name, n, want_signal);                                                            \
    }
CASE(sums_in_any_order, 3, 0)
CASE(abort_waits_for_a_call, 2, 0)
CASE(abort_ends_a_graph, 2, 0)
CASE(abort_while_recording, 2, 0)
CASE(errors_are_told, 2, 0)
CASE(a_rank_that_never_comes, 2, 0)
CASE(destroy_under_a_graph, 2, SIGABRT)
CASE(unequal_counts, 2, SIGABRT)

static void test_sums_and_gathers(void **state)
{
    (void)state;
    run_case(sums_and_gathers, 2, 0);
    run_case(sums_and_gathers, 3, 0);
}

int main(void)
{
    if (!getenv("TD_CUDA_EMU_NCCL"))
        return 77; /* a real device: NCCL itself is asked by
                      tests/gpu/run, part cluster-tp */
    setenv("TD_CUDA_EMU_DEVICES", "3", 1);
    setenv("TD_CUDA_EMU_MEMORY", "256M", 1);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_and_gathers),        cmocka_unit_test(test_sums_in_any_order),
        cmocka_unit_test(test_abort_waits_for_a_call),  cmocka_unit_test(test_abort_ends_a_graph),
        cmocka_unit_test(test_abort_while_recording),   cmocka_unit_test(test_errors_are_told),
        cmocka_unit_test(test_destroy_under_a_graph),   cmocka_unit_test(test_unequal_counts),
        cmocka_unit_test(test_a_rank_that_never_comes), /* the last: an old library has no
                                                           deadline */
    };
    const char *is_old = getenv("TD_TEST_NCCL_IS_OLD");
    if (is_old && *is_old)
        return _cmocka_run_group_tests("old NCCL", tests, sizeof tests / sizeof *tests - 1, NULL,
                                       NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
