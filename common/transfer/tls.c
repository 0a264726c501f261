/* tls.c - TLS 1.3 over a non-blocking socket with OpenSSL.
 *
 * Out: the caller's iov (gathered in staging[] where a record takes several pieces); SSL_write
 * seals one record; the write half of a filter BIO puts it into out[]; send(2). The filter takes
 * any record at once (3), so SSL_write never asks to be repeated, and OpenSSL's rules for repeated
 * writes (same bytes, same length, memory that must stay) never apply: a byte is counted when it is
 * sealed. The filter is also where MSG_NOSIGNAL comes in: OpenSSL's socket BIO calls write(2). In:
 * that BIO reads ahead, so one system call brings several records; they are opened in OpenSSL's
 * buffer and copied to the caller.
 *
 * States: HANDSHAKE --td_tls_handshake--> OPEN; any --broken()--> BROKEN (errno and reason are
 * kept, every call answers them).
 * Invariants: (1) out[out_at, out_at + out_used) is exactly what has been sealed and not taken;
 * (2) SSL_write is called in OPEN only, with at most one record of bytes; (3) and only when
 * out[] has room for it, for a change of keys and for an alert; (4) rx_dry: the last read found no
 * whole record, so that nothing can be read before the socket is readable again. */
#include "common/transfer/tls.h"

#ifdef TD_HAVE_OPENSSL

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "common/base/file_stamp.h"
#include "common/base/mem.h"
#include "common/base/min.h"

enum {
    RECORD_BYTES = 16384,              /* plaintext of one record (RFC 8446, 5.1) */
    RECORD_ROOM = RECORD_BYTES + 1024, /* a sealed one, a KeyUpdate before it and an alert */
    READ_BYTES = 65536,
    CALL_BYTES = 1 << 20,
    MAX_PEM_BYTES = 1 << 20,
    N_FILES = 3,
};
#define REKEY_RECORDS (1ull << 23)
#define REKEY_RECORDS_MAX (1ull << 24) /* RFC 8446, 5.5: 2^24.5 */
_Static_assert(TD_TLS_OUT_BYTES >= 2 * RECORD_ROOM, "one record under way, one being sealed");

/* AES-128-GCM first: with AES-NI the fastest by far, and as safe as the others. */
static const char *const CIPHERS =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
static const char *const FILE_NAMES[N_FILES] = {"cert_file", "key_file", "ca_file"};

struct td_xfer_tls {
    pthread_mutex_t mu;
    char *paths[N_FILES], *peer_name;
    const struct td_peer_names *peer_names; /* NULL: any; unchanging */
    uint64_t rekey_records;
    SSL_CTX *ctx;                        /* mu: the pointer; what it points to never changes */
    struct td_file_stamp tried[N_FILES]; /* mu */
    uint64_t tried_hash;                 /* mu: of the contents */
};

enum tls_state { TLS_HANDSHAKE = 0, TLS_OPEN, TLS_BROKEN };

struct td_xfer_tls_conn {
    SSL *ssl;
    const struct td_peer_names *peer_names;
    int fd;
    enum tls_state state;
    bool ended, said_bye; /* close_notify came; went */
    bool rx_dry;
    int broken_errno, send_errno;      /* send_errno: what the last send(2) failed with */
    uint64_t n_records, rekey_records; /* sealed since the keys are new */
    char refused[256];                 /* what is wrong with the peer's certificate */
    char reason[320];
    size_t out_at, out_used;
    uint8_t out[TD_TLS_OUT_BYTES];
    uint8_t staging[RECORD_BYTES];
};

/* --- sealed bytes to the socket --------------------------------------------------------------- */

/* 0: nothing is left; -1 with errno (kept in send_errno when it is not EAGAIN). */
static int flush_out(struct td_xfer_tls_conn *c)
{
    while (c->out_used) {
        ssize_t k = send(c->fd, c->out + c->out_at, c->out_used, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            if (errno == EWOULDBLOCK) errno = EAGAIN;
            if (errno != EAGAIN) c->send_errno = errno;
            return -1;
        }
        c->out_at += (size_t)k;
        c->out_used -= (size_t)k;
    }
    c->out_at = 0;
    return 0;
}

static bool out_has_room(struct td_xfer_tls_conn *c, size_t n)
{
    if (sizeof c->out - c->out_at - c->out_used >= n) return true;
    if (sizeof c->out - c->out_used < n) return false;
    memmove(c->out, c->out + c->out_at, c->out_used);
    c->out_at = 0;
    return true;
}

static int filter_write(BIO *bio, const char *data, size_t n, size_t *ret_n)
{
    struct td_xfer_tls_conn *c = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    size_t want = td_min_u64(n, RECORD_ROOM);
    if (!out_has_room(c, want)) {
        if (flush_out(c) && errno != EAGAIN) return 0;
        if (!out_has_room(c, want)) {
            BIO_set_retry_write(bio);
            return 0;
        }
    }
    memcpy(c->out + c->out_at + c->out_used, data, want);
    c->out_used += want;
    *ret_n = want;
    return 1;
}

static int filter_read(BIO *bio, char *data, size_t n, size_t *ret_n)
{
    BIO_clear_retry_flags(bio);
    int r = BIO_read_ex(BIO_next(bio), data, n, ret_n);
    BIO_copy_next_retry(bio);
    return r;
}

static long filter_ctrl(BIO *bio, int command, long number, void *pointer)
{
    struct td_xfer_tls_conn *c = BIO_get_data(bio);
    if (command != BIO_CTRL_FLUSH) return BIO_ctrl(BIO_next(bio), command, number, pointer);
    BIO_clear_retry_flags(bio);
    if (c->state != TLS_HANDSHAKE) return 1; /* out[] keeps it and the caller knows of it */
    if (flush_out(c) == 0) return 1;
    if (errno == EAGAIN) BIO_set_retry_write(bio);
    return -1;
}

static pthread_once_t filter_once = PTHREAD_ONCE_INIT;
static BIO_METHOD *filter_method; /* for the life of the process; NULL: no memory */

static void filter_init(void)
{
    BIO_METHOD *m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_FILTER, "td_tls");
    if (!m) return;
    if (!BIO_meth_set_write_ex(m, filter_write) || !BIO_meth_set_read_ex(m, filter_read) ||
        !BIO_meth_set_ctrl(m, filter_ctrl)) {
        BIO_meth_free(m);
        return;
    }
    filter_method = m;
}

/* --- certificates ----------------------------------------------------------------------------- */

/* A key with a password would otherwise ask the terminal. */
static int no_password(char *buf, int size, int writing, void *asked)
{
    (void)buf, (void)size, (void)writing;
    *(bool *)asked = true;
    return -1;
}

/* The oldest error in the queue, which is the cause. Empties the queue. */
static const char *openssl_says(void)
{
    unsigned long e = ERR_get_error();
    const char *text = e ? ERR_reason_error_string(e) : NULL;
    ERR_clear_error();
    return text ? text : "unknown error of OpenSSL";
}

static td_status pem_open(const struct td_xfer_tls *tls, int file, char **ret_text, BIO **ret_bio,
                          struct td_err *err)
{
    size_t n;
    td_status status = td_file_read(tls->paths[file], MAX_PEM_BYTES, ret_text, &n, err);
    if (status) return td_err_prefix(err, "tls: %s", FILE_NAMES[file]), status;
    *ret_bio = BIO_new_mem_buf(*ret_text, (int)n);
    if (*ret_bio) return TD_OK;
    free(*ret_text);
    *ret_text = NULL;
    return td_fail(err, TD_ERR_NOMEM, "tls: no memory");
}

/* The certificates of one file: the own chain, or those to trust. */
static td_status load_certificates(const struct td_xfer_tls *tls, int file, SSL_CTX *ctx,
                                   struct td_err *err)
{
    char *text = NULL;
    BIO *bio = NULL;
    td_status status = pem_open(tls, file, &text, &bio, err);
    if (status) return status;
    int n = 0;
    bool taken = true;
    for (X509 *x; taken && (x = PEM_read_bio_X509(bio, NULL, NULL, NULL)); n += taken) {
        taken = file == 2 ? X509_STORE_add_cert(SSL_CTX_get_cert_store(ctx), x)
                          : (n == 0 ? SSL_CTX_use_certificate(ctx, x)
                                    : SSL_CTX_add1_chain_cert(ctx, x)) == 1;
        X509_free(x);
    }
    bool at_end = taken && ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    if (at_end && n == 0)
        status = td_fail(err, TD_ERR_INVALID, "tls: %s: %s: holds no certificate in PEM",
                         FILE_NAMES[file], tls->paths[file]);
    else if (!at_end)
        status = td_fail(err, TD_ERR_INVALID, "tls: %s: %s: certificate %d: %s", FILE_NAMES[file],
                         tls->paths[file], n + 1, openssl_says());
    ERR_clear_error();
    BIO_free(bio);
    free(text);
    return status;
}

static td_status load_key(const struct td_xfer_tls *tls, SSL_CTX *ctx, struct td_err *err)
{
    char *text = NULL;
    BIO *bio = NULL;
    bool asked = false;
    td_status status = pem_open(tls, 1, &text, &bio, err);
    if (status) return status;
    const char *path = tls->paths[1];
    EVP_PKEY *key = PEM_read_bio_PrivateKey(bio, NULL, no_password, &asked);
    if (!key && asked)
        status =
            td_fail(err, TD_ERR_INVALID,
                    "tls: key_file: %s: is encrypted; it must be stored without a password", path);
    else if (!key)
        status = td_fail(err, TD_ERR_INVALID, "tls: key_file: %s: holds no private key in PEM: %s",
                         path, openssl_says());
    else if (SSL_CTX_use_PrivateKey(ctx, key) != 1 || SSL_CTX_check_private_key(ctx) != 1)
        status = td_fail(err, TD_ERR_INVALID, "tls: key_file: %s: does not fit cert_file %s: %s",
                         path, tls->paths[0], openssl_says());
    ERR_clear_error();
    EVP_PKEY_free(key);
    BIO_free(bio);
    OPENSSL_cleanse(text, strlen(text));
    free(text);
    return status;
}

/* One subjectAltName (DNS name, URI or address) against the patterns. */
static bool name_matches(const struct td_peer_names *names, const GENERAL_NAME *name)
{
    char address[INET6_ADDRSTRLEN];
    const ASN1_STRING *text = name->type == GEN_DNS   ? name->d.dNSName
                              : name->type == GEN_URI ? name->d.uniformResourceIdentifier
                                                      : NULL;
    if (text)
        return td_peer_names_match(
            names, name->type == GEN_DNS ? TD_PEER_NAME_DNS : TD_PEER_NAME_URI,
            (const char *)ASN1_STRING_get0_data(text), (size_t)ASN1_STRING_length(text));
    if (name->type != GEN_IPADD) return false;
    const ASN1_OCTET_STRING *octets = name->d.iPAddress;
    int family = ASN1_STRING_length(octets) == 4    ? AF_INET
                 : ASN1_STRING_length(octets) == 16 ? AF_INET6
                                                    : 0;
    return family && inet_ntop(family, ASN1_STRING_get0_data(octets), address, sizeof address) &&
           td_peer_names_match(names, TD_PEER_NAME_IP, address, strlen(address));
}

static bool certificate_matches(const struct td_peer_names *names, X509 *x)
{
    GENERAL_NAMES *held = X509_get_ext_d2i(x, NID_subject_alt_name, NULL, NULL);
    bool matches = false;
    for (int i = 0; held && i < sk_GENERAL_NAME_num(held) && !matches; i++)
        matches = name_matches(names, sk_GENERAL_NAME_value(held, i));
    GENERAL_NAMES_free(held);
    return matches;
}

/* Asked for every certificate of the chain. Of one that is good, the peer's own (depth 0) must hold
 * one of the names. What is wrong is remembered: OpenSSL's own error does not say it. */
static int on_verify(int ok, X509_STORE_CTX *store)
{
    SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct td_xfer_tls_conn *c = ssl ? SSL_get_app_data(ssl) : NULL;
    X509 *x = X509_STORE_CTX_get_current_cert(store);
    if (ok && X509_STORE_CTX_get_error_depth(store) == 0 && c && c->peer_names &&
        !certificate_matches(c->peer_names, x)) {
        X509_STORE_CTX_set_error(store, X509_V_ERR_HOSTNAME_MISMATCH);
        ok = 0;
    }
    if (ok || !c) return ok;
    char subject[128] = "unknown";
    if (x) X509_NAME_oneline(X509_get_subject_name(x), subject, sizeof subject);
    snprintf(c->refused, sizeof c->refused, "%s (certificate of %s, %d above the peer's own)",
             X509_verify_cert_error_string(X509_STORE_CTX_get_error(store)), subject,
             X509_STORE_CTX_get_error_depth(store));
    return ok;
}

/* The peer's own certificate must hold `name`: a DNS name, also "*.SUFFIX", or an address. */
static td_status check_names(X509_VERIFY_PARAM *param, const char *name, struct td_err *err)
{
    uint8_t address[16];
    unsigned flags = X509_CHECK_FLAG_NEVER_CHECK_SUBJECT | X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS;
    if (inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1) {
        if (X509_VERIFY_PARAM_set1_ip_asc(param, name) == 1) return TD_OK;
        return td_fail(err, TD_ERR_NOMEM, "tls: peer_name \"%s\": %s", name, openssl_says());
    }
    bool any_label = !strncmp(name, "*.", 2);
    const char *rest = any_label ? name + 2 : name;
    size_t n = strlen(rest);
    bool is_name = n > 0 && n < 254 && rest[0] != '.' && rest[n - 1] != '.' && !strstr(rest, "..");
    for (size_t i = 0; i < n; i++)
        is_name = is_name && (isalnum((unsigned char)rest[i]) || strchr("-._", rest[i]));
    if (!is_name)
        return td_fail(err, TD_ERR_INVALID,
                       "tls: peer_name is \"%.80s\", must be a DNS name, *. before one (any first "
                       "label), or an address",
                       name);
    /* OpenSSL's word for it: a name that begins with its dot */
    if (any_label) flags |= X509_CHECK_FLAG_SINGLE_LABEL_SUBDOMAINS;
    X509_VERIFY_PARAM_set_hostflags(param, flags);
    return X509_VERIFY_PARAM_set1_host(param, any_label ? name + 1 : name, 0) == 1
               ? TD_OK
               : td_fail(err, TD_ERR_NOMEM, "tls: peer_name \"%s\": %s", name, openssl_says());
}

static td_status context_open(const struct td_xfer_tls *tls, SSL_CTX **ret_ctx, struct td_err *err)
{
    ERR_clear_error();
    td_status status = TD_OK;
    SSL_CTX *ctx = SSL_CTX_new(TLS_method());
    if (!ctx) return td_fail(err, TD_ERR_NOMEM, "tls: no context: %s", openssl_says());
    if (SSL_CTX_set_min_proto_version(ctx, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_max_proto_version(ctx, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(ctx, CIPHERS) != 1 || SSL_CTX_set_num_tickets(ctx, 0) != 1) {
        status = td_fail(err, TD_ERR_UNSUPPORTED, "tls: this OpenSSL refuses TLS 1.3: %s",
                         openssl_says());
        goto err_free;
    }
    SSL_CTX_set_options(ctx,
                        SSL_OP_NO_TICKET | SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                              SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_read_ahead(ctx, 1);
    SSL_CTX_set_default_read_buffer_len(ctx, READ_BYTES);
    if (tls->paths[0] &&
        ((status = load_certificates(tls, 0, ctx, err)) || (status = load_key(tls, ctx, err))))
        goto err_free;
    if (tls->paths[2]) {
        if ((status = load_certificates(tls, 2, ctx, err))) goto err_free;
        SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, on_verify);
        X509_VERIFY_PARAM *param = SSL_CTX_get0_param(ctx);
        /* ca_file may hold an intermediate only */
        X509_VERIFY_PARAM_set_flags(param, X509_V_FLAG_PARTIAL_CHAIN);
        if (tls->peer_name && (status = check_names(param, tls->peer_name, err))) goto err_free;
    }
    ERR_clear_error();
    *ret_ctx = ctx;
    return TD_OK;

err_free:
    SSL_CTX_free(ctx);
    return status;
}

static bool keep(char **ret_copy, const char *text)
{
    if (!text || !text[0]) return true;
    *ret_copy = strdup(text);
    return *ret_copy != NULL;
}

static uint64_t hash_of(const struct td_xfer_tls *tls)
{
    return td_files_hash((const char *const *)tls->paths, N_FILES, MAX_PEM_BYTES);
}

/* What the configuration says. After a failure td_xfer_tls_close undoes it. */
static td_status tls_fill(struct td_xfer_tls *tls, const struct td_xfer_tls_config *config,
                          struct td_err *err)
{
    if (!keep(&tls->paths[0], config->cert_file) || !keep(&tls->paths[1], config->key_file) ||
        !keep(&tls->paths[2], config->ca_file) || !keep(&tls->peer_name, config->peer_name))
        return td_fail(err, TD_ERR_NOMEM, "tls: no memory");
    if (!tls->paths[0] != !tls->paths[1])
        return td_fail(err, TD_ERR_INVALID,
                       "tls: cert_file and key_file go together, %s is not set",
                       FILE_NAMES[tls->paths[0] ? 1 : 0]);
    tls->peer_names = config->peer_names;
    if (tls->peer_names && !tls->paths[2])
        return td_fail(err, TD_ERR_INVALID,
                       "tls: peer_names are set and ca_file is not: no name can be trusted");
    if (tls->peer_name && !tls->paths[2])
        return td_fail(err, TD_ERR_INVALID,
                       "tls: peer_name is \"%s\" and ca_file is not set: no name can be trusted",
                       tls->peer_name);
    tls->rekey_records = config->rekey_records ? config->rekey_records : REKEY_RECORDS;
    if (tls->rekey_records > REKEY_RECORDS_MAX)
        return td_fail(err, TD_ERR_INVALID, "tls: rekey_records is %llu, must be at most %llu",
                       (unsigned long long)tls->rekey_records,
                       (unsigned long long)REKEY_RECORDS_MAX);
    pthread_once(&filter_once, filter_init);
    if (!filter_method) return td_fail(err, TD_ERR_NOMEM, "tls: no memory");
    td_file_stamps_take((const char *const *)tls->paths, N_FILES, tls->tried);
    tls->tried_hash = hash_of(tls);
    return context_open(tls, &tls->ctx, err);
}

td_status td_xfer_tls_open(const struct td_xfer_tls_config *config, struct td_xfer_tls **ret_tls,
                           struct td_err *err)
{
    struct td_xfer_tls *tls = calloc(1, sizeof *tls);
    if (!tls) return td_fail(err, TD_ERR_NOMEM, "tls: no memory");
    pthread_mutex_init(&tls->mu, NULL);
    td_status status = tls_fill(tls, config, err);
    if (status)
        td_xfer_tls_close(tls);
    else
        *ret_tls = tls;
    return status;
}

void td_xfer_tls_close(struct td_xfer_tls *tls)
{
    if (!tls) return;
    SSL_CTX_free(tls->ctx);
    for (int i = 0; i < N_FILES; i++) free(tls->paths[i]);
    free(tls->peer_name);
    pthread_mutex_destroy(&tls->mu);
    free(tls);
}

td_status td_xfer_tls_reload(struct td_xfer_tls *tls, bool only_changed, bool *ret_loaded,
                             struct td_err *err)
{
    struct td_file_stamp now[N_FILES];
    SSL_CTX *ctx = NULL;
    if (ret_loaded) *ret_loaded = false;
    td_file_stamps_take((const char *const *)tls->paths, N_FILES, now);
    pthread_mutex_lock(&tls->mu);
    bool same = td_file_stamps_equal(now, tls->tried, N_FILES);
    memcpy(tls->tried, now, sizeof now);
    if (!same || !only_changed) {
        uint64_t hash = hash_of(tls);
        same = hash == tls->tried_hash;
        tls->tried_hash = hash;
    }
    pthread_mutex_unlock(&tls->mu);
    if (only_changed && same) return TD_OK;
    td_status status = context_open(tls, &ctx, err);
    if (status) return status;
    pthread_mutex_lock(&tls->mu);
    SSL_CTX *old = tls->ctx;
    tls->ctx = ctx;
    pthread_mutex_unlock(&tls->mu);
    SSL_CTX_free(old);
    if (ret_loaded) *ret_loaded = true;
    return TD_OK;
}

/* --- a channel's life ------------------------------------------------------------------------- */

td_status td_tls_conn_open(struct td_xfer_tls *tls, int fd, bool initiator,
                           struct td_xfer_tls_conn **ret_conn, struct td_err *err)
{
    if (!initiator && !tls->paths[0])
        return td_fail(err, TD_ERR_INVALID,
                       "tls: cert_file is not set: without it this side can dial only");
    ERR_clear_error();
    struct td_xfer_tls_conn *c = calloc(1, sizeof *c);
    BIO *filter = BIO_new(filter_method), *sock = BIO_new_socket(fd, BIO_NOCLOSE);
    pthread_mutex_lock(&tls->mu);
    SSL *ssl = SSL_new(tls->ctx); /* holds the context from here on */
    pthread_mutex_unlock(&tls->mu);
    if (!c || !filter || !sock || !ssl) {
        BIO_free(filter);
        BIO_free(sock);
        SSL_free(ssl);
        free(c);
        ERR_clear_error();
        return td_fail(err, TD_ERR_NOMEM, "tls: no memory for a connection");
    }
    c->ssl = ssl;
    c->peer_names = tls->peer_names;
    c->fd = fd;
    c->rekey_records = tls->rekey_records;
    BIO_set_data(filter, c);
    BIO_set_init(filter, 1);
    BIO_push(filter, sock);
    SSL_set_bio(ssl, filter, filter);
    SSL_set_app_data(ssl, c);
    if (initiator)
        SSL_set_connect_state(ssl);
    else
        SSL_set_accept_state(ssl);
    *ret_conn = c;
    return TD_OK;
}

void td_tls_conn_close(struct td_xfer_tls_conn *c)
{
    if (!c) return;
    SSL_free(c->ssl);
    OPENSSL_cleanse(c->staging, sizeof c->staging);
    free(c);
    ERR_clear_error();
}

/* --- errors ----------------------------------------------------------------------------------- */

/* The end of the channel, unless it has come already. Always -1. */
static int broken(struct td_xfer_tls_conn *c, int error, const char *reason)
{
    if (c->state != TLS_BROKEN) {
        c->broken_errno = error;
        snprintf(c->reason, sizeof c->reason, "tls: %s", reason);
        flush_out(c); /* an alert may be in it */
        c->state = TLS_BROKEN;
    }
    ERR_clear_error();
    errno = c->broken_errno;
    return -1;
}

/* After a call on c->ssl failed with SSL_ERROR_SSL or _SYSCALL, and errno `error`. Always -1. */
static int broken_by_ssl(struct td_xfer_tls_conn *c, int ssl_error, int error)
{
    unsigned long e = ERR_peek_error();
    int reason = ERR_GET_REASON(e);
    const char *name = e ? ERR_reason_error_string(e) : NULL;
    char text[300];
    if (c->send_errno) error = c->send_errno;
    if (ssl_error == SSL_ERROR_SYSCALL || ERR_SYSTEM_ERROR(e)) {
        if (!error) return broken(c, ECONNRESET, "the stream ended without close_notify");
        return broken(c, error, strerror(error));
    }
    if (ERR_GET_LIB(e) == ERR_LIB_SSL) {
        switch (reason) {
        case SSL_R_UNEXPECTED_EOF_WHILE_READING:
            return broken(c, ECONNRESET, "the stream ended without close_notify");
        case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
            return broken(c, EPROTO, "the peer shows no certificate");
        case SSL_R_CERTIFICATE_VERIFY_FAILED:
            snprintf(text, sizeof text, "the peer's certificate is refused: %s",
                     c->refused[0] ? c->refused : "verification failed");
            return broken(c, EPROTO, text);
        case SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC:
            return broken(c, EPROTO,
                          "a record is not authentic: its bytes were changed on the way");
        case SSL_R_WRONG_VERSION_NUMBER:
        case SSL_R_HTTP_REQUEST:
        case SSL_R_HTTPS_PROXY_REQUEST:
            snprintf(text, sizeof text, "the peer does not speak TLS (%s)", name ? name : "?");
            return broken(c, EPROTO, text);
        default:
            break;
        }
        if (reason >= SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256) {
            /* "sslv3 alert bad certificate": the version says nothing here */
            const char *alert = name ? strstr(name, "alert ") : NULL;
            if (!alert) alert = name ? name : "unknown alert";
            snprintf(text, sizeof text, "the peer refuses: %s", alert);
            return broken(c, EPROTO, text);
        }
    }
    return broken(c, EPROTO, name ? name : "unknown error of OpenSSL");
}

/* A send failed with errno `error`. The peer's alert, if any, says more. Always -1. */
static int broken_by_send(struct td_xfer_tls_conn *c, int error)
{
    char byte;
    size_t n;
    ERR_clear_error();
    if (c->state == TLS_OPEN && SSL_peek_ex(c->ssl, &byte, 1, &n) != 1 &&
        SSL_get_error(c->ssl, 0) == SSL_ERROR_SSL &&
        ERR_GET_REASON(ERR_peek_error()) >= SSL_AD_REASON_OFFSET) {
        c->send_errno = 0;
        return broken_by_ssl(c, SSL_ERROR_SSL, error);
    }
    return broken(c, error, strerror(error));
}

/* --- handshake -------------------------------------------------------------------------------- */

td_status td_tls_handshake(struct td_xfer_tls_conn *c, bool *ret_want_read, bool *ret_want_write,
                           struct td_err *err)
{
    *ret_want_read = *ret_want_write = false;
    if (c->state == TLS_HANDSHAKE) {
        ERR_clear_error();
        errno = 0;
        int r = SSL_do_handshake(c->ssl), e = errno, ssl_error = SSL_get_error(c->ssl, r);
        if (ssl_error == SSL_ERROR_WANT_READ || ssl_error == SSL_ERROR_WANT_WRITE) {
            if (flush_out(c) && errno != EAGAIN) {
                broken_by_send(c, errno);
            } else {
                *ret_want_read = ssl_error == SSL_ERROR_WANT_READ;
                *ret_want_write = ssl_error == SSL_ERROR_WANT_WRITE || c->out_used;
                return TD_INPROGRESS;
            }
        } else if (ssl_error != SSL_ERROR_NONE) {
            broken_by_ssl(c, ssl_error, e);
        } else {
            c->state = TLS_OPEN;
        }
    }
    if (c->state == TLS_OPEN && td_tls_flush(c) && errno == EAGAIN) {
        *ret_want_write = true;
        return TD_INPROGRESS;
    }
    return c->state == TLS_OPEN ? TD_OK : td_fail(err, TD_ERR_PEER, "%s", c->reason);
}

/* 0, or -1 with errno when the channel cannot carry bytes. */
static int check_open(const struct td_xfer_tls_conn *c)
{
    if (c->state == TLS_OPEN) return 0;
    errno = c->state == TLS_BROKEN ? c->broken_errno : ENOTCONN;
    return -1;
}

/* --- receiving -------------------------------------------------------------------------------- */

ssize_t td_tls_recvv(struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov)
{
    if (check_open(c)) return -1;
    size_t total = 0, at = 0;
    c->rx_dry = false;
    for (int i = 0; i < n_iov && !c->ended;) {
        size_t n = 0;
        if (at == iov[i].iov_len) {
            i++;
            at = 0;
            continue;
        }
        ERR_clear_error();
        errno = 0;
        if (SSL_read_ex(c->ssl, (uint8_t *)iov[i].iov_base + at, iov[i].iov_len - at, &n) == 1) {
            at += n;
            total += n;
            continue;
        }
        int e = errno, ssl_error = SSL_get_error(c->ssl, 0);
        /* it owes the peer an answer and out[] was full */
        if (ssl_error == SSL_ERROR_WANT_WRITE && flush_out(c) == 0) continue;
        if (ssl_error == SSL_ERROR_WANT_READ ||
            (ssl_error == SSL_ERROR_WANT_WRITE && errno == EAGAIN)) {
            c->rx_dry = true;
            errno = EAGAIN;
            return total ? (ssize_t)total : -1;
        }
        if (ssl_error == SSL_ERROR_ZERO_RETURN)
            c->ended = true;
        else if (broken_by_ssl(c, ssl_error,
                               e)) /* the next call says it: all before is authentic */
            return total ? (ssize_t)total : -1;
    }
    return (ssize_t)total;
}

bool td_tls_pending(const struct td_xfer_tls_conn *c)
{
    if (c->state == TLS_BROKEN || c->ended) return true; /* the next recv answers at once */
    return c->state == TLS_OPEN && !c->rx_dry && SSL_has_pending(c->ssl);
}

/* --- sending ---------------------------------------------------------------------------------- */

/* One record of the next bytes at iov[*i] + *at, which it moves on. 0, or -1 with errno. */
static int seal_record(struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov, int *i,
                       size_t *at, size_t n)
{
    const uint8_t *from = (const uint8_t *)iov[*i].iov_base + *at;
    size_t n_gathered = 0, n_sealed = 0;
    if (iov[*i].iov_len - *at >= n) {
        n_gathered = n;
        *at += n;
    } else {
        from = c->staging;
        while (n_gathered < n && *i < n_iov) {
            size_t k = td_min_u64(iov[*i].iov_len - *at, n - n_gathered);
            if (k) memcpy(c->staging + n_gathered, (const uint8_t *)iov[*i].iov_base + *at, k);
            n_gathered += k;
            *at += k;
            if (*at < iov[*i].iov_len) break;
            ++*i;
            *at = 0;
        }
    }
    ERR_clear_error();
    if (c->n_records >= c->rekey_records) {
        if (SSL_key_update(c->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1)
            return broken_by_ssl(c, SSL_ERROR_SSL, 0);
        c->n_records = 0;
    }
    errno = 0;
    if (SSL_write_ex(c->ssl, from, n, &n_sealed) != 1) {
        int e = errno, ssl_error = SSL_get_error(c->ssl, 0);
        if (ssl_error == SSL_ERROR_SSL || ssl_error == SSL_ERROR_SYSCALL)
            return broken_by_ssl(c, ssl_error, e);
        return broken(c, EPROTO, "a record was not sealed although there was room for it");
    }
    TD_ASSERT(n_gathered == n && n_sealed == n); /* (2) */
    c->n_records++;
    return 0;
}

ssize_t td_tls_sendv(struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov)
{
    if (check_open(c)) return -1;
    if (c->said_bye) {
        errno = EPIPE;
        return -1;
    }
    size_t left = 0, total = 0, at = 0;
    for (int k = 0; k < n_iov; k++) left += iov[k].iov_len;
    if (left > CALL_BYTES) left = CALL_BYTES;
    for (int i = 0; left;) {
        if (!out_has_room(c, RECORD_ROOM)) { /* (3) */
            if (flush_out(c) && errno != EAGAIN) break;
            if (!out_has_room(c, RECORD_ROOM)) break;
        }
        while (at == iov[i].iov_len) {
            i++;
            at = 0;
        }
        size_t n = td_min_u64(left, RECORD_BYTES);
        if (seal_record(c, iov, n_iov, &i, &at, n)) return total ? (ssize_t)total : -1;
        left -= n;
        total += n;
    }
    bool blocked = flush_out(c) != 0;
    if (blocked && errno != EAGAIN && broken_by_send(c, errno)) return total ? (ssize_t)total : -1;
    if (total || !left) return (ssize_t)total;
    errno = EAGAIN;
    return -1;
}

size_t td_tls_unsent(const struct td_xfer_tls_conn *c)
{
    return c->state == TLS_BROKEN ? 0 : c->out_used;
}

int td_tls_flush(struct td_xfer_tls_conn *c)
{
    if (check_open(c)) return -1;
    if (flush_out(c) == 0) return 0;
    return errno == EAGAIN ? -1 : broken_by_send(c, errno);
}

int td_tls_shutdown(struct td_xfer_tls_conn *c)
{
    if (check_open(c)) return -1;
    if (!c->said_bye) {
        if (!out_has_room(c, RECORD_ROOM - RECORD_BYTES) &&
            (flush_out(c), !out_has_room(c, RECORD_ROOM - RECORD_BYTES))) {
            errno = EAGAIN;
            return -1;
        }
        ERR_clear_error();
        int r = SSL_shutdown(c->ssl), e = errno, ssl_error = SSL_get_error(c->ssl, r);
        if (r < 0) return broken_by_ssl(c, ssl_error, e);
        c->said_bye = true;
    }
    return td_tls_flush(c);
}

/* --- what is said about it -------------------------------------------------------------------- */

const char *td_tls_reason(const struct td_xfer_tls_conn *c) { return c->reason; }

const char *td_tls_cipher(const struct td_xfer_tls_conn *c) { return SSL_get_cipher_name(c->ssl); }

void td_tls_peer(const struct td_xfer_tls_conn *c, char *ret_subject, size_t subject_bytes)
{
    ret_subject[0] = '\0';
    X509 *x = SSL_get1_peer_certificate(c->ssl);
    if (x) X509_NAME_oneline(X509_get_subject_name(x), ret_subject, (int)subject_bytes);
    X509_free(x);
}

#else /* built without OpenSSL: nothing can be opened */

td_status td_xfer_tls_open(const struct td_xfer_tls_config *config, struct td_xfer_tls **ret_tls,
                           struct td_err *err)
{
    (void)config, (void)ret_tls;
    return td_fail(
        err, TD_ERR_UNSUPPORTED,
        "tls: this program was built without OpenSSL, so the KV data port cannot be encrypted");
}

void td_xfer_tls_close(struct td_xfer_tls *tls) { TD_ASSERT(!tls); }

void td_tls_conn_close(struct td_xfer_tls_conn *c) { TD_ASSERT(!c); }

/* So none of these is ever called: each takes what nobody has. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NEVER(result, name, none, ...)                                                             \
    result name(__VA_ARGS__)                                                                       \
    {                                                                                              \
        TD_ASSERT(!"there is no TLS");                                                             \
        return none;                                                                               \
    }

NEVER(td_status, td_xfer_tls_reload, TD_ERR_UNSUPPORTED, struct td_xfer_tls *tls, bool only_changed,
      bool *ret_loaded, struct td_err *err)
NEVER(td_status, td_tls_conn_open, TD_ERR_UNSUPPORTED, struct td_xfer_tls *tls, int fd,
      bool initiator, struct td_xfer_tls_conn **ret_conn, struct td_err *err)
NEVER(td_status, td_tls_handshake, TD_ERR_UNSUPPORTED, struct td_xfer_tls_conn *c,
      bool *ret_want_read, bool *ret_want_write, struct td_err *err)
NEVER(ssize_t, td_tls_recvv, -1, struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov)
NEVER(ssize_t, td_tls_sendv, -1, struct td_xfer_tls_conn *c, const struct iovec *iov, int n_iov)
NEVER(bool, td_tls_pending, false, const struct td_xfer_tls_conn *c)
NEVER(size_t, td_tls_unsent, 0, const struct td_xfer_tls_conn *c)
NEVER(int, td_tls_flush, -1, struct td_xfer_tls_conn *c)
NEVER(int, td_tls_shutdown, -1, struct td_xfer_tls_conn *c)
NEVER(const char *, td_tls_reason, "", const struct td_xfer_tls_conn *c)
NEVER(const char *, td_tls_cipher, "", const struct td_xfer_tls_conn *c)
NEVER(void, td_tls_peer, , const struct td_xfer_tls_conn *c, char *ret_subject,
      size_t subject_bytes)

#endif
