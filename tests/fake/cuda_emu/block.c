/* block.c - schedules the fibers of a block and checks their meetings.
 *
 * Scheduling. A lane that stops picks the next ready lane of its warp and switches to it directly.
 * With none left it returns to the scheduler (on the host's own stack), which draws a warp. The
 * last lane to arrive completes the meeting and continues. Fibers live as long as the machine that
 * holds them: a thread that ended waits in its loop for the next block. There is one machine
 * (stacks, shared memory), made by the first launch; `lock` is held while a grid runs. */
#include "tests/fake/cuda_emu/block.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/random.h"
#include "tests/fake/cuda_emu/ptx.h"

#ifdef TD_WITH_ASAN
#include <sanitizer/asan_interface.h>
enum { STACK_BYTES = 256 * 1024 };
#else
enum { STACK_BYTES = 64 * 1024 };
#endif
enum { PAGE = 4096, SHARED_ROOM = 256 * 1024, LINE = 128, POISON = 0xff };

__thread struct td_emu_lane *td_emu_self TD_EMU_TLS;

/* The section with the __shared__ arrays of this library, by the linker's names; NULL if there are
 * none. */
extern uint8_t __start_td_shared[] __attribute__((weak, visibility("hidden")));
extern uint8_t __stop_td_shared[] __attribute__((weak, visibility("hidden")));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td_emu_block *machine; /* under the lock */

static const char *word_name(enum td_emu_word word)
{
    switch (word) {
    case TD_EMU_SYNCWARP:
        return "__syncwarp";
    case TD_EMU_SHFL:
        return "__shfl_sync";
    case TD_EMU_SHFL_UP:
        return "__shfl_up_sync";
    case TD_EMU_SHFL_DOWN:
        return "__shfl_down_sync";
    case TD_EMU_SHFL_XOR:
        return "__shfl_xor_sync";
    case TD_EMU_BALLOT:
        return "__ballot_sync";
    case TD_EMU_ALL:
        return "__all_sync";
    case TD_EMU_ANY:
        return "__any_sync";
    case TD_EMU_REDUCE:
        return "__reduce_sync";
    case TD_EMU_LDMATRIX:
        return "ldmatrix.x4";
    case TD_EMU_LDMATRIX_TRANS:
        return "ldmatrix.x4.trans";
    case TD_EMU_LDMATRIX_X2:
        return "ldmatrix.x2";
    case TD_EMU_LDMATRIX_X2_TRANS:
        return "ldmatrix.x2.trans";
    case TD_EMU_MMA:
        return "mma";
    case TD_EMU_WGMMA:
        return "wgmma";
    case TD_EMU_SYNCTHREADS:
        return "__syncthreads";
    case TD_EMU_SYNCTHREADS_COUNT:
        return "__syncthreads_count";
    case TD_EMU_SYNCTHREADS_AND:
        return "__syncthreads_and";
    case TD_EMU_SYNCTHREADS_OR:
        return "__syncthreads_or";
    }
    return "nothing";
}

void td_emu_die(const char *format, ...)
{
    char text[512], where[512] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const struct td_emu_lane *me = td_emu_self;
    if (me) {
        const struct td_emu_block *b = me->block;
        snprintf(where, sizeof where, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", b->kernel,
                 b->block_idx.x, b->block_idx.y, b->block_idx.z, me->thread_idx.x, me->thread_idx.y,
                 me->thread_idx.z);
    }
    fprintf(stderr, "cuda emulator: %s%s\n", where, text);
    fflush(stderr);
    abort();
}

static uint64_t seed(void)
{
    const char *text = getenv("TD_CUDA_EMU_SEED");
    return text && *text ? strtoull(text, NULL, 0) : 1;
}

static uint32_t draw(struct td_emu_block *b)
{
    return (uint32_t)(td_random_step(&b->random) >> 32);
}

/* One of the set bits, drawn. */
static uint32_t draw_bit(struct td_emu_block *b, uint32_t bits)
{
    uint32_t r = draw(b) & 31;
    uint32_t turned = r ? bits >> r | bits << (32 - r) : bits;
    return ((uint32_t)__builtin_ctz(turned) + r) & 31;
}

static struct td_emu_lane *draw_lane(struct td_emu_block *b, struct td_emu_warp *w)
{
    return &b->lanes[(uint32_t)(w - b->warps) * TD_EMU_LANES + draw_bit(b, w->ready)];
}

static const char *lanes_text(uint32_t lanes, char text[static 16])
{
    snprintf(text, 16, "0x%08x", lanes);
    return text;
}

/* `me` cannot go on (or lets others go first). */
static void step_aside(struct td_emu_lane *me, bool to_scheduler)
{
    struct td_emu_block *b = me->block;
    if (me->warp->ready && !to_scheduler) {
        struct td_emu_lane *next = draw_lane(b, me->warp);
        if (next == me) return;
        td_emu_self = next;
        td_emu_fiber_switch(&me->fiber, &next->fiber);
    } else {
        td_emu_self = NULL;
        td_emu_fiber_switch(&me->fiber, &b->scheduler);
    }
}

/* Checks everything that a meeting of the warp requires on arrival. */
static void arrive(struct td_emu_lane *me, enum td_emu_word word, unsigned mask)
{
    struct td_emu_warp *w = me->warp;
    char text[16];
    if (mask != 0xffffffffu)
        td_emu_die("%s with mask 0x%08x, must be 0xffffffff", word_name(word), mask);
    if (w->all != 0xffffffffu)
        td_emu_die("%s in a warp of %d threads, must be 32", word_name(word),
                   __builtin_popcount(w->all));
    if (w->waiting && w->word != word)
        td_emu_die("%s, but lanes %s of its warp wait at %s", word_name(word),
                   lanes_text(w->waiting, text), word_name(w->word));
    if (w->at_barrier)
        td_emu_die("%s, but lanes %s of its warp wait at %s", word_name(word),
                   lanes_text(w->at_barrier, text), word_name(me->block->barrier_word));
    if (w->done)
        td_emu_die("%s, but lanes %s of its warp have ended", word_name(word),
                   lanes_text(w->done, text));
    me->word = w->word = word;
}

/* True: this lane is the last, and the caller completes the meeting. False: the meeting took place
 * while this lane waited. */
static bool wait_or_last(struct td_emu_lane *me)
{
    struct td_emu_warp *w = me->warp;
    uint32_t bit = 1u << me->lane;
    w->waiting |= bit;
    w->ready &= ~bit;
    if (w->waiting == w->all) return true;
    step_aside(me, false);
    return false;
}

static void complete(struct td_emu_lane *me)
{
    struct td_emu_warp *w = me->warp;
    w->phase++;
    w->ballot[w->phase & 1] = 0;
    w->waiting = 0;
    w->ready = w->all;
    me->block->n_idle = 0;
    /* another warp may go on now */
    if (me->block->n_warps > 1 && (draw(me->block) & 7) == 0) step_aside(me, true);
}

void td_emu_warp_sync(enum td_emu_word word, unsigned mask)
{
    struct td_emu_lane *me = td_emu_self;
    arrive(me, word, mask);
    if (wait_or_last(me)) complete(me);
}

const uint64_t *td_emu_warp_exchange(enum td_emu_word word, unsigned mask, uint64_t value)
{
    struct td_emu_lane *me = td_emu_self;
    arrive(me, word, mask);
    uint64_t *slots = me->warp->slots[me->warp->phase & 1];
    slots[me->lane] = value;
    if (wait_or_last(me)) complete(me);
    return slots;
}

uint32_t td_emu_warp_ballot(enum td_emu_word word, unsigned mask, bool vote)
{
    struct td_emu_lane *me = td_emu_self;
    arrive(me, word, mask);
    uint32_t *ballot = &me->warp->ballot[me->warp->phase & 1];
    *ballot |= (uint32_t)vote << me->lane;
    if (wait_or_last(me)) complete(me);
    return *ballot;
}

const void *td_emu_warp_collect(enum td_emu_word word, unsigned mask, const void *operand,
                                size_t n_bytes, td_emu_collect_fn *collect)
{
    struct td_emu_lane *me = td_emu_self;
    arrive(me, word, mask);
    struct td_emu_warp *w = me->warp;
    uint32_t phase = w->phase & 1;
    memcpy(w->operands[me->lane], operand, n_bytes);
    if (wait_or_last(me)) {
        collect(w->operands, w->results[phase]);
        complete(me);
    }
    return w->results[phase][me->lane];
}

uint32_t td_emu_barrier(enum td_emu_word word, bool vote)
{
    struct td_emu_lane *me = td_emu_self;
    struct td_emu_block *b = me->block;
    struct td_emu_warp *w = me->warp;
    char text[16];
    if (w->waiting)
        td_emu_die("%s, but lanes %s of its warp wait at %s", word_name(word),
                   lanes_text(w->waiting, text), word_name(w->word));
    if (b->n_at_barrier && b->barrier_word != word)
        td_emu_die("%s, but %u threads of its block wait at %s", word_name(word), b->n_at_barrier,
                   word_name(b->barrier_word));
    if (b->n_done)
        td_emu_die("%s, but %u threads of its block have ended", word_name(word), b->n_done);
    me->word = b->barrier_word = word;

    uint32_t phase = b->barrier_phase & 1, bit = 1u << me->lane;
    b->votes[phase] += vote;
    w->at_barrier |= bit;
    w->ready &= ~bit;
    if (++b->n_at_barrier < b->n_threads) {
        step_aside(me, false);
        return b->votes[phase];
    }
    b->n_at_barrier = 0;
    b->barrier_phase++;
    b->votes[b->barrier_phase & 1] = 0;
    b->n_idle = 0;
    for (uint32_t i = 0; i < b->n_warps; i++) {
        b->warps[i].at_barrier = 0;
        b->warps[i].ready = b->warps[i].all;
    }
    if (b->n_warps > 1 && draw(b) & 1) step_aside(me, true);
    return b->votes[phase];
}

void td_emu_fence(void)
{
    static uint32_t place; /* an operation, since ThreadSanitizer knows no fence */
    __atomic_fetch_add(&place, 0, __ATOMIC_SEQ_CST);
}

void td_emu_happened(void) { td_emu_self->block->n_idle = 0; }

void td_emu_yield(void)
{
    struct td_emu_lane *me = td_emu_self;
    struct td_emu_block *b = me->block;
    if (++b->n_idle > 64 * b->n_threads) td_emu_die("waits for an mbarrier that nobody completes");
    step_aside(me, true);
}

static void lane_main(void)
{
    td_emu_fiber_entered();
    for (;;) {
        struct td_emu_lane *me = td_emu_self;
        struct td_emu_block *b = me->block;
        struct td_emu_warp *w = me->warp;
        char text[16];
        b->run(b->closure);
        td_emu_async_lane_end(me);
        if (w->waiting)
            td_emu_die("has ended, but lanes %s of its warp wait at %s",
                       lanes_text(w->waiting, text), word_name(w->word));
        if (b->n_at_barrier)
            td_emu_die("has ended, but %u threads of its block wait at %s", b->n_at_barrier,
                       word_name(b->barrier_word));
        uint32_t bit = 1u << me->lane;
        w->ready &= ~bit;
        w->done |= bit;
        b->n_done++;
        b->n_idle = 0;
        step_aside(me, false);
    }
}

static void *map(size_t bytes, size_t guard_at)
{
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p + guard_at, PAGE, PROT_NONE))
        td_emu_die("no memory for the stacks and shared memory of a block: %m");
    return p;
}

static struct td_emu_block *machine_get(uint32_t n_threads)
{
    struct td_emu_block *b = machine;
    if (!b) {
        b = calloc(1, sizeof *b);
        struct td_emu_lane *lanes = b ? calloc(TD_EMU_MAX_THREADS, sizeof *lanes) : NULL;
        struct td_emu_warp *warps =
            lanes ? calloc(TD_EMU_MAX_THREADS / TD_EMU_LANES, sizeof *warps) : NULL;
        if (!warps) td_emu_die("no memory for the threads of a block");
        b->lanes = lanes;
        b->warps = warps;
        b->shared_end = (uint8_t *)map(SHARED_ROOM + PAGE, SHARED_ROOM) + SHARED_ROOM;
        machine = b;
    }
    for (; b->n_fibers < n_threads; b->n_fibers++) {
        struct td_emu_lane *lane = &b->lanes[b->n_fibers];
        uint8_t *stack = map(PAGE + STACK_BYTES, 0);
        td_emu_fiber_init(&lane->fiber, stack + PAGE, STACK_BYTES, b->n_fibers * 448 % PAGE,
                          lane_main);
    }
    return b;
}

/* The library may be unloaded and loaded again. */
__attribute__((destructor)) static void machine_free(void)
{
    struct td_emu_block *b = machine;
    if (!b) return;
    for (uint32_t i = 0; i < TD_EMU_MAX_THREADS; i++) td_emu_async_lane_free(&b->lanes[i]);
    td_emu_async_block_free(b);
    for (uint32_t i = 0; i < b->n_fibers; i++)
        munmap((uint8_t *)(uintptr_t)b->lanes[i].fiber.stack - PAGE, PAGE + STACK_BYTES);
    munmap(b->shared_end - SHARED_ROOM, SHARED_ROOM + PAGE);
    free(b->lanes);
    free(b->warps);
    free(b);
    machine = NULL;
}

/* Places shared memory so that it ends at the guard page, rounded up to a line; the rest of that
 * line is checked when the block is over. */
static void shared_open(struct td_emu_block *b)
{
    size_t room = (b->shared_bytes + LINE - 1) / LINE * LINE;
    b->shared = b->shared_end - room;
    memset(b->shared, POISON, room);
    if (__start_td_shared)
        memset(__start_td_shared, POISON, (size_t)(__stop_td_shared - __start_td_shared));
#ifdef TD_WITH_ASAN
    __asan_poison_memory_region(b->shared_end - SHARED_ROOM, SHARED_ROOM);
    __asan_unpoison_memory_region(b->shared, b->shared_bytes);
#endif
}

static void shared_close(struct td_emu_block *b)
{
#ifdef TD_WITH_ASAN
    __asan_unpoison_memory_region(b->shared_end - SHARED_ROOM, SHARED_ROOM);
#endif
    for (const uint8_t *p = b->shared + b->shared_bytes; p < b->shared_end; p++) {
        if (*p != POISON)
            td_emu_die("kernel %s, block (%u,%u,%u): byte %zu of %zu bytes of dynamic shared "
                       "memory was written",
                       b->kernel, b->block_idx.x, b->block_idx.y, b->block_idx.z,
                       (size_t)(p - b->shared), b->shared_bytes);
    }
}

static void block_run(struct td_emu_block *b)
{
    b->n_done = b->n_at_barrier = b->barrier_phase = b->votes[0] = b->votes[1] = b->n_idle = 0;
    for (uint32_t i = 0; i < b->n_warps; i++) {
        struct td_emu_warp *w = &b->warps[i];
        uint32_t n = b->n_threads - i * TD_EMU_LANES;
        w->all = w->ready = n >= TD_EMU_LANES ? 0xffffffffu : (1u << n) - 1;
        w->waiting = w->at_barrier = w->done = w->phase = w->ballot[0] = w->ballot[1] = 0;
    }
    shared_open(b);
    while (b->n_done < b->n_threads) {
        uint32_t ready = 0;
        for (uint32_t i = 0; i < b->n_warps; i++) ready |= (uint32_t)(b->warps[i].ready != 0) << i;
        if (!ready)
            td_emu_die("kernel %s, block (%u,%u,%u): %u of %u threads wait", b->kernel,
                       b->block_idx.x, b->block_idx.y, b->block_idx.z, b->n_threads - b->n_done,
                       b->n_threads);
        struct td_emu_lane *next = draw_lane(b, &b->warps[draw_bit(b, ready)]);
        td_emu_self = next;
        td_emu_fiber_switch(&b->scheduler, &next->fiber);
    }
    td_emu_self = NULL;
    td_emu_async_block_end(b);
    shared_close(b);
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

void td_emu_grid_run(const char *kernel, struct td_emu_dims grid, struct td_emu_dims block,
                     size_t shared_bytes, void (*run)(const void *closure), const void *closure)
{
    uint32_t n_threads = block.x * block.y * block.z;
    if (td_emu_self) td_emu_die("launches %s from within a kernel", kernel);
    pthread_mutex_lock(&lock);
    struct td_emu_block *b = machine_get(n_threads);
    b->kernel = kernel;
    b->run = run;
    b->closure = closure;
    b->grid_dim = grid;
    b->block_dim = block;
    b->shared_bytes = shared_bytes;
    b->n_threads = n_threads;
    b->n_warps = (n_threads + TD_EMU_LANES - 1) / TD_EMU_LANES;
    for (uint32_t i = 0; i < n_threads; i++) {
        struct td_emu_lane *lane = &b->lanes[i];
        lane->thread_idx =
            (struct td_emu_dims){i % block.x, i / block.x % block.y, i / block.x / block.y};
        lane->thread = i;
        lane->lane = i % TD_EMU_LANES;
        lane->warp = &b->warps[i / TD_EMU_LANES];
        lane->block = b;
    }
    /* Blocks in the order first, first + stride, ...: with a stride that shares no factor with
       their number, each comes once. */
    uint64_t n_blocks = (uint64_t)grid.x * grid.y * grid.z, base = seed();
    b->random = td_random_stream(base, 0).s;
    uint64_t stride = draw(b) % n_blocks, at = draw(b) % n_blocks;
    if (!stride) stride = 1;
    while (gcd(stride, n_blocks) != 1) stride = stride % n_blocks + 1;
    for (uint64_t i = 0; i < n_blocks; i++, at = (at + stride) % n_blocks) {
        b->block_idx =
            (struct td_emu_dims){(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y),
                                 (unsigned)(at / grid.x / grid.y)};
        block_run(b);
    }
    pthread_mutex_unlock(&lock);
}
