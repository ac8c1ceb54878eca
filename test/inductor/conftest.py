# SPDX-License-Identifier: Apache-2.0
"""`light`: compile through the passes without code generation, and return what came out and what was reported."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report import Report, collect
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
    """Like `light`, and checks that the result is eager's, to float32 rounding."""

    def run(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Report]:
        with torch.no_grad():
            got, report = light(f, *args, **options)
            want = f(*args)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        return got, report

    return run


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
