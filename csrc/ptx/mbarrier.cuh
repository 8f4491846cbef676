// Barriers in shared memory (sm_90): arrivals, also by asynchronous copies, and waiting by phase parity.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"

namespace ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to asynchronous copies; follow it by a CTA barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// After __syncwarp one lane arrives for its warp. NVIDIA's racecheck does not see that this orders the other lanes'
// reads as well; in a build for it, with KDA_FOR_RACECHECK, each lane arrives by itself.
#ifdef KDA_FOR_RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif
__device__ __forceinline__ bool arrives(int lane) {
    return kArrivalsOfWarp == 32 || lane == 0;
}

// Arrives once all of this thread's earlier cp_async copies have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until the phase of the given parity is complete. A new barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Whether it is complete, without waiting.
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, int parity) {
    uint32_t complete;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return complete;
}

// A place in a ring of kSize, and the parity of the phase that its barriers are in.
template <int kSize>
struct RingPlace {
    int index = 0, parity = 0;

    __device__ __forceinline__ void advance(int by = 1) {
        index += by;
        if (index >= kSize) index -= kSize, parity ^= 1;
    }
};

// Orders this thread's ordinary shared-memory writes before later reads by wgmma and by bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
