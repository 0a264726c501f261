/* peer_names.h - which names in a peer's certificate make it a member: patterns over
 * subjectAltNames, the same for gRPC and the KV port.
 *
 * Why here: a CA signs clients, workers and routers alike; what a certificate may do is told by its
 * names. One matcher, so that both doors agree.
 *
 * Patterns, comma-separated, spaces around them ignored, at most 64 of at most 512 characters:
 *   worker-3.example.org          a DNS name, equal but for the case of letters
 *   *.workers.example.org         a DNS name of exactly one more label, as in certificates: not
 *                                 two, not none
 *   10.0.0.7, fd00::7             an address, equal as a number
 *   URI:spiffe://prod/sa/worker   a URI, equal to the byte
 *   URI:spiffe://prod/sa/...      with a star where the dots are: a URI that begins so. The star
 *                                 follows a / or a : behind the authority; spiffe://prod and a star
 *                                 would take spiffe://prod.evil, too
 * A name in a certificate that holds a star itself matches nothing: it says where a host may be,
 * not who it is. Subjects (CN) do not count.
 *
 * Owns its memory; unchanging after parse, so any thread may match. */
#ifndef TD_BASE_PEER_NAMES_H
#define TD_BASE_PEER_NAMES_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"

enum td_peer_name_kind { TD_PEER_NAME_DNS = 0, TD_PEER_NAME_URI, TD_PEER_NAME_IP };

struct td_peer_names;

/* TD_ERR_INVALID, TD_ERR_LIMIT: the message names `option`, the pattern and what is wrong with
 * it. An empty text is TD_ERR_INVALID: callers that mean "no names" do not parse. */
td_status td_peer_names_parse(const char *option, const char *text,
                              struct td_peer_names **ret_names, struct td_err *err);
void td_peer_names_destroy(struct td_peer_names *names); /* NULL is allowed */

/* One name of a verified certificate: DNS and URI as their bytes (need not end in NUL; one that
 * holds a NUL matches nothing), an address as text. */
bool td_peer_names_match(const struct td_peer_names *names, enum td_peer_name_kind kind,
                         const char *value, size_t n_bytes);

#endif
