/* give_back.h - returns memory to the kernel that malloc keeps after a burst. */
#ifndef TD_BASE_GIVE_BACK_H
#define TD_BASE_GIVE_BACK_H

/* Call once, before threads: from now on blocks of 256 KiB and more are mapped one by one and
 * unmapped when freed. Otherwise glibc would raise that bound to as much as 32 MiB with the first
 * large message freed, and would never return what lies on its heaps. */
void td_give_back_start(void);

/* Call it once when everything that the process needs is loaded, then about once a second, from one
 * thread at a time. While the process has 16 MiB more than at an earlier call, it asks malloc to
 * return free memory; while none is free it asks less and less often, down to every eighth call.
 * Takes about 1 ms for 100 MiB, and delays only threads that call malloc meanwhile. */
void td_give_back(void);

#endif
