/* model_dir.c - looks at the names in a model directory. */
#include "common/base/model_dir.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define ADVICE                                                                                     \
    "give the Hugging Face directory that it was made from (config.json, tokenizer.json, "         \
    "*.safetensors)"

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), n_end = strlen(end);
    return n >= n_end && !strcasecmp(name + n - n_end, end);
}

static bool is_gguf(const char *path)
{
    char magic[4] = {0};
    FILE *f = fopen(path, "rb");
    if (!f) return ends_in(path, ".gguf");
    bool same =
        fread(magic, 1, sizeof magic, f) == sizeof magic && !memcmp(magic, "GGUF", sizeof magic);
    fclose(f);
    return same || ends_in(path, ".gguf");
}

td_status td_model_dir_check(const char *path, const char *wants, struct td_err *err)
{
    struct stat st;
    /* the reader that opens a file in it reports what is wrong */
    if (stat(path, &st)) return TD_OK;
    if (S_ISREG(st.st_mode) && is_gguf(path))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s is a GGUF file, which this version does not read: " ADVICE, path);
    DIR *dir = opendir(path);
    if (!dir) return TD_OK;
    char gguf[256] = "";
    bool adapter = false, wanted = false;
    for (struct dirent *e; (e = readdir(dir));) {
        adapter = adapter || !strcmp(e->d_name, "adapter_config.json");
        wanted = wanted || ends_in(e->d_name, wants);
        if (!gguf[0] && ends_in(e->d_name, ".gguf")) snprintf(gguf, sizeof gguf, "%s", e->d_name);
    }
    closedir(dir);
    if (adapter)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s holds adapter_config.json: LoRA adapters are not supported by this "
                       "version, and are not left out "
                       "in silence; merge the adapter into the weights, or move its files away",
                       path);
    if (gguf[0] && !wanted)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s holds %s and no %s: this version does not read GGUF; " ADVICE, path,
                       gguf, wants);
    return TD_OK;
}
