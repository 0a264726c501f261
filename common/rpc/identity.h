/* identity.h - router and worker prove to each other what they are, by certificate names and by the
 * cluster secret.
 *
 * Why here: otherwise anybody who reaches a port that serves Registry or Worker could act as a
 * worker or as the router. Members are recognized in one of two ways, or both:
 *   names   with mutual TLS: a worker's certificate must hold a name of --tls-worker-names, a
 *           router's one of --tls-router-names (common/base/peer_names.h). Each side checks the
 *           certificate of the peer that it dials and of the peer that dials it.
 *   secret  --cluster-secret-file (common/base/cluster_secret.h): the proofs below, never the
 *           secret itself.
 *
 * Proofs with the secret:
 *
 *   Join    worker -> router   Hello      with the worker's nonce, 32 random bytes
 *           router -> worker   Challenge  with the router's nonce
 *           worker -> router   Proof      HMAC(secret; "tandem join v1 worker", both nonces, role,
 *                                         name, address, incarnation)
 *           router -> address  Prove      dials the address in the Hello and checks that it is the
 *                                         same process (below)
 *           router -> worker   Welcome    HMAC(secret; "tandem join v1 router", both nonces,
 *                                         router's incarnation, prefix seed)
 *   calls   Each call of the router to Worker carries the metadata "tandem-proof": the first
 *           8 bytes of the router's nonce, request, attempt, counter, and HMAC(secret; "tandem
 *           call v1", both nonces, path, request, attempt, counter). The nonces bind the proof to
 *           this Join, the counter makes it valid once, and path and numbers make it valid for
 *           that call only. A stream of calls (Multiplex) has one, with request and attempt 0. The
 *           proof does not cover the body of the call: against somebody who changes packets on the
 *           way, use TLS.
 *   Prove   HMAC(secret; "tandem instance v1", both nonces, the request's nonce). Without a secret
 *           the key is Hello.instance_key, which is random in each process and sent to its router
 *           only.
 *
 * Threads: the rpc loop's, except td_identity_open and td_identity_close (boot and end). */
#ifndef TD_RPC_IDENTITY_H
#define TD_RPC_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/cluster_secret.h"
#include "common/base/options.h"
#include "common/base/peer_names.h"
#include "common/rpc/rpc.h"
#include "tandem/v1/worker.pb-c.h"

struct td_identity_config {
    const char *cluster_secret_file, *tls_worker_names, *tls_router_names;
};

// clang-format off
#define TD_IDENTITY_OPTIONS(S, M)                                                              \
    {"cluster_secret_file", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.cluster_secret_file),    \
     "file of the secret that router and workers prove to each other (32 characters or more, " \
     "mode 0600); the same on all; empty = none"},                                             \
    {"tls_worker_names", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_worker_names),          \
     "names that make a certificate a worker's: DNS names (*.workers.example for one label), " \
     "addresses, URI:spiffe://...; empty = not told"},                                         \
    {"tls_router_names", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_router_names),              \
     "names that make a certificate a router's, in the same form"}
// clang-format on

struct td_identity {
    struct td_cluster_secret *secret;        /* NULL = none */
    struct td_peer_names *workers, *routers; /* NULL = not configured */
    const char *secret_file;
    uint64_t look_ns;
};

/* Reads the secret and parses the names. has_ca: TLS with a CA is configured; without it no name
 * can be verified. On failure *id is closed. */
td_status td_identity_open(const struct td_identity_config *config, bool has_ca,
                           struct td_identity *ret_id, struct td_err *err);
void td_identity_close(struct td_identity *id); /* a zeroed *id is allowed */
/* Reloads a secret file that has changed, and logs that. Looks at the file at most once a
 * second. */
void td_identity_look_at_file(struct td_identity *id, uint64_t now_ns);

/* The rule for every port that serves members of the cluster: beyond loopback it needs an identity.
 * `option` and `names_option` are named in the message; has_names: callers are checked by
 * certificate names. TD_ERR_INVALID. */
td_status td_identity_check_port(const struct td_identity *id, const char *option,
                                 const char *address, const char *serves, const char *names_option,
                                 bool has_names, struct td_err *err);

/* True when the call's peer is verified and one of its certificate's names matches. */
bool td_identity_peer_is(const struct td_rpc_call *call, const struct td_peer_names *names);

/* --- Join ------------------------------------------------------------------------------------- */

struct td_join_nonces {
    uint8_t worker[TD_CLUSTER_NONCE_BYTES], router[TD_CLUSTER_NONCE_BYTES];
};

td_status td_join_prove_worker(struct td_cluster_secret *secret,
                               const struct td_join_nonces *nonces, const Tandem__V1__Hello *hello,
                               uint8_t ret_mac[TD_CLUSTER_MAC_BYTES]);
bool td_join_verify_worker(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                           const Tandem__V1__Hello *hello, const ProtobufCBinaryData *mac);
td_status td_join_prove_router(struct td_cluster_secret *secret,
                               const struct td_join_nonces *nonces,
                               const Tandem__V1__Welcome *welcome,
                               uint8_t ret_mac[TD_CLUSTER_MAC_BYTES]);
/* Checks the mac that the Welcome carries. */
bool td_join_verify_router(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                           const Tandem__V1__Welcome *welcome);

/* Makes the answer to Prove. secret NULL: with instance_key. nonce: the request's. */
td_status td_instance_prove(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                            const ProtobufCBinaryData *instance_key,
                            const ProtobufCBinaryData *nonce,
                            uint8_t ret_mac[TD_CLUSTER_MAC_BYTES]);
bool td_instance_verify(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                        const ProtobufCBinaryData *instance_key, const ProtobufCBinaryData *nonce,
                        const ProtobufCBinaryData *mac);

/* --- calls ------------------------------------------------------------------------------------ */

#define TD_REPLAY_COUNTERS 4096 /* a call may overtake fewer than this many others */

/* The counters that were seen. Each is accepted once, and none that is TD_REPLAY_COUNTERS or more
 * behind the highest. */
struct td_replay_guard {
    uint64_t top, seen[TD_REPLAY_COUNTERS / 64];
};
bool td_replay_accept(struct td_replay_guard *w, uint64_t counter);

#define TD_CALL_PROOF_KEY "tandem-proof"
#define TD_CALL_PROOF_MAX 160

struct td_call_proof {
    uint64_t session, request, counter;
    uint32_t attempt;
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
};

/* Makes the value of the metadata. */
td_status td_call_prove(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                        const char *path, uint64_t request, uint32_t attempt, uint64_t counter,
                        char ret_text[TD_CALL_PROOF_MAX]);
/* Splits the value of the metadata; checks no proof yet. TD_ERR_INVALID: malformed. */
td_status td_call_proof_parse(const char *text, struct td_call_proof *ret_proof);
/* Whether the proof is of the Join that had these nonces, by what it says. */
bool td_call_proof_is_of(const struct td_call_proof *proof, const struct td_join_nonces *nonces);
/* Checks session, proof and counter, in this order; an accepted counter is used up. On failure
 * *ret_why is one clause that says what is wrong. */
bool td_call_proof_check(struct td_cluster_secret *secret, const struct td_join_nonces *nonces,
                         struct td_replay_guard *guard, const char *path,
                         const struct td_call_proof *proof, const char **ret_why);

/* --- operators -------------------------------------------------------------------------------- */

/* Metadata of a second call to Inference.Status, which then reports everything: the challenge of
 * the first call, and HMAC(secret; "tandem status v1", challenge). */
#define TD_STATUS_PROOF_KEY "tandem-status-proof"
#define TD_STATUS_PROOF_MAX 136
td_status td_status_prove(struct td_cluster_secret *secret, const ProtobufCBinaryData *challenge,
                          char ret_text[TD_STATUS_PROOF_MAX]);
/* True when the text is a valid proof of the challenge inside it. The caller checks whether this
 * process made that challenge. */
bool td_status_proof_check(struct td_cluster_secret *secret, const char *text,
                           uint8_t ret_challenge[TD_CLUSTER_NONCE_BYTES]);

/* A challenge that need not be stored: 8 bytes of expiry, and a MAC of them with a key of this
 * process. It may be used any number of times until it expires; a recorded proof yields nothing
 * that was not in the recorded answer. */
void td_challenge_make(const uint8_t key[32], uint64_t expiry_ns,
                       uint8_t ret_challenge[TD_CLUSTER_NONCE_BYTES]);
bool td_challenge_check(const uint8_t key[32], uint64_t now_ns,
                        const uint8_t challenge[TD_CLUSTER_NONCE_BYTES]);

/* --- logs that strangers cause ---------------------------------------------------------------- */

/* Paces a log line to one a second and counts the rest. True = log now; *ret_dropped lines were
 * left out since the last one. */
struct td_log_pace {
    uint64_t next_ns;
    uint32_t n_dropped;
};
bool td_log_pace_due(struct td_log_pace *pace, uint32_t *ret_dropped);

#endif
