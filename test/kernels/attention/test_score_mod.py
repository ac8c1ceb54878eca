# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from rounding import Rounding

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention.forward import attention, reference
from torch_tile.kernels.attention.operands import operand
from torch_tile.kernels.attention.score_mod import modified, split_gain
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.program import soft_cap

ALIBI = "v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2"
PADDING = "v0=where(x0,acc0,-inf);ret v0"
TEXTS = {  # a text, and the shapes and dtypes of its operands for a problem
    "cap": (soft_cap(1.5), lambda b, h, q, k: []),
    "slopes": (ALIBI, lambda b, h, q, k: [(h, 1, 1)]),
    "padding": (PADDING, lambda b, h, q, k: [((b, 1, 1, k), torch.bool)]),
    "bias before a cap": (f"w=add(acc0,x0);{soft_cap(2.0).replace('acc0', 'w')}", lambda b, h, q, k: [(h, q, k)]),
    "temperature and keys": ("v=mul(acc0,x0);w=add(v,x1);ret w", lambda b, h, q, k: [(b, h, q, 1), (k,)]),
    "all indices": (
        "v=mul(i0,0.5);w=mul(i1,0.25);y=add(v,w);z=mul(i3,y);s=mul(z,0.01);t=mul(i2,-0.1);u=max(t,s);r=add(acc0,u);"
        "ret r",
        lambda b, h, q, k: [],
    ),
    "negative": ("v=mul(acc0,-2.0);ret v", lambda b, h, q, k: []),
}


def by_hand(name, s, aux, q_offset):
    """What a text says, element by element."""
    full = [x.broadcast_to(s.shape) for x in aux]
    out = torch.empty_like(s)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, s.shape)).tolist():
        v, x, p = float(s[b, h, i, j]), [float(f[b, h, i, j]) for f in full], i + q_offset
        out[b, h, i, j] = {
            "cap": lambda: 1.5 * math.tanh(v / 1.5),  # noqa: B023
            "slopes": lambda: v + x[0] * (j - p),  # noqa: B023
            "padding": lambda: v if x[0] else -math.inf,  # noqa: B023
            "bias before a cap": lambda: 2.0 * math.tanh((v + x[0]) / 2.0),  # noqa: B023
            "temperature and keys": lambda: v * x[0] + x[1],  # noqa: B023
            "all indices": lambda: v + max(-0.1 * p, 0.01 * j * (0.5 * b + 0.25 * h)),  # noqa: B023
            "negative": lambda: -2 * v,  # noqa: B023
        }[name]()
    return out


def operands_of(problems, name, sizes, dtype):
    made = []
    for shape in TEXTS[name][1](*sizes):
        shape, kind = shape if isinstance(shape[-1], torch.dtype) else (shape, dtype)
        made.append(problems.tensor(*shape).gt(-1) if kind == torch.bool else problems.tensor(*shape, dtype=dtype))
    return made


@pytest.mark.parametrize("name", TEXTS)
def test_reference_is_the_definition(name, problems):
    sizes = 2, 3, 4, 5
    s = problems.tensor(*sizes, dtype=torch.float64)
    aux = operands_of(problems, name, sizes, torch.float64)
    torch.testing.assert_close(modified(TEXTS[name][0], s, aux, 3), by_hand(name, s, aux, 3))


CONFIGS = (
    None,
    Config(block_q=16, block_kv=32),
    Config(block_q=16, block_kv=32, split=True),
    Config(block_q=16, block_kv=32, packed=False, resident=True, shared_probs=True),
)


@pytest.mark.parametrize("name", TEXTS)
def test_random_problems(name, rounds, problems, check):
    for number in rounds(4):
        dtype = problems.pick(torch.float32, torch.float32, torch.bfloat16, torch.float64)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 2, 3)
        sizes = batch, kv_heads * groups, problems.size(20), problems.size(60)
        q = problems.reordered(*sizes[:3], 32, dtype=dtype, layout="slice")
        k, v = (problems.tensor(batch, kv_heads, sizes[3], 32, dtype=dtype, layout="dense") for _ in range(2))
        aux = operands_of(problems, name, sizes, problems.pick(torch.float32, dtype))
        mask = problems.tensor(sizes[2], sizes[3]).gt(-1) if number % 3 == 2 else None
        causal, window = problems.pick(True, False), problems.pick(0, 0, 9)
        options = (mask, causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, sizes[3] - sizes[2], 5))
        text, config = TEXTS[name][0], problems.pick(*CONFIGS)
        got = attention(q, k, v, *options, aux, text, config=config, splits=problems.pick(1, 3))
        exact = (*(x.double() for x in (q, k, v)), *options, aux, text)
        want, rounding = reference(*exact), Rounding(reference, *exact, dtype=compute_dtype(dtype))
        what = f"{name} {dtype} {sizes} {options[1:]} {config}"
        check(got[0].contiguous(), want[0].contiguous(), what, dtype, rounding=rounding[0])
        check(got[1], want[1], what, dtype, rounding=rounding[1])


def test_operands_lose_what_they_repeat():
    def spec(x):
        found, stored = operand(x, 2, False)
        return found.dims, tuple(stored.shape)

    assert spec(torch.zeros(4, 1, 1)) == ("h", (2, 2))
    assert spec(torch.zeros(3, 1, 5, 7)) == ("bqk", (3, 5, 7))
    assert spec(torch.zeros(7)) == ("k", (7,))
    assert spec(torch.zeros(1, 1)) == spec(torch.tensor(2.0)) == ("", (1,))
    assert spec(torch.zeros(1, 4, 5, 1).expand(3, 4, 5, 7)) == ("hq", (2, 2, 5))
    assert operand(torch.ones(7, dtype=torch.bool), 1, False)[1].dtype == torch.uint8


def test_operands_that_come_by_tiles():
    """Those of queries or keys, or both, whose rows begin at multiples of 16 bytes, on GPUs."""

    def tiled(x, on_gpu=True):
        return operand(x, 2, on_gpu)[0].tiled

    assert tiled(torch.zeros(3, 1, 5, 8)) and tiled(torch.zeros(5, 16, dtype=torch.bool))
    assert tiled(torch.zeros(5, 24)[:, :21]) and not tiled(torch.zeros(5, 8), on_gpu=False)
    for other in (torch.zeros(5, 7), torch.zeros(5, 8, dtype=torch.bool), torch.zeros(5, 16)[:, 1:9],
                  torch.zeros(8, 8).T, torch.zeros(8, 1, 1), torch.zeros(9)[1:], torch.zeros(3, 1, 1, 7)):  # fmt: skip
        assert not tiled(other)
    for shape, dims, tile in (
        ((8,), "k", (64,)), ((3, 1, 1, 8), "bk", (64,)), ((5, 1), "q", (32,)), ((5, 8), "qk", (32, 64)),
    ):  # fmt: skip
        spec = operand(torch.zeros(shape), 2, True)[0]
        assert spec.tiled and spec.dims == dims and spec.tile(32, 64) == tile
    assert operand(torch.ones(8, dtype=torch.bool), 2, True)[0].tile(32, 64) == (128,)
    assert tiled(torch.zeros(1, 8).expand(5, 8))


def test_the_end_of_a_cap_is_a_factor():
    program, gain = split_gain(soft_cap(50.0))
    assert gain == 50.0 and str(program) == "v0=div(acc0,50.0);v1=tanh(v0);ret v1"
    for text in ("v0=mul(acc0,-2.0);ret v0", ALIBI, "v0=mul(acc0,acc0);ret v0", "v0=mul(acc0,inf);ret v0"):
        assert str(split_gain(text)[0]) == canonical(text) and split_gain(text)[1] == 1.0


def test_an_unmodified_score_needs_no_text():
    s = torch.randn(1, 2, 3, 4)
    assert modified("", s, [], 0) is s
