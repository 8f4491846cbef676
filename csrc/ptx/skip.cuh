// Room in a kernel's code.
#pragma once

namespace ptx {

// kCount instructions that do nothing, so that the code after them lies elsewhere in the instruction cache. To be
// jumped over.
template <int kCount>
__device__ __forceinline__ void skip_instructions() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("bar.warp.sync 0xffffffff;");
}

}  // namespace ptx
