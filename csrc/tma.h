// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a tensor by the tensor memory accelerator (sm_90 and later), each by the one thread that calls it.
// Indices are in elements, outermost first, as in the IR; the instructions want them innermost first.
#pragma once
#include "memory.h"

namespace tile {

struct alignas(64) TensorMap { unsigned char bytes[128]; };  // filled by the driver; a parameter of the kernel

#define TILE_INDEX_1 int a
#define TILE_INDEX_2 int a, int b
#define TILE_INDEX_3 int a, int b, int c
#define TILE_INDEX_4 int a, int b, int c, int d
#define TILE_INDEX_5 int a, int b, int c, int d, int e
#define TILE_INNER_1 "r"(a)
#define TILE_INNER_2 "r"(b), "r"(a)
#define TILE_INNER_3 "r"(c), "r"(b), "r"(a)
#define TILE_INNER_4 "r"(d), "r"(c), "r"(b), "r"(a)
#define TILE_INNER_5 "r"(e), "r"(d), "r"(c), "r"(b), "r"(a)

// From global to shared memory; the bytes count for `barrier`.
#define TILE_TMA_LOAD(suffix, rank, form, ...)                                                                       \
  TILE_DEVICE void tma_load##suffix(void* dst, const TensorMap* source, uint64_t* barrier, TILE_INDEX_##rank) {      \
    asm volatile("cp.async.bulk.tensor." #rank "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" form     \
                 ::"r"(shared_address(dst)), "l"(source), "r"(shared_address(barrier)), TILE_INNER_##rank            \
                 __VA_ARGS__ : "memory");                                                                            \
  }
// The second-level cache's treatment of the bytes, as the driver's headers encode it.
#define TILE_TMA_LOADS(rank, place, policy)                                                                          \
  TILE_TMA_LOAD(, rank, " [%0], [%1, {" place "}], [%2];")                                                    \
  TILE_TMA_LOAD(_evict_first, rank, ".L2::cache_hint [%0], [%1, {" place "}], [%2], " policy ";",             \
                , "l"(0x12F0000000000000ull))                                                                        \
  TILE_TMA_LOAD(_evict_last, rank, ".L2::cache_hint [%0], [%1, {" place "}], [%2], " policy ";",              \
                , "l"(0x14F0000000000000ull))
TILE_TMA_LOADS(1, "%3", "%4")
TILE_TMA_LOADS(2, "%3, %4", "%5")
TILE_TMA_LOADS(3, "%3, %4, %5", "%6")
TILE_TMA_LOADS(4, "%3, %4, %5, %6", "%7")
TILE_TMA_LOADS(5, "%3, %4, %5, %6, %7", "%8")

// The same for the blocks of the cluster whose bits are set in `blocks`: to `dst` of each. Its bytes count for that
// block's `barrier`.
#define TILE_TMA_MULTICAST(suffix, rank, form, ...)                                                                  \
  TILE_DEVICE void tma_load_multicast##suffix(void* dst, const TensorMap* source, uint64_t* barrier,                 \
                                              TILE_INDEX_##rank, int blocks) {                                       \
    asm volatile("cp.async.bulk.tensor." #rank "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"          \
                 ".multicast::cluster" form                                                                          \
                 ::"r"(shared_address(dst)), "l"(source), "r"(shared_address(barrier)), TILE_INNER_##rank,           \
                 "h"(static_cast<unsigned short>(blocks)) __VA_ARGS__ : "memory");                                   \
  }
#define TILE_TMA_MULTICASTS(rank, place, mask, policy)                                                               \
  TILE_TMA_MULTICAST(, rank, " [%0], [%1, {" place "}], [%2], " mask ";")                                            \
  TILE_TMA_MULTICAST(_evict_first, rank, ".L2::cache_hint [%0], [%1, {" place "}], [%2], " mask ", " policy ";",     \
                     , "l"(0x12F0000000000000ull))                                                                   \
  TILE_TMA_MULTICAST(_evict_last, rank, ".L2::cache_hint [%0], [%1, {" place "}], [%2], " mask ", " policy ";",      \
                     , "l"(0x14F0000000000000ull))
TILE_TMA_MULTICASTS(1, "%3", "%4", "%5")
TILE_TMA_MULTICASTS(2, "%3, %4", "%5", "%6")
TILE_TMA_MULTICASTS(3, "%3, %4, %5", "%6", "%7")
TILE_TMA_MULTICASTS(4, "%3, %4, %5, %6", "%7", "%8")
TILE_TMA_MULTICASTS(5, "%3, %4, %5, %6, %7", "%8", "%9")

// From shared to global memory, where it replaces what is there or is combined with it.
#define TILE_TMA_STORE(suffix, instruction, operation, rank, place)                                                  \
  TILE_DEVICE void tma_store##suffix(const TensorMap* target, const void* src, TILE_INDEX_##rank) {                  \
    asm volatile(instruction #rank "d.global.shared::cta" operation ".tile.bulk_group [%0, {" place "}], [%1];"      \
                 ::"l"(target), "r"(shared_address(src)), TILE_INNER_##rank : "memory");                             \
  }
#define TILE_TMA_STORES(rank, place)                                                                                 \
  TILE_TMA_STORE(, "cp.async.bulk.tensor.", "", rank, place)                                                         \
  TILE_TMA_STORE(_add, "cp.reduce.async.bulk.tensor.", ".add", rank, place)                                          \
  TILE_TMA_STORE(_min, "cp.reduce.async.bulk.tensor.", ".min", rank, place)                                          \
  TILE_TMA_STORE(_max, "cp.reduce.async.bulk.tensor.", ".max", rank, place)
TILE_TMA_STORES(1, "%2")
TILE_TMA_STORES(2, "%2, %3")
TILE_TMA_STORES(3, "%2, %3, %4")
TILE_TMA_STORES(4, "%2, %3, %4, %5")
TILE_TMA_STORES(5, "%2, %3, %4, %5, %6")
#undef TILE_TMA_LOAD
#undef TILE_TMA_LOADS
#undef TILE_TMA_MULTICAST
#undef TILE_TMA_MULTICASTS
#undef TILE_TMA_STORE
#undef TILE_TMA_STORES

TILE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most `pending` groups of this thread's stores have not read their source yet, or (`read` false) are not
// done. The tiles are named for threads that order accesses to them.
template <int pending, bool read, class... Tiles> TILE_DEVICE void bulk_wait(Tiles...) {
  static_assert(pending >= 0, "groups under way are counted from 0");
  if constexpr (read)
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
  else
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

TILE_DEVICE void prefetch_map(const TensorMap* source) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(source) : "memory");
}

}  // namespace tile
