/* clock.h - time as the project counts it: uint64_t nanoseconds, monotonic; wall-clock time appears
 * in logs only. Pure code (router/core, the protocol core of common/transfer) takes `now_ns` as an
 * argument and never calls these functions. Thread-safe. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include <stdint.h>

#define TD_NS_PER_US 1000ull
#define TD_NS_PER_MS 1000000ull
#define TD_NS_PER_S 1000000000ull
#define TD_NEVER_NS UINT64_MAX /* no deadline */

uint64_t td_now_ns(void);        /* CLOCK_MONOTONIC */
uint64_t td_thread_cpu_ns(void); /* CPU time of the calling thread */
uint64_t td_wall_ns(void);       /* CLOCK_REALTIME, for log stamps only */

/* now + ms, saturating at TD_NEVER_NS. */
uint64_t td_deadline_after_ms(uint64_t now_ns, uint64_t ms);

#endif
