# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_schedule`: who decodes what, for `tile.mla_decode` over sequences of different lengths."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from torch_tile.hardware import GRID_LIMITS
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import register
from torch_tile.ops.registry import V, entry, form, in_torch
from torch_tile.ops.sharding_rule import Rule, Spec

MOST_UNITS = GRID_LIMITS[1]  # blocks in the second dimension of a launch


class MlaScheduleArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.mla_schedule`."""

    seq_lens: V
    rows: int
    units: int = 0


def _fake(args: MlaScheduleArgs[Tensor]) -> Tensor:
    from torch_tile.kernels.mla import scheduler as family

    seq_lens, rows, units = args
    require_type(
        seq_lens.dtype == torch.int32,
        lambda: f"tile.mla_schedule: seq_lens has dtype {seq_lens.dtype}; expected torch.int32",
    )
    checks.check_dims("mla_schedule", "seq_lens", seq_lens, 1, "[B]")
    require_value(rows >= 0, lambda: f"tile.mla_schedule: rows is {rows}; expected Sq * H, 0 or more")
    require_value(
        0 <= units <= MOST_UNITS,
        lambda: f"tile.mla_schedule: units is {units}; expected 0 (automatic) to {MOST_UNITS}",
    )
    return seq_lens.new_empty((family.units_of(seq_lens, rows, units) + seq_lens.shape[0], family.FIELDS))


def _check_values(args: MlaScheduleArgs[Tensor]) -> None:
    """No length is negative. On the CPU only: elsewhere reading them would wait, and they count as 0."""
    seq_lens = args.seq_lens
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        low = int(seq_lens.min())
        require(low >= 0, lambda: f"tile.mla_schedule: seq_lens has the value {low}; expected 0 or more")


def _sharding(args: MlaScheduleArgs[Spec]) -> Rule:
    return Rule(outputs=[("unit", "field")], inputs=[("batch",)], free=())


mla_schedule = form(
    "mla_schedule",
    MlaScheduleArgs[Tensor],
    Tensor,
    """Which positions of which sequences each unit of a GPU decodes, so that all work equally long.

Sequences of different lengths would otherwise leave most of a GPU to wait for the longest. The plan is made on the
device, without a look from the host, once for all layers of a step: it depends on the lengths only.

Args:
    seq_lens: int32 `[B]`, as for `mla_decode`. Negative ones are refused on the CPU, and count as 0 elsewhere.
    rows: Sq * H: how many rows of queries each sequence has.
    units: how many there are, up to 65535; 0 for as many as the GPU runs at a time.

Returns:
    int32 `[units + B, 4]`. For each unit the first sequence, the first block of 64 positions in it, the last
    sequence and the end of the blocks in it; then for each sequence the first unit, the last unit, and zeros.
""",
)


register(
    name="mla_schedule",
    args=MlaScheduleArgs,
    form=mla_schedule,
    fake=_fake,
    check_values=_check_values,
    run=entry("mla_schedule", "mla_schedule", "out"),
    reference=in_torch("mla_schedule"),
    sharding=_sharding,
)
