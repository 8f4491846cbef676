// Where the roles' code lies in the instruction cache.
//
// The four warps of a scheduler run three programs (consumer, scaler, and builder or mover), which together are about
// as long as its cache: 16 KB, two lines of 128 bytes for each of 64 places modulo 8 KB, as far as profiles tell
// (docs/forward-hopper.md). So a few lines more or less between two roles, by whatever change of the code, make a call
// up to a third slower. The numbers below are those that leave the fewest lines in places where more than two lie;
// scripts/place_code.py finds them, for the compiler that it is run with.
#pragma once

#include <cuda_bf16.h>

namespace kda::sm90 {

// Lines left empty before a role's code. The compiler lays out builder, mover, scaler and consumer, in this order.
struct Placement {
    int mover, scaler, consumer;
};
constexpr int kLine = 128 / 16;  // instructions

// By the dtype of g, of which kernel, and how many blocks share the work.
template <typename GateT, bool kPairs, int kBlocks>
constexpr Placement kPlacement = {0, 0, 0};
template <>
constexpr Placement kPlacement<__nv_bfloat16, false, 1> = {51, 0, 16};
template <>
constexpr Placement kPlacement<__nv_bfloat16, true, 1> = {41, 1, 41};
template <>
constexpr Placement kPlacement<__nv_bfloat16, true, 2> = {51, 53, 21};
template <>
constexpr Placement kPlacement<float, false, 1> = {44, 0, 27};
template <>
constexpr Placement kPlacement<float, true, 1> = {53, 42, 34};
template <>
constexpr Placement kPlacement<float, true, 2> = {45, 19, 53};

}  // namespace kda::sm90
