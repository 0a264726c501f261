/* engine_bench_counts.c - counts the operations and bytes of engine_bench_counts.h from the tables
 * of the model's family.
 *
 * A layer has two halves. All rows take the first, up to the K and V that it stores: q, k and v,
 * and of latent attention what absorbs K into q. In the last layer wanted rows alone take the
 * second: attention, of latent attention what expands V, o, and the MLP or the experts. */
#include "cli/engine_bench_counts.h"

#include <math.h>

#include "common/model/family.h"

struct halves {
    double first, second; /* multiplications of a row with weights */
};

static double elements(const struct td_model_config *m, const struct td_tensor_row *t)
{
    struct td_dim_size rows = td_dim_size(m, t->rows), cols = td_dim_size(m, t->cols);
    return (double)rows.n_units * rows.unit * cols.n_units * cols.unit;
}

/* Adds `times` the matrices of a table. */
static void add_table(const struct td_model_config *m, const struct td_tensor_row *table,
                      double times, struct halves *h)
{
    for (const struct td_tensor_row *t = table; t && t->name; t++) {
        if (t->cols == TD_DIM_NONE || !td_tensor_is_wanted(m, t)) continue;
        double n = times * elements(m, t);
        if (t->into == TD_INTO_QKV || t->into == TD_INTO_Q_B) {
            h->first += n;
        } else if (t->into == TD_INTO_KV_B) {
            double absorbed = n * m->latent.nope / (m->latent.nope + m->latent.v);
            h->first += absorbed;
            h->second += n - absorbed;
        } else {
            h->second += n;
        }
    }
}

/* The number of keys that the rows of a prompt see. */
static double keys_seen(double n, double window)
{
    return window > 0 && n > window ? window * (window + 1) / 2 + (n - window) * window
                                    : n * (n + 1) / 2;
}

static double keys_of_last(double n, double window)
{
    return window > 0 && n > window ? window : n;
}

struct engine_bench_ops engine_bench_prefill_ops(const struct td_model_config *m, double n)
{
    /* V of latent attention is the beginning of the row of K */
    double v_dim = m->latent.kv_rank ? m->latent.kv_rank : m->head_dim,
           key_ops = 2.0 * m->n_heads * (m->head_dim + v_dim);
    struct engine_bench_ops ops = {.products = 2.0 * m->vocab * m->hidden};
    for (int32_t i = 0; i < m->n_layers; i++) {
        bool is_last = i == m->n_layers - 1;
        struct td_layer_spec spec;
        struct halves h = {0};
        td_model_config_layer(m, i, &spec);
        for (int k = 0; k < TD_LAYER_TABLES; k++) add_table(m, spec.tensors[k], 1, &h);
        add_table(m, spec.expert_tensors, m->experts.n_used, &h);
        ops.products += 2 * n * h.first + 2 * (is_last ? 1 : n) * h.second;
        ops.attention +=
            key_ops * (is_last ? keys_of_last(n, spec.window) : keys_seen(n, spec.window));
    }
    return ops;
}

static int32_t n_mixtures(const struct td_model_config *m)
{
    int32_t n = 0;
    for (int32_t i = 0; i < m->n_layers; i++) n += td_model_config_has_experts(m, i);
    return n;
}

double engine_bench_weight_bytes(const struct td_model_config *m, double row_bytes,
                                 double expert_bytes, double active)
{
    double layers = n_mixtures(m);
    if (layers == 0) return row_bytes;
    return row_bytes +
           expert_bytes / (layers * m->experts.n) * (active - layers * m->experts.n_used);
}

double engine_bench_even_experts(const struct td_model_config *m, double n_rows)
{
    double n = m->experts.n;
    return n > 0 ? n_mixtures(m) * n * (1 - pow(1 - m->experts.n_used / n, n_rows)) : 0;
}

double engine_bench_kv_bytes(const struct td_model_config *m, const struct td_kv_layout *kv,
                             double n_seqs, double context)
{
    double keys = 0;
    for (int32_t i = 0; i < m->n_layers; i++) {
        struct td_layer_spec spec;
        td_model_config_layer(m, i, &spec);
        keys += keys_of_last(context, spec.window);
    }
    return n_seqs * keys * (double)kv->layer_bytes / kv->block_size;
}
