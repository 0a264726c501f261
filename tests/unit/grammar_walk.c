/* grammar_walk - for grammar_schema.py and grammar_keywords.py: random outputs of a JSON schema's
 * automaton.
 *
 * Reads lines {"schema": text, "texts": [text, ...]}; answers each with a line: {"error": text}, or
 * {"outputs": [text, ...], "taken": [for each text: is it an output?]}.
 * grammar_walk SEED N_OUTPUTS */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/random.h"
#include "common/text/grammar.h"

#define MAX_OUTPUT 4000

static uint64_t rng;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng, n); }

/* Any bytes that may come, but what ends soon is liked better: quotes and closing brackets, and
 * the more the longer the text. False: it has become too long. */
static bool output(struct td_matcher *m, char *text, size_t *ret_n)
{
    static const char closing[] = "\"]}";
    int32_t state = td_matcher_start(m), next = 0;
    size_t n = 0;
    while (n < MAX_OUTPUT) {
        bool found = false;
        if (td_matcher_accepts(m, state) && rnd(4) == 0) break;
        for (int i = 0; i < 3 && !found && rnd(1 + (uint32_t)(400 / (n + 8))) == 0; i++)
            if (!td_matcher_advance(m, state, &closing[i], 1, &next) && next != TD_MATCHER_DEAD)
                text[n++] = closing[i], state = next, found = true;
        /* ASCII mostly, so that random walks are not all of rare characters */
        for (uint32_t at = rnd(256), ascii = rnd(8), i = 0; i < 512 && !found; i++) {
            char c = (char)((at + i) & (ascii && i < 256 ? 127 : 255));
            if (td_matcher_advance(m, state, &c, 1, &next) || next == TD_MATCHER_DEAD) continue;
            text[n++] = c, state = next, found = true;
        }
        if (!found) break;
    }
    *ret_n = n;
    if (n < MAX_OUTPUT && !td_matcher_accepts(m, state)) abort(); /* a state without a way on */
    return n < MAX_OUTPUT;
}

static bool takes(struct td_matcher *m, const char *text, size_t n)
{
    int32_t state;
    return !td_matcher_advance(m, td_matcher_start(m), text, n, &state) &&
           td_matcher_accepts(m, state);
}

int main(int argc, char **argv)
{
    static char line[1 << 20], text[MAX_OUTPUT + 1];
    if (argc != 3) return 2;
    rng = td_random_stream(strtoull(argv[1], NULL, 10), 0).s;
    int n_outputs = (int)strtol(argv[2], NULL, 10);
    while (fgets(line, sizeof line, stdin)) {
        json_t *in = json_loads(line, 0, NULL), *out = json_object();
        const json_t *schema = json_object_get(in, "schema");
        struct td_grammar_text t = {json_string_value(schema), json_string_length(schema)};
        struct td_grammar *g = NULL;
        struct td_matcher *m = NULL;
        struct td_err err = {0};
        if (td_grammar_compile(TD_GRAMMAR_JSON_SCHEMA, &t, 1, &g, &err) ||
            td_matcher_create(g, NULL, NULL, 0, &m, &err)) {
            json_object_set_new(out, "error", json_string(err.msg));
        } else {
            json_t *outputs = json_array(), *taken = json_array(), *v;
            size_t i;
            for (int k = 0; k < n_outputs; k++) {
                size_t n;
                if (output(m, text, &n)) json_array_append_new(outputs, json_stringn(text, n));
            }
            json_array_foreach(json_object_get(in, "texts"), i, v) json_array_append_new(
                taken, json_boolean(takes(m, json_string_value(v), json_string_length(v))));
            json_object_set_new(out, "outputs", outputs);
            json_object_set_new(out, "taken", taken);
        }
        td_matcher_free(m);
        td_grammar_free(g);
        char *answer = json_dumps(out, JSON_COMPACT | JSON_ENSURE_ASCII);
        puts(answer);
        free(answer);
        json_decref(in);
        json_decref(out);
    }
    return 0;
}
