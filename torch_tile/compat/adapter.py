# SPDX-License-Identifier: Apache-2.0
"""TileLang's `jit.adapter`, for files that import or patch its class; kernels here have no adapters."""

from __future__ import annotations

from collections.abc import Sequence


class BaseKernelAdapter:
    """Stands for the class that calls TileLang's kernels. Nothing here makes or asks one."""

    params: Sequence[object] = ()

    def _legalize_result_idx(self, result_idx: int | Sequence[int] | None) -> list[int]:
        """Count the positions of results from the first parameter on. Raises ValueError for one that there is not."""
        given = [] if result_idx is None else [result_idx] if isinstance(result_idx, int) else list(result_idx)
        count = len(self.params)
        if wrong := [n for n in given if not -count <= n < count]:
            raise ValueError(f"result_idx has {wrong[0]}, and there are {count} parameters")
        return [n % count for n in given]
