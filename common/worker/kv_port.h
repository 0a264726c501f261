/* kv_port.h - how a KV port is set up: its sockets, who may come, RDMA. The options and what they
 * mean in terms of common/transfer.
 *
 * Why here: workers and `tandem doctor` take the same options, so that what doctor measures is
 * what workers will do. */
#ifndef TD_WORKER_KV_PORT_H
#define TD_WORKER_KV_PORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/options.h"
#include "common/base/status.h"
#include "common/transfer/rdma/verbs.h"
#include "common/transfer/transfer.h"
#include "common/transfer/tls.h"

struct td_kv_port_config {
    const char *rdma_devices, *kv_tls_peer_name;
    int64_t transfer_port, rdma_port, rdma_gid_index, rdma_traffic_class;
    bool rdma_pull;
    bool rdma_windows;  /* tests alone */
    const char *kv_tls; /* "auto": by the certificates; "off": tests alone */
};

/* The rows; M: the struct td_kv_port_config inside of S. */
// clang-format off
#define TD_KV_PORT_OPTIONS(S, M)                                                                   \
    {"transfer_port", TD_OPT_I64, "0", 0, 65535, NULL, offsetof(S, M.transfer_port),               \
     "KV data port; 0 = any"},                                                                     \
    {"rdma_devices", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.rdma_devices),                      \
     "RDMA devices in order, e.g. mlx5_0,mlx5_1; rail i talks to rail i; default all"},            \
    {"rdma_port", TD_OPT_I64, "1", 1, 255, NULL, offsetof(S, M.rdma_port),                         \
     "port of every RDMA device"},                                                                 \
    {"rdma_gid_index", TD_OPT_I64, "-1", -1, 1023, NULL, offsetof(S, M.rdma_gid_index),            \
     "GID table entry; -1 = the best by rank (RoCE v2, IPv4)"},                                    \
    {"rdma_traffic_class", TD_OPT_I64, "0", -1, 255, NULL, offsetof(S, M.rdma_traffic_class),      \
     "0 = the port's, else 106 on RoCE v2; -1 = none"},                                            \
    {"rdma_pull", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(S, M.rdma_pull),                      \
     "prefill: decode READs prefix hits itself (its peers may then read the pool)"},               \
    {"kv_tls_peer_name", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.kv_tls_peer_name),              \
     "name (or *.suffix, or address) that a KV peer's certificate must hold; empty = any "         \
     "certificate of tls_ca"},                                                                     \
    {"test_rdma_windows", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(S, M.rdma_windows),           \
     "peers write through memory windows, each grant's own, that end with it"},                    \
    {"test_kv_tls", TD_OPT_ENUM, "auto", 0, 0, "auto|off", offsetof(S, M.kv_tls),                  \
     "off: a KV port in the clear in spite of certificates"},                                      \
    TD_OPTION_DECIDED("transfer_lanes", "a KV peer on tcp has 4 sockets"),                         \
    TD_OPTION_DECIDED("transfer_zerocopy", "tcp to other hosts does not copy where the kernel "    \
                                           "can do without"),                                      \
    TD_OPTION_DECIDED("rdma_qps_per_rail", "2 queue pairs for each device and peer, 4 where the "  \
                                           "port has 800 Gb/s or more"),                           \
    TD_OPTION_DECIDED("rdma_timeout", "the local ACK time-out is 2^16 x 4.096 us, with 7 retries"),\
    TD_OPTION_DECIDED("rdma_service_level", "always 0; --rdma-traffic-class chooses the class on " \
                                            "RoCE"),                                               \
    TD_OPTION_DECIDED("rdma_srq_peers", "receive queues are shared from 64 peers on"),             \
    TD_OPTION_DECIDED("rdma_windows", "peers write by the pool's own key, never through memory "   \
                                      "windows"),                                                  \
    TD_OPTION_DECIDED("rdma_gpu_flush", "the GPU's driver says whether writes of a NIC need a "    \
                                        "READ behind them"),                                       \
    TD_OPTION_DECIDED("kv_tls", "the KV port speaks mutual TLS if tls_cert, tls_key and tls_ca "   \
                                "are given; with --kv-tls-peer-name the worker refuses to start "  \
                                "without them")
// clang-format on

struct td_kv_port_files { /* "" = none; NULL = none */
    const char *tls_cert, *tls_key, *tls_ca;
    const struct td_peer_names *worker_names; /* with TLS: what a peer's certificate must hold.
                                                 Borrowed until td_xfer_close, as secret */
    struct td_cluster_secret *secret;
};

/* What a td_xfer_config borrows until td_xfer_open returns. */
struct td_kv_port {
    struct td_xfer_rdma_config rdma;
    struct td_xfer_tls_config tls;
    bool use_tls; /* what other workers must be told */
};

/* "auto", "tcp", "shm", "rdma", "cuda-ipc", as the option's table has made sure. */
enum td_xfer_path td_kv_port_path(const char *transfer);

/* The provider of RDMA: the one in memory when its variable is set (tests), else libibverbs.
 * Errors, all with the reason why there is none: TD_ERR_UNSUPPORTED (no library, no device),
 * TD_ERR_INVALID (the variable). ret_verbs lives as long as the process. */
td_status td_kv_port_verbs(const struct td_verbs **ret_verbs, struct td_err *err);

/* Fills path, port, rdma, tls and secret of *ret_config; the rest stays as it
 * is. verbs NULL: no RDMA. Reads no file. TD_ERR_INVALID: options that contradict one another,
 * by name. */
td_status td_kv_port_fill(const struct td_kv_port_config *o, const char *transfer,
                          const struct td_kv_port_files *files, const struct td_verbs *verbs,
                          struct td_kv_port *ret_port, struct td_xfer_config *ret_config,
                          struct td_err *err);

#endif
