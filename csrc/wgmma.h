// SPDX-License-Identifier: Apache-2.0
// Helpers of warpgroup products (sm_90a only). The products themselves are generated, one function for each shape that
// a kernel uses (torch_tile/codegen/cuda_wgmma.py).
#pragma once
#include "memory.h"

namespace tile {

TILE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TILE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// `behind`: arithmetic that stands before the wait stays there. ptxas moves waits up across what needs no result, and so
// products would not run beside it. It keeps to a branch, which is never taken: there are threads.
template <int pending, bool behind = false> TILE_DEVICE void wgmma_wait() {
  static_assert(pending >= 0 && pending <= 7, "at most 7 groups can be under way");
  if (behind)
    asm volatile(
        "{\n"
        "  .reg .pred never;\n"
        "  .reg .u32 threads;\n"
        "STAY:\n"
        "  mov.u32 threads, %%ntid.x;\n"
        "  setp.eq.u32 never, threads, %0;\n"
        "  @never bra STAY;\n"
        "}" ::"n"(0) : "memory");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keep the arithmetic that makes `value` in front of waits that follow: ptxas keeps to a store, which never happens.
TILE_DEVICE void wgmma_hold(const float* value) {
  asm volatile(
      "{\n"
      "  .reg .pred never;\n"
      "  .reg .u32 threads;\n"
      "  mov.u32 threads, %%ntid.x;\n"
      "  setp.eq.u32 never, threads, 0;\n"
      "  @never st.shared.f32 [threads], %0;\n"
      "}" ::"f"(*value) : "memory");
}

// Mark results of products that were waited for: reads of them stay behind this.
TILE_DEVICE void wgmma_result(float& d) { asm volatile("" : "+f"(d)::"memory"); }
TILE_DEVICE void wgmma_result(int& d) { asm volatile("" : "+r"(d)::"memory"); }

template <int count> TILE_DEVICE void wgmma_results(float* d) {
#pragma unroll
  for (int i = 0; i < count; ++i) wgmma_result(d[i]);
}
template <int count> TILE_DEVICE void wgmma_results(int* d) {
#pragma unroll
  for (int i = 0; i < count; ++i) wgmma_result(d[i]);
}
template <int count> TILE_DEVICE void wgmma_results(f16* d) { wgmma_results<count / 2>(reinterpret_cast<int*>(d)); }

// The number of this thread's warpgroup. The exchange tells the compiler that all lanes of a warp have the same number.
// Computations on it are then made once for the warp.
TILE_DEVICE int warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

// How a product walks an operand in shared memory (intrinsics/wgmma.py, Descriptor), in bytes. Of the descriptor's bits
// only the start varies: 0-13 hold it, 16-29 `leading`, 32-45 `stride`, all in units of 16 bytes, and 62-63 the swizzle.
// Step i of a product along K begins `i % run * near + i / run * far` bytes after its first one.
template <int swizzle, int leading, int stride, bool across, int near = 0, int run = 1, int far = 0> struct Walk {
  static_assert(swizzle == 0 || swizzle == 32 || swizzle == 64 || swizzle == 128, "a panel spans 32, 64 or 128 bytes");
  static_assert(leading % 16 == 0 && leading >= 0 && leading < 1 << 18, "`leading` is a multiple of 16 below 2^18");
  static_assert(stride % 16 == 0 && stride >= 0 && stride < 1 << 18, "`stride` is a multiple of 16 below 2^18");
  static_assert(near % 16 == 0 && far % 16 == 0, "steps are multiples of 16");
  static constexpr int is_across = across;
  static constexpr uint64_t upper = stride >> 4 | (swizzle == 128 ? 1u : swizzle == 64 ? 2u : swizzle == 32 ? 3u : 0u) << 30;

  // The lower half, `step` bytes after `address`, both multiples of 16. Of a shared address the first 18 bits count: above
  // them a block of a cluster has its rank. Operands lie below 2^18, so that sums stay in their bits.
  TILE_DEVICE static constexpr unsigned lower(unsigned address, int step) {
    return ((address & 0x3ffff) >> 4) + (step >> 4) + (leading >> 4 << 16);
  }
  TILE_DEVICE static uint64_t from(const void* start, int step) {
    return upper << 32 | lower(shared_address(start), step);
  }

  // The difference of step `i`'s descriptor from the first one's.
  TILE_DEVICE static constexpr int step(int i) { return (i % run * near + i / run * far) >> 4; }
};

}  // namespace tile
