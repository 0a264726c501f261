/* main.c - the life of a worker daemon, prefill or decode: which one, td_worker_program says,
 * and that is linked in from prefill/ or decode/. */
#include <td_commit.h> /* cmake/commit.cmake makes it */

#include <string.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/process_metrics.h"
#include "common/worker/worker.h"

int main(int argc, char **argv)
{
    const struct td_worker_program *p = &td_worker_program;
    struct td_err e = {0};
    struct td_ranks_place place;
    td_process_set_commit(TD_COMMIT);
    if (td_ranks_take(&argc, argv, &place, &e)) return td_die(p->name, &e);
    if (td_options_load(p->options, p->config, p->name, p->summary, argc, argv, NULL, 0, NULL, &e))
        return td_die(p->name, &e);
    const struct td_worker_config *config = p->config;
    enum td_log_level level = TD_LOG_INFO;
    td_log_level_parse(config->log.level, &level);
    td_log_start(p->role->name, level);
    td_log_set_json(!strcmp(config->log.format, "json"));
    if (td_fault_init(&e)) return td_die(p->name, &e);
    /* a part of the model for the process that started this one (--tp) */
    if (place.rank > 0) return td_worker_follow(&place, config);
    if (config->ranks.node_rank > 0) return td_worker_follow_node(p->role, config);
    /* weights, pools, transfer, server, registration */
    if (td_worker_open(p->worker, p->role, config, &e)) {
        td_worker_close(p->worker);
        return td_die(p->name, &e);
    }
    int status = td_worker_run(p->worker); /* until SIGTERM, or the device is lost */
    td_worker_drain(p->worker);            /* unready, stop intake, finish or hand over */
    td_worker_close(p->worker);            /* in reverse */
    return status;                         /* a second signal exits at once */
}
