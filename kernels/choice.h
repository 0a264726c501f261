/* choice.h - which of the tables of this CPU to use, by measuring.
 *
 * Why: what an instruction is worth differs by maker. A dot of bf16 pairs does twice what widening
 * and multiply-adds do on AMD's Zen 4 and 5, and half of it on Intel's Sapphire Rapids. So the
 * tables that give the same bits multiply the same small matrices in turn, for a few milliseconds,
 * and the fastest is used. Because the bits are the same, nothing but speed depends on the result:
 * two workers may choose differently and still finish each other's requests.
 *
 * AMX tiles are timed too, although their bits differ. They are ten times faster or, where a
 * hypervisor emulates them, useless, so CPUs of one kind choose alike. */
#ifndef TD_KERNELS_CHOICE_H
#define TD_KERNELS_CHOICE_H

#include "kernels/ops.h"

enum {
    TD_OPS_TIMED_MAX = 4,
    TD_OPS_CHOICE_TEXT = 128, /* bytes for any td_ops_choice_text of three tables */
};

struct td_ops_choice {
    const struct td_ops *ops; /* NULL: TANDEM_OPS names one that this CPU does not run */
    /* The tables that were timed and what each did, in GFLOP/s of one thread; none where the CPU
     * has one table that is better than all others by its instructions alone. */
    int n_timed;
    struct {
        const char *name;
        double gflop_s;
    } timed[TD_OPS_TIMED_MAX];
};

/* What TANDEM_OPS names; without it the best class of tables that this CPU runs, and of that the
 * fastest. Takes at most 5 ms and 256 KiB of stack; thread-safe. */
void td_ops_choose(struct td_ops_choice *ret_choice);

/* Times n <= TD_OPS_TIMED_MAX tables in turn, and puts the fastest and all times into ret_choice.
 * A table is judged by its shortest time, so that others on this CPU do not count. now_ns is the
 * clock. */
void td_ops_time(const struct td_ops *const *tables, int n, uint64_t (*now_ns)(void),
                 struct td_ops_choice *ret_choice);

/* Whether both multiply a small random bf16 matrix to the same bits. */
bool td_ops_same_bits(const struct td_ops *a, const struct td_ops *b);

/* Whether a table's products of bf16 are those of ref/amx_chain.h, on a small random matrix. */
bool td_ops_is_amx_chain(const struct td_ops *ops);

/* "avx512bf16 (measured, GFLOP/s a thread: avx512 121, avx512bf16 236)", or the name alone. Cut
 * when text_bytes is too small. */
void td_ops_choice_text(const struct td_ops_choice *choice, char *ret_text, size_t text_bytes);

#endif
