/* status_json.c - see status_json.h. */
#include "router/http/status_json.h"

static json_t *model_json(const Tandem__V1__ModelStatus *m)
{
    json_t *aliases = json_array();
    for (size_t i = 0; i < m->n_aliases; i++)
        json_array_append_new(aliases, json_string(m->aliases[i]));
    json_t *classes = json_array();
    for (size_t i = 0; i < m->n_classes; i++)
        json_array_append_new(classes, json_pack("{s:s, s:I, s:I}", "name", m->classes[i]->name,
                                                 "judged", (json_int_t)m->classes[i]->judged,
                                                 "good", (json_int_t)m->classes[i]->good));
    return json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:s, s:I, s:I, s:I, "
                     "s:f, s:f, s:f, s:f, s:o}",
                     "name", m->name, "aliases", aliases, "queued", (json_int_t)m->queued, "live",
                     (json_int_t)m->live, "finished", (json_int_t)m->finished, "failed",
                     (json_int_t)m->failed, "failovers", (json_int_t)m->failovers, "refused",
                     (json_int_t)m->refused, "arrival_rate", m->arrival_rate, "judged",
                     (json_int_t)m->judged, "good", (json_int_t)m->good, "bound", m->bound,
                     "want_prefill", (json_int_t)m->want_prefill, "want_decode",
                     (json_int_t)m->want_decode, "max_model_len", (json_int_t)m->max_model_len,
                     "ttft_p50_ms", m->ttft_p50_ms, "ttft_p99_ms", m->ttft_p99_ms, "tpot_p50_ms",
                     m->tpot_p50_ms, "tpot_p99_ms", m->tpot_p99_ms, "classes", classes);
}

static json_t *worker_json(const Tandem__V1__WorkerStatus *w)
{
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:I, s:I, s:I, s:I, s:I, "
        "s:I, s:I, s:s, s:s, s:I, s:s}",
        "name", w->name, "role", w->role, "address", w->address, "state", w->state, "kv_blocks",
        (json_int_t)w->kv_blocks, "kv_blocks_held", (json_int_t)w->kv_blocks_held,
        "kv_blocks_cached", (json_int_t)w->kv_blocks_cached, "block_size",
        (json_int_t)w->block_size, "running", (json_int_t)w->running, "waiting",
        (json_int_t)w->waiting, "prefill_tokens_per_s", w->prefill_tokens_per_s,
        "decode_tokens_per_s", w->decode_tokens_per_s, "snapshot_age_ms",
        (json_int_t)w->snapshot_age_ms, "assigned", (json_int_t)w->assigned, "kv_bytes_sent",
        (json_int_t)w->kv_bytes_sent, "kv_bytes_received", (json_int_t)w->kv_bytes_received, "pid",
        (json_int_t)w->pid, "transfers", (json_int_t)w->transfers, "tp", (json_int_t)w->tp, "model",
        w->model, "kv_dtype", w->kv_dtype, "kv_bytes_per_token", (json_int_t)w->kv_bytes_per_token,
        "kernels", w->kernels);
}

json_t *status_json(const Tandem__V1__StatusResponse *s)
{
    json_t *workers = json_array();
    for (size_t i = 0; i < s->n_workers; i++)
        json_array_append_new(workers, worker_json(s->workers[i]));
    json_t *models = json_array();
    for (size_t i = 0; i < s->n_models; i++)
        json_array_append_new(models, model_json(s->models[i]));
    json_t *refused = json_array();
    for (size_t i = 0; i < s->n_refused_workers; i++) {
        const Tandem__V1__RefusedWorker *w = s->refused_workers[i];
        json_array_append_new(refused, json_pack("{s:s, s:I, s:s, s:I, s:I, s:b}", "name", w->name,
                                                 "pid", (json_int_t)w->pid, "reason", w->reason,
                                                 "times", (json_int_t)w->times, "age_ms",
                                                 (json_int_t)w->age_ms, "proved", w->proved));
    }
    return json_pack(
        "{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:f, s:I, s:f, s:b, s:o, "
        "s:o, s:o}",
        "model", s->model, "mode", s->mode, "policy", s->policy, "uptime_ms",
        (json_int_t)s->uptime_ms, "queued", (json_int_t)s->queued, "live", (json_int_t)s->live,
        "finished", (json_int_t)s->finished, "failed", (json_int_t)s->failed, "failovers",
        (json_int_t)s->failovers, "bound", s->bound, "want_prefill", (json_int_t)s->want_prefill,
        "want_decode", (json_int_t)s->want_decode, "arrival_rate", s->arrival_rate, "refused",
        (json_int_t)s->refused, "attainment", s->attainment, "withheld", s->withheld, "workers",
        workers, "models", models, "refused_workers", refused);
}
