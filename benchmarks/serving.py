# SPDX-License-Identifier: Apache-2.0
"""Attention as servers call it: `python -m benchmarks.serving [--quick] [--only paged] [--rivals cuDNN,FA2]`.

Decoding of one token over keys in pages, also of float8, MLA decoding over pages, and sequences of different lengths.
Rivals: our own kernel over keys without pages ("contiguous") or of bf16, or over padded sequences; cuDNN and
FlashAttention-2, as torch ships them, over keys without pages; FlashMLA and TileOps where they are installed.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks import mla
from benchmarks.attention import through
from benchmarks.problem import Case, Prepare, Problem, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.attention.scaled_keys import E4M3, widened
from torch_tile.kernels.mla.decode import reference as mla_reference

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Decode:
    """One query token of `batch` sequences of `length` keys, which lie in pages of `page` positions, or one after the
    other if `page` is 0. With `narrow`, keys are float8 with a scale for each position and head.
    """

    batch: int
    length: int
    page: int = 64
    narrow: bool = False
    heads: int = 64
    kv_heads: int = 8
    d: int = 128
    dtype: torch.dtype = BF16
    asked: float = 1.0
    quick: bool = False

    @property
    def name(self) -> str:
        kind = f"{'fp8 ' * self.narrow}pages of {self.page}" if self.page else "dense"
        return f"decode {kind} b{self.batch} s{self.length} h{self.heads}/{self.kv_heads} {name_of(self.dtype)}"

    def problem(self, device: str) -> Problem:
        per_key = 2 * self.d * (1 if self.narrow else self.dtype.itemsize) + (8 if self.narrow else 0)
        keys, queries = self.batch * self.length * self.kv_heads, self.batch * self.heads
        moved = keys * per_key + queries * 2 * self.d * self.dtype.itemsize
        asked = {"bf16": 1.6} if self.narrow else {"cuDNN": self.asked, "FA2": self.asked}
        return Problem(
            self.name, "decode", self.dtype, 4.0 * queries * self.length * self.d, float(moved),
            partial(self.case, device), asked if device == "cuda" else {}, quick=self.quick,
        )  # fmt: skip

    def case(self, device: str) -> Case:
        draw = partial(torch.randn, device=device, dtype=self.dtype)
        q = draw(self.batch, 1, self.heads, self.d)
        k, v = (draw(self.batch, self.length, self.kv_heads, self.d) for _ in range(2))
        some = sample_of(self.batch, 4, device)
        wide: tuple[torch.Tensor, ...] = ()
        pages: tuple[torch.Tensor, ...] = ()
        scales: dict[str, torch.Tensor] = {}
        if self.page:
            k_pages, v_pages, *where = in_pages((k, v), self.page)
            pages = wide = (k_pages, v_pages, *where)
            if self.narrow:
                (k_pages, k_scale), (v_pages, v_scale) = narrowed(k_pages), narrowed(v_pages)
                pages, scales = (k_pages, v_pages, *where), {"k_scale": k_scale, "v_scale": v_scale}
                k_pages, v_pages = (widened(k_pages, k_scale, self.dtype), widened(v_pages, v_scale, self.dtype))
                wide = (k_pages, v_pages, *where)
                k, v = (in_order(x, where[0], self.length) for x in (k_pages, v_pages))
        queries, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))

        def expected() -> torch.Tensor:
            own = (x[some].double() for x in (queries, keys, values))
            return plain(*own).transpose(1, 2)

        def contiguous() -> torch.Tensor:
            return torch.ops.tile.attention(queries, keys, values).transpose(1, 2)

        ours = partial(torch.ops.tile.attention_paged, q, *pages, **scales) if self.page else contiguous
        rivals: dict[str, Prepare] = {}
        if self.narrow:
            rivals["bf16"] = lambda: partial(torch.ops.tile.attention_paged, q, *wide)
        elif self.page:
            rivals["contiguous"] = lambda: contiguous
        if device == "cuda" and not self.narrow:
            sdpa = partial(F.scaled_dot_product_attention, queries, keys, values, enable_gqa=True)
            for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
                rivals[name] = partial(partial, with_positions_first, backend, sdpa)
        return Case(ours, rivals, lambda out: out[some], expected)


def with_positions_first(backend: SDPBackend, sdpa: Call) -> torch.Tensor:
    out = through(backend, sdpa)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def in_pages(tensors: tuple[torch.Tensor, ...], page: int) -> tuple[torch.Tensor, ...]:
    """Tensors `[batch, length, ...]` as pages in any order, then the block table and the lengths."""
    batch, length = tensors[0].shape[:2]
    columns = -(-length // page)
    order = torch.randperm(batch * columns, device=tensors[0].device)
    found = []
    for x in tensors:
        padded = x.new_zeros(batch, columns * page, *x.shape[2:])
        padded[:, :length] = x
        found.append(torch.empty_like(padded).view(-1, page, *x.shape[2:]))
        found[-1][order] = padded.view_as(found[-1])
    lengths = torch.full((batch,), length, dtype=torch.int32, device=order.device)
    return *found, order.int().view(batch, columns), lengths


def in_order(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` positions of pages, in the order of the block table."""
    return pages[table.long()].flatten(1, 2)[:, :length]


def narrowed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as float8 with a scale for each position and head."""
    scale = pages.float().abs().amax(-1).clamp_min(1e-12) / 448.0
    return (pages / scale[..., None]).to(E4M3), scale


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of `[batch, heads, length, d]`, key heads shared by groups of heads."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -1) @ v


@dataclass(frozen=True)
class Mla:
    """One query token over a latent cache in pages, all sequences of one length, or without pages."""

    batch: int
    length: int
    page: int = 64
    heads: int = 128
    latent: int = 512
    rotary: int = 64
    dtype: torch.dtype = BF16
    quick: bool = False

    @property
    def name(self) -> str:
        return f"mla {'pages' if self.page else 'dense'} b{self.batch} s{self.length} {name_of(self.dtype)}"

    def problem(self, device: str) -> Problem:
        width, positions = self.latent + self.rotary, self.batch * self.length
        elements = positions * width + self.batch * self.heads * (width + self.latent)
        asked = {"FlashMLA": 1.0, "contiguous": 0.97} if self.page else {"TileOps": 1.0}
        return Problem(
            self.name, "mla", self.dtype, 2.0 * self.heads * positions * (width + self.latent),
            float(self.dtype.itemsize * elements), partial(self.case, device), asked if device == "cuda" else {},
            quick=self.quick,
        )  # fmt: skip

    def case(self, device: str) -> Case:
        draw = partial(torch.randn, device=device, dtype=self.dtype)
        q, q_pe = (draw(self.batch, 1, self.heads, n) for n in (self.latent, self.rotary))
        kv, k_pe = (draw(self.batch, self.length, n) for n in (self.latent, self.rotary))
        some = sample_of(self.batch, 4, device)
        contiguous = partial(torch.ops.tile.mla_decode, q, q_pe, kv, k_pe)
        rivals: dict[str, Prepare] = {}
        ours: Call = contiguous
        if self.page:
            pages, pe_pages, table, lengths = in_pages((kv, k_pe), self.page)
            # The plan is made before, as it serves all layers of a step.
            schedule = torch.ops.tile.mla_schedule(lengths, self.heads)
            call = partial(torch.ops.tile.mla_decode, q, q_pe, pages, pe_pages, table, lengths, None, 0)
            ours = partial(call, schedule)
            rivals = {"contiguous": lambda: contiguous, "unscheduled": lambda: call}
            if device == "cuda":
                shape = mla.Shape(self.batch, self.length, self.heads, latent=self.latent, rotary=self.rotary)
                rivals["FlashMLA"] = partial(mla.flash_mla_paged, shape, q, q_pe, pages, pe_pages, table, lengths)
        if device == "cuda":
            rivals["TileOps"] = partial(tile_ops_mla, q, q_pe, kv, k_pe)

        def expected() -> torch.Tensor:
            return mla_reference(*(x[some].double() for x in (q, q_pe, kv, k_pe)))[0]

        return Case(ours, rivals, lambda out: out[some], expected)


def tile_ops_mla(q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> Call:
    module: Any = importlib.import_module("rivals.tile_kernels")
    operands = q[:, 0].contiguous(), q_pe[:, 0].contiguous(), kv[:, :, None], k_pe[:, :, None]

    def call() -> torch.Tensor:
        out: torch.Tensor = module.mla_decode(*operands)
        return out[:, None]

    return call


@dataclass(frozen=True)
class Varlen:
    """Sequences one after the other. With `spread`, their lengths go from few positions to `length`."""

    batch: int
    length: int
    causal: bool = True
    spread: bool = False
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    dtype: torch.dtype = BF16
    quick: bool = False

    @property
    def lengths(self) -> list[int]:
        if not self.spread:
            return [self.length] * self.batch
        return random.Random(self.batch).sample(range(1, self.length + 1, self.length // self.batch), self.batch)

    @property
    def name(self) -> str:
        lengths, order = f"s{'1 to ' if self.spread else ''}{self.length}", "causal" if self.causal else "full"
        return f"varlen b{self.batch} {lengths} h{self.heads}/{self.kv_heads} {order} {name_of(self.dtype)}"

    def problem(self, device: str) -> Problem:
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths) * self.heads
        elements = sum(self.lengths) * 2 * (self.heads + self.kv_heads) * self.d
        asked = {} if device == "cpu" or self.spread else {"padded": 0.95}
        return Problem(
            self.name, "varlen", self.dtype, 4.0 * pairs * self.d, float(self.dtype.itemsize * elements),
            partial(self.case, device), asked, quick=self.quick,
        )  # fmt: skip

    def case(self, device: str) -> Case:
        draw = partial(torch.randn, device=device, dtype=self.dtype)
        total, most = sum(self.lengths), max(self.lengths)
        q, k, v = (draw(total, heads, self.d) for heads in (self.heads, self.kv_heads, self.kv_heads))
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        ours = partial(
            torch.ops.tile.attention_varlen, q, k, v, ends, ends, max_seqlen_q=most, max_seqlen_k=most,
            causal=self.causal,
        )  # fmt: skip
        padded = [torch.nn.utils.rnn.pad_sequence(list(x.split(self.lengths)), batch_first=True) for x in (q, k, v)]
        dense = [x.transpose(1, 2).contiguous() for x in padded]

        def of_padded() -> torch.Tensor:
            return torch.ops.tile.attention(*dense, None, self.causal).transpose(1, 2).flatten(0, 1)

        first = slice(0, min(self.lengths[0], 256))

        def expected() -> torch.Tensor:
            own, keys, values = (x[: self.lengths[0]].double().transpose(0, 1)[None] for x in (q, k, v))
            seen = torch.ones(self.lengths[0], self.lengths[0], dtype=torch.bool, device=device)
            seen = seen.tril()[first] if self.causal else seen[first]
            return plain(own[:, :, first], keys, values, seen)[0].transpose(0, 1)

        return Case(ours, {"padded": lambda: of_padded}, lambda out: out[first], expected)


ON_GPU: tuple[Decode | Mla | Varlen, ...] = (
    *(Decode(b, 8192, 0, asked=1.3 if b == 1 else 1.0, quick=b in (1, 64)) for b in (1, 8, 16, 32, 64, 128)),
    *(Decode(b, 8192, asked=1.3 if b == 1 else 1.0, quick=b in (1, 64)) for b in (1, 8, 16, 32, 64, 128)),
    Decode(8, 8192, page=16), Decode(64, 8192, page=16),
    Decode(8, 8192, narrow=True), Decode(64, 8192, narrow=True, quick=True),
    Mla(1, 8192, page=0, quick=True), Mla(1, 8192, quick=True),
    *(Mla(b, 8192) for b in (2, 4, 8, 16)), Mla(64, 4096, quick=True), Mla(128, 4096),
    Varlen(4, 4096, quick=True), Varlen(4, 4096, causal=False), Varlen(16, 512), Varlen(16, 4096, spread=True),
)  # fmt: skip
ON_CPU: tuple[Decode | Mla | Varlen, ...] = (
    Decode(3, 70, 0, heads=4, kv_heads=2, d=32, dtype=FP32),
    Decode(3, 70, 16, heads=4, kv_heads=2, d=32, dtype=FP32, quick=True),
    Decode(2, 70, 16, narrow=True, heads=4, kv_heads=2, d=32, dtype=FP32, quick=True),
    Mla(3, 70, 16, 6, 32, 16, FP32, quick=True),
    Varlen(3, 40, heads=4, kv_heads=2, d=32, dtype=FP32, quick=True),
    Varlen(3, 40, spread=True, heads=4, kv_heads=2, d=32, dtype=FP32),
)  # fmt: skip


def problems(device: str) -> Iterator[Problem]:
    for s in ON_GPU if device == "cuda" else ON_CPU:
        yield s.problem(device)


if __name__ == "__main__":
    sys.exit(main(["serving"], __doc__))
