/* generate.h - what `tandem generate` and `tandem chat` share: options, the request, and
 * its answer as it streams. */
#ifndef TD_CLI_GENERATE_H
#define TD_CLI_GENERATE_H

#include "cli/cli.h"
#include "cli/terminal.h"

struct generate_config {
    struct cli_server at;
    const char *prompt, *stop, *system, *model, *ids;
    const char *json_schema, *regex, *choice, *grammar;
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int64_t max_tokens, top_k, seed, logprobs;
    uint64_t timeout_ms, retry_ms;
    bool stats, chat, ignore_eos, token_ids, no_special, json_object;
};

#define GENERATE_OFF(f) offsetof(struct generate_config, f)
/* -1 = the model's default */
// clang-format off
#define GENERATE_SAMPLING_OPTIONS                                                          \
    {"model", TD_OPT_STR, "", 0, 0, NULL, GENERATE_OFF(model),                             \
     "model name; default the served one"},                                                \
    /* TANDEM_MODEL is where a model is */                                                 \
    TD_OPTION_VARIABLE("model_name", "model"),                                             \
    {"max_tokens", TD_OPT_I64, "-1", -1, 1 << 30, NULL, GENERATE_OFF(max_tokens),          \
     "output tokens; -1 = up to the context's end"},                                       \
    {"temperature", TD_OPT_F64, "-1", -1, 100, NULL, GENERATE_OFF(temperature),            \
     "0 = greedy; -1 = the model's default"},                                              \
    {"top_k", TD_OPT_I64, "-1", -1, 1 << 30, NULL, GENERATE_OFF(top_k),                    \
     "0 = off; -1 = default"},                                                             \
    {"top_p", TD_OPT_F64, "-1", -1, 1, NULL, GENERATE_OFF(top_p), "1 = off; -1 = default"}, \
    {"min_p", TD_OPT_F64, "-1", -1, 1, NULL, GENERATE_OFF(min_p), "0 = off; -1 = default"}, \
    {"repetition_penalty", TD_OPT_F64, "-1", -1, 100, NULL,                                \
     GENERATE_OFF(repetition_penalty), "1 = off; -1 = default"},                           \
    {"presence_penalty", TD_OPT_F64, "0", -2, 2, NULL, GENERATE_OFF(presence_penalty),     \
     "0 = off"},                                                                           \
    {"frequency_penalty", TD_OPT_F64, "0", -2, 2, NULL, GENERATE_OFF(frequency_penalty),   \
     "0 = off"},                                                                           \
    {"seed", TD_OPT_I64, "-1", -1, 9e18, NULL, GENERATE_OFF(seed),                         \
     "same seed, same answer; -1 = a fresh one"},                                          \
    {"stop", TD_OPT_STR, "", 0, 0, NULL, GENERATE_OFF(stop), "stop string"},               \
    {"timeout_ms", TD_OPT_U64, "0", 0, 86400000, NULL, GENERATE_OFF(timeout_ms),           \
     "deadline of the request; 0 = none"},                                                 \
    {"retry_ms", TD_OPT_U64, "30000", 0, 86400000, NULL, GENERATE_OFF(retry_ms),           \
     "a lost or unavailable router: go on at the next of --server, or at the same one, for " \
     "so long without a new token; 0 = give up at once"}
// clang-format on

struct generate_stream {
    bool token_ids, any;
    bool reasoning; /* what was written last, to stderr */
    unsigned at;    /* columns of stdout's line that are taken when the answer begins */
    struct cli_wrap out, thoughts;
    uint64_t start_ns, first_ns, last_ns;
    char *text; /* everything so far, for chat's history */
    size_t n_text, capacity;
    Tandem__V1__GenerateResponse *last; /* with the ledger; NULL: the call failed */
};

/* Storage of the sub-messages that point at options. */
struct generate_request {
    Tandem__V1__GenerateRequest m;
    Tandem__V1__Sampling sampling;
    Tandem__V1__StopConditions stop;
    ProtobufCBinaryData stop_string;
};

/* The request that the options ask for, without its input. Borrows c's texts. */
void generate_request_init(struct generate_request *r, const struct generate_config *c);

/* Makes the call and writes the answer: text to stdout, reasoning to stderr; on terminals words
 * stay whole at the edge. Blocks until the call is over. The line is ended. The stream is zeroed,
 * but for `at`; the caller frees it. Errors are not told: cli_complain. */
void generate_run(struct cli_client *client, const char *command, const struct generate_config *c,
                  struct generate_request *r, struct generate_stream *s,
                  struct cli_result *ret_result);
/* TTFT, TPOT and the ledger's stages, to stderr. Nothing when the call gave none. */
void generate_print_ledger(const struct generate_stream *s);
/* The same in a line. */
void generate_print_line(const struct generate_stream *s);
void generate_stream_free(struct generate_stream *s);

#endif
