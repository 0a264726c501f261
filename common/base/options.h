/* options.h - one table per program: flag, TANDEM_* environment variable, type, default, bounds and
 * help in one row.
 *
 * --help, --print-config and docs/config.md all come from the table. Precedence: default <
 * environment < flag. Row {"kv_memory", ...} of tandem-decode is read from --kv-memory (also
 * --kv_memory), else TANDEM_DECODE_KV_MEMORY, else TANDEM_KV_MEMORY: daemons of one host may
 * share an environment and still differ. Programs whose name is not "tandem-ROLE" have the last
 * variable alone. */
#ifndef TD_BASE_OPTIONS_H
#define TD_BASE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

enum td_option_type {
    TD_OPT_BOOL,      /* bool:      --x, --x=true|false, --no-x                              */
    TD_OPT_I64,       /* int64_t                                                             */
    TD_OPT_U64,       /* uint64_t                                                            */
    TD_OPT_F64,       /* double                                                              */
    TD_OPT_SIZE,      /* uint64_t bytes: 512, 64KiB, 2GiB, 1GB                               */
    TD_OPT_STR,       /* const char *: borrowed from argv, environ or the table              */
    TD_OPT_OWN_STR,   /* as STR, but only the role's own variable counts: no two daemons can share
                         the value */
    TD_OPT_ENUM,      /* const char *: one of `choices` ("a|b|c")                            */
    TD_OPT_ELSEWHERE, /* stands right below an ENUM row and has its name: `choices` were that
                         row's once, and its refusal of them ends with `help`, which says where
                         they are now */
    TD_OPT_ALIAS,     /* another flag for the row that `choices` names; no variable of its own */
    TD_OPT_DECIDED,   /* was an option: flag and variable are refused by name, with `help` */
};

struct td_option {
    const char *name; /* snake_case with its unit: "drain_timeout_ms"; NULL ends the
                         table */
    enum td_option_type type;
    const char *def;     /* default as text; NULL = required                       */
    double min, max;     /* inclusive, for numbers and sizes; both 0 = unbounded   */
    const char *choices; /* for TD_OPT_ENUM, ELSEWHERE and ALIAS, else NULL        */
    size_t offset;       /* offsetof in the config struct                          */
    const char *help;    /* one or two lines for a tired operator                  */
};

/* --alias is --of; help tells both. Names by which users of other programs know an option. */
#define TD_OPTION_ALIAS(alias, of)                                                                 \
    {                                                                                              \
        alias, TD_OPT_ALIAS, "", 0, 0, of, 0, ""                                                   \
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

/* A table has one row of a name ('-' and '_' are one character) and none of the three below, else
 * it aborts and names it.
 *
 * Fills *config (the struct that `offset` speaks of). Positional arguments are left in argv
 * order in positional[] (borrowed; at most max_positional; more is an error; "--" ends options).
 * --help prints usage to stdout and exits 0; --version prints TD_VERSION and exits 0;
 * --print-config prints the effective values as NAME=VALUE lines and exits 0. Unknown flags are
 * refused with the nearest known name, flags and variables of decided rows with what decides.
 * Boot only, one thread. */
td_status td_options_load(const struct td_option *table, void *config, const char *program,
                          const char *summary, int argc, char **argv, const char **positional,
                          size_t max_positional, size_t *ret_n_positional, struct td_err *err);

void td_options_help(const struct td_option *table, const char *program, const char *summary,
                     FILE *out);
/* NAME=VALUE lines */
void td_options_print(const struct td_option *table, const void *config, FILE *out);

/* "64KiB" -> 65536. Units: none, K/KiB, M/MiB, G/GiB, T/TiB (1024) and KB, MB, GB, TB (1000). */
td_status td_parse_size(const char *text, uint64_t *ret_bytes, struct td_err *err);

/* Prints "PROGRAM: error: MSG" to stderr; returns the exit status for main: 2 for
 * TD_ERR_INVALID, else 1. */
int td_die(const char *program, const struct td_err *err);

#endif
