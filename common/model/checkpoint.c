/* checkpoint.c - opens either kind of model, and what both have in common. */
#include "common/model/checkpoint.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/gguf.h"
#include "common/model/gguf_tensors.h"
#include "common/model/quant_tensors.h"
#include "common/model/safetensors.h"

int td_tensor_by_name(const void *a, const void *b)
{
    return strcmp(((const struct td_tensor *)a)->name, ((const struct td_tensor *)b)->name);
}

td_status td_checkpoint_open(const char *path, struct td_checkpoint *ret_checkpoint,
                             struct td_err *err)
{
    return td_gguf_is_file(path) ? td_gguf_tensors_open(path, ret_checkpoint, err)
                                 : td_safetensors_open(path, ret_checkpoint, err);
}

void td_checkpoint_close(struct td_checkpoint *c)
{
    for (int32_t i = 0; i < c->n_tensors; i++) free(c->tensors[i].name);
    free(c->tensors);
    for (int32_t i = 0; i < c->n_files; i++) td_file_map_close(&c->files[i]);
    free(c->files);
    td_gguf_close(c->gguf);
    free(c->quant);
    *c = (struct td_checkpoint){0};
}

const struct td_tensor *td_checkpoint_find(const struct td_checkpoint *c, const char *name)
{
    struct td_tensor key = {.name = (char *)(uintptr_t)name};
    return bsearch(&key, c->tensors, (size_t)c->n_tensors, sizeof key, td_tensor_by_name);
}

const char *td_checkpoint_file_name(const struct td_checkpoint *c, const char *name,
                                    char buf[TD_TENSOR_FILE_NAME_BYTES])
{
    bool rotated;
    return c->gguf && td_gguf_tensor_name(c->family, name, buf, &rotated) ? buf : name;
}

bool td_tensor_is_redundant(const char *name)
{
    const char *at = strstr(name, ".rotary_emb.");
    return at &&
           (strcmp(at, ".rotary_emb.inv_freq") == 0 || strcmp(at, ".rotary_emb.cos_cached") == 0 ||
            strcmp(at, ".rotary_emb.sin_cached") == 0);
}
