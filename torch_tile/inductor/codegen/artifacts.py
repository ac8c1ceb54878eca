# SPDX-License-Identifier: Apache-2.0
"""Save and load tile kernels in `torch.compiler.save_cache_artifacts()`, beside Inductor's graphs.

Artifacts hold all cache entries that this process used or made with `backend="tile"`: libraries, cubins, CUDA texts and
results of the autotuner. Loading puts them into the machine's cache, under the same key and seal. A key is a digest of
all inputs of the entry, also of the compiler and the chip. So entries of another machine are never found here.
Artifacts are machine code, like Inductor's own: load only those that you trust.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from torch_tile.runtime import cache

TYPE = "torch_tile"

_NAME = re.compile(r"(?P<key>[0-9a-f]{64})(?P<suffix>\.so|\.cubin|\.log|\.json)")
_log = logging.getLogger("torch_tile")


@CacheArtifactFactory.register
class KernelArtifact(CacheArtifact):
    """An entry of runtime/cache.py: its file name, and its bytes behind their seal."""

    @staticmethod
    def type() -> str:
        """Return the name that `CacheInfo` lists these under."""
        return TYPE

    def populate_cache(self) -> None:
        """Put the entry into the cache unless it is there. One that is damaged is left out: it will be built."""
        name = _NAME.fullmatch(self.key)
        if name is None:
            _log.warning("an artifact named %r is no kernel; it is not loaded", self.key)
            return
        try:
            content = cache.unsealed(self.content, self.key)
            cache.get_or_build(name["key"], name["suffix"], lambda path: _write(path, content))
        except cache.CacheError as error:
            _log.warning("artifact %s is not loaded: %s", self.key, error)


def _write(path: Path, content: bytes) -> None:
    """Write a file."""
    path.write_bytes(content)


@functools.cache
def record_kernels() -> None:
    """Add to the artifacts every cache entry that this process has used or will use."""
    cache.on_use(_record)


def _record(path: Path) -> None:
    """Add a cache entry to the artifacts, unless it is a text to be read only."""
    if _NAME.fullmatch(path.name):  # without CUDA texts, which lie there only to be read
        CacheArtifactManager.record_artifact(TYPE, path.name, cache.sealed(path))
