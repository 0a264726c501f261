/* status.c - `tandem status`: the router's view of the cluster, as tables or as JSON. On a terminal
 * no line is longer than the terminal is wide, or than 80 columns where it is wider: names are cut
 * in the middle. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/terminal.h"
#include "common/base/clock.h"
#include "common/base/say.h"
#include "router/http/status_json.h"

enum { MIN_COLUMNS = 80, MAX_NAME_COLUMNS = 200 };

struct status_config {
    struct cli_server at;
    uint64_t interval_ms;
    bool json, watch;
};

/* Where a picture goes; columns 0: no terminal, print_wide's. */
struct page {
    FILE *out;
    unsigned columns;
};

// clang-format off
static const struct td_option options[] = {
    CLI_SERVER_OPTIONS(struct status_config, at),
    CLI_SECRET_OPTION(struct status_config, at),
    {"json", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct status_config, json),
     "one JSON object"},
    {"watch", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct status_config, watch),
     "again and again, in the same place on a terminal, until Ctrl-C"},
    {"interval_ms", TD_OPT_U64, "1000", 100, 3600000, NULL,
     offsetof(struct status_config, interval_ms), "with --watch: between two looks"},
    {0},
};
// clang-format on

static void print_json(const Tandem__V1__StatusResponse *s, FILE *out, bool one_line)
{
    json_t *root = status_json(s);
    json_dumpf(root, out, one_line ? JSON_COMPACT : JSON_INDENT(2));
    fputc('\n', out);
    json_decref(root);
}

/* ---- columns --------------------------------------------------------------------------------- */

/* A name in so many columns, and spaces behind it. */
static void put_name(const struct page *p, const char *name, unsigned columns)
{
    char text[4 * MAX_NAME_COLUMNS + 4];
    cli_fit(name, columns, text, sizeof text);
    unsigned width = cli_width(text, strlen(text));
    fprintf(p->out, "%s%*s", text, width < columns ? (int)(columns - width) : 0, "");
}

/* Columns for names of which the widest has `widest`, when the rest of a line takes `rest`. */
static unsigned name_columns(const struct page *p, unsigned widest, unsigned rest)
{
    unsigned all = p->columns > rest ? p->columns - rest : 0;
    if (widest < all) all = widest;
    if (all < 6) all = 6;
    return all < MAX_NAME_COLUMNS ? all : MAX_NAME_COLUMNS;
}

static unsigned wider(unsigned columns, const char *text)
{
    unsigned width = cli_width(text, strlen(text));
    return width > columns ? width : columns;
}

/* A number in at most 7 columns: 1234.5, 45678, 1.2e+08. */
static const char *number(double x, char text[32])
{
    snprintf(text, 32, x < 99999.95 ? "%.1f" : x < 9999999 ? "%.0f" : "%.1e", x);
    return text;
}

/* Parts of a line, with three spaces between them; a part that does not fit begins the next. */
struct parts {
    const struct page *page;
    unsigned at;
};
static void part(struct parts *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void part(struct parts *l, const char *format, ...)
{
    char text[512], fitted[4 * MAX_NAME_COLUMNS + 4];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    unsigned columns = l->page->columns && l->page->columns < MAX_NAME_COLUMNS ? l->page->columns
                                                                               : MAX_NAME_COLUMNS;
    cli_fit(text, columns, fitted, sizeof fitted);
    unsigned width = cli_width(fitted, strlen(fitted));
    if (l->at && l->at + 3 + width > l->page->columns) {
        fputc('\n', l->page->out);
        l->at = 0;
    }
    fprintf(l->page->out, "%s%s", l->at ? "   " : "", fitted);
    l->at += width + (l->at ? 3 : 0);
}

static void end_parts(struct parts *l)
{
    if (l->at) fputc('\n', l->page->out);
    l->at = 0;
}

/* SLO classes to tell: where there is one alone, "objectives met" has it. All models have the same
 * ones, in the same order. */
static size_t n_told_classes(const Tandem__V1__StatusResponse *s)
{
    size_t n = s->n_models ? s->models[0]->n_classes : 0;
    return n > 1 ? n : 0;
}

/* "class NAME 93.1 % of 120": what met its objectives, of all models. */
static const char *class_text(const Tandem__V1__StatusResponse *s, size_t i, char *text,
                              size_t text_bytes)
{
    uint64_t judged = 0, good = 0;
    for (size_t k = 0; k < s->n_models; k++) {
        if (i >= s->models[k]->n_classes) continue;
        judged += s->models[k]->classes[i]->judged;
        good += s->models[k]->classes[i]->good;
    }
    const char *name = s->models[0]->classes[i]->name;
    if (judged)
        snprintf(text, text_bytes, "class %s %.1f %% of %llu", name,
                 100 * (double)good / (double)judged, (unsigned long long)judged);
    else
        snprintf(text, text_bytes, "class %s none finished", name);
    return text;
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* What is of one model, where there are several. */
static void print_models(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    unsigned widest = 5, names_columns;
    for (size_t i = 0; i < s->n_models; i++) widest = wider(widest, s->models[i]->name);
    names_columns = name_columns(p, widest, 62);
    put_name(p, "MODEL", names_columns);
    fprintf(p->out, " %6s %5s %8s %6s %7s %-8s %7s %7s\n", "QUEUED", "LIVE", "FINISHED", "FAILED",
            "REQ/s", "BOUND BY", "PREFILL", "DECODE");
    for (size_t i = 0; i < s->n_models; i++) {
        const Tandem__V1__ModelStatus *m = s->models[i];
        char rate[32];
        put_name(p, m->name, names_columns);
        fprintf(p->out, " %6u %5u %8llu %6llu %7s %-8s %7u %7u\n", m->queued, m->live,
                (unsigned long long)m->finished, (unsigned long long)m->failed,
                number(m->arrival_rate, rate), m->bound, m->want_prefill, m->want_decode);
        struct parts l = {p, 0};
        if (m->n_aliases) part(&l, "  also");
        for (size_t k = 0; k < m->n_aliases; k++) part(&l, "%s", m->aliases[k]);
        end_parts(&l);
    }
}

/* Latencies since the start, and the share of objectives that were met. */
static void print_latencies(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    unsigned widest = 8, columns;
    bool any = false;
    for (size_t i = 0; i < s->n_models; i++) {
        widest = wider(widest, s->models[i]->name);
        any |= s->models[i]->ttft_p99_ms > 0 || s->models[i]->judged;
    }
    if (!any) return;
    columns = name_columns(p, widest, 58);
    fputc('\n', p->out);
    put_name(p, "LATENCY", columns);
    fprintf(p->out, " %10s %10s %10s %10s %13s\n", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99",
            "ATTAINMENT");
    for (size_t i = 0; i < s->n_models; i++) {
        const Tandem__V1__ModelStatus *m = s->models[i];
        char t[4][32], met[32] = "no objectives";
        if (m->judged)
            snprintf(met, sizeof met, "%.1f %%", 100.0 * (double)m->good / (double)m->judged);
        put_name(p, m->name, columns);
        fprintf(p->out, " %7s ms %7s ms %7s ms %7s ms %13s\n", number(m->ttft_p50_ms, t[0]),
                number(m->ttft_p99_ms, t[1]), number(m->tpot_p50_ms, t[2]),
                number(m->tpot_p99_ms, t[3]), met);
    }
}

static unsigned widest_worker(const Tandem__V1__StatusResponse *s)
{
    unsigned widest = 6;
    for (size_t i = 0; i < s->n_workers; i++) widest = wider(widest, s->workers[i]->name);
    return widest;
}

static void print_loads(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    unsigned columns = name_columns(p, widest_worker(s), 68);
    fputc('\n', p->out);
    put_name(p, "WORKER", columns);
    fprintf(p->out, " %-7s %-8s %21s %4s %4s %9s %8s\n", "ROLE", "STATE", "KV HELD+CACHED OF",
            "RUN", "WAIT", "PREFILL/s", "DECODE/s");
    for (size_t i = 0; i < s->n_workers; i++) {
        const Tandem__V1__WorkerStatus *w = s->workers[i];
        char kv[64], t[2][32];
        snprintf(kv, sizeof kv, "%u+%u %u", w->kv_blocks_held, w->kv_blocks_cached, w->kv_blocks);
        put_name(p, w->name, columns);
        fprintf(p->out, " %-7s %-8s %21s %4u %4u %9s %8s\n", w->role, w->state, kv, w->running,
                w->waiting, number(w->prefill_tokens_per_s, t[0]),
                number(w->decode_tokens_per_s, t[1]));
    }
}

/* What does not change while they run. */
static void print_workers(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    unsigned names = widest_worker(s), addresses = 7, models = 5, kernels = 7;
    for (size_t i = 0; i < s->n_workers; i++) {
        addresses = wider(addresses, s->workers[i]->address);
        models = wider(models, s->workers[i]->model);
        kernels = wider(kernels, s->workers[i]->kernels);
    }
    if (s->n_models <= 1) models = 0;
    if (p->columns) { /* 20 are TP, KV, B/TOKEN and the spaces; the others share what is left */
        unsigned left = p->columns - 21, share = left / (models ? 4 : 3);
        if (names > share) names = share;
        if (addresses > share + 2) addresses = share + 2;
        if (models > share) models = share;
        unsigned taken = names + addresses + models + (models ? 1 : 0);
        if (kernels > left - taken) kernels = left - taken;
    }
    fputc('\n', p->out);
    for (size_t i = 0; i <= s->n_workers; i++) {
        static const Tandem__V1__WorkerStatus head = {.name = (char *)(uintptr_t) "WORKER",
                                                      .address = (char *)(uintptr_t) "ADDRESS",
                                                      .kv_dtype = (char *)(uintptr_t) "KV",
                                                      .model = (char *)(uintptr_t) "MODEL",
                                                      .kernels = (char *)(uintptr_t) "KERNELS"};
        const Tandem__V1__WorkerStatus *w = i ? s->workers[i - 1] : &head;
        char tp[16] = "TP", bytes[32] = "B/TOKEN";
        if (i) snprintf(tp, sizeof tp, "%u", w->tp);
        if (i) snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)w->kv_bytes_per_token);
        put_name(p, w->name, names);
        fputc(' ', p->out);
        put_name(p, w->address, addresses);
        fprintf(p->out, " %2s %-4s %8s ", tp, w->kv_dtype, bytes);
        if (models) put_name(p, w->model, models), fputc(' ', p->out);
        /* "avx512bf16 (measured, ...)": the name at least */
        size_t n = cli_width(w->kernels, strlen(w->kernels)) > kernels ? strcspn(w->kernels, " ")
                                                                       : strlen(w->kernels);
        fprintf(p->out, "%.*s\n", (int)n, w->kernels);
    }
}

static void print_refused(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    for (size_t i = 0; i < s->n_refused_workers; i++) {
        const Tandem__V1__RefusedWorker *w = s->refused_workers[i];
        struct parts l = {p, 0};
        part(&l, "%s (pid %u) is refused, %u times, last %llu s ago:", w->name, w->pid, w->times,
             (unsigned long long)(w->age_ms / 1000));
        for (const char *at = w->reason; *at;) { /* by words */
            size_t n = strcspn(at, " ");
            while (at[n] && n + strcspn(at + n + 1, " ") + 3 < 76)
                n += 1 + strcspn(at + n + 1, " ");
            part(&l, "%.*s", (int)n, at);
            at += n + (at[n] == ' ');
        }
        if (!w->proved) part(&l, "(not proved to be a worker of this cluster)");
        end_parts(&l);
    }
}

static void print_tables(const struct page *p, const Tandem__V1__StatusResponse *s)
{
    struct parts l = {p, 0};
    char text[128];
    part(&l, "model %s", s->n_models > 1 ? "(several)" : s->model);
    part(&l, "mode %s", s->mode);
    part(&l, "policy %s", s->policy);
    part(&l, "up %llu s", (unsigned long long)(s->uptime_ms / 1000));
    end_parts(&l);
    part(&l, "queued %u", s->queued);
    part(&l, "live %u", s->live);
    part(&l, "finished %llu", (unsigned long long)s->finished);
    part(&l, "failed %llu", (unsigned long long)s->failed);
    part(&l, "refused %llu", (unsigned long long)s->refused);
    part(&l, "failovers %llu", (unsigned long long)s->failovers);
    end_parts(&l);
    part(&l, "%.1f requests/s", s->arrival_rate);
    part(&l, "bound by %s", s->bound[0] ? s->bound : "(unknown)");
    if (s->attainment >= 0) part(&l, "objectives met %.1f %%", 100 * s->attainment);
    if (s->want_decode && s->n_models <= 1)
        part(&l, "the load asks for %u prefill and %u decode workers", s->want_prefill,
             s->want_decode);
    end_parts(&l);
    for (size_t i = 0; i < n_told_classes(s); i++)
        part(&l, "%s", class_text(s, i, text, sizeof text));
    end_parts(&l);
    if (s->n_models > 1) {
        fputc('\n', p->out);
        print_models(p, s);
    }
    print_latencies(p, s);
    if (s->n_workers) print_loads(p, s);
    if (s->n_workers && !s->withheld) print_workers(p, s);
    if (!s->n_workers) fprintf(p->out, "no workers have joined\n");
    print_refused(p, s);
    if (s->withheld) {
        part(&l, "names, addresses and loads are told to operators:");
        part(&l, "--cluster-secret-file (TANDEM_CLUSTER_SECRET_FILE) with the cluster's secret");
        if (!s->challenge.len) {
            part(&l, "or a certificate with a name of the router's --tls-operator-names");
        }
        end_parts(&l);
    }
}

/* ---- in a pipe: wide lines, names whole; programs take --json -------------------------------- */

/* What is of one model, where there are several. */
static void print_models_wide(FILE *out, const Tandem__V1__StatusResponse *s)
{
    fprintf(out, "%-40s %7s %7s %9s %8s %10s %9s %8s %7s\n", "MODEL", "QUEUED", "LIVE", "FINISHED",
            "FAILED", "REQUESTS/s", "BOUND BY", "PREFILL", "DECODE");
    for (size_t i = 0; i < s->n_models; i++) {
        const Tandem__V1__ModelStatus *m = s->models[i];
        char names[600];
        size_t used = (size_t)snprintf(names, sizeof names, "%s", m->name);
        for (size_t k = 0; k < m->n_aliases && used < sizeof names; k++)
            used += (size_t)snprintf(names + used, sizeof names - used, ", %s", m->aliases[k]);
        fprintf(out, "%-40s %7u %7u %9llu %8llu %10.1f %9s %8u %7u\n", names, m->queued, m->live,
                (unsigned long long)m->finished, (unsigned long long)m->failed, m->arrival_rate,
                m->bound, m->want_prefill, m->want_decode);
    }
}

static void print_wide(FILE *out, const Tandem__V1__StatusResponse *s)
{
    char text[128];
    fprintf(out,
            "model %s   mode %s   policy %s   up %llu s   queued %u   live %u   finished %llu   "
            "failed %llu   failovers %llu\n",
            s->n_models > 1 ? "(several)" : s->model, s->mode, s->policy,
            (unsigned long long)(s->uptime_ms / 1000), s->queued, s->live,
            (unsigned long long)s->finished, (unsigned long long)s->failed,
            (unsigned long long)s->failovers);
    fprintf(out, "%.1f requests/s   bound by %s   refused %llu", s->arrival_rate,
            s->bound[0] ? s->bound : "(unknown)", (unsigned long long)s->refused);
    if (s->attainment >= 0) fprintf(out, "   objectives met %.1f %%", 100 * s->attainment);
    if (s->want_decode && s->n_models <= 1)
        fprintf(out, "   the load asks for %u prefill and %u decode workers", s->want_prefill,
                s->want_decode);
    for (size_t i = 0; i < n_told_classes(s); i++)
        fprintf(out, "   %s", class_text(s, i, text, sizeof text));
    fprintf(out, "\n");
    if (s->n_models > 1) print_models_wide(out, s);
    fprintf(out, "%-20s %-8s %2s %-9s %-22s %17s %8s %-4s %8s %8s %8s %10s %10s%s  KERNELS\n",
            "WORKER", "ROLE", "TP", "STATE", "ADDRESS", "KV HELD+CACHED", "OF", "IN", "B/TOKEN",
            "RUNNING", "WAITING", "PREFILL/s", "DECODE/s", s->n_models > 1 ? "  MODEL" : "");
    for (size_t i = 0; i < s->n_workers; i++) {
        const Tandem__V1__WorkerStatus *w = s->workers[i];
        fprintf(out,
                "%-20s %-8s %2u %-9s %-22s %8u+%-8u %8u %-4s %8llu %8u %8u %10.1f %10.1f%s%s  %s\n",
                w->name, w->role, w->tp, w->state, w->address, w->kv_blocks_held,
                w->kv_blocks_cached, w->kv_blocks, w->kv_dtype,
                (unsigned long long)w->kv_bytes_per_token, w->running, w->waiting,
                w->prefill_tokens_per_s, w->decode_tokens_per_s, s->n_models > 1 ? "  " : "",
                s->n_models > 1 ? w->model : "", w->kernels);
    }
    if (s->n_workers == 0) fprintf(out, "no workers have joined\n");
    if (s->withheld)
        fprintf(out,
                "names, addresses and loads are told to operators: --cluster-secret-file "
                "(TANDEM_CLUSTER_SECRET_FILE) with the cluster's secret%s\n",
                s->challenge.len
                    ? ""
                    : ", or a certificate with a name of the router's --tls-operator-names");
}

/* ---- the command ----------------------------------------------------------------------------- */

struct look {
    const struct status_config *c;
    struct page page;
};

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    const struct look *l = ctx;
    const Tandem__V1__StatusResponse *s = (const Tandem__V1__StatusResponse *)msg;
    if (l->c->json)
        print_json(s, l->page.out, l->c->watch);
    else if (l->page.columns)
        print_tables(&l->page, s);
    else
        print_wide(l->page.out, s);
}

/* One look, into l->page; what goes wrong is told there when to_page. */
static int look(struct cli_client *client, struct look *l, bool to_page)
{
    struct cli_result res = {0};
    struct td_err err = {0};
    bool asked = cli_status_call(client, &l->c->at, 5000, false, on_status, l, &res, &err);
    if (to_page && asked && res.code != TD_CODE_OK)
        fprintf(l->page.out, "%s: %.*s\n", cli_code_name(res.code), 60, res.details);
    else if (!asked)
        return td_die("tandem status", &err);
    else if (res.code != TD_CODE_OK)
        return cli_complain("status", &l->c->at, &res);
    return 0;
}

static unsigned page_columns(void)
{
    unsigned n = td_terminal_columns(stdout);
    return n && n < MIN_COLUMNS ? MIN_COLUMNS : n;
}

/* The picture over the one before it, of which n_before lines are there. Returns its lines: no more
 * than the terminal has, because what has left at the top cannot be drawn over. */
static unsigned redraw(const char *text, unsigned n_before)
{
    struct winsize size = {0};
    unsigned rows = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) || size.ws_row < 3 ? 24 : size.ws_row;
    unsigned n = 0;
    if (n_before) printf("\033[%uA", n_before);
    for (const char *p = text; *p && n + 1 < rows; n++) {
        size_t bytes = strcspn(p, "\n");
        printf("%.*s\033[K\n", (int)bytes, p);
        p += bytes + (p[bytes] == '\n');
    }
    printf("\033[J");
    fflush(stdout);
    return n;
}

/* Until Ctrl-C. A router that is gone is told in the picture, and asked again. */
static int watch(struct cli_client *client, const struct status_config *c)
{
    bool in_place = isatty(STDOUT_FILENO) && !c->json;
    unsigned n_lines = 0;
    for (;;) {
        char *text = NULL;
        size_t bytes = 0;
        struct look l = {c, {open_memstream(&text, &bytes), page_columns()}};
        if (!l.page.out) return 1;
        int rc = look(client, &l, true);
        fclose(l.page.out);
        if (!rc && in_place)
            n_lines = redraw(text, n_lines);
        else if (!rc)
            printf("%s%s", text, c->json ? "" : "\n"), fflush(stdout);
        free(text);
        if (rc) return rc;
        uint64_t next_ns = td_deadline_after_ms(td_now_ns(), c->interval_ms);
        struct timespec t = {(time_t)(next_ns / TD_NS_PER_S), (long)(next_ns % TD_NS_PER_S)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}

int cli_status(int argc, char **argv)
{
    struct status_config c = {0};
    struct td_err err = {0};
    struct cli_client client;
    if (td_options_load(options, &c, "tandem status",
                        "Workers, KV use, queues, rates and latencies of a cluster.", argc, argv,
                        NULL, 0, NULL, &err) ||
        cli_client_open(&client, &c.at, &err))
        return td_die("tandem status", &err);
    struct look once = {&c, {stdout, page_columns()}};
    int rc = c.watch ? watch(&client, &c) : look(&client, &once, false);
    cli_client_close(&client);
    return rc;
}
