/* port.c - the options, limits and metrics of a gRPC port. */
#include "common/rpc/port.h"

#include "common/base/clock.h"
#include "common/base/metrics.h"

struct port_metrics {
    struct td_metric *connections, *handshakes, *refused, *ended;
};

static struct port_metrics port_metrics(void)
{
    return (struct port_metrics){
        td_gauge("td_connections", "", "Connections on the gRPC port"),
        td_gauge("td_tls_handshakes", "", "TLS handshakes in progress on the gRPC port"),
        td_counter("td_connections_refused_total", "",
                   "Connections closed as they came: above a limit, or no descriptor"),
        td_counter("td_connections_ended_total", "",
                   "Connections ended because of what their clients sent"),
    };
}

void td_port_limits(const struct td_port_config *c, uint32_t n_calls, struct td_rpc_limits *limits)
{
    port_metrics(); /* register the metrics now, so that the first scrape has them */
    limits->max_live_calls = n_calls;
    limits->max_peer_calls =
        c->max_calls_per_peer ? (uint32_t)c->max_calls_per_peer : n_calls / 4 * 3;
    limits->max_connections = (uint32_t)c->max_connections;
    limits->max_peer_connections = (uint32_t)c->max_connections_per_peer;
    limits->max_handshakes = (uint32_t)c->max_handshakes;
    limits->max_handshakes_per_s = (uint32_t)c->max_handshakes_per_s;
    limits->max_handshake_ms = (uint32_t)c->handshake_timeout_ms;
}

bool td_port_follow(struct td_port_seen *seen, const struct td_rpc_server *server, uint64_t now_ns)
{
    struct td_rpc_server_stats st;
    if (!server || now_ns - seen->counted_ns < TD_NS_PER_S) return false;
    seen->counted_ns = now_ns;
    td_rpc_server_stats(server, &st);
    const struct port_metrics m = port_metrics();
    td_metric_set(m.connections, st.connections);
    td_metric_set(m.handshakes, st.handshakes);
    td_metric_add(m.refused, st.connections_refused - seen->refused);
    td_metric_add(m.ended, st.connections_ended - seen->ended);
    seen->refused = st.connections_refused;
    seen->ended = st.connections_ended;
    return true;
}
