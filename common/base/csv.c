/* csv.c - see csv.h. */
#include "common/base/csv.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int split(char *line, char **ret_fields)
{
    int n = 0;
    line[strcspn(line, "\r\n")] = 0;
    for (char *at = line; n < TD_CSV_MAX_FIELDS; at++) {
        ret_fields[n++] = at;
        at += strcspn(at, ",");
        if (!*at) break;
        *at = 0;
    }
    return n;
}

td_status td_csv_open(const char *path, struct td_csv *ret, struct td_err *err)
{
    *ret = (struct td_csv){0};
    FILE *file = fopen(path, "re");
    return file ? td_csv_start(file, path, ret, err)
                : td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
}

td_status td_csv_start(FILE *file, const char *path, struct td_csv *ret, struct td_err *err)
{
    *ret = (struct td_csv){.file = file};
    snprintf(ret->path, sizeof ret->path, "%s", path);
    if (getline(&ret->line, &ret->line_bytes, ret->file) <= 0)
        return td_fail(err, TD_ERR_INVALID, "%s is empty, need a header line", path);
    ret->line_no = 1;
    ret->header = strdup(ret->line);
    if (!ret->header) return td_fail(err, TD_ERR_NOMEM, "%s: out of memory", path);
    ret->n_columns = split(ret->header, ret->column);
    return TD_OK;
}

td_status td_csv_column(const struct td_csv *c, const char *name, int *ret_index,
                        struct td_err *err)
{
    for (int i = 0; i < c->n_columns; i++)
        if (!strcmp(c->column[i], name)) {
            *ret_index = i;
            return TD_OK;
        }
    return td_fail(err, TD_ERR_INVALID, "%s: line 1 has no column \"%s\"", c->path, name);
}

bool td_csv_next(struct td_csv *c, td_status *ret_status, struct td_err *err)
{
    for (;;) {
        if (*ret_status || getline(&c->line, &c->line_bytes, c->file) <= 0) return false;
        c->line_no++;
        if (c->line[strspn(c->line, " \t\r\n")] == 0) continue;
        c->n_fields = split(c->line, c->field);
        if (c->n_fields >= c->n_columns) return true;
        *ret_status = td_fail(err, TD_ERR_INVALID, "%s: line %d has %d fields, the header has %d",
                              c->path, c->line_no, c->n_fields, c->n_columns);
    }
}

td_status td_csv_f64(const struct td_csv *c, int column, double min, double max, double *ret,
                     struct td_err *err)
{
    char *end;
    double v = strtod(c->field[column], &end);
    if (end == c->field[column] || *end || !(v >= min && v <= max))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: line %d: %s is \"%s\", must be a number from %g to %g", c->path,
                       c->line_no, c->column[column], c->field[column], min, max);
    *ret = v;
    return TD_OK;
}

void td_csv_close(struct td_csv *c)
{
    if (c->file) fclose(c->file);
    free(c->line);
    free(c->header);
    *c = (struct td_csv){0};
}
