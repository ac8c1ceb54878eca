// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include "../cpu_types.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <vector>

namespace emulated {
namespace {

constexpr size_t kStack = 256 << 10, kWarpMemory = 64 << 10;
constexpr unsigned kBarriers = 16;
constexpr uint64_t kMostSwitches = 400'000'000;

// A copy between a tensor and shared memory.
struct Box {
  Map map;
  char* shared;
  uint64_t* barrier;  // of a load; null for a store
  Reduction reduction;
  int index[5];
  bool done;
};
template <class T> struct Groups {  // of a thread: committed, the oldest first; and the open one
  std::deque<std::vector<T>> closed;
  std::vector<T> open;

  void commit() {
    closed.push_back(std::move(open));
    open.clear();
  }
  template <class Run> void wait(unsigned pending, Run run) {
    for (; closed.size() > pending; closed.pop_front())
      for (T& each : closed.front()) run(each);
  }
};
struct Started { Product* product; void (*run)(Product*); };

struct Copy { char* target; const char* source; unsigned bytes, valid; bool done; };

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  bool started, returned;
  const void* waits_for;
  Groups<Copy> copies;
  Groups<unsigned> stores;  // by their places among the boxes
  Groups<Started> products;
};

struct Barrier { unsigned arrived, generation; };
struct Gathering { unsigned arrived, generation; };
struct Warp { unsigned arrived, generation; const char* operation; Gathering lanes; };

struct State {
  const Job* job;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::vector<Box> boxes;         // of the block, in the order of their starts
  std::vector<unsigned> waiting;  // those that have not happened
  char* stacks = nullptr;
  size_t stack_count = 0;
  char* warp_memory = nullptr;
  unsigned current, alive;
  uint64_t random, switches;
  ucontext_t main_context;
  jmp_buf main;
  char message[512];
  bool failed;
};
State state;

void run_copy(Copy& copy) {
  if (copy.done) return;
  memcpy(copy.target, copy.source, copy.valid);
  memset(copy.target + copy.valid, 0, copy.bytes - copy.valid);
  copy.done = true;
}

void problem(const char* text) {
  if (!state.failed)
    snprintf(state.message, sizeof state.message, "block (%u, %u, %u): %s", this_block.x, this_block.y, this_block.z, text);
  state.failed = true;
}

// A barrier's word: the phase, arrivals that the phase still waits for, arrivals of each phase, bytes to come.
struct Phase {
  uint64_t parity : 1, pending : 20, arrivals : 20;
  int64_t bytes : 23;
};
static_assert(sizeof(Phase) == 8);

void settle(uint64_t* barrier) {
  Phase& phase = *reinterpret_cast<Phase*>(barrier);
  if (phase.pending || phase.bytes) return;
  phase.parity ^= 1;
  phase.pending = phase.arrivals;
  wake(barrier);
}

template <class T> void combine(char* target, const char* source, Reduction reduction) {
  T a, b;
  memcpy(&a, target, sizeof a), memcpy(&b, source, sizeof b);
  const T result = reduction == Reduction::add ? T(a + b) : (reduction == Reduction::min) == (b < a) ? b : a;
  memcpy(target, &result, sizeof result);
}
template <class T> void combine_small(char* target, const char* source, Reduction reduction) {
  T a, b;
  memcpy(&a, target, sizeof a), memcpy(&b, source, sizeof b);
  const float x = tile::widen(a), y = tile::widen(b);
  const T result = tile::narrow<T>(reduction == Reduction::add ? x + y : (reduction == Reduction::min) == (y < x) ? y : x);
  memcpy(target, &result, sizeof result);
}

void store_element(char* target, const char* source, const Box& box) {
  if (box.reduction == Reduction::none) memcpy(target, source, box.map.itemsize);
  else if (box.map.type == 2) combine<uint32_t>(target, source, box.reduction);
  else if (box.map.type == 3) combine<int32_t>(target, source, box.reduction);
  else if (box.map.type == 4) combine<uint64_t>(target, source, box.reduction);
  else if (box.map.type == 5) combine<int64_t>(target, source, box.reduction);
  else if (box.map.type == 6) combine_small<tile::f16>(target, source, box.reduction);
  else if (box.map.type == 7) combine<float>(target, source, box.reduction);
  else if (box.map.type == 8) combine<double>(target, source, box.reduction);
  else if (box.map.type == 9) combine_small<tile::bf16>(target, source, box.reduction);
  else problem("a bulk store combines a type that it cannot");
}

void run_box(Box& box) {
  if (box.done) return;
  box.done = true;
  const Map& map = box.map;
  unsigned count = 1;
  for (int d = 0; d < map.rank; ++d) count *= map.box[d];
  const unsigned start = shared_offset(box.shared), bytes = count * map.itemsize;
  if (start + bytes > state.job->shared_bytes) return problem("a bulk copy leaves shared memory");
  if (start % (map.swizzle ? 8 * map.swizzle : 16)) return problem("a bulk copy's place in shared memory is not aligned");
  for (unsigned n = 0; n < count; ++n) {
    char* outside = map.base;
    bool inside = true;
    unsigned rest = n;
    for (int d = 0; d < map.rank; ++d) {
      const int64_t at = int64_t(box.index[d]) + rest % map.box[d];
      rest /= map.box[d];
      inside &= at >= 0 && at < int64_t(map.sizes[d]);
      outside += at * (d ? map.strides[d - 1] : map.itemsize);
    }
    char* here = reinterpret_cast<char*>(state.job->shared) + swizzled(start + n * map.itemsize, map.swizzle);
    if (!box.barrier && inside) store_element(outside, here, box);
    else if (box.barrier && inside) memcpy(here, outside, map.itemsize);
    else if (box.barrier) memset(here, 0, map.itemsize);
  }
  if (box.barrier) {
    reinterpret_cast<Phase*>(box.barrier)->bytes -= bytes;
    settle(box.barrier);
  }
}

// A box that was started is copied; false if there is none.
bool run_any() {
  while (!state.waiting.empty()) {
    const unsigned drawn = random_below(unsigned(state.waiting.size())), index = state.waiting[drawn];
    state.waiting[drawn] = state.waiting.back();
    state.waiting.pop_back();
    if (state.boxes[index].done) continue;
    run_box(state.boxes[index]);
    return true;
  }
  return false;
}

unsigned start_box(const Map* map, const void* shared, uint64_t* barrier, Reduction reduction, const int* index) {
  Box box{*map, static_cast<char*>(const_cast<void*>(shared)), barrier, reduction, {}, false};
  for (int d = 0; d < map->rank; ++d) box.index[d] = index[map->rank - 1 - d];
  const unsigned number = unsigned(state.boxes.size());
  state.boxes.push_back(box);
  if (random_below(4) == 0) run_box(state.boxes[number]);
  else state.waiting.push_back(number);
  return number;
}

void leave() { _longjmp(state.main, 1); }

void go_on(Gathering& lanes) {
  lanes.arrived = 0;
  ++lanes.generation;
  wake(&lanes);
}

bool scatter_lanes() {
  bool found = false;
  for (Warp& warp : state.warps)
    if (warp.lanes.arrived) go_on(warp.lanes), found = true;
  return found;
}

// Those that wait for the lanes of a warp do not wait for one that has returned.
void leave_warp() {
  Warp& warp = state.warps[state.current / 32];
  if (warp.lanes.arrived && warp.lanes.arrived == alive_in_warp()) go_on(warp.lanes);
  if (!warp.arrived || warp.arrived != alive_in_warp()) return;
  warp.arrived = 0;
  ++warp.generation;
  wake(&warp);
}

void fiber_main() {
  state.job->kernel(state.job->args);
  Fiber& fiber = state.fibers[state.current];
  fiber.returned = true;
  --state.alive;
  wake(&state.barriers[0]);
  leave_warp();
  leave();
}

void pause() {  // back to the scheduler
  if (!_setjmp(state.fibers[state.current].at)) leave();
}

// Describe the object that a thread waits for.
const char* place_of(const void* what) {
  static char text[128];
  for (unsigned n = 0; n < kBarriers; ++n)
    if (what == &state.barriers[n]) {
      snprintf(text, sizeof text, "barrier %u, where %u have arrived", n, state.barriers[n].arrived);
      return text;
    }
  for (Warp& warp : state.warps)
    if (what == &warp) {
      snprintf(text, sizeof text, "%s, where %u lanes of its warp have arrived", warp.operation, warp.arrived);
      return text;
    }
  snprintf(text, sizeof text, "a barrier at byte %u of shared memory", shared_offset(what));
  return text;
}

void resume(unsigned index) {
  Fiber& fiber = state.fibers[index];
  state.current = index;
  this_thread = {index, 0, 0};
  if (_setjmp(state.main)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

void run_block() {
  const unsigned count = state.job->threads;
  state.fibers.clear();
  state.fibers.resize(count);
  state.warps.assign((count + 31) / 32, {0, 0, nullptr, {0, 0}});
  memset(state.barriers, 0, sizeof state.barriers);
  memset(state.job->shared, 0xff, state.job->shared_bytes);  // NaN in every float
  state.alive = count;
  state.boxes.clear();
  state.waiting.clear();
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = state.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = state.stacks + i * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  std::vector<unsigned> ready;
  while (state.alive && !state.failed) {
    ready.clear();
    for (unsigned i = 0; i < count; ++i)
      if (!state.fibers[i].returned && !state.fibers[i].waits_for) ready.push_back(i);
    if (ready.empty() && (run_any() || scatter_lanes())) continue;
    if (ready.empty()) {
      for (unsigned i = 0; i < count && !state.failed; ++i)
        if (!state.fibers[i].returned) {
          state.failed = true;
          snprintf(state.message, sizeof state.message,
                   "block (%u, %u, %u): %u threads wait for each other for ever, thread %u at %s", this_block.x,
                   this_block.y, this_block.z, state.alive, i, place_of(state.fibers[i].waits_for));
        }
      return;
    }
    // Run each of these once, in a random order. Threads that sleep meanwhile are skipped; those that wake are in the
    // next round.
    for (size_t left = ready.size(); left && !state.failed; --left) {
      const unsigned drawn = random_below(unsigned(left)), index = ready[drawn];
      ready[drawn] = ready[left - 1];
      resume(index);
      if (!state.failed && !state.waiting.empty() && random_below(64) == 0) run_any();
      if (++state.switches > kMostSwitches) {
        state.failed = true;
        snprintf(state.message, sizeof state.message, "the kernel does not end");
      }
    }
  }
  while (!state.failed && run_any()) {}
}

}  // namespace

Dim this_thread, this_block, this_grid;

void fail(const char* format, ...) {
  if (!state.failed) {
    const int used = snprintf(state.message, sizeof state.message, "block (%u, %u, %u), thread %u: ", this_block.x,
                              this_block.y, this_block.z, state.current);
    va_list given;
    va_start(given, format);
    vsnprintf(state.message + used, sizeof state.message - used, format, given);
    va_end(given);
  }
  state.failed = true;
  leave();
  abort();
}

unsigned alive_in_warp() {
  unsigned count = 0;
  const unsigned first = state.current / 32 * 32;
  for (unsigned i = first; i < first + 32 && i < state.fibers.size(); ++i) count += !state.fibers[i].returned;
  return count;
}

unsigned random_below(unsigned limit) {
  state.random = state.random * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned((state.random >> 33) * uint64_t(limit) >> 31);
}

void sleep_on(const void* what) {
  state.fibers[state.current].waits_for = what;
  pause();
}

void wake(const void* what) {
  for (Fiber& fiber : state.fibers)
    if (fiber.waits_for == what) fiber.waits_for = nullptr;
}

void* warp_memory() { return state.warp_memory + state.current / 32 * kWarpMemory; }

unsigned shared_offset(const void* place) {
  return unsigned(static_cast<const unsigned char*>(place) - state.job->shared);
}

void meet(unsigned number, unsigned count, bool waits) {
  Barrier& barrier = state.barriers[number];
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count || (!count && barrier.arrived >= state.alive)) {
    barrier.arrived = 0;
    ++barrier.generation;
    wake(&barrier);
    if (waits) pause();
    return;
  }
  if (!waits) return;
  while (barrier.generation == generation) {
    if (!count && barrier.arrived >= state.alive) {  // the rest has returned
      barrier.arrived = 0;
      ++barrier.generation;
      wake(&barrier);
      return;
    }
    sleep_on(&barrier);
  }
}

void meet_warp(const char* operation) {
  Warp& warp = state.warps[state.current / 32];
  if (!warp.arrived) warp.operation = operation;
  if (strcmp(warp.operation, operation)) fail("lanes of a warp are at %s and at %s", warp.operation, operation);
  const unsigned generation = warp.generation;
  if (++warp.arrived == alive_in_warp()) {
    warp.arrived = 0;
    ++warp.generation;
    wake(&warp);
    return;
  }
  while (warp.generation == generation) sleep_on(&warp);
}

// Join lanes of a warp that parted at a wait behind it, as compiled code does. A lane may wait for lanes that are
// elsewhere and never come. It goes on when nothing else can.
void gather_lanes() {
  Gathering& lanes = state.warps[state.current / 32].lanes;
  const unsigned generation = lanes.generation;
  if (++lanes.arrived == alive_in_warp()) return go_on(lanes);
  while (lanes.generation == generation) sleep_on(&lanes);
}

void start_copy(void* target, const void* source, unsigned bytes, unsigned valid) {
  Copy copy{static_cast<char*>(target), static_cast<const char*>(source), bytes, valid, false};
  if (valid > bytes) fail("cp.async of %u of %u bytes", valid, bytes);
  if (uintptr_t(target) % bytes || (valid && uintptr_t(source) % bytes)) fail("cp.async of %u bytes is not aligned", bytes);
  if (random_below(4) == 0) run_copy(copy);
  state.fibers[state.current].copies.open.push_back(copy);
}

void commit_copies() { state.fibers[state.current].copies.commit(); }

void wait_for_copies(unsigned pending) { state.fibers[state.current].copies.wait(pending, run_copy); }

void barrier_init(uint64_t* barrier, unsigned arrivals) {
  check_access(barrier, 8);
  *reinterpret_cast<Phase*>(barrier) = Phase{0, arrivals, arrivals, 0};
}

void barrier_arrive(uint64_t* barrier) {
  check_access(barrier, 8);
  Phase& phase = *reinterpret_cast<Phase*>(barrier);
  if (!phase.pending) fail("more arrivals at a barrier than its phase waits for");
  --phase.pending;
  settle(barrier);
}

void barrier_expect(uint64_t* barrier, int bytes) {
  check_access(barrier, 8);
  reinterpret_cast<Phase*>(barrier)->bytes += bytes;
}

void barrier_wait(uint64_t* barrier, int parity) {
  check_access(barrier, 8);
  // Once woken, the phase is over: a lane that comes late must not take a later phase of this parity for the same one.
  if (int(reinterpret_cast<Phase*>(barrier)->parity) == parity) sleep_on(barrier);
  gather_lanes();
}

void load_box(void* target, const Map* map, uint64_t* barrier, const int* index) {
  start_box(map, target, barrier, Reduction::none, index);
}

void store_box(const Map* map, const void* source, Reduction reduction, const int* index) {
  const unsigned number = start_box(map, source, nullptr, reduction, index);
  state.fibers[state.current].stores.open.push_back(number);
}

void commit_stores() { state.fibers[state.current].stores.commit(); }

void wait_for_stores(unsigned pending) {
  state.fibers[state.current].stores.wait(pending, [](unsigned number) { run_box(state.boxes[number]); });
}

void start_product(Product* product, void (*run)(Product*)) {
  Groups<Started>& products = state.fibers[state.current].products;
  products.open.push_back({product, run});
  if (random_below(4)) return;
  for (auto& group : products.closed) {
    for (Started& each : group) each.run(each.product);
    group.clear();
  }
  for (Started& each : products.open) each.run(each.product);
  products.open.clear();
}

void commit_products() { state.fibers[state.current].products.commit(); }

void wait_for_products(unsigned pending) {
  state.fibers[state.current].products.wait(pending, [](Started& each) { each.run(each.product); });
}

namespace {

void access(const void* place, unsigned bytes, bool aligned) {
  const char* begin = static_cast<const char*>(place);
  const char* stack = state.stacks;
  if (begin >= stack && begin < stack + state.stack_count * kStack) return;
  const char* exchange = state.warp_memory;
  if (begin >= exchange && begin < exchange + 32 * kWarpMemory) return;
  for (const Dim* own : {&this_thread, &this_block, &this_grid})
    if (begin >= reinterpret_cast<const char*>(own) && begin < reinterpret_cast<const char*>(own + 1)) return;
  if (aligned && uintptr_t(place) % bytes) fail("an access of %u bytes is not aligned", bytes);
  const char* shared = reinterpret_cast<const char*>(state.job->shared);
  bool inside = begin >= shared && begin + bytes <= shared + state.job->shared_bytes;
  for (unsigned i = 0; i < state.job->tensor_count && !inside; ++i)
    inside = begin >= state.job->tensors[i].begin && begin + bytes <= state.job->tensors[i].end;
  if (!inside) fail("an access of %u bytes at %p is outside of every tensor and of shared memory", bytes, place);
  if (random_below(256) < state.job->pause) pause();
}

}  // namespace

void check_access(const void* place, unsigned bytes) { access(place, bytes, true); }

}  // namespace emulated

extern "C" {

const char* emulated_run(const emulated::Job* job) {
  using namespace emulated;
  state.job = job;
  state.random = job->seed * 2862933555777941757ull + 3037000493ull;
  state.switches = 0;
  state.failed = false;
  if (state.stack_count < job->threads) {
    if (state.stacks) munmap(state.stacks, state.stack_count * kStack);
    state.stack_count = job->threads;
    state.stacks = static_cast<char*>(mmap(nullptr, job->threads * kStack, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (state.stacks == MAP_FAILED) return state.stacks = nullptr, state.stack_count = 0, "no memory for the threads' stacks";
  }
  if (!state.warp_memory) state.warp_memory = static_cast<char*>(calloc(32, kWarpMemory));
  this_grid = {job->grid[0], job->grid[1], job->grid[2]};
  std::vector<uint64_t> order(uint64_t(job->grid[0]) * job->grid[1] * job->grid[2]);
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t j = random_below(unsigned(i + 1));
    order[i] = order[j];
    order[j] = i;
  }
  for (uint64_t block : order) {
    this_block = {unsigned(block % job->grid[0]), unsigned(block / job->grid[0] % job->grid[1]),
                  unsigned(block / job->grid[0] / job->grid[1])};
    run_block();
    if (state.failed) return state.message;
  }
  return nullptr;
}

// Functions that a compiler calls before accesses under -fsanitize=thread; no other part of that tool is used.
#define EMULATED_ACCESS(bytes)                                                              \
  void __tsan_read##bytes(void* p) { emulated::access(p, bytes, true); }                    \
  void __tsan_write##bytes(void* p) { emulated::access(p, bytes, true); }                   \
  void __tsan_unaligned_read##bytes(void* p) { emulated::access(p, bytes, false); }         \
  void __tsan_unaligned_write##bytes(void* p) { emulated::access(p, bytes, false); }        \
  void __tsan_volatile_read##bytes(void* p) { emulated::access(p, bytes, true); }           \
  void __tsan_volatile_write##bytes(void* p) { emulated::access(p, bytes, true); }
EMULATED_ACCESS(1) EMULATED_ACCESS(2) EMULATED_ACCESS(4) EMULATED_ACCESS(8) EMULATED_ACCESS(16)
void __tsan_read_range(void* p, long bytes) { emulated::access(p, unsigned(bytes), false); }
void __tsan_write_range(void* p, long bytes) { emulated::access(p, unsigned(bytes), false); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// Functions that a compiler calls under -fsanitize=signed-integer-overflow, with the operation's place in the text.
struct Place { const char* file; unsigned line, column; };
#define EMULATED_OVERFLOW(name, what)                                                          \
  void __ubsan_handle_##name##_overflow(const Place* place, void*, void*) {                    \
    emulated::fail("a signed %s leaves its type in line %u of the text", what, place->line);   \
  }
EMULATED_OVERFLOW(add, "sum") EMULATED_OVERFLOW(sub, "difference") EMULATED_OVERFLOW(mul, "product")
EMULATED_OVERFLOW(negate, "negative") EMULATED_OVERFLOW(divrem, "quotient")

}  // extern "C"
