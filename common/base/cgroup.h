/* cgroup.h - what the control groups of this process allow: bytes of memory, and processor time.
 *
 * Version 2 (memory.max, cpu.max) and version 1 (memory.limit_in_bytes, cpu.cfs_quota_us), which a
 * machine may have beside each other. The limits of a group hold for its children: each function
 * takes the least of the process's own group and of all above it. Inside a container the path of a
 * group often names a place that is not mounted there; the root of the mount then holds the
 * container's own limits. Any thread; reads files, keeps nothing.
 *
 * root: "", or a folder that stands for / (tests, doctor). */
#ifndef TD_BASE_CGROUP_H
#define TD_BASE_CGROUP_H

#include <stdint.h>

/* bytes that may still be taken: limit - use + file cache that can be dropped; UINT64_MAX: no limit
 */
uint64_t td_cgroup_memory_room(const char *root);

/* Processor time in thousandths of a CPU: 1500 is one and a half. UINT64_MAX: no quota. */
uint64_t td_cgroup_cpu_milli(const char *root);

/* The CPUs that threads of this process can use at once, 1 at least: those that it may run on
 * (taskset, cpusets), and no more than a quota has whole CPUs. Threads that wait for each other are
 * all stopped for the rest of the period when their quota is spent, so a fraction of a CPU is left
 * over rather than shared by one thread more. */
int td_cpus_usable(const char *root);

#endif
