// Shared memory of the other blocks of a cluster (sm_90): its addresses, barriers there, and copies into it.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"

namespace ptx {

// All threads of all blocks of the cluster; orders their memory accesses before it and after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Where block `rank` of the cluster has what lies at `pointer` here.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

// Arrives at a barrier of any block of the cluster. Ordinary writes are ordered for this block alone, since an order
// for all of the cluster is a fence for the whole GPU, which takes longer than a chunk; copies as below do not need it.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same, and makes its phase wait for so many bytes more.
__device__ __forceinline__ void mbarrier_arrive_expect_cluster(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copies `bytes` (a multiple of 16) from here to `target`, and counts them at `barrier`, both of one block of the
// cluster.
__device__ __forceinline__ void copy_to_cluster(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "r"(shared_address(source)), "r"(bytes), "r"(barrier)
        : "memory");
}

}  // namespace ptx
