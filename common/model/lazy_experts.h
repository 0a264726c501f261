/* lazy_experts.h - experts that are packed when a row first chooses them, and not at load.
 *
 * Every expert has a reserved address range, its place. Its memory is committed when it is packed
 * and released when it is evicted. A packed expert's bytes are those that packing at load would
 * have given, bit for bit, because packing is a function of the file.
 *
 * The bound limits committed bytes. The experts that were chosen longest ago are evicted first, and
 * never one that the present group of rows needs. So the bound must be at least the size of all
 * experts of any one layer: one group may choose all of them.
 *
 * Threads: the parts of a forward. All parts pack and evict together, between two barriers; at any
 * other time nothing changes, so parts look without a lock. */
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
