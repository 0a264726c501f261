/* xfer_wire.h - bytes on a transfer connection, and the grant blob. Pure; every field from outside is checked here once.
 *
 * A connection carries frames: a header of 64 bytes, then `length` bytes of payload. Integers are little-endian. README.md has the tables. */
#ifndef TD_XFER_WIRE_H
#define TD_XFER_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/xfer/xfer.h"

#define TD_XFER_MAGIC 0x31584454u         /* "TDX1" */
#define TD_XFER_WIRE_VERSION 1
#define TD_XFER_FRAME_DATA_MAX (1u << 20) /* payload of DATA: so long a small transfer may wait behind a large one */
#define TD_XFER_PAYLOAD_MAX 4096u         /* payload of every other frame */
#define TD_XFER_REF_MAX 1000              /* block ids in one REF */
#define TD_XFER_REASON_MAX 160
#define TD_XFER_KEY_BYTES 16
#define TD_XFER_HOST_MAX 64
#define TD_XFER_NAME_MAX 64

enum td_xfer_frame_type {
    TD_XFER_HELLO = 1,  /* both ways first; payload td_xfer_hello */
    TD_XFER_HELLO_ACK,  /* status != 0: refused, payload is the reason; else payload td_xfer_hello */
    TD_XFER_MEM,        /* shm, sender: payload td_xfer_mem, two descriptors ride along: arena (read-only), control words */
    TD_XFER_OPEN,       /* sender: binds op/attempt/handle to slot/generation; payload is the grant's key */
    TD_XFER_DATA,       /* tcp, sender: payload belongs at `offset` of the grant */
    TD_XFER_REF,        /* shm, sender: payload u32 first, i32 block ids: these source blocks may be copied now */
    TD_XFER_FINAL,      /* sender: nothing follows; offset = all bytes of the grant, payload is the note */
    TD_XFER_ABORT,      /* sender: this op ended without FINAL; payload is the reason, no byte of it follows (writer retired) */
    TD_XFER_DONE,       /* receiver: every byte is applied */
    TD_XFER_FAIL,       /* receiver: the slot takes nothing more from this op; payload is the reason */
    TD_XFER_PING,       /* both: alive */
    TD_XFER_N_TYPES
};

struct td_xfer_frame {
    uint32_t magic;
    uint8_t version, type;
    uint16_t flags;       /* 0 */
    uint32_t slot, generation;
    uint32_t op;          /* the sender's op number; also the index of its control word (shm) */
    uint16_t attempt;
    int16_t status;       /* a td_status: ABORT, FAIL, HELLO_ACK */
    uint64_t handle;      /* random per attempt, bound to the key by OPEN */
    uint64_t offset;
    uint32_t length;      /* payload bytes */
    uint32_t reserved;    /* 0 */
    uint64_t conn;        /* xor of both HELLO nonces; 0 in HELLO and HELLO_ACK */
    uint32_t reserved2;   /* 0 */
    uint32_t crc;         /* CRC32C of the 60 bytes before it */
};
_Static_assert(sizeof(struct td_xfer_frame) == 64, "wire: frame header");
_Static_assert(offsetof(struct td_xfer_frame, handle) == 24 && offsetof(struct td_xfer_frame, conn) == 48, "wire: frame header");
_Static_assert(offsetof(struct td_xfer_frame, crc) == 60, "wire: the CRC closes the header");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire structs are copied as they are");

struct td_xfer_hello {
    uint64_t incarnation, layout_hash, block_bytes, nonce;
    uint8_t proof[TD_XFER_KEY_BYTES]; /* HELLO_ACK on shm: the proof that the blob named */
    char instance[TD_XFER_NAME_MAX];  /* NUL-terminated */
};
_Static_assert(sizeof(struct td_xfer_hello) == 112, "wire: hello");

struct td_xfer_mem {
    uint64_t arena_bytes, block_bytes;
    uint32_t n_blocks, n_words;
};
_Static_assert(sizeof(struct td_xfer_mem) == 24, "wire: mem");

/* The grant blob: what a sender needs to reach one slot. It carries the key, so it travels only over authenticated channels and is never logged. */
struct td_xfer_grant_blob {
    uint32_t magic;       /* "TDG1" */
    uint16_t version, bytes;
    uint32_t crc;         /* CRC32C of the blob with this field 0 */
    uint32_t slot, generation;
    int32_t n_blocks;
    uint64_t incarnation, layout_hash, block_bytes;
    uint16_t port;        /* 0: no tcp */
    uint8_t path;         /* enum td_xfer_path: what the receiver allows */
    uint8_t reserved[5];  /* 0 */
    uint8_t key[TD_XFER_KEY_BYTES], proof[TD_XFER_KEY_BYTES];
    char host[TD_XFER_HOST_MAX];     /* numeric address */
    char shm_name[TD_XFER_NAME_MAX]; /* abstract unix socket without its leading NUL; "" = no shm */
    char instance[TD_XFER_NAME_MAX];
};
_Static_assert(sizeof(struct td_xfer_grant_blob) == 280, "wire: grant blob");
_Static_assert(sizeof(struct td_xfer_grant_blob) <= TD_XFER_BLOB_MAX, "wire: grant blob");

/* Fills magic, version and crc and copies the header out. */
void td_xfer_frame_encode(struct td_xfer_frame *frame, uint8_t ret_bytes[64]);
/* TD_ERR_CORRUPT with the field's name: magic, version, crc, type, reserved fields, length against the type's bound. */
td_status td_xfer_frame_decode(const uint8_t bytes[64], struct td_xfer_frame *ret_frame, struct td_err *err);

void td_xfer_grant_encode(struct td_xfer_grant_blob *grant, uint8_t *ret_bytes);
td_status td_xfer_grant_decode(const uint8_t *bytes, size_t n_bytes, struct td_xfer_grant_blob *ret_grant, struct td_err *err);

/* True iff equal; the time does not depend on where they differ. */
bool td_xfer_key_equal(const uint8_t *a, const uint8_t *b);

#endif
