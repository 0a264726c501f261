/* tokenizer_gguf.h - a tokenizer from the keys of a GGUF file. Internal to
 * common/text/tokenizer*.c and its tests. */
#ifndef TD_TEXT_TOKENIZER_GGUF_H
#define TD_TEXT_TOKENIZER_GGUF_H

#include "common/base/gguf.h"
#include "common/text/tokenizer.h"

/* Models "llama" (SentencePiece, by score) and "gpt2" (byte-level BPE with the splitters that
 * tokenizer_gguf.c names); others are refused by name. `what` names the file in errors. */
td_status td_tokenizer_from_gguf(const struct td_gguf *g, const char *what,
                                 struct td_tokenizer **ret_tokenizer, struct td_err *err);

/* The value of tokenizer.ggml.pre for words that `regex` splits (NULL: GPT-2's), with or without
 * taking words that are tokens whole; NULL: none of those that this version reads. */
const char *td_gguf_splitter_name(const char *regex, bool whole_words);
/* The expression that such a value stands for; NULL: GPT-2's, or no such value. */
const char *td_gguf_splitter_regex(const char *name);

#endif
