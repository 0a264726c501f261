/* symbols.h - functions of a library that is loaded at run time, from a table of their names.
 *
 * A table is a list macro, TABLE(ROW), of rows ROW(name, version, needed): the function, the
 * symbol's version or NULL, and whether the library is of no use without it. TD_SYMBOL_MEMBER makes
 * the members of a struct of it, and TD_SYMBOL_FIND fills them:
 *
 *     static struct { TABLE(TD_SYMBOL_MEMBER) } lib;
 *     const char *missing = NULL;
 *     TABLE(TD_SYMBOL_FIND)      // in a scope with `library`, `lib` and `missing`
 *
 * A function is called as lib.p_NAME(...): a name of its own keeps a header's macros of NAME away.
 * Tables without a header to take the types from (NCCL) call td_symbol_find themselves. */
#ifndef TD_BASE_SYMBOLS_H
#define TD_BASE_SYMBOLS_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Stores the function's address, or NULL, in the pointer at ret_function; the first that is needed
 * and not there is named in *missing, which the caller has set to NULL. */
static inline void td_symbol_find(void *library, const char *name, const char *version,
                                  bool is_needed, void *ret_function, const char **missing)
{
    void *found = version ? dlvsym(library, name, version) : dlsym(library, name);
    memcpy(ret_function, &found, sizeof found); /* ISO C has no cast from an object's pointer */
    if (!found && is_needed && !*missing) *missing = name;
}

#define TD_SYMBOL_MEMBER(name, version, needed) __typeof__(&name) p_##name;
#define TD_SYMBOL_FIND(name, version, needed)                                                      \
    td_symbol_find(library, #name, version, needed, &lib.p_##name, &missing);

#endif
