# SPDX-License-Identifier: Apache-2.0
"""What the kinds of attention share: checks of tensors and results, and gradients by a backward operator.

A call that wants a gradient is `NAME_lse`, and its backward `NAME_backward`, whose own gradient autograd takes of plain
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.arguments import FAR
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.recomputed import gradients_of
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import P, entry, in_torch, op_gradients
from torch_tile.ops.saved_args import needs_of, restored_args, save_args
from torch_tile.ops.sharding_rule import Rule

SCORES: Final = ("batch", "head", "query", "key")
"""The dimensions of scores."""
Sizes = Sequence[tuple[checks.Size, str]]
"""The size of each dimension, and what it is."""


def declare_with_lse(
    name: str,
    args: Callable[P, Any],
    doc: str,
    lse: str,
    *,
    module: str,
    fake: Callable[[Any], tuple[Tensor, Tensor]],
    without_lse: Mapping[str, Any] = MappingProxyType({}),
    with_lse: Mapping[str, Any] = MappingProxyType({}),
    **common: Any,
) -> tuple[Callable[P, Tensor], Callable[P, tuple[Tensor, Tensor]]]:
    """Declare attention, and `name_lse`, which also returns the log-sum-exp. Return the documented forms of both.

    doc: the documentation of the first. lse: the shape of the log-sum-exp, as text. module: the kernels of both.
    fake: makes the empty results of the second. without_lse, with_lse: fields that only the first, or
    only the second, has.
    """
    without_lse = {"run": entry(module, name, "out", lse=None), **without_lse}
    reference = in_torch(module, only_first=True)
    first = declare(
        name, args, Tensor, doc, fake=lambda given: fake(given)[0], reference=reference, **without_lse, **common
    )
    doc = f"""`{name}`, and the natural logarithm of each softmax's denominator.

Returns:
    out as `{name}`, lse {lse} in float32 (float64 for float64), `-inf` for a query that sees no key.
    lse is not differentiable.
"""
    fields = {"module": module, "returns": ("out", "lse"), "run": entry(module, name, "out", "lse")}
    second = declare(f"{name}_lse", args, tuple[Tensor, Tensor], doc, fake=fake, **fields, **with_lse, **common)
    return first, second


def check_heads(op: str, heads: Any, kv_heads: Any, order: str = "") -> None:
    """Check that each head of keys serves as many heads of queries. `order` says in the message where heads stand."""
    require(
        heads == 0 if isinstance(kv_heads, int) and kv_heads == 0 else heads % kv_heads == 0,
        lambda: f"tile.{op}: q has {heads} heads; expected a multiple of k's and v's {kv_heads}{order}",
    )


def check_batched(op: str, args: Any) -> None:
    """Check q `[B, H, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, the window and q_offset."""
    q, k, v = args.q, args.k, args.v
    checks.check_floating(op, q=q, k=k, v=v)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    check_shapes(op, q, k, v)
    check_window(op, args.window, args.q_offset)


def check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes of q `[B, H, Sq, D]`, k `[B, Hkv, Skv, D]` and v `[B, Hkv, Skv, Dv]`."""
    checks.check_dims(op, "q", q, 4, "[B, H, Sq, D]")
    checks.check_dims(op, "k", k, 4, "[B, Hkv, Skv, D]")
    checks.check_dims(op, "v", v, 4, "[B, Hkv, Skv, Dv]")
    checks.check_size(op, "k", k, 0, q.shape[0], "q's batch")
    checks.check_size(op, "k", k, 3, q.shape[3], "q's head dimension")
    for dim, what in enumerate(("k's batch", "k's heads", "k's length")):
        checks.check_size(op, "v", v, dim, k.shape[dim], what)
    check_heads(op, q.shape[1], k.shape[1], ": heads come second, [B, H, S, D]")


def check_pages(
    op: str, cache: torch.Size, table: tuple[str, Tensor | None], lengths: tuple[str, Tensor | None]
) -> None:
    """Check that lengths fit a table of pages, or a page where there is none, and that their pages exist.

    `cache` is how many pages there are, and their size. Tables and lengths come with their names. Only the CPU checks,
    since a GPU would have to wait.
    """
    (pages, page), (table_name, numbers), (lengths_name, ends) = cache, table, lengths
    capacity = page if numbers is None else numbers.shape[1] * page
    if ends is not None and ends.device.type == "cpu" and ends.numel():
        low, high = (int(n) for n in ends.aminmax())
        holds = "a row of the cache" if numbers is None else table_name
        require(
            low >= 0 and high <= capacity,
            lambda: f"tile.{op}: {lengths_name} has values from {low} to {high}; expected 0 to {capacity}, by {holds}",
        )
    if numbers is None or numbers.device.type != "cpu" or not page:
        return
    used = numbers if ends is None else numbers[torch.arange(numbers.shape[1])[None, :] * page < ends[:, None]]
    if used.numel():
        first, last = (int(n) for n in used.aminmax())
        within = "" if ends is None else f" within {lengths_name}"
        require(
            first >= 0 and last < pages,
            lambda: f"tile.{op}: {table_name} has pages from {first} to {last}{within}; expected 0 to {pages - 1}",
        )


def check_window(op: str, window: int, offset: Any = 0) -> None:
    """Check how many keys a query sees, and the position of the first query."""
    require_value(window >= 0, lambda: f"tile.{op}: window is {window}; expected 0 (none) or a positive length")
    if isinstance(offset, int):  # a symbol is the difference of lengths, so that no bound of it has to be guarded
        require_value(abs(offset) <= FAR, lambda: f"tile.{op}: q_offset is {offset}; expected {-FAR} to {FAR}")


def check_score(op: str, args: Any, shape: Sequence[Any]) -> None:
    """Check the text of scores and its operands, each broadcastable to `shape`, the sizes of `SCORES`."""
    aux, score = args.aux or (), args.score
    for i, x in enumerate(aux):
        checks.check_auxiliary(op, f"aux[{i}]", x, "q", args.q)
        checks.check_broadcasts(op, f"aux[{i}]", x, shape)
    require_value(not aux or bool(score), lambda: f"tile.{op}: aux is given, but score, which would read it, is empty")
    from torch_tile.kernels.epilogue.program import parse

    parse(score, 1, len(aux), len(SCORES), f"tile.{op}: score")


def check_most(op: str, name: str, most: Any) -> None:
    """Check the greatest length of a sequence. A symbol is no less than 0, and no bound of it has to be guarded."""
    if isinstance(most, int):
        require_value(0 <= most <= FAR, lambda: f"tile.{op}: {name} is {most}; expected 0 to {FAR}")


def check_starts(op: str, name: str, starts: Tensor, most: Any, rows: int, of: str) -> None:
    """Check the values of cu_seqlens on the CPU: from 0 on, not falling, within the rows, no sequence above `most`."""
    if starts.device.type != "cpu":
        return
    found = starts.tolist()
    steps = [b - a for a, b in itertools.pairwise(found)]
    require(
        found[0] == 0 and all(n >= 0 for n in steps) and found[-1] <= rows,
        lambda: f"tile.{op}: {name} is {found}; expected numbers from 0 on that do not fall, up to {of}'s {rows} rows",
    )
    longest = max(steps, default=0)
    limit = name.replace("cu_seqlens", "max_seqlen")
    require(
        longest <= most,
        lambda: f"tile.{op}: {name} has a sequence of {longest} rows; expected at most {limit}, which is {most}",
    )


def batched_sizes(args: Any) -> list[tuple[checks.Size, str]]:
    """Return the sizes of a result `[B, H, Sq, Dv]`."""
    names = "q's batch", "q's heads", "q's length", "v's head dimension"
    return list(zip((*args.q.shape[:3], args.v.shape[3]), names, strict=True))


def check_results(op: str, args: Any, out: tuple[str, Sizes], lse: tuple[str, Sizes]) -> None:
    """Check the results of the forward and the gradient of the first. `out` and `lse` are their dimensions."""
    q = args.q
    checks.check_same_dtype(op, q=q, grad=args.grad, out=args.out)
    for name, x, (meaning, sizes) in (("grad", args.grad, out), ("out", args.out, out), ("lse", args.lse, lse)):
        checks.check_device(op, name, x, "q", q)
        checks.check_dims(op, name, x, len(sizes), meaning)
        for dim, (size, what) in enumerate(sizes):
            checks.check_size(op, name, x, dim, size, what)
    sums, found = compute_dtype(q.dtype), args.lse.dtype
    require_type(found == sums, lambda: f"tile.{op}: lse has dtype {found}; expected {sums}")


def kv_head(heads: Any) -> str:
    """Return the name of keys' heads in a sharding rule: a single head serves all queries, wherever they are."""
    return "" if heads == 1 else "head"


def counted(score: str) -> set[str]:
    """Return the dimensions that a text counts: a shard does not know where in the whole it begins."""
    from torch_tile.kernels.epilogue.program import parse

    return {SCORES[i] for i in parse(score).inputs("i")}


def sharding_of_backward(args: Any, forward: Rule) -> Rule:
    """Return the backward's rule from the forward's. Gradients of keys are sums over the heads that share them."""
    q_dims, k_dims, v_dims, *others = forward.inputs
    out_dims, lse_dims = forward.outputs
    tensors = [dims for dims in (q_dims, k_dims, v_dims) if dims is not None]
    free = forward.free if args.k.shape[1] != 1 else tuple(dim for dim in forward.free if dim != "head")
    return Rule(
        outputs=tensors,
        inputs=[out_dims, *tensors, out_dims, lse_dims, *others],
        free=free,
        even=forward.even,
        saved=[*tensors, *others, out_dims],
    )


def none_of(op: str, needed: Any) -> Any:
    """Return no gradients of the operands of scores, as the schema lists them. Raise an error if one is wanted."""
    require(
        not any(needed or ()),
        lambda: f"tile.{op}: aux has no gradient; detach it, or call tile.attention for each sequence",
    )
    return [None] * len(needed) if isinstance(needed, Sequence) else None  # torch says False of a list that is None


@dataclass(frozen=True)
class Gradients:
    """The gradients of operators `name_lse` and `name_backward`, of kernels in `module`, by their arguments."""

    name: str
    module: str
    args: Any
    backward_args: Any

    @property
    def without_lse(self) -> dict[str, Any]:
        """Return the fields of the operator that keeps nothing for the backward; see `declare_with_lse`."""
        return {"in_training": self.in_training}

    @property
    def with_lse(self) -> dict[str, Any]:
        """Return the fields of the operator that keeps the log-sum-exp."""
        return {"setup_context": self.save, "backward": self.gradients}

    @property
    def backward_fields(self) -> dict[str, Any]:
        """Return the fields of the backward operator: results, kernels, reference, and the gradient of the gradient."""

        def run(args: Any, out: Any) -> None:
            getattr(kernels(self.module), f"{self.name}_backward")(*args, results=out)

        found = {"returns": ("dq", "dk", "dv"), "run": run, "reference": in_torch(self.module, "backward_reference")}
        return {**found, "setup_context": self.save_backward, "backward": self.twice}

    def in_training(self, args: Any) -> Tensor:
        """Run the op that keeps what the backward needs."""
        out: Tensor = getattr(torch.ops.tile, f"{self.name}_lse").default(*args)[0]
        return out

    def save(self, ctx: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward needs."""
        ctx.mark_non_differentiable(output[1])
        save_args(ctx, args, *output)

    def gradients(self, ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        """Compute the gradients by the backward operator."""
        args, (out, lse) = restored_args(ctx)
        of_aux = none_of(self.name, needs_of(ctx, self.args).aux)
        # Gradients of gradients are computed from the inputs alone.
        given = args.backward(grad, out.detach(), lse.detach())
        dq, dk, dv = getattr(torch.ops.tile, f"{self.name}_backward").default(*given)
        return op_gradients(self.args, q=dq, k=dk, v=dv, aux=of_aux)

    def save_backward(self, ctx: Any, args: Any, output: Any) -> None:
        """Save what the gradient of the backward needs."""
        save_args(ctx, args.forward, args.grad)

    def twice(self, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Compute gradients of gradients by autograd of plain torch, which recomputes `out` and `lse`."""

        def computed(*tensors: Any) -> list[Tensor]:
            args, (grad,) = restored_args(ctx, tensors)
            found = kernels(self.module).gradients(grad, args)
            return [new.to(x.dtype) for new, x in zip(found, args[:3], strict=True)]

        needs, saved = needs_of(ctx, self.backward_args), ctx.saved_tensors
        of_aux = none_of(f"{self.name}_backward", needs.aux)
        needed = needs.q, needs.k, needs.v, *[False] * (len(saved) - 4), needs.grad
        q, k, v, *_, grad = gradients_of(computed, saved, needed, grads)
        return op_gradients(self.backward_args, grad=grad, q=q, k=k, v=v, aux=of_aux)
