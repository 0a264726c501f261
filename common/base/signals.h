/* signals.h - the signals that end a program in good order: SIGTERM and SIGINT, waited for by its
 * main thread.
 *
 * Why here: every program that stays blocks them before its first thread, so that no handler
 * runs anywhere, and waits for them. */
#ifndef TD_BASE_SIGNALS_H
#define TD_BASE_SIGNALS_H

#include <signal.h>

/* SIGTERM and SIGINT. Block them in every thread (pthread_sigmask before the first one starts):
 * threads inherit the mask. */
void td_stop_signals(sigset_t *ret_set);

/* The stop signal that came, taken from those pending; 0: none within timeout_ms, or another
 * signal's handler ran. timeout_ms < 0: waits without an end. The caller has them blocked. */
int td_stop_signal_wait(int timeout_ms);

#endif
