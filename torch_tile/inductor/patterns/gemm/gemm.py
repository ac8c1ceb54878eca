# SPDX-License-Identifier: Apache-2.0
"""Replace matrix products, each with its longest pointwise epilogue, by `tile.gemm`.

Runs before Inductor's own rewrites of addmm. Norms and attention have been found by then, so that an epilogue never
takes a part of these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, Rewrite, dtype, erase_dead, is_call, is_tensor, ordered, shape
from torch_tile.inductor.patterns.gemm import column_slices, epilogue
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select import cost_rules
from torch_tile.ops.checks import FLOATING

# Epilogues with which ATen is as fast: ATen adds biases itself, and Inductor fuses residuals into a norm behind.
PLAIN = {"ret acc0", "v0=add(acc0,x0);ret v0", "v0=add(acc0,x0);v1=add(x1,v0);ret v1"}


@family("gemm", "post_grad", 540)
def match(context: Context) -> None:
    """Replace every product of floating matrices."""
    taken: set[Node] = set()
    for node in list(context.graph.nodes):
        if not is_call(node, *epilogue.PRODUCTS) or node in taken or not node.users:
            continue
        if why := wrong_dtype(node):
            context.miss("gemm", node, why)
        elif epilogue.bias_kind(node) is None:
            why = Miss(
                "what is added to the product does not broadcast along rows or columns",
                "make it a floating tensor [N], [M, 1] or [M, N]",
            )
            context.miss("gemm", node, why)
        else:
            taken.update(replace(context, node))


def wrong_dtype(product: Node) -> Miss | None:
    """Return a Miss if no kernel has the dtype of the product or of an operand, else None."""
    factors = [x for x in product.args if isinstance(x, Node) and is_tensor(x)]
    is_plain = is_call(product, *epilogue.PRODUCTS)  # what is added comes first; a grouped product has its ends behind
    both = factors[-2:] if is_plain else factors[:2]
    tensors = (product, *(factors if is_plain else both))
    wrong = next((dtype(x) for x in tensors if dtype(x) not in FLOATING), None)
    if wrong is None:
        if len({dtype(x) for x in both}) > 1:  # eager torch refuses it, while torch's fake kernels do not
            return Miss("operands of two dtypes", "cast both operands to one dtype")
        return None
    return Miss(f"no kernel for {wrong}", "cast both operands to bfloat16, float16, float32 or float64")


def region_of(product: Node, order: dict[Node, int]) -> tuple[epilogue.Region, Node]:
    """Return the region of one kernel: the column parts of a product if they meet again, else the whole product."""
    parts = column_slices.parts_of(product)
    for part in parts:
        region, out = epilogue.region_of(part, order)
        if set(region.products) == set(parts):
            return region, out
    return epilogue.region_of(product, order)


def replace(context: Context, seed: Node, offsets: Callable[[Rewrite], Node] | None = None) -> list[Node]:
    """Replace one product and its epilogue; return the replaced products.

    `offsets` makes the node with the ends of the row groups, if the product is one of groups.
    """
    family, op = ("gemm", torch.ops.tile.gemm) if offsets is None else ("grouped", torch.ops.tile.grouped_gemm)
    region, out = region_of(seed, ordered(context.graph))
    epilogue.tell_wordless(context, family, out)
    rewrite = Rewrite(out)
    aux, kinds, text = epilogue.write_program(region, out, rewrite)
    bs = [epilogue.right(p) for p in region.products]
    if seed not in region.products:
        bs = [column_slices.columns_of(b, p, rewrite) for b, p in zip(bs, region.products, strict=True)]
    ends = [] if offsets is None else [offsets(rewrite)]
    new = rewrite.call(op.default, epilogue.left(seed), bs, *ends, aux, kinds, text, dtype(out))
    new = rewrite.reshape(new, shape(out))
    layers = f"{len(bs)} products, " if len(bs) > 1 else ""
    what = f"tile.{op.__name__}({layers}{text or 'no epilogue'})"
    if offsets is None and context.settings.select == "fastest" and not context.settings.thorough and text in PLAIN:
        why = "a plain product: ATen's is as fast, so only max-autotune times it"
        context.note(family, report.KEPT, what, seed, why, rewrite.nodes)
        rewrite.discard()
        return []
    sure = cost_rules.with_epilogue(rewrite.nodes)
    if not context.replace(rewrite, family, [(out, new)], what, seed, sure):
        return []
    erase_dead(out)
    return region.products
