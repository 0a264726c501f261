/* doorbell.h - wakes one waiting thread: an eventfd with an atomic flag, which many threads ring
 * and one owner waits for. Two rings before the owner wakes cost one system call, not two. The
 * owner clears BEFORE it drains its queues, so that no ring is lost. */
#ifndef TD_BASE_DOORBELL_H
#define TD_BASE_DOORBELL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_doorbell {
    int fd; /* eventfd, non-blocking, close-on-exec; may be polled by an epoll loop */
    atomic_bool rung;
};

td_status td_doorbell_open(struct td_doorbell *bell, struct td_err *err);
void td_doorbell_close(struct td_doorbell *bell);
void td_doorbell_ring(struct td_doorbell *bell);  /* any thread */
void td_doorbell_clear(struct td_doorbell *bell); /* the owner */
/* The owner waits until the bell is rung or until deadline_ns (TD_NEVER_NS = no deadline, 0 = only
 * look), and clears it. True if it was rung. */
bool td_doorbell_wait(struct td_doorbell *bell, uint64_t deadline_ns);

#endif
