// Fast hardware functions and bf16 packing.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace ptx {

// The lane, read anew at each call.
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// x, which stays in a register: otherwise the compiler would find a number that is made of the lane again and again.
__device__ __forceinline__ int kept(int x) {
    return __shfl_sync(~0u, x, lane_id());
}

// x, which is the same in all lanes, in a register that they share: what addresses and loops are made of stays there.
__device__ __forceinline__ int uniform(int x) {
    return __reduce_max_sync(~0u, x);
}

// The block, read anew at each call.
__device__ __forceinline__ int block_id() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// 2^x within 2 ulp; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x), absolute error 2^-22 for x in [0.5, 2].
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/x within 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/sqrt(x) within 2^-22, for x of normal size.
__device__ __forceinline__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of two floats, NaN if either is.
__device__ __forceinline__ float max_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// x as tf32, rounded to nearest: the products ignore the bits below.
__device__ __forceinline__ uint32_t round_tf32(float x) {
    return __float_as_uint(x) + 0x1000u;
}

// Two floats as bf16x2, `low` in the low half, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Products of two pairs of bf16, rounded to nearest even (sm_90).
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t x, uint32_t y) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

__device__ __forceinline__ float bf16_low(uint32_t packed) {
    return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float bf16_high(uint32_t packed) {
    return __uint_as_float(packed & 0xffff0000u);
}

}  // namespace ptx
