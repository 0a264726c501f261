/* slo.c - see slo.h. */
#include "bench/serve/slo.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/slo_presets.h"

td_status bench_slo_preset(const char *name, struct bench_slo *ret_slo, double *ret_attainment,
                           struct td_err *err)
{
    const struct td_slo_preset *p;
    td_status s = td_slo_preset_find(name, &p, err);
    if (s) return err ? td_err_prefix(err, "--slo-preset") : s;
    *ret_slo = (struct bench_slo){.ttft_ms = p->ttft_ms, .tpot_ms = p->tpot_ms};
    *ret_attainment = p->attainment;
    return TD_OK;
}

/* A number of milliseconds (or a weight) that fills the text to its end. */
static td_status parse_positive(const char *option, const char *name, const char *text, double *ret,
                                struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)text[0]) || !isfinite(v) || !(v > 0))
        return td_fail(err, TD_ERR_INVALID, "%s: %s is '%.40s', must be a number > 0", option, name,
                       text);
    *ret = v;
    return TD_OK;
}

static double *field_of(struct bench_slo *slo, const char *name)
{
    if (!strcmp(name, "ttft") || !strcmp(name, "time_to_first_token")) return &slo->ttft_ms;
    if (!strcmp(name, "tpot") || !strcmp(name, "inter_token_latency")) return &slo->tpot_ms;
    if (!strcmp(name, "e2el") || !strcmp(name, "request_latency")) return &slo->e2el_ms;
    if (!strcmp(name, "tbt")) return &slo->tbt_ms;
    return NULL;
}

/* Copies the next item (up to one of `stops`) and moves *at behind it; false at the end. */
static bool next_item(const char **at, const char *skip, const char *stops, char *item,
                      size_t item_bytes)
{
    *at += strspn(*at, skip);
    if (!**at) return false;
    size_t n = strcspn(*at, stops);
    snprintf(item, item_bytes, "%.*s", (int)n, *at);
    *at += n;
    return true;
}

td_status bench_slo_parse(const char *text, struct bench_slo *slo, struct td_err *err)
{
    char item[128];
    for (const char *at = text; next_item(&at, " \t,", " \t,", item, sizeof item);) {
        char *colon = strchr(item, ':');
        if (!colon)
            return td_fail(err, TD_ERR_INVALID, "--goodput: '%s' is no METRIC:MILLISECONDS", item);
        *colon = 0;
        double *field = field_of(slo, item);
        if (!field)
            return td_fail(err, TD_ERR_INVALID,
                           "--goodput: '%s' is no metric; known are ttft, tpot, e2el, tbt", item);
        td_status s = parse_positive("--goodput", item, colon + 1, field, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status parse_class(const char *name, const char *fields, struct bench_class *c,
                             struct td_err *err)
{
    char item[128], option[96];
    snprintf(option, sizeof option, "--slo-class %s", name);
    for (const char *at = fields; next_item(&at, ",", ",", item, sizeof item);) {
        char *equals = strchr(item, '=');
        if (!equals) return td_fail(err, TD_ERR_INVALID, "%s: '%s' is no NAME=VALUE", option, item);
        *equals = 0;
        double *field = !strcmp(item, "weight") ? &c->weight : field_of(&c->slo, item);
        if (!field)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: '%s' is unknown; known are ttft, tpot, e2el, tbt, weight", option,
                           item);
        td_status s = parse_positive(option, item, equals + 1, field, err);
        if (s) return s;
    }
    return TD_OK;
}

td_status bench_slo_classes(const char *text, const struct bench_slo *base,
                            struct bench_class classes[BENCH_MAX_CLASSES], size_t *ret_n,
                            struct td_err *err)
{
    size_t n = 0;
    char item[256];
    for (const char *at = text; next_item(&at, " \t", " \t", item, sizeof item); n++) {
        char *colon = strchr(item, ':');
        if (colon) *colon = 0;
        if (!item[0] || strlen(item) >= BENCH_MAX_NAME)
            return td_fail(err, TD_ERR_INVALID, "--slo-class: name '%.80s' must have 1..%d bytes",
                           item, BENCH_MAX_NAME - 1);
        if (n == BENCH_MAX_CLASSES)
            return td_fail(err, TD_ERR_INVALID, "--slo-class: more than %d classes",
                           BENCH_MAX_CLASSES);
        for (size_t i = 0; i < n; i++)
            if (!strcmp(classes[i].name, item))
                return td_fail(err, TD_ERR_INVALID, "--slo-class: class '%s' is there twice", item);
        struct bench_class c = {.slo = *base, .weight = 1};
        snprintf(c.name, sizeof c.name, "%s", item);
        td_status s = parse_class(item, colon ? colon + 1 : "", &c, err);
        if (s) return s;
        classes[n] = c;
    }
    *ret_n = n;
    return TD_OK;
}
