/* fake_device.h - device memory for tests of KV transfer: a table (device_memory.h) over memory
 * whose addresses no instruction of this process can use.
 *
 * An allocation is a memfd that is mapped twice: without any access at the address that the program
 * knows, so that a stray load or store is a SIGSEGV, and with full access elsewhere, where the
 * copies go. Copies of a table run in the order of their tickets, as on a stream, but only when
 * somebody asks for them: until then the destination holds garbage. So a test notices bytes that
 * are read before `done`, and bytes that are overwritten because a copy was forgotten. Page-locked
 * memory is checked to be this table's. Thread-safe. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdbool.h>

#include "common/base/device_memory.h"

struct fake_device;

/* Opens a table of the kind "device", changed by the options in `words`, separated by commas:
 *   eager      copies run when they are issued
 *   slow       `done` says "not yet" a few times before it runs a copy
 *              (both may be given wherever they should make no difference)
 *   no-ipc     export fails
 *   blind-ipc  opening fails
 *   wrong-ipc  opens memory of its own instead
 *   no-pin     memory that processes share cannot be page-locked
 *   no-dmabuf  no NIC reaches its memory
 *   peermem    no dma-buf either, but a NIC's plain registration of its addresses works, as with a
 *              loaded nvidia_peermem
 *   owner      the driver says that NICs' writes are visible (otherwise it says that they are not)
 *   fails=N    the N-th copy and every call after it fails */
struct fake_device *fake_device_open(const char *words);
/* asserts that opened handles were closed; NULL is allowed */
void fake_device_close(struct fake_device *d);
const struct td_device_memory *fake_device_memory(const struct fake_device *d);
void *fake_device_alloc(struct fake_device *d, size_t bytes); /* zeroed; valid until close */
/* the bytes at a device address, for the test to read and write */
uint8_t *fake_device_bytes(struct fake_device *d, const void *address);
/* while set, no copy runs, and `done` says "not yet" */
void fake_device_hold(struct fake_device *d, bool hold);
/* As nvidia_peermem does it: the file and the place behind [at, at + n), if a device of this
 * process that was opened with "peermem" has that memory. False: none has. */
bool fake_device_peermem(const void *at, size_t n, int *ret_fd, uint64_t *ret_offset);
uint64_t fake_device_n_copies(struct fake_device *d);  /* calls of copy so far */
uint64_t fake_device_n_waiting(struct fake_device *d); /* copies issued and not yet run */

#endif
