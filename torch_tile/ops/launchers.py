# SPDX-License-Identifier: Apache-2.0
"""Launch kernels under the names and arguments of `torch.ops.tile`, into given results: what Inductor's code calls.

The caller has checked shapes and dtypes (eager.py; Inductor at compile time), and autograd and autocast are done. So
these functions only choose and launch kernels. A `site` even remembers the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tile.ops.registry import OPERATORS
from torch_tile.runtime.replay import replayed


def site(kinds: str, call: Callable[..., object]) -> Callable[..., object]:
    """Make the callable of one call in generated code; `kinds` as for `replayed`."""
    return replayed(kinds, call)


def view(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """View the elements of `x` with another size and stride, from the element at `offset` on."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


def __getattr__(name: str) -> Callable[..., None]:
    """Make the launcher of an operator: a function of its arguments and of `out`, a tensor or a tuple."""
    operator = OPERATORS.get(name)
    if operator is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def launch(*args: Any, out: torch.Tensor | tuple[torch.Tensor, ...], **options: Any) -> None:
        operator.run(operator.args(*args, **options), out)

    launch.__name__ = launch.__qualname__ = name
    globals()[name] = launch
    return launch
