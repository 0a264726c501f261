/* entropy.h - numbers that nobody can guess, from getrandom(2): keys, and the numbers by which
 * requests are known. Numbers that must repeat are of random.h. Any thread. */
#ifndef TD_BASE_ENTROPY_H
#define TD_BASE_ENTROPY_H

#include <stddef.h>
#include <stdint.h>

/* n_bytes from the kernel; aborts if it cannot give them. */
void td_random_fill(void *data, size_t n_bytes);
/* The same, asked for 32 at a time. A child process has numbers of its own. Up to 31 that are not
 * given out yet lie in memory: keys are td_random_fill's. */
uint64_t td_random_u64(void);

#endif
