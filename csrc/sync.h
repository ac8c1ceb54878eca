// SPDX-License-Identifier: Apache-2.0
// Barriers of threads. After one, each thread sees the others' earlier writes to shared and global memory.
#pragma once
#include "cuda_types.h"

namespace tile {

TILE_DEVICE void barrier() { __syncthreads(); }      // all threads of the block
TILE_DEVICE void warp_barrier() { __syncwarp(); }    // the 32 threads of a warp
TILE_DEVICE void lanes_barrier() { __syncwarp(__activemask()); }  // those of them that come here together

// Whether this lane is the one of its warp that goes on. The chip chooses it (elect.sync), so the assembler knows that it
// is alone, and starts its bulk copies without a loop over lanes. Nothing may depend on which lane it is.
TILE_DEVICE bool one_lane(bool) {
  unsigned chosen;
  asm volatile(
      "{\n"
      ".reg .pred alone;\n"
      "elect.sync _|alone, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, alone;\n"
      "}" : "=r"(chosen));
  return chosen;
}

// `threads` threads of the block, whole warps, at barrier `number`; 0 is that of `barrier`.
template <int number, int threads> TILE_DEVICE void named_barrier() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0, "barriers 1 to 15 are met by whole warps");
  asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

// The same for those that need not wait for the others.
template <int number, int threads> TILE_DEVICE void named_barrier_arrive() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0, "barriers 1 to 15 are met by whole warps");
  asm volatile("bar.arrive %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

// Ping-pong scheduling: the warpgroups' named barriers, on which their turns pass (see ping_pong.h).
TILE_DEVICE int warpgroup_of_thread() { return threadIdx.x / 128; }
TILE_DEVICE void turn_wait(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
TILE_DEVICE void turn_give(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }
}  // namespace tile

#include "ping_pong.h"

namespace tile {

// Registers of each thread of this warpgroup from here on, more than before or fewer (sm_90a).
template <int count, bool more> TILE_DEVICE void set_registers() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a multiple of 8 from 24 to 256");
  if constexpr (more)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// All threads of all blocks of a cluster; each arrives, then waits for the others.
TILE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
// The same, which hands over nothing but barriers made before a fence_barrier_init: no fence of the GPU's memory.
TILE_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
TILE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// For the kernels before this one; and the next one may start. Before Hopper none starts early.
TILE_DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TILE_DEVICE void grid_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tile
