/* base_say_test.c - what is said on a terminal fits it, and loses no word. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "common/base/say.h"

struct terminal {
    int master;
    FILE *f;
};

static void open_terminal(struct terminal *t, unsigned short columns)
{
    struct winsize size = {.ws_row = 24, .ws_col = columns};
    struct termios plain;
    int slave;
    assert_int_equal(openpty(&t->master, &slave, NULL, NULL, &size), 0);
    assert_int_equal(tcgetattr(slave, &plain), 0);
    plain.c_oflag &= ~(tcflag_t)OPOST; /* line ends as they were written */
    assert_int_equal(tcsetattr(slave, TCSANOW, &plain), 0);
    t->f = fdopen(slave, "w");
    assert_non_null(t->f);
}

/* What was written so far: up to a mark that is written behind it. */
static void read_all(struct terminal *t, char *text, size_t text_bytes)
{
    size_t n = 0;
    fputc('\1', t->f);
    fflush(t->f);
    while (!n || text[n - 1] != '\1') {
        ssize_t got = read(t->master, text + n, text_bytes - n);
        assert_true(got > 0);
        n += (size_t)got;
        assert_true(n < text_bytes);
    }
    text[n - 1] = 0;
}

static void close_terminal(struct terminal *t)
{
    fclose(t->f);
    close(t->master);
}

static void lines_are_broken_between_words(void **state)
{
    (void)state;
    static const struct {
        unsigned short columns;
        unsigned indent;
        const char *text, *said;
    } rows[] = {
        {30, 2, "a fox\n", "a fox\n"},
        {20, 2, "a little fox met a hen\n", "a little fox met a\n  hen\n"},
        {20, 2, "12345678901234567890\nx", "12345678901234567890\nx"}, /* exactly the width */
        {20, 0, "123456789 1234567890 2\n", "123456789 1234567890\n2\n"},
        /* a line's own indentation, where it is further in; and at most half the width */
        {20, 2, "    one two three four\n", "    one two three\n    four\n"},
        {20, 16, "one two three four five\n", "one two three four\n          five\n"},
        /* what cannot be broken is whole; choices can */
        {20, 2, "see /a/path/that/is/too/long here\n", "see\n  /a/path/that/is/too/long\n  here\n"},
        {20, 4, "--dtype auto|f32|bf16|q8_0|q6_k\n",
         "--dtype\n    auto|f32|bf16|\n    q8_0|q6_k\n"},
        {20, 2, "||||||||||||||||||||||||\n", "||||||||||||||||||||\n  ||||\n"},
        /* blanks at an edge do not count, those between columns stay */
        {20, 2, "name      1   value      \n", "name      1   value\n"},
        {20, 2, "name      1         value\n", "name      1\n  value\n"},
        {20, 2, "\n\na\n", "\n\na\n"},
        {20, 2, "", ""},
        /* characters of two bytes, and of two columns */
        {20, 2,
         "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9 1234567890\n",
         "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9 1234567890\n"},
        {20, 2, "\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0 1234567890\n",
         "\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0\n  1234567890\n"},
        {20, 2, "\xff\xfe 123456789012345678\n", "\xff\xfe\n  123456789012345678\n"},
        {5, 2, "a little fox met a hen\n", "a little fox met a\n  hen\n"}, /* 20 at least */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct terminal t;
        char text[4096];
        open_terminal(&t, rows[i].columns);
        td_say(t.f, rows[i].indent, "%s", rows[i].text);
        read_all(&t, text, sizeof text);
        if (strcmp(text, rows[i].said)) fail_msg("row %zu: \"%s\"", i, text);
        struct td_said said;
        FILE *f = td_said_open(&said, t.f, rows[i].indent);
        assert_ptr_not_equal(f, t.f);
        for (const char *p = rows[i].text; *p; p++) fputc(*p, f);
        td_said_close(&said);
        read_all(&t, text, sizeof text);
        if (strcmp(text, rows[i].said)) fail_msg("row %zu, piece by piece: \"%s\"", i, text);
        close_terminal(&t);
    }
}

static void a_file_gets_lines_as_they_are(void **state)
{
    (void)state;
    static const char line[] = "a line that is longer than any terminal's twenty columns\n";
    char *text = NULL;
    size_t n_bytes;
    FILE *f = open_memstream(&text, &n_bytes);
    struct td_said said;
    assert_int_equal(td_terminal_columns(f), 0);
    td_say(f, 4, "%s", line);
    assert_ptr_equal(td_said_open(&said, f, 4), f);
    td_said_close(&said);
    fclose(f);
    assert_string_equal(text, line);
    free(text);
}

static void a_terminal_of_no_width_has_80(void **state)
{
    (void)state;
    struct terminal t;
    open_terminal(&t, 0);
    assert_int_equal(td_terminal_columns(t.f), 80);
    close_terminal(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lines_are_broken_between_words),
                                       cmocka_unit_test(a_file_gets_lines_as_they_are),
                                       cmocka_unit_test(a_terminal_of_no_width_has_80)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
