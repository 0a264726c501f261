/* cluster_secret.c - reads the file of secrets, and makes and checks proofs. The bytes that a proof
 * authenticates, with little-endian lengths:
 *
 *     u32 bytes of label | label | u32 number of fields | for each field: u32 bytes | bytes
 *
 * HMAC is libcrypto's. Looking up an algorithm there takes process-wide locks and more time than
 * the proof, so it is done once, and each secret is kept as a context that has its key already: a
 * proof copies that context. The file's bytes are wiped as soon as they are parsed; libcrypto wipes
 * a context's key when it is freed.
 *
 * Invariant: 1 <= n_keys <= 8 once load has returned TD_OK; a reload replaces the whole list under
 * mu or leaves it. */
#include "common/base/cluster_secret.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file_stamp.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"

#ifdef TD_HAVE_OPENSSL
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#endif

/* libcrypto's EVP_MAC_CTX by its struct tag, for builds without libcrypto's headers. */
typedef struct evp_mac_ctx_st mac_context;

/* The file's secrets, in its order. These contexts are only copied, never fed with data. */
struct secrets {
    uint64_t hash; /* of the file's bytes */
    size_t n_keys;
    mac_context *keyed[TD_CLUSTER_SECRET_MAX_LINES];
};

struct td_cluster_secret {
    pthread_mutex_t mu;
    char *path;
    struct td_file_stamp tried; /* under mu: the stamp of the file at the last attempt */
    struct secrets now;         /* under mu */
};

static const char NOT_BUILT[] =
    "this build has no OpenSSL (libcrypto): it cannot prove a cluster secret";

/* --- HMAC ---------------------------------------------------------------------------------- */

static void put_u32(uint8_t *p, size_t value)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(value >> (8 * i));
}

#ifdef TD_HAVE_OPENSSL

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
/* HMAC-SHA256 without a key, kept until the process ends; NULL = no memory for it */
static mac_context *g_unkeyed;

static void look_up_hmac(void)
{
    char digest[] = "SHA256";
    const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
                                 OSSL_PARAM_construct_end()};
    EVP_MAC *mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    g_unkeyed = mac ? EVP_MAC_CTX_new(mac) : NULL;
    EVP_MAC_free(mac); /* the context holds a reference */
    if (!g_unkeyed || EVP_MAC_CTX_set_params(g_unkeyed, params) == 1) return;
    EVP_MAC_CTX_free(g_unkeyed);
    g_unkeyed = NULL;
}

/* TD_ERR_NOMEM is the only possible error, because algorithm and sizes are fixed. */
static td_status keyed_create(const void *key, size_t key_bytes, mac_context **ret_keyed)
{
    pthread_once(&g_once, look_up_hmac);
    mac_context *keyed = g_unkeyed ? EVP_MAC_CTX_dup(g_unkeyed) : NULL;
    if (keyed && EVP_MAC_init(keyed, key, key_bytes, NULL) == 1) {
        *ret_keyed = keyed;
        return TD_OK;
    }
    EVP_MAC_CTX_free(keyed);
    return TD_ERR_NOMEM;
}

static void keyed_destroy(mac_context *keyed) { EVP_MAC_CTX_free(keyed); }

/* The MAC of parts[0..n), one after the other. keyed is not changed. TD_ERR_NOMEM. */
static td_status keyed_mac(const mac_context *keyed, const struct td_secret_field *parts, size_t n,
                           uint8_t *ret_mac)
{
    td_status status = TD_ERR_NOMEM;
    uint8_t result[TD_CLUSTER_MAC_BYTES];
    size_t mac_bytes = 0;
    mac_context *ctx = EVP_MAC_CTX_dup(keyed);
    if (!ctx) goto out;
    for (size_t i = 0; i < n; i++)
        if (parts[i].n_bytes && EVP_MAC_update(ctx, parts[i].data, parts[i].n_bytes) != 1) goto out;
    if (EVP_MAC_final(ctx, result, &mac_bytes, sizeof result) == 1 && mac_bytes == sizeof result) {
        memcpy(ret_mac, result, sizeof result);
        status = TD_OK;
    }
out:
    EVP_MAC_CTX_free(ctx);
    return status;
}

#else

static td_status keyed_create(const void *key, size_t key_bytes, mac_context **ret_keyed)
{
    (void)key, (void)key_bytes, (void)ret_keyed;
    return TD_ERR_UNSUPPORTED;
}

static void keyed_destroy(mac_context *keyed) { (void)keyed; }

static td_status keyed_mac(const mac_context *keyed, const struct td_secret_field *parts, size_t n,
                           uint8_t *ret_mac)
{
    (void)keyed, (void)parts, (void)n, (void)ret_mac;
    return TD_ERR_UNSUPPORTED;
}

#endif

td_status td_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t n_bytes,
                         uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    /* libcrypto takes a NULL key for "none given", so an empty key still needs an address. */
    mac_context *keyed;
    td_status status = keyed_create(key_bytes ? key : "", key_bytes, &keyed);
    if (status) return status;
    status = keyed_mac(keyed, &(struct td_secret_field){data, n_bytes}, 1, ret_mac);
    keyed_destroy(keyed);
    return status;
}

bool td_equal_constant_time(const void *a, const void *b, size_t n_bytes)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t differ = 0;
    for (size_t i = 0; i < n_bytes; i++) differ |= x[i] ^ y[i];
    return differ == 0;
}

void td_cluster_nonce(uint8_t ret_nonce[TD_CLUSTER_NONCE_BYTES])
{
    td_random_fill(ret_nonce, TD_CLUSTER_NONCE_BYTES);
}

/* --- proofs -------------------------------------------------------------------------------- */

enum { MAX_FIELDS = 16 };

/* parts: 3 + 2 * MAX_FIELDS; lengths: 4 bytes for each of 2 + MAX_FIELDS. Returns the number of
 * parts. */
static size_t lay_out(const char *label, const struct td_secret_field *fields, size_t n_fields,
                      struct td_secret_field *parts, uint8_t *lengths)
{
    size_t n = 0;
    TD_ASSERT(n_fields <= MAX_FIELDS);
    put_u32(lengths, strlen(label));
    parts[n++] = (struct td_secret_field){lengths, 4};
    parts[n++] = (struct td_secret_field){label, strlen(label)};
    put_u32(lengths + 4, n_fields);
    parts[n++] = (struct td_secret_field){lengths + 4, 4};
    for (size_t i = 0; i < n_fields; i++) {
        TD_ASSERT(fields[i].n_bytes <= UINT32_MAX);
        put_u32(lengths + 8 + 4 * i, fields[i].n_bytes);
        parts[n++] = (struct td_secret_field){lengths + 8 + 4 * i, 4};
        parts[n++] = fields[i];
    }
    return n;
}

td_status td_cluster_secret_prove(struct td_cluster_secret *secret, const char *label,
                                  const struct td_secret_field *fields, size_t n_fields,
                                  uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    struct td_secret_field parts[3 + 2 * MAX_FIELDS];
    uint8_t lengths[4 * (2 + MAX_FIELDS)];
    size_t n = lay_out(label, fields, n_fields, parts, lengths);
    pthread_mutex_lock(&secret->mu);
    td_status status = keyed_mac(secret->now.keyed[0], parts, n, ret_mac);
    pthread_mutex_unlock(&secret->mu);
    return status;
}

bool td_cluster_secret_verify(struct td_cluster_secret *secret, const char *label,
                              const struct td_secret_field *fields, size_t n_fields,
                              const uint8_t mac[TD_CLUSTER_MAC_BYTES])
{
    struct td_secret_field parts[3 + 2 * MAX_FIELDS];
    uint8_t lengths[4 * (2 + MAX_FIELDS)], expected[TD_CLUSTER_MAC_BYTES];
    size_t n = lay_out(label, fields, n_fields, parts, lengths);
    bool found = false;
    pthread_mutex_lock(&secret->mu);
    for (size_t i = 0; i < secret->now.n_keys; i++) {
        if (keyed_mac(secret->now.keyed[i], parts, n, expected)) continue;
        found |= td_equal_constant_time(expected, mac, sizeof expected);
    }
    pthread_mutex_unlock(&secret->mu);
    explicit_bzero(expected,
                   /* false, for a correct answer to a question that somebody else asked */
                   sizeof expected);
    return found;
}

/* --- the file ------------------------------------------------------------------------------ */

static void drop_keys(struct secrets *s)
{
    for (size_t i = 0; i < s->n_keys; i++) keyed_destroy(s->keyed[i]);
    *s = (struct secrets){0};
}

static td_status take_line(const char *path, size_t line_no, const char *line, size_t n,
                           struct secrets *s, struct td_err *err)
{
    bool seen[256] = {0};
    size_t n_different = 0;
    if (n < TD_CLUSTER_SECRET_MIN_CHARS || n > TD_CLUSTER_SECRET_MAX_CHARS)
        return td_fail(err, TD_ERR_INVALID,
                       "cluster secret %s: line %zu has %zu characters, must have %d to %d "
                       "(openssl rand -hex 32 makes one)",
                       path, line_no, n, TD_CLUSTER_SECRET_MIN_CHARS, TD_CLUSTER_SECRET_MAX_CHARS);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c <= ' ' || c > '~')
            return td_fail(
                err, TD_ERR_INVALID,
                "cluster secret %s: line %zu, character %zu is not printable ASCII, or a space",
                path, line_no, i + 1);
        n_different += !seen[c];
        seen[c] = true;
    }
    if (n_different < 8)
        return td_fail(err, TD_ERR_INVALID,
                       "cluster secret %s: line %zu has %zu different characters, must have 8 at "
                       "least: it can be guessed",
                       path, line_no, n_different);
    if (s->n_keys == TD_CLUSTER_SECRET_MAX_LINES)
        return td_fail(err, TD_ERR_LIMIT, "cluster secret %s: line %zu is one more than %d secrets",
                       path, line_no, TD_CLUSTER_SECRET_MAX_LINES);
    if (keyed_create(line, n, &s->keyed[s->n_keys]))
        return td_fail(err, TD_ERR_NOMEM, "cluster secret %s: no memory", path);
    s->n_keys++;
    return TD_OK;
}

static td_status parse(const char *path, const char *text, size_t n, struct secrets *s,
                       struct td_err *err)
{
    size_t line_no = 0;
    for (size_t at = 0; at < n;) {
        const char *line = text + at, *end = memchr(line, '\n', n - at);
        size_t bytes = end ? (size_t)(end - line) : n - at;
        at += bytes + 1;
        line_no++;
        if (bytes && line[bytes - 1] == '\r') bytes--;
        if (bytes == 0) continue;
        td_status status = take_line(path, line_no, line, bytes, s, err);
        if (status) return status;
    }
    if (s->n_keys) return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "cluster secret %s: is empty (openssl rand -hex 32 makes a secret)", path);
}

static td_status check_mode(const char *path, const struct stat *st, struct td_err *err)
{
    if (!S_ISREG(st->st_mode))
        return td_fail(err, TD_ERR_INVALID, "cluster secret %s: is not a regular file", path);
    if (!(st->st_mode & 027)) return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "cluster secret %s: has mode %04o, so that %s it: chmod 0400 it (in Kubernetes: "
                   "defaultMode: 0440 and an fsGroup)",
                   path, (unsigned)(st->st_mode & 07777),
                   st->st_mode & 07 ? "everybody on this machine may reach"
                                    : "its group may write");
}

static td_status read_file(const char *path, struct secrets *s, struct td_err *err)
{
    char text[TD_CLUSTER_SECRET_MAX_FILE_BYTES + 1];
    size_t n = 0;
    struct stat st;
    td_status status = TD_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY |
                            O_NONBLOCK); /* a pipe must not block a daemon's start */
    if (fd < 0) {
        int e = errno;
        return td_fail(err, e == ENOENT ? TD_ERR_NOT_FOUND : TD_ERR_IO,
                       "cluster secret %s: cannot be opened: %s", path, strerror(e));
    }
    if (fstat(fd, &st)) {
        status = td_fail(err, TD_ERR_IO, "cluster secret %s: %s", path, strerror(errno));
        goto out;
    }
    if ((status = check_mode(path, &st, err))) goto out;
    while (n < sizeof text) {
        ssize_t k = read(fd, text + n, sizeof text - n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            status = td_fail(err, TD_ERR_IO, "cluster secret %s: cannot be read: %s", path,
                             strerror(errno));
            goto out;
        }
        if (k == 0) break;
        n += (size_t)k;
    }
    s->hash = td_hash64(text, n, 0);
    if (n > TD_CLUSTER_SECRET_MAX_FILE_BYTES)
        status = td_fail(err, TD_ERR_LIMIT, "cluster secret %s: is longer than %d bytes", path,
                         TD_CLUSTER_SECRET_MAX_FILE_BYTES);
    else
        status = parse(path, text, n, s, err);
out:
    explicit_bzero(text, sizeof text);
    close(fd);
    return status;
}

td_status td_cluster_secret_load(const char *path, struct td_cluster_secret **ret_secret,
                                 struct td_err *err)
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (td_hmac_sha256("", 0, "", 0, mac) == TD_ERR_UNSUPPORTED)
        return td_fail(err, TD_ERR_UNSUPPORTED, "cluster secret %s: %s", path, NOT_BUILT);
    struct td_cluster_secret *secret = calloc(1, sizeof *secret);
    char *copy = strdup(path);
    if (!secret || !copy) {
        free(secret);
        free(copy);
        return td_fail(err, TD_ERR_NOMEM, "cluster secret %s: no memory", path);
    }
    pthread_mutex_init(&secret->mu, NULL);
    secret->path = copy;
    td_file_stamps_take((const char *const *)&secret->path, 1, &secret->tried);
    td_status status = read_file(path, &secret->now, err);
    if (status) {
        td_cluster_secret_destroy(secret);
        return status;
    }
    *ret_secret = secret;
    return TD_OK;
}

void td_cluster_secret_destroy(struct td_cluster_secret *secret)
{
    if (!secret) return;
    drop_keys(&secret->now);
    pthread_mutex_destroy(&secret->mu);
    free(secret->path);
    free(secret);
}

td_status td_cluster_secret_reload(struct td_cluster_secret *secret, bool only_changed,
                                   bool *ret_loaded, struct td_err *err)
{
    struct td_file_stamp stamp;
    if (ret_loaded) *ret_loaded = false;
    td_file_stamps_take((const char *const *)&secret->path, 1, &stamp);
    pthread_mutex_lock(&secret->mu);
    bool same = td_file_stamps_equal(&stamp, &secret->tried, 1);
    secret->tried = stamp;
    pthread_mutex_unlock(&secret->mu);
    if (only_changed && same) return TD_OK;
    struct secrets fresh = {0};
    td_status status = read_file(secret->path, &fresh, err);
    if (!status) {
        pthread_mutex_lock(&secret->mu);
        bool replaces = !only_changed || fresh.hash != secret->now.hash;
        struct secrets former = secret->now;
        if (replaces) {
            secret->now = fresh;
            fresh = former;
        }
        pthread_mutex_unlock(&secret->mu);
        if (ret_loaded) *ret_loaded = replaces;
    }
    drop_keys(&fresh);
    return status;
}
