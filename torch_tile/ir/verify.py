# SPDX-License-Identifier: Apache-2.0
"""What may appear at each stage of the compilation, as data, and the check that it is so."""

from __future__ import annotations

import enum

from ..diagnostics import InternalError
from .expr import Address, Load
from .node import walk
from .stmt import For, LoopKind, Print, Program, Store, TileOp


class Stage(enum.Enum):
    """TILE: as written. LOOPS: no tile op is left. FLAT: every access has one linear index."""

    TILE = 0
    LOOPS = 1
    FLAT = 2


def verify(program: Program, stage: Stage) -> None:
    """Raise InternalError if `program` is not a well-formed program of `stage`."""
    for node in walk(program):
        if isinstance(node, TileOp) and stage is not Stage.TILE:
            raise InternalError(f"tile op at stage {stage.name}", node.span)
        if isinstance(node, Load | Store | Address):
            rank = min(node.buffer.rank, 1) if stage is Stage.FLAT else node.buffer.rank
            if len(node.indices) != rank:
                name = node.buffer.name
                raise InternalError(f"{len(node.indices)} indices of `{name}` at stage {stage.name}", node.span)
        if stage is Stage.FLAT and isinstance(node, For) and node.kind is LoopKind.PARALLEL:
            raise InternalError("T.Parallel at stage FLAT", node.span)
        if isinstance(node, Print) and stage is Stage.FLAT and not hasattr(node.value, "dtype"):
            raise InternalError("a printed region at stage FLAT", node.span)
