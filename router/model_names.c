/* model_names.c - see model_names.h. */
#include "router/model_names.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PLAIN_BYTES "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
#define MAX_PLAIN_NAME 127

bool router_model_names_have(const struct router_model_names *names, const char *name)
{
    for (uint32_t i = 0; i < names->n; i++)
        if (!strcmp(names->names[i], name)) return true;
    return false;
}

td_status router_model_names_parse(const char *text, size_t n_bytes,
                                   struct router_model_names *ret_names, struct td_err *err)
{
    struct router_model_names found = {0};
    for (size_t at = 0; at <= n_bytes;) {
        const char *comma = memchr(text + at, ',', n_bytes - at);
        size_t n = comma ? (size_t)(comma - text) - at : n_bytes - at;
        if (n == 0 || n >= ROUTER_MODEL_NAME)
            return td_fail(err, TD_ERR_INVALID, "a name of \"%.*s\" has %zu bytes, must be 1..%d",
                           n_bytes < 100 ? (int)n_bytes : 100, text, n, ROUTER_MODEL_NAME - 1);
        if (found.n == ROUTER_MAX_MODEL_NAMES)
            return td_fail(err, TD_ERR_INVALID, "\"%.100s\" has more than %d names", text,
                           ROUTER_MAX_MODEL_NAMES);
        char *name = found.names[found.n];
        memcpy(name, text + at, n);
        for (size_t i = 0; i < n; i++)
            if ((unsigned char)name[i] < ' ' || name[i] == 127)
                return td_fail(err, TD_ERR_INVALID, "a name has the byte %d: it must be text",
                               (unsigned char)name[i]);
        if (router_model_names_have(&found, name))
            return td_fail(err, TD_ERR_INVALID, "name \"%.100s\" is given twice", name);
        found.n++;
        at += n + 1;
    }
    *ret_names = found;
    return TD_OK;
}

/* Bytes of NAME in a line "NAME=VALUE"; 0: the line is a VALUE. */
static size_t name_bytes_of(const char *line)
{
    size_t n = strcspn(line, "=");
    bool is_path = line[0] == '/' || line[0] == '.' || !line[n] || !access(line, F_OK);
    return is_path ? 0 : n;
}

/* Copies the line at *at without its end; moves *at to the next, or to NULL. */
static td_status next_line(const char **at, char line[ROUTER_MAX_MODEL_PATH], struct td_err *err)
{
    size_t n = strcspn(*at, "\n");
    if (n >= ROUTER_MAX_MODEL_PATH)
        return td_fail(err, TD_ERR_INVALID, "the path \"%.60s...\" has %zu bytes, limit %d", *at, n,
                       ROUTER_MAX_MODEL_PATH - 1);
    memcpy(line, *at, n);
    line[n] = 0;
    *at = (*at)[n] ? *at + n + 1 : NULL;
    return TD_OK;
}

static td_status read_spec(const char *line, struct router_model_spec *spec, struct td_err *err)
{
    size_t n_name = name_bytes_of(line);
    const char *dir = n_name ? line + n_name + 1 : line;
    *spec = (struct router_model_spec){0};
    if (!dir[0]) return td_fail(err, TD_ERR_INVALID, "\"%.100s\" has no directory", line);
    snprintf(spec->dir, sizeof spec->dir, "%s", dir);
    return n_name ? router_model_names_parse(line, n_name, &spec->names, err) : TD_OK;
}

td_status router_model_specs_parse(const char *models, const char *served_names,
                                   struct router_model_spec *specs, uint32_t *ret_n_specs,
                                   struct td_err *err)
{
    char line[ROUTER_MAX_MODEL_PATH];
    uint32_t n = 0;
    for (const char *at = models[0] ? models : NULL; at;) {
        if (n == ROUTER_MAX_MODELS)
            return td_fail(err, TD_ERR_LIMIT, "model is given more than %d times",
                           ROUTER_MAX_MODELS);
        td_status s = next_line(&at, line, err);
        if (!s) s = read_spec(line, &specs[n], err);
        if (s) return td_err_prefix(err, "model");
        n++;
    }
    if (served_names[0]) {
        if (n == 0)
            return td_fail(err, TD_ERR_INVALID,
                           "served_model_name is \"%.100s\" and model is empty: it is the name of "
                           "the first model",
                           served_names);
        if (specs[0].names.n)
            return td_fail(err, TD_ERR_INVALID,
                           "served_model_name is \"%.60s\" and the first model has the name "
                           "\"%.60s\": give one of them",
                           served_names, specs[0].names.names[0]);
        if (router_model_names_parse(served_names, strlen(served_names), &specs[0].names, err))
            return td_err_prefix(err, "served_model_name");
    }
    *ret_n_specs = n;
    return TD_OK;
}

td_status router_model_option(const char *lines, const struct router_model_names *names,
                              char *ret_value, size_t value_bytes, struct td_err *err)
{
    char line[ROUTER_MAX_MODEL_PATH], name[ROUTER_MAX_MODEL_PATH];
    const char *chosen = "";
    char common[ROUTER_MAX_MODEL_PATH] = "";
    for (const char *at = lines[0] ? lines : NULL; at;) {
        td_status s = next_line(&at, line, err);
        if (s) return s;
        size_t n = name_bytes_of(line);
        memcpy(name, line, n);
        name[n] = 0;
        if (n && router_model_names_have(names, name)) {
            chosen = line + n + 1;
            break;
        }
        if (!n && !common[0]) memcpy(common, line, sizeof common);
    }
    if (!chosen[0]) chosen = common;
    if (strlen(chosen) >= value_bytes)
        return td_fail(err, TD_ERR_LIMIT, "\"%.60s...\" has %zu bytes, limit %zu", chosen,
                       strlen(chosen), value_bytes - 1);
    memcpy(ret_value, chosen, strlen(chosen) + 1);
    return TD_OK;
}

bool router_model_option_name(const char **at, char *ret_name)
{
    char line[ROUTER_MAX_MODEL_PATH];
    if (!*at || !**at || next_line(at, line, NULL)) return false;
    size_t n = name_bytes_of(line);
    memcpy(ret_name, line, n);
    ret_name[n] = 0;
    return true;
}

bool router_model_name_is_plain(const char *name)
{
    size_t n = strspn(name, PLAIN_BYTES);
    return n > 0 && n <= MAX_PLAIN_NAME && !name[n] && !strchr("-_.", name[0]);
}

td_status router_model_log_path(const char *file, const char *name, char *ret_path,
                                size_t path_bytes, struct td_err *err)
{
    char escaped[3 * ROUTER_MODEL_NAME];
    size_t used = 0;
    for (const char *p = name; *p && used + 4 < sizeof escaped; p++) {
        if (strchr(PLAIN_BYTES, *p))
            escaped[used++] = *p;
        else
            used += (size_t)snprintf(escaped + used, 4, "%%%02X", (unsigned char)*p);
    }
    escaped[used] = 0;
    char path[ROUTER_MAX_MODEL_PATH];
    int n = snprintf(path, sizeof path, "%s.%s", file, escaped);
    if (n < 0 || (size_t)n >= sizeof path || (size_t)n >= path_bytes)
        return td_fail(err, TD_ERR_LIMIT,
                       "decision_log: \"%.60s...\" with the model's name has %d "
                       "bytes, limit %zu",
                       file, n, path_bytes - 1);
    memcpy(ret_path, path, (size_t)n + 1);
    return TD_OK;
}
