// The part of L and P that the products of decayed operands leave out: pairs of tokens of which the earlier one is
// steep in a channel.
//
//     L_ij += k_i k_j 2^(G_i - G_j)      P_ij += q_i k_j 2^(G_i - G_j)      j < i
//
// The two halves of a block of 16, 8, 4 or 2 tokens make a tensor-core product. With b the first token of the later
// half, both factors of
//
//     2^(G_i - G_b)  2^(G_b - G_j)      j < b <= i
//
// are at most 1. Each pair of tokens is in one of these products, and what a token gets depends on its past alone. The
// right factor is zero below 2^-64, where L and P do not feel it: so products of nothing but such can be left out, and
// that changes no bit.
#pragma once

#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

class SteepPairs {
 public:
    __device__ __forceinline__ SteepPairs(Stage& stage, const Input& input)
        : stage_(stage), input_(input), lane_(ptx::lane_id()) {}

    // Sets L and P, C tiles (mma.cuh) of columns 0..7 and 8..15, to the sums of these pairs. The places of P and the
    // inverse in the stage hold them in between.
    __device__ __forceinline__ void find(float (&L)[2][4], float (&P)[2][4]) const {
        if (!(stage_.felt[0] | stage_.felt[1])) return;
#pragma unroll 1
        for (int size = kChunk / 2; size > 0; size /= 2) {
            float sums[2][4] = {};  // of even and odd steps, so that neither waits for the other
            multiply(sums, size);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i];
            scatter(sums[0], size);
        }
        __syncwarp();
        const int row = lane_ / 4, column = 2 * (lane_ % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int n = 0; n <= r; ++n) {
                const int offset = factor_offset(row + 8 * r, column + 8 * n);
                const float2 l = *reinterpret_cast<const float2*>(stage_.inverse + offset);
                const float2 p = *reinterpret_cast<const float2*>(stage_.p + offset);
                if (n < r || column < row) L[n][2 * r] = l.x, P[n][2 * r] = p.x;
                if (n < r || column + 1 < row) L[n][2 * r + 1] = l.y, P[n][2 * r + 1] = p.y;
            }
        }
        __syncwarp();
    }

 private:
    // Token `index` of the earlier halves of the blocks of 2 size tokens; that of the later ones is `size` further.
    static __device__ __forceinline__ int earlier(int index, int size) { return index + (index & -size); }

    // What the lane needs of 16 channels, of which it takes four neighbours: which channel is where in the product does
    // not matter.
    struct Operands {
        float4 G_i, G_j, G_b;
        uint2 q_i, k_i, k_j;
    };

    // sums: a C tile of k over q of the later halves' tokens times k of the earlier ones'.
    __device__ __forceinline__ void multiply(float (&sums)[2][4], int size) const {
        const int j = earlier(lane_ / 4, size), i = j + size, border = i & -size;
        uint64_t felt = 0;
        if (__any_sync(~0u, stage_.steep[0] >> j & 1)) felt = stage_.felt[0];
        if (__any_sync(~0u, stage_.steep[1] >> j & 1)) felt |= uint64_t(stage_.felt[1]) << 32;
        // Two steps of 16 channels at a time, so that one's loads and exponentials overlap the other's.
#pragma unroll 1
        for (int step = 0; felt; step += 2, felt >>= 16) {
            if (!(felt & 0xffff)) continue;
            const Operands x = load(step, i, j, border), y = load(step + 1, i, j, border);
            multiply(sums[0], x);
            multiply(sums[1], y);
        }
    }

    __device__ __forceinline__ Operands load(int step, int i, int j, int border) const {
        return {decay(i, step),          decay(j, step),          decay(border, step),
                four(input_.q, i, step), four(input_.k, i, step), four(input_.k, j, step)};
    }

    // Factors are rounded before they multiply q and k, in packed numbers: that halves the instructions.
    static __device__ __forceinline__ void multiply(float (&sums)[4], const Operands& x) {
        const float G_i[4] = {x.G_i.x, x.G_i.y, x.G_i.z, x.G_i.w}, G_j[4] = {x.G_j.x, x.G_j.y, x.G_j.z, x.G_j.w},
                    G_b[4] = {x.G_b.x, x.G_b.y, x.G_b.z, x.G_b.w};
        float left[4], right[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            // Moved, so that the right factor becomes zero at 2^-64, and the left one is as much larger.
            const float anchor = G_b[c] - (kExponentRange + kForgotten);
            left[c] = ptx::exp2_approx(G_i[c] - anchor);
            right[c] = is_steep(G_j[c]) ? ptx::exp2_approx(anchor - G_j[c]) : 0.0f;
        }
        const uint32_t left0 = ptx::pack_bf16(left[0], left[1]), left1 = ptx::pack_bf16(left[2], left[3]);
        const uint32_t later[4] = {ptx::multiply_bf16(x.k_i.x, left0), ptx::multiply_bf16(x.q_i.x, left0),
                                   ptx::multiply_bf16(x.k_i.y, left1), ptx::multiply_bf16(x.q_i.y, left1)};
        ptx::mma_m16n8k16(sums, later, ptx::multiply_bf16(x.k_j.x, ptx::pack_bf16(right[0], right[1])),
                          ptx::multiply_bf16(x.k_j.y, ptx::pack_bf16(right[2], right[3])));
    }

    // Sums of tokens of the same block go where L and P have them.
    __device__ __forceinline__ void scatter(const float (&sums)[4], int size) const {
        const int row = lane_ / 4;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = 2 * (lane_ % 4) + e;
            if ((row ^ column) & -size) continue;
            const int offset = factor_offset(earlier(row, size) + size, earlier(column, size));
            *reinterpret_cast<float*>(stage_.inverse + offset) = sums[e];
            *reinterpret_cast<float*>(stage_.p + offset) = sums[2 + e];
        }
    }

    // The lane's four channels of one token and step.
    __device__ __forceinline__ float4 decay(int row, int step) const {
        return *reinterpret_cast<const float4*>(&input_.g[decay_index(row, 4 * (lane_ % 4)) ^ (16 * step)]);
    }

    __device__ __forceinline__ uint2 four(const uint8_t* rows, int row, int step) const {
        return *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 8 * (lane_ % 4) + 32 * step);
    }

    Stage& stage_;
    const Input& input_;
    const int lane_;  // read here: kept from chunk to chunk it would cost a register
};

}  // namespace kda::sm90
