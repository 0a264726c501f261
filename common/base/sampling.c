/* sampling.c - the check of sampling parameters. */
#include "common/base/sampling.h"

#include <math.h>

td_status td_sampling_check(const struct td_sampling *s, int32_t vocab, struct td_err *err)
{
    /* written as !(in range), so that NaN fails */
    if (!(s->temperature >= 0 && s->temperature <= 100))
        return td_fail(err, TD_ERR_INVALID, "temperature is %g, must be in [0, 100]",
                       (double)s->temperature);
    if (s->top_k < 0)
        return td_fail(err, TD_ERR_INVALID, "top_k is %d, must be >= 0", (int)s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return td_fail(err, TD_ERR_INVALID, "top_p is %g, must be in (0, 1]", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return td_fail(err, TD_ERR_INVALID, "min_p is %g, must be in [0, 1]", (double)s->min_p);
    if (!(s->repetition_penalty > 0 && isfinite(s->repetition_penalty)))
        return td_fail(err, TD_ERR_INVALID, "repetition_penalty is %g, must be finite and > 0",
                       (double)s->repetition_penalty);
    if (!(s->presence_penalty >= -2 && s->presence_penalty <= 2))
        return td_fail(err, TD_ERR_INVALID, "presence_penalty is %g, must be in [-2, 2]",
                       (double)s->presence_penalty);
    if (!(s->frequency_penalty >= -2 && s->frequency_penalty <= 2))
        return td_fail(err, TD_ERR_INVALID, "frequency_penalty is %g, must be in [-2, 2]",
                       (double)s->frequency_penalty);
    if (s->n_logprobs < -1 || s->n_logprobs > TD_MAX_TOP_LOGPROBS)
        return td_fail(err, TD_ERR_INVALID, "n_logprobs is %d, must be in [-1, %d]",
                       (int)s->n_logprobs, TD_MAX_TOP_LOGPROBS);
    if (s->n_logit_bias < 0 || s->n_logit_bias > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID, "n_logit_bias is %d, must be in [0, %d]",
                       (int)s->n_logit_bias, TD_MAX_LOGIT_BIAS);
    if (s->n_logit_bias > 0 && s->logit_bias == NULL)
        return td_fail(err, TD_ERR_INVALID, "logit_bias is null with %d entries",
                       (int)s->n_logit_bias);
    for (int32_t i = 0; i < s->n_logit_bias; i++) {
        const struct td_logit_bias *b = &s->logit_bias[i];
        if (b->token < 0 || b->token >= vocab)
            return td_fail(err, TD_ERR_INVALID, "logit_bias[%d].token is %d, must be in [0, %d)",
                           (int)i, (int)b->token, (int)vocab);
        if (!(b->bias >= -100 && b->bias <= 100))
            return td_fail(err, TD_ERR_INVALID, "logit_bias[%d].bias is %g, must be in [-100, 100]",
                           (int)i, (double)b->bias);
    }
    return TD_OK;
}
