/* tenants_fuzz.c - a file of tenants, and then a caller: the text behind a NUL is its
 * authorization. What is accepted can be asked; what is refused has a message. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "router/tenants.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static bool always(void *arg, const struct td_peer_names *names)
{
    (void)arg;
    td_peer_names_match(names, TD_PEER_NAME_DNS, "a.example", 9);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const struct td_core_config classes = {
        .n_classes = 2, .classes = {{.name = "default"}, {.name = "gold"}}};
    const uint8_t *nul = n_bytes ? memchr(data, 0, n_bytes) : NULL;
    size_t n = nul ? (size_t)(nul - data) : n_bytes, n_rest = nul ? n_bytes - n - 1 : 0;
    struct router_tenants *t = NULL;
    struct td_err err = {0};
    td_status s = router_tenants_parse((const char *)data, n, "fuzz", &classes, &t, &err);
    TD_ASSERT(s == TD_OK ? t != NULL : t == NULL && err.code == s && err.msg[0]);
    if (s) return 0;
    char *text = calloc(1, n_rest + 1);
    TD_ASSERT(text);
    if (n_rest) memcpy(text, nul + 1, n_rest);
    for (int i = 0; i < 4; i++) {
        const struct router_tenant *who = NULL;
        struct router_caller c = {.authorization = i & 1 ? text : NULL,
                                  .claimed = "",
                                  .certificate_is = i & 2 ? always : NULL};
        err = (struct td_err){0};
        enum router_tenant_verdict v = router_tenant_of(t, &c, &who, &err);
        TD_ASSERT((v == ROUTER_TENANT_OK) == (who != NULL) && (who || err.msg[0]));
        TD_ASSERT(!who || (who->name[0] && who->weight > 0 && who->classes &&
                           who->classes >> who->first_class & 1));
    }
    free(text);
    router_tenants_free(t);
    return 0;
}
