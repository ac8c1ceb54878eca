# SPDX-License-Identifier: Apache-2.0
"""Time attention and losses with their gradients, ours against torch's: `select="fastest"` in training.

The contest runs where the call is captured, before autograd. Afterwards forward and backward are in different graphs,
and the backward reads tensors that the forward saves. Torch's side is traced to ATen, so that Inductor may fuse it.
All operands are fake tensors; symbolic sizes take the value of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from torch_tile.inductor import compat
from torch_tile.inductor.context import AttentionOperands, LinearLossOperands, LossOperands, LossOptions
from torch_tile.inductor.report.rows import LARGE, LEAN_WORTH, WORTH, Outcome
from torch_tile.inductor.select.decide import decide
from torch_tile.inductor.settings import Settings
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops.losses import cross_entropy_loss, linear_cross_entropy_loss

Tensors = tuple[torch.Tensor, ...]


def compete_attention(operands: AttentionOperands, causal: bool, scale: float | None, settings: Settings) -> Outcome:
    """Time `tile.attention` against `scaled_dot_product_attention`, both with their gradients.

    The gradients are those of q, k, v, and of a mask that requires one.
    """
    with compat.nested_compile(), FakeTensorMode():
        of_mask = operands.mask is not None and operands.mask.requires_grad
        fakes = [compat.empty_for(x) for x in operands if x is not None]
        grad = empty_beside(fakes[0], fakes[2].shape[3])

        def of(run: Callable[..., Tensors]) -> GraphModule:
            def call(grad: torch.Tensor, *given: torch.Tensor) -> Tensors:
                q, k, v, mask = (*given, None)[:4]
                return run(grad, AttentionArgs(q, k, v, mask, causal, scale), of_mask)

            return _traced(call, [grad, *fakes])

        new, old = of(_by_kernels), of(_by_torch)
    return decide(new, old, settings)


def _traced(call: Callable[..., Tensors], inputs: list[torch.Tensor]) -> GraphModule:
    """Trace a call to decomposed ATen without dead code."""
    made = compat.decomposed(call, inputs)
    made.graph.eliminate_dead_code()
    return made


def _by_kernels(grad: torch.Tensor, args: AttentionArgs[torch.Tensor], of_mask: bool) -> Tensors:
    """Compute attention and its gradients by tile ops, that of the mask if `of_mask`."""
    out, lse = torch.ops.tile.attention_lse.default(*args)
    given = args.backward(grad, out, lse, "mask" if of_mask else "")
    *found, kept = torch.ops.tile.attention_backward.default(*given)
    return out, *found, *([kept[0].sum_to_size(args.mask.shape)] if of_mask and args.mask is not None else [])


def _by_torch(grad: torch.Tensor, args: AttentionArgs[torch.Tensor], of_mask: bool) -> Tensors:
    """Compute attention and its gradients by torch's `scaled_dot_product_attention`."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (args.q, args.k, args.v))
        mask = args.mask.detach().requires_grad_() if of_mask and args.mask is not None else args.mask
        wanted = [q, k, v, *([mask] if of_mask and mask is not None else [])]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, args.causal, scale=args.scale, enable_gqa=grouped)
        return out.detach(), *torch.autograd.grad(out, wanted, grad)


def compete_loss(operands: LossOperands, options: LossOptions, widened: bool, settings: Settings) -> Outcome:
    """Time `tile.cross_entropy` against `F.cross_entropy`, with the gradient of logits that require one.

    `widened`: torch's side first converts the logits to float32.
    """

    def ours(logits: Any, target: Any, weight: Any) -> torch.Tensor:
        return cross_entropy_loss(logits, target, weight, **options._asdict())

    def theirs(logits: Any, target: Any, weight: Any) -> torch.Tensor:
        return F.cross_entropy(logits.float() if widened else logits, target, weight, **options._asdict())

    with compat.nested_compile(), FakeTensorMode():
        fakes = [None if x is None else compat.empty_for(x) for x in operands]
        new, old = _with_gradients(ours, theirs, operands, fakes)
    return decide(new, old, settings)


def compete_linear_loss(
    operands: LinearLossOperands, options: LossOptions, softcap: float | None, settings: Settings
) -> Outcome:
    """Time `tile.linear_cross_entropy` and its gradients against `F.linear` and `F.cross_entropy`.

    Gradients are those of hidden, weight and bias that are required. As ours stores no logits, it may be a little
    slower where they are large.
    """

    def ours(x: Any, weight: Any, target: Any, bias: Any, classes: Any) -> torch.Tensor:
        return linear_cross_entropy_loss(
            x, weight, target, linear_bias=bias, weight=classes, softcap=softcap, **options._asdict()
        )

    def theirs(x: Any, weight: Any, target: Any, bias: Any, classes: Any) -> torch.Tensor:
        logits = F.linear(x, weight, bias)
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return F.cross_entropy(logits.float(), target, classes, **options._asdict())

    with compat.nested_compile(), FakeTensorMode():
        fakes: list[Any] = [None if x is None else compat.empty_for(x) for x in operands]
        hidden, weight, target = fakes[:3]
        fakes[0] = hidden.new_empty((*target.shape, hidden.shape[-1]))  # as many rows as there are targets
        new, old = _with_gradients(ours, theirs, operands, fakes)
        logits = compat.size_hint(target.numel()) * compat.size_hint(weight.shape[0]) * hidden.dtype.itemsize
    return decide(new, old, settings, LEAN_WORTH if logits >= LARGE else WORTH)


def _with_gradients(
    ours: Callable[..., torch.Tensor],
    theirs: Callable[..., torch.Tensor],
    operands: Sequence[Any],
    fakes: Sequence[torch.Tensor | None],
) -> tuple[GraphModule, GraphModule]:
    """Trace two losses on `fakes`, each with the gradients that `operands` require, of an upstream gradient of ones."""
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in operands]

    def traced(loss: Callable[..., torch.Tensor]) -> GraphModule:
        def call(*given: torch.Tensor) -> Tensors:
            rest = iter(given)
            full = [None if x is None else next(rest).detach() for x in fakes]
            leaves = [x.requires_grad_() for x, want in zip(full, wanted, strict=True) if x is not None and want]
            if not leaves:
                return (loss(*full),)
            with torch.enable_grad():
                found = loss(*full)
                return found.detach(), *torch.autograd.grad(found.sum(), leaves)

        return _traced(call, [x for x in fakes if x is not None])

    return traced(ours), traced(theirs)
