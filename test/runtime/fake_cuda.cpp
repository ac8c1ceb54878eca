// SPDX-License-Identifier: Apache-2.0
// The functions of libcuda that torch_tile calls, without a GPU: they check what they are given and write it down.

#include <cstdint>
#include <cstring>

struct Map {  // what a real one would be made from
  uint64_t address, sizes[5], strides[4];
  unsigned boxes[5];
  uint8_t data_type, rank, swizzle, promotion;
  uint64_t number;  // of maps made before
  uint64_t rest[2];
};
static_assert(sizeof(Map) == 128);

struct Record {
  uint64_t function, context, stream;
  unsigned grid[3], block[3], shared;
  unsigned cluster[3], early, is_extended;
  uint64_t slots[16];
  Map maps[4];
};

// cuda.h's, on 64-bit machines.
struct Attribute {
  unsigned id, padding;
  union { unsigned words[3]; char room[64]; };
};
struct Config {
  unsigned grid[3], block[3], shared;
  uint64_t stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56);

extern "C" {
Record records[64];
uint64_t module_contexts[64];
int allowed[64];
int count, modules, allowances, slots, map_slots, encoded, refuse, refuse_maps, capability, capture_mode;
static thread_local uint64_t current;

void fake_reset() {
  count = modules = allowances = slots = map_slots = encoded = refuse = refuse_maps = capture_mode = 0;
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
// Bit i of `map_slots`: argument i is a map.
static int launch(const Config& config, uint64_t function, void** parameters, void** extra, bool is_extended) {
  if (refuse || extra || !current) return refuse ? refuse : 201;
  Record& record = records[count++ % 64];
  record = {function, current, config.stream, {}, {}, config.shared, {1, 1, 1}, 0, is_extended, {}, {}};
  std::memcpy(record.grid, config.grid, sizeof record.grid);
  std::memcpy(record.block, config.block, sizeof record.block);
  for (unsigned i = 0; i < config.count; ++i) {
    const Attribute& asked = config.attributes[i];
    if (asked.id == 4) std::memcpy(record.cluster, asked.words, sizeof record.cluster);
    else if (asked.id == 6) record.early = asked.words[0];
    else return 1;
  }
  for (int i = 0, maps = 0; i < slots; ++i) {
    if (map_slots >> i & 1) std::memcpy(&record.maps[maps++], parameters[i], sizeof(Map));
    else record.slots[i] = *(uint64_t*)parameters[i];
  }
  return 0;
}
int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void** parameters, void** extra) {
  return launch({{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0}, function, parameters, extra, false);
}
int cuLaunchKernelEx(const Config* config, uint64_t function, void** parameters, void** extra) {
  return launch(*config, function, parameters, extra, true);
}
// Refuses what cuda.h says it refuses.
int cuTensorMapEncodeTiled(Map* map, int data_type, unsigned rank, uint64_t address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* boxes, const unsigned* steps, int interleave, int swizzle,
                           int promotion, int fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  bool is_legal = (uint64_t)map % 64 == 0 && data_type >= 0 && data_type < 10 && rank >= 1 && rank <= 5 && address % 16 == 0 &&
                  interleave == 0 && swizzle >= 0 && swizzle < 4 && promotion >= 2 && promotion < 4 && fill == 0;
  if (!is_legal || refuse_maps) return 1;
  for (unsigned d = 0; d < rank; ++d) {
    if (sizes[d] < 1 || sizes[d] > 1ull << 32 || boxes[d] < 1 || boxes[d] > 256 || steps[d] != 1) return 1;
    if (d + 1 < rank && (strides[d] % 16 || strides[d] >= 1ull << 40)) return 1;
  }
  unsigned row = boxes[0] * bytes[data_type];
  if (row % 16 || (swizzle && row > 16u << swizzle)) return 1;
  *map = {address, {}, {}, {}, (uint8_t)data_type, (uint8_t)rank, (uint8_t)swizzle, (uint8_t)promotion, (uint64_t)encoded++, {}};
  std::memcpy(map->sizes, sizes, 8 * rank);
  std::memcpy(map->strides, strides, 8 * (rank - 1));
  std::memcpy(map->boxes, boxes, 4 * rank);
  return 0;
}
int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int, const char** text) { return *text = "it was asked to fail", 0; }
}
