/* sim.c - `tandem sim` and `tandem plan`: the simulator and the planner of sim/, linked into the
 * command line. */
#include "cli/cli.h"

/* sim; nothing includes that folder */
int td_sim_main(int argc, char **argv);
int td_plan_main(int argc, char **argv);

int cli_sim(int argc, char **argv) { return td_sim_main(argc, argv); }
int cli_plan(int argc, char **argv) { return td_plan_main(argc, argv); }
