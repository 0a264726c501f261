/* base_cgroup_test.c - limits of control groups, from folders that look like /proc and
 * /sys/fs/cgroup of hosts and of containers. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/cgroup.h"

#define NO_LIMIT UINT64_MAX

struct file {
    const char *path, *text;
};

struct host {
    const char *name;
    struct file files[8];
    uint64_t cpu_milli, memory_room;
};

#define SELF "proc/self/cgroup"
#define CG "sys/fs/cgroup/"

static const struct host hosts[] = {
    {"no groups", {{0}}, NO_LIMIT, NO_LIMIT},
    {"version 2, no limits",
     {{SELF, "0::/a\n"}, {CG "a/cpu.max", "max 100000\n"}, {CG "a/memory.max", "max\n"}},
     NO_LIMIT,
     NO_LIMIT},
    {"version 2, own limits",
     {{SELF, "0::/a/b\n"},
      {CG "a/b/cpu.max", "150000 100000\n"},
      {CG "a/b/memory.max", "1000000\n"},
      {CG "a/b/memory.current", "300000\n"},
      {CG "a/b/memory.stat", "anon 1\ninactive_file 50000\n"}},
     1500,
     750000},
    {"version 2, the least of the chain is above",
     {{SELF, "0::/a/b\n"},
      {CG "a/b/cpu.max", "400000 100000\n"},
      {CG "a/cpu.max", "50000 20000\n"}},
     2500,
     NO_LIMIT},
    {"version 2, a container sees its own group as the root",
     {{SELF, "0::/kubepods/pod1/c\n"}, {CG "cpu.max", "200000 100000\n"}},
     2000,
     NO_LIMIT},
    {"version 2, what is no quota",
     {{SELF, "0::/a\n"}, {CG "a/cpu.max", "100000\n"}, {CG "cpu.max", "7 0\n"}},
     NO_LIMIT,
     NO_LIMIT},
    {"version 1, controllers together",
     {{SELF, "4:memory:/k/p\n3:cpu,cpuacct:/k/p\n1:name=systemd:/x\n"},
      {CG "cpu/k/p/cpu.cfs_quota_us", "300000\n"},
      {CG "cpu/k/p/cpu.cfs_period_us", "100000\n"},
      {CG "memory/k/p/memory.limit_in_bytes", "4096000\n"},
      {CG "memory/k/p/memory.usage_in_bytes", "96000\n"}},
     3000,
     4000000},
    {"version 1, none, and one above",
     {{SELF, "3:cpuset:/\n2:cpu:/k/p\n"},
      {CG "cpu/k/p/cpu.cfs_quota_us", "-1\n"},
      {CG "cpu/k/p/cpu.cfs_period_us", "100000\n"},
      {CG "cpu/k/cpu.cfs_quota_us", "50000\n"},
      {CG "cpu/k/cpu.cfs_period_us", "100000\n"},
      {CG "cpuset/cpu.cfs_quota_us", "1\n"}},
     500,
     NO_LIMIT},
    {"both versions beside each other",
     {{SELF, "2:cpu:/k\n0::/u\n"},
      {CG "cpu/k/cpu.cfs_quota_us", "600000\n"},
      {CG "cpu/k/cpu.cfs_period_us", "100000\n"},
      {CG "u/cpu.max", "450000 100000\n"}},
     4500,
     NO_LIMIT},
};

static void write_at(const char *root, const struct file *f)
{
    char path[512];
    int n = snprintf(path, sizeof path, "%s/%s", root, f->path);
    assert_true(n > 0 && (size_t)n < sizeof path);
    for (char *p = path + strlen(root) + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = '\0';
        assert_true(mkdir(path, 0755) == 0 || errno == EEXIST);
    }
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    assert_true(fputs(f->text, out) >= 0);
    assert_int_equal(fclose(out), 0);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static void limits_are_the_least_of_the_chain(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    cpu_set_t mine;
    assert_int_equal(sched_getaffinity(0, sizeof mine, &mine), 0);
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        const struct host *h = &hosts[i];
        char root[300];
        snprintf(root, sizeof root, "%s/td_cgroup_test_XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
        assert_non_null(mkdtemp(root));
        for (const struct file *f = h->files; f->path; f++) write_at(root, f);
        uint64_t cpu = td_cgroup_cpu_milli(root), room = td_cgroup_memory_room(root);
        int n = td_cpus_usable(root), want = CPU_COUNT(&mine);
        nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        if (cpu != h->cpu_milli || room != h->memory_room)
            fail_msg("%s: %llu of a CPU's thousandths and %llu bytes, must be %llu and %llu",
                     h->name, (unsigned long long)cpu, (unsigned long long)room,
                     (unsigned long long)h->cpu_milli, (unsigned long long)h->memory_room);
        /* whole CPUs of the quota, one at least */
        if (h->cpu_milli / 1000 < (uint64_t)want) want = (int)(h->cpu_milli / 1000);
        if (want < 1) want = 1;
        if (n != want) fail_msg("%s: %d CPUs, must be %d", h->name, n, want);
    }
    assert_true(td_cpus_usable("") >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(limits_are_the_least_of_the_chain)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
