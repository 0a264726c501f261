/* progress.c - draws the progress line. drawn_ns is 0 until the first line has been printed. */
#include "common/base/progress.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/say.h"

#define QUIET_NS (TD_NS_PER_S / 2)
#define REDRAW_NS (TD_NS_PER_S / 10)
#define LINE_NS (5 * TD_NS_PER_S)

static void format_amount(char *buf, size_t buf_bytes, double amount, const char *unit)
{
    static const char *const byte_units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    if (strcmp(unit, "B") != 0) {
        snprintf(buf, buf_bytes, "%.0f %s", amount, unit);
        return;
    }
    int k = 0;
    for (; amount >= 1024 && k < 4; k++) amount /= 1024;
    snprintf(buf, buf_bytes, k ? "%.1f %s" : "%.0f %s", amount, byte_units[k]);
}

static void draw(struct td_progress *p, uint64_t now_ns, bool is_end)
{
    double elapsed_s = (double)(now_ns - p->start_ns) / 1e9,
           rate = elapsed_s > 0 ? (double)p->done / elapsed_s : 0;
    char done[48], total[48], per_s[48], tail[48];
    format_amount(done, sizeof done, (double)p->done, p->unit);
    format_amount(total, sizeof total, (double)p->total, p->unit);
    format_amount(per_s, sizeof per_s, rate, p->unit);
    if (is_end)
        snprintf(tail, sizeof tail, "took %.1f s", elapsed_s);
    else if (rate > 0 && p->total >= p->done)
        snprintf(tail, sizeof tail, "%.0f s left", (double)(p->total - p->done) / rate);
    else
        snprintf(tail, sizeof tail, "waiting");
    double percent = p->total ? 100.0 * (double)p->done / (double)p->total : 100.0;
    char line[320];
    snprintf(line, sizeof line, "%s: %3.0f%% (%s of %s, %s/s, %s)", p->label, percent, done, total,
             per_s, tail);
    /* a line that is drawn over another must not reach the next one, nor the last column */
    unsigned columns = td_terminal_columns(stderr);
    if (p->is_tty && columns && strlen(line) >= columns) line[columns - 1] = 0;
    fprintf(stderr, "%s%s%s%s", p->is_tty ? "\r" : "", line, p->is_tty ? "\033[K" : "",
            !p->is_tty || is_end ? "\n" : "");
    fflush(stderr);
    p->drawn_ns = now_ns;
}

void td_progress_start(struct td_progress *p, const char *label, const char *unit, uint64_t total)
{
    *p = (struct td_progress){.label = label,
                              .unit = unit,
                              .total = total,
                              .start_ns = td_now_ns(),
                              .is_tty = isatty(STDERR_FILENO)};
}

void td_progress_update(struct td_progress *p, uint64_t done)
{
    p->done = done;
    uint64_t now_ns = td_now_ns(), every_ns = p->is_tty ? REDRAW_NS : LINE_NS;
    uint64_t next_ns =
        p->drawn_ns ? p->drawn_ns + every_ns : p->start_ns + (p->is_tty ? QUIET_NS : LINE_NS);
    if (now_ns >= next_ns) draw(p, now_ns, false);
}

void td_progress_end(struct td_progress *p)
{
    uint64_t now_ns = td_now_ns();
    if (p->drawn_ns || now_ns - p->start_ns >= QUIET_NS) draw(p, now_ns, true);
}
