/* tandem-bench-xfer: `tandem bench xfer` for builds without the command line
 * (-DTANDEM_DAEMONS=OFF). */
#include "bench/xfer_bench.h"

int main(int argc, char **argv) { return td_bench_xfer(argc, argv); }
