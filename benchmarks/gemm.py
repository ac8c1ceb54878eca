# SPDX-License-Identifier: Apache-2.0
"""Matrix products: `python -m benchmarks.gemm [--quick] [--only M5,V0] [--rivals cuBLAS,tilelang] [--json FILE]`.

On a GPU M0 to M7 (weights and activations of large language models) and V0 to V7 (one row) in both 16-bit dtypes, with
weights stored k x n and n x k, and R8 to R128 (so many rows by weights of Llama-3-8B, Qwen2.5-7B and Qwen2.5-1.5B) in
one. On the CPU products with epilogues too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import tilelang_kernels
from benchmarks.problem import Case, Prepare, Problem, inductor, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.gemm.gemm import gemm, reference

MATRICES = {  # m, n, k
    "M0": (4096, 1024, 8192), "M1": (4096, 8192, 8192), "M2": (4096, 28672, 8192), "M3": (4096, 8192, 28672),
    "M4": (8192, 1024, 8192), "M5": (8192, 8192, 8192), "M6": (8192, 28672, 8192), "M7": (8192, 8192, 28672),
    "V0": (1, 16384, 16384), "V1": (1, 43008, 14336), "V2": (1, 14336, 14336), "V3": (1, 57344, 14336),
    "V4": (1, 14336, 57344), "V5": (1, 9216, 9216), "V6": (1, 36864, 9216), "V7": (1, 9216, 36864),
    "m16": (16, 16384, 16384), "m64": (64, 16384, 16384),
}  # fmt: skip
FEW_ROWS = (8, 16, 24, 32, 48, 64, 96, 128)
WEIGHTS = ((6144, 4096), (4096, 14336), (28672, 4096), (4608, 3584), (1536, 8960))  # n, k
MATRICES |= {f"R{m} {n}x{k}": (m, n, k) for m in FEW_ROWS for n, k in WEIGHTS}
ASKED = {"R": {"cuBLAS": 1.0}, "M": {"cuBLAS": 1.02}, "V": {"cuBLAS": 1.05}, "m": {"cuBLAS": 1.0}}
QUICK = ("M0 fp16 kxn", "M5 fp16 kxn", "M5 fp16 nxk", "M5 bf16 kxn", "V0 fp16 nxk", "V5 fp16 nxk")

BIAS_GELU = "v=add(acc0,x0);w=gelu(v);ret w"
SWIGLU = "g=silu(acc0);y=mul(g,acc1);ret y"
ON_CPU = {  # dtype, m, n, k
    "tiny": (torch.float32, 48, 40, 56), "tiny_linear_gelu": (torch.float32, 24, 40, 56),
    "tiny_swiglu": (torch.bfloat16, 24, 40, 56),
    "square": (torch.float32, 1024, 1024, 1024), "square_bf16": (torch.bfloat16, 512, 512, 512),
    "ragged": (torch.float32, 777, 555, 999), "linear": (torch.float32, 512, 1024, 1024),
    "linear_gelu": (torch.float32, 512, 1024, 1024), "linear_bf16": (torch.bfloat16, 256, 1024, 1024),
    "linear_gelu_bf16": (torch.bfloat16, 512, 1024, 1024), "swiglu_bf16": (torch.bfloat16, 256, 1024, 1024),
    "swiglu": (torch.float32, 256, 1024, 1024), "decode": (torch.float32, 1, 2048, 2048),
    "decode_bf16": (torch.bfloat16, 1, 2048, 2048), "decode_8": (torch.float32, 8, 2048, 2048),
    "decode_8_bf16": (torch.bfloat16, 8, 2048, 2048),
    "long_k": (torch.float32, 16, 64, 65536),
}  # fmt: skip


def problems(device: str) -> Iterator[Problem]:
    if device == "cpu":
        yield from on_cpu()
        return
    for dtype in (torch.float16, torch.bfloat16):
        for turned in (False, True):
            for name, (m, n, k) in MATRICES.items():
                if name[0] == "R" and dtype != torch.bfloat16:
                    continue
                what = f"{name_of(dtype)} {'nxk' if turned else 'kxn'}"
                yield Problem(
                    f"gemm {name} {what}", f"gemm {name[0]} {what}", dtype, 2.0 * m * n * k,
                    2.0 * (m * k + n * k + m * n), partial(plain, device, dtype, turned, m, n, k),
                    asked=ASKED[name[0]], quick=f"{name} {what}" in QUICK,
                )  # fmt: skip


def operands(
    device: str, dtype: torch.dtype, turned: bool, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """a `[m, k]` and b `[k, n]`, stored `[n, k]` if turned."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    return draw(m, k), draw(n, k).T if turned else draw(k, n)


def plain(device: str, dtype: torch.dtype, turned: bool, m: int, n: int, k: int) -> Case:
    a, b = operands(device, dtype, turned, m, n, k)
    rivals: dict[str, Prepare] = {"cuBLAS": lambda: partial(torch.mm, a, b), "Triton": partial(triton, a, b)}
    if m % 128 == 0:
        rivals["tilelang"] = partial(tilelang, a, b, turned)
    return case(a, [b], [], "", "", rivals)


def case(
    a: torch.Tensor, bs: Sequence[torch.Tensor], aux: Sequence[torch.Tensor], kinds: str, epilogue: str,
    rivals: dict[str, Prepare],
) -> Case:  # fmt: skip
    rows = sample_of(a.shape[0], 128, a.device.type)

    def expected() -> torch.Tensor:
        wide = [[x.double() for x in xs] for xs in (bs, aux)]
        return reference(a[rows].double(), *wide, kinds, epilogue, torch.float64)

    return Case(partial(gemm, a, bs, aux, kinds, epilogue, a.dtype), rivals, lambda out: out[rows], expected)


def triton(a: torch.Tensor, b: torch.Tensor) -> Call:
    """The best product that Inductor makes of Triton."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}
    return inductor(torch.matmul, a, b, options=options)


def tilelang(a: torch.Tensor, b: torch.Tensor, turned: bool) -> Call:
    module = importlib.import_module("tilelang")
    dtype = str(a.dtype).removeprefix("torch.")
    return partial(tilelang_kernels.gemm(module, *a.shape, b.shape[1], dtype, turned), a, b.T if turned else b)


def on_cpu() -> Iterator[Problem]:
    for name, (dtype, m, n, k) in ON_CPU.items():
        count = 2 if "swiglu" in name else 1
        moved = float(dtype.itemsize * (m * k + count * n * k + m * n))
        make = partial(small, name, dtype, m, n, k)
        yield Problem(
            f"gemm {name} {m}x{n}x{k}", "gemm", dtype, 2.0 * m * n * k * count, moved, make, quick="tiny" in name
        )  # fmt: skip


def small(name: str, dtype: torch.dtype, m: int, n: int, k: int) -> Case:
    turned = any(part in name for part in ("linear", "swiglu", "decode"))
    a, b = operands("cpu", dtype, turned, m, n, k)
    if "gelu" in name:
        bias = torch.randn(n, dtype=dtype)
        return case(a, [b], [bias], "r", BIAS_GELU, {"torch": lambda: lambda: F.gelu(F.linear(a, b.T, bias))})
    if "swiglu" in name:
        up = torch.randn(n, k, dtype=dtype)
        both = {"torch": lambda: lambda: F.silu(F.linear(a, b.T)) * F.linear(a, up)}
        return case(a, [b, up.T], [], "", SWIGLU, both)
    return case(a, [b], [], "", "", {"torch": lambda: partial(torch.mm, a, b)})


if __name__ == "__main__":
    sys.exit(main(["gemm"], __doc__))
