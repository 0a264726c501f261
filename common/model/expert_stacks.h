/* expert_stacks.h - splits a tensor that holds all experts of a layer into one tensor per expert,
 * named as the family's tables name them.
 *
 *   PREFIX.NAME        [experts, columns, rows]: NAME.weight of each, turned
 *   PREFIX.NAME_bias   [experts, rows]: NAME.bias of each
 *   PREFIX.NAME_blocks U8 [experts, rows, columns / 32, 16] and PREFIX.NAME_scales U8 [experts,
 *                      rows, columns / 32]: NAME.weight of each, in MXFP4
 *
 * PREFIX is "model.layers.N." and td_layer_spec.expert_prefix. Threads: as checkpoint.h. */
#ifndef TD_MODEL_EXPERT_STACKS_H
#define TD_MODEL_EXPERT_STACKS_H

#include "common/model/checkpoint.h"
#include "common/model/config.h"

/* Replaces the stacks in `c` by tensors of experts, which borrow the same bytes. Shapes and types
 * of stacks are checked, also against the number of experts; those of the tensors made are for
 * their reader to compare with the config. A model without stacks, and a GGUF file, stay as they
 * are. what: names the model in errors. */
td_status td_expert_stacks_open(const struct td_model_config *config, const char *what,
                                struct td_checkpoint *c, struct td_err *err);

#endif
