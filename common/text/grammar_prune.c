/* grammar_prune.c - expressions that no text is of.
 *
 * A part of a schema may allow nothing: an alternative whose bounds leave no number, a property
 * that need not be there and cannot be. Front ends build it as td_expr_nothing and go on. Here such
 * parts, and those that never end, are taken out of what they are a choice of. Where nothing is
 * left, the grammar is refused, with the reason that the first of its parts has. */
#include "common/text/grammar_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_REASONS 4096
#define MAX_DEPTH 4096      /* of the search for a reason: of the stack, that is */
#define MAX_STEPS (1 << 22) /* expressions looked at: 16 for each that there may be */

int32_t td_expr_nothing(struct td_builder *b, const char *fmt, ...)
{
    char text[TD_ERR_MSG_MAX], *reason = NULL;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (b->n_reasons < MAX_REASONS && !b->status) {
        if (!b->reasons) b->reasons = calloc(MAX_REASONS, sizeof *b->reasons);
        size_t n = strlen(b->what) + strlen(text) + 3;
        if (b->reasons) reason = malloc(n);
        if (reason) snprintf(reason, n, "%s: %s", b->what, text);
        if (!reason) td_builder_fail(b, TD_ERR_NOMEM, "no memory for what allows nothing");
        if (reason) b->reasons[b->n_reasons++] = reason;
    }
    return td_expr_new(b, TD_EXPR_ALT, reason ? b->n_reasons : 0, 0);
}

void td_builder_free_reasons(struct td_builder *b)
{
    for (int32_t i = 0; i < b->n_reasons; i++) free(b->reasons[i]);
    free(b->reasons);
}

struct pruner {
    struct td_builder *b;
    int32_t n_steps;
    bool edits; /* takes out what has no text */
};

/* Has it a text, as far as is known of the rules? */
static bool has_text(struct pruner *p, int32_t expr)
{
    struct td_expr *all = p->b->exprs, *e = &all[expr];
    bool every = true, some = false, edits = p->edits && e->kind == TD_EXPR_ALT;
    int32_t kept = -1, *to = &kept; /* those that have one */
    if (++p->n_steps > MAX_STEPS)
        td_builder_fail(p->b, TD_ERR_LIMIT,
                        "to find what allows nothing takes more than %d steps, the limit",
                        MAX_STEPS);
    if (p->b->status) return false;
    if (e->kind == TD_EXPR_CALL) return !p->b->rules[e->min].nothing;
    for (int32_t i = e->last, before; i >= 0; i = before) {
        before = all[i].prev;
        bool has = has_text(p, i);
        if (has && edits) *to = i, to = &all[i].prev;
        every = every && has, some = some || has;
    }
    if (some && edits) *to = -1, e->last = kept;
    if (e->kind == TD_EXPR_ALT) return some;
    if (e->kind == TD_EXPR_REP && !every && e->min == 0) {
        if (p->edits) e->kind = TD_EXPR_CAT, e->last = -1; /* the empty text */
        return true;
    }
    return every;
}

/* The reason of the first part that has no text; -1: it never ends, or the way is too long. */
static int32_t reason_of(struct pruner *p, int32_t expr, int depth)
{
    const struct td_expr *all = p->b->exprs, *e = &all[expr];
    int32_t first = -1;
    if (depth > MAX_DEPTH) return -1;
    if (e->kind == TD_EXPR_CALL) {
        struct td_rule *rule = &p->b->rules[e->min];
        if (!rule->nothing || rule->called) return -1; /* called: asked before */
        rule->called = true;
        return reason_of(p, rule->expr, depth + 1);
    }
    if (e->kind == TD_EXPR_ALT && e->last < 0) return e->min - 1;
    for (int32_t i = e->last; i >= 0; i = all[i].prev) {
        if (has_text(p, i)) continue;
        int32_t reason = reason_of(p, i, depth + 1);
        if (reason >= 0) first = reason;
    }
    return first;
}

void td_builder_prune(struct td_builder *b)
{
    struct pruner p = {.b = b};
    bool changed = true, up = false; /* rules of long chains call those before them, or behind */
    for (int32_t i = 0; i < b->n_rules; i++) b->rules[i].nothing = b->rules[i].expr >= 0;
    for (; changed && !b->status; up = !up) {
        changed = false;
        for (int32_t k = 0; k < b->n_rules && !b->status; k++) {
            struct td_rule *r = &b->rules[up ? k : b->n_rules - 1 - k];
            if (r->nothing && has_text(&p, r->expr)) r->nothing = false, changed = true;
        }
    }
    p.edits = true;
    for (int32_t i = 0; i < b->n_rules && !b->status; i++)
        if (!b->rules[i].nothing && b->rules[i].expr >= 0) has_text(&p, b->rules[i].expr);
}

void td_rule_check(struct td_builder *b, int32_t rule)
{
    struct pruner p = {.b = b};
    if (b->status || !b->rules[rule].nothing) return;
    int32_t reason = reason_of(&p, b->rules[rule].expr, 0);
    if (reason < 0) {
        td_builder_fail(b, TD_ERR_INVALID,
                        "nothing is valid by it: its parts allow nothing, or never end");
        return;
    }
    b->status = TD_ERR_INVALID;
    td_fail(b->err, TD_ERR_INVALID, "%s", b->reasons[reason]);
}
