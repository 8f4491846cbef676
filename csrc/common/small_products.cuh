// What the forward kernels share of their 16 x 16 algebra.
#pragma once

#include <cstdint>

#include "common/shapes.cuh"
#include "ptx/math.cuh"

namespace kda {

// Column `column` of (I + L)^-1, by forward substitution in fp32: powers of L, which overflow for keys that are nearly
// collinear, never appear. `lower` holds L by columns, kPitch apart, 16-byte aligned; only what is below its diagonal
// is used.
template <int kPitch, int kSize>
__device__ __forceinline__ void invert_column(float (&x)[kSize], const float* lower, int column) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < kSize - 1; ++j) {  // x[j] is final: take it out of all later rows
#pragma unroll
        for (int i = j / 4 * 4; i < kSize; i += 4) {
            const float4 below = *reinterpret_cast<const float4*>(&lower[kPitch * j + i]);
            if (i > j) x[i] -= below.x * x[j];
            if (i + 1 > j) x[i + 1] -= below.y * x[j];
            if (i + 2 > j) x[i + 2] -= below.z * x[j];
            if (i + 3 > j) x[i + 3] -= below.w * x[j];
        }
    }
}

// Two C tiles side by side (mma.cuh) as an A operand of two bf16 terms, high + low.
__device__ __forceinline__ void split_operand(uint32_t (&high)[4], uint32_t (&low)[4], const float* c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float x = c[2 * i], y = c[2 * i + 1];
        high[i] = ptx::pack_bf16(x, y);
        low[i] = ptx::pack_bf16(x - ptx::bf16_low(high[i]), y - ptx::bf16_high(high[i]));
    }
}

}  // namespace kda
