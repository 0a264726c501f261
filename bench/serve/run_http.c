/* run_http.c - see run_flight.h: a request as POST to a server with the OpenAI completions API, its
 * tokens as server-sent events (openai.h).
 *
 * libcurl does HTTP (common/base/curl.h). One loop thread drives its multi interface from an epoll
 * set, so that thousands of streams cost what is ready and not what is open; connections are kept
 * and used again.
 *
 *   prepare (pacer): body --post--> send: transfer added --bytes--> events --> tokens, finish,
 *       usage --transfer's end--> finish_call
 *                                                 '--cancel: transfer removed--> UNFINISHED
 *
 * What counts: 200 with [DONE] at its end is complete; 429 and 503 are refusals, with
 * Retry-After; everything else failed. The first chunk with text or token ids is the first
 * token, each later chunk a message with tokens, but for one that only says why it ended. Output
 * tokens are the server's usage where it tells it, else token ids, else chunks. struct http is
 * the loop thread's but for what stands under mu. */
#include "bench/serve/run_flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef TD_HAVE_CURL
#include <errno.h>
#include <signal.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "bench/serve/openai.h"
#include "common/base/curl.h"
#include "common/base/json.h"

#define CONNECT_MS 10000L
#define MAX_ERROR_BODY 65536
#define MAX_MODELS_BODY ((size_t)4 << 20)
#define MAX_IDLE_CONNECTIONS 65536L
#define EVENTS 256

static const struct td_curl *curl; /* written by connect_http, before anything else */

struct posted {
    void (*fn)(void *arg);
    void *arg;
};

struct http {
    pthread_t thread;
    bool has_thread;
    int epoll_fd, wake_fd; /* -1 = not open */
    CURLM *multi;
    uint64_t timer_ns;                       /* when libcurl wants to be called; 0 = not */
    char *url, *models_url;                  /* models_url NULL: the endpoint does not say where */
    struct curl_slist *headers, *key_header; /* of completions; of other requests: the key
                                                alone, or none */
    json_t *fields;                          /* of every request. The pacer's */

    pthread_mutex_t mu;
    struct posted *posts;     /* mu */
    size_t n_posts, capacity; /* mu */
    bool stop;                /* mu */
};

struct http_call {
    struct flight *f;
    CURL *easy; /* NULL until it is sent */
    char *body;
    size_t body_bytes;
    long status; /* 0 = no answer yet */
    struct bench_sse sse;
    struct td_err failed;                        /* code TD_OK = not */
    bool done;                                   /* [DONE] */
    double now_s, first_choice_s, last_choice_s; /* now: of the bytes that are being read */
    uint32_t n_choices;
    struct bench_chunk usage; /* the last one that was told */
    char *answer;             /* of a status other than 200 */
    size_t answer_bytes;
    char curl_error[CURL_ERROR_SIZE];
};

/* --- before the load -------------------------------------------------------------------------- */

static bool needs_ids(const struct bench_run_config *c)
{
    return (c->dataset.kind != BENCH_CUSTOM && c->dataset.kind != BENCH_SHAREGPT) ||
           c->n_warmups > 0;
}

static td_status count_tokens(void *run, const char *const *texts, size_t n, int32_t *counts,
                              struct td_err *err)
{
    (void)run, (void)texts, (void)n, (void)counts;
    return td_fail(err, TD_ERR_INVALID,
                   "--dataset-name sharegpt needs token counts, which the OpenAI API does not "
                   "tell: use custom, with output_tokens");
}

/* Fields of every request: ours, then --extra-body's, which win; a null there leaves a field
 * out, for servers that refuse it. */
static td_status check(struct run *r, struct td_err *err)
{
    static const char *const ours[] = {"model",  "prompt", "messages", "max_tokens",
                                       "stream", "n",      "best_of",  "echo"};
    const struct bench_run_config *c = r->config;
    const char *key;
    json_t *value;
    if (c->dataset.kind == BENCH_SHAREGPT) return count_tokens(NULL, NULL, 0, NULL, err);
    json_object_foreach(
        c->extra_body, key,
        value) for (size_t i = 0; i < sizeof ours / sizeof *ours;
                    i++) if (!strcmp(key, ours[i])) return td_fail(err, TD_ERR_INVALID,
                                                                   "--extra-body: '%s' is not to "
                                                                   "be set with --backend openai: "
                                                                   "it is the benchmark's own",
                                                                   key);
    struct http *h = calloc(1, sizeof *h);
    json_t *fields = json_pack("{s:b, s:{s:b}}", "stream", 1, "stream_options", "include_usage", 1);
    if (!h || !fields) {
        free(h);
        json_decref(fields);
        return run_no_memory(err);
    }
    h->epoll_fd = h->wake_fd = -1;
    h->fields = fields;
    pthread_mutex_init(&h->mu, NULL);
    r->http = h;
    if (c->ignore_eos) json_object_set_new(fields, "ignore_eos", json_true());
    if (c->temperature >= 0) json_object_set_new(fields, "temperature", json_real(c->temperature));
    if (c->top_p >= 0) json_object_set_new(fields, "top_p", json_real(c->top_p));
    json_object_foreach(c->extra_body, key, value)
    {
        if (json_is_null(value))
            json_object_del(fields, key);
        else
            json_object_set(fields, key, value);
    }
    return TD_OK;
}

static td_status set_urls(struct run *r, struct td_err *err)
{
    static const char tail[] = "/completions", models[] = "/models";
    const struct bench_run_config *c = r->config;
    struct http *h = r->http;
    const char *scheme = strstr(c->target, "://") ? "" : "http://";
    size_t n = strlen(c->target), n_method = strlen(c->method),
           bytes = n + n_method + sizeof "http://";
    while (n && c->target[n - 1] == '/') n--;
    h->url = malloc(bytes);
    if (!h->url) return run_no_memory(err);
    snprintf(h->url, bytes, "%s%.*s%s", scheme, (int)n, c->target, c->method);
    if (n_method < sizeof tail - 1 || strcmp(c->method + n_method - (sizeof tail - 1), tail) != 0)
        return TD_OK;
    h->models_url = strdup(h->url);
    if (!h->models_url) return run_no_memory(err);
    memcpy(h->models_url + strlen(h->url) - (sizeof tail - 1), models, sizeof models);
    return TD_OK;
}

/* What every transfer has, with an answer and without one. */
static void set_common(const struct run *r, CURL *easy, const char *url, char *error)
{
    const struct bench_run_config *c = r->config;
    curl->p_curl_easy_setopt(easy, CURLOPT_URL, url);
    curl->p_curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl->p_curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl->p_curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl->p_curl_easy_setopt(easy, CURLOPT_NOPROXY, "*"); /* a proxy of the environment is not what
                                                           is to be measured */
    curl->p_curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
    /* one a stream, and events are small */
    curl->p_curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 4096L);
    curl->p_curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl->p_curl_easy_setopt(easy, CURLOPT_USERAGENT, "tandem-bench");
    curl->p_curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error);
    if (c->tls_ca[0]) curl->p_curl_easy_setopt(easy, CURLOPT_CAINFO, c->tls_ca);
    if (c->tls_cert[0]) curl->p_curl_easy_setopt(easy, CURLOPT_SSLCERT, c->tls_cert);
    if (c->tls_key[0]) curl->p_curl_easy_setopt(easy, CURLOPT_SSLKEY, c->tls_key);
}

struct body {
    char *bytes;
    size_t n;
};

static size_t on_models_bytes(char *bytes, size_t size, size_t n_bytes, void *user)
{
    struct body *b = user;
    (void)size; /* always 1 */
    char *grown = n_bytes <= MAX_MODELS_BODY - b->n ? realloc(b->bytes, b->n + n_bytes) : NULL;
    if (!grown) return 0; /* the transfer fails */
    b->bytes = grown;
    memcpy(b->bytes + b->n, bytes, n_bytes);
    b->n += n_bytes;
    return n_bytes;
}

/* The model's line of GET /v1/models: vLLM and SGLang tell max_model_len, llama.cpp
 * meta.n_vocab. False: it is not in the list. */
static td_status read_models(struct run *r, const struct body *b, struct td_err *err)
{
    const char *want = r->config->model;
    static const char what[] = "GET models";
    json_t *root = NULL;
    td_status s = td_json_load_text(b->bytes, b->n, what, &root, err);
    const json_t *data = json_object_get(root, "data");
    for (size_t i = 0; !s && i < json_array_size(data); i++) {
        const json_t *m = json_array_get(data, i), *meta = json_object_get(m, "meta");
        const char *id = json_string_value(json_object_get(m, "id"));
        if (!id || (want[0] && strcmp(id, want) != 0)) continue;
        int64_t max_len = r->max_model_len, vocab = 0;
        s = td_json_i64(m, what, "max_model_len", 1, UINT32_MAX, &max_len, NULL, err);
        if (!s && json_is_object(meta))
            s = td_json_i64(meta, what, "n_vocab", 1, INT32_MAX, &vocab, NULL, err);
        if (s) break;
        snprintf(r->model, sizeof r->model, "%s", id);
        r->max_model_len = (uint32_t)max_len;
        r->vocab = (uint32_t)vocab;
        break;
    }
    json_decref(root);
    return s;
}

static td_status ask_models(struct run *r, struct td_err *err)
{
    struct http *h = r->http;
    char error[CURL_ERROR_SIZE] = "", message[201];
    struct body b = {0};
    struct td_err why = {0};
    long status = 0;
    CURL *easy = curl->p_curl_easy_init();
    if (!easy) return run_no_memory(err);
    set_common(r, easy, h->models_url, error);
    if (h->key_header) curl->p_curl_easy_setopt(easy, CURLOPT_HTTPHEADER, h->key_header);
    curl->p_curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, CONNECT_MS);
    curl->p_curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_models_bytes);
    curl->p_curl_easy_setopt(easy, CURLOPT_WRITEDATA, &b);
    CURLcode rc = curl->p_curl_easy_perform(easy);
    curl->p_curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    curl->p_curl_easy_cleanup(easy);
    td_status s = TD_OK;
    if (rc) {
        s = td_fail(err, TD_ERR_PEER, "server at %s: %s", r->config->target,
                    error[0] ? error : curl->p_curl_easy_strerror(rc));
    } else if (status != 200) {
        bench_openai_error(b.bytes, b.n, message);
        td_fail(&why, TD_ERR_PEER, "HTTP %ld: %s", status, message);
    } else {
        read_models(r, &b, &why);
    }
    free(b.bytes);
    /* A server need not have this list, nor the model in it under the name it takes. */
    if (!s && !r->model[0] && !r->config->model[0])
        s = td_fail(err, TD_ERR_INVALID, "--model is not given, and %s names none%s%.150s",
                    h->models_url, why.msg[0] ? ": " : "", why.msg);
    return s;
}

static td_status discover(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct http *h = r->http;
    r->max_model_len = UINT32_MAX;
    td_status s = TD_OK;
    if (h->models_url)
        s = ask_models(r, err);
    else if (!c->model[0])
        s = td_fail(err, TD_ERR_INVALID,
                    "--model is not given: with --endpoint %.80s the server cannot be asked for it",
                    c->method);
    if (s) return s;
    if (c->model[0]) snprintf(r->model, sizeof r->model, "%s", c->model);
    if (c->vocab) r->vocab = c->vocab;
    if (r->vocab == 0 && needs_ids(c))
        return td_fail(err, TD_ERR_INVALID,
                       "--vocab-size is not given: prompts are token ids below it, and the server "
                       "at %s does not tell it",
                       c->target);
    return json_object_set_new(h->fields, "model", json_string(r->model)) ? run_no_memory(err)
                                                                          : TD_OK;
}

/* --- the loop --------------------------------------------------------------------------------- */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *is_known)
{
    struct http *h = user;
    (void)easy;
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(h->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
        return 0;
    }
    struct epoll_event e = {.events = (what & CURL_POLL_IN ? EPOLLIN : 0u) |
                                      (what & CURL_POLL_OUT ? EPOLLOUT : 0u),
                            .data.fd = fd};
    /* The kernel forgets a socket that is closed; so both ways are tried before the loop is
       given up. */
    if (epoll_ctl(h->epoll_fd, is_known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &e) &&
        epoll_ctl(h->epoll_fd, is_known ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &e))
        return -1;
    if (!is_known) curl->p_curl_multi_assign(h->multi, fd, h);
    return 0;
}

static int on_timer(CURLM *multi, long ms, void *user)
{
    struct http *h = user;
    (void)multi;
    h->timer_ns = ms < 0 ? 0 : td_now_ns() + (uint64_t)ms * TD_NS_PER_MS;
    return 0;
}

static void finish_call(struct http_call *call, CURLcode rc);

/* False: stop. */
static bool run_posts(struct http *h)
{
    pthread_mutex_lock(&h->mu);
    struct posted *posts = h->posts;
    size_t n = h->n_posts;
    bool stop = h->stop;
    h->posts = NULL;
    h->n_posts = h->capacity = 0;
    pthread_mutex_unlock(&h->mu);
    for (size_t i = 0; i < n; i++) posts[i].fn(posts[i].arg);
    free(posts);
    return !stop;
}

static void *loop(void *arg)
{
    struct http *h = arg;
    struct epoll_event events[EVENTS];
    bool going = true;
    int n_running;
    pthread_setname_np(pthread_self(), "bench-http");
    while (going) {
        uint64_t now_ns = td_now_ns();
        int wait_ms = !h->timer_ns            ? -1
                      : h->timer_ns <= now_ns ? 0
                                              : (int)((h->timer_ns - now_ns) / TD_NS_PER_MS + 1);
        int n = epoll_wait(h->epoll_fd, events, EVENTS, wait_ms);
        TD_ASSERT(n >= 0 || errno == EINTR);
        for (int i = 0; i < n; i++) {
            uint32_t got = events[i].events;
            int fd = events[i].data.fd;
            if (fd == h->wake_fd) {
                uint64_t count;
                ssize_t n_read = read(fd, &count, sizeof count);
                (void)n_read; /* nothing to read: somebody woke us for what is done already */
                going = run_posts(h);
                continue;
            }
            int mask = (got & EPOLLIN ? CURL_CSELECT_IN : 0) |
                       (got & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                       (got & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
            curl->p_curl_multi_socket_action(h->multi, fd, mask, &n_running);
        }
        if (h->timer_ns && h->timer_ns <= td_now_ns()) {
            /* also what was just added: it starts here */
            h->timer_ns = 0;
            curl->p_curl_multi_socket_action(h->multi, CURL_SOCKET_TIMEOUT, 0, &n_running);
        }
        for (CURLMsg *m; (m = curl->p_curl_multi_info_read(h->multi, &n_running));) {
            struct http_call *call = NULL;
            CURLcode rc = m->data.result;
            if (m->msg != CURLMSG_DONE) continue;
            curl->p_curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&call);
            finish_call(call, rc);
        }
    }
    return NULL;
}

static void wake(struct http *h)
{
    uint64_t one = 1;
    ssize_t n = write(h->wake_fd, &one, sizeof one);
    TD_ASSERT(n == (ssize_t)sizeof one || errno == EAGAIN);
}

static void post(struct run *r, void (*fn)(void *arg), void *arg)
{
    struct http *h = r->http;
    pthread_mutex_lock(&h->mu);
    if (h->n_posts == h->capacity) {
        h->capacity = h->capacity ? 2 * h->capacity : 16;
        h->posts = realloc(h->posts, h->capacity * sizeof *h->posts);
        TD_ASSERT(h->posts);
    }
    h->posts[h->n_posts++] = (struct posted){fn, arg};
    pthread_mutex_unlock(&h->mu);
    wake(h);
}

static bool add_header(struct curl_slist **list, const char *text)
{
    struct curl_slist *more = curl->p_curl_slist_append(*list, text);
    if (more) *list = more;
    return more != NULL;
}

static td_status connect_http(struct run *r, struct td_err *err)
{
    struct http *h = r->http;
    td_status s = td_curl_load("--backend openai", &curl, err);
    if (!s) s = set_urls(r, err);
    if (s) return s;
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
        /* a stream is a socket */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    char key[sizeof "Authorization: " + TD_AUTHORIZATION_MAX];
    snprintf(key, sizeof key, "Authorization: %s", r->authorization);
    bool ok = add_header(&h->headers, "Content-Type: application/json") &&
              add_header(&h->headers, "Accept: text/event-stream") &&
              add_header(&h->headers, "Expect:");
    if (ok && r->authorization[0])
        ok = add_header(&h->headers, key) && add_header(&h->key_header, key);
    if (!ok) return run_no_memory(err);
    h->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    h->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    h->multi = curl->p_curl_multi_init();
    struct epoll_event e = {.events = EPOLLIN, .data.fd = h->wake_fd};
    if (!h->multi || h->epoll_fd < 0 || h->wake_fd < 0 ||
        epoll_ctl(h->epoll_fd, EPOLL_CTL_ADD, h->wake_fd, &e))
        return td_fail(err, TD_ERR_IO, "bench: the HTTP loop: %s",
                       errno ? strerror(errno) : "libcurl gives no handle");
    curl->p_curl_multi_setopt(h->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl->p_curl_multi_setopt(h->multi, CURLMOPT_SOCKETDATA, h);
    curl->p_curl_multi_setopt(h->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl->p_curl_multi_setopt(h->multi, CURLMOPT_TIMERDATA, h);
    curl->p_curl_multi_setopt(h->multi, CURLMOPT_MAXCONNECTS, MAX_IDLE_CONNECTIONS);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* the loop's thread: signals are the caller's */
    int rc = pthread_create(&h->thread, NULL, loop, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) return td_fail(err, TD_ERR_IO, "bench: no thread: %s", strerror(rc));
    h->has_thread = true;
    return TD_OK;
}

static void close_http(struct run *r)
{
    struct http *h = r->http;
    if (!h) return;
    if (h->has_thread) {
        pthread_mutex_lock(&h->mu);
        h->stop = true;
        pthread_mutex_unlock(&h->mu);
        wake(h);
        pthread_join(h->thread, NULL);
    }
    if (h->multi) curl->p_curl_multi_cleanup(h->multi);
    if (h->headers) curl->p_curl_slist_free_all(h->headers);
    if (h->key_header) curl->p_curl_slist_free_all(h->key_header);
    if (h->epoll_fd >= 0) close(h->epoll_fd);
    if (h->wake_fd >= 0) close(h->wake_fd);
    json_decref(h->fields);
    free(h->posts);
    free(h->url);
    free(h->models_url);
    pthread_mutex_destroy(&h->mu);
    free(h);
    r->http = NULL;
}

/* --- one request ------------------------------------------------------------------------------ */

static bool prepare(struct flight *f)
{
    struct http *h = f->run->http;
    struct http_call *call = calloc(1, sizeof *call);
    json_t *o = json_copy(h->fields), *ids = f->text ? NULL : json_array();
    f->http = call;
    if (!call || !o || (!f->text && !ids)) {
        json_decref(o);
        json_decref(ids);
        return false;
    }
    call->f = f;
    bool ok = true;
    for (int32_t i = 0; ids && i < f->n_ids; i++)
        ok = !json_array_append_new(ids, json_integer(f->ids[i])) && ok;
    ok = !json_object_set_new(o, "prompt", f->text ? json_string(f->text) : ids) && ok;
    ok = !json_object_set_new(o, "max_tokens", json_integer(f->q->want_len)) && ok;
    if (!json_object_get(o, "seed")) /* 31 bits: every server takes them */
        ok = !json_object_set_new(o, "seed", json_integer((json_int_t)(f->seed >> 33))) && ok;
    if (f->run->config->n_tenants && !json_object_get(o, "user"))
        ok = !json_object_set_new(o, "user", json_sprintf("tenant-%u", f->q->tenant)) && ok;
    call->body = ok ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    if (!call->body) return false;
    call->body_bytes = strlen(call->body);
    free(f->ids);
    f->ids = NULL;
    return true;
}

static void forget(struct flight *f)
{
    struct http_call *call = f->http;
    if (!call) return;
    if (call->easy) {
        /* a transfer that goes on is cut off */
        curl->p_curl_multi_remove_handle(f->run->http->multi, call->easy);
        curl->p_curl_easy_cleanup(call->easy);
    }
    bench_sse_free(&call->sse);
    free(call->body);
    free(call->answer);
    free(call);
    f->http = NULL;
}

static td_status on_event(const char *data, size_t n_bytes, void *user, struct td_err *err)
{
    struct http_call *call = user;
    struct flight *f = call->f;
    struct bench_chunk c;
    if (call->done) return TD_OK;
    td_status s = bench_chunk_parse(data, n_bytes, &c, err);
    if (s) return s;
    call->done = c.is_done;
    if (c.has_choice) {
        if (call->n_choices++ == 0) call->first_choice_s = call->now_s;
        call->last_choice_s = call->now_s;
    }
    if (c.has_tokens || (c.has_choice && !c.has_finish && f->q->n_messages))
        run_flight_tokens(f, call->now_s, c.n_ids ? c.n_ids : 1);
    f->finished |= c.has_finish;
    if (c.has_usage) call->usage = c;
    return TD_OK;
}

static size_t on_bytes(char *bytes, size_t size, size_t n_bytes, void *user)
{
    struct http_call *call = user;
    (void)size; /* always 1 */
    if (call->status == 0) {
        const char *type = NULL;
        curl->p_curl_easy_getinfo(call->easy, CURLINFO_RESPONSE_CODE, &call->status);
        curl->p_curl_easy_getinfo(call->easy, CURLINFO_CONTENT_TYPE, &type);
        if (call->status == 200 && (!type || strncasecmp(type, "text/event-stream", 17) != 0)) {
            td_fail(&call->failed, TD_ERR_PEER,
                    "content type is '%.80s', must be text/event-stream", type ? type : "");
            return 0; /* ends the transfer */
        }
    }
    if (call->status != 200) {
        size_t n = n_bytes < MAX_ERROR_BODY - call->answer_bytes
                       ? n_bytes
                       : MAX_ERROR_BODY - call->answer_bytes;
        char *grown = n ? realloc(call->answer, call->answer_bytes + n) : NULL;
        if (grown) {
            call->answer = grown;
            memcpy(call->answer + call->answer_bytes, bytes, n);
            call->answer_bytes += n;
        }
        return n_bytes; /* the rest is read and dropped: the connection can be used again */
    }
    call->now_s = run_since_s(call->f->run, td_now_ns());
    return bench_sse_feed(&call->sse, bytes, n_bytes, on_event, call, &call->failed) ? 0 : n_bytes;
}

static void send_call(struct flight *f)
{
    struct http_call *call = f->http;
    struct http *h = f->run->http;
    CURL *easy = call->easy = curl->p_curl_easy_init();
    if (!easy) {
        run_flight_end(f, BENCH_FAILED, 0, "no memory for the transfer", -1);
        return;
    }
    set_common(f->run, easy, h->url, call->curl_error);
    curl->p_curl_easy_setopt(easy, CURLOPT_POSTFIELDS, call->body);
    curl->p_curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)call->body_bytes);
    curl->p_curl_easy_setopt(easy, CURLOPT_HTTPHEADER, h->headers);
    curl->p_curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_bytes);
    curl->p_curl_easy_setopt(easy, CURLOPT_WRITEDATA, call);
    curl->p_curl_easy_setopt(easy, CURLOPT_PRIVATE, call);
    curl->p_curl_multi_add_handle(h->multi, easy); /* it starts with the timer that this sets */
}

static void cancel_call(struct flight *f)
{
    run_flight_end(f, BENCH_UNFINISHED, (int)f->http->status,
                   "still running at the end of the grace period", -1);
}

/* What the server counted; where it did not, what came was counted. */
static void take_usage(struct http_call *call)
{
    struct bench_request *q = call->f->q;
    const struct bench_chunk *u = &call->usage;
    if (q->n_messages == 0 && u->has_usage && u->completion_tokens > 0 && call->n_choices) {
        /* tokens without text: they came with the chunks */
        run_flight_tokens(call->f, call->first_choice_s, 1);
        if (u->completion_tokens > 1) run_flight_tokens(call->f, call->last_choice_s, 1);
    }
    if (u->has_usage && u->prompt_tokens >= 0)
        q->input_len = u->prompt_tokens;
    else
        q->input_unknown = call->f->text != NULL;
    if (u->has_usage && u->completion_tokens >= 0) q->output_len = u->completion_tokens;
    if (u->has_cached) q->has_cached = true, q->cached_tokens = u->cached_tokens;
}

static void finish_call(struct http_call *call, CURLcode rc)
{
    struct flight *f = call->f;
    enum bench_outcome outcome = BENCH_FAILED;
    const char *error = NULL;
    char message[201];
    curl_off_t retry_s = 0;
    int64_t retry_ms = -1;
    curl->p_curl_easy_getinfo(call->easy, CURLINFO_RESPONSE_CODE, &call->status);
    if (call->status && call->status != 200) {
        bench_openai_error(call->answer, call->answer_bytes, message);
        error = message;
        if (call->status == 429 || call->status == 503) outcome = BENCH_REJECTED;
        curl->p_curl_easy_getinfo(call->easy, CURLINFO_RETRY_AFTER, &retry_s);
        if (outcome == BENCH_REJECTED && retry_s > 0 && retry_s < INT32_MAX / 1000)
            retry_ms = retry_s * 1000;
    } else if (call->failed.code) {
        error = call->failed.msg;
    } else if (call->done && (f->finished || f->q->n_messages)) {
        outcome = BENCH_COMPLETED;
        take_usage(call);
    } else if (call->done) {
        error = "the stream ended without a token and without a finish reason";
    } else if (rc) {
        error = call->curl_error[0] ? call->curl_error : curl->p_curl_easy_strerror(rc);
    } else {
        error = "the stream ended without [DONE]";
    }
    char kept[CURL_ERROR_SIZE]; /* of call, which goes with f */
    if (error) snprintf(kept, sizeof kept, "%s", error);
    run_flight_end(f, outcome, (int)call->status, error ? kept : NULL, retry_ms);
}

static const char *code_name(int code, char buf[24])
{
    snprintf(buf, 24, code ? "HTTP %d" : "no answer", code);
    return buf;
}

const struct run_backend run_http = {
    .name = "openai",
    .check = check,
    .connect = connect_http,
    .discover = discover,
    .count_tokens = count_tokens,
    .prepare = prepare,
    .post = post,
    .send = send_call,
    .cancel = cancel_call,
    .forget = forget,
    .code_name = code_name,
    .close = close_http,
};

#else /* no <curl/curl.h> */

static td_status check(struct run *r, struct td_err *err)
{
    (void)r;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "--backend openai: this build was made without <curl/curl.h> (package "
                   "libcurl4-openssl-dev)");
}

static void close_nothing(struct run *r) { (void)r; }

const struct run_backend run_http = {.name = "openai", .check = check, .close = close_nothing};

#endif
