/* doctor_gpudirect.c - checks whether NICs of this host can read and write memory of its GPUs, and
 * what prevents it.
 *
 * A NIC registers GPU memory in one of two ways: with a dma-buf, which the GPU's driver exports and
 * the NIC's driver imports, or with nvidia_peermem, a module that makes a plain registration of a
 * GPU's address succeed. Files tell which of the two may work. A trial tells whether one does:
 * where CUDA gives some memory of a GPU, it is exported and registered with each device, as a
 * worker does with its pool (common/transfer/rdma/flush.c). */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "kernels/device.h"

#define GROUP "gpudirect"
#define TRY_BYTES ((size_t)2 << 20)
/* server cards show all of their memory; without resizable BARs it is 256 MiB */
#define SMALL_BAR ((uint64_t)1 << 30)

#define WITHOUT                                                                                    \
    "workers with --device cuda refuse --transfer rdma and otherwise take tcp through host "       \
    "memory; "

/* ---- memory to try with ---------------------------------------------------------------------- */

void doctor_gpu_memory_open(struct doctor_gpu_memory *m)
{
    struct td_device_config config = {.deterministic = true};
    struct td_err err = {0};
    *m = (struct doctor_gpu_memory){.bytes = TRY_BYTES};
    if (td_device_open(&config, &m->ops, &err) ||
        m->ops->device->alloc(m->bytes, "doctor", &m->base, &err)) {
        snprintf(m->why, sizeof m->why, "%s", err.msg);
        doctor_gpu_memory_close(m);
        return;
    }
    m->memory = m->ops->device->memory;
}

void doctor_gpu_memory_close(struct doctor_gpu_memory *m)
{
    if (m->base && m->ops) m->ops->device->release(m->base);
    if (m->ops) td_device_close(m->ops);
    m->base = NULL;
    m->ops = NULL;
}

static td_status export_dmabuf(const struct doctor_gpu_memory *m, int *ret_fd, uint64_t *ret_offset,
                               struct td_err *err)
{
    if (!m->memory->dmabuf)
        return td_fail(err, TD_ERR_UNSUPPORTED, "this device's memory has none");
    return m->memory->dmabuf(m->memory->ctx, m->base, m->bytes, ret_fd, ret_offset, err);
}

/* ---- what files say -------------------------------------------------------------------------- */

bool doctor_driver(const char *root, char version[64], bool *ret_is_open)
{
    char text[1024];
    if (!doctor_read(root, "/proc/driver/nvidia/version", text, sizeof text)) return false;
    text[strcspn(text, "\n")] = 0;
    *ret_is_open = strstr(text, "Open Kernel Module") != NULL;
    snprintf(version, 64, "of unknown version"); /* "... Kernel Module for x86_64  570.86.15
                                                    Release Build": the first word like N.N */
    for (const char *p = strstr(text, "Kernel Module"); p && *p;
         p += strcspn(p, " "), p += *p == ' ') {
        size_t digits = strspn(p, "0123456789.");
        if (digits < 3 || !memchr(p, '.', digits)) continue;
        snprintf(version, 64, "%.*s", (int)digits, p);
        break;
    }
    return true;
}

static bool peermem(const char *root, char version[64])
{
    return doctor_read(root, "/sys/module/nvidia_peermem/version", version, 64) ||
           doctor_read(root, "/sys/kernel/mm/memory_peers/nv_mem/version", version, 64);
}

/* Linux 5.12 or newer; also true when the release cannot be read. */
static bool kernel_has_dmabuf(const char *root, char release[64])
{
    char *end;
    if (!doctor_read(root, "/proc/sys/kernel/osrelease", release, 64)) return true;
    long major = strtol(release, &end, 10), minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    return major > 5 || (major == 5 && minor >= 12);
}

/* Checks how much of the card's memory the bus shows at a time: the second region of the device,
 * where a NIC's registrations lie. */
static void check_bar(struct doctor_report *r, const char *root, const struct doctor_pci *gpu)
{
    char path[PATH_MAX], text[2048], name[64], *end;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/resource", gpu->address);
    if (!doctor_read(root, path, text, sizeof text)) return;
    const char *line = strchr(text, '\n');
    if (!line) return;
    uint64_t first = strtoull(line + 1, &end, 16), last = strtoull(end, NULL, 16),
             bytes = last > first ? last - first + 1 : 0;
    snprintf(name, sizeof name, "bar1 %s", gpu->address);
    struct doctor_check *c = doctor_add(r, GROUP, bytes < SMALL_BAR ? DOCTOR_WARN : DOCTOR_OK, name,
                                        "%s of the GPU's memory on the bus", td_size_text(bytes).s);
    doctor_number(c, "bytes", (double)bytes);
    doctor_fix(c, "a KV pool that is larger cannot be registered: \"Above 4G Decoding\" and "
                  "\"Resizable BAR\" in the firmware");
}

/* ---- the host -------------------------------------------------------------------------------- */

/* nvidia_peermem: whether it is loaded, and of the loaded driver. `level`: of a missing one. */
static void check_peermem(struct doctor_report *r, enum doctor_level level, bool has_module,
                          const char *module, const char *driver)
{
    bool is_other = has_module && module[0] && strcmp(module, driver) != 0;
    struct doctor_check *c = doctor_add(r, GROUP, is_other ? DOCTOR_WARN : level, "nvidia_peermem",
                                        "%s%s%s", has_module ? "loaded" : "not loaded",
                                        has_module && module[0] ? ", version " : "", module);
    doctor_string(c, "loaded", has_module ? "yes" : "no");
    if (is_other)
        doctor_fix(c,
                   "it belongs to another driver than %s: modprobe -r nvidia_peermem, then "
                   "modprobe nvidia_peermem",
                   driver);
    else
        doctor_fix(c, "modprobe nvidia_peermem, after the drivers of both GPU and NIC; "
                      "/etc/modules-load.d keeps it over a boot");
}

void doctor_gpudirect(struct doctor_report *r, const char *root, const struct doctor_pci *gpus,
                      size_t n_gpus, size_t n_nics, size_t n_reach,
                      const struct doctor_gpu_memory *m)
{
    char driver[64] = "", release[64] = "", module[64] = "";
    bool is_open = false, is_loaded = doctor_driver(root, driver, &is_open);
    if (n_gpus == 0 || n_nics == 0) {
        doctor_add(
            r, GROUP, DOCTOR_OK, "path", "%s",
            n_gpus ? "no RDMA device: KV of GPUs goes by cuda-ipc on this host, by tcp through "
                     "host memory to others"
            : n_nics
                ? "no NVIDIA GPU: RDMA devices read and write host memory, which takes nothing more"
                : "neither an NVIDIA GPU nor an RDMA device: nothing to set up");
        return;
    }
    if (!is_loaded) {
        struct doctor_check *c =
            doctor_add(r, GROUP, DOCTOR_WARN, "driver",
                       "no driver of the GPUs is loaded, so no NIC reaches their memory");
        doctor_fix(c, "see the GPUs above");
        return;
    }
    int fd = -1;
    uint64_t offset = 0;
    struct td_err err = {0};
    bool has_module = peermem(root, module), new_kernel = kernel_has_dmabuf(root, release);
    bool exports = m->base && export_dmabuf(m, &fd, &offset, &err) == TD_OK;
    bool may_export = m->base ? exports : is_open && new_kernel;
    enum doctor_level level = n_reach || may_export || has_module ? DOCTOR_OK : DOCTOR_WARN;
    if (fd >= 0) close(fd);

    struct doctor_check *c = doctor_add(
        r, GROUP, level, "driver", "%s kernel modules %s on Linux %s", is_open ? "open" : "closed",
        driver, release[0] ? release : "of unknown version");
    doctor_string(c, "modules", is_open ? "open" : "closed");
    if (!is_open)
        doctor_fix(c, WITHOUT "dma-buf takes NVIDIA's open kernel modules (package nvidia-open), "
                              "nvidia_peermem works with either");
    else if (!new_kernel)
        doctor_fix(c, WITHOUT "dma-buf takes Linux 5.12 or newer, nvidia_peermem does not");
    else
        doctor_fix(c, WITHOUT "these versions should do: see the next lines");

    c = doctor_add(r, GROUP, level, "dma-buf", "%s%s",
                   exports   ? "exported from "
                   : m->base ? ""
                             : "not tried: ",
                   exports   ? m->memory->name
                   : m->base ? err.msg
                             : m->why);
    doctor_string(c, "exports", exports ? "yes" : m->base ? "no" : "not tried");
    doctor_fix(c, WITHOUT "%s",
               m->base
                   ? "the driver's answer above says why"
                   : "run this where CUDA works (libtandem_cuda.so, the device in the container)");

    check_peermem(r, level, has_module, module, driver);
    for (size_t i = 0; i < n_gpus; i++) check_bar(r, root, &gpus[i]);
}

/* ---- one NIC --------------------------------------------------------------------------------- */

/* There is no memory to try with. The error of a registration without a buffer tells whether the
 * device knows dma-bufs. */
static void guess_nic(struct doctor_report *r, const char *root, const struct td_verbs *vb,
                      struct td_vb_device *d, const char *name)
{
    char module[64] = "";
    struct td_vb_mr *mr = NULL;
    int e = vb->reg_dmabuf(d, 0, 4096, 0, -1, TD_VB_LOCAL_WRITE, &mr);
    bool imports = e == EBADF, has_module = peermem(root, module);
    struct doctor_check *c =
        doctor_add(r, "rdma", imports || has_module ? DOCTOR_OK : DOCTOR_WARN, name,
                   "not tried; dma-buf %s; nvidia_peermem %s%s",
                   imports                                                  ? "yes"
                   : e == EOPNOTSUPP || e == EPROTONOSUPPORT || e == ENOSYS ? "no"
                                                                            : strerror(e),
                   has_module ? "loaded, version " : "not loaded", module);
    doctor_string(c, "dmabuf", imports ? "yes" : "no");
    doctor_fix(c, WITHOUT "a kernel of 5.12 or newer with the open NVIDIA kernel modules and "
                          "rdma-core 34 or newer (dma-buf), or modprobe nvidia_peermem");
}

bool doctor_gpudirect_nic(struct doctor_report *r, const char *root, enum doctor_level bad,
                          const struct td_verbs *vb, struct td_vb_device *d, const char *device,
                          const struct doctor_gpu_memory *m)
{
    char name[64], why[128] = "";
    struct td_vb_mr *mr = NULL;
    struct td_err err = {0};
    uint64_t offset = 0;
    int fd = -1, by_dmabuf = EOPNOTSUPP, by_address = 0;
    const unsigned access = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE;
    snprintf(name, sizeof name, "%.40s gpudirect", device);
    if (!m->base) {
        guess_nic(r, root, vb, d, name);
        return false;
    }
    if (export_dmabuf(m, &fd, &offset, &err)) {
        snprintf(why, sizeof why, "%.127s", err.msg);
    } else {
        by_dmabuf =
            vb->reg_dmabuf(d, offset, m->bytes, (uint64_t)(uintptr_t)m->base, fd, access, &mr);
        if (by_dmabuf) snprintf(why, sizeof why, "%.127s", strerror(by_dmabuf));
        close(fd);
    }
    if (by_dmabuf) by_address = vb->reg(d, m->base, m->bytes, access, &mr);
    if (mr) vb->dereg(mr);
    if (!by_dmabuf) {
        doctor_add(r, "rdma", DOCTOR_OK, name, "registers memory of %s by dma-buf",
                   m->memory->name);
    } else if (!by_address) {
        doctor_add(r, "rdma", DOCTOR_OK, name,
                   "registers memory of %s by nvidia_peermem (dma-buf: %s)", m->memory->name, why);
    } else {
        struct doctor_check *c = doctor_add(
            r, "rdma", bad, name, "does not register memory of %s. dma-buf: %s. nvidia_peermem: %s",
            m->memory->name, why, strerror(by_address));
        doctor_fix(c, WITHOUT
                   "see gpudirect below; a container needs rdma-core 34 or newer of its own");
    }
    doctor_string(&r->checks[r->n - 1], "by",
                  !by_dmabuf    ? "dma-buf"
                  : !by_address ? "nvidia_peermem"
                                : "none");
    return !by_dmabuf || !by_address;
}
