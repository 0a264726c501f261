/* file_stamp.h - detects that a file has changed since it was last looked at, by comparing what
 * stat(2) says of it.
 *
 * Why here: gRPC's side and the KV port's side both read certificates again while a process runs.
 * Both must notice a rename, a rewrite in place, a symbolic link that points elsewhere now (how
 * Kubernetes renews secrets), and a file that appeared or disappeared.
 *
 * A stamp differs when the bytes may differ. It includes the time of the inode's own change, which
 * no program can set back, so a rewrite of equal length with its old time restored is noticed. A
 * chmod or a new link counts as a change, too (Kubernetes sets the owner of a mounted secret again
 * and again), so callers do expensive work only if td_files_hash differs, too. Two rewrites
 * of one inode within a tick of the file system's clock (some ms) may look like one. Owns nothing;
 * any thread; blocks on the disk only. */
#ifndef TD_BASE_FILE_STAMP_H
#define TD_BASE_FILE_STAMP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

/* Zeroed = there is no file, or stat failed. */
struct td_file_stamp {
    struct timespec modified, changed;
    off_t bytes;
    ino_t inode;
    dev_t device;
};

/* One stamp for each of paths[0..n); a NULL path is "no file". Symbolic links are followed. */
void td_file_stamps_take(const char *const *paths, size_t n, struct td_file_stamp *ret_stamps);
/* A hash of the contents of paths[0..n), each up to max_bytes; a NULL path, or a file that cannot
 * be read, counts as empty. To be taken after the stamps and before the reading that follows: a
 * change between two of them is then seen at the next look. */
uint64_t td_files_hash(const char *const *paths, size_t n, size_t max_bytes);
bool td_file_stamps_equal(const struct td_file_stamp *a, const struct td_file_stamp *b, size_t n);

#endif
