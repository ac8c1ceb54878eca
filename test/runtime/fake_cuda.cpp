// SPDX-License-Identifier: Apache-2.0
// The functions of libcuda that torch_tile calls, without a GPU: they check what they are given and write it down.

#include <cstdint>
#include <cstring>

struct Record {
  uint64_t function, context, stream;
  unsigned grid[3], block[3], shared;
  uint64_t slots[16];
};

extern "C" {
Record records[64];
uint64_t module_contexts[64];
int allowed[64];
int count, modules, allowances, slots, refuse, capability, capture_mode;
static thread_local uint64_t current;

void fake_reset() {
  count = modules = allowances = slots = refuse = capture_mode = 0;
  capability = 90;
  current = 0;
}
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13010, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 4 ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return 0;
}
int cuDevicePrimaryCtxRetain(uint64_t* context, int device) { return *context = 0x1000 + device, 0; }
int cuCtxGetCurrent(uint64_t* context) { return *context = current, 0; }
int cuCtxSetCurrent(uint64_t context) { return current = context, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuModuleLoadData(uint64_t* module, const char* image) {
  if (std::memcmp(image, "\x7f""ELF", 4)) return 200;
  if (capture_mode != 2 || !current) return 900;
  module_contexts[modules] = current;
  *module = 0x2000 + modules++;
  return 0;
}
int cuModuleGetFunction(uint64_t* function, uint64_t module, const char* name) {
  if (name[0] == '?') return 500;
  return *function = (module << 16) + std::strlen(name), 0;
}
int cuFuncSetAttribute(uint64_t, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return 1;
  return allowed[allowances++] = value, 0;
}
int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void** parameters, void** extra) {
  if (refuse || extra || !current) return refuse ? refuse : 201;
  Record& record = records[count++ % 64];
  record = {function, current, stream, {gx, gy, gz}, {bx, by, bz}, shared, {}};
  for (int i = 0; i < slots; ++i) record.slots[i] = *(uint64_t*)parameters[i];
  return 0;
}
int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int, const char** text) { return *text = "it was asked to fail", 0; }
}
