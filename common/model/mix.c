/* mix.c - see mix.h. */
#include "common/model/mix.h"

#include <stdio.h>
#include <string.h>

/* numbers of GGUF */
enum {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    BF16 = 30,
    MXFP4 = 39
};

/* The layers in which v and down get `more`. */
enum where {
    NOWHERE,
    SOME,         /* the first and last eighth, and every third between */
    FIRST,        /* v: the first 4; down: the first eighth */
    FIRST_AND_GQA /* v: all, when 4 or more heads share one of it; down: the first eighth */
};

struct td_mix {
    const char *name;
    uint32_t most, output, more;
    enum where where;
    uint32_t file_type;
};

static const struct td_mix mixes[] = {
    {"f32", F32, F32, 0, NOWHERE, 0},        {"f16", F16, F16, 0, NOWHERE, 1},
    {"bf16", BF16, BF16, 0, NOWHERE, 32},    {"q8_0", Q8_0, Q8_0, 0, NOWHERE, 7},
    {"q6_k", Q6_K, Q6_K, 0, NOWHERE, 18},    {"q5_k_m", Q5_K, Q6_K, Q6_K, SOME, 17},
    {"q5_k_s", Q5_K, Q6_K, 0, NOWHERE, 16},  {"q5_1", Q5_1, Q6_K, 0, NOWHERE, 9},
    {"q5_0", Q5_0, Q6_K, 0, NOWHERE, 8},     {"q4_k_m", Q4_K, Q6_K, Q6_K, SOME, 15},
    {"q4_k_s", Q4_K, Q6_K, Q5_K, FIRST, 14}, {"q4_1", Q4_1, Q6_K, 0, NOWHERE, 3},
    {"q4_0", Q4_0, Q6_K, 0, NOWHERE, 2},     {"iq4_nl", IQ4_NL, Q6_K, Q5_K, FIRST_AND_GQA, 25},
    {"mxfp4", MXFP4, Q6_K, 0, NOWHERE, 38},
};

const struct td_mix *td_mix_by_name(const char *name)
{
    for (size_t i = 0; name && i < sizeof mixes / sizeof *mixes; i++)
        if (strcmp(mixes[i].name, name) == 0) return &mixes[i];
    return NULL;
}

uint32_t td_mix_file_type(const struct td_mix *mix) { return mix->file_type; }
bool td_mix_has_blocks(const struct td_mix *mix) { return !td_format_of_gguf(mix->most)->dtype; }

static bool gets_more(const struct td_mix *mix, const struct td_model_config *c, int layer,
                      const char *rest)
{
    bool is_v = strcmp(rest, "self_attn.v_proj.weight") == 0;
    int eighth = c->n_layers / 8;
    if (!is_v && strcmp(rest, "mlp.down_proj.weight") != 0) return false;
    switch (mix->where) {
    case SOME:
        return layer < eighth || layer >= 7 * c->n_layers / 8 || (layer - eighth) % 3 == 2;
    case FIRST:
        return layer < (is_v ? 4 : eighth);
    case FIRST_AND_GQA:
        return is_v ? c->n_heads / c->n_kv_heads >= 4 : layer < eighth;
    case NOWHERE:
        break;
    }
    return false;
}

/* Blocks of 256 that the rows are no multiple of become blocks of 32, of more bits. */
static uint32_t fit(uint32_t type, int64_t n_cols)
{
    if (n_cols % TD_BLOCK_VALUES_MAX == 0) return type;
    return type == Q4_K ? Q5_0 : type == Q5_K ? Q5_1 : type == Q6_K ? Q8_0 : type;
}

const struct td_format *td_mix_format(const struct td_mix *mix, const struct td_model_config *c,
                                      const char *name, int64_t n_cols, const struct td_format *own)
{
    int layer, at = 0;
    uint32_t type = mix->most;
    bool is_embedding = strcmp(name, "model.embed_tokens.weight") == 0;
    if (strcmp(name, "lm_head.weight") == 0 || (is_embedding && c->tied_embeddings))
        type = mix->output;
    else if (sscanf(name, "model.layers.%d.%n", &layer, &at) == 1 && at &&
             gets_more(mix, c, layer, name + at))
        type = mix->more;
    const struct td_format *f = td_format_of_gguf(fit(type, n_cols));
    return n_cols % f->block == 0 ? f : own;
}
