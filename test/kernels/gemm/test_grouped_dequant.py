# SPDX-License-Identifier: Apache-2.0
"""Groups of rows by matrices of few bits, against float64."""

import importlib
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import grouped_dequant
from torch_tile.kernels.gemm.packed import Problem
from torch_tile.kernels.gemm.tiling import Config

U8, I8, HALF, BF16, F32, F64 = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64
SCHEMES = {  # words, bits, columns of a run, scale, zero, format, a
    "mxfp4": (U8, 4, 32, torch.float8_e8m0fnu, None, "e2m1", BF16),
    "int4": (U8, 4, 128, HALF, U8, "", HALF),
    "int4 by rows": (I8, 4, 0, F32, None, "", BF16),
    "int8": (I8, 8, 0, F32, None, "", HALF),
    "e4m3": (torch.float8_e4m3fn, 8, 128, F32, None, "", BF16),
    "nf4": (U8, 4, 64, F32, None, "nf4", HALF),
    "nf4 in float32": (U8, 4, 64, F32, None, "nf4", F32),
}
# gpt-oss's experts: biases of groups, and a SwiGLU of clamped operands.
CLAMPED = (
    "a=add(acc0,x0);b=add(acc1,x1);g=min(a,7.0);c=max(b,-7.0);u=min(c,7.0);t=mul(g,1.702);s=sigmoid(t);v=mul(g,s);"
    "w=add(u,1.0);y=mul(v,w);ret y"
)


def arguments(problems, scheme, groups, m, n, k, products, interleaved=False):
    """Of `grouped_dequant_gemm`, up to the auxiliary operands; matrices of several products may share a tensor."""
    words, bits, run, scale, zero, format, dtype = SCHEMES[scheme]
    count = products if interleaved else 1
    shape = (groups, n * count, k * bits // 8)
    if words.is_floating_point:
        stored = [problems.tensor(*shape, layout="dense").to(words) for _ in range(products // count)]
    else:
        stored = [
            torch.randint(0, 256, shape, generator=problems.generator, dtype=U8).view(words)
            for _ in range(products // count)
        ]
    runs = (groups, n, k // run if run else 1)
    of = lambda: problems.tensor(*runs, layout=problems.pick("dense", "turned", "slice")).abs()  # noqa: E731
    bs = [b[:, i::count] for b in stored for i in range(count)]
    scales = [(of() + 0.5).to(scale) for _ in bs]
    zeros = [(of() * 3).to(zero) for _ in bs] if zero else []
    a = problems.tensor(m, k, dtype=dtype) / 8
    return (a, bs, scales, zeros, problems.ends(groups, m), bits, False, 0), format


def exact(a, bs, scales, zeros, offsets, bits, high, offset, aux, kinds, text, format):
    wide = [x.double() for x in scales], zeros, offsets, bits, high, offset, [x.double() for x in aux]
    return grouped_dequant.reference(a.double(), bs, *wide, kinds, text, F64, format)


def test_each_group_has_its_matrix():
    a, b = torch.randn(9, 4, dtype=F64), torch.randint(-9, 9, (3, 5, 4), dtype=I8)
    scale, bias = torch.rand(3, 5, 1), torch.randn(3, 5)
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    got = grouped_dequant.reference(a, [b], [scale], [], offsets, 8, False, 0, [bias], "g", "v=add(acc0,x0);ret v", F64)
    wide = (b * scale).double()
    want = torch.cat([a[:2] @ wide[0].T + bias[0], a[2:7] @ wide[2].T + bias[2], torch.zeros(2, 5)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_scales_beyond_the_operand(engine, problems, check):
    """Tiles of one matrix are summed anew. Its codes are 6 to 8, whose numbers are small or 0."""
    args, format = arguments(problems, "nf4", 3, 60, 40, 256, problems.pick(1, 2))
    for b, scale in zip(args[1], args[2], strict=True):
        codes = torch.randint(6, 9, (*b.shape[1:], 2), generator=problems.generator)
        b[1] = (codes[..., 0] * 16 + codes[..., 1]).to(U8)
        scale[1] *= 1e5
    aux, text = [], f"v=add(acc0,acc{len(args[1]) - 1});ret v"
    config = Config(128, 128, 128, 256, 2)
    got = grouped_dequant.grouped_dequant_gemm(*args, aux, "", text, F32, format, config=config)
    check(got, partial(exact, *args, aux, "", text, format), f"{len(args[1])} products", HALF)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_problems(scheme, rounds, problems, check):
    unit, dtype = max(SCHEMES[scheme][2], 8), SCHEMES[scheme][-1]
    for number in rounds(3):
        config = problems.pick(None, Config(8, 64, 64, 128, 2), Config(16, 64, 64, 128, 2))
        groups, m, n = problems.size(6), problems.size(60), problems.size(90)
        k, products = unit * problems.size(300 // unit), problems.pick(1, 2)
        args, format = arguments(problems, scheme, groups, m, n, k, products, problems.pick(True, False))
        aux = [problems.tensor(groups, n) for _ in range(products)]
        text = CLAMPED if products == 2 else "v=add(acc0,x0);ret v"
        epilogue = aux, "g" * products, text
        got = grouped_dequant.grouped_dequant_gemm(*args, *epilogue, F32, format, config=config)
        what = f"{number}: {args[4].tolist()} {m}x{n}x{k}, {products} products, {config}"
        check(got, partial(exact, *args, *epilogue, format), what, dtype, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", ["mxfp4", "int4"])
def test_aligned_rows(scheme, engine, problems, check):
    """Bulk copies and wgmma on Hopper, which ragged sizes refuse."""
    groups, m, n, k = problems.size(4), problems.size(70), problems.size(150), 128 * problems.pick(1, 3)
    args, format = arguments(problems, scheme, groups, m, n, k, 1)
    args = (args[0].contiguous(), *args[1:])
    weight = problems.tensor(m, 1, dtype=BF16)
    got = grouped_dequant.grouped_dequant_gemm(*args, [weight], "c", "v=mul(acc0,x0);ret v", BF16, format)
    check(got, partial(exact, *args, [weight], "c", "v=mul(acc0,x0);ret v", format), f"{m}x{n}x{k}", own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    """As on GPUs without wgmma."""
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(
        importlib.import_module("torch_tile.kernels.gemm.grouped_dequant"), "machine_of", lambda x: machine
    )
    args, format = arguments(problems, "mxfp4", 3, 40, 70, 128, 2, True)
    aux = [problems.tensor(3, 70) for _ in range(2)]
    got = grouped_dequant.grouped_dequant_gemm(*args, aux, "gg", CLAMPED, F32, format)
    check(got, partial(exact, *args, aux, "gg", CLAMPED, format), str(capability), BF16, own=True)


def test_nothing_to_multiply(engine, problems):
    for groups, m, n, k in ((3, 0, 4, 8), (3, 4, 0, 8), (3, 4, 5, 0), (0, 4, 5, 8)):
        a, b = torch.randn(m, k), torch.zeros(groups, n, k, dtype=I8)
        offsets = torch.full((groups,), m, dtype=torch.int32)
        got = grouped_dequant.grouped_dequant_gemm(a, [b], [], [], offsets, 8, False, 0, [], "", "", F32)
        assert torch.equal(got, torch.zeros(m, n))


@pytest.mark.parametrize("engine", ["cpu", "threads"], indirect=True)
def test_offsets_that_make_no_sense_reach_nothing_else(engine, problems):
    (a, bs, scales, zeros, _, *fields), format = arguments(problems, "int8", 3, 20, 24, 16, 1)
    for values in ([-(2**31), -7, 12], [2**31 - 1] * 3):
        guarded = torch.full((22, 24), 7.0)
        offsets = torch.tensor(values, dtype=torch.int32)
        grouped_dequant.grouped_dequant_gemm(
            a, bs, scales, zeros, offsets, *fields, [], "", "", F32, format, out=guarded[1:21]
        )
        assert guarded[0].eq(7).all() and guarded[21].eq(7).all()


def test_without_a_tiling_it_is_plain_torch(monkeypatch, problems, check):
    monkeypatch.setattr(grouped_dequant, "tiling_for", lambda problem, groups, machine: None)
    args, format = arguments(problems, "int4", 3, 20, 24, 128, 1)
    got = grouped_dequant.grouped_dequant_gemm(*args, [], "", "", F32, format)
    check(got, partial(exact, *args, [], "", "", format), f"{args[4].tolist()}", HALF)


def test_tilings_are_for_the_rows_of_a_group():
    machine = Machine(Target("cuda", 90), 132)
    config = grouped_dequant.tiling_for(Problem(BF16, 64, 2880, 2880, 2, 4, 32, True), 32, machine)
    assert config.block_m == 8 and config.splits == 1 and not config.cluster
