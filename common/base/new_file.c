/* new_file.c - see new_file.h. */
#include "common/base/new_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static td_status exists(const struct td_new_file *f, struct td_err *err)
{
    return td_fail(err, TD_ERR_INVALID, "%s exists, and is not replaced", f->path);
}

td_status td_new_file_create(struct td_new_file *f, const char *path, bool may_replace,
                             struct td_err *err)
{
    *f = (struct td_new_file){.fd = -1, .may_replace = may_replace};
    int n = snprintf(f->partial, sizeof f->partial, "%s.partial-%d", path, (int)getpid());
    if (n < 0 || (size_t)n >= sizeof f->partial)
        return td_fail(err, TD_ERR_LIMIT, "path of %zu bytes is too long, must be below %zu",
                       strlen(path), sizeof f->partial - 32);
    snprintf(f->path, sizeof f->path, "%s", path);
    if (!may_replace && access(path, F_OK) == 0) return exists(f, err);
    f->fd = open(f->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (f->fd < 0) return td_fail(err, TD_ERR_IO, "%s: %s", f->partial, strerror(errno));
    return TD_OK;
}

td_status td_new_file_reserve(struct td_new_file *f, uint64_t n_bytes, struct td_err *err)
{
    int e = posix_fallocate(f->fd, 0, (off_t)n_bytes);
    if (e == ENOSPC || e == EFBIG || e == EDQUOT)
        return td_fail(err, TD_ERR_IO, "%s: no room for %" PRIu64 " bytes: %s", f->path, n_bytes,
                       strerror(e));
    return TD_OK;
}

td_status td_new_file_write(struct td_new_file *f, const void *bytes, size_t n_bytes,
                            struct td_err *err)
{
    const uint8_t *at = bytes;
    while (n_bytes > 0) {
        ssize_t n = write(f->fd, at, n_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return td_fail(err, TD_ERR_IO, "%s: writing behind byte %" PRIu64 ": %s", f->path,
                           f->n_bytes, strerror(n ? errno : ENOSPC));
        at += n;
        n_bytes -= (size_t)n;
        f->n_bytes += (uint64_t)n;
    }
    return TD_OK;
}

td_status td_new_file_commit(struct td_new_file *f, struct td_err *err)
{
    td_status s = TD_OK;
    if (ftruncate(f->fd, (off_t)f->n_bytes) || fsync(f->fd))
        s = td_fail(err, TD_ERR_IO, "%s: %s", f->path, strerror(errno));
    if (close(f->fd) && !s) s = td_fail(err, TD_ERR_IO, "%s: %s", f->path, strerror(errno));
    f->fd = -1;
    /* link fails where the name has been taken meanwhile; rename would replace the other file */
    if (!s && !f->may_replace && !link(f->partial, f->path)) {
        unlink(f->partial);
        return TD_OK;
    }
    if (!s && !f->may_replace && errno == EEXIST) s = exists(f, err);
    if (!s && rename(f->partial, f->path))
        s = td_fail(err, TD_ERR_IO, "%s: rename: %s", f->path, strerror(errno));
    if (s) unlink(f->partial);
    return s;
}

void td_new_file_abandon(struct td_new_file *f)
{
    if (f->fd < 0) return;
    close(f->fd);
    f->fd = -1;
    unlink(f->partial);
}
