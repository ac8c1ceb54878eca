# SPDX-License-Identifier: Apache-2.0
"""Products with weights of few bits: `python -m benchmarks.dequant [--quick] [--only int4,m16] [--json FILE]`.

On a GPU 1, 16, 64 and 1024 rows by 16384 x 16384 weights, against cuBLAS with the same weights in 16 bits, Humming
(int4) and bitsandbytes (NF4) where these are installed:

    python -m benchmarks.dequant --only g128,g64,nf4,e2m1 --rivals cuBLAS,Humming,bitsandbytes
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.problem import Case, Prepare, Problem, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.gemm.dequant import dequant_gemm, dequantize, reference
from torch_tile.kernels.gemm.formats import FORMATS


@dataclass(frozen=True)
class Scheme:
    """Dtype of words, bits of a weight, what is subtracted, columns of a group (0: all), whether there are zeros, and a
    number format, whose scales have a dtype of their own.
    """

    words: torch.dtype
    bits: int = 8
    offset: int = 0
    group: int = 0
    zeros: bool = False
    format: str = ""

    @property
    def scale_bytes(self) -> int:
        return FORMATS[self.format].scale.itemsize if self.format else 2

    @property
    def high_first(self) -> bool:
        """As bitsandbytes packs."""
        return self.format == "nf4"


SCHEMES = {
    "int8": Scheme(torch.int8),
    "int4 g128": Scheme(torch.uint8, 4, 8, 128),
    "int4 g32 zeros": Scheme(torch.uint8, 4, 0, 32, True),
    "int4 g64": Scheme(torch.uint8, 4, 8, 64),
    "nf4": Scheme(torch.uint8, 4, 0, 64, format="nf4"),
    "e2m1": Scheme(torch.uint8, 4, 0, 32, format="e2m1"),
    "fp8": Scheme(torch.float8_e4m3fn),
}
SIZE = 16384
ASKED = {1: 3.4, 16: 3.4, 64: 2.5, 1024: 0.95}  # times cuBLAS, of 4 bits in groups of 128
SMALL = {"tiny": (5, 40, 128), "decode": (1, 2048, 2048), "decode_8": (8, 2048, 2048)}  # on the CPU


def problems(device: str) -> Iterator[Problem]:
    gpu = device != "cpu"
    sizes = {f"m{m}": (m, SIZE, SIZE) for m in ASKED} if gpu else SMALL
    for dtype in (torch.float16, torch.bfloat16) if gpu else (torch.bfloat16,):
        for name, scheme in SCHEMES.items():
            for size, (m, n, k) in sizes.items():
                groups = k // scheme.group if scheme.group else 1
                moved = (
                    n * k * scheme.bits / 8 + n * groups * (scheme.scale_bytes + scheme.zeros) + 2.0 * (m * k + m * n)
                )
                yield Problem(
                    f"dequant {name} {size} {name_of(dtype)}", f"dequant {name} {name_of(dtype)}", dtype,
                    2.0 * m * n * k, moved, partial(case, device, scheme, dtype, m, n, k),
                    asked={"cuBLAS": ASKED[m]} if gpu and name == "int4 g128" else {},
                    quick=(not gpu and size == "tiny") or (gpu and name != "fp8" and dtype == torch.bfloat16),
                )  # fmt: skip


def case(device: str, scheme: Scheme, dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    """Random words, scales around 2 ** -bits."""
    a = torch.randn(m, k, device=device, dtype=dtype)
    if scheme.words.is_floating_point:
        b = torch.randn(n, k, device=device, dtype=dtype).to(scheme.words)
    else:
        b = torch.randint(0, 256, (n, k * scheme.bits // 8), device=device, dtype=torch.uint8).view(scheme.words)
    groups = k // scheme.group if scheme.group else 1
    scale = ((torch.rand(n, groups, device=device) + 0.5) / 2**scheme.bits).to(dtype)
    if scheme.format:  # one code of the largest number in each group, so that a rival finds the scale from the weights
        values = FORMATS[scheme.format].values
        code = values.index(max(values))
        b.view(n, groups, -1)[:, :, 0] = code | code << 4
        scale = scale.to(FORMATS[scheme.format].scale)
    zero = torch.randint(0, 16, (n, groups), device=device, dtype=torch.int8) if scheme.zeros else None
    stored = scheme.bits, scheme.high_first, scheme.offset
    zeros = [] if zero is None else [zero]
    rows = sample_of(m, 16, device)

    def expected() -> torch.Tensor:
        return reference(
            a[rows].double(), [b], [scale.double()], zeros, *stored, [], "", "", torch.float64, scheme.format
        )

    def widened() -> torch.Tensor:
        return dequantize(b, scale, zero, *stored, torch.float32, scheme.format).to(dtype)

    rivals: dict[str, Prepare] = {"cuBLAS" if device != "cpu" else "torch": lambda: partial(torch.mm, a, widened().T)}
    if device != "cpu" and scheme.bits == 4 and scheme.offset == 8:
        rivals["Humming"] = lambda: humming(a, b, scale)
    if device != "cpu" and scheme.format == "nf4":
        rivals["bitsandbytes"] = lambda: bitsandbytes(a, widened(), scheme.group)
    ours = partial(dequant_gemm, a, [b], [scale], zeros, *stored, [], "", "", dtype, scheme.format)
    return Case(ours, rivals, lambda out: out[rows], expected)


def humming(a: torch.Tensor, words: torch.Tensor, scale: torch.Tensor) -> Call:
    """Humming's kernels."""
    weights: Any = importlib.import_module("rivals.weights")
    return partial(weights.humming_int4(words, scale), a)


def bitsandbytes(a: torch.Tensor, weight: torch.Tensor, group: int) -> Call:
    """bitsandbytes' kernels for one row; it widens weights for more."""
    weights: Any = importlib.import_module("rivals.weights")
    return partial(weights.bitsandbytes_nf4(weight, group)[0], a)


if __name__ == "__main__":
    sys.exit(main(["dequant"], __doc__))
