/* objectives.c - see objectives.h. */
#include "router/objectives.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "router/slo_presets.h"

#define MAX_OBJECTIVE_MS 1e9
#define MAX_WEIGHT 1e6
#define NAME_BYTES "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
#define MAX_COEFFICIENT 1e15 /* bytes per second are the greatest */

/* Takes the next item up to one of `stops`. TD_INPROGRESS: there is one; TD_OK: the text has
 * ended. */
static td_status next_item(const char *where, const char **at, const char *stops, char *item,
                           size_t item_bytes, struct td_err *err)
{
    *at += strspn(*at, stops);
    if (!**at) return TD_OK;
    size_t n = strcspn(*at, stops);
    if (n >= item_bytes)
        return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" has %zu bytes, limit %zu", where, *at, n,
                       item_bytes - 1);
    memcpy(item, *at, n);
    item[n] = 0;
    *at += n;
    return TD_INPROGRESS;
}

static td_status number(const char *where, const char *name, const char *text, double most,
                        double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= 0 && v <= most))
        return td_fail(err, TD_ERR_INVALID, "%s: %s is \"%.40s\", must be a number from 0 to %s",
                       where, name, text, most > MAX_OBJECTIVE_MS ? "1e15" : "1e9");
    *ret = v;
    return TD_OK;
}

static td_status weight(const char *where, const char *text, double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v > 0 && v <= MAX_WEIGHT))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: weight is \"%.40s\", must be above 0 and up to 1e6", where, text);
    *ret = v;
    return TD_OK;
}

static td_status class_field(struct td_core_class *k, char *field, struct td_err *err)
{
    char where[64];
    snprintf(where, sizeof where, "slo_class %s", k->name);
    if (!strcmp(field, "best_effort")) {
        k->best_effort = true;
        return TD_OK;
    }
    char *value = strchr(field, '=');
    if (!value)
        return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is not NAME=VALUE or best_effort", where,
                       field);
    *value++ = 0;
    if (!strcmp(field, "ttft"))
        return number(where, field, value, MAX_OBJECTIVE_MS, &k->ttft_ms, err);
    if (!strcmp(field, "tpot"))
        return number(where, field, value, MAX_OBJECTIVE_MS, &k->tpot_ms, err);
    if (!strcmp(field, "weight")) return weight(where, value, &k->weight, err);
    if (strcmp(field, "preset") != 0)
        return td_fail(
            err, TD_ERR_INVALID,
            "%s: \"%.40s\" is unknown; there are ttft, tpot, weight, preset, best_effort", where,
            field);
    const struct td_slo_preset *p;
    td_status s = td_slo_preset_find(value, &p, err);
    if (s) return s;
    k->ttft_ms = p->ttft_ms;
    k->tpot_ms = p->tpot_ms;
    return TD_OK;
}

/* The name of `item`, up to its colon: it goes into lists, labels and the decision log as it is,
 * so it has no byte that means something there. */
static td_status class_name(const struct td_core_config *c, const char *item,
                            struct td_core_class *k, struct td_err *err)
{
    size_t n = strcspn(item, ":");
    if (n == 0 || n >= sizeof k->name)
        return td_fail(err, TD_ERR_INVALID,
                       "slo_class: name \"%.40s\" must have 1..%zu bytes before the colon", item,
                       sizeof k->name - 1);
    memcpy(k->name, item, n);
    k->name[n] = 0;
    if (strspn(k->name, NAME_BYTES) != n) {
        for (char *p = k->name; *p; p++)
            if (!strchr(NAME_BYTES, *p)) *p = '?';
        return td_fail(err, TD_ERR_INVALID,
                       "slo_class: name \"%s\" must have only letters, digits, '-', '_' and '.'",
                       k->name);
    }
    for (uint32_t i = 0; i < c->n_classes; i++)
        if (!strcmp(c->classes[i].name, k->name))
            return td_fail(err, TD_ERR_INVALID, "slo_class: %s is given twice", k->name);
    return TD_OK;
}

td_status router_classes_parse(const char *text, struct td_core_config *c, struct td_err *err)
{
    char item[512], field[128], where[64];
    td_status s;
    c->n_classes = 0;
    for (const char *at = text;
         (s = next_item("slo_class", &at, " \t\n", item, sizeof item, err));) {
        if (s < 0) return s;
        if (c->n_classes == TD_CORE_MAX_CLASSES)
            return td_fail(err, TD_ERR_INVALID, "slo_class: more than %d classes",
                           TD_CORE_MAX_CLASSES);
        struct td_core_class *k = &c->classes[c->n_classes];
        *k = (struct td_core_class){.weight = 1};
        if ((s = class_name(c, item, k, err))) return s;
        snprintf(where, sizeof where, "slo_class %s", k->name);
        size_t n = strlen(k->name);
        const char *rest = item[n] ? item + n + 1 : "";
        while ((s = next_item(where, &rest, ",", field, sizeof field, err)))
            if (s < 0 || (s = class_field(k, field, err))) return s;
        c->n_classes++;
    }
    if (c->n_classes == 0) {
        c->classes[0] = (struct td_core_class){.name = "default", .weight = 1};
        c->n_classes = 1;
    }
    for (uint32_t i = 1; i < c->n_classes; i++) /* index 0 is what unnamed requests get */
        if (!strcmp(c->classes[i].name, "default")) {
            struct td_core_class k = c->classes[0];
            c->classes[0] = c->classes[i];
            c->classes[i] = k;
        }
    return TD_OK;
}

td_status router_class_find(const struct td_core_config *c, const char *name, uint32_t *ret_class,
                            struct td_err *err)
{
    char known[600];
    size_t used = 0;
    if (!name[0]) {
        *ret_class = 0;
        return TD_OK;
    }
    for (uint32_t i = 0; i < c->n_classes; i++) {
        if (!strcmp(c->classes[i].name, name)) {
            *ret_class = i;
            return TD_OK;
        }
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? " " : "",
                                 c->classes[i].name);
    }
    return td_fail(err, TD_ERR_INVALID, "slo_class is \"%.60s\"; this router has: %s", name, known);
}

/* ---- latency table --------------------------------------------------------------------------- */

static double *theta_field(struct td_lat_theta *t, struct router_node *node, const char *name)
{
    if (!strcmp(name, "kv_tokens")) return &node->kv_tokens;
    if (!strcmp(name, "kv_bytes")) return &node->kv_bytes;
    if (!strcmp(name, "gpus")) return &node->gpus;
    if (name[0] == 'a' && name[1] >= '0' && name[1] < '0' + TD_LAT_N_PREFILL && !name[2])
        return &t->prefill[name[1] - '0'];
    if (name[0] == 'b' && name[1] >= '0' && name[1] < '0' + TD_LAT_N_DECODE && !name[2])
        return &t->decode[name[1] - '0'];
    if (!strcmp(name, "link_tau")) return &t->link_tau;
    if (!strcmp(name, "link_bytes_per_s")) return &t->link_bytes_per_s;
    return NULL;
}

static td_status theta_line(const char *line, const char *where, struct td_lat_theta *t,
                            struct router_node *node, char *name, struct td_err *err)
{
    char item[160];
    td_status s;
    *t = (struct td_lat_theta){.known = true};
    *node = (struct router_node){0};
    name[0] = 0;
    for (const char *at = line; (s = next_item(where, &at, " \t\r\n", item, sizeof item, err));) {
        if (s < 0) return s;
        char *value = strchr(item, '=');
        if (!value)
            return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is not NAME=VALUE", where, item);
        *value++ = 0;
        if (!strcmp(item, "node_class")) {
            if (strlen(value) >= ROUTER_NODE_CLASS_NAME)
                return td_fail(err, TD_ERR_INVALID, "%s: node_class has %zu bytes, limit %d", where,
                               strlen(value), ROUTER_NODE_CLASS_NAME - 1);
            snprintf(name, ROUTER_NODE_CLASS_NAME, "%s", value);
            continue;
        }
        double *field = theta_field(t, node, item);
        if (!field)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: \"%.40s\" is unknown; there are node_class, a0..a2, b0..b4, "
                           "link_tau, link_bytes_per_s, kv_tokens, kv_bytes, gpus",
                           where, item);
        if ((s = number(where, item, value, MAX_COEFFICIENT, field, err))) return s;
    }
    return name[0] ? TD_OK : td_fail(err, TD_ERR_INVALID, "%s: node_class is missing", where);
}

/* Reads one line; TD_OK with line[0] == 0 for one without content. */
static td_status table_line(FILE *in, const char *where, char *line, size_t line_bytes,
                            bool *ret_more, struct td_err *err)
{
    size_t n = 0;
    int c = 0;
    for (; (c = getc(in)) != EOF && c != '\n'; n++) {
        if (n + 2 > line_bytes - 1)
            return td_fail(err, TD_ERR_INVALID, "%s has more than %zu bytes", where,
                           line_bytes - 2);
        if (c == 0) return td_fail(err, TD_ERR_INVALID, "%s has a byte 0: this is no text", where);
        line[n] = (char)c;
    }
    if (ferror(in)) return td_fail(err, TD_ERR_IO, "%s: %s", where, strerror(errno));
    line[n] = 0;
    *ret_more = c != EOF || n > 0;
    line[strcspn(line, "#")] = 0;
    if (line[strspn(line, " \t\r\n")] == 0) line[0] = 0;
    return TD_OK;
}

td_status router_latency_table_read(FILE *in, const char *path, struct td_core_config *c,
                                    char names[][ROUTER_NODE_CLASS_NAME], struct router_node *nodes,
                                    struct td_err *err)
{
    struct router_node node;
    char line[1024], where[300];
    td_status s = TD_OK;
    bool more = true;
    c->n_thetas = 0;
    for (int n = 1; !s && more; n++) {
        snprintf(where, sizeof where, "latency_table %.200s line %d", path, n);
        if ((s = table_line(in, where, line, sizeof line, &more, err)) || !line[0]) continue;
        if (c->n_thetas == TD_CORE_MAX_NODE_CLASSES)
            return td_fail(err, TD_ERR_LIMIT, "%s: more than %d node classes", where,
                           TD_CORE_MAX_NODE_CLASSES);
        s = theta_line(line, where, &c->thetas[c->n_thetas], &node, names[c->n_thetas], err);
        for (uint32_t i = 0; !s && i < c->n_thetas; i++)
            if (!strcmp(names[i], names[c->n_thetas]))
                s = td_fail(err, TD_ERR_INVALID, "%s: node_class %s is given twice", where,
                            names[i]);
        if (!s && nodes) nodes[c->n_thetas] = node;
        if (!s) c->n_thetas++;
    }
    return s;
}

td_status router_latency_table_load(const char *path, struct td_core_config *c,
                                    char names[][ROUTER_NODE_CLASS_NAME], struct router_node *nodes,
                                    struct td_err *err)
{
    FILE *in = fopen(path, "r");
    if (!in) return td_fail(err, TD_ERR_IO, "latency_table \"%s\": %s", path, strerror(errno));
    td_status s = router_latency_table_read(in, path, c, names, nodes, err);
    fclose(in);
    return s;
}
