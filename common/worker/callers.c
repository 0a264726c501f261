/* callers.c - who may call a worker: the router, by its certificate's name or by a proof of the
 * cluster secret.
 *
 * All on the rpc loop thread. */
#include "common/worker/worker_parts.h"

#include "common/base/log.h"
#include "common/rpc/rpc_status.h"

static void refuse_stranger(struct td_worker *w, struct td_rpc_call *call, enum td_code code,
                            const char *why)
{
    uint32_t n_dropped;
    td_rpc_call_finish(call, code, why, NULL, 0);
    if (td_log_pace_due(&w->trust.pace, &n_dropped))
        td_warn("call_refused", "peer=%s method=%s code=%d dropped=%u reason=\"%s\"",
                td_rpc_call_peer(call), td_rpc_call_path(call), (int)code, n_dropped, why);
}

static struct td_worker_router *router_of_proof(struct td_worker *w,
                                                const struct td_call_proof *proof)
{
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        struct td_worker_router *r = &w->routers[i];
        if (r->has_nonces && td_call_proof_is_of(proof, &r->nonces)) return r;
    }
    return NULL;
}

struct td_worker_router *td_worker_router_of(struct td_worker *w, struct td_rpc_call *call)
{
    struct td_call_proof proof;
    const char *text = td_rpc_call_metadata(call, TD_CALL_PROOF_KEY);
    if (!w->trust.id.secret || !text || td_call_proof_parse(text, &proof)) return NULL;
    return router_of_proof(w, &proof);
}

int td_worker_router_at(const struct td_worker *w, uint64_t session)
{
    int only = -1, n = 0;
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        uint64_t own = atomic_load(&w->routers[i].session);
        if (!own) continue;
        if (own == session) return i;
        only = i;
        n++;
    }
    return session == 0 && n == 1 ? only : -1;
}

static bool has_joined(const struct td_worker *w)
{
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
        if (w->routers[i].has_nonces) return true;
    return false;
}

void td_worker_on_open(struct td_rpc_call *call, void *ctx)
{
    struct td_worker *w = ctx;
    struct td_call_proof proof;
    struct td_worker_router *router;
    const char *text, *why;
    if (w->trust.id.routers && !td_rpc_call_peer_verified(call)) {
        refuse_stranger(
            w, call, TD_CODE_UNAUTHENTICATED,
            "this worker takes calls of the router only: the caller shows no certificate");
    } else if (w->trust.id.routers && !td_identity_peer_is(call, w->trust.id.routers)) {
        refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED,
                        "this worker takes calls of the router only: no name in the caller's "
                        "certificate is one of tls_router_names");
    } else if (!w->trust.id.secret) {
        return;
    } else if (!(text = td_rpc_call_metadata(call, TD_CALL_PROOF_KEY))) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "this worker wants a proof of the cluster secret with each call: only the "
                        "router that it has joined can make one");
    } else if (!has_joined(w)) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "this worker has joined no router since it started");
    } else if (td_call_proof_parse(text, &proof)) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "metadata " TD_CALL_PROOF_KEY " is not a proof of this version");
    } else if (!(router = router_of_proof(w, &proof))) {
        refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED,
                        "the proof is of another registration of this worker, or another router");
    } else if (!td_call_proof_check(w->trust.id.secret, &router->nonces, &router->replay,
                                    td_rpc_call_path(call), &proof, &why)) {
        refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED, why);
    }
}

/* What was proved is for these numbers. */
bool td_worker_is_proved(struct td_worker *w, struct td_rpc_call *call, uint64_t request,
                         uint32_t attempt)
{
    struct td_call_proof proof;
    const char *text = td_rpc_call_metadata(call, TD_CALL_PROOF_KEY);
    if (!w->trust.id.secret || (text && !td_call_proof_parse(text, &proof) &&
                                proof.request == request && proof.attempt == attempt))
        return true;
    refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED,
                    "the proof is for another request or attempt than the call");
    return false;
}

void td_worker_on_prove(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct td_worker *w = ctx;
    const ProtobufCBinaryData key = {sizeof w->trust.instance_key, w->trust.instance_key};
    static const struct td_join_nonces none;
    const struct td_worker_router *router = td_worker_router_of(w, call);
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    td_status s = td_instance_prove(w->trust.id.secret, router ? &router->nonces : &none, &key,
                                    &((const Tandem__V1__ProveRequest *)msg)->nonce, mac);
    if (s) {
        td_rpc_call_finish(call, td_rpc_code(s),
                           "nonce must have 32 bytes, and this program must have libcrypto", NULL,
                           0);
        return;
    }
    Tandem__V1__ProveResponse out = TANDEM__V1__PROVE_RESPONSE__INIT;
    out.mac = (ProtobufCBinaryData){sizeof mac, mac};
    td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}
