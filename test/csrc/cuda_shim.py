# SPDX-License-Identifier: Apache-2.0
"""GPU headers in tests: compiled for every chip, and their plain parts run by the host's compiler."""

from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin

CHIPS = ("sm_80", "sm_89", "sm_90a", "sm_120a")

# What CUDA gives its device code, for the parts of a header that hold no PTX; as the oldest chip.
HOST = """
#include <stdint.h>
#include <string.h>
#define __CUDA_ARCH__ 800
#define __device__
#define __forceinline__ inline
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
struct Index { unsigned x, y, z; };
static Index blockIdx, gridDim;
"""


def compile_everywhere(text, chips=CHIPS, stack=0):
    """Compile for each chip: no warning, no spill."""
    for chip in chips:
        cubin = compile_cubin(text, Target.of(f"cuda:{chip}"))
        assert cubin.warnings == [], chip
        for name, used in cubin.resources.items():
            assert (used.spills, used.stack) == (0, stack), (chip, name)
