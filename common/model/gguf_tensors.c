/* gguf_tensors.c - which tensor of a GGUF file is which of the model.
 *
 * A name that is not in the table is kept, so whoever looks for tensors finds that it has no place.
 * Rows of q and k of architecture llama stand in pairs for a rotation of neighbours; tandem rotates
 * halves, as Hugging Face does. Rows are whole blocks, so this only changes which row is read. */
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

static const struct name *find(const struct name *table, size_t n, const char *gguf)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].gguf, gguf) == 0) return &table[i];
    return NULL;
}

/* The model's name for `gguf`, written to buf when it has to be made. */
static const char *rename_tensor(const char *gguf, char *buf, size_t buf_bytes, bool *ret_rotated)
{
    int layer, n = 0;
    const struct name *row = find(names, sizeof names / sizeof *names, gguf);
    *ret_rotated = false;
    if (row) return row->model;
    if (sscanf(gguf, "blk.%4d.%n", &layer, &n) != 1 || n == 0) return gguf;
    row = find(layer_names, sizeof layer_names / sizeof *layer_names, gguf + n);
    if (!row) return gguf;
    *ret_rotated = row->is_rotated;
    snprintf(buf, buf_bytes, "model.layers.%d.%s", layer, row->model);
    return buf;
}

bool td_gguf_tensor_name(const char *name, char ret_name[TD_TENSOR_FILE_NAME_BYTES],
                         bool *ret_rotated)
{
    int layer, n = 0;
    *ret_rotated = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].model, name) == 0) {
            snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "%s", names[i].gguf);
            return true;
        }
    if (sscanf(name, "model.layers.%4d.%n", &layer, &n) != 1 || n == 0) return false;
    for (size_t i = 0; i < sizeof layer_names / sizeof *layer_names; i++)
        if (strcmp(layer_names[i].model, name + n) == 0) {
            snprintf(ret_name, TD_TENSOR_FILE_NAME_BYTES, "blk.%d.%s", layer, layer_names[i].gguf);
            *ret_rotated = layer_names[i].is_rotated;
            return true;
        }
    return false;
}

static td_status add_tensor(const struct td_gguf_tensor *from, const struct td_model_config *config,
                            struct td_tensor *ret, struct td_err *err)
{
    char buf[128];
    bool rotated;
    const char *type;
    int32_t block, block_bytes;
    struct td_tensor t = {.data = from->data, .n_bytes = from->n_bytes, .n_dims = from->n_dims};
    const char *name = rename_tensor(from->name, buf, sizeof buf, &rotated);
    td_gguf_type(from->type, &type, &block, &block_bytes);
    snprintf(t.dtype_name, sizeof t.dtype_name, "%s", type);
    t.format = td_format_of_gguf(from->type);
    TD_ASSERT(t.format && t.format->block == block && t.format->block_bytes == block_bytes);
    for (int32_t i = 0; i < t.n_dims; i++) t.shape[i] = from->ne[t.n_dims - 1 - i];
    if (rotated && td_families[config->arch]->gguf_pairs) t.paired_head_rows = config->head_dim;
    t.name = strdup(name);
    if (!t.name) return td_fail(err, TD_ERR_NOMEM, "no memory for a tensor name");
    *ret = t;
    return TD_OK;
}

td_status td_gguf_tensors_open(const char *path, struct td_checkpoint *ret_checkpoint,
                               struct td_err *err)
{
    struct td_checkpoint c = {0};
    struct td_model_config config;
    td_status s = td_gguf_open(path, &c.gguf, err);
    if (s) return s;
    s = td_gguf_config(c.gguf, path, &config, err);
    c.tensors = calloc(c.gguf->n_tensors ? c.gguf->n_tensors : 1, sizeof *c.tensors);
    if (!s && !c.tensors)
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu tensors", path, c.gguf->n_tensors);
    for (size_t i = 0; i < c.gguf->n_tensors && !s; i++) {
        s = add_tensor(&c.gguf->tensors[i], &config, &c.tensors[c.n_tensors], err);
        if (!s) c.n_tensors++;
    }
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
