/* bench_dataset_fuzz.c - the load generator's files from outside: prompts, traces (first byte:
 * which kind) and results. What is accepted keeps the promises of dataset.h; what is refused
 * says why. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/serve/dataset.h"
#include "bench/serve/result.h"

#define VOCAB 100
#define MAX_INPUT 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static td_status count_bytes(void *ctx, const char *const *texts, size_t n, int32_t *counts,
                             struct td_err *err)
{
    (void)ctx;
    (void)err;
    for (size_t i = 0; i < n; i++) counts[i] = (int32_t)strlen(texts[i]);
    return TD_OK;
}

static void read_dataset(enum bench_dataset_kind kind, const char *path)
{
    struct bench_dataset_config c = {.kind = kind,
                                     .path = path,
                                     .seed = 1,
                                     .vocab = VOCAB,
                                     .time_scale = 0.5,
                                     .length_scale = 0.25,
                                     .spread = true,
                                     .max_input_len = MAX_INPUT,
                                     .shuffle = true,
                                     .count_tokens = count_bytes};
    struct bench_dataset *d = NULL;
    struct td_err err = {0};
    td_status s = bench_dataset_open(&c, &d, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0] && !d);
        return;
    }
    double at_s = 0;
    for (size_t i = 0; i < bench_dataset_size(d); i++) {
        const struct bench_item *it = bench_dataset_item(d, i);
        TD_ASSERT(it->output_len >= 1 &&
                  (it->text ? it->text[0] != 0 : it->input_len >= 1 && it->input_len <= MAX_INPUT));
        if (bench_dataset_is_trace(kind)) TD_ASSERT(it->at_s >= at_s);
        at_s = it->at_s;
        int32_t ids[MAX_INPUT];
        if (it->text) continue;
        bench_dataset_tokens(d, i, ids);
        for (int32_t k = 0; k < it->input_len; k++) TD_ASSERT(ids[k] >= 0 && ids[k] < VOCAB);
    }
    bench_dataset_close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 1) return 0;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[64];
    if (fd < 0 || write(fd, data + 1, n_bytes - 1) != (ssize_t)(n_bytes - 1)) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int kind = BENCH_SHAREGPT + data[0] % (BENCH_N_DATASETS - BENCH_SHAREGPT + 1);
    if (kind < BENCH_N_DATASETS) {
        read_dataset((enum bench_dataset_kind)kind, path);
    } else {
        struct bench_result r = {0};
        struct td_err err = {0};
        td_status s = bench_result_read(path, &r, &err);
        TD_ASSERT(s ? err.code == s && err.msg[0]
                    : !r.requests && r.n_pcts <= BENCH_MAX_PCTS &&
                          r.n_classes <= BENCH_MAX_CLASSES);
        bench_result_free(&r);
    }
    close(fd);
    return 0;
}
