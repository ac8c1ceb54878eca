# SPDX-License-Identifier: Apache-2.0
"""Every product of the tensor cores compiles for every chip that has it, and keeps local arrays in registers."""

from __future__ import annotations

import pytest

from torch_tile.hardware import Target
from torch_tile.intrinsics.matrix import FRAGMENTS, PRODUCTS, shape_for
from torch_tile.runtime.nvrtc import compile_cubin

C_TYPES = {
    "float16": "f16", "bfloat16": "bf16", "float32": "float", "tf32": "float", "float64": "double", "int8": "int8_t",
    "uint8": "uint8_t", "int32": "int", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
KERNEL = """
extern "C" __global__ void {name}({a} *a, {b} *b, {d} *d) {{
  alignas(16) {a} x[{na}]; alignas(16) {b} y[{nb}]; alignas(16) {d} z[{nd}];
  #pragma unroll
  for (int i = 0; i < {na}; ++i) x[i] = a[threadIdx.x * {na} + i];
  #pragma unroll
  for (int i = 0; i < {nb}; ++i) y[i] = b[threadIdx.x * {nb} + i];
  #pragma unroll
  for (int i = 0; i < {nd}; ++i) z[i] = d[threadIdx.x * {nd} + i];
  mma_{shape}(&z[0], &x[0], &y[0]);
  #pragma unroll
  for (int i = 0; i < {nd}; ++i) d[threadIdx.x * {nd} + i] = z[i];
}}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_products(arch: str) -> None:
    target = Target.of(f"cuda:{arch}")
    text, count = '#include "mma.h"\nusing namespace tile;\n', 0
    for (a, b, d), shape in PRODUCTS.items():
        if shape_for(a, b, d, target) is None:
            continue
        s, count = FRAGMENTS[shape], count + 1
        text += KERNEL.format(
            name=f"k{count}", shape=shape, a=C_TYPES[a], b=C_TYPES[b], d=C_TYPES[d], na=s.registers("a"),
            nb=s.registers("b"), nd=s.registers("d"),
        )  # fmt: skip
    text += 'extern "C" __global__ void rest(int* i, float* f) { *i = dp4a(*i, 3, 4); *f = round_tf32(*f); }\n'
    cubin = compile_cubin(text, target)
    assert len(cubin.resources) == count + 1 and count == len(PRODUCTS) - (4 if arch == "sm_80" else 0)
    assert all(r.spills == r.stack == 0 for r in cubin.resources.values())
