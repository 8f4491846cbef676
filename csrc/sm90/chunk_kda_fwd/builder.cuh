// Builder warp: the 16 x 16 factors of one chunk.
//
//     L_ij = beta_i / (|k_i| |k_j|) sum_d k_i k_j 2^(G_i - G_j)     j < i          inverse = (I + L)^-1
//     P_ij = scale/|q_i| sum_d q_i k_j 2^(G_i - G_j)                j <= i
//
// of which the consumers get P, without its scale/|q|, and 1/|k| inverse beta, so that they have fewer factors to
// multiply themselves.
//
// The sums are tensor-core products of the decayed operands; entries too steep for those were left out of them, and
// their pairs are added by steep_pairs.cuh.
#pragma once

#include "common/gates.cuh"
#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"
#include "sm90/chunk_kda_fwd/steep_pairs.cuh"

namespace kda::sm90 {

template <Form kForm>
class Builder {
 public:
    __device__ __forceinline__ Builder(const ChunkKdaFwdParams& params, SharedMemory<kForm>& smem, int rank, int index)
        : params_(params),
          smem_(smem),
          own_(smem.blocks[index]),
          lane_(threadIdx.x % 32),
          rank_(rank),
          index_(index),
          slot_{index},
          place_{rank + kBlocks * index} {}

    __device__ __forceinline__ void run(const Segment&, const Work& work) {
        length_ = ptx::uniform(work.length);
        token_ = (rank_ + kBlocks * index_) * kChunk + lane_;
        beta_ = row_address(params_.beta, work, token_, work.v_head);
        uint32_t next_beta = load_next_beta();
        const int own = own_chunks<kBlocks>(ptx::uniform(work.chunks), rank_);
        auto slot = slot_;
        auto place = place_;
        int index;
        for (index = index_; index < own; index += kBuilders) {
            const int chunk = rank_ + kBlocks * index;
            const Stage stage = smem_.stages[place.index];
            const Input& input = smem_.input[slot.index];
            const uint32_t beta_bits = next_beta;
            next_beta = load_next_beta();

            ptx::mbarrier_wait(&smem_.input_full[slot.index], slot.parity);
            const Products products = multiply_same_tokens(input);
            ptx::mbarrier_wait(&smem_.scaled[place.index], place.parity);  // also: the stage is free
            const bool steep = stage.factors.steep[0] | stage.factors.steep[1];
            if (!steep) release(slot.index);  // only steep pairs need raw rows
            write_scalars(stage, products, beta_bits, min(length_ - chunk * kChunk, kChunk));
            float L[2][4] = {}, P[2][4] = {};  // columns 0..7, 8..15
            if (__builtin_expect(steep, false)) SteepPairs(stage, input).find(L, P);
            multiply(L, P, stage);
            if (__builtin_expect(steep, false)) {
                restore_keys(stage, input);
                release(slot.index);
            }
            write_p(P, products, stage);
            invert(L, stage);
            if (kBlocks > 1 || steep) ptx::fence_async_proxy();
            __syncwarp();
            if (ptx::arrives(lane_)) {
                ptx::mbarrier_arrive(&smem_.built[place.index]);
                if (kBlocks > 1 && lane_ == 0) send(stage, &smem_.built[place.index]);
            }
            slot.advance(kBuilders);
            place.advance(kBlocks * kBuilders);
        }
        index_ = index - own, slot_ = slot, place_ = place;
    }

 private:
    static constexpr int kBlocks = Roles<kForm>::kBlocks;

    __device__ __forceinline__ void release(int slot) const {
        __syncwarp();
        if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.input_empty[slot]);
    }

    // The stage to the other block, where the same stage is free, too: both blocks' consumers have left it.
    __device__ __forceinline__ void send(const Stage& stage, uint64_t* built) const {
        const uint32_t barrier = ptx::cluster_address(built, rank_ ^ 1);
        constexpr uint32_t kWideBytes = 2 * sizeof(WideOperands), kFactorsBytes = sizeof(Factors);
        ptx::mbarrier_arrive_expect_cluster(barrier, kWideBytes + kFactorsBytes);
        ptx::copy_to_cluster(ptx::cluster_address(stage.wide, rank_ ^ 1), stage.wide, kWideBytes, barrier);
        ptx::copy_to_cluster(ptx::cluster_address(&stage.factors, rank_ ^ 1), &stage.factors, kFactorsBytes, barrier);
    }

    // The bits of the lane's token in the builder's next chunk; whatever computes with them would wait for them here.
    __device__ __forceinline__ uint32_t load_next_beta() {
        uint32_t bits = 0;
        if (lane_ < kChunk && token_ < uint32_t(length_)) bits = load_beta(params_, beta_);
        token_ += kBlocks * kBuilders * kChunk, beta_ += kBlocks * kBuilders * kChunk * params_.beta.token_bytes;
        return bits;
    }

    // Whether the lane holds a diagonal entry of the two diagonal C tiles (rows and columns 0..7, 8..15), and of its
    // two columns whether the second.
    __device__ __forceinline__ bool on_diagonal() const { return lane_ / 8 == lane_ % 4; }
    __device__ __forceinline__ bool diagonal_element() const { return lane_ / 4 % 2; }

    // q q, k k and q k of two tokens, lane / 4 and lane / 4 + 8. Good in lanes on the diagonal.
    struct Products {
        float qq[2], kk[2], qk[2];
    };

    // Exact products of raw rows, fp32 sums, as diagonals of tensor-core products. Of eight tokens at a time, q over k
    // is the left operand of two: with k for q k and k k, with q for q q (and q k again).
    __device__ __forceinline__ Products multiply_same_tokens(const Input& input) const {
        float with_q[2][4] = {}, with_k[2][4] = {};
        // Registers 0 and 2 are of q, 1 and 3 of k.
        const uint32_t rows =
            ptx::shared_address(lane_ / 8 % 2 ? input.k : input.q) + lane_ % 8 * kRowBytes + lane_ / 16 * 16;
#pragma unroll 2
        for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                uint32_t x[4];
                ptx::ldmatrix_x4(x, rows + 8 * n * kRowBytes + 32 * step);
                ptx::mma_m16n8k16(with_q[n], x, x[0], x[2]);
                ptx::mma_m16n8k16(with_k[n], x, x[1], x[3]);
            }
        }
        const bool odd = diagonal_element();
        Products products;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            products.qq[n] = odd ? with_q[n][1] : with_q[n][0];
            products.qk[n] = odd ? with_k[n][1] : with_k[n][0];
            products.kk[n] = odd ? with_k[n][3] : with_k[n][2];
        }
        return products;
    }

    __device__ __forceinline__ void write_scalars(const Stage& stage, const Products& products, uint32_t beta_bits,
                                                  int rows) const {
        if (on_diagonal()) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                own_.squares[0][lane_ / 4 + 8 * n] = products.qq[n];
                own_.squares[1][lane_ / 4 + 8 * n] = products.kk[n];
            }
        }
        __syncwarp();
        // A lane a token of q, then of k; and of beta.
        const int token = lane_ % kChunk;
        const bool is_q = lane_ < kChunk;
        const float inverse = params_.use_qk_l2norm ? ptx::rsqrt_approx(own_.squares[!is_q][token] + 1e-6f) : 1.0f;
        (is_q ? stage.factors.q_norm : stage.factors.k_norm)[norm_index(token)] =
            is_q ? params_.scale * inverse : inverse;
        const float raw = __uint_as_float(params_.beta_dtype == Dtype::kFloat32 ? beta_bits : beta_bits << 16);
        if (is_q) own_.beta[token] = token < rows ? activate_beta(raw, params_.beta_mode) : 0.0f;
        __syncwarp();
    }

    __device__ __forceinline__ void multiply(float (&L)[2][4], float (&P)[2][4], const Stage& stage) const {
        const int a_offset = half_tile_offset(lane_ % 16, 8 * (lane_ / 16));
        const int b_offset = half_tile_offset(lane_ % 8 + 8 * (lane_ / 16), 8 * (lane_ / 8 % 2));
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const uint32_t left = ptx::shared_address(stage.wide[half].k_decayed) + a_offset;
            const uint32_t right = ptx::shared_address(stage.wide[half].k_inverse) + b_offset;
#pragma unroll 2
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

    // Steep halves of K are updated with k 2^(G_last-G-A), in the place of the operand that L and P needed.
    __device__ __forceinline__ void restore_keys(const Stage& stage, const Input& input) const {
        __syncwarp();
        // Four channels a lane, of two rows at a time, and loads of four times two rows before any store.
        const int lane = ptx::lane_id(), column = 4 * (lane & 15), odd = lane >> 4;
        const int first_two = half_tile_offset(odd, operand_column(column)) - 128 * odd;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (!stage.factors.steep[half]) continue;
            const int channel = 64 * half + column;
            float4 last = *reinterpret_cast<const float4*>(&input.g[decay_index(kChunk - 1, channel)]);
            last.x -= kAnchor, last.y -= kAnchor, last.z -= kAnchor, last.w -= kAnchor;
#pragma unroll 1
            for (int first = odd; first < kChunk; first += 8) {
                float4 G[4];
                uint2 k[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    G[i] = *reinterpret_cast<const float4*>(&input.g[decay_index(first + 2 * i, channel)]);
                    k[i] = *reinterpret_cast<const uint2*>(input.k + (first + 2 * i) * kRowBytes + 2 * channel);
                }
                const uint32_t row = ptx::shared_address(stage.wide[half].k_inverse) + 128 * first;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t decay0 = ptx::pack_bf16(ptx::exp2_approx(last.x - G[i].x),
                                                           ptx::exp2_approx(last.y - G[i].y)),
                                   decay1 = ptx::pack_bf16(ptx::exp2_approx(last.z - G[i].z),
                                                           ptx::exp2_approx(last.w - G[i].w));
                    // Row odd + 2 i of eight; the other two channels are in the piece beside, which bit 4 tells.
                    const uint32_t at = row + ((first_two ^ (32 * i)) + 256 * i);
                    ptx::store_shared(at, ptx::multiply_bf16(k[i].x, decay0));
                    ptx::store_shared(at ^ 16, ptx::multiply_bf16(k[i].y, decay1));
                }
            }
        }
    }

    __device__ __forceinline__ void write_p(const float (&P)[2][4], const Products& products,
                                            const Stage& stage) const {
        const int row = lane_ / 4, column = 2 * (lane_ % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int n = 0; n <= r; ++n) {
                // Masked by selection: entries above the diagonal may be infinite. On it, in lanes on the diagonal, P
                // is exact where the product of rounded factors is not.
                const bool below0 = n < r || column < row, below1 = n < r || column + 1 < row;
                const float p0 = below0 ? P[n][2 * r] : column == row ? products.qk[n] : 0.0f;
                const float p1 = below1 ? P[n][2 * r + 1] : column + 1 == row ? products.qk[n] : 0.0f;
                *reinterpret_cast<uint2*>(stage.factors.p + factor_offset(row + 8 * r, column + 8 * n)) =
                    make_uint2(ptx::round_tf32(p0), ptx::round_tf32(p1));
            }
        }
    }

    // 1/|k| (I + L)^-1 beta, by blocks of 8 x 8:
    //
    //     (I + L)^-1 = [    A     0 ]      A, B: inverses of the blocks on the diagonal, by forward substitution
    //                  [ -B C A   B ]      C: L's block below them
    __device__ __forceinline__ void invert(const float (&L)[2][4], const Stage& stage) const {
        const int row = lane_ / 4, column = 2 * (lane_ % 4);
        float factor[2];
        float2 norm[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = own_.beta[row + 8 * i] * stage.factors.k_norm[norm_index(row + 8 * i)];
            norm[i] = *reinterpret_cast<const float2*>(&stage.factors.k_norm[norm_index(column + 8 * i)]);
            // What is not below the diagonal is never looked at.
            float* target = &own_.lower[i][12 * column + row];
            target[0] = factor[i] * norm[i].x * L[i][2 * i], target[12] = factor[i] * norm[i].y * L[i][2 * i + 1];
        }
        const float below[2] = {factor[1] * norm[0].x * L[0][2], factor[1] * norm[0].y * L[0][3]};
        __syncwarp();
        invert_blocks(stage);
        __syncwarp();

        // Transposed, a C tile is the next product's left operand: first A^T C^T, then (A^T C^T) B^T.
        const float2 a = *reinterpret_cast<const float2*>(&own_.inverse[0][12 * row + column]);
        const float* b = &own_.inverse[1][12 * column + row];
        float product[2] = {a.x, a.y};
        multiply_blocks(product, below[0], below[1]);
        multiply_blocks(product, b[0], b[12]);
        const float2 row_norm = *reinterpret_cast<const float2*>(&stage.factors.k_norm[norm_index(8 + column)]);
        const float beta = own_.beta[row];
        *reinterpret_cast<uint32_t*>(stage.factors.inverse + factor_offset(8 + column, row)) =
            ptx::round_tf32(-row_norm.x * product[0] * beta);
        *reinterpret_cast<uint32_t*>(stage.factors.inverse + factor_offset(9 + column, row)) =
            ptx::round_tf32(-row_norm.y * product[1] * beta);
    }

    // A lane a column of a block, twice in the warp.
    __device__ __forceinline__ void invert_blocks(const Stage& stage) const {
        const int column = lane_ % 8, block = lane_ / 8 % 2;
        float x[8];
        invert_column<12>(x, own_.lower[block], column);
        float* target = &own_.inverse[block][12 * column];
        *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<float4*>(target + 4) = make_float4(x[4], x[5], x[6], x[7]);
        const float beta = own_.beta[8 * block + column];
        uint8_t* scaled = stage.factors.inverse + factor_offset(8 * block, 8 * block + column);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float2 norm = *reinterpret_cast<const float2*>(&stage.factors.k_norm[norm_index(8 * block + i)]);
            *reinterpret_cast<uint32_t*>(scaled + 32 * i) = ptx::round_tf32(norm.x * x[i] * beta);
            *reinterpret_cast<uint32_t*>(scaled + 32 * (i + 1)) = ptx::round_tf32(norm.y * x[i + 1] * beta);
        }
    }

    // x (8 x 8, the upper half of a C tile) becomes x y, where the lane holds y's rows `column` and column + 1, column
    // `row`. Three tf32 products, so that the error is that of fp32.
    static __device__ __forceinline__ void multiply_blocks(float (&x)[2], float y0, float y1) {
        const float2 high = make_float2(tf32_part(x[0]), tf32_part(x[1]));
        const uint32_t y_high[2] = {__float_as_uint(tf32_part(y0)), __float_as_uint(tf32_part(y1))};
        const uint32_t y_low[2] = {__float_as_uint(y0 - __uint_as_float(y_high[0])),
                                   __float_as_uint(y1 - __uint_as_float(y_high[1]))};
        const uint32_t x_high[4] = {__float_as_uint(high.x), 0, __float_as_uint(high.y), 0};
        const uint32_t x_low[4] = {__float_as_uint(x[0] - high.x), 0, __float_as_uint(x[1] - high.y), 0};
        float product[4] = {};
        ptx::mma_m16n8k8_tf32(product, x_low, y_high);
        ptx::mma_m16n8k8_tf32(product, x_high, y_low);
        ptx::mma_m16n8k8_tf32(product, x_high, y_high);
        x[0] = product[0], x[1] = product[1];
    }

    static __device__ __forceinline__ float tf32_part(float x) {
        return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    }

    const ChunkKdaFwdParams& params_;
    SharedMemory<kForm>& smem_;
    Blocks& own_;
    const int lane_, rank_;
    int length_, index_;  // of the work's own chunks, the builder's next one
    ptx::RingPlace<Roles<kForm>::kInputs> slot_;
    ptx::RingPlace<Roles<kForm>::kStages> place_;
    uint32_t token_;  // of the next beta that the lane loads, and its address
    const char* beta_;
};

}  // namespace kda::sm90
