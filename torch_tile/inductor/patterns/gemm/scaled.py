# SPDX-License-Identifier: Apache-2.0
"""Replace torch's products of float8 by `tile.scaled_gemm` and `tile.grouped_scaled_gemm`, with their epilogue.

Both spellings match: `torch._scaled_mm`, and `F.scaled_mm` with a recipe for each operand's scales; and so do those of
groups of rows with scales for rows and columns. Groups of K (`[M, K]` by `[K, N]`) become `tile.k_grouped_scaled_gemm`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, Rewrite, arg, aten, dtype, is_call, known, ordered, shape
from torch_tile.inductor.patterns.gemm import epilogue
from torch_tile.inductor.patterns.gemm.grouped import int32_ends
from torch_tile.ops import checks
from torch_tile.ops.families.scaled_gemm import FLOAT8, GROUP

SINGLE = [aten._scaled_grouped_mm.default] if hasattr(aten, "_scaled_grouped_mm") else []  # one scale an operand
FIX = "use float8 operands with scales of the matrix, of rows and columns, or of runs and blocks of 128"
BIASED = "biased"  # name of the product with its bias in an epilogue


@dataclass(frozen=True)
class Product:
    """The operands of a product: scales `[1, M or M / 128, 1 or K / 128]` and `[1 or K / 128, 1, N or N / 128]`.

    Products of groups have `offsets` and scales `[S]` and `[G, N]`; of groups of K, `[G * M]` and `[G * N]`.
    """

    a: Node
    b: Node
    scale_a: Node
    scale_b: Node
    bias: Node | None
    offsets: Node | None = None


def product_of(node: Node) -> Product:
    """Read a product. Raises `Miss` for one without a kernel."""
    scales: list[Any] = [arg(node, "scale_a"), arg(node, "scale_b")]
    if is_call(node, aten._scaled_mm.default, *SINGLE):
        if arg(node, "scale_result") is not None:
            raise Miss("the result is scaled", "leave scale_result out", at=node)
    else:
        swizzles = [*arg(node, "swizzle_a"), *arg(node, "swizzle_b")]
        if any(swizzles) or any(len(given) != 1 for given in scales):
            raise Miss("scales are swizzled, or there are two for an operand", FIX, at=node)
        scales = [given[0] for given in scales]
    a, b = node.args[:2]
    assert isinstance(a, Node) and isinstance(b, Node)
    if dtype(a) not in FLOAT8 or dtype(b) not in FLOAT8 or dtype(node) not in checks.FLOATING:
        raise Miss(f"{dtype(a)} by {dtype(b)} into {dtype(node)}", FIX, at=node)
    if is_call(node, *epilogue.SCALED_GROUPED):
        return _grouped(node, a, b, scales)
    (m, k), n = shape(a), shape(b)[1]
    for scale, sizes, outer in ((scales[0], (m, k), 0), (scales[1], (k, n), 1)):
        if dtype(scale) != torch.float32 or not _fits(scale, sizes, outer):
            raise Miss(f"scales of {dtype(scale)} {list(shape(scale))}", FIX, at=node)
    return Product(a, b, scales[0], scales[1], arg(node, "bias"))


def _grouped(node: Node, a: Node, b: Node, scales: list[Node]) -> Product:
    """Read a product of groups of rows."""
    offsets = arg(node, "offs")
    if len(shape(a)) != 2 or offsets is None or arg(node, "bias") is not None:
        fix = "give it [S, K] and [G, K, N], or [M, K] and [K, N], with offs and without a bias"
        raise Miss(f"{list(shape(a))} by {list(shape(b))}", fix, at=node)
    groups, rows, columns = shape(offsets)[0], shape(a)[0], shape(b)[-1]
    by_k = len(shape(b)) == 2
    wanted = ((groups * rows,), (groups * columns,)) if by_k else ((rows,), (groups, columns))
    for scale, sizes in zip(scales, wanted, strict=True):
        found = shape(scale)
        same = len(found) == len(sizes) and all(known(x == y) for x, y in zip(found, sizes, strict=True))
        if dtype(scale) != torch.float32 or not same:
            raise Miss(f"scales of {dtype(scale)} {list(found)}", "give a scale for each row and column", at=node)
    return Product(a, b, scales[0], scales[1], None, offsets)


def _fits(scale: Node, sizes: tuple[Any, Any], outer: int) -> bool:
    """Return whether scales are of a form that the operator takes; a number stands for `[1, 1]`."""
    found = shape(scale)
    if all(known(size == 1) for size in found):
        return True
    if len(found) != 2:
        return False
    return all(
        known(have == 1) or known(have == (size + GROUP - 1) // GROUP) or (dim == outer and known(have == size))
        for dim, (have, size) in enumerate(zip(found, sizes, strict=True))
    )


@family("scaled", "post_grad", 515)
def match(context: Context) -> None:
    """Replace every product of float8 matrices."""
    for node in list(context.graph.nodes):
        if not is_call(node, *epilogue.SCALED) or not node.users:
            continue
        with context.recording_miss("scaled", node):
            _replace(context, node, product_of(node))


def _replace(context: Context, node: Node, product: Product) -> None:
    """Replace one product and its epilogue."""
    if product.offsets is not None and len(shape(product.b)) == 2:
        _replace_by_k(context, node, product, product.offsets)
        return
    region, out = epilogue.region_of(node, ordered(context.graph), lambda other: False)
    epilogue.tell_wordless(context, "scaled", out)
    rewrite = Rewrite(out)
    aux, kinds, text = epilogue.write_program(region, out, rewrite)
    if product.bias is not None:
        first = f"{BIASED}=add(acc0,x{len(aux)})"
        text = f"{first};{re.sub(r'acc0', BIASED, text or 'ret acc0')}"
        aux, kinds = [*aux, product.bias], kinds + "r"
    aux = [rewrite.reshape(x, shape(x)[-2:]) for x in aux]
    if product.offsets is not None:
        _replace_grouped(context, node, product, product.offsets, (rewrite, out), (aux, kinds, text, dtype(out)))
        return
    scales = [
        rewrite.reshape(x, shape(x) if len(shape(x)) == 2 else (1, 1)) for x in (product.scale_a, product.scale_b)
    ]
    call = product.a, product.b, *scales, aux, kinds, text, dtype(out)
    new = rewrite.reshape(rewrite.call(torch.ops.tile.scaled_gemm.default, *call), shape(out))
    form = " by ".join(str(list(shape(x))) for x in scales)
    what = f"tile.scaled_gemm({dtype(product.a)}, scales {form}, {text or 'no epilogue'})"
    context.replace(rewrite, "scaled", [(out, new)], what, node)


def _replace_by_k(context: Context, node: Node, product: Product, offsets: Node) -> None:
    """Replace one product whose sum runs over the columns of each group; it takes no epilogue."""
    rewrite, groups = Rewrite(node), shape(offsets)[0]
    scale_a = rewrite.reshape(product.scale_a, (groups, shape(product.a)[0], 1))
    scale_b = rewrite.reshape(product.scale_b, (groups, 1, shape(product.b)[1]))
    call = product.a, product.b, scale_a, scale_b, int32_ends(rewrite, offsets, product.b), dtype(node)
    new = rewrite.call(torch.ops.tile.k_grouped_scaled_gemm.default, *call)
    context.replace(rewrite, "scaled", [(node, new)], f"tile.k_grouped_scaled_gemm({dtype(product.a)})", node)


def _replace_grouped(
    context: Context, node: Node, product: Product, offsets: Node, place: tuple[Rewrite, Node], rest: tuple[Any, ...]
) -> None:
    """Replace one product of groups of rows; `rest` are the arguments of its epilogue."""
    rewrite, out = place
    groups, _, columns = shape(product.b)
    scale_a = rewrite.reshape(product.scale_a, (shape(product.a)[0], 1))
    scale_b = rewrite.reshape(product.scale_b, (groups, 1, columns))
    ends = int32_ends(rewrite, offsets, product.a)
    op = torch.ops.tile.grouped_scaled_gemm.default
    new = rewrite.call(op, product.a, product.b, scale_a, scale_b, ends, *rest)
    what = f"tile.grouped_scaled_gemm({dtype(product.a)}, {rest[2] or 'no epilogue'})"
    context.replace(rewrite, "scaled", [(out, rewrite.reshape(new, shape(out)))], what, node)
