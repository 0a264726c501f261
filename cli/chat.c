/* chat.c - `tandem chat`: a talk with the model, turn by turn. What it says goes to stdout, its
 * reasoning to stderr and not into the history, as the models' templates do. On a terminal lines
 * are edited (line.c), and Ctrl-C ends an answer, not the talk. */
#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/generate.h"
#include "common/base/commands.h"
#include "common/base/new_file.h"
#include "common/base/say.h"

struct chat_config {
    struct generate_config g;
    bool history;
};

#define OFF(f) offsetof(struct chat_config, g.f)
// clang-format off
static const struct td_option chat_options[] = {
    CLI_SERVER_OPTIONS(struct chat_config, g.at),
    GENERATE_SAMPLING_OPTIONS,
    {"stats", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(stats),
     "print a line of TTFT, TPOT and tokens/s below each answer; /ledger prints all of it"},
    {"system", TD_OPT_STR, "", 0, 0, NULL, OFF(system), "system message"},
    {"history", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(struct chat_config, history),
     "on a terminal: keep lines for later talks, in ~/.local/state/tandem/chat_history"},
    {0},
};
/* what /set changes */
static const struct td_option settings[] = {
    GENERATE_SAMPLING_OPTIONS,
    {"stats", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(stats), "a line below each answer"},
    {0},
};
// clang-format on
/* GENERATE_SAMPLING_OPTIONS has offsets in struct generate_config */
_Static_assert(offsetof(struct chat_config, g) == 0, "settings are offsets in struct chat_config");

/* A value of /set, which the configuration borrows. */
struct value {
    struct value *before;
    char text[];
};

struct talk {
    struct chat_config c;
    struct cli_client client;
    Tandem__V1__ChatMessage *messages, **pointers; /* so far; the system message first, if any */
    size_t n_messages, capacity;
    struct cli_line *line; /* NULL: stdin is no terminal */
    struct value *values;
    struct generate_stream last; /* the last answer, for /ledger */
    bool is_over;
};

static bool has_system(const struct talk *t)
{
    return t->n_messages && !strcmp(t->messages[0].role, "system");
}

static bool reserve(struct talk *t)
{
    if (t->n_messages < t->capacity) return true;
    size_t capacity = t->capacity ? t->capacity * 2 : 16;
    Tandem__V1__ChatMessage *messages = realloc(t->messages, capacity * sizeof *messages);
    if (messages) t->messages = messages;
    Tandem__V1__ChatMessage **pointers = realloc(t->pointers, capacity * sizeof *pointers);
    if (pointers) t->pointers = pointers;
    if (!messages || !pointers) return false;
    t->capacity = capacity;
    return true;
}

/* Before the `at`-th message; role is a literal. */
static bool add(struct talk *t, size_t at, const char *role, const char *text, size_t n_bytes)
{
    uint8_t *bytes = malloc(n_bytes ? n_bytes : 1);
    if (!bytes || !reserve(t)) {
        free(bytes);
        td_say(stderr, 2, "tandem chat: no memory for a message of %zu bytes\n", n_bytes);
        return false;
    }
    memcpy(bytes, text, n_bytes);
    Tandem__V1__ChatMessage *m = &t->messages[at];
    memmove(m + 1, m, (t->n_messages - at) * sizeof *m);
    tandem__v1__chat_message__init(m);
    m->role = (char *)(uintptr_t)role;
    m->content = (ProtobufCBinaryData){n_bytes, bytes};
    t->n_messages++;
    for (size_t i = 0; i < t->n_messages; i++) t->pointers[i] = &t->messages[i]; /* they moved */
    return true;
}

/* The messages from `first` on, before `end`. */
static void drop(struct talk *t, size_t first, size_t end)
{
    if (first == end) return; /* a talk without messages has no array, which memmove wants */
    for (size_t i = first; i < end; i++) free(t->messages[i].content.data);
    memmove(t->messages + first, t->messages + end, (t->n_messages - end) * sizeof *t->messages);
    t->n_messages -= end - first;
}

/* ---- a turn ---------------------------------------------------------------------------------- */

/* Ctrl-C since the last call. SIGINT is blocked on terminals. */
static bool is_interrupted(void)
{
    sigset_t set;
    struct timespec now = {0, 0};
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    return sigtimedwait(&set, NULL, &now) == SIGINT;
}

/* Asks with `text` as the user's next message. The turn stays when there is an answer, if only the
 * beginning of one that Ctrl-C ended. Returns the exit status if the talk ended here. */
static int ask(struct talk *t, const char *text)
{
    struct generate_request r;
    struct cli_result res;
    Tandem__V1__Chat chat = TANDEM__V1__CHAT__INIT;
    if (!add(t, t->n_messages, "user", text, strlen(text))) return 1;
    generate_request_init(&r, &t->c.g);
    chat.n_messages = t->n_messages;
    chat.messages = t->pointers;
    chat.split_answer = true;
    r.m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT;
    r.m.chat = &chat;
    generate_stream_free(&t->last);
    if (t->line) printf("model> "), fflush(stdout);
    t->last.at = t->line ? 7 : 0;
    generate_run(&t->client, "chat", &t->c.g, &r, &t->last, &res);
    bool is_cut = res.code == TD_CODE_CANCELLED && t->line;
    if (is_cut) td_say(stderr, 2, "[stopped]\n");
    if (res.code != TD_CODE_OK && !(is_cut && t->last.n_text)) {
        drop(t, t->n_messages - 1, t->n_messages); /* the turn did not happen */
        return is_cut ? 0 : cli_complain("chat", &t->c.g.at, &res);
    }
    if (t->c.g.stats) generate_print_line(&t->last);
    return add(t, t->n_messages, "assistant", t->last.text ? t->last.text : "", t->last.n_text) ? 0
                                                                                                : 1;
}

/* ---- commands -------------------------------------------------------------------------------- */

static void do_reset(struct talk *t, const char *rest)
{
    (void)rest;
    drop(t, has_system(t), t->n_messages);
    td_say(stderr, 2, "the talk begins anew%s\n", has_system(t) ? ", with its system message" : "");
}

static void do_system(struct talk *t, const char *rest)
{
    if (!rest[0]) {
        if (has_system(t))
            td_say(stderr, 2, "%.*s\n", (int)t->messages[0].content.len,
                   t->messages[0].content.data);
        else
            td_say(stderr, 2, "there is no system message\n");
        return;
    }
    if (has_system(t)) drop(t, 0, 1);
    if (strcmp(rest, "-") != 0) add(t, 0, "system", rest, strlen(rest));
}

static void do_set(struct talk *t, const char *rest)
{
    struct td_err err = {0};
    size_t n = strcspn(rest, " ="), gap = strspn(rest + n, " =");
    char name[64];
    if (!rest[0]) {
        td_options_print(settings, &t->c, stderr);
        return;
    }
    if (n >= sizeof name || !gap) {
        td_say(stderr, 2, "/set NAME VALUE, such as /set temperature 0.7; /set alone lists them\n");
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)n, rest);
    size_t bytes = strlen(rest + n + gap) + 1;
    struct value *v = malloc(sizeof *v + bytes);
    if (!v) return;
    memcpy(v->text, rest + n + gap, bytes);
    v->before = t->values;
    t->values = v;
    if (td_options_set(settings, &t->c, name, v->text, &err)) td_say(stderr, 2, "%s\n", err.msg);
}

static void do_save(struct talk *t, const char *rest)
{
    struct td_new_file f;
    struct td_err err = {0};
    if (!rest[0]) {
        td_say(stderr, 2, "/save FILE writes the talk as JSON\n");
        return;
    }
    json_t *messages = json_array();
    for (size_t i = 0; i < t->n_messages; i++)
        json_array_append_new(messages,
                              json_pack("{s:s, s:s%}", "role", t->messages[i].role, "content",
                                        (const char *)t->messages[i].content.data,
                                        t->messages[i].content.len));
    json_t *root = json_pack("{s:o}", "messages", messages);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text) {
        td_say(stderr, 2, "no memory for the talk as JSON\n");
        return;
    }
    td_status s = td_new_file_create(&f, rest, false, &err);
    if (!s) s = td_new_file_write(&f, text, strlen(text), &err);
    if (!s) s = td_new_file_write(&f, "\n", 1, &err);
    if (!s) s = td_new_file_commit(&f, &err);
    if (s) td_new_file_abandon(&f);
    free(text);
    if (s)
        td_say(stderr, 2, "%s\n", err.msg);
    else
        td_say(stderr, 2, "%zu messages are in %s\n", t->n_messages, rest);
}

static void do_ledger(struct talk *t, const char *rest)
{
    (void)rest;
    if (t->last.last)
        generate_print_ledger(&t->last);
    else
        td_say(stderr, 2, "there is no answer yet\n");
}

static void do_quit(struct talk *t, const char *rest)
{
    (void)rest;
    t->is_over = true;
}

static void do_help(struct talk *t, const char *rest);

static const struct chat_command {
    const char *name;
    void (*run)(struct talk *t, const char *rest);
    const char *arguments, *help;
} commands[] = {
    {"/reset", do_reset, "", "forget the talk; the system message stays"},
    {"/system", do_system, " [TEXT]", "show or change the system message; - takes it away"},
    {"/set", do_set, " [NAME VALUE]", "show or change temperature, max_tokens, seed, stats ..."},
    {"/save", do_save, " FILE", "write the talk as JSON, as /v1/chat/completions takes it"},
    {"/ledger", do_ledger, "", "where the time of the last answer went"},
    {"/help", do_help, "", "this list"},
    {"/quit", do_quit, "", "end; so does Ctrl-D"},
    {0},
};

static void do_help(struct talk *t, const char *rest)
{
    char left[64];
    (void)t;
    (void)rest;
    for (const struct chat_command *c = commands; c->name; c++) {
        snprintf(left, sizeof left, "%s%s", c->name, c->arguments);
        td_say(stderr, 22, "  %-19s %s\n", left, c->help);
    }
    td_say(stderr, 2,
           "  Ctrl-C ends an answer. A line that begins with // is sent with one of them.\n");
}

/* "/word", but no path: what a command looks like. */
static size_t word_of(const char *line)
{
    size_t n = 1;
    if (line[0] != '/') return 0;
    while (isalpha((unsigned char)line[n])) n++;
    return n > 1 && (line[n] == ' ' || !line[n]) ? n : 0;
}

/* True when the line was for us. What is piped in is text, unless it is a command that there is. */
static bool command(struct talk *t, const char *line)
{
    size_t n = word_of(line);
    if (!n) return false;
    for (const struct chat_command *c = commands; c->name; c++) {
        if (strlen(c->name) != n || memcmp(c->name, line, n) != 0) continue;
        if (!c->arguments[0] && line[n]) break;
        c->run(t, line + n + strspn(line + n, " "));
        return true;
    }
    if (!t->line) return false;
    td_say(stderr, 2, "there is no %.*s; /help lists what there is, and //... sends /...\n", (int)n,
           line);
    return true;
}

/* ---- the talk -------------------------------------------------------------------------------- */

/* A Ctrl-C at an empty prompt says how to leave. */
static int go_on(struct talk *t)
{
    const char *text = NULL;
    int rc = 0;
    while (!t->is_over) {
        enum cli_line_end end = cli_line_read(t->line, "you> ", &text);
        if (end == CLI_LINE_OVER) break;
        if (end == CLI_LINE_INTERRUPTED) {
            td_say(stderr, 2, "/quit or Ctrl-D ends the talk\n");
            continue;
        }
        if (!text[0] || command(t, text)) continue;
        rc = ask(t, text + (t->line && text[0] == '/' && text[1] == '/'));
    }
    return t->line ? 0 : rc; /* who sits there has seen it */
}

/* Blocks SIGINT, before any thread is there, and returns its signalfd. -1 where stdin is no
 * terminal: Ctrl-C then ends the program. */
static int catch_interrupts(void)
{
    sigset_t set;
    if (!isatty(STDIN_FILENO)) return -1;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

static void talk_end(struct talk *t)
{
    cli_line_close(t->line);
    drop(t, 0, t->n_messages);
    free(t->messages);
    free(t->pointers);
    generate_stream_free(&t->last);
    for (struct value *v = t->values, *before; v; v = before) {
        before = v->before;
        free(v);
    }
    cli_client_close(&t->client);
}

int cli_chat(int argc, char **argv)
{
    struct talk t = {.c.g = {.prompt = "", .ids = "", .logprobs = -1}};
    struct td_err err = {0};
    char history[4096] = "";
    int fd = -1;
    td_status s = td_options_load(chat_options, &t.c, "tandem chat",
                                  "Talk with the model; /help lists commands, /quit or end of "
                                  "input ends it.",
                                  argc, argv, NULL, 0, NULL, &err);
    if (!s) fd = catch_interrupts();
    if (!s) s = cli_client_open(&t.client, &t.c.g.at, &err);
    if (s) return td_die("tandem chat", &err);
    if (fd >= 0) t.client.is_interrupted = is_interrupted;
    if (t.c.history) cli_state_file("chat_history", history, sizeof history);
    t.line = cli_line_open(fd, history);
    if (fd >= 0 && !t.line) { /* plain lines: Ctrl-C ends the program, as it does everywhere */
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGINT);
        sigprocmask(SIG_UNBLOCK, &set, NULL);
        t.client.is_interrupted = NULL;
    }
    int rc = 1;
    if (!t.c.g.system[0] || add(&t, 0, "system", t.c.g.system, strlen(t.c.g.system)))
        rc = go_on(&t);
    talk_end(&t);
    if (fd >= 0) close(fd);
    return rc;
}
