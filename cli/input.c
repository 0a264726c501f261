/* input.c - reads a whole stream as one text, for commands that read stdin. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

td_status cli_read_all(FILE *f, char **ret_text, size_t *ret_bytes, struct td_err *err)
{
    size_t capacity = 1 << 16, n = 0, got;
    char *text = malloc(capacity);
    while (text && (got = fread(text + n, 1, capacity - n - 1, f)) > 0) {
        n += got;
        if (capacity - n >= 2) continue;
        char *grown = capacity <= SIZE_MAX / 2 ? realloc(text, capacity *= 2) : NULL;
        if (!grown) free(text);
        text = grown;
    }
    if (!text)
        return td_fail(err, TD_ERR_NOMEM, "no memory for an input of more than %zu bytes", n);
    if (ferror(f)) {
        free(text);
        return td_fail(err, TD_ERR_IO, "reading the input: %s", strerror(errno));
    }
    text[n] = 0;
    *ret_text = text;
    *ret_bytes = n;
    return TD_OK;
}
