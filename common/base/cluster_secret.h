/* cluster_secret.h - one secret that all daemons of a cluster know, and can prove to know without
 * sending it.
 *
 * Why here: without TLS a router, a worker and a KV port must still tell a member of the cluster
 * from a stranger who can reach their port. Both sides send a fresh nonce and answer with
 * HMAC-SHA256 (RFC 2104, RFC 4231) over labelled fields that hold both nonces and the role that
 * each side claims. Somebody who listens learns no secret; a recorded proof does not fit a later
 * nonce; a proof made for one purpose or role serves no other. A proof does not hide or
 * authenticate the bytes after it: against somebody who changes packets on the way, use TLS.
 *
 * The file holds one secret a line, each of 32 to 1024 printable ASCII characters without spaces
 * (`openssl rand -hex 32`), at most 8 lines and 4096 bytes. Empty lines and a carriage return at a
 * line's end are ignored. A daemon proves itself with the first line and accepts proofs made with
 * any line. To rotate, append the new secret on all machines, then put it first everywhere, then
 * remove the old one; a reload applies each step.
 *
 * Permissions: a file that others (mode & 007) can read or write, or that its group can write, is
 * refused. A file that its group can read is accepted, because that is how a Kubernetes Secret
 * reaches a process that is not root (fsGroup with defaultMode 0440). A Secret's own default of
 * 0644 is refused, with the remedy in the message.
 *
 * Threads: any; a lock guards the secrets. In a build without OpenSSL (libcrypto), load, prove and
 * verify return TD_ERR_UNSUPPORTED. */
#ifndef TD_BASE_CLUSTER_SECRET_H
#define TD_BASE_CLUSTER_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* 16 bytes in hexadecimal: nobody can guess 128 bits from a recorded proof. */
#define TD_CLUSTER_SECRET_MIN_CHARS 32
#define TD_CLUSTER_SECRET_MAX_CHARS 1024
#define TD_CLUSTER_SECRET_MAX_FILE_BYTES 4096
#define TD_CLUSTER_SECRET_MAX_LINES 8
#define TD_CLUSTER_NONCE_BYTES 32
#define TD_CLUSTER_MAC_BYTES 32

struct td_cluster_secret;

/* One field of the text that a proof covers. data may be NULL when n_bytes is 0. */
struct td_secret_field {
    const void *data;
    size_t n_bytes;
};

/* Reads the file. Errors: TD_ERR_INVALID (mode, length, characters), TD_ERR_LIMIT (too big),
 * TD_ERR_NOT_FOUND, TD_ERR_IO, TD_ERR_UNSUPPORTED. The message names path, cause and limit, and
 * never a byte of a secret. Blocks on the disk only. */
td_status td_cluster_secret_load(const char *path, struct td_cluster_secret **ret_secret,
                                 struct td_err *err);
/* Wipes and frees the secrets. NULL is allowed. */
void td_cluster_secret_destroy(struct td_cluster_secret *secret);
/* Reads the file again; when that fails, the old secrets stay in use. With only_changed the file is
 * read only when its time, size or inode differ from what the last attempt saw, so a caller may
 * call it every second; and bytes that are in use already are not new (Kubernetes sets the owner of
 * a mounted secret again and again). *ret_loaded (may be NULL) is true when new secrets are in
 * use. */
td_status td_cluster_secret_reload(struct td_cluster_secret *secret, bool only_changed,
                                   bool *ret_loaded, struct td_err *err);

/* HMAC-SHA256 with the first secret, over label and fields, each preceded by its length, and over
 * their number, so that no two lists give the same bytes. label names purpose, role and version
 * ("tandem kv v1 dialler"). Errors: TD_ERR_NOMEM, TD_ERR_UNSUPPORTED. */
td_status td_cluster_secret_prove(struct td_cluster_secret *secret, const char *label,
                                  const struct td_secret_field *fields, size_t n_fields,
                                  uint8_t ret_mac[TD_CLUSTER_MAC_BYTES]);
/* True when mac is the proof of one of the secrets. All are tried, and compared in constant time.
 * False on every error. */
bool td_cluster_secret_verify(struct td_cluster_secret *secret, const char *label,
                              const struct td_secret_field *fields, size_t n_fields,
                              const uint8_t mac[TD_CLUSTER_MAC_BYTES]);

/* A fresh nonce, from getrandom(2). */
void td_cluster_nonce(uint8_t ret_nonce[TD_CLUSTER_NONCE_BYTES]);
/* True when the n bytes are equal; the time does not depend on where they differ. */
bool td_equal_constant_time(const void *a, const void *b, size_t n_bytes);
/* Plain HMAC-SHA256, for tests against published vectors. */
td_status td_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t n_bytes,
                         uint8_t ret_mac[TD_CLUSTER_MAC_BYTES]);

#endif
