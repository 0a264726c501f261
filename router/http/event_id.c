/* event_id.c - see event_id.h. */
#include "router/http/event_id.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"

void openai_event_id_write(const struct openai_event_id *id, struct text_buffer *out)
{
    text_addf(out, "1.%llx.%llx.%llx.%llx.", (unsigned long long)id->seed,
              (unsigned long long)id->created_s, (unsigned long long)id->max_tokens,
              (unsigned long long)id->prompt_hash);
    for (uint32_t i = 0; i < id->n_choices; i++)
        text_addf(out, i ? ",%x:%x" : "%x:%x", id->events[i].n, id->events[i].check);
    text_adds(out, ".");
    text_add(out, id->request_id, strlen(id->request_id));
}

/* A number of 1 to 16 digits and the mark after it; *at goes behind both. */
static bool take(const char **at, const char *marks, uint64_t *ret, char *ret_mark)
{
    size_t n = strspn(*at, "0123456789abcdef");
    if (!n || n > 16 || !(*at)[n] || !strchr(marks, (*at)[n])) return false;
    *ret = strtoull(*at, NULL, 16);
    *ret_mark = (*at)[n];
    *at += n + 1;
    return true;
}

static bool take_events(const char **at, struct openai_event_id *ret)
{
    for (char mark = ','; mark == ',';) {
        uint64_t n, check;
        if (ret->n_choices == OPENAI_MAX_EVENT_CHOICES || !take(at, ":", &n, &mark) ||
            !take(at, ",.", &check, &mark) || n > UINT32_MAX || check > UINT32_MAX)
            return false;
        ret->events[ret->n_choices].n = (uint32_t)n;
        ret->events[ret->n_choices++].check = (uint32_t)check;
    }
    return true;
}

td_status openai_event_id_parse(const char *text, struct openai_event_id *ret, struct td_err *err)
{
    uint64_t version, seed, created, max_tokens, prompt_hash;
    const char *at = text;
    char mark;
    *ret = (struct openai_event_id){0};
    bool ok = take(&at, ".", &version, &mark) && version == 1 && take(&at, ".", &seed, &mark) &&
              take(&at, ".", &created, &mark) && take(&at, ".", &max_tokens, &mark) &&
              take(&at, ".", &prompt_hash, &mark) && take_events(&at, ret) && *at &&
              strlen(at) < sizeof ret->request_id && created < (uint64_t)1 << 40 &&
              max_tokens < (uint64_t)1 << 32;
    for (const char *c = at; ok && *c; c++) /* it goes into headers and events as it is */
        ok = *c > ' ' && *c <= '~' && *c != '"' && *c != '\\';
    if (!ok)
        return td_fail(err, TD_ERR_INVALID,
                       "Last-Event-ID is \"%.60s\", must be the id of an event of this API", text);
    ret->seed = seed;
    ret->created_s = (int64_t)created;
    ret->max_tokens = (int64_t)max_tokens;
    ret->prompt_hash = prompt_hash;
    snprintf(ret->request_id, sizeof ret->request_id, "%s", at);
    return TD_OK;
}

uint32_t openai_event_check(uint32_t check, const void *said, size_t n_bytes)
{
    return (uint32_t)td_hash64(said, n_bytes, check);
}
