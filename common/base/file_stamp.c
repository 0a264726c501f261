/* file_stamp.c - takes stamps and compares them field by field, because padding bytes are
 * undefined. */
#include "common/base/file_stamp.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/hash.h"
#include "common/base/mem.h"

void td_file_stamps_take(const char *const *paths, size_t n, struct td_file_stamp *ret_stamps)
{
    memset(ret_stamps, 0, n * sizeof *ret_stamps);
    for (size_t i = 0; i < n; i++) {
        struct stat st;
        if (!paths[i] || stat(paths[i], &st)) continue;
        ret_stamps[i] = (struct td_file_stamp){.modified = st.st_mtim,
                                               .changed = st.st_ctim,
                                               .bytes = st.st_size,
                                               .inode = st.st_ino,
                                               .device = st.st_dev};
    }
}

uint64_t td_files_hash(const char *const *paths, size_t n, size_t max_bytes)
{
    uint64_t hash = 0;
    for (size_t i = 0; i < n; i++) {
        char *text = NULL;
        size_t n_bytes = 0;
        struct td_err err = {0};
        if (paths[i] && td_file_read(paths[i], max_bytes, &text, &n_bytes, &err)) n_bytes = 0;
        hash = td_hash64(text ? text : "", n_bytes, hash + i + 1);
        free(text);
    }
    return hash;
}

static bool same_time(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

bool td_file_stamps_equal(const struct td_file_stamp *a, const struct td_file_stamp *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!same_time(&a[i].modified, &b[i].modified) ||
            !same_time(&a[i].changed, &b[i].changed) || a[i].bytes != b[i].bytes ||
            a[i].inode != b[i].inode || a[i].device != b[i].device)
            return false;
    return true;
}
