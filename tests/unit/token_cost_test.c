/* token_cost_test.c - a streamed token allocates nothing in the router: from the bytes of a
 * worker's message to the bytes of a client's event. malloc, calloc and realloc are the linker's
 * --wrap of this program, so what any linked file asks for is counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/metrics.h"
#include "common/rpc/unpack.h"
#include "router/http/openai_answer.h"
#include "router/router.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);

static uint64_t n_allocations;

void *__wrap_malloc(size_t bytes)
{
    n_allocations++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    n_allocations++;
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *p, size_t bytes)
{
    n_allocations++;
    return __real_realloc(p, bytes);
}

/* ---- a client, as router/http is one --------------------------------------------------------- */

struct client {
    struct openai_answer answer;
    struct text_buffer out;
    uint64_t n_bytes;
};

static void client_send(void *call, const ProtobufCMessage *message)
{
    struct client *c = call;
    openai_answer_add(&c->answer, (const Tandem__V1__GenerateResponse *)message, &c->out);
    c->n_bytes += c->out.n;
    c->out.n = 0; /* sent */
}

static const struct router_client_ops client_ops = {.send = client_send};

/* ---- a step's message ------------------------------------------------------------------------ */

enum { ROWS = 64, STEPS = 1200, WARM = 600 }; /* every request has had each token when warm */

static uint8_t packed[ROWS * 64];

/* One token for each of ROWS requests. */
static size_t pack_step(uint32_t index)
{
    static Tandem__V1__MultiplexRow rows[ROWS], *list[ROWS];
    static Tandem__V1__TokenOut outs[ROWS];
    Tandem__V1__MultiplexDown down = TANDEM__V1__MULTIPLEX_DOWN__INIT;
    for (uint32_t i = 0; i < ROWS; i++) {
        tandem__v1__multiplex_row__init(&rows[i]);
        tandem__v1__token_out__init(&outs[i]);
        outs[i].index = index;
        outs[i].token = (int32_t)(300 + (index * 7 + i) % 500);
        rows[i].id = (uint64_t)i << 20 | i;
        rows[i].row_case = TANDEM__V1__MULTIPLEX_ROW__ROW_TOKEN;
        rows[i].token = &outs[i];
        list[i] = &rows[i];
    }
    down.n_rows = ROWS;
    down.rows = list;
    assert_true(tandem__v1__multiplex_down__get_packed_size(&down) <= sizeof packed);
    return tandem__v1__multiplex_down__pack(&down, packed);
}

static void make_metrics(struct served_model_metrics *m)
{
    m->output_tokens = td_counter("td_token_cost_test", "", "of this test");
    m->itl = td_histogram("td_token_cost_gaps", "", "gaps", td_seconds_bounds, td_n_seconds_bounds);
}

static void test_no_allocation_a_token(void **unused)
{
    (void)unused;
    static struct served_model model;
    static struct request_state requests[ROWS];
    static struct client clients[ROWS];
    struct td_err err = {0};
    struct td_rpc_unpacker unpacker;
    const int32_t prompt[] = {300, 301};
    td_rpc_unpacker_init(&unpacker);
    assert_int_equal(td_tokenizer_load("models/pocket", &model.tokenizer, &err), TD_OK);
    model.config.vocab = td_tokenizer_vocab(model.tokenizer);
    make_metrics(&model.metrics);
    for (int i = 0; i < ROWS; i++) {
        struct request_state *q = &requests[i];
        clients[i].answer.options.stream = true;
        clients[i].answer.options.is_chat = i % 2;
        clients[i].answer.options.n = clients[i].answer.options.n_prompts = 1;
        snprintf(clients[i].answer.id, sizeof clients[i].answer.id, "chatcmpl-%d", i);
        snprintf(q->name, sizeof q->name, "%d", i);
        q->model = &model;
        q->client = (struct router_client){&client_ops, &clients[i]};
        q->tokens = calloc(2 + STEPS, sizeof *q->tokens);
        memcpy(q->tokens, prompt, sizeof prompt);
        q->n_tokens = q->n_prompt = 2;
        q->ask.max_tokens = STEPS;
        q->output.stop.matched = q->output.stop_token = -1;
        if (i % 4 == 0)
            assert_int_equal(stop_matcher_add(&q->output.stop, "never said", 10, &err), TD_OK);
        assert_int_equal(td_detokenizer_create(model.tokenizer, prompt, 2, true, &q->output.detok),
                         TD_OK);
    }
    uint64_t before = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        if (step == WARM) before = n_allocations; /* buffers have grown */
        size_t n = pack_step(2 + step);
        const ProtobufCMessage *msg;
        assert_int_equal(td_rpc_unpack(&unpacker, &tandem__v1__multiplex_down__descriptor, packed,
                                       n, 1 << 20, &msg, &err),
                         TD_OK);
        const Tandem__V1__MultiplexDown *down = (const void *)msg;
        for (size_t i = 0; i < down->n_rows; i++)
            assert_int_equal(output_take(&requests[i], &down->rows[i]->token, 1), TD_OK);
        td_rpc_unpack_reset(&unpacker);
    }
    uint64_t n_tokens = (uint64_t)ROWS * (STEPS - WARM);
    print_message("%llu allocations for %llu tokens\n",
                  (unsigned long long)(n_allocations - before), (unsigned long long)n_tokens);
    assert_int_equal(n_allocations - before, 0);
    assert_true(clients[0].n_bytes > STEPS * 100);
    for (int i = 0; i < ROWS; i++) {
        struct request_state *q = &requests[i];
        free(q->tokens);
        td_detokenizer_free(q->output.detok);
        stop_matcher_free(&q->output.stop);
        openai_answer_free(&clients[i].answer);
        text_free(&clients[i].out);
    }
    td_tokenizer_free(model.tokenizer);
    td_rpc_unpacker_close(&unpacker);
}

/* The counter counts. */
static void test_allocations_are_seen(void **unused)
{
    (void)unused;
    uint64_t before = n_allocations;
    struct text_buffer b = {0};
    text_add(&b, "x", 1);
    assert_int_equal(n_allocations - before, 1);
    text_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_allocations_are_seen),
        cmocka_unit_test(test_no_allocation_a_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
