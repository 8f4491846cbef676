// Mover warp: raw rows of q, k, g and v from global to shared memory, several chunks ahead, and o back.
#pragma once

#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// One lane's part of the rows of one input.
class RowLoader {
 public:
    // `row_bytes` of each row, from byte `first` on.
    __device__ __forceinline__ RowLoader(const Rows& rows, const Work& work, int head, int row_bytes, int lane,
                                         int first = 0)
        : stride_(rows.token_bytes),
          first_row_(lane / (row_bytes / 16)),
          column_(lane % (row_bytes / 16) * 16),
          source_(row_address(rows, work, first_row_, head) + first + column_) {}

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

// Its turns follow the consumers: as each chunk's o is done, it goes out, and v of kValues chunks later takes its
// place.
template <typename GateT, int kValueSplit>
class Mover {
 public:
    // `part`: of V, of the block.
    __device__ __forceinline__ Mover(const ChunkKdaFwdParams& params, const Segment& segment, const Work& work,
                                     SharedMemory& smem, int part)
        : smem_(smem),
          length_(work.length),
          chunks_(work.chunks),
          writes_(has_output(params, segment)),
          reads_values_(!segment.is_map),
          value_column_(part * kValueBytes),
          lane_(threadIdx.x % 32),
          q_(params.q, work, work.qk_head, kRow, lane_),
          k_(params.k, work, work.qk_head, kRow, lane_),
          g_(params.g, work, work.v_head, kGateRow, lane_),
          v_(params.v, work, work.v_head, kValueBytes, lane_, value_column_),
          output_stride_(int64_t(params.num_v_heads) * kRow),
          output_(static_cast<char*>(params.o) + (work.output_row + lane_ / kPieces) * output_stride_ +
                  work.v_head * kRow + value_column_ + lane_ % kPieces * 16) {}

    __device__ __forceinline__ void run() {
        for (int chunk = 0; chunk < min(kValues, chunks_); ++chunk) load_values(chunk, chunk);
        int slot = 0, parity = 0;
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            while (loaded_ < chunks_ && (loaded_ < chunk + kAhead || next_input_is_free())) load_inputs();
            ptx::mbarrier_wait(&smem_.values_done[slot], parity);
            if (writes_) store_output(chunk, slot);
            __syncwarp();
            if (chunk + kValues < chunks_) load_values(chunk + kValues, slot);
            if (++slot == kValues) slot = 0, parity ^= 1;
        }
    }

 private:
    static constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT)),
                         kValueBytes = kRow / kValueSplit;
    static constexpr int kPieces = kValueBytes / 16;  // of a row of v or o
    // It waits for places for so many chunks' inputs, counted from the consumers' chunk, and fills others that are
    // free. Places come free up to kStages chunks ahead of the consumers, so that this wait ends.
    static constexpr int kAhead = kInputs + 2;
    static_assert(kAhead < kInputs + kStages);

    __device__ __forceinline__ bool next_input_is_free() const {
        return __all_sync(~0u, ptx::mbarrier_test(&smem_.input_empty[slot_], parity_ ^ 1));
    }

    __device__ __forceinline__ void load_inputs() {
        const int rows = min(length_ - loaded_ * kChunk, kChunk);
        Input& input = smem_.input[slot_];
        ptx::mbarrier_wait(&smem_.input_empty[slot_], parity_ ^ 1);
        q_.template load<kRow, kRowBytes>(input.q, rows);
        k_.template load<kRow, kRowBytes>(input.k, rows);
        g_.template load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem_.input_full[slot_]);
        ++loaded_;
        if (++slot_ == kInputs) slot_ = 0, parity_ ^= 1;
    }

    // Zeros, where the segment's M is found.
    __device__ __forceinline__ void load_values(int chunk, int slot) {
        v_.template load<kValueBytes, kRowBytes>(smem_.values[slot] + value_column_,
                                                 reads_values_ ? min(length_ - chunk * kChunk, kChunk) : 0);
        ptx::mbarrier_arrive_after_copies(&smem_.values_full[slot]);
    }

    __device__ __forceinline__ void store_output(int chunk, int slot) {
        constexpr int kStep = 32 / kPieces;  // rows a pass
        const uint8_t* source = smem_.values[slot] + value_column_ + lane_ / kPieces * kRowBytes + lane_ % kPieces * 16;
        uint4 rows[kChunk / kStep];
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            rows[i] = *reinterpret_cast<const uint4*>(source + i * kStep * kRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            if (chunk * kChunk + i * kStep + lane_ / kPieces < length_) *reinterpret_cast<uint4*>(output_) = rows[i];
            output_ += kStep * output_stride_;
        }
    }

    SharedMemory& smem_;
    const int length_, chunks_;
    const bool writes_, reads_values_;
    const int value_column_, lane_;
    RowLoader q_, k_, g_, v_;
    const int64_t output_stride_;
    char* output_;  // the lane's first piece of the chunk to store next
    int loaded_ = 0, slot_ = 0, parity_ = 0;
};

}  // namespace kda::sm90
