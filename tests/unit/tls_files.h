/* tls_files.h - certificates made for a test, as PEM files in a folder of its own. Only with
 * OpenSSL (TD_HAVE_OPENSSL), but for tls_files_in. */
#ifndef TLS_FILES_H
#define TLS_FILES_H

#include <stdbool.h>

struct tls_files_id {
    struct x509_st *cert;
    struct evp_pkey_st *key;
};

struct tls_files_make {
    const char *name, *alt, *usage; /* subjectAltName, extendedKeyUsage; NULL = none */
    bool ca;
    int from_s, to_s; /* validity from now; 0, 0 = an hour */
};

void tls_files_open(void);                  /* makes the folder */
int tls_files_close(void);                  /* removes it; whoever made files has removed
                                               them */
const char *tls_files_in(const char *name); /* its path there; good for 15 more calls */
/* Writes NAME.crt and NAME.key; issuer NULL = self-signed. */
struct tls_files_id tls_files_make(const struct tls_files_id *issuer,
                                   const struct tls_files_make *m);
void tls_files_free(struct tls_files_id *id);

#endif
