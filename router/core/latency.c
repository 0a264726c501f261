/* latency.c - three least-squares fits for each node class, a correction curve for each node,
 * quantile trackers and output lengths.
 *
 * Fit. It minimises the sum over samples of ((theta . x - y) / s)^2 under theta >= 0, with
 * s = max(prediction, y / 3). That is a relative error in which a stall of many times the
 * prediction weighs little: its pull falls as 1 / y. The state is the information A = sum x x' and
 * b = sum x y. It is solved anew after each sample by the active-set method of Lawson and Hanson
 * 1974, started from the last answer: usually one Cholesky of at most 5 x 5. The clamping is inside
 * the solution and not after it, so the other coefficients are optimal for the clamped one (B and K
 * are nearly collinear).
 *
 * Memories. There are two. The near one forgets as configured. The far one forgets a hundred times
 * slower and weighs as much as FAR_WEIGHT steps, so it decides only where the near one knows
 * nothing. An idle hour of one-sequence steps therefore does not forget what 64 sequences cost, the
 * covariance of what is not seen stays bounded (no wind-up), and the prior, which lies in the far
 * memory, holds where no sample speaks.
 *
 * Prior. It has the weight of about one step for each coefficient's share of it. A prior that is
 * wrong by more than RESCALE_EARLY_RATIO is taken as right in shape and wrong in size (a table of
 * another machine): theta is scaled to the sample.
 *
 * Steps. Steps with decode rows teach b, the others a. Until a class has shown a mixed step,
 * prefill rows in one cost what they cost alone. A mixed step is never predicted below its prefill
 * rows alone, so that predictions grow in every argument.
 *
 * Correction. Steps fall into 16 buckets by the logarithm of the model's time, those with and those
 * without decode rows apart. Each bucket in use gives a knot: mean model time, and median ratio *
 * mean model time. Pool-adjacent-violators makes the knots ascend, and the corrected time is the
 * line through them. A bare factor for each bucket would make a longer step look shorter at some
 * borders.
 *
 * Determinism: only +, -, *, /, sqrt and frexp, in one order, built with -ffp-contract=off like the
 * rest of the tree.
 *
 * Invariants: (1) theta is finite and >= 0; (2) knots ascend in both coordinates; (3) every q lies
 * in [Q_MIN, Q_MAX]. */
#include "router/core/latency.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_K TD_LAT_N_DECODE
#define N_LINK 2
/* Weight of "0" for a coefficient without a prior, in typical steps. */
#define RIDGE 0.05
#define FAR_WEIGHT 20.0     /* of the far memory, in steps */
#define FAR_FORGETTING 0.01 /* of the near memory's rate */
#define SCALE_FLOOR 0.01    /* of the mean step: a shorter step weighs no more than that */
/* A coefficient that the prior has as 0 may come to this share of a typical step. */
#define ZERO_PRIOR 0.3
/* A prior is scaled by any of the first 8 samples that is 4 times as long or as short. Later it
 * takes 16 samples one after the other on one side that are off by 2.25: more than corrections,
 * which end at 2, can make good. */
#define RESCALE_EARLY 8
#define RESCALE_EARLY_RATIO 4.0
#define RESCALE_STREAK 16
#define RESCALE_RATIO 2.25
#define JITTER 1e-9 /* of the diagonal, towards the last answer */

#define N_BUCKETS 16
/* Bucket 0 is below this, each further one is twice as long, and 15 is everything from 1 s on. */
#define BUCKET_0_S 64e-6
#define BUCKET_RATIOS 64  /* as many of the last ones make the median */
#define BUCKET_MIN 5      /* a bucket with fewer is not used */
#define BUCKET_STALE 1024 /* steps of the node: a median that is older is not used */
#define OVERALL_STALE 256
/* Samples of a class without a prior before its ratios mean something. */
#define CORRECTION_FROM 16
#define CORRECTION_MIN 0.5
#define CORRECTION_MAX 2.0

#define Q_MIN 0.5
#define Q_MAX 3.0
#define CHILD_MIN 20 /* samples before a class, or a bucket of it, stands on its own */
#define QUALITY_LAST 512

/* Output tokens of a request before any was seen, with the weight of OUTPUT_PRIOR requests. */
#define OUTPUT_MEAN 256.0
#define OUTPUT_P90 512.0 /* exponential lengths: 2.3 times the mean; uniform ones: 1.8 */
#define OUTPUT_PRIOR 2

#define MAX_CONTEXT (1ull << 25) /* tokens of one sequence; a report of more is no measurement */
#define MAX_ROWS (1u << 24)

/* a typical step: each coefficient is kept as its cost there */
static const double prefill_units[TD_LAT_N_PREFILL] = {1, 256, 256.0 * 1024};
static const double decode_units[TD_LAT_N_DECODE] = {1, 16, 16.0 * 1024, 256, 256.0 * 1024};
static const double link_units[N_LINK] = {1, 16 << 20};

/* --- least squares ---------------------------------------------------------------------------- */

struct memory {
    double a[MAX_K][MAX_K], b[MAX_K];
}; /* a: both triangles */

struct fit {
    struct memory near, far;
    double theta[MAX_K];          /* in units */
    double n_near, n_far, mean_y; /* samples in each memory, faded like them;
                                     mean cost */
    uint64_t n;
    int k, streak; /* streak: samples far above (positive) or
                      below, one after the other */
    bool has_prior;
};

static bool fit_known(const struct fit *f) { return f->n > 0 || f->has_prior; }

static double dot(int k, const double *x, const double *y)
{
    double sum = 0;
    for (int i = 0; i < k; i++) sum += x[i] * y[i];
    return sum;
}

static double usable(double x) { return x > 0 && x < 1e18 ? x : 0; }

static void fit_prior(struct fit *f, int k, const double *theta, const double *units)
{
    *f = (struct fit){.k = k};
    double typical = 0;
    for (int i = 0; i < k; i++) typical += f->theta[i] = usable(usable(theta[i]) * units[i]);
    f->has_prior = typical > 0;
    for (int i = 0; i < k && f->has_prior; i++) {
        double sd = fmax(f->theta[i], ZERO_PRIOR * typical);
        f->far.a[i][i] = 1 / (sd * sd);
        f->far.b[i] = f->far.a[i][i] * f->theta[i];
    }
}

/* s = argmin over the members of `set` of s'Ms/2 - r's, the others 0. False when M is not
 * positive definite there. */
static bool solve_on(int k, const double m[MAX_K][MAX_K], const double *r, uint32_t set,
                     double *ret_s)
{
    double l[MAX_K][MAX_K], y[MAX_K];
    int at[MAX_K], n = 0;
    for (int i = 0; i < k; i++) {
        ret_s[i] = 0;
        if (set >> i & 1) at[n++] = i;
    }
    for (int i = 0; i < n; i++) {
        double rest = r[at[i]];
        for (int j = 0; j <= i; j++) {
            double sum = m[at[i]][at[j]];
            for (int c = 0; c < j; c++) sum -= l[i][c] * l[j][c];
            if (j < i) {
                l[i][j] = sum / l[j][j];
                rest -= l[i][j] * y[j];
            } else {
                if (!(sum > 0)) return false;
                l[i][i] = sqrt(sum);
            }
        }
        y[i] = rest / l[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        double sum = y[i];
        for (int c = i + 1; c < n; c++) sum -= l[c][i] * ret_s[at[c]];
        ret_s[at[i]] = sum / l[i][i];
    }
    return true;
}

/* theta = argmin of theta'A theta/2 - b'theta under theta >= 0, A and b of both memories, from
 * the present theta on. Every iterate is feasible: stopping early is harmless. */
static void fit_solve(struct fit *f)
{
    double m[MAX_K][MAX_K], r[MAX_K], scale[MAX_K], u[MAX_K], s[MAX_K], r_max = 0;
    double far = f->n_far > FAR_WEIGHT ? FAR_WEIGHT / f->n_far : 1;
    uint32_t set = 0;
    /* unit diagonal */
    for (int i = 0; i < f->k; i++)
        scale[i] = 1 / sqrt(fmax(f->near.a[i][i] + far * f->far.a[i][i], 1e-250));
    for (int i = 0; i < f->k; i++) {
        for (int j = 0; j < f->k; j++)
            m[i][j] = (f->near.a[i][j] + far * f->far.a[i][j]) * scale[i] * scale[j];
        u[i] = f->theta[i] / scale[i];
        m[i][i] += JITTER;
        r[i] = (f->near.b[i] + far * f->far.b[i]) * scale[i] + JITTER * u[i];
        r_max = fmax(r_max, fabs(r[i]));
        if (u[i] > 0) set |= 1u << i;
    }
    for (int turn = 0; turn < 4 * MAX_K; turn++) {
        if (!solve_on(f->k, m, r, set, s)) break;
        double most = 1;
        int blocking = -1;
        for (int i = 0; i < f->k; i++) {
            if (!(set >> i & 1) || s[i] > 0) continue;
            double part = u[i] > s[i] ? u[i] / (u[i] - s[i]) : 0;
            if (blocking < 0 || part < most) most = part, blocking = i;
        }
        for (int i = 0; i < f->k; i++) u[i] = fmax(0, u[i] + most * (s[i] - u[i]));
        if (blocking >= 0) {
            u[blocking] = 0;
            set &= ~(1u << blocking);
            continue;
        }
        int best = -1;
        double steepest = 1e-10 * r_max;
        for (int i = 0; i < f->k; i++) {
            double gradient = r[i] - dot(f->k, m[i], u);
            if (!(set >> i & 1) && gradient > steepest) steepest = gradient, best = i;
        }
        if (best < 0) break;
        set |= 1u << best;
    }
    for (int i = 0; i < f->k; i++) {
        if (!isfinite(u[i] * scale[i])) return; /* (1) the last answer stays */
    }
    for (int i = 0; i < f->k; i++) f->theta[i] = u[i] * scale[i];
}

/* Everything in it cost `ratio` times as much, and is worth FAR_WEIGHT steps from now on: shapes
 * may change with sizes. */
static void memory_rescale(struct memory *m, int k, double ratio, double *n)
{
    double weight = *n > FAR_WEIGHT ? FAR_WEIGHT / *n : 1;
    for (int i = 0; i < k; i++) {
        m->b[i] *= weight / ratio;
        for (int j = 0; j < k; j++) m->a[i][j] *= weight / (ratio * ratio);
    }
    *n *= weight;
}

static void memory_add(struct memory *m, int k, const double *row, double target, double fade)
{
    for (int i = 0; i < k; i++) {
        m->b[i] = fade * m->b[i] + row[i] * target;
        for (int j = 0; j < k; j++) m->a[i][j] = fade * m->a[i][j] + row[i] * row[j];
    }
}

/* Learns that x cost y seconds, y > 0. */
static void fit_learn(struct fit *f, const double *x, double y, double forgetting, bool may_rescale)
{
    double predicted = dot(f->k, f->theta, x), row[MAX_K],
           far_forgetting = 1 - FAR_FORGETTING * (1 - forgetting);
    if (!fit_known(f)) {
        for (int i = 0; i < f->k; i++) f->far.a[i][i] = RIDGE / (y * y);
        predicted = y; /* as its own scale */
    }
    bool early = f->has_prior && f->n < RESCALE_EARLY;
    double far_off = early ? RESCALE_EARLY_RATIO : RESCALE_RATIO;
    int side = y > far_off * predicted ? 1 : y * far_off < predicted ? -1 : 0;
    f->streak = side == 0 || !may_rescale || predicted <= 0 ? 0
                : side * f->streak > 0                      ? f->streak + side
                                                            : side;
    if (f->streak * side >= (early ? 1 : RESCALE_STREAK)) {
        double ratio = fmin(fmax(y / predicted, 1e-9), 1e9);
        for (int i = 0; i < f->k; i++) f->theta[i] *= ratio;
        memory_rescale(&f->near, f->k, ratio, &f->n_near);
        memory_rescale(&f->far, f->k, ratio, &f->n_far);
        f->mean_y *= ratio;
        predicted *= ratio;
        f->streak = 0;
    }
    f->n++;
    f->mean_y += (y - f->mean_y) * fmax(1 / (double)f->n, 1 - forgetting);
    double s = fmax(fmax(predicted, y / 3), SCALE_FLOOR * f->mean_y);
    for (int i = 0; i < f->k; i++) row[i] = x[i] / s;
    memory_add(&f->near, f->k, row, y / s, forgetting);
    memory_add(&f->far, f->k, row, y / s, far_forgetting);
    f->n_near = forgetting * f->n_near + 1;
    f->n_far = far_forgetting * f->n_far + 1;
    fit_solve(f);
}

/* --- the correction of a node ----------------------------------------------------------------- */

enum kind { PREFILL, DECODE, N_KINDS };

/* The last ratios of observed to predicted times of one bucket. */
struct step_bucket {
    float ring[BUCKET_RATIOS], sorted[BUCKET_RATIOS];
    uint32_t n, next;
    double mean_model_s;
    uint64_t last; /* the node's step count when it was fed */
};

struct knot {
    double model_s, observed_s, weight;
};

struct node {
    uint32_t node_class;
    uint64_t n_steps;
    double overall;
    int n_knots[N_KINDS];
    struct knot knots[N_KINDS][N_BUCKETS];
    struct step_bucket step_buckets[N_KINDS][N_BUCKETS];
};

static double median(const struct step_bucket *b)
{
    return b->n % 2 ? b->sorted[b->n / 2]
                    : 0.5 * ((double)b->sorted[b->n / 2 - 1] + (double)b->sorted[b->n / 2]);
}

static double clamped_median(const struct step_bucket *b)
{
    return fmin(fmax(median(b), CORRECTION_MIN), CORRECTION_MAX);
}

static void step_bucket_put(struct step_bucket *b, float ratio)
{
    uint32_t at;
    if (b->n == BUCKET_RATIOS) { /* the oldest goes */
        for (at = 0; b->sorted[at] != b->ring[b->next]; at++) {
        }
        memmove(b->sorted + at, b->sorted + at + 1, (BUCKET_RATIOS - 1 - at) * sizeof *b->sorted);
        b->n--;
    }
    for (at = b->n; at > 0 && b->sorted[at - 1] > ratio; at--) b->sorted[at] = b->sorted[at - 1];
    b->sorted[at] = ratio;
    b->ring[b->next] = ratio;
    b->next = (b->next + 1) % BUCKET_RATIOS;
    b->n++;
}

static void node_clear(struct node *n)
{
    memset(n->step_buckets, 0, sizeof n->step_buckets);
    memset(n->n_knots, 0, sizeof n->n_knots);
    n->n_steps = 0;
    n->overall = 1;
}

static void rebuild_knots(struct node *n, enum kind kind)
{
    struct knot *knots = n->knots[kind];
    int count = 0;
    for (int i = 0; i < N_BUCKETS; i++) {
        const struct step_bucket *b = &n->step_buckets[kind][i];
        if (b->n < BUCKET_MIN || n->n_steps - b->last > BUCKET_STALE) continue;
        /* (2): both means rounded to the border between them */
        if (count > 0 && b->mean_model_s <= knots[count - 1].model_s) continue;
        knots[count++] = (struct knot){b->mean_model_s, clamped_median(b) * b->mean_model_s, b->n};
        for (int k = count - 1; k > 0 && knots[k - 1].observed_s > knots[k].observed_s; k--) {
            /* (2): runs that descend get their mean */
            int first = k - 1;
            while (first > 0 && knots[first - 1].observed_s == knots[k - 1].observed_s) first--;
            double sum = 0, weight = 0;
            for (int j = first; j < count; j++)
                sum += knots[j].weight * knots[j].observed_s, weight += knots[j].weight;
            for (int j = first; j < count; j++) knots[j].observed_s = sum / weight;
            k = first + 1;
        }
    }
    n->n_knots[kind] = count;
}

static void rebuild_overall(struct node *n)
{
    const struct step_bucket *used[N_KINDS * N_BUCKETS];
    int count = 0;
    uint32_t total = 0, below = 0;
    for (int i = 0; i < N_KINDS * N_BUCKETS; i++) {
        const struct step_bucket *b = &n->step_buckets[i / N_BUCKETS][i % N_BUCKETS];
        if (b->n < BUCKET_MIN || n->n_steps - b->last > OVERALL_STALE) continue;
        int at = count++;
        for (; at > 0 && median(used[at - 1]) > median(b); at--) used[at] = used[at - 1];
        used[at] = b;
        total += b->n;
    }
    n->overall = 1;
    for (int i = 0; i < count; i++) {
        below += used[i]->n;
        if (2 * below < total) continue;
        n->overall = clamped_median(used[i]);
        return;
    }
}

static void node_observe(struct node *n, enum kind kind, double model_s, double observed_s)
{
    int e;
    (void)frexp(model_s / BUCKET_0_S, &e);
    struct step_bucket *b = &n->step_buckets[kind][e < 0 ? 0 : e >= N_BUCKETS ? N_BUCKETS - 1 : e];
    n->n_steps++;
    if (n->n_steps - b->last > BUCKET_STALE) memset(b, 0, sizeof *b);
    step_bucket_put(b, (float)fmin(fmax(observed_s / model_s, 0.01), 100));
    b->mean_model_s += (model_s - b->mean_model_s) / b->n;
    b->last = n->n_steps;
    rebuild_knots(n, kind);
    rebuild_overall(n);
}

/* Segment `at` of the curve: below knot 0 (at = 0), up to knot `at`, above the last one (at =
 * n_knots). */
static double curve_segment(const struct knot *knots, int n_knots, int at, double model_s)
{
    if (n_knots == 0) return model_s;
    if (at == 0 || at == n_knots) {
        const struct knot *k = &knots[at == 0 ? 0 : n_knots - 1];
        return k->observed_s * (model_s / k->model_s);
    }
    const struct knot *lo = &knots[at - 1], *hi = &knots[at];
    return lo->observed_s + (hi->observed_s - lo->observed_s) *
                                ((model_s - lo->model_s) / (hi->model_s - lo->model_s));
}

static double corrected(const struct node *n, enum kind kind, double model_s)
{
    int at = 0;
    while (at < n->n_knots[kind] && model_s > n->knots[kind][at].model_s) at++;
    return curve_segment(n->knots[kind], n->n_knots[kind], at, model_s);
}

/* --- margins and output lengths --------------------------------------------------------------- */

struct tracker {
    double q;
    uint64_t n;
};

/* Moves towards the tau quantile of what is observed. */
static void tracker_step(struct tracker *t, double value, double tau, double gain)
{
    t->q += gain * (tau - (value <= t->q)) * t->q;
    t->n++;
}

struct lengths {
    double mean;
    struct tracker p90;
};

struct quality_ring {
    float ratio[QUALITY_LAST];
    bool covered[QUALITY_LAST];
    uint32_t n, next;
};

struct node_class {
    struct fit prefill, decode, link;
    bool mixed_known; /* decode: what prefill rows cost beside decode rows was seen,
                         or is in the prior */
};

#define N_OBJECTIVES 2
struct td_latency {
    struct td_lat_config config;
    struct node_class classes[TD_LAT_MAX_CLASSES];
    struct tracker margin_all[N_OBJECTIVES][TD_LAT_ALL_BUCKETS];
    struct tracker margin[N_OBJECTIVES][TD_LAT_MAX_SLO_CLASSES][TD_LAT_ALL_BUCKETS];
    struct quality_ring quality[N_OBJECTIVES];
    struct lengths output_all, output[TD_LAT_MAX_SLO_CLASSES];
    struct node nodes[TD_LAT_MAX_NODES];
};

/* Where margins start. A step is predicted as it is when the request is placed, and what is
 * admitted keeps it there: TPOT needs none to begin with, and one that is too wide refuses a
 * tenth of the capacity until it has been unlearned. A first token waits for things that nobody
 * reports. */
static const double q_start[N_OBJECTIVES] = {[TD_LAT_TTFT] = 1.2, [TD_LAT_TPOT] = 1.0};

static const struct tracker *margin_of(const struct td_latency *l, int what, uint32_t slo_class,
                                       uint32_t bucket)
{
    const struct tracker *own = &l->margin[what][slo_class][bucket];
    return own->n >= CHILD_MIN ? own : &l->margin_all[what][bucket];
}

uint32_t td_latency_bucket(double predicted_s, double objective_s)
{
    static const double edges[TD_LAT_BUCKETS - 1] = {0.5, 0.65, 0.75, 0.85, 0.92, 1.0, 1.2};
    uint32_t bucket = 0;
    while (bucket < TD_LAT_BUCKETS - 1 && predicted_s > edges[bucket] * objective_s) bucket++;
    return bucket;
}

static uint32_t bucket_of(uint32_t bucket)
{
    return bucket < TD_LAT_ALL_BUCKETS ? bucket : TD_LAT_BUCKETS - 1;
}

static void margin_step(const struct td_latency *l, struct tracker *t, double ratio)
{
    tracker_step(t, ratio, l->config.attainment, l->config.eta);
    t->q = fmin(fmax(t->q, Q_MIN), Q_MAX); /* (3) */
}

double td_latency_margin(const struct td_latency *latency, enum td_lat_objective what,
                         uint32_t slo_class, uint32_t bucket)
{
    TD_ASSERT((uint32_t)what < N_OBJECTIVES && slo_class < TD_LAT_MAX_SLO_CLASSES);
    return margin_of(latency, what, slo_class, bucket_of(bucket))->q;
}

void td_latency_observe_ratio(struct td_latency *latency, enum td_lat_objective what,
                              uint32_t slo_class, uint32_t bucket, double predicted_s,
                              double observed_s)
{
    TD_ASSERT((uint32_t)what < N_OBJECTIVES && slo_class < TD_LAT_MAX_SLO_CLASSES);
    double ratio = observed_s / predicted_s;
    /* nothing was predicted or seen */
    if (!(predicted_s > 0) || !(observed_s > 0) || !isfinite(predicted_s) || !isfinite(observed_s))
        return;
    bucket = bucket_of(bucket);
    struct quality_ring *ring = &latency->quality[what];
    ring->covered[ring->next] = ratio <= margin_of(latency, what, slo_class, bucket)->q;
    ring->ratio[ring->next] = (float)fmin(fmax(ratio, 1e-6), 1e6);
    ring->next = (ring->next + 1) % QUALITY_LAST;
    if (ring->n < QUALITY_LAST) ring->n++;
    struct tracker *all = &latency->margin_all[what][bucket],
                   *own = &latency->margin[what][slo_class][bucket];
    margin_step(latency, all, ratio);
    if (own->n >= CHILD_MIN)
        margin_step(latency, own, ratio);
    else
        *own = (struct tracker){.q = all->q,
                                .n = own->n + 1}; /* so that it starts where all classes are */
}

void td_latency_quality(const struct td_latency *latency, enum td_lat_objective what,
                        struct td_lat_quality *ret_quality)
{
    TD_ASSERT((uint32_t)what < N_OBJECTIVES);
    const struct quality_ring *ring = &latency->quality[what];
    double covered = 0, error = 0;
    for (uint32_t i = 0; i < ring->n; i++) {
        covered += ring->covered[i];
        error += fabs(1 / (double)ring->ratio[i] - 1); /* |predicted - observed| / observed */
    }
    double n = ring->n > 0 ? ring->n : 1;
    *ret_quality =
        (struct td_lat_quality){.coverage = covered / n, .mape = error / n, .n = ring->n};
}

static void lengths_put(struct lengths *o, double n_output)
{
    double n = (double)o->p90.n + 1 + OUTPUT_PRIOR;
    o->mean += (n_output - o->mean) * fmax(1 / n, 0.02);
    tracker_step(&o->p90, n_output, 0.9, 0.03);
    /* the mean is known sooner */
    if (o->p90.n < CHILD_MIN) o->p90.q = OUTPUT_P90 / OUTPUT_MEAN * o->mean;
    o->p90.q = fmin(fmax(o->p90.q, 1), 1e10);
}

void td_latency_observe_output(struct td_latency *latency, uint32_t slo_class, uint32_t n_output)
{
    TD_ASSERT(slo_class < TD_LAT_MAX_SLO_CLASSES);
    if (n_output == 0) return; /* ended before its first token: no length */
    lengths_put(&latency->output_all, n_output);
    lengths_put(&latency->output[slo_class], n_output);
}

double td_latency_output(const struct td_latency *latency, uint32_t slo_class, double quantile,
                         uint64_t max_tokens)
{
    TD_ASSERT(slo_class < TD_LAT_MAX_SLO_CLASSES);
    const struct lengths *o = &latency->output[slo_class];
    if (o->p90.n < CHILD_MIN) o = &latency->output_all;
    double part = fmin(fmax((quantile - 0.5) / 0.4, 0), 1), high = fmax(o->p90.q, o->mean);
    return fmax(1, fmin(o->mean + part * (high - o->mean), (double)max_tokens));
}

/* --- node classes and predictions ------------------------------------------------------------- */

td_status td_latency_create(const struct td_lat_config *config, struct td_latency **ret_latency,
                            struct td_err *err)
{
    if (!(config->attainment > 0 && config->attainment < 1)) {
        return td_fail(err, TD_ERR_INVALID,
                       "latency model: attainment is %g, must be between 0 and 1",
                       config->attainment);
    }
    if (!(config->eta > 0 && config->eta <= 0.5)) {
        return td_fail(err, TD_ERR_INVALID, "latency model: eta is %g, must be > 0 and <= 0.5",
                       config->eta);
    }
    if (!(config->forgetting >= 0.9 && config->forgetting <= 1)) {
        return td_fail(err, TD_ERR_INVALID, "latency model: forgetting is %g, must be 0.9..1",
                       config->forgetting);
    }
    struct td_latency *l = calloc(1, sizeof *l);
    if (!l) return td_fail(err, TD_ERR_NOMEM, "latency model: no memory for %zu bytes", sizeof *l);
    l->config = *config;
    struct td_lat_theta nothing = {0};
    for (uint32_t i = 0; i < TD_LAT_MAX_CLASSES; i++) td_latency_set_theta(l, i, &nothing);
    for (uint32_t i = 0; i < TD_LAT_MAX_NODES; i++) l->nodes[i].overall = 1;
    for (int what = 0; what < N_OBJECTIVES; what++)
        for (int i = 0; i < TD_LAT_ALL_BUCKETS; i++) l->margin_all[what][i].q = q_start[what];
    l->output_all = (struct lengths){.mean = OUTPUT_MEAN, .p90 = {.q = OUTPUT_P90}};
    for (uint32_t i = 0; i < TD_LAT_MAX_SLO_CLASSES; i++) l->output[i] = l->output_all;
    *ret_latency = l;
    return TD_OK;
}

void td_latency_destroy(struct td_latency *latency) { free(latency); }

static void forget_corrections(struct td_latency *l, uint32_t node_class)
{
    for (uint32_t i = 0; i < TD_LAT_MAX_NODES; i++) {
        if (l->nodes[i].node_class == node_class && l->nodes[i].n_steps > 0)
            node_clear(&l->nodes[i]);
    }
}

void td_latency_set_theta(struct td_latency *latency, uint32_t node_class,
                          const struct td_lat_theta *theta)
{
    TD_ASSERT(node_class < TD_LAT_MAX_CLASSES);
    struct node_class *c = &latency->classes[node_class];
    struct td_lat_theta t = {0};
    if (theta->known) t = *theta;
    double link[N_LINK] = {t.link_tau, t.link_bytes_per_s > 0 ? 1 / t.link_bytes_per_s : 0};
    fit_prior(&c->prefill, TD_LAT_N_PREFILL, t.prefill, prefill_units);
    fit_prior(&c->decode, TD_LAT_N_DECODE, t.decode, decode_units);
    fit_prior(&c->link, N_LINK, link, link_units);
    c->mixed_known = c->decode.theta[3] > 0 || c->decode.theta[4] > 0;
    forget_corrections(latency, node_class);
}

void td_latency_theta(const struct td_latency *latency, uint32_t node_class,
                      struct td_lat_theta *ret_theta)
{
    TD_ASSERT(node_class < TD_LAT_MAX_CLASSES);
    const struct node_class *c = &latency->classes[node_class];
    struct td_lat_theta t = {.known = fit_known(&c->prefill) || fit_known(&c->decode) ||
                                      fit_known(&c->link)};
    for (int i = 0; i < TD_LAT_N_PREFILL; i++)
        t.prefill[i] = c->prefill.theta[i] / prefill_units[i];
    for (int i = 0; i < TD_LAT_N_DECODE; i++) t.decode[i] = c->decode.theta[i] / decode_units[i];
    t.link_tau = c->link.theta[0] / link_units[0];
    t.link_bytes_per_s = c->link.theta[1] > 0 ? link_units[1] / c->link.theta[1] : 0;
    *ret_theta = t;
}

void td_latency_node_join(struct td_latency *latency, uint32_t node, uint32_t node_class)
{
    TD_ASSERT(node < TD_LAT_MAX_NODES && node_class < TD_LAT_MAX_CLASSES);
    latency->nodes[node].node_class = node_class;
    node_clear(&latency->nodes[node]);
}

double td_latency_correction(const struct td_latency *latency, uint32_t node)
{
    TD_ASSERT(node < TD_LAT_MAX_NODES);
    return latency->nodes[node].overall;
}

/* Steps without decode rows: the prefill model; until one was seen, that of steps with decode
 * rows. */
static enum kind alone_kind(const struct node_class *c)
{
    return fit_known(&c->prefill) || !fit_known(&c->decode) ? PREFILL : DECODE;
}

static void alone_theta(const struct node_class *c, double *ret_theta)
{
    bool own = alone_kind(c) == PREFILL;
    ret_theta[0] = own ? c->prefill.theta[0] : c->decode.theta[0];
    ret_theta[1] = own ? c->prefill.theta[1] : c->decode.theta[3];
    ret_theta[2] = own ? c->prefill.theta[2] : c->decode.theta[4];
}
_Static_assert(TD_LAT_N_PREFILL == 3 && TD_LAT_N_DECODE == 5,
               "a0 and b0, a1 and b3, a2 and b4 stand for the same and have the same units");

static double model_with_decode(const struct node_class *c, const double *x)
{
    double theta[TD_LAT_N_DECODE];
    memcpy(theta, c->decode.theta, sizeof theta);
    if (!c->mixed_known) theta[3] = c->prefill.theta[1], theta[4] = c->prefill.theta[2];
    return dot(TD_LAT_N_DECODE, theta, x);
}

void td_latency_observe_step(struct td_latency *latency, uint32_t node,
                             const struct td_lat_step *step)
{
    TD_ASSERT(node < TD_LAT_MAX_NODES);
    struct node *n = &latency->nodes[node];
    struct node_class *c = &latency->classes[n->node_class];
    uint64_t u = step->prefill_tokens, b = step->decode_seqs;
    /* Outside numbers: what cannot be a step is none. */
    if (step->wall_us == 0 || u + b == 0 || u > MAX_ROWS || b > MAX_ROWS) return;
    if (step->attention_work > u * MAX_CONTEXT || step->context_tokens > b * MAX_CONTEXT) return;
    double y = step->wall_us * 1e-6, work = (double)step->attention_work,
           context = (double)step->context_tokens, model;
    enum kind kind = b > 0 ? DECODE : PREFILL;
    struct fit *f = b > 0 ? &c->decode : &c->prefill;
    bool known = f->has_prior || f->n >= CORRECTION_FROM;
    if (kind == PREFILL) {
        double x[TD_LAT_N_PREFILL] = {1, (double)u / prefill_units[1], work / prefill_units[2]};
        model = dot(f->k, f->theta, x);
        fit_learn(f, x, y, latency->config.forgetting, true);
    } else {
        double x[TD_LAT_N_DECODE] = {1, (double)b / decode_units[1], context / decode_units[2],
                                     (double)u / decode_units[3], work / decode_units[4]};
        model = model_with_decode(c, x);
        /* f says nothing of prefill rows before the first ones */
        fit_learn(f, x, y, latency->config.forgetting, c->mixed_known || u == 0);
        if (u > 0) c->mixed_known = true;
    }
    if (known && model > 0) node_observe(n, kind, model, y);
}

void td_latency_observe_transfer(struct td_latency *latency, uint32_t node_class, uint64_t bytes,
                                 uint64_t wall_us)
{
    TD_ASSERT(node_class < TD_LAT_MAX_CLASSES);
    /* no measurement */
    if (bytes == 0 || wall_us == 0 || bytes > 1ull << 50 || wall_us > UINT32_MAX) return;
    double x[N_LINK] = {1, (double)bytes / link_units[1]};
    fit_learn(&latency->classes[node_class].link, x, (double)wall_us * 1e-6,
              latency->config.forgetting, true);
}

double td_latency_transfer(const struct td_latency *latency, uint32_t node_class,
                           double backlog_bytes, double bytes)
{
    TD_ASSERT(node_class < TD_LAT_MAX_CLASSES);
    double x[N_LINK] = {1, (usable(backlog_bytes) + usable(bytes)) / link_units[1]};
    return dot(N_LINK, latency->classes[node_class].link.theta, x);
}

double td_latency_step(const struct td_latency *latency, uint32_t node, double decode_seqs,
                       double context_tokens, double prefill_tokens, double attention_work)
{
    TD_ASSERT(node < TD_LAT_MAX_NODES);
    const struct node *n = &latency->nodes[node];
    const struct node_class *c = &latency->classes[n->node_class];
    double b = usable(decode_seqs), k = usable(context_tokens), u = usable(prefill_tokens),
           work = usable(attention_work), alone = 0, with = 0;
    if (u > 0) {
        double x[TD_LAT_N_PREFILL] = {1, u / prefill_units[1], work / prefill_units[2]},
               theta[TD_LAT_N_PREFILL];
        alone_theta(c, theta);
        alone = corrected(n, alone_kind(c), dot(TD_LAT_N_PREFILL, theta, x));
    }
    if (b > 0) {
        double x[TD_LAT_N_DECODE] = {1, b / decode_units[1], k / decode_units[2],
                                     u / decode_units[3], (u > 0 ? work : 0) / decode_units[4]};
        with = corrected(n, DECODE, model_with_decode(c, x));
    }
    return fmax(alone, with);
}

double td_latency_prefill(const struct td_latency *latency, uint32_t node, uint64_t u, uint64_t h,
                          uint32_t chunk_tokens)
{
    TD_ASSERT(node < TD_LAT_MAX_NODES);
    if (u == 0) return 0;
    const struct node *n = &latency->nodes[node];
    const struct node_class *c = &latency->classes[n->node_class];
    enum kind kind = alone_kind(c);
    const struct knot *knots = n->knots[kind];
    int n_knots = n->n_knots[kind];
    double theta[TD_LAT_N_PREFILL], total = 0;
    alone_theta(c, theta);
    double a0 = theta[0], a1 = theta[1] / prefill_units[1], a2 = theta[2] / prefill_units[2];
    uint64_t chunk = chunk_tokens > 0 && chunk_tokens < u ? chunk_tokens : u, n_full = u / chunk,
             rest = u % chunk;
    /* Full chunk i costs first + i * growth before the correction. The curve is straight between
     * knots, so the chunks between two knots cost as many times their mean: no loop over chunks. */
    double w = (double)chunk, first = a0 + a1 * w + a2 * w * ((double)h + w / 2),
           growth = a2 * w * w, done = 0, full = (double)n_full;
    for (int at = 0; at <= n_knots && done < full; at++) {
        double from = first + done * growth, count = full - done;
        if (at < n_knots) {
            if (from > knots[at].model_s) continue;
            if (from + (count - 1) * growth > knots[at].model_s)
                count = fmin(count, floor((knots[at].model_s - from) / growth) + 1);
        }
        total += count * curve_segment(knots, n_knots, at, from + (count - 1) / 2 * growth);
        done += count;
    }
    if (rest > 0) {
        double last = (double)rest;
        total += corrected(n, kind, a0 + a1 * last + a2 * last * ((double)h + full * w + last / 2));
    }
    return total;
}
