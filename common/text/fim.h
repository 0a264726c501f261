/* fim.h - fill in the middle: the prompt of a model that was trained to write what stands between
 * two texts.
 *
 * Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"; the
 * special tokens are those of the model cards. All of them put the beginning first (PSM). */
#ifndef TD_TEXT_FIM_H
#define TD_TEXT_FIM_H

#include "common/text/tokenizer.h"

/* *ret_text: the prompt, malloc'd, not terminated; its special tokens are in the text, and
 * td_tokenizer_encode finds them there. TD_ERR_UNSUPPORTED: the tokenizer has no
 * family's special tokens. TD_ERR_AGAIN: no memory. Thread-safe. */
td_status td_fim_prompt(const struct td_tokenizer *t, const char *before, size_t n_before,
                        const char *after, size_t n_after, char **ret_text, size_t *ret_bytes,
                        struct td_err *err);

#endif
