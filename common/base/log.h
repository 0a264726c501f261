/* log.h - logfmt, one event per line, to stderr; written whole by one write(2), so lines of threads
 * never mix.
 *
 *   ts=2026-01-02T03:04:05.678Z lvl=warn d=decode req=7f3a ev=kv_recv_timeout peer=prefill-2
 *   waited_ms=500
 *
 * Libraries return, daemons log: log once, at the place that decides. Never prompt text.
 * Thread-safe. */
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H

enum td_log_level { TD_LOG_DEBUG, TD_LOG_INFO, TD_LOG_WARN, TD_LOG_ERROR };

/* Once per process, before threads. `daemon` (borrowed, static) is the d= field. */
void td_log_start(const char *daemon, enum td_log_level level);
/* 0, or -1 for an unknown name */
int td_log_level_parse(const char *text, enum td_log_level *ret_level);

/* `ev` is a static snake_case name; fmt gives the remaining key=value pairs ("peer=%s
 * waited_ms=%u"), "" for none. A value with spaces or quotes goes through td_log_quote. */
void td_log(enum td_log_level level, const char *ev, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A line that a stranger can cause as often as he likes: at most TD_LOG_BURST of them at once
 * and then TD_LOG_PER_S a second, by place in the code. What is left out is counted: the next
 * line that comes through ends in suppressed=N, and td_log_tell_suppressed tells of places that
 * have fallen silent. */
enum { TD_LOG_BURST = 20, TD_LOG_PER_S = 5 };
struct td_log_limit {
    struct td_log_limit *next; /* of those that have suppressed something, ever */
    const char *ev;
    unsigned long long last_ns, tokens_ns; /* a token is 1 s / TD_LOG_PER_S of tokens_ns */
    unsigned suppressed;                   /* since the last line that said so */
    int is_listed;
};
/* True = log it, and *ret_suppressed says how many were left out before. Locked inside; the
 * clock is the caller's. */
int td_log_limit_take(struct td_log_limit *limit, const char *ev, unsigned long long now_ns,
                      unsigned *ret_suppressed);
void td_log_limited(struct td_log_limit *limit, enum td_log_level level, const char *ev,
                    const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* One line for each place that has left out lines and logged nothing for a second:
 * ev=lines_suppressed. Call it about once a second. */
void td_log_tell_suppressed(void);

/* Writes value as a logfmt value into buf: as it is, or in quotes with \" \\ \n escaped and
 * control bytes as \xNN; truncated to fit. Returns buf. */
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
