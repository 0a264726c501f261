/* tandem-bench: the benches of single parts, one program. `tandem bench` has those of whole
 * clusters. CMakeLists.txt says which kinds a build has: those of the simulator's and the tests'
 * libraries come with them, and builds with sanitizers leave out what no test runs. */
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "common/base/commands.h"
#ifdef TD_BENCH_DOUBLES
#include "tests/unit/xfer_node.h"
#endif

static const struct td_command kinds[] = {
    {"xfer", td_bench_xfer, "KV transfer between two processes of this host, beside its floors"},
#ifdef TD_BENCH_DOUBLES
    {"xfer-core", td_bench_xfer_core, "what the protocol costs a sender per RDMA work request"},
    {"xfer-times", td_bench_xfer_times, "how long connecting takes, and noticing a loss"},
#endif
#ifdef TD_BENCH_ROUTER
    {"router-core", td_bench_router_core, "what a request costs the router's core"},
    {"mock-worker", td_bench_mock_worker, "a decode worker without a model, for router_peers.py"},
    {"worker-load", td_bench_worker_load,
     "one request after the other to a mock-worker without a router"},
    {"http-mock", td_bench_http_mock, "an OpenAI server without a model, for router_peers.py"},
    {"http-load", td_bench_http_load, "one request over and over, for router_peers.py"},
    {"send-floor", td_bench_send_floor, "what sending an event of a stream costs, and no more"},
#endif
#ifdef TD_BENCH_GRAMMAR
    {"grammar", td_bench_grammar, "a step's mask of structured output, over a real vocabulary"},
#endif
#ifdef TD_BENCH_KERNELS
    {"kernels", td_bench_kernels, "each kernel of the CPU beside the machine's floors"},
#endif
    {"cuda", td_bench_cuda, "products, row entries and copies of a GPU beside its floors"},
#ifdef TD_BENCH_CUDA_ATTN
    {"cuda-attn", td_bench_cuda_attn, "attention of a GPU beside its floors"},
#endif
    {"cuda-sample", td_bench_cuda_sample, "sampling on a GPU beside reading the logits"},
    {0},
};

int main(int argc, char **argv)
{
    static const struct td_commands bench = {.program = "tandem-bench",
                                             .head = "",
                                             .what = "KIND",
                                             .foot =
                                                 "`tandem-bench KIND --help` lists the options.\n",
                                             .table = kinds};
#ifdef TD_BENCH_DOUBLES
    /* xfer-times starts this program again as the peer */
    if (argc == 3 && !strcmp(argv[1], "--node"))
        return node_child_main((int)strtol(argv[2], NULL, 10));
#endif
    return td_commands_run(&bench, argc, argv);
}
