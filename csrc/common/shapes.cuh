// Sizes that every forward kernel shares.
#pragma once

namespace kda {

constexpr int kChunk = 16;
constexpr int kHeadDim = 128;  // K = V

}  // namespace kda
