/* address.h - addresses as text, "host:port", that daemons listen on or tell one another to dial.
 * IPv6 addresses stand in brackets, because otherwise the last group would look like a port. */
#ifndef TD_BASE_ADDRESS_H
#define TD_BASE_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* The host without brackets, in the form that getaddrinfo takes: "::1" for "[::1]" and for "::1";
 * names and IPv4 addresses unchanged. TD_ERR_INVALID: the text is empty, has a port, has something
 * other than an IPv6 address between brackets, has a byte that no host name has, or does not fit
 * host_bytes. An address with a zone ("fe80::1%eth0") is refused, because a zone names an interface
 * of one host. */
td_status td_address_host(const char *text, char *ret_host, size_t host_bytes, struct td_err *err);

/* Writes "name:80", "10.0.0.1:80" or "[::1]:80". host: in any form that td_address_host accepts. */
td_status td_address_join(const char *host, uint16_t port, char *ret_address, size_t address_bytes,
                          struct td_err *err);

struct addrinfo;

/* The socket addresses of "host:port" or "[::1]:port", for TCP; an empty host is every address of
 * this machine where listening, and loopback otherwise. field names the address in errors
 * ("http_listen"). The caller calls freeaddrinfo. TD_ERR_INVALID: it has no port, a port above
 * 65535, or a host that nobody knows. May ask a name server. */
td_status td_address_resolve(const char *field, const char *address, bool listening,
                             struct addrinfo **ret_list, struct td_err *err);

/* True when a listener on "host:port" can be reached from this machine only: 127.0.0.0/8, [::1],
 * localhost, a unix socket. Any other name gives false without being resolved, because what it
 * resolves to may change. */
bool td_address_is_loopback(const char *address);

#endif
