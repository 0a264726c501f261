/* cli_fit_test.c - a text in so many columns is never wider, and always whole characters. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "cli/terminal.h"

static void texts_are_cut_in_the_middle(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        unsigned columns;
        const char *fitted;
    } rows[] = {
        {"prefill-0", 9, "prefill-0"},
        {"prefill-0", 8, "pre...-0"},
        {"prefill-0", 5, "p...0"},
        {"prefill-0", 4, "pref"}, /* no room for the dots */
        {"prefill-0", 1, "p"},
        {"prefill-0", 0, ""},
        {"", 0, ""},
        {"\xc3\xa9t\xc3\xa9s", 3, "\xc3\xa9t\xc3\xa9"},  /* two bytes a character */
        {"\xe4\xbd\xa0\xe5\xa5\xbd", 3, "\xe4\xbd\xa0"}, /* two columns each */
        {"\xe4\xbd\xa0\xe5\xa5\xbd", 1, ""},
        {"e\xcc\x81t\xc3\xa9s", 1, "e\xcc\x81"}, /* the accent belongs to the letter */
        {"\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0", 5, "...\xe4\xbd\xa0"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char to[64];
        cli_fit(rows[i].text, rows[i].columns, to, sizeof to);
        if (strcmp(to, rows[i].fitted))
            fail_msg("\"%s\" in %u columns: \"%s\"", rows[i].text, rows[i].columns, to);
    }
}

static void marks_without_width_are_bounded(void **state)
{
    (void)state;
    char text[200] = "e", to[8];
    for (size_t i = 0; i < 90; i++) memcpy(text + 1 + 2 * i, "\xcc\x81", 2);
    cli_fit(text, 1, to, sizeof to);
    assert_string_equal(to, "e\xcc\x81\xcc\x81\xcc\x81");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(texts_are_cut_in_the_middle),
                                       cmocka_unit_test(marks_without_width_are_bounded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
