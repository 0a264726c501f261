/* doctor_rdma.c - checks RDMA devices through the verbs table: ports, GIDs, limits, a registration
 * as large as asked, and memory of a GPU (doctor_gpudirect.c).
 *
 * No hardware is ok, unless rdma was asked for by name. A device that verbs lists and that cannot
 * carry KV is a failure, because workers would silently take a slower path; with --transfer tcp or
 * shm that is intended, and it is a warning. */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/transfer/rdma/select.h"
#include "common/transfer/wire.h"

#define GROUP "rdma"
#define N_PEERS 16 /* a worker's peers, at least */

const char *doctor_reg_explain(int error)
{
    switch (error) {
    case ENOMEM:
        return "the memory lock limit (ulimit -l, see above) or the device's memory regions are "
               "used up: raise the limit; a process that was "
               "killed may hold regions until its driver has cleaned up";
    case EPERM:
    case EACCES:
        return "this user may not pin memory or use /dev/infiniband/uverbs*: give it the device's "
               "group or (containers) the devices and "
               "capability IPC_LOCK";
    case EFAULT:
        return "\"bad address\": the memory is not mapped as the driver needs it. Host memory: a "
               "hole in the mapping. GPU memory: neither dma-buf "
               "nor nvidia_peermem works, or it comes from a virtual-memory allocator that hands "
               "out pieces";
    case EINVAL:
        return "the size or the access flags are not supported by this device: a smaller "
               "--kv-memory, or another device";
    case EOPNOTSUPP:
        return "the driver does not do this: another driver version (rdma-core and kernel), or "
               "another device";
    default:
        return "see dmesg for the driver's words";
    }
}

static void gid_text(const struct td_vb_gid *g, char text[64])
{
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const uint8_t *b = g->raw;
    if (!memcmp(b, mapped, sizeof mapped)) {
        snprintf(text, 64, "%u.%u.%u.%u", b[12], b[13], b[14], b[15]);
        return;
    }
    int at = 0;
    for (int i = 0; i < 16; i += 2)
        at += snprintf(text + at, 64 - (size_t)at, "%s%x", i ? ":" : "",
                       (unsigned)(b[i] << 8 | b[i + 1]));
}

struct context {
    struct doctor_report *r;
    const struct doctor_config *o;
    const struct td_verbs *vb;
    uint64_t kv_bytes;
    uint32_t n_taken;      /* devices that workers take */
    enum doctor_level bad; /* level of a finding that keeps a device from carrying KV */
    /* level of a finding that concerns one port, while others may serve */
    enum doctor_level lesser;
};

/* What each class of GID means between two hosts, in the order of rdma_select's choice, so that the
 * report explains that choice. */
static const struct {
    const char *what, *fix;
    enum doctor_level level;
} gid_classes[] = {
    [TD_RDMA_GID_IB] = {"InfiniBand", "", DOCTOR_OK},
    [TD_RDMA_GID_V4_ROUTABLE] = {"RoCE v2, IPv4", "", DOCTOR_OK},
    [TD_RDMA_GID_V4_PRIVATE] = {"RoCE v2, private IPv4", "", DOCTOR_OK},
    [TD_RDMA_GID_V6_GLOBAL] =
        {"RoCE v2, IPv6",
         "works when the peers' GIDs are IPv6 too; most fabrics are set up for an IPv4 address on",
         DOCTOR_WARN},
    [TD_RDMA_GID_V6_UNIQUE_LOCAL] =
        {"RoCE v2, private IPv6",
         "works when the peers' GIDs are IPv6 too; most fabrics are set up for an IPv4 address on",
         DOCTOR_WARN},
    [TD_RDMA_GID_V4_LINK_LOCAL] =
        {"RoCE v2, link-local IPv4",
         "only neighbours on the same link are reached: set an IPv4 address of the RDMA network on",
         DOCTOR_WARN},
    [TD_RDMA_GID_V6_LINK_LOCAL] =
        {"RoCE v2, link-local IPv6",
         "only neighbours on the same link are reached: set an IPv4 address of the RDMA network on",
         DOCTOR_WARN},
    [TD_RDMA_GID_ROCE_V1] = {"RoCE v1",
                             "no router forwards RoCE v1, and the peers must speak it too: RoCE v2 "
                             "(cma_roce_mode) and an IPv4 address on",
                             DOCTOR_WARN},
};

/* True: the port has a GID that reaches other hosts. */
static bool check_gids(const struct context *x, struct td_vb_device *d, uint8_t port,
                       const char *name, const struct td_vb_port *p, char netdev[32])
{
    static struct td_vb_gid gids[TD_RDMA_GIDS_MAX];
    static uint32_t order[TD_RDMA_GIDS_MAX];
    char text[64], check_name[64];
    uint32_t n = 0, n_good = 0;
    struct td_err err = {0};
    for (uint32_t i = 0; i < p->n_gids && n < TD_RDMA_GIDS_MAX; i++)
        if (x->vb->query_gid(d, port, i, &gids[n]) == 0) n++;
    snprintf(check_name, sizeof check_name, "%s gid", name);
    struct td_rdma_gid_ask ask = {.device = name,
                                  .ethernet = p->ethernet,
                                  .gids = gids,
                                  .n_gids = n,
                                  .index = (int32_t)x->o->kv_port.rdma_gid_index};
    if (td_rdma_gid_rank(&ask, order, &n_good, &err)) {
        struct doctor_check *c = doctor_add(x->r, GROUP, x->lesser, check_name, "%s", err.msg);
        if (ask.index != TD_RDMA_AUTO)
            doctor_fix(c, "another --rdma-gid-index, or -1 for the best by rank; the table is in "
                          "/sys/class/infiniband/*/ports/*/gids");
        else
            doctor_fix(c, "%s",
                       p->ethernet ? "give the port's network device an IPv4 address and set it up "
                                     "(ip addr add, ip link set up)"
                                   : "the subnet manager has not configured this port: see that "
                                     "one runs on the fabric");
        return false;
    }
    const struct td_vb_gid *best = &gids[order[0]];
    enum td_rdma_gid_class class = td_rdma_gid_class_of(best, p->ethernet);
    gid_text(best, text);
    snprintf(netdev, 32, "%s", best->netdev);
    struct doctor_check *c = doctor_add(x->r, GROUP, gid_classes[class].level, check_name,
                                        "index %u, %s (%s%s%s); %u of %u entries in use",
                                        best->index, text, gid_classes[class].what,
                                        best->netdev[0] ? ", " : "", best->netdev, n, p->n_gids);
    if (ask.index != TD_RDMA_AUTO) { /* the operator asked for it by number */
        c->level = DOCTOR_OK;
        size_t at = strlen(c->found);
        snprintf(c->found + at, sizeof c->found - at, "; --rdma-gid-index asks for it");
    }
    doctor_fix(c, "%s %s", gid_classes[class].fix,
               best->netdev[0] ? best->netdev : "its network device");
    doctor_number(c, "index", best->index);
    return true;
}

/* Whether the device can hold the queue pairs of a few peers, counted as the engine would. */
static bool check_queues(const struct context *x, const char *device, const char *name,
                         const struct td_vb_limits *l, const struct td_vb_port *p)
{
    struct td_rdma_plan plan;
    struct td_err err = {0};
    char check_name[64];
    snprintf(check_name, sizeof check_name, "%.40s queues", name);
    if (td_rdma_plan(device, l, p, &plan, &err)) {
        struct doctor_check *c = doctor_add(x->r, GROUP, x->lesser, check_name, "%s", err.msg);
        doctor_fix(c, "another device, or a function of it with more resources (SR-IOV settings)");
        return false;
    }
    struct doctor_check *c = doctor_add(
        x->r, GROUP, plan.n_peers < N_PEERS ? DOCTOR_WARN : DOCTOR_OK, check_name,
        "%u queue pairs per peer, each of %u requests and %u receives; room for %u peers",
        plan.n_qps, plan.send_depth, plan.recv_depth, plan.n_peers);
    doctor_number(c, "qps_per_peer", plan.n_qps);
    doctor_number(c, "send_depth", plan.send_depth);
    doctor_number(c, "recv_depth", plan.recv_depth);
    doctor_number(c, "peers", plan.n_peers);
    if (plan.n_peers < N_PEERS)
        doctor_fix(c, "another device, a function of it with more resources (SR-IOV settings), or "
                      "fewer workers that talk to this one");
    return true;
}

static bool check_port(const struct context *x, struct td_vb_device *d, const char *device,
                       const struct td_vb_limits *l, uint8_t port)
{
    struct td_vb_port p = {0};
    char name[64], netdev[32] = "";
    snprintf(name, sizeof name, "%.40s port %u", device, port);
    int e = x->vb->query_port(d, port, &p);
    if (e) {
        struct doctor_check *c =
            doctor_add(x->r, GROUP, x->lesser, name, "cannot be queried: %s", strerror(e));
        doctor_fix(c, "see dmesg for the driver's words");
        return false;
    }
    if (!p.active) {
        struct doctor_check *c = doctor_add(x->r, GROUP, DOCTOR_WARN, name, "down (%s)",
                                            p.ethernet ? "Ethernet" : "InfiniBand");
        doctor_fix(c, p.ethernet ? "cable and switch port; ip link set up on its network device"
                                 : "cable, switch and subnet manager");
        return false;
    }
    struct doctor_check *c = doctor_add(
        x->r, GROUP, DOCTOR_OK, name, "active, %s, %.0f Gb/s, MTU %u",
        p.ethernet ? "Ethernet (RoCE)" : "InfiniBand", (double)p.bits_per_s / 1e9, p.mtu_bytes);
    size_t at = x->r->n - 1;
    doctor_number(c, "mtu_bytes", p.mtu_bytes);
    doctor_number(c, "gbits_per_s", (double)p.bits_per_s / 1e9);
    bool good = check_gids(x, d, port, name, &p, netdev);
    good &= check_queues(x, device, name, l, &p);
    c = &x->r->checks[at];
    int64_t dev_mtu = 0;
    if (netdev[0]) {
        char path[128];
        snprintf(path, sizeof path, "/sys/class/net/%s/mtu", netdev);
        doctor_read_i64(x->o->root, path, &dev_mtu);
    }
    if (p.mtu_bytes < 4096) {
        c->level = DOCTOR_WARN;
        size_t n = strlen(c->found);
        if (dev_mtu > 0)
            snprintf(c->found + n, sizeof c->found - n, " (%s has %lld)", netdev,
                     (long long)dev_mtu);
        if (p.ethernet)
            doctor_fix(c,
                       "an RDMA MTU of 4096 needs a network device and switch MTU of at least "
                       "4200: ip link set %s mtu 9000%s",
                       netdev[0] ? netdev : "DEVICE",
                       dev_mtu >= 4200 ? " (it has: then the switch or driver limits it)" : "");
        else
            doctor_fix(c, "an MTU of 4096 is set by the subnet manager (partitions.conf: mtu=5)");
    } else if (dev_mtu > 0 && dev_mtu < 4200) {
        c->level = DOCTOR_WARN;
        size_t n = strlen(c->found);
        snprintf(c->found + n, sizeof c->found - n, ", but %s has %lld", netdev,
                 (long long)dev_mtu);
        doctor_fix(c, "ip link set %s mtu 9000: packets of the RDMA MTU do not fit otherwise",
                   netdev);
    }
    return good;
}

static void check_limits(const struct context *x, const char *device, const struct td_vb_limits *l)
{
    char name[64], split[64] = "";
    snprintf(name, sizeof name, "%.40s limits", device);
    /* The engine splits the pool, the same on every device, until the keys of all of them no
       longer fit into the handshake. */
    uint64_t n_regions =
        l->max_mr_bytes ? (x->kv_bytes + l->max_mr_bytes - 1) / l->max_mr_bytes : 1;
    bool many = n_regions * x->n_taken > TD_XFER_RKEYS_MAX, few = l->max_qp < 256;
    if (n_regions > 1)
        snprintf(split, sizeof split, ", will be split into %llu registrations",
                 (unsigned long long)n_regions);
    struct doctor_check *c =
        doctor_add(x->r, GROUP, many || few ? DOCTOR_WARN : DOCTOR_OK, name,
                   "memory region up to %s (pool %s%s), %u queue pairs, %u reads at a time, memory "
                   "windows %s, relaxed ordering %s",
                   td_size_text(l->max_mr_bytes).s, td_size_text(x->kv_bytes).s, split, l->max_qp,
                   l->max_rd_atomic_out, l->mw_type2 ? "of type 2" : "none that can be used",
                   l->relaxed_ordering ? "yes" : "no");
    doctor_number(c, "max_mr_bytes", (double)l->max_mr_bytes);
    doctor_number(c, "registrations", (double)n_regions);
    doctor_number(c, "max_qp", l->max_qp);
    if (many)
        doctor_fix(c,
                   "a --kv-memory of at most %s: workers make at most %d registrations on their %u "
                   "device%s in all",
                   td_size_text(TD_XFER_RKEYS_MAX / x->n_taken * l->max_mr_bytes).s,
                   TD_XFER_RKEYS_MAX, x->n_taken, x->n_taken == 1 ? "" : "s");
    else if (few)
        doctor_fix(c, "each peer takes queue pairs of its own: fewer workers per device, or a "
                      "function with more resources (SR-IOV settings)");
}

static bool check_register(const struct context *x, struct td_vb_device *d, const char *device,
                           const struct td_vb_limits *l)
{
    uint64_t bytes = x->o->register_bytes, room = td_mem_available() / 2;
    char name[64];
    struct td_arena a = {.memfd = -1};
    struct td_err err = {0};
    struct td_vb_mr *mr = NULL;
    if (bytes == 0) return true;
    if (bytes > room) bytes = room & ~(uint64_t)0x1fffff;
    snprintf(name, sizeof name, "%.40s registration", device);
    if (td_arena_create(bytes, 1, "tandem-doctor", &a, &err)) {
        struct doctor_check *c =
            doctor_add(x->r, GROUP, DOCTOR_WARN, name, "not tried: %s", err.msg);
        doctor_fix(c, "a smaller --register");
        return true;
    }
    unsigned access = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | (l->mw_type2 ? TD_VB_MW_BIND : 0) |
                      (l->relaxed_ordering ? TD_VB_RELAXED_ORDERING : 0);
    uint64_t t0 = td_now_ns();
    int e = x->vb->reg(d, a.base, bytes, access, &mr);
    double ms = (double)(td_now_ns() - t0) / 1e6;
    if (e) {
        struct doctor_check *c =
            doctor_add(x->r, GROUP, x->bad, name, "%s: %s", td_size_text(bytes).s, strerror(e));
        doctor_fix(c, "%s", doctor_reg_explain(e));
    } else {
        double gib_s = (double)bytes / (double)(1 << 30) / (ms / 1e3);
        struct doctor_check *c =
            doctor_add(x->r, GROUP, DOCTOR_OK, name,
                       "%s in %.1f ms, %.1f GiB/s; the pool of %s would take about %.2f s",
                       td_size_text(bytes).s, ms, gib_s, td_size_text(x->kv_bytes).s,
                       ms / 1e3 * (double)x->kv_bytes / (double)bytes);
        doctor_number(c, "bytes", (double)bytes);
        doctor_number(c, "ms", ms);
        doctor_number(c, "gib_per_s", gib_s);
        x->vb->dereg(mr);
    }
    td_arena_destroy(&a);
    return e == 0;
}

static struct doctor_pci nic_of(const char *root, const char *device)
{
    struct doctor_pci p = {.numa_node = -1};
    char path[PATH_MAX], target[512];
    snprintf(path, sizeof path, "%s/sys/class/infiniband/%s/device", root, device);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n > 0) {
        target[n] = 0;
        const char *slash = strrchr(target, '/');
        doctor_pci_read(root, slash ? slash + 1 : target, &p);
    }
    snprintf(p.label, sizeof p.label, "%s", device);
    return p;
}

/* Compares what the bus gives a card with what it could take: a x16 card in a x8 slot reports
 * nothing and is half as fast. */
static void check_link(const struct context *x, const struct doctor_pci *nic)
{
    char path[PATH_MAX], speed[64], max_speed[64], name[64];
    int64_t width = 0, max_width = 0;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/current_link_speed", nic->address);
    if (!doctor_read(x->o->root, path, speed, sizeof speed)) return;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/max_link_speed", nic->address);
    doctor_read(x->o->root, path, max_speed, sizeof max_speed);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/current_link_width", nic->address);
    doctor_read_i64(x->o->root, path, &width);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/max_link_width", nic->address);
    doctor_read_i64(x->o->root, path, &max_width);
    snprintf(name, sizeof name, "%.40s bus", nic->label);
    bool full = !strcmp(speed, max_speed) && width == max_width;
    struct doctor_check *c =
        doctor_add(x->r, GROUP, full ? DOCTOR_OK : DOCTOR_WARN, name, "%s x%lld of %s x%lld", speed,
                   (long long)width, max_speed, (long long)max_width);
    doctor_fix(c, "the card runs below what it can: another slot, a reseated card, firmware "
                  "settings of the slot (bifurcation, generation)");
}

static unsigned check_device(const struct context *x, const char *device,
                             const struct doctor_gpu_memory *gpu, struct doctor_pci *nic,
                             unsigned *n_reach_gpu)
{
    struct td_vb_device *d = NULL;
    struct td_vb_limits l = {0};
    unsigned n_usable = 0;
    *nic = nic_of(x->o->root, device);
    int e = x->vb->open(x->vb, device, &d);
    if (!e) e = x->vb->query(d, &l);
    if (e) {
        struct doctor_check *c =
            doctor_add(x->r, GROUP, x->bad, device, "cannot be opened: %s", strerror(e));
        doctor_fix(c, e == EACCES || e == EPERM
                          ? "this user may not use /dev/infiniband/uverbs*: add it to the group "
                            "that owns them; containers need the devices "
                            "mapped in"
                          : "see dmesg for the driver's words; the device's firmware and rdma-core "
                            "may not fit each other");
        if (d) x->vb->close(d);
        return 0;
    }
    doctor_add(x->r, GROUP, DOCTOR_OK, device, "%s%s, NUMA node %d, %u port%s",
               nic->address[0] ? "PCI " : "no PCI device (made by software)", nic->address,
               nic->numa_node, l.n_ports, l.n_ports == 1 ? "" : "s");
    if (nic->chain[0]) check_link(x, nic);
    /* workers use that port of every device */
    unsigned port = x->o->kv_port.rdma_port ? (unsigned)x->o->kv_port.rdma_port : 1;
    if (port > l.n_ports) {
        struct doctor_check *c = doctor_add(x->r, GROUP, x->lesser, device, "has no port %u", port);
        doctor_fix(
            c, "--rdma-port of a port that every device has, or --rdma-devices without this one");
    } else {
        n_usable = check_port(x, d, device, &l, (uint8_t)port);
    }
    check_limits(x, device, &l);
    if (!check_register(x, d, device, &l)) n_usable = 0;
    if (gpu)
        *n_reach_gpu += doctor_gpudirect_nic(x->r, x->o->root, x->lesser, x->vb, d, device, gpu);
    x->vb->close(d);
    return n_usable;
}

/* The next name of a comma-separated list, *p moved past it. */
static bool next_name(const char **p, char name[TD_VB_NAME_MAX])
{
    while (**p == ',') (*p)++;
    size_t n = strcspn(*p, ",");
    snprintf(name, TD_VB_NAME_MAX, "%.*s", (int)n, *p);
    *p += n;
    return n > 0;
}

static bool is_named(const char *list, const char *device)
{
    char name[TD_VB_NAME_MAX];
    for (const char *p = list; next_name(&p, name);)
        if (!strcmp(name, device)) return true;
    return !list[0];
}

/* Reports names of --rdma-devices that are no device; workers refuse them. */
static void check_names(const struct context *x, const char *list, char names[][TD_VB_NAME_MAX],
                        uint32_t n)
{
    char name[TD_VB_NAME_MAX];
    for (const char *p = list; next_name(&p, name);) {
        uint32_t i = 0;
        while (i < n && strcmp(name, names[i])) i++;
        if (i < n) continue;
        struct doctor_check *c = doctor_add(x->r, GROUP, DOCTOR_FAIL, name,
                                            "--rdma-devices names it, and there is no such device");
        doctor_fix(
            c,
            "the names that are here: see the lines around this one, or ls /sys/class/infiniband");
    }
}

static size_t n_class_devices(const char *root)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/sys/class/infiniband", root);
    DIR *d = opendir(path);
    size_t n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static void say_none(const struct context *x, const char *why)
{
    static struct doctor_pci cards[DOCTOR_PCI_MAX];
    bool asked = !strcmp(x->o->transfer, "rdma");
    size_t n_class = n_class_devices(x->o->root),
           n_cards = doctor_pci_list(x->o->root, doctor_pci_is_rdma_nic, cards, DOCTOR_PCI_MAX);
    struct doctor_check *c;
    if (n_class > 0) {
        c = doctor_add(x->r, GROUP, x->lesser, "devices",
                       "the kernel has %zu RDMA device%s, but verbs lists none: %s", n_class,
                       n_class == 1 ? "" : "s", why);
        doctor_fix(c, "install libibverbs and its providers (Debian, Ubuntu: libibverbs1 "
                      "ibverbs-providers); containers need /dev/infiniband mapped in");
    } else if (n_cards > 0) {
        c = doctor_add(
            x->r, GROUP, x->lesser, "devices",
            "%zu network card%s that can do RDMA (first: %s), but the kernel has no RDMA device",
            n_cards, n_cards == 1 ? "" : "s", cards[0].address);
        doctor_fix(c, "load the RDMA half of its driver (modprobe mlx5_ib); in a container the "
                      "host's driver counts");
    } else {
        c = doctor_add(x->r, GROUP, asked ? DOCTOR_FAIL : DOCTOR_OK, "devices",
                       "no RDMA device (%s)", why);
        doctor_fix(
            c, "--transfer rdma needs an RDMA NIC; without one use --transfer auto, tcp or shm");
    }
}

void doctor_rdma(struct doctor_report *r, const struct doctor_config *o, const struct td_verbs *vb,
                 const char *why, uint64_t kv_bytes, const struct doctor_gpu_memory *gpu,
                 struct doctor_rdma *ret)
{
    static char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n = 0;
    bool asked = !strcmp(o->transfer, "rdma");
    bool meant = !strcmp(o->transfer, "tcp") || !strcmp(o->transfer, "shm");
    struct context x = {.r = r,
                        .o = o,
                        .vb = vb,
                        .kv_bytes = kv_bytes,
                        .bad = meant ? DOCTOR_WARN : DOCTOR_FAIL,
                        .lesser = asked ? DOCTOR_FAIL : DOCTOR_WARN};
    memset(ret, 0, sizeof *ret);
    int e = vb ? vb->list(vb, names, &n) : 0;
    if (!vb || e || n == 0) {
        say_none(&x, !vb           ? why
                     : e == ENOSYS ? "this kernel has no RDMA subsystem loaded"
                     : e           ? strerror(e)
                                   : "libibverbs lists none");
    } else {
        const char *list = o->kv_port.rdma_devices ? o->kv_port.rdma_devices : "";
        check_names(&x, list, names, n);
        for (uint32_t i = 0; i < n; i++) x.n_taken += is_named(list, names[i]);
        for (uint32_t i = 0; i < n; i++) {
            if (is_named(list, names[i]))
                ret->n_usable +=
                    check_device(&x, names[i], gpu, &ret->nics[ret->n_nics++], &ret->n_reach_gpu);
            else
                doctor_add(r, GROUP, DOCTOR_OK, names[i],
                           "left out: --rdma-devices does not name it");
        }
    }
    if (ret->n_usable > 0) {
        doctor_add(r, GROUP, DOCTOR_OK, "kv path",
                   "KV will go by shm on this host and by RDMA to hosts that have it too");
        return;
    }
    struct doctor_check *c =
        doctor_add(r, GROUP,
                   asked ? DOCTOR_FAIL
                   : n   ? x.bad
                         : DOCTOR_OK,
                   "kv path", "KV will go by shm on this host and tcp between hosts%s",
                   asked ? ", but --transfer rdma asks for RDMA"
                   : n   ? ", though there are RDMA devices"
                         : "");
    doctor_fix(c, "see the lines above: no port of an RDMA device can be used%s",
               asked || meant ? "" : "; if that is meant, --transfer tcp says so");
}
