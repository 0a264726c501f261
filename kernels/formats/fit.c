/* fit.c - see fit.h. Sums are f32 in ascending order: the same bits everywhere. */
#include "kernels/formats/fit.h"

#include "kernels/formats/write.h"

/* x explained by codes q: sum(x q)^2 / sum(q^2) of the squares of x, with scale sum(x q) /
 * sum(q^2). */
struct fit {
    float explained, scale;
};

static void keep_better(struct fit *best, float xq, float qq)
{
    if (!(qq > 0) || xq * xq <= best->explained * qq) return;
    *best = (struct fit){xq * xq / qq, xq / qq};
}

/* Candidates map `largest` to about `end`. */
static float fit_scale(const float *x, int n, float lo, float hi, float largest, float end)
{
    enum { STEPS = 9 };
    struct fit best = {0};
    if (!(fabsf(largest) > 0x1p-100f)) return 0; /* the inverse stays finite */
    for (int step = -STEPS; step <= STEPS; step++) {
        float inverse = (end + 0.1f * (float)step) / largest, xq = 0, qq = 0;
        for (int i = 0; i < n; i++) {
            float q = td_clamp(td_round(x[i] * inverse), lo, hi);
            xq += x[i] * q;
            qq += q * q;
        }
        keep_better(&best, xq, qq);
    }
    return best.scale;
}

float td_fit_scale(const float *x, int n, float lo, float hi)
{
    return fit_scale(x, n, lo, hi, td_largest(x, n), lo);
}

float td_fit_positive_scale(const float *x, int n, float lo, float hi)
{
    return fit_scale(x, n, lo, hi, fabsf(td_largest(x, n)), 0.5f * (hi - lo));
}

/* The best s and m for given codes, m not below 0, and the squared error that they leave (apart
 * from the squares of x, which no choice changes). */
static float fit_line(float x_sum, float xq, float q_sum, float qq, float *ret_s, float *ret_m)
{
    float det = TD_GROUP * qq - q_sum * q_sum, s, m;
    s = m = 0;
    if (det > 0) {
        s = (TD_GROUP * xq - x_sum * q_sum) / det;
        m = (s * q_sum - x_sum) / TD_GROUP;
    }
    if (!(m > 0) || !(s > 0)) {
        s = qq > 0 && xq > 0 ? xq / qq : 0;
        m = 0;
    }
    *ret_s = s;
    *ret_m = m;
    return s * s * qq - 2 * s * m * q_sum + TD_GROUP * m * m - 2 * s * xq + 2 * m * x_sum;
}

void td_fit_scale_min(const float *x, float top, float *ret_scale, float *ret_min)
{
    enum { STEPS = 20 };
    float lo = 0, hi = x[0], x_sum = 0;
    for (int i = 0; i < TD_GROUP; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
        x_sum += x[i];
    }
    *ret_scale = 0;
    *ret_min = -lo;
    if (!(hi - lo > 0x1p-100f)) return;
    float best = INFINITY;
    for (int step = 0; step <= STEPS; step++) {
        /* from a range that is wider by a code to one that is narrower by one */
        float inverse = (top - 1.0f + 0.1f * (float)step) / (hi - lo), xq = 0, q_sum = 0, qq = 0;
        for (int i = 0; i < TD_GROUP; i++) {
            float q = td_clamp(td_round((x[i] - lo) * inverse), 0, top);
            xq += x[i] * q;
            q_sum += q;
            qq += q * q;
        }
        float s, m, error = fit_line(x_sum, xq, q_sum, qq, &s, &m);
        if (!(error < best)) continue;
        best = error;
        *ret_scale = s;
        *ret_min = m;
    }
}

/* The middle between two neighbours of td_values_iq4 is a whole multiple of a half. So the entry
 * nearest to v depends on the least whole number that is not below 2 v, and a table of these has
 * it: entry k is nearest from above the middle behind entry k - 1 up to the middle behind itself.
 * A search over the entries took three times as long to write a model. */
enum { HALVES = 320 }; /* beyond the outermost entries by more than td_fit_iq4's candidates reach */
#define AT(halves) ((halves) + HALVES)
#define UP_TO(above, to, k) [AT((above) + 1)... AT(to)] = k
static const uint8_t nearest_iq4[2 * HALVES + 1] = {
    [0 ... AT(-231)] = 0, UP_TO(-231, -187, 1), UP_TO(-187, -148, 2), UP_TO(-148, -114, 3),
    UP_TO(-114, -84, 4),  UP_TO(-84, -57, 5),   UP_TO(-57, -32, 6),   UP_TO(-32, -9, 7),
    UP_TO(-9, 14, 8),     UP_TO(14, 38, 9),     UP_TO(38, 63, 10),    UP_TO(63, 91, 11),
    UP_TO(91, 122, 12),   UP_TO(122, 158, 13),  UP_TO(158, 202, 14),  UP_TO(202, HALVES, 15),
};

uint8_t td_nearest_iq4(float v)
{
    float halves = td_clamp(2 * v, -(float)HALVES, (float)HALVES);
    /* rounded up: what is cut off below a positive number is rounded down */
    return nearest_iq4[2 * HALVES - (int)((float)HALVES - halves)];
}

float td_fit_iq4(const float *x)
{
    enum { STEPS = 7 };
    float largest = td_largest(x, TD_GROUP);
    struct fit best = {0};
    if (!(fabsf(largest) > 0x1p-100f)) return 0;
    for (int step = -STEPS; step <= STEPS; step++) {
        float inverse = ((float)td_values_iq4[0] + (float)step) / largest, xq = 0, qq = 0;
        for (int i = 0; i < TD_GROUP; i++) {
            float q = (float)td_values_iq4[td_nearest_iq4(x[i] * inverse)];
            xq += x[i] * q;
            qq += q * q;
        }
        keep_better(&best, xq, qq);
    }
    return best.scale;
}
