/* verbs.c - which library's RDMA devices this process has, and the names of completions. */
#include "common/transfer/rdma/verbs.h"

#include <dlfcn.h>
#include <stdlib.h>

td_status td_verbs_load(const struct td_verbs **ret_verbs, struct td_err *err)
{
    const char *path = getenv("TANDEM_VERBS_LIBRARY");
    if (!path || !path[0]) return td_verbs_load_libibverbs(ret_verbs, err);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* for good: it may start threads */
    if (!handle)
        return td_fail(err, TD_ERR_UNSUPPORTED, "TANDEM_VERBS_LIBRARY cannot be loaded: %s",
                       dlerror());
    td_verbs_provider_fn *provider;
    *(void **)&provider = dlsym(handle, "td_verbs_provider");
    if (provider) return provider(ret_verbs, err);
    dlclose(handle);
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "TANDEM_VERBS_LIBRARY is %s, which exports no td_verbs_provider", path);
}

const char *td_vb_wc_status_name(enum td_vb_wc_status status)
{
#define NAME(name, ibv, text) text,
    static const char *const names[TD_VB_WC_N_STATUSES] = {TD_VB_WC_STATUSES(NAME)};
    return (unsigned)status < TD_VB_WC_N_STATUSES ? names[status] : "unknown status";
}
