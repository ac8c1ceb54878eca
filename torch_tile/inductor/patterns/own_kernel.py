# SPDX-License-Identifier: Apache-2.0
"""Fuse the pointwise operations behind a user's kernel into the kernel's stores.

Runs behind the products and norms, which take operands of their own first. A kernel whose stores take no epilogue is
left as it is, and `explain` tells why. So is a kernel of a package: the process that loads it may have made the kernel,
but never the fused one.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_tile.diagnostics.errors import TileError
from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, Rewrite, dtype, erase_dead, is_tensor, named_args, ordered, shape
from torch_tile.inductor.patterns.gemm import epilogue
from torch_tile.kernel import JITKernel
from torch_tile.kernels.epilogue.fuse_into_stores import CannotFuseError
from torch_tile.ops import own_kernel
from torch_tile.user_op import NAMESPACE, kernel_of


@family("own_kernel", "post_grad", 650)
def match(context: Context) -> None:
    """Fuse what follows each call of a user's kernel."""
    for node in list(context.graph.nodes):
        if getattr(node.target, "namespace", "") == NAMESPACE and is_tensor(node) and node.users:
            kernel = kernel_of(node.target.name())  # type: ignore[union-attr]
            if kernel is not None:
                _fuse(context, node, kernel)


def _fuse(context: Context, node: Node, kernel: JITKernel) -> None:
    """Fuse the longest epilogue of one call, if there is one."""
    epilogue.tell_wordless(context, "own_kernel", node)
    found = epilogue.grow(node, ordered(context.graph), joins=lambda product: False)
    if found is None:
        return
    region, out = found
    rewrite = Rewrite(out)
    aux, kinds, text = epilogue.write_program(region, out, rewrite)
    with context.recording_miss("own_kernel", node):
        if why := _refusal(kernel, kinds, text, aux, dtype(out)):
            rewrite.discard()
            raise Miss(f"the kernel {kernel.__name__} takes no epilogue: {why}", "store its result by T.copy, once")
        args = list(named_args(node, node.target).values())
        lists = own_kernel.by_type(kernel, args)
        op = getattr(torch.ops, NAMESPACE).with_epilogue.default
        new = rewrite.call(op, node.target.name(), *lists, aux, kinds, text, dtype(out))  # type: ignore[union-attr]
        new = rewrite.reshape(new, shape(out))
        if context.replace(rewrite, "own_kernel", [(out, new)], f"{kernel.__name__}({text})", node):
            erase_dead(out)


def _refusal(kernel: JITKernel, kinds: str, text: str, aux: list[Node], to: torch.dtype) -> str:
    """Return why a kernel takes no epilogue; empty if it does. The fused kernel is compiled now."""
    if compat.in_package():
        return "a package is loaded where only the kernel itself may be there"
    try:
        fused = own_kernel.with_epilogue(kernel, kinds, text, tuple(map(dtype, aux)), to)
    except CannotFuseError as why:
        return str(why)
    except TileError as problem:
        return str(problem).splitlines()[0]
    return "its registers would not suffice" if fused.n_spills > kernel.n_spills else ""
