// Loader warp: raw rows of q, k and g from global to shared memory, several chunks ahead.
#pragma once

#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// One lane's part of the rows of one input.
class RowLoader {
 public:
    // Rows of `row_bytes`.
    __device__ __forceinline__ RowLoader(const Rows& rows, const Work& work, int head, int row_bytes, int lane)
        : stride_(rows.token_bytes),
          first_row_(lane / (row_bytes / 16)),
          column_(lane % (row_bytes / 16) * 16),
          source_(row_address(rows, work, first_row_, head) + column_) {}

    // Copies the next chunk, its rows past the sequence's end as zeros; the second half of each row begins at
    // kSecondHalf.
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
    const int first_row_, column_;
    const char* source_;
};

template <typename GateT>
__device__ __forceinline__ void load_chunks(const ChunkKdaFwdParams& params, const Work& work, SharedMemory& smem) {
    constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT));
    const int lane = threadIdx.x % 32;
    RowLoader q(params.q, work, work.qk_head, kRow, lane);
    RowLoader k(params.k, work, work.qk_head, kRow, lane);
    RowLoader g(params.g, work, work.v_head, kGateRow, lane);

    int slot = 0, parity = 0;
    for (int chunk = 0; chunk < work.steps; ++chunk) {
        const int rows = min(work.length - chunk * kChunk, kChunk);
        Input& input = smem.input[slot];
        ptx::mbarrier_wait(&smem.input_empty[slot], parity ^ 1);
        q.load<kRow, kRowBytes>(input.q, rows);
        k.load<kRow, kRowBytes>(input.k, rows);
        g.load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem.input_full[slot]);
        if (++slot == kInputs) slot = 0, parity ^= 1;
    }
}

}  // namespace kda::sm90
