/* rpc_frames_test.c - what a client may send in HTTP/2 frames: each bound, at it and one above
 * it, in pieces of every size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/rpc/frames.h"
#include "common/rpc/records.h"

enum {
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION
};
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };

struct bytes {
    uint8_t *at;
    size_t n, capacity;
};

static void add(struct bytes *b, const void *at, size_t n)
{
    if (b->n + n > b->capacity) { /* doubled: AddressSanitizer's realloc always copies */
        b->capacity = 2 * (b->n + n);
        b->at = realloc(b->at, b->capacity);
        assert_non_null(b->at);
    }
    if (n) memcpy(b->at + b->n, at, n);
    b->n += n;
}

static void frame(struct bytes *b, uint8_t type, uint8_t flags, uint32_t n)
{
    static const uint8_t payload[1 << 14];
    const uint8_t head[9] = {
        (uint8_t)(n >> 16), (uint8_t)(n >> 8), (uint8_t)n, type, flags, 0, 0, 0, 1};
    add(b, head, sizeof head);
    add(b, payload, n);
}

static struct bytes begin(void)
{
    struct bytes b = {0};
    add(&b, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    frame(&b, SETTINGS, 0, 12);
    return b;
}

/* The verdict on the bytes taken step at a time; frees them. */
static const char *verdict(struct bytes *b, size_t step)
{
    struct td_rpc_frames f = {.max_unacked_streams = 100};
    const char *why = NULL;
    for (size_t i = 0; i < b->n && !why; i += step)
        why = td_rpc_frames_take(&f, b->at + i, b->n - i < step ? b->n - i : step, TD_NS_PER_S);
    return why;
}

/* The same in steps of 1, of a few, and at once. */
static void expect(struct bytes b, const char *want)
{
    static const size_t steps[] = {1, 7, 9, 10, 1000, SIZE_MAX / 2};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        const char *why = verdict(&b, steps[i]);
        if (want) {
            assert_non_null(why);
            assert_string_equal(why, want);
        } else if (why) {
            fail_msg("step %zu: %s", steps[i], why);
        }
    }
    free(b.at);
}

static void test_ordinary_traffic(void **state)
{
    (void)state;
    struct bytes b = begin();
    frame(&b, SETTINGS, ACK, 0);
    for (int i = 0; i < 5000; i++) {
        frame(&b, HEADERS, END_HEADERS, 300);
        frame(&b, DATA, 0, 5);
        frame(&b, DATA, END_STREAM, 0);
        frame(&b, WINDOW_UPDATE, 0, 4);
        frame(&b, PING, ACK, 8);
        frame(&b, PING, 0, 8);
    }
    for (int i = 0; i < 20; i++) frame(&b, DATA, 0, 1 << 14);
    expect(b, NULL);
}

static void test_header_blocks(void **state)
{
    (void)state;
    struct bytes b = begin();
    for (int i = 0; i < 2; i++) { /* each counted from its own start */
        frame(&b, HEADERS, 0, 1 << 14);
        for (int n = 2 << 14; n <= TD_RPC_MAX_BLOCK_BYTES; n += 1 << 14)
            frame(&b, CONTINUATION, n == TD_RPC_MAX_BLOCK_BYTES ? END_HEADERS : 0, 1 << 14);
    }
    expect(b, NULL);

    b = begin();
    frame(&b, HEADERS, 0, 1 << 14);
    for (int n = 2 << 14; n <= TD_RPC_MAX_BLOCK_BYTES; n += 1 << 14)
        frame(&b, CONTINUATION, 0, 1 << 14);
    frame(&b, CONTINUATION, 0, 1);
    expect(b, "header_block_bytes");

    b = begin();
    frame(&b, HEADERS, 0, 10);
    for (int i = 0; i < TD_RPC_MAX_BLOCK_FRAMES; i++) frame(&b, CONTINUATION, 0, 0);
    expect(b, NULL);
    b = begin();
    frame(&b, HEADERS, 0, 10);
    for (int i = 0; i <= TD_RPC_MAX_BLOCK_FRAMES; i++) frame(&b, CONTINUATION, 0, 0);
    expect(b, "continuation_frames");
}

static void test_large_blocks_are_told(void **state)
{
    (void)state;
    struct td_rpc_frames f = {.max_unacked_streams = 100};
    struct bytes b = begin();
    frame(&b, HEADERS, END_HEADERS, 1 << 14);
    size_t n_whole = b.n;
    assert_null(td_rpc_frames_take(&f, b.at, n_whole - (1 << 14) + TD_RPC_LARGE_BLOCK_BYTES, 1));
    assert_false(td_rpc_frames_in_large_block(&f));
    assert_null(
        td_rpc_frames_take(&f, b.at + n_whole - (1 << 14) + TD_RPC_LARGE_BLOCK_BYTES, 1, 1));
    assert_true(td_rpc_frames_in_large_block(&f));
    assert_null(td_rpc_frames_take(&f, b.at + n_whole - (1 << 14) + TD_RPC_LARGE_BLOCK_BYTES + 1,
                                   (1 << 14) - TD_RPC_LARGE_BLOCK_BYTES - 1, 1));
    assert_false(td_rpc_frames_in_large_block(&f));
    free(b.at);
}

static void test_streams_before_the_ack(void **state)
{
    (void)state;
    struct bytes b = begin();
    for (int i = 0; i < 100; i++) frame(&b, HEADERS, END_HEADERS, 30);
    expect(b, NULL);
    b = begin();
    for (int i = 0; i < 101; i++) frame(&b, HEADERS, END_HEADERS, 30);
    expect(b, "streams_before_settings_ack");
}

static void test_cheap_frames(void **state)
{
    (void)state;
    static const struct {
        uint8_t type;
        uint32_t n;
    } kinds[] = {{RST_STREAM, 4}, {SETTINGS, 0}, {PRIORITY, 5}, {DATA, 0}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct bytes b = begin(); /* its SETTINGS is one of them */
        for (int i = 1; i < TD_RPC_CHEAP_FRAMES; i++) frame(&b, kinds[k].type, 0, kinds[k].n);
        expect(b, NULL);
        b = begin();
        for (int i = 0; i < TD_RPC_CHEAP_FRAMES; i++) frame(&b, kinds[k].type, 0, kinds[k].n);
        expect(b, "cheap_frames");
    }
    /* A second later there are as many again as a second gives. */
    struct td_rpc_frames f = {.max_unacked_streams = 100};
    struct bytes b = begin(), one = {0};
    for (int i = 1; i < TD_RPC_CHEAP_FRAMES; i++) frame(&b, RST_STREAM, 0, 4);
    frame(&one, RST_STREAM, 0, 4);
    assert_null(td_rpc_frames_take(&f, b.at, b.n, TD_NS_PER_S));
    for (int i = 0; i < TD_RPC_CHEAP_FRAMES_PER_S; i++)
        assert_null(td_rpc_frames_take(&f, one.at, one.n, 2 * TD_NS_PER_S));
    assert_non_null(td_rpc_frames_take(&f, one.at, one.n, 2 * TD_NS_PER_S));
    free(b.at);
    free(one.at);
}

/* Takes n bytes at *at in steps, and moves on. */
static void take(struct td_rpc_frames *f, uint8_t **at, size_t n, size_t step)
{
    for (size_t i = 0; i < n; i += step)
        assert_null(td_rpc_frames_take(f, *at + i, n - i < step ? n - i : step, TD_NS_PER_S));
    *at += n;
}

/* A block of which core has the first type stays visible to its end. Those that begin later do not,
 * and nothing else changes. */
static void test_new_blocks_are_hidden(void **state)
{
    (void)state;
    static const size_t n_seen[] = {4, 8, 9, 20, 39}; /* bytes of the first block before */
    for (size_t i = 0; i < sizeof n_seen / sizeof *n_seen; i++)
        for (size_t step = 1; step < 80; step += 1 + step / 4) {
            struct td_rpc_frames f = {.max_unacked_streams = 100};
            struct bytes b = begin();
            size_t first = b.n;
            frame(&b, HEADERS, 0, 30);
            frame(&b, CONTINUATION, END_HEADERS, 5);
            frame(&b, DATA, 0, 7);
            size_t hidden = b.n;
            frame(&b, HEADERS, 0, 30);
            size_t hidden_too = b.n;
            frame(&b, CONTINUATION, END_HEADERS, 5);
            frame(&b, DATA, END_STREAM, 7);
            frame(&b, RST_STREAM, 0, 4);
            struct bytes want = {0};
            add(&want, b.at, b.n);
            uint8_t *at = b.at;
            take(&f, &at, first + n_seen[i], step);
            f.hides = true;
            take(&f, &at, b.n - (size_t)(at - b.at), step);
            assert_int_equal(f.n_shown, 1);
            assert_in_range(b.at[hidden + 3], 0xf0, 0xff);
            assert_int_equal(b.at[hidden_too + 3], b.at[hidden + 3]);
            want.at[hidden + 3] = want.at[hidden_too + 3] = b.at[hidden + 3];
            assert_memory_equal(b.at, want.at, b.n);
            free(b.at);
            free(want.at);
        }
}

/* Core, which would end the connection, does not see that such a frame is in a block. */
static void test_a_hidden_block_holds_no_other_frame(void **state)
{
    (void)state;
    struct td_rpc_frames f = {.max_unacked_streams = 100, .hides = true};
    struct bytes b = begin();
    frame(&b, HEADERS, 0, 30);
    assert_null(td_rpc_frames_take(&f, b.at, b.n, TD_NS_PER_S));
    struct bytes one = {0};
    frame(&one, RST_STREAM, 0, 4);
    assert_string_equal(td_rpc_frames_take(&f, one.at, one.n, TD_NS_PER_S),
                        "frame_in_hidden_block");
    free(b.at);
    free(one.at);
}

/* The byte at which an application_data record is known to have begun, in steps of n; 0 = not yet.
 */
static size_t done_at(const struct bytes *b, size_t step)
{
    struct td_rpc_records r = {0};
    for (size_t i = 0; i < b->n; i += step) {
        size_t n = b->n - i < step ? b->n - i : step;
        if (td_rpc_records_take(&r, b->at + i, n)) return i + n;
    }
    return 0;
}

static void record(struct bytes *b, uint8_t type, uint16_t n)
{
    static const uint8_t payload[1 << 14] = {
        [0] = 23, [5] = 23, [100] = 23}; /* types inside are no types */
    const uint8_t head[5] = {type, 3, 3, (uint8_t)(n >> 8), (uint8_t)n};
    add(b, head, sizeof head);
    add(b, payload, n);
}

static void a_handshake_is_over_with_the_first_application_data(void **state)
{
    (void)state;
    enum { CHANGE_CIPHER_SPEC = 20, ALERT, HANDSHAKE, APPLICATION_DATA };
    struct bytes b = {0};
    record(&b, HANDSHAKE, 1600);
    record(&b, HANDSHAKE, 0);
    record(&b, HANDSHAKE, 1 << 14);
    record(&b, ALERT, 2);
    record(&b, CHANGE_CIPHER_SPEC, 1);
    for (size_t step = 1; step < 20; step++) assert_int_equal(done_at(&b, step), 0);
    assert_int_equal(done_at(&b, b.n), 0);
    size_t before = b.n;
    record(&b, APPLICATION_DATA, 70);
    assert_int_equal(done_at(&b, 1), before + 5); /* the head is enough */
    for (size_t step = 2; step < 20; step++)
        assert_in_range(done_at(&b, step), before + 5, before + 5 + step);
    assert_int_equal(done_at(&b, b.n), b.n);
    free(b.at);
}

/* In records of any size, in steps of any. */
static void test_the_random_of_a_hello(void **state)
{
    (void)state;
    uint8_t hello[200], random[TD_RPC_RANDOM_BYTES];
    for (size_t i = 0; i < sizeof hello; i++) hello[i] = (uint8_t)(7 * i + 22);
    memcpy(random, hello + TD_RPC_RANDOM_AT, sizeof random);
    for (size_t n_record = 1; n_record <= sizeof hello; n_record += 1 + n_record / 3)
        for (size_t step = 1; step < 250; step += 1 + step / 3) {
            struct td_rpc_records r = {0};
            struct bytes b = {0};
            for (size_t i = 0; i < sizeof hello; i += n_record) {
                size_t n = sizeof hello - i < n_record ? sizeof hello - i : n_record;
                const uint8_t head[5] = {22, 3, 1, 0, (uint8_t)n};
                add(&b, head, sizeof head);
                add(&b, hello + i, n);
            }
            assert_false(td_rpc_records_is_random(&r, random));
            for (size_t i = 0; i < b.n; i += step)
                assert_false(td_rpc_records_take(&r, b.at + i, b.n - i < step ? b.n - i : step));
            assert_true(td_rpc_records_is_random(&r, random));
            random[31] ^= 1;
            assert_false(td_rpc_records_is_random(&r, random));
            random[31] ^= 1;
            free(b.at);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ordinary_traffic),
        cmocka_unit_test(test_header_blocks),
        cmocka_unit_test(test_large_blocks_are_told),
        cmocka_unit_test(test_streams_before_the_ack),
        cmocka_unit_test(test_cheap_frames),
        cmocka_unit_test(test_new_blocks_are_hidden),
        cmocka_unit_test(test_a_hidden_block_holds_no_other_frame),
        cmocka_unit_test(test_the_random_of_a_hello),
        cmocka_unit_test(a_handshake_is_over_with_the_first_application_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
