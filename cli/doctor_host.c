/* doctor_host.c - checks what a worker needs of the host: CPUs, memory and its limits, descriptors,
 * clocks. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "common/base/cgroup.h"
#include "common/base/mem.h"
#include "kernels/choice.h"

#define GROUP "host"

/* /proc/cpuinfo may be large on a large machine; the first CPU's lines are enough. */
static bool cpu_flag(const char *cpuinfo, const char *flag)
{
    const char *p = strstr(cpuinfo, "\nflags");
    if (!p) p = strstr(cpuinfo, "\nFeatures");
    if (!p) return false;
    const char *end = strchr(p + 1, '\n');
    size_t n = strlen(flag);
    for (const char *at = strchr(p, ':'); at && (at = strstr(at, flag)); at++) {
        if (end && at >= end) return false;
        if (at[-1] == ' ' && (at[n] == ' ' || at[n] == '\n' || !at[n])) return true;
    }
    return false;
}

static void check_cpu(struct doctor_report *r, const char *root)
{
    static const char *const known[] = {"avx2",     "avx512f", "avx512_bf16", "avx512_vnni",
                                        "amx_bf16", "asimd",   "asimddp",     "i8mm",
                                        "bf16",     "sve"};
    static char info[16384];
    int n_mine = td_cpus_usable(root);
    uint64_t quota = td_cgroup_cpu_milli(root);
    char found[256] = "", nodes[64], limit[64] = "";
    if (quota != UINT64_MAX)
        snprintf(limit, sizeof limit, "; its cgroup's quota is %.2f CPUs", (double)quota / 1e3);
    bool any = false;
    doctor_read(root, "/proc/cpuinfo", info, sizeof info);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (cpu_flag(info, known[i])) {
            size_t at = strlen(found);
            snprintf(found + at, sizeof found - at, " %s", known[i]);
            any = true;
        }
    if (!doctor_read(root, "/sys/devices/system/node/online", nodes, sizeof nodes))
        snprintf(nodes, sizeof nodes, "0");
    struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_OK, "cpu",
                                        "%d of %ld CPUs for this process%s; NUMA nodes %s;%s%s",
                                        n_mine, sysconf(_SC_NPROCESSORS_ONLN), limit, nodes,
                                        any ? found : " no vector extension that is used",
                                        cpu_flag(info, "hypervisor") ? "; a virtual machine" : "");
    doctor_number(c, "cpus", n_mine);
    if (cpu_flag(info, "avx2") || cpu_flag(info, "asimd") || !info[0]) return;
    c->level = DOCTOR_WARN;
    doctor_fix(c, "the CPU kernels fall back to plain loops: use a CPU with AVX2 or better, or "
                  "(virtual machines) pass the host's CPU through");
}

/* Which table of kernels a worker on this host takes, and why. */
static void check_kernels(struct doctor_report *r)
{
    struct td_ops_choice choice;
    char text[TD_OPS_CHOICE_TEXT];
    td_ops_choose(&choice);
    if (choice.ops) {
        td_ops_choice_text(&choice, text, sizeof text);
        struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_OK, "kernels", "%s", text);
        for (int i = 0; i < choice.n_timed; i++)
            doctor_number(c, choice.timed[i].name, choice.timed[i].gflop_s);
        return;
    }
    struct doctor_check *c =
        doctor_add(r, GROUP, DOCTOR_FAIL, "kernels", "TANDEM_OPS is \"%s\": %s",
                   getenv("TANDEM_OPS"), td_ops_lack(getenv("TANDEM_OPS")));
    doctor_fix(c, "unset it, or name a table that this CPU runs");
}

static void check_kernel(struct doctor_report *r)
{
    struct utsname u;
    if (uname(&u)) return;
    char *end;
    long major = strtol(u.release, &end, 10), minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    struct doctor_check *c =
        doctor_add(r, GROUP, DOCTOR_OK, "kernel", "%s %s %s", u.sysname, u.release, u.machine);
    if (major > 5 || (major == 5 && minor >= 14)) return;
    c->level = DOCTOR_WARN;
    doctor_fix(c, "Linux 5.14 or newer backs memory at boot in one call (MADV_POPULATE_WRITE) and "
                  "registers GPU memory by dma-buf (5.12)");
}

static void check_memory(struct doctor_report *r, const struct doctor_config *o, uint64_t kv_bytes)
{
    uint64_t available = td_mem_available();
    struct doctor_check *c =
        doctor_add(r, GROUP, DOCTOR_OK, "memory", "%s available; KV pool %s (--kv-memory %s)",
                   td_size_text(available).s, td_size_text(kv_bytes).s, o->kv_memory);
    doctor_number(c, "available_bytes", (double)available);
    doctor_number(c, "kv_bytes", (double)kv_bytes);
    if (kv_bytes <= available) return;
    c->level = DOCTOR_FAIL;
    doctor_fix(c, "a worker would refuse to start: a smaller --kv-memory, or more memory for this "
                  "host or container (cgroup memory.max)");
}

static bool may_lock_all(const char *root)
{
    char status[8192];
    if (!doctor_read(root, "/proc/self/status", status, sizeof status)) return false;
    const char *p = strstr(status, "CapEff:");
    return p && strtoull(p + 7, NULL, 16) >> 14 & 1; /* CAP_IPC_LOCK */
}

static void check_memlock(struct doctor_report *r, const struct doctor_config *o, uint64_t kv_bytes,
                          unsigned n_rdma)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_MEMLOCK, &l)) return;
    bool any = l.rlim_cur == RLIM_INFINITY, cap = may_lock_all(o->root);
    char limit[48];
    snprintf(limit, sizeof limit, "%s", any ? "unlimited" : td_size_text(l.rlim_cur).s);
    struct doctor_check *c;
    if (any || l.rlim_cur >= kv_bytes) {
        c = doctor_add(r, GROUP, DOCTOR_OK, "memory lock limit", "%s; the KV pool is %s", limit,
                       td_size_text(kv_bytes).s);
    } else if (cap) {
        c = doctor_add(r, GROUP, DOCTOR_OK, "memory lock limit",
                       "%s, below the KV pool's %s, but CAP_IPC_LOCK lifts it for this user", limit,
                       td_size_text(kv_bytes).s);
    } else if (!strcmp(o->transfer, "tcp") || !strcmp(o->transfer, "shm") ||
               (n_rdma == 0 && strcmp(o->transfer, "rdma"))) {
        c = doctor_add(r, GROUP, DOCTOR_OK, "memory lock limit",
                       "%s, below the KV pool's %s: it counts for RDMA only, and %s", limit,
                       td_size_text(kv_bytes).s,
                       n_rdma ? "that is not asked for" : "there is none here");
    } else {
        c = doctor_add(r, GROUP, DOCTOR_FAIL, "memory lock limit",
                       "%s, below the KV pool's %s: an RDMA NIC cannot register the pool", limit,
                       td_size_text(kv_bytes).s);
        doctor_fix(c, "ulimit -l unlimited (limits.conf: memlock unlimited; systemd: "
                      "LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; Kubernetes: "
                      "capability IPC_LOCK)");
    }
    if (!any) doctor_number(c, "limit_bytes", (double)l.rlim_cur);
}

/* The chosen item of "always [madvise] never". */
static void chosen_item(const char *text, char item[32])
{
    const char *a = strchr(text, '['), *b = a ? strchr(a, ']') : NULL;
    if (b)
        snprintf(item, 32, "%.*s", (int)(b - a - 1), a + 1);
    else
        snprintf(item, 32, "%s", text[0] ? text : "?");
}

static void check_huge_pages(struct doctor_report *r, const char *root)
{
    char text[128], anon[32], shmem[32];
    int64_t n_free = 0, n_total = 0;
    if (!doctor_read(root, "/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof text)) {
        struct doctor_check *c = doctor_add(r, GROUP, DOCTOR_WARN, "huge pages",
                                            "this kernel has no transparent huge pages");
        doctor_fix(c, "a kernel with CONFIG_TRANSPARENT_HUGEPAGE: memory of 2 MiB pages is "
                      "registered about ten times faster");
        return;
    }
    chosen_item(text, anon);
    doctor_read(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled", text, sizeof text);
    chosen_item(text, shmem);
    doctor_read_i64(root, "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", &n_free);
    doctor_read_i64(root, "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", &n_total);
    bool anon_ok = strcmp(anon, "never") != 0;
    bool shmem_ok = !strcmp(shmem, "advise") || !strcmp(shmem, "always") ||
                    !strcmp(shmem, "within_size") || !strcmp(shmem, "force");
    struct doctor_check *c =
        doctor_add(r, GROUP, anon_ok && shmem_ok ? DOCTOR_OK : DOCTOR_WARN, "huge pages",
                   "transparent: %s, for shared memory (the KV pool is a memfd): %s; %lld of %lld "
                   "reserved pages of 2 MiB free",
                   anon, shmem, (long long)n_free, (long long)n_total);
    doctor_fix(c,
               "%s%s%s (registration of the pool is about ten times faster, and NIC and CPU hold "
               "fewer translations)",
               anon_ok ? "" : "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
               anon_ok || shmem_ok ? "" : "; ",
               shmem_ok ? "" : "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled");
}

static void check_dev_shm(struct doctor_report *r, const char *root)
{
    char path[4096];
    struct statvfs v;
    snprintf(path, sizeof path, "%s/dev/shm", root);
    if (statvfs(path, &v)) {
        doctor_add(r, GROUP, DOCTOR_OK, "/dev/shm",
                   "not there; not needed: KV pools are memfds, the shm path hands over their "
                   "descriptors");
        return;
    }
    doctor_add(r, GROUP, DOCTOR_OK, "/dev/shm",
               "%s, %s free; KV pools do not use it: they are memfds, the shm path hands over "
               "their descriptors",
               td_size_text((uint64_t)v.f_blocks * v.f_frsize).s,
               td_size_text((uint64_t)v.f_bavail * v.f_frsize).s);
}

static void check_files(struct doctor_report *r)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l)) return;
    bool any = l.rlim_cur == RLIM_INFINITY;
    struct doctor_check *c;
    if (any)
        c = doctor_add(r, GROUP, DOCTOR_OK, "open files", "unlimited");
    else
        c = doctor_add(r, GROUP, l.rlim_cur >= 4096 ? DOCTOR_OK : DOCTOR_WARN, "open files",
                       "limit %llu", (unsigned long long)l.rlim_cur);
    doctor_fix(c, "ulimit -n 65536 (systemd: LimitNOFILE): a router needs one descriptor for each "
                  "client and each worker, and one without any takes "
                  "no call");
}

static void check_clock(struct doctor_report *r, const char *root)
{
    char source[64];
    if (doctor_read(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource",
                    source, sizeof source)) {
        bool slow = !strcmp(source, "hpet") || !strcmp(source, "acpi_pm") ||
                    !strcmp(source, "jiffies") || !strcmp(source, "refined-jiffies");
        struct doctor_check *c =
            doctor_add(r, GROUP, slow ? DOCTOR_WARN : DOCTOR_OK, "clock source", "%s%s", source,
                       slow ? ": each look at the clock costs a microsecond or more" : "");
        doctor_fix(c, "see in dmesg why tsc was given up; tsc=reliable on the kernel's command "
                      "line when the machine's is good");
    }
    struct timex t = {0};
    int state = adjtimex(&t);
    if (state < 0) {
        doctor_add(r, GROUP, DOCTOR_OK, "clock synchronised",
                   "cannot be read here (%s); --router ADDR compares the clocks themselves",
                   strerror(errno));
        return;
    }
    bool sync = !(t.status & STA_UNSYNC) && state != TIME_ERROR;
    struct doctor_check *c =
        doctor_add(r, GROUP, sync ? DOCTOR_OK : DOCTOR_WARN, "clock synchronised",
                   sync ? "yes, to within %.1f ms"
                        : "no: nothing has set the kernel's clock by NTP or PTP for a while",
                   (double)t.maxerror / 1e3);
    doctor_fix(c, "run chrony, ntpd or systemd-timesyncd (in a container or VM: on its host); logs "
                  "of several machines are compared by their clocks");
}

void doctor_host(struct doctor_report *r, const struct doctor_config *o, uint64_t kv_bytes,
                 unsigned n_rdma)
{
    check_kernel(r);
    check_cpu(r, o->root);
    check_kernels(r);
    check_memory(r, o, kv_bytes);
    check_memlock(r, o, kv_bytes, n_rdma);
    check_huge_pages(r, o->root);
    check_dev_shm(r, o->root);
    check_files(r);
    check_clock(r, o->root);
}
