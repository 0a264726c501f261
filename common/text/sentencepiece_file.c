/* sentencepiece_file.c - see sentencepiece_file.h.
 *
 * Protobuf's wire format: a field is a key (number << 3 | type) and a value: a varint, 8 or 4
 * bytes, or a length with so many bytes. A field that comes again replaces its value, a message
 * that comes again adds its fields. */
#include "common/text/sentencepiece_file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_bpe.h"

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

/* What is left of a message, and the field that was read last. */
struct cursor {
    const uint8_t *at, *end;
    const char *what;
    struct td_err *err;
    uint64_t number;
    int type;
    uint64_t value; /* VARINT, FIXED32 */
    const uint8_t *bytes;
    size_t n_bytes;
};

static td_status corrupt(const struct cursor *c, const char *why)
{
    return td_fail(c->err, TD_ERR_CORRUPT, "%s: %s", c->what, why);
}

static bool take_varint(struct cursor *c, uint64_t *ret)
{
    uint64_t value = 0;
    for (int shift = 0; c->at < c->end && shift < 64; shift += 7) {
        uint8_t byte = *c->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *ret = value;
            return true;
        }
    }
    return false;
}

/* Reads the next field of a message that is not at its end. */
static td_status next_field(struct cursor *c)
{
    uint64_t key;
    if (!take_varint(c, &key) || key >> 3 == 0)
        return corrupt(c, "no field's number where one must be");
    c->number = key >> 3;
    c->type = (int)(key & 7);
    size_t n_left = (size_t)(c->end - c->at);
    switch (c->type) {
    case VARINT:
        if (!take_varint(c, &c->value)) return corrupt(c, "ends in a number");
        return TD_OK;
    case FIXED64:
        if (n_left < 8) return corrupt(c, "ends in a number");
        c->at += 8;
        return TD_OK;
    case FIXED32:
        if (n_left < 4) return corrupt(c, "ends in a number");
        c->value = (uint32_t)c->at[0] | (uint32_t)c->at[1] << 8 | (uint32_t)c->at[2] << 16 |
                   (uint32_t)c->at[3] << 24;
        c->at += 4;
        return TD_OK;
    case BYTES:
        if (!take_varint(c, &c->value)) return corrupt(c, "ends in a length");
        if (c->value > (uint64_t)(c->end - c->at)) return corrupt(c, "a length passes the end");
        c->bytes = c->at;
        c->n_bytes = (size_t)c->value;
        c->at += c->n_bytes;
        return TD_OK;
    default:
        return corrupt(c, "a field of a type that protobuf does not have");
    }
}

static struct cursor inside(const struct cursor *c, const char *what)
{
    return (struct cursor){
        .at = c->bytes, .end = c->bytes + c->n_bytes, .what = what, .err = c->err};
}

/* A field that is known must have the type that it has. */
static td_status need_type(const struct cursor *c, int type)
{
    if (c->type == type) return TD_OK;
    return td_fail(c->err, TD_ERR_CORRUPT, "%s: field %llu has type %d, must have %d", c->what,
                   (unsigned long long)c->number, c->type, type);
}

static td_status check_piece(const struct cursor *c, size_t at, const struct td_sp_piece *p)
{
    size_t bad;
    if (p->n == 0 || p->n > TD_SP_PIECE_MAX_BYTES)
        return td_fail(c->err, p->n ? TD_ERR_LIMIT : TD_ERR_CORRUPT,
                       "piece %zu has %zu bytes, must have 1 to %d", at, p->n,
                       TD_SP_PIECE_MAX_BYTES);
    if (!td_utf8_valid(p->text, p->n, &bad))
        return td_fail(c->err, TD_ERR_UNSUPPORTED, "piece %zu is not valid UTF-8 at its byte %zu",
                       at, bad);
    if (memchr(p->text, '\0', p->n))
        return td_fail(c->err, TD_ERR_UNSUPPORTED, "piece %zu holds a NUL", at);
    if (!isfinite(p->score))
        return td_fail(c->err, TD_ERR_CORRUPT, "piece %zu (\"%.*s\"): its score is no number", at,
                       p->n < 60 ? (int)p->n : 60, p->text);
    return TD_OK;
}

static td_status read_piece(const struct cursor *from, size_t at, struct td_sp_piece *ret)
{
    struct cursor c = inside(from, "a piece");
    struct td_sp_piece p = {.kind = TD_SP_NORMAL};
    td_status s = TD_OK;
    while (c.at < c.end && !s) {
        if ((s = next_field(&c))) break;
        if (c.number == 1 && !(s = need_type(&c, BYTES))) {
            p.text = (const char *)c.bytes;
            p.n = c.n_bytes;
        } else if (c.number == 2 && !(s = need_type(&c, FIXED32))) {
            uint32_t bits = (uint32_t)c.value;
            memcpy(&p.score, &bits, sizeof p.score);
        } else if (c.number == 3 && !(s = need_type(&c, VARINT))) {
            if (c.value < TD_SP_NORMAL || c.value > TD_SP_BYTE)
                return td_fail(c.err, TD_ERR_UNSUPPORTED,
                               "piece %zu has type %llu, must have %d..%d", at,
                               (unsigned long long)c.value, TD_SP_NORMAL, TD_SP_BYTE);
            p.kind = (enum td_sp_kind)c.value;
        }
    }
    if (!s) s = check_piece(&c, at, &p);
    if (!s) *ret = p;
    return s;
}

/* How the model was trained; of effect are its type and what the texts' ends are. */
static td_status read_trainer(const struct cursor *from, struct td_sp_file *f)
{
    struct cursor c = inside(from, "trainer_spec");
    td_status s = TD_OK;
    while (c.at < c.end && !s) {
        if ((s = next_field(&c))) break;
        if (c.number != 3 && c.number != 24 && c.number != 35 && c.number != 41 && c.number != 42)
            continue;
        if ((s = need_type(&c, VARINT))) break;
        if (c.number == 3) f->model_type = (int64_t)c.value;
        if (c.number == 24) f->whitespace_as_suffix = c.value != 0;
        if (c.number == 35) f->byte_fallback = c.value != 0;
        if (c.number == 41) f->bos_id = (int32_t)c.value;
        if (c.number == 42) f->eos_id = (int32_t)c.value;
    }
    return s;
}

static td_status read_normalizer(const struct cursor *from, struct td_sp_file *f)
{
    struct cursor c = inside(from, "normalizer_spec");
    td_status s = TD_OK;
    while (c.at < c.end && !s) {
        if ((s = next_field(&c))) break;
        if (c.number == 2 && !(s = need_type(&c, BYTES))) {
            f->charsmap = c.n_bytes ? c.bytes : NULL;
            f->n_charsmap = c.n_bytes;
        }
        if (c.number < 3 || c.number > 5) continue;
        if ((s = need_type(&c, VARINT))) break;
        if (c.number == 3) f->dummy_prefix = c.value != 0;
        if (c.number == 4) f->remove_extra_whitespaces = c.value != 0;
        if (c.number == 5) f->escape_whitespaces = c.value != 0;
    }
    return s;
}

/* A denormalizer counts when it has replacements. */
static td_status read_denormalizer(const struct cursor *from, struct td_sp_file *f)
{
    struct td_sp_file other = {0};
    td_status s = read_normalizer(from, &other);
    f->has_denormalizer = f->has_denormalizer || other.charsmap;
    return s;
}

/* pieces NULL: counts them only. */
static td_status read_fields(struct cursor c, struct td_sp_file *f, size_t *ret_n_pieces)
{
    td_status s = TD_OK;
    size_t n = 0, n_texts = 0;
    while (c.at < c.end && !s) {
        if ((s = next_field(&c))) break;
        if (c.number > 5 || c.number == 4) continue; /* self-tests, extensions */
        if ((s = need_type(&c, BYTES))) break;
        if (c.number == 1 && n == TD_VOCAB_MAX)
            return td_fail(c.err, TD_ERR_LIMIT, "more than %d pieces", TD_VOCAB_MAX);
        if (c.number == 1 && f->pieces) s = read_piece(&c, n, &f->pieces[n]);
        if (c.number == 1 && f->pieces) n_texts += f->pieces[n].n;
        if (n_texts > TD_SP_PIECES_MAX_BYTES)
            return td_fail(c.err, TD_ERR_LIMIT, "pieces of more than %d bytes in all",
                           TD_SP_PIECES_MAX_BYTES);
        if (c.number == 1) n++;
        if (!f->pieces) continue;
        if (c.number == 2) s = read_trainer(&c, f);
        if (c.number == 3) s = read_normalizer(&c, f);
        if (c.number == 5) s = read_denormalizer(&c, f);
    }
    *ret_n_pieces = n;
    return s;
}

td_status td_sp_file_read(const void *bytes, size_t n_bytes, struct td_sp_file *ret_file,
                          struct td_err *err)
{
    struct cursor c = {.at = bytes,
                       .end = (const uint8_t *)bytes + n_bytes,
                       .what = "no SentencePiece model",
                       .err = err};
    struct td_sp_file f = {.model_type = TD_SP_UNIGRAM,
                           .bos_id = 1,
                           .eos_id = 2,
                           .dummy_prefix = true,
                           .remove_extra_whitespaces = true,
                           .escape_whitespaces = true};
    if (n_bytes > TD_SP_FILE_MAX_BYTES)
        return td_fail(err, TD_ERR_LIMIT, "%zu bytes, at most %zu", n_bytes, TD_SP_FILE_MAX_BYTES);
    td_status s = read_fields(c, &f, &f.n_pieces);
    if (!s && f.n_pieces == 0) s = corrupt(&c, "not one piece");
    if (s) return s;
    f.pieces = calloc(f.n_pieces, sizeof *f.pieces);
    if (!f.pieces) return td_fail(err, TD_ERR_NOMEM, "no memory for %zu pieces", f.n_pieces);
    s = read_fields(c, &f, &f.n_pieces);
    if (s)
        td_sp_file_free(&f);
    else
        *ret_file = f;
    return s;
}

void td_sp_file_free(struct td_sp_file *file)
{
    free(file->pieces);
    *file = (struct td_sp_file){0};
}
