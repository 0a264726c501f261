/* traceparent_fuzz.c - a caller's traceparent, from hostile bytes: what is taken has an id of each
 * kind, and is what is written again from it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/status.h"
#include "common/base/traceparent.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1), again[64];
    struct td_traceparent t;
    TD_ASSERT(text);
    memcpy(text, data, n_bytes);
    text[n_bytes] = '\0';
    if (td_traceparent_parse(text, &t)) {
        size_t n = 3; /* behind the version */
        for (size_t i = 0; i < sizeof t.trace_id; i++)
            n += (size_t)snprintf(again + n, sizeof again - n, "%02x", t.trace_id[i]);
        TD_ASSERT(memcmp(text + 3, again + 3, n - 3) == 0 && text[n++] == '-');
        for (size_t i = 0; i < sizeof t.parent_id; i++)
            n += (size_t)snprintf(again + n, sizeof again - n, "%02x", t.parent_id[i]);
        TD_ASSERT(memcmp(text + 36, again + 36, n - 36) == 0 && text[n] == '-');
    }
    free(text);
    return 0;
}
