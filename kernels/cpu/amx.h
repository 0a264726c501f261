/* amx.h - whether the tiles of AMX can be used here. They are the one extension that a process has
 * to ask the kernel for: XTILEDATA is 8 KiB of registers for each thread, and Linux grants it to
 * a process as a whole (arch_prctl, ARCH_REQ_XCOMP_PERM, since 5.16). */
#ifndef TD_KERNELS_CPU_AMX_H
#define TD_KERNELS_CPU_AMX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What decides it, each as the CPU or the kernel says it. */
struct td_amx_seen {
    bool is_built;        /* the compiler of this build knew the instructions */
    bool has_avx512;      /* the table's other entries: those of avx512bf16 */
    uint32_t features;    /* CPUID leaf 7, subleaf 0, EDX */
    uint64_t xcr0;        /* what the kernel saves when it changes threads */
    uint32_t palette[2];  /* CPUID leaf 0x1d, subleaf 1, EBX and ECX: the sizes of tiles */
    int permission_errno; /* of arch_prctl; 0: granted */
};

/* Why tiles cannot be used, a text like "the CPU lacks amx_bf16"; NULL: they can. */
const char *td_amx_lack_of(const struct td_amx_seen *seen);

/* The same for this process. The first call asks the kernel for the permission, which then all
 * threads have; the answer is kept. Threads whose alternative signal stack is too small for the
 * tiles make the kernel refuse. Any thread. */
const char *td_amx_lack(void);

/* Integer products (i8_amx.c). n_rows rows lie in n tiles of `rows` rows each, at most
 * TD_AMX_TILE_ROWS; the last tile ends with the last row, so that it may begin with rows that the
 * tile before it has, too. */
enum { TD_AMX_TILE_ROWS = 16, TD_AMX_I8_K = 64, TD_AMX_I8_COLS = 32 };
struct td_amx_rows {
    int32_t n_rows, n, rows;
};
static inline struct td_amx_rows td_amx_rows_of(int32_t n_rows)
{
    struct td_amx_rows t = {.n_rows = n_rows,
                            .n = (n_rows + TD_AMX_TILE_ROWS - 1) / TD_AMX_TILE_ROWS};
    t.rows = (n_rows + t.n - 1) / t.n;
    return t;
}
static inline int32_t td_amx_first_row(const struct td_amx_rows *t, int32_t tile)
{
    int32_t at = tile * t->rows, last = t->n_rows - t->rows;
    return at < last ? at : last;
}

/* Between these two the calling thread's tiles are those of td_amx_i8_panel for `rows` rows. */
void td_amx_i8_begin(int32_t rows);
void td_amx_i8_end(void);

/* Adds to sums, [tile][rows][TD_AMX_I8_COLS], the products of rows of codes, x_stride bytes apart,
 * by one panel's lines: [n_k / 4][TD_AMX_I8_COLS][4 of k], codes with 128 added. n_k is a multiple
 * of TD_AMX_I8_K. */
void td_amx_i8_panel(const struct td_amx_rows *t, const int8_t *x, size_t x_stride,
                     const uint8_t *lines, int32_t n_k, int32_t *sums);

#endif
