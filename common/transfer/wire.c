/* wire.c - see wire.h. What decoded fields say of slots, ops and blocks is checked by the core. */
#include "common/transfer/wire.h"

#include <inttypes.h>
#include <string.h>

#include "common/base/hash.h"

#define GRANT_MAGIC 0x31474454u /* "TDG1" */
#define corrupt(err, ...) td_fail(err, TD_ERR_CORRUPT, __VA_ARGS__)

void td_xfer_frame_encode(struct td_xfer_frame *frame, uint8_t ret_bytes[64])
{
    frame->magic = TD_XFER_MAGIC;
    frame->version = TD_XFER_WIRE_VERSION;
    frame->crc = td_crc32c(0, frame, offsetof(struct td_xfer_frame, crc));
    memcpy(ret_bytes, frame, sizeof *frame);
}

/* Payload bytes of a type, and their unit. refusable: with a status it is a reason. */
static const struct bounds {
    uint32_t min, max, unit;
    bool refusable;
} BOUNDS[TD_XFER_N_TYPES] = {
#define SIZE(what) (uint32_t)sizeof(struct what)
    [TD_XFER_HELLO] = {SIZE(td_xfer_hello), SIZE(td_xfer_secret_hello), 1, false},
    [TD_XFER_HELLO_ACK] = {SIZE(td_xfer_hello), SIZE(td_xfer_secret_hello), 1, true},
    [TD_XFER_CHALLENGE] = {TD_XFER_SECRET_BYTES, TD_XFER_SECRET_BYTES, 1, false},
    [TD_XFER_PROOF] = {TD_XFER_SECRET_BYTES, TD_XFER_SECRET_BYTES, 1, false},
    [TD_XFER_MEM] = {SIZE(td_xfer_mem), SIZE(td_xfer_mem), 1, false},
    [TD_XFER_OPEN] = {TD_XFER_KEY_BYTES, TD_XFER_KEY_BYTES, 1, false},
    [TD_XFER_DATA] = {1, TD_XFER_FRAME_DATA_MAX, 1, false},
    [TD_XFER_REF] = {8, 4 + 4 * TD_XFER_REF_MAX, 4, false},
    [TD_XFER_FINAL] = {0, TD_XFER_NOTE_MAX, 1, false},
    [TD_XFER_ABORT] = {0, TD_XFER_REASON_MAX, 1, false},
    [TD_XFER_FAIL] = {0, TD_XFER_REASON_MAX, 1, false},
    [TD_XFER_BYE] = {0, TD_XFER_REASON_MAX, 1, false},
    [TD_XFER_DONE] = {0, 0, 1, false},
    [TD_XFER_PING] = {0, 0, 1, false},
    [TD_XFER_RDMA_OFFER] = {TD_XFER_RDMA_SETUP_BYTES, SIZE(td_xfer_rdma_setup), 4, false},
    [TD_XFER_RDMA_ACCEPT] = {TD_XFER_RDMA_SETUP_BYTES + 4, SIZE(td_xfer_rdma_setup), 4, true},
    [TD_XFER_TARGETS] = {SIZE(td_xfer_run), TD_XFER_PAYLOAD_MAX, 4, false},
    [TD_XFER_DIGEST] = {SIZE(td_xfer_digest), TD_XFER_DIGESTS_MAX *SIZE(td_xfer_digest),
                        SIZE(td_xfer_digest), false},
    [TD_XFER_DEVICE_OFFER] = {SIZE(td_xfer_device_mem),
                              SIZE(td_xfer_device_mem) + TD_DEVICE_POOL_BYTES, 1, false},
    [TD_XFER_DEVICE_ACCEPT] = {0, 0, 1, true},
    [TD_XFER_LENT] = {SIZE(td_xfer_lent), SIZE(td_xfer_lent), 1, false},
    [TD_XFER_TAKEN] = {0, 0, 1, false},
};

static bool length_fits(const struct td_xfer_frame *f)
{
    const struct bounds *b = &BOUNDS[f->type];
    if (b->refusable && f->status) return f->length <= TD_XFER_REASON_MAX;
    /* with a cluster secret or without: nothing in between */
    if ((f->type == TD_XFER_HELLO || f->type == TD_XFER_HELLO_ACK) && f->length != b->min)
        return f->length == b->max;
    return f->length >= b->min && f->length <= b->max && f->length % b->unit == 0;
}

td_status td_xfer_frame_decode(const uint8_t bytes[64], struct td_xfer_frame *ret_frame,
                               struct td_err *err)
{
    struct td_xfer_frame f;
    memcpy(&f, bytes, sizeof f);
    if (f.magic != TD_XFER_MAGIC)
        return corrupt(err, "frame: magic is %08x, must be %08x", f.magic, TD_XFER_MAGIC);
    if (f.version != TD_XFER_WIRE_VERSION)
        return corrupt(err, "frame: version is %u, this side speaks %u", f.version,
                       TD_XFER_WIRE_VERSION);
    uint32_t crc = td_crc32c(0, &f, offsetof(struct td_xfer_frame, crc));
    if (f.crc != crc) return corrupt(err, "frame: header crc is %08x, computed %08x", f.crc, crc);
    if (f.type < TD_XFER_HELLO || f.type >= TD_XFER_N_TYPES)
        return corrupt(err, "frame: unknown type %u", f.type);
    bool unretired = f.type == TD_XFER_ABORT && f.flags == TD_XFER_ABORT_UNRETIRED;
    bool is_final = f.type == TD_XFER_FINAL, stamped = is_final || f.type == TD_XFER_HELLO ||
                                                       f.type == TD_XFER_OPEN ||
                                                       f.type == TD_XFER_PING;
    if ((f.flags && !unretired && !is_final) || (f.clock_us && !stamped) ||
        (f.last_us && !is_final))
        return corrupt(err, "frame: reserved fields of type %u are not 0", f.type);
    if (f.status > 0) return corrupt(err, "frame: status is %d, must be <= 0", f.status);
    if (!length_fits(&f))
        return corrupt(err, "frame: length %u does not fit type %u", f.length, f.type);
    *ret_frame = f;
    return TD_OK;
}

void td_xfer_grant_encode(struct td_xfer_grant_blob *grant, uint8_t *ret_bytes)
{
    grant->magic = GRANT_MAGIC;
    grant->version = TD_XFER_WIRE_VERSION;
    grant->bytes = sizeof *grant;
    grant->crc = 0;
    grant->crc = td_crc32c(0, grant, sizeof *grant);
    memcpy(ret_bytes, grant, sizeof *grant);
}

/* NUL-terminated, printable ASCII, and nothing after the NUL. */
static bool text_ok(const char *text, size_t max)
{
    size_t n = strnlen(text, max);
    if (n == max) return false;
    for (size_t i = 0; i < n; i++)
        if (text[i] < 0x21 || text[i] > 0x7e) return false;
    for (size_t i = n; i < max; i++)
        if (text[i]) return false;
    return true;
}

td_status td_xfer_grant_decode(const uint8_t *bytes, size_t n_bytes,
                               struct td_xfer_grant_blob *ret_grant, struct td_err *err)
{
    struct td_xfer_grant_blob g;
    if (n_bytes != sizeof g)
        return td_fail(err, TD_ERR_INVALID, "grant: %zu bytes, must be %zu", n_bytes, sizeof g);
    memcpy(&g, bytes, sizeof g);
    if (g.magic != GRANT_MAGIC)
        return td_fail(err, TD_ERR_INVALID, "grant: magic is %08x, must be %08x", g.magic,
                       GRANT_MAGIC);
    if (g.version != TD_XFER_WIRE_VERSION)
        return td_fail(err, TD_ERR_UNSUPPORTED, "grant: version is %u, this side speaks %u",
                       g.version, TD_XFER_WIRE_VERSION);
    uint32_t crc = g.crc;
    g.crc = 0;
    g.crc = td_crc32c(0, &g, sizeof g);
    if (g.crc != crc || g.bytes != sizeof g)
        return corrupt(err, "grant: crc is %08x, computed %08x", crc, g.crc);
    if (g.n_blocks < 0 || g.n_blocks > TD_XFER_MAX_BLOCKS)
        return corrupt(err, "grant: n_blocks is %d, must be 0..%d", g.n_blocks, TD_XFER_MAX_BLOCKS);
    if (g.block_bytes < 1 || g.block_bytes >= 1ull << 30)
        return corrupt(err, "grant: block_bytes is %" PRIu64 ", must be 1..2^30-1", g.block_bytes);
    if (g.path >= TD_XFER_N_PATHS)
        return corrupt(err, "grant: path is %u, must be 0..%d", g.path, TD_XFER_N_PATHS - 1);
    if (g.has_rdma > 1 || g.tls > 1 || g.device > 1 || g.secret > 1)
        return corrupt(
            err, "grant: has_rdma is %u, tls %u, device %u and secret %u, each must be 0 or 1",
            g.has_rdma, g.tls, g.device, g.secret);
    if (g.reserved) return corrupt(err, "grant: reserved bytes are not 0");
    if (!text_ok(g.host, sizeof g.host) || !text_ok(g.shm_name, sizeof g.shm_name) ||
        !text_ok(g.instance, sizeof g.instance))
        return corrupt(err, "grant: host, shm name or instance is not plain text");
    if (!g.port && !g.shm_name[0]) return corrupt(err, "grant: names no way to reach its receiver");
    *ret_grant = g;
    return TD_OK;
}

td_status td_xfer_rdma_setup_decode(const uint8_t *bytes, uint32_t n_bytes, bool needs_keys,
                                    struct td_xfer_rdma_setup *ret_setup, struct td_err *err)
{
    struct td_xfer_rdma_setup s = {0};
    if (n_bytes < TD_XFER_RDMA_SETUP_BYTES || n_bytes > sizeof s)
        return corrupt(err, "rdma setup: %u bytes, must be %zu..%zu", n_bytes,
                       TD_XFER_RDMA_SETUP_BYTES, sizeof s);
    memcpy(&s, bytes, n_bytes);
    if (s.n_rails < 1 || s.n_rails > TD_XFER_RAILS_MAX)
        return corrupt(err, "rdma setup: n_rails is %u, must be 1..%d", s.n_rails,
                       TD_XFER_RAILS_MAX);
    if (s.n_qps < 1 || s.n_qps > TD_XFER_RAIL_QPS_MAX || s.n_qps * s.n_rails > TD_XFER_QPS_MAX)
        return corrupt(err,
                       "rdma setup: n_qps is %u on %u rails, must be 1..%d and at most %d in all",
                       s.n_qps, s.n_rails, TD_XFER_RAIL_QPS_MAX, TD_XFER_QPS_MAX);
    for (uint32_t r = 0; r < s.n_rails; r++) {
        const struct td_xfer_rail *rail = &s.rail[r];
        if (rail->mtu_bytes < 256 || rail->mtu_bytes > 4096 ||
            (rail->mtu_bytes & (rail->mtu_bytes - 1)))
            return corrupt(err,
                           "rdma setup: rail %u has mtu %u, must be 256, 512, 1024, 2048 or 4096",
                           r, rail->mtu_bytes);
        if (rail->ethernet > 1 || rail->index >= TD_XFER_RAILS_MAX ||
            (r && rail->index <= s.rail[r - 1].index))
            return corrupt(
                err,
                "rdma setup: rail %u has kind %u and index %u, which must rise and be below %d", r,
                rail->ethernet, rail->index, TD_XFER_RAILS_MAX);
        for (uint32_t q = 0; q < s.n_qps; q++)
            if (rail->qpn[q] >> 24 || rail->psn[q] >> 24)
                return corrupt(
                    err, "rdma setup: rail %u queue pair %u: number %u or psn %u is over 24 bits",
                    r, q, rail->qpn[q], rail->psn[q]);
    }
    if (s.recv_wr < 1) return corrupt(err, "rdma setup: recv_wr is %u, must be >= 1", s.recv_wr);
    if (!needs_keys && s.rails)
        return corrupt(err, "rdma setup: rails is %u, must be 0 in an OFFER", s.rails);
    if (s.windows > needs_keys)
        return corrupt(err, "rdma setup: windows is %u, must be 0, or 1 in an ACCEPT", s.windows);
    uint64_t n_keys = (uint64_t)s.n_regions * s.n_rails;
    if (n_keys > TD_XFER_RKEYS_MAX || (needs_keys && !n_keys) ||
        n_bytes != TD_XFER_RDMA_SETUP_BYTES + n_keys * 4)
        return corrupt(err, "rdma setup: %u regions on %u rails do not fit %u bytes", s.n_regions,
                       s.n_rails, n_bytes);
    if (n_keys && (s.region_bytes == 0 || s.base + s.n_regions * s.region_bytes < s.base))
        return corrupt(err,
                       "rdma setup: regions of %" PRIu64 " bytes at %016" PRIx64
                       " do not fit the address space",
                       s.region_bytes, s.base);
    *ret_setup = s;
    return TD_OK;
}

td_status td_xfer_targets_decode(const uint8_t *bytes, uint32_t n_bytes, uint32_t n_keys,
                                 struct td_xfer_run ret_runs[TD_XFER_RUNS_MAX],
                                 uint32_t ret_keys[TD_XFER_PAYLOAD_MAX / 4], int32_t *ret_n)
{
    size_t each = TD_XFER_RUN_BYTES(n_keys), n = n_bytes / each;
    if (n_keys > TD_XFER_QPS_MAX || n_bytes % each || n < 1 || n > TD_XFER_RUNS_MAX)
        return TD_ERR_CORRUPT;
    for (size_t i = 0; i < n; i++, bytes += each) {
        memcpy(&ret_runs[i], bytes, sizeof ret_runs[i]);
        memcpy(&ret_keys[i * n_keys], bytes + sizeof ret_runs[i], 4 * (size_t)n_keys);
    }
    *ret_n = (int32_t)n;
    return TD_OK;
}

bool td_xfer_key_equal(const uint8_t *a, const uint8_t *b)
{
    volatile uint8_t differ = 0;
    for (int i = 0; i < TD_XFER_KEY_BYTES; i++) differ = (uint8_t)(differ | (a[i] ^ b[i]));
    return differ == 0;
}
