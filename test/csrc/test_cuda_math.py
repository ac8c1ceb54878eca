# SPDX-License-Identifier: Apache-2.0
"""Every function of the language has a spelling for GPUs that compiles, in float and double, exact and fast."""

import itertools
import pathlib

import pytest
import torch
from cuda_shim import compile_everywhere

from torch_tile.intrinsics import lookup, names

MATH = [name for name in names() if lookup(name).header == "cuda_math.h"]


def test_all_of_the_language_is_here():
    assert {"exp2", "rsqrt", "sigmoid", "maximum", "fma", "isnan", "round"} <= set(MATH)
    assert all(lookup(name).cuda for name in MATH)


@pytest.mark.parametrize("fast", [False, True])
def test_functions_compile(fast):
    """Each is a kernel of its own: trigonometry alone may use a stack frame, for huge arguments."""
    for kind in ("float", "double"):
        text = ["#define TILE_FAST_MATH\n" if fast else "", '#include "cuda_math.h"\n']
        for name in MATH:
            if name in ("sin", "cos", "tan"):
                continue
            args = ", ".join(f"x[{n}]" for n in range(lookup(name).arity))
            text.append(f'extern "C" __global__ void {name}_({kind}* x) {{ x[0] = ({kind})tile::{name}({args}); }}\n')
        compile_everywhere("".join(text), chips=("sm_80", "sm_90a"))


def test_trigonometry_compiles():
    text = "".join(
        f'extern "C" __global__ void {name}_(float* x) {{ x[0] = tile::{name}(x[0]); }}\n'
        for name in ("sin", "cos", "tan")
    )
    from torch_tile.hardware import Target
    from torch_tile.runtime.nvrtc import compile_cubin

    cubin = compile_cubin('#include "cuda_math.h"\n' + text, Target.of("cuda:sm_90a"))
    assert set(cubin.resources) == {"sin_", "cos_", "tan_"}


def test_quick_tanh_is_as_exact_as_it_says():
    """Its steps in float32, with ex2 and rcp as far off as the PTX manual lets them be: 2 ulp and 1 ulp."""
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor([0.0, 1e-30, -1e-6, 60.0, 200.0, -200.0])])
    for off, back in itertools.product((-(2.0**-22), 0.0, 2.0**-22), (-(2.0**-23), 0.0, 2.0**-23)):
        e = (torch.exp2((x * 2.88539008178).double()) * (1 + off)).float()
        y = ((1 + e).double().reciprocal() * (1 + back)).float()
        got = (1 - 2 * y.double()).float()
        assert (got.double() - x.double().tanh()).abs().max() < 5e-7
    assert "-2.0f, y, 1.0f" in (pathlib.Path(__file__).parents[2] / "csrc" / "cuda_math.h").read_text()


def test_any_type():
    lines = []
    for kind in ("float", "double", "int32_t", "int64_t", "uint8_t", "uint32_t"):
        calls = [f"tile::{name}<{kind}>(*p, p[1])" for name in ("min", "max", "minimum", "maximum")]
        if kind not in ("float", "double"):
            calls += [f"tile::{name}<{kind}>(*p, p[1])" for name in ("floordiv", "floormod")]
        lines.append(f"{{ {kind}* p = ({kind}*)x; p[2] = {' + '.join([*calls, 'tile::abs(*p)'])}; }}")
    compile_everywhere(f'#include "cuda_math.h"\nextern "C" __global__ void all(char* x) {{{"".join(lines)}}}')
