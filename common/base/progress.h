/* progress.h - shows the progress of long work: on a terminal one line that is redrawn (share,
 * rate, time left), elsewhere a plain line every 5 s and one at the end. Nothing is printed for
 * work that ends within 0.5 s. One thread. */
#ifndef TD_BASE_PROGRESS_H
#define TD_BASE_PROGRESS_H

#include <stdint.h>

struct td_progress {
    const char *label; /* "loading weights" */
    const char *unit;  /* "B" prints KiB/MiB/GiB; any other unit is printed unchanged */
    uint64_t total, done, start_ns, drawn_ns;
    int is_tty;
};

/* writes to stderr */
void td_progress_start(struct td_progress *p, const char *label, const char *unit, uint64_t total);
void td_progress_update(struct td_progress *p, uint64_t done);
void td_progress_end(struct td_progress *p);

#endif
