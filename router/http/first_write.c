/* first_write.c - see first_write.h. */
#include "router/http/first_write.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local bool is_library;

static void set(int fd, int option, int value)
{
    syscall(SYS_setsockopt, fd, IPPROTO_TCP, option, &value, sizeof value);
}

void first_write_library(bool begins) { is_library = begins; }

void first_write_connection(int fd) { set(fd, TCP_NODELAY, 1); }

void first_write_cork(int fd, bool is_corked) { set(fd, TCP_CORK, is_corked); }

/* Overrides the C library's setsockopt for the whole program, libmicrohttpd included. */
__attribute__((visibility("default"))) int setsockopt(int fd, int level, int option,
                                                      const void *value, socklen_t n)
{
    if (is_library && level == IPPROTO_TCP && option == TCP_NODELAY) return 0;
    return (int)syscall(SYS_setsockopt, fd, level, option, value, n);
}
