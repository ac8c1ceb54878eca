# SPDX-License-Identifier: Apache-2.0
"""Random problems for the kernels, and the engines that run them: compiled for the CPU, the interpreter of tiles, and
the interpreter of GPU threads, which also looks for races and missing waits, and the printed CUDA text on the host."""

import functools
import math
import random

import pytest
import torch
from emulate import emulate
from rounding import Rounding
from shared_kernels import modules_of_kernels

from torch_tile.hardware import Target
from torch_tile.jit import JITFunction
from torch_tile.kernels.common import Machine
from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.program import ARITY
from torch_tile.simulator.tile.interpreter import evaluate

# Largest error, as a share of the result's root mean square (or of `least`, if that is less).
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class Problems:
    """Makes sizes and tensors from a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options):
        return self.random.choice(options)

    def size(self, most):
        """One, a round number, or any number up to `most`."""
        return min(most, self.pick(1, 16, 32, self.random.randint(1, most), self.random.randint(1, most)))

    def reordered(self, *shape, dtype=torch.float32, layout=None):
        """As `tensor`, with the dimensions but the last in any order in memory."""
        order = self.random.sample(range(len(shape) - 1), len(shape) - 1)
        stored = self.tensor(*(shape[d] for d in order), shape[-1], dtype=dtype, layout=layout)
        return stored.permute(*(order.index(d) for d in range(len(order))), len(order))

    def tensor(self, *shape, dtype=torch.float32, layout=None):
        """Normal values; dense, a slice of something larger, turned in its last dimensions, or with gaps everywhere."""
        layout = layout or self.pick("dense", "dense", "slice", "turned", "gaps")
        if layout == "turned" and len(shape) < 2:
            layout = "dense"
        stored = {
            "dense": shape,
            "slice": tuple(n + 3 for n in shape),
            "turned": (*shape[:-2], *shape[:-3:-1]),
            "gaps": tuple(2 * n for n in shape),
        }[layout]
        x = torch.randn(stored, generator=self.generator, dtype=torch.float64).to(dtype)
        if layout == "turned":
            return x.mT
        if layout == "gaps":
            return x[tuple(slice(0, 2 * n, 2) for n in shape)]
        return x[tuple(slice(0, n) for n in shape)]

    def ends(self, groups, rows):
        """Where groups of any sizes end, empty ones and rows behind the last one among them."""
        places = sorted(self.random.randint(0, rows) for _ in range(groups))
        if groups and self.pick(True, False):
            places[-1] = rows
        return torch.tensor(places, dtype=torch.int32)

    def mask(self, dtype, batch, heads, q_len, kv_len):
        """Of attention, in any broadcast form; rows that see nothing included."""
        shape = self.pick(
            (kv_len,),
            (q_len, kv_len),
            (batch, 1, q_len, kv_len),
            (heads, 1, kv_len),
            (batch, heads, q_len, 1),
            (1, 1, 1, 1),
        )
        keep = torch.rand(shape, generator=self.generator) > self.pick(0.1, 0.5, 0.95)
        return (
            keep
            if dtype == torch.bool
            else self.tensor(*shape, dtype=dtype, layout="dense").masked_fill(~keep, -math.inf)
        )


@pytest.fixture
def problems(seed):
    return Problems(seed)


_simulated = {}  # kernels of the session for GPUs, which may lack machine code, by functions and their arguments
GPU = Machine(Target("cuda", 90), 4)  # few multiprocessors, so that small problems are shared out too


@pytest.fixture(params=["cpu", "interpreter", "threads", "text"])
def engine(request, monkeypatch, assembler):
    """Kernels run compiled, or as the interpreters understand them."""
    if request.param == "interpreter":
        traced = {}

        def interpret(self, *args, **kwargs):
            key = (self.__name__, args, tuple(kwargs.items()))
            if key not in traced:
                traced[key] = self.function(*args, **kwargs)
            return functools.partial(evaluate, traced[key])

        monkeypatch.setattr(JITFunction, "compile", interpret)
    if request.param in ("threads", "text"):
        for module in modules_of_kernels():
            monkeypatch.setattr(module, "machine_of", lambda x: GPU)

        def interpret_threads(self, *args, **kwargs):
            key = (self, args, tuple(kwargs.items()))
            if key not in _simulated:
                with assembler():
                    _simulated[key] = self.build(self.make(*args, **kwargs).program, self.target)
            kernel = _simulated[key]
            if request.param == "text":
                if any(entry.cluster != (1, 1, 1) for entry in kernel.launcher.source.entries):
                    pytest.skip("clusters of blocks are not emulated")
                return functools.partial(emulate, kernel)

            def run(*operands):
                findings = kernel.interpret(*operands)
                assert not findings, str(findings)

            return run

        monkeypatch.setattr(JITFunction, "compile", interpret_threads)
    return request.param


@pytest.fixture
def rounds(engine):
    """`rounds(n)`: numbers of problems to draw, fewer for threads and texts, which take seconds each."""
    return lambda n: range({"threads": 2, "text": 1}.get(engine, n))


@pytest.fixture(autouse=True)
def poisoned():
    """Fresh tensors hold NaN, so an element that no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def check():
    """`check(got, want, what)`: shape, and no error beyond the tolerance of got's dtype; infinities must agree.

    A partial call that computes `want` from float64 bounds errors by its condition: a result may cancel, and few others
    stand beside it.

    The result is contiguous, or laid out as `like` is. With `own`, an element's own size counts beside the others': a
    few are much larger than these. `rounding` is asked where the tolerance is missed: the errors may be as large as
    rounding makes them in a problem of this condition.
    """

    def compare(got, want, what, dtype=None, like=None, least=0.1, own=False, rounding=None):
        if isinstance(want, functools.partial):
            of = Rounding(want.func, *want.args, dtype=dtype or got.dtype, **want.keywords)
            want, rounding = want(), of[0]
        assert got.shape == want.shape, what
        assert got.is_contiguous() if like is None else got.stride() == like.stride(), what
        got, tolerance = got.double(), TOLERANCE[dtype or got.dtype]
        assert torch.equal(got.isfinite(), want.isfinite()), what
        kept = want.isfinite()
        torch.testing.assert_close(got[~kept], want[~kept], rtol=0, atol=0, equal_nan=True, msg=what)
        if kept.any():
            scale = want[kept].square().mean().sqrt().clamp(min=least)
            size = scale + own * want[kept].abs()
            error = float(((got - want)[kept].abs() / size).max())
            if error > tolerance and rounding is not None:
                tolerance = max(tolerance, float((rounding()[kept] / size).max()))
            assert error <= tolerance, f"{what}: error {error:.2e} > {tolerance:.0e}"

    return compare


@pytest.fixture
def one_function():
    """`one_function(name, seed)`: an epilogue that calls a function, and three operands in float64 that suit it."""

    def make(name, seed):
        g = torch.Generator().manual_seed(seed)
        values = [torch.randn((5, 7), generator=g, dtype=torch.float64) for _ in range(3)]
        if FUNCTIONS[name].singular:
            values = [v.abs() + 0.1 for v in values]
        if name in ("eq", "ne", "where"):
            values[:2] = [(v > 0).double() for v in values[:2]]
        return f"v={name}({','.join(['acc0', 'x0', 'x1'][: ARITY[name]])});ret v", values

    return make
