/* identity.c - the options, the proofs, and the checks of identity.h. */
#include "common/rpc/identity.h"

#include <stdio.h>
#include <string.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"

/* ---- options --------------------------------------------------------------------------------- */

static td_status open_names(const char *option, const char *text, bool has_ca,
                            struct td_peer_names **ret_names, struct td_err *err)
{
    if (!text[0]) return TD_OK;
    if (!has_ca)
        return td_fail(err, TD_ERR_INVALID,
                       "%s is given, and tls_cert, tls_key and tls_ca are not all: only a "
                       "certificate of a CA proves a name",
                       option);
    return td_peer_names_parse(option, text, ret_names, err);
}

td_status td_identity_open(const struct td_identity_config *c, bool has_ca,
                           struct td_identity *ret_id, struct td_err *err)
{
    struct td_identity id = {.secret_file = c->cluster_secret_file};
    td_status s = open_names("tls_worker_names", c->tls_worker_names, has_ca, &id.workers, err);
    if (!s) s = open_names("tls_router_names", c->tls_router_names, has_ca, &id.routers, err);
    if (!s && c->cluster_secret_file[0] &&
        (s = td_cluster_secret_load(c->cluster_secret_file, &id.secret, err)))
        td_err_prefix(err, "cluster_secret_file");
    if (s) {
        td_identity_close(&id);
        return s;
    }
    *ret_id = id;
    return TD_OK;
}

void td_identity_close(struct td_identity *id)
{
    td_cluster_secret_destroy(id->secret);
    td_peer_names_destroy(id->workers);
    td_peer_names_destroy(id->routers);
    memset(id, 0, sizeof *id);
}

void td_identity_look_at_file(struct td_identity *id, uint64_t now_ns)
{
    bool loaded = false;
    struct td_err err = {0};
    char q[TD_ERR_MSG_MAX];
    if (!id->secret || now_ns < id->look_ns) return;
    id->look_ns = td_deadline_after_ms(now_ns, 1000);
    if (td_cluster_secret_reload(id->secret, true, &loaded, &err))
        td_warn("cluster_secret_reload_failed", "action=keep_old err=%s",
                td_log_quote(q, sizeof q, err.msg));
    else if (loaded)
        td_info("cluster_secret_reloaded", "file=%s", td_log_quote(q, sizeof q, id->secret_file));
}

td_status td_identity_check_port(const struct td_identity *id, const char *option,
                                 const char *address, const char *serves, const char *names_option,
                                 bool has_names, struct td_err *err)
{
    if (id->secret || has_names || td_address_is_loopback(address)) return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "%s is %s, beyond loopback, and serves %s: whoever reaches it could act as a "
                   "member of the cluster. Give --cluster-secret-file "
                   "(the same file on router, prefill and decode: openssl rand -hex 32), or "
                   "--tls-cert, --tls-key, --tls-ca with --%s, or listen on "
                   "127.0.0.1",
                   option, address, serves, names_option);
}

static bool match_name(enum td_rpc_name_kind kind, const char *name, void *arg)
{
    switch (kind) {
    case TD_RPC_NAME_DNS:
        return td_peer_names_match(arg, TD_PEER_NAME_DNS, name, strlen(name));
    case TD_RPC_NAME_URI:
        return td_peer_names_match(arg, TD_PEER_NAME_URI, name, strlen(name));
    case TD_RPC_NAME_IP:
        return td_peer_names_match(arg, TD_PEER_NAME_IP, name, strlen(name));
    case TD_RPC_NAME_EMAIL:
    case TD_RPC_NAME_CN:
        break; /* no member's name */
    }
    return false;
}

bool td_identity_peer_is(const struct td_rpc_call *call, const struct td_peer_names *names)
{
    return td_rpc_call_peer_names(call, match_name, (void *)(uintptr_t)names);
}

/* ---- proofs ---------------------------------------------------------------------------------- */

/* Numbers enter a proof as eight bytes, lowest first, on every machine. */
static void put_u64(uint8_t out[8], uint64_t v)
{
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(v >> (8 * i));
}

#define TEXT(s)                                                                                    \
    {                                                                                              \
        (s), strlen(s)                                                                             \
    }
#define NONCES(n)                                                                                  \
    {(n)->worker, sizeof(n)->worker}, { (n)->router, sizeof(n)->router }
#define N_FIELDS(f) (sizeof(f) / sizeof *(f))

static const char worker_label[] = "tandem join v1 worker",
                  router_label[] = "tandem join v1 router", call_label[] = "tandem call v1",
                  instance_label[] = "tandem instance v1";

td_status td_join_prove_worker(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                               const Tandem__V1__Hello *h, uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    uint8_t incarnation[8];
    put_u64(incarnation, h->incarnation);
    const struct td_secret_field f[] = {
        NONCES(n), TEXT(h->role), TEXT(h->name), TEXT(h->address), {incarnation, 8}};
    return td_cluster_secret_prove(secret, worker_label, f, N_FIELDS(f), ret_mac);
}

bool td_join_verify_worker(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                           const Tandem__V1__Hello *h, const ProtobufCBinaryData *mac)
{
    uint8_t incarnation[8];
    put_u64(incarnation, h->incarnation);
    const struct td_secret_field f[] = {
        NONCES(n), TEXT(h->role), TEXT(h->name), TEXT(h->address), {incarnation, 8}};
    return mac->len == TD_CLUSTER_MAC_BYTES &&
           td_cluster_secret_verify(secret, worker_label, f, N_FIELDS(f), mac->data);
}

td_status td_join_prove_router(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                               const Tandem__V1__Welcome *w, uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    uint8_t incarnation[8], seed[8];
    put_u64(incarnation, w->router_incarnation);
    put_u64(seed, w->prefix_seed);
    const struct td_secret_field f[] = {NONCES(n), {incarnation, 8}, {seed, 8}};
    return td_cluster_secret_prove(secret, router_label, f, N_FIELDS(f), ret_mac);
}

bool td_join_verify_router(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                           const Tandem__V1__Welcome *w)
{
    uint8_t incarnation[8], seed[8];
    put_u64(incarnation, w->router_incarnation);
    put_u64(seed, w->prefix_seed);
    const struct td_secret_field f[] = {NONCES(n), {incarnation, 8}, {seed, 8}};
    return w->proof.len == TD_CLUSTER_MAC_BYTES &&
           td_cluster_secret_verify(secret, router_label, f, N_FIELDS(f), w->proof.data);
}

/* MAC of label and nonce with the instance's own key. Their lengths are fixed, so no two inputs are
 * the same bytes. */
static td_status instance_mac(const ProtobufCBinaryData *key, const ProtobufCBinaryData *nonce,
                              uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    uint8_t text[sizeof instance_label + TD_CLUSTER_NONCE_BYTES];
    memcpy(text, instance_label, sizeof instance_label);
    memcpy(text + sizeof instance_label, nonce->data, TD_CLUSTER_NONCE_BYTES);
    return td_hmac_sha256(key->data, key->len, text, sizeof text, ret_mac);
}

td_status td_instance_prove(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                            const ProtobufCBinaryData *key, const ProtobufCBinaryData *nonce,
                            uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    if (nonce->len != TD_CLUSTER_NONCE_BYTES) return TD_ERR_INVALID;
    if (!secret) return instance_mac(key, nonce, ret_mac);
    const struct td_secret_field f[] = {NONCES(n), {nonce->data, nonce->len}};
    return td_cluster_secret_prove(secret, instance_label, f, N_FIELDS(f), ret_mac);
}

bool td_instance_verify(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                        const ProtobufCBinaryData *key, const ProtobufCBinaryData *nonce,
                        const ProtobufCBinaryData *mac)
{
    uint8_t want[TD_CLUSTER_MAC_BYTES];
    if (nonce->len != TD_CLUSTER_NONCE_BYTES || mac->len != TD_CLUSTER_MAC_BYTES) return false;
    if (!secret)
        return instance_mac(key, nonce, want) == TD_OK &&
               td_equal_constant_time(want, mac->data, sizeof want);
    const struct td_secret_field f[] = {NONCES(n), {nonce->data, nonce->len}};
    return td_cluster_secret_verify(secret, instance_label, f, N_FIELDS(f), mac->data);
}

/* ---- calls ----------------------------------------------------------------------------------- */

bool td_replay_accept(struct td_replay_guard *w, uint64_t counter)
{
    if (counter == 0 || (counter < w->top && w->top - counter >= TD_REPLAY_COUNTERS)) return false;
    if (counter > w->top) {
        uint64_t n_new = counter - w->top;
        if (n_new >= TD_REPLAY_COUNTERS)
            memset(w->seen, 0, sizeof w->seen);
        else
            for (uint64_t c = w->top + 1; c <= counter; c++)
                w->seen[c % TD_REPLAY_COUNTERS / 64] &= ~(1ull << c % 64);
        w->top = counter;
    }
    uint64_t *word = &w->seen[counter % TD_REPLAY_COUNTERS / 64], bit = 1ull << counter % 64;
    if (*word & bit) return false;
    *word |= bit;
    return true;
}

static uint64_t session_of(const struct td_join_nonces *n)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v = v << 8 | n->router[i];
    return v;
}

#define CALL_FIELDS(f, n, path, request, attempt, counter)                                         \
    uint8_t f##_numbers[3][8];                                                                     \
    put_u64(f##_numbers[0], request);                                                              \
    put_u64(f##_numbers[1], attempt);                                                              \
    put_u64(f##_numbers[2], counter);                                                              \
    const struct td_secret_field f[] = {                                                           \
        NONCES(n), TEXT(path), {f##_numbers[0], 8}, {f##_numbers[1], 8}, {f##_numbers[2], 8}}

td_status td_call_prove(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                        const char *path, uint64_t request, uint32_t attempt, uint64_t counter,
                        char ret_text[TD_CALL_PROOF_MAX])
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    CALL_FIELDS(f, n, path, request, attempt, counter);
    td_status s = td_cluster_secret_prove(secret, call_label, f, N_FIELDS(f), mac);
    if (s) return s;
    int used = snprintf(ret_text, TD_CALL_PROOF_MAX, "%016llx %016llx %08x %016llx ",
                        (unsigned long long)session_of(n), (unsigned long long)request, attempt,
                        (unsigned long long)counter);
    for (size_t i = 0; i < sizeof mac; i++)
        used += snprintf(ret_text + used, (size_t)(TD_CALL_PROOF_MAX - used), "%02x", mac[i]);
    return TD_OK;
}

/* Reads n_digits of lower-case hexadecimal; -1 at any other byte. */
static int take_hex(const char *text, int n_digits, uint64_t *ret)
{
    uint64_t v = 0;
    for (int i = 0; i < n_digits; i++) {
        const char *digits = "0123456789abcdef", *at = text[i] ? strchr(digits, text[i]) : NULL;
        if (!at) return -1;
        v = v << 4 | (uint64_t)(at - digits);
    }
    *ret = v;
    return 0;
}

static int take_bytes(const char *text, size_t n, uint8_t *ret)
{
    uint64_t byte;
    for (size_t i = 0; i < n; i++) {
        if (take_hex(text + 2 * i, 2, &byte)) return -1;
        ret[i] = (uint8_t)byte;
    }
    return 0;
}

td_status td_call_proof_parse(const char *text, struct td_call_proof *ret)
{
    enum { MAC_AT = 17 + 17 + 9 + 17 };
    struct td_call_proof p;
    uint64_t attempt;
    if (strlen(text) != MAC_AT + 2 * TD_CLUSTER_MAC_BYTES) return TD_ERR_INVALID;
    if (take_hex(text, 16, &p.session) || text[16] != ' ' || take_hex(text + 17, 16, &p.request) ||
        text[33] != ' ' || take_hex(text + 34, 8, &attempt) || text[42] != ' ' ||
        take_hex(text + 43, 16, &p.counter) || text[59] != ' ')
        return TD_ERR_INVALID;
    p.attempt = (uint32_t)attempt;
    if (take_bytes(text + MAC_AT, TD_CLUSTER_MAC_BYTES, p.mac)) return TD_ERR_INVALID;
    *ret = p;
    return TD_OK;
}

bool td_call_proof_is_of(const struct td_call_proof *p, const struct td_join_nonces *n)
{
    return p->session == session_of(n);
}

bool td_call_proof_check(struct td_cluster_secret *secret, const struct td_join_nonces *n,
                         struct td_replay_guard *guard, const char *path,
                         const struct td_call_proof *p, const char **ret_why)
{
    CALL_FIELDS(f, n, path, p->request, p->attempt, p->counter);
    if (!td_call_proof_is_of(p, n))
        *ret_why = "the proof is of another registration of this worker, or another router";
    else if (!td_cluster_secret_verify(secret, call_label, f, N_FIELDS(f), p->mac))
        *ret_why = "the proof does not fit the cluster secret and this call";
    else if (!td_replay_accept(guard, p->counter))
        *ret_why = "the proof was used before";
    else
        return true;
    return false;
}

/* ---- operators ------------------------------------------------------------------------------- */

static const char status_label[] = "tandem status v1";

td_status td_status_prove(struct td_cluster_secret *secret, const ProtobufCBinaryData *challenge,
                          char ret_text[TD_STATUS_PROOF_MAX])
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    const struct td_secret_field f[] = {{challenge->data, challenge->len}};
    if (challenge->len != TD_CLUSTER_NONCE_BYTES) return TD_ERR_INVALID;
    td_status s = td_cluster_secret_prove(secret, status_label, f, 1, mac);
    if (s) return s;
    int used = 0;
    for (size_t i = 0; i < TD_CLUSTER_NONCE_BYTES; i++)
        used += snprintf(ret_text + used, (size_t)(TD_STATUS_PROOF_MAX - used), "%02x",
                         challenge->data[i]);
    used += snprintf(ret_text + used, (size_t)(TD_STATUS_PROOF_MAX - used), " ");
    for (size_t i = 0; i < sizeof mac; i++)
        used += snprintf(ret_text + used, (size_t)(TD_STATUS_PROOF_MAX - used), "%02x", mac[i]);
    return TD_OK;
}

bool td_status_proof_check(struct td_cluster_secret *secret, const char *text,
                           uint8_t ret_challenge[TD_CLUSTER_NONCE_BYTES])
{
    enum { MAC_AT = 2 * TD_CLUSTER_NONCE_BYTES + 1 };
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (strlen(text) != MAC_AT + 2 * TD_CLUSTER_MAC_BYTES || text[MAC_AT - 1] != ' ' ||
        take_bytes(text, TD_CLUSTER_NONCE_BYTES, ret_challenge) ||
        take_bytes(text + MAC_AT, sizeof mac, mac))
        return false;
    const struct td_secret_field f[] = {{ret_challenge, TD_CLUSTER_NONCE_BYTES}};
    return td_cluster_secret_verify(secret, status_label, f, 1, mac);
}

void td_challenge_make(const uint8_t key[32], uint64_t expiry_ns,
                       uint8_t ret_challenge[TD_CLUSTER_NONCE_BYTES])
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES] = {0};
    put_u64(ret_challenge, expiry_ns);
    td_status s = td_hmac_sha256(key, 32, ret_challenge, 8, mac);
    if (s) put_u64(ret_challenge, 0); /* no memory: make a challenge that has expired */
    memcpy(ret_challenge + 8, mac, TD_CLUSTER_NONCE_BYTES - 8);
}

bool td_challenge_check(const uint8_t key[32], uint64_t now_ns,
                        const uint8_t challenge[TD_CLUSTER_NONCE_BYTES])
{
    uint64_t expiry_ns = 0;
    uint8_t want[TD_CLUSTER_NONCE_BYTES];
    for (int i = 7; i >= 0; i--) expiry_ns = expiry_ns << 8 | challenge[i];
    td_challenge_make(key, expiry_ns, want);
    return td_equal_constant_time(want, challenge, sizeof want) && now_ns < expiry_ns;
}

bool td_log_pace_due(struct td_log_pace *pace, uint32_t *ret_dropped)
{
    uint64_t now = td_now_ns();
    if (now < pace->next_ns) {
        pace->n_dropped++;
        return false;
    }
    *ret_dropped = pace->n_dropped;
    pace->n_dropped = 0;
    pace->next_ns = now + TD_NS_PER_S;
    return true;
}
