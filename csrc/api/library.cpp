// Names the operators of the library.
#include <torch/csrc/stable/library.h>

#include "api/build_info.h"
#include "api/chunk_kda_fwd.h"
#include "api/transpose_tokens.h"

STABLE_TORCH_LIBRARY(fla_kda_backend, library) {
    library.def("build_info() -> str");
    library.def(
        "chunk_kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? initial_state, Tensor? cu_seqlens, Tensor(a!) o, Tensor(b!)? final_state, float scale, "
        "float lower_bound, int modes, int kernel, int segments, int turns, Tensor(c!)? scratch, Tensor(d!)? order) -> "
        "()");
    library.def("transpose_tokens(Tensor x, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fla_kda_backend, CompositeExplicitAutograd, library) {
    library.impl("build_info", TORCH_BOX(&build_info));
}

STABLE_TORCH_LIBRARY_IMPL(fla_kda_backend, CUDA, library) {
    library.impl("chunk_kda_fwd", TORCH_BOX(&chunk_kda_fwd));
    library.impl("transpose_tokens", TORCH_BOX(&transpose_tokens));
}
