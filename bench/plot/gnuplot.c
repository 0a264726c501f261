/* gnuplot.c - see gnuplot.h. */
#include "bench/plot/gnuplot.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"

#define DRAW_MS 30000
/* so that a picture stays sharp on screens with two pixels for one */
#define PNG_SCALE 2
#define MAX_SVG_BYTES (16 << 20) /* a picture has 20 KiB, one of 16,000 points 3 MiB */

void gnuplot_quote(const char *text, FILE *out)
{
    fputc('\'', out);
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            fputc('?', out);
        else if (*text == '\'')
            fputs("''", out);
        else
            fputc(*text, out);
    }
    fputc('\'', out);
}

static void terminal(const char *kind, int width, int height, int scale, const char *path,
                     FILE *out)
{
    fprintf(out,
            "set terminal %s size %d,%d noenhanced font '" GNUPLOT_FONT ",12' background '#ffffff'",
            kind, width * scale, height * scale);
    /* A point is 4/3 pixels to cairo, and a pixel to SVG. */
    if (scale > 1)
        fprintf(out, " fontscale %g linewidth %d pointscale %d", 0.75 * scale, scale, scale);
    fputs("\nset output ", out);
    gnuplot_quote(path, out);
    fputc('\n', out);
}

/* What a child ends with whose program is not there, where posix_spawn could not tell (its page of
 * POSIX allows that, and qemu's emulation does it). */
enum { NOT_FOUND = 127 };

static td_status not_installed(struct td_err *err)
{
    return td_fail(err, TD_ERR_UNSUPPORTED, "gnuplot is not installed (package gnuplot-nox)");
}

/* gnuplot without the user's own settings (-d), its commands from `commands`, and what it
 * prints to `messages`. */
static td_status start(FILE *commands, FILE *messages, pid_t *ret_pid, struct td_err *err)
{
    char name[] = "gnuplot", no_rc[] = "-d", *argv[] = {name, no_rc, NULL};
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions)) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    posix_spawn_file_actions_adddup2(&actions, fileno(commands), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fileno(messages), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fileno(messages), STDERR_FILENO);
    int e = posix_spawnp(ret_pid, name, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (e == ENOENT) return not_installed(err);
    return e ? td_fail(err, TD_ERR_IO, "gnuplot: %s", strerror(e)) : TD_OK;
}

static td_status wait_end(pid_t pid, FILE *messages, struct td_err *err)
{
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), DRAW_MS);
    int status = 0;
    bool killed = false;
    pid_t got;
    while ((got = waitpid(pid, &status, WNOHANG)) == 0 || (got < 0 && errno == EINTR)) {
        if (!killed && td_now_ns() > deadline) killed = !kill(pid, SIGKILL);
        poll(NULL, 0, 2);
    }
    if (got < 0) return td_fail(err, TD_ERR_IO, "gnuplot: waitpid: %s", strerror(errno));
    if (killed)
        return td_fail(err, TD_ERR_DEADLINE, "gnuplot drew nothing in %d ms and was killed",
                       DRAW_MS);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return TD_OK;
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_FOUND) return not_installed(err);
    char line[160] = "", first[160] = "no message";
    rewind(messages);
    while (fgets(line, sizeof line, messages)) {
        char *text = line + strspn(line, " ^\t\n"); /* gnuplot points at the place with a line of
                                                       its own */
        text[strcspn(text, "\n")] = 0;
        if (text[0]) snprintf(first, sizeof first, "%s", text);
        if (strstr(text, "line ")) break; /* "line 12: undefined variable" */
    }
    return td_fail(err, TD_ERR_IO, "gnuplot: %s", first);
}

td_status gnuplot_draw(const char *script, int width, int height, const char *svg_path,
                       const char *png_path, struct td_err *err)
{
    FILE *commands = tmpfile(), *messages = tmpfile();
    pid_t pid = 0;
    td_status s = commands && messages
                      ? TD_OK
                      : td_fail(err, TD_ERR_IO, "a temporary file: %s", strerror(errno));
    if (!s) {
        fputs("set encoding utf8\n", commands);
        terminal("svg fixed", width, height, 1, svg_path, commands);
        fputs(script, commands);
        terminal("pngcairo", width, height, PNG_SCALE, png_path, commands);
        fputs("replot\nset output\n", commands);
        if (fflush(commands) || ferror(commands) || fseek(commands, 0, SEEK_SET))
            s = td_fail(err, TD_ERR_IO, "a temporary file: %s", strerror(errno));
    }
    if (!s) s = start(commands, messages, &pid, err);
    if (!s) s = wait_end(pid, messages, err);
    if (commands) fclose(commands);
    if (messages) fclose(messages);
    return s;
}

/* Takes <title>, which gnuplot numbers, and id="..." out of the marks, in place: two pictures
 * would have the same ones. */
static void without_ids(char *marks)
{
    char *to = marks;
    for (const char *from = marks; *from;) {
        const char *end = NULL;
        if (!strncmp(from, "<title>", 7) && (end = strstr(from, "</title>")))
            from = end + 8;
        else if (!strncmp(from, " id=\"", 5) && (end = strchr(from + 5, '"')))
            from = end + 1;
        else
            *to++ = *from++;
    }
    *to = 0;
}

td_status gnuplot_read_marks(const char *svg_path, char **ret_marks, struct td_err *err)
{
    FILE *f = fopen(svg_path, "re");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: %s", svg_path, strerror(errno));
    td_status s = TD_OK;
    char *text = NULL;
    long bytes = fseek(f, 0, SEEK_END) ? -1 : ftell(f);
    if (bytes < 0 || fseek(f, 0, SEEK_SET))
        s = td_fail(err, TD_ERR_IO, "%s: %s", svg_path, strerror(errno));
    else if (bytes > MAX_SVG_BYTES)
        s = td_fail(err, TD_ERR_INVALID, "%s has %ld bytes, at most %d", svg_path, bytes,
                    MAX_SVG_BYTES);
    else if (!(text = calloc(1, (size_t)bytes + 1)))
        s = td_fail(err, TD_ERR_NOMEM, "out of memory");
    else if (fread(text, 1, (size_t)bytes, f) != (size_t)bytes)
        s = td_fail(err, TD_ERR_IO, "%s: read failed", svg_path);
    fclose(f);
    char *marks = s ? NULL : strstr(text, "</defs>"), *end = marks ? strstr(marks, "</svg>") : NULL;
    /* One <g> is open at </defs> and closed before </svg>. */
    if (!s && !end) s = td_fail(err, TD_ERR_INVALID, "%s is not what gnuplot draws", svg_path);
    if (!s) {
        marks += strlen("</defs>");
        *end = 0;
        without_ids(marks);
        *ret_marks = NULL;
        if (asprintf(ret_marks, "<g>%s", marks) < 0)
            s = td_fail(err, TD_ERR_NOMEM, "out of memory");
    }
    free(text);
    return s;
}
