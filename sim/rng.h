/* rng.h - the simulator's random numbers: a portable 64-bit linear congruential generator
 * (Knuth's MMIX constants) and the distributions drawn from it. The same seed gives the same
 * numbers on every machine, and the recipe is short enough to be repeated in any language: s <-
 * 6364136223846793005 s + 1442695040888963407 mod 2^64,  u = ((s >> 11) + 0.5) / 2^53. Not for
 * secrets, not for tokens (those are Philox, counter-based). */
#ifndef TD_SIM_RNG_H
#define TD_SIM_RNG_H

#include <math.h>
#include <stdint.h>

struct td_sim_rng {
    uint64_t s;
};

/* A stream of its own for each purpose, so that drawing more lengths does not move arrivals. */
static inline struct td_sim_rng td_sim_rng_stream(uint64_t seed, uint64_t stream)
{
    uint64_t z = seed * 0x9E3779B97F4A7C15ull + stream * 0xD1B54A32D192ED03ull + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (struct td_sim_rng){z ^ (z >> 31)};
}

static inline double td_sim_rng_uniform(struct td_sim_rng *r) /* (0, 1) */
{
    r->s = r->s * 6364136223846793005ull + 1442695040888963407ull;
    return ((double)(r->s >> 11) + 0.5) / 9007199254740992.0;
}

static inline uint64_t td_sim_rng_below(struct td_sim_rng *r, uint64_t n)
{
    return (uint64_t)(td_sim_rng_uniform(r) * (double)n);
}
/* mean 1 */
static inline double td_sim_rng_exponential(struct td_sim_rng *r)
{
    return -log(td_sim_rng_uniform(r));
}

static inline double td_sim_rng_normal(struct td_sim_rng *r)
{
    double u = td_sim_rng_uniform(r), v = td_sim_rng_uniform(r);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Gamma of the given shape, mean 1 (Marsaglia and Tsang 2000; below shape 1 by the power of a
 * uniform). */
static inline double td_sim_rng_gamma(struct td_sim_rng *r, double shape)
{
    double boost = 1, k = shape;
    if (k < 1) {
        boost = pow(td_sim_rng_uniform(r), 1 / k);
        k += 1;
    }
    double d = k - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = td_sim_rng_normal(r), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        if (log(td_sim_rng_uniform(r)) < 0.5 * x * x + d - d * v + d * log(v))
            return boost * d * v / shape;
    }
}

#endif
