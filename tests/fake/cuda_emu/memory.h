/* memory.h - the emulated device's memory, and the list of the host's page-locked memory.
 *
 * Device memory is one sparse memfd, mapped once; what is not allocated is mapped without access.
 * An allocation ends (rounded up to 256 bytes) at the end of a page, with an unmapped page behind
 * it. The bytes between are watched: ASan reports an access, and without it cudaFree finds them
 * changed. Threads: any. */
#ifndef TD_KERNELS_CUDA_EMU_MEMORY_H
#define TD_KERNELS_CUDA_EMU_MEMORY_H

#include "tests/fake/cuda_emu/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

enum td_emu_where {
    TD_EMU_HOST,   /* no device memory */
    TD_EMU_DEVICE, /* inside one allocation, ours or another process's */
    TD_EMU_STRAY,  /* device addresses, but not inside one allocation */
};

void td_emu_memory_set_total(uint64_t bytes);
void td_emu_memory_info(uint64_t *ret_free, uint64_t *ret_total);
cudaError_t td_emu_memory_alloc(size_t bytes, void **ret_memory);
cudaError_t td_emu_memory_free(void *memory);
enum td_emu_where td_emu_memory_where(const void *memory, size_t bytes);

/* Strict: device memory is accessible only between enter and leave, which surround every piece of
 * work. A host that follows a device pointer ends with SIGSEGV, as on a machine with a GPU. Enter
 * and leave count. */
void td_emu_memory_set_strict(bool is_strict);
void td_emu_memory_enter(void);
void td_emu_memory_leave(void);

cudaError_t td_emu_memory_export(void *memory, cudaIpcMemHandle_t *ret_handle);
cudaError_t td_emu_memory_import(const cudaIpcMemHandle_t *handle, void **ret_memory);
cudaError_t td_emu_memory_close(void *memory);

/* Page-locked memory of the host. */
/* registered: the caller's own pages; else malloc's */
cudaError_t td_emu_pinned_add(void *memory, size_t bytes, bool is_registered);
cudaError_t td_emu_pinned_remove(void *memory, bool is_registered);
bool td_emu_pinned_has(const void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
