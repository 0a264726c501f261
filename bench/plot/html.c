/* html.c - see html.h. Verdict first, then what it rests on, then how it was made. */
#include "bench/plot/html.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char style[] =
    ":root{color-scheme:light "
    "dark;--ink:#1c1f24;--muted:#5a6069;--line:#dfe2e6;--paper:#fff;--tint:#f3f6f9}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e8e8e6;--muted:#a5abb3;--line:#3a3f46;--paper:#"
    "17191c;--tint:#21252a}}"
    "@media "
    "print{:root{color-scheme:light;--ink:#000;--muted:#444;--line:#ccc;--paper:#fff;--tint:#"
    "f6f6f6}figure,tr{break-inside:avoid}}"
    "*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 "
    "system-ui,-apple-system,\"Segoe UI\",\"DejaVu "
    "Sans\",sans-serif}"
    "main{max-width:74rem;margin:0 auto;padding:1.5rem 1rem "
    "3rem}h1{font-size:1.7rem;line-height:1.2;margin:0 0 "
    ".2rem}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}"
    ".sub{color:var(--muted);margin:0}.verdict{background:var(--tint);border-left:4px solid "
    "#0072b2;padding:.8rem 1rem;margin:1.2rem 0}.verdict "
    "p{margin:.4rem 0}"
    ".verdict p:first-child{font-size:1.08rem;font-weight:600}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:"
    "tabular-nums}th,td{padding:.3rem "
    ".7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th{color:var(--muted);font-weight:600}th:first-child,td:first-child{text-align:left;padding-"
    "left:0}tr.best td{font-weight:700}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,max(22rem,45%)),"
    "1fr));gap:"
    "1.4rem 1.6rem}figure{margin:0;min-width:0}figure "
    "svg{display:block;width:100%;height:auto;border-radius:6px}"
    ".scroll+.sub,figcaption{margin-top:.5rem}"
    "figcaption{color:var(--muted);font-size:.88rem;max-width:36rem}dl{display:grid;grid-template-"
    "columns:max-content 1fr;gap:.2rem "
    "1rem;margin:0;font-size:.92rem}dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}"
    "code{font:.85rem/1.4 ui-monospace,\"DejaVu Sans "
    "Mono\",monospace;overflow-wrap:anywhere}summary{cursor:pointer;font-weight:600}"
    "@media(max-width:34rem){dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}}";

/* For HTML and XML. */
static void text(FILE *out, const char *s)
{
    for (; *s; s++) {
        if (*s == '<')
            fputs("&lt;", out);
        else if (*s == '>')
            fputs("&gt;", out);
        else if (*s == '&')
            fputs("&amp;", out);
        else if (*s == '"')
            fputs("&quot;", out);
        else if ((unsigned char)*s < 0x20 && *s != '\n' && *s != '\t')
            fputc('?', out); /* XML has no place for them */
        else
            fputc(*s, out);
    }
}

static void cell(FILE *out, double v)
{
    if (isnan(v))
        fputs("<td>–</td>", out); /* not known */
    else
        fprintf(out, "<td>%.4g</td>", v);
}

static void three(FILE *out, double a, double b, double c)
{
    if (isnan(a) || isnan(b) || isnan(c))
        fputs("<td>–</td>", out);
    else
        fprintf(out, "<td>%.4g / %.4g / %.4g</td>", a, b, c);
}

static void percent(FILE *out, double v)
{
    if (isnan(v))
        fputs("<td>–</td>", out);
    else
        fprintf(out, "<td>%.1f %%</td>", 100 * v);
}

static void verdict(const struct sweep *s, FILE *out)
{
    char *lines = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&lines, &n);
    if (!f) return;
    sweep_verdict(s, f);
    fclose(f);
    fputs("<section class=\"verdict\" aria-label=\"Verdict\">\n", out);
    for (char *rest = lines, *line; lines && (line = strsep(&rest, "\n"));) {
        if (!line[0]) continue;
        fputs("<p>", out);
        text(out, line);
        fputs("</p>\n", out);
    }
    fputs("</section>\n", out);
    free(lines);
}

static void goodput_table(const struct sweep *s, FILE *out)
{
    int w = sweep_has_winner(s) ? sweep_leader(s) : -1;
    fputs("<h2>Goodput</h2>\n<div "
          "class=\"scroll\"><table><thead><tr><th>Configuration</th><th>Workers</th><th>Goodput<br/"
          ">requests/s</th><th>per "
          "worker<br/>requests/s</th>"
          "<th>fails at<br/>requests/s</th><th>TTFT p50 / p90 / p99<br/>ms</th><th>TPOT p50 / p90 "
          "/ p99<br/>ms</th><th>How</th></tr></thead><tbody>\n",
          out);
    for (uint32_t i = 0; i < s->n_configs; i++) {
        const struct sweep_config *c = &s->configs[i];
        const struct sweep_row *r = sweep_reference_row(s, i);
        struct sweep_lost lost;
        fprintf(out, "<tr%s><td>", (int)i == w ? " class=\"best\"" : "");
        text(out, c->name);
        fprintf(out, "</td><td>%u</td>", c->gpus);
        cell(out, c->goodput);
        cell(out, c->gpus ? c->goodput / c->gpus : NAN);
        cell(out, c->failed_rate > 0 ? c->failed_rate : NAN);
        three(out, r ? r->ttft.p50_ms : NAN, r ? r->ttft.p90_ms : NAN, r ? r->ttft.p99_ms : NAN);
        three(out, r ? r->tpot.p50_ms : NAN, r ? r->tpot.p90_ms : NAN, r ? r->tpot.p99_ms : NAN);
        fprintf(out, "<td>%s</td></tr>\n",
                isnan(c->goodput) ? (r                            ? "not looked for"
                                     : sweep_lost(s, i, &lost, 1) ? "run, not measured"
                                                                  : "not run")
                : c->verified     ? "searched, verified"
                : c->searched     ? "searched"
                                  : "of the rates run");
    }
    fprintf(out,
            "</tbody></table></div>\n<p class=\"sub\">Latencies: of a run at %.3g requests/s per "
            "worker, the load at which the pictures below compare the configurations; –: not "
            "measured at that load.</p>\n",
            sweep_reference_rate(s));
}

static void stage_table(const struct sweep *s, FILE *out)
{
    fputs("<h2>Stages</h2>\n<div class=\"scroll\"><table><thead><tr><th>Mean "
          "ms</th><th>requests/s</th>"
          "<th>per worker</th>",
          out);
    for (int k = 0; k < BENCH_N_STAGES; k++) {
        char name[32];
        snprintf(name, sizeof name, "%s", bench_stage_names[k]);
        for (char *q = name; *q; q++)
            if (*q == '_') *q = ' ';
        fprintf(out, "<th>%s</th>", name);
    }
    fputs("</tr></thead><tbody>\n", out);
    for (uint32_t i = 0; i < s->n_configs; i++) {
        const struct sweep_row *r = sweep_reference_row(s, i);
        if (!r) continue;
        fputs("<tr><td>", out);
        text(out, s->configs[i].name);
        fputs("</td>", out);
        cell(out, r->rate);
        cell(out, s->configs[i].gpus ? r->rate / s->configs[i].gpus : NAN);
        for (int k = 0; k < BENCH_N_STAGES; k++) cell(out, r->stages_ms[k]);
        fputs("</tr>\n", out);
    }
    fputs("</tbody></table></div>\n", out);
}

static void run_table(const struct sweep *s, FILE *out)
{
    fprintf(out,
            "<h2>Runs</h2>\n<details><summary>All %zu runs</summary>\n<div "
            "class=\"scroll\"><table><thead><tr><th>Configuration</th><th>Phase</th><th>Rate</"
            "th><th>Seed</th><th>Offered</th><th>Completed</th>"
            "<th>Turned away</th><th>Attainment</th><th>95 %% "
            "interval</th><th>TTFT</th><th>TPOT</th><th>Goodput</th><th>TTFT p90 ms</th><th>TPOT "
            "p90 ms</th><th>Remarks</th></tr></thead><tbody>\n",
            s->n_rows);
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        fputs("<tr><td>", out);
        text(out, s->configs[r->config].name);
        fputs("</td><td>", out);
        text(out, r->phase);
        fprintf(out, "</td><td>%.4g</td><td>%.0f</td><td>%.0f</td><td>%.0f</td><td>%.0f</td>",
                r->rate, r->seed, r->count.offered, r->count.completed, r->count.rejected);
        percent(out, r->steady.attainment);
        if (isnan(r->steady.ci95_lo))
            fputs("<td>–</td>", out);
        else
            fprintf(out, "<td>%.1f to %.1f %%</td>", 100 * r->steady.ci95_lo,
                    100 * r->steady.ci95_hi);
        percent(out, r->steady.attainment_ttft);
        percent(out, r->steady.attainment_tpot);
        cell(out, r->steady.goodput);
        cell(out, r->ttft.p90_ms);
        cell(out, r->tpot.p90_ms);
        fprintf(out, "<td>%s%s", r->steady.saturated > 0 ? "saturated " : "",
                r->run.valid > 0     ? ""
                : r->run.late > 0    ? "not counted: generator late"
                : isnan(r->run.late) ? "not counted: generator late or run interrupted"
                                     : "not counted: interrupted");
        if (!(r->run.valid > 0) && r->run.late > 0 && r->run.sched_lag_p99_ms > 0)
            fprintf(out, " (p99 %.3g ms)", r->run.sched_lag_p99_ms);
        fputs("</td></tr>\n", out);
    }
    fputs("</tbody></table></div></details>\n", out);
}

static void fact(FILE *out, const char *name, const char *value)
{
    if (!value || !value[0]) return;
    fprintf(out, "<dt>%s</dt><dd>", name);
    text(out, value);
    fputs("</dd>\n", out);
}

static void facts(const struct sweep *s, FILE *out)
{
    const struct {
        const char *name;
        double ms;
    } limits[] = {{"TTFT", s->slo.ttft_ms},
                  {"TPOT", s->slo.tpot_ms},
                  {"E2EL", s->slo.e2el_ms},
                  {"TBT", s->slo.tbt_ms}};
    char objectives[300] = "", loads[64];
    size_t n = 0;
    for (size_t i = 0; i < 4; i++)
        if (limits[i].ms > 0)
            n += (size_t)snprintf(objectives + n, sizeof objectives - n, "%s%s %.4g ms",
                                  n ? ", " : "", limits[i].name, limits[i].ms);
    if (n)
        snprintf(objectives + n, sizeof objectives - n,
                 ", for %.4g %% of the requests; %stold to the router with each request",
                 100 * s->attainment, s->slo_sent ? "" : "not ");
    snprintf(loads, sizeof loads, "%.2f at the start, %.2f at the end (1 min)", s->load1_start,
             s->load1_end);
    fputs("<h2>What was run</h2>\n<dl>\n", out);
    fact(out, "Objectives", objectives);
    fact(out, "Requests", s->load);
    fact(out, "Arrivals", s->arrival);
    fact(out, "Model", s->model);
    fact(out, "Policy", s->policy);
    fact(out, "Machine", s->machine);
    if (s->date[0]) fact(out, "Load average", loads);
    fact(out, "Build", s->build);
    if (s->command && s->command[0]) {
        fputs("<dt>Command</dt><dd><code>", out);
        text(out, s->command);
        fputs("</code></dd>\n", out);
    }
    fputs("</dl>\n<h2>Definitions</h2>\n<dl>\n", out);
    fact(out, "TTFT",
         "first token minus scheduled send time, at the client: a client or server that falls "
         "behind cannot hide it");
    fact(out, "TPOT", "(last token - first token) / (output tokens - 1); one token meets it");
    fact(out, "Good", "completed within every objective");
    fact(out, "Attainment",
         "good / offered, of the requests that arrived in the measured span; rejected, failed and "
         "unfinished requests are misses");
    fact(out, "Interval",
         "95 %: of one run the wider of Wilson's and that of 20 batch means; of several runs the "
         "wider of Wilson's and Student's over the runs");
    fact(out, "Goodput",
         "of a configuration: the highest rate whose interval's lower bound reaches the target "
         "attainment; of a run: good arrivals / second");
    fact(out, "Saturated",
         "TTFT and requests in flight both rose through the span: more came than was served");
    fputs("</dl>\n", out);
}

static void pictures(const struct figure *figures, size_t n, FILE *out)
{
    size_t n_drawn = 0;
    for (size_t i = 0; i < n; i++) n_drawn += figures[i].marks != NULL;
    if (n_drawn == 0) return;
    fputs("<h2>Pictures</h2>\n<div class=\"figures\">\n", out);
    for (size_t i = 0; i < n; i++) {
        const struct figure *f = &figures[i];
        if (!f->marks) continue;
        fprintf(out,
                "<figure><svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 %d "
                "%d\">\n<title>",
                f->width, f->height);
        text(out, f->title);
        fprintf(out,
                "</title>\n<rect width=\"100%%\" height=\"100%%\" "
                "fill=\"#ffffff\"/>%s</svg><figcaption>",
                f->marks);
        text(out, f->caption);
        fputs("</figcaption></figure>\n", out);
    }
    fputs("</div>\n", out);
}

void html_write(const struct sweep *s, const struct figure *figures, size_t n_figures, FILE *out)
{
    fputs(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\"/>\n<title>",
        out);
    text(out, s->title);
    fprintf(out, "</title>\n<style>%s", style);
    fputs("</style></head>\n<body><main>\n<h1>", out);
    text(out, s->title);
    fputs("</h1>\n<p class=\"sub\">", out);
    text(out, s->model);
    if (s->load[0]) fputs(" · ", out), text(out, s->load);
    if (s->date[0]) fputs(" · ", out), text(out, s->date);
    fputs("</p>\n", out);
    verdict(s, out);
    goodput_table(s, out);
    pictures(figures, n_figures, out);
    stage_table(s, out);
    run_table(s, out);
    facts(s, out);
    fputs("</main></body></html>\n", out);
}
