// Where the roles' code lies in the instruction cache.
//
// The four warps of a scheduler run three programs (consumer, scaler, and builder or mover), which together are about
// as long as its cache: 16 KB, two lines of 128 bytes for each of 64 places modulo 8 KB, as far as profiles tell
// (docs/forward-hopper.md). So a few lines more or less between two roles, by whatever change of the code, make a call
// up to a third slower. The numbers below are those that leave the fewest lines in places where more than two lie;
// scripts/place_code.py finds them, for the compiler that it is run with.
#pragma once

#include <cuda_bf16.h>

#include "sm90/chunk_kda_fwd/config.cuh"

namespace kda::sm90 {

// Lines left empty before a role's code. The compiler lays out builder, mover, scaler and consumer, in this order.
struct Placement {
    int mover, scaler, consumer;
};
constexpr int kLine = 128 / 16;  // instructions

// By the dtype of g, of which kernel, and how blocks share the work.
template <typename GateT, Kernel kKernel, Form kForm>
constexpr Placement kPlacement = {0, 0, 0};
template <>
constexpr Placement kPlacement<__nv_bfloat16, Kernel::kSingles, Form::kSingle> = {14, 39, 51};
template <>
constexpr Placement kPlacement<__nv_bfloat16, Kernel::kPaired, Form::kSingle> = {40, 35, 4};
template <>
constexpr Placement kPlacement<__nv_bfloat16, Kernel::kPaired, Form::kPair> = {60, 53, 59};
template <>
constexpr Placement kPlacement<__nv_bfloat16, Kernel::kMaps, Form::kTwins> = {20, 56, 61};
template <>
constexpr Placement kPlacement<__nv_bfloat16, Kernel::kMaps, Form::kPair> = {25, 24, 59};
template <>
constexpr Placement kPlacement<float, Kernel::kSingles, Form::kSingle> = {58, 12, 29};
template <>
constexpr Placement kPlacement<float, Kernel::kPaired, Form::kSingle> = {32, 11, 35};
template <>
constexpr Placement kPlacement<float, Kernel::kPaired, Form::kPair> = {38, 34, 33};
template <>
constexpr Placement kPlacement<float, Kernel::kMaps, Form::kTwins> = {28, 8, 34};
template <>
constexpr Placement kPlacement<float, Kernel::kMaps, Form::kPair> = {1, 7, 34};

}  // namespace kda::sm90
