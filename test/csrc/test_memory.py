# SPDX-License-Identifier: Apache-2.0
"""Copies and matrix loads compile for every chip that has them, and keep local arrays in registers."""

from __future__ import annotations

import pytest

from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin

HEAD = '#include "memory.h"\nusing namespace tile;\n'
COPIES = """
extern "C" __global__ void copies(float* out, const f16* in, int valid) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  f16* s = reinterpret_cast<f16*>(shared_memory);
  cp_async<16>(&s[threadIdx.x * 8], &in[threadIdx.x * 8], 16);
  cp_async<8>(&s[4096 + threadIdx.x * 4], &in[threadIdx.x * 4], valid);
  cp_async<4>(&s[8192 + threadIdx.x * 2], &in[threadIdx.x * 2], valid);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  alignas(16) f16 a[24];
  alignas(16) float x[4];
  LOADS
  vector_copy<16>(&a[14 + 2], &s[threadIdx.x * 8]);
  #pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = a[3 * i].bits + a[23 - i].bits;
  vector_copy<16>(&out[threadIdx.x * 4], &x[0]);
  vector_copy<SIZE>(&out[4096 + threadIdx.x * 4], &x[0]);
}
"""
STORES = """
extern "C" __global__ void stores(f16* out) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  f16* s = reinterpret_cast<f16*>(shared_memory);
  alignas(16) f16 a[8];
  vector_copy<16>(&a[0], &out[threadIdx.x * 8]);
  CALLS
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
"""
VARIANTS = [f"x{count}{trans}" for count in (1, 2, 4) for trans in ("", "_trans")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_compiles_without_local_memory(arch: str) -> None:
    text = HEAD
    for n, variant in enumerate(VARIANTS):
        loads = f"ldmatrix_{variant}(&a[0], &s[threadIdx.x * 8]);"
        kernel = COPIES.replace("LOADS", loads).replace("SIZE", str((4, 8, 16)[n % 3]))
        text += kernel.replace("void copies", f"void copies{n}")
    if Target.of(arch).has_stmatrix:
        text += STORES.replace("CALLS", "\n".join(f"stmatrix_{v}(&s[threadIdx.x * 8], &a[0]);" for v in VARIANTS))
    cubin = compile_cubin(text, Target.of(arch))
    assert len(cubin.resources) == len(VARIANTS) + Target.of(arch).has_stmatrix
    assert all(r.spills == r.stack == 0 for r in cubin.resources.values())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("vector_copy<3>(p, q)", "one load or store moves 1, 2, 4, 8 or 16 bytes"),
        ("cp_async<2>(p, q, 2)", "cp.async moves 4, 8 or 16 bytes"),
    ],
)
def test_refuses_sizes_that_do_not_exist(call: str, sentence: str) -> None:
    with pytest.raises(InternalError, match=sentence):
        compile_cubin(f'{HEAD}extern "C" __global__ void k(int* p, int* q) {{ {call}; }}', Target.of("sm_90"))
