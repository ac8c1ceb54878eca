# SPDX-License-Identifier: Apache-2.0
"""How steps of products by few-bit weights are taken apart: all of a step once, as words and groups allow."""

import itertools

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import spec as gemm_form
from torch_tile.kernels.gemm.dequant_spec import Factor, Form, Storage
from torch_tile.kernels.gemm.dequant_tiling import Problem, config_for

MACHINES = [Machine(Target("cuda", c), units) for c, units in ((80, 108), (90, 132), (120, 170))]
GROUPS = 0, 16, 32, 64, 128, 192, 1024


def form_of(bits, group, products=1, words=torch.int32, dtype=torch.float16):
    scale = Factor(dtype, False)
    storage = Storage(words, False, bits, False, 8, (False,) * products, group, scale, None, True)
    return Form(gemm_form.Form(dtype, dtype, False, (False,) * products, (), "", 8), storage, dtype)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: str(m.target))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pieces_are_the_step(machine, bits):
    for m, group, products in itertools.product((1, 8, 16, 64, 65, 1024), GROUPS, (1, 2)):
        config = config_for(Problem(torch.float16, m, 16384, 16384, products, bits, group, True), machine)
        form = form_of(bits, group, products, torch.int32 if bits == 4 else torch.uint8)
        pieces, fields = form.pieces(config), form.storage.fields
        columns = [c for p in pieces for c in range(p.start, p.start + p.width)]
        assert columns == list(range(config.block_k))
        words = [w for p in pieces for w in range(*p.of(config.block_k // fields, config.block_k).indices(10**6))]
        assert words == list(range(config.block_k // fields))
        for piece in pieces:
            assert piece.width % 16 == 0 and piece.width % fields == 0
            assert piece.run == (piece.start + piece.width - 1) // piece.columns  # it lies in one run
            assert not group or piece.columns % group == 0 or group % piece.columns == 0
            if form.scales_late(config):
                assert piece.width == piece.columns and form.storage.groups(piece.columns) == 1


def test_sums_are_scaled_where_there_is_room_for_them():
    hopper = MACHINES[1]
    few, many = (
        config_for(Problem(torch.float16, m, 16384, 16384, 1, 4, 128, True), hopper) for m in (1, 1024)
    )  # fmt: skip
    assert form_of(4, 128).scales_late(few) and not form_of(4, 128).scales_late(many)
    assert not form_of(4, 0).scales_late(few)  # the scale of a whole row comes last of all
    assert not form_of(8, 128, words=torch.uint8).scales_late(few)
    assert form_of(4, 128).takes_turns(many) and not form_of(4, 128).takes_turns(few)


@pytest.mark.parametrize("block_k", [64, 128, 512])
@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_those_of_the_columns(block_k, group):
    storage = form_of(4, group).storage
    if group and block_k % group and group % block_k:
        pytest.skip("steps hold whole groups or lie in one")
    for step, column in itertools.product(range(5), range(0, block_k, group or block_k)):
        assert storage.first_group(step, block_k, column) == ((step * block_k + column) // group if group else 0)


def test_zeros_of_a_byte_are_converted_once():
    byte, half, wide = (Factor(dtype, False) for dtype in (torch.int8, torch.float16, torch.float32))
    assert form_of(4, 32).taken(byte) == torch.float16
    assert form_of(4, 32).taken(half) == torch.float16 and form_of(4, 32).taken(wide) == torch.float32
    assert form_of(2, 32, words=torch.uint8).taken(byte) == torch.int8
