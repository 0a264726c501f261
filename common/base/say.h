/* say.h - sentences and tables for people: on a terminal no line is longer than it is wide.
 *
 * In a pipe or file lines are as they were written: programs read them. Lines that people edit or
 * see redrawn (tandem chat, status, progress) have their own ways. */
#ifndef TD_SAY_H
#define TD_SAY_H

#include <stddef.h>
#include <stdio.h>

/* Columns of the terminal that f is; 0 when it is none. Narrower terminals count as 20 columns, and
 * wrap lines by themselves. */
unsigned td_terminal_columns(FILE *f);

/* As printf, but that lines are broken between words at the edge of out's terminal. The text begins
 * at the first column. What comes below a broken line begins at `indent`, or below that line's own
 * first word if that is further in. A word that is longer than a line, such as a path, is left
 * whole, so that it can be copied; but choices (a|b|c) are broken behind a '|'. */
void td_say(FILE *out, unsigned indent, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* An environment variable with the number of a pipe's descriptor: td_die (options.h) writes "PID
 * MSG" there and nothing to stderr, unless logs are JSON: then it logs the event "fatal". So a
 * program that starts many daemons prints an error that all of them report once. */
#define TD_STARTER_VARIABLE "TANDEM_STARTER_FD"

/* The same as td_say for what is written piece by piece. */
struct td_said {
    FILE *out, *f;
    unsigned indent;
    char *text;
    size_t n_bytes;
};
/* Where to write to: out itself when it is no terminal, or there is no memory. */
FILE *td_said_open(struct td_said *s, FILE *out, unsigned indent);
/* Says it. */
void td_said_close(struct td_said *s);

#endif
