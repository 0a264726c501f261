/* tandem-prefill: the prefill worker's life. */
#include "prefill/prefill.h"

#include "common/base/fault.h"
#include "common/base/log.h"

int main(int argc, char **argv)
{
    static struct prefill d; /* zero = nothing open */
    struct td_err e = {0};
    struct td_ranks_place place;
    if (td_ranks_take(&argc, argv, &place, &e)) return td_die("tandem-prefill", &e);
    if (td_options_load(prefill_options, &d.cfg, "tandem-prefill",
                        "Prefill worker: computes prompts and pushes their KV to decode workers.",
                        argc, argv, NULL, 0, NULL, &e))
        return td_die("tandem-prefill", &e);
    enum td_log_level level = TD_LOG_INFO;
    td_log_level_parse(d.cfg.worker.log_level, &level);
    td_log_start("prefill", level);
    if (td_fault_init(&e)) return td_die("tandem-prefill", &e);
    /* a part of the model for the process that started this one (--tp) */
    if (place.rank > 0) return td_worker_follow(&place, &d.cfg.worker);
    if (td_worker_open(&d.worker, &prefill_role, &d.cfg.worker, &e)) {
        /* weights, pools, transfer, server, registration */
        td_worker_close(&d.worker);
        return td_die("tandem-prefill", &e);
    }
    int status = td_worker_run(&d.worker); /* until SIGTERM, or the device is lost */
    td_worker_drain(&d.worker);            /* unready, stop intake, finish or hand over */
    td_worker_close(&d.worker);            /* in reverse */
    return status;                         /* a second signal exits at once */
}
