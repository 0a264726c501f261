/* wakeup.c - the flag and the eventfd, and why no signal is lost.
 *
 * td_wakeup_clear reads the eventfd first and lowers the flag second. A signal that falls between
 * the two finds the flag up and writes nothing; the owner has not drained its queues yet, so it
 * still sees the item (the exchange orders the two). In the other order the read could swallow the
 * count of a signal that has just raised the flag again: the flag would be up, the descriptor
 * silent, and every later signal lost. A signalling thread that is slow between its exchange and
 * its write causes one spurious wake-up, which is harmless. */
#include "common/base/wakeup.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

td_status td_wakeup_open(struct td_wakeup *wakeup, struct td_err *err)
{
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0) return td_fail(err, TD_ERR_IO, "eventfd: %s", strerror(errno));
    wakeup->fd = fd;
    atomic_init(&wakeup->signalled, false);
    return TD_OK;
}

void td_wakeup_close(struct td_wakeup *wakeup)
{
    /* 0 is the descriptor of a zeroed wakeup that was never opened */
    if (wakeup->fd > 0) close(wakeup->fd);
    wakeup->fd = -1;
}

void td_wakeup_signal(struct td_wakeup *wakeup)
{
    if (atomic_exchange(&wakeup->signalled, true)) return;
    uint64_t one = 1;
    ssize_t k;
    do k = write(wakeup->fd, &one, sizeof one);
    while (k < 0 && errno == EINTR);
    /* EAGAIN would need 2^64 - 2 unread signals. */
    TD_ASSERT(k == (ssize_t)sizeof one);
}

void td_wakeup_clear(struct td_wakeup *wakeup)
{
    uint64_t count;
    ssize_t k;
    do k = read(wakeup->fd, &count, sizeof count);
    while (k < 0 && errno == EINTR);
    atomic_exchange(&wakeup->signalled, false);
}

bool td_wakeup_wait(struct td_wakeup *wakeup, uint64_t deadline_ns)
{
    for (;;) {
        if (atomic_load(&wakeup->signalled)) {
            td_wakeup_clear(wakeup);
            return true;
        }
        struct timespec left = {0}, *timeout = &left;
        if (deadline_ns == TD_NEVER_NS) {
            timeout = NULL;
        } else if (deadline_ns > 0) {
            uint64_t now_ns = td_now_ns(),
                     left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
            left.tv_sec = (time_t)(left_ns / TD_NS_PER_S);
            left.tv_nsec = (long)(left_ns % TD_NS_PER_S);
        }
        struct pollfd p = {.fd = wakeup->fd, .events = POLLIN};
        int n = ppoll(&p, 1, timeout, NULL);
        if (n > 0) {
            td_wakeup_clear(wakeup);
            return true;
        }
        if (n == 0) return false;
        TD_ASSERT(errno == EINTR);
    }
}
