# SPDX-License-Identifier: Apache-2.0
"""How steps of products by few-bit weights are taken apart: all of a step once, as words and groups allow."""

import importlib
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from test.kernels.gemm.stored_weights import (
    BF16,
    E8M0,
    F32,
    F64,
    GROUPS,
    HALF,
    I8,
    SWIGLU,
    U8,
    Scheme,
    arguments,
    exact,
    form_of,
)
from torch_tile.hardware import Target
from torch_tile.jit import JITFunction
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.args import DequantGemmArgs
from torch_tile.kernels.gemm.dequant import (
    dequant_gemm,
    dequant_matmul,
    dequantize,
    prepare,
    reference,
    span_of,
    together,
    with_copied_factors,
)
from torch_tile.kernels.gemm.dequant_rules import WIDTHS, config_for
from torch_tile.kernels.gemm.packed import FEW_ROWS, Factor, Problem
from torch_tile.kernels.gemm.tiling import Config

SCHEMES = {
    "int8": Scheme(I8),
    "int8 bare": Scheme(I8, scale=None, a=HALF),
    "uint8 with zeros": Scheme(U8, zero=I8, scale=BF16),
    "int8 in groups": Scheme(I8, group=32, zero=I8, scale=BF16),
    "uint4": Scheme(U8, 4, group=32, offset=8, scale=HALF, a=HALF),
    "uint4 with zeros": Scheme(U8, 4, high_first=True, group=64, zero=BF16, scale=BF16),
    "uint4 of large groups": Scheme(U8, 4, group=128, zero=U8),
    "int4": Scheme(I8, 4, group=16),
    "int4 by rows": Scheme(I8, 4, high_first=True, a=HALF),
    "uint2": Scheme(U8, 2, offset=2, group=64),
    "bits": Scheme(U8, 1, high_first=True),
    "e4m3": Scheme(torch.float8_e4m3fn),
    "e4m3 in groups": Scheme(torch.float8_e4m3fn, group=128, a=HALF),
    "e5m2": Scheme(torch.float8_e5m2, a=HALF),
    "float32": Scheme(U8, 4, group=32, offset=8, a=F32),
    "nf4": Scheme(U8, 4, high_first=True, group=64, format="nf4"),
    "nf4 in float16": Scheme(U8, 4, high_first=True, group=256, scale=HALF, a=HALF, format="nf4"),
    "fp4 by rows": Scheme(U8, 4, high_first=True, format="fp4"),
    "fp4 in float32": Scheme(U8, 4, high_first=True, group=64, a=F32, format="fp4"),
    "mxfp4": Scheme(U8, 4, group=32, scale=E8M0, format="e2m1"),
    "mxfp4 in float16": Scheme(U8, 4, group=32, scale=E8M0, a=HALF, format="e2m1"),
    "nvfp4": Scheme(U8, 4, group=16, scale=torch.float8_e4m3fn, format="e2m1"),
    "int4 with scales of float8": Scheme(U8, 4, group=32, offset=8, scale=torch.float8_e4m3fn, a=HALF),
    "float64": Scheme(I8, zero=F32, a=F64),
}


def test_weights_are_widened_as_documented():
    byte = torch.tensor([[0x4B, 0xF0]], dtype=torch.uint8)
    fields = lambda b, bits, high: dequantize(b, None, None, bits, high, 0, F32).tolist()  # noqa: E731
    assert fields(byte, 4, False) == [[11, 4, 0, 15]] and fields(byte, 4, True) == [[4, 11, 15, 0]]
    assert fields(byte.view(I8), 4, True) == [[4, -5, -1, 0]]
    assert fields(byte, 2, True)[0][:4] == [1, 0, 2, 3] and fields(byte.view(I8), 2, False)[0][:4] == [-1, -2, 0, 1]
    assert fields(byte[:, 1:], 1, True) == [[1, 1, 1, 1, 0, 0, 0, 0]]
    scale, zero = torch.tensor([[2.0, 0.5]]), torch.tensor([[1, 4]], dtype=torch.int32)
    assert dequantize(byte, scale, zero, 4, False, 8, F32).tolist() == [[4, -10, -6, 1.5]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_problems(scheme, rounds, problems, check):
    scheme = SCHEMES[scheme]
    unit = max(scheme.group, 8)
    for number in rounds(3):
        config = problems.pick(None, None, Config(8, 64, 64, 128, 2), Config(16, 64, 64, 128, 2, splits=3))
        m, n, k = problems.size(40), problems.size(90), unit * problems.size(400 // unit)
        products, transposed = problems.pick(1, 1, 2), problems.pick(False, False, True)
        args = arguments(problems, scheme, m, n, k, products, transposed)
        row = problems.tensor(n, dtype=torch.float32)
        epilogue = ([row], "r", SWIGLU if products == 2 else "v=add(acc0,x0);ret v")
        got = dequant_gemm(*args, *epilogue, F64 if scheme.a == F64 else F32, scheme.format, config=config)
        want = partial(exact, *args, [row.double()], *epilogue[1:], format=scheme.format)
        check(got, want, f"{number}: {m}x{n}x{k}, {products} products, turned {transposed}, {config}", scheme.a)


@pytest.mark.parametrize(
    "scheme",
    [
        "int8",
        "uint4",
        "uint4 with zeros",
        "uint4 of large groups",
        "int4 by rows",
        "e4m3",
        "nf4",
        "mxfp4 in float16",
        "nvfp4",
    ],
)
def test_aligned_rows(scheme, rounds, problems, check):
    """Bulk copies and wgmma on Hopper, which the ragged sizes of others refuse."""
    scheme = SCHEMES[scheme]
    for number in rounds(2):
        tilings = Config(16, 64, 128, 128, 3), Config(32, 128, 64, 256, 2, splits=2), Config(128, 64, 64, 128, 2)
        config = problems.pick(None, *tilings)
        m, n, k = problems.size(70), problems.size(150), 128 * problems.pick(1, 3, 4, 8)
        args = arguments(problems, scheme, m, n, k)
        args = (args[0].contiguous(), *args[1:])
        full = problems.tensor(m, n, dtype=BF16)
        got = dequant_gemm(*args, [full], "t", "v=silu(acc0);w=add(v,x0);ret w", BF16, scheme.format, config=config)
        want = partial(exact, *args, [full.double()], "t", "v=silu(acc0);w=add(v,x0);ret w", format=scheme.format)
        check(got, want, f"{number}: {m}x{n}x{k}, {config}")


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("groups", [16, 32, 20])
def test_scales_that_are_read_four_at_a_time(groups, engine, problems, check):
    """Bytes of scales in rows of whole pieces; the last rows of others are too short."""
    scheme, m, n, config = (
        SCHEMES["mxfp4 in float16"],
        problems.size(12),
        problems.size(90),
        Config(16, 64, 128, 128, 2),
    )
    a, bs, scales, *rest = arguments(problems, scheme, m, n, 32 * groups)
    args = (a.contiguous(), bs, [s.contiguous() for s in scales], *rest)
    spec, _, tensors = prepare(DequantGemmArgs(*args, [], "", "", F32, "e2m1"), MACHINES[1])
    assert together(spec, tensors, config)[0].storage.scale.together == (1 if groups % 16 else 4)
    got = dequant_gemm(*args, [], "", "", F32, "e2m1", config=config)
    check(got, partial(exact, *args, [], "", "", format="e2m1"), f"{m}x{n}, {groups} groups", HALF)


COPIED = {  # the columns of a span: 16 bytes of scales, or of zeros
    "nf4": (256, SCHEMES["nf4"]),
    "mxfp4": (512, SCHEMES["mxfp4"]),
    "nvfp4": (256, SCHEMES["nvfp4"]),
    "uint4 in float16": (1024, Scheme(U8, 4, group=128, offset=8, scale=HALF, a=HALF)),
    "uint4 with zeros": (1024, Scheme(U8, 4, high_first=True, group=64, zero=U8, scale=BF16)),
}


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("splits", [1, 2])
def test_scales_come_by_bulk_copies(name, splits, engine, problems, check):
    """A span's scales and zeros come at once, if each row has whole pieces; columns behind the last are 0."""
    columns, scheme = COPIED[name]
    m, n, bk = problems.size(20), problems.size(90), problems.pick(128, 256)
    k = columns * (2 * problems.pick(1, 2)) if splits > 1 else columns * problems.pick(1, 3)
    config = Config(problems.pick(8, 16), 64, bk, 128, 2, splits, cluster=splits > 1)
    a, bs, scales, zeros, *rest = arguments(problems, scheme, m, n, k, problems.pick(1, 2))
    args = (a.contiguous(), bs, [s.contiguous() for s in scales], [z.contiguous() for z in zeros], *rest)
    spec, _, tensors = prepare(DequantGemmArgs(*args, [], "", "", F32, scheme.format), MACHINES[1])
    found = with_copied_factors(*together(spec, tensors, config), config, MACHINES[1])
    assert span_of(found, config) == max(columns // bk, 1)
    got = dequant_gemm(*args, [], "", "", F32, scheme.format, config=config)
    check(got, partial(exact, *args, [], "", "", format=scheme.format), f"{m}x{n}x{k}, {config}", scheme.a)


UNROLLED = {
    "int4 in float16": (256, Scheme(I8, 4, group=128, scale=HALF, a=HALF)),
    "int4 in bfloat16": (256, Scheme(I8, 4, group=128, scale=BF16)),
    "uint4 with zeros": (128, Scheme(U8, 4, high_first=True, group=64, zero=BF16, scale=BF16)),
    "nf4": (128, SCHEMES["nf4"]),
}


def two_warpgroups(name, problems):
    """Random operands of a product of two warpgroups, the tiling, and what the compiler knows of it."""
    bk, scheme = UNROLLED[name]
    m, n, k = problems.size(70), problems.size(150), 1024 * problems.pick(1, 2)
    config = Config(64, 128, bk, 256, problems.pick(2, 3))
    a, bs, scales, zeros, *rest = arguments(problems, scheme, m, n, k)
    args = (a.contiguous(), bs, [s.contiguous() for s in scales], [z.contiguous() for z in zeros], *rest)
    spec, _, tensors = prepare(DequantGemmArgs(*args, [], "", "", F32, scheme.format), MACHINES[1])
    return args, scheme, config, with_copied_factors(spec, tensors, config, MACHINES[1])


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("name", UNROLLED)
def test_steps_of_a_span_are_unrolled(name, engine, problems, check):
    """Spans have two or four steps, with two groups each."""
    args, scheme, config, _ = two_warpgroups(name, problems)
    got = dequant_gemm(*args, [], "", "", F32, scheme.format, config=config)
    check(got, partial(exact, *args, [], "", "", format=scheme.format), f"{args[0].shape}, {config}", scheme.a)


@pytest.mark.parametrize("name", UNROLLED)
def test_unrolled_steps_are_reported(name, problems):
    _, scheme, config, spec = two_warpgroups(name, problems)
    remarks = dequant_matmul.on("cuda:sm_90a")(config, spec).schedule.remarks
    told = [remark for remark in remarks if remark.became == "beside the arithmetic on the result before"]
    assert len(told) == config.block_k // scheme.group


def test_scales_that_no_bulk_copy_brings(problems):
    """Rows that are no whole pieces, scales by columns, spans that a share of K does not hold, and other chips."""

    def span(groups=16, splits=1, machine=MACHINES[1], turned=False):
        a, bs, [scale], *rest = arguments(problems, SCHEMES["nf4"], 3, 16, 64 * groups)
        scale = scale.t().contiguous().t() if turned else scale.contiguous()
        spec, _, tensors = prepare(DequantGemmArgs(a.contiguous(), bs, [scale], *rest, [], "", "", F32, "nf4"), machine)
        config = Config(8, 64, 128, 128, 2, splits)
        return span_of(with_copied_factors(spec, tensors, config, machine), config)

    assert span() == 2 and span(splits=2) == 2
    assert span(17) == span(20, splits=2) == span(turned=True) == span(machine=MACHINES[0]) == 0


@pytest.mark.parametrize("engine", ["interpreter", "threads"], indirect=True)
@pytest.mark.parametrize("scheme", ["int8", "uint4 with zeros", "uint4 of large groups"])
def test_sums_of_clusters(scheme, engine, problems, check):
    """Blocks that share a sum over K add up the parts themselves; the weights come by bulk copies."""
    scheme = SCHEMES[scheme]
    for count in (2, 3, 8):
        config = Config(problems.pick(8, 16), 64, 128, 128, 2, splits=count, cluster=True)
        m, n, k = problems.size(20), problems.size(150), 128 * problems.pick(1, 4, 9)
        args = arguments(problems, scheme, m, n, k)
        args = (args[0].contiguous(), *args[1:])
        row = problems.tensor(n, dtype=torch.float32)
        got = dequant_gemm(*args, [row], "r", "v=add(acc0,x0);ret v", BF16, "", config=config)
        want = partial(exact, *args, [row.double()], "r", "v=add(acc0,x0);ret v")
        check(got, want, f"{m}x{n}x{k}, {config}")


@pytest.mark.parametrize("engine", ["interpreter", "threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", ["uint4 of large groups", "nf4", "int8"])
def test_blocks_that_share_rows(scheme, engine, problems, check):
    """Two blocks of a cluster load a tile of a once. Results leave in pieces of 16 bytes where rows have whole ones."""
    scheme = SCHEMES[scheme]
    for pieces in (True, False):
        config = Config(problems.pick(16, 32), 64, 128, 128, 3, shared=2, staged=True)
        m, n, k = problems.size(70), problems.size(200) // 8 * 8 + (8 if pieces else 7), 128 * problems.pick(1, 4, 8)
        args = arguments(problems, scheme, m, n, k)
        args = (args[0].contiguous(), *args[1:])
        full, dtype = problems.tensor(m, n, dtype=BF16), problems.pick(BF16, F32)
        got = dequant_gemm(*args, [full], "t", "v=add(acc0,x0);ret v", dtype, scheme.format, config=config)
        want = partial(exact, *args, [full.double()], "t", "v=add(acc0,x0);ret v", format=scheme.format)
        check(got, want, f"{m}x{n}x{k}, {config}", scheme.a)


def test_many_tiles_share_rows(problems):
    """Tiles of 256 rows are shared by pairs of blocks."""
    many = replace(LARGE, m=1024)
    chosen = config_for(many, H200)
    assert chosen.shared == 2 and chosen.staged and chosen.block_m == 256
    for single in (replace(many, m=128), replace(many, n=16384 - 128), replace(many, m=64)):
        assert config_for(single, H200).shared == 1 and not config_for(single, H200).staged
    assert all(config_for(many, machine).shared == 1 for machine in (CPU, GPUS[0], GPUS[2]))
    args = arguments(problems, SCHEMES["uint4 of large groups"], 3, 16, 1024)
    spec, _, _ = prepare(DequantGemmArgs(args[0].contiguous(), *args[1:], [], "", "", F32), H200)
    remarks = dequant_matmul.on("cuda:sm_90a")(chosen, spec).schedule.remarks
    assert any("loaded once for 2 blocks of a cluster" in remark.became for remark in remarks)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", ["uint4 of large groups", "nf4"])
@pytest.mark.parametrize("eighths", [*WIDTHS[1:-1], 3])
def test_widths_of_tiles(eighths, scheme, engine, problems, check):
    """Tiles of many rows have any width of a list, alone and in pairs. The last ones are cut off."""
    scheme, products = SCHEMES[scheme], problems.pick(1, 2)
    rows, shared = 32 * eighths // products, problems.pick(1, 2)
    config = Config(rows, 128, 128 // products, 256, 2, shared=shared, staged=shared == 2)
    m, n, k = rows - problems.size(20), 128 + 8 * problems.pick(-1, 0, 1), 128 * problems.pick(1, 2)
    args = arguments(problems, scheme, m, n, k, products)
    args = (args[0].contiguous(), *args[1:])
    row = problems.tensor(n, dtype=torch.float32)
    text = SWIGLU if products == 2 else "v=add(acc0,x0);ret v"
    got = dequant_gemm(*args, [row], "r", text, F32, scheme.format, config=config)
    want = partial(exact, *args, [row.double()], "r", text, format=scheme.format)
    check(got, want, f"{m}x{n}x{k}, {config}", scheme.a)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("scheme", ["int8", "uint4", "e5m2", "fp4 by rows"])
def test_by_mma(scheme, engine, problems, check, monkeypatch):
    """As on GPUs without wgmma."""
    scheme = SCHEMES[scheme]
    machine = Machine(Target("cuda", 80), 4)
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.dequant"), "machine_of", lambda x: machine)
    for m, n, k in ((3, 70, 384), (65, 130, 128)):
        args = arguments(problems, scheme, m, n, k)
        got = dequant_gemm(*args, [], "", "v=relu(acc0);ret v", F32, scheme.format)
        check(got, partial(exact, *args, [], "", "v=relu(acc0);ret v", format=scheme.format), f"{m}x{n}x{k}", scheme.a)


@pytest.mark.parametrize("shape", [(0, 3, 16), (3, 0, 16), (3, 4, 0), (1, 1, 2)])
def test_empty_and_tiny(shape, engine, problems):
    m, n, k = shape
    args = arguments(problems, Scheme(U8, 4, a=F32), m, n, k)
    got = dequant_gemm(*args, [], "", "", F32)
    torch.testing.assert_close(got, reference(*args, [], "", "", F32))


@pytest.mark.parametrize("engine", ["threads", "interpreter"], indirect=True)
def test_the_stride_of_a_single_row_means_nothing(engine, problems, check):
    """Words and scales are read as int32 only where rows begin at whole pieces; one row's stride says nothing."""
    for scheme in (Scheme(U8, 4, a=F32), SCHEMES["mxfp4 in float16"]):
        a, bs, scales, *rest = arguments(problems, scheme, 5, 1, 512)
        a, odd = a.contiguous(), problems.pick(1, 7, 513)
        loose = [
            torch.empty(b.numel() + 16, dtype=b.dtype).as_strided(b.shape, (odd, 1)).copy_(b) for b in (*bs, *scales)
        ]
        want = partial(exact, a, bs, scales, *rest, [], "", "", format=scheme.format)
        got = dequant_gemm(a, loose[:1], loose[1:], *rest, [], "", "", F32, scheme.format)
        check(got, want, f"{scheme.format} {odd}")


def test_products_whose_scales_differ_in_dtype(engine, problems):
    a = problems.tensor(5, 32, dtype=BF16)
    bs = [torch.randint(-9, 9, (12, 32), generator=problems.generator, dtype=I8) for _ in range(2)]
    scales = [problems.tensor(12, 1), problems.tensor(12, 1).to(BF16)]
    args = a, bs, scales, [], 8, False, 0, [], "", "v=mul(acc0,acc1);ret v", F32
    torch.testing.assert_close(dequant_gemm(*args), reference(*args), rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("products, kernels", [(3, 1), (5, 0)])
def test_many_products(products, kernels, engine, problems, check, monkeypatch):
    """Three share the rows of a tile as four do; for more than tiles hold it is plain torch."""
    made, compile = [], JITFunction.compile
    monkeypatch.setattr(JITFunction, "compile", lambda *args: made.append(args) or compile(*args))
    args = arguments(problems, SCHEMES["uint4"], 40, 64, 64, products)
    text = "".join(f"v{n}=add({f'v{n - 1}' if n else 'acc0'},acc{n});" for n in range(products))
    got = dequant_gemm(*args, [], "", f"{text}ret v{products - 1}", F32)
    check(got, partial(exact, *args, [], "", f"{text}ret v{products - 1}"), f"{products} products", HALF)
    assert len(made) == kernels


MACHINES = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (90, 132), (120, 170))]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: str(m.target))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pieces_are_the_step(machine, bits):
    for m, group, products in itertools.product((1, 8, 16, 64, 65, 1024), GROUPS, (1, 2)):
        config = config_for(Problem(torch.float16, m, 16384, 16384, products, bits, group, True), machine)
        spec = form_of(bits, group, products, torch.int32 if bits == 4 else torch.uint8)
        pieces, fields = spec.pieces(config), spec.storage.fields
        columns = [c for p in pieces for c in range(p.start, p.start + p.width)]
        assert columns == list(range(config.block_k))
        words = [w for p in pieces for w in range(*p.of(config.block_k // fields, config.block_k).indices(10**6))]
        assert words == list(range(config.block_k // fields))
        for piece in pieces:
            assert piece.width % 16 == 0 and piece.width % fields == 0
            assert piece.run == (piece.start + piece.width - 1) // piece.columns  # it lies in one run
            assert not group or piece.columns % group == 0 or group % piece.columns == 0
            if spec.scales_late(config):
                assert piece.width == piece.columns and spec.storage.groups(piece.columns) == 1


def test_sums_are_scaled_where_there_is_room_for_them():
    hopper = MACHINES[1]
    few, many = (
        config_for(Problem(torch.float16, m, 16384, 16384, 1, 4, 128, True), hopper) for m in (1, 1024)
    )  # fmt: skip
    assert form_of(4, 128).scales_late(few) and not form_of(4, 128).scales_late(many)
    assert not form_of(4, 0).scales_late(few)  # the scale of a whole row comes last of all
    assert not form_of(8, 128, words=torch.uint8).scales_late(few)
    assert form_of(4, 128).alternates(many) and form_of(4, 128).alternates(few)
    assert not form_of(8, 128, words=torch.uint8).alternates(few)


def test_factors_of_a_byte_are_converted_once():
    byte, half, wide = (Factor(dtype, False) for dtype in (torch.int8, torch.float16, torch.float32))
    assert form_of(4, 32).taken(byte) == torch.float16
    assert form_of(4, 32).taken(half) == torch.float16 and form_of(4, 32).taken(wide) == torch.float32
    assert form_of(2, 32, words=torch.uint8).taken(byte) == torch.int8
    small = Factor(torch.float8_e4m3fn, False)
    assert form_of(4, 16).taken(small) == torch.float16 and form_of(4, 16, dtype=BF16).taken(small) == BF16


CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (90, 132), (120, 170))]
H200 = GPUS[1]
LARGE = Problem(torch.bfloat16, 16, 16384, 16384, 1, 4, 128, True)


@pytest.mark.parametrize("machine", [CPU, *GPUS], ids=lambda m: str(m.target))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("products", [1, 2])
def test_every_problem_has_a_cut_that_fits(machine, dtype, bits, products):
    for m in (1, 8, 33, 64, 65, 200, 1024):
        for n, k in ((16384, 16384), (100, 100_032), (1, 64)):
            for group in (0, 16, 32, 64, 192, 1024):
                config = config_for(Problem(dtype, m, n, k, products, bits, group, True), machine)
                steps = config.block_k
                assert not group or steps % group == 0 or group % steps == 0  # steps hold whole groups or lie in one
                assert steps * bits % 8 == 0
                assert config.splits == 1 or config.splits * steps <= k
                if machine.is_gpu:
                    stage = config.block_m * steps * dtype.itemsize + products * config.block_n * steps * bits // 8
                    assert config.stages * stage + 1024 <= machine.target.shared_limit
                    assert config.block_m * config.block_n * products // config.threads <= 128


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("products", [3, 4, 5, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_many_products_have_a_cut_that_fits_or_none(machine, products, dtype):
    """Rows and columns of a step are what instructions and words take."""
    for m, bits, group in itertools.product((1, 16, 40, 64, 100, 1024), (1, 4, 8), (0, 16, 128, 192)):
        config = config_for(Problem(dtype, m, 4096, 192 * 128, products, bits, group, True), machine)
        if config is None:
            assert products > 4
            continue
        assert config.block_m % 8 == 0 and config.block_k % 16 == 0 and config.stages > 0
        assert not group or config.block_k % group == 0 or group % config.block_k == 0
        stage = config.block_k * (config.block_m * dtype.itemsize + products * config.block_n * bits // 8)
        assert config.stages * stage + 1024 <= machine.target.shared_limit
        wide = max(1, dtype.itemsize // 4)
        assert config.block_m * config.block_n * products * wide // config.threads <= 128


def test_few_rows_fill_the_machine():
    few = config_for(LARGE, H200)
    assert few.block_m == 16 and few.splits == 1
    for n, k, splits, cluster in (
        (1024, 8192, 8, True),
        (4096, 4096, 2, True),
        (8192, 8192, 2, True),
        (4096, 14336, 4, False),
    ):
        short = config_for(replace(LARGE, n=n, k=k), H200)
        assert (short.splits, short.cluster) == (splits, cluster), (n, k, short)
        assert short.splits * -(-n // short.block_n) > 0.9 * H200.num_sms
        assert not config_for(replace(LARGE, n=n, k=k), GPUS[0]).cluster
    assert config_for(replace(LARGE, m=1), H200).block_m == 8
    assert config_for(replace(LARGE, m=FEW_ROWS), H200).block_m == FEW_ROWS


def test_tiles_by_the_time_of_their_waves():
    """Tiles of few rows have 64, 128, 192 or 256 rows of weights, whichever take the shortest waves, and any 8 rows."""

    def tile(n, k=4096, m=64, **changes):
        chosen = config_for(replace(LARGE, m=m, n=n, k=k, **changes), H200)
        assert chosen.threads == 2 * chosen.block_n and chosen.stages >= 2
        return chosen.block_m, chosen.block_n

    assert tile(28672) == (64, 256) and tile(28672, m=20) == (24, 256) and tile(28672, group=256) == (64, 256)
    assert tile(22016) == (64, 192) and tile(18944, 3584, m=16) == (16, 192) and tile(28672, m=9) == (16, 256)
    assert tile(16384, 16384, m=40) == (40, 128) and tile(11008, m=96) == (96, 128) and tile(40960) == (64, 128)
    assert tile(8192, 8192) == (64, 64) and tile(8192, 8192, m=72) == (72, 64) and tile(6144, m=33) == (40, 64)
    assert tile(8192, 8192, m=16) == (16, 128) and tile(4096, 14336, m=16) == (16, 128)
    for n, k, m, splits, cluster in ((8192, 8192, 16, 2, True), (8192, 8192, 32, 2, True), (4096, 14336, 32, 4, False)):
        short = config_for(replace(LARGE, m=m, n=n, k=k), H200)
        assert (short.splits, short.cluster) == (splits, cluster), (n, k, m)
    few = replace(LARGE, m=60, n=28672, k=4096)
    for other in (
        replace(few, group=64), replace(few, bits=8), replace(few, coded=True), replace(few, products=2),
        replace(few, aligned=False), replace(few, zeros=True), replace(few, grouped=True),
    ):  # fmt: skip
        assert config_for(other, H200).threads < 512 and config_for(other, H200).block_m in (32, 64)
    assert config_for(few, GPUS[0]).threads < 512 and config_for(replace(few, m=97), H200).block_m == 128


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", ["uint4 of large groups", "int4 in float16"])
@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_tiles_of_few_rows(warpgroups, scheme, engine, problems, check):
    """Tiles have 64 rows of weights for each warpgroup, of which the last ones are missing, and any 8 rows of a."""
    scheme = UNROLLED[scheme][1] if scheme in UNROLLED else SCHEMES[scheme]
    rows = problems.pick(24, 32, 40, 48, 56)
    m, n, k = rows - problems.size(7), 64 * warpgroups - problems.size(50), 128 * problems.pick(2, 8)
    args = arguments(problems, scheme, m, n, k)
    args = (args[0].contiguous(), *args[1:])
    config = Config(rows, 64 * warpgroups, problems.pick(128, 256), 128 * warpgroups, 2)
    got = dequant_gemm(*args, [], "", "", F32, scheme.format, config=config)
    check(got, partial(exact, *args, [], "", "", format=scheme.format), f"{m}x{n}x{k}, {config}", scheme.a)


def test_many_rows_use_two_warpgroups_on_hopper_only():
    many = replace(LARGE, m=1024)
    assert config_for(many, H200).threads == 256 and config_for(many, H200).block_m == 256
    assert config_for(replace(many, products=2), H200).block_m <= 128
    widths = {m: config_for(replace(LARGE, m=m), H200).block_m for m in (200, 300, 320, 384, 500, 1024)}
    assert widths == {200: 224, 300: 160, 320: 160, 384: 192, 500: 256, 1024: 256}
    short = replace(LARGE, n=5120, k=5120)
    for given, block_m, block_k in ((short, 96, 256), (replace(short, coded=True, group=64), 96, 128)):
        chosen = config_for(replace(given, m=200), H200)
        assert (chosen.block_m, chosen.block_k) == (block_m, block_k)
    assert config_for(replace(short, m=200, group=64), H200).block_m == 128
    assert config_for(replace(LARGE, m=264, n=11008, k=4608), H200).block_m == 96
    for other in (config_for(many, GPUS[0]), config_for(replace(many, aligned=False), H200)):
        assert other.threads == 128 and other.block_m == 64
