/* scheduler.c - see scheduler.h. */
#include "common/engine/scheduler.h"

#include <stdlib.h>
#include <string.h>

td_status td_scheduler_init(struct td_scheduler *s, const struct td_scheduler_config *config,
                            struct td_err *err)
{
    size_t n = (size_t)config->max_seqs;
    s->cfg = *config;
    s->running = calloc(n, sizeof(struct td_sched_seq *));
    s->remaining = calloc(n, sizeof *s->remaining);
    s->n_new = calloc(n, sizeof *s->n_new);
    s->is_decode = calloc(n, sizeof *s->is_decode);
    if (s->running && s->remaining && s->n_new && s->is_decode) return TD_OK;
    td_scheduler_free(s);
    return td_fail(err, TD_ERR_NOMEM, "scheduler: no memory for max_seqs %d", config->max_seqs);
}

void td_scheduler_free(struct td_scheduler *s)
{
    free(s->running);
    free(s->remaining);
    free(s->n_new);
    free(s->is_decode);
    *s = (struct td_scheduler){0};
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static int32_t blocks_for(const struct td_scheduler *s, int32_t n_tokens)
{
    return td_schedule_blocks(n_tokens, s->cfg.block_size);
}

static void publish(struct td_scheduler *s, struct td_sched_seq *seq)
{
    int32_t n_full = seq->n_computed / s->cfg.block_size;
    if (n_full <= seq->n_published) return;
    s->cfg.blocks->publish(s->cfg.ctx, seq, n_full);
    seq->n_published = n_full;
}

static bool alloc(struct td_scheduler *s, struct td_sched_seq *seq, int32_t n)
{
    if (!s->cfg.blocks->alloc(s->cfg.ctx, seq, n)) return false;
    seq->n_blocks += n;
    return true;
}

td_status td_scheduler_admit(struct td_scheduler *s, struct td_sched_seq *seq, bool import,
                             int32_t headroom)
{
    TD_ASSERT(seq->phase == TD_SEQ_IDLE && seq->n_blocks == 0);
    int32_t need = blocks_for(s, seq->n_tokens);
    int32_t max_hit = td_schedule_max_hit(seq->n_tokens, s->cfg.block_size); /* (2) */
    struct td_schedule_room before, room;
    s->cfg.blocks->room(s->cfg.ctx, &before);
    int32_t hit = s->cfg.blocks->lookup(s->cfg.ctx, seq, max_hit);
    seq->n_blocks = seq->n_published = hit;
    s->cfg.blocks->room(s->cfg.ctx, &room);
    room.n_held = before.n_held;
    td_status status = td_schedule_admit(&room, need, hit, headroom);
    if (!status && !alloc(s, seq, need - hit)) status = TD_ERR_AGAIN;
    if (status) {
        td_scheduler_release(s, seq);
        return status;
    }
    seq->n_cached = seq->n_computed = hit * s->cfg.block_size;
    seq->phase = import ? TD_SEQ_IMPORT : TD_SEQ_PREFILL;
    return TD_OK;
}

void td_scheduler_imported(struct td_scheduler *s, struct td_sched_seq *seq)
{
    TD_ASSERT(seq->phase == TD_SEQ_IMPORT);
    seq->n_computed = seq->n_tokens;
    publish(s, seq);
    td_scheduler_sampled(seq);
}

void td_scheduler_release(struct td_scheduler *s, struct td_sched_seq *seq)
{
    s->cfg.blocks->release(s->cfg.ctx, seq);
    seq->n_blocks = seq->n_computed = seq->n_published = 0;
    seq->phase = TD_SEQ_IDLE;
}

int32_t td_scheduler_headroom(const struct td_scheduler *s) { return s->grows ? s->n_running : 0; }

/* ---- the two lists --------------------------------------------------------------------------- */

static bool before(const struct td_sched_seq *a, const struct td_sched_seq *b)
{
    return td_schedule_before(a->priority, a->order, b->priority, b->order);
}

/* From the back: most arrivals belong there. */
void td_scheduler_wait(struct td_scheduler *s, struct td_sched_seq *seq)
{
    TD_ASSERT(seq->list == TD_SCHED_NO_LIST); /* (3) */
    struct td_sched_seq *prev = s->waiting_tail;
    while (prev && before(seq, prev)) prev = prev->prev;
    seq->prev = prev;
    seq->next = prev ? prev->next : s->waiting_head;
    if (prev)
        prev->next = seq;
    else
        s->waiting_head = seq;
    if (seq->next)
        seq->next->prev = seq;
    else
        s->waiting_tail = seq;
    seq->list = TD_SCHED_WAITING;
    s->n_waiting++;
}

static void waiting_remove(struct td_scheduler *s, struct td_sched_seq *seq)
{
    if (seq->prev)
        seq->prev->next = seq->next;
    else
        s->waiting_head = seq->next;
    if (seq->next)
        seq->next->prev = seq->prev;
    else
        s->waiting_tail = seq->prev;
    seq->prev = seq->next = NULL;
    if (s->refused.seq == seq) s->refused.seq = NULL;
    s->n_waiting--;
}

void td_scheduler_run(struct td_scheduler *s, struct td_sched_seq *seq)
{
    TD_ASSERT(seq->list == TD_SCHED_NO_LIST && s->n_running < s->cfg.max_seqs); /* (3) */
    int32_t i = s->n_running++;
    for (; i > 0 && before(seq, s->running[i - 1]); i--) s->running[i] = s->running[i - 1];
    s->running[i] = seq;
    seq->list = TD_SCHED_RUNNING;
}

static void running_remove(struct td_scheduler *s, struct td_sched_seq *seq)
{
    int32_t i = 0;
    while (i < s->n_running && s->running[i] != seq) i++;
    TD_ASSERT(i < s->n_running);
    s->n_running--;
    memmove(s->running + i, s->running + i + 1,
            (size_t)(s->n_running - i) * sizeof(struct td_sched_seq *));
}

void td_scheduler_detach(struct td_scheduler *s, struct td_sched_seq *seq)
{
    if (seq->list == TD_SCHED_WAITING) waiting_remove(s, seq);
    if (seq->list == TD_SCHED_RUNNING) running_remove(s, seq);
    seq->list = TD_SCHED_NO_LIST;
}

/* Blocks that an admission could use. */
static int32_t usable_blocks(const struct td_scheduler *s)
{
    struct td_schedule_room room;
    s->cfg.blocks->room(s->cfg.ctx, &room);
    return room.n_available - s->n_running;
}

void td_scheduler_admit_waiting(struct td_scheduler *s, uint64_t now_ns,
                                td_scheduler_admit_fn admit, void *ctx)
{
    struct td_sched_seq *seq;
    while ((seq = s->waiting_head) && s->n_running < s->cfg.max_seqs) {
        if (seq == s->refused.seq && usable_blocks(s) <= s->refused.room &&
            now_ns < s->refused.again_ns)
            return;
        td_scheduler_detach(s, seq);
        if (admit(ctx, seq) != TD_ERR_AGAIN) continue;
        td_scheduler_wait(s, seq);
        s->refused.seq = seq;
        s->refused.room = usable_blocks(s);
        s->refused.again_ns = now_ns + TD_SCHEDULER_AGAIN_MS * 1000000ull;
        return;
    }
}

struct td_sched_seq *td_scheduler_late(const struct td_scheduler *s, uint64_t now_ns)
{
    double work_ns = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        struct td_sched_seq *seq = s->running[i];
        if (seq->phase != TD_SEQ_PREFILL) continue;
        work_ns += (double)seq->work_ns * (double)(seq->n_tokens - seq->n_computed) /
                   (double)(seq->n_tokens - seq->n_cached);
        bool begun = seq->n_computed > seq->n_cached;
        if (seq->finish_by_ns && !begun && (double)now_ns + work_ns > (double)seq->finish_by_ns)
            return seq;
    }
    return NULL;
}

uint64_t td_scheduler_queued_tokens(const struct td_scheduler *s)
{
    uint64_t n = 0;
    for (const struct td_sched_seq *seq = s->waiting_head; seq; seq = seq->next)
        n += (uint64_t)seq->n_tokens;
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->phase == TD_SEQ_PREFILL)
            n += (uint64_t)(s->running[i]->n_tokens - s->running[i]->n_computed);
    return n;
}

/* ---- batches --------------------------------------------------------------------------------- */

static bool lacks_block(const struct td_scheduler *s, const struct td_sched_seq *seq)
{
    return seq->phase == TD_SEQ_DECODE && seq->n_blocks < blocks_for(s, seq->n_tokens);
}

/* Sees to it that each decode has its block. Returns how many stay; the one that goes may be the
 * one that asks. */
static int32_t make_room(struct td_scheduler *s, struct td_sched_seq *const *running, int32_t n)
{
    int32_t last = n; /* [last, n) were preempted */
    for (int32_t i = 0; i < last; i++)
        while (i < last && lacks_block(s, running[i]))
            if (!alloc(s, running[i], 1)) {
                td_scheduler_release(s, running[--last]);
                running[last]->n_preemptions++;
            }
    return last;
}

int32_t td_scheduler_plan(struct td_scheduler *s, struct td_sched_seq *const *running, int32_t n,
                          struct td_sched_item *ret_items, int32_t *ret_n_left)
{
    int32_t left = make_room(s, running, n), n_items = 0;
    TD_ASSERT(left <= s->cfg.max_seqs);
    for (int32_t i = 0; i < left; i++) {
        s->is_decode[i] = running[i]->phase == TD_SEQ_DECODE;
        s->remaining[i] = running[i]->n_tokens - running[i]->n_computed;
    }
    td_batch_choose(s->remaining, s->is_decode, left, s->cfg.max_batch, s->cfg.max_step_tokens,
                    s->n_new);
    for (int32_t i = 0; i < left; i++)
        if (s->n_new[i] > 0)
            ret_items[n_items++] = (struct td_sched_item){.seq = running[i], .n_new = s->n_new[i]};
    *ret_n_left = left;
    return n_items;
}

static struct td_sched_load load_of(const struct td_sched_item *items, int32_t n)
{
    struct td_sched_load load = {0};
    for (int32_t i = 0; i < n; i++) {
        const struct td_sched_seq *seq = items[i].seq;
        uint64_t u = (uint64_t)items[i].n_new, h = (uint64_t)seq->n_computed;
        if (seq->phase == TD_SEQ_PREFILL) {
            load.prefill_rows += u;
            load.attention_work_x2 += u * (2 * h + u);
        } else {
            load.decode_rows++;
            load.context_tokens += (uint64_t)seq->n_tokens;
        }
    }
    return load;
}

int32_t td_scheduler_batch(struct td_scheduler *s, struct td_sched_item *ret_items,
                           struct td_sched_load *ret_load)
{
    int32_t n = s->n_running,
            n_items = td_scheduler_plan(s, s->running, n, ret_items, &s->n_running);
    s->n_preemptions += (uint64_t)(n - s->n_running);
    for (int32_t i = n; i-- > s->n_running;) {
        s->running[i]->list = TD_SCHED_NO_LIST;
        td_scheduler_wait(s, s->running[i]);
    }
    *ret_load = load_of(ret_items, n_items);
    return n_items;
}

bool td_scheduler_computed(struct td_scheduler *s, struct td_sched_seq *seq, int32_t n_new)
{
    seq->n_computed += n_new;
    publish(s, seq);
    return seq->n_computed == seq->n_tokens;
}

void td_scheduler_sampled(struct td_sched_seq *seq)
{
    seq->n_tokens++;
    seq->phase = TD_SEQ_DECODE;
}
