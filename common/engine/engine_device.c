/* engine_device.c - see engine_device.h.
 *
 * Sampling is the tail of a step: rows of jobs go down, results come up, both in pinned memory
 * at fixed addresses, so that a recorded graph stays good. Penalties and biases lie in pinned
 * memory too and are read from there by the device; PAYLOAD_BYTES of them at most, since 4096
 * sequences of full length would be gigabytes. */
#include "common/engine/engine_device.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/options.h"
#include "kernels/device.h"

#define PAYLOAD_BYTES ((size_t)32 << 20)
#define KV_SHARE_MAX 95
#define KV_TAIL_BYTES 4096 /* behind the blocks: where a transfer tries its paths */

struct td_engine_device {
    const struct td_ops *ops;
    const struct td_device *dev;
    struct td_engine_device_kv kv;
    /* sampler */
    int32_t max_rows, vocab, n_rows;
    uint32_t features;
    struct td_sample_row *rows, *rows_there;
    struct td_sample_result *results, *results_there;
    void *scratch;
    struct td_sample_payload payload;
};

td_status td_engine_device_open(const struct td_engine_config *c, struct td_engine_device **ret,
                                struct td_err *err)
{
    if (!c->device || !c->device[0] || !strcmp(c->device, "cpu")) return TD_OK;
    if (strcmp(c->device, "cuda") != 0)
        return td_fail(err, TD_ERR_INVALID, "device is \"%.32s\", must be cpu or cuda", c->device);
    if (c->ops && c->ops[0])
        return td_fail(err, TD_ERR_INVALID,
                       "ops is \"%.32s\": it names kernels of the CPU, device is cuda", c->ops);
    struct td_engine_device *d = calloc(1, sizeof *d);
    if (!d) return td_fail(err, TD_ERR_NOMEM, "engine: out of memory");
    struct td_device_config dc = {.index = c->device_index, .deterministic = c->deterministic};
    td_status s = td_device_open(&dc, &d->ops, err);
    if (s) {
        free(d);
        return td_err_prefix(err, "device cuda");
    }
    d->dev = d->ops->device;
    *ret = d;
    return TD_OK;
}

void td_engine_device_close(struct td_engine_device *d)
{
    if (!d) return;
    void *const there[] = {d->rows_there, d->results_there, d->scratch, d->kv.scratch,
                           d->kv.blocks},
                *const pinned[] = {d->rows, d->results, d->payload.base};
    for (size_t i = 0; i < sizeof there / sizeof *there; i++)
        if (there[i]) d->dev->release(there[i]);
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        if (pinned[i]) d->dev->release_pinned(pinned[i]);
    td_device_close(d->ops);
    free(d);
}

const struct td_ops *td_engine_device_ops(const struct td_engine_device *d)
{
    return d ? d->ops : NULL;
}

td_status td_engine_device_kv_bytes(const struct td_engine_device *d, const char *text,
                                    uint64_t *ret_bytes, struct td_err *err)
{
    uint64_t n_free = 0, total = 0, bytes = 0;
    td_status s = d->dev->free_bytes(&n_free, &total, err);
    size_t n = strlen(text);
    if (s) return s;
    if (n > 0 && text[n - 1] == '%') {
        char *end;
        double share = strtod(text, &end);
        if (end != text + n - 1 || !(share > 0) || share > KV_SHARE_MAX)
            return td_fail(err, TD_ERR_INVALID,
                           "kv_memory: \"%s\" is not a share; use 1%%..%d%% of what is free on the "
                           "device, or a size",
                           text, KV_SHARE_MAX);
        bytes = (uint64_t)((double)n_free * share / 100.0);
    } else if ((s = td_parse_size(text, &bytes, err))) {
        return td_err_prefix(err, "kv_memory");
    }
    if (bytes > n_free)
        return td_fail(err, TD_ERR_NOMEM,
                       "kv_memory asks for %" PRIu64 " MiB, of the %" PRIu64
                       " MiB of the device %" PRIu64
                       " MiB are free beside the weights and the workspace: lower kv_memory",
                       bytes >> 20, total >> 20, n_free >> 20);
    *ret_bytes = bytes;
    return TD_OK;
}

td_status td_engine_device_kv_alloc(struct td_engine_device *d, uint64_t bytes,
                                    size_t scratch_bytes, struct td_engine_device_kv *ret_kv,
                                    struct td_err *err)
{
    struct td_engine_device_kv *kv = &d->kv;
    kv->bytes = (size_t)bytes + KV_TAIL_BYTES;
    td_status s = d->dev->alloc(kv->bytes, "KV blocks (kv_memory)", &kv->blocks, err);
    if (!s && scratch_bytes)
        s = d->dev->alloc(scratch_bytes, "KV blocks whose order is changed", &kv->scratch, err);
    *ret_kv = *kv;
    return s;
}

td_status td_engine_device_sampler_open(struct td_engine_device *d, int32_t max_rows, int32_t vocab,
                                        struct td_err *err)
{
    const struct td_device *dev = d->dev;
    if (!dev->sample || vocab > TD_SAMPLE_MAX_VOCAB) return TD_OK;
    size_t rows = (size_t)max_rows * sizeof *d->rows,
           results = (size_t)max_rows * sizeof *d->results;
    void *p[6] = {0};
    td_status s = dev->alloc_pinned(rows, "sampling jobs", &p[0], err);
    if (!s) s = dev->alloc_pinned(results, "sampled tokens", &p[1], err);
    if (!s) s = dev->alloc_pinned(PAYLOAD_BYTES, "penalties and biases", &p[2], err);
    if (!s) s = dev->alloc(rows, "sampling jobs", &p[3], err);
    if (!s) s = dev->alloc(results, "sampled tokens", &p[4], err);
    if (!s)
        s = dev->alloc(dev->sample_scratch_bytes(max_rows, vocab), "sampler (max_batch)", &p[5],
                       err);
    d->rows = p[0], d->results = p[1], d->payload.base = p[2], d->rows_there = p[3],
    d->results_there = p[4], d->scratch = p[5];
    d->payload.bytes = PAYLOAD_BYTES;
    if (!s) s = dev->sample_clear(d->scratch, max_rows, vocab, err);
    if (s) return s;
    d->max_rows = max_rows;
    d->vocab = vocab;
    return TD_OK;
}

static void issue(void *ctx, const float *logits, int32_t n_rows)
{
    const struct td_engine_device *d = ctx;
    TD_ASSERT(n_rows == d->n_rows);
    struct td_sample_args a = {.logits = logits,
                               .logits_stride = d->vocab,
                               .vocab = d->vocab,
                               .n_rows = n_rows,
                               .features = d->features,
                               .rows = d->rows_there,
                               .results = d->results_there,
                               .scratch = d->scratch};
    d->dev->put(d->rows_there, d->rows, (size_t)n_rows * sizeof *d->rows);
    d->dev->sample(&a);
    d->dev->get(d->results, d->results_there, (size_t)n_rows * sizeof *d->results);
}

td_status td_engine_device_sample_fill(struct td_engine_device *d, const struct td_step_item *items,
                                       int32_t n_items, int32_t n_rows,
                                       struct td_forward_tail *ret_tail)
{
    if (!d->max_rows) return TD_ERR_UNSUPPORTED;
    TD_ASSERT(n_rows <= d->max_rows);
    int32_t n = 0;
    d->features = 0;
    d->payload.used = 0;
    for (int32_t i = 0; i < n_items; i++) {
        const struct td_seq *seq = items[i].seq;
        if (seq->sched.n_computed + items[i].n_new < seq->sched.n_tokens) continue;
        td_status s = td_sample_pack(&seq->sampling, seq->tokens, seq->sched.n_tokens,
                                     seq->n_prompt, n, &d->payload, &d->rows[n], &d->features);
        if (s) return s;
        n++;
    }
    TD_ASSERT(n <= n_rows);
    for (; n < n_rows; n++) td_sample_pack_padding(&d->rows[n]);
    d->n_rows = n_rows;
    *ret_tail = (struct td_forward_tail){.issue = issue, .ctx = d, .shape = d->features};
    return TD_OK;
}

td_status td_engine_device_sample_take(const struct td_engine_device *d, int32_t row,
                                       struct td_sampled *ret_sampled)
{
    return td_sample_unpack(&d->results[row], ret_sampled);
}
