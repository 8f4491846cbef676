// The operator chunk_kda_fwd: checks tensors, describes the call in one struct, launches a kernel on the tensors'
// device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

// `modes`: GateMode + 4 BetaMode + 16 use_qk_l2norm + 32 state_v_first, in one number since each argument of an
// operator takes a quarter of a microsecond. `lower_bound`: of GateMode::kBounded. `kernel`: 0 the portable one, 1 the
// Hopper one (sm_90 alone, and a lower_bound of at least -110). On the Hopper kernel, `segments`: how many parts of
// each sequence run side by side; above 1, `scratch` is memory, [N, segments, HV, 2, 128, 128] float32. `turns`: or in
// how many turns all heads have two blocks, 0 where none has. Above 1, a turn is a part of each sequence, and `scratch`
// is [N, HV, 128, 128] float32. `order`: memory of a packed call in one launch, int32, so that blocks take what is
// left as they are done: [1 + N], and its sequences are taken longest first, or [1] where there are more than 1024.
// Rows of q, k, v and g (their last dimension) are contiguous and 16-byte aligned, and so is what has no heads; `o` and
// `final_state` are written, every element of them. Raises std::runtime_error, before anything is launched, on a call
// that does not fit; launch errors raise at once.
void chunk_kda_fwd(torch::stable::Tensor q, torch::stable::Tensor k, torch::stable::Tensor v, torch::stable::Tensor g,
                   torch::stable::Tensor beta, std::optional<torch::stable::Tensor> A_log,
                   std::optional<torch::stable::Tensor> dt_bias, std::optional<torch::stable::Tensor> initial_state,
                   std::optional<torch::stable::Tensor> cu_seqlens, torch::stable::Tensor o,
                   std::optional<torch::stable::Tensor> final_state, double scale, double lower_bound, int64_t modes,
                   int64_t kernel, int64_t segments, int64_t turns, std::optional<torch::stable::Tensor> scratch,
                   std::optional<torch::stable::Tensor> order);
