/* grammar.h - structured output: what a request's text may be, compiled to an automaton over bytes,
 * and the set of tokens that may come next.
 *
 * A grammar is a pushdown automaton over bytes: a rule is a nondeterministic finite automaton whose
 * edges read a byte or call a rule. It is the same for every tokenizer, and the router compiles it
 * to refuse what is wrong before a worker sees it. A matcher runs one grammar over one vocabulary.
 * Its state is a function of the bytes so far and of nothing else, so any worker that knows the
 * tokens of a sequence has its state (I1).
 *
 * The idea to decide most tokens once for each place in a rule, whatever called the rule, is that
 * of Dong et al. 2024 (XGrammar). */
#ifndef TD_TEXT_GRAMMAR_H
#define TD_TEXT_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/tokenizer.h"

/* Texts come from strangers: what passes a limit is refused with its name and the limit. */
#define TD_GRAMMAR_MAX_TEXT_BYTES (256 << 10) /* all texts of one grammar */
#define TD_GRAMMAR_MAX_CHOICES 4096           /* of choice, and values of one enum */
#define TD_GRAMMAR_MAX_REPEAT 4096            /* {m,n}, minLength, maxItems ... */
#define TD_GRAMMAR_MAX_DEPTH 64               /* of groups, and of schemas in schemas */
#define TD_GRAMMAR_MAX_PROPERTIES 256         /* of one object */
#define TD_GRAMMAR_MAX_RULES 8192
#define TD_GRAMMAR_MAX_NODES (1 << 17) /* of the automaton, repetitions written out */

/* The numbers are on the wire (SamplingSpec.guided_kind): never renumbered. */
enum td_grammar_kind {
    TD_GRAMMAR_NONE = 0,
    TD_GRAMMAR_JSON_OBJECT = 1, /* no text: any JSON object */
    TD_GRAMMAR_JSON_SCHEMA = 2, /* one text: a JSON schema */
    TD_GRAMMAR_REGEX = 3,       /* one text: a regular expression that matches the whole output */
    TD_GRAMMAR_CHOICE = 4,      /* the output is one of the texts */
    TD_GRAMMAR_EBNF = 5,        /* one text: rules in the notation of llama.cpp's GBNF */
    TD_GRAMMAR_TOOL_CALLS = 6,  /* one text: td_calls_text of grammar_calls.h */
    TD_GRAMMAR_LAST = TD_GRAMMAR_TOOL_CALLS
};

struct td_grammar_text {
    const char *bytes; /* valid UTF-8, without a final NUL */
    size_t n_bytes;
};

struct td_grammar; /* immutable: any thread */

/* Refuses what it does not have by name (TD_ERR_INVALID, TD_ERR_UNSUPPORTED, TD_ERR_LIMIT): the
 * message begins with the name of the kind. Time and memory are bounded by the limits above. */
td_status td_grammar_compile(enum td_grammar_kind kind, const struct td_grammar_text *texts,
                             size_t n_texts, struct td_grammar **ret_grammar, struct td_err *err);
void td_grammar_free(struct td_grammar *grammar);

/* What a grammar is known by: equal keys, equal grammars. *ret_key is malloc'd. */
td_status td_grammar_key(enum td_grammar_kind kind, const struct td_grammar_text *texts,
                         size_t n_texts, char **ret_key, size_t *ret_n, struct td_err *err);
/* Of a key: *ret_texts is malloc'd and points into it. TD_ERR_INVALID: it is none. */
td_status td_grammar_key_read(const char *key, size_t n_key, enum td_grammar_kind *ret_kind,
                              struct td_grammar_text **ret_texts, size_t *ret_n,
                              struct td_err *err);

/* A vocabulary as a trie over the bytes that its tokens stand for. Immutable: any thread. */
struct td_token_trie;

/* Begins the bytes of a special token, here and in grammars that take one: no text in UTF-8 has
 * this byte. */
#define TD_TOKEN_SPECIAL '\xFF'

/* Tokens [0, vocab) of a tokenizer. Special tokens have TD_TOKEN_SPECIAL and their text, so that
 * only a grammar that names one allows it; ids that the tokenizer does not have, tokens without
 * bytes and ordinary ones with that byte are never allowed by a mask. vocab: the model's, which may
 * be padded. TD_ERR_UNSUPPORTED: the tokenizer's decoder joins tokens by rules that a token alone
 * does not show. */
td_status td_token_trie_create(const struct td_tokenizer *tokenizer, int32_t vocab,
                               struct td_token_trie **ret_trie, struct td_err *err);
/* Of texts[i] for token i; n_bytes 0: never allowed. The texts are copied. */
td_status td_token_trie_build(const struct td_grammar_text *texts, int32_t vocab,
                              struct td_token_trie **ret_trie, struct td_err *err);
void td_token_trie_free(struct td_token_trie *trie);
int32_t td_token_trie_vocab(const struct td_token_trie *trie);
/* The bytes of a token as above, NULL when it has none. */
const char *td_token_trie_bytes(const struct td_token_trie *trie, int32_t token, size_t *ret_n);

/* One grammar on one vocabulary, with what it has computed so far: one thread at a time. Borrows
 * both. eos: tokens that end the output, allowed where the output may end. trie NULL: bytes only,
 * no masks. */
struct td_matcher;
td_status td_matcher_create(const struct td_grammar *grammar, const struct td_token_trie *trie,
                            const int32_t *eos, int32_t n_eos, struct td_matcher **ret_matcher,
                            struct td_err *err);
void td_matcher_free(struct td_matcher *matcher);

/* A state is a number, good until td_matcher_trim drops what was computed: then `generation` is
 * another, and states are found again from the bytes. */
#define TD_MATCHER_DEAD 0
int32_t td_matcher_start(struct td_matcher *m);
uint32_t td_matcher_generation(const struct td_matcher *m);
/* The state after more bytes; TD_MATCHER_DEAD when no output begins so. TD_ERR_LIMIT: the grammar
 * is so ambiguous that a state would hold too many readings of the bytes. */
td_status td_matcher_advance(struct td_matcher *m, int32_t state, const char *bytes, size_t n,
                             int32_t *ret_state);
bool td_matcher_accepts(const struct td_matcher *m, int32_t state); /* may end here */
/* *ret_mask: bit t of word t / 64 is set when token t may come next; (vocab + 63) / 64 words,
 * borrowed until the next trim. TD_ERR_LIMIT as above; TD_ERR_NOT_FOUND: no token may come (the
 * vocabulary cannot spell what the grammar wants); TD_ERR_NOMEM. */
td_status td_matcher_mask(struct td_matcher *m, int32_t state, const uint64_t **ret_mask);
/* Frees what was computed when it has become more than a few ten MiB. Between steps, where no mask
 * is in use. */
void td_matcher_trim(struct td_matcher *m);

#endif
