# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear layer whose logits are never stored together, and its gradients in the same pass.

Chunks of rows go through the product, the loss and the products of the gradients. They follow each other in one buffer.
Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import as_rows, compute_dtype, entry_function, machine_of, round_up, strided
from torch_tile.kernels.epilogue.program import ADDED, soft_cap
from torch_tile.kernels.gemm.gemm import gemm
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.loss import cross_entropy as rows
from torch_tile.kernels.loss.args import LinearCrossEntropyArgs, LinearCrossEntropyGradientsArgs

CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}  # of logits at a time, by the target's kind
MOST_CHUNKS = 32  # each adds to the head's gradient, which is rounded to its dtype (float16: only once)
ROWS = 256  # chunks have a multiple of so many rows
TERMS = 256


def linear_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute all logits in plain torch, in the dtype of sums, and the slope of their soft cap."""
    dtype = compute_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).mT
    logits = logits if bias is None else logits + bias.to(dtype)
    if softcap is None:
        return logits, None
    share = torch.tanh(logits / softcap)
    return softcap * share, 1.0 - share * share


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.linear_cross_entropy` in plain torch. Takes the arguments of `LinearCrossEntropyArgs`."""
    args: LinearCrossEntropyArgs[torch.Tensor] = LinearCrossEntropyArgs(*given, **named)
    logits, _ = linear_logits(args.hidden, args.weight, args.bias, args.softcap)
    return rows.loss_reference(logits, args.target, *_loss_options(args))


def gradients_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `tile.linear_cross_entropy_gradients` in plain torch: the loss, dhidden, dweight and dbias."""
    args: LinearCrossEntropyGradientsArgs[torch.Tensor] = LinearCrossEntropyGradientsArgs(*given, **named)
    grad, hidden, weight, bias = args.grad, args.hidden, args.weight, args.bias
    logits, cap_slope = linear_logits(hidden, weight, bias, args.softcap)
    loss, lse = rows.loss_reference(logits, args.target, *_loss_options(args))
    if isinstance(weight.shape[0], int) and weight.shape[0] == 0:
        slope = torch.zeros_like(logits)
    else:
        slope, _ = rows.logit_slopes(logits, args.target, lse, *_loss_options(args))
    slope = grad.to(slope.dtype)[..., None] * (slope if cap_slope is None else slope * cap_slope)
    flat, x = (y.flatten(0, -2) if y.dim() > 1 else y[None] for y in (slope, hidden.to(slope.dtype)))
    nothing = hidden.new_empty(0)
    dhidden = (slope @ weight.to(slope.dtype)).to(hidden.dtype).contiguous() if args.of_hidden else nothing
    dweight = (flat.mT @ x).to(weight.dtype).contiguous() if args.of_weight else nothing
    dbias = flat.sum(0).to(bias.dtype) if bias is not None and args.of_weight else nothing
    return (grad * loss).sum(), dhidden, dweight, dbias


def _loss_options(args: Any) -> tuple[torch.Tensor | None, int, float, float]:
    """Return the weight of each class, ignore_index, label_smoothing and z_loss."""
    return args.class_weight, args.ignore_index, args.label_smoothing, args.z_loss


def chunks(count: Any, classes: Any, itemsize: int, kind: str, size: int | None) -> Iterator[tuple[Any, Any]]:
    """Yield the first row and the end of each chunk of `count` rows. `size` replaces the chosen number of rows."""
    if size is None:
        fitting = CHUNK_BYTES[kind] // max(1, int(classes) * itemsize) // ROWS * ROWS
        size = max(fitting, round_up(-(-int(count) // MOST_CHUNKS), ROWS))
    for start in range(0, int(count), size):
        yield start, min(start + size, int(count))


@library_jit
def sum_products(dtype: torch.dtype, threads: int) -> Any:
    """Build the kernel for the sum of `factor[i] * loss[i]`, in one order."""
    m = T.dynamic("m")

    @T.prim_func
    def sum_losses(
        factor: strided("factor", (m,), dtype, unit=False), loss: T.Tensor((m,), dtype), out: T.Tensor((1,), dtype)
    ):
        with T.Kernel(1, threads=threads):
            terms = T.alloc_fragment((TERMS,), dtype)
            total = T.alloc_fragment((1,), dtype)
            T.clear(terms)
            for step in T.serial(T.ceildiv(m, TERMS)):
                for i in T.Parallel(TERMS):
                    row = T.min(step * TERMS + i, m - 1)
                    terms[i] += T.if_then_else(step * TERMS + i < m, factor[row] * loss[row], 0.0)
            T.reduce_sum(terms, total, dim=0)
            for i in T.Parallel(1):
                out[i] = total[i]

    return sum_losses


def _empty_sums(args: LinearCrossEntropyArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the loss and the log-sum-exp of each row."""
    loss = args.hidden.new_empty(args.target.shape, dtype=compute_dtype(args.hidden.dtype))
    return loss, torch.empty_like(loss)


@entry_function(LinearCrossEntropyArgs, reference, _empty_sums)
def linear_cross_entropy(
    args: LinearCrossEntropyArgs[torch.Tensor], loss: torch.Tensor, lse: torch.Tensor, chunk: int | None = None
) -> bool:
    """Compute `reference`, `chunk` rows at a time, else as many as are chosen."""
    hidden, weight = args.hidden, args.weight
    if not hidden.numel() or not weight.numel():
        return False
    x, labels = as_rows(hidden), args.target.reshape(-1)
    for start, end, logits in _logits(x, weight, args.bias, args.softcap, chunk):
        part = slice(start, end)
        rows.cross_entropy(logits, labels[part], *_loss_options(args), loss=loss.view(-1)[part], lse=lse.view(-1)[part])
    return True


def _empty_gradients(args: LinearCrossEntropyGradientsArgs[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Allocate the loss and the gradients, empty ones where none is wanted."""
    hidden, weight, bias = args.hidden, args.weight, args.bias
    of_bias = bias is not None and args.of_weight
    return (
        hidden.new_empty((), dtype=compute_dtype(hidden.dtype)),
        hidden.new_empty(hidden.shape if args.of_hidden else (0,)),
        weight.new_empty(weight.shape if args.of_weight else (0,)),
        (weight if bias is None else bias).new_empty(weight.shape[:1] if of_bias else (0,)),
    )


@entry_function(LinearCrossEntropyGradientsArgs, gradients_reference, _empty_gradients)
def linear_cross_entropy_gradients(
    args: LinearCrossEntropyGradientsArgs[torch.Tensor],
    loss: torch.Tensor,
    dhidden: torch.Tensor,
    dweight: torch.Tensor,
    dbias: torch.Tensor,
    chunk: int | None = None,
) -> bool:
    """Compute the loss and its gradients as `gradients_reference` does, `chunk` rows at a time."""
    hidden, weight, bias, of_hidden, of_weight = args.hidden, args.weight, args.bias, args.of_hidden, args.of_weight
    compute = compute_dtype(hidden.dtype)
    if not hidden.numel() or not weight.numel():
        return False
    x, labels, factors = as_rows(hidden), args.target.reshape(-1), args.grad.reshape(-1)
    losses = loss.new_empty(labels.shape)
    column_sums = loss.new_empty(weight.shape[:1]) if bias is not None and of_weight else None
    for start, end, logits in _logits(x, weight, bias, args.softcap, chunk):
        part = slice(start, end)
        rows.loss_and_gradient(factors[part], logits, labels[part], losses[part], *_loss_options(args), args.softcap)
        if of_hidden:
            gemm(logits, [weight], [], "", "", dhidden.dtype, out=dhidden.view(x.shape)[part])
        if of_weight:  # added to what the chunks before left, on a GPU by the stores if it is 16 bits wide
            if not start:  # in float16 sums of some chunks may be infinite where the sum of all is not
                wide = weight.dtype == torch.float16 and end < len(x)
                sums = dweight.new_empty(dweight.shape, dtype=compute) if wide else dweight
            out = sums if end < len(x) else dweight
            before, text = ([sums], ADDED) if start else ([], "")
            gemm(logits.mT, [x[part]], before, ("o" if out is sums else "t") * bool(start), text, out.dtype, out=out)
        if column_sums is not None:
            column_sums = logits.sum(0, dtype=compute) + (column_sums if start else 0)
    if column_sums is not None:
        dbias.copy_(column_sums)
    machine_of(hidden).kernel(sum_products)(compute, 128)(factors, losses, loss.view(1))
    return True


def _logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, chunk: int | None
) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield first row, end and logits of each chunk. All chunks use one buffer."""
    cap = "" if softcap is None else soft_cap(softcap)
    text = cap if bias is None else soft_cap_of_sum(softcap)
    aux, kinds = ([], "") if bias is None else ([bias], "r")
    buffer = None
    kind = machine_of(x).target.kind
    for start, end in chunks(x.shape[0], weight.shape[0], x.element_size(), kind, chunk):
        buffer = x.new_empty((end - start, weight.shape[0])) if buffer is None else buffer
        logits = buffer[: end - start]
        gemm(x[start:end], [weight.mT], aux, kinds, text, x.dtype, out=logits)
        yield start, end, logits


def soft_cap_of_sum(cap: float | None) -> str:
    """Return the epilogue that adds the bias before the soft cap."""
    if cap is None:
        return ADDED
    return f"v0=add(acc0,x0);v1=div(v0,{float(cap)!r});v2=tanh(v1);v3=mul(v2,{float(cap)!r});ret v3"
