# SPDX-License-Identifier: Apache-2.0
"""Products of float8: `python -m benchmarks.scaled_gemm [--quick] [--only blocks,8192] [--json FILE]`.

Scales of 1 x 128 by 128 x 128 blocks (DeepSeek-V3's), of rows and columns, and of whole matrices, against
`torch._scaled_mm`: cuBLAS, or CUTLASS for rows. Where torch multiplies no blocks, the same operands with one scale are
the yardstick. "fast": all of K in the sums of tensor cores. Groups of rows, against `torch._scaled_grouped_mm`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.problem import Case, Prepare, Problem, sample_of, sample_of_groups
from benchmarks.runner import main
from benchmarks.timer import Call
from torch_tile.kernels.gemm.grouped_scaled import grouped_scaled_gemm, reference as of_groups
from torch_tile.kernels.gemm.scaled import GROUP, reference, scaled_gemm

SHAPES = {
    "4096": (4096, 4096, 4096),
    "8192": (8192, 8192, 8192),
    "4096x7168x2048": (4096, 7168, 2048),
    "64x7168x2048": (64, 7168, 2048),
    "4096x4096x14336": (4096, 4096, 14336),
    "1000x4608x7168": (1000, 4608, 7168),
    "200x4096x4096": (200, 4096, 4096),
    "256x4608x7168": (256, 4608, 7168),
    "384x8192x8192": (384, 8192, 8192),
    "640x2112x7168": (640, 2112, 7168),
    "768x7168x2048": (768, 7168, 2048),
    "1536x4096x4096": (1536, 4096, 4096),
    "2048x2112x7168": (2048, 2112, 7168),
}
SMALL = {"tiny": (5, 48, 144), "ragged": (100, 272, 384)}  # on the CPU
# Groups, rows in all, columns, and columns of a.
GROUPS = {"8x1024x14336x4096": (8, 8192, 14336, 4096), "32x256x7168x2048": (32, 8192, 7168, 2048)}
SMALL_GROUPS = {"tiny": (3, 40, 48, 144)}
FORMS = ("blocks", "rows", "one")
ONE = "cuBLAS-one-scale"  # does less than scales by blocks ask for: a bound rather than a rival
E4M3, OUT = torch.float8_e4m3fn, torch.bfloat16


def problems(device: str) -> Iterator[Problem]:
    gpu = device != "cpu"
    for form in FORMS:
        for name, (m, n, k) in (SHAPES if gpu else SMALL).items():
            yield Problem(
                f"scaled {form} {name}", f"scaled {form}", OUT, 2.0 * m * n * k, 1.0 * m * k + n * k + 2.0 * m * n,
                partial(case, device, form, m, n, k), asked={ONE: 1.0} if form == "blocks" else {"torch": 1.0},
                quick=name in ("tiny", *tuple(SHAPES)[:4]),
            )  # fmt: skip
    for form in FORMS[:2]:
        for name, (groups, m, n, k) in (GROUPS if gpu else SMALL_GROUPS).items():
            yield Problem(
                f"scaled grouped {form} {name}", f"scaled grouped {form}", OUT, 2.0 * m * n * k,
                1.0 * m * k + groups * n * k + 2.0 * m * n, partial(grouped_case, device, form, groups, m, n, k),
                asked={"torch": 1.0}, quick=True,
            )  # fmt: skip


def scales(form: str, m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of a and of b, stored as torch wants them."""
    runs = -(-k // GROUP)
    if form == "blocks":
        return torch.rand(runs, m, device=device).add(0.5).mT, torch.rand(-(-n // GROUP), runs, device=device).add(
            0.5
        ).mT
    rows, columns = (m, n) if form == "rows" else (1, 1)
    return torch.rand(rows, 1, device=device) + 0.5, torch.rand(1, columns, device=device) + 0.5


def case(device: str, form: str, m: int, n: int, k: int) -> Case:
    """Operands of N(0, 1), rounded to float8, and scales around 1."""
    a, b = (torch.randn(size, k, device=device).to(E4M3) for size in (m, n))
    scale_a, scale_b = scales(form, m, n, k, device)
    rows = sample_of(m, 32, device)
    one = torch.ones((), device=device)

    def expected() -> torch.Tensor:
        own = scale_a[rows] if scale_a.shape[0] > 1 else scale_a
        wide = [x.double() for x in (a[rows], b.mT, own, scale_b)]
        return reference(*wide, [], "", "", torch.float64)

    def torchs(fast: bool) -> Call:
        return partial(torch._scaled_mm, a, b.mT, scale_a, scale_b, out_dtype=OUT, use_fast_accum=fast)

    rivals: dict[str, Prepare] = {"torch": partial(torchs, False)}
    yardsticks: dict[str, Call] = {}
    if form == "blocks" and device != "cpu":
        yardsticks[ONE] = partial(torch._scaled_mm, a, b.mT, one, one, out_dtype=OUT)
    if form != "blocks" and device != "cpu":
        rivals["torch-fast"] = partial(torchs, True)
    ours = partial(scaled_gemm, a, b.mT, scale_a, scale_b, [], "", "", OUT)
    return Case(ours, rivals, lambda out: out[rows], expected, yardsticks)


def grouped_case(device: str, form: str, groups: int, m: int, n: int, k: int) -> Case:
    """Rows that choose their groups at random, evenly."""
    a, b = torch.randn(m, k, device=device).to(E4M3), torch.randn(groups, n, k, device=device).to(E4M3)
    chosen = torch.randint(groups, (m,), device=device).sort().values
    ends = torch.bincount(chosen, minlength=groups).cumsum(0).int()
    pairs = [scales(form, m, n, k, device) for _ in range(groups)]
    scale_a, scale_b = pairs[0][0], torch.stack([own for _, own in pairs])
    rows, own = sample_of_groups(chosen, groups)

    def expected() -> torch.Tensor:
        return of_groups(a[rows].double(), b.mT, scale_a[rows].double(), scale_b, own, [], "", "", torch.float64)

    def torchs() -> Call:
        if form != "rows":
            raise NotImplementedError("torch has no grouped product with scales by blocks")
        flat = scale_a[:, 0].contiguous(), scale_b[:, 0].contiguous()
        return partial(torch._scaled_grouped_mm, a, b.mT, *flat, offs=ends, out_dtype=OUT)

    ours = partial(grouped_scaled_gemm, a, b.mT, scale_a, scale_b, ends, [], "", "", OUT)
    return Case(ours, {"torch": torchs}, lambda out: out[rows], expected)


if __name__ == "__main__":
    sys.exit(main(["scaled_gemm"], __doc__))
