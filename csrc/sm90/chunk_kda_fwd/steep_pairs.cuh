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
// are at most 1; in blocks of 2 the left one is 1. Each pair of tokens is in one of these products, and what a token
// gets depends on its past alone. The right factor is zero below 2^-64, where L and P do not feel it: so products of
// nothing but such can be left out, and that changes no bit.
#pragma once

#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// In which blocks' later halves the steep entries of one channel may be felt.
class SteepChannel {
 public:
    static constexpr int kRows = 4;

    // G: of the tokens first .. first + 3.
    __device__ __forceinline__ void add(int first, const float (&G)[kRows]) {
        const float two = fminf(G[0], G[1]), four = fminf(two, fminf(G[2], G[3]));
        note(1, G[0], G[1]);
        note(1, G[2], G[3]);
        note(2, two, G[2]);
        if (first % 8) note(4, last_, G[0]);
        if (first == 8) note(8, lowest_, G[0]);
        last_ = four;
        lowest_ = fminf(lowest_, four);
    }

    // After all tokens. `felt`: half the sizes of the blocks, added.
    __device__ __forceinline__ uint32_t felt() const { return felt_; }
    __device__ __forceinline__ bool has_steep() const { return is_steep(lowest_); }

 private:
    // The lowest of an earlier half, and the first of the later one. By one more than needed, since the products round
    // differently.
    __device__ __forceinline__ void note(uint32_t size, float lowest, float border) {
        if (is_steep(lowest) && !(border - lowest <= kForgotten - 1.0f)) felt_ |= size;
    }

    float lowest_ = INFINITY, last_;  // of all tokens, and of the last four
    uint32_t felt_ = 0;
};

// Scalers find the sums of blocks of 16 and 8, each for its half of K; builders find the others, and gather all.
class SteepPairs {
 public:
    __device__ __forceinline__ SteepPairs(const Stage& stage, const Input& input)
        : stage_(stage), input_(input), lane_(ptx::lane_id()) {}

    // A scaler's part for one half of K, with G in its place, by the lane's two channels. Whether any entry is steep.
    __device__ __forceinline__ bool prepare(int half, const SteepChannel (&channels)[2]) const {
        const uint32_t felt = channels[0].felt() | channels[1].felt();
        const uint32_t steep = __ballot_sync(~0u, channels[0].has_steep() | channels[1].has_steep());
        const uint32_t eight = __ballot_sync(~0u, felt & 8), four = __ballot_sync(~0u, felt & 4);
        const uint32_t all = __reduce_or_sync(~0u, felt);
        if (lane_ == 0) stage_.factors.steep[half] = steep, stage_.factors.felt[half] = all;
        __syncwarp();
#pragma unroll 1
        for (int size = 8; size >= 4; size /= 2) {
            const uint32_t felt_pairs = size == 8 ? eight : four;
            if (!felt_pairs) continue;
            float sums[2][4] = {};
            multiply<false>(sums, size, half, felt_pairs);
            if (size == 8)
                sums_of_16(half)[lane_] = add(sums);
            else if (lane_ / 16 == lane_ / 2 % 2)  // of the same block
                sums_of_8(half)[lane_ / 4 * 2 + lane_ % 2] = add(sums);
        }
        return steep;
    }

    // A builder's: adds all to L and P, C tiles (mma.cuh) of columns 0..7 and 8..15.
    __device__ __forceinline__ void find(float (&L)[2][4], float (&P)[2][4]) const {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const uint32_t felt = stage_.factors.felt[half];
            if (felt & 8) {
                const float4 x = sums_of_16(half)[lane_];
                L[0][2] += x.x, L[0][3] += x.y, P[0][2] += x.z, P[0][3] += x.w;
            }
            // Later tokens' rows, earlier tokens' columns.
            if (felt & 4 && lane_ >= 16 && lane_ % 4 < 2) {
                const float4* sums = sums_of_8(half) + lane_ / 4 * 2 + lane_ % 4;
                add(L, P, sums[-8], sums[0]);
            }
        }
        const uint32_t felt = stage_.factors.felt[0] | stage_.factors.felt[1];
        if (felt & 2) add_blocks_of_4(L, P);
        if (felt & 1) add_blocks_of_2(L, P);
    }

 private:
    // Between scaler and builder, of one half of K, in the places of P and the inverse: each lane's entries of the C
    // tile of sums, where tokens are of the same block.
    __device__ __forceinline__ float4* sums_of_16(int half) const {
        return reinterpret_cast<float4*>(half ? stage_.factors.p : stage_.factors.inverse);
    }
    __device__ __forceinline__ float4* sums_of_8(int half) const { return sums_of_16(half) + 32; }
    static_assert(sizeof(Factor) >= (32 + 16) * sizeof(float4));

    static __device__ __forceinline__ float4 add(const float (&sums)[2][4]) {
        return make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                           sums[0][3] + sums[1][3]);
    }

    // To the diagonal tiles of L and P: entries of tokens 0..7, and of 8..15.
    static __device__ __forceinline__ void add(float (&L)[2][4], float (&P)[2][4], const float4& x, const float4& y) {
        L[0][0] += x.x, L[0][1] += x.y, P[0][0] += x.z, P[0][1] += x.w;
        L[1][2] += y.x, L[1][3] += y.y, P[1][2] += y.z, P[1][3] += y.w;
    }

    // Rows r of the C tile are tokens 4 (r / 2) + 2 + r % 2, columns c are 4 (c / 2) + c % 2.
    __device__ __forceinline__ void add_blocks_of_4(float (&L)[2][4], float (&P)[2][4]) const {
        float sums[2][4] = {};
        multiply_steep<false>(sums, 2);
        const int row = lane_ >> 2, block = row >> 2, from = 9 * block + 4 * (row & 1);
        const float4 own = add(sums), x = shuffle(own, from), y = shuffle(own, from + 18);
        if (row & 2 && (lane_ & 3) == 2 * block) add(L, P, x, y);
    }

    // Rows r are tokens 2 r + 1, columns c are 2 c.
    __device__ __forceinline__ void add_blocks_of_2(float (&L)[2][4], float (&P)[2][4]) const {
        float sums[2][4] = {};
        multiply_steep<true>(sums, 1);
        const float4 own = add(sums);
        const int row = lane_ >> 2, pair = row >> 1, from = 4 * pair + (pair >> 1);
        const float l = row & 1 ? own.y : own.x, p = row & 1 ? own.w : own.z;
        const float4 x = make_float4(__shfl_sync(~0u, l, from), 0.0f, __shfl_sync(~0u, p, from), 0.0f),
                     y = make_float4(__shfl_sync(~0u, l, from + 18), 0.0f, __shfl_sync(~0u, p, from + 18), 0.0f);
        if (row & 1 && (lane_ & 3) == pair) add(L, P, x, y);
    }

    static __device__ __forceinline__ float4 shuffle(const float4& x, int from) {
        return make_float4(__shfl_sync(~0u, x.x, from), __shfl_sync(~0u, x.y, from), __shfl_sync(~0u, x.z, from),
                           __shfl_sync(~0u, x.w, from));
    }

    // Over both halves of K.
    template <bool kNeighbours>
    __device__ __forceinline__ void multiply_steep(float (&sums)[2][4], int size) const {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) multiply<kNeighbours>(sums, size, half, stage_.factors.steep[half]);
        if constexpr (kNeighbours) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] *= kRaised, sums[1][i] *= kRaised;
        }
    }

    // What the lane needs of 16 channels, of which it takes four neighbours: which channel is where in the product does
    // not matter.
    struct Operands {
        float4 G_i, G_j, G_border;
        uint2 q_i, k_i, k_j;
    };

    // sums: two C tiles of k over q of the later halves' tokens times k of the earlier ones', to be added, for blocks
    // of 2 size tokens. Over one half of K. kNeighbours: size is 1, and the sums are 2^-62 of what they should be.
    template <bool kNeighbours>
    __device__ __forceinline__ void multiply(float (&sums)[2][4], int size, int half, uint32_t channels) const {
        const int index = lane_ >> 2, j = index + (index & -size), i = j + size;
        const uint32_t G_i = decay_address(i), G_j = decay_address(j), G_border = decay_address(i & -size);
        // Two steps of 16 channels at a time, so that one's loads and exponentials overlap the other's.
#pragma unroll 1
        for (int step = 4 * half; channels; step += 2, channels >>= 16) {
            if (!(channels & 0xffff)) continue;
            Operands x[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint32_t there = 16 * (step + n) * sizeof(float);
                x[n] = {ptx::load_shared_float4(G_i ^ there),
                        ptx::load_shared_float4(G_j ^ there),
                        kNeighbours ? float4{} : ptx::load_shared_float4(G_border ^ there),
                        four(input_.q, i, step + n),
                        four(input_.k, i, step + n),
                        four(input_.k, j, step + n)};
            }
            multiply<kNeighbours>(sums[0], x[0]);
            multiply<kNeighbours>(sums[1], x[1]);
        }
    }

    // Factors are rounded before they multiply q and k, in packed numbers: that halves the instructions.
    template <bool kNeighbours>
    static __device__ __forceinline__ void multiply(float (&sums)[4], const Operands& x) {
        const float4 border = kNeighbours ? x.G_i : x.G_border;
        // Moved, so that the right factor becomes zero at 2^-64, and the left one is as much larger.
        const float4 anchor = make_float4(border.x - kRaise, border.y - kRaise, border.z - kRaise, border.w - kRaise);
        uint32_t later[4] = {x.k_i.x, x.q_i.x, x.k_i.y, x.q_i.y};
        if constexpr (!kNeighbours) {
            const uint32_t left0 = ptx::pack_bf16(ptx::exp2_approx(x.G_i.x - anchor.x),
                                                  ptx::exp2_approx(x.G_i.y - anchor.y)),
                           left1 = ptx::pack_bf16(ptx::exp2_approx(x.G_i.z - anchor.z),
                                                  ptx::exp2_approx(x.G_i.w - anchor.w));
            later[0] = ptx::multiply_bf16(later[0], left0), later[1] = ptx::multiply_bf16(later[1], left0);
            later[2] = ptx::multiply_bf16(later[2], left1), later[3] = ptx::multiply_bf16(later[3], left1);
        }
        const uint32_t right0 = ptx::pack_bf16(right(x.G_j.x, anchor.x), right(x.G_j.y, anchor.y)),
                       right1 = ptx::pack_bf16(right(x.G_j.z, anchor.z), right(x.G_j.w, anchor.w));
        ptx::mma_m16n8k16(sums, later, ptx::multiply_bf16(x.k_j.x, right0), ptx::multiply_bf16(x.k_j.y, right1));
    }
    static constexpr float kRaise = kExponentRange + kForgotten, kRaised = 4611686018427387904.0f;  // 2^62
    static_assert(kRaise == 62.0f);

    static __device__ __forceinline__ float right(float G_j, float anchor) {
        return steepness(G_j) * ptx::exp2_approx(anchor - G_j);
    }

    // Of the lane's four channels of a token.
    __device__ __forceinline__ uint32_t decay_address(int row) const {
        return ptx::shared_address(&input_.g[decay_index(row, 4 * (lane_ & 3))]);
    }

    __device__ __forceinline__ uint2 four(const uint8_t* rows, int row, int step) const {
        return *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 8 * (lane_ & 3) + 32 * step);
    }

    const Stage& stage_;
    const Input& input_;
    const int lane_;  // read here: kept from chunk to chunk it would cost a register
};

}  // namespace kda::sm90
