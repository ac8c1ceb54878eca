# SPDX-License-Identifier: Apache-2.0
"""What programs after reported kinds of faults share: their form, and tensors whose sums are exact."""

from collections.abc import Callable
from typing import Any

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
