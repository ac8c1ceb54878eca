# SPDX-License-Identifier: Apache-2.0
"""What is timed, and whether it is right.

Our result counts only if every element of it is finite, although the memory that torch handed out for it was full of
NaN, and a sample of it agrees with float64; otherwise it is WRONG and has no time. So are rivals, but with more leeway
and without the NaN.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.timer import Call, Timing

Prepare = Callable[[], Call]  # makes a rival ready: imports, compiles, lays operands out as it wants them


def inductor(function: Callable[..., object], *operands: object, **options: Any) -> Call:
    """Compile a function by Inductor for these operands. `options` are torch.compile's."""
    torch.compiler.reset()
    return partial(torch.compile(function, dynamic=False, **options), *operands)


def rival(name: str, module: str = "rivals.triton_kernels") -> Any:
    """Import a function of a rival; `rivals` first, which may make other modules importable.

    The runner leaves out a rival that raises ModuleNotFoundError here.
    """
    importlib.import_module("rivals.triton_kernels")
    return getattr(importlib.import_module(module), name)


def first_of(result: object) -> torch.Tensor:
    """The tensor that a call gives, or the first that it gives."""
    tensor = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(tensor, torch.Tensor)
    return tensor


@dataclass(frozen=True)
class Case:
    """A problem's tensors, bound into calls. `sample` picks from a result what `expected` gives in float64.

    `yardsticks` are timed too, but do something else. `read` is what is looked at of all that a call gives. `leeway`
    is how many roundings to the dtype follow each other, as in chains of products.
    """

    ours: Call
    rivals: Mapping[str, Prepare]
    sample: Callable[[torch.Tensor], torch.Tensor]
    expected: Callable[[], torch.Tensor]
    yardsticks: Mapping[str, Call] = field(default_factory=dict)
    read: Callable[[Any], torch.Tensor] = first_of
    leeway: float = 1.0


@dataclass(frozen=True)
class Problem:
    """A shape, the least work that it takes, and how many times faster than whom it should be.

    `asked` maps rivals to ratios, the one that decides first; the key "ceiling" asks for a share of the ceiling.
    `flops` and `bytes` are what one call must compute and move at least. `memory` is the most bytes of the GPU that a
    call should hold above its inputs, its results included; without it nobody's peak is measured.
    """

    name: str
    group: str
    dtype: torch.dtype
    flops: float
    bytes: float
    make: Callable[[], Case]
    asked: Mapping[str, float] = field(default_factory=dict)
    traffic: str = "read"  # or "copy": whether it writes as much as it reads
    quick: bool = False
    memory: float | None = None


@dataclass
class Result:
    """A line of the table: seconds, rates per second, shares of 1. `times` has ours under "tile"."""

    family: str
    name: str
    group: str
    dtype: str
    flops: float
    bytes: float
    status: str = "ok"  # WRONG, FAILED
    message: str = ""
    error: float | None = None
    times: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    best: float = 0.0  # seconds that the ceilings allow
    bound: str = "flops"  # or "bytes": which ceiling
    memory: float | None = None  # asked: bytes of the peak above inputs
    peaks: dict[str, int] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The result as it is written to a file."""
        return asdict(self)

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Result:
        return cls(**{**line, "times": {name: Timing(**t) for name, t in line["times"].items()}})

    @property
    def share(self) -> float:
        """Of the ceiling."""
        return self.best / self.times["tile"].median

    def rate(self, name: str = "tile") -> tuple[float, str]:
        """Of ours or of a rival, in the unit of what bounds the problem."""
        work, unit = (self.flops, "FLOP/s") if self.bound == "flops" else (self.bytes, "B/s")
        rate = work / self.times[name].median
        return (rate / 1e12, f"T{unit}") if rate >= 1e11 else (rate / 1e9, f"G{unit}")

    def ratio(self, rival: str) -> float:
        """How many times faster than a rival we are."""
        return self.times[rival].median / self.times["tile"].median

    def goal(self) -> tuple[str, float, float] | None:
        """Against whom, the ratio asked and the one reached: for the first of `asked` that was timed."""
        for rival, asked in self.asked.items():
            if rival == "ceiling":
                return rival, asked, self.share
            if rival in self.times:
                return rival, asked, self.ratio(rival)
        return None


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN meanwhile."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def tolerance_of(dtype: torch.dtype) -> float:
    """What the sums' order and the rounding of weights and results to `dtype` may cost; see `error_of`."""
    return max(4 * torch.finfo(dtype).eps, 1e-4 if dtype == torch.float32 else 1e-9)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of an element, in units of its size plus the root mean square of its row."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        raise ValueError(f"the sample of the result is {list(got.shape)}, expected {list(want.shape)}")
    size = want.abs() + want.square().mean(-1, keepdim=True).sqrt()
    # Where the row is all zero only zero will do.
    return float(((got - want).abs() / size.clamp(min=torch.finfo(torch.float64).tiny)).max())


def wrong(case: Case, call: Call, want: torch.Tensor, tolerance: float) -> tuple[float, str]:
    """The error of a call's result, and what is wrong with it, or nothing."""
    result = case.read(call())
    missing = int((~result.isfinite()).sum())
    error = error_of(case.sample(result), want)
    if missing:
        return error, f"{missing} of {result.numel()} elements are not finite"
    if not error <= tolerance:
        return error, f"error {error:.1e} where {tolerance:.1e} is allowed"
    return error, ""


def sample_of(n: int, count: int, device: str) -> torch.Tensor:
    """Indices into `n` rows: one somewhere in each of `count` bands, so that no large tile is passed by."""
    count = min(n, count)
    edges = torch.arange(count + 1, dtype=torch.float64) * (n / count)
    low, high = edges[:-1].floor(), edges[1:].floor().clamp(max=n)
    return (low + (torch.rand(count, dtype=torch.float64) * (high - low)).floor()).long().to(device)


def sample_of_groups(chosen: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into rows that are sorted by their group, `chosen`: the first and the last row of each group, and some
    between. Also the ends of the groups among these rows, int32 `[groups]`.
    """
    cuts = (chosen[1:] != chosen[:-1]).nonzero()[:, 0]
    ends = torch.tensor([0, len(chosen) - 1], device=chosen.device)
    rows = torch.cat([sample_of(len(chosen), 32, str(chosen.device)), ends, cuts, cuts + 1]).unique()
    return rows, torch.bincount(chosen[rows], minlength=groups).cumsum(0).int()
