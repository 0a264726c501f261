/* model_names.h - the names of models in options: "--model a,b=DIR", "--latency-table a=FILE", and
 * which names may be directories below --model-dir. No I/O but for one look whether a file exists;
 * any thread. */
#ifndef TD_ROUTER_MODEL_NAMES_H
#define TD_ROUTER_MODEL_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define ROUTER_MAX_MODELS 32
#define ROUTER_MODEL_NAME 256 /* bytes of a name, with its end */
#define ROUTER_MAX_MODEL_NAMES 16
#define ROUTER_MAX_MODEL_PATH 4096

/* names[0] is the name, the others are aliases. */
struct router_model_names {
    char names[ROUTER_MAX_MODEL_NAMES][ROUTER_MODEL_NAME];
    uint32_t n;
};

/* One --model: its directory and the names that were given for it; none: the directory's. */
struct router_model_spec {
    struct router_model_names names;
    char dir[ROUTER_MAX_MODEL_PATH];
};

bool router_model_names_have(const struct router_model_names *names, const char *name);

/* "a,b,c", at most ROUTER_MAX_MODEL_NAMES; a name has 1..255 bytes, none a control character. */
td_status router_model_names_parse(const char *text, size_t n_bytes,
                                   struct router_model_names *ret_names, struct td_err *err);

/* models: lines "DIR" or "NAME[,ALIAS...]=DIR"; a line that begins with '/' or '.', or that is an
 * existing path, is a DIR, whatever it holds. served_names ("" = none) are the names of the first.
 * specs: ROUTER_MAX_MODELS. */
td_status router_model_specs_parse(const char *models, const char *served_names,
                                   struct router_model_spec *specs, uint32_t *ret_n_specs,
                                   struct td_err *err);

/* lines: "VALUE" or "NAME=VALUE". The value of the first line that names the model, else of the
 * first that names none, else "". TD_ERR_LIMIT: it has value_bytes or more. */
td_status router_model_option(const char *lines, const struct router_model_names *names,
                              char *ret_value, size_t value_bytes, struct td_err *err);

/* The NAME of the line at *at, "" = it has none, and *at to the next line. False: there is no line
 * any more. name: ROUTER_MAX_MODEL_PATH bytes. */
bool router_model_option_name(const char **at, char *ret_name);

/* Whether a name that a worker says may be a directory's: letters, digits, '-', '_' and '.', the
 * first a letter or a digit, at most 127. Such a name cannot leave the directory above it. */
bool router_model_name_is_plain(const char *name);

/* The decision log of a further model: "FILE.NAME", in NAME each byte that is not one of those
 * above as %XX, so that it stays one file. TD_ERR_LIMIT: longer than path_bytes. */
td_status router_model_log_path(const char *file, const char *name, char *ret_path,
                                size_t path_bytes, struct td_err *err);

#endif
