// SPDX-License-Identifier: Apache-2.0
// d += a * b on the tensor cores, one instruction per function; a, b, d are a lane's registers (torch_tile/intrinsics/
// matrix.py states which elements). Types are told apart by overloading; m16n8k8 on floats is tf32.
#pragma once
#include "cuda_types.h"

namespace tile {

#define TILE_MMA(shape, types, D, A, B, reg)                                                                        \
  __device__ __forceinline__ void mma_##shape(D* d, const A* a, const B* b) {                                       \
    const unsigned* x = reinterpret_cast<const unsigned*>(a);                                                       \
    const unsigned* y = reinterpret_cast<const unsigned*>(b);                                                       \
    asm volatile("mma.sync.aligned." #shape ".row.col." types                                                       \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
                 : "+" reg(d[0]), "+" reg(d[1]), "+" reg(d[2]), "+" reg(d[3])                                       \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));                               \
  }
TILE_MMA(m16n8k16, "f32.f16.f16.f32", float, f16, f16, "f")
TILE_MMA(m16n8k16, "f32.bf16.bf16.f32", float, bf16, bf16, "f")
TILE_MMA(m16n8k8, "f32.tf32.tf32.f32", float, float, float, "f")
TILE_MMA(m16n8k32, "s32.s8.s8.s32", int, signed char, signed char, "r")
TILE_MMA(m16n8k32, "s32.s8.u8.s32", int, signed char, unsigned char, "r")
TILE_MMA(m16n8k32, "s32.u8.s8.s32", int, unsigned char, signed char, "r")
TILE_MMA(m16n8k32, "s32.u8.u8.s32", int, unsigned char, unsigned char, "r")
TILE_MMA(m16n8k32, "f32.e4m3.e4m3.f32", float, e4m3, e4m3, "f")
TILE_MMA(m16n8k32, "f32.e4m3.e5m2.f32", float, e4m3, e5m2, "f")
TILE_MMA(m16n8k32, "f32.e5m2.e4m3.f32", float, e5m2, e4m3, "f")
TILE_MMA(m16n8k32, "f32.e5m2.e5m2.f32", float, e5m2, e5m2, "f")
#undef TILE_MMA

__device__ __forceinline__ void mma_m16n8k16(f16* d, const f16* a, const f16* b) {
  const unsigned* x = reinterpret_cast<const unsigned*>(a);
  const unsigned* y = reinterpret_cast<const unsigned*>(b);
  unsigned* z = reinterpret_cast<unsigned*>(d);
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(z[0]), "+r"(z[1]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}

__device__ __forceinline__ void mma_m8n8k4(double* d, const double* a, const double* b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(d[0]), "+d"(d[1]) : "d"(a[0]), "d"(b[0]));
}

// The float nearest to x among those that a tf32 operand can hold (halves away from 0).
__device__ __forceinline__ float round_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// c plus the products of the four signed bytes of a and b.
__device__ __forceinline__ int dp4a(int a, int b, int c) {
  int d;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace tile
