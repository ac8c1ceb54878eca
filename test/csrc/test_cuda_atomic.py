# SPDX-License-Identifier: Apache-2.0
"""Atomics compile for every type and chip, with the chip's own instruction where it has one."""

import pytest
from cuda_shim import compile_everywhere

INTEGERS = ("int8_t", "uint8_t", "int16_t", "int32_t", "uint32_t", "int64_t", "uint64_t")
FLOATS = ("tile::f16", "tile::bf16", "tile::e4m3", "tile::e5m2", "float", "double")


@pytest.mark.parametrize("op", ["add", "max", "min", "exchange", "and", "or", "xor"])
def test_every_type_compiles(op):
    kinds = INTEGERS if op in ("and", "or", "xor") else INTEGERS + FLOATS
    text = "".join(
        f'extern "C" __global__ void {kind.replace("tile::", "")}_k({kind}* p) {{ *p = tile::atomic_{op}(p, p[1]); }}\n'
        for kind in kinds
    )
    compile_everywhere(f'#include "cuda_atomic.h"\n{text}')


def test_arrivals_compile():
    call = "if (threadIdx.x == 0) last[0] = tile::arrive_last(counter, count);"
    compile_everywhere(f"""
#include "cuda_atomic.h"
extern "C" __global__ void k(int32_t* counter, int count, int32_t* last) {{ {call} }}
""")


def test_flags():
    calls = "tile::atomic_or(p, true); tile::atomic_and(p, p[1]);"
    compile_everywhere(f'#include "cuda_atomic.h"\nextern "C" __global__ void k(bool* p) {{ {calls} }}')


@pytest.mark.parametrize("kind", ["float", "double", "tile::f16", "tile::bf16", "int32_t"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_vectors_compile(kind, count):
    values = ", ".join(f"p[{n}]" for n in range(count))
    compile_everywhere(f"""
#include "cuda_atomic.h"
extern "C" __global__ void k({kind}* p) {{
  alignas(16) {kind} values[{count}] = {{{values}}};
  tile::atomic_add_vector<{count}>(p + 16, values);
}}
""")
