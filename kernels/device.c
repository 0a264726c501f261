/* device.c - finds libtandem_cuda.so, loads it and asks it for its table.
 *
 * Why here: one set of programs runs with and without a GPU, so nothing links against CUDA; the
 * library is found when `--device cuda` asks for it:
 *   1. config.library, else TANDEM_CUDA_LIBRARY: that file and no other;
 *   2. beside the program, then ../lib of it (an installed tree), then where the loader looks.
 * A file that exists but does not load (a library it needs is missing, say) ends the search: its
 * reason is the one worth reading.
 *
 * A library that opened a device stays loaded until the process ends: the driver's threads and
 * exit handlers live in it. */
#include "kernels/device.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(sizeof(struct td_ops) < 4096 && sizeof(struct td_device) < 4096,
               "each has 12 bits of TD_CUDA_ABI");

#define LIBRARY_NAME "libtandem_cuda.so"

/* "dir of the program" + tail; false when the kernel does not say where the program is or the
 * path is too long. */
static bool beside_program(const char *tail, char *ret_path, size_t path_bytes)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return false;
    exe[n] = 0;
    char *slash = strrchr(exe, '/');
    if (!slash) return false;
    *slash = 0;
    int written = snprintf(ret_path, path_bytes, "%s/%s", exe, tail);
    return written > 0 && (size_t)written < path_bytes;
}

static void *load(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

static td_status find_library(const struct td_device_config *config, void **ret_handle,
                              struct td_err *err)
{
    static const char *const tails[] = {LIBRARY_NAME, "../lib/" LIBRARY_NAME};
    const char *named =
        config->library && *config->library ? config->library : getenv("TANDEM_CUDA_LIBRARY");
    if (named && *named) {
        *ret_handle = load(named);
        return *ret_handle
                   ? TD_OK
                   : td_fail(err, TD_ERR_UNSUPPORTED, "CUDA is not available: %s does not load: %s",
                             named, dlerror());
    }
    char tried[2][PATH_MAX] = {"", ""};
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        if (!beside_program(tails[i], tried[i], sizeof tried[i])) continue;
        if ((*ret_handle = load(tried[i]))) return TD_OK;
        const char *why = dlerror(); /* the reason of the attempt just made */
        if (access(tried[i], F_OK) == 0)
            return td_fail(err, TD_ERR_UNSUPPORTED, "CUDA is not available: %s does not load: %s",
                           tried[i], why ? why : "no reason given");
    }
    if ((*ret_handle = load(LIBRARY_NAME))) return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "CUDA is not available: " LIBRARY_NAME
                   " was not found: this build has no CUDA part, or set TANDEM_CUDA_LIBRARY to the "
                   "file; tried %s, %s "
                   "and the loader's folders",
                   tried[0], tried[1]);
}

td_status td_device_open(const struct td_device_config *config, const struct td_ops **ret_ops,
                         struct td_err *err)
{
    void *handle = NULL;
    td_status s = find_library(config, &handle, err);
    if (s) return s;
    Dl_info where = {0};
    td_cuda_open_fn *open_device = NULL;
    void *symbol = dlsym(handle, TD_CUDA_OPEN_SYMBOL);
    if (!symbol) {
        dlclose(handle);
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "the CUDA library has no " TD_CUDA_OPEN_SYMBOL
                       ": TANDEM_CUDA_LIBRARY names another kind of library");
    }
    /* ISO C has no cast from an object pointer to a function pointer. */
    memcpy(&open_device, &symbol, sizeof open_device);
    bool is_known = dladdr(symbol, &where) != 0 && where.dli_fname;
    s = open_device(TD_CUDA_ABI, config, ret_ops, err);
    if (s) {
        if (is_known && err) td_err_prefix(err, "%s", where.dli_fname);
        dlclose(handle);
    }
    return s;
}

void td_device_close(const struct td_ops *ops)
{
    if (ops && ops->device) ops->device->close();
}
