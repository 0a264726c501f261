/* table.c - see table.h. */
#include "common/base/table.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/status.h"

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t mapped_bytes(size_t bytes, size_t page) { return (bytes + page - 1) & ~(page - 1); }

void *td_table_alloc(size_t bytes)
{
    size_t page = page_bytes(), n = mapped_bytes(bytes, page);
    TD_ASSERT(bytes > 0 && bytes % 64 == 0);
    uint8_t *base =
        mmap(NULL, n + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    if (mprotect(base + n, page, PROT_NONE)) {
        munmap(base, n + page);
        return NULL;
    }
    return base + n - bytes;
}

void td_table_free(void *table, size_t bytes)
{
    size_t page = page_bytes(), n = mapped_bytes(bytes, page);
    if (table) munmap((uint8_t *)table + bytes - n, n + page);
}
