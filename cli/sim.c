/* tandem sim: the simulator of bench/sim, linked into the command line. */
#include "cli/cli.h"

int td_sim_main(int argc, char **argv); /* bench/sim/sim_main.c; nothing includes that folder */

int cli_sim(int argc, char **argv) { return td_sim_main(argc, argv); }
