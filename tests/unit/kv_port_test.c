/* kv_port_test.c - options of the KV port become what they say, and those that contradict one
 * another are refused by name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/worker/kv_port.h"

struct options {
    struct td_kv_port_config kv_port;
};
static const struct td_option rows[] = {TD_KV_PORT_OPTIONS(struct options, kv_port), {0}};

static struct td_kv_port_config options(int argc, char **argv)
{
    static struct options o;
    struct td_err err = {0};
    if (td_options_load(rows, &o, "test", "", argc, argv, NULL, 0, NULL, &err))
        fail_msg("%s", err.msg);
    return o.kv_port;
}
#define OPTIONS(...)                                                                               \
    options((int)(sizeof(char *[]){"test", __VA_ARGS__} / sizeof(char *)),                         \
            (char *[]){"test", __VA_ARGS__})

static void every_option_arrives(void **state)
{
    (void)state;
    struct td_verbs vb = {0};
    struct td_kv_port port;
    struct td_xfer_config c = {.instance = "stays", .max_slots = 7};
    struct td_peer_names *names;
    /* is passed on, not looked at */
    struct td_cluster_secret *secret = (struct td_cluster_secret *)&c;
    assert_int_equal(td_peer_names_parse("names", "*.kv.tandem", &names, NULL), TD_OK);
    const struct td_kv_port_files files = {"cert", "key", "ca", names, secret};
    struct td_kv_port_config o =
        OPTIONS("--transfer-port=1234", "--rdma-devices=b,a", "--rdma-port=2", "--rdma-gid-index=5",
                "--rdma-traffic-class=98", "--rdma-pull", "--test-rdma-windows",
                "--kv-tls-peer-name=*.kv.tandem");
    assert_int_equal(td_kv_port_fill(&o, "rdma", &files, &vb, &port, &c, NULL), TD_OK);
    assert_string_equal(c.instance, "stays");
    assert_int_equal(c.max_slots, 7);
    assert_int_equal(c.path, TD_XFER_PATH_RDMA);
    assert_int_equal(c.listen_port, 1234);
    assert_ptr_equal(c.rdma, &port.rdma);
    assert_ptr_equal(c.rdma->verbs, &vb);
    assert_string_equal(c.rdma->devices, "b,a");
    assert_int_equal(c.rdma->port, 2);
    assert_int_equal(c.rdma->gid_index, 5);
    assert_int_equal(c.rdma->traffic_class, 98);
    assert_true(c.rdma->pull && c.rdma->windows);
    assert_ptr_equal(c.tls, &port.tls);
    assert_string_equal(c.tls->cert_file, "cert");
    assert_string_equal(c.tls->key_file, "key");
    assert_string_equal(c.tls->ca_file, "ca");
    assert_string_equal(c.tls->peer_name, "*.kv.tandem");
    assert_ptr_equal(c.tls->peer_names, names);
    assert_ptr_equal(c.secret, secret);
    o = OPTIONS("--rdma-traffic-class=-1");
    assert_int_equal(td_kv_port_fill(&o, "auto", &files, NULL, &port, &c, NULL), TD_OK);
    assert_null(c.rdma);
    assert_int_equal(port.rdma.gid_index, -1);
    assert_int_equal(port.rdma.qps_per_rail, 0); /* by the speed of the port */
    assert_int_equal(port.rdma.traffic_class, -1);
    assert_int_equal(c.tcp_zerocopy, TD_XFER_ZEROCOPY_AUTO);
    td_peer_names_destroy(names);
    assert_false(port.rdma.pull || port.rdma.windows ||
                 port.rdma.gpu_flush != TD_XFER_GPU_FLUSH_AUTO);
}

static void who_speaks_tls(void **state)
{
    (void)state;
    static const struct {
        const char *kv_tls, *transfer, *cert, *ca, *peer_name;
        int tls; /* 1, 0; -1 = refused */
        const char *says;
    } cases[] = {
        {"auto", "auto", "c", "a", "", 1, ""},
        {"auto", "tcp", "c", "", "", 0, ""},
        {"auto", "tcp", "", "a", "", 0, ""},
        {"off", "tcp", "c", "a", "", 0, ""},
        {"auto", "rdma", "c", "a", "", 1, ""},
        {"auto", "shm", "c", "a", "", 0, ""},
        {"auto", "shm", "c", "a", "n", 0, ""},
        {"auto", "shm-staged", "c", "a", "", 0, ""}, /* a socket of this host, too */
        {"auto", "tcp", "c", "a", "n", 1, ""},
        {"off", "tcp", "c", "a", "n", -1, "kv_tls is off"},
        {"auto", "tcp", "c", "", "n", -1, "it needs tls_cert, tls_key and tls_ca"},
        {"auto", "shm", "", "", "n", -1, "kv_tls_peer_name is \"n\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_kv_port port;
        struct td_xfer_config c = {0};
        struct td_err err = {0};
        const struct td_kv_port_files files = {
            .tls_cert = cases[i].cert, .tls_key = "key", .tls_ca = cases[i].ca};
        struct td_kv_port_config o =
            OPTIONS("--test-kv-tls", (char *)(uintptr_t)cases[i].kv_tls, "--kv-tls-peer-name",
                    (char *)(uintptr_t)cases[i].peer_name);
        td_status s = td_kv_port_fill(&o, cases[i].transfer, &files, NULL, &port, &c, &err);
        if (s != (cases[i].tls < 0 ? TD_ERR_INVALID : TD_OK) || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu: %d \"%s\"", i, s, err.msg);
        if (s) continue;
        assert_int_equal(port.use_tls, cases[i].tls);
        assert_ptr_equal(c.tls, cases[i].tls ? &port.tls : NULL);
    }
}

static void paths_by_name(void **state)
{
    (void)state;
    assert_int_equal(td_kv_port_path("auto"), TD_XFER_PATH_AUTO);
    assert_int_equal(td_kv_port_path("tcp"), TD_XFER_PATH_TCP);
    assert_int_equal(td_kv_port_path("shm"), TD_XFER_PATH_SHM);
    assert_int_equal(td_kv_port_path("rdma"), TD_XFER_PATH_RDMA);
}

/* By the backends' own tables. */
static void who_has_use_for_verbs(void **state)
{
    (void)state;
    static const struct {
        const char *transfer;
        bool uses, needs;
    } cases[] = {{"auto", true, false}, {"rdma", true, true},         {"tcp", false, false},
                 {"shm", false, false}, {"shm-staged", false, false}, {"cuda-ipc", false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum td_xfer_path path = td_kv_port_path(cases[i].transfer);
        if (td_xfer_path_uses_verbs(path) != cases[i].uses ||
            td_xfer_path_needs_verbs(path) != cases[i].needs)
            fail_msg("%s: uses %d, needs %d", cases[i].transfer, td_xfer_path_uses_verbs(path),
                     td_xfer_path_needs_verbs(path));
    }
}

static void the_named_library_is_used(void **state)
{
    (void)state;
    const struct td_verbs *vb = NULL;
    struct td_err err = {0};
    setenv("TANDEM_VERBS_FAKE", "colour=1", 1);
    assert_int_equal(td_kv_port_verbs(&vb, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "colour"));
    assert_null(vb);
    setenv("TANDEM_VERBS_FAKE", "devices=2", 1);
    assert_int_equal(td_kv_port_verbs(&vb, &err), TD_OK);
    char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n = 0;
    assert_int_equal(vb->list(vb, names, &n), 0);
    assert_int_equal(n, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_arrives), cmocka_unit_test(who_speaks_tls),
        cmocka_unit_test(paths_by_name), cmocka_unit_test(who_has_use_for_verbs),
        cmocka_unit_test(the_named_library_is_used)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
