/* csv.h - reads plain CSV files line by line. Quotes are not understood, because the traces have
 * none. Errors name file, line and field. For cold paths only. */
#ifndef TD_BASE_CSV_H
#define TD_BASE_CSV_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

#define TD_CSV_MAX_FIELDS 128

struct td_csv {
    FILE *file;
    char path[256], *line, *header;
    size_t line_bytes;
    int line_no, n_fields, n_columns;
    char *field[TD_CSV_MAX_FIELDS], *column[TD_CSV_MAX_FIELDS];
};

/* Reads the header line. Afterwards, and after an error, td_csv_close. */
td_status td_csv_open(const char *path, struct td_csv *ret_csv, struct td_err *err);
/* The same of a file that is open: td_csv_close closes it. path: for messages. */
td_status td_csv_start(FILE *file, const char *path, struct td_csv *ret_csv, struct td_err *err);
td_status td_csv_column(const struct td_csv *csv, const char *name, int *ret_index,
                        struct td_err *err);
/* The next row into csv->field[]; false at the end, or with *ret_status set when a row has too
 * few fields. Empty lines are skipped. */
bool td_csv_next(struct td_csv *csv, td_status *ret_status, struct td_err *err);
td_status td_csv_f64(const struct td_csv *csv, int column, double min, double max, double *ret,
                     struct td_err *err);
void td_csv_close(struct td_csv *csv);

#endif
