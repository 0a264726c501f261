/* tandem: the command line. `tandem COMMAND --help` describes each command. */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "common/engine/ranks.h"
#include "common/base/log.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
#ifndef TANDEM_OFFLINE
    {"up", cli_up, "start a local cluster: router, prefill and decode workers; Ctrl-C stops it"},
    {"generate", cli_generate, "stream the completion of a prompt"},
    {"chat", cli_chat, "talk with the model, turn by turn"},
    {"status", cli_status, "workers, KV use, queues and rates (--json for machines)"},
    {"doctor", cli_doctor,
     "check this host, a cluster, the way to another machine, before serving"},
#endif
    {"tokenize", cli_tokenize, "text to token ids and back, with a model's tokenizer"},
    {"logits", cli_logits, "write the logits of every position to a file"},
    {"engine-bench", cli_engine_bench,
     "prefill and decode tokens/s of this machine, without a cluster"},
#ifndef TANDEM_OFFLINE
    {"sim", cli_sim, "simulate a fleet with the router's own core; replay a decision log"},
    {"plan", cli_plan, "how to split N GPUs between prefill and decode for given objectives"},
    {"bench", cli_bench,
     "bench serve, replay: load on a cluster; bench xfer: KV transfer beside its floors"},
#endif
};
#ifdef TANDEM_OFFLINE
#define WHICH " (built without daemons)"
#else
#define WHICH ""
#endif
#define N_COMMANDS (sizeof commands / sizeof *commands)

static int usage(FILE *out)
{
    fprintf(out,
            "tandem %s: prefill and decode on separate machines" WHICH
            "\n\nusage: tandem COMMAND [options]\n\n",
            TD_VERSION);
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-13s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "\n`tandem COMMAND --help` lists a command's options. Daemons: tandem-router, "
                 "tandem-prefill, tandem-decode.\n");
    return out == stdout ? 0 : 2;
}

struct td_ranks_place cli_rank;

int main(int argc, char **argv)
{
    struct td_err err = {0};
    td_log_start("cli", TD_LOG_WARN);
    if (td_ranks_take(&argc, argv, &cli_rank, &err)) return td_die("tandem", &err);
    if (argc < 2) return usage(stderr);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help"))
        return usage(stdout);
    if (!strcmp(argv[1], "--version")) return printf("tandem %s\n", TD_VERSION) < 0;
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tandem: \"%s\" is not a command\n\n", argv[1]);
    return usage(stderr);
}
