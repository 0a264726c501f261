/* grammar_number.c - the numbers that a JSON schema allows: bounds and multipleOf.
 *
 * A number here is a whole number of steps: 10^-n_frac each, with n_frac <= 16 digits behind the
 * point, at most 16 before it, and no exponent. Bounds are rounded inwards to steps. What may
 * follow k digits depends on the bounds only while the digits are those of a bound; after that it
 * depends on nothing but k and the remainder by `unit`, the steps of multipleOf. Such a state is a
 * rule, written once.
 *
 * A bound is the shortest decimal that reads as its double: what the author of the schema wrote.
 * Readers compare doubles, so
 *   - a number of 16 whole digits has no fraction: readers would round it over a bound that is an
 *     integer;
 *   - a number keeps away from an exclusive bound by 1 in its 15th digit: closer ones read as the
 *     bound itself. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/text/grammar_schema.h"

#define N_WHOLE 16
#define N_FRAC 16
#define MAX_STATES 2048  /* of multipleOf; a rule each, of TD_GRAMMAR_MAX_RULES */
#define DOUBLE_DIGITS 15 /* decimals of so many digits are told apart by a double */

/* digits * 10^exponent */
struct decimal {
    int64_t digits;
    int exponent;
};

struct state {
    int32_t k, n_frac, behind;
    int64_t sum;
    int32_t rule; /* 0: the slot is empty */
};

struct number {
    struct td_builder *b;
    int n_frac;
    int64_t unit;        /* each number is a multiple of so many steps */
    __int128 lo, hi;     /* in steps */
    struct state *slots; /* [2 * MAX_STATES], hashed. Owned */
    int n_states;
};

static __int128 pow10_of(int n)
{
    __int128 p = 1;
    while (n-- > 0) p *= 10;
    return p;
}

static int n_digits(__int128 x)
{
    int n = 0;
    if (x < 0) x = -x;
    for (; x > 0; x /= 10) n++;
    return n;
}

/* ---- reading --------------------------------------------------------------------------------- */

static struct decimal decimal_of(const json_t *v)
{
    struct decimal d = {.digits = json_integer_value(v)};
    if (json_is_real(v)) {
        char text[40];
        int precision = 0;
        do /* 17 digits name every double */
            snprintf(text, sizeof text, "%.*e", precision, json_real_value(v));
        while (++precision < 17 && strtod(text, NULL) != json_real_value(v));
        char *e = strchr(text, 'e');
        d.exponent = (int)strtol(e + 1, NULL, 10);
        for (const char *c = text; c < e; c++)
            if (*c >= '0' && *c <= '9') d.digits = 10 * d.digits + (*c - '0');
        d.exponent -= precision - 1;
        if (text[0] == '-') d.digits = -d.digits;
    }
    for (; d.digits && d.digits % 10 == 0; d.digits /= 10) d.exponent++;
    return d;
}

/* In steps, rounded up or down; beyond all numbers where it is too large. */
static __int128 steps_of(struct decimal d, int n_frac, bool up, bool *ret_exact)
{
    const __int128 beyond = pow10_of(N_WHOLE + N_FRAC + 1);
    __int128 x = d.digits, low = 1;
    int shift = d.exponent + n_frac;
    for (; shift > 0 && x > -beyond && x < beyond; shift--) x *= 10;
    for (; shift < 0 && low <= INT64_MAX; shift++) low *= 10;
    __int128 rest = x % low;
    x /= low;
    *ret_exact = rest == 0;
    if (rest > 0 && up) x++;
    if (rest < 0 && !up) x--;
    return x < -beyond ? -beyond : x > beyond ? beyond : x;
}

/* The multiples of d among the whole numbers of steps. */
static void read_multiple(struct number *n, const json_t *v, bool integer)
{
    struct decimal d = {0};
    if (json_is_number(v)) d = decimal_of(v);
    for (; d.exponent > 0 && d.digits < INT64_MAX / 10; d.exponent--) d.digits *= 10;
    if (d.digits <= 0 || d.exponent > 0) {
        td_builder_fail(n->b, d.digits <= 0 ? TD_ERR_INVALID : TD_ERR_LIMIT,
                        d.digits <= 0 ? "multipleOf must be a number above 0"
                                      : "multipleOf is larger than 18 digits, the limit");
        return;
    }
    n->n_frac = integer ? 0 : -d.exponent < N_FRAC ? -d.exponent : N_FRAC;
    n->unit = d.digits;
    for (int i = 0, n_more = -d.exponent - n->n_frac; i < n_more && i < 64; i++) {
        if (n->unit % 2 == 0) n->unit /= 2;
        if (n->unit % 5 == 0) n->unit /= 5;
    }
}

static void read_bound(struct number *n, const json_t *schema, const char *key, bool integer)
{
    const json_t *v = json_object_get(schema, key);
    bool lower = strstr(key, "inimum") != NULL, exact;
    if (!v) return;
    if (!json_is_number(v)) {
        td_builder_fail(n->b, TD_ERR_INVALID, "%s must be a number", key);
        return;
    }
    struct decimal d = decimal_of(v);
    __int128 x = steps_of(d, n->n_frac, lower, &exact), gap = 0;
    if (key[0] == 'e') { /* exclusive */
        if (exact) gap = 1;
        if (!integer && (exact || n_digits(d.digits) > DOUBLE_DIGITS))
            gap = pow10_of(n_digits(x) - DOUBLE_DIGITS);
    }
    if (lower && x + gap > n->lo) n->lo = x + gap;
    if (!lower && x - gap < n->hi) n->hi = x - gap;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int32_t empty(struct td_builder *b) { return td_expr_new(b, TD_EXPR_CAT, 0, 0); }

static int32_t digit(struct td_builder *b, uint32_t set)
{
    struct td_byte_class c = {{0}};
    for (int d = 0; d < 10; d++)
        if (set >> d & 1) c.bits[0] |= (uint64_t)1 << ('0' + d);
    return td_expr_class(b, &c);
}

/* Digits that are still to come: k, of which the last n_frac stand behind the point; `behind`: the
 * point is there. Together they are from x to y. sum: the value before them, by `unit`. */
struct rest {
    int k;
    bool behind;
    __int128 x, y;
    int64_t sum;
};

/* Is there a multiple? */
static bool is_possible(const struct number *n, const struct rest *r)
{
    __int128 over = (r->sum + r->x) % n->unit;
    return r->x + (over ? n->unit - over : 0) <= r->y;
}

/* May the digits that are to come all be left out, which stand for zeros? */
static bool may_end(const struct rest *r) { return r->x == 0 && r->sum == 0; }

static bool is_free(const struct rest *r) { return r->x == 0 && r->y == pow10_of(r->k) - 1; }

static int32_t rest_expr(struct number *n, const struct rest *r);

/* At least one digit. Digits behind which the same may come are one class. */
static int32_t digits_expr(struct number *n, const struct rest *r)
{
    __int128 place = pow10_of(r->k - 1);
    int32_t alt = td_expr_new(n->b, TD_EXPR_ALT, 0, 0);
    struct rest to[10];
    uint32_t left = 0;
    for (int d = 0; d < 10; d++) {
        __int128 from = d * place, last = from + place - 1;
        to[d] = (struct rest){.k = r->k - 1, .behind = r->behind};
        to[d].x = (r->x > from ? r->x : from) - from;
        to[d].y = (r->y < last ? r->y : last) - from;
        to[d].sum = (int64_t)((r->sum + from) % n->unit);
        if (to[d].x <= to[d].y && is_possible(n, &to[d])) left |= 1u << d;
    }
    for (int d = 0; d < 10 && !n->b->status; d++) {
        uint32_t same = 0;
        for (int i = d; i < 10 && (left >> d & 1); i++)
            if ((left >> i & 1) && to[i].x == to[d].x && to[i].y == to[d].y &&
                to[i].sum == to[d].sum)
                same |= 1u << i;
        left &= ~same;
        if (same)
            td_expr_add(n->b, alt, td_expr_cat(n->b, digit(n->b, same), rest_expr(n, &to[d])));
    }
    return alt;
}

static int32_t any_digits(struct td_builder *b, int min, int max)
{
    return max ? td_expr_rep(b, digit(b, 0x3FF), min, max) : empty(b);
}

/* The fraction, if any. */
static int32_t point_expr(struct number *n, const struct rest *r)
{
    struct rest fraction = *r;
    fraction.behind = true;
    int32_t alt = td_expr_new(n->b, TD_EXPR_ALT, 0, 0);
    if (may_end(r)) td_expr_add(n->b, alt, empty(n->b));
    if (r->k > 0) {
        bool any = n->unit == 1 && is_free(r);
        int32_t e = any ? any_digits(n->b, 1, r->k) : digits_expr(n, &fraction);
        td_expr_add(n->b, alt, td_expr_cat(n->b, td_expr_text(n->b, "."), e));
    }
    return alt;
}

static int32_t free_expr(struct number *n, const struct rest *r)
{
    if (r->behind) return any_digits(n->b, 0, r->k);
    struct rest point = {.k = n->n_frac, .y = pow10_of(n->n_frac) - 1};
    int n_whole = r->k - n->n_frac;
    return td_expr_cat(n->b, any_digits(n->b, n_whole, n_whole), point_expr(n, &point));
}

static int32_t written_expr(struct number *n, const struct rest *r)
{
    if (!r->behind && r->k == n->n_frac) return point_expr(n, r);
    if (r->k == 0) return empty(n->b);
    int32_t e = digits_expr(n, r);
    return r->behind && may_end(r) ? td_expr_rep(n->b, e, 0, 1) : e;
}

/* The rule of a state that the bounds say nothing of. */
static int32_t state_expr(struct number *n, const struct rest *r)
{
    int64_t key[3] = {r->k, 2 * n->n_frac + r->behind, r->sum};
    uint64_t mask = 2 * MAX_STATES - 1, i = td_hash64(key, sizeof key, 0) & mask;
    for (; n->slots[i].rule; i = (i + 1) & mask) {
        const struct state *s = &n->slots[i];
        if (s->k == r->k && s->n_frac == n->n_frac && s->behind == r->behind && s->sum == r->sum)
            return td_expr_call(n->b, s->rule);
    }
    if (n->n_states == MAX_STATES) {
        td_builder_fail(n->b, TD_ERR_LIMIT,
                        "multipleOf: what its multiples have in their digits takes more than %d "
                        "states, the limit",
                        MAX_STATES);
        return 0;
    }
    int32_t rule = td_rule_new(n->b);
    if (n->b->status) return 0;
    n->n_states++;
    n->slots[i] = (struct state){r->k, n->n_frac, r->behind, r->sum, rule};
    int32_t e = written_expr(n, r);
    if (!n->b->status) n->b->rules[rule].expr = e;
    return td_expr_call(n->b, rule);
}

static int32_t rest_expr(struct number *n, const struct rest *r)
{
    if (n->b->status) return 0;
    if (!is_free(r)) return written_expr(n, r);
    return n->unit == 1 ? free_expr(n, r) : state_expr(n, r);
}

/* Numbers from lo to hi >= lo >= 0 of n_whole digits before the point. */
static void add_of_width(struct number *n, int32_t alt, const char *sign, int n_whole, __int128 lo,
                         __int128 hi)
{
    __int128 first = n_whole == 1 ? 0 : pow10_of(n_whole - 1 + n->n_frac);
    __int128 last = pow10_of(n_whole + n->n_frac) - 1;
    struct rest r = {.k = n_whole + n->n_frac};
    r.x = lo > first ? lo : first, r.y = hi < last ? hi : last;
    if (r.x <= r.y && is_possible(n, &r))
        td_expr_add(n->b, alt, td_expr_cat(n->b, td_expr_text(n->b, sign), digits_expr(n, &r)));
}

static void add_natural(struct number *n, int32_t alt, const char *sign, __int128 lo, __int128 hi)
{
    for (int i = 1; i < N_WHOLE && !n->b->status; i++) add_of_width(n, alt, sign, i, lo, hi);
    struct number whole = *n;
    for (; whole.n_frac > 0; whole.n_frac--) {
        lo = lo / 10 + (lo % 10 != 0), hi /= 10;
        if (whole.unit % 2 == 0) whole.unit /= 2;
        if (whole.unit % 5 == 0) whole.unit /= 5;
    }
    add_of_width(&whole, alt, sign, N_WHOLE, lo, hi);
    n->n_states = whole.n_states;
}

const json_t *td_schema_bound(const json_t *schema, const char *key)
{
    const json_t *v = json_object_get(schema, key);
    return json_is_number(v) ? v : NULL;
}

bool td_schema_bounds_cross(const json_t *schema)
{
    const json_t *min = td_schema_bound(schema, "minimum"),
                 *max = td_schema_bound(schema, "maximum"),
                 *above = td_schema_bound(schema, "exclusiveMinimum"),
                 *below = td_schema_bound(schema, "exclusiveMaximum");
    return (min && max && td_json_is_above(min, max)) ||
           (min && below && !td_json_is_above(below, min)) ||
           (above && max && !td_json_is_above(max, above)) ||
           (above && below && !td_json_is_above(below, above));
}

/* No number of ours is left: is there none at all? Where the bounds do not cross, that is known of
 * whole multiples of few digits. */
static bool leaves_none(const struct number *n, const json_t *schema, bool integer)
{
    const int digits = integer ? N_WHOLE : DOUBLE_DIGITS;
    return td_schema_bounds_cross(schema) ||
           ((integer || n->n_frac < N_FRAC) && n_digits(n->lo) <= digits &&
            n_digits(n->hi) <= digits);
}

int32_t td_expr_schema_number(struct td_builder *b, const json_t *schema, bool integer)
{
    static const char *const keys[] = {"minimum", "maximum", "exclusiveMinimum",
                                       "exclusiveMaximum"};
    const __int128 limit = pow10_of(N_WHOLE + N_FRAC);
    struct number n = {
        .b = b, .n_frac = integer ? 0 : N_FRAC, .unit = 1, .lo = -limit, .hi = limit};
    const json_t *multiple = json_object_get(schema, "multipleOf");
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    if (multiple) read_multiple(&n, multiple, integer);
    for (int i = 0; i < 4 && !b->status; i++) read_bound(&n, schema, keys[i], integer);
    n.slots = calloc(2 * MAX_STATES, sizeof *n.slots);
    if (!n.slots) td_builder_fail(b, TD_ERR_NOMEM, "no memory for numbers");
    if (n.hi >= 0 && !b->status) add_natural(&n, alt, "", n.lo > 0 ? n.lo : 0, n.hi);
    if (n.lo < 0 && !b->status) add_natural(&n, alt, "-", n.hi < 0 ? -n.hi : 1, -n.lo);
    free(n.slots);
    if (b->status || b->exprs[alt].last >= 0) return alt;
    if (leaves_none(&n, schema, integer))
        return td_expr_nothing(b, "minimum, maximum and multipleOf leave no number");
    td_builder_fail(b, TD_ERR_LIMIT,
                    "minimum, maximum and multipleOf leave no number of at most %d digits before "
                    "the point and %d behind it",
                    N_WHOLE, n.n_frac);
    return alt;
}
