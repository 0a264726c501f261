/* nodes.h - ranks of one model on several hosts (options nnodes, node_rank, master_addr): how they
 * find one another, and who is let in.
 *
 * Why here: ranks of one host are rank 0's children and share its memory. Ranks of several hosts
 * are started by an operator or by Kubernetes (LeaderWorkerSet), in any order, and come through a
 * network. Rank 0 listens until all are there, the others dial it again and again. What they become
 * is a communicator of channels (common/model/comm.h); which model they hold is the engine's to
 * agree on.
 *
 *     rank r                                       rank 0
 *       [TLS handshake, if certificates are given: mutual, names as of a KV peer]
 *       HELLO(rank, ranks, role, nonce) -------->    keeps it; answers nothing that is in it
 *                            <--------------------  CHALLENGE(nonce)
 *       PROOF(MAC "follower") ------------------>    checks; only now looks at what HELLO wants
 *       checks               <--------------------  WELCOME(refusal or none, MAC "leader")
 *       READY ---------------------------------->    one byte: it is a rank now
 *
 * A MAC is of the cluster secret, over both nonces, the HELLO and the text of master_addr, which is
 * the same on all ranks of a group, so a proof relayed to another group's rank 0 fails: its address
 * differs. The leader's MAC covers its answer, too. Without a secret (loopback, or TLS) MACs are
 * zeros, and a side that has a secret refuses zeros. As on the KV port, the frames that follow are
 * not authenticated one by one: against somebody who changes packets on the way, use TLS.
 *
 * Strangers: at most 32 are looked at at once, each for 5 s; a refusal is logged once a second. */
#ifndef TD_WORKER_NODES_H
#define TD_WORKER_NODES_H

#include <stdint.h>

#include "common/base/cluster_secret.h"
#include "common/base/status.h"
#include "common/model/comm.h"
#include "common/transfer/tls.h"

struct td_nodes_config {
    int32_t n_nodes, node;
    const char *role;                 /* "prefill", "decode": a rank of the other is refused */
    const char *listen;               /* "host:port": node 0 listens on this host ... */
    const char *master_addr;          /* ... and this one's port; the others dial it */
    struct td_cluster_secret *secret; /* NULL: none */
    struct td_xfer_tls *tls;          /* NULL: in the clear */
    uint32_t join_ms;                 /* all must have come by then; 0 = 10 minutes */
};

/* Node 0: until all other ranks have joined. Blocks; a signal's default action ends it. Errors:
 * TD_ERR_INVALID (address), TD_ERR_IO (cannot listen), TD_ERR_DEADLINE, TD_ERR_NOMEM. */
td_status td_nodes_lead(const struct td_nodes_config *config, struct td_comm **ret_comm,
                        struct td_err *err);
/* Another node: until node 0 has let it in, or refused it for good. Errors: as above, and
 * TD_ERR_PEER: refused, with node 0's reason; node 0 has not proved the secret. */
td_status td_nodes_join(const struct td_nodes_config *config, struct td_comm **ret_comm,
                        struct td_err *err);

#endif
