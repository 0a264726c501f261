/* closed_form.c - see closed_form.h. */
#include "sim/closed_form.h"

#include <math.h>

double td_md1_wait_s(double rate, double d)
{
    return rate * d >= 1 ? INFINITY : rate * d * d / (2 * (1 - rate * d));
}

double td_md1_rate(double d, double target_s)
{
    double slack = target_s - d; /* rate d^2 = 2 slack (1 - rate d) */
    return slack <= 0 ? 0 : 2 * slack / (d * d + 2 * slack * d);
}

double td_md1_quantile_s(double rate, double d, double p)
{
    double rho = rate * d;
    if (rho >= 1) return INFINITY;
    if (rho <= 0) return d;
    /* P(W > t) ~ C exp(-theta t), theta the positive root of rate (e^(theta d) - 1) = theta, C =
       (1 - rho) / (rho e^(theta d) - 1) (Tijms). */
    double low = 1e-12 / d, high = 1 / d;
    while (rate * expm1(high * d) - high < 0) high *= 2;
    for (int i = 0; i < 200; i++) {
        double mid = (low + high) / 2;
        if (rate * expm1(mid * d) - mid < 0)
            low = mid;
        else
            high = mid;
    }
    double theta = (low + high) / 2, c = (1 - rho) / (rho * exp(theta * d) - 1);
    return d + fmax(0, log(c / (1 - p)) / theta);
}

double td_rate_match(double prefill_seq_s, uint32_t n_prefill, double decode_seq_s,
                     uint32_t n_decode)
{
    return fmin(prefill_seq_s * n_prefill * 0.90, decode_seq_s * n_decode * 0.92);
}

static double step_of(const struct td_perf *p, int64_t batch, double context)
{
    struct td_perf_batch b = {.decode_rows = batch, .context_tokens = (double)batch * context};
    return td_perf_step_s(p, &b);
}

int64_t td_decode_batch(const struct td_perf *p, double isl, double osl, double tpot_s,
                        int64_t max_batch)
{
    double context = isl + osl / 2;
    int64_t low = 0, high = max_batch;
    if (p->kv_tokens) {
        /* each of them at its longest */
        int64_t fits = (int64_t)((double)p->kv_tokens / (isl + osl));
        if (fits < high) high = fits;
    }
    while (low < high) { /* the largest that is fast enough; a step never gets faster with its
                            batch, apart from a table's seam */
        int64_t mid = (low + high + 1) / 2;
        if (step_of(p, mid, context) <= tpot_s)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

double td_decode_rate(const struct td_perf *p, double isl, double osl, double tpot_s,
                      int64_t max_batch)
{
    int64_t b = td_decode_batch(p, isl, osl, tpot_s, max_batch);
    return b ? (double)b / (fmax(1, osl - 1) * step_of(p, b, isl + osl / 2)) : 0;
}
