/* sim.h - the entry points of `tandem sim` and `tandem plan`, and the parsers that they share. */
#ifndef TD_SIM_SIM_H
#define TD_SIM_SIM_H

#include "sim/report.h"

/* argv[0] = the command's name; each returns the exit status: 0, 1 (failed), 2 (usage). */
int td_sim_main(int argc, char **argv); /* run, replay */
int td_plan_main(int argc, char **argv);

/* Parses "prefill:2:opt-13b, decode:4:opt-13b:slow=2:kv_tokens=50000" into config->groups. Keys:
 * slow, kv_tokens, nic_gbs, max_batch, max_step_tokens, max_seqs. */
td_status td_sim_fleet_parse(const char *text, const struct td_sim_group *defaults,
                             struct td_sim_config *config, struct td_err *err);
/* Parses "crash:3@10-20, slow:1@5*2, silent:0@7, drain:2@30, late:1@0-60, link:0@5-9*0.1". */
td_status td_sim_faults_parse(const char *text, struct td_sim_fault **ret_faults, uint32_t *ret_n,
                              struct td_err *err);
/* Parses "1,2,4" or "1:9:2" (from, to, step). */
td_status td_sim_list_parse(const char *text, const char *what, double *ret_values, uint32_t max,
                            uint32_t *ret_n, struct td_err *err);

#endif
