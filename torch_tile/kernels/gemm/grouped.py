# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products with a fused epilogue: each group of rows has its own matrix, as the experts of a mixture.

Rows are sorted by their group; `offsets` says where each ends, which only the device knows. row_groups.py plans the
tiles. A tile multiplies as many rows as it has room for, and stores those of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, dense_last, entry_function, machine_of, typical, vector_of
from torch_tile.kernels.epilogue.program import evaluate
from torch_tile.kernels.gemm.args import GroupedGemmArgs
from torch_tile.kernels.gemm.gemm import aux_views, matrix, multiply, place_of, tile_of
from torch_tile.kernels.gemm.spec import Spec, finish, parameters
from torch_tile.kernels.gemm.tiling import MOST_TILES, Config, Problem, buffers_of, config_for, panels_of
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.row_groups import COUNT, END, FIELDS, FIRST, GROUP, most_tiles, plan

CROWDED = 85  # rows: groups of fewer on average get tiles for half as many again, since a second tile reads all of b


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.grouped_gemm` in float32 (float64 for float64 `a`), rounded once, from `GroupedGemmArgs`."""
    args: GroupedGemmArgs[torch.Tensor] = GroupedGemmArgs(*given, **named)
    a, bs, offsets, aux, kinds, epilogue, dtype = args
    compute = compute_dtype(a.dtype)
    group = groups_of(offsets, a)
    products = by_groups(
        group, a, bs[0].shape[2], len(bs), offsets.shape[0], lambda g: [a.to(compute) @ b[g].to(compute) for b in bs]
    )
    return finished(products, group, aux, kinds, epilogue).to(dtype)


def by_groups(
    group: torch.Tensor,
    a: torch.Tensor,
    columns: int,
    count: int,
    groups: int,
    terms: Callable[[int], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Give every row its group's of the products `[S, columns]` of all rows by `terms`; rows behind get zeros."""
    products = [a.new_zeros((a.shape[0], columns), dtype=compute_dtype(a.dtype)) for _ in range(count)]
    for g in range(groups):
        products = [torch.where(group == g, term, p) for term, p in zip(terms(g), products, strict=True)]
    return products


def finished(
    products: Sequence[torch.Tensor], group: torch.Tensor, aux: Sequence[torch.Tensor], kinds: str, epilogue: str
) -> torch.Tensor:
    """Apply an epilogue to joined products, in their dtype."""
    rows, kinds = of_rows([x.to(products[0].dtype) for x in aux], kinds, group)
    return evaluate(epilogue, products, aux_views(rows, kinds))


def of_rows(aux: Sequence[torch.Tensor], kinds: str, group: torch.Tensor) -> tuple[list[torch.Tensor], str]:
    """Give every row its own row of operands of kind `g`, which become `t`. Rows behind the last get zeros."""
    rows = [
        torch.cat([x, x.new_zeros((1, x.shape[1]))])[group[:, 0]] if kind == "g" else x
        for x, kind in zip(aux, kinds, strict=True)
    ]
    return rows, kinds.replace("g", "t")


def of_groups(
    grads: Sequence[torch.Tensor | None], kinds: str, group: torch.Tensor, groups: int
) -> list[torch.Tensor | None]:
    """Sum gradients of `of_rows` over the rows of each group, for operands of kind `g`."""
    return [
        grad.new_zeros((groups + 1, grad.shape[1])).index_add(0, group[:, 0], grad)[:groups]
        if kind == "g" and grad is not None
        else grad
        for grad, kind in zip(grads, kinds, strict=True)
    ]


def groups_of(offsets: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return the group of each row of `a` as a column. Rows behind the last group get the number of groups."""
    rows = torch.arange(a.shape[0], device=a.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), rows, right=True)[:, None]


@dataclass(frozen=True)
class Operands:
    """The parameters of a grouped kernel besides a and the result: bs, auxiliary operands, offsets and tile table."""

    spec: Spec
    all: Sequence[Any]

    @staticmethod
    def types(spec: Spec, m: Any, n: Any, k: Any) -> tuple[Any, list[Any]]:
        """Return the types of a and of the other operands."""
        groups, tiles = T.dynamic("groups, tiles")
        a_type, b_types, aux_types = spec.operand_types(1, m, n, k, groups)
        return a_type, [*b_types, *aux_types, T.Tensor((groups,), "int32"), T.Tensor((tiles, FIELDS), "int32")]

    @property
    def bs(self) -> Sequence[Any]:
        """Return the matrices of all groups."""
        return self.all[: len(self.spec.b_transposed)]

    @property
    def aux(self) -> Sequence[Any]:
        """Return the auxiliary operands of the epilogue."""
        return self.all[len(self.spec.b_transposed) : -2]

    @property
    def offsets(self) -> Any:
        """Return the end row of each group."""
        return self.all[-2]

    @property
    def table(self) -> Any:
        """Return the table of tiles that the plan kernel writes."""
        return self.all[-1]


@T.macro
def multiply_tile(config: Config, a: Any, given: Operands, tile: Any, col: Any) -> Any:
    """Compute the products of a tile and the columns from `col` on. Rows behind the last group give zeros."""
    group, groups = given.table[tile, GROUP], given.offsets.shape[0]
    steps = T.if_then_else(group < groups, T.ceildiv(a.shape[2], config.block_k), 0)
    matrices = T.clamp(group, 0, groups - 1)
    return multiply(config, given.spec, a, given.bs, 0, given.table[tile, FIRST], col, 0, steps, matrices)


@T.macro
def finish_at(config: Config, given: Operands, products: Any, tile: Any, i: Any, j: Any, col: Any) -> Any:
    """Apply the epilogue to the element of row i of a tile and column j of its products."""
    values = [p[place_of(config, i, j)] for p in products]
    return finish(given.spec, values, given.aux, 0, given.table[tile, FIRST] + i, col, given.table[tile, GROUP])


@T.macro
def leave_staged(
    config: Config, given: Operands, products: Any, tile: Any, start: int, buffer: Any, out: Any, col: Any
) -> None:
    """Apply the epilogue to product columns, and store them through shared memory to the rows of the tile's group."""
    first, end = given.table[tile, FIRST], given.table[tile, END]
    result = T.alloc_fragment(buffer.shape, given.spec.out_dtype)
    for i, j in T.Parallel(*buffer.shape):
        result[i, j] = finish_at(config, given, products, tile, i, start + j, col + j)
    T.copy(result, buffer)
    for i, j in T.Parallel(*buffer.shape):
        if first + i < end:
            out[0, first + i, col + j] = buffer[i, j]


@library_jit
def grouped_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ b0[group], ..., aux)`. Each block makes one tile."""
    bm, bn = config.block_m, config.block_n
    _, m, n, k = spec.sizes()
    a_type, types = Operands.types(spec, m, n, k)

    @T.prim_func
    def grouped_gemm(a: a_type, *operands: types, out: T.Tensor((1, m, n), spec.out_dtype)):
        given = Operands(spec, operands)
        plan(given.offsets, given.table, m, bm)
        with T.Kernel(T.ceildiv(n, bn), given.table.shape[0], threads=config.threads) as (bx, tile):
            if config.panel:
                T.use_swizzle(config.panel)
            products = multiply_tile(config, a, given, tile, bx * bn)
            if config.staged:
                buffer = T.alloc_shared((bm, bn), spec.out_dtype)
                leave_staged(config, given, products, tile, 0, buffer, out, bx * bn)
            else:
                first, end = given.table[tile, FIRST], given.table[tile, END]
                for i, j in T.Parallel(bm, bn):
                    if first + i < end:
                        out[0, first + i, bx * bn + j] = finish_at(config, given, products, tile, i, j, bx * bn + j)

    return grouped_gemm


@library_jit
def persistent_grouped_matmul(config: Config, spec: Spec) -> Any:
    """Build the persistent kernel: `config.blocks` blocks take tile after tile, as in `gemm.persistent_matmul`."""
    bm, bn = config.block_m, config.block_n
    _, m, n, k = spec.sizes()
    a_type, types = Operands.types(spec, m, n, k)
    panels = panels_of(config, spec.out_dtype.itemsize)

    @T.prim_func
    def grouped_gemm(a: a_type, *operands: types, out: T.Tensor((1, m, n), spec.out_dtype)):
        given = Operands(spec, operands)
        plan(given.offsets, given.table, m, bm)
        with T.Kernel(config.blocks, threads=config.threads) as block:
            rows, columns = given.table[0, COUNT], T.ceildiv(n, bn)
            buffers = [T.alloc_shared((bm, width), spec.out_dtype) for width in buffers_of(panels)]
            tiles = T.min(rows * columns, MOST_TILES)
            for iteration in T.serial(T.ceildiv(tiles - block, config.blocks)):
                _, tile, bx = tile_of(block + iteration * config.blocks, rows, columns, config.panel)
                products = multiply_tile(config, a, given, tile, bx * bn)
                for start, _, buffer in panels:
                    leave_staged(config, given, products, tile, start, buffers[buffer], out, bx * bn + start)

    return grouped_gemm


def average(groups: int, rows: int) -> tuple[int, int]:
    """Return how many groups may have rows, and for how many rows of each to choose tiles (see CROWDED)."""
    groups = max(1, min(groups, rows))
    each = -(-rows // groups)
    return groups, each + each // 2 if each <= CROWDED else each


def tiling_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a batch of products with the groups' average number of rows.

    Sums are not shared: groups are many. None if there is no tiling.
    """
    problem = typical(problem)
    groups, rows = average(problem.batch, problem.m)
    config = config_for(replace(problem, batch=groups, m=rows, ragged=True), machine)
    if config is None or config.splits == 1:
        return config
    return replace(config, splits=1, cluster=False)


@entry_function(
    GroupedGemmArgs, reference, lambda args: args.a.new_empty((args.a.shape[0], args.bs[0].shape[2]), dtype=args.dtype)
)
def grouped_gemm(args: GroupedGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `tiling_for`."""
    a, bs, offsets, aux, kinds, epilogue, _ = args
    if not a.shape[1] or not offsets.shape[0]:
        return False
    if not out.numel():
        return True
    (m, n), (groups, k), machine = out.shape, bs[0].shape[:2], machine_of(a)
    a = dense_last(a)
    matrices = [matrix(b) for b in bs]
    views, specs = parameters(aux, kinds, machine.is_gpu)
    operands = (a[None], *(b for b, _ in matrices))
    vector = vector_of((*operands, out), (n, k)) if machine.is_gpu else 1
    spec = Spec(a.dtype, out.dtype, False, tuple(transposed for _, transposed in matrices), specs, epilogue, vector)
    config = config or tiling_for(Problem(a.dtype, groups, m, n, k, len(bs), False, vector > 1, out=out.dtype), machine)
    if config is None:
        return False
    table = offsets.new_empty((most_tiles(m, groups, config.block_m), FIELDS))
    kernel = persistent_grouped_matmul if config.blocks else grouped_matmul
    machine.kernel(kernel)(config, spec)(*operands, *views, offsets.contiguous(), table, out[None])
    return True
