/* model_dir.c - looks at the names in a model directory. */
#include "common/base/model_dir.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), n_end = strlen(end);
    return n >= n_end && !strcasecmp(name + n - n_end, end);
}

td_status td_model_dir_check(const char *path, const char *wants, struct td_err *err)
{
    DIR *dir = opendir(path);
    /* the reader that opens a file in it reports what is wrong */
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
                       "%s holds %s and no %s: a GGUF model is named by its file, %s/%s", path,
                       gguf, wants, path, gguf);
    return TD_OK;
}
