/* base_file_stamp_test.c - every way in which a certificate is renewed changes its stamp, and
 * nothing else does. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file_stamp.h"

static char folder[] = "/tmp/td-stamp-XXXXXX";
static char file[64], other[64], target_a[64], target_b[64], named[64];

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* The clock that stamps inodes ticks every few ms: waits, with a bound, until a file made now is
 * stamped later than `path`. */
static void wait_for_a_tick(const char *path)
{
    struct stat st, now;
    char probe[80];
    assert_int_equal(stat(path, &st), 0);
    snprintf(probe, sizeof probe, "%s/probe", folder);
    for (int i = 0; i < 1000000; i++) {
        write_file(probe, "x");
        assert_int_equal(stat(probe, &now), 0);
        assert_int_equal(unlink(probe), 0);
        if (now.st_ctim.tv_sec != st.st_ctim.tv_sec || now.st_ctim.tv_nsec != st.st_ctim.tv_nsec)
            return;
    }
    fail_msg("the file system's clock stands still");
}

static void rewrite_longer(void) { write_file(file, "longer than before"); }

static void rewrite_same_size_and_time(void)
{
    struct stat st;
    assert_int_equal(stat(file, &st), 0);
    write_file(file, "BEFORE");
    struct timespec times[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, file, times, 0), 0);
}

static void rename_over(void)
{
    write_file(other, "before");
    assert_int_equal(rename(other, file), 0);
}

static void remove_it(void) { assert_int_equal(unlink(file), 0); }

/* What a kubelet does: the name stays, the link it goes through points elsewhere. */
static void swap_link(void)
{
    assert_int_equal(symlink(target_b, other), 0);
    assert_int_equal(rename(other, named), 0);
}

static void every_renewal_is_seen(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        void (*renew)(void);
        bool by_link;
    } cases[] = {
        {"rewritten in place, longer", rewrite_longer, false},
        {"rewritten in place, same length and time", rewrite_same_size_and_time, false},
        {"renamed over", rename_over, false},
        {"removed", remove_it, false},
        {"its link points elsewhere", swap_link, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(file, "before");
        write_file(target_a, "before");
        write_file(target_b, "before");
        unlink(named);
        assert_int_equal(symlink(target_a, named), 0);
        const char *paths[3] = {file, NULL, named};
        struct td_file_stamp before[3], still[3], after[3];
        td_file_stamps_take(paths, 3, before);
        wait_for_a_tick(file);
        td_file_stamps_take(paths, 3, still);
        if (!td_file_stamps_equal(before, still, 3))
            fail_msg("%s: nothing was touched, and the stamps differ", cases[i].name);
        cases[i].renew();
        td_file_stamps_take(paths, 3, after);
        if (td_file_stamps_equal(before, after, 3)) fail_msg("%s: not seen", cases[i].name);
        size_t at = cases[i].by_link ? 2 : 0; /* and it is that file's stamp, no other's */
        assert_false(td_file_stamps_equal(&before[at], &after[at], 1));
        assert_true(td_file_stamps_equal(&before[2 - at], &after[2 - at], 1));
        assert_true(td_file_stamps_equal(&before[1], &after[1], 1));
    }
}

static void a_file_that_is_not_there_is_no_file(void **state)
{
    (void)state;
    struct td_file_stamp none[2], zero[2] = {0};
    char missing[80];
    snprintf(missing, sizeof missing, "%s/missing", folder);
    const char *paths[2] = {missing, NULL};
    memset(none, 0xa5, sizeof none);
    td_file_stamps_take(paths, 2, none);
    assert_true(td_file_stamps_equal(none, zero, 2));
    write_file(file, "x");
    paths[0] = file;
    td_file_stamps_take(paths, 2, none);
    assert_false(td_file_stamps_equal(none, zero, 2));
    assert_true(td_file_stamps_equal(none, zero, 0));
}

static void the_hash_is_of_the_bytes_alone(void **state)
{
    (void)state;
    const char *paths[2] = {file, NULL}, *moved[2] = {NULL, file};
    write_file(file, "one");
    uint64_t one = td_files_hash(paths, 2, 100);
    assert_int_equal(chmod(file, 0600), 0);
    assert_int_equal(utimensat(AT_FDCWD, file, NULL, 0), 0);
    assert_true(td_files_hash(paths, 2, 100) == one);
    assert_true(td_files_hash(moved, 2, 100) != one);
    write_file(file, "two");
    assert_true(td_files_hash(paths, 2, 100) != one);
    assert_true(td_files_hash(paths, 2, 2) == td_files_hash((const char *[2]){NULL}, 2, 2));
    write_file(file, "one");
    assert_true(td_files_hash(paths, 2, 100) == one);
    unlink(file);
    assert_true(td_files_hash(paths, 2, 100) == td_files_hash((const char *[2]){NULL}, 2, 100));
}

/* Each field alone makes the difference. */
static void every_field_counts(void **state)
{
    (void)state;
    const struct td_file_stamp base = {
        .modified = {5, 6}, .changed = {7, 8}, .bytes = 9, .inode = 10, .device = 11};
    struct td_file_stamp s[7];
    for (size_t i = 0; i < 7; i++) s[i] = base;
    s[0].modified.tv_sec++;
    s[1].modified.tv_nsec++;
    s[2].changed.tv_sec++;
    s[3].changed.tv_nsec++;
    s[4].bytes++;
    s[5].inode++;
    s[6].device++;
    for (size_t i = 0; i < 7; i++) {
        if (td_file_stamps_equal(&base, &s[i], 1)) fail_msg("field %zu does not count", i);
        const struct td_file_stamp pair[2] = {base, base}, last_differs[2] = {base, s[i]};
        assert_false(td_file_stamps_equal(pair, last_differs, 2));
        assert_true(td_file_stamps_equal(pair, last_differs, 1));
    }
}

static int open_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(file, sizeof file, "%s/file", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    snprintf(target_a, sizeof target_a, "%s/a", folder);
    snprintf(target_b, sizeof target_b, "%s/b", folder);
    snprintf(named, sizeof named, "%s/named", folder);
    return 0;
}

static int close_folder(void **state)
{
    (void)state;
    const char *all[] = {file, other, target_a, target_b, named};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) unlink(all[i]);
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_renewal_is_seen),
                                       cmocka_unit_test(the_hash_is_of_the_bytes_alone),
        cmocka_unit_test(a_file_that_is_not_there_is_no_file),
                                       cmocka_unit_test(every_field_counts)};
    return cmocka_run_group_tests(tests, open_folder, close_folder);
}
