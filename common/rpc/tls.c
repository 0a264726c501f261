/* tls.c - TLS credentials from files that may change while the process runs.
 *
 * Server: core asks before every handshake (config fetcher). Files whose stat changed are read
 * again, so certificates and the client CA rotate without a restart. When a file cannot be read,
 * the old contents stay in use, and that is logged once per change. Core refuses a certificate that
 * does not fit its key, and keeps the old one as well. The state is per port, because core wants
 * NEW as the first answer for each.
 *
 * Client: credentials are part of a core channel. So client.c looks at the files once a second;
 * when they have changed and then stayed the same for one look (certificate and key are two
 * writes), it makes a new core channel for the calls to come. Loop thread, no lock. */
#include <grpc/support/alloc.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef TD_HAVE_OPENSSL
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#endif

#include "common/base/clock.h"

#include "common/base/file_stamp.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/metrics.h"
#include "common/base/peer_names.h"
#include "common/rpc/rpc_internal.h"

enum { MAX_PEM_BYTES = 1 << 20, N_FILES = 3 };

enum { EXPIRY_WARN_DAYS = 14, EXPIRY_AGAIN_S = 24 * 3600 };

struct td_rpc_tls_files {
    /* mu: expiry of the certificate in each file that expires first; 0 = unknown */
    int64_t ends_s[N_FILES];
    pthread_mutex_t mu;
    char *paths[N_FILES];                 /* cert, key, ca (NULL = none) */
    struct td_file_stamp stamps[N_FILES]; /* mu: stamps of the contents that were last tried */
    struct td_file_stamp seen[N_FILES];   /* client: stamps at the last look */
    uint64_t hash;                        /* mu: of the contents that were last tried */
    char *texts[N_FILES];                 /* mu: in use */
    char *peer_names;                     /* client: patterns; NULL = any */
    bool given;                           /* mu */
};

/* Takes stamps of the files; compare with td_file_stamps_equal. */
static void look(const struct td_rpc_tls_files *files, struct td_file_stamp *ret_stamps)
{
    td_file_stamps_take((const char *const *)files->paths, N_FILES, ret_stamps);
}

static uint64_t hash_of(const struct td_rpc_tls_files *files)
{
    return td_files_hash((const char *const *)files->paths, N_FILES, MAX_PEM_BYTES);
}

static void free_texts(char **texts)
{
    for (int i = 0; i < N_FILES; i++) {
        free(texts[i]);
        texts[i] = NULL;
    }
}

static td_status read_texts(char *const *paths, char **ret_texts, struct td_err *err)
{
    memset(ret_texts, 0, N_FILES * sizeof *ret_texts);
    for (int i = 0; i < N_FILES; i++) {
        size_t n;
        if (!paths[i]) continue;
        td_status status = td_file_read(paths[i], MAX_PEM_BYTES, &ret_texts[i], &n, err);
        if (!status && !strstr(ret_texts[i], "-----BEGIN "))
            status = td_fail(err, TD_ERR_INVALID, "%s: not a PEM file", paths[i]);
        if (status) {
            free_texts(ret_texts);
            return status;
        }
    }
    return TD_OK;
}

static struct td_rpc_tls_files *open_files(const struct td_rpc_tls *tls)
{
    struct td_rpc_tls_files *files = td_rpc_alloc(sizeof *files);
    pthread_mutex_init(&files->mu, NULL);
    files->paths[0] = tls->cert_file ? td_rpc_strdup(tls->cert_file) : NULL;
    files->paths[1] = tls->key_file ? td_rpc_strdup(tls->key_file) : NULL;
    files->paths[2] = tls->ca_file ? td_rpc_strdup(tls->ca_file) : NULL;
    files->peer_names = tls->peer_names ? td_rpc_strdup(tls->peer_names) : NULL;
    look(files, files->stamps);
    memcpy(files->seen, files->stamps, sizeof files->seen);
    files->hash = hash_of(files);
    return files;
}

/* ---- expiry ---------------------------------------------------------------------------------- */

/* The Unix time at which the first certificate of the PEM text expires; 0 = none can be read. */
static int64_t first_end_s(const char *text)
{
    int64_t first = 0;
#ifdef TD_HAVE_OPENSSL
    BIO *in = text ? BIO_new_mem_buf(text, -1) : NULL;
    X509 *x;
    while (in && (x = PEM_read_bio_X509(in, NULL, NULL, NULL))) {
        struct tm tm;
        if (ASN1_TIME_to_tm(X509_get0_notAfter(x), &tm) == 1) {
            int64_t end = (int64_t)timegm(&tm);
            if (!first || end < first) first = end;
        }
        X509_free(x);
    }
    ERR_clear_error(); /* the error is "no more certificates" */
    BIO_free(in);
#else
    (void)text;
#endif
    return first;
}

/* True when this file's expiry is to be logged: once a day for each expiry that the file has had,
 * whoever loads it. A router has a channel to each worker, all with the same files. */
static bool is_news(const char *path, int64_t end_s, int64_t now_s)
{
    static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
    /* when full the oldest is forgotten, and is then logged again */
    static struct {
        uint64_t path_hash;
        int64_t end_s, told_s;
    } told[16];
    uint64_t hash = td_hash64(path, strlen(path), 0);
    bool news = true;
    pthread_mutex_lock(&mu);
    size_t at = 0;
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        bool same = told[i].path_hash == hash && told[i].end_s == end_s;
        if (same || told[i].told_s < told[at].told_s) at = i;
        if (!same) continue;
        news = now_s - told[i].told_s >= EXPIRY_AGAIN_S;
        break;
    }
    if (news) {
        told[at].path_hash = hash;
        told[at].end_s = end_s;
        told[at].told_s = now_s;
    }
    pthread_mutex_unlock(&mu);
    return news;
}

/* Logs the expiry. mu is held, or the object is not shared yet. Called at load, at each reload and
 * then at most once a day. */
static void tell_expiry(struct td_rpc_tls_files *files, bool loaded)
{
    static const char *const labels[N_FILES] = {"file=\"cert\"", NULL, "file=\"ca\""};
    int64_t now_s = (int64_t)(td_wall_ns() / TD_NS_PER_S);
    for (int i = 0; i < N_FILES; i++) {
        if (!labels[i] || !files->texts[i]) continue;
        if (loaded) files->ends_s[i] = first_end_s(files->texts[i]);
        if (!files->ends_s[i]) continue;
        double days = (double)(files->ends_s[i] - now_s) / 86400.0;
        td_metric_set(
            td_gauge("td_tls_certificate_expiry_days", labels[i],
                     "Days until the first certificate of the file expires; negative = it has"),
            days);
        if (days >= EXPIRY_WARN_DAYS || !is_news(files->paths[i], files->ends_s[i], now_s))
            continue;
        char text[600];
        td_log(days < 0 ? TD_LOG_ERROR : TD_LOG_WARN, "tls_certificate_expires",
               "file=%s days_left=%.1f expired=%s",
               td_log_quote(text, sizeof text, files->paths[i]), days, days < 0 ? "true" : "false");
    }
}

void td_rpc_tls_look_at_expiry(struct td_rpc_tls_files *files)
{
    if (!files) return;
    pthread_mutex_lock(&files->mu);
    tell_expiry(files, false);
    pthread_mutex_unlock(&files->mu);
}

/* Reads the files; false = unreadable or unchanged, and the old texts stay. */
static bool reload(struct td_rpc_tls_files *files, const struct td_file_stamp *now)
{
    char *texts[N_FILES];
    struct td_err err = {0};
    memcpy(files->stamps, now, sizeof files->stamps);
    uint64_t hash = hash_of(files);
    if (hash == files->hash) return false;
    files->hash = hash;
    const char *name = files->paths[0] ? files->paths[0] : files->paths[2];
    if (read_texts(files->paths, texts, &err) != TD_OK) {
        char text[TD_ERR_MSG_MAX];
        td_warn("tls_reload_failed", "action=keep_old err=%s",
                td_log_quote(text, sizeof text, err.msg));
        return false;
    }
    free_texts(files->texts);
    memcpy(files->texts, texts, sizeof texts);
    td_info("tls_reloaded", "file=%s", name);
    tell_expiry(files, true);
    return true;
}

static grpc_ssl_certificate_config_reload_status
fetch(void *arg, grpc_ssl_server_certificate_config **ret_config)
{
    struct td_rpc_tls_files *files = arg;
    grpc_ssl_certificate_config_reload_status answer = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    struct td_file_stamp now[N_FILES];
    pthread_mutex_lock(&files->mu);
    look(files, now);
    bool fresh = !files->given;
    if (!td_file_stamps_equal(now, files->stamps, N_FILES) && reload(files, now)) fresh = true;
    if (fresh) {
        grpc_ssl_pem_key_cert_pair pair = {files->texts[1], files->texts[0]};
        /* Core 1.51 requires roots even when it asks no client for a certificate; any PEM is
         * accepted then. */
        *ret_config = grpc_ssl_server_certificate_config_create(
            files->texts[2] ? files->texts[2] : files->texts[0], &pair, 1);
        files->given = true;
        answer = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    pthread_mutex_unlock(&files->mu);
    return answer;
}

td_status td_rpc_tls_server(const struct td_rpc_tls *tls, struct td_rpc_tls_files **ret_files,
                            grpc_server_credentials **ret_creds, struct td_err *err)
{
    if (!tls->cert_file || !tls->key_file)
        return td_fail(err, TD_ERR_INVALID, "tls: a server needs a certificate and a key");
    struct td_rpc_tls_files *files = open_files(tls);
    td_status status = read_texts(files->paths, files->texts, err);
    if (status) {
        td_rpc_tls_files_destroy(files);
        td_err_prefix(err, "tls");
        return status;
    }
    grpc_ssl_server_credentials_options *options =
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            tls->ca_file ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                         : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            fetch, files);
    *ret_creds = grpc_ssl_server_credentials_create_with_options(options);
    tell_expiry(files, true);
    *ret_files = files;
    return TD_OK;
}

void td_rpc_tls_files_destroy(struct td_rpc_tls_files *files)
{
    if (!files) return;
    free_texts(files->texts);
    for (int i = 0; i < N_FILES; i++) free(files->paths[i]);
    free(files->peer_names);
    pthread_mutex_destroy(&files->mu);
    free(files);
}

static void free_names(void *names) { td_peer_names_destroy(names); }

/* Makes client credentials of the texts in use. Each has its own copy of the patterns, which core
 * frees with it, because handshakes outlive channels. */
static grpc_channel_credentials *client_credentials(const struct td_rpc_tls_files *files)
{
    grpc_ssl_pem_key_cert_pair pair = {files->texts[1], files->texts[0]};
    struct td_peer_names *names = NULL;
    struct td_err err = {0};
    if (files->peer_names) {
        td_status s = td_peer_names_parse("peer names", files->peer_names, &names, &err);
        TD_ASSERT(s == TD_OK); /* td_rpc_tls_client has parsed them */
    }
    grpc_ssl_verify_peer_options verify = {.verify_peer_callback = td_rpc_peer_check,
                                           .verify_peer_callback_userdata = names,
                                           .verify_peer_destruct = free_names};
    return grpc_ssl_credentials_create_ex(files->texts[2], files->texts[0] ? &pair : NULL,
                                          names ? &verify : NULL, NULL);
}

static td_status check_names(const char *patterns, struct td_err *err)
{
    struct td_peer_names *names;
    if (!patterns) return TD_OK;
    td_status s = td_rpc_peer_check_supported(err);
    if (!s) s = td_peer_names_parse("peer names", patterns, &names, err);
    if (!s) td_peer_names_destroy(names);
    return s;
}

td_status td_rpc_tls_client(const struct td_rpc_tls *tls, struct td_rpc_tls_files **ret_files,
                            grpc_channel_credentials **ret_creds, struct td_err *err)
{
    if (!tls->cert_file != !tls->key_file)
        return td_fail(err, TD_ERR_INVALID, "tls: a certificate and a key go together");
    td_status status = check_names(tls->peer_names, err);
    if (status) return status;
    struct td_rpc_tls_files *files = open_files(tls);
    status = read_texts(files->paths, files->texts, err);
    if (status) {
        td_rpc_tls_files_destroy(files);
        td_err_prefix(err, "tls");
        return status;
    }
    *ret_creds = client_credentials(files);
    *ret_files = files;
    tell_expiry(files, true);
    return TD_OK;
}

grpc_channel_credentials *td_rpc_tls_client_changed(struct td_rpc_tls_files *files)
{
    struct td_file_stamp now[N_FILES];
    look(files, now);
    bool settled = td_file_stamps_equal(now, files->seen, N_FILES);
    memcpy(files->seen, now, sizeof now);
    if (!settled || td_file_stamps_equal(now, files->stamps, N_FILES)) return NULL;
    return reload(files, now) ? client_credentials(files) : NULL;
}
