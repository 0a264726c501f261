/* options.h - one table of options per program: a row gives flag, TANDEM_* environment variable,
 * type, default, bounds and help.
 *
 * --help, --print-config and docs/config.md are made from the table. Precedence: default <
 * environment < flag. For example, the row {"kv_memory", ...} of tandem-decode is read from
 * --kv-memory (also --kv_memory), else TANDEM_DECODE_KV_MEMORY, else TANDEM_KV_MEMORY, so that
 * daemons of one host may share an environment and still differ. A program whose name is not
 * "tandem-ROLE" reads only the last variable. */
#ifndef TD_BASE_OPTIONS_H
#define TD_BASE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

enum td_option_type {
    TD_OPT_BOOL, /* bool:      --x, --x=true|false, --no-x                              */
    TD_OPT_I64,  /* int64_t                                                             */
    TD_OPT_U64,  /* uint64_t                                                            */
    TD_OPT_F64,  /* double                                                              */
    TD_OPT_SIZE, /* uint64_t bytes: 512, 64KiB, 2GiB, 1GB                               */
    TD_OPT_STR,  /* const char *: borrowed from argv, environ or the table              */
    /* as STR, but only the role's own variable is read, because no two daemons can share the
     * value */
    TD_OPT_OWN_STR,
    /* const char *: values, each on a line of its own. The flag may be given again, for one value
     * more; a variable has as many lines as values. Joined values stay allocated. */
    TD_OPT_LIST,
    TD_OPT_ENUM, /* const char *: one of `choices` ("a|b|c")                            */
    /* a row directly below an ENUM row with the same name: `choices` are former choices of that
     * row, and the message that refuses them ends with `help`, which says what replaced them */
    TD_OPT_ELSEWHERE,
    TD_OPT_ALIAS, /* another flag for the row that `choices` names; no variable of its own */
    /* the variable of the row that `choices` names is TANDEM_<name>: its own name's belongs to
     * another option */
    TD_OPT_VARIABLE,
    TD_OPT_DECIDED, /* was an option: flag and variable are refused by name, with `help` */
};

struct td_option {
    const char *name; /* snake_case with its unit: "drain_timeout_ms"; NULL ends the
                         table */
    enum td_option_type type;
    const char *def;     /* default as text; NULL = required                       */
    double min, max;     /* inclusive, for numbers and sizes; both 0 = unbounded   */
    const char *choices; /* for TD_OPT_ENUM, ELSEWHERE and ALIAS, else NULL        */
    size_t offset;       /* offsetof in the config struct                          */
    const char *help;    /* one or two lines for the operator */
};

/* --alias sets the same option as --of; help shows both. For names that users know from other
 * programs. */
#define TD_OPTION_ALIAS(alias, of)                                                                 \
    {                                                                                              \
        alias, TD_OPT_ALIAS, "", 0, 0, of, 0, ""                                                   \
    }

/* The variable of row `of` is not its own name's, which means something else to other programs of
 * one environment. That one is still read where it can only mean this: "true" or "off" for a switch
 * where the other option is a number; for a text what is no file and has no "=" where the other is
 * a path. Whoever set it is told the new name on stderr, once for a process. */
#define TD_OPTION_VARIABLE(variable, of)                                                           \
    {                                                                                              \
        variable, TD_OPT_VARIABLE, "", 0, 0, of, 0, ""                                             \
    }

/* An option of earlier versions. `by`: what decides now, or what to give instead, as the end of
 * "--name is no longer an option: ...". */
#define TD_OPTION_DECIDED(name, by)                                                                \
    {                                                                                              \
        name, TD_OPT_DECIDED, "", 0, 0, NULL, 0, by                                                \
    }

/* A row whose name begins with this is a hook for tests: flag and variable work, and --help,
 * --print-config and the search for the nearest name leave it out. tests/README.md lists them. */
#define TD_OPTION_TEST_PREFIX "test_"

/* Fills *config, the struct that `offset` refers to. The table has one row per name ('-' and '_'
 * are the same character) and none of help, version and print-config; otherwise the program aborts
 * and names the row.
 *
 * Positional arguments are left in argv order in positional[] (borrowed; at most max_positional,
 * more is an error; "--" ends options). --help prints usage to stdout and exits 0; --version prints
 * TD_VERSION and exits 0; --print-config prints the effective values as NAME=VALUE lines and exits
 * 0. An unknown flag is refused with the nearest known name; flags and variables of decided rows
 * are refused with what decides. Boot only, one thread. */
td_status td_options_load(const struct td_option *table, void *config, const char *program,
                          const char *summary, int argc, char **argv, const char **positional,
                          size_t max_positional, size_t *ret_n_positional, struct td_err *err);

/* Sets one option of a config that td_options_load has filled, from what a person typed while the
 * program runs. `text` is borrowed. TD_ERR_INVALID names the option, the value and its bounds, or
 * the nearest name. */
td_status td_options_set(const struct td_option *table, void *config, const char *name,
                         const char *text, struct td_err *err);

/* Single-character changes from one name to the other; '-' and '_' are the same character. Names
 * are compared to 64 bytes. */
size_t td_edit_distance(const char *a, size_t a_bytes, const char *b);

void td_options_help(const struct td_option *table, const char *program, const char *summary,
                     FILE *out);
/* NAME=VALUE lines */
void td_options_print(const struct td_option *table, const void *config, FILE *out);

/* Reads "64KiB" as 65536. Units: none, K/KiB, M/MiB, G/GiB, T/TiB (powers of 1024) and KB, MB, GB,
 * TB (powers of 1000). */
td_status td_parse_size(const char *text, uint64_t *ret_bytes, struct td_err *err);

/* The other way, for people: "256 MiB", "1.5 GiB". */
struct td_size_text {
    char s[24];
};
struct td_size_text td_size_text(uint64_t bytes);

/* Prints "PROGRAM: error: MSG" to stderr; returns the exit status for main: 2 for
 * TD_ERR_INVALID, else 1. */
int td_die(const char *program, const struct td_err *err);

#endif
