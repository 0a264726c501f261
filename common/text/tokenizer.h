/* tokenizer.h - Hugging Face tokenizer.json (BPE) and SentencePiece's tokenizer.model in C: encode,
 * decode, and a streaming decoder that never emits half a character.
 *
 * Families: byte-level (GPT-2, Llama-3, Qwen) and SentencePiece-style with byte fallback (Llama-2,
 * Mistral, Phi-3). Components that are not implemented are refused by name at load. Immutable after
 * load: any number of threads may call all functions on one tokenizer, because a call's working
 * memory is its own. A detokenizer belongs to one thread at a time. */
#ifndef TD_TEXT_TOKENIZER_H
#define TD_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_tokenizer;

/* Reads DIR/tokenizer.json (at most 64 MiB); where there is none, DIR/tokenizer.model,
 * DIR/tiktoken.model or DIR/qwen.tiktoken with DIR/tokenizer_config.json and DIR/added_tokens.json;
 * or the vocabulary of a GGUF file. */
td_status td_tokenizer_load(const char *dir, struct td_tokenizer **ret_tokenizer,
                            struct td_err *err);
td_status td_tokenizer_parse(const char *json, size_t n_bytes, struct td_tokenizer **ret_tokenizer,
                             struct td_err *err);
void td_tokenizer_free(struct td_tokenizer *tokenizer);

int32_t td_tokenizer_vocab(const struct td_tokenizer *t); /* largest id + 1 */
/* What it was read from, for people: "tokenizer.json", "tokenizer.model", "the GGUF file". */
const char *td_tokenizer_file(const struct td_tokenizer *t);
/* -1 when absent */
int32_t td_tokenizer_token_id(const struct td_tokenizer *t, const char *text);
/* the piece as in the file; NULL when absent */
const char *td_tokenizer_token_text(const struct td_tokenizer *t, int32_t id, size_t *ret_bytes);
/* Puts the vocabulary of DIR/tokenizer.json into the keys of a GGUF file: n_ids tokens, those that
 * the directory does not have as unused ones; bos_id -1: none. TD_ERR_UNSUPPORTED: GGUF has no
 * words for a part of it, by name. */
struct td_gguf_writer;
td_status td_tokenizer_put_gguf(const char *dir, int32_t n_ids, int32_t bos_id,
                                const int32_t *eos_ids, int32_t n_eos, struct td_gguf_writer *w,
                                struct td_err *err);

/* Of the texts of all ids, in order: equal for two files of one vocabulary, however they are
 * written. Never 0. */
uint64_t td_tokenizer_digest(const struct td_tokenizer *t);
bool td_tokenizer_is_special(const struct td_tokenizer *t, int32_t id);

/* grows by realloc; free with td_token_list_free */
struct td_token_list {
    int32_t *ids;
    size_t n, capacity;
};
void td_token_list_free(struct td_token_list *list);

/* Appends the ids of text[0..n_bytes). add_special: apply the post-processor's BOS/EOS. Special
 * tokens written in the text are recognised, as Hugging Face does (added tokens are matched in
 * text). TD_ERR_INVALID: the text is not valid UTF-8 (the message has the byte offset), or a part
 * of the file, which the message names, exceeded a bound: the text of any stage 64 KiB + 32 times
 * this one, all memory of the call 8 MiB + 320 times, a regex a number of steps in proportion to
 * its text (tokenizer_text.h gives the reasons for these numbers). TD_ERR_LIMIT: more than
 * max_tokens in all. */
td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n_bytes,
                              bool add_special, size_t max_tokens, struct td_token_list *list,
                              struct td_err *err);

/* Decodes all ids at once, as Hugging Face's decode(ids, skip_special_tokens,
 * clean_up_tokenization_spaces=False). *ret_text is malloc'd and NUL-terminated; the caller frees
 * it. Unknown ids: TD_ERR_INVALID. */
td_status td_tokenizer_decode(const struct td_tokenizer *t, const int32_t *ids, size_t n,
                              bool skip_special, char **ret_text, size_t *ret_bytes,
                              struct td_err *err);

/* Streaming decode: push ids one at a time; text comes out as soon as it is certain. The pieces
 * concatenated equal decode(prefix+ids) minus decode(prefix). `prefix` are the last prompt tokens
 * (context for rules about leading spaces; may be NULL). Ids that the tokenizer does not have yield
 * no text, because a model's vocabulary may be padded. */
struct td_detokenizer;
td_status td_detokenizer_create(const struct td_tokenizer *t, const int32_t *prefix,
                                size_t n_prefix, bool skip_special,
                                struct td_detokenizer **ret_detokenizer);
void td_detokenizer_free(struct td_detokenizer *d);
/* *ret_text: the new text (maybe empty), always valid UTF-8; borrowed until the next call on d. */
td_status td_detokenizer_push(struct td_detokenizer *d, int32_t id, const char **ret_text,
                              size_t *ret_bytes);
/* Returns the text that is still held back at the end of the sequence; incomplete bytes become
 * U+FFFD. */
td_status td_detokenizer_finish(struct td_detokenizer *d, const char **ret_text, size_t *ret_bytes);

#endif
