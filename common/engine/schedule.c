/* schedule.c - see schedule.h. */
#include "common/engine/schedule.h"

#include <string.h>

td_status td_schedule_admit(const struct td_schedule_room *room, int32_t need, int32_t hit,
                            int32_t headroom)
{
    if (need > room->n_blocks) return TD_ERR_LIMIT;
    /* A lone sequence may take the last block: headroom is a courtesy to others, never a reason
       to wait for nobody. */
    int32_t keep = room->n_held > 0 ? headroom : 0;
    return room->n_available < need - hit + keep ? TD_ERR_AGAIN : TD_OK;
}

int32_t td_batch_choose(const int32_t *remaining, const bool *is_decode, int32_t n,
                        int32_t max_items, int32_t max_tokens, int32_t *ret_n_new)
{
    int32_t n_items = 0, left = max_tokens;
    memset(ret_n_new, 0, (size_t)n * sizeof *ret_n_new);
    for (int32_t i = 0; i < n && n_items < max_items && left > 0; i++)
        if (is_decode[i]) {
            ret_n_new[i] = 1;
            n_items++;
            left--;
        }
    for (int32_t i = 0; i < n && n_items < max_items && left > 0; i++)
        if (!is_decode[i]) {
            ret_n_new[i] = remaining[i] < left ? remaining[i] : left;
            n_items++;
            left -= ret_n_new[i];
        }
    return n_items;
}
