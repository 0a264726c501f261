/* grammar_fuzz.c - a JSON schema, an expression, rules or tools from outside (first byte: which):
 * what is refused says why; what is accepted runs, and each byte that a mask allows can be taken.
 */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static struct td_token_trie *bytes_vocab(void)
{
    static char bytes[256];
    static struct td_grammar_text texts[256];
    struct td_token_trie *trie;
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        texts[i] = (struct td_grammar_text){&bytes[i], 1};
    }
    TD_ASSERT(td_token_trie_build(texts, 256, &trie, NULL) == TD_OK);
    return trie;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const enum td_grammar_kind kinds[] = {TD_GRAMMAR_JSON_SCHEMA, TD_GRAMMAR_REGEX,
                                                 TD_GRAMMAR_EBNF};
    static struct td_token_trie *trie;
    struct td_grammar *g = NULL;
    struct td_matcher *m = NULL;
    struct td_err err = {0};
    if (n_bytes < 1) return 0;
    if (!trie) trie = bytes_vocab();
    struct td_grammar_text text = {(const char *)data + 1, n_bytes - 1};
    enum td_grammar_kind kind = data[0] == 'T' ? TD_GRAMMAR_TOOL_CALLS : kinds[data[0] % 3];
    td_status s = td_grammar_compile(kind, &text, 1, &g, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
        return 0;
    }
    if (td_matcher_create(g, trie, NULL, 0, &m, &err)) {
        TD_ASSERT(err.msg[0]);
        td_grammar_free(g);
        return 0;
    }
    int32_t state = td_matcher_start(m);
    for (size_t i = 0; i < 32; i++) {
        const uint64_t *mask;
        unsigned byte = data[i % n_bytes] + (unsigned)i, tries = 0;
        if (td_matcher_mask(m, state, &mask)) break;
        while (tries < 256 && !(mask[byte % 256 / 64] >> byte % 64 & 1)) byte++, tries++;
        TD_ASSERT(tries < 256 || td_matcher_accepts(m, state));
        if (tries == 256) break;
        char c = (char)(byte % 256);
        if (td_matcher_advance(m, state, &c, 1, &state)) break;
        TD_ASSERT(state != TD_MATCHER_DEAD);
    }
    td_matcher_free(m);
    td_grammar_free(g);
    return 0;
}
