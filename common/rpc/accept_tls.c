/* accept_tls.c - replaces the SSL_read that core calls, because with TLS the bytes of HTTP/2 are
 * visible only where core takes them out of OpenSSL. Only the server's side of connections that
 * agreed on h2 is checked; KV ports speak no HTTP/2.
 *
 * The reader lives in the SSL object's ex_data and is freed with it. */
#ifdef TD_HAVE_OPENSSL

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/accept.h"
#include "common/rpc/rpc_internal.h"

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static int (*g_real_read)(SSL *ssl, void *buf, int n);
static int g_index = -1;

static void free_reader(void *parent, void *ptr, CRYPTO_EX_DATA *ad, int idx, long argl, void *argp)
{
    (void)parent;
    (void)ad;
    (void)idx;
    (void)argl;
    (void)argp;
    if (!ptr) return;
    td_rpc_reader_forget(ptr);
    free(ptr);
}

static void start(void)
{
    void *found = dlsym(RTLD_NEXT, "SSL_read");
    TD_ASSERT(found != NULL);
    /* ISO C has no cast from an object pointer to a function pointer */
    memcpy(&g_real_read, &found, sizeof g_real_read);
    g_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, free_reader);
}

static struct td_rpc_reader *reader_of(SSL *ssl)
{
    struct td_rpc_reader *reader = SSL_get_ex_data(ssl, g_index);
    const unsigned char *name = NULL;
    unsigned n = 0;
    if (reader || g_index < 0 || !SSL_is_server(ssl)) return reader;
    SSL_get0_alpn_selected(ssl, &name, &n);
    if (n != 2 || memcmp(name, "h2", 2) != 0) return NULL;
    reader = td_rpc_alloc(sizeof *reader);
    reader->fd = -1;
    uint8_t random[TD_RPC_RANDOM_BYTES];
    if (SSL_get_client_random(ssl, random, sizeof random) == sizeof random)
        td_rpc_reader_find_guard(reader, random);
    if (SSL_set_ex_data(ssl, g_index, reader)) return reader;
    free(reader);
    return NULL;
}

/* As in accept.c, only the symbol has that name. */
int td_rpc_ssl_read(SSL *ssl, void *buf, int n) __asm__("SSL_read");
__attribute__((visibility("default"))) int td_rpc_ssl_read(SSL *ssl, void *buf, int n)
{
    pthread_once(&g_once, start);
    int got = g_real_read(ssl, buf, n);
    if (got <= 0) return got;
    struct td_rpc_reader *reader = reader_of(ssl);
    if (!reader || td_rpc_reader_take(reader, buf, (size_t)got)) return got;
    ERR_raise(ERR_LIB_SSL, ERR_R_OPERATION_FAIL); /* SSL_get_error now says SSL_ERROR_SSL, and
                                                     core ends the connection */
    return -1;
}

/* server.c refers to it, so that the linker takes this file out of the archive. */
int td_rpc_tls_is_guarded(void) { return 1; }

#else

#include "common/rpc/accept.h"

int td_rpc_tls_is_guarded(void) { return 0; }

#endif
