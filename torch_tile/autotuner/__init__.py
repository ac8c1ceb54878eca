# SPDX-License-Identifier: Apache-2.0
"""Find the fastest configuration of a kernel: a cost model drops hopeless ones, the rest are timed on this machine."""

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
