# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of few bits, in float8 and in int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from torch_tile.diagnostics.arguments import FloatDtype, explains_misfits, names_parameters, renames
from torch_tile.kernels import kernels
from torch_tile.kernels.epilogue.program import of_layer
from torch_tile.nn.packing import check_finite, quantize_4bit, quantize_nvfp4
from torch_tile.ops.checks import check_tensors, require
from torch_tile.ops.layers import flattened


class Frozen(nn.Module):
    """A module with a frozen weight, whose buffers keep their dtypes: `to`, `half` and their like only move them.

    Words in float8 would become other words, and scales would be rounded.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let torch convert or move the parameters, and move the buffers."""
        super()._apply(lambda x: self._applied(fn, x), recurse)  # type: ignore[no-untyped-call]
        return self

    def _applied(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return what `fn` makes of a tensor, in the same dtype for one of the buffers."""
        if not any(x is buffer for buffer in self._buffers.values()):
            return fn(x)
        bits = x.view(INTEGERS[x.itemsize]) if x.is_floating_point() else x
        found = fn(bits)
        return found.view(x.dtype) if found.dtype == bits.dtype else x.to(found.device)


WITH_BIAS = of_layer("none", True, False)  # made here: Dynamo warns of the cached function in a layer
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: torch converts only floats


class QuantizedLinear(Frozen):
    """`x @ weight.T + bias` with a frozen weight of few bits, widened in the kernel (`torch_tile.ops.dequant_gemm`).

    Gradients flow to the input and the bias, as QLoRA needs (arXiv:2305.14314). Make it by `from_linear`, or let
    `replace_layers` make it of another library's layer.

    Args:
        words: `[N, K * bits / 8]` of uint8, int8 or float8.
        scales: `[N, G]`, or None.
        zeros: `[N, G]`, or None.
        bias: `[N]`, or None.
        bits: of a weight.
        high_first: whether a byte's first column lies in its highest bits.
        offset: what is subtracted from every weight.
        format: "nf4", "fp4", "e2m1", or "" for integers and float8.
        compute_dtype: that the input is cast to, and the result from; None: the input's own.
        whole_scale: `[1]`, a scale of the whole matrix beside the others, as NVFP4 has; or None.
    """

    bits: int
    high_first: bool
    offset: int
    format: str
    words: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    whole_scale: Tensor | None

    @names_parameters
    def __init__(
        self,
        words: Tensor,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        bits: int = 4,
        high_first: bool = False,
        offset: int = 0,
        format: str = "",
        compute_dtype: FloatDtype | None = None,
        whole_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        if words.dim() != 2 or words.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            kind = f"{words.dtype}, {list(words.shape)}"
            raise TypeError(
                f"QuantizedLinear: words is {kind}; expected bytes [N, K * bits / 8], as pack_fields makes them"
            )
        if bits not in (1, 2, 4, 8):
            raise ValueError(f"QuantizedLinear: bits is {bits}; expected 1, 2, 4 or 8")
        _check_bias("QuantizedLinear", bias, words.shape[0])
        for name, tensor in (("scales", scales), ("zeros", zeros)):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[0] not in (1, words.shape[0])):
                shape, rows = list(tensor.shape), words.shape[0]
                raise ValueError(f"QuantizedLinear: {name} has shape {shape}; expected [{rows}, groups], as words")
        for name, tensor in (("words", words), ("scales", scales), ("zeros", zeros), ("whole_scale", whole_scale)):
            self.register_buffer(name, tensor)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, bias.requires_grad))
        self.bits, self.high_first, self.offset, self.format = bits, high_first, offset, format
        self.compute_dtype = compute_dtype

    @classmethod
    @names_parameters
    def from_linear(cls, linear: nn.Linear, format: str = "nf4", group: int | None = None) -> QuantizedLinear:
        """Round a linear layer to a format of 4 bits, in runs of `group` input features (64; 32 for "e2m1").

        "nvfp4" is e2m1 in runs of 16, with scales of two levels.

        Raises ValueError as `quantize_4bit` and `quantize_nvfp4` do.
        """
        _check_linear(linear)
        bias = None if linear.bias is None else linear.bias.detach()
        if format == "nvfp4":
            if group not in (None, 16):
                raise ValueError(f"from_linear: group is {group}; expected 16 or None, as NVFP4 has runs of 16")
            words, scales, whole = quantize_nvfp4(linear.weight)
            return cls(words, scales, bias=bias, high_first=True, format="e2m1", whole_scale=whole)
        formats = (*kernels("gemm.dequant").FORMATS, "nvfp4")
        if format not in formats:
            raise ValueError(f"from_linear: format is {format!r}; expected one of {', '.join(map(repr, formats))}")
        group = group or (32 if format == "e2m1" else 64)
        words, scales = quantize_4bit(linear.weight, format, group)
        return cls(words, scales, bias=bias, high_first=True, format=format)

    @property
    def in_features(self) -> int:
        """Return the number of input features."""
        return self.words.shape[1] * 8 // self.bits

    @property
    def out_features(self) -> int:
        """Return the number of output features."""
        return self.words.shape[0]

    @names_parameters
    def dequantize(self, dtype: FloatDtype = torch.float32) -> Tensor:
        """Widen the weight to `[N, K]`."""
        fields = self.bits, self.high_first, self.offset
        widen = kernels("gemm.dequant").dequantize
        weight: Tensor = widen(self.words, self.scales, self.zeros, *fields, dtype, self.format)
        return weight if self.whole_scale is None else weight * self.whole_scale.to(dtype)

    @explains_misfits
    @renames(**{"bs[0]": "words", "scales[0]": "scales", "zeros[0]": "zeros", "aux[0]": "bias", "a": "input"})
    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`, in the input's dtype."""
        _check_features("QuantizedLinear", input, self.in_features)
        x = input if self.compute_dtype is None else input.to(self.compute_dtype)
        aux, kinds, text = ([], "", "") if self.bias is None else ([self.bias], "r", WITH_BIAS)
        if self.whole_scale is not None:
            aux, kinds = [*aux, self.whole_scale], kinds + "s"
            text = f"s=mul(acc0,x{len(aux) - 1});" + ("v=add(s,x0);ret v" if self.bias is not None else "ret s")
        factors = [[] if factor is None else [factor] for factor in (self.scales, self.zeros)]
        out: Tensor = torch.ops.tile.dequant_gemm.default(
            flattened(x), [self.words], *factors, self.bits, self.high_first, self.offset,
            aux, kinds, text, x.dtype, self.format,
        )  # fmt: skip
        return out.reshape(*input.shape[:-1], self.out_features).to(input.dtype)

    def extra_repr(self) -> str:
        """Say how the weight is stored."""
        groups = 1 if self.scales is None else self.scales.shape[1]
        kind = self.format or f"{self.bits} bits of {self.words.dtype}"
        zeros = ", zeros" if self.zeros is not None else ""
        return f"{self.in_features}, {self.out_features}, {kind}, {groups} groups{zeros}, bias={self.bias is not None}"


class Float8Linear(Frozen):
    """`x @ weight.T + bias` in float8: the input is rounded in runs of 128 features, or by rows (DeepSeek-V3,
    arXiv:2412.19437, section 3.3).

    The gradient of the input is that of the product with the widened weight, as if nothing were rounded; the weight is
    frozen.

    Args:
        weight: `[N, K]`, float8_e4m3fn or float8_e5m2.
        scale: `[1, 1]` or `[N / 128, K / 128]`, rounded up, or `[N, 1]`.
        bias: `[N]`, or None.
        input_scale: of the whole input, one number, or None: rounded by its largest magnitudes.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    @names_parameters
    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, input_scale: Tensor | None = None
    ) -> None:
        super().__init__()
        _check_kept("Float8Linear", weight, (torch.float8_e4m3fn, torch.float8_e5m2), scale, bias)
        if input_scale is not None and input_scale.numel() != 1:
            raise ValueError(f"Float8Linear: input_scale has shape {list(input_scale.shape)}; expected one number")
        for name, tensor in (("weight", weight), ("scale", scale), ("input_scale", input_scale)):
            self.register_buffer(name, tensor)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, bias.requires_grad))

    @classmethod
    @names_parameters
    def from_linear(cls, linear: nn.Linear) -> Float8Linear:
        """Round a linear layer by the rows of its weight. Raises ValueError for NaN and infinities."""
        _check_linear(linear)
        check_finite("from_linear", linear.weight.detach())
        weight, scale = torch.ops.tile.quantize_fp8.default(linear.weight.detach(), 0, torch.float8_e4m3fn)
        return cls(weight, scale, None if linear.bias is None else linear.bias.detach())

    @explains_misfits
    @renames(a="input", b="weight", scale_b="scale", scale_a="input_scale")
    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`, in the input's dtype."""
        _check_features("Float8Linear", input, self.weight.shape[1])
        product: Any = _Float8Product.apply
        out: Tensor = product(flattened(input), self.weight, self.scale, self.input_scale)
        out = out if self.bias is None else out + self.bias
        return out.to(input.dtype).reshape(*input.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        """Return the shapes of the weight and its scales."""
        n, k = self.weight.shape
        return f"{k}, {n}, {self.weight.dtype}, scales={list(self.scale.shape)}, bias={self.bias is not None}"


class Int8Linear(Frozen):
    """`x @ weight.T + bias` in int8: rows of the input are rounded with a scale each (LLM.int8, arXiv:2208.07339;
    SmoothQuant, arXiv:2211.10438).

    Input features with a magnitude of `threshold` or more are not rounded: they are multiplied by the widened weight.
    Which they are is not known to the host, so that this is a second product of the whole width.
    The gradient of the input is that of the product with the widened weight, as if nothing were rounded; the weight is
    frozen.

    Args:
        weight: int8 `[N, K]`.
        scale: `[N, 1]` or `[1, 1]`.
        bias: `[N]`, or None.
        threshold: from which on input features are not rounded; 0: all are.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    @names_parameters
    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, threshold: float = 0.0) -> None:
        super().__init__()
        _check_kept("Int8Linear", weight, (torch.int8,), scale, bias)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, bias.requires_grad))
        self.threshold = threshold

    @classmethod
    @names_parameters
    def from_linear(cls, linear: nn.Linear, threshold: float = 0.0) -> Int8Linear:
        """Round a linear layer by the rows of its weight. Raises ValueError for NaN and infinities."""
        _check_linear(linear)
        check_finite("from_linear", linear.weight.detach())
        weight, scale = torch.ops.tile.quantize_int8.default(linear.weight.detach(), 0)
        return cls(weight, scale, None if linear.bias is None else linear.bias.detach(), threshold)

    @explains_misfits
    @renames(a="input", b="weight", scale_b="scale")
    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`, in the input's dtype."""
        _check_features("Int8Linear", input, self.weight.shape[1])
        product: Any = _Int8Product.apply
        out: Tensor = product(flattened(input), self.weight, self.scale, self.threshold)
        out = out if self.bias is None else out + self.bias
        return out.to(input.dtype).reshape(*input.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        """Return the shapes of the weight and its scales."""
        n, k = self.weight.shape
        return f"{k}, {n}, scales={list(self.scale.shape)}, threshold={self.threshold}, bias={self.bias is not None}"


def _check_bias(layer: str, bias: Tensor | None, features: int) -> None:
    """Raise ValueError for a bias of another shape than `[N]`."""
    if bias is not None and list(bias.shape) != [features]:
        raise ValueError(f"{layer}: bias has shape {list(bias.shape)}; expected [{features}], the rows of the weight")


def _check_kept(
    layer: str, weight: Tensor, dtypes: tuple[torch.dtype, ...], scale: Tensor, bias: Tensor | None
) -> None:
    """Raise TypeError for a weight of another dtype, ValueError for shapes that no layer has."""
    if weight.dtype not in dtypes:
        raise TypeError(f"{layer}: weight has dtype {weight.dtype}; expected {' or '.join(map(str, dtypes))}")
    if weight.dim() != 2:
        raise ValueError(f"{layer}: weight has shape {list(weight.shape)}; expected [N, K]")
    n, k = weight.shape
    shapes = [[1, 1], [n, 1]] if dtypes == (torch.int8,) else [[1, 1], [n, 1], [-(-n // 128), -(-k // 128)]]
    if list(scale.shape) not in shapes:
        wanted = f"expected {' or '.join(map(str, shapes))}, as weight has shape {list(weight.shape)}"
        raise ValueError(f"{layer}: scale has shape {list(scale.shape)}; {wanted}")
    _check_bias(layer, bias, n)


def _check_linear(layer: object) -> None:
    """Raise TypeError unless `from_linear` is given a linear layer."""
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"from_linear: linear is {type(layer).__name__}; expected an nn.Linear")


def _check_features(layer: str, input: Tensor, features: int) -> None:
    """Raise TypeError for no tensor, RuntimeError for a last dimension without the layer's input features."""
    check_tensors(layer, input=input)
    require(
        input.dim() > 0 and input.shape[-1] == features,
        lambda: f"{layer}: input has shape {list(input.shape)}; expected {features} features in the last dimension",
    )


class FrozenProduct(torch.autograd.Function):
    """A product with a frozen weight, for autograd and torch.func's transforms.

    The first tensor of `forward` wants a gradient; the next ones are saved for `backward`, numbers are not.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors of the weight."""
        ctx.save_for_backward(*(x for x in inputs[1:] if isinstance(x, Tensor)))


class _Int8Product(FrozenProduct):
    """The product of an Int8Linear."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
        """Round `x` but for its large columns, and multiply."""
        wide = scale.to(torch.float32)
        small, rest, text = x, [], ""
        if threshold:
            large = (x.abs() >= threshold).any(0)
            small = x.masked_fill(large, 0)
            kept, op = x.masked_fill(~large, 0), torch.ops.tile.dequant_gemm.default
            rest = [op(kept, [weight], [scale.expand(weight.shape[0], 1)], [], 8, False, 0, [], "", "", torch.float32)]
            text = "y=add(acc0,x0);ret y"
        a, scale_a = torch.ops.tile.quantize_int8.default(small, 0)
        kinds = "t" * len(rest)
        out: Tensor = torch.ops.tile.scaled_gemm.default(a, weight.mT, scale_a, wide.mT, rest, kinds, text, x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Compute the gradient of the input: the upstream one times the widened weight."""
        weight, scale = ctx.saved_tensors
        return grad @ (weight.to(torch.float32) * scale.to(torch.float32)).to(grad.dtype), None, None, None


class _Float8Product(FrozenProduct):
    """The product of a Float8Linear, with a gradient of the input only."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor | None) -> Tensor:
        """Round `x` and multiply."""
        wide = scale.to(torch.float32)
        if input_scale is None:
            a, scale_a = torch.ops.tile.quantize_fp8.default(x, 128 if scale.shape[1] > 1 else 0, torch.float8_e4m3fn)
        else:
            largest = torch.finfo(torch.float8_e4m3fn).max
            scale_a = input_scale.to(torch.float32).reshape(1, 1)
            a = (x / scale_a).clamp(-largest, largest).to(torch.float8_e4m3fn)
        out: Tensor = torch.ops.tile.scaled_gemm.default(a, weight.mT, scale_a, wide.mT, [], "", "", x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Multiply by the widened weight."""
        weight, scale = ctx.saved_tensors[:2]
        wide = weight.to(torch.float32) * kernels("gemm.scaled").spread(scale.to(torch.float32), *weight.shape)
        return grad @ wide.to(grad.dtype), None, None, None
