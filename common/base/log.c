/* log.c - builds and writes one logfmt line per event.
 *
 * A line is built in a buffer on the stack and written by one write(2), so threads need no lock:
 * lines of up to PIPE_BUF bytes never mix in a pipe, and appends to a file are whole. A line that
 * does not fit is cut and marked as cut. A line break in an argument is replaced by a space, so
 * that one event stays one line. */
#include "common/base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log_json.h"

#define LINE_MAX_BYTES 4096 /* PIPE_BUF on Linux */

static const char *g_daemon = "tandem";
static enum td_log_level g_level = TD_LOG_INFO;
static bool g_json;

static const char *const g_level_names[] = {"debug", "info", "warn", "error"};

void td_log_start(const char *daemon, enum td_log_level level)
{
    g_daemon = daemon;
    g_level = level;
}

void td_log_set_json(bool on) { g_json = on; }
bool td_log_is_json(void) { return g_json; }

int td_log_level_parse(const char *text, enum td_log_level *ret_level)
{
    for (int i = 0; i <= TD_LOG_ERROR; i++) {
        if (strcmp(text, g_level_names[i]) == 0) {
            *ret_level = (enum td_log_level)i;
            return 0;
        }
    }
    return -1;
}

static void write_all(const char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = write(STDERR_FILENO, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return; /* nobody reads the log any more, so there is nobody to tell */
        p += k;
        n -= (size_t)k;
    }
}

/* Writes the line of n bytes, whose end is not there yet: line has room for it. */
static void write_line(char *line, size_t n)
{
    char object[LINE_MAX_BYTES];
    if (g_json) {
        n = td_log_to_json(line, n, object, sizeof object - 1);
        line = object;
    }
    line[n++] = '\n';
    write_all(line, n);
}

static void log_line(enum td_log_level level, const char *ev, unsigned suppressed, const char *fmt,
                     va_list args)
{
    int saved_errno = errno; /* callers log errno and may need it afterwards */

    static const char cut[] = " log_cut=1";
    char line[LINE_MAX_BYTES];
    /* room for the text; behind it come the mark of a cut line and the line's end */
    const size_t room = sizeof line - sizeof cut - 1;
    uint64_t ns = td_wall_ns();
    time_t seconds = (time_t)(ns / TD_NS_PER_S);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t n = strftime(line, room, "ts=%Y-%m-%dT%H:%M:%S", &tm);
    int k =
        snprintf(line + n, room - n, ".%03uZ lvl=%s d=%s ev=%s",
                 (unsigned)(ns % TD_NS_PER_S / TD_NS_PER_MS), g_level_names[level], g_daemon, ev);
    n += k < 0 ? 0 : (size_t)k;
    if (n < room && fmt[0] != '\0') {
        line[n++] = ' ';
        k = vsnprintf(line + n, room - n, fmt, args);
        n += k < 0 ? 0 : (size_t)k;
    }
    if (n < room && suppressed) {
        k = snprintf(line + n, room - n, " suppressed=%u", suppressed);
        n += k < 0 ? 0 : (size_t)k;
    }
    bool is_cut = n >= room;
    if (is_cut) n = room - 1; /* snprintf kept one byte for its NUL */
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)line[i] < 0x20) line[i] = ' ';
    }
    if (is_cut) {
        memcpy(line + n, cut, sizeof cut - 1);
        n += sizeof cut - 1;
    }
    write_line(line, n);
    errno = saved_errno;
}

void td_log(enum td_log_level level, const char *ev, const char *fmt, ...)
{
    if (level < g_level) return;
    va_list args;
    va_start(args, fmt);
    log_line(level, ev, 0, fmt, args);
    va_end(args);
}

/* ---- lines that strangers can cause ---------------------------------------------------------- */

static pthread_mutex_t g_limits_mu = PTHREAD_MUTEX_INITIALIZER;
static struct td_log_limit *g_limits; /* under g_limits_mu, as are the fields of all of them */

int td_log_limit_take(struct td_log_limit *l, const char *ev, unsigned long long now_ns,
                      unsigned *ret_suppressed)
{
    const unsigned long long token_ns = TD_NS_PER_S / TD_LOG_PER_S,
                             full_ns = TD_LOG_BURST * token_ns;
    pthread_mutex_lock(&g_limits_mu);
    if (!l->ev)
        l->tokens_ns = full_ns;
    else if (now_ns > l->last_ns)
        l->tokens_ns += now_ns - l->last_ns;
    if (l->tokens_ns > full_ns) l->tokens_ns = full_ns;
    l->ev = ev;
    l->last_ns = now_ns;
    int passes = l->tokens_ns >= token_ns;
    if (passes) {
        l->tokens_ns -= token_ns;
        *ret_suppressed = l->suppressed;
        l->suppressed = 0;
    } else {
        l->suppressed++;
        if (!l->is_listed) {
            l->is_listed = 1;
            l->next = g_limits;
            g_limits = l;
        }
    }
    pthread_mutex_unlock(&g_limits_mu);
    return passes;
}

void td_log_limited(struct td_log_limit *limit, enum td_log_level level, const char *ev,
                    const char *fmt, ...)
{
    unsigned suppressed = 0;
    if (level < g_level || !td_log_limit_take(limit, ev, td_now_ns(), &suppressed)) return;
    va_list args;
    va_start(args, fmt);
    log_line(level, ev, suppressed, fmt, args);
    va_end(args);
}

void td_log_tell_suppressed(void)
{
    unsigned long long now = td_now_ns();
    pthread_mutex_lock(&g_limits_mu);
    for (struct td_log_limit *l = g_limits; l; l = l->next) {
        if (!l->suppressed || now - l->last_ns < TD_NS_PER_S) continue;
        td_warn("lines_suppressed", "event=%s suppressed=%u", l->ev, l->suppressed);
        l->suppressed = 0;
    }
    pthread_mutex_unlock(&g_limits_mu);
}

static bool needs_quotes(const char *value)
{
    if (value[0] == '\0') return true;
    for (const unsigned char *p = (const unsigned char *)value; *p; p++) {
        if (*p <= 0x20 || *p == '"' || *p == '=' || *p == '\\' || *p == 0x7f) return true;
    }
    return false;
}

/* Bytes of the UTF-8 sequence that starts at p: a cut must not fall inside it. Bytes that are
 * not UTF-8 count one by one. */
static size_t sequence_bytes(const unsigned char *p)
{
    size_t n = *p >= 0xf0 ? 4 : *p >= 0xe0 ? 3 : *p >= 0xc0 ? 2 : 1;
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 1;
    }
    return n;
}

const char *td_log_quote(char *buf, unsigned long buf_bytes, const char *value)
{
    if (buf_bytes == 0) return buf;
    bool quoted = needs_quotes(value);
    size_t n = 0, end = buf_bytes - 1; /* end: room for the NUL */
    if (quoted) {
        if (end < 2) { /* not even two quotes fit */
            buf[0] = '\0';
            return buf;
        }
        buf[n++] = '"';
        end--; /* room for the closing quote */
    }
    for (const unsigned char *p = (const unsigned char *)value; *p;) {
        char unit[8];
        size_t unit_bytes, step = 1;
        if (*p == '"' || *p == '\\') {
            unit[0] = '\\', unit[1] = (char)*p, unit_bytes = 2;
        } else if (*p == '\n') {
            unit[0] = '\\', unit[1] = 'n', unit_bytes = 2;
        } else if (*p < 0x20 || *p == 0x7f) {
            unit_bytes = (size_t)snprintf(unit, sizeof unit, "\\x%02x", *p);
        } else {
            step = unit_bytes = sequence_bytes(p);
            memcpy(unit, p, step);
        }
        if (n + unit_bytes > end) break;
        memcpy(buf + n, unit, unit_bytes);
        n += unit_bytes;
        p += step;
    }
    if (quoted) buf[n++] = '"';
    buf[n] = '\0';
    return buf;
}
