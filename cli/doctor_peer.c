/* doctor_peer.c - KV paths between two machines, measured. */
#include "cli/doctor.h"

void doctor_listen(struct doctor_report *r, const struct doctor_config *c, bool has_rdma)
{
    (void)has_rdma;
    doctor_add(r, "peer", DOCTOR_FAIL, "listen", "%s: not done yet", c->listen);
}

void doctor_peer(struct doctor_report *r, const struct doctor_config *c, bool has_rdma)
{
    (void)has_rdma;
    doctor_add(r, "peer", DOCTOR_FAIL, "peer", "%s: not done yet", c->peer);
}
