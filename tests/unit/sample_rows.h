/* sample_rows.h - random rows of logits for the tests of samplers, from a generator that owes
 * nothing to them. A test sets rng_state. */
#ifndef TD_TESTS_SAMPLE_ROWS_H
#define TD_TESTS_SAMPLE_ROWS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/base/random.h"

static uint64_t rng_state;

static inline uint64_t rng(void) { return td_keyed_step(&rng_state); }

static inline int below(int n) { return (int)(rng() % (uint64_t)n); }

static inline double unit(void) { return (double)(rng() >> 11) * 0x1p-53; }

static inline float gauss(void)
{
    return (float)((unit() + unit() + unit() + unit() - 2) * 1.7320508);
}

enum row_kind {
    ROW_GAUSS,
    ROW_NARROW, /* as of random weights */
    ROW_TIES,   /* few distinct values */
    ROW_FLAT,
    ROW_TWO,   /* two values, the higher one once, often or nearly always */
    ROW_HOLES, /* -inf and NaN between */
    ROW_HUGE,
    ROW_BITS,     /* any finite float */
    ROW_CLUSTER,  /* one far above a narrow lot: a bucket of nearly all */
    ROW_CLUSTERS, /* the narrow lot on top, the rest far below */
    ROW_GEOMETRIC,
    ROW_DENORMAL, /* and zeros of either sign */
    ROW_ONE,      /* one finite logit */
    ROW_NOTHING,  /* this and what follows: no distribution */
    ROW_OVERFLOW,
    N_ROW_KINDS
};

static inline void fill_row(float *l, int n, enum row_kind kind)
{
    int often = 1 << below(12), at = below(n);
    for (int i = 0; i < n; i++) {
        float g = gauss();
        uint32_t u = (uint32_t)rng();
        switch (kind) {
        case ROW_GAUSS:
            l[i] = 4 * g;
            break;
        case ROW_NARROW:
            l[i] = 0.02f * g;
            break;
        case ROW_TIES:
            l[i] = (float)(int)(2 * g);
            break;
        case ROW_FLAT:
            l[i] = 1.5f;
            break;
        case ROW_TWO:
            l[i] = below(often) == 0 ? 3.0f : -1.0f;
            break;
        case ROW_HOLES:
            l[i] = below(3) == 0 ? -INFINITY : below(3) == 0 ? NAN : 2 * g;
            break;
        case ROW_HUGE:
            l[i] = g * 1e38f;
            break;
        case ROW_BITS:
            u = (u & 0x7f800000u) == 0x7f800000u ? u & 0x807fffffu : u;
            memcpy(&l[i], &u, sizeof l[i]);
            break;
        case ROW_CLUSTER:
            l[i] = i == at ? 9.0f : -1.0f + 1e-6f * g;
            break;
        case ROW_CLUSTERS:
            l[i] = below(2) ? 5.0f + 1e-5f * (float)(int)(8 * g) : 2.0f + 1e-6f * g;
            break;
        case ROW_GEOMETRIC:
            l[i] = -ldexpf(1.0f, -(i % 100));
            break;
        case ROW_DENORMAL:
            l[i] = (float)((int)(u % 5) - 2) * (u & 64 ? 1e-45f : 0.0f);
            break;
        default:
            l[i] = below(2) ? -INFINITY : NAN;
            break;
        }
    }
    if (kind == ROW_HOLES || kind == ROW_ONE) l[at] = below(2) ? gauss() : below(2) ? -0.0f : 0.0f;
    if (kind == ROW_OVERFLOW) l[at] = INFINITY;
}

#endif
