/* rng.h - the load generator's randomness: SplitMix64 (Steele, Lea, Flood 2014), a counter with a
 * mixing function.
 *
 * Why here: a run must be repeatable from its seed on any machine, and token i of prompt j must
 * be computable without those before it, so that prompts are made as they are sent. Pure. */
#ifndef BENCH_SERVE_RNG_H
#define BENCH_SERVE_RNG_H

#include <stdint.h>

struct bench_rng {
    uint64_t state;
};

static inline uint64_t bench_mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t bench_rng_u64(struct bench_rng *r)
{
    return bench_mix64(r->state += 0x9e3779b97f4a7c15ull);
}

/* A generator of its own for each (seed, what, index): what one part of a run draws moves no
 * other part. */
static inline struct bench_rng bench_rng_at(uint64_t seed, uint64_t what, uint64_t index)
{
    struct bench_rng r = {bench_mix64(bench_mix64(seed + 0x9e3779b97f4a7c15ull) ^
                                      bench_mix64(what * 0xd1342543de82ef95ull + 1)) +
                          index * 0xda942042e4dd58b5ull};
    return r;
}

/* (0, 1): never 0, so that its logarithm exists. */
static inline double bench_rng_unit(struct bench_rng *r)
{
    return ((double)(bench_rng_u64(r) >> 11) + 0.5) * 0x1p-53;
}

/* 0..n-1, n > 0: the high word of a product (Lemire), whose bias of n / 2^64 no run can see. */
static inline uint64_t bench_rng_below(struct bench_rng *r, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)bench_rng_u64(r) * n) >> 64);
}

#endif
