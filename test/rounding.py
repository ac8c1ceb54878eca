# SPDX-License-Identifier: Apache-2.0
"""Bound the errors of random problems by their condition: how far rounding moves the exact result.

A fixed tolerance fails on some random problem: sums may cancel, and an exponential grows the error of its operand.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DRAWS = 4
FACTOR = 8  # kernels round more often than the reference, and the worst element is rare in a few draws


class _Perturb(TorchDispatchMode):
    """Change each new floating-point tensor by half an ulp of a dtype, up or down."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = not any(returned.alias_info for returned in func._schema.returns)
        return tree_map_only(torch.Tensor, self.perturbed, result) if fresh else result

    def perturbed(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or x.itemsize == 1:  # numbers of one byte are what they are
            return x
        return x * (1 + self.eps / 2 * (torch.rand_like(x).round() * 2 - 1))


class Rounding:
    """The largest errors to allow in the results of a function of float64 tensors that is computed in `dtype`.

    `rounding[n]` returns those of result n, by element, when it is called: most tests never need it.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float32, **named: Any):
        self.function, self.given, self.mode = function, (args, named), _Perturb(torch.finfo(dtype).eps)

    def __getitem__(self, result: int) -> Callable[[], torch.Tensor]:
        return lambda: FACTOR * self.moves[result]

    @cached_property
    def moves(self) -> list[torch.Tensor]:
        """How far each element of each result moves at most, in a few draws."""
        exact = tree_leaves(self.function(*self.given[0], **self.given[1]))
        moves = [torch.zeros_like(x) for x in exact]
        for _ in range(DRAWS):
            args, named = tree_map_only(torch.Tensor, self.mode.perturbed, self.given)
            with self.mode:
                found = tree_leaves(self.function(*args, **named))
            moves = [m.maximum((a - b).abs().nan_to_num(0, 0, 0)) for m, a, b in zip(moves, found, exact, strict=True)]
        return moves
