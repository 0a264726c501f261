/* doctor_test.c - what `tandem doctor` concludes: from trees that look like /sys and /proc, a
 * verbs table that answers as told, messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "cli/doctor_wire.h"
#include "common/base/clock.h"
#include "tests/fake/fake_device.h"

/* ---- a tree that looks like a host's --------------------------------------------------------- */

static char root[64];

static void parents(char *full)
{
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        if (mkdir(full, 0755) && errno != EEXIST) fail_msg("mkdir %s: %s", full, strerror(errno));
        *p = '/';
    }
}

static void put_bytes(const char *path, const void *bytes, size_t n)
{
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    parents(full);
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static void put(const char *path, const char *text) { put_bytes(path, text, strlen(text)); }

static void put_link(const char *path, const char *target)
{
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    parents(full);
    assert_int_equal(symlink(target, full), 0);
}

/* A device or bridge at `chain`, as the kernel shows it. */
static void put_pci(const char *chain, const char *vendor, const char *class, const char *numa_node)
{
    const char *address = strrchr(chain, '/') + 1;
    char path[PATH_MAX], target[PATH_MAX];
    snprintf(path, sizeof path, "/sys/devices/%s/vendor", chain);
    put(path, vendor);
    snprintf(path, sizeof path, "/sys/devices/%s/class", chain);
    put(path, class);
    snprintf(path, sizeof path, "/sys/devices/%s/numa_node", chain);
    put(path, numa_node);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s", address);
    snprintf(target, sizeof target, "../../../devices/%s", chain);
    put_link(path, target);
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/tandem-doctor-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int drop(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

static int drop_root(void **state)
{
    (void)state;
    return nftw(root, drop, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- reading a report ------------------------------------------------------------------------ */

static struct doctor_report report(void)
{
    struct doctor_report r = {.out = fopen("/dev/null", "w")};
    assert_non_null(r.out);
    return r;
}

static void report_end(struct doctor_report *r)
{
    FILE *out = r->out;
    doctor_report_free(r);
    fclose(out);
}

static const struct doctor_check *check(const struct doctor_report *r, const char *name)
{
    for (size_t i = 0; i < r->n; i++)
        if (!strcmp(r->checks[i].name, name)) return &r->checks[i];
    for (size_t i = 0; i < r->n; i++)
        print_message("have: %s: %s\n", r->checks[i].name, r->checks[i].found);
    fail_msg("no check \"%s\"", name);
    return NULL;
}

static void says_(const struct doctor_report *r, const char *name, enum doctor_level level,
                  const char *found, const char *fix, int line)
{
    const struct doctor_check *c = check(r, name);
    if (c->level != level || !strstr(c->found, found) || (fix && !strstr(c->fix, fix)))
        fail_msg("line %d: %s is level %d: %s; fix: %s\nwant level %d, \"%s\", \"%s\"", line, name,
                 c->level, c->found, c->fix, level, found, fix ? fix : "");
    if (level != DOCTOR_OK && !c->fix[0]) fail_msg("line %d: %s says not what to do", line, name);
}
#define says(r, name, level, found, fix) says_(r, name, level, found, fix, __LINE__)

/* ---- PCI ------------------------------------------------------------------------------------- */

static void distances(void **state)
{
    (void)state;
#define SW "pci0000:3a/0000:3a:00.0/0000:3b:00.0/" /* root port, a switch's upstream port */
    static const struct {
        const char *a, *b;
        int numa_a, numa_b;
        enum doctor_distance want;
    } cases[] = {
        {SW "0000:3c:00.0/0000:3d:00.0", SW "0000:3c:00.0/0000:3d:00.0", 0, 0, DOCTOR_SAME},
        /* two functions */
        {SW "0000:3c:00.0/0000:3d:00.0", SW "0000:3c:00.0/0000:3d:00.1", 0, 0, DOCTOR_PIX},
        /* one switch */
        {SW "0000:3c:00.0/0000:3d:00.0", SW "0000:3c:01.0/0000:3e:00.0", 0, 0, DOCTOR_PIX},
        /* a switch behind a switch */
        {SW "0000:3c:00.0/0000:3d:00.0", SW "0000:3c:01.0/0000:3e:00.0/0000:3f:00.0/0000:40:00.0",
         0, 0, DOCTOR_PXB},
        {"pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:3a/0000:3a:01.0/0000:41:00.0", 0, 0,
         DOCTOR_PHB},
        /* a virtual machine's flat bus */
        {"pci0000:00/0000:00:03.0", "pci0000:00/0000:00:04.0", -1, -1, DOCTOR_PHB},
        {"pci0000:00/0000:00:03.0", "pci0000:00/0000:00:03.1", 0, 0, DOCTOR_PIX},
        {"pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:5d/0000:5d:00.0/0000:5e:00.0", 0, 0,
         DOCTOR_NODE},
        {"pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:5d/0000:5d:00.0/0000:5e:00.0", -1, -1,
         DOCTOR_NODE},
        {"pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:d7/0000:d7:00.0/0000:d8:00.0", 0, 1,
         DOCTOR_SYS},
        /* not a prefix by bytes */
        {"pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:3/0000:3a:00.0/0000:3b:00.0", 0, 1,
         DOCTOR_SYS},
        {"", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0, 0, DOCTOR_UNKNOWN},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct doctor_pci a = {.numa_node = cases[i].numa_a}, b = {.numa_node = cases[i].numa_b};
        const char *end_a = strrchr(cases[i].a, '/'), *end_b = strrchr(cases[i].b, '/');
        snprintf(a.chain, sizeof a.chain, "%s", cases[i].a);
        snprintf(b.chain, sizeof b.chain, "%s", cases[i].b);
        snprintf(a.address, sizeof a.address, "%s", end_a ? end_a + 1 : "");
        snprintf(b.address, sizeof b.address, "%s", end_b ? end_b + 1 : "");
        enum doctor_distance ab = doctor_pci_distance(&a, &b), ba = doctor_pci_distance(&b, &a);
        if (ab != cases[i].want || ba != cases[i].want)
            fail_msg("case %zu: %s, %s: %s and back %s, want %s", i, cases[i].a, cases[i].b,
                     doctor_distance_name(ab), doctor_distance_name(ba),
                     doctor_distance_name(cases[i].want));
    }
}

static size_t acs_config(uint8_t config[4096], unsigned control)
{
    memset(config, 0, 4096);
    /* AER, next 0x140 */
    memcpy(config + 0x100, (uint8_t[]){0x01, 0x00, 0x01, 0x14}, 4);
    /* ACS, the last */
    memcpy(config + 0x140, (uint8_t[]){0x0d, 0x00, 0x01, 0x00, 0x5f, 0, (uint8_t)control, 0}, 8);
    return 4096;
}

static void acs(void **state)
{
    (void)state;
    uint8_t c[4096];
    assert_int_equal(doctor_acs_redirects(c, acs_config(c, 0x1d)), 1);
    assert_int_equal(doctor_acs_redirects(c, acs_config(c, 0x04)), 1);
    assert_int_equal(doctor_acs_redirects(c, acs_config(c, 0x08)), 1);
    /* source validation and upstream forwarding alone */
    assert_int_equal(doctor_acs_redirects(c, acs_config(c, 0x11)), 0);
    /* what others than root may read */
    assert_int_equal(doctor_acs_redirects(c, 64), -1);
    assert_int_equal(doctor_acs_redirects(c, 0x142), -1); /* cut in the middle */
    c[0x103] = 0;
    c[0x102] = 0x01;
    assert_int_equal(doctor_acs_redirects(c, 4096), 0); /* no ACS */
    /* a list that goes in a circle ends too */
    c[0x103] = 0x10;
    assert_int_equal(doctor_acs_redirects(c, 4096), 0);
}

/* Two sockets: gpu and mlx5_0 below a switch of one, mlx5_1 on the other; an old VGA and a NIC
 * that is no RDMA NIC besides. */
static void put_two_sockets(void)
{
    put_pci("pci0000:3a/0000:3a:00.0", "0x8086\n", "0x060400\n", "0\n");
    put_pci("pci0000:3a/0000:3a:00.0/0000:3b:00.0", "0x1000\n", "0x060400\n", "0\n");
    put_pci("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0", "0x1000\n", "0x060400\n", "0\n");
    put_pci("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0", "0x1000\n", "0x060400\n", "0\n");
    put_pci("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0", "0x10de\n",
            "0x030200\n", "0\n");
    put_pci("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0", "0x15b3\n",
            "0x020000\n", "0\n");
    put_pci("pci0000:d7/0000:d7:00.0/0000:d8:00.0", "0x15b3\n", "0x020700\n", "1\n");
    put_pci("pci0000:00/0000:00:02.0", "0x1a03\n", "0x030000\n", "-1\n");
    put_pci("pci0000:00/0000:00:1f.6", "0x8086\n", "0x020000\n", "-1\n");
    put_link("/sys/class/infiniband/mlx5_0/device", "../../../0000:3e:00.0");
    put_link("/sys/class/infiniband/mlx5_1/device", "../../../0000:d8:00.0");
}

/* A GPU and NICs that are far from it, or nowhere on the bus. */
static void far_nics(const struct doctor_pci *gpus, const struct doctor_pci *nics)
{
    struct doctor_report r = report();
    doctor_topology(&r, root, gpus, 1, nics + 1, 1); /* only the far one */
    says(&r, "nic of gpu 0000:3d:00.0", DOCTOR_WARN, "mlx5_1 SYS", "another socket");
    report_end(&r);

    r = report();
    struct doctor_pci software = {.label = "rxe0", .numa_node = -1};
    doctor_topology(&r, root, gpus, 1, &software, 1);
    says(&r, "nic of gpu 0000:3d:00.0", DOCTOR_OK,
         "none of the RDMA devices has a place on the PCI bus: rxe0 ?", NULL);
    report_end(&r);
}

static void topology(void **state)
{
    (void)state;
    struct doctor_pci gpus[4], nics[4];
    struct doctor_report r = report();
    uint8_t config[4096];
    put_two_sockets();
    put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                                       "570.86.15  Release Build\nGCC version: 13\n");
    put("/proc/driver/nvidia/gpus/0000:3d:00.0/information",
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 300\n");
    assert_int_equal(doctor_gpus(&r, root, gpus, 4), 1);
    says(&r, "gpu 0000:3d:00.0", DOCTOR_OK, "NVIDIA H100 80GB HBM3, NUMA node 0, driver 570.86.15",
         NULL);
    assert_int_equal(doctor_pci_list(root, doctor_pci_is_rdma_nic, nics, 4), 2);
    assert_string_equal(nics[0].address, "0000:3e:00.0");
    snprintf(nics[0].label, sizeof nics[0].label, "mlx5_0");
    snprintf(nics[1].label, sizeof nics[1].label, "mlx5_1");
    put("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0/iommu_group/"
        "type",
        "DMA-FQ\n");
    put("/sys/devices/pci0000:d7/0000:d7:00.0/0000:d8:00.0/iommu_group/type", "identity\n");
    doctor_topology(&r, root, gpus, 1, nics, 2);
    says(&r, "nic of gpu 0000:3d:00.0", DOCTOR_OK,
         "mlx5_0 is nearest; mlx5_0 PIX (NUMA node 0), mlx5_1 SYS (NUMA node 1)", NULL);
    says(&r, "iommu mlx5_0", DOCTOR_WARN, "DMA-FQ", "iommu=pt");
    says(&r, "iommu mlx5_1", DOCTOR_OK, "identity", NULL);
    says(&r, "iommu gpu 0000:3d:00.0", DOCTOR_OK, "off for this device", NULL);
    says(&r, "acs mlx5_0 - 0000:3d:00.0", DOCTOR_OK, "not readable", NULL);
    report_end(&r);

    r = report();
    acs_config(config, 0);
    put_bytes("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/config", config,
              sizeof config);
    acs_config(config, 0x1d);
    put_bytes("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/config", config,
              sizeof config);
    doctor_topology(&r, root, gpus, 1, nics, 2);
    says(&r, "acs mlx5_0 - 0000:3d:00.0", DOCTOR_WARN, "bridge 0000:3c:01.0 redirects",
         "setpci -s 0000:3c:01.0 ECAP_ACS");
    report_end(&r);

    r = report();
    acs_config(config, 0);
    put_bytes("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/config", config,
              sizeof config);
    doctor_topology(&r, root, gpus, 1, nics, 1);
    says(&r, "acs mlx5_0 - 0000:3d:00.0", DOCTOR_OK, "no bridge in between redirects", NULL);
    report_end(&r);

    far_nics(gpus, nics);
}

static void gpu_without_driver(void **state)
{
    (void)state;
    struct doctor_pci gpus[4];
    struct doctor_report r = report();
    assert_int_equal(doctor_gpus(&r, root, gpus, 4), 0);
    says(&r, "gpu", DOCTOR_OK, "no NVIDIA GPU", NULL);
    put_two_sockets();
    assert_int_equal(doctor_gpus(&r, root, gpus, 4), 1);
    says(&r, "gpu 0000:3d:00.0", DOCTOR_WARN, "no driver is loaded", "NVIDIA driver");
    report_end(&r);
}

/* ---- host files ------------------------------------------------------------------------------ */

static void host(void **state)
{
    (void)state;
    static const struct {
        const char *enabled, *shmem;
        enum doctor_level level;
        const char *fix;
    } cases[] = {
        {"always [madvise] never\n", "always within_size [advise] never deny force\n", DOCTOR_OK,
         ""},
        {"[always] madvise never\n", "[always] within_size advise never deny force\n", DOCTOR_OK,
         ""},
        {"always madvise [never]\n", "always within_size [advise] never deny force\n", DOCTOR_WARN,
         "transparent_hugepage/enabled"},
        {"always [madvise] never\n", "always within_size advise [never] deny force\n", DOCTOR_WARN,
         "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"},
        {NULL, NULL, DOCTOR_WARN, "CONFIG_TRANSPARENT_HUGEPAGE"},
    };
    struct doctor_config o = {.root = root, .kv_memory = "1MiB", .transfer = "auto"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct doctor_report r = report();
        char path[PATH_MAX];
        if (cases[i].enabled) {
            put("/sys/kernel/mm/transparent_hugepage/enabled", cases[i].enabled);
            put("/sys/kernel/mm/transparent_hugepage/shmem_enabled", cases[i].shmem);
        } else {
            snprintf(path, sizeof path, "%s/sys/kernel/mm/transparent_hugepage/enabled", root);
            assert_int_equal(unlink(path), 0);
        }
        doctor_host(&r, &o, 1 << 20, 0);
        const struct doctor_check *c = check(&r, "huge pages");
        if (c->level != cases[i].level || (c->level && !strstr(c->fix, cases[i].fix)))
            fail_msg("case %zu: %d %s; %s", i, c->level, c->found, c->fix);
        report_end(&r);
    }
    put("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
    put("/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu avx2xx hypervisor\n\nprocessor\t: "
                         "1\nflags\t\t: fpu avx2\n");
    struct doctor_report r = report();
    doctor_host(&r, &o, UINT64_MAX / 2, 1);
    says(&r, "clock source", DOCTOR_WARN, "hpet", "tsc");
    says(&r, "cpu", DOCTOR_WARN, "no vector extension that is used; a virtual machine", "AVX2");
    says(&r, "memory", DOCTOR_FAIL, "KV pool", "--kv-memory");
    /* CapEff is read below root too, where there is none: so the limit counts, unless it is
       unlimited. */
    assert_true(strstr(check(&r, "memory lock limit")->found, "unlimited") ||
                check(&r, "memory lock limit")->level == DOCTOR_FAIL);
    assert_int_equal(doctor_status(&r), 1);
    doctor_flush(&r);
    json_t *j = doctor_json(&r);
    assert_int_equal(json_integer_value(json_object_get(j, "status")), 1);
    assert_int_equal(json_array_size(json_object_get(j, "checks")), r.n);
    json_decref(j);
    report_end(&r);
    put("/proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd crc32 asimddp sve i8mm bf16 bti\n");
    r = report();
    doctor_host(&r, &o, 1 << 20, 0);
    says(&r, "cpu", DOCTOR_OK, "; asimd asimddp i8mm bf16 sve", NULL);
    report_end(&r);
}

static void report_is_plain(void **state)
{
    (void)state;
    char *text = NULL;
    size_t n = 0;
    struct doctor_report r = {.out = open_memstream(&text, &n)};
    struct doctor_check *c = doctor_add(&r, "group", DOCTOR_WARN, "n\x1b[31mame", "found\nit \xff");
    doctor_fix(c, "do\tthis");
    doctor_add(&r, "group", DOCTOR_OK, "fine", "all");
    doctor_flush(&r);
    json_t *j = doctor_json(&r);
    assert_string_equal(json_string_value(json_object_get(
                            json_array_get(json_object_get(j, "checks"), 0), "found")),
                        "found\nit ?");
    json_decref(j);
    fclose(r.out);
    assert_string_equal(
        text, "group\n  warn  n?[31mame: found?it \xff\n        fix: do?this\n  ok    fine: all\n");
    assert_int_equal(doctor_status(&r), 0);
    doctor_report_free(&r);
    free(text);
    assert_string_equal(td_size_text(256 << 20).s, "256 MiB");
    assert_string_equal(td_size_text(3ull << 29).s, "1.5 GiB");
    assert_string_equal(td_size_text(100).s, "100 bytes");
    assert_string_equal(td_size_text(UINT64_MAX).s, "16 EiB");
}

/* ---- RDMA: a table that answers as told ------------------------------------------------------ */

static struct told {
    uint32_t n_devices;
    int list_error, open_error, reg_error, dmabuf_error; /* dmabuf_error: of no buffer at all */
    const void *gpu; /* memory of a GPU, whose registrations answer */
    int gpu_reg_error, import_error;
    struct td_vb_limits limits;
    struct td_vb_port port;
    struct td_vb_gid gids[4];
    uint64_t reg_bytes;
    unsigned reg_access, n_open, n_mr;
} told;

static int t_list(const struct td_verbs *vb, char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX],
                  uint32_t *ret_n)
{
    (void)vb;
    if (told.list_error) return told.list_error;
    for (uint32_t i = 0; i < told.n_devices; i++) snprintf(names[i], TD_VB_NAME_MAX, "mlx5_%u", i);
    *ret_n = told.n_devices;
    return 0;
}

static int t_open(const struct td_verbs *vb, const char *name, struct td_vb_device **ret_device)
{
    (void)vb;
    (void)name;
    if (told.open_error) return told.open_error;
    told.n_open++;
    *ret_device = (struct td_vb_device *)(void *)&told;
    return 0;
}

static void t_close(struct td_vb_device *d)
{
    (void)d;
    told.n_open--;
}

static int t_query(struct td_vb_device *d, struct td_vb_limits *ret)
{
    (void)d;
    *ret = told.limits;
    return 0;
}

static int t_port(struct td_vb_device *d, uint8_t port, struct td_vb_port *ret)
{
    (void)d;
    (void)port;
    *ret = told.port;
    return 0;
}

static int t_gid(struct td_vb_device *d, uint8_t port, uint32_t index, struct td_vb_gid *ret)
{
    (void)d;
    (void)port;
    static const uint8_t empty[16];
    if (index >= 4 || !memcmp(told.gids[index].raw, empty, sizeof empty)) return ENODATA;
    *ret = told.gids[index];
    ret->index = index;
    return 0;
}

static int t_keep(struct td_vb_device *d, struct td_vb_mr **ret_mr)
{
    static struct td_vb_mr mr;
    told.n_mr++;
    mr.device = d;
    *ret_mr = &mr;
    return 0;
}

static int t_reg(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                 struct td_vb_mr **ret_mr)
{
    if (told.gpu && addr == told.gpu)
        return told.gpu_reg_error ? told.gpu_reg_error : t_keep(d, ret_mr);
    if (told.reg_error) return told.reg_error;
    told.reg_bytes = bytes;
    told.reg_access = access;
    return t_keep(d, ret_mr);
}

static int t_dmabuf(struct td_vb_device *d, uint64_t offset, uint64_t bytes, uint64_t iova, int fd,
                    unsigned access, struct td_vb_mr **ret_mr)
{
    if (fd < 0) return told.dmabuf_error;
    struct stat st; /* the fake device's dma-buf is a file of its size */
    assert_int_equal(fstat(fd, &st), 0);
    assert_true(offset + bytes <= (uint64_t)st.st_size);
    assert_true(iova == (uint64_t)(uintptr_t)told.gpu);
    assert_int_equal(access, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE);
    return told.import_error ? told.import_error : t_keep(d, ret_mr);
}

static int t_dereg(struct td_vb_mr *mr)
{
    (void)mr;
    told.n_mr--;
    return 0;
}

static const struct td_verbs table = {.name = "told",
                                      .list = t_list,
                                      .open = t_open,
                                      .close = t_close,
                                      .query = t_query,
                                      .query_port = t_port,
                                      .query_gid = t_gid,
                                      .reg = t_reg,
                                      .reg_dmabuf = t_dmabuf,
                                      .dereg = t_dereg};

#define V4(a, b, c, d)                                                                             \
    {                                                                                              \
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d                                       \
    }
#define LINK_LOCAL                                                                                 \
    {                                                                                              \
        0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1                                       \
    }

/* As the option table gives them; a test changes what it is about. */
static struct td_kv_port_config rdma_options;

static void told_good(void)
{
    rdma_options =
        (struct td_kv_port_config){.rdma_devices = "", .rdma_port = 1, .rdma_gid_index = -1};
    told = (struct told){
        .n_devices = 1,
        .dmabuf_error = EBADF,
        .limits = {.max_qp = 131072,
                   .max_qp_wr = 32768,
                   .max_sge = 30,
                   .max_cqe = 4194303,
                   .max_srq = 65536,
                   .max_srq_wr = 32767,
                   .max_rd_atomic_in = 16,
                   .n_ports = 1,
                   .mw_type2 = true,
                   .relaxed_ordering = true,
                   .max_mr_bytes = UINT64_MAX,
                   .max_rd_atomic_out = 16},
        .port = {.active = true,
                 .ethernet = true,
                 .mtu_bytes = 4096,
                 .bits_per_s = 400000000000,
                 .n_gids = 4},
        .gids = {
            {.type = TD_VB_GID_ROCE_V1, .raw = LINK_LOCAL, .netdev = "ens1", .netdev_up = true},
            {.type = TD_VB_GID_ROCE_V2, .raw = LINK_LOCAL, .netdev = "ens1", .netdev_up = true},
            {.type = TD_VB_GID_ROCE_V1,
             .raw = V4(10, 0, 0, 1),
             .netdev = "ens1",
             .netdev_up = true},
            {.type = TD_VB_GID_ROCE_V2,
             .raw = V4(10, 0, 0, 1),
             .netdev = "ens1",
             .netdev_up = true}}};
}

static const struct doctor_gpu_memory no_memory = {.why = "CUDA is not available: no driver"};

static unsigned n_reach_gpu; /* as the last one found */

static struct doctor_report rdma_with(const char *transfer, const struct td_verbs *vb,
                                      const struct doctor_gpu_memory *gpu, unsigned want_usable)
{
    static struct doctor_rdma result;
    struct doctor_report r = report();
    struct doctor_config o = {
        .root = root, .transfer = transfer, .register_bytes = 1 << 20, .kv_port = rdma_options};
    doctor_rdma(&r, &o, vb, "not installed", 1 << 30, gpu, &result);
    assert_int_equal(result.n_usable, want_usable);
    assert_int_equal(told.n_open, 0);
    assert_int_equal(told.n_mr, 0);
    n_reach_gpu = result.n_reach_gpu;
    return r;
}

static struct doctor_report rdma(const char *transfer, const struct td_verbs *vb, size_t n_gpus,
                                 unsigned want_usable)
{
    return rdma_with(transfer, vb, n_gpus ? &no_memory : NULL, want_usable);
}

static void rdma_good(void **state)
{
    (void)state;
    told_good();
    put_two_sockets();
    put("/sys/class/net/ens1/mtu", "9000\n");
    put("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0/"
        "current_link_speed",
        "32.0 GT/s PCIe\n");
    put("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0/"
        "max_link_speed",
        "32.0 GT/s PCIe\n");
    put("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0/"
        "current_link_width",
        "8\n");
    put("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0/"
        "max_link_width",
        "16\n");
    struct doctor_report r = rdma("rdma", &table, 1, 1);
    says(&r, "mlx5_0", DOCTOR_OK, "PCI 0000:3e:00.0, NUMA node 0, 1 port", NULL);
    says(&r, "mlx5_0 bus", DOCTOR_WARN, "32.0 GT/s PCIe x8 of 32.0 GT/s PCIe x16", "slot");
    says(&r, "mlx5_0 port 1", DOCTOR_OK, "active, Ethernet (RoCE), 400 Gb/s, MTU 4096", NULL);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_OK,
         "index 3, 10.0.0.1 (RoCE v2, private IPv4, ens1); 4 of 4", NULL);
    says(&r, "mlx5_0 limits", DOCTOR_OK, "relaxed ordering yes", NULL);
    says(&r, "mlx5_0 registration", DOCTOR_OK, "1 MiB in ", NULL);
    assert_int_equal(told.reg_bytes, 1 << 20);
    assert_int_equal(told.reg_access, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_MW_BIND |
                                          TD_VB_RELAXED_ORDERING);
    says(&r, "mlx5_0 gpudirect", DOCTOR_OK, "not tried; dma-buf yes; nvidia_peermem not loaded",
         NULL);
    says(&r, "kv path", DOCTOR_OK, "by RDMA", NULL);
    assert_int_equal(doctor_status(&r), 0);
    report_end(&r);
}

static void rdma_bad_gids(void)
{
    struct doctor_report r;
    told_good(); /* only a link-local address */
    memset(&told.gids[3], 0, sizeof told.gids[3]);
    r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_WARN,
         "index 1, fe80:0:0:0:0:0:0:1 (RoCE v2, link-local IPv6, ens1); 3 of 4", "IPv4 address");
    report_end(&r);

    told_good(); /* RoCE v1 only: the last resort */
    memset(&told.gids[1], 0, sizeof told.gids[1]);
    memset(&told.gids[3], 0, sizeof told.gids[3]);
    r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_WARN, "RoCE v1", "cma_roce_mode");
    report_end(&r);

    static const struct td_vb_gid v6[] = {
        {.type = TD_VB_GID_ROCE_V2,
         .raw = {0x20, 0x01, 0x0d, 0xb8, [15] = 1},
         .netdev = "ens1",
         .netdev_up = true},
        {.type = TD_VB_GID_ROCE_V2, .raw = {0xfd, [15] = 1}, .netdev = "ens1", .netdev_up = true},
        {.type = TD_VB_GID_ROCE_V2,
         .raw = V4(169, 254, 3, 4),
         .netdev = "ens1",
         .netdev_up = true}};
    static const char *const v6_fix[] = {"IPv4 address on ens1", "IPv4 address on ens1",
                                         "RDMA network on ens1"};
    for (size_t i = 0; i < 3; i++) {
        told_good();
        told.gids[3] = v6[i];
        r = rdma("auto", &table, 0, 1);
        says(&r, "mlx5_0 port 1 gid", DOCTOR_WARN, "index 3, ", v6_fix[i]);
        report_end(&r);
    }
}

static void rdma_no_gid(void)
{
    struct doctor_report r;
    told_good(); /* no network device is up: nothing to speak from */
    for (size_t i = 0; i < 4; i++) told.gids[i].netdev_up = false;
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_WARN, "none of 4 GIDs can be used", "IPv4 address");
    says(&r, "kv path", DOCTOR_FAIL, "tcp between hosts, though there are RDMA devices",
         "--transfer tcp says so");
    report_end(&r);
    r = rdma("tcp", &table, 0, 0);
    says(&r, "kv path", DOCTOR_WARN, "tcp between hosts", NULL);
    assert_int_equal(doctor_status(&r), 0);
    report_end(&r);
    r = rdma("rdma", &table, 0, 0);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_FAIL, "none of 4 GIDs", "IPv4");
    says(&r, "kv path", DOCTOR_FAIL, "--transfer rdma", NULL);
    report_end(&r);
}

static void rdma_bad_device(void)
{
    struct doctor_report r;
    told_good(); /* too small for one queue pair */
    told.limits.max_qp = 0;
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0 port 1 queues", DOCTOR_WARN, "max_qp", "another device");
    report_end(&r);

    told_good();
    told.port.active = false;
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0 port 1", DOCTOR_WARN, "down", "ip link set up");
    report_end(&r);

    static const struct {
        int error;
        const char *fix;
    } reg[] = {
        {ENOMEM, "ulimit -l"}, {EPERM, "uverbs"}, {EFAULT, "nvidia_peermem"}, {EIO, "dmesg"}};
    for (size_t i = 0; i < sizeof reg / sizeof *reg; i++) {
        told_good();
        told.reg_error = reg[i].error;
        r = rdma("rdma", &table, 0, 0);
        says(&r, "mlx5_0 registration", DOCTOR_FAIL, strerror(reg[i].error), reg[i].fix);
        report_end(&r);
    }

    told_good();
    told.open_error = EACCES;
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0", DOCTOR_FAIL, "cannot be opened", "uverbs");
    report_end(&r);
}

static void rdma_small_regions(void)
{
    struct doctor_report r;
    static const struct {
        uint64_t max_mr_bytes;
        enum doctor_level level;
        const char *found, *fix;
    } regions[] = {
        {1 << 30, DOCTOR_OK, "up to 1 GiB (pool 1 GiB),", NULL},
        /* nothing to fix */
        {1 << 29, DOCTOR_OK, "up to 512 MiB (pool 1 GiB, will be split into 2 registrations),",
         NULL},
        {1 << 21, DOCTOR_OK, "split into 512 registrations", NULL},
        {1 << 20, DOCTOR_WARN, "split into 1024 registrations", "--kv-memory of at most 768 MiB"}};
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        told_good();
        told.limits.max_mr_bytes = regions[i].max_mr_bytes;
        r = rdma("rdma", &table, 0, 1);
        says(&r, "mlx5_0 limits", regions[i].level, regions[i].found, regions[i].fix);
        report_end(&r);
    }

    told_good(); /* limits and GPUDirect */
    told.limits.max_mr_bytes = (1 << 30) / 768;
    told.limits.relaxed_ordering = told.limits.mw_type2 = false;
    told.dmabuf_error = EOPNOTSUPP;
    r = rdma("auto", &table, 1, 1);
    says(&r, "mlx5_0 limits", DOCTOR_WARN, "(pool 1 GiB, will be split into 769 registrations)",
         "at most 768 registrations on their 1 device in all");
    says(&r, "mlx5_0 gpudirect", DOCTOR_WARN, "dma-buf no; nvidia_peermem not loaded",
         "modprobe nvidia_peermem");
    assert_int_equal(told.reg_access, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE);
    report_end(&r);
    put("/sys/module/nvidia_peermem/version", "570.86.15\n");
    r = rdma("auto", &table, 1, 1);
    says(&r, "mlx5_0 gpudirect", DOCTOR_OK, "dma-buf no; nvidia_peermem loaded, version 570.86.15",
         NULL);
    report_end(&r);
}

static void rdma_bad(void **state)
{
    (void)state;
    struct doctor_report r;
    put("/sys/class/net/ens1/mtu", "1500\n");

    told_good(); /* small MTUs */
    told.port.mtu_bytes = 1024;
    r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_0", DOCTOR_OK, "no PCI device (made by software)", NULL);
    says(&r, "mlx5_0 port 1", DOCTOR_WARN, "MTU 1024 (ens1 has 1500)", "ip link set ens1 mtu 9000");
    report_end(&r);
    told.port.mtu_bytes = 4096;
    r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_0 port 1", DOCTOR_WARN, "MTU 4096, but ens1 has 1500",
         "ip link set ens1 mtu 9000");
    report_end(&r);

    rdma_bad_gids();
    rdma_no_gid();
    rdma_bad_device();
    rdma_small_regions();
}

/* A device's memory is exported and registered as a worker would; what a NIC answers decides,
 * whatever the files say. */
static void gpudirect_is_tried(void **state)
{
    (void)state;
    static const struct {
        const char *device;
        int import_error, gpu_reg_error;
        const char *transfer;
        enum doctor_level level;
        const char *found, *by;
    } cases[] = {
        {"device", 0, EFAULT, "rdma", DOCTOR_OK, "by dma-buf", "dma-buf"},
        {"device", ENXIO, 0, "rdma", DOCTOR_OK,
         "by nvidia_peermem (dma-buf: No such device or address)", "nvidia_peermem"},
        {"no-dmabuf", 0, 0, "rdma", DOCTOR_OK,
         "by nvidia_peermem (dma-buf: the driver exports no dma-buf)", "nvidia_peermem"},
        {"device", EOPNOTSUPP, EFAULT, "auto", DOCTOR_WARN,
         "dma-buf: Operation not supported. nvidia_peermem: Bad address", "none"},
        {"no-dmabuf", 0, EFAULT, "auto", DOCTOR_WARN,
         "dma-buf: the driver exports no dma-buf. nvidia_peermem: Bad address", "none"},
        {"no-dmabuf", 0, EFAULT, "rdma", DOCTOR_FAIL, "does not register memory of", "none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fake_device *device = fake_device_open(cases[i].device);
        struct doctor_gpu_memory m = {.memory = fake_device_memory(device),
                                      .base = fake_device_alloc(device, 1 << 20),
                                      .bytes = 1 << 20};
        told_good();
        told.gpu = m.base;
        told.import_error = cases[i].import_error;
        told.gpu_reg_error = cases[i].gpu_reg_error;
        struct doctor_report r = rdma_with(cases[i].transfer, &table, &m, 1);
        assert_int_equal(n_reach_gpu, cases[i].level == DOCTOR_OK);
        const struct doctor_check *c = check(&r, "mlx5_0 gpudirect");
        if (c->level != cases[i].level || !strstr(c->found, cases[i].found))
            fail_msg("case %zu: %d %s", i, c->level, c->found);
        assert_string_equal(json_string_value(json_object_get(c->values, "by")), cases[i].by);
        assert_true(c->level == DOCTOR_OK || strstr(c->fix, "refuse --transfer rdma") != NULL);
        report_end(&r);
        fake_device_close(device);
    }
}

#define OPEN_DRIVER                                                                                \
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC "      \
    "version: 13\n"
#define CLOSED_DRIVER                                                                              \
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 05\nGCC version: 12\n"

static void put_gpudirect(const char *driver, const char *release, const char *module)
{
    char path[PATH_MAX];
    put("/proc/driver/nvidia/version", driver);
    put("/proc/sys/kernel/osrelease", release);
    snprintf(path, sizeof path, "%s/sys/module/nvidia_peermem/version", root);
    if (module)
        put("/sys/module/nvidia_peermem/version", module);
    else
        unlink(path);
}

/* The host's half, from files alone and with memory to try. */
static void gpudirect_by_driver(const struct doctor_pci *gpus)
{
    struct doctor_report r;
    struct fake_device *good = fake_device_open("device"), *bad = fake_device_open("no-dmabuf");
    const struct doctor_gpu_memory exports = {.memory = fake_device_memory(good),
                                              .base = fake_device_alloc(good, 1 << 20),
                                              .bytes = 1 << 20};
    const struct doctor_gpu_memory refuses = {.memory = fake_device_memory(bad),
                                              .base = fake_device_alloc(bad, 1 << 20),
                                              .bytes = 1 << 20};
    const struct {
        const char *driver, *release, *module;
        const struct doctor_gpu_memory *m;
        enum doctor_level driver_level, export_level, module_level;
        const char *driver_found, *driver_fix, *export_found, *export_fix, *module_found,
            *module_fix;
    } cases[] = {
        {OPEN_DRIVER, "6.8.0-45-generic\n", NULL, &no_memory, DOCTOR_OK, DOCTOR_OK, DOCTOR_OK,
         "open kernel modules 570.86.15 on Linux 6.8.0-45", "", "not tried: CUDA is not available",
         "", "not loaded", ""},
        {CLOSED_DRIVER, "6.8.0\n", NULL, &no_memory, DOCTOR_WARN, DOCTOR_WARN, DOCTOR_WARN,
         "closed kernel modules 550.54.15", "nvidia-open", "not tried", "where CUDA works",
         "not loaded", "modprobe nvidia_peermem"},
        {CLOSED_DRIVER, "6.8.0\n", "550.54.15\n", &no_memory, DOCTOR_OK, DOCTOR_OK, DOCTOR_OK,
         "closed", "", "not tried", "", "loaded, version 550.54.15", ""},
        {CLOSED_DRIVER, "6.8.0\n", "535.1.2\n", &no_memory, DOCTOR_OK, DOCTOR_OK, DOCTOR_WARN,
         "closed", "", "not tried", "", "version 535.1.2", "another driver than 550.54.15"},
        {OPEN_DRIVER, "5.4.0-100\n", NULL, &no_memory, DOCTOR_WARN, DOCTOR_WARN, DOCTOR_WARN,
         "Linux 5.4.0-100", "Linux 5.12", "not tried", "", "not loaded", "modprobe"},
        {OPEN_DRIVER, "6.8.0\n", NULL, &exports, DOCTOR_OK, DOCTOR_OK, DOCTOR_OK, "open", "",
         "exported from", "", "not loaded", ""},
        {OPEN_DRIVER, "6.8.0\n", NULL, &refuses, DOCTOR_WARN, DOCTOR_WARN, DOCTOR_WARN, "open",
         "see the next lines", "the driver exports no dma-buf", "the driver's answer", "not loaded",
         "modprobe"},
        {OPEN_DRIVER, "6.8.0\n", "570.86.15\n", &refuses, DOCTOR_OK, DOCTOR_OK, DOCTOR_OK, "open",
         "", "the driver exports no dma-buf", "", "loaded", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        print_message("case %zu\n", i);
        put_gpudirect(cases[i].driver, cases[i].release, cases[i].module);
        r = report();
        doctor_gpudirect(&r, root, gpus, 1, 2, 0, cases[i].m);
        says(&r, "driver", cases[i].driver_level, cases[i].driver_found, cases[i].driver_fix);
        says(&r, "dma-buf", cases[i].export_level, cases[i].export_found, cases[i].export_fix);
        says(&r, "nvidia_peermem", cases[i].module_level, cases[i].module_found,
             cases[i].module_fix);
        report_end(&r);
    }
    put_gpudirect(OPEN_DRIVER, "6.8.0\n", NULL);
    r = report();
    /* a NIC did it all the same: no door is missing */
    doctor_gpudirect(&r, root, gpus, 1, 2, 1, &refuses);
    says(&r, "dma-buf", DOCTOR_OK, "the driver exports no dma-buf", NULL);
    assert_int_equal(doctor_status(&r), 0);
    report_end(&r);
    fake_device_close(good);
    fake_device_close(bad);
}

static void gpudirect_of_bar1(const struct doctor_pci *gpus)
{
#define GPU_RESOURCE                                                                               \
    "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0/resource"
    put(GPU_RESOURCE,
        "0x0000000099000000 0x0000000099ffffff 0x0000000000040200\n0x0000204000000000 "
        "0x0000205fffffffff 0x000000000014220c\n");
    struct doctor_report r = report();
    doctor_gpudirect(&r, root, gpus, 1, 2, 0, &no_memory);
    says(&r, "bar1 0000:3d:00.0", DOCTOR_OK, "128 GiB of the GPU's memory on the bus", NULL);
    report_end(&r);
    put(GPU_RESOURCE,
        "0x0000000099000000 0x0000000099ffffff 0x0000000000040200\n0x00000000a0000000 "
        "0x00000000afffffff 0x000000000014220c\n");
    r = report();
    doctor_gpudirect(&r, root, gpus, 1, 2, 0, &no_memory);
    says(&r, "bar1 0000:3d:00.0", DOCTOR_WARN, "256 MiB", "Resizable BAR");
    report_end(&r);
}

static void gpudirect_of_the_host(void **state)
{
    (void)state;
    struct doctor_pci gpus[2];
    struct doctor_report r = report();
    doctor_gpudirect(&r, root, gpus, 0, 0, 0, &no_memory);
    doctor_gpudirect(&r, root, gpus, 1, 0, 0, &no_memory);
    doctor_gpudirect(&r, root, gpus, 0, 1, 0, &no_memory);
    assert_int_equal(r.n, 3);
    static const char *const one_missing[] = {"neither an NVIDIA GPU nor an RDMA device",
                                              "no RDMA device: KV of GPUs goes by cuda-ipc",
                                              "no NVIDIA GPU"};
    for (size_t i = 0; i < 3; i++)
        if (r.checks[i].level != DOCTOR_OK || !strstr(r.checks[i].found, one_missing[i]))
            fail_msg("%zu: %s", i, r.checks[i].found);
    report_end(&r);

    put_two_sockets();
    r = report();
    assert_int_equal(doctor_gpus(&r, root, gpus, 2), 1);
    doctor_gpudirect(&r, root, gpus, 1, 2, 0, &no_memory);
    says(&r, "driver", DOCTOR_WARN, "no driver of the GPUs is loaded", "GPUs above");
    report_end(&r);

    gpudirect_by_driver(gpus);
    gpudirect_of_bar1(gpus);
}

/* Where CUDA is not, the reason is kept for the report. */
static void gpu_memory_says_why_not(void **state)
{
    (void)state;
    struct doctor_gpu_memory m;
    assert_int_equal(setenv("TANDEM_CUDA_LIBRARY", "/nowhere/libtandem_cuda.so", 1), 0);
    doctor_gpu_memory_open(&m);
    assert_null(m.base);
    assert_non_null(strstr(m.why, "/nowhere/libtandem_cuda.so"));
    doctor_gpu_memory_close(&m);
    unsetenv("TANDEM_CUDA_LIBRARY");
}

/* What is checked is what workers with the same options would use. */
static void rdma_as_asked(void **state)
{
    (void)state;
    put("/sys/class/net/ens1/mtu", "9000\n");
    told_good();
    rdma_options.rdma_gid_index = 1; /* by number: link-local, which the ranking would take last */
    struct doctor_report r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_OK,
         "index 1, fe80:0:0:0:0:0:0:1 (RoCE v2, link-local IPv6, ens1); 4 of 4 entries in use; "
         "--rdma-gid-index",
         NULL);
    report_end(&r);
    rdma_options.rdma_gid_index = 9;
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0 port 1 gid", DOCTOR_WARN, "GID index 9", "another --rdma-gid-index, or -1");
    says(&r, "kv path", DOCTOR_FAIL, "though there are RDMA devices", NULL);
    report_end(&r);

    told_good();
    rdma_options.rdma_devices = "mlx5_7,mlx5_0";
    r = rdma("auto", &table, 0, 1);
    says(&r, "mlx5_7", DOCTOR_FAIL, "there is no such device", "ls /sys/class/infiniband");
    says(&r, "mlx5_0 port 1", DOCTOR_OK, "active", NULL);
    report_end(&r);
    rdma_options.rdma_devices = "mlx5_00";
    r = rdma("auto", &table, 0, 0);
    says(&r, "mlx5_0", DOCTOR_OK, "left out: --rdma-devices does not name it", NULL);
    says(&r, "mlx5_00", DOCTOR_FAIL, "there is no such device", NULL);
    assert_int_equal(doctor_status(&r), 1);
    report_end(&r);

    told_good();
    rdma_options.rdma_port = 2;
    r = rdma("rdma", &table, 0, 0);
    says(&r, "kv path", DOCTOR_FAIL, "--transfer rdma", NULL);
    report_end(&r);
    told.limits.n_ports = 2;
    r = rdma("rdma", &table, 0, 1);
    says(&r, "mlx5_0 port 2", DOCTOR_OK, "active", NULL);
    report_end(&r);
}

static void rdma_none(void **state)
{
    (void)state;
    told_good();
    struct doctor_report r = rdma("auto", NULL, 0, 0);
    says(&r, "devices", DOCTOR_OK, "no RDMA device (not installed)", NULL);
    says(&r, "kv path", DOCTOR_OK, "KV will go by shm on this host and tcp between hosts", NULL);
    report_end(&r);
    r = rdma("rdma", NULL, 0, 0);
    says(&r, "devices", DOCTOR_FAIL, "no RDMA device (not installed)",
         "--transfer auto, tcp or shm");
    report_end(&r);
    told.n_devices = 0;
    r = rdma("auto", &table, 0, 0);
    says(&r, "devices", DOCTOR_OK, "libibverbs lists none", NULL);
    report_end(&r);
    /* a card without its driver */
    put_pci("pci0000:d7/0000:d7:00.0/0000:d8:00.0", "0x15b3\n", "0x020700\n", "1\n");
    r = rdma("auto", &table, 0, 0);
    says(&r, "devices", DOCTOR_WARN, "1 network card that can do RDMA (first: 0000:d8:00.0)",
         "modprobe");
    report_end(&r);
    /* a container without /dev/infiniband */
    put_link("/sys/class/infiniband/mlx5_0", "../../devices/none");
    r = rdma("rdma", &table, 0, 0);
    says(&r, "devices", DOCTOR_FAIL, "the kernel has 1 RDMA device, but verbs lists none",
         "/dev/infiniband");
    report_end(&r);
}

/* ---- clocks, paths, messages ----------------------------------------------------------------- */

static void skews(void **state)
{
    (void)state;
    /* in the middle of a trip of 2 ms */
    struct doctor_skew s = doctor_skew_of(1000000000, 1002000000, 1001000000);
    assert_true(s.skew_ms > -1e-9 && s.skew_ms < 1e-9 && s.error_ms > 0.999 && s.error_ms < 1.001);
    s = doctor_skew_of(1700000000000000000, 1700000000002000000, 1699999999001000000);
    assert_true(s.skew_ms > -1000.001 && s.skew_ms < -999.999);
    s = doctor_skew_of(1700000000000000000, 1700000000002000000, 1700003600001000000);
    assert_true(s.skew_ms > 3599999.9 && s.skew_ms < 3600000.1);
}

static void fallbacks_fail(void **state)
{
    (void)state;
    assert_null(doctor_path_verdict(TD_XFER_PATH_AUTO, TD_XFER_PATH_TCP));
    assert_null(doctor_path_verdict(TD_XFER_PATH_TCP, TD_XFER_PATH_TCP));
    assert_string_equal(doctor_path_verdict(TD_XFER_PATH_SHM, TD_XFER_PATH_TCP),
                        "shm was asked for, but the transfer went by tcp");
    assert_string_equal(doctor_path_verdict((enum td_xfer_path)3, TD_XFER_PATH_TCP),
                        "rdma was asked for, but the transfer went by tcp");
    assert_non_null(doctor_path_verdict(TD_XFER_PATH_TCP, TD_XFER_PATH_SHM));
}

static void messages(void **state)
{
    (void)state;
    struct doctor_msg good, m;
    struct td_err err;
    doctor_msg_init(&good, DOCTOR_MSG_GRANT, 0);
    good.n = 4;
    good.first = 60;
    assert_int_equal(doctor_msg_check(&good, 64, &err), TD_OK);
#define BAD(change, names)                                                                         \
    do {                                                                                           \
        m = good;                                                                                  \
        change;                                                                                    \
        err = (struct td_err){0};                                                                  \
        assert_int_not_equal(doctor_msg_check(&m, 64, &err), TD_OK);                               \
        if (!strstr(err.msg, names)) fail_msg("\"%s\" does not name %s", err.msg, names);          \
    } while (0)
    BAD(m.magic++, "magic");
    BAD(m.version++, "version");
    BAD(m.type = 0, "type");
    BAD(m.type = DOCTOR_MSG_N_TYPES, "type");
    BAD(m.answer = 2, "answer");
    BAD(m.status = 1, "status");
    BAD(m.blob_bytes = DOCTOR_BLOB_MAX + 1, "blob_bytes");
    BAD(memset(m.text, 'x', sizeof m.text), "text");
    BAD(m.n = 0, "blocks");
    BAD(m.n = 5, "blocks");
    BAD(m.n = 65, "blocks");
    BAD(m.first = UINT32_MAX, "blocks");
    BAD((m.type = DOCTOR_MSG_VERIFY, m.slot = DOCTOR_SLOTS), "slot");
    assert_int_not_equal(doctor_msg_check(&good, 0, &err), TD_OK); /* no pool yet */
    doctor_msg_init(&good, DOCTOR_MSG_OPEN, 0);
    good.block_bytes = 4096;
    good.n_blocks = 64;
    assert_int_equal(doctor_msg_check(&good, 0, &err), TD_OK);
    BAD(m.block_bytes = 0, "block_bytes");
    BAD(m.block_bytes = 4095, "block_bytes");
    BAD(m.block_bytes = 5000, "block_bytes");
    BAD(m.block_bytes = 2 << 20, "block_bytes");
    BAD(m.block_bytes = UINT64_MAX, "block_bytes");
    BAD(m.n_blocks = 0, "n_blocks");
    BAD((m.block_bytes = 1 << 20, m.n_blocks = 1025), "n_blocks");
    BAD(m.n_blocks = UINT32_MAX, "n_blocks");
}

static void talk_is_bounded(void **state)
{
    (void)state;
    int fds[2];
    struct doctor_msg m, got;
    struct td_err err;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    doctor_msg_init(&m, DOCTOR_MSG_BYE, 0);
    uint64_t t0 = td_now_ns();
    assert_int_equal(doctor_msg_recv(fds[0], &got, td_deadline_after_ms(t0, 50), &err),
                     TD_ERR_DEADLINE);
    assert_int_equal(send(fds[1], &m, 100, 0), 100); /* part of one, then nothing */
    assert_int_equal(doctor_msg_recv(fds[0], &got, td_deadline_after_ms(td_now_ns(), 50), &err),
                     TD_ERR_DEADLINE);
    assert_true(td_now_ns() - t0 >= 100 * TD_NS_PER_MS);
    td_status s = TD_OK;
    /* nobody reads */
    for (int i = 0; i < 100000 && !s; i++)
        s = doctor_msg_send(fds[1], &m, td_deadline_after_ms(td_now_ns(), 50), &err);
    assert_int_equal(s, TD_ERR_DEADLINE);
    close(fds[0]);
    assert_int_equal(doctor_msg_send(fds[1], &m, td_deadline_after_ms(td_now_ns(), 1000), &err),
                     TD_ERR_PEER);
    close(fds[1]);
    int fd;
    assert_int_equal(
        doctor_socket("nonsense", 0, td_deadline_after_ms(td_now_ns(), 100), &fd, &err),
        TD_ERR_INVALID);
    assert_int_equal(
        doctor_socket("127.0.0.1:", 1, td_deadline_after_ms(td_now_ns(), 100), &fd, &err),
        TD_ERR_INVALID);
    assert_int_equal(
        doctor_socket("127.0.0.1:1", 0, td_deadline_after_ms(td_now_ns(), 2000), &fd, &err),
        TD_ERR_PEER);
    assert_non_null(strstr(err.msg, "127.0.0.1:1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distances),
        cmocka_unit_test(acs),
        cmocka_unit_test_setup_teardown(topology, make_root, drop_root),
        cmocka_unit_test_setup_teardown(gpu_without_driver, make_root, drop_root),
        cmocka_unit_test_setup_teardown(host, make_root, drop_root),
        cmocka_unit_test(report_is_plain),
        cmocka_unit_test_setup_teardown(rdma_good, make_root, drop_root),
        cmocka_unit_test_setup_teardown(rdma_bad, make_root, drop_root),
        cmocka_unit_test_setup_teardown(gpudirect_is_tried, make_root, drop_root),
        cmocka_unit_test_setup_teardown(gpudirect_of_the_host, make_root, drop_root),
        cmocka_unit_test(gpu_memory_says_why_not),
        cmocka_unit_test_setup_teardown(rdma_as_asked, make_root, drop_root),
        cmocka_unit_test_setup_teardown(rdma_none, make_root, drop_root),
        cmocka_unit_test(skews),
        cmocka_unit_test(fallbacks_fail),
        cmocka_unit_test(messages),
        cmocka_unit_test(talk_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
