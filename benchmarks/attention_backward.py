# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention: `python -m benchmarks.attention_backward [--quick] [--only d256] [--rivals cuDNN,FA2]`.

From the result and the log-sum-exp of the forward, which is not timed. Work counts five products, though ours makes
seven or eight where sums are the same from run to run, and half of it under causal masks. Rivals: cuDNN,
FlashAttention-2 and, under masks in memory, the memory-efficient kernel, as torch ships them, through autograd; and
FlashAttention-4 and TileOPs where a module `rivals` offers them; and our own deterministic kernels.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.attention import BF16, FP32, Shape, mask_of, square, through
from benchmarks.problem import Case, Prepare, Problem, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.backward import gradients
from torch_tile.kernels.attention.forward import attention

ON_GPU = (
    square(1, 4096, True, 1.0, 32, 32, dtype=BF16, quick=True),
    square(2, 8192, True, 1.0, 32, 32, dtype=BF16, quick=True),
    square(1, 8192, False, 1.0, 32, 32, dtype=BF16, quick=True),
    square(2, 8192, True, 1.0, 32, 32, 64, dtype=BF16, quick=True),
    square(2, 4096, True, 1.0, 32, 8, dtype=BF16, quick=True), square(2, 2048, False, 1.0, 32, 32, dtype=BF16),
    square(8, 512, True, 1.0, 32, 8, dtype=BF16), square(4, 1024, True, 1.0, 16, 16, 64, dtype=BF16, quick=True),
    square(16, 512, False, 1.0, 12, 12, 64, dtype=BF16), square(1, 4096, True, 1.0, 16, 8, 256, dtype=BF16, quick=True),
    square(2, 2048, False, 1.0, 16, 8, 256, dtype=BF16), square(2, 4096, True, 1.0, 16, 16, 192, 128, dtype=BF16),
    square(2, 2048, False, 1.0, 32, 8, dtype=BF16, mask="bool"),
    square(4, 1024, False, 1.0, 16, 16, 64, dtype=BF16, mask="bias"),
)  # fmt: skip
ON_CPU = (
    square(1, 40, True, 1.0, 2, 2, 16, dtype=FP32, quick=True), square(1, 33, False, 1.0, 2, 1, 24, 16, dtype=BF16),
    square(2, 70, False, 1.0, 4, 2, 32, dtype=FP32, mask="bool", quick=True),
    square(1, 1024, True, 1.0, 8, 8, 64, dtype=FP32),
)  # fmt: skip
ROUNDINGS = 2.0  # of weights, and of the scores' gradients that are made of them
PRODUCTS = 3, 2  # of five, how many have the width of a query and how many that of a value


def problems(device: str) -> Iterator[Problem]:
    for s in ON_GPU if device == "cuda" else ON_CPU:
        v_d = s.v_d or s.d
        pairs = s.batch * s.heads * s.queries * s.keys * (0.5 if s.causal else 1.0)
        elements = s.batch * 2 * (s.heads * s.queries * (s.d + v_d) + s.kv_heads * s.keys * (s.d + v_d))
        seen = {"": 0, "bool": 1, "bias": s.dtype.itemsize}[s.mask] * s.batch * s.queries * s.keys
        yield Problem(
            s.name.replace("attention", "gradients"), "gradients", s.dtype,
            2.0 * pairs * (PRODUCTS[0] * s.d + PRODUCTS[1] * v_d), float(s.dtype.itemsize * elements + seen),
            partial(case, s, device),
            {"cuDNN": s.cudnn} if device == "cuda" else {}, quick=s.quick,
        )  # fmt: skip


def case(s: Shape, device: str) -> Case:
    draw = partial(torch.randn, device=device, dtype=s.dtype)
    v_d, groups = s.v_d or s.d, s.heads // s.kv_heads
    q, grad = (draw(s.batch, s.heads, s.queries, d) for d in (s.d, v_d))
    k, v = (draw(s.batch, s.kv_heads, s.keys, d) for d in (s.d, v_d))
    mask = mask_of(s, device)
    out, lse = attention(q, k, v, mask, s.causal)
    # A few rows of all heads that share one of keys, for two of these.
    pairs = [divmod(pair, s.kv_heads) for pair in sample_of(s.batch * s.kv_heads, 2, device).tolist()]
    rows, keys = (sample_of(n, 64, device) for n in (s.queries, s.keys))

    @functools.cache
    def truth() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for b, h in pairs:
            here = slice(b, b + 1), slice(h * groups, (h + 1) * groups)
            own = [x[here].double() for x in (grad, q)] + [x[b : b + 1, h : h + 1].double() for x in (k, v)]
            seen = None if mask is None else mask[b : b + 1]
            seen = seen if seen is None or seen.dtype == torch.bool else seen.double()
            dq, dk, dv, _ = gradients(own[0], AttentionArgs(*own[1:], seen, s.causal))
            found += [dq[0][:, rows], dk[0, 0, keys], dv[0, 0, keys]]
        return found

    def together(found: Sequence[torch.Tensor]) -> torch.Tensor:
        """As one row, each in units of the root mean square that is expected of it."""
        units = (x.square().mean().sqrt() for x in truth())
        return torch.cat([x.double().flatten() / unit for x, unit in zip(found, units, strict=True)])

    def sample(all_three: torch.Tensor) -> torch.Tensor:
        flat = all_three.split([q.numel(), k.numel(), v.numel()])
        dq, dk, dv = (x.view(like.shape) for x, like in zip(flat, (q, k, v), strict=True))
        found: list[torch.Tensor] = []
        for b, h in pairs:
            found += [dq[b, h * groups : (h + 1) * groups, rows], dk[b, h, keys], dv[b, h, keys]]
        return together(found)

    ours = partial(torch.ops.tile.attention_backward, grad, q, k, v, out, lse, mask, s.causal)
    return Case(
        ours,
        {**rivals_of(s, device, q, k, v, mask, grad), "deterministic": lambda: partial(deterministically, ours)},
        sample,
        lambda: together(truth()),
        read=lambda results: torch.cat([x.flatten() for x in results[:3]]),
        leeway=ROUNDINGS,
    )


def rivals_of(
    s: Shape, device: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    grad: torch.Tensor,
) -> dict[str, Prepare]:  # fmt: skip
    of_torch = [("torch", SDPBackend.MATH)]
    if device == "cuda":
        other = ("efficient", SDPBackend.EFFICIENT_ATTENTION) if s.mask else ("FA2", SDPBackend.FLASH_ATTENTION)
        of_torch = [("cuDNN", SDPBackend.CUDNN_ATTENTION), other]
    found: dict[str, Prepare] = {
        name: partial(through_autograd, backend, s, q, k, v, mask, grad) for name, backend in of_torch
    }
    if device == "cuda" and not s.mask and s.dtype == BF16:
        found["FA4"] = partial(flash_attention_4, s, q, k, v, grad)
        if not s.v_d:
            found["TileOPs"] = partial(tile_ops, s, q, k, v, grad)
    return found


def deterministically(call: Call) -> object:
    """Call our operator with kernels whose sums are the same from run to run."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would be timed, too
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def tile_ops(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> Call:
    module: Any = importlib.import_module("rivals.tile_kernels")
    up, *operands = (x.transpose(1, 2).contiguous() for x in (grad, q, k, v))
    out, lse = module.attention(*operands, causal=s.causal)

    def call() -> list[torch.Tensor]:
        return [x.transpose(1, 2) for x in module.attention_backward(up, *operands, out, lse, causal=s.causal)]

    return call


def flash_attention_4(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> Call:
    module: Any = importlib.import_module("rivals.fa4")
    up, *operands = (x.transpose(1, 2).contiguous() for x in (grad, q, k, v))
    out, lse = module.forward(*operands, causal=s.causal)

    def call() -> list[torch.Tensor]:
        found = module.backward(up, *operands, out, lse, causal=s.causal, deterministic=False)
        return [x.transpose(1, 2) for x in found]

    return call


def through_autograd(
    backend: SDPBackend, s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    grad: torch.Tensor,
) -> Call:  # fmt: skip
    """The backward of torch's attention, whose forward is done once and kept."""
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = s.heads != s.kv_heads
    sdpa = partial(F.scaled_dot_product_attention, *operands, mask, is_causal=s.causal, enable_gqa=grouped)
    with torch.enable_grad():
        out = through(backend, sdpa)
    assert isinstance(out, torch.Tensor)
    return partial(torch.autograd.grad, out, operands, grad, retain_graph=True)


if __name__ == "__main__":
    sys.exit(main(["attention_backward"], __doc__))
