# SPDX-License-Identifier: Apache-2.0
"""The emitter of warps' products, where TileLang has it."""

from torch_tile.language.emitters import TensorCoreIntrinEmitter

__all__ = ["TensorCoreIntrinEmitter"]
