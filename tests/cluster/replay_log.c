/* replay_log FILE: runs the events of a router's decision log through the core and prints the log that comes of it: the same text (I5). */
#include <stdio.h>
#include <stdlib.h>

#include "router/core/core.h"

static struct td_core_action g_actions[TD_CORE_MAX_ACTIONS_PER_EVENT];
static uint64_t g_hashes[TD_CORE_MAX_HASHES];

static int fail(const char *what, const struct td_err *err)
{
    fprintf(stderr, "replay_log: %s%s%s\n", what, err ? ": " : "", err ? err->msg : "");
    return 1;
}

static void print_event(struct td_core *core, const struct td_core_event *e)
{
    char line[TD_CORE_LINE_MAX];
    size_t n = td_core_step(core, e, g_actions);
    td_core_event_format(e, line, sizeof line);
    fputs(line, stdout);
    for (uint32_t i = 0; td_core_hashes_format(e, i, line, sizeof line) > 0; i++) fputs(line, stdout);
    for (size_t i = 0; i < n; i++) {
        td_core_action_format(&g_actions[i], line, sizeof line);
        fputs(line, stdout);
    }
}

int main(int argc, char **argv)
{
    char line[TD_CORE_LINE_MAX];
    struct td_err err = {0};
    struct td_core *core = NULL;
    struct td_core_reader reader = {.hashes = g_hashes};
    FILE *in = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!in) return fail("give a decision log", NULL);
    while (fgets(line, sizeof line, in)) {
        enum td_core_read what;
        if (td_core_read_line(&reader, line, &what, &err)) return fail(line, &err);
        if (what == TD_READ_CONFIG) {
            if (td_core_create(&reader.config, &core, &err)) return fail("configuration", &err);
            for (uint32_t i = 0; td_core_config_format(&reader.config, i, line, sizeof line) > 0; i++) fputs(line, stdout);
        } else if (what == TD_READ_EVENT) {
            print_event(core, &reader.event);
        }
    }
    td_core_destroy(core);
    fclose(in);
    return 0;
}
