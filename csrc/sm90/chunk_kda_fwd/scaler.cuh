// Scaler warp: gates of one chunk and half of K (64 channels, two a lane), and q and k decayed by them.
//
//     G_i = sum of log2 gates up to i
//     k 2^(G+A)    q 2^(G+A)    k 2^(-G-A)    gamma = 2^G_last
//
// q and k are not normalised here: their norms multiply sixteen rows of results later instead of all of these operands.
#pragma once

#include "common/gates.cuh"
#include "common/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"
#include "sm90/chunk_kda_fwd/steep_pairs.cuh"

namespace kda::sm90 {

template <typename GateT, Form kForm>
class Scaler {
 public:
    __device__ __forceinline__ Scaler(const ChunkKdaFwdParams& params, SharedMemory<kForm>& smem, int rank, int warp)
        : params_(params),
          smem_(smem),
          rank_(rank),
          lane_(threadIdx.x % 32),
          half_(warp % 2),
          pair_(warp / 2),
          column_(half_tile_offset(0, operand_column(2 * lane_))),
          index_(pair_),
          slot_{pair_},
          place_{rank_ + kBlocks * pair_, 1} {}

    __device__ __forceinline__ void run(const Segment&, const Work& work) {
        length_ = ptx::uniform(work.length);
        own_ = own_chunks<kBlocks>(ptx::uniform(work.chunks), rank_);
        gate_[0] = Gate(params_, work.v_head, 64 * half_ + 2 * lane_);
        gate_[1] = Gate(params_, work.v_head, 64 * half_ + 2 * lane_ + 1);
        switch (params_.gate_mode) {
            case GateMode::kGiven: run<GateMode::kGiven>(); break;
            case GateMode::kSoftplus: run<GateMode::kSoftplus>(); break;
            default: run<GateMode::kBounded>();
        }
    }

 private:
    static constexpr int kBlocks = Roles<kForm>::kBlocks;
    static constexpr int kRows = SteepChannel::kRows;  // unrolled together, so that their exponentials overlap
    static_assert(kChunk % kRows == 0);

    template <GateMode kMode>
    __device__ __forceinline__ void run() {
        bool steep = false;  // whether the last chunk was
        const int own = own_;
        auto slot = slot_;
        auto place = place_;
        int index;
        for (index = index_; index < own; index += kScalerPairs) {
            Input& input = smem_.input[slot.index];
            const Stage stage = smem_.stages[place.index];
            ptx::mbarrier_wait(&smem_.input_full[slot.index], slot.parity);
            ptx::mbarrier_wait(&smem_.stage_empty[place.index], place.parity);
            const int rows = min(length_ - (rank_ + kBlocks * index) * kChunk, kChunk);
            // Steep chunks follow one another: after one, the next is at once taken for one.
            if (__builtin_expect(!steep, true)) steep = scale_mild<kMode>(input, stage, rows);
            if (__builtin_expect(steep, false)) steep = scale_steep<kMode>(input, stage, rows);
            ptx::fence_async_proxy();
            __syncwarp();
            if (ptx::arrives(lane_)) {
                ptx::mbarrier_arrive(&smem_.scaled[place.index]);
                ptx::mbarrier_arrive(&smem_.input_empty[slot.index]);
            }
            slot.advance(kScalerPairs);
            place.advance(kBlocks * kScalerPairs);
        }
        index_ = index - own, slot_ = slot, place_ = place;
    }

    // Whether an entry is steep, so that all has to be done again.
    template <GateMode kMode>
    __device__ __forceinline__ bool scale_mild(const Input& input, const Stage& stage, int rows) const {
        // Sums start from zero: beside an anchor, slow gates would be lost in its rounding.
        float2 G = make_float2(0.0f, 0.0f);
        bool steep = false;
#pragma unroll 1
        for (int first = 0; first < kChunk; first += kRows) {
            float2 sum[kRows];
            Operands x[kRows];
            const uint32_t row = operand_row(stage, first);
            sum_gates<kMode>(sum, G, input, first, rows);
            G = sum[kRows - 1];
#pragma unroll
            for (int i = 0; i < kRows; ++i) x[i] = load(input, first, i);  // before any store
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if constexpr (kMode == GateMode::kGiven) steep = steep | is_steep(sum[i].x) | is_steep(sum[i].y);
                const float2 exponent = make_float2(sum[i].x + kAnchor, sum[i].y + kAnchor);
                store(row, i, x[i], ptx::exp2_approx(exponent.x), ptx::exp2_approx(exponent.y),
                      ptx::exp2_approx(-exponent.x), ptx::exp2_approx(-exponent.y));
            }
        }
        store_gamma(stage, G);
        if (lane_ == 0) stage.factors.steep[half_] = 0, stage.factors.felt[half_] = 0;
        // Sums only fall, unless a given gate is positive, so that the steepest is the last.
        if constexpr (kMode != GateMode::kGiven) steep = is_steep(G.x) | is_steep(G.y);
        return __any_sync(~0u, steep);
    }

    // The same for any gates: steep keys leave the products, G takes the place of g, and the pairs that are left out
    // are prepared for.
    template <GateMode kMode>
    __device__ __forceinline__ bool scale_steep(Input& input, const Stage& stage, int rows) const {
        float2 G = make_float2(0.0f, 0.0f);
        SteepChannel channels[2];
#pragma unroll 1
        for (int first = 0; first < kChunk; first += kRows) {
            float2 sum[kRows];
            Operands x[kRows];
            const uint32_t row = operand_row(stage, first);
            sum_gates<kMode>(sum, G, input, first, rows);
#pragma unroll
            for (int i = 0; i < kRows; ++i) x[i] = load(input, first, i);
            __syncwarp();  // all of these rows' gates are read
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float2 exponent = make_float2(sum[i].x + kAnchor, sum[i].y + kAnchor);
                store(row, i, x[i], ptx::exp2_approx(exponent.x), ptx::exp2_approx(exponent.y),
                      is_steep(sum[i].x) ? 0.0f : ptx::exp2_approx(-exponent.x),
                      is_steep(sum[i].y) ? 0.0f : ptx::exp2_approx(-exponent.y));
                *reinterpret_cast<float2*>(&input.g[decay_index(first + i, channel())]) = sum[i];
            }
            channels[0].add(first, {sum[0].x, sum[1].x, sum[2].x, sum[3].x});
            channels[1].add(first, {sum[0].y, sum[1].y, sum[2].y, sum[3].y});
            G = sum[kRows - 1];
        }
        store_gamma(stage, G);
        return SteepPairs(stage, input).prepare(half_, channels);
    }

    __device__ __forceinline__ void store_gamma(const Stage& stage, const float2& G) const {
        *reinterpret_cast<float2*>(&stage.factors.gamma[channel()]) =
            make_float2(ptx::exp2_approx(G.x), ptx::exp2_approx(G.y));
    }

    // The lane's address in row `first` of the operands, a multiple of 4.
    __device__ __forceinline__ uint32_t operand_row(const Stage& stage, int first) const {
        return ptx::shared_address(stage.wide + half_) + 128 * first + (column_ ^ (16 * (first & 7)));
    }

    // Two channels of one row.
    struct Operands {
        uint32_t q, k;
    };

    __device__ __forceinline__ int channel() const { return 64 * half_ + 2 * lane_; }

    // sum[i] = G + the log2 gates of rows first .. first + i.
    template <GateMode kMode>
    __device__ __forceinline__ void sum_gates(float2 (&sum)[kRows], float2 G, const Input& input, int first,
                                              int rows) const {
        if (__builtin_expect(rows == kChunk, true))
            sum_gates<kMode, false>(sum, G, input, first, rows);
        else
            sum_gates<kMode, true>(sum, G, input, first, rows);
    }

    template <GateMode kMode, bool kEnds>
    __device__ __forceinline__ void sum_gates(float2 (&sum)[kRows], float2 G, const Input& input, int first,
                                              int rows) const {
        const GateT* raw = reinterpret_cast<const GateT*>(input.g + first * kHeadDim + 64 * half_) + 2 * lane_;
        constexpr int kPitch = kHeadDim * 4 / int(sizeof(GateT));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float2 pair;
            if constexpr (sizeof(GateT) == 4) {
                pair = *reinterpret_cast<const float2*>(raw + i * kPitch);
            } else {
                const uint32_t packed = *reinterpret_cast<const uint32_t*>(raw + i * kPitch);
                pair = make_float2(ptx::bf16_low(packed), ptx::bf16_high(packed));
            }
            sum[i] = make_float2(gate_[0].template activate<kMode>(pair.x), gate_[1].template activate<kMode>(pair.y));
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float factor =
                !kEnds || first + i < rows ? gate_[0].factor : 0.0f;  // tokens that do not exist forget nothing
            if constexpr (kMode == GateMode::kBounded) {              // the bound is above kForgetAll: see launch
                G = make_float2(G.x + factor * sum[i].x, G.y + factor * sum[i].y);
            } else {
                G = make_float2(G.x + ptx::max_nan(factor * sum[i].x, kForgetAll),
                                G.y + ptx::max_nan(factor * sum[i].y, kForgetAll));
            }
            sum[i] = G;
        }
    }

    __device__ __forceinline__ Operands load(const Input& input, int first, int i) const {
        const int at = (first + i) * kRowBytes + 2 * channel();
        return {*reinterpret_cast<const uint32_t*>(input.q + at), *reinterpret_cast<const uint32_t*>(input.k + at)};
    }

    // Into row i after that of operand_row.
    static __device__ __forceinline__ void store(uint32_t row, int i, const Operands& x, float decay0, float decay1,
                                                 float inverse0, float inverse1) {
        const uint32_t at = (row ^ (16 * i)) + 128 * i, decay = ptx::pack_bf16(decay0, decay1);
        ptx::store_shared(at + offsetof(WideOperands, k_decayed), ptx::multiply_bf16(x.k, decay));
        ptx::store_shared(at + offsetof(WideOperands, q_decayed), ptx::multiply_bf16(x.q, decay));
        ptx::store_shared(at + offsetof(WideOperands, k_inverse),
                          ptx::pack_bf16(ptx::bf16_low(x.k) * inverse0, ptx::bf16_high(x.k) * inverse1));
    }

    const ChunkKdaFwdParams& params_;
    SharedMemory<kForm>& smem_;
    const int rank_, lane_, half_, pair_;
    const int column_;  // where the lane's channels are in the first row of an operand
    Gate gate_[2];
    int length_, own_, index_;  // of the work's own chunks, the pair's next one
    ptx::RingPlace<Roles<kForm>::kInputs> slot_;
    ptx::RingPlace<Roles<kForm>::kStages> place_;
};

}  // namespace kda::sm90
