# SPDX-License-Identifier: Apache-2.0
"""Recognise other libraries' quantised linear layers and experts by their class and its attributes; none is imported.

A layer of ours is made of the same numbers: words are re-packed where the layout differs, and nothing is rounded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_tile.nn as tnn
from torch_tile.integrations.recognise import Plan, activation_of
from torch_tile.nn.experts import Gate
from torch_tile.nn.packing import from_awq, from_gptq, rows_of_blocks, undo_double_quantization, unpack_fields
from torch_tile.ops.families.dequant_gemm import supported_group

log: logging.Logger = logging.getLogger("torch_tile")


class Unfit(Exception):
    """Raised if a quantised layer has no counterpart, with the reason."""


def plan_quantized(module: nn.Module) -> Plan | None:
    """Return the plan for a quantised layer. Return None if the layer is unknown, or is of a form without kernels."""
    make = maker_of(module)
    if make is None:
        return None
    try:
        with torch.no_grad():
            made = make(module)
    except Unfit as why:
        log.info("%s is not replaced: %s", type(module).__name__, why)
        return None
    except (AttributeError, RuntimeError, TypeError, ValueError) as problem:  # of another version of the library
        log.info("%s is not replaced: its attributes are not those we know: %s", type(module).__name__, problem)
        return None
    if made is None:
        return None
    attributes = {name: value for name, value in vars(made).items() if name not in vars(nn.Module())}
    return Plan(type(made), attributes, made)


def maker_of(module: Any) -> Callable[[Any], nn.Module | None] | None:
    """Return the function that reads a layer: by its class, by that of its weight, or by its scheme of quantisation.

    None for layers whose forward someone else replaced. compressed-tensors replaces it, and tells so by a scheme.
    """
    scheme = module.__dict__.get("quantization_scheme")
    if scheme is not None and type(module).__name__ in ("Linear", "CompressedLinear"):
        return _compressed
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return WEIGHTS.get(type(module.weight).__name__)
    return RECOGNISED.get(type(module).__name__)


def _bitsandbytes(module: Any) -> nn.Module | None:
    """Plan bitsandbytes' `Linear4bit`, quantised: two elements to a byte, the first in the upper bits."""
    state: Any = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None or module.weight.dtype != torch.uint8:
        raise Unfit("its weight is not quantised yet, or is stored in other words than bytes")
    format, (n, k) = state.quant_type, tuple(state.shape)
    formats: Any = {"nf4": "nf4", "fp4": "fp4"}
    if format not in formats or k % 2:
        raise Unfit(f"its format is {format!r} of {k} input features")
    absmax: Tensor = state.absmax
    if state.nested:
        inner = state.state2
        absmax = undo_double_quantization(absmax, inner.code, inner.absmax, inner.blocksize, state.offset)
    scales = rows_of_blocks(absmax.to(torch.float32), (n, k), state.blocksize)
    if scales is None or not (scales.shape[1] == 1 or supported_group(k // scales.shape[1])):
        raise Unfit(f"blocks of {state.blocksize} do not divide rows of {k}")
    words = module.weight.detach().reshape(n, k // 2)
    compute = module.compute_dtype
    return tnn.QuantizedLinear(
        words, scales.contiguous(), bias=module.bias, high_first=True, format=formats[format], compute_dtype=compute
    )


def _bitsandbytes_int8(module: Any) -> nn.Module | None:
    """Return `Linear8bitLt` with its weight rounded: int8, and the largest magnitude of each row."""
    state: Any = module.state
    if state.has_fp16_weights or module.weight.dtype != torch.int8:
        raise Unfit("its weight is not rounded yet, or kept in float16 for training")
    most = getattr(module.weight, "SCB", None)
    most = state.SCB if most is None else most
    if most is None:
        raise Unfit("its weight has no scales")
    scale = (most.detach().to(torch.float32) / 127).reshape(-1, 1)
    return tnn.Int8Linear(module.weight.detach().data, scale, module.bias, float(state.threshold or 0.0))


def _gptq(module: Any) -> nn.Module | None:
    """Plan GPTQ's layers: int32 words along the input features, with zeros and scales of runs of them."""
    bits = int(module.bits)
    k, n = module.qweight.shape[0] * 32 // bits, module.qweight.shape[1]
    groups = module.scales.shape[0]
    if bits not in (2, 4, 8) or module.qweight.dtype != torch.int32 or module.scales.shape[1] != n:
        raise Unfit(f"its words of {bits} bits are not laid out as GPTQ's")
    order = getattr(module, "g_idx", None)
    if order is not None and order.numel() and not torch.equal(order.cpu().long(), torch.arange(k) // (k // groups)):
        raise Unfit("its input features are ordered by activation (desc_act)")
    if k % groups or not (groups == 1 or supported_group(k // groups)):
        raise Unfit(f"{groups} groups of {k} input features")
    form = getattr(module, "qzero_format", None)
    one_less = (form() if callable(form) else 1) == 1
    words, zeros = from_gptq(module.qweight, module.qzeros, bits, one_less)
    return tnn.QuantizedLinear(words, module.scales.t().contiguous(), zeros, _bias(module), bits=bits)


def _awq(module: Any) -> nn.Module | None:
    """Plan AWQ's layers for matrix products: int32 words along the output features, interleaved."""
    k, groups = module.qweight.shape[0], module.scales.shape[0]
    if module.w_bit != 4 or k % groups or not (groups == 1 or supported_group(k // groups)):
        raise Unfit(f"{module.w_bit} bits, {groups} groups of {k} input features")
    words, zeros = from_awq(module.qweight, module.qzeros)
    return tnn.QuantizedLinear(words, module.scales.t().contiguous(), zeros, _bias(module))


def _bias(module: Any) -> Tensor | None:
    """Return the bias, which some libraries hold as a buffer."""
    bias: Tensor | None = getattr(module, "bias", None)
    return bias


def _torchao_int8(module: Any) -> nn.Module | None:
    """Convert a layer of torchao's `Int8Tensor`: int8 with scales of rows, of their runs or of the matrix."""
    weight: Any = module.weight
    if weight.act_pre_scale is not None or weight.act_quant_scale is not None:
        raise Unfit("its activations have scales of their own")
    n, k = weight.qdata.shape
    rows, columns = weight.block_size
    if rows not in (1, n) or (rows == n > 1 and columns != k) or not (columns == k or supported_group(columns)):
        raise Unfit(f"its blocks are {rows} x {columns}")
    scale = weight.scale.detach().reshape(n if rows == 1 else 1, -1)
    zeros: Tensor | None = weight.zero_point
    if zeros is not None:
        zeros = zeros.detach().reshape(scale.shape).expand(n, -1).contiguous() if zeros.any() else None
    if weight.act_quant_kwargs is None:
        return tnn.QuantizedLinear(weight.qdata, scale.expand(n, -1).contiguous(), zeros, module.bias, bits=8)
    if zeros is not None or scale.shape[1] != 1 or "ASYMMETRIC" in str(weight.act_quant_kwargs.mapping_type):
        raise Unfit("its activations are not rounded symmetrically by rows")
    return tnn.Int8Linear(weight.qdata, scale, module.bias)


def _torchao_float8(module: Any) -> nn.Module | None:
    """Read torchao's `Float8Tensor`: float8 with scales of rows, of blocks of 128 x 128 or of the matrix."""
    weight: Any = module.weight
    n, k = weight.qdata.shape
    scale: Tensor = weight.scale.detach().to(torch.float32)
    scale = scale if scale.dim() == 2 else scale.reshape(-1, 1)
    blocks = (-(-n // 128), -(-k // 128))
    if tuple(scale.shape) not in ((n, 1), (1, 1), blocks):
        raise Unfit(f"its scales are {list(scale.shape)} of {n} x {k} numbers")
    if weight.act_quant_kwargs is not None:
        return tnn.Float8Linear(weight.qdata, scale, module.bias)
    if scale.shape[1] != 1:
        raise Unfit("its weight alone is rounded, in blocks")
    return tnn.QuantizedLinear(weight.qdata, scale.expand(n, 1).contiguous(), bias=module.bias, bits=8)


def _compressed(module: Any) -> nn.Module | None:
    """Read compressed-tensors' layers by the tensors that they hold: packed integers or NVFP4, int8, or float8."""
    scheme: Any = module.quantization_scheme
    words: Tensor | None = getattr(module, "weight_packed", None)
    scale: Tensor = module.weight_scale.detach()
    order = getattr(module, "weight_g_idx", None)
    if order is not None and not torch.equal(order.cpu(), order.cpu().sort().values):
        raise Unfit("its input features are ordered by activation")
    if words is not None and words.dtype == torch.uint8:
        if scale.dtype != torch.float8_e4m3fn:
            raise Unfit(f"its scales are {scale.dtype}")
        whole = 1 / module.weight_global_scale.detach().to(torch.float32).reshape(1)
        return tnn.QuantizedLinear(words.detach(), scale, bias=module.bias, format="e2m1", whole_scale=whole)
    if words is not None:
        return _packed_integers(module, words.detach(), scale, int(scheme.weights.num_bits))
    weight: Tensor = module.weight.detach()
    if scheme.input_activations is None or not scheme.input_activations.dynamic:
        raise Unfit("its activations are not rounded while it runs")
    by_rows = scale.numel() == 1 or scale.shape == (weight.shape[0], 1)
    scale = scale.reshape(-1, 1) if by_rows else scale
    if weight.dtype == torch.int8 and by_rows and scheme.input_activations.symmetric and scheme.weights.symmetric:
        return tnn.Int8Linear(weight, scale.to(torch.float32), module.bias)
    if weight.dtype == torch.float8_e4m3fn and (by_rows or list(scheme.weights.block_structure or ()) == [128, 128]):
        return tnn.Float8Linear(weight, scale.to(torch.float32), module.bias)
    raise Unfit(f"its weight is {weight.dtype} with scales {list(scale.shape)}")


def _packed_integers(module: Any, words: Tensor, scale: Tensor, bits: int) -> nn.Module:
    """Read integers of 4 or 8 bits in int32, the first in the lowest bits, less half of their range."""
    n, k = (int(size) for size in module.weight_shape)
    runs, half = scale.shape[1], 1 << (bits - 1)
    if bits not in (4, 8) or k * bits % 32 or k % runs or not (runs == 1 or supported_group(k // runs)):
        raise Unfit(f"{bits} bits, {runs} groups of {k} input features")
    packed = getattr(module, "weight_zero_point", None)
    zeros = None
    if packed is not None:
        fields = unpack_fields(packed.detach().t().contiguous().view(torch.uint8), bits)[:, :n]
        zeros = (fields.to(torch.int16) - half).to(torch.int8).t().contiguous()
    as_bytes = words.contiguous().view(torch.uint8)
    return tnn.QuantizedLinear(as_bytes, scale.expand(n, runs).contiguous(), zeros, module.bias, bits=bits, offset=half)


def _float8(module: Any) -> nn.Module | None:
    """Plan transformers' fine-grained float8 layers: scales of blocks of 128 x 128, or of the matrix."""
    scale: Tensor = module.weight_scale_inv
    if module.weight.dtype != torch.float8_e4m3fn:
        raise Unfit(f"its weight is {module.weight.dtype}")
    if module.block_size is not None and tuple(module.block_size) != (128, 128):
        raise Unfit(f"its blocks are {tuple(module.block_size)}")
    scale = scale.detach().to(torch.float32).reshape(scale.shape if scale.dim() == 2 else (1, 1))
    static = module.activation_scale
    return tnn.Float8Linear(module.weight.detach(), scale, module.bias, None if static is None else static.detach())


def _mxfp4_experts(module: Any) -> nn.Module | None:
    """Convert transformers' experts of gpt-oss in MXFP4, whose layout the library that made it can undo."""
    held: list[Tensor] = []
    for name in ("gate_up_proj", "down_proj"):
        config = getattr(module, f"{name}_precision_config")
        if config is None:
            raise Unfit("its weights are not loaded yet")
        held += [_as_stored(getattr(module, name)), _as_stored(config.weight_scale)]
    words, powers, down, down_powers = held
    groups, rows, count = powers.shape
    if words.shape != (groups, rows, 16 * count) or words.dtype != torch.uint8:
        raise Unfit(f"its words are {words.dtype} {list(words.shape)} for scales {list(powers.shape)}")
    gate = Gate(limit=float(module.limit), alpha=float(module.alpha))
    stored = words, powers.view(torch.float8_e8m0fnu), down, down_powers.view(torch.float8_e8m0fnu)
    biases = module.gate_up_proj_bias, module.down_proj_bias
    return tnn.QuantizedExperts(*stored, *biases, gate=gate, interleaved=True, format="e2m1")


def _as_stored(tensor: Any) -> Tensor:
    """Return a tensor of the Triton kernels `[G, columns, rows]` as checkpoints have it: `[G, rows, columns]`."""
    storage = tensor.storage
    found: Tensor = storage.layout.unswizzle_data(storage.data).mT.contiguous()
    return found


def _float8_experts(module: Any) -> nn.Module | None:
    """Convert transformers' experts in float8, with scales of 128 x 128 blocks or of matrices, or in MXFP4."""
    if not module.has_gate or module.activation_scheme != "dynamic":
        raise Unfit("it has no gate, or its activations have one scale")
    if getattr(module, "gate_softcap", None) is not None:
        raise Unfit("its gate has a soft cap")
    gate = Gate(_activation(module.act_fn), getattr(module, "limit", None), getattr(module, "swiglu_alpha", None))
    (words, scale), (down, down_scale) = (
        (getattr(module, name).detach(), getattr(module, f"{name}_scale_inv").detach())
        for name in ("gate_up_proj", "down_proj")
    )
    if words.dtype == torch.int8:
        as_bytes = words.view(torch.uint8), scale, down.view(torch.uint8), down_scale
        return tnn.QuantizedExperts(*as_bytes, gate=gate, format="e2m1")
    if words.dtype != torch.float8_e4m3fn:
        raise Unfit(f"its weights are {words.dtype}")
    if module.block_size is None:  # gate and up have a scale each
        scale = scale.repeat_interleave(words.shape[1] // scale.shape[1], 1)
    elif tuple(module.block_size) != (128, 128):
        raise Unfit(f"its blocks are {tuple(module.block_size)}")
    return tnn.Float8Experts(words, scale.to(torch.float32), down, down_scale.to(torch.float32), gate=gate)


def _activation(module: Any) -> str:
    """Return our name of an activation module; raise Unfit for one that our layers do not have."""
    name = activation_of(module)
    if name in (None, "none"):
        raise Unfit(f"its activation is {type(module).__name__}")
    assert name is not None
    return name


RECOGNISED: dict[str, Callable[[Any], nn.Module | None]] = {
    "Linear4bit": _bitsandbytes,
    "Linear8bitLt": _bitsandbytes_int8,
    "QuantLinear": _gptq,
    "TorchQuantLinear": _gptq,
    "TritonV2QuantLinear": _gptq,
    "WQLinear_GEMM": _awq,
    "FP8Linear": _float8,
    "FP8Expert": _float8_experts,
    "FP8Experts": _float8_experts,
    "Mxfp4GptOssExperts": _mxfp4_experts,
}
"""How to read a layer, by the name of its class."""

WEIGHTS: dict[str, Callable[[Any], nn.Module | None]] = {"Float8Tensor": _torchao_float8, "Int8Tensor": _torchao_int8}
"""How to read an `nn.Linear`, by the name of its weight's class."""
