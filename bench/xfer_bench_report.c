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

td_status bench_report_open(const struct bench_options *o, int argc, char **argv,
                            struct bench_report **ret_report, struct td_err *err)
{
    struct bench_report *r = calloc(1, sizeof *r);
    struct utsname u;
    double load[1];
    const char *const git[] = {"git",         "describe",    "--always", "--dirty",
                               "--exclude=*", "--abbrev=12", NULL};
    char when[32];
    time_t now = (time_t)(td_wall_ns() / TD_NS_PER_S);
    struct tm tm;
    if (!r) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    r->o = o;
    if (o->json[0]) { /* now, not after the work */
        FILE *f = fopen(o->json, "we");
        if (!f) {
            td_fail(err, TD_ERR_IO, "--json %s: %s", o->json, strerror(errno));
            goto err_free;
        }
        fclose(f);
    }
    r->csv = o->csv[0] ? fopen(o->csv, "we") : NULL;
    if (o->csv[0] && !r->csv) {
        td_fail(err, TD_ERR_IO, "--csv %s: %s", o->csv, strerror(errno));
        goto err_free;
    }
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
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    r->results = json_array();
    r->skipped = json_array();
    r->root = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:I,s:I,s:I,s:o,s:o}", "bench", "xfer",
                        "version", TD_VERSION, "commit", r->commit, "when", when, "command",
                        r->command, "machine", o->machine, "cpu", r->cpu, "kernel", r->kernel,
                        "cpus", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
                        (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), "repeats",
                        (json_int_t)o->repeats, "results", r->results, "skipped", r->skipped);
    /* of the minute before: foreign work shows in every number */
    json_object_set_new(r->root, "load_average", json_real(r->load));
    if (r->csv)
        fprintf(r->csv, "commit,machine,cpu,kernel,load_average,path,case,bytes,block_bytes,depth,"
                        "streams,repeats,gb_s_median,gb_s_min,gb_s_max,"
                        "us_median,latency_us_p50,latency_us_p99,post_us,post_ns_per_block,post_"
                        "cpu_ns_per_block,sender_cpu_s_per_gb,"
                        "receiver_cpu_s_per_gb,floor,ratio_median,ratio_min,ratio_max,floor_2,"
                        "ratio_2_median,ratio_2_min,ratio_2_max,command\n");
    *ret_report = r;
    return TD_OK;

err_free:
    free(r);
    return err->code;
}

void bench_report_skip(struct bench_report *r, const char *what, const char *why)
{
    json_array_append_new(r->skipped, json_pack("{s:s,s:s}", "what", what, "why", why));
    fprintf(stderr, "tandem bench xfer: not measured: %s: %s\n", what, why);
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
    printf("%s, %ld CPUs, load %.1f, %s, commit %s, median of %lld (least..greatest)\n", r->cpu,
           sysconf(_SC_NPROCESSORS_ONLN), r->load, r->kernel, r->commit, (long long)r->o->repeats);
    printf("%-16s %5s %7s %-13s %24s %10s %10s %9s %9s %8s %8s  %s\n", "case", "depth", "streams",
           "path", "GB/s", "us each", "p99 us", "post us", "ns/block", "cpu s/GB", "at recv",
           "of its floors");
}

void bench_report_case(struct bench_report *r, const struct bench_case *c,
                       struct bench_sample *const samples[BENCH_N_WAYS], int32_t n)
{
    table_head(r);
    for (enum bench_way w = 0; w < BENCH_N_WAYS; w++) {
        const struct bench_sample *s = samples[w];
        struct spread v[RECEIVER_CPU + 1];
        for (int k = GB_S; k <= RECEIVER_CPU; k++) v[k] = number_of(s, n, c, (enum number)k);
        if (!v[GB_S].n) continue;
        bool is_path = w < BENCH_N_PATHS, has_cpu = w <= BENCH_BARE;
        double p50 = 0, p99 = 0;
        bool has_latency = is_path && latencies(s, n, &p50, &p99);
        char rates[48], ratios[128] = "";

        json_t *row =
            json_pack("{s:s,s:b,s:s,s:I,s:I,s:i,s:b,s:i,s:i,s:i,s:i}", "path", bench_ways[w].name,
                      "is_floor", !is_path, "case", c->name, "bytes", (json_int_t)c->bytes,
                      "block_bytes", (json_int_t)c->block_bytes, "n_blocks", c->n_blocks,
                      "shuffled", c->shuffled, "tokens", c->tokens, "depth", c->depth, "streams",
                      c->streams, "transfers_per_repeat", c->batch * c->n_batches);
        json_t *each = json_array();
        for (int32_t i = 0; i < n; i++) json_array_append_new(each, json_real(rate(&s[i])));
        json_object_set_new(row, "gb_per_s_each", each);
        json_spread(row, "gb_per_s", v[GB_S]);
        json_spread(row, "us_per_transfer", v[US]);
        if (has_latency)
            json_object_set_new(row, "latency_us", json_pack("{s:f,s:f}", "p50", p50, "p99", p99));
        if (is_path) {
            json_spread(row, "post_us_per_transfer", v[POST_US]);
            json_spread(row, "post_ns_per_block", v[POST_NS_BLOCK]);
            json_spread(row, "post_cpu_ns_per_block", v[POST_CPU_NS_BLOCK]);
        }
        if (has_cpu) {
            json_spread(row, "sender_cpu_s_per_gb", v[SENDER_CPU]);
            json_spread(row, "receiver_cpu_s_per_gb", v[RECEIVER_CPU]);
        }
        double n_requests = 0, n_moved = 0;
        for (int32_t i = 0; i < n; i++) {
            n_requests += (double)s[i].n_work_requests;
            n_moved += s[i].n_transfers;
        }
        if (w == BENCH_RDMA)
            json_object_set_new(row, "work_requests_per_transfer",
                                json_real(n_moved > 0 ? n_requests / n_moved : 0));
        if (!is_path) json_object_set_new(row, "floor_is", json_string(bench_ways[w].floor_is));

        snprintf(rates, sizeof rates, "%.3f (%.3f..%.3f)", v[GB_S].median, v[GB_S].min,
                 v[GB_S].max);
        json_t *floors = json_object();
        struct spread of_floor[2] = {0};
        for (int k = 0; k < 2 && is_path; k++) {
            enum bench_way f = bench_ways[w].floors[k];
            of_floor[k] = f < BENCH_N_WAYS ? ratio_of(s, samples[f], n) : (struct spread){0};
            if (!of_floor[k].n) continue;
            json_spread(floors, bench_ways[f].name, of_floor[k]);
            size_t used = strlen(ratios);
            snprintf(ratios + used, sizeof ratios - used, "%s%s %.2f (%.2f..%.2f)",
                     used ? ", " : "", bench_ways[f].name, of_floor[k].median, of_floor[k].min,
                     of_floor[k].max);
        }
        if (is_path) json_object_set(row, "ratio_to", floors);
        json_decref(floors);
        json_array_append_new(r->results, row);

        printf("%-16s %5d %7d %-13s %24s ", c->name, c->depth, c->streams, bench_ways[w].name,
               rates);
        if (v[US].n)
            printf("%10.1f ", v[US].median);
        else
            printf("%10s ", "");
        if (has_latency)
            printf("%10.1f %9.2f %9.1f ", p99, v[POST_US].median, v[POST_NS_BLOCK].median);
        else
            printf("%10s %9s %9s ", "", "", "");
        if (has_cpu)
            printf("%8.3f %8.3f  %s\n", v[SENDER_CPU].median, v[RECEIVER_CPU].median, ratios);
        else
            printf("%8s %8s\n", "", "");
        if (!r->csv) continue;
        fprintf(r->csv,
                "%s,\"%s\",\"%s\",%s,%.2f,%s,%s,%" PRIu64 ",%" PRIu64 ",%d,%d,%d,%.4f,%.4f,%.4f,",
                r->commit, r->o->machine, r->cpu, r->kernel, r->load, bench_ways[w].name, c->name,
                c->bytes, c->block_bytes, c->depth, c->streams, v[GB_S].n, v[GB_S].median,
                v[GB_S].min, v[GB_S].max);
        if (v[US].n) fprintf(r->csv, "%.2f", v[US].median);
        if (has_latency)
            fprintf(r->csv, ",%.2f,%.2f,%.3f,%.1f,%.1f,", p50, p99, v[POST_US].median,
                    v[POST_NS_BLOCK].median, v[POST_CPU_NS_BLOCK].median);
        else
            fprintf(r->csv, ",,,,,,");
        if (has_cpu)
            fprintf(r->csv, "%.4f,%.4f", v[SENDER_CPU].median, v[RECEIVER_CPU].median);
        else
            fprintf(r->csv, ",");
        for (int k = 0; k < 2; k++) {
            if (of_floor[k].n)
                fprintf(r->csv, ",%s,%.4f,%.4f,%.4f", bench_ways[bench_ways[w].floors[k]].name,
                        of_floor[k].median, of_floor[k].min, of_floor[k].max);
            else
                fprintf(r->csv, ",,,,");
        }
        fprintf(r->csv, ",\"%s\"\n", r->command);
    }
    fflush(stdout);
}

td_status bench_report_end(struct bench_report *r, uint64_t n_verified, struct td_err *err)
{
    td_status s = TD_OK;
    json_object_set_new(r->root, "n_bytes_verified", json_integer((json_int_t)n_verified));
    printf("%.1f GB of what the engine moved were verified, byte by byte\n",
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
