/* descriptors.c - raises RLIMIT_NOFILE. */
#include "common/base/descriptors.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>

#include "common/base/log.h"

/* Some tables of ours and of gRPC grow with the largest descriptor, and a container may have a hard
 * limit of 2^30: never ask for more than 2^20. */
#define MAX_DESCRIPTORS (1u << 20)

uint64_t td_descriptors_raise(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        td_warn("descriptor_limit", "error=\"%s\"", strerror(errno));
        return 0;
    }
    rlim_t was = limit.rlim_cur,
           want = limit.rlim_max < MAX_DESCRIPTORS ? limit.rlim_max : MAX_DESCRIPTORS;
    if (want > was) {
        limit.rlim_cur = want;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = was;
    }
    td_info("descriptor_limit", "open_files=%llu was=%llu hard=%llu",
            (unsigned long long)limit.rlim_cur, (unsigned long long)was,
            (unsigned long long)limit.rlim_max);
    return limit.rlim_cur;
}
