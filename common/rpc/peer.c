/* peer.c - who is at the other end of a call, as core's auth context tells it.
 *
 * Core fills the context from the peer's leaf certificate after OpenSSL has verified the chain. A server that asks for no certificate has a
 * context without one: x509_pem_cert is the property that says that there was a certificate at all (a certificate without any name has no
 * "peer identity" in core's words, yet it was verified). */
#include <grpc/grpc_security_constants.h>
#include <string.h>

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

const char *td_rpc_name_kind_text(enum td_rpc_name_kind kind)
{
    return kinds[kind].text;
}

static bool is_verified(const grpc_auth_context *context)
{
    grpc_auth_property_iterator at = grpc_auth_context_find_properties_by_name(context, GRPC_X509_PEM_CERT_PROPERTY_NAME);
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

bool td_rpc_call_peer_names(const struct td_rpc_call *call, bool (*match)(enum td_rpc_name_kind kind, const char *name, void *arg), void *arg)
{
    grpc_auth_context *context = call->call ? grpc_call_auth_context(call->call) : NULL;
    if (!context) return false;
    bool matched = false;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds && is_verified(context) && !matched; kind++) {
        grpc_auth_property_iterator at = grpc_auth_context_find_properties_by_name(context, kinds[kind].property);
        for (const grpc_auth_property *p; !matched && (p = grpc_auth_property_iterator_next(&at));)
            matched = !memchr(p->value, 0, p->value_length) && match((enum td_rpc_name_kind)kind, p->value, arg);
    }
    grpc_auth_context_release(context);
    return matched;
}
