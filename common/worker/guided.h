/* guided.h - structured output on a worker: the grammars that its requests bring, and what they
 * allow next.
 *
 * One td_guided for a worker: the vocabulary, and the compiled grammars by their texts, the idle
 * ones too, at most TD_GUIDED_MAX_IDLE. One td_guided_seq for a sequence: where its grammar stands.
 * That is a function of the sequence's output tokens alone, and is brought up to date from them
 * whenever it is asked: after a hand-over, a preemption or a fail-over it reads them from the first
 * output token on (I1).
 *
 * Threads: open and close by the owner; begin and end by any; the rest by the engine thread. */
#ifndef TD_WORKER_GUIDED_H
#define TD_WORKER_GUIDED_H

#include "common/engine/engine.h"
#include "common/text/grammar.h"

#define TD_GUIDED_MAX_IDLE 32

struct td_guided;
struct td_guided_entry;

/* Reads model_dir's tokenizer. vocab, eos: the model's; eos is copied. TD_ERR_UNSUPPORTED and the
 * tokenizer's own errors: this worker cannot guide, and err says why. */
/* td_tokenizer_digest of the model's. */
uint64_t td_guided_vocab_digest(const struct td_guided *g);
td_status td_guided_open(const char *model_dir, int32_t vocab, const int32_t *eos, int32_t n_eos,
                         struct td_guided **ret_guided, struct td_err *err);
void td_guided_close(struct td_guided *guided); /* NULL is fine; no sequence is left */

/* Zeroed = not guided. Stays where it is between begin and end. */
struct td_guided_seq {
    struct td_guided *guided;
    struct td_guided_entry *entry;
    uint32_t generation; /* of the matcher when state was found */
    int32_t state;       /* after n_read output tokens */
    int32_t n_read;
};

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
