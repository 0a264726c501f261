/* cli_input_test.c - an input of any length comes whole, zeros included; one that cannot be read
 * is said so. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

static void every_length_comes_whole(void **state)
{
    (void)state;
    /* around each growth of the buffer */
    static const size_t lengths[] = {0, 1, 65534, 65535, 65536, 65537, 131071, 131072, 300001};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i], got = SIZE_MAX;
        FILE *f = tmpfile();
        assert_non_null(f);
        for (size_t k = 0; k < n; k++) fputc((int)(k * 7 % 251), f); /* a zero now and then */
        rewind(f);
        char *text = NULL;
        struct td_err err = {0};
        if (cli_read_all(f, &text, &got, &err)) fail_msg("%zu bytes: %s", n, err.msg);
        assert_int_equal(got, n);
        for (size_t k = 0; k < n; k++) assert_int_equal((unsigned char)text[k], k * 7 % 251);
        assert_int_equal(text[n], 0);
        free(text);
        fclose(f);
    }
}

static void an_error_is_no_short_text(void **state)
{
    (void)state;
    FILE *folder = fopen("/", "r"); /* opens, and cannot be read */
    assert_non_null(folder);
    char *text = (char *)&text;
    size_t n = 42;
    struct td_err err = {0};
    assert_int_equal(cli_read_all(folder, &text, &n, &err), TD_ERR_IO);
    assert_non_null(strstr(err.msg, "directory"));
    assert_ptr_equal(text, &text);
    assert_int_equal(n, 42);
    fclose(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_length_comes_whole),
                                       cmocka_unit_test(an_error_is_no_short_text)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
