# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.library import Case, compiled
from torch_tile.hardware import Target
from torch_tile.kernels.attention.forward import attention
from torch_tile.kernels.attention.operands import Operand
from torch_tile.kernels.attention.sequences import Layout
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.attention.tiling import HOPPER, Problem, config_for, entries_for, splits_for
from torch_tile.kernels.common import Machine

CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (89, 142), (90, 132), (120, 170))]
H200 = GPUS[2]
FORM = Spec(torch.float16, 128, 128, True, True, False, None, False, True, 8)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("width", [16, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_tiles_fit(machine, width, dtype):
    spec = replace(FORM, dtype=dtype, tile_d=width, tile_dv=width)
    for rows in (1, 8, 17, 64, 4096):
        config = config_for(spec, Problem(32, rows, 4096), machine)
        if config is None:  # left to the reference
            assert width >= 256 and dtype.itemsize >= 4
            continue
        tiles = config.block_q * width + config.stages * config.block_kv * 2 * width
        tiles += config.block_q * config.block_kv * config.shared_probs
        assert tiles * dtype.itemsize <= machine.target.shared_limit
        assert config.block_q <= max(64, rows) and config.heavy_first


@pytest.mark.parametrize("width", [32, 64, 80, 128, 192])
def test_tiles_of_hopper_fit(width):
    """By wgmma only where rows fill its tiles; warpgroups of three have fewer registers each."""
    spec = replace(FORM, tile_d=width, tile_dv=width)
    for heads, rows, keys in ((32, 16, 4096), (32, 17, 4096), (64, 8192, 8192), (8, 300, 512), (1, 129, 99)):
        config = config_for(spec, Problem(heads, rows, keys), H200)
        assert (config.partial_sums > 1) == (rows > 16)
        if rows > 16:
            assert config.threads == config.block_q * 2
            held = (config.block_kv * 3 // 2 + width) // 2
            assert held <= (128 if config.threads == 384 else 168)
            tiles = config.block_q + 2 * config.stages * config.block_kv
            tiles += 0 if config.through_queries else config.block_q
            assert tiles * 2 * width < H200.target.shared_limit


def test_short_queries_get_short_tiles():
    for machine in (CPU, H200):
        short, long = (config_for(FORM, Problem(8, rows, 1000), machine).block_q for rows in (1, 1000))
        assert short < long


def test_few_blocks_share_the_keys():
    assert config_for(FORM, Problem(8, 8, 8192), H200).split
    assert not config_for(FORM, Problem(32, 4096, 4096), H200).split
    assert not config_for(FORM, Problem(8, 1, 8192), CPU).split
    config = config_for(FORM, Problem(8, 8, 8192), H200)
    splits = splits_for(config, Problem(8, 8, 8192), H200)
    assert 1 < splits * 8 <= H200.num_sms and 8192 // splits >= 4 * config.block_kv


@pytest.mark.parametrize(
    "width, causal, heads, rows, keys, cut",
    [
        (64, True, 64, 8192, 8192, (192, 128, 2, 1, 16)),
        (64, False, 64, 8192, 8192, (192, 128, 2, 1, 1)),
        (64, False, 32, 1024, 1024, (64, 96, 2, 3, 1)),
        (64, True, 32, 4096, 4096, (64, 96, 2, 3, 1)),
        (64, True, 160, 1500, 1500, (64, 96, 2, 3, 16)),  # keys and values of all heads do not stay in the cache
        (64, False, 1536, 49, 49, (64, 96, 2, 3, 1)),
        (80, False, 32, 512, 512, (128, 64, 3, 1, 1)),
        (96, True, 768, 197, 197, (64, 64, 2, 2, 16)),
        (128, True, 32, 512, 512, (64, 64, 2, 2, 1)),
        (128, False, 32, 512, 512, (64, 64, 2, 2, 1)),
        (128, False, 256, 512, 512, (128, 128, 2, 1, 1)),
        (128, True, 256, 512, 512, (64, 64, 2, 2, 16)),
        (128, False, 32, 1024, 1024, (128, 128, 2, 1, 1)),
        (128, True, 32, 1024, 1024, (128, 128, 2, 1, 16)),
        (128, True, 32, 4096, 4096, (128, 128, 2, 1, 4)),  # an H100: 16 heads take 1.018 of the time
        (128, True, 64, 8192, 8192, (128, 128, 2, 1, 8)),
    ],
)
def test_cuts_measured_on_an_h200(width, causal, heads, rows, keys, cut):
    """Block rows, block keys, stages, blocks that share an SM and heads that run side by side."""
    spec = replace(FORM, tile_d=width, tile_dv=width, causal=causal, shifted=False)
    config = config_for(spec, Problem(heads, rows, keys), H200)
    assert (config.block_q, config.block_kv, config.stages, config.blocks, config.side) == cut
    assert not config.split and config.staged


@pytest.mark.parametrize(
    "changes, own",
    [
        ({}, True),
        ({"lse": False}, True),
        ({"shifted": True}, True),
        ({"causal": False}, False),
        ({"windowed": True}, False),
        ({"tile_d": 128, "tile_dv": 128}, False),  # both warpgroups see the last tile
        ({"layout": Layout(ragged=True)}, False),  # values behind the end are cleared in shared memory
    ],
    ids=str,
)
def test_own_keys_measured_on_an_h200(changes, own):
    """Of three warpgroups each ends at its own last tile of keys: 0.97 of the time."""
    form = replace(FORM, tile_d=64, tile_dv=64, causal=True, shifted=False)
    assert config_for(replace(form, **changes), Problem(64, 8192, 8192), H200).own_keys == own


@pytest.mark.parametrize(
    "heads, length, changes, rounds",
    [
        (32, 1024, {}, 0),
        (31, 1000, {}, 0),
        (34, 1024, {}, None),  # a pair more than multiprocessors: a second round
        (24, 1024, {}, None),
        (32, 2048, {}, 1),
        (64, 2048, {}, 2),
        (32, 4096, {}, 2),
        (40, 4000, {}, 2),
        (32, 4200, {}, None),  # 33 tiles a head
        (32, 6144, {}, 2),
        (32, 8192, {}, 2),
        (33, 8100, {}, 2),
        (64, 8192, {}, 4),
        (32, 16384, {}, None),
        (64, 8192, {"lse": True}, 4),
        (64, 8192, {"tile_d": 64, "tile_dv": 64}, None),
        (120, 1330, {}, None),
        (32, 4096, {"lse": True}, 2),
        (32, 2048, {"lse": True}, 1),
        (240, 100, {}, None),
        (32, 1024, {"lse": True}, None),
        (32, 4096, {"grouped": True}, None),
    ],
)
def test_pairs_measured_on_an_h200(heads, length, changes, rounds):
    """A long tile and a short one for each multiprocessor, and even shares in the last rounds: 0.95 to 0.99 of the time
    of a block for each tile.
    """
    form = replace(FORM, dtype=torch.bfloat16, tile_d=128, tile_dv=128, causal=True, shifted=False, lse=False)
    config = config_for(replace(form, **changes), Problem(heads, length, length), H200)
    assert config.paired == bool(config.persistent) == (rounds is not None)
    assert config.rounds_by_length == (rounds or 0)
    assert config.early == config.queries_ahead == config.halved == config.paired


@pytest.mark.parametrize(
    "heads, length, changes, in_order",
    [
        (32, 1024, {}, True),
        (256, 1024, {}, True),
        (64, 512, {}, True),
        (33, 777, {}, True),
        (32, 1024, {"lse": True}, True),
        (32, 1024, {"grouped": True}, True),
        (16, 1024, {}, False),  # less than a wave
        (320, 1024, {}, False),  # not measured
        (32, 1536, {}, True),
        (16, 2048, {}, True),
        (128, 2048, {"grouped": True}, True),
        (160, 2048, {}, False),  # not measured
        (32, 2304, {}, True),
        (32, 4096, {}, True),
        (64, 4096, {}, False),  # not measured
        (64, 8192, {}, False),
        (32, 1024, {"windowed": True}, False),
        (32, 1024, {"tile_dv": 64}, False),
    ],
)
def test_tiles_in_turn_measured_on_an_h200(heads, length, changes, in_order):
    """Persistent blocks without a mask take 0.88 to 0.97 of the time of a block for each tile."""
    form = replace(FORM, tile_d=128, tile_dv=128, causal=False, shifted=False, lse=False)
    config = config_for(replace(form, **changes), Problem(heads, length, length), H200)
    assert config.in_order == bool(config.persistent) == config.queries_ahead == config.early == in_order


@pytest.mark.parametrize(
    "heads, groups, length, changes, taken",
    [
        (16, 8, 4096, {}, True),
        (16, 8, 1000, {}, True),
        (8, 8, 1000, {}, True),
        (8, 4, 1024, {}, True),
        (8, 4, 2048, {}, True),
        (16, 4, 4096, {"lse": True}, True),
        (8, 4, 2048, {"lse": True}, False),  # not measured
        (8, 8, 500, {}, False),
        (64, 2, 8192, {}, False),  # keys and values of all heads pass the cache
        (32, 1, 16384, {}, False),
        (16, 8, 4096, {"causal": False}, False),
    ],
)
def test_tiles_by_length_measured_on_an_h200(heads, groups, length, changes, taken):
    """Under a causal mask: 0.80 to 0.99 of the time of a block for each tile."""
    form = replace(FORM, dtype=torch.bfloat16, tile_d=128, tile_dv=128, causal=True, shifted=False, lse=False)
    spec = replace(form, grouped=groups > 1, **changes)
    config = config_for(spec, Problem(heads, groups * length, length, groups), H200)
    assert bool(config.persistent) == config.queries_ahead == config.early == taken
    assert not config.paired and not config.in_order


def test_persistent_blocks_measured_on_an_h100():
    """Heads that share keys, all of which stay in the cache: 0.94 of the time of a block for each tile."""
    form = replace(FORM, dtype=torch.bfloat16, tile_d=128, tile_dv=128, causal=True, grouped=True, shifted=False)
    assert not config_for(form, Problem(16, 8 * 4096, 4096, 8), H200).persistent
    spec = replace(form, lse=False)
    taken = config_for(spec, Problem(16, 8 * 4096, 4096, 8), H200)
    assert taken.persistent == H200.num_sms and taken.ping_pong and taken.queries_ahead
    assert not config_for(spec, Problem(16, 8 * 8192, 8192, 8), H200).persistent
    assert not config_for(replace(spec, causal=False), Problem(16, 8 * 4096, 4096, 8), H200).persistent
    wide = config_for(replace(spec, tile_d=192, grouped=False), Problem(128, 4096, 4096), H200)
    assert (wide.block_kv, wide.through_queries) == (128, True)


@pytest.mark.parametrize(
    "width, dtype, heads, keys, cut",
    [
        (64, torch.bfloat16, 64, 1024, (64, 64, 3)),
        (64, torch.bool, 192, 512, (64, 64, 3)),
        (64, torch.float32, 192, 512, (64, 64, 2)),
        (128, torch.bfloat16, 256, 512, (128, 128, 1)),
        (128, torch.bool, 64, 4096, (128, 128, 1)),
        (128, torch.float32, 32, 1024, (128, 128, 1)),
    ],
)
def test_cuts_under_masks_measured_on_an_h200(width, dtype, heads, keys, cut):
    """Block rows, block keys and blocks that share an SM; masks come by tiles where their rows are aligned."""
    spec = replace(
        FORM, dtype=torch.bfloat16, tile_d=width, tile_dv=width, causal=False, folded=dtype == torch.bool,
        mask=Operand("bqk", dtype, aligned=True),
    )  # fmt: skip
    config = config_for(spec, Problem(heads, keys, keys), H200)
    assert (config.block_q, config.block_kv, config.blocks) == cut and config.tiled and config.staged
    loose = config_for(replace(spec, mask=Operand("bqk", dtype)), Problem(heads, keys, keys), H200)
    assert not loose.tiled and loose.block_kv == 64
    packed = config_for(replace(spec, grouped=True), Problem(heads, 4 * 40, keys, 4), H200)
    assert packed.packed and not packed.tiled


@pytest.mark.parametrize(
    "sequences, queries, cut, splits",
    [
        (1, 1, (16, 128), 16), (8, 1, (16, 128), 2), (32, 1, (16, 128), 1), (128, 1, (16, 128), 1),
        (1, 8, (64, 128), 16), (8, 8, (64, 128), 2), (8, 16, (128, 128), 2), (32, 8, (64, 128), 1),
    ],
)  # fmt: skip
def test_few_queries_measured_on_an_h200(sequences, queries, cut, splits):
    """64 query heads over 8 key heads: tiles hold the rows of a group, and their shares fill the chip once."""
    problem = Problem(sequences * 8, queries * 8, 8192, 8)
    config = config_for(replace(FORM, causal=False, grouped=True), problem, H200)
    assert (config.block_q, config.block_kv) == cut and config.packed
    assert splits_for(config, problem, H200) == splits and config.split == (splits > 1)
    assert config.one_tile == (config.split and queries * 8 <= config.block_q)


def test_no_single_tile_of_rows_known_at_run_time():
    """Another call may have more rows than a block."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    rows = mode.from_tensor(torch.empty(8), symbolic_context=sizes).shape[0]
    config = config_for(replace(FORM, causal=False, grouped=True), Problem(8, rows, 8192, 8), H200)
    assert config.split and not config.one_tile and not mode.shape_env.guards


def test_a_split_loads_all_of_its_page_numbers_or_none():
    """Others look numbers up tile by tile: where they are too many, or not known before the sequence's length."""
    pages = replace(FORM, grouped=True, layout=Layout(page=64))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    keys = mode.from_tensor(torch.empty(8192), symbolic_context=sizes).shape[0]
    config = Config(16, 128, 128, split=True, shared_probs=True)

    def entries(spec=pages, keys=8192, splits=16, **options):
        return entries_for(replace(config, **options), spec, Problem(8, 8, keys, 8), splits)

    assert entries() == 128 and entries(threads=256) == 256
    assert entries(keys=2048 * 64) == 128 and entries(keys=2048 * 64 + 1) == 0
    wide = replace(pages, layout=Layout(page=256))  # two tiles each
    assert entries(wide, keys=1024 * 256) == 128 and entries(wide, keys=1025 * 256) == 0
    others = (
        FORM,
        replace(pages, windowed=True),
        *(replace(pages, layout=Layout(*x)) for x in ((True, 64), (False, 24))),
    )
    assert not any(map(entries, others)) and not entries(shared_probs=False)
    assert entries(keys=keys) == 0 and not mode.shape_env.guards


@pytest.mark.parametrize("sequences, splits", [(8, 6), (64, 3), (128, 3)])  # of 64 on 8 heads, measured: 3 of 64
def test_blocks_of_float8_keys_fill_the_last_wave(sequences, splits):
    config = Config(16, 64, 128, 3, shared_probs=True, blocks=3, narrow=True)
    assert splits_for(config, Problem(sequences * 8, 8, 8192, 8), H200) == splits
    assert splits_for(replace(config, narrow=False), Problem(64 * 8, 8, 8192, 8), H200) == 1


@pytest.mark.parametrize("machine", GPUS, ids=str)
def test_float8_values_are_multiplied_by_tensor_cores(machine):
    """These take 16 keys at once; heads whose tiles of as many do not fit are left to torch."""
    for width in range(64, 2305, 64):
        for rows in (1, 16, 17, 128):
            spec = replace(FORM, dtype=torch.bfloat16, tile_d=width, tile_dv=width, scaled=True)
            config = config_for(spec, Problem(64, rows, 4096, 8), machine)
            assert config is None or not config.narrow or config.block_kv % 16 == 0, (width, rows, config)


def test_blocks_share_an_sm_over_small_pages():
    """Measured on an H200: 495.6 us where one block of 128 keys takes 514.3 (64 sequences of 8192 keys)."""
    for page, sequences, blocks in ((16, 64, 2), (16, 8, 1), (64, 64, 1)):
        spec = replace(FORM, dtype=torch.bfloat16, tile_d=128, tile_dv=128, grouped=True, layout=Layout(page=page))
        config = config_for(spec, Problem(sequences * 8, 8, 8192, 8), H200)
        assert (config.blocks, config.resident) == (blocks, blocks == 2), (page, sequences)
        assert config_for(spec, Problem(sequences * 8, 8, 8192, 8), Machine(Target("cuda", 80), 108)).blocks == 1


def test_masks_compare_keys_in_32_bits():
    """A row's end is a difference, which may need 64 bits; each key is compared with it."""
    for options in ({"causal": True}, {"causal": True, "window": 100, "q_offset": 3}):
        compared = [line for line in hopper_source(**options).splitlines() if "seen" in line and "<" in line]
        assert compared and not any("int64" in line for line in compared), compared


def hopper_source(heads=8, rows=512, size=64, config=None, **options):
    """What attention becomes on a Hopper."""

    def call(make):
        q, k = make((1, heads, rows, size), torch.float16), make((1, 8, 512, size), torch.float16)
        return attention(q, k, k, config=config, **options)

    (kernel,) = compiled(Case("attention", call), H200.target)
    return kernel.source


@pytest.mark.parametrize("offset, products", [(0, 4), (20, 5)])
def test_no_mask_needs_a_turned_loop_of_its_own(offset, products):
    """Before the turned loop, its two, after it; and, between turns that a shifted mask cuts, the second ones.

    A causal mask that begins with the first key cuts one square tile, as the end of the keys does.
    """
    assert hopper_source().count("tile::wgmma_commit();") == 4
    square = replace(next(c for c in HOPPER if c.block_q == c.block_kv == 128), packed=False, staged=True)
    source = hopper_source(config=square, causal=True, q_offset=offset)
    assert source.count("tile::wgmma_commit();") == products


@pytest.mark.parametrize("cut", HOPPER, ids=lambda c: f"{c.block_q}x{c.block_kv}x{c.threads}")
def test_causal_masks_cut_few_turns_of_every_cut(cut):
    """The compiler proves it of each, and takes these turns before the turned loop, which then has no branch."""
    size = {(128, 96): 192, (128, 64): 128, (128, 128): 128}.get((cut.block_q, cut.block_kv), 64)
    config = replace(cut, packed=False, heavy_first=True, staged=True)
    source = hopper_source(size=size, causal=True, q_offset=20, config=config)
    assert source.count("iteration < iteration_lead;") == 1 and source.count("tile::wgmma_commit();") == 5


def test_keys_of_packed_heads_come_in_order():
    """Their masks may cut any number of turns, which come last."""
    source = hopper_source(heads=64, rows=40, causal=True, q_offset=472)
    assert "iteration_lead" not in source and "iteration_more" in source


@pytest.mark.parametrize("machine", [CPU, *GPUS], ids=lambda m: str(m.target))
def test_heads_that_are_apart_are_packed_where_that_saves_half_of_a_block(machine):
    """Packing copies queries and result where the rows of a group are not evenly spaced."""
    spec = replace(FORM, grouped=True, causal=False)
    for queries in (1, 16, 32, 100, 128, 1000):
        apart, adjacent = (config_for(spec, Problem(8, 4 * queries, 300, 4, even), machine) for even in (False, True))
        assert apart.packed == (adjacent.packed and 2 * queries <= apart.block_q)
