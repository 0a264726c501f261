/* doctor_cluster.c - the router and each worker it lists. */
#include "cli/doctor.h"

void doctor_cluster(struct doctor_report *r, const struct doctor_config *c)
{
    doctor_add(r, "cluster", DOCTOR_FAIL, "router", "%s: not checked yet", c->at.server);
}
