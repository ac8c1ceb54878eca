# SPDX-License-Identifier: Apache-2.0
"""Attention forward and decoding: `python -m benchmarks.attention [--quick] [--only decode] [--rivals cuDNN,FA2]`.

Work counts half for causal masks. Rivals: cuDNN and FlashAttention-2 as torch ships them, flex_attention (Triton) on a
few rows because it compiles for each, FlashAttention-3 and TileLang where they are installed, FlashAttention-4 and
TileOPs where a module `rivals` offers them (bf16); under masks in memory cuDNN and torch's memory-efficient kernel,
which take them; over float8 operands our own kernel over the same numbers in bf16.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import tilelang_kernels
from benchmarks.problem import Case, Prepare, Problem, inductor, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.attention.forward import reference
from torch_tile.kernels.attention.scaled_keys import E4M3


@dataclass(frozen=True)
class Shape:
    """`cudnn` is how many times faster than cuDNN we should be, where FlashAttention-3 is not there to be matched.

    `mask` is a mask in memory, for all heads of a sequence: "bool", or "bias", numbers of the operands' dtype.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int
    causal: bool
    cudnn: float = 1.0
    v_d: int = 0  # 0: d
    dtype: torch.dtype = torch.float16
    flex: bool = False
    quick: bool = False
    mask: str = ""
    fp8: bool = False  # operands of float8 with a scale for each head; `dtype` is the result's

    @property
    def is_decode(self) -> bool:
        return self.queries < self.keys

    @property
    def name(self) -> str:
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        d = f"d{self.d}/{self.v_d}" if self.v_d else f"d{self.d}"
        kind, queries = ("decode", f" q{self.queries}") if self.is_decode else ("attention", "")
        order = "causal" if self.causal else self.mask or "full"
        dtypes = f"{'fp8 to ' * self.fp8}{name_of(self.dtype)}"
        return f"{kind} b{self.batch} s{self.keys}{queries} {heads} {d} {order} {dtypes}"


def square(
    batch: int, n: int, causal: bool, cudnn: float, heads: int = 32, kv_heads: int = 32, d: int = 128, v_d: int = 0,
    dtype: torch.dtype = torch.float16, flex: bool = False, quick: bool = False, mask: str = "", fp8: bool = False,
) -> Shape:  # fmt: skip
    return Shape(batch, heads, kv_heads, n, n, d, causal, cudnn, v_d, dtype, flex, quick, mask, fp8)


def decode(batch: int, keys: int, cudnn: float, queries: int = 1, quick: bool = False) -> Shape:
    return Shape(batch, 64, 8, queries, keys, 128, False, cudnn, dtype=torch.bfloat16, quick=quick)


BF16 = torch.bfloat16
FP8_LEEWAY = 16.0  # weights in float8 are rounded 16 times as far as in bf16
ON_GPU = (
    square(1, 512, True, 1.15), square(1, 512, False, 1.15), square(1, 1024, True, 1.27, flex=True),
    square(1, 1024, False, 1.15, flex=True), square(1, 4096, True, 1.23, flex=True, quick=True),
    square(2, 8192, True, 1.15, flex=True), square(2, 8192, False, 1.09, quick=True), square(1, 16384, True, 1.14),
    square(1, 4096, True, 1.16, dtype=BF16), square(2, 8192, True, 1.13, dtype=BF16),
    square(2, 8192, False, 1.09, dtype=BF16), square(1, 16384, True, 1.15, dtype=BF16),
    square(2, 4096, True, 1.15, 64, 8, dtype=BF16, quick=True), square(2, 8192, False, 1.06, 64, 8, dtype=BF16),
    square(2, 8192, True, 1.10, d=64, dtype=BF16, quick=True),
    square(1, 4096, True, 1.10, 128, 128, 192, 128, dtype=BF16),
    *(square(1, n, causal, 1.0, dtype=BF16) for n in (512, 1024) for causal in (True, False)),
    square(2, 8192, False, 1.5, dtype=BF16, fp8=True, quick=True), square(2, 8192, True, 1.5, dtype=BF16, fp8=True),
    square(1, 4096, True, 1.5, dtype=BF16, fp8=True),
    # Short sequences of models: an encoder, ViT, windows of an image, Whisper, GPT-2 and Llama in training.
    square(16, 512, False, 0.98, 16, 16, 64, dtype=BF16), square(64, 197, False, 0.98, 16, 16, 64, dtype=BF16),
    square(128, 49, False, 0.98, 12, 12, 64, dtype=BF16), square(4, 1500, False, 0.98, 20, 20, 64, dtype=BF16),
    square(8, 1024, True, 0.98, 25, 25, 64, dtype=BF16), square(8, 512, True, 0.98, 32, 8, dtype=BF16),
    # Masks in memory: padding, packed documents, relative positions.
    square(1, 4096, False, 1.0, dtype=BF16, mask="bias", quick=True),
    square(1, 4096, False, 1.0, dtype=BF16, mask="bool"), square(1, 1024, False, 1.0, dtype=BF16, mask="bias"),
    square(8, 512, False, 1.0, 32, 8, dtype=BF16, mask="bool"),
    square(4, 1024, False, 1.0, 16, 16, 64, dtype=BF16, mask="bias"),
    square(16, 512, False, 1.0, 12, 12, 64, dtype=BF16, mask="bool"),
    square(256, 64, False, 1.0, 12, 12, 64, dtype=BF16, mask="bias"),
    decode(1, 8192, 1.3), decode(8, 8192, 1.15, quick=True), decode(32, 8192, 0.98), decode(128, 4096, 0.98),
    decode(8, 8192, 3.0, queries=8), decode(8, 8192, 3.0, queries=16),
)  # fmt: skip
FP32 = torch.float32
ON_CPU = (
    Shape(1, 2, 2, 40, 40, 16, True, dtype=FP32, quick=True),
    square(1, 70, True, 1.0, 4, 2, 32, dtype=BF16, fp8=True),
    Shape(2, 4, 2, 1, 70, 16, False, dtype=FP32, quick=True),
    Shape(1, 2, 1, 33, 33, 24, False, v_d=16, dtype=BF16, quick=True),
    Shape(1, 4, 4, 100, 100, 32, False, dtype=FP32, mask="bool", quick=True),
    Shape(1, 8, 8, 1024, 1024, 64, False, dtype=FP32), Shape(1, 8, 8, 1024, 1024, 64, True, dtype=FP32),
    Shape(1, 8, 2, 512, 512, 128, True, dtype=FP32), Shape(1, 8, 8, 512, 512, 64, True, dtype=BF16),
    Shape(1, 8, 8, 1024, 1024, 64, False, dtype=BF16),
    Shape(1, 32, 8, 1, 2048, 128, False, dtype=FP32),
)  # fmt: skip


def problems(device: str) -> Iterator[Problem]:
    for s in ON_GPU if device == "cuda" else ON_CPU:
        v_d = s.v_d or s.d
        pairs = s.batch * s.heads * s.queries * s.keys * (0.5 if s.causal else 1.0)
        elements = s.batch * (s.heads * s.queries + s.kv_heads * s.keys) * (s.d + v_d)
        seen = {"": 0, "bool": 1, "bias": s.dtype.itemsize}[s.mask] * s.batch * s.queries * s.keys
        group = "decode" if s.is_decode else "masks in memory" if s.mask else f"attention {name_of(s.dtype)}"
        asked = {"cuDNN": s.cudnn} if s.is_decode or s.mask else {"FA3": 1.0, "cuDNN": s.cudnn}
        if s.fp8:
            group, asked = "attention fp8", {"bf16": s.cudnn}
        yield Problem(
            s.name, group, s.dtype, 2.0 * pairs * (s.d + v_d), float(s.dtype.itemsize * elements + seen),
            partial(fp8_case if s.fp8 else case, s, device), asked if device == "cuda" else {}, quick=s.quick,
        )  # fmt: skip


def case(s: Shape, device: str, operands: Sequence[torch.Tensor] | None = None) -> Case:
    if operands is None:
        draw = partial(torch.randn, device=device, dtype=s.dtype)
        keys = (draw(s.batch, s.kv_heads, s.keys, d) for d in (s.d, s.v_d or s.d))
        operands = draw(s.batch, s.heads, s.queries, s.d), *keys
    q, k, v = operands
    mask = mask_of(s, device)
    heads = sample_of(s.batch * s.heads, 8, device)
    b, h = heads // s.heads, heads % s.heads
    rows = sample_of(s.queries, 64, device)

    def expected() -> torch.Tensor:
        own = [x.double()[:, None] for x in (q[b, h][:, rows], k[b, h // (s.heads // s.kv_heads)])]
        values = v[b, h // (s.heads // s.kv_heads)].double()[:, None]
        seen = torch.arange(s.keys, device=device) <= rows[:, None] if s.causal else None
        if mask is not None:
            seen = mask[b][:, :, rows] if mask.dtype == torch.bool else mask[b][:, :, rows].double()
        return reference(*own, values, seen)[0][:, 0]

    def sample(out: torch.Tensor) -> torch.Tensor:
        return out[b, h][:, rows]

    return Case(
        partial(torch.ops.tile.attention, q, k, v, mask, s.causal), rivals_of(s, q, k, v, mask), sample, expected
    )


def fp8_case(s: Shape, device: str) -> Case:
    """Of float8 operands with a scale for each head. Weights of keys are rounded to float8, too."""
    draw = partial(torch.randn, device=device, dtype=s.dtype)
    sizes = ((s.heads, s.queries, s.d), (s.kv_heads, s.keys, s.d), (s.kv_heads, s.keys, s.v_d or s.d))
    narrow, scales, wide = [], [], []
    for size in sizes:
        x = draw(s.batch, *size)
        scale = x.float().abs().amax((2, 3)) / torch.finfo(E4M3).max
        narrow.append((x / scale[..., None, None]).to(E4M3))
        scales.append(scale)
        wide.append((narrow[-1].float() * scale[..., None, None]).to(s.dtype))
    of_wide = case(s, device, wide)
    rivals: dict[str, Prepare] = {"bf16": lambda: of_wide.ours}
    ours = partial(torch.ops.tile.attention_fp8, *narrow, *scales, s.causal)
    return Case(ours, rivals, of_wide.sample, of_wide.expected, leeway=FP8_LEEWAY)


def mask_of(s: Shape, device: str) -> torch.Tensor | None:
    size = (s.batch, 1, s.queries, s.keys)
    if s.mask == "bool":
        return torch.rand(size, device=device) < 0.7
    return torch.randn(size, device=device, dtype=s.dtype) if s.mask else None


def rivals_of(
    s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, Prepare]:
    grouped = s.heads != s.kv_heads
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, mask, is_causal=s.causal, enable_gqa=grouped)
    if q.device.type == "cpu":
        return {"torch": lambda: sdpa, "flex": partial(flex, s, q, k, v)}
    if mask is not None:
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        return {name: partial(partial, through, backend, sdpa) for name, backend in backends.items()}
    rivals: dict[str, Prepare] = {
        "cuDNN": lambda: partial(through, SDPBackend.CUDNN_ATTENTION, sdpa),
        "FA2": lambda: partial(through, SDPBackend.FLASH_ATTENTION, sdpa),
        "FA3": partial(flash_attention_3, s, q, k, v),
    }
    if not s.is_decode and s.dtype == BF16:
        rivals["FA4"] = partial(flash_attention_4, s, q, k, v)
        if not s.v_d:
            rivals["TileOPs"] = partial(tile_ops, s, q, k, v)
    if s.flex:
        rivals["flex"] = partial(flex, s, q, k, v)
    if not s.is_decode and not s.v_d:
        rivals["tilelang"] = partial(tilelang, s, q, k, v)
    return rivals


def through(backend: SDPBackend, call: Call) -> object:
    with sdpa_kernel(backend):
        return call()


def flash_attention_3(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Its tensors are `[batch, length, heads, d]`."""
    module = importlib.import_module("flash_attn_interface")
    operands = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    function = module.flash_attn_with_kvcache if s.is_decode else module.flash_attn_func

    def call() -> torch.Tensor:
        out = function(*operands, causal=s.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def flash_attention_4(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Its tensors are `[batch, length, heads, d]`."""
    module: Any = importlib.import_module("rivals.fa4")
    operands = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def call() -> torch.Tensor:
        out: torch.Tensor = module.forward(*operands, causal=s.causal)[0]
        return out.transpose(1, 2)

    return call


def tile_ops(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Its tensors are `[batch, length, heads, d]`."""
    module: Any = importlib.import_module("rivals.tile_kernels")
    operands = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def call() -> torch.Tensor:
        out: torch.Tensor = module.attention_without_lse(*operands, causal=s.causal)
        return out.transpose(1, 2)

    return call


def flex(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if s.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s.queries, s.keys, device=q.device.type)
    attend = partial(flex_attention, block_mask=mask, enable_gqa=s.heads != s.kv_heads)
    return inductor(attend, q, k, v)


def tilelang(s: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    module = importlib.import_module("tilelang")
    dtype = str(s.dtype).removeprefix("torch.")
    sizes = (s.batch, s.heads, s.kv_heads, s.keys, s.d)
    return partial(tilelang_kernels.attention(module, *sizes, s.causal, dtype), q, k, v)


if __name__ == "__main__":
    sys.exit(main(["attention"], __doc__))
