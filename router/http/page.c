/* page.c - GET /: a playground and the cluster as it is, one file without outside resources.
 *
 * Its sources are in router/http/page; the build joins them and embeds the bytes (embed.cmake). The
 * page asks only the paths that every client has, with the key that its user gives. Its script and
 * its style are named by a nonce that is drawn for each answer, and the policy allows no others:
 * text that found its way into the page could run nothing, load nothing and send nothing away. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/entropy.h"
#include "router/http/call.h"

/* page_bytes.c, which the build makes */
extern const unsigned char router_page_bytes[];
extern const size_t router_page_n_bytes;

#define NONCE_MARK "@NONCE@"

/* The page with the nonce in its places. */
static void fill_page(struct text_buffer *text, const char *nonce)
{
    const char *at = (const char *)router_page_bytes, *end = at + router_page_n_bytes;
    for (;;) {
        const char *mark = memmem(at, (size_t)(end - at), NONCE_MARK, strlen(NONCE_MARK));
        text_add(text, at, (size_t)((mark ? mark : end) - at));
        if (!mark) return;
        text_add(text, nonce, strlen(nonce));
        at = mark + strlen(NONCE_MARK);
    }
}

enum MHD_Result http_page_answer(struct http_call *c)
{
    struct text_buffer text = {0};
    uint64_t random[2];
    char nonce[40], policy[400];
    if (!c->http->config.page)
        return http_call_answer_error(c, MHD_HTTP_NOT_FOUND,
                                      "GET / is not served here: this router has --page off", "");
    td_random_fill(random, sizeof random);
    snprintf(nonce, sizeof nonce, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    snprintf(policy, sizeof policy,
             "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; "
             "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
             nonce, nonce);
    fill_page(&text, nonce);
    enum MHD_Result res = http_call_answer_page(c, &text, policy);
    text_free(&text);
    return res;
}
