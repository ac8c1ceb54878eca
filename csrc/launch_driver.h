// SPDX-License-Identifier: Apache-2.0
// Calls of NVIDIA's driver for a plan of launches, which runtime/cuda_launch.py packs: launches, and their tensor maps.
// launch.cpp follows plans for calls from Python. Generated C++ follows the plans in its own text (embedded.h).
// Functions come by their addresses, so that no header of CUDA's is needed.
#pragma once
#include <stdint.h>
#include <string.h>

namespace tile {
namespace {

// CUlaunchAttribute and CUlaunchConfig, as cuda.h has them on 64-bit machines.
struct Attribute {
  uint32_t id, padding, words[16];
};
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "these are the driver's");
enum : uint32_t { kCluster = 4, kSerialization = 6 };

struct Driver {
  int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*launch_kernel_ex)(const Config*, void*, void**, void**);
  int (*get_context)(void**);
  int (*set_context)(void*);
  int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                      int, int, int);
};

// A plan's words about one kernel, before its arguments.
struct PlannedLaunch {
  int64_t function, x, y, z, threads, shared, cluster[3], early, arguments;
};

// A tensor map of a plan: the tensor, the driver's parameters for its map, and the map of the address it last had.
struct PlannedMap {
  int64_t tensor, data_type, rank, swizzle, promotion;
  uint64_t sizes[5], strides[5], boxes[5], address;
  unsigned char bytes[128];
};

// The launches for arguments of one form. The plan's maps follow, and then a PlannedLaunch for each kernel with (kind,
// value) for each argument. Kind 0 is the tensor `value`, 1 the scalar `value`, 2 the number `value` itself, and 3 the
// map `value` of the plan. A tensor is named by its place: the argument's number in the low 8 bits, and from there the
// bytes. The last number is that of the workspace.
struct Plan {
  int64_t context, workspace, launches, maps;
  PlannedMap* map(int64_t index) { return (PlannedMap*)(this + 1) + index; }
  PlannedLaunch* first() { return (PlannedLaunch*)map(maps); }
};
constexpr int kMostPlaces = 256;  // arguments of one kernel

uint64_t address_of(const uint64_t* pointers, int64_t place) {
  return pointers[place & 255] + (uint64_t)(place >> 8);
}

int start(const Driver& driver, const PlannedLaunch& plan, void* stream, void** places) {
  const int64_t* cluster = plan.cluster;
  bool has_cluster = cluster[0] * cluster[1] * cluster[2] != 1;
  if (!has_cluster && !plan.early)
    return driver.launch_kernel((void*)plan.function, (unsigned)plan.x, (unsigned)plan.y, (unsigned)plan.z,
                                (unsigned)plan.threads, 1, 1, (unsigned)plan.shared, stream, places, NULL);
  Attribute attributes[2] = {};
  uint32_t count = 0;
  if (has_cluster) attributes[count++] = {kCluster, 0, {(uint32_t)cluster[0], (uint32_t)cluster[1], (uint32_t)cluster[2]}};
  if (plan.early) attributes[count++] = {kSerialization, 0, {1}};
  Config config = {{(uint32_t)plan.x, (uint32_t)plan.y, (uint32_t)plan.z}, {(uint32_t)plan.threads, 1, 1},
                   (uint32_t)plan.shared, stream, attributes, count};
  return driver.launch_kernel_ex(&config, (void*)plan.function, places, NULL);
}

// Make the map of a tensor at `address`, unless it is there.
int bring(const Driver& driver, PlannedMap* map, uint64_t address) {
  if (map->address == address) return 0;
  alignas(64) unsigned char made[sizeof map->bytes];
  uint32_t boxes[5], steps[5] = {1, 1, 1, 1, 1};
  for (int d = 0; d < 5; ++d) boxes[d] = (uint32_t)map->boxes[d];
  int status = driver.encode_tiled(made, (int)map->data_type, (uint32_t)map->rank, (void*)address, map->sizes, map->strides,
                                   boxes, steps, /* no interleave */ 0, (int)map->swizzle, (int)map->promotion, /* 0 outside */ 0);
  if (status != 0) return status;
  memcpy(map->bytes, made, sizeof made);
  map->address = address;
  return 0;
}

// Update the maps of a plan to the addresses of the arguments. Return 0, or the driver's status of a refused map.
int bring_maps(const Driver& driver, Plan* plan, const uint64_t* pointers) {
  int status = 0;
  for (int64_t i = 0; i < plan->maps && status == 0; ++i)
    status = bring(driver, plan->map(i), address_of(pointers, plan->map(i)->tensor));
  return status;
}

// Make the launches of a plan with current maps in the current context; addresses are written into it. A grid without
// blocks is not launched.
int follow(const Driver& driver, Plan* plan, const uint64_t* pointers, uint64_t* scalars, void* stream) {
  int status = 0;
  int64_t* at = (int64_t*)plan->first();
  for (int64_t left = plan->launches; left > 0 && status == 0; --left) {
    const PlannedLaunch& next = *(const PlannedLaunch*)at;
    void* places[kMostPlaces];
    int64_t* argument = at + sizeof next / 8;
    for (int64_t i = 0; i < next.arguments; ++i, argument += 2) {
      if (argument[0] == 0) argument[1] = (int64_t)address_of(pointers, argument[1]);
      places[i] = argument[0] == 1   ? (void*)&scalars[argument[1]]
                  : argument[0] == 3 ? (void*)plan->map(argument[1])->bytes
                                     : (void*)&argument[1];
    }
    if (next.x > 0 && next.y > 0 && next.z > 0) status = start(driver, next, stream, places);
    at = argument;
  }
  return status;
}

}  // namespace
}  // namespace tile
