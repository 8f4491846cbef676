// Warpgroup products (sm_90a): D (64 x N, registers) = A (64 x 16, registers) B (16 x N, shared memory) [+ D], bf16
// operands.
//
// Each warp of the warpgroup holds 16 rows, in the fragment layouts of mma.cuh: A as one m16k16 operand, D as N / 8 C
// tiles. Issue: wgmma_fence, products, wgmma_commit; the registers belong to the hardware until wgmma_wait.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"

namespace ptx {

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of the latest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptors of B operands. `offset` (a constant, in bytes, a multiple of 16) is added to the address inside the
// descriptor, which costs one instruction.

// Rows (of N where K is contiguous, of K where N is) of 128 bytes, 16-byte pieces exchanged by XOR with the row modulo
// 8, base 1024-byte aligned. Rows in groups of eight, one group after the other.
__device__ __forceinline__ uint64_t operand_swizzled_128(uint32_t shared) {
    return uint64_t(shared >> 4) | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Moves an operand by `bytes`, in its register: the compiler would rather put each one together anew.
__device__ __forceinline__ void advance_operand(uint64_t& operand, int bytes) {
    operand += bytes / 16;
    asm("" : "+l"(operand));
}

// N = 32. `d`: 16 registers.
template <int kTransposeB>
__device__ __forceinline__ void wgmma_m64n32k16(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, p, 1, 1, %22;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(kTransposeB));
}

// N = 64. `d`: 32 registers. With kTransposeB, N is contiguous in B.
template <int kTransposeB>
__device__ __forceinline__ void wgmma_m64n64k16(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(kTransposeB));
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
