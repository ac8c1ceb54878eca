# SPDX-License-Identifier: Apache-2.0
"""Descriptors bit by bit, and what stands around products."""

import pytest
from cuda_shim import compile_everywhere

from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin

# The layouts of the PTX manual's table, spelled out.
CHECKS = [
    ("128, 16, 1024, false", "1ull << 62 | 64ull << 32"),
    ("64, 16, 512, false", "2ull << 62 | 32ull << 32"),
    ("32, 16, 256, false", "3ull << 62 | 16ull << 32"),
    ("0, 128, 256, false", "16ull << 32"),
    ("128, 16384, 1024, true", "1ull << 62 | 64ull << 32"),
]
KERNEL = """
#include "wgmma.h"
using namespace tile;
CHECKS
extern "C" __global__ void k(uint64_t* out, int step) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  out[threadIdx.x] = Walk<128, 16, 1024, false>::from(shared_memory + 2048 * step, 32);
  wgmma_fence();
  wgmma_commit();
  float held = float(step);
  wgmma_hold(&held);
  wgmma_wait<0>();
  wgmma_wait<7>();
  float x[2] = {float(step), 2.0f};
  wgmma_results<2>(x);
  alignas(4) f16 y[2] = {f16{uint16_t(step)}, f16{1}};
  wgmma_results<2>(y);
  out[step] = uint64_t(x[0] + x[1]) + y[0].bits;
}
"""


def test_descriptors():
    checks = [f"static_assert(Walk<{walk}>::upper << 32 == ({upper}));" for walk, upper in CHECKS]
    checks += [f"static_assert(Walk<{walk}>::is_across == {int('true' in walk)});" for walk, _ in CHECKS]
    # The third block of a cluster sees its shared memory at an address with its rank in the upper bits.
    checks += ["static_assert(Walk<128, 16384, 1024, true>::lower(0x03000400, 32) == (1024u << 16 | 0x42));"]
    compile_everywhere(KERNEL.replace("CHECKS", "\n".join(checks)), ("sm_90a",))


@pytest.mark.parametrize(
    ("walk", "sentence"),
    [
        ("100, 16, 1024, false", "a panel spans 32, 64 or 128 bytes"),
        ("128, 8, 1024, false", "`leading` is a multiple of 16"),
        ("128, 16, 1 << 18, false", "`stride` is a multiple of 16"),
    ],
)
def test_refuses_what_no_descriptor_holds(walk, sentence):
    text = KERNEL.replace("CHECKS", "").replace("Walk<128, 16, 1024, false>", f"Walk<{walk}>")
    with pytest.raises(InternalError, match=sentence):
        compile_cubin(text, Target.of("sm_90"))
