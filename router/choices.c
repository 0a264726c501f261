/* choices.c - several prompts, and several choices of each, as one call of a client.
 *
 * Each choice is a request of its own, whose client is this file; what it sends goes on to the real
 * client with the number of its choice. Both doors use it.
 *
 *   choices 1.. of a prompt wait until the first has its first token: its prefix blocks are in a
 *   cache by then, so the prompt is computed once (a prompt shorter than a block is not waited for)
 *
 *   one choice fails -> the call ends so, the others are cancelled; all end -> the call ends OK
 *
 * With best_of above n every message is kept until all choices have ended; then those with the
 * highest mean logprob are sent.
 *
 * A choice can send and end inside an action of the core, where no event may be applied: what
 * follows from that (the others begin, the others are cancelled) is posted to the loop.
 * Loop thread. */
#include <stdlib.h>
#include <string.h>

#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/rpc/rpc_status.h"
#include "router/router.h"

#define MAX_KEPT_BYTES (64 << 20) /* of one call with best_of, packed */

struct kept {
    struct kept *next;
    size_t n_bytes;
    uint8_t bytes[];
};

struct choice {
    struct choices *all;
    struct request_state *request; /* NULL: it is over */
    uint32_t at;                   /* among all of the call */
    bool begun, waits;             /* first token sent; not started */
    double logprob;                /* sum of its tokens' */
    uint64_t n_tokens;
    struct kept *first, *last;
};

struct choices {
    struct client_work work;
    struct router *router;
    struct served_model *model;
    struct router_client client;
    unsigned n_holders;           /* requests, posts, and whoever works on it */
    uint32_t n, n_made, n_ended;  /* choices in all; of each prompt; that have ended OK */
    uint32_t n_sent;              /* of each prompt; below n_made: the best of them */
    bool attached, over;          /* over: the client has its answer, or is gone */
    bool want_ids, want_logprobs; /* by the client, not for best_of alone */
    size_t n_kept_bytes;
    char ledger[1024]; /* of choice 0 */
    struct choice choice[];
};

static void drop(struct choices *cs)
{
    if (--cs->n_holders) return;
    for (uint32_t i = 0; i < cs->n; i++)
        for (struct kept *k = cs->choice[i].first, *next; k; k = next) {
            next = k->next;
            free(k);
        }
    free(cs);
}

static void cancel_all(struct choices *cs)
{
    cs->over = true;
    cs->n_holders++;
    for (uint32_t i = 0; i < cs->n; i++)
        if (cs->choice[i].request) inference_cancel(cs->router, &cs->choice[i].request->work);
    drop(cs);
}

static void on_cancel(struct router *r, struct client_work *w)
{
    (void)r;
    cancel_all((struct choices *)w);
}

static void on_caught_up(struct router *r, struct client_work *w)
{
    struct choices *cs = (struct choices *)w;
    for (uint32_t i = 0; i < cs->n && !cs->over; i++)
        if (cs->choice[i].request) inference_caught_up(r, &cs->choice[i].request->work);
}

/* Starts what waits for a first token that is there now. */
static void start_waiting(struct choices *cs)
{
    for (uint32_t i = 0; i < cs->n && !cs->over; i++) {
        struct choice *c = &cs->choice[i];
        if (!c->waits || !cs->choice[i - i % cs->n_made].begun) continue;
        c->waits = false;
        inference_start(cs->router, c->request);
    }
}

static void go_on(void *arg)
{
    struct choices *cs = arg;
    if (cs->over)
        cancel_all(cs);
    else
        start_waiting(cs);
    drop(cs);
}

static void post(struct choices *cs)
{
    cs->n_holders++;
    td_rpc_loop_post(cs->router->loop, go_on, cs);
}

static void give_back(struct choices *cs)
{
    for (uint32_t i = 0; i < cs->n; i++)
        if (cs->choice[i].request) request_give_back(cs->choice[i].request);
}

static void end(struct choices *cs, enum td_code code, const char *details,
                const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    cs->over = true;
    if (code == TD_CODE_RESOURCE_EXHAUSTED) give_back(cs);
    cs->client.ops->finish(cs->client.call, code, details, trailing, n_trailing);
    if (code != TD_CODE_OK) post(cs);
}

/* ---- the best of them ------------------------------------------------------------------------ */

static void keep(struct choice *c, Tandem__V1__GenerateResponse m)
{
    struct choices *cs = c->all;
    for (size_t i = 0; i < m.n_logprobs; i++) c->logprob += (double)m.logprobs[i]->logprob;
    c->n_tokens += m.n_logprobs;
    if (!cs->want_logprobs) m.n_logprobs = 0;
    if (!cs->want_logprobs && !cs->want_ids) m.n_token_ids = 0;
    size_t n = protobuf_c_message_get_packed_size(&m.base);
    struct kept *k = NULL;
    if (cs->n_kept_bytes + sizeof *k + n <= MAX_KEPT_BYTES) k = malloc(sizeof *k + n);
    if (!k) {
        struct td_err err = {0};
        td_fail(&err, TD_ERR_AGAIN, "the choices of best_of have more than %d bytes",
                MAX_KEPT_BYTES);
        end(cs, TD_CODE_RESOURCE_EXHAUSTED, err.msg, NULL, 0);
        return;
    }
    cs->n_kept_bytes += sizeof *k + n;
    k->next = NULL;
    k->n_bytes = n;
    protobuf_c_message_pack(&m.base, k->bytes);
    if (c->last)
        c->last->next = k;
    else
        c->first = k;
    c->last = k;
}

static double mean_logprob(const struct choice *c)
{
    return c->n_tokens ? c->logprob / (double)c->n_tokens : 0;
}

/* Of one prompt: better choices first, equal ones in their order. */
static int compare_choices(const void *a, const void *b)
{
    const struct choice *const x = *(struct choice *const *)a, *const y =
                                                                   *(struct choice *const *)b;
    double p = mean_logprob(x), q = mean_logprob(y);
    return p > q ? -1 : p < q ? 1 : x->at < y->at ? -1 : 1;
}

static void send_best(struct choices *cs)
{
    struct choice *order[ROUTER_MAX_CHOICES];
    for (uint32_t from = 0, to = 0; from < cs->n; from += cs->n_made) {
        for (uint32_t i = 0; i < cs->n_made; i++) order[i] = &cs->choice[from + i];
        qsort(order, cs->n_made, sizeof *order, compare_choices);
        for (uint32_t i = 0; i < cs->n_sent; i++, to++)
            for (const struct kept *k = order[i]->first; k; k = k->next) {
                Tandem__V1__GenerateResponse *m =
                    tandem__v1__generate_response__unpack(NULL, k->n_bytes, k->bytes);
                TD_ASSERT(m); /* it was packed here */
                m->choice = to;
                cs->client.ops->send(cs->client.call, &m->base);
                tandem__v1__generate_response__free_unpacked(m, NULL);
            }
    }
}

/* ---- this file as the client of each choice -------------------------------------------------- */

/* Its first token is there: the prompt is computed. */
static void begin(struct choice *c)
{
    if (!c->begun && c->at % c->all->n_made == 0) post(c->all);
    c->begun = true;
}

static void on_send(void *call, const ProtobufCMessage *message)
{
    struct choice *c = call;
    struct choices *cs = c->all;
    if (cs->over) return;
    Tandem__V1__GenerateResponse m = *(const Tandem__V1__GenerateResponse *)message;
    m.choice = c->at;
    if (m.n_prompt_logprobs) { /* of the prompt, and not the choice's beginning */
        cs->client.ops->send(cs->client.call, &m.base);
        return;
    }
    if (cs->n_sent < cs->n_made)
        keep(c, m);
    else
        cs->client.ops->send(cs->client.call, &m.base);
    begin(c);
}

static void on_finish(void *call, enum td_code code, const char *details,
                      const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    struct choice *c = call;
    struct choices *cs = c->all;
    if (cs->over) return;
    if (code != TD_CODE_OK) {
        end(cs, code, details, trailing, n_trailing);
        return;
    }
    begin(c); /* the client may have had all of its messages */
    if (c->at == 0 && n_trailing) snprintf(cs->ledger, sizeof cs->ledger, "%s", trailing[0].value);
    if (++cs->n_ended < cs->n) return;
    if (cs->n_sent < cs->n_made) send_best(cs);
    struct td_rpc_metadata md = {"tandem-ledger", cs->ledger};
    end(cs, TD_CODE_OK, NULL, &md, 1);
}

static bool on_is_behind(void *call)
{
    const struct choices *cs = ((struct choice *)call)->all;
    if (cs->n_sent < cs->n_made || !cs->client.ops->is_behind) return false;
    return cs->client.ops->is_behind(cs->client.call);
}

static const char *on_metadata(void *call, const char *name)
{
    const struct router_client *client = &((struct choice *)call)->all->client;
    return client->ops->metadata(client->call, name);
}

static const char *on_peer(void *call)
{
    const struct router_client *client = &((struct choice *)call)->all->client;
    return client->ops->peer(client->call);
}

static uint64_t on_remaining_ms(void *call)
{
    const struct router_client *client = &((struct choice *)call)->all->client;
    return client->ops->remaining_ms(client->call);
}

static void on_attach(void *call, struct client_work *w)
{
    struct choice *c = call;
    struct choices *cs = c->all;
    c->request = (struct request_state *)w;
    if (w) {
        cs->n_holders++;
        return;
    }
    bool any = false;
    for (uint32_t i = 0; i < cs->n && !any; i++) any = cs->choice[i].request != NULL;
    if (!any && cs->attached) {
        cs->attached = false;
        cs->client.ops->attach(cs->client.call, NULL);
    }
    drop(cs);
}

#define CHOICE_OPS(all)                                                                            \
    {                                                                                              \
        .send = on_send, .is_behind = on_is_behind, .finish = on_finish, .metadata = on_metadata,  \
        .peer = on_peer, .remaining_ms = on_remaining_ms, .attach = on_attach, .takes_all = all,   \
    }
static const struct router_client_ops choice_ops[] = {CHOICE_OPS(false), CHOICE_OPS(true)};

/* ---- begin ----------------------------------------------------------------------------------- */

td_status choices_count(const struct router *r, const Tandem__V1__GenerateRequest *const *in,
                        size_t n_in, size_t *ret_n, struct td_err *err)
{
    const Tandem__V1__Sampling *s = in[0]->sampling;
    uint32_t n = s && s->n ? s->n : 1, best_of = s && s->best_of ? s->best_of : n;
    size_t limit = (size_t)r->cfg.core.max_requests;
    if (limit > ROUTER_MAX_ALL_CHOICES) limit = ROUTER_MAX_ALL_CHOICES;
    if (n > ROUTER_MAX_CHOICES)
        return td_fail(err, TD_ERR_INVALID, "sampling.n is %u, must be 1..%d", n,
                       ROUTER_MAX_CHOICES);
    if (best_of < n || best_of > ROUTER_MAX_CHOICES)
        return td_fail(err, TD_ERR_INVALID, "sampling.best_of is %u, must be sampling.n, %u, ..%d",
                       best_of, n, ROUTER_MAX_CHOICES);
    if (best_of > n && s->has_prompt_logprobs_case)
        return td_fail(err, TD_ERR_INVALID,
                       "sampling.best_of is %u beside prompt_logprobs, must be sampling.n, %u",
                       best_of, n);
    if (n > 1 && s->has_prompt_logprobs_case && in[0]->stop && in[0]->stop->has_max_tokens_case &&
        !in[0]->stop->max_tokens)
        return td_fail(err, TD_ERR_INVALID, "sampling.n is %u beside stop.max_tokens 0, must be 1",
                       n);
    if (n_in > limit || n_in * best_of > limit)
        return td_fail(err, TD_ERR_INVALID,
                       "prompt has %zu prompts of %u choices, limit %zu in all", n_in, best_of,
                       limit);
    if (best_of > n && in[0]->resume_from)
        return td_fail(err, TD_ERR_INVALID,
                       "resume_from is set beside sampling.best_of %u, must be sampling.n, %u: "
                       "nothing is sent before all choices are there",
                       best_of, n);
    for (size_t i = 0; i < n_in; i++)
        if (in[i]->resume_from && in[i]->resume_from->n_choices > n)
            return td_fail(err, TD_ERR_INVALID, "resume_from has %zu choices, limit %u, sampling.n",
                           in[i]->resume_from->n_choices, n);
    *ret_n = n_in * best_of;
    return TD_OK;
}

/* All choices of one prompt, each with a seed of its own. */
static td_status take_prompt(struct choices *cs, uint32_t from,
                             const Tandem__V1__GenerateRequest *in, uint64_t seed,
                             const struct router_tenant *who, const struct router_prompt *prompt,
                             uint64_t now_ns, struct td_err *err)
{
    static const Tandem__V1__Sampling none = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__GenerateRequest one = *in;
    Tandem__V1__Sampling sampling = in->sampling ? *in->sampling : none;
    uint32_t block = cs->router->cfg.core.prefix_entries ? fleet_block_size(cs->model) : 0;
    bool scores = sampling.has_prompt_logprobs_case;
    one.sampling = &sampling;
    if (cs->n_sent < cs->n_made && !sampling.has_logprobs_case) {
        sampling.has_logprobs_case = TANDEM__V1__SAMPLING__HAS_LOGPROBS_LOGPROBS;
        sampling.logprobs = 0;
    }
    sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    Tandem__V1__ResumeFrom resume = TANDEM__V1__RESUME_FROM__INIT;
    if (in->resume_from) resume = *in->resume_from;
    if (in->resume_from) one.resume_from = &resume;
    for (uint32_t i = 0; i < cs->n_made; i++) {
        struct choice *c = &cs->choice[from + i];
        struct request_state *q = NULL;
        sampling.seed = resume.seed = seed + i;
        resume.n_choices = in->resume_from && i < in->resume_from->n_choices;
        if (resume.n_choices) resume.choices = &in->resume_from->choices[i];
        if (i > 0) sampling.has_prompt_logprobs_case = 0; /* the first choice's are all choices' */
        struct router_prompt mine = *prompt;
        mine.choice = i;
        td_status s =
            inference_take(cs->router, cs->model,
                           (struct router_client){&choice_ops[cs->client.ops->takes_all], c}, &one,
                           who, &mine, now_ns, &q, err);
        if (s) return s;
        c->waits = i > 0 && (scores || (block && prompt->list.n >= block));
    }
    return TD_OK;
}

static td_status take_all(struct choices *cs, const Tandem__V1__GenerateRequest *const *in,
                          size_t n_in, const struct router_tenant *who, uint64_t now_ns,
                          struct td_err *err)
{
    const Tandem__V1__Sampling *sampling = in[0]->sampling;
    const Tandem__V1__ResumeFrom *resume = in[0]->resume_from;
    bool has_seed = sampling && sampling->has_seed_case;
    uint64_t seed = resume ? resume->seed : has_seed ? sampling->seed : td_random_u64();
    td_status s = TD_OK;
    if (has_seed && seed != sampling->seed)
        return td_fail(err, TD_ERR_INVALID, "resume_from.seed is %llu, beside sampling.seed %llu",
                       (unsigned long long)seed, (unsigned long long)sampling->seed);
    struct router_prompt *prompts = calloc(n_in, sizeof *prompts);
    if (!prompts) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu prompts", n_in);
    /* All prompts are read before anything begins: a wrong one ends the call. */
    for (size_t i = 0; i < n_in && !s; i++) {
        s = inference_prompt(cs->model, in[i], who, &prompts[i], err);
        if (s && n_in > 1) td_err_prefix(err, "prompt[%zu]", i);
    }
    for (size_t i = 0; i < n_in && !s; i++)
        s = take_prompt(cs, (uint32_t)i * cs->n_made, in[i], seed, who, &prompts[i], now_ns, err);
    for (size_t i = 0; i < n_in; i++) td_token_list_free(&prompts[i].list);
    free(prompts);
    return s;
}

td_status choices_generate(struct router *r, struct served_model *m, struct router_client client,
                           const Tandem__V1__GenerateRequest *const *in, size_t n_in,
                           const struct router_tenant *who, uint64_t now_ns, struct td_err *err)
{
    const Tandem__V1__Sampling *sampling = in[0]->sampling;
    size_t n = 0;
    td_status s = choices_count(r, in, n_in, &n, err);
    if (s) return s;
    struct choices *cs = calloc(1, sizeof *cs + n * sizeof cs->choice[0]);
    if (!cs) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu choices", n);
    cs->work.cancel = on_cancel;
    cs->work.caught_up = on_caught_up;
    cs->router = r;
    cs->model = m;
    cs->client = client;
    cs->n_holders = 1;
    cs->n = (uint32_t)n;
    cs->n_made = (uint32_t)(n / n_in);
    cs->n_sent = sampling && sampling->n ? sampling->n : 1;
    cs->want_ids = in[0]->return_token_ids;
    cs->want_logprobs = sampling && sampling->has_logprobs_case;
    for (uint32_t i = 0; i < cs->n; i++) {
        cs->choice[i].all = cs;
        cs->choice[i].at = i;
    }
    s = take_all(cs, in, n_in, who, now_ns, err);
    if (s) {
        give_back(cs);
        cancel_all(cs);
    } else {
        cs->attached = true;
        client.ops->attach(client.call, &cs->work);
        for (uint32_t i = 0; i < cs->n && !cs->over; i++)
            if (!cs->choice[i].waits) inference_start(r, cs->choice[i].request);
    }
    drop(cs);
    return s;
}
