/* engine_bench_counts.h - what a prefill must compute and a decode step must read: the numerators
 * of `tandem engine-bench`.
 *
 * Both are of the engine's own form of a model: in the last layer the rows of a prompt whose logits
 * are not wanted end once their K and V are stored (forward.c), and latent attention is absorbed
 * (latent.c). Pure functions, for any thread. */
#ifndef TD_CLI_ENGINE_BENCH_COUNTS_H
#define TD_CLI_ENGINE_BENCH_COUNTS_H

#include "common/kv/kv_layout.h"
#include "common/model/config.h"

/* Of a prompt whose last row's logits are wanted; two operations for each multiplication. Products
 * are those with weights, attention's are those of q with K and of scores with V. */
struct engine_bench_ops {
    double products, attention;
};
struct engine_bench_ops engine_bench_prefill_ops(const struct td_model_config *m,
                                                 double prompt_len);

/* Of a step in which all layers together read `active` experts, from what one row reads
 * (td_model_weight_bytes) and what all experts take (td_model_expert_weight_bytes). */
double engine_bench_weight_bytes(const struct td_model_config *m, double row_bytes,
                                 double expert_bytes, double active);
/* The experts that all layers together read for n_rows rows, were each row's chosen at random:
 * where they are not counted, on a device. 0: the model has none. */
double engine_bench_even_experts(const struct td_model_config *m, double n_rows);

/* Of one step's K and V, `context` tokens of each of n_seqs sequences. */
double engine_bench_kv_bytes(const struct td_model_config *m, const struct td_kv_layout *kv,
                             double n_seqs, double context);

#endif
