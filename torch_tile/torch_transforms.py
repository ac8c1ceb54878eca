# SPDX-License-Identifier: Apache-2.0
"""What autograd and torch.func's transforms call for operators made here: the library's, and users' kernels.

Torch's own kernels of `register_autograd` raise inside of torch.func.grad and its like. They lose tangents of forward
mode without a word. These take the former and refuse the latter. Batches of torch.func.vmap are computed in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

Backward = Callable[..., Any]
SetupContext = Callable[..., None]


class _Received:
    """Stand in for a library and keep the autograd kernel that torch registers with it."""

    kernel: Callable[..., Any]

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:
        """Keep the kernel."""
        self.kernel = fn


def autograd_kernel(op: Any, make_gradient: Callable[[], tuple[SetupContext, Backward]]) -> Callable[..., Any]:
    """Return an operator's autograd kernel, as torch makes it of `make_gradient()`, made at the first call."""

    @functools.cache
    def ordinary() -> Callable[..., Any]:
        setup_context, backward = make_gradient()
        received: Any = _Received()
        torch.library.register_autograd(op._schema.name, backward, setup_context=setup_context, lib=received)
        kernel: Callable[..., Any] = received.kernel
        return kernel

    @functools.cache
    def transformed() -> Callable[..., Any]:
        return _transformed(op, *make_gradient())

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **named: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return transformed()(keys, *args, **named)
        return ordinary()(keys, *args, **named)

    return kernel


def refuse_tangents(name: str, args: Sequence[Any]) -> None:
    """Raise NotImplementedError for the first argument that has a tangent of forward mode."""
    if forward_ad._current_level < 0:  # looked at in each call, and rarely so
        return
    given = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,))]
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise NotImplementedError(
            f"{name}: an argument has a tangent, but the op has no forward-mode derivative; use the reverse mode, or "
            "torch's own operation"
        )


def _transformed(op: Any, setup_context: SetupContext, backward: Backward) -> Callable[..., Any]:
    """Return the autograd kernel inside torch.func's transforms, where each level records its own node."""
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch._library.utils import fill_defaults
    from torch.autograd.function import _SingleLevelFunction

    def forward(ctx: Any, keys: Any, form: pytree.TreeSpec, *tensors: Any) -> Any:
        args = pytree.tree_unflatten(list(tensors), form)
        # The levels below differentiate as well, though a node turns that off inside.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            result = op.redispatch(keys & torch._C._after_autograd_keyset, *args)
            setup_context(ctx=ctx, inputs=fill_defaults(op._schema, args, {})[0], output=result)
        ctx.form = form
        return result

    def gradients(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = wanted = pytree.tree_unflatten(list(needed[2:]), ctx.form)
        try:
            found = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needed
        found = found if isinstance(found, tuple) else (found,)
        flat: list[Any] = [None, None]
        for want, given in zip(wanted, found, strict=False):
            several = isinstance(want, list | tuple)
            flat += (given or [None] * len(want)) if several else [given]
        return tuple(flat)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    node: Any = type(f"{op._opname}_of_level", (_SingleLevelFunction,), methods)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, *args)
        tensors, form = pytree.tree_flatten(args)
        with enable_single_level_autograd_function():
            return node.apply(keys, form, *tensors)

    return kernel


def entry_by_entry(op: Any, changed: Sequence[int], batch: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
    """Call an operator for each entry of a batch of torch.func.vmap, on dense copies of what it does not change.

    `changed` are the positions of arguments that it writes; `dims` says along which dimension each argument is batched.
    An empty batch is called for one entry of zeros, whose results give shapes and gradients alone.
    """
    if any(dims[n] is None for n in changed):
        raise ValueError(
            f"{op._opname}: torch.func.vmap gives an argument that the kernel writes without a batch, so that entries "
            "would overwrite each other; give it a batch, or a kernel that returns its result"
        )

    def entry(number: int, arg: Any, dim: Any, writes: bool) -> Any:
        if isinstance(dim, list | tuple):
            return [entry(number, x, d, writes) for x, d in zip(arg, dim, strict=True)]
        if dim is None:
            return arg
        if not batch.batch_size:
            return torch.cat([arg.movedim(dim, 0), arg.new_zeros(1, *arg.movedim(dim, 0).shape[1:])])[0]
        part = arg.select(dim, number)
        return part if writes else part.contiguous()

    given = [(arg, dim, n in changed) for n, (arg, dim) in enumerate(zip(args, dims, strict=True))]
    calls = [op(*(entry(number, *each) for each in given)) for number in range(max(1, batch.batch_size))]
    if calls[0] is None:
        return None, None
    if isinstance(calls[0], tuple):
        joined = tuple(torch.stack(each)[: batch.batch_size] for each in zip(*calls, strict=True))
        return joined, (0,) * len(joined)
    return torch.stack(calls)[: batch.batch_size], 0
