/* descriptors.h - how many descriptors (sockets, files) this process may have open. */
#ifndef TD_BASE_DESCRIPTORS_H
#define TD_BASE_DESCRIPTORS_H

#include <stdint.h>

/* Raises the soft limit to the hard one, which needs no privilege: the usual soft limit of 1,024
 * protects programs that call select, and this one does not. Logs both limits. Called once, at a
 * daemon's start. Returns the limit that holds now. */
uint64_t td_descriptors_raise(void);

#endif
