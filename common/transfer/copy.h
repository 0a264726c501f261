/* copy.h - copies blocks that this core does not read next.
 *
 * Why here: shm's speed is that of its copy. memcpy of less than the last cache holds fetches the
 * destination's lines before it overwrites them and leaves both blocks in the caches. Non-temporal
 * stores do not fetch them, and so move a third fewer bytes.
 *
 * Versions (AMD EPYC Zen 4, one core of a shared machine, 512 MiB of memfd on each side, medians of
 * 15, GB/s at 16 KiB, 64 KiB, 256 KiB, 1 MiB):
 *   ref     memcpy                                                             7.1  7.4   7.9   7.5
 *   avx2    32-byte streaming stores, source prefetched 1 KiB ahead, 1 sfence 10.5  9.2  11.9  11.6
 * 64-byte stores (AVX-512) were as fast, four pages in turn slower: neither is kept. */
#ifndef TD_TRANSFER_COPY_H
#define TD_TRANSFER_COPY_H

#include <stddef.h>
#include <stdint.h>

/* shorter ones go by memcpy: a fence and cold lines are not worth it */
#define TD_XFER_COPY_STREAM_MIN 16384

/* to[0, n) = from[0, n), which do not overlap; any alignment. The stores are done, in the sense
 * of a release that follows, when it returns; the loads are plain ones. The fastest version of
 * this machine, chosen once. Any thread. */
void td_xfer_copy(uint8_t *to, const uint8_t *from, size_t n);

/* For tests and measurements: the versions that run here, 0 the plain one; NULL past the last. */
typedef void (*td_xfer_copy_fn)(uint8_t *to, const uint8_t *from, size_t n);
td_xfer_copy_fn td_xfer_copy_version(size_t i);

#endif
