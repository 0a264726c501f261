/* sampler.c - chooses one token from one row of logits, in O(vocab) and without a sort.
 *
 * Weights. Token i with adjusted logit x_i has the weight floor(2^44 * exp((x_i - max x) /
 * temperature)), an integer. Sums of integers are exact in any order, so a prefix of the descending
 * order has one weight however it was found: by a sort (the reference in the test), by buckets
 * (here) or by a tree (a GPU). A token of weight 0 is 2^44 times less likely than the best one and
 * is never drawn. vocab <= 2^19 keeps a sum below 2^63.
 *
 * Selection. The order is (x descending, id ascending). top-k, top-p and the draw ask the same
 * question: at which element does the running count, or the running weight, reach a target? None
 * needs the truncated set itself, because every set is a prefix of one order:
 *     top-k  the k-th element; S = weight up to and including it
 *     top-p  the first element at which the running weight is >= top_p * S (the weight before it is
 *            < top_p * S, as in vLLM); S2 = weight there
 *     draw   the first element at which the running weight is > r, with r uniform in [0, S2)
 * locate() answers it: it makes a histogram over 2048 buckets of x between the lowest and highest
 * candidate, picks the bucket, keeps its elements (in the order of ids), and repeats until few are
 * left. The three questions share the first histogram, over all weights above 0. Lowest and highest
 * fall into different buckets, so every later round makes progress, and the range shrinks
 * 2000-fold: few rounds even for rows made to be difficult.
 *
 * The bits are the same everywhere, also on a device: kernels/sample_math.h.
 *
 * Not finite: NaN and -inf are not candidates. +inf is an overflow in the model, where no
 * distribution exists: TD_ERR_CORRUPT, as for a row without a finite logit. */
#include "common/model/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/sample_math.h"

_Static_assert(TD_MAX_LOGIT_BIAS == TD_SAMPLE_MAX_BIAS,
               "what a request may ask is what a row may hold");
_Static_assert(TD_MAX_TOP_LOGPROBS == TD_SAMPLE_MAX_TOP,
               "what a request may ask is what a row may hold");

#define N_BUCKETS 2048
#define LEAF 24 /* at most this many candidates are sorted by insertion */
/* seen[]: the token occurs; the bits below count it in the output */
#define SEEN 0x80000000u

#define WORD 64           /* tokens of a word of a mask */
#define BLOCK 256         /* elements handled at once; arrays are padded to it */
#define NO_BUCKET 0xffffu /* no candidate: weight 0, or below min-p */

struct cand {
    double x;
    uint64_t w;
    int32_t id;
};

struct td_sampler {
    int32_t vocab, padded; /* padded: vocab rounded up to BLOCK; the pad is no candidate */
    double *x;             /* [padded] adjusted logits */
    uint64_t *w;           /* [padded] weights */
    uint16_t *bucket_of;   /* [padded] first-round bucket */
    uint32_t *seen;        /* [vocab] all zero between calls */
    struct cand *part;     /* [vocab] the bucket that locate() looks into, in id order */
    float *word_max;       /* of each 64 logits, as a mask has them in its words */
    uint32_t count[N_BUCKETS], sub_count[N_BUCKETS];
    uint64_t weight[N_BUCKETS], sub_weight[N_BUCKETS];
};

typedef double v4d __attribute__((vector_size(32)));
typedef float v8f __attribute__((vector_size(32)));
typedef uint64_t v4u __attribute__((vector_size(32)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint16_t v16h __attribute__((vector_size(32)));

void td_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_out[4])
{
    td_sample_philox(counter, key, ret_out);
}

/* ---- exp with the same bits everywhere ------------------------------------------------------- */

/* 2^-44 = e^-30.5, so no candidate is more than 31 below the maximum. */
#define FIRST_SCALE ((N_BUCKETS - 1) / 31.0)

/* For x[0..BLOCK): y = (x - max) / temperature, which is at most 0; ret_e = e^y; ret_bucket = the
 * first-round bucket of y. This is td_sample_exp on vectors: the compiler splits them as the CPU
 * allows, and the bits stay the same. */
static inline __attribute__((always_inline)) void
weigh_body(const double *x, double max, double temperature, double *ret_e, int32_t *ret_bucket)
{
    /* adding it rounds to an integer, which then stands in the low bits of the double */
    const v4d magic = 0x1.8p52 + (v4d){0};

    for (int i = 0; i < BLOCK; i += 4) {
        v4d y;
        memcpy(&y, x + i, sizeof y);
        y = (y - max) / temperature;
        v4u above = (v4u)(y > TD_SAMPLE_Y_MIN);
        y = (v4d)(((v4u)y & above) | ((v4u)(TD_SAMPLE_Y_MIN + (v4d){0}) & ~above));
        v4i bucket = __builtin_convertvector(y * -FIRST_SCALE, v4i);
        memcpy(ret_bucket + i, &bucket, sizeof bucket);
        v4d km = y * 0x1.71547652b82fep0 + magic, k = km - magic;
        v4d r = (y - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
        v4d p = 1.0 / 479001600 + (v4d){0};
        TD_SAMPLE_TAYLOR(p, r);
        p *= (v4d)(((v4u)km + 1023) << 52);
        memcpy(ret_e + i, &p, sizeof p);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void
weigh_avx2(const double *x, double max, double temperature, double *ret_e, int32_t *ret_bucket)
{
    weigh_body(x, max, temperature, ret_e, ret_bucket);
}
#endif

static void weigh(const double *x, double max, double temperature, double *ret_e,
                  int32_t *ret_bucket)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        weigh_avx2(x, max, temperature, ret_e, ret_bucket);
        return;
    }
#endif
    weigh_body(x, max, temperature, ret_e, ret_bucket);
}

/* ---- life and checks ------------------------------------------------------------------------- */

td_status td_sampler_create(int32_t vocab, struct td_sampler **ret_sampler, struct td_err *err)
{
    if (vocab < 1 || vocab > TD_SAMPLE_MAX_VOCAB)
        return td_fail(err, TD_ERR_INVALID, "sampler: vocab is %d, must be in [1, %d]", (int)vocab,
                       TD_SAMPLE_MAX_VOCAB);
    struct td_sampler *s = calloc(1, sizeof *s);
    if (s == NULL) return td_fail(err, TD_ERR_NOMEM, "sampler: no memory");
    size_t n = (size_t)vocab, padded = (n + BLOCK - 1) / BLOCK * BLOCK;
    s->vocab = vocab;
    s->padded = (int32_t)padded;
    s->x = malloc(padded * sizeof *s->x);
    s->w = malloc(padded * sizeof *s->w);
    s->bucket_of = malloc(padded * sizeof *s->bucket_of);
    s->seen = calloc(n, sizeof *s->seen);
    s->part = malloc(n * sizeof *s->part);
    s->word_max = malloc((n + WORD - 1) / WORD * sizeof *s->word_max);
    if (s->x == NULL || s->w == NULL || s->bucket_of == NULL || s->seen == NULL ||
        s->part == NULL || s->word_max == NULL) {
        td_sampler_destroy(s);
        return td_fail(err, TD_ERR_NOMEM, "sampler: no memory for a vocabulary of %d", (int)vocab);
    }
    for (size_t i = n; i < padded; i++) s->x[i] = -INFINITY;
    *ret_sampler = s;
    return TD_OK;
}

void td_sampler_destroy(struct td_sampler *sampler)
{
    if (sampler == NULL) return;
    free(sampler->x);
    free(sampler->w);
    free(sampler->bucket_of);
    free(sampler->seen);
    free(sampler->part);
    free(sampler->word_max);
    free(sampler);
}

/* ---- a device's rows ------------------------------------------------------------------------- */

static bool has_penalties(const struct td_sampling *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

size_t td_sample_payload_bytes(const struct td_sampling *s, int32_t n_tokens)
{
    size_t tokens = has_penalties(s) ? (size_t)n_tokens * sizeof(int32_t) : 0;
    return (tokens + 7) / 8 * 8 + (size_t)s->n_logit_bias * sizeof(struct td_sample_bias);
}

td_status td_sample_pack(const struct td_sampling *s, const int32_t *tokens, int32_t n_tokens,
                         int32_t n_prompt, int32_t logits_row, struct td_sample_payload *payload,
                         struct td_sample_row *ret_row, uint32_t *features)
{
    TD_ASSERT(!s->allowed); /* rows with a mask are sampled on the host */
    size_t need = td_sample_payload_bytes(s, n_tokens);
    if (need > payload->bytes - payload->used) return TD_ERR_LIMIT;
    unsigned char *at = payload->base + payload->used;
    struct td_sample_bias *bias = (struct td_sample_bias *)(void *)(at + need) - s->n_logit_bias;
    if (has_penalties(s) && n_tokens > 0) memcpy(at, tokens, (size_t)n_tokens * sizeof *tokens);
    /* stable by token, so that biases of one token are added in the request's order */
    for (int32_t i = 0; i < s->n_logit_bias; i++) {
        int32_t k = i;
        for (; k > 0 && bias[k - 1].token > s->logit_bias[i].token; k--) bias[k] = bias[k - 1];
        bias[k] =
            (struct td_sample_bias){.token = s->logit_bias[i].token, .bias = s->logit_bias[i].bias};
    }
    payload->used += need;
    *ret_row =
        (struct td_sample_row){.seed = s->seed,
                               .tokens = has_penalties(s) ? (const int32_t *)(void *)at : NULL,
                               .bias = s->n_logit_bias > 0 ? bias : NULL,
                               .logits_row = logits_row,
                               .n_tokens = n_tokens,
                               .n_prompt = n_prompt,
                               .n_bias = s->n_logit_bias,
                               .top_k = s->top_k,
                               .n_logprobs = s->n_logprobs,
                               .temperature = s->temperature,
                               .top_p = s->top_p,
                               .min_p = s->min_p,
                               .repetition_penalty = s->repetition_penalty,
                               .presence_penalty = s->presence_penalty,
                               .frequency_penalty = s->frequency_penalty};
    *features |= (s->temperature > 0 || s->n_logprobs >= 0 ? TD_SAMPLE_WEIGHTS : 0) |
                 (has_penalties(s) || s->n_logit_bias > 0 ? TD_SAMPLE_ADJUST : 0);
    return TD_OK;
}

void td_sample_pack_padding(struct td_sample_row *ret_row)
{
    *ret_row = (struct td_sample_row){
        .logits_row = -1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
}

td_status td_sample_unpack(const struct td_sample_result *result, struct td_sampled *ret_sampled)
{
    if (result->status != TD_OK) return (td_status)result->status;
    struct td_sampled out = {
        .token = result->token, .logprob = result->logprob, .n_top = result->n_top};
    TD_ASSERT(out.n_top >= 0 && out.n_top <= TD_MAX_TOP_LOGPROBS);
    for (int32_t i = 0; i < out.n_top; i++) {
        out.top_tokens[i] = result->top_tokens[i];
        out.top_logprobs[i] = result->top_logprobs[i];
    }
    *ret_sampled = out;
    return TD_OK;
}

/* ---- adjusted logits ------------------------------------------------------------------------- */

/* vLLM's definitions: repetition over prompt and output, once per distinct token; presence and
 * frequency over the output. */
static td_status apply_penalties(struct td_sampler *sm, const struct td_sampling *s,
                                 const int32_t *tokens, int32_t n_tokens, int32_t n_prompt)
{
    td_status st = TD_OK;
    int32_t n = 0;
    for (; n < n_tokens; n++) {
        int32_t t = tokens[n];
        if (t < 0 || t >= sm->vocab) {
            st = TD_ERR_INVALID;
            break;
        }
        sm->seen[t] = (sm->seen[t] | SEEN) + (n >= n_prompt);
    }
    double rep = s->repetition_penalty;
    for (int32_t i = 0; i < n; i++) {
        int32_t t = tokens[i];
        uint32_t seen = sm->seen[t];
        if (seen == 0) continue; /* done at its first occurrence */
        sm->seen[t] = 0;
        uint32_t n_output = seen & ~SEEN;
        double x = sm->x[t];
        if (rep != 1.0) x = x > 0 ? x / rep : x * rep;
        if (n_output > 0) {
            x -= (double)s->presence_penalty;
            x -= (double)s->frequency_penalty * (double)n_output;
        }
        sm->x[t] = x;
    }
    return st;
}

/* m: where x is larger, x; x may be NaN, which never is. By address: without AVX the compiler has
 * no way to return 32 bytes. */
static inline __attribute__((always_inline)) void raise_to(v8f *m, const void *x)
{
    v8f v;
    memcpy(&v, x, sizeof v);
    v8i above = v > *m;
    *m = (v8f)(((v8i)v & above) | ((v8i)*m & ~above));
}

/* The highest of up to 64 logits; -inf when all are NaN or -inf. Several chains, because a
 * comparison waits for the one before it. */
static inline __attribute__((always_inline)) float word_max(const float *logits, int32_t n)
{
    float max = -INFINITY;
    if (n < WORD) {
        for (int32_t i = 0; i < n; i++) max = logits[i] > max ? logits[i] : max;
        return max;
    }
    v8f m[4];
    for (int k = 0; k < 4; k++) m[k] = -INFINITY + (v8f){0};
    for (int k = 0; k < 4; k++) raise_to(&m[k], logits + 8 * k);
    for (int k = 0; k < 4; k++) raise_to(&m[k], logits + 32 + 8 * k);
    raise_to(&m[0], &m[1]);
    raise_to(&m[2], &m[3]);
    raise_to(&m[0], &m[2]);
    float half[4];
    for (int i = 0; i < 4; i++) half[i] = m[0][i] > m[0][i + 4] ? m[0][i] : m[0][i + 4];
    float x = half[0] > half[2] ? half[0] : half[2], y = half[1] > half[3] ? half[1] : half[3];
    return x > y ? x : y;
}

/* The highest logit, and that of each word of 64. */
static inline __attribute__((always_inline)) float row_max_body(const float *logits, int32_t vocab,
                                                                float *ret_of_words)
{
    float max = -INFINITY;
    for (int32_t base = 0; base < vocab; base += WORD) {
        float of_word = word_max(logits + base, vocab - base < WORD ? vocab - base : WORD);
        if (ret_of_words) ret_of_words[base / WORD] = of_word;
        max = of_word > max ? of_word : max;
    }
    return max;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static float row_max_avx2(const float *logits, int32_t vocab,
                                                          float *ret_of_words)
{
    return row_max_body(logits, vocab, ret_of_words);
}
#endif

/* The highest logit; -inf for a row of only NaN and -inf. ret_of_words: one for each word of 64, or
 * NULL. */
static float row_max(const float *logits, int32_t vocab, float *ret_of_words)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return row_max_avx2(logits, vocab, ret_of_words);
#endif
    return row_max_body(logits, vocab, ret_of_words);
}

/* Which of the word of tokens from `base` on are allowed; without a mask all that there are. */
static uint64_t bits_of(const struct td_sampler *sm, int32_t base, const uint64_t *allowed)
{
    int32_t n = sm->vocab - base;
    uint64_t all = n >= WORD ? UINT64_MAX : ((uint64_t)1 << n) - 1;
    return allowed ? all & allowed[base / WORD] : all;
}

/* sm->x: the row, and -inf where the mask forbids. */
static void take_row(struct td_sampler *sm, const float *logits, const uint64_t *allowed)
{
    for (int32_t base = 0; base < sm->vocab; base += WORD) {
        int32_t n = sm->vocab - base < WORD ? sm->vocab - base : WORD;
        uint64_t in = bits_of(sm, base, allowed), out = bits_of(sm, base, NULL) & ~in;
        double *x = sm->x + base;
        if (n == WORD && in) /* a count that the compiler knows */
            for (int32_t i = 0; i < WORD; i++) x[i] = logits[base + i];
        else
            for (int32_t i = 0; i < n; i++) x[i] = in ? logits[base + i] : -INFINITY;
        for (; in && out; out &= out - 1) x[__builtin_ctzll(out)] = -INFINITY;
    }
}

/* The largest logit of an allowed token (NULL: of any), the lowest id among equals; -1: none is
 * above -inf. row_max was raw_max. Mostly the mask allows the largest of all; else few words have
 * one that is larger than what was found before them. */
static int32_t best_allowed(const struct td_sampler *sm, const float *logits, float raw_max,
                            const uint64_t *allowed)
{
    float max = -INFINITY;
    int32_t best = -1;
    for (int32_t base = 0; base < sm->vocab; base += WORD) {
        if (sm->word_max[base / WORD] != raw_max) continue;
        for (uint64_t in = bits_of(sm, base, allowed); in; in &= in - 1)
            if (logits[base + __builtin_ctzll(in)] == raw_max) return base + __builtin_ctzll(in);
    }
    for (int32_t base = 0; base < sm->vocab; base += WORD) {
        if (!(sm->word_max[base / WORD] > max)) continue;
        for (uint64_t in = bits_of(sm, base, allowed); in; in &= in - 1) {
            int32_t i = base + __builtin_ctzll(in);
            if (!(logits[i] > max)) continue;
            max = logits[i];
            best = i;
        }
    }
    return best;
}

/* ---- log-probabilities of the raw row -------------------------------------------------------- */

static void put_logprobs(int32_t n_logprobs, const float *logits, int32_t vocab, double max,
                         struct td_sampled *out)
{
    v4u hi = {0}, lo = {0}; /* the two parts of the sum of all e^y, as in sample_math.h */
    double l64[BLOCK], e[BLOCK];
    int32_t n = 0, want = n_logprobs, unused[BLOCK];

    for (int32_t base = 0; base < vocab; base += BLOCK) {
        int32_t len = vocab - base < BLOCK ? vocab - base : BLOCK;
        for (int32_t i = 0; i < len; i++) l64[i] = logits[base + i];
        for (int32_t i = len; i < BLOCK; i++) l64[i] = -INFINITY;
        weigh(l64, max, 1, e, unused);
        for (int32_t i = 0; i < BLOCK; i += 4) { /* td_sample_parts; NaN, -inf and the pad
                                                    are e^-100 and add 0 */
            v4d v;
            memcpy(&v, e + i, sizeof v);
            v *= 0x1p32;
            v4d h = v + TD_SAMPLE_HI_MAGIC,
                l = (v - (h - TD_SAMPLE_HI_MAGIC)) * 0x1p44 + TD_SAMPLE_LO_MAGIC;
            hi += (v4u)h - (v4u)(TD_SAMPLE_HI_MAGIC + (v4d){0});
            lo += (v4u)l - (v4u)(TD_SAMPLE_LO_MAGIC + (v4d){0});
        }
    }
    double log_z = td_sample_log(
        td_sample_sum(hi[0] + hi[1] + hi[2] + hi[3], (int64_t)(lo[0] + lo[1] + lo[2] + lo[3])));
    float floor_logit = -INFINITY; /* of the n best, once they are full */
    for (int32_t i = 0; i < vocab && want > 0; i++) {
        float l = logits[i];
        if (!(l > floor_logit || (n < want && l > -INFINITY))) continue;
        int32_t at = n < want ? n++ : n - 1;
        for (; at > 0 && out->top_logprobs[at - 1] < l; at--) {
            out->top_logprobs[at] = out->top_logprobs[at - 1];
            out->top_tokens[at] = out->top_tokens[at - 1];
        }
        out->top_logprobs[at] = l;
        out->top_tokens[at] = i;
        if (n == want) floor_logit = out->top_logprobs[n - 1];
    }
    for (int32_t i = 0; i < n; i++)
        out->top_logprobs[i] = (float)((double)out->top_logprobs[i] - max - log_z);
    out->n_top = n;
    out->logprob = (float)((double)logits[out->token] - max - log_z);
}

/* ---- selection ------------------------------------------------------------------------------- */

struct place {
    int32_t id;
    uint64_t upto; /* weight of all elements of the order up to and including this one */
};

/* (hi - x) * scale, rounded down, never decreases as x falls. */
static inline int32_t bucket_index(double x, double hi, double scale)
{
    return (int32_t)((hi - x) * scale);
}

/* scale such that lo falls into the last bucket or the one before; 0 when lo == hi */
static double bucket_scale(double hi, double lo)
{
    return hi > lo ? (N_BUCKETS - 1) / (hi - lo) : 0;
}

/* Copies the candidates of first-round bucket b to `part`, in the order of ids; returns how many
 * there are. */
static int32_t gather_bucket(struct td_sampler *sm, uint16_t b)
{
    int32_t n = 0;
    for (int32_t base = 0; base < sm->padded; base += 16) {
        v16h v;
        uint64_t any[4];
        memcpy(&v, sm->bucket_of + base, sizeof v);
        v = (v16h)(v == b);
        memcpy(any, &v, sizeof any);
        if ((any[0] | any[1] | any[2] | any[3]) == 0) continue;
        for (int32_t i = base; i < base + 16; i++)
            if (sm->bucket_of[i] == b)
                sm->part[n++] = (struct cand){.x = sm->x[i], .w = sm->w[i], .id = i};
    }
    return n;
}

/* The first element at which the running count reaches n_target, or (if n_target is 0) the running
 * weight reaches w_target. Targets are >= 1, and some element reaches them. sm->count and
 * sm->weight hold the first round's histogram. */
static struct place locate(struct td_sampler *sm, uint64_t n_target, uint64_t w_target)
{
    const uint32_t *count = sm->count;
    const uint64_t *weight = sm->weight;
    struct cand *c = sm->part;
    uint64_t n_before = 0, w_before = 0;
    double scale = 0, hi = 0;
    int32_t n_part = 0;

    for (int round = 0;; round++) {
        int32_t b = 0;
        while (n_target ? n_before + count[b] < n_target : w_before + weight[b] < w_target) {
            n_before += count[b];
            w_before += weight[b];
            b++;
        }
        if (round == 0) {
            n_part = gather_bucket(sm, (uint16_t)b);
        } else {
            int32_t kept = 0;
            for (int32_t i = 0; i < n_part; i++)
                if (bucket_index(c[i].x, hi, scale) == b) c[kept++] = c[i];
            n_part = kept;
        }
        if (n_part <= LEAF) break;
        double lo = c[0].x;
        hi = c[0].x;
        for (int32_t i = 1; i < n_part; i++) {
            hi = c[i].x > hi ? c[i].x : hi;
            lo = c[i].x < lo ? c[i].x : lo;
        }
        scale = bucket_scale(hi, lo);
        if (scale == 0) break; /* all equal: id order is the order */
        memset(sm->sub_count, 0, sizeof sm->sub_count);
        memset(sm->sub_weight, 0, sizeof sm->sub_weight);
        for (int32_t i = 0; i < n_part; i++) {
            int32_t k = bucket_index(c[i].x, hi, scale);
            sm->sub_count[k]++;
            sm->sub_weight[k] += c[i].w;
        }
        count = sm->sub_count;
        weight = sm->sub_weight;
    }
    if (n_part <= LEAF) {
        for (int32_t i = 1; i < n_part; i++) { /* stable: equal x stay in id order */
            struct cand v = c[i];
            int32_t at = i;
            for (; at > 0 && c[at - 1].x < v.x; at--) c[at] = c[at - 1];
            c[at] = v;
        }
    }
    int32_t i = 0;
    while (n_target ? n_before + 1 < n_target : w_before + c[i].w < w_target) {
        n_before++;
        w_before += c[i++].w;
        TD_ASSERT(i < n_part);
    }
    return (struct place){.id = c[i].id, .upto = w_before + c[i].w};
}

static int32_t draw(struct td_sampler *sm, const struct td_sampling *s, double max,
                    int32_t position)
{
    double min_p = s->min_p, e[BLOCK];
    int32_t bucket[BLOCK];
    uint64_t total = 0;
    int32_t n = 0;

    memset(sm->count, 0, sizeof sm->count);
    memset(sm->weight, 0, sizeof sm->weight);
    for (int32_t base = 0; base < sm->padded; base += BLOCK) {
        weigh(sm->x + base, max, s->temperature, e, bucket);
        for (int32_t i = 0; i < BLOCK; i++) {
            uint64_t w = (uint64_t)(int64_t)(e[i] * TD_SAMPLE_WEIGHT_ONE);
            if (w == 0 || e[i] < min_p) {
                sm->bucket_of[base + i] = NO_BUCKET;
                continue;
            }
            int32_t b = bucket[i];
            sm->w[base + i] = w;
            sm->bucket_of[base + i] = (uint16_t)b;
            sm->count[b]++;
            sm->weight[b] += w;
            total += w;
            n++;
        }
    }

    if (s->top_k > 0 && s->top_k < n) total = locate(sm, (uint64_t)s->top_k, 0).upto;
    if (s->top_p < 1) {
        uint64_t target = td_sample_top_p_target(s->top_p, total);
        if (target < total) total = locate(sm, 0, target).upto;
    }

    return locate(sm, 0, td_sample_point(s->seed, (uint32_t)position, total) + 1).id;
}

td_status td_sample(struct td_sampler *sm, const struct td_sampling *s, const float *logits,
                    const int32_t *tokens, int32_t n_tokens, int32_t n_prompt,
                    struct td_sampled *ret_sampled)
{
    float raw_max = row_max(logits, sm->vocab, sm->word_max);
    if (!(raw_max > -INFINITY) || raw_max == INFINITY) return TD_ERR_CORRUPT;

    bool penalties = has_penalties(s);
    bool adjusted = penalties || s->n_logit_bias > 0;
    int32_t best = -1;
    double max = -INFINITY;
    if (adjusted || s->temperature > 0) take_row(sm, logits, s->allowed);
    if (adjusted) { /* what is forbidden stays -inf by any of it */
        for (int32_t i = 0; i < s->n_logit_bias; i++)
            sm->x[s->logit_bias[i].token] += (double)s->logit_bias[i].bias;
        if (penalties) {
            td_status st = apply_penalties(sm, s, tokens, n_tokens, n_prompt);
            if (st != TD_OK) return st;
        }
        for (int32_t i = 0; i < sm->vocab; i++) {
            if (sm->x[i] > max) {
                max = sm->x[i];
                best = i;
            }
        }
    } else {
        best = best_allowed(sm, logits, raw_max, s->allowed);
        if (best >= 0) max = logits[best];
    }
    if (best < 0) return TD_ERR_CORRUPT;

    struct td_sampled out = {.token = best};
    if (s->temperature > 0) out.token = draw(sm, s, max, n_tokens);
    if (s->n_logprobs >= 0) put_logprobs(s->n_logprobs, logits, sm->vocab, raw_max, &out);
    *ret_sampled = out;
    return TD_OK;
}

td_status td_sample_score(const float *logits, int32_t vocab, int32_t token, int32_t n_top,
                          struct td_scored *ret_scored)
{
    float max = row_max(logits, vocab, NULL);
    if (!(max > -INFINITY) || max == INFINITY) return TD_ERR_CORRUPT;
    *ret_scored = (struct td_scored){.at = {.token = token}, .rank = 1};
    put_logprobs(n_top, logits, vocab, max, &ret_scored->at);
    for (int32_t i = 0; i < vocab; i++) ret_scored->rank += logits[i] > logits[token];
    return TD_OK;
}
