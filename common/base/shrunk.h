/* shrunk.h - says which file it was when a mapped file becomes shorter while it is read.
 *
 * The kernel answers a read behind the new end with SIGBUS, which would end the process without a
 * word. There is nothing to go on with: what was read before may be of the old file or the new. So
 * a handler writes one line that names the file, and the process exits with status 1. A SIGBUS that
 * hits no mapped file goes to whoever handled it before. */
#ifndef TD_BASE_SHRUNK_H
#define TD_BASE_SHRUNK_H

#include <stddef.h>

/* Any thread. Without memory, or beyond 4096 files, a mapping is not watched. */
void td_shrunk_watch(const char *path, const void *base, size_t bytes);
void td_shrunk_forget(const void *base);

/* Ends the process likewise when a file changed after its first read: the new part does not fit
 * what was read before. what: names the file and the part of it. */
_Noreturn void td_changed_exit(const char *what);

#endif
