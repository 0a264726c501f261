/* sample.cu - from rows of logits to tokens and logprobs on the device, with the CPU's bits
 * (kernels/sample.h, common/model/sampler.c).
 *
 * Why the bits are the same. A logit's adjusted value x, y = (x - max x) / temperature, e^y and ln
 * are the same IEEE double operations in the same order on both sides. (sample_math.h; nvcc
 * -fmad=false leaves no fma.f64 in the PTX, where there are 121 without it; denormals are kept,
 * there is no fast math; K1 only compares floats.) Everything that is added up is an integer, whose
 * sum is the same in any order. The question asked is which element of the order (x descending, id
 * ascending) brings the running count or weight to a target; it has one answer however it is found.
 * So the buckets here need not be those of the CPU. They only have to fall as x falls, and to be
 * the same in K2 and K3.
 *
 * Four kernels run in this order. A row that needs nothing of one returns from it at once, and
 * `features` says which of them are launched at all.
 *
 *   kernel    grid            needs    what it does
 *   K0 count  [16, rows]      ADJUST   reads the row's tokens from pinned memory into `seen`, one
 *                                      32-bit value a token: occurs, is biased, times in the output
 *   K1 best   [chunks, rows]           of each chunk of at most 8192 logits, 16 a thread, in
 *                                      registers: the n best raw logits (n = 1 without logprobs) by
 *                                      n rounds of a maximum over (logit, id), and the best and the
 *                                      lowest adjusted x
 *   K2 weigh  [splits, rows]  WEIGHTS  adds weights into 2048 buckets of y between the row's lowest
 *                                      (or -31) and 0: in shared memory by integer atomics, then
 *                                      the buckets that are not empty to those of the row. Also the
 *                                      sum behind logprobs
 *   K3 pick   [rows]                   prefix sums of the buckets, then up to three questions
 *                                      (top-k, top-p, draw). The bucket is found at once; its
 *                                      elements are gathered by a pass over the row (one comparison
 *                                      each) and ranked against each other. A bucket of more than
 *                                      LIST elements (a row of ties, or one narrow cluster) is cut
 *                                      further by 10 bits of x a round; equal x are counted in the
 *                                      order of ids. Merges the best of the chunks, writes the
 *                                      result, leaves `seen` zero
 *
 * Memory. Floor: each logit is read once, 4 bytes: 0.513 MB a row of 128,256, which at 4.8 TB/s is
 * 0.11 us a row and 27 us for 256. Read here: K1 and K2 once each, K3 once for each question; a
 * greedy row without logprobs, by K1 only. The later reads come from L2 as long as the rows in
 * flight fit (50 MB: 97 rows). A row with penalties also reads `seen`, as many bytes as logits. K2
 * computes about 45 double operations for an element whose weight is not 0. K1 and K2 spread one
 * row over chunks and splits, so that a single row does not wait for one multiprocessor; K3 has one
 * block per row. Nothing of this is measured yet. */
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#include "kernels/sample_math.h"
}
#endif

#define BEST_THREADS 512 /* K1: at most */
#define PER_THREAD 16
#define MAX_CHUNKS 64     /* TD_SAMPLE_MAX_VOCAB / (BEST_THREADS * PER_THREAD) */
#define WEIGH_THREADS 256 /* K2 */
#define PICK_THREADS 512  /* K3: at most */
#define COUNT_THREADS 256 /* K0 */
#define COUNT_BLOCKS 16
#define N_BUCKETS 2048 /* a power of two, like the next */
#define N_DIGITS 1024
#define LIST 1024 /* a bucket of at most this many elements is ranked element against element */
#define FULL 0xffffffffu

#define SEEN 0x80000000u     /* the token occurs */
#define BIASED 0x40000000u   /* the row's bias names it */
#define N_OUTPUT 0x3fffffffu /* mask: how often the token occurs in the output */

_Static_assert(MAX_CHUNKS *BEST_THREADS *PER_THREAD == TD_SAMPLE_MAX_VOCAB,
               "chunks cover a vocabulary");

/* ---- scratch --------------------------------------------------------------------------------- */

struct chunk_best {                  /* K1 -> K2, K3 */
    uint64_t top[TD_SAMPLE_MAX_TOP]; /* raw_key of the best, descending; 0: none */
    uint64_t max, min;               /* x_key of the best and lowest adjusted x; 0 and ~0: none */
    int32_t best, unused;            /* id of max, the lowest of equal ones */
};

struct row_sums { /* K2 -> K3; zeroed by K1 */
    uint64_t weight[N_BUCKETS];
    uint32_t count[N_BUCKETS];
    uint64_t sum_hi, sum_lo; /* sums of e^y at temperature 1 over the raw logits (sample_math.h) */
};

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* A row's part of the scratch; the parts lie one behind the other. It holds chunk_best
 * [MAX_CHUNKS], row_sums, the row's bias [TD_SAMPLE_MAX_BIAS] copied to device memory, `seen`
 * [vocab] and `bad` (a token of the row is outside the vocabulary). The last two are zero between
 * steps. */
#define SEEN_AT                                                                                    \
    (MAX_CHUNKS * sizeof(struct chunk_best) + sizeof(struct row_sums) +                            \
     TD_SAMPLE_MAX_BIAS * sizeof(struct td_sample_bias))
_Static_assert(SEEN_AT % 16 == 0, "`seen` and `bad` are cleared by 16 bytes");

static size_t row_bytes(int32_t vocab)
{
    return round_up(SEEN_AT + ((size_t)vocab + 1) * sizeof(uint32_t), 256);
}

struct work { /* what every kernel is launched with */
    const float *logits;
    int64_t logits_stride;
    const struct td_sample_row *rows;
    struct td_sample_result *results;
    uint64_t *totals;
    uint8_t *scratch;
    int64_t row_bytes;
    int32_t vocab, n_chunks;
    uint32_t features;
};

/* ---- one row --------------------------------------------------------------------------------- */

struct job {
    struct td_sample_row r;
    const float *logits;
    struct chunk_best *best;
    struct row_sums *sums;
    struct td_sample_bias *bias;
    uint32_t *seen, *bad;
    int32_t vocab;
    bool has_penalties, is_adjusted, draws, wants_sum;
};

/* False: the row is padding. */
__device__ static inline bool job_open(const struct work *w, int32_t row, struct job *j)
{
    uint8_t *s = w->scratch + (size_t)row * (size_t)w->row_bytes;

    j->r = w->rows[row];
    j->logits = w->logits + (int64_t)j->r.logits_row * w->logits_stride;
    j->best = (struct chunk_best *)s;
    s += MAX_CHUNKS * sizeof(struct chunk_best);
    j->sums = (struct row_sums *)s;
    s += sizeof(struct row_sums);
    j->bias = (struct td_sample_bias *)s;
    s += TD_SAMPLE_MAX_BIAS * sizeof(struct td_sample_bias);
    j->seen = (uint32_t *)s; /* aligned to 16 */
    j->bad = j->seen + w->vocab;
    j->vocab = w->vocab;
    j->has_penalties =
        j->r.repetition_penalty != 1 || j->r.presence_penalty != 0 || j->r.frequency_penalty != 0;
    j->is_adjusted = j->has_penalties || j->r.n_bias > 0;
    j->draws = j->r.temperature > 0;
    j->wants_sum = j->r.n_logprobs >= 0;
    return j->r.logits_row >= 0;
}

/* As the CPU does it: bias in the order of the list, then repetition, presence and frequency
 * penalty. */
__device__ static inline double adjust(const struct job *j, double x, uint32_t seen, int32_t id)
{
    if (seen & BIASED) {
        int32_t lo = 0, hi = j->r.n_bias;
        while (lo < hi) {
            int32_t mid = (lo + hi) / 2;
            if (j->bias[mid].token < id)
                lo = mid + 1;
            else
                hi = mid;
        }
        for (; lo < j->r.n_bias && j->bias[lo].token == id; lo++) x += (double)j->bias[lo].bias;
    }
    if (seen & SEEN) {
        double rep = j->r.repetition_penalty;
        if (rep != 1.0) x = x > 0 ? x / rep : x * rep;
        if (seen & N_OUTPUT) {
            x -= (double)j->r.presence_penalty;
            x -= (double)j->r.frequency_penalty * (double)(seen & N_OUTPUT);
        }
    }
    return x;
}

__device__ static inline double adjusted(const struct job *j, float logit, int32_t id)
{
    double x = logit;
    if (!j->is_adjusted) return x;
    uint32_t seen = j->seen[id];
    return seen ? adjust(j, x, seen, id) : x;
}

/* A key that ascends with x; -0 counts as 0; the key is 0 for what is no candidate (NaN, -inf). */
__device__ static inline uint64_t x_key(double x)
{
    uint64_t b = td_sample_bits(x == 0 ? 0.0 : x);
    if (!(x > -__builtin_inf())) return 0;
    return b >> 63 ? ~b : b | 1ull << 63;
}

__device__ static inline double x_of_key(uint64_t key)
{
    return td_sample_from_bits(key >> 63 ? key & ~(1ull << 63) : ~key);
}

/* A key that ascends with the logit, then descends with the id; 0 for what is no candidate. */
__device__ static inline uint64_t raw_key(float l, int32_t id)
{
    uint32_t b;
    if (!(l > -__builtin_inff())) return 0;
    l = l == 0 ? 0.0f : l;
    memcpy(&b, &l, sizeof b);
    b = b >> 31 ? ~b : b | 0x80000000u;
    return (uint64_t)b << 32 | (uint32_t) ~(uint32_t)id;
}

__device__ static inline float logit_of_key(uint64_t key)
{
    uint32_t b = (uint32_t)(key >> 32);
    float l;
    b = b >> 31 ? b & 0x7fffffffu : ~b;
    memcpy(&l, &b, sizeof l);
    return l;
}

__device__ static inline int32_t id_of_key(uint64_t key) { return (int32_t) ~(uint32_t)key; }

/* ---- a block's sums and maxima --------------------------------------------------------------- */

__device__ static inline uint64_t shfl_xor_u64(uint64_t v, int mask)
{
    uint32_t lo = __shfl_xor_sync(FULL, (uint32_t)v, mask),
             hi = __shfl_xor_sync(FULL, (uint32_t)(v >> 32), mask);
    return (uint64_t)hi << 32 | lo;
}

__device__ static inline uint64_t shfl_up_u64(uint64_t v, int by)
{
    uint32_t lo = __shfl_up_sync(FULL, (uint32_t)v, by),
             hi = __shfl_up_sync(FULL, (uint32_t)(v >> 32), by);
    return (uint64_t)hi << 32 | lo;
}

__device__ static inline uint64_t warp_max(uint64_t v)
{
    for (int m = 16; m; m >>= 1) {
        uint64_t u = shfl_xor_u64(v, m);
        v = u > v ? u : v;
    }
    return v;
}

struct exchange { /* in shared memory; two halves in turn, so that one barrier per call is enough */
    uint64_t v[2][32];
};

/* The maximum over the block, returned to every thread. *turn: the half of the exchange to use, the
 * same in every thread. */
__device__ static uint64_t block_max(struct exchange *x, int *turn, uint64_t v)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, n_warps = (int)blockDim.x >> 5;
    uint64_t *at = x->v[*turn];
    *turn ^= 1;
    v = warp_max(v);
    if (lane == 0) at[warp] = v;
    __syncthreads();
    return warp_max(lane < n_warps ? at[lane] : 0);
}

/* Adds w to *at in shared memory, which has no 64-bit addition: two 32-bit atomics, with the carry
 * passed on. Read *at only after a barrier. */
__device__ static inline void add_shared(uint64_t *at, uint64_t w)
{
    uint32_t *p = (uint32_t *)at, lo = (uint32_t)w, hi = (uint32_t)(w >> 32);
    uint32_t old = atomicAdd(p, lo);
    hi += (uint32_t)(old + lo) < lo;
    if (hi) atomicAdd(p + 1, hi);
}

/* ---- what K1 found in a row ------------------------------------------------------------------ */

struct row_best {
    uint64_t raw; /* raw_key of the best */
    double raw_max, max;
    double y_low, scale; /* the buckets: y of the lowest x, or -31; 0 at y = 0,
                            N_BUCKETS - 1 at y_low */
    int32_t best;
    bool is_corrupt;
};

__device__ static inline double y_of(double x, double max, double temperature)
{
    double d = x - max;
    return temperature == 1.0 ? d : d / temperature; /* x / 1 is x */
}

/* The first warp reads the chunks; all threads call. */
__device__ static void row_open(const struct job *j, int32_t n_chunks, struct row_best *shared)
{
    if (threadIdx.x < 32) {
        uint64_t raw = 0, max = 0, not_min = 0;
        int32_t best = 0;
        for (int32_t c = (int32_t)threadIdx.x; c < n_chunks; c += 32) {
            /* ids ascend with chunks, so the first of equal ones stays */
            const struct chunk_best *b = &j->best[c];
            raw = b->top[0] > raw ? b->top[0] : raw;
            best = b->max > max ? b->best : best;
            max = b->max > max ? b->max : max;
            not_min = ~b->min > not_min ? ~b->min : not_min;
        }
        raw = warp_max(raw);
        not_min = warp_max(not_min);
        uint64_t row_max = warp_max(max);
        uint64_t lowest = warp_max(max == row_max ? (uint64_t)(uint32_t) ~(uint32_t)best : 0);
        if (threadIdx.x == 0) {
            double temperature = j->r.temperature, l = logit_of_key(raw);
            shared->raw = raw;
            shared->raw_max = l;
            shared->is_corrupt = raw == 0 || l > 3.4028234663852886e38;
            shared->max = x_of_key(row_max);
            shared->best = id_of_key(lowest);
            if (j->draws && !shared->is_corrupt) {
                double y = y_of(x_of_key(~not_min), shared->max, temperature);
                shared->y_low = y > TD_SAMPLE_Y_WEIGHTLESS ? y : TD_SAMPLE_Y_WEIGHTLESS;
                shared->scale = y < 0 ? (N_BUCKETS - 1) / -shared->y_low : 0;
            }
        }
    }
    __syncthreads();
}

/* The bucket of y in [y_low, 0]; falls as y rises. The product exceeds N_BUCKETS - 1 by a rounding
 * error at most. */
__device__ static inline int32_t bucket_of(double y, double scale) { return (int32_t)(-y * scale); }

/* 0: no candidate. */
__device__ static inline uint64_t weight_of(double y, double min_p)
{
    if (!(y > TD_SAMPLE_Y_WEIGHTLESS)) return 0;
    double e = td_sample_exp(y);
    return e < min_p ? 0 : (uint64_t)(int64_t)(e * TD_SAMPLE_WEIGHT_ONE);
}

/* ---- K0 -------------------------------------------------------------------------------------- */

__global__ void sample_count(struct work w)
{
    struct job j;
    if (!job_open(&w, (int32_t)blockIdx.y, &j) || !j.is_adjusted) return;
    int32_t thread = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x),
            n_threads = (int32_t)(gridDim.x * blockDim.x);
    for (int32_t i = thread; i < j.r.n_bias; i += n_threads) {
        struct td_sample_bias b = j.r.bias[i];
        j.bias[i] = b;
        atomicOr(&j.seen[b.token], BIASED);
    }
    enum { AHEAD = 4 }; /* reads over the bus that a thread keeps in flight */
    for (int32_t base = thread; j.has_penalties && base < j.r.n_tokens; base += AHEAD * n_threads) {
        int32_t tokens[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            tokens[k] = base + k * n_threads < j.r.n_tokens ? j.r.tokens[base + k * n_threads] : 0;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int32_t i = base + k * n_threads, t = tokens[k];
            if (i >= j.r.n_tokens) continue;
            if (t < 0 || t >= j.vocab) {
                atomicOr(j.bad, 1u);
                continue;
            }
            atomicOr(&j.seen[t], SEEN);
            if (i >= j.r.n_prompt) atomicAdd(&j.seen[t], 1u);
        }
    }
}

/* ---- K1 -------------------------------------------------------------------------------------- */

/* The chunk's greatest logits in their order, into out->top; returns the greatest. l: this thread's
 * logits, of the ids first, first + blockDim.x ... */
__device__ __forceinline__ static uint64_t top_of_chunk(struct exchange *ex, int *turn,
                                                        const struct job *j,
                                                        const float l[PER_THREAD], int32_t first,
                                                        struct chunk_best *out)
{
    int32_t n_threads = (int32_t)blockDim.x, tid = (int32_t)threadIdx.x;
    int32_t n_top = j->r.n_logprobs > 1 ? j->r.n_logprobs : 1;
    uint64_t mine = 0, raw_best = 0;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        uint64_t key = raw_key(l[k], first + k * n_threads);
        mine = key > mine ? key : mine;
    }
    for (int32_t n = 0; n < n_top; n++) {
        uint64_t key = block_max(ex, turn, mine);
        if (n == 0) raw_best = key;
        if (tid == 0) out->top[n] = key;
        if (key == 0) { /* the chunk has no more candidates, and a reader stops at the first 0 */
            break;
        }
        if (mine == key) { /* true in one thread only, because keys differ by their ids */
            mine = 0;
#pragma unroll
            for (int k = 0; k < PER_THREAD; k++) {
                uint64_t next = raw_key(l[k], first + k * n_threads);
                mine = next < key && next > mine ? next : mine;
            }
        }
    }
    return raw_best;
}

/* The greatest adjusted logit of the chunk, and the lowest id that has it; not_min: of this thread
 * alone. */
__device__ __forceinline__ static void best_adjusted(struct exchange *ex, int *turn,
                                                     const struct job *j, int32_t first,
                                                     uint64_t *ret_max, uint64_t *ret_not_min,
                                                     int32_t *ret_best)
{
    int32_t n_threads = (int32_t)blockDim.x, best = 0;
    uint64_t max = 0, not_min = 0;
#pragma unroll 1
    /* read the logit again, from L1: unrolled, this would cost registers */
    for (int k = 0; k < PER_THREAD; k++) {
        int32_t id = first + k * n_threads;
        float logit = id < j->vocab ? j->logits[id] : -__builtin_inff();
        uint64_t key = logit > -__builtin_inff() ? x_key(adjusted(j, logit, id)) : 0;
        best = key > max ? id : best;
        max = key > max ? key : max;
        not_min = key && ~key > not_min ? ~key : not_min;
    }
    uint64_t chunk_max = block_max(ex, turn, max);
    uint64_t lowest =
        block_max(ex, turn, max == chunk_max ? (uint64_t)(uint32_t) ~(uint32_t)best : 0);
    *ret_max = chunk_max;
    *ret_not_min = not_min;
    *ret_best = id_of_key(lowest);
}

__global__ void __launch_bounds__(BEST_THREADS, 2) sample_best(struct work w)
{
    __shared__ struct exchange ex;
    struct job j;
    int turn = 0;
    if (!job_open(&w, (int32_t)blockIdx.y, &j)) return;
    int32_t n_threads = (int32_t)blockDim.x, tid = (int32_t)threadIdx.x,
            first = (int32_t)blockIdx.x * n_threads * PER_THREAD + tid;

    float l[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        int32_t id = first + k * n_threads;
        l[k] = id < j.vocab ? j.logits[id] : -__builtin_inff();
    }
    if (w.features & TD_SAMPLE_WEIGHTS) {
        for (int32_t b = (int32_t)blockIdx.x * n_threads + tid; b < N_BUCKETS;
             b += (int32_t)gridDim.x * n_threads) {
            j.sums->weight[b] = 0;
            j.sums->count[b] = 0;
        }
        if (blockIdx.x == 0 && tid == 0) j.sums->sum_hi = j.sums->sum_lo = 0;
    }

    struct chunk_best *out = &j.best[blockIdx.x];
    uint64_t raw_best = top_of_chunk(&ex, &turn, &j, l, first, out);
    uint64_t max = 0, not_min = 0;
    int32_t best = id_of_key(raw_best);
    if (j.is_adjusted) {
        best_adjusted(&ex, &turn, &j, first, &max, &not_min, &best);
    } else {
        max = raw_best ? x_key(logit_of_key(raw_best)) : 0;
        float low = __builtin_inff();
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++)
            low = l[k] > -__builtin_inff() && l[k] < low ? l[k] : low;
        not_min = ~x_key(low);
    }
    if (j.draws) not_min = block_max(&ex, &turn, not_min);
    if (tid == 0) {
        out->max = max;
        out->min = ~not_min;
        out->best = best;
    }
}

/* ---- K2 -------------------------------------------------------------------------------------- */

/* Adds the block's buckets to the row's. */
__device__ __forceinline__ static void
add_buckets(const struct job *j, const uint64_t weight[N_BUCKETS], const uint32_t count[N_BUCKETS])
{
    __syncthreads();
    for (int32_t b = (int32_t)threadIdx.x; b < N_BUCKETS; b += (int32_t)blockDim.x) {
        if (count[b] == 0) continue;
        atomicAdd(&j->sums->count[b], count[b]);
        atomicAdd((unsigned long long *)&j->sums->weight[b], (unsigned long long)weight[b]);
    }
}

/* Adds the threads' parts of the sum of e^y to the row's. */
__device__ __forceinline__ static void add_sums(const struct job *j, uint64_t hi, uint64_t lo)
{
    for (int m = 16; m; m >>= 1) {
        hi += shfl_xor_u64(hi, m);
        lo += shfl_xor_u64(lo, m);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd((unsigned long long *)&j->sums->sum_hi, (unsigned long long)hi);
        atomicAdd((unsigned long long *)&j->sums->sum_lo, (unsigned long long)lo);
    }
}

__global__ void __launch_bounds__(WEIGH_THREADS) sample_weigh(struct work w)
{
    __shared__ uint64_t weight[N_BUCKETS];
    __shared__ uint32_t count[N_BUCKETS];
    __shared__ struct row_best best;
    struct job j;
    if (!job_open(&w, (int32_t)blockIdx.y, &j) || !(j.draws || j.wants_sum)) return;
    row_open(&j, w.n_chunks, &best);
    if (best.is_corrupt) return;

    int32_t n_threads = (int32_t)blockDim.x, tid = (int32_t)threadIdx.x;
    int32_t per_split = (j.vocab + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
    int32_t first = (int32_t)blockIdx.x * per_split,
            last = first + per_split < j.vocab ? first + per_split : j.vocab;
    if (j.draws) {
        for (int32_t b = tid; b < N_BUCKETS; b += n_threads) {
            weight[b] = 0;
            count[b] = 0;
        }
        __syncthreads();
    }
    double max = best.max, raw_max = best.raw_max, scale = best.scale,
           temperature = j.r.temperature, min_p = j.r.min_p;
    /* then the weight and the term for logprobs have the same e^y */
    bool is_plain = !j.is_adjusted && temperature == 1.0;
    uint64_t hi = 0, lo = 0;
    /* load the next logit while this one's e^y is computed */
    float ahead = first + tid < last ? j.logits[first + tid] : 0;
    for (int32_t id = first + tid; id < last; id += n_threads) {
        float l = ahead;
        double e = 0;
        ahead = id + n_threads < last ? j.logits[id + n_threads] : 0;
        if (j.draws) {
            double y = y_of(adjusted(&j, l, id), max, temperature);
            if (y > TD_SAMPLE_Y_WEIGHTLESS) {
                e = td_sample_exp(y);
                uint64_t v = (uint64_t)(int64_t)(e * TD_SAMPLE_WEIGHT_ONE);
                if (v != 0 && !(e < min_p)) {
                    int32_t b = bucket_of(y, scale);
                    atomicAdd(&count[b], 1u);
                    add_shared(&weight[b], v);
                }
            }
        }
        if (j.wants_sum) {
            double y = (double)l - raw_max;
            if (y > TD_SAMPLE_Y_SUMLESS) {
                uint64_t h;
                int64_t t;
                if (!is_plain || e == 0) e = td_sample_exp(y);
                td_sample_parts(e, &h, &t);
                hi += h;
                lo += (uint64_t)t;
            }
        }
    }
    if (j.draws) add_buckets(&j, weight, count);
    if (j.wants_sum) add_sums(&j, hi, lo);
}

/* ---- K3 -------------------------------------------------------------------------------------- */

struct digits { /* counts and weights by digit, for a bucket that is cut further */
    uint64_t weight[N_DIGITS];
    uint32_t count[N_DIGITS];
};

struct list {           /* a bucket's elements, in any order */
    uint64_t key[LIST]; /* x_key */
    uint64_t w[LIST];
    int32_t id[LIST];
};

struct pick {                   /* shared */
    uint64_t weight[N_BUCKETS]; /* sums up to and including the bucket */
    uint32_t count[N_BUCKETS];
    union {
        struct digits digits;
        struct list list;
    } u;
    uint64_t warp_weight[32];
    uint32_t warp_count[32];
    struct exchange ex;
    struct row_best best;
    struct job job;
    int32_t at; /* the bucket or digit that was found */
    uint32_t n_list;
    int32_t id; /* the element that was found */
    uint64_t upto;
};

/* asks for the first element at which the running count reaches n, or (if n is 0) the running
 * weight reaches w */
struct target {
    uint64_t n, w;
};

/* the candidates in `bucket` with a key in [lo, hi]; logits outside [float_lo, float_hi] are not
 * among them */
struct range {
    double max, temperature, min_p, scale;
    uint64_t lo, hi;
    float float_lo, float_hi;
    int32_t bucket;
};

/* Turns count and weight [n] into their own inclusive prefix sums. n is a multiple of the number of
 * threads, which is a power of two. */
__device__ static void block_scan(struct pick *s, uint32_t *count, uint64_t *weight, int32_t n)
{
    int32_t per = n / (int32_t)blockDim.x, lane = (int32_t)threadIdx.x & 31,
            warp = (int32_t)threadIdx.x >> 5;
    int32_t first = (int32_t)threadIdx.x * per;
    uint32_t c = 0;
    uint64_t v = 0;
    for (int32_t i = first; i < first + per; i++) {
        c += count[i];
        v += weight[i];
    }
    uint32_t c_mine = c;
    uint64_t v_mine = v;
    for (int by = 1; by < 32; by <<= 1) {
        uint32_t c_below = __shfl_up_sync(FULL, c, by);
        uint64_t v_below = shfl_up_u64(v, by);
        if (lane >= by) {
            c += c_below;
            v += v_below;
        }
    }
    if (lane == 31) {
        s->warp_count[warp] = c;
        s->warp_weight[warp] = v;
    }
    __syncthreads();
    c -= c_mine;
    v -= v_mine;
    for (int32_t k = 0; k < warp; k++) {
        c += s->warp_count[k];
        v += s->warp_weight[k];
    }
    for (int32_t i = first; i < first + per; i++) {
        count[i] = c += count[i];
        weight[i] = v += weight[i];
    }
    __syncthreads();
}

/* The first of n prefix sums that reaches the target, where n_before and w_before come first.
 * Called by all threads; some sum does reach it. */
__device__ static int32_t block_find(struct pick *s, const uint32_t *count, const uint64_t *weight,
                                     int32_t n, struct target t, uint64_t n_before,
                                     uint64_t w_before)
{
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) {
        bool here = t.n ? n_before + count[i] >= t.n : w_before + weight[i] >= t.w;
        bool before =
            i > 0 && (t.n ? n_before + count[i - 1] >= t.n : w_before + weight[i - 1] >= t.w);
        if (here && !before) s->at = i;
    }
    __syncthreads();
    return s->at;
}

/* The bucket's range of x, widened by more than the roundings of y and of its bucket can move a
 * border. */
__device__ static void range_open(struct range *g, const struct row_best *best, const struct job *j,
                                  int32_t bucket)
{
    g->max = best->max;
    g->temperature = j->r.temperature;
    g->min_p = j->r.min_p;
    g->scale = best->scale;
    g->bucket = bucket;
    g->lo = 1;
    g->hi = ~0ull;
    g->float_lo = -3.4028234663852886e38f;
    g->float_hi = 3.4028234663852886e38f;
    /* here any finite logit may have its x in the bucket */
    if (g->scale == 0 || j->is_adjusted) return;
    double hi = g->max - bucket / g->scale * g->temperature,
           lo = g->max - (bucket + 1) / g->scale * g->temperature;
    /* a float's rounding is 1e-7 of it; (max - lo) is at most the sum of both */
    double slack = 1e-6 * ((hi < 0 ? -hi : hi) + (lo < 0 ? -lo : lo)) + 1e-44;
    hi += slack;
    lo -= slack;
    if (lo > g->float_lo) g->float_lo = (float)lo;
    if (hi < g->float_hi) g->float_hi = (float)hi;
}

/* x's weight if x is in the range, else 0. */
__device__ static inline uint64_t in_range(const struct range *g, double x, uint64_t *ret_key)
{
    double y = y_of(x, g->max, g->temperature);
    if (!(y > TD_SAMPLE_Y_WEIGHTLESS) || bucket_of(y, g->scale) != g->bucket) return 0;
    *ret_key = x_key(x);
    if (*ret_key < g->lo || *ret_key > g->hi) return 0;
    return weight_of(y, g->min_p);
}

enum scan_what { SCAN_ENDS, SCAN_DIGITS, SCAN_LIST };

/* A pass over the row's candidates in g. WHAT is ENDS: *ends takes the highest key and the highest
 * of ~key; DIGITS: counts into s->u.digits, digit (g->hi - key) >> shift; LIST: gathers into
 * s->u.list. */
template <int WHAT>
__device__ static void scan_row(struct pick *s, const struct job *j, const struct range *g,
                                int shift, uint64_t ends[2])
{
    enum { AHEAD = 16 };
    int32_t n_threads = (int32_t)blockDim.x;
    for (int32_t base = (int32_t)threadIdx.x; base < j->vocab; base += AHEAD * n_threads) {
        uint32_t hits = 0; /* several loads are in flight; few elements are in the range */
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            float l = base + k * n_threads < j->vocab ? j->logits[base + k * n_threads]
                                                      : -__builtin_inff();
            hits |= (uint32_t)(l >= g->float_lo && l <= g->float_hi) << k;
        }
#pragma unroll 1
        for (int k = 0; hits >> k; k++) {
            if (!(hits >> k & 1)) continue;
            int32_t id = base + k * n_threads;
            uint64_t key = 0, weight = in_range(g, adjusted(j, j->logits[id], id), &key);
            if (weight == 0) continue;
            if (WHAT == SCAN_ENDS) {
                ends[0] = key > ends[0] ? key : ends[0];
                ends[1] = ~key > ends[1] ? ~key : ends[1];
            } else if (WHAT == SCAN_DIGITS) {
                int32_t d = (int32_t)((g->hi - key) >> shift);
                atomicAdd(&s->u.digits.count[d], 1u);
                add_shared(&s->u.digits.weight[d], weight);
            } else {
                uint32_t at = atomicAdd(&s->n_list, 1u);
                s->u.list.key[at] = key;
                s->u.list.w[at] = weight;
                s->u.list.id[at] = id;
            }
        }
    }
}

/* The nth element (from 1) of the row, in the order of ids, whose key is g->lo == g->hi. */
__device__ static int32_t nth_equal(struct pick *s, const struct job *j, const struct range *g,
                                    uint64_t nth)
{
    int32_t n_threads = (int32_t)blockDim.x, lane = (int32_t)threadIdx.x & 31,
            warp = (int32_t)threadIdx.x >> 5, n_warps = n_threads >> 5;
    uint64_t before = 0;
    for (int32_t base = 0; base < j->vocab; base += n_threads) {
        int32_t id = base + (int32_t)threadIdx.x;
        uint64_t key = 0;
        bool is_equal = id < j->vocab && j->logits[id] > -__builtin_inff() &&
                        in_range(g, adjusted(j, j->logits[id], id), &key) != 0;
        uint32_t ballot = __ballot_sync(FULL, is_equal);
        if (lane == 0) s->warp_count[warp] = (uint32_t)__popc(ballot);
        __syncthreads();
        uint64_t mine = before + (uint32_t)__popc(ballot & (lane ? FULL >> (32 - lane) : 0));
        for (int32_t k = 0; k < n_warps; k++) {
            before += s->warp_count[k];
            if (k < warp) mine += s->warp_count[k];
        }
        if (is_equal && mine + 1 == nth) s->id = id;
        __syncthreads();
        if (before >= nth) break;
    }
    return s->id;
}

struct place {
    uint64_t upto; /* weight of all elements of the order up to and including this one */
    int32_t id;
};

/* Counts and weights of the range's elements by digit, summed up to and including each. */
__device__ __forceinline__ static void count_digits(struct pick *s, const struct job *j,
                                                    const struct range *g, int shift)
{
    for (int32_t i = (int32_t)threadIdx.x; i < N_DIGITS; i += (int32_t)blockDim.x) {
        s->u.digits.count[i] = 0;
        s->u.digits.weight[i] = 0;
    }
    __syncthreads();
    scan_row<SCAN_DIGITS>(s, j, g, shift, NULL);
    __syncthreads();
    block_scan(s, s->u.digits.count, s->u.digits.weight, N_DIGITS);
}

/* The element of s->u.list that t asks for, into s->id and s->upto. */
__device__ __forceinline__ static void find_in_list(struct pick *s, struct target t, int32_t n_in,
                                                    uint64_t n_before, uint64_t w_before)
{
    for (int32_t i = (int32_t)threadIdx.x; i < n_in; i += (int32_t)blockDim.x) {
        uint64_t key = s->u.list.key[i], weight = s->u.list.w[i], n = n_before, v = w_before;
        int32_t id = s->u.list.id[i];
        for (int32_t k = 0; k < n_in; k++) {
            bool is_before =
                s->u.list.key[k] > key || (s->u.list.key[k] == key && s->u.list.id[k] < id);
            n += is_before;
            v += is_before ? s->u.list.w[k] : 0;
        }
        if (t.n ? n + 1 == t.n : v < t.w && v + weight >= t.w) { /* one thread */
            s->id = id;
            s->upto = v + weight;
        }
    }
    __syncthreads();
}

/* Called by all threads, with the same answer in all. *held: the bucket whose elements all stand in
 * s->u.list, or -1. */
__device__ static struct place locate(struct pick *s, const struct job *j, struct target t,
                                      int *turn, int32_t *held)
{
    struct range g;
    struct place found;
    int32_t b = block_find(s, s->count, s->weight, N_BUCKETS, t, 0, 0);
    uint64_t n_before = b ? s->count[b - 1] : 0, w_before = b ? s->weight[b - 1] : 0,
             n_in = s->count[b] - n_before;

    range_open(&g, &s->best, j, b);
    if (n_in > LIST) {
        uint64_t ends[2] = {0, 0};
        *held = -1;
        scan_row<SCAN_ENDS>(s, j, &g, 0, ends);
        g.hi = block_max(&s->ex, turn, ends[0]);
        g.lo = ~block_max(&s->ex, turn, ends[1]);
        int shift = 0;
        while ((g.hi - g.lo) >> shift >= N_DIGITS) shift++;
        for (;;) {
            /* all keys are equal: the elements weigh the same, and the order is that of the ids */
            if (g.hi == g.lo) {
                uint64_t weight = weight_of(y_of(x_of_key(g.lo), g.max, g.temperature), g.min_p);
                uint64_t nth = t.n ? t.n - n_before : (t.w - w_before + weight - 1) / weight;
                found.upto = w_before + nth * weight;
                found.id = nth_equal(s, j, &g, nth);
                return found;
            }
            count_digits(s, j, &g, shift);
            int32_t d = block_find(s, s->u.digits.count, s->u.digits.weight, N_DIGITS, t, n_before,
                                   w_before);
            uint64_t n_skip = d ? s->u.digits.count[d - 1] : 0,
                     w_skip = d ? s->u.digits.weight[d - 1] : 0;
            n_in = s->u.digits.count[d] - n_skip;
            n_before += n_skip;
            w_before += w_skip;
            __syncthreads(); /* all threads have read the digits, which the next writes replace */
            g.hi -= (uint64_t)d << shift;
            uint64_t lo = g.hi - ((1ull << shift) - 1);
            g.lo = lo > g.lo ? lo : g.lo;
            if (n_in <= LIST) break;
            shift = shift > 10 ? shift - 10 : 0;
        }
    }
    if (*held != b) {
        if (threadIdx.x == 0) s->n_list = 0;
        __syncthreads();
        scan_row<SCAN_LIST>(s, j, &g, 0, NULL);
        *held = g.lo == 1 && g.hi == ~0ull ? b : -1;
    }
    __syncthreads();
    find_in_list(s, t, (int32_t)n_in, n_before, w_before);
    found.id = s->id;
    found.upto = s->upto;
    return found;
}

__device__ static int32_t draw(struct pick *s, const struct job *j, int *turn)
{
    int32_t held = -1;
    for (int32_t b = (int32_t)threadIdx.x; b < N_BUCKETS; b += (int32_t)blockDim.x) {
        s->count[b] = j->sums->count[b];
        s->weight[b] = j->sums->weight[b];
    }
    __syncthreads();
    block_scan(s, s->count, s->weight, N_BUCKETS);
    uint64_t n = s->count[N_BUCKETS - 1], total = s->weight[N_BUCKETS - 1];
    struct place found = {0, 0};
    for (int question = 0; question < 3; question++) { /* top-k, top-p, the draw */
        struct target t = {0, 0};
        if (question == 0) {
            t.n = j->r.top_k > 0 && (uint64_t)j->r.top_k < n ? (uint64_t)j->r.top_k : 0;
        } else if (question == 1) {
            t.w = j->r.top_p < 1 ? td_sample_top_p_target(j->r.top_p, total) : total;
            if (t.w >= total) t.w = 0;
        } else {
            t.w = td_sample_point(j->r.seed, (uint32_t)j->r.n_tokens, total) + 1;
        }
        if (t.n == 0 && t.w == 0) continue; /* everything is left: no question */
        found = locate(s, j, t, turn, &held);
        total = found.upto;
    }
    return found.id;
}

/* Called by the first warp: merges the chunks' lists, each descending, two to a lane. */
__device__ static void put_logprobs(const struct job *j, const struct row_best *best,
                                    int32_t n_chunks, int32_t token, struct td_sample_result *out)
{
    double log_z = td_sample_log(td_sample_sum(j->sums->sum_hi, (int64_t)j->sums->sum_lo));
    int32_t lane = (int32_t)threadIdx.x, at[2] = {0, 0}, n = 0, want = j->r.n_logprobs;
    uint64_t head[2];

    for (int k = 0; k < 2; k++)
        head[k] = lane + 32 * k < n_chunks ? j->best[lane + 32 * k].top[0] : 0;
    for (; n < want; n++) {
        uint64_t key = warp_max(head[0] > head[1] ? head[0] : head[1]);
        if (key == 0) break;
        for (int k = 0; k < 2; k++) {
            if (head[k] != key) continue;
            at[k]++;
            head[k] = at[k] < want ? j->best[lane + 32 * k].top[at[k]] : 0;
        }
        if (lane == 0) {
            out->top_tokens[n] = id_of_key(key);
            out->top_logprobs[n] = (float)((double)logit_of_key(key) - best->raw_max - log_z);
        }
    }
    if (lane == 0) {
        out->n_top = n;
        double l = j->logits[token];
        /* -0 as 0: raw_max is a key's */
        out->logprob = (float)((l == 0 ? 0.0 : l) - best->raw_max - log_z);
    }
}

__global__ void __launch_bounds__(PICK_THREADS) sample_pick(struct work w)
{
    TD_SHARED_BYTES(struct pick, s);
    const struct job *j = &s->job;
    int turn = 0;
    struct td_sample_result *out = &w.results[blockIdx.x];
    int32_t n_threads = (int32_t)blockDim.x, tid = (int32_t)threadIdx.x, token = 0;
    if (tid == 0) (void)job_open(&w, (int32_t)blockIdx.x, &s->job);
    __syncthreads();
    if (j->r.logits_row < 0) return;
    row_open(j, w.n_chunks, &s->best);

    uint32_t needs = (j->draws || j->wants_sum ? TD_SAMPLE_WEIGHTS : 0) |
                     (j->is_adjusted ? TD_SAMPLE_ADJUST : 0);
    td_status status = TD_OK;
    if (needs & ~w.features)
        status = TD_ERR_INTERNAL;
    else if (s->best.is_corrupt)
        status = TD_ERR_CORRUPT;
    else if (j->is_adjusted && *j->bad)
        status = TD_ERR_INVALID;
    if (status == TD_OK) {
        token = j->draws ? draw(s, j, &turn) : s->best.best;
        if (tid < 32 && j->wants_sum) put_logprobs(j, &s->best, w.n_chunks, token, out);
    }
    if (tid == 0 && w.totals && status == TD_OK) {
        uint64_t *t = w.totals + 3 * (size_t)blockIdx.x;
        t[0] = j->draws ? s->weight[N_BUCKETS - 1] : 0;
        t[1] = j->wants_sum ? j->sums->sum_hi : 0;
        t[2] = j->wants_sum ? j->sums->sum_lo : 0;
    }
    if (tid == 0) {
        out->status = status;
        out->token = token;
        if (status != TD_OK || !j->wants_sum) {
            out->n_top = 0;
            out->logprob = 0;
        }
    }
    if (j->is_adjusted && (w.features & TD_SAMPLE_ADJUST)) {
        /* Set `seen` and `bad` back to zero. No other block reads them any more, and behind the
         * barrier no thread of this one does. All of `seen` is cleared, not only the row's tokens,
         * because those lie across the bus. */
        __syncthreads();
        for (int32_t i = 4 * tid; i < j->vocab + 1; i += 4 * n_threads)
            *(uint4 *)(void *)(j->seen + i) = make_uint4(0, 0, 0, 0);
    }
}

__global__ void sample_zero(uint32_t *words, uint64_t n)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * blockDim.x)
        words[i] = 0;
}

/* ---- launchers ------------------------------------------------------------------------------- */

size_t td_cuda_sample_scratch_bytes(int32_t max_rows, int32_t vocab)
{
    return (size_t)max_rows * row_bytes(vocab);
}

td_status td_cuda_sample_clear(void *scratch, int32_t max_rows, int32_t vocab, struct td_err *err)
{
    if (vocab < 1 || vocab > TD_SAMPLE_MAX_VOCAB)
        return td_fail(err, TD_ERR_INVALID, "sampler: vocab is %d, must be in [1, %d]", (int)vocab,
                       TD_SAMPLE_MAX_VOCAB);
    TD_LAUNCH(sample_zero, dim3(256), dim3(256), 0, td_cuda.compute, (uint32_t *)scratch,
              (uint64_t)td_cuda_sample_scratch_bytes(max_rows, vocab) / 4);
    TD_LAUNCHED("sample_clear");
    if (!td_cuda_ok(cudaStreamSynchronize(td_cuda.compute), "sample_clear"))
        return td_fail(err, TD_ERR_DEVICE, "sampler: clearing its scratch: %s",
                       cudaGetErrorString(td_cuda.first_error));
    return TD_OK;
}

static int32_t power_of_two(int32_t at_least, int32_t lowest, int32_t highest)
{
    int32_t n = lowest;
    while (n < at_least && n < highest) n *= 2;
    return n;
}

void td_cuda_sample(const struct td_sample_args *a)
{
    int32_t best_threads = power_of_two((a->vocab + PER_THREAD - 1) / PER_THREAD, 32, BEST_THREADS);
    int32_t chunk = best_threads * PER_THREAD, n_chunks = (a->vocab + chunk - 1) / chunk;
    /* a small vocabulary needs few threads: more would only wait at barriers */
    int32_t pick_threads = power_of_two(a->vocab / 32, 64, PICK_THREADS);
    int32_t n_splits = (4 * td_cuda.n_sms + a->n_rows - 1) / a->n_rows,
            max_splits = (a->vocab + 2047) / 2048;
    unsigned n_rows = (unsigned)a->n_rows;
    struct work w = {a->logits,
                     a->logits_stride,
                     a->rows,
                     a->results,
                     a->totals,
                     (uint8_t *)a->scratch,
                     (int64_t)row_bytes(a->vocab),
                     a->vocab,
                     n_chunks,
                     a->features};

    TD_ASSERT(a->n_rows >= 1 && a->n_rows <= 65535 && a->vocab >= 1 &&
              a->vocab <= TD_SAMPLE_MAX_VOCAB);
    n_splits = n_splits > max_splits ? max_splits : n_splits;
    if (a->features & TD_SAMPLE_ADJUST) {
        TD_LAUNCH(sample_count, dim3(COUNT_BLOCKS, n_rows), dim3(COUNT_THREADS), 0, td_cuda.compute,
                  w);
        TD_LAUNCHED("sample_count");
    }
    TD_LAUNCH(sample_best, dim3((unsigned)n_chunks, n_rows), dim3((unsigned)best_threads), 0,
              td_cuda.compute, w);
    TD_LAUNCHED("sample_best");
    if (a->features & TD_SAMPLE_WEIGHTS) {
        TD_LAUNCH(sample_weigh, dim3((unsigned)n_splits, n_rows), dim3(WEIGH_THREADS), 0,
                  td_cuda.compute, w);
        TD_LAUNCHED("sample_weigh");
    }
    TD_LAUNCH(sample_pick, dim3(n_rows), dim3((unsigned)pick_threads), sizeof(struct pick),
              td_cuda.compute, w);
    TD_LAUNCHED("sample_pick");
}
