/* tile_amx.h - the few tile instructions that the products use, as the compilers' intrinsics have
 * them, and one thing more: the compiler knows that they read and write memory. gcc's own say so
 * for tilestored alone, so that it may move a write of x behind the load of a tile.
 *
 * Numbers of tiles are written into the instruction, so they are literals. */
#ifndef TD_KERNELS_CPU_TILE_AMX_H
#define TD_KERNELS_CPU_TILE_AMX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The memory form of TILECFG, palette 1. */
struct tile_config {
    uint8_t palette, start_row, zeros[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "ldtilecfg reads 64 bytes");

#define TILE_LOAD(t, from, stride)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)),                  \
                     "r"((ptrdiff_t)(stride))                                                      \
                     : "memory")
#define TILE_STORE(t, to, stride)                                                                  \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)),                      \
                     "r"((ptrdiff_t)(stride))                                                      \
                     : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
/* c += a . b: a has rows of 32 bf16, b has rows of 16 pairs of them. */
#define TILE_DOT_BF16(c, a, b)                                                                     \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
/* c += a . b in int32: a has rows of 64 signed bytes, b rows of 16 fours of unsigned ones. */
#define TILE_DOT_I8_U8(c, a, b)                                                                    \
    __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

/* Tiles 0 to 3 are sums and 4 and 5 activations, all of `rows` rows; 6 and 7 are weights. Until
 * tiles_end the thread's tiles are in use, and a change of threads saves all 8 KiB of them. */
static inline void tiles_begin(int rows)
{
    struct tile_config c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.row_bytes[t] = 64;
        c.rows[t] = (uint8_t)(t < 6 ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}
static inline void tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }

#endif
