/* tls.c - credentials from files.
 *
 * Server: core asks before every handshake (config fetcher); files whose stat changed are read again, so certificates and the client CA
 * rotate without a restart. What cannot be read keeps the old ones in use, and is logged once per change; a certificate that does not fit
 * its key is refused by core, which keeps the old one as well. The state is per port: core wants NEW as the first answer for each. */
#include <grpc/support/alloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/rpc/rpc_internal.h"

enum { MAX_PEM_BYTES = 1 << 20, N_FILES = 3 };

struct stamp {
    struct timespec changed;
    off_t bytes;
    ino_t inode;
};

struct td_rpc_tls_files {
    pthread_mutex_t mu;
    char *paths[N_FILES];                    /* cert, key, ca (NULL = none) */
    struct stamp stamps[N_FILES];            /* mu: of what was last tried */
    char *texts[N_FILES];                    /* mu: in use */
    bool given;                              /* mu */
};

static void take_stamps(const struct td_rpc_tls_files *files, struct stamp *ret_stamps)
{
    memset(ret_stamps, 0, N_FILES * sizeof *ret_stamps);
    for (int i = 0; i < N_FILES; i++) {
        struct stat st;
        if (!files->paths[i] || stat(files->paths[i], &st) != 0) continue;
        ret_stamps[i].changed = st.st_mtim;
        ret_stamps[i].bytes = st.st_size;
        ret_stamps[i].inode = st.st_ino;
    }
}

static bool same_stamps(const struct stamp *a, const struct stamp *b)
{
    for (int i = 0; i < N_FILES; i++)
        if (a[i].changed.tv_sec != b[i].changed.tv_sec || a[i].changed.tv_nsec != b[i].changed.tv_nsec || a[i].bytes != b[i].bytes ||
            a[i].inode != b[i].inode)
            return false;
    return true;
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
        if (!status && !strstr(ret_texts[i], "-----BEGIN ")) status = td_fail(err, TD_ERR_INVALID, "%s: not a PEM file", paths[i]);
        if (status) {
            free_texts(ret_texts);
            return status;
        }
    }
    return TD_OK;
}

static grpc_ssl_certificate_config_reload_status fetch(void *arg, grpc_ssl_server_certificate_config **ret_config)
{
    struct td_rpc_tls_files *files = arg;
    grpc_ssl_certificate_config_reload_status answer = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    struct stamp now[N_FILES];
    pthread_mutex_lock(&files->mu);
    take_stamps(files, now);
    bool fresh = !files->given;
    if (!same_stamps(now, files->stamps)) {
        char *texts[N_FILES];
        struct td_err err = {0};
        memcpy(files->stamps, now, sizeof now);
        if (read_texts(files->paths, texts, &err) == TD_OK) {
            free_texts(files->texts);
            memcpy(files->texts, texts, sizeof texts);
            fresh = true;
            td_info("tls_reloaded", "cert=%s", files->paths[0]);
        } else {
            char text[TD_ERR_MSG_MAX];
            td_warn("tls_reload_failed", "action=keep_old err=%s", td_log_quote(text, sizeof text, err.msg));
        }
    }
    if (fresh) {
        grpc_ssl_pem_key_cert_pair pair = {files->texts[1], files->texts[0]};
        /* Core 1.51 insists on roots even when it asks no client for a certificate: then any PEM does. */
        *ret_config = grpc_ssl_server_certificate_config_create(files->texts[2] ? files->texts[2] : files->texts[0], &pair, 1);
        files->given = true;
        answer = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    pthread_mutex_unlock(&files->mu);
    return answer;
}

td_status td_rpc_tls_server(const struct td_rpc_tls *tls, struct td_rpc_tls_files **ret_files, grpc_server_credentials **ret_creds,
                            struct td_err *err)
{
    if (!tls->cert_file || !tls->key_file) return td_fail(err, TD_ERR_INVALID, "tls: a server needs a certificate and a key");
    struct td_rpc_tls_files *files = td_rpc_alloc(sizeof *files);
    pthread_mutex_init(&files->mu, NULL);
    files->paths[0] = td_rpc_strdup(tls->cert_file);
    files->paths[1] = td_rpc_strdup(tls->key_file);
    files->paths[2] = tls->ca_file ? td_rpc_strdup(tls->ca_file) : NULL;
    take_stamps(files, files->stamps);
    td_status status = read_texts(files->paths, files->texts, err);
    if (status) {
        td_rpc_tls_files_destroy(files);
        return td_err_prefix(err, "tls"), status;
    }
    grpc_ssl_server_credentials_options *options = grpc_ssl_server_credentials_create_options_using_config_fetcher(
        tls->ca_file ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE, fetch, files);
    *ret_creds = grpc_ssl_server_credentials_create_with_options(options);
    *ret_files = files;
    return TD_OK;
}

void td_rpc_tls_files_destroy(struct td_rpc_tls_files *files)
{
    if (!files) return;
    free_texts(files->texts);
    for (int i = 0; i < N_FILES; i++) free(files->paths[i]);
    pthread_mutex_destroy(&files->mu);
    free(files);
}

td_status td_rpc_tls_client(const struct td_rpc_tls *tls, grpc_channel_credentials **ret_creds, struct td_err *err)
{
    if (!tls->cert_file != !tls->key_file) return td_fail(err, TD_ERR_INVALID, "tls: a certificate and a key go together");
    char *paths[N_FILES] = {(char *)tls->cert_file, (char *)tls->key_file, (char *)tls->ca_file}, *texts[N_FILES];
    td_status status = read_texts(paths, texts, err);
    if (status) return td_err_prefix(err, "tls"), status;
    grpc_ssl_pem_key_cert_pair pair = {texts[1], texts[0]};
    *ret_creds = grpc_ssl_credentials_create_ex(texts[2], tls->cert_file ? &pair : NULL, NULL, NULL);
    free_texts(texts);
    if (!*ret_creds) return td_fail(err, TD_ERR_INVALID, "tls: the credentials are not usable");
    return TD_OK;
}
