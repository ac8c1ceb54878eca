# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a fused epilogue: `epilogue(a @ b0, a @ b1, ..., aux)`.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns a fresh contiguous one. A compiled
kernel serves every shape: what is compiled in is a `Spec` (dtypes, orders in memory, the epilogue) and a `Config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype as compute_dtype, entry_function, is_unit, machine_of, vector_of
from torch_tile.kernels.epilogue.program import evaluate
from torch_tile.kernels.gemm.args import GemmArgs
from torch_tile.kernels.gemm.spec import Spec, finish, parameters
from torch_tile.kernels.gemm.tiling import MOST_TILES, Config, Problem, buffers_of, config_for, panels_of
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.split_k import share_with_cluster, sum_in_cluster, sum_of_parts


def aux_views(aux: Sequence[torch.Tensor], kinds: str) -> list[torch.Tensor]:
    """View the auxiliary operands in shapes that broadcast to the product. Kind `s` becomes 0-d."""
    return [x.reshape(()) if kind == "s" else x for x, kind in zip(aux, kinds, strict=True)]


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.gemm` in float32 (float64 for float64 `a`), rounded once, from `GemmArgs`.

    An operand of kind `o` is the `out` of `gemm`, which is read before it is written.
    """
    args: GemmArgs[torch.Tensor] = GemmArgs(*given, **named)
    a, bs, aux, kinds, epilogue, dtype = args
    compute = compute_dtype(a.dtype)
    products = [torch.matmul(a.to(compute), b.to(compute)) for b in bs]
    out = evaluate(epilogue, products, [x.to(compute) for x in aux_views(aux, kinds)])
    return out.to(dtype).clone(memory_format=torch.contiguous_format)


@T.macro
def multiply(
    config: Config,
    spec: Spec,
    a: Any,
    bs: Sequence[Any],
    bz: Any,
    row: Any,
    col: Any,
    first: Any,
    last: Any,
    group: Any = None,
) -> Any:
    """Compute a tile of `a @ b` over the steps `first <= step < last` of K. The batch of b is `bz` or `group`."""
    which = bz if group is None else group
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    products = []
    a_tile = T.alloc_shared((bk, bm) if spec.a_transposed else (bm, bk), spec.dtype)
    b_tiles = []
    for transposed in spec.b_transposed:
        b_tile = T.alloc_shared((bn, bk) if transposed else (bk, bn), spec.dtype)
        product = T.alloc_fragment((bn, bm) if config.transposed else (bm, bn), compute_dtype(spec.dtype))
        T.clear(product)
        b_tiles.append(b_tile)
        products.append(product)
    for step in T.Pipelined(first, last, num_stages=config.stages):
        k = step * bk
        T.copy(a[bz, k, row] if spec.a_transposed else a[bz, row, k], a_tile)
        for b, b_tile, product, transposed in zip(bs, b_tiles, products, spec.b_transposed, strict=True):
            T.copy(b[which, col, k] if transposed else b[which, k, col], b_tile)
            if config.transposed:
                T.gemm(b_tile, a_tile, product, transpose_A=not transposed, transpose_B=not spec.a_transposed)
            else:
                T.gemm(a_tile, b_tile, product, transpose_A=spec.a_transposed, transpose_B=transposed)
    return products


def place_of(config: Config, i: Any, j: Any) -> tuple[Any, Any]:
    """Return the place of row i and column j in a tile's sums, which may be made as their transpose."""
    return (j, i) if config.transposed else (i, j)


@library_jit
def matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ b0, ..., aux)`. Each block makes one tile."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    batch, m, n, k = spec.sizes()
    a_type, b_types, aux_types = spec.operand_types(batch, m, n, k)

    @T.prim_func
    def gemm(a: a_type, *operands: [*b_types, *aux_types], out: T.Tensor((batch, m, n), spec.out_dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), batch, threads=config.threads) as (bx, by, bz):
            if config.panel:
                T.use_swizzle(config.panel)
            bs, aux = operands[: len(b_types)], spec.with_result(operands[len(b_types) :], out)
            products = multiply(config, spec, a, bs, bz, by * bm, bx * bn, 0, T.ceildiv(k, bk))
            if config.staged:
                result = T.alloc_fragment((bm, bn), spec.out_dtype)
                staged = T.alloc_shared((bm, bn), spec.out_dtype)
                for i, j in T.Parallel(bm, bn):
                    values = [p[place_of(config, i, j)] for p in products]
                    result[i, j] = finish(spec, values, aux, bz, by * bm + i, bx * bn + j)
                T.copy(result, staged)
                T.copy(staged, out[bz, by * bm, bx * bn])
            else:
                for i, j in T.Parallel(bm, bn):
                    row = by * bm + i
                    col = bx * bn + j
                    out[bz, row, col] = finish(spec, [p[place_of(config, i, j)] for p in products], aux, bz, row, col)

    return gemm


@T.macro
def tile_of(number: Any, rows: Any, columns: Any, panel: int) -> Any:
    """Map a tile's number to its batch, row and column, in bands of `panel` rows for L2 reuse."""
    panel = max(panel, 1)
    matrix = T.min(rows * columns, MOST_TILES)
    bz, inside = number // matrix, number % matrix
    band, place = inside // (panel * columns), inside % (panel * columns)
    height = T.max(T.min(rows - band * panel, panel), 1)
    return bz, band * panel + place % height, place // height


@library_jit
def persistent_matmul(config: Config, spec: Spec) -> Any:
    """Build the persistent kernel: `config.blocks` blocks take tile after tile and overlap one tile's store with the
    next one's loads.

    An epilogue that only adds to the result before reads nothing: the stores add, after the product is rounded.
    """
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    batch, m, n, k = spec.sizes()
    a_type, b_types, aux_types = spec.operand_types(batch, m, n, k)
    panels = panels_of(config, spec.out_dtype.itemsize)

    @T.prim_func
    def gemm(a: a_type, *operands: [*b_types, *aux_types], out: T.Tensor((batch, m, n), spec.out_dtype)):
        with T.Kernel(config.blocks, threads=config.threads) as block:
            bs, aux = operands[: len(b_types)], spec.with_result(operands[len(b_types) :], out)
            rows, columns = T.ceildiv(m, bm), T.ceildiv(n, bn)
            staged = [T.alloc_shared((bm, width), spec.out_dtype) for width in buffers_of(panels)]
            tiles = T.min(batch * rows * columns, MOST_TILES)
            for iteration in T.serial(T.ceildiv(tiles - block, config.blocks)):
                bz, by, bx = tile_of(block + iteration * config.blocks, rows, columns, config.panel)
                products = multiply(config, spec, a, bs, bz, by * bm, bx * bn, 0, T.ceildiv(k, bk))
                for start, width, buffer in panels:
                    col = bx * bn + start
                    result = T.alloc_fragment((bm, width), spec.out_dtype)
                    for i, j in T.Parallel(bm, width):
                        values = [p[place_of(config, i, start + j)] for p in products]
                        if spec.adds:
                            result[i, j] = T.cast(values[0], spec.out_dtype)
                        else:
                            result[i, j] = finish(spec, values, aux, bz, by * bm + i, col + j)
                    T.copy(result, staged[buffer])
                    if spec.adds:
                        T.tma_copy(staged[buffer], out[bz, by * bm, col], combine="add")
                    else:
                        T.copy(staged[buffer], out[bz, by * bm, col])

    return gemm


@library_jit
def split_matmul(config: Config, spec: Spec) -> Any:
    """Build the split-K kernel for few tiles and a long K: `splits` blocks store partial sums of each tile."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    batch, m, n, k = spec.sizes()
    splits = T.dynamic("splits")
    a_type, b_types, aux_types = spec.operand_types(batch, m, n, k)
    part_type = T.Tensor((splits, len(b_types), batch, m, n), compute_dtype(spec.dtype))

    @T.prim_func
    def split_gemm(
        a: a_type, *operands: [*b_types, *aux_types], parts: part_type, out: T.Tensor((batch, m, n), spec.out_dtype)
    ):
        bs, aux = operands[: len(b_types)], spec.with_result(operands[len(b_types) :], out)
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), batch * splits, threads=config.threads) as (bx, by, bz):
            split = bz // batch
            steps_each = T.ceildiv(T.ceildiv(k, bk), splits)
            last = T.min(split * steps_each + steps_each, T.ceildiv(k, bk))
            products = multiply(config, spec, a, bs, bz % batch, by * bm, bx * bn, split * steps_each, last)
            for number, product in enumerate(products):
                for i, j in T.Parallel(bm, bn):
                    parts[split, number, bz % batch, by * bm + i, bx * bn + j] = product[place_of(config, i, j)]
        with T.Kernel(T.ceildiv(n, bn), m, batch, threads=config.threads) as (bx, row, bz):
            sums = [sum_of_parts(parts, (number, bz, row), bx * bn, bn) for number, _ in enumerate(b_types)]
            for j in T.Parallel(bn):
                col = bx * bn + j
                out[bz, row, col] = finish(spec, [total[j] for total in sums], aux, bz, row, col)

    return split_gemm


@library_jit
def cluster_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel for few tiles and a long K: a cluster's blocks split K and reduce in shared memory."""
    bm, bn, bk, count = config.block_m, config.block_n, config.block_k, config.splits
    batch, m, n, k = spec.sizes()
    a_type, b_types, aux_types = spec.operand_types(batch, m, n, k)
    length, width = (bn, bm) if config.transposed else (bm, bn)
    own = -(-length // count)  # rows

    @T.prim_func
    def cluster_gemm(a: a_type, *operands: [*b_types, *aux_types], out: T.Tensor((batch, m, n), spec.out_dtype)):
        bs, aux = operands[: len(b_types)], spec.with_result(operands[len(b_types) :], out)
        rows, columns, steps = T.ceildiv(m, bm), T.ceildiv(n, bn), T.ceildiv(k, bk)
        with T.Kernel(batch * rows * columns * count, threads=config.threads, cluster_dims=count) as block:
            split, tile = block % count, block // count
            by, bx, bz = tile // columns % rows, tile % columns, tile // columns // rows
            steps_each = T.ceildiv(steps, count)
            last = T.min(split * steps_each + steps_each, steps)
            products = multiply(config, spec, a, bs, bz, by * bm, bx * bn, split * steps_each, last)
            parts = share_with_cluster(products)
            for i, j in T.Parallel(own, width):
                place = split * own + i
                row, col = by * bm + (j if config.transposed else place), bx * bn + (place if config.transposed else j)
                sums = [sum_in_cluster(part, (T.min(place, length - 1), j), count) for part in parts]
                if place < length:
                    out[bz, row, col] = finish(spec, sums, aux, bz, row, col)
            T.cluster_sync()  # until then others read this block's part

    return cluster_gemm


@library_jit
def row_times_matrix(config: Config, spec: Spec) -> Any:
    """Build the matrix-vector kernel for one row of a, and bs stored `[batch, N, K]`."""
    bn, bk = config.block_n, config.block_k
    accum = compute_dtype(spec.dtype)
    batch, m, n, k = spec.sizes()
    a_type, b_types, aux_types = spec.operand_types(batch, m, n, k)

    @T.prim_func
    def gemv(a: a_type, *operands: [*b_types, *aux_types], out: T.Tensor((batch, m, n), spec.out_dtype)):
        with T.Kernel(T.ceildiv(n, bn), m, batch, threads=config.threads) as (bx, row, bz):
            bs, aux = operands[: len(b_types)], spec.with_result(operands[len(b_types) :], out)
            # Converted once on the CPU; GPUs want it as wide as the matrix beside it, and copied ahead.
            a_tile = T.alloc_shared((bk,), spec.dtype if spec.vector > 1 else accum)
            products = []
            for b in bs:
                parts = T.alloc_fragment((bn, bk), accum)
                product = T.alloc_fragment((bn,), accum)
                T.clear(parts)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages):
                    T.copy(a[bz, row, step * bk], a_tile)
                    for j, c in T.Parallel(bn, bk, eviction_policy="no_allocate"):  # b is read once
                        parts[j, c] += T.cast(b[bz, bx * bn + j, step * bk + c], accum) * T.cast(a_tile[c], accum)
                T.reduce_sum(parts, product, dim=1)
                products.append(product)
            for j in T.Parallel(bn):
                col = bx * bn + j
                out[bz, row, col] = finish(spec, [p[j] for p in products], aux, bz, row, col)

    return gemv


@entry_function(
    GemmArgs, reference, lambda args: args.a.new_empty((*args.a.shape[:-1], args.bs[0].shape[-1]), dtype=args.dtype)
)
def gemm(args: GemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `config_for`."""
    if out.numel():
        _run(args, out, config)
    return True


def _run(args: GemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None) -> None:
    """Launch `gemm` into `out`, which must be contiguous and not empty."""
    if not args.a.shape[-1]:  # tensor maps cannot describe tensors without elements
        out.copy_(reference(*args))
        return
    whole, kinds, epilogue = out, args.kinds, args.epilogue
    a, bs, aux, out = as_batches(args.a, args.bs, args.aux, kinds, out)
    batch, m, n = out.shape
    a, a_transposed = matrix(a)
    matrices = [matrix(b) for b in bs]
    operands = [b.expand(batch, -1, -1) for b, _ in matrices]
    k = a.shape[1 if a_transposed else 2]
    machine = machine_of(a)
    aux, specs = parameters(aux, kinds, machine.is_gpu)
    vector = vector_of((a, *operands, out), (n, k, m) if a_transposed else (n, k)) if machine.is_gpu else 1
    b_transposed = tuple(transposed for _, transposed in matrices)
    spec = Spec(a.dtype, out.dtype, a_transposed, b_transposed, specs, epilogue, vector)
    row = bool(m == 1) and not a_transposed and all(b_transposed)  # a comparison of symbols could not be remembered
    along_k = all(b_transposed) and not a_transposed
    problem = Problem(a.dtype, batch, m, n, k, len(bs), row, vector > 1, out=out.dtype, along_k=along_k)
    config = config or config_for(problem, machine)
    if config is None:
        whole.copy_(reference(*args))
        return
    if config.splits == 1:
        kernel = row_times_matrix if config.block_m == 1 else persistent_matmul if config.blocks else matmul
        machine.kernel(kernel)(config, spec)(a, *operands, *aux, out)
        return
    if config.cluster:
        machine.kernel(cluster_matmul)(config, spec)(a, *operands, *aux, out)
        return
    parts = out.new_empty((config.splits, len(bs), batch, m, n), dtype=compute_dtype(a.dtype))
    # The number of blocks that share a sum is a run-time value, so that one kernel serves all numbers.
    machine.kernel(split_matmul)(replace(config, splits=2), spec)(a, *operands, *aux, parts, out)


def as_batches(
    a: torch.Tensor, bs: Sequence[torch.Tensor], aux: Sequence[torch.Tensor], kinds: str, out: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Give a, bs and out one batch dimension. Batches that share bs become rows of a matrix if views allow it."""
    shared = a.dim() == 3 and all(b.shape[0] == 1 for b in bs)
    if shared and all(_flattens(x) for x in (a, *(x for x, kind in zip(aux, kinds, strict=True) if kind in "tco"))):
        a, out = a.flatten(0, 1), out.flatten(0, 1)
        bs = [b[0] for b in bs]
        aux = [x.flatten(0, 1) if kind in "tco" else x for x, kind in zip(aux, kinds, strict=True)]
    if a.dim() == 2:
        a, out, bs = a[None], out[None], [b[None] for b in bs]
    return a, list(bs), list(aux), out


def _flattens(x: torch.Tensor) -> bool:
    """Return whether the first two dimensions can be viewed as one."""
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def matrix(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return `x` as a row-major matrix, and whether it was transposed. `x` is copied if no dimension is dense."""
    if is_unit(x):
        return x, False
    if is_unit(x.mT):
        return x.mT, True
    return x.contiguous(), False
