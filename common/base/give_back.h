/* give_back.h - memory that malloc holds after a burst goes back to the kernel. */
#ifndef TD_BASE_GIVE_BACK_H
#define TD_BASE_GIVE_BACK_H

/* Once, before threads: blocks from 256 KiB on are mapped one by one and unmapped when freed.
 * glibc would raise that bound with the first large message freed, to 32 MiB, and keep the rest
 * on its heaps for good. */
void td_give_back_start(void);

/* Once when what the process needs is loaded, then about once a second, from one thread at a
 * time: while this process has 16 MiB more than it had at a call before, asks malloc to return
 * what is free; less and less often (down to every eighth call) while nothing is. Takes about a
 * millisecond for 100 MiB, and holds up only threads that malloc meanwhile. */
void td_give_back(void);

#endif
