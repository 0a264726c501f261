/* tandem-decode: the decode worker's life. */
#include "decode/decode.h"

#include "common/base/fault.h"
#include "common/base/log.h"

int main(int argc, char **argv)
{
    static struct decode d; /* zero = nothing open */
    struct td_err e = {0};
    struct td_ranks_place place;
    if (td_ranks_take(&argc, argv, &place, &e)) return td_die("tandem-decode", &e);
    if (td_options_load(decode_options, &d.cfg, "tandem-decode",
                        "Decode worker: takes KV from prefill workers and streams tokens.", argc,
                        argv, NULL, 0, NULL, &e))
        return td_die("tandem-decode", &e);
    enum td_log_level level = TD_LOG_INFO;
    td_log_level_parse(d.cfg.worker.log_level, &level);
    td_log_start("decode", level);
    if (td_fault_init(&e)) return td_die("tandem-decode", &e);
    /* a part of the model for the process that started this one (--tp) */
    if (place.rank > 0) return td_worker_follow(&place, &d.cfg.worker);
    if (td_worker_open(&d.worker, &decode_role, &d.cfg.worker, &e)) {
        /* weights, pools, transfer, server, registration */
        td_worker_close(&d.worker);
        return td_die("tandem-decode", &e);
    }
    int status = td_worker_run(&d.worker); /* until SIGTERM, or the device is lost */
    td_worker_drain(&d.worker);            /* unready, stop intake, finish or hand over */
    td_worker_close(&d.worker);            /* in reverse */
    return status;                         /* a second signal exits at once */
}
