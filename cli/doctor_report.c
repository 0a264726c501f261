/* doctor_report.c - the list of checks, as lines and as JSON; small helpers that read files
 * below --root. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/doctor.h"
#include "common/base/say.h"

static const char *const level_names[DOCTOR_N_LEVELS] = {"ok", "warn", "FAIL"};

struct doctor_check *doctor_add(struct doctor_report *r, const char *group, enum doctor_level level,
                                const char *name, const char *fmt, ...)
{
    if (r->n == r->n_room) {
        size_t room = r->n_room ? 2 * r->n_room : 32;
        struct doctor_check *more = realloc(r->checks, room * sizeof *more);
        TD_ASSERT(more);
        r->checks = more;
        r->n_room = room;
    }
    struct doctor_check *c = &r->checks[r->n++];
    memset(c, 0, sizeof *c);
    c->group = group;
    c->level = level;
    snprintf(c->name, sizeof c->name, "%s", name);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->found, sizeof c->found, fmt, ap);
    va_end(ap);
    return c;
}

void doctor_fix(struct doctor_check *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->fix, sizeof c->fix, fmt, ap);
    va_end(ap);
}

/* Makes JSON text, which must be UTF-8, of text that was cut or came from elsewhere. */
static json_t *text_json(const char *text)
{
    json_t *j = json_string(text);
    if (j) return j;
    char plain[1024];
    size_t n = 0;
    for (; text[n] && n < sizeof plain - 1; n++)
        plain[n] = (unsigned char)text[n] < 0x80 ? text[n] : '?';
    plain[n] = 0;
    return json_string(plain);
}

void doctor_number(struct doctor_check *c, const char *key, double value)
{
    if (!c->values) c->values = json_object();
    json_object_set_new(c->values, key, json_real(value));
}

void doctor_string(struct doctor_check *c, const char *key, const char *value)
{
    if (!c->values) c->values = json_object();
    json_object_set_new(c->values, key, text_json(value));
}

/* Prints without control bytes, because names and reasons come from other machines and from
 * files. */
static void print_plain(FILE *out, const char *text)
{
    for (; *text; text++) fputc((unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text, out);
}

void doctor_flush(struct doctor_report *r)
{
    struct td_said said;
    FILE *f = td_said_open(&said, r->out, 8);
    for (; r->n_printed < r->n; r->n_printed++) {
        const struct doctor_check *c = &r->checks[r->n_printed];
        if (!r->group || strcmp(r->group, c->group))
            fprintf(f, "%s%s\n", r->group ? "\n" : "", c->group);
        r->group = c->group;
        fprintf(f, "  %-4s  ", level_names[c->level]);
        print_plain(f, c->name);
        fputs(": ", f);
        print_plain(f, c->found);
        if (c->level != DOCTOR_OK && c->fix[0]) {
            fputs("\n        fix: ", f);
            print_plain(f, c->fix);
        }
        fputc('\n', f);
        r->n_levels[c->level]++;
    }
    td_said_close(&said);
    fflush(r->out);
}

json_t *doctor_json(const struct doctor_report *r)
{
    json_t *checks = json_array();
    for (size_t i = 0; i < r->n_printed; i++) {
        const struct doctor_check *c = &r->checks[i];
        json_t *one = json_object();
        json_object_set_new(one, "group", json_string(c->group));
        json_object_set_new(one, "name", text_json(c->name));
        json_object_set_new(one, "level",
                            json_string(c->level == DOCTOR_FAIL ? "fail" : level_names[c->level]));
        json_object_set_new(one, "found", text_json(c->found));
        if (c->level != DOCTOR_OK) json_object_set_new(one, "fix", text_json(c->fix));
        if (c->values) json_object_set(one, "values", c->values);
        json_array_append_new(checks, one);
    }
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:o}", "version", TD_VERSION, "status",
                     doctor_status(r), "ok", (int)r->n_levels[DOCTOR_OK], "warn",
                     (int)r->n_levels[DOCTOR_WARN], "fail", (int)r->n_levels[DOCTOR_FAIL], "checks",
                     checks);
}

int doctor_status(const struct doctor_report *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->checks[i].level == DOCTOR_FAIL) return 1;
    return 0;
}

void doctor_report_free(struct doctor_report *r)
{
    for (size_t i = 0; i < r->n; i++) json_decref(r->checks[i].values);
    free(r->checks);
    memset(r, 0, sizeof *r);
}

/* ---- files ----------------------------------------------------------------------------------- */

bool doctor_read(const char *root, const char *path, char *text, size_t max)
{
    char full[PATH_MAX];
    text[0] = 0;
    if ((size_t)snprintf(full, sizeof full, "%s%s", root, path) >= sizeof full) return false;
    int fd = open(full, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return false;
    size_t n = 0;
    ssize_t k = 0;
    while (n < max - 1) {
        k = read(fd, text + n, max - 1 - n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) break;
        n += (size_t)k;
    }
    close(fd);
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == ' ')) n--;
    text[n] = 0;
    return k >= 0;
}

bool doctor_read_i64(const char *root, const char *path, int64_t *ret_value)
{
    char text[64], *end;
    if (!doctor_read(root, path, text, sizeof text) || !text[0]) return false;
    errno = 0;
    long long v = strtoll(text, &end, 0);
    if (errno || *end) return false;
    *ret_value = v;
    return true;
}

bool doctor_exists(const char *root, const char *path)
{
    char full[PATH_MAX];
    return (size_t)snprintf(full, sizeof full, "%s%s", root, path) < sizeof full &&
           access(full, F_OK) == 0;
}
