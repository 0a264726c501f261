/* main.c - `tandem`, the command line: finds and runs a command. `tandem COMMAND --help` describes
 * each. */
#include "cli/cli.h"
#include "common/base/commands.h"
#include "common/base/log.h"
#include "common/engine/ranks.h"

static const struct td_command commands[] = {
#ifndef TANDEM_OFFLINE
    {"up", cli_up, "start a local cluster: router, prefill and decode workers; Ctrl-C stops it"},
    {"generate", cli_generate, "stream the completion of a prompt"},
    {"chat", cli_chat, "talk with the model, turn by turn"},
    {"status", cli_status, "workers, KV use, queues and rates (--json for machines)"},
    {"health", cli_health, "ask one daemon whether it serves: for probes"},
    {"doctor", cli_doctor,
     "check this host, a cluster, the way to another machine, before serving"},
#endif
    {"model", cli_model, "what a model directory is, whether it runs here, what it takes"},
    {"tokenize", cli_tokenize, "text to token ids and back, with a model's tokenizer"},
    {"logits", cli_logits, "write the logits of every position to a file"},
    {"compare", cli_compare, "how far a model is from another on a text"},
    {"quantize", cli_quantize, "write a model in another format: a GGUF file"},
    {"engine-bench", cli_engine_bench,
     "prefill and decode tokens/s of this machine, without a cluster"},
#ifndef TANDEM_OFFLINE
    {"sim", cli_sim, "simulate a fleet with the router's own core; replay a decision log"},
    {"plan", cli_plan, "how to split N GPUs between prefill and decode for given objectives"},
    {"bench", cli_bench,
     "bench serve, replay: load on a cluster; bench xfer: KV transfer beside its floors"},
#endif
    {0},
};
#ifdef TANDEM_OFFLINE
#define WHICH " (built without daemons)"
#else
#define WHICH ""
#endif

struct td_ranks_place cli_rank;

int main(int argc, char **argv)
{
    static const struct td_commands tandem = {
        .program = "tandem",
        .head = "tandem " TD_VERSION ": prefill and decode on separate machines" WHICH "\n\n",
        .what = "COMMAND",
        .foot = "`tandem help COMMAND` lists a command's options, `tandem version` tells the "
                "version.\nDaemons: tandem-router, tandem-prefill, tandem-decode.\n",
        .table = commands};
    struct td_err err = {0};
    td_log_start("cli", TD_LOG_WARN);
    if (td_ranks_take(&argc, argv, &cli_rank, &err)) return td_die("tandem", &err);
    return td_commands_run(&tandem, argc, argv);
}
