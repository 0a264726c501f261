/* objectives.c - see objectives.h. */
#include "router/objectives.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/slo_presets.h"

/* Takes the next word up to one of `stops`; false at the end of text. Too long a word comes cut, which no name matches. */
static bool next_word(const char **at, const char *stops, char *word, size_t word_bytes)
{
    *at += strspn(*at, stops);
    if (!**at) return false;
    size_t n = strcspn(*at, stops);
    snprintf(word, word_bytes, "%.*s", (int)n, *at);
    *at += n;
    return true;
}

static td_status number(const char *where, const char *name, const char *text, double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || v < 0) return td_fail(err, TD_ERR_INVALID, "%s: %s is \"%.40s\", must be a number >= 0", where, name, text);
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
    if (!value) return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is not NAME=VALUE or best_effort", where, field);
    *value++ = 0;
    if (!strcmp(field, "ttft")) return number(where, field, value, &k->ttft_ms, err);
    if (!strcmp(field, "tpot")) return number(where, field, value, &k->tpot_ms, err);
    if (!strcmp(field, "weight")) return number(where, field, value, &k->weight, err);
    if (strcmp(field, "preset") != 0) return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is unknown; there are ttft, tpot, weight, preset, best_effort", where, field);
    const struct td_slo_preset *p;
    td_status s = td_slo_preset_find(value, &p, err);
    if (s) return s;
    k->ttft_ms = p->ttft_ms;
    k->tpot_ms = p->tpot_ms;
    return TD_OK;
}

td_status router_classes_parse(const char *text, struct td_core_config *c, struct td_err *err)
{
    char word[512], field[128];
    c->n_classes = 0;
    for (const char *at = text; next_word(&at, " \t\n", word, sizeof word);) {
        if (c->n_classes == TD_CORE_MAX_CLASSES) return td_fail(err, TD_ERR_INVALID, "slo_class: more than %d classes", TD_CORE_MAX_CLASSES);
        struct td_core_class *k = &c->classes[c->n_classes];
        *k = (struct td_core_class){.weight = 1};
        size_t n = strcspn(word, ":");
        if (n == 0 || n >= sizeof k->name) return td_fail(err, TD_ERR_INVALID, "slo_class: name \"%.40s\" must have 1..%zu bytes before the colon", word, sizeof k->name - 1);
        memcpy(k->name, word, n);
        k->name[n] = 0;
        const char *rest = word[n] ? word + n + 1 : "";
        while (next_word(&rest, ",", field, sizeof field)) {
            td_status s = class_field(k, field, err);
            if (s) return s;
        }
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

td_status router_class_find(const struct td_core_config *c, const char *name, uint32_t *ret_class, struct td_err *err)
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
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? " " : "", c->classes[i].name);
    }
    return td_fail(err, TD_ERR_INVALID, "slo_class is \"%.60s\"; this router has: %s", name, known);
}

/* ---- latency table ---------------------------------------------------------------------------------------------------------------------------- */

static double *theta_field(struct td_lat_theta *t, const char *name)
{
    if (name[0] == 'a' && name[1] >= '0' && name[1] < '0' + TD_LAT_N_PREFILL && !name[2]) return &t->prefill[name[1] - '0'];
    if (name[0] == 'b' && name[1] >= '0' && name[1] < '0' + TD_LAT_N_DECODE && !name[2]) return &t->decode[name[1] - '0'];
    if (!strcmp(name, "link_tau")) return &t->link_tau;
    if (!strcmp(name, "link_bytes_per_s")) return &t->link_bytes_per_s;
    return NULL;
}

static td_status theta_line(const char *line, const char *where, struct td_lat_theta *t, char *name, struct td_err *err)
{
    char word[160];
    *t = (struct td_lat_theta){.known = true};
    name[0] = 0;
    for (const char *at = line; next_word(&at, " \t\r\n", word, sizeof word);) {
        char *value = strchr(word, '=');
        if (!value) return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is not NAME=VALUE", where, word);
        *value++ = 0;
        if (!strcmp(word, "node_class")) {
            if (strlen(value) >= ROUTER_NODE_CLASS_NAME) return td_fail(err, TD_ERR_INVALID, "%s: node_class has %zu bytes, limit %d", where, strlen(value), ROUTER_NODE_CLASS_NAME - 1);
            snprintf(name, ROUTER_NODE_CLASS_NAME, "%s", value);
            continue;
        }
        double *field = theta_field(t, word);
        if (!field) return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is unknown; there are node_class, a0..a2, b0..b4, link_tau, link_bytes_per_s", where, word);
        td_status s = number(where, word, value, field, err);
        if (s) return s;
    }
    return TD_OK;
}

td_status router_latency_table_load(const char *path, struct td_core_config *c, char names[][ROUTER_NODE_CLASS_NAME], struct td_err *err)
{
    char line[1024], where[300];
    FILE *in = fopen(path, "r");
    if (!in) return td_fail(err, TD_ERR_IO, "latency_table \"%s\": %s", path, strerror(errno));
    td_status s = TD_OK;
    c->n_thetas = 0;
    for (int n = 1; !s && fgets(line, sizeof line, in); n++) {
        snprintf(where, sizeof where, "latency_table %.200s line %d", path, n);
        if (!strchr(line, '\n') && !feof(in)) s = td_fail(err, TD_ERR_INVALID, "%s has more than %zu bytes", where, sizeof line - 2);
        line[strcspn(line, "#")] = 0;
        if (s || line[strspn(line, " \t\r\n")] == 0) continue;
        if (c->n_thetas == TD_CORE_MAX_NODE_CLASSES) s = td_fail(err, TD_ERR_LIMIT, "%s: more than %d node classes", where, TD_CORE_MAX_NODE_CLASSES);
        else if (!(s = theta_line(line, where, &c->thetas[c->n_thetas], names[c->n_thetas], err))) c->n_thetas++;
    }
    fclose(in);
    return s;
}
