/* xfer_grant_fuzz.c - grant blobs from outside, as they are and with their checksum repaired.
 * What is taken must encode to the same bytes. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/transfer/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void try_one(const uint8_t *bytes, size_t n_bytes)
{
    struct td_xfer_grant_blob g;
    struct td_err err = {0};
    uint8_t again[sizeof g];
    td_status status = td_xfer_grant_decode(bytes, n_bytes, &g, &err);
    TD_ASSERT((status == TD_OK) == (err.msg[0] == 0));
    if (status) return;
    TD_ASSERT(strlen(g.host) < sizeof g.host && strlen(g.shm_name) < sizeof g.shm_name &&
              strlen(g.instance) < sizeof g.instance);
    TD_ASSERT(g.n_blocks >= 0 && g.n_blocks <= TD_XFER_MAX_BLOCKS && g.path < TD_XFER_N_PATHS);
    td_xfer_grant_encode(&g, again);
    TD_ASSERT(memcmp(again, bytes, sizeof again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct td_xfer_grant_blob g;
    uint8_t repaired[sizeof g];
    try_one(data, n_bytes);
    if (n_bytes < sizeof g) return 0;
    memcpy(&g, data, sizeof g);
    td_xfer_grant_encode(&g, repaired);
    try_one(repaired, sizeof repaired);
    return 0;
}
