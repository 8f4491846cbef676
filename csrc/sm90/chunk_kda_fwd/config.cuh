// Sizes, roles, number ranges and shared-memory layout of the Hopper forward kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/shapes.cuh"

namespace kda::sm90 {

// Roles, by warpgroup: consumers, each of which owns 64 columns of V and loads its v; then one of scalers, two pairs of
// warps that decay q and k, a chunk in turn; then one of helpers, of which warp 0 loads and the others build L, P and
// the inverse, a chunk in turn.
constexpr int kGroupValues = 64;
constexpr int kBuilders = 3;
constexpr int kScalerRegisters = 96;
constexpr int kHelperRegisters = 96;

// How many blocks share a head: each takes its part of V, and all build the same factors.
template <int kValueSplit>
struct Roles {
    static constexpr int kConsumerGroups = kHeadDim / kGroupValues / kValueSplit;
    static constexpr int kConsumerWarps = 4 * kConsumerGroups;
    static constexpr int kThreads = 128 * (kConsumerGroups + 2);
    static constexpr int kConsumerRegisters = kConsumerGroups == 1 ? 208 : 160;
    static_assert(kConsumerGroups * kConsumerRegisters + kScalerRegisters + kHelperRegisters <= 512);
};
constexpr int kZeroingBlocks = 64;  // extra blocks of a packed call, which clear the rows of no sequence

constexpr int kInputs = 5;  // raw q, k, g of so many chunks
constexpr int kValues = 4;  // v of so many chunks
constexpr int kStages = 6;  // factors of so many chunks

// The state is kept as 2^-A S, and q and k are decayed by 2^(G+A) and 2^(-G-A), so that the anchor A cancels and all
// stay near the middle of the exponent range. Entries with |G+A| > A, that is G < -2A, are steep.
constexpr float kAnchor = 60.0f;
constexpr float kAnchorScale = 1152921504606846976.0f;    // 2^60
constexpr float kAnchorInverse = 8.673617379884035e-19f;  // 2^-60

// A decay below this, 2^-64, is under the rounding of float64 beside the keys' own size: L and P do not feel it.
constexpr float kForgotten = -64.0f;

// Of a sum of gates. The choice is made entry by entry, from the gates up to that token alone.
__device__ __forceinline__ bool is_steep(float G) {
    return !(fabsf(G + kAnchor) <= kAnchor);
}  // true for NaN

// Raw rows of 128 bf16, padded so that eight rows lie in different banks.
constexpr int kRowBytes = 2 * kHeadDim + 16;

// Half a tile: rows of 64 bf16, 16-byte pieces exchanged by XOR with the row, as wgmma's 128-byte swizzle wants it.
__device__ __forceinline__ int half_tile_offset(int row, int column) {
    return row * 128 + ((((column >> 3) ^ (row & 7)) << 4) | ((column & 7) << 1));
}

// A 16 x 16 bf16 square as wgmma's core matrices: 8 x 8 blocks of eight 16-byte rows.
__device__ __forceinline__ int square_offset(int row, int column) {
    return ((row >> 3) * 2 + (column >> 3)) * 128 + (row & 7) * 16 + (column & 7) * 2;
}

// A 16 x 16 tf32 factor as wgmma's core matrices: columns of two 8 x 4 blocks, eight 16-byte rows each; the columns 16
// bytes further apart than that, so that they begin in different banks. Along K, each eight tokens have the even ones
// before the odd ones.
constexpr int kWordColumnBytes = 2 * 128 + 16;
__device__ __forceinline__ int word_offset(int row, int column) {
    const int slot = column % 8 / 2 + column % 2 * 4;
    return (column / 8 * 2 + slot / 4) * kWordColumnBytes + row * 16 + slot % 4 * 4;
}

// fp32 G of one chunk, for the steep path: four neighbours stay together, conflict-free along rows and along columns,
// and each half of K stays by itself.
__device__ __forceinline__ int decay_index(int row, int column) {
    return row * kHeadDim + (column ^ (4 * (row & 7)));
}

// Raw q, k and g of one chunk. Rows of g are two times 256 bytes, for each half of K, whatever its dtype fills of them;
// so the warp that reads a half can put G in its place, where an entry is steep.
struct alignas(128) Input {
    uint8_t q[kChunk * kRowBytes];
    uint8_t k[kChunk * kRowBytes];
    float g[kChunk * kHeadDim];
};

// Factors of one chunk.
struct alignas(1024) Stage {
    uint8_t decayed[2][2 * kChunk * 128];  // by half of K: k 2^(G+A), then q 2^(G+A), 16 rows each
    uint8_t k_inverse[2][kChunk * 128];    // by half of K: k 2^(-G-A)
    uint8_t k_restored[2][kChunk * 128];   // by half of K, where that half is steep: k 2^(G_last-G-A)
    uint8_t p_high[kChunk * kChunk * 2];   // scale/|q| P as two bf16 terms
    uint8_t p_low[kChunk * kChunk * 2];
    uint8_t inverse[4 * kWordColumnBytes];  // 1/|k| (I + L)^-1 beta in tf32
    float gamma[kHeadDim];                  // 2^G_last
    float q_norm[kChunk];                   // scale / |q|
    float k_norm[kChunk];                   // 1 / |k|
    uint32_t steep[2];                      // by half of K: whether it has steep entries
    uint32_t felt[2];  // of a steep half: pairs of channels whose steep pairs of tokens are felt, a bit each
};

struct SharedMemory {
    Stage stage[kStages];
    Input input[kInputs];
    uint8_t values[kValues][kChunk * kRowBytes];  // v of one chunk; each consumer warp loads its own, and puts its O in
                                                  // that place
    float lower[kBuilders][kChunk][kChunk];       // L, by columns, for each builder warp
    float beta[kBuilders][kChunk];
    uint64_t input_full[kInputs];  // q, k, g
    uint64_t input_empty[kInputs];
    uint64_t scaled[kStages];  // decayed operands and gamma
    uint64_t built[kStages];   // P, inverse and norms
    uint64_t stage_empty[kStages];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

}  // namespace kda::sm90
