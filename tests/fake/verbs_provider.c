/* verbs_provider.c - makes verbs_fake.c a library that a program loads in place of libibverbs
 * (common/transfer/rdma/verbs.h). */
#include "tests/fake/verbs_fake.h"

td_status td_verbs_provider(const struct td_verbs **ret_verbs, struct td_err *err);

__attribute__((visibility("default"))) td_status
td_verbs_provider(const struct td_verbs **ret_verbs, struct td_err *err)
{
    return td_verbs_fake_from_env(ret_verbs, err);
}
