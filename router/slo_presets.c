/* slo_presets.c - see slo_presets.h. Sources: mlcommons/inference loadgen/mlperf.conf; DistServe
 * (Zhong et al. 2024), table 1. */
#include "router/slo_presets.h"

#include <stdio.h>
#include <string.h>

static const struct td_slo_preset presets[] = {
    {"mlperf-llama2-70b", 2000, 200, 0.99},
    {"mlperf-llama2-70b-interactive", 450, 40, 0.99},
    {"mlperf-llama3.1-8b", 2000, 100, 0.99},
    {"mlperf-llama3.1-8b-interactive", 500, 30, 0.99},
    {"mlperf-mixtral-8x7b", 2000, 200, 0.99},
    {"mlperf-llama3.1-405b", 6000, 175, 0.99},
    {"mlperf-llama3.1-405b-interactive", 4500, 80, 0.99},
    {"mlperf-deepseek-r1", 2000, 80, 0.99},
    {"mlperf-deepseek-r1-interactive", 1500, 15, 0.99},
    {"distserve-chat-13b", 200, 100, 0.9},
    {"distserve-chat-66b", 400, 100, 0.9},
    {"distserve-chat-175b", 4000, 200, 0.9},
};
#define N_PRESETS (sizeof presets / sizeof *presets)

td_status td_slo_preset_find(const char *name, const struct td_slo_preset **ret_preset,
                             struct td_err *err)
{
    char known[400];
    size_t used = 0;
    for (size_t i = 0; i < N_PRESETS; i++) {
        if (!strcmp(presets[i].name, name)) {
            *ret_preset = &presets[i];
            return TD_OK;
        }
        int n = snprintf(known + used, sizeof known - used, "%s%s", i ? " " : "", presets[i].name);
        used += n > 0 && used + (size_t)n < sizeof known ? (size_t)n : 0;
    }
    return td_fail(err, TD_ERR_INVALID, "objective preset \"%.60s\" is unknown; there are: %s",
                   name, known);
}
