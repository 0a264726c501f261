/* xfer_bench_report.c - what was measured, as a table on standard output, JSON and CSV. Ratios
 * are medians of the ratios of single repeats. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "bench/xfer_bench.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/say.h"

struct spread {
    double median, min, max;
    int32_t n;
};

struct bench_report {
    const struct bench_options *o;
    FILE *csv;
    json_t *root, *results, *skipped;
    char cpu[128], kernel[128], commit[64], command[2048];
    double load;
    bool has_head;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct spread spread_of(double *v, int32_t n)
{
    if (!n) return (struct spread){0};
    qsort(v, (size_t)n, sizeof *v, by_value);
    return (struct spread){.median = n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2,
                           .min = v[0],
                           .max = v[n - 1],
                           .n = n};
}

static void json_spread(json_t *to, const char *key, struct spread s)
{
    if (s.n)
        json_object_set_new(
            to, key, json_pack("{s:f,s:f,s:f}", "median", s.median, "min", s.min, "max", s.max));
}

/* --- the head --------------------------------------------------------------------------------- */

static void cpu_name(char *to, size_t n)
{
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "re");
    snprintf(to, n, "unknown");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(to, n, "%s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    if (f) fclose(f);
}

/* Opens both files now, not after the work. */
static td_status files_open(struct bench_report *r, struct td_err *err)
{
    const struct bench_options *o = r->o;
    if (o->json[0]) {
        FILE *f = fopen(o->json, "we");
        if (!f) return td_fail(err, TD_ERR_IO, "--json %s: %s", o->json, strerror(errno));
        fclose(f);
    }
    r->csv = o->csv[0] ? fopen(o->csv, "we") : NULL;
    if (o->csv[0] && !r->csv)
        return td_fail(err, TD_ERR_IO, "--csv %s: %s", o->csv, strerror(errno));
    return TD_OK;
}

/* The machine, the build and the command, as every row names them. */
static void describe(struct bench_report *r, int argc, char **argv)
{
    const char *const git[] = {"git",         "describe",    "--always", "--dirty",
                               "--exclude=*", "--abbrev=12", NULL};
    struct utsname u;
    double load[1];
    cpu_name(r->cpu, sizeof r->cpu);
    uname(&u);
    r->load = getloadavg(load, 1) == 1 ? load[0] : 0;
    snprintf(r->kernel, sizeof r->kernel, "%s %s", u.sysname, u.release);
    if (bench_capture(git, r->commit, sizeof r->commit))
        snprintf(r->commit, sizeof r->commit, "unknown");
    r->commit[strcspn(r->commit, "\n")] = 0;
    const char *base = strrchr(argv[0], '/');
    size_t used =
        (size_t)snprintf(r->command, sizeof r->command, "%s",
                         strcmp(argv[0], "xfer") ? base ? base + 1 : argv[0] : "tandem bench xfer");
    for (int i = 1; i < argc && used < sizeof r->command; i++)
        used += (size_t)snprintf(r->command + used, sizeof r->command - used, " %s", argv[i]);
}

static void json_head(struct bench_report *r)
{
    char when[32];
    time_t now = (time_t)(td_wall_ns() / TD_NS_PER_S);
    struct tm tm;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    r->results = json_array();
    r->skipped = json_array();
    r->root = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:I,s:I,s:I,s:o,s:o}", "bench", "xfer",
                        "version", TD_VERSION, "commit", r->commit, "when", when, "command",
                        r->command, "machine", r->o->machine, "cpu", r->cpu, "kernel", r->kernel,
                        "cpus", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
                        (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), "repeats",
                        (json_int_t)r->o->repeats, "results", r->results, "skipped", r->skipped);
    /* of the minute before: foreign work shows in every number */
    json_object_set_new(r->root, "load_average", json_real(r->load));
}

static const char csv_head[] =
    "commit,machine,cpu,kernel,load_average,path,case,bytes,block_bytes,depth,"
    "streams,repeats,gb_s_median,gb_s_min,gb_s_max,"
    "us_median,latency_us_p50,latency_us_p99,post_us,post_ns_per_block,post_"
    "cpu_ns_per_block,sender_cpu_s_per_gb,"
    "receiver_cpu_s_per_gb,floor,ratio_median,ratio_min,ratio_max,floor_2,"
    "ratio_2_median,ratio_2_min,ratio_2_max,command\n";

td_status bench_report_open(const struct bench_options *o, int argc, char **argv,
                            struct bench_report **ret_report, struct td_err *err)
{
    struct bench_report *r = calloc(1, sizeof *r);
    if (!r) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    r->o = o;
    td_status s = files_open(r, err);
    if (s) {
        free(r);
        return s;
    }
    describe(r, argc, argv);
    json_head(r);
    if (r->csv) fputs(csv_head, r->csv);
    *ret_report = r;
    return TD_OK;
}

void bench_report_skip(struct bench_report *r, const char *what, const char *why)
{
    json_array_append_new(r->skipped, json_pack("{s:s,s:s}", "what", what, "why", why));
    td_say(stderr, 2, "tandem bench xfer: not measured: %s: %s\n", what, why);
}

/* --- a case ----------------------------------------------------------------------------------- */

static double per(const struct bench_sample *s, double v)
{
    return s->n_bytes ? v / (s->n_bytes / 1e9) : 0;
}

static double rate(const struct bench_sample *s)
{
    return s->seconds > 0 ? s->n_bytes / s->seconds / 1e9 : 0;
}

static struct spread ratio_of(const struct bench_sample *a, const struct bench_sample *b, int32_t n)
{
    double v[BENCH_MAX_REPEATS];
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++)
        if (rate(&a[i]) > 0 && rate(&b[i]) > 0) v[k++] = rate(&a[i]) / rate(&b[i]);
    return spread_of(v, k);
}

/* One number of each repeat that was measured. */
enum number { GB_S, US, POST_US, POST_NS_BLOCK, POST_CPU_NS_BLOCK, SENDER_CPU, RECEIVER_CPU };

static struct spread number_of(const struct bench_sample *s, int32_t n, const struct bench_case *c,
                               enum number which)
{
    double v[BENCH_MAX_REPEATS];
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++) {
        double transfers = s[i].n_transfers;
        if (!(s[i].seconds > 0)) continue;
        if (which == GB_S)
            v[k++] = rate(&s[i]);
        else if (!s[i].n_transfers)
            continue; /* iperf3 */
        else if (which == US)
            v[k++] = s[i].seconds / transfers * 1e6;
        else if (which == POST_US)
            v[k++] = s[i].post_s / transfers * 1e6;
        else if (which == POST_NS_BLOCK)
            v[k++] = s[i].post_s / transfers / c->n_blocks * 1e9;
        else if (which == POST_CPU_NS_BLOCK)
            v[k++] = s[i].post_cpu_s / transfers / c->n_blocks * 1e9;
        else if (which == SENDER_CPU)
            v[k++] = per(&s[i], s[i].sender_cpu_s);
        else
            v[k++] = per(&s[i], s[i].receiver_cpu_s);
    }
    return spread_of(v, k);
}

/* p50 and p99 of all transfers of all repeats. */
static bool latencies(const struct bench_sample *s, int32_t n, double *ret_p50, double *ret_p99)
{
    size_t total = 0, at = 0;
    for (int32_t i = 0; i < n; i++) total += (size_t)s[i].n_latencies;
    double *v = total ? calloc(total, sizeof *v) : NULL;
    if (!v) return false;
    for (int32_t i = 0; i < n; i++) {
        memcpy(v + at, s[i].latency_us, (size_t)s[i].n_latencies * sizeof *v);
        at += (size_t)s[i].n_latencies;
    }
    qsort(v, total, sizeof *v, by_value);
    *ret_p50 = v[total / 2];
    *ret_p99 = v[total * 99 / 100];
    free(v);
    return true;
}

static void table_head(struct bench_report *r)
{
    if (r->has_head) return;
    r->has_head = true;
    td_say(stdout, 4, "%s, %ld CPUs, load %.1f, %s, commit %s, median of %lld (least..greatest)\n",
           r->cpu, sysconf(_SC_NPROCESSORS_ONLN), r->load, r->kernel, r->commit,
           (long long)r->o->repeats);
    td_say(stdout, 4, "%-16s %5s %7s %-13s %24s %10s %10s %9s %9s %8s %8s  %s\n", "case", "depth",
           "streams", "path", "GB/s", "us each", "p99 us", "post us", "ns/block", "cpu s/GB",
           "at recv", "of its floors");
}

/* What the samples of one case by one way come to. */
struct case_numbers {
    const struct bench_case *c;
    const struct bench_sample *s;
    int32_t n; /* samples */
    enum bench_way way;
    bool is_path, has_cpu, has_latency;
    struct spread v[RECEIVER_CPU + 1];
    double p50_us, p99_us;
    struct spread of_floor[2]; /* n 0: this way has no such floor, or it did not run */
};

/* False when the way did not run. */
static bool numbers_of_case(const struct bench_case *c,
                            struct bench_sample *const samples[BENCH_N_WAYS], int32_t n,
                            enum bench_way w, struct case_numbers *ret)
{
    *ret = (struct case_numbers){.c = c,
                                 .s = samples[w],
                                 .n = n,
                                 .way = w,
                                 .is_path = w < BENCH_N_PATHS,
                                 .has_cpu = w <= BENCH_BARE};
    for (int k = GB_S; k <= RECEIVER_CPU; k++)
        ret->v[k] = number_of(samples[w], n, c, (enum number)k);
    if (!ret->v[GB_S].n) return false;
    ret->has_latency = ret->is_path && latencies(samples[w], n, &ret->p50_us, &ret->p99_us);
    for (int k = 0; k < 2 && ret->is_path; k++) {
        enum bench_way f = bench_ways[w].floors[k];
        if (f < BENCH_N_WAYS) ret->of_floor[k] = ratio_of(samples[w], samples[f], n);
    }
    return true;
}

static const char *floor_name(const struct case_numbers *x, int k)
{
    return bench_ways[bench_ways[x->way].floors[k]].name;
}

static double work_requests_per_transfer(const struct case_numbers *x)
{
    double n_requests = 0, n_moved = 0;
    for (int32_t i = 0; i < x->n; i++) {
        n_requests += (double)x->s[i].n_work_requests;
        n_moved += x->s[i].n_transfers;
    }
    return n_moved > 0 ? n_requests / n_moved : 0;
}

static json_t *case_json(const struct case_numbers *x)
{
    const struct bench_case *c = x->c;
    json_t *row =
        json_pack("{s:s,s:b,s:s,s:I,s:I,s:i,s:b,s:i,s:i,s:i,s:i}", "path", bench_ways[x->way].name,
                  "is_floor", !x->is_path, "case", c->name, "bytes", (json_int_t)c->bytes,
                  "block_bytes", (json_int_t)c->block_bytes, "n_blocks", c->n_blocks, "shuffled",
                  c->shuffled, "tokens", c->tokens, "depth", c->depth, "streams", c->streams,
                  "transfers_per_repeat", c->batch * c->n_batches);
    json_t *each = json_array(), *floors = json_object();
    for (int32_t i = 0; i < x->n; i++) json_array_append_new(each, json_real(rate(&x->s[i])));
    json_object_set_new(row, "gb_per_s_each", each);
    json_spread(row, "gb_per_s", x->v[GB_S]);
    json_spread(row, "us_per_transfer", x->v[US]);
    if (x->has_latency)
        json_object_set_new(row, "latency_us",
                            json_pack("{s:f,s:f}", "p50", x->p50_us, "p99", x->p99_us));
    if (x->is_path) {
        json_spread(row, "post_us_per_transfer", x->v[POST_US]);
        json_spread(row, "post_ns_per_block", x->v[POST_NS_BLOCK]);
        json_spread(row, "post_cpu_ns_per_block", x->v[POST_CPU_NS_BLOCK]);
    }
    if (x->has_cpu) {
        json_spread(row, "sender_cpu_s_per_gb", x->v[SENDER_CPU]);
        json_spread(row, "receiver_cpu_s_per_gb", x->v[RECEIVER_CPU]);
    }
    if (x->way == BENCH_RDMA)
        json_object_set_new(row, "work_requests_per_transfer",
                            json_real(work_requests_per_transfer(x)));
    if (!x->is_path) json_object_set_new(row, "floor_is", json_string(bench_ways[x->way].floor_is));
    for (int k = 0; k < 2; k++)
        if (x->of_floor[k].n) json_spread(floors, floor_name(x, k), x->of_floor[k]);
    if (x->is_path) json_object_set(row, "ratio_to", floors);
    json_decref(floors);
    return row;
}

static void case_print(const struct case_numbers *x)
{
    const struct bench_case *c = x->c;
    char rates[48], ratios[128] = "";
    snprintf(rates, sizeof rates, "%.3f (%.3f..%.3f)", x->v[GB_S].median, x->v[GB_S].min,
             x->v[GB_S].max);
    for (int k = 0; k < 2; k++) {
        const struct spread *v = &x->of_floor[k];
        size_t used = strlen(ratios);
        if (v->n)
            snprintf(ratios + used, sizeof ratios - used, "%s%s %.2f (%.2f..%.2f)",
                     used ? ", " : "", floor_name(x, k), v->median, v->min, v->max);
    }
    struct td_said said;
    FILE *f = td_said_open(&said, stdout, 4);
    fprintf(f, "%-16s %5d %7d %-13s %24s ", c->name, c->depth, c->streams, bench_ways[x->way].name,
            rates);
    if (x->v[US].n)
        fprintf(f, "%10.1f ", x->v[US].median);
    else
        fprintf(f, "%10s ", "");
    if (x->has_latency)
        fprintf(f, "%10.1f %9.2f %9.1f ", x->p99_us, x->v[POST_US].median,
                x->v[POST_NS_BLOCK].median);
    else
        fprintf(f, "%10s %9s %9s ", "", "", "");
    if (x->has_cpu)
        fprintf(f, "%8.3f %8.3f  %s\n", x->v[SENDER_CPU].median, x->v[RECEIVER_CPU].median, ratios);
    else
        fprintf(f, "%8s %8s\n", "", "");
    td_said_close(&said);
}

/* The columns of csv_head. */
static void case_csv(const struct bench_report *r, const struct case_numbers *x)
{
    const struct bench_case *c = x->c;
    const struct spread *v = x->v;
    fprintf(r->csv,
            "%s,\"%s\",\"%s\",%s,%.2f,%s,%s,%" PRIu64 ",%" PRIu64 ",%d,%d,%d,%.4f,%.4f,%.4f,",
            r->commit, r->o->machine, r->cpu, r->kernel, r->load, bench_ways[x->way].name, c->name,
            c->bytes, c->block_bytes, c->depth, c->streams, v[GB_S].n, v[GB_S].median, v[GB_S].min,
            v[GB_S].max);
    if (v[US].n) fprintf(r->csv, "%.2f", v[US].median);
    if (x->has_latency)
        fprintf(r->csv, ",%.2f,%.2f,%.3f,%.1f,%.1f,", x->p50_us, x->p99_us, v[POST_US].median,
                v[POST_NS_BLOCK].median, v[POST_CPU_NS_BLOCK].median);
    else
        fprintf(r->csv, ",,,,,,");
    if (x->has_cpu)
        fprintf(r->csv, "%.4f,%.4f", v[SENDER_CPU].median, v[RECEIVER_CPU].median);
    else
        fprintf(r->csv, ",");
    for (int k = 0; k < 2; k++) {
        const struct spread *f = &x->of_floor[k];
        if (f->n)
            fprintf(r->csv, ",%s,%.4f,%.4f,%.4f", floor_name(x, k), f->median, f->min, f->max);
        else
            fprintf(r->csv, ",,,,");
    }
    fprintf(r->csv, ",\"%s\"\n", r->command);
}

void bench_report_case(struct bench_report *r, const struct bench_case *c,
                       struct bench_sample *const samples[BENCH_N_WAYS], int32_t n)
{
    table_head(r);
    for (enum bench_way w = 0; w < BENCH_N_WAYS; w++) {
        struct case_numbers x;
        if (!numbers_of_case(c, samples, n, w, &x)) continue;
        json_array_append_new(r->results, case_json(&x));
        case_print(&x);
        if (r->csv) case_csv(r, &x);
    }
    fflush(stdout);
}

td_status bench_report_end(struct bench_report *r, uint64_t n_verified, struct td_err *err)
{
    td_status s = TD_OK;
    json_object_set_new(r->root, "n_bytes_verified", json_integer((json_int_t)n_verified));
    td_say(stdout, 2, "%.1f GB of what the engine moved were verified, byte by byte\n",
           (double)n_verified / 1e9);
    if (r->o->json[0] &&
        json_dump_file(r->root, r->o->json, JSON_INDENT(1) | JSON_REAL_PRECISION(9)))
        s = td_fail(err, TD_ERR_IO, "--json %s: cannot write", r->o->json);
    if (r->csv && fclose(r->csv))
        s = td_fail(err, TD_ERR_IO, "--csv %s: %s", r->o->csv, strerror(errno));
    json_decref(r->root);
    free(r);
    return s;
}
