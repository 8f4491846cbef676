// Mover warp: raw rows of q, k, g and v from global to shared memory, several chunks ahead, and o back.
#pragma once

#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// One lane's part of the rows of one input.
class RowLoader {
 public:
    RowLoader() = default;

    // `row_bytes` of each row, from byte `first` on; of every `step`-th chunk, from `chunk` on.
    __device__ __forceinline__ RowLoader(const Rows& rows, const Work& work, int head, int row_bytes, int lane,
                                         int first, int chunk, int step)
        : stride_(rows.token_bytes),
          first_row_(lane / (row_bytes / 16)),
          column_(lane % (row_bytes / 16) * 16),
          left_out_((step - 1) * kChunk * rows.token_bytes),
          source_(row_address(rows, work, chunk * kChunk + first_row_, head) + first + column_) {}

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
        source_ = source + left_out_;
    }

 private:
    int64_t stride_;
    int first_row_, column_;
    int64_t left_out_;
    const char* source_;
};

// What one warp moves: all; or there are two, of which one brings q, k and g, and the other v, and takes o away.
enum class Moves { kAll, kInputs, kValues };

// Turns follow the consumers: as each chunk's o is done, it goes out, and v of kValues chunks later takes its place. A
// block that stays (kStays) goes on to other works, and this warp finds them, while q, k and g of a work's first chunks
// are loaded beside the last chunks of the one before.
template <typename GateT, Form kForm, Moves kMoves, bool kStays>
class Mover {
 public:
    // `rank`: of the block in its cluster.
    __device__ __forceinline__ Mover(const ChunkKdaFwdParams& params, SharedMemory<kForm>& smem, int rank)
        : params_(params),
          smem_(smem),
          rank_(rank),
          value_column_(rank % kParts * kValueBytes),
          lane_(threadIdx.x % 32),
          output_stride_(int64_t(params.num_v_heads) * kRow) {}

    __device__ __forceinline__ void run() {
        if constexpr (kMoves != Moves::kValues) {
            begin_inputs(smem_.located[0].work);
            // Before v, since these are waited for first.
            for (int i = 0; i < kScalerPairs && inputs_left_ > 0; ++i) load_inputs();
            if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.first_loads);
        }
        if constexpr (kMoves == Moves::kInputs) {
            while (inputs_left_ > 0) load_inputs();
        } else {
            if constexpr (kMoves == Moves::kValues) ptx::mbarrier_wait(&smem_.first_loads, 0);
            run_works();
        }
    }

 private:
    static constexpr int kBlocks = Roles<kForm>::kBlocks, kParts = Roles<kForm>::kParts;
    static constexpr int kInputs = Roles<kForm>::kInputs, kValues = Roles<kForm>::kValues;
    static constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT)), kValueBytes = kRow / kParts;
    static constexpr int kValueRowBytes = Roles<kForm>::kValueRowBytes;
    static constexpr int kPieces = kValueBytes / 16;  // of a row of v or o
    // It waits for places for so many chunks' inputs, counted from the consumers' chunk, and fills others that are
    // free. Places come free up to kStages chunks ahead of the consumers, so that this wait ends.
    static constexpr int kAhead = kBlocks * kInputs + 2;
    static_assert(kAhead < kBlocks * kInputs + Roles<kForm>::kStages);
    static_assert(!kStays || kBlocks == 1);

    __device__ __forceinline__ void run_works() {
        if constexpr (kStays) {
            for (int work = 0;; ++work) {
                const Located& located = smem_.located[work % kLocated];
                const int chunks = ptx::uniform(located.work.chunks);
                if (chunks < 0) return;
                begin_values(located, chunks);
                locate_next(work + 1);
                run_chunks(chunks, smem_.located[(work + 1) % kLocated].work);
            }
        } else {
            const Located& located = smem_.located[0];
            const int chunks = ptx::uniform(located.work.chunks);
            begin_values(located, chunks);
            run_chunks(chunks, located.work);
        }
    }

    __device__ __forceinline__ void run_chunks(int chunks, const Work& next) {
        if (kStays && inputs_left_ == 0) begin_inputs(next);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if constexpr (kMoves == Moves::kAll) {
                while (inputs_left_ > 0 && (next_input_ < chunk + kAhead || next_input_is_free())) {
                    load_inputs();
                    if (kStays && next_input_ == chunks) begin_inputs(next);
                }
            }
            ptx::mbarrier_wait(&smem_.values_done[values_.index], values_.parity);
            if (writes_) store_output(chunk, values_.index);
            __syncwarp();
            if (chunk + kValues < chunks) load_values(chunk + kValues, values_.index);
            values_.advance();
        }
        next_input_ -= chunks;
    }

    // The block's `work`-th work. All chunks of the one that was in its place are done, so that the wait for it ends.
    __device__ __forceinline__ void locate_next(int work) {
        if (params_.next_work) {
            int taken = 0;
            if (lane_ == 0) taken = atomicAdd(params_.next_work, 1);
            next_ = unsigned(ptx::uniform(taken)) + staying_blocks(params_);
        } else {
            next_ += staying_blocks(params_);
        }
        Located located;
        located.work.chunks = -1;
        if (next_ < works_of_pass(params_)) {
            located.segment = locate_segment(params_, next_);
            located.work = cut_segment(params_, located.segment);
            // Brought near, since consumers will wait for it.
            if (lane_ == 0 && params_.initial_state && params_.pass == Pass::kWhole)
                ptx::prefetch_bulk(params_.initial_state + located.work.state * kHeadDim * kHeadDim,
                                   kHeadDim * kHeadDim * sizeof(float));
        }
        const int slot = work % kLocated;
        ptx::mbarrier_wait(&smem_.located_empty[slot], work / kLocated % 2 ^ 1);
        if (lane_ == 0) {
            smem_.located[slot] = located;
            ptx::mbarrier_arrive(&smem_.located_full[slot]);
        }
        __syncwarp();
    }

    __device__ __forceinline__ bool next_input_is_free() const {
        return __all_sync(~0u, ptx::mbarrier_test(&smem_.input_empty[input_.index], input_.parity ^ 1));
    }

    __device__ __forceinline__ void begin_inputs(const Work& work) {
        inputs_left_ = own_chunks<kBlocks>(ptx::uniform(work.chunks), rank_);
        rows_left_ = ptx::uniform(work.length) - rank_ * kChunk;
        if (kStays && inputs_left_ <= 0) return;
        q_ = RowLoader(params_.q, work, work.qk_head, kRow, lane_, 0, rank_, kBlocks);
        k_ = RowLoader(params_.k, work, work.qk_head, kRow, lane_, 0, rank_, kBlocks);
        g_ = RowLoader(params_.g, work, work.v_head, kGateRow, lane_, 0, rank_, kBlocks);
    }

    __device__ __forceinline__ void load_inputs() {
        const int rows = min(rows_left_, kChunk);
        Input& input = smem_.input[input_.index];
        ptx::mbarrier_wait(&smem_.input_empty[input_.index], input_.parity ^ 1);
        q_.template load<kRow, kRowBytes>(input.q, rows);
        k_.template load<kRow, kRowBytes>(input.k, rows);
        g_.template load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem_.input_full[input_.index]);
        --inputs_left_, rows_left_ -= kBlocks * kChunk, next_input_ += kBlocks;
        input_.advance();
    }

    // And the first chunks' v.
    __device__ __forceinline__ void begin_values(const Located& located, int chunks) {
        const Work& work = located.work;
        length_ = ptx::uniform(work.length);
        writes_ = kStays || has_output(params_, located.segment);
        reads_values_ = kStays || !located.segment.is_map;
        v_ = RowLoader(params_.v, work, work.v_head, kValueBytes, lane_, value_column_, 0, 1);
        output_ = static_cast<char*>(params_.o) + (work.output_row + lane_ / kPieces) * output_stride_ +
                  work.v_head * kRow + value_column_ + lane_ % kPieces * 16;
        ptx::RingPlace<kValues> place = values_;
        for (int chunk = 0; chunk < min(kValues, chunks); ++chunk) {
            load_values(chunk, place.index);
            place.advance();
        }
    }

    // Zeros, where the segment's M is found.
    __device__ __forceinline__ void load_values(int chunk, int slot) {
        v_.template load<kValueBytes, kValueRowBytes>(smem_.values[slot],
                                                      reads_values_ ? min(length_ - chunk * kChunk, kChunk) : 0);
        ptx::mbarrier_arrive_after_copies(&smem_.values_full[slot]);
    }

    __device__ __forceinline__ void store_output(int chunk, int slot) {
        constexpr int kStep = 32 / kPieces;  // rows a pass
        const uint8_t* source = smem_.values[slot] + lane_ / kPieces * kValueRowBytes + lane_ % kPieces * 16;
        uint4 rows[kChunk / kStep];
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            rows[i] = *reinterpret_cast<const uint4*>(source + i * kStep * kValueRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            if (chunk * kChunk + i * kStep + lane_ / kPieces < length_) *reinterpret_cast<uint4*>(output_) = rows[i];
            output_ += kStep * output_stride_;
        }
    }

    const ChunkKdaFwdParams& params_;
    SharedMemory<kForm>& smem_;
    const int rank_, value_column_, lane_;
    const int64_t output_stride_;
    unsigned next_ = blockIdx.x;  // of the launch's works, the last one that the block has taken
    // Of the work whose q, k and g are loaded: chunks and rows that are left, of those that this block loads.
    int inputs_left_, rows_left_;
    int next_input_ = rank_;  // its next chunk, counted from the first of the work whose o is stored
    ptx::RingPlace<kInputs> input_;
    RowLoader q_, k_, g_;
    // Of the work whose o is stored.
    int length_;
    bool writes_, reads_values_;
    ptx::RingPlace<kValues> values_;
    RowLoader v_;
    char* output_;  // the lane's first piece of the chunk to store next
};

}  // namespace kda::sm90
