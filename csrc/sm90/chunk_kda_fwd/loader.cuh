// Loader warp: raw rows of q, k, v and g from global to shared memory, several chunks ahead.
#pragma once

#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// One lane's part of the rows of one input.
class RowLoader {
   public:
    // Rows of `row_bytes`, one head of `heads` in each token.
    __device__ __forceinline__ RowLoader(const void* tensor, const Work& work, int heads, int head, int row_bytes, int lane)
        : stride_(int64_t(heads) * row_bytes),
          source_(static_cast<const char*>(tensor) + work.first_token * stride_ + int64_t(head) * row_bytes) {
        const int pieces = row_bytes / 16;
        first_row_ = lane / pieces;
        column_ = lane % pieces * 16;
        source_ += first_row_ * stride_ + column_;
    }

    // Copies the next chunk, its rows past the sequence's end as zeros; the second half of each row begins at kSecondHalf.
    template <int kRowBytes, int kPitch, int kSecondHalf = kRowBytes / 2>
    __device__ __forceinline__ void load(void* shared, int rows) {
        constexpr int kStep = 32 * 16 / kRowBytes;  // rows a pass
        const int column = column_ < kRowBytes / 2 ? column_ : column_ - kRowBytes / 2 + kSecondHalf;
        const uint32_t target = ptx::shared_address(shared) + first_row_ * kPitch + column;
        const char* source = source_;
#pragma unroll
        for (int row = 0; row < kChunk; row += kStep) {
            ptx::cp_async_16(target + row * kPitch, source, row + first_row_ < rows);
            source += kStep * stride_;
        }
        source_ = source;
    }

   private:
    const int64_t stride_;
    const char* source_;
    int first_row_, column_;
};

template <typename GateT>
__device__ __forceinline__ void load_chunks(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem) {
    constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT));
    const int lane = threadIdx.x % 32;
    RowLoader q(params.q, work, params.num_qk_heads, work.qk_head, kRow, lane);
    RowLoader k(params.k, work, params.num_qk_heads, work.qk_head, kRow, lane);
    RowLoader v(params.v, work, params.num_v_heads, work.v_head, kRow, lane);
    RowLoader g(params.g, work, params.num_v_heads, work.v_head, kGateRow, lane);

    int slot = 0, parity = 0, value_slot = 0, value_parity = 0;
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
        const int rows = min(work.length - chunk * kChunk, kChunk);
        Input& input = smem.input[slot];
        ptx::mbarrier_wait(&smem.input_empty[slot], parity ^ 1);
        q.load<kRow, kRowBytes>(input.q, rows);
        k.load<kRow, kRowBytes>(input.k, rows);
        g.load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem.input_full[slot]);
        ptx::mbarrier_wait(&smem.values_empty[value_slot], value_parity ^ 1);
        v.load<kRow, kRowBytes>(smem.values[value_slot], rows);
        ptx::mbarrier_arrive_after_copies(&smem.values_full[value_slot]);
        if (++slot == kInputs) slot = 0, parity ^= 1;
        if (++value_slot == kValues) value_slot = 0, value_parity ^= 1;
    }
}

}  // namespace kda::sm90
