/* checkpoint.c - opens either kind of model, and what both have in common. */
#include "common/model/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/gguf.h"
#include "common/model/family.h"
#include "common/model/gguf_tensors.h"
#include "common/model/quant_tensors.h"
#include "common/model/safetensors.h"

int td_tensor_by_name(const void *a, const void *b)
{
    return strcmp(((const struct td_tensor *)a)->name, ((const struct td_tensor *)b)->name);
}

static td_status check_names(const char *what, const struct td_checkpoint *c, struct td_err *err)
{
    for (int32_t i = 1; i < c->n_tensors; i++)
        if (!strcmp(c->tensors[i - 1].name, c->tensors[i].name))
            return td_fail(err, TD_ERR_CORRUPT, "%s: two tensors are %.128s", what,
                           c->tensors[i].name);
    return TD_OK;
}

/* The names of a model that takes images, too: as transformers wrote them first, and since 4.52. */
static const struct td_text_names {
    const char *model, *head; /* before what stands behind "model." and "lm_head." elsewhere */
    const char *of_images[2]; /* what the others begin with */
} text_names[] = {
    {"language_model.model.",
     "language_model.lm_head.",
     {"vision_tower.", "multi_modal_projector."}},
    {"model.language_model.", "lm_head.", {"model.vision_tower.", "model.multi_modal_projector."}},
};

static bool begins(const char *name, const char *with)
{
    return !strncmp(name, with, strlen(with));
}

static const struct td_text_names *text_names_of(const struct td_checkpoint *c)
{
    for (size_t k = 0; k < sizeof text_names / sizeof *text_names; k++)
        for (int32_t i = 0; i < c->n_tensors; i++)
            if (begins(c->tensors[i].name, text_names[k].model)) return &text_names[k];
    return NULL;
}

static const char model_prefix[] = "model.", head_prefix[] = "lm_head.";

/* Gives a tensor of the text model the name that it has alone: the shorter one, in its place. */
static void rename_text(const struct td_text_names *n, char *name)
{
    const char *from = begins(name, n->model) ? n->model : begins(name, n->head) ? n->head : NULL;
    if (!from) return;
    const char *to = from == n->model ? model_prefix : head_prefix;
    size_t n_from = strlen(from), n_to = strlen(to);
    memmove(name + n_to, name + n_from, strlen(name + n_from) + 1);
    memcpy(name, to, n_to);
}

/* The other way; NULL: it is no name of a text model. */
static const char *text_file_name(const struct td_text_names *n, const char *name,
                                  char buf[TD_TENSOR_FILE_NAME_BYTES])
{
    bool is_head = begins(name, head_prefix);
    if (!is_head && !begins(name, model_prefix)) return NULL;
    snprintf(buf, TD_TENSOR_FILE_NAME_BYTES, "%s%s", is_head ? n->head : n->model,
             name + strlen(is_head ? head_prefix : model_prefix));
    return buf;
}

static void keep_text(struct td_checkpoint *c)
{
    const struct td_text_names *n = text_names_of(c);
    if (!n) return;
    c->text_names = n;
    int32_t kept = 0;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        struct td_tensor *t = &c->tensors[i];
        if (begins(t->name, n->of_images[0]) || begins(t->name, n->of_images[1])) {
            free(t->name);
            continue;
        }
        rename_text(n, t->name);
        c->tensors[kept++] = *t;
    }
    c->n_tensors = kept;
    qsort(c->tensors, (size_t)kept, sizeof *c->tensors, td_tensor_by_name);
}

static td_status open_directory(const char *path, struct td_checkpoint *c, struct td_err *err)
{
    td_status s = td_safetensors_open(path, c, err);
    if (s) return s;
    keep_text(c);
    if ((s = check_names(path, c, err))) td_checkpoint_close(c);
    return s;
}

td_status td_checkpoint_open(const char *path, struct td_checkpoint *ret_checkpoint,
                             struct td_err *err)
{
    return td_gguf_is_file(path) ? td_gguf_tensors_open(path, ret_checkpoint, err)
                                 : open_directory(path, ret_checkpoint, err);
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

/* The other name of a tensor, to those of files or from them; false: it has none. */
static bool rename_one(const struct td_file_names *n, bool to_file, const char *name, char *ret,
                       size_t ret_bytes)
{
    const char *const pairs[][2] = {{n->layers, "model.layers."},
                                    {n->embed, "model.embed_tokens.weight"},
                                    {n->norm, "model.norm.weight"},
                                    {n->head, "lm_head.weight"},
                                    {n->redundant, "model.rotary_emb.inv_freq"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const char *from = pairs[i][to_file], *to = pairs[i][!to_file];
        size_t n_from = from ? strlen(from) : 0;
        bool fits = n_from && (i == 0 ? !strncmp(name, from, n_from) : !strcmp(name, from));
        if (!fits || !to) continue;
        snprintf(ret, ret_bytes, "%s%s", to, name + n_from);
        return true;
    }
    return false;
}

const char *td_checkpoint_file_name(const struct td_checkpoint *c, const char *name,
                                    char buf[TD_TENSOR_FILE_NAME_BYTES])
{
    bool rotated;
    if (c->gguf) return td_gguf_tensor_name(c->family, name, buf, &rotated) ? buf : name;
    const char *text = c->text_names ? text_file_name(c->text_names, name, buf) : NULL;
    if (text) return text;
    return c->family &&
                   rename_one(c->family->file_names, true, name, buf, TD_TENSOR_FILE_NAME_BYTES)
               ? buf
               : name;
}

td_status td_checkpoint_rename(const struct td_family *family, const char *what,
                               struct td_checkpoint *c, struct td_err *err)
{
    const struct td_file_names *names = family->file_names;
    if (c->gguf || !names) return TD_OK;
    c->family = family;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        struct td_tensor *t = &c->tensors[i];
        size_t n_bytes = strlen(t->name) + 32; /* no prefix is so much longer than another */
        char *name = malloc(n_bytes);
        if (!name) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
        if (!rename_one(names, false, t->name, name, n_bytes)) {
            free(name);
            continue;
        }
        free(t->name);
        t->name = name;
    }
    qsort(c->tensors, (size_t)c->n_tensors, sizeof *c->tensors, td_tensor_by_name);
    return check_names(what, c, err);
}

bool td_tensor_is_redundant(const char *name)
{
    const char *at = strstr(name, ".rotary_emb.");
    return at &&
           (strcmp(at, ".rotary_emb.inv_freq") == 0 || strcmp(at, ".rotary_emb.cos_cached") == 0 ||
            strcmp(at, ".rotary_emb.sin_cached") == 0);
}
