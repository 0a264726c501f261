/* cgroup.c - reads the limits of control groups, of both versions.
 *
 * /proc/self/cgroup has a line "ID:CONTROLLERS:PATH" for each hierarchy; version 2's has no
 * controllers. Its files lie at MOUNT/PATH, where MOUNT is /sys/fs/cgroup for version 2 and
 * /sys/fs/cgroup/CONTROLLER for version 1 (distributions mount "cpu,cpuacct" together and link each
 * name to it). */
#include "common/base/cgroup.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_MAX_BYTES 1024
#define TEXT_BYTES 8192

/* Reads a small file of /proc or /sys, whose size is not known before, into buf; false when it
 * cannot. */
static bool read_small(const char *path, char *buf, size_t buf_bytes)
{
    FILE *f = fopen(path, "re");
    if (!f) return false;
    size_t n = fread(buf, 1, buf_bytes - 1, f);
    fclose(f);
    buf[n] = '\0';
    return n > 0;
}

static bool read_in(const char *dir, const char *file, char *buf, size_t buf_bytes)
{
    char path[PATH_MAX_BYTES + 64];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    return n >= 0 && (size_t)n < sizeof path && read_small(path, buf, buf_bytes);
}

/* The number after `key` at the start of a line. */
static bool find_number(const char *text, const char *key, uint64_t *ret_value)
{
    size_t key_bytes = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        if (strncmp(line, key, key_bytes) == 0) {
            char *end;
            errno = 0;
            *ret_value = strtoull(line + key_bytes, &end, 10);
            return end != line + key_bytes && errno == 0;
        }
    }
    return false;
}

static bool read_number(const char *dir, const char *file, const char *key, uint64_t *ret_value)
{
    char text[TEXT_BYTES];
    return read_in(dir, file, text, sizeof text) && find_number(text, key, ret_value);
}

static uint64_t memory_room(const char *dir, const char *limit_file, const char *use_file,
                            const char *cache_key)
{
    uint64_t limit, use, cache;
    if (!read_number(dir, limit_file, "", &limit)) return UINT64_MAX; /* "max", or no such file */
    if (!read_number(dir, use_file, "", &use)) return limit;
    if (!read_number(dir, "memory.stat", cache_key, &cache)) cache = 0;
    use -= cache < use ? cache : use;
    return use < limit ? limit - use : 0;
}

static uint64_t memory_room_v2(const char *dir)
{
    return memory_room(dir, "memory.max", "memory.current", "inactive_file ");
}

static uint64_t memory_room_v1(const char *dir)
{
    return memory_room(dir, "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file ");
}

static uint64_t milli_of(uint64_t quota_us, uint64_t period_us)
{
    if (period_us == 0 || quota_us > UINT64_MAX / 1000) return UINT64_MAX;
    return quota_us * 1000 / period_us;
}

/* "QUOTA PERIOD" in us, or "max PERIOD" */
static uint64_t cpu_milli_v2(const char *dir)
{
    char text[TEXT_BYTES];
    uint64_t quota, period;
    if (!read_in(dir, "cpu.max", text, sizeof text) || !find_number(text, "", &quota))
        return UINT64_MAX;
    const char *space = strchr(text, ' ');
    if (!space || !find_number(space, " ", &period)) return UINT64_MAX;
    return milli_of(quota, period);
}

/* A quota of -1 is none. */
static uint64_t cpu_milli_v1(const char *dir)
{
    char text[TEXT_BYTES];
    uint64_t quota, period;
    if (!read_in(dir, "cpu.cfs_quota_us", text, sizeof text) || text[0] == '-' ||
        !find_number(text, "", &quota) || !read_number(dir, "cpu.cfs_period_us", "", &period))
        return UINT64_MAX;
    return milli_of(quota, period);
}

/* The least that the group at `path` under `mount` and all above it allow. */
static uint64_t least_of_chain(const char *mount, const char *path,
                               uint64_t (*allowed)(const char *dir))
{
    char dir[PATH_MAX_BYTES];
    uint64_t least = UINT64_MAX;
    int n = snprintf(dir, sizeof dir, "%s%s", mount, path);
    if (n < 0 || (size_t)n >= sizeof dir) return least;
    for (size_t mount_bytes = strlen(mount);;) {
        uint64_t room = allowed(dir);
        if (room < least) least = room;
        char *slash = strrchr(dir, '/');
        if (!slash || (size_t)(slash - dir) < mount_bytes) return least;
        *slash = '\0';
    }
}

/* Whether a comma list, such as "cpu,cpuacct", has the name. */
static bool has_name(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ','), p = p ? p + 1 : NULL)
        if (strncmp(p, name, n) == 0 && (p[n] == ',' || p[n] == '\0')) return true;
    return false;
}

static uint64_t least_of_all(const char *root, const char *controller,
                             uint64_t (*v1)(const char *dir), uint64_t (*v2)(const char *dir))
{
    char text[TEXT_BYTES], mount[PATH_MAX_BYTES];
    uint64_t least = UINT64_MAX;
    if (!read_in(root, "proc/self/cgroup", text, sizeof text)) return least;
    char *rest = text;
    for (char *line; (line = strsep(&rest, "\n"));) {
        char *controllers = strchr(line, ':'),
             *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        controllers++;
        bool is_v2 = controllers[0] == '\0';
        if (!is_v2 && !has_name(controllers, controller)) continue;
        int n = snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s%s", root, is_v2 ? "" : "/",
                         is_v2 ? "" : controller);
        if (n < 0 || (size_t)n >= sizeof mount) continue;
        uint64_t room = least_of_chain(mount, path, is_v2 ? v2 : v1);
        if (room < least) least = room;
    }
    return least;
}

uint64_t td_cgroup_memory_room(const char *root)
{
    return least_of_all(root, "memory", memory_room_v1, memory_room_v2);
}

uint64_t td_cgroup_cpu_milli(const char *root)
{
    return least_of_all(root, "cpu", cpu_milli_v1, cpu_milli_v2);
}

int td_cpus_usable(const char *root)
{
    cpu_set_t set;
    long n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                         : sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t quota = td_cgroup_cpu_milli(root) / 1000;
    if (n > 0 && quota < (uint64_t)n) n = (long)quota;
    return n > 0 ? (int)n : 1;
}
