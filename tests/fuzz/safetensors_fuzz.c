/* safetensors_fuzz.c - a file's bytes, the first 8 of which become the true header length when
 * the first input byte is odd (so that the JSON behind them is reached). What is accepted must
 * tile the data exactly. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 3) return 0;
    bool fix = data[0] & 1;
    size_t tail = (size_t)data[1]; /* bytes of tensor data at the end */
    data += 2, n_bytes -= 2;
    uint8_t *file = malloc(8 + n_bytes);
    if (!file) return 0;
    size_t n = n_bytes;
    if (fix) {
        uint64_t header = n_bytes > tail ? n_bytes - tail : 0;
        for (int i = 0; i < 8; i++) file[i] = (uint8_t)(header >> (8 * i));
        memcpy(file + 8, data, n_bytes);
        n += 8;
    } else {
        memcpy(file, data, n_bytes);
    }
    struct td_checkpoint st;
    struct td_err err = {0};
    td_status s = td_safetensors_parse(file, n, "fuzz", &st, &err);
    if (s) {
        TD_ASSERT(err.code == s && err.msg[0]);
    } else {
        uint64_t sum = 0;
        volatile uint8_t sink = 0;
        for (int32_t i = 0; i < st.n_tensors; i++) {
            const struct td_tensor *t = &st.tensors[i];
            TD_ASSERT(td_checkpoint_find(&st, t->name) == t && t->data >= file &&
                      t->data + t->n_bytes <= file + n);
            for (uint64_t k = 0; k < t->n_bytes; k++) sink = (uint8_t)(sink + t->data[k]);
            sum += t->n_bytes;
        }
        uint64_t header = 0;
        for (int i = 7; i >= 0; i--) header = header << 8 | file[i];
        TD_ASSERT(st.n_tensors > 0 && sum + header + 8 == n);
        td_checkpoint_close(&st);
    }
    free(file);
    return 0;
}
