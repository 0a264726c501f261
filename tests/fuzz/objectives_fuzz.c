/* objectives_fuzz.c - what the router reads of objectives, from hostile bytes: the class table,
 * the latency table, a decision log line by line; the first byte says which. What is accepted
 * must be usable. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/objectives.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static struct td_core_config config;
static struct td_core_action actions[TD_CORE_MAX_ACTIONS_PER_EVENT];

static void need_message(td_status s, const struct td_err *err)
{
    TD_ASSERT(s == TD_OK || (err->code == s && err->msg[0]));
}

static void start_core(void)
{
    struct td_core *core = NULL;
    struct td_err err = {0};
    td_status s = td_core_create(&config, &core, &err);
    TD_ASSERT(s == TD_OK);
    td_core_destroy(core);
}

static void read_table(const uint8_t *text, size_t n_bytes)
{
    static char names[TD_CORE_MAX_NODE_CLASSES][ROUTER_NODE_CLASS_NAME];
    static struct router_node nodes[TD_CORE_MAX_NODE_CLASSES];
    struct td_err err = {0};
    FILE *in = n_bytes ? fmemopen((void *)text, n_bytes, "r") : NULL;
    if (!in) return;
    td_status s = router_latency_table_read(in, "table", &config, names, nodes, &err);
    fclose(in);
    need_message(s, &err);
    if (s) return;
    for (uint32_t i = 0; i < config.n_thetas; i++)
        TD_ASSERT(names[i][0] && strlen(names[i]) < ROUTER_NODE_CLASS_NAME);
    start_core();
}

/* Lines of a decision log, and the core they describe: any sequence of events leaves it
 * standing. */
static void read_log(char *text)
{
    static uint64_t hashes[TD_CORE_MAX_HASHES];
    struct td_core_reader reader = {.hashes = hashes};
    struct td_core *core = NULL;
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        struct td_err err = {0};
        enum td_core_read what;
        td_status s = td_core_read_line(&reader, line, &what, &err);
        need_message(s, &err);
        if (s) break;
        if (what == TD_READ_CONFIG) {
            TD_ASSERT(reader.config.n_classes <= TD_CORE_MAX_CLASSES &&
                      reader.config.n_thetas <= TD_CORE_MAX_NODE_CLASSES);
            /* what it may ask for is bounded, but large */
            if (reader.config.max_requests > 64 || reader.config.max_prefix_entries > 4096) break;
            if (td_core_create(&reader.config, &core, &err)) break;
        }
        if (what == TD_READ_EVENT)
            TD_ASSERT(td_core_step(core, &reader.event, actions) <=
                      8 * (size_t)reader.config.max_requests);
    }
    td_core_destroy(core);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0) return 0;
    config = (struct td_core_config){.policy = "goodput", .max_requests = 1};
    char *text = malloc(n_bytes);
    if (!text) return 0;
    memcpy(text, data + 1, n_bytes - 1);
    text[n_bytes - 1] = 0;
    if (data[0] % 3 == 0) {
        struct td_err err = {0};
        td_status s = router_classes_parse(text, &config, &err);
        need_message(s, &err);
        if (!s) start_core();
    } else if (data[0] % 3 == 1) {
        read_table(data + 1, n_bytes - 1);
    } else {
        read_log(text);
    }
    free(text);
    return 0;
}
