/* commands.h - programs of several commands: `tandem COMMAND`, `tandem bench KIND`,
 * `tandem-bench KIND`. One table, one way to list it and to refuse what is not in it. */
#ifndef TD_BASE_COMMANDS_H
#define TD_BASE_COMMANDS_H

struct td_command { /* a NULL name ends a table */
    const char *name;
    /* argv[0] is the command's name; returns the exit status: 0, 1 (failed), 2 (usage) */
    int (*run)(int argc, char **argv);
    const char *summary;
};

struct td_commands {
    const char *program; /* "tandem bench" */
    const char *head;    /* the lines before the table, "" for none */
    const char *what;    /* "COMMAND", "KIND": what the table lists */
    const char *foot;    /* the lines after it */
    const struct td_command *table;
};

/* Runs the command that argv[1] names. --help, -h and help print the table, `help NAME` what NAME
 * --help prints, --version and version the version. Without a command the table goes to stderr and
 * the result is 2. The same follows an unknown command, unless a known one is spelt nearly like it:
 * then that one is named instead of the table. */
int td_commands_run(const struct td_commands *c, int argc, char **argv);

#endif
