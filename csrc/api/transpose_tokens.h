// The operator transpose_tokens: a contiguous copy of a [B, T, H, K] tensor whose tokens lie next to each other.
#pragma once

#include <torch/csrc/stable/tensor.h>

// x: bfloat16, stride 1 between tokens. out: contiguous, of the same shape, dtype and device; every element is written.
// H K is a multiple of 64. Raises std::runtime_error, before anything is launched, on tensors that do not fit; launch
// errors raise at once.
void transpose_tokens(torch::stable::Tensor x, torch::stable::Tensor out);
