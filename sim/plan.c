/* plan.c - see plan.h. */
#include "sim/plan.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/closed_form.h"
#include "sim/gpu.h"
#include "sim/heap.h"

#define BLOCK 16

static double mean_length(const struct td_sim_length *l)
{
    return l->kind == TD_LENGTH_UNIFORM ? (l->a + l->b) / 2 : l->a;
}

const char *td_plan_mode_name(enum td_plan_mode mode)
{
    static const char *const names[] = {"pd", "colocated", "hybrid"};
    return names[mode];
}

td_status td_plan_prices(const char *text, struct td_plan_query *q, struct td_err *err)
{
    bool is_given[TD_PLAN_MAX_TABLES] = {false};
    for (const char *at = text + strspn(text, " ,"); *at; at += strspn(at, " ,")) {
        char item[200], *end;
        size_t n = strcspn(at, " ,");
        if (n >= sizeof item)
            return td_fail(err, TD_ERR_INVALID, "price: \"%.60s\" is not TABLE=PRICE", at);
        snprintf(item, sizeof item, "%.*s", (int)n, at);
        at += n;
        char *value = strrchr(item, '=');
        if (value) *value++ = 0;
        const char *number = value ? value : item;
        double price = strtod(number, &end);
        if (end == number || *end || !(price > 0 && price <= 1e6))
            return td_fail(err, TD_ERR_INVALID,
                           "price is \"%s\", must be above 0 and up to 1e6 for a GPU and hour",
                           number);
        uint32_t n_set = 0;
        for (uint32_t i = 0; i < q->n_tables; i++) {
            if (value && strcmp(item, q->tables[i])) continue;
            q->price[i] = price;
            is_given[i] = true;
            n_set++;
        }
        if (n_set == 0)
            return td_fail(err, TD_ERR_NOT_FOUND,
                           "price: \"%s\" is none of the model's latency tables", item);
    }
    for (uint32_t i = 0; i < q->n_tables && text[strspn(text, " ,")]; i++)
        if (!is_given[i]) return td_fail(err, TD_ERR_INVALID, "price: %s has none", q->tables[i]);
    return TD_OK;
}

td_status td_plan_tables(char *text, struct td_plan_query *q, struct td_err *err)
{
    q->n_tables = 0;
    size_t n = strlen(text);
    for (uint32_t i = 0; td_perf_name(i) && !strchr(text, ','); i++)
        if (!strncmp(td_perf_name(i), text, n) &&
            (td_perf_name(i)[n] == 0 || td_perf_name(i)[n] == ':') &&
            q->n_tables < TD_PLAN_MAX_TABLES)
            q->tables[q->n_tables++] = td_perf_name(i);
    if (q->n_tables) return TD_OK;
    char *save = NULL;
    for (char *t = strtok_r(text, ", ", &save); t; t = strtok_r(NULL, ", ", &save)) {
        if (q->n_tables == TD_PLAN_MAX_TABLES)
            return td_fail(err, TD_ERR_LIMIT, "model lists more than %d latency tables",
                           TD_PLAN_MAX_TABLES);
        q->tables[q->n_tables++] = t;
    }
    return q->n_tables ? TD_OK : td_fail(err, TD_ERR_INVALID, "model is empty");
}

/* The next item of a list, "" at its end; longer ones are cut and then are no name. */
static void next_item(const char **at, char *item, size_t bytes)
{
    *at += strspn(*at, " ,");
    size_t n = strcspn(*at, " ,");
    snprintf(item, bytes, "%.*s", (int)n, *at);
    *at += n;
}

/* One parallelism of one card, as the next table. */
static td_status add_gpu_table(const struct td_gpu *gpu, const struct td_model_config *model,
                               uint32_t tp, enum td_dtype kv, struct td_plan_query *q,
                               struct td_err *err)
{
    if (q->n_tables == TD_PLAN_MAX_TABLES)
        return td_fail(err, TD_ERR_LIMIT, "gpu and tp list more than %d tables",
                       TD_PLAN_MAX_TABLES);
    struct td_perf *p = &q->perfs[q->n_tables];
    for (uint32_t i = 0; i < q->n_tables; i++)
        if (q->perfs[i].gpus == tp && !strncmp(q->tables[i], gpu->name, strlen(gpu->name)))
            return td_fail(err, TD_ERR_INVALID, "gpu and tp name %s twice", q->tables[i]);
    td_status s = td_gpu_perf(gpu, model, tp, kv, p, err);
    if (!s) q->tables[q->n_tables++] = p->name;
    return s;
}

td_status td_plan_gpu_tables(const char *gpus, const char *tps, const char *path,
                             const char *kv_dtype, struct td_plan_query *q, struct td_err *err)
{
    struct td_model_config model;
    const struct td_gpu *gpu;
    char name[48], degree[16], *end;
    bool is_every = !tps[strspn(tps, " ,")];
    enum td_dtype kv = TD_BF16;
    td_status s = td_gpu_model_load(path, &model, err);
    if (!s) s = td_gpu_kv_dtype(kv_dtype, &kv, err);
    q->n_tables = 0;
    for (next_item(&gpus, name, sizeof name); !s && name[0]; next_item(&gpus, name, sizeof name)) {
        uint32_t n_before = q->n_tables;
        struct td_err why = {0}; /* the last degree that could not be */
        if ((s = td_gpu_find(name, &gpu, err))) break;
        for (uint32_t tp = 1; is_every && tp <= TD_GPU_MAX_TP && tp <= q->gpus; tp *= 2)
            (void)add_gpu_table(gpu, &model, tp, kv, q, &why);
        const char *at = tps;
        for (next_item(&at, degree, sizeof degree); !s && degree[0];
             next_item(&at, degree, sizeof degree)) {
            unsigned long tp = strtoul(degree, &end, 10);
            if (*end || !isdigit((unsigned char)degree[0]) || tp > q->gpus)
                s = td_fail(err, TD_ERR_INVALID,
                            "tp is \"%s\", must be 1, 2, 4 or 8 and at most gpus (%u)", degree,
                            q->gpus);
            else
                s = add_gpu_table(gpu, &model, (uint32_t)tp, kv, q, err);
        }
        if (!s && q->n_tables == n_before) s = td_fail(err, why.code, "%s", why.msg);
    }
    if (!s && q->n_tables == 0) s = td_fail(err, TD_ERR_INVALID, "gpu is empty");
    return s;
}

/* ---- closed form ----------------------------------------------------------------------------- */

struct search {
    const struct td_plan_query *q;
    struct td_perf perfs[TD_PLAN_MAX_TABLES];
    double isl, osl, fresh;  /* means; fresh: prompt tokens to compute */
    double ttft_ms, tpot_ms; /* the tightest of any class: what closed forms keep; 0 = none */
    struct td_plan_row *rows;
    uint32_t n_rows;
};

/* Requests/s of one prefill worker whose M/D/1 quantile stays within the objective. */
static double prefill_rate(const struct search *s, const struct td_perf *p)
{
    double service = td_perf_prefill_s(p, (int64_t)s->fresh, (int64_t)(s->isl - s->fresh),
                                       s->q->max_step_tokens),
           target = s->ttft_ms / 1e3;
    if (target <= 0) return 0.95 / service;
    if (service >= target) return 0;
    double low = 0, high = 1 / service;
    for (int i = 0; i < 60; i++) {
        double mid = (low + high) / 2;
        if (td_md1_quantile_s(mid, service, s->q->attainment) <= target)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static double tpot_target(const struct search *s)
{
    return s->tpot_ms > 0 ? s->tpot_ms / 1e3 : 1e9;
}

/* One worker that does both: prefill rows lengthen the decode steps that they share. */
static double colocated_rate(const struct search *s, const struct td_perf *p)
{
    double pre = td_perf_prefill_s(p, (int64_t)s->fresh, (int64_t)(s->isl - s->fresh),
                                   s->q->max_step_tokens),
           most = prefill_rate(s, p);
    double low = 0, high = most;
    for (int i = 0; i < 60 && high > 0; i++) {
        double mid = (low + high) / 2, left = 1 - mid * pre; /* share of time for decode */
        int64_t b = left > 0
                        ? td_decode_batch(p, s->isl, s->osl, tpot_target(s) * left, s->q->max_batch)
                        : 0;
        struct td_perf_batch at = {.decode_rows = b,
                                   .context_tokens = (double)b * (s->isl + s->osl / 2)};
        double rate = b ? (double)b * left / (fmax(1, s->osl - 1) * td_perf_step_s(p, &at)) : 0;
        if (rate >= mid)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static double link_rate(const struct search *s, const struct td_perf *p)
{
    double bytes = s->fresh * p->kv_bytes_per_token;
    return s->q->nic_bytes_per_s > 0 && bytes > 0 ? 0.8 * s->q->nic_bytes_per_s / bytes : INFINITY;
}

static double price_of(const struct td_plan_query *q, uint32_t table)
{
    return q->price[table] > 0 ? q->price[table] : 1;
}

static double cost_of(const struct search *s, const struct td_plan_row *row)
{
    const struct td_plan_query *q = s->q;
    double cost = 0, least = INFINITY;
    for (uint32_t i = 0; i < q->n_tables; i++) {
        uint32_t workers = (q->tables[i] == row->prefill ? row->n_prefill : 0) +
                           (q->tables[i] == row->decode ? row->n_decode : 0);
        cost += price_of(q, i) * s->perfs[i].gpus * workers;
        least = fmin(least, price_of(q, i));
    }
    return q->target_rate > 0 ? cost : cost + least * (q->gpus - row->gpus);
}

static void add_row(struct search *s, struct td_plan_row row)
{
    row.cost = cost_of(s, &row);
    s->rows = td_sim_grow(s->rows, s->n_rows + 1, sizeof *s->rows);
    s->rows[s->n_rows++] = row;
}

static void list_layouts(struct search *s)
{
    const struct td_plan_query *q = s->q;
    uint32_t least = q->target_rate > 0 ? 1 : q->gpus; /* for a wanted rate every size counts */
    for (uint32_t gpus = least; gpus <= q->gpus; gpus++)
        for (uint32_t i = 0; i < q->n_tables; i++) {
            const struct td_perf *p = &s->perfs[i];
            if (q->colocated && p->gpus <= gpus && (q->target_rate <= 0 || gpus % p->gpus == 0)) {
                uint32_t n = gpus / p->gpus;
                double rate = colocated_rate(s, p) * n;
                if (rate > 0)
                    add_row(s, (struct td_plan_row){.mode = TD_PLAN_COLOCATED,
                                                    .decode = q->tables[i],
                                                    .prefill = q->tables[i],
                                                    .n_decode = n,
                                                    .gpus = n * p->gpus,
                                                    .estimate = rate});
            }
            double pre = prefill_rate(s, p);
            for (uint32_t k = 0; k < q->n_tables && (q->pd || q->hybrid) && pre > 0; k++) {
                const struct td_perf *d = &s->perfs[k];
                double dec = td_decode_rate(d, s->isl, s->osl, tpot_target(s), q->max_batch);
                if (dec <= 0) continue;
                for (uint32_t n = 1; n * p->gpus + d->gpus <= gpus; n++) {
                    uint32_t m = (gpus - n * p->gpus) / d->gpus;
                    double pe = fmin(pre, link_rate(s, p)) * n,
                           de = fmin(dec * 0.92, link_rate(s, d)) * m;
                    uint32_t used = n * p->gpus + m * d->gpus;
                    /* it stands under its own size */
                    if (q->target_rate > 0 && used != gpus) continue;
                    struct td_plan_row row = {.prefill = q->tables[i],
                                              .decode = q->tables[k],
                                              .n_prefill = n,
                                              .n_decode = m,
                                              .gpus = used,
                                              .estimate = fmin(pe, de),
                                              .prefill_estimate = pe,
                                              .decode_estimate = de};
                    if (q->pd) add_row(s, row);
                    row.mode = TD_PLAN_HYBRID; /* never worse, by these forms, than its decode
                                                  workers by themselves */
                    row.estimate = fmax(row.estimate, colocated_rate(s, d) * m);
                    if (q->hybrid) add_row(s, row);
                }
            }
        }
}

static int by_estimate(const void *a, const void *b)
{
    const struct td_plan_row *x = a, *y = b;
    double u = x->estimate / x->cost, v = y->estimate / y->cost;
    return u > v ? -1 : u < v;
}

static int by_cost(const void *a, const void *b)
{
    const struct td_plan_row *x = a, *y = b;
    if (x->cost != y->cost) return x->cost < y->cost ? -1 : 1;
    return x->estimate > y->estimate ? -1 : x->estimate < y->estimate;
}

static int by_goodput(const void *a, const void *b)
{
    const struct td_plan_row *x = a, *y = b;
    if (x->simulated != y->simulated) return x->simulated ? -1 : 1;
    double u = (x->simulated ? x->at.rate : x->estimate) / x->cost,
           v = (y->simulated ? y->at.rate : y->estimate) / y->cost;
    return u > v ? -1 : u < v;
}

/* ---- simulation ------------------------------------------------------------------------------ */

static void config_of(const struct search *s, const struct td_plan_row *row,
                      struct td_sim_config *c)
{
    const struct td_plan_query *q = s->q;
    td_sim_config_init(c);
    for (uint32_t i = 0; i < q->n_tables; i++)
        for (int decode = 0; decode < 2; decode++) {
            uint32_t n = decode ? row->n_decode : row->n_prefill;
            if (n == 0 || q->tables[i] != (decode ? row->decode : row->prefill)) continue;
            c->router.priors[c->router.n_priors++] = &s->perfs[i];
            c->groups[c->n_groups++] = (struct td_sim_group){.decode = decode,
                                                             .count = n,
                                                             .perf = s->perfs[i],
                                                             .max_batch = q->max_batch,
                                                             .max_step_tokens = q->max_step_tokens,
                                                             .max_seqs = 1024,
                                                             .nic_bytes_per_s = q->nic_bytes_per_s};
        }
    c->router.mode = td_plan_mode_name(row->mode);
    c->router.policy = q->policy;
    c->router.attainment = q->attainment;
    c->router.classes[0] = (struct td_core_class){
        .name = "default", .ttft_ms = q->ttft_ms, .tpot_ms = q->tpot_ms, .weight = 1};
    c->router.n_classes = 1;
    if (q->mix.n_classes) {
        memcpy(c->router.classes, q->mix.classes, sizeof q->mix.classes);
        c->router.n_classes = q->mix.n_classes;
    }
    c->router.link_bytes_per_s = q->nic_bytes_per_s;
    c->router.link_tau_s = (double)c->link_tau_ns / 1e9;
    c->grace_s = 30;
    c->tick_ns = 200000000;
}

static void share_prefix(const struct search *s, struct td_sim_trace *t)
{
    uint32_t n = (uint32_t)(s->q->prefix / BLOCK);
    if (n == 0) return;
    t->hashes = td_sim_grow(t->hashes, n, sizeof *t->hashes);
    for (uint32_t i = 0; i < n; i++) t->hashes[i] = i + 1;
    t->n_hashes = n;
    t->hash_tokens = BLOCK;
    for (uint32_t i = 0; i < t->n; i++) t->requests[i].n_hashes = n; /* as far as its prompt goes */
}

/* Simulates a row at a rate; long enough for its requests to come and go many times. ret_least: the
 * worst class's attainment. */
static td_status simulate(const struct search *s, const struct td_plan_row *row, double rate,
                          struct td_sim_summary *ret, double *ret_least, struct td_err *err)
{
    const struct td_plan_query *q = s->q;
    double residence = (s->ttft_ms > 0 ? s->ttft_ms / 1e3 : 1) +
                       s->osl * (s->tpot_ms > 0 ? s->tpot_ms / 1e3 : 0.1);
    struct td_sim_load l = q->load;
    l.arrival = q->cv == 1 ? TD_ARRIVAL_POISSON : TD_ARRIVAL_GAMMA;
    l.cv = q->cv;
    l.rate = rate;
    l.isl = q->isl;
    l.osl = q->osl;
    double warmup = 3 * residence, span = fmax(8 * residence, 1000 / rate);
    l.duration_s = warmup + span;
    struct td_sim_config c;
    config_of(s, row, &c);
    c.warmup_s = warmup;
    struct td_sim_summary runs[16], parts[TD_CORE_MAX_CLASSES][16];
    td_status st = TD_OK;
    *ret_least = 1;
    for (uint32_t k = 0; k < q->seeds && !st; k++) {
        struct td_sim_trace t;
        struct td_sim_result r;
        l.seed = c.seed = c.router.seed = k + 1;
        if ((st = td_sim_trace_make(&l, q->file, &t, err))) break;
        if (!q->file) share_prefix(s, &t);
        st = td_sim_run(&c, &t, NULL, NULL, &r, err);
        if (!st) {
            td_sim_summarise(&c, &r, &runs[k]);
            runs[k].rate = rate;
            for (uint32_t i = 0; i < q->mix.n_classes; i++)
                td_sim_summarise_part(&c, &r, (int32_t)i, -1, &parts[i][k]);
            td_sim_result_free(&r);
        }
        td_sim_trace_free(&t);
    }
    if (!st) td_sim_pool(runs, q->seeds, ret);
    for (uint32_t i = 0; i < q->mix.n_classes && !st; i++) {
        struct td_sim_summary part;
        td_sim_pool(parts[i], q->seeds, &part);
        if (part.n) *ret_least = fmin(*ret_least, part.attainment);
    }
    return st;
}

static bool reaches(const struct search *s, const struct td_sim_summary *x, double least)
{
    return x->ci_low >= s->q->attainment && least >= s->q->attainment;
}

static td_status find_rate(const struct search *s, struct td_plan_row *row, struct td_err *err)
{
    struct td_sim_summary at, good = {0}, bad = {0};
    double low = 0, high = 0, rate = row->estimate, least;
    td_status st = TD_OK;
    for (int i = 0; i < 24 && !st; i++) {
        if ((st = simulate(s, row, rate, &at, &least, err))) break;
        if (reaches(s, &at, least)) {
            low = rate;
            good = at;
        } else {
            high = rate;
            bad = at;
        }
        if (high > 0 && low > 0 && high - low <= s->q->tolerance * high) break;
        if (low == 0 && rate < row->estimate / 64) break; /* no rate is low enough */
        rate = low == 0 ? rate / 2 : high == 0 ? rate * 1.5 : (low + high) / 2;
    }
    row->simulated = true;
    row->at = good;
    row->at.rate = low;
    const char *bound = bad.n == 0                      ? ""
                        : bad.n_ttft_ok < bad.n_tpot_ok ? "prefill"
                        : bad.preemptions > bad.n / 10  ? "memory"
                                                        : "decode";
    snprintf(row->bound, sizeof row->bound, "%s", bound);
    return st;
}

/* Nobody else is better in goodput for the money, TTFT and TPOT at once. */
static void mark_pareto(struct td_plan_row *rows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        rows[i].pareto = rows[i].simulated && rows[i].at.rate > 0;
        for (uint32_t k = 0; k < n && rows[i].pareto; k++) {
            const struct td_plan_row *a = &rows[k], *b = &rows[i];
            if (k == i || !a->simulated || a->at.rate <= 0) continue;
            double u = a->at.rate / a->cost, v = b->at.rate / b->cost;
            if (u >= v && a->at.ttft_ms.p90 <= b->at.ttft_ms.p90 &&
                a->at.tpot_ms.p90 <= b->at.tpot_ms.p90 &&
                (u > v || a->at.ttft_ms.p90 < b->at.ttft_ms.p90 ||
                 a->at.tpot_ms.p90 < b->at.tpot_ms.p90))
                rows[i].pareto = false;
        }
    }
}

static td_status find_size(struct search *s,
                           void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                           struct td_err *err)
{
    qsort(s->rows, s->n_rows, sizeof *s->rows, by_cost);
    uint32_t kept = 0;
    double cost = 0;
    bool found = false;
    for (uint32_t i = 0, tried = 0; i < s->n_rows && !found; i++) {
        struct td_plan_row *row = &s->rows[i];
        if (row->cost != cost) tried = 0;
        cost = row->cost;
        /* the closed form is not that far off */
        if (row->estimate < s->q->target_rate * 0.6 || tried++ >= s->q->top) continue;
        double least;
        td_status st = simulate(s, row, s->q->target_rate, &row->at, &least, err);
        if (st) return st;
        row->simulated = true;
        if (progress) progress(ctx, i + 1, s->n_rows);
        s->rows[kept++] = *row;
        found = reaches(s, &row->at, least);
    }
    /* What was tried, the answer first. */
    if (kept) {
        struct td_plan_row last = s->rows[kept - 1];
        memmove(s->rows + 1, s->rows, (kept - 1) * sizeof *s->rows);
        s->rows[0] = last;
    }
    s->n_rows = kept;
    return kept && found
               ? TD_OK
               : td_fail(err, TD_ERR_NOT_FOUND,
                         "no layout of up to %u GPUs reaches %g requests/s within the objectives",
                         s->q->gpus, s->q->target_rate);
}

static double tighter(double a_ms, double b_ms)
{
    return a_ms > 0 && b_ms > 0 ? fmin(a_ms, b_ms) : fmax(a_ms, b_ms);
}

static bool file_means(const struct td_plan_query *q, double *ret_isl, double *ret_osl)
{
    double prompt = 0, output = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < q->file->n; i++) {
        const struct td_sim_request *row = &q->file->requests[i];
        if ((q->load.max_prompt && row->n_prompt > q->load.max_prompt) ||
            (q->load.max_output && row->n_output > q->load.max_output))
            continue;
        prompt += row->n_prompt;
        output += row->n_output;
        n++;
    }
    if (n == 0) return false;
    *ret_isl = prompt / n;
    *ret_osl = output / n;
    return true;
}

static td_status check_query(const struct search *s, struct td_err *err)
{
    const struct td_plan_query *q = s->q;
    if (q->file && q->prefix > 0)
        return td_fail(err, TD_ERR_INVALID,
                       "prefix is %g: with a trace the prefixes are the file's", q->prefix);
    if (q->seeds < 1 || q->seeds > 16)
        return td_fail(err, TD_ERR_INVALID, "seeds is %u, must be 1..16", q->seeds);
    if (q->prefix >= s->isl)
        return td_fail(err, TD_ERR_INVALID, "prefix is %g, must be below the prompt's %g tokens",
                       q->prefix, s->isl);
    return TD_OK;
}

static td_status load_tables(struct search *s, struct td_err *err)
{
    const struct td_plan_query *q = s->q;
    td_status st = TD_OK;
    for (uint32_t i = 0; i < q->n_tables && !st; i++) {
        if (q->perfs[i].gpus)
            s->perfs[i] = q->perfs[i];
        else
            st = td_perf_load(q->tables[i], &s->perfs[i], err);
        if (!st && !s->perfs[i].kv_tokens)
            st = td_fail(err, TD_ERR_INVALID,
                         "latency %s does not say how many KV tokens a worker holds",
                         s->perfs[i].name);
    }
    for (uint32_t i = 0; i < q->n_tables && !st; i++)
        if (s->perfs[i].max_context && s->isl + s->osl > s->perfs[i].max_context)
            st = td_fail(err, TD_ERR_LIMIT,
                         "isl and osl are %.0f tokens together, limit %d (the model's "
                         "max_position_embeddings)",
                         s->isl + s->osl, s->perfs[i].max_context);
    return st;
}

/* Simulates the layouts that the closed form puts first, and sorts all by what came of it. */
static td_status rank_layouts(struct search *s,
                              void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                              struct td_err *err)
{
    td_status st = TD_OK;
    qsort(s->rows, s->n_rows, sizeof *s->rows, by_estimate);
    uint32_t n = s->n_rows < s->q->top ? s->n_rows : s->q->top;
    for (uint32_t i = 0; i < n && !st && !s->q->closed_form_only; i++) {
        st = find_rate(s, &s->rows[i], err);
        if (progress) progress(ctx, i + 1, n);
    }
    if (st) return st;
    qsort(s->rows, s->n_rows, sizeof *s->rows, by_goodput);
    mark_pareto(s->rows, s->n_rows);
    return TD_OK;
}

td_status td_plan_search(const struct td_plan_query *q,
                         void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                         struct td_plan_row **ret_rows, uint32_t *ret_n, struct td_err *err)
{
    struct search s = {.q = q,
                       .isl = mean_length(&q->isl),
                       .osl = mean_length(&q->osl),
                       .ttft_ms = q->ttft_ms,
                       .tpot_ms = q->tpot_ms};
    for (uint32_t i = 0; i < q->mix.n_classes; i++) {
        const struct td_core_class *k = &q->mix.classes[i];
        s.ttft_ms = tighter(i ? s.ttft_ms : 0, k->ttft_ms);
        s.tpot_ms = tighter(i ? s.tpot_ms : 0, k->tpot_ms);
    }
    if (q->file && !file_means(q, &s.isl, &s.osl))
        return td_fail(err, TD_ERR_NOT_FOUND,
                       "no row of the trace is within max_prompt %d and max_output %d",
                       q->load.max_prompt, q->load.max_output);
    td_status st = check_query(&s, err);
    if (st) return st;
    s.fresh = s.isl - floor(q->prefix / BLOCK) * BLOCK;
    st = load_tables(&s, err);
    if (!st) list_layouts(&s);
    if (!st && s.n_rows == 0)
        st = td_fail(err, TD_ERR_NOT_FOUND,
                     "no layout of %u GPUs meets TTFT %g ms and TPOT %g ms even without load",
                     q->gpus, s.ttft_ms, s.tpot_ms);
    if (!st && q->target_rate > 0 && !q->closed_form_only)
        st = find_size(&s, progress, ctx, err);
    else if (!st)
        st = rank_layouts(&s, progress, ctx, err);
    if (st) {
        free(s.rows);
        return st;
    }
    *ret_rows = s.rows;
    *ret_n = s.n_rows;
    return TD_OK;
}
