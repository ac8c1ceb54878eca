# SPDX-License-Identifier: Apache-2.0
"""Functions of attention scores between the product and the softmax, as texts of the epilogue language.

`acc0` is the scaled product of a query and a key; `x0..` are auxiliary operands that broadcast to `[B, H, Sq, Skv]`,
read as the dtype of sums; `i0..i3` say where the score stands: batch, head, query + q_offset, key. The mask, the causal
rule and the window come after it. Indices are numbers of the dtype of sums, float32 exact up to 2 ** 24.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.operands import DIMS, Held, Operand, Rows, operand
from torch_tile.kernels.epilogue import emit
from torch_tile.kernels.epilogue.autodiff import Sloped, slopes
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.program import Epilogue, Values, parse

HIDES = "v0=where(x0,acc0,-inf);ret v0"
LARGE = 2.0**16
"""Of float32 up to here, products are rounded by less than 2 ** -7."""


def inputs(s: torch.Tensor, aux: Sequence[torch.Tensor], q_offset: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a text by name, for scores `[B, H, Sq, Skv]` of the dtype of sums."""
    named = {"acc0": s} | {f"x{n}": x.to(s.dtype) for n, x in enumerate(aux)}
    for d, size in enumerate(s.shape):
        index = torch.arange(size, device=s.device, dtype=s.dtype).view(-1, *[1] * (3 - d))
        named[f"i{d}"] = index + q_offset if DIMS[d] == "q" else index
    return named


def modified(text: str, s: torch.Tensor, aux: Sequence[torch.Tensor], q_offset: int) -> torch.Tensor:
    """Apply `text` to scores `[B, H, Sq, Skv]`."""
    if not text:
        return s
    program = parse(text, 1, len(aux), len(DIMS))
    return Values(program, inputs(s, aux, q_offset), s)(program.result).expand_as(s)


def as_mask(args: AttentionArgs[torch.Tensor]) -> AttentionArgs[torch.Tensor]:
    """Replace a score function that only hides scores under a bool operand by a mask. The operand must be copied by
    tiles.

    This takes 5 to 25 % less time on an H200. Read element by element, a mask is slower for heads of 128.
    """
    aux = args.aux or ()
    hides = args.mask is None and len(aux) == 1 and aux[0].dtype == torch.bool and canonical(args.score) == HIDES
    tiled = hides and operand(aux[0], 1, on_gpu=True)[0].tiled
    return args._replace(mask=aux[0], aux=None, score="") if tiled else args


@functools.lru_cache(maxsize=256)
def split_gain(text: str) -> tuple[Epilogue, float]:
    """Split a score text into a program and a positive constant factor of its result, as a soft cap has."""
    program = parse(canonical(text))
    *rest, last = program.statements or (None,)
    if last is not None and last.name == program.result and last.function == "mul":
        value, number = last.operands
        if isinstance(value, str) and isinstance(number, float) and 0 < number < float("inf"):
            return Epilogue(tuple(s for s in rest if s is not None), value), number
    return program, 1.0


@functools.lru_cache(maxsize=256)
def slopes_of(text: str, inputs: tuple[str, ...]) -> Sloped:
    """Return the derivatives of the program of `split_gain` in some of its inputs, as a program."""
    return slopes(canonical(text), hides=True).only(split_gain(text)[0].result, *inputs)


def may_have_finite_min_masks(text: str, aux: Sequence[Operand]) -> bool:
    """Return whether scores may contain huge finite mask values, so that scaling them overflows or loses all digits.

    It may if it adds or chooses large ones, or reads numbers that differ between keys or queries: masks.
    """
    numbers = [abs(x) for s in parse(text).statements for x in s.operands if isinstance(x, float)] if text else []
    masks = [x for x in aux if x.dtype != torch.bool and {"q", "k"} & set(x.dims)]
    return bool(masks) or any(LARGE < x < float("inf") for x in numbers)


@T.macro
def values_of(
    program: Epilogue, product: Any, aux: Sequence[Held], here: Rows, i: Any, j: Any, first: Any
) -> dict[str, Any]:
    """Compute all values of a text for row i and key j from the scaled product. Keys count from `first`."""
    dtype = product.dtype
    named = {"acc0": product} | {f"i{d}": T.cast(here.index(d, i, first + j), dtype) for d in program.inputs("i")}
    named |= {f"x{n}": aux[n].number(here, i, j, first, dtype) for n in program.inputs("x")}
    values: dict[str, Any] = emit.values_of(program, named, dtype, quick=True)
    return values


@T.macro
def modify(program: Epilogue, scores: Any, scale: Any, aux: Sequence[Held], here: Rows, first: Any) -> None:
    """Replace products `[rows, keys]` by scores. The keys count from `first`."""
    for i, j in T.Parallel(*scores.shape):
        values = values_of(program, scores[i, j] * scale, aux, here, i, j, first)
        scores[i, j] = values[program.result]
