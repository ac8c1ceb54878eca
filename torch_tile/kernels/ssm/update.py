# SPDX-License-Identifier: Apache-2.0
"""Update the state of a selective state-space model by one token (Mamba, arXiv:2312.00752; Mamba-2).

Assumes that `ops` checked shapes and dtypes. Tensors may have any strides: values that all channels of a head share may
be expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, entry_function, machine_of, power_of_two, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.args import SelectiveStateUpdateArgs
from torch_tile.kernels.ssm.tiles import Spec as ScanSpec, step_size


@dataclass(frozen=True)
class Config:
    """The tiling: blocks of `rows` channels and `columns` states."""

    rows: int
    columns: int
    threads: int = 128


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of the update kernel: dtypes of operands, None for absent operands."""

    state: torch.dtype
    x: torch.dtype
    dt: torch.dtype
    A: torch.dtype
    B: torch.dtype
    C: torch.dtype
    D: torch.dtype | None
    z: torch.dtype | None
    dt_bias: torch.dtype | None
    softplus: bool


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.selective_state_update` in plain torch. Takes the arguments of `SelectiveStateUpdateArgs`."""
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus = SelectiveStateUpdateArgs(*given, **named)
    compute, heads = compute_dtype(x.dtype), x.shape[1]
    step = dt.to(compute) if dt_bias is None else dt.to(compute) + dt_bias.to(compute)
    step = F.softplus(step) if dt_softplus else step
    shares = heads // B.shape[1] if B.shape[1] else 1
    b, c = (t.to(compute).repeat_interleave(shares, 1, output_size=heads)[:, :, None] for t in (B, C))
    added = (step * x.to(compute))[..., None] * b
    new_state = state.to(compute) * torch.exp(step[..., None] * A.to(compute)) + added
    out = (new_state * c).sum(-1)
    out = out if D is None else out + D.to(compute) * x.to(compute)
    out = out if z is None else out * F.silu(z.to(compute))
    return out.to(x.dtype).contiguous(), new_state.to(state.dtype).contiguous()


@library_jit
def update(config: Config, spec: Spec) -> Any:
    """Build the kernel that updates the states of some channels of a head and computes their outputs."""
    compute, rows, columns = compute_dtype(spec.x), config.rows, config.columns
    b, h, p, g, n = T.dynamic("b, h, p, g, n")
    steps = ScanSpec(spec.x, spec.dt, dt_bias=spec.dt_bias, softplus=spec.softplus)
    optional = {"D": (spec.D, (h, p)), "z": (spec.z, (b, h, p)), "dt_bias": (spec.dt_bias, (h, p))}
    found = {name: (dtype, shape) for name, (dtype, shape) in optional.items() if dtype is not None}
    types, given = [strided(name, shape, dtype, unit=False) for name, (dtype, shape) in found.items()], list(found)

    @T.prim_func
    def selective_state_update(
        state: strided("state", (b, h, p, n), spec.state, unit=False),
        x: strided("x", (b, h, p), spec.x, unit=False),
        dt: strided("dt", (b, h, p), spec.dt, unit=False),
        A: strided("A", (h, p, n), spec.A, unit=False),
        B: strided("B", (b, g, n), spec.B, unit=False),
        C: strided("C", (b, g, n), spec.C, unit=False),
        *others: types,
        out: T.Tensor((b, h, p), spec.x),
        new_state: T.Tensor((b, h, p, n), spec.state),
    ):
        with T.Kernel(T.ceildiv(p, rows), h, b, threads=config.threads) as (bx, head, sequence):
            group = head // (h // g)
            step = T.alloc_fragment((rows,), compute)
            total = T.alloc_fragment((rows,), compute)
            terms = T.alloc_fragment((rows, columns), compute)
            T.clear(terms)
            for i in T.Parallel(rows):
                row = T.min(bx * rows + i, p - 1)
                bias = others[given.index("dt_bias")][head, row] if spec.dt_bias is not None else 0.0
                size, _, _ = step_size(steps, dt[sequence, head, row], bias, -T.infinity(compute), T.infinity(compute))
                step[i] = size
            for k in T.serial(T.ceildiv(n, columns)):
                for i, j in T.Parallel(rows, columns):
                    row, column = T.min(bx * rows + i, p - 1), T.min(k * columns + j, n - 1)
                    inside = k * columns + j < n
                    keep = T.exp(step[i] * T.cast(A[head, row, column], compute))
                    added = step[i] * T.cast(x[sequence, head, row], compute)
                    added = added * T.cast(B[sequence, group, column], compute)
                    value = T.cast(state[sequence, head, row, column], compute) * keep + added
                    new_state[sequence, head, bx * rows + i, k * columns + j] = T.cast(value, spec.state)
                    product = value * T.cast(C[sequence, group, column], compute)
                    terms[i, j] += T.if_then_else(inside, product, 0.0)
            T.reduce_sum(terms, total, dim=1)
            for i in T.Parallel(rows):
                row = T.min(bx * rows + i, p - 1)
                value = total[i]
                if spec.D is not None:
                    skip = T.cast(others[given.index("D")][head, row], compute)
                    value = value + skip * T.cast(x[sequence, head, row], compute)
                if spec.z is not None:
                    gate = T.cast(others[given.index("z")][sequence, head, row], compute)
                    value = value * gate / (1.0 + T.exp(-gate))
                out[sequence, head, bx * rows + i] = T.cast(value, spec.x)

    return selective_state_update


@entry_function(
    SelectiveStateUpdateArgs,
    reference,
    lambda args: (args.x.new_empty(args.x.shape), args.state.new_empty(args.state.shape)),
)
def selective_state_update(
    args: SelectiveStateUpdateArgs[Any], out: torch.Tensor, new_state: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the update as `reference` does. `config` overrides the tiling."""
    if not args.state.numel():
        return False
    *tensors, softplus = args
    dtypes: list[Any] = [None if t is None else t.dtype for t in tensors]
    spec = Spec(*dtypes, softplus=bool(softplus))
    config = config or Config(8, min(128, max(16, power_of_two(args.state.shape[3]))))
    machine_of(args.x).kernel(update)(config, spec)(*(t for t in tensors if t is not None), out, new_state)
    return True
