/* kserve_http.h - the paths under /v2 of the HTTP door: what router/http/call.c knows of them.
 *
 * Threads: kserve_http_find and kserve_http_free on any; kserve_http_forget_request on the loop's;
 * the others under the door's lock. */
#ifndef TD_ROUTER_KSERVE_HTTP_H
#define TD_ROUTER_KSERVE_HTTP_H

#include <stdbool.h>

#include "router/http/text_buffer.h"
#include "tandem/v1/inference.pb-c.h"

struct http_route;
struct kserve_http; /* of one call */

/* Whether errors and answers of this path have KServe's forms. */
bool kserve_http_has(const char *path);
/* The route of such a path, or NULL and *ret_status, with the method that it has at 405.
 * *ret_kserve, freed by kserve_http_free, is set in both cases; NULL: no memory. */
const struct http_route *kserve_http_find(const char *path, const char *method,
                                          struct kserve_http **ret_kserve, unsigned *ret_status,
                                          const char **ret_allowed);
void kserve_http_free(struct kserve_http *k); /* NULL is fine */
/* What was asked is not looked at any more; of a call without a request, or NULL, nothing. */
void kserve_http_forget_request(struct kserve_http *k);
/* Appends what can be sent of the answer now. */
void kserve_http_add(struct kserve_http *k, const Tandem__V1__GenerateResponse *m,
                     struct text_buffer *out);
/* {"error": message} */
void kserve_http_error(struct text_buffer *out, const char *message);

#endif
