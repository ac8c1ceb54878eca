# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices with scales of every form, against float64."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import spec as gemm_spec
from torch_tile.kernels.gemm.args import ScaledGemmArgs
from torch_tile.kernels.gemm.scaled import (
    GROUP,
    PAIRED,
    TIMED,
    Problem,
    Scale,
    Spec,
    config_for,
    footprint,
    prepare,
    reference,
    scaled_gemm,
    with_more_stages,
)
from torch_tile.kernels.gemm.tiling import Config

HOPPER = Machine(Target("cuda", 90), 132)
E4M3, E5M2, F32, F64, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.bfloat16
# What scales a row of a, or a column of b, and whether runs of 128 columns have their own.
FORMS = {
    "matrix": (("one", False), ("one", False)),
    "rows": (("own", False), ("own", False)),
    "blocks": (("own", True), ("block", True)),
    "runs": (("own", True), ("own", True)),
    "blocks of a": (("block", True), ("own", True)),
    "runs of b": (("one", False), ("own", True)),
}


def scales(problems, form, rows, columns):
    """Positive scales of `rows x columns` numbers, some stored the other way round."""
    kind, grouped = form
    count = {"one": 1, "own": rows, "block": -(-rows // 128)}[kind]
    groups = -(-columns // 128) if grouped else 1
    found = problems.tensor(count, groups).abs() + 0.1
    return found.t().contiguous().t() if problems.pick(False, True) else found


def arguments(problems, form, m, n, k, dtypes=(E4M3, E4M3), turned=False):
    """Of `scaled_gemm`, up to the auxiliary operands."""
    a, b = problems.tensor(m, k).to(dtypes[0]), problems.tensor(n, k).to(dtypes[1])
    b = b.t().contiguous() if turned else b.t()
    return a, b, scales(problems, form[0], m, k), scales(problems, form[1], n, k).t()


def exact(a, b, scale_a, scale_b, aux, kinds, text):
    wide = [x.double() for x in (a, b, scale_a, scale_b)]
    return reference(*wide, [x.double() for x in aux], kinds, text, F64)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check):
    for number in rounds(2):
        config = problems.pick(None, Config(64, 64, 128, 128, 2))
        m, n, k = problems.size(150), problems.size(150), problems.size(300)
        dtypes, turned = problems.pick((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), problems.pick(False, False, True)
        args = arguments(problems, FORMS[form], m, n, k, dtypes, turned)
        row = problems.tensor(n, dtype=F32)
        dtype = problems.pick(F32, BF16)
        got = scaled_gemm(*args, [row], "r", "v=add(acc0,x0);w=silu(v);ret w", dtype, config=config)
        want = partial(exact, *args, [row], "r", "v=add(acc0,x0);w=silu(v);ret w")
        check(got, want, f"{number}: {m}x{n}x{k}, {dtypes}, turned {turned}, {config}", dtype)


def packed(problems, form, m, n, k, bits, words):
    """Arguments of int8 by fields of `bits` up to the auxiliary operands, and the same fields as a matrix of int8."""
    a = problems.tensor(m, k).mul(40).clamp(-128, 127).to(torch.int8)
    codes = (problems.tensor(n, k).mul(1 << bits)).to(torch.int32) & ((1 << bits) - 1)
    places = bits * torch.arange(8 // bits, device=codes.device)
    b = (codes.view(n, -1, 8 // bits) << places).sum(-1).to(torch.uint8).view(words)
    sign = 1 << (bits - 1) if words == torch.int8 else 0
    factors = scales(problems, form[0], m, k), scales(problems, form[1], n, k).t()
    return (a, b.t(), *factors), ((codes ^ sign) - sign).t()


@pytest.mark.parametrize("words", [torch.int8, torch.uint8])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_int8_by_fewer_bits(bits, words, rounds, problems, check):
    """W4A8 and BitNet's int2 x int8, on ragged sizes: the products of the unpacked weights."""
    for number in rounds(2):
        form = FORMS[problems.pick("rows", "runs", "blocks", "matrix")]
        m, n, k = problems.size(150), problems.size(150), 8 * problems.size(40)
        offset = problems.pick(0, 1 << (bits - 1))
        args, numbers = packed(problems, form, m, n, k, bits, words)
        row = problems.tensor(n, dtype=F32)
        epilogue = "r", "v=add(acc0,x0);w=silu(v);ret w"
        got = scaled_gemm(*args, [row], *epilogue, F32, bits, offset)
        want = partial(exact, args[0], numbers - offset, *args[2:], [row], *epilogue)
        check(got, want, f"{number}: {m}x{n}x{k}, {form}, less {offset}", F32)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize(("bits", "form"), [(4, "runs"), (2, "rows")])
def test_aligned_rows_of_fewer_bits(bits, form, engine, problems, check):
    """Bulk copies of packed weights, and wgmma of int8."""
    m, n, k = problems.size(70), problems.size(140), 128 * problems.pick(2, 3)
    args, numbers = packed(problems, FORMS[form], m, n, k, bits, torch.uint8)
    offset = 1 << (bits - 1)
    got = scaled_gemm(*args, [], "", "", F32, bits, offset)
    check(got, partial(exact, args[0], numbers - offset, *args[2:], [], "", ""), f"{m}x{n}x{k}", F32)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_aligned_rows(form, engine, problems, check):
    """Bulk copies and wgmma on Hopper, which ragged sizes refuse."""
    m, n, k = problems.size(140), problems.size(140), 128 * problems.pick(2, 3) + problems.pick(0, 64)
    args = arguments(problems, FORMS[form], m, n, k)
    args = (args[0].contiguous(), args[1].t().contiguous().t(), *args[2:])
    full = problems.tensor(m, n, dtype=BF16)
    got = scaled_gemm(*args, [full], "t", "v=add(acc0,x0);ret v", F32)
    check(got, partial(exact, *args, [full], "t", "v=add(acc0,x0);ret v"), f"{m}x{n}x{k}", F32)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", ["blocks", "blocks of a", "blocks of both"])
@pytest.mark.parametrize("blocks", [0, 2])
def test_scales_of_neighbouring_runs_are_copied_together(form, blocks, engine, problems, check):
    """The only scale of a tile comes by a bulk copy of 32 runs; tiles of 96 columns have two, which are loaded."""
    kinds = {"blocks of both": (("block", True), ("block", True))} | FORMS
    m, n, k = problems.size(140), 128 + 8 * problems.size(6), 128 * problems.pick(4, 8, 36)
    a, b, *scales = arguments(problems, kinds[form], m, n, k)
    scale_a, scale_b = (x.t().clone(memory_format=torch.contiguous_format).t() for x in scales)
    if form != "blocks":
        scale_a = scale_a.contiguous()
    args = (a.contiguous(), b.t().contiguous().t(), scale_a, scale_b)
    config = Config(64, problems.pick(64, 64, 96), 128, 128, 3, panel=8, staged=True, blocks=blocks)
    got = scaled_gemm(*args, [], "", "", F32, config=config)
    check(got, partial(exact, *args, [], "", ""), f"{m}x{n}x{k}, {config}", F32)
    spec = prepare(ScaledGemmArgs(*args, [], "", "", F32), HOPPER, got)[0]
    assert spec.scales[1].runs(64) == (form != "blocks of a") and not spec.scales[1].runs(96)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("together", [False, True])
def test_tiles_across_borders_of_scales(together, blocks, engine, problems, check):
    """Tiles of all widths take their columns in pieces, of which each has one scale: copied together, or loaded."""
    width = 8 * problems.pick(*(n for n in range(1, 25) if 128 % (8 * n)))
    m, n, k = problems.size(140), 128 + 8 * problems.size(20), 128 * (4 if together else problems.pick(2, 3))
    args = arguments(problems, FORMS["blocks"], m, n, k)
    scale_a, scale_b = (x.t().clone(memory_format=torch.contiguous_format).t() for x in args[2:])
    args = (args[0].contiguous(), args[1].t().contiguous().t(), scale_a, scale_b)
    config = Config(64, width, 128, 128, 3, panel=problems.pick(0, 8), staged=problems.pick(False, True), blocks=blocks)
    got = scaled_gemm(*args, [], "", "", BF16, config=config)
    check(got, partial(exact, *args, [], "", ""), f"{m}x{n}x{k}, {config}", BF16)
    spec = prepare(ScaledGemmArgs(*args, [], "", "", BF16), HOPPER, got)[0]
    pieces = spec.split(width)
    assert len(pieces) > 1 and all(spec.scales[1].runs(piece.width) == together for piece in pieces)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("together", [1, 2])
def test_persistent_blocks(together, engine, problems, check):
    """Blocks take several tiles each, alone or in clusters that share tiles of b; tiles have two runs of scales."""
    panel = problems.pick(0, 1, 2, 8)  # 0: no panels
    config = Config(64, 96, 128, 128, 3, panel=panel, staged=True, blocks=4, splits=together)
    m, n, k = 150, 136, 128 * problems.pick(2, 3)
    args = arguments(problems, FORMS["blocks"], m, n, k)
    args = (args[0].contiguous(), args[1].t().contiguous().t(), *args[2:])
    check(
        scaled_gemm(*args, [], "", "", BF16, config=config),
        partial(exact, *args, [], "", ""),
        f"{m}x{n}x{k}, panel {panel}",
        BF16,
    )


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    """By float16 on Ampere, which has no float8 products, and by mma.sync of float8 elsewhere."""
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.scaled"), "machine_of", lambda x: machine)
    args = arguments(problems, FORMS["blocks"], 40, 70, 272, (E4M3, E5M2))
    check(scaled_gemm(*args, [], "", "", F32), partial(exact, *args, [], "", ""), str(capability), F32)


def whole(problems, m, n, k):
    """Operands of int8, up to the auxiliary ones; the largest magnitudes are there, whose sums are exact."""
    a, b = (
        torch.randint(-128, 128, shape, generator=problems.generator, dtype=torch.int8) for shape in ((m, k), (n, k))
    )
    a[0], b[0] = -128, -128
    form = problems.pick(*FORMS.values())
    return a, b.t(), scales(problems, form[0], m, k), scales(problems, form[1], n, k).t()


def test_int8(rounds, problems, check):
    for _ in rounds(2):
        m, n, k = problems.size(150), problems.size(150), problems.size(400)
        args = whole(problems, m, n, k)
        row = problems.tensor(n, dtype=F32)
        got = scaled_gemm(*args, [row], "r", "v=add(acc0,x0);ret v", F32)
        check(got, partial(exact, *args, [row], "r", "v=add(acc0,x0);ret v"), f"{m}x{n}x{k}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 90])
def test_int8_of_aligned_rows(capability, engine, problems, check, monkeypatch):
    """By wgmma of int8 on Hopper, and mma.sync elsewhere."""
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.scaled"), "machine_of", lambda x: machine)
    args = whole(problems, 70, 130, 256)
    check(scaled_gemm(*args, [], "", "", F32), partial(exact, *args, [], "", ""), str(capability), F32, own=True)


@pytest.mark.parametrize("shape", [(0, 3, 16), (3, 0, 16), (3, 4, 0), (1, 1, 1)])
def test_empty_and_tiny(shape, engine, problems):
    m, n, k = shape
    args = (torch.ones(m, k).to(E4M3), torch.ones(k, n).to(E5M2), torch.full((1, 1), 2.0), torch.ones(1, 1))
    assert torch.equal(scaled_gemm(*args, [], "", "", F32), torch.full((m, n), 2.0 * k))


def test_tilings_follow_sizes():
    """Blocks stay for tile after tile where there are many; few small tiles have a multiprocessor's room each."""
    machine = Machine(Target("cuda", 90), 132)

    def chosen(m, **facts):
        config = config_for(Problem(E4M3, m, 7168, 2048, True, **facts), machine)
        return config.blocks, config.stages

    assert chosen(4096, staged=True) == (132, 4)
    assert chosen(64, staged=True) == chosen(64) == (0, 8)
    assert chosen(4096) == chosen(4096, staged=True, bits=4) == (0, 4)


@pytest.mark.parametrize(
    "rows, columns, depth, runs, tile",
    [
        (4096, 4096, 1024, True, (128, 128, 5)),
        (2048, 2112, 1024, True, (128, 144, 5)),
        (1024, 6144, 1024, True, (128, 192, 4)),
        (4096, 4096, 1024, False, (128, 128, 4)),
    ],
)
def test_persistent_tiles_get_a_fifth_stage_if_it_fits(rows, columns, depth, runs, tile):
    """Where each run of 128 columns has scales."""
    a, b = (torch.empty(n, depth, dtype=E4M3) for n in (rows, columns))
    of_a = torch.empty(depth // 128, rows).mT if runs else torch.empty(1, 1)
    of_b = torch.empty(-(-columns // 128), depth // 128).mT if runs else torch.empty(1, 1)
    args = ScaledGemmArgs(a, b.mT, of_a, of_b, [], "", "", torch.bfloat16)
    spec, problem, _ = prepare(args, HOPPER, torch.empty(rows, columns, dtype=torch.bfloat16))
    config = with_more_stages(config_for(problem, HOPPER), spec, problem, HOPPER)
    assert config.blocks == 132 and (config.block_m, config.block_n, config.stages) == tile


@pytest.mark.parametrize("runs", [False, True])
def test_pairs_of_tiles_run_at_once(runs):
    """Two tiles of 64 rows share tiles of b in a cluster, if all pairs of them have room; one row of tiles has none."""

    def chosen(m, n, **facts):
        return config_for(Problem(E4M3, m, n, 4096, True, runs=runs, **facts), HOPPER)

    for m, n in ((128, 7168), (200, 4096), (256, 4224)):
        config = chosen(m, n, staged=True)
        assert (config.block_m, config.block_n, config.splits, config.blocks) == (64, 128, 2, 132), (m, n)
    for config in (chosen(64, 7168, staged=True), chosen(200, 4096), chosen(320, 4096, staged=True)):
        assert config.splits == 1, config


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_tiles_that_rules_choose_for_prompts(form, engine, problems, check):
    """The widest tiles, and pairs of tiles whose last one is past the end, on ragged sizes."""
    for config in (*problems.random.sample(TIMED, 4), PAIRED):
        config = replace(config, staged=True, panel=problems.pick(0, 8), blocks=4)
        m, n, k = config.block_m + problems.size(60), config.block_n + 16 * problems.size(6), 128 * problems.pick(1, 3)
        args = arguments(problems, FORMS[form], m, n, k)
        args = (args[0].contiguous(), args[1].t().contiguous().t(), *args[2:])
        got = scaled_gemm(*args, [], "", "", BF16, config=config)
        check(got, partial(exact, *args, [], "", ""), f"{m}x{n}x{k}, {config}", BF16)


# Microseconds on an H200 by tile, with scales by blocks and with one (h200_tile_widths_2026-11-30.txt): the fastest.
MEASURED = {
    (1000, 4608, 7168, True): {"128x144": 58.2, "128x152": 61.4, "128x160": 61.9, "192x112": 66.1, "192x128": 66.6},
    (1000, 4608, 7168, False): {"128x144": 53.5, "128x152": 55.8, "192x112": 61.9},
    (2048, 2112, 7168, True): {"128x136": 57.7, "128x144": 58.1, "192x96": 58.8, "192x88": 60.9, "192x128": 66.7},
    (2048, 2112, 7168, False): {"128x136": 51.1, "128x144": 53.7, "192x88": 54.2, "192x96": 54.9},
    (640, 2112, 7168, True): {"128x128": 27.6, "128x96": 24.1, "64x176": 29.8, "192x72": 30.5, "128x88": 31.1},
    (640, 2112, 7168, False): {"128x96": 22.6, "128x88": 22.8, "128x128": 25.4, "64x176": 28.4},
    (256, 4608, 7168, True): {"64x144": 26.7, "128x72": 24.6, "128x80": 28.5, "128x96": 27.3, "128x128": 29.8},
    (256, 4608, 7168, False): {"128x72": 22.5, "128x80": 24.7, "128x96": 25.3, "64x144": 26.3, "128x128": 26.8},
    (200, 4096, 4096, True): {"64x128": 18.2, "128x64": 18.6},
    (200, 4096, 4096, False): {"64x128": 16.7, "128x72": 18.0, "128x64": 18.0},
    (384, 8192, 8192, True): {"192x128": 43.8, "128x192": 44.5, "128x96": 61.9, "128x128": 62.8},
    (384, 8192, 8192, False): {"192x128": 41.8, "128x192": 43.3},
    (768, 7168, 2048, True): {"128x168": 25.9, "192x112": 25.9, "128x176": 26.3, "192x128": 26.5, "128x192": 26.9},
    (768, 7168, 2048, False): {"128x176": 24.7, "128x192": 25.6, "128x168": 25.6},
    (1536, 4096, 4096, True): {"192x128": 43.4, "128x192": 44.3},
    (4096, 4096, 4096, True): {
        "128x128": 112.8,
        "128x176": 117.7,
        "128x192": 120.5,
        "192x128": 121.2,
        "128x160": 125.2,
    },
    (4096, 4096, 4096, False): {"128x128": 105.1, "128x176": 106.1},
    (8192, 8192, 8192, True): {"192x128": 861.6, "128x192": 910.3, "128x176": 964.4, "128x128": 967.3},
    (8192, 8192, 8192, False): {"128x192": 822.2, "128x176": 846.2},
    (4096, 7168, 2048, True): {
        "128x176": 107.9,
        "128x128": 105.6,
        "128x192": 109.1,
        "192x112": 115.2,
        "128x144": 116.3,
    },
    (4096, 7168, 2048, False): {"128x176": 98.0, "128x128": 99.8},
    (4096, 4096, 14336, True): {"192x128": 387.8, "128x128": 398.6, "128x176": 401.6, "128x192": 413.7},
    (4096, 4096, 14336, False): {"128x128": 351.4, "128x176": 355.6, "128x192": 376.0},
    (3072, 1536, 7168, True): {"128x144": 59.0, "192x96": 60.5, "192x128": 68.1, "128x192": 69.8, "128x96": 74.9},
    (1500, 5120, 5120, True): {"128x160": 68.5, "192x112": 72.5, "128x176": 73.7, "192x128": 74.0, "128x128": 75.5},
    (128, 7168, 4096, True): {"128x72": 18.9, "64x128": 19.1, "64x64": 25.9},
    (4096, 24576, 1536, True): {"128x192": 262.6, "128x128": 277.9},
    (2048, 8192, 1024, True): {"128x128": 38.5, "128x144": 39.4},
    (500, 4608, 7168, True): {"128x144": 32.6, "192x128": 37.0},
    (1024, 2112, 7168, False): {"128x136": 28.6, "128x144": 30.0},
    (4096, 2112, 7168, False): {"128x176": 91.3, "128x192": 96.4},
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_rules_choose_tiles_that_were_fast(shape):
    *sizes, runs = shape
    config = config_for(Problem(E4M3, *sizes, True, staged=True, runs=runs), Machine(Target("cuda", 90), 132))
    times = MEASURED[shape]
    assert times[f"{config.block_m}x{config.block_n}"] <= 1.03 * min(times.values())


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_timed_tiles_fit(runs, groups):
    product = gemm_spec.Spec(E4M3, torch.bfloat16, False, (True,), (), "ret acc0")
    scales = Scale(1, runs, True, runs), Scale(GROUP if runs else 1, runs, not runs, along=runs)
    spec = Spec(product, (E4M3, E4M3), (E4M3, E4M3), scales)
    for config in (*TIMED, PAIRED):
        tiles = footprint(replace(config, staged=True), spec, True, groups)
        assert tiles.bytes <= Target("cuda", 90).shared_limit, config


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_tilings_fit(capability):
    machine = Machine(Target("cuda", capability), 132)
    operand = E4M3 if machine.target.has_fp8 else torch.float16
    product = gemm_spec.Spec(E4M3, F32, False, (True,), (), "ret acc0")
    for m in (1, 64, 300, 4096):
        for aligned in (False, True):
            config = config_for(Problem(operand, m, 4096, 4096, aligned, staged=aligned), machine)
            scales = Scale(1, True, True, aligned), Scale(1, True, True, aligned)
            spec = Spec(product, (E4M3, E4M3), (operand, operand), scales)
            tiles = footprint(config, spec, aligned)
            assert tiles.tile_bytes <= machine.target.shared_limit, (m, config)
