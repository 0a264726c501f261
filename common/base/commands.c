/* commands.c - see commands.h. */
#include "common/base/commands.h"

#include <stdio.h>
#include <string.h>

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

static int usage(const struct td_commands *c, FILE *out)
{
    fprintf(out, "%susage: %s %s [options]\n\n", c->head, c->program, c->what);
    for (const struct td_command *t = c->table; t->name; t++)
        fprintf(out, "  %-13s %s\n", t->name, t->summary);
    fprintf(out, "\n%s", c->foot);
    return out == stdout ? 0 : 2;
}

int td_commands_run(const struct td_commands *c, int argc, char **argv)
{
    if (argc < 2) return usage(c, stderr);
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"))
        return usage(c, stdout);
    if (!strcmp(name, "--version")) return printf("%s %s\n", c->program, TD_VERSION) < 0;
    for (const struct td_command *t = c->table; t->name; t++)
        if (!strcmp(name, t->name)) return t->run(argc - 1, argv + 1);
    fprintf(stderr, "%s: there is no %s \"%s\"\n\n", c->program, c->what, name);
    return usage(c, stderr);
}
