// PyTorch's current CUDA stream, in a library that must also load where PyTorch has no CUDA.
#pragma once

#include <cuda_runtime_api.h>

cudaStream_t current_cuda_stream(int device_index);
