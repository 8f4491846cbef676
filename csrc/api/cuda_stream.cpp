#include "api/cuda_stream.h"

#include <dlfcn.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace {

// A strong reference to this function would not load beside CPU-only PyTorch, and a weak one resolves to null, because
// libtorch_cuda is not in this library's scope. So it is looked up where it lives, once.
using CurrentStream = int32_t (*)(int32_t device_index, void** stream);

CurrentStream find_current_stream() {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return torch_cuda ? reinterpret_cast<CurrentStream>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream"))
                      : nullptr;
}

}  // namespace

cudaStream_t current_cuda_stream(int device_index) {
    static const CurrentStream current_stream = find_current_stream();
    STD_TORCH_CHECK(current_stream != nullptr, "fla_kda_backend: this PyTorch has no CUDA support");
    void* stream = nullptr;
    STD_TORCH_CHECK(current_stream(device_index, &stream) == 0, "fla_kda_backend: PyTorch gave no current CUDA stream");
    return static_cast<cudaStream_t>(stream);
}
