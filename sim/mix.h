/* mix.h - the classes and tenants of a run's requests: SLO classes with objectives, tenants, and
 * the share of the arrivals that each has. */
#ifndef TD_SIM_MIX_H
#define TD_SIM_MIX_H

#include "sim/trace.h"
#include "router/core/core.h"

struct td_sim_mix {
    /* n_classes >= 1; requests without a class get class 0 */
    struct td_core_class classes[TD_CORE_MAX_CLASSES];
    char tenants[TD_SIM_MAX_TENANTS][32]; /* names of load.tenants */
    uint32_t n_classes, n_tenants;
};

/* Parses the options of a mix into mix, and the shares into load. TD_ERR_INVALID names the option
 * and the item.
 *   slo_class  in the router's syntax: "gold:ttft=450,tpot=40,weight=4 bulk:ttft=5000,best_effort";
 *              "" = one class with the given objectives
 *   class_mix  "gold=1 bulk=3": each class's share of the arrivals, relative to the others; a class
 *              that is not named gets none; "" = equal shares
 *   tenants    "acme=3 flood:bulk=10": each tenant's share, and the class of all of its requests
 *              (otherwise class_mix decides); "" = no tenants
 *   by_length  "chat:4000 long": classes by prompt tokens, chat up to 4,000, long above. Used
 *              instead of class_mix for requests whose tenant has no class; "" = not by length */
td_status td_sim_mix_parse(const char *slo_class, const char *class_mix, const char *by_length,
                           const char *tenants, double ttft_ms, double tpot_ms,
                           struct td_sim_mix *ret_mix, struct td_sim_load *load,
                           struct td_err *err);

#endif
