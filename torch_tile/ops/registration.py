# SPDX-License-Identifier: Apache-2.0
"""The table of `torch.ops.tile` schemas, and how one op's pieces are put on them.

After `import torch_tile` every op of the table exists. What runs an op is imported at its first call: registering is
about a millisecond an op, importing kernels and their compiler is more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from torch_tile.ops.eager import Eager
from torch_tile.ops.sharded_backward import sharded

_ATTENTION_OPTIONS = "Tensor? mask=None, bool causal=False, float? scale=None, int window=0, SymInt q_offset=0"
_ATTENTION = f'(Tensor q, Tensor k, Tensor v, {_ATTENTION_OPTIONS}, Tensor[]? aux=None, str score="")'
_MLA_DECODE = (
    "(Tensor q, Tensor q_pe, Tensor kv, Tensor k_pe, Tensor? block_table=None, Tensor? seq_lens=None, "
    "float? scale=None, int num_splits=0, Tensor? schedule=None)"
)
_RMS_OPTIONS = 'float eps=1e-6, str activation="none", float weight_offset=0.0, bool cast_first=True'

SCHEMAS = {
    "gemm": "(Tensor a, Tensor[] bs, Tensor[] aux, str kinds, str epilogue, ScalarType dtype) -> Tensor",
    "grouped_gemm": (
        "(Tensor a, Tensor[] bs, Tensor offsets, Tensor[] aux, str kinds, str epilogue, ScalarType dtype) -> Tensor"
    ),
    "k_grouped_gemm": "(Tensor a, Tensor b, Tensor offsets, ScalarType dtype) -> Tensor",
    "dequant_gemm": (
        "(Tensor a, Tensor[] bs, Tensor[] scales, Tensor[] zeros, int bits, bool high_first, int offset, Tensor[] aux, "
        "str kinds, str epilogue, ScalarType dtype) -> Tensor"
    ),
    "linear": ('(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, str activation="none") -> Tensor'),
    "swiglu": '(Tensor x, Tensor gate_weight, Tensor up_weight, str activation="silu") -> Tensor',
    "attention": f"{_ATTENTION} -> Tensor",
    "attention_lse": f"{_ATTENTION} -> (Tensor out, Tensor lse)",
    "attention_backward": (
        f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_ATTENTION_OPTIONS}, "
        'str keep="", Tensor[]? aux=None, str score="") -> (Tensor dq, Tensor dk, Tensor dv, Tensor kept)'
    ),
    "mla_decode": f"{_MLA_DECODE} -> Tensor",
    "mla_decode_lse": f"{_MLA_DECODE} -> (Tensor out, Tensor lse)",
    "mla_schedule": "(Tensor seq_lens, int rows, int units=0) -> Tensor",
    "rms_norm": f"(Tensor x, Tensor? weight=None, {_RMS_OPTIONS}) -> Tensor",
    "add_rms_norm": f"(Tensor x, Tensor residual, Tensor? weight=None, {_RMS_OPTIONS}) -> (Tensor y, Tensor sum)",
    "layer_norm": "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    "fused_norm": (
        "(Tensor x, Tensor[] aux, str kinds, str prologue, str epilogue, bool centred, float eps, bool keep, "
        "ScalarType dtype) -> (Tensor y, Tensor sum)"
    ),
    "softmax": "(Tensor x, int dim=-1, ScalarType? dtype=None) -> Tensor",
}
"""All ops are functional: they return fresh dense tensors that never alias an input. Those are contiguous, except that
what attention and mla_decode return lies in memory as their queries do (kernels/attention/memory_order.py)."""


class _Library(torch.library.Library):
    """Ops without forward-mode derivatives: torch would drop tangents without a word where no gradient is wanted."""

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:
        """As torch's; autograd's kernels refuse tangents."""
        kernel = _without_tangents(op_name, fn) if dispatch_key == "Autograd" else fn
        super().impl(op_name, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]


def _without_tangents(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:  # looked at in each call, and rarely so
            given = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,))]
            if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in given):
                raise NotImplementedError(
                    f"tile.{name.removeprefix('tile::')}: an argument has a tangent, but the op has no forward-mode "
                    "derivative; use the reverse mode, or torch's own operation"
                )
        return kernel(keys, *args)

    return call


LIBRARY: torch.library.Library = _Library("tile", "DEF")  # type: ignore[no-untyped-call]

# flexible_layout: the kernels address any strides, so Inductor need not copy inputs into the strides eager would have.
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def register(
    name: str,
    *,
    fake: Callable[..., Any],
    check_values: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    in_training: Callable[..., Any] | None = None,
    lower_precision: tuple[str, ...] = (),
    full_precision_cuda: bool = False,
    flops: Callable[..., int] | None = None,
) -> None:
    """Put the pieces on op `name`.

    fake: what checks the arguments and makes empty outputs, shapes maybe symbolic. check_values: what refuses values of
    tensors that hold some; what computes the op is found by its name (eager.py).
    backward, setup_context: as for `torch.library.register_autograd`. in_training: instead of these, what is called
    where a gradient is wanted. lower_precision: arguments that autocast casts to
    its dtype, on CPU and CUDA. full_precision_cuda: autocast casts all to float32, on CUDA only (torch's CPU autocast
    leaves norms and softmax alone). flops: from the shapes of the tensor arguments and `out_shape`.
    """
    op = getattr(torch.ops.tile, name).default
    fake = _with_tensors(op, fake)
    LIBRARY.impl(name, Eager(name, fake, check_values), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tile::{name}", fake, lib=LIBRARY)
    if backward is not None and setup_context is not None:
        setup_context, backward = sharded(op, setup_context, backward)
        torch.library.register_autograd(f"tile::{name}", _of_given(backward), setup_context=setup_context, lib=LIBRARY)
    if in_training is not None:
        LIBRARY.impl(name, _autograd(op, in_training), "Autograd", with_keyset=True)
    if lower_precision:
        for device in ("cpu", "cuda"):
            _register_autocast(op, device, lower_precision, None)
    if full_precision_cuda:
        _register_autocast(op, "cuda", tuple(a.name for a in op._schema.arguments), torch.float32)
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(op._overloadpacket)(flops)


def _with_tensors(op: torch._ops.OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` after a refusal of None where the schema wants a tensor: torch lets it pass."""
    wanted = [(i, a.name) for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"]

    @functools.wraps(fake)
    def call(*args: Any) -> Any:
        for i, name in wanted:
            if args[i] is None:
                raise TypeError(f"tile.{op._opname}: {name} is None; expected a tensor")
        return fake(*args)

    return call


def _autograd(op: torch._ops.OpOverload, in_training: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's kernel of an op that another one stands for where a gradient is wanted."""

    def call(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        given = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,))]
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            return in_training(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return call


def _of_given(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` without the gradients of trailing arguments that a call left to their defaults.

    Where an argument is a list, torch compares what is returned with the arguments that were given.
    """
    return lambda ctx, *grads: backward(ctx, *grads)[: len(ctx.needs_input_grad)]


def _register_autocast(
    op: torch._ops.OpOverload, device: str, names: tuple[str, ...], dtype: torch.dtype | None
) -> None:
    """Under autocast on `device`, cast the floating tensors among `names` to `dtype` (None: autocast's own).

    `torch.library.register_autocast` would fix the dtype at registration. Like torch's, the rule leaves float64 and
    tensors of other devices alone; unlike torch's, casts of parameters are not cached for the region.
    """
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    positions = frozenset(i for i, a in enumerate(op._schema.arguments) if a.name in names)

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            eligible = value.is_floating_point() and value.device.type == device and value.dtype != torch.float64
            return value.to(to) if eligible else value
        return [cast(v, to) for v in value] if isinstance(value, list) else value

    def autocast(*args: Any) -> Any:
        to = torch.get_autocast_dtype(device) if dtype is None else dtype
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(a, to) if i in positions else a for i, a in enumerate(args)))

    LIBRARY.impl(op._schema.name.removeprefix("tile::"), autocast, key)
