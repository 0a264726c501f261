/* file_stamp.h - has a file changed since it was last looked at? What stat says of it, kept to be
 * compared.
 *
 * Why here: certificates are read again while a process runs, by gRPC's side and by the KV port's;
 * both must see a rename, a rewrite in place, a symbolic link that points elsewhere now (how
 * Kubernetes renews secrets) and a file that came or went.
 *
 * A stamp differs when the bytes might: also the time of the inode's own change counts, which no
 * program can set back, so a rewrite of equal length with its old time restored is seen. A chmod
 * or a new link is then a change, too: one more reading. Two rewrites of one inode within a tick
 * of the file system's clock (some ms) may look like one. Owns nothing; any thread; blocks on
 * the disk only. */
#ifndef TD_BASE_FILE_STAMP_H
#define TD_BASE_FILE_STAMP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <time.h>

/* Zeroed = no file, or one that cannot be looked at. */
struct td_file_stamp {
    struct timespec modified, changed;
    off_t bytes;
    ino_t inode;
    dev_t device;
};

/* One stamp for each of paths[0..n); a NULL path is "no file". Symbolic links are followed. */
void td_file_stamps_take(const char *const *paths, size_t n, struct td_file_stamp *ret_stamps);
bool td_file_stamps_equal(const struct td_file_stamp *a, const struct td_file_stamp *b, size_t n);

#endif
