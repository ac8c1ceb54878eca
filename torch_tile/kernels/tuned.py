# SPDX-License-Identifier: Apache-2.0
"""Tilings that were found by measuring, shipped for a few GPUs: by the device's name, the family and the class of
shapes.

`shipped/<device>.json` holds them, written by `python -m benchmarks.tune` on that device; only tilings that beat the
choice of the family's own model are there. Everywhere else the model chooses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch_tile.kernels.common import Machine, power_of_two, round_up

C = TypeVar("C")
FOLDER = Path(__file__).with_name("shipped")


def tuned(kind: type[C], family: str, machine: Machine, shape: str | None) -> C | None:
    """The measured cut, a `kind`, for a class of shapes on a machine; None where there is none."""
    found = _table(machine.name).get(family, {}).get(shape) if machine.name and shape else None
    return None if found is None else kind(**found)


def rows_class(rows: int) -> int:
    """The size that stands for numbers of rows that are cut alike: powers of two, from 256 on multiples of 256."""
    return power_of_two(rows) if rows <= 256 else round_up(rows, 256)


def file_of(device: str) -> str:
    """The name of a device's file."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def read(path: Path) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The tilings of a file by family and class; empty if there is no such file."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, Mapping[str, Any]]] = json.loads(path.read_text())
    return found


@cache
def _table(device: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    return read(FOLDER / file_of(device))
