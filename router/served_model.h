/* served_model.h - one model that the router serves: its names, tokenizer and chat template, the
 * length of its context, and the core that places its requests.
 *
 * The core decides for one model alone: it knows that model's workers and requests, and has its
 * latency model and its decision log. What a router has once (ports, identity, tenants, numbers of
 * requests and of workers) is in struct router. A request and a worker belong to one model from
 * their begin to their end. Request numbers, worker numbers and ids of requests are the router's:
 * no two models use the same one at a time.
 *
 * Threads: the router's loop thread, but for open, which any thread may call. */
#ifndef TD_ROUTER_SERVED_MODEL_H
#define TD_ROUTER_SERVED_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/model/config.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_cache.h"
#include "router/core/core.h"
#include "router/model_names.h"
#include "router/objectives.h"

struct router;

struct served_model_metrics {
    struct td_metric *ttft, *tpot, *e2e, *queue, *reserve, *prefill_queue, *prefill, *rpc,
        *transfer, *running, *waiting;
    struct td_metric *finished, *failed, *cancelled, *failovers, *resumed, *prompt_tokens,
        *output_tokens, *mismatches;
    struct td_metric *refused, *deflected, *wasted, *good, *missed_ttft, *missed_tpot,
        *hit_predicted, *hit_real, *arrival_rate;
    struct td_metric *picker_kv;
    struct td_metric *coverage[2], *mape[2], *wanted[2], *needed[2], *utilisation[2],
        *bound[TD_BOUND_N];
    struct td_metric *itl, *prompt_sizes, *output_sizes, *ended_by_stop, *ended_by_length;
    struct td_metric *workers[2][3]; /* by role, and by state from TD_WORKER_READY on */
    struct td_metric *queue_by_class[TD_CORE_MAX_CLASSES], *good_by_class[TD_CORE_MAX_CLASSES],
        *missed_by_class[TD_CORE_MAX_CLASSES];
};

/* What the metrics and the log were last told of the core. */
struct served_model_told {
    struct td_core_stats stats;
    enum td_bound bound;
    uint64_t bound_ns;
};

struct served_model {
    struct router *router;
    uint32_t index;                   /* in the router's list, which never gets shorter */
    struct router_model_names names;  /* names[0] is told where one is told */
    char dir_name[ROUTER_MODEL_NAME]; /* of its directory: workers may say that */
    struct td_model_config config;
    uint64_t config_digest, vocab_digest; /* what a worker's hello must agree with */
    struct td_tokenizer *tokenizer;
    struct td_token_cache *token_cache; /* loop thread */
    struct td_chat_template *chat;
    size_t longest_token_bytes;
    uint32_t max_len; /* what served_model_max_len answers */
    char node_classes[TD_CORE_MAX_NODE_CLASSES][ROUTER_NODE_CLASS_NAME];
    uint32_t n_node_classes;
    struct td_core *core;
    FILE *log; /* decision log, or NULL */
    char log_path[ROUTER_MAX_MODEL_PATH];
    struct served_model_metrics metrics;
    struct served_model_told told;
};

/* Reads the model's files (no weights) and makes its core with the classes of r->core_cfg.
 * is_first: it logs decisions to the file of --decision-log; else to that file with the model's
 * name behind it (router_model_log_path). Any thread: reads only those fields of *r that do not
 * change after router_open. Blocks on the disk. */
td_status served_model_open(struct router *r, const struct router_model_spec *spec, bool is_first,
                            struct served_model **ret_model, struct td_err *err);
/* It takes part from now on: metrics, the length of its context. Loop thread, or before there is
 * one. */
void served_model_begin(struct served_model *m);
void served_model_metrics_make(struct served_model *m); /* model_metrics.c: of begin */
const char *served_model_name(const struct served_model *m);
void served_model_close(struct served_model *m); /* NULL is fine */

/* The one door to the core: applies the event, logs it, logs and carries out the actions. */
void served_model_event(struct served_model *m, struct td_core_event event);
void served_model_tick(struct served_model *m, struct td_ev_tick tick);

/* Longest sequence that every worker of the model can hold. */
uint32_t served_model_max_len(const struct served_model *m);
void served_model_update_max_len(struct served_model *m); /* a worker came or went */

#endif
