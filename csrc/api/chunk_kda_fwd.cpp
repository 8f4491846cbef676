#include "api/chunk_kda_fwd.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <initializer_list>

#include "api/chunk_kda_fwd_params.h"
#include "api/cuda_stream.h"
#include "sm80/chunk_kda_fwd/launch.h"
#include "sm90/chunk_kda_fwd/launch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kHeadDim = 128;

Dtype dtype_of(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return Dtype::kFloat32;
        case ScalarType::BFloat16: return Dtype::kBFloat16;
        case ScalarType::Half: return Dtype::kFloat16;
        case ScalarType::Double: return Dtype::kFloat64;
        default: STD_TORCH_CHECK(false, "chunk_kda_fwd: ", name, " must be a floating-point tensor");
    }
}

// Base address of a contiguous tensor of `numel` elements on q's device.
const void* address(const Tensor& tensor, const char* name, int64_t numel, int device_index, int alignment = 16) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device_index, "chunk_kda_fwd: ", name,
                    " must be on q's device");
    STD_TORCH_CHECK(tensor.is_contiguous(), "chunk_kda_fwd: ", name, " must be contiguous");
    STD_TORCH_CHECK(tensor.numel() == numel, "chunk_kda_fwd: ", name, " has ", tensor.numel(), " elements, expected ",
                    numel);
    const void* pointer = tensor.const_data_ptr();
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, "chunk_kda_fwd: ", name, " must be ",
                    alignment, "-byte aligned");
    return pointer;
}

// The rows of a [B, T, heads, ...] tensor on q's device, of any strides but that of the last dimension, in which it is
// contiguous.
Rows rows(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape, int device_index,
          int alignment) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device_index, "chunk_kda_fwd: ", name,
                    " must be on q's device");
    STD_TORCH_CHECK(tensor.dim() == int64_t(shape.size()), "chunk_kda_fwd: ", name, " must have ", shape.size(),
                    " dimensions");
    int64_t bytes[3], dim = 0;
    const int64_t element = tensor.element_size();
    for (const int64_t size : shape) {
        STD_TORCH_CHECK(tensor.size(dim) == size, "chunk_kda_fwd: ", name, " has size ", tensor.size(dim),
                        " in dimension ", dim, ", expected ", size);
        if (dim == 3) {
            STD_TORCH_CHECK(tensor.stride(dim) == 1, "chunk_kda_fwd: ", name,
                            " must be contiguous in its last dimension");
        } else {
            bytes[dim] = size == 1 ? 0 : tensor.stride(dim) * element;
            STD_TORCH_CHECK(bytes[dim] % alignment == 0, "chunk_kda_fwd: rows of ", name, " must be ", alignment,
                            "-byte aligned");
        }
        ++dim;
    }
    const void* pointer = tensor.const_data_ptr();
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, "chunk_kda_fwd: ", name, " must be ",
                    alignment, "-byte aligned");
    return Rows{pointer, bytes[0], bytes[1], bytes[2]};
}

constexpr int64_t kPortable = 0, kHopper = 1, kMaxOrdered = kda::sm90::kMaxRankedSequences;

cudaError_t launch_portable(const ChunkKdaFwdParams& params, cudaStream_t stream) {
    return params.g_dtype == Dtype::kBFloat16 ? kda::sm80::launch_gate_bf16(params, stream)
                                              : kda::sm80::launch_gate_fp32(params, stream);
}

#if FLA_KDA_HAS_SM90
cudaError_t launch_hopper_pass(ChunkKdaFwdParams params, Pass pass, int64_t paired, cudaStream_t stream) {
    params.pass = pass;
    params.paired = paired;
    const bool is_bf16 = params.g_dtype == Dtype::kBFloat16;
    using namespace kda::sm90;
    const auto launch = pass == Pass::kMaps ? (is_bf16 ? launch_gate_bf16_maps : launch_gate_fp32_maps)
                        : paired > 0        ? (is_bf16 ? launch_gate_bf16_paired : launch_gate_fp32_paired)
                                            : (is_bf16 ? launch_gate_bf16 : launch_gate_fp32);
    return launch(params, stream);
}

// Each turn, the heads that have not had two blocks yet and come next have them.
cudaError_t launch_turns(ChunkKdaFwdParams params, int turns, cudaStream_t stream) {
    const int64_t heads = params.num_sequences * params.num_v_heads;
    params.segments = turns;
    cudaError_t error = cudaSuccess;
    for (params.turn = 0; params.turn < turns && error == cudaSuccess; ++params.turn) {
        const int64_t paired = paired_a_turn(params), left = std::max(heads - params.turn * paired, int64_t(0));
        error = launch_hopper_pass(params, Pass::kTurn, std::min(paired, left), stream);
    }
    return error;
}

cudaError_t launch_hopper(const ChunkKdaFwdParams& params, int turns, cudaStream_t stream) {
    const int64_t heads = params.num_sequences * params.num_v_heads;
    cudaError_t error = params.next_work ? kda::sm90::launch_rank_sequences(params, stream) : cudaSuccess;
    if (error != cudaSuccess) return error;
    if (turns > 1) return launch_turns(params, turns, stream);
    if (params.segments == 1) return launch_hopper_pass(params, Pass::kWhole, turns * heads, stream);
    error = launch_hopper_pass(params, Pass::kMaps, heads, stream);
    if (error == cudaSuccess && heads > 0) error = kda::sm90::launch_join_segments(params, stream);
    if (error == cudaSuccess) error = launch_hopper_pass(params, Pass::kReplay, heads * (params.segments - 1), stream);
    return error;
}
#else
cudaError_t launch_hopper(const ChunkKdaFwdParams&, int, cudaStream_t) {
    return cudaErrorNoKernelImageForDevice;
}
#endif

}  // namespace

void chunk_kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, std::optional<Tensor> A_log,
                   std::optional<Tensor> dt_bias, std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens,
                   Tensor o, std::optional<Tensor> final_state, double scale, double lower_bound, int64_t modes,
                   int64_t kernel, int64_t segments, int64_t turns, std::optional<Tensor> scratch,
                   std::optional<Tensor> order) {
    const int64_t gate_mode = modes % 4, beta_mode = modes / 4 % 4;
    const bool use_gate = gate_mode != int64_t(GateMode::kGiven);
    STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, "chunk_kda_fwd: q and v must have four dimensions");
    STD_TORCH_CHECK(q.is_cuda(), "chunk_kda_fwd: q must be a CUDA tensor");
    const int64_t batch = q.size(0), tokens = q.size(1), H = q.size(2), HV = v.size(2);
    STD_TORCH_CHECK(q.size(3) == kHeadDim && v.size(3) == kHeadDim, "chunk_kda_fwd: K and V must be 128");
    STD_TORCH_CHECK(H > 0 && HV > 0 && HV % H == 0, "chunk_kda_fwd: HV must be a positive multiple of H");
    STD_TORCH_CHECK(tokens < (int64_t(1) << 31) - 32, "chunk_kda_fwd: T must be below 2^31 - 32");
    STD_TORCH_CHECK(HV < (1 << 24), "chunk_kda_fwd: too many heads");
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::BFloat16 && k.scalar_type() == ScalarType::BFloat16 &&
                        v.scalar_type() == ScalarType::BFloat16 && o.scalar_type() == ScalarType::BFloat16,
                    "chunk_kda_fwd: q, k, v and o must be bfloat16");
    STD_TORCH_CHECK(modes >= 0 && modes < 64 && gate_mode <= 2 && beta_mode <= 2, "chunk_kda_fwd: unknown modes");
    STD_TORCH_CHECK(kernel == kPortable || kernel == kHopper, "chunk_kda_fwd: unknown kernel");
    STD_TORCH_CHECK(segments >= 1 && segments <= 1024 && turns >= 0 && turns <= 1024 && (segments == 1 || turns <= 1),
                    "chunk_kda_fwd: segments must be 1..1024, turns 0..1024, and one of them at most 1");
    STD_TORCH_CHECK(kernel != kHopper || gate_mode != int64_t(GateMode::kBounded) || !(lower_bound < -110.0),
                    "chunk_kda_fwd: the Hopper kernel needs a lower_bound of at least -110");
    STD_TORCH_CHECK(A_log.has_value() || gate_mode != int64_t(GateMode::kSoftplus),
                    "chunk_kda_fwd: A_log may be absent only with lower_bound");

    const int device = q.get_device_index();
    ChunkKdaFwdParams params{};
    params.tokens = tokens;
    params.num_v_heads = int(HV);
    params.heads_a_query = int(HV / H);
    params.num_sequences = batch;
    if (cu_seqlens) {
        STD_TORCH_CHECK(batch == 1, "chunk_kda_fwd: cu_seqlens needs a batch of one");
        STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->numel() >= 1,
                        "chunk_kda_fwd: cu_seqlens must be [N + 1]");
        params.cu_seqlens_is_int64 = cu_seqlens->scalar_type() == ScalarType::Long;
        STD_TORCH_CHECK(params.cu_seqlens_is_int64 || cu_seqlens->scalar_type() == ScalarType::Int,
                        "chunk_kda_fwd: cu_seqlens must be int32 or int64");
        params.cu_seqlens =
            address(*cu_seqlens, "cu_seqlens", cu_seqlens->numel(), device, params.cu_seqlens_is_int64 ? 8 : 4);
        params.num_sequences = cu_seqlens->numel() - 1;
    }
    STD_TORCH_CHECK(params.num_sequences * HV < (int64_t(1) << 31) - 1024, "chunk_kda_fwd: too many sequences x heads");

    const int64_t state_numel = params.num_sequences * HV * kHeadDim * kHeadDim;
    params.q = rows(q, "q", {batch, tokens, H, kHeadDim}, device, 16);
    params.k = rows(k, "k", {batch, tokens, H, kHeadDim}, device, 16);
    params.v = rows(v, "v", {batch, tokens, HV, kHeadDim}, device, 16);
    params.g = rows(g, "g", {batch, tokens, HV, kHeadDim}, device, 16);
    params.beta = rows(beta, "beta", {batch, tokens, HV}, device, 1);
    params.o = const_cast<void*>(address(o, "o", batch * tokens * HV * kHeadDim, device));
    params.g_dtype = dtype_of(g, "g");
    STD_TORCH_CHECK(params.g_dtype == Dtype::kFloat32 || params.g_dtype == Dtype::kBFloat16,
                    "chunk_kda_fwd: g must be float32 or bfloat16");
    params.beta_dtype = dtype_of(beta, "beta");
    STD_TORCH_CHECK(params.beta_dtype == Dtype::kFloat32 || params.beta_dtype == Dtype::kBFloat16,
                    "chunk_kda_fwd: beta must be float32 or bfloat16");
    if (use_gate && A_log) {
        params.A_log = address(*A_log, "A_log", HV, device, 1);
        params.A_log_dtype = dtype_of(*A_log, "A_log");
    }
    if (use_gate && dt_bias) {
        params.dt_bias = address(*dt_bias, "dt_bias", HV * kHeadDim, device, 1);
        params.dt_bias_dtype = dtype_of(*dt_bias, "dt_bias");
    }
    if (initial_state) {
        STD_TORCH_CHECK(initial_state->scalar_type() == ScalarType::Float,
                        "chunk_kda_fwd: initial_state must be float32");
        params.initial_state = static_cast<const float*>(address(*initial_state, "initial_state", state_numel, device));
    }
    if (final_state) {
        STD_TORCH_CHECK(final_state->scalar_type() == ScalarType::Float, "chunk_kda_fwd: final_state must be float32");
        params.final_state =
            const_cast<float*>(static_cast<const float*>(address(*final_state, "final_state", state_numel, device)));
    }
    params.scale = float(scale);
    params.lower_bound = float(lower_bound);
    params.gate_mode = GateMode(gate_mode);
    params.beta_mode = BetaMode(beta_mode);
    params.use_qk_l2norm = modes & 16;
    params.state_v_first = modes & 32;

    params.segments = int(segments);
    if (segments > 1 || turns > 1) {
        STD_TORCH_CHECK(kernel == kHopper && scratch.has_value() && scratch->scalar_type() == ScalarType::Float,
                        "chunk_kda_fwd: segments and turns need the Hopper kernel and float32 scratch memory");
        const int64_t numel = segments > 1 ? 2 * segments * state_numel : state_numel;
        float* memory = const_cast<float*>(static_cast<const float*>(address(*scratch, "scratch", numel, device)));
        (segments > 1 ? params.maps : params.carried) = memory;
    }

    if (order) {
        STD_TORCH_CHECK(
            kernel == kHopper && cu_seqlens && segments == 1 && turns == 0 && order->scalar_type() == ScalarType::Int,
            "chunk_kda_fwd: order needs the Hopper kernel, a packed call in one launch and int32");
        const bool is_ordered = params.num_sequences <= kMaxOrdered;
        const int64_t numel = 1 + (is_ordered ? params.num_sequences : 0);
        params.next_work = const_cast<int*>(static_cast<const int*>(address(*order, "order", numel, device, 4)));
        if (is_ordered) params.order = params.next_work + 1;
    }

    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_cuda_stream(device);
    const cudaError_t error =
        kernel == kHopper ? launch_hopper(params, int(turns), stream) : launch_portable(params, stream);
    STD_TORCH_CHECK(error == cudaSuccess, "chunk_kda_fwd: launch failed: ", cudaGetErrorString(error));
}
