# SPDX-License-Identifier: Apache-2.0
"""MLA decoding, one query token, latent 512 and rotary 64: `python -m benchmarks.mla [--quick] [--only b64]`.

Rivals: the same maths in plain torch, eager and (on the rows that targets were measured for) under Inductor; FlashMLA
and TileLang where they are installed.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks import tilelang_kernels
from benchmarks.problem import Case, Prepare, Problem, inductor, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.mla.decode import mla_decode, reference

PAGE = 64  # positions in a page of FlashMLA's cache


@dataclass(frozen=True)
class Shape:
    """`tilelang` and `inductor` are how many times faster than they we should be where FlashMLA is not installed;
    `ceiling` is a share of the read bandwidth. `unscheduled`: over a paged cache whose sequences differ in length, how
    many times faster than without a schedule.
    """

    batch: int
    length: int
    heads: int = 128
    dtype: torch.dtype = torch.float16
    tilelang: float = 0.0
    inductor: float = 0.0
    ceiling: float = 0.0
    splits: int = 1  # TileLang's
    latent: int = 512
    rotary: int = 64
    quick: bool = False
    unscheduled: float = 0.0

    @property
    def lengths(self) -> list[int]:
        """Of the sequences: all the same, or from few positions to the whole cache, in no order."""
        if not self.unscheduled:
            return [self.length] * self.batch
        return random.Random(self.batch).sample(range(1, self.length + 1, self.length // self.batch), self.batch)


FP16_ROWS = (
    Shape(64, 1024, tilelang=1.28), Shape(64, 4096, tilelang=1.28, inductor=2.2, quick=True),
    Shape(64, 8192, tilelang=1.28), Shape(64, 16384, tilelang=1.28), Shape(128, 4096, tilelang=1.2),
    Shape(128, 8192, tilelang=1.2, inductor=1.94), Shape(16, 8192, tilelang=1.4, splits=4, quick=True),
    Shape(1, 8192, tilelang=1.23, inductor=2.7, splits=16), Shape(64, 8192, heads=16, ceiling=0.9, quick=True),
)  # fmt: skip
RAGGED = tuple(
    Shape(batch, length, dtype=torch.bfloat16, unscheduled=1.2, quick=batch == 64)
    for batch, length in ((16, 32768), (32, 16384), (64, 8192), (128, 8192))
)
IN_BF16 = {(64, 4096), (64, 8192), (64, 16384), (128, 4096), (128, 8192)}
ON_GPU = FP16_ROWS + tuple(
    replace(s, dtype=torch.bfloat16, quick=False)
    for s in FP16_ROWS
    if (s.batch, s.length) in IN_BF16 and s.heads == 128
)
ON_GPU += RAGGED
ON_CPU = (
    Shape(4, 70, 6, torch.float32, latent=32, rotary=16, quick=True, unscheduled=1.0),
    Shape(2, 70, 6, torch.float32, latent=32, rotary=16, quick=True), Shape(1, 40, 4, torch.bfloat16, quick=True),
    Shape(2, 1024, 16, torch.float32),
)  # fmt: skip


def problems(device: str) -> Iterator[Problem]:
    for s in ON_GPU if device == "cuda" else ON_CPU:
        asked = {"FlashMLA": 1.0, "tilelang": s.tilelang, "Inductor": s.inductor, "ceiling": s.ceiling}
        asked["unscheduled"] = s.unscheduled
        width, positions = s.latent + s.rotary, sum(s.lengths)
        elements = positions * width + s.batch * s.heads * (width + s.latent)
        yield Problem(
            f"mla b{s.batch} s{'1 to ' if s.unscheduled else ''}{s.length} h{s.heads} {name_of(s.dtype)}",
            f"mla h{s.heads} {name_of(s.dtype)}" if device == "cuda" else "mla",
            s.dtype, 2.0 * s.heads * positions * (width + s.latent), float(s.dtype.itemsize * elements),
            partial(ragged_case if s.unscheduled else case, s, device),
            {name: x for name, x in asked.items() if x and device == "cuda"},
            quick=s.quick,
        )  # fmt: skip


def case(s: Shape, device: str) -> Case:
    draw = partial(torch.randn, device=device, dtype=s.dtype)
    q, q_pe = (draw(s.batch, 1, s.heads, n) for n in (s.latent, s.rotary))
    kv, k_pe = (draw(s.batch, s.length, n) for n in (s.latent, s.rotary))
    some = sample_of(s.batch, 4, device)

    def expected() -> torch.Tensor:
        return reference(*(x[some].double() for x in (q, q_pe, kv, k_pe)))[0]

    rivals: dict[str, Prepare] = {"torch": lambda: partial(plain, q, q_pe, kv, k_pe)}
    if s.inductor or device == "cpu":
        rivals["Inductor"] = partial(inductor, plain, q, q_pe, kv, k_pe)
    if device == "cuda":
        rivals["FlashMLA"] = partial(flash_mla, s, q, q_pe, kv, k_pe)
        rivals["tilelang"] = partial(tilelang, s, q, q_pe, kv, k_pe)
    return Case(partial(mla_decode, q, q_pe, kv, k_pe), rivals, lambda out: out[some], expected)


def ragged_case(s: Shape, device: str) -> Case:
    """Over pages; the plan is made before, as it serves all layers of a step."""
    draw = partial(torch.randn, device=device, dtype=s.dtype)
    q, q_pe = (draw(s.batch, 1, s.heads, n) for n in (s.latent, s.rotary))
    columns = -(-s.length // PAGE)
    kv, k_pe = (draw(s.batch * columns, PAGE, n) for n in (s.latent, s.rotary))
    table = torch.randperm(s.batch * columns, device=device).int().view(s.batch, columns)
    lengths = torch.tensor(s.lengths, dtype=torch.int32, device=device)
    schedule = torch.ops.tile.mla_schedule(lengths, s.heads)
    some = sample_of(s.batch, 4, device)

    def expected() -> torch.Tensor:
        wide = (x.double() for x in (q[some], q_pe[some], kv, k_pe))
        return reference(*wide, table[some], lengths[some])[0]

    call = partial(torch.ops.tile.mla_decode, q, q_pe, kv, k_pe, table, lengths, None, 0)
    rivals: dict[str, Prepare] = {"unscheduled": lambda: call}
    if device == "cuda":
        rivals["FlashMLA"] = partial(flash_mla_paged, s, q, q_pe, kv, k_pe, table, lengths)
    return Case(partial(call, schedule), rivals, lambda out: out[some], expected)


def plain(q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """The definition, in the operands' dtype but for the softmax."""
    scores = torch.matmul(q[:, 0], kv.mT) + torch.matmul(q_pe[:, 0], k_pe.mT)
    weights = torch.softmax(scores.float() * (q.shape[3] + q_pe.shape[3]) ** -0.5, -1)
    return torch.matmul(weights.to(q.dtype), kv)[:, None]


def flash_mla(s: Shape, q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> Call:
    table = torch.arange(s.batch * s.length // PAGE, dtype=torch.int32, device=q.device).view(s.batch, -1)
    lengths = torch.full((s.batch,), s.length, dtype=torch.int32, device=q.device)
    return flash_mla_paged(s, q, q_pe, kv, k_pe, table, lengths)


def flash_mla_paged(s: Shape, q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor,
                    table: torch.Tensor, lengths: torch.Tensor) -> Call:  # fmt: skip
    module = importlib.import_module("flash_mla")
    query = torch.cat([q, q_pe], -1)
    pages = torch.cat([kv, k_pe], -1).view(-1, PAGE, 1, s.latent + s.rotary)
    plan = module.get_mla_metadata(lengths, s.heads, 1)
    return partial(module.flash_mla_with_kvcache, query, pages, table, lengths, s.latent, *plan, causal=False)


def tilelang(s: Shape, q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> Call:
    module = importlib.import_module("tilelang")
    dtype = str(s.dtype).removeprefix("torch.")
    kernel = tilelang_kernels.mla(module, s.batch, s.heads, s.length, s.latent, s.rotary, s.splits, dtype)
    return lambda: kernel(q[:, 0], q_pe[:, 0], kv, k_pe)[:, None]


if __name__ == "__main__":
    sys.exit(main(["mla"], __doc__))
