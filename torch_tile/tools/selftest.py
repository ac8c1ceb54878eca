# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile doctor --selftest`: a minute of computing on this machine, compared with float64.

Each check is a function of a device. It returns what it compared, and raises where a number is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import torch_tile.language as T
import torch_tile.ops  # noqa: F401 - registers torch.ops.tile

Check = Callable[[str], str]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest number of a result
BIAS_GELU, SWIGLU = "v=add(acc0,x0);w=gelu(v);ret w", "g=silu(acc0);y=mul(g,acc1);ret y"


def devices() -> list[str]:
    """Return the CPU, and the GPU if there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Return the names and functions of all checks, for each device."""
    for device in devices():
        for name, check in CHECKS.items():
            yield f"{name} {device}", lambda check=check, device=device: check(device)  # type: ignore[misc]


def check_branches(device: str) -> str:
    """Check branches on an index that store one element, with and without vectors: some compilers get them wrong."""
    from torch_tile.jit import compile

    count = 0
    for columns, first in ((48, 13), (48, 32), (64, 16), (7, 3)):
        for less, more in ((2.0, 0.25), (1.5, 7.0)):
            a, b = (torch.randn(4, columns, device=device) for _ in range(2))
            want = torch.where(torch.arange(columns, device=device) >= first, b - less, a * more)
            compile(_branches(columns, first, less, more), target=device)(a, b)
            _compare("a branch", [a], [want.double()], torch.float32)
            count += 1
    return f"{count} kernels"


def _branches(columns: int, first: int, less: float, more: float) -> Any:
    """Build a kernel with branches on an index in a parallel loop."""

    @T.prim_func
    def branches(A: T.Tensor((4, columns), "float32"), B: T.Tensor((4, columns), "float32")):  # type: ignore[no-untyped-def,valid-type]
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(4, columns):
                if j >= first:
                    A[i, j] = B[i, j] - less
                else:
                    A[i, j] = A[i, j] * more

    return branches


def check_products(device: str) -> str:
    """Compare products, dense and grouped, with epilogues."""
    tile = torch.ops.tile
    for dtype in _dtypes(device):
        a, b, c = _random_tensors(device, dtype, (77, 200), (200, 136), (200, 136))
        bias = _random_tensors(device, dtype, (136,))[0]
        x, y, z, w = (t.double() for t in (a, b, c, bias))
        got = [tile.gemm(a, [b], [bias], "r", BIAS_GELU, dtype), tile.gemm(a, [b, c], [], "", SWIGLU, dtype)]
        _compare("gemm", got, [F.gelu(x @ y + w), F.silu(x @ y) * (x @ z)], dtype)
        (experts,) = _random_tensors(device, dtype, (3, 200, 136))
        ends = torch.tensor([20, 20, 77], dtype=torch.int32, device=device)
        want = torch.cat([x[:20] @ experts[0].double(), x[20:] @ experts[2].double()])
        _compare("grouped_gemm", [tile.grouped_gemm(a, [experts], ends, [], "", "ret acc0", dtype)], [want], dtype)
        words = torch.randint(-128, 128, (136, 200), dtype=torch.int8, device=device)
        (scale,) = _random_tensors(device, dtype, (136, 1))
        got = [tile.dequant_gemm(a, [words], [scale], [], 8, False, 0, [], "", "ret acc0", dtype)]
        _compare("dequant_gemm", got, [x @ (words.double() * scale.double()).T], dtype)
        if dtype == torch.float64:
            continue
        values, scales = tile.quantize_fp8(a, 128, torch.float8_e4m3fn)
        eights = b.to(torch.float8_e4m3fn)
        got = [tile.scaled_gemm(values, eights, scales, torch.ones(1, 1, device=device), [], "", "ret acc0", dtype)]
        wide = values.double() * scales.double().repeat_interleave(128, 1)[:, :200]
        _compare("scaled_gemm", got, [wide @ eights.double()], dtype)
    return "gemm, grouped_gemm, dequant_gemm, quantize_fp8, scaled_gemm"


def check_attention(device: str) -> str:
    """Compare attention and its gradients, decoding, and scores that are large."""
    for dtype in _dtypes(device):
        q, k, v, grad = _random_tensors(device, dtype, (1, 4, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64), (1, 4, 70, 64))
        for size in (1.0, 2.0**10):  # of queries and keys; float16 holds no 2^20
            inputs = [t.detach().requires_grad_(size == 1.0) for t in (q * size, k * size, v)]
            exact = [t.detach().double().requires_grad_() for t in inputs]
            out = torch.ops.tile.attention(*inputs, causal=True)
            mask = torch.ones(70, 70, dtype=torch.bool, device=device).tril()
            scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT * 64**-0.5
            want = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ exact[2].repeat_interleave(2, 1)
            if size == 1.0:
                out.backward(grad)
                want.backward(grad.double())
                _compare("attention_backward", [t.grad for t in inputs], [t.grad for t in exact], dtype)
                _compare("attention", [out], [want], dtype)
            elif not bool(out.isfinite().all()):
                raise AssertionError("attention is not finite for large scores")
        q, r, kv, pe = _random_tensors(device, dtype, (2, 1, 8, 64), (2, 1, 8, 16), (2, 90, 64), (2, 90, 16))
        x, y, c, p = (t.double() for t in (q, r, kv, pe))
        scores = (torch.einsum("bthc,bsc->bths", x, c) + torch.einsum("bthr,bsr->bths", y, p)) * 80**-0.5
        got = torch.ops.tile.mla_decode(q, r, kv, pe)
        _compare("mla_decode", [got], [torch.einsum("bths,bsc->bthc", scores.softmax(-1), c)], dtype)
    return "attention, attention_backward, mla_decode"


def check_rows(device: str) -> str:
    """Compare norms and softmax."""
    tile = torch.ops.tile
    for dtype in _dtypes(device):
        x, weight, bias = _random_tensors(device, dtype, (33, 500), (500,), (500,))
        a, w, b = (t.double() for t in (x, weight, bias))
        got = tile.layer_norm(x, weight, bias), tile.rms_norm(x, weight, 1e-6), tile.softmax(x)
        want = [F.layer_norm(a, (500,), w, b), F.rms_norm(a, (500,), w, 1e-6), a.softmax(-1)]
        _compare("norms", got, want, dtype)
    return "layer_norm, rms_norm, softmax"


CHECKS: dict[str, Check] = {
    "branches": check_branches, "products": check_products, "attention": check_attention, "rows": check_rows,
}  # fmt: skip


def _dtypes(device: str) -> Sequence[torch.dtype]:
    """Return the dtypes to check on a device."""
    return (torch.float32, torch.bfloat16) if device == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


def _random_tensors(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Make random tensors on a device."""
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def _compare(what: str, got: Sequence[Any], want: Sequence[Any], dtype: torch.dtype) -> None:
    """Raise AssertionError where a result differs by more than its dtype explains."""
    for a, b in zip(got, want, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        if not error <= TOLERANCES[dtype]:
            raise AssertionError(f"{what} in {dtype} is off by {error:.2g} of the largest number")
