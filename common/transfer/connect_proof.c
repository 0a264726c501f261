/* connect_proof.c - the cluster secret in the hello of a KV connection: both sides prove that they
 * know it before anything else is said.
 *
 *   initiator                                    acceptor
 *     HELLO(hello, nonce) ------------------->     keeps it; answers nothing that is in it
 *                          <------------------  CHALLENGE(nonce)
 *     PROOF(MAC "initiator") ---------------->     checks; only now looks at what HELLO wanted
 *     checks               <------------------  HELLO_ACK(hello, MAC "acceptor"), or a refusal
 *
 * A stranger who dials learns 32 random bytes and nothing else. A MAC covers the side's role, both
 * nonces, the whole HELLO, its path, lane and the connection that a lane joins, and the address
 * that was dialled, as the grant told it; the acceptor's covers its own hello, too. A recorded
 * proof is of other nonces; one sent back to its maker has the wrong role; one that is passed on to
 * another worker names another address. The frames that follow are not authenticated one by one:
 * who changes packets on the way is TLS's business. */
#include <string.h>

#include "common/transfer/endpoint.h"

_Static_assert(TD_XFER_SECRET_BYTES == TD_CLUSTER_NONCE_BYTES &&
                   TD_XFER_SECRET_BYTES == TD_CLUSTER_MAC_BYTES,
               "wire: cluster secret");

enum { INITIATOR = 0, ACCEPTOR = 1, N_FIELDS_MAX = 7 };
static const char *const LABELS[] = {"tandem kv 1 initiator", "tandem kv 1 acceptor"};

void xfer_proof_begin(struct td_xfer_conn *c)
{
    td_cluster_nonce(c->proof.nonce[c->initiator ? INITIATOR : ACCEPTOR]);
}

/* What the MAC of `side` covers. numbers: 5 u32, little-endian as everything on the wire. */
static size_t gather(const struct td_xfer *x, const struct td_xfer_conn *c, int side,
                     uint32_t numbers[5], struct td_secret_field fields[N_FIELDS_MAX])
{
    const struct xfer_proof *p = &c->proof;
    const char *host = c->initiator ? c->peer.host : x->self.host;
    size_t n = 0;
    numbers[0] = p->frame.slot;
    numbers[1] = p->frame.op;
    numbers[2] = (uint32_t)p->frame.conn;
    numbers[3] = (uint32_t)(p->frame.conn >> 32);
    numbers[4] = c->initiator ? c->peer.port : x->self.port;
    fields[n++] = (struct td_secret_field){p->nonce[INITIATOR], sizeof p->nonce[INITIATOR]};
    fields[n++] = (struct td_secret_field){p->nonce[ACCEPTOR], sizeof p->nonce[ACCEPTOR]};
    fields[n++] = (struct td_secret_field){&p->hello[INITIATOR], sizeof p->hello[INITIATOR]};
    fields[n++] = (struct td_secret_field){numbers, 5 * sizeof numbers[0]};
    fields[n++] = (struct td_secret_field){host, strlen(host)};
    if (side == ACCEPTOR)
        fields[n++] = (struct td_secret_field){&p->hello[ACCEPTOR], sizeof p->hello[ACCEPTOR]};
    return n;
}

td_status xfer_proof_make(const struct td_xfer *x, const struct td_xfer_conn *c,
                          uint8_t ret_mac[TD_XFER_SECRET_BYTES])
{
    struct td_secret_field fields[N_FIELDS_MAX];
    uint32_t numbers[5];
    int side = c->initiator ? INITIATOR : ACCEPTOR;
    size_t n = gather(x, c, side, numbers, fields);
    return td_cluster_secret_prove(x->secret, LABELS[side], fields, n, ret_mac);
}

bool xfer_proof_check(const struct td_xfer *x, const struct td_xfer_conn *c,
                      const uint8_t mac[TD_XFER_SECRET_BYTES])
{
    struct td_secret_field fields[N_FIELDS_MAX];
    uint32_t numbers[5];
    int side = c->initiator ? ACCEPTOR : INITIATOR;
    size_t n = gather(x, c, side, numbers, fields);
    return td_cluster_secret_verify(x->secret, LABELS[side], fields, n, mac);
}
