# SPDX-License-Identifier: Apache-2.0
"""Hints of TileLang's that this compiler has no need of: what they ask for is decided from the kernel itself.

They are accepted where TileLang accepts them, change no result, and nothing else either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.roles import check_registers
from torch_tile.tileop.base import region_of


def disable_warp_group_reg_alloc() -> None:
    """Roles that the compiler makes keep equal shares of registers. How many each has, the compiler counts."""
    in_kernel("T.disable_warp_group_reg_alloc")


def annotate_producer_reg_dealloc(reg_count: int = 24) -> None:
    """Registers of each thread that copies ahead. How many each has, the compiler counts; a multiple of 8."""
    in_kernel("T.annotate_producer_reg_dealloc")
    check_registers("T.annotate_producer_reg_dealloc", "reg_count", reg_count or 1)


def annotate_consumer_reg_alloc(reg_count: int = 240) -> None:
    """Registers of each thread that multiplies. How many each has, the compiler counts; a multiple of 8."""
    in_kernel("T.annotate_consumer_reg_alloc")
    check_registers("T.annotate_consumer_reg_alloc", "reg_count", reg_count or 1)


def annotate_l2_hit_ratio(ratios: Mapping[Any, float]) -> None:
    """`{tensor: share}` of a tensor's accesses that should find it in the L2 cache. Caches are left as they are."""
    in_kernel("T.annotate_l2_hit_ratio")
    for tensor, ratio in ratios.items():
        _need_tensor("T.annotate_l2_hit_ratio", tensor)
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            why, fix = f"is {ratio!r}", "give a share from 0 to 1"
            raise error("bad_argument", None, op="T.annotate_l2_hit_ratio", name="ratios", why=why, fix=fix)


def annotate_restrict_buffers(*tensors: Any) -> None:
    """No two of these tensors overlap. A launch's written tensors never overlap others: that is taken for granted."""
    in_kernel("T.annotate_restrict_buffers")
    for tensor in tensors:
        _need_tensor("T.annotate_restrict_buffers", tensor)


def _need_tensor(what: str, tensor: Any) -> None:
    region = region_of(tensor)
    if region is None or region.buffer.scope != "global":
        why, fix = f"are {tensor!r}"[:80], "name tensors, the parameters of the kernel"
        raise error("bad_argument", None, op=what, name="tensors", why=why, fix=fix)
