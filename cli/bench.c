/* bench.c - `tandem bench KIND`: runs the benches of bench/ that are linked into the command
 * line. */
#include "cli/cli.h"
#include "common/base/commands.h"

/* Nothing includes bench/: its entries are declared here, too. */
int td_bench_serve(int argc, char **argv);
int td_bench_replay(int argc, char **argv);
int td_bench_sweep(int argc, char **argv);
int td_bench_compare(int argc, char **argv);
int td_bench_plot(int argc, char **argv);
int td_bench_calibrate(int argc, char **argv);
int td_bench_xfer(int argc, char **argv);

static const struct td_command kinds[] = {
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
    {0},
};

int cli_bench(int argc, char **argv)
{
    static const struct td_commands bench = {.program = "tandem bench",
                                             .head = "",
                                             .what = "KIND",
                                             .foot =
                                                 "`tandem bench KIND --help` lists the options.\n",
                                             .table = kinds};
    return td_commands_run(&bench, argc, argv);
}
