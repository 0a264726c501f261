/* fit.h - the search for scales behind formats whose layout leaves the choice open. Included inside
 * kernels/ only.
 *
 * For given codes q the best scale follows by least squares, so the search is over codes: each
 * candidate scale gives the nearest codes, these give their best scale, and the candidate whose
 * codes explain most of the squares of x is kept. Candidates lie around the scale that maps the
 * value of largest magnitude to the end of the codes' range; a little inside or outside of it is
 * often better, because few values are that large.                                               */
#ifndef TD_KERNELS_FORMATS_FIT_H
#define TD_KERNELS_FORMATS_FIT_H

#include <stdint.h>

/* The scale s for which s * q, q whole numbers in [lo, hi], comes closest to x[n], n <= 32 and
 * lo < 0. It may be negative; 0 where all x are 0. */
float td_fit_scale(const float *x, int n, float lo, float hi);

/* The same for s > 0 and any n: what checkpoints of Hugging Face hold has no negative scales. */
float td_fit_positive_scale(const float *x, int n, float lo, float hi);

/* The scale s >= 0 and the minimum m >= 0 for which s * q - m, q whole numbers in [0, top], comes
 * closest to x[32]. */
void td_fit_scale_min(const float *x, float top, float *ret_scale, float *ret_min);

/* The same as td_fit_scale for codes that stand for the 16 entries of td_values_iq4, and n = 32. */
float td_fit_iq4(const float *x);
/* The number of the entry of td_values_iq4 that is nearest to v. */
uint8_t td_nearest_iq4(float v);

#endif
