# SPDX-License-Identifier: Apache-2.0
"""The kernel of all gradients, by the interpreter of threads: on CPUs there is no such kernel."""

from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.backward import attention_backward, reference
from torch_tile.kernels.attention.forward import reference as forward
from torch_tile.kernels.attention.fused_backward import LEAST_KEYS, TILINGS, fused_gradients, fused_tiling
from torch_tile.kernels.attention.spec import Spec
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import Machine

HOPPER = Machine(Target("cuda", 90), 132)
FORMS = {  # dtype, head size, causal, windowed
    "full": (torch.bfloat16, 128, False, False),
    "causal": (torch.float16, 64, True, False),
    "window": (torch.bfloat16, 64, True, True),
}


def spec_of(dtype=torch.bfloat16, width=128, **facts):
    return replace(Spec(dtype, width, width, True, False, False, None, False, True, 8, shifted=False), **facts)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, engine, problems, check):
    """Several blocks of queries and keys, of odd lengths, and keys that no query sees."""
    dtype, width, causal, windowed = FORMS[form]
    kv_heads, groups = problems.pick((1, 1), (1, 2), (2, 1))
    q_len, kv_len = problems.size(200), problems.size(150)
    q, grad = (problems.tensor(1, kv_heads * groups, q_len, width, dtype=dtype, layout="dense") for _ in range(2))
    k, v = (problems.tensor(1, kv_heads, kv_len, width, dtype=dtype, layout="dense") for _ in range(2))
    window = problems.random.randint(1, 150) if windowed else 0
    options = (None, causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, kv_len - q_len, -3, 5))
    out, lse = forward(*(x.float() for x in (q, k, v)), *options)
    tiling = replace(TILINGS[width], heavy_first=causal)
    got = attention_backward(grad, q, k, v, out.to(dtype), lse, *options, tilings=tiling)
    want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options)
    what = f"{form} {tuple(q.shape)} {tuple(k.shape)} {options[1:]}"
    for name, a, b, like in zip(("dq", "dk", "dv"), got[:3], want[:3], (q, k, v), strict=True):
        check(a, b, f"{name} of {what}", dtype, empty_beside(like, width), 1.0)


@pytest.mark.parametrize("width", TILINGS)
def test_the_assembler_has_nothing_to_say(width):
    """Products wait for nothing but what the kernel says (C75xx advice tells of others), and no register is spilled."""
    for facts in ({}, {"causal": True}, {"causal": True, "grouped": True, "windowed": True, "shifted": True}):
        spec = spec_of(torch.bfloat16, width, **facts)
        kernel = fused_gradients.on(HOPPER.target)(replace(TILINGS[width], side=8), spec)
        assert not kernel.cubin.warnings
        assert not any(r.spills for r in kernel.resources.values()), spec


def test_when_the_order_of_sums_is_free(monkeypatch):
    """Only plain scores of long sequences, on Hopper, where torch's own gradients may be in any order, too."""
    long = Problem(32, LEAST_KEYS, LEAST_KEYS)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert fused_tiling(spec_of(), long, HOPPER) == replace(TILINGS[128], side=8)
    assert fused_tiling(spec_of(width=64, causal=True), long, HOPPER).heavy_first
    for spec, problem, machine in (
        (spec_of(width=96), long, HOPPER), (spec_of(score="v0=mul(acc0,2.0);ret v0"), long, HOPPER),
        (spec_of(exact=False), long, HOPPER), (spec_of(vector=4), long, HOPPER), (spec_of(torch.float32), long, HOPPER),
        (spec_of(), replace(long, keys=LEAST_KEYS - 1), HOPPER), (spec_of(), long, Machine(Target("cuda", 80), 108)),
    ):  # fmt: skip
        assert fused_tiling(spec, problem, machine) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fused_tiling(spec_of(), long, HOPPER) is None
