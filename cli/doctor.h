/* doctor.h - `tandem doctor`: one line per check. doctor.c has the options, the report and the
 * order; each doctor_*.c has one group of checks.
 *
 * A check has a level, what was found and, when it is not ok, what to do. A check never ends the
 * program: what cannot be read is reported. Every wait has a deadline. One thread, except that gRPC
 * and the transfer engine have threads of their own behind their interfaces. */
#ifndef TD_CLI_DOCTOR_H
#define TD_CLI_DOCTOR_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "cli/cli.h"
#include "common/worker/kv_port.h"
#include "common/transfer/rdma/verbs.h"
#include "common/transfer/transfer.h"

struct td_cluster_secret;

struct doctor_config {
    struct cli_server at; /* at.server "": check no cluster */
    const char *json, *kv_memory, *transfer, *root, *listen, *peer;
    uint64_t register_bytes, bytes, timeout_ms, listen_timeout_ms, sessions;
    bool local;
    struct td_cluster_secret *secret; /* of at.cluster_secret_file; NULL: none */
    /* the options of a worker: what --peer and --listen open, and which devices count here */
    struct td_kv_port_config kv_port;
};

/* ---- report (doctor_report.c) ---------------------------------------------------------------- */

enum doctor_level { DOCTOR_OK = 0, DOCTOR_WARN, DOCTOR_FAIL, DOCTOR_N_LEVELS };

struct doctor_check {
    const char *group; /* static */
    char name[64];
    enum doctor_level level;
    char found[512], fix[512]; /* fix: empty when the level is ok */
    json_t *values;            /* numbers for machines; may be NULL */
};

struct doctor_report {
    FILE *out;
    struct doctor_check *checks;
    size_t n, n_room, n_printed;
    const char *group;                  /* last printed */
    unsigned n_levels[DOCTOR_N_LEVELS]; /* of printed checks */
};

/* Adds a check; the pointer is valid until the next add. */
struct doctor_check *doctor_add(struct doctor_report *r, const char *group, enum doctor_level level,
                                const char *name, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
void doctor_fix(struct doctor_check *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void doctor_number(struct doctor_check *c, const char *key, double value);
void doctor_string(struct doctor_check *c, const char *key, const char *value);
void doctor_flush(struct doctor_report *r);         /* prints what was added since */
json_t *doctor_json(const struct doctor_report *r); /* of printed checks */
int doctor_status(const struct doctor_report *r);   /* 0, or 1 when a check failed */
void doctor_report_free(struct doctor_report *r);

/* ---- files below --root ---------------------------------------------------------------------- */

/* Reads the first max-1 bytes of ROOT/path, as text without the trailing newline. False: the file
 * is missing or not readable; text is "". */
bool doctor_read(const char *root, const char *path, char *text, size_t max);
bool doctor_read_i64(const char *root, const char *path, int64_t *ret_value);
bool doctor_exists(const char *root, const char *path);

/* ---- this host (doctor_host.c) --------------------------------------------------------------- */

/* kv_bytes: the size of the pool that a worker would make. n_rdma: the number of devices whose
 * limits matter here. */
void doctor_host(struct doctor_report *r, const struct doctor_config *c, uint64_t kv_bytes,
                 unsigned n_rdma);

/* ---- PCI (doctor_pci.c): pure functions of the files below root ------------------------------ */

#define DOCTOR_PCI_MAX 64

struct doctor_pci {
    char address[24];       /* "0000:3b:00.0" */
    char chain[256];        /* "pci0000:3a/0000:3a:00.0/0000:3b:00.0": from the
                               host bridge down */
    char label[96];         /* name in the report: "mlx5_0", "gpu0 NVIDIA H100 ..." */
    int numa_node;          /* -1: not known, or only one */
    unsigned vendor, class; /* class: base class and subclass, 0x0302 */
};

/* The distance between two devices, in the terms of `nvidia-smi topo`. */
enum doctor_distance {
    DOCTOR_SAME = 0,
    DOCTOR_PIX,    /* at most one bridge or switch */
    DOCTOR_PXB,    /* several, but not the host bridge */
    DOCTOR_PHB,    /* through one host bridge */
    DOCTOR_NODE,   /* between host bridges of one NUMA node */
    DOCTOR_SYS,    /* between NUMA nodes */
    DOCTOR_UNKNOWN /* a device without a place on the PCI bus */
};
const char *doctor_distance_name(enum doctor_distance d);
enum doctor_distance doctor_pci_distance(const struct doctor_pci *a, const struct doctor_pci *b);

bool doctor_pci_read(const char *root, const char *address, struct doctor_pci *ret_pci);
/* Devices for which want() is true, in the order of their addresses; how many. */
size_t doctor_pci_list(const char *root, bool (*want)(const struct doctor_pci *p),
                       struct doctor_pci *pcis, size_t max);
bool doctor_pci_is_gpu(const struct doctor_pci *p); /* NVIDIA, display or 3D controller */
/* true for makers whose NICs do RDMA; only for hints, because what verbs lists counts */
bool doctor_pci_is_rdma_nic(const struct doctor_pci *p);

/* ACS in a PCI configuration space of n bytes. 1: requests between peers are redirected to the host
 * bridge; 0: they are not; -1: unknown. */
int doctor_acs_redirects(const uint8_t *config, size_t n);

/* Reports GPUs, their distance to each NIC, and IOMMU and ACS between them. */
void doctor_topology(struct doctor_report *r, const char *root, const struct doctor_pci *gpus,
                     size_t n_gpus, const struct doctor_pci *nics, size_t n_nics);
/* Reports the GPUs below root, with their labels and the driver's state. */
size_t doctor_gpus(struct doctor_report *r, const char *root, struct doctor_pci *gpus, size_t max);

/* ---- GPUDirect (doctor_gpudirect.c) ---------------------------------------------------------- */

/* Memory of a GPU, to try registrations with. base NULL: there is none; `why` has the reason. */
struct doctor_gpu_memory {
    const struct td_device_memory *memory;
    void *base;
    size_t bytes;
    char why[256];
    /* the table that it was allocated from; NULL: the caller's own memory */
    const struct td_ops *ops;
};
/* takes memory of the first GPU that CUDA shows; makes a CUDA context, which takes a second */
void doctor_gpu_memory_open(struct doctor_gpu_memory *ret_memory);
void doctor_gpu_memory_close(struct doctor_gpu_memory *m);

/* Finds the NVIDIA driver that is loaded below root; false: none. */
bool doctor_driver(const char *root, char version[64], bool *ret_is_open);
/* Checks the host's half: kernel modules, dma-buf, nvidia_peermem, the GPUs' BARs. Without GPUs or
 * NICs it adds one line that says so. n_reach: how many NICs registered memory of a GPU; when one
 * did, a missing module or dma-buf is not a warning. */
void doctor_gpudirect(struct doctor_report *r, const char *root, const struct doctor_pci *gpus,
                      size_t n_gpus, size_t n_nics, size_t n_reach,
                      const struct doctor_gpu_memory *m);
/* Whether this open device can register GPU memory; `bad`: the level if it cannot. Also false when
 * there was no memory to try with. */
bool doctor_gpudirect_nic(struct doctor_report *r, const char *root, enum doctor_level bad,
                          const struct td_verbs *vb, struct td_vb_device *d, const char *device,
                          const struct doctor_gpu_memory *m);

/* ---- RDMA (doctor_rdma.c) -------------------------------------------------------------------- */

/* the cause of an errno of a registration, and what to do */
const char *doctor_reg_explain(int error);

struct doctor_rdma {
    struct doctor_pci nics[TD_VB_DEVICES_MAX]; /* label = the device's name */
    size_t n_nics;
    unsigned n_usable;    /* ports that can carry KV */
    unsigned n_reach_gpu; /* devices that registered memory of a GPU */
};
/* vb NULL: libibverbs is missing, for the reason in `why`. gpu NULL: there is no GPU. */
void doctor_rdma(struct doctor_report *r, const struct doctor_config *c, const struct td_verbs *vb,
                 const char *why, uint64_t kv_bytes, const struct doctor_gpu_memory *gpu,
                 struct doctor_rdma *ret_rdma);

/* ---- cluster (doctor_cluster.c), peer (doctor_peer.c) ---------------------------------------- */

void doctor_cluster(struct doctor_report *r, const struct doctor_config *c);

/* The clock skew from n round trips: wall clocks at sending and receiving, and the other side's in
 * between. Of the fastest one: theirs minus ours. */
struct doctor_skew {
    double skew_ms, error_ms;
};
struct doctor_skew doctor_skew_of(uint64_t sent_ns, uint64_t got_ns, uint64_t theirs_ns);

/* vb NULL: no RDMA device here. */
void doctor_listen(struct doctor_report *r, const struct doctor_config *c,
                   const struct td_verbs *vb);
void doctor_peer(struct doctor_report *r, const struct doctor_config *c, const struct td_verbs *vb);
/* NULL: `used` is the path that was asked for (AUTO accepts any); else a text that says what is
 * wrong with it. */
const char *doctor_path_verdict(enum td_xfer_path asked, enum td_xfer_path used);

#endif
