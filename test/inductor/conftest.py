# SPDX-License-Identifier: Apache-2.0
"""`light`: compile through the passes without code generation, and return what came out and what was reported."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import Report, collect
from torch_tile.inductor.settings import FAMILIES

Run = Callable[..., tuple[Any, Report]]


@pytest.fixture
def backend() -> Callable[..., Any]:
    """The dry run with all families, every match replaced."""
    return functools.partial(dry_run, options={"select": "tile"})


@pytest.fixture
def light() -> Run:
    """`light(f, *args)` -> (what the compiled f returns, the report)."""

    def run(
        f: Callable[..., Any], *args: Any, dynamic: bool | None = None, families: tuple[str, ...] = FAMILIES, **kw: Any
    ) -> tuple[Any, Report]:
        torch._dynamo.reset()
        backend = functools.partial(dry_run, options={"select": "tile", "families": families})
        compiled = torch.compile(f, backend=backend, dynamic=dynamic)
        with collect() as report:
            return compiled(*args, **kw), report

    return run


@pytest.fixture
def agrees(light: Run) -> Run:
    """Like `light`, and checks that the result is eager's, to float32 rounding of sums as large as the results are."""

    def run(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Report]:
        with torch.no_grad():
            got, report = light(f, *args, **options)
            want = f(*args)
        # a small result is what is left of large terms, each rounded: in a product of 128 terms, or where such a
        # product is a factor of another
        sizes = [float(x.double().square().mean().sqrt()) for x in tree_leaves(want) if isinstance(x, torch.Tensor)]
        largest = max((size for size in sizes if math.isfinite(size)), default=1.0)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * max(1.0, largest))
        return got, report

    return run


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
