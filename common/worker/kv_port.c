/* kv_port.c - see kv_port.h. */
#include "common/worker/kv_port.h"

#include <errno.h>
#include <string.h>

enum td_xfer_path td_kv_port_path(const char *transfer)
{
    for (int p = TD_XFER_PATH_AUTO; p < TD_XFER_N_PATHS; p++)
        if (!strcmp(transfer, td_xfer_path_name((enum td_xfer_path)p))) return (enum td_xfer_path)p;
    return TD_XFER_PATH_AUTO;
}

td_status td_kv_port_verbs(const struct td_verbs **ret_verbs, struct td_err *err)
{
    char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n = 0;
    const struct td_verbs *vb = NULL;
    td_status s = td_verbs_load(&vb, err);
    if (s) return s;
    int e = vb->list(vb, names, &n);
    if (e || !n)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s",
                       e == ENOSYS ? "this kernel has no RDMA subsystem loaded"
                       : e         ? strerror(e)
                                   : "libibverbs lists no device");
    *ret_verbs = vb;
    return TD_OK;
}

/* A certificate of tls_ca makes a peer, in both directions: blocks go to nobody whom the CA does
 * not know. Where the CA also signs others (clients of the
 * router), kv_tls_peer_name tells them from workers. */
static td_status choose_tls(const struct td_kv_port_config *o, enum td_xfer_path path,
                            const struct td_kv_port_files *f, struct td_kv_port *port,
                            struct td_err *err)
{
    bool has_files = f->tls_cert[0] && f->tls_ca[0];
    bool wanted = has_files && strcmp(o->kv_tls, "off");
    if (o->kv_tls_peer_name[0] && !wanted) /* an operator who named the peers must not be left
                                              with a port that asks nobody */
        return td_fail(err, TD_ERR_INVALID,
                       "kv_tls_peer_name is \"%s\", and the KV port would be without TLS: %s",
                       o->kv_tls_peer_name,
                       has_files ? "kv_tls is off" : "it needs tls_cert, tls_key and tls_ca");
    /* their sockets never leave the host, and the kernel says whose they are */
    port->use_tls = wanted && !td_xfer_path_is_local(path);
    port->tls = (struct td_xfer_tls_config){.cert_file = f->tls_cert,
                                            .key_file = f->tls_key,
                                            .ca_file = f->tls_ca,
                                            .peer_name = o->kv_tls_peer_name,
                                            .peer_names = f->worker_names};
    return TD_OK;
}

td_status td_kv_port_fill(const struct td_kv_port_config *o, const char *transfer,
                          const struct td_kv_port_files *files, const struct td_verbs *verbs,
                          struct td_kv_port *ret_port, struct td_xfer_config *ret_config,
                          struct td_err *err)
{
    struct td_kv_port port = {
        .rdma = {.verbs = verbs,
                 .devices = o->rdma_devices,
                 .gid_index = (int32_t)o->rdma_gid_index,
                 .port = (uint8_t)o->rdma_port,
                 .traffic_class = (int16_t)o->rdma_traffic_class,
                 .pull = o->rdma_pull,
                 .windows = o->rdma_windows}};
    enum td_xfer_path path = td_kv_port_path(transfer);
    td_status s = choose_tls(o, path, files, &port, err);
    if (s) return s;
    *ret_port = port;
    ret_config->path = path;
    ret_config->listen_port = (uint16_t)o->transfer_port;
    ret_config->rdma = verbs ? &ret_port->rdma : NULL;
    ret_config->tls = port.use_tls ? &ret_port->tls : NULL;
    ret_config->secret = files->secret;
    return TD_OK;
}
