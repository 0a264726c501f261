/* process_metrics.c - reads the process' numbers when they are asked for.
 *
 * A number that cannot be read keeps its last value: a scrape is no place to fail. */
#include "common/base/process_metrics.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/metrics.h"

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

static const char *g_commit = "";
static struct td_metric *g_cpu, *g_resident, *g_virtual, *g_fds, *g_max_fds;

void td_process_set_commit(const char *commit) { g_commit = commit; }

static void read_memory(void)
{
    unsigned long long virtual_pages, resident_pages;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f) return;
    if (fscanf(f, "%llu %llu", &virtual_pages, &resident_pages) == 2) {
        double page_bytes = (double)sysconf(_SC_PAGESIZE);
        td_metric_set(g_virtual, (double)virtual_pages * page_bytes);
        td_metric_set(g_resident, (double)resident_pages * page_bytes);
    }
    fclose(f);
}

static void read_descriptors(void)
{
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit))
        td_metric_set(g_max_fds, (double)limit.rlim_cur); /* RLIM_INFINITY is the largest number */
    struct stat st;
    if (!stat("/proc/self/fd", &st) && st.st_size > 0) { /* their number, from Linux 6.2 on */
        td_metric_set(g_fds, (double)st.st_size);
        return;
    }
    DIR *d = opendir("/proc/self/fd");
    if (!d) return;
    unsigned n = 0;
    for (const struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    td_metric_set(g_fds, n - 1); /* without the one that reads the directory */
}

static void update(void)
{
    struct rusage u;
    if (!getrusage(RUSAGE_SELF, &u))
        td_metric_set_total(g_cpu, (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                                       (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6);
    read_memory();
    read_descriptors();
}

/* Seconds since 1970, 0 = not known: the boot's time of /proc/stat, and the process' begin after
 * that, the 22nd field of /proc/self/stat. The second may hold anything between its brackets. */
static double start_seconds(void)
{
    char text[2048], line[256];
    unsigned long long ticks = 0, boot_s = 0;
    FILE *f = fopen("/proc/self/stat", "re");
    if (!f) return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    char *p = strrchr(text, ')');
    for (int field = 2; p && field < 22; field++) p = strchr(p + 1, ' ');
    if (!p) return 0;
    ticks = strtoull(p, NULL, 10);
    if (!(f = fopen("/proc/stat", "re"))) return 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "btime ", 6)) boot_s = strtoull(line + 6, NULL, 10);
    fclose(f);
    return boot_s ? (double)boot_s + (double)ticks / (double)sysconf(_SC_CLK_TCK) : 0;
}

void td_process_metrics_open(const char *kernels)
{
    char labels[1024], value[512];
    int n = snprintf(labels, sizeof labels, "version=\"%s\",commit=\"%s\",kernels=\"%s\"",
                     TD_VERSION, g_commit, td_metric_label(value, sizeof value, kernels));
    if (n > 0 && (size_t)n < sizeof labels)
        td_metric_set(td_gauge("td_build_info", labels,
                               "Always 1: the program's version and commit, and the kernel table "
                               "that it computes with"),
                      1);
    g_cpu = td_total("process_cpu_seconds_total", "", "User and system CPU time in seconds");
    g_resident = td_gauge("process_resident_memory_bytes", "", "Resident memory");
    g_virtual = td_gauge("process_virtual_memory_bytes", "", "Virtual memory");
    g_fds = td_gauge("process_open_fds", "", "Open file descriptors");
    g_max_fds = td_gauge("process_max_fds", "", "Most file descriptors that may be open");
    td_metric_set(
        td_gauge("process_start_time_seconds", "", "When the process began, in seconds since 1970"),
        start_seconds());
    td_metrics_on_render(update);
}
