// SPDX-License-Identifier: Apache-2.0
// DLPack 1.x, the part that launch.cpp uses: how torch shows it a tensor, and gives it memory. Comes after Python.h.
#pragma once
#include <stdint.h>

namespace {

struct Tensor {
  void* data;
  int32_t device_type, device_index;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
enum : uint8_t { kUnsigned = 1, kFloat = 2, kBfloat = 4 };

struct Managed {
  uint32_t major, minor;
  void* owner;
  void (*release)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

struct Exchange {
  uint32_t major, minor;
  void* previous;
  int (*allocate)(Tensor* like, Managed** made, void* context, void (*refuse)(void*, const char*, const char*));
  void *managed_from_object, *object_from_managed;
  int (*tensor_from_object)(PyObject*, Tensor*);
  int (*current_stream)(int device_type, int32_t device_index, void** stream);
};

// Memory of torch's own allocator. Given back at the end of the scope, while kernels may still use it: whoever gets it
// next on the same stream comes after them.
class Workspace {
 public:
  // On the device's current stream. False if there is no such memory.
  bool allocate(const Exchange& exchange, int32_t device_type, int32_t device_index, int64_t bytes) {
    Tensor like = {NULL, device_type, device_index, 1, kUnsigned, 8, 1, &bytes, NULL, 0};
    auto refuse = [](void*, const char*, const char*) {};
    bool is_made = exchange.allocate != NULL && exchange.allocate(&like, &managed, NULL, refuse) == 0;
    if (!is_made) managed = NULL, PyErr_Clear();
    return is_made;
  }
  uint64_t address() const {
    return managed == NULL ? 0 : (uint64_t)managed->tensor.data + managed->tensor.byte_offset;
  }
  ~Workspace() {
    if (managed != NULL) managed->release(managed);
  }

 private:
  Managed* managed = NULL;
};

}  // namespace
