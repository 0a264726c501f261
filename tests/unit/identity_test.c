/* identity_test.c - what router and worker prove to each other: each proof is good once, for one
 * side, one Join, one call. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/entropy.h"
#include "common/base/random.h"
#include "common/rpc/identity.h"

#define PATH "/tandem.v1.Worker/Decode"

static struct td_cluster_secret *secret, *other;
static struct td_join_nonces nonces;

static struct td_cluster_secret *load(const char *text)
{
    char path[] = "/tmp/tandem_identity_test.XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    struct td_cluster_secret *s = NULL;
    struct td_err err = {0};
    td_status status = td_cluster_secret_load(path, &s, &err);
    unlink(path);
    if (status == TD_ERR_UNSUPPORTED) return NULL;
    if (status) fail_msg("%s", err.msg);
    return s;
}

static int setup(void **state)
{
    (void)state;
    secret = load("0123456789abcdef0123456789abcdef\n");
    other = load("another9abcdef0123456789abcdef01234\n");
    td_cluster_nonce(nonces.worker);
    td_cluster_nonce(nonces.router);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    td_cluster_secret_destroy(secret);
    td_cluster_secret_destroy(other);
    return 0;
}

static Tandem__V1__Hello hello_of(const char *role, const char *name, const char *address,
                                  uint64_t incarnation)
{
    Tandem__V1__Hello h = TANDEM__V1__HELLO__INIT;
    h.role = (char *)(uintptr_t)role;
    h.name = (char *)(uintptr_t)name;
    h.address = (char *)(uintptr_t)address;
    h.incarnation = incarnation;
    return h;
}

static void a_worker_proves_what_it_said(void **state)
{
    (void)state;
    if (!secret) skip();
    Tandem__V1__Hello h = hello_of("decode", "d0", "10.0.0.1:7610", 7);
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    ProtobufCBinaryData m = {sizeof mac, mac};
    assert_int_equal(td_join_prove_worker(secret, &nonces, &h, mac), TD_OK);
    assert_true(td_join_verify_worker(secret, &nonces, &h, &m));
    assert_false(td_join_verify_worker(other, &nonces, &h, &m));
    struct td_join_nonces later = nonces;
    later.router[31] ^= 1; /* a recorded proof, at the next Join */
    assert_false(td_join_verify_worker(secret, &later, &h, &m));
    const Tandem__V1__Hello lies[] = {
        hello_of("prefill", "d0", "10.0.0.1:7610", 7),
        hello_of("decode", "d1", "10.0.0.1:7610", 7),
        hello_of("decode", "d0", "10.0.0.2:7610", 7),
        /* the same bytes in a row */
        hello_of("decode", "d0", "10.0.0.1:7610", 8),
        hello_of("decoded", "0", "10.0.0.1:7610", 7),
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++)
        if (td_join_verify_worker(secret, &nonces, &lies[i], &m))
            fail_msg("lie %zu was believed", i);
    for (size_t i = 0; i < sizeof mac; i++) {
        mac[i] ^= 0x10;
        assert_false(td_join_verify_worker(secret, &nonces, &h, &m));
        mac[i] ^= 0x10;
    }
    m.len = 31;
    assert_false(td_join_verify_worker(secret, &nonces, &h, &m));
    m.len = 0;
    assert_false(td_join_verify_worker(secret, &nonces, &h, &m));
}

/* Who reflects a proof back to its maker has proved nothing. */
static void a_proof_is_of_one_side(void **state)
{
    (void)state;
    if (!secret) skip();
    Tandem__V1__Welcome w = TANDEM__V1__WELCOME__INIT;
    uint8_t mac[TD_CLUSTER_MAC_BYTES], instance[TD_CLUSTER_MAC_BYTES];
    w.router_incarnation = 5;
    w.prefix_seed = 6;
    assert_int_equal(td_join_prove_router(secret, &nonces, &w, mac), TD_OK);
    w.proof = (ProtobufCBinaryData){sizeof mac, mac};
    assert_true(td_join_verify_router(secret, &nonces, &w));
    assert_false(td_join_verify_router(other, &nonces, &w));
    w.prefix_seed = 7;
    assert_false(td_join_verify_router(secret, &nonces, &w));
    w.prefix_seed = 6;
    Tandem__V1__Hello h = hello_of("", "", "", 0);
    assert_int_equal(td_join_prove_worker(secret, &nonces, &h, mac), TD_OK);
    assert_false(td_join_verify_router(secret, &nonces, &w));
    uint8_t nonce[TD_CLUSTER_NONCE_BYTES];
    td_cluster_nonce(nonce);
    const ProtobufCBinaryData n = {sizeof nonce, nonce};
    assert_int_equal(td_instance_prove(secret, &nonces, &n, &n, instance), TD_OK);
    w.proof.data = instance;
    assert_false(td_join_verify_router(secret, &nonces, &w));
    w.proof.len = 0;
    assert_false(td_join_verify_router(secret, &nonces, &w));
}

static void an_instance_answers_for_itself(void **state)
{
    (void)state;
    uint8_t key[2][32], nonce[TD_CLUSTER_NONCE_BYTES], mac[TD_CLUSTER_MAC_BYTES];
    td_random_fill(key, sizeof key);
    td_cluster_nonce(nonce);
    const ProtobufCBinaryData mine = {32, key[0]}, theirs = {32, key[1]}, n = {sizeof nonce, nonce},
                              cut = {31, nonce}, m = {sizeof mac, mac};
    td_status s = td_instance_prove(NULL, NULL, &mine, &n, mac);
    if (s == TD_ERR_UNSUPPORTED) skip();
    assert_int_equal(s, TD_OK);
    assert_true(td_instance_verify(NULL, NULL, &mine, &n, &m));
    assert_false(td_instance_verify(NULL, NULL, &theirs, &n, &m));
    assert_int_equal(td_instance_prove(NULL, NULL, &mine, &cut, mac), TD_ERR_INVALID);
    assert_int_equal(td_instance_prove(secret, &nonces, &mine, &n, mac), TD_OK);
    assert_true(td_instance_verify(secret, &nonces, &mine, &n, &m));
    struct td_join_nonces another = nonces;
    another.worker[0] ^= 1; /* another worker of the cluster, which knows the secret, is not this
                               one */
    assert_false(td_instance_verify(secret, &another, &mine, &n, &m));
    assert_false(td_instance_verify(NULL, &nonces, &mine, &n, &m));
}

static void a_call_is_proved_once(void **state)
{
    (void)state;
    if (!secret) skip();
    struct td_replay_guard w = {0};
    struct td_call_proof p;
    char text[TD_CALL_PROOF_MAX];
    const char *why = NULL;
    assert_int_equal(td_call_prove(secret, &nonces, PATH, 0xfedcba9876543210, 3, 1, text), TD_OK);
    assert_int_equal(td_call_proof_parse(text, &p), TD_OK);
    assert_true(p.request == 0xfedcba9876543210 && p.attempt == 3 && p.counter == 1);
    assert_false(td_call_proof_check(other, &nonces, &w, PATH, &p, &why));
    assert_non_null(strstr(why, "secret"));
    assert_false(td_call_proof_check(secret, &nonces, &w, "/tandem.v1.Worker/Abort", &p, &why));
    struct td_join_nonces next = nonces;
    next.worker[5] ^= 1;
    assert_false(td_call_proof_check(secret, &next, &w, PATH, &p, &why));
    next.router[0] ^= 1;
    assert_false(td_call_proof_check(secret, &next, &w, PATH, &p, &why));
    assert_non_null(strstr(why, "registration"));
    struct td_call_proof changed[4] = {p, p, p, p};
    changed[0].request++;
    changed[1].attempt++;
    changed[2].counter++;
    changed[3].mac[31] ^= 1;
    for (int i = 0; i < 4; i++)
        if (td_call_proof_check(secret, &nonces, &w, PATH, &changed[i], &why))
            fail_msg("change %d was believed", i);
    /* what was refused has used nothing up */
    assert_true(td_call_proof_check(secret, &nonces, &w, PATH, &p, &why));
    assert_false(td_call_proof_check(secret, &nonces, &w, PATH, &p, &why));
    assert_non_null(strstr(why, "before"));
}

static void texts_that_are_no_proofs(void **state)
{
    (void)state;
    if (!secret) skip();
    char text[TD_CALL_PROOF_MAX];
    struct td_call_proof p;
    assert_int_equal(td_call_prove(secret, &nonces, PATH, 1, 2, 3, text), TD_OK);
    size_t n = strlen(text);
    for (size_t i = 0; i < n; i++) { /* cut short, and a byte that is not of the form at each
                                        place */
        char cut[TD_CALL_PROOF_MAX];
        memcpy(cut, text, n + 1);
        cut[i] = 0;
        assert_int_equal(td_call_proof_parse(cut, &p), TD_ERR_INVALID);
        memcpy(cut, text, n + 1);
        cut[i] = 'G';
        assert_int_equal(td_call_proof_parse(cut, &p), TD_ERR_INVALID);
    }
    text[n] = '0';
    text[n + 1] = 0;
    assert_int_equal(td_call_proof_parse(text, &p), TD_ERR_INVALID);
    assert_int_equal(td_call_proof_parse("", &p), TD_ERR_INVALID);
}

/* Against a set of all counters ever accepted, in random order around a rising edge. */
static void counters_are_taken_once(void **state)
{
    (void)state;
    enum { N = 40000 };
    static bool taken[N + 1];
    struct td_replay_guard w = {0};
    uint64_t seed = 1, top = 0;
    assert_false(td_replay_accept(&w, 0));
    for (int i = 0; i < 200000; i++) {
        uint64_t edge = (uint64_t)i * N / 200000 + 1, c = edge + 200 - td_random_index(&seed, 6000);
        /* a jump over the whole window */
        if (td_random_index(&seed, 5000) == 0) c = edge + TD_REPLAY_COUNTERS + 5;
        if (c > N) continue; /* below zero, too */
        bool want = c > 0 && !taken[c] && !(top > c && top - c >= TD_REPLAY_COUNTERS);
        if (td_replay_accept(&w, c) != want)
            fail_msg("counter %llu, top %llu: should be %d", (unsigned long long)c,
                     (unsigned long long)top, want);
        if (want) taken[c] = true;
        if (c > top) top = c;
    }
    assert_true(td_replay_accept(&w, UINT64_MAX));
    assert_false(td_replay_accept(&w, UINT64_MAX));
    assert_false(td_replay_accept(&w, top));
}

static void ports_beyond_loopback_want_an_identity(void **state)
{
    (void)state;
    struct td_identity id = {0};
    struct td_err err = {0};
    static const char *const near[] = {"127.0.0.1:7600", "127.8.9.1:0", "localhost:1",
                                       "[::1]:7600",     "unix:/run/x", "[::ffff:127.0.0.1]:4"};
    static const char *const far[] = {
        "0.0.0.0:7600",         "[::]:7600", "10.0.0.1:1",  "host:1",
        "localhost.evil.org:1", ":7600",     "128.0.0.1:1", "[::2]:1"};
    for (size_t i = 0; i < sizeof near / sizeof *near; i++)
        assert_int_equal(td_identity_check_port(&id, "listen", near[i], "Worker",
                                                "tls-router-names", false, &err),
                         TD_OK);
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        err.msg[0] = 0;
        if (!td_identity_check_port(&id, "listen", far[i], "Worker", "tls-router-names", false,
                                    &err))
            fail_msg("%s was taken for loopback", far[i]);
        assert_non_null(strstr(err.msg, far[i]));
        assert_non_null(strstr(err.msg, "--cluster-secret-file"));
        assert_non_null(strstr(err.msg, "--tls-router-names"));
        assert_int_equal(
            td_identity_check_port(&id, "listen", far[i], "Worker", "tls-router-names", true, &err),
            TD_OK);
    }
    if (!secret) return;
    id.secret = secret;
    assert_int_equal(td_identity_check_port(&id, "listen", "0.0.0.0:1", "Worker",
                                            "tls-router-names", false, &err),
                     TD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_proves_what_it_said),
        cmocka_unit_test(a_proof_is_of_one_side),
        cmocka_unit_test(an_instance_answers_for_itself),
        cmocka_unit_test(a_call_is_proved_once),
        cmocka_unit_test(texts_that_are_no_proofs),
        cmocka_unit_test(counters_are_taken_once),
        cmocka_unit_test(ports_beyond_loopback_want_an_identity),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
