# SPDX-License-Identifier: Apache-2.0
"""Make gradients of operators: by another operator, by autograd of plain torch, or an error that says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.ops.registry import op_gradients
from torch_tile.ops.saved_args import needs_of, restored_args, save_args, tensor_fields


def gradients_of(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Any]
) -> list[Tensor | None]:
    """Compute the gradients of the `needed` ones of `tensors`, None for the others.

    They are differentiable where autograd asks for that.

    `function` takes `tensors` and returns a tuple of results, whose gradients are `grads`, None for those of 0.
    """
    if torch._C._are_functorch_transforms_active():
        return _by_pullback(function, tensors, needed, grads)
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


def _by_pullback(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Any]
) -> list[Tensor | None]:
    """Compute what `gradients_of` does, inside torch.func's transforms, which let no tensor require a gradient."""
    given = {n: x for n, x in enumerate(tensors) if x is not None and needed[n] and x.is_floating_point()}

    def computed(*chosen: Tensor) -> tuple[Tensor, ...]:
        filled = {**dict(enumerate(tensors)), **dict(zip(given, chosen, strict=True))}
        return tuple(y for y, g in zip(function(*filled.values()), grads, strict=True) if g is not None)

    if not given or all(g is None for g in grads):
        return [None] * len(tensors)
    found: Any = torch.func.vjp(computed, *given.values())
    upstream = (g for g in grads if g is not None)
    made = found[1](tuple(g.to(y.dtype) for y, g in zip(found[0], upstream, strict=True)))
    by_place = dict(zip(given, made, strict=True))
    return [by_place.get(n) for n in range(len(tensors))]


def by_operator(op: str, names: Sequence[str], like: str) -> dict[str, Callable[..., Any]]:
    """Make the `setup_context` and `backward` of an operator whose gradients the operator `op`_backward computes.

    That takes the gradients of the results, then the arguments. names: the arguments with gradients, in the order of
    its results. like: an argument with the shape and dtype of the first result, whose gradient may not be None.
    """

    def backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        args, _ = restored_args(ctx)
        if grad is None and all(x is None for x in others):
            return op_gradients(type(args))
        x = getattr(args, like)
        grad = torch.zeros_like(x) if grad is None else grad.to(x.dtype)
        made = getattr(torch.ops.tile, f"{op}_backward")(grad, *others, *args)
        found = {name: t for name, t in zip(names, made, strict=True) if getattr(args, name) is not None}
        return op_gradients(type(args), **found)

    return {"setup_context": save_without_zeros, "backward": backward}


def save_without_zeros(ctx: Any, args: Any, output: Any) -> None:
    """Save the arguments of a call for its gradient, where gradients of unused results are None and not zeros."""
    ctx.set_materialize_grads(False)
    save_args(ctx, args)


def by_autograd(module: str, function: str, *constants: int) -> dict[str, Callable[..., Any]]:
    """Make the `setup_context` and `backward` of an operator whose derivative autograd takes of plain torch.

    `function` of a module of kernels computes the operator. `constants` are the numbers of results without a gradient.
    """

    def setup_context(ctx: Any, args: Any, output: Any) -> None:
        _mark_non_differentiable(ctx, output, constants)
        ctx.set_materialize_grads(False)
        save_args(ctx, args)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kind: Any = type(ctx.args)
        needs, names = needs_of(ctx, kind), list(tensor_fields(kind))

        def computed(*tensors: Tensor | None) -> Any:
            found = getattr(kernels(module), function)(*restored_args(ctx, tensors)[0])
            return found if isinstance(found, tuple) else (found,)

        needed = [bool(getattr(needs, name)) for name in names]
        made = gradients_of(computed, ctx.saved_tensors, needed, grads)
        return op_gradients(kind, **dict(zip(names, made, strict=True)))

    return {"setup_context": setup_context, "backward": backward}


def no_gradient(op: str, advice: str, *constants: int) -> dict[str, Callable[..., Any]]:
    """Make the `setup_context` and `backward` of an operator without a gradient: an error with `advice`.

    `constants` are the numbers of results that take part in no gradient at all, so that none is refused.
    """

    def setup_context(ctx: Any, args: Any, output: Any) -> None:
        _mark_non_differentiable(ctx, output, constants)

    def backward(ctx: Any, *grads: Any) -> Never:
        raise NotImplementedError(f"tile.{op} has no gradient. {advice}")

    return {"setup_context": setup_context, "backward": backward}


def _mark_non_differentiable(ctx: Any, output: Any, constants: Sequence[int]) -> None:
    """Tell autograd that results with the numbers `constants` have no gradient."""
    results = output if isinstance(output, tuple) else (output,)
    ctx.mark_non_differentiable(*(results[n] for n in constants))
