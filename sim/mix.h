/* mix.h - who the requests of a run belong to: SLO classes with objectives, tenants, and each
 * one's share of the arrivals. */
#ifndef TD_SIM_MIX_H
#define TD_SIM_MIX_H

#include "sim/trace.h"
#include "router/core/core.h"

struct td_sim_mix {
    /* n_classes >= 1; 0 is what requests without a class get */
    struct td_core_class classes[TD_CORE_MAX_CLASSES];
    char tenants[TD_SIM_MAX_TENANTS][32]; /* names of load.tenants */
    uint32_t n_classes, n_tenants;
};

/* slo_class: the router's own words, "gold:ttft=450,tpot=40,weight=4
 * bulk:ttft=5000,weight=0.5,best_effort"; "" = one class of the given objectives. class_mix:
 * "gold=1 bulk=3", each class's share of the arrivals, relative to the others'; a class that is not
 * named gets none, "" = all the same. tenants: "acme=3 flood:bulk=10", each tenant's share, and the
 * class that all of its requests are of (else class_mix decides); "" = none is named. by_length:
 * "chat:4000 long", classes by prompt tokens: chat up to 4,000, long above; instead of class_mix,
 * for requests whose tenant has no class of its own; "" = not by length. Into mix, and the shares
 * into load. TD_ERR_INVALID names the option and the word. */
td_status td_sim_mix_parse(const char *slo_class, const char *class_mix, const char *by_length,
                           const char *tenants, double ttft_ms, double tpot_ms,
                           struct td_sim_mix *ret_mix, struct td_sim_load *load,
                           struct td_err *err);

#endif
