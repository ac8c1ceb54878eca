# SPDX-License-Identifier: Apache-2.0
"""Atomic updates that give a value, and atomic loads, in the interpreter of tiles: nothing happens at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_tile.ir.expr import Address, Call, Load
from torch_tile.simulator.values import Value, shared
from torch_tile.tileop.atomic import folds

if TYPE_CHECKING:
    from torch_tile.simulator.tile.interpreter import Tiles


def atomic(call: Call, block: Tiles) -> Value:
    """Update one element; gives what stood there, 0 outside a tensor."""
    load = _load(call)
    storage, old = block.memory[id(load.buffer)], block.loaded(block.memory[id(load.buffer)], load)
    operand = block.expr(call.args[1])
    wide = block.wide(load.dtype)
    new = folds()[str(call.options[0])](*(torch.as_tensor(x).to(wide) for x in (old, operand)))
    block.put(load, storage, new if load.dtype.is_float else shared(new))
    return old


def atomic_load(call: Call, block: Tiles) -> Value:
    """What stands there."""
    load = _load(call)
    return block.loaded(block.memory[id(load.buffer)], load)


def _load(call: Call) -> Load:
    address = call.args[0]
    assert isinstance(address, Address)
    return Load(address.buffer, address.indices, span=call.span)
