/* terminal.h - what commands write to a terminal: its width, words that stay whole at its edge,
 * names that are cut in the middle, and a line that the user edits.
 *
 * Width is counted as terminals count it (utf8proc's charwidth): a combining mark has none, a
 * Chinese character two columns. What a model writes is not trusted: bytes that a terminal would
 * take as commands (ESC and the other control characters) are shown as U+FFFD. */
#ifndef TD_CLI_TERMINAL_H
#define TD_CLI_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <wchar.h>

/* Columns that the text takes. */
unsigned cli_width(const char *text, size_t n_bytes);

/* The text in at most `columns` columns: what does not fit is cut out of its middle, and "..."
 * stands there; in fewer than 5 columns its beginning alone is left. Always a whole number of
 * characters. to_bytes must be at least 4 * columns + 4; where marks without a width need more, the
 * end is cut off. */
void cli_fit(const char *text, unsigned columns, char *to, size_t to_bytes);

/* Text that comes in pieces, written at once. A word that reaches the edge is taken back and put on
 * the next line. */
struct cli_wrap {
    FILE *out;
    unsigned columns; /* 0: no terminal, bytes go out as they are */
    unsigned at;      /* columns written of this line */
    bool is_edge;     /* a space was left out at the edge: the next character begins a line */
    char word[512];   /* that the line ends with */
    size_t word_bytes;
    unsigned word_columns;
    char part[4]; /* of a character that a piece ended in */
    size_t part_bytes;
};
void cli_wrap_begin(struct cli_wrap *w, FILE *out, unsigned columns, unsigned at);
void cli_wrap_text(struct cli_wrap *w, const void *text, size_t n_bytes);
/* Ends the line. */
void cli_wrap_end(struct cli_wrap *w);

/* ---- keys ------------------------------------------------------------------------------------ */

/* What a terminal sends for keys, byte by byte, as the editor shall see it: arrows become the
 * control characters of the same meaning whatever the terminal's kind, keys that mean nothing
 * become nothing, and of pasted text line ends and tabs become characters of the line. */
struct cli_keys {
    int state;
    char sequence[24]; /* between ESC [ and the final byte */
    size_t n_sequence;
    bool is_pasting;
    uint32_t character; /* UTF-8: bits so far */
    int n_more;
};
enum { CLI_KEYS_MAX = 4 };
/* Returns how many characters the byte completes. */
size_t cli_keys_feed(struct cli_keys *k, uint8_t byte, wchar_t ret[CLI_KEYS_MAX]);

/* ---- lines ----------------------------------------------------------------------------------- */

struct cli_line; /* one for a process, one thread */
enum cli_line_end { CLI_LINE, CLI_LINE_INTERRUPTED, CLI_LINE_OVER };

/* interrupt_fd: readable when the user has pressed Ctrl-C (a signalfd), read here; -1: none.
 * history: the file that lines are kept in, "" for none; a file that cannot be written is told once
 * on stderr. NULL: stdin is no terminal, or there is no memory; then lines are read plainly. */
struct cli_line *cli_line_open(int interrupt_fd, const char *history);
/* Shows the prompt and waits for a line. l may be NULL: a plain line of stdin, without prompt.
 * *ret_text is valid until the next call; no control characters but line ends and tabs are in a
 * line that was edited. */
enum cli_line_end cli_line_read(struct cli_line *l, const char *prompt, const char **ret_text);
void cli_line_close(struct cli_line *l);

/* $XDG_STATE_HOME/tandem/NAME, or ~/.local/state/tandem/NAME; makes its folder, for this user
 * alone. "" when there is no such place. */
void cli_state_file(const char *name, char *ret_path, size_t path_bytes);

#endif
