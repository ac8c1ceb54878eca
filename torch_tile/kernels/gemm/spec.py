# SPDX-License-Identifier: Apache-2.0
"""Facts that a product with a fused epilogue is compiled for: dtypes, memory orders, the epilogue and its operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import VECTOR_BYTES
from torch_tile.kernels.common import compute_dtype, dynamic, is_unit, strided, vector_of
from torch_tile.kernels.epilogue import emit
from torch_tile.kernels.epilogue.program import ADDED, parse


@dataclass(frozen=True)
class Aux:
    """An auxiliary operand: its kind, dtype, whether its last dimension is dense, and whether its rows start at
    multiples of 16 bytes.

    Kind `o` is the result before the product. A kernel has no parameter for it, as it reads what it writes.
    """

    kind: str
    dtype: torch.dtype
    unit: bool = True
    aligned: bool = False

    @staticmethod
    def of(x: torch.Tensor, kind: str, pieces: bool) -> Aux:
        """Describe a tensor as an operand. Rows are read in `pieces` of 16 bytes where possible, else by element."""
        unit = is_unit(x)
        return Aux(kind, x.dtype, unit, pieces and kind != "c" and unit and vector_of((x,), ()) > 1)

    def type(self, name: str, shape: Sequence[Any]) -> Any:
        """Return the parameter's type."""
        size = self.dtype.itemsize
        multiple, align = (16 // size, 16) if self.aligned else (1, size)
        return strided(name, shape, self.dtype, self.unit, multiple, align)


def parameters(aux: Sequence[torch.Tensor], kinds: str, pieces: bool) -> tuple[list[torch.Tensor], tuple[Aux, ...]]:
    """Return the auxiliary operands as views of the shapes that kernels take, with the kind of each; see `Aux.of`.

    Kinds `t` and `c` may have one batch dimension or none. Operands of kind `o` are no parameters, and left out.
    """
    views = [_as_taken(x, kind) for x, kind in zip(aux, kinds, strict=True)]
    specs = tuple(Aux.of(x, kind, pieces) for x, kind in zip(views, kinds, strict=True))
    return [x for x, kind in zip(views, kinds, strict=True) if kind != "o"], specs


def _as_taken(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an auxiliary operand in the shape that kernels take."""
    if kind in "rg":
        return x
    if kind == "s":
        return x.reshape(1)
    batched = x if x.dim() == 3 else x[None]
    return batched if kind in "to" else batched[..., 0]


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of a product kernel, besides its `Config`.

    `a_transposed` says that a is stored `[batch, K, M]`, `b_transposed` for each b that it is stored `[batch, N, K]`.
    Rows of a, of the bs and of the result start at multiples of `vector` elements. So many divide N, K and, if a is
    turned, M.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    a_transposed: bool
    b_transposed: tuple[bool, ...]
    aux: tuple[Aux, ...]
    epilogue: str
    vector: int = 1

    @property
    def adds(self) -> bool:
        """Return whether the epilogue only adds the product to an earlier result, as bulk stores can."""
        alone = [x.kind for x in self.aux] == ["o"] and self.epilogue == ADDED
        return alone and self.out_dtype.itemsize == 2 and self.vector * self.out_dtype.itemsize == VECTOR_BYTES

    def sizes(self) -> tuple[Any, Any, Any, Any]:
        """Return batch, M, N and K of a problem."""
        n, k = (dynamic(name, self.vector) for name in "nk")
        return T.dynamic("batch"), dynamic("m", self.vector if self.a_transposed else 1), n, k

    def operand_types(self, batch: Any, m: Any, n: Any, k: Any, groups: Any = None) -> tuple[Any, list[Any], list[Any]]:
        """Return the types of operand a, of all operands b, by batch or `groups`, and of the epilogue's operands."""
        count = batch if groups is None else groups
        a = strided("a", (batch, k, m) if self.a_transposed else (batch, m, k), self.dtype, multiple=self.vector)
        bs = [
            strided(f"b{i}", (count, n, k) if transposed else (count, k, n), self.dtype, multiple=self.vector)
            for i, transposed in enumerate(self.b_transposed)
        ]
        shapes = {"t": (batch, m, n), "r": (n,), "c": (batch, m), "s": (1,), "g": (count, n)}
        aux = [x.type(f"x{i}", shapes[x.kind]) for i, x in enumerate(self.aux) if x.kind != "o"]
        return a, bs, aux

    def with_result(self, aux: Sequence[Any], out: Any) -> list[Any]:
        """Return the auxiliary operands with `out` in the places of those that are the result."""
        rest = iter(aux)
        return [out if x.kind == "o" else next(rest) for x in self.aux]


@T.macro
def finish(spec: Spec, values: Sequence[Any], aux: Sequence[Any], bz: Any, row: Any, col: Any, group: Any = 0) -> Any:
    """Compute one element of the result from the elements of the products. `group` is that of the row."""
    dtype = compute_dtype(spec.dtype)
    inputs = {f"acc{i}": value for i, value in enumerate(values)}
    for i, (x, kind) in enumerate(zip(aux, spec.aux, strict=True)):
        place = {"t": (bz, row, col), "o": (bz, row, col), "r": (col,), "c": (bz, row), "s": (0,), "g": (group, col)}[
            kind.kind
        ]
        inputs[f"x{i}"] = T.cast(x[place if len(place) > 1 else place[0]], dtype)
    result = emit.apply(parse(spec.epilogue), inputs, dtype, spec.out_dtype.itemsize <= 2)
    return T.cast(result, spec.out_dtype)
