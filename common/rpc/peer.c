/* peer.c - the identity of a call's peer, from core's auth context.
 *
 * Core fills the context from the peer's leaf certificate after OpenSSL has verified the chain. For
 * a server that asks for no certificate the context has none: the property x509_pem_cert says
 * whether there was a certificate at all. (A certificate without any name has no "peer identity" in
 * core's terms, although it was verified.) */
#include <grpc/grpc_security_constants.h>
#include <stdio.h>
#include <string.h>
#ifdef TD_HAVE_OPENSSL
#include <arpa/inet.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#endif

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/peer_names.h"
#include "common/rpc/rpc_internal.h"

static const struct {
    const char *property, *text;
} kinds[] = {
    [TD_RPC_NAME_DNS] = {GRPC_PEER_DNS_PROPERTY_NAME, "dns"},
    [TD_RPC_NAME_URI] = {GRPC_PEER_URI_PROPERTY_NAME, "uri"},
    [TD_RPC_NAME_IP] = {GRPC_PEER_IP_PROPERTY_NAME, "ip"},
    [TD_RPC_NAME_EMAIL] = {GRPC_PEER_EMAIL_PROPERTY_NAME, "email"},
    [TD_RPC_NAME_CN] = {GRPC_X509_CN_PROPERTY_NAME, "cn"},
};

const char *td_rpc_call_path(const struct td_rpc_call *call)
{
    return call->is_server ? call->as_server.method->path : call->as_client.method->path;
}

bool td_rpc_call_peer_is_local(const struct td_rpc_call *call)
{
    const char *peer = td_rpc_call_peer(call), *end;
    char address[64];
    if (strncmp(peer, "ipv6:%5B", 8) != 0 || !(end = strstr(peer, "%5D")))
        return td_address_is_loopback(peer);
    /* core writes brackets as in a URI */
    snprintf(address, sizeof address, "[%.*s]:0", (int)(end - peer - 8), peer + 8);
    return td_address_is_loopback(address);
}

const char *td_rpc_name_kind_text(enum td_rpc_name_kind kind) { return kinds[kind].text; }

static bool is_verified(const grpc_auth_context *context)
{
    grpc_auth_property_iterator at =
        grpc_auth_context_find_properties_by_name(context, GRPC_X509_PEM_CERT_PROPERTY_NAME);
    return grpc_auth_property_iterator_next(&at) != NULL;
}

bool td_rpc_call_peer_verified(const struct td_rpc_call *call)
{
    grpc_auth_context *context = call->call ? grpc_call_auth_context(call->call) : NULL;
    if (!context) return false;
    bool verified = is_verified(context);
    grpc_auth_context_release(context);
    return verified;
}

bool td_rpc_call_peer_names(const struct td_rpc_call *call,
                            bool (*match)(enum td_rpc_name_kind kind, const char *name, void *arg),
                            void *arg)
{
    grpc_auth_context *context = call->call ? grpc_call_auth_context(call->call) : NULL;
    if (!context) return false;
    bool matched = false;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds && is_verified(context) && !matched;
         kind++) {
        grpc_auth_property_iterator at =
            grpc_auth_context_find_properties_by_name(context, kinds[kind].property);
        for (const grpc_auth_property *p; !matched && (p = grpc_auth_property_iterator_next(&at));)
            matched = !memchr(p->value, 0, p->value_length) &&
                      match((enum td_rpc_name_kind)kind, p->value, arg);
    }
    grpc_auth_context_release(context);
    return matched;
}

/* ---- a server's certificate, before any call is sent to it ----------------------------------- */

#ifdef TD_HAVE_OPENSSL

static bool names_match(const struct td_peer_names *names, X509 *cert)
{
    bool matched = false;
    GENERAL_NAMES *all = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; all && !matched && i < sk_GENERAL_NAME_num(all); i++) {
        const GENERAL_NAME *n = sk_GENERAL_NAME_value(all, i);
        char text[INET6_ADDRSTRLEN];
        if (n->type == GEN_DNS || n->type == GEN_URI) {
            matched =
                td_peer_names_match(names, n->type == GEN_DNS ? TD_PEER_NAME_DNS : TD_PEER_NAME_URI,
                                    (const char *)ASN1_STRING_get0_data(n->d.ia5),
                                    (size_t)ASN1_STRING_length(n->d.ia5));
        } else if (n->type == GEN_IPADD) {
            int n_bytes = ASN1_STRING_length(n->d.iPAddress);
            if ((n_bytes == 4 || n_bytes == 16) &&
                inet_ntop(n_bytes == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(n->d.iPAddress),
                          text, sizeof text))
                matched = td_peer_names_match(names, TD_PEER_NAME_IP, text, strlen(text));
        }
    }
    GENERAL_NAMES_free(all);
    return matched;
}

int td_rpc_peer_check(const char *target, const char *peer_pem, void *peer_names)
{
    BIO *bio = BIO_new_mem_buf(peer_pem, -1);
    X509 *cert = bio ? PEM_read_bio_X509(bio, NULL, NULL, NULL) : NULL;
    bool matched = cert && names_match(peer_names, cert);
    if (!matched) {
        /* one line a second, because channels dial again for ever */
        static _Atomic uint64_t next_ns;
        uint64_t now = td_now_ns(), next = atomic_load(&next_ns);
        char q[300];
        if (now >= next && atomic_compare_exchange_strong(&next_ns, &next, now + TD_NS_PER_S))
            td_warn("tls_peer_refused",
                    "target=%s reason=\"no name in its certificate is one that this end asks for\"",
                    td_log_quote(q, sizeof q, target ? target : ""));
    }
    X509_free(cert);
    BIO_free(bio);
    return matched ? 0 : 1;
}

td_status td_rpc_peer_check_supported(struct td_err *err)
{
    (void)err;
    return TD_OK;
}

#else

int td_rpc_peer_check(const char *target, const char *peer_pem, void *peer_names)
{
    (void)target;
    (void)peer_pem;
    (void)peer_names;
    return 1;
}

td_status td_rpc_peer_check_supported(struct td_err *err)
{
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "this program was built without OpenSSL: names in a server's certificate cannot "
                   "be asked for");
}

#endif
