# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits for tests: schemes of storing them, random operands, and the exact product."""

from dataclasses import dataclass

import torch

from torch_tile.kernels.gemm import spec as gemm_spec
from torch_tile.kernels.gemm.dequant import reference
from torch_tile.kernels.gemm.packed import Factor, Spec, Storage


@dataclass(frozen=True)
class Scheme:
    """How weights are stored: dtype of words, bits and order of fields, offset, columns of a group, dtypes of scales
    and zeros, dtype of a.
    """

    words: torch.dtype
    bits: int = 8
    high_first: bool = False
    offset: int = 0
    group: int = 0
    scale: torch.dtype | None = torch.float32
    zero: torch.dtype | None = None
    a: torch.dtype = torch.bfloat16
    format: str = ""


I8, U8, HALF, BF16, F32, F64 = torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64
E8M0 = torch.float8_e8m0fnu
SWIGLU = "g=silu(acc0);u=add(acc1,x0);y=mul(g,u);ret y"
GROUPS = 0, 16, 32, 64, 128, 192, 1024  # columns that share a scale; 0: a row


def weights(problems, scheme, n, k, transposed=False):
    """Words, a scale and a zero of `[N, K]` weights."""
    shape = (n, k * scheme.bits // 8)
    if scheme.words.is_floating_point:
        b = problems.tensor(*shape, layout="dense").to(scheme.words)
    else:
        b = torch.randint(0, 256, shape, generator=problems.generator, dtype=torch.uint8).view(scheme.words)
    groups = k // scheme.group if scheme.group else 1
    of = lambda: problems.tensor(n, groups, layout=problems.pick("dense", "turned", "slice"))  # noqa: E731
    scale = None if scheme.scale is None else (of().abs() + 0.5).to(scheme.scale)
    zero = None if scheme.zero is None else (of() * 3).abs().to(scheme.zero)
    return b.t().contiguous().t() if transposed else b, scale, zero


def arguments(problems, scheme, m, n, k, products=1, transposed=False):
    """Of `dequant_gemm`, up to the auxiliary operands."""
    stored = [weights(problems, scheme, n, k, transposed) for _ in range(products)]
    bs, scales, zeros = ([x for x in xs if x is not None] for xs in zip(*stored, strict=True))
    a = problems.tensor(m, k, dtype=scheme.a) / 8
    return a, bs, scales, zeros, scheme.bits, scheme.high_first, scheme.offset


def exact(a, bs, scales, zeros, *rest, format=""):
    return reference(a.double(), bs, [s.double() for s in scales], zeros, *rest, F64, format)


def exact_parts(unit, *args):
    """The exact product of arguments without an epilogue, in parts of a unit."""
    return exact(*args) / unit


def form_of(bits, group, products=1, words=torch.int32, dtype=torch.float16):
    scale = Factor(dtype, False)
    storage = Storage(words, False, bits, False, 8, "", (False,) * products, group, scale, None, True)
    return Spec(gemm_spec.Spec(dtype, dtype, False, (False,) * products, (), "", 8), storage, dtype)
