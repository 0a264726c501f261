/* config_fuzz.c - config.json, and after a byte 0x1e generation_config.json, from hostile bytes.
 * What is accepted must be usable.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const uint8_t *cut = n_bytes ? memchr(data, 0x1e, n_bytes) : NULL;
    size_t first = cut ? (size_t)(cut - data) : n_bytes;
    struct td_model_config c;
    struct td_err err = {0};
    td_status s =
        td_model_config_parse((const char *)data, first, cut ? (const char *)cut + 1 : NULL,
                              cut ? n_bytes - first - 1 : 0, &c, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
        return 0;
    }
    int32_t head_max = c.latent.kv_rank ? TD_LATENT_RANK_MAX + TD_LATENT_ROPE_MAX : 256;
    TD_ASSERT(c.n_layers >= 1 && c.hidden >= 1 && c.vocab >= 1 && c.n_heads % c.n_kv_heads == 0 &&
              c.head_dim >= 2 && c.head_dim <= head_max);
    TD_ASSERT(c.n_eos >= 0 && c.n_eos <= TD_MAX_EOS && c.bos_id < c.vocab &&
              td_model_config_n_params(&c) > 0);
    for (int32_t i = 0; i < c.n_eos; i++) TD_ASSERT(c.eos_ids[i] >= 0 && c.eos_ids[i] < c.vocab);
    TD_ASSERT(c.sliding_window >= 0 && c.sliding_from_layer >= 0 &&
              c.sliding_from_layer < c.n_layers && c.rotary_dim >= 2 &&
              c.rotary_dim <= c.head_dim && c.rotary_dim % 2 == 0 && c.rope[0].theta >= 1 &&
              c.rope[0].factor >= 1);
    return 0;
}
