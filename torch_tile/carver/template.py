# SPDX-License-Identifier: Apache-2.0
"""Templates of kernels, whose tilings the cost model of the autotuner ranks without compiling or running them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, TypeVar, cast, dataclass_transform

import torch_tile.language as T
from torch_tile.autotuner.machine import num_sms_of
from torch_tile.carver.arch import TileDevice, get_arch
from torch_tile.carver.roller.hint import Hint
from torch_tile.carver.roller.rasterization import NoRasterization, Rasterization2DRow
from torch_tile.compiler.cost_model import estimate
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.hardware import Target
from torch_tile.ir.dtype import to_dtype
from torch_tile.language.program import PrimFunc

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat

WARP_TILES = (16, 32, 64)
K = TypeVar("K")
PANEL = 8  # blocks that a panel of a large product has


@dataclass_transform(field_specifiers=(field,))
def template(kind: type[K]) -> type[K]:
    """Make a dataclass that checks its arguments."""
    made: Any = dataclass(kind)
    made.__init__ = names_parameters(made.__init__)
    return cast(type[K], made)


@dataclass
class BaseTemplate:
    """A kind of kernel with its problem sizes, which suggests tilings."""

    arch: TileDevice | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError for a field that is no dtype."""
        for name in (each.name for each in fields(self) if each.name.endswith("dtype")):
            try:
                to_dtype(getattr(self, name))
            except ValueError:
                why = f"{name} is {getattr(self, name)!r}; expected a dtype, as 'float16'"
                raise ValueError(f"{type(self).__name__}: {why}") from None

    def with_arch(self, arch: TileDevice) -> BaseTemplate:
        """Return a copy of the template for a machine."""
        self.arch = arch
        return self

    def has_arch(self) -> bool:
        """Return whether a machine was chosen."""
        return self.arch is not None

    @property
    def target(self) -> Target:
        """Return the machine's target; without a machine the one that "auto" means."""
        return (self.arch or get_arch()).target

    def candidates(self) -> Iterator[Hint]:
        """List tilings that fit the sizes."""
        raise NotImplementedError

    def kernel(self, hint: Hint) -> PrimFunc:
        """Build the kernel with a tiling."""
        raise NotImplementedError

    def equivalent_function(self) -> PrimFunc:
        """Build the kernel with the first suggested tiling."""
        return self.kernel(self.recommend_hints(1)[0])

    @names_parameters
    def recommend_hints(self, topk: int = 10) -> list[Hint]:
        """Return the `topk` tilings that the cost model takes for the fastest, best first."""
        target, fitting = self.target, []
        for hint in self.candidates():
            found = estimate(self.kernel(hint).program, target, num_sms_of(target))
            if not found.refused:
                hint.seconds = found.seconds
                fitting.append(hint)
        return sorted(fitting, key=lambda hint: hint.seconds)[:topk]

    get_hardware_aware_configs = recommend_hints


@template
class MatmulTemplate(BaseTemplate):
    """C = A B of (M, K) and (K, N), or (N, K) with `trans_B`, (K, M) with `trans_A`."""

    M: int
    N: int
    K: int
    trans_A: bool = False
    trans_B: bool = True
    in_dtype: Any = "float16"
    out_dtype: Any = "float16"
    accum_dtype: Any = "float32"
    with_bias: bool = False

    def candidates(self) -> Iterator[Hint]:
        """List tiles of 1 to 8 warps with 2 to 4 stages. A step of K has 64 or 128 bytes."""
        bits, least = to_dtype(self.in_dtype).bits, min(self.M, self.N)
        steps = [8 * bytes // bits for bytes in (64, 128) if 8 * bytes // bits <= max(self.K, 512 // bits)]
        plan = Rasterization2DRow(PANEL) if self.M * self.N >= 1 << 22 else NoRasterization()
        warps = [size for size in WARP_TILES if size > 16 or least < 64]
        for wm, wn, rows, columns in product(warps, warps, (1, 2, 4), (1, 2, 4)):
            m, n = wm * rows, wn * columns
            if rows * columns > 8 or m >= 2 * max(self.M, 16) or n >= 2 * max(self.N, 16):
                continue
            for step, stages in product(steps, (2, 3, 4)):
                yield Hint([m, n], [wm, wn], [], [step], stages, plan, use_tc=True)

    def kernel(self, hint: Hint) -> PrimFunc:
        """Build the matrix product with tiles in shared memory."""
        (bm, bn), (wm, wn), bk = hint.block, hint.warp, hint.rstep[0]
        M, N, K, ta, tb = self.M, self.N, self.K, self.trans_A, self.trans_B

        @T.prim_func
        def matmul(
            A: T.Tensor((K, M) if ta else (M, K), self.in_dtype),
            B: T.Tensor((N, K) if tb else (K, N), self.in_dtype),
            C: T.Tensor((M, N), self.out_dtype),
        ):
            with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=bm // wm * (bn // wn) * 32) as (bx, by):
                a = T.alloc_shared((bk, bm) if ta else (bm, bk), self.in_dtype)
                b = T.alloc_shared((bn, bk) if tb else (bk, bn), self.in_dtype)
                c = T.alloc_fragment((bm, bn), self.accum_dtype)
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K, bk), num_stages=hint.pipeline_stage):
                    T.copy(A[k * bk, by * bm] if ta else A[by * bm, k * bk], a)
                    T.copy(B[bx * bn, k * bk] if tb else B[k * bk, bx * bn], b)
                    T.gemm(a, b, c, transpose_A=ta, transpose_B=tb)
                T.copy(c, C[by * bm, bx * bn])

        made: PrimFunc = matmul
        return made


@template
class ElementwiseTemplate(BaseTemplate):
    """One result for each element of a shape."""

    shape: list[int]
    dtype: Any = "float16"

    def candidates(self) -> Iterator[Hint]:
        """List pieces of a row, by 32 to 256 threads of 16 bytes or an element each."""
        columns, wide = self.shape[-1], 128 // to_dtype(self.dtype).bits
        for threads, each in product((32, 64, 128, 256), (1, wide, 2 * wide)):
            if threads * each < 2 * max(columns, 32):
                ones = [1] * (len(self.shape) - 1)
                yield Hint([*ones, threads * each], [], [*ones, threads], [])

    def kernel(self, hint: Hint) -> PrimFunc:
        """Build the kernel that adds one to each element."""
        columns, rows, size, threads = self.shape[-1], math.prod(self.shape[:-1]), hint.block[-1], hint.thread[-1]

        @T.prim_func
        def elementwise(A: T.Tensor((rows, columns), self.dtype), B: T.Tensor((rows, columns), self.dtype)):
            with T.Kernel(T.ceildiv(columns, size), rows, threads=threads) as (bx, by):
                for i in T.Parallel(size):
                    B[by, bx * size + i] = A[by, bx * size + i] + 1

        made: PrimFunc = elementwise
        return made


__all__ = ["BaseTemplate", "ElementwiseTemplate", "MatmulTemplate"]
