/* api_key.c - reads and checks the first line of a key file. */
#include "common/base/api_key.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

td_status td_api_key_read(const char *path, char ret_authorization[TD_AUTHORIZATION_MAX],
                          struct td_err *err)
{
    /* room for one character too many and the line's end, so that a key that is too long is
     * noticed */
    char line[TD_API_KEY_MAX_CHARS + 8];
    FILE *f = fopen(path, "r");
    if (!f) return td_fail(err, TD_ERR_IO, "api_key_file %s: %s", path, strerror(errno));
    bool got = fgets(line, sizeof line, f) != NULL;
    fclose(f);
    size_t n = got ? strcspn(line, "\r\n") : 0;
    if (n < 1 || n > TD_API_KEY_MAX_CHARS)
        return td_fail(err, TD_ERR_INVALID,
                       "api_key_file %s: its first line must have 1..%d characters", path,
                       TD_API_KEY_MAX_CHARS);
    for (size_t i = 0; i < n; i++)
        if (line[i] <= ' ' || line[i] > '~')
            return td_fail(err, TD_ERR_INVALID,
                           "api_key_file %s: character %zu of the key is not a printable ASCII "
                           "character",
                           path, i + 1);
    snprintf(ret_authorization, TD_AUTHORIZATION_MAX, "Bearer %.*s", (int)n, line);
    return TD_OK;
}
