# SPDX-License-Identifier: Apache-2.0
"""Which configuration of a kernel is fastest: tried on the machine, after a model has put aside the hopeless ones."""

from torch_tile.autotuner.decorator import AutotunedFunction, autotune, get_autotune_inputs, set_autotune_inputs
from torch_tile.autotuner.result import AutotuneResult, Try
from torch_tile.autotuner.session import AutoTuner

__all__ = [
    "AutoTuner",
    "AutotuneResult",
    "AutotunedFunction",
    "Try",
    "autotune",
    "get_autotune_inputs",
    "set_autotune_inputs",
]
