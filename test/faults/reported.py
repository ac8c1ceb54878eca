# SPDX-License-Identifier: Apache-2.0
"""What programs after reported kinds of faults share: their form, and tensors whose sums are exact."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

Case = tuple[Any, list[Any], dict[int, torch.Tensor]]  # a kernel, arguments, what some of them hold afterwards


def whole(*shape: int, dtype: torch.dtype = torch.float32, most: int = 4) -> torch.Tensor:
    """Whole numbers, whose sums and products are exact."""
    least = 0 if dtype in (torch.uint8, torch.bool) else -most
    return torch.randint(least, most + 1, shape).to(dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor for results."""
    return torch.zeros(*shape, dtype=dtype)


def counts(n: int, below: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Natural numbers below a bound."""
    return torch.randint(0, below, (n,), dtype=torch.int64).to(dtype)


def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Numbers of Python as a tensor; those that a type does not hold wrap."""
    bits = torch.iinfo(dtype).bits
    wrapped = [((int(v) + 2**63) % 2**64) - 2**63 for v in np.asarray(values, dtype=object).ravel()]
    made = torch.tensor(wrapped, dtype=torch.int64).view(np.asarray(values, dtype=object).shape)
    if dtype == torch.uint64:
        return made.view(torch.uint64)
    if not dtype.is_signed:
        return (made & (2**bits - 1)).to(dtype)
    return made.to(dtype)


def any_ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of the whole range of a type, its ends among them."""
    info = torch.iinfo(dtype)
    found = ints(torch.randint(info.min, info.max, shape).tolist(), dtype)
    flat = found.view(-1)
    flat[0], flat[-1] = info.max, info.min
    return found


class Cases:
    """The programs of one file. It decorates the functions that make them, and the test that runs each."""

    def __init__(self) -> None:
        self.makers: list[Callable[[], Case]] = []
        self.threaded: list[Callable[[], Case]] = []
        self.errors: dict[str, float] = {}

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        """Add a case to the test."""
        self.makers.append(make)
        return make

    def of_threads(self, make: Callable[[], Case]) -> Callable[[], Case]:
        """Add a case for threads of GPUs, which tiles and CPUs do not have."""
        self.threaded.append(make)
        return self(make)

    def rounded(self, error: float) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
        """Add a case whose results have a relative error, which is at most `error`."""

        def add(make: Callable[[], Case]) -> Callable[[], Case]:
            self.errors[make.__name__] = error
            return self(make)

        return add

    def test(self) -> Callable[..., None]:
        """The test of all cases: in each way, results are those that are wanted, exactly unless a case is `rounded`."""

        @pytest.mark.parametrize("make", self.makers, ids=lambda make: make.__name__)
        def test_case(
            make: Callable[[], Case], seed: int, way: Callable[..., None], request: pytest.FixtureRequest
        ) -> None:
            if make in self.threaded and request.node.callspec.params["way"] in ("meaning", "cpu"):
                pytest.skip("is a program for threads")
            torch.manual_seed(seed)
            kernel, args, wanted = make()
            way(kernel, *args)
            rtol = self.errors.get(make.__name__, 0)
            for place, value in wanted.items():
                torch.testing.assert_close(
                    args[place], value, rtol=rtol, atol=0, equal_nan=True, msg=f"argument {place}"
                )

        return test_case
