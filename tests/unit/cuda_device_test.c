/* cuda_device_test.c - opening a device and every reason why not; memory, copies, steps and graphs;
 * and that a lost device stays lost with the first reason.
 *
 * TANDEM_CUDA_LIBRARY names the library: the emulated device (CTest), where faults are planted
 * by TD_CUDA_EMU_FAULT, or the real one on a machine with a GPU, where the tests that plant
 * faults say that they do nothing. */
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/device.h"
#include "tests/unit/kernels_test.h"

enum { N_GRAPHS = 64 }; /* cuda.cu keeps so many */

static const struct td_ops *ops;
static const struct td_device *dev;
static struct td_err err;
static char library[1024];
static bool is_emulated;

static td_status try_open(int32_t index, const char *named)
{
    struct td_device_config config = {.index = index, .library = named};
    err = (struct td_err){0};
    return td_device_open(&config, &ops, &err);
}

static void open_device(void)
{
    if (try_open(0, NULL)) fail_msg("open: %s", err.msg);
    dev = ops->device;
}

static void close_device(void)
{
    td_device_close(ops);
    ops = NULL, dev = NULL;
}

static void expect_text(const char *text)
{
    if (!strstr(err.msg, text)) fail_msg("the message should hold \"%s\": %s", text, err.msg);
}

/* ---- the loader ------------------------------------------------------------------------------ */

static void test_no_library(void **state)
{
    (void)state;
    assert_int_equal(try_open(0, "/nowhere/libtandem_cuda.so"), TD_ERR_UNSUPPORTED);
    expect_text("CUDA is not available: /nowhere/libtandem_cuda.so does not load");
    assert_int_equal(setenv("TANDEM_CUDA_LIBRARY", "/elsewhere/lib.so", 1), 0);
    assert_int_equal(try_open(0, NULL), TD_ERR_UNSUPPORTED);
    expect_text("/elsewhere/lib.so does not load");
    assert_int_equal(try_open(0, ""), TD_ERR_UNSUPPORTED); /* empty: as if not given */
    expect_text("/elsewhere/lib.so does not load");
    assert_int_equal(setenv("TANDEM_CUDA_LIBRARY", "libm.so.6", 1), 0);
    assert_int_equal(try_open(0, NULL), TD_ERR_UNSUPPORTED);
    expect_text("has no td_cuda_open");
    assert_int_equal(setenv("TANDEM_CUDA_LIBRARY", library, 1), 0);
}

static void test_search_beside_the_program(void **state)
{
    (void)state;
    char exe[2048];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 64);
    assert_true(n > 0);
    exe[n] = 0;
    char *name = strrchr(exe, '/') + 1;
    memcpy(name, "libtandem_cuda.so", sizeof "libtandem_cuda.so");
    bool is_there = access(exe, F_OK) == 0;
    assert_int_equal(unsetenv("TANDEM_CUDA_LIBRARY"), 0);
    td_status s = try_open(0, NULL);
    if (!is_there) {
        assert_int_equal(s, TD_ERR_UNSUPPORTED);
        expect_text("was not found: this build has no CUDA part, or set TANDEM_CUDA_LIBRARY");
        expect_text(exe); /* what was tried */
        expect_text("../lib/libtandem_cuda.so");
        /* A file of that name that is no library ends the search, with the loader's reason. */
        FILE *f = fopen(exe, "w");
        assert_non_null(f);
        assert_int_equal(fclose(f), 0);
        s = try_open(0, NULL);
        assert_int_equal(unlink(exe), 0);
        assert_int_equal(s, TD_ERR_UNSUPPORTED);
        expect_text("does not load");
    } else {
        print_message("  (%s exists: %s)\n", exe, s ? err.msg : "it opens");
        if (!s) close_device();
    }
    assert_int_equal(setenv("TANDEM_CUDA_LIBRARY", library, 1), 0);
}

static void test_other_interface(void **state)
{
    (void)state;
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(handle);
    td_cuda_open_fn *open_it;
    void *symbol = dlsym(handle, TD_CUDA_OPEN_SYMBOL);
    assert_non_null(symbol);
    memcpy(&open_it, &symbol, sizeof open_it);
    struct td_device_config config = {0};
    const struct td_ops *none = NULL;
    assert_int_equal(open_it(TD_CUDA_ABI + 1, &config, &none, &err), TD_ERR_UNSUPPORTED);
    expect_text("take both from one build");
    assert_null(none);
    assert_int_equal(dlclose(handle), 0);
}

static void test_bad_index_and_second_open(void **state)
{
    (void)state;
    assert_int_equal(try_open(-1, NULL), TD_ERR_INVALID);
    expect_text("CUDA device index -1: there ");
    assert_int_equal(try_open(4096, NULL), TD_ERR_INVALID);
    expect_text("CUDA device index 4096: there ");
    open_device();
    assert_string_equal(ops->name, "cuda");
    assert_true(dev->info.n_sms > 0 && dev->info.cc_major >= 8 && dev->info.memory_bytes > 0 &&
                dev->info.name[0]);
    assert_memory_equal(dev->info.uuid, "GPU-", 4);
    assert_int_equal(strlen(dev->info.uuid), 40);
    const struct td_ops *kept = ops;
    assert_int_equal(try_open(0, NULL), TD_ERR_INVALID);
    expect_text("open already");
    ops = kept;
    close_device();
    td_device_close(NULL);
    for (int i = 0; i < 3; i++) open_device(), close_device(); /* as often as one likes */
}

/* A device that is lost stays so for its process, so each fault has a process of its own: this
 * program again, told what to do. */
static const char *fault, *fault_text, *fault_extra;

static void in_own_process(const char *what, const char *which, const char *text, const char *extra)
{
    if (!is_emulated) {
        print_message("  (a real device: the fault %s is not planted)\n", which);
        return;
    }
    char *argv[] = {
        (char *)"cuda_device_test", (char *)what, (char *)which, (char *)text, (char *)extra, NULL};
    pid_t pid = 0;
    int status = 0;
    fflush(stdout);
    assert_int_equal(setenv("TD_CUDA_EMU_FAULT", which, 1), 0);
    int failed = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    assert_int_equal(unsetenv("TD_CUDA_EMU_FAULT"), 0);
    assert_int_equal(failed, 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (status != 0) fail_msg("%s %s ended with status %d", what, which, status);
}

static void why_not(void **state)
{
    (void)state;
    td_status s = try_open(0, NULL);
    print_message("  %s: %s\n", fault, err.msg);
    char status[16];
    snprintf(status, sizeof status, "%d", (int)s);
    assert_string_equal(status, fault_extra);
    expect_text(fault_text);
    assert_null(ops);
}

static void test_reasons_why_not(void **state)
{
    (void)state;
    static const struct {
        const char *fault, *text;
        td_status status;
    } cases[] = {
        {"nodriver", "NVIDIA driver", TD_ERR_UNSUPPORTED},
        {"nodevice", "no device", TD_ERR_UNSUPPORTED},
        {"cc:75", "is sm_75: sm_80 or later is needed", TD_ERR_UNSUPPORTED},
        {"cc:120,noimage", "is sm_120: this library was built without code for it",
         TD_ERR_UNSUPPORTED},
        {"launch:1", "does not run a first kernel", TD_ERR_DEVICE},
        {"malloc:1", "cudaErrorMemoryAllocation", TD_ERR_NOMEM},
        {"malloc:2", "cudaErrorMemoryAllocation", TD_ERR_NOMEM},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char status[16];
        snprintf(status, sizeof status, "%d", (int)cases[i].status);
        in_own_process("why_not", cases[i].fault, cases[i].text, status);
    }
}

static void test_unknown_way_of_products(void **state)
{
    (void)state;
    assert_int_equal(setenv("TANDEM_CUDA_GEMM", "abacus", 1), 0);
    assert_int_equal(try_open(0, NULL), TD_ERR_INVALID);
    expect_text("TANDEM_CUDA_GEMM=abacus");
    assert_int_equal(unsetenv("TANDEM_CUDA_GEMM"), 0);
}

/* ---- memory and copies ----------------------------------------------------------------------- */

static void *alloc(size_t bytes)
{
    void *p = NULL;
    if (dev->alloc(bytes, "a test", &p, &err)) fail_msg("%s", err.msg);
    assert_non_null(p);
    return p;
}

static void test_out_of_memory_is_no_loss(void **state)
{
    (void)state;
    open_device();
    uint64_t n_free = 0, n_total = 0;
    assert_int_equal(dev->free_bytes(&n_free, &n_total, &err), TD_OK);
    assert_true(n_free > 0 && n_free <= n_total && n_total >= dev->info.memory_bytes / 2);
    void *p = &p;
    assert_int_equal(dev->alloc((size_t)n_total + (1 << 20), "the KV pool", &p, &err),
                     TD_ERR_NOMEM);
    print_message("  %s\n", err.msg);
    assert_ptr_equal(p, &p); /* untouched */
    expect_text(" for the KV pool asked, ");
    expect_text(" are free on CUDA device 0 (");
    expect_text("lower the option that sizes it");
    p = alloc(1000);
    uint64_t after = 0;
    assert_int_equal(dev->free_bytes(&after, &n_total, &err), TD_OK);
    dev->release(p);
    dev->release(NULL);
    dev->release_pinned(NULL);
    close_device();
}

static void test_copies(void **state)
{
    (void)state;
    open_device();
    /* a piece is 4 MiB: none, a byte, around one piece, around two, odd ends */
    static const size_t sizes[] = {
        0, 1, 4095, (4u << 20) - 1, 4u << 20, (4u << 20) + 1, (8u << 20) + 3, (13u << 20) + 77};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        uint8_t *host = malloc(n + 2), *back = malloc(n + 2);
        assert_true(host && back);
        for (size_t b = 0; b < n + 2; b += 8) {
            uint64_t v = rng_u64();
            memcpy(host + b, &v, n + 2 - b < 8 ? n + 2 - b : 8);
        }
        memset(back, 0xa5, n + 2);
        uint8_t *device = alloc(n + 64);
        assert_int_equal(dev->upload(device + 16, host, n, &err), TD_OK);
        assert_int_equal(dev->download(back + 1, device + 16, n, &err), TD_OK);
        if (memcmp(host, back + 1, n) != 0) fail_msg("%zu bytes came back as others", n);
        assert_true(back[0] == 0xa5 && back[n + 1] == 0xa5);
        dev->release(device);
        free(host), free(back);
    }
    close_device();
}

/* ---- steps ----------------------------------------------------------------------------------- */

enum { ROWS = 3, DIM = 40 };
struct rig {
    float *in, *out; /* device */
    float *pinned_in, *pinned_out;
    int n_issued;
};

static struct rig rig_make(void)
{
    struct rig r = {.in = alloc(ROWS * DIM * 4), .out = alloc(ROWS * DIM * 4)};
    void *p = NULL;
    assert_int_equal(dev->alloc_pinned(ROWS * DIM * 4, "a test", &p, &err), TD_OK);
    r.pinned_in = p;
    assert_int_equal(dev->alloc_pinned(ROWS * DIM * 4, "a test", &p, &err), TD_OK);
    r.pinned_out = p;
    return r;
}

static void rig_free(struct rig *r)
{
    dev->release(r->in), dev->release(r->out), dev->release_pinned(r->pinned_in),
        dev->release_pinned(r->pinned_out);
}

/* out = silu(in) * in, twice over: put, two entries, get. */
static td_status rig_step(struct rig *r, uint64_t key, bool expect_issue)
{
    bool is_issued = dev->step_begin(key);
    assert_int_equal(is_issued, expect_issue);
    if (is_issued) {
        r->n_issued++;
        dev->put(r->in, r->pinned_in, ROWS * DIM * 4);
        ops->silu_mul(r->out, r->in, r->in, ROWS, DIM, DIM, DIM, DIM, 0, 1);
        ops->silu_mul(r->out, r->out, r->in, ROWS, DIM, DIM, DIM, DIM, 0, 1);
        dev->get(r->pinned_out, r->out, ROWS * DIM * 4);
    }
    return dev->step_end(&err);
}

static void rig_check(struct rig *r, uint64_t key, bool expect_issue)
{
    float want[ROWS * DIM], *x = r->pinned_in;
    for (int i = 0; i < ROWS * DIM; i++) x[i] = rng_normal();
    memset(r->pinned_out, 0xff, ROWS * DIM * 4);
    assert_int_equal(rig_step(r, key, expect_issue), TD_OK);
    assert_int_equal(dev->wait(&err), TD_OK);
    const struct td_ops *ref = td_ops_by_name("ref");
    ref->silu_mul(want, x, x, ROWS, DIM, DIM, DIM, DIM, 0, 1);
    ref->silu_mul(want, want, x, ROWS, DIM, DIM, DIM, DIM, 0, 1);
    for (int i = 0; i < ROWS * DIM; i++)
        if (!(fabs((double)r->pinned_out[i] - (double)want[i]) <=
              1e-5 * fabs((double)want[i]) + 1e-6))
            fail_msg("key %llu: [%d] = %.9g, want %.9g", (unsigned long long)key, i,
                     (double)r->pinned_out[i], (double)want[i]);
}

static void test_steps_and_graphs(void **state)
{
    (void)state;
    open_device();
    struct rig r = rig_make();
    for (int i = 0; i < 3; i++) rig_check(&r, 0, true); /* key 0: never kept */
    rig_check(&r, 7, true);
    for (int i = 0; i < 3; i++) rig_check(&r, 7, false); /* other values, same graph */
    rig_check(&r, 0xffffffffffffffffu, true);
    rig_check(&r, 0xffffffffffffffffu, false);
    rig_check(&r, 7, false);
    rig_check(&r, 0, true); /* in between, without one */
    rig_check(&r, 7, false);
    assert_int_equal(dev->wait(&err), TD_OK); /* nothing to wait for */
    rig_free(&r);
    close_device();
}

/* Behind a copy no kernel begins early: a recording refuses it, and the emulated one does
 * (emu/runtime.h). */
static void test_early_launch(void **state)
{
    (void)state;
    assert_int_equal(setenv("TANDEM_CUDA_OVERLAP", "1", 1), 0);
    open_device();
    struct rig r = rig_make();
    rig_check(&r, 0, true);
    rig_check(&r, 7, true);
    rig_check(&r, 7, false);
    rig_check(&r, 0, true);
    rig_free(&r);
    close_device();
    assert_int_equal(unsetenv("TANDEM_CUDA_OVERLAP"), 0);
}

static void test_graph_cache_is_bounded(void **state)
{
    (void)state;
    open_device();
    struct rig r = rig_make();
    for (uint64_t key = 1; key <= N_GRAPHS; key++) rig_check(&r, key, true);
    for (uint64_t key = 1; key <= N_GRAPHS; key++) rig_check(&r, key, false); /* all are kept */
    /* 2 is now the one launched longest ago */
    rig_check(&r, 1, false);
    rig_check(&r, 1000, true);
    rig_check(&r, 1, false);
    rig_check(&r, 3, false);
    rig_check(&r, 2, true); /* was dropped; drops 4 */
    rig_check(&r, 3, false);
    rig_check(&r, 4, true);
    /* A burst without a wait, longer than the cache: still right, and in order. */
    for (uint64_t key = 2000; key < 2000 + N_GRAPHS + 10; key++)
        assert_int_equal(rig_step(&r, key, true), TD_OK);
    rig_check(&r, 2000 + N_GRAPHS + 9, false);
    rig_free(&r);
    close_device();
}

/* ---- a lost device --------------------------------------------------------------------------- */

static void lose(void **state)
{
    (void)state;
    uint64_t key = strtoull(fault_extra, NULL, 10);
    open_device();
    struct rig r = rig_make();
    td_status s = TD_OK;
    for (int i = 0; i < 20 && !s; i++) { /* the fault is the N-th kernel */
        s = rig_step(&r, key, key == 0 || i == 0);
        if (!s) s = dev->wait(&err);
    }
    assert_int_equal(s, TD_ERR_DEVICE);
    print_message("  %s: %s\n", fault, err.msg);
    expect_text("is lost for this process");
    expect_text(fault_text);
    char first[sizeof err.msg];
    memcpy(first, err.msg, sizeof first);

    /* Everything fails the same way, at once, and writes nothing. */
    void *p = &p;
    uint64_t a = 1, b = 2;
    uint8_t bytes[8] = {0};
#define SAME(call)                                                                                 \
    do {                                                                                           \
        err = (struct td_err){0};                                                                  \
        assert_int_equal((call), TD_ERR_DEVICE);                                                   \
        assert_string_equal(err.msg, first);                                                       \
    } while (0)
    SAME(dev->alloc(8, "a test", &p, &err));
    SAME(dev->alloc_pinned(8, "a test", &p, &err));
    assert_ptr_equal(p, &p);
    SAME(dev->free_bytes(&a, &b, &err));
    assert_true(a == 1 && b == 2);
    SAME(dev->upload(r.in, bytes, 8, &err));
    SAME(dev->upload(r.in, bytes, 0, &err));
    SAME(dev->download(bytes, r.in, 8, &err));
    SAME(dev->wait(&err));
    for (int i = 0; i < 3; i++) SAME(rig_step(&r, (uint64_t)i, true)); /* entries do no harm */
    SAME(dev->wait(&err));
#undef SAME
    rig_free(&r);
    close_device();
    assert_int_equal(try_open(0, NULL), TD_ERR_DEVICE); /* and it does not come back */
}

static void test_failed_launch_is_a_loss(void **state)
{
    (void)state;
    in_own_process("lose", "launch:4", "cudaErrorLaunchFailure", "0");
    in_own_process("lose", "launch:2", "cudaErrorLaunchFailure", "0");
    /* inside a graph that ran before */
    in_own_process("lose", "launch:6", "cudaErrorLaunchFailure", "3");
}

static void test_ecc_is_a_loss(void **state)
{
    (void)state;
    in_own_process("lose", "ecc:5", "cudaErrorECCUncorrectable", "0");
    in_own_process("lose", "ecc:5", "an uncorrectable memory error", "9");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_library),
        cmocka_unit_test(test_search_beside_the_program),
        cmocka_unit_test(test_other_interface),
        cmocka_unit_test(test_bad_index_and_second_open),
        cmocka_unit_test(test_reasons_why_not),
        cmocka_unit_test(test_unknown_way_of_products),
        cmocka_unit_test(test_out_of_memory_is_no_loss),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_steps_and_graphs),
        cmocka_unit_test(test_early_launch),
        cmocka_unit_test(test_graph_cache_is_bounded),
        cmocka_unit_test(test_failed_launch_is_a_loss),
        cmocka_unit_test(test_ecc_is_a_loss),
    };
    if (argc == 5) { /* in_own_process */
        const struct CMUnitTest why[] = {cmocka_unit_test(why_not)},
                                loss[] = {cmocka_unit_test(lose)};
        fault = argv[2], fault_text = argv[3], fault_extra = argv[4], is_emulated = true;
        return strcmp(argv[1], "lose") == 0 ? cmocka_run_group_tests(loss, NULL, NULL)
                                            : cmocka_run_group_tests(why, NULL, NULL);
    }
    rng_start();
    const char *named = getenv("TANDEM_CUDA_LIBRARY");
    if (!named || !*named) {
        printf("TANDEM_CUDA_LIBRARY names no library: nothing to test\n");
        return 77;
    }
    snprintf(library, sizeof library, "%s", named);
    if (try_open(0, NULL)) {
        printf("%s\n", err.msg);
        return strstr(library, "_emu") ? 1 : 77; /* an emulated device needs nothing that could
                                                    be missing */
    }
    is_emulated = ops->device->info.is_emulated;
    close_device();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
