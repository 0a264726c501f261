/* heap.h - what a call holds at most, measured by the sanitizer's own allocator and not by the
 * code under test. Fuzzers only; one thread. */
#ifndef TD_FUZZ_HEAP_H
#define TD_FUZZ_HEAP_H

#include <sanitizer/allocator_interface.h>
#include <stdbool.h>
#include <stddef.h>

static size_t heap_live, heap_peak;
static bool heap_counting;

static void heap_on_malloc(const volatile void *p, size_t n_bytes)
{
    if (!heap_counting || !p) return;
    heap_live += n_bytes;
    if (heap_live > heap_peak) heap_peak = heap_live;
}

static void heap_on_free(const volatile void *p)
{
    if (!heap_counting || !p) return;
    size_t n = __sanitizer_get_allocated_size(p);
    heap_live -= n < heap_live ? n : heap_live;
}

/* Counts from here on; what was there before is not part of it. */
static inline void heap_begin(void)
{
    static bool installed;
    if (!installed)
        installed = __sanitizer_install_malloc_and_free_hooks(heap_on_malloc, heap_on_free) > 0;
    heap_live = heap_peak = 0;
    heap_counting = true;
}

static inline size_t heap_end(void)
{
    heap_counting = false;
    return heap_peak;
}

#endif
