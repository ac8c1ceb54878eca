# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits as `tile.dequant_gemm` takes them: rounded from floats, or re-packed from other layouts.

Results are words `[N, K * bits / 8]` of uint8 and scales `[N, G]`, for G runs of columns. Layouts of other libraries
are re-packed without rounding: both stand for the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_tile.diagnostics.arguments import explains_misfits
from torch_tile.kernels import kernels
from torch_tile.runtime.launch_plan import has_memory

BITS = 4  # of a code of a format


@explains_misfits
def pack_fields(numbers: Tensor, bits: int, high_first: bool = False) -> Tensor:
    """Pack natural numbers below `2^bits` `[N, K]` into bytes `[N, K * bits / 8]`, the first in the lowest bits.

    `bits` is 1, 2, 4 or 8. Raises ValueError for others, for a part of a byte, and for numbers that do not fit.
    """
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits is {bits}; expected 1, 2, 4 or 8")
    per_byte = 8 // bits
    if numbers.shape[-1] % per_byte:
        raise ValueError(f"numbers has {numbers.shape[-1]} columns; expected a multiple of {per_byte} for {bits} bits")
    if not torch.compiler.is_compiling() and has_memory(numbers) and numbers.numel():
        least, most = (int(each) for each in numbers.aminmax())
        if least < 0 or most >= 1 << bits:
            wrong = least if least < 0 else most
            raise ValueError(
                f"numbers holds {wrong}; expected 0 to {(1 << bits) - 1} for {bits} bits: add the zero point"
            )
    fields = numbers.to(torch.uint8).unflatten(-1, (-1, per_byte))
    places = [*range(0, 8, bits)][:: -1 if high_first else 1]
    shifted = [fields[..., i] << place for i, place in enumerate(places)]
    packed: Tensor = shifted[0]
    for more in shifted[1:]:
        packed = packed | more
    return packed


@explains_misfits
def unpack_fields(words: Tensor, bits: int, high_first: bool = False) -> Tensor:
    """Unpack bytes `[N, K * bits / 8]` to natural numbers `[N, K]` of uint8: the inverse of `pack_fields`."""
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits is {bits}; expected 1, 2, 4 or 8")
    _check_bytes(words)
    places = [*range(0, 8, bits)][:: -1 if high_first else 1]
    return torch.stack([words >> place & ((1 << bits) - 1) for place in places], -1).flatten(-2)


@explains_misfits
def quantize_4bit(weight: Tensor, format: str, group: int) -> tuple[Tensor, Tensor]:
    """Round a weight `[N, K]` to a format of 4 bits, in runs of `group` columns.

    The upper bits of a byte hold its first column.
    The scale of a run maps its largest magnitude to the format's: the scale of bitsandbytes for "nf4" and "fp4"
    (arXiv:2305.14314). For "e2m1" it is a power of two, whose exponent is that of the largest magnitude less 2. Greater
    magnitudes than 6 become 6 (OCP Microscaling Formats specification 1.0, section 6.3).

    Returns words `[N, K / 2]` and scales `[N, K / group]` of float32, or float8_e8m0fnu for "e2m1".

    Raises ValueError on an unknown format, for NaN and infinities, or if `group` does not divide K.
    """
    _check_matrix(weight)
    formats = kernels("gemm.dequant").FORMATS
    if format not in formats:
        raise ValueError(f"format is {format!r}; expected one of {', '.join(map(repr, formats))}")
    if group < 2 or weight.shape[-1] % group:
        raise ValueError(f"group is {group}; expected a divisor of {weight.shape[-1]} columns")
    known = formats[format]
    runs = weight.detach().to(torch.float32).unflatten(-1, (-1, group))
    most = runs.abs().amax(-1)
    check_finite("quantize_4bit", most)
    if known.scale == torch.float8_e8m0fnu:
        exponent = most.clamp_min(2.0**-125).log2().floor() - 2
        scales = exponent.exp2()
    else:
        scales = most / known.largest
    numbers = runs / torch.where(scales > 0, scales, 1.0)[..., None]
    return pack_fields(_nearest(numbers, known).flatten(-2), BITS, high_first=True), scales.to(known.scale)


@explains_misfits
def quantize_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight `[N, K]` to NVFP4 (NVIDIA, arXiv:2509.25149, appendix A).

    Numbers are e2m1. Each run of 16 columns has a scale in float8_e4m3fn. A scale of the whole matrix maps the largest
    magnitude to 6 x 448.

    Returns words `[N, K / 2]`, whose first column is in the upper bits, scales `[N, K / 16]` and the scale `[1]` of
    float32. A weight is its number times both scales.

    Raises ValueError if 16 does not divide K, and for NaN and infinities.
    """
    _check_matrix(weight)
    if weight.shape[-1] % 16:
        raise ValueError(f"weight has {weight.shape[-1]} columns; expected a multiple of 16")
    known = kernels("gemm.dequant").FORMATS["e2m1"]
    runs = weight.detach().to(torch.float32).unflatten(-1, (-1, 16))
    most = runs.abs().amax(-1)
    check_finite("quantize_nvfp4", most)
    whole = (most.amax() / (known.largest * torch.finfo(torch.float8_e4m3fn).max)).reshape(1)
    whole = torch.where(whole > 0, whole, 1.0)
    scales = (most / known.largest / whole).to(torch.float8_e4m3fn)
    steps = scales.to(torch.float32) * whole
    numbers = runs / torch.where(steps > 0, steps, 1.0)[..., None]
    return pack_fields(_nearest(numbers, known).flatten(-2), BITS, high_first=True), scales, whole


def check_finite(owner: str, weight: Tensor) -> None:
    """Raise ValueError for a NaN or an infinity in a weight, or in the largest magnitudes of its runs."""
    if torch.compiler.is_compiling() or not has_memory(weight) or not weight.numel():
        return
    most = weight.abs().amax()
    if bool(most.isfinite()):
        return
    kind = "NaN" if bool(most.isnan()) else "an infinity"
    raise ValueError(f"{owner}: weight holds {kind}; expected finite numbers: is the checkpoint loaded?")


def _check_bytes(words: Tensor) -> None:
    """Raise TypeError unless a tensor holds integers, as packed fields are."""
    if words.is_floating_point() or words.is_complex():
        raise TypeError(f"words has dtype {words.dtype}; expected torch.uint8, as pack_fields makes them")


def _check_words(**given: Tensor) -> None:
    """Raise TypeError unless all tensors hold words of 32 bits."""
    for name, tensor in given.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected words of torch.int32, as a checkpoint has them")


def _check_matrix(weight: Tensor) -> None:
    """Raise ValueError for a vector, TypeError for rounded numbers."""
    if weight.dim() < 2:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected [N, K]")
    if not weight.is_floating_point():
        raise TypeError(f"weight has dtype {weight.dtype}; expected floats, which are rounded here")


def _nearest(numbers: Tensor, format: Any) -> Tensor:
    """Return the codes of the numbers of a format that lie nearest."""
    table, order = format.table(torch.float32, numbers.device).sort()
    between = (table[1:] + table[:-1]) / 2
    codes: Tensor = order[torch.bucketize(numbers, between)]
    return codes


@explains_misfits
def dequantize_4bit(words: Tensor, scales: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Widen words and scales of `quantize_4bit` to the weight `[N, K]` that they stand for."""
    _check_bytes(words)
    weight: Tensor = kernels("gemm.dequant").dequantize(words, scales, None, BITS, True, 0, dtype, format)
    return weight


def rows_of_blocks(absmax: Tensor, shape: tuple[int, int], block: int) -> Tensor | None:
    """Give every row of a weight `[N, K]` its own scales `[N, G]`. They come from those of blocks of `block` elements
    in memory order. Return None where a block ends inside a row at no multiple of `block`.
    """
    n, k = shape
    if k % block == 0:
        return absmax.reshape(n, k // block)
    return absmax.repeat_interleave(block // k)[:n].reshape(n, 1) if block % k == 0 else None


def undo_double_quantization(codes: Tensor, table: Tensor, scales: Tensor, block: int, offset: Tensor) -> Tensor:
    """Compute float32 scales from codes of 8 bits: `table[code] * scale + offset`, a scale for each `block` codes, as
    bitsandbytes stores them (arXiv:2305.14314, section 3).
    """
    flat = codes.flatten()
    factors = scales.to(torch.float32).repeat_interleave(block)[: flat.numel()]
    found: Tensor = table.to(torch.float32)[flat.long()] * factors + offset.to(torch.float32)
    return found


@explains_misfits
def from_gptq(qweight: Tensor, qzeros: Tensor, bits: int, one_less: bool) -> tuple[Tensor, Tensor]:
    """Re-pack GPTQ's words: int32 `[K * bits / 32, N]` and zeros `[G, N * bits / 32]`, first fields in lowest bits.

    `one_less`: zeros are stored less 1, modulo `2^bits`, as in the first version of the format. Returns words
    `[N, K * bits / 8]`, whose first column is in the lowest bits, and zeros `[N, G]` of uint8. Bits are 2, 4 or 8.
    """
    _check_words(qweight=qweight, qzeros=qzeros)
    if qzeros.shape[-1] * 32 != qweight.shape[-1] * bits:
        expected = f"{qweight.shape[-1] * bits / 32:g}, as qweight has {qweight.shape[-1]} for {bits} bits"
        raise ValueError(f"qzeros has {qzeros.shape[-1]} columns; expected {expected}")
    words = qweight.t().contiguous().view(torch.uint8)
    zeros = unpack_fields(qzeros.contiguous().view(torch.uint8), bits).t()
    if one_less:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return words, zeros.contiguous()


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns each field of 4 bits of AWQ's words holds, from the lowest bits on."""


@explains_misfits
def from_awq(qweight: Tensor, qzeros: Tensor) -> tuple[Tensor, Tensor]:
    """Re-pack AWQ's words of 4 bits: int32 `[K, N / 8]` and zeros `[G, N / 8]`, output features interleaved.

    Returns words `[N, K / 2]`, whose first column is in the lowest bits, and zeros `[N, G]` of uint8.
    """
    _check_words(qweight=qweight, qzeros=qzeros)
    if qzeros.shape[-1] != qweight.shape[-1]:
        raise ValueError(f"qzeros has {qzeros.shape[-1]} columns; expected {qweight.shape[-1]}, as qweight")
    inverse = [AWQ_ORDER.index(column) for column in range(8)]

    def features(words: Tensor) -> Tensor:
        fields = unpack_fields(words.contiguous().view(torch.uint8), BITS).unflatten(-1, (-1, 8))
        found: Tensor = fields[..., inverse].flatten(-2).t()
        return found

    return pack_fields(features(qweight), BITS), features(qzeros).contiguous()
