# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_schedule`: who decodes what, for `tile.mla_decode` over sequences of different lengths."""

from __future__ import annotations

import torch

from torch_tile.hardware import GRID_LIMITS
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import register

MOST_UNITS = GRID_LIMITS[1]  # blocks in the second dimension of a launch


def _fake_mla_schedule(seq_lens: torch.Tensor, rows: int, units: int = 0) -> torch.Tensor:
    from torch_tile.kernels.mla import scheduler as family

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


def _check_values(seq_lens: torch.Tensor, rows: int, units: int = 0) -> None:
    """No length is negative. On the CPU only: elsewhere reading them would wait, and they count as 0."""
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        low = int(seq_lens.min())
        require(low >= 0, lambda: f"tile.mla_schedule: seq_lens has the value {low}; expected 0 or more")


register("mla_schedule", fake=_fake_mla_schedule, check_values=_check_values)
