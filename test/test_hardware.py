# SPDX-License-Identifier: Apache-2.0
"""Names of targets, and the table of chips."""

import pytest

import torch_tile.hardware
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import (
    BOARDS,
    CHIPS,
    OWN,
    REGISTERS,
    UNIT,
    Target,
    chip_of,
    equal_share,
    most_blocks,
    runs_on,
)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch_tile.hardware, "detected", lambda: 0)


@pytest.mark.parametrize("name", ["cpu", "c", "llvm", "CPU"])
def test_cpu_spellings(name):
    assert Target.of(name) == Target("cpu")
    assert Target.of(name).arch == ""


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("cuda:sm_80", "sm_80"),
        ("cuda -arch=sm_89", "sm_89"),
        ("cuda -arch=sm_90a -max_threads=1024", "sm_90a"),
        ("cuda:0", "sm_90a"),
        ("cuda:sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ({"kind": "cuda", "arch": "sm_90"}, "sm_90a"),
        ("cuda:sm_120", "sm_120a"),
        ("cuda", "sm_90a"),
    ],
)
def test_cuda_spellings(name, arch, no_gpu):
    found = Target.of(name)
    assert (found.kind, found.arch) == ("cuda", arch)
    assert str(found) == f"cuda:{arch}"
    assert Target.of(str(found)) == found


def test_auto_is_the_gpu_if_there_is_one(monkeypatch, no_gpu):
    assert Target.of("auto").kind == "cpu"
    monkeypatch.setattr(torch_tile.hardware, "detected", lambda: 80)
    assert Target.of("auto") == Target.of("cuda") == Target("cuda", 80)


@pytest.mark.parametrize("name", ["hip", "metal", "webgpu"])
def test_other_machines_are_refused(name):
    with pytest.raises(TileError) as caught:
        Target.of(name)
    assert caught.value.diagnostics[0].code == "unsupported_on_target"


@pytest.mark.parametrize("name", ["gpu?", 3, object(), "cuda:sm_70", "cuda:sm_9", "sm_8o", "cuda:90", "cuda:hopper"])
def test_nonsense_is_refused(name):
    with pytest.raises(TileError) as caught:
        Target.of(name)
    assert caught.value.diagnostics[0].code == "bad_argument"


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90", 256, 80, 65_608, 3),  # registers, as shared memory, leave room for three
        ("sm_90", 256, 128, 98_376, 2),
        ("sm_90", 160, 154, 81_992, 1),  # five warps have the registers of eight
        ("sm_90", 384, 168, 200_000, 1),
        ("sm_80", 128, 32, 0, 16),  # threads
        ("sm_89", 128, 32, 0, 12),
        ("sm_90", 32, 16, 0, 32),  # no multiprocessor runs more
        ("sm_89", 128, 32, 40_000, 2),  # shared memory
    ],
)
def test_blocks_at_once(arch, threads, registers, shared, blocks):
    assert Target.of(f"cuda:{arch}").blocks_at_once(threads, registers, shared) == blocks


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


FEATURES = ("fp8", "stmatrix", "clusters", "tma", "early_start", "register_moves", "wgmma", "tcgen05")
HAVE = {
    80: (),
    86: (),
    89: ("fp8",),
    90: FEATURES[:7],
    100: (*FEATURES[:6], "tcgen05"),
    120: FEATURES[:6],
}


@pytest.mark.parametrize("capability", CHIPS)
def test_features_of_chips(capability):
    target = Target("cuda", capability)
    assert tuple(f for f in FEATURES if getattr(target, f"has_{f}")) == HAVE[capability]
    assert target.is_supported


def test_the_cpu_has_no_feature_of_a_gpu():
    assert not any(getattr(Target("cpu"), f"has_{f}") for f in FEATURES) and Target("cpu").is_supported
    assert not Target("cuda", 75).is_supported


@pytest.mark.parametrize("capability", [87, 101, 103, 121])
def test_a_chip_that_is_not_listed_is_like_its_predecessor_without_what_was_its_own(capability):
    before = CHIPS[max(known for known in CHIPS if known < capability)]
    found = chip_of(capability)
    assert found.arch == f"sm_{capability}" and found.shared_limit == before.shared_limit
    assert found.features == before.features - OWN


@pytest.mark.parametrize("capability", CHIPS)
def test_rates_of_a_target_are_those_of_a_board(capability):
    target, board = Target("cuda", capability), CHIPS[capability].board
    assert target.bandwidth == board.bandwidth * 1e12
    assert target.flops("bfloat16") == target.flops("float16") == board.half * 1e12
    assert not target.flops("int8")
    assert target.l2_bytes % 2**20 == 0 and target.sms > 0


def test_chips_of_named_boards_have_a_named_board():
    for capability in (80, 90):
        assert CHIPS[capability].board in BOARDS.values()
    assert all(set(b.flops) == {"bfloat16", "float16", "float32", "float64"} for b in BOARDS.values())


def test_cubins_run_on_their_own_generation():
    assert runs_on(90, 90) and runs_on(80, 86) and runs_on(80, 89) and runs_on(120, 120)
    assert not any((runs_on(86, 80), runs_on(80, 90), runs_on(90, 100), runs_on(100, 103), runs_on(89, 90)))
