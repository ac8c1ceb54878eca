# SPDX-License-Identifier: Apache-2.0
import pytest
from cuda_shim import compile_everywhere

INDICES = [", ".join("nm1k0"[:rank]) for rank in range(1, 6)]
KERNEL = """
#include "tma.h"
using namespace tile;
extern "C" __global__ void k(const __grid_constant__ TensorMap map, int n, int m, int k) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared_memory + 32768);
  if (threadIdx.x == 0) {
    prefetch_map(&map);
    CALLS
    bulk_commit();
    bulk_wait<1, true>();
    bulk_wait<0, false>();
  }
  fence_proxy_async();
}
"""


def compiled(calls):
    compile_everywhere(KERNEL.replace("CALLS", "\n    ".join(calls)), ("sm_90a",))


@pytest.mark.parametrize("policy", ["", "_evict_first", "_evict_last"])
def test_loads_of_every_rank(policy):
    compiled(f"tma_load{policy}(shared_memory, &map, barrier, {place});" for place in INDICES)


@pytest.mark.parametrize("policy", ["", "_evict_first", "_evict_last"])
def test_loads_to_several_blocks(policy):
    compiled(f"tma_load_multicast{policy}(shared_memory, &map, barrier, {place}, 3 << n);" for place in INDICES)


@pytest.mark.parametrize("combine", ["", "_add", "_min", "_max"])
def test_stores_of_every_rank(combine):
    compiled(f"tma_store{combine}(&map, shared_memory, {place});" for place in INDICES)


def test_a_map_is_what_the_driver_fills():
    text = KERNEL.replace("CALLS", "static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64);")
    compile_everywhere(text, ("sm_90a",))
