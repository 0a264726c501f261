/* signals.c - the set of stop signals, and sigtimedwait for them. */
#include "common/base/signals.h"

#include <stddef.h>
#include <time.h>

void td_stop_signals(sigset_t *ret_set)
{
    sigemptyset(ret_set);
    sigaddset(ret_set, SIGTERM);
    sigaddset(ret_set, SIGINT);
}

int td_stop_signal_wait(int timeout_ms)
{
    sigset_t set;
    td_stop_signals(&set);
    struct timespec limit = {timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
    int sig = timeout_ms < 0 ? sigwaitinfo(&set, NULL) : sigtimedwait(&set, NULL, &limit);
    return sig > 0 ? sig : 0;
}
