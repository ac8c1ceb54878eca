# SPDX-License-Identifier: Apache-2.0
"""The user's options of `torch.compile(..., backend="tile", options={...})`, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.spelling import did_you_mean

FAMILIES = (
    "attention", "mla", "norm", "dequant", "scaled", "grouped", "gemm", "conv", "softmax", "loss", "scan", "route",
    "own_kernel",
)  # fmt: skip
SELECT = ("fastest", "tile")
OPTIONS = ("select", "families")


@dataclass(frozen=True)
class Settings:
    """`select`: "fastest" keeps a tile kernel only where it beats Inductor, "tile" wherever it fits.

    `families`: which subgraphs to look for. `thorough`: Inductor searches for the best kernels (its
    `max_autotune`), so we do too.
    """

    select: str = "fastest"
    families: tuple[str, ...] = FAMILIES
    thorough: bool = False


def parse_settings(options: Mapping[str, Any], thorough: bool) -> Settings:
    """Parse our options into settings; raises RuntimeError (as torch.compile does for its own) on a bad value."""
    select = options.get("select", "fastest")
    if not isinstance(select, str) or select not in SELECT:
        meant = did_you_mean(str(select), SELECT)
        raise RuntimeError(f'option "select" must be one of {", ".join(map(repr, SELECT))}, got {select!r}{meant}')
    families = options.get("families", FAMILIES)
    if isinstance(families, Mapping) or not isinstance(families, Iterable):
        raise RuntimeError(f'option "families" must be names in a list, as ["norm", "gemm"], got {families!r}')
    families = (families,) if isinstance(families, str) else tuple(families)
    unknown = [f for f in families if f not in FAMILIES]
    if unknown:
        meant = did_you_mean(str(unknown[0]), FAMILIES)
        if isinstance(unknown[0], str) and (several := [f.strip() for f in unknown[0].split(",")])[1:]:
            meant = f"; write a list, {several}"
        raise RuntimeError(f'option "families" may hold {", ".join(map(repr, FAMILIES))}, got {unknown[0]!r}{meant}')
    return Settings(select, tuple(f for f in FAMILIES if f in families), thorough)
