// Copies a tensor whose tokens lie next to each other, as convolutions over time leave it, into rows of channels.
//
// A block copies 64 tokens x 64 channels through shared memory, so that both sides of the copy are whole 128-byte
// lines.
#include "sm80/transpose_tokens/launch.h"

namespace kda::sm80 {

namespace {

constexpr int kTile = 64, kThreads = 256;
// 33 words: tokens, which neighbouring lanes write, lie in different banks.
constexpr int kPitch = kTile + 2;

__global__ void __launch_bounds__(kThreads)
    transpose_tokens_kernel(const __grid_constant__ TransposeTokensParams params) {
    __shared__ uint16_t tile[kTile * kPitch];
    const int64_t row_length = params.heads * params.channels, columns = row_length / kTile;
    const int64_t token_tiles = (params.tokens + kTile - 1) / kTile;
    const int64_t first_channel = blockIdx.x % columns * kTile, rest = blockIdx.x / columns;
    const int64_t batch = rest / token_tiles, first_token = rest % token_tiles * kTile;

    const int token = threadIdx.x % kTile;
    const bool exists = first_token + token < params.tokens;
    const uint16_t* source = params.source + batch * params.batch_stride + first_token + token;
    uint16_t value[kTile * kTile / kThreads];
#pragma unroll
    for (int i = 0; i < kTile * kTile / kThreads; ++i) {
        const int64_t channel = first_channel + threadIdx.x / kTile + i * (kThreads / kTile);
        const int64_t offset =
            channel / params.channels * params.head_stride + channel % params.channels * params.channel_stride;
        value[i] = exists ? source[offset] : uint16_t(0);
    }
#pragma unroll
    for (int i = 0; i < kTile * kTile / kThreads; ++i) {
        tile[token * kPitch + threadIdx.x / kTile + i * (kThreads / kTile)] = value[i];
    }
    __syncthreads();
    constexpr int kPieces = kTile / 8;  // 16 bytes each
    for (int i = threadIdx.x; i < kTile * kPieces && first_token + i / kPieces < params.tokens; i += kThreads) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(tile + i / kPieces * kPitch + i % kPieces * 8);
        uint16_t* target = params.target + ((batch * params.tokens + first_token + i / kPieces) * row_length +
                                            first_channel + i % kPieces * 8);
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

}  // namespace

cudaError_t launch_transpose_tokens(const TransposeTokensParams& params, cudaStream_t stream) {
    const int64_t blocks =
        params.batch * ((params.tokens + kTile - 1) / kTile) * (params.heads * params.channels / kTile);
    if (blocks == 0) return cudaSuccess;
    if (blocks >= int64_t(1) << 31) return cudaErrorInvalidConfiguration;
    transpose_tokens_kernel<<<dim3(unsigned(blocks)), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace kda::sm80
