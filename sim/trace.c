/* trace.c - see trace.h. */
#include "common/base/csv.h"
#include "common/base/random.h"
#include "sim/trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/cache.h"
#include "sim/heap.h"
#include "common/base/json.h"

#define MAX_TOKENS 100000000

td_status td_sim_length_parse(const char *text, const char *what, struct td_sim_length *ret,
                              struct td_err *err)
{
    struct td_sim_length l = {0};
    int used = 0;
    if (sscanf(text, "lognormal:%lf,%lf%n", &l.a, &l.b, &used) == 2 && !text[used] && l.a >= 1 &&
        l.b >= 0)
        l.kind = TD_LENGTH_LOGNORMAL;
    else if (sscanf(text, "uniform:%lf,%lf%n", &l.a, &l.b, &used) == 2 && !text[used] && l.a >= 1 &&
             l.b >= l.a)
        l.kind = TD_LENGTH_UNIFORM;
    else if (sscanf(text, "%lf%n", &l.a, &used) == 1 && !text[used] && l.a >= 1)
        l.kind = TD_LENGTH_FIXED;
    else
        return td_fail(err, TD_ERR_INVALID,
                       "%s is \"%s\", must be a number >= 1, lognormal:MEAN,CV or uniform:LOW,HIGH",
                       what, text);
    if (l.a > MAX_TOKENS || l.b > MAX_TOKENS)
        return td_fail(err, TD_ERR_LIMIT, "%s is \"%s\", limit %d tokens", what, text, MAX_TOKENS);
    *ret = l;
    return TD_OK;
}

static int32_t draw(const struct td_sim_length *l, struct td_random *random)
{
    double v = l->a;
    if (l->kind == TD_LENGTH_UNIFORM)
        v = l->a + floor(td_random_uniform(random) * (l->b - l->a + 1));
    if (l->kind == TD_LENGTH_LOGNORMAL) {
        double s2 = log1p(l->b * l->b);
        v = round(exp(log(l->a) - s2 / 2 + sqrt(s2) * td_random_normal(random)));
    }
    return v < 1 ? 1 : v > MAX_TOKENS ? MAX_TOKENS : (int32_t)v;
}

static struct td_sim_request *append(struct td_sim_trace *t, uint32_t *capacity)
{
    if (t->n == *capacity) {
        *capacity = *capacity ? *capacity * 2 : 1024;
        t->requests = td_sim_grow(t->requests, *capacity, sizeof *t->requests);
    }
    t->requests[t->n] = (struct td_sim_request){0};
    return &t->requests[t->n++];
}

/* ---- files ----------------------------------------------------------------------------------- */

/* "2023-11-16 18:17:03.9799600" in ns since the epoch's day 0, proleptic. */
static bool parse_time(const char *text, uint64_t *ret_ns)
{
    int y, mo, d, h, mi, used = 0;
    double s;
    if (sscanf(text, "%d-%d-%d %d:%d:%lf%n", &y, &mo, &d, &h, &mi, &s, &used) != 6 || text[used])
        return false;
    if (y < 1970 || y > 2200 || mo < 1 || mo > 12 || d < 1 || d > 31 || h < 0 || h > 23 || mi < 0 ||
        mi > 59 || !(s >= 0 && s < 61))
        return false;
    y -= mo <= 2; /* days from civil date (Hinnant) */
    int64_t era = y / 400, yoe = y - era * 400,
            doy = (153 * (mo + (mo > 2 ? -3 : 9)) + 2) / 5 + d - 1,
            doe = yoe * 365 + yoe / 4 - yoe / 100 + doy;
    int64_t days = era * 146097 + doe - 719468;
    *ret_ns =
        (uint64_t)((days * 86400 + h * 3600 + mi * 60) * 1000000000ll + (int64_t)llround(s * 1e9));
    return true;
}

static td_status read_csv(const char *path, struct td_sim_trace *t, struct td_err *err)
{
    struct td_csv c;
    td_status s = td_csv_open(path, &c, err);
    int in_col = 0, out_col = 0, time_col = -1, seconds_col = -1;
    if (!s && td_csv_column(&c, "num_prefill_tokens", &in_col, NULL) == TD_OK) {
        s = td_csv_column(&c, "num_decode_tokens", &out_col, err);
        if (!s && td_csv_column(&c, "arrived_s", &seconds_col, NULL)) seconds_col = -1;
    } else if (!s) {
        s = td_csv_column(&c, "ContextTokens", &in_col, err);
        if (!s) s = td_csv_column(&c, "GeneratedTokens", &out_col, err);
        if (!s) s = td_csv_column(&c, "TIMESTAMP", &time_col, err);
    }
    uint32_t capacity = 0;
    uint64_t first = 0, last = 0;
    while (!s && td_csv_next(&c, &s, err)) {
        double in, out;
        if ((s = td_csv_f64(&c, in_col, 0, MAX_TOKENS, &in, err)) ||
            (s = td_csv_f64(&c, out_col, 0, MAX_TOKENS, &out, err)))
            break;
        uint64_t at = 0;
        if (time_col >= 0 && !parse_time(c.field[time_col], &at)) {
            s = td_fail(err, TD_ERR_INVALID,
                        "%s: line %d: TIMESTAMP is \"%s\", must be YYYY-MM-DD hh:mm:ss.fff", path,
                        c.line_no, c.field[time_col]);
            break;
        }
        double seconds = 0;
        if (seconds_col >= 0 && (s = td_csv_f64(&c, seconds_col, 0, 1e9, &seconds, err))) break;
        if (seconds_col >= 0) at = (uint64_t)llround(seconds * 1e9);
        if (t->n == 0 && seconds_col < 0) first = at;
        if (at < last) {
            s = td_fail(err, TD_ERR_INVALID, "%s: line %d: %s goes backwards", path, c.line_no,
                        seconds_col < 0 ? "TIMESTAMP" : "arrived_s");
            break;
        }
        last = at;
        struct td_sim_request *r = append(t, &capacity);
        r->at_ns = at - first;
        r->n_prompt = in < 1 ? 1 : (int32_t)in;
        r->n_output = out < 1 ? 1 : (int32_t)out;
    }
    td_csv_close(&c);
    return s;
}

static td_status mooncake_line(const char *path, int line_no, char *line, struct td_sim_trace *t,
                               uint32_t *capacity, uint32_t *hash_capacity, struct td_err *err)
{
    char what[300];
    json_t *o = NULL;
    int64_t at = -1, in = -1, out = -1;
    snprintf(what, sizeof what, "%s: line %d", path, line_no);
    td_status s = td_json_load_text(line, strlen(line), what, &o, err);
    if (s) return s;
    bool have_at = false, have_in = false, have_out = false;
    s = td_json_i64(o, what, "timestamp", 0, INT64_MAX / 1000000, &at, &have_at, err);
    if (!s) s = td_json_i64(o, what, "input_length", 0, MAX_TOKENS, &in, &have_in, err);
    if (!s) s = td_json_i64(o, what, "output_length", 0, MAX_TOKENS, &out, &have_out, err);
    const json_t *ids = s ? NULL : json_object_get(o, "hash_ids");
    if (!s && (!have_at || !have_in || !have_out || !json_is_array(ids)))
        s = td_fail(err, TD_ERR_INVALID, "%s: %s is missing", what,
                    !have_at    ? "timestamp"
                    : !have_in  ? "input_length"
                    : !have_out ? "output_length"
                                : "hash_ids");
    if (!s && t->n && (uint64_t)at * 1000000 < t->requests[t->n - 1].at_ns)
        s = td_fail(err, TD_ERR_INVALID, "%s: timestamp %lld goes backwards", what, (long long)at);
    size_t n_ids = s ? 0 : json_array_size(ids);
    if (!s) {
        struct td_sim_request *r = append(t, capacity);
        *r = (struct td_sim_request){.at_ns = (uint64_t)at * 1000000,
                                     .n_prompt = in < 1 ? 1 : (int32_t)in,
                                     .n_output = out < 1 ? 1 : (int32_t)out,
                                     .hash_at = t->n_hashes,
                                     .n_hashes = (uint32_t)n_ids};
    }
    for (size_t i = 0; i < n_ids && !s; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            s = td_fail(err, TD_ERR_INVALID, "%s: hash_ids[%zu] is no number >= 0", what, i);
            break;
        }
        if (t->n_hashes == *hash_capacity) {
            *hash_capacity = *hash_capacity ? *hash_capacity * 2 : 4096;
            t->hashes = td_sim_grow(t->hashes, *hash_capacity, sizeof *t->hashes);
        }
        t->hashes[t->n_hashes++] = (uint64_t)json_integer_value(id);
    }
    json_decref(o);
    return s;
}

static td_status read_mooncake(const char *path, struct td_sim_trace *t, struct td_err *err)
{
    FILE *f = fopen(path, "r");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: cannot be opened", path);
    char *line = NULL;
    size_t bytes = 0;
    uint32_t capacity = 0, hash_capacity = 0;
    td_status s = TD_OK;
    for (int n = 1; !s && getline(&line, &bytes, f) > 0; n++)
        if (line[strspn(line, " \t\r\n")])
            s = mooncake_line(path, n, line, t, &capacity, &hash_capacity, err);
    free(line);
    fclose(f);
    t->hash_tokens = 512;
    return s;
}

/* Requests of one time stamp, evenly until the next time stamp. */
static void spread_groups(struct td_sim_trace *t)
{
    uint64_t gap = 3000000000ull;
    for (uint32_t i = 0, k; i < t->n; i = k) {
        uint64_t at = t->requests[i].at_ns;
        for (k = i; k < t->n && t->requests[k].at_ns == at;) k++;
        if (k < t->n) gap = t->requests[k].at_ns - at;
        for (uint32_t j = i; j < k; j++)
            t->requests[j].at_ns = at + (uint64_t)((double)gap * ((double)(j - i) / (k - i)));
    }
}

td_status td_sim_trace_read(const char *path, bool spread, struct td_sim_trace *ret,
                            struct td_err *err)
{
    FILE *f = fopen(path, "r");
    int first = f ? fgetc(f) : EOF;
    if (!f) return td_fail(err, TD_ERR_IO, "%s: cannot be opened", path);
    fclose(f);
    struct td_sim_trace t = {0};
    td_status s = first == '{' ? read_mooncake(path, &t, err) : read_csv(path, &t, err);
    if (!s && t.n == 0) s = td_fail(err, TD_ERR_INVALID, "%s has no requests", path);
    if (s) {
        td_sim_trace_free(&t);
        return s;
    }
    if (spread) spread_groups(&t);
    *ret = t;
    return TD_OK;
}

/* ---- a run's requests ------------------------------------------------------------------------ */

/* Index i with probability share(i) / sum. */
static uint32_t draw_share(struct td_random *random, const double *share, size_t stride, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += *(const double *)(const void *)((const char *)share + i * stride);
    double at = td_random_uniform(random) * sum;
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        double s = *(const double *)(const void *)((const char *)share + i * stride);
        if (s > 0) last = i;
        if ((at -= s) < 0) break;
    }
    return last;
}

static uint32_t class_by_length(const struct td_sim_load *l, int32_t n_prompt)
{
    uint32_t i = 0;
    while (i + 1 < l->n_length_classes && n_prompt > l->length_classes[i].max_prompt) i++;
    return l->length_classes[i].slo_class;
}

static void draw_owner(struct td_random *random, const struct td_sim_load *l,
                       struct td_sim_request *q)
{
    int32_t fixed = -1;
    if (l->n_tenants) {
        q->tenant =
            1 + draw_share(random, &l->tenants[0].share, sizeof l->tenants[0], l->n_tenants);
        fixed = l->tenants[q->tenant - 1].slo_class;
    }
    if (fixed >= 0)
        q->slo_class = (uint32_t)fixed;
    else if (l->n_length_classes)
        q->slo_class = class_by_length(l, q->n_prompt);
    else if (l->n_classes > 1)
        q->slo_class = draw_share(random, l->class_share, sizeof l->class_share[0], l->n_classes);
}

/* When the process of rate 1 that runs at load l's changing pace reaches `u`: the inverse of the
 * integral of its rate. */
static double paced_time_s(const struct td_sim_load *l, double u)
{
    double mean_s = u / l->rate;
    if (l->arrival == TD_ARRIVAL_ONOFF) {
        double on_s = l->period_s * l->on_share,
               busy_s = mean_s * l->on_share; /* of all on-times together */
        return floor(busy_s / on_s) * l->period_s + fmod(busy_s, on_s);
    }
    double turn = 2 * M_PI / l->period_s, low = mean_s - l->period_s, high = mean_s + l->period_s;
    for (int i = 0; i < 60; i++) { /* the integral, t + swing / turn * (1 - cos(turn * t)), rises */
        double t = (low + high) / 2;
        if (t + l->swing / turn * (1 - cos(turn * t)) < mean_s)
            low = t;
        else
            high = t;
    }
    return fmax(0, (low + high) / 2);
}

static bool is_paced(enum td_sim_arrival a)
{
    return a == TD_ARRIVAL_ONOFF || a == TD_ARRIVAL_SINE;
}

static td_status check_load(const struct td_sim_load *l, const struct td_sim_trace *file,
                            struct td_err *err)
{
    if (l->arrival == TD_ARRIVAL_TRACE && !file)
        return td_fail(err, TD_ERR_INVALID, "arrival is trace, and there is no trace file");
    if (l->arrival != TD_ARRIVAL_TRACE && !(l->rate > 0))
        return td_fail(err, TD_ERR_INVALID, "rate is %g, must be > 0", l->rate);
    if (l->arrival == TD_ARRIVAL_GAMMA && !(l->cv > 0))
        return td_fail(err, TD_ERR_INVALID, "cv is %g, must be > 0", l->cv);
    if (is_paced(l->arrival) && !(l->period_s > 0))
        return td_fail(err, TD_ERR_INVALID, "period is %g s, must be > 0", l->period_s);
    if (l->arrival == TD_ARRIVAL_ONOFF && !(l->on_share > 0 && l->on_share <= 1))
        return td_fail(err, TD_ERR_INVALID, "on_share is %g, must be above 0 and up to 1",
                       l->on_share);
    if (l->arrival == TD_ARRIVAL_SINE && !(l->swing >= 0 && l->swing <= 1))
        return td_fail(err, TD_ERR_INVALID, "swing is %g, must be 0..1", l->swing);
    if (is_paced(l->arrival) && l->ramp_to > 0)
        return td_fail(err, TD_ERR_INVALID,
                       "ramp_to is %g: arrivals that are onoff or sine have no ramp", l->ramp_to);
    if (l->arrival != TD_ARRIVAL_TRACE && l->n_requests == 0 && !(l->duration_s > 0))
        return td_fail(err, TD_ERR_INVALID, "give a duration or a number of requests");
    return TD_OK;
}

/* The generators behind one trace, and how far it has come. Arrivals are the portable generator
 * from the seed itself (s = seed), so that published check values can be repeated; lengths are a
 * stream beside it, and so are owners: the same seed has the same arrivals and lengths whatever
 * the mix. */
struct making {
    const struct td_sim_load *l;
    const struct td_sim_trace *file; /* NULL: lengths are drawn */
    bool in_order;                   /* the file's rows one after the other, not drawn */
    uint32_t at_row;
    struct td_random arrivals, lengths, owners;
    double now_s, paced;
};

static struct making making_begin(const struct td_sim_load *l, const struct td_sim_trace *file)
{
    struct making m = {.l = l,
                       .file = file,
                       .in_order = l->rows == TD_ROWS_ORDER ||
                                   (l->rows == TD_ROWS_AUTO && file && file->n_hashes),
                       .arrivals = {l->seed},
                       .lengths = td_random_stream(l->seed, 1),
                       .owners = td_random_stream(l->seed, 4)};
    if (file && m.in_order && l->arrival != TD_ARRIVAL_TRACE)
        m.at_row = (uint32_t)((l->seed + 15) % 16 * file->n / 16); /* seed 1: the first */
    return m;
}

/* The next row of the file that is not too long; false: there is none, or in 64 passes none was
 * found. */
static bool next_row(struct making *m, struct td_sim_request *ret)
{
    const struct td_sim_load *l = m->l;
    for (uint32_t tries = 0;; tries++) {
        struct td_sim_request r;
        if (l->arrival == TD_ARRIVAL_TRACE && m->at_row == m->file->n) return false;
        if (tries == m->file->n * 64ull) return false;
        if (l->arrival == TD_ARRIVAL_TRACE)
            r = m->file->requests[m->at_row++];
        else if (m->in_order)
            r = m->file->requests[m->at_row++ % m->file->n];
        else
            r = m->file->requests[td_random_below(&m->lengths, m->file->n)];
        if ((l->max_prompt && r.n_prompt > l->max_prompt) ||
            (l->max_output && r.n_output > l->max_output))
            continue;
        *ret = r;
        return r.n_prompt != 0;
    }
}

static double rate_now(const struct making *m, uint32_t n_before)
{
    const struct td_sim_load *l = m->l;
    if (!(l->ramp_to > 0)) return l->rate;
    double share =
        l->duration_s > 0 ? m->now_s / l->duration_s : (double)n_before / (double)l->n_requests;
    return l->rate + (l->ramp_to - l->rate) * (share < 1 ? share : 1);
}

/* Moves the clock to the arrival of request number n_before: r, where the file has its time. */
static void next_arrival(struct making *m, const struct td_sim_request *r, uint32_t n_before)
{
    const struct td_sim_load *l = m->l;
    if (l->arrival == TD_ARRIVAL_TRACE) {
        m->now_s = (double)r->at_ns / 1e9 * (l->time_scale > 0 ? l->time_scale : 1);
    } else if (is_paced(l->arrival)) {
        m->now_s = paced_time_s(l, m->paced += n_before ? td_random_exponential(&m->arrivals) : 0);
    } else if (n_before > 0) { /* the first at 0 */
        double gap = l->arrival == TD_ARRIVAL_CONSTANT ? 1
                     : l->arrival == TD_ARRIVAL_GAMMA
                         ? td_random_gamma(&m->arrivals, 1 / (l->cv * l->cv))
                         : td_random_exponential(&m->arrivals);
        m->now_s += gap / rate_now(m, n_before);
    }
}

td_status td_sim_trace_make(const struct td_sim_load *l, const struct td_sim_trace *file,
                            struct td_sim_trace *ret, struct td_err *err)
{
    td_status s = check_load(l, file, err);
    if (s) return s;
    struct making m = making_begin(l, file);
    struct td_sim_trace t = {.hash_tokens = file ? file->hash_tokens : 0};
    uint32_t capacity = 0;
    if (file && file->n_hashes) {
        t.hashes = td_sim_grow(NULL, file->n_hashes, sizeof *t.hashes);
        memcpy(t.hashes, file->hashes, file->n_hashes * sizeof *t.hashes);
        t.n_hashes = file->n_hashes;
    }
    while (!l->n_requests || t.n < l->n_requests) {
        struct td_sim_request r = {0};
        if (file) {
            if (!next_row(&m, &r)) break;
        } else {
            r.n_prompt = draw(&l->isl, &m.lengths);
            r.n_output = draw(&l->osl, &m.lengths);
        }
        next_arrival(&m, &r, t.n);
        if (l->duration_s > 0 && m.now_s >= l->duration_s) break;
        r.at_ns = (uint64_t)llround(m.now_s * 1e9);
        draw_owner(&m.owners, l, &r);
        *append(&t, &capacity) = r;
    }
    if (t.n == 0) {
        td_sim_trace_free(&t);
        return td_fail(
            err, TD_ERR_INVALID,
            "no request is left: the trace has none within the duration and the length limits");
    }
    *ret = t;
    return TD_OK;
}

void td_sim_trace_free(struct td_sim_trace *t)
{
    free(t->requests);
    free(t->hashes);
    *t = (struct td_sim_trace){0};
}

uint64_t td_sim_prefix_hits(const struct td_sim_trace *t, uint64_t capacity,
                            uint64_t *ret_hit_tokens)
{
    struct td_sim_cache cache = {0};
    uint64_t n_hits = 0, n_tokens = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        const struct td_sim_request *r = &t->requests[i];
        bool all = true;
        for (uint32_t k = 0; k < r->n_hashes; k++) {
            uint64_t hash = t->hashes[r->hash_at + k];
            uint32_t e = td_sim_cache_find(&cache, hash);
            if (e == TD_SIM_NONE) {
                all = false;
                e = td_sim_cache_insert(&cache, hash);
            } else {
                td_sim_cache_unlink(&cache, e);
                if (all) {
                    n_hits++;
                    uint64_t from = (uint64_t)k * t->hash_tokens, to = from + t->hash_tokens;
                    n_tokens += (to < (uint64_t)r->n_prompt ? to : (uint64_t)r->n_prompt) - from;
                }
            }
            td_sim_cache_link_fresh(&cache, e);
            if (capacity && cache.n_linked > capacity) td_sim_cache_remove(&cache, cache.oldest);
        }
    }
    td_sim_cache_free(&cache);
    if (ret_hit_tokens) *ret_hit_tokens = n_tokens;
    return n_hits;
}
