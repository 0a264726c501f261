/* base_mem_test.c - arenas, file maps, file reads. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "common/base/table.h"

static void arenas_are_aligned_zeroed_and_writable(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 4096, 100000, (2 << 20) + 5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int shareable = 0; shareable < 2; shareable++) {
            struct td_arena arena = {0};
            struct td_err err;
            assert_int_equal(td_arena_create(sizes[i], shareable, "test", &arena, &err), TD_OK);
            assert_int_equal((uintptr_t)arena.base % (2 << 20), 0);
            assert_int_equal(arena.bytes, sizes[i]);
            unsigned char *p = arena.base;
            for (size_t k = 0; k < sizes[i]; k++) {
                if (p[k]) fail_msg("byte %zu is not zero", k);
            }
            memset(p, 0x5a, sizes[i]);
            assert_int_equal(arena.memfd >= 0, shareable);
            if (shareable) { /* a second mapping sees the same bytes */
                unsigned char *other = mmap(NULL, sizes[i], PROT_READ, MAP_SHARED, arena.memfd, 0);
                assert_true(other != MAP_FAILED);
                assert_memory_equal(other, p, sizes[i]);
                munmap(other, sizes[i]);
            }
            td_arena_destroy(&arena);
            assert_null(arena.base);
            td_arena_destroy(&arena);
        }
    }
    td_arena_destroy(NULL);
}

/* Memory comes to what is written alone, and goes again; huge pages only where pieces fill them. */
static void sparse_arenas_take_what_is_written(void **state)
{
    (void)state;
    size_t huge = (size_t)2 << 20, page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char map[8];
    struct td_arena arena = {0};
    struct td_err err;
    assert_true(td_arena_sparse_unit(1) == page && td_arena_sparse_unit(huge / 2) == page);
    assert_true(td_arena_sparse_unit(huge) == huge && td_arena_sparse_unit(9 * huge) == huge);
    assert_true(td_arena_sparse_unit(7 * huge + page) == page);
    assert_true(td_arena_sparse_unit(8 * huge + page) == huge);
    /* more than this machine has, as experts may be */
    size_t bytes = (size_t)td_mem_available() * 4;
    assert_int_equal(td_arena_create_sparse(bytes, page, "test", &arena, &err), TD_OK);
    assert_true((uintptr_t)arena.base % huge == 0 && arena.bytes == bytes && arena.memfd == -1);
    uint8_t *at = (uint8_t *)arena.base + huge + 3 * page;
    memset(at, 7, 2 * page);
    assert_int_equal(mincore(at - 2 * page, 6 * page, map), 0);
    assert_true(!(map[0] & 1) && !(map[1] & 1) && !(map[4] & 1) && !(map[5] & 1));
    td_arena_give_back(&arena, huge + 3 * page, page);
    assert_int_equal(mincore(at, page, map), 0);
    assert_true(!(map[0] & 1) && at[0] == 0 && at[page] == 7);
    td_arena_destroy(&arena);
    assert_null(arena.base);
    assert_int_equal(td_arena_create_sparse(0, page, "kv", &arena, NULL), TD_ERR_INVALID);
    assert_int_equal(td_arena_create_sparse(SIZE_MAX, page, "kv", &arena, NULL), TD_ERR_INVALID);
    assert_int_equal(td_arena_create_sparse((size_t)1 << 62, page, "kv", &arena, &err),
                     TD_ERR_NOMEM);
    assert_non_null(strstr(err.msg, "arena kv"));
}

static void too_much_is_refused_before_it_is_touched(void **state)
{
    (void)state;
    static const size_t sizes[] = {(size_t)1 << 50, SIZE_MAX, SIZE_MAX - 4096};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int shareable = 0; shareable < 2; shareable++) {
            struct td_arena arena = {0};
            struct td_err err;
            assert_int_equal(td_arena_create(sizes[i], shareable, "kv", &arena, &err),
                             TD_ERR_NOMEM);
            assert_non_null(strstr(err.msg, "arena kv"));
            assert_null(arena.base);
        }
    }
    struct td_arena arena = {0};
    assert_int_equal(td_arena_create(0, 0, "kv", &arena, NULL), TD_ERR_INVALID);
    uint64_t available = td_mem_available();
    assert_true(available > 0 && available < (uint64_t)1 << 50);
}

static void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static void files_are_mapped_and_read(void **state)
{
    (void)state;
    char dir[] = "td_mem_test_XXXXXX", path[64], missing[64], message[80];
    /* In the system's folder for temporary files, which mkdtemp needs as a prefix. */
    char template[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(template, sizeof template, "%s/%s", tmp ? tmp : "/tmp", dir);
    assert_non_null(mkdtemp(template));
    assert_int_equal(chdir(template), 0);
    snprintf(path, sizeof path, "file");
    snprintf(missing, sizeof missing, "missing");

    struct td_file_map map = {0};
    struct td_err err;
    char *text = NULL;
    size_t n_bytes = 0;
    write_file(path, "abc\0def", 7);
    assert_int_equal(td_file_map_open(path, &map, &err), TD_OK);
    assert_int_equal(map.bytes, 7);
    assert_memory_equal(map.base, "abc\0def", 7);
    td_file_map_close(&map);
    assert_null(map.base);
    assert_int_equal(td_file_read(path, 7, &text, &n_bytes, &err), TD_OK);
    assert_int_equal(n_bytes, 7);
    assert_memory_equal(text, "abc\0def", 8); /* with the NUL behind */
    free(text);
    text = NULL;
    assert_int_equal(td_file_read(path, 6, &text, &n_bytes, &err), TD_ERR_LIMIT);
    assert_null(text);
    snprintf(message, sizeof message, "%s: is 7 bytes, must be at most 6", path);
    assert_string_equal(err.msg, message);

    write_file(path, "", 0);
    assert_int_equal(td_file_map_open(path, &map, &err), TD_OK);
    assert_null(map.base);
    assert_int_equal(map.bytes, 0);
    td_file_map_close(&map);
    assert_int_equal(td_file_read(path, 0, &text, NULL, &err), TD_OK);
    assert_string_equal(text, "");
    free(text);
    text = NULL;

    assert_int_equal(td_file_map_open(missing, &map, &err), TD_ERR_NOT_FOUND);
    assert_non_null(strstr(err.msg, "missing: cannot open"));
    assert_int_equal(td_file_read(missing, 10, &text, NULL, &err), TD_ERR_NOT_FOUND);
    assert_int_equal(td_file_map_open(".", &map, &err), TD_ERR_INVALID);
    assert_int_equal(mkfifo(missing, 0600), 0);
    /* and does not hang */
    assert_int_equal(td_file_read(missing, 10, &text, NULL, &err), TD_ERR_INVALID);
    assert_null(text);

    unlink(missing);
    unlink(path);
    assert_int_equal(chdir("/"), 0);
    assert_int_equal(rmdir(template), 0);
}

/* Reserved 2 MiB pages serve a large shared arena whole, are given back, and their want is no
 * error. */
static void reserved_pages_serve_large_shared_arenas(void **state)
{
    (void)state;
    long n_free = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) sscanf(line, "HugePages_Free: %ld", &n_free);
    fclose(f);
    struct td_arena arena, small;
    struct td_err err;
    size_t bytes = ((size_t)64 << 20) + 5000; /* its last page is begun only */
    assert_int_equal(td_arena_create(bytes, 1, "test", &arena, &err), TD_OK);
    assert_int_equal(td_arena_create(1 << 20, 1, "test", &small, &err), TD_OK);
    assert_false(small.reserved);
    assert_int_equal(arena.reserved, n_free >= 33);
    uint8_t *p = arena.base;
    for (size_t i = 0; i < bytes; i += 4096) assert_int_equal(p[i], 0);
    p[bytes - 1] = 7;
    td_arena_destroy(&arena);
    td_arena_destroy(&small);
    if (n_free < 33)
        print_message(
            "no 33 reserved pages are free here (vm.nr_hugepages): small ones were taken\n");
}

/* A model that somebody writes anew while it is read: one line that names it, exit status 1. */
static void a_mapped_file_that_shrinks_is_told(void **state)
{
    (void)state;
    char path[] = "/tmp/tandem-mem-XXXXXX", told[512] = "";
    int fd = mkstemp(path), out[2], status;
    assert_true(fd >= 0 && !pipe(out));
    assert_int_equal(ftruncate(fd, 3 * 65536), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct td_file_map other, map;
        struct td_err err = {0};
        dup2(out[1], STDERR_FILENO);
        if (td_file_map_open("/proc/self/exe", &other, &err) ||
            td_file_map_open(path, &map, &err) || ftruncate(fd, 65536)) {
            fprintf(stderr, "%s", err.msg);
            _exit(9);
        }
        volatile uint8_t sum = map.base[65535];
        sum += map.base[2 * 65536]; /* behind the new end */
        _exit(sum == 0 ? 7 : 8);
    }
    close(out[1]);
    ssize_t n = 0;
    while (n < (ssize_t)sizeof told - 1) {
        ssize_t k = read(out[0], told + n, sizeof told - 1 - (size_t)n);
        if (k <= 0) break;
        n += k;
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(out[0]), close(fd), unlink(path);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 || !strstr(told, path) ||
        !strstr(told, "became shorter while it was read"))
        fail_msg("status %x: %s", status, told);
}

/* All of a table is there, zeroed and whole; a page of it that nobody touches is not backed; what
 * lies behind its end is nobody's. */
static void tables_end_where_nothing_may_be_touched(void **state)
{
    (void)state;
    size_t bytes = ((size_t)8 << 20) + 64 * 3, page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *table = td_table_alloc(bytes);
    assert_non_null(table);
    assert_int_equal((uintptr_t)table % 64, 0);
    assert_int_equal((uintptr_t)(table + bytes) % page, 0);
    uint8_t *pages = (uint8_t *)((uintptr_t)table & ~(uintptr_t)(page - 1));
    size_t n = (size_t)(table + bytes - pages) / page;
    unsigned char *backed = malloc(n);
    assert_non_null(backed);
    table[bytes - 1] = table[0] = 9;
    assert_int_equal(mincore(pages, n * page, backed), 0);
    assert_int_equal(backed[0] & 1, 1);
    assert_int_equal(backed[n / 2] & 1, 0);
    free(backed);
    for (size_t i = 1; i + 1 < bytes; i += 997) assert_int_equal(table[i], 0);
    int pipes[2]; /* a write from memory that may not be read is refused, and ends no test */
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(write(pipes[1], table + bytes - 1, 1), 1);
    assert_int_equal(write(pipes[1], table + bytes, 1), -1);
    assert_int_equal(errno, EFAULT);
    close(pipes[0]);
    close(pipes[1]);
    td_table_free(table, bytes);
    td_table_free(NULL, bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arenas_are_aligned_zeroed_and_writable),
        cmocka_unit_test(sparse_arenas_take_what_is_written),
        cmocka_unit_test(reserved_pages_serve_large_shared_arenas),
        cmocka_unit_test(tables_end_where_nothing_may_be_touched),
        cmocka_unit_test(too_much_is_refused_before_it_is_touched),
        cmocka_unit_test(files_are_mapped_and_read),
        cmocka_unit_test(a_mapped_file_that_shrinks_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
