/* lazy_experts.h - experts that are packed when a row first chooses them, and not at load.
 *
 * An expert has a place in an arena of address space whether it is packed or not; memory comes to
 * the place when it is packed, and goes when it gives way to another. What is in a place then is
 * what packing at load would have put there, bit for bit: packing is a function of the file.
 *
 * A bound is on the bytes of places that have memory. Where a group of rows needs experts for which
 * there is no room, those that were chosen longest ago give way, and never one that the group
 * needs. So the bound must hold the experts of any one layer: all may be chosen at once.
 *
 * Threads: the parts of a forward. Between two of their meetings an expert is packed or not for all
 * of them, so they look without a lock, and what they do about it they do together. */
#ifndef TD_MODEL_LAZY_EXPERTS_H
#define TD_MODEL_LAZY_EXPERTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/mem.h"
#include "common/base/status.h"

struct td_lazy_experts;

/* Packs chunk `chunk` of expert `index`, which is at `to`. Any part, several chunks at once. */
typedef void td_lazy_pack_fn(void *ctx, int32_t index, int32_t chunk, int part);

struct td_lazy_config {
    /* [n_layers * n_experts], expert e of layer i at i * n_experts + e: bytes that each takes, and
     * into how many chunks its packing is cut. 0: another rank's, or of a layer without experts */
    const size_t *bytes;
    const int32_t *n_chunks;
    int32_t n_layers, n_experts;
    uint64_t most_bytes; /* of places with memory; UINT64_MAX: of all */
    int32_t n_ranks;     /* among which the operator's bound was divided: for errors */
    td_lazy_pack_fn *pack;
    void *ctx;
};

/* Copies what it needs of *config; takes address space and no memory. TD_ERR_INVALID: the bound
 * does not hold the experts of a layer. TD_ERR_NOMEM: more than is available. */
td_status td_lazy_experts_create(const struct td_lazy_config *config,
                                 struct td_lazy_experts **ret_lazy, struct td_err *err);
void td_lazy_experts_destroy(struct td_lazy_experts *z); /* NULL is allowed */

/* The place of an expert: 64-byte aligned, and zeroed before it is packed. */
uint8_t *td_lazy_experts_place(const struct td_lazy_experts *z, int32_t index);

/* Before the products of a layer: packs those of experts [from, end) that have rows, which is
 * first[e] < first[e + 1]. All parts call with the same arguments; meet(ctx) is where they wait for
 * each other, which they do only if one of the experts was not packed. */
struct td_lazy_team {
    int part, n_parts;
    void (*meet)(void *ctx);
    void *ctx;
};
void td_lazy_experts_need(struct td_lazy_experts *z, const struct td_lazy_team *team, int32_t layer,
                          const int32_t *first, int32_t from, int32_t end);

struct td_expert_memory;
/* Part 0's thread, outside of a forward. */
void td_lazy_experts_memory(const struct td_lazy_experts *z, struct td_expert_memory *ret);

#endif
