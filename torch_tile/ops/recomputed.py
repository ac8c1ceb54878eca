# SPDX-License-Identifier: Apache-2.0
"""Gradients by autograd of a function in plain torch, for operators whose derivative is no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Any]
) -> list[Tensor | None]:
    """Gradients by those `tensors` that are `needed`, None for the others; differentiable where autograd wants that.

    `function` takes `tensors` and returns a tuple of results, whose gradients are `grads`, None for those of 0.
    """
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, as what one of them was computed from is no way for gradients here.
        given = [None if x is None else x.view_as(x) if twice else x.detach() for x in tensors]
        leaves = {
            n: x.requires_grad_() for n, x in enumerate(given) if x is not None and needed[n] and x.is_floating_point()
        }
        found = [(y, g) for y, g in zip(function(*given), grads, strict=True) if g is not None and y.requires_grad]
        if not found or not leaves:
            return [None] * len(given)
        results, upstream = zip(*found, strict=True)
        upstream = tuple(g.to(y.dtype) for y, g in found)
        made = torch.autograd.grad(results, list(leaves.values()), upstream, create_graph=twice, allow_unused=True)
    by_place = dict(zip(leaves, made, strict=True))
    return [by_place.get(n) for n in range(len(given))]
