/* xfer_soak.h - what the soak's driver (xfer_soak.c) and its endpoints (xfer_soak_end.c) share.
 *
 * One piece of memory, made before anything is forked: the pools of all endpoints, the jobs (one
 * transfer each at a time) and two rings per endpoint. An endpoint is a thread of the driver's
 * process or a child; it does what the commands say, looks at every block it is about to give away
 * and at every block it gets back, and tells what happened. The driver alone decides and counts. So
 * a child that is killed takes no truth with it: what it had published stands, its blocks are in
 * the driver's hands, and its successor works on the same pool.
 *
 * Content. Destination blocks that belong to nobody hold a poison, source blocks that belong to
 * nobody hold junk; both name the block. A transfer's source block i holds a pattern of
 * (transfer, i). Who writes where he must not, changes one of these, and it is looked at when
 * the block is granted, READY, given back, submitted, and at the end. */
#ifndef XFER_SOAK_H
#define XFER_SOAK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/wakeup.h"
#include "common/base/mem.h"
#include "common/transfer/transfer.h"

enum {
    SOAK_BLOCKS = 256,
    SOAK_BLOCK_BYTES = 4096,
    SOAK_JOBS = 32,
    SOAK_SENDERS = 3,
    SOAK_RECEIVERS = 2,
    SOAK_ENDS = SOAK_SENDERS + SOAK_RECEIVERS,
    SOAK_RING = 1024,
    SOAK_DEVICES = 2
};

/* What --break plants, each of which its checker must report under this name. */
enum soak_break {
    BREAK_NONE = 0,
    BREAK_CORRUPT,
    BREAK_NOTE,
    BREAK_LATE,
    BREAK_STRAY,
    BREAK_STRAY_END,
    BREAK_SOURCE,
    BREAK_SOURCE_FREE,
    BREAK_HUNG_SLOT,
    BREAK_HUNG_OP,
    BREAK_TWICE,
    BREAK_LOST_READY,
    BREAK_SLOT_LEAK,
    BREAK_OP_LEAK,
    BREAK_FD_LEAK,
    BREAK_HEAP_LEAK,
    BREAK_VACUOUS,
    BREAK_UNTOUCHED,
    N_BREAKS
};
extern const char *const soak_break_names[N_BREAKS]; /* what the violation is called */
extern const char *const soak_break_words[N_BREAKS]; /* what is planted */

enum soak_verb {
    /* commands */
    SOAK_GRANT = 1,
    SOAK_REVOKE,
    SOAK_OP,
    SOAK_SUBMIT,
    SOAK_CANCEL,
    SOAK_CUT,
    SOAK_PORT,
    SOAK_GID,
    SOAK_RULE,
    SOAK_STATE,
    SOAK_CLOSE,
    SOAK_OPENED,
    SOAK_GRANTED,
    SOAK_STARTED,
    SOAK_EVENT,
    SOAK_CLOSED,
    SOAK_VIOLATION /* news */
};

struct soak_message {
    enum soak_verb verb;
    uint32_t job, id; /* id: slot or op */
    uint64_t user;    /* transfer * SOAK_JOBS + job */
    td_status status;
    enum td_xfer_event_kind kind;
    enum td_xfer_path path;
    int32_t first, n;
    bool final, replay, pull;
    uint64_t bytes, deadline_ns;
    char text[TD_XFER_NOTE_MAX / 4];
};

/* One writer, one reader. */
struct soak_ring {
    _Alignas(64) _Atomic uint32_t head;
    _Alignas(64) _Atomic uint32_t tail;
    struct soak_message at[SOAK_RING];
};

/* Written by the driver before the command that names the job; the blob by the receiver. */
struct soak_job {
    uint64_t user;
    int32_t n;
    int32_t src[SOAK_BLOCKS], dst[SOAK_BLOCKS];
    uint64_t slot_deadline_ns, op_deadline_ns;
    uint32_t slot, op;
    uint32_t blob_bytes;
    uint8_t blob[512];
};

/* What is counted when an endpoint closes. */
struct soak_leaks {
    int fds;
    int64_t heap_bytes, rss_growth_bytes;
    uint32_t n_slots, n_ops;
};

struct soak_end {
    struct td_wakeup wakeup;
    struct soak_ring commands, news;
    struct td_arena pool;
    bool is_receiver;
    uint32_t index;
    uint16_t port; /* 0 until the first open */
    uint64_t incarnation;
    char fabric[256]; /* options of the fake; "" none */
    uint32_t n_gid_changes;
    _Atomic bool state_told; /* SOAK_STATE was done */
    struct soak_leaks leaks;
    struct td_xfer_stats stats;
};

struct soak_shared {
    struct td_wakeup wakeup; /* the driver's */
    struct soak_job job[SOAK_JOBS];
    struct soak_end end[SOAK_ENDS];
    enum td_xfer_path path;
    enum soak_break broken;
    uint32_t timeout_ms;
    bool processes;            /* endpoints are children */
    _Atomic uint32_t n_breaks; /* chances that were passed; the 20th is taken */
};

/* The endpoint's life: opens, obeys, closes at SOAK_CLOSE. In a child or a thread of its own. */
void soak_end_run(struct soak_shared *s, uint32_t end);

bool soak_ring_put(struct soak_ring *r, const struct soak_message *m);
bool soak_ring_get(struct soak_ring *r, struct soak_message *ret_m);

uint8_t *soak_block(const struct soak_end *e, int32_t block);
uint64_t soak_content(uint64_t user, int32_t i); /* seeds of patterns */
uint64_t soak_free(const struct soak_end *e, int32_t block);
void soak_fill(uint8_t *to, uint64_t seed);
bool soak_check(const uint8_t *from, uint64_t seed);
bool soak_breaks(struct soak_shared *s, enum soak_break what);

void soak_cut(unsigned which); /* shuts down sockets of endpoints in this
                                  process; a bit each in turn: all of them
                                  or some */
int soak_count_fds(void);
int64_t soak_heap_bytes(void); /* 0 where the allocator does not tell
                                  (sanitizers) */
int64_t soak_rss_bytes(void);

/* xfer_soak_state.c: slots, ops, connections and queue pairs of an endpoint, on stderr. */
void soak_print_state(struct td_xfer *x, uint32_t end);

/* xfer_soak_storm.c: 0, or 1 with the violation on stderr. */
int soak_reconnects(enum td_xfer_path path, int n);
int soak_storm(enum td_xfer_path path, int n_peers);

#endif
