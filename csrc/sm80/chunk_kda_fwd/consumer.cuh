// Consumer warp: the recurrence over chunks for 16 columns of V, with the state in registers.
//
//     U = inverse beta (V - Kd S)      O = Qd S + P U      S <- diag(gamma) S + Kr^T U
//
// S^T (16 x 128) is kept as sixteen C tiles. Rounded to bf16 they are the A operand of (Kd S)^T = S^T Kd^T and the B
// operand of Qd S, and U^T is the A operand of the update and the B operand of P U: nothing is exchanged between lanes
// or warps. beta (V - Kd S), U and P enter their products as two bf16 terms each, the wide operands as one.
#pragma once

#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm80/chunk_kda_fwd/config.cuh"

namespace kda::sm80 {

class Consumer {
 public:
    __device__ __forceinline__ Consumer(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem)
        : params_(params), work_(work), smem_(smem), lane_(threadIdx.x % 32), first_value_(16 * (threadIdx.x / 32)) {}

    __device__ __forceinline__ void run() {
        load_state();
        int stage = 0;
        for (int chunk = 0; chunk < work_.chunks; ++chunk) {
            ptx::barrier_sync(kBarrierFull + stage, kStageThreads);
            advance(chunk, smem_.stage[stage], smem_.beta[stage]);
            if (chunk + kStages < work_.chunks) ptx::barrier_arrive(kBarrierEmpty + stage, kStageThreads);
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        if (params_.final_state) store_state();
    }

 private:
    // Row of the state's V, column of its K, of element e of tile n.
    __device__ __forceinline__ int value_of(int e) const { return first_value_ + lane_ / 4 + 8 * (e / 2); }
    __device__ __forceinline__ int key_of(int n, int e) const { return 8 * n + 2 * (lane_ % 4) + e % 2; }

    __device__ __forceinline__ void load_state() {
        const float* source =
            params_.initial_state ? params_.initial_state + work_.state * kHeadDim * kHeadDim : nullptr;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float2 pair = make_float2(0.0f, 0.0f);
                if (source && params_.state_v_first) {
                    pair = *reinterpret_cast<const float2*>(source + value_of(2 * r) * kHeadDim + key_of(n, 0));
                } else if (source) {
                    pair = make_float2(source[key_of(n, 0) * kHeadDim + value_of(2 * r)],
                                       source[key_of(n, 1) * kHeadDim + value_of(2 * r)]);
                }
                state_[n][2 * r] = pair.x;
                state_[n][2 * r + 1] = pair.y;
            }
        }
    }

    __device__ __forceinline__ void store_state() {
        float* target = params_.final_state + work_.state * kHeadDim * kHeadDim;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x = state_[n][2 * r], y = state_[n][2 * r + 1];
                if (params_.state_v_first) {
                    *reinterpret_cast<float2*>(target + value_of(2 * r) * kHeadDim + key_of(n, 0)) = make_float2(x, y);
                } else {
                    target[key_of(n, 0) * kHeadDim + value_of(2 * r)] = x;
                    target[key_of(n, 1) * kHeadDim + value_of(2 * r)] = y;
                }
            }
        }
    }

    __device__ __forceinline__ void advance(int chunk, const Stage& stage, const float* beta_of) {
        // Addresses of a lane in B tiles (two of 8 rows, k 0..7 and 8..15) and in A tiles or transposed B tiles.
        const int b_row = lane_ % 8 + 8 * (lane_ / 16), b_column = 8 * (lane_ / 8 % 2);
        const int a_row = lane_ % 16, a_column = 8 * (lane_ / 16);
        const uint32_t k_decayed = ptx::shared_address(stage.k_decayed) + tile_offset(b_row, b_column);
        const uint32_t q_decayed = ptx::shared_address(stage.q_decayed) + tile_offset(a_row, a_column);
        const uint32_t k_restored = ptx::shared_address(stage.k_restored) + tile_offset(a_row, a_column);
        float removed[2][4] = {};  // (Kd S)^T 2^A: tokens 0..7, 8..15
        float out[2][4] = {};      // O 2^A: values 0..7, 8..15
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            uint32_t s[4], kd[4], qd[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&tile)[4] = state_[2 * step + i / 2];
                s[i] = ptx::pack_bf16(tile[2 * (i % 2)], tile[2 * (i % 2) + 1]);
            }
            ptx::ldmatrix_x4(kd, tile_step(k_decayed, step));
            ptx::mma_m16n8k16(removed[0], s, kd[0], kd[1]);
            ptx::mma_m16n8k16(removed[1], s, kd[2], kd[3]);
            ptx::ldmatrix_x4(qd, tile_step(q_decayed, step));
            ptx::mma_m16n8k16(out[0], qd, s[0], s[2]);
            ptx::mma_m16n8k16(out[1], qd, s[1], s[3]);
        }

        // (beta (V - Kd S))^T, in the layout of `removed`, as an A operand.
        uint32_t v[4], high[4], low[4];
        float u[8];
        ptx::ldmatrix_x4_trans(v, ptx::shared_address(stage.v) + tile_offset(b_row, first_value_ + b_column));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 beta = *reinterpret_cast<const float2*>(beta_of + key_of(n, 0));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 2 * n + r;
                u[2 * i] = beta.x * (ptx::bf16_low(v[i]) - kAnchorInverse * removed[n][2 * r]);
                u[2 * i + 1] = beta.y * (ptx::bf16_high(v[i]) - kAnchorInverse * removed[n][2 * r + 1]);
            }
        }
        split_operand(high, low, u);

        // U^T
        uint32_t inverse[4];
        ptx::ldmatrix_x4(inverse, ptx::shared_address(stage.inverse) + square_offset(b_row, b_column));
        float product[2][4] = {};
        ptx::mma_m16n8k16(product[0], high, inverse[0], inverse[1]);
        ptx::mma_m16n8k16(product[1], high, inverse[2], inverse[3]);
        ptx::mma_m16n8k16(product[0], low, inverse[0], inverse[1]);
        ptx::mma_m16n8k16(product[1], low, inverse[2], inverse[3]);
#pragma unroll
        for (int i = 0; i < 8; ++i) u[i] = product[i / 4][i % 4];
        split_operand(high, low, u);

        // S
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            uint32_t kr[4];
            ptx::ldmatrix_x4_trans(kr, tile_step(k_restored, n / 2));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 gamma = *reinterpret_cast<const float2*>(&stage.gamma[key_of(n + i, 0)]);
                float (&tile)[4] = state_[n + i];
                tile[0] *= gamma.x, tile[1] *= gamma.y, tile[2] *= gamma.x, tile[3] *= gamma.y;
                ptx::mma_m16n8k16(tile, high, kr[2 * i], kr[2 * i + 1]);
                ptx::mma_m16n8k16(tile, low, kr[2 * i], kr[2 * i + 1]);
            }
        }

        // O
        uint32_t p[4];
        const int p_offset = square_offset(a_row, a_column);
        ptx::ldmatrix_x4(p, ptx::shared_address(stage.p_high) + p_offset);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            ptx::mma_m16n8k16(out[n], p, high[n], high[n + 2]);
            ptx::mma_m16n8k16(out[n], p, low[n], low[n + 2]);
        }
        ptx::ldmatrix_x4(p, ptx::shared_address(stage.p_low) + p_offset);
#pragma unroll
        for (int n = 0; n < 2; ++n) ptx::mma_m16n8k16(out[n], p, high[n], high[n + 2]);
        store_output(chunk, out);
    }

    __device__ __forceinline__ void store_output(int chunk, const float (&out)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = chunk * kChunk + lane_ / 4 + 8 * r;
            if (token >= work_.length) continue;
            __nv_bfloat16* row = static_cast<__nv_bfloat16*>(params_.o) +
                                 ((work_.output_row + token) * params_.num_v_heads + work_.v_head) * kHeadDim;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                *reinterpret_cast<uint32_t*>(row + first_value_ + 8 * n + 2 * (lane_ % 4)) =
                    ptx::pack_bf16(out[n][2 * r] * kAnchorInverse, out[n][2 * r + 1] * kAnchorInverse);
            }
        }
    }

    const ChunkKdaFwdParams& params_;
    const Work& work_;
    const SharedMemory& smem_;
    const int lane_, first_value_;
    float state_[16][4];
};

}  // namespace kda::sm80
