# SPDX-License-Identifier: Apache-2.0
"""The operations on whole tiles; importing this package declares them all."""

from torch_tile.tileop import atomic, fill, scale  # noqa: F401
from torch_tile.tileop.base import RegisteredOp, tile_ops
from torch_tile.tileop.copy import cp_async, op as copy_op, tma  # noqa: F401
from torch_tile.tileop.gemm import op as gemm_op, wgmma  # noqa: F401
from torch_tile.tileop.reduce import op as reduce_op, scan  # noqa: F401

__all__ = ["RegisteredOp", "tile_ops"]
