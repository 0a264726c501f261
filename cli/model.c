/* model.c - `tandem model DIR`: what a model directory or GGUF file is, whether it runs here, and
 * what it takes. Tensors are checked as a worker checks them, and no weight is read, so it answers
 * at once. Exit status: 0, the model runs; 1, it does not, and the reason is told. */
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "common/base/gguf.h"
#include "common/base/say.h"
#include "common/model/family.h"
#include "common/model/mix.h"
#include "common/model/model.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "common/text/tool_calls.h"
#include "kernels/ops.h"

struct model_config {
    const char *dtype, *kv_dtype, *ops;
    uint64_t max_model_len;
    bool json;
};

#define OFF(f) offsetof(struct model_config, f)
// clang-format off
static const struct td_option options[] = {
    {"dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "compute type, as a worker's"},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", OFF(kv_dtype),
     "type of the KV cache, as a worker's"},
    {"ops", TD_OPT_STR, "", 0, 0, NULL, OFF(ops),
     "kernels of this CPU by name; empty: the fastest, measured"},
    {"max_model_len", TD_OPT_U64, "0", 0, INT32_MAX, NULL, OFF(max_model_len),
     "context in tokens; 0: the model's own"},
    {"json", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(json), "one JSON object, for machines"},
    {0},
};
// clang-format on

/* What is known of one model. A part that could not be read has its error instead. */
struct look {
    const char *path;
    struct td_model_config config;
    struct td_model *model; /* NULL: it does not run here */
    struct td_err why_not;
    bool has_config;
    struct td_tokenizer *tokenizer; /* NULL: tokenizer_error */
    struct td_err tokenizer_error;
    struct td_chat_template *chat; /* NULL: chat_error */
    struct td_err chat_error;
    json_t *fields[TD_CONFIG_USES]; /* names, by enum td_config_use; NULL elements: no memory */
};

static void add_field(void *ctx, const char *name, enum td_config_use use)
{
    struct look *k = ctx;
    json_array_append_new(k->fields[use], json_string(name));
}

static void look_close(struct look *k)
{
    td_model_close(k->model);
    td_tokenizer_free(k->tokenizer);
    td_chat_template_free(k->chat);
    for (int i = 0; i < TD_CONFIG_USES; i++) json_decref(k->fields[i]);
}

static void look_at(struct look *k, const struct model_config *c)
{
    const struct td_ops *ops = NULL;
    td_status s = td_model_config_load(k->path, &k->config, &k->why_not);
    k->has_config = !s;
    for (int i = 0; i < TD_CONFIG_USES; i++) k->fields[i] = json_array();
    if (!s) s = td_model_config_fields(k->path, add_field, k, &k->why_not);
    if (!s && c->ops[0] && !(ops = td_ops_by_name(c->ops)))
        s = td_fail(&k->why_not, TD_ERR_INVALID, "ops \"%s\" is unknown or this CPU lacks it",
                    c->ops);
    if (!s) {
        struct td_model_params p = {.dir = k->path,
                                    .dtype = c->dtype,
                                    .kv_dtype = c->kv_dtype,
                                    .ops = ops,
                                    .max_model_len = (int32_t)c->max_model_len,
                                    .quiet = true,
                                    .only_look = true};
        (void)td_model_open(&p, &k->model, &k->why_not); /* model stays NULL, why_not says why */
    }
    (void)td_tokenizer_load(k->path, &k->tokenizer, &k->tokenizer_error);
    (void)td_chat_template_load(k->path, &k->chat, &k->chat_error);
}

/* Bytes of the KV of one token, over all layers; 0: this type cannot be had. */
static uint64_t kv_bytes(const struct look *k, enum td_dtype type)
{
    enum { BLOCK = 16 }; /* codes are padded to 64 bytes in each block of this many tokens */
    struct td_kv_layout layout;
    struct td_err err;
    if (td_model_kv_layout(k->model, BLOCK, &layout, &err)) return 0;
    layout.dtype = type;
    return td_kv_layout_init(&layout, &err) ? 0 : layout.block_bytes / BLOCK;
}

/* Of those, what layers take that read no more than a window of tokens back. They are kept and sent
 * like the others (common/kv/README.md). */
static uint64_t kv_bytes_in_windows(const struct look *k, uint64_t kv_bytes_a_token)
{
    const struct td_model_config *c = &k->config;
    struct td_layer_spec spec;
    uint64_t n = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        td_model_config_layer(c, i, &spec);
        n += spec.window > 0;
    }
    return kv_bytes_a_token / (uint64_t)c->n_layers * n;
}

/* ---- for people ------------------------------------------------------------------------------ */

enum { LABEL_WIDTH = 13, LINE_WIDTH = 80 };

/* Prints `label` and then words, wrapped below each other. */
static void print_words(const char *label, const char *words)
{
    int columns = (int)td_terminal_columns(stdout);
    int width = columns && columns < LINE_WIDTH ? columns : LINE_WIDTH;
    int at = printf("  %-*s", LABEL_WIDTH - 2, label);
    for (const char *p = words; *p;) {
        int n = (int)strcspn(p, " ");
        if (at > LABEL_WIDTH && at + 1 + n > width) at = printf("\n%*s", LABEL_WIDTH, "") - 1;
        at += printf("%s%.*s", at > LABEL_WIDTH ? " " : "", n, p);
        p += n;
        while (*p == ' ') p++;
    }
    putchar('\n');
}

__attribute__((format(printf, 2, 3))) static void print_row(const char *label, const char *format,
                                                            ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* a file's words may be commands for a terminal */
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F) *p = '?';
    print_words(label, text);
}

static void print_names(const char *label, const json_t *names)
{
    char text[8192] = "";
    size_t i, n = 0;
    json_t *name;
    json_array_foreach(names, i, name)
    {
        if (n >= sizeof text) break;
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%.64s", i ? ", " : "",
                              json_string_value(name));
    }
    if (json_array_size(names)) print_words(label, text);
}

/* "2.6 M", "1.1 B" */
static struct td_size_text count_text(int64_t n)
{
    struct td_size_text t;
    double v = (double)n;
    const char *unit = v >= 1e9 ? "B" : "M";
    snprintf(t.s, sizeof t.s, "%.*f %s", v >= 1e10 || (v < 1e9 && v >= 1e7) ? 0 : 1,
             v / (v >= 1e9 ? 1e9 : 1e6), unit);
    return t;
}

static void print_layers(const struct td_model_config *c)
{
    struct td_layer_spec spec;
    int32_t n_windowed = 0, window = 0, n_experts = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        td_model_config_layer(c, i, &spec);
        n_windowed += spec.window > 0;
        if (spec.window > 0) window = spec.window;
        n_experts += spec.expert_tensors != NULL;
    }
    if (c->latent.kv_rank)
        print_row("layers", "%d of %d values; latent attention of %d heads, rank %d + %d rotated",
                  c->n_layers, c->hidden, c->n_heads, c->latent.kv_rank, c->latent.rope);
    else
        print_row("layers", "%d of %d values; %d heads of %d, %d of K and V", c->n_layers,
                  c->hidden, c->n_heads, c->head_dim, c->n_kv_heads);
    if (n_windowed)
        print_row("window", "%d tokens in %d of %d layers", window, n_windowed, c->n_layers);
    if (n_experts)
        print_row("experts", "%d in %d of %d layers, %d for each token%s", c->experts.n, n_experts,
                  c->n_layers, c->experts.n_used, c->experts.shared ? ", and shared ones" : "");
    int64_t n = td_model_config_n_params(c), active = td_model_config_n_active_params(c);
    if (active < n)
        print_row("parameters", "%s, of which a token uses %s", count_text(n).s,
                  count_text(active).s);
    else
        print_row("parameters", "%s", count_text(n).s);
}

static void print_memory(const struct look *k)
{
    static const enum td_dtype types[] = {TD_BF16, TD_INT8, TD_FP8};
    const struct td_model *m = k->model;
    struct td_expert_memory experts;
    enum td_dtype own = td_model_kv_dtype(m);
    uint64_t each = kv_bytes(k, own);
    char others[128] = "";
    size_t n = 0;
    print_row("memory", "%s for weights; a decode step of one sequence reads %s",
              td_size_text(td_model_memory_bytes(m)).s, td_size_text(td_model_weight_bytes(m)).s);
    td_model_expert_memory(m, &experts);
    if (experts.n)
        print_row("",
                  "%s of the weights are %" PRIu64 " experts, of which --experts lazy packs "
                  "only those that are chosen",
                  td_size_text(experts.bytes).s, experts.n);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        uint64_t bytes = types[i] == own ? 0 : kv_bytes(k, types[i]);
        if (bytes)
            n += (size_t)snprintf(others + n, sizeof others - n, "%s %s %" PRIu64, n ? "," : ";",
                                  td_dtype_name(types[i]), bytes);
    }
    print_row("KV cache", "%" PRIu64 " bytes a token in %s%s", each, td_dtype_name(own), others);
    if (kv_bytes_in_windows(k, each))
        print_row("", "%" PRIu64 " of those are of layers with a window, kept and sent whole",
                  kv_bytes_in_windows(k, each));
    print_row("context", "%d tokens, whose KV is %s", td_model_max_len(m),
              td_size_text(each * (uint64_t)td_model_max_len(m)).s);
}

static void print_text_parts(const struct look *k)
{
    if (k->tokenizer)
        print_row("tokenizer", "%d tokens, from %s", td_tokenizer_vocab(k->tokenizer),
                  td_tokenizer_file(k->tokenizer));
    else
        print_row("tokenizer", "none that can be used: %s", k->tokenizer_error.msg);
    if (!k->chat) {
        print_row("chat", "none that can be used: %s", k->chat_error.msg);
        return;
    }
    const char *family = td_chat_template_family(k->chat);
    struct td_output_format tools = td_chat_template_output(k->chat, true),
                            plain = td_chat_template_output(k->chat, false);
    if (!strcmp(family, "none")) {
        print_row("chat", "no template: prompts are completed, chats are refused");
        return;
    }
    print_row("chat", "template of kind %s; tool calls: %s; reasoning is %s", family,
              tools.calls == TD_CALLS_NONE ? "not told apart" : td_call_format_name(tools.calls),
              plain.reasoning ? "split off" : "not told apart");
}

static void print_look(const struct look *k)
{
    const struct td_model_config *c = &k->config;
    printf("%s\n", k->path);
    if (k->has_config) {
        const struct td_family *family = td_families[c->arch];
        print_row("family", "%s (%s), as are %s", family->model_type, family->class_name,
                  family->models);
        print_row("stored as", "%s%s%s", td_gguf_is_file(k->path) ? "GGUF" : "safetensors",
                  c->quant[0].scheme ? ", quantised by " : "",
                  c->quant[0].scheme ? c->quant[0].name : "");
        if (c->has_images)
            print_row("images", "the checkpoint takes them; its text model alone is served");
    }
    if (k->model)
        print_row("runs", "yes, in %s, with kernels %s", td_dtype_name(td_model_dtype(k->model)),
                  td_model_kernels(k->model));
    else
        print_row("runs", "NO: %s", k->why_not.msg);
    if (k->has_config) print_layers(c);
    if (k->model) print_memory(k);
    if (k->has_config || k->tokenizer) print_text_parts(k);
    print_names("honoured", k->fields[TD_CONFIG_HONOURED]);
    print_names("switched off", k->fields[TD_CONFIG_OFF]);
    print_names("no effect", k->fields[TD_CONFIG_WITHOUT_EFFECT]);
    print_names("of images", k->fields[TD_CONFIG_OF_IMAGES]);
}

/* ---- for machines ---------------------------------------------------------------------------- */

static void set(json_t *root, const char *key, json_t *value)
{
    if (value) (void)json_object_set_new(root, key, value);
}

static int print_json(const struct look *k)
{
    static const char *const uses[TD_CONFIG_USES] = {[TD_CONFIG_HONOURED] = "honoured",
                                                     [TD_CONFIG_WITHOUT_EFFECT] = "without_effect",
                                                     [TD_CONFIG_OF_IMAGES] = "of_images",
                                                     [TD_CONFIG_OFF] = "switched_off"};
    const struct td_model_config *c = &k->config;
    json_t *root = json_object();
    set(root, "path", json_string(k->path));
    set(root, "runs", json_boolean(k->model != NULL));
    if (!k->model) {
        json_t *why = json_string(k->why_not.msg);
        set(root, "reason", why ? why : json_string("(a text that is not UTF-8)"));
    }
    if (k->has_config) {
        set(root, "family", json_string(td_families[c->arch]->model_type));
        set(root, "quantization", json_string(c->quant[0].scheme ? c->quant[0].name : "none"));
        set(root, "n_layers", json_integer(c->n_layers));
        set(root, "n_experts", json_integer(c->experts.n));
        set(root, "n_parameters", json_integer(td_model_config_n_params(c)));
        set(root, "n_active_parameters", json_integer(td_model_config_n_active_params(c)));
        for (int i = 0; i < TD_CONFIG_USES; i++) set(root, uses[i], json_incref(k->fields[i]));
    }
    if (k->model) {
        enum td_dtype own = td_model_kv_dtype(k->model);
        set(root, "dtype", json_string(td_dtype_name(td_model_dtype(k->model))));
        set(root, "kv_dtype", json_string(td_dtype_name(own)));
        set(root, "kernels", json_string(td_model_kernels(k->model)));
        set(root, "max_model_len", json_integer(td_model_max_len(k->model)));
        struct td_expert_memory experts;
        td_model_expert_memory(k->model, &experts);
        set(root, "memory_bytes", json_integer((json_int_t)td_model_memory_bytes(k->model)));
        set(root, "expert_bytes", json_integer((json_int_t)experts.bytes));
        set(root, "weight_bytes_a_step", json_integer((json_int_t)td_model_weight_bytes(k->model)));
        uint64_t each = kv_bytes(k, own);
        set(root, "kv_bytes_a_token", json_integer((json_int_t)each));
        set(root, "kv_bytes_a_token_in_windows",
            json_integer((json_int_t)kv_bytes_in_windows(k, each)));
    }
    if (k->tokenizer) set(root, "vocab", json_integer(td_tokenizer_vocab(k->tokenizer)));
    if (k->chat) set(root, "chat_template", json_string(td_chat_template_family(k->chat)));
    int failed = json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
    return failed;
}

int cli_model(int argc, char **argv)
{
    struct model_config c = {0};
    struct td_err err = {0};
    struct look look = {0};
    size_t n = 0;
    td_status s = td_options_load(options, &c, "tandem model",
                                  "What a model directory or GGUF file is, whether it runs here, "
                                  "and what it takes: tandem model [options] DIR",
                                  argc, argv, &look.path, 1, &n, &err);
    if (!s && n == 0)
        s = td_fail(&err, TD_ERR_INVALID, "DIR, a model directory or GGUF file, is missing");
    if (s) return td_die("tandem model", &err);
    look_at(&look, &c);
    int failed = 0;
    if (c.json)
        failed = print_json(&look);
    else
        print_look(&look);
    int status = failed || !look.model;
    look_close(&look);
    return status;
}
