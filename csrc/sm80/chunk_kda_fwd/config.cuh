// Sizes, roles, number ranges and shared-memory layout of the portable forward kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/shapes.cuh"
#include "ptx/cp_async.cuh"

namespace kda::sm80 {

// Roles. Two producer groups take turns at the chunks and build their factors; every consumer warp owns 16 columns of
// V.
constexpr int kGroupThreads = 128;
constexpr int kGroups = 2;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = kConsumerThreads + kGroups * kGroupThreads;
constexpr int kStages = 3;          // factor sets between producers and consumers
constexpr int kZeroingBlocks = 64;  // extra blocks of a packed call, which clear the rows of no sequence

// Named barriers.
constexpr int kBarrierGroup = 1;  // + group
constexpr int kBarrierFull = 3;   // + stage
constexpr int kBarrierEmpty = 6;  // + stage
constexpr int kStageThreads = kConsumerThreads + kGroupThreads;

// The fast products use 2^(G+A) and 2^(-G-A) with a constant anchor A, so that both stay near the middle of the
// exponent range, and every later correction by 2^-A is exact. Entries with |G+A| > A, that is G < -2A, go pairwise.
constexpr float kAnchor = 80.0f;
constexpr float kAnchorScale = 1.2089258196146292e24f;     // 2^80
constexpr float kAnchorInverse = 8.2718061255302767e-25f;  // 2^-80

// A 16 x 128 bf16 tile: 256-byte rows, 16-byte pieces exchanged by XOR with the row, free of bank conflicts both for
// row-wise access and for ldmatrix.
constexpr int kTileBytes = kChunk * kHeadDim * 2;
__device__ __forceinline__ int tile_offset(int row, int column) {  // in bytes
    return row * 256 + ((((column >> 3) ^ (row & 7)) << 4) | ((column & 7) << 1));
}
// From the offset or address of (row, c) with c < 16 to that of (row, c + 16 step), in one instruction. Tiles are
// 256-byte aligned, so the piece's number is bits 4 to 7 of both.
__device__ __forceinline__ uint32_t tile_step(uint32_t offset, int step) {
    return offset ^ uint32_t(32 * step);
}

// A 16 x 16 bf16 square: 32-byte rows.
constexpr int kSquareBytes = kChunk * kChunk * 2;
__device__ __forceinline__ int square_offset(int row, int column) {
    return row * 32 + ((((column >> 3) ^ ((row >> 2) & 1)) << 4) | ((column & 7) << 1));
}

// fp32 G of one chunk, for the pairwise path: four neighbours stay together, conflict-free along rows and along
// columns.
__device__ __forceinline__ int decay_index(int row, int column) {
    return row * kHeadDim + (column ^ (4 * (row & 7)));
}

// What the consumers need of one chunk.
struct alignas(256) Stage {
    uint8_t k_decayed[kTileBytes];   // k 2^(G+A)
    uint8_t q_decayed[kTileBytes];   // scale q 2^(G+A)
    uint8_t k_restored[kTileBytes];  // k 2^(G_last - G)
    uint8_t v[kTileBytes];
    uint8_t p_high[kSquareBytes];  // P 2^A as two bf16 terms
    uint8_t p_low[kSquareBytes];
    uint8_t inverse[kSquareBytes];  // (I + L)^-1
    float gamma[kHeadDim];          // 2^G_last
};

// What one producer group needs for itself.
struct alignas(256) Workspace {
    uint8_t q[kTileBytes];  // raw inputs of the group's next chunk
    uint8_t k[kTileBytes];
    float g[kChunk * kHeadDim];     // raw g (in its own dtype); in a chunk with steep entries, G afterwards
    uint8_t k_inverse[kTileBytes];  // k 2^(-G-A)
    float lower[kChunk][kChunk];    // L, by columns
    float half_sum[2][kHeadDim];    // sums of g over each half of the chunk
    float2 norm[kChunk];            // factors that normalise (and scale) q, and k
    float q_dot_k[kChunk];          // of raw q and k of the same token
    uint32_t steep[2][2];  // pairs of channels with steep entries: [half of the chunk][half of K], a bit a pair
};

struct SharedMemory {
    Stage stage[kStages];
    Workspace workspace[kGroups];
    float beta[kStages][kChunk];  // belongs to the stage; outside it, where it costs no padding
};
static_assert(sizeof(SharedMemory) <= 99 * 1024,
              "must fit one block of the smallest GPUs served (sm_86, sm_89, sm_120)");

}  // namespace kda::sm80
