/* heap.c - see heap.h. */
#include "sim/heap.h"

#include <stdlib.h>

#include "common/base/status.h"

void *td_sim_grow(void *array, uint64_t n, uint64_t elem_bytes)
{
    void *grown = realloc(array, (size_t)((n ? n : 1) * elem_bytes));
    TD_ASSERT(grown);
    return grown;
}

static bool before(const struct td_sim_event *a, const struct td_sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

void td_sim_heap_push(struct td_sim_heap *h, uint64_t at_ns, uint32_t kind, uint32_t a, uint64_t b)
{
    if (h->n == h->capacity) {
        h->capacity = h->capacity ? h->capacity * 2 : 256;
        h->events = td_sim_grow(h->events, h->capacity, sizeof *h->events);
    }
    struct td_sim_event e = {.at_ns = at_ns, .order = h->n_pushed++, .kind = kind, .a = a, .b = b};
    uint32_t i = h->n++;
    while (i > 0 && before(&e, &h->events[(i - 1) / 2])) {
        h->events[i] = h->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->events[i] = e;
}

bool td_sim_heap_pop(struct td_sim_heap *h, struct td_sim_event *ret_event)
{
    if (h->n == 0) return false;
    *ret_event = h->events[0];
    struct td_sim_event last = h->events[--h->n];
    uint32_t i = 0;
    for (uint32_t child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && before(&h->events[child + 1], &h->events[child])) child++;
        if (!before(&h->events[child], &last)) break;
        h->events[i] = h->events[child];
    }
    if (h->n > 0) h->events[i] = last;
    return true;
}

void td_sim_heap_free(struct td_sim_heap *h)
{
    free(h->events);
    *h = (struct td_sim_heap){0};
}
