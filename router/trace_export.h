/* trace_export.h - spans of requests, sent to an OpenTelemetry receiver.
 *
 * A request is one span, and below it one for each stage of its ledger: they follow each other
 * without a gap and without an overlap, so their sum is the request's span, to the microsecond.
 * What overlaps with stages (the transfer, the decode worker's queue) is told as attributes.
 *
 * Source: OTLP 1.x over HTTP with JSON bodies (opentelemetry.io/docs/specs/otlp); ids in
 * hexadecimal digits.
 *
 * Threads: one thread of its own sends; push is for the router's loop thread. A push takes a
 * lock that nobody holds for longer than copying a record, allocates nothing and never waits for
 * the receiver: when the queue of TRACE_QUEUE requests is full, or a POST fails, the requests'
 * spans are dropped, counted (td_trace_dropped_total) and, a few times a second, logged
 * (trace_dropped). */
#ifndef TD_ROUTER_TRACE_EXPORT_H
#define TD_ROUTER_TRACE_EXPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/base/traceparent.h"

enum {
    TRACE_QUEUE = 1024, /* requests that wait: about 1.3 MiB */
    TRACE_BATCH = 64,   /* requests in one POST: about 300 KiB of JSON */
    TRACE_N_STAGES = 6, /* router_queue, reserve, prefill_queue, prefill, rpc, decode */
};

/* A request that has ended. */
struct trace_record {
    struct td_traceparent at;          /* the trace, and the caller's span */
    bool has_parent;                   /* at.parent_id is one */
    bool has_stages;                   /* it has come to its end: stage_us is filled */
    uint64_t begin_ns, e2e_us;         /* wall clock, since 1970; how long it took */
    uint64_t stage_us[TRACE_N_STAGES]; /* add up to e2e_us */
    uint64_t transfer_us, transfer_exposed_us, decode_queue_us, first_step_us, transfer_bytes;
    uint32_t n_prompt, n_output, failovers, preemptions, code; /* code: gRPC's, 0 = OK */
    char request_id[128], model[256], slo_class[32], transfer_path[16], prefill_worker[128],
        decode_worker[128];
};

struct trace_export;

/* url: http:// or https://, of the path that takes traces. Loads libcurl; starts the thread.
 * TD_ERR_INVALID (url), TD_ERR_UNSUPPORTED (no libcurl), TD_ERR_NOMEM. */
td_status trace_export_start(const char *url, struct trace_export **ret_export, struct td_err *err);
void trace_export_push(struct trace_export *x, const struct trace_record *record);
/* Sends what waits, for 2 s at most, and frees; a POST in flight has 1 s of them. NULL is fine. */
void trace_export_stop(struct trace_export *x);

/* The body of a POST with the spans of n records: JSON text that the caller frees, or NULL without
 * memory. */
char *trace_export_body(const struct trace_record *records, size_t n);

#endif
