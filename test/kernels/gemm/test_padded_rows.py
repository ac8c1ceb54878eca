# SPDX-License-Identifier: Apache-2.0
"""Scales that bulk copies cannot read where they lie: the copy in front of a product, and the products behind it."""

import importlib
import math
from functools import partial

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from test.kernels.gemm import test_grouped_scaled, test_grouped_scaled_wgrad, test_masked_scaled, test_scaled
from torch_tile.hardware import Target
from torch_tile.inductor.codegen.symbolic_launch import Symbols, TensorMeta, record
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.args import ScaledGemmArgs
from torch_tile.kernels.gemm.grouped_scaled import as_one_product, grouped_scaled_gemm
from torch_tile.kernels.gemm.grouped_scaled_wgrad import k_grouped_scaled_gemm
from torch_tile.kernels.gemm.masked_scaled import masked_scaled_gemm
from torch_tile.kernels.gemm.padded_rows import START, in_padded_rows
from torch_tile.kernels.gemm.scaled import Problem, copies_pay, prepare, scaled_gemm
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.norm.quantize import empty_scales
from torch_tile.runtime.launch_plan import planning

HOPPER, GPU = (Machine(Target("cuda", 90), count) for count in (132, 4))
E4M3, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16


def odd(problems, *shape):
    """Positive scales whose memory no bulk copy can read: by rows or columns, inside of more, or with gaps."""
    kind = problems.pick("rows", "columns", "gaps", "inside")
    if kind == "columns":
        shape = (*shape[:-2], shape[-1], shape[-2])
    width = {"gaps": 2, "inside": 1}.get(kind, 1) * shape[-1] + (kind == "inside")
    stored = problems.tensor(*shape[:-1], width + (width % START == 0), layout="dense").abs() + 0.1
    found = stored[..., : 2 * shape[-1] : 2] if kind == "gaps" else stored[..., : shape[-1]]
    return found.mT if kind == "columns" else found


@pytest.fixture
def always(monkeypatch):
    """Copy scales of any product."""
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.scaled"), "copies_pay", lambda *_: True)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_begin_at_16_bytes_and_nothing_is_written_behind_them(count, engine, rounds, problems):
    machine = GPU if engine in ("threads", "text") else Machine(Target("cpu"), 2)
    for _ in rounds(4):
        leading = [problems.pick((), (problems.size(3),)) for _ in range(count)]
        tensors = [problems.tensor(*first, problems.size(20), problems.size(300)) for first in leading]
        outs = in_padded_rows(tensors, machine)
        assert len({out.untyped_storage().data_ptr() for out in outs}) == 1
        for x, out in zip(tensors, outs, strict=True):
            assert torch.equal(out, x)
            assert out.stride(-1) == 1 and out.stride(-2) % START == 0 and out.data_ptr() % (4 * START) == 0
            padding = out.as_strided((out[..., 0].numel(), -out.shape[-1] % START), (out.stride(-2), 1),
                                     out.storage_offset() + out.shape[-1])  # fmt: skip
            assert padding.isnan().all()


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("runs", [4, 5, 6, 7])
@pytest.mark.parametrize("rest", [0, 1, 2, 3])
def test_products_of_any_rows_and_runs(rest, runs, engine, problems, check, always):
    m, n, k = 64 + rest + 4 * problems.size(4), 16 * problems.size(12), 128 * runs - problems.pick(0, 64)
    a, b = (problems.tensor(rows, k, layout="dense").to(E4M3) for rows in (m, n))
    of_a, of_b = problems.pick((m, -(-n // 128)), (m, -(-n // 128)), (m, n), (-(-m // 128), n))
    scale_a, scale_b = odd(problems, of_a, runs), odd(problems, of_b, runs)
    config = problems.pick(
        None, Config(128, 136, 128, 256, 3, staged=True, blocks=2), Config(72, 64, 128, 128, 3, transposed=True)
    )
    args = a, b.mT, scale_a, scale_b.mT
    got = scaled_gemm(*args, [], "", "", F32, config=config)
    want = partial(test_scaled.exact, *args, [], "", "")
    check(got, want, f"{m}x{n}x{k}, {scale_a.shape} {scale_a.stride()}, {scale_b.stride()}, {config}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_groups_of_rows(engine, problems, check, always):
    groups, m, n, runs = 3, problems.size(150), 16 * problems.size(10), problems.pick(2, 3, 5)
    a, b = problems.tensor(m, 128 * runs, layout="dense"), problems.tensor(groups, n, 128 * runs, layout="dense")
    scale_a, scale_b = odd(problems, m, runs), odd(problems, groups, problems.pick(n, -(-n // 128)), runs)
    args = a.to(E4M3), b.to(E4M3).mT, scale_a, scale_b.mT, problems.ends(groups, m)
    got = grouped_scaled_gemm(*args, [], "", "", F32)
    want = partial(test_grouped_scaled.exact, *args, [], "", "")
    check(got, want, f"{args[-1].tolist()} {m}x{n}x{runs}, {scale_a.stride()}, {scale_b.stride()}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_the_first_rows_of_groups(engine, problems, check, always):
    groups, m, n, runs = 2, problems.size(75), 16 * problems.size(10), problems.pick(2, 3, 5)
    a, b = (problems.tensor(groups, rows, 128 * runs, layout="dense").to(E4M3) for rows in (m, n))
    scale_a, scale_b = odd(problems, groups, m, runs), odd(problems, groups, -(-n // 128), runs)
    counts = torch.tensor([problems.random.randint(0, m) for _ in range(groups)], dtype=torch.int32)
    args = a, b.mT, scale_a, scale_b.mT, counts
    got = masked_scaled_gemm(*args, [], "", "", F32)
    want = partial(test_masked_scaled.exact, *args, [], "", "")
    check(got, want, f"{counts.tolist()} {m}x{n}x{runs}, {scale_a.stride()}, {scale_b.stride()}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_groups_of_columns(engine, problems, check, always):
    m, n, runs = problems.size(150), 16 * problems.size(8), problems.pick(3, 5, 6)
    a, b = (problems.tensor(rows, 128 * runs, layout="dense").to(E4M3) for rows in (m, n))
    scale_a, scale_b = odd(problems, 1, m, runs), odd(problems, 1, n, runs)
    args = a, b.mT, scale_a, scale_b.mT, test_grouped_scaled_wgrad.ends_of(problems, ("runs", "runs"), 3, 128 * runs)
    got = k_grouped_scaled_gemm(*args, F32)
    want = partial(test_grouped_scaled_wgrad.exact, *args)
    check(got, want, f"{args[-1].tolist()} {m}x{n}x{runs}, {scale_a.stride()}, {scale_b.stride()}", F32, own=True)


def planned(m, n, k, column_major, *pads):
    """Whether scales of a product by blocks are copied. `pads`: what lies between rows of scales."""
    runs = -(-k // 128)
    of_a, of_b = (torch.empty(x, y + pad) for (x, y), pad in zip(((runs, m), (-(-n // 128), runs)), pads, strict=True))
    scale_a = of_a[:, :m].mT if column_major else torch.empty(m, runs)
    a, b, out = torch.empty(m, k, dtype=E4M3), torch.empty(n, k, dtype=E4M3), torch.empty(m, n, dtype=BF16)
    scale_b = of_b[:, :runs]
    with planning() as plan:
        for each in (a, b, scale_a, scale_b, out):
            plan.add(each)
        spec, problem, _ = prepare(ScaledGemmArgs(a, b.mT, scale_a, scale_b.mT, [], "", "", BF16), HOPPER, out)
    plan.refuse_torch()
    assert len(plan.launches) == len(plan.made) == spec.copied
    return spec.copied, problem.bulk


@pytest.mark.parametrize(
    "sizes, column_major, pads, copied",
    [
        ((1000, 4608, 7168), True, (0, 0), False),  # aligned as they come
        ((1001, 4608, 7168), True, (0, 0), True),
        ((1001, 4608, 7168), True, (3, 0), False),  # rows of scales begin at 16 bytes, wherever they end
        ((1000, 4608, 7168), False, (0, 0), True),
        ((4096, 7168, 2176), True, (0, 0), True),  # 17 runs
        ((4096, 7168, 2176), True, (0, 3), False),
        ((1, 7168, 7168), False, (0, 0), False),
        ((64, 7168, 7168), False, (0, 0), False),  # few rows wait for memory
        ((66, 1024, 1024), True, (0, 0), False),
    ],
)
def test_scales_are_copied_where_that_pays(sizes, column_major, pads, copied):
    found, bulk = planned(*sizes, column_major, *pads)
    assert found == copied
    assert bulk or not copied


@pytest.mark.parametrize("leading", [(65,), (1001,), (3, 337)], ids=str)
def test_scales_of_quantised_rows_are_read_where_they_lie(leading):
    m, n, k = math.prod(leading), 4608, 2176
    scales = empty_scales(torch.empty(*leading, k), 128).view(m, 17), empty_scales(torch.empty(n, k), 128)
    assert all(scale.stride(0) == 1 and scale.stride(1) % START == 0 for scale in scales)
    a, b, out = torch.empty(m, k, dtype=E4M3), torch.empty(n, k, dtype=E4M3), torch.empty(m, n, dtype=BF16)
    with planning() as plan:
        spec, problem, _ = prepare(ScaledGemmArgs(a, b.mT, scales[0], scales[1].mT, [], "", "", BF16), HOPPER, out)
    assert problem.bulk and not spec.copied and not plan.launches


def test_groups_pay_by_their_rows():
    def pays(groups, m, n):
        problem = Problem(E4M3, m, n, 2048, True, staged=True, bulk=False, fetched=True)
        return copies_pay(as_one_product(groups, problem), HOPPER)

    assert pays(8, 8192, 7168) and pays(64, 8192, 7168) and not pays(1, 16, 2048)


def test_rows_may_be_a_symbol(monkeypatch):
    """A product of any number of rows: the workspace grows with them, and no guard asks for them."""
    env = ShapeEnv()
    rows = env.create_symbol(4095, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.scaled"), "machine_of", lambda x: HOPPER)

    def form(dtype, *size):
        return TensorMeta(dtype, torch.device("cpu"), size, (size[1], 1))

    def run(given):
        a, b, scale_a, scale_b, out = given
        scaled_gemm(a, b.mT, scale_a, scale_b.mT, [], "", "", BF16, out=out)

    n, k = 4096, 2176
    forms = form(E4M3, rows, k), form(E4M3, n, k), form(F32, rows, 17), form(F32, 32, 17), form(BF16, rows, n)
    symbols = Symbols(env)
    plan = record(run, forms, symbols).plan
    assert [launch.function.__name__ for launch in plan.launches] == ["pad_rows", "persistent_scaled_matmul"]
    (room,) = plan.made
    theirs = {ours: each for each, ours in symbols.here.items()}
    for m in (4095, 4096, 4097):
        assert room.shape[0].node.expr.subs(theirs).subs(rows, m) == 17 * -(-m // 4) * 4 + 32 * 20
