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
#include "ptx/shared.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// Scalers find the sums of the largest blocks, each for its half of K; builders find the others, and gather all.
class SteepPairs {
 public:
    __device__ __forceinline__ SteepPairs(Stage& stage, const Input& input)
        : stage_(stage), input_(input), lane_(ptx::lane_id()) {}

    // Of the largest blocks and one half of K, of which `steep` and `felt` are what the stage will say.
    __device__ __forceinline__ void find_first(int half, uint32_t steep, uint32_t felt) const {
        if (!(felt && steep & kFirstEarlier)) return;
        float sums[2][4] = {};
        multiply(sums, Rows(*this, kFirst), half, felt);
        first_sums(half)[lane_] = add(sums);
    }

    // Sets L and P, C tiles (mma.cuh) of columns 0..7 and 8..15, to the sums of all pairs. The places of P and the
    // inverse in the stage hold them in between.
    __device__ __forceinline__ void find(float (&L)[2][4], float (&P)[2][4]) const {
        if (!(stage_.felt[0] | stage_.felt[1])) return;
        float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!(stage_.felt[half] && stage_.steep[half] & kFirstEarlier)) continue;
            const float4 x = first_sums(half)[lane_];
            first.x += x.x, first.y += x.y, first.z += x.z, first.w += x.w;
        }
        __syncwarp();
        scatter(first, kFirst);
#pragma unroll 1
        for (int size = kFirst / 2; size > 0; size /= 2) {
            float sums[2][4] = {};  // of even and odd steps, so that neither waits for the other
            const Rows rows(*this, size);
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                if (__any_sync(~0u, stage_.steep[half] >> rows.j & 1)) multiply(sums, rows, half, stage_.felt[half]);
            }
            scatter(add(sums), size);
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
    static constexpr int kFirst = kChunk / 2;
    static constexpr uint32_t kFirstEarlier = (1u << kFirst) - 1;  // earlier tokens of the largest blocks

    // Token `index` of the earlier halves of the blocks of 2 size tokens; that of the later ones is `size` further.
    static __device__ __forceinline__ int earlier(int index, int size) { return index + (index & -size); }

    // Of one half of K, between scaler and builder: each lane's entries of the C tile of sums.
    __device__ __forceinline__ float4* first_sums(int half) const {
        return reinterpret_cast<float4*>(half ? stage_.p : stage_.inverse);
    }

    static __device__ __forceinline__ float4 add(const float (&sums)[2][4]) {
        return make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                           sums[0][3] + sums[1][3]);
    }

    // The lane's tokens of the blocks of one size, and where their rows are; the addresses of G's are to be changed by
    // XOR.
    struct Rows {
        int j, i;
        uint32_t G_i, G_j, G_border;

        __device__ __forceinline__ Rows(const SteepPairs& pairs, int size)
            : j(earlier(pairs.lane_ >> 2, size)),
              i(j + size),
              G_i(pairs.decay_address(i)),
              G_j(pairs.decay_address(j)),
              G_border(pairs.decay_address(i & -size)) {}
    };

    // What the lane needs of 16 channels, of which it takes four neighbours: which channel is where in the product does
    // not matter.
    struct Operands {
        float4 G_i, G_j, G_border;
        uint2 q_i, k_i, k_j;
    };

    // sums: two C tiles of k over q of the later halves' tokens times k of the earlier ones', to be added. Over one
    // half of K.
    __device__ __forceinline__ void multiply(float (&sums)[2][4], const Rows& rows, int half, uint32_t felt) const {
        // Two steps of 16 channels at a time, so that one's loads and exponentials overlap the other's.
#pragma unroll 1
        for (int step = 4 * half; felt; step += 2, felt >>= 16) {
            if (!(felt & 0xffff)) continue;
            const Operands x = load(step, rows), y = load(step + 1, rows);
            multiply(sums[0], x);
            multiply(sums[1], y);
        }
    }

    __device__ __forceinline__ Operands load(int step, const Rows& rows) const {
        const uint32_t there = 16 * step * sizeof(float);
        return {ptx::load_shared_float4(rows.G_i ^ there),
                ptx::load_shared_float4(rows.G_j ^ there),
                ptx::load_shared_float4(rows.G_border ^ there),
                four(input_.q, rows.i, step),
                four(input_.k, rows.i, step),
                four(input_.k, rows.j, step)};
    }

    // Factors are rounded before they multiply q and k, in packed numbers: that halves the instructions.
    static __device__ __forceinline__ void multiply(float (&sums)[4], const Operands& x) {
        const float G_i[4] = {x.G_i.x, x.G_i.y, x.G_i.z, x.G_i.w}, G_j[4] = {x.G_j.x, x.G_j.y, x.G_j.z, x.G_j.w},
                    border[4] = {x.G_border.x, x.G_border.y, x.G_border.z, x.G_border.w};
        float left[4], right[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            // Moved, so that the right factor becomes zero at 2^-64, and the left one is as much larger.
            const float anchor = border[c] - (kExponentRange + kForgotten);
            left[c] = ptx::exp2_approx(G_i[c] - anchor);
            right[c] = steepness(G_j[c]) * ptx::exp2_approx(anchor - G_j[c]);
        }
        const uint32_t left0 = ptx::pack_bf16(left[0], left[1]), left1 = ptx::pack_bf16(left[2], left[3]);
        const uint32_t later[4] = {ptx::multiply_bf16(x.k_i.x, left0), ptx::multiply_bf16(x.q_i.x, left0),
                                   ptx::multiply_bf16(x.k_i.y, left1), ptx::multiply_bf16(x.q_i.y, left1)};
        ptx::mma_m16n8k16(sums, later, ptx::multiply_bf16(x.k_j.x, ptx::pack_bf16(right[0], right[1])),
                          ptx::multiply_bf16(x.k_j.y, ptx::pack_bf16(right[2], right[3])));
    }

    // Sums of tokens of the same block go where L and P have them.
    __device__ __forceinline__ void scatter(const float4& sums, int size) const {
        const int row = lane_ >> 2;
        scatter(sums.x, sums.z, row, 2 * (lane_ & 3), size);
        scatter(sums.y, sums.w, row, 2 * (lane_ & 3) + 1, size);
    }

    __device__ __forceinline__ void scatter(float l, float p, int row, int column, int size) const {
        if ((row ^ column) & -size) return;
        const int offset = factor_offset(earlier(row, size) + size, earlier(column, size));
        *reinterpret_cast<float*>(stage_.inverse + offset) = l;
        *reinterpret_cast<float*>(stage_.p + offset) = p;
    }

    // Of the lane's four channels of a token.
    __device__ __forceinline__ uint32_t decay_address(int row) const {
        return ptx::shared_address(&input_.g[decay_index(row, 4 * (lane_ & 3))]);
    }

    __device__ __forceinline__ uint2 four(const uint8_t* rows, int row, int step) const {
        return *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 8 * (lane_ & 3) + 32 * step);
    }

    Stage& stage_;
    const Input& input_;
    const int lane_;  // read here: kept from chunk to chunk it would cost a register
};

}  // namespace kda::sm90
