# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_schedule`: who decodes what, for `tile.mla_decode` over sequences of different lengths."""

from __future__ import annotations

import torch

from torch_tile.ops import checks
from torch_tile.ops.checks import require_type, require_value
from torch_tile.ops.registration import register


def _fake_mla_schedule(seq_lens: torch.Tensor, rows: int, units: int = 0) -> torch.Tensor:
    from torch_tile.kernels import mla_schedule as family

    require_type(
        seq_lens.dtype == torch.int32,
        lambda: f"tile.mla_schedule: seq_lens has dtype {seq_lens.dtype}; expected torch.int32",
    )
    checks.check_dims("mla_schedule", "seq_lens", seq_lens, 1, "[B]")
    require_value(rows >= 0, lambda: f"tile.mla_schedule: rows is {rows}; expected Sq * H, 0 or more")
    require_value(units >= 0, lambda: f"tile.mla_schedule: units is {units}; expected 0 (automatic) or more")
    return seq_lens.new_empty((family.units_of(seq_lens, rows, units) + seq_lens.shape[0], family.FIELDS))


register("mla_schedule", fake=_fake_mla_schedule)
