/* tokenize.c - `tandem tokenize`: turns a text into ids (or ids into text): the argument, or stdin,
 * one line per input line or all of it as one text. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "common/text/tokenizer.h"

struct tokenize_config {
    const char *model;
    bool decode, whole, add_special, keep_special;
};

#define OFF(f) offsetof(struct tokenize_config, f)
// clang-format off
static const struct td_option options[] = {
    {"model", TD_OPT_STR, NULL, 0, 0, NULL, OFF(model),
     "Hugging Face model directory or GGUF file"},
    {"decode", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(decode),
     "the input holds ids (separated by spaces or commas); print text"},
    TD_OPTION_VARIABLE("tokenize_decode", "decode"), /* TANDEM_DECODE is the workers' number */
    {"whole", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(whole), "all of stdin is one text"},
    {"add_special", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(add_special),
     "add the special tokens of the post-processor (BOS ...)"},
    {"keep_special", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(keep_special),
     "with --decode: print special tokens too"},
    {0},
};
// clang-format on

static td_status encode_one(const struct td_tokenizer *t, const struct tokenize_config *c,
                            const char *text, size_t n, struct td_err *err)
{
    struct td_token_list list = {0};
    td_status s = td_tokenizer_encode(t, text, n, c->add_special, SIZE_MAX / 8, &list, err);
    for (size_t i = 0; !s && i < list.n; i++) printf(i ? " %d" : "%d", list.ids[i]);
    if (!s) putchar('\n');
    td_token_list_free(&list);
    return s;
}

static td_status decode_one(const struct td_tokenizer *t, const struct tokenize_config *c,
                            const char *text, size_t n, struct td_err *err)
{
    struct td_token_list list = {0};
    const char *p = text, *end = text + n;
    td_status s = TD_OK;
    while (!s) {
        while (p < end && (isspace((unsigned char)*p) || *p == ',')) p++;
        if (p == end) break;
        char *after;
        errno = 0;
        long id = strtol(p, &after, 10);
        if (after == p || errno || id < 0 || id > INT32_MAX) {
            s = td_fail(err, TD_ERR_INVALID, "\"%.20s\" is not a token id", p);
            break;
        }
        p = after;
        if (list.n == list.capacity) {
            list.capacity = list.capacity ? list.capacity * 2 : 256;
            int32_t *grown = realloc(list.ids, list.capacity * sizeof *grown);
            if (!grown) {
                s = td_fail(err, TD_ERR_NOMEM, "out of memory");
                break;
            }
            list.ids = grown;
        }
        list.ids[list.n++] = (int32_t)id;
    }
    char *out = NULL;
    size_t out_bytes = 0;
    if (!s) s = td_tokenizer_decode(t, list.ids, list.n, !c->keep_special, &out, &out_bytes, err);
    if (!s) fwrite(out, 1, out_bytes, stdout);
    if (!s && !c->whole) putchar('\n');
    free(out);
    td_token_list_free(&list);
    return s;
}

int cli_tokenize(int argc, char **argv)
{
    struct tokenize_config c = {0};
    struct td_err err = {0};
    struct td_tokenizer *t = NULL;
    const char *given[1] = {NULL};
    size_t n_given = 0;
    if (td_options_load(options, &c, "tandem tokenize",
                        "TEXT, or each line of stdin, to token ids on stdout (or ids to text, "
                        "--decode): tandem tokenize [options] [TEXT]",
                        argc, argv, given, 1, &n_given, &err) ||
        td_tokenizer_load(c.model, &t, &err))
        return td_die("tandem tokenize", &err);
    td_status s = TD_OK;
    td_status (*one)(const struct td_tokenizer *, const struct tokenize_config *, const char *,
                     size_t, struct td_err *) = c.decode ? decode_one : encode_one;
    if (n_given) {
        s = one(t, &c, given[0], strlen(given[0]), &err);
    } else if (c.whole) {
        char *text = NULL;
        size_t n = 0;
        s = cli_read_all(stdin, &text, &n, &err);
        if (!s) s = one(t, &c, text, n, &err);
        free(text);
    } else {
        char *line = NULL;
        size_t capacity = 0;
        ssize_t n;
        for (unsigned long at = 1; !s && (n = getline(&line, &capacity, stdin)) >= 0; at++) {
            if (n > 0 && line[n - 1] == '\n') line[--n] = 0;
            s = one(t, &c, line, (size_t)n, &err);
            if (s) td_err_prefix(&err, "line %lu", at);
        }
        free(line);
    }
    td_tokenizer_free(t);
    return s ? td_die("tandem tokenize", &err) : 0;
}
