/* fault.c - parses TANDEM_FAULT and sends the signal at the named point. */
#include "common/base/fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"

const char *td_fault_armed;
static char point_name[64];
static int signal_number;
static atomic_int left;

td_status td_fault_init(struct td_err *err)
{
    const char *spec = getenv("TANDEM_FAULT");
    if (!spec || !spec[0]) return TD_OK;
    const char *colon = strchr(spec, ':');
    if (!colon || colon == spec || (size_t)(colon - spec) >= sizeof point_name)
        return td_fail(err, TD_ERR_INVALID, "TANDEM_FAULT is \"%s\", must be POINT:kill|stop[:N]",
                       spec);
    memcpy(point_name, spec, (size_t)(colon - spec));
    const char *what = colon + 1, *n = strchr(what, ':');
    size_t what_bytes = n ? (size_t)(n - what) : strlen(what);
    if (what_bytes == 4 && !memcmp(what, "kill", 4))
        signal_number = SIGKILL;
    else if (what_bytes == 4 && !memcmp(what, "stop", 4))
        signal_number = SIGSTOP;
    else
        return td_fail(err, TD_ERR_INVALID, "TANDEM_FAULT is \"%s\", must be POINT:kill|stop[:N]",
                       spec);
    long count = n ? strtol(n + 1, NULL, 10) : 1;
    if (count < 1 || count > 1000000)
        return td_fail(err, TD_ERR_INVALID, "TANDEM_FAULT: N is %ld, must be 1..1000000", count);
    atomic_store(&left, (int)count);
    td_fault_armed = point_name;
    td_warn("fault_armed", "spec=%s", spec);
    return TD_OK;
}

void td_fault_hit(const char *point)
{
    if (strcmp(point, point_name) != 0 || atomic_fetch_sub(&left, 1) != 1) return;
    td_warn("fault_fires", "point=%s signal=%d", point, signal_number);
    /* raise acts on the whole process, and at once on this thread, which does not run on past the
     * point */
    raise(signal_number);
}
