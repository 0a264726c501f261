/* first_write.h - an answer's head and its first event leave in one segment, and its last event and
 * the end of its body in another.
 *
 * Why here: libmicrohttpd writes the head of a chunked answer, each chunk and the end of the body
 * by a send of its own. A client then wakes twice for its first token, and each send costs both
 * sides about as much as a token. So a connection is corked (TCP_CORK) before such a pair of sends
 * and uncorked behind it.
 *
 * With its first answer on a connection the library sets TCP_NODELAY, between head and body. The
 * kernel then pushes what is queued, corked or not. So first_write.c defines setsockopt, to which
 * the dynamic linker resolves the library's call: in a thread that runs the library, setting
 * TCP_NODELAY does nothing. first_write_connection has set it when the connection was accepted.
 *
 * With TLS the library corks connections itself and sets TCP_NODELAY to push, so there everything
 * is left to it. */
#ifndef TD_ROUTER_HTTP_FIRST_WRITE_H
#define TD_ROUTER_HTTP_FIRST_WRITE_H

#include <stdbool.h>

/* This thread begins, or ceases, to run the library. */
void first_write_library(bool begins);
void first_write_connection(int fd); /* a new one: sets TCP_NODELAY on it */
/* false = what waits leaves now. A cork that nobody removes holds bytes for 200 ms (tcp(7)).
 * [any thread] */
void first_write_cork(int fd, bool is_corked);

#endif
