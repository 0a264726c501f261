/* give_back.c - mallopt and malloc_trim. A libc without them is left as it is. */
#include "common/base/give_back.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { MMAP_BYTES = 256 << 10, GROWTH_BYTES = 16 << 20, MAX_WAIT = 7 };

void td_give_back_start(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES);
    mallopt(M_TRIM_THRESHOLD, 4 << 20);
#endif
}

/* 0 = unknown. */
static size_t resident_bytes(void)
{
    char text[128];
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *end;
    strtoul(text, &end, 10); /* the first number is the size of the address space */
    return strtoul(end, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
}

void td_give_back(void)
{
    static size_t least; /* resident bytes after the best call so far */
    /* calls to skip: memory in use now may be free later, but looking costs time */
    static unsigned wait, waited;
    size_t now = resident_bytes();
    if (!least || now < least) least = now;
    if (now < least + GROWTH_BYTES) {
        wait = waited = 0;
        return;
    }
    if (waited++ < wait) return;
    waited = 0;
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    bool fruitless = resident_bytes() + GROWTH_BYTES / 4 > now;
    wait = !fruitless ? 0 : wait < MAX_WAIT ? 2 * wait + 1 : MAX_WAIT;
}
