/* bench_sweep_fuzz.c - sweep.csv and sweep.json from outside: what is accepted can be drawn,
 * told and written, whatever its numbers are; what is refused says why. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/plot/figures.h"
#include "bench/plot/html.h"
#include "bench/sweep/sweep.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static struct figure figures[FIGURES_MAX];
    char path[64];
    struct sweep s = {0};
    struct td_err err = {0};
    int fd = memfd_create("sweep", MFD_CLOEXEC);
    TD_ASSERT(fd >= 0 && write(fd, data, n_bytes) == (ssize_t)n_bytes);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    td_status st = sweep_read(path, &s, &err);
    close(fd);
    if (st) {
        TD_ASSERT(err.code == st && err.msg[0] && !s.rows);
        return 0;
    }
    TD_ASSERT(s.n_rows > 0 && s.n_configs <= SWEEP_MAX_CONFIGS);
    FILE *out = fopen("/dev/null", "w");
    TD_ASSERT(out);
    size_t n = figures_make(&s, figures);
    html_write(&s, figures, n, out);
    sweep_print(&s, out);
    for (size_t i = 0; i < n; i++) figure_free(&figures[i]);
    fclose(out);
    sweep_free(&s);
    return 0;
}
