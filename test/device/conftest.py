# SPDX-License-Identifier: Apache-2.0
"""Random problems on the GPU, in every layout of memory, amid NaN; fresh tensors are poisoned.

Everything here but test_measure.py is skipped where there is no GPU. TORCH_TILE_DEVICE_PROBLEMS says how many problems
each test draws; the summary says how many different ones it checked. Tests that compile a kernel for nearly every
problem are cut into parts, which pytest-xdist's workers share.
"""

import functools
import os
import random
import re
from collections import defaultdict

import pytest
import torch

from torch_tile.jit import JITFunction
from torch_tile.runtime import replay

# What one rounding may change a number by. A result is held to what as large a change of each input makes of it: no
# algorithm in this dtype can do better, and those that round a value in between (probabilities before the second
# product of attention, a row before its activation) do about as well. Wide dtypes give up 4 bits for sums of thousands
# of terms, one after the other.
PRECISION = {torch.float64: 2**-48, torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8}
DRAWS = 6  # of the changes' signs: with 3, torch's own float32 gradients over one key missed in 3 of 150 problems
MARGIN = 3  # times that change
SPACINGS = 2  # and so many units in the last place of the element itself
# What inputs of size 1 leave of an element by cancellation in the tails of gelu and the like: in float32, in float64.
FLOOR = (2**-21, 2**-49)
OPERANDS = (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float64)


COUNT = int(os.environ.get("TORCH_TILE_DEVICE_PROBLEMS", "120"))


class Problems:
    """Draws sizes and tensors from a seed: `count` problems."""

    def __init__(self, seed, device, count):
        self.random, self.device, self.count = random.Random(seed), device, count
        self.generator = torch.Generator(device).manual_seed(seed)
        self.checked = set()

    def pick(self, *options):
        return self.random.choice(options)

    def dtype(self):
        return self.pick(*OPERANDS)

    def size(self, most):
        """One, a round number, a multiple of 8, or any number up to `most`."""
        any_size = self.random.randint(1, most)
        return min(most, self.pick(1, 16, 64, 128, 8 * self.random.randint(1, max(1, most // 8)), any_size, any_size))

    def tensor(self, *shape, dtype=torch.float32, layout=None):
        """Normal values; dense, a slice of something that holds NaN, turned in its last dimensions, or with gaps."""
        layout = layout or self.pick("dense", "dense", "aligned slice", "slice", "turned", "gaps")
        layout = "dense" if layout == "turned" and len(shape) < 2 else layout
        stored, index = {
            "dense": (shape, tuple(slice(0, n) for n in shape)),
            "aligned slice": (tuple(n + 8 for n in shape), tuple(slice(0, n) for n in shape)),
            "slice": (tuple(n + 3 for n in shape), tuple(slice(1, n + 1) for n in shape)),
            "turned": ((*shape[:-2], *shape[:-3:-1]), tuple(slice(0, n) for n in (*shape[:-2], *shape[:-3:-1]))),
            "gaps": (tuple(2 * n for n in shape), tuple(slice(0, 2 * n, 2) for n in shape)),
        }[layout]
        whole = torch.full(stored, float("nan"), dtype=dtype, device=self.device)
        x = whole[index]
        x.copy_(torch.randn(x.shape, generator=self.generator, dtype=torch.float32, device=self.device))
        return x.mT if layout == "turned" else x

    def ends(self, groups, rows):
        """Where groups of rows end, empty ones and rows behind the last one among them."""
        places = sorted(self.random.randint(0, rows) for _ in range(groups))
        return torch.tensor([*places[:-1], self.pick(places[-1], rows)], dtype=torch.int32, device=self.device)

    def words(self, rows, columns, dtype, turned=False):
        """Bytes of any value, or float8 numbers of size 1; `turned` ones run along columns."""
        shape = (columns, rows) if turned else (rows, columns)
        if dtype.is_floating_point:
            x = self.tensor(*shape, layout="dense").to(dtype)
        else:
            x = torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8, device=self.device).view(
                dtype
            )
        return x.mT if turned else x


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def parts():
    """Into how many a test is cut; a module that is cut parametrizes this, once for each part."""
    return 1


@pytest.fixture
def problems(seed, device, request, parts):
    made = Problems(seed, device, -(-COUNT // parts))
    yield made
    request.node.user_properties.append(("problems", sorted(made.checked)))


@pytest.fixture
def kernels_ran(monkeypatch, request):
    """Our kernels ran, not a reference in plain torch; the list of their names."""
    ran, compile = [], JITFunction.compile

    def noted(self, *args, **kwargs):
        ran.append(self.__name__)
        return compile(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "compile", noted)
    yield ran
    assert ran
    request.node.user_properties.append(("kernels", ran))


def pytest_terminal_summary(terminalreporter):
    """How many different problems each test checked, and how many kernels ran for them."""
    found = defaultdict(list)
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if getattr(report, "when", None) == "teardown":
            test = re.sub(r"-?part\d+", "", report.nodeid.split("/")[-1]).removesuffix("[]")
            for name, values in report.user_properties:
                found[name, test] += values
    checked = {test: len(set(texts)) for (name, test), texts in sorted(found.items()) if name == "problems" and texts}
    for test, count in checked.items():
        terminalreporter.write_line(f"{test}: {count} different problems, {len(found['kernels', test])} kernels")
    if checked:
        terminalreporter.write_line(f"{sum(checked.values())} different problems in all")


@pytest.fixture
def poisoned():
    """Fresh tensors hold NaN, so an element that no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def spacing(x, dtype):
    """The distance between neighbouring numbers of `dtype` around each element of a float64 tensor."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(info.smallest_normal, info.max)).exponent
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)


def sensitivity(function, inputs, want, precision, generator):
    """By how much changing each input by the share `precision` changes the results: the largest of a row.

    Rows of few elements share one bound, as a single element may be lucky.
    """
    worst = [torch.zeros_like(w) for w in want]
    for _ in range(DRAWS):
        signs = (torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) < 0.5 for x in inputs)
        moved = function(*(x * (1 + precision * (2 * s.to(x.dtype) - 1)) for x, s in zip(inputs, signs, strict=True)))
        changes = ((m - w).abs().nan_to_num(0.0, 0.0, 0.0) for m, w in zip(as_tuple(moved), want, strict=True))
        worst = [torch.maximum(a, b) for a, b in zip(worst, changes, strict=True)]
    return [w.amax(-1, keepdim=True) if w.dim() and w.shape[-1] >= 16 else w.amax() if w.numel() else w for w in worst]


def as_tuple(found):
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def misses(got, function, inputs, dtype, generator):
    """For each result of `function(*inputs)` what is wrong with it, or None.

    `got` are the results of a kernel on the tensors `inputs`, whose values of type `dtype` it rounds to; `function`
    computes them in the dtype of its arguments, which is float64 here. See PRECISION for the bound on errors.
    """
    inputs = [x.double() for x in inputs]
    want = [w.double() for w in as_tuple(function(*inputs))]
    found = []
    for g, w, change in zip(
        as_tuple(got), want, sensitivity(function, inputs, want, PRECISION[dtype], generator), strict=True
    ):
        if g.shape != w.shape:
            found.append(f"shape {tuple(g.shape)}, not {tuple(w.shape)}")
            continue
        rounded = w.to(g.dtype)
        special = ~rounded.isfinite() | ~g.isfinite()
        if not torch.equal(g[special].nan_to_num(7.0, 8.0, 9.0), rounded[special].nan_to_num(7.0, 8.0, 9.0)):
            found.append("infinities or NaN differ")
            continue
        allowed = MARGIN * change + SPACINGS * spacing(w, g.dtype) + FLOOR[torch.float64 == g.dtype]
        excess = ((g.double() - w).abs() / allowed).masked_fill(special, 0.0)
        most = float(excess.max()) if excess.numel() else 0.0
        found.append(
            None if most <= 1 else f"{most:.2f} times the error allowed, in {int((excess > 1).sum())} elements"
        )
    return found


@pytest.fixture
def wrong(problems):
    """`wrong(got, function, inputs, dtype)`: see `misses`."""
    return functools.partial(misses, generator=problems.generator)


@pytest.fixture
def check(problems, wrong):
    """`check(got, function, inputs, what, dtype)`: asserts that nothing is `wrong`; counts the problem."""

    def compare(got, function, inputs, what, dtype):
        problems.checked.add(what)
        found = [f"result {n}: {text}" for n, text in enumerate(wrong(got, function, inputs, dtype)) if text]
        assert not found, f"{what}: {'; '.join(found)}"

    return compare


@pytest.fixture
def long_ways(monkeypatch):
    """How often a site went the long way."""
    calls = []
    original = replay.LongWay.__call__
    monkeypatch.setattr(replay.LongWay, "__call__", lambda self, *args: calls.append(1) or original(self, *args))
    return calls
