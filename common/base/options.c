/* options.c - parses, helps and prints from a table of options, which is the only description of an
 * option.
 *
 * Values are set in three passes: table defaults, environment, argv. Each pass uses set_value, so
 * the bounds hold whatever the source, and the message names the source that the user has to
 * change. Names compare with '-' and '_' as the same character. */
#include "common/base/options.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_NAME 64
#define MAX_OPTIONS 256

#include "common/base/log.h"
#include "common/base/printable.h"
#include "common/base/say.h"

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

static const char *const g_builtins[] = {"help", "version", "print_config"};

/* Whether the first n_bytes of `text` are a row's name. */
static bool names_equal(const char *text, size_t n_bytes, const char *name)
{
    if (strlen(name) != n_bytes) return false;
    for (size_t i = 0; i < n_bytes; i++) {
        char a = text[i] == '-' ? '_' : text[i], b = name[i] == '-' ? '_' : name[i];
        if (a != b) return false;
    }
    return true;
}

static const struct td_option *find_option(const struct td_option *table, const char *text,
                                           size_t n_bytes)
{
    for (const struct td_option *o = table; o->name; o++) {
        if (!names_equal(text, n_bytes, o->name)) continue;
        if (o->type == TD_OPT_VARIABLE) continue;
        return o->type == TD_OPT_ALIAS ? find_option(table, o->choices, strlen(o->choices)) : o;
    }
    return NULL;
}

/* True for rows that hold no value of their own. */
static bool has_no_value(const struct td_option *o)
{
    return o->type == TD_OPT_ALIAS || o->type == TD_OPT_ELSEWHERE || o->type == TD_OPT_DECIDED ||
           o->type == TD_OPT_VARIABLE;
}

/* Rows that --help and --print-config tell of. */
static bool is_told(const struct td_option *o)
{
    return !has_no_value(o) &&
           strncmp(o->name, TD_OPTION_TEST_PREFIX, strlen(TD_OPTION_TEST_PREFIX)) != 0;
}

static void flag_name(const char *name, char *buf, size_t buf_bytes)
{
    snprintf(buf, buf_bytes, "--%s", name);
    for (char *p = buf; *p; p++) {
        if (*p == '_') *p = '-';
    }
}

#define ROLE_PREFIX "tandem-"
#define ENV_BYTES (2 * MAX_NAME + 8)

/* Writes the variable of `name`: TANDEM_NAME, or with a role TANDEM_ROLE_NAME. */
static void env_name(const char *role, const char *name, char *buf, size_t buf_bytes)
{
    snprintf(buf, buf_bytes, "TANDEM_%s%s%s", role ? role : "", role ? "_" : "", name);
    for (char *p = buf; *p; p++) *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
}

/* "decode" for "tandem-decode"; NULL for a program that is not a daemon. */
static const char *role_of(const char *program)
{
    return strncmp(program, ROLE_PREFIX, strlen(ROLE_PREFIX)) ? NULL
                                                              : program + strlen(ROLE_PREFIX);
}

/* The row that gives o a variable of another name; NULL: none. */
static const struct td_option *variable_row(const struct td_option *table,
                                            const struct td_option *o)
{
    for (const struct td_option *v = table; v->name; v++)
        if (v->type == TD_OPT_VARIABLE && names_equal(v->choices, strlen(v->choices), o->name))
            return v;
    return NULL;
}

/* Writes the variable that help and messages name. */
static void told_env_name(const struct td_option *table, const struct td_option *o,
                          const char *program, char *buf, size_t buf_bytes)
{
    const struct td_option *v = variable_row(table, o);
    env_name(o->type == TD_OPT_OWN_STR ? role_of(program) : NULL, v ? v->name : o->name, buf,
             buf_bytes);
}

/* The value of a row in the environment, and the variable that it comes from; NULL if there is
 * none. An empty variable counts as not set, because manifests often pass empty variables. */
static const char *env_value(const struct td_option *o, const char *program, char *ret_name,
                             size_t name_bytes)
{
    const char *role = role_of(program), *text;
    if (role) {
        env_name(role, o->name, ret_name, name_bytes);
        if ((text = getenv(ret_name)) && text[0]) return text;
        if (o->type == TD_OPT_OWN_STR) return NULL;
    }
    env_name(NULL, o->name, ret_name, name_bytes);
    return (text = getenv(ret_name)) && text[0] ? text : NULL;
}

static size_t min3(size_t a, size_t b, size_t c)
{
    return a < b ? (a < c ? a : c) : (b < c ? b : c);
}

/* Levenshtein distance, '-' and '_' equal; both at most MAX_NAME long. */
size_t td_edit_distance(const char *a, size_t a_bytes, const char *b)
{
    size_t row[MAX_NAME + 1], b_bytes = strlen(b);
    if (a_bytes > MAX_NAME) a_bytes = MAX_NAME;
    if (b_bytes > MAX_NAME) b_bytes = MAX_NAME;
    for (size_t j = 0; j <= b_bytes; j++) row[j] = j;
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            size_t up = row[j];
            bool same = (a[i - 1] == '-' ? '_' : a[i - 1]) == (b[j - 1] == '-' ? '_' : b[j - 1]);
            row[j] = min3(row[j - 1] + 1, up + 1, diagonal + !same);
            diagonal = up;
        }
    }
    return row[b_bytes];
}

static td_status fail_unknown(const struct td_option *table, const char *arg, struct td_err *err)
{
    const char *name = arg + strspn(arg, "-"), *nearest = g_builtins[0];
    size_t n_bytes = strcspn(name, "="), best = td_edit_distance(name, n_bytes, nearest);
    for (size_t i = 1; i < sizeof g_builtins / sizeof *g_builtins; i++) {
        size_t d = td_edit_distance(name, n_bytes, g_builtins[i]);
        if (d < best) best = d, nearest = g_builtins[i];
    }
    for (const struct td_option *o = table; o->name; o++) {
        if (o->type != TD_OPT_ALIAS && !is_told(o)) continue;
        size_t d = td_edit_distance(name, n_bytes, o->name);
        if (d < best) best = d, nearest = o->name;
    }
    char flag[MAX_NAME + 3];
    flag_name(nearest, flag, sizeof flag);
    return td_fail(err, TD_ERR_INVALID, "unknown option %.*s, did you mean %s? (--help lists all)",
                   (int)(name - arg + (ptrdiff_t)n_bytes), arg, flag);
}

/* source: the flag or variable that a person has to take away. */
static td_status fail_decided(const struct td_option *o, const char *source, struct td_err *err)
{
    return td_fail(err, TD_ERR_INVALID, "%s is no longer an option: %s", source, o->help);
}

td_status td_parse_size(const char *text, uint64_t *ret_bytes, struct td_err *err)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"", 1},
        {"B", 1},
        {"K", 1ull << 10},
        {"Ki", 1ull << 10},
        {"KiB", 1ull << 10},
        {"M", 1ull << 20},
        {"Mi", 1ull << 20},
        {"MiB", 1ull << 20},
        {"G", 1ull << 30},
        {"Gi", 1ull << 30},
        {"GiB", 1ull << 30},
        {"T", 1ull << 40},
        {"Ti", 1ull << 40},
        {"TiB", 1ull << 40},
        {"KB", 1000ull},
        {"MB", 1000000ull},
        {"GB", 1000000000ull},
        {"TB", 1000000000000ull},
    };
    if (isdigit((unsigned char)text[0])) {
        char *end;
        errno = 0;
        unsigned long long n = strtoull(text, &end, 10);
        bool too_big = errno == ERANGE;
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
            if (strcmp(end, units[i].name) != 0) continue;
            if (too_big || n > UINT64_MAX / units[i].bytes)
                return td_fail(err, TD_ERR_INVALID, "is %s, must be below 2^64 bytes", text);
            *ret_bytes = n * units[i].bytes;
            return TD_OK;
        }
    }
    return td_fail(err, TD_ERR_INVALID, "is '%s', must be a size such as 512, 64KiB, 2GiB or 1GB",
                   text);
}

static td_status check_bounds(const struct td_option *o, double value, const char *text,
                              struct td_err *err)
{
    if (o->min == 0 && o->max == 0) return TD_OK;
    if (value >= o->min && value <= o->max) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "is %s, must be in %.15g..%.15g", text, o->min, o->max);
}

static bool has_choice(const char *choices, const char *text)
{
    size_t n_bytes = strlen(text);
    for (const char *p = choices;;) {
        size_t k = strcspn(p, "|");
        if (k == n_bytes && memcmp(p, text, k) == 0) return true;
        if (p[k] == '\0') return false;
        p += k + 1;
    }
}

static td_status fail_choice(const struct td_option *o, const char *text, struct td_err *err)
{
    const struct td_option *below = o + 1; /* the end of the table at the latest */
    if (below->name && below->type == TD_OPT_ELSEWHERE && has_choice(below->choices, text))
        return td_fail(err, TD_ERR_INVALID, "is '%s', must be one of %s; %s", text, o->choices,
                       below->help);
    return td_fail(err, TD_ERR_INVALID, "is '%s', must be one of %s", text, o->choices);
}

static td_status parse_bool(const char *text, bool *ret, struct td_err *err)
{
    bool is_true =
        !strcmp(text, "true") || !strcmp(text, "1") || !strcmp(text, "yes") || !strcmp(text, "on");
    bool is_false =
        !strcmp(text, "false") || !strcmp(text, "0") || !strcmp(text, "no") || !strcmp(text, "off");
    if (!is_true && !is_false)
        return td_fail(err, TD_ERR_INVALID, "is '%s', must be true or false", text);
    *ret = is_true;
    return TD_OK;
}

static td_status parse_i64(const struct td_option *o, const char *text, int64_t *ret,
                           struct td_err *err)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || isspace((unsigned char)text[0]))
        return td_fail(err, TD_ERR_INVALID, "is '%s', must be an integer", text);
    td_status s = check_bounds(o, (double)v, text, err);
    if (!s) *ret = v;
    return s;
}

static td_status parse_u64(const struct td_option *o, const char *text, uint64_t *ret,
                           struct td_err *err)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    /* the first byte is checked because strtoull accepts "-1" */
    if (end == text || *end || errno || !isdigit((unsigned char)text[0]))
        return td_fail(err, TD_ERR_INVALID, "is '%s', must be an integer >= 0", text);
    td_status s = check_bounds(o, (double)v, text, err);
    if (!s) *ret = v;
    return s;
}

static td_status parse_f64(const struct td_option *o, const char *text, double *ret,
                           struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || isspace((unsigned char)text[0]))
        return td_fail(err, TD_ERR_INVALID, "is '%s', must be a number", text);
    td_status s = check_bounds(o, v, text, err);
    if (!s) *ret = v;
    return s;
}

static td_status parse_bytes(const struct td_option *o, const char *text, uint64_t *ret,
                             struct td_err *err)
{
    uint64_t v;
    td_status s = td_parse_size(text, &v, err);
    if (!s) s = check_bounds(o, (double)v, text, err);
    if (!s) *ret = v;
    return s;
}

/* Parses text into the field of one row. The message starts at "is ...": the caller puts the
 * source before it. */
static td_status set_value(const struct td_option *o, const char *text, void *config,
                           struct td_err *err)
{
    void *field = (char *)config + o->offset;
    switch (o->type) {
    case TD_OPT_BOOL:
        return parse_bool(text, field, err);
    case TD_OPT_I64:
        return parse_i64(o, text, field, err);
    case TD_OPT_U64:
        return parse_u64(o, text, field, err);
    case TD_OPT_F64:
        return parse_f64(o, text, field, err);
    case TD_OPT_SIZE:
        return parse_bytes(o, text, field, err);
    case TD_OPT_STR:
    case TD_OPT_OWN_STR:
    case TD_OPT_LIST:
        *(const char **)field = text;
        return TD_OK;
    case TD_OPT_ENUM:
        if (!has_choice(o->choices, text)) return fail_choice(o, text, err);
        *(const char **)field = text;
        return TD_OK;
    case TD_OPT_ELSEWHERE:
        break; /* never reached: find_option returns the row above it */
    case TD_OPT_ALIAS:
        break; /* never reached: find_option returns the row that it names */
    case TD_OPT_VARIABLE:
        break; /* never reached: find_option passes over it */
    case TD_OPT_DECIDED:
        break; /* is refused before */
    }
    return td_fail(err, TD_ERR_INTERNAL, "has no known type");
}

static const char *type_hint(const struct td_option *o)
{
    switch (o->type) {
    case TD_OPT_BOOL:
        return "";
    case TD_OPT_I64:
    case TD_OPT_U64:
        return " N";
    case TD_OPT_F64:
        return " X";
    case TD_OPT_SIZE:
        return " SIZE";
    case TD_OPT_STR:
    case TD_OPT_OWN_STR:
    case TD_OPT_LIST:
        return " TEXT";
    case TD_OPT_ENUM:
        return " ";
    case TD_OPT_ELSEWHERE:
    case TD_OPT_ALIAS:
    case TD_OPT_VARIABLE:
    case TD_OPT_DECIDED:
        break;
    }
    return "";
}

/* What is below a flag begins here. */
enum { HELP_INDENT = 6 };

static void help_of(const struct td_option *table, const struct td_option *o, const char *program,
                    FILE *f)
{
    char flag[MAX_NAME + 3], env[ENV_BYTES];
    flag_name(o->name, flag, sizeof flag);
    told_env_name(table, o, program, env, sizeof env);
    fprintf(f, "  %s%s%s\n", flag, type_hint(o), o->type == TD_OPT_ENUM ? o->choices : "");
    bool has_alias = false;
    for (const struct td_option *a = table; a->name; a++) {
        if (a->type != TD_OPT_ALIAS || !names_equal(a->choices, strlen(a->choices), o->name))
            continue;
        flag_name(a->name, flag, sizeof flag);
        fprintf(f, has_alias ? ", %s" : "      also %s", flag);
        has_alias = true;
    }
    if (has_alias) fputc('\n', f);
    /* the second line of a help text is indented as the first */
    for (const char *p = o->help; *p;) {
        size_t n = strcspn(p, "\n");
        fprintf(f, "      %.*s\n", (int)n, p);
        p += n + (p[n] == '\n');
    }
    fprintf(f, "      [%s", env);
    if (!o->def)
        fprintf(f, "; required");
    else if (o->def[0])
        fprintf(f, "; default %s", o->def);
    if (o->min != 0 || o->max != 0) fprintf(f, "; %.15g..%.15g", o->min, o->max);
    fprintf(f, "]\n");
}

void td_options_help(const struct td_option *table, const char *program, const char *summary,
                     FILE *out)
{
    struct td_said said;
    FILE *f = td_said_open(&said, out, HELP_INDENT);
    fprintf(f, "%s: %s\n\nUsage: %s [OPTION]...\n\nOptions (default < environment < flag):\n",
            program, summary, program);
    for (const struct td_option *o = table; o->name; o++)
        if (is_told(o)) help_of(table, o, program, f);
    fprintf(f, "  --print-config\n      Print the effective values and exit.\n");
    fprintf(f, "  --version\n      Print the version and exit.\n");
    fprintf(f, "  --help\n      Print this and exit.\n");
    td_said_close(&said);
}

/* NAME=VALUE of each. */
static void print_list(const char *name, const char *values, FILE *out)
{
    for (const char *p = values;;) {
        size_t n = strcspn(p, "\n");
        fprintf(out, "%s=%.*s\n", name, (int)n, p);
        if (!p[n]) return;
        p += n + 1;
    }
}

void td_options_print(const struct td_option *table, const void *config, FILE *out)
{
    for (const struct td_option *o = table; o->name; o++) {
        if (!is_told(o)) continue;
        const void *field = (const char *)config + o->offset;
        if (o->type == TD_OPT_LIST) {
            const char *values = *(const char *const *)field;
            print_list(o->name, values ? values : "", out);
            continue;
        }
        fprintf(out, "%s=", o->name);
        switch (o->type) {
        case TD_OPT_BOOL:
            fprintf(out, "%s", *(const bool *)field ? "true" : "false");
            break;
        case TD_OPT_I64:
            fprintf(out, "%" PRId64, *(const int64_t *)field);
            break;
        case TD_OPT_U64:
        case TD_OPT_SIZE:
            fprintf(out, "%" PRIu64, *(const uint64_t *)field);
            break;
        case TD_OPT_F64:
            fprintf(out, "%.15g", *(const double *)field);
            break;
        case TD_OPT_STR:
        case TD_OPT_OWN_STR:
        case TD_OPT_ENUM:
            fprintf(out, "%s", *(const char *const *)field ? *(const char *const *)field : "");
            break;
        case TD_OPT_LIST:
        case TD_OPT_ELSEWHERE:
        case TD_OPT_ALIAS:
        case TD_OPT_VARIABLE:
        case TD_OPT_DECIDED:
            break;
        }
        fputc('\n', out);
    }
}

/* A name may have one row only: of two, find_option would return the first, so the second's flag
 * could never be set although --help lists it. */
static void check_names(const struct td_option *table)
{
    for (const struct td_option *o = table; o->name; o++) {
        /* it has the name of the row above it, by design */
        if (o->type == TD_OPT_ELSEWHERE) continue;
        size_t n_bytes = strlen(o->name), i = 0,
               n_builtins = sizeof g_builtins / sizeof *g_builtins;
        const struct td_option *first = table;
        while (!names_equal(o->name, n_bytes, first->name)) first++;
        while (i < n_builtins && !names_equal(o->name, n_bytes, g_builtins[i])) i++;
        if (first != o || i < n_builtins) fprintf(stderr, "option \"%s\" has two rows\n", o->name);
        TD_ASSERT(first == o && i == n_builtins);
    }
}

/* Whether the text of the variable with o's own name can only be meant for o (options.h). */
static bool is_certain(const struct td_option *o, const char *text)
{
    if (o->type == TD_OPT_BOOL) return strpbrk(text, "0123456789") == NULL;
    return !strchr(text, '=') && access(text, F_OK) != 0;
}

/* As env_value, for a row that may have a variable of another name. */
static const char *own_env_value(const struct td_option *table, const struct td_option *o,
                                 const char *program, char *ret_name, size_t name_bytes)
{
    static bool is_told;
    char name[ENV_BYTES];
    const struct td_option *v = variable_row(table, o);
    if (!v) return env_value(o, program, ret_name, name_bytes);
    const char *text = env_value(v, program, ret_name, name_bytes);
    const char *old = env_value(o, program, name, sizeof name);
    if (text || !old) return text;
    bool is_taken = is_certain(o, old);
    if (!is_told && (is_taken || o->type == TD_OPT_BOOL))
        td_say(stderr, 2, "%s: %s is another option's: use %s for this one (--%s)%s\n", program,
               name, ret_name, o->name, is_taken ? "" : "; it is left out");
    is_told = true;
    if (!is_taken) return NULL;
    snprintf(ret_name, name_bytes, "%s", name);
    return old;
}

/* The first two passes: defaults, then the environment. Rows without a value count as set. */
static td_status set_from_environment(const struct td_option *table, size_t n_options, void *config,
                                      const char *program, bool *is_set, struct td_err *err)
{
    for (size_t i = 0; i < n_options; i++) {
        const struct td_option *o = &table[i];
        TD_ASSERT(strlen(o->name) <= MAX_NAME - 3);
        char env[ENV_BYTES];
        if (o->type == TD_OPT_DECIDED && env_value(o, program, env, sizeof env))
            return fail_decided(o, env, err);
        if (has_no_value(o)) {
            bool names_other = o->type == TD_OPT_ALIAS || o->type == TD_OPT_VARIABLE;
            const char *of = names_other ? o->choices : o->name;
            TD_ASSERT(find_option(table, of, strlen(of)));
            is_set[i] = true;
            continue;
        }
        if (o->def) {
            if (set_value(o, o->def, config, err))
                return td_err_prefix(err, "default of %s", o->name);
            is_set[i] = true;
        }
        const char *text = own_env_value(table, o, program, env, sizeof env);
        if (text) {
            if (set_value(o, text, config, err))
                return err ? td_err_prefix(err, "%s", env) : TD_ERR_INVALID;
            is_set[i] = true;
        }
    }
    return TD_OK;
}

/* Values of lists, joined. Configurations are read at the start and used until the end, and their
 * strings are borrowed, so these are kept like the arguments of the process. */
struct joined {
    struct joined *before;
    char text[];
};
static struct joined *all_joined;

/* A further value of a list. */
static td_status add_value(const struct td_option *o, const char *text, void *config,
                           struct td_err *err)
{
    const char **field = (const char **)(void *)((char *)config + o->offset);
    size_t n = strlen(*field) + strlen(text) + 2;
    struct joined *j = malloc(sizeof *j + n);
    if (!j) return td_fail(err, TD_ERR_NOMEM, "no memory for its values");
    snprintf(j->text, n, "%s\n%s", *field, text);
    j->before = all_joined;
    all_joined = j;
    *field = j->text;
    return TD_OK;
}

/* Sets the option of argv[*i], "--name", "--name=value" or "--no-name"; when its value is the next
 * argument, moves *i there. */
static td_status set_from_flag(const struct td_option *table, void *config, int argc, char **argv,
                               int *i, bool *is_set, size_t *n_flags, struct td_err *err)
{
    const char *name = argv[*i] + 2, *text = strchr(name, '=');
    size_t name_bytes = text ? (size_t)(text - name) : strlen(name);
    if (text) text++;
    const struct td_option *o = find_option(table, name, name_bytes);
    if (!o && !text && (!strncmp(name, "no-", 3) || !strncmp(name, "no_", 3))) {
        o = find_option(table, name + 3, name_bytes - 3);
        if (o && o->type != TD_OPT_BOOL && o->type != TD_OPT_DECIDED) o = NULL;
        text = "false";
    }
    if (!o) return fail_unknown(table, argv[*i], err);
    char flag[MAX_NAME + 3];
    flag_name(o->name, flag, sizeof flag);
    if (o->type == TD_OPT_DECIDED) return fail_decided(o, flag, err);
    if (!text && o->type == TD_OPT_BOOL) text = "true";
    if (!text) {
        if (*i + 1 == argc || !strncmp(argv[*i + 1], "--", 2)) {
            return td_fail(err, TD_ERR_INVALID,
                           "%s needs a value (%s=VALUE when it starts with --)", flag, flag);
        }
        text = argv[++*i];
    }
    size_t n = n_flags[o - table]++;
    if (n && o->type == TD_OPT_LIST ? add_value(o, text, config, err)
                                    : set_value(o, text, config, err))
        return err ? td_err_prefix(err, "%s", flag) : TD_ERR_INVALID;
    is_set[o - table] = true;
    return TD_OK;
}

td_status td_options_set(const struct td_option *table, void *config, const char *name,
                         const char *text, struct td_err *err)
{
    const struct td_option *o = find_option(table, name, strlen(name));
    if (!o || has_no_value(o) || o->type == TD_OPT_LIST) return fail_unknown(table, name, err);
    td_status s = set_value(o, text, config, err);
    return s && err ? td_err_prefix(err, "%s", o->name) : s;
}

td_status td_options_load(const struct td_option *table, void *config, const char *program,
                          const char *summary, int argc, char **argv, const char **positional,
                          size_t max_positional, size_t *ret_n_positional, struct td_err *err)
{
    bool is_set[MAX_OPTIONS] = {false};
    size_t n_flags[MAX_OPTIONS] = {0};
    size_t n_options = 0, n_positional = 0;
    for (const struct td_option *o = table; o->name; o++) n_options++;
    TD_ASSERT(n_options <= MAX_OPTIONS);
    check_names(table);

    td_status s = set_from_environment(table, n_options, config, program, is_set, err);
    if (s) return s;

    bool print_config = false, options_ended = false;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (options_ended || arg[0] != '-' || arg[1] == '\0') {
            if (n_positional == max_positional) {
                return td_fail(err, TD_ERR_INVALID,
                               "unexpected argument '%s': at most %zu allowed (--help)", arg,
                               max_positional);
            }
            positional[n_positional++] = arg;
            continue;
        }
        if (!strcmp(arg, "--")) {
            options_ended = true;
            continue;
        }
        if (!strcmp(arg, "--help") || !strcmp(arg, "-h")) {
            td_options_help(table, program, summary, stdout);
            exit(0);
        }
        if (!strcmp(arg, "--version")) {
            printf("%s %s\n", program, TD_VERSION);
            exit(0);
        }
        if (!strcmp(arg, "--print-config") || !strcmp(arg, "--print_config")) {
            print_config = true;
            continue;
        }
        if (arg[1] != '-') return fail_unknown(table, arg, err);
        if ((s = set_from_flag(table, config, argc, argv, &i, is_set, n_flags, err))) return s;
    }

    for (size_t i = 0; i < n_options; i++) {
        if (is_set[i]) continue;
        char flag[MAX_NAME + 3], env[ENV_BYTES];
        flag_name(table[i].name, flag, sizeof flag);
        told_env_name(table, &table[i], program, env, sizeof env);
        return td_fail(err, TD_ERR_INVALID, "%s (or %s) is required: %s", flag, env, table[i].help);
    }
    if (print_config) {
        td_options_print(table, config, stdout);
        exit(0);
    }
    if (ret_n_positional) *ret_n_positional = n_positional;
    return TD_OK;
}

struct td_size_text td_size_text(uint64_t bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    struct td_size_text t;
    double v = (double)bytes;
    size_t u = 0;
    for (; v >= 1024 && u < sizeof units / sizeof *units - 1; u++) v /= 1024;
    snprintf(t.s, sizeof t.s, v < 10 && v != (double)(int)v ? "%.1f %s" : "%.0f %s", v, units[u]);
    return t;
}

/* Who started many daemons tells once what they all say: `tandem up` gives them a pipe for it. */
static bool tell_starter(const char *text)
{
    const char *number = getenv(TD_STARTER_VARIABLE);
    struct stat is;
    char *end = NULL;
    long fd = number ? strtol(number, &end, 10) : -1;
    if (!end || end == number || *end || fd < 0 || fd > 1 << 20) return false;
    if (fstat((int)fd, &is) || !S_ISFIFO(is.st_mode)) return false;
    return dprintf((int)fd, "%ld %s\n", (long)getpid(), text) > 0;
}

int td_die(const char *program, const struct td_err *err)
{
    char quoted[2 * sizeof err->msg], shown[sizeof err->msg];
    if (td_log_is_json()) {
        td_error("fatal", "msg=%s", td_log_quote(quoted, sizeof quoted, err->msg));
    } else { /* a cause may quote a server or a file */
        snprintf(shown, sizeof shown, "%s", err->msg);
        td_make_printable(shown);
        if (!tell_starter(shown)) td_say(stderr, 2, "%s: error: %s\n", program, shown);
    }
    return err->code == TD_ERR_INVALID ? 2 : 1;
}
