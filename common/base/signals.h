/* signals.h - the signals that end a program in good order, SIGTERM and SIGINT. Its main thread
 * waits for them.
 *
 * Why here: every program that keeps running blocks these signals before it starts its first
 * thread, so that no handler runs in any thread, and then waits for them here. */
#ifndef TD_BASE_SIGNALS_H
#define TD_BASE_SIGNALS_H

#include <signal.h>

/* The set of SIGTERM and SIGINT. Block it (pthread_sigmask) before the first thread starts: threads
 * inherit the mask. */
void td_stop_signals(sigset_t *ret_set);

/* Waits for a stop signal, takes it and returns its number. 0: none came within timeout_ms, or the
 * handler of another signal ran. timeout_ms < 0: no time limit. The caller has blocked the
 * signals. */
int td_stop_signal_wait(int timeout_ms);

#endif
