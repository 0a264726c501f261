/* engine_device.h - what an engine has on a device beside its model: the table itself, the KV
 * memory and the sampler's buffers. Inside common/engine only.
 *
 * Life: open (before the model), kv and sampler (after it), close (after the model). One owning
 * thread, the engine's. */
#ifndef TD_ENGINE_ENGINE_DEVICE_H
#define TD_ENGINE_ENGINE_DEVICE_H

#include "common/engine/engine.h"

struct td_engine_device;

/* *ret stays NULL with device "cpu". */
td_status td_engine_device_open(const struct td_engine_config *config,
                                struct td_engine_device **ret, struct td_err *err);
/* NULL is fine; nothing else of the table may be in use */
void td_engine_device_close(struct td_engine_device *d);
const struct td_ops *td_engine_device_ops(const struct td_engine_device *d); /* NULL: the host's */

/* What kv_memory means on the device, and a size of it; as td_engine_kv_bytes for the host.
 * Names what was asked, what is free, and what to lower. */
td_status td_engine_device_kv_bytes(const struct td_engine_device *d, const char *text,
                                    uint64_t *ret_bytes, struct td_err *err);
struct td_engine_device_kv {
    void *blocks, *scratch;
    size_t bytes; /* of blocks: with room behind them where a transfer tries its paths */
};
/* Once; freed by close. scratch_bytes 0: none. */
td_status td_engine_device_kv_alloc(struct td_engine_device *d, uint64_t bytes,
                                    size_t scratch_bytes, struct td_engine_device_kv *ret_kv,
                                    struct td_err *err);

/* Buffers for max_rows rows of logits. Without it, or when the table has no sampler, fill
 * answers UNSUPPORTED and the host samples: same tokens. */
td_status td_engine_device_sampler_open(struct td_engine_device *d, int32_t max_rows, int32_t vocab,
                                        struct td_err *err);
/* The items whose last token this step computes, in order, are the rows of logits; padded up to
 * n_rows. Fills *ret_tail for the forward of this step. TD_ERR_LIMIT: their penalties and biases
 * are too long for the buffer; the host samples. */
td_status td_engine_device_sample_fill(struct td_engine_device *d, const struct td_step_item *items,
                                       int32_t n_items, int32_t n_rows,
                                       struct td_forward_tail *ret_tail);
/* After the forward: row `row` of those. As td_sample. */
td_status td_engine_device_sample_take(const struct td_engine_device *d, int32_t row,
                                       struct td_sampled *ret_sampled);

#endif
