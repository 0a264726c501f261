/* tls.c - see tls.h. What was read together is one `set`; a handshake may still use the set before
 * it, so a set lives for KEEP_S more. */
#include "router/http/tls.h"

#include <arpa/inet.h>
#include <gnutls/x509.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/file_stamp.h"
#include "common/base/log.h"
#include "common/base/mem.h"

enum {
    MAX_CERTIFICATE_BYTES = 1 << 20,
    MAX_CHAIN = 16,  /* certificates of one side */
    MAX_NAMES = 256, /* of one certificate */
    KEEP_S = 60,     /* http.c closes a connection whose request is not there after 30 s */
    LOOK_MS = 1000,
    N_FILES = 3,
};

struct set {
    struct set *next; /* older */
    uint64_t over_ns; /* when a newer one came; 0 = in use */
    gnutls_pcert_st certs[MAX_CHAIN];
    unsigned n_certs;
    gnutls_privkey_t key;
    gnutls_x509_trust_list_t trust; /* NULL: no CA */
};

struct http_tls {
    const char *paths[N_FILES]; /* certificate, key, CA or NULL */
    struct td_file_stamp stamps[N_FILES];
    uint64_t hash; /* of the contents that were last tried */
    uint64_t look_ns;
    char *trust;
    pthread_mutex_t lock; /* guards sets: the newest first */
    struct set *sets;
};

struct http_peer {
    atomic_int n_holders;
    size_t n;
    struct peer_name {
        enum td_peer_name_kind kind;
        size_t n_bytes;
        char *bytes;
    } names[];
};

static struct http_tls *the_tls; /* of the process: set before the library starts */

/* ---- files ----------------------------------------------------------------------------------- */

static void set_free(struct set *s)
{
    if (!s) return;
    for (unsigned i = 0; i < s->n_certs; i++) gnutls_pcert_deinit(&s->certs[i]);
    if (s->key) gnutls_privkey_deinit(s->key);
    if (s->trust) gnutls_x509_trust_list_deinit(s->trust, 1);
    free(s);
}

static td_status failed(struct td_err *err, const char *option, const char *path, int e)
{
    return td_fail(err, TD_ERR_INVALID, "%s %.160s: %s", option, path, gnutls_strerror(e));
}

/* Whether the key is the certificate's. */
static int check_pair(const gnutls_datum_t *cert, const gnutls_datum_t *key)
{
    gnutls_certificate_credentials_t pair;
    int e = gnutls_certificate_allocate_credentials(&pair);
    if (e) return e;
    e = gnutls_certificate_set_x509_key_mem(pair, cert, key, GNUTLS_X509_FMT_PEM);
    gnutls_certificate_free_credentials(pair);
    return e < 0 ? e : 0;
}

static td_status set_make(const struct http_tls *t, const gnutls_datum_t texts[N_FILES],
                          struct set **ret_set, struct td_err *err)
{
    struct set *s = calloc(1, sizeof *s);
    if (!s) return td_fail(err, TD_ERR_NOMEM, "no memory for certificates");
    unsigned n = MAX_CHAIN;
    int e = check_pair(&texts[0], &texts[1]);
    if (e) failed(err, "tls_cert, with its key,", t->paths[0], e);
    if (!e &&
        (e = gnutls_pcert_list_import_x509_raw(s->certs, &n, &texts[0], GNUTLS_X509_FMT_PEM, 0)))
        failed(err, "tls_cert", t->paths[0], e);
    if (!e) s->n_certs = n;
    if (!e) e = gnutls_privkey_init(&s->key);
    if (!e && (e = gnutls_privkey_import_x509_raw(s->key, &texts[1], GNUTLS_X509_FMT_PEM, NULL, 0)))
        failed(err, "tls_key", t->paths[1], e);
    if (!e && t->paths[2]) {
        e = gnutls_x509_trust_list_init(&s->trust, 0);
        if (!e)
            e = gnutls_x509_trust_list_add_trust_mem(s->trust, &texts[2], NULL, GNUTLS_X509_FMT_PEM,
                                                     0, 0);
        if (e == 0) e = GNUTLS_E_NO_CERTIFICATE_FOUND;
        if (e < 0) failed(err, "tls_ca", t->paths[2], e);
        if (e > 0) e = 0;
    }
    if (e) {
        set_free(s);
        return TD_ERR_INVALID;
    }
    *ret_set = s;
    return TD_OK;
}

/* The first reading keeps the CA's text for the library. */
static td_status load(struct http_tls *t, struct td_err *err)
{
    char *bytes[N_FILES] = {NULL};
    gnutls_datum_t texts[N_FILES] = {{NULL, 0}};
    struct set *s = NULL;
    td_status st = TD_OK;
    td_file_stamps_take(t->paths, N_FILES, t->stamps); /* before the reading: it is seen again */
    t->hash = td_files_hash(t->paths, N_FILES, MAX_CERTIFICATE_BYTES);
    for (int i = 0; i < N_FILES && !st && t->paths[i]; i++) {
        size_t n = 0;
        st = td_file_read(t->paths[i], MAX_CERTIFICATE_BYTES, &bytes[i], &n, err);
        texts[i] = (gnutls_datum_t){(unsigned char *)bytes[i], (unsigned)n};
    }
    if (!st) st = set_make(t, texts, &s, err);
    if (!st) {
        pthread_mutex_lock(&t->lock);
        s->next = t->sets;
        if (t->sets) t->sets->over_ns = td_now_ns();
        t->sets = s;
        pthread_mutex_unlock(&t->lock);
        if (!t->trust) {
            t->trust = bytes[2];
            bytes[2] = NULL;
        }
    }
    for (int i = 0; i < N_FILES; i++) free(bytes[i]);
    return st;
}

td_status http_tls_open(const char *cert, const char *key, const char *ca,
                        struct http_tls **ret_tls, struct td_err *err)
{
    struct http_tls *t = calloc(1, sizeof *t);
    if (!t) return td_fail(err, TD_ERR_NOMEM, "no memory for TLS");
    TD_ASSERT(!the_tls);
    t->paths[0] = cert;
    t->paths[1] = key;
    t->paths[2] = ca;
    pthread_mutex_init(&t->lock, NULL);
    td_status s = load(t, err);
    if (s) {
        http_tls_close(t);
        return s;
    }
    *ret_tls = the_tls = t;
    return TD_OK;
}

void http_tls_close(struct http_tls *t)
{
    if (!t) return;
    for (struct set *s = t->sets, *next; s; s = next) {
        next = s->next;
        set_free(s);
    }
    if (the_tls == t) the_tls = NULL;
    pthread_mutex_destroy(&t->lock);
    free(t->trust);
    free(t);
}

const char *http_tls_trust(const struct http_tls *t) { return t->trust; }

static void drop_old(struct http_tls *t, uint64_t now_ns)
{
    pthread_mutex_lock(&t->lock);
    for (struct set **at = &t->sets; *at;) {
        struct set *s = *at;
        if (!s->over_ns || now_ns - s->over_ns < KEEP_S * TD_NS_PER_S) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        set_free(s);
    }
    pthread_mutex_unlock(&t->lock);
}

void http_tls_look(struct http_tls *t, uint64_t now_ns)
{
    struct td_file_stamp now[N_FILES];
    struct td_err err = {0};
    char quoted[1100];
    if (!t || now_ns < t->look_ns) return;
    t->look_ns = td_deadline_after_ms(now_ns, LOOK_MS);
    drop_old(t, now_ns);
    td_file_stamps_take(t->paths, N_FILES, now);
    if (td_file_stamps_equal(now, t->stamps, N_FILES)) return;
    if (td_files_hash(t->paths, N_FILES, MAX_CERTIFICATE_BYTES) == t->hash) {
        memcpy(t->stamps, now, sizeof now);
        return;
    }
    if (load(t, &err))
        td_warn("http_tls_reload_failed", "action=keep_old err=%s",
                td_log_quote(quoted, sizeof quoted, err.msg));
    else
        td_info("http_tls_reloaded", "file=%s", t->paths[0]);
}

int http_tls_retrieve(gnutls_session_t session, const struct gnutls_cert_retr_st *info,
                      gnutls_pcert_st **ret_certs, unsigned *ret_n, gnutls_ocsp_data_st **ret_ocsp,
                      unsigned *ret_n_ocsp, gnutls_privkey_t *ret_key, unsigned *ret_flags)
{
    (void)session;
    (void)info;
    pthread_mutex_lock(&the_tls->lock);
    struct set *s = the_tls->sets;
    pthread_mutex_unlock(&the_tls->lock);
    *ret_certs = s->certs;
    *ret_n = s->n_certs;
    *ret_key = s->key;
    *ret_ocsp = NULL;
    *ret_n_ocsp = 0;
    *ret_flags = 0; /* they stay ours */
    return 0;
}

/* ---- clients --------------------------------------------------------------------------------- */

struct http_peer *http_peer_ref(struct http_peer *p)
{
    if (p) atomic_fetch_add(&p->n_holders, 1);
    return p;
}

void http_peer_drop(struct http_peer *p)
{
    if (!p || atomic_fetch_sub(&p->n_holders, 1) > 1) return;
    for (size_t i = 0; i < p->n; i++) free(p->names[i].bytes);
    free(p);
}

bool http_peer_is(const struct http_peer *p, const struct td_peer_names *names)
{
    for (size_t i = 0; i < p->n; i++)
        if (td_peer_names_match(names, p->names[i].kind, p->names[i].bytes, p->names[i].n_bytes))
            return true;
    return false;
}

/* Adds the name if it is of a kind that members have; false: no memory. */
static bool add_name(struct http_peer *p, int type, const char *value, size_t n)
{
    char text[INET6_ADDRSTRLEN];
    struct peer_name *to = &p->names[p->n];
    if (type == GNUTLS_SAN_DNSNAME) {
        to->kind = TD_PEER_NAME_DNS;
    } else if (type == GNUTLS_SAN_URI) {
        to->kind = TD_PEER_NAME_URI;
    } else if (type == GNUTLS_SAN_IPADDRESS && (n == 4 || n == 16) &&
               inet_ntop(n == 4 ? AF_INET : AF_INET6, value, text, sizeof text)) {
        to->kind = TD_PEER_NAME_IP;
        value = text;
        n = strlen(text);
    } else {
        return true;
    }
    to->bytes = malloc(n + 1);
    if (!to->bytes) return false;
    memcpy(to->bytes, value, n);
    to->bytes[n] = 0;
    to->n_bytes = n;
    p->n++;
    return true;
}

static struct http_peer *read_names(gnutls_x509_crt_t crt)
{
    struct http_peer *p = calloc(1, sizeof *p + MAX_NAMES * sizeof p->names[0]);
    if (!p) return NULL;
    atomic_store(&p->n_holders, 1);
    for (unsigned i = 0; i < MAX_NAMES; i++) {
        char value[4096];
        size_t n = sizeof value;
        int type = gnutls_x509_crt_get_subject_alt_name(crt, i, value, &n, NULL);
        if (type == GNUTLS_E_REQUESTED_DATA_NOT_AVAILABLE) break;
        if (type < 0) continue; /* longer than any pattern, or of another kind */
        if (!add_name(p, type, value, n)) {
            http_peer_drop(p);
            return NULL;
        }
    }
    return p;
}

static bool is_trusted(struct http_tls *t, gnutls_x509_crt_t *crts, unsigned n)
{
    gnutls_typed_vdata_st purpose = {.type = GNUTLS_DT_KEY_PURPOSE_OID,
                                     .data = (unsigned char *)(uintptr_t)GNUTLS_KP_TLS_WWW_CLIENT};
    unsigned status = 0;
    pthread_mutex_lock(&t->lock);
    int e =
        gnutls_x509_trust_list_verify_crt2(t->sets->trust, crts, n, &purpose, 1, 0, &status, NULL);
    pthread_mutex_unlock(&t->lock);
    return e == 0 && status == 0;
}

struct http_peer *http_tls_peer(struct http_tls *t, gnutls_session_t session, const char **why)
{
    unsigned n_shown = 0, n = 0;
    gnutls_x509_crt_t crts[MAX_CHAIN];
    const gnutls_datum_t *shown = gnutls_certificate_get_peers(session, &n_shown);
    struct http_peer *p = NULL;
    *why = "this port asks for a certificate that tls_ca has signed; the client showed none";
    if (!shown || !n_shown) return NULL;
    *why = "the client's certificate is not one that tls_ca has signed for clients, or its time is "
           "over";
    for (; n < n_shown && n < MAX_CHAIN; n++) {
        if (gnutls_x509_crt_init(&crts[n])) break;
        if (gnutls_x509_crt_import(crts[n], &shown[n], GNUTLS_X509_FMT_DER)) {
            gnutls_x509_crt_deinit(crts[n]);
            break;
        }
    }
    if (n && n == n_shown && is_trusted(t, crts, n)) p = read_names(crts[0]);
    for (unsigned i = 0; i < n; i++) gnutls_x509_crt_deinit(crts[i]);
    return p;
}
