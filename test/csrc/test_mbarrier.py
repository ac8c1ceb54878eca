# SPDX-License-Identifier: Apache-2.0
import pytest
from cuda_shim import compile_everywhere

from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin

HOPPER = ("sm_90a", "sm_120a")
KERNEL = """
#include "mbarrier.h"
using namespace tile;
extern "C" __global__ void k(int* out, int bytes) {
  extern __shared__ uint64_t barriers[];
  if (threadIdx.x == 0) {
    mbarrier_init<1>(barriers);
    mbarrier_init<4>(barriers + 1);
    fence_barrier_init();
  }
  __syncthreads();
  for (int i = 0; i < bytes; ++i) {
    mbarrier_wait(barriers + i % 2, i / 2 % 2);
    mbarrier_wait(barriers, i / 4 % 2);
    if (threadIdx.x == 0) {
      mbarrier_expect(barriers, bytes);
      mbarrier_arrive(barriers);
    }
    warp_arrive(barriers + 1);
    warp_arrive(barriers + 1, 5);
    mbarrier_arrive(barriers, i % 4);
  }
  out[threadIdx.x] = bytes;
}
"""


def test_compiles():
    """A wait has a label, which is its own wherever it is inlined."""
    compile_everywhere(KERNEL, HOPPER)


@pytest.mark.parametrize("arrivals", [0, 1 << 20])
def test_refuses_counts_that_no_barrier_has(arrivals):
    text = KERNEL.replace("mbarrier_init<4>", f"mbarrier_init<{arrivals}>")
    with pytest.raises(InternalError, match=r"a phase waits for 1 to 2\^20 - 1 arrivals"):
        compile_cubin(text, Target.of("sm_90"))
