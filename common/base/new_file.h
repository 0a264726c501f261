/* new_file.h - writes a file that appears under its name only when it is complete: its bytes go to
 * PATH.partial-PID beside it, and one rename at the end gives it its name. Whatever goes wrong
 * before, a file of that name stays as it was and the partial one is removed. One thread. */
#ifndef TD_BASE_NEW_FILE_H
#define TD_BASE_NEW_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_new_file {
    char path[4096], partial[4096];
    int fd;           /* -1: nothing open */
    bool may_replace; /* a file of that name */
    uint64_t n_bytes; /* written */
};

/* TD_ERR_INVALID: `path` exists, and may_replace is false. TD_ERR_IO: with the cause. On failure
 * nothing is open. */
td_status td_new_file_create(struct td_new_file *f, const char *path, bool may_replace,
                             struct td_err *err);
/* Fails early when the file system lacks room for n_bytes; where it cannot say, it succeeds. */
td_status td_new_file_reserve(struct td_new_file *f, uint64_t n_bytes, struct td_err *err);
/* Appends. TD_ERR_IO names the file, the cause ("No space left on device") and how far it came. */
td_status td_new_file_write(struct td_new_file *f, const void *bytes, size_t n_bytes,
                            struct td_err *err);
/* Brings the bytes to the disk and gives the file its name. Closes it, on failure too. */
td_status td_new_file_commit(struct td_new_file *f, struct td_err *err);
/* Removes what was written. Does nothing when nothing is open. */
void td_new_file_abandon(struct td_new_file *f);

#endif
