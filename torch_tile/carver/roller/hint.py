# SPDX-License-Identifier: Apache-2.0
"""One suggestion: the sizes of tiles and what belongs to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_tile.carver.roller.rasterization import NoRasterization, Rasterization


@dataclass
class IntrinInfo:
    """What products a suggestion is for: dtypes, whether B is transposed, and transformations of operands."""

    in_dtype: str
    out_dtype: str
    trans_b: bool
    input_transform_kind: int = 0
    weight_transform_kind: int = 0


@dataclass
class Hint:
    """Sizes of a block's tile, of a warp's or thread's part of it, and of a step of a sum. Products have warps' parts,
    other kernels threads' parts.

    `seconds` is what the cost model expects.
    """

    block: list[int]
    warp: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    rstep: list[int] = field(default_factory=list)
    pipeline_stage: int = 1
    rasterization_plan: Rasterization = field(default_factory=NoRasterization)
    use_tc: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the fields by name."""
        return dict(vars(self))


__all__ = ["Hint", "IntrinInfo"]
