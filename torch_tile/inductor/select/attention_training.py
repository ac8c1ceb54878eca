# SPDX-License-Identifier: Apache-2.0
"""`select="fastest"` in training: attention forward and backward together, ours against torch's.

It is decided where the call is captured, before autograd: afterwards the two halves are in different graphs, and what
one saves is what the other reads. Torch's own side is traced to ATen, so that Inductor may fuse what it can of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from torch_tile.inductor import compat
from torch_tile.inductor.report.rows import Outcome
from torch_tile.inductor.select.decide import decide
from torch_tile.inductor.settings import Settings
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.memory_order import empty_beside

Tensors = tuple[torch.Tensor, ...]


def compete_attention(
    tensors: tuple[Any, Any, Any, Any], causal: bool, scale: float | None, settings: Settings
) -> Outcome:
    """Times of `tile.attention` and `scaled_dot_product_attention` with their gradients in q, k, v, and in a mask that
    wants its own.

    `tensors` are fake ones: q, k, v and a mask or None. Symbolic sizes take the value that was traced with.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with compat.isolated_compile(), FakeTensorMode():
        of_mask = tensors[3] is not None and tensors[3].requires_grad
        fakes = [compat.empty_for(x) for x in tensors if x is not None]
        grad = empty_beside(fakes[0], fakes[2].shape[3])

        def ours(grad: torch.Tensor, *given: torch.Tensor) -> Tensors:
            return _by_kernels(grad, *given, causal=causal, scale=scale, of_mask=of_mask)

        def theirs(grad: torch.Tensor, *given: torch.Tensor) -> Tensors:
            return _by_torch(grad, *given, causal=causal, scale=scale, of_mask=of_mask)

        new, old = (_traced(call, [grad, *fakes]) for call in (ours, theirs))
    return decide(new, old, settings)


def _traced(call: Callable[..., Tensors], inputs: list[torch.Tensor]) -> GraphModule:
    made = compat.decomposed(call, inputs)
    made.graph.eliminate_dead_code()
    return made


def _by_kernels(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *,
    causal: bool, scale: float | None, of_mask: bool,
) -> Tensors:  # fmt: skip
    args = AttentionArgs(q, k, v, mask, causal, scale)
    out, lse = torch.ops.tile.attention_lse.default(*args)
    given = args.backward(grad, out, lse, "mask" if of_mask else "")
    *found, kept = torch.ops.tile.attention_backward.default(*given)
    return out, *found, *([kept[0].sum_to_size(mask.shape)] if of_mask and mask is not None else [])


def _by_torch(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *,
    causal: bool, scale: float | None, of_mask: bool,
) -> Tensors:  # fmt: skip
    grouped = q.shape[1] != k.shape[1]
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        mask = mask.detach().requires_grad_() if of_mask and mask is not None else mask
        wanted = [q, k, v, *([mask] if of_mask and mask is not None else [])]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        return out.detach(), *torch.autograd.grad(out, wanted, grad)
