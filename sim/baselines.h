/* baselines.h - policies of other systems and of the literature, to compare the router's own
 * with. The daemon does not have them: the simulator, the tests and the core's bench give them
 * to the core as td_core_config.policies. */
#ifndef TD_SIM_BASELINES_H
#define TD_SIM_BASELINES_H

#include "router/core/policy.h"

/* All policies: the daemon's four and the five baselines. Ends with a NULL name. */
extern const struct td_policy td_sim_policies[];

/* Their names in the order of the table. */
#define TD_SIM_POLICIES                                                                            \
    "goodput|round_robin|least_request|least_token|power_of_two|cache_aware|lmetric|kv_cost|"      \
    "conductor"

#endif
