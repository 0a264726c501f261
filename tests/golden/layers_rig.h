/* layers_rig.h - what a forward tells of finished layers is true: how often, in which order, and
 * what lies in the cache at that moment. */
#ifndef TD_TESTS_LAYERS_RIG_H
#define TD_TESTS_LAYERS_RIG_H

#include "tests/golden/model_rig.h"

enum { LAYERS_CALLS_MAX = 64 };

struct layers_seen {
    struct rig *g;
    int n_calls;
    int32_t n_layers[LAYERS_CALLS_MAX];
    uint8_t *cache[LAYERS_CALLS_MAX]; /* as it was then */
};

static inline void layers_note(void *ctx, int32_t n_layers)
{
    struct layers_seen *s = ctx;
    assert_true(s->n_calls < LAYERS_CALLS_MAX);
    s->n_layers[s->n_calls] = n_layers;
    s->cache[s->n_calls++] = rig_cache_copy(s->g);
}

/* One row's K and V of one layer: as in `want`, or (NULL) still poison? */
static inline bool layers_row(const struct rig *g, const uint8_t *cache, const uint8_t *want,
                              int32_t seq, int32_t position, int32_t layer)
{
    const struct td_kv_layout *l = &g->kv;
    uint8_t nan[4096];
    memset(nan, 0xff, sizeof nan);
    assert_true(l->row_bytes <= sizeof nan);
    for (int32_t k = 0; k < 2 * l->n_kv_heads; k++) {
        size_t at =
            (size_t)g->tables[seq][position / l->block_size] * l->block_bytes +
            (size_t)layer * l->layer_bytes +
            ((size_t)k * (size_t)l->block_size + (size_t)(position % l->block_size)) * l->row_bytes;
        if (memcmp(cache + at, want ? want + at : nan, l->row_bytes) != 0) return false;
    }
    return true;
}

/* A prompt in chunks of `chunk`, layers told in groups of `every`. logits: of the last row of
 * each chunk, of all its rows, or of none. strict: nothing of the layers behind is there yet,
 * since this table never runs ahead. */
static inline void layers_check(struct rig *g, int32_t seq, const int32_t *tokens, int32_t n,
                                int32_t chunk, int32_t every, int logits, bool strict)
{
    int32_t n_layers = g->kv.n_layers, positions[256], row_seq[256] = {0}, wanted[256];
    const int32_t *table = g->tables[seq];
    rig_cache_clear(g);
    for (int32_t done = 0, m; done < n; done += m) {
        struct layers_seen s = {.g = g};
        struct td_err err = {0};
        m = n - done < chunk ? n - done : chunk;
        for (int32_t i = 0; i < m; i++) {
            positions[i] = done + i;
            wanted[i] = logits == 1 ? m - 1 : i;
        }
        const struct td_forward_layers layers = {.done = layers_note, .ctx = &s, .every = every};
        struct td_forward_args a = {.tokens = tokens + done,
                                    .positions = positions,
                                    .row_seq = row_seq,
                                    .block_tables = &table,
                                    .n_rows = m,
                                    .kv_base = g->cache,
                                    .kv = &g->kv,
                                    .logit_rows = wanted,
                                    .n_logit_rows = logits == 1 ? 1
                                                    : logits    ? m
                                                                : 0,
                                    .layers = &layers,
                                    .err = &err};
        float *out = NULL;
        if (td_model_forward(g->model, g->ws, &a, &out)) fail_msg("forward: %s", err.msg);
        bool is_graph = td_model_device(g->model) && m == 1 && logits; /* a decode step */
        assert_int_equal(s.n_calls, is_graph ? 0 : (n_layers + every - 1) / every);
        uint8_t *after = rig_cache_copy(g);
        for (int c = 0; c < s.n_calls; c++) {
            assert_int_equal(s.n_layers[c],
                             (c + 1) * every < n_layers ? (c + 1) * every : n_layers);
            for (int32_t i = 0; i < m; i++)
                for (int32_t layer = 0; layer < n_layers; layer++) {
                    bool told = layer < s.n_layers[c];
                    if (told && !layers_row(g, s.cache[c], after, seq, done + i, layer))
                        fail_msg("call %d: layer %d of row %d is not there", c, layer, i);
                    if (told && layers_row(g, s.cache[c], NULL, seq, done + i, layer))
                        fail_msg("call %d: layer %d of row %d is poison", c, layer, i);
                    if (!told && strict && !layers_row(g, s.cache[c], NULL, seq, done + i, layer))
                        fail_msg("call %d: layer %d of row %d is there", c, layer, i);
                }
            free(s.cache[c]);
        }
        free(after);
    }
}

static inline void layers_check_all(struct rig *g, bool strict)
{
    int32_t tokens[40], n = 37;
    for (int32_t i = 0; i < n; i++) tokens[i] = 1 + i * 7 % (g->vocab - 1);
    static const int32_t chunks[] = {37, 16, 9, 1};
    for (int k = 0; k < 4; k++)
        for (int32_t every = 1; every <= g->kv.n_layers + 1; every++)
            for (int logits = 0; logits < 3; logits++)
                if (chunks[k] > 1 || every == 2)
                    layers_check(g, k, tokens, n, chunks[k], every, logits, strict);
}

#endif
