/* min.h - the lesser of two unsigned numbers: what is left, but no more than fits. */
#ifndef TD_BASE_MIN_H
#define TD_BASE_MIN_H

#include <stdint.h>

static inline uint32_t td_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint64_t td_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

#endif
