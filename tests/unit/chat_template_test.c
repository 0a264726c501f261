/* chat_template_test.c - chat templates against published renderings, against the real Jinja, by
 * hand, and what must be refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "common/base/random.h"
#include "common/text/chat_template.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))
#define MAX_MESSAGES 16
#define MAX_CALLS 4
#define MESSAGE(r, text, n)                                                                        \
    {                                                                                              \
        .role = r, .content = text, .content_bytes = n                                             \
    }

/* ---- helpers --------------------------------------------------------------------------------- */

static const char *data_path(const char *name)
{
    static char path[4096];
    const char *data = getenv("TANDEM_DATA");
    snprintf(path, sizeof path, "%s/%s", data != NULL ? data : "../shared/data", name);
    return path;
}

/* NULL when the file is not there. Caller frees. */
static char *read_data(const char *name, size_t *ret_bytes)
{
    char *text = NULL;
    struct td_err err = {0};
    if (access(data_path(name), R_OK) != 0) return NULL;
    if (td_file_read(data_path(name), (size_t)64 << 20, &text, ret_bytes, &err) != TD_OK)
        fail_msg("%s", err.msg);
    return text;
}

static json_t *read_json(const char *name) { return json_load_file(data_path(name), 0, NULL); }

static struct td_chat_json to_json(const json_t *text)
{
    return (struct td_chat_json){json_string_value(text), json_string_length(text)};
}

/* The calls' arguments are JSON texts. What `out` points to lives as long as the list, and until
 * the next call. */
static int to_messages(const json_t *list, struct td_chat_message *out)
{
    static struct td_chat_tool_call calls[MAX_MESSAGES][MAX_CALLS];
    int n = (int)json_array_size(list);
    assert_true(n <= MAX_MESSAGES);
    for (int i = 0; i < n; i++) {
        const json_t *m = json_array_get(list, (size_t)i);
        const json_t *made = json_object_get(m, "tool_calls");
        out[i] = (struct td_chat_message){
            .role = json_string_value(json_object_get(m, "role")),
            .content = json_string_value(json_object_get(m, "content")),
            .content_bytes = json_string_length(json_object_get(m, "content")),
            .tool_calls = calls[i],
            .n_tool_calls = json_array_size(made),
            .tool_call_id = json_string_value(json_object_get(m, "tool_call_id")),
            .name = json_string_value(json_object_get(m, "name")),
            .reasoning = json_string_value(json_object_get(m, "reasoning_content")),
            .reasoning_bytes = json_string_length(json_object_get(m, "reasoning_content"))};
        assert_true(out[i].n_tool_calls <= MAX_CALLS);
        for (size_t k = 0; k < out[i].n_tool_calls; k++) {
            const json_t *call = json_array_get(made, k);
            const json_t *function = json_object_get(call, "function");
            calls[i][k] =
                (struct td_chat_tool_call){json_string_value(json_object_get(call, "id")),
                                           json_string_value(json_object_get(function, "name")),
                                           to_json(json_object_get(function, "arguments"))};
        }
    }
    return n;
}

static struct td_chat_template *parse(const char *jinja, const char *bos, const char *eos)
{
    struct td_chat_template *t = NULL;
    struct td_err err = {0};
    if (td_chat_template_parse(jinja, strlen(jinja), bos, eos, &t, &err) != TD_OK)
        fail_msg("%s", err.msg);
    return t;
}

/* A chat without tools. */
static td_status render(const struct td_chat_template *t, const struct td_chat_message *messages,
                        size_t n, bool add_generation_prompt, char **ret_text, size_t *ret_bytes,
                        struct td_err *err)
{
    const struct td_chat chat = {
        .messages = messages, .n_messages = n, .add_generation_prompt = add_generation_prompt};
    return td_chat_template_render(t, &chat, ret_text, ret_bytes, err);
}

/* ---- published renderings -------------------------------------------------------------------- */

static void expected_renderings(void **state)
{
    (void)state;
    json_t *root = read_json("chat-templates/expected_renderings.json");
    if (root == NULL) {
        printf("no %s\n", data_path("chat-templates/expected_renderings.json"));
        skip();
    }
    json_t *cases = json_object_get(root, "cases");
    int n_exact = 0, n_raised = 0, n_refused = 0;

    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *k = json_array_get(cases, i);
        const char *name = json_string_value(json_object_get(k, "name"));
        const json_t *want = json_object_get(k, "expected_output_jinja");
        if (json_string_length(want) == 0) want = json_object_get(k, "expected_output");
        json_t *conversation = json_copy(json_object_get(root, "conversation"));
        json_array_extend(conversation, json_object_get(k, "extra_conversation"));
        struct td_chat_message m[MAX_MESSAGES];
        int n = to_messages(conversation, m);

        struct td_chat_template *t = parse(json_string_value(json_object_get(k, "template_str")),
                                           json_string_value(json_object_get(k, "bos_token")),
                                           json_string_value(json_object_get(k, "eos_token")));
        char *text = NULL;
        size_t bytes = 0;
        struct td_err err = {0};
        td_status st =
            render(t, m, (size_t)n, json_is_true(json_object_get(root, "add_generation_prompt")),
                   &text, &bytes, &err);
        if (st == TD_OK) {
            if (bytes != json_string_length(want) ||
                memcmp(text, json_string_value(want), bytes) != 0)
                fail_msg("%s (%s) renders\n%s\nexpected\n%s", name, td_chat_template_family(t),
                         text, json_string_value(want));
            n_exact++;
            printf("  exact    %-18s %.70s\n", td_chat_template_family(t), name);
        } else {
            /* INVALID is the template's own raise_exception, which the real Jinja meets too (see
               against_jinja) */
            assert_true(st == TD_ERR_UNSUPPORTED || st == TD_ERR_INVALID);
            *(st == TD_ERR_INVALID ? &n_raised : &n_refused) += 1;
            printf("  %-8s %-18s %.70s: %s\n", st == TD_ERR_INVALID ? "raises" : "refused",
                   td_chat_template_family(t), name, err.msg);
        }
        free(text);
        td_chat_template_free(t);
        json_decref(conversation);
    }
    printf("  %zu cases: %d exact, %d raise, %d refused\n", json_array_size(cases), n_exact,
           n_raised, n_refused);
    assert_int_equal(n_exact + n_raised + n_refused, json_array_size(cases));
    assert_true(n_exact >= 26);
    json_decref(root);
}

/* The v1 and v3 templates against mistral-common's own prompts, whose text is made of pieces
 * with U+2581 for blanks. */
static void mistral_prompts(void **state)
{
    (void)state;
    static const struct {
        const char *mark, *text;
    } rows[] = {{"'v1' template", "mistral-chat-vectors/no_tools/text_v1.txt"},
                {"Mistral-Large-Instruct-2411", NULL},
                {"Mistral-Large-Instruct-2407", "mistral-chat-vectors/no_tools/text_v3.txt"}};
    json_t *root = read_json("chat-templates/expected_renderings.json");
    json_t *sample = read_json("mistral-chat-vectors/no_tools/sample.json");
    int n_checked = 0;
    if (root == NULL || sample == NULL) {
        printf("no mistral-chat-vectors or chat-templates\n");
        skip();
    }
    struct td_chat_message m[MAX_MESSAGES];
    int n = to_messages(json_object_get(sample, "messages"), m);
    json_t *cases = json_object_get(root, "cases");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *k = json_array_get(cases, i);
        for (int r = 0; r < LEN(rows); r++) {
            if (strstr(json_string_value(json_object_get(k, "name")), rows[r].mark) == NULL ||
                rows[r].text == NULL)
                continue;
            size_t n_pieces = 0, n_text = 0;
            char *pieces = read_data(rows[r].text, &n_pieces);
            assert_non_null(pieces);
            for (size_t at = 0; at < n_pieces;) {
                /* stops at the NUL behind the last piece */
                bool blank = strncmp(pieces + at, "\xe2\x96\x81", 3) == 0;
                pieces[n_text++] = blank ? ' ' : pieces[at];
                at += blank ? 3 : 1;
            }
            pieces[n_text] = 0;
            struct td_chat_template *t =
                parse(json_string_value(json_object_get(k, "template_str")), "<s>", "</s>");
            char *text = NULL;
            size_t bytes = 0;
            struct td_err err = {0};
            if (render(t, m, (size_t)n, true, &text, &bytes, &err) != TD_OK)
                fail_msg("%s: %s", rows[r].mark, err.msg);
            assert_string_equal(text, pieces);
            n_checked++;
            free(text);
            free(pieces);
            td_chat_template_free(t);
        }
    }
    assert_int_equal(n_checked, 2);
    json_decref(root);
    json_decref(sample);
}

/* ---- families -------------------------------------------------------------------------------- */

static const struct {
    const char *file, *family;
} family_files[] = {
    {"chat-templates/Qwen-Qwen2.5-7B-Instruct.jinja", "qwen2.5"},
    {"chat-templates/Qwen-Qwen3-0.6B.jinja", "qwen3"},
    {"chat-templates/Qwen-QwQ-32B.jinja", "qwen3"},
    {"chat-templates/meta-llama-Llama-3.1-8B-Instruct.jinja", "llama-3"},
    {"chat-templates/meta-llama-Llama-3.2-3B-Instruct.jinja", "llama-3"},
    {"chat-templates/meta-llama-Llama-3.3-70B-Instruct.jinja", "llama-3"},
    {"chat-templates/mistralai-Mistral-Nemo-Instruct-2407.jinja", "mistral-v3-tekken"},
    {"chat-templates/Mistral-Small-3.2-24B-Instruct-2506.jinja", "mistral-v7"},
    {"chat-templates/google-gemma-2-2b-it.jinja", "gemma"},
    {"chat-templates/microsoft-Phi-3.5-mini-instruct.jinja", "phi-3"},
    {"chat-templates/deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", "deepseek-r1"},
    {"chat-templates/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", "deepseek-r1"},
};

static const struct {
    const char *name, *family;
} family_cases[] = {
    {"teknium/OpenHermes-2.5-Mistral-7B", "chatml"},
    {"mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)", "mistral-v1"},
    {"mistralai/Mistral-7B-Instruct-v0.2 (mistralai 'v1' template with a system prompt)",
     "mistral-v1"},
    {"Mistral-Large-Instruct-2407 (mistralai 'v3' template; modified to have system prompt at "
     "start)",
     "mistral-v3"},
    {"Mistral-Nemo-Instruct-2407 (mistralai 'v3-tekken' template; modified to have system "
     "prompt at start)",
     "mistral-v3-tekken"},
    {"mistralai/Mistral-Large-Instruct-2411 (mistralai 'v7' template)", "mistral-v7"},
    {"bofenghuang/vigogne-2-70b-chat", "llama-2"},
    {"TheBloke/FusionNet_34Bx2_MoE-AWQ", "llama-2"},
    {"Llama-3", "llama-3"},
    {"Phi-3-mini", "phi-3"},
    {"phi-4", "phi-4"},
    {"google/gemma-7b-it", "gemma"},
    {"mlabonne/AlphaMonarch-7B", "monarch"},
};

static void families(void **state)
{
    (void)state;
    static const struct {
        const char *dir, *family;
    } dirs[] = {{"tokenizers-hf/config-only/qwen2.5", "qwen2.5"},
                {"tokenizers-hf/config-only/qwen3", "qwen3"},
                {"tokenizers-hf/phi-3-mini", "phi-3"},
                {"tokenizers-hf/phi-2", "none"},
                {"tinystories-656k", "none"}};
    json_t *root = read_json("chat-templates/expected_renderings.json");
    if (root == NULL) {
        printf("no %s\n", data_path("chat-templates"));
        skip();
    }
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    for (int i = 0; i < LEN(family_files); i++) {
        size_t n = 0;
        char *source = read_data(family_files[i].file, &n);
        assert_non_null(source);
        struct td_chat_template *t = parse(source, "<s>", "</s>");
        char *text = NULL;
        struct td_err err = {0};
        assert_string_equal(td_chat_template_family(t), family_files[i].family);
        if (render(t, &hello, 1, true, &text, &n, &err) != TD_OK)
            fail_msg("%s: %s", family_files[i].file, err.msg);
        free(text);
        free(source);
        td_chat_template_free(t);
    }
    json_t *list = json_object_get(root, "cases");
    for (int i = 0; i < LEN(family_cases); i++) {
        bool found = false;
        for (size_t k = 0; k < json_array_size(list); k++) {
            const json_t *item = json_array_get(list, k);
            if (strcmp(json_string_value(json_object_get(item, "name")), family_cases[i].name) != 0)
                continue;
            struct td_chat_template *t =
                parse(json_string_value(json_object_get(item, "template_str")), "", "");
            assert_string_equal(td_chat_template_family(t), family_cases[i].family);
            td_chat_template_free(t);
            found = true;
        }
        if (!found) fail_msg("no case %s", family_cases[i].name);
    }
    for (int i = 0; i < LEN(dirs); i++) {
        struct td_chat_template *t = NULL;
        struct td_err err = {0};
        if (td_chat_template_load(data_path(dirs[i].dir), &t, &err) != TD_OK)
            fail_msg("%s: %s", dirs[i].dir, err.msg);
        assert_string_equal(td_chat_template_family(t), dirs[i].family);
        td_chat_template_free(t);
    }
    json_decref(root);
}

/* ---- by hand --------------------------------------------------------------------------------- */

/* A mark makes each of these a ChatML template; it prints nothing. */
#define MARK "{#<|im_start|><|im_end|>#}"

static const struct {
    const char *jinja, *want;
} snippets[] = {
    /* the last newline goes, one only */
    {MARK "a\n", "a"},
    {MARK "a\n\n", "a\n"},
    {MARK "a {%- if true %} b {% endif -%} c", "a b c"},
    /* trim_blocks, lstrip_blocks */
    {MARK "a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"},
    {MARK "a\n  {%+ if true +%}\n b{% endif %}", "a\n  \n b"},
    {MARK "a\n  {{ 'x' }}\nb", "a\n  x\nb"}, /* not around {{ }} */
    {MARK "a  {{- 'x' -}}  b", "axb"},
    {MARK "a\n {# note #}\nb{#- n -#}  c", "a\nbc"},
    {MARK "{{ 'a\\n\\t\\'\\u00e9\\x41\\q' \"b\" }}", "a\n\t'\xc3\xa9"
                                                     "A\\qb"},
    {MARK "{{ 1 + 2 * 3 - 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }}", "4 -4 2 -2"},
    /* + is looser than ~ in Jinja: 12 + 3 is a type error in Python */
    {MARK "{{ 1 ~ 2 + 3 }}", "15"},
    {MARK "{{ none }}{{ true }}{{ nothing }}{{ 5 }}", "NoneTrue5"},
    {MARK "{{ 'yes' if messages else 'no' }}{{ 'x' if false }}", "yes"},
    {MARK "{{ not nothing is defined }} {{ 1 in [1, 2] and 3 not in [1] }} {{ 'el' in 'hello' }}",
     "True True True"},
    {MARK "{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ true == 1 }} {{ 'a' < 'b' }}",
     "True False True True"},
    {MARK "{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.previtem "
          "}}|{% endfor %}",
     "1TrueFalse|2FalseFalse1|3FalseTrue2|"},
    {MARK "{% for i in [] %}x{% else %}empty{% endfor %}", "empty"},
    {MARK "{% for i in range(6) if i % 2 %}{{ i }}{{ loop.length }} {% endfor %}", "13 33 53 "},
    {MARK "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break "
          "%}{% endif %}{{ i }}{% endfor %}",
     "02"},
    {MARK "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"},
    {MARK "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}",
     "12121"},
    {MARK "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor "
          "%}{{ ns.n }}",
     "3"},
    {MARK "{% if true %}{% set x = 'in' %}{% endif %}{{ x }}", "in"},
    {MARK "{% set x %}a{{ 1 }}b{% endset %}[{{ x }}]", "[a1b]"},
    {MARK "{% macro m(a, b='z') %}{{ a }}{{ b }};{% endmacro %}{{ m('x') }}{{ m('x', b='y') }}",
     "xz;xy;"},
    {MARK "{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ 'abc'[-1] }}{{ [1, 2, 3][1:][0] }}{{ "
          "'h\xc3\xa9llo'[:2] }}",
     "bcdcbac2h\xc3\xa9"},
    {MARK "{{ 'a,b,,c'.split(',') | length }}{{ ' a  b '.split() | join('-') }}{{ "
          "'a=b=c'.split('=', 1)[1] }}",
     "4a-bb=c"},
    {MARK "{{ 'xxaxx'.strip('x') }}{{ 'xxaxx'.lstrip('x') }}{{ '  a ' | trim }}{{ '\xc2\xa0 "
          "a\xe3\x80\x80'.strip() }}",
     "aaxxaa"},
    {MARK "{{ 'hello wORLD'.title() }} {{ 'aBC' | upper }} {{ 'aBC' | capitalize }}",
     "Hello World ABC Abc"},
    {MARK "{{ 'abcabc'.replace('b', 'X') }}{{ 'aXb' | replace('X', '') }}", "aXcaXcab"},
    {MARK "{{ {'a': [1, none, true, 'x\"\\n\xc3\xa9']} | tojson }}",
     "{\"a\": [1, null, true, \"x\\\"\\n\xc3\xa9\"]}"},
    {MARK "{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}",
     "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}"},
    {MARK "{{ {'b': 1, 'a': '\xc3\xa9\xf0\x9f\x98\x80'} | tojson(ensure_ascii=true, "
          "sort_keys=true, separators=[',', ':']) }}",
     "{\"a\":\"\\u00e9\\ud83d\\ude00\",\"b\":1}"},
    {MARK "{{ [3, 1, 2] | min }}{{ [3, 1, 2] | max }}{{ ('a' | safe) + 'b' }}", "13ab"},
    {MARK "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | "
          "map(attribute='role') | join(',') }}",
     "1user"},
    {MARK
     "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ messages[0].nope is undefined }}",
     "deTrue"},
    {MARK "{{ 'a\xf0\x9f\x98\x80z' | length }}{{ [1, 2] | last }}{{ 'xyz' | first }}", "32x"},
    {MARK "{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"},
    {MARK "{{ messages[0]['content'] + messages[-1].content }}", "HelloHello"},
    {MARK "{% set d = {1: 'a', 'k': 2} %}{{ d[1] }}{{ d.k }}{{ 1 in d }}{{ d.get(3) }}{% for k in "
          "d %}{{ k + k }}{% endfor %}",
     "a2TrueNone2kk"},
    {MARK "{{ tools | selectattr('x') | list | length }}{{ 'abc'.type is defined }}{{ "
          "messages.nope is defined }}",
     "0FalseFalse"},
    {MARK "{% for k, v in {'b': 1, 'A': 2, 'c': 0} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ ({5: "
          "'x', -1: 'y'} | dictsort)[0][1] }}",
     "A2b1c0y"},
    {MARK "{{ {'a': {'b': 'c'}}.a.b }}{{ (1, 2)[1] }}{{ ({})|length }}", "c20"},
    {MARK "{{ raise_exception is defined }}{{ 1 is odd }}{{ 'x' is string }}{{ none is none }}{{ "
          "messages is iterable }}",
     "TrueTrueTrueTrueTrue"},
};

static void language_by_hand(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    for (int i = 0; i < LEN(snippets); i++) {
        char source[1024], want[1024];
        /* the message must stand in the result; the first two are about the end of the source */
        snprintf(source, sizeof source, "%s%s%s", i < 2 ? "{{ 'Hello' }}" : "", snippets[i].jinja,
                 i < 2 ? "" : "{{ 'Hello' }}");
        snprintf(want, sizeof want, i < 2 ? "Hello%s" : "%sHello", snippets[i].want);
        struct td_chat_template *t = parse(source, "<s>", "</s>");
        char *text = NULL;
        size_t bytes = 0;
        struct td_err err = {0};
        if (strstr(source, "~ 2 + 3") != NULL) {
            assert_int_equal(render(t, &hello, 1, true, &text, &bytes, &err), TD_ERR_UNSUPPORTED);
        } else {
            if (render(t, &hello, 1, true, &text, &bytes, &err) != TD_OK)
                fail_msg("%s: %s", source, err.msg);
            if (strcmp(text, want) != 0)
                fail_msg("%s renders \"%s\", must be \"%s\"", source, text, want);
        }
        free(text);
        td_chat_template_free(t);
    }
}

static void qwen3_thinking(void **state)
{
    (void)state;
    size_t n = 0;
    char *source = read_data("chat-templates/Qwen-Qwen3-0.6B.jinja", &n);
    if (source == NULL) {
        printf("no %s\n", data_path("chat-templates"));
        skip();
    }
    const struct td_chat_message m[] = {
        MESSAGE("user", "a", 1),
        /* history: the thoughts go */
        MESSAGE("assistant", "<think>\nwhy\n</think>\n\nbecause", 29), MESSAGE("user", "b", 1)};
    struct td_chat_template *t = parse(source, NULL, "<|im_end|>");
    char *text = NULL;
    struct td_err err = {0};
    assert_int_equal(render(t, m, 3, true, &text, &n, &err), TD_OK);
    assert_string_equal(text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbecause<|im_"
                              "end|>\n<|im_start|>user\nb<|im_end|>\n"
                              "<|im_start|>assistant\n");
    free(text);
    /* the last turn keeps them */
    assert_int_equal(render(t, m, 2, false, &text, &n, &err), TD_OK);
    assert_string_equal(text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>"
                              "\nwhy\n</think>\n\nbecause<|im_end|>\n");
    free(text);
    free(source);
    td_chat_template_free(t);
}

#define JSON(t)                                                                                    \
    {                                                                                              \
        .text = t, .bytes = sizeof t - 1                                                           \
    }

static const char hand_chatml[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}";
static const char hand_tools[] =
    MARK "{{ tools | tojson }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
         "{{ m.tool_call_id }}{{ m.name }}{% if m.role == 'tool' %}!{% endif %}"
         "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
         "{% if thinking is defined %}{{ thinking | tojson }}{% endif %}";
static const struct td_chat_part hand_parts[] = {{"text", "a", 1},
                                                 {"text", "", 0},
                                                 {"text", "b", 1}},
                                 image_part[] = {{"text", "a", 1}, {"image_url", "x", 1}};
static const struct td_chat_tool_call hand_call = {"id1", "f", JSON("{\"b\": 1.50, \"a\": []}")},
                                      bare_call = {NULL, "f", {NULL, 0}},
                                      no_object_call = {NULL, "f", JSON("[1]")},
                                      no_json_call = {NULL, "f", JSON("{\"a\": }")},
                                      unnamed_call = {NULL, "", {NULL, 0}};
static const struct td_chat_json hand_tool =
    JSON("{\"type\":\"function\",\"function\":{\"name\":\"f\"}}");
static const struct td_chat_json other_tool = JSON("{\"function\":{\"name\":\"unseen\"}}");
#define HAND_USER MESSAGE("user", "hi", 2)
#define CALLS(r, c)                                                                                \
    {                                                                                              \
        .role = r, .content = "", .tool_calls = c, .n_tool_calls = 1                               \
    }

/* A chat, and what its rendering must be, or, with an error, must say. */
struct hand_row {
    const char *jinja;
    struct td_chat_message m[2];
    const struct td_chat_json *tools;
    size_t n_tools;
    struct td_chat_json kwargs;
    td_status st;
    const char *want;
};

static const struct hand_row rendered_by_hand[] = {
    {hand_chatml, {HAND_USER}, NULL, 0, {NULL, 0}, TD_OK, "<|im_start|>user\nhi<|im_end|>"},
    {hand_chatml,
     {{.role = "user", .parts = hand_parts, .n_parts = 3}},
     NULL,
     0,
     {NULL, 0},
     TD_OK,
     "<|im_start|>user\na\n\nb<|im_end|>"},
    {hand_chatml,
     {MESSAGE("developer", "be", 2)},
     NULL,
     0,
     {NULL, 0},
     TD_OK,
     "<|im_start|>system\nbe<|im_end|>"},
    {MARK "{# developer #}{{ messages[0].role }}{{ messages[0].content }}",
     {MESSAGE("developer", "be", 2)},
     NULL,
     0,
     {NULL, 0},
     TD_OK,
     "developerbe"},
    {hand_tools,
     {HAND_USER},
     &hand_tool,
     1,
     JSON("{\"thinking\": [false, null]}"),
     TD_OK,
     "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]|user:hi[false, null]"},
    {hand_tools,
     {CALLS("assistant", &hand_call),
      {.role = "tool", .content = "42", .content_bytes = 2, .tool_call_id = "id1", .name = "f"}},
     NULL,
     0,
     {NULL, 0},
     TD_OK,
     "null|assistant:{\"id\": \"id1\", \"type\": \"function\", \"function\": {\"name\": \"f\", "
     "\"arguments\": {\"b\": 1.5, \"a\": []}}}|tool:42id1f!"},
    {hand_tools,
     {CALLS("assistant", &bare_call)},
     NULL,
     0,
     {NULL, 0},
     TD_OK,
     "null|assistant:{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": "
     "{}}}"},
};

static const struct hand_row refused_by_hand[] = {
    {hand_chatml,
     {{.role = "user", .parts = image_part, .n_parts = 2}},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "messages[0].content[1].type is \"image_url\", must be text"},
    {hand_chatml,
     {{.role = "user", .parts = hand_parts, .n_parts = TD_CHAT_MAX_PARTS + 1}},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_LIMIT,
     "messages[0].content has 1025 parts, must be <= 1024"},
    {hand_chatml,
     {MESSAGE("ipython", "a", 1)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "messages[0].role is \"ipython\", must be system, developer, user, assistant or tool"},
    {hand_chatml,
     {HAND_USER},
     &hand_tool,
     1,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "tools: the model's chat template (chatml) has no place for them"},
    {MARK "no tools for f{{ messages[0].content }}",
     {HAND_USER},
     &other_tool,
     1,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "tools[0]: the model's chat template (chatml) leaves out this tool"},
    {hand_chatml,
     {CALLS("assistant", &hand_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "messages[0] has tool_calls, which the model's chat template (chatml) does not have"},
    {MARK "{# tool_calls #}",
     {CALLS("assistant", &hand_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "messages[0]: the model's chat template (chatml) leaves out its "
     "tool_calls"},
    {MARK "{# 'tool' #}",
     {MESSAGE("tool", "42", 2)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_UNSUPPORTED,
     "messages[0]: the model's chat template (chatml) leaves out this tool message"},
    {hand_tools,
     {CALLS("user", &hand_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_INVALID,
     "messages[0] has tool_calls and the role \"user\", must be assistant"},
    {hand_tools,
     {{.role = "user", .content = "", .tool_call_id = "x"}},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_INVALID,
     "messages[0] has a tool_call_id and the role \"user\", must be tool"},
    {hand_tools,
     {CALLS("assistant", &unnamed_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_INVALID,
     "messages[0].tool_calls[0].name is empty"},
    {hand_tools,
     {CALLS("assistant", &no_object_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_INVALID,
     "messages[0].tool_calls[0].arguments: is no JSON object"},
    {hand_tools,
     {CALLS("assistant", &no_json_call)},
     NULL,
     0,
     {NULL, 0},
     TD_ERR_INVALID,
     "messages[0].tool_calls[0].arguments: line 1, column 7"},
    {hand_tools,
     {HAND_USER},
     NULL,
     0,
     JSON("{\"messages\": []}"),
     TD_ERR_INVALID,
     "template_kwargs sets \"messages\""},
    {hand_tools,
     {HAND_USER},
     NULL,
     0,
     JSON("{\"range\": 1}"),
     TD_ERR_INVALID,
     "template_kwargs sets \"range\""},
};

static void check_rows(const struct hand_row *rows, int n_rows)
{
    for (int i = 0; i < n_rows; i++) {
        struct td_chat chat = {.messages = rows[i].m,
                               .n_messages = rows[i].m[1].role != NULL ? 2 : 1,
                               .tools = rows[i].tools,
                               .n_tools = rows[i].n_tools,
                               .template_kwargs = rows[i].kwargs};
        struct td_chat_template *t = parse(rows[i].jinja, "<s>", NULL);
        char *text = NULL;
        size_t n = 0;
        struct td_err err = {0};
        td_status st = td_chat_template_render(t, &chat, &text, &n, &err);
        if (st != rows[i].st)
            fail_msg("row %d: %s, \"%s\"", i, td_status_name(st), st == TD_OK ? text : err.msg);
        if (st == TD_OK)
            assert_string_equal(text, rows[i].want);
        else if (strstr(err.msg, rows[i].want) == NULL)
            fail_msg("row %d: \"%s\", must say \"%s\"", i, err.msg, rows[i].want);
        free(text);
        td_chat_template_free(t);
    }
}

/* Roles, parts, tools and kwargs; what the limits and refusals say. Needs no shared data. */
static void tools_by_hand(void **state)
{
    (void)state;
    check_rows(rendered_by_hand, LEN(rendered_by_hand));
    check_rows(refused_by_hand, LEN(refused_by_hand));
}

static void tools_have_limits(void **state)
{
    (void)state;
    static char deep[80], wide[16384], large[TD_CHAT_MAX_JSON_BYTES + 1];
    struct td_chat_json many[TD_CHAT_MAX_TOOLS + 1];
    for (int i = 0; i < LEN(many); i++) many[i] = hand_tool;
    memset(large, ' ', sizeof large);
    memcpy(large, "{}", 2);
    memcpy(deep, "{\"a\":", 5);
    memset(deep + 5, '[', 32);
    memset(deep + 37, ']', 32);
    deep[69] = '}';
    size_t n_wide = 1;
    wide[0] = '{';
    for (int i = 0; i <= TD_CHAT_MAX_JSON_KEYS; i++)
        n_wide += (size_t)snprintf(wide + n_wide, sizeof wide - n_wide, "%s\"%d\":0",
                                   i > 0 ? "," : "", i);
    wide[n_wide++] = '}';
    const struct td_chat_json bounds[] = {{deep, 70}, {wide, n_wide}, {large, sizeof large}};
    const struct hand_row rows[] = {
        {hand_tools,
         {HAND_USER},
         many,
         LEN(many),
         {NULL, 0},
         TD_ERR_LIMIT,
         "tools: 129, must be <= 128"},
        {hand_tools,
         {HAND_USER},
         &bounds[0],
         1,
         {NULL, 0},
         TD_ERR_LIMIT,
         "tools[0]: nests deeper than 32"},
        {hand_tools,
         {HAND_USER},
         &bounds[1],
         1,
         {NULL, 0},
         TD_ERR_LIMIT,
         "tools[0]: has an object of 1025 keys, must be <= 1024"},
        {hand_tools,
         {HAND_USER},
         &bounds[2],
         1,
         {NULL, 0},
         TD_ERR_LIMIT,
         "tools[0]: has 65537 bytes, must be <= 65536"},
    };
    check_rows(rows, LEN(rows));
}

static void dates(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    struct td_chat_template *t = parse(
        MARK "{{ messages[0].content }}{{ strftime_now('%A %d %B %Y %H:%M:%S %y-%m %a %%') }}",
        NULL, NULL);
    char *text = NULL;
    size_t n = 0;
    struct td_err err = {0};
    td_chat_template_set_date(t, 951782399);
    assert_int_equal(render(t, &hello, 1, true, &text, &n, &err), TD_OK);
    assert_string_equal(text, "HelloMonday 28 February 2000 23:59:59 00-02 Mon %");
    free(text);
    td_chat_template_free(t);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *jinja;
    td_status st;
    const char *says;
} refusals[] = {
    {NULL, TD_ERR_UNSUPPORTED, "no chat template"},
    {"{% for m in messages %}{{ m.content }}{% endfor %}", TD_ERR_UNSUPPORTED,
     "no family that is known"},
    {MARK "{% include 'x' %}", TD_ERR_UNSUPPORTED, "line 1: the statement \"include\""},
    {MARK "\n{% call x() %}{% endcall %}", TD_ERR_UNSUPPORTED, "line 2: the statement \"call\""},
    {MARK "{{ 1.5 }}", TD_ERR_UNSUPPORTED, "no plain integer"},
    {MARK "{{ 4 / 2 }}", TD_ERR_UNSUPPORTED, "operator /"},
    {MARK "{% if true %}", TD_ERR_UNSUPPORTED, "does not end"},
    {MARK "{% endif %}", TD_ERR_UNSUPPORTED, "closes no block"},
    {MARK "{{ 'a }}", TD_ERR_UNSUPPORTED, "string does not end"},
    {MARK "{{ messages }}", TD_ERR_UNSUPPORTED, "as text"},
    {MARK "{{ messages | wordwrap }}", TD_ERR_UNSUPPORTED, "\"wordwrap\""},
    {MARK "{{ 'a'.center(5) }}", TD_ERR_UNSUPPORTED, "center"},
    {MARK "{{ nothing.x }}", TD_ERR_UNSUPPORTED, "undefined"},
    {MARK "{{ nothing() }}", TD_ERR_UNSUPPORTED, "\"nothing\""},
    {MARK "{{ none + 'a' }}", TD_ERR_UNSUPPORTED, "none and a string"},
    {MARK "{{ '\xc3\xa9' | upper }}", TD_ERR_UNSUPPORTED, "not ASCII"},
    {MARK "{{ raise_exception('roles must alternate') }}", TD_ERR_INVALID, "roles must alternate"},
    {MARK "no content", TD_ERR_UNSUPPORTED, "leaves out this user message"},
    {MARK "{% for i in range(100000) %}{% for j in 'ab' %}{% if i in [1, 2, 3] %}{% endif %}{% "
          "endfor %}{% endfor %}",
     TD_ERR_LIMIT, "too many steps"},
    {MARK "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s "
          "%}{% endfor %}",
     TD_ERR_LIMIT, "bytes"},
    {MARK "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TD_ERR_LIMIT, "macros nest"},
    {MARK "{{ range(100001) | length }}", TD_ERR_LIMIT, "100000"},
    {MARK "{% set n = namespace(a=[], b=[]) %}{% for i in range(70) %}{% set n.a = [n.a] %}{% "
          "set n.b = [n.b] %}{% endfor %}{{ n.a == n.b }}",
     TD_ERR_LIMIT, "nest too deep"},
    {MARK "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] "
          "%}{% set n.b = [n.b, n.b] %}{% endfor %}"
          "{{ n.a == n.b }}",
     TD_ERR_LIMIT, "too many steps"},
};

static void refuses_by_name(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    char *text = NULL;
    size_t n = 0;

    for (int i = 0; i < LEN(refusals); i++) {
        struct td_chat_template *t = NULL;
        struct td_err err = {0};
        assert_int_equal(
            td_chat_template_parse(refusals[i].jinja,
                                   refusals[i].jinja == NULL ? 0 : strlen(refusals[i].jinja), "<s>",
                                   "</s>", &t, &err),
            TD_OK);
        td_status st = render(t, &hello, 1, true, &text, &n, &err);
        if (st != refusals[i].st || strstr(err.msg, refusals[i].says) == NULL)
            fail_msg("%s: %s, \"%s\"", refusals[i].jinja, td_status_name(st), err.msg);
        assert_null(text);
        td_chat_template_free(t);
    }
}

/* `n` times `part`, which has one %d for the number, between two texts. Caller frees. */
static char *many_times(const char *front, const char *part, int n, const char *end)
{
    size_t at = 0, room = strlen(front) + (size_t)n * (strlen(part) + 8) + strlen(end) + 1;
    char *s = malloc(room);
    assert_non_null(s);
    at += (size_t)snprintf(s, room, "%s", front);
    for (int i = 0; i < n; i++) {
        const char *mark = strstr(part, "%d");
        at +=
            (size_t)snprintf(s + at, room - at, "%.*s%d%s", (int)(mark - part), part, i, mark + 2);
    }
    snprintf(s + at, room - at, "%s", end);
    return s;
}

/* What a step fails at stays failed, and what is looked for among many names takes steps: each of
 * these went on for seconds, minutes or ever. */
static void steps_end(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
#define GROW                                                                                       \
    MARK "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"   \
         "{% set n.b = [n.b, n.b] %}{% endfor %}"
    char *const sources[] = {
        strdup(GROW "{{ n.a == n.b }}{{ n.a == n.b }}"),
        strdup(GROW "{{ n.a == n.b == n.a }}"),
        strdup(GROW "{{ n.a in [n.b, n.b] }}{{ n.a in [n.b, n.b] }}"),
        strdup(GROW "{{ n.a is eq(n.b) }}{{ n.a is ne(n.b) }}{{ n.a is in([n.b]) }}"),
        many_times(MARK "{{ {", "%d:0,", 80000, "} | length }}{{ messages[0].content }}"),
        many_times(MARK, "{% set x%d=0 %}", 30000, "{{ messages[0].content }}"),
        many_times(MARK "{% set d = {", "%d:0,", 5000,
                   "} %}{% for i in range(50000) %}{% if d.get('x') %}{% endif %}{% endfor %}"
                   "{{ messages[0].content }}"),
        many_times(MARK "{% set d = {", "%d:0,", 5000,
                   "} %}{% for i in range(50000) %}{% if 'x' is in(d) %}{% endif %}{% endfor %}"
                   "{{ messages[0].content }}"),
    };
#undef GROW
    for (int i = 0; i < LEN(sources); i++) {
        char *text = NULL;
        size_t n = 0;
        struct td_err err = {0};
        struct td_chat_template *t = parse(sources[i], NULL, NULL);
        alarm(60);
        td_status st = render(t, &hello, 1, true, &text, &n, &err);
        alarm(0);
        if (st != TD_ERR_LIMIT || strstr(err.msg, "too many steps") == NULL)
            fail_msg("row %d: %s, \"%s\"", i, td_status_name(st), err.msg);
        td_chat_template_free(t);
        free(sources[i]);
    }
}

/* Numbers of a request are of 64 bits, those of a template of 53. */
static void numbers_of_a_request(void **state)
{
    (void)state;
    static const struct {
        const char *jinja, *kwargs;
        const char *want; /* NULL: refused */
    } rows[] = {
        {MARK "{% for m in messages[::n] %}{{ m.content }}{% endfor %}",
         "{\"n\": 9223372036854775807}", "a"},
        {MARK "{% for m in messages[1::n] %}{{ m.content }}{% endfor %}",
         "{\"n\": 9223372036854775807}", "b"},
        {MARK "{% for m in messages[0::n] %}{{ m.content }}{% endfor %}",
         "{\"n\": -9223372036854775808}", "a"},
        {MARK "{% for m in messages[::n] %}{{ m.content }}{% endfor %}", "{\"n\": -2}", "b"},
        {MARK "{% for m in messages[::n] %}{{ m.content }}{% endfor %}", "{\"n\": 1}", "ab"},
        {MARK "{{ range(n, 3) | length }}", "{\"n\": -9223372036854775808}", NULL},
        {MARK "{{ range(0, 3, n) | length }}", "{\"n\": 9223372036854775807}", NULL},
        {MARK "{% if -n %}{% endif %}", "{\"n\": -9223372036854775808}", NULL},
    };
    const struct td_chat_message m[] = {MESSAGE("user", "a", 1), MESSAGE("assistant", "b", 1)};
    for (int i = 0; i < LEN(rows); i++) {
        char source[200], *text = NULL;
        size_t n = 0;
        struct td_err err = {0};
        snprintf(source, sizeof source, "%s|ab", rows[i].jinja); /* both messages stand there */
        struct td_chat_template *t = parse(source, NULL, NULL);
        const struct td_chat chat = {.messages = m,
                                     .n_messages = 2,
                                     .template_kwargs = {rows[i].kwargs, strlen(rows[i].kwargs)}};
        td_status st = td_chat_template_render(t, &chat, &text, &n, &err);
        if (rows[i].want == NULL) {
            if (st != TD_ERR_UNSUPPORTED || strstr(err.msg, "a number beyond 2^53") == NULL)
                fail_msg("row %d: %s, \"%s\"", i, td_status_name(st), err.msg);
        } else if (st != TD_OK || strncmp(text, rows[i].want, strlen(rows[i].want)) != 0 ||
                   text[strlen(rows[i].want)] != '|') {
            fail_msg("row %d: %s, \"%s\"", i, td_status_name(st), st == TD_OK ? text : err.msg);
        }
        free(text);
        td_chat_template_free(t);
    }
}

/* written with a limit: neither short of it nor past it, and only the rendering counts, not what
 * macros and blocks write */
static void stops_at_its_limit(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    char *text = NULL;
    size_t n = 0;
    struct td_chat_template *w =
        parse(MARK "{% macro m() %}{{ range(9000) | join('.') }}{% endmacro %}{% set x = m() %}"
                   "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}",
              NULL, NULL);
    struct td_err werr = {0};
    td_chat_template_set_max_bytes(w, 5000);
    assert_int_equal(render(w, &hello, 1, true, &text, &n, &werr), TD_OK);
    assert_int_equal(n, 5000);
    free(text);
    text = NULL;
    td_chat_template_set_max_bytes(w, 4999);
    assert_int_equal(render(w, &hello, 1, true, &text, &n, &werr), TD_ERR_LIMIT);
    assert_non_null(
        strstr(werr.msg, "more than 4999 bytes, the most that this model's context holds"));
    assert_null(text);
    td_chat_template_free(w);
}

/* that no message is left out is checked in one pass over the text when they come in order;
 * a template that moves each of 2000 to another place would have the text read 1000 times */
static void finds_messages_in_any_order(void **state)
{
    (void)state;
    char *text = NULL;
    size_t n = 0;
    enum { MANY = 2000, EACH = 1000 };
    struct td_chat_message *many = calloc(MANY, sizeof *many);
    char *contents = malloc(MANY * EACH);
    for (int i = 0; i < MANY; i++) {
        memset(contents + i * EACH, 'x', EACH);
        snprintf(contents + i * EACH, 12, "%08d", i);
        contents[i * EACH + 8] = 'y';
        many[i] = (struct td_chat_message)MESSAGE("user", contents + i * EACH, EACH);
    }
    static const struct {
        const char *jinja;
        td_status st;
    } orders[] = {
        {MARK "{% for m in messages %}{{ m.content }}|{% endfor %}", TD_OK},
        {MARK "{% for m in messages[1:] %}{{ m.content }}|{% endfor %}{{ messages[0].content }}",
         TD_OK},
        {MARK
         "{{ messages[1999].content }}{% for m in messages[:-1] %}{{ m.content }}|{% endfor %}",
         TD_OK},
        {MARK "{% for m in messages[1:] %}{{ m.content }}|{% endfor %}", TD_ERR_UNSUPPORTED},
        {MARK "{% for m in messages[::-1] %}{{ m.content }}|{% endfor %}", TD_ERR_LIMIT},
    };
    for (int i = 0; i < LEN(orders); i++) {
        struct td_chat_template *o = parse(orders[i].jinja, NULL, NULL);
        struct td_err oerr = {0};
        td_status st = render(o, many, MANY, true, &text, &n, &oerr);
        if (st != orders[i].st ||
            (st == TD_ERR_LIMIT && !strstr(oerr.msg, "moves so many messages")))
            fail_msg("order %d: %s", i, oerr.msg);
        if (st == TD_OK) free(text);
        text = NULL;
        td_chat_template_free(o);
    }
    free(contents);
    free(many);
}

static void refuses_messages(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5),
                                 tool = MESSAGE("tool", "Hello", 5);
    char *text = NULL;
    size_t n = 0;
    struct td_chat_template *t = parse(hand_chatml, NULL, NULL);
    struct td_err err = {0};
    assert_int_equal(render(t, &hello, 0, true, &text, &n, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "messages"));
    assert_int_equal(render(t, &tool, 1, true, &text, &n, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "messages[0].role is \"tool\""));
    assert_int_equal(render(t, &hello, 65537, true, &text, &n, &err), TD_ERR_LIMIT);
    assert_null(text);
    const struct td_chat_message with_nul = MESSAGE("user", "a\0b", 3);
    assert_int_equal(render(t, &with_nul, 1, true, &text, &n, &err), TD_OK);
    assert_int_equal(n, strlen("<|im_start|>user\n") + 3 + strlen("<|im_end|>"));
    assert_memory_equal(text + strlen("<|im_start|>user\n"), "a\0b", 3);
    free(text);
    td_chat_template_free(t);
    td_chat_template_free(NULL);
}

/* deep and long sources */
static void deep_sources_are_bounded(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    size_t n = 0;
    struct td_err err = {0};
    static const char *const deep[] = {"(", "[", "not ", "-", "a if "};
    for (int k = 0; k < LEN(deep); k++) {
        const size_t room = 300000;
        char *source = malloc(room);
        size_t n_source = (size_t)snprintf(source, room, MARK "{{ ");
        for (int i = 0; i < 40000; i++)
            n_source += (size_t)snprintf(source + n_source, room - n_source, "%s", deep[k]);
        struct td_chat_template *d = NULL;
        assert_int_equal(td_chat_template_parse(source, n_source, NULL, NULL, &d, &err), TD_OK);
        char *text = NULL;
        assert_int_equal(render(d, &hello, 1, true, &text, &n, &err), TD_ERR_LIMIT);
        td_chat_template_free(d);
        free(source);
    }
}

/* ---- directories ----------------------------------------------------------------------------- */

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fputs(text, f) >= 0, 1);
    assert_int_equal(fclose(f), 0);
}

static const struct {
    const char *config, *jinja;
    td_status st;
    const char *family, *want;
} directories[] = {
    {NULL, NULL, TD_OK, "none", NULL},
    {"{}", NULL, TD_OK, "none", NULL},
    {"{\"chat_template\": null}", NULL, TD_OK, "none", NULL},
    {"{\"bos_token\": \"<b>\", \"eos_token\": {\"content\": \"<e>\"}, \"chat_template\": "
     "\"{{bos_token}}<|im_start|>{{messages[0].content}}"
     "<|im_end|>{{eos_token}}\"}",
     NULL, TD_OK, "chatml", "<b><|im_start|>Hello<|im_end|><e>"},
    {"{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"x\"}, {\"name\": "
     "\"default\", \"template\": \"<|im_start|>"
     "{{messages[0].content}}<|im_end|>\"}]}",
     NULL, TD_OK, "chatml", "<|im_start|>Hello<|im_end|>"},
    {"{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"x\"}]}", NULL, TD_OK, "none",
     NULL},
    {"{\"bos_token\": null, \"chat_template\": \"<|im_start|>1<|im_end|>\"}",
     "<|im_start|>{{bos_token}}{{messages[0].content}}<|im_end|>\n", TD_OK, "chatml",
     "<|im_start|>Hello<|im_end|>"}, /* the file wins */
    {NULL, "<|im_start|>{{messages[0].content}}<|im_end|>", TD_OK, "chatml",
     "<|im_start|>Hello<|im_end|>"},
    {"{\"chat_template\": 5}", NULL, TD_ERR_INVALID, NULL, "chat_template"},
    {"{\"bos_token\": 5}", NULL, TD_ERR_INVALID, NULL, "bos_token"},
    {"{\"chat_template\": [5]}", NULL, TD_ERR_INVALID, NULL, "chat_template[0]"},
    {"[]", NULL, TD_ERR_INVALID, NULL, "no JSON object"},
    {"{", NULL, TD_ERR_INVALID, NULL, "tokenizer_config.json"},
};

static void loads_directories(void **state)
{
    (void)state;
    const struct td_chat_message hello = MESSAGE("user", "Hello", 5);
    for (int i = 0; i < LEN(directories); i++) {
        char dir[] = "/tmp/chat_template_test_XXXXXX", path[256];
        assert_non_null(mkdtemp(dir));
        if (directories[i].config != NULL)
            write_file(dir, "tokenizer_config.json", directories[i].config);
        if (directories[i].jinja != NULL)
            write_file(dir, "chat_template.jinja", directories[i].jinja);
        struct td_chat_template *t = NULL;
        struct td_err err = {0};
        td_status st = td_chat_template_load(dir, &t, &err);
        if ((st == TD_OK) != (directories[i].st == TD_OK))
            fail_msg("row %d: %s, %s", i, td_status_name(st), err.msg);
        if (st == TD_OK) {
            char *text = NULL;
            size_t n = 0;
            assert_string_equal(td_chat_template_family(t), directories[i].family);
            if (directories[i].want == NULL) {
                assert_int_equal(render(t, &hello, 1, true, &text, &n, &err), TD_ERR_UNSUPPORTED);
            } else {
                assert_int_equal(render(t, &hello, 1, true, &text, &n, &err), TD_OK);
                assert_string_equal(text, directories[i].want);
            }
            free(text);
        } else {
            assert_non_null(strstr(err.msg, directories[i].want));
            assert_null(t);
        }
        td_chat_template_free(t);
        snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
        unlink(path);
        snprintf(path, sizeof path, "%s/chat_template.jinja", dir);
        unlink(path);
        assert_int_equal(rmdir(dir), 0);
    }
}

/* ---- against the real Jinja ------------------------------------------------------------------ */

static uint64_t rng_state = 7;

static int below(int n) { return (int)(td_keyed_step(&rng_state) % (uint64_t)n); }

static json_t *random_content(void)
{
    static const char *const pieces[] = {"Hello",
                                         " ",
                                         "  ",
                                         "\n",
                                         "\n\n",
                                         "\t",
                                         "world",
                                         "h\xc3\xa9llo",
                                         "\xe6\x97\xa5\xe6\x9c\xac",
                                         "\xf0\x9f\x98\x80",
                                         "\xc2\xa0",
                                         "\xe3\x80\x80",
                                         "\x1c",
                                         "<think>",
                                         "</think>",
                                         "<think>\nhm\n</think>\n\nso",
                                         "<|im_end|>",
                                         "[/INST]",
                                         "<<SYS>>",
                                         "</s>",
                                         "<s>",
                                         "'",
                                         "\"",
                                         "\\n",
                                         "{{ x }}",
                                         "{% if %}",
                                         "<tool_response>",
                                         "</tool_response>",
                                         "a=b",
                                         "123",
                                         "\r\n",
                                         "e\xcc\x81",
                                         "\xe2\x80\x8b",
                                         "\xc2\x85"};
    char text[512] = "";
    size_t n = 0;
    for (int i = below(7); i > 0; i--)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s", pieces[below(LEN(pieces))]);
    return json_string(text);
}

static json_t *random_messages(void)
{
    static const char *const roles[] = {"system", "user", "assistant"};
    json_t *list = json_array();
    bool wild = below(5) == 0;
    int n = 1 + below(7), system = !wild && below(2);
    for (int i = 0; i < n + system; i++) {
        const char *role = wild                    ? roles[below(3)]
                           : i < system            ? "system"
                           : (i - system) % 2 == 0 ? "user"
                                                   : "assistant";
        json_array_append_new(list,
                              json_pack("{s:s, s:o}", "role", role, "content", random_content()));
    }
    return list;
}

#define ADD(...) *n += (size_t)snprintf(text + *n, room - *n, __VA_ARGS__)

/* A JSON text of any shape, with keys in any order, blanks, escapes, reals. */
static void random_json(char *text, size_t room, size_t *n, int depth)
{
    static const char *const leaves[] = {"0",
                                         "-17",
                                         "3.5",
                                         "1e-7",
                                         "-0.0",
                                         "1E22",
                                         "0.1",
                                         "1e16",
                                         "123456.0",
                                         "12345678901",
                                         "true",
                                         "false",
                                         "null",
                                         "\"\"",
                                         "\"a b\"",
                                         "\"\\u00e9\\n\"",
                                         "\"\\ud83d\\ude00\"",
                                         "\"h\xc3\xa9 \\\"q\\\" \\\\ / \\/\"",
                                         "\"<tool_call>\"",
                                         "2.5e-5",
                                         "0.0001"};
    static const char *const keys[] = {"type", "description", "properties", "z",      "a", "items",
                                       "enum", "\xc3\xa9\\n", "required",   "default"};
    int kind = depth > 3 ? 0 : below(4);
    if (kind < 2) {
        ADD("%s", leaves[below(LEN(leaves))]);
    } else {
        int count = below(4), first = below(LEN(keys));
        ADD(kind == 2 ? "[" : "{");
        for (int i = 0; i < count; i++) {
            ADD("%s", i == 0 ? "" : below(2) ? "," : " , ");
            if (kind == 3) ADD("\"%s\":%s", keys[(first + 3 * i) % LEN(keys)], below(2) ? "" : " ");
            random_json(text, room, n, depth + 1);
        }
        ADD(kind == 2 ? "]" : "}");
    }
}

static json_t *random_object(void)
{
    char text[8192];
    size_t n_text = 0, *n = &n_text, room = sizeof text;
    int count = below(4);
    ADD("{");
    for (int i = 0; i < count; i++) {
        ADD("%s\"%c\": ", i > 0 ? ", " : "", 'p' + (7 * i) % 11);
        random_json(text, room, n, 0);
    }
    ADD("}");
    assert_true(n_text < sizeof text);
    return json_string(text);
}

static const char *const functions[] = {"get_weather", "send_email", "f", "search.web-2"};

/* As tools are in use: a schema whose properties have types and descriptions. */
static json_t *random_tools(void)
{
    static const char *const types[] = {"\"string\"", "\"number\"", "\"integer\"", "\"boolean\""};
    json_t *list = json_array();
    for (int i = below(3); i >= 0; i--) {
        char text[16384];
        size_t n_text = 0, *n = &n_text, room = sizeof text;
        ADD("{\"type\": \"function\", \"function\": {\"name\": \"%s\", ", functions[i]);
        ADD("\"description\": \"Does h\\u00e9 %d\", \"parameters\": {\"type\": \"object\", ", i);
        ADD("\"properties\": {");
        for (int k = 0, many = below(3); k < many; k++) {
            ADD("%s\"p%d\": {\"type\": %s, \"description\": \"the \\\"p\\\"\"", k > 0 ? ", " : "",
                k, types[below(4)]);
            if (below(3) == 0) {
                ADD(", \"default\": ");
                random_json(text, room, n, 1);
            }
            ADD("}");
        }
        ADD("}, \"required\": []");
        if (below(2)) {
            ADD(", \"x\": ");
            random_json(text, room, n, 0);
        }
        ADD("}}}");
        assert_true(n_text < sizeof text);
        json_array_append_new(list, json_string(text));
    }
    return list;
}

static json_t *random_calls(int *ret_n)
{
    json_t *list = json_array();
    *ret_n = below(3) == 0 ? 2 : 1;
    for (int i = 0; i < *ret_n; i++) {
        char id[10];
        snprintf(id, sizeof id, "call%05d", below(100000));
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:{s:s, s:o}}", "id", id, "type", "function",
                                        "function", "name", functions[below(LEN(functions))],
                                        "arguments", random_object()));
    }
    return list;
}

/* Thoughts by both names that templates have for them; gpt-oss's does not take them beside a text
 * and calls (jinja_eval.c). */
static json_t *with_thoughts(json_t *message)
{
    const json_t *content = json_object_get(message, "content");
    bool is_whole = json_object_get(message, "tool_calls") && json_string_length(content) > 0;
    json_t *thoughts = random_content();
    if (below(2) && json_string_length(thoughts) > 0) {
        json_object_set(message, "reasoning_content", thoughts);
        if (!is_whole) json_object_set(message, "thinking", thoughts);
    }
    json_decref(thoughts);
    return message;
}

/* user, assistant with calls, their answers, assistant, user ... */
static json_t *random_tool_chat(void)
{
    json_t *list = json_array();
    if (below(2))
        json_array_append_new(
            list, json_pack("{s:s, s:o}", "role", "system", "content", random_content()));
    for (int turn = 1 + below(2); turn > 0; turn--) {
        json_array_append_new(list,
                              json_pack("{s:s, s:o}", "role", "user", "content", random_content()));
        if (below(3)) {
            int n;
            json_t *calls = random_calls(&n);
            json_t *said =
                json_pack("{s:s, s:o, s:O}", "role", "assistant", "content",
                          below(2) ? json_string("") : random_content(), "tool_calls", calls);
            json_array_append_new(list, with_thoughts(said));
            for (int i = 0; i < n; i++) {
                json_t *id = json_object_get(json_array_get(calls, (size_t)i), "id");
                json_t *m = json_pack("{s:s, s:o, s:O}", "role", "tool", "content",
                                      random_content(), "tool_call_id", id);
                if (below(2)) json_object_set_new(m, "name", json_string("f"));
                json_array_append_new(list, m);
            }
            json_decref(calls);
            if (turn == 1 && below(2)) break;
        }
        json_array_append_new(list, with_thoughts(json_pack("{s:s, s:o}", "role", "assistant",
                                                            "content", random_content())));
    }
    return list;
}

static json_t *random_chat(size_t template, bool tools)
{
    static const char *const kwargs[] = {"{\"enable_thinking\": false}",
                                         "{\"enable_thinking\": true, \"x\": [1.5]}", "{}"};
    json_t *messages = tools ? random_tool_chat() : random_messages();
    json_t *chat = json_pack("{s:i, s:o, s:b, s:s?, s:s?}", "template", (int)template, "messages",
                             messages, "add_generation_prompt", below(2), "bos_token",
                             below(4)   ? "<s>"
                             : below(2) ? ""
                                        : NULL,
                             "eos_token", below(4) ? "</s>" : NULL);
    if (tools && below(4)) json_object_set_new(chat, "tools", random_tools());
    if (below(3) == 0)
        json_object_set_new(chat, "template_kwargs", json_string(kwargs[below(LEN(kwargs))]));
    return chat;
}

struct tally {
    char name[100];
    const char *family;
    int n_same, n_fail, n_left_out, n_refused;
    int n_tools_same, n_tools_refused; /* of those, of random_tool_chat() */
    char why[TD_ERR_MSG_MAX];
};

static void add_template(json_t *templates, struct tally *tally, const char *name,
                         const char *source)
{
    json_array_append_new(templates, json_string(source));
    snprintf(tally[json_array_size(templates) - 1].name, sizeof tally->name, "%s", name);
}

enum { MAX_TEMPLATES = 200, CHATS_EACH = 60 };

/* Our own snippets, and the templates of other people that are there. */
static void collect_templates(json_t *templates, struct tally *tally)
{
    for (int i = 0; i < LEN(snippets); i++) {
        /* all messages must stand in the text, here before or after the snippet */
        static const char all[] = "{% for m in messages %}{{ m.content }}{% endfor %}";
        char name[32], source[1024];
        snprintf(name, sizeof name, "snippet %d", i);
        snprintf(source, sizeof source, "%s%s%s", i < 2 ? all : "", snippets[i].jinja,
                 i < 2 ? "" : all);
        add_template(templates, tally, name, source);
    }
    DIR *dir = opendir(data_path("chat-templates"));
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        char name[300];
        size_t n = 0;
        if (strstr(e->d_name, ".jinja") == NULL) continue;
        snprintf(name, sizeof name, "chat-templates/%s", e->d_name);
        char *source = read_data(name, &n);
        add_template(templates, tally, e->d_name, source);
        free(source);
    }
    if (dir != NULL)
        closedir(dir);
    else
        printf("  no %s: only our own snippets\n", data_path("chat-templates"));
    json_t *root = read_json("chat-templates/expected_renderings.json"),
           *cases = json_object_get(root, "cases");
    for (size_t i = 0; i < json_array_size(cases); i++)
        add_template(templates, tally,
                     json_string_value(json_object_get(json_array_get(cases, i), "name")),
                     json_string_value(json_object_get(json_array_get(cases, i), "template_str")));
    static const char *const configs[] = {"qwen2.5", "qwen3", "phi-4-mini"};
    for (int i = 0; i < LEN(configs); i++) {
        char name[100];
        snprintf(name, sizeof name, "tokenizers-hf/config-only/%s/tokenizer_config.json",
                 configs[i]);
        json_t *config = read_json(name);
        if (json_is_string(json_object_get(config, "chat_template")))
            add_template(templates, tally, configs[i],
                         json_string_value(json_object_get(config, "chat_template")));
        json_decref(config);
    }
    json_decref(root);
}

/* What Jinja makes of the work, or NULL: there is no jinja2 for Python. */
static json_t *ask_jinja(const json_t *work)
{
    char path[] = "/tmp/chat_template_test_XXXXXX", command[128];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(json_dump_file(work, path, 0), 0);
    snprintf(command, sizeof command, "/usr/bin/python3 tests/tools/render_chat.py %s", path);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    json_t *answers = json_loadf(pipe, JSON_ALLOW_NUL, NULL);
    int status = pclose(pipe);
    unlink(path);
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 127)) {
        printf("no jinja2 for /usr/bin/python3\n");
        return NULL;
    }
    assert_int_equal(status, 0);
    return answers;
}

/* One chat: we render what Jinja does, or refuse it for a reason that is known. */
static void compare(const char *source, const json_t *chat, const json_t *answer, bool has_tools,
                    struct tally *y)
{
    const json_t *want = json_object_get(answer, "text");
    struct td_chat_message m[MAX_MESSAGES];
    struct td_chat_json tools[MAX_CALLS];
    const json_t *given = json_object_get(chat, "tools");
    struct td_chat all = {.messages = m,
                          .n_messages = (size_t)to_messages(json_object_get(chat, "messages"), m),
                          .add_generation_prompt =
                              json_is_true(json_object_get(chat, "add_generation_prompt")),
                          .tools = tools,
                          .n_tools = json_array_size(given),
                          .template_kwargs = to_json(json_object_get(chat, "template_kwargs"))};
    assert_true(all.n_tools <= MAX_CALLS);
    for (size_t k = 0; k < all.n_tools; k++) tools[k] = to_json(json_array_get(given, k));
    struct td_chat_template *t =
        parse(source, json_string_value(json_object_get(chat, "bos_token")),
              json_string_value(json_object_get(chat, "eos_token")));
    char *text = NULL;
    size_t bytes = 0;
    struct td_err err = {0};
    td_status st = td_chat_template_render(t, &all, &text, &bytes, &err);
    char *chat_text = json_dumps(chat, 0);
    y->family = td_chat_template_family(t); /* static storage */
    if (st == TD_OK && want == NULL)
        fail_msg("%s: Jinja says %s\n%s\nrenders\n%s", y->name,
                 json_string_value(json_object_get(answer, "error")), chat_text, text);
    if (st == TD_OK &&
        (bytes != json_string_length(want) || memcmp(text, json_string_value(want), bytes) != 0))
        fail_msg("%s: %s\nrenders\n%s\nJinja renders\n%s", y->name, chat_text, text,
                 json_string_value(want));
    if (st == TD_ERR_INVALID && want != NULL)
        fail_msg("%s: %s\n%s, but Jinja renders\n%s", y->name, chat_text, err.msg,
                 json_string_value(want));
    if (st == TD_OK) {
        y->n_same++;
        y->n_tools_same += has_tools;
    } else if (want == NULL) {
        y->n_fail++;
    } else if (strstr(err.msg, "leaves out") != NULL || strstr(err.msg, "does not have") != NULL ||
               strstr(err.msg, "has no place") != NULL) {
        y->n_left_out++;
    } else {
        assert_int_equal(st, TD_ERR_UNSUPPORTED);
        y->n_refused++;
        y->n_tools_refused += has_tools;
        memcpy(y->why, err.msg, sizeof y->why);
    }
    free(chat_text);
    free(text);
    td_chat_template_free(t);
}

/* Published templates of the families of models that run (README.md), beside those that `sure`
 * names by their kind. Each renders chats, and refuses none that has no tools. */
static const char *const of_models[] = {
    "openai-gpt-oss-120b.jinja",
    "GLM-4.6.jinja",
    "GLM-4.7-Flash.jinja",
    "ChatGLM3",
    "ChatGLM4",
    "MiniMax-M2.jinja",
    "moonshotai-Kimi-K2.jinja",
    "Kimi-K2-Instruct.jinja",
    "Kimi-K2-Thinking.jinja",
    "DeepSeek-V2",
    "deepseek-ai-DeepSeek-V3.1.jinja",
    "llama-cpp-deepseek-r1.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "HuggingFaceTB-SmolLM3-3B.jinja",
    "ibm-granite-granite-3.3-2B-Instruct.jinja",
    "ibm-granite/granite-3.0-8b-instruct",
    "CohereForAI/c4ai-command-r-plus",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
    "Llama-3",
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "meta-llama-Llama-3.2-3B-Instruct.jinja",
    "meta-llama-Llama-3.3-70B-Instruct.jinja",
};

static bool is_of_model(const struct tally *y)
{
    for (int k = 0; k < LEN(of_models); k++)
        if (strcmp(y->name, of_models[k]) == 0) return true;
    return false;
}

/* Families that we know render every chat, but for what is left out. */
static void judge(const struct tally *y)
{
    if (is_of_model(y) && y->n_same == y->n_tools_same)
        fail_msg("%s renders no chat without tools: %s", y->name, y->why);
    static const char *const sure[] = {
        "chatml",     "llama-2", "mistral-v1", "mistral-v3", "mistral-v3-tekken",
        "mistral-v7", "qwen2.5", "qwen3",      "phi-3",      "phi-4",
        "gemma"};
    bool must = strncmp(y->name, "snippet", 7) == 0 || is_of_model(y);
    for (int k = 0; k < LEN(sure); k++) must |= strcmp(y->family, sure[k]) == 0;
    static const char *const tools[] = {"Qwen-Qwen2.5-7B-Instruct.jinja",
                                        "Qwen-Qwen3-0.6B.jinja",
                                        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
                                        "meta-llama-Llama-3.1-8B-Instruct.jinja",
                                        "meta-llama-Llama-3.3-70B-Instruct.jinja",
                                        "mistralai-Mistral-Nemo-Instruct-2407.jinja",
                                        "Mistral-Small-3.2-24B-Instruct-2506.jinja"};
    bool with_tools = false;
    for (int k = 0; k < LEN(tools); k++) with_tools |= strcmp(y->name, tools[k]) == 0;
    if (with_tools && y->n_tools_same == 0) fail_msg("%s renders no chat with tools", y->name);
    /* of the others some write a schema or an argument as Python would, which is refused */
    int n_bad = y->n_refused - (with_tools ? 0 : y->n_tools_refused);
    if ((must || with_tools) && n_bad > 0)
        fail_msg("%s (%s) refuses %d chats: %s", y->name, y->family, y->n_refused, y->why);
}

static void against_jinja(void **state)
{
    (void)state;
    static struct tally tally[MAX_TEMPLATES];
    json_t *templates = json_array(), *chats = json_array();
    collect_templates(templates, tally);
    size_t n_templates = json_array_size(templates);
    assert_true(n_templates <= MAX_TEMPLATES);
    for (size_t i = 0; i < n_templates; i++)
        for (int k = 0; k < CHATS_EACH; k++)
            json_array_append_new(chats, random_chat(i, k % 3 == 2));
    json_t *work = json_pack("{s:O, s:O}", "templates", templates, "chats", chats);
    json_t *answers = ask_jinja(work);
    if (!answers) {
        json_decref(work);
        json_decref(templates);
        json_decref(chats);
        skip();
    }
    assert_int_equal(json_array_size(answers), json_array_size(chats));

    for (size_t i = 0; i < json_array_size(chats); i++) {
        const json_t *chat = json_array_get(chats, i);
        size_t index = (size_t)json_integer_value(json_object_get(chat, "template"));
        compare(json_string_value(json_array_get(templates, index)), chat,
                json_array_get(answers, i), i % CHATS_EACH % 3 == 2, &tally[index]);
    }

    int n_same = 0, n_fail = 0, n_left_out = 0, n_refused = 0, n_whole = 0, n_of_models = 0;
    for (size_t i = 0; i < n_templates; i++) {
        const struct tally *y = &tally[i];
        n_same += y->n_same;
        n_fail += y->n_fail;
        n_left_out += y->n_left_out;
        n_refused += y->n_refused;
        n_whole += y->n_refused == 0 && y->n_same > 0;
        n_of_models += is_of_model(y);
        if (strncmp(y->name, "snippet", 7) != 0)
            printf("  %-18s %2d same (%2d with tools), %2d fail in both, %2d leave out, %2d refused"
                   "  %.60s  %s\n",
                   y->family, y->n_same, y->n_tools_same, y->n_fail, y->n_left_out, y->n_refused,
                   y->name, y->why);
        judge(y);
    }
    assert_true(n_same > 40 * LEN(snippets));
    if (n_templates > LEN(snippets)) assert_int_equal(n_of_models, LEN(of_models));
    printf("  %zu templates, %zu chats: %d the same, %d fail in both, %d left out, %d refused; %d "
           "templates without a refusal\n",
           n_templates, json_array_size(chats), n_same, n_fail, n_left_out, n_refused, n_whole);
    json_decref(answers);
    json_decref(work);
    json_decref(templates);
    json_decref(chats);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expected_renderings),
        cmocka_unit_test(mistral_prompts),
        cmocka_unit_test(families),
        cmocka_unit_test(language_by_hand),
        cmocka_unit_test(qwen3_thinking),
        cmocka_unit_test(tools_by_hand),
        cmocka_unit_test(tools_have_limits),
        cmocka_unit_test(dates),
        cmocka_unit_test(refuses_by_name),
        cmocka_unit_test(steps_end),
        cmocka_unit_test(numbers_of_a_request),
        cmocka_unit_test(stops_at_its_limit),
        cmocka_unit_test(finds_messages_in_any_order),
        cmocka_unit_test(refuses_messages),
        cmocka_unit_test(deep_sources_are_bounded),
        cmocka_unit_test(loads_directories),
        cmocka_unit_test(against_jinja),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
