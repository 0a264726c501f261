/* linger.h - closes connections of a server that goes away without destroying what their clients
 * have not read yet. Internal to common/rpc.
 *
 * Why here: core closes a connection as soon as its last stream after GOAWAY has ended. If bytes of
 * the client are unread then, or come later, TCP answers with a reset. The reset destroys what
 * waits in the server's send queue, and ends the client's connection before the client has read the
 * last statuses and the GOAWAY that would let it open its calls elsewhere. So such a connection
 * sends its end, and its socket is read and thrown away until the client has closed, too, for
 * TD_RPC_LINGER_MS at most (RFC 9112, section 9.6). At most TD_RPC_MAX_LINGERING wait so; one more
 * is closed at once. A connection that waits so still counts as one of its server (accept.c), so
 * these descriptors are among its max_connections and not among those kept in reserve. */
#ifndef TD_RPC_LINGER_H
#define TD_RPC_LINGER_H

#include <stdbool.h>

enum {
    TD_RPC_LINGER_MS = 1000,
    TD_RPC_MAX_LINGERING = 1024,
    /* How often a server that goes away looks: a client that is still sending goes on after this
     * time at most, and 1 s has room for many looks. */
    TD_RPC_LINGER_LOOK_MS = 20,
};

/* Takes the socket over, which then is in nobody's epoll set (epoll_fd < 0: it was in none). False:
 * the caller closes it. [any] */
bool td_rpc_linger_take(int fd, int epoll_fd);
/* Reads once from all, and closes those that are over. Takes no lock while it reads. [any] */
void td_rpc_linger_look(void);
/* Until none is left. [any] */
void td_rpc_linger_wait(void);

#endif
