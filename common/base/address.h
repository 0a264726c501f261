/* address.h - "host:port" as text, for addresses that one daemon tells another to dial: IPv6
 * stands in brackets, or its last group is a port. */
#ifndef TD_BASE_ADDRESS_H
#define TD_BASE_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* The host without brackets, as getaddrinfo takes it: "::1" of "[::1]" and of "::1"; names and
 * IPv4 as they are. TD_ERR_INVALID: empty, with a port, no IPv6 address between brackets, a byte
 * no host has, or too long for host_bytes. An address with a zone ("fe80::1%eth0") is refused: a
 * zone is the name of an interface of one host. */
td_status td_address_host(const char *text, char *ret_host, size_t host_bytes, struct td_err *err);

/* "name:80", "10.0.0.1:80", "[::1]:80". host: as td_address_host takes it. */
td_status td_address_join(const char *host, uint16_t port, char *ret_address, size_t address_bytes,
                          struct td_err *err);

/* True when a listener on "host:port" can be reached from this machine only: 127.0.0.0/8, [::1],
 * localhost, a unix socket. Any other name is false without being resolved: what it resolves to
 * may change. */
bool td_address_is_loopback(const char *address);

#endif
