/* base_cluster_secret_test.c - the MAC against published vectors, what a file may hold and who
 * may read it, rotation, and that no two lists of fields share a proof. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#ifdef TD_HAVE_OPENSSL
#include <dlfcn.h>
#include <openssl/evp.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/cluster_secret.h"

static char folder[] = "/tmp/td-secret-XXXXXX";
static char path[64], fifo[64];

#define SECRET_A "0123456789abcdef0123456789abcdef"
#define SECRET_B "fedcba9876543210fedcba9876543210"

static void write_mode(const char *text, size_t n, mode_t mode)
{
    unlink(path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, mode), 0);
}

static void write_text(const char *text) { write_mode(text, strlen(text), 0600); }

static struct td_cluster_secret *load(const char *text)
{
    struct td_cluster_secret *s = NULL;
    struct td_err err = {0};
    write_text(text);
    if (td_cluster_secret_load(path, &s, &err)) fail_msg("%s", err.msg);
    return s;
}

/* RFC 4231, 4.2 to 4.8 (case 5 there is a truncated MAC: its whole value is not given). */
static void hmac_is_that_of_rfc_4231(void **state)
{
    (void)state;
    static const struct {
        uint8_t key_byte;
        size_t key_bytes; /* of key_byte; 0: key is text */
        const char *key;
        uint8_t data_byte;
        size_t data_bytes;
        const char *data, *mac;
    } cases[] = {
        {0x0b, 20, NULL, 0, 0, "Hi There",
         "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {0, 0, "Jefe", 0, 0, "what do ya want for nothing?",
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {0xaa, 20, NULL, 0xdd, 50, NULL,
         "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {0, 25, NULL, 0xcd, 50, NULL,
         "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {0xaa, 131, NULL, 0, 0, "Test Using Larger Than Block-Size Key - Hash Key First",
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {0xaa, 131, NULL, 0, 0,
         "This is a test using a larger than block-size key and a larger than block-size data. The "
         "key needs to be hashed before being used by the "
         "HMAC algorithm.",
         "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t key[131], data[50], mac[32];
        char hex[65];
        size_t key_bytes = cases[i].key ? strlen(cases[i].key) : cases[i].key_bytes;
        memset(key, cases[i].key_byte, sizeof key);
        if (cases[i].key) memcpy(key, cases[i].key, key_bytes);
        if (i == 3) /* 4.5: bytes 1 to 25 */
            for (size_t k = 0; k < key_bytes; k++) key[k] = (uint8_t)(k + 1);
        memset(data, cases[i].data_byte, sizeof data);
        const void *bytes = cases[i].data ? (const void *)cases[i].data : data;
        assert_int_equal(td_hmac_sha256(key, key_bytes, bytes,
                                        cases[i].data ? strlen(cases[i].data) : cases[i].data_bytes,
                                        mac),
                         TD_OK);
        for (size_t k = 0; k < 32; k++) snprintf(hex + 2 * k, 3, "%02x", mac[k]);
        assert_string_equal(hex, cases[i].mac);
    }
}

static void a_bad_file_is_refused_by_name(void **state)
{
    (void)state;
    char same[65], big[TD_CLUSTER_SECRET_MAX_FILE_BYTES + 2], many[9 * 33 + 1];
    memset(same, 'a', 64);
    same[64] = '\0';
    memset(big, '\n', sizeof big);
    big[sizeof big - 1] = '\0';
    for (int i = 0; i < 9; i++) snprintf(many + 33 * i, 34, "%s", SECRET_A "\n");
    const struct {
        const char *text;
        td_status status;
        const char *says;
    } cases[] = {
        {"", TD_ERR_INVALID, "is empty"},
        {"\n\r\n", TD_ERR_INVALID, "is empty"},
        {"0123456789abcdef0123456789abcde\n", TD_ERR_INVALID,
         "line 1 has 31 characters, must have 32"},
        {SECRET_A "\nshort\n", TD_ERR_INVALID, "line 2 has 5 characters"},
        {"0123456789abcdef 0123456789abcdef\n", TD_ERR_INVALID, "line 1, character 17"},
        {"0123456789abcdef\xc3\xa4 0123456789abcdef\n", TD_ERR_INVALID, "line 1, character 17"},
        {same, TD_ERR_INVALID, "1 different characters, must have 8"},
        {many, TD_ERR_LIMIT, "line 9 is one more than 8 secrets"},
        {big, TD_ERR_LIMIT, "longer than 4096 bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct td_cluster_secret *s = NULL;
        struct td_err err = {0};
        write_text(cases[i].text);
        assert_int_equal(td_cluster_secret_load(path, &s, &err), cases[i].status);
        assert_null(s);
        assert_non_null(strstr(err.msg, path));
        if (!strstr(err.msg, cases[i].says))
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, err.msg, cases[i].says);
        assert_null(strstr(err.msg, "0123456789")); /* never a byte of a secret */
    }
    struct td_cluster_secret *s = NULL;
    struct td_err err = {0};
    assert_int_equal(td_cluster_secret_load("/nonexistent/secret", &s, &err), TD_ERR_NOT_FOUND);
    assert_int_equal(mkfifo(fifo, 0600),
                     0); /* nobody writes into it: a plain open would wait for ever */
    assert_int_equal(td_cluster_secret_load(fifo, &s, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "not a regular file"));
    assert_int_equal(unlink(fifo), 0);
}

static void who_may_read_it(void **state)
{
    (void)state;
    static const struct {
        mode_t mode;
        bool good;
    } cases[] = {{0400, true},  {0600, true},  {0440, true},  {0640, true}, {0644, false},
                 {0444, false}, {0660, false}, {0602, false}, {0601, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct td_cluster_secret *s = NULL;
        struct td_err err = {0};
        write_mode(SECRET_A "\n", 33, cases[i].mode);
        td_status status = td_cluster_secret_load(path, &s, &err);
        if ((status == TD_OK) != cases[i].good)
            fail_msg("mode %04o: %s", (unsigned)cases[i].mode, err.msg);
        if (status) assert_non_null(strstr(err.msg, "defaultMode: 0440"));
        td_cluster_secret_destroy(s);
    }
}

static void a_proof_is_good_for_its_own_fields_only(void **state)
{
    (void)state;
    struct td_cluster_secret *a = load(SECRET_A), *same = load("\n" SECRET_A "\r\n\n"),
                             *b = load(SECRET_B "\n");
    struct td_secret_field fields[] = {{"ab", 2}, {"c", 1}}, shifted[] = {{"a", 1}, {"bc", 2}},
                           joined[] = {{"abc", 3}}, more[] = {{"ab", 2}, {"c", 1}, {NULL, 0}};
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    assert_int_equal(td_cluster_secret_prove(a, "role x", fields, 2, mac), TD_OK);
    assert_true(td_cluster_secret_verify(a, "role x", fields, 2, mac));
    assert_true(td_cluster_secret_verify(same, "role x", fields, 2, mac));
    assert_false(td_cluster_secret_verify(b, "role x", fields, 2, mac));
    assert_false(td_cluster_secret_verify(a, "role y", fields, 2, mac));
    assert_false(td_cluster_secret_verify(a, "role x", shifted, 2, mac));
    assert_false(td_cluster_secret_verify(a, "role x", joined, 1, mac));
    assert_false(td_cluster_secret_verify(a, "role x", more, 3, mac));
    /* golden: what is authenticated, byte for byte, as Python's hmac has it */
    static const uint8_t golden[] = {0x41, 0x9c, 0x85, 0xad, 0xda, 0xdd, 0xe7, 0x02,
                                     0x01, 0x7e, 0x3e, 0x9e, 0x89, 0xec, 0x59, 0xb3,
                                     0x52, 0x02, 0x06, 0xe0, 0x93, 0xc5, 0x2f, 0x43,
                                     0x3e, 0xad, 0x86, 0x93, 0x7f, 0x70, 0xe9, 0x7b};
    const struct td_secret_field three[] = {{"ab", 2}, {NULL, 0}, {"\0\1\2", 3}};
    uint8_t written_down[TD_CLUSTER_MAC_BYTES];
    assert_int_equal(td_cluster_secret_prove(a, "tandem kv 1 initiator", three, 3, written_down),
                     TD_OK);
    assert_memory_equal(written_down, golden, sizeof golden);
    for (size_t i = 0; i < sizeof mac; i++) {
        mac[i] ^= 1;
        assert_false(td_cluster_secret_verify(a, "role x", fields, 2, mac));
        mac[i] ^= 1;
    }
    td_cluster_secret_destroy(a);
    td_cluster_secret_destroy(same);
    td_cluster_secret_destroy(b);
    td_cluster_secret_destroy(NULL);
}

/* Two daemons through the three steps of a rotation, one always a step behind: each accepts the
 * other's proof at every moment. */
static void a_rotation_never_locks_anybody_out(void **state)
{
    (void)state;
    static const char *const steps[] = {SECRET_A "\n", SECRET_A "\n" SECRET_B "\n",
                                        SECRET_B "\n" SECRET_A "\n", SECRET_B "\n"};
    struct td_secret_field field = {"n", 1};
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    struct td_err err = {0};
    struct td_cluster_secret *ahead = load(steps[0]), *first = load(steps[0]);
    for (size_t i = 1; i < 4; i++) {
        struct td_cluster_secret *behind = load(steps[i - 1]);
        bool loaded = false;
        write_text(steps[i]);
        assert_int_equal(td_cluster_secret_reload(ahead, true, &loaded, &err), TD_OK);
        assert_true(loaded);
        assert_int_equal(td_cluster_secret_reload(ahead, true, &loaded, &err), TD_OK);
        assert_false(loaded); /* nothing has changed */
        assert_int_equal(td_cluster_secret_prove(ahead, "x", &field, 1, mac), TD_OK);
        assert_true(td_cluster_secret_verify(behind, "x", &field, 1, mac));
        assert_int_equal(td_cluster_secret_prove(behind, "x", &field, 1, mac), TD_OK);
        assert_true(td_cluster_secret_verify(ahead, "x", &field, 1, mac));
        td_cluster_secret_destroy(behind);
    }
    assert_int_equal(td_cluster_secret_prove(first, "x", &field, 1, mac), TD_OK);
    assert_false(td_cluster_secret_verify(ahead, "x", &field, 1, mac)); /* the old one is out */
    write_text("too short");
    assert_int_equal(td_cluster_secret_reload(ahead, true, NULL, &err), TD_ERR_INVALID);
    assert_int_equal(td_cluster_secret_prove(ahead, "x", &field, 1, mac),
                     TD_OK); /* what was read last stays */
    td_cluster_secret_destroy(ahead);
    td_cluster_secret_destroy(first);
}

/* Kubernetes sets the owner of a mounted secret again and again: that is no new secret. But a mode
 * that has become wrong is told, and a secret whose mode is mended is loaded. */
static void bytes_in_use_are_not_loaded_again(void **state)
{
    (void)state;
    struct td_err err = {0};
    bool loaded = true;
    struct td_cluster_secret *s = load(SECRET_A "\n");
    assert_int_equal(chmod(path, 0400), 0);
    assert_int_equal(td_cluster_secret_reload(s, true, &loaded, &err), TD_OK);
    assert_false(loaded);
    assert_int_equal(chmod(path, 0604), 0);
    assert_int_equal(td_cluster_secret_reload(s, true, &loaded, &err), TD_ERR_INVALID);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(td_cluster_secret_reload(s, true, &loaded, &err), TD_OK);
    assert_false(loaded);
    assert_int_equal(td_cluster_secret_reload(s, false, &loaded, &err), TD_OK);
    assert_true(loaded); /* as it was asked for */
    write_mode(SECRET_B "\n", strlen(SECRET_B "\n"), 0604);
    assert_int_equal(td_cluster_secret_reload(s, true, &loaded, &err), TD_ERR_INVALID);
    assert_false(loaded);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(td_cluster_secret_reload(s, true, &loaded, &err), TD_OK);
    assert_true(loaded);
    td_cluster_secret_destroy(s);
}

#ifdef TD_HAVE_OPENSSL
static unsigned n_fetches;

/* libcrypto's, counted. */
EVP_MAC *EVP_MAC_fetch(OSSL_LIB_CTX *ctx, const char *algorithm, const char *properties)
{
    EVP_MAC *(*real)(OSSL_LIB_CTX *, const char *, const char *);
    void *found = dlsym(RTLD_NEXT, "EVP_MAC_fetch");
    assert_non_null(found);
    memcpy(&real, &found, sizeof real);
    n_fetches++;
    return real(ctx, algorithm, properties);
}

/* The router makes a proof for each request: looking up the algorithm took longer than the
 * proof. */
static void the_algorithm_is_looked_up_once(void **state)
{
    (void)state;
    struct td_secret_field field = {"n", 1};
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    struct td_cluster_secret *s = load(SECRET_A "\n" SECRET_B "\n");
    for (int i = 0; i < 100; i++) {
        assert_int_equal(td_cluster_secret_prove(s, "x", &field, 1, mac), TD_OK);
        assert_true(td_cluster_secret_verify(s, "x", &field, 1, mac));
        assert_int_equal(td_hmac_sha256("key", 3, "n", 1, mac), TD_OK);
    }
    td_cluster_secret_destroy(s);
    assert_int_equal(n_fetches, 1); /* by whoever of this process was the first */
}
#endif

static int open_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/secret", folder);
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    return 0;
}

static int close_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

int main(void)
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (td_hmac_sha256("", 0, "", 0, mac) == TD_ERR_UNSUPPORTED) {
        puts("skipped: built without OpenSSL");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hmac_is_that_of_rfc_4231),
        cmocka_unit_test(a_bad_file_is_refused_by_name),
        cmocka_unit_test(who_may_read_it),
        cmocka_unit_test(a_proof_is_good_for_its_own_fields_only),
        cmocka_unit_test(a_rotation_never_locks_anybody_out),
        cmocka_unit_test(bytes_in_use_are_not_loaded_again),
#ifdef TD_HAVE_OPENSSL
        cmocka_unit_test(the_algorithm_is_looked_up_once),
#endif
    };
    return cmocka_run_group_tests_name("base_cluster_secret", tests, open_folder, close_folder);
}
