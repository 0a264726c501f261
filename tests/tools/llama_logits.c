/* llama_logits - logits of every position by llama.cpp, as `tandem logits` writes them: the other
 * side of tests/tools/llama_compare.py. Not part of any build here: with llama.cpp's libraries,
 *     cc -c -I LLAMA/include -I LLAMA/ggml/include tests/tools/llama_logits.c
 *     c++ -o llama_logits llama_logits.o -L LLAMA/build/bin -lllama -lggml
 *
 * llama_logits MODEL.gguf OUT ID,ID,...
 *
 * KV in f32, no flash attention, one thread. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <llama.h>

enum { TOKENS_MAX = 2048 };

static int fail(const char *what)
{
    fprintf(stderr, "llama_logits: %s\n", what);
    return 1;
}

static struct llama_batch batch_of(const llama_token *ids, int n)
{
    struct llama_batch b = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        b.token[i] = ids[i];
        b.pos[i] = i;
        b.n_seq_id[i] = 1;
        b.seq_id[i][0] = 0;
        b.logits[i] = 1;
    }
    b.n_tokens = n;
    return b;
}

int main(int argc, char **argv)
{
    static llama_token ids[TOKENS_MAX];
    int n = 0;
    if (argc != 4) return fail("usage: llama_logits MODEL.gguf OUT ID,ID,...");
    for (char *at = argv[3], *p; (p = strsep(&at, ",")) && n < TOKENS_MAX;)
        ids[n++] = (llama_token)strtol(p, NULL, 10);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    struct llama_model *m = llama_model_load_from_file(argv[1], mp);
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = cp.n_batch = TOKENS_MAX;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.type_k = cp.type_v = GGML_TYPE_F32;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *c = m ? llama_init_from_model(m, cp) : NULL;
    if (!c || llama_decode(c, batch_of(ids, n))) return fail("the model is not read or not run");
    size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(m));
    FILE *out = fopen(argv[2], "wb");
    for (int i = 0; out && i < n; i++) fwrite(llama_get_logits_ith(c, i), 4, vocab, out);
    return out && !fclose(out) ? 0 : fail("the logits are not written");
}
