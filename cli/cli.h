/* cli.h - the `tandem` command: one file per subcommand, and the small synchronous client they
 * share. */
#ifndef TD_CLI_H
#define TD_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/api_key.h"
#include "common/base/options.h"
/* A build without daemons (TANDEM_DAEMONS=OFF) has only the commands that need no cluster. */
#ifndef TANDEM_OFFLINE
#include "common/rpc/rpc.h"
#include "tandem/v1/inference.pb-c.h"
#endif

/* Each command gets argv with argv[0] = its own name and returns the exit status: 0, 1 (failed), 2
 * (usage). */
int cli_up(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_chat(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_health(int argc, char **argv);
int cli_model(int argc, char **argv);
int cli_tokenize(int argc, char **argv);
int cli_logits(int argc, char **argv);
int cli_quantize(int argc, char **argv);
int cli_compare(int argc, char **argv);
int cli_engine_bench(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_doctor(int argc, char **argv);
int cli_sim(int argc, char **argv);
int cli_plan(int argc, char **argv);

/* input.c: reads all that is left in f and puts a zero after it; the caller frees *ret_text.
 * TD_ERR_IO, TD_ERR_NOMEM. Blocks until f ends. */
td_status cli_read_all(FILE *f, char **ret_text, size_t *ret_bytes, struct td_err *err);

/* The rank of this process, which main took out of the arguments: not 0 when engine-bench has
 * started this program again as a further rank (common/engine/ranks.h). */
struct td_ranks_place;
extern struct td_ranks_place cli_rank;

#ifndef TANDEM_OFFLINE
/* --- client.c --------------------------------------------------------------------------------- */

struct cli_server { /* the options that every client command has */
    const char *server, *tls_ca, *tls_cert, *tls_key, *tls_server_name;
    const char *cluster_secret_file; /* cli_status_call's: NULL or "" = none */
    const char *api_key_file;        /* NULL or "" = none */
};
// clang-format off
#define CLI_SERVER_OPTIONS(S, M)                                                                \
    {"server", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, offsetof(S, M.server),                 \
     "router's address; several, parted by commas, are tried in turn"},                         \
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_ca),                               \
     "CA of the router's certificate; turns TLS on"},                                           \
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_cert),                           \
     "own certificate, for mutual TLS"},                                                        \
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_key), "own key, for mutual TLS"}, \
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls_server_name),             \
     "name that the router's certificate must hold; empty = the host dialled"},                 \
    {"api_key_file", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.api_key_file),                   \
     "file with the key of a tenant, for routers with --tenants"}
// clang-format on

enum { CLI_MAX_SERVERS = 16 };

struct cli_client {
    struct td_rpc_loop *loop;
    struct td_rpc_channel *channel; /* one of channels: calls go there */
    struct td_rpc_channel *channels[CLI_MAX_SERVERS];
    char servers[CLI_MAX_SERVERS][256];
    uint32_t n_channels, at;                  /* which one channel is */
    char authorization[TD_AUTHORIZATION_MAX]; /* "Bearer KEY", or "" */
    /* NULL, or whether the user wants the running call to end: asked 20 times a second, on the
     * command's thread. The call is then cancelled. */
    bool (*is_interrupted)(void);
};
/* TLS for dialling, borrowed from s; for td_rpc_channel_config.tls when s->tls_ca is not empty. */
struct td_rpc_tls cli_tls(const struct cli_server *s);
td_status cli_client_open(struct cli_client *c, const struct cli_server *s, struct td_err *err);
void cli_client_close(struct cli_client *c);

struct cli_result {
    enum td_code code;
    char details[1024];
};
/* Makes one call and blocks until it has ended. on_message (loop thread) gets every response.
 * wait_for_ready: keep trying to connect until deadline_ms. */
void cli_call(struct cli_client *c, const char *path, const ProtobufCMessageDescriptor *response,
              const ProtobufCMessage *request, uint64_t deadline_ms, bool wait_for_ready,
              void (*on_message)(const ProtobufCMessage *msg, void *ctx), void *ctx,
              struct cli_result *ret_result);
/* Calls Inference.Status. With a cluster secret the caller proves that it knows the secret, and the
 * answer contains everything. on_message is called once, with the last answer. False: *err says
 * what is wrong with the secret's file. */
bool cli_status_call(struct cli_client *c, const struct cli_server *s, uint64_t deadline_ms,
                     bool wait_for_ready,
                     void (*on_message)(const ProtobufCMessage *msg, void *ctx), void *ctx,
                     struct cli_result *ret_result, struct td_err *err);
// clang-format off
#define CLI_SECRET_OPTION(S, M)                                                              \
    {"cluster_secret_file", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.cluster_secret_file),  \
     "the cluster's secret, which makes the caller an operator: the router tells names and " \
     "addresses of workers"}
// clang-format on

/* resume.c: a Generate call that goes on at the next server when one is lost. As cli_call, but that
 * it may make several calls; request is changed, and must ask for return_token_ids. on_message gets
 * every token once. retry_ms: for so long without a new token; each retry is told on stderr. */
void cli_generate_call(struct cli_client *c, const char *command,
                       Tandem__V1__GenerateRequest *request, uint64_t deadline_ms,
                       uint64_t retry_ms,
                       void (*on_message)(const ProtobufCMessage *msg, void *ctx), void *ctx,
                       struct cli_result *ret_result);

const char *cli_code_name(enum td_code code); /* "UNAVAILABLE", ... */
/* Prints "tandem CMD: CODE_NAME: details" and what to do about it; returns 1. When nothing could be
 * reached it looks what listens there, for three seconds at most. */
int cli_complain(const char *command, const struct cli_server *s, const struct cli_result *r);
/* What to change when `address` could not be reached with the options of s, as the end of a
 * sentence; NULL: nothing that is known. */
const char *cli_port_hint(const struct cli_server *s, const char *address,
                          const struct cli_result *r);

/* port_kind.c: what answers at host:port. */
enum cli_port_kind { CLI_PORT_UNKNOWN, CLI_PORT_CLEAR, CLI_PORT_TLS, CLI_PORT_HTTP };
enum cli_port_kind cli_port_kind(const char *address);

#endif
#endif
