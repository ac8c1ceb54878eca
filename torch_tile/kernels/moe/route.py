# SPDX-License-Identifier: Apache-2.0
"""Choose the experts of each token from the scores of a router, and their weights: all on the device.

Assumes that `ops` checked shapes and numbers. Of equal scores the first expert is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import as_rows, compute_dtype, entry_function, machine_of, power_of_two, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.moe.args import RouteArgs

TINY = 1e-20  # added to the sum of the weights, which may be 0 where scores are sigmoids
LEAST = -3e38  # below all scores; -inf marks experts that are chosen already


@dataclass(frozen=True)
class Spec:
    """Facts that a kernel is compiled for.

    bias: the dtype of the correction of choices, None without. sums_of: the number of top scores that make the score of
    a group of experts, 0 if there are no groups.
    """

    dtype: torch.dtype
    bias: torch.dtype | None
    score: str
    sums_of: int
    normalise: bool


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` tokens by `experts` scores, `groups` of groups and `chosen` choices: powers of two."""

    rows: int
    experts: int
    groups: int
    chosen: int
    threads: int = 128


def scores_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Return the scores of a router's logits, in the dtype of sums."""
    x = logits.to(compute_dtype(logits.dtype))
    return x.softmax(-1) if score == "softmax" else x.sigmoid()


def weights_of(scores: torch.Tensor, experts: torch.Tensor, normalise: bool, scale: float) -> torch.Tensor:
    """Return the weights of the chosen experts, from the scores of all."""
    weights = scores.gather(-1, experts.long())
    return (weights / (weights.sum(-1, keepdim=True) + TINY) if normalise else weights) * scale


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.route` in plain torch, from the arguments of `RouteArgs`."""
    args: RouteArgs[torch.Tensor] = RouteArgs(*given, **named)
    logits, bias, k, score, groups, top_groups, group_sum, normalise, scale = args
    scores = scores_of(logits, score)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if top_groups < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        of_groups = grouped.topk(min(group_sum, grouped.shape[-1]), -1).values.sum(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], LEAST).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return weights_of(scores, experts, normalise, scale), experts


@T.macro
def first_largest(values: Any, top: Any, place: Any, columns: Any, count: Any) -> None:
    """Write the largest value of each row to `top`, and its first column to `place`; a NaN is no largest value."""
    rows, width = values.shape
    T.reduce_max(values, top, dim=1)
    for i, j in T.Parallel(rows, width):
        columns[i, j] = T.if_then_else(values[i, j] == top[i], j, width)
    T.reduce_min(columns, place, dim=1)
    for i in T.Parallel(rows):
        place[i] = T.min(place[i], count - 1)


@library_jit
def route_rows(config: Config, spec: Spec) -> Any:
    """Build the kernel: a block takes `config.rows` tokens; each choice is a maximum over the experts that are left."""
    compute = compute_dtype(spec.dtype)
    rows, width = config.rows, config.experts
    m, n, k = T.dynamic("m, n, k")
    biases = [] if spec.bias is None else [T.Tensor((n,), spec.bias)]
    infinity = T.infinity(compute)

    @T.prim_func
    def route(
        logits: strided("logits", (m, n), spec.dtype),
        *operands: biases,
        weights: T.Tensor((m, k), compute),
        experts: T.Tensor((m, k), "int64"),
        groups: T.int32,
        top_groups: T.int32,
        scale: compute,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            scores = T.alloc_fragment((rows, width), compute)
            choice = T.alloc_fragment((rows, width), compute)
            columns = T.alloc_fragment((rows, width), "int32")
            top = T.alloc_fragment((rows,), compute)
            total = T.alloc_fragment((rows,), compute)
            place = T.alloc_fragment((rows,), "int32")
            kept = T.alloc_fragment((rows, config.chosen), compute)
            names = T.alloc_fragment((rows, config.chosen), "int32")
            for i, j in T.Parallel(rows, width):
                logit = T.cast(logits[bx * rows + i, j], compute)
                scores[i, j] = T.if_then_else(j < n, logit, -infinity)
            if spec.score == "softmax":
                T.reduce_max(scores, top, dim=1)
                for i, j in T.Parallel(rows, width):
                    scores[i, j] = T.exp(scores[i, j] - top[i])
                T.reduce_sum(scores, total, dim=1)
                for i, j in T.Parallel(rows, width):
                    scores[i, j] = scores[i, j] / total[i]
            else:
                for i, j in T.Parallel(rows, width):
                    scores[i, j] = 1.0 / (1.0 + T.exp(-scores[i, j]))
            for i, j in T.Parallel(rows, width):
                shift = 0.0 if spec.bias is None else T.cast(operands[0][T.min(j, n - 1)], compute)
                choice[i, j] = T.if_then_else(j < n, scores[i, j] + shift, -infinity)
            if spec.sums_of:
                size = n // groups
                part = T.alloc_fragment((rows, width), compute)
                of_groups = T.alloc_fragment((rows, config.groups), compute)
                group_columns = T.alloc_fragment((rows, config.groups), "int32")
                allowed = T.alloc_fragment((rows, width), "int32")
                T.fill(of_groups, -infinity)
                T.clear(allowed)
                for group in T.serial(groups):
                    T.clear(total)
                    for i, j in T.Parallel(rows, width):
                        part[i, j] = T.if_then_else(j // size == group, choice[i, j], -infinity)
                    for _ in T.serial(T.min(spec.sums_of, size)):
                        first_largest(part, top, place, columns, n)
                        for i in T.Parallel(rows):
                            total[i] += top[i]
                        for i, j in T.Parallel(rows, width):
                            part[i, j] = T.if_then_else(j == place[i], -infinity, part[i, j])
                    for i, g in T.Parallel(rows, config.groups):
                        of_groups[i, g] = T.if_then_else(g == group, total[i], of_groups[i, g])
                for _ in T.serial(top_groups):
                    first_largest(of_groups, top, place, group_columns, groups)
                    for i, j in T.Parallel(rows, width):
                        allowed[i, j] = T.if_then_else(j // size == place[i], 1, allowed[i, j])
                    for i, g in T.Parallel(rows, config.groups):
                        of_groups[i, g] = T.if_then_else(g == place[i], -infinity, of_groups[i, g])
                for i, j in T.Parallel(rows, width):
                    inside = T.if_then_else(allowed[i, j] == 1, choice[i, j], T.cast(LEAST, compute))
                    choice[i, j] = T.if_then_else(j < n, inside, -infinity)
            T.clear(kept)
            T.clear(names)
            T.clear(total)
            for number in T.serial(k):
                first_largest(choice, top, place, columns, n)
                for i, j in T.Parallel(rows, width):
                    choice[i, j] = T.if_then_else(j == place[i], -infinity, choice[i, j])
                chosen = T.alloc_fragment((rows, width), compute)
                for i, j in T.Parallel(rows, width):
                    chosen[i, j] = T.if_then_else(j == place[i], scores[i, j], 0.0)
                T.reduce_sum(chosen, top, dim=1)
                for i in T.Parallel(rows):
                    total[i] += top[i]
                for i, c in T.Parallel(rows, config.chosen):
                    kept[i, c] = T.if_then_else(c == number, top[i], kept[i, c])
                    names[i, c] = T.if_then_else(c == number, place[i], names[i, c])
            for i, c in T.Parallel(rows, config.chosen):
                if c < k:
                    share = kept[i, c] / (total[i] + TINY) if spec.normalise else kept[i, c]
                    weights[bx * rows + i, c] = share * scale
                    experts[bx * rows + i, c] = T.cast(names[i, c], "int64")

    return route


def _empty_results(args: RouteArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the weights and the numbers of the chosen experts."""
    logits, shape = args.logits, (*args.logits.shape[:-1], args.k)
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


@entry_function(RouteArgs, reference, _empty_results)
def route(args: RouteArgs[torch.Tensor], weights: torch.Tensor, experts: torch.Tensor) -> bool:
    """Choose experts as `reference` does."""
    logits, bias, k, score, groups, top_groups, group_sum, normalise, scale = args
    if not weights.numel():
        return False
    x, machine = as_rows(logits), machine_of(logits)
    n = int(x.shape[1])
    rows = max(1, min(8, 2048 // power_of_two(n))) if machine.is_gpu else 1
    config = Config(rows, power_of_two(n), power_of_two(groups), power_of_two(k))
    sums_of = group_sum if top_groups < groups else 0
    spec = Spec(logits.dtype, None if bias is None else bias.dtype, score, sums_of, normalise)
    biases = [] if bias is None else [bias.contiguous()]
    numbers = int(groups), int(top_groups), float(scale)
    machine.kernel(route_rows)(config, spec)(x, *biases, weights.view(-1, k), experts.view(-1, k), *numbers)
    return True
