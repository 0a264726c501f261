/* make_gguf.c - writes models/pocket, or another directory with such a tokenizer, as a GGUF file
 * for the cluster tests: make_gguf DIR OUT F32|BF16|Q8_0|Q4_0. */
#include "tests/golden/gguf_model.h"

static uint32_t type;

static uint32_t type_of(const char *name, const struct td_tensor *t)
{
    (void)name, (void)t;
    return type;
}

int main(int argc, char **argv)
{
    for (uint32_t i = 0; argc == 4 && i < 64; i++) {
        const struct td_format *f = td_format_of_gguf(i);
        if (!f || strcmp(f->name, argv[3]) != 0) continue;
        type = i;
        gm_write(argv[1], argv[2], type_of, true);
        return 0;
    }
    fprintf(stderr, "usage: make_gguf DIR OUT F32|BF16|Q8_0|Q4_0\n");
    return 2;
}
