/* wakeup.h - wakes one waiting thread: an eventfd with an atomic flag, which many threads signal
 * and one owner waits for. Two signals before the owner wakes cost one system call, not two. The
 * owner clears BEFORE it drains its queues, so that no signal is lost. */
#ifndef TD_BASE_WAKEUP_H
#define TD_BASE_WAKEUP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_wakeup {
    int fd; /* eventfd, non-blocking, close-on-exec; may be polled by an epoll loop */
    atomic_bool signalled;
};

td_status td_wakeup_open(struct td_wakeup *wakeup, struct td_err *err);
void td_wakeup_close(struct td_wakeup *wakeup);
void td_wakeup_signal(struct td_wakeup *wakeup); /* any thread */
void td_wakeup_clear(struct td_wakeup *wakeup);  /* the owner */
/* The owner waits until it is signalled or until deadline_ns (TD_NEVER_NS = no deadline, 0 = only
 * look), and clears it. True if it was signalled. */
bool td_wakeup_wait(struct td_wakeup *wakeup, uint64_t deadline_ns);

#endif
