// Shared memory by its 32-bit addresses.
#pragma once

#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t shared) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared));
    return x;
}

__device__ __forceinline__ void store_shared(uint32_t shared, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

}  // namespace ptx
