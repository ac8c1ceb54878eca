# SPDX-License-Identifier: Apache-2.0
"""Compute a digest of the package's own sources, by which caches detect a changed compiler."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from torch_tile.runtime.cache import get_or_build, key_of
from torch_tile.runtime.host_compiler import csrc_dir


@functools.cache
def source_digest(*parts: str) -> str:
    """Return a digest of the package's Python files: the top-level ones and those in `parts`, or in all folders.

    With all folders, the digest includes the C++ headers. Files are read only if one has changed since the last digest.
    """
    root = Path(__file__).parents[1]
    if parts:
        files = sorted(
            [*_files(root, (".py",)), *(each for p in parts for each in _files(root / p, (".py",), deep=True))]
        )
    else:
        files = sorted([*_files(root, (".py",), deep=True), *_files(csrc_dir(), (".h", ".cpp"))])

    def digest(output: Path) -> None:
        texts = (part for path, *_ in files for part in (os.path.relpath(path, root), Path(path).read_bytes()))
        output.write_text(key_of(*texts))

    return get_or_build(key_of("own files", json.dumps(files)), ".txt", digest).read_text()


def _files(folder: Path | str, endings: tuple[str, ...], deep: bool = False) -> Iterator[tuple[str, int, int, int]]:
    """Yield the path, size and times of each file in a folder; `deep` includes the folders inside."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if deep and entry.is_dir() and entry.name not in ("__pycache__", "csrc"):
                yield from _files(entry.path, endings, deep)
            elif entry.name.endswith(endings):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns
