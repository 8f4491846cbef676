// Tensor-core products and fragment loads that every GPU since sm_80 has.
//
// Fragments of m16n8k16, lane = 4·row + column pair p (row 0..7, p 0..3):
//   A: a[0] (row, 2p) a[1] (row+8, 2p) a[2] (row, 2p+8) a[3] (row+8, 2p+8), two neighbours along k in each register
//   B: b0 (k = 2p, n = row), b1 (k = 2p+8, n = row), two neighbours along k in each register
//   C: c[0..1] (row, 2p..2p+1), c[2..3] (row+8, 2p..2p+1)
// So two C tiles side by side, rounded to bf16, are an A operand, or the B operands of two column tiles.
#pragma once

#include <cstdint>

namespace ptx {

// c += a · b, bf16 operands, fp32 sums.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a · b, tf32 operands, fp32 sums. m16n8k8, of which A holds (row, p) (row+8, p) (row, p+4) (row+8, p+4), B (k =
// p, n = row) (k = p+4, n = row), and C is as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8x8 matrices of 16-bit elements; lane 8·m + r gives the 16-byte aligned address of row r of matrix m.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

// Stores four 8x8 matrices, each transposed; addresses as for ldmatrix_x4 (sm_90).
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace ptx
