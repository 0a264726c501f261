/* attn_neon.c - attention for every aarch64 CPU. The code is attn_simd.h. How fast it is has not
 * been measured: it has run under emulation only. */
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/attn_simd.h"
