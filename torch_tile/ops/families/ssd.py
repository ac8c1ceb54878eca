# SPDX-License-Identifier: Apache-2.0
"""`tile.ssd_chunk_scan`, the scan of Mamba-2, its gradient, and `tile.selective_state_update`, its step of a token."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.ssm.args import (
    GRADIENTS,
    SelectiveStateUpdateArgs,
    SsdChunkScanArgs,
    SsdChunkScanBackwardArgs,
    empty_gradients,
)
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.recomputed import by_autograd, save_without_zeros
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, in_torch, op_gradients
from torch_tile.ops.saved_args import restored_args
from torch_tile.ops.sharding_rule import Rule, Spec, if_given


def _check_shape(op: str, name: str, tensor: Tensor | None, meaning: str, sizes: dict[str, tuple[Any, str]]) -> None:
    """Check that a tensor, if given, has dimensions as `meaning`, "B L H P"; learn sizes that are unknown yet."""
    if tensor is None:
        return
    letters = meaning.split()
    checks.check_dims(op, name, tensor, len(letters), f"[{', '.join(letters)}]")
    for dim, letter in enumerate(letters):
        if letter in sizes:
            size, origin = sizes[letter]
            checks.check_size(op, name, tensor, dim, size, f"{letter} of {origin}")
        else:
            sizes[letter] = tensor.shape[dim], name


def _check_groups(op: str, sizes: dict[str, tuple[Any, str]]) -> None:
    """Check that the heads divide evenly into groups."""
    heads, groups = sizes["H"][0], sizes["G"][0]
    require(groups >= 1, lambda: f"tile.{op}: B has {groups} groups; expected at least 1")
    require(heads % groups == 0, lambda: f"tile.{op}: x has {heads} heads; expected a multiple of B's {groups} groups")


def _check(op: str, args: Any, z: Tensor | None = None) -> None:
    """Check the arguments of `tile.ssd_chunk_scan`."""
    x, b, c, d = args.x, args.B, args.C, args.D
    optional = {"D": d, "z": z, "dt_bias": args.dt_bias, "initial_states": args.initial_states}
    checks.check_floating(op, x=x, dt=args.dt, A=args.A, B=b, C=c, **optional)
    checks.check_same_dtype(op, x=x, B=b, C=c)
    sizes: dict[str, tuple[Any, str]] = {}
    _check_shape(op, "x", x, "B L H P", sizes)
    _check_shape(op, "dt", args.dt, "B L H", sizes)
    _check_shape(op, "A", args.A, "H", sizes)
    _check_shape(op, "B", b, "B L G N", sizes)
    _check_shape(op, "C", c, "B L G N", sizes)
    _check_shape(op, "D", d, "H P" if d is not None and d.dim() == 2 else "H", sizes)
    _check_shape(op, "z", z, "B L H P", sizes)
    _check_shape(op, "dt_bias", args.dt_bias, "H", sizes)
    _check_shape(op, "initial_states", args.initial_states, "B H P N", sizes)
    _check_groups(op, sizes)
    if args.seq_idx is not None:
        index = args.seq_idx
        require(
            index.dtype in (torch.int32, torch.int64),
            lambda: f"tile.{op}: seq_idx has dtype {index.dtype}; expected int32 or int64",
        )
        checks.check_device(op, "seq_idx", index, "x", x)
        _check_shape(op, "seq_idx", index, "B L", sizes)
    require_value(
        args.dt_max is None or args.dt_min <= args.dt_max,
        lambda: f"tile.{op}: dt_min is {args.dt_min}; expected at most dt_max, {args.dt_max}",
    )


def _state_shape(args: Any) -> tuple[Any, ...]:
    """Return the shape of the final states, `[B, H, P, N]`."""
    batch, _, heads, head_dim = args.x.shape
    return batch, heads, head_dim, args.B.shape[3]


def _fake(args: SsdChunkScanArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.ssd_chunk_scan` and make its empty results."""
    _check("ssd_chunk_scan", args, args.z)
    return args.x.new_empty(args.x.shape), args.x.new_empty(_state_shape(args), dtype=compute_dtype(args.x.dtype))


def _fake_backward(args: SsdChunkScanBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.ssd_chunk_scan_backward` and make its empty results."""
    op = "ssd_chunk_scan_backward"
    _check(op, args)
    checks.check_floating(op, x=args.x, grad=args.grad, grad_states=args.grad_states)
    checks.check_same_dtype(op, x=args.x, grad=args.grad)
    for name, t, shape in (("grad", args.grad, args.x.shape), ("grad_states", args.grad_states, _state_shape(args))):
        if t is not None:
            checks.check_dims(op, name, t, 4, "as the scan's result")
            checks.check_sizes(op, name, t, shape, "as the scan's result")
    return empty_gradients(args)


def _fake_update(args: SelectiveStateUpdateArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.selective_state_update` and make its empty results."""
    op, sizes = "selective_state_update", {}  # type: ignore[var-annotated]
    checks.check_floating(op, **dict(zip(args._fields[:9], args[:9], strict=True)))
    shapes = ("B H P N", "B H P", "B H P", "H P N", "B G N", "B G N", "H P", "B H P", "H P")
    for name, tensor, shape in zip(args._fields, args[:9], shapes, strict=False):
        _check_shape(op, name, tensor, shape, sizes)
    _check_groups(op, sizes)
    return args.x.new_empty(args.x.shape), args.state.new_empty(args.state.shape)


def _backward(ctx: Any, grad: Tensor | None, grad_states: Tensor | None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.ssd_chunk_scan`."""
    args, _ = restored_args(ctx)
    if grad is None and grad_states is None:
        return op_gradients(SsdChunkScanArgs)
    found: dict[str, Any] = {}
    grad = torch.zeros_like(args.x) if grad is None else grad.to(args.x.dtype)
    if args.z is not None:  # the output before its gate is computed again
        compute = compute_dtype(args.x.dtype)
        plain, _ = torch.ops.tile.ssd_chunk_scan(*args._replace(z=None))
        z, upstream = args.z.to(compute), grad.to(compute)
        gate = torch.sigmoid(z)
        found["z"] = (upstream * plain.to(compute) * gate * (1.0 + z * (1.0 - gate))).to(args.z.dtype)
        grad = (upstream * F.silu(z)).to(args.x.dtype)
    given = args._asdict()
    del given["z"]
    made = torch.ops.tile.ssd_chunk_scan_backward(grad, grad_states, *given.values())
    found |= {name: t for name, t in zip(GRADIENTS, made, strict=True) if given[name] is not None}
    return op_gradients(SsdChunkScanArgs, **found)


def _group(B: Spec, dim: int) -> tuple[str, dict[str, int]]:
    """Return the name of B's groups, and the number that ranks must share evenly to hold heads with their group."""
    groups = B.shape[dim]
    return ("", {}) if groups == 1 else ("head", {"head": groups})


def _sharding(args: SsdChunkScanArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.ssd_chunk_scan` for sharding."""
    group, even = _group(args.B, 2)
    x, keys, state = ("batch", "time", "head", "p"), ("batch", "time", group, "n"), ("batch", "head", "p", "n")
    skip = ("head",) if args.D is None or len(args.D.shape) == 1 else ("head", "p")
    optional = if_given(args.D, skip), if_given(args.z, x), if_given(args.dt_bias, ("head",))
    inputs = [x, x[:3], ("head",), keys, keys, *optional, if_given(args.initial_states, state)]
    inputs.append(if_given(args.seq_idx, x[:2]))
    return Rule(outputs=[x, state], inputs=inputs, free=("batch", "head"), even=even)


def _sharding_of_backward(args: SsdChunkScanBackwardArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.ssd_chunk_scan_backward` for sharding."""
    forward = _sharding(args.forward)
    inputs = [dims for n, dims in enumerate(forward.inputs) if n != 6]  # without z
    outputs = [("none",) if dims is None else dims for dims in inputs[: len(GRADIENTS)]]
    grads = [forward.outputs[0], if_given(args.grad_states, tuple(forward.outputs[1]))]
    free = ("head",) if forward.even else ()  # one group adds up all heads, and some results all sequences
    return Rule(outputs=outputs, inputs=[*grads, *inputs], free=free, even=forward.even)


def _sharding_of_update(args: SelectiveStateUpdateArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.selective_state_update` for sharding."""
    group, even = _group(args.B, 1)
    x, keys, state, channel = ("batch", "head", "p"), ("batch", group, "n"), ("batch", "head", "p", "n"), ("head", "p")
    optional = if_given(args.D, channel), if_given(args.z, x), if_given(args.dt_bias, channel)
    inputs = [state, x, x, ("head", "p", "n"), keys, keys, *optional]
    return Rule(outputs=[x, state], inputs=inputs, free=("batch", "head"), even=even)


def _flops(args: Any) -> int:
    """Count the operations of the recurrence itself: inputs into states, and states into outputs."""
    batch, length, heads, head_dim = args.x
    return int(4 * batch * length * heads * head_dim * args.B[3])


def _update_flops(args: SelectiveStateUpdateArgs[Shape]) -> int:
    """Count the operations of `tile.selective_state_update`."""
    batch, heads, head_dim, states = args.state
    return 4 * batch * heads * head_dim * states


_ARGS = """    dt: `[B, L, H]`, of any floating dtype, before its bias and softplus.
    A: `[H]`, usually negative.
    B: `[B, L, G, N]` in x's dtype; head h has group `h // (H / G)`.
    C: `[B, L, G, N]` in x's dtype.
    D: `[H]` or `[H, P]`, the factor of x in the output.
"""
_OPTIONS = """    dt_bias: `[H]`, added to dt.
    initial_states: `[B, H, P, N]`, of any floating dtype; 0 if not given.
    dt_softplus: whether the step size is the softplus of dt and its bias.
    dt_min: the least step size.
    dt_max: the greatest step size, None for no limit.
    seq_idx: int32 or int64 `[B, L]`, the sequence of each time: where it differs from the time before, the state is 0
        again. The first states are those of the first sequences, and the last ones those of the last sequences.
"""


ssd_chunk_scan: Final = declare(
    "ssd_chunk_scan",
    SsdChunkScanArgs[Tensor],
    tuple[Tensor, Tensor],
    f"""The scan of Mamba-2 (SSD, arXiv:2405.21060), whose state is a matrix `[P, N]` for each head.

`S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T`, `y[t] = (S[t] C[t] + D x[t]) silu(z[t])`. Products run on tensor cores
in chunks of times; states and sums are in float32 (float64 for float64). The gradient is kernels, too.

Args:
    x: `[B, L, H, P]`, of any strides.
{_ARGS}    z: `[B, L, H, P]`, of any floating dtype.
{_OPTIONS}
Returns:
    the output `[B, L, H, P]` in x's dtype, and the last states `[B, H, P, N]` in float32 (float64 for float64).
""",
    module="ssm.ssd",
    returns=("out", "final_states"),
    fake=_fake,
    setup_context=save_without_zeros,
    backward=_backward,
    sharding=_sharding,
    flops=_flops,
    lower_precision=("x", "B", "C"),
)
ssd_chunk_scan_backward: Final = declare(
    "ssd_chunk_scan_backward",
    SsdChunkScanBackwardArgs[Tensor],
    tuple[Tensor, ...],
    f"""The gradients of `ssd_chunk_scan` without z.

Args:
    grad: `[B, L, H, P]` in x's dtype, of the output.
    grad_states: `[B, H, P, N]`, of the last states; None for 0.
    x: `[B, L, H, P]`.
{_ARGS}{_OPTIONS}
Returns:
    the gradients by x, dt, A, B, C, D, dt_bias and initial_states, in their dtypes; `[0]` for what is not given.
""",
    returns=("dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias", "dinitial_states"),
    fake=_fake_backward,
    run=lambda args, out: kernels("ssm.ssd").ssd_chunk_scan_backward(*args, results=out),
    reference=in_torch("ssm.ssd", "gradient_reference"),
    **by_autograd("ssm.ssd", "gradient_reference"),
    sharding=_sharding_of_backward,
    flops=lambda args: 2 * _flops(args),
)
selective_state_update: Final = declare(
    "selective_state_update",
    SelectiveStateUpdateArgs[Tensor],
    tuple[Tensor, Tensor],
    """One token of Mamba's or Mamba-2's recurrence; what Mamba-2 has for each head is expanded to its channels.

Args:
    state: `[B, H, P, N]`, of any floating dtype.
    x: `[B, H, P]`, the token.
    dt: `[B, H, P]`, before its bias and softplus.
    A: `[H, P, N]`.
    B: `[B, G, N]`; head h has group `h // (H / G)`.
    C: `[B, G, N]`.
    D: `[H, P]`, the factor of x in the output.
    z: `[B, H, P]`, the output's gate before its silu.
    dt_bias: `[H, P]`, added to dt.
    dt_softplus: whether the step size is the softplus of dt and its bias.

Returns:
    the output `[B, H, P]` in x's dtype, and the new state in state's dtype.
""",
    module="ssm.update",
    returns=("out", "new_state"),
    fake=_fake_update,
    **by_autograd("ssm.update", "reference"),
    sharding=_sharding_of_update,
    flops=_update_flops,
    lower_precision=("x", "B", "C"),
)
