/* random.h - random numbers for whoever must repeat them: router core, simulator, load generator,
 * random weights, benches and tests. The same seed gives the same numbers on every machine. Not for
 * secrets (td_random_fill), and not for tokens, which are Philox (common/model/sampler.h).
 *
 * Two recipes, both short enough to be repeated in any language:
 *
 *   td_random   a 64-bit linear congruential generator (Knuth's MMIX constants), for long walks:
 *               s <- 6364136223846793005 s + 1442695040888963407 mod 2^64,
 *               u = ((s >> 11) + 0.5) / 2^53. Its low bits are poor: take the high ones
 *   td_keyed    SplitMix64 (Steele, Lea, Flood 2014), a counter with a mixing function, where
 *               draw i of stream j is needed without those before it */
#ifndef TD_BASE_RANDOM_H
#define TD_BASE_RANDOM_H

#include <math.h>
#include <stdint.h>

/* ---- one walk -------------------------------------------------------------------------------- */

struct td_random {
    uint64_t s;
};

/* The next state, which is also the number drawn. */
static inline uint64_t td_random_step(uint64_t *state)
{
    return *state = *state * 6364136223846793005ull + 1442695040888963407ull;
}

/* The mixing function of SplitMix64: a bijection in which every bit of x moves every bit. */
static inline uint64_t td_mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* A stream of its own for each purpose, so that drawing more lengths does not move arrivals. */
static inline struct td_random td_random_stream(uint64_t seed, uint64_t stream)
{
    return (struct td_random){
        td_mix64(seed * 0x9e3779b97f4a7c15ull + stream * 0xd1b54a32d192ed03ull + 1)};
}

static inline double td_random_uniform(struct td_random *r) /* (0, 1) */
{
    return ((double)(td_random_step(&r->s) >> 11) + 0.5) / 9007199254740992.0;
}

/* 0..n-1, 0 < n < 2^31, by the state's upper 31 bits: integers alone. */
static inline uint32_t td_random_index(uint64_t *state, uint64_t n)
{
    return (uint32_t)((td_random_step(state) >> 33) % n);
}

static inline uint64_t td_random_below(struct td_random *r, uint64_t n)
{
    return (uint64_t)(td_random_uniform(r) * (double)n);
}

/* mean 1 */
static inline double td_random_exponential(struct td_random *r)
{
    return -log(td_random_uniform(r));
}

static inline double td_random_normal(struct td_random *r)
{
    double u = td_random_uniform(r), v = td_random_uniform(r);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Gamma of the given shape, mean 1 (Marsaglia and Tsang 2000; below shape 1 by the power of a
 * uniform). */
static inline double td_random_gamma(struct td_random *r, double shape)
{
    double boost = 1, k = shape;
    if (k < 1) {
        boost = pow(td_random_uniform(r), 1 / k);
        k += 1;
    }
    double d = k - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = td_random_normal(r), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        if (log(td_random_uniform(r)) < 0.5 * x * x + d - d * v + d * log(v))
            return boost * d * v / shape;
    }
}

/* ---- by key ---------------------------------------------------------------------------------- */

struct td_keyed {
    uint64_t state;
};

/* The number behind the state: any state is the key of one. */
static inline uint64_t td_keyed_step(uint64_t *state)
{
    return td_mix64(*state += 0x9e3779b97f4a7c15ull);
}

static inline uint64_t td_keyed_u64(struct td_keyed *r) { return td_keyed_step(&r->state); }

/* A generator of its own for each (seed, what, index): what one part of a run draws moves no
 * other part. */
static inline struct td_keyed td_keyed_at(uint64_t seed, uint64_t what, uint64_t index)
{
    struct td_keyed r = {td_mix64(td_mix64(seed + 0x9e3779b97f4a7c15ull) ^
                                  td_mix64(what * 0xd1342543de82ef95ull + 1)) +
                         index * 0xda942042e4dd58b5ull};
    return r;
}

/* (0, 1): never 0, so that its logarithm exists. */
static inline double td_keyed_unit(struct td_keyed *r)
{
    return ((double)(td_keyed_u64(r) >> 11) + 0.5) * 0x1p-53;
}

/* 0..n-1, n > 0: the high word of a product (Lemire), whose bias of n / 2^64 no run can see. */
static inline uint64_t td_keyed_below(struct td_keyed *r, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)td_keyed_u64(r) * n) >> 64);
}

#endif
