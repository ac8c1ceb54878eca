# SPDX-License-Identifier: Apache-2.0
"""Run the blocks of a cluster side by side in the tile interpreter, with barriers and reads between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from torch_tile.diagnostics.errors import error
from torch_tile.ir import stmt as st
from torch_tile.ir.expr import Address, Call, Load
from torch_tile.simulator.values import Value

if TYPE_CHECKING:
    from torch_tile.simulator.memory import Storage
    from torch_tile.simulator.tile.interpreter import Tiles


class ClusterRun:
    """Runs the blocks of one cluster, by rank, at the same time. No block waits for a block that has ended."""

    running: int
    waiting: int
    generation: int

    def __init__(self, blocks: Sequence[Tiles]):
        self.blocks = blocks
        self.met = threading.Condition()
        self.running, self.waiting, self.generation = len(blocks), 0, 0
        self.failed: bool = False

    def run(self, body: st.Block) -> None:
        """Run all blocks until the last one ends. Raises the error of the first block that fails."""
        with ThreadPoolExecutor(len(self.blocks)) as pool:
            ends = [pool.submit(self._run_block, block, body) for block in self.blocks]
        problems = [e for end in ends if (e := end.exception()) is not None]
        if problems:
            raise min(problems, key=lambda e: isinstance(e, _Left))

    def _run_block(self, block: Tiles, body: st.Block) -> None:
        """Run one block; at its end, wake the blocks that wait."""
        try:
            block.block(body)
        except BaseException:
            self.failed = True
            raise
        finally:
            with self.met:
                self.running -= 1
                self._release_waiting()

    def wait(self) -> None:
        """Wait until each remaining block of the cluster waits, too, or has ended."""
        with self.met:
            generation = self.generation
            self.waiting += 1
            self._release_waiting()
            self.met.wait_for(lambda: self.generation != generation)
        if self.failed:
            raise _Left

    def _release_waiting(self) -> None:
        """Wake the waiting blocks once every running block waits."""
        if self.waiting == self.running:
            self.waiting, self.generation = 0, self.generation + 1
            self.met.notify_all()


class _Left(Exception):
    """Raised in a block when another block of the cluster has failed."""


def store_at_rank(call: Call, cluster_run: ClusterRun, writer: Tiles) -> Value:
    """Store an element to another block's tile."""
    address, value, rank = call.args[0], call.args[1], writer.expr(call.args[2])
    assert isinstance(address, Address)
    tile = _tile_of(int(rank), address, cluster_run, call)
    writer.put(Load(address.buffer, address.indices, span=call.span), tile, writer.expr(value))
    return 0


def _tile_of(rank: int, address: Address, cluster_run: ClusterRun, call: Call) -> Storage:
    """Return the tile of the block that has this rank. Raises an error for other numbers."""
    tiles = [block.memory[address.buffer] for block in cluster_run.blocks]
    if not 0 <= rank < len(tiles):
        shape = f"a cluster of {len(tiles)} blocks"
        raise error("out_of_bounds", call.span, dim=0, buffer="rank", index=str(rank), size=len(tiles), shape=shape)
    return tiles[rank]


def at_rank(call: Call, cluster_run: ClusterRun, reader: Tiles) -> Value:
    """Return the element of another block's tile."""
    address, rank = call.args[0], reader.expr(call.args[1])
    assert isinstance(address, Address)
    load = Load(address.buffer, address.indices, span=call.span)
    if not isinstance(rank, torch.Tensor):
        return reader.loaded(_tile_of(rank, address, cluster_run, call), load)
    tiles = [block.memory[address.buffer] for block in cluster_run.blocks]
    found: Value = 0
    for number, tile in enumerate(tiles):
        found = torch.where(rank == number, torch.as_tensor(reader.loaded(tile, load)), found)
    return found
