// Builder warp: the 16 x 16 factors of one chunk.
//
//     L_ij = beta_i / (|k_i| |k_j|) sum_d k_i k_j 2^(G_i - G_j)     j < i          inverse = (I + L)^-1
//     P_ij = scale/|q_i| sum_d q_i k_j 2^(G_i - G_j)                j <= i
//
// of which the consumers get P and 1/|k| inverse beta, so that they have fewer factors to multiply themselves.
//
// The sums are tensor-core products of the decayed operands; entries too steep for those were left out of them, and
// their pairs are added by steep_pairs.cuh.
#pragma once

#include "common/gates.cuh"
#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"
#include "sm90/chunk_kda_fwd/steep_pairs.cuh"

namespace kda::sm90 {

class Builder {
 public:
    __device__ __forceinline__ Builder(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem, int index)
        : params_(params),
          work_(work),
          smem_(smem),
          lower_(smem.lower[index]),
          beta_(smem.beta[index]),
          lane_(threadIdx.x % 32),
          index_(index) {}

    __device__ __forceinline__ void run() {
        uint32_t next_beta = load_chunk_beta(index_);
        for (int chunk = index_; chunk < work_.steps; chunk += kBuilders) {
            const int slot = chunk % kInputs, stage_index = chunk % kStages;
            Stage& stage = smem_.stage[stage_index];
            const Input& input = smem_.input[slot];
            const uint32_t beta_bits = next_beta;
            next_beta = load_chunk_beta(chunk + kBuilders);

            ptx::mbarrier_wait(&smem_.input_full[slot], chunk / kInputs % 2);
            const Products products = multiply_same_tokens(input);
            ptx::mbarrier_wait(&smem_.scaled[stage_index], chunk / kStages % 2);  // also: the stage is free
            write_scalars(stage, products, beta_bits, min(work_.length - chunk * kChunk, kChunk));
            float L[2][4] = {}, P[2][4] = {};  // columns 0..7, 8..15
            multiply(L, P, stage);
            if (__builtin_expect(stage.felt[0] | stage.felt[1], false)) SteepPairs(stage, input).add(L, P);
            __syncwarp();
            if (lane_ == 0) ptx::mbarrier_arrive(&smem_.input_empty[slot]);
            write_squares(L, P, products, stage);
            __syncwarp();
            invert(stage);
            ptx::fence_async_proxy();
            __syncwarp();
            if (lane_ == 0) ptx::mbarrier_arrive(&smem_.built[stage_index]);
        }
    }

 private:
    // A lane a token.
    __device__ __forceinline__ uint32_t load_chunk_beta(int chunk) const {
        const int64_t token = int64_t(chunk) * kChunk + lane_;
        return lane_ < kChunk && token < work_.length ? load_beta(params_, work_, token) : 0;
    }

    // Whether the lane holds a diagonal entry of the two diagonal C tiles (rows and columns 0..7, 8..15), and of its
    // two columns whether the second.
    __device__ __forceinline__ bool on_diagonal() const { return lane_ / 8 == lane_ % 4; }
    __device__ __forceinline__ bool diagonal_element() const { return lane_ / 4 % 2; }

    // q q, k k and q k of two tokens, lane / 4 and lane / 4 + 8. Good in lanes on the diagonal.
    struct Products {
        float qq[2], kk[2], qk[2];
    };

    // The diagonals of Q Q^T, K K^T and Q K^T of raw rows: exact products, fp32 sums.
    __device__ __forceinline__ Products multiply_same_tokens(const Input& input) const {
        float qq[2][4] = {}, kk[2][4] = {}, qk[2][4] = {};
        const int offset = lane_ % 16 * kRowBytes + lane_ / 16 * 16;
        const uint32_t q_address = ptx::shared_address(input.q) + offset,
                       k_address = ptx::shared_address(input.k) + offset;
#pragma unroll 2
        for (int step = 0; step < kHeadDim / 16; ++step) {
            uint32_t q[4], k[4];  // as B operands, registers 0 and 2 are tokens 0..7, 1 and 3 tokens 8..15
            ptx::ldmatrix_x4(q, q_address + 32 * step);
            ptx::ldmatrix_x4(k, k_address + 32 * step);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ptx::mma_m16n8k16(qq[n], q, q[n], q[n + 2]);
                ptx::mma_m16n8k16(kk[n], k, k[n], k[n + 2]);
                ptx::mma_m16n8k16(qk[n], q, k[n], k[n + 2]);
            }
        }
        const bool odd = diagonal_element();
        Products products;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            products.qq[n] = odd ? qq[n][2 * n + 1] : qq[n][2 * n];
            products.kk[n] = odd ? kk[n][2 * n + 1] : kk[n][2 * n];
            products.qk[n] = odd ? qk[n][2 * n + 1] : qk[n][2 * n];
        }
        return products;
    }

    __device__ __forceinline__ void write_scalars(Stage& stage, const Products& products, uint32_t beta_bits,
                                                  int rows) const {
        if (on_diagonal()) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int token = lane_ / 4 + 8 * n;
                stage.q_norm[token] = params_.scale * (params_.use_qk_l2norm ? rsqrtf(products.qq[n] + 1e-6f) : 1.0f);
                stage.k_norm[token] = params_.use_qk_l2norm ? rsqrtf(products.kk[n] + 1e-6f) : 1.0f;
            }
        }
        if (lane_ < kChunk) {
            const float raw = __uint_as_float(params_.beta_dtype == Dtype::kFloat32 ? beta_bits : beta_bits << 16);
            beta_[lane_] = lane_ < rows ? activate_beta(raw, params_.beta_mode) : 0.0f;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void multiply(float (&L)[2][4], float (&P)[2][4], const Stage& stage) const {
        const int a_offset = half_tile_offset(lane_ % 16, 8 * (lane_ / 16));
        const int b_offset = half_tile_offset(lane_ % 8 + 8 * (lane_ / 16), 8 * (lane_ / 8 % 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t left = ptx::shared_address(stage.decayed[half]) + a_offset;
            const uint32_t right = ptx::shared_address(stage.k_inverse[half]) + b_offset;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                uint32_t k[4], q[4], b[4];
                ptx::ldmatrix_x4(k, left ^ (32 * step));
                ptx::ldmatrix_x4(q, (left + kChunk * 128) ^ (32 * step));
                ptx::ldmatrix_x4(b, right ^ (32 * step));
                ptx::mma_m16n8k16(L[0], k, b[0], b[1]);
                ptx::mma_m16n8k16(L[1], k, b[2], b[3]);
                ptx::mma_m16n8k16(P[0], q, b[0], b[1]);
                ptx::mma_m16n8k16(P[1], q, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void write_squares(const float (&L)[2][4], const float (&P)[2][4],
                                                  const Products& products, Stage& stage) const {
        const int row = lane_ / 4, column = 2 * (lane_ % 4);
        float q_norm[2], factor[2];
        float2 norm[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            q_norm[i] = stage.q_norm[row + 8 * i];
            factor[i] = beta_[row + 8 * i] * stage.k_norm[row + 8 * i];
            norm[i] = *reinterpret_cast<const float2*>(&stage.k_norm[column + 8 * i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int n = 0; n <= r; ++n) {  // the upper right tile of P stays zero
                // Masked by selection: entries above the diagonal may be infinite. On it, in lanes on the diagonal, P
                // is exact where the product of rounded factors is not.
                const bool below0 = n < r || column < row, below1 = n < r || column + 1 < row;
                const float p0 = q_norm[r] * (below0 ? P[n][2 * r] : column == row ? products.qk[n] : 0.0f);
                const float p1 = q_norm[r] * (below1 ? P[n][2 * r + 1] : column + 1 == row ? products.qk[n] : 0.0f);
                const int at = square_offset(row, column) + 256 * r + 128 * n;
                const uint32_t high = ptx::pack_bf16(p0, p1);
                *reinterpret_cast<uint32_t*>(stage.p_high + at) = high;
                *reinterpret_cast<uint32_t*>(stage.p_low + at) =
                    ptx::pack_bf16(p0 - ptx::bf16_low(high), p1 - ptx::bf16_high(high));
                // What is not below L's diagonal is never looked at.
                lower_[8 * n + column][8 * r + row] = factor[r] * norm[n].x * L[n][2 * r];
                lower_[8 * n + column + 1][8 * r + row] = factor[r] * norm[n].y * L[n][2 * r + 1];
            }
        }
    }

    // 1/|k| (I + L)^-1 beta, a lane a column.
    __device__ __forceinline__ void invert(Stage& stage) const {
        const int column = lane_ % 16;
        float x[kChunk];
        float4 norm[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) norm[i] = *reinterpret_cast<const float4*>(&stage.k_norm[4 * i]);
        const float beta = beta_[column];
        invert_column(x, lower_, column);
        if (lane_ < 16) {
#pragma unroll
            for (int i = 0; i < kChunk; i += 4) {
                const float4 n = norm[i / 4];
                const float scaled[4] = {x[i] * n.x, x[i + 1] * n.y, x[i + 2] * n.z, x[i + 3] * n.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    *reinterpret_cast<uint32_t*>(stage.inverse + word_offset(i + e, column)) =
                        ptx::round_tf32(scaled[e] * beta);
                }
            }
        }
    }

    const ChunkKdaFwdParams& params_;
    const Work& work_;
    SharedMemory& smem_;
    float (&lower_)[kChunk][kChunk];
    float (&beta_)[kChunk];
    const int lane_, index_;
};

}  // namespace kda::sm90
