/* jinja_eval.c - walks the tree and writes the text.
 *
 * The first failure is written to the context's td_err; every function then returns false. */
#include "common/text/jinja_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS_BASE 2000000u
#define STEPS_PER_MESSAGE 4000u
#define STEPS_PER_JSON_BYTE 4u
/* Memory of one rendering. Of 68 published templates the greediest needs 56 times the bytes of a
 * long chat, and 140 kB for a short one. */
#define BYTES_BASE ((size_t)64 << 20)
#define BYTES_PER_INPUT_BYTE 64

/* ---- expressions ----------------------------------------------------------------------------- */

static bool eval_call(struct ctx *c, const struct expr *e, struct value *ret)
{
    /* allocated, because it is too large for deep recursion on the stack */
    struct args *a = jinja_ctx_alloc(c, sizeof *a);
    struct value f;

    if (a == NULL) return false;
    if (e->a->kind == E_ATTR) {
        if (!jinja_eval(c, e->a->a, &f) || !jinja_eval_args(c, e->args, a)) return false;
        c->line = e->line;
        if (f.kind == STR && f.markup)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "a method of safe text");
        if (f.kind == STR) return jinja_str_method(c, f.u.s, e->a->name, a, ret);
        jinja_charge(c, f);
        if (f.kind == DICT) return jinja_dict_method(c, f.u.dict, e->a->name, a, ret);
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it calls .%.*s of %s",
                           (int)(e->a->name.n < 40 ? e->a->name.n : 40), e->a->name.p,
                           jinja_kind_name(f.kind));
    }
    if (!jinja_eval(c, e->a, &f)) return false;
    if (f.kind != MACRO && f.kind != FUNCTION)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it calls \"%.*s\", which is %s",
                           (int)(e->a->name.n < 40 ? e->a->name.n : 40),
                           e->a->name.p == NULL ? "" : e->a->name.p, jinja_kind_name(f.kind));
    if (!jinja_eval_args(c, e->args, a)) return false;
    return f.kind == MACRO ? jinja_call_macro(c, f.u.macro, a, ret)
                           : jinja_call_function(c, f.u.i, a, ret);
}

static bool eval_slice(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value obj, part[3];
    const struct expr *exprs[3] = {e->b, e->c, e->d};

    if (!jinja_eval(c, e->a, &obj)) return false;
    for (int i = 0; i < 3; i++) {
        part[i] = jinja_none_value();
        if (exprs[i] != NULL && !jinja_eval(c, exprs[i], &part[i])) return false;
        if (part[i].kind != NONE && part[i].kind != INT)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "a slice bound that is %s",
                               jinja_kind_name(part[i].kind));
    }
    if (obj.markup) return jinja_fails(c, TD_ERR_UNSUPPORTED, "a slice of safe text");
    if ((obj.kind != LIST || obj.lazy) && obj.kind != STR)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "a slice of %s",
                           obj.lazy ? "an iterator" : jinja_kind_name(obj.kind));
    struct value items, out;
    if (!jinja_to_items(c, obj, &items)) return false;
    int64_t n = (int64_t)items.u.list->n, by = part[2].kind == INT ? part[2].u.i : 1;
    if (by == 0) return jinja_fails(c, TD_ERR_UNSUPPORTED, "a slice with a step of 0");
    /* a longer step leads past the end, too, and i + by does not overflow */
    by = by > n + 1 ? n + 1 : by < -(n + 1) ? -(n + 1) : by;
    int64_t low = by > 0 ? 0 : -1, high = by > 0 ? n : n - 1,
            bound[2] = {by > 0 ? low : high, by > 0 ? high : low};
    for (int i = 0; i < 2; i++) {
        if (part[i].kind != INT) continue;
        int64_t v = part[i].u.i < 0 ? part[i].u.i + n : part[i].u.i;
        bound[i] = v < low ? low : v > high ? high : v;
    }
    if (!jinja_new_list(c, items.u.list->n, &out)) return false;
    size_t k = 0;
    for (int64_t i = bound[0]; by > 0 ? i < bound[1] : i > bound[1]; i += by)
        out.u.list->v[k++] = items.u.list->v[i];
    out.u.list->n = k;
    *ret = out;
    if (obj.kind == LIST) return true;
    struct text t = {0};
    for (size_t i = 0; i < k; i++)
        if (!jinja_append(c, &t, out.u.list->v[i].u.s)) return false;
    *ret = jinja_str_value(t.p, t.n);
    return true;
}

static bool needs_escape(struct str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (strchr("&<>'\"", s.p[i]) != NULL && s.p[i] != 0) return true;
    return false;
}

static bool eval_binary(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a, b;
    struct str s, t;

    if (!jinja_eval(c, e->a, &a) || !jinja_eval(c, e->b, &b)) return false;
    c->line = e->line;
    if (e->op == OP_CONCAT || (e->op == OP_ADD && a.kind == STR && b.kind == STR)) {
        if (!jinja_to_text(c, a, &s) || !jinja_to_text(c, b, &t)) return false;
        char *p = jinja_ctx_alloc(c, s.n + t.n + 1);
        if (p == NULL) return false;
        if (e->op == OP_ADD && a.markup != b.markup && needs_escape(a.markup ? t : s))
            return jinja_fails(c, TD_ERR_UNSUPPORTED,
                               "it adds text that must be escaped for HTML to safe text");
        if (s.n > 0) memcpy(p, s.p, s.n);
        if (t.n > 0) memcpy(p + s.n, t.p, t.n);
        *ret = jinja_str_value(p, s.n + t.n);
        ret->markup = e->op == OP_ADD && (a.markup || b.markup);
        return true;
    }
    if (e->op == OP_ADD && a.kind == LIST && b.kind == LIST && !a.lazy && !b.lazy) {
        if (!jinja_new_list(c, a.u.list->n + b.u.list->n, ret)) return false;
        for (size_t i = 0; i < ret->u.list->n; i++)
            ret->u.list->v[i] = i < a.u.list->n ? a.u.list->v[i] : b.u.list->v[i - a.u.list->n];
        return true;
    }
    if ((a.kind != INT && a.kind != BOOL) || (b.kind != INT && b.kind != BOOL))
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "arithmetic with %s and %s",
                           jinja_kind_name(a.kind), jinja_kind_name(b.kind));
    int64_t r = 0;
    bool bad = false;
    switch (e->op) {
    case OP_ADD:
        bad = __builtin_add_overflow(a.u.i, b.u.i, &r);
        break;
    case OP_SUB:
        bad = __builtin_sub_overflow(a.u.i, b.u.i, &r);
        break;
    case OP_MUL:
        bad = __builtin_mul_overflow(a.u.i, b.u.i, &r);
        break;
    default:
        if (b.u.i == 0 || (a.u.i == INT64_MIN && b.u.i == -1))
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "a division by zero");
        /* as in Python: the remainder has the divisor's sign, and // rounds down */
        r = a.u.i % b.u.i;
        bool down = r != 0 && (r < 0) != (b.u.i < 0);
        r = e->op == OP_MOD ? r + (down ? b.u.i : 0) : a.u.i / b.u.i - down;
    }
    if (bad || r > (int64_t)1 << 53 || r < -((int64_t)1 << 53))
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "a number beyond 2^53");
    *ret = jinja_int_value(r);
    return true;
}

bool jinja_compare(struct ctx *c, enum op op, struct value a, struct value b, bool *ret)
{
    jinja_charge(c, b);
    if (op == OP_EQ || op == OP_NE) {
        *ret = jinja_same(c, a, b, 0) == (op == OP_EQ);
        return c->status == TD_OK;
    }
    if (op == OP_IN || op == OP_NOT_IN) {
        if (!jinja_is_in(c, a, b, ret)) return false;
        *ret = *ret == (op == OP_IN);
        return true;
    }
    int order;
    if (a.kind == STR && b.kind == STR) {
        size_t n = a.u.s.n < b.u.s.n ? a.u.s.n : b.u.s.n;
        order = n > 0 ? memcmp(a.u.s.p, b.u.s.p, n) : 0;
        order = order != 0 ? order : (a.u.s.n > b.u.s.n) - (a.u.s.n < b.u.s.n);
    } else if ((a.kind == INT || a.kind == BOOL) && (b.kind == INT || b.kind == BOOL)) {
        order = (a.u.i > b.u.i) - (a.u.i < b.u.i);
    } else {
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the order of %s and %s", jinja_kind_name(a.kind),
                           jinja_kind_name(b.kind));
    }
    *ret = op == OP_LT   ? order < 0
           : op == OP_LE ? order <= 0
           : op == OP_GT ? order > 0
                         : order >= 0;
    return true;
}

static bool eval_collection(struct ctx *c, const struct expr *e, struct value *ret)
{
    size_t n = 0;
    struct value key, v;
    for (const struct arg *a = e->args; a != NULL; a = a->next) n++;
    if (e->kind == E_LIST) {
        if (!jinja_new_list(c, n, ret)) return false;
        n = 0;
        for (const struct arg *a = e->args; a != NULL; a = a->next)
            if (!jinja_eval(c, a->value, &ret->u.list->v[n++])) return false;
        return true;
    }
    if (!jinja_new_dict(c, DICT, ret)) return false;
    for (const struct arg *a = e->args; a != NULL; a = a->next) {
        struct str text;
        if (!jinja_eval(c, a->key, &key) || !jinja_eval(c, a->value, &v) ||
            !jinja_to_key(c, key, &text) || !jinja_dict_put(c, ret->u.dict, text, v))
            return false;
    }
    return true;
}

static void eval_name(struct ctx *c, const struct expr *e, struct value *ret)
{
    const struct value *v = jinja_find_name(c, e->name);
    int function = v == NULL ? jinja_function_find(e->name) : -1;
    *ret = v != NULL ? *v : (struct value){.kind = UNDEFINED};
    if (function >= 0) *ret = (struct value){.kind = FUNCTION, .u.i = function};
}

static bool eval_filter_or_test(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a;
    bool yes;
    struct args *args = jinja_ctx_alloc(c, sizeof *args);
    if (args == NULL || !jinja_eval(c, e->a, &a) || !jinja_eval_args(c, e->args, args))
        return false;
    c->line = e->line;
    if (e->kind == E_FILTER) return jinja_run_filter(c, e->name, a, args, ret);
    if (!jinja_run_test(c, e->name, a, args, &yes)) return false;
    *ret = jinja_bool_value(yes);
    return true;
}

/* a < b < c: each with the one before it, up to the first that is false. */
static bool eval_compare(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a, b;
    bool yes = true;
    if (!jinja_eval(c, e->a, &a)) return false;
    for (const struct arg *arg = e->args; arg != NULL && yes; arg = arg->next) {
        if (!jinja_eval(c, arg->value, &b) || !jinja_compare(c, arg->op, a, b, &yes)) return false;
        a = b;
    }
    *ret = jinja_bool_value(yes);
    return true;
}

bool jinja_eval(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a, b;

    if (!jinja_step(c)) return false;
    c->line = e->line;
    switch (e->kind) {
    case E_VALUE:
        *ret = e->value;
        return true;
    case E_NAME:
        eval_name(c, e, ret);
        return true;
    case E_ATTR:
        return jinja_eval(c, e->a, &a) && jinja_get_attr(c, a, e->name, ret);
    case E_ITEM:
        if (!jinja_eval(c, e->a, &a) || !jinja_eval(c, e->b, &b)) return false;
        /* loop['first'] */
        if (b.kind == STR && a.kind != DICT && a.kind != LIST && a.kind != STR &&
            a.kind != UNDEFINED)
            return jinja_get_attr(c, a, b.u.s, ret);
        return jinja_get_item(c, a, b, ret);
    case E_SLICE:
        return eval_slice(c, e, ret);
    case E_CALL:
        return eval_call(c, e, ret);
    case E_FILTER:
    case E_TEST:
        return eval_filter_or_test(c, e, ret);
    case E_NOT:
        if (!jinja_eval(c, e->a, &a)) return false;
        *ret = jinja_bool_value(!jinja_truth(a));
        return true;
    case E_AND:
    case E_OR:
        if (!jinja_eval(c, e->a, ret)) return false;
        return jinja_truth(*ret) == (e->kind == E_OR) || jinja_eval(c, e->b, ret);
    case E_NEG:
        if (!jinja_eval(c, e->a, &a)) return false;
        if (a.kind != INT)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "minus %s", jinja_kind_name(a.kind));
        if (a.u.i == INT64_MIN) return jinja_fails(c, TD_ERR_UNSUPPORTED, "a number beyond 2^53");
        *ret = jinja_int_value(-a.u.i);
        return true;
    case E_BINARY:
        return eval_binary(c, e, ret);
    case E_COMPARE:
        return eval_compare(c, e, ret);
    case E_COND:
        if (!jinja_eval(c, e->b, &a)) return false;
        if (jinja_truth(a)) return jinja_eval(c, e->a, ret);
        *ret = (struct value){.kind = UNDEFINED};
        return e->c == NULL || jinja_eval(c, e->c, ret);
    default:
        return eval_collection(c, e, ret);
    }
}

/* ---- statements ------------------------------------------------------------------------------ */

static bool bind_targets(struct ctx *c, struct scope *s, const struct target *targets,
                         struct value v)
{
    if (targets->next == NULL) return jinja_bind(c, s, targets->name, v);
    size_t n = 0;
    for (const struct target *t = targets; t != NULL; t = t->next) n++;
    if (v.kind != LIST || v.u.list->n != n)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "a loop takes apart what is not %zu values", n);
    n = 0;
    for (const struct target *t = targets; t != NULL; t = t->next)
        if (!jinja_bind(c, s, t->name, v.u.list->v[n++])) return false;
    return true;
}

static bool run_for(struct ctx *c, const struct node *n)
{
    struct value v, items, keep;
    struct scope *outer = c->scope;
    bool ok = true;

    if (!jinja_eval(c, n->e, &v) || !jinja_to_items(c, v, &items)) return false;
    if (n->filter != NULL) {
        if (!jinja_new_list(c, items.u.list->n, &keep)) return false;
        size_t k = 0;
        for (size_t i = 0; ok && i < items.u.list->n; i++) {
            struct scope s = {.parent = outer};
            c->scope = &s;
            ok =
                bind_targets(c, &s, n->targets, items.u.list->v[i]) && jinja_eval(c, n->filter, &v);
            c->scope = outer;
            if (ok && jinja_truth(v)) keep.u.list->v[k++] = items.u.list->v[i];
        }
        if (!ok) return false;
        keep.u.list->n = k;
        items = keep;
    }
    struct loop *loop = jinja_ctx_alloc(c, sizeof *loop);
    if (loop == NULL) return false;
    loop->items = items.u.list;
    for (size_t i = 0; ok && i < items.u.list->n && c->flow != BREAK; i++) {
        struct scope s = {.parent = outer};
        loop->at = i;
        c->scope = &s;
        ok = jinja_bind(c, &s, (struct str){"loop", 4},
                        (struct value){.kind = LOOP, .u.loop = loop}) &&
             bind_targets(c, &s, n->targets, items.u.list->v[i]) && jinja_run_nodes(c, n->body);
        c->scope = outer;
        if (c->flow == CONTINUE) c->flow = GO_ON;
    }
    c->flow = GO_ON;
    return ok && (items.u.list->n > 0 || jinja_run_nodes(c, n->otherwise));
}

static bool run_set(struct ctx *c, const struct node *n)
{
    struct value v;

    if (n->kind == N_SET_BLOCK) {
        struct text text = {0}, *out = c->out;
        struct scope s = {.parent = c->scope}, *outer = c->scope;
        c->out = &text;
        c->scope = &s;
        bool ok = jinja_run_nodes(c, n->body);
        c->out = out;
        c->scope = outer;
        if (!ok) return false;
        v = jinja_str_value(text.p, text.n);
    } else if (!jinja_eval(c, n->e, &v)) {
        return false;
    }
    if (n->text.n == 0) return jinja_bind(c, c->scope, n->targets->name, v);
    const struct value *space = jinja_find_name(c, n->targets->name);
    if (space == NULL || space->kind != SPACE)
        return jinja_fails(c, TD_ERR_UNSUPPORTED,
                           "it sets an attribute of something that is no namespace");
    return jinja_dict_put(c, space->u.dict, n->text, v);
}

bool jinja_run_nodes(struct ctx *c, const struct node *n)
{
    struct value v;
    struct str s;

    for (; n != NULL && c->flow == GO_ON; n = n->next) {
        c->line = n->line;
        if (!jinja_step(c)) return false;
        switch (n->kind) {
        case N_TEXT:
            if (!jinja_append(c, c->out, n->text)) return false;
            break;
        case N_PRINT:
            if (!jinja_eval(c, n->e, &v) || !jinja_to_text(c, v, &s) || !jinja_append(c, c->out, s))
                return false;
            break;
        case N_IF:
            if (!jinja_eval(c, n->e, &v) ||
                !jinja_run_nodes(c, jinja_truth(v) ? n->body : n->otherwise))
                return false;
            break;
        case N_FOR:
            if (!run_for(c, n)) return false;
            break;
        case N_SET:
        case N_SET_BLOCK:
            if (!run_set(c, n)) return false;
            break;
        case N_MACRO:
            if (!jinja_bind(c, c->scope, n->text, (struct value){.kind = MACRO, .u.macro = n}))
                return false;
            break;
        case N_BREAK:
            c->flow = BREAK;
            break;
        case N_CONTINUE:
            c->flow = CONTINUE;
            break;
        case N_GROUP:
            if (!jinja_run_nodes(c, n->body)) return false;
            break;
        }
    }
    return true;
}

static bool put(struct ctx *c, struct value dict, const char *key, struct value v)
{
    return jinja_dict_put(c, dict.u.dict, (struct str){key, strlen(key)}, v);
}

/* The shape that transformers' users and vLLM give: the arguments are a mapping, not their text. */
static bool give_calls(struct ctx *c, const struct td_chat_message *m, size_t i_message,
                       struct value *ret)
{
    char what[64];

    if (!jinja_new_list(c, m->n_tool_calls, ret)) return false;
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const struct td_chat_tool_call *in = &m->tool_calls[i];
        struct value *call = &ret->u.list->v[i], function, arguments;
        snprintf(what, sizeof what, "messages[%zu].tool_calls[%zu].arguments", i_message, i);
        if (!jinja_new_dict(c, DICT, call) || !jinja_new_dict(c, DICT, &function) ||
            (in->arguments.bytes == 0 ? !jinja_new_dict(c, DICT, &arguments)
                                      : !jinja_from_json(c, in->arguments, true, what, &arguments)))
            return false;
        if (in->id != NULL && in->id[0] != 0 && !put(c, *call, "id", jinja_word_value(in->id)))
            return false;
        if (!put(c, *call, "type", jinja_word_value("function")) ||
            !put(c, *call, "function", function) ||
            !put(c, function, "name", jinja_word_value(in->name)) ||
            !put(c, function, "arguments", arguments))
            return false;
    }
    return true;
}

/* gpt-oss's template has a name of its own, and refuses thoughts beside both a text and calls: it
 * takes the text of such a message for the thoughts. */
static bool give_reasoning(struct ctx *c, const struct td_chat_message *m, struct value message)
{
    if (m->reasoning_bytes == 0) return true;
    struct value v = jinja_str_value(m->reasoning, m->reasoning_bytes);
    if (!put(c, message, "reasoning_content", v)) return false;
    return (m->n_tool_calls > 0 && m->content_bytes > 0) || put(c, message, "thinking", v);
}

static bool give_messages(struct ctx *c, const struct td_chat *chat, struct value *ret)
{
    struct value calls;

    if (!jinja_new_list(c, chat->n_messages, ret)) return false;
    for (size_t i = 0; i < chat->n_messages; i++) {
        const struct td_chat_message *m = &chat->messages[i];
        struct value v;
        if (!jinja_new_dict(c, DICT, &v) || !put(c, v, "role", jinja_word_value(m->role)) ||
            !put(c, v, "content", jinja_str_value(m->content, m->content_bytes)))
            return false;
        if (m->n_tool_calls > 0 &&
            (!give_calls(c, m, i, &calls) || !put(c, v, "tool_calls", calls)))
            return false;
        if (m->tool_call_id != NULL && m->tool_call_id[0] != 0 &&
            !put(c, v, "tool_call_id", jinja_word_value(m->tool_call_id)))
            return false;
        if (m->name != NULL && m->name[0] != 0 && !put(c, v, "name", jinja_word_value(m->name)))
            return false;
        if (!give_reasoning(c, m, v)) return false;
        ret->u.list->v[i] = v;
    }
    return true;
}

static bool give_tools(struct ctx *c, const struct td_chat *chat, struct value *ret)
{
    char what[32];

    *ret = jinja_none_value();
    if (chat->n_tools == 0) return true;
    if (!jinja_new_list(c, chat->n_tools, ret)) return false;
    for (size_t i = 0; i < chat->n_tools; i++) {
        snprintf(what, sizeof what, "tools[%zu]", i);
        if (!jinja_from_json(c, chat->tools[i], true, what, &ret->u.list->v[i])) return false;
    }
    return true;
}

/* After the template's own input: what that has, or a function's name, may not be replaced. */
static bool give_kwargs(struct ctx *c, const struct td_chat *chat)
{
    struct value v;

    if (chat->template_kwargs.bytes == 0) return true;
    if (!jinja_from_json(c, chat->template_kwargs, true, "template_kwargs", &v)) return false;
    for (size_t i = 0; i < v.u.dict->n; i++) {
        const struct pair *pair = &v.u.dict->pair[i];
        if (jinja_find_name(c, pair->key) != NULL || jinja_function_find(pair->key) >= 0 ||
            str_is(pair->key, "bos_token") || str_is(pair->key, "eos_token")) {
            c->status = td_fail(c->err, TD_ERR_INVALID,
                                "template_kwargs sets \"%.*s\", which is not its to set",
                                (int)(pair->key.n < 40 ? pair->key.n : 40), pair->key.p);
            return false;
        }
    }
    for (size_t i = 0; i < v.u.dict->n; i++)
        if (!jinja_bind(c, c->root, v.u.dict->pair[i].key, v.u.dict->pair[i].value)) return false;
    return true;
}

static bool give_input(struct ctx *c)
{
    const struct td_jinja_input *in = c->input;
    struct value messages, tools;

    if (!give_messages(c, in->chat, &messages) || !give_tools(c, in->chat, &tools)) return false;
    const struct {
        const char *name;
        struct value value;
        bool given;
    } vars[] = {
        {"messages", messages, true},
        {"add_generation_prompt", jinja_bool_value(in->chat->add_generation_prompt), true},
        {"tools", tools, true},
        {"documents", jinja_none_value(), true},
        {"bos_token", in->bos_token != NULL ? jinja_word_value(in->bos_token) : jinja_none_value(),
         in->bos_token != NULL},
        {"eos_token", in->eos_token != NULL ? jinja_word_value(in->eos_token) : jinja_none_value(),
         in->eos_token != NULL},
    };
    for (size_t i = 0; i < sizeof vars / sizeof *vars; i++)
        if (vars[i].given &&
            !jinja_bind(c, c->root, (struct str){vars[i].name, strlen(vars[i].name)},
                        vars[i].value))
            return false;
    return give_kwargs(c, in->chat);
}

td_status td_jinja_render(const struct td_jinja *jinja, const struct td_jinja_input *input,
                          char **ret_text, size_t *ret_bytes, struct td_err *err)
{
    /* a template's own names hide the variables that it was given */
    struct scope given = {0}, root = {.parent = &given};
    struct text out = {0};
    struct ctx c = {
        .input = input, .scope = &root, .root = &given, .out = &out, .final = &out, .err = err};
    const struct td_chat *chat = input->chat;
    size_t input_bytes = 0, json_bytes = chat->template_kwargs.bytes;

    for (size_t i = 0; i < chat->n_messages; i++) {
        input_bytes += chat->messages[i].content_bytes + 256;
        for (size_t k = 0; k < chat->messages[i].n_tool_calls; k++)
            json_bytes += chat->messages[i].tool_calls[k].arguments.bytes + 256;
    }
    for (size_t i = 0; i < chat->n_tools; i++) json_bytes += chat->tools[i].bytes;
    input_bytes += json_bytes;
    c.arena.limit = input_bytes < SIZE_MAX / BYTES_PER_INPUT_BYTE / 2
                        ? BYTES_BASE + input_bytes * BYTES_PER_INPUT_BYTE
                        : SIZE_MAX;
    c.steps_left = STEPS_BASE + (uint64_t)chat->n_messages * STEPS_PER_MESSAGE +
                   (uint64_t)json_bytes * STEPS_PER_JSON_BYTE;
    bool ok = give_input(&c);
    c.root = &root;
    if (ok && jinja_run_nodes(&c, jinja->root) && c.status == TD_OK) {
        char *text = malloc(out.n + 1);
        if (text != NULL) {
            if (out.n > 0) memcpy(text, out.p, out.n);
            text[out.n] = 0;
            *ret_text = text;
            *ret_bytes = out.n;
        } else {
            c.status = td_fail(err, TD_ERR_NOMEM, "chat template: no memory for %zu bytes", out.n);
        }
    }
    jinja_arena_free(&c.arena);
    return c.status;
}
