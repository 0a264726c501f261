/* file.c - sweep.csv and sweep.json, written and read back. One table names every number of a
 * row for both. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/sweep/sweep.h"
#include "common/base/csv.h"
#include "common/base/json.h"

#define MAX_FILE_BYTES ((size_t)512 << 20)
#define AT(member) offsetof(struct sweep_row, member)

/* The columns in their order; older files have the same names. */
static const struct {
    const char *name;
    size_t offset;
} fields[] = {
    {"rate", AT(rate)},
    {"seed", AT(seed)},
    {"offered", AT(count.offered)},
    {"completed", AT(count.completed)},
    {"goodput", AT(steady.goodput)},
    {"per_gpu_goodput", AT(steady.per_gpu_goodput)},
    {"attainment", AT(steady.attainment)},
    {"ci95_lo", AT(steady.ci95_lo)},
    {"ci95_hi", AT(steady.ci95_hi)},
    {"attainment_ttft", AT(steady.attainment_ttft)},
    {"attainment_tpot", AT(steady.attainment_tpot)},
    {"attainment_e2el", AT(steady.attainment_e2el)},
    {"n_good", AT(steady.n_good)},
    {"n", AT(steady.n)},
    {"ttft_p50_ms", AT(ttft.p50_ms)},
    {"ttft_p90_ms", AT(ttft.p90_ms)},
    {"ttft_p99_ms", AT(ttft.p99_ms)},
    {"tpot_p50_ms", AT(tpot.p50_ms)},
    {"tpot_p90_ms", AT(tpot.p90_ms)},
    {"tpot_p99_ms", AT(tpot.p99_ms)},
    {"itl_p50_ms", AT(itl.p50_ms)},
    {"itl_p90_ms", AT(itl.p90_ms)},
    {"itl_p99_ms", AT(itl.p99_ms)},
    {"rejected", AT(count.rejected)},
    {"rejected_ttft", AT(count.rejected_ttft)},
    {"rejected_tpot", AT(count.rejected_tpot)},
    {"timed_out", AT(count.timed_out)},
    {"failed", AT(count.failed)},
    {"unfinished", AT(count.unfinished)},
    {"deflected", AT(count.deflected)},
    {"saturated", AT(steady.saturated)},
    {"valid", AT(run.valid)},
    {"window_s", AT(steady.span_s)},
    {"duration_s", AT(run.duration_s)},
    {"offered_rate", AT(steady.offered_rate)},
    {"sched_lag_p99_ms", AT(run.sched_lag_p99_ms)},
    {"load1", AT(run.load1)},
    {"predicted_mape", AT(predicted.mape)},
    {"predicted_coverage", AT(predicted.coverage)},
    {"generator_late", AT(run.late)},
};
#define N_FIELDS (sizeof fields / sizeof *fields)

static double *field(struct sweep_row *row, size_t i)
{
    return (double *)(void *)((char *)row + fields[i].offset);
}
static double field_value(const struct sweep_row *row, size_t i)
{
    return *(const double *)(const void *)((const char *)row + fields[i].offset);
}

/* What a row may say: arithmetic and axes stand on it. Unknown numbers are NAN. */
static td_status check_row(const struct sweep_row *r, const char *where, struct td_err *err)
{
    static const size_t shares[] = {AT(steady.attainment),      AT(steady.ci95_lo),
                                    AT(steady.ci95_hi),         AT(steady.attainment_ttft),
                                    AT(steady.attainment_tpot), AT(steady.attainment_e2el)};
    if (!(r->rate >= 1e-6 && r->rate <= 1e9))
        return td_fail(err, TD_ERR_INVALID, "%s: rate is %g, must be in 1e-6..1e9", where, r->rate);
    for (size_t i = 0; i < N_FIELDS; i++) {
        double v = field_value(r, i);
        bool is_share = false;
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++)
            is_share |= fields[i].offset == shares[k];
        if (v < 0 || v > (is_share ? 1 : 1e15))
            return td_fail(err, TD_ERR_INVALID, "%s: %s is %g, must be in 0..%g", where,
                           fields[i].name, v, is_share ? 1 : 1e15);
    }
    for (int k = 0; k < BENCH_N_STAGES; k++)
        if (r->stages_ms[k] < 0 || r->stages_ms[k] > 1e15)
            return td_fail(err, TD_ERR_INVALID, "%s: stage %s is %g, must be in 0..1e15 ms", where,
                           bench_stage_names[k], r->stages_ms[k]);
    if (r->steady.n_good > r->steady.n)
        return td_fail(err, TD_ERR_INVALID, "%s: n_good is %g, must be at most n, which is %g",
                       where, r->steady.n_good, r->steady.n);
    return TD_OK;
}

static td_status check_sweep(const struct sweep *s, const char *path, struct td_err *err)
{
    const double limits[] = {s->slo.ttft_ms, s->slo.tpot_ms, s->slo.e2el_ms, s->slo.tbt_ms};
    for (size_t i = 0; i < 4; i++)
        if (!(limits[i] >= 0 && limits[i] <= 1e12))
            return td_fail(err, TD_ERR_INVALID, "%s: an objective is %g, must be in 0..1e12 ms",
                           path, limits[i]);
    if (!(s->attainment >= 0 && s->attainment <= 1))
        return td_fail(err, TD_ERR_INVALID, "%s: attainment is %g, must be in 0..1", path,
                       s->attainment);
    for (uint32_t i = 0; i < s->n_scales; i++)
        if (!(s->scales[i] > (i ? s->scales[i - 1] : 0) && s->scales[i] <= 1e6))
            return td_fail(err, TD_ERR_INVALID, "%s: slo_scales must rise, above 0 and up to 1e6",
                           path);
    for (uint32_t i = 0; i < s->n_configs; i++)
        if (s->configs[i].goodput < 0 || s->configs[i].goodput > 1e9 ||
            !(s->configs[i].failed_rate >= 0 && s->configs[i].failed_rate <= 1e9))
            return td_fail(err, TD_ERR_INVALID,
                           "%s: config %s: goodput and failed_rate must be in 0..1e9", path,
                           s->configs[i].name);
    return TD_OK;
}

/* --- CSV -------------------------------------------------------------------------------------- */

static void cell(FILE *f, double v)
{
    if (isnan(v))
        fputc(',', f);
    else
        fprintf(f, ",%.9g", v);
}

td_status sweep_csv_write(const struct sweep *s, const char *path, struct td_err *err)
{
    FILE *f = fopen(path, "we");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    fprintf(f, "config,mode,prefill,decode,gpus,phase");
    for (size_t i = 0; i < N_FIELDS; i++) fprintf(f, ",%s", fields[i].name);
    for (int k = 0; k < BENCH_N_STAGES; k++) fprintf(f, ",stage_%s_ms", bench_stage_names[k]);
    fprintf(f, ",slo_ttft_ms,slo_tpot_ms,attainment_target\n");
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        const struct sweep_config *c = &s->configs[r->config];
        fprintf(f, "%s,%s,%u,%u,%u,%s", c->name, c->mode, c->prefill, c->decode, c->gpus, r->phase);
        for (size_t k = 0; k < N_FIELDS; k++) cell(f, field_value(r, k));
        for (int k = 0; k < BENCH_N_STAGES; k++) cell(f, r->stages_ms[k]);
        cell(f, s->slo.ttft_ms);
        cell(f, s->slo.tpot_ms);
        cell(f, s->attainment);
        fputc('\n', f);
    }
    bool failed = ferror(f);
    int saved = errno;
    if (fclose(f) && !failed) failed = true, saved = errno;
    return failed ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(saved)) : TD_OK;
}

static struct sweep_config *config_of(struct sweep *s, const char *name)
{
    for (uint32_t i = 0; i < s->n_configs; i++)
        if (!strcmp(s->configs[i].name, name)) return &s->configs[i];
    if (s->n_configs == SWEEP_MAX_CONFIGS) return NULL;
    struct sweep_config *c = &s->configs[s->n_configs++];
    *c = (struct sweep_config){.goodput = NAN};
    snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}

static td_status csv_cell(struct sweep *s, struct sweep_row *row, const char *key, const char *text,
                          const char *where, struct td_err *err)
{
    double *to = NULL, ignored;
    for (size_t i = 0; i < N_FIELDS && !to; i++)
        if (!strcmp(key, fields[i].name)) to = field(row, i);
    for (int k = 0; k < BENCH_N_STAGES && !to; k++) {
        char name[48];
        snprintf(name, sizeof name, "stage_%s_ms", bench_stage_names[k]);
        if (!strcmp(key, name)) to = &row->stages_ms[k];
    }
    if (!strcmp(key, "slo_ttft_ms")) to = &s->slo.ttft_ms;
    if (!strcmp(key, "slo_tpot_ms")) to = &s->slo.tpot_ms;
    if (!strcmp(key, "attainment_target")) to = &s->attainment;
    if (!to) to = &ignored; /* a column of somebody else's */
    if (!text[0]) return TD_OK;
    char *end;
    double v = strtod(text, &end);
    if (to == &ignored) return TD_OK;
    if (*end || end == text)
        return td_fail(err, TD_ERR_INVALID, "%s: %s is \"%.40s\", must be a number", where, key,
                       text);
    *to = v;
    return TD_OK;
}

static uint32_t small_number(const char *text) /* of a column that names a configuration;
                                                  anything else is 0 */
{
    long v = strtol(text, NULL, 10);
    return v > 0 && v < 1000000 ? (uint32_t)v : 0;
}

static td_status csv_row(struct sweep *s, const struct td_csv *f, struct td_err *err)
{
    char where[300];
    snprintf(where, sizeof where, "%s line %d", f->path, f->line_no);
    if (f->n_fields != f->n_columns)
        return td_fail(err, TD_ERR_INVALID, "%s: has %d cells, the first line %d", where,
                       f->n_fields, f->n_columns);
    struct sweep_config *c = config_of(s, f->field[0]);
    if (!c)
        return td_fail(err, TD_ERR_LIMIT, "%s: more than %d configurations", where,
                       SWEEP_MAX_CONFIGS);
    struct sweep_row *row = sweep_row_add(s);
    if (!row) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    row->config = (uint32_t)(c - s->configs);
    td_status st = TD_OK;
    for (int i = 1; !st && i < f->n_columns; i++) {
        const char *key = f->column[i], *cell = f->field[i];
        if (!strcmp(key, "mode"))
            snprintf(c->mode, sizeof c->mode, "%s", cell);
        else if (!strcmp(key, "phase"))
            snprintf(row->phase, sizeof row->phase, "%s", cell);
        else if (!strcmp(key, "prefill"))
            c->prefill = small_number(cell);
        else if (!strcmp(key, "decode"))
            c->decode = small_number(cell);
        else if (!strcmp(key, "gpus"))
            c->gpus = small_number(cell);
        else
            st = csv_cell(s, row, key, cell, where, err);
    }
    return st ? st : check_row(row, where, err);
}

/* Closes f. */
static td_status csv_read(const char *path, FILE *f, struct sweep *s, struct td_err *err)
{
    struct td_csv csv;
    td_status st = td_csv_start(f, path, &csv, err);
    if (!st && strcmp(csv.column[0], "config") != 0)
        st = td_fail(err, TD_ERR_INVALID,
                     "%s: its first column is \"%.40s\", must be config: not a sweep.csv", path,
                     csv.column[0]);
    while (!st && td_csv_next(&csv, &st, err)) st = csv_row(s, &csv, err);
    td_csv_close(&csv);
    return st;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static json_t *number(double v) { return isfinite(v) ? json_real(v) : json_null(); }

static json_t *numbers(const double *x, size_t n)
{
    json_t *a = json_array();
    for (size_t i = 0; x && i < n; i++) json_array_append_new(a, number(x[i]));
    return a;
}

static json_t *config_json(const struct sweep_config *c)
{
    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:o, s:o, s:b, s:b, s:s}", "name", c->name, "mode",
                     c->mode, "prefill", (int)c->prefill, "decode", (int)c->decode, "gpus",
                     (int)c->gpus, "goodput", number(c->goodput), "failed_rate",
                     number(c->failed_rate), "searched", c->searched, "verified", c->verified,
                     "note", c->note);
}

static json_t *row_json(const struct sweep *s, const struct sweep_row *r)
{
    json_t *o = json_pack("{s:s, s:s}", "config", s->configs[r->config].name, "phase", r->phase),
           *k = json_object(), *points = json_array();
    for (size_t i = 0; i < N_FIELDS; i++)
        json_object_set_new(o, fields[i].name, number(field_value(r, i)));
    for (int i = 0; i < BENCH_N_STAGES; i++)
        json_object_set_new(k, bench_stage_names[i], number(r->stages_ms[i]));
    json_object_set_new(o, "stages_ms", k);
    json_object_set_new(o, "ttft_quantiles_ms", numbers(r->ttft_q, SWEEP_N_QUANTILES));
    json_object_set_new(o, "tpot_quantiles_ms", numbers(r->tpot_q, SWEEP_N_QUANTILES));
    json_object_set_new(o, "slo_scale_attainment", numbers(r->scale_joint, s->n_scales));
    for (uint32_t i = 0; i < r->n_points; i++)
        json_array_append_new(points,
                              json_pack("[f, f]", (double)r->points[i].predicted_ms,
                                        (double)r->points[i].observed_ms));
    json_object_set_new(o, "predicted_observed_ttft_ms", points);
    return o;
}

static json_t *definitions(void)
{
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "attainment",
        "good / offered, of the requests that arrived in the measured span; rejected, failed and "
        "unfinished ones are misses",
        "good", "completed within every objective; TTFT counts from the scheduled send time",
        "goodput",
        "of a row: good arrivals in the span / its length; of a configuration: the highest rate "
        "whose attainment is met",
        "per_gpu", "goodput / workers, unless --gpus says otherwise", "ci95",
        "of attainment: the wider of Wilson's interval and that of 20 batch means", "pass",
        "the lower bound of the interval is at least the attainment", "saturated",
        "TTFT and requests in flight both rose through the span: more came than was served", "ttft",
        "first token - scheduled send time, ms, at the client; its quantiles count requests "
        "without one as never",
        "slo_scale",
        "the same requests judged by every objective times the scale; the router was told scale 1",
        "stages_ms", "means over completed requests; the first five add up to the router's TTFT");
}

td_status sweep_json_write(const struct sweep *s, const char *path, struct td_err *err)
{
    char *verdict = NULL;
    size_t n_verdict = 0;
    FILE *text = open_memstream(&verdict, &n_verdict);
    if (!text) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    sweep_verdict(s, text);
    fclose(text);
    json_t *root = json_object(), *configs = json_array(), *rows = json_array();
    json_object_set_new(
        root, "sweep",
        json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:o, s:b, "
                  "s:o, s:o, s:o, s:o, s:o}",
                  "title", s->title, "date", s->date, "command", s->command ? s->command : "",
                  "model", s->model, "load", s->load, "arrival", s->arrival, "machine", s->machine,
                  "build", s->build, "policy", s->policy, "grid", s->grid, "slo_ttft_ms",
                  number(s->slo.ttft_ms), "slo_tpot_ms", number(s->slo.tpot_ms), "slo_e2el_ms",
                  number(s->slo.e2el_ms), "slo_tbt_ms", number(s->slo.tbt_ms), "slo_sent",
                  s->slo_sent, "attainment", number(s->attainment), "tolerance",
                  number(s->tolerance), "load1_start", number(s->load1_start), "load1_end",
                  number(s->load1_end), "slo_scales", numbers(s->scales, s->n_scales)));
    for (uint32_t i = 0; i < s->n_configs; i++)
        json_array_append_new(configs, config_json(&s->configs[i]));
    for (size_t i = 0; i < s->n_rows; i++) json_array_append_new(rows, row_json(s, &s->rows[i]));
    json_object_set_new(root, "definitions", definitions());
    json_object_set_new(root, "configs", configs);
    json_object_set_new(root, "rows", rows);
    json_object_set_new(root, "verdict", json_string(verdict ? verdict : ""));
    int rc =
        json_dump_file(root, path, JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    int saved = errno;
    json_decref(root);
    free(verdict);
    return rc ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(saved)) : TD_OK;
}

struct reader {
    const char *path;
    struct td_err *err;
    td_status s;
};

static void get_f(struct reader *d, const json_t *o, const char *key, double *ret)
{
    if (!d->s) d->s = td_json_f64(o, d->path, key, -1e300, 1e300, ret, NULL, d->err);
}

static void get_s(struct reader *d, const json_t *o, const char *key, char *ret, size_t ret_bytes)
{
    const char *text = "";
    if (!d->s) d->s = td_json_str(o, d->path, key, &text, NULL, d->err);
    snprintf(ret, ret_bytes, "%s", text);
}

static uint32_t get_u(struct reader *d, const json_t *o, const char *key)
{
    int64_t v = 0;
    if (!d->s) d->s = td_json_i64(o, d->path, key, 0, 1000000, &v, NULL, d->err);
    return (uint32_t)v;
}

static bool get_b(struct reader *d, const json_t *o, const char *key)
{
    bool v = false;
    if (!d->s) d->s = td_json_bool(o, d->path, key, &v, NULL, d->err);
    return v;
}

static double at(const json_t *a, size_t i)
{
    const json_t *v = json_array_get(a, i);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* NULL when the array is absent or has another length. */
static double *get_array(struct reader *d, const json_t *o, const char *key, size_t n)
{
    const json_t *a = json_object_get(o, key);
    if (d->s || n == 0 || json_array_size(a) != n) return NULL;
    double *x = malloc(n * sizeof *x);
    if (!x) d->s = td_fail(d->err, TD_ERR_NOMEM, "out of memory");
    for (size_t i = 0; x && i < n; i++) x[i] = at(a, i) >= 0 && at(a, i) < 1e12 ? at(a, i) : NAN;
    return x;
}

static void get_row(struct reader *d, const json_t *o, struct sweep *s)
{
    char name[48];
    struct sweep_row *row = sweep_row_add(s);
    if (!row) {
        d->s = td_fail(d->err, TD_ERR_NOMEM, "out of memory");
        return;
    }
    get_s(d, o, "config", name, sizeof name);
    uint32_t n_known = s->n_configs;
    struct sweep_config *c = config_of(s, name);
    if (!d->s && (!c || s->n_configs != n_known))
        d->s = td_fail(d->err, TD_ERR_INVALID, "%s: rows: config \"%s\" is not among configs",
                       d->path, name);
    if (d->s) return;
    row->config = (uint32_t)(c - s->configs);
    get_s(d, o, "phase", row->phase, sizeof row->phase);
    for (size_t i = 0; i < N_FIELDS; i++) get_f(d, o, fields[i].name, field(row, i));
    for (int k = 0; k < BENCH_N_STAGES; k++)
        get_f(d, json_object_get(o, "stages_ms"), bench_stage_names[k], &row->stages_ms[k]);
    char where[300];
    snprintf(where, sizeof where, "%s: row %zu", d->path, s->n_rows);
    if (!d->s) d->s = check_row(row, where, d->err);
    row->ttft_q = get_array(d, o, "ttft_quantiles_ms", SWEEP_N_QUANTILES);
    row->tpot_q = get_array(d, o, "tpot_quantiles_ms", SWEEP_N_QUANTILES);
    row->scale_joint = get_array(d, o, "slo_scale_attainment", s->n_scales);
    const json_t *points = json_object_get(o, "predicted_observed_ttft_ms");
    size_t n = json_array_size(points);
    if (n > SWEEP_MAX_POINTS) n = SWEEP_MAX_POINTS;
    if (!d->s && n && !(row->points = calloc(n, sizeof *row->points)))
        d->s = td_fail(d->err, TD_ERR_NOMEM, "out of memory");
    for (size_t i = 0; !d->s && i < n; i++) {
        const json_t *p = json_array_get(points, i);
        if (at(p, 0) > 1e-6 && at(p, 0) < 1e12 && at(p, 1) > 1e-6 && at(p, 1) < 1e12)
            row->points[row->n_points++] =
                (struct sweep_point){(float)at(p, 0), (float)at(p, 1)};
    }
}

static td_status json_read(const char *path, struct sweep *s, struct td_err *err)
{
    json_t *root = NULL;
    struct reader d = {path, err, td_json_load_file(path, MAX_FILE_BYTES, &root, err)};
    const json_t *o = json_object_get(root, "sweep"), *configs = json_object_get(root, "configs"),
                 *rows = json_object_get(root, "rows");
    if (!d.s && (!json_is_object(o) || !json_is_array(configs) || !json_is_array(rows)))
        d.s = td_fail(err, TD_ERR_INVALID,
                      "%s: must have sweep, configs and rows: not a sweep.json", path);
    if (d.s) goto end;
    get_s(&d, o, "title", s->title, sizeof s->title);
    get_s(&d, o, "date", s->date, sizeof s->date);
    get_s(&d, o, "model", s->model, sizeof s->model);
    get_s(&d, o, "load", s->load, sizeof s->load);
    get_s(&d, o, "arrival", s->arrival, sizeof s->arrival);
    get_s(&d, o, "machine", s->machine, sizeof s->machine);
    get_s(&d, o, "build", s->build, sizeof s->build);
    get_s(&d, o, "policy", s->policy, sizeof s->policy);
    const char *command = json_string_value(json_object_get(o, "command"));
    s->command = strdup(command ? command : "");
    s->grid = get_b(&d, o, "grid");
    s->slo_sent = get_b(&d, o, "slo_sent");
    get_f(&d, o, "slo_ttft_ms", &s->slo.ttft_ms);
    get_f(&d, o, "slo_tpot_ms", &s->slo.tpot_ms);
    get_f(&d, o, "slo_e2el_ms", &s->slo.e2el_ms);
    get_f(&d, o, "slo_tbt_ms", &s->slo.tbt_ms);
    get_f(&d, o, "attainment", &s->attainment);
    get_f(&d, o, "tolerance", &s->tolerance);
    get_f(&d, o, "load1_start", &s->load1_start);
    get_f(&d, o, "load1_end", &s->load1_end);
    const json_t *scales = json_object_get(o, "slo_scales");
    for (size_t i = 0; i < json_array_size(scales) && s->n_scales < SWEEP_MAX_SCALES; i++)
        s->scales[s->n_scales++] = at(scales, i);
    for (size_t i = 0; i < json_array_size(configs) && !d.s; i++) {
        const json_t *k = json_array_get(configs, i);
        char name[48];
        get_s(&d, k, "name", name, sizeof name);
        struct sweep_config *c = config_of(s, name);
        if (!c)
            d.s = td_fail(err, TD_ERR_LIMIT, "%s: more than %d configurations", path,
                          SWEEP_MAX_CONFIGS);
        if (d.s) break;
        get_s(&d, k, "mode", c->mode, sizeof c->mode);
        get_s(&d, k, "note", c->note, sizeof c->note);
        c->prefill = get_u(&d, k, "prefill");
        c->decode = get_u(&d, k, "decode");
        c->gpus = get_u(&d, k, "gpus");
        get_f(&d, k, "goodput", &c->goodput);
        get_f(&d, k, "failed_rate", &c->failed_rate);
        c->searched = get_b(&d, k, "searched");
        c->verified = get_b(&d, k, "verified");
    }
    for (size_t i = 0; i < json_array_size(rows) && !d.s; i++)
        get_row(&d, json_array_get(rows, i), s);
end:
    json_decref(root);
    return d.s;
}

td_status sweep_read(const char *path, struct sweep *ret, struct td_err *err)
{
    struct sweep s = {0};
    FILE *f = fopen(path, "re");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    int first = fgetc(f);
    ungetc(first, f);
    td_status st;
    if (first == '{') {
        fclose(f);
        st = json_read(path, &s, err);
    } else {
        st = csv_read(path, f, &s, err);
    }
    if (!st) st = check_sweep(&s, path, err);
    if (!st && s.n_rows == 0) st = td_fail(err, TD_ERR_INVALID, "%s: has no row", path);
    if (!st && !s.title[0]) snprintf(s.title, sizeof s.title, "Goodput sweep");
    if (st)
        sweep_free(&s);
    else
        sweep_settle(&s), *ret = s;
    return st;
}
