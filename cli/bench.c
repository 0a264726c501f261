/* tandem bench KIND: the benches of bench/ that are linked into the command line. */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"

/* Nothing includes bench/: its entries are declared here. */
int td_bench_serve(int argc, char **argv);
int td_bench_replay(int argc, char **argv);
int td_bench_sweep(int argc, char **argv);
int td_bench_compare(int argc, char **argv);
int td_bench_plot(int argc, char **argv);
int td_bench_calibrate(int argc, char **argv);
int td_bench_xfer(int argc, char **argv);

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} kinds[] = {
    {"serve", td_bench_serve,
     "load on a cluster: latency, throughput, goodput and SLO attainment (vLLM's options)"},
    {"replay", td_bench_replay,
     "the same with the arrivals, lengths and shared prefixes of a recorded trace"},
    {"sweep", td_bench_sweep,
     "many rates: the highest that meets the objectives, on one cluster or on several it starts"},
    {"compare", td_bench_compare,
     "two results beside each other, and whether their difference means anything"},
    {"plot", td_bench_plot, "plots and a report of a sweep"},
    {"calibrate", td_bench_calibrate, "this machine's step times, as the router's latency table"},
    {"xfer", td_bench_xfer, "KV transfer between two processes of this host, beside its floors"},
};
#define N_KINDS (sizeof kinds / sizeof *kinds)

static int usage(FILE *out)
{
    fprintf(out, "usage: tandem bench KIND [options]\n\n");
    for (size_t i = 0; i < N_KINDS; i++)
        fprintf(out, "  %-13s %s\n", kinds[i].name, kinds[i].summary);
    fprintf(out, "\n`tandem bench KIND --help` lists the options.\n");
    return out == stdout ? 0 : 2;
}

int cli_bench(int argc, char **argv)
{
    if (argc < 2) return usage(stderr);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return usage(stdout);
    for (size_t i = 0; i < N_KINDS; i++)
        if (!strcmp(argv[1], kinds[i].name)) return kinds[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tandem bench: \"%s\" is no kind of bench\n\n", argv[1]);
    return usage(stderr);
}
