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
    TILES,
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
    pieces = spec.split(config)
    assert len(pieces) > 1 and all(spec.scales[1].runs(piece.width) == together for piece in pieces)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
def test_persistent_blocks(engine, problems, check):
    """Blocks take several tiles each; tiles have two runs of scales."""
    panel = problems.pick(0, 1, 2, 8)  # 0: no panels
    config = Config(64, 96, 128, 128, 3, panel=panel, staged=True, blocks=4)
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


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_made_as_their_transposes(form, blocks, engine, problems, check):
    """The columns of the product are rows of a, of any multiple of 8; scales of a change along the columns."""
    columns = problems.pick(64, 64, 128)
    rows = 8 * problems.size(16)
    config = Config(rows, columns, 128, 2 * columns, 3, panel=problems.pick(0, 8), staged=problems.pick(False, True),
                    blocks=blocks, transposed=True)  # fmt: skip
    m, n, k = problems.size(140), 8 * problems.size(24), 128 * problems.pick(1, 3, 4)
    args = arguments(problems, FORMS[form], m, n, k)
    args = (args[0].contiguous(), args[1].t().contiguous().t(), *args[2:])
    row = problems.tensor(n, dtype=F32)
    text = "v=add(acc0,x0);w=silu(v);ret w"
    got = scaled_gemm(*args, [row], "r", text, BF16, config=config)
    check(got, partial(exact, *args, [row], "r", text), f"{m}x{n}x{k}, {config}", BF16)


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
        (2048, 2112, 1024, True, (128, 136, 5)),
        (768, 7168, 2048, True, (192, 112, 5)),
        (8192, 8192, 8192, False, (128, 192, 4)),
        (4096, 4096, 1024, False, (128, 128, 6)),
    ],
)
def test_persistent_tiles_get_the_stages_that_fit(rows, columns, depth, runs, tile):
    """Of up to six."""
    config = chosen(rows, columns, depth, runs)
    assert config.blocks == 132 and (config.block_m, config.block_n, config.stages) == tile


@pytest.mark.parametrize("runs", [False, True])
def test_few_rows_take_narrow_tiles_of_one_wave(runs):
    """Made as their transposes where these have fewer rows to spare; each with the stages that fit."""
    tiles = [(c.block_m, c.block_n, c.transposed) for c in (chosen(m, 4096, 4096, runs) for m in (120, 200, 224, 250))]
    assert tiles == [(64, 64, False), (104, 64, True), (112, 64, True), (128, 64, False)]
    assert all(chosen(m, 4096, 4096, runs).stages >= 8 for m in (120, 200, 224, 250))


def chosen(rows, columns, depth, runs):
    """The tiling of a product with scales of runs of columns, or with one scale for each operand."""
    a, b = (torch.empty(n, depth, dtype=E4M3) for n in (rows, columns))
    of_a = torch.empty(depth // 128, rows).mT if runs else torch.empty(1, 1)
    of_b = torch.empty(-(-columns // 128), depth // 128).mT if runs else torch.empty(1, 1)
    args = ScaledGemmArgs(a, b.mT, of_a, of_b, [], "", "", torch.bfloat16)
    spec, problem, _ = prepare(args, HOPPER, torch.empty(rows, columns, dtype=torch.bfloat16))
    return with_more_stages(config_for(problem, HOPPER), spec, problem, HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_tiles_that_rules_choose_for_prompts(form, engine, problems, check):
    """Any of the tiles, on ragged sizes."""
    for config in problems.random.sample(TILES, 5):
        config = replace(config, staged=True, panel=problems.pick(0, 8), blocks=4)
        m, n, k = config.block_m + problems.size(60), config.block_n + 16 * problems.size(6), 128 * problems.pick(1, 3)
        args = arguments(problems, FORMS[form], m, n, k)
        args = (args[0].contiguous(), args[1].t().contiguous().t(), *args[2:])
        got = scaled_gemm(*args, [], "", "", BF16, config=config)
        check(got, partial(exact, *args, [], "", ""), f"{m}x{n}x{k}, {config}", BF16)


# Microseconds on an H200 by tile, with scales by blocks or with one (h200_float8_steps_2026-11-30.txt): the fastest. A
# t stands for a tile that is made as its transpose.
# fmt: off
MEASURED = {
    (200, 4096, 4096, False): {"t104x64": 14.5, "t112x64": 15.2, "t72x128": 16.1, "t56x128": 16.8},
    (200, 4096, 4096, True): {"t104x64": 16.3, "t112x64": 17.3, "t56x128": 17.9, "t72x128": 18.2},
    (1000, 4608, 7168, True): {"128x144": 56.9, "192x128": 67.1, "t144x128": 70.5, "t96x192": 74.1},
    (1000, 4608, 7168, False): {"128x144": 51.2, "t96x192": 51.4, "t144x128": 51.9, "t152x128": 53.1},
    (2048, 2112, 7168, True): {"128x136": 51.3, "128x144": 56.6, "192x96": 57.8, "192x88": 59.9},
    (2048, 2112, 7168, False): {"t88x192": 48.3, "128x136": 48.6, "128x144": 50.8, "192x96": 50.9},
    (256, 4608, 7168, True): {"128x72": 24.1, "128x80": 25.1, "128x88": 25.6, "64x144": 26.9},
    (256, 4608, 7168, False): {"128x72": 24.1, "t88x128": 25.1, "t96x128": 25.4, "64x144": 26.0},
    (640, 2112, 7168, True): {"128x88": 23.4, "128x96": 24.2, "t96x128": 29.3, "t160x64": 31.1},
    (640, 2112, 7168, False): {"128x88": 21.2, "128x96": 21.9, "t96x128": 25.8, "t160x64": 26.0},
    (4096, 4096, 14336, True): {"192x144": 353.0, "128x128": 367.1, "192x128": 372.2},
    (4096, 4096, 14336, False): {"t128x128": 333.7, "128x128": 334.8, "192x128": 362.2},
    (4096, 4096, 4096, True): {"128x128": 110.4, "192x144": 112.1, "192x128": 122.5},
    (4096, 4096, 4096, False): {"t128x128": 103.3, "128x128": 104.0, "192x144": 107.1},
    (500, 4608, 7168, True): {"128x144": 31.9, "192x112": 36.9, "t168x128": 41.1, "t144x128": 68.1},
    (1024, 2112, 7168, True): {"128x136": 28.8, "128x144": 30.9, "192x96": 34.2, "t152x128": 38.1},
    (1024, 2112, 7168, False): {"128x136": 27.6, "t88x192": 27.9, "192x96": 38.6},
    (384, 8192, 8192, True): {"192x128": 43.4, "192x136": 48.4},
    (384, 8192, 8192, False): {"192x128": 41.0, "t192x128": 42.1, "t128x192": 42.8},
    (1536, 4096, 4096, True): {"128x128": 42.8, "192x128": 42.9},
    (1536, 4096, 4096, False): {"192x128": 40.6, "128x192": 40.7, "128x128": 41.0},
    (768, 7168, 2048, True): {"192x112": 25.1, "128x168": 25.6, "128x176": 26.0, "192x120": 27.1},
    (768, 7168, 2048, False): {"192x112": 23.3, "128x176": 24.0, "128x128": 25.0, "128x168": 25.1},
    (4096, 7168, 2048, True): {"128x128": 100.6, "192x136": 104.9, "128x176": 107.4, "192x128": 108.7},
    (4096, 7168, 2048, False): {"128x176": 97.5, "128x160": 97.5, "128x136": 98.4, "128x128": 98.4},
    (8192, 8192, 8192, True): {"192x128": 791.5, "192x144": 797.0, "128x128": 845.0},
    (8192, 8192, 8192, False): {"192x128": 830.1, "128x192": 831.5, "128x128": 833.9, "128x144": 850.3},
    (3072, 1536, 7168, True): {"128x144": 63.9, "192x96": 65.4, "t96x192": 81.9, "t144x128": 84.0},
    (3072, 1536, 7168, False): {"t96x192": 51.8, "192x96": 52.5, "128x144": 52.6},
    (1500, 5120, 5120, True): {"128x160": 67.9, "192x112": 72.3, "t168x128": 86.0},
    (1500, 5120, 5120, False): {"128x160": 60.5, "192x112": 62.7, "128x128": 63.5},
    (128, 7168, 4096, True): {"128x64": 17.2, "128x56": 17.5, "t128x64": 18.6, "t64x128": 19.7},
    (128, 4096, 4096, False): {"t64x64": 13.25, "64x64": 13.57, "128x64": 14.0, "t128x64": 14.9},
    (2048, 8192, 1024, True): {"128x128": 39.6, "192x144": 41.3, "128x168": 43.7},
    (128, 4096, 4096, True): {"64x64": 14.2, "128x64": 15.1, "t64x64": 15.2, "t128x64": 18.4},
}
# fmt: on


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_rules_choose_tiles_that_were_fast(shape):
    *sizes, runs = shape
    config = config_for(Problem(E4M3, *sizes, True, staged=True, runs=runs), Machine(Target("cuda", 90), 132))
    times = MEASURED[shape]
    tile = f"{'t' if config.transposed else ''}{config.block_m}x{config.block_n}"
    assert times[tile] <= 1.03 * min(times.values())


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_timed_tiles_fit(runs, groups):
    product = gemm_spec.Spec(E4M3, torch.bfloat16, False, (True,), (), "ret acc0")
    scales = Scale(1, runs, True, runs), Scale(GROUP if runs else 1, runs, not runs, along=runs)
    spec = Spec(product, (E4M3, E4M3), (E4M3, E4M3), scales)
    for config in TILES:
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
