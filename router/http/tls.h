/* tls.h - the HTTP port's certificates: its own, and those that clients show.
 *
 * The files are looked at once a second and read again when they differ; what is wrong is told in
 * the log, and the old ones stay. Connections go on with what they began with. With a CA a client
 * must show a certificate that it signed, as on the gRPC port. The library (GnuTLS) asks for the
 * certificate; whether it is good is decided here, because the library knows the CA only that was
 * there at its start.
 *
 * Threads: open, look and close on the router's loop; the rest on the library's thread. A peer is
 * immutable and reference-counted. */
#ifndef TD_ROUTER_HTTP_TLS_H
#define TD_ROUTER_HTTP_TLS_H

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/peer_names.h"
#include "common/base/status.h"

struct http_tls;
/* Who showed a certificate: the names in it. */
struct http_peer;

/* Files (PEM); ca NULL: clients are not asked. One at a time in a process, because the library's
 * callback has no argument. */
td_status http_tls_open(const char *cert, const char *key, const char *ca,
                        struct http_tls **ret_tls, struct td_err *err);
void http_tls_close(struct http_tls *tls); /* NULL is fine; the library has stopped */
void http_tls_look(struct http_tls *tls, uint64_t now_ns); /* NULL is fine */
/* The CA's text for the library, NULL = none; valid until close. */
const char *http_tls_trust(const struct http_tls *tls);
/* gnutls_certificate_retrieve_function3. */
int http_tls_retrieve(gnutls_session_t session, const struct gnutls_cert_retr_st *info,
                      gnutls_pcert_st **ret_certs, unsigned *ret_n, gnutls_ocsp_data_st **ret_ocsp,
                      unsigned *ret_n_ocsp, gnutls_privkey_t *ret_key, unsigned *ret_flags);

/* NULL: the client showed no certificate, or *why says what is wrong with it. */
struct http_peer *http_tls_peer(struct http_tls *tls, gnutls_session_t session, const char **why);
struct http_peer *http_peer_ref(struct http_peer *peer); /* NULL is fine */
void http_peer_drop(struct http_peer *peer);             /* NULL is fine */
bool http_peer_is(const struct http_peer *peer, const struct td_peer_names *names);

#endif
