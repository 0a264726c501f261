/* process_metrics.h - what every daemon tells of its process: Prometheus' standard metrics of it
 * (process_cpu_seconds_total, process_resident_memory_bytes, process_virtual_memory_bytes,
 * process_open_fds, process_max_fds, process_start_time_seconds), and td_build_info.
 *
 * Both functions are called once at boot, by the thread that registers metrics. The values are read
 * from /proc/self and getrusage(2) on the thread that renders, at each rendering. */
#ifndef TD_BASE_PROCESS_METRICS_H
#define TD_BASE_PROCESS_METRICS_H

/* The commit that the program was built of, "" = unknown; borrowed, static. Call it before
 * td_process_metrics_open. */
void td_process_set_commit(const char *commit);
/* kernels: the kernel table in use, "" in a program that computes nothing. Copied. */
void td_process_metrics_open(const char *kernels);

#endif
