# SPDX-License-Identifier: Apache-2.0
"""Refuse transforms of torch.func where an operator's gradient cannot serve them."""

from __future__ import annotations

from collections.abc import Iterable


def refuse_transforms(what: str, args: Iterable[object]) -> None:
    """Raise NotImplementedError where a transform of torch.func would need `what`'s gradient.

    Transforms take gradients of torch's own operations only.
    """
    import torch

    if torch._C._are_functorch_transforms_active() and torch.is_grad_enabled():
        given = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            raise NotImplementedError(
                f"{what} has no gradient inside torch.func's transforms (grad, vjp, jacrev, ...); call .backward() or "
                "torch.autograd.grad instead, or use torch's own operation there"
            )
