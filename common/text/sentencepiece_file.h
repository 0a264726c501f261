/* sentencepiece_file.h - reads a SentencePiece model (tokenizer.model): the fields that decide
 * which tokens a text becomes. Internal to common/text/ and its tests.
 *
 * The file is one protobuf message; its fields of no effect (how the model was trained) are passed
 * over. Read by hand, because this library links nothing that unpacks protobuf, and the message is
 * a list with a dozen numbers. */
#ifndef TD_TEXT_SENTENCEPIECE_FILE_H
#define TD_TEXT_SENTENCEPIECE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_SP_FILE_MAX_BYTES ((size_t)64 << 20)
/* of all pieces together: a place in a trie or in a table of merges for each, 20 bytes or more */
#define TD_SP_PIECES_MAX_BYTES (16 << 20)
#define TD_SP_PIECE_MAX_BYTES 512 /* the ways to cut a piece in two are tried one by one */

/* the numbers of the file */
enum td_sp_kind {
    TD_SP_NORMAL = 1,
    TD_SP_UNKNOWN = 2,
    TD_SP_CONTROL = 3,
    TD_SP_USER_DEFINED = 4,
    TD_SP_UNUSED = 5,
    TD_SP_BYTE = 6
};
enum td_sp_model_type { TD_SP_UNIGRAM = 1, TD_SP_BPE = 2, TD_SP_WORD = 3, TD_SP_CHAR = 4 };

struct td_sp_piece {
    const char *text; /* not terminated */
    size_t n;         /* 1..TD_SP_PIECE_MAX_BYTES, valid UTF-8 without NUL */
    float score;      /* finite */
    enum td_sp_kind kind;
};

/* Texts and bytes are borrowed from the file's. */
struct td_sp_file {
    struct td_sp_piece *pieces;
    size_t n_pieces; /* 1..TD_VOCAB_MAX */
    int64_t model_type;
    int64_t bos_id, eos_id; /* -1: none; otherwise not checked */
    bool byte_fallback, whitespace_as_suffix;
    bool dummy_prefix, remove_extra_whitespaces, escape_whitespaces;
    const uint8_t *charsmap; /* the normalizer's replacements; NULL: none */
    size_t n_charsmap;
    bool has_denormalizer;
};

/* TD_ERR_CORRUPT, TD_ERR_LIMIT, TD_ERR_UNSUPPORTED, TD_ERR_NOMEM: by name, and nothing to free. */
td_status td_sp_file_read(const void *bytes, size_t n_bytes, struct td_sp_file *ret_file,
                          struct td_err *err);
void td_sp_file_free(struct td_sp_file *file);

#endif
