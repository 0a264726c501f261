/* xfer_node.h - one end of a transfer for the tests and the bench: an endpoint with a pool of
 * patterned blocks, driven by commands. The same commands run in this process (node_local) or in
 * a child that executes this program again (node_spawn), so that one suite serves both and
 * either side can be stopped or killed. */
#ifndef XFER_NODE_H
#define XFER_NODE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/fake/verbs_fake.h"
#include "common/transfer/transfer.h"

#define NODE_MAX_IDS 1024

enum node_verb {
    NODE_OPEN = 1,
    NODE_CLOSE,
    NODE_GRANT,
    NODE_REVOKE,
    NODE_OP,
    NODE_SUBMIT,
    NODE_SUBMIT_PULL,
    NODE_SUBMIT_PART, /* offset, n_bytes */
    NODE_CANCEL,
    NODE_FINISHED,
    NODE_EVENT,
    NODE_FILL,
    NODE_CHECK,
    NODE_STATS,
    NODE_EXIT
};

struct node_command {
    enum node_verb verb;
    /* OPEN */
    enum td_xfer_path path;
    uint16_t port;
    bool shareable;
    uint32_t max_slots, max_ops, timeout_ms, lanes, digest_every;
    /* rdma: "" none; "real:DEVICES" libibverbs; else options of the fake, whose fabric is the
       file it names */
    char fabric[160];
    uint8_t ib_timeout, ib_retry; /* codes; 0: the defaults */
    bool rnr_never_waits, windows;
    enum td_xfer_gpu_flush gpu_flush;
    uint8_t qps_per_rail;
    uint32_t srq_peers;
    char tls[128], tls_ca[128]; /* "": none; else PREFIX of PREFIX.crt and PREFIX.key; the
                                   CA's file, "": anybody */
    char secret[128];           /* "": none; else the file of the cluster secret */
    bool pull;
    bool small_sockets; /* connections that come in have small receive buffers, which
                           do not grow */
    enum td_xfer_zerocopy zerocopy;
    char device[64]; /* "": a pool of the host's; else words of fake_device_open:
                        the pool lies in a device's memory */
    uint64_t block_bytes, layout_hash;
    int32_t n_blocks;
    /* the rest: GRANT, OP, SUBMIT, FILL, CHECK (ids); EVENT: deadline_ms is how long to wait */
    uint32_t id;
    int32_t first, n;
    uint64_t offset, n_bytes;
    bool final;
    uint32_t behind_id; /* SUBMIT: right behind it, of op behind_id, the n_behind
                           blocks whose ids follow, final */
    int32_t n_behind;
    uint64_t deadline_ms, user, seed; /* deadline_ms 0: never */
    bool by_id;                       /* FILL, CHECK: block ids[i] has the content seed +
                                         ids[i], not seed + i */
    uint32_t note_bytes;
    uint8_t note[64];
    uint32_t blob_bytes;
    uint8_t blob[512];
    int32_t ids[NODE_MAX_IDS];
};

struct node_reply {
    td_status status;
    uint32_t id;
    int32_t n;
    uint16_t port;
    bool ok; /* EVENT: there was one; CHECK: all bytes are right */
    uint32_t blob_bytes;
    uint8_t blob[512];
    struct td_xfer_event event;
    struct td_xfer_stats stats;
    uint32_t n_refusals; /* STATS: that were told, and the last of them */
    char refusal[160];
    char msg[256];
};

struct node;

struct node *node_local(void);
struct node *node_spawn(const char *program); /* PROGRAM --node FD */
int node_child_main(int fd);                  /* what main does for --node */
void node_do(struct node *n, const struct node_command *c, struct node_reply *ret_reply);
void node_free(struct node *n);                     /* ends the child */
pid_t node_pid(const struct node *n);               /* 0: local */
void node_kill(struct node *n);                     /* kill -9 and wait */
struct td_xfer *node_xfer(struct node *n);          /* local only */
struct fake_device *node_device(struct node *n);    /* local only; NULL: none */
struct td_fake_fabric *node_fabric(struct node *n); /* local only; NULL: none */

/* The pattern of block content (seed, position). */
void node_fill_bytes(uint8_t *to, uint64_t n_bytes, uint64_t seed);
bool node_check_bytes(const uint8_t *from, uint64_t n_bytes, uint64_t seed);

#endif
