# SPDX-License-Identifier: Apache-2.0
"""Shuffles and votes compile for every chip, for values of every size."""

from __future__ import annotations

import pytest

from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import compile_cubin

TYPES = ["int8_t", "f16", "bf16", "e4m3", "uint32_t", "float", "double", "int64_t", "bool"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_compiles_without_local_memory(arch: str) -> None:
    text = '#include "shuffle.h"\nusing namespace tile;\n'
    for type_ in TYPES:
        text += f"""
extern "C" __global__ void exchange_{type_}({type_}* x, int lane) {{
  {type_} v = x[threadIdx.x];
  v = shuffle(shuffle_up(shuffle_down(shuffle_xor(v, 1), 2), lane), lane);
  if (vote_any(lane > 3) && vote_all(lane < 7) && vote_ballot(lane == 5) == 9u) x[threadIdx.x] = v;
}}"""
    cubin = compile_cubin(text, Target.of(arch))
    assert len(cubin.resources) == len(TYPES)
    assert all(r.spills == r.stack == 0 for r in cubin.resources.values())
