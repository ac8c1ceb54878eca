// SPDX-License-Identifier: Apache-2.0
// Runs the threads of a block as fibers of one host thread. A fiber stops where a GPU's thread may wait. If the kernel
// is instrumented, it stops before some of its accesses to memory, too. The next fiber is drawn at random.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Dim { unsigned x, y, z; };

namespace emulated {

struct Range { const char* begin; const char* end; };

struct Job {
  void (*kernel)(void** args);
  void** args;
  unsigned grid[3];
  unsigned threads;
  unsigned char* shared;
  unsigned shared_bytes;
  const Range* tensors;  // memory that a kernel may access beside its stack and shared memory
  unsigned tensor_count;
  uint64_t seed;
  unsigned pause;  // of 256 accesses to memory, this many let another thread go first
};

extern Dim this_thread, this_block, this_grid;

[[noreturn]] void fail(const char* format, ...);
unsigned alive_in_warp();         // fibers of its warp that have not returned
unsigned random_below(unsigned limit);
void sleep_on(const void* what);  // until another fiber wakes those that sleep on `what`
void wake(const void* what);
void* warp_memory();              // the same 64 KiB for the fibers of one warp
unsigned shared_offset(const void* place);

// Fails if the bytes at `place` are not the kernel's; other fibers may run first.
void check_access(const void* place, unsigned bytes);

// Waits for `count` fibers at barrier `number` of the block (0: all); without `waits` it only counts.
void meet(unsigned number, unsigned count, bool waits);
// Waits for all fibers of the warp; they must be at the same `operation`.
void meet_warp(const char* operation);
// Waits for the fibers of the warp that come to such a place, until nothing else can go on.
void gather_lanes();

// Asynchronous work that a thread has started and not waited for. It happens at a random time, at the latest at the
// wait.
void start_copy(void* target, const void* source, unsigned bytes, unsigned valid);
void commit_copies();
void wait_for_copies(unsigned pending);

// Barriers of 64 bits in shared memory, which count arrivals and bytes.
void barrier_init(uint64_t* barrier, unsigned arrivals);
void barrier_arrive(uint64_t* barrier);
void barrier_expect(uint64_t* barrier, int bytes);
void barrier_wait(uint64_t* barrier, int parity);

// A tensor as the copy engine sees it; the innermost dimension comes first. Strides are bytes, of the outer dimensions.
struct Map {
  char* base;
  int64_t strides[4];
  uint32_t sizes[5], box[5];
  uint8_t rank, swizzle, itemsize, type;  // the span of a swizzle in bytes; a type of the driver
};
enum class Reduction : int { none, add, min, max };
// Work of the copy engine and of the tensor cores happens at a random time, at the latest at its wait.
void load_box(void* target, const Map* map, uint64_t* barrier, const int* index);
void store_box(const Map* map, const void* source, Reduction reduction, const int* index);
void commit_stores();
void wait_for_stores(unsigned pending);

struct Product;
void start_product(Product* product, void (*run)(Product*));  // `run` also frees it
void commit_products();
void wait_for_products(unsigned pending);

inline unsigned swizzled(unsigned address, unsigned span) {  // chunks of 16 bytes change places within 8 rows of `span`
  return address ^ (address >> 7 & (span / 16 - (span != 0))) << 4;
}

}  // namespace emulated

extern "C" const char* emulated_run(const emulated::Job* job);  // null, or the error
