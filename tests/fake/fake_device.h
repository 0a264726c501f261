/* fake_device.h - device memory for tests of KV transfer: a table (device_memory.h) over memory
 * whose addresses no instruction of this process can use.
 *
 * An allocation is a memfd that is mapped twice: without any right at the address that the
 * program knows, so that a stray load or store is a SIGSEGV, and with all rights elsewhere,
 * where the copies go. Copies of a table run in the order of their tickets, as on a stream, but
 * not before somebody has asked for them: until then the destination holds garbage. What is read
 * before `done`, or what is overwritten because a copy was forgotten about, is thus found.
 * Page-locked memory is checked to be this table's. Thread-safe. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdbool.h>

#include "common/base/device_memory.h"

struct fake_device;

/* words, separated by commas: "eager": copies run when they are issued; "slow": `done` says "not
 * yet" a few times before it runs one (both wherever they should not matter); "no-ipc": export
 * fails; "blind-ipc": opening fails; "wrong-ipc": opens memory of its own instead; "no-pin":
 * memory that processes share is not page-locked; "no-dmabuf": no NIC reaches its memory;
 * "peermem": no dma-buf either, but a NIC's plain registration of its addresses works, as with a
 * loaded nvidia_peermem; "owner": the driver says that NICs' writes are visible (else it does
 * not); "fails=N": the N-th copy and everything after it fails. Else: "device". */
struct fake_device *fake_device_open(const char *words);
/* NULL is fine; asserts that opened handles were given back */
void fake_device_close(struct fake_device *d);
const struct td_device_memory *fake_device_memory(const struct fake_device *d);
void *fake_device_alloc(struct fake_device *d, size_t bytes); /* until close; zeroed */
/* what is there, for the test to read and write */
uint8_t *fake_device_bytes(struct fake_device *d, const void *address);
/* while set, no copy runs, and `done` says "not yet" */
void fake_device_hold(struct fake_device *d, bool hold);
/* What nvidia_peermem knows: the file and the place behind [at, at + n) of a device of this
 * process that has the word. False: none. */
bool fake_device_peermem(const void *at, size_t n, int *ret_fd, uint64_t *ret_offset);
uint64_t fake_device_n_copies(struct fake_device *d);  /* calls of copy so far */
uint64_t fake_device_n_waiting(struct fake_device *d); /* issued and not run */

#endif
