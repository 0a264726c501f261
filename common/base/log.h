/* log.h - logs one event per line, as logfmt, to stderr. Each line is one write(2), so lines of
 * different threads never mix.
 *
 *   ts=2026-01-02T03:04:05.678Z lvl=warn d=decode req=7f3a ev=kv_recv_timeout waited_ms=500
 *
 * or as JSON, when that is asked for: {"ts":"...","lvl":"warn","d":"decode",...}.
 *
 * Libraries return errors and daemons log them, once, at the place that decides. Text of prompts is
 * never logged. Thread-safe. */
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H

#include <stdbool.h>

enum td_log_level { TD_LOG_DEBUG, TD_LOG_INFO, TD_LOG_WARN, TD_LOG_ERROR };

/* Call once per process, before threads. `daemon` (borrowed, static) is the d= field. */
void td_log_start(const char *daemon, enum td_log_level level);
/* From now on each line is a JSON object (log_json.h), which begins {"ts":"...","lvl":"...". Before
 * threads. */
void td_log_set_json(bool on);
bool td_log_is_json(void);
/* 0, or -1 for an unknown name */
int td_log_level_parse(const char *text, enum td_log_level *ret_level);

/* `ev` is a static snake_case name. fmt gives the remaining key=value pairs ("peer=%s
 * waited_ms=%u"), or "" for none. A value that may hold spaces or quotes goes through
 * td_log_quote. */
void td_log(enum td_log_level level, const char *ev, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Bounds for a line that a stranger can cause as often as he likes, per place in the code: at most
 * TD_LOG_BURST lines at once, then TD_LOG_PER_S lines a second. Lines left out are counted: the
 * next line from that place ends in suppressed=N, and td_log_tell_suppressed reports places that
 * have fallen silent. */
enum { TD_LOG_BURST = 20, TD_LOG_PER_S = 5 };
struct td_log_limit {
    struct td_log_limit *next; /* links all places that have ever suppressed a line */
    const char *ev;
    /* a token bucket, in nanoseconds: one line costs 1 s / TD_LOG_PER_S of tokens_ns */
    unsigned long long last_ns, tokens_ns;
    unsigned suppressed; /* lines left out since the last line that said so */
    int is_listed;
};
/* True: log the line; *ret_suppressed says how many were left out before it. Takes a lock; the
 * caller supplies the clock. */
int td_log_limit_take(struct td_log_limit *limit, const char *ev, unsigned long long now_ns,
                      unsigned *ret_suppressed);
void td_log_limited(struct td_log_limit *limit, enum td_log_level level, const char *ev,
                    const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Logs one line (ev=lines_suppressed) for each place that has left out lines and logged nothing for
 * a second. Call it about once a second. */
void td_log_tell_suppressed(void);

/* Writes value as a logfmt value into buf: unchanged, or in quotes with \" \\ \n escaped and
 * control bytes as \xNN; cut to fit. Returns buf. */
const char *td_log_quote(char *buf, unsigned long buf_bytes, const char *value);

#define td_debug(ev, ...) td_log(TD_LOG_DEBUG, ev, __VA_ARGS__)
#define td_info(ev, ...) td_log(TD_LOG_INFO, ev, __VA_ARGS__)
#define td_warn(ev, ...) td_log(TD_LOG_WARN, ev, __VA_ARGS__)
#define td_error(ev, ...) td_log(TD_LOG_ERROR, ev, __VA_ARGS__)
#define td_log_at_most(level, ev, ...)                                                             \
    do {                                                                                           \
        static struct td_log_limit td_limit_here;                                                  \
        td_log_limited(&td_limit_here, level, ev, __VA_ARGS__);                                    \
    } while (0)
#define td_info_limited(ev, ...) td_log_at_most(TD_LOG_INFO, ev, __VA_ARGS__)
#define td_warn_limited(ev, ...) td_log_at_most(TD_LOG_WARN, ev, __VA_ARGS__)

#endif
