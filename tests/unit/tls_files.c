/* tls_files.c - see tls_files.h. */
#include "tests/unit/tls_files.h"

#ifdef TD_HAVE_OPENSSL

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include <openssl/pem.h>
#include <openssl/x509v3.h>

static char dir[64];

void tls_files_open(void)
{
    snprintf(dir, sizeof dir, "/tmp/tandem_tls_test.XXXXXX");
    assert_non_null(mkdtemp(dir));
}

int tls_files_close(void) { return rmdir(dir); }

const char *tls_files_in(const char *name)
{
    static char paths[16][128];
    static unsigned turn;
    char *path = paths[turn++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static void extend(X509 *cert, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX ctx;
    X509V3_set_ctx(&ctx, issuer, cert, NULL, NULL, 0);
    X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
    assert_non_null(e);
    assert_int_equal(X509_add_ext(cert, e, -1), 1);
    X509_EXTENSION_free(e);
}

struct tls_files_id tls_files_make(const struct tls_files_id *issuer,
                                   const struct tls_files_make *m)
{
    static long serial = 1;
    struct tls_files_id id = {X509_new(), EVP_EC_gen("P-256")};
    assert_non_null(id.key);
    X509_set_version(id.cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(id.cert), serial++);
    X509_gmtime_adj(X509_getm_notBefore(id.cert), m->from_s ? m->from_s : -60);
    X509_gmtime_adj(X509_getm_notAfter(id.cert), m->to_s ? m->to_s : 3600);
    X509_set_pubkey(id.cert, id.key);
    X509_NAME *subject = X509_get_subject_name(id.cert);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, (const unsigned char *)m->name, -1, -1,
                               0);
    X509 *by = issuer ? issuer->cert : id.cert;
    X509_set_issuer_name(id.cert, X509_get_subject_name(by));
    extend(id.cert, by, NID_basic_constraints, m->ca ? "critical,CA:TRUE" : "CA:FALSE");
    if (m->ca) extend(id.cert, by, NID_key_usage, "critical,keyCertSign,cRLSign");
    if (m->alt) extend(id.cert, by, NID_subject_alt_name, m->alt);
    if (m->usage) extend(id.cert, by, NID_ext_key_usage, m->usage);
    assert_true(X509_sign(id.cert, issuer ? issuer->key : id.key, EVP_sha256()) > 0);
    char name[64];
    snprintf(name, sizeof name, "%s.crt", m->name);
    FILE *f = fopen(tls_files_in(name), "we");
    assert_non_null(f);
    assert_int_equal(PEM_write_X509(f, id.cert), 1);
    fclose(f);
    snprintf(name, sizeof name, "%s.key", m->name);
    f = fopen(tls_files_in(name), "we");
    assert_non_null(f);
    assert_int_equal(PEM_write_PrivateKey(f, id.key, NULL, NULL, 0, NULL, NULL), 1);
    fclose(f);
    return id;
}

void tls_files_free(struct tls_files_id *id)
{
    X509_free(id->cert);
    EVP_PKEY_free(id->key);
}

#else

const char *tls_files_in(const char *name) { return name; }

#endif
