/* lazy_experts.c - see lazy_experts.h.
 *
 *   EMPTY --need: chosen--> WANTED --packed by all parts--> PACKED --give_way--> EMPTY
 *
 * Invariants: (1) is_packed changes only between two meetings of one need(), by part 0, and every
 * part has read what it reads of it before the first or reads it after the second; (2) a stamp is
 * the number of the last need() that had rows for the expert, and part 0 alone reads or writes
 * stamps; (3) packed_bytes is the sum of the places of packed experts, at most most_bytes. */
#include "common/model/lazy_experts.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/base/options.h"
#include "common/model/model.h"

struct expert {
    size_t at, bytes; /* in the arena, whole units */
    int32_t n_chunks;
    bool is_packed;
    uint64_t stamp;
};

/* What is packed now: chunks [first_chunk, ..) of all are those of expert `index`. */
struct wanted {
    int32_t index, first_chunk;
};

struct td_lazy_experts {
    struct expert *experts; /* [n_layers * n_experts] */
    int32_t n_layers, n_experts;
    struct td_arena arena;
    struct wanted *wanted; /* [n_experts] */
    int32_t n_wanted, n_chunks;
    _Atomic int32_t next_chunk;
    td_lazy_pack_fn *pack;
    void *ctx;
    uint64_t most_bytes, stamp;
    struct td_expert_memory memory;
};

/* Sets the places and what all take; returns the bytes of the largest layer. */
static uint64_t place(struct td_lazy_experts *z, const struct td_lazy_config *c, size_t unit,
                      size_t *ret_total)
{
    uint64_t largest = 0;
    size_t at = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        size_t begin = at;
        for (int32_t e = 0; e < c->n_experts; e++) {
            int32_t k = i * c->n_experts + e;
            size_t bytes = (c->bytes[k] + unit - 1) / unit * unit;
            z->experts[k] = (struct expert){.at = at, .bytes = bytes, .n_chunks = c->n_chunks[k]};
            z->memory.n += bytes > 0;
            at += bytes;
        }
        if (at - begin > largest) largest = at - begin;
    }
    *ret_total = at;
    return largest;
}

static td_status check_bound(const struct td_lazy_experts *z, const struct td_lazy_config *c,
                             uint64_t largest, struct td_err *err)
{
    uint64_t available = td_mem_available();
    if (z->most_bytes < largest)
        return td_fail(
            err, TD_ERR_INVALID,
            "experts is %s, must be at least %s: the experts of one layer, which may all "
            "be chosen at once",
            td_size_text(c->most_bytes * (uint64_t)c->n_ranks).s,
            td_size_text(largest * (uint64_t)c->n_ranks).s);
    if (z->most_bytes > available)
        return td_fail(err, TD_ERR_NOMEM,
                       "experts may come to take %s, but only %s of memory are available: give "
                       "experts a size",
                       td_size_text(z->most_bytes).s, td_size_text(available).s);
    return TD_OK;
}

td_status td_lazy_experts_create(const struct td_lazy_config *c, struct td_lazy_experts **ret_lazy,
                                 struct td_err *err)
{
    size_t n = (size_t)c->n_layers * (size_t)c->n_experts, least = SIZE_MAX, total;
    struct td_lazy_experts *z = calloc(1, sizeof *z);
    td_status s = TD_OK;
    if (z) {
        z->arena.memfd = -1;
        z->experts = calloc(n, sizeof *z->experts);
        z->wanted = calloc((size_t)c->n_experts, sizeof *z->wanted);
    }
    if (!z || !z->experts || !z->wanted) {
        td_lazy_experts_destroy(z);
        return td_fail(err, TD_ERR_NOMEM, "experts: no memory for %zu of them", n);
    }
    z->n_layers = c->n_layers;
    z->n_experts = c->n_experts;
    z->pack = c->pack;
    z->ctx = c->ctx;
    for (size_t i = 0; i < n; i++)
        if (c->bytes[i] && c->bytes[i] < least) least = c->bytes[i];
    size_t unit = td_arena_sparse_unit(least == SIZE_MAX ? 1 : least);
    uint64_t largest = place(z, c, unit, &total);
    z->most_bytes = c->most_bytes < total ? c->most_bytes : total;
    z->memory.bytes = z->most_bytes;
    s = check_bound(z, c, largest, err);
    if (!s && total) s = td_arena_create_sparse(total, unit, "experts", &z->arena, err);
    if (s)
        td_lazy_experts_destroy(z);
    else
        *ret_lazy = z;
    return s;
}

void td_lazy_experts_destroy(struct td_lazy_experts *z)
{
    if (!z) return;
    td_arena_destroy(&z->arena);
    free(z->experts);
    free(z->wanted);
    free(z);
}

uint8_t *td_lazy_experts_place(const struct td_lazy_experts *z, int32_t index)
{
    return (uint8_t *)z->arena.base + z->experts[index].at;
}

void td_lazy_experts_memory(const struct td_lazy_experts *z, struct td_expert_memory *ret)
{
    *ret = z->memory;
}

/* Takes the memory of the expert that was chosen longest ago, and not in this need(). */
static void give_way(struct td_lazy_experts *z)
{
    struct expert *oldest = NULL;
    for (int32_t i = 0; i < z->n_layers * z->n_experts; i++) {
        struct expert *x = &z->experts[i];
        if (x->is_packed && x->stamp < z->stamp && (!oldest || x->stamp < oldest->stamp))
            oldest = x;
    }
    TD_ASSERT(oldest); /* the bound holds a layer */
    td_arena_give_back(&z->arena, oldest->at, oldest->bytes);
    oldest->is_packed = false;
    z->memory.n_packed--;
    z->memory.packed_bytes -= oldest->bytes;
}

/* Part 0: lists what is to be packed, whose chunks are numbered through, and makes room for it. */
static void begin(struct td_lazy_experts *z, int32_t layer, const int32_t *first, int32_t from,
                  int32_t end)
{
    uint64_t bytes = 0;
    z->n_wanted = z->n_chunks = 0;
    for (int32_t e = from; e < end; e++) {
        int32_t index = layer * z->n_experts + e;
        const struct expert *x = &z->experts[index];
        if (first[e] == first[e + 1] || x->is_packed) continue;
        z->wanted[z->n_wanted++] = (struct wanted){index, z->n_chunks};
        z->n_chunks += x->n_chunks;
        bytes += x->bytes;
    }
    while (z->memory.packed_bytes + bytes > z->most_bytes) give_way(z);
    z->memory.packed_bytes += bytes;
    atomic_store(&z->next_chunk, 0);
}

static void pack_chunks(struct td_lazy_experts *z, int part)
{
    int32_t chunk, at = 0;
    while ((chunk = atomic_fetch_add(&z->next_chunk, 1)) < z->n_chunks) {
        while (at + 1 < z->n_wanted && z->wanted[at + 1].first_chunk <= chunk) at++;
        z->pack(z->ctx, z->wanted[at].index, chunk - z->wanted[at].first_chunk, part);
    }
}

static void finish(struct td_lazy_experts *z)
{
    for (int32_t i = 0; i < z->n_wanted; i++) z->experts[z->wanted[i].index].is_packed = true;
    z->memory.n_packed += (uint64_t)z->n_wanted;
    z->memory.packings += (uint64_t)z->n_wanted;
}

void td_lazy_experts_need(struct td_lazy_experts *z, const struct td_lazy_team *team, int32_t layer,
                          const int32_t *first, int32_t from, int32_t end)
{
    struct expert *experts = &z->experts[layer * z->n_experts];
    bool all = true;
    if (team->part == 0) z->stamp++;
    for (int32_t e = from; e < end; e++) {
        if (first[e] == first[e + 1]) continue;
        all &= experts[e].is_packed;
        if (team->part == 0) experts[e].stamp = z->stamp;
    }
    if (all) return;
    team->meet(team->ctx); /* all have seen the same */
    if (team->part == 0) begin(z, layer, first, from, end);
    team->meet(team->ctx);
    pack_chunks(z, team->part);
    team->meet(team->ctx);
    if (team->part == 0) finish(z);
    team->meet(team->ctx);
}
