// Named barriers (sm_70+): threads of a CTA meet by number, in groups smaller than the CTA.
// A barrier orders the shared-memory accesses of every thread that takes part, also of those that only arrive.
#pragma once

namespace ptx {

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Like barrier_sync; returns whether `flag` held in any of the threads.
__device__ __forceinline__ bool barrier_sync_or(int id, int threads, bool flag) {
    int result;
    asm volatile(
        "{\n.reg .pred p, r;\n"
        "setp.ne.s32 p, %3, 0;\n"
        "barrier.red.or.pred r, %1, %2, p;\n"
        "selp.s32 %0, 1, 0, r;\n}"
        : "=r"(result)
        : "r"(id), "r"(threads), "r"(int(flag))
        : "memory");
    return result != 0;
}

}  // namespace ptx
