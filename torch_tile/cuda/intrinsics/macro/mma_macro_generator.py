# SPDX-License-Identifier: Apache-2.0
"""The emitter of warps' products, where TileLang has it."""

from torch_tile.language.emitters import TensorCoreIntrinEmitter

__path__: list[str] = []  # TileLang's module of this name has names that ours lacks: compat

__all__ = ["TensorCoreIntrinEmitter"]
