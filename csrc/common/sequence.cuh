// Which tokens and which head a block works on.
#pragma once

#include "api/chunk_kda_fwd_params.h"
#include "common/shapes.cuh"

namespace kda {

struct Work {
    int64_t batch;
    int64_t first_token;  // of that batch entry's T
    int64_t output_row;   // of the flattened [B * T]
    int64_t state;        // index of the [128, 128] state
    int length;
    int chunks;  // the last one possibly short
    int v_head;
    int qk_head;
};

// Row `token` of the work's tokens.
__device__ __forceinline__ const char* row_address(const Rows& rows, const Work& work, int64_t token, int head) {
    return static_cast<const char*>(rows.data) + work.batch * rows.batch_bytes +
           (work.first_token + token) * rows.token_bytes + head * rows.head_bytes;
}

// The bits of one token's beta; whatever computes with them would wait for them here.
__device__ __forceinline__ uint32_t load_beta(const ChunkKdaFwdParams& params, const char* address) {
    return params.beta_dtype == Dtype::kFloat32 ? *reinterpret_cast<const uint32_t*>(address)
                                                : *reinterpret_cast<const uint16_t*>(address);
}

// Entry `index` of cu_seqlens, forced into [0, T] so that no value whatever leads outside the tensors.
__device__ __forceinline__ int64_t sequence_border(const ChunkKdaFwdParams& params, int64_t index) {
    const int64_t value = params.cu_seqlens_is_int64 ? static_cast<const int64_t*>(params.cu_seqlens)[index]
                                                     : static_cast<const int32_t*>(params.cu_seqlens)[index];
    return value < 0 ? 0 : (value > params.tokens ? params.tokens : value);
}

__device__ __forceinline__ Work locate_work(const ChunkKdaFwdParams& params, int sequence, int v_head) {
    Work work;
    work.v_head = v_head;
    work.qk_head = int(unsigned(v_head) / unsigned(params.heads_a_query));
    work.state = int64_t(sequence) * params.num_v_heads + v_head;
    work.batch = params.cu_seqlens ? 0 : sequence;
    if (params.cu_seqlens) {
        work.first_token = sequence_border(params, sequence);
        const int64_t end = sequence_border(params, sequence + 1);
        work.length = end > work.first_token ? int(end - work.first_token) : 0;
    } else {
        work.first_token = 0;
        work.length = int(params.tokens);
    }
    work.output_row = work.batch * params.tokens + work.first_token;
    work.chunks = work.length / kChunk + (work.length % kChunk != 0);
    return work;
}

// One segment of one (sequence, value head), of a launch over segments.
struct Segment {
    int sequence;
    int index;
    int longest;  // the index of the one that two blocks run while others have one each
    int v_head;
    bool is_map;  // find M rather than B
};

// `work`: of the launch. Those that two blocks share come first. In 32 bits, since all of a
// block's warps come here first, and longer numbers are slow to divide.
__device__ __forceinline__ Segment locate_segment(const ChunkKdaFwdParams& params, unsigned work) {
    const unsigned heads = unsigned(params.num_sequences * params.num_v_heads);
    unsigned head = work;
    Segment segment;
    segment.index = segment.longest = 0;
    segment.is_map = false;
    if (params.pass == Pass::kTurn) {
        const unsigned paired = paired_a_turn(params);
        head = (head + params.turn * paired) % heads;
        segment.index = params.turn;
        segment.longest = int(head / paired);
    } else if (params.pass == Pass::kMaps && work >= heads) {  // both maps of a segment side by side
        segment.is_map = (work - heads) % 2;
        const unsigned inner = (work - heads) / 2, part = inner / heads;
        head = inner - part * heads;
        segment.index = int(part) + 1;
    } else if (params.pass == Pass::kReplay) {
        const unsigned part = work / heads;
        head -= part * heads;
        segment.index = int(part) + 1;
    }
    const unsigned rank = head / unsigned(params.num_v_heads);
    segment.v_head = int(head - rank * params.num_v_heads);
    segment.sequence = params.order ? params.order[rank] : int(rank);
    return segment;
}

// Where the true state is known.
__device__ __forceinline__ bool has_output(const ChunkKdaFwdParams& params, const Segment& segment) {
    return params.pass != Pass::kMaps || segment.index == 0;
}

// Of the segment that two blocks run with half of V each, and of the others: chunks in the same time
// (docs/forward-hopper.md).
struct Speeds {
    int longest, other;
};
constexpr Speeds kBesideSingles = {7, 4}, kBesideTwins = {3, 2};

// The part of a sequence that a segment is; possibly none of it.
__device__ __forceinline__ Work cut_segment(const ChunkKdaFwdParams& params, const Segment& segment) {
    Work work = locate_work(params, segment.sequence, segment.v_head);
    if (params.pass == Pass::kWhole) return work;
    const Speeds speeds = params.pass == Pass::kTurn ? kBesideSingles : kBesideTwins;
    const int others = params.segments - 1, shares = speeds.other * others + speeds.longest;
    const int chunks = (work.chunks * speeds.other + shares - 1) / shares;
    const int longest = max(work.chunks - others * chunks, 0);
    const int before = segment.index > segment.longest ? longest - chunks : 0;  // what the longest has more
    const int first = min(max(segment.index * chunks + before, 0), work.chunks);
    work.chunks = min(segment.index == segment.longest ? longest : chunks, work.chunks - first);
    work.first_token += int64_t(first) * kChunk;
    work.output_row += int64_t(first) * kChunk;
    work.length = min(work.length - first * kChunk, work.chunks * kChunk);
    return work;
}

// A map of a segment: 0 M^T, 1 B^T and then the state that leaves the segment, [V, K] each.
__device__ __forceinline__ float* segment_map(const ChunkKdaFwdParams& params, int sequence, int index, int v_head,
                                              int which) {
    const int64_t segment = (int64_t(sequence) * params.segments + index) * params.num_v_heads + v_head;
    return params.maps + (2 * segment + which) * (kHeadDim * kHeadDim);
}

// Clears the output rows before the first and after the last sequence of a packed call.
__device__ __forceinline__ void zero_uncovered_rows(const ChunkKdaFwdParams& params, int64_t part, int64_t parts) {
    const int64_t row_pieces = int64_t(params.num_v_heads) * kHeadDim * 2 / 16;
    const int64_t first = sequence_border(params, 0) * row_pieces;
    const int64_t last = sequence_border(params, params.num_sequences) * row_pieces;
    const int64_t end = params.tokens * row_pieces;
    uint4* out = static_cast<uint4*>(params.o);
    const int64_t start = part * blockDim.x + threadIdx.x, step = parts * blockDim.x;
    for (int64_t i = start; i < first; i += step) out[i] = uint4{0, 0, 0, 0};
    for (int64_t i = (last > first ? last : first) + start; i < end; i += step) out[i] = uint4{0, 0, 0, 0};
}

}  // namespace kda
