# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, and the gradients of their matrices."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import grouped as by_rows, grouped_wgrad as by_k
from torch_tile.kernels.gemm.tiling import Config, Problem, config_for
from torch_tile.kernels.row_groups import PLANNERS

BF16, F64 = torch.bfloat16, torch.float64
FORMS = {  # dtype, result, epilogue, kinds, number of bs
    "plain": (torch.float32, torch.float32, "", "", 1),
    "swiglu": (torch.float32, torch.float32, "g=silu(acc0);y=mul(g,acc1);ret y", "", 2),
    "every_kind": (
        *(torch.float32, torch.float16, "a=mul(acc0,x0);b=add(a,x1);c=sub(b,x2);d=div(c,x3);e=add(d,x4);ret e"),
        *("trcsg", 1),
    ),
    "bfloat16": (BF16, BF16, "v=mul(acc0,x0);ret v", "c", 1),
    "masked": (BF16, BF16, "v=where(x0,0.0,acc0);w=mul(v,x1);ret w", "cc", 1),  # x0: truth values
    "float64": (F64, F64, "v=tanh(acc0);w=add(v,x0);ret w", "r", 1),
}
SMALL = Config(block_m=16, block_n=32, block_k=16)
TURNS = replace(SMALL, panel=2, blocks=3)
CUTS = (
    SMALL,
    TURNS,
    replace(SMALL, staged=True, panel=2),
    replace(TURNS, block_m=128, block_n=48),
    replace(SMALL, transposed=True, staged=True),
    replace(TURNS, transposed=True),
)
ALIGNED = (
    Config(64, 64, 64, 128, 3, panel=2, staged=True),
    Config(128, 128, 64, 256, 2, panel=2, staged=True, blocks=3),
    Config(16, 64, 64, 128, 3, staged=True, transposed=True),
    Config(16, 64, 64, 128, 2),
)


def exact(a, bs, offsets, aux, *rest):
    wide = [[x.double() for x in xs] for xs in (bs, aux)]
    return by_rows.reference(a.double(), wide[0], offsets, wide[1], *rest, F64)


def operands(problems, spec, groups, m, n, k, layout=None):
    dtype, _, _, kinds, count = FORMS[spec]
    a = problems.tensor(m, k, dtype=dtype, layout=layout)
    bs = [problems.tensor(groups, k, n, dtype=dtype, layout=layout or "turned") for _ in range(count)]
    shapes = {"t": (m, n), "r": (n,), "c": (m, 1), "s": (1,), "g": (groups, n)}
    aux = [problems.tensor(*shapes[kind], dtype=dtype) for kind in kinds]
    if spec == "masked":
        aux[0] = aux[0] > 0
    aux = [x.abs() + 1 if kind == "s" else x for x, kind in zip(aux, kinds, strict=True)]
    return a, bs, problems.ends(groups, m), aux


def small(dtype):
    """The dtype whose tolerance counts: the operands', where it is coarser than the result's may be."""
    return dtype if dtype.itemsize < 4 else None


def test_each_group_has_its_matrix():
    a, b, offsets = torch.randn(9, 3, dtype=F64), torch.randn(4, 3, 5, dtype=F64), torch.tensor([2, 2, 7, 8])
    got = by_rows.reference(a, [b], offsets, [], "", "v=add(acc0,1.0);ret v", F64)
    want = torch.cat([a[:2] @ b[0], a[2:7] @ b[2], a[7:8] @ b[3], torch.zeros(1, 5, dtype=F64)]) + 1
    torch.testing.assert_close(got, want)
    grad = torch.randn(9, 5, dtype=F64)
    got = by_k.reference(a, grad, offsets, F64)
    want = [a[low:high].T @ grad[low:high] for low, high in ((0, 2), (2, 2), (2, 7), (7, 8))]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.slow
@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, rounds, problems, check):
    dtype, out_dtype, epilogue, kinds, _ = FORMS[spec]
    for number in rounds(8):
        config = problems.pick(*CUTS) if number % 4 else None
        groups, m, n, k = problems.size(9), problems.size(90), problems.size(70), problems.size(90)
        args = operands(problems, spec, groups, m, n, k, None if number % 4 else problems.pick("slice", "gaps"))
        got = by_rows.grouped_gemm(*args, kinds, epilogue, out_dtype, config=config)
        assert got.dtype == out_dtype
        check(
            got,
            partial(exact, *args, kinds, epilogue),
            f"{spec} {args[2].tolist()} {m}x{n}x{k} {config}",
            small(dtype),
            own=True,
        )


@pytest.mark.parametrize("config", ALIGNED, ids=str)
def test_aligned_rows(config, rounds, problems, check):
    """Bulk copies and wgmma on Hopper."""
    for _ in rounds(3):
        groups, m, n, k = problems.size(6), problems.size(300), 8 * problems.size(20), 64 * problems.pick(1, 3, 4)
        args = operands(problems, "bfloat16", groups, m, n, k, "dense")
        args = (args[0], [problems.tensor(groups, n, k, dtype=BF16, layout="dense").mT], *args[2:])
        got = by_rows.grouped_gemm(*args, *FORMS["bfloat16"][3:1:-1], BF16, config=config)
        check(got, partial(exact, *args, *FORMS["bfloat16"][3:1:-1]), f"{args[2].tolist()} {m}x{n}x{k}", BF16, own=True)


def test_more_groups_than_are_planned_at_a_time(problems, check):
    args = operands(problems, "plain", 2 * PLANNERS + 3, 700, 8, 5)
    got = by_rows.grouped_gemm(*args, "", "", torch.float32, config=SMALL)
    check(got, partial(exact, *args, "", ""), "many groups")
    want = partial(by_k.reference, args[0].double(), args[0].double(), args[2], F64)
    check(by_k.k_grouped_gemm(args[0], args[0], args[2], torch.float32, config=SMALL), want, "many groups")


def test_offsets_that_make_no_sense_reach_nothing_else(engine, problems):
    """The interpreters of threads and tiles report what is read or written outside."""
    unsorted = [] if engine == "threads" else [[50, 3, 2**31 - 1], [12, -7, -(2**31)]]  # several blocks write a row
    for values in ([-(2**31), -7, 12], [2**31 - 1] * 3, *unsorted):
        a, bs, _, _ = operands(problems, "plain", 3, 40, 24, 9)
        offsets = torch.tensor(values, dtype=torch.int32)
        guarded = torch.full((42, 24), 7.0)
        by_rows.grouped_gemm(a, bs, offsets, [], "", "", torch.float32, config=SMALL, out=guarded[1:41])
        assert guarded[0].eq(7).all() and guarded[41].eq(7).all()
        assert by_k.k_grouped_gemm(a, a, offsets, torch.float32, config=SMALL).isfinite().all()


def test_without_a_cut_it_is_plain_torch(monkeypatch, problems, check):
    """With every kind of operand as it was given."""
    monkeypatch.setattr(by_rows, "tiling_for", lambda problem, machine: None)
    args = operands(problems, "every_kind", 3, 40, 24, 9)
    _, out_dtype, epilogue, kinds, _ = FORMS["every_kind"]
    got = by_rows.grouped_gemm(*args, kinds, epilogue, out_dtype)
    check(got, partial(exact, *args, kinds, epilogue), f"{args[2].tolist()}")


def test_nothing_to_multiply(engine, problems):
    for groups, m, n, k in ((3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0), (0, 4, 5, 6)):
        a, b = torch.ones(m, k), torch.ones(groups, k, n)
        offsets = torch.full((groups,), m, dtype=torch.int32)
        got = by_rows.grouped_gemm(a, [b], offsets, [], "", "v=add(acc0,2.0);ret v", torch.float32)
        assert torch.equal(got, torch.full((m, n), 2.0))
        assert torch.equal(
            by_k.k_grouped_gemm(a, torch.ones(m, n), offsets, torch.float32), b.new_zeros((groups, k, n))
        ) or not (m and n and k)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F64], ids=str)
def test_products_over_rows(dtype, rounds, problems, check):
    tilings = (None, SMALL, TURNS, replace(SMALL, staged=True), Config(64, 64, 32, 128, 2, staged=True))
    for number in rounds(6):
        config = tilings[number % 5]
        groups, rows, m, n = problems.size(7), problems.size(150), problems.size(70), problems.size(90)
        a, b = (problems.tensor(rows, columns, dtype=dtype) for columns in (m, n))
        offsets = problems.ends(groups, rows)
        got = by_k.k_grouped_gemm(a, b, offsets, dtype, config=config)
        want = partial(by_k.reference, a.double(), b.double(), offsets, F64)
        check(got, want, f"{offsets.tolist()} {m}x{n}x{rows} {config}", small(dtype), own=True)


def test_aligned_products_over_rows(rounds, problems, check):
    """Bulk copies and wgmma on Hopper, rows of others masked in the last step; these may hold anything."""
    wide = Config(128, 128, 64, 256, 2, staged=True)
    for config in (Config(64, 64, 64, 128, 3, staged=True), wide, replace(wide, blocks=3, panel=2)):
        groups, rows, m, n = problems.size(4), problems.size(300), 8 * problems.size(20), 8 * problems.size(20)
        a, b = (problems.tensor(rows, columns, dtype=BF16, layout="dense") for columns in (m, n))
        offsets = problems.ends(groups, rows)
        want = partial(by_k.reference, a.double(), b.double(), offsets, F64)
        a[int(offsets[-1]) :] = torch.nan
        b[int(offsets[-1]) :] = torch.inf
        got = by_k.k_grouped_gemm(a, b, offsets, BF16, config=config)
        check(got, want, f"{offsets.tolist()} {m}x{n}x{rows} {config}", BF16, own=True)


def test_cuts_are_of_groups_not_of_all_rows():
    """Tiles as high as groups are, a shared sum never, and on Hopper blocks that take tile after tile."""
    hopper = Machine(Target("cuda", 90), 132)
    cut = lambda groups, rows: by_rows.tiling_for(Problem(BF16, groups, rows, 4096, 4096, 2, False, True), hopper)  # noqa: E731
    few, some, many = cut(128, 256), cut(128, 128 * 30), cut(8, 8 * 2048)
    assert few.block_m == 16 and some.block_m == 48 and many.block_m == 128 and many.blocks == 132
    assert cut(128, 40).splits == 1  # fewer rows than groups
    # Half a tile of each group is empty, so tiles are lower than those of as many rows in a batch.
    cpu, problem = Machine(Target("cpu"), 2), Problem(BF16, 16, 16 * 128, 1024, 1024)
    assert by_rows.tiling_for(problem, cpu).block_m < config_for(replace(problem, m=128), cpu).block_m
    assert by_rows.tiling_for(Problem(torch.float32, 4, 20, 64, 8192), Machine(Target("cpu"), 64)).splits == 1
