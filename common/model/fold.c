/* fold.c - see fold.h. */
#include "common/model/fold.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/progress.h"
#include "common/base/random.h"
#include "common/model/families/families.h"
#include "common/model/quantize_internal.h"
#include "kernels/quantize.h"

#define STEPS 10            /* of the exponent, in AWQ's search */
#define SEARCH_ROWS_MAX 256 /* of a matrix, that the search rounds: every n-th */
#define N_MATRICES_MAX 3

/* The matrices behind an input, by their names behind "model.layers.N.". */
static const char *const matrices[2][N_MATRICES_MAX] = {
    {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"},
    {"mlp.gate_proj.weight", "mlp.up_proj.weight", NULL}};
static const char *const norms[2] = {"input_layernorm.weight", "post_attention_layernorm.weight"};

/* ---- calibration ----------------------------------------------------------------------------- */

/* Whether the layers have Llama's norms in Llama's places, and their weights as they count: scales
 * are folded into no others. */
static bool can_fold(const struct td_model_config *c)
{
    const struct td_family *family = td_families[c->arch];
    struct td_layer_spec spec;
    td_model_config_layer(c, 0, &spec);
    return !family->norms_less_1 && !spec.parallel && !c->norm_centres &&
           spec.tensors[0] == td_std_attention && spec.tensors[1] == td_std_mlp;
}

td_status td_calibration_create(const struct td_model_config *c, struct td_calibration *ret,
                                struct td_err *err)
{
    if (!can_fold(c))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "model_type is %s: scales of inputs are folded into norms and matrices of "
                       "models like Llama alone",
                       td_families[c->arch]->model_type);
    struct td_calibration k = {.n_inputs = 2 * c->n_layers, .hidden = c->hidden, .rng_state = 1};
    size_t n = (size_t)k.n_inputs * (size_t)k.hidden;
    k.max = calloc(n, sizeof *k.max);
    k.sum = calloc(n, sizeof *k.sum);
    k.rows = calloc(n * TD_CALIBRATION_ROWS, sizeof *k.rows);
    k.n_seen = calloc((size_t)k.n_inputs, sizeof *k.n_seen);
    if (!k.max || !k.sum || !k.rows || !k.n_seen) {
        td_calibration_free(&k);
        return td_fail(err, TD_ERR_NOMEM, "calibration: no memory for %zu channels", n);
    }
    *ret = k;
    return TD_OK;
}

void td_calibration_free(struct td_calibration *c)
{
    free(c->max);
    free(c->sum);
    free(c->rows);
    free(c->n_seen);
    *c = (struct td_calibration){0};
}

/* Which of the kept rows a new one replaces; -1: none. Every row is kept with the same probability
 * (Vitter 1985, algorithm R). */
static int64_t place_of_row(struct td_calibration *c, int32_t input)
{
    int64_t seen = c->n_seen[input]++;
    if (seen < TD_CALIBRATION_ROWS) return seen;
    int64_t at = td_random_index(&c->rng_state, (uint64_t)(seen + 1));
    return at < TD_CALIBRATION_ROWS ? at : -1;
}

void td_calibration_observe(void *ctx, int32_t input, const float *x, int32_t n_rows, int32_t dim)
{
    struct td_calibration *c = ctx;
    TD_ASSERT(input >= 0 && input < c->n_inputs && dim == c->hidden);
    size_t at = (size_t)input * (size_t)dim;
    for (int32_t r = 0; r < n_rows; r++, x += dim) {
        int64_t place = place_of_row(c, input);
        if (place >= 0)
            memcpy(c->rows + (at * TD_CALIBRATION_ROWS + (size_t)place * (size_t)dim), x,
                   (size_t)dim * sizeof *x);
        for (int32_t j = 0; j < dim; j++) {
            float size = fabsf(x[j]);
            if (size > c->max[at + (size_t)j]) c->max[at + (size_t)j] = size;
            c->sum[at + (size_t)j] += (double)size;
        }
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

static td_status fold_create(const struct td_calibration *c, struct td_fold *f, struct td_err *err)
{
    size_t n = (size_t)c->n_inputs * (size_t)c->hidden;
    *f = (struct td_fold){.n_inputs = c->n_inputs, .hidden = c->hidden};
    f->scales = malloc(n * sizeof *f->scales);
    if (!f->scales) return td_fail(err, TD_ERR_NOMEM, "no memory for %zu scales", n);
    for (size_t i = 0; i < n; i++) f->scales[i] = 1;
    return TD_OK;
}

void td_fold_free(struct td_fold *f)
{
    free(f->scales);
    *f = (struct td_fold){0};
}

void td_fold_piece(const struct td_fold *fold, const char *name, struct td_piece *p)
{
    int layer, at = 0;
    if (!fold || sscanf(name, "model.layers.%4d.%n", &layer, &at) != 1 || !at) return;
    for (int i = 0; i < 2; i++) {
        if (2 * layer + i >= fold->n_inputs) return;
        const float *scales = fold->scales + (size_t)(2 * layer + i) * (size_t)fold->hidden;
        if (strcmp(name + at, norms[i]) == 0) p->over = scales;
        for (int k = 0; k < N_MATRICES_MAX && matrices[i][k]; k++)
            if (strcmp(name + at, matrices[i][k]) == 0) p->times = scales;
    }
}

/* The matrix number k behind an input, unfolded; false: there is none, or it has another shape. */
static bool find_matrix(const struct td_quantize *q, int32_t input, int k, struct td_piece *ret,
                        const struct td_format **ret_rounded)
{
    char name[128];
    const char *rest = matrices[input % 2][k];
    if (!rest) return false;
    snprintf(name, sizeof name, "model.layers.%d.%s", input / 2, rest);
    const struct td_tensor *t = td_checkpoint_find(q->checkpoint, name);
    if (!t || !t->format || t->n_dims != 2 || t->shape[1] != q->config->hidden) return false;
    *ret = (struct td_piece){.from = t, .n_rows = t->shape[0], .n_cols = t->shape[1]};
    if (ret_rounded) *ret_rounded = td_mix_format(q->mix, q->config, name, ret->n_cols, t->format);
    return true;
}

static td_status no_number(const struct td_quantize *q, const struct td_piece *p,
                           struct td_err *err)
{
    return td_fail(err, TD_ERR_CORRUPT, "%s: tensor %s: a value is infinite or no number", q->from,
                   p->from->name);
}

static float power_of_two(float v)
{
    float e = rintf(log2f(v));
    return exp2f(e < -10 ? -10 : e > 10 ? 10 : e); /* NaN of 0 / 0 is kept out by the caller */
}

td_status td_fold_smooth(const struct td_quantize *q, const struct td_calibration *c, float alpha,
                         struct td_fold *ret, struct td_err *err)
{
    struct td_fold f;
    int32_t n = c->hidden;
    float *row = malloc((size_t)n * sizeof *row), *most = malloc((size_t)n * sizeof *most);
    td_status s = row && most ? fold_create(c, &f, err)
                              : td_fail(err, TD_ERR_NOMEM, "no memory for %d columns", n);
    for (int32_t input = 0; input < c->n_inputs && !s; input++) {
        struct td_piece p;
        memset(most, 0, (size_t)n * sizeof *most);
        for (int k = 0; k < N_MATRICES_MAX && find_matrix(q, input, k, &p, NULL); k++)
            for (int64_t r = 0; r < p.n_rows && !s; r++) {
                if (!td_piece_read_row(&p, r, row)) s = no_number(q, &p, err);
                for (int32_t j = 0; j < n; j++) most[j] = fmaxf(most[j], fabsf(row[j]));
            }
        for (int32_t j = 0; j < n && !s; j++) {
            float x = c->max[(size_t)input * (size_t)n + (size_t)j];
            if (x > 0 && most[j] > 0)
                f.scales[(size_t)input * (size_t)n + (size_t)j] =
                    power_of_two(powf(x, alpha) / powf(most[j], 1 - alpha));
        }
    }
    free(row);
    free(most);
    if (!s) *ret = f;
    return s;
}

/* ---- AWQ ------------------------------------------------------------------------------------- */

/* The search of one input: each thread takes its share of the rows of all matrices. */
struct search {
    const struct td_quantize *q;
    const float *x; /* [TD_CALIBRATION_ROWS][n] */
    int32_t n, n_x, input;
    float *scales;    /* [STEPS + 1][n] */
    float *buffers;   /* [threads][2 n] */
    uint8_t *blocks;  /* [threads][n * 4] */
    double *errors;   /* [threads][STEPS + 1] */
    _Atomic bool bad; /* a value is no number */
};

/* The squared difference that a row's rounding makes to its outputs. */
static double row_error(const struct search *s, const struct td_format *f, const float *w,
                        const float *scale, float *folded, uint8_t *block)
{
    double error = 0;
    for (int32_t j = 0; j < s->n; j++) folded[j] = w[j] * scale[j];
    if (!td_format_write(f, folded, s->n, block)) return INFINITY;
    td_format_read(f, block, s->n, folded);
    for (int32_t j = 0; j < s->n; j++) folded[j] = folded[j] / scale[j] - w[j];
    for (int32_t i = 0; i < s->n_x; i++) {
        const float *x = s->x + (size_t)i * (size_t)s->n;
        float sum[8] = {0};
        for (int32_t j = 0; j + 8 <= s->n; j += 8)
            for (int k = 0; k < 8; k++) sum[k] += x[j + k] * folded[j + k];
        float all = 0;
        for (int32_t j = s->n & ~7; j < s->n; j++) all += x[j] * folded[j];
        for (int k = 0; k < 8; k++) all += sum[k];
        error += (double)all * (double)all;
    }
    return error;
}

static void search_part(void *ctx, int part, int n_parts)
{
    struct search *s = ctx;
    float *w = s->buffers + (size_t)part * 2 * (size_t)s->n, *folded = w + s->n;
    uint8_t *block = s->blocks + (size_t)part * (size_t)s->n * 4;
    double *errors = s->errors + (size_t)part * (STEPS + 1);
    struct td_piece p;
    const struct td_format *f;
    for (int k = 0; k < N_MATRICES_MAX && find_matrix(s->q, s->input, k, &p, &f); k++) {
        int64_t every = (p.n_rows + SEARCH_ROWS_MAX - 1) / SEARCH_ROWS_MAX;
        for (int64_t r = part * every; r < p.n_rows; r += n_parts * every) {
            if (!td_piece_read_row(&p, r, w)) s->bad = true;
            for (int step = 0; step <= STEPS; step++)
                errors[step] +=
                    row_error(s, f, w, s->scales + (size_t)step * (size_t)s->n, folded, block);
        }
    }
}

/* mean|x|^(step / STEPS), around 1. */
static void make_scales(const struct td_calibration *c, struct search *s)
{
    const double *sum = c->sum + (size_t)s->input * (size_t)s->n;
    for (int step = 0; step <= STEPS; step++) {
        float *to = s->scales + (size_t)step * (size_t)s->n, lo = INFINITY, hi = 0;
        for (int32_t j = 0; j < s->n; j++) {
            double mean = fmax(sum[j] / (double)c->n_seen[s->input], 1e-4);
            to[j] = (float)pow(mean, (double)step / STEPS);
            lo = fminf(lo, to[j]);
            hi = fmaxf(hi, to[j]);
        }
        for (int32_t j = 0; j < s->n; j++) to[j] /= sqrtf(lo * hi);
    }
}

static int best_step(const struct search *s, int n_threads)
{
    int best = 0;
    double least = INFINITY;
    for (int step = 0; step <= STEPS; step++) {
        double error = 0;
        for (int t = 0; t < n_threads; t++) error += s->errors[t * (STEPS + 1) + step];
        if (error < least) {
            least = error;
            best = step;
        }
    }
    return best;
}

static td_status search_all(const struct td_calibration *c, struct search *s, struct td_fold *f,
                            struct td_err *err)
{
    int n_threads = td_thread_pool_size(s->q->threads);
    struct td_progress progress;
    if (!s->q->quiet)
        td_progress_start(&progress, "searching scales", "norms", (uint64_t)c->n_inputs);
    for (s->input = 0; s->input < c->n_inputs; s->input++) {
        size_t at = (size_t)s->input * (size_t)s->n;
        if (c->n_seen[s->input] == 0) continue;
        s->x = c->rows + at * TD_CALIBRATION_ROWS;
        s->n_x = c->n_seen[s->input] < TD_CALIBRATION_ROWS ? (int32_t)c->n_seen[s->input]
                                                           : TD_CALIBRATION_ROWS;
        memset(s->errors, 0, (size_t)n_threads * (STEPS + 1) * sizeof *s->errors);
        make_scales(c, s);
        td_thread_pool_run(s->q->threads, search_part, s);
        if (s->bad)
            return td_fail(err, TD_ERR_CORRUPT, "%s: a matrix of layer %d holds infinity or NaN",
                           s->q->from, s->input / 2);
        memcpy(f->scales + at, s->scales + (size_t)best_step(s, n_threads) * (size_t)s->n,
               (size_t)s->n * sizeof *f->scales);
        if (!s->q->quiet) td_progress_update(&progress, (uint64_t)s->input + 1);
    }
    if (!s->q->quiet) td_progress_end(&progress);
    return TD_OK;
}

td_status td_fold_search(const struct td_quantize *q, const struct td_calibration *c,
                         struct td_fold *ret, struct td_err *err)
{
    size_t n = (size_t)c->hidden, n_threads = (size_t)td_thread_pool_size(q->threads);
    struct td_fold f = {0};
    struct search s = {.q = q, .n = c->hidden};
    s.scales = malloc((STEPS + 1) * n * sizeof *s.scales);
    s.buffers = malloc(n_threads * 2 * n * sizeof *s.buffers);
    s.blocks = malloc(n_threads * n * 4);
    s.errors = malloc(n_threads * (STEPS + 1) * sizeof *s.errors);
    td_status st = s.scales && s.buffers && s.blocks && s.errors
                       ? fold_create(c, &f, err)
                       : td_fail(err, TD_ERR_NOMEM, "no memory for the search of scales");
    if (!st) st = search_all(c, &s, &f, err);
    free(s.scales);
    free(s.buffers);
    free(s.blocks);
    free(s.errors);
    if (st)
        td_fold_free(&f);
    else
        *ret = f;
    return st;
}
