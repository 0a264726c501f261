/* curl.c - see curl.h. */
#include "common/base/curl.h"

#ifdef TD_HAVE_CURL
#include <pthread.h>
#include <stdio.h>

static struct td_curl lib; /* written once, under `once` */
static char why_not[200];  /* "" = loaded */

static void load(void)
{
    const char *missing = NULL;
    /* for good: TLS libraries do not like to be unloaded */
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why_not, sizeof why_not, "cannot be loaded (package libcurl4): %s", dlerror());
        return;
    }
    TD_CURL_SYMBOLS(TD_SYMBOL_FIND)
    if (missing)
        snprintf(why_not, sizeof why_not, "has no %s", missing);
    else if (lib.p_curl_global_init(CURL_GLOBAL_DEFAULT))
        snprintf(why_not, sizeof why_not, "cannot be started");
}

td_status td_curl_load(const char *what, const struct td_curl **ret_curl, struct td_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    if (why_not[0]) return td_fail(err, TD_ERR_UNSUPPORTED, "%s: libcurl.so.4 %s", what, why_not);
    *ret_curl = &lib;
    return TD_OK;
}
#endif
