/* peer_names.h - decides from the names in a peer's certificate whether the peer is a member:
 * patterns over subjectAltNames, the same for gRPC and the KV port.
 *
 * Why here: one CA signs clients, workers and routers alike, so the names in a certificate decide
 * what its holder may do. Both ports use this one matcher, so that they always agree.
 *
 * Patterns are comma-separated, spaces around them are ignored, and there are at most 64 of at most
 * 512 characters each:
 *   worker-3.example.org          a DNS name, equal except for the case of letters
 *   *.workers.example.org         a DNS name with exactly one more label, as in certificates: not
 *                                 two, not none
 *   10.0.0.7, fd00::7             an address, equal as a number
 *   URI:spiffe://prod/sa/worker   a URI, equal byte for byte
 *   URI:spiffe://prod/sa/...      with a star in place of the dots: a URI that begins with the text
 *                                 before it. The star must follow a / or a : behind the authority,
 *                                 because spiffe://prod and a star would accept spiffe://prod.evil
 * A name in a certificate that itself holds a star matches nothing, because it does not say who the
 * peer is. Subjects (CN) are ignored.
 *
 * Owns its memory. It does not change after parse, so any thread may match. */
#ifndef TD_BASE_PEER_NAMES_H
#define TD_BASE_PEER_NAMES_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"

enum td_peer_name_kind { TD_PEER_NAME_DNS = 0, TD_PEER_NAME_URI, TD_PEER_NAME_IP };

struct td_peer_names;

/* Errors: TD_ERR_INVALID, TD_ERR_LIMIT; the message names `option`, the pattern and what is wrong
 * with it. An empty text is TD_ERR_INVALID: a caller that means "no names" does not parse. */
td_status td_peer_names_parse(const char *option, const char *text,
                              struct td_peer_names **ret_names, struct td_err *err);
void td_peer_names_destroy(struct td_peer_names *names); /* NULL is allowed */

/* Whether one name of a verified certificate matches. DNS names and URIs come as bytes (without a
 * NUL at the end; one that holds a NUL matches nothing), an address as text. */
bool td_peer_names_match(const struct td_peer_names *names, enum td_peer_name_kind kind,
                         const char *value, size_t n_bytes);

#endif
