/* wire.h - bytes on a transfer connection, and the grant blob. Pure; every field from outside is
 * checked here once.
 *
 * A connection carries frames: a header of 64 bytes, then `length` bytes of payload. Integers
 * are little-endian. docs/wire.md has the tables. */
#ifndef TD_TRANSFER_WIRE_H
#define TD_TRANSFER_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/device_memory.h"
#include "common/base/status.h"
#include "common/transfer/transfer.h"

#define TD_XFER_MAGIC 0x31584454u /* "TDX1" */
#define TD_XFER_WIRE_VERSION 4
/* largest DATA payload: a small transfer waits for at most one such frame of a large one */
#define TD_XFER_FRAME_DATA_MAX (1u << 20)
#define TD_XFER_PAYLOAD_MAX 4096u /* payload of every other frame */
#define TD_XFER_REF_MAX 1000      /* block ids in one REF */
#define TD_XFER_REASON_MAX 160
#define TD_XFER_KEY_BYTES 16
#define TD_XFER_HOST_MAX 64
#define TD_XFER_NAME_MAX 64
#define TD_XFER_LANES_MAX 8 /* sockets of one connection */
#define TD_XFER_RAILS_MAX 8 /* NICs of one connection, each side */
#define TD_XFER_RAIL_QPS_MAX 4
/* queue pairs of one connection: a bit each in FINAL's flags */
#define TD_XFER_QPS_MAX 16
#define TD_XFER_RKEYS_MAX 768   /* registrations x rails that fit into one RDMA_ACCEPT */
#define TD_XFER_RUNS_MAX 500    /* runs in one TARGETS */
#define TD_XFER_DIGESTS_MAX 500 /* entries in one DIGEST */

/* Who says it, and its payload (docs/wire.md). refusable: with a status that is the reason. */
enum td_xfer_frame_type {
    TD_XFER_HELLO = 1,     /* initiator, first: td_xfer_hello */
    TD_XFER_HELLO_ACK,     /* acceptor: td_xfer_hello; refusable */
    TD_XFER_MEM,           /* shm, shm-staged, sender: td_xfer_mem, and two descriptors */
    TD_XFER_OPEN,          /* sender: the grant's key */
    TD_XFER_DATA,          /* tcp, sender: bytes that belong at `offset` of the grant */
    TD_XFER_REF,           /* sender: u32 first, i32 block ids that may be copied or READ now */
    TD_XFER_FINAL,         /* sender: the note; nothing follows */
    TD_XFER_ABORT,         /* sender: the reason; ended without FINAL, no byte of it follows */
    TD_XFER_DONE,          /* receiver: every byte is applied */
    TD_XFER_FAIL,          /* receiver: the reason; the slot takes no more of this op */
    TD_XFER_PING,          /* both: alive */
    TD_XFER_RDMA_OFFER,    /* rdma, initiator: td_xfer_rdma_setup, keys if its blocks may be READ */
    TD_XFER_RDMA_ACCEPT,   /* rdma, acceptor: td_xfer_rdma_setup with its keys; refusable */
    TD_XFER_TARGETS,       /* rdma, receiver: td_xfer_run[], with windows each and its keys */
    TD_XFER_DIGEST,        /* sender, before FINAL: td_xfer_digest[] */
    TD_XFER_BYE,           /* both, last: the reason; AGAIN: it may open another connection */
    TD_XFER_DEVICE_OFFER,  /* cuda-ipc, sender: td_xfer_device_mem [, description]; a descriptor */
    TD_XFER_DEVICE_ACCEPT, /* cuda-ipc, receiver: it has read the probe; refusable */
    TD_XFER_LENT,          /* shm-staged, sender: td_xfer_lent: bytes for `offset` of the grant */
    TD_XFER_TAKEN,         /* shm-staged, receiver: does not read those at `offset` any more */
    TD_XFER_CHALLENGE,     /* cluster secret, acceptor: 32 random bytes */
    TD_XFER_PROOF,         /* cluster secret, initiator: its MAC, 32 bytes */
    TD_XFER_N_TYPES
};

/* ABORT on rdma: requests of the op are under way; its connection is about to end, and is fenced */
#define TD_XFER_ABORT_UNRETIRED 1

struct td_xfer_frame {
    uint32_t magic;
    uint8_t version, type;
    uint16_t flags; /* FINAL on rdma: a bit per queue pair; ABORT: ..._UNRETIRED; else 0 */
    uint32_t slot, generation;
    uint32_t op; /* the sender's op number; also the index of its control word (shm) */
    uint16_t attempt;
    int16_t status;  /* a td_status: ABORT, FAIL, BYE, HELLO_ACK */
    uint64_t handle; /* random per attempt, bound to the key by OPEN */
    uint64_t offset;
    uint32_t length;   /* payload bytes */
    uint32_t clock_us; /* sender's, mod 2^32: HELLO, OPEN, PING: now; FINAL: first submit; else 0 */
    uint64_t conn;     /* xor of both HELLO nonces; 0 in HELLO and HELLO_ACK */
    uint32_t last_us;  /* FINAL: the same at its final submit; else 0 */
    uint32_t crc;      /* CRC32C of the 60 bytes before it */
};
_Static_assert(sizeof(struct td_xfer_frame) == 64, "wire: frame header");
_Static_assert(offsetof(struct td_xfer_frame, handle) == 24 &&
                   offsetof(struct td_xfer_frame, conn) == 48,
               "wire: frame header");
_Static_assert(offsetof(struct td_xfer_frame, crc) == 60, "wire: the CRC closes the header");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire structs are copied as they are");

struct td_xfer_hello {
    uint64_t incarnation, layout_hash, block_bytes, nonce;
    uint8_t proof[TD_XFER_KEY_BYTES]; /* HELLO_ACK on shm: the proof that the blob named */
    char instance[TD_XFER_NAME_MAX];  /* NUL-terminated */
};
_Static_assert(sizeof(struct td_xfer_hello) == 112, "wire: hello");

/* With a cluster secret HELLO ends with the initiator's nonce, HELLO_ACK with a MAC. */
#define TD_XFER_SECRET_BYTES 32
struct td_xfer_secret_hello {
    struct td_xfer_hello hello;
    uint8_t secret[TD_XFER_SECRET_BYTES];
};
_Static_assert(sizeof(struct td_xfer_secret_hello) == 144, "wire: hello with a cluster secret");

struct td_xfer_mem {
    uint64_t arena_bytes, block_bytes;
    uint32_t n_blocks, n_words;
};
_Static_assert(sizeof(struct td_xfer_mem) == 24, "wire: mem");

struct td_xfer_lent {
    uint32_t place, n_bytes; /* in the ring; at most TD_XFER_FRAME_DATA_MAX */
};
_Static_assert(sizeof(struct td_xfer_lent) == 8, "wire: lent");

struct td_xfer_device_mem {
    uint8_t handle[64];                 /* of the pool's allocation; unused with a description */
    uint64_t offset;                    /* of the pool's block 0 in it */
    uint64_t process, address;          /* the sender's, random, and where block 0 lies there */
    uint64_t block_bytes, probe_offset; /* probe_offset: from block 0 to the probe's 64 bytes */
    uint32_t n_blocks, n_words;
    uint8_t probe[64];
    char uuid[48], name[64]; /* the device's, NUL-terminated */
};
_Static_assert(sizeof(struct td_xfer_device_mem) == 288 &&
                   288 + TD_DEVICE_POOL_BYTES <= TD_XFER_PAYLOAD_MAX,
               "wire: device mem");

struct td_xfer_rail {
    uint8_t gid[16];
    uint16_t lid;
    uint8_t ethernet, index; /* index: in its side's list; rail i talks to rail i */
    uint32_t mtu_bytes;
    uint32_t qpn[TD_XFER_RAIL_QPS_MAX], psn[TD_XFER_RAIL_QPS_MAX];
};
_Static_assert(sizeof(struct td_xfer_rail) == 56, "wire: rail");

/* The acceptor answers with the offered rails that it has too, and as many queue pairs as both
 * allow. Block b of the pool lies at base + b * block_bytes in registration b * block_bytes /
 * region_bytes, whose key on rail r is rkey[region * n_rails + r]. */
struct td_xfer_rdma_setup {
    uint8_t n_rails, n_qps; /* n_qps: per rail */
    uint8_t rd_atomic_in, rd_atomic_out;
    uint32_t recv_wr; /* last words that a queue pair here takes unread */
    uint32_t n_regions;
    /* 1 in an ACCEPT with memory windows: rkey[] is all 0, TARGETS bring the keys; else 0 */
    uint16_t windows;
    uint16_t rails;   /* ACCEPT: bit i: it has a rail i, up or not; OFFER: 0 */
    uint64_t base, region_bytes;
    uint64_t probe; /* address of TD_XFER_QPS_MAX probe cells of 64 bytes */
    uint32_t probe_rkey[TD_XFER_RAILS_MAX];
    struct td_xfer_rail rail[TD_XFER_RAILS_MAX];
    uint32_t rkey[TD_XFER_RKEYS_MAX]; /* only the first n_regions * n_rails travel */
};
#define TD_XFER_RDMA_SETUP_BYTES offsetof(struct td_xfer_rdma_setup, rkey)
_Static_assert(TD_XFER_RDMA_SETUP_BYTES == 520, "wire: rdma setup");
_Static_assert(sizeof(struct td_xfer_rdma_setup) <= TD_XFER_PAYLOAD_MAX, "wire: rdma setup");

struct td_xfer_run { /* pool blocks [block, block + n) */
    int32_t block, n;
};
_Static_assert(sizeof(struct td_xfer_run) * TD_XFER_RUNS_MAX <= TD_XFER_PAYLOAD_MAX,
               "wire: targets");
/* A run in TARGETS, then its key for each of n_keys queue pairs; 0: there are no windows. */
#define TD_XFER_RUN_BYTES(n_keys) (sizeof(struct td_xfer_run) + 4 * (size_t)(n_keys))

struct td_xfer_digest {
    uint32_t block, crc; /* grant block; CRC32C of its bytes */
};
_Static_assert(sizeof(struct td_xfer_digest) * TD_XFER_DIGESTS_MAX <= TD_XFER_PAYLOAD_MAX,
               "wire: digests");

/* Immediate data of a WRITE_WITH_IMM: slot 16, generation 8, attempt 4, kind 4. */
enum td_xfer_imm_kind { TD_XFER_IMM_FINAL = 1, TD_XFER_IMM_PROBE = 2 };
static inline uint32_t td_xfer_imm(uint32_t slot, uint32_t generation, uint32_t attempt,
                                   enum td_xfer_imm_kind kind)
{
    return slot << 16 | (generation & 0xff) << 8 | (attempt & 0xf) << 4 | (uint32_t)kind;
}

/* What a sender needs to reach one slot. It carries the key, so it is never logged. */
struct td_xfer_grant_blob {
    uint32_t magic; /* "TDG1" */
    uint16_t version, bytes;
    uint32_t crc; /* CRC32C of the blob with this field 0 */
    uint32_t slot, generation;
    int32_t n_blocks;
    uint64_t incarnation, layout_hash, block_bytes;
    uint16_t port;    /* 0: no tcp */
    uint8_t path;     /* enum td_xfer_path: what the receiver allows */
    uint8_t has_rdma; /* 1: it has RDMA devices */
    uint8_t tls;      /* 1: its port speaks TLS */
    uint8_t device;   /* 1: its pool lies in device memory */
    uint8_t secret;   /* 1: it talks to those alone who prove the cluster secret */
    uint8_t reserved; /* 0 */
    uint8_t key[TD_XFER_KEY_BYTES], proof[TD_XFER_KEY_BYTES];
    char host[TD_XFER_HOST_MAX];     /* numeric address */
    char shm_name[TD_XFER_NAME_MAX]; /* abstract unix socket without its leading NUL; "" = no shm */
    char instance[TD_XFER_NAME_MAX];
};
_Static_assert(sizeof(struct td_xfer_grant_blob) == 280, "wire: grant blob");
_Static_assert(sizeof(struct td_xfer_grant_blob) <= TD_XFER_BLOB_MAX, "wire: grant blob");

/* Fills magic, version and crc and copies the header out. */
void td_xfer_frame_encode(struct td_xfer_frame *frame, uint8_t ret_bytes[64]);
/* TD_ERR_CORRUPT with the field's name, or the length that does not fit the type. */
td_status td_xfer_frame_decode(const uint8_t bytes[64], struct td_xfer_frame *ret_frame,
                               struct td_err *err);

void td_xfer_grant_encode(struct td_xfer_grant_blob *grant, uint8_t *ret_bytes);
td_status td_xfer_grant_decode(const uint8_t *bytes, size_t n_bytes,
                               struct td_xfer_grant_blob *ret_grant, struct td_err *err);

/* TD_ERR_CORRUPT with the field's name. needs_keys: it is an ACCEPT. */
td_status td_xfer_rdma_setup_decode(const uint8_t *bytes, uint32_t n_bytes, bool needs_keys,
                                    struct td_xfer_rdma_setup *ret_setup, struct td_err *err);

/* Runs of a TARGETS and, run by run, n_keys keys of each. TD_ERR_CORRUPT: the length does not
 * fit. What runs say is checked by the core. */
td_status td_xfer_targets_decode(const uint8_t *bytes, uint32_t n_bytes, uint32_t n_keys,
                                 struct td_xfer_run ret_runs[TD_XFER_RUNS_MAX],
                                 uint32_t ret_keys[TD_XFER_PAYLOAD_MAX / 4], int32_t *ret_n);

/* True iff equal; the time does not depend on where they differ. */
bool td_xfer_key_equal(const uint8_t *a, const uint8_t *b);

#endif
