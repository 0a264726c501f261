/* mix.c - see mix.h. */
#include "sim/mix.h"

#include <stdlib.h>
#include <string.h>

#include "sim/sim_options.h"
#include "router/objectives.h"

#define NAME_BYTES "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."

/* The next "NAME[:CLASS]=SHARE". TD_INPROGRESS: there is one; TD_OK: the text has ended. */
static td_status next_share(const char *option, const char **at, char name[32], char class_name[32],
                            double *ret_share, struct td_err *err)
{
    char item[100], *value, *end, *colon;
    *at += strspn(*at, " ,\t\n");
    size_t n = strcspn(*at, " ,\t\n");
    if (n == 0) return TD_OK;
    snprintf(item, sizeof item, "%.*s", (int)(n < sizeof item ? n : sizeof item - 1), *at);
    *at += n;
    value = strchr(item, '=');
    if (!value || n >= sizeof item)
        return td_fail(err, TD_ERR_INVALID, "%s: \"%.60s\" is not NAME=SHARE", option, item);
    *value++ = 0;
    *ret_share = strtod(value, &end);
    if (end == value || *end || !(*ret_share > 0 && *ret_share <= 1e9))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: the share of %.40s is \"%.20s\", must be above 0 and up to 1e9", option,
                       item, value);
    colon = strchr(item, ':');
    if (colon) *colon++ = 0;
    if (!item[0] || strlen(item) > 31 || strspn(item, NAME_BYTES) != strlen(item))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: name \"%.40s\" must have 1..31 letters, digits, '-', '_' and '.'",
                       option, item);
    snprintf(name, 32, "%s", item);
    snprintf(class_name, 32, "%.31s", colon ? colon : "");
    return TD_INPROGRESS;
}

static td_status parse_class_mix(const char *text, const struct td_core_config *c,
                                 struct td_sim_load *load, struct td_err *err)
{
    char name[32], none[32];
    double share;
    td_status s;
    for (uint32_t i = 0; i < c->n_classes; i++)
        load->class_share[i] = text[strspn(text, " ,\t\n")] ? 0 : 1;
    load->n_classes = c->n_classes;
    while ((s = next_share("class_mix", &text, name, none, &share, err))) {
        uint32_t k;
        if (s < 0) return s;
        if (none[0])
            return td_fail(err, TD_ERR_INVALID, "class_mix: \"%s:%s\" is not NAME=SHARE", name,
                           none);
        if ((s = router_class_find(c, name, &k, err))) return td_err_prefix(err, "class_mix"), s;
        if (load->class_share[k] > 0)
            return td_fail(err, TD_ERR_INVALID, "class_mix: %s is given twice", name);
        load->class_share[k] = share;
    }
    return TD_OK;
}

/* "NAME:MAX_PROMPT ... NAME": the last has no bound. */
static td_status parse_by_length(const char *text, const struct td_core_config *c,
                                 struct td_sim_load *load, struct td_err *err)
{
    bool is_last = false;
    for (int32_t before = 0;;) {
        char item[64], *bound, *end;
        text += strspn(text, " ,\t\n");
        size_t n = strcspn(text, " ,\t\n");
        if (n == 0) break;
        if (n >= sizeof item)
            return td_fail(err, TD_ERR_INVALID, "class_by_length: \"%.60s\" is not NAME:TOKENS",
                           text);
        snprintf(item, sizeof item, "%.*s", (int)n, text);
        text += n;
        if (is_last)
            return td_fail(err, TD_ERR_INVALID,
                           "class_by_length: \"%s\" follows a class without a bound", item);
        if (load->n_length_classes == TD_SIM_MAX_CLASSES)
            return td_fail(err, TD_ERR_LIMIT, "class_by_length: more than %d classes",
                           TD_SIM_MAX_CLASSES);
        bound = strchr(item, ':');
        long tokens = INT32_MAX;
        if (bound) {
            *bound++ = 0;
            tokens = strtol(bound, &end, 10);
            if (end == bound || *end || tokens <= before || tokens > 100000000)
                return td_fail(err, TD_ERR_INVALID,
                               "class_by_length: the bound of %s is \"%s\", must be above %d and "
                               "up to 100000000",
                               item, bound, before);
        }
        is_last = !bound;
        uint32_t k;
        td_status s = router_class_find(c, item, &k, err);
        if (s) return td_err_prefix(err, "class_by_length"), s;
        load->length_classes[load->n_length_classes].max_prompt = before = (int32_t)tokens;
        load->length_classes[load->n_length_classes++].slo_class = k;
    }
    if (load->n_length_classes && !is_last)
        return td_fail(
            err, TD_ERR_INVALID,
            "class_by_length: the last class must be without a bound, for all longer prompts");
    return TD_OK;
}

static td_status parse_tenants(const char *text, const struct td_core_config *c,
                               struct td_sim_mix *m, struct td_sim_load *load, struct td_err *err)
{
    char name[32], class_name[32];
    double share;
    td_status s;
    while ((s = next_share("tenants", &text, name, class_name, &share, err))) {
        uint32_t k = 0;
        if (s < 0) return s;
        if (m->n_tenants == TD_SIM_MAX_TENANTS)
            return td_fail(err, TD_ERR_LIMIT, "tenants: more than %d", TD_SIM_MAX_TENANTS);
        if ((s = router_class_find(c, class_name, &k, err)))
            return td_err_prefix(err, "tenants"), s;
        for (uint32_t i = 0; i < m->n_tenants; i++)
            if (!strcmp(m->tenants[i], name))
                return td_fail(err, TD_ERR_INVALID, "tenants: %s is given twice", name);
        load->tenants[m->n_tenants].share = share;
        load->tenants[m->n_tenants].slo_class = class_name[0] ? (int32_t)k : -1;
        snprintf(m->tenants[m->n_tenants++], sizeof m->tenants[0], "%s", name);
    }
    load->n_tenants = m->n_tenants;
    return TD_OK;
}

td_status td_sim_mix_parse(const char *slo_class, const char *class_mix, const char *by_length,
                           const char *tenants, double ttft_ms, double tpot_ms,
                           struct td_sim_mix *ret, struct td_sim_load *load, struct td_err *err)
{
    struct td_core_config c = {0};
    td_status s = router_classes_parse(slo_class, &c, err);
    if (s) return s;
    if (!slo_class[0]) {
        c.classes[0].ttft_ms = ttft_ms;
        c.classes[0].tpot_ms = tpot_ms;
    }
    *ret = (struct td_sim_mix){.n_classes = c.n_classes};
    memcpy(ret->classes, c.classes, sizeof ret->classes);
    if ((s = parse_class_mix(class_mix, &c, load, err))) return s;
    if (by_length[0] && class_mix[0])
        return td_fail(err, TD_ERR_INVALID, "give class_by_length or class_mix, not both");
    if ((s = parse_by_length(by_length, &c, load, err))) return s;
    return parse_tenants(tenants, &c, ret, load, err);
}

td_status td_sim_requests_parse(const struct td_sim_request_options *o, const char *tenants,
                                struct td_sim_mix *ret_mix, struct td_sim_load *load,
                                struct td_err *err)
{
    load->max_prompt = (int32_t)o->max_prompt;
    load->max_output = (int32_t)o->max_output;
    td_status s = td_sim_mix_parse(o->slo_class, o->class_mix, o->class_by_length, tenants, o->ttft,
                                   o->tpot, ret_mix, load, err);
    if (!s) s = td_sim_length_parse(o->isl, "isl", &load->isl, err);
    if (!s) s = td_sim_length_parse(o->osl, "osl", &load->osl, err);
    return s;
}
