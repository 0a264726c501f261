/* objectives.h - the router's table of SLO classes and its latency table, from the text of
 * options and files into the core's configuration. */
#ifndef TD_ROUTER_OBJECTIVES_H
#define TD_ROUTER_OBJECTIVES_H

#include "router/core/core.h"

#define ROUTER_NODE_CLASS_NAME 64

/* "gold:ttft=450,tpot=40,weight=4 bulk:ttft=5000,weight=0.5,best_effort": classes, separated by
 * blanks; ttft and tpot in ms. preset=NAME takes a public pair (slo_presets.h). The first is
 * what a request without a class gets, unless one is named "default". "" = one class "default"
 * without objectives. */
td_status router_classes_parse(const char *text, struct td_core_config *config, struct td_err *err);
/* Index of a class by name, "" = 0; TD_ERR_INVALID lists the names. */
td_status router_class_find(const struct td_core_config *config, const char *name,
                            uint32_t *ret_class, struct td_err *err);

/* A file of lines "node_class=NAME a0=.. a1=.. a2=.. b0=.. b1=.. b2=.. b3=.. b4=.. link_tau=..
 * link_bytes_per_s=..", '#' starts a comment; seconds, tokens, bytes (latency.h has the
 * formulas). `tandem bench calibrate` writes it. names[i] is the class of config->thetas[i]. A
 * line may also say what a worker of the class is, for `tandem sim --latency FILE`, which reads
 * the same file: kv_tokens, kv_bytes (of a token), gpus; nodes[i] (may be NULL) has them, 0 =
 * not said. read: of an open file; path is what messages call it. */
struct router_node {
    double kv_tokens, kv_bytes, gpus;
};
td_status router_latency_table_read(FILE *in, const char *path, struct td_core_config *config,
                                    char names[][ROUTER_NODE_CLASS_NAME], struct router_node *nodes,
                                    struct td_err *err);
td_status router_latency_table_load(const char *path, struct td_core_config *config,
                                    char names[][ROUTER_NODE_CLASS_NAME], struct router_node *nodes,
                                    struct td_err *err);

#endif
