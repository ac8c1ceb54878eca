# SPDX-License-Identifier: Apache-2.0
"""The library's kernels as they are compiled for a target, with no such machine at hand.

The families' entry functions are called on tensors without memory, so that their own dispatch chooses forms and
configurations; what they would launch is compiled and passed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from benchmarks.library_case import ALL, FLOATS, HALVES, Case, Make
from benchmarks.library_scans import scans
from benchmarks.windows import window_calls
from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels import common
from torch_tile.kernels.attention import (
    backward,
    block_sparse,
    forward as attention,
    fp8,
    fused_backward,
    nsa,
    paged,
    varlen,
)
from torch_tile.kernels.attention.args import AppendArgs
from torch_tile.kernels.attention.scaled_keys import E4M3
from torch_tile.kernels.attention.score_mod import HIDES
from torch_tile.kernels.epilogue.program import soft_cap
from torch_tile.kernels.gemm import (
    dequant as dequant_gemm,
    gemm,
    grouped,
    grouped_dequant,
    grouped_scaled,
    grouped_scaled_wgrad,
    grouped_wgrad,
    masked_scaled,
    scaled,
)
from torch_tile.kernels.loss import cross_entropy, linear_cross_entropy
from torch_tile.kernels.mla import (
    decode as mla_decode,
    indexer,
    packed as mla_packed,
    scheduler as mla_schedule,
)
from torch_tile.kernels.moe import group as group_tokens, route
from torch_tile.kernels.norm import fused as fused_norm, fused_quantize, norm, quantize, softmax
from torch_tile.runtime.launch_plan import Launch, LaunchPlan, planning


def catalogue() -> list[Case]:
    """List representative calls of every family, for each dtype that it has kernels for."""
    products = *_gemms(), *_grouped_gemms(), *_dequant_gemms(), *_scaled_gemms(), *_experts()
    attentions = *_attentions(), *_attention_backwards(), *_attentions_of_sequences()
    convolutions = (Case(*named) for named in window_calls())
    return [*products, *attentions, *_decodings(), *_rows(), *_routing(), *scans(), *convolutions, *_large_products()]


def compiled(case: Case, target: Target) -> list[JITKernel]:
    """Compile the kernels that a case launches on a machine of `target`, in their order; none is run.

    Empty where the family leaves the case to plain torch.
    """
    return [launch.kernel for launch in launches(case, target)]


def launches(case: Case, target: Target) -> list[Launch]:
    """Return the kernels that a case launches, with their specs and arguments. None is run."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    plan = LaunchPlan(machine=machine_for(target))
    # Reads of tensors by plain torch are refused.
    with FakeTensorMode(), planning(plan), suppress(DataDependentOutputException):
        case.call(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    return plan.launches


def machine_for(target: Target) -> common.Machine:
    """Make the description of a machine of a target that is not at hand."""
    return common.Machine(target, target.sms if target.kind == "cuda" else 128)


def _gemms() -> Iterator[Case]:
    """Yield cases of `gemm`: square, odd, few rows, long K, and with epilogues."""
    bias_gelu, swiglu = "v=add(acc0,x0);w=gelu(v);ret w", "g=silu(acc0);y=mul(g,acc1);ret y"
    for name, dtype in ALL.items():
        for shape in ((2048, 2048, 2048), (512, 512, 512), (777, 555, 999), (64, 4096, 4096), (16, 64, 65536)):
            yield Case(f"gemm {name} {'x'.join(map(str, shape))}", _gemm(dtype, *shape))
        yield Case(f"gemm {name} linear", _gemm(dtype, 512, 1024, 768, transposed=True))
        yield Case(f"gemm {name} 4096x8192x4096 linear", _gemm(dtype, 4096, 8192, 4096, transposed=True))
        for shape in ((256, 4608, 7168), (768, 7168, 2048)):  # widths between
            yield Case(f"gemm {name} {'x'.join(map(str, shape))} linear", _gemm(dtype, *shape, transposed=True))
        yield Case(f"gemm {name} 4096x28672x4096", _gemm(dtype, 4096, 28672, 4096))
        yield Case(f"gemm {name} 8192x1600x6400 linear", _gemm(dtype, 8192, 1600, 6400, transposed=True))
        yield Case(
            f"gemm {name} 4096x8192x4096 swiglu", _gemm(dtype, 4096, 8192, 4096, swiglu, products=2, transposed=True)
        )
        for m in (24, 96):  # made as their transposes on Hopper; with shared sums for a long K
            yield Case(f"gemm {name} {m} rows", _gemm(dtype, m, 6144, 4096, bias_gelu, "r", transposed=True))
            yield Case(f"gemm {name} {m} rows swiglu", _gemm(dtype, m, 4096, 4096, swiglu, products=2))
            yield Case(f"gemm {name} {m} rows, long", _gemm(dtype, m, 1536, 8960))
        yield Case(f"gemm {name} row", _gemm(dtype, 1, 2048, 2048, transposed=True))
        yield Case(f"gemm {name} bias gelu", _gemm(dtype, 512, 1024, 768, bias_gelu, "r", transposed=True))
        yield Case(f"gemm {name} swiglu", _gemm(dtype, 512, 1024, 768, swiglu, products=2, transposed=True))


def _gemm(
    dtype: torch.dtype, m: int, n: int, k: int, epilogue: str = "", kinds: str = "", products: int = 1,
    transposed: bool = False,
) -> Callable[[Make], object]:  # fmt: skip
    """Return a call of `gemm` with tensors of these sizes."""

    def call(make: Make) -> object:
        bs = [make((n, k), dtype).T if transposed else make((k, n), dtype) for _ in range(products)]
        return gemm.gemm(make((m, k), dtype), bs, [make((n,), dtype) for _ in kinds], kinds, epilogue, dtype)

    return call


def _grouped_gemms() -> Iterator[Case]:
    """Make grouped products of 64 matrices, with rows for each as in decoding, in short prompts, and in training."""
    swiglu, weighted = "g=silu(acc0);y=mul(g,acc1);ret y", "v=mul(acc0,x0);ret v"
    for name, dtype in ALL.items():
        for rows in (4, 30, 512):
            yield Case(f"grouped_gemm {name} {rows} rows swiglu", _grouped_gemm(dtype, rows, swiglu, products=2))
            yield Case(f"grouped_gemm {name} {rows} rows weighted", _grouped_gemm(dtype, rows, weighted, "c"))
        yield Case(f"grouped_gemm {name} stored [G, K, N]", _grouped_gemm(dtype, 512, transposed=False))
        yield Case(f"k_grouped_gemm {name}", _k_grouped_gemm(dtype, 2048, 1536))
        yield Case(f"k_grouped_gemm {name} ragged", _k_grouped_gemm(dtype, 777, 555))


def _grouped_gemm(
    dtype: torch.dtype, rows: int, epilogue: str = "", kinds: str = "", products: int = 1, transposed: bool = True
) -> Callable[[Make], object]:
    """Return a call of `grouped_gemm` with 64 groups of so many rows."""

    def call(make: Make) -> object:
        groups, n, k = 64, 1536, 2048
        bs = [make((groups, n, k), dtype).mT if transposed else make((groups, k, n), dtype) for _ in range(products)]
        a, offsets, aux = make((groups * rows, k), dtype), make((groups,), torch.int32), make((groups * rows, 1), dtype)
        return grouped.grouped_gemm(a, bs, offsets, [aux] if kinds else [], kinds, epilogue, dtype)

    return call


def _k_grouped_gemm(dtype: torch.dtype, m: int, n: int) -> Callable[[Make], object]:
    """Return a call of `k_grouped_gemm` with results of `m x n`."""

    def call(make: Make) -> object:
        rows, offsets = 64 * 512, make((64,), torch.int32)
        return grouped_wgrad.k_grouped_gemm(make((rows, m), dtype), make((rows, n), dtype), offsets, dtype)

    return call


def _dequant_gemms() -> Iterator[Case]:
    """Yield cases of `dequant_gemm`: integer, float8 and table formats, for few and many rows."""
    schemes = {
        "int8": (torch.int8, 8, 0, False), "int8 groups": (torch.int8, 8, 32, True),
        "int4": (torch.uint8, 4, 32, True), "int4 g128": (torch.uint8, 4, 128, False),
        "fp8": (torch.float8_e4m3fn, 8, 0, False),
    }  # fmt: skip
    for name, dtype in ALL.items():
        for scheme in schemes if dtype in HALVES.values() else ("int4",):
            for m in (1, 16, 64, 1024):
                yield Case(f"dequant_gemm {name} {scheme} {m}", _dequant_gemm(dtype, m, 4096, *schemes[scheme]))
        yield Case(f"dequant_gemm {name} many columns", _dequant_gemm(dtype, 16, 16384, *schemes["int4"]))
        for m in (200, 300, 384) if dtype is torch.bfloat16 else ():  # tiles of 224, 160 and 192 rows
            yield Case(f"dequant_gemm {name} int4 g128 {m}", _dequant_gemm(dtype, m, 16384, *schemes["int4 g128"]))
        for m in (16, 1024):
            yield Case(f"dequant_gemm {name} swiglu {m}", _dequant_gemm(dtype, m, 4096, *schemes["int4"], products=2))
    tables = {"nf4": (64, torch.float32), "e2m1": (32, torch.float8_e8m0fnu)}
    nvfp4 = 16, torch.float8_e4m3fn
    for name, dtype in HALVES.items():
        for table, scales in tables.items():
            for m in (1, 2, 64, 1024):
                yield Case(f"dequant_gemm {name} {table} {m}", _table_gemm(dtype, m, table, *scales))
        for m in (1, 64, 1024):
            yield Case(f"dequant_gemm {name} nvfp4 {m}", _table_gemm(dtype, m, "e2m1", *nvfp4))


def _scaled_gemms() -> Iterator[Case]:
    """Yield cases of float8 products by how operands are scaled, and of the rounding of activations to float8."""
    forms = {"rows": ((1, 0), (1, 0)), "blocks": ((1, 128), (128, 128)), "runs": ((1, 128), (1, 128))}
    for name, form in forms.items():
        for m in (16, 4096):
            yield Case(f"scaled_gemm {name} {m}", _scaled_gemm(m, *form))
    for name, m in (("rows", 200), ("rows", 1152), ("rows", 1536), ("blocks", 200), ("blocks", 1120), ("blocks", 2624)):
        yield Case(f"scaled_gemm {name} {m}", _scaled_gemm(m, *forms[name]))
    for name in ("blocks", "runs"):  # stored by columns, as torch's: aligned, and not
        for m in (200, 214, 4095, 4096):
            yield Case(f"scaled_gemm {name} by columns {m}", _scaled_gemm(m, *forms[name], by_columns=True))
    for m in (16, 4096):
        yield Case(f"scaled_gemm int8 {m}", _scaled_gemm(m, *forms["rows"], dtype=torch.int8))
    for bits, of, sizes in ((4, "runs", (16, 1024)), (2, "rows", (1, 16, 1024))):
        for m in sizes:
            yield Case(f"scaled_gemm int8 by int{bits} {m}", _scaled_gemm(m, *forms[of], dtype=torch.int8, bits=bits))
    for bits, name, of_b in ((4, "groups", (1, 128)), (4, "rows", (1, 0)), (1, "rows", (1, 0))):
        for m in (1, 64):
            call = _scaled_gemm(m, (1, 0), of_b, dtype=torch.int8, bits=bits)
            yield Case(f"scaled_gemm int8 by int{bits} {name} {m}", call)
    for group in (0, 128):
        yield Case(f"quantize_fp8 {group}", _quantization(group))
    yield Case("quantize_int8", _quantization(0, torch.int8))
    for group in (0, 128):
        yield Case(f"fused_norm_quantize {group}", _normed_quantization(group))
        yield Case(f"silu_mul_quantize {group}", _gated_quantization(group))


def _scaled_gemm(
    m: int,
    of_a: tuple[int, int],
    of_b: tuple[int, int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    bits: int = 8,
    by_columns: bool = False,
) -> Callable[[Make], object]:
    """Return a call of `scaled_gemm`; scales as (rows that share one, columns that share one or 0).

    Those of rows lie in memory by rows, or `by_columns`.
    """
    n = k = 4096

    def call(make: Make) -> object:
        def scale(rows: int, shared: int, group: int) -> torch.Tensor:
            """Make the scales of an operand."""
            shape = rows // shared, k // group if group else 1
            return make(shape[::-1], torch.float32).mT if by_columns and shared == 1 else make(shape, torch.float32)

        scale_a, scale_b = scale(m, *of_a), scale(n, *of_b)
        a, b = make((m, k), dtype), make((n, k * bits // 8), dtype)
        return scaled.scaled_gemm(a, b.mT, scale_a, scale_b.mT, [], "", "", torch.bfloat16, bits)

    return call


def _experts() -> Iterator[Case]:
    """Make grouped products of 32 matrices of few bits or of float8, with rows for each as in decoding and in prompts.

    Schemes of few bits are (columns of a run, scale, format).
    """
    gated = "a=add(acc0,x0);b=add(acc1,x1);g=min(a,7.0);s=sigmoid(g);v=mul(g,s);y=mul(v,b);ret y"
    schemes = {"e2m1": (32, torch.float8_e8m0fnu, "e2m1"), "int4": (128, torch.bfloat16, "")}
    for rows in (4, 512):
        for name, scheme in schemes.items():
            yield Case(f"grouped_dequant_gemm {name} {rows}", _few_bit_experts(rows, *scheme))
            yield Case(f"grouped_dequant_gemm {name} gated {rows}", _few_bit_experts(rows, *scheme, gated, 2))
        for name, form in {"rows": ((1, 0), (1, 0)), "blocks": ((1, 128), (128, 128))}.items():
            yield Case(f"grouped_scaled_gemm {name} {rows}", _float8_experts(rows, *form))
            yield Case(f"masked_scaled_gemm {name} {rows}", _masked_experts(rows, *form))
        for of in ("groups", "runs"):
            yield Case(f"k_grouped_scaled_gemm {of} {rows}", _float8_gradients(rows, of == "runs"))


def _few_bit_experts(
    rows: int, group: int, scale: torch.dtype, format: str, epilogue: str = "", products: int = 1
) -> Callable[[Make], object]:
    """Return a call of `grouped_dequant_gemm` with 4-bit weights in a number format."""

    def call(make: Make) -> object:
        groups, n, k, dtype = 32, 2048, 2048, torch.bfloat16
        words = make((groups, products * n, k // 2), torch.uint8)
        factors = make((groups, products * n, k // group), scale)
        bs, scales = ([x[:, i::products] for i in range(products)] for x in (words, factors))
        aux = [make((groups, n), torch.float32) for _ in range(products)] if epilogue else []
        a, offsets, fields = (
            make((groups * rows, k), dtype),
            make((groups,), torch.int32),
            (4, False, 0 if format else 8),
        )
        return grouped_dequant.grouped_dequant_gemm(
            a, bs, scales, [], offsets, *fields, aux, "g" * len(aux), epilogue, dtype, format
        )

    return call


def _float8_experts(rows: int, of_a: tuple[int, int], of_b: tuple[int, int]) -> Callable[[Make], object]:
    """Scales as (rows that share one, columns that share one or 0). Those of a lie in memory by columns, as torch's."""
    float8, groups, n, k = torch.float8_e4m3fn, 32, 2048, 2048

    def call(make: Make) -> object:
        runs = [k // columns if columns else 1 for _, columns in (of_a, of_b)]
        scale_a = make((runs[0], groups * rows), torch.float32).mT
        scale_b = make((groups, n // of_b[0], runs[1]), torch.float32)
        a, b, offsets = make((groups * rows, k), float8), make((groups, n, k), float8), make((groups,), torch.int32)
        return grouped_scaled.grouped_scaled_gemm(
            a, b.mT, scale_a, scale_b.mT, offsets, [], "", "", torch.bfloat16
        )  # fmt: skip

    return call


def _float8_gradients(rows: int, runs: bool) -> Callable[[Make], object]:
    """Scales of rows and columns for each group, or for each of the `runs` of 128. All lie in memory by columns."""
    float8, groups, m, n = torch.float8_e4m3fn, 32, 2048, 2048

    def call(make: Make) -> object:
        k = groups * rows
        shape = (1, k // 128) if runs else (groups, 1)
        scales = [make((*shape, size), torch.float32) for size in (m, n)]
        a, b, offsets = make((m, k), float8), make((n, k), float8), make((groups,), torch.int32)
        return grouped_scaled_wgrad.k_grouped_scaled_gemm(a, b.mT, scales[0].mT, scales[1], offsets, torch.bfloat16)

    return call


def _masked_experts(rows: int, of_a: tuple[int, int], of_b: tuple[int, int]) -> Callable[[Make], object]:
    """Return a call of `masked_scaled_gemm`; scales as for `_float8_experts`."""
    float8, groups, n, k = torch.float8_e4m3fn, 32, 2048, 2048

    def call(make: Make) -> object:
        runs = [k // columns if columns else 1 for _, columns in (of_a, of_b)]
        scale_a = make((groups, rows, runs[0]), torch.float32)
        scale_b = make((groups, n // of_b[0], runs[1]), torch.float32)
        a, b, counts = make((groups, rows, k), float8), make((groups, n, k), float8), make((groups,), torch.int32)
        return masked_scaled.masked_scaled_gemm(
            a, b.mT, scale_a, scale_b.mT, counts, [], "", "", torch.bfloat16
        )  # fmt: skip

    return call


def _quantization(group: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Callable[[Make], object]:
    """Return a call of `quantize_fp8` in runs of `group` columns, or of `quantize_int8`."""
    return lambda make: quantize.quantize_fp8(make((4096, 7168), torch.bfloat16), group, dtype)


def _gated_quantization(group: int) -> Callable[[Make], object]:
    """Return a call of `silu_mul_quantize` on the halves of one matrix."""

    def call(make: Make) -> object:
        gate, up = make((4096, 2 * 7168), torch.bfloat16).chunk(2, -1)
        return quantize.silu_mul_quantize(gate, up, group, torch.float8_e4m3fn)

    return call


def _normed_quantization(group: int) -> Callable[[Make], object]:
    """Return a call of `fused_norm_quantize`: an RMS norm of a sum with a residual, which is kept."""

    def call(make: Make) -> object:
        dtype, texts = torch.bfloat16, ("v0=add(acc0,x0);ret v0", "v0=mul(acc0,x1);ret v0")
        aux = [make((4096, 7168), dtype), make((7168,), dtype)]
        norm = make((4096, 7168), dtype), aux, "tr", *texts, False, 1e-6, True, dtype
        return fused_quantize.fused_norm_quantize(*norm, group, torch.float8_e4m3fn)

    return call


def _large_products() -> Iterator[Case]:
    """Yield products of few rows with large 4-bit weights."""
    for name, dtype in HALVES.items():
        for m in (1, 2, 4, 8):
            call = _dequant_gemm(dtype, m, 16384, torch.int8, 4, 128, False, k=16384)
            yield Case(f"dequant_gemm {name} large {m}", call)
            call = _dequant_gemm(dtype, m, 14336, torch.uint8, 4, 128, False, 2)
            yield Case(f"dequant_gemm {name} gated {m}", call)
        for m, words in ((6, torch.int8), (32, torch.int8), (64, torch.int8), (64, torch.uint8)):
            call = _dequant_gemm(dtype, m, 28672, words, 4, 128, False)
            yield Case(f"dequant_gemm {name} {m} rows, many columns, {words}", call)
        for m in (16, 48, 64):
            call = _dequant_gemm(dtype, m, 22016, torch.int8, 4, 128, False)
            yield Case(f"dequant_gemm {name} {m} rows, three warpgroups", call)
        for products in (1, 2):
            call = _dequant_gemm(dtype, 1, 6144, torch.uint8, 4, 128, False, products, norm=True)
            yield Case(f"dequant_gemm {name} norm in front {products}", call)


def _table_gemm(dtype: torch.dtype, m: int, table: str, group: int, scale: torch.dtype) -> Callable[[Make], object]:
    """Return a call of `dequant_gemm` on weights of a 4-bit number format."""

    def call(make: Make) -> object:
        n = k = 4096
        a, words, scales = make((m, k), dtype), make((n, k // 2), torch.uint8), make((n, k // group), scale)
        return dequant_gemm.dequant_gemm(a, [words], [scales], [], 4, True, 0, [], "", "", dtype, table)

    return call


def _dequant_gemm(
    dtype: torch.dtype, m: int, n: int, words: torch.dtype, bits: int, group: int, zero: bool, products: int = 1,
    k: int = 4096, norm: bool = False,
) -> Callable[[Make], object]:  # fmt: skip
    """Return a call of `dequant_gemm` on weights of integers or float8."""

    def call(make: Make) -> object:
        groups = k // group if group else 1
        bs = [make((n, k * bits // 8), words) for _ in range(products)]
        scales = [make((n, groups), dtype) for _ in bs]
        zeros = [make((n, groups), torch.int8) for _ in bs] if zero else []
        text = "g=silu(acc0);y=mul(g,acc1);ret y" if products == 2 else ""
        a = make((m, k), dtype)
        before = (make((k,), dtype), 1e-5) if norm else (None, None)
        return dequant_gemm.dequant_gemm(a, bs, scales, zeros, bits, False, 0, [], "", text, dtype, "", *before)

    return call


CAP = soft_cap(50.0)
SLOPES = "v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2"


def _attentions() -> Iterator[Case]:
    """Yield cases of `attention`: causal, windows, masks, biases, score functions, decoding."""
    for name, dtype in FLOATS.items():
        for size in (64, 128):
            yield Case(f"attention {name} d{size}", _attention(dtype, size))
            yield Case(f"attention {name} d{size} causal", _attention(dtype, size, causal=True))
        yield Case(f"attention {name} d128 shifted", _attention(dtype, 128, lengths=(1000, 1024), causal=True))
        yield Case(f"attention {name} d80 ragged", _attention(dtype, 80, lengths=(333, 777)))
        yield Case(f"attention {name} grouped", _attention(dtype, 128, groups=4, causal=True))
        if dtype in HALVES.values():
            yield Case(f"attention {name} pairs of tiles", _attention(dtype, 128, (2048, 2048), causal=True, lse=False))
            yield Case(f"attention {name} own keys", _attention(dtype, 64, (8192, 8192), causal=True))
            yield Case(f"attention {name} tiles in turn", _attention(dtype, 128, (1100, 1024)))
            yield Case(f"attention {name} persistent", _attention(dtype, 128, (2304, 2304), 4, causal=True, lse=False))
        yield Case(f"attention {name} window", _attention(dtype, 128, causal=True, window=256))
        yield Case(f"attention {name} packed window", _attention(dtype, 64, (190, 190), 8, causal=True, window=33))
        yield Case(f"attention {name} mask", _attention(dtype, 64, mask=torch.bool))
        yield Case(f"attention {name} bias", _attention(dtype, 64, mask=dtype))
        yield Case(f"attention {name} d128 bias causal", _attention(dtype, 128, causal=True, mask=dtype))
        yield Case(f"attention {name} d128 mask ragged", _attention(dtype, 128, (1000, 1023), 1, True, 0, torch.bool))
        yield Case(f"attention {name} d64 long", _attention(dtype, 64, lengths=(8192, 8192)))
        yield Case(f"attention {name} short", _attention(dtype, 128, lengths=(512, 512)))
        yield Case(f"attention {name} short causal", _attention(dtype, 128, lengths=(400, 512), causal=True))
        yield Case(f"attention {name} d64 packed", _attention(dtype, 64, (40, 256), 8, causal=True))
        for size in (64, 128, 256)[: 1 if dtype == torch.float64 else 3]:
            yield Case(f"attention {name} d{size} cap", _attention(dtype, size, groups=2, causal=True, score=CAP))
        yield Case(f"attention {name} cap full", _attention(dtype, 128, score=CAP))
        yield Case(f"attention {name} cap window", _attention(dtype, 256, groups=2, causal=True, window=256, score=CAP))
        yield Case(f"attention {name} cap mask", _attention(dtype, 128, mask=torch.bool, score=CAP))
        yield Case(f"attention {name} slopes", _attention(dtype, 128, causal=True, score=SLOPES, aux=[(8, 1, 1)]))
        slopes = _attention(dtype, 128, (4, 8192), 8, score=SLOPES, aux=[(64, 1, 1)])
        yield Case(f"attention {name} packed slopes", slopes)
        yield Case(f"attention {name} padding", _attention(dtype, 64, causal=True, score=HIDES, aux=[(2, 1, 1, 1024)]))
        for queries in (1, 8, 16):
            case = f"attention {name} decode" + (f" {queries} queries" if queries > 1 else "")
            yield Case(case, _attention(dtype, 128, lengths=(queries, 8192), groups=8))
        if dtype in HALVES.values():
            for keys in (512, 1000, 2000, 4000):
                few = _attention(dtype, 128, (1, keys), 4, mask=torch.bool)
                yield Case(f"attention {name} decode few keys {keys}", few)
    yield Case("attention fp64 d64", _attention(torch.float64, 64, causal=True))


def _attention(
    dtype: torch.dtype, size: int, lengths: tuple[int, int] = (1024, 1024), groups: int = 1, causal: bool = False,
    window: int = 0, mask: torch.dtype | None = None, score: str = "", aux: Sequence[tuple[int, ...]] = (),
    lse: bool = True,
) -> Callable[[Make], object]:  # fmt: skip
    """Return a call of `attention` with 8 heads of `size` in a batch of 2. `lse` says whether it returns sums."""

    def call(make: Make) -> object:
        queries, keys = lengths
        q, k, v = (make((2, h, s, size), dtype) for h, s in ((8 * groups, queries), (8, keys), (8, keys)))
        bias = None if mask is None else make((1, 1, queries, keys), mask)
        operands = [make(shape, torch.float32) for shape in aux]
        given = q, k, v, bias, causal, None, window, keys - queries, operands, score
        return attention.attention(*given, **({} if lse else {"lse": None}))

    return call


def _attention_backwards() -> Iterator[Case]:
    """Yield cases of `attention_backward`, as for `attention`."""
    for name, dtype in FLOATS.items():
        for size in (64, 128):
            for causal in (False, True):
                call = _attention_backward(dtype, (size, size), causal=causal)
                yield Case(f"attention_backward {name} d{size}" + " causal" * causal, call)
        for size in fused_backward.TILINGS if dtype.itemsize == 2 else ():
            wide = size > fused_backward.WHOLE
            for form in ("", " shared", *([] if wide else [" in turns"]), *([" alone"] if size == 128 else [])):
                call = partial(_fused_backward, dtype, size, form)
                yield Case(f"attention_backward {name} d{size} one kernel{form}", call)
        yield Case(f"attention_backward {name} d192 d128", _attention_backward(dtype, (192, 128), causal=True))
        for size, causal in ((128, True), (192, False)) if dtype == torch.bfloat16 else ():
            call = _attention_backward(dtype, (192, size), (2048, 2048), 4, causal)
            yield Case(f"attention_backward {name} d192 d{size} grouped", call)
        yield Case(f"attention_backward {name} d80 ragged", _attention_backward(dtype, (80, 80), (333, 777)))
        yield Case(f"attention_backward {name} d256", _attention_backward(dtype, (256, 256), causal=True))
        yield Case(f"attention_backward {name} grouped", _attention_backward(dtype, (128, 128), groups=4, causal=True))
        yield Case(f"attention_backward {name} window", _attention_backward(dtype, (128, 128), causal=True, window=256))
        yield Case(f"attention_backward {name} mask", _attention_backward(dtype, (64, 64), mask=torch.bool))
        yield Case(f"attention_backward {name} bias", _attention_backward(dtype, (128, 128), mask=dtype))
        learned = _attention_backward(dtype, (64, 64), mask=dtype, keep="mask")
        yield Case(f"attention_backward {name} learned bias", learned)
        for size in (64, 128, 256)[: 2 if dtype == torch.float64 else 3]:
            cap = _attention_backward(dtype, (size, size), groups=2, causal=True, score=CAP)
            yield Case(f"attention_backward {name} d{size} cap", cap)
        near = _attention_backward(dtype, (128, 128), causal=True, window=256, score=CAP)
        yield Case(f"attention_backward {name} cap window", near)
        slopes = _attention_backward(dtype, (128, 128), causal=True, score=SLOPES, aux=[(8, 1, 1)], keep="x0")
        yield Case(f"attention_backward {name} learned slopes", slopes)
        padded = _attention_backward(dtype, (64, 64), causal=True, score=HIDES, aux=[(2, 1, 1, 1024)])
        yield Case(f"attention_backward {name} padding", padded)
    yield Case("attention_backward fp64 d64", _attention_backward(torch.float64, (64, 64), causal=True))


def _attention_backward(
    dtype: torch.dtype, sizes: tuple[int, int], lengths: tuple[int, int] = (1024, 1024), groups: int = 1,
    causal: bool = False, window: int = 0, mask: torch.dtype | None = None, keep: str = "",
    score: str = "", aux: Sequence[tuple[int, ...]] = (),
) -> Callable[[Make], object]:  # fmt: skip
    """Return a call of `attention_backward` with 8 heads in a batch of 2."""

    def call(make: Make) -> object:
        queries, keys = lengths
        rows = (2, 8 * groups, queries)
        q, grad, out = (make((*rows, n), dtype) for n in (sizes[0], sizes[1], sizes[1]))
        k, v = (make((2, 8, keys, n), dtype) for n in sizes)
        lse = make(rows, common.compute_dtype(dtype))
        bias = None if mask is None else make((1, 1, queries, keys), mask)
        operands = [make(shape, torch.float32) for shape in aux]
        run = backward.attention_backward
        return run(grad, q, k, v, out, lse, bias, causal, None, window, keys - queries, keep, operands, score)

    return call


def _fused_backward(dtype: torch.dtype, size: int, form: str, make: Make) -> object:
    """Call the one kernel of causal attention's gradients where the target has it, with four heads to each of keys.

    In turns, and if it is wide, each head has keys of its own. A block that is alone has few keys. Shared ones are of a
    last wave.
    """
    ordered, alone = form == " in turns", form == " alone"
    length, own = 128 if alone else 2048, ordered or size > fused_backward.WHOLE
    widths = size, min(size, fused_backward.WHOLE)
    q, grad, out = (make((2, 32, length, n), dtype) for n in (*widths, widths[1]))
    k, v = (make((2, 32 if own else 8, length, n), dtype) for n in widths)
    lse = make((2, 32, length), torch.float32)
    has_wgmma = common.machine_of(q).target.has_wgmma
    tiling = replace(fused_backward.TILINGS[size], ordered=ordered, alone=alone) if has_wgmma else None
    if tiling is not None and form == " shared":
        tiling = replace(tiling, shared_wave=132, members=3)
    return backward.attention_backward(grad, q, k, v, out, lse, None, True, tilings=tiling)


def _attentions_of_sequences() -> Iterator[Case]:
    """Yield cases of attention over ragged sequences and over keys in pages."""
    for name, dtype in FLOATS.items():
        for size in (64, 128):
            yield Case(f"attention_varlen {name} d{size} causal", _varlen(dtype, size, causal=True))
        yield Case(f"attention_varlen {name} d80 grouped", _varlen(dtype, 80, groups=4))
        yield Case(f"attention_varlen {name} window cap", _varlen(dtype, 128, causal=True, window=256, score=CAP))
        for size, block in ((64, 128), (128, 128), (192, 128), (80, 16)):
            yield Case(f"attention_block_sparse {name} d{size} blocks {block}", _block_sparse(dtype, size, block))
        for size in (64, 96, 128, 192, 256) if dtype == torch.bfloat16 else (128,):
            yield Case(f"attention_fp8 {name} d{size}", partial(_float8, dtype, size, 1024))
        yield Case(f"attention_fp8 {name} d128 long", partial(_float8, dtype, 128, fp8.LONG_KEYS))
        for page in (16, 24, 64, 256):
            yield Case(f"attention_paged {name} decode {page}", _paged(dtype, page, 1))
        if dtype != torch.float32:
            for page in (16, 24, 64):
                yield Case(f"attention_paged {name} float8 decode {page}", _paged_float8(dtype, page, 1))
            yield Case(f"attention_paged {name} float8 chunk", _paged_float8(dtype, 64, 256))
            yield Case(f"attention_paged {name} float8 ragged", _paged_float8(dtype, 128, 64, ragged=True))
        yield Case(f"attention_paged {name} chunk", _paged(dtype, 64, 256))
        yield Case(f"attention_paged {name} ragged chunks", _paged(dtype, 16, 256, ragged=True))
        yield Case(f"append_to_pages {name}", partial(_append, dtype))


def _varlen(
    dtype: torch.dtype, size: int, groups: int = 1, causal: bool = False, window: int = 0, score: str = ""
) -> Callable[[Make], object]:
    """Return calls of `attention_varlen` and its backward."""

    def call(make: Make) -> object:
        q, k, v = (make((4096, heads, size), dtype) for heads in (8 * groups, 8, 8))
        starts = make((9,), torch.int32)
        rest = starts, starts, 1024, 1024, causal, None, window, None, score
        out, lse = varlen.attention_varlen(q, k, v, *rest)
        return varlen.attention_varlen_backward(out, q, k, v, out, lse, *rest)

    return call


def _block_sparse(dtype: torch.dtype, size: int, block: int) -> Callable[[Make], object]:
    """Return a call of `attention_block_sparse` and its backward, with lists of blocks of `block` rows."""

    def call(make: Make) -> object:
        q, k, v = (make((2, heads, 1024, size), dtype) for heads in (16, 8, 8))
        lists = make((1, 16, 1024 // block), torch.int32), make((1, 16, 1024 // block, 1024 // block), torch.int32)
        rest = *lists, None, None, block, block, True
        out, lse = block_sparse.attention_block_sparse(q, k, v, *rest)
        return block_sparse.attention_block_sparse_backward(out, q, k, v, out, lse, *rest)

    return call


def _float8(dtype: torch.dtype, size: int, keys: int, make: Make) -> object:
    """Call `attention_fp8`, causal at 64 and 128, with a result of `dtype`."""
    q, k, v = (make((2, heads, keys, size), E4M3) for heads in (16, 8, 8))
    scales = (make((2, heads), torch.float32) for heads in (16, 8, 8))
    return fp8.attention_fp8(q, k, v, *scales, size in (64, 128), dtype=dtype)


def _paged(dtype: torch.dtype, page: int, queries: int, ragged: bool = False) -> Callable[[Make], object]:
    """Return a call of `attention_paged` with pages of `page` positions."""

    def call(make: Make) -> object:
        shape = (8 * queries,) if ragged else (8, queries)
        q, k, v = make((*shape, 32, 128), dtype), *(make((512, page, 8, 128), dtype) for _ in range(2))
        table, lengths = make((8, 64), torch.int32), make((8,), torch.int32)
        rest = (make((9,), torch.int32), queries) if ragged else ()
        return paged.attention_paged(q, k, v, table, lengths, *rest)

    return call


def _paged_float8(dtype: torch.dtype, page: int, queries: int, ragged: bool = False) -> Callable[[Make], object]:
    """Return a call of `attention_paged` with pages of float8 and scales of positions and of heads."""

    def call(make: Make) -> object:
        shape = (8 * queries,) if ragged else (8, queries)
        q, k, v = make((*shape, 32, 128), dtype), *(make((512, page, 8, 128), E4M3) for _ in range(2))
        table, lengths = make((8, 64), torch.int32), make((8,), torch.int32)
        rest = (make((9,), torch.int32), queries) if ragged else (None, 0)
        scales = make((512, page, 8), torch.float32), make((1, 1, 8), torch.float32)
        return paged.attention_paged(q, k, v, table, lengths, *rest, True, None, 0, 0, None, "", *scales)

    return call


def _append(dtype: torch.dtype, make: Make) -> None:
    """Call `append_to_pages`."""
    k, v = (make((8, 4, 8, 128), dtype) for _ in range(2))
    k_pages, v_pages = (make((64, 16, 8, 128), dtype) for _ in range(2))
    table, lengths = make((8, 8), torch.int32), make((8,), torch.int32)
    paged.append_to_pages(AppendArgs(k, v, k_pages, v_pages, table, lengths))


def _decodings() -> Iterator[Case]:
    """Yield cases of `mla_decode`: contiguous, in pages, split, and with a schedule."""
    for name, dtype in FLOATS.items():
        yield Case(f"mla {name}", _decoding(dtype, 128, 64, 0))
        yield Case(f"mla {name} paged", _decoding(dtype, 128, 64, 64))
        yield Case(f"mla {name} small pages", _decoding(dtype, 16, 4, 16))
        yield Case(f"mla {name} split", _decoding(dtype, 16, 1, 0))
        yield Case(f"mla {name} split 128", _decoding(dtype, 128, 2, 0))
        yield Case(f"mla {name} split 128 paged", _decoding(dtype, 128, 2, 64))
        yield Case(f"lightning_index {name}", _indexing(dtype))
        yield Case(f"nsa_select {name}", partial(_selecting, dtype))
        for heads in (16, 128):
            yield Case(f"mla {name} float8 {heads}", _packed_decoding(dtype, heads, False))
            yield Case(f"mla {name} float8 listed {heads}", _packed_decoding(dtype, heads, True))
            yield Case(f"mla {name} listed {heads}", _sparse_decoding(dtype, heads))
        for heads in (128, 16):
            yield Case(f"mla {name} scheduled {heads}", _decoding(dtype, heads, 64, 64, scheduled=True))


def _packed_decoding(dtype: torch.dtype, heads: int, listed: bool) -> Callable[[Make], object]:
    """Return a call of `mla_decode_fp8` over pages, dense or over lists of positions."""

    def call(make: Make) -> object:
        q, q_pe = make((64, 2, heads, 512), dtype), make((64, 2, heads, 64), dtype)
        cache, table = make((640, 64, 656), torch.uint8), make((64, 10), torch.int32)
        lists = make((64, 2, 256), torch.int32) if listed else None
        return mla_packed.mla_decode_fp8(q, q_pe, cache, table, make((64,), torch.int32), lists)

    return call


def _indexing(dtype: torch.dtype) -> Callable[[Make], object]:
    """Return a call of `lightning_index` with the sizes of DeepSeek-V3.2."""

    def call(make: Make) -> object:
        q, k, weights = make((4, 2, 64, 128), dtype), make((4, 4096, 128), dtype), make((4, 2, 64), torch.float32)
        return indexer.lightning_index(q, k, weights, 2048, make((4,), torch.int32))

    return call


def _selecting(dtype: torch.dtype, make: Make) -> object:
    """Call `nsa_select` with the sizes of its paper: 16 heads share keys, compressed keys overlap by a half."""
    q, k, lse = make((2, 64, 1024, 192), dtype), make((2, 4, 63, 192), dtype), make((2, 64, 1024), torch.float32)
    return nsa.nsa_select(q, k, lse, 1024, 16, 64, 32, 16)


def _sparse_decoding(dtype: torch.dtype, heads: int) -> Callable[[Make], object]:
    """Return a call of `mla_sparse` over a contiguous cache."""

    def call(make: Make) -> object:
        q, q_pe = make((2, 80, heads, 512), dtype), make((2, 80, heads, 64), dtype)
        kv, k_pe = make((2, 4096, 512), dtype), make((2, 4096, 64), dtype)
        return mla_packed.mla_sparse(q, q_pe, kv, k_pe, make((2, 80, 512), torch.int32))

    return call


def _decoding(
    dtype: torch.dtype, heads: int, batch: int, page: int, scheduled: bool = False
) -> Callable[[Make], object]:
    """Return a call of `mla_decode` with these heads and batch size."""

    def call(make: Make) -> object:
        q, q_pe = make((batch, 1, heads, 512), dtype), make((batch, 1, heads, 64), dtype)
        cache = (batch * 64, page) if page else (batch, 4096)
        table = make((batch, 64), torch.int32) if page else None
        kv, k_pe = make((*cache, 512), dtype), make((*cache, 64), dtype)
        lengths = make((batch,), torch.int32)
        schedule = mla_schedule.mla_schedule(lengths, heads) if scheduled else None
        return mla_decode.mla_decode(q, q_pe, kv, k_pe, table, lengths, schedule=schedule)

    return call


def _rows() -> Iterator[Case]:
    """Yield cases of norms, softmax and losses."""
    for name, dtype in ALL.items():
        for n in (128, 4096, 16384, 1000):
            yield Case(f"rms_norm {name} {n}", partial(_rms_norm, dtype, n))
            yield Case(f"layer_norm {name} {n}", partial(_layer_norm, dtype, n))
            yield Case(f"softmax {name} {n}", partial(_softmax, dtype, n, -1))
        yield Case(f"rms_norm {name} residual silu", partial(_add_rms_norm, dtype, 4096))
        yield Case(f"fused_norm {name} modulated", partial(_modulated_norm, dtype, 1152))
        yield Case(f"softmax {name} columns", partial(_softmax, dtype, 1000, 0))
        for n in (1000, 32000, 50257):
            yield Case(f"cross_entropy {name} {n}", partial(_cross_entropy, dtype, n, 0.0))
        yield Case(f"cross_entropy {name} smoothed", partial(_cross_entropy, dtype, 32000, 0.1))
        yield Case(f"linear_cross_entropy {name}", partial(_linear_cross_entropy, dtype, 32000, None))
    yield Case("linear_cross_entropy bf16 capped", partial(_linear_cross_entropy, torch.bfloat16, 4099, 30.0))


def _rms_norm(dtype: torch.dtype, n: int, make: Make) -> object:
    """Call `rms_norm` on 512 rows of n."""
    return norm.rms_norm(make((512, n), dtype), make((n,), dtype))


def _add_rms_norm(dtype: torch.dtype, n: int, make: Make) -> object:
    """Call `add_rms_norm` with an activation on 512 rows of n."""
    return norm.add_rms_norm(make((512, n), dtype), make((512, n), dtype), make((n,), dtype), activation="silu")


def _layer_norm(dtype: torch.dtype, n: int, make: Make) -> object:
    """Call `layer_norm` on 512 rows of n."""
    return norm.layer_norm(make((512, n), dtype), make((n,), dtype), make((n,), dtype))


def _modulated_norm(dtype: torch.dtype, n: int, make: Make) -> object:
    """Call `fused_norm` with a gated sum in front and a modulation behind."""
    x, y = (make((2, 256, n), dtype) for _ in range(2))
    aux = [make((2, 1, n), dtype) for _ in range(3)]
    gate, modulate = "v0=mul(x2,x3);v1=add(acc0,v0);ret v1", "v0=add(x0,1.0);v1=mul(acc0,v0);v2=add(v1,x1);ret v2"
    return fused_norm.fused_norm(x, [*aux, y], "gggt", gate, modulate, True, 1e-6, True, dtype)


def _cross_entropy(dtype: torch.dtype, n: int, label_smoothing: float, make: Make) -> object:
    """Call `cross_entropy` and its backward on 64 rows of n logits."""
    logits, target = make((64, n), dtype), make((64,), torch.int64)
    weight = make((n,), torch.float32) if label_smoothing else None
    loss, lse = cross_entropy.cross_entropy(logits, target, weight, label_smoothing=label_smoothing)
    given = logits, target, lse, weight
    return loss, cross_entropy.cross_entropy_backward(loss, *given, label_smoothing=label_smoothing)


def _routing() -> Iterator[Case]:
    """Routers of Mixtral, DeepSeek-V3 (groups, bias), and odd sizes."""
    cases = {"mixtral": (8, 2, False), "deepseek": (256, 8, True), "odd": (77, 5, False)}
    for name, (n, k, limited) in cases.items():
        yield Case(f"route bf16 {name}", partial(_route, torch.bfloat16, n, k, limited))
        yield Case(f"group_tokens {name}", partial(_group_tokens, n, k))
    yield Case("route fp32 deepseek", partial(_route, torch.float32, 256, 8, True))


def _route(dtype: torch.dtype, n: int, k: int, limited: bool, make: Make) -> object:
    """Call `route` on 512 tokens."""
    bias, more = (make((n,), torch.float32), ("sigmoid", 8, 4)) if limited else (None, ())
    return route.route(make((512, n), dtype), bias, k, *more)


def _group_tokens(n: int, k: int, make: Make) -> object:
    """Call `group_tokens` on 512 tokens."""
    return group_tokens.group_tokens(make((512, k), torch.int64), n)


def _linear_cross_entropy(dtype: torch.dtype, n: int, softcap: float | None, make: Make) -> object:
    """Call `linear_cross_entropy` and its gradients on 512 rows."""
    hidden, weight, target = make((512, 256), dtype), make((n, 256), dtype), make((512,), torch.int64)
    grad = make((512,), torch.float64 if dtype == torch.float64 else torch.float32)
    given = hidden, weight, target, None, make((n,), torch.float32) if softcap else None, -100, 0.1 if softcap else 0.0
    found = linear_cross_entropy.linear_cross_entropy(*given, softcap=softcap, chunk=256)
    return found, linear_cross_entropy.linear_cross_entropy_gradients(grad, *given, softcap=softcap, chunk=256)


def _softmax(dtype: torch.dtype, n: int, dim: int, make: Make) -> object:
    """Call `softmax` on 512 rows of n."""
    return softmax.softmax(make((512, n), dtype), dim)
