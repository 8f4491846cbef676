// Asynchronous 16-byte copies from global to shared memory (sm_80+).
#pragma once

#include <cstdint>

#include "ptx/shared.cuh"

namespace ptx {

// Copies 16 bytes, or writes 16 zero bytes (and reads nothing) when `valid` is false. Both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
