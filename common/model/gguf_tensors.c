/* gguf_tensors.c - which tensor of a GGUF file is which of the model.
 *
 * A name that is not in the table is kept, so whoever looks for tensors finds that it has no place.
 * Rows of q and k of architecture llama stand in pairs for a rotation of neighbours; tandem rotates
 * halves, as Hugging Face does. Rows are whole blocks, so this only changes which row is read.
 *
 * The experts of a layer are one tensor of three dimensions; each becomes a tensor of its own, with
 * the name that the model's family has for it. */
#include "common/model/gguf_tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/gguf.h"
#include "common/model/family.h"
#include "common/model/gguf_config.h"

static const struct name {
    const char *gguf, *model;
    bool is_rotated; /* its rows are those of heads to rotate */
} names[] =
    {
        {"token_embd.weight", "model.embed_tokens.weight", false},
        {"output_norm.weight", "model.norm.weight", false},
        {"output.weight", "lm_head.weight", false},
},
  layer_names[] = {
      {"attn_norm.weight", "input_layernorm.weight", false},
      {"ffn_norm.weight", "post_attention_layernorm.weight", false},
      {"attn_q.weight", "self_attn.q_proj.weight", true},
      {"attn_k.weight", "self_attn.k_proj.weight", true},
      {"attn_v.weight", "self_attn.v_proj.weight", false},
      {"attn_output.weight", "self_attn.o_proj.weight", false},
      {"attn_q.bias", "self_attn.q_proj.bias", true},
      {"attn_k.bias", "self_attn.k_proj.bias", true},
      {"attn_v.bias", "self_attn.v_proj.bias", false},
      {"attn_output.bias", "self_attn.o_proj.bias", false},
      {"attn_q_norm.weight", "self_attn.q_norm.weight", false},
      {"attn_k_norm.weight", "self_attn.k_norm.weight", false},
      {"ffn_gate.weight", "mlp.gate_proj.weight", false},
      {"ffn_up.weight", "mlp.up_proj.weight", false},
      {"ffn_down.weight", "mlp.down_proj.weight", false},
};

/* Tensors of a mixture: what the model's family calls them is in its own tables, where they are the
 * tensors of one place, counted from 0. `names` are the ends that families give them. */
static const struct stack {
    const char *gguf;
    enum td_into into;
    int nth;
    const char *names[2];
} stacks[] = {
    {"ffn_gate_inp.weight", TD_INTO_EXPERT_ROUTER, 0, {".gate.weight", ".router.weight"}},
    {"ffn_gate_inp.bias", TD_INTO_EXPERT_ROUTER_BIAS, 0, {".router.bias", ".router.bias"}},
    {"ffn_gate_exps.weight", TD_INTO_EXPERT_GATE_UP, 0, {".gate_proj.weight", ".w1.weight"}},
    {"ffn_up_exps.weight", TD_INTO_EXPERT_GATE_UP, 1, {".up_proj.weight", ".w3.weight"}},
    {"ffn_down_exps.weight", TD_INTO_EXPERT_DOWN, 0, {".down_proj.weight", ".w2.weight"}},
    {"ffn_gate_exps.bias", TD_INTO_EXPERT_GATE_UP_BIAS, 0, {".gate_proj.bias", ".gate_proj.bias"}},
    {"ffn_up_exps.bias", TD_INTO_EXPERT_GATE_UP_BIAS, 1, {".up_proj.bias", ".up_proj.bias"}},
    {"ffn_down_exps.bias", TD_INTO_EXPERT_DOWN_BIAS, 0, {".down_proj.bias", ".down_proj.bias"}},
};
enum { N_STACKS = sizeof stacks / sizeof *stacks };

/* Whether the tensor is one of its layer, not of each expert. */
static bool is_router(enum td_into into)
{
    return into == TD_INTO_EXPERT_ROUTER || into == TD_INTO_EXPERT_ROUTER_BIAS;
}

static const struct name *find(const struct name *table, size_t n, const char *gguf)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].gguf, gguf) == 0) return &table[i];
    return NULL;
}

/* The row of a family's own names, by either of them; the other NULL. */
static const struct td_gguf_name *find_own(const struct td_family *family, const char *gguf,
                                           const char *model)
{
    for (const struct td_gguf_name *n = family->gguf_names; n && n->gguf; n++)
        if (strcmp(gguf ? n->gguf : n->model, gguf ? gguf : model) == 0) return n;
    return NULL;
}

/* The model's name for `gguf`, written to buf when it has to be made. */
static const char *rename_tensor(const struct td_family *family, const char *gguf, char *buf,
                                 size_t buf_bytes, bool *ret_rotated)
{
    int layer, n = 0;
    const struct name *row = find(names, sizeof names / sizeof *names, gguf);
    *ret_rotated = false;
    if (row) return row->model;
    if (sscanf(gguf, "blk.%4d.%n", &layer, &n) != 1 || n == 0) return gguf;
    const struct td_gguf_name *own = find_own(family, gguf + n, NULL);
    row = own ? NULL : find(layer_names, sizeof layer_names / sizeof *layer_names, gguf + n);
    if (!row && !own) return gguf;
    *ret_rotated = row && row->is_rotated;
    snprintf(buf, buf_bytes, "model.layers.%d.%s", layer, own ? own->model : row->model);
    return buf;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

bool td_gguf_tensor_name(const struct td_family *family, const char *name,
                         char ret_name[TD_TENSOR_FILE_NAME_BYTES], bool *ret_rotated)
{
    int layer, n = 0;
    *ret_rotated = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].model, name) == 0) {
            snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "%s", names[i].gguf);
            return true;
        }
    if (sscanf(name, "model.layers.%4d.%n", &layer, &n) != 1 || n == 0) return false;
    const struct td_gguf_name *own = find_own(family, NULL, name + n);
    if (own) {
        snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "blk.%d.%s", layer, own->gguf);
        return true;
    }
    for (size_t i = 0; i < sizeof layer_names / sizeof *layer_names; i++)
        if (strcmp(layer_names[i].model, name + n) == 0) {
            snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "blk.%d.%s", layer, layer_names[i].gguf);
            *ret_rotated = layer_names[i].is_rotated;
            return true;
        }
    for (int i = 0; i < N_STACKS; i++)
        if ((is_router(stacks[i].into) || strstr(name, ".experts.")) &&
            (ends_with(name, stacks[i].names[0]) || ends_with(name, stacks[i].names[1]))) {
            snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "blk.%d.%s", layer, stacks[i].gguf);
            return true;
        }
    return false;
}

/* The tensor of a mixture that `gguf` is, and the row of the family's table for it; NULL: none. */
static const struct td_tensor_row *find_stack(const char *gguf, const struct td_model_config *c,
                                              int32_t *ret_layer, struct td_layer_spec *ret_spec)
{
    int layer, n = 0;
    if (sscanf(gguf, "blk.%4d.%n", &layer, &n) != 1 || n == 0 || layer < 0 || layer >= c->n_layers)
        return NULL;
    for (int i = 0; i < N_STACKS; i++) {
        if (strcmp(stacks[i].gguf, gguf + n) != 0) continue;
        td_model_config_layer(c, layer, ret_spec);
        *ret_layer = layer;
        int nth = stacks[i].nth;
        const struct td_tensor_row *row =
            is_router(stacks[i].into) ? ret_spec->tensors[1] : ret_spec->expert_tensors;
        for (; row && row->name; row++)
            if (row->into == stacks[i].into && nth-- == 0) return row;
    }
    return NULL;
}

/* What the file says of a tensor, without its name. */
static struct td_tensor plain_tensor(const struct td_gguf_tensor *from)
{
    const char *type;
    int32_t block, block_bytes;
    struct td_tensor t = {.data = from->data, .n_bytes = from->n_bytes, .n_dims = from->n_dims};
    td_gguf_type(from->type, &type, &block, &block_bytes);
    snprintf(t.dtype_name, sizeof t.dtype_name, "%s", type);
    t.format = td_format_of_gguf(from->type);
    TD_ASSERT(t.format && t.format->block == block && t.format->block_bytes == block_bytes);
    for (int32_t i = 0; i < t.n_dims; i++) t.shape[i] = from->ne[t.n_dims - 1 - i];
    return t;
}

static td_status append(struct td_checkpoint *c, struct td_tensor t, const char *name,
                        struct td_err *err)
{
    t.name = strdup(name);
    if (!t.name) return td_fail(err, TD_ERR_NOMEM, "no memory for a tensor name");
    c->tensors[c->n_tensors++] = t;
    return TD_OK;
}

/* Each expert of a stack as a tensor of its own. */
static td_status add_experts(const struct td_gguf_tensor *from,
                             const struct td_model_config *config, const struct td_layer_spec *spec,
                             const struct td_tensor_row *row, int32_t layer,
                             struct td_checkpoint *c, struct td_err *err)
{
    char name[TD_TENSOR_NAME_BYTES];
    struct td_tensor t = plain_tensor(from);
    int32_t n = config->experts.n, n_dims = row->cols == TD_DIM_NONE ? 2 : 3;
    if (t.n_dims != n_dims || t.shape[0] != n)
        return td_fail(err, TD_ERR_CORRUPT,
                       "tensor %s has %d dimensions, the last of %lld, must have %d, the last of "
                       "expert_count %d",
                       from->name, from->n_dims, (long long)from->ne[from->n_dims - 1], n_dims, n);
    t.n_dims = n_dims - 1;
    t.shape[0] = t.shape[1];
    t.shape[1] = t.shape[2];
    t.n_bytes /= (uint64_t)n;
    for (int32_t e = 0; e < n; e++, t.data += t.n_bytes) {
        td_tensor_name(spec, row, layer, e, name);
        td_status s = append(c, t, name, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status add_tensor(const struct td_gguf_tensor *from, const struct td_model_config *config,
                            struct td_checkpoint *c, struct td_err *err)
{
    char buf[TD_TENSOR_NAME_BYTES];
    bool rotated;
    int32_t layer;
    struct td_layer_spec spec;
    const struct td_tensor_row *row = find_stack(from->name, config, &layer, &spec);
    if (row && !is_router(row->into)) return add_experts(from, config, &spec, row, layer, c, err);
    struct td_tensor t = plain_tensor(from);
    const char *name =
        rename_tensor(td_families[config->arch], from->name, buf, sizeof buf, &rotated);
    if (row) {
        td_tensor_name(&spec, row, layer, -1, buf);
        name = buf;
    }
    if (rotated && td_families[config->arch]->gguf_pairs) t.paired_head_rows = config->head_dim;
    return append(c, t, name, err);
}

/* How many tensors those of the file become. */
static size_t count_tensors(const struct td_gguf *g, const struct td_model_config *config)
{
    struct td_layer_spec unused;
    int32_t layer;
    size_t n = g->n_tensors;
    for (size_t i = 0; i < g->n_tensors; i++)
        if (find_stack(g->tensors[i].name, config, &layer, &unused)) n += (size_t)config->experts.n;
    return n;
}

td_status td_gguf_tensors_open(const char *path, struct td_checkpoint *ret_checkpoint,
                               struct td_err *err)
{
    struct td_checkpoint c = {0};
    struct td_model_config config;
    td_status s = td_gguf_open(path, &c.gguf, err);
    if (s) return s;
    s = td_gguf_config(c.gguf, path, &config, err);
    if (!s) c.family = td_families[config.arch];
    if (!s) c.tensors = calloc(count_tensors(c.gguf, &config) + 1, sizeof *c.tensors);
    if (!s && !c.tensors)
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu tensors", path, c.gguf->n_tensors);
    for (size_t i = 0; i < c.gguf->n_tensors && !s; i++)
        if ((s = add_tensor(&c.gguf->tensors[i], &config, &c, err)) && err)
            td_err_prefix(err, "%s", path);
    if (!s) qsort(c.tensors, (size_t)c.n_tensors, sizeof *c.tensors, td_tensor_by_name);
    for (int32_t i = 1; i < c.n_tensors && !s; i++)
        if (td_tensor_by_name(&c.tensors[i - 1], &c.tensors[i]) == 0)
            s = td_fail(err, TD_ERR_CORRUPT, "%s: two tensors are %s", path, c.tensors[i].name);
    if (s)
        td_checkpoint_close(&c);
    else
        *ret_checkpoint = c;
    return s;
}
