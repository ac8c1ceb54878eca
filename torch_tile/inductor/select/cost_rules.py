# SPDX-License-Identifier: Apache-2.0
"""Skip a contest whose winner follows from the sizes, because compiling Inductor's version takes half a second.

Inductor sometimes stores a large result between two of its kernels and loads it again. Our kernel wins where this takes
long compared with the products, which both compute about equally fast. A norm is a tie at best where Inductor also
reads its rows only once and the tensor is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from torch_tile.hardware import VECTOR_BYTES, Target
from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten, is_call, known, named_args, val
from torch_tile.inductor.select.roofline import Peak, flops_of, peak_of, sizes_of
from torch_tile.kernels.measured_rules import verdict

EFFICIENCY = 0.7  # of the arithmetic of a GPU at its peak: what large products reach
LEAST_BYTES = 1 << 25  # stored and loaded again: less may stay in the second-level cache
ALIGNED = VECTOR_BYTES // 2  # elements of 2 bytes
HALVES = (torch.float16, torch.bfloat16)

gemm = torch.ops.tile.gemm.default
ATTENTION = torch.ops.tile.attention.default, torch.ops.tile.attention_lse.default


def measured(device: torch.device) -> Peak | None:
    """Return the peak of a GPU that rules were measured on; None for other devices."""
    peak = peak_of(device)
    return peak if peak is not None and Target.of_device(device).has_wgmma else None


def rule(choice: str, tensor: Node, **quantities: float) -> Any:
    """Return the measured verdict for the device of a tensor; None for devices that were not measured."""
    device = val(tensor).device
    return verdict(choice, Target.of_device(device), None, **quantities) if measured(device) is not None else None


def with_epilogue(nodes: Sequence[Node]) -> str:
    """Return the reason why a product with an epilogue beats products and a pointwise kernel, "" if unknown."""
    op = _only(nodes, gemm)
    if op is None:
        return ""
    a, bs = cast("tuple[Node, list[Node]]", op.args[:2])
    rows, columns, inner = math.prod(sizes_of(op)[:-1]), sizes_of(op)[-1], sizes_of(a)[-1]
    share = rule("gemm.saved", a, rows=rows, columns=columns, inner=inner)
    if share is None or not all(map(_is_even, (a, *bs))):
        return ""
    stored = len(bs) * rows * columns
    return _if_storing_is_slow(op, 2 * stored, share, "what the product gives is never stored")


def of_scores(nodes: Sequence[Node]) -> str:
    """Return the reason why attention beats two products and a softmax that store scores, "" if unknown."""
    op = _only(nodes, *ATTENTION)
    if op is None:
        return ""
    q, k = (sizes_of(x) for x in op.args[:2])
    stored = math.prod(q[:3]) * k[2]  # by the first product and by the softmax; each is loaded by what follows
    return _if_storing_is_slow(
        op, 4 * stored, rule("attention.saved", cast("Node", op.args[0])), "scores are never stored"
    )


def of_latents(nodes: Sequence[Node]) -> str:
    """Return the reason why latent decoding beats three products and a softmax, or "" if only a contest can tell."""
    op = _only(nodes, torch.ops.tile.mla_decode.default)
    if op is None:
        return ""
    operands = cast("tuple[Node, ...]", op.args[:4])
    q, _, kv, _ = operands
    share = rule("mla_decode.saved", q, latent=sizes_of(kv)[-1])
    if share is None or not all(map(_is_even, operands)) or not _has_large_tiles(op):
        return ""
    scores = math.prod(sizes_of(q)[:3]) * sizes_of(kv)[1]
    # Two products store scores and the softmax loads both; it stores weights, which the third loads, and latents again.
    moved = 6 * scores + math.prod(sizes_of(kv))
    return _if_storing_is_slow(op, moved, share, "scores are never stored, and latents are loaded once")


def _has_large_tiles(op: Node) -> bool:
    """Return whether decoding launches a kernel with Hopper's best tiles, as all but the widest latents do."""
    from torch_tile.inductor.compile_ahead.kernels import plan_of  # not before: they bring the compiler along
    from torch_tile.kernels.common import Machine
    from torch_tile.kernels.mla.spec import HOPPER, SHORT

    machine = Machine(Target("cuda", 90), 1)  # with one SM positions are not split
    launches = plan_of(op.target, op.args, dict(op.kwargs), machine).launches
    if not launches:
        return False
    config, spec = launches[0].choice
    return spec.on_hopper(machine) and config in (SHORT[0], *HOPPER)


def in_registers(norm: Node) -> str:
    """Return the reason why Inductor keeps a norm of rows; empty if only a contest can tell."""
    width = sizes_of(norm)[-1]
    if not rule("norm.kept", norm, width=width, bytes=math.prod(sizes_of(norm)) * val(norm).itemsize):
        return ""
    return f"Inductor holds rows of {width} elements in registers, too, and reads them once"


def in_fused_layer(layer: Node) -> str:
    """Return the reason why a `torch._transformer_encoder_layer_fwd` stays one call; empty if it is written out.

    Layers with a mask are written out: torch's attention kernel takes 1.4 to 1.7 times as long as ours there.
    """
    given = named_args(layer, aten._transformer_encoder_layer_fwd.default)
    x, weight1, mask = val(given["src"]), val(given["ffn_weight_1"]), given["mask"]
    least = rule("encoder_layer.written_out", given["src"])
    if least is None or mask is not None:
        return ""
    length, width, hidden = x.shape[1], x.shape[2], weight1.shape[0]
    scores, products = 4 * length * width, 8 * width * width + 4 * width * hidden  # operations for each row
    if not known(scores < least * (scores + products)):
        return ""
    share = f"{round(100 * compat.size_hint(scores) / compat.size_hint(scores + products))} %"
    return f"torch's fused layer is as fast where attention is {share} of its products; max-autotune looks into it"


def _only(nodes: Sequence[Node], *targets: Any) -> Node | None:
    """Return the only call of one of these ops, or None if there is none or several."""
    found = [n for n in nodes if is_call(n, *targets)]
    return found[0] if len(found) == 1 else None


def _is_even(operand: Node) -> bool:
    """Return whether bulk copies can read a matrix: rows from multiples of 16 bytes on, one dense dimension."""
    dense = [s for s in val(operand).stride()[-2:] if known(s == 1)]
    others = [s for s in val(operand).stride() if not known(s == 1)]
    return bool(dense) and all(known(s % ALIGNED == 0) for s in (*others, val(operand).storage_offset()))


def _if_storing_is_slow(op: Node, moved: int, least_share: float | None, why: str) -> str:
    """Return `why`, with times, if moving `moved` elements takes `least_share` of the products' time, else ""."""
    tensor: torch.Tensor = next(val(x) for x in op.all_input_nodes)
    peak = measured(tensor.device)
    if peak is None or least_share is None or tensor.dtype not in HALVES or moved * tensor.itemsize < LEAST_BYTES:
        return ""
    moving = moved * tensor.itemsize / peak.bandwidth
    computing = flops_of(op) / (EFFICIENCY * peak.flops[tensor.dtype])
    if moving < least_share * computing:
        return ""
    return f"{why}, which saves {moving * 1e6:.0f} us beside {computing * 1e6:.0f} of products"
