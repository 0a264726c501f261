/* base_gguf_test.c - GGUF files, good ones and those that contradict themselves. */
#include "tests/unit/gguf_file.h"

#include <sys/mman.h>
#include <unistd.h>

static const float floats[64] = {1, 2, 3};

/* A small file with a value of many kinds and three tensors. */
static void fill(struct gf *f)
{
    static const char *const words[] = {"a", "", "\xff\x00z"};
    const int32_t same[] = {7, 7, 7}, mixed[] = {7, 8, 7};
    gf_str(f, "general.architecture", "llama");
    gf_u32(f, "n", 42);
    gf_f32(f, "x", 0.5f);
    gf_bool(f, "yes", 1);
    gf_strs(f, "words", words, 3);
    gf_array(f, "same", TD_GGUF_I32, 3, same, sizeof same);
    gf_array(f, "mixed", TD_GGUF_I32, 3, mixed, sizeof mixed);
    gf_array(f, "none", TD_GGUF_I32, 0, NULL, 0);
    gf_tensor(f, "vector", 3, 0, 0, floats, 12);
    gf_tensor(f, "matrix", 32, 2, 8, floats, 68);
    gf_tensor(f, "last", 2, 2, 30, floats, 8);
}

static void a_file_as_it_is(void **state)
{
    (void)state;
    struct gf f = {0};
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    size_t n_bytes;
    fill(&f);
    uint8_t *bytes = gf_finish(&f, &n_bytes);
    if (td_gguf_parse(bytes, n_bytes, "file", &g, &err)) fail_msg("%s", err.msg);
    int64_t n = 0;
    double x = 0;
    bool yes = false, present = true;
    struct td_gguf_text text;
    assert_int_equal(td_gguf_i64(g, "n", 0, 100, &n, NULL, &err), TD_OK);
    assert_int_equal(n, 42);
    assert_int_equal(td_gguf_i64(g, "same", 0, 100, &n, NULL, &err), TD_OK);
    assert_int_equal(n, 7);
    assert_int_equal(td_gguf_i64(g, "absent", 0, 1, &n, &present, &err), TD_OK);
    assert_true(!present && n == 7);
    assert_int_equal(td_gguf_f64(g, "x", 0, 1, &x, NULL, &err), TD_OK);
    assert_true(x == 0.5);
    assert_int_equal(td_gguf_bool(g, "yes", &yes, NULL, &err), TD_OK);
    assert_true(yes);
    assert_int_equal(td_gguf_str(g, "general.architecture", &text, &err), TD_OK);
    assert_true(text.n == 5 && !memcmp(text.bytes, "llama", 5));
    const struct td_gguf_value *words;
    assert_int_equal(td_gguf_array(g, "words", TD_GGUF_STRING, &words, &err), TD_OK);
    const uint8_t *at = NULL;
    assert_int_equal(words->n, 3);
    assert_int_equal(td_gguf_next(words, &at).n, 1);
    assert_int_equal(td_gguf_next(words, &at).n, 0);
    text = td_gguf_next(words, &at);
    assert_true(text.n == 1 && text.bytes[0] == '\xff');

    assert_int_equal(td_gguf_i64(g, "n", 0, 41, &n, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "n is 42, must be in 0..41");
    assert_int_equal(td_gguf_i64(g, "mixed", 0, 41, &n, NULL, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "mixed is an array of 3 values that differ"));
    assert_int_equal(td_gguf_i64(g, "none", 0, 41, &n, NULL, &err), TD_ERR_UNSUPPORTED);
    assert_int_equal(td_gguf_i64(g, "x", 0, 41, &n, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "x has type f32, must be an integer");
    assert_int_equal(td_gguf_str(g, "words", &text, &err), TD_ERR_INVALID);
    assert_int_equal(td_gguf_array(g, "same", TD_GGUF_F32, &words, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "same has type array of i32, must be array of f32");

    assert_int_equal(g->n_tensors, 3);
    assert_string_equal(g->tensors[1].name, "matrix");
    assert_true(g->tensors[1].n_dims == 2 && g->tensors[1].ne[0] == 32 && g->tensors[1].ne[1] == 2);
    assert_true(g->tensors[1].n_bytes == 68 && g->tensors[1].data == g->tensors[0].data + 32);
    td_gguf_close(g);
    /* every shorter file is refused, and nothing behind its end is read */
    for (size_t n_left = 0; n_left < n_bytes; n_left++) {
        uint8_t *cut = malloc(n_left ? n_left : 1);
        memcpy(cut, bytes, n_left);
        assert_int_not_equal(td_gguf_parse(cut, n_left, "cut", &g, &err), TD_OK);
        free(cut);
    }
    free(bytes);
}

static void expect(struct gf *f, td_status want, const char *part)
{
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    size_t n;
    uint8_t *bytes = gf_finish(f, &n);
    td_status s = td_gguf_parse(bytes, n, "file", &g, &err);
    if (s != want || !strstr(err.msg, part))
        fail_msg("%s (%s), must be %s with \"%s\"", td_status_name(s), err.msg,
                 td_status_name(want), part);
    free(bytes);
}

/* One tensor's record and its 12 bytes of data. */
static void expect_info(const char *name, uint32_t n_dims, int64_t ne0, int64_t ne1, uint32_t type,
                        uint64_t offset, td_status want, const char *part)
{
    struct gf f = {0};
    int64_t ne[8] = {ne0, ne1, 1, 1, 1, 1, 1, 1};
    gf_info(&f, name, n_dims, ne, type, offset);
    gf_put(&f.data, floats, 12);
    expect(&f, want, part);
}

static void tensors_that_lie(void **state)
{
    (void)state;
    expect_info("t", 1, 3, 0, 0, 32, TD_ERR_CORRUPT,
                "begins at byte 32 of the data, must begin at 0");
    expect_info("t", 1, 4, 0, 0, 0, TD_ERR_CORRUPT,
                "has 16 bytes from byte 0 of the data, which has 12");
    expect_info("t", 1, 0, 0, 0, 0, TD_ERR_CORRUPT, "dimension 0 is 0");
    expect_info("t", 1, -1, 0, 0, 0, TD_ERR_CORRUPT, "dimension 0 is -1");
    expect_info("t", 2, INT64_MAX, 3, 0, 0, TD_ERR_CORRUPT, "at most 2^48 values");
    expect_info("t", 2, (int64_t)1 << 32, (int64_t)1 << 32, 0, 0, TD_ERR_CORRUPT, "2^48");
    expect_info("t", 0, 1, 1, 0, 0, TD_ERR_CORRUPT, "has 0 dimensions");
    expect_info("t", 5, 1, 1, 0, 0, TD_ERR_CORRUPT, "has 5 dimensions, must have 1 to 4");
    expect_info("t", 1, 33, 0, 8, 0, TD_ERR_CORRUPT, "rows of 33 values are no whole blocks of 32");
    static const struct {
        uint32_t type;
        const char *says;
    } kinds[] = {{16, "type 16 (IQ2_XXS)"}, {17, "type 17 (IQ2_XS)"}, {18, "type 18 (IQ3_XXS)"},
                 {19, "type 19 (IQ1_S)"},   {21, "type 21 (IQ3_S)"},  {22, "type 22 (IQ2_S)"},
                 {29, "type 29 (IQ1_M)"},   {34, "type 34 (TQ1_0)"},  {35, "type 35 (TQ2_0)"},
                 {40, "type 40 (NVFP4)"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        expect_info("t", 1, 256, 0, kinds[i].type, 0, TD_ERR_UNSUPPORTED, kinds[i].says);
    expect_info("t", 1, 32, 0, 4, 0, TD_ERR_UNSUPPORTED, "type 4 (unknown)");
    expect_info("t", 1, 32, 0, 0x80000000u, 0, TD_ERR_UNSUPPORTED, "(unknown)");
    expect_info("", 1, 3, 0, 0, 0, TD_ERR_CORRUPT, "the name of tensor number 0 is empty");
    expect_info("t t", 1, 3, 0, 0, 0, TD_ERR_CORRUPT, "not printable ASCII");
    expect_info("0123456789012345678901234567890123456789012345678901234567890123", 1, 3, 0, 0, 0,
                TD_ERR_LIMIT, "64 bytes, must be at most 63");
    struct gf f = {0};
    gf_tensor(&f, "t", 3, 0, 0, floats, 12);
    gf_tensor(&f, "t", 3, 0, 0, floats, 12);
    expect(&f, TD_ERR_CORRUPT, "tensor t is there twice");
    int64_t ne = 3;
    gf_info(&f, "t", 1, &ne, 0, 0), gf_info(&f, "u", 1, &ne, 0, 0);
    gf_put(&f.data, floats, 64);
    expect(&f, TD_ERR_CORRUPT, "tensor u begins at byte 0 of the data, must begin at 32");
    gf_info(&f, "t", 1, &ne, 0, 0);
    gf_put(&f.data, floats, 33);
    expect(&f, TD_ERR_CORRUPT, "the tensors end at byte 12 of the data, which has 33");
    gf_put(&f.data, floats, 4);
    expect(&f, TD_ERR_CORRUPT, "the tensors end at byte 0");
}

static void values_that_lie(void **state)
{
    (void)state;
    struct gf f = {0};
    const uint64_t huge = (uint64_t)1 << 62, gib = (uint64_t)1 << 30;
    gf_raw(&f, "k", 13, floats, 4);
    expect(&f, TD_ERR_CORRUPT, "k has type 13, must be in 0..12");
    gf_bool(&f, "k", 2);
    expect(&f, TD_ERR_CORRUPT, "k is 2, must be 0 or 1");
    gf_array(&f, "k", TD_GGUF_BOOL, 2, "\x01\x02", 2);
    expect(&f, TD_ERR_CORRUPT, "k is 2, must be 0 or 1");
    gf_raw(&f, "k", TD_GGUF_STRING, &gib, 8);
    expect(&f, TD_ERR_CORRUPT, "k is a text of 1073741824 bytes, but");
    gf_array(&f, "k", TD_GGUF_F64, huge, floats, 8);
    expect(&f, TD_ERR_CORRUPT, "k has 4611686018427387904 elements of at least 8 bytes");
    gf_array(&f, "k", TD_GGUF_STRING, gib, floats, 64);
    expect(&f, TD_ERR_CORRUPT, "k has 1073741824 elements");
    gf_array(&f, "k", TD_GGUF_ARRAY, 1, floats, 64);
    expect(&f, TD_ERR_UNSUPPORTED, "k is an array of arrays");
    gf_u32(&f, "k", 1), gf_f32(&f, "k", 1);
    expect(&f, TD_ERR_CORRUPT, "key k is there twice");
    gf_u32(&f, "", 1);
    expect(&f, TD_ERR_CORRUPT, "key number 0 is empty");
    gf_u32(&f, "a\nb", 1);
    expect(&f, TD_ERR_CORRUPT, "key number 0 is empty or not printable ASCII");
    gf_u32(&f, "general.alignment", 1u << 30);
    expect(&f, TD_ERR_INVALID, "general.alignment is 1073741824, must be in 1..65536");
    gf_u32(&f, "general.alignment", 24);
    expect(&f, TD_ERR_CORRUPT, "general.alignment is 24, must be a power of two");
    gf_str(&f, "general.alignment", "32");
    expect(&f, TD_ERR_INVALID, "general.alignment has type string");
    f.n_values = huge;
    expect(&f, TD_ERR_CORRUPT, "the header counts 4611686018427387904 values");
    f.n_tensors = huge;
    expect(&f, TD_ERR_CORRUPT, "the header counts 4611686018427387904 tensors");
    char *text = calloc(1, (1 << 20) + 2);
    memset(text, 'x', (1 << 20) + 1);
    gf_str(&f, "k", text);
    expect(&f, TD_ERR_LIMIT, "k is a text of 1048577 bytes, must be at most 1048576");
    struct td_gguf *g;
    size_t n;
    gf_str(&f, "tokenizer.chat_template", text);
    uint8_t *bytes = gf_finish(&f, &n);
    assert_int_equal(td_gguf_parse(bytes, n, "file", &g, NULL), TD_OK);
    td_gguf_close(g);
    free(bytes), free(text);
}

/* No value is there to be read: the file ends a page, and behind it is none. */
static void an_empty_array_ends_the_file(void **state)
{
    (void)state;
    struct gf f = {0};
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    size_t n, page = (size_t)sysconf(_SC_PAGESIZE);
    gf_str(&f, "k", "ten bytes.");
    gf_array(&f, "general.alignment", TD_GGUF_STRING, 0, NULL, 0);
    uint8_t *bytes = gf_finish(&f, &n);
    assert_int_equal(n % 32, 0); /* else zeros would stand behind the array */
    uint8_t *pages =
        mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(pages != MAP_FAILED && n <= page);
    assert_int_equal(mprotect(pages + page, page, PROT_NONE), 0);
    memcpy(pages + page - n, bytes, n);
    assert_int_equal(td_gguf_parse(pages + page - n, n, "file", &g, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg,
                        "file: general.alignment has type array of string, must be an integer");
    munmap(pages, 2 * page);
    free(bytes);
}

static void headers_that_lie(void **state)
{
    (void)state;
    static const struct {
        uint32_t version;
        td_status want;
        const char *part;
    } rows[] = {{1, TD_ERR_UNSUPPORTED, "GGUF version 1, must be 2 or 3"},
                {4, TD_ERR_UNSUPPORTED, "GGUF version 4"},
                {0, TD_ERR_UNSUPPORTED, "GGUF version 0"},
                {3u << 24, TD_ERR_UNSUPPORTED, "big-endian"}};
    struct gf f = {0};
    struct td_gguf *g = NULL;
    size_t n;
    fill(&f);
    uint8_t *bytes = gf_finish(&f, &n);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct td_err err = {0};
        memcpy(bytes + 4, &rows[i].version, 4);
        assert_int_equal(td_gguf_parse(bytes, n, "file", &g, &err), rows[i].want);
        if (!strstr(err.msg, rows[i].part)) fail_msg("%s", err.msg);
    }
    struct td_err err = {0};
    bytes[0] = 'H';
    assert_int_equal(td_gguf_parse(bytes, n, "file", &g, &err), TD_ERR_CORRUPT);
    assert_string_equal(err.msg, "file: the first bytes are not GGUF");
    free(bytes);
}

/* A file of a model in three: what it says of the split, and its tensors, NULL after the last. */
struct part {
    int no, count, n_tensors; /* -1: not said */
    const char *tensors[2];
    const char *arch; /* NULL: not said, as by most writers in all files but the first */
    int32_t alignment;
};

static void write_part(const char *dir, int at, const struct part *p)
{
    char path[300];
    struct gf f = {.alignment = (size_t)p->alignment};
    snprintf(path, sizeof path, "%s/m-%05d-of-00003.gguf", dir, at);
    uint16_t no = (uint16_t)p->no, count = (uint16_t)p->count;
    if (p->no >= 0) gf_raw(&f, "split.no", TD_GGUF_U16, &no, 2);
    if (p->count >= 0) gf_raw(&f, "split.count", TD_GGUF_U16, &count, 2);
    if (p->n_tensors >= 0) gf_raw(&f, "split.tensors.count", TD_GGUF_I32, &p->n_tensors, 4);
    if (p->arch) gf_str(&f, "general.architecture", p->arch);
    if (p->alignment) gf_u32(&f, "general.alignment", (uint32_t)p->alignment);
    for (int i = 0; i < 2 && p->tensors[i]; i++) gf_tensor(&f, p->tensors[i], 3, 0, 0, floats, 12);
    gf_write(&f, path);
}

// clang-format off
/* The first and the third of three files; the second is always as it should be. */
#define FIRST {0, 3, 3, {"a"}, "llama", 0}
static const struct {
    struct part first, third;
    int open;
    td_status want;
    const char *says;
} parts[] = {
    {FIRST, {2, 3, 3, {"c"}, NULL, 0}, 1, TD_OK, ""},
    /* some give every file the model's settings, or padding of its own */
    {FIRST, {2, 3, 3, {"c"}, "llama", 64}, 1, TD_OK, ""},
    /* out of place */
    {FIRST, {2, 3, 3, {"c"}, NULL, 0}, 2, TD_ERR_INVALID,
     "file 2 of 3 of one model (split.no is 1): give the first"},
    {FIRST, {1, 3, 3, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: split.no is 1 and split.count 3, must be 2 and 3"},
    {FIRST, {3, 3, 3, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: split.no is 3, must be below split.count 3"},
    {FIRST, {2, 4, 3, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT, "split.count 4, must be 2 and 3"},
    /* says too little */
    {FIRST, {-1, -1, -1, {"c"}, "llama", 0}, 1, TD_ERR_CORRUPT,
     "split.no is 0 and split.count 1, must be 2 and 3"},
    {FIRST, {2, 3, -1, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: split.count is 3, but split.tensors.count is missing"},
    {{0, 3, -1, {"a"}, "llama", 0}, {2, 3, 3, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00001-of-00003.gguf: split.count is 3, but split.tensors.count is missing"},
    {{-1, 3, 3, {"a"}, "llama", 0}, {2, 3, 3, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00001-of-00003.gguf: split.count is 3, but split.no is missing"},
    /* of another model: another number of tensors, another setting, one that the first has not */
    {FIRST, {2, 3, 4, {"c"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: split.tensors.count is 4, but the first file says 3"},
    {FIRST, {2, 3, 3, {"c"}, "qwen2", 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: general.architecture differs from the first file's"},
    {{0, 3, 3, {"a"}, NULL, 0}, {2, 3, 3, {"c"}, "llama", 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: general.architecture is not among the first file's"},
    /* cut at other places: a tensor twice, one missing, one too many */
    {FIRST, {2, 3, 3, {"a"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00001-of-00003.gguf: tensor a is there twice, in files 1 and 3"},
    {FIRST, {2, 3, 3, {NULL}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00001-of-00003.gguf: split.tensors.count is 3, but 3 files have 2 tensors"},
    {FIRST, {2, 3, 3, {"c", "d"}, NULL, 0}, 1, TD_ERR_CORRUPT,
     "00003-of-00003.gguf: 4 tensors up to here, but split.tensors.count is 3"},
};
// clang-format on

static void files_of_one_model(void **state)
{
    (void)state;
    char dir[] = "/tmp/tandem-gguf-XXXXXX", path[300], other[300];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/m-00001-of-00003.gguf", dir);
    const struct part second = {1, 3, 3, {"b"}, NULL, 0};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        struct td_gguf *g = NULL;
        struct td_err err = {0};
        write_part(dir, 1, &parts[i].first);
        write_part(dir, 2, &second);
        write_part(dir, 3, &parts[i].third);
        snprintf(other, sizeof other, "%s/m-%05d-of-00003.gguf", dir, parts[i].open);
        td_status s = td_gguf_open(other, &g, &err);
        if (s != parts[i].want || !strstr(err.msg, parts[i].says))
            fail_msg("row %zu: %s", i, err.msg);
        if (s) continue;
        assert_true(g->n_tensors == 3 && g->n_files == 3);
        assert_string_equal(g->tensors[2].name, "c");
        td_gguf_close(g);
    }
    struct td_gguf *g = NULL;
    struct td_err err = {0};
    snprintf(other, sizeof other, "%s/other.gguf", dir);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(td_gguf_open(other, &g, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "must be named *-00001-of-00003.gguf"));
    assert_true(td_gguf_is_file(other) && !td_gguf_is_file(dir) && !td_gguf_is_file("/nowhere"));
    assert_int_equal(rename(other, path), 0);
    snprintf(other, sizeof other, "%s/m-00002-of-00003.gguf", dir);
    assert_int_equal(remove(other), 0);
    assert_int_not_equal(td_gguf_open(path, &g, &err), TD_OK);
    assert_non_null(strstr(err.msg, "m-00002-of-00003.gguf"));
    remove(path);
    snprintf(path, sizeof path, "%s/m-00003-of-00003.gguf", dir);
    remove(path);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_as_it_is),    cmocka_unit_test(tensors_that_lie),
        cmocka_unit_test(values_that_lie),    cmocka_unit_test(headers_that_lie),
        cmocka_unit_test(files_of_one_model), cmocka_unit_test(an_empty_array_ends_the_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
