/* doctor_wire.h - the protocol between two doctors: messages of one size over a stream socket, one
 * question and its answer at a time.
 *
 * Both sides check every field before they use it; a malformed message ends the session. Anybody
 * who reaches the port of a listening doctor can make it receive test data, and nothing else. It
 * serves as many sessions as it was told (by default one) and ends. Little-endian. */
#ifndef TD_CLI_DOCTOR_WIRE_H
#define TD_CLI_DOCTOR_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define DOCTOR_WIRE_MAGIC 0x31444454u /* "TDD1" */
#define DOCTOR_WIRE_VERSION 1
#define DOCTOR_BLOB_MAX 3072 /* bytes of a grant's blob */
#define DOCTOR_POOL_MAX (1u << 30)
#define DOCTOR_SLOTS 64 /* grants that exist at a time */

enum doctor_msg_type {
    /* both ways: host, has_rdma. An answer with status != 0 is a refusal, with text */
    DOCTOR_MSG_HELLO = 1,
    /* opens an endpoint: path, block_bytes, n_blocks; replaces the one before. Answer: status,
     * text */
    DOCTOR_MSG_OPEN,
    DOCTOR_MSG_GRANT,  /* grants blocks [first, first + n). Answer: status, text, slot, blob */
    DOCTOR_MSG_VERIFY, /* slot, first, n, seed: the transfer is done. Answer: status, text,
                             path that was used */
    DOCTOR_MSG_BYE,    /* the session is over; no answer */
    DOCTOR_MSG_N_TYPES
};

struct doctor_msg {
    uint32_t magic;
    uint16_t version;
    uint8_t type, answer; /* answer: 1 in an answer, 0 in a question */
    int32_t status;       /* a td_status */
    uint8_t path, has_rdma;
    uint16_t blob_bytes;
    uint64_t block_bytes, seed, host[2]; /* host: equal on both sides when they share kernel,
                                            network namespace and user */
    uint32_t n_blocks, slot, first, n;
    char text[256]; /* NUL-terminated */
    uint8_t reserved[704];
    uint8_t blob[DOCTOR_BLOB_MAX];
};
_Static_assert(sizeof(struct doctor_msg) == 4096, "wire: doctor's message");
_Static_assert(offsetof(struct doctor_msg, block_bytes) == 16 &&
                   offsetof(struct doctor_msg, blob) == 1024,
               "wire: doctor's message");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire structs are copied as they are");

void doctor_msg_init(struct doctor_msg *m, enum doctor_msg_type type, int answer);
/* Checks a message; TD_ERR_CORRUPT names the field. n_pool_blocks, block_bytes: those of the open
 * endpoint, 0 = none yet (bounds for GRANT and VERIFY). */
td_status doctor_msg_check(const struct doctor_msg *m, uint32_t n_pool_blocks, struct td_err *err);

/* Sends or receives a whole message, or fails: TD_ERR_DEADLINE, TD_ERR_PEER (closed), TD_ERR_IO. fd
 * is non-blocking. */
td_status doctor_msg_send(int fd, const struct doctor_msg *m, uint64_t deadline_ns,
                          struct td_err *err);
td_status doctor_msg_recv(int fd, struct doctor_msg *ret_m, uint64_t deadline_ns,
                          struct td_err *err);

/* Waits until fd is readable (for a listener: a connection has come). TD_ERR_DEADLINE. */
td_status doctor_wait(int fd, uint64_t deadline_ns, struct td_err *err);

/* Opens a socket for "HOST:PORT", "[::1]:PORT" or ":PORT" (any address). listen: bound and
 * listening, else connected. Non-blocking, close-on-exec. */
td_status doctor_socket(const char *address, int listening, uint64_t deadline_ns, int *ret_fd,
                        struct td_err *err);
/* The numeric address and port of our end (or, with peer, of the other end). */
td_status doctor_socket_name(int fd, int peer, char host[64], uint16_t *ret_port,
                             struct td_err *err);

#endif
