// Scalars of the recurrence as the caller gave them: gates in base-2 logs, beta, the parameters of any float dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "api/chunk_kda_fwd_params.h"
#include "common/shapes.cuh"
#include "ptx/math.cuh"

namespace kda {

constexpr float kLog2E = 1.4426950408889634f;
// A token that forgets more than this forgets everything in fp32; keeps sums finite for gates of -inf.
constexpr float kForgetAll = -160.0f;

__device__ __forceinline__ float load_as_float(const void* pointer, Dtype dtype, int64_t index) {
    switch (dtype) {
        case Dtype::kFloat32: return static_cast<const float*>(pointer)[index];
        case Dtype::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(pointer)[index]);
        case Dtype::kFloat16: return __half2float(static_cast<const __half*>(pointer)[index]);
        default: return float(static_cast<const double*>(pointer)[index]);
    }
}

__device__ __forceinline__ float sigmoid(float x) {
    return ptx::rcp_approx(1.0f + ptx::exp2_approx(-kLog2E * x));
}

// log2(1 + 2^y). Near zero lg2.approx would only be exact to 2^-22 absolutely; the series is exact relatively, which is
// what slow gates summed over many tokens need.
__device__ __forceinline__ float softplus_base2(float y) {
    const float e = ptx::exp2_approx(-fabsf(y));
    const float series = kLog2E * e * (1.0f + e * (-1.0f / 2 + e * (1.0f / 3 + e * (-1.0f / 4 + e * (1.0f / 5)))));
    const float tail = e < 0.0625f ? series : ptx::log2_approx(1.0f + e);
    return fmaxf(y, 0.0f) + tail;
}

// The gate of one (head, channel): parameters read once, then g -> log2 of the decay, which is
//     given      g log2(e)
//     softplus   -exp(A) log2(1 + 2^y)                 y = log2(e) (g + bias)
//     bounded    bound log2(e) / (1 + 2^y)             y = -log2(e) exp(A) (g + bias)
struct Gate {
    float factor;
    float slope;  // y = slope g + shift
    float shift;

    Gate() = default;
    __device__ __forceinline__ Gate(const ChunkKdaFwdParams& params, int v_head, int channel) {
        const bool given = params.gate_mode == GateMode::kGiven, bounded = params.gate_mode == GateMode::kBounded;
        const float A = params.A_log && !given ? expf(load_as_float(params.A_log, params.A_log_dtype, v_head)) : 1.0f;
        const float bias = params.dt_bias && !given ? load_as_float(params.dt_bias, params.dt_bias_dtype,
                                                                    int64_t(v_head) * kHeadDim + channel)
                                                    : 0.0f;
        factor = given ? kLog2E : bounded ? params.lower_bound * kLog2E : -A;
        slope = bounded ? -kLog2E * A : kLog2E;
        shift = slope * bias;
    }

    // What the factor multiplies.
    template <GateMode kMode>
    __device__ __forceinline__ float activate(float g) const {
        if constexpr (kMode == GateMode::kSoftplus) return softplus_base2(slope * g + shift);
        if constexpr (kMode == GateMode::kBounded) return ptx::rcp_approx(1.0f + ptx::exp2_approx(slope * g + shift));
        return g;
    }

    template <GateMode kMode>
    __device__ __forceinline__ float log2_decay(float g) const {
        return ptx::max_nan(factor * activate<kMode>(g), kForgetAll);
    }
};

__device__ __forceinline__ float activate_beta(float beta, BetaMode mode) {
    if (mode == BetaMode::kGiven) return beta;
    return (mode == BetaMode::kSigmoid ? 1.0f : 2.0f) * sigmoid(beta);
}

}  // namespace kda
