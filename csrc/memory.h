// SPDX-License-Identifier: Apache-2.0
// How one thread moves bytes: wide loads and stores, asynchronous copies to shared memory, matrix loads and stores.
// Registers are local arrays; with constant indices the compiler keeps them in registers.
#pragma once
#include "cuda_types.h"

namespace tile {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The same value, hidden from the compiler: it cannot move computations on it out of a loop. It is the index of a thread,
// or 0. Without its range, each address would be computed as if it may be negative, and stores of two numbers parted.
__device__ __forceinline__ int here(int value) {
  asm volatile("" : "+r"(value));
  __builtin_assume(value >= 0 && value < 1024);
  return value;
}

template <int bytes> struct Packet {
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16,
                "one load or store moves 1, 2, 4, 8 or 16 bytes");
};
template <> struct Packet<1> { using type = unsigned char; };
template <> struct Packet<2> { using type = unsigned short; };
template <> struct Packet<4> { using type = unsigned; };
template <> struct Packet<8> { using type = uint2; };
template <> struct Packet<16> { using type = uint4; };

// The type of a packet. Floats stay floats. If they were read as integers, accumulators of products would be kept as
// such, and moved while products are in flight. The assembler gets that wrong.
template <int bytes, class T> struct Moved { using type = typename Packet<bytes>::type; };
template <> struct Moved<8, float> { using type = float2; };
template <> struct Moved<16, float> { using type = float4; };

// Both ends are aligned to `bytes`; one of them is a local array.
template <int bytes, class D, class S> __device__ __forceinline__ void vector_copy(D* dst, const S* src) {
  using P = typename Moved<bytes, D>::type;
  *reinterpret_cast<P*>(dst) = *reinterpret_cast<const P*>(src);
}

// The same into a local array, which becomes 0 where `inside` does not hold. Without a branch several reads are under way at once.
template <int bytes, class D, class S> __device__ __forceinline__ void vector_read(D* dst, const S* src, bool inside) {
  using P = typename Moved<bytes, D>::type;
  P value{};
  if (inside) value = *reinterpret_cast<const P*>(src);
  *reinterpret_cast<P*>(dst) = value;
}

// How the caches keep the line of a load from global memory: with no room in the first level, or as the first or last to
// go in both. The numbers are the second level's policies, as the driver's headers encode them.
enum class Line { no_allocate, evict_first, evict_last };
#define TILE_LINE(hint, policy, kind, at) \
  ".reg .b64 p; mov.b64 p, " policy "; @q ld.global." hint ".L2::cache_hint" kind ", [" at "], p; }"
#define TILE_READ(line, text, src, on, ...) \
  if constexpr (how == Line::line)          \
    asm volatile("{ .reg .pred q; setp.ne.b32 q, " on ", 0; " text : __VA_ARGS__ : "l"(src), "r"(int(inside)) : "memory");
// Reads a packet where `inside` holds.
#define TILE_READS(type, from, kind, at, on, ...)                                                               \
  template <Line how> __device__ __forceinline__ void read(type& value, const from* src, bool inside) {         \
    TILE_READ(no_allocate, "@q ld.global.L1::no_allocate" kind ", [" at "]; }", src, on, __VA_ARGS__)            \
    TILE_READ(evict_first, TILE_LINE("L1::evict_first", "0x12F0000000000000", kind, at), src, on, __VA_ARGS__)   \
    TILE_READ(evict_last, TILE_LINE("L1::evict_last", "0x14F0000000000000", kind, at), src, on, __VA_ARGS__)     \
  }
#define TILE_TWO(r) r(value.x), r(value.y)
#define TILE_FOUR(r) r(value.x), r(value.y), r(value.z), r(value.w)
TILE_READS(unsigned short, unsigned char, ".u8 %0", "%1", "%2", "+h"(value))
TILE_READS(unsigned short, unsigned short, ".u16 %0", "%1", "%2", "+h"(value))
TILE_READS(unsigned, unsigned, ".u32 %0", "%1", "%2", "+r"(value))
TILE_READS(uint2, uint2, ".v2.u32 {%0, %1}", "%2", "%3", TILE_TWO("+r"))
TILE_READS(float2, float2, ".v2.f32 {%0, %1}", "%2", "%3", TILE_TWO("+f"))
TILE_READS(uint4, uint4, ".v4.u32 {%0, %1, %2, %3}", "%4", "%5", TILE_FOUR("+r"))
TILE_READS(float4, float4, ".v4.f32 {%0, %1, %2, %3}", "%4", "%5", TILE_FOUR("+f"))
#undef TILE_FOUR
#undef TILE_TWO
#undef TILE_READS
#undef TILE_READ
#undef TILE_LINE
template <Line how> __device__ __forceinline__ void read(unsigned char& value, const unsigned char* src, bool inside) {
  unsigned short wide = value;
  read<how>(wide, src, inside);
  value = static_cast<unsigned char>(wide);
}

// `vector_read` and, of one element, a load, with a word on the line.
template <int bytes, Line how, class D, class S> __device__ __forceinline__ void vector_read(D* dst, const S* src, bool inside = true) {
  using P = typename Moved<bytes, D>::type;
  P value{};
  read<how>(value, reinterpret_cast<const P*>(src), inside);
  *reinterpret_cast<P*>(dst) = value;
}
template <Line how, class T> __device__ __forceinline__ T load(const T* src) {
  T value;
  vector_read<sizeof(T), how>(&value, src);
  return value;
}

// The value at `place` of shared memory in the block of the cluster that has this rank.
template <class T> __device__ __forceinline__ T at_rank(const T* place, int rank) {
  const T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(rank));
  return *there;
}

// Stores to `place` of shared memory in the block of the cluster that has this rank.
template <class T> __device__ __forceinline__ void store_at_rank(T* place, T value, int rank) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(rank));
  *there = value;
}

// Starts a copy from global to shared memory; bytes from `valid` on become 0.
template <int bytes> __device__ __forceinline__ void cp_async(void* dst, const void* src, int valid) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  if constexpr (bytes == 16)  // past the first-level cache: no thread of this SM will read these bytes again
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(dst)), "l"(src), "n"(bytes), "r"(valid) : "memory");
}

// The same for 16 bytes whose lines go first or last from the second level.
template <int bytes, Line how> __device__ __forceinline__ void cp_async(void* dst, const void* src, int valid) {
  static_assert(bytes == 16 && how != Line::no_allocate, "no room in the first level");
  const uint64_t policy = how == Line::evict_first ? 0x12F0000000000000ull : 0x14F0000000000000ull;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared_address(dst)), "l"(src), "r"(valid), "l"(policy) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending> __device__ __forceinline__ void cp_async_wait() {
  static_assert(pending >= 0, "groups under way are counted from 0");
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Matrices of 8 rows of 16 bytes. `src` is the row that this lane names: row lane % 8 of matrix lane / 8.
#define TILE_LDMATRIX(suffix, modifier)                                                                             \
  template <class D> __device__ __forceinline__ void ldmatrix_x1##suffix(D* dst, const void* src) {                 \
    unsigned* d = reinterpret_cast<unsigned*>(dst);                                                                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 {%0}, [%1];"                                 \
                 : "=r"(d[0]) : "r"(shared_address(src)));                                                          \
  }                                                                                                                 \
  template <class D> __device__ __forceinline__ void ldmatrix_x2##suffix(D* dst, const void* src) {                 \
    unsigned* d = reinterpret_cast<unsigned*>(dst);                                                                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 {%0, %1}, [%2];"                             \
                 : "=r"(d[0]), "=r"(d[1]) : "r"(shared_address(src)));                                              \
  }                                                                                                                 \
  template <class D> __device__ __forceinline__ void ldmatrix_x4##suffix(D* dst, const void* src) {                 \
    unsigned* d = reinterpret_cast<unsigned*>(dst);                                                                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 {%0, %1, %2, %3}, [%4];"                     \
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(src)));                      \
  }
TILE_LDMATRIX(, "")
TILE_LDMATRIX(_trans, ".trans")
#undef TILE_LDMATRIX

// The inverse: registers to the rows that the lanes name. From sm_90 on.
#define TILE_STMATRIX(suffix, modifier)                                                                             \
  template <class S> __device__ __forceinline__ void stmatrix_x1##suffix(void* dst, const S* src) {                 \
    const unsigned* s = reinterpret_cast<const unsigned*>(src);                                                     \
    asm volatile("stmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 [%0], {%1};"                                 \
                 ::"r"(shared_address(dst)), "r"(s[0]) : "memory");                                                 \
  }                                                                                                                 \
  template <class S> __device__ __forceinline__ void stmatrix_x2##suffix(void* dst, const S* src) {                 \
    const unsigned* s = reinterpret_cast<const unsigned*>(src);                                                     \
    asm volatile("stmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 [%0], {%1, %2};"                             \
                 ::"r"(shared_address(dst)), "r"(s[0]), "r"(s[1]) : "memory");                                      \
  }                                                                                                                 \
  template <class S> __device__ __forceinline__ void stmatrix_x4##suffix(void* dst, const S* src) {                 \
    const unsigned* s = reinterpret_cast<const unsigned*>(src);                                                     \
    asm volatile("stmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 [%0], {%1, %2, %3, %4};"                     \
                 ::"r"(shared_address(dst)), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]) : "memory");                \
  }
TILE_STMATRIX(, "")
TILE_STMATRIX(_trans, ".trans")
#undef TILE_STMATRIX

// Order this thread's ordinary accesses to shared memory before wgmma and bulk copies, from the next barrier on: these
// do not queue behind it (sm_90 and later).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tile
