// SPDX-License-Identifier: Apache-2.0
// The headers of generated CUDA text, for the host: the same functions on threads of scheduler.h. Scalar types and
// functions are those of the CPU target.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cpu_math.h"
#include "../cpu_types.h"
#include "scheduler.h"

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define TILE_DEVICE inline
#define EMULATED_OUTSIDE __attribute__((noinline, no_sanitize("thread")))  // its accesses are not the kernel's

// An assertion of the kernel printed why.
[[noreturn]] inline void __trap() { emulated::fail("the kernel stopped itself"); }
#define threadIdx emulated::this_thread
#define blockIdx emulated::this_block
#define gridDim emulated::this_grid

alignas(1024) unsigned char shared_memory[262144];

namespace tile {

// ---- cuda_types.h ----------------------------------------------------------------------------------------------------------

inline float infinity() { return kInfinity; }
inline float nan() { return bits_float(0x7fffffffu); }
template <class T> inline float widen(const T* p, int i) { return widen(p[i]); }
template <class T> inline void narrow_pair(T* p, float a, float b) { p[0] = narrow<T>(a), p[1] = narrow<T>(b); }
template <class T> inline uint32_t pair_of(T low, T high) { return low.bits | uint32_t(high.bits) << 16; }
template <class T> inline T part_of(uint32_t pair, int part) { return T{uint16_t(pair >> 16 * part)}; }
template <class T> inline void store_pair(T* p, uint32_t pair) { memcpy(p, &pair, 4); }
template <class T> inline uint32_t pair_at(const T* p) { return pair_of(p[0], p[1]); }
template <class T> inline uint32_t pair_narrowed(float a, float b) { return pair_of(narrow<T>(a), narrow<T>(b)); }
#define TILE_PAIR(name, op)                                                                                                \
  template <class T> inline uint32_t name(uint32_t a, uint32_t b) {                                                        \
    return pair_narrowed<T>(widen(part_of<T>(a, 0)) op widen(part_of<T>(b, 0)), widen(part_of<T>(a, 1)) op widen(part_of<T>(b, 1))); \
  }
TILE_PAIR(pair_product, *)
TILE_PAIR(pair_sum, +)
TILE_PAIR(pair_difference, -)
#undef TILE_PAIR
inline void narrow_positive_pair(f16* p, float a, float b) { narrow_pair(p, positive_half(a), positive_half(b)); }
inline void store_codes(e4m3* p, const f16* low, const f16* high) {
  const f16* codes[4] = {low, low + 1, high, high + 1};
  for (int i = 0; i < 4; ++i) p[i] = narrow<e4m3>(float8_of_code(widen(*codes[i])));
}
inline void widen_pair(f16* p, const e4m3* from, int i, int j) { narrow_pair(p, widen(from[i]), widen(from[j])); }
inline float float_from_bits(uint32_t bits, uint32_t mask, uint32_t flip) { return bits_float((bits & mask) ^ flip); }

// ---- cuda_math.h -----------------------------------------------------------------------------------------------------------

inline float quick_sigmoid(float x) { return sigmoid(x); }
inline float quick_erf(float x) { return erf(x); }
inline float quick_tanh(float x) { return tanh(x); }
inline double quick_sigmoid(double x) { return sigmoid(x); }
inline double quick_erf(double x) { return erf(x); }
inline double quick_tanh(double x) { return tanh(x); }
template <class... T> inline auto ieee_add_rn(T... x) { return ieee_add<0>(x...); }
template <class... T> inline auto ieee_add_rz(T... x) { return ieee_add<1>(x...); }
template <class... T> inline auto ieee_add_ru(T... x) { return ieee_add<2>(x...); }
template <class... T> inline auto ieee_add_rd(T... x) { return ieee_add<3>(x...); }
template <class... T> inline auto ieee_sub_rn(T... x) { return ieee_sub<0>(x...); }
template <class... T> inline auto ieee_sub_rz(T... x) { return ieee_sub<1>(x...); }
template <class... T> inline auto ieee_sub_ru(T... x) { return ieee_sub<2>(x...); }
template <class... T> inline auto ieee_sub_rd(T... x) { return ieee_sub<3>(x...); }
template <class... T> inline auto ieee_mul_rn(T... x) { return ieee_mul<0>(x...); }
template <class... T> inline auto ieee_mul_rz(T... x) { return ieee_mul<1>(x...); }
template <class... T> inline auto ieee_mul_ru(T... x) { return ieee_mul<2>(x...); }
template <class... T> inline auto ieee_mul_rd(T... x) { return ieee_mul<3>(x...); }
template <class... T> inline auto ieee_fmaf_rn(T... x) { return ieee_fmaf<0>(x...); }
template <class... T> inline auto ieee_fmaf_rz(T... x) { return ieee_fmaf<1>(x...); }
template <class... T> inline auto ieee_fmaf_ru(T... x) { return ieee_fmaf<2>(x...); }
template <class... T> inline auto ieee_fmaf_rd(T... x) { return ieee_fmaf<3>(x...); }
template <class... T> inline auto ieee_frcp_rn(T... x) { return ieee_frcp<0>(x...); }
template <class... T> inline auto ieee_frcp_rz(T... x) { return ieee_frcp<1>(x...); }
template <class... T> inline auto ieee_frcp_ru(T... x) { return ieee_frcp<2>(x...); }
template <class... T> inline auto ieee_frcp_rd(T... x) { return ieee_frcp<3>(x...); }
template <class... T> inline auto ieee_fsqrt_rn(T... x) { return ieee_fsqrt<0>(x...); }
template <class... T> inline auto ieee_fsqrt_rz(T... x) { return ieee_fsqrt<1>(x...); }
template <class... T> inline auto ieee_fsqrt_ru(T... x) { return ieee_fsqrt<2>(x...); }
template <class... T> inline auto ieee_fsqrt_rd(T... x) { return ieee_fsqrt<3>(x...); }
template <class... T> inline auto ieee_fdiv_rn(T... x) { return ieee_fdiv<0>(x...); }
template <class... T> inline auto ieee_fdiv_rz(T... x) { return ieee_fdiv<1>(x...); }
template <class... T> inline auto ieee_fdiv_ru(T... x) { return ieee_fdiv<2>(x...); }
template <class... T> inline auto ieee_fdiv_rd(T... x) { return ieee_fdiv<3>(x...); }
template <class T> inline T ieee_frsqrt_rn(T x) { return ieee_frsqrt<0>(x); }
template <int N> inline int wrapped(int x) { return x < N ? x : x - N; }

// ---- sync.h ----------------------------------------------------------------------------------------------------------------

inline void barrier() { emulated::meet(0, 0, true); }
inline void warp_barrier() { emulated::meet_warp("warp_barrier"); }
inline void lanes_barrier() { emulated::gather_lanes(); }
inline bool one_lane(bool first) { return first; }
template <int number, int threads> inline void named_barrier() { emulated::meet(number, threads, true); }
template <int number, int threads> inline void named_barrier_arrive() { emulated::meet(number, threads, false); }
inline int warpgroup_of_thread() { return threadIdx.x / 128; }
inline void turn_wait(int number) { emulated::meet(number, 256, true); }
inline void turn_give(int number) { emulated::meet(number, 256, false); }
}  // namespace tile

#include "../ping_pong.h"
#include "../wrapping.h"

namespace tile {

template <int count, bool more> inline void set_registers() {}
inline void grid_wait() {}
inline void grid_launch() {}

// ---- shuffle.h -------------------------------------------------------------------------------------------------------------

// Calls `use` with the value that each lane of the warp has put in; all lanes are there before and after.
template <class T, class Use> inline auto exchanged(const char* operation, T value, Use use) {
  static_assert(sizeof(T) <= 512, "a lane's part of the memory of a warp");
  char* memory = static_cast<char*>(emulated::warp_memory());
  memcpy(memory + threadIdx.x % 32 * 512, &value, sizeof(T));
  emulated::meet_warp(operation);
  auto result = use([memory](int lane) {
    T found;
    memcpy(&found, memory + lane * 512, sizeof(T));
    return found;
  });
  emulated::meet_warp(operation);
  return result;
}

inline int lane_index() { return threadIdx.x % 32; }
template <class T> inline T shuffle_from(const char* operation, T value, int source) {
  return exchanged(operation, value, [source](auto of) { return of(source); });
}
template <class T> inline T shuffle_xor(T value, int mask) { return shuffle_from("shuffle_xor", value, (lane_index() ^ mask) & 31); }
template <class T> inline T shuffle(T value, int source) { return shuffle_from("shuffle", value, source & 31); }
template <class T> inline T shuffle_up(T value, int delta) {
  return shuffle_from("shuffle_up", value, lane_index() < delta ? lane_index() : lane_index() - delta);
}
template <class T> inline T shuffle_down(T value, int delta) {
  return shuffle_from("shuffle_down", value, lane_index() + delta > 31 ? lane_index() : lane_index() + delta);
}
inline unsigned vote_ballot(bool condition) {
  return exchanged("vote", condition, [](auto of) {
    unsigned found = 0;
    for (unsigned lane = 0; lane < emulated::alive_in_warp(); ++lane) found |= unsigned(of(lane)) << lane;
    return found;
  });
}
inline bool vote_any(bool condition) { return vote_ballot(condition) != 0; }
inline bool vote_all(bool condition) { return vote_ballot(!condition) == 0; }

// ---- memory.h --------------------------------------------------------------------------------------------------------------

inline int here(int value) { return value; }

template <int bytes> struct Packet { alignas(bytes) unsigned char content[bytes]; };

template <int bytes, class D, class S> inline void vector_copy(D* dst, const S* src) {
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "one load or store");
  if (uintptr_t(dst) % bytes || uintptr_t(src) % bytes) emulated::fail("a packet of %d bytes is not aligned", bytes);
  const Packet<bytes> packet = *reinterpret_cast<const Packet<bytes>*>(src);
  *reinterpret_cast<Packet<bytes>*>(dst) = packet;
}

template <int bytes, class D, class S> inline void vector_read(D* dst, const S* src, bool inside) {
  if (inside) vector_copy<bytes>(dst, src);
  else memset(dst, 0, bytes);
}

// A block has no caches, so that lines are as good as each other.
enum class Line { no_allocate, evict_first, evict_last };
template <int bytes, Line, class D, class S> inline void vector_read(D* dst, const S* src, bool inside = true) {
  vector_read<bytes>(dst, src, inside);
}
template <Line, class T> inline T load(const T* src) { return *src; }

template <int bytes> inline void cp_async(void* dst, const void* src, int valid) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  emulated::start_copy(dst, src, bytes, valid);
}
template <int bytes, Line> inline void cp_async(void* dst, const void* src, int valid) { cp_async<bytes>(dst, src, valid); }
inline void cp_async_commit() { emulated::commit_copies(); }
template <int pending> inline void cp_async_wait() { emulated::wait_for_copies(pending); }
inline void fence_proxy_async() {}

// Row lane % 8 of matrix lane / 8 begins where that lane says; a lane gets two neighbours of row lane / 4 of each.
template <int matrices, bool across, class D> inline void load_matrices(D* dst, const void* src) {
  exchanged("ldmatrix", static_cast<const uint16_t*>(src), [dst](auto row) {
    uint16_t found[2 * matrices];
    const int lane = lane_index(), outer = lane / 4, inner = lane % 4 * 2;
    for (int m = 0; m < matrices; ++m)
      for (int i = 0; i < 2; ++i)
        found[2 * m + i] = across ? row(8 * m + inner + i)[outer] : row(8 * m + outer)[inner + i];
    memcpy(dst, found, sizeof found);
    return 0;
  });
}
template <int matrices, bool across, class S> inline void store_matrices(void* dst, const S* src) {
  exchanged("stmatrix", static_cast<uint16_t*>(dst), [src](auto row) {
    uint16_t given[2 * matrices];
    memcpy(given, src, sizeof given);
    const int lane = lane_index(), outer = lane / 4, inner = lane % 4 * 2;
    for (int m = 0; m < matrices; ++m)
      for (int i = 0; i < 2; ++i)
        (across ? row(8 * m + inner + i)[outer] : row(8 * m + outer)[inner + i]) = given[2 * m + i];
    return 0;
  });
}
#define TILE_MATRICES(count)                                                                                        \
  template <class D> inline void ldmatrix_x##count(D* dst, const void* src) { load_matrices<count, false>(dst, src); }       \
  template <class D> inline void ldmatrix_x##count##_trans(D* dst, const void* src) { load_matrices<count, true>(dst, src); } \
  template <class S> inline void stmatrix_x##count(void* dst, const S* src) { store_matrices<count, false>(dst, src); }      \
  template <class S> inline void stmatrix_x##count##_trans(void* dst, const S* src) { store_matrices<count, true>(dst, src); }
TILE_MATRICES(1) TILE_MATRICES(2) TILE_MATRICES(4)
#undef TILE_MATRICES

// ---- mbarrier.h ------------------------------------------------------------------------------------------------------------

template <int arrivals> inline void mbarrier_init(uint64_t* barrier) { emulated::barrier_init(barrier, arrivals); }
inline void fence_barrier_init() {}
inline void mbarrier_wait(uint64_t* barrier, int parity) { emulated::barrier_wait(barrier, parity); }
inline void mbarrier_arrive(uint64_t* barrier) { emulated::barrier_arrive(barrier); }
inline void mbarrier_expect(uint64_t* barrier, int bytes) { emulated::barrier_expect(barrier, bytes); }
inline void warp_arrive(uint64_t* barrier) {
  emulated::meet_warp("warp_arrive");
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// ---- tma.h -----------------------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap { union { emulated::Map map; unsigned char bytes[128]; }; };

template <class... Index> inline void tma_load(void* dst, const TensorMap* source, uint64_t* barrier, Index... at) {
  const int index[] = {at...};
  emulated::load_box(dst, &source->map, barrier, index);
}
template <class... I> inline void tma_load_evict_first(void* d, const TensorMap* s, uint64_t* b, I... at) { tma_load(d, s, b, at...); }
template <class... I> inline void tma_load_evict_last(void* d, const TensorMap* s, uint64_t* b, I... at) { tma_load(d, s, b, at...); }
#define TILE_TMA_STORE(suffix, reduction)                                                          \
  template <class... I> inline void tma_store##suffix(const TensorMap* target, const void* src, I... at) { \
    const int index[] = {at...};                                                                   \
    emulated::store_box(&target->map, src, emulated::Reduction::reduction, index);                 \
  }
TILE_TMA_STORE(, none) TILE_TMA_STORE(_add, add) TILE_TMA_STORE(_min, min) TILE_TMA_STORE(_max, max)
#undef TILE_TMA_STORE
inline void bulk_commit() { emulated::commit_stores(); }
template <int pending, bool read, class... Tiles> inline void bulk_wait(Tiles...) { emulated::wait_for_stores(pending); }
inline void prefetch_map(const TensorMap*) {}

// ---- mma.h -----------------------------------------------------------------------------------------------------------------

inline float round_tf32(float x) { return bits_float((float_bits(x) + 0x1000u) & 0xffffe000u); }
inline int dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c = wrapping_add<int>(c, int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i)));
  return c;
}

template <class T> inline auto operand(T x) {
  if constexpr (is_small<T>) return widen(x);
  else if constexpr (same<T, float>) return bits_float(float_bits(x) & 0xffffe000u);  // tf32
  else if constexpr (same<T, double>) return x;
  else return int(x);
}

// d += a * b of `rows` x 8 x K. A lane holds `run` neighbours of K for each of its rows, in each of K / (4 * run) parts.
template <int rows, int K, int run, class D, class A, class B> inline void multiply(D* d, const A* a, const B* b) {
  constexpr int parts = K / (4 * run), halves = rows / 8;
  struct Operands { const A* a; const B* b; };
  exchanged("mma", Operands{a, b}, [d](auto of) {
    const int lane = lane_index();
    compute<D> sums[2 * halves];
    for (int half = 0; half < halves; ++half)
      for (int i = 0; i < 2; ++i) {
        auto sum = convert<compute<D>>(d[2 * half + i]);
        const int column = lane % 4 * 2 + i;
        for (int part = 0; part < parts; ++part)
          for (int quarter = 0; quarter < 4; ++quarter)
            for (int n = 0; n < run; ++n)
              sum += compute<D>(operand(of(lane / 4 * 4 + quarter).a[(part * halves + half) * run + n]) *
                                operand(of(column * 4 + quarter).b[part * run + n]));
        sums[2 * half + i] = sum;
      }
    return [d, sums]() { for (int i = 0; i < 2 * halves; ++i) d[i] = convert<D>(sums[i]); };
  })();
}
template <class D, class A, class B> inline void mma_m16n8k16(D* d, const A* a, const B* b) { multiply<16, 16, 2>(d, a, b); }
template <class D, class A, class B> inline void mma_m16n8k8(D* d, const A* a, const B* b) { multiply<16, 8, 1>(d, a, b); }
template <class D, class A, class B> inline void mma_m16n8k32(D* d, const A* a, const B* b) { multiply<16, 32, 4>(d, a, b); }
template <class D, class A, class B> inline void mma_m8n8k4(D* d, const A* a, const B* b) { multiply<8, 4, 1>(d, a, b); }

// ---- wgmma.h ---------------------------------------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit() { emulated::commit_products(); }
template <int pending, bool behind = false> inline void wgmma_wait() {
  emulated::wait_for_products(pending);
  emulated::meet_warp("wgmma_wait");  // `.sync.aligned`: no lane goes on before the others have their results
}
inline int warpgroup_index() { return threadIdx.x / 128; }
template <int count, class D> inline void wgmma_results(D*) {}
inline void wgmma_hold(const float*) {}

struct InRegisters {};

template <int swizzle, int leading, int stride, bool across, int near = 0, int run = 1, int far = 0> struct Walk {
  // Where the bytes at `place` along K (of an element of `size` bytes) of a row are, in shared memory.
  static unsigned at(unsigned start, int step, int row, int k, int size) {
    constexpr int span = swizzle ? swizzle : 16;
    int place = start + step % run * near + step / run * far;
    if constexpr (across) {
      const int part = row * size;
      place += part / span * (swizzle ? leading : stride) + k / 8 * (swizzle ? stride : leading) + k % 8 * span + part % span;
    } else {
      const int part = k * size;
      place += row / 8 * stride + row % 8 * span + part / 16 * (swizzle ? 16 : leading) + part % 16;
    }
    return emulated::swizzled(place, swizzle);
  }
};

// One thread's elements of the products of its warpgroup: rows lane / 4 and 8 more of its warp's 16, two columns of
// each 8.
template <class TD, class TA> struct Started {
  TD* d;
  unsigned a, b;  // in shared memory
  int thread;
  bool keep;
  TA registers[4][256 / sizeof(TA)];  // of A, of the four lanes that share the rows
};

template <int N, int K, int steps, class TA, class TB, class A, class B, class TD>
EMULATED_OUTSIDE void run_product(emulated::Product* product) {
  using Sum = compute<TD>;
  auto* given = reinterpret_cast<Started<TD, TA>*>(product);
  const int lane = given->thread % 32, warp = given->thread / 32 % 4;
  constexpr int run = K / 8;
  for (int half = 0; half < 2; ++half) {
    decltype(operand(TA{})) row[steps * K];
    for (int step = 0; step < steps; ++step)
      for (int k = 0; k < K; ++k) {
        if constexpr (same<A, InRegisters>) {
          const int part = k / (4 * run), quarter = k / run % 4;
          row[step * K + k] = operand(given->registers[quarter][step * K / 2 + (part * 2 + half) * run + k % run]);
        } else {
          const unsigned at = A::at(given->a, step, warp * 16 + half * 8 + lane / 4, k, sizeof(TA));
          row[step * K + k] = operand(*reinterpret_cast<const TA*>(shared_memory + at));
        }
      }
    for (int block = 0; block < N / 8; ++block)
      for (int i = 0; i < 2; ++i) {
        TD* place = given->d + block * 4 + half * 2 + i;
        Sum sum = given->keep ? convert<Sum>(*place) : Sum(0);
        for (int step = 0; step < steps; ++step)
          for (int k = 0; k < K; ++k) {
            const unsigned at = B::at(given->b, step, block * 8 + lane % 4 * 2 + i, k, sizeof(TB));
            sum += row[step * K + k] * operand(*reinterpret_cast<const TB*>(shared_memory + at));
          }
        *place = convert<TD>(sum);
      }
  }
  free(given);
}

template <int N, int K, int steps, class TA, class TB, class A, class B, class TD>
EMULATED_OUTSIDE void multiply_group(TD* d, const void* a, const void* b, int a_step, int b_step, bool keep) {
  auto* given = static_cast<Started<TD, TA>*>(malloc(sizeof(Started<TD, TA>)));
  given->d = d, given->keep = keep, given->thread = threadIdx.x;
  given->b = emulated::shared_offset(b) + b_step;
  if constexpr (same<A, InRegisters>) {
    constexpr int count = steps * K / 2;
    TA held[4][count];
    exchanged("wgmma", static_cast<const TA*>(a), [&held](auto of) {
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int i = 0; i < count; ++i) held[quarter][i] = of(lane_index() / 4 * 4 + quarter)[i];
      return 0;
    });
    for (int quarter = 0; quarter < 4; ++quarter) memcpy(given->registers[quarter], held[quarter], sizeof held[quarter]);
  } else {
    given->a = emulated::shared_offset(a) + a_step;
    emulated::meet_warp("wgmma");
  }
  emulated::start_product(reinterpret_cast<emulated::Product*>(given), run_product<N, K, steps, TA, TB, A, B, TD>);
}

// ---- fields.h --------------------------------------------------------------------------------------------------------------

inline float nibble(uint32_t word, int byte, int upper) { return float(word >> (8 * byte + 4 * upper) & 15); }
inline float nibble_in_place(uint32_t word, int place, int half) {
  return float(uint32_t(word) >> (16 * half + 4 * place) & 15) * (place % 2 ? 0x1p-20f : 0x1p-24f);
}
template <class... Bits> inline float table_nibble(uint32_t word, int byte, int upper, Bits... bits) {
  const int table[16] = {bits...};
  return bits_float(table[word >> (8 * byte + 4 * upper) & 15]);
}
inline int table_place(uint32_t word, int byte, int lane, int part) { return int(word >> 8 * byte & 255) * 64 + 2 * lane + part; }
template <class T> inline uint32_t pair_at(const T* table, uint32_t word, int byte, int lane) {
  return *reinterpret_cast<const uint32_t*>(table + table_place(word, byte, lane, 0));
}
template <int flips> inline uint32_t pair_in_place(uint32_t word, int place) {
  word ^= flips * 0x01010101u;
  const uint32_t low = word >> 4 * place & 15, high = word >> (16 + 4 * place) & 15;
  return (high << 16 | low) << place % 2 * 4;
}
template <class T, int surplus, bool upper_first, int flips, bool single> inline uint32_t nibble_pair(uint32_t word, int byte) {
  word ^= flips * 0x01010101u;
  const float lower = nibble(word, byte, 0) - surplus, upper = nibble(word, byte, 1) - surplus;
  return pair_of(narrow<T>(upper_first ? upper : lower), narrow<T>(upper_first ? lower : upper));
}
template <class T, bool upper_first, uint32_t... bytes> inline uint32_t table_pair(uint32_t word, int byte) {
  const uint32_t table[8] = {bytes...};
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = word >> (8 * byte + 4 * (upper_first ? 1 - i : i)) & 15, shift = code % 4 * 8;
    pair |= ((table[code / 4] >> shift & 255) | (table[4 + code / 4] >> shift & 255) << 8) << 16 * i;
  }
  return pair;
}
template <class T> inline uint32_t pair_less(uint32_t pair, T x) {
  return pair_of(narrow<T>(widen(part_of<T>(pair, 0)) - widen(x)), narrow<T>(widen(part_of<T>(pair, 1)) - widen(x)));
}
template <class T> inline uint32_t pair_of(T x) { return pair_of(x, x); }
template <class T> inline uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {  // doubles hold the sum of 16-bit numbers
  uint32_t y = 0;
  for (int i = 0; i < 2; ++i) {
    const double product = double(widen(part_of<T>(a, i))) * widen(part_of<T>(b, i));
    y |= uint32_t(narrow<T>(float(product + widen(part_of<T>(c, i)))).bits) << 16 * i;
  }
  return y;
}
template <class T> inline uint32_t pair_times(uint32_t pair, T x) {
  return pair_of(narrow<T>(widen(part_of<T>(pair, 0)) * widen(x)), narrow<T>(widen(part_of<T>(pair, 1)) * widen(x)));
}
template <class T> inline uint32_t pair_times(uint32_t pair, float x) {
  return pair_of(narrow<T>(widen(part_of<T>(pair, 0)) * x), narrow<T>(widen(part_of<T>(pair, 1)) * x));
}

// ---- cuda_atomic.h ---------------------------------------------------------------------------------------------------------

#define TILE_ATOMIC __attribute__((noinline, no_sanitize("thread")))  // no other thread comes in between

// Replaces the T at p by update(old), both in `compute<T>`.
template <class T, class Update> TILE_ATOMIC T replaced(T* p, Update update) {
  emulated::check_access(p, sizeof(T));
  const T old = *p;
  *p = convert<T>(update(convert<compute<T>>(old)));
  return old;
}
#define TILE_UPDATE(name, result)                                                              \
  template <class T> inline T name(T* p, T value) {                                            \
    const auto x = convert<compute<T>>(value);                                                 \
    return replaced(p, [x](compute<T> old) { return compute<T>(result); });                    \
  }
template <class T> inline T summed(T a, T b) {
  if constexpr (same<T, int32_t> || same<T, int64_t>) return wrapping_add<T>(a, b);
  else return a + b;
}
TILE_UPDATE(atomic_add, summed(old, x))
TILE_UPDATE(atomic_max, x > old ? x : old)
TILE_UPDATE(atomic_min, x < old ? x : old)
TILE_UPDATE(atomic_and, old & x)
TILE_UPDATE(atomic_or, old | x)
TILE_UPDATE(atomic_xor, old ^ x)
TILE_UPDATE(atomic_exchange, x)
#undef TILE_UPDATE
template <class T> TILE_ATOMIC T atomic_load_relaxed(const T* p) { return emulated::check_access(p, sizeof(T)), *p; }
template <class T> TILE_ATOMIC T atomic_load_acquire(const T* p) { return atomic_load_relaxed(p); }
template <class T> TILE_ATOMIC T atomic_load_seq_cst(const T* p) { return atomic_load_relaxed(p); }
template <int count, class T> inline void atomic_add_vector(T* p, const T* values) {
  for (int i = 0; i < count; ++i) atomic_add(p + i, values[i]);
}
inline void memory_fence() {}
inline int arrive_last(int32_t* counter, int count) {
  return replaced(counter, [count](int32_t old) { return old >= count - 1 ? 0 : old + 1; }) == count - 1;
}

}  // namespace tile

namespace emulated {

template <class T> struct Bare { using type = T; };
template <class T> struct Bare<const T> { using type = T; };

// Calls a kernel with parameters of any types, each at the place that `args` gives.
template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { using type = Indices<I...>; };
template <class... P, size_t... I> EMULATED_OUTSIDE void unpack(void (*kernel)(P...), void** args, Indices<I...>) {
  kernel(*reinterpret_cast<typename Bare<P>::type*>(args[I])...);
}
template <class... P> EMULATED_OUTSIDE void call(void (*kernel)(P...), void** args) {
  unpack(kernel, args, typename Count<sizeof...(P)>::type{});
}

}  // namespace emulated
