/* cuda_library_test.cu - where cuBLASLt and NCCL are looked for, and what is said when they are
 * not there. libm under another name plays the one that is sought. */
#include "kernels/cuda/library.cu"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" {
#include <cmocka.h>
}

static const char name[] = "libtandem-sought.so.13";
static char top[] = "/tmp/td-library-XXXXXX";

/* TOP/folder/name, and the folders on the way to it. */
static void put(const char *folder, char path[PATH_MAX])
{
    Dl_info info;
    assert_int_not_equal(dladdr((void *)(uintptr_t)sinf, &info), 0);
    snprintf(path, PATH_MAX, "%s/%s/%s", top, folder, name);
    for (char *slash = path + strlen(top); (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
    }
    assert_int_equal(symlink(info.dli_fname, path), 0);
}

/* The file, and the folders that are empty then. */
static void take_away(char path[PATH_MAX])
{
    assert_int_equal(unlink(path), 0);
    for (char *slash = strrchr(path, '/'); slash > path + strlen(top); slash = strrchr(path, '/')) {
        *slash = 0;
        assert_int_equal(rmdir(path), 0);
    }
}

static void test_places(void **state)
{
    (void)state;
    static const char *const folders[] = {"home/lib64", "home/lib",
                                          "home/targets/x86_64-linux/lib"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        struct td_err err = {};
        char path[PATH_MAX], home[PATH_MAX];
        assert_null(td_cuda_open_library(name, "TD_SOUGHT", "do without", &err));
        put(folders[i], path);
        snprintf(home, sizeof home, "%s/home", top);
        setenv(i == 1 ? "CUDA_PATH" : "CUDA_HOME", home, 1);
        void *library = td_cuda_open_library(name, "TD_SOUGHT", "do without", &err);
        assert_non_null(library);
        assert_int_equal(dlclose(library), 0);
        unsetenv("CUDA_HOME"), unsetenv("CUDA_PATH");
        take_away(path);
    }
}

static void test_named(void **state)
{
    (void)state;
    struct td_err err = {};
    char path[PATH_MAX];
    put("named", path);
    setenv("TD_SOUGHT", path, 1);
    void *library = td_cuda_open_library(name, "TD_SOUGHT", "do without", &err);
    assert_non_null(library);
    assert_int_equal(dlclose(library), 0);
    take_away(path);
    setenv("TD_SOUGHT", "/nowhere/lib.so", 1);
    /* that file and no other */
    assert_null(td_cuda_open_library(name, "TD_SOUGHT", "do without", &err));
    assert_int_equal(err.code, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "TD_SOUGHT=/nowhere/lib.so does not load: "));
    unsetenv("TD_SOUGHT");
}

static void test_not_there(void **state)
{
    (void)state;
    struct td_err err = {};
    assert_null(td_cuda_open_library(name, "TD_SOUGHT", "do without", &err));
    assert_int_equal(err.code, TD_ERR_UNSUPPORTED);
    assert_string_equal(err.msg, "libtandem-sought.so.13 is neither where the loader looks nor in "
                                 "CUDA_HOME, CUDA_PATH or /usr/local/cuda*: "
                                 "install it, name the file with TD_SOUGHT, or do without");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_places), cmocka_unit_test(test_named),
                                       cmocka_unit_test(test_not_there)};
    unsetenv("CUDA_HOME"), unsetenv("CUDA_PATH");
    if (!mkdtemp(top)) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return rmdir(top) || failed;
}
