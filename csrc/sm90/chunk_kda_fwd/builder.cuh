// Builder warp: the 16 x 16 factors of one chunk.
//
//     L_ij = beta_i / (|k_i| |k_j|) sum_d k_i k_j 2^(G_i - G_j)     j < i          inverse = (I + L)^-1
//     P_ij = sum_d q_i k_j 2^(G_i - G_j)                            j <= i         (norms of q and k are left to the consumers)
//
// The sums are tensor-core products of the decayed operands. Where G is too steep for those, the entry was left out of them and
// its pairs are added one by one in fp32, where 2^(G_i - G_j) <= 1 cannot overflow. The choice is made entry by entry from the
// gates up to that token alone, so nothing that comes later changes a rounding.
#pragma once

#include "common/gates.cuh"
#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"
#include "sm90/chunk_kda_fwd/scaler.cuh"

namespace kda::sm90 {

class Builder {
   public:
    __device__ __forceinline__ Builder(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem, int index)
        : params_(params), work_(work), smem_(smem), lower_(smem.lower[index]), lane_(threadIdx.x % 32), index_(index) {}

    __device__ __forceinline__ void run() {
        uint32_t next_beta = load_beta(index_);
        for (int chunk = index_; chunk < work_.chunks; chunk += kBuilders) {
            const int slot = chunk % kInputs, stage_index = chunk % kStages;
            Stage& stage = smem_.stage[stage_index];
            const Input& input = smem_.input[slot];
            const uint32_t beta_bits = next_beta;
            next_beta = load_beta(chunk + kBuilders);

            ptx::mbarrier_wait(&smem_.input_full[slot], chunk / kInputs % 2);
            const Products products = multiply_same_tokens(input);
            ptx::mbarrier_wait(&smem_.scaled[stage_index], chunk / kStages % 2);  // also: the stage is free
            write_scalars(stage, products, beta_bits, min(work_.length - chunk * kChunk, kChunk));
            float L[2][4] = {}, P[2][4] = {};  // columns 0..7, 8..15
            multiply(L, P, stage);
            if (stage.pairwise[0] | stage.pairwise[1]) add_steep_pairs(L, P, stage, input);
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
    // The bits of one token's beta; whatever computes with them would wait for them here.
    __device__ __forceinline__ uint32_t load_beta(int chunk) const {
        const int64_t token = int64_t(chunk) * kChunk + lane_;
        if (lane_ >= kChunk || token >= work_.length) return 0;
        const int64_t index = (work_.first_token + token) * params_.num_v_heads + work_.v_head;
        return params_.beta_dtype == Dtype::kFloat32 ? static_cast<const uint32_t*>(params_.beta)[index]
                                                     : static_cast<const uint16_t*>(params_.beta)[index];
    }

    // Whether the lane holds a diagonal entry of the two diagonal C tiles (rows and columns 0..7, 8..15), and of its two columns
    // whether the second.
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
        const uint32_t q_address = ptx::shared_address(input.q) + offset, k_address = ptx::shared_address(input.k) + offset;
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

    __device__ __forceinline__ void write_scalars(Stage& stage, const Products& products, uint32_t beta_bits, int rows) const {
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
            stage.beta[lane_] = lane_ < rows ? activate_beta(raw, params_.beta_mode) : 0.0f;
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

    // Adds x_i k_j 2^(G_i - G_j) for every pair that the products left out because either entry was steep. Sums with j > i are
    // meaningless, as they are in the products.
    __device__ __forceinline__ void add_steep_pairs(float (&L)[2][4], float (&P)[2][4], const Stage& stage, const Input& input) const {
        const int row = lane_ / 4, column = 2 * (lane_ % 4);
        for (int half = 0; half < 2; ++half) {
            const uint32_t pairs = stage.pairwise[half];
            // Four channels at a time, so that loads and exponentials overlap.
            for (uint32_t fours = (pairs | pairs >> 1) & 0x55555555u; fours; fours &= fours - 1) {
                const int channel = 64 * half + 2 * (__ffs(fours) - 1);
                float G_i[2][4], k_i[2][4], q_i[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    load_decay(G_i[r], input, row + 8 * r, channel);
                    load_four(k_i[r], input.k, row + 8 * r, channel);
                    load_four(q_i[r], input.q, row + 8 * r, channel);
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int j = column + 8 * (e / 2) + e % 2;
                    float G_j[4], k_j[4];
                    load_decay(G_j, input, j, channel);
                    load_four(k_j, input.k, j, channel);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float decayed = k_j[c] * ptx::exp2_approx(G_i[r][c] - G_j[c]);
                            if (is_steep(G_i[r][c]) | is_steep(G_j[c])) {
                                L[e / 2][2 * r + e % 2] += k_i[r][c] * decayed;
                                P[e / 2][2 * r + e % 2] += q_i[r][c] * decayed;
                            }
                        }
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void load_decay(float (&G)[4], const Input& input, int row, int channel) {
        const float4 decay = *reinterpret_cast<const float4*>(&input.g[decay_index(row, channel)]);
        G[0] = decay.x, G[1] = decay.y, G[2] = decay.z, G[3] = decay.w;
    }

    static __device__ __forceinline__ void load_four(float (&x)[4], const uint8_t* rows, int row, int channel) {
        const uint2 packed = *reinterpret_cast<const uint2*>(rows + row * kRowBytes + 2 * channel);
        x[0] = ptx::bf16_low(packed.x), x[1] = ptx::bf16_high(packed.x);
        x[2] = ptx::bf16_low(packed.y), x[3] = ptx::bf16_high(packed.y);
    }

    // Masks by selection: entries above the diagonal may be infinite.
    __device__ __forceinline__ void write_squares(const float (&L)[2][4], const float (&P)[2][4], const Products& products,
                                                  Stage& stage) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int column = 8 * n + 2 * (lane_ % 4);
            const float2 norm_j = *reinterpret_cast<const float2*>(&stage.k_norm[column]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = lane_ / 4 + 8 * r;
                // The diagonal lies in lanes on the diagonal, where n == r. It is exact where P's product of rounded factors is not.
                const float p0 = column < row ? P[n][2 * r] : column == row ? products.qk[n] : 0.0f;
                const float p1 = column + 1 < row ? P[n][2 * r + 1] : column + 1 == row ? products.qk[n] : 0.0f;
                const uint32_t high = ptx::pack_bf16(p0, p1);
                *reinterpret_cast<uint32_t*>(stage.p_high + square_offset(row, column)) = high;
                *reinterpret_cast<uint32_t*>(stage.p_low + square_offset(row, column)) =
                    ptx::pack_bf16(p0 - ptx::bf16_low(high), p1 - ptx::bf16_high(high));
                const float factor = stage.beta[row] * stage.k_norm[row];
                lower_[column][row] = column < row ? factor * norm_j.x * L[n][2 * r] : 0.0f;
                lower_[column + 1][row] = column + 1 < row ? factor * norm_j.y * L[n][2 * r + 1] : 0.0f;
            }
        }
    }

    // (I + L)^-1, a lane a column.
    __device__ __forceinline__ void invert(Stage& stage) const {
        const int column = lane_ % 16;
        float x[kChunk];
        invert_column(x, lower_, column);
        if (lane_ < 16) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                *reinterpret_cast<__nv_bfloat16*>(stage.inverse + square_offset(i, column)) = __float2bfloat16(x[i]);
            }
        }
    }

    const ChunkKdaFwdParams& params_;
    const Work& work_;
    SharedMemory& smem_;
    float (&lower_)[kChunk][kChunk];
    const int lane_, index_;
};

}  // namespace kda::sm90
