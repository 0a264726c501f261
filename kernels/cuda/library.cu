/* library.cu - finds and opens NVIDIA's libraries (cuBLASLt, NCCL) when they are needed.
 *
 * Why here: a toolkit's libraries often lie where no loader looks (/usr/local/cuda/lib64, or
 * targets/x86_64-linux/lib on some distributions), and a container has them in another place than
 * the machine that this was built on. */
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

/* Opens the first file that matches the pattern and that the loader accepts. */
static void *open_matching(const char *pattern)
{
    glob_t found = {};
    void *library = NULL;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc && !library; i++)
            library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&found);
    return library;
}

void *td_cuda_open_library(const char *name, const char *variable, const char *without,
                           struct td_err *err)
{
    static const char *const folders[] = {"lib64", "lib", "targets/*/lib"};
    const char *named = getenv(variable);
    if (named && *named) {
        void *library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            td_fail(err, TD_ERR_UNSUPPORTED, "%s=%.100s does not load: %s", variable, named,
                    dlerror());
        return library;
    }
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *const tops[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda",
                                "/usr/local/cuda-*"};
    for (size_t i = 0; i < sizeof tops / sizeof *tops; i++)
        for (size_t k = 0; k < sizeof folders / sizeof *folders && !library; k++) {
            char pattern[PATH_MAX];
            int n = tops[i] && *tops[i]
                        ? snprintf(pattern, sizeof pattern, "%s/%s/%s", tops[i], folders[k], name)
                        : -1;
            if (n > 0 && (size_t)n < sizeof pattern) library = open_matching(pattern);
        }
    if (!library)
        td_fail(err, TD_ERR_UNSUPPORTED,
                "%s is neither where the loader looks nor in CUDA_HOME, CUDA_PATH or "
                "/usr/local/cuda*: install it, name the file with %s, or %s",
                name, variable, without);
    return library;
}
