// Consumer warpgroup: the recurrence over chunks for 64 columns of V, with the state in wgmma accumulators.
//
//     U' = inverse' (V - Kd S / |k|)      O = scale/|q| (Qd S + P U')      S <- diag(gamma) (S + Ki^T U')
//
// with Kd = k 2^G, Qd = q 2^G, Ki = k 2^-G of raw q and k, U' = U / |k|, and the builders' inverse', which holds the
// other norms and beta. S^T (64 x 128 fp32, as 2^-A S^T) is two accumulators, one for each half of K. Rounded to bf16
// it is the A operand of S^T [Kd; Qd]^T, and U'^T that of the update in two bf16 terms. Between those two, each warp
// multiplies its 16 x 16 by the inverse, and U'^T by P^T, by itself and in tf32. Each product leaves its result in the
// layout in which the next one takes it, so that nothing is exchanged between lanes. A half of K with steep entries is
// decayed before its update, by k 2^(G_last - G), instead of after it.
#pragma once

#include "common/sequence.cuh"
#include "common/small_products.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

template <Form kForm>
class Consumer {
 public:
    // `warp`: of the eight that share V, 16 columns each.
    __device__ __forceinline__ Consumer(const ChunkKdaFwdParams& params, SharedMemory<kForm>& smem, int warp)
        : params_(params),
          smem_(smem),
          lane_(threadIdx.x % 32),
          warp_(warp),
          values_offset_(ptx::kept((lane_ % 8 + 8 * (lane_ / 16)) * Roles<kForm>::kValueRowBytes +
                                   32 * (warp % Roles<kForm>::kConsumerWarps) + 16 * (lane_ / 8 % 2))),
          factor_offset_(ptx::kept(8 * lane_)),
          four_(ptx::kept(4 * (lane_ % 4))) {}

    __device__ __forceinline__ void run(const Segment& segment, const Work& work) {
        // The first rows are waited for longest. Behind all loads of a state they would come thousands of clocks later.
        ptx::mbarrier_wait(&smem_.first_loads, 0);
        load_state(segment, work);
        const int chunks = ptx::uniform(work.chunks);
        if (chunks > 0) run_chunks(chunks);
        store_state(segment, work);
    }

 private:
    // Of the state, the lane holds rows value_of(0) and value_of(1) of V, and of K four columns of every 16, from
    // key_of(h, step) on, half of them in one C tile and half in the next (operand_column).
    __device__ __forceinline__ int value_of(int r) const { return 16 * warp_ + lane_ / 4 + 8 * r; }
    __device__ __forceinline__ int key_of(int h, int step) const { return 64 * h + 16 * step + four_; }

    // The state between two segments, where both run for good.
    __device__ __forceinline__ float* inner_state(const Segment& segment, const Work& work, int index) const {
        return params_.pass == Pass::kTurn ? params_.carried + work.state * kHeadDim * kHeadDim
                                           : segment_map(params_, segment.sequence, index, segment.v_head, 1);
    }

    // The caller's states at a sequence's ends, others between segments, and for M the identity.
    __device__ __forceinline__ void load_state(const Segment& segment, const Work& work) {
        const bool inner = segment.index > 0;
        const float* source = inner ? nullptr : params_.initial_state;
        if (source) source += work.state * kHeadDim * kHeadDim;
        if (inner && params_.pass != Pass::kMaps) source = inner_state(segment, work, segment.index - 1);
        ptx::wait_for_previous_launch();
        // A loop for each case, so that its loads are under way together.
        const bool v_first = inner || params_.state_v_first;
        if (source && v_first) {
            for_fours([&](int value, int key, float4 x) {
                return *reinterpret_cast<const float4*>(source + value * kHeadDim + key);
            });
        } else if (source) {
            for_fours([&](int value, int key, float4 x) {
                const float* column = source + key * kHeadDim + value;
                return make_float4(column[0], column[kHeadDim], column[2 * kHeadDim], column[3 * kHeadDim]);
            });
        } else {
            const float diagonal = segment.is_map ? 1.0f : 0.0f;
            for_fours([&](int value, int key, float4 x) {
                return make_float4(value == key ? diagonal : 0.0f, value == key + 1 ? diagonal : 0.0f,
                                   value == key + 2 ? diagonal : 0.0f, value == key + 3 ? diagonal : 0.0f);
            });
        }
        scale_state(kAnchorInverse);
    }

    // f(row of V, first column of K, the state at four columns) gives the state at these columns, all that the lane
    // holds.
    template <typename F>
    __device__ __forceinline__ void for_fours(const F& f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* x = &state_[h][8 * step + 2 * r];
                    const float4 four = f(value_of(r), key_of(h, step), make_float4(x[0], x[1], x[4], x[5]));
                    x[0] = four.x, x[1] = four.y, x[4] = four.z, x[5] = four.w;
                }
            }
        }
    }

    __device__ __forceinline__ void scale_state(float factor) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 32; ++i) state_[h][i] *= factor;
        }
    }

    __device__ __forceinline__ void store_state(const Segment& segment, const Work& work) {
        const bool inner = params_.pass != Pass::kWhole && segment.index < params_.segments - 1;
        if (inner && params_.pass == Pass::kReplay) return;  // known from the maps
        float* target = params_.final_state;
        if (target) target += work.state * kHeadDim * kHeadDim;
        if (segment.is_map)
            target = segment_map(params_, segment.sequence, segment.index, segment.v_head, 0);
        else if (inner)
            target = inner_state(segment, work, segment.index);
        if (!target) return;
        const bool v_first = inner || params_.state_v_first;
        scale_state(kAnchorScale);
        if (v_first) {
            for_fours([&](int value, int key, float4 x) {
                *reinterpret_cast<float4*>(target + value * kHeadDim + key) = x;
                return x;
            });
        } else {
            for_fours([&](int value, int key, float4 x) {
                float* column = target + key * kHeadDim + value;
                column[0] = x.x, column[kHeadDim] = x.y, column[2 * kHeadDim] = x.z, column[3 * kHeadDim] = x.w;
                return x;
            });
        }
    }

    // Where a chunk's factors and its v are.
    struct Place {
        ptx::RingPlace<Roles<kForm>::kStages> stage;
        ptx::RingPlace<Roles<kForm>::kValues> slot;
    };

    __device__ __forceinline__ void run_chunks(int chunks) {
        Place next = next_;
        uint32_t rounded[2][4][4];  // the state in bf16, A operands of 16 channels each
        round_half(rounded[0], 0), round_half(rounded[1], 1);
        wait_for(next);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const Place place = next;
            const Stage stage = smem_.stages[place.stage.index];
            // S^T [Kd; Qd]^T: C tiles 0 and 1 are (Kd S)^T, 2 and 3 (Qd S)^T, tokens 0..7 and 8..15 each.
            float product[4][4];
            multiply_state(product, rounded, stage);
            Operands operands;
            load_operands(operands, stage, place.slot.index);
            ptx::wgmma_wait<0>();
            next.stage.advance(), next.slot.advance();
            const bool last = chunk + 1 == chunks;
            // Apart from each other, so that code for steep chunks, which are rare, does not lie between what all
            // others execute: the instruction cache is small.
            if (__builtin_expect(stage.factors.steep[0] | stage.factors.steep[1], 0))
                update_state<true>(product, rounded, operands, stage, place, next, last);
            else
                update_state<false>(product, rounded, operands, stage, place, next, last);
            __syncwarp();
            if (ptx::arrives(lane_)) leave(place.stage.index);
        }
        next_ = next;
    }

    // To the scalers that will fill the stage again: those of always the same block, since their number divides
    // kStages.
    __device__ __forceinline__ void leave(int stage) const {
        if constexpr (Roles<kForm>::kBlocks == 1)
            ptx::mbarrier_arrive(&smem_.stage_empty[stage]);
        else
            ptx::mbarrier_arrive_cluster(
                ptx::cluster_address(&smem_.stage_empty[stage], stage % Roles<kForm>::kBlocks));
    }

    __device__ __forceinline__ void wait_for(const Place& place) const {
        ptx::mbarrier_wait(&smem_.built[place.stage.index], place.stage.parity);  // builders waited for the operands
        ptx::mbarrier_wait(&smem_.values_full[place.slot.index], place.slot.parity);
    }

    __device__ __forceinline__ void round_half(uint32_t (&rounded)[4][4], int h) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                rounded[step][i] = ptx::pack_bf16(state_[h][8 * step + 2 * i], state_[h][8 * step + 2 * i + 1]);
        }
    }

    // Begins the product. Its operand must stay until it is done.
    __device__ __forceinline__ void multiply_state(float (&product)[4][4], const uint32_t (&rounded)[2][4][4],
                                                   const Stage& stage) const {
        uint64_t decayed = ptx::operand_swizzled_128(ptx::shared_address(stage.wide[0].k_decayed));  // and q's after it
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            ptx::wgmma_m64n32k16<0>(product[0], rounded[step / 4][step % 4], decayed, step > 0);
            ptx::advance_operand(decayed, step == 3 ? int(sizeof(WideOperands)) - 3 * 32 : 32);
        }
        ptx::wgmma_commit();
    }

    // What the product is needed for.
    struct Operands {
        uint32_t v[4], inverse[3][2];
        float2 k_norm[2];
    };

    __device__ __forceinline__ void load_operands(Operands& operands, const Stage& stage, int slot) const {
        ptx::ldmatrix_x4_trans(operands.v, values_address(slot));
        load_norms(operands.k_norm, stage.factors.k_norm);
        load_factor(operands.inverse, stage.factors.inverse);
    }

    // Ends when the next chunk is ready.
    template <bool kHasSteep>
    __device__ __forceinline__ void update_state(float (&product)[4][4], uint32_t (&rounded)[2][4][4],
                                                 const Operands& operands, const Stage& stage, const Place& place,
                                                 const Place& next, bool last) {
        // All that is loaded is loaded here, while nothing keeps the tensor cores busy: what is asked for beside a
        // wgmma comes when that is done.
        float2 gamma[2][8], q_norm[2];
        uint32_t p[3][2];
        load_gamma(gamma[0], stage, 0), load_gamma(gamma[1], stage, 1);
        load_factor(p, stage.factors.p);
        load_norms(q_norm, stage.factors.q_norm);
        const bool ready = ptx::mbarrier_test(&smem_.built[next.stage.index], next.stage.parity) &
                           ptx::mbarrier_test(&smem_.values_full[next.slot.index], next.slot.parity);
        // (V - Kd S / |k|)^T as A operands of 8 tokens, the even ones before the odd ones; then U'^T
        uint32_t remainder[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t v = operands.v[2 * n + r];
                const float2 norm = operands.k_norm[n];
                remainder[n][r] = ptx::round_tf32(ptx::bf16_low(v) - norm.x * product[n][2 * r]);
                remainder[n][r + 2] = ptx::round_tf32(ptx::bf16_high(v) - norm.y * product[n][2 * r + 1]);
            }
        }
        float u[2][4] = {};
        multiply_triangle(u, remainder, operands.inverse);
        uint32_t high[4], low[4];
        split_operand(high, low, u[0]);

        if constexpr (kHasSteep) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (stage.factors.steep[h]) decay_half(h, gamma[h]);
            }
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint64_t k = ptx::operand_swizzled_128(ptx::shared_address(stage.wide[h].k_inverse));
            ptx::wgmma_m64n64k16<1>(state_[h], high, k, true);
            ptx::wgmma_m64n64k16<1>(state_[h], low, k, true);
            ptx::wgmma_commit();
        }
        // From here on in the shadow of the update.
        write_output(product, u, p, q_norm, place.slot.index);
        const bool all_ready = __all_sync(~0u, ready);
        ptx::wgmma_wait<1>();
        if (!(kHasSteep && stage.factors.steep[0])) decay_half(0, gamma[0]);
        round_half(rounded[0], 0);
        // Here, since the compiler would gather both waits for the update if nothing stood between them.
        if (!(all_ready | last)) wait_for(next);
        ptx::wgmma_wait<0>();
        if (!(kHasSteep && stage.factors.steep[1])) decay_half(1, gamma[1]);
        round_half(rounded[1], 1);
    }

    // O = scale/|q| (Qd S + P U'), the warp's 16 tokens x 16 values, in the place of its v. The mover takes it from
    // there.
    __device__ __forceinline__ void write_output(float (&product)[4][4], const float (&u)[2][4],
                                                 const uint32_t (&p)[3][2], const float2 (&q_norm)[2], int slot) const {
        uint32_t u_words[2][4], packed[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u_words[n][r] = ptx::round_tf32(u[n][2 * r]);
                u_words[n][r + 2] = ptx::round_tf32(u[n][2 * r + 1]);
            }
        }
        float (&out)[2][4] = reinterpret_cast<float (&)[2][4]>(product[2]);
        multiply_triangle(out, u_words, p);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                packed[2 * n + r] = ptx::pack_bf16(q_norm[n].x * out[n][2 * r], q_norm[n].y * out[n][2 * r + 1]);
            }
        }
        ptx::stmatrix_x4_trans(values_address(slot), packed);
        __syncwarp();
        if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.values_done[slot]);
    }

    // The lane's row of the four matrices, of which matrix m is tokens 8 (m / 2), values 8 (m % 2), of the warp's own
    // part of v.
    __device__ __forceinline__ uint32_t values_address(int slot) const {
        return ptx::shared_address(smem_.values[slot]) + values_offset_;
    }

    // The lane's B operands of the transposed factor: tiles (0, 0), (1, 0), (1, 1).
    __device__ __forceinline__ void load_factor(uint32_t (&b)[3][2], const Factor& factor) const {
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) {
            const uint2 pair = *reinterpret_cast<const uint2*>(factor + tile * kTileBytes + factor_offset_);
            b[tile][0] = pair.x, b[tile][1] = pair.y;
        }
    }

    // y += x factor^T, of which the lower left tile is zero.
    static __device__ __forceinline__ void multiply_triangle(float (&y)[2][4], const uint32_t (&x)[2][4],
                                                             const uint32_t (&factor)[3][2]) {
        ptx::mma_m16n8k8_tf32(y[0], x[0], factor[0]);
        ptx::mma_m16n8k8_tf32(y[1], x[0], factor[1]);
        ptx::mma_m16n8k8_tf32(y[1], x[1], factor[2]);
    }

    // Of the lane's columns of two C tiles.
    __device__ __forceinline__ void load_norms(float2 (&norm)[2], const float* source) const {
        const float4 four = *reinterpret_cast<const float4*>(source + four_);
        norm[0] = make_float2(four.x, four.y), norm[1] = make_float2(four.z, four.w);
    }

    __device__ __forceinline__ void load_gamma(float2 (&gamma)[8], const Stage& stage, int h) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const float4 four = *reinterpret_cast<const float4*>(&stage.factors.gamma[key_of(h, step)]);
            gamma[2 * step] = make_float2(four.x, four.y), gamma[2 * step + 1] = make_float2(four.z, four.w);
        }
    }

    __device__ __forceinline__ void decay_half(int h, const float2 (&gamma)[8]) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float* tile = &state_[h][4 * n];
            tile[0] *= gamma[n].x, tile[1] *= gamma[n].y, tile[2] *= gamma[n].x, tile[3] *= gamma[n].y;
        }
    }

    const ChunkKdaFwdParams& params_;
    SharedMemory<kForm>& smem_;
    const int lane_, warp_;
    // Of the lane: its row of v or o, its B operands in a tile of a factor, and its first of four columns.
    const int values_offset_, factor_offset_, four_;
    float state_[2][32];
    Place next_;
};

}  // namespace kda::sm90
