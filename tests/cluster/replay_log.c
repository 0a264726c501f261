/* replay_log FILE: runs the events of a router's decision log through the core and prints the log that comes of it: the same text (I5). */
#include <stdio.h>
#include <stdlib.h>

#include "router/core/core.h"

static struct td_core_action g_actions[TD_CORE_MAX_ACTIONS_PER_EVENT];

static int fail(const char *what, const struct td_err *err)
{
    fprintf(stderr, "replay_log: %s%s%s\n", what, err ? ": " : "", err ? err->msg : "");
    return 1;
}

int main(int argc, char **argv)
{
    char line[TD_CORE_LINE_MAX], policy[32];
    struct td_err err = {0};
    struct td_core_config config;
    struct td_core *core = NULL;
    FILE *in = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!in || !fgets(line, sizeof line, in)) return fail("give a decision log", NULL);
    if (td_core_config_parse(line, &config, policy, &err) || td_core_create(&config, &core, &err)) return fail("first line", &err);
    td_core_config_format(&config, line, sizeof line);
    fputs(line, stdout);
    while (fgets(line, sizeof line, in)) {
        if (line[0] != 'e') continue;
        struct td_core_event e;
        if (td_core_event_parse(line, &e, &err)) return fail(line, &err);
        size_t n = td_core_step(core, &e, g_actions);
        td_core_event_format(&e, line, sizeof line);
        fputs(line, stdout);
        for (size_t i = 0; i < n; i++) {
            td_core_action_format(&g_actions[i], line, sizeof line);
            fputs(line, stdout);
        }
    }
    td_core_destroy(core);
    fclose(in);
    return 0;
}
