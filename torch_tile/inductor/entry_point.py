# SPDX-License-Identifier: Apache-2.0
"""Register `backend="tile"` where the package lies on PYTHONPATH and is not installed.

An installed package names its backend in its metadata, which Dynamo reads at the first look-up. After
`import torch_tile` this module answers for the missing metadata. It imports nothing of Dynamo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

_ENTRY = metadata.EntryPoint("tile", "torch_tile.inductor.backend:tile", "torch_dynamo_backends")
_TEXTS = {
    "METADATA": "Metadata-Version: 2.1\nName: torch_tile\nVersion: 0\n",
    "entry_points.txt": f"[{_ENTRY.group}]\n{_ENTRY.name} = {_ENTRY.value}\n",
}


class _OnPath(metadata.Distribution):
    """Metadata of a package that is not installed."""

    def read_text(self, filename: str) -> str | None:
        """Return a file of the metadata."""
        return _TEXTS.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Locate no file: none belongs to the package."""
        return path


class _Finder(metadata.DistributionFinder):
    """Finder at the end of the list, so that the metadata of an installed package takes precedence."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find no module: this finder has only metadata."""

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        """Return the package in a list of all; to those who ask for it by name it is not installed."""
        return iter([_OnPath()] if context is None or context.name is None else [])


def announce() -> None:
    """Register the backend with Dynamo, whether Dynamo has searched for backends or not."""
    sys.meta_path.append(_Finder())
    if "torch._dynamo.backends.registry" in sys.modules:
        from torch_tile.inductor import compat

        compat.add_backend(_ENTRY)
