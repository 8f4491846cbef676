// Producer group: from raw q, k, g, beta of one chunk to the factors of the recurrence.
//
//     G_i = sum of log2 gates up to i            L_ij = beta_i sum_d k_i k_j 2^(G_i - G_j)      j < i
//     Kd = k 2^G   Qd = scale q 2^G              P_ij = scale sum_d q_i k_j 2^(G_i - G_j)       j <= i
//     Kr = k 2^(G_last - G)   gamma = 2^G_last   inverse = (I + L)^-1 diag(beta)
//
// L and P are tensor-core products of (k or q) 2^(G+A) with k 2^(-G-A). Where G is too steep for that, the entry is left out
// of the product and its pairs are summed one by one in fp32, where 2^(G_i - G_j) <= 1 cannot overflow. The choice is made
// entry by entry from the gates up to that token alone, so nothing that comes later changes a rounding.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm80/chunk_kda_fwd/gates.cuh"
#include "sm80/chunk_kda_fwd/sequence.cuh"

namespace kda::sm80 {

__device__ __forceinline__ bool is_steep(float G) { return !(G >= kSteepBelow && G <= kSteepAbove); }

template <typename GateT>
class Producer {
   public:
    __device__ __forceinline__ Producer(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem, int group)
        : params_(params), work_(work), stages_(smem.stage), own_(smem.workspace[group]), group_(group),
          thread_(threadIdx.x % kGroupThreads), warp_(thread_ / 32), lane_(thread_ % 32), half_(warp_ / 2),
          channel_(64 * (warp_ % 2) + 2 * lane_),
          gate_{Gate(params, work.v_head, channel_), Gate(params, work.v_head, channel_ + 1)} {}

    __device__ __forceinline__ void run() {
        if (group_ < work_.chunks) load_inputs(group_);
        ptx::cp_async_commit();
        int stage = group_;
        for (int chunk = group_; chunk < work_.chunks; chunk += kGroups) {
            if (chunk >= kStages) ptx::barrier_sync(kBarrierEmpty + stage, kStageThreads);
            load_values(chunk, stages_[stage]);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();  // this chunk's q, k, g; the values may still be under way
            build(chunk, stages_[stage]);
            ptx::cp_async_wait<1>();  // the values; the next chunk's q, k, g may still be under way
            ptx::barrier_arrive(kBarrierFull + stage, kStageThreads);
            stage = (stage + kGroups) % kStages;
        }
    }

   private:
    __device__ __forceinline__ void sync() { ptx::barrier_sync(kBarrierGroup + group_, kGroupThreads); }

    __device__ __forceinline__ int rows_of(int chunk) const {
        return min(work_.length - chunk * kChunk, kChunk);
    }

    // Copies kChunk rows of 128 elements, rows past the sequence's end as zeros (nothing is read for those).
    template <typename T, bool kSwizzled>
    __device__ __forceinline__ void load_rows(void* shared, const void* global, int chunk, int heads, int head) {
        constexpr int kPieces = kHeadDim * sizeof(T) / 16, kPasses = kChunk * kPieces / kGroupThreads;
        constexpr int kRowStep = kChunk / kPasses;
        const int first_row = thread_ / kPieces, column = thread_ % kPieces * (16 / int(sizeof(T)));
        const int rows = rows_of(chunk);
        const T* source = static_cast<const T*>(global) +
                          ((work_.first_token + chunk * kChunk + first_row) * heads + head) * kHeadDim + column;
        const uint32_t target = ptx::shared_address(shared);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int row = first_row + i * kRowStep;
            const int offset = kSwizzled ? tile_offset(row, column) : (row * kHeadDim + column) * int(sizeof(T));
            ptx::cp_async_16(target + offset, source + int64_t(i * kRowStep) * heads * kHeadDim, row < rows);
        }
    }

    __device__ __forceinline__ void load_inputs(int chunk) {
        load_rows<__nv_bfloat16, true>(own_.q, params_.q, chunk, params_.num_qk_heads, work_.qk_head);
        load_rows<__nv_bfloat16, true>(own_.k, params_.k, chunk, params_.num_qk_heads, work_.qk_head);
        load_rows<GateT, false>(own_.g, params_.g, chunk, params_.num_v_heads, work_.v_head);
        if (thread_ < kChunk) {
            next_beta_ = thread_ < rows_of(chunk)
                             ? load_beta(params_, (work_.first_token + chunk * kChunk + thread_) * params_.num_v_heads +
                                                      work_.v_head)
                             : 0.0f;
        }
    }

    __device__ __forceinline__ void load_values(int chunk, Stage& stage) {
        load_rows<__nv_bfloat16, true>(stage.v, params_.v, chunk, params_.num_v_heads, work_.v_head);
    }

    __device__ __forceinline__ void build(int chunk, Stage& stage) {
        sync();  // raw inputs are there
        if (thread_ < kChunk) own_.beta[thread_] = next_beta_;
        find_norms();
        float G[8][2];
        switch (params_.gate_mode) {
            case GateMode::kGiven: sum_gates<GateMode::kGiven>(G, rows_of(chunk)); break;
            case GateMode::kSoftplus: sum_gates<GateMode::kSoftplus>(G, rows_of(chunk)); break;
            default: sum_gates<GateMode::kBounded>(G, rows_of(chunk));
        }
        sync();  // norms, half sums
        const bool steep = scale_by_decay(G, stage);
        const bool any_steep = ptx::barrier_sync_or(kBarrierGroup + group_, kGroupThreads, steep);
        if (any_steep) {
            publish_steep(G);
            sync();
        }
        multiply_pairs(stage, any_steep);
        sync();  // L is there; q, k, g are free
        if (chunk + kGroups < work_.chunks) load_inputs(chunk + kGroups);
        ptx::cp_async_commit();
        if (warp_ == 0) invert(stage);
    }

    // 1 / |x| of four tokens a warp, for q (times scale) and k.
    __device__ __forceinline__ void find_norms() {
        float sum[8];  // squares of q of four tokens, then of k
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint8_t* tile = i < 4 ? own_.q : own_.k;
            const uint2 x = *reinterpret_cast<const uint2*>(tile + tile_offset(4 * warp_ + i % 4, 4 * lane_));
            const float x0 = ptx::bf16_low(x.x), x1 = ptx::bf16_high(x.x), x2 = ptx::bf16_low(x.y), x3 = ptx::bf16_high(x.y);
            sum[i] = x0 * x0 + x1 * x1 + (x2 * x2 + x3 * x3);
        }
        // Each step halves what a lane still sums, so that eight sums cost nine shuffles.
#pragma unroll
        for (int keep = 4; keep >= 1; keep /= 2) {
            const bool upper = lane_ & (4 * keep);
#pragma unroll
            for (int i = 0; i < keep; ++i) {
                const float sent = upper ? sum[i] : sum[i + keep];
                sum[i] = (upper ? sum[i + keep] : sum[i]) + __shfl_xor_sync(~0u, sent, 4 * keep);
            }
        }
        sum[0] += __shfl_xor_sync(~0u, sum[0], 2);
        sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
        if (lane_ % 4 == 0) {
            const int index = lane_ / 4;  // 0..3 q, 4..7 k
            const float factor = params_.use_qk_l2norm ? rsqrtf(sum[0] + 1e-6f) : 1.0f;
            float2& norm = own_.norm[4 * warp_ + index % 4];
            if (index < 4) norm.x = factor * params_.scale;
            else norm.y = factor;
        }
    }

    // Sums of log2 gates from the first token of the thread's half chunk.
    template <GateMode kMode>
    __device__ __forceinline__ void sum_gates(float (&G)[8][2], int rows) {
        const GateT* raw = reinterpret_cast<const GateT*>(own_.g);
        float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = 8 * half_ + i;
            float g0, g1;
            if constexpr (sizeof(GateT) == 4) {
                const float2 pair = *reinterpret_cast<const float2*>(raw + row * kHeadDim + channel_);
                g0 = pair.x, g1 = pair.y;
            } else {
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(raw + row * kHeadDim + channel_);
                g0 = ptx::bf16_low(pair), g1 = ptx::bf16_high(pair);
            }
            const bool inside = row < rows;
            sum0 += inside ? gate_[0].template log2_decay<kMode>(g0) : 0.0f;
            sum1 += inside ? gate_[1].template log2_decay<kMode>(g1) : 0.0f;
            G[i][0] = sum0;
            G[i][1] = sum1;
        }
        *reinterpret_cast<float2*>(&own_.half_sum[half_][channel_]) = make_float2(sum0, sum1);
    }

    // Completes G, writes the decayed operands; returns whether the thread met a steep entry.
    __device__ __forceinline__ bool scale_by_decay(float (&G)[8][2], Stage& stage) {
        const float2 first = *reinterpret_cast<const float2*>(&own_.half_sum[0][channel_]);
        const float2 second = *reinterpret_cast<const float2*>(&own_.half_sum[1][channel_]);
        const float last0 = first.x + second.x, last1 = first.y + second.y;
        const float base0 = half_ ? first.x : 0.0f, base1 = half_ ? first.y : 0.0f;
        if (half_ == 0) {
            *reinterpret_cast<float2*>(&stage.gamma[channel_]) =
                make_float2(ptx::exp2_approx(last0), ptx::exp2_approx(last1));
        }
        bool steep = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = 8 * half_ + i;
            const float G0 = G[i][0] += base0, G1 = G[i][1] += base1;
            const bool steep0 = is_steep(G0), steep1 = is_steep(G1);
            steep = steep || steep0 || steep1;
            const int offset = 256 * row + (tile_offset(0, channel_) ^ (16 * i));  // tile_offset(row, channel_), as row % 8 = i
            const uint32_t q = *reinterpret_cast<const uint32_t*>(own_.q + offset);
            const uint32_t k = *reinterpret_cast<const uint32_t*>(own_.k + offset);
            const float2 norm = own_.norm[row];
            const float q0 = ptx::bf16_low(q) * norm.x, q1 = ptx::bf16_high(q) * norm.x;
            const float k0 = ptx::bf16_low(k) * norm.y, k1 = ptx::bf16_high(k) * norm.y;
            const float decay0 = steep0 ? 0.0f : ptx::exp2_approx(G0 + kAnchor);
            const float decay1 = steep1 ? 0.0f : ptx::exp2_approx(G1 + kAnchor);
            const float growth0 = steep0 ? 0.0f : ptx::exp2_approx(-G0 - kAnchor);
            const float growth1 = steep1 ? 0.0f : ptx::exp2_approx(-G1 - kAnchor);
            const float rest0 = ptx::exp2_approx(last0 - G0), rest1 = ptx::exp2_approx(last1 - G1);
            *reinterpret_cast<uint32_t*>(stage.k_decayed + offset) = ptx::pack_bf16(k0 * decay0, k1 * decay1);
            *reinterpret_cast<uint32_t*>(stage.q_decayed + offset) = ptx::pack_bf16(q0 * decay0, q1 * decay1);
            *reinterpret_cast<uint32_t*>(stage.k_restored + offset) = ptx::pack_bf16(k0 * rest0, k1 * rest1);
            *reinterpret_cast<uint32_t*>(own_.k_inverse + offset) = ptx::pack_bf16(k0 * growth0, k1 * growth1);
        }
        return steep;
    }

    // Hands G and the set of steep channels to the whole group.
    __device__ __forceinline__ void publish_steep(const float (&G)[8][2]) {
        bool steep0 = false, steep1 = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            steep0 = steep0 || is_steep(G[i][0]);
            steep1 = steep1 || is_steep(G[i][1]);
            *reinterpret_cast<float2*>(&own_.g[decay_index(8 * half_ + i, channel_)]) = make_float2(G[i][0], G[i][1]);
        }
        const uint32_t even = __ballot_sync(~0u, steep0), odd = __ballot_sync(~0u, steep1);
        if (lane_ == 0) {
            own_.steep[half_][warp_ % 2][0] = even;
            own_.steep[half_][warp_ % 2][1] = odd;
        }
    }

    // Warps 0, 1: L; warps 2, 3: P; each eight columns j.
    __device__ __forceinline__ void multiply_pairs(Stage& stage, bool any_steep) {
        const bool is_P = warp_ >= 2;
        const int first_column = 8 * (warp_ % 2);
        const uint32_t left = ptx::shared_address(is_P ? stage.q_decayed : stage.k_decayed) +
                              tile_offset(lane_ % 16, 8 * (lane_ / 16));
        const uint32_t right = ptx::shared_address(own_.k_inverse) + tile_offset(first_column + lane_ % 8, 8 * (lane_ / 8));
        float even[4] = {}, odd[4] = {};  // two sums, to halve the chain of dependent products
#pragma unroll
        for (int step = 0; step < kHeadDim / 32; ++step) {
            uint32_t b[4], a[4];
            ptx::ldmatrix_x4(b, tile_step(right, 2 * step));
            ptx::ldmatrix_x4(a, tile_step(left, 2 * step));
            ptx::mma_m16n8k16(even, a, b[0], b[1]);
            ptx::ldmatrix_x4(a, tile_step(left, 2 * step + 1));
            ptx::mma_m16n8k16(odd, a, b[2], b[3]);
        }
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = even[i] + odd[i];
        if (any_steep) add_steep_pairs(sum, is_P, first_column);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane_ / 4 + 8 * r, column = first_column + 2 * (lane_ % 4);
            if (is_P) {
                const float p0 = column <= row ? sum[2 * r] * kAnchorScale : 0.0f;
                const float p1 = column + 1 <= row ? sum[2 * r + 1] * kAnchorScale : 0.0f;
                const uint32_t high = ptx::pack_bf16(p0, p1);
                *reinterpret_cast<uint32_t*>(stage.p_high + square_offset(row, column)) = high;
                *reinterpret_cast<uint32_t*>(stage.p_low + square_offset(row, column)) =
                    ptx::pack_bf16(p0 - ptx::bf16_low(high), p1 - ptx::bf16_high(high));
            } else {
                const float beta = own_.beta[row];
                *reinterpret_cast<float2*>(&own_.lower[row][column]) =
                    make_float2(column < row ? beta * sum[2 * r] : 0.0f, column + 1 < row ? beta * sum[2 * r + 1] : 0.0f);
            }
        }
    }

    // Adds x_i k_j 2^(G_i - G_j) for every pair that the products left out because either entry was steep.
    __device__ __forceinline__ void add_steep_pairs(float (&sum)[4], bool is_P, int first_column) {
        const uint8_t* x_tile = is_P ? own_.q : own_.k;
        const int column = first_column + 2 * (lane_ % 4);
        for (int set = 0; set < 4; ++set) {
            uint32_t bits = own_.steep[0][set / 2][set % 2] | own_.steep[1][set / 2][set % 2];
            for (; bits; bits &= bits - 1) {
                const int channel = 64 * (set / 2) + 2 * (__ffs(bits) - 1) + set % 2;
                float G_j[2], k_j[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    G_j[c] = own_.g[decay_index(column + c, channel)];
                    k_j[c] = load_bf16(own_.k, column + c, channel) * own_.norm[column + c].y;
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = lane_ / 4 + 8 * r;
                    const float G_i = own_.g[decay_index(row, channel)];
                    const float x_i = load_bf16(x_tile, row, channel) * (is_P ? own_.norm[row].x : own_.norm[row].y);
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const bool wanted = column + c <= row && (is_steep(G_i) || is_steep(G_j[c]));
                        const float pair = x_i * k_j[c] * ptx::exp2_approx(G_i - G_j[c]);
                        sum[2 * r + c] += wanted ? pair : 0.0f;
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ float load_bf16(const uint8_t* tile, int row, int column) {
        return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(tile + tile_offset(row, column)));
    }

    // (I + L)^-1 diag(beta) by forward substitution in fp32, a lane a column: powers of L, which overflow for keys that are
    // nearly collinear, never appear.
    __device__ __forceinline__ void invert(Stage& stage) {
        const int column = lane_ % 16;
        float x[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 row = *reinterpret_cast<const float4*>(&own_.lower[i][j]);
                sum -= row.x * x[j];
                if (j + 1 < i) sum -= row.y * x[j + 1];
                if (j + 2 < i) sum -= row.z * x[j + 2];
                if (j + 3 < i) sum -= row.w * x[j + 3];
            }
            x[i] = sum;
        }
        const float beta = own_.beta[column];
        if (lane_ < 16) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                *reinterpret_cast<__nv_bfloat16*>(stage.inverse + square_offset(i, column)) = __float2bfloat16(x[i] * beta);
            }
        }
    }

    const ChunkKdaFwdParams& params_;
    const Work& work_;
    Stage* stages_;
    Workspace& own_;
    const int group_, thread_, warp_, lane_;
    const int half_;     // of the chunk's tokens
    const int channel_;  // first of the thread's two
    const Gate gate_[2];
    float next_beta_ = 0.0f;
};

}  // namespace kda::sm80
