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

// Turns follow the consumers: as each chunk's o is done, it goes out, and v of kValues chunks later takes its place.
template <typename GateT, Form kForm, Moves kMoves>
class Mover {
 public:
    // `rank`: of the block in its cluster.
    __device__ __forceinline__ Mover(const ChunkKdaFwdParams& params, const Segment& segment, const Work& work,
                                     SharedMemory<kForm>& smem, int rank)
        : params_(params),
          smem_(smem),
          length_(work.length),
          chunks_(work.chunks),
          writes_(has_output(params, segment)),
          reads_values_(!segment.is_map),
          rank_(rank),
          own_(own_chunks<kBlocks>(work.chunks, rank)),
          value_column_(rank % kParts * kValueBytes),
          lane_(threadIdx.x % 32),
          q_(params.q, work, work.qk_head, kRow, lane_, 0, rank, kBlocks),
          k_(params.k, work, work.qk_head, kRow, lane_, 0, rank, kBlocks),
          g_(params.g, work, work.v_head, kGateRow, lane_, 0, rank, kBlocks),
          v_(params.v, work, work.v_head, kValueBytes, lane_, value_column_, 0, 1),
          output_stride_(int64_t(params.num_v_heads) * kRow),
          output_(static_cast<char*>(params.o) + (work.output_row + lane_ / kPieces) * output_stride_ +
                  work.v_head * kRow + value_column_ + lane_ % kPieces * 16) {}

    __device__ __forceinline__ void run() {
        if constexpr (kMoves != Moves::kValues) {
            while (loaded_ < min(kScalerPairs, own_)) load_inputs();  // before v, since these are waited for first
            if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.first_loads);
        }
        if constexpr (kMoves == Moves::kInputs) {
            while (loaded_ < own_) load_inputs();
        } else {
            run_values();
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

    // Blocks of the same length begin and end together, and all would wait for memory at once: so the state and the
    // first rows of the block that will probably follow here are brought near before this one ends.
    static constexpr int kPrefetchAhead = 16;
    __device__ __forceinline__ void prefetch_next_block() const {
        const unsigned next = work_of_block<kForm>(params_) + ptx::multiprocessors();
        if (params_.pass != Pass::kWhole || next >= works_of_pass(params_)) return;
        const Work work = cut_segment(params_, locate_segment(params_, next));
        constexpr int kState = kHeadDim * kHeadDim;
        if (lane_ == 0 && params_.initial_state)
            ptx::prefetch_bulk(params_.initial_state + work.state * kState, kState * sizeof(float));
        if (lane_ < work.length) {
            prefetch_row<kRow>(params_.q, work, work.qk_head);
            prefetch_row<kRow>(params_.k, work, work.qk_head);
            prefetch_row<kRow>(params_.v, work, work.v_head);
            prefetch_row<kGateRow>(params_.g, work, work.v_head);
        }
    }

    template <int kBytes>
    __device__ __forceinline__ void prefetch_row(const Rows& rows, const Work& work, int head) const {
        const char* row = row_address(rows, work, lane_, head);
#pragma unroll
        for (int at = 0; at < kBytes; at += 128) ptx::prefetch_line(row + at);
    }

    __device__ __forceinline__ void run_values() {
        if constexpr (kMoves == Moves::kValues) ptx::mbarrier_wait(&smem_.first_loads, 0);
        for (int chunk = 0; chunk < min(kValues, chunks_); ++chunk) load_values(chunk, chunk);
        ptx::RingPlace<kValues> place;
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            if constexpr (kMoves == Moves::kAll) {
                while (loaded_ < own_ && (next_chunk() < chunk + kAhead || next_input_is_free())) load_inputs();
            }
            if (kBlocks == 1 && chunk == max(chunks_ - kPrefetchAhead, 0)) prefetch_next_block();
            ptx::mbarrier_wait(&smem_.values_done[place.index], place.parity);
            if (writes_) store_output(chunk, place.index);
            __syncwarp();
            if (chunk + kValues < chunks_) load_values(chunk + kValues, place.index);
            place.advance();
        }
    }

    __device__ __forceinline__ int next_chunk() const { return rank_ + kBlocks * loaded_; }

    __device__ __forceinline__ bool next_input_is_free() const {
        return __all_sync(~0u, ptx::mbarrier_test(&smem_.input_empty[slot_.index], slot_.parity ^ 1));
    }

    __device__ __forceinline__ void load_inputs() {
        const int rows = min(length_ - next_chunk() * kChunk, kChunk);
        Input& input = smem_.input[slot_.index];
        ptx::mbarrier_wait(&smem_.input_empty[slot_.index], slot_.parity ^ 1);
        q_.template load<kRow, kRowBytes>(input.q, rows);
        k_.template load<kRow, kRowBytes>(input.k, rows);
        g_.template load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem_.input_full[slot_.index]);
        ++loaded_;
        slot_.advance();
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
    const int length_, chunks_;
    const bool writes_, reads_values_;
    const int rank_, own_;  // of the chunks, those whose q, k and g this block loads
    const int value_column_, lane_;
    RowLoader q_, k_, g_, v_;
    const int64_t output_stride_;
    char* output_;    // the lane's first piece of the chunk to store next
    int loaded_ = 0;  // inputs so far
    ptx::RingPlace<kInputs> slot_;
};

// The mover of a block that stays. While it waits for a work's last chunks, it loads the first inputs of the next one.
template <typename GateT>
class StayingMover {
 public:
    __device__ __forceinline__ StayingMover(const ChunkKdaFwdParams& params, SharedMemory<Form::kSingle>& smem)
        : params_(params), smem_(smem), lane_(threadIdx.x % 32), blocks_(gridDim.x - zeroing_blocks(params)) {}

    __device__ __forceinline__ void run() {
        begin_inputs(0);
        while (ahead_ < kScalerPairs && inputs_left_ > 0) load_inputs();
        if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.first_loads);
        ptx::RingPlace<kValues> place;
        for (int work = 0;; ++work) {
            const int chunks = ptx::uniform(smem_.located[work % kLocated].work.chunks);
            if (chunks < 0) break;
            begin_values(work % kLocated);
            ptx::RingPlace<kValues> next = place;
            for (int chunk = 0; chunk < min(kValues, chunks); ++chunk) {
                load_values(chunk, next.index);
                next.advance();
            }
            locate_next((work + 1) % kLocated, (work + 1) / kLocated % 2);
            if (inputs_left_ == 0) begin_inputs((work + 1) % kLocated);
            bool in_next = ahead_ >= chunks;
            for (int chunk = 0; chunk < chunks; ++chunk) {
                while (inputs_left_ > 0 && (ahead_ < kAhead || next_input_is_free())) {
                    load_inputs();
                    if (inputs_left_ == 0 && !in_next) {
                        begin_inputs((work + 1) % kLocated);
                        in_next = true;
                    }
                }
                ptx::mbarrier_wait(&smem_.values_done[place.index], place.parity);
                store_output(chunk, place.index);
                __syncwarp();
                if (chunk + kValues < chunks) load_values(chunk + kValues, place.index);
                place.advance();
                --ahead_;
            }
        }
    }

 private:
    static constexpr Form kForm = Form::kSingle;
    static constexpr int kInputs = Roles<kForm>::kInputs, kValues = Roles<kForm>::kValues;
    static constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT));
    static constexpr int kPieces = kRow / 16, kValueRowBytes = Roles<kForm>::kValueRowBytes;
    static constexpr int kAhead = kInputs + 2;

    __device__ __forceinline__ void locate_next(int slot, int parity) {
        if (params_.order) {
            int next = 0;
            if (lane_ == 0) next = atomicAdd(params_.order + params_.num_sequences, 1);
            next_ = ptx::uniform(next) + blocks_;
        } else {
            next_ += blocks_;
        }
        Located located;
        located.work.chunks = -1;
        const bool is_work = next_ < works_of_pass(params_);
        if (is_work) {
            located.segment = locate_segment(params_, next_);
            located.work = cut_segment(params_, located.segment);
            constexpr int kState = kHeadDim * kHeadDim;
            if (lane_ == 0 && params_.initial_state && params_.pass == Pass::kWhole)
                ptx::prefetch_bulk(params_.initial_state + located.work.state * kState, kState * sizeof(float));
        }
        ptx::mbarrier_wait(&smem_.located_empty[slot], parity ^ 1);
        if (lane_ == 0) {
            smem_.located[slot] = located;
            ptx::mbarrier_arrive(&smem_.located_full[slot]);
        }
        __syncwarp();
    }

    __device__ __forceinline__ bool next_input_is_free() const {
        return __all_sync(~0u, ptx::mbarrier_test(&smem_.input_empty[slot_.index], slot_.parity ^ 1));
    }

    __device__ __forceinline__ void begin_inputs(int located) {
        const Work& work = smem_.located[located].work;
        inputs_left_ = ptx::uniform(work.chunks), rows_left_ = ptx::uniform(work.length);
        if (inputs_left_ < 0) return;
        q_ = RowLoader(params_.q, work, work.qk_head, kRow, lane_, 0, 0, 1);
        k_ = RowLoader(params_.k, work, work.qk_head, kRow, lane_, 0, 0, 1);
        g_ = RowLoader(params_.g, work, work.v_head, kGateRow, lane_, 0, 0, 1);
    }

    __device__ __forceinline__ void load_inputs() {
        const int rows = min(rows_left_, kChunk);
        Input& input = smem_.input[slot_.index];
        ptx::mbarrier_wait(&smem_.input_empty[slot_.index], slot_.parity ^ 1);
        q_.template load<kRow, kRowBytes>(input.q, rows);
        k_.template load<kRow, kRowBytes>(input.k, rows);
        g_.template load<kGateRow, kHeadDim * 4, kHeadDim * 2>(input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem_.input_full[slot_.index]);
        --inputs_left_, rows_left_ -= kChunk, ++ahead_;
        slot_.advance();
    }

    __device__ __forceinline__ void begin_values(int located) {
        const Work& work = smem_.located[located].work;
        length_ = ptx::uniform(work.length);
        v_ = RowLoader(params_.v, work, work.v_head, kRow, lane_, 0, 0, 1);
        output_stride_ = int64_t(params_.num_v_heads) * kRow;
        output_ = static_cast<char*>(params_.o) + (work.output_row + lane_ / kPieces) * output_stride_ +
                  work.v_head * kRow + lane_ % kPieces * 16;
    }

    __device__ __forceinline__ void load_values(int chunk, int slot) {
        v_.template load<kRow, kValueRowBytes>(smem_.values[slot], min(length_ - chunk * kChunk, kChunk));
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
    const int lane_;
    const unsigned blocks_;
    unsigned next_ = blockIdx.x;
    int inputs_left_, rows_left_;  // of the work whose inputs are being loaded
    int ahead_ = 0;                // inputs that are loaded and whose o is not stored
    int length_;                   // of the work whose o is being stored
    ptx::RingPlace<kInputs> slot_;
    RowLoader q_, k_, g_, v_;
    int64_t output_stride_;
    char* output_;
};

}  // namespace kda::sm90
