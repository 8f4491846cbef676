// The part of L and P that the products of decayed operands leave out: pairs of tokens of which either is steep in a
// channel.
//
//     L_ij += k_i k_j 2^(G_i - G_j)      P_ij += q_i k_j 2^(G_i - G_j)
//
// one by one in fp32, where 2^(G_i - G_j) <= 1 cannot overflow. Pairs between which everything is forgotten are left
// out, each by itself: were that decided for several at once, a later token could bring an earlier pair back.
#pragma once

#include "ptx/math.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

class SteepPairs {
 public:
    __device__ __forceinline__ SteepPairs(const Stage& stage, const Input& input)
        : stage_(stage), input_(input), lane_(ptx::lane_id()), row_(lane_ / 4), column_(2 * (lane_ % 4)) {}

    // L and P as C tiles (mma.cuh) of columns 0..7 and 8..15. Sums with j > i are meaningless.
    __device__ __forceinline__ void add(float (&L)[2][4], float (&P)[2][4]) const {
        for (int half = 0; half < 2; ++half) {
            const uint32_t pairs = stage_.felt[half];
            // Four channels at a time, so that loads and exponentials overlap.
            for (uint32_t fours = (pairs | pairs >> 1) & 0x55555555u; fours; fours &= fours - 1) {
                add_channels(L, P, 64 * half + 2 * (__ffs(fours) - 1));
            }
        }
    }

 private:
    __device__ __forceinline__ void add_channels(float (&L)[2][4], float (&P)[2][4], int channel) const {
        float G_i[2][4], k_i[2][4], q_i[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            load_decay(G_i[r], row_ + 8 * r, channel);
            load_four(k_i[r], input_.k, row_ + 8 * r, channel);
            load_four(q_i[r], input_.q, row_ + 8 * r, channel);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = column_ + 8 * (e / 2) + e % 2;
            float G_j[4], k_j[4];
            load_decay(G_j, j, channel);
            load_four(k_j, input_.k, j, channel);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
#pragma unroll
                for (int r = e / 2; r < 2; ++r) {  // nothing of the upper right tile
                    const float decay = G_i[r][c] - G_j[c], decayed = k_j[c] * ptx::exp2_approx(decay);
                    // True for NaN.
                    if ((is_steep(G_i[r][c]) | is_steep(G_j[c])) & !(decay <= kForgotten)) {
                        L[e / 2][2 * r + e % 2] += k_i[r][c] * decayed;
                        P[e / 2][2 * r + e % 2] += q_i[r][c] * decayed;
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void load_decay(float (&G)[4], int row, int channel) const {
        const float4 decay = *reinterpret_cast<const float4*>(&input_.g[decay_index(row, channel)]);
        G[0] = decay.x, G[1] = decay.y, G[2] = decay.z, G[3] = decay.w;
    }

    static __device__ __forceinline__ void load_four(float (&x)[4], const uint8_t* rows, int row, int channel) {
        const uint2 packed = *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 2 * channel);
        x[0] = ptx::bf16_low(packed.x), x[1] = ptx::bf16_high(packed.x);
        x[2] = ptx::bf16_low(packed.y), x[3] = ptx::bf16_high(packed.y);
    }

    const Stage& stage_;
    const Input& input_;
    const int lane_, row_, column_;  // read here: kept from chunk to chunk they would cost registers
};

}  // namespace kda::sm90
