/* bench.h - the entries of the benches, each what main is for a program of its own: argv[0] is the
 * kind's name, the answer the exit status. main.c and cli/bench.c list them. */
#ifndef TD_BENCH_BENCH_H
#define TD_BENCH_BENCH_H

/* KV transfer between two processes, beside its floors: `tandem bench xfer`, too */
int td_bench_xfer(int argc, char **argv);
int td_bench_xfer_core(int argc, char **argv);   /* what the protocol costs a work request */
int td_bench_xfer_times(int argc, char **argv);  /* connecting; noticing a loss */
int td_bench_router_core(int argc, char **argv); /* what the router's core costs a request */
int td_bench_mock_worker(int argc, char **argv); /* a decode worker without a model */
int td_bench_worker_load(int argc, char **argv); /* requests to a worker without a router */
int td_bench_http_mock(int argc, char **argv);   /* an OpenAI server without a model */
int td_bench_http_load(int argc, char **argv);   /* a request over and over */
int td_bench_send_floor(int argc, char **argv);  /* what sending an event costs */
int td_bench_grammar(int argc, char **argv);     /* a mask of structured output, per step */
int td_bench_kernels(int argc, char **argv);     /* the CPU's kernels, beside its floors */
int td_bench_cuda(int argc, char **argv);        /* a GPU's products, row entries and copies */
int td_bench_cuda_attn(int argc, char **argv);   /* its attention */
int td_bench_cuda_sample(int argc, char **argv); /* its sampler */

#endif
