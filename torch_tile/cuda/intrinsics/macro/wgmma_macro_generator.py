# SPDX-License-Identifier: Apache-2.0
"""The emitter of warpgroups' products, by the name that TileLang gives it in this module."""

from torch_tile.language.emitters import WGMMATensorCoreIntrinEmitter as TensorCoreIntrinEmitter

__all__ = ["TensorCoreIntrinEmitter"]
