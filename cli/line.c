/* line.c - see terminal.h: a line that the user edits, by libedit.
 *
 * libedit reads characters through read_key(): it waits for the terminal and for Ctrl-C's signalfd
 * at once, and gives libedit what keys.c makes of the bytes. */
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/terminal.h"

/* The file may have twice the lines that are kept: it is shortened at the start of a talk. Another
 * talk writes its line, or shortens, in a few milliseconds; one that was stopped (Ctrl-Z) while it
 * had the lock holds this one up for LOCK_MS, and the line is not kept. */
enum { HISTORY_LINES = 1000, LOCK_MS = 500, LOCK_POLL_MS = 5 };

struct cli_line {
    EditLine *editor;
    History *history;
    FILE *out;
    int interrupt_fd;
    struct cli_keys keys;
    wchar_t ready[CLI_KEYS_MAX];
    size_t n_ready, at_ready;
    bool is_interrupted, is_told;
    char prompt[64], path[4096];
    char *text;
};

static char *prompt_of(EditLine *editor)
{
    struct cli_line *l = NULL;
    el_get(editor, EL_CLIENTDATA, &l);
    return l->prompt;
}

/* True: Ctrl-C. False: the terminal has something, or has ended. */
static bool wait_for_key(struct cli_line *l)
{
    struct pollfd fds[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                            {.fd = l->interrupt_fd, .events = POLLIN}};
    while (poll(fds, 2, -1) < 0 && errno == EINTR) continue; /* SIGWINCH, SIGCONT */
    struct signalfd_siginfo taken;
    return fds[1].revents && read(l->interrupt_fd, &taken, sizeof taken) > 0;
}

static int read_key(EditLine *editor, wchar_t *ret)
{
    struct cli_line *l = NULL;
    el_get(editor, EL_CLIENTDATA, &l);
    while (l->at_ready == l->n_ready) {
        uint8_t byte;
        if (wait_for_key(l)) {
            l->is_interrupted = true;
            errno = EINTR;
            return -1;
        }
        ssize_t n = read(STDIN_FILENO, &byte, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return (int)n;
        l->n_ready = cli_keys_feed(&l->keys, byte, l->ready);
        l->at_ready = 0;
    }
    *ret = l->ready[l->at_ready++];
    return 1;
}

/* libedit counts columns by the locale, which must be a UTF-8 one. Numbers stay C's. */
static void choose_locale(void)
{
    if (!setlocale(LC_CTYPE, "") || strcmp(nl_langinfo(CODESET), "UTF-8") != 0)
        setlocale(LC_CTYPE, "C.UTF-8");
}

/* Whether fd has the lock, or its file system has none; else errno. */
static bool lock(int fd, int *ms_left)
{
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno == EINTR) continue;
        if (errno != EWOULDBLOCK) return true;
        if (*ms_left <= 0) return false;
        poll(NULL, 0, LOCK_POLL_MS);
        *ms_left -= LOCK_POLL_MS;
    }
    return true;
}

/* False: another talk has shortened the file, and the name is a new file's. */
static bool has_name(int fd, const char *path)
{
    struct stat open_one, named;
    return fstat(fd, &open_one) == 0 && stat(path, &named) == 0 &&
           open_one.st_dev == named.st_dev && open_one.st_ino == named.st_ino;
}

/* The history file, locked against other talks that write at the same time; NULL and errno. */
static FILE *open_file(const char *path)
{
    int fd, ms_left = LOCK_MS;
    for (;; close(fd), ms_left -= LOCK_POLL_MS) {
        fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) return NULL;
        if (!lock(fd, &ms_left)) break;
        if (has_name(fd, path)) {
            FILE *file = fdopen(fd, "a+");
            if (!file) break;
            fseek(file, 0, SEEK_END); /* libedit writes the file's first line at position 0 */
            return file;
        }
    }
    int why = errno;
    close(fd);
    errno = why;
    return NULL;
}

/* The lines of h into a file that then takes the name: whoever is killed on the way, or has no room
 * for it, leaves the old file whole. */
static void replace(History *h, const char *path)
{
    HistEvent event;
    char new_path[sizeof((struct cli_line *)NULL)->path + 8];
    snprintf(new_path, sizeof new_path, "%s.XXXXXX", path);
    int fd = mkostemp(new_path, O_CLOEXEC);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!file) {
        if (fd >= 0) close(fd), unlink(new_path);
        return;
    }
    bool ok = history(h, &event, H_SAVE_FP, file) >= 0 && fflush(file) == 0 && !ferror(file) &&
              fsync(fd) == 0;
    if (fclose(file)) ok = false;
    if (!ok || rename(new_path, path)) unlink(new_path);
}

/* Under the lock the lines are read again: another talk may have added some since the start, or
 * have shortened the file. */
static void shorten(struct cli_line *l)
{
    HistEvent event;
    char *path = realpath(l->path, NULL); /* a link stays one */
    FILE *file = path ? open_file(path) : NULL;
    if (file) {
        history(l->history, &event, H_CLEAR);
        if (history(l->history, &event, H_LOAD, path) > 2 * HISTORY_LINES)
            replace(l->history, path);
        fclose(file);
    }
    free(path);
}

/* Writes behind what is there: other talks write to the same file. */
static bool append(const char *path, const char *text)
{
    HistEvent event;
    History *one = history_init(); /* libedit saves whole histories: this one has the line alone */
    FILE *file = one ? open_file(path) : NULL;
    bool ok = file && history(one, &event, H_SETSIZE, 1) >= 0 &&
              history(one, &event, H_ENTER, text) >= 0 &&
              history(one, &event, H_SAVE_FP, file) >= 0;
    if (file && fclose(file)) ok = false;
    if (one) history_end(one);
    return ok;
}

static void open_history(struct cli_line *l, const char *path)
{
    HistEvent event;
    l->history = history_init();
    if (!l->history) return;
    history(l->history, &event, H_SETSIZE, HISTORY_LINES);
    history(l->history, &event, H_SETUNIQUE, 1);
    el_set(l->editor, EL_HIST, history, l->history);
    snprintf(l->path, sizeof l->path, "%s", path);
    /* none yet: empty */
    if (l->path[0] && history(l->history, &event, H_LOAD, l->path) > 2 * HISTORY_LINES) shorten(l);
}

struct cli_line *cli_line_open(int interrupt_fd, const char *path)
{
    if (!isatty(STDIN_FILENO)) return NULL;
    struct cli_line *l = calloc(1, sizeof *l);
    if (!l) return NULL;
    choose_locale();
    l->interrupt_fd = interrupt_fd;
    l->out = isatty(STDOUT_FILENO) ? stdout : stderr;
    l->editor = el_init("tandem", stdin, l->out, stderr);
    if (!l->editor) {
        free(l);
        return NULL;
    }
    el_set(l->editor, EL_CLIENTDATA, l);
    el_set(l->editor, EL_PROMPT, prompt_of);
    el_set(l->editor, EL_EDITOR, "emacs");
    el_set(l->editor, EL_SIGNAL,
           1); /* a resize redraws; an end by a signal leaves a sane terminal */
    el_set(l->editor, EL_GETCFN, read_key);
    el_set(l->editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(l->editor, EL_BIND, "\\e^D", "ed-delete-next-char", NULL);
    open_history(l, path);
    return l;
}

static void keep(struct cli_line *l, const char *text)
{
    HistEvent event;
    if (!l->history || !text[0]) return;
    /* 0: the same line as before */
    if (history(l->history, &event, H_ENTER, text) == 0 || !l->path[0]) return;
    if (!append(l->path, text) && !l->is_told) {
        fprintf(stderr, "history is not kept: %s: %s\n", l->path, strerror(errno));
        l->is_told = true;
    }
}

/* Pasted or quoted control characters never leave this file. Takes the line end away. */
static char *cleaned(const char *line, size_t n)
{
    char *to = malloc(n + 1);
    size_t k = 0;
    if (!to) return NULL;
    while (n && line[n - 1] == '\n') n--;
    for (size_t i = 0; i < n; i++) {
        uint8_t c = (uint8_t)line[i];
        if ((c >= 0x20 && c != 0x7F) || c == '\n' || c == '\t') to[k++] = line[i];
    }
    to[k] = 0;
    return to;
}

static enum cli_line_end read_plain(const char **ret_text)
{
    static char *line; /* as long as the process */
    static size_t capacity;
    ssize_t n = getline(&line, &capacity, stdin);
    if (n < 0) return CLI_LINE_OVER;
    if (n > 0 && line[n - 1] == '\n') line[n - 1] = 0;
    *ret_text = line;
    return CLI_LINE;
}

/* Whether pasted text is marked as such; where the terminal does not know, nothing happens. */
static void mark_pastes(struct cli_line *l, bool on)
{
    fputs(on ? "\033[?2004h" : "\033[?2004l", l->out);
    fflush(l->out);
}

enum cli_line_end cli_line_read(struct cli_line *l, const char *prompt, const char **ret_text)
{
    if (!l) return read_plain(ret_text);
    int n = 0;
    free(l->text);
    l->text = NULL;
    l->is_interrupted = false;
    snprintf(l->prompt, sizeof l->prompt, "%s", prompt);
    /* before the prompt is seen: what is typed at once is not echoed twice */
    el_set(l->editor, EL_PREP_TERM, 1);
    mark_pastes(l, true);
    const char *line = el_gets(l->editor, &n);
    mark_pastes(l, false);
    if (l->is_interrupted) {
        fputs("^C\n", l->out);
        return CLI_LINE_INTERRUPTED;
    }
    if (!line || n <= 0) {
        fputc('\n', l->out);
        return CLI_LINE_OVER;
    }
    l->text = cleaned(line, (size_t)n);
    if (!l->text) return CLI_LINE_OVER;
    keep(l, l->text);
    *ret_text = l->text;
    return CLI_LINE;
}

void cli_line_close(struct cli_line *l)
{
    if (!l) return;
    if (l->history) history_end(l->history);
    el_end(l->editor);
    free(l->text);
    free(l);
}

/* The folder, and those above it that are missing; what fails here fails at the file, too. */
static void make_folders(char *path)
{
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        mkdir(path, 0700);
        *p = '/';
    }
}

void cli_state_file(const char *name, char *ret_path, size_t path_bytes)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (state && state[0] == '/') /* the specification: a relative one counts as not set */
        n = snprintf(ret_path, path_bytes, "%s/tandem/%s", state, name);
    else if (home && home[0] == '/')
        n = snprintf(ret_path, path_bytes, "%s/.local/state/tandem/%s", home, name);
    if (n < 0 || (size_t)n >= path_bytes)
        ret_path[0] = 0;
    else
        make_folders(ret_path);
}
