# SPDX-License-Identifier: Apache-2.0
"""Helpers that only lowered CPU kernels call: the gemm micro-kernel, row reductions, arrivals.

Their meaning is that of the tile op they come from; they live in csrc/cpu_*.h.
"""

from __future__ import annotations

from torch_tile.intrinsics.base import Intrinsic, declare, same

CPU_HELPERS = ("cpu_gemm", "cpu_reduce", "cpu_arrive_last")

for _name in CPU_HELPERS:
    declare(Intrinsic(_name, -1, same, _name))
