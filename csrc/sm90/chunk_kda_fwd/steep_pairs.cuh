// The part of L and P that the products of decayed operands leave out: pairs of tokens of which the earlier one is
// steep in a channel.
//
//     L_ij += k_i k_j 2^(G_i - G_j)      P_ij += q_i k_j 2^(G_i - G_j)      j < i
//
// The halves of a block of 16 or 8 tokens make a tensor-core product, with b the first token of the later half, of
//
//     2^(G_i - G_b)  2^(G_b - G_j)      j < b <= i
//
// which are at most 1. Pairs of the same block of 4 are another, with b its first token:
//
//     2^(G_i - G_b + A)  2^(G_b - G_j - A)      b <= j < i
//
// in range for G_j - G_b down to -A - 62. Entries further below are far: they are left out again, and multiplied one by
// one where a token of their block may feel them, which takes a slow gate after a steep one.
//
// In each channel a pair is in one of these, which one its earlier token's G decides, and what a token gets depends on
// its past alone. Where nothing is felt across the middle of a block, the right factor is zero, below 2^-64; and in a
// block of 4, a token that feels nothing gets nothing. So what nobody feels can be left out, and that changes no bit.
#pragma once

#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// A of a block of 4, and how far below its first token an entry is far: more than two gates that are felt.
constexpr float kBlockAnchor = 70.0f, kFar = kBlockAnchor + kExponentRange + kForgotten;
static_assert(kFar > 2 - 2 * kForgotten);

// What decides which products the entries of one channel need, a block of 4 tokens at a time. By one more than needed,
// since the products round differently.
class SteepChannel {
 public:
    static constexpr int kRows = 4;

    // G: of the tokens first .. first + 3. A bit for each of them that may feel an earlier one of them that is steep.
    __device__ __forceinline__ uint32_t add(int first, const float (&G)[kRows]) {
        uint32_t felt = 0;
        float lowest = G[0];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (i > 0 && is_steep(lowest) && is_felt(G[i] - lowest)) felt |= 1u << i;
            if (i == kRows - 1) has_far_ |= lowest - G[0] < 1.0f - kFar;  // the last one has no later one
            lowest = fminf(lowest, G[i]);
        }
        if (first % 8) felt_in_halves_ |= is_steep(last_lowest_) && is_felt(G[0] - last_lowest_);
        if (first == 8) felt_across_ = is_steep(lowest_) && is_felt(G[0] - lowest_);
        last_lowest_ = lowest;
        lowest_ = fminf(lowest_, lowest);
        return felt;
    }

    // After all tokens.
    __device__ __forceinline__ bool has_steep() const { return is_steep(lowest_); }
    __device__ __forceinline__ bool has_far() const { return has_far_; }
    // A steep entry of the first half of the chunk, or of the first half of one of its halves, in the other one.
    __device__ __forceinline__ bool felt_across() const { return felt_across_; }
    __device__ __forceinline__ bool felt_in_halves() const { return felt_in_halves_; }

 private:
    static __device__ __forceinline__ bool is_felt(float decay) { return !(decay <= kForgotten - 1.0f); }

    float lowest_ = INFINITY, last_lowest_;  // of all tokens, of the last block
    bool has_far_ = false, felt_across_ = false, felt_in_halves_ = false;
};

// Scalers find the sums across the middle of blocks, each for its half of K; builders find the others, and gather all.
class SteepPairs {
 public:
    __device__ __forceinline__ SteepPairs(const Stage& stage, const Input& input)
        : stage_(stage), input_(input), lane_(ptx::lane_id()) {}

    // A scaler's part for one half of K, with G in its place: `felt`, tokens that may feel a steep one of their block
    // of 4 in one of the lane's two channels. Whether any entry is steep.
    __device__ __forceinline__ bool prepare(int half, uint32_t felt, const SteepChannel (&channels)[2]) const {
        const uint32_t steep = __ballot_sync(~0u, channels[0].has_steep() | channels[1].has_steep());
        const uint32_t across = __ballot_sync(~0u, channels[0].felt_across() | channels[1].felt_across());
        const uint32_t in_halves = __ballot_sync(~0u, channels[0].felt_in_halves() | channels[1].felt_in_halves());
        felt = __reduce_or_sync(~0u, felt);
        if (__any_sync(~0u, channels[0].has_far() | channels[1].has_far())) felt |= kHasFar;
        if (across) felt |= kAcross;
        if (in_halves) felt |= kInHalves;
        if (lane_ == 0) stage_.factors.steep[half] = steep, stage_.factors.felt[half] = felt;
        __syncwarp();
#pragma unroll 1
        for (int size = 8; size >= 4; size /= 2) {
            const uint32_t felt_pairs = size == 8 ? across : in_halves;
            if (!felt_pairs) continue;
            const float4 sums = multiply_halves(size, half, felt_pairs);
            if (size == 8)
                sums_across(half)[lane_] = sums;
            else if (lane_ / 16 == lane_ / 2 % 2)  // of the same block of 8
                sums_in_halves(half)[lane_ / 4 * 2 + lane_ % 2] = sums;
        }
        return steep;
    }

    // A builder's: adds all to L and P, C tiles (mma.cuh) of columns 0..7 and 8..15.
    __device__ __forceinline__ void find(float (&L)[2][4], float (&P)[2][4]) const {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (stage_.factors.felt[half] & kAcross) {
                const float4 x = sums_across(half)[lane_];
                L[0][2] += x.x, L[0][3] += x.y, P[0][2] += x.z, P[0][3] += x.w;
            }
            // Later tokens' rows, earlier tokens' columns.
            if (stage_.factors.felt[half] & kInHalves && lane_ >= 16 && lane_ % 4 < 2) {
                const float4* sums = sums_in_halves(half) + lane_ / 4 * 2 + lane_ % 4;
                const float4 x = sums[-8], y = sums[0];
                L[0][0] += x.x, L[0][1] += x.y, P[0][0] += x.z, P[0][1] += x.w;
                L[1][2] += y.x, L[1][3] += y.y, P[1][2] += y.z, P[1][3] += y.w;
            }
        }
        const uint32_t felt = stage_.factors.felt[0] | stage_.factors.felt[1];
        if (!(felt & kTokens)) return;
        if (__builtin_expect(felt & kHasFar, false)) {
            add_blocks<true>(L, P, felt);
            add_far(L, P);
        } else {
            add_blocks<false>(L, P, felt);
        }
    }

 private:
    // Of the stage's `felt`, by half of K: a bit for each token that may feel a steep one of its block of 4, and
    static constexpr uint32_t kTokens = (1u << kChunk) - 1;
    static constexpr uint32_t kAcross = 1u << kChunk;    // that there are sums of the halves of the chunk
    static constexpr uint32_t kInHalves = 2u << kChunk;  // and of the halves of these
    static constexpr uint32_t kHasFar = 4u << kChunk;    // that some entries are far

    // Between scaler and builder, of one half of K, in the places of P and the inverse: each lane's entries of the C
    // tile of sums of the halves of the chunk; and of those of its halves, where tokens are of the same.
    __device__ __forceinline__ float4* sums_across(int half) const {
        return reinterpret_cast<float4*>(half ? stage_.factors.p : stage_.factors.inverse);
    }
    __device__ __forceinline__ float4* sums_in_halves(int half) const { return sums_across(half) + 32; }
    static_assert(sizeof(Factor) >= (32 + 16) * sizeof(float4));

    static __device__ __forceinline__ float4 add(const float (&sums)[2][4]) {
        return make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                           sums[0][3] + sums[1][3]);
    }

    // What the lane needs of 16 channels, of which it takes four neighbours: which channel is where in the product does
    // not matter.
    struct Operands {
        float4 G_i, G_j, G_border;
        uint2 q_i, k_i, k_j;
    };

    // A C tile of k over q of the later halves' tokens times k of the earlier ones', for blocks of 2 size tokens and
    // one half of K.
    __device__ __forceinline__ float4 multiply_halves(int size, int half, uint32_t channels) const {
        const int index = lane_ >> 2, j = index + (index & -size), i = j + size;
        const uint32_t G_i = decay_address(i), G_j = decay_address(j), G_border = decay_address(i & -size);
        float sums[2][4] = {};  // of even and odd steps, so that neither waits for the other
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
                        ptx::load_shared_float4(G_border ^ there),
                        four(input_.q, i, step + n),
                        four(input_.k, i, step + n),
                        four(input_.k, j, step + n)};
            }
            multiply_halves(sums[0], x[0]);
            multiply_halves(sums[1], x[1]);
        }
        return add(sums);
    }

    static __device__ __forceinline__ void multiply_halves(float (&sums)[4], const Operands& x) {
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
        multiply(sums, x.q_i, x.k_i, x.k_j, left, right);
    }

    // Factors are rounded before they multiply q and k, in packed numbers: that halves the instructions.
    static __device__ __forceinline__ void multiply(float (&sums)[4], const uint2& q_i, const uint2& k_i,
                                                    const uint2& k_j, const float (&left)[4], const float (&right)[4]) {
        const uint32_t left0 = ptx::pack_bf16(left[0], left[1]), left1 = ptx::pack_bf16(left[2], left[3]);
        const uint32_t later[4] = {ptx::multiply_bf16(k_i.x, left0), ptx::multiply_bf16(q_i.x, left0),
                                   ptx::multiply_bf16(k_i.y, left1), ptx::multiply_bf16(q_i.y, left1)};
        ptx::mma_m16n8k16(sums, later, ptx::multiply_bf16(k_j.x, ptx::pack_bf16(right[0], right[1])),
                          ptx::multiply_bf16(k_j.y, ptx::pack_bf16(right[2], right[3])));
    }

    // Pairs of the same block of 4, eight tokens at a time.
    template <bool kHasFar>
    __device__ __forceinline__ void add_blocks(float (&L)[2][4], float (&P)[2][4], uint32_t felt) const {
#pragma unroll 1
        for (int first = 0; first < kChunk; first += 8) {
            const uint32_t tokens = felt >> first & 0xff;
            if (!tokens) continue;
            float4 sums = multiply_blocks<kHasFar>(first);
            const bool same = lane_ / 16 == lane_ / 2 % 2;
            if (!(same && tokens >> (lane_ >> 2) & 1)) sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first == 0)
                L[0][0] += sums.x, L[0][1] += sums.y, P[0][0] += sums.z, P[0][1] += sums.w;
            else
                L[1][2] += sums.x, L[1][3] += sums.y, P[1][2] += sums.z, P[1][3] += sums.w;
        }
    }

    struct BlockOperands {
        float4 G, start;
        uint2 q, k;
    };

    // A C tile of k over q of eight tokens times k of the same, good for those of the same block.
    template <bool kHasFar>
    __device__ __forceinline__ float4 multiply_blocks(int first) const {
        const int token = first + (lane_ >> 2);
        const uint32_t G = decay_address(token), start = decay_address(token & -SteepChannel::kRows);
        float sums[2][4] = {};
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            uint32_t channels = stage_.factors.steep[half];
#pragma unroll 1
            for (int step = 4 * half; channels; step += 2, channels >>= 16) {
                if (!(channels & 0xffff)) continue;
                BlockOperands x[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const uint32_t there = 16 * (step + n) * sizeof(float);
                    x[n] = {ptx::load_shared_float4(G ^ there), ptx::load_shared_float4(start ^ there),
                            four(input_.q, token, step + n), four(input_.k, token, step + n)};
                }
                multiply_blocks<kHasFar>(sums[0], x[0]);
                multiply_blocks<kHasFar>(sums[1], x[1]);
            }
        }
        return add(sums);
    }

    template <bool kHasFar>
    static __device__ __forceinline__ void multiply_blocks(float (&sums)[4], const BlockOperands& x) {
        const float G[4] = {x.G.x, x.G.y, x.G.z, x.G.w}, start[4] = {x.start.x, x.start.y, x.start.z, x.start.w};
        float left[4], right[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float exponent = in_block(G[c], start[c]);
            left[c] = ptx::exp2_approx(exponent);
            right[c] = steepness(G[c]) * ptx::exp2_approx(-exponent);
            if (kHasFar && is_far(exponent)) right[c] = 0.0f;
        }
        multiply(sums, x.q, x.k, x.k, left, right);
    }

    // Of an entry, from its block's first token on, plus kBlockAnchor. The same wherever it decides.
    static __device__ __forceinline__ float in_block(float G, float start) { return G - (start - kBlockAnchor); }
    static __device__ __forceinline__ bool is_far(float in_block) { return !(in_block >= kBlockAnchor - kFar); }

    // Pairs of the same block whose earlier token is far, and so none of the first of a block.
    __device__ __forceinline__ void add_far(float (&L)[2][4], float (&P)[2][4]) const {
#pragma unroll 1
        for (int first = 0; first < kChunk; first += SteepChannel::kRows) {
            add_far_pair(L, P, first, 1, 2);
            add_far_pair(L, P, first, 1, 3);
            add_far_pair(L, P, first, 2, 3);
        }
    }

    // Tokens first + j and first + i, four channels a lane.
    __device__ __forceinline__ void add_far_pair(float (&L)[2][4], float (&P)[2][4], int first, int j, int i) const {
        float l = 0.0f, p = 0.0f;
        if (stage_.factors.steep[lane_ / 16]) {
            const float4 G_i = decays_of(first + i), G_j = decays_of(first + j), start = decays_of(first);
            const uint2 q_i = row_of(input_.q, first + i), k_i = row_of(input_.k, first + i),
                        k_j = row_of(input_.k, first + j);
            add_far_channel(l, p, G_i.x, G_j.x, start.x, ptx::bf16_low(q_i.x), ptx::bf16_low(k_i.x),
                            ptx::bf16_low(k_j.x));
            add_far_channel(l, p, G_i.y, G_j.y, start.y, ptx::bf16_high(q_i.x), ptx::bf16_high(k_i.x),
                            ptx::bf16_high(k_j.x));
            add_far_channel(l, p, G_i.z, G_j.z, start.z, ptx::bf16_low(q_i.y), ptx::bf16_low(k_i.y),
                            ptx::bf16_low(k_j.y));
            add_far_channel(l, p, G_i.w, G_j.w, start.w, ptx::bf16_high(q_i.y), ptx::bf16_high(k_i.y),
                            ptx::bf16_high(k_j.y));
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            l += __shfl_xor_sync(~0u, l, mask);
            p += __shfl_xor_sync(~0u, p, mask);
        }
        const int row = first % 8 + i, column = first % 8 + j;
        if (lane_ != 4 * row + column / 2) return;
        if (first < 8)
            L[0][j % 2] += l, P[0][j % 2] += p;
        else
            L[1][2 + j % 2] += l, P[1][2 + j % 2] += p;
    }

    static __device__ __forceinline__ void add_far_channel(float& l, float& p, float G_i, float G_j, float start,
                                                           float q_i, float k_i, float k_j) {
        const float decay = G_i - G_j;
        const bool counts = is_steep(G_j) && is_far(in_block(G_j, start)) && !(decay < kForgotten);
        const float k = counts ? k_j * ptx::exp2_approx(decay) : 0.0f;
        l += k_i * k;
        p += q_i * k;
    }

    __device__ __forceinline__ float4 decays_of(int row) const {
        return *reinterpret_cast<const float4*>(&input_.g[decay_index(row, 4 * lane_)]);
    }
    __device__ __forceinline__ uint2 row_of(const uint8_t* rows, int row) const {
        return *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 8 * lane_);
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
