// SPDX-License-Identifier: Apache-2.0
// Kernels inside generated C++ (torch_tile/inductor/codegen/cpp_wrapper.py): machine code is there as bytes, loaded at its first use,
// and called without Python. This text goes into each wrapper whole, so it includes no header of CUDA's or torch's.
#pragma once
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <initializer_list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch_driver.h"

#ifndef TILE_LIBCUDA
#define TILE_LIBCUDA "libcuda.so.1"
#endif

namespace tile {
namespace {

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error("torch_tile: " + why); }

// Conditions on sizes and addresses for a kernel to be right.
void require(bool holds, const char* what) {
  if (!holds) fail(std::string("a kernel of this package needs ") + what);
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- CPU -------------------------------------------------------------------------------------------------------------

using Entry = int64_t (*)(void* const* buffers, const int64_t* numbers);

// Return the entry of a shared library, which stays open. The file gets a name that is never used again, and is removed
// after it is opened: a library of a known name is not opened again.
Entry open_entry(const char* code, size_t size) {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder != nullptr && *folder ? folder : "/tmp") + "/torch_tile_XXXXXX";
  int file = mkstemp(&path[0]);
  if (file < 0) fail("no temporary file can be made in " + path.substr(0, path.rfind('/')) + "; set TMPDIR");
  size_t done = 0;
  for (ssize_t wrote = 1; done < size && wrote > 0; done += wrote > 0 ? (size_t)wrote : 0)
    wrote = write(file, code + done, size - done);
  close(file);
  void* library = done == size ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  const char* problem = library != nullptr ? nullptr : done < size ? "the disk is full" : dlerror();
  unlink(path.c_str());
  if (library == nullptr) fail(std::string("a kernel cannot be loaded: ") + (problem ? problem : "no reason given"));
  void* found = dlsym(library, "tile_main");
  if (found == nullptr) fail("a kernel's library has no entry");
  return (Entry)found;
}

// Call an entry; a number that it returns names the assertion that failed.
void run(Entry entry, void* const* buffers, const int64_t* numbers, const char* name,
         std::initializer_list<const char*> assertions) {
  int64_t code = entry(buffers, numbers);
  if (code == 0) return;
  bool is_known = code > 0 && code <= (int64_t)assertions.size();
  fail(std::string(name) + ": " + (code == -1 ? "no memory for on-chip buffers" : is_known ? assertions.begin()[code - 1] : "failed"));
}

// ---- CUDA ------------------------------------------------------------------------------------------------------------

class Cuda {
 public:
  Driver driver;
  int (*load)(void**, const void*);
  int (*get_function)(void**, void*, const char*);
  int (*set_attribute)(void*, int, int);
  int (*capture_mode)(int*);
  int (*error_name)(int, const char**);

  Cuda() {
    library = dlopen(TILE_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) fail("there is no NVIDIA driver on this machine (" TILE_LIBCUDA ")");
    find("cuLaunchKernel", &driver.launch_kernel);
    find("cuLaunchKernelEx", &driver.launch_kernel_ex);
    find("cuCtxGetCurrent", &driver.get_context);
    find("cuCtxSetCurrent", &driver.set_context);
    find("cuTensorMapEncodeTiled", &driver.encode_tiled);
    find("cuModuleLoadData", &load);
    find("cuModuleGetFunction", &get_function);
    find("cuFuncSetAttribute", &set_attribute);
    find("cuThreadExchangeStreamCaptureMode", &capture_mode);
    find("cuGetErrorName", &error_name);
  }

  void check(int status, const char* what) const {
    if (status == 0) return;
    const char* name = nullptr;
    error_name(status, &name);
    fail(std::string(what) + ": " + (name ? name : "error") + " (" + std::to_string(status) + ")");
  }

 private:
  void* library;

  template <class F> void find(const char* name, F* into) {
    *into = (F)dlsym(library, name);
    if (*into == nullptr) fail(std::string("NVIDIA's driver on this machine has no ") + name + "; a newer one does");
  }
};

const Cuda& cuda() {
  static const Cuda found;
  return found;
}

// The functions of a cubin, loaded into each context that asks; they stay, as launches may be in captured graphs.
class Cubin {
 public:
  explicit Cubin(const char* code) : code(code) {}

  // A function in the current context, allowed `shared` bytes of dynamic shared memory.
  int64_t function(const char* name, int shared) {
    void* context = nullptr;
    cuda().check(cuda().driver.get_context(&context), "cuCtxGetCurrent");
    if (context == nullptr) fail("no CUDA context is current");
    std::lock_guard<std::mutex> guard(lock);
    for (const Loaded& each : loaded)
      if (each.context == context && each.name == name) return (int64_t)each.function;
    return (int64_t)load(context, name, shared);
  }

 private:
  struct Loaded {
    void *context, *module;
    std::string name;
    void* function;
  };
  const char* code;
  std::mutex lock;
  std::vector<Loaded> loaded;

  void* load(void* context, const char* name, int shared) {
    Loaded made = {context, nullptr, name, nullptr};
    for (const Loaded& each : loaded)
      if (each.context == context) made.module = each.module;
    int mode = 2;  // relaxed: a stream of this thread may be captured
    cuda().check(cuda().capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    int status = made.module != nullptr ? 0 : cuda().load(&made.module, code);
    if (status == 0) status = cuda().get_function(&made.function, made.module, name);
    if (status == 0 && shared > 48 * 1024) status = cuda().set_attribute(made.function, 8, shared);
    cuda().capture_mode(&mode);
    cuda().check(status, "a kernel cannot be loaded");
    loaded.push_back(made);
    return made.function;
  }
};

// Follow the plan in `words`. Its grids are as the kernels' authors wrote them; those that fold may be all in x.
void run(int64_t* words, std::initializer_list<bool> folds, const uint64_t* pointers, void* stream) {
  Plan* plan = (Plan*)words;
  PlannedLaunch* at = plan->first();
  int64_t blocks = 0;
  for (bool can_fold : folds) {
    blocks += at->x * at->y * at->z;
    if (can_fold && most(at->y, at->z) > 65535) at->x *= at->y * at->z, at->y = at->z = 1;
    require(at->x < 1ll << 31 && at->y <= 65535 && at->z <= 65535, "fewer blocks than these sizes make");
    at = (PlannedLaunch*)((int64_t*)(at + 1) + 2 * at->arguments);
  }
  if (blocks == 0) return;  // there are no maps of tensors without elements
  cuda().check(bring_maps(cuda().driver, plan, pointers), "there is no tensor map of an argument");
  cuda().check(follow(cuda().driver, plan, pointers, nullptr, stream), "cuLaunchKernel");
}

}  // namespace
}  // namespace tile
