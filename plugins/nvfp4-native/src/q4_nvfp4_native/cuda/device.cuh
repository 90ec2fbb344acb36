// The few things that only a GPU can do, each behind a name: the rest of this folder is plain C++.
//
// A test compiles the same kernels for the CPU, with another implementation of these names (Q4_EMULATED), and so checks
// every index that they compute without a GPU. Reference: PTX ISA 8.7 and later, "mma", "ldmatrix", "cp.async", "cvt".
#pragma once

#ifdef Q4_EMULATED
#include "emulator.hpp"
#else

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef long long int64;

#define Q4_DEVICE __device__ __forceinline__
#define Q4_KERNEL extern "C" __global__
#define Q4_UNROLL _Pragma("unroll")

extern __shared__ uint8 q4_shared_bytes[];

Q4_DEVICE uint8* shared_bytes() { return q4_shared_bytes; }
Q4_DEVICE int thread_index() { return threadIdx.x; }
Q4_DEVICE int block_index() { return blockIdx.x; }
Q4_DEVICE int block_threads() { return blockDim.x; }
Q4_DEVICE void synchronize() { __syncthreads(); }
Q4_DEVICE bool any_in_block(bool value) { return __syncthreads_or(value) != 0; }
Q4_DEVICE uint32 shuffle_xor(uint32 value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }

Q4_DEVICE uint32 bits_of(float value) { return __float_as_uint(value); }
Q4_DEVICE float float_of(uint32 bits) { return __uint_as_float(bits); }
Q4_DEVICE float divide(float value, float divisor) { return __fdiv_rn(value, divisor); }
Q4_DEVICE float reciprocal(float value) { return __frcp_rn(value); }

Q4_DEVICE float from_half(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
Q4_DEVICE uint16 to_half(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
Q4_DEVICE uint16 to_bfloat16(float value) {
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Copies `bytes` (4, 8 or 16) to shared memory behind the thread's back, or zeros where `is_inside` is false.
template <int bytes>
Q4_DEVICE void copy_async(uint8* to, const uint8* from, bool is_inside) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(to));
    const int count = is_inside ? bytes : 0;
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(count) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(bytes), "r"(count)
                     : "memory");
    }
}
Q4_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's latest groups of copies are under way.
template <int pending>
Q4_DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Loads four matrices of 8 rows by 16 bytes; lane 8 j + r gives the address of row r of matrix j. Lane l gets, of each
// matrix, bytes 4 (l % 4) … 4 (l % 4) + 3 of row l / 4.
Q4_DEVICE void load_matrices(uint32 (&registers)[4], const uint8* row) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
}

// sums[16, 8] += (A[16, 64] under its scales) · (B[8, 64] under its scales)ᵀ, E2M1 codes, float32 sums.
//
// Lane l, g = l / 4, t = l % 4; nibble i of a register is in-feature 8 t + i:
//   a[0], a[1]: rows g, g + 8; a[2], a[3]: the same rows, 32 in-features on.   b[0]: row g of B; b[1]: 32 on.
//   sums: row g, columns 2 t, 2 t + 1; row g + 8, the same columns.
//   scales of A: lanes with t = 0 give row g, with t = 1 row g + 8 (selector 0 reads the first pair of each four).
//   scales of B: the lane with t = 0 gives row g (selector 0 reads the first of each four).
// E4M3: four scale bytes a register, of 16 in-features each, the first in the low byte. E8M0: two, of 32 each.
struct E4m3 {
    static constexpr int block = 16;
    static Q4_DEVICE void multiply(float (&sums)[4], const uint32 (&a)[4], const uint32 (&b)[2], uint32 scales_a,
                                   uint32 scales_b) {
        asm volatile(
            "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales_a), "r"(scales_b));
    }
};
struct E8m0 {
    static constexpr int block = 32;
    static Q4_DEVICE void multiply(float (&sums)[4], const uint32 (&a)[4], const uint32 (&b)[2], uint32 scales_a,
                                   uint32 scales_b) {
        asm volatile(
            "mma.sync.aligned.kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales_a), "r"(scales_b));
    }
};

#endif
