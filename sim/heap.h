/* heap.h - the simulator's clock: a binary heap of events in virtual nanoseconds. Events of one
 * instant are popped in the order in which they were pushed, so a run is a function of its input
 * alone. Grows by doubling; aborts when memory is out, because a simulation serves nobody. One
 * thread. */
#ifndef TD_SIM_HEAP_H
#define TD_SIM_HEAP_H

#include <stdbool.h>
#include <stdint.h>

struct td_sim_event {
    uint64_t at_ns;
    uint64_t order;   /* set by push: FIFO among equals */
    uint32_t kind, a; /* the owner's meaning */
    uint64_t b;
};

struct td_sim_heap {
    struct td_sim_event *events;
    uint32_t n, capacity;
    uint64_t n_pushed;
};

void td_sim_heap_push(struct td_sim_heap *heap, uint64_t at_ns, uint32_t kind, uint32_t a,
                      uint64_t b);
/* false when empty */
bool td_sim_heap_pop(struct td_sim_heap *heap, struct td_sim_event *ret_event);
void td_sim_heap_free(struct td_sim_heap *heap);

/* realloc that aborts: the simulator's arrays grow by it. */
void *td_sim_grow(void *array, uint64_t n, uint64_t elem_bytes);

#endif
