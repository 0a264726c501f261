/* descriptors.h - how many descriptors (sockets, files) this process may have open. */
#ifndef TD_BASE_DESCRIPTORS_H
#define TD_BASE_DESCRIPTORS_H

#include <stdint.h>

/* Raises the soft limit to the hard one, which needs no privilege: the usual soft limit of 1,024
 * is there for programs that call select, and we do not. Logs both. Once, at a daemon's start.
 * Returns what holds now. */
uint64_t td_descriptors_raise(void);

#endif
