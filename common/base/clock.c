/* clock.c - the clocks the project reads. */
#include "common/base/clock.h"

#include <time.h>

static uint64_t read_clock_ns(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t); /* cannot fail for these ids */
    return (uint64_t)t.tv_sec * TD_NS_PER_S + (uint64_t)t.tv_nsec;
}

uint64_t td_now_ns(void) { return read_clock_ns(CLOCK_MONOTONIC); }
uint64_t td_thread_cpu_ns(void) { return read_clock_ns(CLOCK_THREAD_CPUTIME_ID); }
uint64_t td_wall_ns(void) { return read_clock_ns(CLOCK_REALTIME); }

uint64_t td_deadline_after_ms(uint64_t now_ns, uint64_t ms)
{
    if (ms > TD_NEVER_NS / TD_NS_PER_MS) return TD_NEVER_NS;
    uint64_t ns = ms * TD_NS_PER_MS;
    return ns > TD_NEVER_NS - now_ns ? TD_NEVER_NS : now_ns + ns;
}
