/* large_hello.c - preloaded into a daemon, makes the ClientHello of its own port check larger
 * than one TCP segment, as a later OpenSSL would: ten more protocols are offered. Says on stderr
 * how large it is, and each time that it is sent. */
#include <dlfcn.h>
#include <openssl/ssl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { N_PROTOCOLS = 10, PROTOCOL_BYTES = 200, MIN_BYTES = 2000 };

static atomic_int n_sent;

__attribute__((visibility("default"))) int
SSL_set_alpn_protos(SSL *ssl, const unsigned char *protos, unsigned n)
{
    unsigned char all[256 + N_PROTOCOLS * (1 + PROTOCOL_BYTES)];
    int (*real)(SSL *, const unsigned char *, unsigned);
    void *found = dlsym(RTLD_NEXT, "SSL_set_alpn_protos");
    memcpy(&real, &found, sizeof real);
    if (n > 256) return real(ssl, protos, n);
    memcpy(all, protos, n);
    for (int i = 0; i < N_PROTOCOLS; i++) {
        all[n++] = PROTOCOL_BYTES;
        memset(all + n, 'a' + i, PROTOCOL_BYTES);
        n += PROTOCOL_BYTES;
    }
    return real(ssl, all, n);
}

__attribute__((visibility("default"))) ssize_t send(int fd, const void *bytes, size_t n, int flags)
{
    ssize_t (*real)(int, const void *, size_t, int);
    void *found = dlsym(RTLD_NEXT, "send");
    memcpy(&real, &found, sizeof real);
    if (n > MIN_BYTES && *(const unsigned char *)bytes == 22) /* a handshake record */
        fprintf(stderr, "large hello: number %d, %zu bytes\n", atomic_fetch_add(&n_sent, 1) + 1, n);
    return real(fd, bytes, n, flags);
}
