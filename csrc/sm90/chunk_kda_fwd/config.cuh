// Sizes, roles, number ranges and shared-memory layout of the Hopper forward kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "api/chunk_kda_fwd_params.h"
#include "common/sequence.cuh"
#include "common/shapes.cuh"
#include "ptx/math.cuh"

namespace kda::sm90 {

// Raw rows of 128 bf16, padded so that eight rows lie in different banks.
constexpr int kRowPadding = 16, kRowBytes = 2 * kHeadDim + kRowPadding;

// Roles, by warpgroup: consumers, each of which owns 64 columns of V; then scalers, two pairs of warps that decay q and
// k, a chunk in turn; then one of helpers, of which warp 0 moves all rows in and out and the others build L, P and the
// inverse, a chunk in turn. Where one is left, its first warp moves v and o instead, and the others have nothing to do.
constexpr int kThreads = 512;
constexpr int kGroupValues = 64;
constexpr int kScalerPairs = 2;
constexpr int kBuilders = 3;

// How blocks share the work. Two make the factors of every other chunk, for both.
enum class Form {
    kSingle,
    kPair,   // two, a cluster, each for half of V
    kTwins,  // two, each for all of V, of which one finds a segment's B and the other its M (Pass::kMaps)
};

// Which forms a launch's blocks have.
enum class Kernel {
    kSingles,
    kPaired,  // pairs, then single blocks
    kMaps,    // pairs, then twins
};

template <Form kForm>
struct Roles {
    static constexpr int kBlocks = kForm == Form::kSingle ? 1 : 2;  // of a cluster
    static constexpr int kParts = kForm == Form::kPair ? 2 : 1;     // of V
    static constexpr int kConsumerGroups = kHeadDim / kGroupValues / kParts;
    static constexpr int kConsumerWarps = 4 * kConsumerGroups;
    static constexpr int kSpareGroups = kThreads / 128 - kConsumerGroups - 2;
    static constexpr int kConsumerRegisters = kParts == 1 ? 160 : 208;
    static constexpr int kScalerRegisters = kParts == 1 ? 80 : 128;
    static constexpr int kHelperRegisters = kParts == 1 ? 112 : 128;
    static constexpr int kSpareRegisters = 48;
    static_assert(kConsumerGroups * kConsumerRegisters + kScalerRegisters + kHelperRegisters +
                      kSpareGroups * kSpareRegisters <=
                  65536 / 128);

    // How many chunks there is room for: raw q, k, g, of those that the block makes; v, or its part; and factors.
    static constexpr int kInputs = kForm == Form::kSingle ? 5 : 4;
    static constexpr int kValues = 4, kValueRowBytes = 2 * kHeadDim / kParts + kRowPadding;
    static constexpr int kStages = kForm == Form::kPair ? 10 : 8;
    static_assert(kBuilders <= kInputs && kScalerPairs <= kInputs);
    static_assert(kBlocks * kBuilders <= kStages && kStages % kBlocks == 0);
};

// Extra blocks of a packed call, which clear the rows of no sequence.
constexpr int kZeroingBlocks = 64;
KDA_HOST_DEVICE inline int zeroing_blocks(const ChunkKdaFwdParams& params) {
    return params.cu_seqlens && !goes_on(params) ? kZeroingBlocks : 0;
}

// The others of a launch of single blocks alone, which go on to other works.
__device__ __forceinline__ unsigned staying_blocks(const ChunkKdaFwdParams& params) {
    return gridDim.x - zeroing_blocks(params);
}

// Which of a launch's works is this block's. Pairs of blocks come first.
template <Form kForm>
__device__ __forceinline__ unsigned work_of_block(const ChunkKdaFwdParams& params) {
    return kForm == Form::kPair ? unsigned(ptx::block_id()) / 2 : ptx::block_id() - unsigned(params.paired);
}

// How many chunks' factors one of the blocks makes.
template <int kBlocks>
__device__ __forceinline__ int own_chunks(int chunks, int rank) {
    return (chunks - rank + kBlocks - 1) / kBlocks;
}

// The state is kept as 2^-A S, and q and k are decayed by 2^(G+A) and 2^(-G-A), so that the anchor A cancels and all
// stay near the middle of the exponent range. Entries with G < -2A are steep: there k 2^(-G-A) may overflow, and is
// left out of the products. (q and k 2^(G+A) may become zero there, beside which all that a product brings is
// forgotten.)
constexpr float kAnchor = 60.0f;
constexpr float kAnchorScale = 1152921504606846976.0f;    // 2^60
constexpr float kAnchorInverse = 8.673617379884035e-19f;  // 2^-60

// A decay below this, 2^-64, is under the rounding of float64 beside the keys' own size: L and P do not feel it.
constexpr float kForgotten = -64.0f;
// ptx::exp2_approx is zero below minus this.
constexpr float kExponentRange = 126.0f;

// Of a sum of gates; true for NaN. The choice is made entry by entry, from the gates up to that token alone.
__device__ __forceinline__ bool is_steep(float G) {
    return !(G >= -2.0f * kAnchor);
}
// The same as 1 or 0, without a predicate, of which there are few; 0 for NaN.
__device__ __forceinline__ float steepness(float G) {
    constexpr float kMuch = kAnchorScale;
    return __saturatef(-kMuch * G - 2.0f * kAnchor * kMuch);
}

// Half a tile: rows of 64 bf16, 16-byte pieces exchanged by XOR with the row, as wgmma's 128-byte swizzle wants it.
__device__ __forceinline__ int half_tile_offset(int row, int column) {
    return row * 128 + ((((column >> 3) ^ (row & 7)) << 4) | ((column & 7) << 1));
}

// A lower triangular 16 x 16 factor in tf32: 8 x 8 tiles by rows, the upper right one left out, 32 bytes more from each
// to the next so that they begin in different banks. A lane's B operand of a product with m16n8k8 is one float2, as the
// even tokens of a tile are taken for its first four and the odd ones for its last.
constexpr int kTileBytes = 8 * 8 * 4 + 32;
using Factor = uint8_t[3 * kTileBytes];
__device__ __forceinline__ int factor_offset(int row, int column) {
    return ((row >> 3) + (column >> 3)) * kTileBytes + (row & 7) * 32 + (column & 7) * 4;
}

// Where wide operands have a channel: the two C tiles of each step of 16 take their lanes' columns from four
// neighbouring channels, so that a lane holds four neighbours of the state.
__device__ __forceinline__ int operand_column(int channel) {
    return (channel & ~14) | (channel << 2 & 8) | (channel >> 1 & 6);
}

// Of the tokens' norms: together those of the two pairs of tokens that a lane of two C tiles has as its columns.
__device__ __forceinline__ int norm_index(int token) {
    return token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
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

// Rows of 64 channels, which are where operand_column says.
struct alignas(1024) WideOperands {
    uint8_t k_decayed[kChunk * 128];  // k 2^(G+A)
    uint8_t q_decayed[kChunk * 128];  // q 2^(G+A)
    uint8_t k_inverse[kChunk * 128];  // k 2^(-G-A); once built, k 2^(G_last-G-A) where it is steep
};

// Of one chunk, beside its wide operands.
struct alignas(16) Factors {
    Factor inverse;         // 1/|k| (I + L)^-1 beta
    Factor p;               // P, without scale/|q|
    float gamma[kHeadDim];  // 2^G_last
    float q_norm[kChunk];   // scale / |q|, in the places of norm_index
    float k_norm[kChunk];   // 1 / |k|, likewise
    uint32_t steep[2];      // by half of K: pairs of channels that have steep entries, a bit each
    uint32_t felt[2];       // in which blocks others may feel these (steep_pairs.cuh)
};

// All that a chunk's consumers need, where it is: operands by half of K.
struct Stage {
    WideOperands* wide;
    Factors& factors;
};

// Of so many chunks. Each has one address, unless places between them would leave no room for one more input.
template <Form kForm>
struct Stages {
    struct {
        WideOperands wide[2];
        Factors factors;
    } stage[Roles<kForm>::kStages];

    __device__ __forceinline__ Stage operator[](int index) { return {stage[index].wide, stage[index].factors}; }
};

template <>
struct Stages<Form::kPair> {
    WideOperands wide[Roles<Form::kPair>::kStages][2];
    Factors factors[Roles<Form::kPair>::kStages];

    __device__ __forceinline__ Stage operator[](int index) { return {wide[index], factors[index]}; }
};

// A builder's own: the blocks on L's diagonal and their inverses, each by columns, with room between columns and blocks
// so that a C tile's entries lie in different banks; and scalars of its tokens.
struct alignas(16) Blocks {
    float lower[2][8 * 12 + 4];
    float inverse[2][8 * 12 + 4];
    float squares[2][kChunk];  // |q|^2, |k|^2
    float beta[kChunk];
};

// What a block works on.
struct Located {
    Segment segment;
    Work work;  // -1 chunks: there is nothing more to do
};
// Roles of a block that stays are in different works, of at most so many.
constexpr int kLocated = 4;

template <Form kForm>
struct SharedMemory {
    using Roles = Roles<kForm>;

    Stages<kForm> stages;
    Input input[Roles::kInputs];
    alignas(16) uint8_t values[Roles::kValues][kChunk * Roles::kValueRowBytes];  // v of one chunk, and then its o
    Blocks blocks[kBuilders];
    Located located[kLocated];  // other blocks have the first one alone, and no barriers for it
    uint64_t located_full[kLocated];
    uint64_t located_empty[kLocated];     // of all roles but the mover, which finds them
    uint64_t first_loads;                 // the first rows are on their way
    uint64_t input_full[Roles::kInputs];  // q, k, g
    uint64_t input_empty[Roles::kInputs];
    uint64_t values_full[Roles::kValues];  // v
    uint64_t values_done[Roles::kValues];  // o in its place
    uint64_t scaled[Roles::kStages];       // decayed operands and gamma
    uint64_t built[Roles::kStages];        // P, inverse and norms
    uint64_t stage_empty[Roles::kStages];  // of all blocks' consumers; in the block that fills the stage
};

template <Form kForm>
constexpr bool kFits = sizeof(SharedMemory<kForm>) <= 227 * 1024 &&
                       offsetof(SharedMemory<kForm>, input) % 512 == 0;  // G's rows may be addressed by XOR
static_assert(kFits<Form::kSingle> && kFits<Form::kPair> && kFits<Form::kTwins>);
static_assert(sizeof(Input) % 512 == 0 && offsetof(Input, g) % 512 == 0);

}  // namespace kda::sm90
