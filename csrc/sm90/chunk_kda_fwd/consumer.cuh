// Consumer warpgroup: the recurrence over chunks for 64 columns of V, with the state in wgmma accumulators.
//
//     U' = inverse' (V - Kd S / |k|)      O = scale/|q| Qd S + P' U'      S <- diag(gamma) (S + Ki^T U')
//
// with Kd = k 2^G, Qd = q 2^G, Ki = k 2^-G of raw q and k, U' = U / |k|, and the builders' inverse' and P' which hold
// the other norms and beta. S^T (64 x 128 fp32, as 2^-A S^T) is two accumulators, one for each half of K. Rounded to
// bf16 it is the A operand of S^T [Kd; Qd]^T, and U'^T that of the update and of U'^T P'^T: nothing is exchanged
// between lanes. V - Kd S and the inverse enter their product in tf32, U' and P' theirs as two bf16 terms each. A half
// of K with steep entries is decayed before its update, by k 2^(G_last - G), instead of after it.
#pragma once

#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

class Consumer {
 public:
    // `warp`: of the eight that share V, 16 columns each.
    __device__ __forceinline__ Consumer(const ChunkKdaFwdParams& params, const Segment& segment, const Work& work,
                                        SharedMemory& smem, int warp)
        : params_(params),
          segment_(segment),
          work_(work),
          smem_(smem),
          lane_(threadIdx.x % 32),
          warp_(warp),
          values_(row_address(params.v, work, lane_ / 2, work.v_head) + 32 * warp + 16 * (lane_ % 2)),
          output_(static_cast<__nv_bfloat16*>(params.o) +
                  ((work.output_row + lane_ / 2) * params.num_v_heads + work.v_head) * kHeadDim + 16 * warp +
                  8 * (lane_ % 2)) {}

    __device__ __forceinline__ void run() {
        for (int chunk = 0; chunk < kValues - 1; ++chunk) load_values(chunk, chunk);
        load_state();
        int slot = 0, stage = 0, stage_parity = 0;
        for (int chunk = 0; chunk < work_.steps; ++chunk) {
            load_values(chunk + kValues - 1, slot == 0 ? kValues - 1 : slot - 1);
            advance(chunk, slot, stage, stage_parity);
            if (++slot == kValues) slot = 0;
            if (++stage == kStages) stage = 0, stage_parity ^= 1;
        }
        ptx::cp_async_wait<0>();
        store_state();
    }

 private:
    // Row of the state's V, column of its K, of register i of half h.
    __device__ __forceinline__ int value_of(int i) const { return 16 * warp_ + lane_ / 4 + 8 * (i / 2 % 2); }
    __device__ __forceinline__ int key_of(int h, int i) const { return 64 * h + 8 * (i / 4) + 2 * (lane_ % 4) + i % 2; }

    // The caller's states at a sequence's ends, the maps' states between segments, and for M the identity.
    __device__ __forceinline__ void load_state() {
        const bool inner = segment_.index > 0;
        const float* source = inner ? nullptr : params_.initial_state;
        if (source) source += work_.state * kHeadDim * kHeadDim;
        if (inner && params_.pass == Pass::kReplay) {
            source = segment_map(params_, segment_.sequence, segment_.index - 1, segment_.v_head, 1);
        }
        // A loop for each case, so that its loads are under way together.
        const bool v_first = inner || params_.state_v_first;
        if (source && v_first) {
            for_pairs([&](int value, int key, float& x, float& y) {
                const float2 pair = *reinterpret_cast<const float2*>(source + value * kHeadDim + key);
                x = pair.x, y = pair.y;
            });
        } else if (source) {
            for_pairs([&](int value, int key, float& x, float& y) {
                x = source[key * kHeadDim + value], y = source[(key + 1) * kHeadDim + value];
            });
        } else {
            const float diagonal = segment_.is_map ? 1.0f : 0.0f;
            for_pairs([&](int value, int key, float& x, float& y) {
                x = value == key ? diagonal : 0.0f, y = value == key + 1 ? diagonal : 0.0f;
            });
        }
        for_pairs([&](int, int, float& x, float& y) { x *= kAnchorInverse, y *= kAnchorInverse; });
    }

    // Calls f(column of V, column of K, state there, state at the next column of K) for all pairs that the lane holds.
    template <typename F>
    __device__ __forceinline__ void for_pairs(const F& f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 32; i += 2) f(value_of(i), key_of(h, i), state_[h][i], state_[h][i + 1]);
        }
    }

    __device__ __forceinline__ void store_state() {
        const bool inner = params_.pass != Pass::kWhole && segment_.index < params_.segments - 1;
        if (inner && params_.pass == Pass::kReplay) return;  // known from the maps
        float* target = params_.final_state;
        if (target) target += work_.state * kHeadDim * kHeadDim;
        if (inner) {
            target = segment_map(params_, segment_.sequence, segment_.index, segment_.v_head, segment_.is_map ? 0 : 1);
        }
        if (!target) return;
        const bool v_first = inner || params_.state_v_first;
        for_pairs([&](int, int, float& x, float& y) { x *= kAnchorScale, y *= kAnchorScale; });
        if (v_first) {
            for_pairs([&](int value, int key, float x, float y) {
                *reinterpret_cast<float2*>(target + value * kHeadDim + key) = make_float2(x, y);
            });
        } else {
            for_pairs([&](int value, int key, float x, float y) {
                target[key * kHeadDim + value] = x, target[(key + 1) * kHeadDim + value] = y;
            });
        }
    }

    // The warp's own columns of v, two lanes a token.
    __device__ __forceinline__ void load_values(int chunk, int slot) {
        if (chunk < work_.steps) {
            const uint32_t target =
                ptx::shared_address(smem_.values[slot]) + lane_ / 2 * kRowBytes + 32 * warp_ + 16 * (lane_ % 2);
            ptx::cp_async_16(target, values_, chunk * kChunk + lane_ / 2 < work_.length);
            values_ += kChunk * params_.v.token_bytes;
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void advance(int chunk, int slot, int stage_index, int stage_parity) {
        const Stage& stage = smem_.stage[stage_index];

        // S^T [Kd; Qd]^T: registers 0..7 are (Kd S)^T, 8..15 (Qd S)^T, tokens 0..7 and 8..15 each.
        uint32_t s[8][4];
#pragma unroll
        for (int step = 0; step < 8; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &state_[step / 4][8 * (step % 4) + 2 * i];
                s[step][i] = ptx::pack_bf16(pair[0], pair[1]);
            }
        }
        ptx::mbarrier_wait(&smem_.scaled[stage_index], stage_parity);
        const uint32_t decayed = ptx::shared_address(stage.decayed);
        float product[16];
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const int offset = step / 4 * int(sizeof(stage.decayed[0])) + 32 * (step % 4);
            ptx::wgmma_m64n32k16<0>(product, s[step], ptx::operand_swizzled_128(decayed, offset), step > 0);
        }
        ptx::wgmma_commit();

        ptx::cp_async_wait<kValues - 1>();
        __syncwarp();
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, ptx::shared_address(smem_.values[slot]) + (lane_ % 8 + 8 * (lane_ / 16)) * kRowBytes +
                                      2 * (16 * warp_ + 8 * (lane_ / 8 % 2)));
        if (segment_.is_map) v[0] = v[1] = v[2] = v[3] = 0;  // M alone, without B
        ptx::mbarrier_wait(&smem_.built[stage_index], stage_parity);
        float2 k_norm[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            k_norm[n] = *reinterpret_cast<const float2*>(&stage.k_norm[2 * (lane_ % 4) + 8 * n]);
        ptx::wgmma_wait<0>();

        // (V - Kd S / |k|)^T, of which 8 tokens are an A operand whose k are the even tokens before the odd ones
        uint32_t remainder[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* pair = product + 4 * n + 2 * r;
                remainder[n][r] = ptx::round_tf32(ptx::bf16_low(v[2 * n + r]) - k_norm[n].x * pair[0]);
                remainder[n][r + 2] = ptx::round_tf32(ptx::bf16_high(v[2 * n + r]) - k_norm[n].y * pair[1]);
            }
        }

        // U'^T
        float u[8];
        const uint32_t inverse = ptx::shared_address(stage.inverse);
        ptx::wgmma_fence();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            ptx::wgmma_m64n16k8_tf32(u, remainder[n],
                                     ptx::operand_words(inverse, 2 * n * kWordColumnBytes, kWordColumnBytes), n > 0);
        }
        ptx::wgmma_commit();
        float2 gamma[2][8];  // ahead of their use
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 8; ++n) gamma[h][n] = *reinterpret_cast<const float2*>(&stage.gamma[key_of(h, 4 * n)]);
        }
        const bool steep[2] = {stage.steep[0] != 0, stage.steep[1] != 0};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (__builtin_expect(steep[h], false)) decay_half(h, gamma[h]);
        }
        ptx::wgmma_wait<0>();
        uint32_t high[4], low[4];
        split_operand(high, low, u);

        // O and S
        const uint64_t p_high = ptx::operand_square(ptx::shared_address(stage.p_high));
        const uint64_t p_low = ptx::operand_square(ptx::shared_address(stage.p_low));
        float out[8];
        ptx::wgmma_fence();
        ptx::wgmma_m64n16k16<0>(out, high, p_high, false);
        ptx::wgmma_m64n16k16<0>(out, low, p_high, true);
        ptx::wgmma_m64n16k16<0>(out, high, p_low, true);
        ptx::wgmma_commit();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint64_t k =
                ptx::operand_swizzled_128(ptx::shared_address(steep[h] ? stage.k_restored[h] : stage.k_inverse[h]));
            ptx::wgmma_m64n64k16<1>(state_[h], high, k, true);
            ptx::wgmma_m64n64k16<1>(state_[h], low, k, true);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (has_output()) store_output(chunk, out, product + 8, stage, smem_.values[slot]);
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (__builtin_expect(!steep[h], true)) decay_half(h, gamma[h]);
        }
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(&smem_.stage_empty[stage_index]);
    }

    __device__ __forceinline__ void decay_half(int h, const float2 (&gamma)[8]) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float* tile = &state_[h][4 * n];
            tile[0] *= gamma[n].x, tile[1] *= gamma[n].y, tile[2] *= gamma[n].x, tile[3] *= gamma[n].y;
        }
    }

    // O = P' U' + scale/|q| Qd S. Transposes the warp's 16 tokens x 16 values in the place of its v, then writes whole
    // 32-byte sectors.
    __device__ __forceinline__ void store_output(int chunk, const float* inside, const float* from_state,
                                                 const Stage& stage, uint8_t* values) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 q_norm = *reinterpret_cast<const float2*>(&stage.q_norm[2 * (lane_ % 4) + 8 * (i / 2)]);
            packed[i] = ptx::pack_bf16(inside[2 * i] + q_norm.x * from_state[2 * i],
                                       inside[2 * i + 1] + q_norm.y * from_state[2 * i + 1]);
        }
        uint8_t* tile = values + 32 * warp_;
        // Matrix m of the store is tokens 8 (m / 2), values 8 (m % 2).
        ptx::stmatrix_x4_trans(
            ptx::shared_address(tile) + (lane_ % 8 + 8 * (lane_ / 16)) * kRowBytes + 16 * (lane_ / 8 % 2), packed);
        __syncwarp();
        const int token = lane_ / 2;
        if (chunk * kChunk + token < work_.length) {
            *reinterpret_cast<uint4*>(output_) =
                *reinterpret_cast<const uint4*>(tile + token * kRowBytes + 16 * (lane_ % 2));
        }
        output_ += int64_t(kChunk) * params_.num_v_heads * kHeadDim;
    }

    // Where the true state is known.
    __device__ __forceinline__ bool has_output() const { return params_.pass != Pass::kMaps || segment_.index == 0; }

    const ChunkKdaFwdParams& params_;
    const Segment& segment_;
    const Work& work_;
    SharedMemory& smem_;
    const int lane_, warp_;
    const char* values_;     // eight values of one token, of the chunk to load next
    __nv_bfloat16* output_;  // the eight values of one token that the lane writes, of the current chunk
    float state_[2][32];
};

}  // namespace kda::sm90
