// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory whose phases wait for arrivals of threads and for bytes of bulk copies (sm_90 and later).
#pragma once
#include "memory.h"

namespace tile {

template <int arrivals> TILE_DEVICE void mbarrier_init(uint64_t* barrier) {
  static_assert(arrivals > 0 && arrivals < 1 << 20, "a phase waits for 1 to 2^20 - 1 arrivals");
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "n"(arrivals) : "memory");
}

// Barriers made by this thread are seen by the copy engine, and by the cluster once its blocks have met.
TILE_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Until the phase of this parity has completed. The label is the braces' own, however often this is inlined.
TILE_DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred completed;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 completed, [%0], %1;\n"
      "@!completed bra again;\n"
      "}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The same, after which this thread sees what threads of other blocks stored before their arrivals.
TILE_DEVICE void mbarrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred completed;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 completed, [%0], %1;\n"
      "@!completed bra again;\n"
      "}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

TILE_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The address in another block of the cluster that corresponds to `address` of this one's shared memory.
TILE_DEVICE unsigned address_in_block(unsigned address, int block) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// Arrive at the same barrier of a block of the cluster. `.release.cluster` would be a fence of all the GPU's memory
// (0.7 of the speed of a product on an H200), and is not needed. The tiles that this arrival releases were read by
// products that are waited for, or a fence has ordered the reads (warp_arrive).
TILE_DEVICE void mbarrier_arrive(uint64_t* barrier, int block) {
  const unsigned there = address_in_block(shared_address(barrier), block);
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// The same, which publishes this block's earlier stores, those to the other block's memory as well.
TILE_DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, int block) {
  const unsigned there = address_in_block(shared_address(barrier), block);
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// One arrival for the warp, after all of its threads have come here. Copies may then overwrite tiles that the threads
// have read. Without the fence the arrival overtakes reads in flight, and bulk copies do not queue behind these.
TILE_DEVICE void warp_arrive(uint64_t* barrier) {
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// The same at each block of the cluster whose bit is set in `blocks`.
TILE_DEVICE void warp_arrive(uint64_t* barrier, int blocks) {
  fence_proxy_async();
  __syncwarp();
  if (blocks >> threadIdx.x % 32 & 1) mbarrier_arrive(barrier, threadIdx.x % 32);
}

// The current phase waits for so many bytes more.
TILE_DEVICE void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

}  // namespace tile
