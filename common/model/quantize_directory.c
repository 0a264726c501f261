/* quantize_directory.c - a directory as compressed-tensors has it, which vLLM and transformers
 * load.
 *
 * Everything is written into TO.partial-PID. At the end that gets its name by one rename; where
 * files of the same names are replaced, they move one by one, config.json first away and last
 * in. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/base/new_file.h"
#include "common/model/config_internal.h"
#include "common/model/family.h"
#include "common/model/quantize_internal.h"
#include "kernels/quantize.h"

#define FILE_BYTES_MAX ((size_t)256 << 20)

/* Behind "model.layers.N.". */
static const char *const linears[] = {"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                      "self_attn.v_proj.weight", "self_attn.o_proj.weight",
                                      "mlp.gate_proj.weight",    "mlp.up_proj.weight",
                                      "mlp.down_proj.weight"};

/* Copied as they are, where they exist. */
static const char *const copied[] = {"tokenizer.json",
                                     "tokenizer_config.json",
                                     "special_tokens_map.json",
                                     "added_tokens.json",
                                     "generation_config.json",
                                     "chat_template.jinja",
                                     "chat_template.json",
                                     "vocab.json",
                                     "merges.txt",
                                     "tokenizer.model",
                                     "tiktoken.model",
                                     "qwen.tiktoken"};
#define N_COPIED (sizeof copied / sizeof *copied)

struct directory {
    struct td_quantize *q;
    enum td_quantize_codes codes;
    struct td_piece *pieces; /* [n] */
    int32_t n;
    int32_t group; /* W4A16: values of one scale */
    char partial[4000];
    struct td_new_file file;
    struct td_err *err;
};

/* Of a name behind "model.layers.N.". */
static bool at_linear(const char *name)
{
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++)
        if (strcmp(name, linears[i]) == 0) return true;
    return false;
}

static bool is_linear(const char *name)
{
    int layer, at = 0;
    if (sscanf(name, "model.layers.%4d.%n", &layer, &at) != 1 || !at) return false;
    return at_linear(name + at);
}

/* ---- plan ------------------------------------------------------------------------------------ */

static td_status find_tensor_scale(const struct directory *d, struct td_piece *p)
{
    float max = 0, *row = malloc((size_t)p->n_cols * sizeof *row);
    td_status s = row ? TD_OK : td_fail(d->err, TD_ERR_NOMEM, "tensor %s: no memory", p->name);
    for (int64_t r = 0; r < p->n_rows && !s; r++) {
        if (!td_piece_read_row(p, r, row))
            s = td_fail(d->err, TD_ERR_CORRUPT,
                        "%s: tensor %s, row %" PRId64 ": a value is infinite or no number",
                        d->q->from, p->name, r);
        float most = td_values_max(row, p->n_cols);
        max = most > max ? most : max;
    }
    free(row);
    if (!s) p->tensor_scale = p->row_scales[0] = td_codes_scale(true, max, p->format);
    return s;
}

/* The largest group of which the rows of all matrices are multiples: one for the whole directory,
 * as the configuration has it. */
static td_status find_group(struct directory *d)
{
    const struct td_checkpoint *c = d->q->checkpoint;
    d->group = 128;
    for (int32_t i = 0; i < c->n_tensors; i++) {
        const struct td_tensor *t = &c->tensors[i];
        if (!is_linear(t->name) || t->n_dims != 2) continue;
        while (d->group >= 32 && t->shape[1] % d->group) d->group /= 2;
        if (d->group < 32)
            return td_fail(d->err, TD_ERR_UNSUPPORTED,
                           "%s: tensor %s has rows of %" PRId64 " values, must be a multiple of 32",
                           d->q->from, t->name, t->shape[1]);
    }
    return TD_OK;
}

/* A matrix of 4-bit codes, packed in words: its scales, and its shape before it was packed. */
static td_status plan_packed(struct directory *d, struct td_piece p)
{
    p.codes = TD_CODES_INT4;
    p.group = d->group;
    /* in the checkpoint's type: f16 is wide enough for the scales of weights */
    p.format = p.from->format;
    p.row_scales = calloc((size_t)(p.n_rows * (p.n_cols / p.group)), sizeof *p.row_scales);
    if (!p.row_scales) return td_fail(d->err, TD_ERR_NOMEM, "tensor %s: no memory", p.name);
    struct td_piece *codes = &d->pieces[d->n++], *scales = &d->pieces[d->n++],
                    *shape = &d->pieces[d->n++];
    *codes = p;
    *scales = (struct td_piece){.values = p.row_scales,
                                .format = p.format,
                                .n_rows = p.n_rows,
                                .n_cols = p.n_cols / p.group};
    *shape = (struct td_piece){
        .codes = TD_CODES_SHAPE, .n_rows = 1, .n_cols = 2, .shape = {p.n_rows, p.n_cols}};
    snprintf(codes->name, sizeof codes->name, "%.140s_packed", p.name);
    snprintf(scales->name, sizeof scales->name, "%.140s_scale", p.name);
    snprintf(shape->name, sizeof shape->name, "%.140s_shape", p.name);
    return TD_OK;
}

/* A matrix becomes codes, and a tensor of scales behind them. */
static td_status plan_linear(struct directory *d, struct td_piece p)
{
    if (d->codes == TD_QUANTIZE_W4A16) return plan_packed(d, p);
    bool by_tensor = d->codes == TD_QUANTIZE_FP8_TENSOR;
    p.codes = d->codes == TD_QUANTIZE_W8A8 ? TD_CODES_INT8 : TD_CODES_FP8;
    /* in the checkpoint's type, as others write them; f16 is too short for small scales */
    p.format = td_format_of_dtype(p.from->format->dtype == TD_BF16 ? TD_BF16 : TD_F32);
    p.row_scales = calloc(by_tensor ? 1 : (size_t)p.n_rows, sizeof *p.row_scales);
    if (!p.row_scales) return td_fail(d->err, TD_ERR_NOMEM, "tensor %s: no memory", p.name);
    struct td_piece *codes = &d->pieces[d->n++], *scales = &d->pieces[d->n++];
    *codes = p;
    *scales = (struct td_piece){.values = p.row_scales,
                                .format = p.format,
                                .n_rows = by_tensor ? 1 : p.n_rows,
                                .n_cols = 1};
    snprintf(scales->name, sizeof scales->name, "%.140s_scale", p.name);
    return by_tensor ? find_tensor_scale(d, codes) : TD_OK;
}

static td_status plan(struct directory *d)
{
    const struct td_checkpoint *c = d->q->checkpoint;
    d->pieces = calloc(3 * (size_t)c->n_tensors, sizeof *d->pieces);
    if (!d->pieces) return td_fail(d->err, TD_ERR_NOMEM, "%s: no memory", d->q->from);
    td_status s = d->codes == TD_QUANTIZE_W4A16 ? find_group(d) : TD_OK;
    for (int32_t i = 0; i < c->n_tensors && !s; i++) {
        const struct td_tensor *t = &c->tensors[i];
        struct td_piece p = {.from = t, .format = t->format};
        if (!t->format || !t->format->dtype || t->n_dims < 1 || t->n_dims > 2)
            return td_fail(d->err, TD_ERR_UNSUPPORTED,
                           "%s: tensor %s is %s with %d dimensions, must be F32, F16 or BF16 with "
                           "1 or 2",
                           d->q->from, t->name, t->dtype_name, t->n_dims);
        if (strlen(t->name) > 140)
            return td_fail(d->err, TD_ERR_LIMIT, "%s: tensor name of %zu bytes, at most 140",
                           d->q->from, strlen(t->name));
        if ((s = td_quantize_check_size(d->q, t, d->err))) return s;
        snprintf(p.name, sizeof p.name, "%s", t->name);
        p.n_rows = t->n_dims == 2 ? t->shape[0] : 1;
        p.n_cols = t->shape[t->n_dims - 1];
        td_fold_piece(d->q->fold, t->name, &p);
        if (is_linear(t->name) && t->n_dims == 2)
            s = plan_linear(d, p);
        else
            d->pieces[d->n++] = p;
    }
    return s;
}

/* ---- files ----------------------------------------------------------------------------------- */

static td_status path_in(const struct directory *d, const char *dir, const char *name,
                         char path[4096])
{
    int n = snprintf(path, 4096, "%s/%s", dir, name);
    return n > 0 && n < 4096 ? TD_OK
                             : td_fail(d->err, TD_ERR_LIMIT, "path of %d bytes is too long", n);
}

static td_status write_file(struct directory *d, const char *name, const void *bytes, size_t n)
{
    char path[4096];
    struct td_new_file f = {.fd = -1};
    td_status s = path_in(d, d->partial, name, path);
    if (!s) s = td_new_file_create(&f, path, false, d->err);
    if (!s) s = td_new_file_write(&f, bytes, n, d->err);
    if (!s) s = td_new_file_commit(&f, d->err);
    td_new_file_abandon(&f);
    return s;
}

static td_status copy_files(struct directory *d)
{
    char path[4096], *bytes;
    size_t n;
    td_status s = TD_OK;
    for (size_t i = 0; i < N_COPIED && !s; i++) {
        if ((s = path_in(d, d->q->from, copied[i], path)) || access(path, F_OK) != 0) continue;
        if ((s = td_file_read(path, FILE_BYTES_MAX, &bytes, &n, d->err))) return s;
        s = write_file(d, copied[i], bytes, n);
        free(bytes);
    }
    return s;
}

static json_t *quantization_args(const char *type, int bits, int group, const char *strategy,
                                 bool is_dynamic)
{
    return json_pack("{s:i, s:s, s:b, s:s, s:b, s:o, s:n, s:n}", "num_bits", bits, "type", type,
                     "symmetric", 1, "strategy", strategy, "dynamic", (int)is_dynamic, "group_size",
                     group ? json_integer(group) : json_null(), "block_structure", "actorder");
}

/* What config.json says of the codes. */
static json_t *quantization_config(const struct directory *d)
{
    bool is_int4 = d->codes == TD_QUANTIZE_W4A16, is_int = is_int4 || d->codes == TD_QUANTIZE_W8A8;
    const char *type = is_int ? "int" : "float",
               *by = is_int4                              ? "group"
                     : d->codes == TD_QUANTIZE_FP8_TENSOR ? "tensor"
                                                          : "channel",
               *format = is_int4  ? "pack-quantized"
                         : is_int ? "int-quantized"
                                  : "float-quantized";
    return json_pack(
        "{s:s, s:s, s:s, s:[s], s:n, s:{s:{s:[s], s:o, s:o, s:n}}}", "quant_method",
        "compressed-tensors", "format", format, "quantization_status", "compressed", "ignore",
        "lm_head", "kv_cache_scheme", "config_groups", "group_0", "targets", "Linear", "weights",
        quantization_args(type, is_int4 ? 4 : 8, is_int4 ? d->group : 0, by, false),
        "input_activations", is_int4 ? json_null() : quantization_args(type, 8, 0, "token", true),
        "output_activations");
}

/* config.json of the source; of a model that takes images, too, that of its text model, whose
 * tensors alone are written. */
static td_status read_config(struct directory *d, json_t **ret)
{
    char path[4096];
    json_t *text = NULL;
    td_status s = path_in(d, d->q->from, "config.json", path);
    if (!s) s = td_json_load_file(path, (size_t)4 << 20, ret, d->err);
    if (s || (s = td_config_text_part(*ret, path, &text, d->err)) || !text) return s;
    json_decref(*ret);
    *ret = text;
    json_t *names = json_pack("[s]", td_families[d->q->config->arch]->class_name);
    return names && !json_object_set_new(text, "architectures", names)
               ? TD_OK
               : td_fail(d->err, TD_ERR_NOMEM, "config.json: no memory");
}

/* The same with a quantization_config. */
static td_status write_config(struct directory *d)
{
    json_t *root = NULL;
    td_status s = read_config(d, &root);
    if (s) {
        json_decref(root);
        return s;
    }
    json_t *quant = quantization_config(d);
    char *text = quant && !json_object_set_new(root, "quantization_config", quant)
                     ? json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER)
                     : NULL;
    s = text ? write_file(d, "config.json", text, strlen(text))
             : td_fail(d->err, TD_ERR_NOMEM, "config.json: no memory");
    free(text);
    json_decref(root);
    return s;
}

/* The header of model.safetensors: its length, then JSON, padded to a multiple of 8 bytes. */
static td_status write_header(struct directory *d)
{
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t at = 0, n;
    for (int32_t i = 0; i < d->n && root; i++) {
        const struct td_piece *p = &d->pieces[i];
        uint64_t end = at + (uint64_t)p->n_rows * td_piece_row_bytes(p);
        static const char *const types[] = {[TD_CODES_INT8] = "I8",
                                            [TD_CODES_FP8] = "F8_E4M3",
                                            [TD_CODES_INT4] = "I32",
                                            [TD_CODES_SHAPE] = "I64"};
        const char *dtype = p->codes ? types[p->codes] : p->format->name;
        bool one = p->from ? p->from->n_dims == 1 : p->n_rows == 1;
        int64_t n_cols = p->codes == TD_CODES_INT4 ? (p->n_cols + 7) / 8 : p->n_cols;
        json_t *shape = one ? json_pack("[I]", (json_int_t)n_cols)
                            : json_pack("[I, I]", (json_int_t)p->n_rows, (json_int_t)n_cols);
        json_object_set_new(root, p->name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", shape,
                                      "data_offsets", (json_int_t)at, (json_int_t)end));
        at = end;
    }
    d->q->ret_to_bytes = at;
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (!text) return td_fail(d->err, TD_ERR_NOMEM, "no memory for the header of safetensors");
    size_t length = strlen(text);
    n = (length + 7) / 8 * 8;
    td_status s = td_new_file_reserve(&d->file, 8 + n + at, d->err);
    if (!s) s = td_new_file_write(&d->file, &n, sizeof n, d->err);
    if (!s) s = td_new_file_write(&d->file, text, length, d->err);
    if (!s) s = td_new_file_write(&d->file, "       ", (size_t)n - length, d->err);
    free(text);
    return s;
}

static td_status append(void *ctx, const void *bytes, size_t n_bytes, struct td_err *err)
{
    return td_new_file_write(ctx, bytes, n_bytes, err);
}

static td_status write_tensors(struct directory *d)
{
    char path[4096];
    td_status s = path_in(d, d->partial, "model.safetensors", path);
    if (!s) s = td_new_file_create(&d->file, path, false, d->err);
    if (!s) s = write_header(d);
    if (!s) s = td_quantize_stream(d->q, d->pieces, d->n, append, &d->file, d->err);
    if (!s) s = td_new_file_commit(&d->file, d->err);
    td_new_file_abandon(&d->file);
    return s;
}

/* ---- names ----------------------------------------------------------------------------------- */

static const char *const made[] = {"model.safetensors", "config.json"};

/* Calls what(name) for each file that may be in the partial directory, config.json last. */
static td_status each_file(struct directory *d, const char *to,
                           td_status (*what)(struct directory *d, const char *from, const char *to))
{
    char from[4096], target[4096];
    td_status s = TD_OK;
    for (size_t i = 0; i < N_COPIED + 2 && !s; i++) {
        const char *name = i < N_COPIED ? copied[i] : made[i - N_COPIED];
        if (!(s = path_in(d, d->partial, name, from)) && !(s = path_in(d, to, name, target)))
            s = what(d, from, target);
    }
    return s;
}

static td_status move_file(struct directory *d, const char *from, const char *to)
{
    if (!rename(from, to) || errno == ENOENT) return TD_OK;
    return td_fail(d->err, TD_ERR_IO, "%s: rename: %s", to, strerror(errno));
}

static td_status remove_file(struct directory *d, const char *from, const char *to)
{
    (void)d, (void)to;
    unlink(from);
    return TD_OK;
}

static td_status give_name(struct directory *d, const char *to, bool may_replace)
{
    char config[4096];
    if (!rename(d->partial, to)) return TD_OK;
    if (!may_replace || (errno != ENOTEMPTY && errno != EEXIST))
        return td_fail(d->err, TD_ERR_IO, "%s: rename: %s", to, strerror(errno));
    td_status s = path_in(d, to, "config.json", config);
    if (s) return s;
    unlink(config);
    if ((s = each_file(d, to, move_file))) return s;
    rmdir(d->partial);
    return TD_OK;
}

static td_status write_all(struct directory *d, const char *to, bool may_replace)
{
    td_status s = plan(d);
    d->q->ret_from_bytes = 0;
    for (int32_t i = 0; i < d->n; i++)
        d->q->ret_from_bytes += d->pieces[i].from ? d->pieces[i].from->n_bytes : 0;
    if (s) return s;
    if (mkdir(d->partial, 0755))
        return td_fail(d->err, TD_ERR_IO, "%s: %s", d->partial, strerror(errno));
    if (!(s = write_tensors(d)) && !(s = copy_files(d)) && !(s = write_config(d)))
        s = give_name(d, to, may_replace);
    if (s) {
        each_file(d, to, remove_file);
        rmdir(d->partial);
    }
    return s;
}

td_status td_quantize_directory_takes(const struct td_quantize *q, struct td_err *err)
{
    if (q->checkpoint->gguf)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: a GGUF file: this format is made of a Hugging Face directory", q->from);
    if (q->config->experts.n)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: num_experts is %d: no mixture of experts is written in this format",
                       q->from, q->config->experts.n);
    struct td_layer_spec spec;
    td_model_config_layer(q->config, 0, &spec);
    for (size_t t = 0; t < TD_LAYER_TABLES && spec.tensors[t]; t++)
        for (const struct td_tensor_row *row = spec.tensors[t]; row->name; row++)
            if (row->cols != TD_DIM_NONE && td_tensor_is_wanted(q->config, row) &&
                !at_linear(row->name))
                return td_fail(err, TD_ERR_UNSUPPORTED,
                               "%s: a model with %s is not written in this format", q->from,
                               row->name);
    if (q->config->rope_neighbours || q->config->rotary_dim < q->config->head_dim)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: a model whose heads are rotated in part or by neighbours is not written "
            "in this format",
            q->from);
    return TD_OK;
}

td_status td_quantize_directory(struct td_quantize *q, enum td_quantize_codes codes, const char *to,
                                bool may_replace, struct td_err *err)
{
    struct directory d = {.q = q, .codes = codes, .file = {.fd = -1}, .err = err};
    td_status s = td_quantize_directory_takes(q, err);
    if (s) return s;
    int n = snprintf(d.partial, sizeof d.partial, "%s.partial-%d", to, (int)getpid());
    if (n < 0 || (size_t)n >= sizeof d.partial)
        return td_fail(err, TD_ERR_LIMIT, "path of %zu bytes is too long", strlen(to));
    s = write_all(&d, to, may_replace);
    for (int32_t i = 0; i < d.n; i++) free(d.pieces[i].row_scales);
    free(d.pieces);
    return s;
}
