/* doctor_pci.c - finds where devices sit on the PCI bus, and what lies between a NIC and a GPU.
 *
 * /sys/bus/pci/devices/ADDRESS is a link to .../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0: the
 * host bridge, the bridges, the device. The distance of two devices follows from the lowest place
 * that both paths go through. A switch shows as an upstream port with a downstream port for each
 * device, so one bridge on each side below the common one is still one switch. Everything here only
 * reads files below root. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/doctor.h"

#define GROUP "pci"
#define DEVICES "/sys/bus/pci/devices/"

const char *doctor_distance_name(enum doctor_distance d)
{
    static const char *const names[] = {"SAME", "PIX", "PXB", "PHB", "NODE", "SYS", "?"};
    return (unsigned)d < sizeof names / sizeof *names ? names[d] : "?";
}

/* Length of the first n parts of a chain. */
static size_t parts_bytes(const char *chain, size_t n)
{
    const char *p = chain;
    for (; n > 0 && *p; n--) {
        p += strcspn(p, "/");
        if (n > 1 && *p) p++;
    }
    return (size_t)(p - chain);
}

static size_t n_parts(const char *chain)
{
    size_t n = chain[0] ? 1 : 0;
    for (const char *p = chain; *p; p++) n += *p == '/';
    return n;
}

enum doctor_distance doctor_pci_distance(const struct doctor_pci *a, const struct doctor_pci *b)
{
    size_t na = n_parts(a->chain), nb = n_parts(b->chain), common = 0;
    if (na < 2 || nb < 2) return DOCTOR_UNKNOWN;
    while (common < na && common < nb) {
        size_t n = parts_bytes(a->chain, common + 1);
        if (n != parts_bytes(b->chain, common + 1) || memcmp(a->chain, b->chain, n)) break;
        common++;
    }
    if (common == na && common == nb) return DOCTOR_SAME;
    if (common == 0)
        return a->numa_node >= 0 && b->numa_node >= 0 && a->numa_node != b->numa_node ? DOCTOR_SYS
                                                                                      : DOCTOR_NODE;
    /* Functions of one device share all but their last part, as devices below one bridge do; with
     * common = 1 both are directly on the host bridge. */
    if (common == 1) {
        size_t n = strlen(a->address), m = strlen(b->address);
        bool one_device = n > 2 && n == m && !memcmp(a->address, b->address, n - 1);
        return one_device ? DOCTOR_PIX : DOCTOR_PHB;
    }
    size_t bridges_a = na - common - 1, bridges_b = nb - common - 1;
    return bridges_a <= 1 && bridges_b <= 1 ? DOCTOR_PIX : DOCTOR_PXB;
}

bool doctor_pci_read(const char *root, const char *address, struct doctor_pci *p)
{
    char path[PATH_MAX], target[1024];
    int64_t v;
    memset(p, 0, sizeof *p);
    p->numa_node = -1;
    if (strlen(address) >= sizeof p->address || strchr(address, '/')) return false;
    snprintf(p->address, sizeof p->address, "%s", address);
    snprintf(path, sizeof path, "%s" DEVICES "%s", root, address);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= 0) return false;
    target[n] = 0;
    const char *chain = strstr(target, "devices/pci");
    if (chain && strlen(chain + 8) < sizeof p->chain)
        snprintf(p->chain, sizeof p->chain, "%s", chain + 8);
    snprintf(path, sizeof path, DEVICES "%s/numa_node", address);
    if (doctor_read_i64(root, path, &v) && v >= -1 && v < 4096) p->numa_node = (int)v;
    snprintf(path, sizeof path, DEVICES "%s/vendor", address);
    if (doctor_read_i64(root, path, &v)) p->vendor = (unsigned)v;
    snprintf(path, sizeof path, DEVICES "%s/class", address);
    if (doctor_read_i64(root, path, &v)) p->class = (unsigned)v >> 8;
    return true;
}

static int by_address(const void *a, const void *b)
{
    return strcmp(((const struct doctor_pci *)a)->address, ((const struct doctor_pci *)b)->address);
}

size_t doctor_pci_list(const char *root, bool (*want)(const struct doctor_pci *p),
                       struct doctor_pci *pcis, size_t max)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s" DEVICES, root);
    DIR *d = opendir(path);
    if (!d) return 0;
    size_t n = 0;
    for (struct dirent *e; n < max && (e = readdir(d));)
        if (e->d_name[0] != '.' && doctor_pci_read(root, e->d_name, &pcis[n]) && want(&pcis[n]))
            n++;
    closedir(d);
    qsort(pcis, n, sizeof *pcis, by_address);
    return n;
}

bool doctor_pci_is_gpu(const struct doctor_pci *p)
{
    return p->vendor == 0x10de && (p->class == 0x0300 || p->class == 0x0302);
}

bool doctor_pci_is_rdma_nic(const struct doctor_pci *p)
{
    if (p->class == 0x0207) return true; /* InfiniBand controller */
    return p->class == 0x0200 && p->vendor == 0x15b3;
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

size_t doctor_gpus(struct doctor_report *r, const char *root, struct doctor_pci *gpus, size_t max)
{
    char text[1024], path[PATH_MAX], driver[64] = "";
    bool is_open, is_loaded = doctor_driver(root, driver, &is_open);
    size_t n = doctor_pci_list(root, doctor_pci_is_gpu, gpus, max);
    if (n == 0) {
        doctor_add(
            r, GROUP, DOCTOR_OK, "gpu",
            "no NVIDIA GPU on the PCI bus: workers compute on CPUs, and KV is in host memory");
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        char model[80] = "NVIDIA GPU";
        snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/information", gpus[i].address);
        if (doctor_read(root, path, text, sizeof text)) {
            const char *p = strstr(text, "Model:");
            if (p) p += 6, p += strspn(p, " \t");
            if (p) snprintf(model, sizeof model, "%.*s", (int)strcspn(p, "\n"), p);
        }
        char name[32];
        snprintf(name, sizeof name, "gpu %s", gpus[i].address);
        snprintf(gpus[i].label, sizeof gpus[i].label, "gpu %s", gpus[i].address);
        struct doctor_check *c = doctor_add(r, GROUP, is_loaded ? DOCTOR_OK : DOCTOR_WARN, name,
                                            "%s, NUMA node %d, %s%s", model, gpus[i].numa_node,
                                            is_loaded ? "driver " : "no driver is loaded", driver);
        doctor_fix(c, "install the NVIDIA driver (in a container: run it with the NVIDIA runtime, "
                      "so that /proc/driver/nvidia is there)");
    }
    return n;
}

/* ---- NIC to GPU ------------------------------------------------------------------------------ */

int doctor_acs_redirects(const uint8_t *config, size_t n)
{
    if (n < 0x104)
        return -1; /* the kernel shows the first 64 bytes to everyone, the rest to
                      root */
    size_t at = 0x100;
    for (int hops = 0; hops < 96 && at >= 0x100 && at + 8 <= n; hops++) {
        unsigned id = config[at] | (unsigned)config[at + 1] << 8,
                 next = (config[at + 2] | (unsigned)config[at + 3] << 8) >> 4;
        if (id == 0x000d) {
            unsigned control = config[at + 6] | (unsigned)config[at + 7] << 8;
            return (control & 0x0c) != 0; /* P2P Request Redirect, P2P Completion Redirect */
        }
        if (next == 0) return 0;
        at = next;
    }
    return at >= 0x100 && at + 8 > n ? -1 : 0;
}

/* Checks the bridges of p below the part that it shares with q: -1 when one of them could not be
 * read, 1 with its address in `where` when it redirects. */
static int path_redirects(const char *root, const struct doctor_pci *p, const struct doctor_pci *q,
                          char where[32])
{
    size_t n = n_parts(p->chain), common = 1;
    while (common < n) {
        size_t k = parts_bytes(p->chain, common + 1);
        if (k != parts_bytes(q->chain, common + 1) || memcmp(p->chain, q->chain, k)) break;
        common++;
    }
    int result = 0;
    for (size_t i = common; i + 1 < n; i++) { /* part i: a bridge; part n-1 is the device */
        size_t from = parts_bytes(p->chain, i) + 1, to = parts_bytes(p->chain, i + 1);
        char path[PATH_MAX];
        uint8_t config[4096];
        snprintf(path, sizeof path, "%s" DEVICES "%.*s/config", root, (int)(to - from),
                 p->chain + from);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd >= 0 ? read(fd, config, sizeof config) : 0;
        if (fd >= 0) close(fd);
        int one = doctor_acs_redirects(config, got > 0 ? (size_t)got : 0);
        if (one > 0) {
            snprintf(where, 32, "%.*s", (int)(to - from), p->chain + from);
            return 1;
        }
        if (one < 0) result = -1;
    }
    return result;
}

static void check_acs(struct doctor_report *r, const char *root, const struct doctor_pci *gpu,
                      const struct doctor_pci *nic)
{
    char where[32] = "", name[160];
    int one = path_redirects(root, gpu, nic, where),
        two = one > 0 ? 0 : path_redirects(root, nic, gpu, where);
    snprintf(name, sizeof name, "acs %s - %s", nic->label, gpu->address);
    if (one > 0 || two > 0) {
        struct doctor_check *c =
            doctor_add(r, GROUP, DOCTOR_WARN, name,
                       "bridge %s redirects requests between devices to the host bridge", where);
        doctor_fix(c,
                   "GPUDirect goes the long way: on a machine of your own turn ACS off in the "
                   "firmware, or setpci -s %s ECAP_ACS+0x6.w=0000 at boot; "
                   "virtual machines that get devices passed through need it on",
                   where);
    } else if (one < 0 || two < 0) {
        doctor_add(r, GROUP, DOCTOR_OK, name,
                   "not readable by this user (as root the bridges' ACS bits are checked)");
    } else {
        doctor_add(r, GROUP, DOCTOR_OK, name, "no bridge in between redirects");
    }
}

/* with_other: there is both a GPU and a NIC, so that translation by the IOMMU would take GPUDirect
 * through the host bridge. */
static void check_iommu(struct doctor_report *r, const char *root, const struct doctor_pci *p,
                        bool with_other)
{
    char path[PATH_MAX], type[32], name[128];
    snprintf(name, sizeof name, "iommu %s", p->label);
    snprintf(path, sizeof path, DEVICES "%s/iommu_group/type", p->address);
    if (!doctor_read(root, path, type, sizeof type)) {
        snprintf(path, sizeof path, DEVICES "%s/iommu_group", p->address);
        doctor_add(r, GROUP, DOCTOR_OK, name,
                   doctor_exists(root, path) ? "on; its mode is not readable"
                                             : "off for this device");
        return;
    }
    bool translates = !strncmp(type, "DMA", 3);
    struct doctor_check *c =
        doctor_add(r, GROUP, translates && with_other ? DOCTOR_WARN : DOCTOR_OK, name, "%s%s", type,
                   translates ? ": every access of the device to memory is translated" : "");
    doctor_fix(c, "iommu=pt on the kernel's command line: devices of the host itself then use "
                  "addresses as they are");
}

void doctor_topology(struct doctor_report *r, const char *root, const struct doctor_pci *gpus,
                     size_t n_gpus, const struct doctor_pci *nics, size_t n_nics)
{
    for (size_t n = 0; n < n_nics; n++)
        if (nics[n].chain[0]) check_iommu(r, root, &nics[n], n_gpus > 0);
    for (size_t g = 0; g < n_gpus && n_nics > 0; g++) check_iommu(r, root, &gpus[g], true);
    for (size_t g = 0; g < n_gpus && n_nics > 0; g++) {
        char all[320] = "", name[160];
        size_t best = 0;
        enum doctor_distance least = DOCTOR_UNKNOWN;
        for (size_t n = 0; n < n_nics; n++) {
            enum doctor_distance d = doctor_pci_distance(&gpus[g], &nics[n]);
            size_t at = strlen(all);
            snprintf(all + at, sizeof all - at, "%s%s %s (NUMA node %d)", n ? ", " : "",
                     nics[n].label, doctor_distance_name(d), nics[n].numa_node);
            if (d < least) least = d, best = n;
        }
        snprintf(name, sizeof name, "nic of gpu %s", gpus[g].address);
        if (least == DOCTOR_UNKNOWN) {
            doctor_add(r, GROUP, DOCTOR_OK, name,
                       "none of the RDMA devices has a place on the PCI bus: %s", all);
            continue;
        }
        bool near = least <= DOCTOR_PXB;
        struct doctor_check *c = doctor_add(r, GROUP, near ? DOCTOR_OK : DOCTOR_WARN, name,
                                            "%s is nearest; %s", nics[best].label, all);
        doctor_string(c, "distance", doctor_distance_name(least));
        doctor_string(c, "nearest", nics[best].label);
        if (least == DOCTOR_SYS)
            doctor_fix(c, "the nearest NIC is on another socket, which halves bandwidth without an "
                          "error: use a GPU and a NIC of one NUMA node (NIC in another "
                          "slot, or another GPU for this worker)");
        else if (!near)
            doctor_fix(c, "traffic between them crosses the host bridge (in a virtual machine this "
                          "may not be the hardware's shape): a NIC below the GPU's "
                          "PCIe switch is faster");
        if (near) check_acs(r, root, &gpus[g], &nics[best]);
    }
}
