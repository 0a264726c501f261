/* commands.c - see commands.h. */
#include "common/base/commands.h"

#include <stdio.h>
#include <string.h>

#include "common/base/options.h"
#include "common/base/say.h"

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

static int usage(const struct td_commands *c, FILE *out)
{
    td_say(out, 2, "%susage: %s %s [options]\n\n", c->head, c->program, c->what);
    for (const struct td_command *t = c->table; t->name; t++)
        td_say(out, 16, "  %-13s %s\n", t->name, t->summary);
    td_say(out, 2, "\n%s", c->foot);
    return out == stdout ? 0 : 2;
}

static const struct td_command *find(const struct td_commands *c, const char *name)
{
    for (const struct td_command *t = c->table; t->name; t++)
        if (!strcmp(name, t->name)) return t;
    return NULL;
}

/* A name that is not in the table. Near: two changes at most, and not every second character. */
static int fail_unknown(const struct td_commands *c, const char *name)
{
    static const char *const builtin[] = {"help", "version"};
    const char *nearest = NULL;
    size_t n_bytes = strlen(name), best = n_bytes / 2 < 2 ? n_bytes / 2 : 2;
    for (size_t i = 0; i < 2; i++)
        if (td_edit_distance(name, n_bytes, builtin[i]) <= best) nearest = builtin[i];
    for (const struct td_command *t = c->table; t->name; t++) {
        size_t d = td_edit_distance(name, n_bytes, t->name);
        if (d > best || (d == best && nearest)) continue;
        best = d;
        nearest = t->name;
    }
    if (nearest) {
        td_say(stderr, 2, "%s: there is no %s \"%.60s\", did you mean %s? (`%s help` lists all)\n",
               c->program, c->what, name, nearest, c->program);
        return 2;
    }
    td_say(stderr, 2, "%s: there is no %s \"%.60s\"\n\n", c->program, c->what, name);
    return usage(c, stderr);
}

static int help_of(const struct td_commands *c, char **argv)
{
    static char flag[] = "--help";
    char *args[] = {argv[2], flag, NULL};
    const struct td_command *t = find(c, argv[2]);
    return t ? t->run(2, args) : fail_unknown(c, argv[2]);
}

int td_commands_run(const struct td_commands *c, int argc, char **argv)
{
    if (argc < 2) return usage(c, stderr);
    const char *name = argv[1];
    const struct td_command *t = find(c, name);
    if (t) return t->run(argc - 1, argv + 1);
    if (!strcmp(name, "help") && argc > 2) return help_of(c, argv);
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"))
        return usage(c, stdout);
    if (!strcmp(name, "--version") || !strcmp(name, "version"))
        return printf("%s %s\n", c->program, TD_VERSION) < 0;
    return fail_unknown(c, name);
}
