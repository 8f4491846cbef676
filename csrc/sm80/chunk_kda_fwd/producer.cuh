// Producer group: from raw q, k, g, beta of one chunk to the factors of the recurrence.
//
//     G_i = sum of log2 gates up to i            L_ij = beta_i sum_d k_i k_j 2^(G_i - G_j)      j < i
//     Kd = k 2^G   Qd = scale q 2^G              P_ij = scale sum_d q_i k_j 2^(G_i - G_j)       j <= i
//     Kr = k 2^(G_last - G)   gamma = 2^G_last   inverse = (I + L)^-1
//
// L and P are tensor-core products of (k or q) 2^(G+A) with k 2^(-G-A). Where G is too steep for that, the entry is
// left out of the product and its pairs are summed one by one in fp32, where 2^(G_i - G_j) <= 1 cannot overflow. The
// choice is made entry by entry from the gates up to that token alone, so nothing that comes later changes a rounding.
#pragma once

#include "common/gates.cuh"
#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm80/chunk_kda_fwd/config.cuh"

namespace kda::sm80 {

// Inside the chunk's work every G is kept as G + A, the exponent that is needed most.
__device__ __forceinline__ bool is_steep(float anchored_G) {
    return !(fabsf(anchored_G) <= kAnchor);
}  // true for NaN

template <typename GateT>
class Producer {
 public:
    __device__ __forceinline__ Producer(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem,
                                        int group)
        : params_(params),
          work_(work),
          smem_(smem),
          own_(smem.workspace[group]),
          group_(group),
          thread_(threadIdx.x % kGroupThreads),
          warp_(thread_ / 32),
          lane_(thread_ % 32),
          half_(warp_ / 2),
          channel_(64 * (warp_ % 2) + 2 * lane_),
          gate_{Gate(params, work.v_head, channel_), Gate(params, work.v_head, channel_ + 1)} {}

    __device__ __forceinline__ void run() {
        if (group_ < work_.chunks) load_inputs(group_);
        ptx::cp_async_commit();
        int stage = group_;
        for (int chunk = group_; chunk < work_.chunks; chunk += kGroups) {
            if (chunk >= kStages) ptx::barrier_sync(kBarrierEmpty + stage, kStageThreads);
            load_values(chunk, smem_.stage[stage]);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();  // this chunk's q, k, g; the values may still be under way
            build(chunk, smem_.stage[stage], smem_.beta[stage]);
            ptx::cp_async_wait<1>();  // the values; the next chunk's q, k, g may still be under way
#ifdef KDA_FOR_RACECHECK
            // NVIDIA's racecheck does not see that an arrival orders what its warp did since it last waited.
            sync();
#endif
            ptx::barrier_arrive(kBarrierFull + stage, kStageThreads);
            stage = (stage + kGroups) % kStages;
        }
    }

 private:
    __device__ __forceinline__ void sync() { ptx::barrier_sync(kBarrierGroup + group_, kGroupThreads); }

    __device__ __forceinline__ int rows_of(int chunk) const { return min(work_.length - chunk * kChunk, kChunk); }

    // Copies kChunk rows of 128 elements, rows past the sequence's end as zeros (nothing is read for those).
    template <typename T, bool kSwizzled>
    __device__ __forceinline__ void load_rows(void* shared, const Rows& source_rows, int chunk, int head) {
        constexpr int kPieces = kHeadDim * sizeof(T) / 16, kPasses = kChunk * kPieces / kGroupThreads;
        constexpr int kRowStep = kChunk / kPasses;
        const int first_row = thread_ / kPieces, column = thread_ % kPieces * (16 / int(sizeof(T)));
        const int rows = rows_of(chunk);
        const char* source =
            row_address(source_rows, work_, chunk * kChunk + first_row, head) + column * int(sizeof(T));
        const uint32_t target = ptx::shared_address(shared);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int row = first_row + i * kRowStep;
            const int offset = kSwizzled ? tile_offset(row, column) : (row * kHeadDim + column) * int(sizeof(T));
            ptx::cp_async_16(target + offset, source + i * kRowStep * source_rows.token_bytes, row < rows);
        }
    }

    __device__ __forceinline__ void load_inputs(int chunk) {
        load_rows<__nv_bfloat16, true>(own_.q, params_.q, chunk, work_.qk_head);
        load_rows<__nv_bfloat16, true>(own_.k, params_.k, chunk, work_.qk_head);
        load_rows<GateT, false>(own_.g, params_.g, chunk, work_.v_head);
        if (thread_ < rows_of(chunk)) {
            next_beta_ = load_beta(params_, row_address(params_.beta, work_, chunk * kChunk + thread_, work_.v_head));
        }
    }

    __device__ __forceinline__ void load_values(int chunk, Stage& stage) {
        load_rows<__nv_bfloat16, true>(stage.v, params_.v, chunk, work_.v_head);
    }

    __device__ __forceinline__ void build(int chunk, Stage& stage, float* beta) {
        sync();  // raw inputs are there
        const int rows = rows_of(chunk);
        if (thread_ < kChunk) {
            const float raw = __uint_as_float(params_.beta_dtype == Dtype::kFloat32 ? next_beta_ : next_beta_ << 16);
            beta[thread_] = thread_ < rows ? activate_beta(raw, params_.beta_mode) : 0.0f;
        }
        find_norms();
        float G[8][2];
        switch (params_.gate_mode) {
            case GateMode::kGiven: sum_gates<GateMode::kGiven>(G, rows); break;
            case GateMode::kSoftplus: sum_gates<GateMode::kSoftplus>(G, rows); break;
            default: sum_gates<GateMode::kBounded>(G, rows);
        }
        sync();  // norms, half sums
        const bool steep = complete_sums(G);
        float2 last;
        last.x = own_.half_sum[0][channel_] + own_.half_sum[1][channel_];
        last.y = own_.half_sum[0][channel_ + 1] + own_.half_sum[1][channel_ + 1];
        if (half_ == 0) {
            *reinterpret_cast<float2*>(&stage.gamma[channel_]) =
                make_float2(ptx::exp2_approx(last.x), ptx::exp2_approx(last.y));
        }
        if (__any_sync(~0u, steep))
            scale_by_decay<true>(G, last, stage);
        else
            scale_by_decay<false>(G, last, stage);
        const bool any_steep = ptx::barrier_sync_or(kBarrierGroup + group_, kGroupThreads, steep);
        const bool has_next = chunk + kGroups < work_.chunks;
        if (any_steep) {  // q, k, g are still needed, and g's place
            publish_steep(G, steep);
            sync();
        } else if (has_next) {
            load_inputs(chunk + kGroups);
        }
        multiply_pairs(stage, beta, any_steep);
        sync();  // L is there
        if (any_steep && has_next) load_inputs(chunk + kGroups);
        ptx::cp_async_commit();
        if (warp_ == 0) invert(stage);
    }

    // Sums `kCount` (a power of two up to 8) values over the warp; lane l returns the sum of value l / (32 / kCount).
    // Each step halves what a lane still sums, so that eight sums cost nine shuffles.
    template <int kCount>
    __device__ __forceinline__ float sum_over_warp(float (&sum)[kCount]) const {
#pragma unroll
        for (int keep = kCount / 2, distance = 16; distance >= 1; keep /= 2, distance /= 2) {
            const bool upper = lane_ & distance;
            if (keep == 0) sum[0] += __shfl_xor_sync(~0u, sum[0], distance);
#pragma unroll
            for (int i = 0; i < keep; ++i) {
                const float sent = upper ? sum[i] : sum[i + keep];
                sum[i] = (upper ? sum[i + keep] : sum[i]) + __shfl_xor_sync(~0u, sent, distance);
            }
        }
        return sum[0];
    }

    // 1 / |x| of four tokens a warp, for q (times scale) and k; and q k, which is exact where a product of rounded
    // factors is not.
    __device__ __forceinline__ void find_norms() {
        float squares[8], dot[4];  // squares of q of four tokens, then of k
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int offset = tile_offset(4 * warp_ + i, 4 * lane_);
            const uint2 q = *reinterpret_cast<const uint2*>(own_.q + offset),
                        k = *reinterpret_cast<const uint2*>(own_.k + offset);
            const float q0 = ptx::bf16_low(q.x), q1 = ptx::bf16_high(q.x), q2 = ptx::bf16_low(q.y),
                        q3 = ptx::bf16_high(q.y);
            const float k0 = ptx::bf16_low(k.x), k1 = ptx::bf16_high(k.x), k2 = ptx::bf16_low(k.y),
                        k3 = ptx::bf16_high(k.y);
            squares[i] = q0 * q0 + q1 * q1 + (q2 * q2 + q3 * q3);
            squares[i + 4] = k0 * k0 + k1 * k1 + (k2 * k2 + k3 * k3);
            dot[i] = q0 * k0 + q1 * k1 + (q2 * k2 + q3 * k3);
        }
        const float square = sum_over_warp(squares), product = sum_over_warp(dot);
        if (lane_ % 4 == 0) {
            const int index = lane_ / 4;  // 0..3 q, 4..7 k
            const float factor = params_.use_qk_l2norm ? rsqrtf(square + 1e-6f) : 1.0f;
            float2& norm = own_.norm[4 * warp_ + index % 4];
            if (index < 4)
                norm.x = factor * params_.scale;
            else
                norm.y = factor;
        }
        if (lane_ % 8 == 0) own_.q_dot_k[4 * warp_ + lane_ / 8] = product;
    }

    // Sums of log2 gates from the first token of the thread's half chunk.
    template <GateMode kMode>
    __device__ __forceinline__ void sum_gates(float (&G)[8][2], int rows) {
        const GateT* raw = reinterpret_cast<const GateT*>(own_.g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const GateT* source = raw + (8 * half_ + i) * kHeadDim + channel_;
            float2 pair;
            if constexpr (sizeof(GateT) == 4) {
                pair = *reinterpret_cast<const float2*>(source);
            } else {
                const uint32_t packed = *reinterpret_cast<const uint32_t*>(source);
                pair = make_float2(ptx::bf16_low(packed), ptx::bf16_high(packed));
            }
            G[i][0] = gate_[0].template log2_decay<kMode>(pair.x);
            G[i][1] = gate_[1].template log2_decay<kMode>(pair.y);
        }
        if (rows < kChunk) {  // once, at a sequence's end: tokens that do not exist forget nothing
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (8 * half_ + i >= rows) G[i][0] = G[i][1] = 0.0f;
            }
        }
#pragma unroll
        for (int i = 1; i < 8; ++i) {
            G[i][0] += G[i - 1][0];
            G[i][1] += G[i - 1][1];
        }
        *reinterpret_cast<float2*>(&own_.half_sum[half_][channel_]) = make_float2(G[7][0], G[7][1]);
    }

    // Makes them G + A, with G from the first token of the chunk; returns whether the thread has a steep entry.
    __device__ __forceinline__ bool complete_sums(float (&G)[8][2]) const {
        const float2 first = *reinterpret_cast<const float2*>(&own_.half_sum[0][channel_]);
        const float base0 = kAnchor + (half_ ? first.x : 0.0f), base1 = kAnchor + (half_ ? first.y : 0.0f);
        bool steep = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            G[i][0] += base0;
            G[i][1] += base1;
            steep = steep | is_steep(G[i][0]) | is_steep(G[i][1]);
        }
        return steep;
    }

    // Writes the decayed operands.
    template <bool kMayBeSteep>
    __device__ __forceinline__ void scale_by_decay(const float (&G)[8][2], float2 last, Stage& stage) {
        const float from_inverse0 = ptx::exp2_approx(last.x + kAnchor),
                    from_inverse1 = ptx::exp2_approx(last.y + kAnchor);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = 8 * half_ + i;
            const int offset =
                256 * row + (tile_offset(0, channel_) ^ (16 * i));  // tile_offset(row, channel_), as row % 8 = i
            const uint32_t q = *reinterpret_cast<const uint32_t*>(own_.q + offset);
            const uint32_t k = *reinterpret_cast<const uint32_t*>(own_.k + offset);
            const float2 norm = own_.norm[row];
            const float q0 = ptx::bf16_low(q) * norm.x, q1 = ptx::bf16_high(q) * norm.x;
            const float k0 = ptx::bf16_low(k) * norm.y, k1 = ptx::bf16_high(k) * norm.y;
            float decay0 = ptx::exp2_approx(G[i][0]), decay1 = ptx::exp2_approx(G[i][1]);
            float inverse0 = ptx::exp2_approx(-G[i][0]), inverse1 = ptx::exp2_approx(-G[i][1]);
            float rest0 = inverse0 * from_inverse0, rest1 = inverse1 * from_inverse1;  // 2^(G_last - G)
            if constexpr (kMayBeSteep) {
                rest0 = ptx::exp2_approx(last.x + kAnchor - G[i][0]),
                rest1 = ptx::exp2_approx(last.y + kAnchor - G[i][1]);
                if (is_steep(G[i][0])) decay0 = inverse0 = 0.0f;
                if (is_steep(G[i][1])) decay1 = inverse1 = 0.0f;
            }
            *reinterpret_cast<uint32_t*>(stage.k_decayed + offset) = ptx::pack_bf16(k0 * decay0, k1 * decay1);
            *reinterpret_cast<uint32_t*>(stage.q_decayed + offset) = ptx::pack_bf16(q0 * decay0, q1 * decay1);
            *reinterpret_cast<uint32_t*>(stage.k_restored + offset) = ptx::pack_bf16(k0 * rest0, k1 * rest1);
            *reinterpret_cast<uint32_t*>(own_.k_inverse + offset) = ptx::pack_bf16(k0 * inverse0, k1 * inverse1);
        }
    }

    // Hands G and the set of steep channels to the whole group.
    __device__ __forceinline__ void publish_steep(const float (&G)[8][2], bool steep) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<float2*>(&own_.g[decay_index(8 * half_ + i, channel_)]) = make_float2(G[i][0], G[i][1]);
        }
        const uint32_t pairs = __ballot_sync(~0u, steep);
        if (lane_ == 0) own_.steep[half_][warp_ % 2] = pairs;
    }

    // Warps 0, 1: L; warps 2, 3: P; each eight columns j.
    __device__ __forceinline__ void multiply_pairs(Stage& stage, const float* beta, bool any_steep) {
        const bool is_P = warp_ >= 2;
        const int first_column = 8 * (warp_ % 2);
        const uint32_t left =
            ptx::shared_address(is_P ? stage.q_decayed : stage.k_decayed) + tile_offset(lane_ % 16, 8 * (lane_ / 16));
        const uint32_t right =
            ptx::shared_address(own_.k_inverse) + tile_offset(first_column + lane_ % 8, 8 * (lane_ / 8));
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
                const float diagonal = own_.q_dot_k[row] * own_.norm[row].x * own_.norm[row].y;
                const float p0 = column < row    ? sum[2 * r] * kAnchorScale
                                 : column == row ? diagonal * kAnchorScale
                                                 : 0.0f;
                const float p1 = column + 1 < row    ? sum[2 * r + 1] * kAnchorScale
                                 : column + 1 == row ? diagonal * kAnchorScale
                                                     : 0.0f;
                const uint32_t high = ptx::pack_bf16(p0, p1);
                *reinterpret_cast<uint32_t*>(stage.p_high + square_offset(row, column)) = high;
                *reinterpret_cast<uint32_t*>(stage.p_low + square_offset(row, column)) =
                    ptx::pack_bf16(p0 - ptx::bf16_low(high), p1 - ptx::bf16_high(high));
            } else {
                own_.lower[column][row] = column < row ? beta[row] * sum[2 * r] : 0.0f;
                own_.lower[column + 1][row] = column + 1 < row ? beta[row] * sum[2 * r + 1] : 0.0f;
            }
        }
    }

    // Adds x_i k_j 2^(G_i - G_j) for every pair that the products left out because either entry was steep. Sums with j
    // > i are meaningless, as they are in the products.
    __device__ __forceinline__ void add_steep_pairs(float (&sum)[4], bool is_P, int first_column) const {
        const uint8_t* x_tile = is_P ? own_.q : own_.k;
        const int row = lane_ / 4, column = first_column + 2 * (lane_ % 4);
        float raw[4] = {};  // before q and k are normalised
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const uint32_t pairs = own_.steep[0][side] | own_.steep[1][side];
            // Four channels at a time, so that loads and exponentials overlap.
            for (uint32_t fours = (pairs | pairs >> 1) & 0x55555555u; fours; fours &= fours - 1) {
                const int channel = 64 * side + 2 * (__ffs(fours) - 1);
                float G_i[2][4], G_j[2][4], x_i[2][4], k_j[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    load_four(G_i[n], x_i[n], x_tile, row + 8 * n, channel);
                    load_four(G_j[n], k_j[n], own_.k, column + n, channel);
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float G_from = G_j[e % 2][c], G_to = G_i[e / 2][c];
                        const float pair = x_i[e / 2][c] * k_j[e % 2][c] * ptx::exp2_approx(G_to - G_from);
                        if (is_steep(G_to) | is_steep(G_from)) raw[e] += pair;
                    }
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 norm_i = own_.norm[row + 8 * (e / 2)];
            sum[e] += raw[e] * (is_P ? norm_i.x : norm_i.y) * own_.norm[column + e % 2].y;
        }
    }

    __device__ __forceinline__ void load_four(float (&G)[4], float (&x)[4], const uint8_t* tile, int row,
                                              int channel) const {
        const float4 decay = *reinterpret_cast<const float4*>(&own_.g[decay_index(row, channel)]);
        const uint2 packed = *reinterpret_cast<const uint2*>(tile + tile_offset(row, channel));
        G[0] = decay.x, G[1] = decay.y, G[2] = decay.z, G[3] = decay.w;
        x[0] = ptx::bf16_low(packed.x), x[1] = ptx::bf16_high(packed.x);
        x[2] = ptx::bf16_low(packed.y), x[3] = ptx::bf16_high(packed.y);
    }

    // (I + L)^-1, a lane a column, and again in the other half of the warp, which stores the lower rows.
    __device__ __forceinline__ void invert(Stage& stage) {
        const int column = lane_ % 16;
        const bool lower = lane_ >= 16;
        float x[kChunk];
        invert_column<kChunk>(x, &own_.lower[0][0], column);
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) {
            *reinterpret_cast<__nv_bfloat16*>(stage.inverse + square_offset(i + kChunk / 2 * lower, column)) =
                __float2bfloat16(lower ? x[i + kChunk / 2] : x[i]);
        }
    }

    const ChunkKdaFwdParams& params_;
    const Work& work_;
    SharedMemory& smem_;
    Workspace& own_;
    const int group_, thread_, warp_, lane_;
    const int half_;     // of the chunk's tokens
    const int channel_;  // first of the thread's two
    const Gate gate_[2];
    uint32_t next_beta_ = 0;
};

}  // namespace kda::sm80
