# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.registers import REGISTERS, UNIT, equal_share, most_blocks


@pytest.mark.parametrize(
    ("threads", "blocks", "share"),
    [(384, 1, 168), (512, 1, 128), (256, 2, 128), (256, 3, 80), (288, 1, 168), (160, 1, 256), (160, 2, 128)],
)
def test_shares_that_the_assembler_grants(threads, blocks, share):
    assert equal_share(threads, blocks) == share


@pytest.mark.parametrize("threads", [32, 128, 160, 256, 384, 1024])
def test_a_share_leaves_room_for_all_blocks_and_not_for_eight_more_registers(threads):
    for blocks in range(1, 9):
        share = equal_share(threads, blocks)
        assert share % UNIT == 0
        if share:
            assert most_blocks(threads, share) >= blocks
            assert most_blocks(threads, share + UNIT) < blocks or blocks * threads * (share + UNIT) <= REGISTERS
