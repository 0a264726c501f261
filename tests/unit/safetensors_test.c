/* safetensors_test.c - every way in which a file or an index can lie, and what must be said
 * about it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/model/safetensors.h"

/* A file in malloc'd memory of exactly its size, so that a sanitizer sees one byte too far. */
static uint8_t *make_file(const char *header, uint64_t header_bytes, size_t data_bytes,
                          size_t *ret_bytes)
{
    size_t n = strlen(header);
    uint8_t *f = malloc(8 + n + data_bytes);
    assert_non_null(f);
    for (int i = 0; i < 8; i++) f[i] = (uint8_t)(header_bytes >> (8 * i));
    memcpy(f + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++) f[8 + n + i] = (uint8_t)i;
    *ret_bytes = 8 + n + data_bytes;
    return f;
}

#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"

static void good_file(void **state)
{
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"z.w\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_"
        "offsets\":[24,32]}," A ",\"s\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[33,35]},"
        "\"e\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_"
        "offsets\":[24,24]},"
        "\"odd\":{\"dtype\":\"F4_NEW\",\"shape\":[3],\"data_offsets\":[32,33]}}   ";
    size_t n;
    uint8_t *f = make_file(header, strlen(header), 35, &n);
    struct td_checkpoint st;
    struct td_err err = {0};
    if (td_safetensors_parse(f, n, "t", &st, &err)) fail_msg("%s", err.msg);
    assert_int_equal(st.n_tensors, 5);
    const struct td_tensor *a = td_checkpoint_find(&st, "a"), *z = td_checkpoint_find(&st, "z.w"),
                           *s = td_checkpoint_find(&st, "s"), *e = td_checkpoint_find(&st, "e"),
                           *odd = td_checkpoint_find(&st, "odd");
    assert_true(a && z && s && e && odd && !td_checkpoint_find(&st, "b") &&
                !td_checkpoint_find(&st, "__metadata__"));
    assert_true(a->format == td_format_of_dtype(TD_F32) && a->n_dims == 2 && a->shape[0] == 2 &&
                a->shape[1] == 3 && a->n_bytes == 24 && a->data[0] == 0);
    assert_true(z->format->dtype == TD_BF16 && z->data[0] == 24 && z->n_bytes == 8);
    assert_true(s->format->dtype == TD_F16 && s->n_dims == 0 && s->data[0] == 33);
    assert_true(!e->format && e->n_bytes == 0 && strcmp(e->dtype_name, "I64") == 0);
    assert_true(!odd->format && odd->n_bytes == 1);
    td_checkpoint_close(&st);
    td_checkpoint_close(&st);
    free(f);
}

struct bad {
    const char *header;
    uint64_t header_bytes; /* 0: the truth */
    size_t data_bytes;
    td_status status;
    const char *says;
};

static const struct bad bad_files[] = {
    {"{" A "}", UINT64_MAX, 24, TD_ERR_CORRUPT, "header length is 18446744073709551615"},
    {"{" A "}", 1000, 24, TD_ERR_CORRUPT, "header length is 1000, but only"},
    {"{" A "}", 10, 24, TD_ERR_CORRUPT, "header: line 1"},
    {"", 0, 24, TD_ERR_CORRUPT, "header"},
    {"[]", 0, 0, TD_ERR_CORRUPT, "header must be a JSON object"},
    {"{}", 0, 0, TD_ERR_CORRUPT, "names no tensor"},
    {"{\"__metadata__\":{}}", 0, 0, TD_ERR_CORRUPT, "names no tensor"},
    {"{\"__metadata__\":7," A "}", 0, 24, TD_ERR_CORRUPT, "__metadata__"},
    {"{" A "," A "}", 0, 24, TD_ERR_CORRUPT, "duplicate"},
    {"{" A "}", 0, 23, TD_ERR_CORRUPT, "tensor a ends at byte 24 of the data, which has 23 bytes"},
    {"{" A "}", 0, 25, TD_ERR_CORRUPT,
     "the tensors end at byte 24 of the data, which has 25 bytes"},
    {"{" A ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[20,24]}}", 0, 24,
     TD_ERR_CORRUPT, "tensor b begins at byte 20, inside tensor a"},
    {"{" A ",\"b\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", 0, 24,
     TD_ERR_CORRUPT, "inside tensor"},
    {"{" A ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[28,32]}}", 0, 32,
     TD_ERR_CORRUPT, "bytes 24 to 28 before tensor b belong to no tensor"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,4],\"data_offsets\":[0,24]}}", 0, 24, TD_ERR_CORRUPT,
     "8 elements of F32 are 32 bytes, but its data_offsets hold 24"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 0, 1, TD_ERR_CORRUPT,
     "3 elements of F4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1099511627776,1099511627776],\"data_offsets\":[0,24]}}",
     0, 24, TD_ERR_CORRUPT, "product of its shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,24]}}", 0, 24,
     TD_ERR_CORRUPT, "shape[0]"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,24]}}", 0, 24, TD_ERR_CORRUPT,
     "shape[0]"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,24]}}", 0, 24, TD_ERR_CORRUPT,
     "shape[0]"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,6],\"data_offsets\":[0,24]}}", 0, 24,
     TD_ERR_LIMIT, "9 dimensions"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[24,0]}}", 0, 24, TD_ERR_CORRUPT,
     "data_offsets must be"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[-24,0]}}", 0, 24, TD_ERR_CORRUPT,
     "data_offsets must be"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,9223372036854775807]}}", 0, 24,
     TD_ERR_CORRUPT, "ends at byte 9223372036854775807"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0]}}", 0, 24, TD_ERR_CORRUPT,
     "two data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}}", 0, 24, TD_ERR_CORRUPT,
     "must have a dtype"},
    {"{\"a\":{\"shape\":[6],\"data_offsets\":[0,24]}}", 0, 24, TD_ERR_CORRUPT, "must have a dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24],\"x\":1}}", 0, 24,
     TD_ERR_CORRUPT, "nothing else"},
    {"{\"a\":[]}", 0, 24, TD_ERR_CORRUPT, "must have a dtype"},
};

static void lying_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_files / sizeof *bad_files; i++) {
        const struct bad *b = &bad_files[i];
        size_t n;
        uint8_t *f = make_file(b->header, b->header_bytes ? b->header_bytes : strlen(b->header),
                               b->data_bytes, &n);
        struct td_checkpoint st;
        struct td_err err = {0};
        td_status s = td_safetensors_parse(f, n, "t", &st, &err);
        if (s != b->status || !strstr(err.msg, b->says))
            fail_msg("%s\n  answered %s: %s\n  expected %s: ...%s...", b->header, td_status_name(s),
                     err.msg, td_status_name(b->status), b->says);
        free(f);
    }
    struct td_checkpoint st;
    struct td_err err = {0};
    uint8_t *few = malloc(7);
    memset(few, 0, 7);
    assert_int_equal(td_safetensors_parse(few, 7, "t", &st, &err), TD_ERR_CORRUPT);
    free(few);

    char header[700];
    memset(header, 'n', sizeof header);
    memcpy(header, "{\"", 2);
    snprintf(header + 602, sizeof header - 602,
             "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
    size_t n;
    uint8_t *f = make_file(header, strlen(header), 1, &n);
    assert_int_equal(td_safetensors_parse(f, n, "t", &st, &err), TD_ERR_LIMIT);
    assert_non_null(strstr(err.msg, "600 bytes"));
    free(f);
}

/* A header length that fits the file but passes the bound: a sparse map, never read. */
static void huge_header(void **state)
{
    (void)state;
    size_t n = ((size_t)17 << 20) + 8;
    uint8_t *f = calloc(1, n);
    assert_non_null(f);
    f[2] = 0x10, f[3] = 0x01;
    struct td_checkpoint st;
    struct td_err err = {0};
    assert_int_equal(td_safetensors_parse(f, n, "t", &st, &err), TD_ERR_LIMIT);
    assert_non_null(strstr(err.msg, "must be at most 16777216"));
    free(f);
}

/* ---- directories ---- */

static char dir[64];

static void write_file(const char *name, const void *bytes, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static void write_shard(const char *name, const char *tensor)
{
    char header[256];
    snprintf(header, sizeof header,
             "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", tensor);
    size_t n;
    uint8_t *f = make_file(header, strlen(header), 4, &n);
    write_file(name, f, n);
    free(f);
}

static void remove_file(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    unlink(path);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/td_safetensors_XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"a.safetensors", "b.safetensors", "model.safetensors",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < 4; i++) remove_file(names[i]);
    return rmdir(dir);
}

static void expect(td_status want, const char *says)
{
    struct td_checkpoint st;
    struct td_err err = {0};
    td_status s = td_safetensors_open(dir, &st, &err);
    if (s != want || !strstr(err.msg, says))
        fail_msg("answered %s: %s\n  expected %s: ...%s...", td_status_name(s), err.msg,
                 td_status_name(want), says);
    if (!s) td_checkpoint_close(&st);
}

static void expect_index(const char *text, td_status want, const char *says)
{
    write_file("model.safetensors.index.json", text, strlen(text));
    expect(want, says);
}

static void directories(void **state)
{
    (void)state;
    expect(TD_ERR_NOT_FOUND, "holds neither");
    write_shard("a.safetensors", "ta");
    write_shard("b.safetensors", "tb");
    expect_index("{\"weight_map\":{\"ta\":\"a.safetensors\",\"tb\":\"b.safetensors\"}}", TD_OK, "");
    expect_index("{\"weight_map\":{\"ta\":\"a.safetensors\",\"tb\":\"a.safetensors\"}}",
                 TD_ERR_CORRUPT, "weight_map names tensor tb");
    expect_index("{\"weight_map\":{\"ta\":\"a.safetensors\",\"x\":\"b.safetensors\"}}",
                 TD_ERR_CORRUPT, "tensor tb is in a shard, but not in weight_map");
    expect_index("{\"weight_map\":{\"ta\":\"b.safetensors\",\"tb\":\"a.safetensors\"}}",
                 TD_ERR_CORRUPT, "but in another shard");
    expect_index("{\"weight_map\":{\"ta\":\"c.safetensors\"}}", TD_ERR_NOT_FOUND, "c.safetensors");
    expect_index("{\"weight_map\":{\"ta\":\"../a.safetensors\"}}", TD_ERR_CORRUPT, "plain name");
    expect_index("{\"weight_map\":{\"ta\":\"/etc/x.safetensors\"}}", TD_ERR_CORRUPT, "plain name");
    expect_index("{\"weight_map\":{\"ta\":\"a.bin\"}}", TD_ERR_CORRUPT, "plain name");
    expect_index("{\"weight_map\":{\"ta\":7}}", TD_ERR_CORRUPT, "plain name");
    expect_index("{\"weight_map\":{}}", TD_ERR_CORRUPT, "weight_map");
    expect_index("{\"weight_map\":[]}", TD_ERR_CORRUPT, "weight_map");
    expect_index("[]", TD_ERR_CORRUPT, "weight_map");
    expect_index("{", TD_ERR_INVALID, "index.json");
    write_shard("b.safetensors", "ta");
    expect_index("{\"weight_map\":{\"ta\":\"a.safetensors\",\"tb\":\"b.safetensors\"}}",
                 TD_ERR_CORRUPT, "ta");
    write_file("a.safetensors", "", 0);
    expect_index("{\"weight_map\":{\"ta\":\"a.safetensors\"}}", TD_ERR_CORRUPT, "0 bytes");
    write_shard("model.safetensors", "one"); /* wins over the index */
    expect(TD_OK, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_file), cmocka_unit_test(lying_headers), cmocka_unit_test(huge_header),
        cmocka_unit_test_setup_teardown(directories, setup, teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
