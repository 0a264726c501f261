/* sim_files_fuzz.c - what the simulator reads from outside; the first byte says which: traces,
 * latency files, splitwise-sim's table, fleets, faults, lists, lengths. What is accepted keeps
 * the promises of its header; what is refused says why. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim/sim.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void trace_of(const char *path, bool spread)
{
    struct td_sim_trace t = {0};
    struct td_err err = {0};
    td_status s = td_sim_trace_read(path, spread, &t, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0] && !t.requests);
        return;
    }
    TD_ASSERT(t.n > 0);
    for (uint32_t i = 0; i < t.n; i++) {
        const struct td_sim_request *r = &t.requests[i];
        TD_ASSERT(r->n_prompt >= 1 && r->n_output >= 1 &&
                  (uint64_t)r->hash_at + r->n_hashes <= t.n_hashes);
        TD_ASSERT(i == 0 || r->at_ns >= t.requests[i - 1].at_ns);
    }
    uint64_t tokens, hits = td_sim_prefix_hits(&t, 7, &tokens);
    TD_ASSERT(hits <= t.n_hashes);
    td_sim_trace_free(&t);
}

static void perf_of(const char *spec)
{
    struct td_perf p;
    struct td_err err = {0};
    td_status s = td_perf_load(spec, &p, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
        return;
    }
    struct td_perf_batch b = {
        .prefill_rows = 100, .attention_work = 5000, .decode_rows = 3, .context_tokens = 900};
    TD_ASSERT(!isnan(td_perf_step_s(&p, &b)) && p.gpus >= 1);
}

static void text_of(int kind, const char *text)
{
    struct td_err err = {0};
    if (kind == 0) {
        struct td_sim_config c = {0};
        struct td_sim_group d = {.max_batch = 1, .max_step_tokens = 1, .max_seqs = 1};
        td_status s = td_sim_fleet_parse(text, &d, &c, &err);
        TD_ASSERT(s ? err.msg[0] != 0
                    : c.n_groups >= 1 && c.n_groups <= TD_SIM_MAX_GROUPS && c.groups[0].count >= 1);
    } else if (kind == 1) {
        struct td_sim_fault *f = NULL;
        uint32_t n = 0;
        td_status s = td_sim_faults_parse(text, &f, &n, &err);
        TD_ASSERT(s ? err.msg[0] && !f : !n == !f);
        for (uint32_t i = 0; i < n && !s; i++) TD_ASSERT(f[i].at_s >= 0 && f[i].factor > 0);
        free(f);
    } else if (kind == 2) {
        double v[8];
        uint32_t n = 0;
        td_status s = td_sim_list_parse(text, "rate", v, 8, &n, &err);
        TD_ASSERT(s ? err.msg[0] != 0 : n >= 1 && n <= 8);
    } else {
        struct td_sim_length l;
        td_status s = td_sim_length_parse(text, "isl", &l, &err);
        TD_ASSERT(s ? err.msg[0] != 0 : l.a >= 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 1) return 0;
    int kind = data[0] % 8;
    if (kind >= 4) {
        char *text = malloc(n_bytes);
        if (!text) abort();
        memcpy(text, data + 1, n_bytes - 1);
        text[n_bytes - 1] = 0;
        text_of(kind - 4, text);
        free(text);
        return 0;
    }
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[128];
    if (fd < 0 || write(fd, data + 1, n_bytes - 1) != (ssize_t)(n_bytes - 1)) abort();
    snprintf(path, sizeof path, kind == 3 ? "splitwise:/proc/self/fd/%d:m:h:8" : "/proc/self/fd/%d",
             fd);
    if (kind < 2)
        trace_of(path, kind);
    else
        perf_of(path);
    close(fd);
    return 0;
}
