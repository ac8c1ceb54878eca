# SPDX-License-Identifier: Apache-2.0
"""Help tests of kernels, by the names of TileLang's `testing` module.

`requires_...` skip tests by pytest where the machine lacks something. Each may be written with or without `()`.
"""

from __future__ import annotations

import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.hardware import detected

if TYPE_CHECKING:
    import torch

_COMPARE = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt, "eq": operator.eq}


@names_parameters
def torch_assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rtol: float = 1e-2,
    atol: float = 1e-2,
    max_mismatched_ratio: float = 0.001,
    verbose: bool = False,
    equal_nan: bool = True,
    check_device: bool = True,
    check_dtype: bool = True,
    check_layout: bool = True,
    check_stride: bool = False,
    base_name: str = "LHS",
    ref_name: str = "RHS",
) -> bool:
    """Return True if at most a share of the elements differs; raise AssertionError otherwise.

    NaN equals NaN if `equal_nan`. Devices and dtypes may differ. `verbose`, the checks and the names are TileLang's,
    without effect.
    """
    from torch_tile.profiler import compare

    compare(actual, expected, atol, rtol, max_mismatched_ratio, equal_nan)
    return True


@names_parameters
def set_random_seed(seed: int = 42) -> None:
    """Seed the generators of Python, NumPy and torch."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # of all devices


def main() -> None:
    """Run the tests of the calling file with pytest, and end the process with its result."""
    import pytest

    sys.exit(pytest.main([inspect.getsourcefile(sys._getframe(1)) or "."]))


_measured: dict[str, float] = {}


@names_parameters
def process_func(func: Callable[..., float], name: str | None = None, /, **kwargs: Any) -> None:
    """Call `func(**kwargs)`, which returns a time, and keep it under `name` (None: its module's) for `regression`.

    Raises ValueError if the time is not positive.
    """
    latency = float(func(**kwargs))
    if not latency > 0:
        raise ValueError(f"{func!r} returned {latency}, which is no time")
    _measured[(name or func.__module__).removeprefix("regression_")] = latency


def regression(prefixes: Sequence[str] = ("regression_",), verbose: bool = True) -> None:
    """Measure the calling file: call its functions whose names begin with one of `prefixes`, in order of their names.

    Print what `process_func` measured in them, one `name: time` a line. `verbose` prints each function's name, too.
    """
    found = sys._getframe(1).f_globals
    _measured.clear()
    for name in sorted(n for n, value in found.items() if n.startswith(tuple(prefixes)) and callable(value)):
        if verbose:
            print(name)
        found[name]()
    for name, latency in _measured.items():
        print(f"{name}: {latency}")


class Requirement:
    """A decorator that skips a test or a class of tests if `holds()` is False."""

    reason: str
    holds: Callable[[], bool]

    def __init__(self, reason: str, holds: Callable[[], bool]):
        self.reason, self.holds = reason, holds

    def __call__(self, function: Any = None) -> Any:
        """Mark `function` and return it; without a function, return the decorator itself."""
        if function is None:
            return self
        for mark in self.marks():
            function = mark(function)
        return function

    def marks(self) -> list[Any]:
        """Return pytest's marks, for pytest.param(..., marks=...)."""
        import pytest

        return [pytest.mark.skipif(not self.holds(), reason=self.reason)]


@names_parameters
def requires_package(*packages: str) -> Requirement:
    """Skip tests where one of the packages cannot be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return Requirement(f"needs {', '.join(missing)}", lambda: not missing)


@names_parameters
def requires_cuda_compute_version(major_version: int, minor_version: int = 0, mode: str = "ge") -> Requirement:
    """Skip tests unless the GPU's capability compares by `mode`: ge, gt, le, lt or eq, else ValueError."""
    if mode not in _COMPARE:
        raise ValueError(f"mode is one of {', '.join(_COMPARE)}, got {mode!r}")
    wanted = 10 * major_version + minor_version

    def holds() -> bool:
        return detected() != 0 and bool(_COMPARE[mode](detected(), wanted))

    return Requirement(f"needs a GPU of compute capability {mode} {major_version}.{minor_version}", holds)


def requires_cuda_compute_version_ge(major_version: int, minor_version: int = 0) -> Requirement:
    """Skip unless the GPU's compute capability is at least this."""
    return requires_cuda_compute_version(major_version, minor_version, "ge")


def requires_cuda_compute_version_gt(major_version: int, minor_version: int = 0) -> Requirement:
    """Skip unless the GPU's compute capability is greater."""
    return requires_cuda_compute_version(major_version, minor_version, "gt")


def requires_cuda_compute_version_le(major_version: int, minor_version: int = 0) -> Requirement:
    """Skip unless the GPU's compute capability is at most this."""
    return requires_cuda_compute_version(major_version, minor_version, "le")


def requires_cuda_compute_version_lt(major_version: int, minor_version: int = 0) -> Requirement:
    """Skip unless the GPU's compute capability is less."""
    return requires_cuda_compute_version(major_version, minor_version, "lt")


def requires_cuda_compute_version_eq(major_version: int, minor_version: int = 0) -> Requirement:
    """Skip unless the GPU's compute capability is this."""
    return requires_cuda_compute_version(major_version, minor_version, "eq")


requires_cuda: Requirement = Requirement("needs an NVIDIA GPU", lambda: detected() != 0)
requires_llvm: Requirement = Requirement("", lambda: True)  # the target "llvm" is the CPU
requires_rocm: Requirement = Requirement("ROCm is no target here", lambda: False)
requires_cdna: Requirement = Requirement("CDNA GPUs are no target here", lambda: False)
requires_cuda_or_cdna: Requirement = Requirement("needs an NVIDIA GPU", lambda: detected() != 0)
requires_gfx950: Requirement = Requirement("gfx950 is no target here", lambda: False)
requires_metal: Requirement = Requirement("Metal is no target here", lambda: False)
requires_ascend: Requirement = Requirement("Ascend is no target here", lambda: False)
