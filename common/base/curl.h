/* curl.h - libcurl, loaded at run time and never linked: no program starts slower for it, or needs
 * it, before it is asked to speak HTTP. Without libcurl's headers (TD_HAVE_CURL is not defined) a
 * user of this file says that it was built without them.
 *
 * Functions are called as curl->p_NAME(...): a name of its own keeps the header's type-checking
 * macros away. */
#ifndef TD_BASE_CURL_H
#define TD_BASE_CURL_H

#ifdef TD_HAVE_CURL
#include <curl/curl.h>

#include "common/base/status.h"
#include "common/base/symbols.h"

#define TD_CURL_SYMBOLS(X)                                                                         \
    X(curl_global_init, NULL, true)                                                                \
    X(curl_easy_init, NULL, true)                                                                  \
    X(curl_easy_cleanup, NULL, true)                                                               \
    X(curl_easy_setopt, NULL, true)                                                                \
    X(curl_easy_getinfo, NULL, true)                                                               \
    X(curl_easy_perform, NULL, true)                                                               \
    X(curl_easy_strerror, NULL, true)                                                              \
    X(curl_slist_append, NULL, true)                                                               \
    X(curl_slist_free_all, NULL, true)                                                             \
    X(curl_multi_init, NULL, true)                                                                 \
    X(curl_multi_cleanup, NULL, true)                                                              \
    X(curl_multi_setopt, NULL, true)                                                               \
    X(curl_multi_assign, NULL, true)                                                               \
    X(curl_multi_add_handle, NULL, true)                                                           \
    X(curl_multi_remove_handle, NULL, true)                                                        \
    X(curl_multi_perform, NULL, true)                                                              \
    X(curl_multi_poll, NULL, true)                                                                 \
    X(curl_multi_wakeup, NULL, true)                                                               \
    X(curl_multi_socket_action, NULL, true)                                                        \
    X(curl_multi_info_read, NULL, true)

struct td_curl {
    TD_CURL_SYMBOLS(TD_SYMBOL_MEMBER)
};

/* The library's functions, at *ret_curl for good; loaded by the first call. The error begins with
 * `what`, the option that asks for it. Any thread. TD_ERR_UNSUPPORTED. */
td_status td_curl_load(const char *what, const struct td_curl **ret_curl, struct td_err *err);
#endif

#endif
