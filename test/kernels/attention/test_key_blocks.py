# SPDX-License-Identifier: Apache-2.0
"""Blocks have all keys and all steps between them, in whatever order they begin."""

from dataclasses import replace

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.hardware import Target
from torch_tile.kernels.attention.fused_backward import TILINGS
from torch_tile.kernels.attention.key_blocks import Numbering


@torch_tile.jit(target=Target("cuda", 90))
def count_steps(config, first, length):
    """Build a kernel that counts how often each step of each block of keys is taken, by each member."""
    wide, high, deep = T.dynamic("wide, high, deep")
    columns = first + length

    @T.prim_func
    def kernel(taken: T.Tensor((wide, high, deep, columns), T.int32), _begun: T.Tensor((1,), T.int32)):
        numbering = Numbering(config, (wide, high, deep))
        with T.Kernel(*numbering.launched, threads=32) as (bx, by, bz):
            if T.get_thread_binding() == 0:
                x, y, z, share = numbering.place(bx, by, bz, _begun)
                start, count = (first, length) if share is None else share.steps(first, length)
                for n in T.serial(count):
                    T.atomic_add(taken[x, y, z, start + n], 1)

    return kernel


@pytest.mark.parametrize("form", ["plain", "ordered", "shared"])
def test_every_step_of_all_keys_is_taken_once(form, problems):
    grid = wide, high, deep = [problems.size(4) for _ in range(3)]
    config = replace(TILINGS[64], ordered=form == "ordered")
    if form == "shared":
        wave = problems.size(wide * high * deep + 1)
        config = replace(config, shared_wave=wave, members=problems.pick(2, 3, 4))
    first, length = problems.pick(0, 3), problems.pick(1, 2, 7, 12)
    kernel = count_steps(config, first, length)
    launched = [int(n) for n in launched_by(config, grid)]
    order = [(x, y, z) for x in range(launched[0]) for y in range(launched[1]) for z in range(launched[2])]
    problems.random.shuffle(order)
    taken, begun = torch.zeros(*grid, first + length, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert not kernel.interpret(taken, begun, blocks=order)
    assert (taken[..., :first] == 0).all() and (taken[..., first:] == 1).all(), (grid, config, first, length)


def launched_by(config, grid):
    """Compute the grid of the launch, for sizes that are numbers."""
    if not config.shared_wave:
        return grid
    tasks = grid[0] * grid[1] * grid[2]
    return tasks + (config.members - 1) * (tasks % config.shared_wave), 1, 1
