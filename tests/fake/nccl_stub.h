/* nccl_stub.h - the calls of nccl_stub.c for tests, beside NCCL's own; found with dlsym. Any
 * thread. */
#ifndef TD_TESTS_FAKE_NCCL_STUB_H
#define TD_TESTS_FAKE_NCCL_STUB_H

/* The next call on a communicator stays inside until a byte comes through fd; -1: none does. */
typedef void td_nccl_stub_hold_fn(int fd);
/* How many threads are inside a call, and how many destroys and aborts there were. */
typedef int td_nccl_stub_count_fn(void);
/* Sets the result of ncclCommGetAsyncError from now on. */
typedef void td_nccl_stub_fail_fn(int result);

#endif
