/* resume.c - a Generate call that goes on at another router when its own is lost.
 *
 *   call --OK, or an error that another router would give, too--> over
 *    ^ '--UNAVAILABLE--> wait, next server --resume_from--.
 *    '---------------------------------------------------'
 *
 * Tokens are a function of the request and its seed, so the next router gives what comes behind
 * those that are here (common/rpc/received.h). */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli/cli.h"
#include "common/base/clock.h"
#include "common/base/say.h"
#include "common/rpc/received.h"

struct resumable {
    struct td_received *received;
    bool is_lost; /* what came could not be kept */
    void (*on_message)(const ProtobufCMessage *msg, void *ctx);
    void *ctx;
};

static void on_message(const ProtobufCMessage *msg, void *ctx)
{
    struct resumable *a = ctx;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)msg;
    a->is_lost |= !td_received_take(a->received, m);
    a->on_message(msg, a->ctx);
}

/* False: the user wants the call to end. */
static bool wait_until(const struct cli_client *c, uint64_t until_ns)
{
    for (uint64_t now_ns = td_now_ns(); now_ns < until_ns; now_ns = td_now_ns()) {
        uint64_t at = until_ns - now_ns > 50 * TD_NS_PER_MS ? now_ns + 50 * TD_NS_PER_MS : until_ns;
        struct timespec t = {(time_t)(at / TD_NS_PER_S), (long)(at % TD_NS_PER_S)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
        if (c->is_interrupted && c->is_interrupted()) return false;
    }
    return true;
}

/* Tells of the lost server and of the next one. */
static void tell(struct cli_client *c, const char *command, const struct cli_result *r,
                 const struct resumable *a, uint64_t wait_ms)
{
    const char *lost = c->servers[c->at];
    c->at = (c->at + 1) % c->n_channels;
    c->channel = c->channels[c->at];
    td_say(stderr, 2,
           "\ntandem %s: %s: %s: %s\n  %u tokens are here; going on at %s in %.1f s (--retry-ms)\n",
           command, lost, cli_code_name(r->code), r->details, td_received_n_tokens(a->received),
           c->servers[c->at], (double)wait_ms / 1e3);
}

void cli_generate_call(struct cli_client *c, const char *command,
                       Tandem__V1__GenerateRequest *request, uint64_t deadline_ms,
                       uint64_t retry_ms,
                       void (*message_fn)(const ProtobufCMessage *msg, void *ctx), void *ctx,
                       struct cli_result *ret_result)
{
    struct resumable a = {.on_message = message_fn, .ctx = ctx};
    struct td_retry retry = {.budget_ms = retry_ms};
    uint64_t end_ns = deadline_ms ? td_deadline_after_ms(td_now_ns(), deadline_ms) : UINT64_MAX;
    a.received = td_received_create(request->sampling ? request->sampling->n : 1);
    TD_ASSERT(a.received); /* some KiB */
    for (;;) {
        uint64_t began_ns = td_now_ns(), left_ms = 0, wait_ms = 0;
        if (deadline_ms) left_ms = (end_ns - began_ns) / TD_NS_PER_MS + 1;
        cli_call(c, "/tandem.v1.Inference/Generate", &tandem__v1__generate_response__descriptor,
                 &request->base, left_ms, false, on_message, &a, ret_result);
        uint64_t now_ns = td_now_ns();
        if (ret_result->code != TD_CODE_UNAVAILABLE || a.is_lost) break;
        if (!td_retry_next(&retry, began_ns, now_ns, td_received_n(a.received), c->n_channels,
                           &wait_ms))
            break;
        uint64_t next_ns = td_deadline_after_ms(now_ns, wait_ms);
        if (next_ns >= end_ns) break;
        tell(c, command, ret_result, &a, wait_ms);
        td_received_resume(a.received, request);
        if (!wait_until(c, next_ns)) {
            ret_result->code = TD_CODE_CANCELLED;
            break;
        }
    }
    td_received_free(a.received);
}
