/* api_key.h - a tenant's key from a file, as a client sends it (docs/tenants.md). */
#ifndef TD_BASE_API_KEY_H
#define TD_BASE_API_KEY_H

#include "common/base/status.h"

#define TD_API_KEY_MAX_CHARS 512
#define TD_AUTHORIZATION_MAX (TD_API_KEY_MAX_CHARS + sizeof "Bearer ")

/* Writes "Bearer KEY", the value of the metadata or HTTP header "authorization". The key is the
 * file's first line: 1 to 512 printable ASCII characters without spaces, as metadata requires.
 * Errors: TD_ERR_IO, TD_ERR_INVALID. The message names the file and never any of its bytes. */
td_status td_api_key_read(const char *path, char ret_authorization[TD_AUTHORIZATION_MAX],
                          struct td_err *err);

#endif
