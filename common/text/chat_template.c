/* chat_template.c - finds a model's template, recognises its family, and renders it or says why
 * not.
 *
 * Recognition has two steps. The family comes from marks that its templates share (the strings
 * around a turn): the first row of the table whose marks all occur names it. Then the template must
 * be understood as a whole: jinja.h parses it and, for each chat, follows the path that the chat
 * takes through it. So variants of a family (a default system message, a trim, a date, an order of
 * roles that raises) are rendered as that very template has them. A template without a known mark,
 * or with a construct that is not understood, is refused: TD_ERR_UNSUPPORTED.
 *
 * A template that silently leaves out a message is refused too. Some old ones have no place for a
 * system message, many none for tools; a chat that loses its instructions is a wrong prompt even
 * where transformers renders it. So the text of system, user and tool messages, and the names of
 * tools and of functions called, must occur in the result. The text of a tool message may occur as
 * a JSON string (Llama 3 writes it so).
 *
 * The date. strftime_now() returns 26 July 2024 unless td_chat_template_set_date() says otherwise:
 * the date that the Llama 3 templates fall back to. A prompt must not depend on the day (same
 * request, same tokens; cached prefixes stay valid over midnight). */
#include "common/text/chat_template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/gguf.h"
#include "common/base/gguf_write.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/text/jinja.h"

#define CONFIG_MAX_BYTES ((size_t)64 << 20)
#define SEARCH_BASE_BYTES (1ull << 20)
/* passes over the text at most; one suffices when all messages come in order */
#define SEARCH_TIMES 64
#define FALLBACK_DATE_UNIX_S 1721952000 /* 26 July 2024, 00:00 UTC */

struct td_chat_template {
    const char *family;
    struct td_jinja *jinja;      /* NULL when there is no template, or it is refused */
    struct td_err refused;       /* why, when jinja is NULL */
    char *bos_token, *eos_token; /* NULL = the tokenizer has none */
    int64_t date_unix_s;
    size_t max_bytes;
    bool knows_developer, knows_tool_role, knows_tools, knows_tool_calls; /* its source does */
    struct td_output_format output;
    struct td_chat_template *for_tools; /* in place of this one for chats with tools; NULL: none */
};

/* Every mark must occur. Earlier rows are more specific. */
static const struct {
    const char *family;
    const char *marks[3];
} families[] = {
    {"llama-2", {"[INST]", "<<SYS>>"}},
    {"mistral-v7", {"[SYSTEM_PROMPT]"}},
    {"mistral-v3-tekken", {"\"[INST]\" +"}},
    {"mistral-v3-tekken", {"'[INST]' +"}},
    {"mistral-v3", {"[AVAILABLE_TOOLS]"}},
    {"mistral-v3", {"[INST]", "[/INST]\""}},
    {"mistral-v1", {"[INST]"}},
    {"phi-4", {"<|im_start|>", "<|im_sep|>"}},
    {"qwen3", {"<|im_start|>", "<think>", "</think>"}},
    {"qwen2.5", {"<|im_start|>", "You are Qwen"}},
    {"chatml", {"<|im_start|>", "<|im_end|>"}},
    {"llama-3", {"<|start_header_id|>", "<|end_header_id|>"}},
    {"gemma", {"<start_of_turn>", "<end_of_turn>"}},
    {"deepseek-r1",
     {"<\xef\xbd\x9cUser\xef\xbd\x9c>", "<\xef\xbd\x9c"
                                        "Assistant\xef\xbd\x9c>"}},
    {"deepseek-coder", {"### Instruction:", "<|EOT|>"}},
    {"deepseek-v2", {"'User: '", "'Assistant: '"}},
    {"granite", {"<|start_of_role|>", "<|end_of_role|>"}},
    {"command-r", {"<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"}},
    {"seed-oss", {"<seed:bos>"}},
    {"megrez", {"<|role_start|>", "<|role_end|>"}},
    {"openchat", {"GPT4 Correct "}},
    {"chatglm-4", {"[gMASK]<sop>"}},
    {"chatglm-3", {"[gMASK]sop"}},
    {"phi-3", {"<|assistant|>", "<|end|>"}},
    {"zephyr", {"<|assistant|>", "<|user|>", "eos_token"}},
    {"glm-edge", {"<|assistant|>", "<|user|>"}},
    {"orion", {"'Human: '", "Assistant: "}},
    {"vicuna", {"USER: ", "ASSISTANT:"}},
    {"minicpm", {"<\xe7\x94\xa8\xe6\x88\xb7>", "<AI>"}},
    {"ling", {"<role>", "HUMAN"}},
    {"monarch", {"bos_token + message['role'] + '\\n'", "eos_token + '\\n'"}},
    {"exaone", {"[|assistant|]", "[|endofturn|]"}},
    {"kimi", {"<|im_user|>", "<|im_middle|>"}},
    {"laguna", {"<assistant>", "</assistant>", "<user>"}},
    {"kimi-k3", {"<|open|>", "<|end_of_msg|>"}},
    {"gigachat", {"<|role_sep|>", "<|message_sep|>"}},
    {"minimax", {"]~b]"}},
    {"minimax", {"<beginning_of_sentence>", "<end_of_sentence>"}},
    {"gpt-oss", {"<|start|>", "<|message|>"}},
    {"apriel", {"<|begin_user|>", "<|begin_assistant|>"}},
    {"nemotron", {"<SPECIAL_11>"}},
    {"gemma-4", {"<|turn>", "<turn|>"}},
    {"solar-open", {"<|begin|>", "<|content|>"}},
    {"apertus", {"<|user_start|>", "<|assistant_start|>"}},
    {"reka", {"<sep>", "human: "}},
    {"yandexgpt",
     {"[SEP]", "\xd0\x90\xd1\x81\xd1\x81\xd0\xb8\xd1\x81\xd1\x82\xd0\xb5\xd0\xbd\xd1\x82:"}},
};

static bool has(const char *text, size_t n, const char *mark)
{
    return memmem(text, n, mark, strlen(mark)) != NULL;
}

static const char *find_family(const char *text, size_t n)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        bool all = true;
        for (size_t k = 0; k < 3 && families[i].marks[k] != NULL; k++)
            all = all && has(text, n, families[i].marks[k]);
        if (all) return families[i].family;
    }
    return "unknown";
}

void td_chat_template_free(struct td_chat_template *t)
{
    if (t == NULL) return;
    td_chat_template_free(t->for_tools);
    td_jinja_free(t->jinja);
    free(t->bos_token);
    free(t->eos_token);
    free(t);
}

const char *td_chat_template_family(const struct td_chat_template *t) { return t->family; }

struct td_output_format td_chat_template_output(const struct td_chat_template *t, bool with_tools)
{
    return with_tools && t->for_tools != NULL ? t->for_tools->output : t->output;
}

void td_chat_template_set_max_bytes(struct td_chat_template *t, size_t n_bytes)
{
    t->max_bytes = n_bytes;
    if (t->for_tools != NULL) t->for_tools->max_bytes = n_bytes;
}

void td_chat_template_set_date(struct td_chat_template *t, int64_t unix_s)
{
    t->date_unix_s = unix_s;
    if (t->for_tools != NULL) t->for_tools->date_unix_s = unix_s;
}

/* jinja NULL: no template */
td_status td_chat_template_parse(const char *jinja, size_t n_bytes, const char *bos_token,
                                 const char *eos_token, struct td_chat_template **ret_template,
                                 struct td_err *err)
{
    struct td_chat_template *t = calloc(1, sizeof *t);
    if (t == NULL) return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    t->date_unix_s = FALLBACK_DATE_UNIX_S;
    if ((bos_token != NULL && (t->bos_token = strdup(bos_token)) == NULL) ||
        (eos_token != NULL && (t->eos_token = strdup(eos_token)) == NULL)) {
        td_chat_template_free(t);
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    }
    if (jinja == NULL) {
        t->family = "none";
        td_fail(&t->refused, TD_ERR_UNSUPPORTED,
                "the model has no chat template: send a prompt instead of messages");
    } else {
        t->family = find_family(jinja, n_bytes);
        t->output = td_output_format_find(jinja, n_bytes);
        t->knows_developer = has(jinja, n_bytes, "developer");
        t->knows_tools = has(jinja, n_bytes, "tools");
        t->knows_tool_calls = has(jinja, n_bytes, "tool_calls");
        t->knows_tool_role = has(jinja, n_bytes, "'tool'") || has(jinja, n_bytes, "\"tool\"");
        if (strcmp(t->family, "unknown") == 0)
            td_fail(&t->refused, TD_ERR_UNSUPPORTED,
                    "the model's chat template is of no family that is known here: send a prompt "
                    "instead of messages");
        else if (td_jinja_parse(jinja, n_bytes, &t->jinja, &t->refused) == TD_ERR_NOMEM) {
            td_chat_template_free(t);
            return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
        }
    }
    *ret_template = t;
    return TD_OK;
}

/* A special token in tokenizer_config.json is a string, an object with "content", or absent. */
static td_status read_token(const json_t *config, const char *what, const char *key,
                            const char **ret, struct td_err *err)
{
    const json_t *v = json_object_get(config, key);
    *ret = NULL;
    if (json_is_object(v)) return td_json_str(v, what, "content", ret, NULL, err);
    return td_json_str(config, what, key, ret, NULL, err);
}

/* "chat_template" is a string, or a list of {"name", "template"} in which "default" is the one for
 * plain chats and "tool_use" the one for chats with tools. *ret NULL: there is none of that
 * name. */
static td_status read_template(const json_t *config, const char *what, const char *wanted,
                               const char **ret, struct td_err *err)
{
    const json_t *v = json_object_get(config, "chat_template");
    *ret = NULL;
    if (!json_is_array(v) && strcmp(wanted, "default") != 0) return TD_OK;
    if (!json_is_array(v)) return td_json_str(config, what, "chat_template", ret, NULL, err);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *entry = json_array_get(v, i);
        const char *name = NULL;
        if (!json_is_object(entry))
            return td_fail(err, TD_ERR_INVALID, "%s: chat_template[%zu] is no object", what, i);
        td_status st = td_json_str(entry, what, "name", &name, NULL, err);
        if (st != TD_OK) return st;
        if (name != NULL && strcmp(name, wanted) == 0)
            return td_json_str(entry, what, "template", ret, NULL, err);
    }
    return TD_OK;
}

/* The text of the token that `key` names, malloc'd; NULL when there is none. */
static td_status gguf_token(const struct td_gguf *g, const char *key, char **ret,
                            struct td_err *err)
{
    const struct td_gguf_value *tokens;
    int64_t id = -1;
    *ret = NULL;
    td_status st = td_gguf_array(g, "tokenizer.ggml.tokens", TD_GGUF_STRING, &tokens, err);
    if (st == TD_OK && tokens) st = td_gguf_i64(g, key, -1, (int64_t)tokens->n - 1, &id, NULL, err);
    if (st != TD_OK || !tokens || id < 0) return st;
    const uint8_t *at = NULL;
    struct td_gguf_text text = {0};
    for (int64_t i = 0; i <= id; i++) text = td_gguf_next(tokens, &at);
    *ret = strndup(text.bytes, text.n);
    return *ret ? TD_OK : td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
}

static td_status load_gguf(const struct td_gguf *g, struct td_chat_template **ret_template,
                           struct td_err *err)
{
    struct td_gguf_text plain, tools;
    char *bos = NULL, *eos = NULL;
    struct td_chat_template *t = NULL;
    td_status st = td_gguf_str(g, "tokenizer.chat_template", &plain, err);
    if (st == TD_OK) st = td_gguf_str(g, "tokenizer.chat_template.tool_use", &tools, err);
    if (st == TD_OK) st = gguf_token(g, "tokenizer.ggml.bos_token_id", &bos, err);
    if (st == TD_OK) st = gguf_token(g, "tokenizer.ggml.eos_token_id", &eos, err);
    if (st == TD_OK) st = td_chat_template_parse(plain.bytes, plain.n, bos, eos, &t, err);
    if (st == TD_OK && tools.bytes)
        st = td_chat_template_parse(tools.bytes, tools.n, bos, eos, &t->for_tools, err);
    free(bos);
    free(eos);
    if (st != TD_OK)
        td_chat_template_free(t);
    else
        *ret_template = t;
    return st;
}

/* What a directory says of templates; texts are borrowed from config or file. */
struct sources {
    json_t *config;
    char *file;
    const char *jinja, *for_tools, *bos, *eos; /* NULL: none */
    size_t n_bytes;                            /* of jinja */
};

static void free_sources(struct sources *f)
{
    free(f->file);
    json_decref(f->config);
}

static td_status read_sources(const char *dir, struct sources *f, struct td_err *err)
{
    char path[4096];
    struct stat sb;
    td_status st = TD_OK;
    if (snprintf(path, sizeof path, "%s/tokenizer_config.json", dir) >= (int)sizeof path)
        return td_fail(err, TD_ERR_LIMIT, "the model directory's name is longer than %zu bytes",
                       sizeof path);
    if (stat(path, &sb) == 0) {
        st = td_json_load_file(path, CONFIG_MAX_BYTES, &f->config, err);
        if (st == TD_OK && !json_is_object(f->config))
            st = td_fail(err, TD_ERR_INVALID, "%s: no JSON object", path);
        if (st == TD_OK) st = read_token(f->config, path, "bos_token", &f->bos, err);
        if (st == TD_OK) st = read_token(f->config, path, "eos_token", &f->eos, err);
        if (st == TD_OK) st = read_template(f->config, path, "default", &f->jinja, err);
        if (st == TD_OK) st = read_template(f->config, path, "tool_use", &f->for_tools, err);
        if (st != TD_OK) return st;
        f->n_bytes = f->jinja != NULL ? strlen(f->jinja) : 0;
    }
    if (snprintf(path, sizeof path, "%s/chat_template.jinja", dir) >= (int)sizeof path)
        return td_fail(err, TD_ERR_LIMIT, "the model directory's name is longer than %zu bytes",
                       sizeof path);
    if (stat(path, &sb) != 0) return TD_OK;
    st = td_file_read(path, TD_JINJA_MAX_SOURCE, &f->file, &f->n_bytes, err);
    f->jinja = f->file;
    f->for_tools = NULL;
    return st;
}

td_status td_chat_template_load(const char *dir, struct td_chat_template **ret_template,
                                struct td_err *err)
{
    if (td_gguf_is_file(dir)) {
        struct td_gguf *g = NULL;
        td_status opened = td_gguf_open(dir, &g, err);
        if (opened != TD_OK) return opened;
        td_status loaded = load_gguf(g, ret_template, err);
        td_gguf_close(g);
        return loaded != TD_OK && err ? td_err_prefix(err, "%s", dir) : loaded;
    }
    struct sources f = {0};
    struct td_chat_template *t = NULL, *with = NULL;
    td_status st = read_sources(dir, &f, err);
    if (st == TD_OK) st = td_chat_template_parse(f.jinja, f.n_bytes, f.bos, f.eos, &t, err);
    if (st == TD_OK && f.for_tools != NULL)
        st = td_chat_template_parse(f.for_tools, strlen(f.for_tools), f.bos, f.eos, &with, err);
    free_sources(&f);
    if (st != TD_OK) {
        td_chat_template_free(t);
        return st;
    }
    t->for_tools = with;
    *ret_template = t;
    return TD_OK;
}

static void put_named(struct td_gguf_writer *w, const char *key, const char *text, size_t n_bytes)
{
    if (text != NULL) td_gguf_put_text(w, key, text, n_bytes);
}

td_status td_chat_template_put_gguf(const char *dir, struct td_gguf_writer *w, struct td_err *err)
{
    static const struct td_gguf_text names[] = {{"tool_use", 8}};
    struct sources f = {0};
    td_status st = read_sources(dir, &f, err);
    if (st == TD_OK) {
        put_named(w, "tokenizer.chat_template", f.jinja, f.n_bytes);
        if (f.for_tools != NULL) {
            td_gguf_put_texts(w, "tokenizer.chat_templates", names, 1);
            put_named(w, "tokenizer.chat_template.tool_use", f.for_tools, strlen(f.for_tools));
        }
    }
    free_sources(&f);
    return st;
}

/* ---- what the result must contain ------------------------------------------------------------ */

enum part { USER, SYSTEM, TOOL, TOOL_NAME, CALL_NAME, N_PARTS };

/* The state of the search for the parts in a text. A template writes the parts of one kind in
 * order, wherever it puts those of other kinds. So each part is looked for behind the one before
 * it, and again from the start only when it is not there: one pass for each kind. bytes_left bounds
 * what is read. */
struct search {
    const char *text;
    size_t n, at[N_PARTS];
    uint64_t bytes_left;
};

/* TD_ERR_NOT_FOUND; TD_ERR_LIMIT: the budget is used up. */
static td_status find_in_order(struct search *f, enum part kind, const char *part, size_t n_part)
{
    size_t *at = &f->at[kind];
    td_jinja_strip(&part, &n_part); /* many templates do */
    if (n_part == 0) return TD_OK;
    for (int again = 0; again < 2; again++) {
        size_t from = again ? 0 : *at;
        const char *hit = memmem(f->text + from, f->n - from, part, n_part);
        uint64_t cost = hit != NULL ? (size_t)(hit - f->text) - from + n_part : f->n - from;
        if (hit != NULL) *at = (size_t)(hit - f->text) + n_part;
        if (cost > f->bytes_left) return TD_ERR_LIMIT;
        f->bytes_left -= cost;
        if (hit != NULL) return TD_OK;
    }
    return TD_ERR_NOT_FOUND;
}

/* As a JSON string, without its quotation marks. */
static td_status find_as_json(struct search *f, const char *part, size_t n_part)
{
    json_t *string = json_stringn(part, n_part); /* NULL: no UTF-8, or no memory */
    char *text = string != NULL ? json_dumps(string, JSON_ENCODE_ANY) : NULL;
    td_status st = text != NULL && strlen(text) >= 2
                       ? find_in_order(f, TOOL, text + 1, strlen(text) - 2)
                       : TD_ERR_NOT_FOUND;
    free(text);
    json_decref(string);
    return st;
}

static td_status left_out(const struct td_chat_template *t, td_status st, size_t n_text,
                          const char *where, size_t index, const char *what, struct td_err *err)
{
    if (st == TD_ERR_LIMIT)
        return td_fail(err, st,
                       "%s[%zu]: the model's chat template (%s) moves so many messages that "
                       "looking for each reads more than %llu bytes",
                       where, index, t->family,
                       SEARCH_BASE_BYTES + SEARCH_TIMES * (unsigned long long)n_text);
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s[%zu]: the model's chat template (%s) leaves out %s",
                   where, index, t->family, what);
}

/* "name" of a definition, or of its "function"; NULL: it has none, and what the template makes of
 * it is the template's. Borrowed from *ret_json. */
static const char *tool_name(struct td_chat_json tool, json_t **ret_json)
{
    *ret_json = json_loadb(tool.text, tool.bytes, JSON_ALLOW_NUL, NULL);
    const json_t *function = json_object_get(*ret_json, "function");
    return json_string_value(json_object_get(function != NULL ? function : *ret_json, "name"));
}

static td_status check_result(const struct td_chat_template *t, const struct td_chat *chat,
                              const char *text, size_t n, struct td_err *err)
{
    struct search f = {
        .text = text, .n = n, .bytes_left = SEARCH_BASE_BYTES + SEARCH_TIMES * (uint64_t)n};
    char what[48];

    for (size_t i = 0; i < chat->n_messages; i++) {
        const struct td_chat_message *m = &chat->messages[i];
        td_status st = TD_OK;
        if (strcmp(m->role, "tool") == 0) {
            st = find_in_order(&f, TOOL, m->content, m->content_bytes);
            if (st == TD_ERR_NOT_FOUND) st = find_as_json(&f, m->content, m->content_bytes);
        } else if (strcmp(m->role, "assistant") != 0) {
            st = find_in_order(&f, strcmp(m->role, "user") == 0 ? USER : SYSTEM, m->content,
                               m->content_bytes);
        }
        snprintf(what, sizeof what, "this %s message", m->role);
        if (st != TD_OK) return left_out(t, st, n, "messages", i, what, err);
        for (size_t k = 0; k < m->n_tool_calls; k++) {
            st = find_in_order(&f, CALL_NAME, m->tool_calls[k].name, strlen(m->tool_calls[k].name));
            if (st != TD_OK) return left_out(t, st, n, "messages", i, "its tool_calls", err);
        }
    }
    for (size_t i = 0; i < chat->n_tools; i++) {
        json_t *json = NULL;
        const char *name = tool_name(chat->tools[i], &json);
        td_status st = name != NULL ? find_in_order(&f, TOOL_NAME, name, strlen(name)) : TD_OK;
        json_decref(json);
        if (st != TD_OK) return left_out(t, st, n, "tools", i, "this tool", err);
    }
    return TD_OK;
}

/* ---- rendering ------------------------------------------------------------------------------- */

/* The chat as the template sees it: parts joined, the role developer replaced where it is not
 * known. What was copied for that is the list and its joined texts. */
struct view {
    struct td_chat_message *messages; /* malloc'd */
    char **joined;                    /* of each message, NULL or malloc'd */
    size_t n;
};

static void view_free(struct view *v)
{
    for (size_t i = 0; v->joined != NULL && i < v->n; i++) free(v->joined[i]);
    free(v->joined);
    free(v->messages);
}

static td_status join_parts(struct view *v, size_t i, struct td_err *err)
{
    struct td_chat_message *m = &v->messages[i];
    size_t n = 0;

    if (m->n_parts > TD_CHAT_MAX_PARTS)
        return td_fail(err, TD_ERR_LIMIT, "messages[%zu].content has %zu parts, must be <= %d", i,
                       m->n_parts, TD_CHAT_MAX_PARTS);
    for (size_t k = 0; k < m->n_parts; k++) {
        if (strcmp(m->parts[k].type, "text") != 0)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "messages[%zu].content[%zu].type is \"%.40s\", must be text", i, k,
                           m->parts[k].type);
        n += m->parts[k].text_bytes + 1;
    }
    char *out = v->joined[i] = malloc(n);
    if (out == NULL) return td_fail(err, TD_ERR_NOMEM, "chat template: no memory for %zu bytes", n);
    for (size_t k = 0; k < m->n_parts; k++) {
        if (k > 0) *out++ = '\n';
        if (m->parts[k].text_bytes > 0) memcpy(out, m->parts[k].text, m->parts[k].text_bytes);
        out += m->parts[k].text_bytes;
    }
    m->content = v->joined[i];
    m->content_bytes = n - 1;
    m->parts = NULL;
    m->n_parts = 0;
    return TD_OK;
}

static td_status check_message(const struct td_chat_template *t, struct view *v, size_t i,
                               struct td_err *err)
{
    struct td_chat_message *m = &v->messages[i];
    bool tool = strcmp(m->role, "tool") == 0, assistant = strcmp(m->role, "assistant") == 0;

    if (strcmp(m->role, "developer") == 0) {
        if (!t->knows_developer) m->role = "system";
    } else if (!tool && !assistant && strcmp(m->role, "system") != 0 &&
               strcmp(m->role, "user") != 0) {
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "messages[%zu].role is \"%.40s\", must be system, developer, user, "
                       "assistant or tool",
                       i, m->role);
    }
    if (tool && !t->knows_tool_role)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "messages[%zu].role is \"tool\", which the model's chat template (%s) does "
                       "not have",
                       i, t->family);
    if (m->n_tool_calls > 0 && !assistant)
        return td_fail(err, TD_ERR_INVALID,
                       "messages[%zu] has tool_calls and the role \"%s\", must be assistant", i,
                       m->role);
    if (m->tool_call_id != NULL && m->tool_call_id[0] != 0 && !tool)
        return td_fail(err, TD_ERR_INVALID,
                       "messages[%zu] has a tool_call_id and the role \"%s\", must be tool", i,
                       m->role);
    if (m->reasoning_bytes > 0 && !assistant)
        return td_fail(err, TD_ERR_INVALID,
                       "messages[%zu] has reasoning and the role \"%s\", must be assistant", i,
                       m->role);
    if (m->n_tool_calls > TD_CHAT_MAX_TOOL_CALLS)
        return td_fail(err, TD_ERR_LIMIT, "messages[%zu] has %zu tool_calls, must be <= %d", i,
                       m->n_tool_calls, TD_CHAT_MAX_TOOL_CALLS);
    if (m->n_tool_calls > 0 && !t->knows_tool_calls)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "messages[%zu] has tool_calls, which the model's chat template (%s) does "
                       "not have",
                       i, t->family);
    for (size_t k = 0; k < m->n_tool_calls; k++)
        if (m->tool_calls[k].name == NULL || m->tool_calls[k].name[0] == 0)
            return td_fail(err, TD_ERR_INVALID, "messages[%zu].tool_calls[%zu].name is empty", i,
                           k);
    return m->n_parts > 0 ? join_parts(v, i, err) : TD_OK;
}

/* Behind the content of a last message that stays open. What a template puts there is cut off, and
 * the space at its end tells whether the template trims contents. */
static const char OPEN_END[] = "\x02the answer goes on\x02 ";

static td_status open_last(struct view *v, const struct td_chat *chat, struct td_err *err)
{
    struct td_chat_message *m = &v->messages[v->n - 1];
    if (chat->add_generation_prompt)
        return td_fail(err, TD_ERR_INVALID,
                       "continue_final_message is true beside add_generation_prompt");
    if (strcmp(m->role, "assistant") != 0 || m->n_tool_calls > 0)
        return td_fail(err, TD_ERR_INVALID,
                       "continue_final_message is true: the last message must be the assistant's, "
                       "without tool_calls");
    char *text = malloc(m->content_bytes + sizeof OPEN_END);
    if (text == NULL)
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory for %zu bytes",
                       m->content_bytes);
    if (m->content_bytes > 0) memcpy(text, m->content, m->content_bytes);
    memcpy(text + m->content_bytes, OPEN_END, sizeof OPEN_END - 1);
    free(v->joined[v->n - 1]);
    m->content = v->joined[v->n - 1] = text;
    m->content_bytes += sizeof OPEN_END - 1;
    return TD_OK;
}

/* Cuts the text off where the last message's content ends. */
static td_status cut_open_end(const struct td_chat_template *t, char *text, size_t *n,
                              struct td_err *err)
{
    size_t n_mark = sizeof OPEN_END - 2; /* without the space */
    for (size_t at = *n >= n_mark ? *n - n_mark + 1 : 0; at-- > 0;) {
        if (memcmp(text + at, OPEN_END, n_mark) != 0) continue;
        bool is_trimmed = at + n_mark == *n || text[at + n_mark] != ' ';
        while (is_trimmed && at > 0 && memchr(" \t\r\n", text[at - 1], 4) != NULL) at--;
        *n = at;
        text[at] = 0;
        return TD_OK;
    }
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "continue_final_message: the model's chat template (%s) changes the last "
                   "message",
                   t->family);
}

static td_status make_view(const struct td_chat_template *t, const struct td_chat *chat,
                           struct view *v, struct td_err *err)
{
    if (chat->n_messages == 0)
        return td_fail(err, TD_ERR_INVALID, "messages: none, must be at least 1");
    if (chat->n_messages > TD_CHAT_MAX_MESSAGES)
        return td_fail(err, TD_ERR_LIMIT, "messages: %zu, must be <= %d", chat->n_messages,
                       TD_CHAT_MAX_MESSAGES);
    if (chat->n_tools > TD_CHAT_MAX_TOOLS)
        return td_fail(err, TD_ERR_LIMIT, "tools: %zu, must be <= %d", chat->n_tools,
                       TD_CHAT_MAX_TOOLS);
    if (chat->n_tools > 0 && !t->knows_tools)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "tools: the model's chat template (%s) has no place for them", t->family);
    v->n = chat->n_messages;
    v->messages = malloc(v->n * sizeof *v->messages);
    v->joined = calloc(v->n, sizeof *v->joined);
    if (v->messages == NULL || v->joined == NULL)
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory for %zu messages", v->n);
    memcpy(v->messages, chat->messages, v->n * sizeof *v->messages);
    td_status st = TD_OK;
    for (size_t i = 0; st == TD_OK && i < v->n; i++) st = check_message(t, v, i, err);
    return st == TD_OK && chat->continue_final_message ? open_last(v, chat, err) : st;
}

td_status td_chat_template_render(const struct td_chat_template *t, const struct td_chat *chat,
                                  char **ret_text, size_t *ret_bytes, struct td_err *err)
{
    if (chat->n_tools > 0 && t->for_tools != NULL) t = t->for_tools;
    if (t->jinja == NULL) return td_fail(err, t->refused.code, "%s", t->refused.msg);

    struct view view = {0};
    struct td_chat seen = *chat;
    struct td_jinja_input input = {.chat = &seen,
                                   .bos_token = t->bos_token,
                                   .eos_token = t->eos_token,
                                   .now_unix_s = t->date_unix_s,
                                   .max_text_bytes = t->max_bytes};
    char *text = NULL;
    size_t n = 0;
    td_status st = make_view(t, chat, &view, err);
    seen.messages = view.messages;
    if (st == TD_OK) st = td_jinja_render(t->jinja, &input, &text, &n, err);
    if (st == TD_OK) st = check_result(t, &seen, text, n, err);
    if (st == TD_OK && chat->continue_final_message) st = cut_open_end(t, text, &n, err);
    view_free(&view);
    if (st != TD_OK) {
        free(text);
        return st;
    }
    *ret_text = text;
    *ret_bytes = n;
    return TD_OK;
}
