# SPDX-License-Identifier: Apache-2.0
"""The environment variables of torch_tile, and a warning for those that are misspelt or hold what nobody reads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping

from torch_tile.diagnostics.spelling import did_you_mean

PREFIX = "TORCH_TILE_"
SWITCHES = {  # "0" turns each off
    "TORCH_TILE_AUTOTUNE": "0: nothing is measured, the cost model chooses",
    "TORCH_TILE_AUTOTUNE_CACHE": "0: outcomes of searches are neither read nor written",
    "TORCH_TILE_NATIVE_LAUNCH": "0: no C module for launches is built",
    "TORCH_TILE_VERIFY": "1: the compiler checks its program after every pass",
}
OTHERS = {
    "TORCH_TILE_AUTOTUNE_WORKERS": "how many configurations are compiled at once",
    "TORCH_TILE_CACHE_DIR": "the folder of built kernels",
    "TORCH_TILE_DUMP": "a folder, into which every stage of a compilation is written",
    "TORCH_TILE_NVRTC": "the file of the NVRTC library to load",
}
_TESTS = ("ALL_WAYS", "DEVICE_PROBLEMS", "DEVICE_PROGRAMS", "FUZZ", "FUZZ_SEED", "TEST_SEED")
OF_TESTS = {f"{PREFIX}{name}" for name in _TESTS}


def problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable of ours that nobody reads, or whose value nobody understands."""
    known = {*SWITCHES, *OTHERS}
    for name, value in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known | OF_TESTS:
            yield f"the environment variable {name} means nothing to torch_tile" + did_you_mean(name, known)
        elif name in SWITCHES and value not in ("", "0", "1"):
            yield f"the environment variable {name} is {value!r}; expected 0 or 1"
        elif name == "TORCH_TILE_AUTOTUNE_WORKERS" and value and not value.isdigit():
            yield f"the environment variable {name} is {value!r}; expected a number"


def warn_of_variables() -> None:
    """Warn of each problem with the environment variables of this process."""
    for problem in problems(os.environ):
        warnings.warn(problem, stacklevel=3)
