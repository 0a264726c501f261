/* tandem-router: the router's life. */
#include <td_commit.h> /* cmake/commit.cmake makes it */

#include "router/router.h"

#include <string.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/process_metrics.h"

int main(int argc, char **argv)
{
    static struct router r; /* zero = nothing open */
    struct router_config cfg = {0};
    struct td_err e = {0};
    td_process_set_commit(TD_COMMIT);
    if (td_options_load(router_options, &cfg, "tandem-router",
                        "Router: takes requests and places each on a prefill and a decode worker.",
                        argc, argv, NULL, 0, NULL, &e))
        return td_die("tandem-router", &e);
    enum td_log_level level = TD_LOG_INFO;
    td_log_level_parse(cfg.observe.log_level, &level);
    td_log_start("router", level);
    td_log_set_json(!strcmp(cfg.observe.log_format, "json"));
    if (td_fault_init(&e)) return td_die("tandem-router", &e);
    if (router_open(&r, &cfg, &e)) {
        router_close(&r);
        return td_die("tandem-router", &e);
    }
    if (router_run(&r)) return 1; /* until SIGTERM; or deaf, when nothing can be drained any more */
    router_drain(&r);             /* unready, refuse new requests, finish the live ones */
    router_close(&r);
    return 0;
}
