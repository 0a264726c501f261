/* generate.c - `tandem generate`: streams a completion to stdout; and generate.h, for chat. The
 * model's reasoning goes to stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/generate.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/base/say.h"
#include "common/text/grammar.h"

#define OFF(f) GENERATE_OFF(f)
// clang-format off
static const struct td_option generate_options[] = {
    CLI_SERVER_OPTIONS(struct generate_config, at),
    GENERATE_SAMPLING_OPTIONS,
    {"stats", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(stats),
     "print TTFT, TPOT and the stage ledger afterwards"},
    {"prompt", TD_OPT_STR, "", 0, 0, NULL, OFF(prompt),
     "text to continue; default: the argument, or stdin"},
    {"ids", TD_OPT_STR, "", 0, 0, NULL, OFF(ids),
     "prompt as token ids, separated by commas, instead of text"},
    {"chat", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(chat),
     "send the prompt as a user's chat message"},
    {"system", TD_OPT_STR, "", 0, 0, NULL, OFF(system), "with --chat: system message"},
    {"ignore_eos", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(ignore_eos),
     "go on after the end-of-sequence token"},
    {"json_object", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(json_object),
     "the output is a JSON object"},
    {"json_schema", TD_OPT_STR, "", 0, 0, NULL, OFF(json_schema),
     "file with a JSON schema: the output is JSON that is valid by it"},
    {"regex", TD_OPT_STR, "", 0, 0, NULL, OFF(regex),
     "regular expression that the whole output matches"},
    {"choice", TD_OPT_STR, "", 0, 0, NULL, OFF(choice),
     "the output is one of these texts, separated by |"},
    {"grammar", TD_OPT_STR, "", 0, 0, NULL, OFF(grammar),
     "file with rules in GBNF's notation: the output is what the rule root says"},
    {"logprobs", TD_OPT_I64, "-1", -1, 20, NULL, OFF(logprobs),
     "with --token-ids: log-probabilities of the n best"},
    {"token_ids", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(token_ids),
     "print token ids instead of text"},
    {"no_special", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(no_special),
     "do not add BOS to the prompt"},
    {0},
};
// clang-format on

static void keep_text(struct generate_stream *s, const ProtobufCBinaryData *text)
{
    if (s->n_text + text->len + 1 > s->capacity) {
        size_t capacity = (s->n_text + text->len + 1) * 2;
        char *grown = realloc(s->text, capacity);
        if (!grown) return;
        s->text = grown;
        s->capacity = capacity;
    }
    memcpy(s->text + s->n_text, text->data, text->len);
    s->n_text += text->len;
}

static void print_ids(struct generate_stream *s, const Tandem__V1__GenerateResponse *m)
{
    char text[64];
    for (size_t i = 0; i < m->n_token_ids; i++) {
        int n = snprintf(text, sizeof text, s->any ? " %d" : "%d", m->token_ids[i]);
        if (i < m->n_logprobs)
            n += snprintf(text + n, sizeof text - (size_t)n, "(%.4f)",
                          (double)m->logprobs[i]->logprob);
        cli_wrap_text(&s->out, text, (size_t)n);
        s->any = true;
    }
}

/* stderr may be the same terminal as stdout, and the same line of it. */
static void begin_thoughts(struct generate_stream *s)
{
    cli_wrap_begin(&s->thoughts, stderr, td_terminal_columns(stderr), s->out.at);
    cli_wrap_text(&s->thoughts, "[reasoning] ", 12);
}

static void end_thoughts(struct generate_stream *s)
{
    cli_wrap_end(&s->thoughts);
    if (s->thoughts.columns) s->out.at = 0;
}

static void on_response(const ProtobufCMessage *msg, void *ctx)
{
    struct generate_stream *s = ctx;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)msg;
    uint64_t now = td_now_ns();
    if (!s->first_ns) s->first_ns = now;
    s->last_ns = now;
    if (m->text.len) keep_text(s, &m->text);
    if (s->token_ids) {
        print_ids(s, m);
    } else if (m->reasoning.len) {
        if (!s->reasoning) begin_thoughts(s);
        s->reasoning = true;
        cli_wrap_text(&s->thoughts, m->reasoning.data, m->reasoning.len);
    } else if (m->text.len) {
        if (s->reasoning) end_thoughts(s);
        s->reasoning = false;
        cli_wrap_text(&s->out, m->text.data, m->text.len);
    }
    fflush(stdout);
    if (m->finish_reason) { /* keep the last message: pack and unpack is a deep copy */
        size_t n = tandem__v1__generate_response__get_packed_size(m);
        uint8_t *bytes = malloc(n ? n : 1);
        if (!bytes) return;
        tandem__v1__generate_response__pack(m, bytes);
        s->last = tandem__v1__generate_response__unpack(NULL, n, bytes);
        free(bytes);
    }
}

static double ms(uint64_t us) { return (double)us / 1e3; }

void generate_print_ledger(const struct generate_stream *s)
{
    const Tandem__V1__GenerateResponse *m = s->last;
    if (!m || !m->ledger || !m->usage) return;
    const Tandem__V1__Ledger *l = m->ledger;
    uint32_t n = m->usage->output_tokens;
    double tpot = n > 1 ? ((double)l->e2e_us - (double)l->ttft_us) / 1e3 / (n - 1) : 0;
    td_say(stderr, 4,
           "\n--- %u prompt tokens (%u cached), %u output tokens, finish %s, seed %llu\n"
           "TTFT  %9.3f ms at the router (client saw %.3f ms)\nTPOT  %9.3f ms\nE2E   %9.3f ms\n"
           "stage ledger of TTFT (adds up):\n"
           "  router queue   %9.3f ms\n  reserve        %9.3f ms\n  prefill queue  %9.3f ms\n  "
           "prefill        %9.3f ms\n  rpc            %9.3f ms\n"
           "then:\n  KV transfer    %9.3f ms   %llu bytes over %s, %.3f ms not hidden\n  decode "
           "queue   %9.3f ms\n  first step     %9.3f ms\n",
           m->usage->prompt_tokens, m->usage->cached_tokens, n,
           m->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_STOP ? "stop" : "length",
           (unsigned long long)m->seed, ms(l->ttft_us), (double)(s->first_ns - s->start_ns) / 1e6,
           tpot, ms(l->e2e_us), ms(l->router_queue_us), ms(l->reserve_us), ms(l->prefill_queue_us),
           ms(l->prefill_us), ms(l->rpc_us), ms(l->transfer_us),
           (unsigned long long)l->transfer_bytes, l->transfer_path, ms(l->transfer_exposed_us),
           ms(l->decode_queue_us), ms(l->first_step_us));
    td_say(stderr, 2, "prefill on %s, decode on %s (%s), %u preemptions, %u failovers\n",
           l->prefill_worker, l->decode_worker[0] ? l->decode_worker : "none", l->mode,
           l->preemptions, l->failovers);
}

void generate_print_line(const struct generate_stream *s)
{
    const Tandem__V1__GenerateResponse *m = s->last;
    if (!m || !m->ledger || !m->usage) return;
    const Tandem__V1__Ledger *l = m->ledger;
    uint32_t n = m->usage->output_tokens;
    double decode_ms = ms(l->e2e_us) - ms(l->ttft_us);
    char tpot[64] = "";
    if (n > 1 && decode_ms > 0)
        snprintf(tpot, sizeof tpot, ", TPOT %.2f ms, %.1f tokens/s", decode_ms / (n - 1),
                 1e3 * (n - 1) / decode_ms);
    td_say(stderr, 1, "[%u + %u tokens, TTFT %.1f ms%s]\n", m->usage->prompt_tokens, n,
           ms(l->ttft_us), tpot);
}

/* What the output must be, and what its texts lie in. */
struct guide {
    Tandem__V1__GuidedOutput m;
    Tandem__V1__GuidedChoice choice;
    char *file;
};

static void guide_free(struct guide *g)
{
    free(g->choice.texts);
    free(g->file);
}

static ProtobufCBinaryData bytes_of(const char *text, size_t n)
{
    return (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)text};
}

static td_status guide_choices(struct guide *g, const char *text, struct td_err *err)
{
    size_t n = 1;
    for (const char *p = text; *p; p++) n += *p == '|';
    g->choice.texts = calloc(n, sizeof *g->choice.texts);
    if (!g->choice.texts) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (;; text++) {
        size_t n_bytes = strcspn(text, "|");
        g->choice.texts[g->choice.n_texts++] = bytes_of(text, n_bytes);
        text += n_bytes;
        if (!*text) return TD_OK;
    }
}

/* Into *request, when one of the options is there. */
static td_status guide_fill(struct guide *g, const struct generate_config *c,
                            Tandem__V1__GenerateRequest *request, struct td_err *err)
{
    const char *file = c->json_schema[0] ? c->json_schema : c->grammar;
    size_t n_bytes = 0;
    int n = c->json_object + (c->json_schema[0] != 0) + (c->regex[0] != 0) + (c->choice[0] != 0) +
            (c->grammar[0] != 0);
    tandem__v1__guided_output__init(&g->m);
    tandem__v1__guided_choice__init(&g->choice);
    if (n == 0) return TD_OK;
    if (n > 1)
        return td_fail(err, TD_ERR_INVALID,
                       "give one of json_object, json_schema, regex, choice and grammar");
    td_status s = TD_OK;
    if (file[0]) s = td_file_read(file, TD_GRAMMAR_MAX_TEXT_BYTES, &g->file, &n_bytes, err);
    if (c->choice[0]) s = guide_choices(g, c->choice, err);
    if (s) return s;
    if (c->json_object) {
        g->m.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_OBJECT;
        g->m.json_object = true;
    } else if (c->json_schema[0]) {
        g->m.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_SCHEMA;
        g->m.json_schema = bytes_of(g->file, n_bytes);
    } else if (c->regex[0]) {
        g->m.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_REGEX;
        g->m.regex = bytes_of(c->regex, strlen(c->regex));
    } else if (c->choice[0]) {
        g->m.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_CHOICE;
        g->m.choice = &g->choice;
    } else {
        g->m.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_GRAMMAR;
        g->m.grammar = bytes_of(g->file, n_bytes);
    }
    request->guided = &g->m;
    return TD_OK;
}

void generate_request_init(struct generate_request *r, const struct generate_config *c)
{
    tandem__v1__generate_request__init(&r->m);
    tandem__v1__sampling__init(&r->sampling);
    tandem__v1__stop_conditions__init(&r->stop);
    r->m.model = (char *)(uintptr_t)c->model;
    r->m.sampling = &r->sampling;
    r->m.stop = &r->stop;
    r->m.return_token_ids = true; /* what goes on elsewhere begins with them */
    r->m.no_special_tokens = c->no_special;
    Tandem__V1__Sampling *s = &r->sampling;
    if (c->temperature >= 0)
        s->has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE,
        s->temperature = (float)c->temperature;
    if (c->top_k >= 0)
        s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K, s->top_k = (int32_t)c->top_k;
    if (c->top_p >= 0)
        s->has_top_p_case = TANDEM__V1__SAMPLING__HAS_TOP_P_TOP_P, s->top_p = (float)c->top_p;
    if (c->min_p >= 0)
        s->has_min_p_case = TANDEM__V1__SAMPLING__HAS_MIN_P_MIN_P, s->min_p = (float)c->min_p;
    if (c->repetition_penalty >= 0)
        s->has_repetition_penalty_case =
            TANDEM__V1__SAMPLING__HAS_REPETITION_PENALTY_REPETITION_PENALTY,
        s->repetition_penalty = (float)c->repetition_penalty;
    if (c->seed >= 0)
        s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED, s->seed = (uint64_t)c->seed;
    if (c->logprobs >= 0)
        s->has_logprobs_case = TANDEM__V1__SAMPLING__HAS_LOGPROBS_LOGPROBS,
        s->logprobs = (int32_t)c->logprobs;
    s->presence_penalty = (float)c->presence_penalty;
    s->frequency_penalty = (float)c->frequency_penalty;
    if (c->max_tokens >= 0)
        r->stop.has_max_tokens_case = TANDEM__V1__STOP_CONDITIONS__HAS_MAX_TOKENS_MAX_TOKENS,
        r->stop.max_tokens = c->max_tokens;
    r->stop.ignore_eos = c->ignore_eos;
    if (c->stop[0]) {
        r->stop_string = (ProtobufCBinaryData){strlen(c->stop), (uint8_t *)(uintptr_t)c->stop};
        r->stop.n_stop = 1;
        r->stop.stop = &r->stop_string;
    }
}

void generate_run(struct cli_client *client, const char *command, const struct generate_config *c,
                  struct generate_request *r, struct generate_stream *s,
                  struct cli_result *ret_result)
{
    s->start_ns = td_now_ns();
    s->token_ids = c->token_ids;
    cli_wrap_begin(&s->out, stdout, td_terminal_columns(stdout), s->at);
    memset(ret_result, 0, sizeof *ret_result);
    cli_generate_call(client, command, &r->m, c->timeout_ms, c->retry_ms, on_response, s,
                      ret_result);
    cli_wrap_end(&s->out);
    fflush(stdout);
}

void generate_stream_free(struct generate_stream *s)
{
    free(s->text);
    if (s->last) tandem__v1__generate_response__free_unpacked(s->last, NULL);
    memset(s, 0, sizeof *s);
}

static td_status parse_ids(const char *text, Tandem__V1__TokenIds *ids, struct td_err *err)
{
    ids->ids = malloc((strlen(text) + 1) * sizeof *ids->ids);
    if (!ids->ids) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (const char *p = text; *p;) {
        char *after;
        long id = strtol(p, &after, 10);
        if (after == p || id < INT32_MIN || id > INT32_MAX || (*after && *after != ','))
            return td_fail(err, TD_ERR_INVALID, "ids near \"%.20s\": not a number", p);
        ids->ids[ids->n_ids++] = (int32_t)id;
        p = *after ? after + 1 : after;
    }
    return TD_OK;
}

/* The input of one request, as the message points to it. */
struct input {
    Tandem__V1__ChatMessage system, user, *messages[2];
    Tandem__V1__Chat chat;
    Tandem__V1__TokenIds ids; /* ids.ids: owned */
};

/* Token ids, a chat or a prompt, as the options say; `in` must outlive the message. */
static td_status set_input(const struct generate_config *c, ProtobufCBinaryData text,
                           struct input *in, Tandem__V1__GenerateRequest *m, struct td_err *err)
{
    tandem__v1__chat_message__init(&in->system);
    tandem__v1__chat_message__init(&in->user);
    tandem__v1__chat__init(&in->chat);
    tandem__v1__token_ids__init(&in->ids);
    if (c->ids[0]) {
        td_status s = parse_ids(c->ids, &in->ids, err);
        m->input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        m->token_ids = &in->ids;
        return s;
    }
    if (!c->chat) {
        m->input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        m->prompt = text;
        return TD_OK;
    }
    if (c->system[0]) {
        in->system.role = (char *)"system";
        in->system.content =
            (ProtobufCBinaryData){strlen(c->system), (uint8_t *)(uintptr_t)c->system};
        in->messages[in->chat.n_messages++] = &in->system;
    }
    in->user.role = (char *)"user";
    in->user.content = text;
    in->messages[in->chat.n_messages++] = &in->user;
    in->chat.messages = in->messages;
    m->input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT;
    m->chat = &in->chat;
    return TD_OK;
}

int cli_generate(int argc, char **argv)
{
    struct generate_config c = {0};
    struct td_err err = {0};
    const char *positional[1] = {NULL};
    size_t n_positional = 0;
    if (td_options_load(generate_options, &c, "tandem generate",
                        "Streams the completion of a prompt: tandem generate [options] [PROMPT]",
                        argc, argv, positional, 1, &n_positional, &err))
        return td_die("tandem generate", &err);
    char *owned = NULL;
    size_t owned_bytes = 0;
    bool from_stdin = !c.prompt[0] && !n_positional && !c.ids[0];
    if (from_stdin && cli_read_all(stdin, &owned, &owned_bytes, &err))
        return td_die("tandem generate", &err);
    const char *prompt = c.prompt[0]    ? c.prompt
                         : n_positional ? positional[0]
                         : from_stdin   ? owned
                                        : "";
    struct generate_request r;
    generate_request_init(&r, &c);
    ProtobufCBinaryData text = {from_stdin ? owned_bytes : strlen(prompt),
                                (uint8_t *)(uintptr_t)prompt};
    struct input input;
    if (set_input(&c, text, &input, &r.m, &err)) {
        free(input.ids.ids);
        return td_die("tandem generate", &err);
    }
    struct cli_client client;
    struct guide guide = {0};
    int rc;
    if (guide_fill(&guide, &c, &r.m, &err) || cli_client_open(&client, &c.at, &err)) {
        rc = td_die("tandem generate", &err);
    } else {
        struct generate_stream s = {0};
        struct cli_result res;
        generate_run(&client, "generate", &c, &r, &s, &res);
        rc = res.code == TD_CODE_OK ? 0 : cli_complain("generate", &c.at, &res);
        if (!rc && c.stats) generate_print_ledger(&s);
        generate_stream_free(&s);
        cli_client_close(&client);
    }
    guide_free(&guide);
    free(owned);
    free(input.ids.ids);
    return rc;
}
