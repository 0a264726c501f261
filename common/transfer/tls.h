/* tls.h - TLS 1.3 for the KV data port: a channel over a non-blocking TCP socket, used where the
 * plain path calls recv and sendmsg.
 *
 * Why here: a grant's key proves who may write into a slot, but KV bytes in the clear can be read
 * and changed on the way. With a CA file both sides show a certificate and both check it; nothing
 * that is written is placed before its record has been authenticated.
 *
 * Who is whom: grants carry numeric addresses, which certificates seldom hold, so by default any
 * certificate of the CA will do and the CA is the boundary of trust. Where the CA also signs others
 * than workers (clients of the router), set peer_name: a name that every worker's certificate holds
 * and theirs do not; or peer_names: a list of patterns. A worker dials and is dialled: a
 * certificate with an extendedKeyUsage needs clientAuth to dial and serverAuth to be dialled; one
 * without it may do both.
 *
 * Like a socket, with these differences:
 *  (1) sendv counts a byte when it is sealed, not when the kernel has it: up to TD_TLS_OUT_BYTES
 *      wait in the channel (td_tls_unsent) and go out as they were sealed, whatever the caller does
 *      to its buffers afterwards. Keep EPOLLOUT armed while td_tls_unsent > 0 and call td_tls_flush
 *      (sendv flushes too). A retry after EAGAIN is a fresh call: other bytes, other lengths, other
 *      addresses are all right.
 *  (2) Received bytes may wait inside the channel where epoll does not see them: read until -1
 *      EAGAIN, or look at td_tls_pending after stopping early.
 *  (3) recv's 0 means that the peer said close_notify. A stream that just ends (process killed,
 *      path cut by an attacker) is -1 ECONNRESET. Neither proves that the last message is whole:
 *      that is for the framing above, and an end inside a frame is an error in both cases.
 *  (4) In TLS 1.3 the initiator is done before the acceptor has looked at its certificate: a
 *      refusal then reaches the initiator as -1 EPROTO of its first recv (td_tls_reason holds the
 *      peer's alert; a send that fails looks for one too).
 *  (5) After an error the channel is dead: every call answers the same errno, td_tls_reason says
 *      why. Time limits are the caller's.
 *
 * Records: bytes of one sendv are gathered into records of 16 KiB, and sealed records into sends of
 * up to TD_TLS_OUT_BYTES. Keys are changed long before AES-GCM's limit (RFC 8446, 5.5). TLS 1.3
 * only; no tickets, no resumption, no early data. No signal is raised (SIGPIPE).
 *
 * Threads: td_xfer_tls may be used from any thread (a lock guards the certificates in use); a
 * td_xfer_tls_conn belongs to one thread at a time. Built without OpenSSL every opening answers
 * TD_ERR_UNSUPPORTED. Source: RFC 8446. */
#ifndef TD_TRANSFER_TLS_H
#define TD_TRANSFER_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "common/base/peer_names.h"
#include "common/base/status.h"

/* sealed and not yet taken by the kernel: four records and their overhead */
#define TD_TLS_OUT_BYTES 69632

struct td_xfer_tls;
struct td_xfer_tls_conn;

struct td_xfer_tls_config {
    /* own chain (leaf first) and key, PEM; an acceptor's; both or none */
    const char *cert_file, *key_file;
    /* Peers must show a certificate of one of these, in both directions. NULL: anybody is let in,
     * the bytes are hidden from onlookers only. */
    const char *ca_file;
    /* What the peer's certificate must hold among its subjectAltNames, in both directions: a DNS
     * name, an address, or "*.SUFFIX": a DNS name of one label before it. Subjects (CN) do not
     * count. NULL or "": any. */
    const char *peer_name;
    /* At least one subjectAltName of the peer's certificate must match, too; NULL: any. Borrowed
     * until td_xfer_tls_close and the end of every handshake. */
    const struct td_peer_names *peer_names;
    /* keys are changed after so many records; 0 = 2^23 (128 GiB); at most 2^24 */
    uint64_t rekey_records;
};

/* Reads the files. TD_ERR_INVALID, TD_ERR_NOT_FOUND, TD_ERR_IO: the message names file and
 * cause. Blocks on the disk only. */
td_status td_xfer_tls_open(const struct td_xfer_tls_config *config, struct td_xfer_tls **ret_tls,
                           struct td_err *err);
/* Connections may outlive it. NULL is allowed. */
void td_xfer_tls_close(struct td_xfer_tls *tls);
/* Reads the files again for the connections to come; those that are open keep what they have.
 * When that fails the old ones stay in use. only_changed: does nothing unless a file's bytes differ
 * from those of the last attempt, failed ones included; cheap enough to be asked every second, as
 * the bytes are read only when a file's time, size or inode differ. A certificate and its key are
 * two writes: between them this fails, and the next change is tried again. ret_loaded (may be
 * NULL) tells whether new ones are in use. */
td_status td_xfer_tls_reload(struct td_xfer_tls *tls, bool only_changed, bool *ret_loaded,
                             struct td_err *err);

/* A channel over fd: a connected, non-blocking stream socket that stays the caller's (close the
 * channel first). initiator: this side dialled. Allocates about 90 KiB, and OpenSSL as much
 * again. */
td_status td_tls_conn_open(struct td_xfer_tls *tls, int fd, bool initiator,
                           struct td_xfer_tls_conn **ret_conn, struct td_err *err);
/* Frees it, says nothing to the peer (see td_tls_shutdown). NULL is allowed. */
void td_tls_conn_close(struct td_xfer_tls_conn *c);

/* One step: TD_OK once the channel may be used; TD_INPROGRESS: call again when the socket is
 * readable (ret_want_read) or writable (ret_want_write), whichever comes first; TD_ERR_PEER with
 * the reason: the peer has been told as far as the socket took it. Before closing the socket
 * read what is left in it, or the reset that follows may overtake the alert. */
td_status td_tls_handshake(struct td_xfer_tls_conn *c, bool *ret_want_read, bool *ret_want_write,
                           struct td_err *err);

/* As recv(2) and readv(2) on a non-blocking socket, n > 0: bytes, 0 = end (3), or -1 with errno
 * EAGAIN, ECONNRESET, EPROTO (not TLS, a record that is not authentic, the peer's alert),
 * ENOTCONN (handshake not done), or what the socket said. Fills as much as is there. */
ssize_t td_tls_recvv(struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov);
static inline ssize_t td_tls_recv(struct td_xfer_tls_conn *c, void *buf, size_t n)
{
    return td_tls_recvv(c, &(struct iovec){.iov_base = buf, .iov_len = n}, 1);
}
/* True: a recv now may give bytes that epoll will not announce. False right after a recv that
 * answered EAGAIN or less than was asked for. */
bool td_tls_pending(const struct td_xfer_tls_conn *c);

/* As sendmsg(2) with MSG_DONTWAIT | MSG_NOSIGNAL: how many bytes are the channel's now (1), any
 * number up to the sum, or -1 with errno EAGAIN (try again when the socket is writable), EPIPE,
 * ECONNRESET, EPROTO, ENOTCONN. One call takes 1 MiB at most, so that others get their turn. */
ssize_t td_tls_sendv(struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov);
static inline ssize_t td_tls_send(struct td_xfer_tls_conn *c, const void *buf, size_t n)
{
    return td_tls_sendv(c, &(struct iovec){.iov_base = (void *)(uintptr_t)buf, .iov_len = n}, 1);
}
/* Bytes on the wire still to be taken by the kernel. */
size_t td_tls_unsent(const struct td_xfer_tls_conn *c);
/* 0: nothing is left; -1 with errno as sendv. */
int td_tls_flush(struct td_xfer_tls_conn *c);
/* Seals close_notify after all that was sent, and flushes. 0, or -1 with errno: EAGAIN = flush
 * again when writable. No send afterwards. */
int td_tls_shutdown(struct td_xfer_tls_conn *c);

/* why it is dead, "" while it lives; as long as the channel */
const char *td_tls_reason(const struct td_xfer_tls_conn *c);
const char *td_tls_cipher(const struct td_xfer_tls_conn *c); /* "TLS_AES_128_GCM_SHA256" */
/* The peer's certificate: subject, like "/CN=decode-1"; "" when it showed none. Written by
 * whoever signed it: quote it in logs. */
void td_tls_peer(const struct td_xfer_tls_conn *c, char *ret_subject, size_t subject_bytes);

#endif
