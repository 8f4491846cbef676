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

// The mover of a block that stays: it takes the next work when it begins with the last one's rows, and its own three
// tasks, to load q, k and g, to load v, and to store o, are in different works as well.
template <typename GateT>
class StayingMover {
 public:
    __device__ __forceinline__ StayingMover(const ChunkKdaFwdParams& params, SharedMemory<Form::kSingle>& smem)
        : params_(params), smem_(smem), lane_(threadIdx.x % 32), blocks_(gridDim.x - zeroing_blocks(params)) {}

    __device__ __forceinline__ void run() {
        bool begun = false;
        ptx::RingPlace<kValues> place;
        for (int chunk = 0;;) {
            while (!all_located_ && located_ < outputs_.works + kLocated && has_room()) locate_next();
            while (enter(inputs_) &&
                   (inputs_.loaded < (begun ? chunk + kAhead : kScalerPairs) || (begun && next_input_is_free())))
                load_inputs();
            while (values_.loaded < chunk + kValues && enter(values_)) load_values();
            if (!begun) {
                if (ptx::arrives(lane_)) ptx::mbarrier_arrive(&smem_.first_loads);
                begun = true;
                continue;
            }
            if (!enter(outputs_)) {
                if (outputs_.ended) break;
                continue;
            }
            if (inputs_.loaded <= chunk || values_.loaded <= chunk) continue;
            if (outputs_.chunk == 0) begin_outputs();
            ptx::mbarrier_wait(&smem_.values_done[place.index], place.parity);
            store_output(place.index);
            __syncwarp();
            ++outputs_.chunk, ++chunk;
            place.advance();
        }
    }

 private:
    static constexpr Form kForm = Form::kSingle;
    static constexpr int kInputs = Roles<kForm>::kInputs, kValues = Roles<kForm>::kValues;
    static constexpr int kRow = kHeadDim * 2, kGateRow = kHeadDim * int(sizeof(GateT));
    static constexpr int kPieces = kRow / 16, kValueRowBytes = Roles<kForm>::kValueRowBytes;
    static constexpr int kAhead = kInputs + 2;

    // Where one of the tasks is.
    struct Task {
        int works = 0;                          // that it has entered
        int chunk = 0, chunks = 0, length = 0;  // of the last one
        int loaded = 0;                         // chunks of all works
        bool ended = false;
    };

    // Whether the task has a chunk to do, in this work or another that is located.
    __device__ __forceinline__ bool enter(Task& task) {
        while (task.chunk == task.chunks && !task.ended && task.works < located_) {
            const Work& work = smem_.located[task.works % kLocated].work;
            task.chunk = 0, task.chunks = ptx::uniform(work.chunks), task.length = ptx::uniform(work.length);
            task.ended = task.chunks < 0;
            if (task.ended) task.chunks = 0;
            ++task.works;
        }
        return task.chunk < task.chunks;
    }

    __device__ __forceinline__ bool has_room() const {
        return __all_sync(~0u,
                          ptx::mbarrier_test(&smem_.located_empty[located_ % kLocated], located_ / kLocated % 2 ^ 1));
    }

    __device__ __forceinline__ void locate_next() {
        const int slot = located_ % kLocated;
        next_ = params_.order ? 0 : next_ + blocks_;
        if (params_.order) {
            if (lane_ == 0) next_ = atomicAdd(params_.order + params_.num_sequences, 1) + blocks_;
            next_ = __shfl_sync(~0u, next_, 0);
        }
        Located located;
        located.work.chunks = -1;
        const bool is_work = next_ < works_of_pass(params_);
        if (is_work) {
            located.segment = locate_segment(params_, next_);
            located.work = cut_segment(params_, located.segment);
        }
        if (lane_ == 0) {
            smem_.located[slot] = located;
            ptx::mbarrier_arrive(&smem_.located_full[slot]);
        }
        if (is_work) prefetch(located.work);
        __syncwarp();
        ++located_;
        all_located_ = !is_work;
    }

    // The state, which is waited for once all chunks before it are done.
    __device__ __forceinline__ void prefetch(const Work& work) const {
        constexpr int kState = kHeadDim * kHeadDim;
        if (lane_ == 0 && params_.initial_state && params_.pass == Pass::kWhole)
            ptx::prefetch_bulk(params_.initial_state + work.state * kState, kState * sizeof(float));
    }

    __device__ __forceinline__ bool next_input_is_free() const {
        return __all_sync(~0u, ptx::mbarrier_test(&smem_.input_empty[slot_.index], slot_.parity ^ 1));
    }

    // The lane's piece of a work's first rows.
    template <int kBytes>
    __device__ __forceinline__ const char* first_row(const Rows& rows, const Work& work, int head) const {
        return row_address(rows, work, lane_ / (kBytes / 16), head) + lane_ % (kBytes / 16) * 16;
    }

    // As RowLoader.
    template <int kBytes, int kPitch, int kSecondHalf = kBytes / 2>
    __device__ __forceinline__ void load(const char*& source, const Rows& rows, void* shared, int valid) const {
        constexpr int kStep = 32 * 16 / kBytes;
        const int row0 = lane_ / (kBytes / 16);
        int column = lane_ % (kBytes / 16) * 16;
        column = column < kBytes / 2 ? column : column - kBytes / 2 + kSecondHalf;
        const uint32_t target = ptx::shared_address(shared) + row0 * kPitch + column;
#pragma unroll
        for (int row = 0; row < kChunk; row += kStep) {
            ptx::cp_async_16(target + row * kPitch, source, row + row0 < valid);
            source += kStep * rows.token_bytes;
        }
    }

    __device__ __forceinline__ void load_inputs() {
        if (inputs_.chunk == 0) {
            const Work& work = smem_.located[(inputs_.works - 1) % kLocated].work;
            q_ = first_row<kRow>(params_.q, work, work.qk_head);
            k_ = first_row<kRow>(params_.k, work, work.qk_head);
            g_ = first_row<kGateRow>(params_.g, work, work.v_head);
        }
        const int rows = min(inputs_.length - inputs_.chunk * kChunk, kChunk);
        Input& input = smem_.input[slot_.index];
        ptx::mbarrier_wait(&smem_.input_empty[slot_.index], slot_.parity ^ 1);
        load<kRow, kRowBytes>(q_, params_.q, input.q, rows);
        load<kRow, kRowBytes>(k_, params_.k, input.k, rows);
        load<kGateRow, kHeadDim * 4, kHeadDim * 2>(g_, params_.g, input.g, rows);
        ptx::mbarrier_arrive_after_copies(&smem_.input_full[slot_.index]);
        ++inputs_.chunk, ++inputs_.loaded;
        slot_.advance();
    }

    __device__ __forceinline__ void load_values() {
        if (values_.chunk == 0) {
            const Work& work = smem_.located[(values_.works - 1) % kLocated].work;
            v_ = first_row<kRow>(params_.v, work, work.v_head);
        }
        const int slot = values_.loaded % kValues;
        load<kRow, kValueRowBytes>(v_, params_.v, smem_.values[slot],
                                   min(values_.length - values_.chunk * kChunk, kChunk));
        ptx::mbarrier_arrive_after_copies(&smem_.values_full[slot]);
        ++values_.chunk, ++values_.loaded;
    }

    __device__ __forceinline__ void begin_outputs() {
        const Work& work = smem_.located[(outputs_.works - 1) % kLocated].work;
        output_ = static_cast<char*>(params_.o) +
                  (work.output_row + lane_ / kPieces) * (int64_t(params_.num_v_heads) * kRow) + work.v_head * kRow +
                  lane_ % kPieces * 16;
    }

    __device__ __forceinline__ void store_output(int slot) {
        constexpr int kStep = 32 / kPieces;  // rows a pass
        const uint8_t* source = smem_.values[slot] + lane_ / kPieces * kValueRowBytes + lane_ % kPieces * 16;
        uint4 rows[kChunk / kStep];
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            rows[i] = *reinterpret_cast<const uint4*>(source + i * kStep * kValueRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kChunk / kStep; ++i) {
            if (outputs_.chunk * kChunk + i * kStep + lane_ / kPieces < outputs_.length)
                *reinterpret_cast<uint4*>(output_) = rows[i];
            output_ += kStep * int64_t(params_.num_v_heads) * kRow;
        }
    }

    const ChunkKdaFwdParams& params_;
    SharedMemory<kForm>& smem_;
    const int lane_;
    const unsigned blocks_;
    unsigned next_ = blockIdx.x;
    int located_ = 1;
    bool all_located_ = false;
    Task inputs_, values_, outputs_;
    ptx::RingPlace<kInputs> slot_;
    const char *q_, *k_, *g_, *v_;
    char* output_;
};

}  // namespace kda::sm90
