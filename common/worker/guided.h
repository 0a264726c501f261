/* guided.h - structured output on a worker: the grammars that its requests bring, and what they
 * allow next.
 *
 * One td_guided for a worker: the vocabulary, and the compiled grammars by their texts, the idle
 * ones too, at most TD_GUIDED_MAX_IDLE. One td_guided_seq for a sequence: where its grammar stands.
 * That is a function of the sequence's output tokens alone, and is brought up to date from them
 * whenever it is asked: after a hand-over, a preemption or a fail-over it reads them from the first
 * output token on (I1).
 *
 * A grammar that is not known yet is compiled on a thread of td_guided's own. A slow compilation
 * delays only requests that use that grammar, never a decode step. td_guided_ask (or begin, which
 * compiles at once) --> td_guided_submit --> compiled, and told by `done` --> td_guided_take.
 *
 * Threads: open, stop and close by the owner; ask, begin and end by any; the rest by the engine
 * thread. */
#ifndef TD_WORKER_GUIDED_H
#define TD_WORKER_GUIDED_H

#include "common/engine/engine.h"
#include "common/text/grammar.h"

#define TD_GUIDED_MAX_IDLE 32
/* Grammars not compiled yet, each with at most TD_GRAMMAR_MAX_TEXT_BYTES of text. The router has
 * the same bound, and compiles each before a worker sees it. */
#define TD_GUIDED_MAX_JOBS 64

struct td_guided;
struct td_guided_entry;
struct td_guided_job;

/* Reads model_dir's tokenizer. vocab, eos: the model's; eos is copied. TD_ERR_UNSUPPORTED and the
 * tokenizer's own errors: this worker cannot guide, and err says why. */
td_status td_guided_open(const char *model_dir, int32_t vocab, const int32_t *eos, int32_t n_eos,
                         struct td_guided **ret_guided, struct td_err *err);
/* NULL is fine; no sequence and no job is left, and the thread, if it was started, is stopped */
void td_guided_close(struct td_guided *guided);
/* td_tokenizer_digest of the model's. */
uint64_t td_guided_vocab_digest(const struct td_guided *g);

/* Zeroed = not guided. Stays where it is between begin and end. */
struct td_guided_seq {
    struct td_guided *guided;
    struct td_guided_entry *entry;
    uint32_t generation; /* of the matcher when state was found */
    int32_t state;       /* after n_read output tokens */
    int32_t n_read;
};

/* Starts the thread. done(ctx, user) is called on it for each job that ends, as the last thing that
 * is done with the job there. gate is for tests: nothing is compiled before this file is there;
 * "" = none. */
td_status td_guided_start(struct td_guided *guided, void (*done)(void *ctx, void *user), void *ctx,
                          const char *gate, struct td_err *err);
/* Ends the jobs that wait with TD_ERR_CANCELLED, and the thread after the one that it compiles.
 * NULL, and a guided whose thread was never started, are fine. */
void td_guided_stop(struct td_guided *guided);

/* As td_guided_begin for a grammar that is known. Else TD_INPROGRESS, and a job in *ret_job that
 * the caller submits, or drops. TD_ERR_AGAIN: TD_GUIDED_MAX_JOBS are there, or no memory. */
td_status td_guided_ask(struct td_guided *guided, enum td_grammar_kind kind,
                        const struct td_grammar_text *texts, size_t n_texts, void *user,
                        struct td_seq *seq, struct td_guided_seq *ret_seq,
                        struct td_guided_job **ret_job, struct td_err *err);
void td_guided_submit(struct td_guided_job *job);
/* Frees a job that was not submitted, or that its thread has not begun. False: it has begun, `done`
 * was or will be called, and td_guided_take frees it. */
bool td_guided_drop(struct td_guided_job *job);
/* After `done`: what td_guided_begin would have done. Frees the job. */
td_status td_guided_take(struct td_guided_job *job, struct td_seq *seq,
                         struct td_guided_seq *ret_seq, struct td_err *err);

/* Compiles the grammar, or finds it; and sets seq->guide, so that the engine asks. Errors of
 * td_grammar_compile. */
td_status td_guided_begin(struct td_guided *guided, enum td_grammar_kind kind,
                          const struct td_grammar_text *texts, size_t n_texts, struct td_seq *seq,
                          struct td_guided_seq *ret_seq, struct td_err *err);
void td_guided_end(struct td_guided_seq *seq); /* zeroed or not; zeroed afterwards */

/* Before a step, when no mask is in use: gives memory back when much has been computed. */
void td_guided_trim(struct td_guided_seq *seq);

/* Why an item of a step has no token, for its client; NULL: not of this file. */
const char *td_guided_reason(td_status status);

#endif
