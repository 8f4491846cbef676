// Copies from global memory to the L2 cache, for what is needed later (sm_90).
#pragma once

#include <cstdint>

namespace ptx {

// One line of 128 bytes.
__device__ __forceinline__ void prefetch_line(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// `bytes`: a multiple of 16, as the address.
__device__ __forceinline__ void prefetch_bulk(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

// How many multiprocessors there are, or a few more.
__device__ __forceinline__ int multiprocessors() {
    int count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}

}  // namespace ptx
