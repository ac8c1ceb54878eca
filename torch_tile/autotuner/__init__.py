# SPDX-License-Identifier: Apache-2.0
"""Find the fastest configuration of a kernel: a cost model drops hopeless ones, the rest are timed on this machine."""

from typing import Any

from torch_tile.autotuner.decorator import AutotunedFunction, autotune, get_autotune_inputs, set_autotune_inputs
from torch_tile.autotuner.result import AutotuneResult, Trial
from torch_tile.autotuner.session import AutoTuner

__all__ = [
    "AutoTuner",
    "AutotuneResult",
    "AutotunedFunction",
    "Trial",
    "autotune",
    "get_autotune_inputs",
    "set_autotune_inputs",
]


def __getattr__(name: str) -> Any:
    """Raise AttributeError with the nearest name."""
    from torch_tile.diagnostics.spelling import missing_name

    raise missing_name(__name__, name, __all__)
