# SPDX-License-Identifier: Apache-2.0
"""Skip a contest whose winner follows from the sizes, because compiling Inductor's version takes half a second.

Inductor sometimes stores a large result between two of its kernels and loads it again. Our kernel wins where this takes
long compared with the products, which both compute about equally fast. A norm is a tie at best where Inductor also
reads its rows only once and the tensor is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from torch_tile.hardware import VECTOR_BYTES, Target
from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten, is_call, known, named_args, val
from torch_tile.inductor.report.rows import LARGE, LEAN_WORTH, WORTH, Outcome
from torch_tile.inductor.select.roofline import Peak, flops_of, peak_of, sizes_of
from torch_tile.inductor.settings import Settings
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import empty_beside
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
    return _verdict(op, 2 * stored, share, "what the product gives is never stored")


def of_scores(nodes: Sequence[Node]) -> str:
    """Return the reason why attention beats two products and a softmax that store scores, "" if unknown."""
    op = _only(nodes, *ATTENTION)
    if op is None:
        return ""
    q, k = (sizes_of(x) for x in op.args[:2])
    stored = math.prod(q[:3]) * k[2]  # by the first product and by the softmax; each is loaded by what follows
    return _verdict(op, 4 * stored, rule("attention.saved", cast("Node", op.args[0])), "scores are never stored")


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
    return _verdict(op, moved, share, "scores are never stored, and latents are loaded once")


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


def _verdict(op: Node, moved: int, share: float | None, why: str) -> str:
    """Return `why`, with times, if moving `moved` elements takes this share of the products' time, else ""."""
    tensor: torch.Tensor = next(val(x) for x in op.all_input_nodes)
    peak = measured(tensor.device)
    if peak is None or share is None or tensor.dtype not in HALVES or moved * tensor.itemsize < LEAST_BYTES:
        return ""
    moving = moved * tensor.itemsize / peak.bandwidth
    computing = flops_of(op) / (EFFICIENCY * peak.flops[tensor.dtype])
    if moving < share * computing:
        return ""
    return f"{why}, which saves {moving * 1e6:.0f} us beside {computing * 1e6:.0f} of products"


# `select="fastest"` in training: attention forward and backward together, ours against torch's.
#
# The contest runs where the call is captured, before autograd. Afterwards forward and backward are in different graphs,
# and the backward reads tensors that the forward saves. Torch's side is traced to ATen, so that Inductor may fuse it.

Tensors = tuple[torch.Tensor, ...]


def compete_attention(
    tensors: tuple[Any, Any, Any, Any], causal: bool, scale: float | None, settings: Settings
) -> Outcome:
    """Time `tile.attention` against `scaled_dot_product_attention`, both with their gradients.

    The gradients are those of q, k, v, and of a mask that requires one. `tensors` are fake ones: q, k, v and a mask or
    None. Symbolic sizes take the value of the trace.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torch_tile.inductor.select.decide import decide  # with the benchmark: nothing for graphs from the cache

    with compat.nested_compile(), FakeTensorMode():
        of_mask = tensors[3] is not None and tensors[3].requires_grad
        fakes = [compat.empty_for(x) for x in tensors if x is not None]
        grad = empty_beside(fakes[0], fakes[2].shape[3])

        def ours(grad: torch.Tensor, *given: torch.Tensor) -> Tensors:
            return _by_kernels(grad, *given, causal=causal, scale=scale, of_mask=of_mask)

        def theirs(grad: torch.Tensor, *given: torch.Tensor) -> Tensors:
            return _by_torch(grad, *given, causal=causal, scale=scale, of_mask=of_mask)

        new, old = (_traced(call, [grad, *fakes]) for call in (ours, theirs))
    return decide(new, old, settings)


def _traced(call: Callable[..., Tensors], inputs: list[torch.Tensor]) -> GraphModule:
    """Trace a call to decomposed ATen without dead code."""
    made = compat.decomposed(call, inputs)
    made.graph.eliminate_dead_code()
    return made


def _by_kernels(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *,
    causal: bool, scale: float | None, of_mask: bool,
) -> Tensors:  # fmt: skip
    """Compute attention and its gradients by tile ops."""
    args = AttentionArgs(q, k, v, mask, causal, scale)
    out, lse = torch.ops.tile.attention_lse.default(*args)
    given = args.backward(grad, out, lse, "mask" if of_mask else "")
    *found, kept = torch.ops.tile.attention_backward.default(*given)
    return out, *found, *([kept[0].sum_to_size(mask.shape)] if of_mask and mask is not None else [])


def _by_torch(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *,
    causal: bool, scale: float | None, of_mask: bool,
) -> Tensors:  # fmt: skip
    """Compute attention and its gradients by torch's `scaled_dot_product_attention`."""
    grouped = q.shape[1] != k.shape[1]
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        mask = mask.detach().requires_grad_() if of_mask and mask is not None else mask
        wanted = [q, k, v, *([mask] if of_mask and mask is not None else [])]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        return out.detach(), *torch.autograd.grad(out, wanted, grad)


def compete_loss(
    tensors: Sequence[Any], widened: bool, ignore_index: int, reduction: str, label_smoothing: float, settings: Settings
) -> Outcome:
    """Time `tile.cross_entropy` against `F.cross_entropy` on fake tensors: logits, target and maybe weights.

    `widened`: torch's side first converts the logits to float32. If the logits require a gradient, both sides compute
    it, from an upstream gradient of ones.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torch_tile.inductor.select.decide import decide  # with the benchmark: nothing for graphs from the cache
    from torch_tile.ops.losses import cross_entropy_loss

    trained = tensors[0].requires_grad and torch.is_grad_enabled()

    def timed(loss: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
        """Wrap a loss so that it also computes the gradient of the logits, if one is required."""

        def call(logits: torch.Tensor, *given: Any) -> Tensors:
            if not trained:
                return (loss(logits, *given, **options),)
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                found = loss(leaf, *given, **options)
                return found.detach(), *torch.autograd.grad(found.sum(), leaf)

        return call

    def theirs(logits: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        return F.cross_entropy(logits.float() if widened else logits, *given, **options)

    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    with compat.nested_compile(), FakeTensorMode():
        fakes = [compat.empty_for(x) for x in tensors]
        new, old = (_traced(timed(loss), fakes) for loss in (cross_entropy_loss, theirs))
    return decide(new, old, settings)


def compete_linear_loss(
    tensors: Sequence[Any], options: dict[str, Any], softcap: float | None, settings: Settings
) -> Outcome:
    """Time `tile.linear_cross_entropy` and its gradients against `F.linear` and `F.cross_entropy`, on fake tensors.

    `tensors`: hidden, weight, target, bias or None, weights of the classes or None. Gradients are those of hidden,
    weight and bias that are required, from an upstream gradient of ones. As ours stores no logits, it may be a little
    slower where they are large.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torch_tile.inductor.select.decide import decide  # with the benchmark: nothing for graphs from the cache
    from torch_tile.ops.losses import linear_cross_entropy_loss

    there = [x is not None for x in tensors]
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors]

    def ours(x: Any, weight: Any, target: Any, bias: Any, classes: Any) -> torch.Tensor:
        return linear_cross_entropy_loss(
            x, weight, target, linear_bias=bias, weight=classes, softcap=softcap, **options
        )

    def theirs(x: Any, weight: Any, target: Any, bias: Any, classes: Any) -> torch.Tensor:
        logits = F.linear(x, weight, bias)
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return F.cross_entropy(logits.float(), target, classes, **options)

    def timed(loss: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
        """Wrap a loss so that it also computes the gradients that are required."""

        def call(*given: torch.Tensor) -> Tensors:
            rest = iter(given)
            full = [next(rest).detach() if here else None for here in there]
            with torch.enable_grad():
                leaves = [x.requires_grad_() for x, want in zip(full, wanted, strict=True) if x is not None and want]
                found = loss(*full)
                return found.detach(), *(torch.autograd.grad(found.sum(), leaves) if leaves else ())

        return call

    with compat.nested_compile(), FakeTensorMode():
        fakes: list[Any] = [None if x is None else compat.empty_for(x) for x in tensors]
        fakes[0] = fakes[0].new_empty((*fakes[2].shape, fakes[0].shape[-1]))  # as many rows as there are targets
        given = [x for x in fakes if x is not None]
        new, old = (_traced(timed(loss), given) for loss in (ours, theirs))
        logits = compat.size_hint(fakes[2].numel()) * compat.size_hint(fakes[1].shape[0]) * fakes[0].dtype.itemsize
    return decide(new, old, settings, LEAN_WORTH if logits >= LARGE else WORTH)
